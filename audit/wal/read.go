package wal

import (
	"fmt"

	"airlock.dev/airlock"
)

// readMost is how many bytes of frames one Read goes through, but for the first.
const readMost = 1 << 20

// reader remembers where the last Read ended: who reads in order finds each
// frame at once, and does not read it twice.
type reader struct {
	file    file // of a segment
	ordinal uint64
	offset  int64 // in file, of the frame behind records
	first   uint64
	records [][]byte
}

func (r *reader) close() {
	if r.file != nil {
		r.file.Close()
	}
	*r = reader{}
}

// Read returns durable records from the one with the number from on: at most
// most, perhaps fewer, none if there are none. It waits for nothing but the
// disk. The records must not be changed. Errors: NotFound for a record that was
// trimmed, Unavailable after Close, a *Damage for a frame that is not as it was
// written.
func (l *Log) Read(from uint64, most int) ([][]byte, error) {
	l.readMu.Lock()
	defer l.readMu.Unlock()
	var records [][]byte
	for read := 0; len(records) < most && read < readMost; {
		s, err := l.holding(from)
		if err != nil || s == nil {
			return records, err
		}
		r := &l.read
		if from < r.first || from-r.first >= uint64(len(r.records)) {
			if err := l.seek(s, from); err != nil {
				r.close()
				return nil, located(l.cfg.Dir, err)
			}
		}
		part := r.records[from-r.first:]
		part = part[:min(len(part), most-len(records))]
		records = append(records, part...)
		from += uint64(len(part))
		for _, record := range part {
			read += lengthSize + len(record)
		}
	}
	return records, nil
}

// holding returns a copy of what is known of the segment that holds a record,
// or nil if the record is not durable.
func (l *Log) holding(n uint64) (*segment, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.closing:
		return nil, airlock.Errorf(airlock.Unavailable, "the write-ahead log in %s is closed", l.cfg.Dir)
	case n >= l.durable:
		return nil, nil
	}
	// The last one that can have it: a frame may be in two of them, of which
	// the later one is certain.
	for i := len(l.segments) - 1; i >= 0; i-- {
		if s := *l.segments[i]; !s.empty() && s.first <= n {
			return &s, nil
		}
	}
	return nil, airlock.Errorf(airlock.NotFound, "record %d is not in the write-ahead log in %s any more: it was trimmed", n, l.cfg.Dir)
}

// seek reads the frame of s that holds a record.
func (l *Log) seek(s *segment, n uint64) error {
	r := &l.read
	if r.file == nil || r.ordinal != s.ordinal || n < r.first {
		r.close()
		f, err := l.disk.open(s.name())
		if err != nil {
			return &Damage{File: s.name(), Kind: Unreadable, First: n, Detail: "the segment cannot be opened any more", Err: err}
		}
		*r = reader{file: f, ordinal: s.ordinal, offset: sector, first: s.first}
	}
	r.records = nil
	var b [sector]byte
	for r.offset < s.end {
		damage := &Damage{File: s.name(), Offset: r.offset, Kind: Unreadable, First: n}
		if _, err := r.file.ReadAt(b[:], r.offset); err != nil {
			damage.Detail, damage.Err = "a frame's header cannot be read any more", err
			return damage
		}
		h, ok := parseHeader(b[:])
		if !ok || h.first > n || r.offset+h.size() > s.end {
			damage.Kind, damage.Detail = Altered, "a frame's header has changed"
			return damage
		}
		if n >= h.next() {
			r.offset += h.size()
			continue
		}
		frame := make([]byte, h.size())
		if _, err := r.file.ReadAt(frame, r.offset); err != nil {
			damage.Detail, damage.Err = "a frame cannot be read any more", err
			return damage
		}
		records, ok := parseFrame(h, frame)
		if !ok {
			damage.Kind, damage.Detail, damage.Bytes = Altered, "a frame has changed", h.size()
			return damage
		}
		r.records, r.first, r.offset = records, h.first, r.offset+h.size()
		return nil
	}
	return &Damage{File: s.name(), Offset: r.offset, Kind: Absent, First: n, Detail: fmt.Sprintf("record %d is not in its segment any more", n)}
}
