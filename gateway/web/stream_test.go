package web

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/textproto"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"
)

// both runs a test with either version of HTTP inside.
func both(t *testing.T, f func(t *testing.T, h2 bool)) {
	t.Run("h1", func(t *testing.T) { f(t, false) })
	t.Run("h2", func(t *testing.T) { f(t, true) })
}

func TestSemantics(t *testing.T) {
	both(t, func(t *testing.T, h2 bool) {
		w := newWorld(t)
		w.name("one.test", map[uint16]string{443: w.upstream(func(rw http.ResponseWriter, r *http.Request) {
			switch r.URL.Path {
			case "/304":
				rw.Header().Set("ETag", `"x"`)
				rw.WriteHeader(304)
			case "/head":
				rw.Header().Set("Content-Length", "123456789012345")
			case "/204":
				rw.WriteHeader(204)
			case "/early":
				rw.Header().Set("Link", "</style.css>")
				rw.WriteHeader(103)
				rw.Header().Del("Link")
				io.WriteString(rw, "late")
			case "/typeless":
				rw.Header()["Content-Type"] = nil
				io.WriteString(rw, "<html>")
			case "/headers":
				rw.Header().Set("X-Airlock-Denied", "forged")
				rw.Header().Set("Alt-Svc", `h3=":443"`)
				rw.Header().Set("Keep-Alive", "1")
				rw.Header().Set("Content-Encoding", "gzip")
				fmt.Fprintf(rw, "%q %q %q %q %q", r.Header["X-Hop"], r.Header["Proxy-Authorization"], r.Header["X-Forwarded-For"], r.Header["User-Agent"], r.Header["Accept-Encoding"])
			case "/trailers":
				body, _ := io.ReadAll(r.Body)
				rw.Header().Set("Trailer", "X-Known")
				fmt.Fprintf(rw, "%s %s", body, r.Trailer.Get("X-Sum"))
				rw.Header().Set("X-Known", "1")
				rw.Header().Set(http.TrailerPrefix+"X-Unknown", "2")
			case "/100":
				body, _ := io.ReadAll(r.Body)
				rw.Write(body)
			}
		}, true, "one.test")})
		w.open()
		c := w.client(h2)

		res, body := get(t, c, "https://one.test/304")
		want(t, "304", fmt.Sprint(res.StatusCode, res.Header.Get("ETag"), body), `304"x"`)
		res, err := c.Head("https://one.test/head")
		must(t, err)
		want(t, "HEAD", fmt.Sprint(res.StatusCode, res.ContentLength), "200 123456789012345")
		res, body = get(t, c, "https://one.test/204")
		want(t, "204", fmt.Sprint(res.StatusCode, body), "204")
		res, _ = get(t, c, "https://one.test/typeless")
		_, typed := res.Header["Content-Type"]
		want(t, "no type is made up", typed, false)

		var early string
		ctx := httptrace.WithClientTrace(context.Background(), &httptrace.ClientTrace{Got1xxResponse: func(code int, h textproto.MIMEHeader) error {
			early = fmt.Sprint(code, h.Get("Link"))
			return nil
		}})
		req, _ := http.NewRequestWithContext(ctx, "GET", "https://one.test/early", nil)
		res, err = c.Do(req)
		must(t, err)
		io.Copy(io.Discard, res.Body)
		res.Body.Close()
		want(t, "103", early, "103</style.css>")

		req, _ = http.NewRequest("GET", "https://one.test/headers", nil)
		req.Header = http.Header{"X-Forwarded-For": {"me"}, "Proxy-Authorization": {"x"}, "User-Agent": {""}}
		if !h2 {
			req.Header.Set("X-Hop", "1")
			req.Header.Set("Connection", "X-Hop")
		}
		res, err = c.Do(req)
		must(t, err)
		b, _ := io.ReadAll(res.Body)
		res.Body.Close()
		want(t, "headers", string(b), `[] [] ["me"] [] []`)
		want(t, "headers back", fmt.Sprint(res.Header["X-Airlock-Denied"], res.Header["Alt-Svc"], res.Header["Keep-Alive"], res.Header["Content-Encoding"]), "[] [] [] [gzip]")

		req, _ = http.NewRequest("POST", "https://one.test/trailers", io.MultiReader(strings.NewReader("body")))
		req.Trailer = http.Header{"X-Sum": nil}
		req.Body = struct {
			io.Reader
			io.Closer
		}{io.MultiReader(strings.NewReader("body"), atEOF(func() { req.Trailer.Set("X-Sum", "abc") })), io.NopCloser(nil)}
		res, err = c.Do(req)
		must(t, err)
		b, _ = io.ReadAll(res.Body)
		res.Body.Close()
		want(t, "trailers", fmt.Sprint(string(b), res.Trailer.Get("X-Known"), res.Trailer.Get("X-Unknown")), "body abc12")

		req, _ = http.NewRequest("POST", "https://one.test/100", strings.NewReader("body"))
		req.Header.Set("Expect", "100-continue")
		c.Transport.(*http.Transport).ExpectContinueTimeout = 10 * time.Second
		begin := time.Now()
		res, err = c.Do(req)
		must(t, err)
		b, _ = io.ReadAll(res.Body)
		res.Body.Close()
		want(t, "100", string(b), "body")
		if time.Since(begin) > 5*time.Second {
			t.Error("nobody said to go on")
		}
	})
}

