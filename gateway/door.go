package gateway

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"

	"airlock.dev/airlock"
	"airlock.dev/airlock/gateway/dns"
	links "airlock.dev/airlock/gateway/door"
	"airlock.dev/airlock/gateway/inject"
	"airlock.dev/airlock/gateway/upstream"
	"airlock.dev/airlock/gateway/web"
	"airlock.dev/airlock/gateway/wire"
)

// dnsIdle is how long a resolver's socket counts as a flow after its query:
// with 100 queries a second, most of the flows are left for others.
const dnsIdle = time.Second

// namesMost is how many names a sandbox has addresses of at a time.
const namesMost = 4096

var (
	names4 = netip.MustParsePrefix("198.18.0.0/15")
	names6 = netip.MustParsePrefix("fd61:6972:0:1::/64")
)

// door is one sandbox's way out: its link, its names and its web.
type door struct {
	g       *gateway
	sandbox string
	names   *dns.Names
	dns     *dns.Server
	web     *web.Door
	router  *upstream.Router
	secrets *inject.Door
	udp     *rate.Limiter // of new UDP flows
	link    *links.Door

	bytes    *bytes
	refusals refusals

	crossings crossings
	rules     atomic.Pointer[rules]
	proxy     atomic.Pointer[egressProxy] // nil if there is none
}

func (g *gateway) newDoor(w wire.Door, f *os.File, flows *links.Table) (_ *door, err error) {
	d := &door{g: g, sandbox: w.Sandbox, udp: rate.NewLimiter(udpRate, 2*udpRate)}
	r := rules(w.Rules)
	d.rules.Store(&r)
	d.proxy.Store(newEgressProxy(w.EgressProxy))
	budgets := g.start.Budgets
	d.bytes = newBytes(budgets.Bytes, w.Used, func(used int64) {
		g.server.Note(wire.MethodUsed, wire.Used{Sandbox: d.sandbox, Bytes: used})
	})
	d.refusals.tell = func(r wire.Refused) {
		r.Sandbox = d.sandbox
		g.server.Note(wire.MethodRefused, r)
	}
	defer func() {
		if err != nil {
			d.close()
		}
	}()
	if d.names, err = dns.NewNames(names4, names6, namesMost); err != nil {
		return nil, err
	}
	for _, b := range w.Names {
		d.names.Restore(b.Name, b.Place)
	}
	d.names.Bound = func(name string, place uint32) {
		g.server.Note(wire.MethodBound, wire.Bound{Sandbox: d.sandbox, Binding: wire.Binding{Name: name, Place: place}})
	}
	d.dns = dns.New(dns.Config{Judge: d, Resolver: resolver{d}, Names: d.names, Idle: dnsIdle})
	d.router = g.upstream.Router(d.dns.Lookup)
	if d.secrets, err = inject.New(inject.Config{Secrets: g.secrets(w), Use: d.use, Refused: d.misused, Wanted: wanted}); err != nil {
		return nil, err
	}
	limits := g.limits
	limits.RequestsPerMinute, limits.AnswerBytes = budgets.Requests, budgets.Answer
	d.web, err = web.Open(web.Config{
		Turns: g.turns,
		Judge: d, Router: d, Authority: g.authority, Roots: g.roots, Hold: d.names.Hold, Own: own,
		Wrap: func(next http.RoundTripper) http.RoundTripper {
			return d.secrets.Wrap(d.secrets.Hide(transform{d, next}, d.ruled))
		},
		EncodedSlashes: true, // control decides both ways to read them
		Limits:         limits,
		Limited:        func() { d.refusals.add(wire.BudgetRequests) },
	})
	if err != nil {
		return nil, err
	}
	d.link, err = links.Open(f, links.Config{
		Flows: flows, MaxFlows: budgets.Flows, Refused: func() { d.refusals.add(wire.BudgetFlows) },
		UDP: func(netip.AddrPort) bool { return true },
	}, d)
	return d, err
}

// set changes what requests get from now on.
func (d *door) set(w wire.Door) error {
	r := rules(w.Rules)
	d.rules.Store(&r)
	if p := newEgressProxy(w.EgressProxy); !p.same(d.proxy.Load()) {
		d.proxy.Store(p)
		d.web.Reroute()
	}
	return d.secrets.Set(d.g.secrets(w))
}

// secrets are a door's and those that all have.
func (g *gateway) secrets(w wire.Door) []inject.Secret {
	return append(g.start.Secrets[:len(g.start.Secrets):len(g.start.Secrets)], w.Secrets...)
}

