package control

import (
	"errors"
	"fmt"
	"sync"

	"airlock.dev/airlock"
)

// Capacity is what may be reserved, on this host or for one team. A sandbox
// reserves all it may ever use: what is promised can be kept.
type Capacity struct {
	MemoryMB    int
	DiskMB      int
	Processes   int // host threads
	Descriptors int // of the server
	Sandboxes   int
}

// cost is what one sandbox reserves.
func cost(l airlock.Limits) Capacity {
	return Capacity{
		MemoryMB:    l.MemoryMB + kernelMB,
		DiskMB:      l.DiskMB,
		Processes:   l.Processes + kernelThreads,
		Descriptors: descriptorsEach,
		Sandboxes:   1,
	}
}

// What a sandbox costs the host beside its user processes, measured on idle
// and busy ones and rounded up.
const (
	kernelMB        = 32 // the application kernel and its file server
	kernelThreads   = 48
	descriptorsEach = 7
	guestMB         = 16
	poolShare       = 4 // the pool has at most this part of the host
)

// admission reserves. The host keeps what is not in its Capacity.
type admission struct {
	host, team Capacity

	mu     sync.Mutex
	total  Capacity
	byTeam map[string]Capacity
	held   int // sandboxes in the pool, whose cost is in total
}

func newAdmission(host, team Capacity) *admission {
	return &admission{host: host, team: team, byTeam: map[string]Capacity{}}
}

// retryAfter is what a refused client is told to wait, in seconds: about the
// time in which sandboxes of a busy host end.
const retryAfter = 5

const thisHost = "this host"

// errHostFull is why a reservation fails that others' sandboxes leave no room for.
var errHostFull = errors.New("the host is full")

// reserve takes l's cost, or says which resource of whom is short.
func (a *admission) reserve(team string, l airlock.Limits) error {
	c := cost(l)
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, side := range []struct {
		whose      string
		have, used Capacity
	}{{thisHost, a.host, a.total}, {"team " + team, a.team, a.byTeam[team]}} {
		for _, r := range []struct {
			name             string
			have, used, want int
			unit             string
		}{
			{"memory", side.have.MemoryMB, side.used.MemoryMB, c.MemoryMB, " MiB"},
			{"disk", side.have.DiskMB, side.used.DiskMB, c.DiskMB, " MiB"},
			{"processes", side.have.Processes, side.used.Processes, c.Processes, ""},
			{"descriptors", side.have.Descriptors, side.used.Descriptors, c.Descriptors, ""},
			{"sandboxes", side.have.Sandboxes, side.used.Sandboxes, c.Sandboxes, ""},
		} {
			if r.used+r.want > r.have {
				err := &airlock.Error{
					Code:       airlock.Exhausted,
					Field:      r.name,
					Message:    fmt.Sprintf("not enough %s: the sandbox needs %d%s and %s has %d%s of %d%s left", r.name, r.want, r.unit, side.whose, max(0, r.have-r.used), r.unit, r.have, r.unit),
					Hint:       "wait for sandboxes to end, kill some, or ask for less in limits",
					RetryAfter: retryAfter,
				}
				if side.whose == thisHost {
					return err.Because(errHostFull)
				}
				return err
			}
		}
	}
	a.total = add(a.total, c, 1)
	a.byTeam[team] = add(a.byTeam[team], c, 1)
	return nil
}

// idle is what a sandbox costs in which nothing of a user runs.
var idle = Capacity{MemoryMB: kernelMB + guestMB, Processes: kernelThreads, Descriptors: descriptorsEach}

// hold takes what one in the pool costs, while that leaves most of the host to
// sandboxes that somebody asked for.
func (a *admission) hold() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	total, pool := add(a.total, idle, 1), Capacity{MemoryMB: (a.held + 1) * idle.MemoryMB, Processes: (a.held + 1) * idle.Processes, Descriptors: (a.held + 1) * idle.Descriptors}
	for _, r := range [][3]int{
		{a.host.MemoryMB, total.MemoryMB, pool.MemoryMB},
		{a.host.Processes, total.Processes, pool.Processes},
		{a.host.Descriptors, total.Descriptors, pool.Descriptors},
	} {
		if have, used, pooled := r[0], r[1], r[2]; used > have || pooled > have/poolShare {
			return false
		}
	}
	a.total, a.held = total, a.held+1
	return true
}

// unhold is its inverse.
func (a *admission) unhold() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.total, a.held = add(a.total, idle, -1), a.held-1
}

// adopt takes l's cost whatever is left: the sandbox runs already.
func (a *admission) adopt(team string, l airlock.Limits) { a.move(team, l, 1) }

func (a *admission) release(team string, l airlock.Limits) { a.move(team, l, -1) }

func (a *admission) move(team string, l airlock.Limits, sign int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.total = add(a.total, cost(l), sign)
	if t := add(a.byTeam[team], cost(l), sign); t.Sandboxes > 0 {
		a.byTeam[team] = t
	} else {
		delete(a.byTeam, team)
	}
}

func add(a, b Capacity, sign int) Capacity {
	return Capacity{
		MemoryMB:    a.MemoryMB + sign*b.MemoryMB,
		DiskMB:      a.DiskMB + sign*b.DiskMB,
		Processes:   a.Processes + sign*b.Processes,
		Descriptors: a.Descriptors + sign*b.Descriptors,
		Sandboxes:   a.Sandboxes + sign*b.Sandboxes,
	}
}
