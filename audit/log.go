// Package audit is the trail: what happened, in an order that cannot be
// changed unnoticed. An event is durable in a write-ahead log (audit/wal)
// before what it tells of happens, then part of a Merkle log with signed
// checkpoints (audit/tiles), then found by an index (audit/index).
//
// It knows nothing of HTTP, of sandboxes or of how decisions are made, and it
// never drops an event: what cannot be recorded is refused. Start reading at
// Log; docs/AUDIT.md is the format.
package audit

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"

	"airlock.dev/airlock"
	"airlock.dev/airlock/audit/index"
	"airlock.dev/airlock/audit/tiles"
	"airlock.dev/airlock/audit/wal"
)

// Sealer keeps the keys of subjects; keystore.Keystore is the one. Details
// sealed with a key that was erased are gone, and the log still verifies.
type Sealer interface {
	SealFor(ctx context.Context, subject string, plain, bound []byte) (airlock.Sealed, error)
	// OpenSealed's error has the code NotFound when the key was erased.
	OpenSealed(ctx context.Context, s airlock.Sealed, bound []byte) ([]byte, error)
	// Without a key, the errors of these have the code NotFound.
	FindSubject(ctx context.Context, subject string) (airlock.Subject, error)
	Erase(ctx context.Context, subject string) (airlock.Subject, error)
}

// Config is what a Log works with.
type Config struct {
	Dir          string // of the trail; made if missing
	Installation string // 20 characters of [a-z2-7]
	Version      string // of Airlock
	Sealer       Sealer
	Keys         []ed25519.PrivateKey // that sign checkpoints; the last one signs new shards
	Witnesses    []byte               // a witness policy (C2SP), or nil
	Period       Period
	Checkpoint   time.Duration    // 0 is one second
	Budget       uint64           // events of one sandbox; 0 is DefaultBudget
	Retention    time.Duration    // closed shards older than that are dropped; 0 keeps all
	Now          func() time.Time // nil is time.Now
	Log          *slog.Logger

	// AcceptDamage goes on after damage that was found at Open: the files are
	// kept beside, and the trail itself tells of it.
	AcceptDamage bool
}

// DefaultBudget is how many events one sandbox may cause.
const DefaultBudget = 200_000

const (
	// queueMost is how many events may be queued and not yet durable. More wait
	// until others are durable.
	queueMost = 4096
	// owedMost is how many ends of things are remembered while the log fails or
	// is behind. With those queued, that is what an unclean stop may take.
	owedMost   = 4096
	groupMost  = 1024
	retryEvery = time.Second
	// turnWait is how long an act waits for a change of shard.
	turnWait = 5 * time.Second
	// clockStep is how far the clock may go back without a word.
	clockStep = time.Second
	// sandboxMost bounds how many sandboxes' spending is remembered; of
	// others the index is asked again.
	sandboxMost = 20_000
)

// queueable are the types that Queue takes: what a sandbox's own life causes.
// Everything else is a crossing, or about the log, and waits.
var queueable = []string{"sandbox.*", "exec.*", "file.*", "port.end"}

// losable are the types that an unclean stop may take: those, and what else
// nobody waits for.
var losable = append(slices.Clone(queueable), "key.end", "secret.end", "subject.erased", "log.gap")

// Log is the trail of one server. Its methods may be called at once.
type Log struct {
	cfg   Config
	wal   *wal.Log
	trees *tiles.Trees
	index *index.Index

	mu       sync.Mutex
	epoch    uint64
	last     time.Time // of the newest event
	spent    map[spender]uint64
	turning  chan struct{} // closed when a change of shard is over; nil without one
	owed     []owed
	lost     int   // owed that found no room
	failure  error // of the integration, while it fails
	shard    string
	progress chan struct{} // closed, and a new one made, when the index knows more, or why it does not

	turn   sync.Mutex      // held by who changes the shard, drops one or erases
	taking sync.Mutex      // held by who brings events into the index or begins it anew; after turn
	again  chan struct{}   // of one: the index was begun anew
	hurry  chan struct{}   // of one: somebody waits for the next group
	life   context.Context // ends with Close: of what must be finished, whoever asked for it
	stop   context.CancelFunc
	wg     sync.WaitGroup
}

type owed struct {
	e    Event
	when time.Time
}

