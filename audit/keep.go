package audit

import (
	"context"
	"encoding/json"
	"fmt"
	"regexp"
	"slices"
	"time"

	"airlock.dev/airlock"
	"airlock.dev/airlock/audit/index"
	"airlock.dev/airlock/audit/tiles"
)

// Hold is a legal hold: while one is in force no shard is dropped and no
// subject's key is erased.
type Hold struct {
	Name   string    `json:"name"` // 1 to 64 characters of a-z, 0-9 and -
	Reason string    `json:"reason"`
	Until  time.Time `json:"until"` // it ends by itself then
	Event  uint64    `json:"event"` // that set it
}

var holdName = regexp.MustCompile(`^[a-z0-9][a-z0-9-]{0,63}$`)

// SetHold begins a hold, or changes it.
func (l *Log) SetHold(ctx context.Context, by Actor, h Hold) (Hold, error) {
	l.turn.Lock()
	defer l.turn.Unlock()
	switch {
	case !holdName.MatchString(h.Name):
		return Hold{}, airlock.Invalidf("name", "use 1 to 64 characters of a-z, 0-9 and -", "the name %.80q of a hold is not possible", h.Name)
	case h.Reason == "" || len(h.Reason) > maxText:
		return Hold{}, airlock.Invalidf("reason", fmt.Sprintf("give 1 to %d bytes, such as the case it is for", maxText), "a hold needs a reason")
	case !h.Until.After(l.cfg.Now()):
		return Hold{}, airlock.Invalidf("until", "give a time to come", "a hold needs an end; it can be set anew before that")
	}
	h.Until = h.Until.UTC()
	holds, err := l.Holds(ctx)
	if err != nil {
		return Hold{}, fmt.Errorf("look for holds: %w", err)
	}
	for _, old := range holds {
		if old.Name == h.Name && h.Until.Before(old.Until) {
			return Hold{}, &airlock.Error{Code: airlock.Conflict, Field: "until", Message: fmt.Sprintf("the hold '%s' is set until %s, which is later", h.Name, old.Until.Format(time.RFC3339)), Hint: "release it first, if it is to end earlier: airlock audit hold release"}
		}
	}
	r, err := l.Append(ctx, Event{
		Type: "hold.set", Actor: by, Log: &LogPart{Hold: h.Name, Until: h.Until.Format(timeForm)}, Outcome: Outcome{Status: "ok", Message: h.Reason},
	})
	if err != nil {
		return Hold{}, err
	}
	h.Event = r.Seq()
	return h, nil
}

// ReleaseHold ends a hold before its time.
func (l *Log) ReleaseHold(ctx context.Context, by Actor, name string) error {
	l.turn.Lock()
	defer l.turn.Unlock()
	holds, err := l.Holds(ctx)
	if err != nil {
		return err
	}
	for _, h := range holds {
		if h.Name == name {
			_, err := l.Append(ctx, Event{Type: "hold.release", Actor: by, Log: &LogPart{Hold: name}, Outcome: Outcome{Status: "ok"}})
			return err
		}
	}
	return airlock.Errorf(airlock.NotFound, "there is no hold %.80q in force", name)
}

// Holds are those in force, as the log itself tells it.
func (l *Log) Holds(ctx context.Context) ([]Hold, error) {
	if err := l.CatchUp(ctx); err != nil {
		return nil, err
	}
	q := index.Query{Match: []index.Match{{Field: "type", Any: []string{"hold.set", "hold.release"}}}}
	byName := map[string]Hold{}
	var names []string
	for p := (index.Page{Limit: MaxPage}); ; {
		page, err := l.Find(ctx, q, p)
		if err != nil {
			return nil, err
		}
		for _, raw := range page.Events {
			var e struct {
				Seq     uint64  `json:"seq"`
				Type    string  `json:"type"`
				Log     LogPart `json:"log"`
				Outcome Outcome `json:"outcome"`
			}
			if err := json.Unmarshal(raw, &e); err != nil {
				return nil, fmt.Errorf("read a hold: %w", err)
			}
			if e.Type == "hold.release" {
				delete(byName, e.Log.Hold)
				continue
			}
			until, err := time.Parse(time.RFC3339Nano, e.Log.Until)
			if err != nil {
				return nil, fmt.Errorf("read the end of the hold %.80q: %w", e.Log.Hold, err)
			}
			byName[e.Log.Hold] = Hold{Name: e.Log.Hold, Reason: e.Outcome.Message, Until: until, Event: e.Seq}
			names = append(names, e.Log.Hold)
		}
		if !page.More {
			break
		}
		p.After = &page.Next
	}
	holds := []Hold{}
	for _, name := range names {
		if h, set := byName[name]; set && h.Until.After(l.cfg.Now()) {
			holds = append(holds, h)
		}
		delete(byName, name)
	}
	return holds, nil
}

