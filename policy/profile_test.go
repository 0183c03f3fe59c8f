package policy

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"airlock.dev/airlock"
)

func TestFromRequest(t *testing.T) {
	const public, other = "93.184.216.34", "203.0.113.9"
	no := false
	all := []string{"0.0.0.0/0"}
	for _, tt := range []struct {
		name    string
		profile string
		network airlock.Network
		call    Call
		want    Effect
		policy  string
	}{
		{"nothing is the default", "", airlock.Network{}, connect("a", public, 1), Permit, "public-addresses"},
		{"offline", "offline", airlock.Network{}, connect("a", public, 1), Deny, ""},
		{"no internet", "", airlock.Network{AllowInternet: &no}, connect("a", public, 1), Deny, "network.deny"},
		{"no internet, IPv6", "", airlock.Network{AllowInternet: &no}, connect("a", "2606:4700::1", 1), Deny, "network.deny"},
		{"no internet, no names", "", airlock.Network{AllowInternet: &no}, resolve("a.example"), Deny, "network.deny-names"},
		{"no internet, still alive", "", airlock.Network{AllowInternet: &no}, exec(Entity{"User", "k1"}), Permit, "team-uses-sandboxes"},
		{"everything denied is IPv6, too", "", airlock.Network{DenyOut: all}, request("GET", "a", "2606:4700::1", "/"), Deny, "network.deny"},
		{"a network denied", "", airlock.Network{DenyOut: []string{"93.184.0.0/16"}}, connect("a", public, 1), Deny, "network.deny"},
		{"beside it", "", airlock.Network{DenyOut: []string{"93.184.0.0/16"}}, connect("a", other, 1), Permit, "public-addresses"},
		{"an address allowed out of it", "", airlock.Network{DenyOut: []string{"93.184.0.0/16"}, AllowOut: []string{public}}, connect("a", public, 1), Permit, "network.allow-addresses"},
		{"a name allowed, resolved", "", airlock.Network{DenyOut: all, AllowOut: []string{"A.example"}}, resolve("a.example"), Permit, "network.allow-names-resolve"},
		{"a name allowed, connected", "", airlock.Network{DenyOut: all, AllowOut: []string{"a.example"}}, connect("a.example", public, 1), Permit, "network.allow-names"},
		{"a name allowed, asked", "", airlock.Network{AllowInternet: &no, AllowOut: []string{"a.example"}}, request("POST", "a.example", public, "/"), Permit, "network.allow-names"},
		{"all allowed wins over all denied", "", airlock.Network{DenyOut: all, AllowOut: all}, connect("a.example", public, 1), Permit, "network.allow-addresses"},
		{"all allowed, names, too", "", airlock.Network{AllowInternet: &no, AllowOut: all}, resolve("a.example"), Permit, "resolve-names"},
		{"addresses allowed are looked up by no name", "", airlock.Network{DenyOut: all, AllowOut: []string{public}}, resolve("a.example"), Deny, "network.deny-names"},
		{"an address allowed, whatever its name", "", airlock.Network{DenyOut: all, AllowOut: []string{public}}, connect("a.example", public, 1), Permit, "network.allow-addresses"},
		{"a network denied, a name in it allowed", "", airlock.Network{DenyOut: []string{"93.184.0.0/16"}, AllowOut: []string{"a.example"}}, request("GET", "a.example", public, "/"), Permit, "network.allow-names"},
		{"a network denied, names", "", airlock.Network{DenyOut: []string{"93.184.0.0/16"}}, resolve("a.example"), Permit, "resolve-names"},
		{"another name", "", airlock.Network{DenyOut: all, AllowOut: []string{"a.example"}}, resolve("b.example"), Deny, "network.deny-names"},
		{"a name below", "", airlock.Network{DenyOut: all, AllowOut: []string{"*.example"}}, connect("a.b.example", public, 1), Permit, "network.allow-names"},
		{"not the name itself", "", airlock.Network{DenyOut: all, AllowOut: []string{"*.b.example"}}, connect("b.example", public, 1), Deny, "network.deny"},
		{"not a name that ends alike", "", airlock.Network{DenyOut: all, AllowOut: []string{"*.b.example"}}, connect("ab.example", public, 1), Deny, "network.deny"},
		{"a name at a private address", "", airlock.Network{DenyOut: all, AllowOut: []string{"a.example"}}, connect("a.example", "10.0.0.1", 1), Deny, "network.deny"},
		{"a name at the metadata service", "offline", airlock.Network{AllowOut: []string{"a.example"}}, connect("a.example", "169.254.169.254", 80), Deny, ""},
		{"a private address that is named", "offline", airlock.Network{AllowOut: []string{"10.0.0.0/8"}}, connect("a.example", "10.0.0.1", 1), Permit, "network.allow-addresses"},
		{"an IPv6 network", "offline", airlock.Network{AllowOut: []string{"2001:db8::/32"}}, connect("a.example", "2001:db8::1", 1), Permit, "network.allow-addresses"},
		{"an IPv4 address in an IPv6 one", "", airlock.Network{DenyOut: []string{"::ffff:93.184.216.34"}}, connect("a", public, 1), Deny, "network.deny"},
		{"public ports", "", airlock.Network{}, serve("public"), Permit, "ports-answer"},
		{"private ports", "", airlock.Network{AllowPublicTraffic: &no}, serve("public"), Deny, "network.private-ports"},
		{"private ports with a token", "", airlock.Network{AllowPublicTraffic: &no}, serve("token"), Permit, "ports-answer"},
	} {
		s, err := FromRequest(tt.profile, "", tt.network, nil)
		if err != nil {
			t.Errorf("%s: %v", tt.name, err)
			continue
		}
		wide := mustParse(t, `@id("all") permit (principal, action, resource);`)
		d := Effective{Ceiling: wide, Request: s}.Decide(someFacts(), tt.call)
		if d.Effect != tt.want || tt.policy != "" && !strings.Contains(fmt.Sprint(d.Policies), "request/"+tt.policy+"]") && !strings.Contains(fmt.Sprint(d.Policies), "request/"+tt.policy+" ") {
			t.Errorf("%s: %s by %v, want %s by %s: %s", tt.name, d.Effect, d.Policies, tt.want, tt.policy, d.Reason)
		}
	}
}

