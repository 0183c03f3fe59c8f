package wal

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"runtime"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"airlock.dev/airlock"
)

// simDisk is a disk in memory that forgets at a power cut what was not synced,
// in part and in any order, and whose calls fail when a test says so. A sync
// that fails makes nothing durable, and neither does the next one that works:
// that is how Linux does it.
type simDisk struct {
	mu      sync.Mutex
	entries map[string]*simFile // as the system sees them
	synced  map[string]*simFile // as they are on the disk
	changes []func(map[string]*simFile)
	calls   int
	fail    func(call int, op string) error // nil: nothing fails
}

type simFile struct {
	disk    *simDisk
	data    []byte
	durable []byte
	dirty   map[int64]bool // sectors
}

func newSimDisk() *simDisk {
	return &simDisk{entries: map[string]*simFile{}, synced: map[string]*simFile{}}
}

// call counts a call, with mu held.
func (d *simDisk) call(op string) error {
	d.calls++
	if d.fail == nil {
		return nil
	}
	return d.fail(d.calls, op)
}

func (d *simDisk) names() ([]string, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	var names []string
	for name := range d.entries {
		names = append(names, name)
	}
	return names, d.call("names")
}

func (d *simDisk) open(name string) (file, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.call("open"); err != nil {
		return nil, err
	}
	f := d.entries[name]
	if f == nil {
		return nil, os.ErrNotExist
	}
	return f, nil
}

func (d *simDisk) create(name string) (file, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.call("create"); err != nil {
		return nil, err
	}
	f := &simFile{disk: d, dirty: map[int64]bool{}}
	d.change(func(m map[string]*simFile) { m[name] = f })
	return f, nil
}

func (d *simDisk) change(c func(map[string]*simFile)) {
	c(d.entries)
	d.changes = append(d.changes, c)
}

func (d *simDisk) rename(from, to string) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.call("rename"); err != nil {
		return err
	}
	f := d.entries[from]
	if f == nil {
		return os.ErrNotExist
	}
	d.change(func(m map[string]*simFile) { m[to] = f; delete(m, from) })
	return nil
}

func (d *simDisk) remove(name string) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.call("remove"); err != nil {
		return err
	}
	if d.entries[name] == nil {
		return os.ErrNotExist
	}
	d.change(func(m map[string]*simFile) { delete(m, name) })
	return nil
}

func (d *simDisk) sync() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.call("syncdir"); err != nil {
		return err
	}
	for _, c := range d.changes {
		c(d.synced)
	}
	d.changes = nil
	return nil
}

// powerCut returns what is on the disk after one.
func (d *simDisk) powerCut(rng *rand.Rand) *simDisk {
	d.mu.Lock()
	defer d.mu.Unlock()
	names := map[string]*simFile{}
	for name, f := range d.synced {
		names[name] = f
	}
	for _, c := range d.changes {
		if rng.IntN(2) == 0 {
			c(names)
		}
	}
	after := newSimDisk()
	for name, f := range names {
		n := slices.Clone(f.durable)
		if rng.IntN(2) == 0 && len(f.data) > len(n) {
			n = append(n, make([]byte, len(f.data)-len(n))...)
		}
		for s := range f.dirty {
			if end := min((s+1)*sector, int64(len(n))); rng.IntN(2) == 0 && s*sector < end {
				copy(n[s*sector:end], f.data[s*sector:])
			}
		}
		copied := &simFile{disk: after, data: n, durable: slices.Clone(n), dirty: map[int64]bool{}}
		after.entries[name], after.synced[name] = copied, copied
	}
	return after
}

func (f *simFile) ReadAt(b []byte, off int64) (int, error) {
	f.disk.mu.Lock()
	defer f.disk.mu.Unlock()
	if err := f.disk.call("read"); err != nil {
		return 0, err
	}
	if off >= int64(len(f.data)) {
		return 0, io.EOF
	}
	n := copy(b, f.data[off:])
	if n < len(b) {
		return n, io.EOF
	}
	return n, nil
}

// WriteAt that fails has written the first half, in whole sectors.
func (f *simFile) WriteAt(b []byte, off int64) (int, error) {
	f.disk.mu.Lock()
	defer f.disk.mu.Unlock()
	err := f.disk.call("write")
	if err != nil {
		b = b[:len(b)/2&^(sector-1)]
	}
	if end := off + int64(len(b)); end > int64(len(f.data)) {
		f.data = append(f.data, make([]byte, end-int64(len(f.data)))...)
	}
	copy(f.data[off:], b)
	for s := off / sector; s*sector < off+int64(len(b)); s++ {
		f.dirty[s] = true
	}
	return len(b), err
}

func (f *simFile) Close() error { return nil }

func (f *simFile) size() (int64, error) {
	f.disk.mu.Lock()
	defer f.disk.mu.Unlock()
	return int64(len(f.data)), f.disk.call("size")
}

