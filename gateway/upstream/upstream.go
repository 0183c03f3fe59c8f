// Package upstream is how the host reaches the world for its sandboxes: it
// resolves names by the host's own means, says which class each address is of,
// and connects to exactly the address that was decided on, directly or through
// the proxy that the host has to use.
//
// What no policy is asked about is refused here: addresses of this machine, its
// cables and its cloud's metadata, and those that mean something else on the way
// or nothing at all. The package decides nothing beyond that and does not know
// sandboxes, policies or what is said on its connections. Start reading at
// Router.Routes.
package upstream

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"net/url"
	"slices"
	"sync"
	"time"

	"airlock.dev/airlock"
	"airlock.dev/airlock/gateway/address"
	"airlock.dev/airlock/gateway/web"
)

const (
	addressesMost = 64 // of one name that are looked at
	ownLife       = 10 * time.Second
	// An address that did not connect comes after the others for a while.
	deadLife = time.Minute
	deadMost = 1024
)

// Config says how the world is reached. All of it may be left out.
type Config struct {
	// Ranges say what addresses are; otherwise what they are for everyone.
	Ranges *address.Ranges
	// Resolver is the host's; otherwise the system's. Names are asked for as
	// they are: the host's search domains are not for sandboxes.
	Resolver *net.Resolver
	// Named says whether the operator named an address in a rule, or a network
	// that it is in: then it is not refused for its class, and a policy decides.
	Named func(netip.Addr) bool
	// Synthetic says whether an address only means a name in a sandbox. Such a
	// one is never dialled.
	Synthetic func(netip.Addr) bool
	// Own returns the addresses of this machine; otherwise those of its network
	// interfaces. They are asked for anew every 10 s. An address that only a
	// router in front of this machine has is not among them.
	Own func() ([]netip.Addr, error)

	// Proxy returns the proxy through which a destination has to be reached, or
	// nil; otherwise there is none. scheme is as in web.Request. The proxy's is
	// http, https or socks5; its user and password are told to it. It is asked
	// for connections only (CONNECT), also for plain HTTP, and for the address
	// that was decided on, so that TLS is verified from end to end.
	Proxy func(scheme, host string, port uint16) (*url.URL, error)
	// ProxyResolves has the proxy resolve names, for hosts that cannot. Then
	// nobody here knows what is connected to: routes have no address and no
	// class, so that only policies that need neither permit them, and it is for
	// the proxy to refuse what is internal.
	ProxyResolves bool
	// ProxyRoots are the authorities for a proxy's own TLS; otherwise the system's.
	ProxyRoots *x509.CertPool

	Timeout time.Duration // of one lookup, and of one connection: 5 s
}

// Upstream is the way of one host. Its methods may be called concurrently, and
// nothing of it has to be closed.
type Upstream struct {
	cfg Config

	mu   sync.Mutex
	own  map[netip.Addr]bool
	when time.Time // own is of
	dead map[netip.Addr]time.Time
}

// New returns the way that cfg describes.
func New(cfg Config) *Upstream {
	if cfg.Resolver == nil {
		cfg.Resolver = net.DefaultResolver
	}
	if cfg.Own == nil {
		cfg.Own = interfaces
	}
	if cfg.Timeout == 0 {
		cfg.Timeout = 5 * time.Second
	}
	if cfg.Ranges == nil {
		cfg.Ranges, _ = address.New(nil, nil) // fails for what is given only
	}
	return &Upstream{cfg: cfg, dead: map[netip.Addr]time.Time{}}
}

// Lookup implements dns.Resolver. Of names that the proxy resolves nothing is
// known: they all have the address 0.0.0.0, which nothing connects to.
func (u *Upstream) Lookup(ctx context.Context, name string) ([]netip.Addr, error) {
	if p, err := u.resolvedBy("https", name, 443); err != nil || p != nil {
		return []netip.Addr{netip.IPv4Unspecified()}, err
	}
	ctx, cancel := context.WithTimeout(ctx, u.cfg.Timeout)
	defer cancel()
	addrs, err := u.cfg.Resolver.LookupNetIP(ctx, "ip", name+".")
	if err != nil {
		return nil, plainDNS(name, err)
	}
	return addrs, nil
}

