// Package address says what an IP address is (public, private, metadata of a
// cloud, ...) and reads the name or address of a host in one way only.
//
// Programs read addresses differently: 0x7f.1 is an address to one and a name
// to the other, ::ffff:127.0.0.1 is this machine to all. A check that reads
// differently from what connects is no check, so whatever could be read in
// two ways is an error here, and an IPv6 address that carries an IPv4 one is
// at most as public as what it carries.
//
// The package is pure: it resolves nothing, and it does not know what a policy
// permits. Start reading at Parse and Classify.
package address

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"

	"airlock.dev/airlock"
)

// Class is what an address is. Only Public addresses may be reached without a
// policy that names them. A higher class is the worse one to reach by mistake.
type Class uint8

// The classes. The zero Class is that of what is no address, and of addresses
// with a zone, which mean something else on each machine.
const (
	Refused       Class = iota
	Public              // reachable from anywhere
	Documentation       // for examples; some networks use them within
	Benchmark           // for measurements; our synthetic IPv4 addresses are there
	Shared              // of carriers (CGNAT)
	Multicast           // more than one host, broadcast too
	Reserved            // no host's yet, or a protocol's
	Transition          // an IPv4 address in IPv6 by a way that is not used any more, or by a way of this network only
	Private             // of an organisation's own network
	LinkLocal           // of the cable that this machine is on
	Loopback            // this machine; the unspecified address too, which connects to it
	Metadata            // credentials of the machine, in clouds
)

var classNames = [...]string{
	Refused: "refused", Public: "public", Documentation: "documentation", Benchmark: "benchmark",
	Shared: "shared", Multicast: "multicast", Reserved: "reserved", Transition: "transition",
	Private: "private", LinkLocal: "link-local", Loopback: "loopback", Metadata: "metadata",
}

// String returns the name of the class, as ParseClass reads it.
func (c Class) String() string {
	if int(c) < len(classNames) {
		return classNames[c]
	}
	return fmt.Sprintf("class(%d)", uint8(c))
}

// ParseClass returns the class with that name. An unknown one is an
// airlock.Invalid error.
func ParseClass(name string) (Class, error) {
	if i := slices.Index(classNames[:], name); i >= 0 {
		return Class(i), nil
	}
	return Refused, airlock.Invalidf("class", fmt.Sprintf("use one of %v", classNames), "there is no class %.40q of addresses", name)
}

// Range says that the addresses of a network are of a class.
type Range struct {
	Prefix netip.Prefix
	Class  Class
}

// Ranges are what addresses are, on one network. They do not change.
type Ranges struct {
	of    []Range        // the longest prefix first
	nat64 []netip.Prefix // in which a network carries IPv4 addresses
}

// New returns the ranges that everyone has, changed by own ones: of the ranges
// that an address is in, the longest counts, and an own one before a built-in
// one. nat64 are this network's prefixes of NAT64 (RFC 6052), besides the
// well-known one; the addresses in them are what they carry.
//
// The error is airlock.Invalid.
func New(own []Range, nat64 []netip.Prefix) (*Ranges, error) {
	r := &Ranges{nat64: []netip.Prefix{netip.MustParsePrefix("64:ff9b::/96")}}
	for _, n := range own {
		if !n.Prefix.IsValid() || n.Prefix != n.Prefix.Masked() || n.Prefix.Addr().Is4In6() {
			return nil, airlock.Invalidf("ranges", "write a network as 192.0.2.0/24 or 2001:db8::/32, IPv4 as IPv4", "%v is no network", n.Prefix)
		}
		if n.Class == Refused || int(n.Class) >= len(classNames) {
			return nil, airlock.Invalidf("ranges", fmt.Sprintf("use one of %v", classNames[1:]), "%v has no class", n.Prefix)
		}
		r.of = append(r.of, n)
	}
	for _, p := range nat64 {
		if !p.IsValid() || p != p.Masked() || p.Addr().Is4() || !slices.Contains(nat64Lengths, p.Bits()) {
			return nil, airlock.Invalidf("nat64", fmt.Sprintf("give an IPv6 network with a length of %v", nat64Lengths), "%v is no prefix of NAT64", p)
		}
		r.nat64 = append(r.nat64, p)
		r.of = append(r.of, Range{p, Public})
	}
	r.of = append(r.of, builtIn...)
	slices.SortStableFunc(r.of, func(a, b Range) int { return cmp.Compare(b.Prefix.Bits(), a.Prefix.Bits()) })
	return r, nil
}

// Classify returns the class of a in the ranges that everyone has.
func Classify(a netip.Addr) Class { return everyone.Classify(a) }

var everyone = func() *Ranges {
	r, err := New(nil, nil)
	if err != nil {
		panic(err) // the built-in ranges are not at fault
	}
	return r
}()

// Classify returns the class of a: the worst of its own and of those of all
// IPv4 addresses that it carries.
func (r *Ranges) Classify(a netip.Addr) Class {
	if !a.IsValid() || a.Zone() != "" {
		return Refused
	}
	a = a.Unmap()
	class := r.plain(a)
	for _, v4 := range r.carried(a) {
		class = max(class, r.plain(v4))
	}
	return class
}

