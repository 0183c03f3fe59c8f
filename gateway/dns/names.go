package dns

import (
	"container/list"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"sync"

	"airlock.dev/airlock"
)

// Names are the synthetic addresses of one door: each name has one of IPv4
// and one of IPv6, which lead nowhere but through the gateway, which looks
// here for the name that a flow is for. What an address means is therefore
// never for the sandbox, or for who answers its queries, to say.
//
// A name keeps its addresses for the life of the door, unless there are too
// many names: then the one that was asked for longest ago, and that no flow
// is open to, is forgotten. Its addresses mean nothing then, and are given
// to another name only when all others of the network had their turn.
type Names struct {
	// Bound is told of each name that is given addresses, before they are used.
	// It is set before anything else is called, and may stay nil.
	Bound func(name string, place uint32)

	v4, v6 netip.Prefix
	places uint32 // addresses that can be given, each of them the same in both networks
	most   int

	mu     sync.Mutex
	next   uint32 // place to give, from 0
	byName map[string]*binding
	byTurn map[uint32]*binding
	idle   list.List // of *binding, without flows; the one asked for last in front
}

// binding is a name with its place.
type binding struct {
	name  string
	place uint32
	flows int
	elem  *list.Element // nil while there are flows
}

// NewNames returns an empty table for at most that many names. The networks
// are those that addresses are from: v4 of 8 to 24 bits, v6 of 64; v6 may be
// the zero Prefix, and names have no IPv6 address then. v4 must have room for
// eight times the names. The error is airlock.Invalid.
func NewNames(v4, v6 netip.Prefix, most int) (*Names, error) {
	if !v4.Addr().Is4() || v4.Bits() < 8 || v4.Bits() > 24 {
		return nil, airlock.Invalidf("v4", "give an IPv4 network of 8 to 24 bits, like 198.18.0.0/15", "%v has no room for synthetic addresses", v4)
	}
	if v6 != (netip.Prefix{}) && (!v6.Addr().Is6() || v6.Addr().Is4In6() || v6.Bits() != 64) {
		return nil, airlock.Invalidf("v6", "give an IPv6 network of 64 bits, or none", "%v has no room for synthetic addresses", v6)
	}
	places := uint32(1)<<(32-v4.Bits()) - 2 // neither the first nor the last: they have meanings
	if most < 1 || int64(most)*8 > int64(places) {
		return nil, airlock.Invalidf("most", fmt.Sprintf("give a number from 1 to %d, or a larger network", places/8), "%d names have no room in %v", most, v4)
	}
	return &Names{
		v4: v4.Masked(), v6: v6.Masked(), places: places, most: most,
		// What a sandbox remembers of the door that it had before, when it
		// was forked or the gateway was killed, is hardly ever in use here.
		next:   rand.Uint32N(places),
		byName: map[string]*binding{}, byTurn: map[uint32]*binding{},
	}, nil
}

// Bind returns the addresses of a name, and gives it some if it has none. v6
// is not valid if there is no network for it. The error is
// airlock.Exhausted: flows are open to as many names as there may be.
func (n *Names) Bind(name string) (v4, v6 netip.Addr, err error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	b := n.byName[name]
	switch {
	case b != nil && b.elem != nil:
		n.idle.MoveToFront(b.elem)
	case b == nil:
		if len(n.byName) >= n.most {
			oldest := n.idle.Back()
			if oldest == nil {
				return netip.Addr{}, netip.Addr{}, &airlock.Error{Code: airlock.Exhausted,
					Message: fmt.Sprintf("connections are open to %d names and that is the most", n.most), Hint: "close some"}
			}
			gone := n.idle.Remove(oldest).(*binding)
			delete(n.byName, gone.name)
			delete(n.byTurn, gone.place)
		}
		for n.byTurn[n.next] != nil {
			n.next = (n.next + 1) % n.places
		}
		b = &binding{name: name, place: n.next}
		n.next = (n.next + 1) % n.places
		b.elem = n.idle.PushFront(b)
		n.byName[name], n.byTurn[b.place] = b, b
		if n.Bound != nil {
			n.Bound(name, b.place)
		}
	}
	v4, v6 = n.addresses(b.place)
	return v4, v6, nil
}

// Restore gives a name the addresses that Bound told of, at a door that takes
// the place of one before: what a sandbox remembers of it stays true. What has
// no room any more is left out.
func (n *Names) Restore(name string, place uint32) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if place >= n.places || n.byTurn[place] != nil || n.byName[name] != nil || len(n.byName) >= n.most {
		return
	}
	b := &binding{name: name, place: place}
	b.elem = n.idle.PushFront(b)
	n.byName[name], n.byTurn[place] = b, b
	n.next = (place + 1) % n.places
}

// Known says whether a name has addresses: then it was permitted before.
func (n *Names) Known(name string) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.byName[name] != nil
}

// Hold returns the name that an address is of, and keeps it so until release
// is called, once or more often. ok is false for addresses that mean no name.
func (n *Names) Hold(a netip.Addr) (name string, release func(), ok bool) {
	place, ok := n.place(a.Unmap())
	if !ok {
		return "", nil, false
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	b := n.byTurn[place]
	if b == nil {
		return "", nil, false
	}
	if b.flows++; b.elem != nil {
		n.idle.Remove(b.elem)
		b.elem = nil
	}
	return b.name, sync.OnceFunc(func() {
		n.mu.Lock()
		defer n.mu.Unlock()
		if b.flows--; b.flows == 0 {
			b.elem = n.idle.PushFront(b)
		}
	}), true
}

// Synthetic says whether an address is one that only names have, also if it
// has none now: no such address may be dialled as it is.
func (n *Names) Synthetic(a netip.Addr) bool {
	a = a.Unmap().WithZone("")
	return n.v4.Contains(a) || n.v6.Contains(a)
}

func (n *Names) addresses(place uint32) (v4, v6 netip.Addr) {
	b4 := n.v4.Addr().As4()
	binary.BigEndian.PutUint32(b4[:], binary.BigEndian.Uint32(b4[:])+1+place)
	v4 = netip.AddrFrom4(b4)
	if n.v6.IsValid() {
		b6 := n.v6.Addr().As16()
		binary.BigEndian.PutUint64(b6[8:], uint64(1+place))
		v6 = netip.AddrFrom16(b6)
	}
	return v4, v6
}

// place is the other direction of addresses.
func (n *Names) place(a netip.Addr) (uint32, bool) {
	var at uint64
	switch {
	case n.v4.Contains(a):
		b, base := a.As4(), n.v4.Addr().As4()
		at = uint64(binary.BigEndian.Uint32(b[:]) - binary.BigEndian.Uint32(base[:]))
	case n.v6.Contains(a):
		b := a.As16()
		at = binary.BigEndian.Uint64(b[8:])
	}
	if at == 0 || at > uint64(n.places) {
		return 0, false
	}
	return uint32(at - 1), true
}
