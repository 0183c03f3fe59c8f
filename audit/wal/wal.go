// Package wal is a write-ahead log: records that are durable soon after they
// were handed in, numbered without gaps, until whoever reads them has put them
// elsewhere and trims the log.
//
// Records that come while the disk is busy are written together, as one frame,
// with one sync. The next frame is written after the sync of the one before has
// returned, and has its hash. So Open can tell a frame that a power cut left
// incomplete, which nobody counted on, from damage. Whoever can write the files
// can make a log that fits; to notice that is the work of others.
//
// The package knows nothing of what records mean. Start reading at the format
// in frame.go; open.go is recovery; Append and run are the two ends of the way
// of a record.
package wal

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"
	"syscall"
	"time"

	"airlock.dev/airlock"
)

const (
	// pendingMost bounds the bytes of records that are not yet durable.
	pendingMost = 8 << 20
	// After a failure it is tried again, at first soon.
	backoffLeast = 20 * time.Millisecond
	backoffMost  = 2 * time.Second
)

// Config says where a log is and how large it may be. Zero means the default.
type Config struct {
	Dir          string // made if it is not there; for one Log at a time
	SegmentBytes int64  // size of a file; from 4 KiB to 1 GiB, a multiple of 512; default 16 MiB
	MaxBytes     int64  // of all files; at least two segments; default 512 MiB
	MaxRecord    int    // bytes; must fit in a segment, at most 512 KiB; default 32 KiB
	First        uint64 // number of the first record if there is no log in Dir
}

func (c *Config) check() error {
	if c.SegmentBytes == 0 {
		c.SegmentBytes = 16 << 20
	}
	if c.MaxBytes == 0 {
		c.MaxBytes = max(512<<20, 2*c.SegmentBytes)
	}
	if c.MaxRecord == 0 {
		c.MaxRecord = 32 << 10
	}
	switch {
	case c.Dir == "":
		return airlock.Invalidf("Dir", "name a directory", "the write-ahead log has no directory")
	case c.SegmentBytes < 4<<10 || c.SegmentBytes > 1<<30 || c.SegmentBytes%sector != 0:
		return airlock.Invalidf("SegmentBytes", "use a multiple of 512 from 4 KiB to 1 GiB", "a segment of %d bytes is not possible", c.SegmentBytes)
	case c.MaxBytes < 2*c.SegmentBytes:
		return airlock.Invalidf("MaxBytes", "use at least twice SegmentBytes", "a write-ahead log of %d bytes has no room for two segments", c.MaxBytes)
	case c.MaxRecord < 1 || c.MaxRecord > 512<<10 || frameSize(lengthSize+c.MaxRecord) > c.SegmentBytes-sector:
		return airlock.Invalidf("MaxRecord", "use from 1 byte to 512 KiB, and less than a segment", "records of %d bytes are not possible", c.MaxRecord)
	}
	return nil
}

// Log is an open log. Its methods may be called concurrently.
type Log struct {
	cfg     Config
	disk    disk
	lock    io.Closer
	backoff time.Duration // the first one after a failure

	mu      sync.Mutex
	next    uint64 // number of the next record
	durable uint64 // number of the first record that is not durable
	pending []*batch
	bytes   int      // of records in pending, with their lengths
	scratch []byte   // for one record
	free    [][]byte // buffers of batches that are done; at most two
	closing bool
	more    chan struct{} // closed when more is durable; nil if nobody asked

	// Segments: in trimmable order those with durable frames, then the one
	// being written (the last of them, or not yet one of them, or nil after a
	// failure), then those made ahead.
	segments []*segment
	active   *segment
	ready    []*segment
	top      uint64 // ordinal of the segment being written, or written last
	resets   int    // how often what was made ahead was given up

	failed     error // of the last write, if it failed
	unprepared error // of the last attempt to make a segment, if it failed

	tail chain // of what is durable; only the writer uses it

	writer, preparer         sync.WaitGroup
	wakeWriter, wakePreparer chan struct{} // hold a token
	closed                   chan struct{} // Close was called: no more waiting for better times
	stop                     chan struct{} // for the preparer
	close                    sync.Once
	closeErr                 error

	// Of Read and Trim; locked before mu.
	readMu sync.Mutex
	read   reader
}

