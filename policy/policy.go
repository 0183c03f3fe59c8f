// Package policy decides: may this principal do this to that, here and now?
// Decide is a pure function of plain values and of policies in Cedar, a
// language that a security person can read. What no policy permits is denied,
// a forbid wins over every permit, and what cannot be evaluated is denied.
//
// It must not know of HTTP, of the audit trail, of the network or of the time,
// and of files only in Load: texts and facts come in, decisions go out. Only
// this package imports Cedar. Start reading at Decide; schema.cedarschema is
// the list of everything a policy may speak of, and docs/POLICY.md says it in
// words.
package policy

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/cedar-policy/cedar-go"
)

// Entity names who acts or what is acted on: a type of the schema and an id,
// such as {"Sandbox", "i123"}.
type Entity struct {
	Type string `json:"type"`
	ID   string `json:"id"`
}

// String returns the entity as Cedar writes it.
func (e Entity) String() string { return e.Type + "::" + shown(e.ID) }

// Call is one act that somebody tries.
type Call struct {
	Principal Entity  `json:"principal"`
	Action    string  `json:"action"` // "net:connect"
	Resource  Entity  `json:"resource"`
	Context   Context `json:"context,omitempty"` // as the schema has it for the action
}

// Context is the circumstances of a call. The values are string, int64, bool
// and []string; addresses and times (RFC 3339) are strings. Numbers of other
// kinds count as int64 where they are whole.
type Context map[string]any

// UnmarshalJSON reads the values that a Context may have and refuses others.
// Numbers keep all their digits.
func (c *Context) UnmarshalJSON(b []byte) error {
	d := json.NewDecoder(bytes.NewReader(b))
	d.UseNumber()
	var m map[string]any
	if err := d.Decode(&m); err != nil {
		return err
	}
	for key, value := range m {
		switch v := value.(type) {
		case string, bool:
		case json.Number:
			n, err := strconv.ParseInt(v.String(), 10, 64)
			if err != nil {
				return fmt.Errorf("context %s: %.40s is no whole number of 64 bits", shown(key), v)
			}
			m[key] = n
		case []any:
			list := make([]string, len(v))
			for i, e := range v {
				s, ok := e.(string)
				if !ok {
					return fmt.Errorf("context %s: a list has strings only", shown(key))
				}
				list[i] = s
			}
			m[key] = list
		default:
			return fmt.Errorf("context %s: give a string, a whole number, true or false, or a list of strings", shown(key))
		}
	}
	*c = m
	return nil
}

// Effect is what a decision says.
type Effect string

// The effects. Hold is a permit that waits for a human.
const (
	Permit Effect = "permit"
	Deny   Effect = "deny"
	Hold   Effect = "hold"
)

// Obligation is what must be done with a permitted act. Those of all policies
// that permit apply together.
type Obligation struct {
	Kind  Kind   `json:"kind"`
	Value string `json:"value,omitempty"` // the column, the secret or the approvers; empty with KindLimit and KindPass
	Limit int64  `json:"limit,omitempty"` // rows, at least 1; only of KindLimit, the smallest of all
}

// Kind is the kind of an obligation, and the name of its annotation.
type Kind string

// The kinds of obligations.
const (
	KindMask   Kind = "mask"   // hide the values of a column: "table.column"
	KindInject Kind = "inject" // put in a secret: its name
	KindLimit  Kind = "limit"  // let at most so many rows through
	KindHold   Kind = "hold"   // wait for one of these approvers
	// KindPass leaves TLS undecrypted: what is in it nobody decides or records.
	KindPass Kind = "passthrough"
)

// Decision is the answer to a call. It is recorded as it is.
type Decision struct {
	Effect      Effect       `json:"effect"`
	Policies    []string     `json:"policies,omitempty"` // ids of those that decided: "ceiling/ID", "request/ID"; at most 32
	Reason      string       `json:"reason"`             // one sentence; for a denial with what to do
	Obligations []Obligation `json:"obligations,omitempty"`
	Errors      []string     `json:"errors,omitempty"` // what could not be evaluated; at most 8
	Set         string       `json:"set"`              // digests: of the ceiling, and after a + of the request's
}

const (
	maxPolicyIDs = 32
	maxErrors    = 8
)

// Effective is what holds for a call: the operator's ceiling for the team and
// what the client asked for. Both must permit, so asking can only narrow.
type Effective struct {
	Ceiling *Set // nil denies everything
	Request *Set // nil where the act belongs to nothing that was asked for; then the ceiling decides
}

