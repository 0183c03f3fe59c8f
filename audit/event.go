package audit

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"airlock.dev/airlock"
)

// MaxEvent is how many bytes an event takes at most. What is longer loses
// length field by field, and says so; it never fails for its size.
const MaxEvent = 32768

// Bounds of an event's parts, in bytes and entries.
const (
	maxID      = 256
	maxText    = 1024
	maxEntries = 32
	maxPrivate = 8
	maxDetail  = 4096
)

// Source says who saw what an event tells. Decisions, verdicts and evidence
// rest on the host's events only.
type Source string

// The sources.
const (
	Host  Source = "host"  // Airlock itself did it or saw it
	Guest Source = "guest" // something in the sandbox says so
)

// Event is one thing that happened. docs/AUDIT.md describes its bytes. What
// is not known stays zero.
type Event struct {
	Type      string // "sandbox.create", see docs/AUDIT.md
	Source    Source // "" is Host
	Team      string
	Sandbox   string
	Execution string
	App       string // digest
	Actor     Actor
	Request   string          // of a sandbox.create and a sandbox.network: the policies that the client asks for
	Facts     json.RawMessage // what the decision knew beside the call
	Call      Call
	Decision  Decision
	Outcome   Outcome
	Of        *uint64 // the event of the act whose outcome this is
	Log       *LogPart
	Private   []Private // sealed before it is written
}

// Actor is who made it happen.
type Actor struct {
	Kind string       `json:"kind"` // user, agent, operator, sandbox, system
	ID   string       `json:"id,omitempty"`
	Role airlock.Role `json:"role,omitempty"`
}

// Entity names who acts or what is acted on, by a type of the policy schema.
type Entity struct {
	Type string `json:"type"`
	ID   string `json:"id"`
}

// Call is the act as it was decided. What is personal of it is in a sealed
// part instead.
type Call struct {
	Principal Entity         `json:"principal"`
	Action    string         `json:"action"` // "port:serve"
	Resource  Entity         `json:"resource"`
	Context   map[string]any `json:"context,omitempty"`
}

// Permit is the effect of a decision that allows. All others do not.
const Permit = "permit"

// Decision is what policy said of a call.
type Decision struct {
	Effect      string       `json:"effect"` // permit, deny, hold
	Policies    []string     `json:"policies,omitempty"`
	Reason      string       `json:"reason,omitempty"`
	Obligations []Obligation `json:"obligations,omitempty"`
	Errors      []string     `json:"errors,omitempty"`
	Set         string       `json:"set,omitempty"` // digest of the policies
}

// Obligation is a condition of a permit.
type Obligation struct {
	Kind  string `json:"kind"`
	Value string `json:"value,omitempty"`
	Limit int64  `json:"limit,omitempty"`
}

// Outcome is how an act went.
type Outcome struct {
	Status   string           `json:"status"`         // ok, error, denied
	Code     string           `json:"code,omitempty"` // of the error, or the outcome of an exec
	Message  string           `json:"message,omitempty"`
	ExitCode *int             `json:"exitCode,omitempty"`
	Counts   map[string]int64 `json:"counts,omitempty"` // bytesIn, bytesOut, durationMicros
}

// LogPart is what events about the log itself carry.
type LogPart struct {
	Shard        string    `json:"shard,omitempty"`
	First        *uint64   `json:"first,omitempty"`
	Installation string    `json:"installation,omitempty"`
	VKey         string    `json:"vkey,omitempty"`
	Previous     *Previous `json:"previous,omitempty"`
	Next         string    `json:"next,omitempty"`
	NextVKey     string    `json:"nextVkey,omitempty"`
	Size         *uint64   `json:"size,omitempty"`
	Root         []byte    `json:"root,omitempty"`
	Epoch        uint64    `json:"epoch,omitempty"`
	Clean        *bool     `json:"clean,omitempty"`
	Missing      *Missing  `json:"missing,omitempty"`
	Damage       string    `json:"damage,omitempty"`
	Hold         string    `json:"hold,omitempty"`
	Until        string    `json:"until,omitempty"`
	Subject      string    `json:"subject,omitempty"` // pseudonym
}

