package gatewaytest

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"

	"airlock.dev/airlock/gateway/upstream"
	"airlock.dev/airlock/gateway/web"
)

func hello(rw http.ResponseWriter, r *http.Request) {
	fmt.Fprintf(rw, "%s %s %s", r.Method, r.Host, r.RequestURI)
}

// Whichever of its names a destination is reached by, they agree, and it is
// decided what is asked for: nothing else leaves the host.
func TestNames(t *testing.T) {
	w := newWorld(t)
	plain, secure := w.server(hello, ""), w.server(hello, "one.test")
	w.name("one.test", "127.0.0.1")
	w.name("two.test", "127.0.0.1")
	w.name("denied.test", "127.0.0.1")
	b := w.open()
	ask := func(c net.Conn, text string, status int) {
		t.Helper()
		_, err := io.WriteString(c, text)
		must(t, err)
		res, err := http.ReadResponse(bufio.NewReader(c), nil)
		must(t, err)
		io.Copy(io.Discard, res.Body)
		want(t, text, res.StatusCode, status)
	}
	host := func(path, name string, port uint16) string {
		return fmt.Sprintf("GET %s HTTP/1.1\r\nHost: %s:%d\r\n\r\n", path, name, port)
	}
	proxy := func() net.Conn {
		c, err := b.connect(t.Context(), netip.AddrPortFrom(gateway4, 3128))
		must(t, err)
		t.Cleanup(func() { c.Close() })
		c.SetDeadline(time.Now().Add(20 * time.Second))
		return c
	}
	inside := func(c net.Conn, sni string) net.Conn {
		return tls.Client(c, &tls.Config{ServerName: sni, RootCAs: w.inner.pool, NextProtos: []string{"http/1.1"}})
	}

	for _, h2 := range []bool{false, true} {
		_, body := get(t, b.client(h2), fmt.Sprintf("https://one.test:%d/x", secure))
		want(t, "https", body, fmt.Sprintf("GET one.test:%d /x", secure))
	}
	_, body := get(t, b.client(false), fmt.Sprintf("http://one.test:%d/x", plain))
	want(t, "http", body, fmt.Sprintf("GET one.test:%d /x", plain))
	dialed := len(w.dialed)

	c := b.dial("one.test", plain)
	ask(c, host("/denied", "one.test", plain), 403)
	ask(c, host("/", "two.test", plain), 421)
	ask(c, host("/denied", "one.test", plain), 403)
	s := inside(b.dial("one.test", secure), "one.test")
	ask(s, host("/denied", "one.test", secure), 403)
	ask(s, host("/", "two.test", secure), 421)
	ask(inside(b.dial("one.test", secure), "two.test"), host("/", "two.test", secure), 421)
	ask(proxy(), fmt.Sprintf("GET http://one.test:%d/denied HTTP/1.1\r\nHost: one.test:%d\r\n\r\n", plain, plain), 403)
	ask(proxy(), fmt.Sprintf("GET http://two.test:%d/denied HTTP/1.1\r\nHost: one.test:%d\r\n\r\n", plain, plain), 403)
	p := proxy()
	fmt.Fprintf(p, "CONNECT one.test:%d HTTP/1.1\r\nHost: one.test\r\n\r\n", secure)
	_, err := io.ReadFull(p, make([]byte, len("HTTP/1.1 200 Connection established\r\n\r\n")))
	must(t, err)
	ask(tls.Client(p, &tls.Config{ServerName: "two.test", InsecureSkipVerify: true}), host("/", "two.test", secure), 421)
	if log := w.took(); len(w.dialed) != dialed {
		t.Errorf("%v was dialled:\n%s", w.dialed[dialed:], log)
	}

	// What may not be looked up is not, by any way to ask.
	for _, network := range []string{"udp", "tcp"} {
		_, err := b.resolver(network).LookupNetIP(t.Context(), "ip", "secret.denied.test.")
		if err == nil {
			t.Errorf("%s: it was looked up", network)
		}
	}
	if _, err := b.client(true).Get(fmt.Sprintf("https://dns.denied.test:%d/dns-query?name=secret", secure)); err == nil {
		t.Error("DNS over HTTPS to a host that is denied")
	}
	log := w.took()
	if strings.Contains(log, "lookup secret") || strings.Contains(log, "lookup dns.") || !strings.Contains(log, "deny A secret.denied.test") {
		t.Error(log)
	}
	want(t, "dialled", len(w.dialed), dialed)
}

