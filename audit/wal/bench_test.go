package wal

import (
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// BenchmarkAppend writes records of 600 bytes, each writer waiting for each of
// its records. Its p50 at one writer is to be compared to BenchmarkBare's.
func BenchmarkAppend(b *testing.B) {
	for _, writers := range []int{1, 64} {
		b.Run(map[int]string{1: "1", 64: "64"}[writers], func(b *testing.B) {
			l, _, err := Open(Config{Dir: b.TempDir()})
			if err != nil {
				b.Fatal(err)
			}
			var left atomic.Int64
			left.Store(int64(b.N))
			var mu sync.Mutex
			var took []time.Duration
			b.ResetTimer()
			var wg sync.WaitGroup
			for range writers {
				wg.Go(func() {
					var mine []time.Duration
					for left.Add(-1) >= 0 {
						begin := time.Now()
						t, err := l.Append(func(seq uint64, buf []byte) ([]byte, error) {
							return append(buf, filler[:]...), nil
						})
						if err == nil {
							err = t.Wait(b.Context())
						}
						if err != nil {
							b.Error(err)
							return
						}
						mine = append(mine, time.Since(begin))
						if t.Seq()%50_000 == 49_999 {
							if err := l.Trim(t.Seq()); err != nil {
								b.Error(err)
							}
						}
					}
					mu.Lock()
					took = append(took, mine...)
					mu.Unlock()
				})
			}
			wg.Wait()
			b.StopTimer()
			report(b, took)
			if err := l.Close(); err != nil {
				b.Fatal(err)
			}
		})
	}
}

var filler [600]byte

// BenchmarkBare is what a record costs without a log: the same bytes, written
// and synced in a file that has all its room.
func BenchmarkBare(b *testing.B) {
	f, err := os.Create(filepath.Join(b.TempDir(), "bare"))
	if err != nil {
		b.Fatal(err)
	}
	defer f.Close()
	const size = 16 << 20
	if _, err := f.Write(make([]byte, size)); err != nil {
		b.Fatal(err)
	}
	if err := f.Sync(); err != nil {
		b.Fatal(err)
	}
	frame := make([]byte, frameSize(lengthSize+len(filler)))
	for i := range frame {
		frame[i] = 1
	}
	var took []time.Duration
	off := int64(0)
	for b.Loop() {
		begin := time.Now()
		if _, err := f.WriteAt(frame, off); err != nil {
			b.Fatal(err)
		}
		if err := unix.Fdatasync(int(f.Fd())); err != nil {
			b.Fatal(err)
		}
		took = append(took, time.Since(begin))
		off = (off + int64(len(frame))) % size
	}
	report(b, took)
}

func report(b *testing.B, took []time.Duration) {
	if len(took) == 0 {
		return
	}
	slices.Sort(took)
	b.ReportMetric(float64(took[len(took)/2].Microseconds()), "p50-µs")
	b.ReportMetric(float64(took[len(took)*99/100].Microseconds()), "p99-µs")
	b.ReportMetric(float64(len(took))/b.Elapsed().Seconds(), "records/s")
}

// BenchmarkOpen opens a log of 512 MiB.
func BenchmarkOpen(b *testing.B) {
	cfg := Config{Dir: b.TempDir()}
	l, _, err := Open(cfg)
	if err != nil {
		b.Fatal(err)
	}
	for written := 0; written < 480<<20; {
		_, err := l.Append(func(seq uint64, buf []byte) ([]byte, error) { return append(buf, filler[:]...), nil })
		if err == nil {
			written += len(filler)
			continue
		}
		_, more := l.Durable()
		select {
		case <-more:
		case <-time.After(10 * time.Millisecond):
		}
	}
	if err := l.Close(); err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		l, _, err := Open(cfg)
		if err != nil {
			b.Fatal(err)
		}
		b.StopTimer()
		if err := l.Close(); err != nil {
			b.Fatal(err)
		}
		b.StartTimer()
	}
}
