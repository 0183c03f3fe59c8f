package door

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/link/fdbased"
	"gvisor.dev/gvisor/pkg/tcpip/network/arp"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv4"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv6"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
	"gvisor.dev/gvisor/pkg/tcpip/transport/icmp"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
	"gvisor.dev/gvisor/pkg/tcpip/transport/udp"
	"gvisor.dev/gvisor/pkg/waiter"

	"airlock.dev/airlock"
)

// handler is a Handler of functions; without one, flows are refused. udp is for
// flows that are accepted at once, and decide for others.
type handler struct {
	tcp    func(ctx context.Context, f *Flow)
	udp    func(ctx context.Context, from, to netip.AddrPort, c net.Conn)
	decide func(ctx context.Context, f *Datagrams)
}

func (h handler) TCP(ctx context.Context, f *Flow) {
	if h.tcp != nil {
		h.tcp(ctx, f)
	}
}

func (h handler) UDP(ctx context.Context, f *Datagrams) {
	switch {
	case h.decide != nil:
		h.decide(ctx, f)
	case h.udp != nil:
		if c, err := f.Accept(); err == nil {
			h.udp(ctx, f.From(), f.To(), c)
		}
	}
}

func anyUDP(netip.AddrPort) bool { return true }

// pair returns the two ends of a wire, with room for what the driver gives it.
func pair(t testing.TB) (ours, guests *os.File) {
	t.Helper()
	p, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	for _, fd := range p { // more than the system's limit only as root
		if unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUFFORCE, 4<<20) != nil {
			_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUF, 4<<20)
		}
	}
	return os.NewFile(uintptr(p[0]), "door"), os.NewFile(uintptr(p[1]), "guest")
}

// open makes a door and returns it with the guest's end of its wire.
func open(t testing.TB, cfg Config, h Handler) (*Door, *os.File) {
	t.Helper()
	ours, guests := pair(t)
	d, err := Open(ours, cfg, h)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { guests.Close() })
	t.Cleanup(d.Close)
	return d, guests
}

// guest is a sandbox's network: a TCP/IP stack with the link layer that gVisor
// has inside.
type guest struct{ *stack.Stack }

