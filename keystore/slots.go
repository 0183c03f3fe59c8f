package keystore

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"sync"

	"golang.org/x/sys/unix"

	"airlock.dev/airlock"
)

// The file of subject keys is one page that names it and then slots of a
// fixed size, written in place and never moved, so that overwriting one
// leaves no other copy:
//
//	header  0  "airlock-subjects"   16 bytes
//	       16  format, slot length  2 × uint32
//	       24  the file's id        16 bytes, random; the keyring names it too
//	       40  CRC-32C of the above uint32; zeros up to 4096
//
// A slot is two equal sides of 128 bytes. At any moment of any change one
// side is whole, so that neither a crash nor a flipped bit loses a key, and
// neither can bring one back:
//
//	side    0  state: 1 a key, 2 erased; a side of zeros was never used
//	        4  generation           uint32: which key of this slot, from 1
//	        8  keyring key          8 bytes: which one wraps it
//	       16  tag                  16 bytes: HMAC of the subject, to find it
//	       32  nonce                24 bytes
//	       56  key and salt         64 bytes: 32 and 16, encrypted
//	      120  zeros
//	      124  CRC-32C              over file id, slot number and the above
//
// Integers are little-endian. An erased side has a state, a generation and a
// checksum; everything else in it is zero.
const (
	slotsMagic  = "airlock-subjects"
	slotsFormat = 1
	headerLen   = 4096
	sideLen     = 128
	slotLen     = 2 * sideLen
	kekIDLen    = 8
	tagIDLen    = 16
	fileIDLen   = 16
	secretLen   = keyLen + pseudonymSaltLen
	chunkSlots  = 4096    // preallocated at one time: 1 MiB
	maxSlots    = 1 << 28 // 64 GiB; numbers fit an int on all machines

	pseudonymSaltLen = 16
)

type (
	kekID  [kekIDLen]byte
	tagID  [tagIDLen]byte
	fileID [fileIDLen]byte
)