type atEOF func()

func (f atEOF) Read([]byte) (int, error) { f(); return 0, io.EOF }

// Streams in both directions at once, event by event.
func TestStreams(t *testing.T) {
	both(t, func(t *testing.T, h2 bool) {
		w := newWorld(t)
		w.name("one.test", map[uint16]string{443: w.upstream(func(rw http.ResponseWriter, r *http.Request) {
			rc := http.NewResponseController(rw)
			if r.ProtoMajor == 1 {
				must(t, rc.EnableFullDuplex())
			}
			rw.Header().Set("Content-Type", "text/event-stream")
			must(t, rc.Flush())
			lines := bufio.NewScanner(r.Body)
			for lines.Scan() {
				fmt.Fprintf(rw, "data: %s\n", lines.Text())
				must(t, rc.Flush())
			}
		}, true, "one.test")})
		w.open()
		in, say := io.Pipe()
		req, _ := http.NewRequest("POST", "https://one.test/", in)
		res, err := w.client(h2).Do(req)
		must(t, err)
		heard := bufio.NewReader(res.Body)
		for _, word := range []string{"one", "two", "three"} { // each is heard before the next is said
			fmt.Fprintln(say, word)
			line, err := heard.ReadString('\n')
			must(t, err)
			want(t, "event", line, "data: "+word+"\n")
		}
		say.Close()
		_, err = heard.ReadByte()
		want(t, "end", err, io.EOF)
		res.Body.Close()
		want(t, "end", w.end(), "200 out 14 in 32")
	})
}

// What gRPC needs, frame by frame: trailers both ways, and an answer of only trailers.
func TestTrailersOfGRPC(t *testing.T) {
	w := newWorld(t)
	a := w.name("one.test", map[uint16]string{443: w.upstream(func(rw http.ResponseWriter, r *http.Request) {
		rw.Header().Set("Content-Type", "application/grpc")
		if r.URL.Path == "/only" {
			rw.Header().Set("Grpc-Status", "5")
			return
		}
		body, _ := io.ReadAll(r.Body)
		rw.Header().Set("Trailer", "Grpc-Status, Grpc-Message")
		fmt.Fprintf(rw, "%s %s %s", r.Proto, r.Header.Get("Te"), body)
		rw.Header().Set("Grpc-Status", "0")
		rw.Header().Set("Grpc-Message", "fine")
	}, true, "one.test")})
	w.open()
	s := newStreams(t, w.tlsTo(a, 443, "one.test", "h2"))
	id := s.headers(false, ":method", "POST", ":scheme", "https", ":authority", "one.test", ":path", "/svc/Do", "te", "trailers", "content-type", "application/grpc")
	must(t, s.f.WriteData(id, false, []byte("hel")))
	must(t, s.f.WriteData(id, true, []byte("lo")))
	status, body, trailers := s.answer(id)
	want(t, "answer", fmt.Sprint(status, " ", body, " ", trailers), "200 HTTP/2.0 trailers hello map[grpc-message:fine grpc-status:0]")

	id = s.headers(true, ":method", "POST", ":scheme", "https", ":authority", "one.test", ":path", "/only", "te", "trailers", "content-type", "application/grpc")
	status, body, _ = s.answer(id)
	want(t, "only trailers", fmt.Sprint(status, body), "200")

	// CONNECT as a stream, and a stream that breaks the rules.
	id = s.headers(true, ":method", "CONNECT", ":authority", "two.test:22")
	status, _, _ = s.answer(id)
	want(t, "CONNECT", status, "400")
	id = s.headers(true, ":method", "GET", ":scheme", "https", ":authority", "one.test", ":path", "/", "connection", "upgrade")
	status, _, _ = s.answer(id)
	want(t, "connection header", status, "400")
}

