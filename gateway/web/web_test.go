package web

import (
	"bufio"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"airlock.dev/airlock"
)

var quietLog = log.New(io.Discard, "", 0)

// echo tells what reached it.
func echo(w http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body)
	fmt.Fprintf(w, "%s %s %s %s", r.Proto, r.Method, r.Host, r.RequestURI)
	if len(body) > 0 {
		fmt.Fprintf(w, " %s", body)
	}
}

func TestPlain(t *testing.T) {
	w := newWorld(t)
	w.name("one.test", map[uint16]string{80: w.upstream(echo, false, ""), 8080: w.upstream(echo, false, "")})
	w.open()
	c := w.client(false)
	for _, tt := range []struct{ url, want, log string }{
		{"http://one.test/", "HTTP/1.1 GET one.test /", "GET http://one.test:80/ 203.0.113.7"},
		{"http://one.test", "HTTP/1.1 GET one.test /", "GET http://one.test:80/ 203.0.113.7"},
		{"http://one.test:8080/a?b=c;d&%zz", "HTTP/1.1 GET one.test:8080 /a?b=c;d&%zz", "GET http://one.test:8080/a 203.0.113.7"},
		{"http://one.test/a//b/./c%20d?", "HTTP/1.1 GET one.test /a/b/c%20d?", "GET http://one.test:80/a/b/c d 203.0.113.7"},
		{"http://one.test/%7Ea%2Bb+c", "HTTP/1.1 GET one.test /%7Ea%2Bb+c", "GET http://one.test:80/~a+b+c 203.0.113.7"},
		{"http://one.test/@types%2fnode", "HTTP/1.1 GET one.test /@types/node", "GET http://one.test:80/@types/node 203.0.113.7"},
	} {
		res, body := get(t, c, tt.url)
		want(t, tt.url, body, tt.want)
		want(t, tt.url, res.StatusCode, 200)
		want(t, "log", lines(w.took()...), tt.log)
		want(t, "end", w.end(), fmt.Sprintf("200 out 0 in %d", len(body)))
	}
	res, err := c.Post("http://one.test/p", "text/plain", strings.NewReader("hello"))
	must(t, err)
	body, _ := io.ReadAll(res.Body)
	res.Body.Close()
	want(t, "post", string(body), "HTTP/1.1 POST one.test /p hello")
	want(t, "end", w.end(), "200 out 5 in 31")
}

// A slash within a segment is told from one between two, for decisions and
// upstream, and both ways to read it are known to who decides.
func TestEncodedSlashes(t *testing.T) {
	w := newWorld(t)
	w.name("one.test", map[uint16]string{80: w.upstream(echo, false, "")})
	w.cfg.EncodedSlashes = true
	w.deny = func(r Request) error {
		w.note("%q %q %q", r.Path, r.RawPath, r.Slashed)
		if strings.HasPrefix(r.Path+" ", "/admin/") || strings.HasPrefix(r.Slashed, "/admin/") {
			return &Denied{Reason: "no"}
		}
		return nil
	}
	w.open()
	c := w.client(false)
	for _, tt := range []struct {
		path   string
		status int
		saw    string
		body   string
	}{
		{"/api/v4/projects/group%2fproject/x", 200, `"/api/v4/projects/group%2Fproject/x" "/api/v4/projects/group%2fproject/x" "/api/v4/projects/group/project/x"`, "/api/v4/projects/group%2fproject/x"},
		{"/a%2Fb%20c?d=%2f", 200, `"/a%2Fb c" "/a%2Fb%20c" "/a/b c"`, "/a%2Fb%20c?d=%2f"},
		{"/a/b", 200, `"/a/b" "/a/b" ""`, "/a/b"},
		{"/@types%2fnode", 200, `"/@types/node" "/@types/node" ""`, "/@types/node"},
		{"/admin%2fusers", 403, `"/admin%2Fusers" "/admin%2fusers" "/admin/users"`, ""},
		{"/admin%252fusers", 400, "", ""}, {"/x%2f..%2fadmin", 400, "", ""}, {"/x%2f%2e%2e%2fadmin", 400, "", ""},
	} {
		res, body := get(t, c, "http://one.test"+tt.path)
		want(t, tt.path, res.StatusCode, tt.status)
		log := w.took()
		if tt.saw != "" {
			want(t, tt.path, log[0], tt.saw)
		}
		if tt.body != "" {
			want(t, tt.path, body, "HTTP/1.1 GET one.test "+tt.body)
			w.end()
		}
	}
}