// Digest names both sets: of the ceiling, and after a + of the request's.
func (e Effective) Digest() string {
	switch {
	case e.Ceiling == nil:
		return ""
	case e.Request == nil:
		return e.Ceiling.digest
	}
	return e.Ceiling.digest + "+" + e.Request.digest
}

// Decide answers a call. It never fails and never panics: what is odd, such as
// an act that the schema does not know or facts that do not describe who acts,
// is denied and the reason says why.
func (e Effective) Decide(f Facts, c Call) (d Decision) {
	defer func() {
		// Cedar's code is young. A mistake in it must deny one call, not end
		// the server.
		if r := recover(); r != nil {
			d = Decision{Effect: Deny, Set: e.Digest(), Errors: []string{clipped(fmt.Sprint(r))},
				Reason: "the call could not be evaluated: report this as an error of Airlock"}
		}
	}()
	d = Decision{Effect: Deny, Set: e.Digest()}
	if e.Ceiling == nil {
		d.Reason = "no policy is loaded for the team: run `airlock policy validate` on the operator's directory"
		return d
	}
	q, err := newQuery(f, c)
	if err != nil {
		d.Reason = clipped("the call is not one that policies can judge: " + err.Error())
		d.Errors = []string{clipped(err.Error())}
		return d
	}
	layers := []layer{{name: "ceiling", set: e.Ceiling}}
	if e.Request != nil {
		layers = append(layers, layer{name: "request", set: e.Request})
	}
	for i := range layers {
		layers[i].authorize(q)
	}
	d.conclude(layers, f, c)
	return d
}

// NamesAddress says whether what the operator permits depends on the address, as
// it must for an address that is not public: a permit for everything, or for a name
// that can resolve to anything, says nothing of this machine's network, however
// many addresses are forbidden beside it. What the client asks for is not looked
// at: to deny the probes itself would be to name every other address.
func (e Effective) NamesAddress(f Facts, c Call) (names bool) {
	defer func() {
		if recover() != nil { // as in Decide
			names = false
		}
	}()
	if e.Ceiling == nil {
		return false
	}
	var permits slice
	for _, p := range e.Ceiling.byAction[cedar.String(c.Action)] {
		if p.permits {
			permits = append(permits, p)
		}
	}
	for _, probe := range probes {
		if c.Context["ip"] == probe {
			continue
		}
		other := c
		other.Context = maps.Clone(c.Context)
		other.Context["ip"] = probe
		q, err := newQuery(f, other)
		if err != nil {
			return false
		}
		if effect, _ := cedar.Authorize(permits, q, q.req); effect == cedar.Allow {
			return false
		}
	}
	return true
}

// probes are addresses that no policy permits in earnest: of this machine, of
// a cloud's metadata, and one that does not exist.
var probes = []string{"127.86.12.9", "169.254.169.254", "240.86.12.9"}

// layer is one of the two sets with what it says of a call.
type layer struct {
	name    string
	set     *Set
	effect  cedar.Decision
	reasons []*policy // the forbids that apply, else the permits that do
	errors  []cedar.DiagnosticError
}

func (l *layer) authorize(q *query) {
	var diag cedar.Diagnostic
	l.effect, diag = cedar.Authorize(l.set.byAction[q.req.Action.ID], q, q.req)
	for _, r := range diag.Reasons {
		l.reasons = append(l.reasons, l.set.byID[string(r.PolicyID)])
	}
	l.errors = diag.Errors
}

