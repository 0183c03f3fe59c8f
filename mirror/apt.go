package mirror

import (
	"maps"
	"net/url"
	"path"
	"slices"
	"strings"
)

// aptKeys are the fields of a source that say where packages are and whom to
// believe; no other one is handed on.
var aptKeys = []string{"types", "suites", "components", "architectures", "signed-by", "trusted", "languages", "targets", "check-valid-until", "check-date", "by-hash", "pdiffs"}

// apt finds sources of packages. Their files are handed on without what is
// turned off, what sandboxes cannot reach, comments and credentials.
func (f *finder) apt() {
	before := len(f.registries)
	for _, name := range append([]string{"/etc/apt/sources.list"}, f.list("/etc/apt/sources.list.d", ".list")...) {
		var text strings.Builder
		for line := range strings.Lines(f.read(name)) {
			head, uri, tail := oneLine(line)
			if uri == "" {
				continue
			}
			if clean, ok := f.url(name, uri); ok {
				text.WriteString(strings.Join(append([]string{head, clean}, tail...), " ") + "\n")
			}
		}
		f.out.Files[name] = text.String()
	}
	for _, name := range f.list("/etc/apt/sources.list.d", ".sources") {
		f.out.Files[name] = f.aptSources(name)
	}
	ours := f.registries[before:]
	for _, name := range append([]string{"/etc/apt/auth.conf"}, f.list("/etc/apt/auth.conf.d", ".conf")...) {
		f.machines(f.read(name), ours)
	}
}

// aptSources is a file of sources in stanzas.
func (f *finder) aptSources(name string) string {
	uris, off, rest := map[int]string{}, map[int]bool{}, map[int]string{}
	for _, e := range aptSyntax.parse(f.read(name)) {
		switch key := strings.ToLower(e.key); {
		case key == "uris":
			uris[e.stanza] = e.value
		case key == "enabled":
			off[e.stanza] = slices.Contains([]string{"no", "false", "without", "off", "disable"}, strings.ToLower(e.value))
		case slices.Contains(aptKeys, key):
			value := " " + e.value
			if strings.Contains(value, "\n") { // such as a key, which begins on a line of its own
				value = "\n " + strings.ReplaceAll(e.value, "\n", "\n ")
			}
			rest[e.stanza] += e.key + ":" + value + "\n"
		}
	}
	var stanzas []string
	for _, stanza := range slices.Sorted(maps.Keys(uris)) {
		if off[stanza] {
			continue
		}
		if clean := f.urls(name, uris[stanza]); len(clean) > 0 {
			stanzas = append(stanzas, "URIs: "+strings.Join(clean, " ")+"\n"+rest[stanza])
		}
	}
	return strings.Join(stanzas, "\n")
}

// oneLine returns a line of sources.list: the kind with the options in
// brackets, the URI, which is empty if it is none, and what follows.
func oneLine(line string) (head, uri string, tail []string) {
	line, _, _ = strings.Cut(line, "#")
	line = strings.TrimSpace(line)
	head = line[:max(strings.IndexAny(line, " \t"), 0)]
	if head != "deb" && head != "deb-src" {
		return "", "", nil
	}
	rest := strings.TrimSpace(line[len(head):])
	if strings.HasPrefix(rest, "[") {
		options, behind, ok := strings.Cut(rest, "]")
		if !ok {
			return "", "", nil
		}
		head, rest = head+" "+strings.Join(strings.Fields(options), " ")+"]", behind
	}
	if fields := strings.Fields(rest); len(fields) > 0 {
		uri, tail = fields[0], fields[1:]
	}
	return head, uri, tail
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
