package upstream

import (
	"bufio"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"

	"airlock.dev/airlock"
	"airlock.dev/airlock/gateway/web"
)

// proxied records what a proxy was asked for.
type proxied struct {
	mu  sync.Mutex
	log []string
}

func (p *proxied) note(s string) {
	p.mu.Lock()
	p.log = append(p.log, s)
	p.mu.Unlock()
}

func (p *proxied) took() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	s := strings.Join(p.log, ", ")
	p.log = nil
	return s
}

func pipe(a, b net.Conn, r io.Reader) {
	defer a.Close()
	defer b.Close()
	done := make(chan bool)
	go func() {
		io.Copy(b, r)
		b.(interface{ CloseWrite() error }).CloseWrite()
		close(done)
	}()
	io.Copy(a, b)
	a.(interface{ CloseWrite() error }).CloseWrite()
	<-done
}

// ServeHTTP is an HTTP proxy. What it is asked to connect to is at to.
func (p *proxied) serve(to string) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		user, password, _ := (&http.Request{Header: http.Header{"Authorization": r.Header["Proxy-Authorization"]}}).BasicAuth()
		p.note(fmt.Sprintf("%s %s %s %s:%s", r.Method, r.RequestURI, r.Host, user, password))
		if strings.HasPrefix(r.RequestURI, "forbidden.test") {
			w.WriteHeader(http.StatusForbidden)
			return
		}
		up, err := net.Dial("tcp", to)
		if err != nil {
			w.WriteHeader(http.StatusBadGateway)
			return
		}
		greeting := make([]byte, 6)
		io.ReadFull(up, greeting)
		c, b, err := http.NewResponseController(w).Hijack()
		if err != nil {
			up.Close()
			return
		}
		// What the server says first comes with the answer.
		io.WriteString(c, "HTTP/1.1 200 Fine\r\nContent-Length: 3\r\n\r\n"+string(greeting))
		pipe(c, up, b)
	}
}

// socksServer is a SOCKS5 proxy with the user u and the password p.
func (p *proxied) socksServer(t testing.TB, to string) string {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	t.Cleanup(func() { l.Close() })
	serve := func(c net.Conn) {
		defer c.Close()
		r := bufio.NewReader(c)
		read := func(n int) []byte {
			b := make([]byte, n)
			io.ReadFull(r, b)
			return b
		}
		methods := read(int(read(2)[1]))
		user := ""
		if len(methods) == 2 { // none, or a password
			c.Write([]byte{5, 2})
			read(1)
			name := read(int(read(1)[0]))
			user = fmt.Sprintf(" %s:%s", name, read(int(read(1)[0])))
			c.Write([]byte{1, 0})
		} else {
			c.Write([]byte{5, 0})
		}
		kind := read(4)[3]
		var host string
		switch kind {
		case 1:
			host = netip.AddrFrom4([4]byte(read(4))).String()
		case 3:
			host = "name " + string(read(int(read(1)[0])))
		case 4:
			host = netip.AddrFrom16([16]byte(read(16))).String()
		}
		p.note(fmt.Sprintf("%s %d%s", host, binary.BigEndian.Uint16(read(2)), user))
		if host == "name forbidden.test" {
			c.Write([]byte{5, 2, 0, 1, 0, 0, 0, 0, 0, 0})
			return
		}
		up, err := net.Dial("tcp", to)
		if err != nil {
			return
		}
		c.Write([]byte{5, 0, 0, 1, 0, 0, 0, 0, 0, 0})
		pipe(c, up, r)
	}
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go serve(c)
		}
	}()
	return l.Addr().String()
}

func always(t testing.TB, s string) func(string, string, uint16) (*url.URL, error) {
	p, err := url.Parse(s)
	must(t, err)
	return func(string, string, uint16) (*url.URL, error) { return p, nil }
}

// talk says something and returns all that it hears.
func talk(t testing.TB, c net.Conn) string {
	t.Helper()
	defer c.Close()
	c.SetDeadline(time.Now().Add(10 * time.Second))
	_, err := io.WriteString(c, "you")
	must(t, err)
	must(t, c.(interface{ CloseWrite() error }).CloseWrite())
	got, err := io.ReadAll(c)
	must(t, err)
	return string(got)
}

