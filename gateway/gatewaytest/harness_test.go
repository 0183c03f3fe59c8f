package gatewaytest

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"fmt"
	"io"
	"log"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/link/fdbased"
	"gvisor.dev/gvisor/pkg/tcpip/network/arp"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv4"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv6"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
	"gvisor.dev/gvisor/pkg/tcpip/transport/udp"

	"airlock.dev/airlock"
	"airlock.dev/airlock/gateway/dns"
	"airlock.dev/airlock/gateway/door"
	"airlock.dev/airlock/gateway/upstream"
	"airlock.dev/airlock/gateway/web"
)

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func want[T comparable](t testing.TB, what string, got, wanted T) {
	t.Helper()
	if got != wanted {
		t.Errorf("%s:\n got %v\nwant %v", what, got, wanted)
	}
}

// authority is a root with a key, and the pool of those who trust it.
type authority struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	pool *x509.CertPool
}

func newAuthority(t testing.TB) *authority {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	must(t, err)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "test root"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	must(t, err)
	a := &authority{key: key, pool: x509.NewCertPool()}
	a.cert, err = x509.ParseCertificate(der)
	must(t, err)
	a.pool.AddCert(a.cert)
	return a
}

func (a *authority) leaf(t testing.TB, name string) tls.Certificate {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	must(t, err)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(2), DNSNames: []string{name}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, a.cert, key.Public(), a.key)
	must(t, err)
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
}

// world is a host with its doors. Its fields are set before the first door.
type world struct {
	t      testing.TB
	inner  *authority // that sandboxes trust
	outer  *authority // that signs upstream's certificates
	up     *upstream.Upstream
	modes  map[string]web.Mode // by host:port
	limits web.Limits
	config door.Config

	mu     sync.Mutex
	names  map[string][]netip.Addr
	log    []string
	dialed []string
}

func newWorld(t testing.TB) *world {
	w := &world{t: t, inner: newAuthority(t), outer: newAuthority(t), modes: map[string]web.Mode{}, names: map[string][]netip.Addr{}}
	w.config.UDP = func(to netip.AddrPort) bool { return to.Port() != 443 }
	w.up = upstream.New(upstream.Config{
		Named:     func(a netip.Addr) bool { return a == loopback },
		Synthetic: func(a netip.Addr) bool { return synthetic4.Contains(a) || synthetic6.Contains(a) },
	})
	return w
}

var (
	loopback   = netip.MustParseAddr("127.0.0.1")
	synthetic4 = netip.MustParsePrefix("198.18.0.0/15")
	synthetic6 = netip.MustParsePrefix("fd61:6972:6c6f::/64")
)

// name sets what the host's resolver says of a name.
func (w *world) name(name string, addrs ...string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.names[name] = nil
	for _, a := range addrs {
		w.names[name] = append(w.names[name], netip.MustParseAddr(a))
	}
}

// Lookup implements dns.Resolver.
func (w *world) Lookup(_ context.Context, name string) ([]netip.Addr, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.log = append(w.log, "lookup "+name)
	if addrs, ok := w.names[name]; ok {
		return addrs, nil
	}
	return nil, &net.DNSError{Name: name, IsNotFound: true}
}

func (w *world) note(format string, args ...any) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.log = append(w.log, fmt.Sprintf(format, args...))
}

// took returns and forgets what was decided.
func (w *world) took() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	s := strings.Join(w.log, "\n")
	w.log = nil
	return s
}

// server starts a real server and returns its port.
func (w *world) server(h http.HandlerFunc, secure string) uint16 {
	s := httptest.NewUnstartedServer(h)
	s.Config.ErrorLog = log.New(io.Discard, "", 0)
	if secure == "" {
		s.Start()
	} else {
		s.TLS = &tls.Config{Certificates: []tls.Certificate{w.outer.leaf(w.t, secure)}}
		s.EnableHTTP2 = true
		s.StartTLS()
	}
	w.t.Cleanup(s.Close)
	return portOf(s.Listener)
}

func portOf(l net.Listener) uint16 { return l.Addr().(*net.TCPAddr).AddrPort().Port() }

// judge decides for one sandbox: what has "denied" in its name or path is.
type judge struct{ *world }

func (j judge) Judge(_ context.Context, name, kind string) error {
	if strings.Contains(name, "denied") {
		j.note("deny %s %s", kind, name)
		return airlock.Errorf(airlock.Denied, "no rule permits it")
	}
	return nil
}

func (j judge) Admit(_ context.Context, host string, port uint16) (web.Mode, error) {
	return j.modes[fmt.Sprintf("%s:%d", host, port)], nil
}

