// Package tiles keeps the Merkle logs of the audit trail: one C2SP tlog-tiles
// log for each period, a shard, in a directory of its own, written with
// Tessera. It writes them, proves from them, drops old ones, and verifies a
// directory of them without having written it.
//
// It knows of an entry that it begins with {"v":1,"seq":N, and of the entries
// log.open, log.close and retention.drop the field "log". It must not know
// what else an event says, where events come from, or what they are for.
//
// Tessera logs through klog, which one process has one of. The first Open
// directs klog's warnings and errors to whatever slog.Default is at that time,
// and drops the rest. That is global, and nothing of it can be undone: it is
// still better than lines on standard error that nobody ordered.
package tiles

import (
	"context"
	"crypto"
	"crypto/ed25519"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"airlock.dev/airlock"
	"github.com/transparency-dev/tessera"
	"github.com/transparency-dev/tessera/api/layout"
	"golang.org/x/mod/sumdb/note"
	"golang.org/x/mod/sumdb/tlog"
	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"
)

// Config says where the logs are and who signs them.
type Config struct {
	Dir          string // made if it is not there
	Installation string // 20 characters of a-z2-7: the middle of every origin
	// Keys are Ed25519 keys. The newest shard goes on with the one that signed
	// its checkpoint; a new shard gets its key from Start. Their private parts
	// stay in memory.
	Keys []crypto.Signer
	// Witnesses is a policy as Tessera reads it (witness, group and quorum
	// lines), or nil. A checkpoint is published when the quorum has signed it.
	Witnesses []byte
	// Checkpoint is how often one is signed while entries arrive: 100 ms or
	// more, 0 is one second.
	Checkpoint time.Duration
}

// Shard describes one log.
type Shard struct {
	ID     string
	Origin string
	// VKey is the key that its checkpoint was signed with. It is empty for a
	// dropped shard, whose entry that says it is gone.
	VKey  string
	First uint64 // number of its first event
	// Size and Root are those of its published checkpoint, and Checkpoint its
	// text.
	Size       uint64
	Root       tlog.Hash
	Checkpoint string
	Closed     bool // a newer shard follows
	Dropped    bool // nothing but the checkpoint is left
}

// Trees are the logs of an installation. One process at a time opens them.
type Trees struct {
	cfg       Config
	lock      *os.File
	root      *os.Root
	disk      disk
	courier   *courier
	witnesses tessera.WitnessGroup

	turn     chan struct{} // holds a token while someone writes
	done     chan struct{} // closed by Close
	watching sync.WaitGroup

	mu      sync.Mutex
	shards  []Shard // closed ones, in order
	current *tree   // nil before the first Start
	next    uint64
	closed  bool
	moved   chan struct{} // closed and replaced when a checkpoint is published, or the Trees end
	since   time.Time     // since when there are entries without a published checkpoint
}

const (
	// groupMost is how many entries Tessera gets at once. It is its batch size
	// too, so that a full group is written at once; a smaller one waits
	// batchAge for more that never comes. batchAge must be longer than handing
	// over a group takes (about 1 ms): a group that Tessera cut in two could
	// fail by half.
	groupMost = 1024
	batchAge  = 5 * time.Millisecond
	// collectEvery is how often Tessera removes parts of files that are whole
	// by now. Each time it does 100 files, so that the default of a minute
	// would fall behind from 430 events a second on.
	collectEvery = 2 * time.Second
	// lateAfter is how long a checkpoint may be missing before Err says so.
	lateAfter = 15 * time.Second

	checkpointDefault = time.Second
	checkpointLeast   = 100 * time.Millisecond // Tessera's
	lockName          = "lock"
)

var errClosed = airlock.Errorf(airlock.Unavailable, "the audit log's trees are closed")

