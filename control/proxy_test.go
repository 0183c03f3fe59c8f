package control_test

import (
	"bytes"
	"slices"
	"strings"
	"testing"

	"airlock.dev/airlock"
	"airlock.dev/airlock/control"
	"airlock.dev/airlock/gateway/wire"
)

// toProxy is an attempt to get to the proxy that a client named.
func toProxy(sandbox string) wire.Attempt {
	return wire.Attempt{Sandbox: sandbox, Action: "net:connect", Host: "proxy.example", IP: public, Class: "public", Port: 1080, Protocol: "tcp", EgressProxy: true}
}

func TestEgressProxy(t *testing.T) {
	h, w := newWay(t)
	proxy := airlock.EgressProxy{Host: "proxy.example", Port: 1080, Username: "name-of-one", Password: "word-of-one"}
	// What the client asks for is about what code in the sandbox does.
	n := airlock.Network{DenyOut: []string{"0.0.0.0/0"}, AllowOut: []string{"a.example"}, EgressProxy: &proxy}
	sb, err := h.Create(t.Context(), alice, control.CreateRequest{Timeout: want.Timeout, Network: n, Key: "k-1"})
	if err != nil {
		t.Fatal(err)
	}
	if got := w.doors[sb.ID].EgressProxy; got == nil || *got != proxy {
		t.Errorf("the gateway has %+v", got)
	}
	name := wire.Attempt{Sandbox: sb.ID, Action: "dns:resolve", Host: "proxy.example", Type: "A", EgressProxy: true}
	change := func(f func(*wire.Attempt)) wire.Attempt {
		a := toProxy(sb.ID)
		f(&a)
		return a
	}
	for what, c := range map[string]struct {
		attempt wire.Attempt
		permit  bool
	}{
		"its name":                 {name, true},
		"the proxy":                {toProxy(sb.ID), true},
		"by the sandbox":           {change(func(a *wire.Attempt) { a.EgressProxy = false }), false},
		"another port":             {change(func(a *wire.Attempt) { a.Port = 80 }), false},
		"another host":             {change(func(a *wire.Attempt) { a.Host = "a.example" }), false},
		"UDP":                      {change(func(a *wire.Attempt) { a.Protocol = "udp" }), false},
		"a private address":        {change(func(a *wire.Attempt) { a.IP, a.Class = "10.1.2.3", "private" }), false},
		"a request":                {change(func(a *wire.Attempt) { a.Action, a.Scheme, a.Method, a.Path = "http:request", "http", "GET", "/" }), false},
		"refused":                  {change(func(a *wire.Attempt) { a.Refused = "it is metadata" }), false},
		"what is permitted anyway": {request(sb.ID, "a.example", public, "public", "GET"), true},
	} {
		v := h.Cross(t.Context(), c.attempt)
		if v.Permit != c.permit {
			t.Errorf("%s: %+v", what, v)
		}
		if v.Permit && v.Event != 0 {
			h.End(wire.End{Sandbox: sb.ID, Event: v.Event})
		}
	}

	// Another proxy breaks off what went the way before, and the same one nothing.
	cross := func(a wire.Attempt) uint64 {
		t.Helper()
		v := h.Cross(t.Context(), a)
		if !v.Permit {
			t.Fatalf("%s: %s", a.Host, v.Reason)
		}
		return v.Event
	}
	open := []uint64{cross(request(sb.ID, "a.example", public, "public", "GET")), cross(toProxy(sb.ID))}
	same := proxy
	n.EgressProxy = &same
	if err := h.SetNetwork(t.Context(), alice, sb.ID, n); err != nil {
		t.Fatal(err)
	}
	if cut := w.cut(); cut != nil {
		t.Errorf("the same proxy again breaks off %v", cut)
	}
	n.EgressProxy = nil
	if err := h.SetNetwork(t.Context(), alice, sb.ID, n); err != nil {
		t.Fatal(err)
	}
	if cut := w.cut(); !slices.Equal(cut, open) {
		t.Errorf("broken off %v, want %v", cut, open)
	}
	if w.doors[sb.ID].EgressProxy != nil {
		t.Error("the gateway still has it")
	}
	if v := h.Cross(t.Context(), toProxy(sb.ID)); v.Permit {
		t.Error("a proxy of before is still connected to")
	}
	other := proxy
	other.Port = 1081
	n.EgressProxy = &other
	direct := cross(request(sb.ID, "a.example", public, "public", "GET"))
	if err := h.SetNetwork(t.Context(), alice, sb.ID, n); err != nil {
		t.Fatal(err)
	}
	if cut := w.cut(); !slices.Equal(cut, []uint64{direct}) {
		t.Errorf("what went directly: broken off %v", cut)
	}

	// The next server goes on with it, and nothing has it in the clear.
	h.restart()
	h.Through(t.Context(), w)
	if got := w.doors[sb.ID].EgressProxy; got == nil || *got != other {
		t.Errorf("after a restart the gateway has %+v", got)
	}
	again := control.CreateRequest{Timeout: want.Timeout, Key: "k-1", Network: airlock.Network{DenyOut: n.DenyOut, AllowOut: n.AllowOut, EgressProxy: &proxy}}
	if got, err := h.Create(t.Context(), alice, again); err != nil || got.ID != sb.ID {
		t.Errorf("the same create again: %v", err)
	}
	again.Network.EgressProxy = &other
	if _, err := h.Create(t.Context(), alice, again); code(err) != airlock.Conflict {
		t.Errorf("a create with the same key and another proxy: %v", err)
	}
	pairs, err := h.store.Range(t.Context(), "", "", 100)
	if err != nil || len(pairs) == 0 {
		t.Fatal(pairs, err)
	}
	for _, p := range pairs {
		if bytes.Contains(p.Value, []byte("name-of-one")) || bytes.Contains(p.Value, []byte("word-of-one")) || bytes.Contains(p.Value, []byte("proxy.example")) {
			t.Errorf("the store has it in %s", p.Key)
		}
	}
	for _, e := range h.recorded("") {
		if strings.Contains(e, "of-one") {
			t.Errorf("the trail has %s", e)
		}
	}
}