const (
	stateKey    = 1
	stateErased = 2
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// side is one side of a slot, decoded.
type side struct {
	state  byte
	gen    uint32
	kek    kekID
	tag    tagID
	nonce  [nonceLen]byte
	secret [secretLen + tagLen]byte
}

type sideForm int

const (
	sideBlank sideForm = iota // zeros: never used
	sideBad                   // half written or damaged
	sideGood
)

func checksum(id fileID, slot uint32, body []byte) uint32 {
	var n [4]byte
	binary.LittleEndian.PutUint32(n[:], slot)
	sum := crc32.Update(0, castagnoli, id[:])
	return crc32.Update(crc32.Update(sum, castagnoli, n[:]), castagnoli, body)
}

func (s *side) encode(id fileID, slot uint32) []byte {
	b := make([]byte, sideLen)
	b[0] = s.state
	binary.LittleEndian.PutUint32(b[4:], s.gen)
	copy(b[8:], s.kek[:])
	copy(b[16:], s.tag[:])
	copy(b[32:], s.nonce[:])
	copy(b[56:], s.secret[:])
	binary.LittleEndian.PutUint32(b[124:], checksum(id, slot, b[:124]))
	return b
}

var zeroSide [sideLen]byte

func parseSide(b []byte, id fileID, slot uint32) (s side, form sideForm) {
	if bytes.Equal(b, zeroSide[:]) {
		return s, sideBlank
	}
	if binary.LittleEndian.Uint32(b[124:]) != checksum(id, slot, b[:124]) {
		return s, sideBad
	}
	s.state, s.gen = b[0], binary.LittleEndian.Uint32(b[4:])
	copy(s.kek[:], b[8:])
	copy(s.tag[:], b[16:])
	copy(s.nonce[:], b[32:])
	copy(s.secret[:], b[56:])
	odd := b[1] != 0 || b[2] != 0 || b[3] != 0 || !bytes.Equal(b[120:124], zeroSide[:4]) || s.gen == 0
	switch s.state {
	case stateKey:
	case stateErased:
		odd = odd || !bytes.Equal(b[8:124], zeroSide[:116])
	default:
		odd = true
	}
	if odd {
		return side{}, sideBad
	}
	return s, sideGood
}

type slotState int

const (
	slotFree    slotState = iota // never used; gen is 0
	slotKey                      // has a key
	slotErased                   // had keys, the last one gen
	slotDamaged                  // has something that cannot be read
	slotForeign                  // has a key that another keyring wraps
)

// slot is what the two sides of one say together.
type slot struct {
	side
	verdict slotState
	// want is what the bytes should be, if they are not: what a crash left
	// half done is finished, and what one side lost is taken from the other.
	want []byte
	lost int // the offset in the slot of the first byte of a key's damaged side, or -1
}

// judge decides what a slot of slotLen bytes holds for the keyring key kek.
func judge(raw []byte, id fileID, number uint32, kek kekID) slot {
	var sides [2]side
	var forms [2]sideForm
	best, foreign := -1, uint32(0)
	for i := range sides {
		s, form := parseSide(raw[i*sideLen:(i+1)*sideLen], id, number)
		sides[i], forms[i] = s, form
		switch {
		case form != sideGood:
		case s.state == stateKey && s.kek != kek:
			// Of a change of the root key that was not finished, in either direction.
			foreign = max(foreign, s.gen)
		case best < 0 || s.gen > sides[best].gen || s.gen == sides[best].gen && s.state == stateErased:
			best = i
		}
	}
	switch {
	case best >= 0 && sides[best].gen >= foreign:
	case foreign > 0:
		return slot{verdict: slotForeign, lost: -1}
	case forms == [2]sideForm{sideBlank, sideBlank}:
		return slot{verdict: slotFree, lost: -1}
	case forms == [2]sideForm{sideBad, sideBlank}:
		// The first write of a key broke off. Nothing was sealed with it.
		return slot{verdict: slotFree, want: make([]byte, slotLen), lost: -1}
	default:
		return slot{verdict: slotDamaged, lost: max(0, slices.Index(forms[:], sideBad)) * sideLen}
	}
	v := slot{side: sides[best], verdict: slotKey, lost: -1}
	if v.state == stateErased {
		v.verdict = slotErased
	}
	good := raw[best*sideLen : (best+1)*sideLen]
	other := 1 - best
	bad := raw[other*sideLen : (other+1)*sideLen]
	if bytes.Equal(good, bad) {
		return v
	}
	v.want = append(bytes.Clone(good), good...)
	if v.verdict == slotKey && forms[other] == sideBad {
		for i := range good {
			if good[i] != bad[i] {
				v.lost = other*sideLen + i
				break
			}
		}
	}
	return v
}

// storage is the file: what tests put in its place loses what is not synced.
type storage interface {
	io.ReaderAt
	io.WriterAt
	Sync() error // all that was written is durable
	Close() error
}

// syncedFile syncs data and length, which is all that can be lost of a file
// that exists.
type syncedFile struct{ *os.File }

func (f syncedFile) Sync() error {
	for {
		if err := unix.Fdatasync(int(f.Fd())); err != unix.EINTR {
			return err
		}
	}
}

// slots is the file of subject keys.
type slots struct {
	file storage
	id   fileID
	step func(string) // told of each step of a change, for tests that end the process there

	// writer is held by whoever changes slots, from the choice of one until
	// it is durable. What follows is its as well.
	writer sync.Mutex
	free   []uint32
	failed error // of a write or sync: what is on the disk is not known any more

	// mu guards what follows and keeps readers from half-written slots.
	mu    sync.RWMutex
	index map[tagID]uint32
	count uint32
	kek   kekID
}

// Damage is a slot whose bytes are not what was written.
type Damage struct {
	Slot     uint32 `json:"slot"`
	Offset   int64  `json:"offset"`   // in the file of subject keys, in bytes
	Repaired bool   `json:"repaired"` // the slot's other side had the key
}

func (d Damage) String() string {
	if d.Repaired {
		return fmt.Sprintf("slot %d was damaged or half written at offset %d and was repaired from its other side", d.Slot, d.Offset)
	}
	return fmt.Sprintf("slot %d is damaged at offset %d: what was sealed with its key cannot be read", d.Slot, d.Offset)
}

// maxDamages bounds the list; the count goes on.
const maxDamages = 100

func offsetOf(slot uint32) int64 { return headerLen + int64(slot)*slotLen }

func encodeHeader(id fileID) []byte {
	b := make([]byte, headerLen)
	copy(b, slotsMagic)
	binary.LittleEndian.PutUint32(b[16:], slotsFormat)
	binary.LittleEndian.PutUint32(b[20:], slotLen)
	copy(b[24:], id[:])
	binary.LittleEndian.PutUint32(b[40:], crc32.Checksum(b[:40], castagnoli))
	return b
}

func parseHeader(b []byte) (id fileID, err error) {
	if len(b) != headerLen || string(b[:16]) != slotsMagic {
		return id, errors.New("it is no file of subject keys")
	}
	if binary.LittleEndian.Uint32(b[40:]) != crc32.Checksum(b[:40], castagnoli) {
		return id, errors.New("its header is damaged at offset 0")
	}
	if format, length := binary.LittleEndian.Uint32(b[16:]), binary.LittleEndian.Uint32(b[20:]); format != slotsFormat || length != slotLen {
		return id, fmt.Errorf("it has format %d with slots of %d bytes and this airlock knows %d with %d", format, length, slotsFormat, slotLen)
	}
	copy(id[:], b[24:])
	return id, nil
}

// createSlots makes the file with room for one chunk. It gets its name when
// it is whole; no key is in it yet.
func createSlots(path string) error {
	half := path + ".new"
	if err := shred(half); err != nil {
		return err
	}
	f, err := os.OpenFile(half, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return fmt.Errorf("make the file of subject keys: %w", err)
	}
	_, err = f.Write(append(encodeHeader(fileID(random(fileIDLen))), make([]byte, chunkSlots*slotLen)...))
	if err := errors.Join(err, f.Sync(), f.Close()); err != nil {
		return fmt.Errorf("write the file of subject keys: %w", err)
	}
	if err := os.Rename(half, path); err != nil {
		return fmt.Errorf("name the file of subject keys: %w", err)
	}
	return syncDir(filepath.Dir(path))
}

// openSlotFile opens the file at path and returns its id and length.
func openSlotFile(path string) (_ *os.File, id fileID, size int64, err error) {
	f, err := os.OpenFile(path, os.O_RDWR|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, id, 0, fmt.Errorf("open the file of subject keys: %w", err)
	}
	defer func() {
		if err != nil {
			f.Close()
		}
	}()
	info, err := f.Stat()
	if err != nil {
		return nil, id, 0, fmt.Errorf("look at the file of subject keys: %w", err)
	}
	if !info.Mode().IsRegular() || info.Mode().Perm()&0o077 != 0 {
		return nil, id, 0, airlock.Invalidf("--keys-dir", "make it a regular file with mode 0600", "%s has mode %v", path, info.Mode())
	}
	header := make([]byte, headerLen)
	if _, err := io.ReadFull(io.NewSectionReader(f, 0, headerLen), header); err != nil && err != io.EOF && err != io.ErrUnexpectedEOF {
		return nil, id, 0, fmt.Errorf("read the file of subject keys: %w", err)
	}
	if id, err = parseHeader(header); err != nil {
		return nil, id, 0, &airlock.Error{Code: airlock.Conflict, Message: fmt.Sprintf("%s cannot be used", path), Hint: "restore it from the backup of the keys directory", Err: err}
	}
	return f, id, info.Size(), nil
}

// scan reads all slots, finishes what a crash left half done, and builds the
// index. used counts slots that have or had a key.
func (s *slots) scan(size int64) (used int, damages []Damage, damaged int, err error) {
	count := (size - headerLen) / slotLen // a part of a slot at the end is of a chunk that broke off
	if count < 0 {
		count = 0
	}
	if count > maxSlots {
		return 0, nil, 0, airlock.Errorf(airlock.Conflict, "the file of subject keys has %d bytes, more than it ever has", size)
	}
	s.index, s.count = make(map[tagID]uint32, count/2), uint32(count)
	var fix []uint32
	foreign, firstForeign := 0, uint32(0)
	buf := make([]byte, min(chunkSlots, s.count)*slotLen)
	for at := uint32(0); at < s.count; at += chunkSlots {
		n := min(chunkSlots, s.count-at)
		part := buf[:int(n)*slotLen]
		if _, err := s.file.ReadAt(part, offsetOf(at)); err != nil {
			return 0, nil, 0, fmt.Errorf("read the subject keys at offset %d: %w", offsetOf(at), err)
		}
		for i := range n {
			number := at + i
			v := judge(part[int(i)*slotLen:int(i+1)*slotLen], s.id, number, s.kek)
			if v.want != nil {
				fix = append(fix, number)
			}
			if v.verdict == slotDamaged || v.lost >= 0 {
				if damaged++; len(damages) < maxDamages {
					damages = append(damages, Damage{number, offsetOf(number) + int64(v.lost), v.verdict != slotDamaged})
				}
			}
			switch v.verdict {
			case slotFree:
				s.free = append(s.free, number)
				continue
			case slotErased:
				s.free = append(s.free, number)
			case slotKey:
				if twin, ok := s.index[v.tag]; ok {
					return 0, nil, 0, airlock.Errorf(airlock.Conflict, "slots %d and %d of the subject keys are of one subject: restore the file from the backup of the keys directory", twin, number)
				}
				s.index[v.tag] = number
			case slotForeign:
				if foreign++; foreign == 1 {
					firstForeign = number
				}
			}
			used++
		}
	}
	if foreign > 0 { // nothing was changed yet
		return 0, nil, 0, &airlock.Error{Code: airlock.Conflict, Message: fmt.Sprintf("%d subject keys, the first in slot %d, are wrapped by another keyring", foreign, firstForeign),
			Hint: "restore the keyring.json that was written last; the one here may be from before a change of the root key"}
	}
	slices.Reverse(s.free) // the last is taken first
	if err := s.repair(fix); err != nil {
		return 0, nil, 0, fmt.Errorf("repair subject keys: %w", err)
	}
	return used, damages, damaged, nil
}

func (s *slots) repair(numbers []uint32) error {
	if len(numbers) == 0 {
		return nil
	}
	raw := make([]byte, slotLen)
	for _, n := range numbers {
		if _, err := s.file.ReadAt(raw, offsetOf(n)); err != nil {
			return err
		}
		if v := judge(raw, s.id, n, s.kek); v.want != nil {
			if _, err := s.file.WriteAt(v.want, offsetOf(n)); err != nil {
				return err
			}
		}
	}
	return s.file.Sync()
}

// read returns what a slot holds now. number is below count.
func (s *slots) read(number uint32) (slot, error) {
	raw := make([]byte, slotLen)
	s.mu.RLock()
	defer s.mu.RUnlock()
	if _, err := s.file.ReadAt(raw, offsetOf(number)); err != nil {
		return slot{}, fmt.Errorf("read slot %d of the subject keys: %w", number, err)
	}
	return judge(raw, s.id, number, s.kek), nil
}

func (s *slots) lookup(tag tagID) (number uint32, ok bool) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	number, ok = s.index[tag]
	return number, ok
}

