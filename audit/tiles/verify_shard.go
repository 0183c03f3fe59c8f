package tiles

import (
	"bytes"
	"encoding/base64"
	"errors"
	"fmt"
	"io/fs"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/transparency-dev/tessera/api/layout"
	"golang.org/x/mod/sumdb/tlog"
)

// shardCheck verifies one shard.
type shardCheck struct {
	*verifier
	Verified
	id     string
	newest bool
	before *Verified
	after  string

	cp      checkpoint
	signed  bool
	files   inventory
	full    uint64      // whole bundles
	rest    int         // entries in the last, partial one
	present uint64      // bundles that could be there; no file has a higher number
	rows    [][]hashOf  // of the lowest row of each level of tiles; rows[0] is not kept
	tail    []tlog.Hash // leaf hashes of the partial bundle
	suspect []bool      // bundles to look at closely
	opening []byte      // the first and the last entry, if they are good
	closing []byte
}

type hashOf struct {
	hash  tlog.Hash
	known bool
}

func (s *shardCheck) at(name string) string { return s.id + "/" + name }

func (s *shardCheck) run() error {
	s.ID = s.id
	if s.before != nil {
		s.First = s.before.First + s.before.Size
	}
	if !s.readCheckpoint() {
		return s.ctx.Err()
	}
	if s.Dropped = s.gone(s.id); s.Dropped {
		s.checkHeads(nil)
		return s.ctx.Err()
	}
	if err := s.list(); err != nil {
		return err
	}
	s.full, s.rest = s.cp.size/width, int(s.cp.size%width)
	s.findFirst()
	if s.files.entries > s.cp.size {
		s.Unsigned = s.files.entries - s.cp.size
		s.remark(Problem{Kind: Unsigned, Shard: s.id, File: s.at(layout.CheckpointPath), Seq: s.First + s.cp.size, Events: s.Unsigned,
			Text: fmt.Sprintf("%d events are behind the checkpoint and not signed yet", s.Unsigned)})
	}
	if err := s.hash(); err != nil {
		return err
	}
	s.climb()
	computed, err := rangeOf(s.cp.size, s.computed)
	whole := false
	if err == nil {
		root, err := rootOf(computed)
		whole = err == nil && root == s.cp.root
	}
	if err := s.judge(whole); err != nil {
		return err
	}
	s.checkEnds()
	s.checkHeads(s.computed)
	return s.ctx.Err()
}

// readCheckpoint reads what the shard says of itself. Without it there is
// nothing to compare the shard with.
func (s *shardCheck) readCheckpoint() bool {
	p := Problem{Shard: s.id, File: s.at(layout.CheckpointPath), Seq: s.First}
	text, err := s.disk.read(p.File, checkpointMost, nil)
	if err != nil {
		p = fault(p, err)
		p.Text = "the shard's checkpoint, without which its entries mean nothing: " + p.Text
		s.found(p)
		return false
	}
	p.Kind = Altered
	peek, err := peekCheckpoint(text)
	if err != nil {
		p.Text = fmt.Sprintf("the checkpoint has not the form of one: %.200q", err)
		s.found(p)
		return false
	}
	m := originForm.FindStringSubmatch(peek.origin)
	switch {
	case m == nil || m[2] != s.id:
		p.Text = fmt.Sprintf("the checkpoint is that of %.100q and the directory is %s", peek.origin, s.id)
	case s.installation != "" && m[1] != s.installation:
		p.Text = fmt.Sprintf("the checkpoint is that of installation %s and the shard before is of %s", m[1], s.installation)
	default:
		s.installation = m[1]
		p.Text = ""
	}
	if p.Text != "" {
		s.found(p)
		return false
	}
	s.cp, s.Origin = peek, peek.origin
	named := s.named[peek.origin]
	if named != "" && s.follow && s.keys[peek.origin] == nil {
		if err := s.learn(named); err != nil {
			p.Text = "the shard before names a key that is none"
			s.found(p)
		}
	}
	key := s.keys[peek.origin]
	s.VKey = s.vkeys[peek.origin]
	switch {
	case key == nil && s.gone(s.id): // a later shard vouches for it
	case key == nil:
		p.Kind, p.Text = Unsigned, "no key is known to check the checkpoint with: give the shard's key"
		s.found(p)
	case named != "" && named != s.VKey:
		p.Text = fmt.Sprintf("the entry that closes the shard before names another key, %.150q", named)
		s.found(p)
	}
	if key != nil {
		if _, err := parseCheckpoint(text, key); err != nil {
			p.Text = fmt.Sprintf("the checkpoint is not signed by %.150s; nothing else of the shard can be checked", s.VKey)
			s.found(p)
			return false
		}
		s.signed = true
	}
	s.Size, s.Root, s.Checkpoint = peek.size, base64.StdEncoding.EncodeToString(peek.root[:]), string(text)
	return true
}