// Every request is decided by its own: on one connection, and stream by stream.
func TestHostsAgree(t *testing.T) {
	w := newWorld(t)
	var reached atomic.Int64
	count := func(rw http.ResponseWriter, r *http.Request) {
		reached.Add(1)
		echo(rw, r)
	}
	a := w.name("one.test", map[uint16]string{80: w.upstream(count, false, ""), 443: w.upstream(count, true, "one.test")})
	w.name("two.test", map[uint16]string{80: w.upstream(count, false, ""), 443: w.upstream(count, true, "two.test")})
	w.open()

	t.Run("plain", func(t *testing.T) {
		c := w.at(a, 80)
		r := bufio.NewReader(c)
		for _, tt := range []struct {
			host string
			want int
		}{
			{"one.test", 200}, {"two.test", 421}, {"ONE.test.", 200}, {"one.test:80", 200}, {"one.test:8080", 421},
			{a.String(), 200}, {"198.18.0.77", 421}, {"one.test.two.test", 421}, {"one.test:", 400}, {"one.test:080", 400},
			{"0x7f.1", 400}, {"[::1%25eth0]", 400}, {"one.test", 200},
		} {
			fmt.Fprintf(c, "GET / HTTP/1.1\r\nHost: %s\r\n\r\n", tt.host)
			res, _ := answer(t, r)
			want(t, tt.host, res.StatusCode, tt.want)
		}
		// The target decides, and what upstream sees is that.
		for _, tt := range []struct {
			target string
			want   int
			body   string
		}{
			{"http://one.test/x", 200, "HTTP/1.1 GET one.test /x"},
			{"http://two.test/x", 421, ""},
			{"https://one.test/x", 400, ""},
			{"http://user@one.test/x", 400, ""},
			{"//two.test/x", 200, "HTTP/1.1 GET one.test /two.test/x"},
			{"/x#y", 400, ""},
		} {
			fmt.Fprintf(c, "GET %s HTTP/1.1\r\nHost: one.test\r\n\r\n", tt.target)
			res, body := answer(t, r)
			want(t, tt.target, res.StatusCode, tt.want)
			if tt.want == 200 {
				want(t, tt.target, body, tt.body)
			}
		}
	})
	t.Run("h1", func(t *testing.T) {
		c := w.tlsTo(a, 443, "one.test", "http/1.1")
		r := bufio.NewReader(c)
		w.took()
		for _, tt := range []struct {
			host string
			want int
		}{{"one.test", 200}, {"two.test", 421}, {"one.test:443", 200}, {"one.test:80", 421}} {
			fmt.Fprintf(c, "GET / HTTP/1.1\r\nHost: %s\r\n\r\n", tt.host)
			res, body := answer(t, r)
			want(t, tt.host, res.StatusCode, tt.want)
			if tt.want == 200 {
				want(t, tt.host, body, "HTTP/1.1 GET one.test /")
			}
		}
		want(t, "log", lines(w.took()...), lines(
			"GET https://one.test:443/ 203.0.113.7", "refused 421 GET https://two.test:443",
			"GET https://one.test:443/ 203.0.113.7", "refused 421 GET https://one.test:80"))
	})
	t.Run("h2", func(t *testing.T) {
		c := newStreams(t, w.tlsTo(a, 443, "one.test", "h2"))
		for i, tt := range []struct {
			authority, path string
			extra           [2]string
			want            string
		}{
			{"one.test", "/", [2]string{}, "200"},
			{"two.test", "/", [2]string{}, "421"},
			{"one.test", "/", [2]string{"host", "two.test"}, "421"},
			{"", "/", [2]string{"host", "one.test"}, "200"},
			{"one.test", "https://two.test/", [2]string{}, "400"},
			{"one.test:443", "/", [2]string{}, "200"},
			{"one.test", "/?a HTTP/1.1", [2]string{}, "400"},
			{"one.test", "/?a\r\nX: y", [2]string{}, "reset PROTOCOL_ERROR"},
			{"one.test", "/", [2]string{"x-a", "b\r\nc: d"}, "reset PROTOCOL_ERROR"},
		} {
			got := c.get(tt.authority, tt.path, tt.extra)
			want(t, fmt.Sprint(i, tt.authority, tt.path), got, tt.want)
		}
	})
	t.Run("SNI", func(t *testing.T) {
		w.took()
		c := w.tlsTo(a, 443, "two.test", "http/1.1")
		c2 := tls.Client(c.NetConn(), &tls.Config{ServerName: "two.test", InsecureSkipVerify: true})
		res, body := raw(t, c2, "GET / HTTP/1.1\r\nHost: two.test\r\n\r\n")
		want(t, "status", res.StatusCode, 421)
		want(t, "close", res.Close, true)
		want(t, "body", body, `{"code":421,"message":"the TLS server name is \"two.test\", but the connection goes to one.test:443","policy":[],"ask":"open a connection of its own for each host"}`+"\n")
		want(t, "log", lines(w.took()...), lines("refused 421 CONNECT tls://two.test:443", "refused 421 GET https://two.test:443"))
	})
	if n := reached.Load(); n != 12 {
		t.Errorf("upstream was reached %d times, want 12", n)
	}
}