// batch is the records of one frame, written or to be written.
type batch struct {
	ordinal uint64 // where it is written; changes when a write fails
	offset  int64
	size    int64 // of the frame
	first   uint64
	count   uint32
	buf     []byte // room for the header, records with their lengths; once whole the frame
	bytes   int    // of the records, with their lengths
	taken   bool   // no more records: it is being written, or was told to have failed
	whole   bool
	head    header // once whole

	done chan struct{} // closed when durable, or at the first failure
	err  error         // set before done is closed
}

// Open opens the log in cfg.Dir and makes it if there is none. It reads and
// checks all of it. Errors: Conflict if another process has it open, Invalid
// for a bad cfg, a *Damage if the log is not as it was written; nothing is
// changed then.
func Open(cfg Config) (*Log, Recovery, error) {
	if err := cfg.check(); err != nil {
		return nil, Recovery{}, err
	}
	lock, err := lockDir(cfg.Dir)
	if err != nil {
		return nil, Recovery{}, err
	}
	return open(cfg, osDisk(cfg.Dir), lock, backoffLeast)
}

// open owns lock from now on.
func open(cfg Config, d disk, lock io.Closer, backoff time.Duration) (_ *Log, _ Recovery, err error) {
	defer func() {
		if err != nil {
			lock.Close()
		}
	}()
	found, err := find(d)
	if err != nil {
		return nil, Recovery{}, located(cfg.Dir, err)
	}
	defer func() {
		if err != nil {
			found.close()
		}
	}()
	if err := found.repair(d, cfg); err != nil {
		return nil, Recovery{}, unusable(cfg.Dir, err)
	}
	l := &Log{
		cfg: cfg, disk: d, lock: lock, backoff: backoff,
		scratch:    make([]byte, 0, cfg.MaxRecord),
		segments:   found.segments,
		ready:      found.spare,
		tail:       found.tail,
		wakeWriter: make(chan struct{}, 1), wakePreparer: make(chan struct{}, 1),
		closed: make(chan struct{}), stop: make(chan struct{}),
	}
	rec := Recovery{First: cfg.First, Next: cfg.First, Clean: found.clean}
	if found.torn != nil {
		located(cfg.Dir, found.torn)
		rec.Torn = found.torn
	}
	if n := len(l.segments); n > 0 {
		l.active = l.segments[n-1]
		rec.First, rec.Next = l.segments[0].first, l.tail.next
	} else if len(l.ready) > 0 {
		l.active, l.ready = l.ready[0], l.ready[1:]
	} else {
		if l.active, err = l.make(1); err != nil {
			return nil, Recovery{}, unusable(cfg.Dir, err)
		}
	}
	l.top = l.active.ordinal
	l.next, l.durable = rec.Next, rec.Next
	l.writer.Go(l.run)
	l.preparer.Go(l.prepare)
	return l, rec, nil
}

// unusable says why the log in dir takes no records.
func unusable(dir string, err error) *airlock.Error {
	e := airlock.Errorf(airlock.Unavailable, "the write-ahead log in %s cannot be written", dir).Because(err)
	e.Hint = "look at its disk and at the system's log; it is tried again and again"
	if errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) {
		e.Code = airlock.NoSpace
		e.Message = fmt.Sprintf("there is no space for the write-ahead log in %s", dir)
		e.Hint = "make room on its file system, or let its owner have more; it goes on by itself then"
	}
	return e
}

// Ticket stands for one record that was handed in.
type Ticket struct {
	log *Log
	in  *batch
	seq uint64
}

// Seq returns the record's number.
func (t Ticket) Seq() uint64 { return t.seq }

