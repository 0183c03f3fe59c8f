// Package index answers which events of the audit log match a query.
//
// It keeps of each event what a query may ask for, a Row, in an SQLite file,
// and answers with numbers of events: what an event says is for the log to
// tell. The file is never the source of anything. It can be deleted at any
// time and is made again from the log; Check compares it to the log. The
// package knows nothing of trees, of the log's files, or of who asks. Start
// reading at Index, and at ParseQuery for the language.
package index

import (
	"context"
	"crypto/sha256"
	"database/sql"
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"

	"airlock.dev/airlock"
	"modernc.org/sqlite"
	sqlite3 "modernc.org/sqlite/lib"
)

// Index is an open index. Its methods may be called at the same time.
type Index struct {
	path     string
	replaced string
	lock     *lock // nil in one that only reads
	writer   *sql.DB
	readers  *sql.DB

	next    atomic.Uint64
	damaged atomic.Bool

	open   sync.RWMutex // held for reading while the files are used
	closed bool

	adding sync.Mutex // held by Add and Reset; guards words and lastWord
	// words are the ids of words that were used lately.
	words    map[wordKey]int64
	lastWord int64
}

type wordKey struct {
	kind int
	text string
}

const (
	// cachedWords bounds Index.words: it is emptied when it has as many.
	cachedWords = 1 << 15
	// A word longer than wordMost is kept as its first wordHead bytes, a zero
	// byte and its SHA-256. That is longer than any other word, so that
	// nobody can write one that looks the same.
	wordMost = 256
	wordHead = 224
	// spanSize is the number of events of which a row of span tells the
	// earliest and latest time.
	spanSize = 4096
)

// permit is the first of the effects; the others are refusals.
const permit = "permit"

// column is how the file keeps a field.
type column struct {
	name   string
	words  int      // the kind of its words in the file; 0 when it has none
	codes  []string // all values of it; a value's code is its place, from 1
	prefix bool     // a query may ask for the beginning of a value
}

// columns are the fields of a Row in the order of Row.strings, and those two
// that are no string. The kinds and codes are what is in files: changing them
// takes a new formatVersion.
var columns = []column{
	{name: "type", words: 1, prefix: true},
	{name: "source", codes: []string{"host", "guest"}},
	{name: "team", words: 2},
	{name: "sandbox", words: 3},
	{name: "execution", words: 4},
	{name: "app", words: 5},
	{name: "actor", words: 6},
	{name: "action", words: 7, prefix: true},
	{name: "resource", words: 8},
	{name: "effect", codes: []string{permit, "deny", "hold"}},
	{name: "status", codes: []string{"ok", "error", "denied"}},
	{name: "subject", words: 9},
	{name: "of"},
}

func (r *Row) strings() [11]*string {
	return [...]*string{&r.Type, &r.Source, &r.Team, &r.Sandbox, &r.Execution, &r.App, &r.Actor, &r.Action, &r.Resource, &r.Effect, &r.Status}
}

// columnOf returns nil for a name that is not a field's.
func columnOf(name string) *column {
	if i := slices.IndexFunc(columns, func(c column) bool { return c.name == name }); i >= 0 {
		return &columns[i]
	}
	return nil
}

func names() []string {
	var all []string
	for _, c := range columns {
		all = append(all, c.name)
	}
	return all
}

// bind returns value, which is in order and not empty, as it is kept, or for a
// word the text by which it is found.
func (c *column) bind(value string) any {
	switch {
	case c.codes != nil:
		return slices.Index(c.codes, value) + 1
	case c.words > 0:
		return word(value)
	}
	n, _ := strconv.ParseInt(value, 10, 64)
	return n
}

// word returns the bytes by which the file knows a value, at most wordHead+33.
func word(value string) []byte {
	if len(value) <= wordMost {
		return []byte(value)
	}
	sum := sha256.Sum256([]byte(value))
	return append(append([]byte(value[:wordHead]), 0), sum[:]...)
}

// Next returns the number of the event that the index wants next: it knows
// all before, down to where it was begun.
func (x *Index) Next() uint64 { return x.next.Load() }

// Replaced says why Open moved a file aside and began a new one; "" if it did not.
func (x *Index) Replaced() string { return x.replaced }

