package control_test

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/fstest"
	"time"

	"airlock.dev/airlock"
	"airlock.dev/airlock/audit"
	"airlock.dev/airlock/audit/index"
	"airlock.dev/airlock/channel"
	"airlock.dev/airlock/control"
	"airlock.dev/airlock/policy"
)

// recorded returns the trail's events about sandboxes, each in a few words.
func (h *host) recorded(query string) (all []string) {
	h.t.Helper()
	q, err := index.ParseQuery(query, time.Now())
	if err != nil {
		h.t.Fatal(err)
	}
	for s := h.log.Status(); s.Pending > 0 || s.Indexed < s.Durable; s = h.log.Status() {
		time.Sleep(time.Millisecond)
	}
	page, err := h.log.Find(h.t.Context(), q, index.Page{Limit: audit.MaxPage})
	if err != nil {
		h.t.Fatal(err)
	}
	for _, raw := range page.Events {
		var e struct {
			Seq      uint64
			Type     string
			Of       uint64
			Actor    audit.Actor
			Decision audit.Decision
			Outcome  audit.Outcome
			Sealed   []any
		}
		if err := json.Unmarshal(raw, &e); err != nil {
			h.t.Fatal(err)
		}
		what := []string{e.Type, e.Actor.Kind}
		if e.Decision.Effect != "" {
			what = append(what, e.Decision.Effect)
		}
		if e.Of != 0 || e.Type == "sandbox.budget" {
			what = append(what, strings.TrimSpace(e.Outcome.Status+" "+e.Outcome.Code))
			delete(e.Outcome.Counts, "durationMicros")
			if len(e.Outcome.Counts) > 0 {
				what = append(what, strings.Trim(fmt.Sprint(e.Outcome.Counts), "map[]"))
			}
		}
		if len(e.Sealed) > 0 {
			what = append(what, "sealed")
		}
		all = append(all, strings.Join(what, " "))
	}
	return all
}

func (h *host) permit(cedar string) {
	h.t.Helper()
	text, err := policy.ProfileText("internet")
	if err != nil {
		h.t.Fatal(err)
	}
	p, err := policy.Load(fstest.MapFS{"default.cedar": {Data: []byte(text)}, "all.cedar": {Data: []byte(cedar)}})
	if err != nil {
		h.t.Fatal(err)
	}
	h.policies = p
}

func TestRecorded(t *testing.T) {
	h := newHost(t)
	sb := h.create(alice)
	if _, _, err := h.run(sb.ID, "echo", 0, "hi"); err != nil {
		t.Fatal(err)
	}
	g, conn := h.echo(sb.ID)
	io.WriteString(conn, "12345")
	io.ReadFull(conn, make([]byte, 5))
	conn.Close()
	if _, err := g.Stat(t.Context(), channel.PathRequest{Path: "a"}); code(err) != airlock.Unimplemented {
		t.Fatal(err) // the fake guest has no files
	}
	if _, err := h.SetTimeout(t.Context(), alice, sb.ID, time.Minute); err != nil {
		t.Fatal(err)
	}
	if err := h.Kill(t.Context(), alice, sb.ID); err != nil {
		t.Fatal(err)
	}
	want := []string{
		"sandbox.create user permit",
		"sandbox.start user ok",
		"exec.start token permit sealed",
		"exec.end token ok exited bytesOut:3",
		"port.serve visitor permit",
		"port.end visitor ok bytesIn:5 bytesOut:5",
		"file.stat token permit sealed",
		"file.end token error unimplemented",
		"sandbox.timeout user permit",
		"sandbox.kill user permit",
		"sandbox.end system",
	}
	if got := h.recorded("sandbox=" + sb.ID); !slices.Equal(got, want) {
		t.Errorf("got\n  %s\nwant\n  %s", strings.Join(got, "\n  "), strings.Join(want, "\n  "))
	}
}