// CatchUp waits until the index knows all events that were given to the log
// before it was called. While the trees cannot be completed it does not wait.
func (l *Log) CatchUp(ctx context.Context) error {
	pending, _ := l.wal.Pending()
	for want := l.durable() + uint64(pending); ; {
		l.mu.Lock()
		progress, failure := l.progress, l.failure
		l.mu.Unlock()
		if l.index.Next() >= want {
			return nil
		}
		if failure != nil {
			return behind("not all events can be looked up now", failure)
		}
		l.soon()
		select {
		case <-progress:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// behind is the error of what needs trees and index that are complete.
func behind(what string, err error) error {
	return &airlock.Error{Code: airlock.Unavailable, Message: what + ": the audit log's trees or checkpoints are behind", Hint: "airlock audit status tells why", RetryAfter: 1, Err: err}
}

// held refuses what a hold forbids.
func (l *Log) held(ctx context.Context, what string) error {
	holds, err := l.Holds(ctx)
	if err != nil {
		return fmt.Errorf("look for holds: %w", err)
	}
	if len(holds) > 0 {
		return &airlock.Error{Code: airlock.Denied, Message: fmt.Sprintf("%s while the legal hold '%s' is in force (%s)", what, holds[0].Name, holds[0].Reason), Hint: "release the hold first: airlock audit hold release"}
	}
	return nil
}

// Erase destroys the key of a subject, so that nobody can read its details any
// more, here or in any copy of the log. The log still verifies.
func (l *Log) Erase(ctx context.Context, by Actor, subject string) (pseudonym string, err error) {
	l.turn.Lock()
	defer l.turn.Unlock()
	if err := l.held(ctx, "nothing is erased"); err != nil {
		return "", err
	}
	found, err := l.cfg.Sealer.FindSubject(ctx, subject)
	if err != nil {
		return "", err
	}
	pseudonym = found.Pseudonym
	r, err := l.Append(ctx, Event{Type: "subject.erase", Actor: by, Log: &LogPart{Subject: pseudonym}})
	if err != nil {
		return "", err
	}
	seq := r.Seq()
	_, err = l.cfg.Sealer.Erase(ctx, subject)
	outcome := Outcome{Status: "ok"}
	if err != nil {
		outcome = Outcome{Status: "error", Code: string(airlock.CodeOf(err))}
	}
	l.Owe(ctx, Event{Type: "subject.erased", Actor: by, Log: &LogPart{Subject: pseudonym}, Of: &seq, Outcome: outcome})
	return pseudonym, err
}

// Drop removes the events of a closed shard. Its last checkpoint stays.
func (l *Log) Drop(ctx context.Context, by Actor, shard string) error {
	l.turn.Lock()
	defer l.turn.Unlock()
	return l.drop(ctx, by, shard)
}

func (l *Log) drop(ctx context.Context, by Actor, shard string) error {
	if err := l.held(ctx, "no part of the log is dropped"); err != nil {
		return err
	}
	shards := l.trees.Shards()
	at := slices.IndexFunc(shards, func(s tiles.Shard) bool { return s.ID == shard })
	if at < 0 {
		return airlock.Errorf(airlock.NotFound, "there is no shard %.40q", shard)
	}
	s := shards[at]
	switch {
	case s.Dropped:
		return airlock.Errorf(airlock.NotFound, "the shard %s was dropped already", shard)
	case at > 0 && !shards[at-1].Dropped:
		return airlock.Invalidf("shard", "drop the oldest first", "the shard %s is older than %s and still there", shards[at-1].ID, shard)
	case !s.Closed:
		return airlock.Errorf(airlock.Conflict, "the shard %s is being written: it can be dropped when it is closed", shard)
	}
	// What says that older ones were dropped may be in this one: it is said again.
	for _, gone := range append(shards[:at:at], s) {
		if _, err := l.Append(ctx, Event{Type: "retention.drop", Actor: by, Log: &LogPart{Shard: gone.ID, First: &gone.First, Size: &gone.Size, Root: gone.Root[:]}}); err != nil {
			return err
		}
	}
	l.taking.Lock() // what is taken in meanwhile is not where the index begins anew
	defer l.taking.Unlock()
	if err := l.trees.Drop(ctx, shard); err != nil {
		return fmt.Errorf("drop the shard %s: %w", shard, err)
	}
	if err := l.fitIndex(ctx); err != nil {
		return err
	}
	select {
	case l.again <- struct{}{}:
	default:
	}
	return nil
}

// dropOld drops the shards that were closed longer ago than the retention.
func (l *Log) dropOld(ctx context.Context) error {
	l.turn.Lock()
	defer l.turn.Unlock()
	for _, s := range l.trees.Shards() {
		if s.Dropped {
			continue
		}
		if !s.Closed {
			return nil
		}
		last, err := l.Event(ctx, s.First+s.Size-1)
		if err != nil {
			return err
		}
		row, err := index.RowOf(last)
		if err != nil {
			return err
		}
		if l.cfg.Now().Sub(row.Time) < l.cfg.Retention {
			return nil
		}
		if err := l.drop(ctx, system, s.ID); err != nil {
			return err
		}
		l.cfg.Log.Info("retention dropped a part of the audit log", "shard", s.ID, "events", s.Size)
	}
	return nil
}