func newGuest(t testing.TB, end *os.File) guest {
	t.Helper()
	s := stack.New(stack.Options{
		NetworkProtocols:   []stack.NetworkProtocolFactory{ipv4.NewProtocol, ipv6.NewProtocolWithOptions(ipv6.Options{}), arp.NewProtocol},
		TransportProtocols: []stack.TransportProtocolFactory{tcp.NewProtocol, udp.NewProtocol, icmp.NewProtocol4, icmp.NewProtocol6},
	})
	sack := tcpip.TCPSACKEnabled(true)
	s.SetTransportProtocolOption(tcp.ProtocolNumber, &sack)
	link, err := fdbased.New(&fdbased.Options{
		FDs: []int{int(end.Fd())}, MTU: 65000, EthernetHeader: true, Address: "\x02\x00\x00\x00\x00\x02",
		PacketDispatchMode: fdbased.RecvMMsg, RXChecksumOffload: true, TXChecksumOffload: true, ProcessorsPerChannel: 1,
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.CreateNIC(1, link); err != nil {
		t.Fatal(err)
	}
	for _, a := range []tcpip.ProtocolAddress{
		{Protocol: ipv4.ProtocolNumber, AddressWithPrefix: tcpip.AddressWithPrefix{Address: address("10.0.0.2"), PrefixLen: 24}},
		{Protocol: ipv6.ProtocolNumber, AddressWithPrefix: tcpip.AddressWithPrefix{Address: address("fd61:6972::2"), PrefixLen: 64}},
	} {
		if err := s.AddProtocolAddress(1, a, stack.AddressProperties{}); err != nil {
			t.Fatal(err)
		}
	}
	on4 := tcpip.AddressWithPrefix{Address: address("10.0.0.0"), PrefixLen: 24}
	on6 := tcpip.AddressWithPrefix{Address: address("fd61:6972::"), PrefixLen: 64}
	s.SetRouteTable([]tcpip.Route{
		{Destination: on4.Subnet(), NIC: 1},
		{Destination: on6.Subnet(), NIC: 1},
		{Destination: header.IPv4EmptySubnet, Gateway: address("10.0.0.1"), NIC: 1},
		{Destination: header.IPv6EmptySubnet, Gateway: address("fd61:6972::1"), NIC: 1},
	})
	t.Cleanup(func() {
		link.Attach(nil) // by itself: within Destroy it can wait for a lock that Destroy has
		s.Destroy()
	})
	return guest{s}
}

func address(s string) tcpip.Address { return tcpip.AddrFromSlice(netip.MustParseAddr(s).AsSlice()) }

func full(to string) (tcpip.FullAddress, tcpip.NetworkProtocolNumber) {
	a := netip.MustParseAddrPort(to)
	proto := ipv4.ProtocolNumber
	if a.Addr().Is6() {
		proto = ipv6.ProtocolNumber
	}
	return tcpip.FullAddress{NIC: 1, Addr: tcpip.AddrFromSlice(a.Addr().AsSlice()), Port: a.Port()}, proto
}

func (g guest) dial(ctx context.Context, to string) (*gonet.TCPConn, error) {
	a, proto := full(to)
	return gonet.DialContextTCP(ctx, g.Stack, a, proto)
}

func (g guest) mustDial(t testing.TB, to string) *gonet.TCPConn {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	c, err := g.dial(ctx, to)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

func (g guest) dialUDP(t testing.TB, to string) *gonet.UDPConn {
	t.Helper()
	a, proto := full(to)
	c, err := gonet.DialUDP(g.Stack, nil, &a, proto)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	c.SetDeadline(time.Now().Add(20 * time.Second))
	return c
}

// unreachable returns what a read of c says once ICMP has told of it; a read
// that waits already does not learn of ICMP in this stack.
func unreachable(c *gonet.UDPConn) (err error) {
	var timeout net.Error
	for end := time.Now().Add(5 * time.Second); time.Now().Before(end); {
		c.SetReadDeadline(time.Now().Add(time.Millisecond))
		if _, err = c.Read(make([]byte, 1)); !errors.As(err, &timeout) || !timeout.Timeout() {
			break
		}
	}
	return err
}

// eventually waits for something that other goroutines bring about.
func eventually(t testing.TB, what string, is func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); !is(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("not in 20 s: %s", what)
		}
	}
}

func echo(_ context.Context, f *Flow) {
	c, err := f.Accept()
	if err != nil {
		return
	}
	io.Copy(c, c)
	c.CloseWrite()
	c.Close()
}

// Whatever address of a host a guest goes to arrives, and is told as it was meant.
func TestEveryDestination(t *testing.T) {
	var mu sync.Mutex
	var from, to netip.AddrPort
	_, end := open(t, Config{}, handler{tcp: func(ctx context.Context, f *Flow) {
		mu.Lock()
		from, to = f.From(), f.To()
		mu.Unlock()
		echo(ctx, f)
	}})
	g := newGuest(t, end)
	for dest, source := range map[string]string{
		"10.0.0.1:3128":           "10.0.0.2",
		"10.0.0.77:80":            "10.0.0.2", // a neighbour that does not exist
		"93.184.215.14:443":       "10.0.0.2",
		"169.254.169.254:80":      "10.0.0.2",
		"192.168.1.1:22":          "10.0.0.2",
		"198.18.3.4:443":          "10.0.0.2",
		"0.1.2.3:1":               "10.0.0.2",
		"240.0.0.1:65535":         "10.0.0.2",
		"[fd61:6972::1]:53":       "fd61:6972::2",
		"[fd61:6972::99]:80":      "fd61:6972::2",
		"[2001:db8::1]:443":       "fd61:6972::2",
		"[64:ff9b::a9fe:a9fe]:80": "fd61:6972::2",
		"[2002:a9fe:a9fe::]:80":   "fd61:6972::2",
	} {
		c := g.mustDial(t, dest)
		io.WriteString(c, "hello")
		c.CloseWrite()
		if got, err := io.ReadAll(c); err != nil || string(got) != "hello" {
			t.Errorf("%s: %q, %v", dest, got, err)
		}
		mu.Lock()
		if to != netip.MustParseAddrPort(dest) || from.Addr() != netip.MustParseAddr(source) || from.Port() == 0 {
			t.Errorf("to %s from %s came as to %v from %v", dest, source, to, from)
		}
		mu.Unlock()
		c.Close()
	}
}

// Each side ends its half by itself, and what was under way arrives.
func TestHalfClose(t *testing.T) {
	type seen struct {
		got []byte
		err error
	}
	asked := make(chan seen, 1)
	answer := make([]byte, 3<<20)
	rand.Read(answer)
	_, end := open(t, Config{}, handler{tcp: func(_ context.Context, f *Flow) {
		c, err := f.Accept()
		if err != nil {
			asked <- seen{nil, err}
			return
		}
		got, err := io.ReadAll(c) // until the guest's half ends
		asked <- seen{got, err}
		c.Write(answer)
		// The handler returns without Close: what it wrote still arrives.
	}})
	c := newGuest(t, end).mustDial(t, "192.0.2.1:80")
	question := make([]byte, 2<<20)
	rand.Read(question)
	c.Write(question)
	c.CloseWrite()
	got, err := io.ReadAll(c)
	if err != nil || !bytes.Equal(got, answer) {
		t.Errorf("%d bytes of %d, %v", len(got), len(answer), err)
	}
	if q := <-asked; q.err != nil || !bytes.Equal(q.got, question) {
		t.Errorf("the handler had %d bytes of %d, %v", len(q.got), len(question), q.err)
	}
}

func TestRefusedBeforeAccept(t *testing.T) {
	d, end := open(t, Config{}, handler{tcp: func(_ context.Context, f *Flow) {
		if f.To().Port() == 81 {
			return // without a decision
		}
		f.Refuse()
		f.Refuse()
		if _, err := f.Accept(); airlock.CodeOf(err) != airlock.Gone {
			t.Errorf("Accept after Refuse: %v", err)
		}
	}})
	g := newGuest(t, end)
	g.dial(t.Context(), "192.0.2.1:1") // the first one also finds its neighbours
	for _, to := range []string{"192.0.2.1:80", "192.0.2.1:81", "[2001:db8::1]:80", "[2001:db8::1]:81"} {
		began := time.Now()
		_, err := g.dial(t.Context(), to)
		if took := time.Since(began); err == nil || !strings.Contains(err.Error(), "connection was refused") || took > 100*time.Millisecond {
			t.Errorf("%s: %v after %v", to, err, took)
		}
	}
	eventually(t, "all flows gone", func() bool { return d.Stats().Flows == 0 })
}

func TestReset(t *testing.T) {
	errs := make(chan error, 1)
	var abort atomic.Bool
	d, end := open(t, Config{}, handler{tcp: func(_ context.Context, f *Flow) {
		c, err := f.Accept()
		if err != nil {
			errs <- err
			return
		}
		io.WriteString(c, "half")
		if abort.Load() {
			io.ReadFull(c, make([]byte, 4))
			c.Abort()
			_, err = c.Read(make([]byte, 1))
			errs <- err
			return
		}
		_, err = io.ReadAll(c)
		errs <- err
	}})
	g := newGuest(t, end)

	c := g.mustDial(t, "192.0.2.1:80")
	io.ReadFull(c, make([]byte, 4))
	g.reset(t) // the guest resets
	if err := <-errs; !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("a handler whose guest resets has %v", err)
	}

	abort.Store(true)
	c = g.mustDial(t, "192.0.2.1:80")
	io.ReadFull(c, make([]byte, 4))
	io.WriteString(c, "more")
	if _, err := io.ReadAll(c); err == nil || !strings.Contains(err.Error(), "reset by peer") {
		t.Errorf("a guest whose handler aborts has %v", err)
	}
	if err := <-errs; !errors.Is(err, net.ErrClosed) {
		t.Errorf("a handler that aborted has %v", err)
	}
	eventually(t, "all flows gone", func() bool { return d.Stats().Flows == 0 })
}

