package mirror

import (
	"net/url"
	"path"
	"regexp"
	"slices"
	"strings"

	"github.com/pelletier/go-toml/v2"
)

// found is a value and the place that it is from.
type found struct{ place, value string }

// pip reads the settings of pip: variables, then files, those of a command
// before the global ones.
func (f *finder) pip() {
	var files []string
	if own := f.env["PIP_CONFIG_FILE"]; own != "/dev/null" { // which is pip's way to read none
		files = []string{"/etc/xdg/pip/pip.conf", "/etc/pip.conf", path.Join(f.home, ".pip/pip.conf"), path.Join(f.config(), "pip/pip.conf"), own}
	}
	settings := map[string]found{}
	for _, section := range []string{"global", "install"} {
		for _, name := range files {
			for _, e := range pipSyntax.parse(f.read(name)) {
				if e.section == section {
					key := strings.TrimPrefix(strings.ReplaceAll(strings.ToLower(e.key), "_", "-"), "--")
					settings[key] = found{name + ": " + key, e.value}
				}
			}
		}
	}
	get := func(key string) found {
		name := "PIP_" + strings.ToUpper(strings.ReplaceAll(key, "-", "_"))
		if value := f.env[name]; value != "" {
			return found{name, value}
		}
		return settings[key]
	}
	var used []string
	for _, key := range []string{"index-url", "extra-index-url", "find-links"} {
		v := get(key)
		urls := f.urls(v.place, v.value)
		if key == "index-url" && len(urls) > 1 {
			urls = urls[:1]
		}
		used = append(used, urls...)
		f.set("PIP_"+strings.ToUpper(strings.ReplaceAll(key, "-", "_")), urls...)
	}
	var trusted []string
	for _, host := range strings.Fields(get("trusted-host").value) {
		if slices.ContainsFunc(used, func(raw string) bool {
			u, err := url.Parse(raw)
			return err == nil && (strings.EqualFold(host, u.Host) || strings.EqualFold(host, u.Hostname()))
		}) {
			trusted = append(trusted, host)
		}
	}
	f.set("PIP_TRUSTED_HOST", trusted...)
}

// uvFile is what matters of uv.toml.
type uvFile struct {
	Index []struct {
		Name     string `toml:"name"`
		URL      string `toml:"url"`
		Default  bool   `toml:"default"`
		Explicit bool   `toml:"explicit"`
	} `toml:"index"`
	IndexURL      string   `toml:"index-url"`
	ExtraIndexURL []string `toml:"extra-index-url"`
	FindLinks     []string `toml:"find-links"`
}

var indexName = regexp.MustCompile(`^[A-Za-z0-9._-]+$`)

// uv reads the settings of uv. Without any, sandboxes have those of pip for
// it: its own default is no mirror.
func (f *finder) uv() {
	var byDefault, others, links []found
	for _, v := range []struct {
		name string
		to   *[]found
	}{{"UV_DEFAULT_INDEX", &byDefault}, {"UV_INDEX_URL", &byDefault}, {"UV_INDEX", &others}, {"UV_EXTRA_INDEX_URL", &others}, {"UV_FIND_LINKS", &links}} {
		for _, value := range strings.FieldsFunc(f.env[v.name], func(c rune) bool { return c == ' ' || c == ',' }) {
			*v.to = append(*v.to, found{v.name, value})
		}
	}
	files := []string{path.Join(f.config(), "uv/uv.toml"), "/etc/xdg/uv/uv.toml", "/etc/uv/uv.toml"}
	if own := f.env["UV_CONFIG_FILE"]; own != "" {
		files = []string{own}
	}
	if f.env["UV_NO_CONFIG"] != "" {
		files = nil
	}
	for _, name := range files {
		var file uvFile
		if toml.Unmarshal([]byte(f.read(name)), &file) != nil { // the error holds a piece of the text
			f.skip(name, "it is no TOML, or not in uv's form")
			continue
		}
		for _, x := range file.Index {
			value := x.URL
			if x.Name != "" {
				value = x.Name + "=" + value
			}
			switch at := (found{name + ": index", value}); {
			case x.Explicit:
				f.skip(at.place, "there is no variable for an index that is explicit")
			case x.Default:
				byDefault = append(byDefault, at)
			default:
				others = append(others, at)
			}
		}
		if file.IndexURL != "" {
			byDefault = append(byDefault, found{name + ": index-url", file.IndexURL})
		}
		for _, value := range file.ExtraIndexURL {
			others = append(others, found{name + ": extra-index-url", value})
		}
		for _, value := range file.FindLinks {
			links = append(links, found{name + ": find-links", value})
		}
	}
	if len(byDefault)+len(others) == 0 {
		f.set("UV_DEFAULT_INDEX", f.out.Env["PIP_INDEX_URL"])
		f.set("UV_INDEX", f.out.Env["PIP_EXTRA_INDEX_URL"])
	}
	if len(byDefault) > 1 {
		byDefault = byDefault[:1] // the first one holds
	}
	f.set("UV_DEFAULT_INDEX", f.indexes(byDefault)...)
	f.set("UV_INDEX", f.indexes(others)...)
	f.set("UV_FIND_LINKS", f.indexes(links)...)
}

// indexes cleans values that are URL or NAME=URL.
func (f *finder) indexes(values []found) []string {
	var clean []string
	for _, v := range values {
		name, raw, named := strings.Cut(v.value, "=")
		if !named || !indexName.MatchString(name) {
			name, raw = "", v.value
		}
		u, ok := f.url(v.place, raw)
		if !ok {
			continue
		}
		if name != "" {
			f.uvCredential(name, u)
			u = name + "=" + u
		}
		if !slices.Contains(clean, u) {
			clean = append(clean, u)
		}
	}
	return clean
}

var notAlphanumeric = regexp.MustCompile(`[^A-Za-z0-9]`)

// uvCredential is what variables say for a named index.
func (f *finder) uvCredential(name, clean string) {
	variable := "UV_INDEX_" + strings.ToUpper(notAlphanumeric.ReplaceAllString(name, "_"))
	if at, ok := registryOf(clean); ok {
		f.offer(at, Basic, f.env[variable+"_USERNAME"]+":"+f.env[variable+"_PASSWORD"])
	}
}

// registryOf is where a URL that was cleaned leads.
func registryOf(clean string) (registry, bool) {
	u, err := url.Parse(clean)
	if err != nil {
		return registry{}, false
	}
	host, ok := hostOf(u)
	return registry{host, prefix(u.Path)}, ok
}
