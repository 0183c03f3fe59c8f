package control_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"airlock.dev/airlock"
	"airlock.dev/airlock/audit"
	"airlock.dev/airlock/audit/audittest"
	"airlock.dev/airlock/control"
	"airlock.dev/airlock/gateway/wire"
)

// way is a gateway that lets nothing through and breaks off what it is told.
type way struct {
	h  *host
	mu sync.Mutex
	// doors is what it knows of each, and broken what it was told.
	doors  map[string]wire.Door
	broken []uint64
	ends   sync.WaitGroup // of what was broken off
	// opened and set are called, if they are given, when it is told of a door.
	opened func()
	set    func(sandbox string) error
}

func (w *way) Open(ctx context.Context, d wire.Door, f *os.File) error {
	defer f.Close()
	if w.opened != nil {
		w.opened()
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.doors[d.Sandbox] = d
	return nil
}

func (w *way) Set(_ context.Context, d wire.Door) error {
	if w.set != nil {
		if err := w.set(d.Sandbox); err != nil {
			return err
		}
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.doors[d.Sandbox] = d
	return nil
}

func (w *way) Break(_ context.Context, sandbox string, events []uint64) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.broken = append(w.broken, events...)
	for _, e := range events {
		w.ends.Go(func() {
			w.h.End(wire.End{Sandbox: sandbox, Event: e, BytesIn: 7, Error: "what had permitted it was changed"})
		})
	}
	return nil
}

func (w *way) Drop(sandbox string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.doors, sandbox)
}

// cut returns and forgets what was broken off, when all of it has ended.
func (w *way) cut() []uint64 {
	w.ends.Wait()
	w.mu.Lock()
	defer w.mu.Unlock()
	cut := w.broken
	w.broken = nil
	slices.Sort(cut)
	return cut
}

func newWay(t testing.TB) (*host, *way) {
	h := newHost(t)
	w := &way{h: h, doors: map[string]wire.Door{}}
	h.Through(t.Context(), w)
	return h, w
}

const public = "93.184.216.34"

func TestSetNetwork(t *testing.T) {
	h, w := newWay(t)
	sb := h.create(alice)
	cross := func(a wire.Attempt) uint64 {
		t.Helper()
		v := h.Cross(t.Context(), a)
		if !v.Permit {
			t.Fatalf("%s is denied: %s", a.Host, v.Reason)
		}
		return v.Event
	}
	tcp := wire.Attempt{Sandbox: sb.ID, Action: "net:connect", Host: "b.example", IP: public, Class: "public", Port: 22, Protocol: "tcp"}
	stays := cross(request(sb.ID, "a.example", public, "public", "GET"))
	goes := []uint64{cross(tcp), cross(request(sb.ID, "b.example", public, "public", "GET"))}

	only := airlock.Network{DenyOut: []string{"0.0.0.0/0"}, AllowOut: []string{"a.example"}}
	if err := h.SetNetwork(t.Context(), alice, sb.ID, only); err != nil {
		t.Fatal(err)
	}
	if cut := w.cut(); !slices.Equal(cut, goes) {
		t.Errorf("broken off: %v, want %v", cut, goes)
	}
	for _, a := range []wire.Attempt{tcp, request(sb.ID, "b.example", public, "public", "GET"), {Sandbox: sb.ID, Action: "dns:resolve", Host: "b.example", Type: "A"}} {
		if v := h.Cross(t.Context(), a); v.Permit || !strings.Contains(v.Reason, "request/network.deny") {
			t.Errorf("%s of %s afterwards: %+v", a.Action, a.Host, v)
		}
	}
	h.End(wire.End{Sandbox: sb.ID, Event: stays, Status: 200})
	cross(request(sb.ID, "a.example", public, "public", "GET"))

	// It is one decision of the control plane, and one of the trail.
	for _, c := range []struct {
		who  airlock.Principal
		id   string
		n    airlock.Network
		code airlock.Code
	}{
		{bob, sb.ID, only, airlock.NotFound},
		{alice, "inone", only, airlock.NotFound},
		{alice, sb.ID, airlock.Network{DenyOut: []string{"a.example"}}, airlock.Invalid},
	} {
		if err := h.SetNetwork(t.Context(), c.who, c.id, c.n); code(err) != c.code {
			t.Errorf("%s, %s: %v", c.who.Team, c.id, err)
		}
	}
	h.ceiling(`@id("fixed") forbid (principal, action == Action::"sandbox:network", resource);`)
	if err := h.SetNetwork(t.Context(), alice, sb.ID, airlock.Network{}); code(err) != airlock.Denied {
		t.Errorf("a change that the ceiling forbids: %v", err)
	}
	if got, err := h.Get(t.Context(), alice, sb.ID); err != nil || fmt.Sprint(got.Network.AllowOut) != "[a.example]" {
		t.Errorf("%+v %v", got.Network, err)
	}
	if got, want := append(h.recorded("type=sandbox.network"), h.recorded("type=sandbox.changed")...), []string{
		"sandbox.network user permit", "sandbox.network user deny", "sandbox.changed user ok",
	}; !slices.Equal(got, want) {
		t.Errorf("recorded %q, want %q", got, want)
	}
	h.eventually("the ends are recorded", func() bool { return len(h.recorded("type=net.end"))+len(h.recorded("type=http.end")) == 3 })
	if got, want := append(h.recorded("type=net.end"), h.recorded("type=http.end")...), []string{
		"net.end sandbox error revoked bytesIn:7 bytesOut:0", "http.end sandbox error revoked bytesIn:7 bytesOut:0", "http.end sandbox ok bytesIn:0 bytesOut:0 status:200",
	}; !slices.Equal(slices.Sorted(slices.Values(got)), slices.Sorted(slices.Values(want))) {
		t.Errorf("recorded %q, want %q", got, want)
	}

	// The next server goes on from there.
	h.ceiling("")
	h.restart()
	h.Through(t.Context(), w)
	if v := h.Cross(t.Context(), tcp); v.Permit {
		t.Error("a restart forgets what the client closed")
	}
	// Everything that is not given is cleared, but for what is not of the way out.
	if err := h.SetNetwork(t.Context(), alice, sb.ID, airlock.Network{}); err != nil {
		t.Fatal(err)
	}
	if v := h.Cross(t.Context(), tcp); !v.Permit {
		t.Errorf("open again, and: %s", v.Reason)
	}
}

