package inject

import (
	"crypto/rand"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	"airlock.dev/airlock"
	"airlock.dev/airlock/gateway/address"
)

const (
	// Prefix is how every placeholder begins. Placeholders are of a-z, 0-9 and
	// _ only, so that what folds case or escapes text leaves them as they are.
	Prefix = "airlock_secret_"

	randomChars    = 32  // of 32 letters: 160 bits
	hintChars      = 16  // of the name, for people
	placeholderMax = 128 // characters

	// ValueMax is the most bytes of a secret's value.
	ValueMax = 32 << 10

	methodsMax = 16
	pathMax    = 1024
	textMax    = 256 // of a prefix, a parameter's name, the other half of Basic
)

// Secret is a value, the placeholder that a sandbox has instead of it, and the
// one place that the value may be sent to.
type Secret struct {
	Name        string `json:"name"`
	Placeholder string `json:"placeholder,omitempty"` // may be empty with Always or Wanted
	Value       string `json:"value"`
	Scope
	// Always puts the value in where no placeholder is, in place of what the
	// sandbox sent at that location.
	Always bool `json:"always,omitempty"`
	// Wanted is Always for the requests that Config.Wanted says.
	Wanted bool `json:"wanted,omitempty"`
}

// Scope is the one place that a secret may be sent to. Nothing in it is a
// wildcard for a host, a port, a method or a header. It is always https, with
// TLS ended by the gateway.
type Scope struct {
	Host    string   `json:"host"`           // as address.Host spells it
	Port    uint16   `json:"port,omitempty"` // 443 if it is 0
	Methods []string `json:"methods"`        // in upper case
	// Path is a template of whole segments: {name} stands for one segment that
	// is not empty, and {rest...} at the end for one or more.
	Path  string `json:"path"`
	Place Place  `json:"place"`
	// Upgrade allows requests with the value to change the protocol, as for a
	// WebSocket. What is said after that is not looked at, either way.
	Upgrade bool `json:"upgrade,omitempty"`
}

// Place is the location in a request: one of a header, Basic authentication
// and a parameter of the query.
type Place struct {
	Header string `json:"header,omitempty"` // its name
	Prefix string `json:"prefix,omitempty"` // before the value in Header, as "Bearer "
	Basic  string `json:"basic,omitempty"`  // "user" or "password"
	Other  string `json:"other,omitempty"`  // the other half of Basic
	Query  string `json:"query,omitempty"`  // the parameter's name
}

// String names the location as messages and records do.
func (p Place) String() string {
	switch {
	case p.Basic != "":
		return "basic " + p.Basic
	case p.Query != "":
		return "query " + p.Query
	}
	return "header " + http.CanonicalHeaderKey(p.Header)
}

// form is String with what is around the value.
func (p Place) form() string {
	switch {
	case p.Basic == "user":
		return fmt.Sprintf("Basic authentication as {}:%s", p.Other)
	case p.Basic != "":
		return fmt.Sprintf("Basic authentication as %s:{}", p.Other)
	case p.Query != "":
		return fmt.Sprintf("the query as %s={}", p.Query)
	}
	return fmt.Sprintf("the header %s: %s{}", http.CanonicalHeaderKey(p.Header), p.Prefix)
}

// header is the header that the value goes into, "" for a query.
func (p Place) header() string {
	if p.Basic != "" {
		return "Authorization"
	}
	return http.CanonicalHeaderKey(p.Header)
}

const letters = "abcdefghijklmnopqrstuvwxyz234567"

// NewPlaceholder returns a new placeholder, of 160 random bits. The name is in
// it for people to see; it is 47 to 64 characters long, as tokens are.
func NewPlaceholder(name string) string {
	hint := strings.Map(func(r rune) rune {
		switch {
		case 'A' <= r && r <= 'Z':
			return r + 'a' - 'A'
		case 'a' <= r && r <= 'z', '0' <= r && r <= '9':
			return r
		}
		return '_'
	}, name)
	if hint = strings.Trim(hint[:min(len(hint), hintChars)], "_"); hint != "" {
		hint += "_"
	}
	random := make([]byte, randomChars)
	rand.Read(random) // never fails
	for i, b := range random {
		random[i] = letters[b%byte(len(letters))]
	}
	return Prefix + hint + string(random)
}