func TestProxies(t *testing.T) {
	to := listen(t).addr
	var seen proxied
	plain := httptest.NewServer(seen.serve(to))
	t.Cleanup(plain.Close)
	secure := httptest.NewUnstartedServer(seen.serve(to))
	secure.Config.ErrorLog = log.New(io.Discard, "", 0)
	secure.StartTLS()
	t.Cleanup(secure.Close)
	roots := x509.NewCertPool()
	roots.AddCert(secure.Certificate())
	socks := seen.socksServer(t, to)
	address := web.Route{Scheme: "https", Host: "one.test", Port: 443, IP: netip.MustParseAddr("203.0.113.7"), Class: "documentation"}
	v6 := address
	v6.IP = netip.MustParseAddr("2001:db8::7")
	name := web.Route{Scheme: "https", Host: "one.test", Port: 443}
	for _, tt := range []struct {
		proxy string
		to    web.Route
		want  string
	}{
		{plain.URL, address, "CONNECT 203.0.113.7:443 203.0.113.7:443 :"},
		{strings.Replace(plain.URL, "//", "//us%40er:p%3Aw@", 1), v6, "CONNECT [2001:db8::7]:443 [2001:db8::7]:443 us@er:p:w"},
		{plain.URL, name, "CONNECT one.test:443 one.test:443 :"},
		{secure.URL, address, "CONNECT 203.0.113.7:443 203.0.113.7:443 :"},
		{"socks5://" + socks, address, "203.0.113.7 443"},
		{"socks5h://u:p@" + socks, v6, "2001:db8::7 443 u:p"},
		{"socks5://u:p@" + socks, name, "name one.test 443 u:p"},
	} {
		r := New(Config{Proxy: always(t, tt.proxy), ProxyResolves: true, ProxyRoots: roots}).Router(nil)
		c, err := r.Connect(t.Context(), tt.to)
		must(t, err)
		if got := talk(t, c); got != "hello you" {
			t.Errorf("%s: %q", tt.want, got)
		}
		if got := seen.took(); got != tt.want {
			t.Errorf("%s: asked for %s, want %s", tt.proxy, got, tt.want)
		}
	}

	t.Run("refused", func(t *testing.T) {
		forbidden := web.Route{Scheme: "tcp", Host: "forbidden.test", Port: 1}
		for proxy, want := range map[string]string{
			plain.URL:            "by the host's proxy: it answered 403 Forbidden",
			"socks5://" + socks:  "by the host's proxy: unknown error connection not allowed by ruleset",
			"http://127.0.0.1:1": "reach the host's proxy: connect: connection refused",
			"ftp://127.0.0.1:1":  `the host's proxy has the scheme "ftp": use http, https or socks5`,
			strings.Replace(secure.URL, "127.0.0.1", "[::1]", 1):   "reach the host's proxy: connect: ",
			strings.Replace(plain.URL, "http://", "https://", 1):   "by the host's proxy: TLS: ",
			"socks5://" + strings.TrimPrefix(plain.URL, "http://"): "by the host's proxy: ",
		} {
			_, err := New(Config{Proxy: always(t, proxy), ProxyResolves: true, ProxyRoots: roots, Timeout: 500 * time.Millisecond}).Router(nil).Connect(t.Context(), forbidden)
			if err == nil || !strings.HasPrefix(err.Error(), want) {
				t.Errorf("%s: %v, want %s", proxy, err, want)
			}
			if err != nil && strings.Contains(err.Error(), "127.0.0.1") {
				t.Errorf("the sandbox is told the proxy: %v", err)
			}
		}
		seen.took()
		_, err := New(Config{Proxy: always(t, secure.URL)}).Router(nil).Connect(t.Context(), address)
		if err == nil || !strings.Contains(err.Error(), "x509") || seen.took() != "" {
			t.Errorf("a proxy that nobody vouches for: %v", err)
		}
		// A proxy is no way around classes.
		_, err = New(Config{Proxy: always(t, plain.URL)}).Router(nil).Connect(t.Context(), web.Route{Host: "one.test", Port: 80, IP: netip.MustParseAddr("169.254.169.254")})
		if _, ok := errors.AsType[*web.Denied](err); !ok || seen.took() != "" {
			t.Errorf("metadata by a proxy: %v", err)
		}
		unknown := func(string, string, uint16) (*url.URL, error) { return nil, errors.New("no") }
		if _, err := New(Config{Proxy: unknown}).Router(nil).Connect(t.Context(), address); airlock.CodeOf(err) != airlock.Unavailable {
			t.Errorf("a proxy that is not known: %v", err)
		}
	})
	t.Run("silent", func(t *testing.T) {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		must(t, err)
		defer l.Close()
		for _, scheme := range []string{"http", "https", "socks5"} {
			r := New(Config{Proxy: always(t, scheme+"://"+l.Addr().String()), Timeout: 100 * time.Millisecond}).Router(nil)
			began := time.Now()
			_, err := r.Connect(t.Context(), address)
			if took := time.Since(began); err == nil || took > 2*time.Second {
				t.Errorf("%s: %v after %v", scheme, err, took)
			}
		}
	})
	t.Run("endless", func(t *testing.T) {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		must(t, err)
		defer l.Close()
		go func() {
			c, err := l.Accept()
			if err != nil {
				return
			}
			defer c.Close()
			io.WriteString(c, "HTTP/1.1 200 OK\r\nX: ")
			for {
				if _, err := c.Write(make([]byte, 4096)); err != nil {
					return
				}
			}
		}()
		if _, err := New(Config{Proxy: always(t, "http://"+l.Addr().String())}).Router(nil).Connect(t.Context(), address); err == nil {
			t.Error("an endless answer was taken")
		}
	})
	t.Run("abort", func(t *testing.T) {
		c, err := New(Config{Proxy: always(t, plain.URL)}).Router(nil).Connect(t.Context(), address)
		must(t, err)
		c.(interface{ Abort() }).Abort()
		if _, err := c.Write([]byte("x")); err == nil {
			t.Error("it is open")
		}
	})
}