// However a forbidden address is written, and whoever says it, it is not dialled.
func TestForbiddenAddresses(t *testing.T) {
	w := newWorld(t)
	w.name("meta.test", "169.254.169.254")
	w.name("mapped.test", "::ffff:169.254.169.254")
	w.name("nat64.test", "64:ff9b::a9fe:a9fe")
	w.name("six.test", "2002:a9fe:a9fe::")
	w.name("self.test", "127.0.0.2")
	own, err := net.InterfaceAddrs()
	must(t, err)
	for _, n := range own {
		if p := netip.MustParsePrefix(n.String()); p.Addr().Is4() && !p.Addr().IsLoopback() {
			w.name("own.test", p.Addr().String())
		}
	}
	b := w.open()
	var names []string
	for name := range w.names {
		names = append(names, name)
	}
	for _, name := range names {
		res, body := get(t, b.client(false), "http://"+name+"/latest/meta-data")
		want(t, name, res.StatusCode, 403)
		if !strings.Contains(body, "not reached from a sandbox") {
			t.Error(body)
		}
	}
	for _, text := range []string{
		"169.254.169.254", "64:ff9b::a9fe:a9fe", "2002:a9fe:a9fe::", "::a9fe:a9fe", "fd00:ec2::254", "10.0.0.1", "168.63.129.16", "0.1.2.3", "240.0.0.1",
		"198.18.200.200", "fd61:6972:6c6f::77", "2001:0:a9fe:a9fe::",
	} {
		a := netip.MustParseAddr(text)
		c, err := b.connect(t.Context(), netip.AddrPortFrom(a, 80))
		if err != nil {
			continue // refused at once
		}
		c.SetDeadline(time.Now().Add(10 * time.Second))
		fmt.Fprintf(c, "GET / HTTP/1.1\r\nHost: %s\r\n\r\n", netip.AddrPortFrom(a, 80))
		res, err := http.ReadResponse(bufio.NewReader(c), nil)
		must(t, err)
		want(t, text, res.StatusCode, 403)
		c.Close()
	}
	c := b.dial("self.test", 80)
	for _, text := range []string{"0xA9.0xFE.0xA9.0xFE", "2852039166", "0251.0376.0251.0376", "169.254.43518", "[fe80::1%25eth0]", "169.254.169.254."} {
		fmt.Fprintf(c, "GET / HTTP/1.1\r\nHost: %s\r\n\r\n", text)
		res, err := http.ReadResponse(bufio.NewReader(c), nil)
		must(t, err)
		io.Copy(io.Discard, res.Body)
		want(t, text, res.StatusCode, 400)
	}
	want(t, "dialled", len(w.dialed), 0)
}

// A name whose address changes after it was decided on is decided on anew, or
// dialled where it was.
func TestRebinding(t *testing.T) {
	w := newWorld(t)
	port := w.server(hello, "")
	w.name("one.test", "127.0.0.1")
	w.up = upstream.New(upstream.Config{Named: func(a netip.Addr) bool { return a == loopback }})
	b := w.open()
	c := b.dial("one.test", port)
	ask := func(c net.Conn, status int) {
		t.Helper()
		fmt.Fprintf(c, "GET / HTTP/1.1\r\nHost: one.test:%d\r\n\r\n", port)
		res, err := http.ReadResponse(bufio.NewReader(c), nil)
		must(t, err)
		io.Copy(io.Discard, res.Body)
		want(t, "status", res.StatusCode, status)
	}
	ask(c, 200)
	w.name("one.test", "169.254.169.254")
	ask(c, 200)
	ask(b.dial("one.test", port), 403)
	want(t, "dialled", fmt.Sprint(w.dialed), "[127.0.0.1]")
}

