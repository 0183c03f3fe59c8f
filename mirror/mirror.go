// Package mirror finds out which package registries this machine's operator
// uses, so that sandboxes use the same: the settings of pip, uv, npm, Go,
// cargo and apt, from variables and files, without any credential in them.
// Those come apart, for whoever speaks to the registries on a sandbox's behalf.
//
// It reads files and nothing else; it runs no program, asks no server, and
// knows nothing of sandboxes. Start reading at Find.
package mirror

import (
	"cmp"
	"context"
	"encoding/base64"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"net"
	"net/netip"
	"net/url"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"unicode"
)

// Settings are what was found. Nothing of it but the values of Credentials
// is secret, as far as it can be known: a token that is a part of a path, as
// some hosted registries have it, looks like any other path.
type Settings struct {
	Env         map[string]string // for every process of a sandbox
	Files       map[string]string // by their path inside, for what has no variable
	Hosts       []Host            // that these settings lead to; sorted
	Credentials []Credential      // for paths on Hosts; sorted
	// Skipped says what was left out and why, for the operator: what sandboxes
	// cannot see or reach, or what is damaged.
	Skipped []string
}

// Host is where a registry listens.
type Host struct {
	Scheme string // http or https
	Name   string // in lower case, or an address; never a pattern
	Port   uint16
}

// String is the host as in a URL.
func (h Host) String() string {
	return h.Scheme + "://" + net.JoinHostPort(h.Name, strconv.Itoa(int(h.Port)))
}

// Kind is how a Credential is sent.
type Kind string

// The kinds: HTTP's two, and a value of the header Authorization as it is.
const (
	Basic  Kind = "basic"
	Bearer Kind = "bearer"
	Raw    Kind = "raw"
)

// Credential opens a registry. It is the operator's: with it a sandbox is to
// read packages, not to publish them.
type Credential struct {
	Host  Host
	Path  string // prefix of the paths that it is for, decoded; begins and ends with /
	Kind  Kind
	Value Secret // of Basic, "user:password"
}

// Authorization returns the header's value, which is secret.
func (c Credential) Authorization() string {
	switch c.Kind {
	case Basic:
		return "Basic " + base64.StdEncoding.EncodeToString([]byte(c.Value.Reveal()))
	case Bearer:
		return "Bearer " + c.Value.Reveal()
	}
	return c.Value.Reveal()
}

// Secret is a text that is not printed, in no format, by accident.
type Secret struct{ text string }

// NewSecret returns text as a Secret.
func NewSecret(text string) Secret { return Secret{text} }

// Reveal returns the text.
func (s Secret) Reveal() string { return s.text }

// Format implements fmt.Formatter for every verb.
func (s Secret) Format(f fmt.State, _ rune) { io.WriteString(f, "[secret]") }

// MarshalText implements encoding.TextMarshaler, for JSON and logs.
func (s Secret) MarshalText() ([]byte, error) { return []byte("[secret]"), nil }

// maxFile bounds a file of settings.
const maxFile = 1 << 20

// Find reads the settings that hold for a user: env are its variables,
// NAME=value, home is its home directory, an absolute path, and root the
// machine's files. What cannot be read is told in Skipped. The only error is ctx's.
func Find(ctx context.Context, env []string, home string, root fs.FS) (Settings, error) {
	f := &finder{
		root: root, home: home, env: map[string]string{},
		out: Settings{Env: map[string]string{}, Files: map[string]string{}},
	}
	for _, v := range env {
		if name, value, ok := strings.Cut(v, "="); ok {
			f.env[name] = value
		}
	}
	for _, tool := range []func(){f.pip, f.uv, f.npm, f.golang, f.cargo, f.apt, f.netrc} {
		if err := ctx.Err(); err != nil {
			return Settings{}, fmt.Errorf("find the settings of package registries: %w", err)
		}
		tool()
	}
	return f.finish(), nil
}

// finder is one search.
type finder struct {
	root fs.FS
	home string
	env  map[string]string
	out  Settings

	registries []registry
	offers     []Credential // not all are for a registry that is used
}

// registry is a place that settings lead to.
type registry struct {
	host Host
	path string // begins and ends with /
}

func (f *finder) skip(place, why string) {
	if text := place + ": " + why; !slices.Contains(f.out.Skipped, text) {
		f.out.Skipped = append(f.out.Skipped, text)
	}
}

// set gives sandboxes a variable, if there is a value.
func (f *finder) set(name string, values ...string) {
	value := strings.Join(values, " ")
	if value == "" {
		return
	}
	if strings.ContainsFunc(value, func(c rune) bool { return !unicode.IsPrint(c) }) {
		f.skip(name, "it has characters that cannot be printed")
		return
	}
	f.out.Env[name] = value
}

// read returns a file's text, "" if there is none.
func (f *finder) read(name string) string {
	if name == "" {
		return ""
	}
	file, err := f.root.Open(strings.TrimPrefix(path.Clean("/"+name), "/"))
	if err != nil {
		if !isAbsent(err) {
			f.skip(name, "it cannot be read")
		}
		return ""
	}
	defer file.Close()
	info, err := file.Stat()
	if err != nil || !info.Mode().IsRegular() { // /dev/null, too, which is how files are turned off
		return ""
	}
	text, err := io.ReadAll(io.LimitReader(file, maxFile+1))
	if err != nil || len(text) > maxFile {
		f.skip(name, "it cannot be read, or is larger than 1 MiB")
		return ""
	}
	return string(text)
}