// plainDNS is err without what it says of the host's own network: sandboxes are
// told it.
func plainDNS(name string, err error) error {
	plain := &net.DNSError{Name: name, Err: "the host's resolver failed"}
	if d, ok := errors.AsType[*net.DNSError](err); ok {
		plain.IsNotFound, plain.IsTimeout, plain.IsTemporary = d.IsNotFound, d.IsTimeout, d.IsTemporary
	}
	switch {
	case plain.IsNotFound:
		plain.Err = "no such host"
	case plain.IsTimeout:
		plain.Err = "the host's resolver does not answer"
	}
	return plain
}

// resolvedBy returns the proxy that resolves a name, if that is what is done.
func (u *Upstream) resolvedBy(scheme, host string, port uint16) (*url.URL, error) {
	if !u.cfg.ProxyResolves {
		return nil, nil
	}
	return u.proxy(scheme, host, port)
}

func (u *Upstream) proxy(scheme, host string, port uint16) (*url.URL, error) {
	if u.cfg.Proxy == nil {
		return nil, nil
	}
	p, err := u.cfg.Proxy(scheme, host, port)
	if err != nil {
		return nil, airlock.Errorf(airlock.Unavailable, "the host's proxy for %s is not known", host).Because(err)
	}
	return p, nil
}

// Router is a web.Router, and finds names by a function of its own.
type Router struct {
	u      *Upstream
	lookup func(ctx context.Context, name string) ([]netip.Addr, error)
}

// Router returns a router that finds names by lookup, as dns.Server.Lookup,
// which keeps what it knows. If it is nil, Lookup is asked each time.
func (u *Upstream) Router(lookup func(ctx context.Context, name string) ([]netip.Addr, error)) *Router {
	if lookup == nil {
		lookup = u.Lookup
	}
	return &Router{u: u, lookup: lookup}
}

// Routes implements web.Router. The public addresses of a name come first, and
// within each class those that connected before. Addresses that are refused for
// what they are are left out; if all are, the error is a *web.Denied.
func (r *Router) Routes(ctx context.Context, scheme, host string, port uint16) ([]web.Route, error) {
	at := web.Route{Scheme: scheme, Host: host, Port: port}
	var addrs []netip.Addr
	if literal, err := netip.ParseAddr(host); err == nil {
		addrs = []netip.Addr{literal}
	} else {
		if p, err := r.u.resolvedBy(scheme, host, port); err != nil || p != nil {
			return []web.Route{at}, err
		}
		if addrs, err = r.lookup(ctx, host); err != nil {
			return nil, err
		}
		if len(addrs) == 0 {
			return nil, &net.DNSError{Name: host, Err: "it has no address", IsNotFound: true}
		}
	}
	var routes []web.Route
	var denied *web.Denied
	for _, a := range addrs[:min(len(addrs), addressesMost)] {
		at.IP = a.Unmap()
		class, err := r.u.classify(at.IP)
		if d, ok := errors.AsType[*web.Denied](err); ok {
			denied = d
			continue
		}
		if err != nil {
			return nil, err
		}
		if at.Class = class.String(); !slices.Contains(routes, at) {
			routes = append(routes, at)
		}
	}
	if len(routes) == 0 {
		return nil, denied
	}
	r.u.order(routes)
	return routes, nil
}

// classify returns the class of an address, or a *web.Denied if it may not be
// dialled.
func (u *Upstream) classify(a netip.Addr) (address.Class, error) {
	class := u.cfg.Ranges.Classify(a)
	refused := ""
	switch {
	case u.cfg.Synthetic != nil && u.cfg.Synthetic(a):
		return class, refusal("synthetic", "look the name up again")
	case class == address.Refused:
		return class, refusal(class.String(), "")
	}
	own, err := u.isOwn(a)
	if err != nil {
		return class, err
	}
	switch {
	case own:
		refused = "host"
	case class == address.Metadata, class == address.Loopback, class == address.LinkLocal, class == address.Multicast, class == address.Reserved, class == address.Transition:
		refused = class.String()
	}
	if refused != "" && (u.cfg.Named == nil || !u.cfg.Named(a)) {
		return class, refusal(refused, "have the operator name the address, if that is meant")
	}
	return class, nil
}

