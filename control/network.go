package control

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"runtime"
	"slices"
	"sync"

	"airlock.dev/airlock"
	"airlock.dev/airlock/gateway/wire"
	"airlock.dev/airlock/policy"
)

// What a client asks of its sandbox's network can change while that runs, and
// so can the operator's policies. Either takes effect on what is open: what
// would be denied now is broken off.

// Sealer encrypts; keystore.Keystore is the one with keys that last.
type Sealer interface {
	// Seal encrypts plaintext under a name; ad is bound to it.
	Seal(ctx context.Context, name string, plaintext, ad []byte) ([]byte, error)
	// Unseal is its inverse, and fails for anything that it did not seal.
	Unseal(ctx context.Context, name string, sealed, ad []byte) ([]byte, error)
}

// sealName is the key of what is sealed of sandboxes.
const sealName = "sandboxes"

// hidden is what of a sandbox the store has sealed.
type hidden struct {
	Rules       []airlock.HeaderRule `json:"rules,omitempty"`
	EgressProxy *airlock.EgressProxy `json:"egressProxy,omitempty"`
	CreateRules string               `json:"createRules,omitempty"`
}

// seal puts the secrets of a sandbox where they are stored.
func (c *Sandboxes) seal(ctx context.Context, sb *airlock.Sandbox) error {
	sb.Secrets = nil
	if len(sb.Network.Rules) == 0 && sb.Network.EgressProxy == nil && sb.CreateRules == "" {
		return nil
	}
	if c.cfg.Sealer == nil {
		field := "network.rules"
		if sb.Network.EgressProxy != nil {
			field = "network.egressProxy"
		}
		return &airlock.Error{Code: airlock.Unimplemented, Field: field, Message: "what runs this sandbox has no keys to seal the secrets of " + field + " with", Hint: "use a server (airlock serve)"}
	}
	text, err := json.Marshal(hidden{sb.Network.Rules, sb.Network.EgressProxy, sb.CreateRules})
	if err != nil {
		return fmt.Errorf("encode a sandbox's secrets: %w", err)
	}
	if sb.Secrets, err = c.cfg.Sealer.Seal(ctx, sealName, text, []byte(sb.ID)); err != nil {
		return fmt.Errorf("seal a sandbox's secrets: %w", err)
	}
	return nil
}

// unseal is its inverse.
func (c *Sandboxes) unseal(ctx context.Context, sb *airlock.Sandbox) error {
	if sb.Secrets == nil {
		return nil
	}
	if c.cfg.Sealer == nil {
		return airlock.Errorf(airlock.Unavailable, "there are no keys to open what was sealed")
	}
	text, err := c.cfg.Sealer.Unseal(ctx, sealName, sb.Secrets, []byte(sb.ID))
	if err != nil {
		return err
	}
	var s hidden
	if err := json.Unmarshal(text, &s); err != nil {
		return fmt.Errorf("decode a sandbox's secrets: %w", err)
	}
	sb.Network.Rules, sb.Network.EgressProxy, sb.CreateRules = s.Rules, s.EgressProxy, s.CreateRules
	return nil
}

// SetNetwork replaces what the client of a running sandbox asks for of its way
// out; who may reach its ports, and how, stays. When it returns, what is open
// and denied now is being broken off. Like a create it can only narrow what
// the operator's policies permit.
func (c *Sandboxes) SetNetwork(ctx context.Context, p airlock.Principal, id string, n airlock.Network) error {
	l, err := c.lookup(p, id)
	if err != nil {
		return err
	}
	l.network.Lock()
	defer l.network.Unlock()
	old := l.get().Network
	n.AllowPublicTraffic, n.MaskRequestHost, n.HTTPSPorts = old.AllowPublicTraffic, old.MaskRequestHost, old.HTTPSPorts
	request, err := policy.FromRequest(l.get().Profile, l.get().Policy, n, c.cfg.Registries)
	if err != nil {
		return err
	}
	if err := c.mayProxy(ctx, l.get(), n.EgressProxy); err != nil {
		return err
	}
	a := on(p, l, "sandbox:network")
	a.asks = request
	done, err := c.cfg.Boundary.inside(ctx, a)
	if err != nil {
		return err
	}
	err = c.setNetwork(ctx, l, n, request)
	done(outcomeOf(err))
	if err == nil {
		l.log.add("info", "network changed", nil)
	}
	return err
}