// reset resets every connection of the guest.
func (g guest) reset(t testing.TB) {
	t.Helper()
	for _, ep := range g.RegisteredEndpoints() {
		ep.Abort()
	}
}

func TestDeadlines(t *testing.T) {
	errs := make(chan error, 1)
	_, end := open(t, Config{}, handler{tcp: func(_ context.Context, f *Flow) {
		c, err := f.Accept()
		if err == nil {
			c.SetReadDeadline(time.Now().Add(10 * time.Millisecond))
			_, err = c.Read(make([]byte, 1))
		}
		errs <- err
	}})
	newGuest(t, end).mustDial(t, "192.0.2.1:80")
	var timeout net.Error
	if err := <-errs; !errors.As(err, &timeout) || !timeout.Timeout() {
		t.Errorf("read at a deadline: %v", err)
	}
}

func TestFlowBudget(t *testing.T) {
	block := make(chan bool)
	var refused atomic.Int64
	d, end := open(t, Config{MaxFlows: 5, Refused: func() { refused.Add(1) }, Linger: 50 * time.Millisecond, UDP: anyUDP}, handler{
		tcp: func(_ context.Context, f *Flow) {
			if f.To().Port() == 80 {
				if _, err := f.Accept(); err != nil {
					t.Error(err)
				}
			}
			<-block // of port 81, one that is not decided yet
		},
		udp: func(_ context.Context, _, _ netip.AddrPort, c net.Conn) { <-block },
	})
	g := newGuest(t, end)
	for range 3 {
		g.mustDial(t, "192.0.2.1:80")
	}
	go g.dial(t.Context(), "192.0.2.1:81")
	g.dialUDP(t, "192.0.2.1:53").Write([]byte("x"))
	eventually(t, "five flows", func() bool { return d.Stats().Flows == 5 })
	for range 3 {
		began := time.Now()
		_, err := g.dial(t.Context(), "192.0.2.1:80")
		if took := time.Since(began); err == nil || !strings.Contains(err.Error(), "refused") || took > 100*time.Millisecond {
			t.Errorf("one more: %v after %v", err, took)
		}
	}
	u := g.dialUDP(t, "192.0.2.1:53")
	u.Write([]byte("x"))
	if err := unreachable(u); err == nil || !strings.Contains(err.Error(), "refused") {
		t.Errorf("one more of UDP: %v", err)
	}
	if s := d.Stats(); s.Flows != 5 || s.Refused != 4 || refused.Load() != 4 {
		t.Errorf("%+v, told of %d", s, refused.Load())
	}
	close(block)
	eventually(t, "room again", func() bool { return d.Stats().Flows == 0 })
	c := g.mustDial(t, "192.0.2.1:80")
	if got, err := io.ReadAll(c); len(got) != 0 || err != nil {
		t.Errorf("a flow after the others: %q, %v", got, err)
	}
}

