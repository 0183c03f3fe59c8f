package keystore

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"testing"

	"airlock.dev/airlock"
)

// memory is a file in memory that remembers in which order it was written and
// synced.
type memory struct {
	bytes []byte
	log   []written
}

type written struct {
	at   int64
	data []byte // nil is a sync
}

func (m *memory) ReadAt(p []byte, at int64) (int, error) {
	if at >= int64(len(m.bytes)) {
		return 0, io.EOF
	}
	n := copy(p, m.bytes[at:])
	if n < len(p) {
		return n, io.EOF
	}
	return n, nil
}

func (m *memory) WriteAt(p []byte, at int64) (int, error) {
	m.log = append(m.log, written{at, bytes.Clone(p)})
	m.bytes = patched(m.bytes, at, p)
	return len(p), nil
}

func (m *memory) Sync() error {
	m.log = append(m.log, written{})
	return nil
}

func (m *memory) Close() error { return nil }

func patched(b []byte, at int64, p []byte) []byte {
	b = bytes.Clone(b)
	if need := int(at) + len(p); need > len(b) {
		b = append(b, make([]byte, need-len(b))...)
	}
	copy(b[at:], p)
	return b
}

var (
	testFile = fileID{1, 2, 3}
	kekA     = kekID{0xa, 0xa1, 0xa2, 0xa3, 0xa4, 0xa5, 0xa6, 0xa7}
	kekB     = kekID{0xb, 0xb1, 0xb2, 0xb3, 0xb4, 0xb5, 0xb6, 0xb7}
)

// smallFile has room for n slots.
func smallFile(n int) []byte {
	return append(encodeHeader(testFile), make([]byte, n*slotLen)...)
}

func scanned(t *testing.T, image []byte, kek kekID) (*slots, *memory, []Damage) {
	t.Helper()
	m := &memory{bytes: bytes.Clone(image)}
	s := &slots{file: m, id: testFile, kek: kek, step: func(string) {}}
	_, damages, _, err := s.scan(int64(len(image)))
	if err != nil {
		t.Fatal(err)
	}
	m.log = nil
	return s, m, damages
}

// plain puts a recognizable secret into a slot, so that it can be searched for.
func plain(secret byte) func(uint32, uint32, *side) error {
	return func(_, _ uint32, v *side) error {
		for i := range v.secret {
			v.secret[i] = secret
		}
		return nil
	}
}

func mustCreate(t *testing.T, s *slots, tag byte) uint32 {
	t.Helper()
	number, _, err := s.create(tagID{tag}, plain(tag))
	if err != nil {
		t.Fatal(err)
	}
	return number
}

// holds says whether a subject's slot has its secret; false is none at all.
func holds(t *testing.T, s *slots, tag byte) bool {
	t.Helper()
	_, v, found, err := s.find(tagID{tag})
	if err != nil {
		t.Fatal(err)
	}
	if found && (v.secret[0] != tag || v.secret[len(v.secret)-1] != tag) {
		t.Fatalf("subject %d has the secret %x", tag, v.secret)
	}
	return found
}

