package tiles

import (
	"bytes"
	"context"
	"crypto"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"path"
	"path/filepath"
	"slices"

	"airlock.dev/airlock"
	"github.com/transparency-dev/merkle/compact"
	"github.com/transparency-dev/tessera"
	"github.com/transparency-dev/tessera/api/layout"
	"github.com/transparency-dev/tessera/storage/posix"
	"golang.org/x/mod/sumdb/note"
	"golang.org/x/mod/sumdb/tlog"
)

// tree is the newest shard, which Tessera has open. entries and doubt belong
// to whoever has the turn; published is guarded by Trees.mu.
type tree struct {
	shard  string
	first  uint64
	vkey   string
	guard  *guard
	add    tessera.AddFn
	cancel context.CancelFunc

	entries   *compact.Range // of all that were added
	doubt     [][]byte       // leaf hashes of a group whose outcome is not known
	published checkpoint
}

// openTree lets Tessera open a shard whose entries have the range r.
func (t *Trees) openTree(ctx context.Context, id string, first uint64, key crypto.Signer, v note.Verifier, vkey string, r *compact.Range) (opened *tree, err error) {
	root, err := rootOf(r)
	if err != nil {
		return nil, fmt.Errorf("open shard %s: %w", id, err)
	}
	tr := &tree{shard: id, first: first, vkey: vkey, guard: newGuard(v, key, r.End(), root), entries: r}
	background, cancel := context.WithCancel(context.WithoutCancel(ctx))
	tr.cancel = cancel
	defer func() {
		// Tessera panics where it can't open its lock file, which on a full
		// disk is no reason to end the server.
		if p := recover(); p != nil {
			opened, err = nil, fmt.Errorf("open shard %s: %v", id, p)
		}
		if err != nil {
			tr.stop()
		}
	}()
	driver, err := posix.New(background, posix.Config{Path: filepath.Join(t.cfg.Dir, id), HTTPClient: t.courier.client()})
	if err != nil {
		return nil, fmt.Errorf("open shard %s: %w", id, err)
	}
	opts := tessera.NewAppendOptions().
		WithCheckpointSigner(tr.guard).
		WithCheckpointInterval(t.cfg.Checkpoint).
		WithCheckpointRepublishInterval(0).
		WithBatching(groupMost, batchAge).
		WithGarbageCollectionInterval(collectEvery)
	if t.cfg.Witnesses != nil {
		opts = opts.WithWitnesses(t.witnesses, &tessera.WitnessOptions{Timeout: witnessTimeout})
	}
	appender, _, _, err := tessera.NewAppender(background, driver, opts)
	if err != nil {
		return nil, fmt.Errorf("open shard %s: %w", id, err)
	}
	tr.add = appender.Add
	return tr, nil
}

// stop lets go of the shard. Tessera's goroutines end soon after; they sign
// nothing any more.
func (tr *tree) stop() {
	tr.guard.stop()
	tr.cancel()
}

// describe is called with Trees.mu, or by whoever has the turn.
func (tr *tree) describe() Shard {
	cp := tr.published
	return Shard{
		ID: tr.shard, Origin: tr.guard.Name(), VKey: tr.vkey, First: tr.first,
		Size: cp.size, Root: cp.root, Checkpoint: string(cp.text),
	}
}

// treeState is Tessera's own file: the tree that it goes on from.
type treeState struct {
	Size uint64 `json:"size"`
	Root []byte `json:"root"`
}

const treeStateName = ".state/treeState"

func (t *Trees) readState(id string) (treeState, error) {
	var s treeState
	raw, err := t.disk.read(id+"/"+treeStateName, 4096, nil)
	if err == nil {
		err = json.Unmarshal(raw, &s)
	}
	if err == nil && (len(s.Root) != tlog.HashSize || s.Size > sizeMost) {
		err = errors.New("not the state of a tree")
	}
	if err != nil {
		return treeState{}, fmt.Errorf("read %s of shard %s: %w", treeStateName, id, err)
	}
	return s, nil
}