// findFirst decides which number the shard begins with. It follows from the
// shards before; if these are missing, the entries say it, and checkEnds says
// what is missing.
func (s *shardCheck) findFirst() {
	first, ok := s.numberAt(0)
	if !ok || first == s.First || s.cp.size == 0 {
		return
	}
	if last, ok := s.numberAt(s.cp.size - 1); ok && last-first == s.cp.size-1 {
		s.First = first
	} // else the first entry is at fault, and will be named
}

// entry reads one entry; it answers nil if it can't.
func (s *shardCheck) entry(i uint64) []byte {
	raw, _, err := s.disk.bundle(s.id, i/width, s.cp.size, nil)
	if err != nil || i >= s.cp.size {
		return nil
	}
	var found []byte
	splitBundle(raw, func(k int, entry []byte) bool {
		if k == int(i%width) {
			found = entry
		}
		return found == nil
	})
	return found
}

func (s *shardCheck) numberAt(i uint64) (uint64, bool) { return seqOf(s.entry(i)) }

// hash reads all bundles and compares them with the tiles right above them.
// Most logs are good: this is the fast way, and judge takes the slow one where
// something does not fit.
func (s *shardCheck) hash() error {
	bundles := s.full
	if s.rest > 0 {
		bundles++
	}
	s.present = min(bundles, s.files.bundles())
	s.rows = [][]hashOf{nil, make([]hashOf, min(s.full, s.present))}
	s.suspect = make([]bool, s.present)
	var next atomic.Uint64
	var workers sync.WaitGroup
	const chunk = 16
	for range min(runtime.GOMAXPROCS(0), 16) {
		workers.Go(func() {
			w := bundleReader{shardCheck: s}
			for s.ctx.Err() == nil {
				from := next.Add(chunk) - chunk
				if from >= s.present {
					return
				}
				for i := from; i < min(from+chunk, s.present); i++ {
					b := w.read(i)
					s.suspect[i] = !b.clean()
					root, ok := b.root()
					switch {
					case i < s.full:
						s.rows[1][i] = hashOf{root, ok}
					case b.whole():
						s.tail = slices.Clone(b.leaves[:s.rest])
					case b.tileErr == nil:
						s.tail = slices.Clone(b.tile)
					}
					if b.clean() {
						s.events.Add(uint64(b.want))
						s.mu.Lock()
						for _, d := range b.drops {
							s.drops[d.log.Shard] = append(s.drops[d.log.Shard], d)
						}
						s.mu.Unlock()
					}
				}
			}
		})
	}
	workers.Wait()
	return s.ctx.Err()
}

// climb computes the rows of the higher tiles from the lowest.
func (s *shardCheck) climb() {
	for level := 1; len(s.rows[level]) >= width; level++ {
		below := s.rows[level]
		row := make([]hashOf, len(below)/width)
		for i := range row {
			row[i].hash, row[i].known = foldKnown(below[i*width : (i+1)*width])
		}
		s.rows = append(s.rows, row)
	}
}