func TestJudge(t *testing.T) {
	key := func(gen uint32, kek kekID) []byte {
		s := side{state: stateKey, gen: gen, kek: kek, tag: tagID{7}}
		return s.encode(testFile, 5)
	}
	erased := func(gen uint32) []byte {
		s := side{state: stateErased, gen: gen}
		return s.encode(testFile, 5)
	}
	bad := func(b []byte) []byte {
		b = bytes.Clone(b)
		b[70] ^= 4
		return b
	}
	signed := func(b []byte) []byte { // with a good checksum, but out of form
		binary.LittleEndian.PutUint32(b[124:], checksum(testFile, 5, b[:124]))
		return b
	}
	odd := func(at int, value byte) []byte {
		b := key(1, kekA)
		b[at] = value
		return signed(b)
	}
	full := erased(1)
	full[60] = 1
	elsewhere := side{state: stateKey, gen: 1, kek: kekA}
	blank := zeroSide[:]
	for name, c := range map[string]struct {
		a, b    []byte
		verdict slotState
		gen     uint32
		want    []byte // both sides become this; nil is no change
		lost    int
	}{
		"never used":                      {blank, blank, slotFree, 0, nil, -1},
		"a key":                           {key(1, kekA), key(1, kekA), slotKey, 1, nil, -1},
		"erased":                          {erased(3), erased(3), slotErased, 3, nil, -1},
		"first write broke off":           {bad(key(1, kekA)), blank, slotFree, 0, blank, -1},
		"first write lacks the end":       {key(1, kekA), blank, slotKey, 1, key(1, kekA), -1},
		"first write lacks more":          {key(1, kekA), bad(key(1, kekA)), slotKey, 1, key(1, kekA), sideLen + 70},
		"reuse broke off":                 {bad(key(2, kekA)), erased(1), slotErased, 1, erased(1), -1},
		"reuse lacks the end":             {key(2, kekA), erased(1), slotKey, 2, key(2, kekA), -1},
		"erasure broke off at first":      {bad(erased(1)), key(1, kekA), slotKey, 1, key(1, kekA), -2},
		"erasure lacks the end":           {erased(1), key(1, kekA), slotErased, 1, erased(1), -1},
		"erasure lacks the start":         {key(1, kekA), erased(1), slotErased, 1, erased(1), -1},
		"erasure broke off at last":       {erased(1), bad(key(1, kekA)), slotErased, 1, erased(1), -1},
		"flip in the first side":          {bad(key(1, kekA)), key(1, kekA), slotKey, 1, key(1, kekA), 70},
		"flip in the second side":         {key(1, kekA), bad(key(1, kekA)), slotKey, 1, key(1, kekA), sideLen + 70},
		"flips in both":                   {bad(key(1, kekA)), bad(key(1, kekA)), slotDamaged, 0, nil, 0},
		"flip in an erased one":           {bad(erased(1)), erased(1), slotErased, 1, erased(1), -1},
		"second alone is bad":             {blank, bad(key(1, kekA)), slotDamaged, 0, nil, sideLen},
		"change of root, uncommitted":     {key(1, kekA), key(1, kekB), slotKey, 1, key(1, kekA), -1},
		"change of root, committed":       {key(1, kekB), key(1, kekA), slotKey, 1, key(1, kekA), -1},
		"another keyring's":               {key(1, kekB), key(1, kekB), slotForeign, 0, nil, -1},
		"another keyring's, reused":       {erased(1), key(2, kekB), slotForeign, 0, nil, -1},
		"erased amid a change of root":    {erased(1), key(1, kekB), slotErased, 1, erased(1), -1},
		"unknown state":                   {odd(0, 9), blank, slotFree, 0, blank, -1},
		"generation 0":                    {key(0, kekA), blank, slotFree, 0, blank, -1},
		"reserved byte":                   {odd(2, 1), key(1, kekA), slotKey, 1, key(1, kekA), 2},
		"reserved byte at the end":        {odd(121, 1), key(1, kekA), slotKey, 1, key(1, kekA), 121},
		"erased, and yet with a key":      {signed(full), key(1, kekA), slotKey, 1, key(1, kekA), -2},
		"another slot's bytes":            {elsewhere.encode(testFile, 6), elsewhere.encode(testFile, 6), slotDamaged, 0, nil, 0},
		"another file's bytes":            {elsewhere.encode(fileID{}, 5), elsewhere.encode(fileID{}, 5), slotDamaged, 0, nil, 0},
		"damage beside another keyring's": {bad(key(1, kekA)), key(1, kekB), slotForeign, 0, nil, -1},
	} {
		v := judge(append(bytes.Clone(c.a), c.b...), testFile, 5, kekA)
		var want []byte
		if c.want != nil {
			want = append(bytes.Clone(c.want), c.want...)
		}
		lostOK := v.lost == c.lost || c.lost == -2 && v.lost >= 0 && v.lost < sideLen
		if v.verdict != c.verdict || v.gen != c.gen || !bytes.Equal(v.want, want) || !lostOK {
			t.Errorf("%s: verdict %d, generation %d, lost %d, want %x", name, v.verdict, v.gen, v.lost, v.want)
		}
	}
}

// cuts calls check with every state in which a power cut can leave the file
// that op writes: what was synced is whole, and of the write after it any
// first part is there. synced counts the syncs that were done.
func cuts(base []byte, log []written, step int, check func(image []byte, synced int, what string)) {
	image, synced := base, 0
	for i, w := range log {
		if w.data == nil {
			synced++
			continue
		}
		for n := 0; n <= len(w.data); n += step {
			check(patched(image, w.at, w.data[:n]), synced, fmt.Sprintf("write %d cut after %d bytes", i, n))
		}
		image = patched(image, w.at, w.data)
	}
	check(image, synced, "nothing is cut")
}

