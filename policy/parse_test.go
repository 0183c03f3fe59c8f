package policy

import (
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"airlock.dev/airlock"
)

func TestParseRefuses(t *testing.T) {
	const head = "@id(\"a\")\n"
	for _, tt := range []struct {
		name, text string
		want       []string // the problems, from the position on
	}{
		{"nothing", "// nothing\n", []string{`there is no policy in it: to deny everything write @id("nothing") forbid (principal, action, resource);`}},
		{"syntax", head + "permit (principal, action, resource)", []string{`2:37: this is not Cedar's language: the text ends where ` + "`;`" + ` is expected: a policy is @id("…") permit or forbid (principal, action, resource) when { … } unless { … };`}},
		{"an end in a condition", head + "permit (principal, action, resource) when { context.", []string{`2:53: this is not Cedar's language: the text ends in the middle of a policy (expected ident): a policy is @id("…") permit or forbid (principal, action, resource) when { … } unless { … };`}},
		{"another sign", head + "permit [principal, action, resource);", []string{"2:9: this is not Cedar's language: `[` is where `(` is expected" + `: a policy is @id("…") permit or forbid (principal, action, resource) when { … } unless { … };`}},
		{"a string without an end", head + "permit (principal, action == Action::\"net", []string{"2:38: this is not Cedar's language: literal not terminated: a policy is @id(\"…\") permit or forbid (principal, action, resource) when { … } unless { … };"}},
		{"no id", "permit (principal, action, resource);", []string{`1:1: the policy has no @id: write @id("what-it-is-for") before it: the audit trail names policies by their ids`}},
		{"an id that is none", `@id("A b") permit (principal, action, resource);`, []string{`1:1: @id("A b") is no id: use 1 to 64 of a-z, 0-9, dot, _ and -, not beginning with a sign`}},
		{"an id twice", head + "permit (principal, action, resource);\n" + head + "forbid (principal, action, resource);", []string{"3:1: policy a: line 1 has a policy of the same id: give each its own @id"}},
		{"an unknown annotation", head + "@masks(\"a.b\") permit (principal, action, resource);", []string{"2:1: policy a: there is no annotation @masks: use @id, @reason, @mask, @inject, @limit, @passthrough and @hold"}},
		{"a mask that is none", head + "@mask(\"email\") permit (principal, action, resource);", []string{`2:1: policy a: @mask("email") is not understood: write @mask("table.column") or @mask("schema.table.column"); several with a comma between`}},
		{"an empty mask", head + "@mask permit (principal, action, resource);", []string{`2:1: policy a: @mask("") is not understood: write @mask("table.column") or @mask("schema.table.column"); several with a comma between`}},
		{"a secret that is none", head + "@inject(\"../key\") permit (principal, action, resource);", []string{`2:1: policy a: @inject("../key") is not understood: write @inject("name-of-the-secret"); several with a comma between`}},
		{"no limit", head + "@limit(\"0\") permit (principal, action, resource);", []string{`2:1: policy a: @limit("0") is no number of rows: write @limit("100"), from 1 to 1000000000`}},
		{"a limit with a sign", head + "@limit(\"+5\") permit (principal, action, resource);", []string{`2:1: policy a: @limit("+5") is no number of rows: write @limit("100"), from 1 to 1000000000`}},
		{"an obligation of a forbid", head + "@hold(\"owners\") forbid (principal, action, resource);", []string{"2:1: policy a: a forbid has no @hold: put it on a permit: it says what must be done with a permitted act"}},
		{"a mask of all acts", head + "@mask(\"a.b\")\npermit (principal, action, resource);", []string{"2:1: policy a: app:approve and 39 more of its actions cannot meet @mask: put it on a permit whose action is one of db:select, db:insert, db:update, db:delete"}},
		{"a limit of files", head + `@limit("5") permit (principal, action == Action::"file:download", resource);`, []string{"2:1: policy a: file:download cannot meet @limit: put it on a permit whose action is one of db:*"}},
		{"a secret for programs", head + `@inject("x") permit (principal, action in [Action::"http:*", Action::"exec:start"], resource);`, []string{"2:1: policy a: exec:start cannot meet @inject: put it on a permit whose action is one of http:request, secret:use"}},
		{"a hold of ports", head + `@hold("x") permit (principal, action in [Action::"port:*"], resource);`, []string{"2:1: policy a: port:serve cannot meet @hold: put it on a permit whose action is one of dns:*, net:*, http:*, secret:*, db:*, app:run"}},
		{"a hold of sandboxes, and a mask", head + `@hold("x") @mask("a.b") permit (principal, action == Action::"sandbox:create", resource);`, []string{
			"2:1: policy a: sandbox:create cannot meet @hold: put it on a permit whose action is one of dns:*, net:*, http:*, secret:*, db:*, app:run",
			"2:12: policy a: sandbox:create cannot meet @mask: put it on a permit whose action is one of db:select, db:insert, db:update, db:delete"}},
		{"a hold of a revocation", head + `@hold("x") permit (principal, action in [Action::"app:run", Action::"app:revoke"], resource);`, []string{"2:1: policy a: app:revoke cannot meet @hold: put it on a permit whose action is one of dns:*, net:*, http:*, secret:*, db:*, app:run"}},
		{"a reason in two lines", head + "@reason(\"a\\nb\") forbid (principal, action, resource);", []string{"2:1: policy a: @reason is empty or long or does not print: say in 1 to 200 bytes what whoever is denied shall do"}},
		{"an unknown action", head + `permit (principal, action == Action::"net:fly", resource);`, []string{
			"2:38: policy a: unrecognized action `Action::\"net:fly\"`: there are net:*, net:connect",
			"1:1: policy a: unable to find an applicable action given the policy scope constraints: no action of the policy has this type of principal and of resource: see the schema"}},
		{"an unknown type", head + `permit (principal is Robot, action, resource);`, []string{
			"2:22: policy a: unrecognized entity type `Robot`: there are Agent, App, Column, Database, Execution, Host, Path, Port, RecordSet, Routine, Sandbox, Secret, Table, Team, User",
			"1:1: policy a: unable to find an applicable action given the policy scope constraints: no action of the policy has this type of principal and of resource: see the schema"}},
		{"a misspelt attribute", head + "permit (principal, action == Action::\"net:connect\", resource)\nwhen {\n  resource.nam == \"a\" };", []string{"4:12: policy a: attribute `nam` on entity type `Host` not found: a Host has name"}},
		{"a misspelt value of the context", head + "permit (principal, action == Action::\"net:connect\", resource)\nwhen { context.prt == 1 };", []string{"3:16: policy a: attribute `prt` in context for Action::\"net:connect\" not found: the context of net:connect has egressProxy, ip, port, protocol, time"}},
		{"an optional value without a question", head + "permit (principal, action == Action::\"db:select\", resource)\nwhen { context.rows < 10 };", []string{"3:16: policy a: unable to guarantee safety of access to optional attribute `rows` in context for Action::\"db:select\": ask first whether it is there: context has x && context.x …, or hasTag before getTag"}},
		{"a label without a question", head + "permit (principal is Sandbox, action == Action::\"dns:resolve\", resource)\nwhen { principal.getTag(\"env\") == \"prod\" };", []string{"3:25: policy a: unable to guarantee safety of access to tag `\"env\"` on entity type `Sandbox`: ask first whether it is there: context has x && context.x …, or hasTag before getTag"}},
		{"types that do not fit", head + "permit (principal, action == Action::\"net:connect\", resource)\nwhen { context.port == \"443\" };", []string{"1:1: policy a: the types Long and String are not compatible: compare values of one type: the schema says which each has"}},
		{"a network that is none", head + "permit (principal, action == Action::\"net:connect\", resource)\nwhen { context.ip.isInRange(ip(\"10.0.0.0/33\")) };", []string{`3:32: policy a: error during extension function argument validation: failed to parse as IP address: ` + "`\"10.0.0.0/33\"`" + `: write ip("192.0.2.7") or ip("192.0.2.0/24")`}},
		{"an IPv4 address in IPv6", head + "forbid (principal, action == Action::\"net:connect\", resource)\nwhen { context.ip == ip(\"::ffff:102:304\") };", []string{`3:26: policy a: "::ffff:102:304" matches nothing, ever: write the address as IPv4: that is how calls have it`}},
		{"a host in capitals", head + "forbid (principal, action == Action::\"net:connect\", resource)\nwhen { resource.name == \"Example.com\" };", []string{`3:26: policy a: "Example.com" matches nothing, ever: write hosts in lower case and without a dot at the end: that is how calls have them`}},
		{"a type that does nothing of the kind", head + "permit (principal is User, action == Action::\"net:connect\", resource);", []string{"1:1: policy a: unable to find an applicable action given the policy scope constraints: no action of the policy has this type of principal and of resource: see the schema"}},
		{"text that turns round", head + "permit (principal, action, resource); // \u202e", []string{"2:42: a character that does not print: remove it; in a string write it as \\u{…}"}},
		{"zero bytes", "\x00", []string{"1:1: a character that does not print: remove it; in a string write it as \\u{…}"}},
		{"deep", head + "permit (principal, action, resource) when { " + strings.Repeat("(", 100), []string{"2:108: more than 64 brackets in each other: write several policies"}},
		{"long", head + "permit (principal, action, resource) when { " + strings.Repeat("!", 5000) + "true };", []string{"2:4141: a policy that is too long: write several policies"}},
		{"many parts", head + "permit (principal, action, resource) when { true" + strings.Repeat(" && true", 10000) + " };", []string{"1:1: policy a: its conditions have more than 16384 parts: write several policies"}},
		{"large", strings.Repeat(" ", maxText+1), []string{"262145 bytes: use at most 262144, in several files"}},
	} {
		_, err := Parse("x.cedar", []byte(tt.text))
		var problems Problems
		if !errors.As(err, &problems) {
			t.Errorf("%s: %v", tt.name, err)
			continue
		}
		if airlock.CodeOf(err) != airlock.Invalid {
			t.Errorf("%s: code %s", tt.name, airlock.CodeOf(err))
		}
		var got []string
		for _, p := range problems {
			got = append(got, strings.TrimPrefix(strings.TrimPrefix(p.String(), "x.cedar:"), " "))
		}
		if diff := cmp.Diff(tt.want, got); diff != "" {
			t.Errorf("%s: %s", tt.name, diff)
		}
	}
}

