package index

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"airlock.dev/airlock"
)

const (
	// maxEvent is the most bytes that an event has.
	maxEvent = 32768
	// maxSubjects bounds those of one row; an event of maxEvent bytes has no
	// room for as many.
	maxSubjects = 4096
	// eventTime is how events write their time.
	eventTime = "2006-01-02T15:04:05.000000000Z"
)

// Row is what the index knows of one event. An empty string is an absent
// field; strings are otherwise any bytes.
type Row struct {
	Seq       uint64    // at most 2⁶³-1
	Time      time.Time // from 1970 to 2261, in nanoseconds
	Type      string
	Source    string // "host" or "guest"
	Team      string
	Sandbox   string
	Execution string
	App       string
	Actor     string // the actor's id
	Action    string
	Resource  string   // "type:id", as "Host:pypi.org"
	Effect    string   // "permit", "deny" or "hold"
	Status    string   // "ok", "error" or "denied"
	Of        uint64   // the event that this one completes; 0 is none, as event 0 opens the log
	Subjects  []string // the pseudonyms of its sealed parts; their order and repetition mean nothing
}

// RowOf returns the row of an event. It passes over fields that it does not
// know and refuses an event in which a known one is twice or is out of form.
func RowOf(event []byte) (Row, error) {
	if len(event) > maxEvent {
		return Row{}, fmt.Errorf("read event: it has %d bytes and %d is the most", len(event), maxEvent)
	}
	if !utf8.Valid(event) || bytes.ContainsFunc(event, func(r rune) bool { return r < ' ' || r == 0x7f }) {
		return Row{}, fmt.Errorf("read event: not one line of UTF-8")
	}
	seq, err := seqOf(event)
	if err != nil {
		return Row{}, fmt.Errorf("read event: %w", err)
	}
	if !json.Valid(event) {
		return Row{}, fmt.Errorf("read event %d: not JSON", seq)
	}
	r := Row{Seq: seq}
	if err := r.read(event); err != nil {
		return Row{}, fmt.Errorf("read event %d: %w", seq, err)
	}
	return r, nil
}

// seqOf reads the number from the first bytes, which are the same in every event.
func seqOf(event []byte) (uint64, error) {
	rest, ok := bytes.CutPrefix(event, []byte(`{"v":1,"seq":`))
	digits, _, comma := bytes.Cut(rest, []byte(","))
	if !ok || !comma {
		return 0, fmt.Errorf(`it does not begin with {"v":1,"seq":N,`)
	}
	return number(digits)
}

// number reads a whole number from 0 to 2⁶³-1 that is written in the one usual way.
func number(digits []byte) (uint64, error) {
	n, err := strconv.ParseUint(string(digits), 10, 63)
	if err != nil || strconv.FormatUint(n, 10) != string(digits) {
		return 0, fmt.Errorf("%.40q is not a number from 0 to %d", digits, int64(math.MaxInt64))
	}
	return n, nil
}

func (r *Row) read(event []byte) error {
	var when string
	err := fields(event, func(name string, value []byte) (err error) {
		switch name {
		case "time":
			when, err = text(value)
		case "type":
			r.Type, err = text(value)
		case "source":
			r.Source, err = text(value)
		case "team":
			r.Team, err = text(value)
		case "sandbox":
			r.Sandbox, err = text(value)
		case "execution":
			r.Execution, err = text(value)
		case "app":
			r.App, err = text(value)
		case "actor":
			err = texts(value, map[string]*string{"id": &r.Actor})
		case "call":
			err = r.readCall(value)
		case "decision":
			err = texts(value, map[string]*string{"effect": &r.Effect})
		case "outcome":
			err = texts(value, map[string]*string{"status": &r.Status})
		case "of":
			if r.Of, err = number(value); err == nil && (r.Of == 0 || r.Of >= r.Seq) {
				err = fmt.Errorf("event %d does not come before this one, or is the log's first", r.Of)
			}
		case "sealed":
			r.Subjects, err = subjects(value)
		}
		return err
	})
	if err != nil {
		return err
	}
	if r.Type == "" {
		return fmt.Errorf("type is missing")
	}
	if r.Time, err = time.Parse(eventTime, when); err != nil || r.Time.Format(eventTime) != when {
		return fmt.Errorf("time %.40q has not the form %s", when, eventTime)
	}
	return r.check()
}

func (r *Row) readCall(value []byte) error {
	return fields(value, func(name string, value []byte) (err error) {
		switch name {
		case "action":
			r.Action, err = text(value)
		case "resource":
			var kind, id string
			err = texts(value, map[string]*string{"type": &kind, "id": &id})
			if kind != "" || id != "" {
				r.Resource = kind + ":" + id
			}
		}
		return err
	})
}