func TestUDP(t *testing.T) {
	type flow struct{ from, to netip.AddrPort }
	flows := make(chan flow, 8)
	d, end := open(t, Config{UDPIdle: 200 * time.Millisecond, UDP: func(to netip.AddrPort) bool { return to.Port() == 53 }}, handler{
		udp: func(_ context.Context, from, to netip.AddrPort, c net.Conn) {
			flows <- flow{from, to}
			b := make([]byte, 64<<10)
			for {
				n, err := c.Read(b)
				if err != nil {
					if err != io.EOF {
						t.Errorf("an idle flow ended with %v", err)
					}
					return
				}
				c.Write(append([]byte("re:"), b[:n]...))
			}
		},
	})
	g := newGuest(t, end)
	for _, to := range []string{"10.0.0.1:53", "[fd61:6972::1]:53", "8.8.8.8:53"} {
		c := g.dialUDP(t, to)
		for _, q := range []string{"A", "AAAA", strings.Repeat("x", 40000), ""} { // two questions of one port are one flow
			c.Write([]byte(q))
			b := make([]byte, 64<<10)
			n, err := c.Read(b)
			if err != nil || string(b[:n]) != "re:"+q {
				t.Errorf("%s: %d bytes, %v", to, n, err)
			}
		}
		f := <-flows
		if f.to != netip.MustParseAddrPort(to) || f.from.Port() != uint16(c.LocalAddr().(*net.UDPAddr).Port) {
			t.Errorf("%s came as %+v", to, f)
		}
	}
	if len(flows) != 0 {
		t.Errorf("%d flows more than sources", len(flows))
	}
	eventually(t, "idle flows end", func() bool { return d.Stats().Flows == 0 })
}

func TestRefusedUDP(t *testing.T) {
	for name, admits := range map[string]func(netip.AddrPort) bool{"none": nil, "dns only": func(to netip.AddrPort) bool { return to.Port() == 53 }} {
		d, end := open(t, Config{UDP: admits}, handler{})
		g := newGuest(t, end)
		g.dial(t.Context(), "192.0.2.1:1")
		g.dial(t.Context(), "[2001:db8::1]:1")
		for _, to := range []string{"142.250.1.1:443", "[2001:db8::1]:443"} {
			c := g.dialUDP(t, to)
			began := time.Now()
			c.Write([]byte("quic"))
			err := unreachable(c)
			if took := time.Since(began); err == nil || !strings.Contains(err.Error(), "refused") || took > 100*time.Millisecond {
				t.Errorf("%s, %s: %v after %v", name, to, err, took)
			}
		}
		if s := d.Stats(); s.Flows != 0 || s.Barred != 2 {
			t.Errorf("%s: %+v", name, s)
		}
	}
}

// A decision may take its time: it holds up nothing else, and what the guest
// said meanwhile is served after it, in its order.
func TestUDPWaitsForItsDecision(t *testing.T) {
	for _, to := range []string{"192.0.2.1:123", "[2001:db8::1]:123"} {
		decide := make(chan bool)
		asked := make(chan netip.AddrPort, 8)
		d, end := open(t, Config{UDP: anyUDP}, handler{tcp: echo, decide: func(_ context.Context, f *Datagrams) {
			asked <- f.To()
			<-decide
			c, err := f.Accept()
			if err != nil {
				t.Error(err)
				return
			}
			if _, err := f.Accept(); airlock.CodeOf(err) != airlock.Gone {
				t.Errorf("a second Accept: %v", err)
			}
			f.Refuse() // does nothing
			io.Copy(c, c)
		}})
		g := newGuest(t, end)
		g.mustDial(t, to).Close() // the first one also finds its neighbours
		eventually(t, "no flow", func() bool { return d.Stats().Flows == 0 })
		c := g.dialUDP(t, to)
		for _, text := range []string{"a", "b", "c", "d", "lost", "lost too"} {
			io.WriteString(c, text)
		}
		if got := <-asked; got != netip.MustParseAddrPort(to) {
			t.Errorf("asked about %v", got)
		}
		g.mustDial(t, "192.0.2.1:80") // also tells that all six were looked at
		if s := d.Stats(); s.Flows != 2 || s.Refused != 0 || s.Barred != 0 {
			t.Errorf("%+v", s)
		}
		close(decide)
		b := make([]byte, 16)
		read := func(want string) {
			t.Helper()
			if n, err := c.Read(b); err != nil || string(b[:n]) != want {
				t.Errorf("%s: %q, %v; want %q", to, b[:n], err, want)
			}
		}
		for _, want := range []string{"a", "b", "c", "d"} {
			read(want)
		}
		io.WriteString(c, "e")
		read("e")
		if len(asked) != 0 {
			t.Errorf("%s was asked about %d times more", to, len(asked))
		}
	}
}

