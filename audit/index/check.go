package index

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"
)

const (
	// reported is how many numbers a Finding names.
	reported = 100
	// window is how many rows Check asks for at one time.
	window = 1000
)

// Finding are events with which something is wrong.
type Finding struct {
	Count uint64
	Seqs  []uint64 // the first 100 that were found
}

func (f *Finding) add(seq uint64) {
	if f.Count++; len(f.Seqs) < reported {
		f.Seqs = append(f.Seqs, seq)
	}
}

// Report says how an index differs from the log.
type Report struct {
	// Next is where the index ends. A log that goes on is no fault of the
	// index: it may lag behind.
	Next uint64
	// Compared is how many rows were compared.
	Compared uint64
	Differ   Finding // the index says something else of these than the log
	Absent   Finding // the log has these below Next and the index does not
	Extra    Finding // the index has these and the log does not, or they are not below Next
	// Damage is what is wrong with the file itself, in SQLite's words or ours,
	// so that queries could miss or invent events; at most 100 sentences.
	Damage []string
}

// OK says whether nothing was found.
func (r Report) OK() bool {
	return r.Differ.Count+r.Absent.Count+r.Extra.Count == 0 && len(r.Damage) == 0
}

// Check compares the index, as it is at this moment, to the log, but for the
// events from the number below on, which the index may know before the log is
// read. It calls rows for the log's own rows: those from the first one at or
// behind from on, without gaps, at most as many as most; none when the log
// ends. An error is one of reading, and says nothing of the index.
func (x *Index) Check(ctx context.Context, below uint64, rows func(ctx context.Context, from uint64, most int) ([]Row, error)) (Report, error) {
	var report Report
	err := x.use("check the audit index", func() error {
		tx, err := x.readers.BeginTx(ctx, &sql.TxOptions{ReadOnly: true}) // one moment for all of it
		if err != nil {
			return err
		}
		defer tx.Rollback()
		c := checker{ctx: ctx, tx: tx, below: below, report: &report, words: map[int64]wordKey{}}
		if err = c.structure(); err == nil {
			err = c.compare(rows)
		}
		if damaging(err) { // that is a finding
			x.damaged.Store(true)
			c.damage("%v: what is behind that was not compared", err)
			return nil
		}
		return err
	})
	return report, err
}

type checker struct {
	ctx    context.Context
	tx     *sql.Tx
	below  uint64
	report *Report
	words  map[int64]wordKey // some of them
}

func (c *checker) damage(format string, args ...any) {
	sentence := fmt.Sprintf(format, args...)
	if len(c.report.Damage) < reported && !slices.Contains(c.report.Damage, sentence) {
		c.report.Damage = append(c.report.Damage, sentence)
	}
}

// structure looks for damage of the file, and for entries of SQLite's indices
// that do not belong to their rows.
func (c *checker) structure() error {
	found, err := c.tx.QueryContext(c.ctx, "PRAGMA integrity_check("+strconv.Itoa(reported)+")")
	if err != nil {
		return err
	}
	defer found.Close()
	for found.Next() {
		var sentence string
		if err := found.Scan(&sentence); err != nil {
			return err
		}
		if sentence != "ok" {
			c.damage("%s", sentence)
		}
	}
	return found.Err()
}

// compare goes through the rows of the log and those of the index side by side.
func (c *checker) compare(rows func(context.Context, uint64, int) ([]Row, error)) error {
	var next int64
	if err := c.tx.QueryRowContext(c.ctx, "SELECT next FROM state").Scan(&next); err != nil {
		return err
	}
	c.report.Next = min(uint64(next), c.below)
	have, err := c.tx.QueryContext(c.ctx, `SELECT seq, time, coalesce(type, 0), coalesce(source, 0), coalesce(team, 0), coalesce(sandbox, 0), coalesce(execution, 0), coalesce(app, 0), coalesce(actor, 0), coalesce(action, 0), coalesce(resource, 0), coalesce(effect, 0), coalesce(status, 0), coalesce(of, 0), coalesce((SELECT group_concat(word) FROM subject WHERE subject.seq = event.seq), '') FROM event WHERE seq < ? ORDER BY seq`, int64(min(c.below, math.MaxInt64)))
	if err != nil {
		return err
	}
	defer have.Close()
	entry, more, err := scan(have)
	if err != nil {
		return err
	}
	for from := uint64(0); from < c.report.Next; {
		want, err := rows(c.ctx, from, window)
		if err != nil {
			return fmt.Errorf("read the log from event %d: %w", from, err)
		}
		if len(want) == 0 {
			break
		}
		for i := range want {
			w := &want[i]
			if w.Seq < from || i > 0 && w.Seq != from {
				return fmt.Errorf("read the log from event %d: it gave event %d", from, w.Seq)
			}
			if from = w.Seq + 1; w.Seq >= c.report.Next {
				break
			}
			for more && entry.seq < w.Seq {
				c.report.Extra.add(entry.seq)
				if entry, more, err = scan(have); err != nil {
					return err
				}
			}
			if !more || entry.seq > w.Seq {
				c.report.Absent.add(w.Seq)
				continue
			}
			c.report.Compared++
			same, err := c.same(entry, w)
			if err != nil {
				return err
			}
			if !same {
				c.report.Differ.add(w.Seq)
			}
			if entry, more, err = scan(have); err != nil {
				return err
			}
		}
		within := want[:min(uint64(len(want)), c.report.Next-min(want[0].Seq, c.report.Next))]
		if err := c.checkSpans(within); err != nil {
			return err
		}
	}
	for more {
		c.report.Extra.add(entry.seq)
		if entry, more, err = scan(have); err != nil {
			return err
		}
	}
	return c.orphans()
}