func (s *slots) has(number uint32) bool {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return number < s.count
}

// find returns the slot of a subject that has a key.
func (s *slots) find(tag tagID) (number uint32, v slot, found bool, err error) {
	number, ok := s.lookup(tag)
	if !ok {
		return 0, slot{}, false, nil
	}
	if v, err = s.read(number); err != nil {
		return 0, slot{}, false, err
	}
	switch {
	case v.verdict == slotKey && v.tag == tag:
		return number, v, true, nil
	case v.verdict == slotDamaged:
		return 0, slot{}, false, damagedSlot(number, v)
	}
	return 0, slot{}, false, nil // it is being erased, or was and is another's by now
}

func damagedSlot(number uint32, v slot) error {
	return airlock.Errorf(airlock.Internal, "slot %d of the subject keys is damaged at offset %d: restore the file from the backup of the keys directory", number, offsetOf(number)+int64(v.lost)).Because(ErrDamaged)
}

// create returns the slot of a subject and makes one if it has none. sealed
// encrypts a new key for the place that it gets. It is durable.
func (s *slots) create(tag tagID, sealed func(number, gen uint32, v *side) error) (uint32, slot, error) {
	s.writer.Lock()
	defer s.writer.Unlock()
	if s.failed != nil {
		return 0, slot{}, s.failed
	}
	if number, v, found, err := s.find(tag); err != nil || found {
		return number, v, err
	}
	if len(s.free) == 0 {
		if err := s.grow(); err != nil {
			return 0, slot{}, err
		}
	}
	number := s.free[len(s.free)-1]
	before, err := s.read(number)
	if err != nil {
		return 0, slot{}, err
	}
	if before.verdict != slotFree && before.verdict != slotErased || before.gen == 1<<32-1 {
		s.free = s.free[:len(s.free)-1]
		return 0, slot{}, damagedSlot(number, before)
	}
	v := slot{verdict: slotKey, lost: -1, side: side{state: stateKey, gen: before.gen + 1, kek: s.kek, tag: tag}}
	if err := sealed(number, v.gen, &v.side); err != nil {
		return 0, slot{}, err
	}
	raw := v.encode(s.id, number)
	s.free = s.free[:len(s.free)-1]
	if err := s.write(append(raw, raw...), offsetOf(number), "create"); err != nil {
		return 0, slot{}, s.fail("write a subject key", err)
	}
	s.mu.Lock()
	s.index[tag] = number
	s.mu.Unlock()
	return number, v, nil
}

