package control_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/fstest"
	"time"

	"airlock.dev/airlock"
	"airlock.dev/airlock/control"
	"airlock.dev/airlock/gateway/wire"
	"airlock.dev/airlock/policy"
)

// ceiling replaces the operator's policies: the profile internet, and more.
func (h *host) ceiling(more string) {
	h.t.Helper()
	text, err := policy.ProfileText("internet")
	if err != nil {
		h.t.Fatal(err)
	}
	p, err := policy.Load(fstest.MapFS{"default.cedar": {Data: []byte(text + more)}})
	if err != nil {
		h.t.Fatal(err)
	}
	h.policies = p
}

func request(sandbox, host, ip, class, method string) wire.Attempt {
	return wire.Attempt{Sandbox: sandbox, Action: "http:request", Host: host, IP: ip, Class: class, Port: 443, Scheme: "https", Method: method, Path: "/people/7", Query: "q=mine"}
}

func TestCrossings(t *testing.T) {
	h := newHost(t)
	h.ceiling(`
		@id("no-delete") @reason("nothing is deleted from here")
		forbid (principal, action == Action::"http:request", resource) when { context.method == "DELETE" };
		@id("the-lan") permit (principal, action in [Action::"net:connect", Action::"http:request"], resource) when { context.ip.isInRange(ip("10.1.0.0/16")) };
		@id("by-name") permit (principal, action == Action::"http:request", resource) when { resource.name == "intern.example" };
		@id("pinned") @passthrough("") permit (principal, action == Action::"net:connect", resource) when { resource.name == "pinned.example" };`)
	sb := h.create(alice)
	for _, c := range []struct {
		name   string
		try    wire.Attempt
		permit bool
		says   string
	}{
		{"a public address", request(sb.ID, "example.com", "93.184.216.34", "public", "GET"), true, ""},
		{"a forbidden method", request(sb.ID, "example.com", "93.184.216.34", "public", "DELETE"), false, "nothing is deleted from here"},
		{"a private address", request(sb.ID, "10.9.0.1", "10.9.0.1", "private", "GET"), false, "nothing in the operator's policy permits"},
		{"one that the ceiling names, but not the request", request(sb.ID, "10.1.0.1", "10.1.0.1", "private", "GET"), false, "nothing in the policy that was asked for permits"},
		{"a name that leads to a private one", request(sb.ID, "intern.example", "10.9.0.1", "private", "GET"), false, "permits"},
		{"what the gateway refused", func() wire.Attempt {
			a := request(sb.ID, "example.com", "", "", "GET")
			a.Refused = "the host disagrees"
			return a
		}(), false, "the host disagrees"},
		{"a name", wire.Attempt{Sandbox: sb.ID, Action: "dns:resolve", Host: "example.com", Type: "A"}, true, ""},
		{"no crossing", wire.Attempt{Sandbox: sb.ID, Action: "sandbox:kill", Host: "example.com"}, false, "which is no crossing"},
		{"another's sandbox", request("inobody", "example.com", "93.184.216.34", "public", "GET"), false, "the sandbox has ended"},
		{"a host that is none", wire.Attempt{Sandbox: sb.ID, Action: "dns:resolve", Host: "exa mple.com", Type: "A"}, false, "is not one that policies can judge"},
	} {
		v := h.Cross(t.Context(), c.try)
		if v.Permit != c.permit || !strings.Contains(v.Reason, c.says) {
			t.Errorf("%s: permit %v, %q", c.name, v.Permit, v.Reason)
		}
		if v.Permit && c.try.Action == "http:request" {
			h.End(wire.End{Sandbox: sb.ID, Event: v.Event, Status: 200, BytesOut: 5, BytesIn: 7})
			h.End(wire.End{Sandbox: sb.ID, Event: v.Event, Status: 500}) // it ends once
		}
	}
	got := h.recorded("action=http:request")
	got = append(got, h.recorded("type=http.end")...)
	if want := []string{
		"http.request sandbox permit sealed", "http.request sandbox deny sealed", "http.request sandbox deny sealed", "http.request sandbox deny sealed",
		"http.request sandbox deny sealed", "http.request sandbox deny sealed", "http.end sandbox ok bytesIn:7 bytesOut:5 status:200",
	}; !slices.Equal(got, want) {
		t.Errorf("the trail has\n%s", strings.Join(got, "\n"))
	}

	for _, c := range []struct {
		host string
		port uint16
		want wire.Mode
	}{{"example.com", 443, wire.Any}, {"example.com", 22, wire.Any}, {"pinned.example", 443, wire.Passthrough}} {
		a := wire.Attempt{Sandbox: sb.ID, Host: c.host, IP: "93.184.216.34", Class: "public", Port: c.port}
		if v := h.Admit(t.Context(), a); !v.Permit || v.Mode != c.want {
			t.Errorf("admit %s:%d: %+v, want %s", c.host, c.port, v, c.want)
		}
	}
	off, err := h.Create(t.Context(), alice, control.CreateRequest{Timeout: time.Minute, Profile: "offline"})
	if err != nil {
		t.Fatal(err)
	}
	a := wire.Attempt{Sandbox: off.ID, Host: "example.com", IP: "93.184.216.34", Class: "public", Port: 443}
	if v := h.Admit(t.Context(), a); v.Mode != wire.Terminate {
		t.Errorf("offline, a port whose answers tell: %+v", v)
	}
	if a.Port = 22; h.Admit(t.Context(), a).Permit {
		t.Error("offline, another port is admitted")
	}
	if got := h.recorded("type=net.connect"); !slices.Equal(got, []string{"net.connect sandbox deny"}) {
		t.Errorf("what was not admitted is recorded as %q", got)
	}
}