// Previous is the shard before, as it was left.
type Previous struct {
	Shard string `json:"shard"`
	First uint64 `json:"first"`
	Size  uint64 `json:"size"`
	Root  []byte `json:"root"`
}

// Missing says which events an unclean stop may have taken: those that were
// queued and not yet durable. Crossings are never among them.
type Missing struct {
	After string   `json:"after"` // time of the last event that is there
	Most  int      `json:"most"`
	Types []string `json:"types"`
}

// Private is a detail that can be erased: it is readable as long as the key
// of its subject exists.
type Private struct {
	Subject string // "team:acme", "customer:42"; never written in clear
	Detail  any    // becomes JSON
}

// wire is an event's JSON behind its version and number, in this order.
type wire struct {
	ID        string           `json:"id"`
	Time      string           `json:"time"`
	Epoch     uint64           `json:"epoch"`
	Type      string           `json:"type"`
	Source    Source           `json:"source"`
	Team      string           `json:"team,omitempty"`
	Sandbox   string           `json:"sandbox,omitempty"`
	Execution string           `json:"execution,omitempty"`
	App       string           `json:"app,omitempty"`
	Actor     Actor            `json:"actor"`
	Request   string           `json:"request,omitempty"`
	Facts     json.RawMessage  `json:"facts,omitempty"`
	Call      *Call            `json:"call,omitempty"`
	Decision  *Decision        `json:"decision,omitempty"`
	Outcome   *Outcome         `json:"outcome,omitempty"`
	Of        *uint64          `json:"of,omitempty"`
	Log       *LogPart         `json:"log,omitempty"`
	Sealed    []airlock.Sealed `json:"sealed,omitempty"`
	Clipped   bool             `json:"clipped,omitempty"` // something was longer than its bound
}

const timeForm = "2006-01-02T15:04:05.000000000Z"

// body returns the bytes of e from its id on.
func (e *Event) body(id string, epoch uint64, now time.Time, sealed []airlock.Sealed) ([]byte, error) {
	for shorter := 1; ; shorter *= 4 {
		c := clipper{id: maxID, text: maxText / shorter, entries: max(1, maxEntries/shorter)}
		w := c.wire(e)
		w.ID, w.Epoch, w.Time, w.Sealed = id, epoch, now.UTC().Format(timeForm), sealed
		if shorter > 1 && len(sealed) > 0 && sealedBytes(sealed) > MaxEvent/4 {
			w.Sealed, c.clipped = nil, true
		}
		w.Clipped = c.clipped
		var b bytes.Buffer
		enc := json.NewEncoder(&b)
		enc.SetEscapeHTML(false)
		if err := enc.Encode(w); err != nil {
			return nil, fmt.Errorf("encode an event %.40q: %w", e.Type, err)
		}
		body := printable(bytes.TrimSuffix(b.Bytes(), []byte("\n")))
		if len(body) <= MaxEvent-len(`{"v":1,"seq":`)-20 {
			return body, nil
		}
		if shorter > maxText {
			return nil, airlock.Errorf(airlock.Internal, "an event %.40q cannot be made shorter than %d bytes", e.Type, MaxEvent)
		}
	}
}

func sealedBytes(sealed []airlock.Sealed) (n int) {
	for _, s := range sealed {
		n += len(s.Data)
	}
	return n
}

// appendEvent puts version and number before an event's body.
func appendEvent(buf []byte, seq uint64, body []byte) []byte {
	buf = append(buf, `{"v":1,"seq":`...)
	buf = strconv.AppendUint(buf, seq, 10)
	buf = append(buf, ',')
	return append(buf, body[1:]...)
}

// printable writes what no line, terminal or reader should meet raw as JSON
// escapes. Outside of strings JSON has none of it.
func printable(b []byte) []byte {
	clean := true
	for _, r := range string(b) {
		if r != ' ' && !unicode.IsPrint(r) {
			clean = false
			break
		}
	}
	if clean {
		return b
	}
	out := make([]byte, 0, len(b)+64)
	for _, r := range string(b) {
		switch {
		case r == ' ' || unicode.IsPrint(r):
			out = utf8.AppendRune(out, r)
		case r > 0xFFFF:
			r -= 0x10000
			out = fmt.Appendf(out, `\u%04x\u%04x`, 0xD800+r>>10, 0xDC00+r&0x3FF)
		default:
			out = fmt.Appendf(out, `\u%04x`, r)
		}
	}
	return out
}