func TestPowerCutWhileCreating(t *testing.T) {
	s, m, _ := scanned(t, smallFile(4), kekA)
	mustCreate(t, s, 1)
	mustCreate(t, s, 2)
	if _, _, found, err := s.erase(tagID{2}); err != nil || !found {
		t.Fatal(found, err)
	}
	base := bytes.Clone(m.bytes)
	for name, free := range map[string][]uint32{"fresh": {3}, "erased before": {1}} {
		s, m, _ := scanned(t, base, kekA)
		s.free = free
		mustCreate(t, s, 3)
		cuts(base, m.log, 1, func(image []byte, synced int, what string) {
			s, _, damages := scanned(t, image, kekA)
			if !holds(t, s, 1) || holds(t, s, 2) {
				t.Fatalf("%s, %s: other subjects changed", name, what)
			}
			if !holds(t, s, 3) {
				if synced > 0 {
					t.Fatalf("%s, %s: a durable key is gone", name, what)
				}
				mustCreate(t, s, 3)
			}
			for _, d := range damages {
				if !d.Repaired {
					t.Fatalf("%s, %s: %v", name, what, d)
				}
			}
		})
	}
}

func TestPowerCutWhileErasing(t *testing.T) {
	s, m, _ := scanned(t, smallFile(4), kekA)
	for tag := byte(1); tag <= 3; tag++ {
		mustCreate(t, s, tag)
	}
	base := bytes.Clone(m.bytes)
	m.log = nil
	if _, _, found, err := s.erase(tagID{2}); err != nil || !found {
		t.Fatal(found, err)
	}
	secret := bytes.Repeat([]byte{2}, 8)
	check := func(image []byte, synced int, what string) {
		s, m, _ := scanned(t, image, kekA)
		if !holds(t, s, 1) || !holds(t, s, 3) {
			t.Fatalf("%s: other subjects changed", what)
		}
		if holds(t, s, 2) {
			if synced > 0 {
				t.Fatalf("%s: the key is there again", what)
			}
			return
		}
		if bytes.Contains(m.bytes, secret) {
			t.Fatalf("%s: the erasure is not finished", what)
		}
	}
	cuts(base, m.log, 1, check)
	// A sector that was being written may hold anything.
	image, synced := base, 0
	for _, w := range m.log {
		if w.data == nil {
			synced++
			continue
		}
		for range 50 {
			garbage := make([]byte, len(w.data))
			for i := range garbage {
				garbage[i] = byte(rand.Uint32() | 0x80)
			}
			check(patched(image, w.at, garbage), synced, "garbage")
		}
		image = patched(image, w.at, w.data)
	}
	if bytes.Contains(image, secret) {
		t.Error("the key is still in the file")
	}
}

func TestPowerCutWhileChangingTheRoot(t *testing.T) {
	s, m, _ := scanned(t, smallFile(6), kekA)
	for tag := byte(1); tag <= 4; tag++ {
		mustCreate(t, s, tag)
	}
	if _, _, _, err := s.erase(tagID{4}); err != nil {
		t.Fatal(err)
	}
	base := bytes.Clone(m.bytes)
	check := func(kek kekID) func([]byte, int, string) {
		return func(image []byte, _ int, what string) {
			s, m, _ := scanned(t, image, kek)
			if !holds(t, s, 1) || !holds(t, s, 2) || !holds(t, s, 3) || holds(t, s, 4) {
				t.Fatalf("%s: not what it was", what)
			}
			for _, other := range []kekID{kekA, kekB} {
				if other != kek && bytes.Contains(m.bytes, other[:]) {
					t.Fatalf("%s: something is still wrapped by the other key", what)
				}
			}
		}
	}
	m.log = nil
	again := func(_ uint32, v side) (side, error) { return v, nil }
	if err := s.rewrap(kekB, again); err != nil {
		t.Fatal(err)
	}
	cuts(base, m.log, 16, check(kekA))
	ready := bytes.Clone(m.bytes)
	check(kekB)(ready, 0, "the moment after the commit")
	m.log = nil
	if err := s.commit(kekB); err != nil {
		t.Fatal(err)
	}
	cuts(ready, m.log, 16, check(kekB))
	if bytes.Contains(m.bytes, kekA[:]) {
		t.Error("something is still wrapped by the old key")
	}
	// It was never begun, after all.
	s, m, _ = scanned(t, base, kekA)
	if err := errors.Join(s.rewrap(kekB, again), s.commit(kekA)); err != nil || !bytes.Equal(m.bytes, base) {
		t.Errorf("taken back: %v", err)
	}
}

