package audit

import (
	"bytes"
	"context"
	"crypto"
	"crypto/ed25519"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"strings"
	"time"

	"crypto/rand"

	"airlock.dev/airlock"
	"airlock.dev/airlock/audit/index"
	"airlock.dev/airlock/audit/tiles"
	"airlock.dev/airlock/audit/wal"
)

// The parts of a trail's directory.
func walDir(dir string) string    { return filepath.Join(dir, "wal") }
func logDir(dir string) string    { return filepath.Join(dir, "log") }
func indexFile(dir string) string { return filepath.Join(dir, "index.db") }

// Damage is what Open found to be not as it was left. It opens nothing then.
type Damage struct {
	Place string // file or directory, with the place in it
	Text  string
	Err   error
}

func (d *Damage) Error() string { return d.Place + ": " + d.Text }

// Unwrap returns a coded error with the remedy, and the cause.
func (d *Damage) Unwrap() []error {
	return []error{&airlock.Error{
		Code: airlock.Conflict, Message: "the audit log is damaged: " + d.Error(),
		Hint: "keep a copy of the directory for the investigation, restore it from its disk if you can, or go on with: airlock serve --audit-repair",
	}, d.Err}
}

// Open opens the trail in cfg.Dir, or begins one. It checks that the parts
// agree with each other, writes that a new epoch begins and, after a stop that
// was not clean, which events may be missing.
func Open(ctx context.Context, cfg Config) (_ *Log, err error) {
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	if cfg.Budget == 0 {
		cfg.Budget = DefaultBudget
	}
	if len(cfg.Keys) == 0 {
		return nil, airlock.Errorf(airlock.Internal, "the audit log has no key to sign with")
	}
	if err := os.MkdirAll(cfg.Dir, 0o700); err != nil {
		return nil, fmt.Errorf("make the directory of the audit log: %w", err)
	}
	l := &Log{cfg: cfg, spent: map[spender]uint64{}, progress: make(chan struct{}), again: make(chan struct{}, 1), hurry: make(chan struct{}, 1)}
	defer func() {
		if err != nil {
			err = errors.Join(err, l.release(ctx))
		}
	}()
	signers := make([]crypto.Signer, len(cfg.Keys))
	for i, k := range cfg.Keys {
		signers[i] = k
	}
	if l.trees, err = tiles.Open(ctx, tiles.Config{Dir: logDir(cfg.Dir), Installation: cfg.Installation, Keys: signers, Witnesses: cfg.Witnesses, Checkpoint: cfg.Checkpoint}); err != nil {
		return nil, fmt.Errorf("open the audit log's trees: %w", err)
	}
	clean, damage, err := l.openWAL(ctx)
	if err != nil {
		return nil, err
	}
	if l.index, err = index.Open(ctx, indexFile(cfg.Dir)); err != nil {
		return nil, fmt.Errorf("open the audit log's index: %w", err)
	}
	if why := l.index.Replaced(); why != "" {
		cfg.Log.Warn("the index of the audit log is made anew", "why", why)
	}
	if err := l.fitIndex(ctx); err != nil {
		return nil, err
	}
	if err := l.boot(ctx, clean, damage); err != nil {
		return nil, err
	}
	l.life, l.stop = context.WithCancel(context.WithoutCancel(ctx))
	l.wg.Go(func() { l.integrate(l.life) })
	l.wg.Go(func() { l.settle(l.life) })
	return l, nil
}

