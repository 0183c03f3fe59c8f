package control

import (
	"context"
	"net/netip"

	"airlock.dev/airlock"
	"airlock.dev/airlock/gateway/wire"
)

// A client can have its sandbox's connections go by a proxy of its own. That
// widens nothing: each is decided as if there were none, and what the proxy does
// with what it gets, whoever may connect to it could have had done without us.
// So the connection to it must be one that the operator's policies permit, as
// raw bytes. The client's own are not asked: they say where code in the sandbox
// may go, and that neither sees the proxy nor gets to it by this.

func sameProxy(a, b *airlock.EgressProxy) bool {
	if a == nil || b == nil {
		return a == b
	}
	return *a == *b
}

// byProxy makes an act of the way to the proxy that the sandbox's client named.
func byProxy(x act, a wire.Attempt) act {
	x.request = nil
	x.context["egressProxy"] = true
	p := x.sandbox.Network.EgressProxy
	switch {
	case x.refused != "":
	case p == nil, p.Host != a.Host, a.Action == "net:connect" && (p.Port != a.Port || a.Protocol != "tcp"):
		x.refused = "it is not, or no more, the proxy that the sandbox's client named in network.egressProxy"
	case a.Action != "net:connect" && a.Action != "dns:resolve":
		x.err = airlock.Errorf(airlock.Invalid, "the gateway asked for %.40q to a proxy, which is no way to one", a.Action)
	}
	return x
}

// mayProxy says early what is known early: whether the operator's policies
// permit the proxy's name, or its address, if that is all there is. Each
// connection to it is decided again.
func (c *Sandboxes) mayProxy(ctx context.Context, sb airlock.Sandbox, p *airlock.EgressProxy) error {
	if p == nil {
		return nil
	}
	sb.Network.EgressProxy = p
	a := wire.Attempt{Sandbox: sb.ID, Action: "dns:resolve", Host: p.Host, Type: "A", EgressProxy: true}
	if _, err := netip.ParseAddr(p.Host); err == nil {
		a = wire.Attempt{Sandbox: sb.ID, Action: "net:connect", Host: p.Host, IP: p.Host, Port: p.Port, Protocol: "tcp", EgressProxy: true}
	}
	x := crossingOf(sb, nil, a)
	x.meets = crossingMeets
	err := c.cfg.Boundary.ask(ctx, x)
	if airlock.CodeOf(err) == airlock.Denied {
		return &airlock.Error{Code: airlock.Denied, Field: "network.egressProxy", Message: "network.egressProxy is not permitted", Hint: publicOf(err)}
	}
	return err
}
