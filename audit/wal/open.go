package wal

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"

	"airlock.dev/airlock"
)

// Recovery says what Open found.
type Recovery struct {
	First uint64  // number of the oldest record that is there
	Next  uint64  // number of the next record; First if there is none
	Clean bool    // the log is new, or was closed with nothing left to write
	Torn  *Damage // what was cut off its end, or nil
}

// Kind says what is wrong with a part of a log.
type Kind string

const (
	// Torn is an incomplete last frame, as a power cut leaves it. Nobody was
	// told that its records are durable.
	Torn Kind = "torn"
	// Altered bytes can be read and are not those that were written.
	Altered Kind = "altered"
	// Unreadable bytes may be there, but the system does not give them.
	Unreadable Kind = "unreadable"
	// Absent is a file, or bytes, that must have been there.
	Absent Kind = "absent"
)

// Damage is a place in a log that is not as it was written.
type Damage struct {
	File   string // its path
	Offset int64  // in File, in bytes
	Bytes  int64  // from Offset on; 0 if unknown
	Kind   Kind
	First  uint64 // number of the first record concerned: those before are intact
	Next   uint64 // number of the first intact record behind; 0 if unknown
	Detail string // for a person
	Err    error  // what the system said, or nil
}

// Error names the place and the records.
func (d *Damage) Error() string {
	s := fmt.Sprintf("write-ahead log: %s is %s at byte %d, records from %d", d.File, d.Kind, d.Offset, d.First)
	if d.Next > 0 {
		s += fmt.Sprintf(" to before %d", d.Next)
	}
	s += ": " + d.Detail
	if d.Err != nil {
		s += ": " + d.Err.Error()
	}
	return s
}

// located makes a path of the name of the damaged file in dir.
func located(dir string, err error) error {
	var d *Damage
	if errors.As(err, &d) {
		d.File = filepath.Join(dir, d.File)
	}
	return err
}

// Unwrap returns what the system said.
func (d *Damage) Unwrap() error { return d.Err }

// chain is what the next frame must fit to.
type chain struct {
	known bool   // false before the first frame: anything fits
	hash  digest // of the last frame
	first uint64 // of the last frame
	next  uint64
}

func (c chain) after(h header) chain {
	return chain{known: true, hash: h.hash, first: h.first, next: h.next()}
}

// segment is a file of the log.
type segment struct {
	ordinal uint64
	size    int64
	file    file // for writing; nil once another segment is written

	// Of its frames that are durable; none if end is sector.
	first, next uint64
	last, end   int64 // offset of the last frame, and behind it

	junk bool // there is something behind its frames
}

func (s *segment) name() string { return fmt.Sprintf(ordinalName, s.ordinal) }
func (s *segment) empty() bool  { return s.end == sector }

func (s *segment) close() error {
	if s == nil || s.file == nil {
		return nil
	}
	f := s.file
	s.file = nil
	return f.Close()
}

const (
	endName     = "end"
	prepareName = "prepare.tmp"
)

// found is a log as it is in its directory.
type found struct {
	segments []*segment // with frames, and those in between
	spare    []*segment // behind them, without frames
	tail     chain
	torn     *Damage
	clean    bool
	ended    bool // there is an end mark
}