func validPlaceholder(s string) bool {
	random, ok := strings.CutPrefix(s, Prefix)
	return ok && len(random) >= randomChars && len(s) <= placeholderMax &&
		strings.Trim(random, "abcdefghijklmnopqrstuvwxyz0123456789_") == ""
}

// Validate returns an airlock.Invalid error that names the field at fault. No
// error tells anything of the value.
func (s *Secret) Validate() error {
	if s.Name == "" || len(s.Name) > textMax || !plain(s.Name) {
		return airlock.Invalidf("name", "give a name of printable characters", "the secret's name is not usable")
	}
	if s.Placeholder == "" && !s.Always && !s.Wanted {
		return airlock.Invalidf("placeholder", "make one with NewPlaceholder", "secret %q has no placeholder", s.Name)
	}
	if s.Placeholder != "" && !validPlaceholder(s.Placeholder) {
		return airlock.Invalidf("placeholder", "make one with NewPlaceholder", "the placeholder of secret %q is not one", s.Name)
	}
	if err := s.Scope.Validate(); err != nil {
		return err
	}
	return s.Scope.ValidateValue(s.Value)
}

// ValidateValue says whether a value can be sent where the scope says.
func (c *Scope) ValidateValue(value string) error {
	bad := func(hint, format string, args ...any) error {
		return airlock.Invalidf("value", hint, format, args...)
	}
	switch {
	case value == "":
		return bad("give at least one character", "the value is empty")
	case len(value) > ValueMax:
		return bad(fmt.Sprintf("give at most %d bytes", ValueMax), "the value has %d bytes", len(value))
	case !plain(value):
		return bad("a value is one line of text: remove the line's end, and encode what is not text", "the value has control characters, or is not UTF-8")
	case strings.TrimSpace(value) != value:
		return bad("remove the spaces", "the value begins or ends with a space, which does not arrive in a header")
	case c.Place.Basic == "user" && strings.Contains(value, ":"):
		return bad("put it in the password", "the value has a colon, which ends the user of Basic authentication")
	}
	return nil
}

// plain is whether s is text of one line.
func plain(s string) bool {
	return utf8.ValidString(s) && !strings.ContainsFunc(s, unicode.IsControl)
}

// reserved are headers that say how a message is carried, and whose meaning
// is not upstream's alone.
var reserved = []string{
	"Accept-Encoding", "Connection", "Content-Encoding", "Content-Length", "Expect", "Host", "If-Range",
	"Keep-Alive", "Range", "Te", "Trailer", "Transfer-Encoding", "Upgrade",
}

// Validate returns an airlock.Invalid error that names the field at fault.
func (c *Scope) Validate() error {
	host, err := address.Parse(c.Host)
	if err != nil {
		return err
	}
	if host.String() != c.Host {
		return airlock.Invalidf("host", fmt.Sprintf("write %q", host), "%.80q is not how this host is spelled", c.Host)
	}
	if len(c.Methods) == 0 || len(c.Methods) > methodsMax {
		return airlock.Invalidf("methods", fmt.Sprintf("name 1 to %d, as GET", methodsMax), "%d methods are named", len(c.Methods))
	}
	for i, m := range c.Methods {
		if m == "" || len(m) > 32 || strings.Trim(m, "ABCDEFGHIJKLMNOPQRSTUVWXYZ-") != "" || m == http.MethodConnect || slices.Contains(c.Methods[:i], m) {
			return airlock.Invalidf("methods", "name each method once, in upper case, and no wildcard", "%.40q cannot be a method here", m)
		}
	}
	if err := validTemplate(c.Path); err != nil {
		return err
	}
	return c.Place.validate()
}

