package wal

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"airlock.dev/airlock"
)

func mustOpen(t *testing.T, cfg Config) (*Log, Recovery) {
	t.Helper()
	l, rec, err := Open(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l, rec
}

func TestReopen(t *testing.T) {
	cfg := Config{Dir: filepath.Join(t.TempDir(), "a", "b"), SegmentBytes: 8 << 10, MaxRecord: 2000, First: 41}
	l, rec := mustOpen(t, cfg)
	if want := (Recovery{First: 41, Next: 41, Clean: true}); rec != want {
		t.Fatalf("new log: %+v, not %+v", rec, want)
	}
	next := uint64(41)
	for round := range 4 {
		for range 5 {
			ticket, err := appendRecord(l)
			if err != nil {
				t.Fatal(err)
			}
			if ticket.Seq() != next {
				t.Fatalf("number %d, not %d", ticket.Seq(), next)
			}
			next++
			if round%2 == 0 {
				if err := ticket.Wait(t.Context()); err != nil {
					t.Fatal(err)
				}
			}
		}
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
		if _, err := appendRecord(l); airlock.CodeOf(err) != airlock.Unavailable {
			t.Fatalf("append to a closed log: %v", err)
		}
		if _, err := l.Read(41, 1); airlock.CodeOf(err) != airlock.Unavailable {
			t.Fatalf("read from a closed log: %v", err)
		}
		cfg.SegmentBytes *= 2 // the files that are there keep their size
		l, rec = mustOpen(t, cfg)
		if want := (Recovery{First: 41, Next: next, Clean: true}); rec != want {
			t.Fatalf("round %d: %+v, not %+v", round, rec, want)
		}
		readAll(t, l, 41, next)
	}
}

func TestConfig(t *testing.T) {
	for _, tc := range []struct {
		name  string
		cfg   Config
		field string
	}{
		{"no directory", Config{}, "Dir"},
		{"odd segment", Config{Dir: "d", SegmentBytes: 5000}, "SegmentBytes"},
		{"huge segment", Config{Dir: "d", SegmentBytes: 2 << 30}, "SegmentBytes"},
		{"one segment", Config{Dir: "d", MaxBytes: 17 << 20}, "MaxBytes"},
		{"huge record", Config{Dir: "d", MaxRecord: 1 << 20}, "MaxRecord"},
		{"record larger than a segment", Config{Dir: "d", SegmentBytes: 4 << 10, MaxBytes: 8 << 10, MaxRecord: 3600}, "MaxRecord"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			_, _, err := Open(tc.cfg)
			var e *airlock.Error
			if !errors.As(err, &e) || e.Code != airlock.Invalid || e.Field != tc.field {
				t.Fatalf("error %v, not of %s", err, tc.field)
			}
		})
	}
}

