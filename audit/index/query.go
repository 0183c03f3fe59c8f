package index

import (
	"encoding/json"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"airlock.dev/airlock"
)

// maxQuery is the most bytes of a query. That bounds its values; its terms are
// bounded by the keys, as each is there at most once.
const maxQuery = 4096

// Query says which events are meant: those of which all holds. The zero Query
// means every event.
type Query struct {
	Match  []Match
	Since  time.Time // this and later; zero is no bound
	Until  time.Time // before this; zero is no bound
	From   uint64    // this number and larger ones
	Before uint64    // smaller numbers; 0 is no bound
}

// Match says what a field of an event is. Whoever may see only a part of the
// events adds a Match to what was asked for: one more never means more events.
type Match struct {
	// Field is type, source, team, sandbox, execution, app, actor, action,
	// resource, effect, status, subject or of.
	Field string
	// Any are the values of which the field has one; "" is its absence. In
	// type and action a last * stands for any text.
	Any []string
	// Not means the events for which that is not so.
	Not bool
}

// ParseQuery reads a query in the language of `airlock audit query`: terms
// with spaces between them, all of which must hold.
//
//	KEY=VALUE  KEY!=VALUE  KEY=VALUE,VALUE  since=TIME  until=TIME  seq>=N  seq<N
//
// The keys are the fields of Match. A value with a space, a comma or a quote
// in it is in double quotes, with the escapes of Go or JSON; "" means that the
// field is absent. A type is one of Types, or the beginning of one and a *; in
// other fields than type and action a * must be in quotes. A TIME is RFC 3339, a
// date (its first moment in UTC), or a whole number of s, m, h or d before now.
// The events since a time are those of that moment and later, those until a
// time are the ones before it. Each key is there at most once, but seq may have
// both bounds. Errors are Invalid, of the field "query", and say where.
func ParseQuery(query string, now time.Time) (Query, error) {
	switch {
	case len(query) > maxQuery:
		return Query{}, unusable(fmt.Sprintf("use at most %d", maxQuery), "it has %d bytes", len(query))
	case !utf8.ValidString(query):
		return Query{}, unusable(`write other bytes in double quotes, as \xff`, "it is not UTF-8")
	}
	p := parser{text: query, now: now, seen: map[string]bool{}}
	for {
		for p.at < len(query) && query[p.at] == ' ' {
			p.at++
		}
		if p.at == len(query) {
			break
		}
		p.start, p.terms = p.at, p.terms+1
		if err := p.term(); err != nil {
			return Query{}, err
		}
	}
	q := p.query
	switch {
	case !q.Since.IsZero() && !q.Until.IsZero() && !q.Since.Before(q.Until):
		return Query{}, unusable("let since be before until", "no time is since %s and until %s", q.Since.Format(time.RFC3339Nano), q.Until.Format(time.RFC3339Nano))
	case q.Before != 0 && q.From >= q.Before:
		return Query{}, unusable("let the lower bound be below the upper one", "no seq is at least %d and below %d", q.From, q.Before)
	case len(q.String()) > maxQuery: // it must be possible to say it again
		return Query{}, unusable("ask for less", "written in full it has %d bytes and %d are the most", len(q.String()), maxQuery)
	}
	return q, nil
}

func unusable(hint, format string, args ...any) error {
	return airlock.Invalidf("query", hint, "the query is not usable, %s", fmt.Sprintf(format, args...))
}

// parser reads one query. The term that it is in begins at start.
type parser struct {
	text  string
	now   time.Time
	at    int
	start int
	terms int
	seen  map[string]bool
	star  bool // a value of the term has a * that is not in quotes
	query Query
}

func (p *parser) failf(hint, format string, args ...any) error {
	return airlock.Invalidf("query", hint, "term %d of the query, at position %d, %.60q: %s", p.terms, p.start+1, p.text[p.start:p.termEnd()], fmt.Sprintf(format, args...))
}

// termEnd is the first space behind all that was read.
func (p *parser) termEnd() int {
	from := max(p.at, p.start)
	if n := strings.IndexByte(p.text[from:], ' '); n >= 0 {
		return from + n
	}
	return len(p.text)
}