// The operator's policies alone say whether there may be such a proxy.
func TestEgressProxyWithinTheCeiling(t *testing.T) {
	h, w := newWay(t)
	sb := h.create(alice)
	at := func(host string) airlock.Network {
		return airlock.Network{EgressProxy: &airlock.EgressProxy{Host: host, Port: 1080}}
	}
	for _, c := range []struct{ what, ceiling, host string }{
		{"none", `@id("no-proxies") forbid (principal, action in [Action::"net:connect", Action::"dns:resolve"], resource) when { context has egressProxy };`, "proxy.example"},
		{"none at an address", `@id("no-proxies") forbid (principal, action == Action::"net:connect", resource) when { context has egressProxy };`, public},
		{"no such name", `@id("closed") forbid (principal, action == Action::"dns:resolve", resource) when { resource.name == "closed.example" };`, "closed.example"},
		{"a private address", "", "10.1.2.3"},
		{"metadata", "", "169.254.169.254"},
		{"loopback", "", "127.0.0.1"},
	} {
		h.ceiling(c.ceiling)
		_, err := h.Create(t.Context(), alice, control.CreateRequest{Timeout: want.Timeout, Network: at(c.host)})
		if code(err) != airlock.Denied || !strings.Contains(err.Error(), "network.egressProxy is not permitted") {
			t.Errorf("%s, at create: %v", c.what, err)
		}
		if err := h.SetNetwork(t.Context(), alice, sb.ID, at(c.host)); code(err) != airlock.Denied {
			t.Errorf("%s, later: %v", c.what, err)
		}
	}
	if got := w.doors[sb.ID].EgressProxy; got != nil {
		t.Errorf("what was denied is in force: %+v", got)
	}
	// What is forbidden later is broken off.
	h.ceiling("")
	if err := h.SetNetwork(t.Context(), alice, sb.ID, at("proxy.example")); err != nil {
		t.Fatal(err)
	}
	v := h.Cross(t.Context(), toProxy(sb.ID))
	if !v.Permit {
		t.Fatal(v.Reason)
	}
	h.ceiling(`@id("no-proxies") forbid (principal, action == Action::"net:connect", resource) when { context has egressProxy };`)
	h.Reconsider(t.Context())
	if cut := w.cut(); !slices.Equal(cut, []uint64{v.Event}) {
		t.Errorf("broken off %v, want %d", cut, v.Event)
	}
}
