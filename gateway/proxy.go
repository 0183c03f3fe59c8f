package gateway

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"net/url"
	"sync"
	"sync/atomic"

	"airlock.dev/airlock"
	"airlock.dev/airlock/gateway/upstream"
	"airlock.dev/airlock/gateway/web"
	"airlock.dev/airlock/gateway/wire"
)

// egressProxy is the SOCKS5 proxy that the client of a sandbox has its TCP
// connections go by. What crosses was decided before, as if there were none;
// each connection to the proxy is decided and recorded besides. Names are
// resolved here, and the proxy is asked for addresses. Code in the sandbox is
// not told which proxy it is.
type egressProxy struct {
	airlock.EgressProxy
	by upstream.Proxy
}

func newEgressProxy(w *airlock.EgressProxy) *egressProxy {
	if w == nil {
		return nil
	}
	p := &egressProxy{EgressProxy: *w}
	if w.Username != "" {
		p.by.User = url.UserPassword(w.Username, w.Password)
	}
	if w.TLS {
		p.by.TLS = &tls.Config{MinVersion: tls.VersionTLS12, ServerName: w.ServerName}
		if w.ServerName == "" {
			p.by.TLS.ServerName = w.Host
		}
		if w.CACert != "" { // in place of what this machine trusts; none are none
			p.by.TLS.RootCAs = x509.NewCertPool()
			p.by.TLS.RootCAs.AppendCertsFromPEM([]byte(w.CACert))
		}
	}
	return p
}

func (p *egressProxy) same(other *egressProxy) bool {
	if p == nil || other == nil {
		return p == other
	}
	return p.EgressProxy == other.EgressProxy
}

// proxyRoutes is how many addresses of a proxy are tried.
const proxyRoutes = 3

// connectBy is Connect by a proxy. There is no other way if that fails.
func (d *door) connectBy(ctx context.Context, p *egressProxy, to web.Route) (net.Conn, error) {
	c, err := d.reachProxy(ctx, p)
	if err != nil {
		if denied, ok := errors.AsType[*web.Denied](err); ok && denied != d.bytes.over {
			return nil, &web.Denied{Status: denied.Status, Policies: denied.Policies, Reason: "the proxy that the sandbox's client named (network.egressProxy) may not be connected to", Ask: "see the sandbox's log"}
		}
		return nil, fmt.Errorf("reach the proxy of the sandbox's client: %w", err)
	}
	by, err := d.router.By(ctx, c, p.by, to)
	if err != nil {
		if why := c.p.ended(); why != nil {
			err = why
		}
		c.end(err)
		if _, ok := errors.AsType[*web.Denied](err); ok {
			return nil, err
		}
		return nil, fmt.Errorf("by the proxy of the sandbox's client: %w", err)
	}
	return by, nil
}

// reachProxy connects to a proxy, by the host's own if it has one.
func (d *door) reachProxy(ctx context.Context, p *egressProxy) (*toProxy, error) {
	if _, err := netip.ParseAddr(p.Host); err != nil {
		named := wire.Attempt{Action: "dns:resolve", Host: p.Host, Type: "A", EgressProxy: true}
		switch v, err := d.ask(ctx, wire.MethodCross, named); {
		case err != nil:
			return nil, err
		case !v.Permit:
			return nil, denial(v)
		}
	}
	// It is resolved each time, and never by what the sandbox knows of names.
	router := d.g.upstream.Router(nil)
	a := wire.Attempt{Action: "net:connect", Host: p.Host, Port: p.Port, Protocol: "tcp", EgressProxy: true}
	routes, err := router.Routes(ctx, "tcp", p.Host, p.Port)
	if denied, ok := errors.AsType[*web.Denied](err); ok {
		a.Refused = denied.Reason
		d.ask(ctx, wire.MethodCross, a)
	}
	if err != nil {
		return nil, unnamed(err)
	}
	for _, r := range routes[:min(len(routes), proxyRoutes)] {
		if a.IP, a.Class = "", ""; r.IP.IsValid() {
			a.IP, a.Class = r.IP.String(), r.Class
		}
		permit, denied := d.cross(ctx, a)
		if denied != nil {
			return nil, denied
		}
		var c net.Conn
		if c, err = router.Connect(ctx, r); err == nil {
			return newToProxy(c, permit), nil
		}
		permit.End(0, 0, 0, err)
	}
	return nil, unnamed(err)
}

// unnamed is err without the name that was looked up.
func unnamed(err error) error {
	if dns, ok := errors.AsType[*net.DNSError](err); ok {
		return errors.New("its name does not resolve: " + dns.Err)
	}
	return err
}

// toProxy is a connection to a proxy, and a crossing.
type toProxy struct {
	net.Conn
	p       *permit
	out, in atomic.Int64
	once    sync.Once
}

func newToProxy(c net.Conn, p *permit) *toProxy {
	t := &toProxy{Conn: c, p: p}
	p.OnRevoke(func(why *web.Denied) { t.end(why) })
	return t
}

func (t *toProxy) Read(b []byte) (int, error) {
	n, err := t.Conn.Read(b)
	t.in.Add(int64(n))
	return n, err
}

func (t *toProxy) Write(b []byte) (int, error) {
	n, err := t.Conn.Write(b)
	t.out.Add(int64(n))
	return n, err
}

// CloseWrite ends what is sent.
func (t *toProxy) CloseWrite() error {
	if c, ok := t.Conn.(interface{ CloseWrite() error }); ok {
		return c.CloseWrite()
	}
	return errors.ErrUnsupported
}

// Abort resets the connection.
func (t *toProxy) Abort() {
	switch c := t.Conn.(type) {
	case interface{ Abort() }:
		c.Abort()
	case *net.TCPConn:
		c.SetLinger(0)
	}
	t.Close()
}

// Close implements net.Conn.
func (t *toProxy) Close() error { return t.end(nil) }

// end closes it, and records that the first time.
func (t *toProxy) end(why error) error {
	err := t.Conn.Close()
	t.once.Do(func() { t.p.End(0, t.out.Load(), t.in.Load(), why) })
	return err
}