// A path with a slash within a segment is permitted if both ways to read it are.
func TestEncodedSlashes(t *testing.T) {
	h := newHost(t)
	h.ceiling(`
		@id("no-admin") @reason("the administration is closed")
		forbid (principal, action == Action::"http:request", resource) when { context.path like "/admin/*" };
		@id("no-group") @reason("the group is closed")
		forbid (principal, action == Action::"http:request", resource) when { context.path like "/secret%2F*" };
		@id("ask") @hold("ops")
		permit (principal, action == Action::"http:request", resource) when { context.path like "/releases/*" };
		@id("ask-others") @hold("owners")
		permit (principal, action == Action::"http:request", resource) when { context.path like "*%2Fdelete" };
		@id("no-keys") @reason("it has no keys")
		forbid (principal, action == Action::"secret:use", resource) when { context.path like "/keys/*" };`)
	h.hold = time.Millisecond
	h.restart()
	sb := h.create(alice)
	for _, c := range []struct {
		path   string
		permit bool
		says   string
	}{
		{"/api/v4/projects/group%2Fproject", true, ""},
		{"/admin%2Fusers", false, "there are servers that read the path in another way: policy ceiling/no-admin forbids"},
		{"/secret%2Fproject", false, "the group is closed"},
		{"/secret/project", true, ""},
		{"/admin/users", false, "the administration is closed"},
		{"/releases%2Fnew", false, "there are servers that read the path in another way"},
		{"/releases/1%2Fdelete", false, "there are servers that read the path in another way"},
		{"/other/1%2Fdelete", false, "nobody of owners approved it"},
	} {
		a := request(sb.ID, "example.com", "93.184.216.34", "public", "GET")
		a.Path = c.path
		if v := h.Cross(t.Context(), a); v.Permit != c.permit || !strings.Contains(v.Reason, c.says) {
			t.Errorf("%s: permit %v, %q", c.path, v.Permit, v.Reason)
		}
	}
	use := request(sb.ID, "example.com", "", "", "GET")
	use.Action, use.Secret, use.Path, use.Location = "secret:use", "token", "/keys%2Fall", "header Authorization"
	if v := h.Cross(t.Context(), use); v.Permit || !strings.Contains(v.Reason, "it has no keys") {
		t.Errorf("the use of a secret: permit %v, %q", v.Permit, v.Reason)
	}

	// What is open is read both ways, too, when policies change.
	h.Through(t.Context(), &way{h: h, doors: map[string]wire.Door{}})
	a := request(sb.ID, "example.com", "93.184.216.34", "public", "GET")
	a.Path = "/group%2Fproject"
	v := h.Cross(t.Context(), a)
	if !v.Permit {
		t.Fatal(v.Reason)
	}
	h.permit(`@id("stop") forbid (principal, action == Action::"http:request", resource) when { context.path like "/group/*" };`)
	h.Reconsider(t.Context())
	h.eventually("it is broken off", func() bool {
		return slices.ContainsFunc(h.recorded("type=http.end"), func(e string) bool { return strings.HasPrefix(e, "http.end sandbox error revoked") })
	})
}