// close ends all flows of the door.
func (d *door) close() {
	if d.link != nil {
		d.link.Close()
	}
	if d.web != nil {
		d.web.Close()
		d.secrets.Close()
	}
	if d.dns != nil {
		d.dns.Close()
	}
	d.refusals.close()
}

const (
	portDNS  = 53
	portQUIC = 443 // HTTP/3 would pass undecided; without it clients use TCP
)

// TCP implements the link's Handler. Whatever server a sandbox asks for names,
// it is we who answer.
func (d *door) TCP(ctx context.Context, f *links.Flow) {
	if f.To().Port() != portDNS {
		d.web.Serve(ctx, flow{f})
		return
	}
	// That a server elsewhere can be connected to says that it can be reached.
	if to := f.To().Addr().Unmap(); !slices.Contains(own, to) {
		if _, err := d.Admit(ctx, to.String(), portDNS); err != nil {
			f.Refuse()
			return
		}
	}
	c, err := f.Accept()
	if err != nil {
		return
	}
	d.dns.ServeTCP(ctx, c)
}

// flow is a link's, as the web takes it.
type flow struct{ *links.Flow }

func (f flow) Accept() (net.Conn, error) {
	c, err := f.Flow.Accept()
	if err != nil {
		return nil, err
	}
	return c, nil
}

// ask lets the server decide an attempt.
func (d *door) ask(ctx context.Context, method string, a wire.Attempt) (wire.Verdict, error) {
	a.Sandbox = d.sandbox
	var v wire.Verdict
	err := d.g.server.Call(ctx, method, a, nil, &v)
	return v, err
}

// resolver looks names up while anything may cross.
type resolver struct{ d *door }

// Lookup implements dns.Resolver.
func (r resolver) Lookup(ctx context.Context, name string) ([]netip.Addr, error) {
	if r.d.bytes.spent() != nil {
		return []netip.Addr{netip.IPv4Unspecified()}, nil // the name exists; nothing is sent there
	}
	return r.d.g.upstream.Lookup(ctx, name)
}

// Judge implements dns.Judge. Names are a way out, too: they count, and are not
// looked up any more when nothing else crosses. Those that have addresses in the
// sandbox keep them, so that a request is told why it is denied.
func (d *door) Judge(ctx context.Context, name, kind string) error {
	if d.bytes.spent() != nil && d.names.Known(name) {
		return nil // nothing of it leaves the host
	}
	a := wire.Attempt{Action: "dns:resolve", Host: name, Type: kind}
	if d.bytes.take(len(name)) < len(name) {
		over := d.exhaust()
		d.exhausted(ctx, a)
		return &airlock.Error{Code: airlock.Exhausted, Message: over.Reason, Hint: over.Ask}
	}
	v, err := d.ask(ctx, wire.MethodCross, a)
	if err == nil && !v.Permit {
		err = airlock.Errorf(airlock.Denied, "%s", v.Reason)
	}
	return err
}

// Admit implements web.Judge.
func (d *door) Admit(ctx context.Context, host string, port uint16) (web.Mode, error) {
	if d.bytes.spent() != nil {
		return web.Any, nil // nothing crosses, and requests are told why
	}
	a := wire.Attempt{Action: "net:connect", Host: host, Port: port, Protocol: "tcp"}
	routes, err := d.Routes(ctx, "tcp", host, port)
	switch denied, ok := errors.AsType[*web.Denied](err); {
	case webPort(port) && err != nil:
		return web.Terminate, nil // its requests are told why
	case ok:
		a.Refused = denied.Reason
		d.ask(ctx, wire.MethodCross, a)
		return 0, err
	case err != nil:
		return 0, err
	}
	if ip := routes[0].IP; ip.IsValid() {
		a.IP, a.Class = ip.String(), routes[0].Class
	}
	v, err := d.ask(ctx, wire.MethodAdmit, a)
	switch {
	case err != nil:
		return 0, err
	case !v.Permit:
		return 0, denial(v)
	}
	switch v.Mode {
	case wire.Passthrough:
		return web.Passthrough, nil
	case wire.Any:
		return web.Any, nil
	}
	return web.Terminate, nil
}

// webPort says that what is denied there is better told in an answer.
func webPort(port uint16) bool { return port == 80 || port == 443 }

func denial(v wire.Verdict) *web.Denied {
	return &web.Denied{Status: v.Status, Policies: v.Policies, Reason: v.Reason}
}

