package upstream

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/net/dns/dnsmessage"

	"airlock.dev/airlock"
	"airlock.dev/airlock/gateway/address"
	"airlock.dev/airlock/gateway/dns"
	"airlock.dev/airlock/gateway/web"
)

var (
	_ web.Router   = (*Router)(nil)
	_ dns.Resolver = (*Upstream)(nil)
)

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// nameServer is a DNS server on the loopback.
type nameServer struct {
	mu    sync.Mutex
	names map[string][]string // with a dot at the end; those without are no names
	asked []string
	addr  string
}

func newNameServer(t testing.TB, names map[string][]string) *nameServer {
	t.Helper()
	c, err := net.ListenPacket("udp", "127.0.0.1:0")
	must(t, err)
	t.Cleanup(func() { c.Close() })
	s := &nameServer{names: names, addr: c.LocalAddr().String()}
	go func() {
		buf := make([]byte, 1500)
		for {
			n, from, err := c.ReadFrom(buf)
			if err != nil {
				return
			}
			if reply := s.reply(buf[:n]); reply != nil {
				c.WriteTo(reply, from)
			}
		}
	}()
	return s
}

func (s *nameServer) reply(b []byte) []byte {
	var m dnsmessage.Message
	if m.Unpack(b) != nil {
		return nil
	}
	q := m.Questions[0]
	name := q.Name.String()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.asked = append(s.asked, name)
	addrs, ok := s.names[name]
	m.Response, m.Authoritative, m.Additionals = true, true, nil
	switch {
	case strings.HasPrefix(name, "silent."):
		return nil
	case strings.HasPrefix(name, "broken."):
		m.RCode = dnsmessage.RCodeServerFailure
	case !ok:
		m.RCode = dnsmessage.RCodeNameError
	}
	for _, text := range addrs {
		a := netip.MustParseAddr(text)
		h := dnsmessage.ResourceHeader{Name: q.Name, Class: dnsmessage.ClassINET, TTL: 1}
		switch {
		case a.Is4() && q.Type == dnsmessage.TypeA:
			m.Answers = append(m.Answers, dnsmessage.Resource{Header: h, Body: &dnsmessage.AResource{A: a.As4()}})
		case a.Is6() && q.Type == dnsmessage.TypeAAAA:
			m.Answers = append(m.Answers, dnsmessage.Resource{Header: h, Body: &dnsmessage.AAAAResource{AAAA: a.As16()}})
		}
	}
	out, err := m.Pack()
	if err != nil {
		panic(err)
	}
	return out
}

func (s *nameServer) set(name string, addrs ...string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.names[name] = addrs
}

func (s *nameServer) resolver() *net.Resolver {
	return &net.Resolver{PreferGo: true, Dial: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "udp", s.addr)
	}}
}

func named(s ...string) func(netip.Addr) bool {
	return func(a netip.Addr) bool { return slices.Contains(s, a.String()) }
}

// told is what became of Routes.
func told(routes []web.Route, err error) string {
	var s []string
	for _, r := range routes {
		s = append(s, fmt.Sprintf("%s %s", r.IP, r.Class))
	}
	if err != nil {
		s = append(s, err.Error())
	}
	return strings.Join(s, ", ")
}

func denied(class string) string {
	return "denied: the address is of the class " + class + ", which is not reached from a sandbox: have the operator name the address, if that is meant"
}

