package gatewaytest

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
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

// A sandbox that asks for as much as it can, on 200 connections, leaves others
// their part: of requests half, of bytes about what is left by the processors.
func TestFair(t *testing.T) {
	h := newHost(t, wire.Budgets{Requests: 100_000_000}, func(rw http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/" {
			fine(rw, r)
			return
		}
		rw.Header().Set("Content-Length", strconv.Itoa(1<<35))
		for block := make([]byte, 256<<10); ; {
			if _, err := rw.Write(block); err != nil {
				return
			}
		}
	})
	const long = 3 * time.Second
	flood, download := work{200, "/", long}, work{200, "/bulk", long}
	for _, c := range []struct {
		what       string
		hog, other work
		least      float64 // part of the count that is the other's
		fastest    float64 // its median, to the hog's; 0 for bytes
	}{
		{"many requests", flood, work{32, "/", long}, 0.25, 0.5},
		{"one request after the other", flood, work{1, "/", long}, 0, 0.25},
		{"a download", download, work{1, "/bulk", long}, 0.1, 0},
	} {
		var got [2]done
		var all sync.WaitGroup
		for i, w := range []work{c.hog, c.other} {
			end := h.wire()
			all.Go(func() {
				var err error
				if got[i], err = h.run(end, w); err != nil {
					t.Error(err)
				}
			})
		}
		all.Wait()
		part := float64(got[1].Count) / float64(got[0].Count+got[1].Count)
		t.Logf("%s: %+v, beside it %+v, %.2f", c.what, got[0], got[1], part)
		if got[1].Count == 0 || part < c.least {
			t.Errorf("%s: %.2f of what there is, and at least %.2f is fair", c.what, part, c.least)
		}
		if c.fastest > 0 && float64(got[1].P50) > c.fastest*float64(got[0].P50) {
			t.Errorf("%s: a request takes %v, that of the sandbox that floods %v", c.what, got[1].P50, got[0].P50)
		}
	}
}