// openWAL opens the write-ahead log and holds it against the trees.
func (l *Log) openWAL(ctx context.Context) (clean bool, damage *Damage, err error) {
	next := l.trees.Next()
	_, statErr := os.Stat(walDir(l.cfg.Dir))
	var rec wal.Recovery
	if errors.Is(statErr, fs.ErrNotExist) && next > 0 {
		damage = &Damage{Place: walDir(l.cfg.Dir), Text: fmt.Sprintf("the write-ahead log is absent; events from number %d on may have been in it", next)}
	} else if l.wal, rec, err = wal.Open(wal.Config{Dir: walDir(l.cfg.Dir), First: next, MaxRecord: MaxEvent}); err != nil {
		var d *wal.Damage
		if !errors.As(err, &d) {
			return false, nil, fmt.Errorf("open the write-ahead log: %w", err)
		}
		damage = &Damage{Place: fmt.Sprintf("%s at byte %d", d.File, d.Offset), Text: fmt.Sprintf("%s, from event %d on: %s", d.Kind, d.First, d.Detail), Err: err}
	} else if damage, err = l.compare(ctx, rec, next); err != nil {
		return false, nil, err
	}
	if damage == nil {
		if rec.Torn != nil {
			l.cfg.Log.Warn("the last write of the audit log was not finished; nobody was told that it was", "place", rec.Torn.File, "event", rec.Torn.First)
		}
		return rec.Clean, nil, nil
	}
	if !l.cfg.AcceptDamage {
		return false, nil, damage
	}
	if l.wal != nil {
		if err := l.wal.Close(); err != nil {
			return false, nil, fmt.Errorf("close the write-ahead log: %w", err)
		}
		l.wal = nil
	}
	aside := walDir(l.cfg.Dir) + ".damaged-" + l.cfg.Now().UTC().Format("20060102T150405.000000000")
	if err := os.Rename(walDir(l.cfg.Dir), aside); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return false, nil, fmt.Errorf("put the damaged write-ahead log aside: %w", err)
	}
	if l.wal, _, err = wal.Open(wal.Config{Dir: walDir(l.cfg.Dir), First: next, MaxRecord: MaxEvent}); err != nil {
		return false, nil, fmt.Errorf("begin a write-ahead log: %w", err)
	}
	return false, damage, nil
}

// compare holds the newest events of the trees against the write-ahead log.
func (l *Log) compare(ctx context.Context, rec wal.Recovery, next uint64) (*Damage, error) {
	switch {
	case next < rec.First:
		return &Damage{Place: logDir(l.cfg.Dir), Text: fmt.Sprintf("the trees end at event %d and the write-ahead log begins with %d: an older copy of them was put back, or they were cut", next, rec.First)}, nil
	case next > rec.Next:
		return &Damage{Place: walDir(l.cfg.Dir), Text: fmt.Sprintf("it ends at event %d and the trees have %d: an older copy of it was put back, or it was cut", rec.Next, next)}, nil
	}
	for from := max(rec.First, l.oldest(), next-min(next, groupMost)); from < next; {
		logged, err := l.wal.Read(from, groupMost)
		if err != nil {
			return nil, fmt.Errorf("read the write-ahead log: %w", err)
		}
		kept, err := l.trees.Entries(ctx, from, min(len(logged), int(next-from)))
		if err != nil {
			return nil, fmt.Errorf("read the newest events: %w", err)
		}
		if len(kept) == 0 {
			return nil, airlock.Errorf(airlock.Internal, "the trees have no event %d", from)
		}
		for i := range kept {
			if !bytes.Equal(kept[i], logged[i]) {
				return &Damage{Place: logDir(l.cfg.Dir), Text: fmt.Sprintf("event %d is not the one of the write-ahead log", from+uint64(i))}, nil
			}
		}
		from += uint64(len(kept))
	}
	return nil, nil
}

// oldest is the first event that retention has not dropped.
func (l *Log) oldest() uint64 {
	for _, s := range l.trees.Shards() {
		if !s.Dropped {
			return s.First
		}
	}
	return l.trees.Next()
}

// fitIndex makes the index begin anew where it does not fit the trees: when it
// knows more than they have, or events that were dropped.
func (l *Log) fitIndex(ctx context.Context) error {
	oldest := l.oldest()
	if next := l.index.Next(); next >= oldest && next <= l.trees.Next() {
		known, err := l.index.Find(ctx, index.Query{}, index.Page{Limit: 1})
		if err == nil && (len(known) == 0 && next == oldest || len(known) == 1 && known[0] == oldest) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("look up the oldest event: %w", err)
		}
	}
	if err := l.index.Reset(ctx, oldest); err != nil {
		return fmt.Errorf("begin the index anew: %w", err)
	}
	return nil
}

