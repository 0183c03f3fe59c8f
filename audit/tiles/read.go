package tiles

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"

	"airlock.dev/airlock"
	"github.com/transparency-dev/merkle/proof"
	"github.com/transparency-dev/merkle/rfc6962"
	"github.com/transparency-dev/tessera/client"
	"golang.org/x/mod/sumdb/note"
	"golang.org/x/mod/sumdb/tlog"
)

// Entries returns up to most events from number from on, across shards, as
// they lie on disk: it checks their numbers and no hashes. It returns none at
// the end of the log, and Gone for events of a dropped shard.
func (t *Trees) Entries(ctx context.Context, from uint64, most int) ([][]byte, error) {
	var all [][]byte
	for next := t.Next(); from < next && len(all) < most; {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		s, size, err := t.holder(from)
		if err != nil {
			return nil, err
		}
		got, err := t.disk.slice(s.ID, s.First, size, from, most-len(all))
		if err != nil {
			return nil, err
		}
		all = append(all, got...)
		from += uint64(len(got))
	}
	return all, nil
}

// holder is the shard that an event is in, and how many entries it has.
func (t *Trees) holder(seq uint64) (s Shard, size uint64, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	switch {
	case t.closed:
		return Shard{}, 0, errClosed
	case seq >= t.next:
		return Shard{}, 0, airlock.Errorf(airlock.NotFound, "the audit log has no event %d: the next is %d", seq, t.next)
	case t.current != nil && seq >= t.current.first:
		return t.current.describe(), t.next - t.current.first, nil
	}
	for _, s = range t.shards {
		if seq < s.First+s.Size {
			break
		}
	}
	if s.Dropped {
		return Shard{}, 0, airlock.Errorf(airlock.NotFound, "event %d was in shard %s, which retention has dropped", seq, s.ID)
	}
	return s, s.Size, nil
}

// Read returns up to most events from number from on, or from the first one
// behind that, out of a directory that Verify has reported on: those that it
// found then, signed or not. What was dropped is passed over.
func Read(ctx context.Context, dir string, r Report, from uint64, most int) ([][]byte, error) {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return nil, fmt.Errorf("open the audit log: %w", err)
	}
	defer root.Close()
	var all [][]byte
	for _, s := range r.Shards {
		size := s.Size + s.Unsigned
		if s.Dropped || from >= s.First+size {
			continue
		}
		from = max(from, s.First)
		for from < s.First+size && len(all) < most {
			if err := ctx.Err(); err != nil {
				return nil, err
			}
			got, err := newDisk(root).slice(s.ID, s.First, size, from, most-len(all))
			if err != nil {
				return nil, err
			}
			all = append(all, got...)
			from += uint64(len(got))
		}
	}
	return all, nil
}

// slice reads events of one bundle of a shard that has size entries.
func (d disk) slice(shard string, first, size, from uint64, most int) ([][]byte, error) {
	index := (from - first) / width
	begin := first + index*width
	end := min(begin+width, first+size, from+uint64(most))
	raw, name, err := d.bundle(shard, index, size, nil)
	if err != nil {
		return nil, readError(shard, name, err)
	}
	var got [][]byte
	var prefix []byte
	n, err := splitBundle(raw, func(i int, entry []byte) bool {
		seq := begin + uint64(i)
		if seq >= end {
			return false
		}
		if seq < from {
			return true
		}
		prefix = appendPrefix(prefix[:0], seq)
		if !bytes.HasPrefix(entry, prefix) {
			return false
		}
		got = append(got, entry)
		return true
	})
	if err != nil || uint64(len(got)) != end-from {
		return nil, damaged(shard, fmt.Sprintf("event %d can't be read from %s, which has %d entries", from+uint64(len(got)), name, n), err)
	}
	return got, nil
}

func readError(shard, name string, err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return damaged(shard, name+" is missing", err)
	}
	return fmt.Errorf("read %s of the audit log: %w", name, err)
}

// Proof shows that an event is in a log. It needs nothing but the key that the
// log is known by.
type Proof struct {
	Seq        uint64   `json:"seq"`
	Event      string   `json:"event"` // its bytes
	Shard      string   `json:"shard"`
	Index      uint64   `json:"index"`      // of the entry in the shard
	Checkpoint string   `json:"checkpoint"` // a signed note
	Path       [][]byte `json:"path"`       // RFC 6962 audit path, from the leaf up
	VKey       string   `json:"vkey"`       // what the log says that its key is: trust another copy
}