// find reads and checks the whole log and changes nothing. The last segment
// and the spare ones are open.
func find(d disk) (log found, err error) {
	defer func() {
		if err != nil {
			log.close()
		}
	}()
	names, err := d.names()
	if err != nil {
		return log, fmt.Errorf("list write-ahead log: %w", err)
	}
	var ordinals []uint64
	for _, name := range names {
		var n uint64
		if _, err := fmt.Sscanf(name, ordinalName, &n); err == nil && name == fmt.Sprintf(ordinalName, n) {
			ordinals = append(ordinals, n)
		}
	}
	slices.Sort(ordinals)
	var buf []byte
	var worst *Damage // where the frames known so far stop, if not with zeros
	for i, n := range ordinals {
		if i > 0 && n != ordinals[i-1]+1 {
			return log, &Damage{File: fmt.Sprintf(ordinalName, ordinals[i-1]+1), Kind: Absent, First: log.tail.next, Detail: "later segments are there and this one is not"}
		}
		s, tail, stop, err := scan(d, n, log.tail, &buf)
		if err != nil {
			return log, err
		}
		s.junk = stop != nil
		if s.empty() {
			log.spare = append(log.spare, s)
			worst = cmp.Or(worst, stop)
		} else {
			// What stopped the frames before was a write that failed: this
			// segment goes on where they stop, so nothing of it counted.
			log.close()
			log.segments = append(append(log.segments, log.spare...), s)
			log.spare, log.tail, worst = nil, tail, stop
		}
		if s.empty() && stop != nil && stop.Kind != Torn {
			return log, certain(worst, stop)
		}
	}
	if worst != nil && worst.Kind != Torn {
		return log, worst
	}
	log.torn = worst
	return log, log.readEnd(d, slices.Contains(names, endName))
}

// certain returns the first of two damages. It is not a torn end, because
// something was written behind it.
func certain(first, second *Damage) *Damage {
	d := *first
	d.Next = cmp.Or(first.Next, second.Next)
	if d.Kind == Torn {
		d.Kind, d.Detail = Absent, "a part of a frame is missing and the log goes on behind it"
	}
	return &d
}

func (log *found) close() {
	for _, s := range slices.Concat(log.segments, log.spare) {
		s.close()
	}
}

// readEnd looks whether the log ends where it was closed.
func (log *found) readEnd(d disk, there bool) error {
	log.ended = there
	if !there {
		log.clean = len(log.segments)+len(log.spare) == 0
		return nil
	}
	damage := &Damage{File: endName, First: log.tail.next, Bytes: endSize}
	f, err := d.open(endName)
	if err != nil {
		damage.Kind, damage.Detail, damage.Err = Unreadable, "the mark of a clean stop cannot be opened", err
		return damage
	}
	defer f.Close()
	b := make([]byte, endSize+1)
	n, err := f.ReadAt(b, 0)
	if err != nil && !errors.Is(err, io.EOF) {
		damage.Kind, damage.Detail, damage.Err = Unreadable, "the mark of a clean stop cannot be read", err
		return damage
	}
	next, hash, ok := parseEndMark(b[:n])
	switch {
	case !ok:
		damage.Kind, damage.Detail = Altered, "it is no mark of a clean stop"
	case hash == log.tail.hash && (next == log.tail.next || !log.tail.known) && log.torn == nil:
		log.clean = true
		return nil
	case hash == log.tail.hash && log.torn != nil:
		*damage = *log.torn
		damage.Kind, damage.Detail = Altered, "the log was closed and there is something behind its last frame"
	case next > log.tail.next:
		damage.Kind, damage.Next, damage.Detail = Absent, next, "the log was closed with records that are not there"
		if n := len(log.segments); n > 0 {
			damage.File, damage.Offset, damage.Bytes = log.segments[n-1].name(), log.segments[n-1].end, 0
		}
	default:
		damage.Kind, damage.Detail = Altered, "the log was closed with another last frame than there is"
	}
	return damage
}