// Whatever ends a crossing is recorded: the end of its sandbox, and that of the
// gateway.
func TestCrossingsThatEndUnasked(t *testing.T) {
	h := newHost(t)
	sb := h.create(alice)
	if v := h.Cross(t.Context(), request(sb.ID, "a.example", "93.184.216.34", "public", "GET")); !v.Permit {
		t.Fatal(v)
	}
	h.Broken()
	if v := h.Cross(t.Context(), request(sb.ID, "b.example", "93.184.216.34", "public", "GET")); !v.Permit {
		t.Fatal(v)
	}
	if err := h.Kill(t.Context(), alice, sb.ID); err != nil {
		t.Fatal(err)
	}
	if got, want := h.recorded("type=http.end"), []string{"http.end sandbox error unavailable", "http.end sandbox error sandbox_gone"}; !slices.Equal(got, want) {
		t.Errorf("ends %q, want %q", got, want)
	}
}

func TestApprovals(t *testing.T) {
	h := newHost(t)
	h.ceiling(`
		@id("ask") @hold("data-owners") permit (principal, action == Action::"http:request", resource) when { resource.name == "crm.example" };`)
	maker := airlock.Principal{Team: "alice", Role: airlock.Client, KeyID: "a", Owner: "al"}
	sb := h.create(maker)
	approver := airlock.Principal{Team: "data-owners", Role: airlock.Approver, KeyID: "d"}

	cross := func(ctx context.Context) chan wire.Verdict {
		out := make(chan wire.Verdict, 1)
		go func() { out <- h.Cross(ctx, request(sb.ID, "crm.example", "93.184.216.34", "public", "GET")) }()
		return out
	}
	waiting := func() control.Approval {
		t.Helper()
		for {
			if all := h.Approvals(approver); len(all) == 1 {
				return all[0]
			}
			time.Sleep(time.Millisecond)
		}
	}
	out := cross(t.Context())
	w := waiting()
	if got := fmt.Sprint(w.Action, w.Resource, w.Context["method"], w.Context["path"], w.Approvers, w.Team, w.Sandbox == sb.ID); got != "http:request"+"crm.example"+"GET"+"/people/7"+"[data-owners]"+"alice"+"true" {
		t.Errorf("what waits: %s", got)
	}
	for name, p := range map[string]airlock.Principal{
		"an operator":                 {Team: "data-owners", Role: airlock.Operator, KeyID: "o"},
		"a client":                    {Team: "data-owners", Role: airlock.Client, KeyID: "c"},
		"an approver of other things": {Team: "others", Role: airlock.Approver, KeyID: "e"},
		"the key that made it":        {Team: "data-owners", Role: airlock.Approver, KeyID: "a"},
		"who made it, by another key": {Team: "data-owners", Role: airlock.Approver, KeyID: "f", Owner: "al"},
	} {
		if err := h.Decide(t.Context(), p, w.ID, true, ""); airlock.CodeOf(err) != airlock.Denied {
			t.Errorf("%s may approve: %v", name, err)
		}
		if p.Role == airlock.Approver && len(h.Approvals(p)) != 0 {
			t.Errorf("%s sees it", name)
		}
	}
	if err := h.Decide(t.Context(), approver, w.ID, true, "ticket 7"); err != nil {
		t.Fatal(err)
	}
	if v := <-out; !v.Permit {
		t.Errorf("approved, and: %+v", v)
	}
	if err := h.Decide(t.Context(), approver, w.ID, true, ""); airlock.CodeOf(err) != airlock.NotFound {
		t.Errorf("approved twice: %v", err)
	}

	out = cross(t.Context())
	if err := h.Decide(t.Context(), airlock.Principal{Team: "x", Name: "data-owners", Role: airlock.Approver, KeyID: "n"}, waiting().ID, false, "no"); err != nil {
		t.Fatal(err)
	}
	if v := <-out; v.Permit || !strings.Contains(v.Reason, "key n denied it") {
		t.Errorf("denied, and: %+v", v)
	}

	ctx, cancel := context.WithCancel(t.Context())
	out = cross(ctx)
	waiting()
	cancel()
	if v := <-out; v.Permit {
		t.Error("permitted after its client left")
	}
	if n := len(h.Approvals(approver)); n != 0 {
		t.Errorf("%d wait that nobody waits for", n)
	}

	// What changed meanwhile counts.
	out = cross(t.Context())
	w = waiting()
	h.permit(`@id("stop") forbid (principal, action == Action::"http:request", resource);`)
	if err := h.Decide(t.Context(), approver, w.ID, true, ""); err != nil {
		t.Fatal(err)
	}
	if v := <-out; v.Permit || !strings.Contains(v.Reason, "forbids") {
		t.Errorf("approved after it was forbidden: %+v", v)
	}
	h.ceiling(`
		@id("mine") @hold("data-owners") permit (principal, action == Action::"http:request", resource) when { resource.name == "crm.example" };`)
	out = cross(t.Context())
	w = waiting()
	h.ceiling(`
		@id("ask") @hold("lawyers") permit (principal, action == Action::"http:request", resource) when { resource.name == "crm.example" };`)
	if err := h.Decide(t.Context(), approver, w.ID, true, ""); err != nil {
		t.Fatal(err)
	}
	if v := <-out; v.Permit || !strings.Contains(v.Reason, "others have to approve it now") {
		t.Errorf("approved by who may not any more: %+v", v)
	}
	want := []string{
		"http.request sandbox hold sealed", "approval.grant user ok", "http.request sandbox permit", "sealed",
	}
	got := strings.Join(h.recorded("sandbox="+sb.ID+" type=http.request"), "\n") + strings.Join(h.recorded("type=approval.*"), "\n")
	for _, w := range want {
		if !strings.Contains(got, w) {
			t.Errorf("the trail lacks %q:\n%s", w, got)
		}
	}
	if got := h.recorded("type=approval.* actor=d"); len(got) != 3 {
		t.Errorf("%d decisions of d are recorded", len(got))
	}
}