// Wait returns nil once the record is durable. If the log cannot be written it
// returns an error with the code NoSpace or Unavailable; the record is kept and
// written later if the process lives that long. It returns early when ctx ends.
func (t Ticket) Wait(ctx context.Context) error {
	select {
	case <-t.in.done:
	case <-ctx.Done():
		return ctx.Err()
	}
	if t.in.err == nil {
		return nil
	}
	t.log.mu.Lock()
	defer t.log.mu.Unlock()
	if t.seq < t.log.durable {
		return nil
	}
	return t.in.err
}

// Append numbers a record and hands it to the writer; it never waits for the
// disk. encode is called with the number, before any other record gets one, and
// appends the record to buf, which it must not keep. Without an error the
// record is written, whether somebody waits for it or not.
//
// Errors, with which no number is used: encode's own; TooLarge for a record
// over MaxRecord; Exhausted while too much waits for the disk, or when the
// files have MaxBytes and must be trimmed; NoSpace and Unavailable if the log
// cannot be written now, or is closed.
func (l *Log) Append(encode func(seq uint64, buf []byte) ([]byte, error)) (Ticket, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.closing:
		return Ticket{}, airlock.Errorf(airlock.Unavailable, "the write-ahead log in %s is closed", l.cfg.Dir)
	case l.failed != nil:
		return Ticket{}, unusable(l.cfg.Dir, l.failed)
	case l.bytes+lengthSize+l.cfg.MaxRecord > pendingMost:
		return Ticket{}, &airlock.Error{
			Code:       airlock.Exhausted,
			Message:    fmt.Sprintf("%d records wait for the disk of %s", l.next-l.durable, l.cfg.Dir),
			Hint:       "try again; if it stays, the disk is too slow",
			RetryAfter: 1,
		}
	}
	record, err := encode(l.next, l.scratch[:0])
	if err != nil {
		return Ticket{}, err
	}
	if len(record) > l.cfg.MaxRecord {
		return Ticket{}, &airlock.Error{
			Code:    airlock.TooLarge,
			Message: fmt.Sprintf("the record has %d bytes and the most is %d", len(record), l.cfg.MaxRecord),
			Hint:    "record less of it",
		}
	}
	b, err := l.place(lengthSize + len(record))
	if err != nil {
		return Ticket{}, err
	}
	b.buf = binary.BigEndian.AppendUint32(b.buf, uint32(len(record)))
	b.buf = append(b.buf, record...)
	b.bytes += lengthSize + len(record)
	b.size = frameSize(b.bytes)
	b.count++
	t := Ticket{l, b, l.next}
	l.next++
	l.bytes += lengthSize + len(record)
	wake(l.wakeWriter)
	return t, nil
}

