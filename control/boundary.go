package control

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"

	"airlock.dev/airlock"
	"airlock.dev/airlock/audit"
	"airlock.dev/airlock/channel"
	"airlock.dev/airlock/policy"
)

// Trail records what happens; audit.Log is the one that lasts.
type Trail interface {
	// Append returns when the event is durable, Queue before that.
	Append(ctx context.Context, e audit.Event) (audit.Receipt, error)
	Queue(ctx context.Context, e audit.Event) (seq uint64, err error)
	// Owe records an end, which cannot be refused.
	Owe(ctx context.Context, e audit.Event)
}

// Unrecorded is the Trail of a single run on somebody's own terminal. Nothing
// crosses its boundary, and what would is refused.
type Unrecorded struct{}

// Append refuses.
func (Unrecorded) Append(context.Context, audit.Event) (audit.Receipt, error) {
	return audit.Receipt{}, airlock.Errorf(airlock.Denied, "nothing leaves a sandbox that has no audit log: use a server (airlock serve)")
}

// Queue takes everything and keeps nothing.
func (Unrecorded) Queue(context.Context, audit.Event) (uint64, error) { return 0, nil }

// Owe does nothing.
func (Unrecorded) Owe(context.Context, audit.Event) {}

// Boundary is what every act passes: it is decided, recorded, and then done.
type Boundary struct {
	Policies func() *policy.Policies // those in force at this moment
	Trail    Trail
}

// act is one attempt of somebody to do something to a sandbox.
type act struct {
	sandbox airlock.Sandbox
	request *policy.Set // what its client asked for
	asks    *policy.Set // what it asks for from now on, if that is the act
	caller  policy.Caller
	by      policy.Entity // principal
	action  string
	on      policy.Entity
	context policy.Context
	// private are parts that may be personal: the log has them sealed. Those
	// called "resource" and "context" belong to the call.
	private map[string]any
	err     error // why it is none

	// Of crossings: what kind of address it leads to, why the gateway itself
	// denied it, and the obligations that whoever performs it meets.
	class, refused string
	meets          []policy.Kind
}

// asked is an act as policies see it.
func (a act) asked() (policy.Facts, policy.Call) {
	facts := policy.Facts{
		Team: a.sandbox.Team, Caller: a.caller,
		Sandbox: policy.Sandbox{ID: a.sandbox.ID, Template: a.sandbox.TemplateID, Metadata: a.sandbox.Metadata},
	}
	call := policy.Call{Principal: a.by, Action: a.action, Resource: a.on, Context: policy.Context{"time": time.Now().UTC().Format(time.RFC3339Nano)}}
	maps.Copy(call.Context, a.context)
	return facts, call
}

// decide decides an act that is not tried yet, and records nothing.
func (b *Boundary) decide(a act) policy.Decision {
	facts, call := a.asked()
	return b.decision(a, facts, call)
}

// event decides an act. The error says that it is denied.
func (b *Boundary) event(a act) (e audit.Event, err error) {
	facts, call := a.asked()
	d := b.decision(a, facts, call)
	e = audit.Event{
		Type: strings.Replace(a.action, ":", ".", 1), Team: a.sandbox.Team, Sandbox: a.sandbox.ID, Actor: actor(a),
		Call:     audit.Call{Principal: audit.Entity(a.by), Action: a.action, Resource: audit.Entity(a.on), Context: call.Context},
		Decision: decision(d),
	}
	if a.private != nil {
		if _, hidden := a.private["resource"]; hidden {
			e.Call.Resource.ID = ""
		}
		if hidden, ok := a.private["context"].(policy.Context); ok {
			e.Call.Context = maps.Clone(call.Context)
			for name := range hidden {
				delete(e.Call.Context, name)
			}
		}
	}
	known, err := json.Marshal(facts)
	if err != nil {
		return e, airlock.Errorf(airlock.Internal, "encode what is known of %s", a.action).Because(err)
	}
	e.Facts = known
	if a.asks != nil {
		e.Request = a.asks.Text()
	}
	defer func() {
		if a.private == nil {
			return
		}
		// What says why may name what is private.
		detail := maps.Clone(a.private)
		if err != nil {
			detail["reason"] = e.Outcome.Message
			e.Outcome.Message = public(d)
		}
		e.Decision.Reason = public(d)
		if len(d.Errors) > 0 {
			detail["errors"] = d.Errors
			e.Decision.Errors = []string{fmt.Sprintf("%d policies could not be evaluated", len(d.Errors))}
		}
		e.Private = []audit.Private{{Subject: "team:" + a.sandbox.Team, Detail: detail}}
	}()
	if a.permitted(d) {
		return e, nil
	}
	e.Outcome.Message = d.Reason
	e.Outcome.Status = "denied"
	return e, airlock.Errorf(airlock.Denied, "%s", e.Outcome.Message)
}

