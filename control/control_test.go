package control_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"airlock.dev/airlock"
	"airlock.dev/airlock/audit"
	"airlock.dev/airlock/audit/audittest"
	"airlock.dev/airlock/channel"
	"airlock.dev/airlock/cluster"
	"airlock.dev/airlock/control"
	"airlock.dev/airlock/image"
	"airlock.dev/airlock/isolation/fake"
	"airlock.dev/airlock/policy"
)

// host is a machine with one server after the other.
type host struct {
	t        testing.TB
	store    *cluster.Memory
	world    *fake.World
	driver   *fake.Driver
	trail    control.Trail
	log      *audit.Log
	keys     control.Sealer
	policies *policy.Policies
	hold     time.Duration // that approvals are waited for
	pool     control.PoolSize
	*control.Sandboxes
}

var (
	alice = airlock.Principal{Team: "alice", Role: airlock.Client, KeyID: "a"}
	bob   = airlock.Principal{Team: "bob", Role: airlock.Client, KeyID: "b"}
	want  = control.CreateRequest{Timeout: time.Minute}
)

func newHost(t testing.TB) *host {
	h := &host{t: t, store: cluster.NewMemory(), world: fake.NewWorld(), policies: policy.Builtin()}
	h.log, _ = audittest.Open(t)
	h.trail = h.log
	h.keys = audittest.Config(t).Sealer.(control.Sealer)
	h.restart()
	t.Cleanup(func() {
		h.driver.Misbehave(fake.Faults{})
		h.Close(true)
		if n := h.world.Count(); n != 0 {
			t.Errorf("%d sandboxes are left", n)
		}
	})
	return h
}

// restart puts a new server in the place of the one before, which is forgotten
// as after a kill.
func (h *host) restart() {
	h.t.Helper()
	h.driver = fake.New(h.world)
	plenty := control.Capacity{MemoryMB: 4000, DiskMB: 10000, Processes: 2000, Descriptors: 1000, Sandboxes: 5}
	team := plenty
	team.Sandboxes = 3
	var err error
	h.Sandboxes, err = control.New(h.t.Context(), control.Config{
		Store: h.store, Driver: h.driver, Image: image.Image{RootFS: "/", Guest: "/guest", Env: map[string]string{"SSL_CERT_FILE": "/roots"}}, Host: plenty, Team: team, Log: slog.New(slog.DiscardHandler), Hold: h.hold, Pool: h.pool,
		Sealer: h.keys, Boundary: control.Boundary{Policies: func() *policy.Policies { return h.policies }, Trail: h.trail},
	})
	if err == nil {
		err = h.Recover(h.t.Context())
	}
	if err != nil {
		h.t.Fatal(err)
	}
}

// The image's variables are there, below the client's.
func TestEnvironment(t *testing.T) {
	h := newHost(t)
	req := want
	req.Env = map[string]string{"MINE": "1"}
	first, err := h.Create(t.Context(), alice, req)
	if err != nil {
		t.Fatal(err)
	}
	req.Env = map[string]string{"SSL_CERT_FILE": "/mine"}
	second, err := h.Create(t.Context(), alice, req)
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		for _, tt := range []struct{ id, name, want string }{
			{first.ID, "SSL_CERT_FILE", "/roots"}, {first.ID, "MINE", "1"}, {first.ID, "E2B_SANDBOX_ID", first.ID},
			{second.ID, "SSL_CERT_FILE", "/mine"}, {second.ID, "MINE", ""},
		} {
			if got, _, err := h.run(tt.id, "env", time.Minute, tt.name); err != nil || got != tt.want+"\n" {
				t.Errorf("%s: %q, %v, want %q", tt.name, got, err, tt.want)
			}
		}
		h.restart()
	}
}

func (h *host) create(p airlock.Principal) airlock.Sandbox {
	h.t.Helper()
	sb, err := h.Create(h.t.Context(), p, want)
	if err != nil {
		h.t.Fatal(err)
	}
	return sb
}

// run runs a command of the fake guest and returns its output and its end.
func (h *host) run(id, cmd string, timeout time.Duration, args ...string) (string, *control.ExecEnd, error) {
	h.t.Helper()
	g, err := h.Open(h.t.Context(), id)
	if err != nil {
		return "", nil, err
	}
	e, err := g.Start(h.t.Context(), channel.StartRequest{Cmd: cmd, Args: args}, timeout)
	if err != nil {
		return "", nil, err
	}
	defer e.Close()
	var out strings.Builder
	for {
		ev, err := e.Recv(h.t.Context())
		if err != nil {
			return out.String(), nil, err
		}
		out.Write(ev.Data)
		if ev.End != nil {
			if _, err := e.Recv(h.t.Context()); err != io.EOF {
				h.t.Errorf("after the end: %v", err)
			}
			return out.String(), ev.End, nil
		}
	}
}

