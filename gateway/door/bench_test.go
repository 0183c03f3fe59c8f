package door

import (
	"context"
	"fmt"
	"io"
	"os"
	"slices"
	"sync"
	"testing"
	"time"
)

// BenchmarkOpen opens doors while all those before stay open, and tells the
// median and what each holds.
func BenchmarkOpen(b *testing.B) {
	before := rss(b)
	took := make([]time.Duration, b.N)
	for i := range b.N {
		ours, guests := pair(b)
		began := time.Now()
		d, err := Open(ours, Config{}, handler{})
		took[i] = time.Since(began)
		if err != nil {
			b.Fatal(err)
		}
		b.Cleanup(func() { d.Close(); guests.Close() })
	}
	held := rss(b) - before
	slices.Sort(took)
	b.ReportMetric(float64(took[b.N/2].Microseconds()), "p50-µs")
	b.ReportMetric(float64(took[b.N*99/100].Microseconds()), "p99-µs")
	b.ReportMetric(float64(held)/1024/float64(b.N), "KB/door")
}

// BenchmarkManyFlows holds b.N doors with 200 flows each; the guests' stacks are
// in the same process and count too.
func BenchmarkManyFlows(b *testing.B) {
	const flows = 200
	before := rss(b)
	var all sync.WaitGroup
	for range b.N {
		_, end := open(b, Config{}, handler{tcp: echo})
		g := newGuest(b, end)
		all.Go(func() {
			for range flows {
				c := g.mustDial(b, "192.0.2.1:80")
				io.WriteString(c, "x")
				io.ReadFull(c, make([]byte, 1))
			}
		})
	}
	all.Wait()
	held := rss(b) - before
	b.ReportMetric(float64(held)/(1<<20), "MB")
	b.ReportMetric(float64(held)/1024/float64(b.N)/flows, "KB/flow")
}

// BenchmarkConnect opens, accepts and closes flows, one after the other.
func BenchmarkConnect(b *testing.B) {
	_, end := open(b, Config{}, handler{tcp: func(_ context.Context, f *Flow) {
		if c, err := f.Accept(); err == nil {
			c.Close()
		}
	}})
	g := newGuest(b, end)
	for b.Loop() {
		c, err := g.dial(b.Context(), "192.0.2.1:80")
		if err != nil {
			b.Fatal(err)
		}
		c.Close()
	}
}

func BenchmarkRefuse(b *testing.B) {
	_, end := open(b, Config{}, handler{})
	g := newGuest(b, end)
	for b.Loop() {
		if _, err := g.dial(b.Context(), "192.0.2.1:80"); err == nil {
			b.Fatal("accepted")
		}
	}
}

// BenchmarkBulk moves bytes through one flow; both stacks share the machine.
func BenchmarkBulk(b *testing.B) {
	chunk := make([]byte, 256<<10)
	b.Run("down", func(b *testing.B) {
		d, end := open(b, Config{}, handler{tcp: func(_ context.Context, f *Flow) {
			if c, err := f.Accept(); err == nil {
				for {
					if _, err := c.Write(chunk); err != nil {
						return
					}
				}
			}
		}})
		c := newGuest(b, end).mustDial(b, "192.0.2.1:80")
		b.SetBytes(int64(len(chunk)))
		in := make([]byte, len(chunk))
		for b.Loop() {
			if _, err := io.ReadFull(c, in); err != nil {
				b.Fatal(err)
			}
		}
		b.ReportMetric(float64(d.Stats().Lost), "lost")
	})
	b.Run("up", func(b *testing.B) {
		_, end := open(b, Config{}, handler{tcp: func(_ context.Context, f *Flow) {
			if c, err := f.Accept(); err == nil {
				io.CopyBuffer(struct{ io.Writer }{io.Discard}, c, make([]byte, len(chunk)))
			}
		}})
		c := newGuest(b, end).mustDial(b, "192.0.2.1:80")
		b.SetBytes(int64(len(chunk)))
		for b.Loop() {
			if _, err := c.Write(chunk); err != nil {
				b.Fatal(err)
			}
		}
	})
}

// rss returns the bytes of memory that the process has.
func rss(b *testing.B) int {
	b.Helper()
	text, err := os.ReadFile("/proc/self/statm")
	if err != nil {
		b.Fatal(err)
	}
	var size, resident int
	if _, err := fmt.Sscan(string(text), &size, &resident); err != nil {
		b.Fatal(err)
	}
	return resident * os.Getpagesize()
}
