package gateway

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"

	links "airlock.dev/airlock/gateway/door"
	"airlock.dev/airlock/gateway/web"
	"airlock.dev/airlock/gateway/wire"
)

// A sandbox opens so many UDP flows a second, and twice as many at once. More
// are refused and not recorded, so that a flood of ports fills no log.
const udpRate = 100

// datagramMost is the longest there is.
const datagramMost = 65535

// UDP implements the link's Handler. Whatever server a sandbox asks for names,
// it is we who answer. Everything else is decided as a connection.
func (d *door) UDP(ctx context.Context, f *links.Datagrams) {
	to := netip.AddrPortFrom(f.To().Addr().Unmap(), f.To().Port())
	if to.Port() == portDNS {
		if c, err := f.Accept(); err == nil {
			d.dns.ServeUDP(ctx, c)
		}
		return
	}
	if slices.Contains(own, to.Addr()) {
		return
	}
	if !d.udp.Allow() {
		d.refusals.add(wire.BudgetFlows)
		return
	}
	host := to.Addr().String()
	if name, release, ok := d.names.Hold(to.Addr()); ok {
		defer release()
		host = name
	}
	a := wire.Attempt{Action: "net:connect", Host: host, Port: to.Port(), Protocol: "udp"}
	if d.bytes.spent() != nil {
		d.exhausted(ctx, a)
		return
	}
	route, err := d.routeUDP(ctx, &a)
	if err != nil {
		return
	}
	p, err := d.cross(ctx, a)
	if err != nil {
		return
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	p.OnRevoke(func(*web.Denied) { cancel() })
	way := datagrams{p: p}
	err = way.relay(ctx, f, netip.AddrPortFrom(route.IP, route.Port))
	if why := p.ended(); why != nil {
		err = why
	}
	p.End(0, way.out.Load(), way.in.Load(), err)
}

// routeUDP finds where an attempt leads, and records it if that is nowhere.
func (d *door) routeUDP(ctx context.Context, a *wire.Attempt) (web.Route, error) {
	if a.Port == portQUIC {
		a.Refused = "QUIC is not looked into: use HTTP over TCP"
		d.ask(ctx, wire.MethodCross, *a)
		return web.Route{}, errors.New(a.Refused)
	}
	routes, err := d.Routes(ctx, "udp", a.Host, a.Port)
	if denied, ok := errors.AsType[*web.Denied](err); ok {
		a.Refused = denied.Reason
		d.ask(ctx, wire.MethodCross, *a)
	}
	if err != nil {
		return web.Route{}, err
	}
	if !routes[0].IP.IsValid() {
		return web.Route{}, errors.New("only a proxy could reach it, and that carries no datagrams")
	}
	a.IP, a.Class = routes[0].IP.String(), routes[0].Class
	return routes[0], nil
}

// datagrams are what passes in one flow, and how many bytes.
type datagrams struct {
	p       *permit
	out, in atomic.Int64
}

// relay carries them until the flow is over.
func (d *datagrams) relay(ctx context.Context, f *links.Datagrams, to netip.AddrPort) error {
	up, err := new(net.Dialer).DialContext(ctx, "udp", to.String())
	if err != nil {
		return err
	}
	defer up.Close()
	c, err := f.Accept()
	if err != nil {
		return err
	}
	defer c.Close()
	stop := context.AfterFunc(ctx, func() { c.Close(); up.Close() })
	defer stop()
	var back sync.WaitGroup
	back.Go(func() {
		d.copy(c, up, &d.in)
		c.Close() // what is gone there is gone here
	})
	d.copy(up, c, &d.out)
	up.Close()
	back.Wait()
	return nil
}

func (d *datagrams) copy(to, from net.Conn, count *atomic.Int64) {
	buf := make([]byte, datagramMost)
	for {
		n, err := from.Read(buf)
		if err != nil {
			return
		}
		if fits, _ := d.p.Passed(n); fits < n {
			return // half of a datagram is none; all that is open is being revoked
		}
		count.Add(int64(n))
		if _, err := to.Write(buf[:n]); err != nil && errors.Is(err, net.ErrClosed) {
			return
		}
	}
}
