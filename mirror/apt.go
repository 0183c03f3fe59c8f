package mirror

import (
	"maps"
	"net/url"
	"path"
	"slices"
	"strings"
)

// apt finds the hosts of package sources; their files are for who makes images.
func (f *finder) apt() {
	before := len(f.registries)
	for _, name := range append([]string{"/etc/apt/sources.list"}, f.list("/etc/apt/sources.list.d", ".list")...) {
		for line := range strings.Lines(f.read(name)) {
			if uri := oneLine(line); uri != "" {
				f.url(name, uri)
			}
		}
	}
	for _, name := range f.list("/etc/apt/sources.list.d", ".sources") {
		uris, off := map[int]string{}, map[int]bool{}
		for _, e := range aptSyntax.parse(f.read(name)) {
			switch strings.ToLower(e.key) {
			case "uris":
				uris[e.stanza] = e.value
			case "enabled":
				off[e.stanza] = slices.Contains([]string{"no", "false", "without", "off", "disable"}, strings.ToLower(e.value))
			}
		}
		for _, stanza := range slices.Sorted(maps.Keys(uris)) {
			if !off[stanza] {
				f.urls(name, uris[stanza])
			}
		}
	}
	ours := f.registries[before:]
	for _, name := range append([]string{"/etc/apt/auth.conf"}, f.list("/etc/apt/auth.conf.d", ".conf")...) {
		f.machines(f.read(name), ours)
	}
}

// oneLine returns the URI of a line of sources.list: the word behind the kind
// and the options in brackets.
func oneLine(line string) string {
	line, _, _ = strings.Cut(line, "#")
	line = strings.TrimSpace(line)
	kind := line[:max(strings.IndexAny(line, " \t"), 0)]
	if kind != "deb" && kind != "deb-src" {
		return ""
	}
	rest := strings.TrimSpace(line[len(kind):])
	if strings.HasPrefix(rest, "[") {
		_, behind, ok := strings.Cut(rest, "]")
		if !ok {
			return ""
		}
		rest = behind
	}
	if fields := strings.Fields(rest); len(fields) > 0 {
		return fields[0]
	}
	return ""
}

// netrc reads what pip, Go and git take credentials from.
func (f *finder) netrc() {
	name := f.env["NETRC"]
	if name == "" {
		name = path.Join(f.home, ".netrc")
	}
	f.machines(f.read(name), f.registries)
}

// machine is what a netrc says for one.
type machine struct{ name, login, password string }

// machines offers what a netrc says, for registries that are used. apt's form
// of it may have a scheme, a port and a path before or behind the name.
func (f *finder) machines(text string, registries []registry) {
	for _, m := range parseNetrc(text) {
		scheme, rest, ok := strings.Cut(m.name, "://")
		if !ok {
			scheme, rest = "https", m.name
		}
		u, err := url.Parse(scheme + "://" + rest)
		if err != nil || u.Host == "" {
			continue
		}
		host, ok := hostOf(u)
		if !ok {
			continue
		}
		base := strings.TrimSuffix(path.Clean("/"+u.Path), "/") + "/"
		for _, r := range registries {
			if r.host.Name == host.Name && r.host.Scheme == host.Scheme && (u.Port() == "" || r.host.Port == host.Port) && strings.HasPrefix(r.path, base) {
				f.offer(r, Basic, m.login+":"+m.password)
			}
		}
	}
}

// parseNetrc reads the machines that have a name. A macro goes to the next
// empty line.
func parseNetrc(text string) []machine {
	var all []machine
	var last *machine // nil in what is for every host
	macro, field := false, ""
	for line := range strings.SplitSeq(text, "\n") {
		words := strings.Fields(line)
		if len(words) == 0 {
			macro = false
		}
		if macro {
			continue
		}
		for i := 0; i < len(words); i++ {
			word := words[i]
			switch {
			case field == "machine":
				all = append(all, machine{name: word})
				last, field = &all[len(all)-1], ""
			case field != "":
				if last != nil && field == "login" {
					last.login = word
				} else if last != nil && field == "password" {
					last.password = word
				}
				field = ""
			case strings.HasPrefix(word, "#"):
				i = len(words)
			case word == "machine" || word == "login" || word == "password" || word == "account":
				field = word
			case word == "default":
				last = nil
			case word == "macdef":
				macro = true
				i = len(words)
			}
		}
	}
	return all
}