func foldKnown(row []hashOf) (tlog.Hash, bool) {
	var hashes [width]tlog.Hash
	for i, h := range row {
		if !h.known {
			return tlog.Hash{}, false
		}
		hashes[i] = h.hash
	}
	return fold(hashes[:len(row)]), true
}

// computed answers hashes that were computed from entries.
func (s *shardCheck) computed(level, index, count uint64) []tlog.Hash {
	if level == 0 {
		return s.leaves(index, count)
	}
	if level >= uint64(len(s.rows)) || index+count > uint64(len(s.rows[level])) {
		return nil
	}
	hashes := make([]tlog.Hash, count)
	for i, h := range s.rows[level][index : index+count] {
		if !h.known {
			return nil
		}
		hashes[i] = h.hash
	}
	return hashes
}

// leaves answers leaf hashes. Those of whole bundles are read again: only kept
// heads ask for them.
func (s *shardCheck) leaves(index, count uint64) []tlog.Hash {
	if index >= s.full*width {
		from := index - s.full*width
		if from+count > uint64(len(s.tail)) {
			return nil
		}
		return s.tail[from : from+count]
	}
	if index/width >= s.present {
		return nil
	}
	w := bundleReader{shardCheck: s}
	b := w.read(index / width)
	if !b.whole() {
		return nil
	}
	return slices.Clone(b.leaves[index%width : index%width+count])
}

// judge names what is wrong. The signed root decides who is right where an
// entry and a tile, or two tiles, disagree; whole says that the entries give it.
func (s *shardCheck) judge(whole bool) error {
	authority := s.computed
	if !whole {
		// Some entries are not those that were signed. If the tiles at the right
		// edge give the root, they are good, and so is each tile below whose
		// root is in a good one.
		var failed error
		fromTiles := s.disk.tileNodes(s.id, s.cp.size, &failed)
		r, err := rangeOf(s.cp.size, fromTiles)
		var root tlog.Hash
		if err == nil {
			root, err = rootOf(r)
		}
		authority = fromTiles
		if err != nil || root != s.cp.root {
			authority = nil
		}
	}
	// From the top down: what is good of a level tells what is good below.
	levels := uint64(0)
	for s.cp.size>>((levels+1)*layout.TileHeight) > 0 {
		levels++
	}
	before := s.problemCount()
	good := map[uint64][]tlog.Hash{} // of the tiles of a level, by index
	for level := levels; level >= 1; level-- {
		row := s.cp.size >> (level * layout.TileHeight)
		next := map[uint64][]tlog.Hash{}
		for index := uint64(0); index*width < min(row, s.presentAt(level)); index++ {
			if err := s.ctx.Err(); err != nil {
				return err
			}
			next[index] = s.judgeTile(level, index, min(width, row-index*width), good, authority, whole)
		}
		good = next
	}
	above := func(i uint64) *tlog.Hash {
		if parent := good[i/width]; i < s.full && parent != nil {
			return &parent[i%width]
		}
		return nil
	}
	for i := range s.present {
		if err := s.ctx.Err(); err != nil {
			return err
		}
		root := above(i)
		if s.suspect[i] || root != nil && s.rows[1][i].hash != *root {
			s.judgeBundle(i, root, authority)
		}
	}
	if s.cp.size > 0 {
		last := s.cp.size - 1
		s.opening = s.goodEntry(0, above(0), authority)
		s.closing = s.goodEntry(last, above(last/width), authority)
	}
	if missing := s.present * width; missing < s.cp.size {
		s.found(Problem{Kind: Absent, Shard: s.id, File: s.at(layout.EntriesPath(s.present, layout.PartialTileSize(0, s.present, s.cp.size))),
			Seq: s.First + missing, Events: s.cp.size - missing,
			Text: fmt.Sprintf("the checkpoint signs %d entries and the files of the last %d are not there", s.cp.size, s.cp.size-missing)})
	}
	if !whole && s.problemCount() == before {
		s.found(Problem{Kind: Altered, Shard: s.id, File: s.at(layout.CheckpointPath), Seq: s.First, Events: s.cp.size,
			Text: "entries and tiles agree with each other and not with the root that the checkpoint signs: the shard was rewritten, or its checkpoint is that of another history"})
	}
	return nil
}