// check compares what Tessera would go on from with the published checkpoint.
// Tessera itself believes its files. It answers the range of all entries.
func (t *Trees) check(id string, cp checkpoint) (*compact.Range, error) {
	s, err := t.readState(id)
	if err != nil {
		return nil, damaged(id, "the state of its tree can't be read", err)
	}
	r, err := t.checkTree(id, cp, s)
	if err != nil {
		return nil, err
	}
	bad := t.checkEnd(id, s.Size)
	if bad == nil {
		return r, nil
	}
	if s.Size == cp.size {
		return nil, damaged(id, "its last signed entries are not what they were", bad)
	}
	// Nothing has vouched for these entries yet, and whoever adds entries keeps
	// them until a checkpoint covers them: go back to that.
	slog.Warn("audit log: entries that were not signed yet are out of order and are taken back", "shard", id, "entries", s.Size-cp.size, "error", bad)
	s = treeState{cp.size, cp.root[:]}
	if err := t.writeState(id, s); err != nil {
		return nil, err
	}
	if bad := t.checkEnd(id, s.Size); bad != nil {
		return nil, damaged(id, "its last signed entries are not what they were", bad)
	}
	return t.checkTree(id, cp, s)
}

// checkTree compares the roots.
func (t *Trees) checkTree(id string, cp checkpoint, s treeState) (*compact.Range, error) {
	if s.Size < cp.size {
		return nil, damaged(id, fmt.Sprintf("the state of its tree is older than its checkpoint (%d entries, and %d are signed): it was put back from a copy, or edited", s.Size, cp.size), nil)
	}
	r, err := t.disk.loadRange(id, s.Size)
	if err != nil {
		return nil, damaged(id, fmt.Sprintf("its tiles have no tree of %d entries", s.Size), err)
	}
	root, err := rootOf(r)
	if err != nil {
		return nil, fmt.Errorf("check shard %s: %w", id, err)
	}
	if !bytes.Equal(root[:], s.Root) {
		return nil, damaged(id, fmt.Sprintf("the state of its tree does not agree with its tiles at %d entries: one of them was edited", s.Size), nil)
	}
	// The signed tree, from the tiles that later entries go on from.
	var failed error
	signed, err := rangeOf(cp.size, t.disk.tileNodes(id, s.Size, &failed))
	if err != nil {
		return nil, damaged(id, fmt.Sprintf("its tiles have no tree of %d entries", cp.size), errors.Join(err, failed))
	}
	root, err = rootOf(signed)
	if err != nil {
		return nil, fmt.Errorf("check shard %s: %w", id, err)
	}
	if root != cp.root {
		return nil, damaged(id, fmt.Sprintf("its tiles do not give the root of %d entries that its checkpoint signed", cp.size), nil)
	}
	// Tessera would take the whole where a part is missing, and read too much.
	for level := uint64(0); s.Size>>(level*layout.TileHeight) > 0; level++ {
		n := s.Size >> (level * layout.TileHeight)
		if n%width == 0 {
			continue
		}
		name := layout.TilePath(level, n/width, uint8(n%width))
		if _, err := t.root.Lstat(id + "/" + name); err != nil {
			return nil, damaged(id, name+" is missing", err)
		}
	}
	return r, nil
}

// checkEnd looks at the last entries of a tree of size.
func (t *Trees) checkEnd(id string, size uint64) error {
	if size == 0 {
		return nil
	}
	index := (size - 1) / width
	n := int(size - index*width)
	want := layout.EntriesPath(index, layout.PartialTileSize(0, index, size))
	raw, name, err := t.disk.bundle(id, index, size, nil)
	if err != nil {
		return err
	}
	if name != id+"/"+want {
		return fmt.Errorf("%s is missing", want)
	}
	hashes, _, err := t.disk.tile(id, 0, index, size)
	if err != nil {
		return err
	}
	bad := -1
	got, err := splitBundle(raw, func(i int, entry []byte) bool {
		seq, ok := seqOf(entry)
		if i >= n || hashes[i] != tlog.RecordHash(entry) || !ok || seq != t.next+index*width+uint64(i) {
			bad = i
		}
		return bad < 0
	})
	switch {
	case err != nil:
		return fmt.Errorf("%s: %w", want, err)
	case bad >= 0:
		return fmt.Errorf("%s: entry %d is not the one that belongs there", want, bad)
	case got != n:
		return fmt.Errorf("%s has %d entries and should have %d", want, got, n)
	}
	return nil
}

