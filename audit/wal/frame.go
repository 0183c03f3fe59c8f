package wal

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"hash/crc32"
	"math"
)

// A segment is a file of a fixed size. Its first sector says which one it is;
// then come frames without gaps, each from the start of a sector on; then
// zeros. All numbers are big endian, all sizes in bytes.
//
//	segment: "AIRLOCKW", version u32, zero u32, ordinal u64, size u64,
//	         zeros up to 508, CRC-32C of what is before it u32
//	frame:   "AWAL", version u16, zero u16, length u32, count u32,
//	         first number u64, hash of the frame before [32], hash [32],
//	         zero u32, CRC-32C of what is before it u32;
//	         count times: length u32, record;
//	         "done"; zeros up to the end of the sector
//
// A frame's length has its header and "done" in it, not the zeros. Its hash is
// the SHA-256 of its first 56 bytes and of all from byte 96 to its length, and
// so is chained with all frames before. The first frame of all has a hash of
// zeros before it.
//
// A disk writes a sector or does not, and may write the sectors of one frame
// in any order; the system copies whole pages, so that a killed process leaves
// whole sectors too. So a frame of which a power cut left a part has a sector of
// zeros; one without such a sector and with a wrong hash was altered later.
const (
	sector      = 512
	version     = 1
	headerSize  = 96
	hashedSize  = 56 // of the header
	lengthSize  = 4
	maxFrame    = 1 << 20 // with its zeros
	ordinalName = "%016d.wal"
)

var (
	segmentMagic = []byte("AIRLOCKW")
	frameMagic   = []byte("AWAL")
	trailer      = []byte("done") // so that a frame's last sector is never zeros
	castagnoli   = crc32.MakeTable(crc32.Castagnoli)
	zeros        [sector]byte
)

type digest [sha256.Size]byte

type header struct {
	length     int64
	count      uint32
	first      uint64
	prev, hash digest
}

func (h header) next() uint64 { return h.first + uint64(h.count) }

// size is the length with the zeros behind.
func (h header) size() int64 { return padded(h.length) }

func padded(n int64) int64 { return (n + sector - 1) &^ (sector - 1) }

// frameSize is what a frame takes whose records, with their lengths, have n bytes.
func frameSize(n int) int64 { return padded(int64(headerSize + n + len(trailer))) }

// seal makes a whole frame of buf, which has room for the header and then the
// records with their lengths.
func seal(buf []byte, first uint64, count uint32, prev digest) ([]byte, header) {
	buf = append(buf, trailer...)
	h := header{length: int64(len(buf)), count: count, first: first, prev: prev}
	copy(buf, frameMagic)
	binary.BigEndian.PutUint16(buf[4:], version)
	binary.BigEndian.PutUint16(buf[6:], 0)
	binary.BigEndian.PutUint32(buf[8:], uint32(h.length))
	binary.BigEndian.PutUint32(buf[12:], count)
	binary.BigEndian.PutUint64(buf[16:], first)
	copy(buf[24:], prev[:])
	h.hash = hashOf(buf)
	copy(buf[56:], h.hash[:])
	binary.BigEndian.PutUint32(buf[88:], 0)
	binary.BigEndian.PutUint32(buf[92:], checksum(buf[:92]))
	return append(buf, zeros[:h.size()-h.length]...), h
}

func checksum(b []byte) uint32 { return crc32.Checksum(b, castagnoli) }

func hashOf(frame []byte) (d digest) {
	s := sha256.New()
	s.Write(frame[:hashedSize])
	s.Write(frame[headerSize:])
	s.Sum(d[:0])
	return d
}

