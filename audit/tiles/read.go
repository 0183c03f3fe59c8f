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

// Consistency proves that the tree of the first from entries of a shard is the
// beginning of that of the first to: RFC 6962's proof between their roots.
// to is at most the size of the published checkpoint.
func (t *Trees) Consistency(ctx context.Context, shard string, from, to uint64) ([][]byte, error) {
	for _, s := range t.Shards() {
		switch {
		case s.ID != shard:
			continue
		case s.Dropped:
			return nil, airlock.Errorf(airlock.NotFound, "shard %s was dropped by retention", s.ID)
		case from > to || to > s.Size:
			return nil, airlock.Invalidf("to", fmt.Sprintf("use sizes up to %d", s.Size), "shard %s has no trees of %d and %d signed entries", s.ID, from, to)
		}
		builder, err := client.NewProofBuilder(ctx, s.Size, t.disk.fetcher(s.ID))
		if err == nil && from > 0 {
			var path [][]byte
			if path, err = builder.ConsistencyProof(ctx, from, to); err == nil {
				return path, nil
			}
		}
		if err != nil {
			return nil, fmt.Errorf("prove %d to %d entries of shard %s: %w", from, to, s.ID, err)
		}
		return nil, nil // everything begins with nothing
	}
	return nil, airlock.Errorf(airlock.NotFound, "the audit log has no shard '%.40s'", shard)
}

// VerifyProof checks a proof against the key that the reader knows the log by.
// What the proof itself says of its key is not believed.
func VerifyProof(p Proof, vkey string) error {
	v, err := note.NewVerifier(vkey)
	if err != nil {
		return airlock.Invalidf("vkey", "give the shard's key as the log's owner published it", "'%.100s' is not a key", vkey).Because(err)
	}
	bad := func(format string, args ...any) error {
		return airlock.Errorf(airlock.Invalid, "the proof does not hold: "+format, args...)
	}
	cp, err := parseCheckpoint([]byte(p.Checkpoint), v)
	if err != nil {
		return airlock.Errorf(airlock.Invalid, "the proof does not hold: its checkpoint is not signed by the key %.100s", vkey).Because(err)
	}
	if !strings.HasSuffix(cp.origin, "/"+p.Shard) {
		return bad("its checkpoint is of another log than shard %.40s", p.Shard)
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
		return airlock.Errorf(airlock.Invalid, "the proof does not hold: the event is not entry %d of the tree of %d entries that was signed", p.Index, cp.size).Because(err)
	}
	return nil
}
