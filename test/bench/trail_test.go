package bench

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"airlock.dev/airlock/audit"
	"airlock.dev/airlock/audit/audittest"
	"airlock.dev/airlock/audit/index"
)

// crossing is an event as a connection to a port makes it, about 600 bytes.
func crossing(execution string) audit.Event {
	return audit.Event{
		Type: "port.serve", Team: "acme", Sandbox: "i" + strings.Repeat("a", 20), Execution: execution, Actor: audit.Actor{Kind: "visitor", ID: "public"},
		Facts:    []byte(`{"team":"acme","sandbox":{"id":"iaaaaaaaaaaaaaaaaaaaa","template":"base"}}`),
		Call:     audit.Call{Principal: audit.Entity{Type: "Sandbox", ID: "i" + strings.Repeat("a", 20)}, Action: "port:serve", Resource: audit.Entity{Type: "Port", ID: "8080"}, Context: map[string]any{"caller": "public", "time": "2026-12-02T10:00:00Z"}},
		Decision: audit.Decision{Effect: "permit", Policies: []string{"ceiling/ports-answer", "request/ports-answer"}, Set: strings.Repeat("a", 64)},
	}
}

// writers append until their time is over, and return how many events and how
// long each took at the median, in milliseconds.
func writers(b *testing.B, log *audit.Log, n int, d time.Duration) (events int, p50 float64) {
	b.Helper()
	var count atomic.Int64
	var mu sync.Mutex
	var all []float64
	var wg sync.WaitGroup
	end := time.Now().Add(d)
	for w := range n {
		wg.Go(func() {
			e := crossing(fmt.Sprint("x", w))
			var mine []float64
			for time.Now().Before(end) {
				start := time.Now()
				if _, err := log.Append(context.Background(), e); err != nil {
					b.Error(err)
					return
				}
				mine = append(mine, float64(time.Since(start))/1e6)
				count.Add(1)
			}
			mu.Lock()
			all = append(all, mine...)
			mu.Unlock()
		})
	}
	wg.Wait()
	return int(count.Load()), median(all)
}

// BenchmarkTrailOneWriter is a durable append to a bare write and fdatasync of
// as many bytes.
func BenchmarkTrailOneWriter(b *testing.B) {
	log, _ := audittest.Open(b)
	f, err := os.Create(filepath.Join(b.TempDir(), "bare"))
	if err != nil {
		b.Fatal(err)
	}
	defer f.Close()
	if _, err := f.Write(make([]byte, 16<<20)); err != nil {
		b.Fatal(err)
	}
	if err := f.Sync(); err != nil {
		b.Fatal(err)
	}
	var ours, bare []float64
	for round := range 10 {
		_, p50 := writers(b, log, 1, 300*time.Millisecond)
		ours = append(ours, p50)
		for i := range 500 {
			start := time.Now()
			if _, err := f.WriteAt(make([]byte, 600), int64(round*500+i)*1024); err != nil {
				b.Fatal(err)
			}
			if err := unix.Fdatasync(int(f.Fd())); err != nil {
				b.Fatal(err)
			}
			bare = append(bare, float64(time.Since(start))/1e6)
		}
	}
	report(b, ours, bare)
}

// BenchmarkTrailSustained is 64 writers for a while, with trees and index
// keeping up: what they are behind at the end, and how fast all is verified
// and one execution found.
func BenchmarkTrailSustained(b *testing.B) {
	log, dir := audittest.Open(b)
	const during = 10 * time.Second
	start := time.Now()
	n, p50 := writers(b, log, 64, during)
	wrote := time.Since(start)
	s := log.Status()
	b.ReportMetric(float64(s.Durable-s.Indexed), "behind")
	if err := log.CatchUp(b.Context()); err != nil {
		b.Fatal(err)
	}
	b.ReportMetric(float64(n)/wrote.Seconds(), "events/s")
	b.ReportMetric(float64(n)/time.Since(start).Seconds(), "indexed-events/s")
	b.ReportMetric(p50, "p50-ms")
	if err := log.Await(b.Context(), log.Status().Durable-1); err != nil {
		b.Fatal(err)
	}
	var found []float64
	for range 20 {
		q, err := index.ParseQuery("execution=x7", time.Now())
		if err != nil {
			b.Fatal(err)
		}
		start := time.Now()
		page, err := log.Find(b.Context(), q, index.Page{Limit: 100, Newest: true})
		if err != nil || len(page.Events) == 0 {
			b.Fatalf("%d events, %v", len(page.Events), err)
		}
		found = append(found, float64(time.Since(start))/1e6)
	}
	b.ReportMetric(median(found), "query-ms")
	start = time.Now()
	r, err := audit.Verify(b.Context(), dir, audit.VerifyOptions{VKeys: []string{log.Shards()[0].VKey}})
	if err != nil || !r.OK {
		b.Fatalf("%+v, %v", r.Problems, err)
	}
	b.ReportMetric(float64(r.Events)/time.Since(start).Seconds(), "verified/s")
	b.ReportMetric(0, "ns/op")
}