func (j judge) Cross(_ context.Context, r web.Request) (web.Permit, error) {
	at := fmt.Sprintf("%s %s://%s:%d%s", r.Method, r.Scheme, r.Host, r.Port, r.Path)
	if strings.Contains(r.Host+r.Path, "denied") {
		j.note("deny %s", at)
		return nil, &web.Denied{Policies: []string{"p1"}, Reason: "no rule permits it"}
	}
	j.note("%s %s %s", at, r.IP, r.Class)
	return ended{}, nil
}

func (j judge) Refused(_ context.Context, r web.Request, d *web.Denied) {
	j.note("refused %s %s://%s:%d: %s", r.Method, r.Scheme, r.Host, r.Port, d.Reason)
}

type ended struct{}

func (ended) End(int, int64, int64, error) {}

// dialer counts what leaves the host.
type dialer struct {
	web.Router
	w *world
}

func (d dialer) Connect(ctx context.Context, r web.Route) (net.Conn, error) {
	d.w.mu.Lock()
	d.w.dialed = append(d.w.dialed, r.IP.String())
	d.w.mu.Unlock()
	return d.Router.Connect(ctx, r)
}

// sandbox is a guest with its door and what is behind it.
type sandbox struct {
	*world
	door *door.Door
	web  *web.Door
	dns  *dns.Server
	s    *stack.Stack
}

var gateway4, gateway6 = netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("fd61:6972::1")

// TCP implements door.Handler.
func (b *sandbox) TCP(ctx context.Context, f *door.Flow) {
	if to := f.To(); to.Port() == 53 && (to.Addr() == gateway4 || to.Addr() == gateway6) {
		if c, err := f.Accept(); err == nil {
			b.dns.ServeTCP(ctx, c)
		}
		return
	}
	b.web.Serve(ctx, flow{f})
}

// UDP implements door.Handler.
func (b *sandbox) UDP(ctx context.Context, f *door.Datagrams) {
	if to := f.To(); to.Port() == 53 && (to.Addr() == gateway4 || to.Addr() == gateway6) {
		if c, err := f.Accept(); err == nil {
			b.dns.ServeUDP(ctx, c)
		}
		return
	}
	b.note("refuse udp %s", f.To())
}

// flow is a door's flow for the web.
type flow struct{ *door.Flow }

func (f flow) Accept() (net.Conn, error) {
	c, err := f.Flow.Accept()
	if err != nil {
		return nil, err
	}
	return c, nil
}

// open makes a sandbox whose guest is in this process.
func (w *world) open() *sandbox {
	b, end := w.wire()
	b.s = newStack(w.t, end)
	return b
}

// wire makes a door, and returns the guest's end of its wire.
func (w *world) wire() (*sandbox, *os.File) {
	t := w.t
	t.Helper()
	ours, end := pair(t)
	b := &sandbox{world: w}
	names, err := dns.NewNames(synthetic4, synthetic6, 64)
	must(t, err)
	b.dns = dns.New(dns.Config{Judge: judge{w}, Resolver: w, Names: names})
	signer, err := web.NewAuthority(w.inner.cert, w.inner.key)
	must(t, err)
	b.web, err = web.Open(web.Config{
		Judge: judge{w}, Router: dialer{w.up.Router(w.Lookup), w}, Authority: signer, Roots: w.outer.pool,
		Hold: names.Hold, Own: []netip.Addr{gateway4, gateway6}, Limits: w.limits,
	})
	must(t, err)
	b.door, err = door.Open(ours, w.config, b)
	must(t, err)
	t.Cleanup(func() { end.Close() })
	t.Cleanup(b.dns.Close)
	t.Cleanup(b.web.Close)
	t.Cleanup(b.door.Close)
	return b, end
}

// newStack is a sandbox's network: a TCP/IP stack with the link layer that
// gVisor has inside.
func newStack(t testing.TB, end *os.File) *stack.Stack {
	t.Helper()
	s := stack.New(stack.Options{
		NetworkProtocols:   []stack.NetworkProtocolFactory{ipv4.NewProtocol, ipv6.NewProtocolWithOptions(ipv6.Options{}), arp.NewProtocol},
		TransportProtocols: []stack.TransportProtocolFactory{tcp.NewProtocol, udp.NewProtocol},
	})
	sack := tcpip.TCPSACKEnabled(true)
	s.SetTransportProtocolOption(tcp.ProtocolNumber, &sack)
	link, err := fdbased.New(&fdbased.Options{
		FDs: []int{int(end.Fd())}, MTU: 65000, EthernetHeader: true, Address: "\x02\x00\x00\x00\x00\x02",
		PacketDispatchMode: fdbased.RecvMMsg, RXChecksumOffload: true, TXChecksumOffload: true, ProcessorsPerChannel: 1,
	})
	must(t, err)
	if err := s.CreateNIC(1, link); err != nil {
		t.Fatal(err)
	}
	v4 := tcpip.AddressWithPrefix{Address: addr("10.0.0.2"), PrefixLen: 24}
	v6 := tcpip.AddressWithPrefix{Address: addr("fd61:6972::2"), PrefixLen: 64}
	for _, a := range []tcpip.ProtocolAddress{{Protocol: ipv4.ProtocolNumber, AddressWithPrefix: v4}, {Protocol: ipv6.ProtocolNumber, AddressWithPrefix: v6}} {
		if err := s.AddProtocolAddress(1, a, stack.AddressProperties{}); err != nil {
			t.Fatal(err)
		}
	}
	s.SetRouteTable([]tcpip.Route{
		{Destination: v4.Subnet(), NIC: 1},
		{Destination: v6.Subnet(), NIC: 1},
		{Destination: header.IPv4EmptySubnet, Gateway: addr("10.0.0.1"), NIC: 1},
		{Destination: header.IPv6EmptySubnet, Gateway: addr("fd61:6972::1"), NIC: 1},
	})
	t.Cleanup(func() {
		link.Attach(nil) // by itself: within Destroy it can wait for a lock that Destroy has
		s.Destroy()
	})
	return s
}