// clipper cuts what is too long and remembers that it did.
type clipper struct {
	id, text, entries int
	clipped           bool
}

func (c *clipper) wire(e *Event) wire {
	w := wire{
		Type: c.name(e.Type), Source: e.Source, Team: c.name(e.Team), Sandbox: c.name(e.Sandbox), Execution: c.name(e.Execution), App: c.name(e.App),
		Actor: Actor{Kind: c.name(e.Actor.Kind), ID: c.name(e.Actor.ID), Role: airlock.Role(c.name(string(e.Actor.Role)))}, Of: e.Of, Log: e.Log,
	}
	if w.Source == "" {
		w.Source = Host
	}
	w.Request = c.cut(e.Request, c.text*8)
	if e.Call.Action != "" {
		w.Call = &Call{Principal: c.entity(e.Call.Principal), Action: c.name(e.Call.Action), Resource: c.entity(e.Call.Resource), Context: c.context(e.Call.Context)}
		if w.Facts = e.Facts; len(w.Facts) > c.text*8 {
			w.Facts, c.clipped = nil, true
		}
	}
	if e.Decision.Effect != "" {
		d := e.Decision
		d.Effect, d.Reason, d.Set = c.name(d.Effect), c.string(d.Reason), c.name(d.Set)
		d.Policies, d.Errors = c.strings(d.Policies), c.strings(d.Errors)
		d.Obligations = c.obligations(d.Obligations)
		w.Decision = &d
	}
	if e.Outcome.Status != "" {
		o := e.Outcome
		o.Status, o.Code, o.Message = c.name(o.Status), c.name(o.Code), c.string(o.Message)
		o.Counts = mapped(c, o.Counts, func(n int64) int64 { return n })
		w.Outcome = &o
	}
	return w
}

func (c *clipper) entity(e Entity) Entity {
	return Entity{Type: c.name(e.Type), ID: c.cut(e.ID, max(c.id, c.text))}
}

func (c *clipper) name(s string) string   { return c.cut(s, c.id) }
func (c *clipper) string(s string) string { return c.cut(s, c.text) }

// cut keeps the start of a string, whole characters, and says how long it was.
func (c *clipper) cut(s string, most int) string {
	if len(s) > most {
		c.clipped = true
		length := len(s)
		for s = s[:most]; len(s) > most-utf8.UTFMax && !utf8.ValidString(s[max(0, len(s)-utf8.UTFMax):]); {
			s = s[:len(s)-1]
		}
		s += fmt.Sprintf("… (%d bytes)", length)
	}
	return strings.ToValidUTF8(s, "\uFFFD")
}

func (c *clipper) strings(all []string) []string {
	var out []string
	for i, s := range all {
		if i == c.entries {
			c.clipped = true
			break
		}
		out = append(out, c.string(s))
	}
	return out
}

func (c *clipper) obligations(all []Obligation) []Obligation {
	var out []Obligation
	for i, o := range all {
		if i == c.entries {
			c.clipped = true
			break
		}
		out = append(out, Obligation{Kind: c.name(o.Kind), Value: c.string(o.Value), Limit: o.Limit})
	}
	return out
}

func (c *clipper) context(all map[string]any) map[string]any {
	return mapped(c, all, func(v any) any {
		switch v := v.(type) {
		case string:
			return c.string(v)
		case []string:
			return c.strings(v)
		case bool, int, int64, uint16:
			return v
		}
		c.clipped = true
		return fmt.Sprintf("(%T)", v)
	})
}

// mapped returns a map with at most the clipper's number of entries.
func mapped[V any](c *clipper, all map[string]V, value func(V) V) map[string]V {
	if len(all) == 0 {
		return nil
	}
	keys := slices.Sorted(maps.Keys(all))
	if len(keys) > c.entries {
		keys, c.clipped = keys[:c.entries], true
	}
	out := make(map[string]V, len(keys))
	for _, k := range keys {
		out[c.name(k)] = value(all[k])
	}
	return out
}