// Open opens the logs in a directory, and goes on with the newest if there is
// one. It refuses, with Conflict, a directory that another process has open, a
// newest shard that none of the keys signed, and one whose tree does not agree
// with its checkpoint. Entries that are not signed yet and not in order, which
// a half-written group can leave, are cut off: whoever gave them still has
// them.
func Open(ctx context.Context, cfg Config) (*Trees, error) {
	if cfg.Checkpoint == 0 {
		cfg.Checkpoint = checkpointDefault
	}
	if cfg.Checkpoint < checkpointLeast {
		return nil, airlock.Invalidf("checkpoint", fmt.Sprintf("use %v or more", checkpointLeast), "checkpoints can't be %v apart", cfg.Checkpoint)
	}
	if !installationForm.MatchString(cfg.Installation) {
		return nil, airlock.Invalidf("installation", "use 20 characters of a-z and 2-7", "'%.40s' is not the name of an installation", cfg.Installation)
	}
	t := &Trees{
		cfg: cfg, courier: newCourier(),
		turn: make(chan struct{}, 1), done: make(chan struct{}), moved: make(chan struct{}),
	}
	if cfg.Witnesses != nil {
		var err error
		if t.witnesses, err = tessera.NewWitnessGroupFromPolicy(cfg.Witnesses); err != nil {
			return nil, airlock.Invalidf("witnesses", "each line is: witness NAME VKEY URL, group NAME N MEMBER…, or quorum NAME", "the witness policy can't be read: %v", err)
		}
	}
	quietKlog()
	if err := t.openDir(); err != nil {
		return nil, err
	}
	err := t.load(ctx)
	if err != nil {
		t.root.Close()
		t.lock.Close()
		return nil, err
	}
	t.watching.Go(t.watch)
	return t, nil
}

// quietKlog is once for the process, because klog may not be told while it logs.
var quietKlog = sync.OnceFunc(func() { klog.SetSlogLogger(slog.New(defaultSlog{})) })

// defaultSlog passes warnings and errors on to slog's default of that time.
type defaultSlog struct{}

func (defaultSlog) Enabled(ctx context.Context, l slog.Level) bool {
	return l >= slog.LevelWarn && slog.Default().Enabled(ctx, l)
}

func (defaultSlog) Handle(ctx context.Context, r slog.Record) error {
	r.AddAttrs(slog.String("library", "tessera"))
	return slog.Default().Handler().Handle(ctx, r)
}

func (h defaultSlog) WithAttrs([]slog.Attr) slog.Handler { return h }
func (h defaultSlog) WithGroup(string) slog.Handler      { return h }