func (f *simFile) allocate(size int64) error {
	f.disk.mu.Lock()
	defer f.disk.mu.Unlock()
	if err := f.disk.call("allocate"); err != nil {
		return err
	}
	f.data = append(f.data, make([]byte, size-int64(len(f.data)))...)
	return nil
}

func (f *simFile) datasync() error {
	f.disk.mu.Lock()
	defer f.disk.mu.Unlock()
	err := f.disk.call("datasync")
	if err == nil {
		if n := len(f.data); n > len(f.durable) {
			f.durable = append(f.durable, make([]byte, n-len(f.durable))...)
		}
		for s := range f.dirty {
			copy(f.durable[s*sector:], f.data[s*sector:min((s+1)*sector, int64(len(f.data)))])
		}
	}
	clear(f.dirty)
	return err
}

type noLock struct{}

func (noLock) Close() error { return nil }

// small is a log of segments with two or three frames each.
func small(first uint64) Config {
	return Config{Dir: "sim", SegmentBytes: 4 << 10, MaxBytes: 64 << 10, MaxRecord: 1200, First: first}
}

func openSim(d *simDisk, cfg Config) (*Log, Recovery, error) {
	if err := cfg.check(); err != nil {
		return nil, Recovery{}, err
	}
	return open(cfg, d, noLock{}, time.Microsecond)
}

// record is what the tests write under a number: from it alone it can be told
// whether it came back as it was.
func record(seq uint64) []byte {
	rng := rand.New(rand.NewPCG(seq, 1))
	b := fmt.Appendf(nil, "record %d ", seq)
	for range rng.IntN(1000) {
		b = append(b, byte(rng.Uint32()))
	}
	return b
}

func appendRecord(l *Log) (Ticket, error) {
	return l.Append(func(seq uint64, buf []byte) ([]byte, error) { return append(buf, record(seq)...), nil })
}

// readAll reads in small parts, and fails unless the records of the numbers
// first to next are all there, as they were written.
func readAll(t *testing.T, l *Log, first, next uint64) {
	t.Helper()
	for n := first; n < next; {
		records, err := l.Read(n, 3)
		if err != nil {
			t.Fatalf("read from %d: %v", n, err)
		}
		if len(records) == 0 {
			t.Fatalf("record %d of %d..%d is not there", n, first, next)
		}
		for _, got := range records {
			if want := record(n); string(got) != string(want) {
				t.Fatalf("record %d is %.40q, not %.40q", n, got, want)
			}
			n++
		}
	}
	if records, err := l.Read(next, 1); len(records) != 0 || err != nil {
		t.Fatalf("Read(%d) behind the last = %d records, %v", next, len(records), err)
	}
}

// job appends a few dozen records, waits for some of them, trims, closes, and
// returns the number of the first one that was never acknowledged, and from
// where on the log was not trimmed. It goes on as long as records are taken.
func job(l *Log, from uint64) (acked, kept, given uint64) {
	acked, kept, given = from, from, from
	for round := range 20 {
		var last *Ticket
		for range 1 + round%3 {
			t, err := appendRecord(l)
			if err != nil {
				break
			}
			last, given = &t, t.Seq()+1
		}
		if last != nil && last.Wait(context.Background()) == nil {
			acked = last.Seq() + 1
		}
		if round%10 == 5 {
			kept = max(from, acked-min(acked, 3))
			l.Trim(kept)
		}
	}
	if l.Close() == nil {
		acked = given
	}
	return acked, kept, given
}

// TestPowerCut lets the power fail at every single call to the disk, with six
// ways in which what was not synced may have been written or not. Nothing that
// was acknowledged is lost; then the log goes on. It does so for a new log and
// for one that was closed before.
func TestPowerCut(t *testing.T) {
	t.Run("new", func(t *testing.T) { cutEverywhere(t, newSimDisk, 5) })
	t.Run("closed before", func(t *testing.T) {
		cutEverywhere(t, func() *simDisk {
			d := newSimDisk()
			l, _, err := openSim(d, small(5))
			if err != nil {
				t.Fatal(err)
			}
			for range 10 {
				mustAppend(t, l, "before")
			}
			waitDurable(t, l, 15)
			waitAhead(l)
			if err := l.Close(); err != nil {
				t.Fatal(err)
			}
			d.calls = 0
			return d
		}, 15)
	})
}

func cutEverywhere(t *testing.T, disk func() *simDisk, next uint64) {
	errDead := errors.New("no power")
	for n := 1; ; n++ {
		d := disk()
		d.fail = func(call int, _ string) error {
			if call >= n {
				return errDead
			}
			return nil
		}
		acked, kept, given := next, next, next
		l, _, err := openSim(d, small(5))
		if err == nil {
			acked, kept, given = job(l, next)
		}
		for seed := range uint64(6) {
			after := d.powerCut(rand.New(rand.NewPCG(seed, uint64(n))))
			checkAfter(t, fmt.Sprintf("power cut at call %d, way %d", n, seed), after, acked, kept, given)
		}
		if d.calls < n {
			if n < 100 {
				t.Fatalf("the whole job is %d calls: too short to say much", n)
			}
			return
		}
	}
}