// writeState replaces Tessera's state, as Tessera does it. Tessera is not
// adding anything meanwhile.
func (t *Trees) writeState(id string, s treeState) error {
	raw, err := json.Marshal(s)
	if err != nil {
		return fmt.Errorf("write %s of shard %s: %w", treeStateName, id, err)
	}
	name := id + "/" + treeStateName
	if err := t.root.WriteFile(name+"1", raw, 0o644); err != nil {
		return fmt.Errorf("write %s of shard %s: %w", treeStateName, id, err)
	}
	if err := t.sync(name + "1"); err != nil {
		return err
	}
	if err := t.root.Rename(name+"1", name); err != nil {
		return fmt.Errorf("write %s of shard %s: %w", treeStateName, id, err)
	}
	return t.sync(id + "/.state")
}

// Integrate adds the events from number first on, which must be Next, in their
// order, and returns when they are durably in the tree. They need not be signed
// then; see Await. When it fails, Next tells how many are in: none, or a first
// part if there were more than 1,024. The same events may then be given again
// from Next on.
//
// ctx is looked at before, not while: what was handed over is waited for, which
// takes as long as the disk takes.
func (t *Trees) Integrate(ctx context.Context, first uint64, entries [][]byte) error {
	var prefix []byte
	for i, e := range entries {
		prefix = appendPrefix(prefix[:0], first+uint64(i))
		if !bytes.HasPrefix(e, prefix) {
			return airlock.Invalidf("entries", fmt.Sprintf("begin it with %s", prefix), "event %d does not begin with its number", first+uint64(i))
		}
		if len(e) > entryMost {
			return airlock.Errorf(airlock.TooLarge, "event %d has %d bytes and %d is the most: make it smaller", first+uint64(i), len(e), entryMost)
		}
	}
	if err := t.begin(ctx); err != nil {
		return err
	}
	defer func() { <-t.turn }()
	if err := t.settleNow(); err != nil {
		return err
	}
	t.mu.Lock()
	tr, next := t.current, t.next
	t.mu.Unlock()
	if tr == nil {
		return airlock.Errorf(airlock.Conflict, "the audit log has no shard to write to: start one")
	}
	if first != next {
		return airlock.Errorf(airlock.Conflict, "event %d can't be added to the audit log, which goes on with %d", first, next)
	}
	for group := range slices.Chunk(entries, groupMost) {
		if err := ctx.Err(); err != nil {
			return err
		}
		if err := t.integrate(ctx, tr, group); err != nil {
			return err
		}
	}
	return nil
}

// integrate hands one group to Tessera and waits for all of it.
func (t *Trees) integrate(ctx context.Context, tr *tree, group [][]byte) error {
	base := tr.entries.End()
	// Hashing takes most of the time, and must not let a group be cut in two.
	prepared := make([]*tessera.Entry, len(group))
	hashes := make([][]byte, len(group))
	for i, e := range group {
		prepared[i] = tessera.NewEntry(e)
		hashes[i] = prepared[i].LeafHash()
	}
	whole, head, err := tr.after(hashes)
	if err != nil {
		return err
	}
	// Tessera panics in its own goroutine where its lock file is not.
	if _, err := t.root.Lstat(tr.shard + "/.state/treeState.lock"); err != nil {
		return fmt.Errorf("add to shard %s: %w", tr.shard, err)
	}
	tr.guard.fly()
	futures := make([]tessera.IndexFuture, len(group))
	for i, e := range prepared {
		futures[i] = tr.add(ctx, e)
	}
	var failed error
	for i, f := range futures {
		index, err := f()
		if err == nil && index.Index != base+uint64(i) {
			err = fmt.Errorf("event %d was put at %d instead of %d", t.next+uint64(i), index.Index, base+uint64(i))
		}
		if failed == nil {
			failed = err
		}
	}
	if failed == nil {
		t.advance(tr, whole, head)
		return nil
	}
	tr.doubt = hashes
	t.sweep(tr.shard, base)
	if err := t.settle(tr); err != nil {
		return errors.Join(fmt.Errorf("add %d events to shard %s: %w", len(group), tr.shard, failed), err)
	}
	if tr.entries.End() == base+uint64(len(group)) {
		return nil // it failed too late to matter
	}
	return fmt.Errorf("add %d events to shard %s: %w", len(group), tr.shard, failed)
}