// By is the way of Connect with one more proxy at its end.
func TestBy(t *testing.T) {
	to := listen(t).addr
	var seen proxied
	at := seen.socksServer(t, to)
	user := url.UserPassword("u", strings.Repeat("p", 255))
	address := web.Route{Scheme: "https", Host: "one.test", Port: 443, IP: netip.MustParseAddr("8.8.8.8"), Class: "public"}
	name := web.Route{Scheme: "https", Host: "one.test", Port: 443}
	dialed := func() net.Conn {
		c, err := net.Dial("tcp", at)
		must(t, err)
		return c
	}
	for _, tt := range []struct {
		proxy Proxy
		to    web.Route
		want  string
	}{
		{Proxy{}, address, "8.8.8.8 443"},
		{Proxy{User: user}, address, "8.8.8.8 443 u:" + strings.Repeat("p", 255)},
		{Proxy{User: url.UserPassword("u", "")}, address, "8.8.8.8 443 u:"},
		{Proxy{}, name, "name one.test 443"},
	} {
		c, err := New(Config{ProxyResolves: true}).Router(nil).By(t.Context(), dialed(), tt.proxy, tt.to)
		must(t, err)
		if got := talk(t, c); got != "hello you" {
			t.Errorf("%s: %q", tt.want, got)
		}
		if got := seen.took(); got != tt.want {
			t.Errorf("asked for %s, want %s", got, tt.want)
		}
	}

	s := httptest.NewUnstartedServer(http.NotFoundHandler())
	s.Config.ErrorLog = log.New(io.Discard, "", 0)
	s.StartTLS()
	t.Cleanup(s.Close)
	secure := tlsBefore(t, at, s.TLS)
	roots := x509.NewCertPool()
	roots.AddCert(s.Certificate())
	r := New(Config{Timeout: time.Second}).Router(nil)
	c, err := net.Dial("tcp", secure)
	must(t, err)
	by, err := r.By(t.Context(), c, Proxy{User: user, TLS: &tls.Config{ServerName: "example.com", RootCAs: roots}}, address)
	must(t, err)
	if got := talk(t, by); got != "hello you" {
		t.Errorf("over TLS: %q", got)
	}
	seen.took()

	for what, tt := range map[string]struct {
		at    string
		proxy Proxy
		to    web.Route
		want  string
	}{
		"another authority": {secure, Proxy{TLS: &tls.Config{ServerName: "example.com"}}, address, "TLS: "},
		"another name":      {secure, Proxy{TLS: &tls.Config{ServerName: "other.test", RootCAs: roots}}, address, "TLS: "},
		"no TLS there":      {to, Proxy{TLS: &tls.Config{ServerName: "example.com", RootCAs: roots}}, address, "TLS: "},
		"metadata":          {at, Proxy{}, web.Route{Host: "one.test", Port: 80, IP: netip.MustParseAddr("169.254.169.254")}, "denied: "},
		"no address":        {at, Proxy{}, name, "a route to one.test has no address"},
		"no SOCKS":          {to, Proxy{}, address, "unexpected protocol version 104"},
	} {
		c, err := net.Dial("tcp", tt.at)
		must(t, err)
		_, err = r.By(t.Context(), c, tt.proxy, tt.to)
		if err == nil || !strings.HasPrefix(err.Error(), tt.want) || strings.Contains(err.Error(), "127.0.0.1") {
			t.Errorf("%s: %v, want %s", what, err, tt.want)
		}
		c.Close()
	}
	if got := seen.took(); strings.Contains(got, "443") || strings.Contains(got, "169.254") {
		t.Errorf("the proxy was asked for %s", got)
	}
}