// An address without a name is what SNI or Host says, and else itself.
func TestLiteralAddresses(t *testing.T) {
	w := newWorld(t)
	w.name("one.test", map[uint16]string{80: w.upstream(echo, false, ""), 443: w.upstream(echo, true, "one.test")})
	w.places["192.0.2.9:80"] = w.places["one.test:80"]
	w.places["192.0.2.9:443"] = w.upstream(echo, true, "192.0.2.9")
	w.open()
	unknown := netip.MustParseAddr("192.0.2.9")

	c := w.at(unknown, 80)
	r := bufio.NewReader(c)
	for _, tt := range []struct {
		host string
		want int
	}{{"one.test", 200}, {"192.0.2.9", 421}, {"one.test", 200}} {
		fmt.Fprintf(c, "GET / HTTP/1.1\r\nHost: %s\r\n\r\n", tt.host)
		res, _ := answer(t, r)
		want(t, tt.host, res.StatusCode, tt.want)
	}
	res, body := raw(t, w.at(unknown, 80), "GET / HTTP/1.1\r\nHost: 192.0.2.9\r\n\r\n")
	want(t, "literal", res.StatusCode, 200)
	want(t, "literal", body, "HTTP/1.1 GET 192.0.2.9 /")

	w.took()
	res, body = raw(t, w.tlsTo(unknown, 443, "one.test"), "GET / HTTP/1.1\r\nHost: one.test\r\n\r\n")
	want(t, "by SNI", res.StatusCode, 200)
	want(t, "by SNI", body, "HTTP/1.1 GET one.test /")
	want(t, "log", lines(w.took()...), "GET https://one.test:443/ 203.0.113.7")

	// Go sends no SNI for an address, and checks the certificate for it.
	res, body = raw(t, w.tlsTo(unknown, 443, "192.0.2.9"), "GET / HTTP/1.1\r\nHost: 192.0.2.9\r\n\r\n")
	want(t, "no SNI", res.StatusCode, 200)
	want(t, "no SNI", body, "HTTP/1.1 GET 192.0.2.9 /")
	res, _ = raw(t, w.tlsTo(unknown, 443, "192.0.2.9"), "GET / HTTP/1.1\r\nHost: one.test\r\n\r\n")
	want(t, "no SNI, a name in Host", res.StatusCode, 421)

	w.took()
	res, _ = raw(t, w.at(netip.MustParseAddr("169.254.169.254"), 80), "GET /latest HTTP/1.1\r\nHost: 169.254.169.254\r\n\r\n")
	want(t, "metadata", res.StatusCode, 403)
	want(t, "log", lines(w.took()...), "refused 403 GET http://169.254.169.254:80")
}