func (s *shardCheck) problemCount() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.count
}

// presentAt bounds the nodes of a level by the files that there are.
func (s *shardCheck) presentAt(level uint64) uint64 {
	return s.present>>((level-1)*layout.TileHeight) + 1
}

// judgeTile compares a tile with the hashes that are known to be good, above
// or by the entries. It answers the tile's hashes if they are good, else nil.
func (s *shardCheck) judgeTile(level, index, n uint64, good map[uint64][]tlog.Hash, authority nodes, whole bool) []tlog.Hash {
	name := layout.TilePath(level, index, layout.PartialTileSize(level, index, s.cp.size))
	first := s.First + index*width<<(level*layout.TileHeight)
	p := Problem{Shard: s.id, File: s.at(name), Seq: first}
	hashes, file, err := s.disk.tile(s.id, level, index, s.cp.size)
	if err != nil {
		s.found(fault(p, err))
	}
	p.File = file
	computed := s.computed(level, index*width, n)
	switch {
	case whole:
		if err == nil && !slices.Equal(hashes, computed) {
			p.Kind = Altered
			p.Text = fmt.Sprintf("hash %d of the tile is not that of the entries below it, which are good", differAt(hashes, computed))
			s.found(p)
		}
		s.judgeParts(int(level), index, computed)
		return computed
	case n < width: // at the right edge
		if authority != nil {
			return hashes
		}
		if err == nil && computed != nil && !slices.Equal(hashes, computed) {
			p.Kind = Altered
			p.Text = fmt.Sprintf("hash %d of the tile is not that of the entries below it, and neither gives the root that the checkpoint signs", differAt(hashes, computed))
			s.found(p)
		}
		return nil
	}
	parent := good[index/width]
	if parent == nil {
		if err == nil && computed != nil && !slices.Equal(hashes, computed) {
			p.Kind = Altered
			p.Text = fmt.Sprintf("hash %d of the tile is not that of the entries below it, and what could tell which is right is altered or absent too", differAt(hashes, computed))
			s.found(p)
		}
		return nil
	}
	want := parent[index%width]
	if err == nil && fold(hashes) == want {
		return hashes
	}
	if err == nil {
		p.Kind, p.Text = Altered, "the tile does not have the hash that the tile above says"
		s.found(p)
	}
	if computed != nil && fold(computed) == want {
		return computed
	}
	return nil
}

func differAt(a, b []tlog.Hash) int {
	for i := range min(len(a), len(b)) {
		if a[i] != b[i] {
			return i
		}
	}
	return min(len(a), len(b))
}

// goodLeaves answers the leaf hashes that were signed of a bundle, if that can
// be known. root is the hash of the bundle as a good tile has it.
func (s *shardCheck) goodLeaves(i uint64, b *bundle, root *tlog.Hash, authority nodes) []tlog.Hash {
	switch {
	case root != nil && b.tileErr == nil && fold(b.tile) == *root:
		return b.tile
	case root != nil && b.whole() && fold(b.leaves[:]) == *root:
		return b.leaves[:]
	case i < s.full || authority == nil:
		return nil
	}
	// The partial bundle at the end is part of what gives the root.
	good := make([]tlog.Hash, 0, b.want)
	for k := range uint64(b.want) {
		h := authority(0, i*width+k, 1)
		if h == nil {
			return nil
		}
		good = append(good, h[0])
	}
	return good
}

// goodEntry reads an entry, and answers nil if it is not known to be good.
func (s *shardCheck) goodEntry(i uint64, root *tlog.Hash, authority nodes) []byte {
	if i/width >= s.present {
		return nil
	}
	w := bundleReader{shardCheck: s}
	good := s.goodLeaves(i/width, w.read(i/width), root, authority)
	entry := s.entry(i)
	if good == nil || entry == nil || tlog.RecordHash(entry) != good[i%width] {
		return nil
	}
	return entry
}