func wake(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// place returns the batch that n more bytes go into, with mu held. Its place
// is known from now on, so that nothing is taken in that has none.
func (l *Log) place(n int) (*batch, error) {
	if k := len(l.pending); k > 0 {
		b := l.pending[k-1]
		size := frameSize(b.bytes + n)
		if !b.taken && size <= l.frameMost() && b.offset+size <= l.sizeOf(b.ordinal) {
			return b, nil
		}
	}
	b := &batch{first: l.next, size: frameSize(n), done: make(chan struct{})}
	b.ordinal, b.offset = l.fit(b.size)
	if b.ordinal > l.top+uint64(len(l.ready)) {
		if l.unprepared != nil {
			return nil, unusable(l.cfg.Dir, l.unprepared)
		}
		if !l.within(b.ordinal) {
			return nil, &airlock.Error{
				Code:       airlock.Exhausted,
				Message:    fmt.Sprintf("the write-ahead log in %s has its %d bytes full of records that nobody has taken over", l.cfg.Dir, l.cfg.MaxBytes),
				Hint:       "find out why its reader is behind, or allow it more bytes",
				RetryAfter: 1,
			}
		}
	}
	if k := len(l.free); k > 0 {
		b.buf, l.free = l.free[k-1], l.free[:k-1]
	} else {
		b.buf = make([]byte, headerSize, l.frameMost())
	}
	l.pending = append(l.pending, b)
	return b, nil
}

// fit returns where a frame goes that comes behind all that is pending.
func (l *Log) fit(size int64) (ordinal uint64, offset int64) {
	switch k := len(l.pending); {
	case k > 0:
		ordinal, offset = l.pending[k-1].ordinal, l.pending[k-1].offset+l.pending[k-1].size
	case l.active != nil:
		ordinal, offset = l.active.ordinal, l.active.end
	default:
		return l.top + 1, sector
	}
	if offset+size > l.sizeOf(ordinal) {
		return ordinal + 1, sector
	}
	return ordinal, offset
}

// sizeOf tells the size of a segment that is being or will be written. Only
// the one that was found by Open may have another than configured.
func (l *Log) sizeOf(ordinal uint64) int64 {
	if l.active != nil && ordinal == l.active.ordinal {
		return l.active.size
	}
	return l.cfg.SegmentBytes
}

func (l *Log) frameMost() int64 { return min(maxFrame, l.cfg.SegmentBytes-sector) }

// within says whether the log may have a segment with this ordinal.
func (l *Log) within(ordinal uint64) bool {
	oldest := l.top
	if len(l.segments) > 0 {
		oldest = l.segments[0].ordinal
	}
	return ordinal < oldest+uint64(l.cfg.MaxBytes/l.cfg.SegmentBytes)
}

// run writes what is pending until the log is closed.
func (l *Log) run() {
	pause := l.backoff
	for {
		b, s := l.take()
		if b == nil {
			return
		}
		if err := l.write(s, b); err != nil {
			if last := l.fail(err); last {
				return
			}
			select {
			case <-time.After(pause):
			case <-l.closed:
			}
			pause = min(2*pause, backoffMost)
			continue
		}
		pause = l.backoff
		l.acknowledge(s, b)
	}
}

// take waits for the next batch and for the segment it belongs in. It returns
// nil when the log is closed and nothing is left, or what is left has no place.
func (l *Log) take() (*batch, *segment) {
	for {
		l.mu.Lock()
		if len(l.pending) > 0 {
			b := l.pending[0]
			b.taken = true
			var old segment
			if len(l.ready) > 0 && (l.active == nil || l.active.ordinal != b.ordinal) {
				if l.active != nil {
					old.file, l.active.file = l.active.file, nil
				}
				l.active, l.ready = l.ready[0], l.ready[1:]
				l.top = l.active.ordinal
				wake(l.wakePreparer)
			}
			if s := l.active; s != nil && s.ordinal == b.ordinal {
				l.mu.Unlock()
				old.close() // all of it is synced
				return b, s
			}
			if l.unprepared != nil {
				l.tell(unusable(l.cfg.Dir, l.unprepared))
			}
		}
		if l.closing && (len(l.pending) == 0 || l.unprepared != nil) {
			l.failed = cmp.Or(l.failed, l.unprepared)
			l.mu.Unlock()
			return nil, nil
		}
		l.mu.Unlock()
		<-l.wakeWriter
	}
}

func (l *Log) write(s *segment, b *batch) error {
	if !b.whole {
		b.buf, b.head = seal(b.buf, b.first, b.count, l.tail.hash)
		b.whole = true
	}
	if _, err := s.file.WriteAt(b.buf, b.offset); err != nil {
		return fmt.Errorf("write %s: %w", s.name(), err)
	}
	if err := s.file.datasync(); err != nil {
		return fmt.Errorf("sync %s: %w", s.name(), err)
	}
	return nil
}

// acknowledge tells everybody that b, in s, is durable.
func (l *Log) acknowledge(s *segment, b *batch) {
	l.mu.Lock()
	if n := len(l.segments); n == 0 || l.segments[n-1] != s {
		s.first = b.first
		l.segments = append(l.segments, s)
	}
	s.end += b.size
	s.next = b.head.next()
	l.tail = l.tail.after(b.head)
	l.durable = s.next
	l.failed = nil
	l.pending[0] = nil
	l.pending = l.pending[1:]
	l.bytes -= b.bytes
	if len(l.free) < 2 {
		l.free = append(l.free, b.buf[:headerSize])
	}
	b.buf = nil
	if l.more != nil {
		close(l.more)
		l.more = nil
	}
	if b.err == nil {
		close(b.done)
	}
	l.mu.Unlock()
}

// tell ends the waiting for all that is pending, with mu held.
func (l *Log) tell(err error) {
	for _, b := range l.pending {
		b.taken = true
		if b.err == nil {
			b.err = err
			close(b.done)
		}
	}
}

// fail gives up the segment that could not be written. What the system still
// has of it in memory may never reach the disk, even if a later sync says so:
// all that is pending goes to new segments, also instead of those made ahead.
// It says whether the log is being closed.
func (l *Log) fail(err error) (last bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.failed = err
	l.tell(unusable(l.cfg.Dir, err))
	l.top = l.active.ordinal
	if l.active.empty() {
		l.top-- // made again under the same name
	}
	l.active.close()
	l.active = nil
	for _, s := range l.ready {
		s.close()
	}
	l.ready = nil
	l.resets++
	pending := l.pending
	l.pending = nil
	for _, b := range pending {
		b.ordinal, b.offset = l.fit(b.size)
		l.pending = append(l.pending, b)
	}
	wake(l.wakePreparer)
	return l.closing
}

// prepare keeps one segment ahead of the one being written, so that no writer
// waits for its making, and a full disk is known before it matters.
func (l *Log) prepare() {
	pause := l.backoff
	for {
		l.mu.Lock()
		ordinal, resets := l.top+1, l.resets
		// What was taken in gets its place even beyond MaxBytes: after a failure.
		k := len(l.pending)
		need := len(l.ready) == 0 && (l.within(ordinal) || k > 0 && l.pending[k-1].ordinal >= ordinal)
		if !need {
			l.unprepared = nil
		}
		l.mu.Unlock()
		if !need {
			select {
			case <-l.wakePreparer:
				continue
			case <-l.stop:
				return
			}
		}
		s, err := l.make(ordinal)
		if errors.Is(err, errStopped) {
			return
		}
		l.mu.Lock()
		l.unprepared = err
		if err == nil && resets == l.resets {
			l.ready = append(l.ready, s)
			s = nil
		}
		l.mu.Unlock()
		s.close()
		wake(l.wakeWriter)
		if err == nil {
			pause = l.backoff
			continue
		}
		select {
		case <-time.After(pause):
			pause = min(2*pause, backoffMost)
		case <-l.wakePreparer: // after Trim there may be space
		case <-l.stop:
			return
		}
	}
}

var errStopped = errors.New("the log is being closed")

// make makes a segment of zeros and takes all room that it will ever need. A
// file that has its name already is replaced: nothing of that counts.
func (l *Log) make(ordinal uint64) (_ *segment, err error) {
	s := &segment{ordinal: ordinal, size: l.cfg.SegmentBytes, end: sector}
	f, err := l.disk.create(prepareName)
	if err != nil {
		return nil, fmt.Errorf("make %s: %w", s.name(), err)
	}
	defer func() {
		if err != nil {
			f.Close()
			l.disk.remove(prepareName) // it may have taken the last room; the next Open does it again
			err = fmt.Errorf("make %s: %w", s.name(), err)
		}
	}()
	if err := f.allocate(s.size); err != nil {
		return nil, err
	}
	// Written zeros, so that the sync of a frame has nothing to do but write
	// it; in parts, so that no frame waits long behind them.
	b := make([]byte, min(s.size, 1<<20))
	copy(b, segmentHeader(ordinal, s.size))
	for off := int64(0); off < s.size; off += int64(len(b)) {
		select {
		case <-l.stop:
			return nil, errStopped
		default:
		}
		if _, err := f.WriteAt(b[:min(int64(len(b)), s.size-off)], off); err != nil {
			return nil, err
		}
		if err := f.datasync(); err != nil {
			return nil, err
		}
		clear(b[:sector])
	}
	if err := l.disk.rename(prepareName, s.name()); err != nil {
		return nil, err
	}
	if err := l.disk.sync(); err != nil {
		return nil, err
	}
	s.file = f
	return s, nil
}

// Durable returns the number of the first record that is not yet durable, and
// a channel that is closed when more are.
func (l *Log) Durable() (next uint64, more <-chan struct{}) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.more == nil {
		l.more = make(chan struct{})
	}
	return l.durable, l.more
}