func TestDenied(t *testing.T) {
	h := newHost(t)
	sb := h.create(alice)
	g, err := h.Open(t.Context(), sb.ID)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name, cedar string
		act         func() error
	}{
		{"create", `@id("no") forbid (principal, action == Action::"sandbox:create", resource) when { context.memoryMB > 100 };`, func() error { _, err := h.Create(t.Context(), bob, want); return err }},
		{"exec", `@id("no") forbid (principal, action == Action::"exec:start", resource) when { context.program like "*curl" };`, func() error { _, _, err := h.run(sb.ID, "/usr/bin/curl", 0); return err }},
		{"input", `@id("no") forbid (principal, action == Action::"exec:input", resource);`, func() error { return g.Input(t.Context(), channel.ProcessRef{PID: 1}, strings.NewReader("x")) }},
		{"metrics", `@id("no") forbid (principal, action == Action::"sandbox:metrics", resource);`, func() error {
			_, err := h.Metrics(t.Context(), alice, sb.ID, time.Time{}, time.Now())
			return err
		}},
		{"metric inside", `@id("no") forbid (principal, action == Action::"sandbox:metrics", resource);`, func() error { _, err := g.Metric(t.Context()); return err }},
		{"usage", `@id("no") forbid (principal, action == Action::"sandbox:metrics", resource);`, func() error { _, err := g.Usage(t.Context()); return err }},
		{"connect", `@id("no") forbid (principal, action == Action::"sandbox:connect", resource);`, func() error { _, err := h.Connect(t.Context(), alice, sb.ID, time.Minute); return err }},
		{"environment", `@id("no") forbid (principal, action == Action::"sandbox:get", resource);`, func() error { _, err := g.Env(t.Context()); return err }},
		{"output", `@id("no") forbid (principal, action == Action::"exec:output", resource);`, func() error { _, _, err := h.run(sb.ID, "echo", 0); return err }},
		{"attach", `@id("no") forbid (principal, action == Action::"exec:output", resource);`, func() error { _, err := g.Attach(t.Context(), channel.ProcessRef{PID: 1}, 0); return err }},
		{"visit", `@id("no") forbid (principal, action == Action::"port:serve", resource);`, func() error { return g.MayServe(t.Context(), "public", 80) }},
		{"compose", `@id("no") forbid (principal, action == Action::"file:remove", resource) when { resource.path == "/home/user/b" };`, func() error {
			_, err := g.Compose(t.Context(), channel.ComposeRequest{Sources: []string{"a", "b"}, Destination: "c"})
			return err
		}},
		{"read", `@id("no") forbid (principal, action == Action::"file:download", resource) when { resource.path like "/home/user/secret*" };`, func() error {
			_, _, err := g.ReadFile(t.Context(), channel.ReadRequest{PathRequest: channel.PathRequest{Path: "x/../secret/key"}})
			return err
		}},
		{"write", `@id("no") forbid (principal, action in Action::"file:*", resource) when { resource.path == "/etc/passwd" };`, func() error {
			_, err := g.WriteFile(t.Context(), channel.WriteRequest{PathRequest: channel.PathRequest{Path: "/etc/passwd"}}, strings.NewReader("x"))
			return err
		}},
		{"port", `@id("no") forbid (principal, action == Action::"port:serve", resource) when { context.caller == "public" };`, func() error { _, err := g.DialPort(t.Context(), "public", 7); return err }},
		{"watch", `@id("no") forbid (principal, action == Action::"file:watch", resource);`, func() error {
			_, err := g.Watch(t.Context(), "", channel.WatchCommand{Path: "/"})
			return err
		}},
		{"kill", `@id("no") forbid (principal, action == Action::"sandbox:kill", resource) when { resource.template == "base" };`, func() error { return h.Kill(t.Context(), alice, sb.ID) }},
		{"an erroring forbid", `@id("no") forbid (principal, action == Action::"exec:start", resource) when { 9223372036854775807 + 1 > 0 };`, func() error { _, _, err := h.run(sb.ID, "echo", 0); return err }},
		{"list", `@id("no") forbid (principal, action == Action::"exec:list", resource);`, func() error { _, err := g.Processes(t.Context()); return err }},
	} {
		h.permit(c.cedar)
		before := len(h.recorded("status=denied"))
		err := c.act()
		if code(err) != airlock.Denied || !strings.Contains(err.Error(), "no") {
			t.Errorf("%s: %v", c.name, err)
		}
		if got := h.recorded("status=denied"); len(got) != before+1 {
			t.Errorf("%s: recorded %d times", c.name, len(got)-before)
		}
	}
	h.policies = policy.Builtin()
	if out, _, err := h.run(sb.ID, "echo", 0, "alive"); err != nil || out != "alive\n" {
		t.Errorf("%q %v", out, err)
	}
}

