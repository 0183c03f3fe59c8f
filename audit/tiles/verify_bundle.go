package tiles

import (
	"bytes"
	"io/fs"
	"regexp"
	"slices"
	"strings"

	"github.com/transparency-dev/tessera/api/layout"
	"golang.org/x/mod/sumdb/tlog"
)

// inventory is what files a shard has.
type inventory struct {
	entries uint64 // that files could hold, signed or not
	highest uint64 // bundle, plus one
	count   uint64 // files of bundles
	parts   map[partOf][]uint8
}

// partOf names a tile, or with level -1 a bundle, of which parts are there.
type partOf struct {
	level int
	index uint64
}

// holesMost is how many bundles that are absent are looked for one by one.
const holesMost = 1 << 10

// bundles bounds the bundles that may be there. A checkpoint that nobody signed
// may say any size, and a file may have any name: what is allocated depends on
// how many files there are.
func (v inventory) bundles() uint64 { return min(v.highest, v.count+holesMost) }

var (
	tileForm    = regexp.MustCompile(`^tile/(entries|[0-9]|[1-5][0-9]|6[0-3])/((?:x[0-9]{3}/){0,5}[0-9]{3}(?:\.p/(?:[1-9][0-9]{0,2}))?)$`)
	tileDirForm = regexp.MustCompile(`^tile(?:/(?:entries|[0-9]|[1-5][0-9]|6[0-3])(?:(?:/x[0-9]{3}){0,5}(?:/[0-9]{3}\.p)?))?$`)
	// Tessera writes beside the target, with a random number behind the name.
	brokenForm = regexp.MustCompile(`^(?:checkpoint|\.state/(?:treeState|gcState|version)|tile/.*[0-9]{3}|tile/.*\.p/[0-9]+)[0-9]+$`)
)

// list walks through the shard's files. Symbolic links are not followed.
func (s *shardCheck) list() error {
	s.files.parts = map[partOf][]uint8{}
	return fs.WalkDir(s.tree, s.id, func(path string, d fs.DirEntry, err error) error {
		if stop := s.ctx.Err(); stop != nil {
			return stop
		}
		name := strings.TrimPrefix(path, s.id+"/")
		if err != nil {
			if p := fault(Problem{Shard: s.id, File: path, Seq: s.First}, err); p.Kind != Absent { // removed meanwhile
				s.found(p)
			}
			return nil
		}
		if d.IsDir() {
			switch {
			case path == s.id, name == ".state", tileDirForm.MatchString(name):
				return nil
			}
			s.stray(s.id, path)
			return fs.SkipDir
		}
		if !d.Type().IsRegular() {
			s.stray(s.id, path)
			return nil
		}
		switch name {
		case layout.CheckpointPath, ".state/treeState", ".state/treeState.lock", ".state/gcState", ".state/gcState.lock", ".state/publish.lock", ".state/version":
			return nil
		}
		if !s.place(name) {
			if brokenForm.MatchString(name) {
				s.remark(Problem{Kind: Stray, Shard: s.id, File: path, Seq: s.First, Text: "the file was left by a write that was interrupted, and means nothing"})
			} else {
				s.stray(s.id, path)
			}
		}
		return nil
	})
}

// place enters a tile or bundle into the inventory, if the file is named as one.
func (s *shardCheck) place(name string) bool {
	m := tileForm.FindStringSubmatch(name)
	if m == nil {
		return false
	}
	at := partOf{level: -1}
	var part uint8
	var err error
	if m[1] == "entries" {
		at.index, part, err = layout.ParseTileIndexPartial(m[2])
	} else {
		var level uint64
		level, at.index, part, err = layout.ParseTileLevelIndexPartial(m[1], m[2])
		at.level = int(level)
	}
	if err != nil || at.index >= sizeMost/width { // no shard is so long
		return false
	}
	if at.level < 0 {
		has := uint64(width)
		if part > 0 {
			has = uint64(part)
		}
		s.files.entries = max(s.files.entries, at.index*width+has)
		s.files.highest = max(s.files.highest, at.index+1)
		s.files.count++
	}
	if part > 0 {
		s.files.parts[at] = append(s.files.parts[at], part)
	}
	return true
}

