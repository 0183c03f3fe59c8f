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
	"net/netip"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

func TestLimits(t *testing.T) {
	w := newWorld(t)
	hold := make(chan struct{})
	a := w.name("one.test", map[uint16]string{80: w.upstream(func(rw http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/long":
			rw.Header().Set("Content-Length", "2000000")
		case "/endless":
			for {
				if _, err := rw.Write(make([]byte, 4096)); err != nil {
					return
				}
			}
		case "/header":
			rw.Header().Set("X", strings.Repeat("x", 100<<10))
		case "/hold":
			rw.WriteHeader(200)
			http.NewResponseController(rw).Flush()
			<-hold
		default:
			io.Copy(io.Discard, r.Body)
		}
	}, false, "")})
	w.cfg.Limits = Limits{BodyBytes: 1 << 20, AnswerBytes: 1 << 20, HeaderBytes: 8 << 10, AnswerHeaderBytes: 64 << 10, Requests: 2}
	w.open()
	c := w.client(false)

	post := func(body io.Reader) (int, error) {
		res, err := c.Post("http://one.test/", "", body)
		if err != nil {
			return 0, err
		}
		res.Body.Close()
		return res.StatusCode, nil
	}
	big := make([]byte, 2<<20)
	status, err := post(bytes.NewReader(big))
	if err == nil {
		want(t, "length known", status, 413)
	}
	w.took()
	status, err = post(io.MultiReader(bytes.NewReader(big)))
	if err == nil {
		want(t, "length unknown", status, 413)
	}
	if end := w.end(); !strings.HasSuffix(end, "failed") {
		t.Error(end)
	}
	res, body := get(t, c, "http://one.test/long")
	want(t, "long answer", res.StatusCode, 502)
	if !strings.Contains(body, "the answer is larger than this sandbox may receive") {
		t.Error(body)
	}
	w.end()
	res, err = c.Get("http://one.test/endless")
	must(t, err)
	n, err := io.Copy(io.Discard, res.Body)
	res.Body.Close()
	if err == nil || n > 1<<20 {
		t.Errorf("an endless answer: %d bytes, %v", n, err)
	}
	if end := w.end(); !strings.HasSuffix(end, "failed") {
		t.Error(end)
	}
	res, _ = get(t, c, "http://one.test/header")
	want(t, "long header", res.StatusCode, 502)
	w.end()
	res, _ = raw(t, w.at(a, 80), "GET / HTTP/1.1\r\nHost: one.test\r\nX: "+strings.Repeat("x", 64<<10)+"\r\n\r\n")
	want(t, "long header of a request", res.StatusCode, 431)

	var held []*http.Response
	for range 2 {
		res, err := c.Get("http://one.test/hold")
		must(t, err)
		held = append(held, res)
	}
	res, _ = get(t, c, "http://one.test/")
	want(t, "the next", res.StatusCode, 429)
	want(t, "the next", res.Header.Get("Retry-After"), "1")
	close(hold)
	for _, res := range held {
		io.Copy(io.Discard, res.Body)
		res.Body.Close()
		w.end()
	}
	status, err = post(strings.NewReader("x"))
	must(t, err)
	want(t, "after that", status, 200)
}

func TestRate(t *testing.T) {
	w := newWorld(t)
	a := w.name("one.test", map[uint16]string{80: w.upstream(echo, false, "")})
	w.cfg.Limits = Limits{RequestsPerMinute: 30} // three at once, of which a flow is one
	limited := make(chan struct{}, 10)
	w.cfg.Limited = func() { limited <- struct{}{} }
	w.open()
	c := w.at(a, 80)
	r := bufio.NewReader(c)
	for _, status := range []int{200, 200, 429} {
		fmt.Fprint(c, "GET / HTTP/1.1\r\nHost: one.test\r\n\r\n")
		res, _ := answer(t, r)
		want(t, "status", res.StatusCode, status)
	}
	if _, err := w.at(a, 80).Read(make([]byte, 1)); err == nil || errors.Is(err, io.EOF) {
		t.Errorf("one flow too many: %v, want a reset", err)
	}
	want(t, "refused", len(limited), 2)
}