// TestOnlyNarrower: what a client asks for never widens what the operator
// permits, and binds the client's own sandbox.
func TestOnlyNarrower(t *testing.T) {
	h := newHost(t)
	no := false
	sb, err := h.Create(t.Context(), alice, control.CreateRequest{Timeout: time.Minute, Profile: "offline", Network: airlock.Network{AllowPublicTraffic: &no}})
	if err != nil {
		t.Fatal(err)
	}
	if sb.Profile != "offline" {
		t.Errorf("%+v", sb)
	}
	if _, err := h.Create(t.Context(), alice, control.CreateRequest{Timeout: time.Minute, Profile: "everything"}); code(err) != airlock.Invalid {
		t.Errorf("an unknown profile: %v", err)
	}
	h.restart() // the next server holds it to the same
	if got, err := h.Get(t.Context(), alice, sb.ID); err != nil || got.Profile != "offline" {
		t.Errorf("%+v %v", got, err)
	}
}

// broken is a trail whose disk is full.
type broken struct {
	mu   sync.Mutex
	owed []string
}

var errFull = airlock.Errorf(airlock.Unavailable, "refused: the audit log cannot take it")

func (*broken) Append(context.Context, audit.Event) (audit.Receipt, error) {
	return audit.Receipt{}, errFull
}
func (*broken) Queue(context.Context, audit.Event) (uint64, error) { return 0, errFull }
func (b *broken) Owe(_ context.Context, e audit.Event) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.owed = append(b.owed, e.Type)
}

// TestTrailBroken: what cannot be recorded does not happen; what ends something
// does.
func TestTrailBroken(t *testing.T) {
	h := newHost(t)
	sb := h.create(alice)
	trail := &broken{}
	h.trail = trail
	h.restart()
	g, err := h.Open(t.Context(), sb.ID)
	if err != nil {
		t.Fatal(err)
	}
	for name, act := range map[string]func() error{
		"create":  func() error { _, err := h.Create(t.Context(), alice, want); return err },
		"exec":    func() error { _, _, err := h.run(sb.ID, "echo", 0); return err },
		"port":    func() error { _, err := g.DialPort(t.Context(), "public", 7); return err },
		"stat":    func() error { _, err := g.Stat(t.Context(), channel.PathRequest{Path: "/"}); return err },
		"timeout": func() error { _, err := h.SetTimeout(t.Context(), alice, sb.ID, time.Hour); return err },
	} {
		if err := act(); code(err) != airlock.Unavailable {
			t.Errorf("%s: %v", name, err)
		}
	}
	if n := h.world.Count(); n != 1 {
		t.Errorf("%d sandboxes", n)
	}
	if err := h.Kill(t.Context(), alice, sb.ID); err != nil {
		t.Error(err)
	}
	trail.mu.Lock()
	defer trail.mu.Unlock()
	if got := strings.Join(trail.owed, " "); got != "sandbox.kill sandbox.end" {
		t.Errorf("owed: %s", got)
	}
}

func TestUnrecorded(t *testing.T) {
	h := newHost(t)
	h.trail = control.Unrecorded{}
	h.restart()
	sb := h.create(alice)
	g, err := h.Open(t.Context(), sb.ID)
	if err != nil {
		t.Fatal(err)
	}
	if out, _, err := h.run(sb.ID, "echo", 0, "hi"); err != nil || out != "hi\n" {
		t.Errorf("%q %v", out, err)
	}
	if _, err := g.DialPort(t.Context(), "public", 7); code(err) != airlock.Denied {
		t.Errorf("a port: %v", err)
	}
}