func refusal(class, ask string) *web.Denied {
	return &web.Denied{Reason: fmt.Sprintf("the address is of the class %s, which is not reached from a sandbox", class), Ask: ask}
}

// isOwn says whether an address is this machine's.
func (u *Upstream) isOwn(a netip.Addr) (bool, error) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.own == nil || time.Since(u.when) > ownLife {
		addrs, err := u.cfg.Own()
		if err != nil {
			return false, airlock.Errorf(airlock.Unavailable, "the host does not know its own addresses").Because(err)
		}
		u.own, u.when = map[netip.Addr]bool{}, time.Now()
		for _, a := range addrs {
			u.own[a.Unmap().WithZone("")] = true
		}
	}
	return u.own[a], nil
}

func interfaces() ([]netip.Addr, error) {
	nets, err := net.InterfaceAddrs()
	if err != nil {
		return nil, fmt.Errorf("list the addresses of the interfaces: %w", err)
	}
	var all []netip.Addr
	for _, n := range nets {
		p, err := netip.ParsePrefix(n.String())
		if err != nil {
			return nil, fmt.Errorf("read the address of an interface: %w", err)
		}
		all = append(all, p.Addr())
	}
	return all, nil
}

// order sorts by class and by what is known of each address.
func (u *Upstream) order(routes []web.Route) {
	u.mu.Lock()
	defer u.mu.Unlock()
	rank := func(r web.Route) (n int) {
		if r.Class != address.Public.String() {
			n += 2
		}
		if at, ok := u.dead[r.IP]; ok && time.Since(at) < deadLife {
			n++
		}
		return n
	}
	slices.SortStableFunc(routes, func(a, b web.Route) int { return rank(a) - rank(b) })
}

// note remembers whether an address connected.
func (u *Upstream) note(a netip.Addr, connected bool) {
	u.mu.Lock()
	defer u.mu.Unlock()
	delete(u.dead, a)
	if connected {
		return
	}
	if len(u.dead) >= deadMost {
		clear(u.dead) // it is about order only
	}
	u.dead[a] = time.Now()
}

// Connect implements web.Router. It looks at the address again: whatever came
// with the route, nothing else is dialled than what Routes would return.
func (r *Router) Connect(ctx context.Context, to web.Route) (net.Conn, error) {
	u := r.u
	ctx, cancel := context.WithTimeout(ctx, u.cfg.Timeout)
	defer cancel()
	p, err := u.proxy(to.Scheme, to.Host, to.Port)
	if err != nil {
		return nil, err
	}
	if !to.IP.IsValid() {
		if p == nil || !u.cfg.ProxyResolves {
			return nil, airlock.Errorf(airlock.Internal, "a route to %s has no address", to.Host)
		}
		return u.through(ctx, p, to.Host, to.Port)
	}
	if _, err := u.classify(to.IP); err != nil {
		return nil, err
	}
	var c net.Conn
	if p != nil {
		c, err = u.through(ctx, p, to.IP.String(), to.Port)
	} else {
		c, err = dial(ctx, netip.AddrPortFrom(to.IP, to.Port).String())
	}
	// Who gave up did not see whether it connects.
	if err == nil || !errors.Is(ctx.Err(), context.Canceled) {
		u.note(to.IP, err == nil)
	}
	return c, err
}

func dial(ctx context.Context, to string) (net.Conn, error) {
	c, err := new(net.Dialer).DialContext(ctx, "tcp", to)
	if err != nil {
		return nil, plain(err)
	}
	return c, nil
}

// plain is err without the addresses at both ends: sandboxes are told it.
func plain(err error) error {
	for {
		op, ok := errors.AsType[*net.OpError](err)
		if !ok {
			return err
		}
		err = op.Err
	}
}
