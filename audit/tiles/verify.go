package tiles

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"

	"airlock.dev/airlock"
	"github.com/transparency-dev/tessera/api/layout"
	"golang.org/x/mod/sumdb/note"
)

// VerifyOptions say what the caller knows already.
type VerifyOptions struct {
	// VKeys are verifier keys of shards, one for each name. Those of the
	// first shard that was not dropped, at least, must be given.
	VKeys []string
	// FollowKeys lets the entry that closes a shard name the key of the next
	// one, if no key of that name is given.
	FollowKeys bool
	// Heads are checkpoints that the caller kept, or got from a witness: the
	// log must still contain each. Nothing else notices a log that was put
	// back to an older state as a whole.
	Heads []string
	// Most bounds Problems and Notes of the report; 0 is 100.
	Most int
}

// Kind says what is wrong in a word.
type Kind string

// The kinds. Absent is what is not there, Unreadable what may be there and
// could not be read; they are never mixed up.
const (
	Altered    Kind = "altered"
	Absent     Kind = "absent"
	Unreadable Kind = "unreadable"
	RolledBack Kind = "rolled_back" // a kept head knows more entries than the log has
	Forked     Kind = "forked"      // a kept head knows other entries than the log has
	Unsigned   Kind = "unsigned"
	OutOfOrder Kind = "out_of_order"
	Stray      Kind = "stray" // a file that does not belong; only in notes
)

// Problem is one thing that is wrong, as exactly as the hashes can tell.
type Problem struct {
	Kind   Kind   `json:"kind"`
	Shard  string `json:"shard,omitempty"`
	File   string `json:"file,omitempty"`   // below the directory
	Seq    uint64 `json:"seq"`              // first event that it concerns
	Events uint64 `json:"events,omitempty"` // how many in a row; 0 if it concerns none
	Text   string `json:"text"`             // a sentence, printable
}

// Verified describes one shard as it was found.
type Verified struct {
	ID         string `json:"id"`
	Origin     string `json:"origin"`
	VKey       string `json:"vkey"` // "" if none was known
	First      uint64 `json:"first"`
	Size       uint64 `json:"size"` // of its checkpoint
	Root       string `json:"root"` // base64
	Checkpoint string `json:"checkpoint"`
	Dropped    bool   `json:"dropped"`
	Unsigned   uint64 `json:"unsigned"` // entries behind the checkpoint
}

// Report is what Verify found.
type Report struct {
	Shards   []Verified `json:"shards"`
	Events   uint64     `json:"events"` // that were read and hashed
	Problems []Problem  `json:"problems"`
	Count    int        `json:"count"` // of all problems, also those left out
	// Notes are worth knowing and not wrong: entries that are not signed yet,
	// files that don't belong.
	Notes []Problem `json:"notes"`
}

// OK tells whether the log is what it should be.
func (r Report) OK() bool { return r.Count == 0 }

// collectMost bounds what is kept of problems before they are sorted and cut.
const collectMost = 10_000

// Verify checks the logs in a directory by recomputing them from their
// entries. It writes nothing, needs no secret, and shares no state with Open;
// a log that is being written may be verified. It reads nothing outside of the
// directory and bounds what it reads of each file. The error is about the
// call; what is wrong with the log is in the report.
func Verify(ctx context.Context, dir string, opts VerifyOptions) (Report, error) {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return Report{}, fmt.Errorf("open the audit log: %w", err)
	}
	defer root.Close()
	return verify(ctx, newDisk(root), root.FS(), opts)
}

func verify(ctx context.Context, d disk, tree fs.FS, opts VerifyOptions) (Report, error) {
	v := &verifier{ctx: ctx, disk: d, tree: tree, follow: opts.FollowKeys, keys: map[string]note.Verifier{}, vkeys: map[string]string{}, named: map[string]string{}}
	for _, vkey := range opts.VKeys {
		if err := v.learn(strings.TrimSpace(vkey)); err != nil {
			return Report{}, airlock.Invalidf("vkey", "give keys like airlock/INSTALLATION/SHARD+HASH+KEY", "'%.100s' is not a key", vkey).Because(err)
		}
	}
	for i, text := range opts.Heads {
		cp, err := peekCheckpoint([]byte(text))
		if err != nil {
			return Report{}, airlock.Invalidf("heads", "give the whole text of a checkpoint", "head %d is not a checkpoint", i+1).Because(err)
		}
		v.heads = append(v.heads, cp)
	}
	if err := v.run(); err != nil {
		return Report{}, fmt.Errorf("verify the audit log: %w", err)
	}
	return v.report(cmp.Or(max(opts.Most, 0), 100)), nil
}

type verifier struct {
	ctx    context.Context
	disk   disk
	tree   fs.FS
	follow bool
	keys   map[string]note.Verifier // by origin
	vkeys  map[string]string
	heads  []checkpoint

	shards       []Verified
	installation string
	named        map[string]string // keys that the entries that close shards name, by origin
	drops        map[string][]drop // what says that retention dropped a shard; nil if none was

	mu       sync.Mutex
	problems []Problem
	count    int
	notes    []Problem
	events   atomic.Uint64
}

func (v *verifier) learn(vkey string) error {
	k, err := note.NewVerifier(vkey)
	if err != nil {
		return err
	}
	if !originForm.MatchString(k.Name()) {
		return errors.New("its name is not that of a shard")
	}
	v.keys[k.Name()], v.vkeys[k.Name()] = k, vkey
	return nil
}