// boot writes the beginning of this epoch, and of a shard where there is none.
func (l *Log) boot(ctx context.Context, clean bool, damage *Damage) error {
	for l.trees.Next() < l.durable() { // also so that the last event is where we look for it
		if err := l.group(ctx); err != nil {
			return fmt.Errorf("take in what the server before has logged: %w", err)
		}
	}
	var last struct {
		Time  time.Time `json:"time"`
		Type  string    `json:"type"`
		Epoch uint64    `json:"epoch"`
		Log   LogPart   `json:"log"`
	}
	if next := l.trees.Next(); next > 0 {
		events, err := l.trees.Entries(ctx, next-1, 1)
		if err == nil && len(events) == 0 {
			err = fs.ErrNotExist
		}
		if err == nil {
			err = json.Unmarshal(events[0], &last)
		}
		if err != nil {
			return fmt.Errorf("read event %d: %w", next-1, err)
		}
	}
	l.epoch, l.last = last.Epoch+1, last.Time
	shards := l.trees.Shards()
	if len(shards) > 0 {
		l.shard = shards[len(shards)-1].ID
	}
	if l.trees.Next() == 0 || last.Type == "log.close" {
		opening, cancel := context.WithTimeout(ctx, witnessWait)
		defer cancel()
		if err := l.openShard(opening, last.Log.Next); err != nil {
			return err
		}
	}
	now := l.cfg.Now()
	part := &LogPart{Clean: &clean, Installation: l.cfg.Installation}
	if !clean {
		part.Missing = &Missing{After: l.last.UTC().Format(timeForm), Most: queueMost + owedMost, Types: losable}
	}
	e := Event{Type: "log.boot", Actor: system, Log: part, Outcome: Outcome{Status: "ok", Message: "airlock " + l.cfg.Version}}
	if damage != nil {
		part.Damage = strings.ToValidUTF8(damage.Error(), "\uFFFD")
		e.Outcome.Status = "error"
	}
	t, err := l.write(&e, strings.ToLower(rand.Text()), now, nil)
	if err != nil {
		return fmt.Errorf("write the first event: %w", err)
	}
	l.last = later(l.last, now)
	if err := t.Wait(ctx); err != nil {
		return fmt.Errorf("write the first event: %w", err)
	}
	return nil
}

// openShard writes the first event of a shard. All before it is in the trees.
// The shard has the name that the end of the one before gave it.
func (l *Log) openShard(ctx context.Context, name string) error {
	if name == "" {
		name = l.cfg.Period.shardAfter(l.shard, l.cfg.Now())
	}
	first := l.trees.Next()
	vkey, err := tiles.VKey(l.cfg.Installation, name, l.key().Public().(ed25519.PublicKey))
	if err != nil {
		return err
	}
	part := &LogPart{Shard: name, First: &first, Installation: l.cfg.Installation, VKey: vkey}
	if first > 0 {
		if err := l.trees.Await(ctx, first-1); err != nil {
			return behind("a new part of the audit log cannot begin before the last checkpoint of "+l.shard, err)
		}
		shards := l.trees.Shards()
		p := shards[len(shards)-1]
		part.Previous = &Previous{Shard: p.ID, First: p.First, Size: p.Size, Root: p.Root[:]}
	}
	t, err := l.write(&Event{Type: "log.open", Actor: system, Log: part}, strings.ToLower(rand.Text()), l.cfg.Now(), nil)
	if err != nil {
		return fmt.Errorf("open the shard %s: %w", name, err)
	}
	if t.Seq() != first {
		return airlock.Errorf(airlock.Internal, "the shard %s begins with event %d and not %d", name, t.Seq(), first)
	}
	if err := durably(ctx, t); err != nil {
		return fmt.Errorf("open the shard %s: %w", name, err)
	}
	l.mu.Lock()
	l.shard = name
	l.mu.Unlock()
	return nil
}

// key signs what is new.
func (l *Log) key() ed25519.PrivateKey { return l.cfg.Keys[len(l.cfg.Keys)-1] }

func (l *Log) durable() uint64 {
	next, _ := l.wal.Durable()
	return next
}

// Close writes what is pending, waits for the last checkpoint as long as ctx
// allows, and lets go of the files.
func (l *Log) Close(ctx context.Context) error {
	l.stop()
	l.wg.Wait()
	l.pay(ctx, math.MaxInt)
	for l.trees.Next() < l.durable() && ctx.Err() == nil {
		if err := l.group(ctx); err != nil {
			l.cfg.Log.Warn("the audit log's trees are completed at the next start", "err", err)
			break
		}
	}
	return l.release(ctx)
}

func (l *Log) release(ctx context.Context) error {
	var errs []error
	if l.wal != nil {
		errs = append(errs, l.wal.Close())
	}
	if l.index != nil {
		errs = append(errs, l.index.Close())
	}
	if l.trees != nil {
		errs = append(errs, l.trees.Close(ctx))
	}
	return errors.Join(errs...)
}