// term reads one term.
func (p *parser) term() error {
	for p.at < len(p.text) && 'a' <= p.text[p.at] && p.text[p.at] <= 'z' {
		p.at++
	}
	key := p.text[p.start:p.at]
	var op string
	for _, o := range []string{"!=", ">=", "<=", "=", ">", "<"} { // the longer ones first
		if strings.HasPrefix(p.text[p.at:], o) {
			op = o
			break
		}
	}
	if key == "" || op == "" {
		return p.failf("write KEY=VALUE, as in sandbox=i123 effect=deny", "it has no key and operator")
	}
	c := columnOf(key)
	switch {
	case c == nil && key != "since" && key != "until" && key != "seq":
		return p.failf("use "+oneOf(append(names(), "since", "until", "seq")), "the key %.40q is not known", key)
	case key == "seq" && op == "!=":
		return p.failf("use seq=, seq>=, seq>, seq<= or seq<", "seq has no !=")
	case key != "seq" && op != "=" && (op != "!=" || c == nil):
		return p.failf("use =", "%s has no %s", key, op)
	}
	p.at += len(op)
	p.star = false
	values, err := p.values()
	if err != nil {
		return err
	}
	if c != nil {
		m := Match{Field: key, Any: values, Not: op == "!="}
		if why, hint := m.wrong(); why != "" {
			return p.failf(hint, "%s", why)
		}
		if p.star && !c.prefix {
			return p.failf("only a type or an action may end in *; a * that is meant as it is goes in double quotes", "%s takes no pattern", key)
		}
		for _, v := range values {
			if key == "type" && !knownType(v) {
				return p.failf(closeTypes(v), "no event has the type %.40q", v)
			}
		}
		if err := p.once(key, key); err != nil {
			return err
		}
		p.query.Match = append(p.query.Match, m)
		return nil
	}
	if len(values) != 1 {
		return p.failf("give one value", "%s has %d values", key, len(values))
	}
	switch key {
	case "since":
		return p.time(key, values[0], &p.query.Since)
	case "until":
		return p.time(key, values[0], &p.query.Until)
	}
	return p.seq(op, values[0])
}

// once refuses a key that was there before; slot is which part of it this is.
func (p *parser) once(key, slot string) error {
	if p.seen[slot] {
		return p.failf("put values together with commas, as in type=sandbox.create,sandbox.kill", "%s is there twice", key)
	}
	p.seen[slot] = true
	return nil
}

// values reads a list of values up to a space or the end.
func (p *parser) values() ([]string, error) {
	var values []string
	for {
		v, err := p.value()
		if err != nil {
			return nil, err
		}
		values = append(values, v)
		switch {
		case p.at == len(p.text) || p.text[p.at] == ' ':
			return values, nil
		case p.text[p.at] != ',':
			return nil, p.failf("put a comma between values, and a space between terms", "a value in quotes has something behind it")
		}
		p.at++
	}
}

func (p *parser) value() (string, error) {
	if p.at < len(p.text) && p.text[p.at] == '"' {
		return p.quoted()
	}
	rest := p.text[p.at:]
	end := strings.IndexFunc(rest, func(r rune) bool { return !bare(r) })
	if end < 0 {
		end = len(rest)
	}
	p.at += end
	p.star = p.star || strings.Contains(rest[:end], "*")
	switch {
	case p.at < len(p.text) && !strings.ContainsRune(" ,", rune(p.text[p.at])):
		return "", p.failf(`put it in double quotes, with \" for a quote and \n or \u200b for what cannot be seen`, "a value has a character that needs quotes")
	case end == 0:
		return "", p.failf(`give one, or "" for the events that do not have the field`, "a value is missing")
	}
	return rest[:end], nil
}

func (p *parser) quoted() (string, error) {
	begin := p.at
	for p.at++; p.at < len(p.text) && p.text[p.at] != '"'; p.at++ {
		if p.text[p.at] == '\\' {
			p.at++
		}
	}
	if p.at >= len(p.text) {
		p.at = len(p.text)
		return "", p.failf(`end it with "`, "a quote is not closed")
	}
	p.at++
	literal := p.text[begin:p.at]
	if strings.ContainsFunc(literal, func(r rune) bool { return !unicode.IsPrint(r) }) {
		return "", p.failf(`write it as \n or \u200b`, "a value has a character that cannot be seen")
	}
	v, err := strconv.Unquote(literal)
	if err != nil { // JSON has \/ and pairs of surrogates, which Go does not have
		err = json.Unmarshal([]byte(literal), &v)
	}
	if err != nil {
		return "", p.failf(`use the escapes of Go or JSON, as \\, \", \n, \u00e9`, "a value in quotes has an escape that is not known")
	}
	return v, nil
}

// bare says whether r may be in a value without quotes.
func bare(r rune) bool { return r != ' ' && r != '"' && r != ',' && unicode.IsPrint(r) }

