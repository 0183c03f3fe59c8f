package control

import (
	"context"
	"crypto/rand"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"airlock.dev/airlock"
	"airlock.dev/airlock/audit"
	"airlock.dev/airlock/policy"
)

// Approval is a crossing that waits for a person.
type Approval struct {
	ID        string         `json:"id"`
	Event     uint64         `json:"event"` // that recorded the attempt
	Team      string         `json:"team"`
	Sandbox   string         `json:"sandbox"`
	Action    string         `json:"action"`   // "http:request"
	Resource  string         `json:"resource"` // the host
	Context   map[string]any `json:"context"`  // method, path, port, ...
	Policies  []string       `json:"policies"` // that want it held
	Approvers []string       `json:"approvers"`
	Asked     time.Time      `json:"asked"`
	Until     time.Time      `json:"until"` // then it is denied
}

// Bounds of what waits: held crossings keep connections open, and a list that
// nobody can read through is approved unread. A client can make as much wait as it
// likes, by a hold of its own: a team has at most as many waiting as there is room
// left for others, so that no number of its sandboxes keeps them out.
const (
	heldPerSandbox = 16
	heldMost       = 512
	// DefaultHold is how long a crossing waits if Config does not say.
	DefaultHold = 2 * time.Minute
)

// approvals are the crossings that wait. They are in memory: a server that
// ends has denied them, since their connections are gone.
type approvals struct {
	hold time.Duration

	mu  sync.Mutex
	all map[string]*held
}

// held is one that waits.
type held struct {
	Approval
	creator airlock.Creator
	decided chan verdict // capacity 1
}

type verdict struct {
	permit bool
	by     string
}

// wait returns who approved, or an error with the code Denied.
func (s *approvals) wait(ctx context.Context, a Approval, creator airlock.Creator) (by string, err error) {
	h := &held{Approval: a, creator: creator, decided: make(chan verdict, 1)}
	h.ID = strings.ToLower(rand.Text()[:16])
	h.Asked = time.Now().UTC()
	h.Until = h.Asked.Add(s.hold)
	s.mu.Lock()
	mine, ours := 0, 0
	for _, other := range s.all {
		if other.Sandbox == a.Sandbox {
			mine++
		}
		if other.Team == a.Team {
			ours++
		}
	}
	full := mine >= heldPerSandbox || ours >= heldMost-len(s.all)
	if !full {
		s.all[h.ID] = h
	}
	s.mu.Unlock()
	if full {
		return "", &airlock.Error{Code: airlock.Exhausted, Message: "too many requests wait for approval", Hint: "wait for some to be decided", RetryAfter: 10}
	}
	defer func() {
		s.mu.Lock()
		delete(s.all, h.ID)
		s.mu.Unlock()
	}()
	timer := time.NewTimer(s.hold)
	defer timer.Stop()
	select {
	case v := <-h.decided:
		if !v.permit {
			return "", airlock.Errorf(airlock.Denied, "%s denied it", v.by)
		}
		return v.by, nil
	case <-timer.C:
		return "", airlock.Errorf(airlock.Denied, "nobody of %s approved it within %s: ask one of them to watch `airlock approvals`, and try again", strings.Join(h.Approvers, ", "), s.hold)
	case <-ctx.Done():
		return "", airlock.Errorf(airlock.Canceled, "the client did not wait for the approval").Because(ctx.Err())
	}
}

// mayApprove says whether a key may decide h, and why not.
func (h *held) mayApprove(p airlock.Principal) error {
	switch {
	case p.Role != airlock.Approver:
		return &airlock.Error{Code: airlock.Denied, Message: fmt.Sprintf("only keys with the role approver decide, and this one is of the role %s", p.Role),
			Hint: "make one with `airlock key create --role approver --team TEAM`, and give it with --key or AIRLOCK_API_KEY"}
	case !slices.Contains(h.Approvers, p.Team) && (p.Name == "" || !slices.Contains(h.Approvers, p.Name)):
		return airlock.Errorf(airlock.Denied, "this waits for %s, and the key is of team %q with the name %q", strings.Join(h.Approvers, ", "), p.Team, p.Name)
	case p.KeyID == h.creator.KeyID:
		return airlock.Errorf(airlock.Denied, "who made the sandbox does not approve what it does")
	case p.Owner != "" && p.Owner == h.creator.Owner:
		return airlock.Errorf(airlock.Denied, "%s made the sandbox with another key, and does not approve what it does", p.Owner)
	}
	return nil
}