// plain is the class of an address for what it is itself.
func (r *Ranges) plain(a netip.Addr) Class {
	for _, n := range r.of {
		if n.Prefix.Contains(a) {
			return n.Class
		}
	}
	return Refused // never: 0.0.0.0/0 and ::/0 are built-in ranges
}

// The lengths of a prefix of NAT64 (RFC 6052, section 2.2).
var nat64Lengths = []int{32, 40, 48, 56, 64, 96}

var (
	localNAT64 = netip.MustParsePrefix("64:ff9b:1::/48")
	compatible = netip.MustParsePrefix("::/96")
	translated = netip.MustParsePrefix("::ffff:0:0:0/96")
	sixToFour  = netip.MustParsePrefix("2002::/16")
	teredo     = netip.MustParsePrefix("2001::/32")
)

// carried returns the IPv4 addresses in an IPv6 address that some machine on
// the way could take out of it and send to.
func (r *Ranges) carried(a netip.Addr) []netip.Addr {
	if a.Is4() {
		return nil
	}
	b := a.As16()
	last := netip.AddrFrom4([4]byte(b[12:]))
	var all []netip.Addr
	switch {
	case compatible.Contains(a):
		// ::, ::1 and their neighbours are not an IPv4 address.
		if b[12] != 0 {
			all = append(all, last)
		}
	case translated.Contains(a):
		all = append(all, last)
	case sixToFour.Contains(a):
		all = append(all, netip.AddrFrom4([4]byte(b[2:6])))
	case teredo.Contains(a):
		// The server, and the client behind its NAT, with all bits turned.
		all = append(all, netip.AddrFrom4([4]byte(b[4:8])), netip.AddrFrom4([4]byte{^b[12], ^b[13], ^b[14], ^b[15]}))
	case localNAT64.Contains(a) && !r.inNAT64(a):
		// Which length a network uses is its own choice: all of them are
		// read. Zeros are what the shorter ones leave of the longer.
		for _, bits := range nat64Lengths {
			if v4 := fromNAT64(b, bits); bits >= localNAT64.Bits() && !v4.IsUnspecified() {
				all = append(all, v4)
			}
		}
	}
	for _, p := range r.nat64 {
		if p.Contains(a) {
			all = append(all, fromNAT64(b, p.Bits()))
		}
	}
	// ISATAP (RFC 5214) is in the host part of any network.
	if (b[8] == 0 || b[8] == 2) && b[9] == 0 && b[10] == 0x5e && b[11] == 0xfe {
		all = append(all, last)
	}
	return all
}

func (r *Ranges) inNAT64(a netip.Addr) bool {
	return slices.ContainsFunc(r.nat64, func(p netip.Prefix) bool { return p.Contains(a) })
}

// fromNAT64 reads the IPv4 address behind a prefix of that many bits. The
// byte 8 is never part of it.
func fromNAT64(b [16]byte, bits int) netip.Addr {
	var v4 [4]byte
	at := bits / 8
	for i := range v4 {
		if at == 8 {
			at++
		}
		v4[i] = b[at]
		at++
	}
	return netip.AddrFrom4(v4)
}

// builtIn are the IANA's registries of special addresses, and where clouds
// have their metadata. All addresses are in one.
var builtIn = func() (all []Range) {
	add := func(class Class, prefixes ...string) {
		for _, p := range prefixes {
			all = append(all, Range{netip.MustParsePrefix(p), class})
		}
	}
	add(Public, "0.0.0.0/0", "2000::/3", "64:ff9b::/96")
	add(Documentation, "192.0.2.0/24", "198.51.100.0/24", "203.0.113.0/24", "2001:db8::/32", "3fff::/20")
	add(Benchmark, "198.18.0.0/15", "2001:2::/48")
	add(Shared, "100.64.0.0/10")
	add(Multicast, "224.0.0.0/4", "255.255.255.255/32", "ff00::/8")
	add(Reserved, "0.0.0.0/8", "192.0.0.0/24", "240.0.0.0/4", "::/0", "2001::/23", "3ffe::/16")
	add(Transition, "192.88.99.0/24", "::/96", "::ffff:0:0:0/96", "64:ff9b:1::/48", "2001::/32", "2002::/16")
	add(Private, "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "fc00::/7", "fec0::/10")
	add(LinkLocal, "169.254.0.0/16", "fe80::/10")
	add(Loopback, "0.0.0.0/32", "127.0.0.0/8", "::/128", "::1/128")
	add(Metadata,
		"169.254.169.0/24",   // nearly all clouds
		"169.254.170.0/24",   // AWS, of containers
		"169.254.42.42/32",   // Scaleway
		"168.63.129.16/32",   // Azure's agent: looks public
		"100.100.100.200/32", // Alibaba
		"192.0.0.192/32",     // Oracle
		"fd00:ec2::/32",      // AWS
		"fd00:42::42/128",    // Scaleway
		"fd20:ce::/32",       // Google
		"fe80::a9fe:a9fe/128",
	)
	return all
}()