// tlsBefore ends TLS in front of a server.
func tlsBefore(t *testing.T, to string, config *tls.Config) string {
	l, err := tls.Listen("tcp", "127.0.0.1:0", config)
	must(t, err)
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				up, err := net.Dial("tcp", to)
				if err != nil || c.(*tls.Conn).Handshake() != nil {
					c.Close()
					return
				}
				pipe(c, up, c)
			}()
		}
	}()
	return l.Addr().String()
}

// Names that only the proxy resolves have no address here, and all others do.
func TestProxyResolves(t *testing.T) {
	ns := newNameServer(t, map[string][]string{"direct.test.": {"8.8.8.8"}})
	t.Setenv("HTTP_PROXY", "http://proxy.test:1")
	t.Setenv("HTTPS_PROXY", "http://proxy.test:2")
	t.Setenv("NO_PROXY", "direct.test,10.0.0.0/8")
	u := New(Config{Resolver: ns.resolver(), Proxy: FromEnvironment(), ProxyResolves: true})
	for host, want := range map[string]string{
		"one.test": "invalid IP ", "direct.test": "8.8.8.8 public", "8.8.4.4": "8.8.4.4 public", "169.254.169.254": denied("metadata"),
	} {
		if got := told(u.Router(nil).Routes(t.Context(), "https", host, 443)); got != want {
			t.Errorf("%s: got %s, want %s", host, got, want)
		}
	}
	addrs, err := u.Lookup(t.Context(), "one.test")
	if err != nil || fmt.Sprint(addrs) != "[0.0.0.0]" {
		t.Error(addrs, err)
	}
	addrs, err = u.Lookup(t.Context(), "direct.test")
	if err != nil || fmt.Sprint(addrs) != "[8.8.8.8]" {
		t.Error(addrs, err)
	}
	for _, tt := range []struct {
		scheme, host string
		port         uint16
		want         string
	}{
		{"http", "one.test", 80, "http://proxy.test:1"}, {"https", "one.test", 443, "http://proxy.test:2"}, {"tls", "one.test", 993, "http://proxy.test:2"},
		{"tcp", "one.test", 22, "http://proxy.test:2"}, {"http", "direct.test", 80, "<nil>"}, {"https", "10.1.2.3", 443, "<nil>"}, {"https", "2001:db8::1", 443, "http://proxy.test:2"},
	} {
		p, err := FromEnvironment()(tt.scheme, tt.host, tt.port)
		must(t, err)
		if got := fmt.Sprint(p); got != tt.want {
			t.Errorf("%v: %s", tt, got)
		}
	}
}

// TLS is between the two ends, whoever is between them.
func TestTLSThroughAProxy(t *testing.T) {
	s := httptest.NewUnstartedServer(http.NotFoundHandler())
	s.Config.ErrorLog = log.New(io.Discard, "", 0)
	s.StartTLS()
	t.Cleanup(s.Close)
	var seen proxied
	socks := seen.socksServer(t, s.Listener.Addr().String())
	r := New(Config{Proxy: always(t, "socks5://"+socks)}).Router(nil)
	roots := x509.NewCertPool()
	roots.AddCert(s.Certificate())
	for name, ok := range map[string]bool{"example.com": true, "other.test": false} {
		c, err := r.Connect(context.Background(), web.Route{Scheme: "https", Host: name, Port: 443, IP: netip.MustParseAddr("8.8.8.8")})
		must(t, err)
		err = tls.Client(c, &tls.Config{ServerName: name, RootCAs: roots}).Handshake()
		c.Close()
		if (err == nil) != ok {
			t.Errorf("%s: %v", name, err)
		}
	}
}