// A refusal is known at once, whether it was said or the handler returned, and
// the next datagram is decided anew.
func TestUDPRefusedByItsDecision(t *testing.T) {
	var asked atomic.Int64
	d, end := open(t, Config{UDP: anyUDP}, handler{decide: func(_ context.Context, f *Datagrams) {
		asked.Add(1)
		time.Sleep(5 * time.Millisecond) // as long as a record takes
		if f.To().Port() == 123 {
			f.Refuse()
			f.Refuse()
			if _, err := f.Accept(); airlock.CodeOf(err) != airlock.Gone {
				t.Errorf("Accept after Refuse: %v", err)
			}
		}
	}})
	g := newGuest(t, end)
	g.dial(t.Context(), "192.0.2.1:1") // the first one also finds its neighbours
	g.dial(t.Context(), "[2001:db8::1]:1")
	for _, to := range []string{"192.0.2.1:123", "192.0.2.1:124", "[2001:db8::1]:123", "[2001:db8::1]:124"} {
		c := g.dialUDP(t, to)
		for range 2 {
			began := time.Now()
			c.Write(make([]byte, 3000))
			err := unreachable(c)
			if took := time.Since(began); err == nil || !strings.Contains(err.Error(), "refused") || took > 100*time.Millisecond {
				t.Errorf("%s: %v after %v", to, err, took)
			}
			eventually(t, "the flow ends", func() bool { return d.Stats().Flows == 0 })
		}
	}
	if n := asked.Load(); n != 8 {
		t.Errorf("%d decisions, want 8", n)
	}
}

// A flood of datagrams of all ports, each of them to be decided, costs what the
// budget is.
func TestUDPFlood(t *testing.T) {
	const tuples, budget = 10000, 64
	before, goroutines := live(), runtime.NumGoroutine()
	var asked atomic.Int64
	d, end := open(t, Config{MaxFlows: budget, UDP: anyUDP}, handler{decide: func(ctx context.Context, f *Datagrams) {
		asked.Add(1)
		<-ctx.Done()
		if _, err := f.Accept(); airlock.CodeOf(err) != airlock.Gone {
			t.Errorf("a flow was accepted after the end: %v", err)
		}
	}})
	go io.Copy(io.Discard, end)
	for i := range uint16(tuples) {
		body := strings.Repeat("x", 1000)
		frame := frame4("10.0.0.2", "192.0.2.1", 17, udpFrom(1000+i, 123, body))
		if i%2 == 1 {
			frame = frame6("fd61:6972::2", "2001:db8::1", 17, 64, udpFrom(1000+i, 123, body))
		}
		write(t, end, frame)
	}
	for range 100 { // more of one that is not decided yet
		write(t, end, frame4("10.0.0.2", "192.0.2.1", 17, udpFrom(1000, 123, strings.Repeat("y", 60000))))
	}
	eventually(t, "all were looked at", func() bool { return d.Stats().Refused == tuples-budget })
	eventually(t, "as many decisions as there may be flows", func() bool { return asked.Load() == budget })
	if n := runtime.NumGoroutine() - goroutines; n > budget+16 {
		t.Errorf("%d goroutines", n)
	}
	if grown := live() - before; grown > budget*(keptBytes+16<<10)+8<<20 {
		t.Errorf("%d KB are kept", grown>>10)
	}
	d.Close()
	if n := asked.Load(); n != budget {
		t.Errorf("%d decisions, want %d", n, budget)
	}
}

// That a guest has gone is no event on its wire, and known all the same.
func TestGuestHasGone(t *testing.T) {
	d, end := open(t, Config{Probe: 10 * time.Millisecond}, handler{tcp: echo})
	g := newGuest(t, end)
	c := g.mustDial(t, "192.0.2.1:80")
	frames := g.Stats().NICs.Rx.Packets.Value()
	eventually(t, "some probes", func() bool { return g.Stats().NICs.Rx.Packets.Value() > frames+3 })
	io.WriteString(c, "x")
	if _, err := io.ReadFull(c, make([]byte, 1)); err != nil {
		t.Error(err)
	}
	select {
	case <-d.Done():
		t.Fatal("a guest that is there is said to have gone")
	default:
	}

	other, end := open(t, Config{Probe: 10 * time.Millisecond}, handler{})
	end.Close()
	for what, d := range map[string]*Door{"gone": other, "closed": d} {
		if what == "closed" {
			d.Close()
		}
		select {
		case <-d.Done():
		case <-time.After(5 * time.Second):
			t.Errorf("%s: nobody is told", what)
		}
	}
}