func (p Place) validate() error {
	kinds := 0
	for _, s := range []string{p.Header, p.Basic, p.Query} {
		if s != "" {
			kinds++
		}
	}
	if kinds != 1 {
		return airlock.Invalidf("place", "name one of header, basic and query", "the secret's location is not one place")
	}
	if p.Header == "" && p.Prefix != "" {
		return airlock.Invalidf("prefix", "leave it out", "only a header has a prefix")
	}
	if p.Basic == "" && p.Other != "" {
		return airlock.Invalidf("other", "leave it out", "only Basic authentication has another half")
	}
	for _, s := range []string{p.Prefix, p.Other, p.Query} {
		if len(s) > textMax || !plain(s) || strings.Contains(s, Prefix) {
			return airlock.Invalidf("place", fmt.Sprintf("use at most %d bytes of text", textMax), "%.80q cannot be part of a location", s)
		}
	}
	switch {
	case p.Header != "":
		name := http.CanonicalHeaderKey(p.Header)
		if !isToken(p.Header) || len(p.Header) > textMax {
			return airlock.Invalidf("header", "use letters, digits and -", "%.80q is not the name of a header", p.Header)
		}
		if slices.Contains(reserved, name) || strings.HasPrefix(name, "Proxy-") || strings.HasPrefix(name, "Sec-Websocket-") || strings.HasPrefix(name, "X-Airlock-") {
			return airlock.Invalidf("header", "use a header that upstream reads, as Authorization", "the header %s does not get upstream as it is", name)
		}
		if strings.TrimLeft(p.Prefix, " ") != p.Prefix {
			return airlock.Invalidf("prefix", "begin with another character", "a header's value cannot begin with a space")
		}
	case p.Basic != "" && p.Basic != "user" && p.Basic != "password":
		return airlock.Invalidf("basic", "use user or password", "%.40q is no half of Basic authentication", p.Basic)
	case p.Basic == "password" && strings.Contains(p.Other, ":"):
		return airlock.Invalidf("other", "use a user without one", "a user of Basic authentication has no colon")
	}
	return nil
}

func isToken(s string) bool {
	return s != "" && strings.Trim(s, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.!#$%&'*+^`|~") == ""
}

func validTemplate(path string) error {
	bad := func(hint, format string, args ...any) error {
		return airlock.Invalidf("path", hint, format, args...)
	}
	if !strings.HasPrefix(path, "/") || len(path) > pathMax || !plain(path) {
		return bad(fmt.Sprintf("begin with / and use at most %d bytes of text", pathMax), "%.80q is not a path", path)
	}
	segments := strings.Split(path[1:], "/")
	for i, s := range segments {
		last := i == len(segments)-1
		inside, ok := strings.CutPrefix(s, "{")
		if ok {
			inside, ok = strings.CutSuffix(inside, "}")
			inside, rest := strings.CutSuffix(inside, "...")
			if !ok || inside == "" || strings.Trim(inside, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_") != "" || rest && !last {
				return bad("write {name} for a segment, and {rest...} for all that follow at the end", "%.80q is not a segment of a template", s)
			}
			continue
		}
		switch {
		case s == "" && !last:
			return bad("write one slash", "the path %.80q has an empty segment", path)
		case s == "." || s == "..":
			return bad("write the path without it", "the path %.80q has a dot segment", path)
		case strings.ContainsAny(s, `{}*?#%;\`):
			return bad("write it decoded, and {name} for a whole segment", `a segment has none of {}*?#%%;\, but %.80q has`, s)
		}
	}
	return nil
}

// matchPath is whether a path, decoded and clean, is one of a valid template.
func matchPath(template, path string) bool {
	template, path = template[1:], path[1:]
	for {
		t, templateRest, templateMore := strings.Cut(template, "/")
		if strings.HasPrefix(t, "{") && strings.HasSuffix(t, "...}") {
			return path != "" && path[0] != '/'
		}
		p, pathRest, pathMore := strings.Cut(path, "/")
		if strings.HasPrefix(t, "{") {
			if p == "" {
				return false
			}
		} else if t != p {
			return false
		}
		if !templateMore || !pathMore {
			return templateMore == pathMore
		}
		template, path = templateRest, pathRest
	}
}

func (c *Scope) port() uint16 {
	if c.Port == 0 {
		return 443
	}
	return c.Port
}

// misses says why a request is not one that the secret may be sent with, or "".
func (c *Scope) misses(at *site) string {
	switch {
	case at.scheme != "https":
		return "the request is not https"
	case at.host != c.Host:
		return "the request is for another host"
	case at.port != c.port():
		return "the request is for another port"
	case !slices.Contains(c.Methods, at.method):
		return "the request has another method"
	case !strings.HasPrefix(at.path, "/") || !matchPath(c.Path, at.path):
		return "the request has another path"
	}
	return ""
}

// String is the scope as people read it.
func (c Scope) String() string {
	host := c.Host
	if strings.Contains(host, ":") {
		host = "[" + host + "]"
	}
	if c.port() != 443 {
		host = fmt.Sprintf("%s:%d", host, c.Port)
	}
	return fmt.Sprintf("%s https://%s%s in %s", strings.Join(c.Methods, ","), host, c.Path, c.Place.form())
}