func (t *Trees) openDir() (err error) {
	if err := os.MkdirAll(t.cfg.Dir, 0o700); err != nil {
		return fmt.Errorf("make the audit log's directory: %w", err)
	}
	t.lock, err = os.OpenFile(filepath.Join(t.cfg.Dir, lockName), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return fmt.Errorf("open the audit log's lock: %w", err)
	}
	if err := unix.Flock(int(t.lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		t.lock.Close()
		return (&airlock.Error{
			Code:    airlock.Conflict,
			Message: fmt.Sprintf("the audit log %s is in use by another process", t.cfg.Dir),
			Hint:    "stop the other airlock server, or use another data directory",
		}).Because(err)
	}
	if t.root, err = os.OpenRoot(t.cfg.Dir); err != nil {
		t.lock.Close()
		return fmt.Errorf("open the audit log's directory: %w", err)
	}
	t.disk = newDisk(t.root)
	return nil
}

// load finds the shards and opens the newest.
func (t *Trees) load(ctx context.Context) error {
	entries, err := os.ReadDir(t.cfg.Dir)
	if err != nil {
		return fmt.Errorf("list the audit log: %w", err)
	}
	var ids []string
	for _, e := range entries {
		if !e.IsDir() || !ValidShard(e.Name()) {
			continue
		}
		// A shard without a checkpoint and without tiles is one whose Start
		// never returned. The next Start of that name begins it anew.
		bare := true
		for _, name := range []string{layout.CheckpointPath, "tile"} {
			if _, err := t.root.Lstat(e.Name() + "/" + name); !errors.Is(err, fs.ErrNotExist) {
				bare = false
			}
		}
		if !bare {
			ids = append(ids, e.Name())
		}
	}
	slices.SortFunc(ids, CompareShards)
	for i, id := range ids {
		if i == len(ids)-1 {
			return t.resume(ctx, id)
		}
		s, err := t.loadClosed(id)
		if err != nil {
			return err
		}
		t.shards = append(t.shards, s)
		t.next += s.Size
	}
	return nil
}

// loadClosed reads what is known of a shard that nothing is added to. Its
// checkpoint is trusted as far as the key in its own first entry goes; Verify
// checks the chain of keys.
func (t *Trees) loadClosed(id string) (Shard, error) {
	text, err := t.disk.read(id+"/"+layout.CheckpointPath, checkpointMost, nil)
	if err != nil {
		return Shard{}, fmt.Errorf("read the checkpoint of shard %s: %w", id, err)
	}
	cp, err := peekCheckpoint(text)
	if err != nil {
		return Shard{}, damaged(id, "its checkpoint can't be read", err)
	}
	s := Shard{ID: id, Origin: cp.origin, First: t.next, Size: cp.size, Root: cp.root, Checkpoint: string(text), Closed: true}
	if cp.origin != Origin(t.cfg.Installation, id) {
		return Shard{}, foreign(id, cp.origin, t.cfg.Installation)
	}
	if err := t.finishDrop(id); err != nil {
		return Shard{}, err
	}
	if _, err := t.root.Lstat(id + "/tile"); errors.Is(err, fs.ErrNotExist) {
		s.Dropped = true
		return s, nil
	}
	raw, _, err := t.disk.bundle(id, 0, cp.size, nil)
	if err != nil {
		return Shard{}, fmt.Errorf("read the first entries of shard %s: %w", id, err)
	}
	var event logEvent
	splitBundle(raw, func(_ int, entry []byte) bool {
		event, _ = parseLogEvent(entry)
		return false
	})
	v, err := note.NewVerifier(event.Log.VKey)
	if err != nil {
		return Shard{}, damaged(id, "its first entry names no key", err)
	}
	if v.Name() != s.Origin {
		return Shard{}, damaged(id, fmt.Sprintf("its first entry names the key of %.80q", v.Name()), nil)
	}
	if _, err := parseCheckpoint(text, v); err != nil {
		return Shard{}, damaged(id, "its checkpoint is not signed by the key that its first entry names", err)
	}
	s.VKey = event.Log.VKey
	return s, nil
}

func damaged(shard, what string, err error) error {
	return (&airlock.Error{
		Code:    airlock.Conflict,
		Message: fmt.Sprintf("the audit log's shard %s is damaged: %s", shard, what),
		Hint:    "verify the log, and put back what was changed from a copy",
	}).Because(err)
}

func foreign(shard, origin, installation string) error {
	return &airlock.Error{
		Code:    airlock.Conflict,
		Message: fmt.Sprintf("shard %s is the log %.100q, not %q", shard, origin, Origin(installation, shard)),
		Hint:    "the directory belongs to another installation, or was renamed",
	}
}

// resume opens the newest shard, after it has checked that what Tessera goes
// on from is the tree that was signed.
func (t *Trees) resume(ctx context.Context, id string) error {
	text, err := t.disk.read(id+"/"+layout.CheckpointPath, checkpointMost, nil)
	if errors.Is(err, fs.ErrNotExist) {
		return damaged(id, "it has entries and its checkpoint is missing", err)
	}
	if err != nil {
		return fmt.Errorf("read the checkpoint of shard %s: %w", id, err)
	}
	peek, err := peekCheckpoint(text)
	if err != nil {
		return damaged(id, "its checkpoint can't be read", err)
	}
	if peek.origin != Origin(t.cfg.Installation, id) {
		return foreign(id, peek.origin, t.cfg.Installation)
	}
	for _, key := range t.cfg.Keys {
		v, vkey, err := verifierOf(t.cfg.Installation, id, key)
		if err != nil {
			return err
		}
		cp, err := parseCheckpoint(text, v)
		if err != nil {
			continue
		}
		r, err := t.check(id, cp)
		if err != nil {
			return err
		}
		t.sweep(id, r.End())
		tr, err := t.openTree(ctx, id, t.next, key, v, vkey, r)
		if err != nil {
			return err
		}
		tr.published = cp
		t.current = tr
		t.next += r.End()
		t.late()
		return nil
	}
	return &airlock.Error{
		Code:    airlock.Conflict,
		Message: fmt.Sprintf("the checkpoint of the audit log's shard %s is not signed by any key that was given", id),
		Hint:    "give the key that the shard was begun with; a new key is for a new shard. If it is the right key, the checkpoint was changed",
	}
}

func verifierOf(installation, shard string, key crypto.Signer) (note.Verifier, string, error) {
	public, ok := key.Public().(ed25519.PublicKey)
	if !ok {
		return nil, "", airlock.Invalidf("key", "use an Ed25519 key", "a key of type %T can't sign the audit log", key.Public())
	}
	vkey, err := VKey(installation, shard, public)
	if err != nil {
		return nil, "", err
	}
	v, err := note.NewVerifier(vkey)
	if err != nil {
		return nil, "", fmt.Errorf("read the key of shard %s: %w", shard, err)
	}
	return v, vkey, nil
}

// Next is the number of the event that comes next.
func (t *Trees) Next() uint64 {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.next
}

// Published answers the newest shard, "" if there is none, and below which
// number all events are covered by a published checkpoint.
func (t *Trees) Published() (shard string, next uint64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.current == nil {
		return "", t.next
	}
	return t.current.shard, t.current.first + t.current.published.size
}

// Shards answers all shards in order.
func (t *Trees) Shards() []Shard {
	t.mu.Lock()
	defer t.mu.Unlock()
	all := slices.Clone(t.shards)
	if tr := t.current; tr != nil {
		all = append(all, tr.describe())
	}
	return all
}

// Err answers why no checkpoint is published although entries wait for one. It
// is nil when all is well.
func (t *Trees) Err() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.current == nil || t.since.IsZero() {
		return nil
	}
	err := t.current.guard.refusal()
	if err == nil {
		err = t.courier.failure()
	}
	late := time.Since(t.since)
	if err == nil && late > max(lateAfter, 3*t.cfg.Checkpoint) {
		err = errors.New("the log says more")
	}
	if err == nil {
		return nil
	}
	n := t.next - t.current.first - t.current.published.size
	return airlock.Errorf(airlock.Unavailable, "%d events of the audit log have no published checkpoint since %v: see its disk and its witnesses", n, late.Round(time.Second)).Because(err)
}