// Approvals returns what waits for p, the oldest first; an operator sees all.
func (c *Sandboxes) Approvals(p airlock.Principal) []Approval {
	c.approvals.mu.Lock()
	defer c.approvals.mu.Unlock()
	var all []Approval
	for _, h := range c.approvals.all {
		if p.Role == airlock.Operator || h.mayApprove(p) == nil {
			all = append(all, h.Approval)
		}
	}
	slices.SortFunc(all, func(a, b Approval) int {
		if n := a.Asked.Compare(b.Asked); n != 0 {
			return n
		}
		return strings.Compare(a.ID, b.ID)
	})
	return all
}

// Decide approves or denies what waits, once. It is recorded before it holds.
func (c *Sandboxes) Decide(ctx context.Context, p airlock.Principal, id string, permit bool, reason string) error {
	c.approvals.mu.Lock()
	h := c.approvals.all[id]
	c.approvals.mu.Unlock()
	if h == nil {
		return airlock.Errorf(airlock.NotFound, "nothing with the id %.40q waits for approval: it was decided, its time was over, or the client gave up", id)
	}
	denied := h.mayApprove(p)
	e := audit.Event{Type: "approval.deny"}
	if permit {
		e = audit.Event{Type: "approval.grant"}
	}
	e.Team, e.Sandbox, e.Of = h.Team, h.Sandbox, &h.Event
	e.Actor, e.Outcome = audit.Actor{Kind: "user", ID: p.KeyID, Role: p.Role}, audit.Outcome{Status: "ok", Message: reason}
	if denied != nil {
		e.Outcome = audit.Outcome{Status: "denied", Code: string(airlock.CodeOf(denied)), Message: publicOf(denied)}
	}
	if _, err := c.cfg.Boundary.Trail.Append(ctx, e); err != nil {
		return err
	}
	if denied != nil {
		return denied
	}
	// The first one to take it away decides.
	c.approvals.mu.Lock()
	still := c.approvals.all[id] == h
	delete(c.approvals.all, id)
	c.approvals.mu.Unlock()
	if !still {
		return airlock.Errorf(airlock.Conflict, "it was decided or its time was over a moment ago")
	}
	by := "key " + p.KeyID
	if p.Owner != "" {
		by = p.Owner + " (" + by + ")"
	}
	h.decided <- verdict{permit: permit, by: by}
	return nil
}

// waitsFor are those of whom one has to approve, in order.
func waitsFor(d audit.Decision) (approvers []string) {
	for _, o := range d.Obligations {
		if o.Kind == string(policy.KindHold) {
			approvers = append(approvers, o.Value)
		}
	}
	return approvers
}

// approve lets a crossing wait that policies hold, and records what came of it.
func (c *Sandboxes) approve(ctx context.Context, a act, e audit.Event, event uint64) (audit.Receipt, ended, audit.Decision, error) {
	approvers := waitsFor(e.Decision)
	_, call := a.asked()
	wait := Approval{
		Event: event, Team: a.sandbox.Team, Sandbox: a.sandbox.ID, Action: a.action, Resource: a.on.ID,
		Context: maps.Clone(call.Context), Policies: e.Decision.Policies, Approvers: approvers,
	}
	delete(wait.Context, "time")
	by, err := c.approvals.wait(ctx, wait, a.sandbox.Creator)
	if err != nil {
		o := outcomeOf(err)
		if airlock.CodeOf(err) == airlock.Denied {
			o = audit.Outcome{Status: "denied", Code: string(airlock.Denied), Message: publicOf(err)}
		}
		c.cfg.Boundary.outcome(ctx, a, event)(o)
		return audit.Receipt{}, nil, e.Decision, err
	}
	// Policies may have changed meanwhile; an approval does not go beyond them.
	again, denied := c.cfg.Boundary.event(a)
	if denied == nil && !slices.Equal(waitsFor(again.Decision), approvers) && again.Decision.Effect == string(policy.Hold) {
		again.Decision.Reason = "others have to approve it now: try again"
		denied = airlock.Errorf(airlock.Denied, "%s", again.Decision.Reason)
		again.Decision.Effect, again.Outcome = string(policy.Deny), audit.Outcome{Status: "denied", Message: again.Decision.Reason}
	}
	if denied == nil && again.Decision.Effect == string(policy.Hold) {
		again.Decision.Effect = audit.Permit
		again.Decision.Reason = fmt.Sprintf("approved by %s", by)
	}
	again.Of = &event
	receipt, err := c.cfg.Boundary.Trail.Append(ctx, again)
	if denied != nil {
		err = denied
	}
	if err != nil {
		c.cfg.Boundary.outcome(ctx, a, event)(outcomeOf(err))
		return audit.Receipt{}, nil, again.Decision, err
	}
	return receipt, c.cfg.Boundary.outcome(ctx, a, receipt.Seq()), again.Decision, nil
}