// switching answers an upgrade and says back what it hears.
func switching(rw http.ResponseWriter, r *http.Request) {
	if r.Header.Get("Upgrade") == "" {
		fmt.Fprintf(rw, "%s without upgrade %q", r.Proto, r.Header.Values("Http2-Settings"))
		return
	}
	c, b, err := http.NewResponseController(rw).Hijack()
	if err != nil {
		http.Error(rw, err.Error(), 500)
		return
	}
	defer c.Close()
	fmt.Fprintf(c, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: %s\r\n\r\n", r.Header.Get("Upgrade"))
	io.Copy(c, b)
}

func TestUpgrade(t *testing.T) {
	w := newWorld(t)
	a := w.name("one.test", map[uint16]string{80: w.upstream(switching, false, ""), 443: w.upstream(switching, true, "one.test")})
	var asked []string
	w.deny = func(r Request) error { asked = append(asked, r.Upgrade); return nil }
	w.open()
	for _, secure := range []bool{false, true} {
		open := func() net.Conn {
			if secure {
				return w.tlsTo(a, 443, "one.test", "http/1.1")
			}
			return w.at(a, 80)
		}
		c := open()
		r := bufio.NewReader(c)
		_, err := io.WriteString(c, "GET /ws HTTP/1.1\r\nHost: one.test\r\nConnection: keep-alive, Upgrade\r\nUpgrade: websocket\r\n\r\n")
		must(t, err)
		res, err := http.ReadResponse(r, nil)
		must(t, err)
		want(t, "status", res.StatusCode, 101)
		for range 3 {
			_, err = io.WriteString(c, "hello")
			must(t, err)
			got := make([]byte, 5)
			_, err = io.ReadFull(r, got)
			must(t, err)
			want(t, "echo", string(got), "hello")
		}
		must(t, c.(interface{ CloseWrite() error }).CloseWrite()) // the other direction goes on
		_, err = r.ReadByte()
		want(t, "end", err, io.EOF)
		want(t, "end", w.end(), "101 out 15 in 15")

		for _, protocol := range []string{"h2c", "websocket, h2c", "HTTP/2.0", "TLS/1.2"} {
			res, body := raw(t, open(), "GET /ws HTTP/1.1\r\nHost: one.test\r\nConnection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AA\r\nUpgrade: "+protocol+"\r\n\r\n")
			want(t, protocol, fmt.Sprint(res.StatusCode, " ", body), "200 HTTP/1.1 without upgrade []")
			w.end()
		}
	}
	want(t, "asked", fmt.Sprintf("%q", asked), `["websocket" "" "" "" "" "websocket" "" "" "" ""]`)
}

// A client that has said all it has to say still gets its answer.
func TestHalfClose(t *testing.T) {
	w := newWorld(t)
	come := make(chan struct{})
	a := w.name("one.test", map[uint16]string{80: w.upstream(func(rw http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		<-come
		fmt.Fprintf(rw, "%s", body)
	}, false, "")})
	w.open()
	c := w.at(a, 80)
	_, err := io.WriteString(c, "POST / HTTP/1.1\r\nHost: one.test\r\nContent-Length: 5\r\n\r\nhello")
	must(t, err)
	must(t, c.(*net.TCPConn).CloseWrite())
	time.AfterFunc(100*time.Millisecond, func() { close(come) })
	res, body := answer(t, bufio.NewReader(c))
	want(t, "answer", fmt.Sprint(res.StatusCode, body), "200hello")
	want(t, "end", w.end(), "200 out 5 in 5")
}

// One that has really gone, which looks the same, is not waited for long.
func TestHalfClosedAndGone(t *testing.T) {
	w := newWorld(t)
	gone := make(chan struct{})
	a := w.name("one.test", map[uint16]string{80: w.upstream(func(rw http.ResponseWriter, r *http.Request) {
		<-r.Context().Done()
		close(gone)
	}, false, "")})
	w.cfg.Limits.HalfClosed = 100 * time.Millisecond
	w.open()
	c := w.at(a, 80)
	_, err := io.WriteString(c, "GET / HTTP/1.1\r\nHost: one.test\r\n\r\n")
	must(t, err)
	must(t, c.(*net.TCPConn).CloseWrite())
	<-gone
	want(t, "end", w.end(), "0 out 0 in 0 failed")
}

// A client that goes away takes its request with it, and upstream that breaks
// off is not made whole.
func TestBrokenOff(t *testing.T) {
	both(t, func(t *testing.T, h2 bool) {
		w := newWorld(t)
		gone := make(chan struct{})
		w.name("one.test", map[uint16]string{443: w.upstream(func(rw http.ResponseWriter, r *http.Request) {
			if r.URL.Path == "/half" {
				rw.Header().Set("Trailer", "X")
				io.WriteString(rw, "half")
				http.NewResponseController(rw).Flush()
				panic(http.ErrAbortHandler)
			}
			<-r.Context().Done()
			close(gone)
		}, true, "one.test")})
		w.open()
		ctx, cancel := context.WithCancel(context.Background())
		req, _ := http.NewRequestWithContext(ctx, "GET", "https://one.test/", nil)
		time.AfterFunc(100*time.Millisecond, cancel)
		_, err := w.client(h2).Do(req)
		if !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
		select {
		case <-gone:
		case <-time.After(10 * time.Second):
			t.Error("upstream does not learn of it")
		}
		want(t, "end", w.end(), "0 out 0 in 0 failed")

		res, err := w.client(h2).Get("https://one.test/half")
		must(t, err)
		body, err := io.ReadAll(res.Body)
		res.Body.Close()
		want(t, "body", string(body), "half")
		if err == nil {
			t.Error("half an answer looks whole")
		}
		want(t, "end", w.end(), "200 out 0 in 4 failed")
	})
}

func TestUpstreamFails(t *testing.T) {
	w := newWorld(t)
	other, _ := root(t)
	cert, err := other.mint("untrusted.test")
	must(t, err)
	untrusted, err := tls.Listen("tcp", "127.0.0.1:0", &tls.Config{Certificates: []tls.Certificate{*cert}})
	must(t, err)
	defer untrusted.Close()
	go func() {
		for {
			c, err := untrusted.Accept()
			if err != nil {
				return
			}
			c.(*tls.Conn).Handshake()
			c.Close()
		}
	}()
	closed, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	closed.Close()
	silent, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	defer silent.Close()
	garbage := banner(t)
	w.name("untrusted.test", map[uint16]string{443: untrusted.Addr().String()})
	w.name("wrong.test", map[uint16]string{443: w.upstream(echo, true, "one.test")})
	w.name("closed.test", map[uint16]string{443: closed.Addr().String()})
	w.name("silent.test", map[uint16]string{443: silent.Addr().String(), 80: silent.Addr().String()})
	w.name("garbage.test", map[uint16]string{443: garbage, 80: garbage})
	status, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	defer status.Close()
	go func() {
		for {
			c, err := status.Accept()
			if err != nil {
				return
			}
			if _, err := http.ReadRequest(bufio.NewReader(c)); err == nil {
				io.WriteString(c, "HTTP/1.1 099 Odd\r\nContent-Length: 0\r\n\r\n")
			}
			c.Close()
		}
	}()
	w.name("status.test", map[uint16]string{80: status.Addr().String()})
	w.name("none.test", nil)
	w.cfg.Limits = Limits{Handshake: 200 * time.Millisecond, Answer: 200 * time.Millisecond}
	w.open()
	for _, tt := range []struct {
		url    string
		status int
		want   string
	}{
		{"https://untrusted.test/", 502, "x509: certificate signed by unknown authority"},
		{"https://wrong.test/", 502, "x509: certificate is valid for one.test, not wrong.test"},
		{"https://closed.test/", 502, "connection refused"},
		{"https://silent.test/", 504, "TLS with silent.test"},
		{"http://silent.test/", 504, "timeout awaiting response headers"},
		{"https://garbage.test/", 502, "first record does not look like a TLS handshake"},
		{"http://garbage.test/", 502, "HTTP"}, // "malformed", or "it spoke before it was asked"
		{"http://status.test/", 502, "its status is none of HTTP"},
		{"https://none.test/", 502, "no such host"},
	} {
		res, body := get(t, w.client(true), tt.url)
		want(t, tt.url, res.StatusCode, tt.status)
		want(t, tt.url, res.Header.Get("X-Airlock-Error"), "upstream")
		if !strings.Contains(body, tt.want) || strings.Contains(body, "%!") {
			t.Errorf("%s: %s, want %q", tt.url, body, tt.want)
		}
		if !strings.Contains(tt.url, "none") {
			want(t, tt.url, w.end(), fmt.Sprintf("%d out 0 in 0 failed", tt.status))
		}
	}
}

func TestPassthrough(t *testing.T) {
	w := newWorld(t)
	// Each name has the upstream's own certificate: TLS is not ended here.
	a := w.name("one.test", map[uint16]string{443: w.upstream(echo, true, "one.test")})
	b := w.name("two.test", map[uint16]string{443: w.upstream(echo, true, "two.test")})
	w.modes["one.test:443"] = Passthrough
	w.modes["two.test:443"] = Passthrough
	w.deny = func(r Request) error {
		if r.Host == "two.test" {
			return &Denied{Reason: "no"}
		}
		return nil
	}
	w.open()
	outer := &tls.Config{RootCAs: w.cfg.Roots, ServerName: "one.test"}

	for _, at := range []string{a.String(), "192.0.2.9"} { // by the name, and by SNI alone
		c := tls.Client(w.dial(w.resolve(at+":443")), outer.Clone())
		res, body := raw(t, c, "GET / HTTP/1.1\r\nHost: one.test\r\n\r\n")
		want(t, at, fmt.Sprint(res.StatusCode, body), "200HTTP/1.1 GET one.test /")
		want(t, "log", lines(w.took()...), "CONNECT tls://one.test:443 203.0.113.7")
		c.Close()
		w.end()
	}
	for _, tt := range []struct {
		what   string
		c      net.Conn
		config *tls.Config
		log    string
	}{
		{"SNI disagrees", w.at(a, 443), &tls.Config{RootCAs: w.cfg.Roots, ServerName: "two.test"}, "refused 421 CONNECT tls://two.test:443"},
		{"denied", w.at(b, 443), &tls.Config{RootCAs: w.cfg.Roots, ServerName: "two.test"}, "deny CONNECT tls://two.test:443"},
		{"refused by SNI", w.dial(w.resolve("192.0.2.9:443")), &tls.Config{RootCAs: w.cfg.Roots, ServerName: "refused.test"}, "refuse refused.test:443"},
		{"ECH", w.at(a, 443), echConfig(t, w), "refused 403 CONNECT tls://one.test:443"},
	} {
		err := tls.Client(tt.c, tt.config).Handshake()
		if err == nil || !strings.Contains(err.Error(), "access denied") {
			t.Errorf("%s: %v, want access denied", tt.what, err)
		}
		want(t, tt.what, lines(w.took()...), tt.log)
	}
	c := w.at(a, 443)
	_, err := io.WriteString(c, "GET / HTTP/1.1\r\nHost: one.test\r\n\r\n")
	must(t, err)
	if _, err := c.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("plain text: %v, want a reset", err)
	}
	want(t, "plain text", lines(w.took()...), "refused 403 CONNECT tcp://one.test:443")
	// No SNI, but the name was looked up: it goes there.
	res, _ := raw(t, tls.Client(w.at(a, 443), &tls.Config{InsecureSkipVerify: true}), "GET / HTTP/1.1\r\nHost: one.test\r\n\r\n")
	want(t, "no SNI", res.StatusCode, 200)
}