func (p *parser) time(key, value string, into *time.Time) error {
	if err := p.once(key, key); err != nil {
		return err
	}
	t, ok := when(value, p.now)
	if !ok || !keepable(t) {
		return p.failf("give one from 1970 to 2261, as 2026-12-02T10:00:00Z, 2026-12-02, or 30m, 2h or 7d for that long ago", "%.40q is not a usable time", value)
	}
	*into = t.UTC()
	return nil
}

func when(value string, now time.Time) (time.Time, bool) {
	for _, layout := range []string{time.RFC3339Nano, time.DateOnly} {
		if t, err := time.Parse(layout, value); err == nil {
			return t, true
		}
	}
	unit := map[string]time.Duration{"s": time.Second, "m": time.Minute, "h": time.Hour, "d": 24 * time.Hour}[value[max(len(value)-1, 0):]]
	n, err := number([]byte(strings.TrimRight(value, "smhd")))
	if unit == 0 || err != nil || len(value) != len(strconv.FormatUint(n, 10))+1 || n > math.MaxInt64/uint64(unit) {
		return time.Time{}, false
	}
	return now.Add(-time.Duration(n) * unit), true
}

func (p *parser) seq(op, value string) error {
	n, err := number([]byte(value))
	from, before := n, n
	if op == ">" {
		from++
	}
	if op == "=" || op == "<=" {
		before++
	}
	if err != nil || max(from, before) > math.MaxInt64 {
		return p.failf(fmt.Sprintf("give a whole number below %d", int64(math.MaxInt64)), "%.40q is not usable", value)
	}
	if before == 0 && op == "<" {
		return p.failf("use seq=0 for the first event", "no seq is below 0")
	}
	if op != "<" && op != "<=" {
		if err := p.once("a lower bound of seq", "seq>"); err != nil {
			return err
		}
		p.query.From = from
	}
	if op != ">" && op != ">=" {
		if err := p.once("an upper bound of seq", "seq<"); err != nil {
			return err
		}
		p.query.Before = before
	}
	return nil
}

// String returns the query in the language of ParseQuery, which reads the
// String of what it returned as the same.
func (q Query) String() string {
	var terms []string
	for _, m := range q.Match {
		op := "="
		if m.Not {
			op = "!="
		}
		c, values := columnOf(m.Field), make([]string, len(m.Any))
		for i, v := range m.Any {
			literal := c != nil && !c.prefix && strings.Contains(v, "*")
			if values[i] = v; literal || v == "" || !utf8.ValidString(v) || strings.ContainsFunc(v, func(r rune) bool { return !bare(r) }) {
				values[i] = strconv.Quote(v)
			}
		}
		terms = append(terms, m.Field+op+strings.Join(values, ","))
	}
	if !q.Since.IsZero() {
		terms = append(terms, "since="+q.Since.UTC().Format(time.RFC3339Nano))
	}
	if !q.Until.IsZero() {
		terms = append(terms, "until="+q.Until.UTC().Format(time.RFC3339Nano))
	}
	if q.From > 0 {
		terms = append(terms, "seq>="+strconv.FormatUint(q.From, 10))
	}
	if q.Before > 0 {
		terms = append(terms, "seq<"+strconv.FormatUint(q.Before, 10))
	}
	return strings.Join(terms, " ")
}

// wrong says what is wrong with m and what to do, or nothing.
func (m Match) wrong() (why, hint string) {
	c := columnOf(m.Field)
	if c == nil {
		return fmt.Sprintf("the field %.40q is not known", m.Field), "use " + oneOf(names())
	}
	if len(m.Any) == 0 {
		return m.Field + " has no value", "give one"
	}
	for _, v := range m.Any {
		switch star := strings.IndexByte(v, '*'); {
		case v == "":
		case c.codes != nil && !slices.Contains(c.codes, v):
			return fmt.Sprintf("%s is never %.40q", m.Field, v), "use " + oneOf(c.codes)
		case c.name == "of":
			if _, err := number([]byte(v)); err != nil {
				return fmt.Sprintf("%s is never %.40q", m.Field, v), "give the number of an event"
			}
		case c.prefix && star >= 0 && star < len(v)-1:
			return fmt.Sprintf("%.40q has a * that is not at its end", v), "leave out what is behind it"
		case c.prefix && star > wordHead:
			return fmt.Sprintf("the text before the * has %d bytes", star), fmt.Sprintf("use at most %d", wordHead)
		}
	}
	return "", ""
}

// oneOf lists words for a person.
func oneOf(words []string) string {
	last := len(words) - 1
	return strings.Join(words[:last], ", ") + " or " + words[last]
}
