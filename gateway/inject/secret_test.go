package inject

import (
	"encoding/json"
	"fmt"
	"net/url"
	"regexp"
	"strings"
	"testing"

	"airlock.dev/airlock"
)

func TestPlaceholders(t *testing.T) {
	seen := map[string]bool{}
	for _, name := range []string{"GitHub-Token", "ключ", "", "a", strings.Repeat("n", 80)} {
		p := NewPlaceholder(name)
		if !validPlaceholder(p) || len(p) < 47 || len(p) > 64 || seen[p] {
			t.Errorf("NewPlaceholder(%q) = %q", name, p)
		}
		seen[p] = true
		if url.QueryEscape(p) != p || strings.ToLower(p) != p {
			t.Errorf("%q changes when it is encoded", p)
		}
	}
	want(t, "of a name", NewPlaceholder("GitHub-Token")[:len(Prefix)+13], Prefix+"github_token_")
	for _, bad := range []string{"", Prefix, Prefix + strings.Repeat("a", 31), Prefix + strings.Repeat("A", 32), Prefix + strings.Repeat("a", 114), strings.Repeat("a", 47)} {
		if validPlaceholder(bad) {
			t.Errorf("%q is taken for a placeholder", bad)
		}
	}
}

func TestPaths(t *testing.T) {
	for _, c := range []struct {
		template, path string
		want           bool
	}{
		{"/", "/", true}, {"/", "/a", false},
		{"/a", "/a", true}, {"/a", "/a/", false}, {"/a/", "/a", false}, {"/a/", "/a/", true}, {"/a", "/b", false}, {"/a", "/", false},
		{"/{x}", "/a", true}, {"/{x}", "/", false}, {"/{x}", "/a/b", false}, {"/{x}", "/a/", false},
		{"/repos/{owner}/{repo}/issues", "/repos/o/r/issues", true},
		{"/repos/{owner}/{repo}/issues", "/repos/o/issues", false},
		{"/repos/{owner}/{repo}/issues", "/repos/o/r/issues/1", false},
		{"/{rest...}", "/", false}, {"/{rest...}", "/a", true}, {"/{rest...}", "/a/b/", true},
		{"/v1/{rest...}", "/v1", false}, {"/v1/{rest...}", "/v1/", false}, {"/v1/{rest...}", "/v1/a/b", true}, {"/v1/{rest...}", "/v10/a", false},
		{"/a b/{x}", "/a b/ü", true},
	} {
		must(t, validTemplate(c.template))
		want(t, fmt.Sprintf("%s matches %s", c.template, c.path), matchPath(c.template, c.path), c.want)
	}
}

// A template means what the regular expression that it is short for means.
func FuzzPath(f *testing.F) {
	f.Add("/a/{x}/{rest...}", "/a/b/c/d")
	f.Add("/a/", "/a/")
	f.Add("/{x}", "/")
	f.Fuzz(func(t *testing.T, template, path string) {
		if validTemplate(template) != nil || !strings.HasPrefix(path, "/") {
			return
		}
		var b strings.Builder
		for s := range strings.SplitSeq(template[1:], "/") {
			switch {
			case strings.HasSuffix(s, "...}"):
				b.WriteString("/[^/](?s:.*)")
			case strings.HasPrefix(s, "{"):
				b.WriteString("/[^/]+")
			default:
				b.WriteString("/" + regexp.QuoteMeta(s))
			}
		}
		if means := regexp.MustCompile(`^` + b.String() + `$`).MatchString(path); means != matchPath(template, path) {
			t.Errorf("%q matches %q: %v", template, path, !means)
		}
	})
}