// judgeBundle names the entries of a bundle, or the tile above them, that are
// not what was signed. root is the hash of the bundle as a good tile has it.
func (s *shardCheck) judgeBundle(i uint64, root *tlog.Hash, authority nodes) {
	w := bundleReader{shardCheck: s}
	b := w.read(i)
	first := s.First + i*width
	entries := Problem{Shard: s.id, File: b.file, Seq: first, Events: uint64(b.want)}
	tile := Problem{Shard: s.id, File: b.tileFile, Seq: first}
	good := s.goodLeaves(i, b, root, authority)
	switch {
	case b.tileErr != nil:
		s.found(fault(tile, b.tileErr))
	case good != nil && !slices.Equal(b.tile, good):
		tile.Kind = Altered
		tile.Text = fmt.Sprintf("hash %d of the tile is not that of the entry below it, which is good", differAt(b.tile, good))
		s.found(tile)
	case good == nil && root != nil:
		tile.Kind, tile.Text = Altered, "the tile does not have the hash that the tile above says"
		s.found(tile)
	}
	if b.err != nil {
		s.found(fault(entries, b.err))
		s.judgeAllParts(i, good)
		return
	}
	compare := good
	doubt := ""
	if compare == nil && b.tileErr == nil && root == nil {
		compare, doubt = b.tile, "; what could tell which of them is right is altered or absent too"
	}
	if compare == nil {
		entries.Kind = Altered
		entries.Text = "one or more of these events are not what was signed; which, only the tile above could tell"
		s.found(entries)
		return
	}
	for from := 0; from < b.want; {
		if from < b.got && b.leaves[from] == compare[from] {
			if b.order[from/8]&(1<<(from%8)) != 0 {
				p := entries
				p.Kind, p.Seq, p.Events = OutOfOrder, first+uint64(from), 1
				p.Text = fmt.Sprintf("the entry at the place of event %d does not begin with this number", p.Seq)
				s.found(p)
			}
			from++
			continue
		}
		to := from + 1
		for to < b.want && (to >= b.got || b.leaves[to] != compare[to]) {
			to++
		}
		p := entries
		p.Kind, p.Seq, p.Events = Altered, first+uint64(from), uint64(to-from)
		switch {
		case from >= b.got && b.split != nil:
			p.Text = fmt.Sprintf("the file can't be read from this event on: %v", b.split)
		case from >= b.got:
			p.Text = fmt.Sprintf("the file ends before this event: it has %d entries and should have %d", b.got, b.want)
		default:
			p.Text = "the hash of the event is not the one in the tile above" + doubt
		}
		s.found(p)
		from = to
	}
	if b.got >= b.want && b.excess() {
		p := entries
		p.Kind, p.Events, p.Seq = Altered, 0, first+uint64(b.want)
		p.Text = fmt.Sprintf("behind its %d entries the file has more", b.want)
		s.found(p)
	}
	s.judgeAllParts(i, good)
}

func (s *shardCheck) judgeAllParts(i uint64, good []tlog.Hash) {
	s.judgeParts(0, i, good)
	s.judgeBundleParts(i, good)
}

// judgeParts compares the parts of a tile that were left from when it grew:
// each is the beginning of the tile.
func (s *shardCheck) judgeParts(level int, index uint64, good []tlog.Hash) {
	for _, p := range s.files.parts[partOf{level, index}] {
		if int(p) > len(good) || int(p) == len(good) && len(good) < width {
			continue // not signed yet, or the tile itself
		}
		name := s.at(layout.TilePath(uint64(level), index, p))
		same := func(data []byte) bool { return bytes.Equal(data, joined(good[:p])) }
		if why, bad := s.partDiffers(name, tileBytes, same); bad {
			why.Seq = s.First + index*width<<(level*layout.TileHeight)
			s.found(why)
		}
	}
}