func (c *Sandboxes) setNetwork(ctx context.Context, l *live, n airlock.Network, request *policy.Set) error {
	rerouted := !sameProxy(l.get().Network.EgressProxy, n.EgressProxy)
	if err := c.replaceNetwork(ctx, l, n, request); err != nil {
		return err
	}
	if c.gateway == nil {
		return nil
	}
	// It is remembered and decides from here on: a client that goes away now
	// does not keep open what it closed.
	ctx = context.WithoutCancel(ctx)
	err := c.setDoor(ctx, l.get())
	if err != nil {
		err = fmt.Errorf("tell the gateway: %w", err)
	}
	if rerouted {
		// What is open goes the way before. The gateway was told, so that what
		// begins from now on does not.
		return errors.Join(err, c.breakOff(ctx, l, func(o *open) string {
			if o.attempt.Protocol == "udp" {
				return c.denies(l, o)
			}
			return "it went by another network.egressProxy"
		}))
	}
	return errors.Join(err, c.reconsider(ctx, l))
}

func (c *Sandboxes) replaceNetwork(ctx context.Context, l *live, n airlock.Network, request *policy.Set) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	sb := l.sandbox
	if sb.State != airlock.Running {
		return airlock.Errorf(airlock.NotFound, "Sandbox %q doesn't exist or you don't have access to it", sb.ID)
	}
	sb.Network = n
	if err := c.remember(ctx, sb); err != nil {
		return err
	}
	l.sandbox = sb
	l.request.Store(request)
	return nil
}

// Reconsider decides everything that is open again, and has broken off what
// the policies in force deny. It is to be called when they changed.
func (c *Sandboxes) Reconsider(ctx context.Context) {
	if c.gateway == nil {
		return
	}
	c.mu.Lock()
	all := slices.Collect(maps.Values(c.live))
	c.mu.Unlock()
	next := make(chan *live)
	var work sync.WaitGroup
	for range min(len(all), runtime.GOMAXPROCS(0)) {
		work.Go(func() {
			for l := range next {
				// Policies say which secrets are put in, too.
				err := errors.Join(c.refresh(ctx, l), c.reconsider(ctx, l))
				if err != nil {
					c.cfg.Log.Error("break off what policies deny now", "sandbox", l.get().ID, "err", err)
				}
			}
		})
	}
	for _, l := range all {
		next <- l
	}
	close(next)
	work.Wait()
}

// reconsider is Reconsider for one sandbox.
func (c *Sandboxes) reconsider(ctx context.Context, l *live) error {
	return c.breakOff(ctx, l, func(o *open) string { return c.denies(l, o) })
}

// breakOff has broken off what is open and has a reason to be.
func (c *Sandboxes) breakOff(ctx context.Context, l *live, reason func(*open) string) error {
	var denied []uint64
	for event, o := range l.crossings.all() {
		if why := reason(o); why != "" {
			l.crossings.revoke(event, why)
			denied = append(denied, event)
		}
	}
	for some := range slices.Chunk(denied, wire.BreakMost) {
		if err := c.gateway.Break(ctx, l.get().ID, some); err != nil {
			return fmt.Errorf("break off %d connections: %w", len(denied), err)
		}
	}
	return nil
}

// denies says why an open crossing would not be permitted now, "" if it would.
func (c *Sandboxes) denies(l *live, o *open) string {
	x := c.crossing(l, o.attempt)
	d := c.cfg.Boundary.decide(x)
	if !x.permitted(d) {
		return public(d)
	}
	switch {
	case c.misread(l, o.attempt) != "":
		return "there are servers that read the path in another way, which is denied"
	case has(d, policy.KindHold) && !o.had(policy.KindHold):
		return "it waits for approval from now on"
	case o.had(policy.KindPass) && !has(d, policy.KindPass):
		return "what is in TLS is decided from now on"
	}
	return ""
}
