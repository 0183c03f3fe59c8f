package control

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"

	"airlock.dev/airlock"
	"airlock.dev/airlock/audit"
	"airlock.dev/airlock/gateway/wire"
	"airlock.dev/airlock/isolation"
	"airlock.dev/airlock/policy"
)

// Gateway serves the doors of sandboxes; process.Gateway is the one. It asks
// Sandboxes for each crossing.
type Gateway interface {
	// Open has a door served, whose file is the Gateway's from now on.
	Open(ctx context.Context, d wire.Door, file *os.File) error
	Set(ctx context.Context, d wire.Door) error
	// Break breaks off what was permitted, at most wire.BreakMost at a time,
	// and passes over what is over. Sandboxes.End tells of each.
	Break(ctx context.Context, sandbox string, events []uint64) error
	Drop(sandbox string)
}

// Through makes all sandboxes have a network whose only end is g. It is called
// between Recover, which ends the gateway of the server before, and Create.
func (c *Sandboxes) Through(ctx context.Context, g Gateway) {
	c.gateway = g
	var wg sync.WaitGroup
	for _, l := range c.all() {
		wg.Go(func() {
			if err := c.openDoor(ctx, l.box, l.get()); err != nil {
				c.cfg.Log.Error("open a sandbox's door; it has no network", "sandbox", l.box.ID(), "err", err)
			}
		})
	}
	wg.Wait()
	c.pool.keep(c.cfg.Image, airlock.DefaultLimits)
}

func (c *Sandboxes) all() []*live {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Collect(maps.Values(c.live))
}

// Trust says whether all sandboxes that run trust what id names, besides
// whatever else.
func (c *Sandboxes) Trust(id string) bool {
	return !slices.ContainsFunc(c.all(), func(l *live) bool { return !strings.HasPrefix(l.get().TrustID, id) })
}

// link is the device of every sandbox: all have the same addresses, since none
// can meet another one.
var link = isolation.Link{
	MTU: 65000, MAC: []byte{2, 0, 0, 0, 0, 2},
	Addresses: []netip.Prefix{netip.MustParsePrefix("10.0.0.2/24"), netip.MustParsePrefix("fd61:6972::2/64")},
	Gateways:  []netip.Addr{netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("fd61:6972::1")},
}

// openDoor has the gateway serve a sandbox. Until then nothing that it sends is read.
func (c *Sandboxes) openDoor(ctx context.Context, box isolation.Sandbox, sb airlock.Sandbox) error {
	if c.gateway == nil {
		return nil
	}
	file, err := box.Door(ctx)
	if airlock.CodeOf(err) == airlock.NotFound {
		return nil // one of an earlier version, without a network
	}
	if err != nil {
		return err
	}
	d, err := c.door(ctx, sb)
	if err != nil {
		file.Close()
		return err
	}
	return c.gateway.Open(ctx, d, file)
}

// crossings are those of a sandbox that were permitted and have not ended.
type crossings struct {
	mu   sync.Mutex
	open map[uint64]*open
	over bool
}

// open is one of them: what was tried, and what its end has to be told.
type open struct {
	attempt wire.Attempt
	meets   []audit.Obligation // with what it was permitted
	ended   ended
	revoked string // why it is permitted no more
}

// had says whether it was permitted with an obligation of that kind.
func (o *open) had(kind policy.Kind) bool {
	return slices.ContainsFunc(o.meets, func(m audit.Obligation) bool { return m.Kind == string(kind) })
}

func (o *open) done(out audit.Outcome) {
	if o.revoked != "" {
		out.Status, out.Code, out.Message = "error", "revoked", o.revoked
	}
	o.ended(out)
}

func (c *crossings) began(event uint64, o *open) {
	c.mu.Lock()
	over := c.over
	if !over {
		if c.open == nil {
			c.open = map[uint64]*open{}
		}
		c.open[event] = o
	}
	c.mu.Unlock()
	if over {
		o.done(audit.Outcome{Status: "error", Code: string(airlock.Gone)})
	}
}