// dropMark is in an event that says that retention dropped a shard, wherever
// else it may be.
var dropMark = []byte(`"type":"retention.drop"`)

// bundle is what lies on disk of up to 256 entries.
type bundle struct {
	want     int // entries that the tree has there
	raw      []byte
	file     string
	err      error
	got      int   // entries that could be read
	split    error // why no more
	leaves   [width]tlog.Hash
	order    [width / 8]byte // bits of entries that don't begin with their number
	unorder  bool
	tile     []tlog.Hash
	tileFile string
	tileErr  error
	parts    bool // that were left of it are not good
	drops    []drop
	partial  bool // the file has as many entries as the tree, no more
}

// excess tells whether the file has more entries than it may have.
func (b *bundle) excess() bool { return b.split != nil || b.partial && b.got > b.want }

// whole tells whether all entries are there.
func (b *bundle) whole() bool { return b.err == nil && b.got >= b.want }

// clean tells whether nothing is wrong as far as can be seen from here.
func (b *bundle) clean() bool {
	return b.whole() && !b.excess() && b.tileErr == nil && !b.unorder && !b.parts && slices.Equal(b.leaves[:b.want], b.tile)
}

// root is the hash of a whole bundle: of its entries, or, if they are not all
// there, as its tile has it.
func (b *bundle) root() (tlog.Hash, bool) {
	switch {
	case b.want < width:
		return tlog.Hash{}, false
	case b.whole():
		return fold(b.leaves[:]), true
	case b.tileErr == nil:
		return fold(b.tile), true
	}
	return tlog.Hash{}, false
}

// bundleReader reads bundles of a shard one after the other into one buffer.
type bundleReader struct {
	*shardCheck
	buf    []byte
	prefix []byte
	b      bundle
}

func (w *bundleReader) read(i uint64) *bundle {
	w.b = bundle{want: width}
	b := &w.b
	if i == w.full {
		b.want = w.rest
	}
	b.raw, b.file, b.err = w.disk.bundle(w.id, i, w.cp.size, w.buf)
	if cap(b.raw) > cap(w.buf) {
		w.buf = b.raw
	}
	b.partial = i == w.full && b.file != w.at(layout.EntriesPath(i, 0))
	seq := w.First + i*width
	if b.err == nil {
		b.got, b.split = splitBundle(b.raw, func(k int, entry []byte) bool {
			if k >= b.want {
				return b.partial // read on to see how many there are
			}
			b.leaves[k] = tlog.RecordHash(entry)
			w.prefix = appendPrefix(w.prefix[:0], seq+uint64(k))
			if !bytes.HasPrefix(entry, w.prefix) {
				b.order[k/8] |= 1 << (k % 8)
				b.unorder = true
			}
			if w.drops != nil && bytes.Contains(entry, dropMark) {
				b.drops = appendDrop(b.drops, seq+uint64(k), entry)
			}
			return true
		})
	}
	b.tile, b.tileFile, b.tileErr = w.disk.tile(w.id, 0, i, w.cp.size)
	_, tileParts := w.files.parts[partOf{0, i}]
	_, bundleParts := w.files.parts[partOf{-1, i}]
	// They are compared one by one in judge; there are few.
	b.parts = (tileParts || bundleParts) && !w.partsGood(i, b)
	return b
}

func (w *bundleReader) partsGood(i uint64, b *bundle) bool {
	if b.tileErr != nil {
		return false
	}
	scratch := &verifier{ctx: w.ctx, disk: w.disk}
	s := &shardCheck{verifier: scratch, id: w.id, files: w.files}
	s.judgeAllParts(i, b.tile)
	return scratch.count == 0
}

// drop is an event that says that retention dropped a shard.
type drop struct {
	seq uint64
	log logField
}

func appendDrop(drops []drop, seq uint64, entry []byte) []drop {
	e, ok := parseLogEvent(entry)
	if !ok || e.Type != "retention.drop" || !ValidShard(e.Log.Shard) {
		return drops
	}
	return append(drops, drop{seq, e.Log})
}
