package door

import (
	"errors"
	"net"
	"sync"

	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
	"gvisor.dev/gvisor/pkg/tcpip/transport/udp"
	"gvisor.dev/gvisor/pkg/waiter"

	"airlock.dev/airlock"
)

// What is kept of a flow that is not decided yet: the first datagram, and as
// many more as a resolver's client or a handshake needs. What comes beyond is
// lost, as datagrams are.
const (
	keptMost  = 4
	keptBytes = 64 << 10
)

// Datagrams is what the guest sends over UDP from one address and port to one
// destination. The guest waits for Accept or Refuse; when the handler returns
// without either, it is refused.
type Datagrams struct {
	life

	mu      sync.Mutex
	kept    []*stack.PacketBuffer // until it is decided
	bytes   int                   // of kept
	decided bool                  // or about to be
	ep      tcpip.Endpoint        // once it is open
	dead    bool                  // it was ended by the door
}

// take says whether a datagram is handled: kept, given to the flow, or lost.
func (f *Datagrams) take(p *stack.PacketBuffer) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	switch {
	case f.ep != nil: // it was opened while this datagram was on its way
		f.ep.(stack.TransportEndpoint).HandlePacket(f.id, p)
	case f.decided && f.kept == nil:
		return false // it was refused
	case len(f.kept) == 0 || len(f.kept) < keptMost && f.bytes+p.Size() <= keptBytes:
		f.kept = append(f.kept, p.Clone())
		f.bytes += p.Size()
	}
	return true
}

// serve is the goroutine of a UDP flow.
func (f *Datagrams) serve() {
	f.d.handler.UDP(f.d.ctx, f)
	f.Refuse()
	f.mu.Lock()
	ep := f.ep
	f.mu.Unlock()
	if ep != nil {
		ep.Close()
	}
	f.d.mu.Lock()
	delete(f.d.datagrams, f.id)
	f.d.mu.Unlock()
	f.d.release(f)
}

// Accept opens the flow: each Read and Write of the connection is one datagram.
// Read returns io.EOF when none went either way for Config.UDPIdle. It fails
// with Gone when the door closes, and when the flow was decided before.
func (f *Datagrams) Accept() (net.Conn, error) {
	first, dead := f.decide()
	switch {
	case first == nil:
		return nil, airlock.Errorf(airlock.Gone, "the flow to %s was decided before", f.to)
	case dead || f.d.over():
		f.open(nil)
		return nil, f.gone()
	}
	wq := new(waiter.Queue)
	ep, terr := udp.NewForwarderRequest(f.d.stack, f.id, first).CreateEndpoint(wq)
	if terr != nil {
		f.open(nil)
		return nil, f.gone().Because(errors.New(terr.String()))
	}
	f.expect(f.d.cfg.UDPIdle)
	f.open(ep)
	return &datagramConn{Conn: gonet.NewUDPConn(wq, ep), f: f}, nil
}

// Refuse answers the guest with ICMP port unreachable: a connected socket sees
// "connection refused" at once. After Accept or Refuse it does nothing.
func (f *Datagrams) Refuse() {
	first, _ := f.decide()
	if first == nil {
		return
	}
	// One answer is enough. It is a datagram too, and may get lost.
	switch by := f.d.stack.NetworkProtocolInstance(first.NetworkProtocolNumber).(type) {
	case stack.RejectIPv4WithHandler:
		_ = by.SendRejectionError(first, stack.RejectIPv4WithICMPPortUnreachable, true)
	case stack.RejectIPv6WithHandler:
		_ = by.SendRejectionError(first, stack.RejectIPv6WithICMPPortUnreachable, true)
	}
	f.open(nil)
}

// decide returns the first datagram to who decides, and nothing to others. The
// stack's locks are not taken while f.mu is held: take is called by the stack.
func (f *Datagrams) decide() (first *stack.PacketBuffer, dead bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.decided {
		f.decided, first = true, f.kept[0]
	}
	return first, f.dead
}

// open gives an endpoint, if there is one, what was kept behind the first
// datagram, and forgets it.
func (f *Datagrams) open(ep tcpip.Endpoint) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for i, p := range f.kept {
		if ep != nil && i > 0 {
			ep.(stack.TransportEndpoint).HandlePacket(f.id, p)
		}
		p.DecRef()
	}
	f.kept, f.ep = nil, ep
	if ep != nil && f.dead {
		ep.Abort()
	}
}

// kill ends the flow. A handler that decides learns it from its context, or
// from Accept.
func (f *Datagrams) kill() {
	f.mu.Lock()
	f.dead = true
	ep := f.ep
	f.mu.Unlock()
	if ep != nil {
		ep.Abort()
	}
}

// datagramConn is an open UDP flow.
type datagramConn struct {
	net.Conn
	f *Datagrams
}

func (c *datagramConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	c.f.touch()
	return n, err
}

func (c *datagramConn) Write(b []byte) (int, error) {
	n, err := c.Conn.Write(b)
	c.f.touch()
	return n, err
}