// Await waits until a published checkpoint covers the event with a number.
func (t *Trees) Await(ctx context.Context, seq uint64) error {
	for {
		t.mu.Lock()
		moved, closed := t.moved, t.closed
		covered := t.next
		if t.current != nil {
			covered = t.current.first + t.current.published.size
		}
		t.mu.Unlock()
		switch {
		case seq < covered:
			return nil
		case closed:
			return errClosed
		}
		select {
		case <-moved:
		case <-ctx.Done():
			return fmt.Errorf("wait for the checkpoint of event %d: %w", seq, errors.Join(ctx.Err(), t.Err()))
		}
	}
}

// watch notices what Tessera publishes. It ends with the Trees.
func (t *Trees) watch() {
	tick := time.NewTicker(min(max(t.cfg.Checkpoint/20, 10*time.Millisecond), 50*time.Millisecond))
	defer tick.Stop()
	for {
		select {
		case <-t.done:
			return
		case <-tick.C:
		}
		t.mu.Lock()
		tr := t.current
		behind := tr != nil && !t.since.IsZero()
		t.mu.Unlock()
		if behind {
			t.look(tr)
		}
	}
}

// look reads the published checkpoint of the newest shard.
func (t *Trees) look(tr *tree) {
	text, err := t.disk.read(tr.shard+"/"+layout.CheckpointPath, checkpointMost, nil)
	if err != nil {
		return // the next look may be luckier; meanwhile Err tells that it is late
	}
	cp, err := parseCheckpoint(text, tr.guard.verifier)
	if err != nil {
		return // not one that we signed
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if cp.size <= tr.published.size || cp.size > t.next-tr.first || t.current != tr {
		return
	}
	tr.published = cp
	t.courier.note(nil)
	t.since = time.Time{}
	t.late()
	t.wake()
}

// late remembers since when a checkpoint is missing. It is called with mu.
func (t *Trees) late() {
	if tr := t.current; tr != nil && t.since.IsZero() && t.next > tr.first+tr.published.size {
		t.since = time.Now()
	}
}

// wake is called with mu.
func (t *Trees) wake() {
	close(t.moved)
	t.moved = make(chan struct{})
}

// begin takes the turn to write. Whoever has it gives it back to turn.
func (t *Trees) begin(ctx context.Context) error {
	if err := t.take(ctx); err != nil {
		return err
	}
	t.mu.Lock()
	closed := t.closed
	t.mu.Unlock()
	if closed {
		<-t.turn
		return errClosed
	}
	return nil
}

func (t *Trees) take(ctx context.Context) error {
	select {
	case t.turn <- struct{}{}: // also if ctx has ended: Close needs no time
		return nil
	default:
	}
	select {
	case t.turn <- struct{}{}:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("wait for the turn to write the audit log: %w", ctx.Err())
	}
}

// Start begins a new shard, whose name sorts behind all others, with the event
// first, which must be Next. It waits for the final checkpoint of the shard
// before, and closes that. When it fails, the shard before goes on.
//
// What the new shard's first entry says of the shard before, Shards tells once
// Await has returned for the last event. A server that is killed between Start
// and that entry finds a newest shard of no entries, and adds it then.
func (t *Trees) Start(ctx context.Context, shard string, first uint64, key crypto.Signer) error {
	if err := checkShard(shard); err != nil {
		return err
	}
	v, vkey, err := verifierOf(t.cfg.Installation, shard, key)
	if err != nil {
		return err
	}
	if err := t.begin(ctx); err != nil {
		return err
	}
	defer func() { <-t.turn }()
	if err := t.settleNow(); err != nil {
		return err
	}
	t.mu.Lock()
	next, before := t.next, t.current
	t.mu.Unlock()
	if first != next {
		return airlock.Errorf(airlock.Conflict, "shard %s would begin with event %d and the next is %d", shard, first, next)
	}
	if before != nil {
		if CompareShards(shard, before.shard) <= 0 {
			return airlock.Invalidf("shard", fmt.Sprintf("add a number: %s.2", shard), "shard %s would sort before %s, which is there", shard, before.shard)
		}
		if next == before.first {
			return airlock.Errorf(airlock.Conflict, "shard %s is still empty: add its first entry", before.shard)
		}
		if err := t.Await(ctx, next-1); err != nil {
			return err
		}
	}
	if err := t.makeShard(shard); err != nil {
		return err
	}
	empty := hashing.NewEmptyRange(0)
	tr, err := t.openTree(ctx, shard, first, key, v, vkey, empty)
	if err != nil {
		return err
	}
	text, err := t.disk.read(shard+"/"+layout.CheckpointPath, checkpointMost, nil)
	if err == nil {
		tr.published, err = parseCheckpoint(text, v)
	}
	if err != nil {
		tr.stop()
		t.root.RemoveAll(shard) // or the next Open would take it for the newest
		return fmt.Errorf("read the first checkpoint of shard %s: %w", shard, err)
	}
	t.mu.Lock()
	if before != nil {
		closed := before.describe()
		closed.Closed = true
		t.shards = append(t.shards, closed)
	}
	t.current = tr
	t.mu.Unlock()
	if before != nil {
		before.stop()
	}
	return nil
}

// makeShard makes the directory of a new shard, and removes what a Start that
// failed may have left in it.
func (t *Trees) makeShard(id string) error {
	if _, err := t.root.Lstat(id + "/tile"); !errors.Is(err, fs.ErrNotExist) {
		return airlock.Errorf(airlock.Conflict, "shard %s is there already and has entries: open the audit log again", id).Because(err)
	}
	if err := t.root.RemoveAll(id); err != nil {
		return fmt.Errorf("make shard %s: %w", id, err)
	}
	if err := t.root.Mkdir(id, 0o700); err != nil {
		return fmt.Errorf("make shard %s: %w", id, err)
	}
	return t.sync(".")
}

// sync makes the names in a directory durable.
func (t *Trees) sync(name string) error {
	f, err := t.root.Open(name)
	if err != nil {
		return fmt.Errorf("sync directory of the audit log: %w", err)
	}
	defer f.Close()
	if err := f.Sync(); err != nil {
		return fmt.Errorf("sync directory of the audit log: %w", err)
	}
	return nil
}

// Drop removes a closed shard, all but its checkpoint.
func (t *Trees) Drop(ctx context.Context, shard string) error {
	if err := t.begin(ctx); err != nil {
		return err
	}
	defer func() { <-t.turn }()
	t.mu.Lock()
	at := slices.IndexFunc(t.shards, func(s Shard) bool { return s.ID == shard })
	newest := t.current != nil && t.current.shard == shard
	t.mu.Unlock()
	switch {
	case newest:
		return airlock.Errorf(airlock.Conflict, "shard %s is the newest and can't be dropped: begin another one first", shard)
	case at < 0:
		return airlock.Errorf(airlock.NotFound, "the audit log has no shard '%.40s'", shard)
	}
	// The rename is the moment: from then on the shard counts as dropped.
	err := t.root.Rename(shard+"/tile", shard+"/"+dropping)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("drop shard %s: %w", shard, err)
	}
	t.mu.Lock()
	t.shards[at].Dropped, t.shards[at].VKey = true, ""
	t.mu.Unlock()
	return t.finishDrop(shard)
}