// Whatever spelling an address has, and whichever way it comes, what it is counts.
func TestRoutes(t *testing.T) {
	ns := newNameServer(t, map[string][]string{
		"one.test.":      {"8.8.8.8"},
		"both.test.":     {"2606:4700::1", "8.8.4.4"},
		"mixed.test.":    {"10.1.2.3", "169.254.169.254", "8.8.8.8", "127.0.0.1"},
		"internal.test.": {"10.1.2.3", "192.168.0.1"},
		"metadata.test.": {"169.254.169.254"},
		"mapped.test.":   {"::ffff:169.254.169.254"},
		"nat64.test.":    {"64:ff9b::a9fe:a9fe"},
		"empty.test.":    {},
		"own.test.":      {"8.8.9.9"},
	})
	u := New(Config{
		Resolver: ns.resolver(), Timeout: time.Second,
		Named:     named("127.0.0.9", "198.18.0.5", "8.8.9.10"),
		Synthetic: func(a netip.Addr) bool { return netip.MustParsePrefix("198.18.0.0/15").Contains(a) },
		Own: func() ([]netip.Addr, error) {
			return []netip.Addr{netip.MustParseAddr("8.8.9.9"), netip.MustParseAddr("8.8.9.10"), netip.MustParseAddr("fe80::1%eth0"), netip.MustParseAddr("::ffff:8.8.9.11")}, nil
		},
	})
	for host, want := range map[string]string{
		"one.test":      "8.8.8.8 public",
		"mixed.test":    "8.8.8.8 public, 10.1.2.3 private",
		"internal.test": "10.1.2.3 private, 192.168.0.1 private",
		"metadata.test": denied("metadata"), "mapped.test": denied("metadata"), "nat64.test": denied("metadata"),
		"own.test":   denied("host"),
		"empty.test": "lookup empty.test: no such host",
		"none.test":  "lookup none.test: no such host",
		// Literal addresses.
		"8.8.8.8": "8.8.8.8 public", "2606:4700::1": "2606:4700::1 public", "10.1.2.3": "10.1.2.3 private", "fd00::1": "fd00::1 private",
		"100.64.0.1": "100.64.0.1 shared", "192.0.2.1": "192.0.2.1 documentation",
		"127.0.0.1": denied("loopback"), "0.0.0.0": denied("loopback"), "::1": denied("loopback"), "::": denied("loopback"), "127.0.0.9": "127.0.0.9 loopback",
		"169.254.1.1": denied("link-local"), "fe80::1": denied("host"), "fe80::2": denied("link-local"),
		"169.254.169.254": denied("metadata"), "::ffff:169.254.169.254": denied("metadata"), "64:ff9b::a9fe:a9fe": denied("metadata"),
		"2002:a9fe:a9fe::": denied("metadata"), "::a9fe:a9fe": denied("metadata"), "fd00:ec2::254": denied("metadata"), "168.63.129.16": denied("metadata"),
		"224.0.0.1": denied("multicast"), "255.255.255.255": denied("multicast"), "ff02::1": denied("multicast"),
		"240.0.0.1": denied("reserved"), "0.1.2.3": denied("reserved"), "2002:808:808::": denied("transition"), "2001:0:808:808::": denied("transition"),
		"fe80::1%eth0": "denied: the address is of the class refused, which is not reached from a sandbox",
		"198.18.0.5":   "denied: the address is of the class synthetic, which is not reached from a sandbox: look the name up again",
		"8.8.9.9":      denied("host"), "8.8.9.11": denied("host"), "8.8.9.10": "8.8.9.10 public",
	} {
		got := told(u.Router(nil).Routes(t.Context(), "https", host, 443))
		if got != want {
			t.Errorf("%s:\n got %s\nwant %s", host, got, want)
		}
	}
	got := told(u.Router(nil).Routes(t.Context(), "https", "both.test", 443))
	if !strings.Contains(got, "2606:4700::1 public") || !strings.Contains(got, "8.8.4.4 public") {
		t.Error(got)
	}
	routes, err := u.Router(nil).Routes(t.Context(), "tcp", "one.test", 22)
	must(t, err)
	if want := (web.Route{Scheme: "tcp", Host: "one.test", Port: 22, IP: netip.MustParseAddr("8.8.8.8"), Class: "public"}); routes[0] != want {
		t.Errorf("%+v, want %+v", routes[0], want)
	}
}

// What a router was told to know, it asks nobody for, and believes no more.
func TestRouterOfADoor(t *testing.T) {
	u := New(Config{Resolver: newNameServer(t, nil).resolver()})
	r := u.Router(func(_ context.Context, name string) ([]netip.Addr, error) {
		return []netip.Addr{netip.MustParseAddr("169.254.169.254"), netip.MustParseAddr("8.8.8.8"), netip.MustParseAddr("8.8.8.8")}, nil
	})
	if got := told(r.Routes(t.Context(), "http", "one.test", 80)); got != "8.8.8.8 public" {
		t.Error(got)
	}
	ranges, err := address.New([]address.Range{{Prefix: netip.MustParsePrefix("8.8.8.0/24"), Class: address.Private}}, nil)
	must(t, err)
	if got := told(New(Config{Ranges: ranges}).Router(nil).Routes(t.Context(), "http", "8.8.8.8", 80)); got != "8.8.8.8 private" {
		t.Error(got)
	}
}

