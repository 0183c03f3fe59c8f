package mirror

import (
	"cmp"
	"path"
	"regexp"
	"strings"
)

// goPlain are Go's variables that name no place.
var goPlain = []string{"GONOPROXY", "GONOSUMDB", "GONOSUMCHECK", "GOPRIVATE", "GOINSECURE"}

// goPatterns and goKey are what their values, and a database of checksums, are
// like: no URL, which might hold a credential.
var (
	goPatterns = regexp.MustCompile(`^[A-Za-z0-9.,*?/_~\[\]-]+$`)
	goKey      = regexp.MustCompile(`^[A-Za-z0-9.-]+(\+[0-9a-f]+\+[A-Za-z0-9+/=]+)?$`)
)

// goFlag is a flag that means the same in a sandbox; others name files.
var goFlag = regexp.MustCompile(`^-(insecure|modcacherw|trimpath|mod=(mod|readonly)|buildvcs=(true|false|auto))$`)

// golang reads Go's settings: variables, then the file of go env -w.
func (f *finder) golang() {
	settings := map[string]found{}
	if file := cmp.Or(f.env["GOENV"], path.Join(f.config(), "go/env")); file != "off" {
		for _, e := range goSyntax.parse(f.read(file)) {
			settings[e.key] = found{file + ": " + e.key, e.value}
		}
	}
	get := func(name string) found {
		if value := f.env[name]; value != "" {
			return found{name, value}
		}
		return settings[name]
	}
	f.set("GOPROXY", f.goProxy(get("GOPROXY")))
	f.set("GOSUMDB", f.goSumDB(get("GOSUMDB")))
	for _, name := range goPlain {
		if v := get(name); goPatterns.MatchString(v.value) {
			f.set(name, v.value)
		} else if v.value != "" {
			f.skip(v.place, "it is no list of patterns")
		}
	}
	var flags []string
	for _, flag := range strings.Fields(get("GOFLAGS").value) {
		if goFlag.MatchString(flag) {
			flags = append(flags, flag)
		} else {
			f.skip(get("GOFLAGS").place, "a flag may name what sandboxes do not have")
		}
	}
	f.set("GOFLAGS", flags...)
}

// goProxy cleans a list of proxies. Behind a comma the next one is asked for
// what is absent, behind a bar after any error.
func (f *finder) goProxy(v found) string {
	var clean strings.Builder
	for rest := v.value; rest != ""; {
		entry, separator := rest, ""
		if i := strings.IndexAny(rest, ",|"); i >= 0 {
			entry, separator, rest = rest[:i], rest[i:i+1], rest[i+1:]
		} else {
			rest = ""
		}
		entry = strings.TrimSpace(entry)
		if entry != "direct" && entry != "off" {
			u, ok := f.url(v.place, entry)
			if !ok {
				continue
			}
			entry = u
		}
		clean.WriteString(entry + separator)
	}
	return strings.TrimRight(clean.String(), ",|")
}

// goSumDB cleans the name, the key and the URL of a database of checksums.
func (f *finder) goSumDB(v found) string {
	fields := strings.Fields(v.value)
	switch {
	case len(fields) == 0:
		return ""
	case len(fields) > 2 || !goKey.MatchString(fields[0]):
		f.skip(v.place, "it is no database of checksums")
		return ""
	case fields[0] == "off":
		return "off"
	case len(fields) == 2:
		u, ok := f.url(v.place, fields[1])
		if !ok {
			return ""
		}
		return fields[0] + " " + u
	}
	name, _, _ := strings.Cut(fields[0], "+")
	if _, ok := f.url(v.place, "https://"+name); !ok {
		return ""
	}
	return fields[0]
}