// What a client asks for while its sandbox runs is within the ceiling as well.
func TestSetNetworkWidensNothing(t *testing.T) {
	h, _ := newWay(t)
	h.ceiling(`@id("closed") forbid (principal, action in [Action::"net:connect", Action::"http:request", Action::"dns:resolve"], resource) when { resource.name == "closed.example" };`)
	sb := h.create(alice)
	yes := true
	for _, n := range []airlock.Network{
		{AllowOut: []string{"closed.example"}},
		{AllowOut: []string{"0.0.0.0/0", "10.0.0.0/8"}},
		{DenyOut: []string{"0.0.0.0/0"}, AllowOut: []string{"*.example", "10.0.0.1"}},
		{AllowInternet: &yes},
		{Rules: []airlock.HeaderRule{{Host: "closed.example", Headers: map[string]string{"Authorization": "x"}}}},
	} {
		if err := h.SetNetwork(t.Context(), alice, sb.ID, n); err != nil {
			t.Fatal(err)
		}
		for _, a := range []wire.Attempt{
			request(sb.ID, "closed.example", public, "public", "GET"),
			{Sandbox: sb.ID, Action: "dns:resolve", Host: "closed.example", Type: "A"},
			request(sb.ID, "10.0.0.1", "10.0.0.1", "private", "GET"),
			request(sb.ID, "169.254.169.254", "169.254.169.254", "link-local", "GET"),
		} {
			if v := h.Cross(t.Context(), a); v.Permit {
				t.Errorf("with %+v, %s of %s is permitted", n, a.Action, a.Host)
			}
		}
	}
}

func TestSetNetworkKeepsWhatIsNotOfTheWayOut(t *testing.T) {
	h, _ := newWay(t)
	no := false
	sb, err := h.Create(t.Context(), alice, control.CreateRequest{Timeout: time.Minute, Network: airlock.Network{AllowPublicTraffic: &no, MaskRequestHost: "localhost", HTTPSPorts: []int{8443}, AllowOut: []string{"1.1.1.1"}}})
	if err != nil {
		t.Fatal(err)
	}
	if err := h.SetNetwork(t.Context(), alice, sb.ID, airlock.Network{}); err != nil {
		t.Fatal(err)
	}
	got, err := h.Get(t.Context(), alice, sb.ID)
	if err != nil || got.PublicTraffic() || got.Network.MaskRequestHost != "localhost" || len(got.Network.HTTPSPorts) != 1 || got.Network.AllowOut != nil {
		t.Errorf("%+v %v", got.Network, err)
	}
	g, err := h.Open(t.Context(), sb.ID)
	if err != nil {
		t.Fatal(err)
	}
	if err := g.MayServe(t.Context(), "public", 80); code(err) != airlock.Denied {
		t.Errorf("its ports are open to all: %v", err)
	}
}

