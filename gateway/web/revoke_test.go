package web

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"sync"
	"testing"
	"time"
)

// revoking is a world whose permits can be withdrawn.
type revoking struct {
	*world
	mu    sync.Mutex
	all   []*revocable
	early bool // they are withdrawn before they are used
}

type revocable struct {
	Permit
	mu      sync.Mutex
	revoked bool
	f       func(*Denied)
}

func (p *revocable) OnRevoke(f func(*Denied)) {
	p.mu.Lock()
	p.f = f
	revoked := p.revoked
	p.mu.Unlock()
	if revoked {
		go f(withdrawn)
	}
}

func (p *revocable) revoke() {
	p.mu.Lock()
	f := p.f
	p.revoked = true
	p.mu.Unlock()
	if f != nil {
		f(withdrawn)
	}
}

var withdrawn = &Denied{Reason: "it was withdrawn"}

func (w *revoking) Cross(ctx context.Context, r Request) (Permit, error) {
	p, err := w.world.Cross(ctx, r)
	if err != nil {
		return nil, err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.all = append(w.all, &revocable{Permit: p, revoked: w.early})
	return w.all[len(w.all)-1], nil
}

func (w *revoking) revoke() {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, p := range w.all {
		p.revoke()
	}
}

// endless is a body without an end.
type endless struct{}

func (endless) Read(p []byte) (int, error) { return len(p), nil }

func newRevoking(t *testing.T) *revoking {
	w := &revoking{world: newWorld(t)}
	w.cfg.Judge = w
	return w
}

// ends waits for the end of a crossing, which must come within a second.
func (w *revoking) ends(t *testing.T, want string) {
	t.Helper()
	began := time.Now()
	if got := w.end(); got != want && want != "" {
		t.Errorf("it ended with %s, want %s", got, want)
	}
	if took := time.Since(began); took > time.Second {
		t.Errorf("it went on for %v", took)
	}
}

func TestRevokeRaw(t *testing.T) {
	w := newRevoking(t)
	up, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	t.Cleanup(func() { up.Close() })
	go func() {
		for {
			c, err := up.Accept()
			if err != nil {
				return
			}
			go func() {
				io.Copy(c, c)
				c.Close()
			}()
		}
	}()
	w.modes["raw.test:9"] = TCP
	a := w.name("raw.test", map[uint16]string{9: up.Addr().String()})
	w.open()
	c := w.at(a, 9)
	_, err = io.WriteString(c, "12345")
	must(t, err)
	_, err = io.ReadFull(c, make([]byte, 5))
	must(t, err)
	w.revoke()
	w.ends(t, "0 out 5 in 5 failed")
	if _, err := c.Read(make([]byte, 1)); err == nil || err == io.EOF {
		t.Errorf("its end looks like one: %v", err)
	}

	w.early = true
	c = w.at(a, 9)
	w.ends(t, "0 out 0 in 0 failed")
	if _, err := c.Read(make([]byte, 1)); err == nil || err == io.EOF {
		t.Errorf("withdrawn before: %v", err)
	}
}

func TestRevokeAnswers(t *testing.T) {
	both(t, func(t *testing.T, h2 bool) {
		w := newRevoking(t)
		asked := make(chan string, 1)
		w.name("one.test", map[uint16]string{443: w.upstream(func(rw http.ResponseWriter, r *http.Request) {
			switch r.URL.Path {
			case "/events":
				io.WriteString(rw, "data: 1\n\n")
				rw.(http.Flusher).Flush()
				<-r.Context().Done()
			case "/flood":
				block := make([]byte, 64<<10)
				for r.Context().Err() == nil {
					if _, err := rw.Write(block); err != nil {
						return
					}
				}
			case "/silent":
				asked <- r.URL.Path
				<-r.Context().Done()
			case "/upload":
				r.Body.Read(make([]byte, 1))
				asked <- r.URL.Path
				io.Copy(io.Discard, r.Body)
			}
		}, true, "one.test")})
		w.open()
		c := w.client(h2)

		res, err := c.Get("https://one.test/events")
		must(t, err)
		lines := bufio.NewReader(res.Body)
		line, _ := lines.ReadString('\n')
		want(t, "the first event", line, "data: 1\n")
		w.revoke()
		w.ends(t, "200 out 0 in 9 failed")
		if rest, err := io.ReadAll(lines); err == nil {
			t.Errorf("the stream ended as if it were whole: %q", rest)
		}
		res.Body.Close()

		res, err = c.Get("https://one.test/flood") // and does not read it
		must(t, err)
		time.AfterFunc(200*time.Millisecond, w.revoke) // when all buffers are full
		w.ends(t, "")
		res.Body.Close()

		go func() {
			<-asked
			w.revoke()
		}()
		res, body := get(t, c, "https://one.test/silent")
		want(t, "an answer that had not begun", fmt.Sprint(res.StatusCode, res.Header.Get("X-Airlock-Denied")), "403gateway")
		w.ends(t, "403 out 0 in 0 failed")
		if body == "" {
			t.Error("nothing says why")
		}

		go func() {
			<-asked
			w.revoke()
		}()
		if res, err := c.Post("https://one.test/upload", "", endless{}); err == nil {
			res.Body.Close()
		}
		w.ends(t, "")

		// What is over is not broken off by what comes later.
		res, _ = get(t, c, "https://one.test/")
		want(t, "another request", res.StatusCode, 200)
		w.ends(t, "200 out 0 in 0")
		w.revoke()
		res, _ = get(t, c, "https://one.test/")
		want(t, "one more", res.StatusCode, 200)
		w.ends(t, "200 out 0 in 0")
	})
}

func TestRevokeUpgraded(t *testing.T) {
	w := newRevoking(t)
	a := w.name("ws.test", map[uint16]string{80: w.upstream(func(rw http.ResponseWriter, r *http.Request) {
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
	c := w.at(a, 80)
	io.WriteString(c, "GET / HTTP/1.1\r\nHost: ws.test\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
	r := bufio.NewReader(c)
	res, err := http.ReadResponse(r, nil)
	must(t, err)
	want(t, "status", res.StatusCode, 101)
	io.WriteString(c, "hello")
	_, err = io.ReadFull(r, make([]byte, 5))
	must(t, err)
	w.revoke()
	w.ends(t, "101 out 5 in 5 failed")
	if n, err := r.Read(make([]byte, 1)); err == nil {
		t.Errorf("%d bytes came after", n)
	}
}