// Prove makes the proof of an event, and checks it. Before a published
// checkpoint covers the event it answers Unavailable; see Await.
func (t *Trees) Prove(ctx context.Context, seq uint64) (Proof, error) {
	s, _, err := t.holder(seq)
	if err != nil {
		return Proof{}, err
	}
	index := seq - s.First
	if index >= s.Size {
		return Proof{}, airlock.Errorf(airlock.Unavailable, "no published checkpoint covers event %d yet: ask again in a moment", seq)
	}
	entries, err := t.disk.slice(s.ID, s.First, s.Size, seq, 1)
	if err != nil {
		return Proof{}, err
	}
	builder, err := client.NewProofBuilder(ctx, s.Size, t.disk.fetcher(s.ID))
	if err != nil {
		return Proof{}, fmt.Errorf("prove event %d: %w", seq, err)
	}
	path, err := builder.InclusionProof(ctx, index)
	if err != nil {
		return Proof{}, fmt.Errorf("prove event %d: %w", seq, err)
	}
	p := Proof{Seq: seq, Event: string(entries[0]), Shard: s.ID, Index: index, Checkpoint: s.Checkpoint, Path: path, VKey: s.VKey}
	if err := VerifyProof(p, s.VKey); err != nil {
		return Proof{}, damaged(s.ID, fmt.Sprintf("event %d can't be proved", seq), err)
	}
	return p, nil
}

// Consistency shows that the tree of a shard's first From entries is the
// beginning of that of its first To, which is the beginning of the one that was
// signed. All of it but To's place in the signed tree is RFC 6962's proof.
type Consistency struct {
	Shard      string   `json:"shard"`
	From       uint64   `json:"from"`
	To         uint64   `json:"to"`
	FromRoot   []byte   `json:"fromRoot"`
	ToRoot     []byte   `json:"toRoot"`
	Hashes     [][]byte `json:"hashes"`     // from From to To
	Checkpoint string   `json:"checkpoint"` // a signed note
	Signed     [][]byte `json:"signed"`     // from To to the checkpoint's size
	VKey       string   `json:"vkey"`       // what the log says that its key is: trust another copy
}

// Consistency makes the proof between two sizes of a shard, and checks it. to
// is at most the size of the published checkpoint, and from at most to.
func (t *Trees) Consistency(ctx context.Context, shard string, from, to uint64) (Consistency, error) {
	for _, s := range t.Shards() {
		switch {
		case s.ID != shard:
			continue
		case s.Dropped:
			return Consistency{}, airlock.Errorf(airlock.NotFound, "shard %s was dropped by retention", s.ID)
		case from > to || to > s.Size:
			return Consistency{}, airlock.Invalidf("to", fmt.Sprintf("use sizes up to %d", s.Size), "shard %s has no trees of %d and %d signed entries", s.ID, from, to)
		}
		p := Consistency{Shard: s.ID, From: from, To: to, Checkpoint: s.Checkpoint, VKey: s.VKey}
		if err := t.disk.consistency(ctx, &p, s.Size); err != nil {
			return Consistency{}, fmt.Errorf("prove %d to %d entries of shard %s: %w", from, to, s.ID, err)
		}
		if err := VerifyConsistency(p, s.VKey); err != nil {
			return Consistency{}, damaged(s.ID, fmt.Sprintf("%d to %d entries can't be proved", from, to), err)
		}
		return p, nil
	}
	return Consistency{}, airlock.Errorf(airlock.NotFound, "the audit log has no shard '%.40s'", shard)
}

// consistency fills in the roots and hashes of a proof.
func (d disk) consistency(ctx context.Context, p *Consistency, size uint64) error {
	builder, err := client.NewProofBuilder(ctx, size, d.fetcher(p.Shard))
	if err != nil {
		return err
	}
	for _, step := range []struct {
		from, to uint64
		hashes   *[][]byte
	}{{p.From, p.To, &p.Hashes}, {p.To, size, &p.Signed}} {
		*step.hashes = [][]byte{}
		if step.from == 0 || step.from == step.to {
			continue // everything begins with nothing, and with itself
		}
		if *step.hashes, err = builder.ConsistencyProof(ctx, step.from, step.to); err != nil {
			return err
		}
	}
	for _, step := range []struct {
		size uint64
		root *[]byte
	}{{p.From, &p.FromRoot}, {p.To, &p.ToRoot}} {
		var failed error
		r, err := rangeOf(step.size, d.tileNodes(p.Shard, size, &failed))
		if err != nil {
			return errors.Join(err, failed)
		}
		root, err := rootOf(r)
		if err != nil {
			return err
		}
		*step.root = root[:]
	}
	return nil
}

