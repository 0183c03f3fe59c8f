package wal

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"
	"slices"
	"syscall"
	"testing"
)

const eight = 8 // records of a built log

// build returns a log of eight records, each in a frame of two sectors: three
// frames in each of segments 1 and 2, two in segment 3, none in segment 4.
// With close it was stopped cleanly.
func build(t testing.TB, clean bool) *simDisk {
	t.Helper()
	d := newSimDisk()
	l, _, err := openSim(d, small(0))
	if err != nil {
		t.Fatal(err)
	}
	for range eight {
		ticket, err := l.Append(func(seq uint64, buf []byte) ([]byte, error) {
			return append(buf, sized(seq)...), nil
		})
		if err != nil {
			t.Fatal(err)
		}
		if err := ticket.Wait(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	waitAhead(l)
	before := d.powerCut(rand.New(rand.NewPCG(0, 0)))
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	if clean {
		return d
	}
	return before
}

// waitAhead returns when a segment was made ahead.
func waitAhead(l *Log) {
	for ahead := 0; ahead == 0; runtime.Gosched() {
		l.mu.Lock()
		ahead = len(l.ready)
		l.mu.Unlock()
	}
}

// sized is a record of 600 bytes, none of which is zero.
func sized(seq uint64) []byte {
	b := fmt.Appendf(nil, "record %d ", seq)
	for i := len(b); i < 600; i++ {
		b = append(b, byte(1+(uint64(i)*7+seq*13)%255))
	}
	return b
}

// segmentNamed returns a file's bytes.
func (d *simDisk) segmentNamed(ordinal int) []byte {
	return d.entries[fmt.Sprintf(ordinalName, ordinal)].data
}

// places of what build writes, by number of the record.
func segmentOf(seq int) (ordinal int, offset int64) {
	return 1 + seq/3, sector + int64(seq%3)*2*sector
}

func TestDamage(t *testing.T) {
	name := func(n int) string { return fmt.Sprintf("sim/"+ordinalName, n) }
	zero := func(d *simDisk, seq int, from, to int64) {
		ordinal, offset := segmentOf(seq)
		clear(d.segmentNamed(ordinal)[offset+from : offset+to])
	}
	flip := func(d *simDisk, seq int, at int64) {
		ordinal, offset := segmentOf(seq)
		d.segmentNamed(ordinal)[offset+at] ^= 4
	}
	failing := func(op string, nth int, errno error) func(*simDisk) {
		return func(d *simDisk) {
			seen := 0
			d.fail = func(_ int, o string) error {
				if o == op {
					if seen++; seen == nth {
						return errno
					}
				}
				return nil
			}
		}
	}
	for _, tc := range []struct {
		name   string
		clean  bool
		change func(d *simDisk)
		want   Damage // of it Bytes, Detail and Err are not compared
	}{
		{"a segment in the middle is gone", false, func(d *simDisk) { delete(d.entries, fmt.Sprintf(ordinalName, 2)) },
			Damage{File: name(2), Kind: Absent, First: 3}},
		{"the last segment with records is gone", false, func(d *simDisk) { delete(d.entries, fmt.Sprintf(ordinalName, 3)) },
			Damage{File: name(3), Kind: Absent, First: 6}},
		{"the end of a segment is cut off", false, func(d *simDisk) {
			f := d.entries[fmt.Sprintf(ordinalName, 2)]
			f.data = f.data[:3000]
		}, Damage{File: name(2), Offset: 3000, Kind: Absent, First: 3}},
		{"a segment is empty", false, func(d *simDisk) { d.entries[fmt.Sprintf(ordinalName, 2)].data = nil },
			Damage{File: name(2), Kind: Absent, First: 3}},
		{"a segment has grown", false, func(d *simDisk) {
			f := d.entries[fmt.Sprintf(ordinalName, 2)]
			f.data = append(f.data, 0)
		}, Damage{File: name(2), Offset: 4096, Kind: Altered, First: 3}},
		{"a segment is another one's copy", false, func(d *simDisk) { copy(d.segmentNamed(2), d.segmentNamed(1)) },
			Damage{File: name(2), Kind: Altered, First: 3}},
		{"a segment is an older copy of itself", false, func(d *simDisk) { clear(d.segmentNamed(2)[sector+2*sector:]) },
			Damage{File: name(3), Offset: sector, Kind: Absent, First: 4, Next: 6}},
		{"a segment is of another log", false, func(d *simDisk) {
			other := newSimDisk()
			l, _, err := openSim(other, small(0))
			if err != nil {
				t.Fatal(err)
			}
			for range 3 {
				ticket, err := l.Append(func(seq uint64, buf []byte) ([]byte, error) {
					return append(buf, sized(seq+100)...), nil
				})
				if err != nil {
					t.Fatal(err)
				}
				if err := ticket.Wait(t.Context()); err != nil {
					t.Fatal(err)
				}
			}
			l.Close()
			copy(d.segmentNamed(1), other.segmentNamed(1))
		}, Damage{File: name(2), Offset: sector, Kind: Altered, First: 3}},
		{"a frame in the middle is zeros", false, func(d *simDisk) { zero(d, 4, 0, 1024) },
			Damage{File: name(2), Offset: sector + 1024, Kind: Absent, First: 4, Next: 5}},
		{"a sector of a frame in the middle is zeros", false, func(d *simDisk) { zero(d, 4, 512, 1024) },
			Damage{File: name(2), Offset: sector + 1024, Kind: Absent, First: 4, Next: 5}},
		{"a byte in the middle is another", false, func(d *simDisk) { flip(d, 4, 300) },
			Damage{File: name(2), Offset: sector + 1024, Kind: Altered, First: 4, Next: 5}},
		{"a byte of the last frame of a segment is another", false, func(d *simDisk) { flip(d, 5, 300) },
			Damage{File: name(2), Offset: sector + 2048, Kind: Altered, First: 5, Next: 6}},
		{"a sector of the last frame of a segment is zeros", false, func(d *simDisk) { zero(d, 5, 512, 1024) },
			Damage{File: name(2), Offset: sector + 2048, Kind: Absent, First: 5, Next: 6}},
		{"a byte of the last frame is another", false, func(d *simDisk) { flip(d, 7, 600) },
			Damage{File: name(3), Offset: sector + 1024, Kind: Altered, First: 7}},
		{"a byte of the last frame's header is another", false, func(d *simDisk) { flip(d, 7, 20) },
			Damage{File: name(3), Offset: sector + 1024, Kind: Altered, First: 7}},
		{"a byte of a segment's header is another", false, func(d *simDisk) { d.segmentNamed(4)[17] ^= 1 },
			Damage{File: name(4), Kind: Altered, First: 8}},
		{"the last frame of a closed log is gone", true, func(d *simDisk) { zero(d, 7, 0, 1024) },
			Damage{File: name(3), Offset: sector + 1024, Kind: Absent, First: 7, Next: 8}},
		{"the last frame of a closed log is torn", true, func(d *simDisk) { zero(d, 7, 512, 1024) },
			Damage{File: name(3), Offset: sector + 1024, Kind: Absent, First: 7, Next: 8}},
		{"the last segments of a closed log are gone", true, func(d *simDisk) {
			delete(d.entries, fmt.Sprintf(ordinalName, 3))
			delete(d.entries, fmt.Sprintf(ordinalName, 4))
		}, Damage{File: name(2), Offset: sector + 3072, Kind: Absent, First: 6, Next: 8}},
		{"all segments of a closed log are gone", true, func(d *simDisk) {
			for n := range 4 {
				delete(d.entries, fmt.Sprintf(ordinalName, 1+n))
			}
		}, Damage{File: "sim/end", Kind: Absent, First: 0, Next: 8}},
		{"the mark of a clean stop is another", true, func(d *simDisk) { d.entries["end"].data[9] ^= 1 },
			Damage{File: "sim/end", Kind: Altered, First: 8}},
		{"something is behind the end of a closed log", true, func(d *simDisk) { d.segmentNamed(3)[3500] = 1 },
			Damage{File: name(3), Offset: sector + 2048, Kind: Altered, First: 8}},
		{"a segment cannot be opened", false, failing("open", 2, os.ErrPermission),
			Damage{File: name(2), Kind: Unreadable, First: 3}},
		{"a segment cannot be read", false, failing("read", 3, syscall.EIO),
			Damage{File: name(3), Kind: Unreadable, First: 6}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			d := build(t, tc.clean)
			tc.change(d)
			files := map[string]string{}
			for name, f := range d.entries {
				files[name] = string(f.data)
			}
			_, _, err := openSim(d, small(0))
			var got *Damage
			if !errors.As(err, &got) {
				t.Fatalf("Open = %v, no damage", err)
			}
			if got.Detail == "" || got.Kind == Unreadable && got.Err == nil {
				t.Errorf("no details: %+v", got)
			}
			short := Damage{File: got.File, Offset: got.Offset, Kind: got.Kind, First: got.First, Next: got.Next}
			if short != tc.want {
				t.Errorf("got  %+v\nwant %+v\n(%v)", short, tc.want, err)
			}
			if len(files) != len(d.entries) {
				t.Errorf("Open of a damaged log made or removed files")
			}
			for name, f := range d.entries {
				if files[name] != string(f.data) {
					t.Errorf("Open of a damaged log changed %s", name)
				}
			}
		})
	}
}

func TestTorn(t *testing.T) {
	for _, tc := range []struct {
		name   string
		change func(frame []byte)
		torn   bool
		next   uint64
	}{
		{"nothing of the frame", func(f []byte) { clear(f) }, false, 7},
		{"the first sector only", func(f []byte) { clear(f[512:]) }, true, 7},
		{"the last sector only", func(f []byte) { clear(f[:512]) }, true, 7},
		{"the whole frame", func([]byte) {}, false, 8},
	} {
		t.Run(tc.name, func(t *testing.T) {
			d := build(t, false)
			_, offset := segmentOf(7)
			tc.change(d.segmentNamed(3)[offset : offset+1024])
			l, rec, err := openSim(d, small(0))
			if err != nil {
				t.Fatal(err)
			}
			if rec.Next != tc.next || rec.Clean || (rec.Torn != nil) != tc.torn {
				t.Fatalf("found %+v", rec)
			}
			if tc.torn {
				want := Damage{File: "sim/0000000000000003.wal", Offset: offset, Kind: Torn, First: 7, Bytes: rec.Torn.Bytes, Detail: rec.Torn.Detail}
				if *rec.Torn != want || rec.Torn.Bytes < 512 || rec.Torn.Bytes > 1024 {
					t.Errorf("torn %+v, not %+v", *rec.Torn, want)
				}
			}
			// Shorter than what was torn, of which nothing may be left.
			ticket, err := l.Append(func(_ uint64, buf []byte) ([]byte, error) { return append(buf, "short"...), nil })
			if err != nil || ticket.Seq() != tc.next {
				t.Fatalf("append after a torn end: number %d, %v", ticket.Seq(), err)
			}
			if err := l.Close(); err != nil {
				t.Fatal(err)
			}
			if _, rec, err = openSim(d, small(0)); err != nil || rec.Next != tc.next+1 || !rec.Clean {
				t.Fatalf("the next Open: %+v, %v", rec, err)
			}
		})
	}
}

// TestFlip changes one bit in every byte of a small log. Either Open names
// damage at the frame that it is in, or every record is as it was, but for the
// last frame of a log that was not closed, which may be taken for torn.
func TestFlip(t *testing.T) {
	for _, clean := range []bool{false, true} {
		d := build(t, clean)
		intact, err := find(d)
		if err != nil || intact.tail.next != eight {
			t.Fatalf("before any change: %+v, %v", intact, err)
		}
		whole := intact.tail
		for _, name := range []string{"0000000000000001.wal", "0000000000000002.wal", "0000000000000003.wal", "0000000000000004.wal", "end"} {
			f := d.entries[name]
			if f == nil {
				continue
			}
			for i := range f.data {
				what := fmt.Sprintf("clean %v, byte %d of %s", clean, i, name)
				first := uint64(eight) // of the frame that the byte is in
				var ordinal int
				if n, _ := fmt.Sscanf(name, ordinalName, &ordinal); n == 1 && ordinal < 4 {
					first = uint64(min(3*(ordinal-1)+max(i-sector, 0)/1024, eight))
				}
				f.data[i] ^= 1 << (i % 8)
				found, err := find(d) // which changes nothing
				if err != nil {
					var damage *Damage
					if !errors.As(err, &damage) || damage.Kind != Altered || damage.First != first && i >= sector {
						t.Fatalf("%s: %v", what, err)
					}
					f.data[i] ^= 1 << (i % 8)
					continue
				}
				if found.tail == whole && i%50 > 0 {
					f.data[i] ^= 1 << (i % 8)
					continue // with the same hash all records are the same
				}
				after := d.powerCut(rand.New(rand.NewPCG(0, 0))) // a copy: all is synced
				after.entries[name].data[i] ^= 1 << (i % 8)
				f.data[i] ^= 1 << (i % 8)
				l, rec, err := openSim(after, small(0))
				if err != nil {
					t.Fatalf("%s: %v", what, err)
				}
				if rec.Clean != clean || rec.Next < eight && rec.Torn == nil || rec.Next < eight-1 || clean && rec.Next < eight {
					t.Fatalf("%s: %+v", what, rec)
				}
				for n := range rec.Next {
					records, err := l.Read(n, 1)
					if err != nil || len(records) != 1 || !slices.Equal(records[0], sized(n)) {
						t.Fatalf("%s: record %d is another, %v", what, n, err)
					}
				}
				l.Close()
			}
		}
	}
}

// TestReadNoticesChange: what changes on the disk while the log is open.
func TestReadNoticesChange(t *testing.T) {
	d := build(t, true)
	l, _, err := openSim(d, small(0))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if _, err := l.Read(0, 100); err != nil {
		t.Fatal(err)
	}
	_, offset := segmentOf(4)
	d.segmentNamed(2)[offset+200] ^= 1
	var damage *Damage
	if _, err := l.Read(4, 1); !errors.As(err, &damage) || damage.Kind != Altered || damage.First != 4 || damage.Offset != offset {
		t.Fatalf("Read = %v", err)
	}
	if records, err := l.Read(5, 1); err != nil || len(records) != 1 {
		t.Fatalf("Read of the record behind = %d records, %v", len(records), err)
	}
}

// mendSums makes the checksums and hashes right of whatever looks like a header,
// so that fuzzing comes behind them.
func mendSums(b []byte) {
	if len(b) < sector {
		return
	}
	binary.BigEndian.PutUint64(b[24:], uint64(len(b)))
	binary.BigEndian.PutUint32(b[sector-4:], checksum(b[:sector-4]))
	var prev digest
	for off := sector; off+sector <= len(b); {
		n := int(binary.BigEndian.Uint32(b[off+8:]))
		if n < headerSize || n > len(b)-off {
			return
		}
		if off > sector {
			copy(b[off+24:], prev[:])
		}
		prev = hashOf(b[off : off+n])
		copy(b[off+56:], prev[:])
		binary.BigEndian.PutUint32(b[off+92:], checksum(b[off:off+92]))
		off += int(padded(int64(n)))
	}
}

// FuzzOpen gives Open two segments of any bytes. It must not panic or take
// what does not fit; what it takes can be read and written on.
func FuzzOpen(f *testing.F) {
	d := build(f, false)
	f.Add(d.segmentNamed(1), d.segmentNamed(2), []byte(nil), false)
	f.Add(d.segmentNamed(1), d.segmentNamed(4), []byte(nil), true)
	f.Add(d.segmentNamed(1)[:2000], []byte("AIRLOCKW"), []byte("AIRLOCKE"), false)
	d = build(f, true)
	f.Add(d.segmentNamed(1), d.segmentNamed(2), d.entries["end"].data, false)
	f.Fuzz(func(t *testing.T, a, b, end []byte, mend bool) {
		d := newSimDisk()
		for name, data := range map[string][]byte{"0000000000000001.wal": a, "0000000000000002.wal": b, "end": end} {
			if data != nil && len(data) < 1<<20 {
				data = slices.Clone(data)
				if mend {
					mendSums(data)
				}
				d.entries[name] = &simFile{disk: d, data: data, dirty: map[int64]bool{}}
			}
		}
		l, rec, err := openSim(d, small(0))
		if err != nil {
			return
		}
		for n := rec.First; n < rec.Next; {
			records, err := l.Read(n, 10)
			if err != nil || len(records) == 0 {
				t.Fatalf("record %d of %+v: %d records, %v", n, rec, len(records), err)
			}
			n += uint64(len(records))
		}
		if rec.Next < 1<<63 {
			if got := mustAppend(t, l, "fuzz").Seq(); got != rec.Next {
				t.Fatalf("number %d, not %d", got, rec.Next)
			}
		}
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
		if _, again, err := openSim(d, small(0)); err != nil || !again.Clean {
			t.Fatalf("after %+v and a clean stop: %+v, %v", rec, again, err)
		}
	})
}