func TestDenied(t *testing.T) {
	w := newWorld(t)
	up := func(http.ResponseWriter, *http.Request) { t.Error("a denied request reached upstream") }
	a := w.name("one.test", map[uint16]string{80: w.upstream(up, false, ""), 443: w.upstream(up, true, "one.test")})
	refused := w.name("refused.test", nil)
	w.deny = func(r Request) error {
		switch r.Path {
		case "/broken":
			return errors.New("a secret detail")
		case "/busy":
			return airlock.Errorf(airlock.Exhausted, "the audit log is full")
		}
		return &Denied{Policies: []string{"p1", "p2"}, Reason: "no rule permits it", Ask: "ask for host one.test"}
	}
	w.open()
	const asJSON = `{"code":403,"message":"no rule permits it","policy":["p1","p2"],"ask":"ask for host one.test"}` + "\n"
	for _, tt := range []struct {
		url, accept string
		h2          bool
		status      int
		want, kind  string
	}{
		{"http://one.test/", "", false, 403, asJSON, "application/json"},
		{"https://one.test/", "*/*", false, 403, asJSON, "application/json"},
		{"https://one.test/", "application/json, text/plain", true, 403, asJSON, "application/json"},
		{"https://one.test/", "text/html,*/*", true, 403, "denied: no rule permits it (p1, p2): ask for host one.test\n", "text/plain; charset=utf-8"},
		{"https://one.test/broken", "", true, 503, `{"code":503,"message":"it could not be decided","policy":[]}` + "\n", "application/json"},
		{"https://one.test/busy", "", true, 429, `{"code":429,"message":"the audit log is full","policy":[]}` + "\n", "application/json"},
	} {
		req, err := http.NewRequest("GET", tt.url, nil)
		must(t, err)
		if tt.accept != "" {
			req.Header.Set("Accept", tt.accept)
		}
		begin := time.Now()
		res, err := w.client(tt.h2).Do(req)
		must(t, err)
		body, err := io.ReadAll(res.Body)
		must(t, err)
		res.Body.Close()
		if d := time.Since(begin); d > time.Second {
			t.Errorf("%s: denied after %v", tt.url, d)
		}
		want(t, "status", res.StatusCode, tt.status)
		want(t, "body", string(body), tt.want)
		want(t, "type", res.Header.Get("Content-Type"), tt.kind)
		by := "p1,p2"
		if tt.status != 403 {
			by = "gateway"
		}
		want(t, "header", res.Header.Get("X-Airlock-Denied"), by)
	}
	t.Run("the body is not waited for", func(t *testing.T) {
		c := w.at(a, 80)
		begin := time.Now()
		res, _ := raw(t, c, "POST / HTTP/1.1\r\nHost: one.test\r\nContent-Length: 1000\r\n\r\nbegin")
		want(t, "status", res.StatusCode, 403)
		if d := time.Since(begin); d > 500*time.Millisecond {
			t.Errorf("denied after %v", d)
		}
		// It comes never, and the connection ends.
		if _, err := io.Copy(io.Discard, c); err != nil && !errors.Is(err, syscall.ECONNRESET) {
			t.Error(err)
		}
	})
	t.Run("refused", func(t *testing.T) {
		w.took()
		_, err := w.at(refused, 443).Read(make([]byte, 1))
		if !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("got %v, want a reset", err)
		}
		want(t, "log", lines(w.took()...), "refuse refused.test:443")
		_, err = w.at(gatewayAddr, 22).Read(make([]byte, 1))
		if !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("got %v, want a reset", err)
		}
	})
}