// dropping is what the tiles of a shard that is being dropped are called.
const dropping = "dropping"

// finishDrop removes what is left of a shard whose tiles are gone or renamed.
func (t *Trees) finishDrop(shard string) error {
	if _, err := t.root.Lstat(shard + "/tile"); !errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err := t.sync(shard); err != nil {
		return err
	}
	for _, name := range []string{dropping, ".state"} {
		if err := t.root.RemoveAll(shard + "/" + name); err != nil {
			return fmt.Errorf("drop shard %s: %w", shard, err)
		}
	}
	return t.sync(shard)
}

// Close waits until the last entry has a published checkpoint, or ctx ends,
// and lets go of the directory. Without that checkpoint it answers an error,
// and nothing is lost: the entries are signed after the next Open. When ctx
// ends while someone still writes, nothing is closed: call it again.
func (t *Trees) Close(ctx context.Context) error {
	if err := t.take(ctx); err != nil {
		return err
	}
	defer func() { <-t.turn }()
	t.mu.Lock()
	tr, next, closed := t.current, t.next, t.closed
	t.mu.Unlock()
	if closed {
		return nil
	}
	var err error
	if next > 0 {
		err = t.Await(ctx, next-1)
	}
	t.mu.Lock()
	t.closed = true
	t.wake()
	t.mu.Unlock()
	close(t.done)
	t.watching.Wait()
	if tr != nil {
		tr.stop()
	}
	return errors.Join(err, t.root.Close(), t.lock.Close())
}