// VerifyConsistency checks a proof against the key that the reader knows the
// log by. Whether FromRoot is the one that the reader kept is theirs to see.
func VerifyConsistency(p Consistency, vkey string) error {
	cp, err := signedBy(p.Checkpoint, p.Shard, vkey)
	if err != nil {
		return err
	}
	for _, step := range []struct {
		from, to  uint64
		hashes    [][]byte
		was, is   []byte
		otherwise string
	}{
		{p.To, cp.size, p.Signed, p.ToRoot, cp.root[:], "toRoot, or the hashes in signed, are not those of the tree of %[2]d entries that was signed"},
		{p.From, p.To, p.Hashes, p.FromRoot, p.ToRoot, "fromRoot, or the hashes, are not those of a tree of %d entries that is the beginning of the one of %d"},
	} {
		if !extends(step.from, step.to, step.hashes, step.was, step.is) {
			return airlock.Errorf(airlock.Invalid, "the proof does not hold: "+step.otherwise, step.from, step.to)
		}
	}
	return nil
}

// extends tells whether a tree is the beginning of another one.
func extends(from, to uint64, hashes [][]byte, was, is []byte) bool {
	for _, h := range append([][]byte{was, is}, hashes...) {
		if len(h) != tlog.HashSize {
			return false
		}
	}
	switch {
	case from == 0 && to > 0: // RFC 6962 has no proof of this, and it needs none
		return len(hashes) == 0 && bytes.Equal(was, rfc6962.DefaultHasher.EmptyRoot())
	case from == to:
		return len(hashes) == 0 && bytes.Equal(was, is)
	}
	return proof.VerifyConsistency(rfc6962.DefaultHasher, from, to, hashes, was, is) == nil
}

// KeyOf chooses the key of a checkpoint's shard, by its name. The errors say
// which key is missing and how to get it; vkeys may be those of several logs.
func KeyOf(vkeys []string, checkpoint string) (string, error) {
	cp, err := peekCheckpoint([]byte(checkpoint))
	if err != nil {
		return "", airlock.Errorf(airlock.Invalid, "the proof does not hold: its checkpoint is not one").Because(err)
	}
	for _, vkey := range vkeys {
		v, err := note.NewVerifier(vkey)
		if err != nil {
			return "", airlock.Invalidf("vkey", "give keys like airlock/INSTALLATION/SHARD+HASH+KEY, as `airlock audit keys` prints them", "'%.100s' is not a key", vkey).Because(err)
		}
		if v.Name() == cp.origin {
			return vkey, nil
		}
	}
	return "", airlock.Invalidf("vkey", "add the line of this name that `airlock audit keys` prints, or the nextVkey of the event log.close of the part before, which vouches for it",
		"no key of the part '%.100s' was given, and the proof is of it", cp.origin)
}

// signedBy reads a proof's checkpoint, which is of the shard and signed.
func signedBy(text, shard, vkey string) (checkpoint, error) {
	v, err := note.NewVerifier(vkey)
	if err != nil {
		return checkpoint{}, airlock.Invalidf("vkey", "give the shard's key as the log's owner published it", "'%.100s' is not a key", vkey).Because(err)
	}
	cp, err := parseCheckpoint([]byte(text), v)
	if err != nil {
		return checkpoint{}, airlock.Errorf(airlock.Invalid, "the proof does not hold: its checkpoint is not signed by the key %.100s: its size or root was altered, or the key is another log's", vkey).Because(err)
	}
	if !strings.HasSuffix(cp.origin, "/"+shard) {
		return checkpoint{}, airlock.Errorf(airlock.Invalid, "the proof does not hold: its checkpoint is of another log than shard %.40s", shard)
	}
	return cp, nil
}

// VerifyProof checks a proof against the key that the reader knows the log by.
// What the proof itself says of its key is not believed.
func VerifyProof(p Proof, vkey string) error {
	cp, err := signedBy(p.Checkpoint, p.Shard, vkey)
	if err != nil {
		return err
	}
	bad := func(format string, args ...any) error {
		return airlock.Errorf(airlock.Invalid, "the proof does not hold: "+format, args...)
	}
	if seq, ok := seqOf([]byte(p.Event)); !ok || seq != p.Seq || p.Index > p.Seq {
		return bad("the event does not say that it is number %d", p.Seq)
	}
	for _, h := range p.Path {
		if len(h) != tlog.HashSize {
			return bad("a hash of its path has %d bytes", len(h))
		}
	}
	leaf := tlog.RecordHash([]byte(p.Event))
	if err := proof.VerifyInclusion(rfc6962.DefaultHasher, p.Index, cp.size, leaf[:], p.Path, cp.root[:]); err != nil {
		return airlock.Errorf(airlock.Invalid, "the proof does not hold: the event, its index or the path was altered: it is not entry %d of the tree of %d entries that was signed", p.Index, cp.size).Because(err)
	}
	return nil
}