func TestCanonicalText(t *testing.T) {
	const want = `@id("a")
permit (
    principal,
    action == Action::"dns:resolve",
    resource
)
when { resource.name like "*.a\*b" };

@id("b")
@reason("no")
forbid ( principal, action, resource );
`
	s := mustParse(t, `@id("b") @reason("no") forbid(principal,action,resource); // no
@id("a") permit(principal, action==Action::"dns:resolve", resource) when { resource.name like "*.a\*b" };`)
	if s.Text() != want {
		t.Errorf("text is\n%s", s.Text())
	}
	if s.Digest() != "6ee4e5855dc2ef33a7eb595a90cdcb893c8da92cacb4fea7074c9a6c5f5ac300" { // of sha256sum
		t.Errorf("digest is %s", s.Digest())
	}
	again := mustParse(t, s.Text())
	if again.Text() != s.Text() || again.Digest() != s.Digest() {
		t.Errorf("read back it is\n%s", again.Text())
	}
}

// expressions are such as a formatter gets wrong; each is true of connect.
var expressions = []string{
	`(1 - (2 - 3)) * -4 < 5 - (4 - 3) && -9223372036854775808 < 0`, `!(!(true && false) || !true) == (1 == 2)`, `-(-(1)) == 1 && (-1 == -(1))`,
	`(if true then 1 else 2) == (if false then 1 else 1)`, `{"a b": 1, c: {d: "\"\u{301}\u{a0}"}}["a b"] == 1`, `context has "ip" || context has ip`,
	`principal in [Team::"research", Team::"sales"] && (principal is Sandbox in Team::"research")`, `(true || false) && (false || true)`, `true || false && false`,
	`[[1, 2], [3]].contains([2, 1]) && ["a"].containsAny(["a", "b"]) && !([1].isEmpty())`, `context.ip == ip("1.2.3.4") || context.ip.isInRange(ip("2001:db8::/32"))`,
	`datetime("2026-01-01T10:00:00.001+0100") < datetime("2027-01-01") && decimal("1.50").lessThan(decimal("2.0"))`,
}

