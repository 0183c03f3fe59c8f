package index

import (
	"context"
	"fmt"
	"math"
	"slices"
	"strings"

	"airlock.dev/airlock"
)

// MaxPage is the most numbers that Find returns at one time.
const MaxPage = 10_000

// Page says which of the matching events Find returns.
type Page struct {
	Newest bool    // the largest numbers first, instead of the smallest
	After  *uint64 // only what comes behind this number in that order; nil is from the start
	Limit  int     // 1 to MaxPage
}

// Find returns the numbers of the events that match, in the order of the page.
// What Add is adding meanwhile is not there yet.
func (x *Index) Find(ctx context.Context, q Query, page Page) ([]uint64, error) {
	if page.Limit < 1 || page.Limit > MaxPage {
		return nil, airlock.Invalidf("limit", fmt.Sprintf("give a number from 1 to %d", MaxPage), "limit is %d", page.Limit)
	}
	order, behind := " ORDER BY seq", "seq > ?"
	if page.Newest {
		order, behind = " ORDER BY seq DESC", "seq < ?"
	}
	s, err := where(q)
	if err != nil {
		return nil, err
	}
	if page.After != nil {
		s.and(behind, int64(min(*page.After, math.MaxInt64)))
	}
	s.WriteString(order + " LIMIT ?")
	s.args = append(s.args, page.Limit)
	found := make([]uint64, 0, min(page.Limit, 1000))
	err = x.use("find events", func() error {
		rows, err := x.readers.QueryContext(ctx, "SELECT seq FROM event"+s.String(), s.args...)
		if err != nil {
			return err
		}
		defer rows.Close()
		for rows.Next() {
			var seq int64
			if err := rows.Scan(&seq); err != nil {
				return err
			}
			found = append(found, uint64(seq))
		}
		return rows.Err()
	})
	if err != nil {
		return nil, err
	}
	return found, nil
}

// Count returns how many events match.
func (x *Index) Count(ctx context.Context, q Query) (uint64, error) {
	s, err := where(q)
	if err != nil {
		return 0, err
	}
	var n int64
	err = x.use("count events", func() error {
		return x.readers.QueryRowContext(ctx, "SELECT count(*) FROM event"+s.String(), s.args...).Scan(&n)
	})
	return uint64(n), err
}

// statement is the condition of a query in SQL. Nothing that anyone asked for
// is in its text: values are arguments.
type statement struct {
	strings.Builder
	args []any
}

func (s *statement) and(condition string, args ...any) {
	if s.Len() == 0 {
		s.WriteString(" WHERE ")
	} else {
		s.WriteString(" AND ")
	}
	s.WriteString(condition)
	s.args = append(s.args, args...)
}

// where translates q. It chooses the one index to go by itself: SQLite's
// planner knows nothing of the values and would take, for instance, that of
// the type, which a third of all events have. A + before a column keeps the
// planner from using an index on it.
func where(q Query) (*statement, error) {
	for _, m := range q.Match {
		if why, hint := m.wrong(); why != "" {
			return nil, airlock.Invalidf("query", hint, "%s", why)
		}
	}
	s := &statement{}
	lead := leading(q.Match)
	for i, m := range q.Match {
		m.write(s, i == lead)
	}
	if q.From > 0 {
		s.and("seq >= ?", int64(min(q.From, math.MaxInt64)))
	}
	if q.Before > 0 {
		s.and("seq < ?", int64(min(q.Before, math.MaxInt64)))
	}
	// Times need not grow with the numbers, so spans say where to look.
	if !q.Since.IsZero() {
		t := q.Since.UnixNano()
		s.and("+time >= ? AND seq >= (SELECT min(span) * ? FROM span WHERE latest >= ?)", t, spanSize, t)
	}
	if !q.Until.IsZero() {
		t := q.Until.UnixNano()
		s.and("+time < ? AND seq < (SELECT (max(span) + 1) * ? FROM span WHERE earliest < ?)", t, spanSize, t)
	}
	return s, nil
}

// leading returns which of the matches to go by: the one whose index likely
// leaves the fewest events. It is -1 when reading in order is better.
func leading(all []Match) int {
	for _, field := range []string{"execution", "sandbox", "of", "subject", "resource", "effect", "app", "actor", "type"} {
		for i, m := range all {
			if m.Field == field && m.leads() {
				return i
			}
		}
	}
	return -1
}

func (m Match) leads() bool {
	exact := !m.Not
	for _, v := range m.Any {
		exact = exact && v != "" && !(columnOf(m.Field).prefix && strings.HasSuffix(v, "*"))
	}
	switch m.Field {
	case "effect": // only the refusals are indexed
		return exact && !slices.Contains(m.Any, permit)
	case "type": // the events of several types would have to be sorted, and they are many
		return exact && len(m.Any) == 1
	}
	return exact
}

// write adds the condition of m.
func (m Match) write(s *statement, lead bool) {
	c := columnOf(m.Field)
	name := "+" + c.name
	if lead {
		name = c.name
	}
	var either []string
	var args, exact []any
	for _, v := range m.Any {
		switch {
		case v == "" && c.name == "subject":
			either = append(either, "NOT EXISTS (SELECT 1 FROM subject WHERE subject.seq = event.seq)")
		case v == "":
			either = append(either, name+" IS NULL")
		case c.prefix && v == "*":
			either = append(either, name+" IS NOT NULL")
		case c.prefix && strings.HasSuffix(v, "*"):
			head := []byte(v[:len(v)-1])
			either = append(either, name+" IN (SELECT id FROM word WHERE kind = ? AND substr(text, 1, ?) = ?)")
			args = append(args, c.words, len(head), head)
		default:
			exact = append(exact, c.bind(v))
		}
	}
	if len(exact) > 0 {
		among := amongst(len(exact))
		if c.words > 0 {
			ids := "(SELECT id FROM word WHERE kind = ? AND text " + among + ")"
			among = "IN " + ids
			if len(exact) == 1 { // then the index gives the events in order
				among = "= " + ids
			}
			args = append(args, c.words)
		}
		args = append(args, exact...)
		switch {
		case c.name == "subject" && lead:
			either = append(either, "seq IN (SELECT seq FROM subject WHERE word "+among+")")
		case c.name == "subject":
			either = append(either, "EXISTS (SELECT 1 FROM subject WHERE subject.seq = event.seq AND word "+among+")")
		case c.name == "effect" && lead: // the index has only these, see schema
			either = append(either, name+" "+among+" AND effect > 1")
		default:
			either = append(either, name+" "+among)
		}
	}
	condition := "(" + strings.Join(either, " OR ") + ")"
	if m.Not { // also for the events without the field
		condition += " IS NOT TRUE"
	}
	s.and(condition, args...)
}

// amongst returns the condition of being one of n arguments.
func amongst(n int) string {
	if n == 1 {
		return "= ?"
	}
	return "IN (?" + strings.Repeat(", ?", n-1) + ")"
}