func (c *crossings) end(event uint64, o audit.Outcome) {
	c.mu.Lock()
	open := c.open[event]
	delete(c.open, event)
	c.mu.Unlock()
	if open != nil {
		open.done(o)
	}
}

// all are those that are open, by their events.
func (c *crossings) all() map[uint64]*open {
	c.mu.Lock()
	defer c.mu.Unlock()
	return maps.Clone(c.open)
}

// revoke says why a crossing is permitted no more; its end comes later.
func (c *crossings) revoke(event uint64, why string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if o := c.open[event]; o != nil {
		o.revoked = why
	}
}

// breakAll ends what is open, and what begins later if the sandbox is over.
func (c *crossings) breakAll(why airlock.Code, over bool) {
	c.mu.Lock()
	open := c.open
	c.open, c.over = nil, c.over || over
	c.mu.Unlock()
	for _, event := range slices.Sorted(maps.Keys(open)) {
		open[event].done(audit.Outcome{Status: "error", Code: string(why)})
	}
}

// End implements process.Decider.
func (c *Sandboxes) End(e wire.End) {
	l := c.find(e.Sandbox)
	if l == nil {
		return // its end has ended all
	}
	o := audit.Outcome{Status: "ok", Counts: map[string]int64{"bytesOut": max(0, e.BytesOut), "bytesIn": max(0, e.BytesIn)}}
	if e.Status != 0 {
		o.Counts["status"] = int64(e.Status)
	}
	if e.Error != "" {
		o.Status, o.Code = "error", "broken"
	}
	if e.Code == airlock.Exhausted || e.Code == airlock.TooLarge {
		o.Status, o.Code = "error", string(e.Code)
	}
	if e.Code == airlock.Denied {
		o.Status, o.Code = "denied", string(e.Code)
	}
	l.used(e.Used)
	l.crossings.end(e.Event, o)
}

// Broken implements process.Decider.
func (c *Sandboxes) Broken() {
	for _, l := range c.all() {
		l.crossings.breakAll(airlock.Unavailable, false)
	}
}

// cross is Boundary.cross for what a sandbox tries outside: its decision is
// returned with it, and it may wait for a person.
func (c *Sandboxes) cross(ctx context.Context, a act) (audit.Receipt, ended, audit.Decision, error) {
	if a.err != nil {
		return audit.Receipt{}, nil, audit.Decision{}, a.err
	}
	e, denied := c.cfg.Boundary.event(a)
	receipt, err := c.cfg.Boundary.Trail.Append(ctx, e)
	if denied != nil {
		err = denied
	}
	if err != nil {
		return audit.Receipt{}, nil, e.Decision, err
	}
	if e.Decision.Effect == string(policy.Hold) {
		return c.approve(ctx, a, e, receipt.Seq())
	}
	return receipt, c.cfg.Boundary.outcome(ctx, a, receipt.Seq()), e.Decision, nil
}

// crossing is an attempt as an act of its sandbox.
func (c *Sandboxes) crossing(l *live, a wire.Attempt) act {
	return crossingOf(l.get(), l.request.Load(), a)
}

func crossingOf(sb airlock.Sandbox, request *policy.Set, a wire.Attempt) act {
	x := act{sandbox: sb, request: request, action: a.Action, by: policy.Entity{Type: "Sandbox", ID: a.Sandbox}, on: policy.Entity{Type: "Host", ID: a.Host}}
	x.class, x.refused, x.meets = a.Class, a.Refused, crossingMeets
	x.context = policy.Context{}
	if a.IP != "" {
		x.context["ip"] = a.IP
	}
	switch a.Action {
	case "dns:resolve":
		x.context["type"] = a.Type
	case "net:connect":
		x.context["port"], x.context["protocol"] = int64(a.Port), a.Protocol
	case "http:request":
		x.context["port"], x.context["scheme"], x.context["method"], x.context["path"] = int64(a.Port), a.Scheme, a.Method, a.Path
		if a.Body != nil {
			x.context["bodyBytes"] = *a.Body
		}
		// A path may name a person, and a query is nobody's business but theirs.
		x.private = map[string]any{"context": policy.Context{"path": a.Path}}
		if a.Query != "" {
			x.private["query"] = clipped(a.Query)
		}
		if len(a.Path) > len(clipped(a.Path)) {
			x.private["context"] = policy.Context{"path": clipped(a.Path)}
		}
	case "secret:use":
		x.on = policy.Entity{Type: "Secret", ID: a.Secret}
		delete(x.context, "ip")
		x.context["host"], x.context["port"], x.context["method"], x.context["path"], x.context["location"] = a.Host, int64(a.Port), a.Method, a.Path, a.Location
		x.private = map[string]any{"context": policy.Context{"path": clipped(a.Path)}}
	default:
		x.err = airlock.Errorf(airlock.Invalid, "the gateway asked for %.40q, which is no crossing", a.Action)
	}
	if a.EgressProxy {
		return byProxy(x, a)
	}
	return x
}

