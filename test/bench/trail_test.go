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
	"airlock.dev/airlock/audit/tiles"
)

// crossing is an event as a connection to a port of a sandbox makes it, about
// 600 bytes. Each sandbox has an event budget of its own, and an execution.
func crossing(n int) audit.Event {
	sandbox := fmt.Sprintf("i%020d", n)
	return audit.Event{
		Type: "port.serve", Team: "acme", Sandbox: sandbox, Execution: fmt.Sprint("x", n), Actor: audit.Actor{Kind: "visitor", ID: "public"},
		Facts:    []byte(`{"team":"acme","sandbox":{"id":"` + sandbox + `","template":"base"}}`),
		Call:     audit.Call{Principal: audit.Entity{Type: "Sandbox", ID: sandbox}, Action: "port:serve", Resource: audit.Entity{Type: "Port", ID: "8080"}, Context: map[string]any{"caller": "public", "time": "2026-12-02T10:00:00Z"}},
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
			e := crossing(w)
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
	if b.Failed() {
		b.FailNow()
	}
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

// BenchmarkTrailBurst is 64 writers as fast as they can, with trees and index
// behind them.
func BenchmarkTrailBurst(b *testing.B) {
	log, _ := audittest.Open(b)
	start := time.Now()
	n, p50 := writers(b, log, 64, 10*time.Second)
	b.ReportMetric(float64(n)/time.Since(start).Seconds(), "events/s")
	b.ReportMetric(p50, "p50-ms")
	if err := log.CatchUp(b.Context()); err != nil {
		b.Fatal(err)
	}
	b.ReportMetric(float64(n)/time.Since(start).Seconds(), "indexed-events/s")
	b.ReportMetric(0, "ns/op")
}

// BenchmarkTrailOfAMillion is 5,000 events a second for a minute and how many
// of them trees and index are behind at most; then, with a million of them, a
// query for one execution, a stop and a start, and the verification of all.
func BenchmarkTrailOfAMillion(b *testing.B) {
	const rate, seconds, all, workers = 5000, 60, 1_000_000, 64
	cfg := audittest.Config(b)
	log, err := audit.Open(b.Context(), cfg)
	if err != nil {
		b.Fatal(err)
	}
	var wg sync.WaitGroup
	start := time.Now()
	for w := range workers {
		wg.Go(func() {
			e := crossing(w)
			for i := range rate * seconds / workers {
				time.Sleep(time.Until(start.Add(time.Duration(i*workers+w) * time.Second / rate)))
				if _, err := log.Append(b.Context(), e); err != nil {
					b.Error(err)
					return
				}
			}
		})
	}
	done := make(chan struct{})
	go func() { wg.Wait(); close(done) }()
	var behind uint64
	for watching := true; watching; {
		select {
		case <-done:
			watching = false
		case <-time.After(100 * time.Millisecond):
			s := log.Status()
			behind = max(behind, s.Durable-min(s.Published, s.Indexed))
		}
	}
	b.ReportMetric(float64(log.Status().Durable)/time.Since(start).Seconds(), "sustained/s")
	b.ReportMetric(float64(behind), "most-behind")

	for log.Status().Durable < all {
		writers(b, log, workers, 500*time.Millisecond)
		if b.Failed() {
			return
		}
	}
	if err := log.CatchUp(b.Context()); err != nil {
		b.Fatal(err)
	}
	if _, err := log.Append(b.Context(), crossing(workers)); err != nil {
		b.Fatal(err)
	}
	if err := log.CatchUp(b.Context()); err != nil {
		b.Fatal(err)
	}
	for execution, name := range map[string]string{"x7": "query-ms", fmt.Sprint("x", workers): "query-one-ms"} {
		q, err := index.ParseQuery("execution="+execution, time.Now())
		if err != nil {
			b.Fatal(err)
		}
		var took []float64
		for range 20 {
			start := time.Now()
			page, err := log.Find(b.Context(), q, index.Page{Limit: 100, Newest: true})
			if err != nil || len(page.Events) == 0 {
				b.Fatalf("%d events, %v", len(page.Events), err)
			}
			took = append(took, float64(time.Since(start))/1e6)
		}
		b.ReportMetric(median(took), name)
	}

	// What lies there while it is open is what a kill leaves.
	killed := cfg
	killed.Dir = filepath.Join(b.TempDir(), "audit")
	if err := os.CopyFS(killed.Dir, os.DirFS(cfg.Dir)); err != nil {
		b.Fatal(err)
	}
	if err := log.Close(b.Context()); err != nil {
		b.Fatal(err)
	}
	restart(b, cfg, "start-s")
	restart(b, killed, "start-after-kill-s")

	vkeys := []string{log.Shards()[0].VKey}
	start = time.Now()
	trees, err := tiles.Verify(b.Context(), filepath.Join(cfg.Dir, "log"), tiles.VerifyOptions{VKeys: vkeys})
	if err != nil || !trees.OK() {
		b.Fatalf("%+v, %v", trees.Problems, err)
	}
	b.ReportMetric(float64(trees.Events)/time.Since(start).Seconds(), "verified/s")
	start = time.Now()
	r, err := audit.Verify(b.Context(), cfg.Dir, audit.VerifyOptions{VKeys: vkeys})
	if err != nil || !r.OK {
		b.Fatalf("%+v, %v", r.Problems, err)
	}
	b.ReportMetric(float64(r.Events)/time.Since(start).Seconds(), "verified-with-index/s")
	b.ReportMetric(0, "ns/op")
}

// restart is how long it takes from a stopped log to a durable event.
func restart(b *testing.B, cfg audit.Config, unit string) {
	b.Helper()
	start := time.Now()
	log, err := audit.Open(b.Context(), cfg)
	if err != nil {
		b.Fatal(err)
	}
	if _, err := log.Append(b.Context(), crossing(0)); err != nil {
		b.Fatal(err)
	}
	b.ReportMetric(time.Since(start).Seconds(), unit)
	if err := log.Close(b.Context()); err != nil {
		b.Fatal(err)
	}
}
