package audit

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"crypto/rand"

	"airlock.dev/airlock"
	"airlock.dev/airlock/audit/index"
	"airlock.dev/airlock/audit/tiles"
	"airlock.dev/airlock/audit/wal"
	"crypto/ed25519"
)

// pace is how far groups are apart at least, unless they are full or somebody
// waits: each rewrites and syncs a few files, whatever its size, so that groups
// of few events cost a busy server most of its time.
const pace = 250 * time.Millisecond

// integrate brings durable events into the trees and the index, in order.
func (l *Log) integrate(ctx context.Context) {
	var began time.Time
	for ctx.Err() == nil {
		durable, more := l.wal.Durable()
		if l.trees.Next() >= durable && l.index.Next() >= durable {
			select {
			case <-more:
			case <-l.again:
			case <-ctx.Done():
				return
			}
			continue
		}
		if wait := pace - time.Since(began); wait > 0 && durable < l.trees.Next()+groupMost && l.index.Next() >= l.trees.Next() {
			select {
			case <-time.After(wait):
			case <-l.hurry:
			case <-ctx.Done():
				return
			}
		}
		began = time.Now()
		err := l.group(ctx)
		l.mu.Lock()
		failed := l.failure == nil && err != nil
		l.failure = err
		if failed {
			l.progressed()
		}
		l.mu.Unlock()
		if failed && ctx.Err() == nil {
			l.cfg.Log.Error("the audit log's trees cannot be completed; acts are recorded until there is no more room", "err", err)
		}
		if err != nil {
			select {
			case <-time.After(retryEvery):
			case <-ctx.Done():
			}
		}
	}
}

// group takes in one group of events. The index may be behind the trees.
func (l *Log) group(ctx context.Context) error {
	l.taking.Lock()
	defer l.taking.Unlock()
	next := l.trees.Next()
	if behind := l.index.Next(); behind < next {
		events, err := l.trees.Entries(ctx, behind, groupMost)
		if err != nil {
			return fmt.Errorf("read events for the index: %w", err)
		}
		return l.toIndex(ctx, behind, events)
	}
	events, err := l.wal.Read(next, groupMost)
	if err != nil {
		return fmt.Errorf("read the write-ahead log: %w", err)
	}
	if len(events) == 0 {
		return nil
	}
	for i, e := range events { // a shard's first event begins a group
		if !isOpen(e) {
			continue
		}
		if i > 0 {
			events = events[:i]
			break
		}
		if err := l.startShard(ctx, next, e); err != nil {
			return err
		}
	}
	if err := l.trees.Integrate(ctx, next, events); err != nil {
		return fmt.Errorf("add to the trees: %w", err)
	}
	if err := l.toIndex(ctx, next, events); err != nil {
		return err
	}
	if err := l.wal.Trim(next); err != nil { // the newest group stays, to be compared at the next start
		return fmt.Errorf("trim the write-ahead log: %w", err)
	}
	return nil
}

// isOpen says whether an event is the first of a shard. Its type stands behind
// fields that we alone write, so nothing in it can look like it.
func isOpen(event []byte) bool {
	_, rest, _ := bytes.Cut(event, []byte(`,"epoch":`))
	rest = bytes.TrimLeft(rest, "0123456789")
	return bytes.HasPrefix(rest, []byte(`,"type":"log.open",`))
}

func (l *Log) startShard(ctx context.Context, first uint64, event []byte) error {
	var e struct {
		Log LogPart `json:"log"`
	}
	if err := json.Unmarshal(event, &e); err != nil {
		return fmt.Errorf("read event %d: %w", first, err)
	}
	shards := l.trees.Shards()
	if len(shards) > 0 && shards[len(shards)-1].ID == e.Log.Shard {
		return nil // begun, and then the event did not get in
	}
	for _, k := range l.cfg.Keys {
		if vkey, err := tiles.VKey(l.cfg.Installation, e.Log.Shard, k.Public().(ed25519.PublicKey)); err == nil && vkey == e.Log.VKey {
			if err := l.trees.Start(ctx, e.Log.Shard, first, k); err != nil {
				return fmt.Errorf("start the shard %s: %w", e.Log.Shard, err)
			}
			return nil
		}
	}
	return airlock.Errorf(airlock.Conflict, "the key of the audit log's shard %s is not in the keyring: restore it", e.Log.Shard)
}

func (l *Log) toIndex(ctx context.Context, from uint64, events [][]byte) error {
	rows := make([]index.Row, len(events))
	for i, e := range events {
		rows[i] = rowOf(from+uint64(i), e)
	}
	if err := l.index.Add(ctx, rows); err != nil {
		return fmt.Errorf("add to the index: %w", err)
	}
	l.mu.Lock()
	l.progressed()
	l.mu.Unlock()
	return nil
}

// soon has the next group taken in at once; who waits for it calls this each time.
func (l *Log) soon() {
	select {
	case l.hurry <- struct{}{}:
	default:
	}
}

// progressed wakes who waits for the index; called with mu held.
func (l *Log) progressed() {
	close(l.progress)
	l.progress = make(chan struct{})
}

// rowOf is what the index has of an event. One that it cannot read, which only
// a later version could have written, must not hold up those behind it.
func rowOf(seq uint64, event []byte) index.Row {
	row, err := index.RowOf(event)
	if err != nil || row.Seq != seq {
		return index.Row{Seq: seq, Time: time.Unix(0, 0).UTC(), Type: "unreadable", Source: string(Host)}
	}
	return row
}