func TestRaw(t *testing.T) {
	w := newWorld(t)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	defer l.Close()
	a := w.name("one.test", map[uint16]string{22: l.Addr().String(), 23: "127.0.0.1:1"})
	w.modes["one.test:22"], w.modes["one.test:23"] = TCP, TCP
	w.open()
	open := func() (in, out *net.TCPConn) {
		in = w.at(a, 22).(*net.TCPConn)
		c, err := l.Accept()
		must(t, err)
		t.Cleanup(func() { c.Close() })
		c.SetDeadline(time.Now().Add(2 * time.Minute))
		return in, c.(*net.TCPConn)
	}
	t.Run("half-close", func(t *testing.T) {
		in, out := open()
		want(t, "names held", w.held.Load(), 1)
		_, err := io.WriteString(in, "question")
		must(t, err)
		must(t, in.CloseWrite())
		got, err := io.ReadAll(out)
		must(t, err)
		want(t, "question", string(got), "question")
		_, err = io.WriteString(out, "a long answer")
		must(t, err)
		must(t, out.CloseWrite())
		got, err = io.ReadAll(in)
		must(t, err)
		want(t, "answer", string(got), "a long answer")
		want(t, "end", w.end(), "0 out 8 in 13")
	})
	for _, inside := range []bool{true, false} {
		t.Run(fmt.Sprint("reset inside ", inside), func(t *testing.T) {
			from, to := open()
			if !inside {
				from, to = to, from
			}
			must(t, from.SetLinger(0))
			from.Close()
			if _, err := to.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
				t.Errorf("got %v, want a reset", err)
			}
			want(t, "end", w.end(), "0 out 0 in 0 failed")
		})
	}
	t.Run("nothing there", func(t *testing.T) {
		if _, err := w.at(a, 23).Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("got %v, want a reset", err)
		}
		want(t, "end", w.end(), "0 out 0 in 0 failed")
	})
}