func TestProxy(t *testing.T) {
	w := newWorld(t)
	w.name("one.test", map[uint16]string{80: w.upstream(echo, false, ""), 443: w.upstream(echo, true, "one.test")})
	w.name("two.test", map[uint16]string{80: w.upstream(echo, false, "")})
	w.name("ssh.test", map[uint16]string{22: banner(t)})
	w.modes["ssh.test:22"] = TCP
	w.deny = func(r Request) error {
		if r.Path == "/no" || r.Host == "two.test" && r.Port == 22 {
			return &Denied{Reason: "no"}
		}
		return nil
	}
	w.open()
	proxy := netip.AddrPortFrom(gatewayAddr, 3128)

	for version, h2 := range map[string]bool{"HTTP/1.1": false, "HTTP/2.0": true} { // upstream has the client's
		c := w.client(h2)
		tr := c.Transport.(*http.Transport)
		tr.Proxy = http.ProxyURL(&url.URL{Scheme: "http", Host: proxy.String()})
		for _, tt := range []struct {
			url    string
			status int
			want   string
		}{
			{"http://one.test/a", 200, "HTTP/1.1 GET one.test /a"},
			{"http://two.test/b", 200, "HTTP/1.1 GET two.test /b"},
			{"http://one.test/no", 403, `{"code":403,"message":"no","policy":[]}` + "\n"},
			{"https://one.test/c", 200, version + " GET one.test /c"},
			{"https://one.test/no", 403, `{"code":403,"message":"no","policy":[]}` + "\n"},
		} {
			res, body := get(t, c, tt.url)
			want(t, tt.url, res.StatusCode, tt.status)
			want(t, tt.url, body, tt.want)
		}
	}

	w.took()
	for _, tt := range []struct {
		text string
		want int
		log  string
	}{
		{"CONNECT refused.test:443 HTTP/1.1\r\nHost: refused.test:443\r\n\r\n", 403, "refuse refused.test:443"},
		{"CONNECT one.test HTTP/1.1\r\nHost: one.test\r\n\r\n", 400, "refused 400 CONNECT tcp://:0"},
		{"CONNECT 0x7f.1:80 HTTP/1.1\r\nHost: one.test\r\n\r\n", 400, "refused 400 CONNECT tcp://:0"},
		{"GET / HTTP/1.1\r\nHost: one.test\r\n\r\n", 400, "refused 400 GET http://:0"},
		{"GET https://one.test/ HTTP/1.1\r\nHost: one.test\r\n\r\n", 400, "refused 400 GET http://:0"},
	} {
		res, _ := raw(t, w.dial(proxy), tt.text)
		want(t, tt.text, res.StatusCode, tt.want)
		want(t, tt.text, lines(w.took()...), tt.log)
	}

	t.Run("CONNECT and SNI disagree", func(t *testing.T) {
		w.took()
		c := w.dial(proxy)
		tunnel(t, c, "one.test:443")
		inside := tls.Client(c, &tls.Config{ServerName: "two.test", RootCAs: w.trust, InsecureSkipVerify: true})
		res, _ := raw(t, inside, "GET / HTTP/1.1\r\nHost: two.test\r\n\r\n")
		want(t, "status", res.StatusCode, 421)
		want(t, "log", lines(w.took()...), lines("refused 421 CONNECT tls://two.test:443", "refused 421 GET https://two.test:443"))
	})
	t.Run("CONNECT and Host disagree", func(t *testing.T) {
		c := w.dial(proxy)
		tunnel(t, c, "one.test:80")
		res, body := raw(t, c, "GET / HTTP/1.1\r\nHost: one.test\r\n\r\n")
		want(t, "status", res.StatusCode, 200)
		want(t, "body", body, "HTTP/1.1 GET one.test /")
		res, _ = raw(t, c, "GET / HTTP/1.1\r\nHost: two.test\r\n\r\n")
		want(t, "status", res.StatusCode, 421)
		res, _ = raw(t, c, "CONNECT two.test:80 HTTP/1.1\r\nHost: two.test:80\r\n\r\n")
		want(t, "CONNECT inside", res.StatusCode, 400)
	})
	t.Run("raw", func(t *testing.T) {
		c := w.dial(proxy)
		tunnel(t, c, "ssh.test:22")
		line, err := bufio.NewReader(c).ReadString('\n')
		must(t, err)
		want(t, "banner", line, "SSH-2.0-test\r\n")
	})
	t.Run("said at once", func(t *testing.T) { // what follows CONNECT is not lost
		c := w.dial(proxy)
		_, err := io.WriteString(c, "CONNECT one.test:80 HTTP/1.1\r\nHost: one.test:80\r\n\r\nGET /x HTTP/1.1\r\nHost: one.test\r\n\r\n")
		must(t, err)
		r := bufio.NewReader(c)
		_, err = r.ReadString('\n')
		must(t, err)
		_, err = r.ReadString('\n')
		must(t, err)
		_, body := answer(t, r)
		want(t, "body", body, "HTTP/1.1 GET one.test /x")
	})
}

// banner is a server that speaks first, and then says what it is told.
func banner(t testing.TB) string {
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
				io.WriteString(c, "SSH-2.0-test\r\n")
				io.Copy(c, c)
			}()
		}
	}()
	return l.Addr().String()
}

func tunnel(t testing.TB, c net.Conn, to string) {
	t.Helper()
	_, err := fmt.Fprintf(c, "CONNECT %s HTTP/1.1\r\nHost: %s\r\n\r\n", to, to)
	must(t, err)
	const answer = "HTTP/1.1 200 Connection established\r\n\r\n"
	got := make([]byte, len(answer))
	_, err = io.ReadFull(c, got)
	must(t, err)
	want(t, "CONNECT", string(got), answer)
}
