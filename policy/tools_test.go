package policy

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestExplain(t *testing.T) {
	ceiling := mustParse(t, `
@id("a-other-principal") permit (principal is App, action, resource);
@id("b-other-action") permit (principal, action in [Action::"db:*", Action::"http:request"], resource);
@id("c-other-resource") permit (principal, action, resource == Host::"b.example");
@id("d-other-port") permit (principal, action == Action::"net:connect", resource) when { context.protocol == "tcp" && context.port == 80 };
@id("e-unless") permit (principal, action == Action::"net:connect", resource) unless { context.port == 1 || context.ip.isInRange(ip("10.0.0.0/8")) };
@id("f-error") forbid (principal is Sandbox, action, resource) when { principal.template == "x" };
@id("g-team") permit (principal in Team::"research", action, resource);
@id("h-other-team") permit (principal in Team::"sales", action, resource);
`)
	f := someFacts()
	f.Sandbox.Template = ""
	x := Effective{Ceiling: ceiling, Request: mustProfile(t, "offline")}.Explain(f, connect("a.example", "10.0.0.1", 443))
	if x.Decision.Effect != Deny || !slices.Equal(x.Decision.Policies, []string{"ceiling/f-error"}) {
		t.Errorf("decision %+v", x.Decision)
	}
	var got []string
	for _, p := range x.Policies {
		state := "no: "
		if p.Applies {
			state = "yes"
		}
		got = append(got, p.Policy+" "+string(p.Effect)+" "+state+p.Part+" "+p.Why)
	}
	want := []string{
		`ceiling/a-other-principal permit no: principal the principal "Sandbox::i1" is not of type App`,
		`ceiling/b-other-action permit no: action the action "Action::net:connect" is not in [Action::"db:*", Action::"http:request"]`,
		`ceiling/c-other-resource permit no: resource the resource "Host::a.example" is not Host::"b.example"`,
		`ceiling/d-other-port permit no: condition when { context.port == 80 } is false`,
		`ceiling/e-unless permit no: condition unless { context.ip.isInRange(ip("10.0.0.0/8")) } is true`,
		`ceiling/f-error deny no: condition when { principal.template == "x" } cannot be evaluated`,
		`ceiling/g-team permit yes `,
		`ceiling/h-other-team permit no: principal the principal "Sandbox::i1" is not in Team::"sales"`,
		`request/ports-answer permit no: action the action "Action::net:connect" is not Action::"port:serve"`,
		`request/secrets-at-their-place permit no: action the action "Action::net:connect" is not Action::"secret:use"`,
		`request/team-creates permit no: action the action "Action::net:connect" is not in [Action::"sandbox:create", Action::"sandbox:list"]`,
		`request/team-uses-files permit no: action the action "Action::net:connect" is not in Action::"file:*"`,
		`request/team-uses-sandboxes permit no: action the action "Action::net:connect" is not in [Action::"sandbox:*", Action::"exec:*"]`,
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	if x := (Effective{}).Explain(f, Call{Action: "net:fly"}); x.Decision.Effect != Deny || len(x.Policies) != 0 {
		t.Errorf("an odd call is explained as %+v", x)
	}
}

func TestQuestion(t *testing.T) {
	q, err := ParseQuestion([]byte(`{"team":"research","network":{"denyOut":["0.0.0.0/0"]},"call":{"principal":{"type":"Sandbox","id":"i9"},"action":"dns:resolve","resource":{"type":"Host","id":"a"}}}`))
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(Facts{Team: "research", Sandbox: Sandbox{ID: "i9", Template: "base"}}, q.Facts); diff != "" {
		t.Error(diff)
	}
	e, err := q.Under(Builtin())
	if err != nil {
		t.Fatal(err)
	}
	if d := e.Decide(q.Facts, q.Call); !slices.Equal(d.Policies, []string{"request/network.deny-names"}) {
		t.Errorf("%+v", d)
	}
	for _, odd := range []string{``, `[]`, `{"cal":{}}`, `{} {}`, `{"network":{"allow":1}}`, `{"profile":"open"}`} {
		if _, err := ParseQuestion([]byte(odd)); err == nil {
			t.Errorf("%s is a question", odd)
		}
	}
}

func TestCompare(t *testing.T) {
	const base = permitAll + noMail
	for _, tt := range []struct {
		name, before, after string
		verdict             string
		changes             []string
		found               []string // "action: was -> would"
	}{
		{"the same in other words", base, noMail + "// text\n" + permitAll, SamePolicies, nil, nil},
		{"a permit more", noMail, base, OnlyWidens, []string{"all added: a new permit: can only widen"}, []string{"net:connect: deny -> permit"}},
		{"a forbid more", permitAll, base, OnlyNarrows, []string{"no-mail added: a new forbid: can only narrow"}, []string{"net:connect: permit -> deny"}},
		{"a forbid less", base, permitAll, OnlyWidens, []string{"no-mail removed: a forbid less: can only widen"}, []string{"net:connect: deny -> permit"}},
		{"a reason", base, permitAll + `@reason("x")` + noMail, SameMeaning, []string{"no-mail changed: it applies to the same calls: neither wider nor narrower"}, nil},
		{"a condition more", permitAll, permitAll[:len(permitAll)-1] + ` when { principal is Sandbox };`, OnlyNarrows, []string{"all changed: it applies to fewer calls: can only narrow"}, []string{"app:approve: permit -> deny"}},
		{"a part of a condition less", `@id("a") permit (principal, action == Action::"net:connect", resource) when { context.port == 80 && context.protocol == "tcp" };`,
			`@id("a") permit (principal, action == Action::"net:connect", resource) when { context.port == 80 };`, OnlyWidens,
			[]string{"a changed: it applies to more calls: can only widen"}, []string{"net:connect: deny -> permit"}},
		{"an action more", `@id("a") permit (principal, action == Action::"net:connect", resource);`, `@id("a") permit (principal, action in [Action::"net:connect", Action::"dns:resolve"], resource);`, OnlyWidens,
			[]string{"a changed: it applies to more calls: can only widen"}, []string{"dns:resolve: deny -> permit"}},
		{"another host", `@id("a") permit (principal, action == Action::"dns:resolve", resource) when { resource.name == "a.example" };`,
			`@id("a") permit (principal, action == Action::"dns:resolve", resource) when { resource.name like "*.b.example" };`, BothWays,
			[]string{"a changed: it applies to other calls: may widen and narrow"}, []string{"dns:resolve: deny -> permit", "dns:resolve: permit -> deny"}},
		{"a smaller network", `@id("a") permit (principal, action == Action::"net:connect", resource) when { context.ip.isInRange(ip("10.0.0.0/8")) };`,
			`@id("a") permit (principal, action == Action::"net:connect", resource) when { context.ip.isInRange(ip("10.1.0.0/16")) };`, BothWays,
			[]string{"a changed: it applies to other calls: may widen and narrow"}, []string{"net:connect: permit -> deny"}},
		{"a limit more", `@id("a") permit (principal, action == Action::"db:select", resource is Table);`, `@id("a") @limit("10") permit (principal, action == Action::"db:select", resource is Table);`, OnlyNarrows,
			[]string{"a changed: it applies to the same calls, with other obligations: can only narrow"}, []string{"db:select: permit -> permit with limit 10"}},
		{"a hold less", `@id("a") @hold("x") permit (principal, action == Action::"db:select", resource == Table::"a/b/c");`, `@id("a") permit (principal, action == Action::"db:select", resource == Table::"a/b/c");`, OnlyWidens,
			[]string{"a changed: it applies to the same calls, with other obligations: can only widen"}, []string{"db:select: hold with hold x -> permit"}},
		{"a team", permitAll, `@id("all") permit (principal in Team::"research", action == Action::"dns:resolve", resource);`, OnlyNarrows,
			[]string{"all changed: it applies to fewer calls: can only narrow"}, []string{"dns:resolve: permit -> deny"}},
	} {
		d := Compare(mustParse(t, tt.before), mustParse(t, tt.after))
		if d.Verdict != tt.verdict {
			t.Errorf("%s: verdict %q", tt.name, d.Verdict)
		}
		var changes []string
		for _, c := range d.Policies {
			changes = append(changes, c.Policy+" "+c.Change+": "+c.Meaning)
		}
		if diff := cmp.Diff(tt.changes, changes); diff != "" {
			t.Errorf("%s: %s", tt.name, diff)
		}
		var found []string
		for _, f := range d.Found {
			found = append(found, f.Action+": "+f.Was+" -> "+f.Would)
			if len(f.Examples) == 0 || f.Count < len(f.Examples) {
				t.Errorf("%s: found %+v", tt.name, f)
			}
		}
		for _, want := range tt.found {
			if !slices.Contains(found, want) {
				t.Errorf("%s: probes found %v, not %s", tt.name, found, want)
			}
		}
		if tt.found == nil && found != nil {
			t.Errorf("%s: probes found %v", tt.name, found)
		}
		// What is exact and what is found must not contradict each other.
		for _, f := range d.Found {
			if widened := strings.HasPrefix(f.Was, "deny"); widened && d.Verdict == OnlyNarrows || !widened && strings.HasPrefix(f.Would, "deny") && d.Verdict == OnlyWidens {
				t.Errorf("%s: %s, but found %+v", tt.name, d.Verdict, f)
			}
		}
	}
}

// TestExamplesSayWhatDecided: else a forbid of one program looks like one of all.
func TestExamplesSayWhatDecided(t *testing.T) {
	for _, tt := range []struct{ forbid, was, want string }{
		{`action == Action::"exec:start", resource) when { context.program == "ls" };`, "permit", `exec:start on Sandbox::"probe" by Team::"probe" with program "ls"`},
		{`action == Action::"sandbox:create", resource) when { context.memoryMB > 512 && context.internet };`, "permit", `sandbox:create on Team::"probe" by Team::"probe" with internet true, memoryMB 513`},
		{`action == Action::"net:connect", resource) when { context.port == 25 };`, "permit", `net:connect on Host::"probe.example" by Sandbox::"probe" (ip 198.51.100.7, port 25)`},
		{`action == Action::"exec:list", resource) when { resource.hasTag("env") && resource.getTag("env") == "prod" };`, "permit", `exec:list on Sandbox::"probe" by Team::"probe" with label "env" "prod"`},
		{`action == Action::"sandbox:kill", resource) when { principal is User && principal.role == "auditor" };`, "permit", `sandbox:kill on Sandbox::"probe" by User::"probe" with role "auditor"`},
	} {
		d := Compare(mustParse(t, permitAll), mustParse(t, permitAll+`@id("no") forbid (principal, `+tt.forbid))
		if len(d.Found) != 1 || d.Found[0].Was != tt.was || !slices.Contains(d.Found[0].Examples, tt.want) {
			t.Errorf("%s: no example is %q: %+v", tt.forbid, tt.want, d.Found)
		}
	}
}

func TestCompareProfiles(t *testing.T) {
	names := ProfileNames()
	if d := Compare(mustProfile(t, names[0]), mustProfile(t, names[2])); d.Verdict != OnlyWidens || d.Probes == 0 || d.Probes > maxProbes {
		t.Errorf("%s after %d probes", d.Verdict, d.Probes)
	}
	if d := Compare(mustProfile(t, names[2]), mustProfile(t, names[0])); d.Verdict != OnlyNarrows {
		t.Error(d.Verdict)
	}
	d := Compare(mustProfile(t, names[1]), mustProfile(t, names[2]))
	if d.Verdict != BothWays {
		t.Error(d.Verdict)
	}
	for _, f := range d.Found { // the profiles are ordered, though their structure does not tell
		if f.Was != "deny" || f.Would != "permit" {
			t.Errorf("packages is not narrower than internet: %+v", f)
		}
	}
}

func TestReplay(t *testing.T) {
	at := time.Date(2026, 12, 2, 10, 0, 0, 0, time.UTC)
	was := Builtin()
	internet := mustProfile(t, "internet")
	var recorded []Recorded
	for i, c := range []Call{
		connect("a.example", "93.184.216.34", 443),
		connect("a.example", "93.184.216.34", 25),
		resolve("a.example"),
		connect("a.example", "10.0.0.1", 25),
		{Principal: Entity{"Execution", "e1"}, Action: "db:select", Resource: Entity{"Table", "a/b/c"}},
	} {
		recorded = append(recorded, Recorded{Seq: uint64(i), Time: at, Facts: someFacts(), Call: c, Request: internet.Text(),
			Decision: Effective{Ceiling: was.For("research"), Request: internet}.Decide(someFacts(), c)})
	}
	// One act without a request, one of a request that no longer means anything.
	recorded = append(recorded,
		Recorded{Seq: 5, Time: at, Facts: someFacts(), Call: create(), Decision: Effective{Ceiling: was.For("research")}.Decide(someFacts(), create())},
		Recorded{Seq: 6, Time: at, Facts: someFacts(), Call: resolve("a.example"), Request: "permit", Decision: Decision{Effect: Permit}})
	replay := func(files map[string]string) []string {
		draft, err := Load(dir(files))
		if err != nil {
			t.Fatal(err)
		}
		got := []string{}
		for c := range Replay(draft, slices.Values(recorded)) {
			got = append(got, string('0'+rune(c.Seq))+" "+string(c.Was.Effect)+" -> "+c.Would.brief()+" by "+strings.Join(c.Would.Policies, ","))
		}
		return got
	}
	for _, tt := range []struct {
		name  string
		files map[string]string
		want  []string
	}{
		{"the same", map[string]string{"README.md": ""}, []string{"6 permit -> deny by "}},
		{"no mail", map[string]string{"all.cedar": noMail}, []string{"1 permit -> deny by ceiling/no-mail", "6 permit -> deny by "}},
		{"wider alone changes nothing: the requests did not ask", map[string]string{"default.cedar": permitAll}, []string{"6 permit -> deny by "}},
		{"a hold", map[string]string{"default.cedar": `@id("h") @hold("x") permit (principal, action == Action::"net:connect", resource);` + strings.Replace(permitAll, ";", ` unless { action in Action::"sandbox:*" };`, 1)},
			[]string{"0 permit -> hold with hold x by ceiling/all,ceiling/h,request/public-addresses", "1 permit -> hold with hold x by ceiling/all,ceiling/h,request/public-addresses",
				"5 permit -> deny by ", "6 permit -> deny by "}},
		{"another team's file", map[string]string{"teams/sales.cedar": noMail}, []string{"6 permit -> deny by "}},
	} {
		if diff := cmp.Diff(tt.want, replay(tt.files)); diff != "" {
			t.Errorf("%s: %s", tt.name, diff)
		}
	}
	for range Replay(was, slices.Values(recorded)) {
		break // a reader that stops is no error
	}
}

// What Compare calls exact is never contradicted by a call that it decides.
// Calls that cannot be evaluated are outside what it says.
func FuzzCompare(f *testing.F) {
	f.Add(permitAll, permitAll+noMail)
	f.Add(`@id("a") @limit("5") permit (principal, action in Action::"db:*", resource in Table::"a/b/c") when { principal in Team::"t" };`,
		`@id("a") permit (principal is Execution, action in [Action::"db:select"], resource is Column) unless { context has rows && context.rows > 5 };`)
	f.Add(`@id("a") forbid (principal is User in Team::"t", action, resource) unless { principal.role == "operator" || false };`,
		`@id("a") @hold("x") permit (principal == User::"k", action == Action::"app:run", resource) when { principal.role like "op*" && true };`)
	f.Fuzz(func(t *testing.T, before, after string) {
		if len(before)+len(after) > 2000 {
			return
		}
		old, err := Parse("old", []byte(before))
		if err != nil {
			return
		}
		now, err := Parse("new", []byte(after))
		if err != nil {
			return
		}
		d := Compare(old, now)
		if (d.Verdict == SamePolicies) != (old.Text() == now.Text()) {
			t.Errorf("verdict %s", d.Verdict)
		}
		for _, found := range d.Found {
			widened := found.Was == "deny"
			narrowed := found.Would == "deny"
			if d.Verdict == SameMeaning || widened && d.Verdict == OnlyNarrows || narrowed && d.Verdict == OnlyWidens {
				if strings.Contains(before+after, "+") || strings.Contains(before+after, "-") || strings.Contains(before+after, "*") {
					return // arithmetic may overflow
				}
				t.Errorf("%s, but %+v\n%s\n%s", d.Verdict, found, before, after)
			}
		}
	})
}