// The operator's policies take effect on what is open, too.
func TestReconsider(t *testing.T) {
	h, w := newWay(t)
	h.ceiling(`
		@id("pinned") @passthrough("") permit (principal, action == Action::"net:connect", resource) when { resource.name == "pinned.example" };
		@id("ask") @hold("owners") permit (principal, action == Action::"http:request", resource) when { resource.name == "held.example" };`)
	sb, other := h.create(alice), h.create(bob)
	events := map[string]uint64{}
	for name, a := range map[string]wire.Attempt{
		"deleted":  request(sb.ID, "a.example", public, "public", "DELETE"),
		"read":     request(sb.ID, "a.example", public, "public", "GET"),
		"pinned":   {Sandbox: sb.ID, Action: "net:connect", Host: "pinned.example", IP: public, Class: "public", Port: 443, Protocol: "tls"},
		"in TLS":   {Sandbox: sb.ID, Action: "net:connect", Host: "a.example", IP: public, Class: "public", Port: 993, Protocol: "tls"},
		"another":  request(other.ID, "a.example", public, "public", "DELETE"),
		"free":     request(sb.ID, "free.example", public, "public", "GET"),
		"approved": request(sb.ID, "held.example", public, "public", "GET"),
	} {
		verdict := make(chan wire.Verdict, 1)
		go func() { verdict <- h.Cross(t.Context(), a) }()
		if name == "approved" {
			approver := airlock.Principal{Team: "owners", Role: airlock.Approver, KeyID: "o"}
			h.eventually("it waits", func() bool { return len(h.Approvals(approver)) == 1 })
			if err := h.Decide(t.Context(), approver, h.Approvals(approver)[0].ID, true, ""); err != nil {
				t.Fatal(err)
			}
		}
		v := <-verdict
		if !v.Permit {
			t.Fatalf("%s: %s", name, v.Reason)
		}
		events[name] = v.Event
	}
	h.Reconsider(t.Context())
	if cut := w.cut(); cut != nil {
		t.Errorf("nothing changed, and %v are broken off of %v", cut, events)
	}
	h.ceiling(`
		@id("no-delete") forbid (principal, action == Action::"http:request", resource) when { context.method == "DELETE" };
		@id("ask") @hold("owners") permit (principal, action == Action::"http:request", resource) when { ["held.example", "free.example"].contains(resource.name) };`)
	h.Reconsider(t.Context())
	want := []uint64{events["deleted"], events["another"], events["pinned"], events["free"]}
	slices.Sort(want)
	if cut := w.cut(); !slices.Equal(cut, want) {
		t.Errorf("broken off %v, want %v of %v", cut, want, events)
	}
}

// late is a trail in which something else happens once a crossing is recorded.
type late struct {
	control.Trail
	then func()
}

func (l *late) Append(ctx context.Context, e audit.Event) (audit.Receipt, error) {
	r, err := l.Trail.Append(ctx, e)
	if then := l.then; then != nil {
		l.then = nil
		then()
	}
	return r, err
}

// A change that comes between the decision of a crossing and its begin finds it.
func TestChangeWhileDeciding(t *testing.T) {
	h := newHost(t)
	trail := &late{Trail: h.log}
	h.trail = trail
	h.restart()
	w := &way{h: h, doors: map[string]wire.Door{}}
	h.Through(t.Context(), w)
	sb := h.create(alice)
	trail.then = func() {
		if err := h.SetNetwork(t.Context(), alice, sb.ID, airlock.Network{DenyOut: []string{"0.0.0.0/0"}}); err != nil {
			t.Error(err)
		}
	}
	if v := h.Cross(t.Context(), request(sb.ID, "a.example", public, "public", "GET")); v.Permit {
		t.Error("it is permitted by what holds no more")
	}
	if cut := w.cut(); cut != nil {
		t.Errorf("the gateway is told to break off what it never began: %v", cut)
	}
	if got, want := h.recorded("type=http.end"), []string{"http.end sandbox error revoked"}; !slices.Equal(got, want) {
		t.Errorf("recorded %q, want %q", got, want)
	}
}

