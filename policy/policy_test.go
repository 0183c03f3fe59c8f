package policy

import (
	"encoding/json"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func mustParse(t testing.TB, text string) *Set {
	t.Helper()
	s, err := Parse("test.cedar", []byte(text))
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func mustProfile(t testing.TB, name string) *Set {
	t.Helper()
	s, err := Profile(name)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// someFacts are those of a sandbox, the key of its team, and an app.
func someFacts() Facts {
	return Facts{
		Team:      "research",
		Caller:    Caller{ID: "k1", Role: "client"},
		Sandbox:   Sandbox{ID: "i1", Template: "base", Metadata: map[string]string{"env": "dev"}},
		App:       App{ID: "billing", Version: "sha256:ab"},
		Execution: Execution{ID: "e1"},
	}
}

// connect is a connection by the sandbox.
func connect(host, ip string, port int64) Call {
	return Call{Principal: Entity{"Sandbox", "i1"}, Action: "net:connect", Resource: Entity{"Host", host}, Context: Context{"ip": ip, "port": port, "protocol": "tcp"}}
}

func request(method, host, ip, path string) Call {
	return Call{Principal: Entity{"Sandbox", "i1"}, Action: "http:request", Resource: Entity{"Host", host},
		Context: Context{"ip": ip, "port": int64(443), "scheme": "https", "method": method, "path": path}}
}

func resolve(host string) Call {
	return Call{Principal: Entity{"Sandbox", "i1"}, Action: "dns:resolve", Resource: Entity{"Host", host}}
}

func serve(caller string) Call {
	return Call{Principal: Entity{"Sandbox", "i1"}, Action: "port:serve", Resource: Entity{"Port", "8000"}, Context: Context{"caller": caller}}
}

func exec(e Entity) Call {
	return Call{Principal: e, Action: "exec:start", Resource: Entity{"Sandbox", "i1"}, Context: Context{"program": "python3"}}
}

func file(action, path string) Call {
	return Call{Principal: Entity{"User", "k1"}, Action: action, Resource: Entity{"Path", path}}
}

func create() Call {
	return Call{Principal: Entity{"User", "k1"}, Action: "sandbox:create", Resource: Entity{"Team", "research"}, Context: Context{
		"template": "base", "profile": "internet", "internet": true, "publicTraffic": true, "milliCPUs": 2000, "memoryMB": 512, "diskMB": 1024, "timeoutSeconds": 300}}
}

func TestProfiles(t *testing.T) {
	const public, private = "93.184.216.34", "10.0.0.7"
	agent := someFacts()
	agent.Caller.Kind = "agent"
	other := someFacts()
	other.Caller.Team = "sales"
	for _, tt := range []struct {
		name     string
		facts    Facts
		call     Call
		permits  string // the profiles that permit it: o(ffline), p(ackages), i(nternet)
		decision string // the policy that decides where it is permitted
	}{
		{"create", someFacts(), create(), "opi", "team-creates"},
		{"create for another team", other, create(), "", ""},
		{"list", someFacts(), Call{Principal: Entity{"User", "k1"}, Action: "sandbox:list", Resource: Entity{"Team", "research"}}, "opi", "team-creates"},
		{"kill", someFacts(), Call{Principal: Entity{"User", "k1"}, Action: "sandbox:kill", Resource: Entity{"Sandbox", "i1"}}, "opi", "team-uses-sandboxes"},
		{"kill by an agent", agent, Call{Principal: Entity{"Agent", "k1"}, Action: "sandbox:kill", Resource: Entity{"Sandbox", "i1"}}, "opi", "team-uses-sandboxes"},
		{"kill by another team", other, Call{Principal: Entity{"User", "k1"}, Action: "sandbox:kill", Resource: Entity{"Sandbox", "i1"}}, "", ""},
		{"exec", someFacts(), exec(Entity{"User", "k1"}), "opi", "team-uses-sandboxes"},
		{"exec by the access token", someFacts(), exec(Entity{"Team", "research"}), "opi", "team-uses-sandboxes"},
		{"exec by an execution", someFacts(), exec(Entity{"Execution", "e1"}), "opi", "team-uses-sandboxes"},
		{"exec by another team", other, exec(Entity{"User", "k1"}), "", ""},
		{"download", someFacts(), file("file:download", "/home/user/a.csv"), "opi", "team-uses-files"},
		{"download by another team", other, file("file:download", "/home/user/a.csv"), "", ""},
		{"port", someFacts(), serve("public"), "opi", "ports-answer"},
		{"port of an execution", someFacts(), Call{Principal: Entity{"Execution", "e1"}, Action: "port:serve", Resource: Entity{"Port", "80"}, Context: Context{"caller": "token"}}, "opi", "ports-answer"},

		{"a name", someFacts(), resolve("example.com"), "i", "resolve-names"},
		{"a registry's name", someFacts(), resolve("PyPI.org."), "pi", ""},
		{"a public address", someFacts(), connect("example.com", public, 443), "i", "public-addresses"},
		{"a registry", someFacts(), connect("pypi.org", public, 443), "pi", ""},
		{"a registry by mail", someFacts(), connect("pypi.org", public, 25), "i", "public-addresses"},
		{"a registry at a private address", someFacts(), connect("pypi.org", private, 443), "", ""},
		{"to read a registry", someFacts(), request("GET", "files.pythonhosted.org", public, "/packages/a"), "pi", ""},
		{"to publish", someFacts(), request("POST", "pypi.org", public, "/legacy/"), "i", "public-addresses"},
		{"a name like a registry's", someFacts(), request("GET", "pypi.org.example.com", public, "/"), "i", "public-addresses"},

		{"private", someFacts(), connect("db", private, 5432), "", ""},
		{"loopback", someFacts(), connect("localhost", "127.0.0.1", 80), "", ""},
		{"metadata", someFacts(), request("GET", "169.254.169.254", "169.254.169.254", "/latest"), "", ""},
		{"shared", someFacts(), connect("x", "100.64.0.1", 80), "", ""},
		{"broadcast", someFacts(), connect("x", "255.255.255.255", 80), "", ""},
		{"this host", someFacts(), connect("x", "0.0.0.0", 80), "", ""},
		{"public IPv6", someFacts(), connect("x", "2606:4700::1111", 443), "i", "public-addresses"},
		{"loopback of IPv6", someFacts(), connect("x", "::1", 80), "", ""},
		{"link-local of IPv6", someFacts(), connect("x", "fe80::1", 80), "", ""},
		{"private IPv6", someFacts(), connect("x", "fd00:ec2::254", 80), "", ""},
		{"multicast of IPv6", someFacts(), connect("x", "ff02::1", 80), "", ""},
		{"IPv4 in IPv6", someFacts(), connect("x", "::ffff:169.254.169.254", 80), "", ""},
		{"public IPv4 in IPv6", someFacts(), connect("x", "::ffff:93.184.216.34", 80), "i", "public-addresses"},
		{"IPv4 by NAT64", someFacts(), connect("x", "64:ff9b::a9fe:a9fe", 80), "", ""},
		{"IPv4 by 6to4", someFacts(), connect("x", "2002:a9fe:a9fe::1", 80), "", ""},
		{"IPv4 by Teredo", someFacts(), connect("x", "2001::1", 80), "", ""},
		{"IPv4-compatible", someFacts(), connect("x", "::a9fe:a9fe", 80), "", ""},
		{"with a zone", someFacts(), connect("x", "fe80::1%eth0", 80), "", ""},

		{"a secret", someFacts(), Call{Principal: Entity{"Sandbox", "i1"}, Action: "secret:use", Resource: Entity{"Secret", "s"},
			Context: Context{"host": "example.com", "port": 443, "method": "GET", "path": "/", "location": "header"}}, "opi", "secrets-at-their-place"},
		{"a table", someFacts(), Call{Principal: Entity{"Execution", "e1"}, Action: "db:select", Resource: Entity{"Table", "crm/public/customers"}}, "", ""},
	} {
		for i, profile := range ProfileNames() {
			d := Effective{Ceiling: mustProfile(t, profile)}.Decide(tt.facts, tt.call)
			want := Deny
			if strings.Contains(tt.permits, "opi"[i:i+1]) {
				want = Permit
			}
			if d.Effect != want {
				t.Errorf("%s under %s: %s, want %s: %s", tt.name, profile, d.Effect, want, d.Reason)
			}
			if want == Permit && tt.decision != "" && !slices.Equal(d.Policies, []string{"ceiling/" + tt.decision}) {
				t.Errorf("%s under %s: decided by %v, want %s", tt.name, profile, d.Policies, tt.decision)
			}
		}
	}
}

// The two ends of a public address are those of the profiles.
func TestProfilesSayPublicAlike(t *testing.T) {
	for _, name := range []string{"packages", "internet"} {
		text, err := ProfileText(name)
		if err != nil {
			t.Fatal(err)
		}
		if !strings.Contains(text, publicOnly) {
			t.Errorf("profile %s does not have the public addresses of FromRequest", name)
		}
	}
}

func TestCeilingAndRequest(t *testing.T) {
	wide := mustParse(t, `@id("all") permit (principal, action, resource);`)
	noMail := mustParse(t, `@id("all") permit (principal, action, resource);
@id("no-mail") @reason("use an HTTP API") forbid (principal, action == Action::"net:connect", resource) when { context.port == 25 };`)
	internet := mustProfile(t, "internet")
	for _, tt := range []struct {
		name             string
		ceiling, request *Set
		call             Call
		want             Effect
		policies         []string
		reason           string
	}{
		{"both permit", wide, internet, connect("example.com", "93.184.216.34", 443), Permit, []string{"ceiling/all", "request/public-addresses"}, "permitted by ceiling/all and request/public-addresses"},
		{"only the ceiling permits", wide, internet, connect("db", "10.0.0.1", 443), Deny, nil,
			`nothing in the policy that was asked for permits net:connect on Host::"db" by Sandbox::"i1" (ip 10.0.0.1, port 443): ask for a wider profile or network when you make the sandbox`},
		{"only the request permits", internet, wide, connect("db", "10.0.0.1", 443), Deny, nil,
			`nothing in the operator's policy permits net:connect on Host::"db" by Sandbox::"i1" (ip 10.0.0.1, port 443): ask your operator for a policy of team "research" that permits it`},
		{"a forbid of the ceiling", noMail, internet, connect("example.com", "93.184.216.34", 25), Deny, []string{"ceiling/no-mail"},
			`policy ceiling/no-mail forbids net:connect on Host::"example.com" by Sandbox::"i1" (ip 93.184.216.34, port 25): use an HTTP API`},
		{"a forbid of the request", wide, noMail, connect("example.com", "93.184.216.34", 25), Deny, []string{"request/no-mail"},
			`policy request/no-mail forbids net:connect on Host::"example.com" by Sandbox::"i1" (ip 93.184.216.34, port 25): use an HTTP API`},
		{"nothing was asked for", wide, nil, connect("db", "10.0.0.1", 443), Permit, []string{"ceiling/all"}, "permitted by ceiling/all"},
		{"no ceiling", nil, wide, connect("db", "10.0.0.1", 443), Deny, nil, "no policy is loaded for the team: run `airlock policy validate` on the operator's directory"},
	} {
		d := Effective{Ceiling: tt.ceiling, Request: tt.request}.Decide(someFacts(), tt.call)
		if d.Effect != tt.want || d.Reason != tt.reason || !slices.Equal(d.Policies, tt.policies) {
			t.Errorf("%s: %s %v %q", tt.name, d.Effect, d.Policies, d.Reason)
		}
	}
	d := Effective{Ceiling: wide, Request: internet}.Decide(someFacts(), resolve("a.example"))
	if want := wide.Digest() + "+" + internet.Digest(); d.Set != want {
		t.Errorf("set %s, want %s", d.Set, want)
	}
}

// Cedar skips a policy that it cannot evaluate. Skipping a forbid would permit.
func TestErrorsDeny(t *testing.T) {
	const permit = `@id("all") permit (principal, action, resource);`
	noTemplate, noTeam, noTime := someFacts(), someFacts(), someFacts()
	noTemplate.Sandbox.Template = ""
	noTeam.Team = ""
	for _, tt := range []struct {
		name, forbid string
		facts        Facts
		call         Call
		err          string
	}{
		{"overflow", `@id("f") forbid (principal, action == Action::"net:connect", resource) when { context.port + 1 > 65536 };`,
			someFacts(), connect("a", "1.1.1.1", math.MaxInt64), "overflow"},
		{"a fact is missing", `@id("f") forbid (principal is Sandbox, action, resource) when { principal.template == "evil" };`,
			noTemplate, connect("a", "1.1.1.1", 80), "template"},
		{"the owner is missing", `@id("f") forbid (principal is Sandbox, action, resource) when { principal.team == Team::"evil" };`,
			noTeam, connect("a", "1.1.1.1", 80), "team"},
		{"an entity is missing", `@id("f") forbid (principal is Sandbox, action, resource) when { App::"unknown".team == Team::"evil" };`,
			someFacts(), connect("a", "1.1.1.1", 80), "unknown"},
		{"the time is missing", `@id("f") forbid (principal, action == Action::"net:connect", resource) when { context.time > datetime("2026-01-01") };`,
			noTime, connect("a", "1.1.1.1", 80), "time"},
		{"of a permit", `@id("f") permit (principal is Sandbox, action, resource) when { principal.template == "good" };`,
			noTemplate, connect("a", "1.1.1.1", 80), "template"},
	} {
		for name, e := range map[string]Effective{
			"ceiling": {Ceiling: mustParse(t, permit+tt.forbid)},
			"request": {Ceiling: mustParse(t, permit), Request: mustParse(t, permit+tt.forbid)},
		} {
			d := e.Decide(tt.facts, tt.call)
			if d.Effect != Deny || !slices.Equal(d.Policies, []string{name + "/f"}) || len(d.Errors) != 1 || !strings.Contains(d.Errors[0], tt.err) {
				t.Errorf("%s in the %s: %+v", tt.name, name, d)
			}
			if !strings.HasPrefix(d.Reason, "policy "+name+"/f could not be evaluated (") || !strings.HasSuffix(d.Reason, "correct the policy or the facts; until then it denies") {
				t.Errorf("%s in the %s: reason %q", tt.name, name, d.Reason)
			}
		}
	}
}

func TestOddCallsAreDenied(t *testing.T) {
	wide := Effective{Ceiling: mustParse(t, `@id("all") permit (principal, action, resource);`)}
	for _, tt := range []struct {
		name   string
		change func(*Facts, *Call)
		reason string
	}{
		{"unknown action", func(_ *Facts, c *Call) { c.Action = "net:fly" }, `there is no action "net:fly"`},
		{"a group is no action", func(_ *Facts, c *Call) { c.Action = "net:*" }, `there is no action "net:*"`},
		{"no action", func(_ *Facts, c *Call) { c.Action = "" }, `there is no action ""`},
		{"wrong principal", func(_ *Facts, c *Call) { c.Principal.Type = "User" }, `the principal of net:connect is one of Sandbox, App, Execution, not a "User"`},
		{"wrong resource", func(_ *Facts, c *Call) { c.Resource.Type = "Table" }, `the resource of net:connect is one of Host, not a "Table"`},
		{"another sandbox", func(_ *Facts, c *Call) { c.Principal.ID = "i2" }, `the principal: the facts do not describe Sandbox::"i2"`},
		{"no sandbox", func(f *Facts, c *Call) { f.Sandbox.ID, c.Principal.ID = "", "" }, `the principal: the facts do not describe Sandbox::""`},
		{"no host", func(_ *Facts, c *Call) { c.Resource.ID = "" }, `the resource: "" is no name or address of a host`},
		{"a host with a space", func(_ *Facts, c *Call) { c.Resource.ID = "a b" }, `the resource: "a b" is no name or address of a host`},
		{"a host in hexadecimal", func(_ *Facts, c *Call) { c.Resource.ID = "0x7f.0.0.1" }, `the resource: "0x7f.0.0.1" looks like an address and is not written as one: use four decimal numbers`},
		{"a host as one number", func(_ *Facts, c *Call) { c.Resource.ID = "2130706433" }, `the resource: "2130706433" looks like an address and is not written as one: use four decimal numbers`},
		{"a host in other letters", func(_ *Facts, c *Call) { c.Resource.ID = "раypal.com" }, `the resource: "раypal.com" is no name or address of a host`},
		{"no address", func(_ *Facts, c *Call) { delete(c.Context, "ip") }, "context of net:connect: ip is missing"},
		{"an address that is none", func(_ *Facts, c *Call) { c.Context["ip"] = "localhost" }, "context ip of net:connect: give an IP address"},
		{"a network for an address", func(_ *Facts, c *Call) { c.Context["ip"] = "10.0.0.0/8" }, "context ip of net:connect: give an IP address"},
		{"an address as a number", func(_ *Facts, c *Call) { c.Context["ip"] = 1 }, "context ip of net:connect: give an IP address"},
		{"a port as a string", func(_ *Facts, c *Call) { c.Context["port"] = "443" }, "context port of net:connect: give a whole number"},
		{"half a port", func(_ *Facts, c *Call) { c.Context["port"] = 443.5 }, "context port of net:connect: give a whole number"},
		{"nothing", func(_ *Facts, c *Call) { c.Context["port"] = nil }, "context port of net:connect: give a whole number"},
		{"more than the schema knows", func(_ *Facts, c *Call) { c.Context["admin"] = true }, `context of net:connect: there is no "admin", only egressProxy, ip, port, protocol, time`},
		{"a time that is none", func(_ *Facts, c *Call) { c.Context["time"] = "noon" }, "context time of net:connect: give a time such as 2026-12-02T15:04:05Z"},
		{"not UTF-8", func(_ *Facts, c *Call) { c.Context["protocol"] = "\xff" }, `context protocol of net:connect: "\xff" is not UTF-8`},
		{"long", func(_ *Facts, c *Call) { c.Context["protocol"] = strings.Repeat("x", maxString+1) }, "context protocol of net:connect: a text has 8193 bytes: at most 8192"},
		{"a caller of no kind", func(f *Facts, _ *Call) { f.Caller.Kind = "robot" }, `the facts: a caller is of kind user or agent, not "robot"`},
		{"a fact that is not UTF-8", func(f *Facts, _ *Call) { f.Team = "\xff" }, `the facts: "\xff" is not UTF-8`},
		{"many labels", func(f *Facts, _ *Call) {
			f.Sandbox.Metadata = map[string]string{}
			for i := range maxMetadata + 1 {
				f.Sandbox.Metadata[fmt.Sprint(i)] = ""
			}
		}, "the facts: a sandbox has at most 128 labels"},
		{"a request's path that steps up", func(_ *Facts, c *Call) { *c = request("GET", "a", "1.1.1.1", "/a/../b") }, "context path of http:request: a path has no . and .. in it"},
		{"a request's path that begins nowhere", func(_ *Facts, c *Call) { *c = request("GET", "a", "1.1.1.1", "a") }, "context path of http:request: a path begins with /"},
		{"a relative path", func(_ *Facts, c *Call) { *c = file("file:write", "a.csv") }, `the resource: "a.csv" is no absolute path, or has . or .. in it`},
		{"a path that steps up", func(_ *Facts, c *Call) { *c = file("file:write", "/home/../etc/passwd") }, `the resource: "/home/../etc/passwd" is no absolute path, or has . or .. in it`},
		{"a path of no sandbox", func(f *Facts, c *Call) { *c = file("file:write", "/a"); f.Sandbox = Sandbox{} }, "the resource: the facts name no sandbox that it is in"},
		{"port 0", func(_ *Facts, c *Call) { *c = serve("public"); c.Resource.ID = "0" }, `the resource: "0" is no port: give a number from 1 to 65535`},
		{"port 08000", func(_ *Facts, c *Call) { *c = serve("public"); c.Resource.ID = "08000" }, `the resource: "08000" is no port: give a number from 1 to 65535`},
		{"a table without a schema", func(_ *Facts, c *Call) {
			*c = Call{Principal: Entity{"Execution", "e1"}, Action: "db:select", Resource: Entity{"Table", "customers"}}
		}, `the resource: "customers" is no id of a Table: it is DATABASE/SCHEMA/NAME`},
		{"an agent that approves", func(f *Facts, c *Call) {
			f.Caller.Kind = "agent"
			*c = Call{Principal: Entity{"Agent", "k1"}, Action: "app:approve", Resource: Entity{"App", "billing"}}
		}, `the principal of app:approve is one of User, not a "Agent"`},
		{"an agent that says it is a user", func(f *Facts, c *Call) {
			f.Caller.Kind = "agent"
			*c = Call{Principal: Entity{"User", "k1"}, Action: "app:approve", Resource: Entity{"App", "billing"}}
		}, `the principal: the facts do not describe User::"k1"`},
	} {
		f, c := someFacts(), connect("example.com", "93.184.216.34", 443)
		if d := wide.Decide(f, c); d.Effect != Permit {
			t.Fatalf("the call that is not odd: %+v", d)
		}
		tt.change(&f, &c)
		d := wide.Decide(f, c)
		want := "the call is not one that policies can judge: " + tt.reason
		if d.Effect != Deny || d.Reason != want || len(d.Errors) != 1 {
			t.Errorf("%s: %s %q\nwant %q", tt.name, d.Effect, d.Reason, want)
		}
	}
}

func TestReadablePolicies(t *testing.T) {
	s := mustParse(t, `
@id("labels") permit (principal is Sandbox, action == Action::"dns:resolve", resource)
when { principal.hasTag("env") && principal.getTag("env") == "prod" };

@id("suffix") permit (principal, action == Action::"http:request", resource)
when { resource.name like "*.example.com" && context.method == "GET" && context.path like "/v1/*" };

@id("network") permit (principal in App::"billing", action in Action::"net:*", resource)
when { context.ip.isInRange(ip("10.1.0.0/16")) && context.port == 5432 };

@id("columns") permit (principal is Execution, action in Action::"db:*", resource in Table::"crm/public/customers");

@id("no-mail-address") permit (principal, action == Action::"db:select", resource is Table in Database::"shop")
when { context has columns && !context.columns.contains("email") };

@id("hours") permit (principal, action == Action::"app:run", resource)
when { context.time.toTime() >= duration("9h") && context.time.toTime() < duration("17h") };

@id("persons") permit (principal is User in Team::"research", action == Action::"app:approve", resource)
when { principal.role == "approver" };
`)
	prod := someFacts()
	prod.Sandbox.Metadata = map[string]string{"env": "prod"}
	approver := someFacts()
	approver.Caller.Role = "approver"
	noApp := someFacts()
	noApp.App, noApp.Execution = App{}, Execution{}
	db := func(action, typ, id string) Call {
		return Call{Principal: Entity{"Execution", "e1"}, Action: action, Resource: Entity{typ, id}}
	}
	columns := func(v any) Call {
		c := db("db:select", "Table", "shop/public/orders")
		c.Context = Context{"columns": v}
		return c
	}
	run := func(at string) Call {
		return Call{Principal: Entity{"User", "k1"}, Action: "app:run", Resource: Entity{"App", "billing"}, Context: Context{"time": at}}
	}
	approve := Call{Principal: Entity{"User", "k1"}, Action: "app:approve", Resource: Entity{"App", "billing"}}
	for _, tt := range []struct {
		facts Facts
		call  Call
		by    string // the policy that permits it
	}{
		{prod, resolve("a"), "labels"},
		{someFacts(), resolve("a"), ""},
		{someFacts(), request("GET", "api.example.com", "1.1.1.1", "/v1/x"), "suffix"},
		{someFacts(), request("GET", "API.Example.COM.", "1.1.1.1", "/v1/x"), "suffix"},
		{someFacts(), request("GET", "example.com", "1.1.1.1", "/v1/x"), ""},
		{someFacts(), request("GET", "evilexample.com", "1.1.1.1", "/v1/x"), ""},
		{someFacts(), request("POST", "api.example.com", "1.1.1.1", "/v1/x"), ""},
		{someFacts(), request("GET", "api.example.com", "1.1.1.1", "/v2"), ""},
		{someFacts(), connect("db", "10.1.2.3", 5432), "network"},
		{someFacts(), connect("db", "10.2.2.3", 5432), ""},
		{noApp, connect("db", "10.1.2.3", 5432), ""},
		{someFacts(), db("db:select", "Table", "crm/public/customers"), "columns"},
		{someFacts(), db("db:select", "Column", "crm/public/customers/email"), "columns"},
		{someFacts(), db("db:update", "RecordSet", "crm/public/customers/open"), "columns"},
		{someFacts(), db("db:select", "Table", "crm/public/orders"), ""},
		{someFacts(), columns([]string{"id", "name"}), "no-mail-address"},
		{someFacts(), columns([]any{"id"}), "no-mail-address"},
		{someFacts(), columns([]string{"id", "email"}), ""},
		{someFacts(), columns([]any{1}), ""},
		{someFacts(), columns("id"), ""},
		{someFacts(), columns(make([]string, maxList+1)), ""},
		{someFacts(), db("db:define", "Database", "crm"), ""},
		{someFacts(), run("2026-12-02T09:00:00Z"), "hours"},
		{someFacts(), run("2026-12-02T16:59:59.999999999Z"), "hours"},
		{someFacts(), run("2026-12-02T17:00:00+00:00"), ""},
		{someFacts(), run("2026-12-02T17:30:00+02:00"), "hours"},
		{approver, approve, "persons"},
		{someFacts(), approve, ""},
	} {
		d := Effective{Ceiling: s}.Decide(tt.facts, tt.call)
		want := Deny
		var by []string
		if tt.by != "" {
			want, by = Permit, []string{"ceiling/" + tt.by}
		}
		if d.Effect != want || !slices.Equal(d.Policies, by) {
			t.Errorf("%v: %s %v, want %v: %s", tt.call, d.Effect, d.Policies, by, d.Reason)
		}
	}
}

func TestObligations(t *testing.T) {
	ceiling := mustParse(t, `
@id("some") @limit("100") @mask("customers.email, customers.phone") permit (principal, action == Action::"db:select", resource);
@id("more") @limit("50") @mask("customers.email") permit (principal, action == Action::"db:select", resource is Table);
@id("write") @hold("data-owners") permit (principal, action == Action::"db:update", resource);
@id("never") @hold("nobody") permit (principal, action == Action::"db:delete", resource);
@id("secrets") @inject("crm-key") @hold("owners") permit (principal, action in [Action::"secret:*", Action::"http:*"], resource);
`)
	asked := mustParse(t, `
@id("read") @limit("500") @mask("customers.phone") permit (principal, action in [Action::"db:select", Action::"db:update"], resource);
@id("call") @inject("weather-key") permit (principal, action == Action::"secret:use", resource);`)
	for _, tt := range []struct {
		action, typ, id string
		effect          Effect
		obligations     []Obligation
	}{
		{"db:select", "Table", "crm/public/customers", Permit, []Obligation{{Kind: "limit", Limit: 50}, {Kind: "mask", Value: "customers.email"}, {Kind: "mask", Value: "customers.phone"}}},
		{"db:select", "Column", "crm/public/customers/id", Permit, []Obligation{{Kind: "limit", Limit: 100}, {Kind: "mask", Value: "customers.email"}, {Kind: "mask", Value: "customers.phone"}}},
		{"db:update", "Table", "crm/public/customers", Hold, []Obligation{{Kind: "hold", Value: "data-owners"}, {Kind: "limit", Limit: 500}, {Kind: "mask", Value: "customers.phone"}}},
		{"db:delete", "Table", "crm/public/customers", Deny, nil},
		{"secret:use", "Secret", "weather", Hold, []Obligation{{Kind: "hold", Value: "owners"}, {Kind: "inject", Value: "crm-key"}, {Kind: "inject", Value: "weather-key"}}},
	} {
		d := Effective{Ceiling: ceiling, Request: asked}.Decide(someFacts(), Call{Principal: Entity{"Execution", "e1"}, Action: tt.action, Resource: Entity{tt.typ, tt.id}, Context: circumstances[tt.action]})
		if d.Effect != tt.effect {
			t.Errorf("%s on a %s: %s: %s", tt.action, tt.typ, d.Effect, d.Reason)
		}
		if diff := cmp.Diff(tt.obligations, d.Obligations); diff != "" {
			t.Errorf("%s on a %s: %s", tt.action, tt.typ, diff)
		}
	}
}

var circumstances = map[string]Context{"secret:use": {"host": "a.example", "port": 443, "method": "GET", "path": "/", "location": "header"}}

// TestWhatCannotBeMetDenies: Parse lets no such policy through. One that comes
// all the same denies, so that what is recorded, what is queried and what a
// replay finds agree.
func TestWhatCannotBeMetDenies(t *testing.T) {
	for _, o := range []Obligation{{Kind: KindMask, Value: "a.b"}, {Kind: KindLimit, Limit: 5}, {Kind: KindInject, Value: "x"}, {Kind: KindHold, Value: "x"}} {
		s := mustParse(t, `@id("all") permit (principal, action, resource); @id("run") permit (principal, action == Action::"exec:start", resource);`)
		s.byID["run"].obligations = []Obligation{o}
		call := exec(Entity{"User", "k1"})
		got := Effective{Ceiling: s}.Decide(someFacts(), call)
		want := Decision{Effect: Deny, Policies: []string{"ceiling/run"}, Set: s.Digest(),
			Reason: `policy ceiling/run permits ` + described(call) + ` only with @` + string(o.Kind) + `, which exec:start cannot meet: remove it from the policy`}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s: %s", o.Kind, diff)
		}
		draft := &Policies{standard: s}
		recorded := Recorded{Facts: someFacts(), Call: call, Decision: got}
		for change := range Replay(draft, slices.Values([]Recorded{recorded})) {
			t.Errorf("%s: a replay finds %+v", o.Kind, change)
		}
		recorded.Decision = Decision{Effect: Permit, Obligations: []Obligation{o}}
		changes := slices.Collect(Replay(draft, slices.Values([]Recorded{recorded})))
		if len(changes) != 1 || changes[0].Would.Effect != Deny {
			t.Errorf("%s: a replay of what was recorded as a permit: %+v", o.Kind, changes)
		}
	}
}

// What is recorded today is replayed in years: it survives JSON.
func TestPlainValuesSurviveJSON(t *testing.T) {
	c := connect("example.com", "93.184.216.34", math.MaxInt64)
	c.Context["time"] = "2026-12-02T10:00:00Z"
	text, err := json.Marshal(c)
	if err != nil {
		t.Fatal(err)
	}
	const want = `{"principal":{"type":"Sandbox","id":"i1"},"action":"net:connect","resource":{"type":"Host","id":"example.com"},"context":{"ip":"93.184.216.34","port":9223372036854775807,"protocol":"tcp","time":"2026-12-02T10:00:00Z"}}`
	if string(text) != want {
		t.Errorf("call is written as %s", text)
	}
	var back Call
	if err := json.Unmarshal(text, &back); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(c, back); diff != "" {
		t.Error(diff)
	}
	d := Effective{Ceiling: mustProfile(t, "internet")}.Decide(someFacts(), c)
	text, err = json.Marshal(d)
	if err != nil {
		t.Fatal(err)
	}
	var same Decision
	if err := json.Unmarshal(text, &same); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(d, same); diff != "" {
		t.Error(diff)
	}
	for _, odd := range []string{`{"a":1.5}`, `{"a":{}}`, `{"a":[1]}`, `{"a":null}`, `{"a":9223372036854775808}`, `[]`} {
		var x Context
		if err := json.Unmarshal([]byte(odd), &x); err == nil {
			t.Errorf("context %s is read as %v", odd, x)
		}
	}
}

// twentyPolicies is a slice as a production app has it.
func twentyPolicies() string {
	var b strings.Builder
	for i := range 9 {
		fmt.Fprintf(&b, "@id(\"read-%d\") permit (principal in App::\"billing\", action in [Action::\"http:request\", Action::\"net:connect\"], resource) when { resource.name == \"api%d.example.com\" && context.port == 443 };\n", i, i)
		fmt.Fprintf(&b, "@id(\"range-%d\") permit (principal in Team::\"research\", action in Action::\"http:*\", resource) when { context.ip.isInRange(ip(\"10.%d.0.0/16\")) && context.method == \"GET\" };\n", i, i)
	}
	b.WriteString("@id(\"no-delete\") forbid (principal, action == Action::\"http:request\", resource) when { context.method == \"DELETE\" || context.path like \"/admin/*\" };\n")
	b.WriteString("@id(\"no-metadata\") forbid (principal, action in [Action::\"http:request\", Action::\"net:connect\"], resource) when { context.ip.isInRange(ip(\"169.254.0.0/16\")) };\n")
	return b.String()
}

// TestTwentyPolicies: the benchmark's are policies.
func TestTwentyPolicies(t *testing.T) {
	if n := mustParse(t, twentyPolicies()).Len(); n != 20 {
		t.Errorf("%d policies", n)
	}
}

func BenchmarkDecide(b *testing.B) {
	for _, bb := range []struct {
		name    string
		request string
	}{{"20 policies", ""}, {"20 policies and a request", "internet"}} {
		b.Run(bb.name, func(b *testing.B) {
			e := Effective{Ceiling: mustParse(b, twentyPolicies())}
			if n := e.Ceiling.Len(); n != 20 {
				b.Fatal(n, "policies")
			}
			ip := "10.8.1.1"
			if bb.request != "" {
				e.Request, ip = mustProfile(b, bb.request), "93.184.216.34"
			}
			took := make([]time.Duration, 0, b.N)
			b.ReportAllocs()
			for b.Loop() {
				start := time.Now()
				d := e.Decide(someFacts(), request("GET", "api8.example.com", ip, "/v1/customers"))
				took = append(took, time.Since(start))
				if d.Effect != Permit {
					b.Fatal(d.Reason)
				}
			}
			slices.Sort(took)
			b.ReportMetric(float64(took[len(took)/2].Nanoseconds())/1e3, "p50-µs")
			b.ReportMetric(float64(took[len(took)*99/100].Nanoseconds())/1e3, "p99-µs")
		})
	}
}

func FuzzDecide(f *testing.F) {
	f.Add("Sandbox", "i1", "net:connect", "Host", "example.com", `{"ip":"1.1.1.1","port":443,"protocol":"tcp"}`, `{"team":"research","sandbox":{"id":"i1"}}`)
	f.Add("User", "k1", "exec:start", "Sandbox", "i1", `{"program":"sh"}`, `{"team":"t","caller":{"id":"k1","kind":"agent"},"sandbox":{"id":"i1","metadata":{"a":"b"}}}`)
	f.Add("Execution", "e1", "db:select", "Column", "a/b/c/d", `{}`, `{"execution":{"id":"e1"},"app":{"id":"a"}}`)
	f.Add("Sandbox", "i1", "port:serve", "Port", "65536", `{"caller":"\u0000"}`, `{}`)
	internet, err := Profile("internet")
	if err != nil {
		f.Fatal(err)
	}
	wide := Effective{Ceiling: mustParse(f, `@id("all") permit (principal, action, resource);`), Request: internet}
	f.Fuzz(func(t *testing.T, ptype, pid, action, rtype, rid, context, facts string) {
		c := Call{Principal: Entity{ptype, pid}, Action: action, Resource: Entity{rtype, rid}}
		var fs Facts
		if json.Unmarshal([]byte(context), &c.Context) != nil || json.Unmarshal([]byte(facts), &fs) != nil {
			return
		}
		d := wide.Decide(fs, c)
		if d.Reason == "" || strings.ContainsAny(d.Reason, "\n\r\x00") {
			t.Errorf("reason %q", d.Reason)
		}
		if strings.HasPrefix(d.Reason, "the call could not be evaluated") {
			t.Errorf("a panic was caught: %v", d.Errors)
		}
		switch d.Effect {
		case Deny:
		case Permit:
			if theModel().actions[action] == nil || len(d.Policies) < 2 {
				t.Errorf("permitted %+v by %v", c, d.Policies)
			}
			if host, err := HostName(rid); rtype == "Host" && (err != nil || strings.ToLower(host) != host) {
				t.Errorf("permitted host %q", rid)
			}
		default:
			t.Errorf("effect %q", d.Effect)
		}
		if again := wide.Decide(fs, c); !cmp.Equal(d, again) {
			t.Errorf("decided twice: %s", cmp.Diff(d, again))
		}
	})
}