func TestSecondWriter(t *testing.T) {
	cfg := Config{Dir: t.TempDir(), SegmentBytes: 64 << 10}
	l, _ := mustOpen(t, cfg)
	if _, _, err := Open(cfg); airlock.CodeOf(err) != airlock.Conflict {
		t.Fatalf("second Open: %v", err)
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	mustOpen(t, cfg)
}

// TestNoNumber: a record that is not taken uses no number.
func TestNoNumber(t *testing.T) {
	l, _ := mustOpen(t, Config{Dir: t.TempDir(), SegmentBytes: 64 << 10, MaxRecord: 100})
	errNo := errors.New("no")
	if _, err := l.Append(func(uint64, []byte) ([]byte, error) { return nil, errNo }); !errors.Is(err, errNo) {
		t.Fatalf("encode's error: %v", err)
	}
	long := func(_ uint64, buf []byte) ([]byte, error) { return append(buf, make([]byte, 101)...), nil }
	if _, err := l.Append(long); airlock.CodeOf(err) != airlock.TooLarge {
		t.Fatalf("long record: %v", err)
	}
	func() {
		defer func() { recover() }()
		l.Append(func(uint64, []byte) ([]byte, error) { panic("encode") })
	}()
	for want, b := range [][]byte{{}, make([]byte, 100), []byte("x")} {
		ticket, err := l.Append(func(_ uint64, buf []byte) ([]byte, error) { return append(buf, b...), nil })
		if err != nil || ticket.Seq() != uint64(want) {
			t.Fatalf("record of %d bytes: number %d, %v", len(b), ticket.Seq(), err)
		}
	}
	waitDurable(t, l, 3)
	records, err := l.Read(0, 10)
	for len(records) < 3 && err == nil {
		var more [][]byte
		more, err = l.Read(uint64(len(records)), 10)
		records = append(records, more...)
	}
	if err != nil || len(records[0]) != 0 || !bytes.Equal(records[1], make([]byte, 100)) || string(records[2]) != "x" {
		t.Fatalf("read %q, %v", records, err)
	}
}

func TestWaitEnds(t *testing.T) {
	d := newSimDisk()
	l, _, err := openSim(d, small(0))
	if err != nil {
		t.Fatal(err)
	}
	hold, held := make(chan struct{}), make(chan struct{}, 100)
	d.mu.Lock()
	d.fail = func(_ int, op string) error {
		held <- struct{}{}
		<-hold
		return nil
	}
	d.mu.Unlock()
	ticket, err := appendRecord(l)
	if err != nil {
		t.Fatal(err)
	}
	<-held
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := ticket.Wait(ctx); !errors.Is(err, context.Canceled) {
		t.Fatalf("Wait = %v", err)
	}
	if n, bytes := l.Pending(); n != 1 || bytes != lengthSize+len(record(0)) {
		t.Fatalf("pending are %d records, %d bytes", n, bytes)
	}
	close(hold)
	if err := ticket.Wait(t.Context()); err != nil {
		t.Fatal(err)
	}
	l.Close()
}

// TestPendingBounded: a disk that does not answer makes Append refuse.
func TestPendingBounded(t *testing.T) {
	d := newSimDisk()
	cfg := Config{Dir: "sim", SegmentBytes: 16 << 20, MaxRecord: 512 << 10}
	l, _, err := openSim(d, cfg)
	if err != nil {
		t.Fatal(err)
	}
	d.mu.Lock()
	hold := make(chan struct{})
	d.fail = func(int, string) error { <-hold; return nil }
	d.mu.Unlock()
	taken := 0
	for {
		_, err := l.Append(func(_ uint64, buf []byte) ([]byte, error) { return buf[:100<<10], nil })
		if airlock.CodeOf(err) == airlock.Exhausted {
			break
		}
		if err != nil || taken > 100 {
			t.Fatalf("after %d records: %v", taken, err)
		}
		taken++
	}
	if taken < 70 {
		t.Fatalf("only %d records of 100 KiB were taken", taken)
	}
	close(hold)
	waitDurable(t, l, uint64(taken))
	if _, err := appendRecord(l); err != nil {
		t.Fatal(err)
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
}

// TestFull: a log that is full refuses until it is trimmed.
func TestFull(t *testing.T) {
	cfg := Config{Dir: t.TempDir(), SegmentBytes: 4 << 10, MaxBytes: 16 << 10, MaxRecord: 1200}
	l, _ := mustOpen(t, cfg)
	var next uint64
	for round := range 3 {
		for {
			ticket, err := appendRecord(l)
			if airlock.CodeOf(err) == airlock.Exhausted {
				break
			}
			if err != nil || next > 1000 {
				t.Fatalf("after %d records: %v", next, err)
			}
			next = ticket.Seq() + 1
			if err := ticket.Wait(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		files, err := filepath.Glob(filepath.Join(cfg.Dir, "*.wal"))
		if err != nil || len(files) != 4 {
			t.Fatalf("round %d: a full log has %d segments, %v", round, len(files), err)
		}
		if err := l.Trim(next); err != nil {
			t.Fatal(err)
		}
		if files, _ = filepath.Glob(filepath.Join(cfg.Dir, "0*.wal")); len(files) == 4 {
			t.Fatalf("round %d: nothing was trimmed", round)
		}
	}
	if _, err := l.Read(0, 1); airlock.CodeOf(err) != airlock.NotFound {
		t.Fatalf("read of a trimmed record: %v", err)
	}
	records, err := l.Read(next-1, 5)
	if err != nil || len(records) != 1 || string(records[0]) != string(record(next-1)) {
		t.Fatalf("the last record after Trim: %d records, %v", len(records), err)
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	_, rec := mustOpen(t, cfg)
	if rec.Next != next || rec.First == 0 || rec.First >= next || !rec.Clean {
		t.Fatalf("after Trim and %d records: %+v", next, rec)
	}
}

// TestConcurrent: many writers, a reader that follows and trims.
func TestConcurrent(t *testing.T) {
	const writers, each = 16, 60
	l, _ := mustOpen(t, Config{Dir: t.TempDir(), SegmentBytes: 64 << 10, MaxBytes: 1 << 20})
	var wg sync.WaitGroup
	errs := make(chan error, writers+1)
	for range writers {
		wg.Go(func() {
			for i := range each {
				ticket := mustAppend(t, l, "concurrent")
				if i%3 != 0 {
					continue
				}
				if err := ticket.Wait(t.Context()); err != nil {
					errs <- err
					return
				}
				if durable, _ := l.Durable(); durable <= ticket.Seq() {
					errs <- fmt.Errorf("record %d was acknowledged and durable are those before %d", ticket.Seq(), durable)
				}
			}
		})
	}
	wg.Go(func() {
		for n := uint64(0); n < writers*each; {
			durable, more := l.Durable()
			if durable == n {
				<-more
				continue
			}
			records, err := l.Read(n, 100)
			if err != nil {
				errs <- err
				return
			}
			for _, r := range records {
				if string(r) != string(record(n)) {
					errs <- fmt.Errorf("record %d is not as it was written", n)
					return
				}
				n++
			}
			if err := l.Trim(n); err != nil {
				errs <- err
				return
			}
		}
	})
	wg.Wait()
	close(errs)
	for err := range errs {
		t.Error(err)
	}
}

func TestNewerFormat(t *testing.T) {
	cfg := Config{Dir: t.TempDir(), SegmentBytes: 4 << 10, MaxRecord: 100}
	l, _ := mustOpen(t, cfg)
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	b := segmentHeader(1, 4<<10)
	binary.BigEndian.PutUint32(b[8:], 2)
	binary.BigEndian.PutUint32(b[sector-4:], checksum(b[:sector-4]))
	if err := os.WriteFile(filepath.Join(cfg.Dir, "0000000000000001.wal"), append(b, make([]byte, 4<<10-sector)...), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, _, err := Open(cfg); airlock.CodeOf(err) != airlock.Conflict {
		t.Fatalf("Open of a newer format: %v", err)
	}
}
