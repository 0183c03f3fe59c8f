package mirror

import (
	"cmp"
	"fmt"
	"maps"
	"path"
	"regexp"
	"slices"
	"strings"

	"github.com/pelletier/go-toml/v2"
)

// cargoConfig is found by cargo from every directory.
const cargoConfig = "/.cargo/config.toml"

// cargoFile is what matters of config.toml, and of credentials.toml.
type cargoFile struct {
	Source map[string]struct {
		ReplaceWith string `toml:"replace-with"`
		Registry    string `toml:"registry"`
	} `toml:"source"`
	Registries map[string]struct {
		Index string `toml:"index"`
		Token string `toml:"token"`
	} `toml:"registries"`
	Registry struct {
		Default string `toml:"default"`
	} `toml:"registry"`
}

var cargoName = regexp.MustCompile(`^[A-Za-z0-9_-]+$`)

// cargo reads what replaces crates.io, and other registries.
func (f *finder) cargo() {
	home := cmp.Or(f.env["CARGO_HOME"], path.Join(f.home, ".cargo"))
	config, credentials := f.cargoFile(path.Join(home, "config")), f.cargoFile(path.Join(home, "credentials"))

	registries := map[string]found{}
	for name, r := range config.Registries {
		registries[name] = found{path.Join(home, "config.toml") + ": registries", r.Index}
	}
	for variable, value := range f.env {
		if name, ok := between(variable, "CARGO_REGISTRIES_", "_INDEX"); ok {
			name = strings.ToLower(name)
			for known := range config.Registries { // variables know no hyphens
				if strings.EqualFold(strings.ReplaceAll(known, "-", "_"), name) {
					name = known
				}
			}
			registries[name] = found{variable, value}
		}
	}
	var text strings.Builder
	used := map[string]string{}
	for _, name := range slices.Sorted(maps.Keys(registries)) {
		v := registries[name]
		if !cargoName.MatchString(name) || v.value == "" {
			continue
		}
		index, at, ok := f.cargoURL(v.place, v.value)
		if !ok {
			continue
		}
		used[name] = index
		fmt.Fprintf(&text, "[registries.%s]\nindex = %q\n", name, index)
		variable := "CARGO_REGISTRIES_" + strings.ToUpper(strings.ReplaceAll(name, "-", "_")) + "_TOKEN"
		f.offer(at, Raw, cmp.Or(f.env[variable], credentials.Registries[name].Token, config.Registries[name].Token))
	}
	if name := cmp.Or(f.env["CARGO_REGISTRY_DEFAULT"], config.Registry.Default); used[name] != "" {
		fmt.Fprintf(&text, "[registry]\ndefault = %q\n", name)
	}

	// crates.io may be replaced by a source that is replaced itself.
	name := "crates-io"
	for range config.Source {
		if next := config.Source[name].ReplaceWith; next != "" {
			name = next
		}
	}
	place := path.Join(home, "config.toml") + ": source"
	if _, known := used[name]; known {
		fmt.Fprintf(&text, "[source.crates-io]\nreplace-with = %q\n", name)
	} else if name != "crates-io" && cargoName.MatchString(name) {
		if index, _, ok := f.cargoURL(place, config.Source[name].Registry); ok {
			fmt.Fprintf(&text, "[source.crates-io]\nreplace-with = %q\n[source.%s]\nregistry = %q\n", name, name, index)
		}
	}
	f.out.Files[cargoConfig] = text.String()
}

// cargoFile reads NAME.toml, or NAME as old versions called it.
func (f *finder) cargoFile(name string) (file cargoFile) {
	text := f.read(name)
	if text == "" {
		text = f.read(name + ".toml")
	}
	if toml.Unmarshal([]byte(text), &file) != nil { // the error holds a piece of the text
		f.skip(name+".toml", "it is no TOML, or not in cargo's form")
		return cargoFile{}
	}
	return file
}

// cargoURL is url with cargo's words before the scheme.
func (f *finder) cargoURL(place, raw string) (string, registry, bool) {
	kind, rest, ok := strings.Cut(raw, "+")
	if !ok || kind != "sparse" && kind != "registry" {
		kind, rest = "", raw
	}
	clean, ok := f.url(place, rest)
	if !ok {
		return "", registry{}, false
	}
	at, _ := registryOf(clean)
	if kind != "" {
		clean = kind + "+" + clean
	}
	return clean, at, true
}

func between(text, before, behind string) (string, bool) {
	text, begins := strings.CutPrefix(text, before)
	text, ends := strings.CutSuffix(text, behind)
	return text, begins && ends && text != ""
}