// Cross implements web.Judge.
func (d *door) Cross(ctx context.Context, r web.Request) (web.Permit, error) {
	p, err := d.cross(ctx, d.attempt(r))
	if err != nil {
		return nil, err
	}
	p.request = r
	return p, nil
}

// cross has an attempt decided and recorded.
func (d *door) cross(ctx context.Context, a wire.Attempt) (*permit, error) {
	if over := d.bytes.spent(); over != nil {
		d.exhausted(ctx, a)
		return nil, over
	}
	p := &permit{d: d}
	d.crossings.begin()
	v, err := d.ask(ctx, wire.MethodCross, a)
	p.event = v.Event
	d.crossings.began(p, err == nil && v.Permit)
	switch {
	case err != nil:
		return nil, err
	case !v.Permit:
		return nil, denial(v)
	}
	p.inject = v.Inject
	return p, nil
}

// Refused implements web.Judge.
func (d *door) Refused(ctx context.Context, r web.Request, denied *web.Denied) {
	a := d.attempt(r)
	if denied == d.bytes.over {
		d.exhausted(ctx, a)
		return
	}
	a.Refused = denied.Reason
	d.ask(context.WithoutCancel(ctx), wire.MethodCross, a)
}

// exhaust breaks off what is open: all bytes are used up.
func (d *door) exhaust() *web.Denied {
	d.crossings.revokeAll(d.bytes.over)
	return d.bytes.over
}

// exhausted denies an attempt for want of bytes. Only few are recorded with
// what was tried; the others are counted.
func (d *door) exhausted(ctx context.Context, a wire.Attempt) {
	if !d.bytes.record.Allow() {
		d.refusals.add(wire.BudgetBytes)
		return
	}
	a.Refused = d.bytes.over.Reason
	d.ask(context.WithoutCancel(ctx), wire.MethodCross, a)
}

// attempt is a request as the server decides it.
func (d *door) attempt(r web.Request) wire.Attempt {
	a := wire.Attempt{Action: "http:request", Host: r.Host, Port: r.Port, Scheme: r.Scheme, Method: r.Method, Path: r.Path, Query: ascii(r.RawQuery), Upgrade: r.Upgrade}
	if r.IP.IsValid() {
		a.IP, a.Class = r.IP.String(), r.Class
	}
	if r.BodyBytes >= 0 {
		a.Body = &r.BodyBytes
	}
	if r.Scheme == "tcp" || r.Scheme == "tls" {
		a.Action, a.Protocol, a.Scheme, a.Method, a.Body = "net:connect", r.Scheme, "", "", nil
	}
	return a
}

// ascii is a query with percent-encodings for what is not ASCII, which need not
// be text.
func ascii(query string) string {
	var b strings.Builder
	for _, c := range []byte(query) {
		if c < 0x80 {
			b.WriteByte(c)
		} else {
			fmt.Fprintf(&b, "%%%02X", c)
		}
	}
	return b.String()
}

// crossings are those of a door that were permitted and have not ended.
type crossings struct {
	mu     sync.Mutex
	open   map[uint64]*permit
	asking int // how many are being decided
	// early are those that were revoked before it was known here that they had
	// been permitted.
	early map[uint64]bool
	over  *web.Denied // why all are revoked, and will be
}

func (c *crossings) begin() {
	c.mu.Lock()
	c.asking++
	c.mu.Unlock()
}

// began is called once for each begin.
func (c *crossings) began(p *permit, permitted bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if permitted {
		if c.open == nil {
			c.open = map[uint64]*permit{}
		}
		c.open[p.event] = p
		if p.revoked = c.over; c.early[p.event] {
			p.revoked = revoked
		}
	}
	if c.asking--; c.asking == 0 {
		c.early = nil
	}
}

func (c *crossings) revoke(events []uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, event := range events {
		switch p := c.open[event]; {
		case p != nil:
			p.revoke(revoked)
		case c.asking > 0:
			if c.early == nil {
				c.early = map[uint64]bool{}
			}
			c.early[event] = true
		}
	}
}

// revoked is why a crossing ends that the server names: its log knows more.
var revoked = &web.Denied{Reason: "what had permitted it was changed, and denies it now"}

// revokeAll revokes what is open, and what begins later.
func (c *crossings) revokeAll(why *web.Denied) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.over != nil {
		return
	}
	c.over = why
	for _, p := range c.open {
		p.revoke(why)
	}
}