// Add puts in the rows of events, of which the first is that of Next and the
// others follow. Either all are in or none: after an error that is not
// Conflict or Invalid, such as a full disk, Add may be called with the same
// rows again. About a thousand rows at a time are fastest.
func (x *Index) Add(ctx context.Context, rows []Row) error {
	x.adding.Lock()
	defer x.adding.Unlock()
	for i := range rows {
		if want := x.Next() + uint64(i); rows[i].Seq != want {
			return &airlock.Error{
				Code:    airlock.Conflict,
				Message: fmt.Sprintf("the index wants event %d and was given %d", want, rows[i].Seq),
				Hint:    "read the log from the number that it wants next",
			}
		}
		if err := rows[i].check(); err != nil {
			return err
		}
	}
	if len(rows) == 0 {
		return nil
	}
	next := x.Next() + uint64(len(rows))
	if err := x.change(ctx, "add events", func(a *adder) error { return a.add(rows, next) }); err != nil {
		return err
	}
	x.next.Store(next)
	return nil
}

// Reset makes the index empty. It then wants the event first, which is where
// a log begins of which older parts were dropped.
func (x *Index) Reset(ctx context.Context, first uint64) error {
	if first > math.MaxInt64 {
		return airlock.Invalidf("first", "give a number below 2⁶³", "the number %d is too large", first)
	}
	x.adding.Lock()
	defer x.adding.Unlock()
	err := x.change(ctx, "empty the index", func(a *adder) error {
		for _, statement := range []string{"DELETE FROM event", "DELETE FROM subject", "DELETE FROM span", "DELETE FROM word"} {
			if _, err := a.tx.ExecContext(a.ctx, statement); err != nil {
				return err
			}
		}
		_, err := a.tx.ExecContext(a.ctx, "UPDATE state SET first = ?, next = ?", int64(first), int64(first))
		return err
	})
	if err != nil {
		return err
	}
	clear(x.words)
	x.next.Store(first)
	return nil
}

// use runs fn, which uses the files, unless the index is closed, and says in
// an error what it was for and what to do.
func (x *Index) use(what string, fn func() error) error {
	x.open.RLock()
	defer x.open.RUnlock()
	if x.closed {
		return airlock.Errorf(airlock.Unavailable, "the audit index is closed")
	}
	err := fn()
	if damaging(err) {
		x.damaged.Store(true)
	}
	return x.explain(what, err)
}

// explain says what an error of SQLite was for, and what to do.
func (x *Index) explain(what string, err error) error {
	switch {
	case err == nil:
		return nil
	case damaging(err):
		return &airlock.Error{
			Code:    airlock.Unavailable,
			Message: fmt.Sprintf("the audit index %s is damaged", x.path),
			Hint:    "restart the server: it keeps the file aside and makes a new one from the log, which is not touched",
			Err:     fmt.Errorf("%s: %w", what, err),
		}
	case sqliteCode(err) == sqlite3.SQLITE_FULL:
		return &airlock.Error{
			Code:    airlock.NoSpace,
			Message: fmt.Sprintf("there is no space for the audit index %s", x.path),
			Hint:    "make room on its disk; the log has what the index lacks",
			Err:     fmt.Errorf("%s: %w", what, err),
		}
	}
	return fmt.Errorf("%s (%s): %w", what, x.path, err)
}

// damaging says whether err speaks of bytes that are not an index.
func damaging(err error) bool {
	code := sqliteCode(err)
	return code == sqlite3.SQLITE_CORRUPT || code == sqlite3.SQLITE_NOTADB
}

// sqliteCode returns the primary code of an error of SQLite, or 0.
func sqliteCode(err error) int {
	var e *sqlite.Error
	if errors.As(err, &e) {
		return e.Code() & 0xff
	}
	return 0
}

// change runs fn in one transaction, with x.adding held.
func (x *Index) change(ctx context.Context, what string, fn func(*adder) error) error {
	if x.lock == nil {
		return airlock.Errorf(airlock.Conflict, "the audit index was opened for reading only")
	}
	return x.use(what, func() error {
		tx, err := x.writer.BeginTx(ctx, nil)
		if err != nil {
			return err
		}
		defer tx.Rollback() // after Commit it does nothing
		a := &adder{ctx: ctx, tx: tx, index: x, lastWord: x.lastWord, fresh: map[wordKey]int64{}}
		if err := fn(a); err != nil {
			return err
		}
		if err := tx.Commit(); err != nil {
			return err
		}
		x.lastWord = a.lastWord
		if len(x.words)+len(a.fresh) > cachedWords {
			clear(x.words)
		}
		for k, id := range a.fresh {
			x.words[k] = id
		}
		return nil
	})
}