// Whoever is slow, on either side, is waited for a bounded time.
func TestSlow(t *testing.T) {
	w := newWorld(t)
	stop := make(chan struct{})
	t.Cleanup(func() { close(stop) })
	slow := func(rw http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/endless":
			for {
				if _, err := rw.Write(make([]byte, 64<<10)); err != nil {
					return
				}
			}
		case "/stall":
			io.WriteString(rw, "begin")
			http.NewResponseController(rw).Flush()
			select {
			case <-stop:
			case <-r.Context().Done():
			}
		default:
			io.Copy(io.Discard, r.Body)
		}
	}
	tcp := banner(t)
	a := w.name("one.test", map[uint16]string{80: w.upstream(slow, false, ""), 443: w.upstream(slow, true, "one.test"), 22: tcp})
	w.modes["one.test:22"] = TCP
	w.cfg.Limits = Limits{Handshake: 200 * time.Millisecond, Idle: 300 * time.Millisecond, KeepAlive: 200 * time.Millisecond}
	w.open()
	var all sync.WaitGroup
	var ends []string
	for _, tt := range []struct {
		what string
		open func() net.Conn
		end  string
	}{
		{"silence", func() net.Conn { return w.at(a, 80) }, ""},
		{"half a header", func() net.Conn { c := w.at(a, 80); io.WriteString(c, "GET / HTTP/1.1\r\nHo"); return c }, ""},
		{"half a ClientHello", func() net.Conn { c := w.at(a, 443); c.Write([]byte{22, 3, 1, 2, 0, 1}); return c }, ""},
		{"no handshake after ClientHello", func() net.Conn {
			c := w.at(a, 443)
			c.Write(clientHello(t, "one.test"))
			return c
		}, ""},
		{"TLS and silence", func() net.Conn { c := w.tlsTo(a, 443, "one.test"); must(t, c.Handshake()); return c }, ""},
		{"HTTP/2 and silence", func() net.Conn {
			c := w.tlsTo(a, 443, "one.test", "h2")
			newStreams(t, c)
			return c
		}, ""},
		{"half a header of HTTP/2", func() net.Conn {
			c := w.tlsTo(a, 443, "one.test", "h2")
			s := newStreams(t, c)
			must(t, s.f.WriteRawFrame(1, 0, 1, []byte{0x82}))
			return c
		}, ""},
		{"half a body", func() net.Conn {
			c := w.at(a, 80)
			io.WriteString(c, "POST / HTTP/1.1\r\nHost: one.test\r\nContent-Length: 10\r\n\r\nhalf")
			return c
		}, "504 out 4 in 0 failed"},
		{"upstream stalls", func() net.Conn {
			c := w.at(a, 80)
			io.WriteString(c, "GET /stall HTTP/1.1\r\nHost: one.test\r\n\r\n")
			return c
		}, "200 out 0 in 5 failed"},
		{"raw and silence", func() net.Conn { return w.at(a, 22) }, "0 out 0 in 14 failed"},
	} {
		c := tt.open()
		if tt.end != "" {
			ends = append(ends, tt.end)
		}
		all.Go(func() {
			begin := time.Now()
			io.Copy(io.Discard, c)
			if d := time.Since(begin); d > 4*time.Second {
				t.Errorf("%s: it ended after %v", tt.what, d)
			}
		})
	}
	all.Wait()
	var got []string
	for range ends {
		got = append(got, w.end())
	}
	slices.Sort(got)
	slices.Sort(ends)
	want(t, "ends", lines(got...), lines(ends...))
	t.Run("a client that does not read", func(t *testing.T) {
		c := w.at(a, 80)
		io.WriteString(c, "GET /endless HTTP/1.1\r\nHost: one.test\r\n\r\n")
		if end := w.end(); !strings.HasSuffix(end, "failed") {
			t.Error(end)
		}
	})
}