// checkAfter opens what a log left behind, compares it to what was
// acknowledged, and uses it.
func checkAfter(t *testing.T, what string, d *simDisk, acked, kept, given uint64) {
	t.Helper()
	l, rec, err := openSim(d, small(5))
	if err != nil {
		t.Fatalf("%s: %v", what, err)
	}
	if rec.Next < acked || rec.Next > given || rec.First > kept {
		t.Fatalf("%s: found records %d to before %d; %d to before %d were acknowledged, %d given", what, rec.First, rec.Next, kept, acked, given)
	}
	readAll(t, l, rec.First, rec.Next)
	if _, _, given := job(l, rec.Next); given == rec.Next {
		t.Fatalf("%s: the log took no records after it was opened again", what)
	}
	_, again, err := openSim(d, small(5))
	if err != nil || !again.Clean || again.Torn != nil || again.Next <= rec.Next {
		t.Fatalf("%s: after going on and a clean stop: %+v, %v", what, again, err)
	}
}

// TestKillThenPowerCut kills the process at every call, so that the system has
// still all it was given, opens the log, and cuts the power: what was said to
// be there after the kill is there after the cut.
func TestKillThenPowerCut(t *testing.T) {
	errDead := errors.New("killed")
	for n := 1; ; n++ {
		d := newSimDisk()
		d.fail = func(call int, _ string) error {
			if call >= n {
				return errDead
			}
			return nil
		}
		if l, _, err := openSim(d, small(5)); err == nil {
			job(l, 5)
		}
		done := d.calls < n
		d.fail = nil
		l, rec, err := openSim(d, small(5))
		if err != nil {
			t.Fatalf("killed at call %d: %v", n, err)
		}
		after := d.powerCut(rand.New(rand.NewPCG(1, uint64(n))))
		checkAfter(t, fmt.Sprintf("killed at call %d, then a power cut", n), after, rec.Next, max(rec.First, 5), rec.Next)
		l.Close()
		if done {
			return
		}
	}
}

// TestFailures lets one call after the other fail, once and several times in
// a row. What was taken in is written in the end, and the log goes on.
func TestFailures(t *testing.T) {
	for _, times := range []int{1, 3} {
		for _, errno := range []error{syscall.EIO, syscall.ENOSPC} {
			for n := 1; ; n++ {
				d := newSimDisk()
				l, _, err := openSim(d, small(5))
				if err != nil {
					t.Fatal(err)
				}
				d.mu.Lock()
				begin := d.calls
				d.fail = func(call int, op string) error {
					if call >= begin+n && call < begin+n+times && op != "read" && op != "open" {
						return errno
					}
					return nil
				}
				d.mu.Unlock()
				what := fmt.Sprintf("%v at call %d, %d times", errno, n, times)
				next := uint64(5)
				for range 25 {
					next = mustAppend(t, l, what).Seq() + 1
				}
				waitDurable(t, l, next)
				readAll(t, l, 5, next)
				d.mu.Lock()
				past := d.calls > begin+n+times
				d.mu.Unlock()
				after := d.powerCut(rand.New(rand.NewPCG(uint64(n), 7)))
				checkAfter(t, what+", then a power cut", after, next, 5, next)
				if err := l.Close(); err != nil && past {
					t.Fatalf("%s: close: %v", what, err)
				}
				if !past {
					if n < 30 {
						t.Fatalf("the whole job is %d calls: too short to say much", n)
					}
					break
				}
			}
		}
	}
}

// mustAppend tries until the log takes a record.
func mustAppend(t *testing.T, l *Log, what string) Ticket {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); ; runtime.Gosched() {
		ticket, err := appendRecord(l)
		if err == nil {
			return ticket
		}
		if c := airlock.CodeOf(err); c != airlock.NoSpace && c != airlock.Unavailable && c != airlock.Exhausted || time.Now().After(end) {
			t.Fatalf("%s: append: %v", what, err)
		}
	}
}

func waitDurable(t *testing.T, l *Log, next uint64) {
	t.Helper()
	for {
		durable, more := l.Durable()
		if durable >= next {
			return
		}
		select {
		case <-more:
		case <-time.After(20 * time.Second):
			t.Fatalf("durable are the records before %d, not before %d", durable, next)
		}
	}
}