// permit is a crossing that goes on.
type permit struct {
	d       *door
	request web.Request // of none that is UDP
	event   uint64
	inject  []string // the secrets that policies want put in

	// Both belong to crossings.
	revoked *web.Denied // why it was
	stop    func(why *web.Denied)
}

// revoke is called with the crossings' lock.
func (p *permit) revoke(why *web.Denied) {
	if p.revoked == nil {
		if p.revoked = why; p.stop != nil {
			go p.stop(why)
		}
	}
}

// OnRevoke implements web.Revocable.
func (p *permit) OnRevoke(stop func(why *web.Denied)) {
	c := &p.d.crossings
	c.mu.Lock()
	defer c.mu.Unlock()
	if p.stop = stop; p.revoked != nil {
		go stop(p.revoked)
	}
}

// ended is why it does not go on, or nil.
func (p *permit) ended() *web.Denied {
	c := &p.d.crossings
	c.mu.Lock()
	defer c.mu.Unlock()
	return p.revoked
}

// Passed implements web.Metered.
func (p *permit) Passed(n int) (fits int, why *web.Denied) {
	if fits = p.d.bytes.take(n); fits < n {
		why = p.d.exhaust()
	}
	return fits, why
}

// use decides and records the use of a secret.
func (d *door) use(ctx context.Context, u inject.Use) error {
	v, err := d.ask(ctx, wire.MethodCross, usage(u))
	switch {
	case err != nil:
		return err
	case !v.Permit:
		return denial(v)
	}
	(&permit{d: d, event: v.Event}).End(0, 0, 0, nil) // what became of it, the request's own end says
	return nil
}

// misused records a placeholder where it does not belong.
func (d *door) misused(ctx context.Context, u inject.Use, denied *web.Denied) {
	a := usage(u)
	a.Refused = denied.Reason
	d.ask(context.WithoutCancel(ctx), wire.MethodCross, a)
}

func usage(u inject.Use) wire.Attempt {
	return wire.Attempt{Action: "secret:use", Secret: u.Secret, Host: u.Host, Port: u.Port, Method: u.Method, Path: u.Path, Location: u.Location}
}

// wanted says whether a policy puts a secret into a request.
func wanted(ctx context.Context, secret string) bool {
	p, ok := web.PermitOf(ctx).(*permit)
	return ok && slices.Contains(p.inject, secret)
}

// End implements web.Permit.
func (p *permit) End(status int, out, in int64, err error) {
	p.d.crossings.mu.Lock()
	delete(p.d.crossings.open, p.event)
	p.d.crossings.mu.Unlock()
	e := wire.End{Sandbox: p.d.sandbox, Event: p.event, Status: status, BytesOut: out, BytesIn: in, Used: p.d.bytes.used.Load()}
	if err != nil {
		switch denied, _ := errors.AsType[*web.Denied](err); {
		case denied == p.d.bytes.over:
			e.Code = airlock.Exhausted
		case airlock.CodeOf(err) == airlock.TooLarge:
			e.Code = airlock.TooLarge
		case denied != nil:
			e.Code = airlock.Denied
		}
		e.Error = err.Error()
		e.Error = e.Error[:min(len(e.Error), 500)]
	}
	p.d.g.server.Note(wire.MethodEnd, e)
}

// Routes implements web.Router. A name that the sandbox told us otherwise than
// by DNS, as to a proxy, would be a way out as well: it is decided like one.
func (d *door) Routes(ctx context.Context, scheme, host string, port uint16) ([]web.Route, error) {
	if over := d.bytes.spent(); over != nil {
		return nil, over
	}
	if _, err := netip.ParseAddr(host); err != nil && !d.names.Known(host) {
		if err := d.Judge(ctx, host, "A"); err != nil {
			if over := d.bytes.spent(); over != nil {
				return nil, over
			}
			return nil, unresolved(err)
		}
		if _, _, err := d.names.Bind(host); err != nil {
			return nil, err
		}
	}
	return d.router.Routes(ctx, scheme, host, port)
}

// unresolved is a denial of a name, as an answer tells it.
func unresolved(err error) error {
	if e, ok := errors.AsType[*airlock.Error](err); ok && e.Code == airlock.Denied {
		return &web.Denied{Reason: e.Message}
	}
	return err
}

// Connect implements web.Router.
func (d *door) Connect(ctx context.Context, r web.Route) (net.Conn, error) {
	if p := d.proxy.Load(); p != nil {
		return d.connectBy(ctx, p, r)
	}
	return d.router.Connect(ctx, r)
}