// conclude makes the decision of what the layers say. Cedar skips a policy
// that it cannot evaluate, a forbid too: here an error denies.
func (d *Decision) conclude(layers []layer, f Facts, c Call) {
	var failed, forbids, permits []string
	var why string
	for _, l := range layers {
		for _, e := range l.errors {
			id := l.name + "/" + string(e.PolicyID)
			if len(failed) == 0 {
				why = fmt.Sprintf("policy %s could not be evaluated (%s): correct the policy or the facts; until then it denies", id, clipped(e.Message))
			}
			failed = append(failed, id)
			if len(d.Errors) < maxErrors {
				d.Errors = append(d.Errors, clipped(id+": "+e.Message))
			}
		}
	}
	for _, l := range layers {
		for _, p := range l.reasons {
			id := l.name + "/" + p.id
			if l.effect == cedar.Allow {
				permits = append(permits, id)
				continue
			}
			if len(forbids) == 0 && why == "" {
				why = fmt.Sprintf("policy %s forbids %s: %s", id, described(c), p.remedy(l.name))
			}
			forbids = append(forbids, id)
		}
	}
	d.Policies = append(failed, forbids...)
	if len(d.Policies) == 0 {
		for _, l := range layers {
			if l.effect != cedar.Allow && why == "" {
				why = fmt.Sprintf("nothing in the %s permits %s: %s", layerInWords[l.name], described(c), remedyFor(l.name, f))
			}
		}
	}
	if why == "" {
		if ids, kind := unmeetable(layers, c.Action); ids != nil {
			d.Policies = ids
			why = fmt.Sprintf("policy %s permits %s only with @%s, which %s cannot meet: remove it from the policy", ids[0], described(c), kind, c.Action)
		}
	}
	if why == "" {
		d.Policies = permits
		d.Effect, d.Obligations = Permit, obligations(layers)
		why = "permitted by " + permits[len(permits)-1]
		if len(permits) > 1 {
			why = "permitted by " + permits[0] + " and " + permits[len(permits)-1]
		}
		for _, o := range d.Obligations {
			if o.Kind == KindHold {
				d.Effect = Hold
				why = "waits for " + o.Value + " to approve: " + why
				break
			}
		}
	}
	d.Reason = why
	if len(d.Policies) > maxPolicyIDs {
		d.Policies = d.Policies[:maxPolicyIDs]
	}
}

var layerInWords = map[string]string{"ceiling": "operator's policy", "request": "policy that was asked for"}

func remedyFor(layer string, f Facts) string {
	if layer == "request" {
		return "ask for a wider profile or network when you make the sandbox"
	}
	if f.Team == "" {
		return "ask your operator for a policy that permits it"
	}
	return "ask your operator for a policy of team " + shown(f.Team) + " that permits it"
}

// describedContext is what of a context a description always has.
var describedContext = []string{"method", "path", "ip", "port", "caller", "host"}

// described says what a call tries, for a person.
func described(c Call) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s on %s by %s", c.Action, c.Resource, c.Principal)
	sep := " ("
	for _, key := range describedContext {
		if v, ok := c.Context[key]; ok {
			text := fmt.Sprint(v)
			if s, isString := v.(string); isString && key != "ip" && key != "method" {
				text = shown(s)
			}
			fmt.Fprintf(&b, "%s%s %s", sep, key, text)
			sep = ", "
		}
	}
	if sep == ", " {
		b.WriteByte(')')
	}
	return b.String()
}

// obligations collects those of all permits: every mask, every secret, every
// hold, and the smallest limit, in an order that does not depend on chance. Who
// approves what the operator's policies hold, they say alone: a client's own hold
// beside theirs would let people of its choice do it.
func obligations(layers []layer) []Obligation {
	var all []Obligation
	var limit int64
	for _, l := range layers {
		held := slices.ContainsFunc(all, func(o Obligation) bool { return o.Kind == KindHold })
		for _, p := range l.reasons {
			for _, o := range p.obligations {
				switch {
				case o.Kind == KindHold && held: // by the layer before
				case o.Kind != KindLimit:
					if !slices.Contains(all, o) {
						all = append(all, o)
					}
				case limit == 0 || o.Limit < limit:
					limit = o.Limit
				}
			}
		}
	}
	if limit > 0 {
		all = append(all, Obligation{Kind: KindLimit, Limit: limit})
	}
	slices.SortFunc(all, func(a, b Obligation) int {
		if c := strings.Compare(string(a.Kind), string(b.Kind)); c != 0 {
			return c
		}
		return strings.Compare(a.Value, b.Value)
	})
	return all
}

// shown quotes a text from outside for a sentence: short, on one line, and
// with nothing that does not print.
func shown(s string) string {
	const most = 120
	if len(s) > most {
		return strconv.Quote(s[:most]) + "…"
	}
	return strconv.Quote(s)
}

// clipped bounds a text of ours that may have parts from outside.
func clipped(s string) string {
	const most = 400
	s = strings.Map(func(r rune) rune {
		if !strconv.IsPrint(r) {
			return ' '
		}
		return r
	}, s)
	if len(s) > most {
		return strings.ToValidUTF8(s[:most], "") + "…"
	}
	return s
}