// Nothing is dialled that Routes would not return, also if it did once.
func TestConnectLooksAgain(t *testing.T) {
	l := listen(t)
	port := netip.MustParseAddrPort(l.addr).Port()
	ns := newNameServer(t, map[string][]string{"one.test.": {"127.0.0.1"}})
	mine := []netip.Addr{netip.MustParseAddr("10.0.0.1")}
	u := New(Config{Resolver: ns.resolver(), Named: named("127.0.0.1"), Own: func() ([]netip.Addr, error) { return mine, nil }})
	r := u.Router(nil)
	routes, err := r.Routes(t.Context(), "tcp", "one.test", port)
	must(t, err)
	ns.set("one.test.", "169.254.169.254") // rebinding: the address that was decided on is dialled
	c, err := r.Connect(t.Context(), routes[0])
	must(t, err)
	c.Close()
	for _, a := range []string{"127.0.0.2", "169.254.169.254", "::1", "10.0.0.1", "::ffff:127.0.0.2"} {
		_, err := r.Connect(t.Context(), web.Route{Host: "one.test", Port: port, IP: netip.MustParseAddr(a), Class: "public"})
		if _, ok := errors.AsType[*web.Denied](err); !ok {
			t.Errorf("%s: %v", a, err)
		}
	}
	if _, err := r.Connect(t.Context(), web.Route{Host: "one.test", Port: port}); airlock.CodeOf(err) != airlock.Internal {
		t.Errorf("no address: %v", err)
	}
	u.cfg.Own = func() ([]netip.Addr, error) { return nil, errors.New("no") }
	u.when = time.Time{}
	if _, err := r.Connect(t.Context(), routes[0]); airlock.CodeOf(err) != airlock.Unavailable {
		t.Errorf("own addresses that are not known: %v", err)
	}
	own, err := interfaces()
	if err != nil || !slices.Contains(own, netip.MustParseAddr("127.0.0.1")) {
		t.Errorf("this machine's addresses are %v, %v", own, err)
	}
}

// An address that does not connect comes last, for a while.
func TestDeadAddresses(t *testing.T) {
	l := listen(t)
	port := netip.MustParseAddrPort(l.addr).Port()
	u := New(Config{Named: named("127.0.0.1", "127.0.0.2")})
	r := u.Router(func(context.Context, string) ([]netip.Addr, error) {
		return []netip.Addr{netip.MustParseAddr("127.0.0.2"), netip.MustParseAddr("127.0.0.1")}, nil
	})
	order := func(want string) []web.Route {
		t.Helper()
		routes, err := r.Routes(t.Context(), "tcp", "one.test", port)
		if got := told(routes, err); got != want {
			t.Errorf("got %s, want %s", got, want)
		}
		return routes
	}
	routes := order("127.0.0.2 loopback, 127.0.0.1 loopback")
	if _, err := r.Connect(t.Context(), routes[0]); err == nil || err.Error() != "connect: connection refused" {
		t.Error(err)
	}
	order("127.0.0.1 loopback, 127.0.0.2 loopback")
	u.mu.Lock()
	u.dead[routes[0].IP] = time.Now().Add(-deadLife)
	u.mu.Unlock()
	order("127.0.0.2 loopback, 127.0.0.1 loopback")
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	r.Connect(gone, routes[0])
	order("127.0.0.2 loopback, 127.0.0.1 loopback")
	for i := range deadMost + 1 {
		u.note(netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)}), false)
	}
	if len(u.dead) > deadMost {
		t.Errorf("%d dead addresses are kept", len(u.dead))
	}
}

// Sandboxes learn nothing of the host's resolver, and it is asked for names as
// they are.
func TestLookup(t *testing.T) {
	ns := newNameServer(t, map[string][]string{"one.test.": {"8.8.8.8", "2606:4700::1"}})
	u := New(Config{Resolver: ns.resolver(), Timeout: 300 * time.Millisecond})
	addrs, err := u.Lookup(t.Context(), "one.test")
	slices.SortFunc(addrs, netip.Addr.Compare)
	if err != nil || fmt.Sprint(addrs) != "[8.8.8.8 2606:4700::1]" {
		t.Error(addrs, err)
	}
	for name, want := range map[string]string{
		"none.test": "lookup none.test: no such host", "broken.test": "lookup broken.test: the host's resolver failed",
		"silent.test": "lookup silent.test: the host's resolver does not answer",
	} {
		_, err := u.Lookup(t.Context(), name)
		if err == nil || err.Error() != want {
			t.Errorf("%s: %v", name, err)
		}
		var d *net.DNSError
		if !errors.As(err, &d) || d.IsNotFound != (name == "none.test") {
			t.Errorf("%s: %#v", name, err)
		}
	}
	ns.mu.Lock()
	defer ns.mu.Unlock()
	for _, name := range ns.asked {
		if !slices.Contains([]string{"one.test.", "none.test.", "broken.test.", "silent.test."}, name) {
			t.Errorf("%s was asked for", name)
		}
	}
}

// listener is a server that says a greeting and then what it is told.
type listener struct{ addr string }

func listen(t testing.TB) listener {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				io.WriteString(c, "hello ")
				io.Copy(c, c)
			}()
		}
	}()
	return listener{l.Addr().String()}
}