// Only the gateway itself answers an echo: nothing pretends that others are there.
func TestEcho(t *testing.T) {
	d, end := open(t, Config{}, handler{})
	g := newGuest(t, end)
	ping := func(to string) tcpip.Endpoint {
		a, proto := full(to + ":0")
		trans, body := icmp.ProtocolNumber4, header.ICMPv4(make([]byte, header.ICMPv4MinimumSize))
		body.SetType(header.ICMPv4Echo)
		if proto == ipv6.ProtocolNumber {
			trans = icmp.ProtocolNumber6
			header.ICMPv6(body).SetType(header.ICMPv6EchoRequest)
		}
		var wq waiter.Queue
		ep, err := g.NewEndpoint(trans, proto, &wq)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := ep.Write(bytes.NewReader(body), tcpip.WriteOptions{To: &a}); err != nil {
			t.Fatal(err)
		}
		return ep
	}
	answered := func(ep tcpip.Endpoint) bool { return ep.Readiness(waiter.ReadableEvents) != 0 }
	other4, other6 := ping("8.8.8.8"), ping("[2001:db8::1]")
	eventually(t, "others are dropped", func() bool { return d.Stats().Dropped >= 2 })
	own4, own6 := ping("10.0.0.1"), ping("[fd61:6972::1]")
	eventually(t, "an answer", func() bool { return answered(own4) && answered(own6) })
	if answered(other4) || answered(other6) {
		t.Error("an address that is not the gateway's answered")
	}
	for _, ep := range []tcpip.Endpoint{own4, own6, other4, other6} {
		ep.Close()
	}
}

// A guest that does not read, or a handler that does not, holds up itself only
// and costs what the buffers are.
func TestSlowReaders(t *testing.T) {
	wrote := make(chan int, 1)
	d, end := open(t, Config{}, handler{tcp: func(ctx context.Context, f *Flow) {
		c, err := f.Accept()
		if err != nil {
			t.Error(err)
			return
		}
		if f.To().Port() == 80 { // the guest does not read
			c.SetWriteDeadline(time.Now().Add(300 * time.Millisecond))
			n, _ := c.Write(make([]byte, 64<<20))
			wrote <- n
			return
		}
		<-ctx.Done() // the handler does not read
	}})
	g := newGuest(t, end)
	g.mustDial(t, "192.0.2.1:80")
	if n := <-wrote; n == 0 || n > 16<<20 { // with the guest's own buffers
		t.Errorf("%d bytes were written to who does not read", n)
	}
	c := g.mustDial(t, "192.0.2.1:81")
	c.SetWriteDeadline(time.Now().Add(300 * time.Millisecond))
	if n, _ := c.Write(make([]byte, 64<<20)); n == 0 || n > 16<<20 {
		t.Errorf("%d bytes were taken from who was not read", n)
	}
	d.Close()
	if _, err := io.ReadAll(c); err == nil {
		t.Error("a closed door ended its flow as if it were whole")
	}
}

// A guest that fills every flow makes the door keep what the buffers are, and
// those of flows beyond the first ones are small.
func TestBytesOfManyFlowsAreBounded(t *testing.T) {
	const flows = 2 * roomyFlows
	d, end := open(t, Config{}, handler{tcp: func(ctx context.Context, f *Flow) {
		if _, err := f.Accept(); err != nil {
			t.Error(err)
		}
		<-ctx.Done()
	}})
	g := newGuest(t, end)
	var writing sync.WaitGroup
	for range flows {
		c := g.mustDial(t, "192.0.2.1:80")
		writing.Go(func() {
			c.SetWriteDeadline(time.Now().Add(500 * time.Millisecond))
			c.Write(make([]byte, 8<<20))
		})
	}
	writing.Wait()
	d.mu.Lock()
	defer d.mu.Unlock()
	total := 0
	for k := range d.flows {
		f := k.(*Flow)
		f.mu.Lock()
		n, err := f.ep.GetSockOptInt(tcpip.ReceiveQueueSizeOption)
		f.mu.Unlock()
		if err != nil || n > bufferMost {
			t.Errorf("a flow keeps %d bytes, %v", n, err)
		}
		total += n
	}
	if most := roomyFlows*bufferMost + (flows-roomyFlows)*bufferTight; total == 0 || total > most {
		t.Errorf("%d flows keep %d bytes, more than %d", flows, total, most)
	}
	t.Logf("%d flows keep %d KB", flows, total>>10)
}

func TestTimeouts(t *testing.T) {
	const short = 50 * time.Millisecond
	errs := make(chan error, 4)
	serve := func(ctx context.Context, f *Flow) {
		c, err := f.Accept()
		if err == nil && f.To().Port() == 80 {
			_, err = c.Read(make([]byte, 1))
		}
		errs <- err
	}
	t.Run("idle", func(t *testing.T) {
		_, end := open(t, Config{TCPIdle: short}, handler{tcp: serve})
		c := newGuest(t, end).mustDial(t, "192.0.2.1:80")
		if err := <-errs; !errors.Is(err, net.ErrClosed) {
			t.Errorf("the handler has %v", err)
		}
		if _, err := c.Read(make([]byte, 1)); err == nil || !strings.Contains(err.Error(), "reset") {
			t.Errorf("the guest has %v", err)
		}
	})
	t.Run("linger", func(t *testing.T) {
		d, end := open(t, Config{Linger: short}, handler{tcp: serve})
		newGuest(t, end).mustDial(t, "192.0.2.1:81") // a guest that does not end its half
		if err := <-errs; err != nil {
			t.Error(err)
		}
		eventually(t, "the flow ends", func() bool { return d.Stats().Flows == 0 })
	})
	t.Run("handshake", func(t *testing.T) {
		d, end := open(t, Config{Handshake: short}, handler{tcp: serve})
		write(t, end, segment(header.TCPFlagSyn, 1024, 80)) // nobody answers the door's SYN-ACK
		if err := <-errs; airlock.CodeOf(err) != airlock.Gone {
			t.Error(err)
		}
		eventually(t, "the flow ends", func() bool { return d.Stats().Flows == 0 })
	})
}

