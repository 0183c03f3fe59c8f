package control

import (
	"context"
	"maps"
	"slices"
	"strconv"
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
// sandbox, while there are any.
const refusedEvery = time.Minute

// refusals are those of a sandbox that the trail does not know yet.
type refusals struct {
	mu    sync.Mutex
	told  map[wire.Budget]time.Time
	count map[wire.Budget]int64
}

func (r *refusals) add(b wire.Budget, n int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.told == nil {
		r.told, r.count = map[wire.Budget]time.Time{}, map[wire.Budget]int64{}
	}
	r.count[b] += max(n, 0)
}

// due returns and forgets those of which the trail is to be told now.
func (r *refusals) due(now time.Time) map[wire.Budget]int64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	due := map[wire.Budget]int64{}
	for b, n := range r.count {
		if n > 0 && now.Sub(r.told[b]) >= refusedEvery {
			due[b], r.told[b] = n, now
			delete(r.count, b)
		}
	}
	return due
}

// spent are what the trail and the sandbox's own log say of each budget.
var spent = map[wire.Budget]string{
	wire.BudgetBytes:    "it has sent and received all bytes that it may: what it tries is refused",
	wire.BudgetFlows:    "it has as many connections at a time, or new UDP flows in a second, as it may: more were refused",
	wire.BudgetRequests: "it makes more requests or connections in a minute, or at a time, than it may: more were refused",
}

// Refused implements process.Decider. The trail is told of the first ones at
// once, and of those that follow by who measures sandboxes.
func (c *Sandboxes) Refused(r wire.Refused) {
	l := c.find(r.Sandbox)
	if _, known := spent[r.Budget]; l == nil || !known {
		return
	}
	l.refusals.add(r.Budget, r.Count)
	c.tellRefused(l, time.Now())
}

// tellRefused tells the trail of what is due; all is, when a sandbox or the
// server is about to end.
func (c *Sandboxes) tellRefused(l *live, now time.Time) {
	due := l.refusals.due(now)
	for _, b := range slices.Sorted(maps.Keys(due)) {
		c.cfg.Boundary.Trail.Owe(context.Background(), audit.Event{
			Type: "sandbox.budget", Team: l.get().Team, Sandbox: l.get().ID, Actor: audit.Actor{Kind: "system"},
			Outcome: audit.Outcome{Status: "denied", Code: string(b), Message: spent[b], Counts: map[string]int64{"refused": due[b]}},
		})
		l.log.add("warn", spent[b], map[string]string{"budget": string(b), "refused": strconv.FormatInt(due[b], 10)})
	}
}