// scan reads one segment as far as its frames fit to tail and to each other.
// It returns the chain behind them, and a stop if there is anything but zeros
// behind them. An error is a *Damage that no later segment can explain, or
// says that the format is unknown.
func scan(d disk, ordinal uint64, tail chain, buf *[]byte) (s *segment, _ chain, stop *Damage, err error) {
	s = &segment{ordinal: ordinal, end: sector, first: tail.next, next: tail.next}
	damage := func(kind Kind, offset int64, detail string, err error) *Damage {
		return &Damage{File: s.name(), Offset: offset, Kind: kind, First: tail.next, Detail: detail, Err: err}
	}
	f, err := d.open(s.name())
	if err != nil {
		kind := Unreadable
		if errors.Is(err, os.ErrNotExist) {
			kind = Absent
		}
		return s, tail, nil, damage(kind, 0, "the segment cannot be opened", err)
	}
	s.file = f
	defer func() {
		if err != nil {
			f.Close()
		}
	}()
	size, err := f.size()
	if err != nil {
		return s, tail, nil, damage(Unreadable, 0, "the segment's size is unknown", err)
	}
	if size < sector {
		return s, tail, nil, damage(Absent, size, "the segment was cut short", nil)
	}
	if most := min(size, 2*maxFrame); int64(len(*buf)) < most {
		*buf = make([]byte, most)
	}
	w := window{file: f, size: size, buf: *buf}
	b, err := w.at(0, sector)
	if err != nil {
		return s, tail, nil, damage(Unreadable, 0, "the segment's header cannot be read", err)
	}
	v, n, written, ok := parseSegmentHeader(b)
	if ok && v != version {
		return s, tail, nil, &airlock.Error{
			Code:    airlock.Conflict,
			Message: fmt.Sprintf("the write-ahead log's %s has format version %d and this airlock knows %d", s.name(), v, version),
			Hint:    "run the airlock version that wrote it, or a newer one",
		}
	}
	switch {
	case !ok || !bytes.Equal(b, segmentHeader(n, written)) || written < sector:
		return s, tail, nil, damage(Altered, 0, "the segment's header is not valid", nil)
	case n != ordinal:
		return s, tail, nil, damage(Altered, 0, fmt.Sprintf("it is a copy of segment %d", n), nil)
	case size < written:
		return s, tail, nil, damage(Absent, size, fmt.Sprintf("the segment was cut short: it had %d bytes", written), nil)
	case size > written:
		return s, tail, nil, damage(Altered, written, fmt.Sprintf("the segment has grown: it had %d bytes", written), nil)
	}
	s.size = size

	for s.end+sector <= size {
		b, err := w.at(s.end, sector)
		if err != nil {
			return s, tail, nil, damage(Unreadable, s.end, "a frame's header cannot be read", err)
		}
		h, ok := parseHeader(b)
		if !ok || s.end+h.size() > size {
			break
		}
		b, err = w.at(s.end, h.size())
		if err != nil {
			return s, tail, nil, damage(Unreadable, s.end, "a frame cannot be read", err)
		}
		if _, ok := parseFrame(h, b); !ok {
			break
		}
		// A frame whose sync failed is written again, to a new segment.
		again := s.empty() && tail.known && h.hash == tail.hash && h.first == tail.first
		switch {
		case again, !tail.known, h.prev == tail.hash && h.first == tail.next:
		case h.first > tail.next:
			stop = damage(Absent, s.end, "the frames before this one are not there", nil)
			stop.Next = h.first
			return s, tail, stop, nil
		default:
			stop = damage(Altered, s.end, "the frame does not follow the one before", nil)
			stop.Bytes = h.size()
			return s, tail, stop, nil
		}
		if s.empty() {
			s.first = h.first
		}
		s.last, s.end, s.next = s.end, s.end+h.size(), h.next()
		tail = tail.after(h)
	}
	stop, err = classify(&w, s, tail)
	if err != nil {
		return s, tail, nil, damage(Unreadable, s.end, "what is behind the last frame cannot be read", err)
	}
	return s, tail, stop, nil
}