func subjects(sealed []byte) ([]string, error) {
	var all []string
	err := elements(sealed, func(part []byte) error {
		var subject string
		if err := texts(part, map[string]*string{"subject": &subject}); err != nil {
			return err
		}
		if subject != "" {
			all = append(all, subject)
		}
		return nil
	})
	return distinct(all), err
}

// distinct returns the strings of all, sorted, each once, in a slice of its own.
func distinct(all []string) []string {
	return slices.Compact(slices.Sorted(slices.Values(all)))
}

// check reports what the index cannot keep.
func (r *Row) check() error {
	if r.Seq > math.MaxInt64 || r.Of > math.MaxInt64 {
		return airlock.Invalidf("seq", "give numbers below 2⁶³", "a number of event %d is too large", r.Seq)
	}
	if !keepable(r.Time) {
		return airlock.Invalidf("time", "give one from 1970 to 2261", "the time of event %d is %d-%02d", r.Seq, r.Time.Year(), r.Time.Month())
	}
	for i, s := range r.strings() {
		if c := columns[i]; c.codes != nil && *s != "" && !slices.Contains(c.codes, *s) {
			return airlock.Invalidf(c.name, "use "+oneOf(c.codes), "%s of event %d is %.40q", c.name, r.Seq, *s)
		}
	}
	if len(r.Subjects) > maxSubjects {
		return airlock.Invalidf("subject", fmt.Sprintf("give at most %d", maxSubjects), "event %d has %d subjects", r.Seq, len(r.Subjects))
	}
	return nil
}

// keepable says whether the nanoseconds since 1970 fit where they are kept.
func keepable(t time.Time) bool { return t.Unix() >= 0 && t.Year() < 2262 }

// The walk over JSON stands on json.Valid having seen all of it. encoding/json
// would take {"TYPE":…} for "type" and the last of two, and a log in which two
// readers read different things is no evidence.

// fields calls fn for each field of an object; null is one without any. It
// refuses a name that is there twice. Values that are null are passed over.
func fields(object []byte, fn func(name string, value []byte) error) error {
	if string(object) == "null" {
		return nil
	}
	if object[0] != '{' {
		return fmt.Errorf("%.40q is not an object", object)
	}
	seen := map[string]bool{}
	for i := next(object, 1); object[i] != '}'; {
		end := skip(object, i)
		name, err := text(object[i:end])
		if err != nil {
			return err
		}
		if seen[name] {
			return fmt.Errorf("%.40q is there twice", name)
		}
		seen[name] = true
		i = next(object, next(object, end)+1) // behind the colon
		end = skip(object, i)
		if value := object[i:end]; string(value) != "null" {
			if err := fn(name, value); err != nil {
				return fmt.Errorf("%.40q: %w", name, err)
			}
		}
		i = behind(object, end)
	}
	return nil
}

// elements calls fn for each element of an array.
func elements(array []byte, fn func([]byte) error) error {
	if array[0] != '[' {
		return fmt.Errorf("%.40q is not an array", array)
	}
	for i := next(array, 1); array[i] != ']'; {
		end := skip(array, i)
		if err := fn(array[i:end]); err != nil {
			return err
		}
		i = behind(array, end)
	}
	return nil
}

// texts reads the named string fields of an object.
func texts(object []byte, into map[string]*string) error {
	return fields(object, func(name string, value []byte) (err error) {
		if s := into[name]; s != nil {
			*s, err = text(value)
		}
		return err
	})
}

// text returns the string that a JSON string means.
func text(value []byte) (s string, err error) {
	if value[0] != '"' {
		return "", fmt.Errorf("%.40q is not a string", value)
	}
	if bytes.IndexByte(value, '\\') < 0 {
		return string(value[1 : len(value)-1]), nil
	}
	err = json.Unmarshal(value, &s)
	return s, err
}

// next returns where the next token begins, from i on.
func next(b []byte, i int) int {
	for b[i] == ' ' {
		i++
	}
	return i
}

// behind returns where the next field or element begins, or the bracket that
// ends them.
func behind(b []byte, end int) int {
	i := next(b, end)
	if b[i] == ',' {
		i = next(b, i+1)
	}
	return i
}

// skip returns where the value that begins at i ends.
func skip(b []byte, i int) int {
	depth := 0
	for {
		switch b[i] {
		case '"':
			for i++; b[i] != '"'; i++ {
				if b[i] == '\\' {
					i++
				}
			}
			i++
		case '{', '[':
			depth++
			i++
		case '}', ']':
			depth--
			i++
		case ' ', ',', ':':
			i++
		default: // a number, true, false, null
			for i < len(b) && strings.IndexByte(" ,:]}", b[i]) < 0 {
				i++
			}
		}
		if depth == 0 {
			return i
		}
	}
}