func TestBitFlips(t *testing.T) {
	s, m, _ := scanned(t, smallFile(3), kekA)
	for tag := byte(1); tag <= 3; tag++ {
		mustCreate(t, s, tag)
	}
	base := m.bytes
	middle := offsetOf(1)
	for at := middle; at < middle+slotLen; at++ {
		image := bytes.Clone(base)
		image[at] ^= 1 << (at % 8)
		s, m, damages := scanned(t, image, kekA)
		if len(damages) != 1 || damages[0] != (Damage{1, at, true}) {
			t.Fatalf("a flip at %d: %v", at, damages)
		}
		if !holds(t, s, 1) || !holds(t, s, 2) || !holds(t, s, 3) || !bytes.Equal(m.bytes, base) {
			t.Fatalf("a flip at %d was not repaired", at)
		}
		image[middle+(at-middle+sideLen)%slotLen] ^= 0x10 // and in the other side
		s, m, damages = scanned(t, image, kekA)
		if len(damages) != 1 || damages[0] != (Damage{1, middle, false}) || !bytes.Equal(m.bytes, image) {
			t.Fatalf("flips of both sides at %d: %v", at, damages)
		}
		if !holds(t, s, 1) || !holds(t, s, 3) {
			t.Fatal("others are harmed")
		}
	}
}

// A key that is damaged while the file is open is told so when it is used.
func TestFlipWhileOpen(t *testing.T) {
	s, m, _ := scanned(t, smallFile(3), kekA)
	mustCreate(t, s, 1)
	m.bytes[offsetOf(0)+40] ^= 1
	if !holds(t, s, 1) {
		t.Error("the other side has it")
	}
	m.bytes[offsetOf(0)+sideLen+40] ^= 1
	if _, _, _, err := s.find(tagID{1}); !errors.Is(err, ErrDamaged) {
		t.Errorf("find: %v", err)
	}
	if _, _, err := s.create(tagID{1}, plain(1)); !errors.Is(err, ErrDamaged) {
		t.Errorf("create must not give it another: %v", err)
	}
}

func TestReuse(t *testing.T) {
	s, m, _ := scanned(t, smallFile(1), kekA)
	for gen := uint32(1); gen <= 3; gen++ {
		number, v, err := s.create(tagID{byte(gen)}, plain(byte(gen)))
		if err != nil || number != 0 || v.gen != gen {
			t.Fatalf("generation %d: slot %d.%d, %v", gen, number, v.gen, err)
		}
		if _, _, found, err := s.erase(tagID{byte(gen)}); err != nil || !found {
			t.Fatal(found, err)
		}
		if _, _, found, err := s.erase(tagID{byte(gen)}); err != nil || found {
			t.Errorf("erased twice: %v, %v", found, err)
		}
		s, m, _ = scanned(t, m.bytes, kekA)
	}
}

func TestGrowth(t *testing.T) {
	s, m, _ := scanned(t, smallFile(1), kekA)
	mustCreate(t, s, 1)
	if number := mustCreate(t, s, 2); number != 1 || s.count != 1+chunkSlots {
		t.Errorf("slot %d of %d", number, s.count)
	}
	if want := headerLen + (1+chunkSlots)*slotLen; len(m.bytes) != want {
		t.Errorf("the file has %d bytes, want %d", len(m.bytes), want)
	}
	// A chunk that broke off is completed.
	s, m, _ = scanned(t, m.bytes[:headerLen+2*slotLen+100], kekA)
	if number := mustCreate(t, s, 3); number != 2 || !holds(t, s, 1) || !holds(t, s, 2) || (len(m.bytes)-headerLen)%slotLen != 0 {
		t.Errorf("slot %d, %d bytes", number, len(m.bytes))
	}
}

// failing is a file whose next write or sync fails.
type failing struct {
	*memory
	write, sync error
}

func (f *failing) WriteAt(p []byte, at int64) (int, error) {
	if f.write != nil {
		return 0, f.write
	}
	return f.memory.WriteAt(p, at)
}

func (f *failing) Sync() error {
	if f.sync != nil {
		return f.sync
	}
	return f.memory.Sync()
}

