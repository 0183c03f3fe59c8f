package web

import (
	"bufio"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// TestMain fails if a test leaves goroutines behind.
func TestMain(m *testing.M) {
	before := runtime.NumGoroutine()
	code := m.Run()
	http.DefaultTransport.(*http.Transport).CloseIdleConnections()
	fuzzing := flag.Lookup("test.fuzz").Value.String() != "" // it has goroutines of its own
	for wait := time.Now().Add(5 * time.Second); code == 0 && !fuzzing && runtime.NumGoroutine() > before; {
		if time.Now().After(wait) {
			buf := make([]byte, 1<<20)
			fmt.Fprintf(os.Stderr, "goroutines were left behind:\n%s\n", buf[:runtime.Stack(buf, true)])
			code = 1
			break
		}
		time.Sleep(10 * time.Millisecond)
	}
	os.Exit(code)
}

// root makes an authority and the pool of those who trust it.
func root(t testing.TB) (*Authority, *x509.CertPool) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	must(t, err)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "test root"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(240 * time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	must(t, err)
	cert, err := x509.ParseCertificate(der)
	must(t, err)
	a, err := NewAuthority(cert, key)
	must(t, err)
	pool := x509.NewCertPool()
	pool.AddCert(cert)
	return a, pool
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// world is a door with what it reaches. Its fields are set before open.
type world struct {
	t      testing.TB
	cfg    Config
	trust  *x509.CertPool // of the sandbox
	outer  *Authority     // that signs upstream's certificates
	names  map[netip.Addr]string
	places map[string]string // host:port to the address of a real listener
	modes  map[string]Mode
	deny   func(Request) error
	door   *Door

	pairs   net.Listener // makes both ends of a flow
	dialing sync.Mutex
	flows   []net.Conn // the sandbox's ends
	serving sync.WaitGroup
	held    atomic.Int64 // names

	mu       sync.Mutex
	log      []string // what was admitted, crossed, refused
	ended    chan string
	connects []Route
}

var gatewayAddr = netip.MustParseAddr("10.0.0.1")

func newWorld(t testing.TB) *world {
	w := &world{t: t, names: map[netip.Addr]string{}, places: map[string]string{}, modes: map[string]Mode{}, ended: make(chan string, 1000)}
	var err error
	w.pairs, err = net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	w.cfg.Authority, w.trust = root(t)
	w.outer, w.cfg.Roots = root(t)
	w.cfg.Judge, w.cfg.Router = w, w
	w.cfg.Own = []netip.Addr{gatewayAddr}
	w.cfg.Hold = func(a netip.Addr) (string, func(), bool) {
		n, ok := w.names[a]
		if ok {
			w.held.Add(1)
		}
		return n, func() { w.held.Add(-1) }, ok
	}
	return w
}

func (w *world) open() *world {
	d, err := Open(w.cfg)
	must(w.t, err)
	w.door = d
	w.t.Cleanup(w.close)
	return w
}

func (w *world) close() {
	w.pairs.Close()
	w.dialing.Lock()
	for _, c := range w.flows {
		c.Close()
	}
	w.dialing.Unlock()
	w.door.Close()
	w.serving.Wait()
	want(w.t, "names held at the end", w.held.Load(), 0)
}

// name gives a name an address inside, and says where its ports lead.
func (w *world) name(name string, ports map[uint16]string) netip.Addr {
	a := netip.AddrFrom4([4]byte{198, 18, 0, byte(1 + len(w.names))})
	w.names[a] = name
	for port, to := range ports {
		w.places[fmt.Sprintf("%s:%d", name, port)] = to
	}
	return a
}

func (w *world) note(format string, args ...any) {
	w.mu.Lock()
	w.log = append(w.log, fmt.Sprintf(format, args...))
	w.mu.Unlock()
}

// took returns and forgets what was noted.
func (w *world) took() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	log := w.log
	w.log = nil
	return log
}

func (w *world) Admit(_ context.Context, host string, port uint16) (Mode, error) {
	at := fmt.Sprintf("%s:%d", host, port)
	if host == "refused.test" {
		w.note("refuse %s", at)
		return 0, &Denied{Reason: "refused.test is refused"}
	}
	return w.modes[at], nil
}

func (w *world) Cross(_ context.Context, r Request) (Permit, error) {
	if w.deny != nil {
		if err := w.deny(r); err != nil {
			w.note("deny %s %s://%s:%d%s", r.Method, r.Scheme, r.Host, r.Port, r.Path)
			return nil, err
		}
	}
	w.note("%s %s://%s:%d%s %s", r.Method, r.Scheme, r.Host, r.Port, r.Path, r.IP)
	return permit{w}, nil
}

func (w *world) Refused(_ context.Context, r Request, d *Denied) {
	w.note("refused %d %s %s://%s:%d", d.status(), r.Method, r.Scheme, r.Host, r.Port)
}

type permit struct{ w *world }

func (p permit) End(status int, out, in int64, err error) {
	failed := ""
	if err != nil {
		failed = " failed"
	}
	p.w.ended <- fmt.Sprintf("%d out %d in %d%s", status, out, in, failed)
}

func (w *world) end() string {
	w.t.Helper()
	select {
	case s := <-w.ended:
		return s
	case <-time.After(10 * time.Second):
		w.t.Fatal("a crossing does not end")
		return ""
	}
}

var upstreamAddr = netip.MustParseAddr("203.0.113.7")

func (w *world) Routes(_ context.Context, _, host string, port uint16) ([]Route, error) {
	if host == "169.254.169.254" {
		return nil, &Denied{Reason: "metadata addresses are refused"}
	}
	if w.places[fmt.Sprintf("%s:%d", host, port)] == "" {
		return nil, errors.New("no such host")
	}
	return []Route{{IP: upstreamAddr}}, nil
}

func (w *world) Connect(ctx context.Context, r Route) (net.Conn, error) {
	w.mu.Lock()
	w.connects = append(w.connects, r)
	w.mu.Unlock()
	return new(net.Dialer).DialContext(ctx, "tcp", w.places[fmt.Sprintf("%s:%d", r.Host, r.Port)])
}

// flow is a connection of the sandbox, over the loopback.
type flow struct {
	to netip.AddrPort
	nc net.Conn
}

func (f flow) To() netip.AddrPort        { return f.to }
func (f flow) Accept() (net.Conn, error) { return f.nc, nil }
func (f flow) Refuse() {
	f.nc.(*net.TCPConn).SetLinger(0)
	f.nc.Close()
}

// dial opens a connection from the sandbox.
func (w *world) dial(to netip.AddrPort) net.Conn {
	w.t.Helper()
	c, err := w.tryDial(to)
	must(w.t, err)
	return c
}

// tryDial is dial for goroutines that may outlive the test, as those of
// http.Transport do that dial for a request that another connection served.
func (w *world) tryDial(to netip.AddrPort) (net.Conn, error) {
	w.dialing.Lock()
	defer w.dialing.Unlock()
	inner, err := net.Dial("tcp", w.pairs.Addr().String())
	if err != nil {
		return nil, err
	}
	outer, err := w.pairs.Accept()
	if err != nil {
		inner.Close()
		return nil, err
	}
	w.flows = append(w.flows, inner)
	w.serving.Go(func() { w.door.Serve(context.Background(), flow{to, outer}) })
	inner.SetDeadline(time.Now().Add(2 * time.Minute))
	return inner, nil
}

func (w *world) at(a netip.Addr, port uint16) net.Conn { return w.dial(netip.AddrPortFrom(a, port)) }

// client speaks as a sandbox's programs do; it resolves by w.names.
func (w *world) client(h2 bool) *http.Client {
	tr := &http.Transport{
		TLSClientConfig: &tls.Config{RootCAs: w.trust}, ForceAttemptHTTP2: h2, DisableCompression: true,
		DialContext: func(_ context.Context, _, addr string) (net.Conn, error) { return w.tryDial(w.resolve(addr)) },
	}
	if !h2 {
		tr.TLSNextProto = map[string]func(string, *tls.Conn) http.RoundTripper{}
	}
	w.t.Cleanup(tr.CloseIdleConnections)
	return &http.Client{Transport: tr, Timeout: 2 * time.Minute}
}

// resolve is the sandbox's DNS.
func (w *world) resolve(addr string) netip.AddrPort {
	host, port, err := parseAuthority(addr)
	must(w.t, err)
	for a, n := range w.names {
		if n == host {
			return netip.AddrPortFrom(a, port)
		}
	}
	a, err := netip.ParseAddr(host)
	must(w.t, err)
	return netip.AddrPortFrom(a, port)
}

// tlsTo opens TLS from the sandbox.
func (w *world) tlsTo(a netip.Addr, port uint16, sni string, alpn ...string) *tls.Conn {
	return tls.Client(w.at(a, port), &tls.Config{ServerName: sni, RootCAs: w.trust, NextProtos: alpn})
}

// upstream starts a real server and returns its address.
func (w *world) upstream(h http.HandlerFunc, secure bool, name string) string {
	s := httptest.NewUnstartedServer(h)
	s.Config.ErrorLog = quietLog
	if secure {
		cert, err := w.outer.mint(name)
		must(w.t, err)
		s.TLS = &tls.Config{Certificates: []tls.Certificate{*cert}}
		s.EnableHTTP2 = true
		s.StartTLS()
	} else {
		s.Start()
	}
	w.t.Cleanup(s.Close)
	return s.Listener.Addr().String()
}

// raw sends text and returns the first answer.
func raw(t testing.TB, c net.Conn, text string) (*http.Response, string) {
	t.Helper()
	_, err := io.WriteString(c, text)
	must(t, err)
	return answer(t, bufio.NewReader(c))
}

func answer(t testing.TB, r *bufio.Reader) (*http.Response, string) {
	t.Helper()
	res, err := http.ReadResponse(r, nil)
	must(t, err)
	body, err := io.ReadAll(res.Body)
	must(t, err)
	return res, string(body)
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

func want[T comparable](t testing.TB, what string, got, wanted T) {
	t.Helper()
	if got != wanted {
		t.Errorf("%s:\n got %v\nwant %v", what, got, wanted)
	}
}

func lines(s ...string) string { return strings.Join(s, "\n") }