// A crossing that nobody approves is denied in time, and they have a bound.
func TestApprovalsAreBounded(t *testing.T) {
	h := newHost(t)
	h.hold = 300 * time.Millisecond
	h.restart()
	h.ceiling(`
		@id("ask") @hold("data-owners") permit (principal, action == Action::"http:request", resource) when { resource.name == "crm.example" };`)
	sb := h.create(alice)
	const many = 20
	verdicts := make(chan wire.Verdict, many)
	for range many {
		go func() {
			verdicts <- h.Cross(t.Context(), request(sb.ID, "crm.example", "93.184.216.34", "public", "GET"))
		}()
	}
	reasons := map[string]int{}
	for range many {
		v := <-verdicts
		if v.Permit {
			t.Fatal("permitted")
		}
		reason, _, _ := strings.Cut(v.Reason, ":")
		reasons[fmt.Sprint(v.Status, " ", reason)]++
	}
	if reasons["0 nobody of data-owners approved it within 300ms"] != 16 || reasons["429 too many requests wait for approval"] != 4 {
		t.Errorf("verdicts: %v", reasons)
	}
}

// What a client asks for can make more wait, but not choose who may approve
// what the operator has held.
func TestClientsDoNotChooseApprovers(t *testing.T) {
	h := newHost(t)
	h.ceiling(`
		@id("ask") @hold("data-owners") permit (principal, action == Action::"http:request", resource) when { resource.name == "crm.example" };`)
	sb, err := h.Create(t.Context(), airlock.Principal{Team: "alice", Role: airlock.Client, KeyID: "a"}, control.CreateRequest{Timeout: time.Minute, Profile: "internet", Policy: `
		@id("mine") @hold("friends") permit (principal, action == Action::"http:request", resource);`})
	if err != nil {
		t.Fatal(err)
	}
	out := make(chan wire.Verdict, 1)
	go func() { out <- h.Cross(t.Context(), request(sb.ID, "crm.example", "93.184.216.34", "public", "GET")) }()
	owner := airlock.Principal{Team: "data-owners", Role: airlock.Approver, KeyID: "d"}
	friend := airlock.Principal{Team: "friends", Role: airlock.Approver, KeyID: "f"}
	var all []control.Approval
	for len(all) == 0 {
		time.Sleep(time.Millisecond)
		all = append(h.Approvals(owner), h.Approvals(friend)...)
	}
	if err := h.Decide(t.Context(), friend, all[0].ID, true, ""); airlock.CodeOf(err) != airlock.Denied {
		t.Errorf("a friend of the client's approves what waits for the operator's data-owners: %v", err)
		t.Logf("%+v", <-out)
	}
}