// permitted says whether an act may be done, by whoever meets a.meets.
func (a act) permitted(d policy.Decision) bool {
	return d.Effect != policy.Deny && !slices.ContainsFunc(d.Obligations, func(o policy.Obligation) bool { return !slices.Contains(a.meets, o.Kind) })
}

// decision is what policies say of an act, and what no policy can change.
func (b *Boundary) decision(a act, facts policy.Facts, call policy.Call) policy.Decision {
	effective := b.effective(a)
	if a.refused != "" {
		return policy.Decision{Effect: policy.Deny, Reason: a.refused, Set: effective.Digest()}
	}
	d := effective.Decide(facts, call)
	if d.Effect != policy.Deny && a.class != "" && a.class != publicClass && !effective.NamesAddress(facts, call) {
		d.Effect, d.Obligations = policy.Deny, nil
		d.Reason = fmt.Sprintf("%v is a %s address, and what permits it does not name it: ask your operator for a policy with context.ip.isInRange(ip(...)) for it", call.Context["ip"], a.class)
	}
	return d
}

// effective are the policies that an act is decided by.
func (b *Boundary) effective(a act) policy.Effective {
	return policy.Effective{Ceiling: b.Policies().For(a.sandbox.Team), Request: a.request}
}

// publicClass is what addresses are that no policy needs to name.
const publicClass = "public"

// public is why a decision was so, without what it was about.
func public(d policy.Decision) string {
	switch {
	case len(d.Errors) > 0:
		return "denied: policies could not be evaluated"
	case len(d.Policies) == 0:
		return string(d.Effect) + ": no policy permits it"
	}
	return string(d.Effect) + " by " + strings.Join(d.Policies, ", ")
}

func decision(d policy.Decision) audit.Decision {
	out := audit.Decision{Effect: string(d.Effect), Policies: d.Policies, Reason: d.Reason, Errors: d.Errors, Set: d.Set}
	for _, o := range d.Obligations {
		out.Obligations = append(out.Obligations, audit.Obligation{Kind: string(o.Kind), Value: o.Value, Limit: o.Limit})
	}
	return out
}

func actor(a act) audit.Actor {
	switch {
	case a.caller.ID != "":
		kind := a.caller.Kind
		if kind == "" {
			kind = "user"
		}
		return audit.Actor{Kind: kind, ID: a.caller.ID, Role: airlock.Role(a.caller.Role)}
	case a.by.Type == "Sandbox":
		if caller, ok := a.context["caller"].(string); ok {
			return audit.Actor{Kind: "visitor", ID: caller}
		}
		return audit.Actor{Kind: "sandbox", ID: a.sandbox.ID}
	}
	return audit.Actor{Kind: "token", ID: a.sandbox.ID}
}

// ended tells the trail how an act went.
type ended func(audit.Outcome)

// inside decides and records an act in a sandbox's own life.
func (b *Boundary) inside(ctx context.Context, a act) (ended, error) {
	if a.err != nil {
		return nil, a.err
	}
	e, denied := b.event(a)
	seq, err := b.Trail.Queue(ctx, e)
	if denied != nil {
		return nil, denied
	}
	if err != nil {
		return nil, err
	}
	return b.outcome(ctx, a, seq), nil
}

// insideAll decides several acts that happen together before it records them:
// if one is denied, that one alone is recorded. If the log takes only some of
// them, those end with its error.
func (b *Boundary) insideAll(ctx context.Context, acts []act) (ended, error) {
	events := make([]audit.Event, len(acts))
	for i, a := range acts {
		if a.err != nil {
			return nil, a.err
		}
		var denied error
		if events[i], denied = b.event(a); denied != nil {
			b.Trail.Queue(ctx, events[i])
			return nil, denied
		}
	}
	var all []ended
	done := func(o audit.Outcome) {
		for _, d := range all {
			d(o)
		}
	}
	for i, a := range acts {
		seq, err := b.Trail.Queue(ctx, events[i])
		if err != nil {
			done(outcomeOf(err))
			return nil, err
		}
		all = append(all, b.outcome(ctx, a, seq))
	}
	return done, nil
}