// Who says that it is someone else is not heard, whatever it tries.
func TestSpoofedSources(t *testing.T) {
	var mu sync.Mutex
	var told []string
	note := func(from, to netip.AddrPort) {
		mu.Lock()
		told = append(told, from.String()+" "+to.String())
		mu.Unlock()
	}
	d, end := open(t, Config{UDP: anyUDP}, handler{
		tcp: func(_ context.Context, f *Flow) { note(f.From(), f.To()) },
		udp: func(_ context.Context, from, to netip.AddrPort, _ net.Conn) { note(from, to) },
	})
	syn := tcpBody(header.TCPFlagSyn, 1024, 80)
	spoofed := [][]byte{
		frame4("10.0.0.3", "192.0.2.1", 6, syn),
		frame4("10.0.0.1", "192.0.2.1", 6, syn),
		frame4("10.0.0.3", "192.0.2.1", 17, udpBody(53, "q")),
		frame6("fd61:6972::3", "2001:db8::1", 6, 64, syn),
		frame6("fe80::2", "2001:db8::1", 17, 64, udpBody(53, "q")),
		with(segment(header.TCPFlagSyn, 1024, 80), 11, 3),
		arpFrame(header.ARPReply, testRules.guestMAC, "10.0.0.3", "10.0.0.1"), // poisons nothing
	}
	for _, f := range spoofed {
		write(t, end, f)
	}
	write(t, end, segment(header.TCPFlagSyn, 1024, 80))
	eventually(t, "one flow", func() bool { mu.Lock(); defer mu.Unlock(); return len(told) > 0 })
	if want := []string{"10.0.0.2:1024 192.0.2.1:80"}; !slices.Equal(told, want) || d.Stats().Dropped != uint64(len(spoofed)) {
		t.Errorf("%v, want %v; %+v", told, want, d.Stats())
	}
}

// A flood of SYNs takes the budget and nothing else; each flow is told once. A
// guest that reads no answer holds nothing up.
func TestSynFlood(t *testing.T) {
	for name, reads := range map[string]bool{"reading": true, "not reading": false} {
		t.Run(name, func(t *testing.T) {
			before := runtime.NumGoroutine()
			var told atomic.Int64
			d, end := open(t, Config{MaxFlows: 64}, handler{tcp: func(_ context.Context, f *Flow) {
				told.Add(1)
				f.Accept()
			}})
			if reads {
				go io.Copy(io.Discard, end)
			}
			for range 3 {
				for port := range uint16(5000) {
					write(t, end, segment(header.TCPFlagSyn, 1000+port, 80))
				}
			}
			eventually(t, "all were looked at", func() bool { return d.Stats().Refused == 15000-3*64 })
			if n := told.Load(); n != 64 {
				t.Errorf("%d flows were told, want 64", n)
			}
			if n := runtime.NumGoroutine() - before; n > 64+32 {
				t.Errorf("%d goroutines", n)
			}
			if lost := d.Stats().Lost; reads != (lost == 0) {
				t.Errorf("%d answers were lost", lost)
			}
			began := time.Now()
			d.Close()
			if took := time.Since(began); took > 2*time.Second {
				t.Errorf("Close took %v", took)
			}
		})
	}
}