// QUIC is refused at once, and other datagrams after they were decided.
func TestDatagrams(t *testing.T) {
	b := newWorld(t).open()
	b.connect(t.Context(), netip.MustParseAddrPort("192.0.2.1:1")) // the first one also finds its neighbours
	b.connect(t.Context(), netip.MustParseAddrPort("[2001:db8::1]:1"))
	for _, to := range []string{"192.0.2.1:443", "[2001:db8::1]:443", "192.0.2.1:123", "[2001:db8::1]:123"} {
		c := b.udp(netip.MustParseAddrPort(to))
		began := time.Now()
		c.Write([]byte("x"))
		err := error(os.ErrDeadlineExceeded)
		for isTimeout(err) && time.Since(began) < 5*time.Second { // a read that waits does not learn of ICMP in this stack
			c.SetReadDeadline(time.Now().Add(time.Millisecond))
			_, err = c.Read(make([]byte, 1))
		}
		if took := time.Since(began); err == nil || !strings.Contains(err.Error(), "refused") || took > time.Second {
			t.Errorf("%s: %v after %v", to, err, took)
		}
	}
	if n := b.door.Stats().Barred; n < 2 {
		t.Errorf("%d datagrams of QUIC", n)
	}
	if log := b.took(); !strings.Contains(log, "refuse udp 192.0.2.1:123") || strings.Contains(log, "443") {
		t.Error(log)
	}
}

func isTimeout(err error) bool {
	var t net.Error
	return errors.As(err, &t) && t.Timeout()
}

// Ends and resets of either side arrive as what they are at the other one.
func TestEndsAndResets(t *testing.T) {
	for _, mode := range []web.Mode{web.TCP, web.Any} {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		must(t, err)
		t.Cleanup(func() { l.Close() })
		w := newWorld(t)
		w.limits.Guess = time.Millisecond
		w.name("one.test", "127.0.0.1")
		w.modes[fmt.Sprintf("one.test:%d", portOf(l))] = mode
		b := w.open()
		open := func() (*gonet.TCPConn, *net.TCPConn) {
			in := b.dial("one.test", portOf(l))
			out, err := l.Accept()
			must(t, err)
			t.Cleanup(func() { out.Close() })
			out.SetDeadline(time.Now().Add(20 * time.Second))
			return in, out.(*net.TCPConn)
		}
		in, out := open()
		io.WriteString(in, "question")
		must(t, in.CloseWrite())
		got, err := io.ReadAll(out)
		want(t, "question", fmt.Sprint(string(got), err), "question<nil>")
		io.WriteString(out, "answer")
		must(t, out.CloseWrite())
		got, err = io.ReadAll(in)
		want(t, "answer", fmt.Sprint(string(got), err), "answer<nil>")

		in, out = open()
		must(t, out.SetLinger(0))
		out.Close()
		if _, err := io.ReadAll(in); err == nil || !strings.Contains(err.Error(), "reset") {
			t.Errorf("upstream resets: %v", err)
		}
		_, out = open()
		for _, ep := range b.s.RegisteredEndpoints() {
			ep.Abort()
		}
		if _, err := io.ReadAll(out); !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("the guest resets: %v", err)
		}
		b.door.Close() // with a connection open
	}
}

// Who says a byte now and then has as long for a header as who says nothing.
func TestDrips(t *testing.T) {
	w := newWorld(t)
	drip := func(c net.Conn, text string) {
		for i := 0; ; i++ {
			if _, err := c.Write([]byte{text[i%len(text)]}); err != nil {
				return
			}
			time.Sleep(20 * time.Millisecond)
		}
	}
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
				c.Read(make([]byte, 1))
				drip(c, "HTTP/1.1 200 OK\r\nX: "+strings.Repeat("x", 1000))
			}()
		}
	}()
	w.name("one.test", "127.0.0.1")
	w.limits = web.Limits{Handshake: 300 * time.Millisecond, Answer: 300 * time.Millisecond}
	b := w.open()
	for what, text := range map[string]string{"a request": "GET / HTTP/1.1\r\nX: " + strings.Repeat("x", 1000), "a ClientHello": "\x16\x03\x01\x40\x00\x01\x00\x3f\xfc\x03\x03" + strings.Repeat("x", 1000)} {
		c := b.dial("one.test", portOf(l))
		go drip(c, text)
		began := time.Now()
		io.Copy(io.Discard, c)
		if took := time.Since(began); took > 3*time.Second {
			t.Errorf("%s: it ended after %v", what, took)
		}
	}
	for _, scheme := range []string{"http", "https"} {
		began := time.Now()
		res, _ := get(t, b.client(false), fmt.Sprintf("%s://one.test:%d/", scheme, portOf(l)))
		if took := time.Since(began); res.StatusCode/100 != 5 || took > 3*time.Second {
			t.Errorf("%s: %s after %v", scheme, res.Status, took)
		}
	}
}

