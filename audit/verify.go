package audit

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"

	"airlock.dev/airlock"
	"airlock.dev/airlock/audit/index"
	"airlock.dev/airlock/audit/tiles"
)

// VerifyOptions are what a verifier knows by itself.
type VerifyOptions struct {
	VKeys []string // verifier keys; of the first shard at least
	Heads []string // checkpoints that were kept, or that a witness gave
}

// Report is what Verify found. OK says that nothing is wrong.
type Report struct {
	tiles.Report
	OK    bool     `json:"ok"`
	Index []string `json:"index,omitempty"` // where the index differs from the log
}

// Verify checks a trail's directory, or a copy of one, without opening it for
// writing: the trees from their entries, and the index against them. A copy
// without an index is whole.
func Verify(ctx context.Context, dir string, opts VerifyOptions) (Report, error) {
	if _, err := os.Stat(logDir(dir)); err != nil {
		return Report{}, airlock.Invalidf("DIR", "name an audit directory: the one with the directory log in it", "there is no log in %.200s", dir).Because(err)
	}
	// The index is opened first: what it knows by then is in the log.
	x, err := index.OpenReader(ctx, indexFile(dir))
	if err == nil {
		defer x.Close()
	}
	r, verr := verifyTrees(ctx, dir, opts)
	switch {
	case verr != nil:
		return Report{}, verr
	case err != nil && absent(indexFile(dir)):
		return r, nil
	case err != nil:
		r.Index = append(r.Index, fmt.Sprintf("it cannot be read (it is made anew from the log at the next start): %v", err))
		r.OK, r.Count = false, r.Count+1
		return r, nil
	}
	var end uint64
	for _, s := range r.Shards {
		end = s.First + s.Size + s.Unsigned
	}
	if next := x.Next(); next > end {
		r.Index = append(r.Index, fmt.Sprintf("it knows events up to number %d, and the log ends before %d: its newest events are gone", next-1, end))
	}
	found, err := x.Check(ctx, end, rowsOf(logDir(dir), r.Report))
	switch {
	case err != nil && (r.OK || ctx.Err() != nil):
		return Report{}, fmt.Errorf("check the index: %w", err)
	case err != nil: // what is damaged is said already
		r.Index = append(r.Index, "it was not compared with all of the log, which is damaged")
	}
	for _, f := range []struct {
		what string
		index.Finding
	}{{"says something else than the log of", found.Differ}, {"lacks", found.Absent}, {"has, and the log does not,", found.Extra}} {
		if f.Count > 0 {
			r.Index = append(r.Index, fmt.Sprintf("it %s %d events, the first of them %d", f.what, f.Count, f.Seqs[0]))
		}
	}
	r.Index = append(r.Index, found.Damage...)
	r.OK, r.Count = r.OK && len(r.Index) == 0, r.Count+len(r.Index)
	return r, nil
}

func verifyTrees(ctx context.Context, dir string, opts VerifyOptions) (Report, error) {
	trees, err := tiles.Verify(ctx, logDir(dir), tiles.VerifyOptions{VKeys: opts.VKeys, Heads: opts.Heads, FollowKeys: true})
	if err == nil && len(trees.Shards) == 0 && trees.OK() { // no trail is without its first event
		trees.Problems = append(trees.Problems, tiles.Problem{Kind: tiles.Absent, File: ".", Text: "there is no part of a log"})
		trees.Count++
	}
	return Report{Report: trees, OK: trees.OK()}, err
}

func absent(file string) bool {
	_, err := os.Lstat(file)
	return errors.Is(err, os.ErrNotExist)
}

// seqOf reads the number at an event's beginning, which has been verified.
func seqOf(event []byte) (uint64, error) {
	rest, _ := bytes.CutPrefix(event, []byte(`{"v":1,"seq":`))
	digits, _, _ := bytes.Cut(rest, []byte(","))
	seq, err := strconv.ParseUint(string(digits), 10, 64)
	if err != nil {
		return 0, fmt.Errorf("read an event's number: %w", err)
	}
	return seq, nil
}

// rowsOf reads the rows that the index should have from a verified log.
func rowsOf(dir string, r tiles.Report) func(context.Context, uint64, int) ([]index.Row, error) {
	return func(ctx context.Context, from uint64, most int) ([]index.Row, error) {
		events, err := tiles.Read(ctx, dir, r, from, most)
		if err != nil {
			return nil, err
		}
		rows := make([]index.Row, 0, len(events))
		for _, e := range events {
			seq, err := seqOf(e)
			if err != nil {
				return nil, err
			}
			rows = append(rows, rowOf(seq, e))
		}
		return rows, nil
	}
}