func joined(hashes []tlog.Hash) []byte {
	b := make([]byte, 0, len(hashes)*tlog.HashSize)
	for _, h := range hashes {
		b = append(b, h[:]...)
	}
	return b
}

// judgeBundleParts does the same for a bundle: the entries of each part have
// the hashes that are good.
func (s *shardCheck) judgeBundleParts(index uint64, good []tlog.Hash) {
	for _, p := range s.files.parts[partOf{-1, index}] {
		if int(p) >= len(good) {
			continue // not signed yet, or the bundle itself
		}
		name := s.at(layout.EntriesPath(index, p))
		why, bad := s.partDiffers(name, bundleMost, func(data []byte) bool {
			same := true
			n, err := splitBundle(data, func(k int, entry []byte) bool {
				same = same && k < len(good) && tlog.RecordHash(entry) == good[k]
				return same
			})
			return same && err == nil && n == int(p)
		})
		if bad {
			why.Seq, why.Events = s.First+index*width, uint64(p)
			s.found(why)
		}
	}
}

// partDiffers asks whether a file that was left is what it should be.
func (s *shardCheck) partDiffers(name string, most int64, good func(data []byte) bool) (Problem, bool) {
	p := Problem{Kind: Altered, Shard: s.id, File: name, Text: "the part, which is from when the file above it was shorter, is not its beginning"}
	data, err := s.disk.read(name, most, nil)
	switch {
	case errors.Is(err, fs.ErrNotExist): // removed meanwhile, as it should be
		return p, false
	case err != nil:
		return fault(p, err), true
	}
	return p, !good(data)
}

// checkEnds reads the first and the last entry, which tie the shard to the one
// before and the one after.
func (s *shardCheck) checkEnds() {
	if s.cp.size == 0 {
		if !s.newest {
			s.found(Problem{Kind: Absent, Shard: s.id, File: s.at(layout.CheckpointPath), Seq: s.First, Text: "the shard has no entries and another one follows"})
		}
		return
	}
	// Entries that are not good are told of already.
	problem := func(i uint64) Problem {
		file := layout.EntriesPath(i/width, layout.PartialTileSize(0, i/width, s.cp.size))
		return Problem{Kind: Altered, Shard: s.id, File: s.at(file), Seq: s.First + i, Events: 1}
	}
	if s.opening != nil {
		e, _ := parseLogEvent(s.opening)
		s.checkOpen(e, problem(0))
	}
	if s.closing != nil {
		e, _ := parseLogEvent(s.closing)
		s.checkClose(e, problem(s.cp.size-1))
	}
}

func (s *shardCheck) checkOpen(e logEvent, p Problem) {
	switch l := e.Log; {
	case e.Type != "log.open":
		p.Text = "the first event of the shard is not the one that opens it"
	case l.Shard != s.id || l.First != s.First:
		p.Text = fmt.Sprintf("the shard's first event opens shard %.40q at event %d", l.Shard, l.First)
	case s.VKey != "" && l.VKey != s.VKey:
		p.Text = fmt.Sprintf("the shard's first event names another key, %.150q", l.VKey)
	case l.Previous == nil && s.before != nil:
		p.Text = fmt.Sprintf("the shard's first event names no shard before, and %s is there", s.before.ID)
	case l.Previous == nil && s.First > 0:
		p.Text = "the shard's first event is not event 0 and names no shard before"
	case l.Previous == nil:
		return
	default:
		s.checkPrevious(e, p)
		return
	}
	s.found(p)
}