func inConditions(expression string) string {
	return `@id("a") permit (principal, action == Action::"net:connect", resource) when { ` + expression + ` } unless { !(` + expression + `) };`
}

func TestCanonicalTextMeansTheSame(t *testing.T) {
	for _, expression := range expressions {
		s := mustParse(t, inConditions(expression))
		for _, set := range []*Set{s, mustParse(t, s.Text())} {
			if d := (Effective{Ceiling: set}).Decide(someFacts(), connect("a.example", "1.2.3.4", 1)); d.Effect != Permit {
				t.Errorf("%s: %s\n%s", expression, d.Reason, set.Text())
			}
			if set.Text() != s.Text() {
				t.Errorf("%s becomes\n%s", expression, set.Text())
			}
		}
	}
}

func FuzzParse(f *testing.F) {
	for _, name := range ProfileNames() {
		text, err := ProfileText(name)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(text)
	}
	f.Add(twentyPolicies())
	f.Add(`@id("a") @hold("x,y") permit (principal is Sandbox in Team::"t", action in [Action::"net:*"], resource == Host::"\u{41}\"") when { if context.ip.isIpv4() then !(context.port < -1) else {"a": [1]}.a.contains(1) } unless { context has ip.x };`)
	f.Add(`@id("a") permit (principal, action, resource) when { principal is User && principal.role like "\*\u{2a}*" };`)
	for _, condition := range expressions {
		f.Add(inConditions(condition))
	}
	f.Fuzz(func(t *testing.T, text string) {
		s, err := Parse("x", []byte(text))
		if err != nil {
			var problems Problems
			if !errors.As(err, &problems) || len(problems) == 0 || problems[0].Message == "" {
				t.Fatalf("error %v", err)
			}
			if strings.HasPrefix(problems[0].Message, "cannot be read") {
				t.Fatalf("a panic was caught: %v", err)
			}
			return
		}
		again, err := Parse("x", []byte(s.Text()))
		if err != nil {
			t.Fatalf("its own text is refused: %v\n%s", err, s.Text())
		}
		if again.Text() != s.Text() {
			t.Fatalf("read back it is\n%s\nand was\n%s", again.Text(), s.Text())
		}
		for _, c := range []Call{connect("example.com", "10.0.0.1", 443), resolve("example.com"), exec(Entity{"User", "k1"})} {
			x, y := Effective{Ceiling: s}.Decide(someFacts(), c), Effective{Ceiling: again}.Decide(someFacts(), c)
			Effective{Ceiling: s}.Explain(someFacts(), c)
			if !cmp.Equal(x, y) {
				t.Fatalf("read back it decides otherwise: %s\n%s", cmp.Diff(x, y), s.Text())
			}
		}
	})
}