// clipped bounds a text that is sealed: what is longer than details may be is
// lost as a whole otherwise.
func clipped(s string) string {
	const most = 1500
	if len(s) <= most {
		return s
	}
	return strings.ToValidUTF8(s[:most], "") + fmt.Sprintf("… (%d bytes)", len(s))
}

// crossingMeets are the obligations that a crossing can meet; policies cannot
// have others there.
var crossingMeets = []policy.Kind{policy.KindHold, policy.KindInject, policy.KindPass}

var gone = wire.Verdict{Reason: "the sandbox has ended"}

// Admit implements process.Decider: it says how connections are to be treated.
// What can be told in an answer to a request is left for then.
func (c *Sandboxes) Admit(ctx context.Context, a wire.Attempt) wire.Verdict {
	l := c.find(a.Sandbox)
	if l == nil {
		return gone
	}
	decide := func(action, protocol, method, scheme string) policy.Decision {
		ask := a
		ask.Action, ask.Protocol, ask.Method, ask.Scheme, ask.Path = action, protocol, method, scheme, "/"
		return c.cfg.Boundary.decide(c.crossing(l, ask))
	}
	switch {
	case has(decide("net:connect", "tls", "", ""), policy.KindPass):
		return wire.Verdict{Permit: true, Mode: wire.Passthrough}
	case decide("net:connect", "tcp", "", "").Effect != policy.Deny:
		return wire.Verdict{Permit: true, Mode: wire.Any}
	case a.Port == 80 || a.Port == 443 || decide("http:request", "", "GET", "http").Effect != policy.Deny || decide("http:request", "", "GET", "https").Effect != policy.Deny:
		return wire.Verdict{Permit: true, Mode: wire.Terminate}
	}
	a.Action, a.Protocol = "net:connect", "tcp"
	return c.Cross(ctx, a)
}

// has says whether a decision has an obligation of that kind.
func has(d policy.Decision, kind policy.Kind) bool {
	return slices.ContainsFunc(d.Obligations, func(o policy.Obligation) bool { return o.Kind == kind })
}

// misread says why a path with a slash within a segment is not permitted, "" if it
// may be. The gateway shows such a slash as %2F, and nothing else like that. To
// servers that decode first it is a slash like all others: what is not permitted
// there, or waits for others to approve it, is no more so by another spelling.
func (c *Sandboxes) misread(l *live, a wire.Attempt) string {
	if a.Action != "http:request" && a.Action != "secret:use" || !strings.Contains(a.Path, "%2F") {
		return ""
	}
	this := c.cfg.Boundary.decide(c.crossing(l, a))
	a.Path = strings.ReplaceAll(a.Path, "%2F", "/")
	other := c.cfg.Boundary.decide(c.crossing(l, a))
	if other.Effect == policy.Permit || other.Effect == this.Effect && slices.Equal(waitsFor(decision(other)), waitsFor(decision(this))) {
		return ""
	}
	return "there are servers that read the path in another way: " + other.Reason
}