func (v *verifier) found(p Problem) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.count++
	if len(v.problems) < collectMost {
		v.problems = append(v.problems, p)
	}
}

func (v *verifier) remark(p Problem) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if len(v.notes) < collectMost {
		v.notes = append(v.notes, p)
	}
}

// fault is a problem with a file that could not be read.
func fault(p Problem, err error) Problem {
	var path *fs.PathError
	if errors.As(err, &path) {
		err = path.Err
	}
	switch {
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, syscall.ENOTDIR):
		p.Kind, p.Text = Absent, "the file is not there"
	case errors.Is(err, errIrregular), errors.Is(err, errOversize), errors.Is(err, errTileLength), errors.Is(err, syscall.ELOOP):
		p.Kind, p.Text = Altered, fmt.Sprintf("the file is not one of a log: %v", err)
	case err.Error() == "path escapes from parent": // of os.Root, which names no such error
		p.Kind, p.Text = Altered, "a symbolic link leads out of the log"
	default:
		p.Kind, p.Text = Unreadable, fmt.Sprintf("the file could not be read: %v", err)
	}
	return p
}

func (v *verifier) report(most int) Report {
	order := func(a, b Problem) int {
		return cmp.Or(compareNames(a.Shard, b.Shard), cmp.Compare(a.Seq, b.Seq), cmp.Compare(a.File, b.File), cmp.Compare(a.Kind, b.Kind))
	}
	slices.SortStableFunc(v.problems, order)
	slices.SortStableFunc(v.notes, order)
	return Report{
		Shards: v.shards, Events: v.events.Load(), Count: v.count,
		Problems: v.problems[:min(most, len(v.problems))], Notes: v.notes[:min(most, len(v.notes))],
	}
}

func compareNames(a, b string) int {
	if ValidShard(a) && ValidShard(b) {
		return CompareShards(a, b)
	}
	return cmp.Compare(a, b)
}

func (v *verifier) run() error {
	entries, err := fs.ReadDir(v.tree, ".")
	if err != nil {
		return err
	}
	var ids []string
	for _, e := range entries {
		switch {
		case e.IsDir() && ValidShard(e.Name()):
			ids = append(ids, e.Name())
		case e.Name() == lockName && e.Type().IsRegular():
		default:
			v.stray("", e.Name())
		}
	}
	slices.SortFunc(ids, CompareShards)
	for i, id := range ids {
		if v.gone(id) {
			v.drops = map[string][]drop{}
			continue
		}
		// A shard whose making was interrupted has nothing to say.
		if i == len(ids)-1 && v.missing(id+"/"+layout.CheckpointPath) && v.missing(id+"/tile") {
			v.remark(Problem{Kind: Stray, Shard: id, File: id, Text: "the shard was begun and has no checkpoint and no entries"})
			ids = ids[:i]
			break
		}
	}
	for i, id := range ids {
		s := &shardCheck{verifier: v, id: id, newest: i == len(ids)-1}
		if i > 0 {
			s.before = &v.shards[i-1]
		}
		if i+1 < len(ids) {
			s.after = ids[i+1]
		}
		if err := s.run(); err != nil {
			return err
		}
		v.shards = append(v.shards, s.Verified)
	}
	for _, s := range v.shards {
		if s.Dropped {
			v.checkDrop(s)
		}
	}
	for _, h := range v.heads {
		here := slices.ContainsFunc(v.shards, func(s Verified) bool {
			return s.Origin == h.origin || s.Origin == "" && strings.HasSuffix(h.origin, "/"+s.ID)
		})
		if !here {
			v.found(Problem{Kind: RolledBack, Text: fmt.Sprintf("a head was kept of the log %.100q, which is not here", h.origin)})
		}
	}
	return nil
}

func (v *verifier) missing(name string) bool {
	_, err := fs.Stat(v.tree, name)
	return errors.Is(err, fs.ErrNotExist)
}

// gone tells whether a shard has a checkpoint and no entries, as a dropped one.
func (v *verifier) gone(id string) bool {
	if !v.missing(id + "/tile") {
		return false
	}
	text, err := v.disk.read(id+"/"+layout.CheckpointPath, checkpointMost, nil)
	if err != nil {
		return false
	}
	cp, err := peekCheckpoint(text)
	return err == nil && cp.size > 0
}

// checkDrop looks for the event that says that retention dropped a shard.
func (v *verifier) checkDrop(s Verified) {
	for _, d := range v.drops[s.ID] {
		if d.log.Size == s.Size && d.log.Root == s.Root && d.log.First == s.First && d.seq >= s.First+s.Size {
			return
		}
	}
	p := Problem{Kind: Absent, Shard: s.ID, File: s.ID + "/tile", Seq: s.First, Events: s.Size,
		Text: "the shard's entries are gone, and no event that is still there says that retention dropped them"}
	if len(v.drops[s.ID]) > 0 {
		p.Kind, p.File, p.Text = Altered, s.ID+"/"+layout.CheckpointPath, "the shard was dropped, and its checkpoint is not the one of the event that says so"
	}
	v.found(p)
}

func (v *verifier) stray(shard, name string) {
	v.remark(Problem{Kind: Stray, Shard: shard, File: strings.ToValidUTF8(name, "\uFFFD"), Text: "the file does not belong to the log"})
}