func (h *host) eventually(what string, cond func() bool) {
	h.t.Helper()
	for deadline := time.Now().Add(20 * time.Second); !cond(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			h.t.Fatalf("never: %s", what)
		}
	}
}

func code(err error) airlock.Code {
	if err == nil {
		return ""
	}
	return airlock.CodeOf(err)
}

func TestCreateRefuses(t *testing.T) {
	h := newHost(t)
	for _, c := range []struct {
		name  string
		req   control.CreateRequest
		code  airlock.Code
		field string
	}{
		{"no timeout", control.CreateRequest{}, airlock.Invalid, "timeout"},
		{"negative timeout", control.CreateRequest{Timeout: -1}, airlock.Invalid, "timeout"},
		{"timeout over a day", control.CreateRequest{Timeout: 25 * time.Hour}, airlock.Invalid, "timeout"},
		{"unknown template", control.CreateRequest{Template: "nope", Timeout: time.Minute}, airlock.NotFound, "templateID"},
		{"negative memory", control.CreateRequest{Timeout: time.Minute, Limits: airlock.Limits{MemoryMB: -1}}, airlock.Invalid, "limits.memoryMB"},
		{"huge disk", control.CreateRequest{Timeout: time.Minute, Limits: airlock.Limits{DiskMB: 1 << 30}}, airlock.Invalid, "limits.diskMB"},
		{"too little processor", control.CreateRequest{Timeout: time.Minute, Limits: airlock.Limits{CPUs: 0.01}}, airlock.Invalid, "limits.cpus"},
		{"more memory than there is", control.CreateRequest{Timeout: time.Minute, Limits: airlock.Limits{MemoryMB: 5000}}, airlock.Exhausted, "memory"},
		{"more disk than there is", control.CreateRequest{Timeout: time.Minute, Limits: airlock.Limits{DiskMB: 20000}}, airlock.Exhausted, "disk"},
		{"more processes than there are", control.CreateRequest{Timeout: time.Minute, Limits: airlock.Limits{Processes: 5000}}, airlock.Exhausted, "processes"},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := h.Create(t.Context(), alice, c.req)
			var e *airlock.Error
			if !errors.As(err, &e) || e.Code != c.code || e.Field != c.field || e.Hint == "" {
				t.Errorf("got %+v", err)
			}
			if c.code == airlock.Exhausted && e.RetryAfter != 5 {
				t.Errorf("retry after %d", e.RetryAfter)
			}
			if n := h.world.Count(); n != 0 {
				t.Errorf("%d sandboxes", n)
			}
		})
	}
}

func TestLife(t *testing.T) {
	h := newHost(t)
	sb := h.create(alice)
	if !airlock.ValidSandboxID(sb.ID) || len(sb.ID) != 21 || sb.State != airlock.Running || len(sb.AccessToken) < 40 || sb.Limits != airlock.DefaultLimits {
		t.Errorf("created %+v", sb)
	}
	out, end, err := h.run(sb.ID, "echo", 0, "hi")
	if err != nil || out != "hi\n" {
		t.Errorf("echo: %q, %v", out, err)
	}
	if diff := cmp.Diff(&control.ExecEnd{Outcome: airlock.Exited}, end); diff != "" {
		t.Error(diff)
	}
	_, end, _ = h.run(sb.ID, "exit", 0, "3")
	if diff := cmp.Diff(&control.ExecEnd{ExitCode: 3, Outcome: airlock.Exited, Message: "exit status 3"}, end); diff != "" {
		t.Error(diff)
	}
	if _, _, err := h.run(sb.ID, "nope", 0); code(err) != airlock.NotFound {
		t.Errorf("unknown command: %v", err)
	}
	if err := h.Kill(t.Context(), alice, sb.ID); err != nil {
		t.Fatal(err)
	}
	if n := h.world.Count(); n != 0 {
		t.Errorf("%d sandboxes after the kill", n)
	}
	if _, err := h.Open(t.Context(), sb.ID); code(err) != airlock.Gone {
		t.Errorf("open after the kill: %v", err)
	}
	if err := h.Kill(t.Context(), alice, sb.ID); code(err) != airlock.NotFound {
		t.Errorf("second kill: %v", err)
	}
}