// Pending returns how many records are not yet durable, and their bytes.
func (l *Log) Pending() (records, bytes int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return int(l.next - l.durable), l.bytes
}

// Err says why the log takes no records now, or will not when the file at hand
// is full. It is nil when all is well.
func (l *Log) Err() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if err := cmp.Or(l.failed, l.unprepared); err != nil {
		return unusable(l.cfg.Dir, err)
	}
	return nil
}

// Trim removes the segments of which all records have a number below before.
// The last record that is durable always stays.
func (l *Log) Trim(before uint64) error {
	l.readMu.Lock()
	defer l.readMu.Unlock()
	for {
		l.mu.Lock()
		if l.closing || len(l.segments) < 2 || l.segments[0].next > before {
			l.mu.Unlock()
			return nil
		}
		s := l.segments[0]
		l.mu.Unlock()
		if err := l.disk.remove(s.name()); err != nil {
			return fmt.Errorf("trim write-ahead log: %w", err)
		}
		l.mu.Lock()
		l.segments = slices.Delete(l.segments, 0, 1)
		l.mu.Unlock()
		// One by one: a power cut must not leave a gap.
		if err := l.disk.sync(); err != nil {
			return fmt.Errorf("trim write-ahead log: %w", err)
		}
		wake(l.wakePreparer)
	}
}