// grow makes room for a chunk of slots. The caller holds writer.
func (s *slots) grow() error {
	if s.count+chunkSlots > maxSlots {
		return airlock.Errorf(airlock.Exhausted, "there are %d subject keys and that is the most", s.count)
	}
	// Zeros, not a hole: nothing in the file moves when a slot is written.
	if _, err := s.file.WriteAt(make([]byte, chunkSlots*slotLen), offsetOf(s.count)); err != nil {
		return airlock.Errorf(airlock.NoSpace, "there is no room for another subject key: free the disk of the keys directory").Because(err)
	}
	if err := s.file.Sync(); err != nil {
		return s.fail("make room for subject keys", err)
	}
	for i := uint32(chunkSlots); i > 0; i-- {
		s.free = append(s.free, s.count+i-1)
	}
	s.mu.Lock()
	s.count += chunkSlots
	s.mu.Unlock()
	return nil
}

// write puts bytes in place and returns when they are durable. The caller
// holds writer.
func (s *slots) write(raw []byte, at int64, what string) error {
	s.step(what + " begin")
	s.mu.Lock()
	_, err := s.file.WriteAt(raw, at)
	s.mu.Unlock()
	if err != nil {
		return err
	}
	s.step(what + " written")
	if err := s.file.Sync(); err != nil {
		return err
	}
	s.step(what + " synced")
	return nil
}