// Close ends handlers that wait for anything, and leaves nothing behind.
func TestCloseLeavesNothing(t *testing.T) {
	sockets := func() int {
		entries, err := filepath.Glob("/proc/self/fd/*")
		if err != nil {
			t.Fatal(err)
		}
		n := 0
		for _, e := range entries {
			if to, _ := os.Readlink(e); strings.HasPrefix(to, "socket:") {
				n++
			}
		}
		return n
	}
	before, fds := runtime.NumGoroutine(), sockets()
	for range 3 {
		var handlers atomic.Int64
		ours, guests := pair(t)
		d, err := Open(ours, Config{UDP: anyUDP}, handler{
			tcp: func(ctx context.Context, f *Flow) {
				handlers.Add(1)
				defer handlers.Add(-1)
				if f.To().Port() == 83 {
					<-ctx.Done()
					if _, err := f.Accept(); err == nil {
						t.Error("a flow was accepted after the end")
					}
					return
				}
				c, err := f.Accept()
				if err != nil {
					return
				}
				switch f.To().Port() {
				case 80:
					c.Read(make([]byte, 1))
				case 81:
					c.Write(make([]byte, 64<<20))
				case 82:
					<-ctx.Done()
				}
			},
			udp: func(_ context.Context, _, _ netip.AddrPort, c net.Conn) {
				handlers.Add(1)
				defer handlers.Add(-1)
				io.Copy(io.Discard, c)
			},
		})
		if err != nil {
			t.Fatal(err)
		}
		t.Run("", func(t *testing.T) {
			g := newGuest(t, guests)
			for _, to := range []string{"192.0.2.1:80", "192.0.2.1:81", "[2001:db8::1]:82", "[2001:db8::1]:80"} {
				g.mustDial(t, to)
			}
			ctx, cancel := context.WithCancel(t.Context())
			var dialing sync.WaitGroup
			dialing.Go(func() { g.dial(ctx, "192.0.2.1:83") })
			g.dialUDP(t, "192.0.2.1:53").Write([]byte("x"))
			eventually(t, "six handlers", func() bool { return handlers.Load() == 6 })
			var closing sync.WaitGroup
			for range 3 { // at once
				closing.Go(func() {
					d.Close()
					if n := handlers.Load(); n != 0 {
						t.Errorf("Close returned while %d handlers ran", n)
					}
				})
			}
			closing.Wait()
			if n := d.Stats().Flows; n != 0 {
				t.Errorf("%d flows are left", n)
			}
			cancel()
			dialing.Wait()
		})
		guests.Close()
	}
	eventually(t, "all goroutines ended", func() bool { return runtime.NumGoroutine() <= before })
	if n := sockets(); n != fds {
		t.Errorf("%d sockets, before %d", n, fds)
	}
}

func TestOpenRefuses(t *testing.T) {
	stream, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(stream[1])
	streamEnd := os.NewFile(uintptr(stream[0]), "stream")
	defer streamEnd.Close()
	plain, err := os.CreateTemp(t.TempDir(), "")
	if err != nil {
		t.Fatal(err)
	}
	defer plain.Close()
	ours, guests := pair(t)
	defer ours.Close()
	defer guests.Close()
	small, others := pair(t)
	defer small.Close()
	defer others.Close()
	if err := unix.SetsockoptInt(int(small.Fd()), unix.SOL_SOCKET, unix.SO_SNDBUF, 60000); err != nil {
		t.Fatal(err)
	}
	a := netip.MustParseAddr
	for name, c := range map[string]struct {
		fd  *os.File
		cfg Config
	}{
		"a stream":         {streamEnd, Config{}},
		"a file":           {plain, Config{}},
		"a small buffer":   {small, Config{}},
		"small MTU":        {ours, Config{MTU: 1279}},
		"large MTU":        {ours, Config{MTU: 65521}},
		"no flows":         {ours, Config{MaxFlows: -1}},
		"one address":      {ours, Config{Guest4: a("10.0.0.1")}},
		"wrong family":     {ours, Config{Guest4: a("::1")}},
		"IPv4 in IPv6":     {ours, Config{Guest6: a("::ffff:1.2.3.4")}},
		"zone":             {ours, Config{Guest6: a("fe80::1%a")}},
		"group MAC":        {ours, Config{GuestMAC: [6]byte{1, 0, 0, 0, 0, 2}}},
		"same MAC":         {ours, Config{GuestMAC: [6]byte{2, 0, 0, 0, 0, 1}}},
		"negative timeout": {ours, Config{Linger: -1}},
		"negative probe":   {ours, Config{Probe: -1}},
	} {
		d, err := Open(c.fd, c.cfg, handler{})
		if err == nil {
			d.Close()
			t.Fatalf("%s was taken", name)
		}
		if _, err := c.fd.Stat(); err != nil {
			t.Fatalf("%s: the descriptor was taken over: %v", name, err)
		}
	}
	d, err := Open(ours, Config{}, handler{}) // nothing was spoilt
	if err != nil {
		t.Fatal(err)
	}
	d.Close()
}

// 200 doors with 200 flows each are to stay far below 3 GB: a twentieth of them,
// in proportion, with the guests' stacks, which are in this process too.
func TestMemoryOfFlows(t *testing.T) {
	const doors, flows = 10, 200
	before := live()
	var opening sync.WaitGroup
	for range doors {
		d, end := open(t, Config{}, handler{tcp: echo})
		opening.Go(func() {
			g := newGuest(t, end)
			for range flows {
				c := g.mustDial(t, "192.0.2.1:80")
				io.WriteString(c, "x")
				io.ReadFull(c, make([]byte, 1))
			}
			if n := d.Stats().Flows; n != flows {
				t.Errorf("a door has %d flows", n)
			}
		})
	}
	opening.Wait()
	if grown := live() - before; grown > 3<<30*doors/200 {
		t.Errorf("%d doors with %d flows each take %d MB", doors, flows, grown>>20)
	}
}

// live returns the bytes of heap and stacks that are in use.
func live() int {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int(m.HeapInuse + m.StackInuse)
}
