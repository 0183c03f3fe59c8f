package tiles

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math"
	"os"
	"syscall"

	"github.com/transparency-dev/merkle/compact"
	"github.com/transparency-dev/merkle/rfc6962"
	"github.com/transparency-dev/tessera/api/layout"
	"golang.org/x/mod/sumdb/tlog"
)

const (
	width      = layout.TileWidth
	tileBytes  = width * tlog.HashSize
	entryMost  = math.MaxUint16
	bundleMost = width * (2 + entryMost)
)

// Why a file that is there can't be what it should be, whoever asks.
var (
	errIrregular = errors.New("not a regular file")
	errOversize  = errors.New("larger than such a file can be")
)

// disk reads files below one directory. It never leaves it, whatever symbolic
// links lie there, and never waits on what is not a regular file.
type disk struct {
	open func(name string) (fs.File, error)
}

func newDisk(root *os.Root) disk {
	return disk{func(name string) (fs.File, error) {
		return root.OpenFile(name, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	}}
}

// read returns the bytes of a file that has no more than most of them. They
// are in buf if that has room.
func (d disk) read(name string, most int64, buf []byte) ([]byte, error) {
	f, err := d.open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	info, err := f.Stat()
	switch {
	case err != nil:
		return nil, err
	case !info.Mode().IsRegular():
		return nil, &fs.PathError{Op: "read", Path: name, Err: errIrregular}
	case info.Size() > most:
		return nil, &fs.PathError{Op: "read", Path: name, Err: errOversize}
	}
	size := int(info.Size())
	if cap(buf) < size {
		buf = make([]byte, size)
	}
	n, err := io.ReadFull(f, buf[:size])
	if err == io.EOF || err == io.ErrUnexpectedEOF { // it shrank meanwhile
		err = nil
	}
	return buf[:n], err
}

// either reads the file of a part that is as long as the tree says, or, if it
// was removed because the tree has grown, the whole that took its place. It
// returns the name of the file that it read, or of the one that is missing.
func (d disk) either(path func(p uint8) string, p uint8, most int64, buf []byte) (data []byte, name string, err error) {
	name = path(p)
	data, err = d.read(name, most, buf)
	if p > 0 && errors.Is(err, fs.ErrNotExist) {
		if whole, err := d.read(path(0), most, buf); !errors.Is(err, fs.ErrNotExist) {
			return whole, path(0), err
		}
	}
	return data, name, err
}

func (d disk) bundle(shard string, index, size uint64, buf []byte) (data []byte, name string, err error) {
	return d.either(func(p uint8) string { return shard + "/" + layout.EntriesPath(index, p) },
		layout.PartialTileSize(0, index, size), bundleMost, buf)
}

// tile returns the hashes of a tile as a tree of size has them: n is how many.
func (d disk) tile(shard string, level, index, size uint64) (hashes []tlog.Hash, name string, err error) {
	p := layout.PartialTileSize(level, index, size)
	n := width
	if p > 0 {
		n = int(p)
	}
	data, name, err := d.either(func(p uint8) string { return shard + "/" + layout.TilePath(level, index, p) }, p, tileBytes, nil)
	if err != nil {
		return nil, name, err
	}
	whole := name == shard+"/"+layout.TilePath(level, index, 0)
	if whole && len(data) != tileBytes || !whole && len(data) != n*tlog.HashSize {
		return nil, name, &fs.PathError{Op: "read", Path: name, Err: errTileLength}
	}
	hashes = make([]tlog.Hash, n)
	for i := range hashes {
		copy(hashes[i][:], data[i*tlog.HashSize:])
	}
	return hashes, name, nil
}

var errTileLength = errors.New("not as long as a tile is")

// fetcher gives the tiles of a shard to Tessera's client.
func (d disk) fetcher(shard string) func(ctx context.Context, level, index uint64, p uint8) ([]byte, error) {
	return func(ctx context.Context, level, index uint64, p uint8) ([]byte, error) {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		data, _, err := d.either(func(p uint8) string { return shard + "/" + layout.TilePath(level, index, p) }, p, tileBytes, nil)
		return data, err
	}
}

// splitBundle calls fn with each entry of a bundle until it returns false. It
// answers how many there were, and an error if the bytes don't end with one.
func splitBundle(data []byte, fn func(i int, entry []byte) bool) (n int, err error) {
	for len(data) > 0 {
		if len(data) < 2 {
			return n, fmt.Errorf("one byte is left over behind entry %d of the file", n)
		}
		length := int(binary.BigEndian.Uint16(data))
		if len(data) < 2+length {
			return n, fmt.Errorf("entry %d of the file should have %d bytes and %d are left", n, length, len(data)-2)
		}
		if n == width {
			return n, fmt.Errorf("more than %d entries", width)
		}
		if !fn(n, data[2:2+length:2+length]) {
			return n + 1, nil
		}
		n, data = n+1, data[2+length:]
	}
	return n, nil
}

// nodes answers the hashes of count nodes of the lowest row of tiles of a
// level, or nil if they are not known.
type nodes func(level, index, count uint64) []tlog.Hash

// rangeOf computes the compact range of the first size entries.
func rangeOf(size uint64, get nodes) (*compact.Range, error) {
	ids := compact.RangeNodes(0, size, nil)
	hashes := make([][]byte, 0, len(ids))
	for _, id := range ids {
		sub := uint64(id.Level) % layout.TileHeight
		row := get(uint64(id.Level)/layout.TileHeight, id.Index<<sub, 1<<sub)
		if row == nil {
			return nil, errUnknownNode
		}
		h := fold(row)
		hashes = append(hashes, h[:])
	}
	return hashing.NewRange(0, size, hashes)
}

var (
	errUnknownNode = errors.New("a hash that is needed is not known")
	hashing        = compact.RangeFactory{Hash: rfc6962.DefaultHasher.HashChildren}
)

// rootOf is the root hash of a range that begins at 0.
func rootOf(r *compact.Range) (tlog.Hash, error) {
	if r.End() == 0 {
		return tlog.Hash(rfc6962.DefaultHasher.EmptyRoot()), nil
	}
	root, err := r.GetRootHash(nil)
	if err != nil {
		return tlog.Hash{}, err
	}
	return tlog.Hash(root), nil
}

// fold is the root of a complete subtree; row has 1, 2, 4, … 256 hashes.
func fold(row []tlog.Hash) tlog.Hash {
	var buf [width / 2]tlog.Hash
	if len(row) == 1 {
		return row[0]
	}
	for i := range len(row) / 2 {
		buf[i] = tlog.NodeHash(row[2*i], row[2*i+1])
	}
	for n := len(row) / 2; n > 1; n /= 2 {
		for i := range n / 2 {
			buf[i] = tlog.NodeHash(buf[2*i], buf[2*i+1])
		}
	}
	return buf[0]
}

// tileNodes answers nodes from the tiles of a tree of size, as they lie there.
func (d disk) tileNodes(shard string, size uint64, failed *error) nodes {
	return func(level, index, count uint64) []tlog.Hash {
		hashes, _, err := d.tile(shard, level, index/width, size)
		if err != nil {
			*failed = err
			return nil
		}
		at := index % width
		if at+count > uint64(len(hashes)) {
			return nil
		}
		return hashes[at : at+count]
	}
}

// loadRange computes the compact range of the first size entries from tiles.
func (d disk) loadRange(shard string, size uint64) (*compact.Range, error) {
	var failed error
	r, err := rangeOf(size, d.tileNodes(shard, size, &failed))
	if failed != nil {
		return nil, failed
	}
	return r, err
}
