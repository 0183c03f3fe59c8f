package web

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"sync/atomic"
	"testing"
)

// metering is a world in which so many bytes may pass.
type metering struct {
	*world
	left atomic.Int64
}

type metered struct {
	Permit
	w *metering
}

var empty = &Denied{Status: http.StatusTooManyRequests, Reason: "nothing is left", Ask: "go on elsewhere"}

func (m metered) Passed(n int) (int, *Denied) {
	if left := m.w.left.Add(-int64(n)) + int64(n); left < int64(n) {
		return int(max(left, 0)), empty
	}
	return n, nil
}

func (w *metering) Cross(ctx context.Context, r Request) (Permit, error) {
	p, err := w.world.Cross(ctx, r)
	return metered{p, w}, err
}

func TestMetered(t *testing.T) {
	both(t, func(t *testing.T, h2 bool) {
		w := &metering{world: newWorld(t)}
		w.cfg.Judge = w
		w.name("one.test", map[uint16]string{443: w.upstream(func(rw http.ResponseWriter, r *http.Request) {
			switch r.URL.Path {
			case "/big":
				rw.Header().Set("Content-Length", "1000000")
				rw.Write(make([]byte, 1_000_000))
			case "/header":
				rw.Header().Set("X", string(bytes.Repeat([]byte("x"), 50_000)))
			default:
				n, _ := io.Copy(io.Discard, r.Body)
				fmt.Fprint(rw, n)
			}
		}, true, "one.test")})
		w.open()
		c := w.client(h2)

		w.left.Store(100_000)
		res, err := c.Get("https://one.test/big")
		must(t, err)
		n, err := io.Copy(io.Discard, res.Body)
		res.Body.Close()
		if err == nil || n > 100_000 || n < 90_000 {
			t.Errorf("%d bytes of an answer passed, %v", n, err)
		}
		var status int
		var out, in int64
		if _, err := fmt.Sscanf(w.end(), "200 out 0 in %d failed", &in); err != nil || in < n || in > 100_000 {
			t.Errorf("%d bytes passed and %d are told, %v", n, in, err)
		}

		w.left.Store(100_000)
		res, err = c.Post("https://one.test/", "", io.MultiReader(bytes.NewReader(make([]byte, 200_000))))
		if err == nil { // a client that still writes may see the connection end
			want(t, "an upload", res.StatusCode, 429)
			res.Body.Close()
		}
		if _, err := fmt.Sscanf(w.end(), "%d out %d in %d failed", &status, &out, &in); err != nil || out > 100_000 || status != 429 {
			t.Errorf("an upload ended with %d, %d bytes", status, out)
		}

		// Headers are a way out, too.
		w.left.Store(1000)
		req, err := http.NewRequest("GET", "https://one.test/", nil)
		must(t, err)
		req.Header.Set("X", string(bytes.Repeat([]byte("x"), 2000)))
		res, err = c.Do(req)
		must(t, err)
		res.Body.Close()
		want(t, "a long header", res.StatusCode, 429)
		want(t, "its end", w.end(), "429 out 0 in 0 failed")
		w.left.Store(10_000)
		res, body := get(t, c, "https://one.test/header")
		want(t, "a long header of an answer", res.StatusCode, 429)
		want(t, "what it says", body, `{"code":429,"message":"nothing is left","policy":[],"ask":"go on elsewhere"}`+"\n")
		want(t, "its end", w.end(), "429 out 0 in 0 failed")

		w.left.Store(100_000)
		res, body = get(t, c, "https://one.test/")
		want(t, "within what is left", fmt.Sprint(res.StatusCode, body), "2000")
		w.end()
	})
}

func TestMeteredRaw(t *testing.T) {
	w := &metering{world: newWorld(t)}
	w.cfg.Judge = w
	up, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	t.Cleanup(func() { up.Close() })
	go func() {
		for {
			c, err := up.Accept()
			if err != nil {
				return
			}
			go func() { io.Copy(c, c); c.Close() }()
		}
	}()
	w.modes["raw.test:9"] = TCP
	raw := w.name("raw.test", map[uint16]string{9: up.Addr().String()})
	ws := w.name("ws.test", map[uint16]string{80: w.upstream(func(rw http.ResponseWriter, r *http.Request) {
		rw.Header().Set("Upgrade", "websocket")
		rw.Header().Set("Connection", "Upgrade")
		rw.WriteHeader(http.StatusSwitchingProtocols)
		c, _, err := http.NewResponseController(rw).Hijack()
		if err != nil {
			return
		}
		defer c.Close()
		io.Copy(c, c)
	}, false, "")})
	w.open()

	w.left.Store(8)
	c := w.at(raw, 9)
	io.WriteString(c, "12345")
	got := make([]byte, 3)
	_, err = io.ReadFull(c, got)
	want(t, "what fits", fmt.Sprint(string(got), err), "123<nil>")
	if n, err := c.Read(got); err == nil || err == io.EOF {
		t.Errorf("%d bytes more, %v", n, err)
	}
	want(t, "its end", w.end(), "0 out 5 in 3 failed")

	w.left.Store(1000)
	c = w.at(ws, 80)
	io.WriteString(c, "GET / HTTP/1.1\r\nHost: ws.test\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
	r := bufio.NewReader(c)
	res, err := http.ReadResponse(r, nil)
	must(t, err)
	want(t, "status", res.StatusCode, 101)
	w.left.Store(7)
	io.WriteString(c, "hello")
	rest, err := io.ReadAll(r)
	if len(rest) > 2 {
		t.Errorf("%q came back, %v", rest, err)
	}
	want(t, "its end", w.end(), "101 out 5 in 2 failed")
}