// parseHeader takes the header at the start of b, which has a sector or more.
func parseHeader(b []byte) (h header, ok bool) {
	if !bytes.Equal(b[:4], frameMagic) || checksum(b[:92]) != binary.BigEndian.Uint32(b[92:]) {
		return header{}, false
	}
	h.length = int64(binary.BigEndian.Uint32(b[8:]))
	h.count = binary.BigEndian.Uint32(b[12:])
	h.first = binary.BigEndian.Uint64(b[16:])
	copy(h.prev[:], b[24:])
	copy(h.hash[:], b[56:])
	ok = binary.BigEndian.Uint16(b[4:]) == version &&
		binary.BigEndian.Uint16(b[6:]) == 0 && binary.BigEndian.Uint32(b[88:]) == 0 &&
		h.count > 0 && h.first <= math.MaxUint64-uint64(h.count) &&
		h.length >= headerSize+int64(h.count)*lengthSize+int64(len(trailer)) && h.size() <= maxFrame
	return h, ok
}

// parseFrame returns the records of a frame with its zeros, of which h is the
// header. They are parts of b.
func parseFrame(h header, b []byte) (records [][]byte, ok bool) {
	body, rest := b[headerSize:h.length-int64(len(trailer))], b[h.length-int64(len(trailer)):]
	if !bytes.Equal(rest[:len(trailer)], trailer) || !isZero(rest[len(trailer):]) || hashOf(b[:h.length]) != h.hash {
		return nil, false
	}
	records = make([][]byte, 0, h.count)
	for range h.count {
		if len(body) < lengthSize {
			return nil, false
		}
		n := int64(binary.BigEndian.Uint32(body))
		body = body[lengthSize:]
		if n > int64(len(body)) {
			return nil, false
		}
		records = append(records, body[:n:n])
		body = body[n:]
	}
	return records, len(body) == 0
}

// hasZeroSector says whether a part of a frame was perhaps never written.
func hasZeroSector(b []byte) bool {
	for len(b) >= sector {
		if isZero(b[:sector]) {
			return true
		}
		b = b[sector:]
	}
	return false
}

func isZero(b []byte) bool {
	for len(b) > sector {
		if !bytes.Equal(b[:sector], zeros[:]) {
			return false
		}
		b = b[sector:]
	}
	return bytes.Equal(b, zeros[:len(b)])
}

// segmentHeader returns a segment's first sector.
func segmentHeader(ordinal uint64, size int64) []byte {
	b := make([]byte, sector)
	copy(b, segmentMagic)
	binary.BigEndian.PutUint32(b[8:], version)
	binary.BigEndian.PutUint64(b[16:], ordinal)
	binary.BigEndian.PutUint64(b[24:], uint64(size))
	binary.BigEndian.PutUint32(b[sector-4:], checksum(b[:sector-4]))
	return b
}

// parseSegmentHeader returns the version that is written in b, a segment's
// first sector; what else there is in it is known for our own version only.
func parseSegmentHeader(b []byte) (v uint32, ordinal uint64, size int64, ok bool) {
	if !bytes.Equal(b[:8], segmentMagic) || checksum(b[:sector-4]) != binary.BigEndian.Uint32(b[sector-4:]) {
		return 0, 0, 0, false
	}
	return binary.BigEndian.Uint32(b[8:]), binary.BigEndian.Uint64(b[16:]), int64(binary.BigEndian.Uint64(b[24:])), true
}

// The file "end" is written at a clean stop and removed when the log is opened
// again: "AIRLOCKE", number of the next record u64, hash of the last frame [32],
// CRC-32C of what is before it u32.
var endMagic = []byte("AIRLOCKE")

const endSize = 8 + 8 + sha256.Size + 4

func endMark(next uint64, last digest) []byte {
	b := append([]byte{}, endMagic...)
	b = binary.BigEndian.AppendUint64(b, next)
	b = append(b, last[:]...)
	return binary.BigEndian.AppendUint32(b, checksum(b))
}

func parseEndMark(b []byte) (next uint64, last digest, ok bool) {
	if len(b) != endSize || !bytes.Equal(b[:8], endMagic) || checksum(b[:endSize-4]) != binary.BigEndian.Uint32(b[endSize-4:]) {
		return 0, digest{}, false
	}
	return binary.BigEndian.Uint64(b[8:]), digest(b[16 : 16+sha256.Size]), true
}