// list returns the files of a directory with one of the endings, sorted.
func (f *finder) list(dir string, endings ...string) []string {
	entries, err := fs.ReadDir(f.root, strings.TrimPrefix(dir, "/"))
	if err != nil {
		return nil // most machines lack most of them
	}
	var names []string
	for _, e := range entries {
		if slices.Contains(endings, path.Ext(e.Name())) {
			names = append(names, path.Join(dir, e.Name()))
		}
	}
	return names
}

// config is the directory of a user's settings.
func (f *finder) config() string {
	return cmp.Or(f.env["XDG_CONFIG_HOME"], path.Join(f.home, ".config"))
}

var hostName = regexp.MustCompile(`^[a-z0-9_]([a-z0-9_.-]*[a-z0-9_])?$`)

// hostOf returns the host that a URL is for.
func hostOf(u *url.URL) (Host, bool) {
	h := Host{Scheme: strings.ToLower(u.Scheme), Name: strings.ToLower(u.Hostname())}
	port := u.Port()
	switch {
	case port != "":
	case h.Scheme == "https":
		port = "443"
	case h.Scheme == "http":
		port = "80"
	}
	n, err := strconv.ParseUint(port, 10, 16)
	h.Port = uint16(n)
	_, addrErr := netip.ParseAddr(h.Name)
	return h, err == nil && n > 0 && (h.Scheme == "http" || h.Scheme == "https") && (addrErr == nil || hostName.MatchString(h.Name)) && len(h.Name) <= 253
}

// prefix is the part of a registry's path below which all of it is: the pages
// of an index and the files that these name.
func prefix(p string) string {
	p = path.Clean("/" + p)
	if last := path.Base(p); last == "simple" || last == "index" {
		p = path.Dir(p)
	}
	return strings.TrimSuffix(p, "/") + "/"
}

// url takes the credential out of a registry's URL, remembers both, and
// returns what is left. place says where it was, without any value.
func (f *finder) url(place, raw string) (string, bool) {
	raw = strings.TrimSpace(raw)
	u, err := url.Parse(raw) // its errors hold the URL
	if err != nil {
		f.skip(place, "it is no URL")
		return "", false
	}
	host, ok := hostOf(u)
	switch {
	case host.Scheme != "http" && host.Scheme != "https":
		f.skip(place, "sandboxes reach only http and https")
		return "", false
	case !ok:
		f.skip(place, "its host or port is none that can be named to a sandbox")
		return "", false
	case u.RawQuery != "" || u.Fragment != "" || u.ForceQuery:
		f.skip(place, "its part behind the path may be a credential")
		return "", false
	}
	at := registry{host, prefix(u.Path)}
	if u.User != nil {
		password, _ := u.User.Password()
		f.offer(at, Basic, u.User.Username()+":"+password)
		u.User = nil
	}
	if !slices.Contains(f.registries, at) {
		f.registries = append(f.registries, at)
	}
	u.Scheme = host.Scheme
	return u.String(), true
}

// urls is url for a list that is separated by white space.
func (f *finder) urls(place, list string) []string {
	var clean []string
	for _, raw := range strings.Fields(list) {
		if u, ok := f.url(place, raw); ok && !slices.Contains(clean, u) {
			clean = append(clean, u)
		}
	}
	return clean
}

// offer remembers a credential. The first one for a place holds.
func (f *finder) offer(at registry, kind Kind, value string) {
	if strings.Trim(value, ":") == "" || strings.ContainsFunc(value, unicode.IsControl) {
		return
	}
	f.offers = append(f.offers, Credential{Host: at.host, Path: at.path, Kind: kind, Value: NewSecret(value)})
}

// finish sorts what was found, and drops credentials for what is not used: a
// user's token for a registry that no setting leads to is not a sandbox's.
func (f *finder) finish() Settings {
	for _, r := range f.registries {
		if !slices.Contains(f.out.Hosts, r.host) {
			f.out.Hosts = append(f.out.Hosts, r.host)
		}
	}
	slices.SortFunc(f.out.Hosts, compareHosts)
	seen := map[registry]bool{}
	for _, c := range f.offers {
		at := registry{c.Host, c.Path}
		switch {
		case seen[at]:
		case !slices.Contains(f.out.Hosts, c.Host):
			f.skip("a credential for "+c.Host.String(), "no setting leads to that host")
		default:
			seen[at] = true
			f.out.Credentials = append(f.out.Credentials, c)
		}
	}
	slices.SortFunc(f.out.Credentials, func(a, b Credential) int {
		return cmp.Or(compareHosts(a.Host, b.Host), strings.Compare(a.Path, b.Path))
	})
	for _, m := range []map[string]string{f.out.Env, f.out.Files} {
		maps.DeleteFunc(m, func(_, v string) bool { return v == "" })
	}
	return f.out
}

func compareHosts(a, b Host) int {
	return cmp.Or(strings.Compare(a.Name, b.Name), cmp.Compare(a.Port, b.Port), strings.Compare(a.Scheme, b.Scheme))
}