// classify says what there is behind the frames of s: nil for nothing, a frame
// that was never written whole, or damage.
func classify(w *window, s *segment, tail chain) (*Damage, error) {
	if s.end+sector > s.size {
		return nil, nil
	}
	b, err := w.at(s.end, sector)
	if err != nil {
		return nil, err
	}
	started := !isZero(b)
	h, valid := parseHeader(b)
	valid = valid && s.end+h.size() <= s.size
	// Where the torn frame ends, if it is one.
	most, rest := min(s.end+maxFrame, s.size), s.end+sector
	torn := !started
	if valid {
		most, rest = s.end+h.size(), s.end+h.size()
		if b, err = w.at(s.end, h.size()); err != nil {
			return nil, err
		}
		torn = hasZeroSector(b)
	}
	last := s.end // the last sector that is not zeros
	var successor *header
	for off := s.end; off < s.size; off += sector {
		b, err := w.at(off, min(sector, s.size-off))
		if err != nil {
			return nil, err
		}
		if isZero(b) {
			continue
		}
		last = off
		if off < rest || len(b) < sector || successor != nil {
			continue
		}
		if h, ok := parseHeader(b); ok && h.first >= tail.next {
			successor = &h
		}
	}
	if last == s.end && !started {
		return nil, nil
	}
	d := &Damage{File: s.name(), Offset: s.end, Bytes: min(last+sector, s.size) - s.end, Kind: Altered, First: tail.next, Detail: "a frame is not as it was written"}
	switch {
	case successor != nil:
		d.Next = successor.first
		d.Bytes = 0
		if torn {
			d.Kind, d.Detail = Absent, "a frame, or a part of it, is missing and the log goes on behind it"
		}
	case last >= most:
		d.Detail = "there is something behind the last frame that was never a frame"
	case torn:
		d.Kind, d.Detail = Torn, "the last frame was not written whole"
	}
	return d, nil
}

// window reads a file in large parts.
type window struct {
	file file
	size int64
	buf  []byte // for a frame at least, or the whole file
	off  int64
	have int64
}

// at returns n bytes from off on, valid until the next call. They must lie
// inside the file and be no more than a frame.
func (w *window) at(off, n int64) ([]byte, error) {
	if off < w.off || off+n > w.off+w.have {
		w.off, w.have = off, min(int64(len(w.buf)), w.size-off)
		if read, err := w.file.ReadAt(w.buf[:w.have], off); int64(read) < w.have {
			w.have = 0
			return nil, err
		}
	}
	return w.buf[off-w.off : off-w.off+n], nil
}

// repair makes the end of a log that was not closed fit to be written on.
func (log *found) repair(d disk, cfg Config) error {
	// Only those at hand and without anything in them can be used. The last one goes first: no gap.
	keep := slices.IndexFunc(log.spare, func(s *segment) bool { return s.junk || s.size != cfg.SegmentBytes })
	for n := len(log.spare); keep >= 0 && n > keep; n-- {
		s := log.spare[n-1]
		s.close()
		log.spare = log.spare[:n-1]
		if err := d.remove(s.name()); err != nil {
			return fmt.Errorf("remove unused segment: %w", err)
		}
		if err := d.sync(); err != nil {
			return fmt.Errorf("remove unused segment: %w", err)
		}
	}
	if n := len(log.segments); n > 0 && !log.clean {
		if err := log.segments[n-1].rewrite(log.torn); err != nil {
			return fmt.Errorf("repair the end of %s: %w", log.segments[n-1].name(), err)
		}
	}
	if log.ended {
		// Before the first new record: with one the mark would be wrong.
		if err := d.remove(endName); err != nil {
			return fmt.Errorf("remove the mark of a clean stop: %w", err)
		}
		if err := d.sync(); err != nil {
			return fmt.Errorf("remove the mark of a clean stop: %w", err)
		}
	}
	return nil
}

// rewrite puts zeros over a torn frame and writes the last whole one again.
// That one can be read, but if the process was killed in its sync, or if that
// failed, it is perhaps only in the system's memory. All before it are durable.
func (s *segment) rewrite(torn *Damage) error {
	if s.junk {
		if _, err := s.file.WriteAt(make([]byte, torn.Bytes), torn.Offset); err != nil {
			return err
		}
	}
	b := make([]byte, s.end-s.last)
	if _, err := s.file.ReadAt(b, s.last); err != nil {
		return err
	}
	if _, err := s.file.WriteAt(b, s.last); err != nil {
		return err
	}
	return s.file.datasync()
}