// Two messages in one: nothing but what was decided gets upstream.
func TestSmuggling(t *testing.T) {
	w := newWorld(t)
	var mu sync.Mutex
	var seen []string
	a := w.name("one.test", map[uint16]string{80: w.upstream(func(rw http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		mu.Lock()
		seen = append(seen, fmt.Sprintf("%s %s %d %v %s", r.Method, r.RequestURI, r.ContentLength, r.TransferEncoding, body))
		mu.Unlock()
	}, false, "")})
	w.deny = func(r Request) error {
		if strings.HasPrefix(r.Path, "/admin") {
			return &Denied{Reason: "no"}
		}
		return nil
	}
	w.open()
	const inner = "GET /admin HTTP/1.1\r\nHost: one.test\r\n\r\n"
	for _, tt := range []struct {
		what, text string
		status     int
		want       string
	}{
		{"both lengths", "POST / HTTP/1.1\r\nHost: one.test\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + inner, 200, "POST / -1 [chunked] "},
		{"two lengths", "POST / HTTP/1.1\r\nHost: one.test\r\nContent-Length: 4\r\nContent-Length: 5\r\n\r\nabcde", 400, ""},
		{"odd coding", "POST / HTTP/1.1\r\nHost: one.test\r\nTransfer-Encoding: xchunked\r\n\r\n0\r\n\r\n", 501, ""},
		{"two codings", "POST / HTTP/1.1\r\nHost: one.test\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 501, ""},
		{"space before colon", "POST / HTTP/1.1\r\nHost: one.test\r\nContent-Length : 4\r\n\r\nabcd", 400, ""},
		{"folded", "GET / HTTP/1.1\r\nHost: one.test\r\nX: a\r\n Transfer-Encoding: chunked\r\n\r\n", 200, "GET / 0 [] "},
		{"signed length", "POST / HTTP/1.1\r\nHost: one.test\r\nContent-Length: +4\r\n\r\nabcd", 400, ""},
		{"two hosts", "GET / HTTP/1.1\r\nHost: one.test\r\nHost: two.test\r\n\r\n", 400, ""},
		{"no host", "GET / HTTP/1.1\r\n\r\n", 400, ""},
		{"HTTP/1.0 without a host", "GET /old HTTP/1.0\r\n\r\n", 200, "GET /old 0 [] "},
		{"bare CR", "GET / HTTP/1.1\r\nHost: one.test\r\nX: a\rb\r\n\r\n", 400, ""},
		{"NUL", "GET / HTTP/1.1\r\nHost: one.test\r\nX: a\x00b\r\n\r\n", 400, ""},
		{"a body that looks like a request", "GET /ok HTTP/1.1\r\nHost: one.test\r\nContent-Length: 39\r\n\r\n" + inner, 200, "GET /ok 39 [] " + inner},
		{"HTTP/2 in clear", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400, ""},
		{"any server", "OPTIONS * HTTP/1.1\r\nHost: one.test\r\n\r\n", 400, ""},
		{"small letters", "delete /admin HTTP/1.1\r\nHost: one.test\r\n\r\n", 400, ""},
		{"odd path", "GET /a%2f..%2fadmin HTTP/1.1\r\nHost: one.test\r\n\r\n", 400, ""},
		{"slash in a segment", "GET /a%2fadmin HTTP/1.1\r\nHost: one.test\r\n\r\n", 400, ""},
		{"dots", "GET /a/../admin HTTP/1.1\r\nHost: one.test\r\n\r\n", 403, ""},
		{"CONNECT", "CONNECT two.test:22 HTTP/1.1\r\nHost: one.test\r\n\r\n", 400, ""},
	} {
		seen = nil
		c := w.at(a, 80)
		res, _ := raw(t, c, tt.text)
		want(t, tt.what, res.StatusCode, tt.status)
		c.(*net.TCPConn).CloseWrite()
		io.Copy(io.Discard, c)
		mu.Lock()
		want(t, tt.what, lines(seen...), tt.want)
		mu.Unlock()
	}
}

// A request that is denied with a body does not take its connection with it.
func TestBodyOfDenied(t *testing.T) {
	w := newWorld(t)
	a := w.name("one.test", map[uint16]string{80: w.upstream(echo, false, "")})
	w.deny = func(r Request) error {
		if r.Path == "/no" {
			return &Denied{Reason: "no"}
		}
		return nil
	}
	w.open()
	c := w.at(a, 80)
	r := bufio.NewReader(c)
	for i, body := range []string{
		"Content-Length: 5\r\n\r\nhello", "Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n", "Content-Length: 0\r\n\r\n",
		"Content-Length: 200000\r\n\r\n" + strings.Repeat("x", 200000),
	} {
		for path, status := range map[string]int{"/no": 403, "/yes": 200} {
			_, err := io.WriteString(c, "POST "+path+" HTTP/1.1\r\nHost: one.test\r\n"+body)
			must(t, err)
			res, err := http.ReadResponse(r, nil)
			must(t, err)
			_, err = io.Copy(io.Discard, res.Body)
			must(t, err)
			want(t, fmt.Sprint(i, path), res.StatusCode, status)
		}
	}
}

// A body whose rest comes late is not a request.
func TestRestOfBody(t *testing.T) {
	w := newWorld(t)
	a := w.name("one.test", map[uint16]string{80: w.upstream(func(rw http.ResponseWriter, r *http.Request) {
		rw.Header().Set("Connection", "close")
		io.WriteString(rw, "enough")
	}, false, "")})
	w.open()
	c := w.at(a, 80)
	r := bufio.NewReader(c)
	_, err := io.WriteString(c, "POST / HTTP/1.1\r\nHost: one.test\r\nContent-Length: 1000\r\n\r\nhalf")
	must(t, err)
	_, body := answer(t, r)
	want(t, "body", body, "enough")
	// The connection ends before anything more is taken for a request.
	begin := time.Now()
	rest, err := io.ReadAll(r)
	if err != nil && !errors.Is(err, syscall.ECONNRESET) {
		t.Error(err)
	}
	want(t, "what follows", string(rest), "")
	if d := time.Since(begin); d > 5*time.Second {
		t.Errorf("it ended after %v", d)
	}
	want(t, "log", lines(w.took()...), "POST http://one.test:80/ 203.0.113.7")
}

// Doors share nothing, and a pooled connection is only for what was decided on it.
func TestUpstreamConnections(t *testing.T) {
	w := newWorld(t)
	up := w.upstream(echo, true, "one.test")
	a := w.name("one.test", map[uint16]string{443: up})
	w.open()
	for range 3 {
		raw(t, w.tlsTo(a, 443, "one.test"), "GET / HTTP/1.1\r\nHost: one.test\r\n\r\n")
	}
	want(t, "connections", len(w.connects), 1)
	moved := newWorld(t)
	moved.cfg.Router = router{moved}
	moved.outer, moved.cfg.Roots = w.outer, w.cfg.Roots
	a = moved.name("one.test", map[uint16]string{443: up})
	moved.open()
	for range 2 { // the address changed between them
		raw(t, moved.tlsTo(a, 443, "one.test"), "GET / HTTP/1.1\r\nHost: one.test\r\n\r\n")
	}
	want(t, "log", lines(moved.took()...), lines("GET https://one.test:443/ 203.0.113.1", "GET https://one.test:443/ 203.0.113.2"))
	want(t, "connections", fmt.Sprint(moved.connects), "[{https one.test 443 203.0.113.1 } {https one.test 443 203.0.113.2 }]")
}

// After a Reroute nothing goes by a connection of before, on a connection of the
// sandbox that is kept, and by HTTP/2, too.
func TestReroute(t *testing.T) {
	for _, protocol := range []string{"http/1.1", "h2"} {
		w := newWorld(t)
		a := w.name("one.test", map[uint16]string{443: w.upstream(echo, true, "one.test")})
		w.open()
		transport := &http.Transport{
			ForceAttemptHTTP2: protocol == "h2", TLSClientConfig: &tls.Config{RootCAs: w.trust, NextProtos: []string{protocol}},
			DialContext: func(context.Context, string, string) (net.Conn, error) { return w.at(a, 443), nil },
		}
		ask := func() {
			t.Helper()
			req, err := http.NewRequest("GET", "https://one.test/", nil)
			must(t, err)
			res, err := transport.RoundTrip(req)
			must(t, err)
			io.Copy(io.Discard, res.Body)
			res.Body.Close()
			want(t, "status", res.StatusCode, 200)
		}
		ask()
		ask()
		want(t, protocol+": connections", len(w.connects), 1)
		w.door.Reroute()
		ask()
		ask()
		want(t, protocol+": connections after it", len(w.connects), 2)
		want(t, protocol+": connections of the sandbox", len(w.flows), 1)
		transport.CloseIdleConnections()
	}
}

// router answers another address each time.
type router struct{ *world }

func (r router) Routes(context.Context, string, string, uint16) ([]Route, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return []Route{{IP: netip.AddrFrom4([4]byte{203, 0, 113, byte(1 + len(r.connects))})}}, nil
}

func TestWrap(t *testing.T) {
	w := newWorld(t)
	a := w.name("one.test", map[uint16]string{80: w.upstream(func(rw http.ResponseWriter, r *http.Request) {
		io.WriteString(rw, r.Header.Get("Authorization"))
	}, false, "")})
	w.cfg.Wrap = func(next http.RoundTripper) http.RoundTripper {
		return roundTripper(func(r *http.Request) (*http.Response, error) {
			if _, ok := PermitOf(r.Context()).(permit); !ok {
				t.Error("it is not the permit")
			}
			r = r.Clone(r.Context())
			r.Header.Set("Authorization", "secret")
			return next.RoundTrip(r)
		})
	}
	w.open()
	_, body := raw(t, w.at(a, 80), "GET / HTTP/1.1\r\nHost: one.test\r\nAuthorization: placeholder\r\n\r\n")
	want(t, "body", body, "secret")
}

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// Close ends all that is under way, of every kind.
func TestClose(t *testing.T) {
	w := newWorld(t)
	hang := func(rw http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Upgrade") != "" {
			switching(rw, r)
			return
		}
		http.NewResponseController(rw).Flush()
		<-r.Context().Done()
	}
	pass := w.upstream(hang, true, "pass.test")
	a := w.name("one.test", map[uint16]string{80: w.upstream(hang, false, ""), 443: w.upstream(hang, true, "one.test"), 22: banner(t)})
	b := w.name("pass.test", map[uint16]string{443: pass})
	w.modes["one.test:22"], w.modes["pass.test:443"] = TCP, Passthrough
	w.open()
	const ask = "GET / HTTP/1.1\r\nHost: one.test\r\n"
	var open []io.Reader
	start := func(c net.Conn, text string) {
		_, err := io.WriteString(c, text)
		must(t, err)
		_, err = c.Read(make([]byte, 1)) // it has begun
		must(t, err)
		open = append(open, c)
	}
	start(w.at(a, 80), ask+"\r\n")
	start(w.at(a, 80), ask+"Connection: upgrade\r\nUpgrade: websocket\r\n\r\n")
	start(w.tlsTo(a, 443, "one.test"), ask+"\r\n")
	start(w.at(a, 22), "")
	start(tls.Client(w.at(b, 443), &tls.Config{RootCAs: w.cfg.Roots, ServerName: "pass.test"}), "GET / HTTP/1.1\r\nHost: pass.test\r\n\r\n")
	proxied := w.at(gatewayAddr, 3128)
	tunnel(t, proxied, "one.test:22")
	start(proxied, "")
	open = append(open, w.at(a, 80)) // says nothing
	res, err := w.client(true).Get("https://one.test/")
	must(t, err)
	defer res.Body.Close()
	open = append(open, res.Body)

	w.door.Close()
	for _, c := range open {
		io.Copy(io.Discard, c)
	}
	for range len(open) - 1 {
		w.end()
	}
	if _, err := w.at(a, 80).Read(make([]byte, 1)); err == nil {
		t.Error("a closed door serves")
	}
}