// sweep removes what interrupted and failed writes left beside the files that
// a tree of size grows by. Tessera forgets the temporary files of writes that
// failed, so that on a full disk each try would leave one more.
func (t *Trees) sweep(id string, size uint64) {
	dirs := map[string]bool{".": true, ".state": true}
	for level := uint64(0); level == 0 || size>>(level*layout.TileHeight) > 0; level++ {
		at := size >> (level * layout.TileHeight) / width
		for index := at; index <= at+groupMost/width; index++ {
			names := []string{layout.TilePath(level, index, 1)}
			if level == 0 {
				names = append(names, layout.EntriesPath(index, 1))
			}
			for _, name := range names {
				parts := path.Dir(name)
				dirs[parts], dirs[path.Dir(parts)] = true, true
			}
		}
	}
	for dir := range dirs {
		entries, err := fs.ReadDir(t.root.FS(), path.Join(id, dir))
		if err != nil {
			continue // not there yet
		}
		for _, e := range entries {
			name := path.Join(dir, e.Name())
			if e.Type().IsRegular() && brokenForm.MatchString(name) && !tileForm.MatchString(name) {
				t.root.Remove(path.Join(id, name)) // what stays is in nobody's way
			}
		}
	}
}

// after computes the tree that there is when hashes are added.
func (tr *tree) after(hashes [][]byte) (*compact.Range, treeHead, error) {
	r, err := hashing.NewRange(0, tr.entries.End(), slices.Clone(tr.entries.Hashes()))
	for _, h := range hashes {
		if err == nil {
			err = r.Append(h, nil)
		}
	}
	var root tlog.Hash
	if err == nil {
		root, err = rootOf(r)
	}
	if err != nil {
		return nil, treeHead{}, fmt.Errorf("compute the tree of shard %s: %w", tr.shard, err)
	}
	return r, treeHead{r.End(), root, true}, nil
}

// settleNow settles the newest shard, if there is something to settle.
func (t *Trees) settleNow() error {
	t.mu.Lock()
	tr := t.current
	t.mu.Unlock()
	if tr == nil || tr.doubt == nil {
		return nil
	}
	return t.settle(tr)
}

// settle finds out what became of a group of which Tessera says that it failed.
// All, none or a first part of it may be in the tree. Anything else means that
// Tessera had cut the group in two and only the second part was written, to the
// places of the first. These entries are taken back: nothing of Tessera's is on
// its way any more, and nothing was signed.
func (t *Trees) settle(tr *tree) error {
	s, err := t.readState(tr.shard)
	if err == nil {
		// What failed may have been to make this file's name durable.
		err = t.sync(tr.shard + "/.state")
	}
	if err != nil {
		tr.guard.land()
		return err
	}
	n := s.Size - tr.entries.End()
	if s.Size >= tr.entries.End() && n <= uint64(len(tr.doubt)) {
		r, head, err := tr.after(tr.doubt[:n])
		if err != nil {
			return err
		}
		if bytes.Equal(head.root[:], s.Root) {
			t.advance(tr, r, head)
			return nil
		}
	}
	r, head, err := tr.after(nil)
	if err != nil {
		return err
	}
	slog.Warn("audit log: entries of a group that was half written are taken back", "shard", tr.shard, "entries", head.size, "written", s.Size)
	if err := t.writeState(tr.shard, treeState{head.size, head.root[:]}); err != nil {
		tr.guard.land()
		return err
	}
	t.advance(tr, r, head)
	return nil
}

// advance remembers the tree that is there now.
func (t *Trees) advance(tr *tree, r *compact.Range, head treeHead) {
	n := r.End() - tr.entries.End()
	tr.entries, tr.doubt = r, nil
	tr.guard.land(head)
	t.mu.Lock()
	defer t.mu.Unlock()
	t.next += n
	t.late()
}
