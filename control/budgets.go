package control

import (
	"context"
	"sync"
	"time"

	"airlock.dev/airlock"
	"airlock.dev/airlock/audit"
	"airlock.dev/airlock/gateway/wire"
)

// The gateway keeps the budgets of each sandbox's network. The server keeps how
// many bytes were used, for the gateway that comes after, and tells the trail.

// Used implements process.Decider. It is remembered for the next server.
func (c *Sandboxes) Used(u wire.Used) {
	l := c.find(u.Sandbox)
	if l == nil {
		return
	}
	l.used(u.Bytes)
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.sandbox.State != airlock.Running || l.sandbox.NetworkBytes <= l.stored {
		return
	}
	if err := c.remember(context.Background(), l.sandbox); err != nil {
		c.cfg.Log.Error("remember how much a sandbox has sent and received", "sandbox", u.Sandbox, "err", err)
		return
	}
	l.stored = l.sandbox.NetworkBytes
}

// used keeps what a sandbox has used, which never gets less.
func (l *live) used(bytes int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.sandbox.NetworkBytes = max(l.sandbox.NetworkBytes, bytes)
}

// refusedEvery is how often the trail is told of refusals for one budget of a
// sandbox; the gateway tells of them once a minute.
const refusedEvery = 30 * time.Second

// refusals are those of a sandbox that the trail does not know yet.
type refusals struct {
	mu    sync.Mutex
	told  map[wire.Budget]time.Time
	count map[wire.Budget]int64
}

// add returns how many to tell of now, which may be none.
func (r *refusals) add(b wire.Budget, n int64, now time.Time) int64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.told == nil {
		r.told, r.count = map[wire.Budget]time.Time{}, map[wire.Budget]int64{}
	}
	r.count[b] += max(n, 0)
	if last, ok := r.told[b]; ok && now.Sub(last) < refusedEvery {
		return 0
	}
	all := r.count[b]
	r.told[b], r.count[b] = now, 0
	return all
}

// spent are what the trail and the sandbox's own log say of each budget.
var spent = map[wire.Budget]string{
	wire.BudgetBytes:    "it has sent and received all bytes that it may: what it tries is refused",
	wire.BudgetFlows:    "it has as many connections at a time as it may: more were refused",
	wire.BudgetRequests: "it makes more requests or connections in a minute, or at a time, than it may: more were refused",
}

// Refused implements process.Decider.
func (c *Sandboxes) Refused(r wire.Refused) {
	l := c.find(r.Sandbox)
	message, known := spent[r.Budget]
	if l == nil || !known {
		return
	}
	n := l.refusals.add(r.Budget, r.Count, time.Now())
	if n == 0 {
		return
	}
	c.cfg.Boundary.Trail.Owe(context.Background(), audit.Event{
		Type: "sandbox.budget", Team: l.get().Team, Sandbox: r.Sandbox, Actor: audit.Actor{Kind: "system"},
		Outcome: audit.Outcome{Status: "denied", Code: string(r.Budget), Message: message, Counts: map[string]int64{"refused": n}},
	})
	l.log.add("warn", message, map[string]string{"budget": string(r.Budget)})
}