// Headers and bodies that are large, many, or become large when they are
// unpacked cost no more than the limits say.
func TestBombs(t *testing.T) {
	var bomb bytes.Buffer
	z, _ := gzip.NewWriterLevel(&bomb, gzip.BestCompression)
	z.Write(make([]byte, 32<<20))
	z.Close()
	w := newWorld(t)
	serve := func(rw http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/large":
			rw.Header().Set("X", strings.Repeat("x", 500<<10))
		case "/many":
			for i := range 40000 {
				rw.Header().Set(fmt.Sprintf("X-%d", i), "x")
			}
		case "/early":
			rw.Header().Set("Link", strings.Repeat("x", 100)) // once: net/http writes each from the same map
			for range 20000 {
				rw.WriteHeader(103)
			}
		case "/gzip":
			rw.Header().Set("Content-Encoding", "gzip")
			rw.Write(bomb.Bytes())
		}
	}
	plain, secure := w.server(serve, ""), w.server(serve, "one.test")
	w.name("one.test", "127.0.0.1")
	b := w.open()
	for _, h2 := range []bool{false, true} {
		base := fmt.Sprintf("http://one.test:%d", plain)
		if h2 {
			base = fmt.Sprintf("https://one.test:%d", secure)
		}
		c := b.client(h2)
		for _, path := range []string{"/large", "/many", "/early"} {
			res, body := get(t, c, base+path)
			if res.StatusCode != 502 {
				t.Errorf("h2 %v, %s: %s %s", h2, path, res.Status, body)
			}
		}
		res, body := get(t, c, base+"/gzip")
		want(t, "gzip", fmt.Sprint(res.StatusCode, len(body)), fmt.Sprint(200, bomb.Len()))

		for what, set := range map[string]func(http.Header){
			"large": func(h http.Header) { h.Set("X", strings.Repeat("x", 200<<10)) },
			"many": func(h http.Header) {
				for i := range 10000 {
					h.Set(fmt.Sprintf("X-%d", i), "x")
				}
			},
		} {
			req, err := http.NewRequestWithContext(t.Context(), "GET", base, nil)
			must(t, err)
			set(req.Header)
			w.took()
			res, err := c.Do(req)
			if err == nil {
				res.Body.Close()
				if res.StatusCode != 431 {
					t.Errorf("%s header, h2 %v: %s", what, h2, res.Status)
				}
			}
			if log := w.took(); strings.Contains(log, "GET") {
				t.Errorf("%s header, h2 %v: %s", what, h2, log)
			}
		}
	}
}

// A large download is in memory by its buffers only. AIRLOCK_TEST_MB=10240 is
// the size that it is meant for.
func TestLargeDownload(t *testing.T) {
	size := int64(number(t, "AIRLOCK_TEST_MB", 256, 64)) << 20
	w := newWorld(t)
	port := w.server(func(rw http.ResponseWriter, r *http.Request) {
		block := make([]byte, 1<<20)
		for range size / int64(len(block)) {
			if _, err := rw.Write(block); err != nil {
				return
			}
		}
	}, "one.test")
	w.name("one.test", "127.0.0.1")
	b := w.open()
	c := b.client(true)
	c.Timeout = 0
	res, err := c.Get(fmt.Sprintf("https://one.test:%d/", port))
	must(t, err)
	defer res.Body.Close()
	before, _ := memory(t)
	began := time.Now()
	var n, most int64
	for n < size {
		m, err := io.CopyN(io.Discard, res.Body, size/8)
		n += m
		must(t, err)
		used, _ := memory(t)
		most = max(most, int64(used-before))
	}
	if m, err := io.Copy(io.Discard, res.Body); m != 0 || err != nil {
		t.Errorf("%d more, %v", m, err)
	}
	t.Logf("%d MB in %v, at most %d MB in memory, both ends", size>>20, time.Since(began), most>>20)
	if most > 48<<20 {
		t.Errorf("%d MB in memory", most>>20)
	}
}