// Append records an event and returns when it is durable. With an error, or a
// receipt that cannot be spent, the act must not happen.
func (l *Log) Append(ctx context.Context, e Event) (Receipt, error) {
	t, err := l.add(ctx, &e, l.cfg.Now())
	if err != nil {
		return Receipt{}, err
	}
	if err := t.Wait(ctx); err != nil {
		return Receipt{}, notRecorded(err)
	}
	return Receipt{&receipt{seq: t.Seq(), call: e.Call, effect: e.Decision.Effect}}, nil
}

// Queue records an event of a sandbox's life; it is durable soon. It returns
// the event's number. Many that wait make it wait; none is dropped.
func (l *Log) Queue(ctx context.Context, e Event) (uint64, error) {
	if !mayQueue(e.Type) {
		return 0, airlock.Errorf(airlock.Internal, "an event %.40q may not be queued", e.Type)
	}
	t, err := l.add(ctx, &e, l.cfg.Now())
	if err != nil {
		return 0, err
	}
	if waiting, _ := l.wal.Pending(); waiting > queueMost {
		if err := t.Wait(ctx); err != nil {
			return 0, notRecorded(err)
		}
	}
	return t.Seq(), nil
}

// Owe records the end of something, which cannot be refused: while the log
// fails or is behind it is remembered, and if there is too much to remember the log will
// say how much it was.
func (l *Log) Owe(ctx context.Context, e Event) {
	now := l.cfg.Now()
	waiting, _ := l.wal.Pending()
	l.mu.Lock()
	behind := len(l.owed) > 0 || l.lost > 0 || waiting > queueMost || l.turning != nil
	l.mu.Unlock()
	if !behind {
		if _, err := l.add(ctx, &e, now); err == nil {
			return
		}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.owe(e, now)
}

// owe is called with mu held. What is owed is paid within a second.
func (l *Log) owe(e Event, now time.Time) {
	if len(l.owed) >= owedMost {
		l.lost++
		return
	}
	l.owed = append(l.owed, owed{e, now})
}

func mayQueue(typ string) bool {
	for _, q := range queueable {
		if family, all := strings.CutSuffix(q, "*"); typ == q || all && strings.HasPrefix(typ, family) {
			return true
		}
	}
	return false
}

// notRecorded is what clients see of a log that does not work.
func notRecorded(err error) error {
	if code := airlock.CodeOf(err); code == airlock.Canceled || code == airlock.Deadline {
		return err
	}
	return &airlock.Error{Code: airlock.Unavailable, Message: "refused: the audit log cannot take it", Hint: "the operator finds the reason with: airlock audit status", RetryAfter: 1, Err: err}
}

// add gives an event to the write-ahead log.
func (l *Log) add(ctx context.Context, e *Event, now time.Time) (wal.Ticket, error) {
	if err := l.charge(ctx, e); err != nil {
		return wal.Ticket{}, err
	}
	id := strings.ToLower(rand.Text())
	sealed, err := l.seal(ctx, id, e.Private)
	if err != nil {
		return wal.Ticket{}, notRecorded(fmt.Errorf("seal the details of an event: %w", err))
	}
	var late <-chan time.Time
	for {
		l.mu.Lock()
		turning := l.turning
		if turning == nil {
			break
		}
		l.mu.Unlock()
		if late == nil {
			late = time.After(turnWait)
		}
		select { // the shard changes: what comes now belongs behind its beginning
		case <-turning:
		case <-late:
			return wal.Ticket{}, behind("refused: a new part of the audit log is to begin, and the last checkpoint of the old one is missing", nil)
		case <-ctx.Done():
			return wal.Ticket{}, ctx.Err()
		}
	}
	defer l.mu.Unlock()
	if back := l.last.Sub(now); back > clockStep {
		message := fmt.Sprintf("the clock went back by %s, from %s to %s", back.Round(time.Millisecond), l.last.UTC().Format(timeForm), now.UTC().Format(timeForm))
		l.cfg.Log.Warn(message)
		if _, err := l.write(&Event{Type: "log.clock", Actor: system, Outcome: Outcome{Status: "ok", Message: message}}, strings.ToLower(rand.Text()), now, nil); err != nil {
			return wal.Ticket{}, notRecorded(err)
		}
		l.last = now
	}
	l.last = later(l.last, now)
	t, err := l.write(e, id, now, sealed)
	if err != nil {
		return wal.Ticket{}, notRecorded(err)
	}
	return t, nil
}

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// system is the actor of what Airlock does by itself.
var system = Actor{Kind: "system"}

// write is called with mu held, or before anybody else has the log.
func (l *Log) write(e *Event, id string, now time.Time, sealed []airlock.Sealed) (wal.Ticket, error) {
	body, err := e.body(id, l.epoch, now, sealed)
	if err != nil {
		return wal.Ticket{}, err
	}
	return l.wal.Append(func(seq uint64, buf []byte) ([]byte, error) { return appendEvent(buf, seq, body), nil })
}

func (l *Log) seal(ctx context.Context, id string, private []Private) ([]airlock.Sealed, error) {
	var all []airlock.Sealed
	for _, p := range private[:min(len(private), maxPrivate)] {
		plain, err := json.Marshal(p.Detail)
		if err != nil {
			return nil, err
		}
		if len(plain) > maxDetail {
			plain = fmt.Appendf(nil, `{"clipped":true,"bytes":%d}`, len(plain))
		}
		s, err := l.cfg.Sealer.SealFor(ctx, p.Subject, plain, []byte(id))
		if err != nil {
			return nil, err
		}
		all = append(all, s)
	}
	return all, nil
}

// charge takes an event from its sandbox's budget. Ends are free, so that
// what began can be told to have ended, and so is a kill. Visitors of a sandbox's
// ports have a budget of their own: strangers cannot spend its owner's.
func (l *Log) charge(ctx context.Context, e *Event) error {
	free := e.Of != nil || e.Type == "sandbox.end" || e.Type == "sandbox.budget" || e.Type == "sandbox.kill" && e.Decision.Effect == Permit
	if e.Sandbox == "" || free {
		if e.Type == "sandbox.end" {
			l.mu.Lock()
			delete(l.spent, spender{e.Sandbox, false})
			delete(l.spent, spender{e.Sandbox, true})
			l.mu.Unlock()
		}
		return nil
	}
	who := spender{e.Sandbox, e.Type == "port.serve"}
	l.mu.Lock()
	defer l.mu.Unlock()
	if _, known := l.spent[who]; !known && e.Type != "sandbox.create" {
		l.mu.Unlock()
		n, err := l.count(ctx, who)
		l.mu.Lock()
		if err != nil {
			return notRecorded(fmt.Errorf("count the events of a sandbox: %w", err))
		}
		if len(l.spent) >= sandboxMost {
			clear(l.spent)
		}
		l.spent[who] = max(n, l.spent[who])
	}
	if l.spent[who] >= l.cfg.Budget {
		whose, of := "its acts are", "this sandbox has"
		if who.visitors {
			whose, of = "connections to its ports are", "connections to this sandbox's ports have"
		}
		if l.spent[who] == l.cfg.Budget { // what is refused from here on is told once
			l.spent[who]++
			defer l.owe(Event{Type: "sandbox.budget", Team: e.Team, Sandbox: e.Sandbox, Actor: system, Outcome: Outcome{Status: "denied", Message: whose + " refused from now on"}}, l.cfg.Now())
		}
		return &airlock.Error{Code: airlock.Exhausted, Message: fmt.Sprintf("%s caused %d audit events, which is the most for one", of, l.cfg.Budget), Hint: "go on in a new sandbox, or ask the operator for more (airlock serve --audit-budget)"}
	}
	l.spent[who]++
	return nil
}

// spender is who has a budget: a sandbox's owner, or the visitors of its ports.
type spender struct {
	sandbox  string
	visitors bool
}

func (l *Log) count(ctx context.Context, who spender) (uint64, error) {
	q := index.Query{Match: []index.Match{{Field: "sandbox", Any: []string{who.sandbox}}, {Field: "of", Any: []string{""}}}}
	all := uint64(0)
	if !who.visitors {
		n, err := l.index.Count(ctx, q)
		if err != nil {
			return 0, err
		}
		all = n
	}
	q.Match = append(q.Match, index.Match{Field: "type", Any: []string{"port.serve"}})
	visits, err := l.index.Count(ctx, q)
	if who.visitors {
		return visits, err
	}
	return all - min(all, visits), err
}