const settleEvery = time.Second

// settle pays what is owed, and changes and drops shards when it is time.
func (l *Log) settle(ctx context.Context) {
	tick := time.NewTicker(settleEvery)
	defer tick.Stop()
	var dropped time.Time
	for {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
		l.pay(ctx, queueMost)
		if l.cfg.Period.over(l.Shard(), l.cfg.Now()) {
			if err := l.Rotate(ctx, system); err != nil && ctx.Err() == nil {
				l.cfg.Log.Error("the audit log's new period cannot begin", "err", err)
			}
		}
		if l.cfg.Retention > 0 && l.cfg.Now().Sub(dropped).Abs() > time.Hour {
			dropped = l.cfg.Now()
			if err := l.dropOld(ctx); err != nil && ctx.Err() == nil {
				l.cfg.Log.Error("the audit log's old periods cannot be dropped", "err", err)
			}
		}
	}
}

// pay writes what could not be written when it happened, as long as no more
// than most events wait for the disk.
func (l *Log) pay(ctx context.Context, most int) {
	for {
		if waiting, _ := l.wal.Pending(); waiting > most {
			return
		}
		l.mu.Lock()
		if len(l.owed) == 0 {
			lost := l.lost
			l.lost = 0
			l.mu.Unlock()
			if lost > 0 {
				message := fmt.Sprintf("%d ends of acts could not be kept while the log did not work", lost)
				if _, err := l.add(ctx, &Event{Type: "log.gap", Actor: system, Outcome: Outcome{Status: "error", Message: message}}, l.cfg.Now()); err != nil {
					l.mu.Lock()
					l.lost += lost
					l.mu.Unlock()
				}
			}
			return
		}
		o := l.owed[0]
		l.mu.Unlock()
		if _, err := l.add(ctx, &o.e, o.when); err != nil {
			return
		}
		l.mu.Lock()
		l.owed = l.owed[1:]
		l.mu.Unlock()
	}
}

// Shard is the one that is written now.
func (l *Log) Shard() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.shard
}

// witnessWait is how long a witness may take.
const witnessWait = 30 * time.Second

// rotateWait is how long acts wait for a new shard without a word in the log.
const rotateWait = 10 * time.Second

// Rotate ends the shard and begins another: for a new period, or a new key.
// Acts wait meanwhile, for about a second.
func (l *Log) Rotate(ctx context.Context, by Actor) error {
	l.turn.Lock()
	defer l.turn.Unlock()
	l.mu.Lock()
	err := l.failure
	l.mu.Unlock()
	if err = errors.Join(err, l.trees.Err()); err != nil {
		return behind("the shard cannot be closed now", err)
	}
	if len(l.cfg.Witnesses) > 0 {
		if err := l.witnessed(ctx, by); err != nil {
			return err
		}
	}
	done := make(chan struct{})
	l.mu.Lock()
	l.turning = done
	next := l.cfg.Period.shardAfter(l.shard, l.cfg.Now())
	vkey, err := tiles.VKey(l.cfg.Installation, next, l.key().Public().(ed25519.PublicKey))
	var t wal.Ticket
	if err == nil {
		t, err = l.write(&Event{Type: "log.close", Actor: by, Log: &LogPart{Shard: l.shard, Next: next, NextVKey: vkey}}, strings.ToLower(rand.Text()), l.cfg.Now(), nil)
	}
	l.mu.Unlock()
	release := func() {
		l.mu.Lock()
		l.turning = nil
		l.mu.Unlock()
		close(done)
	}
	if err != nil {
		release()
		return fmt.Errorf("close the shard: %w", err)
	}
	// From here on the new shard must begin before anything else is written.
	slow := time.AfterFunc(rotateWait, func() { l.cfg.Log.Error("acts wait for the audit log's new shard", "shard", next) })
	defer slow.Stop()
	if err := l.turned(l.life, t, next); err != nil {
		return err // the server stops; the next one begins the shard
	}
	release()
	return nil
}

// witnessed makes sure that the witnesses answer: acts wait for the last
// checkpoint of the shard that is closed.
func (l *Log) witnessed(ctx context.Context, by Actor) error {
	r, err := l.Append(ctx, Event{Type: "log.rotate", Actor: by})
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, witnessWait)
	defer cancel()
	if err := l.trees.Await(ctx, r.Seq()); err != nil {
		return behind("the shard cannot be closed now", err)
	}
	return nil
}

func (l *Log) turned(ctx context.Context, closed wal.Ticket, next string) error {
	if err := durably(ctx, closed); err != nil {
		return err
	}
	for {
		l.mu.Lock()
		progress := l.progress
		l.mu.Unlock()
		if l.trees.Next() > closed.Seq() {
			return l.openShard(ctx, next)
		}
		l.soon()
		select {
		case <-progress:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// durably waits for an event that cannot be taken back: while the log cannot
// be written it is kept, and written later.
func durably(ctx context.Context, t wal.Ticket) error {
	for {
		err := t.Wait(ctx)
		if err == nil || ctx.Err() != nil {
			return err
		}
		select {
		case <-time.After(retryEvery):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}
