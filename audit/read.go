package audit

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"airlock.dev/airlock"
	"airlock.dev/airlock/audit/index"
	"airlock.dev/airlock/audit/tiles"
)

// MaxPage is how many events one page has at most.
const MaxPage = 1000

// Page is what Find returns: events in the order that was asked for.
type Page struct {
	Events []json.RawMessage
	More   bool   // there are others behind
	Next   uint64 // where they begin: for After
	Behind uint64 // durable events that the index does not know yet
}

// Find returns events that match. It finds them by the index and reads them
// from the log; what retention dropped is not found.
func (l *Log) Find(ctx context.Context, q index.Query, p index.Page) (Page, error) {
	limit := p.Limit
	if limit < 1 || limit > MaxPage {
		return Page{}, airlock.Invalidf("limit", fmt.Sprintf("give a number from 1 to %d", MaxPage), "limit is %d", limit)
	}
	p.Limit++
	seqs, err := l.index.Find(ctx, q, p)
	if err != nil {
		return Page{}, fmt.Errorf("look events up: %w", err)
	}
	page := Page{Events: []json.RawMessage{}}
	if durable, known := l.durable(), l.index.Next(); durable > known {
		page.Behind = durable - known
	}
	if page.More = len(seqs) > limit; page.More {
		seqs = seqs[:limit]
		page.Next = seqs[limit-1]
	}
	var bundle [][]byte
	var first uint64
	for _, seq := range seqs {
		if seq < first || seq >= first+uint64(len(bundle)) {
			// Those of one execution lie close together: read some at a time.
			first = seq - seq%64
			if bundle, err = l.trees.Entries(ctx, first, 64); airlock.CodeOf(err) == airlock.NotFound || err == nil && seq >= first+uint64(len(bundle)) {
				first = seq
				bundle, err = l.trees.Entries(ctx, seq, 1)
			}
			if airlock.CodeOf(err) == airlock.NotFound && err != nil {
				continue
			}
			if err != nil {
				return Page{}, fmt.Errorf("read event %d: %w", seq, err)
			}
			if len(bundle) == 0 {
				return Page{}, airlock.Errorf(airlock.Internal, "the index names event %d, which the log does not have: verify it with: airlock audit verify", seq)
			}
		}
		page.Events = append(page.Events, bundle[seq-first])
	}
	return page, nil
}

// Event returns one event.
func (l *Log) Event(ctx context.Context, seq uint64) (json.RawMessage, error) {
	events, err := l.trees.Entries(ctx, seq, 1)
	if err != nil {
		return nil, fmt.Errorf("read event %d: %w", seq, err)
	}
	if len(events) == 0 {
		return nil, airlock.Errorf(airlock.NotFound, "there is no event %d; the newest is %d", seq, max(l.trees.Next(), 1)-1)
	}
	return events[0], nil
}