// ask decides an act that only looks. It is recorded if it is denied.
func (b *Boundary) ask(ctx context.Context, a act) error {
	e, denied := b.event(a)
	if denied != nil {
		b.Trail.Queue(ctx, e) // it is denied, whether that can be recorded or not
	}
	return denied
}

// cross decides and records an act that leads out of or into a sandbox. The
// receipt is what performs it.
func (b *Boundary) cross(ctx context.Context, a act) (audit.Receipt, ended, error) {
	e, denied := b.event(a)
	receipt, err := b.Trail.Append(ctx, e)
	if denied != nil {
		return audit.Receipt{}, nil, denied
	}
	if err != nil {
		return audit.Receipt{}, nil, err
	}
	return receipt, b.outcome(ctx, a, receipt.Seq()), nil
}

func (b *Boundary) outcome(ctx context.Context, a act, of uint64) ended {
	family, _, _ := strings.Cut(a.action, ":")
	typ := family + ".end"
	switch a.action { // a sandbox's end is another
	case "sandbox:create":
		typ = "sandbox.start"
	case "sandbox:network":
		typ = "sandbox.changed"
	}
	began := time.Now()
	return func(o audit.Outcome) {
		if o.Counts == nil {
			o.Counts = map[string]int64{}
		}
		o.Counts["durationMicros"] = time.Since(began).Microseconds()
		b.Trail.Owe(context.WithoutCancel(ctx), audit.Event{Type: typ, Team: a.sandbox.Team, Sandbox: a.sandbox.ID, Actor: actor(a), Of: &of, Outcome: o})
	}
}

// outcomeOf is an error's, or a success.
func outcomeOf(err error) audit.Outcome {
	if err == nil {
		return audit.Outcome{Status: "ok"}
	}
	o := audit.Outcome{Status: "error", Code: string(airlock.CodeOf(err))}
	return o
}

// by is a principal of the control plane as policy sees it.
func by(p airlock.Principal) (policy.Caller, policy.Entity) {
	caller := policy.Caller{ID: p.KeyID, Team: p.Team, Role: string(p.Role), Kind: "user"}
	return caller, caller.Entity()
}

// on is an act of the control plane on a sandbox.
func on(p airlock.Principal, l *live, action string) act {
	a := act{sandbox: l.get(), request: l.request.Load(), action: action}
	a.caller, a.by = by(p)
	a.on = policy.Entity{Type: "Sandbox", ID: a.sandbox.ID}
	return a
}

// act is one of the data plane: of who holds the sandbox's access token.
func (g *Guest) act(action string) act {
	return act{
		sandbox: g.Sandbox, request: g.request(), action: action,
		by: policy.Entity{Type: "Team", ID: g.Sandbox.Team}, on: policy.Entity{Type: "Sandbox", ID: g.Sandbox.ID},
	}
}

// on is an act on a path, as the caller names it. What is there, behind links
// and by the time it happens, is the sandbox's own business.
func (a act) path(user, name string) act {
	if name == "" {
		a.err = airlock.Invalidf("path", "give a path", "the path is empty")
	}
	name = absolute(user, name)
	if len(name) > pathMost {
		a.err = airlock.Invalidf("path", fmt.Sprintf("names have at most 255 bytes and paths %d", pathMost), "path '%s…' is too long", strings.ToValidUTF8(name[:64], "\uFFFD"))
	}
	a.on = policy.Entity{Type: "Path", ID: name}
	a.private = map[string]any{"resource": name}
	return a
}

// pathMost is Linux's own bound of a path.
const pathMost = 4095

func absolute(user, name string) string {
	home := "/home/user"
	switch {
	case user == "root":
		home = "/root"
	case user != "":
		home = "/home/" + user
	}
	if rest, found := strings.CutPrefix(name, "~"); found && (rest == "" || rest[0] == '/') {
		name = home + rest
	}
	if !strings.HasPrefix(name, "/") {
		name = home + "/" + name
	}
	return path.Clean(name)
}

// file decides and records a file call that moves no contents.
// The path that was decided takes the place of the caller's: what is home to
// the sandbox is its own word.
func (g *Guest) file(ctx context.Context, action string, req *channel.PathRequest, do func() error) error {
	a := g.act(action).path(req.User, req.Path)
	done, err := g.boundary.inside(ctx, a)
	if err != nil {
		return err
	}
	req.Path = a.on.ID
	if err := do(); err != nil {
		done(outcomeOf(err))
		return err
	}
	return nil
}

func portEntity(port uint16) policy.Entity {
	return policy.Entity{Type: "Port", ID: strconv.Itoa(int(port))}
}