// TestFailedWrite says what callers see while the disk fails, and after.
func TestFailedWrite(t *testing.T) {
	for _, tc := range []struct {
		op    string
		errno error
		code  airlock.Code
	}{
		{"write", syscall.EIO, airlock.Unavailable},
		{"datasync", syscall.EIO, airlock.Unavailable},
		{"write", syscall.ENOSPC, airlock.NoSpace},
		{"datasync", syscall.EDQUOT, airlock.NoSpace},
	} {
		t.Run(tc.op+" "+tc.errno.Error(), func(t *testing.T) {
			d := newSimDisk()
			l, _, err := openSim(d, small(0))
			if err != nil {
				t.Fatal(err)
			}
			failing := func(_ int, op string) error {
				if op == tc.op {
					return tc.errno
				}
				return nil
			}
			d.mu.Lock()
			d.fail = failing
			d.mu.Unlock()
			ticket, err := appendRecord(l)
			if err != nil {
				t.Fatal(err)
			}
			if err := ticket.Wait(t.Context()); airlock.CodeOf(err) != tc.code || !errors.Is(err, tc.errno) {
				t.Fatalf("Wait while the disk fails: %v", err)
			}
			if _, err := appendRecord(l); airlock.CodeOf(err) != tc.code {
				t.Fatalf("Append while the disk fails: %v", err)
			}
			if err := l.Err(); airlock.CodeOf(err) != tc.code {
				t.Fatalf("Err while the disk fails: %v", err)
			}
			if records, _ := l.Pending(); records != 1 {
				t.Fatalf("%d records are pending, not 1", records)
			}
			if records, err := l.Read(0, 1); len(records) > 0 || err != nil {
				t.Fatalf("Read gives %d records that are not durable, %v", len(records), err)
			}
			d.mu.Lock()
			d.fail = nil
			d.mu.Unlock()
			waitDurable(t, l, 1)
			if err := ticket.Wait(t.Context()); err != nil {
				t.Fatalf("Wait after the disk works again: %v", err)
			}
			if err := l.Err(); err != nil {
				t.Fatalf("Err after the disk works again: %v", err)
			}
			if got := mustAppend(t, l, "after").Seq(); got != 1 {
				t.Fatalf("the next record has number %d, not 1", got)
			}
			waitDurable(t, l, 2)
			readAll(t, l, 0, 2)
			if err := l.Close(); err != nil {
				t.Fatal(err)
			}
		})
	}
}

// TestCloseWhileFailing: Close gives up, and says what is lost.
func TestCloseWhileFailing(t *testing.T) {
	d := newSimDisk()
	l, _, err := openSim(d, small(0))
	if err != nil {
		t.Fatal(err)
	}
	d.mu.Lock()
	d.fail = func(_ int, op string) error {
		if op == "datasync" {
			return syscall.EIO
		}
		return nil
	}
	d.mu.Unlock()
	ticket, err := appendRecord(l)
	if err != nil {
		t.Fatal(err)
	}
	if err := l.Close(); airlock.CodeOf(err) != airlock.Unavailable || !errors.Is(err, syscall.EIO) {
		t.Fatalf("Close = %v", err)
	}
	if err := ticket.Wait(t.Context()); airlock.CodeOf(err) != airlock.Unavailable {
		t.Fatalf("Wait = %v", err)
	}
	d.fail = nil
	_, rec, err := openSim(d, small(0))
	if err != nil || rec.Clean {
		t.Fatalf("after a stop that was not clean: %+v, %v", rec, err)
	}
}

// TestNoRoomAhead: while no new segment can be made, what fits in the segment
// at hand is taken and the rest refused; when there is space again it goes on.
func TestNoRoomAhead(t *testing.T) {
	d := newSimDisk()
	d.fail = func(_ int, op string) error {
		if op == "allocate" && len(d.entries) > 1 { // prepare.tmp, and the first segment
			return syscall.ENOSPC
		}
		return nil
	}
	l, _, err := openSim(d, small(0))
	if err != nil {
		t.Fatal(err)
	}
	var next uint64
	for end := time.Now().Add(20 * time.Second); ; {
		ticket, err := appendRecord(l)
		if airlock.CodeOf(err) == airlock.NoSpace {
			break
		}
		if err != nil || time.Now().After(end) {
			t.Fatal(err)
		}
		next = ticket.Seq() + 1
		if err := ticket.Wait(t.Context()); airlock.CodeOf(err) == airlock.NoSpace {
			break // it was taken before the first attempt to make a segment had failed
		} else if err != nil {
			t.Fatal(err)
		}
	}
	if next < 2 {
		t.Fatalf("only %d records were taken", next)
	}
	d.mu.Lock()
	d.fail = nil
	d.mu.Unlock()
	for range 10 {
		if got := mustAppend(t, l, "with space").Seq(); got != next {
			t.Fatalf("record has number %d, not %d", got, next)
		}
		next++
	}
	waitDurable(t, l, next)
	readAll(t, l, 0, next)
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
}