func addr(s string) tcpip.Address { return tcpip.AddrFromSlice(netip.MustParseAddr(s).AsSlice()) }

func full(to netip.AddrPort) (tcpip.FullAddress, tcpip.NetworkProtocolNumber) {
	proto := ipv4.ProtocolNumber
	if to.Addr().Is6() {
		proto = ipv6.ProtocolNumber
	}
	return tcpip.FullAddress{NIC: 1, Addr: tcpip.AddrFromSlice(to.Addr().AsSlice()), Port: to.Port()}, proto
}

// connect opens a connection from inside to an address.
func (b *sandbox) connect(ctx context.Context, to netip.AddrPort) (*gonet.TCPConn, error) {
	a, proto := full(to)
	return gonet.DialContextTCP(ctx, b.s, a, proto)
}

// udp opens a connected socket inside.
func (b *sandbox) udp(to netip.AddrPort) *gonet.UDPConn {
	b.t.Helper()
	a, proto := full(to)
	c, err := gonet.DialUDP(b.s, nil, &a, proto)
	must(b.t, err)
	b.t.Cleanup(func() { c.Close() })
	return c
}

// resolver is that of the programs inside.
func (b *sandbox) resolver(network string) *net.Resolver {
	return &net.Resolver{PreferGo: true, Dial: func(ctx context.Context, _, _ string) (net.Conn, error) {
		if network == "tcp" {
			return b.connect(ctx, netip.AddrPortFrom(gateway4, 53))
		}
		a, proto := full(netip.AddrPortFrom(gateway6, 53))
		return gonet.DialUDP(b.s, nil, &a, proto)
	}}
}

// address is what the sandbox's DNS says of a name.
func (b *sandbox) address(name string) netip.Addr {
	b.t.Helper()
	addrs, err := b.resolver("udp").LookupNetIP(b.t.Context(), "ip4", name+".")
	must(b.t, err)
	return addrs[0].Unmap()
}

// dial opens a connection from inside to a name.
func (b *sandbox) dial(name string, port uint16) *gonet.TCPConn {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(b.t.Context(), 20*time.Second)
	defer cancel()
	c, err := b.connect(ctx, netip.AddrPortFrom(b.address(name), port))
	must(b.t, err)
	b.t.Cleanup(func() { c.Close() })
	c.SetDeadline(time.Now().Add(30 * time.Second))
	return c
}

// client is a program inside.
func (b *sandbox) client(h2 bool) *http.Client {
	tr := &http.Transport{
		TLSClientConfig: &tls.Config{RootCAs: b.inner.pool}, ForceAttemptHTTP2: h2, DisableCompression: true,
		DialContext: func(ctx context.Context, _, to string) (net.Conn, error) {
			host, port, err := net.SplitHostPort(to)
			if err != nil {
				return nil, err
			}
			a, err := netip.ParseAddr(host)
			if err != nil {
				addrs, err := b.resolver("udp").LookupNetIP(ctx, "ip4", host+".")
				if err != nil {
					return nil, err
				}
				a = addrs[0].Unmap()
			}
			p, err := net.LookupPort("tcp", port)
			if err != nil {
				return nil, err
			}
			return b.connect(ctx, netip.AddrPortFrom(a, uint16(p)))
		},
	}
	if !h2 {
		tr.TLSNextProto = map[string]func(string, *tls.Conn) http.RoundTripper{}
	}
	b.t.Cleanup(tr.CloseIdleConnections)
	return &http.Client{Transport: tr, Timeout: 30 * time.Second}
}

func get(t testing.TB, c *http.Client, url string) (*http.Response, string) {
	t.Helper()
	res, err := c.Get(url)
	must(t, err)
	defer res.Body.Close()
	body, err := io.ReadAll(res.Body)
	must(t, err)
	return res, string(body)
}