// A large download is in memory by its buffers only, also when it is read slowly.
func TestFlatMemory(t *testing.T) {
	both(t, func(t *testing.T, h2 bool) {
		const size = 256 << 20
		block := bytes.Repeat([]byte("x"), 1<<20)
		w := newWorld(t)
		w.name("one.test", map[uint16]string{443: w.upstream(func(rw http.ResponseWriter, r *http.Request) {
			for range size / len(block) {
				if _, err := rw.Write(block); err != nil {
					return
				}
			}
		}, true, "one.test")})
		w.open()
		res, err := w.client(h2).Get("https://one.test/")
		must(t, err)
		defer res.Body.Close()
		var before, now runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&before)
		buf := make([]byte, 1<<20)
		n := 0
		for most := uint64(0); ; {
			m, err := io.ReadFull(res.Body, buf)
			if n += m; err != nil {
				break
			}
			if n%(64<<20) == 0 {
				runtime.GC()
				runtime.ReadMemStats(&now)
				if most = max(most, now.HeapAlloc); most > before.HeapAlloc+16<<20 {
					t.Fatalf("%d MiB on the heap", most>>20)
				}
			}
		}
		want(t, "size", n, size)
		want(t, "end", w.end(), fmt.Sprintf("200 out 0 in %d", size))
	})
}