func TestFromRequestRefuses(t *testing.T) {
	many := make([]string, maxNetworkEntries+1)
	for _, tt := range []struct {
		profile string
		network airlock.Network
		field   string
		message string
	}{
		{"open", airlock.Network{}, "profile", `there is no profile "open"`},
		{"", airlock.Network{DenyOut: []string{"1.1.1.1", "example.com"}}, "network.denyOut", `network.denyOut[1] is "example.com"`},
		{"", airlock.Network{AllowOut: []string{`a") || true || ("`}}, "network.allowOut", `network.allowOut[0] is "a\") || true || (\""`},
		{"", airlock.Network{AllowOut: []string{"*"}}, "network.allowOut", `network.allowOut[0] is "*"`},
		{"", airlock.Network{AllowOut: []string{"a.*.example"}}, "network.allowOut", `network.allowOut[0] is "a.*.example"`},
		{"", airlock.Network{AllowOut: []string{""}}, "network.allowOut", `network.allowOut[0] is ""`},
		{"", airlock.Network{AllowOut: []string{"10.0.0.0/33"}}, "network.allowOut", `network.allowOut[0] is "10.0.0.0/33"`},
		{"", airlock.Network{DenyOut: []string{"::ffff:0.0.0.0/96"}}, "network.denyOut", `network.denyOut[0] is "::ffff:0.0.0.0/96"`},
		{"", airlock.Network{DenyOut: many}, "network.denyOut", "network.denyOut has 1001 entries"},
	} {
		_, err := FromRequest(tt.profile, "", tt.network, nil)
		var coded *airlock.Error
		if !errors.As(err, &coded) || coded.Code != airlock.Invalid || coded.Field != tt.field || coded.Message != tt.message || coded.Hint == "" {
			t.Errorf("%+v: %#v", tt.network, err)
		}
	}
}

func TestFromRequestWithAllThatItMayHave(t *testing.T) {
	var n airlock.Network
	for i := range maxNetworkEntries {
		n.DenyOut = append(n.DenyOut, netip.AddrFrom4([4]byte{93, 1, byte(i >> 8), byte(i)}).String())
		n.AllowOut = append(n.AllowOut, netip.AddrFrom4([4]byte{93, 2, byte(i >> 8), byte(i)}).String())
	}
	s, err := FromRequest("internet", "", n, nil)
	if err != nil {
		t.Fatal(err)
	}
	for i := range n.AllowOut {
		n.AllowOut[i] = fmt.Sprintf("*.n%d.example", i)
	}
	if _, err := FromRequest("internet", "", n, nil); err != nil {
		t.Fatal(err)
	}
	if d := (Effective{Ceiling: s}).Decide(someFacts(), connect("a", "93.1.3.231", 1)); d.Effect != Deny || d.Policies[0] != "ceiling/network.deny" {
		t.Errorf("%+v", d)
	}
}

