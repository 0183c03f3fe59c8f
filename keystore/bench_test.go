package keystore

import (
	"fmt"
	"path/filepath"
	"runtime"
	"testing"
)

func BenchmarkMillion(b *testing.B) {
	cfg, last := million(b)
	b.Run("Open", func(b *testing.B) {
		for b.Loop() {
			var before, after runtime.MemStats
			runtime.GC()
			runtime.ReadMemStats(&before)
			k, err := Open(b.Context(), cfg)
			if err != nil {
				b.Fatal(err)
			}
			runtime.GC()
			runtime.ReadMemStats(&after)
			b.ReportMetric(float64(after.HeapAlloc-before.HeapAlloc)/1e6, "bytes/subject")
			if _, err := k.FindSubject(b.Context(), last); err != nil {
				b.Fatal(err)
			}
			k.Close()
		}
	})
	b.Run("RotateRoot", func(b *testing.B) {
		for b.Loop() {
			k, err := Open(b.Context(), cfg)
			if err != nil {
				b.Fatal(err)
			}
			cfg.Root = "file:" + filepath.Join(b.TempDir(), "root.key")
			if err := k.RotateRoot(b.Context(), cfg.Root); err != nil {
				b.Fatal(err)
			}
			k.Close()
		}
	})
}

func BenchmarkSubjects(b *testing.B) {
	k, err := Open(b.Context(), Config{DataDir: filepath.Join(b.TempDir(), "data")})
	if err != nil {
		b.Fatal(err)
	}
	defer k.Close()
	text := make([]byte, 300)
	b.Run("SealFor", func(b *testing.B) {
		for b.Loop() {
			if _, err := k.SealFor(b.Context(), "customer:42", text, nil); err != nil {
				b.Fatal(err)
			}
		}
	})
	sealed, err := k.SealFor(b.Context(), "customer:42", text, nil)
	if err != nil {
		b.Fatal(err)
	}
	b.Run("OpenSealed", func(b *testing.B) {
		for b.Loop() {
			if _, err := k.OpenSealed(b.Context(), sealed, nil); err != nil {
				b.Fatal(err)
			}
		}
	})
	n := 0
	b.Run("NewSubject", func(b *testing.B) {
		for b.Loop() {
			n++
			if _, err := k.Subject(b.Context(), fmt.Sprint("new:", n)); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("Erase", func(b *testing.B) {
		for b.Loop() {
			b.StopTimer()
			if _, err := k.Subject(b.Context(), "erased"); err != nil {
				b.Fatal(err)
			}
			b.StartTimer()
			if _, err := k.Erase(b.Context(), "erased"); err != nil {
				b.Fatal(err)
			}
		}
	})
}

// million makes the keys of a million subjects at once, as Subject would.
func million(b *testing.B) (Config, string) {
	b.Helper()
	cfg := Config{DataDir: filepath.Join(b.TempDir(), "data")}
	k, err := Open(b.Context(), cfg)
	if err != nil {
		b.Fatal(err)
	}
	defer k.Close()
	real := k.slots.file
	k.slots.file = unsynced{real}
	for i := range 1_000_000 {
		if _, err := k.Subject(b.Context(), fmt.Sprint("customer:", i)); err != nil {
			b.Fatal(err)
		}
	}
	if err := real.Sync(); err != nil {
		b.Fatal(err)
	}
	return cfg, "customer:999999"
}

// unsynced makes the benchmark's preparation short.
type unsynced struct{ storage }

func (unsynced) Sync() error { return nil }