// After a write that failed nobody knows what is on the disk: nothing more is
// written, and nothing that was not written is used.
func TestWritesThatFail(t *testing.T) {
	broken := errors.New("input/output error")
	for name, set := range map[string]func(*failing){
		"write": func(f *failing) { f.write = broken },
		"sync":  func(f *failing) { f.sync = broken },
	} {
		for op, do := range map[string]func(*slots) error{
			"create": func(s *slots) error { _, _, err := s.create(tagID{9}, plain(9)); return err },
			"erase":  func(s *slots) error { _, _, _, err := s.erase(tagID{1}); return err },
		} {
			s, m, _ := scanned(t, smallFile(3), kekA)
			mustCreate(t, s, 1)
			mustCreate(t, s, 2)
			f := &failing{memory: m}
			s.file = f
			set(f)
			if err := do(s); airlock.CodeOf(err) != airlock.Unavailable || !errors.Is(err, broken) {
				t.Errorf("%s %s: %v", op, name, err)
			}
			*f = failing{memory: m}
			if _, _, err := s.create(tagID{3}, plain(3)); airlock.CodeOf(err) != airlock.Unavailable {
				t.Errorf("create after %s %s: %v", op, name, err)
			}
			if !holds(t, s, 2) {
				t.Error("others cannot be read")
			}
			if _, _, found, _ := s.find(tagID{9}); found {
				t.Error("a key that is not durable is used")
			}
		}
	}
	s, m, _ := scanned(t, smallFile(0), kekA)
	s.file = &failing{memory: m, write: broken}
	if _, _, err := s.create(tagID{1}, plain(1)); airlock.CodeOf(err) != airlock.NoSpace {
		t.Errorf("no room: %v", err)
	}
	s.file = m
	mustCreate(t, s, 1)
}

func TestForeignFileIsLeftAlone(t *testing.T) {
	s, m, _ := scanned(t, smallFile(3), kekA)
	mustCreate(t, s, 1)
	mustCreate(t, s, 2)
	image := bytes.Clone(m.bytes)
	copy(image[offsetOf(0):], zeroSide[:]) // would be repaired
	other := &memory{bytes: bytes.Clone(image)}
	x := &slots{file: other, id: testFile, kek: kekB, step: func(string) {}}
	if _, _, _, err := x.scan(int64(len(image))); airlock.CodeOf(err) != airlock.Conflict || len(other.log) != 0 {
		t.Errorf("%v, written %d times", err, len(other.log))
	}
}

func FuzzSlots(f *testing.F) {
	s := &slots{file: &memory{bytes: smallFile(3)}, id: testFile, kek: kekA, step: func(string) {}}
	if _, _, _, err := s.scan(headerLen + 3*slotLen); err != nil {
		f.Fatal(err)
	}
	for tag := byte(1); tag <= 2; tag++ {
		if _, _, err := s.create(tagID{tag}, plain(tag)); err != nil {
			f.Fatal(err)
		}
	}
	image := s.file.(*memory).bytes[headerLen:]
	f.Add(image, uint16(0))
	f.Add(image[:300], uint16(3))
	f.Add(image[:sideLen], uint16(1))
	f.Fuzz(func(t *testing.T, image []byte, sum uint16) {
		parseHeader(append(bytes.Clone(image), make([]byte, headerLen)...)[:headerLen])
		image = append(encodeHeader(testFile), image...)
		// Half of the inputs get checksums that fit, to come further.
		for i := range (len(image) - headerLen) / sideLen {
			if sum>>(i%16)&1 == 1 {
				b := image[headerLen+i*sideLen:]
				binary.LittleEndian.PutUint32(b[124:128], checksum(testFile, uint32(i/2), b[:124]))
			}
		}
		m := &memory{bytes: bytes.Clone(image)}
		s := &slots{file: m, id: testFile, kek: kekA, step: func(string) {}}
		used, _, damaged, err := s.scan(int64(len(image)))
		if err != nil {
			if !bytes.Equal(m.bytes, image) {
				t.Fatal("refused, and yet changed")
			}
			return
		}
		keys, free := s.numbers()
		if keys > used || keys+free > int(s.count) || damaged > int(s.count) {
			t.Fatalf("%d keys, %d used, %d free, %d damaged of %d", keys, used, free, damaged, s.count)
		}
		// What was repaired needs no repair, and each slot is of one kind.
		again := bytes.Clone(m.bytes)
		s2 := &slots{file: m, id: testFile, kek: kekA, step: func(string) {}}
		used2, _, _, err := s2.scan(int64(len(image)))
		if err != nil || used2 != used || !bytes.Equal(m.bytes, again) || len(s2.index) != len(s.index) || !slices.Equal(s2.free, s.free) {
			t.Fatalf("another scan finds something else: %v", err)
		}
		for tag, number := range s.index {
			if _, v, found, err := s.find(tag); err != nil || !found || v.tag != tag {
				t.Fatalf("slot %d: %v, %v", number, found, err)
			}
		}
	})
}

// Between a lookup and a read a slot may become another subject's.
func TestSlotOfAnother(t *testing.T) {
	s, _, _ := scanned(t, smallFile(2), kekA)
	number := mustCreate(t, s, 1)
	s.index[tagID{9}] = number
	if _, _, found, err := s.find(tagID{9}); found || err != nil {
		t.Errorf("another subject's key is given out: %v", err)
	}
}
