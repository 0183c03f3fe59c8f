package control_test

import (
	"errors"
	"testing"
	"time"

	"airlock.dev/airlock"
	"airlock.dev/airlock/control"
	"airlock.dev/airlock/gateway/wire"
	"airlock.dev/airlock/isolation/fake"
	"airlock.dev/airlock/policy"
)

// pooled is a host with a pool that is full.
func pooled(t *testing.T, size control.PoolSize) (*host, *way) {
	h := newHost(t)
	h.pool = size
	h.Close(false)
	h.restart()
	w := &way{h: h, doors: map[string]wire.Door{}}
	h.Through(t.Context(), w)
	h.count(size.Least)
	return h, w
}

// count waits until so many sandboxes exist, and still do a moment later.
func (h *host) count(want int) {
	h.t.Helper()
	deadline := time.Now().Add(20 * time.Second)
	for steady := 0; steady < 5; time.Sleep(5 * time.Millisecond) {
		if steady++; h.world.Count() != want {
			steady = 0
		}
		if time.Now().After(deadline) {
			h.t.Fatalf("%d sandboxes exist, want %d", h.world.Count(), want)
		}
	}
}

// begun is how a sandbox was started.
func (h *host) begun(p airlock.Principal, sb airlock.Sandbox) string {
	h.t.Helper()
	events, err := h.Logs(h.t.Context(), p, sb.ID)
	if err != nil || len(events) == 0 {
		h.t.Fatal(events, err)
	}
	return events[0].Fields["start"]
}

func TestPool(t *testing.T) {
	h, w := pooled(t, control.PoolSize{Least: 2, Most: 3})
	if len(w.doors) != 0 {
		t.Errorf("sandboxes of nobody have a way out: %v", w.doors)
	}
	req := want
	req.Env = map[string]string{"MINE": "1"}
	one, err := h.Create(t.Context(), alice, req)
	if err != nil {
		t.Fatal(err)
	}
	two := h.create(bob)
	if a, b := h.begun(alice, one), h.begun(bob, two); a != "pool" || b != "pool" || one.ID == two.ID {
		t.Errorf("they began from %s and %s", a, b)
	}
	for _, tt := range []struct{ id, name, want string }{
		{one.ID, "MINE", "1"}, {one.ID, "E2B_SANDBOX_ID", one.ID}, {two.ID, "MINE", ""}, {two.ID, "E2B_SANDBOX_ID", two.ID},
	} {
		if got, _, err := h.run(tt.id, "env", time.Minute, tt.name); err != nil || got != tt.want+"\n" {
			t.Errorf("%s: %q, %v, want %q", tt.name, got, err, tt.want)
		}
	}
	if len(w.doors) != 2 {
		t.Errorf("doors of two sandboxes: %v", w.doors)
	}
	h.count(4)

	// What was started with other limits is not for this one.
	req = want
	req.Limits.MemoryMB = 100
	if sb, err := h.Create(t.Context(), alice, req); err != nil || h.begun(alice, sb) != "cold" {
		t.Errorf("with other limits: %v, %v", sb, err)
	}

	// A claimed one is never anybody else's.
	if err := errors.Join(h.Kill(t.Context(), alice, one.ID), h.Kill(t.Context(), bob, two.ID)); err != nil {
		t.Fatal(err)
	}
	if sb := h.create(alice); sb.ID == one.ID || sb.ID == two.ID {
		t.Error("a sandbox has a second owner")
	}

	// The next server begins with none of the one before.
	h.Close(false)
	h.count(2)
	h.restart()
	h.count(2)
}

// A server that dies leaves sandboxes of nobody; the next one ends them.
func TestPoolAfterKill(t *testing.T) {
	h, _ := pooled(t, control.PoolSize{Least: 2, Most: 2})
	sb := h.create(alice)
	h.count(3)
	before := h.Sandboxes
	h.pool = control.PoolSize{}
	h.restart()
	h.count(1)
	if _, err := h.Get(t.Context(), alice, sb.ID); err != nil {
		t.Error(err)
	}
	before.Close(false)
}

// Those that are asked for follow one another; those that nobody wants end.
func TestPoolFollowsDemand(t *testing.T) {
	h, _ := pooled(t, control.PoolSize{Most: 2})
	h.create(alice)
	h.count(1) // it may not come again
	sb := h.create(alice)
	if how := h.begun(alice, sb); how != "cold" {
		t.Error(how)
	}
	h.create(bob)
	h.count(5) // two or three came within a second: two are all that may be kept
}

// Whatever is wrong with those that are ready, a create gets a sandbox.
func TestPoolFallsBack(t *testing.T) {
	t.Run("dead", func(t *testing.T) {
		h := newHost(t)
		h.driver.Misbehave(fake.Faults{})
		h.pool = control.PoolSize{Least: 1, Most: 1}
		h.Close(false)
		h.restart()
		h.driver.Misbehave(fake.Faults{DieAfter: 50 * time.Millisecond, DieOutcome: airlock.SandboxFailed})
		h.Through(t.Context(), &way{h: h, doors: map[string]wire.Door{}})
		h.count(1)
		h.driver.Misbehave(fake.Faults{CreateErr: errors.New("no more for the pool")})
		time.Sleep(100 * time.Millisecond) // it dies
		h.driver.Misbehave(fake.Faults{})
		h.create(alice)
	})
	t.Run("denied", func(t *testing.T) {
		h, _ := pooled(t, control.PoolSize{Least: 1, Most: 1})
		h.permit(`@id("no") forbid (principal, action == Action::"sandbox:create", resource);`)
		for range 3 {
			if _, err := h.Create(t.Context(), alice, want); airlock.CodeOf(err) != airlock.Denied {
				t.Error(err)
			}
		}
		h.policies = policy.Builtin()
		if sb := h.create(alice); h.begun(alice, sb) != "pool" {
			t.Error("what was denied took it")
		}
	})
	t.Run("full host", func(t *testing.T) {
		h, _ := pooled(t, control.PoolSize{Least: 3, Most: 3})
		req := want
		req.Limits.MemoryMB = 4000 - 32 // all of it
		if _, err := h.Create(t.Context(), alice, req); err != nil {
			t.Error(err)
		}
		h.count(1)
		if _, err := h.Create(t.Context(), bob, want); airlock.CodeOf(err) != airlock.Exhausted {
			t.Error(err)
		}
	})
	t.Run("full team", func(t *testing.T) {
		h, _ := pooled(t, control.PoolSize{Least: 1, Most: 1})
		for range 3 {
			h.create(alice)
		}
		h.count(4)
		if _, err := h.Create(t.Context(), alice, want); airlock.CodeOf(err) != airlock.Exhausted {
			t.Error(err)
		}
		if sb := h.create(bob); h.begun(bob, sb) != "pool" {
			t.Error("a team that has enough took what is ready from others")
		}
	})
}