// Close writes what is pending and then the mark of a clean stop. If the log
// cannot be written it tries once more, and returns an error if that fails too.
func (l *Log) Close() error {
	l.close.Do(func() { l.closeErr = l.end() })
	return l.closeErr
}

func (l *Log) end() error {
	l.mu.Lock()
	l.closing = true
	l.mu.Unlock()
	close(l.closed)
	wake(l.wakeWriter)
	l.writer.Wait()
	close(l.stop)
	l.preparer.Wait()
	l.readMu.Lock() // until Read and Trim have returned
	defer l.readMu.Unlock()
	l.read.close()

	l.mu.Lock()
	defer l.mu.Unlock()
	var err error
	if lost := l.next - l.durable; lost > 0 {
		l.tell(unusable(l.cfg.Dir, l.failed))
		err = unusable(l.cfg.Dir, fmt.Errorf("%d records from %d on are lost: %w", lost, l.durable, l.failed))
	} else {
		err = l.mark()
	}
	l.active.close()
	for _, s := range l.ready {
		s.close()
	}
	l.lock.Close()
	return err
}

// mark writes the mark of a clean stop.
func (l *Log) mark() error {
	const name = endName + ".tmp"
	f, err := l.disk.create(name)
	if err != nil {
		return fmt.Errorf("write the mark of a clean stop: %w", err)
	}
	_, err = f.WriteAt(endMark(l.next, l.tail.hash), 0)
	if err == nil {
		err = f.datasync()
	}
	f.Close()
	if err == nil {
		err = l.disk.rename(name, endName)
	}
	if err == nil {
		err = l.disk.sync()
	}
	if err != nil {
		return fmt.Errorf("write the mark of a clean stop: %w", err)
	}
	return nil
}