// Whatever strings a client sends, its request has the policies of the profile
// and at most these of its own, with these effects, and beside a ceiling it
// permits nothing more.
func FuzzFromRequest(f *testing.F) {
	f.Add("internet", "example.com\n*.a.example\n10.0.0.0/8", "0.0.0.0/0\n1.1.1.1", uint8(0))
	f.Add("offline", "a\") || true || resource.name == (\"\n\"; permit (principal, action, resource);", "::/0", uint8(1))
	f.Add("packages", "*.*\n\\*.x\nx\u202e", "::ffff:1.2.3.4", uint8(2))
	own := map[string]bool{"network.allow-names-resolve": true, "network.allow-names": true, "network.allow-addresses": true,
		"network.deny": false, "network.deny-names": false, "network.private-ports": false}
	f.Fuzz(func(t *testing.T, profile, allow, deny string, flags uint8) {
		internet, public := flags&1 == 0, flags&2 == 0
		n := airlock.Network{AllowInternet: &internet, AllowPublicTraffic: &public}
		if allow != "" {
			n.AllowOut = strings.Split(allow, "\n")
		}
		if deny != "" {
			n.DenyOut = strings.Split(deny, "\n")
		}
		s, err := FromRequest(profile, "", n, nil)
		if err != nil {
			if airlock.CodeOf(err) != airlock.Invalid {
				t.Fatal(err)
			}
			return
		}
		base, err := Profile(profile)
		if err != nil {
			t.Fatal(err)
		}
		back, err := Parse("request", []byte(s.Text()))
		if err != nil {
			t.Fatalf("its text is refused: %v", err)
		}
		if back.Text() != s.Text() {
			t.Fatal("its text is read back as another one")
		}
		for _, p := range back.policies {
			if of := base.byID[p.id]; of != nil {
				if of.text() != p.text() {
					t.Errorf("policy %s of the profile is changed", p.id)
				}
				continue
			}
			if permits, known := own[p.id]; !known || permits != p.permits {
				t.Errorf("policy %s: permits %v", p.id, p.permits)
			}
		}
		if back.Len() > base.Len()+len(own) {
			t.Errorf("%d policies", back.Len())
		}
		for _, c := range []Call{connect("a.example", "10.0.0.1", 80), request("GET", "x.example", "169.254.169.254", "/"), resolve("a.example")} {
			ceiling := mustProfile(t, "packages")
			if d := (Effective{Ceiling: ceiling, Request: s}).Decide(someFacts(), c); d.Effect != Deny {
				t.Errorf("%+v is permitted by %v", c, d.Policies)
			}
		}
		if d := (Effective{Ceiling: s}).Decide(someFacts(), exec(Entity{"User", "k1"})); d.Effect != Permit {
			t.Errorf("exec is denied: %s", d.Reason)
		}
	})
}

// A client's own policies are beside the profile offline, and cannot say what is
// for the operator to say.
func TestOwnPolicies(t *testing.T) {
	own := `@id("one") permit (principal, action == Action::"http:request", resource) when { resource.name == "example.com" };`
	s, err := FromRequest("", own, airlock.Network{}, nil)
	if err != nil {
		t.Fatal(err)
	}
	if got, want := strings.Join(s.IDs(), " "), "one ports-answer secrets-at-their-place team-creates team-uses-files team-uses-sandboxes"; got != want {
		t.Errorf("policies %s, want %s", got, want)
	}
	if s, err = FromRequest("packages", own, airlock.Network{}, nil); err != nil || !slices.Contains(s.IDs(), "read-from-registries") {
		t.Errorf("beside a profile: %v, %v", s.IDs(), err)
	}
	for _, c := range []struct{ text, says string }{
		{`@id("x") @passthrough("") permit (principal, action == Action::"net:connect", resource);`, "policy x has @passthrough"},
		{`@id("x") @inject("k") permit (principal, action == Action::"http:request", resource);`, "policy x has @inject"},
		{`@id("ports-answer") forbid (principal, action, resource);`, "ports-answer"},
		{`permit (principal`, "policy:1"},
		{strings.Repeat(" ", maxRequest+1), "policy has 65537 bytes"},
		{`@id("x") permit (principal, action == Action::"http:request", resource) when { context.path like "*` + strings.Repeat("a", 4000) + `b*" };
@id("y") permit (principal, action == Action::"http:request", resource) when { resource.name like "` + strings.Repeat("a", 90) + `*" };`, "the patterns of its conditions with like have 4098 bytes"},
	} {
		_, err := FromRequest("", c.text, airlock.Network{}, nil)
		var e *airlock.Error
		if !errors.As(err, &e) || e.Code != airlock.Invalid || e.Field != "policy" || !strings.Contains(e.Message, c.says) {
			t.Errorf("%.40s: %v", c.text, err)
		}
	}
}

func TestOwnRegistries(t *testing.T) {
	s, err := FromRequest("packages", "", airlock.Network{}, []Registry{{"mirror.example", 8443}, {"10.1.2.3", 80}})
	if err != nil {
		t.Fatal(err)
	}
	ask := func(host string, port int64, method string) Effect {
		c := request(method, host, "93.184.216.34", "/simple/")
		c.Context["port"] = port
		return Effective{Ceiling: s}.Decide(someFacts(), c).Effect
	}
	for _, c := range []struct {
		host   string
		port   int64
		method string
		want   Effect
	}{
		{"mirror.example", 8443, "GET", Permit},
		{"mirror.example", 8443, "POST", Deny},
		{"mirror.example", 443, "GET", Deny},
		{"10.1.2.3", 80, "HEAD", Permit},
		{"10.1.2.4", 80, "HEAD", Deny},
	} {
		if got := ask(c.host, c.port, c.method); got != c.want {
			t.Errorf("%s %s:%d: %s, want %s", c.method, c.host, c.port, got, c.want)
		}
	}
	if _, err := FromRequest("packages", "", airlock.Network{}, []Registry{{"no host", 1}}); err == nil {
		t.Error("a registry with a name that is none is taken")
	}
}