// checkPrevious compares the shard before with what it was when this one began.
func (s *shardCheck) checkPrevious(e logEvent, p Problem) {
	l, b := e.Log.Previous, s.before
	switch {
	case b != nil && l.First+l.Size != s.First:
		p.Text = fmt.Sprintf("the shard's first event is event %d and says that the shard before ended with %d events", s.First, l.First+l.Size)
	case b == nil || b.ID != l.Shard:
		p.Kind, p.File, p.Seq, p.Events = Absent, fmt.Sprintf("%.40q", l.Shard), l.First, l.Size
		p.Text = fmt.Sprintf("the shard before this one was %.40q with %d events, and is not there", l.Shard, l.Size)
	case b.Checkpoint == "", b.Size == l.Size && b.Root == l.Root && b.First == l.First:
		return // told already, or good
	case b.Size < l.Size:
		p.Kind, p.Shard, p.File, p.Seq, p.Events = RolledBack, b.ID, b.ID+"/"+layout.CheckpointPath, b.First+b.Size, l.Size-b.Size
		p.Text = fmt.Sprintf("the shard had %d signed events when %s began, and has %d", l.Size, s.id, b.Size)
	default:
		p.Kind, p.Shard, p.File, p.Seq, p.Events = Forked, b.ID, b.ID+"/"+layout.CheckpointPath, b.First, b.Size
		p.Text = fmt.Sprintf("the shard is not the one that was there when %s began: it had %d events and the root %.60q", s.id, l.Size, l.Root)
	}
	s.found(p)
}

func (s *shardCheck) checkClose(e logEvent, p Problem) {
	closes := e.Type == "log.close"
	switch {
	case !closes && s.newest:
		return
	case !closes:
		p.Text = fmt.Sprintf("the last event of the shard is not one that closes it, and shard %s follows", s.after)
	case s.newest:
		p.Kind, p.File, p.Seq, p.Events = Absent, fmt.Sprintf("%.40q", e.Log.Next), s.First+s.cp.size, 0
		p.Text = fmt.Sprintf("the newest shard says that %.40q follows, and that is not there; if the server was stopped just then, it will be", e.Log.Next)
	case e.Log.Next != s.after:
		p.Text = fmt.Sprintf("the shard's last event says that %.40q follows, and %s does", e.Log.Next, s.after)
	default:
		if s.signed {
			s.named[Origin(s.installation, s.after)] = e.Log.NextVKey
		}
		return
	}
	s.found(p)
}

// checkHeads compares the heads of this shard that the caller kept. Of a
// dropped shard, get is nil.
func (s *shardCheck) checkHeads(get nodes) {
	for _, h := range s.heads {
		if h.origin != s.Origin {
			continue
		}
		p := Problem{Shard: s.id, File: s.at(layout.CheckpointPath), Seq: s.First, Events: h.size}
		key := s.keys[h.origin]
		if key == nil && get == nil {
			continue // dropped, and vouched for by another shard
		}
		if key == nil {
			p.Kind, p.Text = Unsigned, "no key is known to check a kept head with: give the shard's key"
			s.found(p)
			continue
		}
		if _, err := parseCheckpoint(h.text, key); err != nil {
			p.Kind, p.Text = Unsigned, fmt.Sprintf("a kept head of %d events is not signed by the shard's key and says nothing", h.size)
			s.found(p)
			continue
		}
		var root tlog.Hash
		switch {
		case h.size > s.cp.size:
			p.Kind, p.Seq, p.Events = RolledBack, s.First+s.cp.size, h.size-s.cp.size
			p.Text = fmt.Sprintf("a head of %d signed events was kept, and the shard has %d", h.size, s.cp.size)
			s.found(p)
			continue
		case h.size == s.cp.size:
			root = s.cp.root
		case get == nil:
			p.Kind, p.Text = Stray, fmt.Sprintf("a kept head of %d events can't be compared: the shard was dropped", h.size)
			s.remark(p)
			continue
		default:
			r, err := rangeOf(h.size, get)
			if err == nil {
				root, err = rootOf(r)
			}
			if err != nil {
				p.Kind, p.Text = Absent, fmt.Sprintf("a kept head of %d events can't be compared: %v", h.size, err)
				s.found(p)
				continue
			}
		}
		if root != h.root {
			p.Kind, p.Text = Forked, fmt.Sprintf("a head of %d events was kept, and the first %d events of the shard are not those", h.size, h.size)
			s.found(p)
		}
	}
}