// Values of headers are with the gateway, and nowhere in the clear.
func TestRulesAreSealed(t *testing.T) {
	h, w := newWay(t)
	const secret, another = "Bearer value-of-a-secret", "Bearer another-value"
	req := want
	req.Key = "k-1"
	req.Network.Rules = []airlock.HeaderRule{{Host: "a.example", Headers: map[string]string{"Authorization": secret}}}
	sb, err := h.Create(t.Context(), alice, req)
	if err != nil {
		t.Fatal(err)
	}
	door := func(value string) {
		t.Helper()
		w.mu.Lock()
		defer w.mu.Unlock()
		if got := w.doors[sb.ID].Rules; len(got) != 1 || got[0].Host != "a.example" || !maps.Equal(got[0].Headers, map[string]string{"Authorization": value}) {
			t.Errorf("the gateway has %+v", got)
		}
	}
	door(secret)
	if again, err := h.Create(t.Context(), alice, req); err != nil || again.ID != sb.ID {
		t.Errorf("the same create again: %s, %v", again.ID, err)
	}
	other := req
	other.Network.Rules = []airlock.HeaderRule{{Host: "a.example", Headers: map[string]string{"Authorization": another}}}
	if _, err := h.Create(t.Context(), alice, other); code(err) != airlock.Conflict {
		t.Errorf("a create with the same key and another value: %v", err)
	}
	if err := h.SetNetwork(t.Context(), alice, sb.ID, other.Network); err != nil {
		t.Fatal(err)
	}
	door(another)
	if again, err := h.Create(t.Context(), alice, req); err != nil || again.ID != sb.ID {
		t.Errorf("the same create after a change: %s, %v", again.ID, err)
	}
	clear(w.doors)
	h.restart()
	h.Through(t.Context(), w)
	door(another)
	if again, err := h.Create(t.Context(), alice, req); err != nil || again.ID != sb.ID {
		t.Errorf("the same create after a restart: %s, %v", again.ID, err)
	}
	pairs, err := h.store.Range(t.Context(), "", "", 100)
	if err != nil || len(pairs) == 0 {
		t.Fatal(pairs, err)
	}
	for _, p := range pairs {
		for _, word := range []string{secret, another, "value", "a.example"} {
			if bytes.Contains(p.Value, []byte(word)) {
				t.Errorf("the store has %q in %s", word, p.Key)
			}
		}
	}

	// One whose secrets cannot be opened does not run without them.
	h.keys = audittest.Config(t).Sealer.(control.Sealer)
	h.restart()
	if _, err := h.Get(t.Context(), alice, sb.ID); code(err) != airlock.NotFound {
		t.Errorf("a sandbox with secrets that nobody can open: %v", err)
	}
	h.keys = nil
	h.restart()
	if _, err := h.Create(t.Context(), alice, req); code(err) != airlock.Unimplemented {
		t.Errorf("rules without keys: %v", err)
	}
}

// A gateway that does not take what changed keeps nothing open that is denied,
// and no other sandbox from what changed.
func TestChangesThatFail(t *testing.T) {
	h, w := newWay(t)
	h.ceiling(`@id("all") @inject("token") permit (principal, action == Action::"http:request", resource);`)
	first, second, third := h.create(alice), h.create(alice), h.create(alice)
	var told []string
	w.set = func(sandbox string) error {
		told = append(told, sandbox)
		return errors.New("not now")
	}
	if err := h.SecretChanged(t.Context(), "alice", "token"); err == nil {
		t.Error("nobody says that it failed")
	}
	wanted := []string{first.ID, second.ID, third.ID}
	slices.Sort(told)
	slices.Sort(wanted)
	if !slices.Equal(told, wanted) {
		t.Errorf("told are %v, want %v", told, wanted)
	}
	v := h.Cross(t.Context(), request(first.ID, "a.example", public, "public", "GET"))
	no := false
	if err := h.SetNetwork(t.Context(), alice, first.ID, airlock.Network{AllowInternet: &no}); err == nil {
		t.Error("the network is set at a gateway that failed")
	}
	if cut := w.cut(); !slices.Equal(cut, []uint64{v.Event}) {
		t.Errorf("broken off is %v, want %v", cut, v.Event)
	}
}

// A secret that changes while a sandbox is made is changed for it, too.
func TestSecretChangesDuringCreate(t *testing.T) {
	h, w := newWay(t)
	h.ceiling(`@id("all") @inject("token") permit (principal, action == Action::"http:request", resource);`)
	var told []string
	w.set = func(sandbox string) error {
		told = append(told, sandbox)
		return nil
	}
	h.create(alice)
	if len(told) != 0 {
		t.Errorf("told without a change: %v", told)
	}
	w.opened = func() {
		if err := h.SecretChanged(t.Context(), "bob", "token"); err != nil {
			t.Error(err)
		}
	}
	if sb := h.create(bob); !slices.Equal(told, []string{sb.ID}) {
		t.Errorf("told are %v, want %s", told, sb.ID)
	}
}

// BenchmarkReconsider decides what 1,000 open requests of a sandbox would be
// decided anew.
func BenchmarkReconsider(b *testing.B) {
	h, _ := newWay(b)
	sb := h.create(alice)
	for range 1000 {
		if v := h.Cross(b.Context(), request(sb.ID, "a.example", public, "public", "GET")); !v.Permit {
			b.Fatal(v.Reason)
		}
	}
	for b.Loop() {
		h.Reconsider(b.Context())
	}
}
