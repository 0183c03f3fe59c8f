package mirror

import (
	"cmp"
	"encoding/base64"
	"maps"
	"net/url"
	"path"
	"regexp"
	"slices"
	"strings"
)

// npmrc is where sandboxes have the registries of scopes: a shell drops the
// variables that npm has for them.
const npmrc = "/etc/npmrc"

// npmAuth is what is said for one registry, or a path above several.
type npmAuth struct{ token, auth, user, password string }

// npm reads the settings of npm, which are those of pnpm and Yarn 1, too:
// variables, the user's file, the machine's.
func (f *finder) npm() {
	settings := map[string]found{}
	variables := map[string]string{}
	for _, name := range slices.Sorted(maps.Keys(f.env)) {
		if len(name) > len("npm_config_") && strings.EqualFold(name[:len("npm_config_")], "npm_config_") && f.env[name] != "" {
			key := name[len("npm_config_"):]
			if !strings.HasPrefix(key, "//") {
				key = strings.ToLower(key[:1] + strings.ReplaceAll(key[1:], "_", "-"))
			}
			variables[key] = name
		}
	}
	files := []string{"/usr/etc/npmrc", "/usr/local/etc/npmrc", npmrc}
	if name := variables["globalconfig"]; name != "" {
		files = []string{f.env[name]}
	}
	files = append(files, cmp.Or(f.env[variables["userconfig"]], path.Join(f.home, ".npmrc")))
	for _, name := range files {
		for _, e := range npmSyntax.parse(f.read(name)) {
			if e.section == "" {
				key := f.npmText(e.key)
				settings[key] = found{name, f.npmText(e.value)}
			}
		}
	}
	for key, name := range variables {
		settings[key] = found{name, f.env[name]}
	}

	nerfs := map[string]registry{} // by how credentials name them
	var scopes strings.Builder
	for _, key := range slices.Sorted(maps.Keys(settings)) {
		v := settings[key]
		scope, scoped := strings.CutSuffix(key, ":registry")
		if key != "registry" && !(scoped && npmScope.MatchString(scope)) {
			continue
		}
		clean, ok := f.url(v.place+": "+key, v.value)
		if !ok {
			continue
		}
		if u, err := url.Parse(clean); err == nil {
			host, _ := hostOf(u)
			nerfs["//"+u.Host+strings.TrimSuffix(u.EscapedPath(), "/")+"/"] = registry{host, strings.TrimSuffix(path.Clean("/"+u.Path), "/") + "/"}
		}
		if scoped {
			scopes.WriteString(key + "=" + clean + "\n")
		} else {
			f.set("NPM_CONFIG_REGISTRY", clean)
		}
	}
	if scopes.Len() > 0 {
		f.out.Files[npmrc] = scopes.String()
		f.set("NPM_CONFIG_GLOBALCONFIG", npmrc)
	}
	f.npmCredentials(settings, nerfs)
}

var (
	npmScope    = regexp.MustCompile(`^@[a-z0-9~][a-z0-9._~-]*$`)
	npmVariable = regexp.MustCompile(`\$\{([^${}?]+)(\?)?\}`)
)

// npmText reads a text of npmrc: quotes, comments behind it, variables.
func (f *finder) npmText(text string) string {
	if n := len(text); n >= 2 && text[0] == text[n-1] && (text[0] == '"' || text[0] == '\'') {
		text = text[1 : n-1]
	} else if i := strings.IndexAny(text, ";#"); i >= 0 && (i == 0 || text[i-1] != '\\') {
		text = strings.TrimSpace(text[:i])
	}
	return npmVariable.ReplaceAllStringFunc(text, func(m string) string {
		parts := npmVariable.FindStringSubmatch(m)
		if value, ok := f.env[parts[1]]; ok || parts[2] != "" {
			return value
		}
		return m
	})
}

// npmCredentials offers what is said for registries that are used: a key is
// //HOST/PATH/:FIELD, and holds for what is below that path; without a path,
// as old versions had it, for the default registry.
func (f *finder) npmCredentials(settings map[string]found, nerfs map[string]registry) {
	auths := map[string]*npmAuth{}
	byDefault, _ := registryOf(f.out.Env["NPM_CONFIG_REGISTRY"])
	for key, v := range settings {
		i := strings.LastIndexByte(key, ':')
		nerf, field := key[:max(i, 0)], key[i+1:]
		if nerf == "" {
			field = strings.ToLower(strings.ReplaceAll(field, "-", ""))
		} else if !strings.HasPrefix(nerf, "//") {
			continue
		}
		a := auths[nerf]
		if a == nil {
			a = &npmAuth{}
			auths[nerf] = a
		}
		switch strings.ToLower(field) {
		case "_authtoken":
			a.token = v.value
		case "_auth":
			a.auth = v.value
		case "username":
			a.user = v.value
		case "_password":
			a.password = v.value
		}
	}
	for _, nerf := range slices.Backward(slices.Sorted(maps.Keys(auths))) { // the longer path first
		var at []registry
		if nerf == "" && byDefault.host.Name != "" {
			at = append(at, byDefault)
		}
		for _, of := range slices.Sorted(maps.Keys(nerfs)) {
			if base := strings.TrimSuffix(nerf, "/") + "/"; nerf != "" && strings.HasPrefix(of, base) {
				_, below, _ := strings.Cut(base[2:], "/")
				if p, err := url.PathUnescape(below); err == nil {
					at = append(at, registry{nerfs[of].host, strings.TrimSuffix(path.Clean("/"+p), "/") + "/"})
				}
			}
		}
		for _, r := range at {
			auths[nerf].offer(f, r)
		}
	}
}

func (a *npmAuth) offer(f *finder, at registry) {
	switch {
	case a.token != "":
		f.offer(at, Bearer, a.token)
	case a.auth != "":
		if text, err := base64.StdEncoding.DecodeString(a.auth); err == nil {
			f.offer(at, Basic, string(text))
		} else {
			f.skip("npm's _auth for "+at.host.String(), "it is not in base64")
		}
	case a.user != "" && a.password != "":
		if text, err := base64.StdEncoding.DecodeString(a.password); err == nil {
			f.offer(at, Basic, a.user+":"+string(text))
		} else {
			f.skip("npm's _password for "+at.host.String(), "it is not in base64")
		}
	}
}
