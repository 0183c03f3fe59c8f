package gatewaytest

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"airlock.dev/airlock/gateway/wire"
)

// work is what a guest's process does until its time is over.
type work struct {
	Flows int
	Path  string // "/" for requests, one after the other on each flow, or "/bulk" for bytes without end
	For   time.Duration
}

// done is what it did.
type done struct {
	Count int64         // of answers, or bytes
	P50   time.Duration // of answers
	P99   time.Duration
}

// runGuest is the process of a guest, whose end of the wire is its first file.
func runGuest() error {
	var w work
	if err := json.Unmarshal([]byte(os.Args[1]), &w); err != nil {
		return err
	}
	var t testing.T // of nothing, until it fails
	end := os.NewFile(3, "guest")
	defer end.Close() // and not earlier, by the garbage collector
	b := &sandbox{world: &world{t: &t}, s: newStack(&t, end)}
	ctx, cancel := context.WithTimeout(context.Background(), w.For)
	defer cancel()
	var count atomic.Int64
	var mu sync.Mutex
	var took []time.Duration
	var all sync.WaitGroup
	for range w.Flows {
		all.Go(func() {
			c, err := b.more(ctx)
			if err != nil {
				fmt.Fprintln(os.Stderr, "more", err)
				return
			}
			c.SetDeadline(time.Now().Add(w.For))
			if w.Path != "/" {
				fmt.Fprintf(c, "GET %s HTTP/1.1\r\nHost: example.com\r\n\r\n", w.Path)
				io.Copy(counter{&count}, c)
				return
			}
			var mine []time.Duration
			for {
				began := time.Now()
				if err := ask(c); err != nil {
					break
				}
				mine = append(mine, time.Since(began))
				count.Add(1)
			}
			mu.Lock()
			took = append(took, mine...)
			mu.Unlock()
		})
	}
	all.Wait()
	d := done{Count: count.Load()}
	if slices.Sort(took); len(took) > 0 {
		d.P50, d.P99 = took[len(took)/2], took[len(took)*99/100]
	}
	return json.NewEncoder(os.Stdout).Encode(d)
}

type counter struct{ n *atomic.Int64 }

func (c counter) Write(p []byte) (int, error) {
	c.n.Add(int64(len(p)))
	return len(p), nil
}

// run has a sandbox's guest do work in a process of its own.
func (h *host) run(end *os.File, w work) (d done, err error) {
	arg, _ := json.Marshal(w)
	cmd := exec.CommandContext(h.t.Context(), "/proc/self/exe", string(arg))
	cmd.Args[0] = guestName
	cmd.ExtraFiles, cmd.Stderr = []*os.File{end}, os.Stderr
	out, err := cmd.Output()
	if err == nil {
		err = json.Unmarshal(out, &d)
	}
	return d, err
}

func TestFair(t *testing.T) {
	h := newHost(t, wire.Budgets{Requests: 100_000_000}, func(rw http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/" {
			io.WriteString(rw, "fine")
			return
		}
		rw.Header().Set("Content-Length", strconv.Itoa(1<<35))
		for block := make([]byte, 256<<10); ; {
			if _, err := rw.Write(block); err != nil {
				return
			}
		}
	})
	two := func(a, b work) (x, y done) {
		var all sync.WaitGroup
		for _, o := range []struct {
			work
			*done
		}{{a, &x}, {b, &y}} {
			if o.Flows == 0 {
				continue
			}
			end := h.wire()
			all.Go(func() {
				d, err := h.run(end, o.work)
				if err != nil {
					t.Error(err)
				}
				*o.done = d
			})
		}
		all.Wait()
		return x, y
	}
	const long = 4 * time.Second
	for range 1 {
		a, b := two(work{}, work{1, "/", long})
		t.Logf("alone: %+v", b)
		a, b = two(work{200, "/bulk", long}, work{1, "/", long})
		t.Logf("beside bulk: %+v, %+v", a, b)
		a, b = two(work{200, "/", long}, work{1, "/", long})
		t.Logf("beside a flood: %+v, %+v", a, b)
		a, b = two(work{}, work{1, "/bulk", long})
		t.Logf("bulk alone: %d MB/s", b.Count/4>>20)
		a, b = two(work{200, "/bulk", long}, work{})
		t.Logf("bulk 200 alone: %d MB/s", a.Count/4>>20)
		a, b = two(work{200, "/bulk", long}, work{1, "/bulk", long})
		t.Logf("bulk beside bulk: %d MB/s %d MB/s, %.3f", a.Count/4>>20, b.Count/4>>20, float64(b.Count)/float64(a.Count+b.Count))
		a, b = two(work{200, "/", long}, work{1, "/bulk", long})
		t.Logf("bulk beside flood: %+v %d MB/s", a, b.Count/4>>20)
		a, b = two(work{200, "/", long}, work{32, "/", long})
		t.Logf("flood beside 32: %+v %+v", a, b)
	}
	_ = net.ErrClosed
}