// fail remembers that the disk may hold something else than what was written,
// so that nothing more is until the file was read again.
func (s *slots) fail(what string, err error) error {
	s.failed = airlock.Errorf(airlock.Unavailable, "the subject keys cannot be written: free or replace the disk of the keys directory and restart the server").Because(fmt.Errorf("%s: %w", what, err))
	return s.failed
}

// erase overwrites a subject's key and returns its slot. When it returns
// without an error the key is gone from the disk and will not come back. One
// side says so first: from then on a crash leaves an erasure to be finished.
func (s *slots) erase(tag tagID) (number uint32, v slot, found bool, err error) {
	s.writer.Lock()
	defer s.writer.Unlock()
	if s.failed != nil {
		return 0, slot{}, false, s.failed
	}
	number, v, found, err = s.find(tag)
	if err != nil || !found {
		return 0, slot{}, false, err
	}
	gone := side{state: stateErased, gen: v.gen}
	raw := gone.encode(s.id, number)
	if err := s.write(raw, offsetOf(number), "erase first side"); err != nil {
		return 0, slot{}, false, s.fail("erase a subject key", err)
	}
	s.mu.Lock()
	delete(s.index, tag)
	s.mu.Unlock()
	if err := s.write(raw, offsetOf(number)+sideLen, "erase second side"); err != nil {
		return 0, slot{}, false, s.fail("erase a subject key", err)
	}
	s.free = append(s.free, number)
	return number, v, true, nil
}