// What an operator forbids names no other address.
func TestForbidsNameNoAddress(t *testing.T) {
	h := newHost(t)
	req := want
	req.Network.AllowOut = []string{"10.0.0.0/8"}
	sb, err := h.Create(t.Context(), alice, req)
	if err != nil {
		t.Fatal(err)
	}
	others := `@id("all") permit (principal, action, resource);
		@id("no") forbid (principal, action, resource) when { context has ip && (context.ip.isInRange(ip("127.0.0.0/8")) || context.ip.isInRange(ip("169.254.0.0/16")) || context.ip.isInRange(ip("240.0.0.0/4"))) };`
	for _, tt := range []struct {
		policies string
		permit   bool
	}{
		{others, false},
		{others + `@id("lan") permit (principal, action, resource) when { context has ip && context.ip.isInRange(ip("10.9.0.0/16")) };`, false},
		{`@id("lan") permit (principal, action, resource) when { context has ip && context.ip.isInRange(ip("10.9.0.0/16")) };`, true},
		{`@id("most") permit (principal, action, resource) unless { context has ip && context.ip.isInRange(ip("224.0.0.0/3")) };`, false},
	} {
		h.ceiling(tt.policies)
		if v := h.Cross(t.Context(), request(sb.ID, "10.9.0.1", "10.9.0.1", "private", "GET")); v.Permit != tt.permit || !v.Permit && !strings.Contains(v.Reason, "does not name it") {
			t.Errorf("%s: permit %v, %q", tt.policies, v.Permit, v.Reason)
		}
	}
}

// What a client asks for names no address for its operator: neither what it
// allows, nor what it denies.
func TestOnlyTheOperatorNamesAddresses(t *testing.T) {
	h := newHost(t)
	h.ceiling(`
		@id("all") permit (principal, action, resource);`)
	all := `@id("a") permit (principal, action, resource);`
	for name, r := range map[string]control.CreateRequest{
		"allowOut": {Network: airlock.Network{AllowOut: []string{"10.0.0.0/8"}}},
		"denyOut":  {Policy: all, Network: airlock.Network{DenyOut: []string{"127.0.0.0/8", "169.254.0.0/16", "240.0.0.0/4"}}},
		"a policy": {Policy: `@id("b") permit (principal, action, resource) when { context has ip && context.ip.isInRange(ip("10.0.0.0/8")) };`},
	} {
		r.Timeout = time.Minute
		sb, err := h.Create(t.Context(), alice, r)
		if err != nil {
			t.Fatal(err)
		}
		if v := h.Cross(t.Context(), request(sb.ID, "10.9.0.1", "10.9.0.1", "private", "GET")); v.Permit || !strings.Contains(v.Reason, "does not name it") {
			t.Errorf("%s: permit %v, %q", name, v.Permit, v.Reason)
		}
	}
}