func TestValidate(t *testing.T) {
	good := bearer()
	must(t, good.Validate())
	for name, c := range map[string]struct {
		change func(*Secret)
		field  string // "" is valid
	}{
		"no name":               {func(s *Secret) { s.Name = "" }, "name"},
		"a name of two lines":   {func(s *Secret) { s.Name = "a\nb" }, "name"},
		"no placeholder":        {func(s *Secret) { s.Placeholder = "" }, "placeholder"},
		"none, always":          {func(s *Secret) { s.Placeholder, s.Always = "", true }, ""},
		"a placeholder of mine": {func(s *Secret) { s.Placeholder = "secret" }, "placeholder"},
		"no host":               {func(s *Secret) { s.Host = "" }, "host"},
		"a wildcard host":       {func(s *Secret) { s.Host = "*.example.com" }, "host"},
		"a host's other case":   {func(s *Secret) { s.Host = "Example.com" }, "host"},
		"an address":            {func(s *Secret) { s.Host = "2001:db8::1" }, ""},
		"no methods":            {func(s *Secret) { s.Methods = nil }, "methods"},
		"any method":            {func(s *Secret) { s.Methods = []string{"*"} }, "methods"},
		"a method in lower":     {func(s *Secret) { s.Methods = []string{"get"} }, "methods"},
		"a method twice":        {func(s *Secret) { s.Methods = []string{"GET", "GET"} }, "methods"},
		"connect":               {func(s *Secret) { s.Methods = []string{"CONNECT"} }, "methods"},
		"no path":               {func(s *Secret) { s.Path = "" }, "path"},
		"a star in the path":    {func(s *Secret) { s.Path = "/*" }, "path"},
		"an encoded path":       {func(s *Secret) { s.Path = "/a%20b" }, "path"},
		"a part of a segment":   {func(s *Secret) { s.Path = "/a{b}" }, "path"},
		"a rest in between":     {func(s *Secret) { s.Path = "/{a...}/b" }, "path"},
		"no name of a segment":  {func(s *Secret) { s.Path = "/{}" }, "path"},
		"an empty segment":      {func(s *Secret) { s.Path = "/a//b" }, "path"},
		"a dot segment":         {func(s *Secret) { s.Path = "/a/../b" }, "path"},
		"nowhere":               {func(s *Secret) { s.Place = Place{} }, "place"},
		"two places":            {func(s *Secret) { s.Place = Place{Header: "A", Query: "b"} }, "place"},
		"a prefix of a query":   {func(s *Secret) { s.Place = Place{Query: "b", Prefix: "x"} }, "prefix"},
		"a header's other half": {func(s *Secret) { s.Place = Place{Header: "b", Other: "x"} }, "other"},
		"a header with a colon": {func(s *Secret) { s.Place = Place{Header: "A:"} }, "header"},
		"framing":               {func(s *Secret) { s.Place = Place{Header: "content-length"} }, "header"},
		"a hop's header":        {func(s *Secret) { s.Place = Place{Header: "proxy-authorization"} }, "header"},
		"a prefix of two lines": {func(s *Secret) { s.Place = Place{Header: "A", Prefix: "x\r\nB: "} }, "place"},
		"neither half":          {func(s *Secret) { s.Place = Place{Basic: "both"} }, "basic"},
		"a user with a colon":   {func(s *Secret) { s.Place = Place{Basic: "password", Other: "a:b"} }, "other"},
		"basic":                 {func(s *Secret) { s.Place = Place{Basic: "password", Other: "git"} }, ""},
		"no value":              {func(s *Secret) { s.Value = "" }, "value"},
		"a long value":          {func(s *Secret) { s.Value = strings.Repeat("v", ValueMax+1) }, "value"},
		"as long as can be":     {func(s *Secret) { s.Value = strings.Repeat("v", ValueMax) }, ""},
		"a header in the value": {func(s *Secret) { s.Value = "tell\r\nHost: me" }, "value"},
		"a line's end":          {func(s *Secret) { s.Value = "tell\n" }, "value"},
		"a NUL":                 {func(s *Secret) { s.Value = "tell\x00" }, "value"},
		"bytes":                 {func(s *Secret) { s.Value = "tell\xff" }, "value"},
		"a space at the end":    {func(s *Secret) { s.Value = "tell " }, "value"},
		"a user's colon":        {func(s *Secret) { s.Value, s.Place = "tell:me", Place{Basic: "user"} }, "value"},
		"a password's colon":    {func(s *Secret) { s.Value, s.Place = "tell:me", Place{Basic: "password"} }, ""},
	} {
		s := bearer()
		c.change(&s)
		err := s.Validate()
		e, _ := err.(*airlock.Error)
		switch {
		case c.field == "" && err != nil:
			t.Errorf("%s: %v", name, err)
		case c.field != "" && (e == nil || e.Code != airlock.Invalid || e.Field != c.field):
			t.Errorf("%s: %v, not an error of %s", name, err, c.field)
		case err != nil && strings.Contains(err.Error(), "tell"):
			t.Errorf("%s: the error tells of the value: %v", name, err)
		}
	}
}

func TestSecretIsJSON(t *testing.T) {
	s := bearer()
	s.Port, s.Always, s.Upgrade = 8443, true, true
	text, err := json.Marshal(s)
	must(t, err)
	var back Secret
	must(t, json.Unmarshal(text, &back))
	again, err := json.Marshal(back)
	must(t, err)
	want(t, "the secret", string(again), string(text))
	want(t, "where it goes", s.Scope.String(), "GET,POST,HEAD https://example.com:8443/api/{rest...} in the header Authorization: Bearer {}")
	for _, shown := range []string{fmt.Sprint(s), fmt.Sprintf("%+v", &s)} {
		if strings.Contains(shown, value) {
			t.Errorf("printing a secret shows its value: %s", shown)
		}
	}
}

func TestSetRefusesTwins(t *testing.T) {
	w := open(t, false, nil)
	a, b := bearer(), bearer()
	if err := w.door.Set([]Secret{a, b}); airlock.CodeOf(err) != airlock.Invalid {
		t.Errorf("two of a name: %v", err)
	}
	b.Name = "other"
	if err := w.door.Set([]Secret{a, b}); airlock.CodeOf(err) != airlock.Invalid {
		t.Errorf("two of a placeholder: %v", err)
	}
	b.Placeholder = NewPlaceholder("other")
	must(t, w.door.Set([]Secret{a, b}))
}