// rewrap writes every key's second side wrapped by the keyring key next, and
// leaves the first one: until commit, the file can be read with the old key,
// and after it with the next. A process that ends in between leaves a file
// that scan finishes in the direction that the keyring says.
func (s *slots) rewrap(next kekID, again func(number uint32, v side) (side, error)) error {
	return s.sweep("rewrap", func(raw []byte, number uint32) error {
		v := judge(raw, s.id, number, s.kek)
		if v.verdict != slotKey {
			return nil
		}
		renewed, err := again(number, v.side)
		if err != nil {
			return fmt.Errorf("wrap slot %d again: %w", number, err)
		}
		renewed.kek = next
		copy(raw, v.encode(s.id, number))
		copy(raw[sideLen:], renewed.encode(s.id, number))
		return nil
	})
}

// commit makes next the key by which slots are read, and overwrites every
// side that another one wraps.
func (s *slots) commit(next kekID) error {
	s.mu.Lock()
	s.kek = next
	s.mu.Unlock()
	return s.sweep("commit", func(raw []byte, number uint32) error {
		if v := judge(raw, s.id, number, next); v.want != nil {
			copy(raw, v.want)
		}
		return nil
	})
}

// sweep passes every slot to change and writes what it made of it.
func (s *slots) sweep(what string, change func(raw []byte, number uint32) error) error {
	s.writer.Lock()
	defer s.writer.Unlock()
	if s.failed != nil {
		return s.failed
	}
	buf := make([]byte, min(chunkSlots, s.count)*slotLen)
	for at := uint32(0); at < s.count; at += chunkSlots {
		n := min(chunkSlots, s.count-at)
		part := buf[:int(n)*slotLen]
		if _, err := s.file.ReadAt(part, offsetOf(at)); err != nil {
			return fmt.Errorf("read the subject keys at offset %d: %w", offsetOf(at), err)
		}
		before := bytes.Clone(part)
		for i := range n {
			if err := change(part[int(i)*slotLen:int(i+1)*slotLen], at+i); err != nil {
				return err
			}
		}
		if bytes.Equal(before, part) {
			continue
		}
		s.step(what + " chunk")
		s.mu.Lock()
		_, err := s.file.WriteAt(part, offsetOf(at))
		s.mu.Unlock()
		if err != nil {
			return s.fail("wrap subject keys again", err)
		}
	}
	s.step(what + " written")
	if err := s.file.Sync(); err != nil {
		return s.fail("wrap subject keys again", err)
	}
	return nil
}

func (s *slots) numbers() (keys, free int) {
	s.writer.Lock()
	defer s.writer.Unlock()
	return len(s.index), len(s.free)
}

// idText is how the keyring names a file of subject keys.
func idText(id []byte) string { return hex.EncodeToString(id) }

func exists(path string) (bool, error) {
	_, err := os.Lstat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	return err == nil, err
}