// entry is a row of the file as it is there.
type entry struct {
	seq      uint64
	time     int64
	values   [11]int64 // in the order of columns; 0 is absent
	of       int64
	subjects string // ids with commas between them
}

func scan(rows *sql.Rows) (entry, bool, error) {
	var e entry
	if !rows.Next() {
		return e, false, rows.Err()
	}
	var seq int64
	into := []any{&seq, &e.time}
	for i := range e.values {
		into = append(into, &e.values[i])
	}
	err := rows.Scan(append(into, &e.of, &e.subjects)...)
	e.seq = uint64(seq)
	return e, true, err
}

// same says whether e is what Add would have made of the log's row.
func (c *checker) same(e entry, want *Row) (bool, error) {
	if err := want.check(); err != nil {
		return false, err
	}
	if e.time != want.Time.UnixNano() || e.of != int64(want.Of) {
		return false, nil
	}
	for i, s := range want.strings() {
		if *s == "" || e.values[i] == 0 {
			if *s != "" || e.values[i] != 0 {
				return false, nil
			}
			continue
		}
		if columns[i].codes != nil {
			if any(int(e.values[i])) != columns[i].bind(*s) {
				return false, nil
			}
			continue
		}
		if have, err := c.word(e.values[i]); err != nil || have != (wordKey{columns[i].words, string(word(*s))}) {
			return false, err
		}
	}
	var have, expect []string
	for id := range strings.SplitSeq(e.subjects, ",") {
		if id == "" {
			continue
		}
		n, err := strconv.ParseInt(id, 10, 64)
		if err != nil {
			return false, err
		}
		w, err := c.word(n)
		if err != nil || w.kind != columnOf("subject").words {
			return false, err
		}
		have = append(have, w.text)
	}
	for _, s := range want.Subjects {
		if s != "" {
			expect = append(expect, string(word(s)))
		}
	}
	slices.Sort(have)
	return slices.Equal(have, distinct(expect)), nil
}

// word returns what an id stands for; the zero wordKey if nothing.
func (c *checker) word(id int64) (wordKey, error) {
	if w, ok := c.words[id]; ok {
		return w, nil
	}
	var w wordKey
	var text []byte
	err := c.tx.QueryRowContext(c.ctx, "SELECT kind, text FROM word WHERE id = ?", id).Scan(&w.kind, &text)
	if errors.Is(err, sql.ErrNoRows) {
		return wordKey{}, nil
	}
	if err != nil {
		return wordKey{}, err
	}
	if len(c.words) >= cachedWords {
		clear(c.words)
	}
	w.text = string(text)
	c.words[id] = w
	return w, nil
}

// checkSpans looks whether a query for the times of rows would look where they are.
func (c *checker) checkSpans(rows []Row) error {
	spans := spansOf(rows)
	for _, n := range slices.Sorted(maps.Keys(spans)) {
		var have span
		err := c.tx.QueryRowContext(c.ctx, "SELECT earliest, latest FROM span WHERE span = ?", n).Scan(&have.earliest, &have.latest)
		if err != nil && !errors.Is(err, sql.ErrNoRows) {
			return err
		}
		if err != nil || have.earliest > spans[n].earliest || have.latest < spans[n].latest {
			c.damage("the times of the events from %d to %d are not those of the log", n*spanSize, (n+1)*spanSize-1)
		}
	}
	return nil
}

// orphans looks for subjects of events that are not there.
func (c *checker) orphans() error {
	rows, err := c.tx.QueryContext(c.ctx, "SELECT DISTINCT seq FROM subject WHERE NOT EXISTS (SELECT 1 FROM event WHERE event.seq = subject.seq) ORDER BY seq")
	if err != nil {
		return err
	}
	defer rows.Close()
	for rows.Next() {
		var seq int64
		if err := rows.Scan(&seq); err != nil {
			return err
		}
		c.report.Extra.add(uint64(seq))
	}
	return rows.Err()
}