// adder is one transaction of Add. The words that it makes are the index's
// once it is committed.
type adder struct {
	ctx      context.Context
	tx       *sql.Tx
	index    *Index
	lastWord int64
	fresh    map[wordKey]int64

	findWord, addWord, addEvent, addSubject *sql.Stmt
}

func (a *adder) add(rows []Row, next uint64) error {
	for _, s := range []struct {
		into **sql.Stmt
		text string
	}{
		{&a.findWord, "SELECT id FROM word WHERE kind = ? AND text = ?"},
		{&a.addWord, "INSERT INTO word (id, kind, text) VALUES (?, ?, ?)"},
		{&a.addEvent, "INSERT INTO event (seq, time, type, source, team, sandbox, execution, app, actor, action, resource, effect, status, of) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"},
		{&a.addSubject, "INSERT INTO subject (seq, word) VALUES (?, ?)"},
	} {
		var err error
		if *s.into, err = a.tx.PrepareContext(a.ctx, s.text); err != nil {
			return err
		}
	}
	for i := range rows {
		if err := a.row(&rows[i]); err != nil {
			return err
		}
	}
	for n, s := range spansOf(rows) {
		_, err := a.tx.ExecContext(a.ctx, "INSERT INTO span (span, earliest, latest) VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET earliest = min(earliest, excluded.earliest), latest = max(latest, excluded.latest)", n, s.earliest, s.latest)
		if err != nil {
			return err
		}
	}
	_, err := a.tx.ExecContext(a.ctx, "UPDATE state SET next = ?", int64(next))
	return err
}

// span is the times of spanSize events, in nanoseconds since 1970.
type span struct{ earliest, latest int64 }

// spansOf returns the spans that rows are in, with the times of rows alone.
func spansOf(rows []Row) map[int64]span {
	spans := map[int64]span{}
	for i := range rows {
		n, t := int64(rows[i].Seq/spanSize), rows[i].Time.UnixNano()
		s, ok := spans[n]
		if !ok {
			s = span{t, t}
		}
		spans[n] = span{min(s.earliest, t), max(s.latest, t)}
	}
	return spans
}

func (a *adder) row(r *Row) error {
	args := []any{int64(r.Seq), r.Time.UnixNano()}
	for i, s := range r.strings() {
		switch c := &columns[i]; {
		case *s == "":
			args = append(args, nil)
		case c.words > 0:
			id, err := a.word(c.words, *s)
			if err != nil {
				return err
			}
			args = append(args, id)
		default:
			args = append(args, c.bind(*s))
		}
	}
	if r.Of > 0 {
		args = append(args, int64(r.Of))
	} else {
		args = append(args, nil)
	}
	if _, err := a.addEvent.ExecContext(a.ctx, args...); err != nil {
		return err
	}
	for _, s := range distinct(r.Subjects) {
		if s == "" {
			continue
		}
		id, err := a.word(columnOf("subject").words, s)
		if err != nil {
			return err
		}
		if _, err := a.addSubject.ExecContext(a.ctx, int64(r.Seq), id); err != nil {
			return err
		}
	}
	return nil
}

// word returns the id of a word, and makes the word if it is new.
func (a *adder) word(kind int, value string) (int64, error) {
	text := word(value)
	key := wordKey{kind, string(text)}
	if id, ok := a.index.words[key]; ok {
		return id, nil
	}
	if id, ok := a.fresh[key]; ok {
		return id, nil
	}
	var id int64
	err := a.findWord.QueryRowContext(a.ctx, kind, text).Scan(&id)
	if errors.Is(err, sql.ErrNoRows) {
		a.lastWord++
		id = a.lastWord
		_, err = a.addWord.ExecContext(a.ctx, id, kind, text)
	}
	if err == nil {
		a.fresh[key] = id
	}
	return id, err
}