func TestTeamsAreApart(t *testing.T) {
	h := newHost(t)
	sb := h.create(alice)
	for name, try := range map[string]func() error{
		"get":     func() error { _, err := h.Get(t.Context(), bob, sb.ID); return err },
		"kill":    func() error { return h.Kill(t.Context(), bob, sb.ID) },
		"timeout": func() error { _, err := h.SetTimeout(t.Context(), bob, sb.ID, 0); return err },
		"extend":  func() error { _, err := h.Extend(t.Context(), bob, sb.ID, time.Hour); return err },
		"logs":    func() error { _, err := h.Logs(t.Context(), bob, sb.ID); return err },
	} {
		if err := try(); code(err) != airlock.NotFound {
			t.Errorf("%s: %v", name, err)
		}
	}
	if list, err := h.List(t.Context(), bob); err != nil || len(list) != 0 {
		t.Errorf("bob sees %+v, %v", list, err)
	}
	if list, err := h.List(t.Context(), alice); err != nil || len(list) != 1 || list[0].ID != sb.ID {
		t.Errorf("alice sees %+v, %v", list, err)
	}
}

func TestCreateOnce(t *testing.T) {
	h := newHost(t)
	req := want
	req.Key = "k-1"
	var made [8]airlock.Sandbox
	var all sync.WaitGroup
	for i := range made {
		all.Go(func() {
			var err error
			if made[i], err = h.Create(t.Context(), alice, req); err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
	first := made[0]
	for _, sb := range made {
		if sb.ID != first.ID || sb.AccessToken != first.AccessToken {
			t.Errorf("%s and %s with one key", first.ID, sb.ID)
		}
	}
	if sb, err := h.Create(t.Context(), bob, req); err != nil || sb.ID == first.ID {
		t.Errorf("another team's key: %v, %v", sb.ID, err)
	}
	other := req
	other.Metadata = map[string]string{"a": "b"}
	if _, err := h.Create(t.Context(), alice, other); code(err) != airlock.Conflict {
		t.Errorf("another create with the key: %v", err)
	}
	h.restart()
	if sb, err := h.Create(t.Context(), alice, req); err != nil || sb.ID != first.ID {
		t.Errorf("after a restart: %v, %v", sb.ID, err)
	}
	if err := h.Kill(t.Context(), alice, first.ID); err != nil {
		t.Fatal(err)
	}
	if sb, err := h.Create(t.Context(), alice, req); err != nil || sb.ID == first.ID {
		t.Errorf("after its end: %v, %v", sb.ID, err)
	}
}

func TestAdmission(t *testing.T) {
	h := newHost(t)
	var mine []airlock.Sandbox
	for range 3 {
		mine = append(mine, h.create(alice))
	}
	_, err := h.Create(t.Context(), alice, want)
	if code(err) != airlock.Exhausted || !strings.Contains(err.Error(), "not enough sandboxes: the sandbox needs 1 and team alice has 0 of 3 left") {
		t.Errorf("over the team's share: %v", err)
	}
	h.create(bob)
	h.create(bob)
	if _, err := h.Create(t.Context(), bob, want); code(err) != airlock.Exhausted || !strings.Contains(err.Error(), "this host has 0 of 5 left") {
		t.Errorf("over the host: %v", err)
	}
	// What is adopted after a restart counts.
	h.restart()
	if _, err := h.Create(t.Context(), bob, want); code(err) != airlock.Exhausted {
		t.Errorf("after the restart: %v", err)
	}
	if err := h.Kill(t.Context(), alice, mine[0].ID); err != nil {
		t.Fatal(err)
	}
	h.create(bob)
}

func TestLeases(t *testing.T) {
	h := newHost(t)
	sb := h.create(alice)
	longer, err := h.Extend(t.Context(), alice, sb.ID, 10*time.Minute)
	if err != nil || !longer.EndAt.After(sb.EndAt.Add(8*time.Minute)) {
		t.Errorf("extend: %v, %v", longer.EndAt, err)
	}
	same, err := h.Extend(t.Context(), alice, sb.ID, time.Second)
	if err != nil || !same.EndAt.Equal(longer.EndAt) {
		t.Errorf("extend never shortens: %v, %v", same.EndAt, err)
	}
	if _, err := h.Extend(t.Context(), alice, sb.ID, 25*time.Hour); code(err) != airlock.Invalid {
		t.Errorf("extend over the most: %v", err)
	}
	if _, err := h.SetTimeout(t.Context(), alice, sb.ID, 50*time.Millisecond); err != nil {
		t.Fatal(err)
	}
	h.eventually("the sandbox ends at its time", func() bool { return h.world.Count() == 0 })
	now := h.create(alice)
	if _, err := h.SetTimeout(t.Context(), alice, now.ID, 0); err != nil {
		t.Fatal(err)
	}
	h.eventually("a timeout of 0 is now", func() bool { return h.world.Count() == 0 })
}

func TestOutcomes(t *testing.T) {
	h := newHost(t)
	req := want
	req.Limits.OutputBytes = 100_000
	sb, err := h.Create(t.Context(), alice, req)
	if err != nil {
		t.Fatal(err)
	}
	// The fake guest does not kill, so that the program ends by itself: it is cut all the same.
	out, end, err := h.run(sb.ID, "flood", 0, "10000000")
	if err != nil || len(out) != 100_000 || end.Outcome != airlock.OutputLimit || end.ExitCode != -1 {
		t.Errorf("flood: %d bytes, %+v, %v", len(out), end, err)
	}
	go func() {
		time.Sleep(50 * time.Millisecond)
		h.Kill(context.Background(), alice, sb.ID)
	}()
	_, end, err = h.run(sb.ID, "sleep", 0, "1h")
	if err != nil || end.Outcome != airlock.SandboxKilled {
		t.Errorf("kill under an exec: %+v, %v", end, err)
	}
	h.driver.Misbehave(fake.Faults{DieAfter: time.Second, DieOutcome: airlock.SandboxOOM})
	sb = h.create(alice)
	_, end, err = h.run(sb.ID, "sleep", 0, "1h")
	if err != nil || end.Outcome != airlock.SandboxOOM || !strings.Contains(end.Message, "512 MiB") {
		t.Errorf("the wall under an exec: %+v, %v", end, err)
	}
	h.eventually("what died is removed", func() bool { return h.world.Count() == 0 })
}

func TestMisbehaviour(t *testing.T) {
	for name, c := range map[string]struct {
		faults fake.Faults
		code   airlock.Code
	}{
		"the driver fails":   {fake.Faults{CreateErr: errors.New("no")}, airlock.Internal},
		"the driver is slow": {fake.Faults{CreateDelay: time.Minute}, airlock.Deadline},
		"the guest is mute":  {fake.Faults{Mute: true}, airlock.Deadline},
		"the guest is mad":   {fake.Faults{Garbage: true}, airlock.Internal},
		"the sandbox dies":   {fake.Faults{Mute: true, DieAfter: 20 * time.Millisecond}, airlock.Internal},
	} {
		t.Run(name, func(t *testing.T) {
			h := newHost(t)
			h.driver.Misbehave(c.faults)
			ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
			defer cancel()
			if _, err := h.Create(ctx, alice, want); code(err) != c.code {
				t.Errorf("got %v (%s), want %s", err, code(err), c.code)
			}
			if n := h.world.Count(); n != 0 {
				t.Errorf("%d sandboxes are left", n)
			}
			if pairs, err := h.store.Range(t.Context(), "sandbox/", "", 10); err != nil || len(pairs) != 0 {
				t.Errorf("remembered: %v, %v", pairs, err)
			}
			h.driver.Misbehave(fake.Faults{})
			for range 3 { // the reservation was given back
				h.create(alice)
			}
		})
	}
}

func TestDestroyIsTriedAgain(t *testing.T) {
	h := newHost(t)
	h.driver.Misbehave(fake.Faults{DestroyErrs: 2})
	sb := h.create(alice)
	if err := h.Kill(t.Context(), alice, sb.ID); err != nil {
		t.Fatal(err)
	}
	if n := h.world.Count(); n != 0 {
		t.Errorf("%d sandboxes are left", n)
	}
}

func TestRestart(t *testing.T) {
	h := newHost(t)
	kept := h.create(alice)
	h.driver.Misbehave(fake.Faults{LoseOnRecall: true})
	lost := h.create(alice)
	h.restart()
	got, err := h.Get(t.Context(), alice, kept.ID)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(kept, got); diff != "" {
		t.Errorf("the lease and all else is kept: %s", diff)
	}
	if out, _, err := h.run(kept.ID, "echo", 0, "same"); err != nil || out != "same\n" {
		t.Errorf("echo: %q, %v", out, err)
	}
	if _, err := h.Get(t.Context(), alice, lost.ID); code(err) != airlock.NotFound {
		t.Errorf("the lost one: %v", err)
	}
	if n := h.world.Count(); n != 1 {
		t.Errorf("%d sandboxes", n)
	}
}

func TestMany(t *testing.T) {
	h := newHost(t)
	var wg sync.WaitGroup
	for i := range 20 {
		wg.Go(func() {
			p := airlock.Principal{Team: fmt.Sprint("team", i%4), Role: airlock.Client, KeyID: "k"}
			for range 5 {
				sb, err := h.Create(t.Context(), p, want)
				if code(err) == airlock.Exhausted {
					continue
				}
				if err != nil {
					t.Error(err)
					return
				}
				if err := h.Kill(t.Context(), p, sb.ID); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	if n := h.world.Count(); n != 0 {
		t.Errorf("%d sandboxes are left", n)
	}
}