// Follow calls fn with the events from number from on that match, also those
// that are yet to come, until fn or ctx ends it.
func (l *Log) Follow(ctx context.Context, q index.Query, from uint64, fn func(json.RawMessage) error) error {
	for {
		l.mu.Lock()
		progress := l.progress
		l.mu.Unlock()
		known := l.index.Next()
		for from < known {
			p := index.Page{Limit: MaxPage}
			if from > 0 {
				after := from - 1
				p.After = &after
			}
			page, err := l.Find(ctx, q, p)
			if err != nil {
				return err
			}
			for _, e := range page.Events {
				if err := fn(e); err != nil {
					return err
				}
			}
			if page.More {
				from = page.Next + 1
			} else {
				from = known
			}
		}
		select {
		case <-progress:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// Details opens the sealed parts of an event. What cannot be opened says why.
func (l *Log) Details(ctx context.Context, event []byte) ([]Detail, error) {
	var e struct {
		ID     string           `json:"id"`
		Sealed []airlock.Sealed `json:"sealed"`
	}
	if err := json.Unmarshal(event, &e); err != nil {
		return nil, fmt.Errorf("read an event: %w", err)
	}
	var all []Detail
	for _, s := range e.Sealed {
		d := Detail{Subject: s.Subject}
		plain, err := l.cfg.Sealer.OpenSealed(ctx, s, []byte(e.ID))
		switch {
		case err == nil && json.Valid(plain):
			d.Detail = printable(bytes.TrimSpace(plain))
		case airlock.CodeOf(err) == airlock.NotFound:
			d.Erased = true
		case err == nil:
			d.Problem = "it is not what was sealed"
		default:
			d.Problem = "it cannot be opened"
			l.cfg.Log.Warn("a sealed part of an event cannot be opened", "event", e.ID, "err", err)
		}
		all = append(all, d)
	}
	return all, nil
}

// Detail is a sealed part that was opened, or why it was not.
type Detail struct {
	Subject string          `json:"subject"` // pseudonym
	Detail  json.RawMessage `json:"detail,omitempty"`
	Erased  bool            `json:"erased,omitempty"` // its key was destroyed, as it was meant
	Problem string          `json:"problem,omitempty"`
}

// Subject returns the pseudonym that a subject's sealed parts have now. One
// without a key is NotFound: nothing was sealed for it, or it was erased.
func (l *Log) Subject(ctx context.Context, subject string) (string, error) {
	found, err := l.cfg.Sealer.FindSubject(ctx, subject)
	return found.Pseudonym, err
}

// Prove returns the proof that an event is in the log, once a published
// checkpoint covers it.
func (l *Log) Prove(ctx context.Context, seq uint64) (tiles.Proof, error) {
	if next := l.durable(); seq >= next {
		return tiles.Proof{}, airlock.Errorf(airlock.NotFound, "there is no event %d; the newest is %d", seq, next-1)
	}
	if err := l.trees.Await(ctx, seq); err != nil {
		return tiles.Proof{}, fmt.Errorf("wait for a checkpoint of event %d: %w", seq, err)
	}
	return l.trees.Prove(ctx, seq)
}

// Consistency proves that a shard's first from entries are the beginning of
// its first to entries.
func (l *Log) Consistency(ctx context.Context, shard string, from, to uint64) (tiles.Consistency, error) {
	return l.trees.Consistency(ctx, shard, from, to)
}

// Shards are the parts of the log, with their heads and keys.
func (l *Log) Shards() []tiles.Shard { return l.trees.Shards() }

// Await waits until a published checkpoint covers an event: for a receipt
// that leaves the machine.
func (l *Log) Await(ctx context.Context, seq uint64) error { return l.trees.Await(ctx, seq) }

// Status is how the log does.
type Status struct {
	Installation string    `json:"installation"`
	Shard        string    `json:"shard"`
	Epoch        uint64    `json:"epoch"`
	Durable      uint64    `json:"durable"`    // events below this number are on the disk
	Integrated   uint64    `json:"integrated"` // in the tree
	Published    uint64    `json:"published"`  // covered by a signed checkpoint
	Indexed      uint64    `json:"indexed"`    // found by queries
	Pending      int       `json:"pending"`    // on their way to the disk
	Owed         int       `json:"owed"`       // ends of acts that wait for the log to work
	Problem      string    `json:"problem,omitempty"`
	Time         time.Time `json:"time"`
}

// Status returns how the log does at this moment.
func (l *Log) Status() Status {
	pending, _ := l.wal.Pending()
	_, published := l.trees.Published()
	l.mu.Lock()
	defer l.mu.Unlock()
	s := Status{
		Installation: l.cfg.Installation, Shard: l.shard, Epoch: l.epoch, Durable: l.durable(), Integrated: l.trees.Next(),
		Published: published, Indexed: l.index.Next(), Pending: pending, Owed: len(l.owed) + l.lost, Time: l.cfg.Now().UTC(),
	}
	if err := errors.Join(l.wal.Err(), l.failure, l.trees.Err()); err != nil {
		s.Problem = string(printable([]byte(err.Error())))
	}
	return s
}