// Cross implements process.Decider: it decides and records an attempt, and
// returns when both are done.
func (c *Sandboxes) Cross(ctx context.Context, a wire.Attempt) wire.Verdict {
	l := c.find(a.Sandbox)
	if l == nil {
		return gone
	}
	x := c.crossing(l, a)
	if x.refused == "" {
		x.refused = c.misread(l, a)
	}
	receipt, done, d, err := c.cross(ctx, x)
	if err == nil {
		err = receipt.Spend(a.Action, audit.Entity(x.on))
	}
	if err != nil {
		v := wire.Verdict{Policies: d.Policies, Reason: reasonOf(err)}
		if airlock.CodeOf(err) != airlock.Denied {
			v.Status = statusOf(err)
		}
		l.crossed(a, "denied", map[string]string{"policy": strings.Join(d.Policies, " "), "reason": v.Reason})
		return v
	}
	v := wire.Verdict{Permit: true, Event: receipt.Seq()}
	for _, o := range d.Obligations {
		if o.Kind == string(policy.KindInject) {
			v.Inject = append(v.Inject, o.Value)
		}
	}
	if a.Action == "dns:resolve" { // that is over when it is answered
		return v
	}
	ended := func(o audit.Outcome) {
		done(o)
		l.crossed(a, o.Status, map[string]string{"policy": strings.Join(d.Policies, " "), "bytesOut": strconv.FormatInt(o.Counts["bytesOut"], 10), "bytesIn": strconv.FormatInt(o.Counts["bytesIn"], 10), "status": strconv.FormatInt(o.Counts["status"], 10), "code": o.Code})
	}
	o := &open{attempt: a, ended: ended, meets: d.Obligations}
	l.crossings.began(receipt.Seq(), o)
	// From now on a change of policies finds it. One that came since it was
	// decided did not.
	if c.cfg.Boundary.effective(c.crossing(l, a)).Digest() != d.Set {
		if why := c.denies(l, o); why != "" {
			l.crossings.revoke(receipt.Seq(), why)
			l.crossings.end(receipt.Seq(), audit.Outcome{})
			v = wire.Verdict{Reason: why}
		}
	}
	return v
}

func reasonOf(err error) string {
	if airlock.CodeOf(err) == airlock.Internal {
		return "it could not be decided or recorded"
	}
	return publicOf(err)
}

func publicOf(err error) string {
	if e, ok := errors.AsType[*airlock.Error](err); ok {
		return e.Public()
	}
	return string(airlock.CodeOf(err))
}

// statusOf is HTTP's for what is no denial.
func statusOf(err error) int {
	if airlock.CodeOf(err) == airlock.Exhausted {
		return 429
	}
	return 503
}

// crossed tells the sandbox's own log, which its client follows, how one went.
// Names that were looked up are told of only when they are denied.
func (l *live) crossed(a wire.Attempt, how string, fields map[string]string) {
	for name, value := range fields {
		if value == "" || value == "0" && name != "bytesIn" && name != "bytesOut" {
			delete(fields, name)
		}
	}
	what := fmt.Sprintf("%s %s", strings.Replace(a.Action, ":", " ", 1), a.Host)
	switch a.Action {
	case "http:request":
		what = fmt.Sprintf("%s %s://%s%s", a.Method, a.Scheme, authority(a), shortened(a.Path))
	case "net:connect":
		what = fmt.Sprintf("connect %s %s", a.Protocol, authority(a))
	case "secret:use":
		what = fmt.Sprintf("secret %s to %s %s%s", a.Secret, a.Method, authority(a), shortened(a.Path))
	}
	if a.EgressProxy {
		what = "network.egressProxy: " + what
	}
	level := "info"
	if how != "ok" {
		level = "warn"
	}
	l.log.add(level, what+": "+how, fields)
}

func authority(a wire.Attempt) string {
	if a.Scheme == "https" && a.Port == 443 || a.Scheme == "http" && a.Port == 80 {
		return a.Host
	}
	return net.JoinHostPort(a.Host, strconv.Itoa(int(a.Port)))
}

// shortened keeps a path fit for a log of which hundreds are held in memory.
func shortened(s string) string {
	if len(s) > 200 {
		return strings.ToValidUTF8(s[:200], "") + "…"
	}
	return s
}
