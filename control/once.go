package control

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"sync"

	"airlock.dev/airlock"
)

// A client that does not know whether its create was heard asks again with
// the same key, and gets the sandbox that was made. A key is remembered as
// long as its sandbox runs, over a crash of the server too.

// once lets one create with a key of a team go on at a time.
type once struct {
	mu      sync.Mutex
	running map[[2]string]chan struct{}
}

// enter waits until no other create with that key is under way.
func (o *once) enter(ctx context.Context, team, key string) (leave func(), err error) {
	name := [2]string{team, key}
	for {
		o.mu.Lock()
		other, busy := o.running[name]
		if !busy {
			done := make(chan struct{})
			o.running[name] = done
			o.mu.Unlock()
			return func() {
				o.mu.Lock()
				delete(o.running, name)
				o.mu.Unlock()
				close(done)
			}, nil
		}
		o.mu.Unlock()
		select {
		case <-other:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// digest is what a create asked for, so that a key cannot mean two things;
// rules is that of its rules and its proxy, which the other one does not have.
func (r CreateRequest) digest() (digest, rules string, err error) {
	if digest, err = digestOf(r); err == nil && (r.Network.Rules != nil || r.Network.EgressProxy != nil) {
		rules, err = digestOf(hidden{Rules: r.Network.Rules, EgressProxy: r.Network.EgressProxy})
	}
	return digest, rules, err
}

func digestOf(v any) (string, error) {
	text, err := json.Marshal(v)
	if err != nil {
		return "", fmt.Errorf("encode create: %w", err)
	}
	sum := sha256.Sum256(text)
	return hex.EncodeToString(sum[:]), nil
}

// made returns the running sandbox that a create with that key made before.
func (c *Sandboxes) made(ctx context.Context, p airlock.Principal, key, digest, rules string) (sb airlock.Sandbox, found bool, err error) {
	c.mu.Lock()
	all := slices.Collect(maps.Values(c.live))
	c.mu.Unlock()
	for _, l := range all {
		sb := l.get()
		if sb.Team != p.Team || sb.CreateKey != key || sb.State != airlock.Running {
			continue
		}
		if sb.CreateDigest != digest || sb.CreateRules != rules {
			e := airlock.Errorf(airlock.Conflict, "the Idempotency-Key %.60q was used for a different create", key)
			e.Hint = "use a new key for each create"
			return airlock.Sandbox{}, false, e
		}
		if err := c.cfg.Boundary.ask(ctx, on(p, l, "sandbox:connect")); err != nil {
			return airlock.Sandbox{}, false, err
		}
		return sb, true, nil
	}
	return airlock.Sandbox{}, false, nil
}
