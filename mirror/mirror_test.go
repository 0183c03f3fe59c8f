package mirror

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"unicode"

	"github.com/google/go-cmp/cmp"
)

const home = "/home/op"

// plain is Settings in a form that a table can have, secrets and all.
type plain struct {
	Env, Files  map[string]string
	Hosts       []string
	Credentials []string // URL kind value
	Skipped     []string
}

func reveal(s Settings) plain {
	p := plain{Env: s.Env, Files: s.Files, Skipped: s.Skipped}
	for _, h := range s.Hosts {
		p.Hosts = append(p.Hosts, h.String())
	}
	for _, c := range s.Credentials {
		p.Credentials = append(p.Credentials, fmt.Sprintf("%s%s %s %s", c.Host, c.Path, c.Kind, c.Value.Reveal()))
	}
	return p
}

// find writes files and looks for settings among them.
func find(t *testing.T, env []string, files map[string]string) Settings {
	t.Helper()
	dir := t.TempDir()
	for name, text := range files {
		name = filepath.Join(dir, strings.Replace(name, "~", home, 1))
		if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	s, err := Find(t.Context(), env, home, os.DirFS(dir))
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestFind(t *testing.T) {
	for _, tt := range []struct {
		name  string
		env   []string
		files map[string]string
		want  plain
	}{
		{name: "nothing"},
		{
			name:  "pip, variables before files, and what is not visible inside",
			env:   []string{"PIP_INDEX_URL=https://u:p%40ss@Pip.Corp.test:8443/api/pypi/simple/", "PIP_FIND_LINKS=/opt/wheels file:///w https://links.test/w/", "PIP_TRUSTED_HOST=* pip.corp.test other.test", "PIP_TIMEOUT=3"},
			files: map[string]string{"/etc/pip.conf": "[global]\nindex-url = https://ignored:secret@old.test/simple\nextra-index-url =\n    https://a.test/simple\n\n    # a comment\n    http://tok@b.test/x/simple/\n  https://a.test/simple\n"},
			want: plain{
				Env: map[string]string{
					"PIP_INDEX_URL": "https://Pip.Corp.test:8443/api/pypi/simple/", "PIP_EXTRA_INDEX_URL": "https://a.test/simple http://b.test/x/simple/",
					"PIP_FIND_LINKS": "https://links.test/w/", "PIP_TRUSTED_HOST": "pip.corp.test",
					"UV_DEFAULT_INDEX": "https://Pip.Corp.test:8443/api/pypi/simple/", "UV_INDEX": "https://a.test/simple http://b.test/x/simple/",
				},
				Hosts:       []string{"https://a.test:443", "http://b.test:80", "https://links.test:443", "https://pip.corp.test:8443"},
				Credentials: []string{"http://b.test:80/x/ basic tok:", "https://pip.corp.test:8443/api/pypi/ basic u:p@ss"},
				Skipped:     []string{"PIP_FIND_LINKS: sandboxes reach only http and https"},
			},
		},
		{
			name: "pip, the order of files and sections",
			files: map[string]string{
				"/etc/pip.conf": "[install]\nindex_url: https://install.test/\n[list]\nindex-url = https://list.test\n", "~/.pip/pip.conf": "[global]\nindex-url = https://legacy.test\n",
				"~/.config/pip/pip.conf": "[global]\nindex-url = https://user.test\n;index-url = https://no.test\n--extra-index-url = https://e.test\n",
			},
			want: plain{
				Env:   map[string]string{"PIP_INDEX_URL": "https://install.test/", "PIP_EXTRA_INDEX_URL": "https://e.test", "UV_DEFAULT_INDEX": "https://install.test/", "UV_INDEX": "https://e.test"},
				Hosts: []string{"https://e.test:443", "https://install.test:443"},
			},
		},
		{
			name:  "pip told to read no file",
			env:   []string{"PIP_CONFIG_FILE=/dev/null"},
			files: map[string]string{"/etc/pip.conf": "[global]\nindex-url = https://x.test\n"},
		},
		{
			name: "URLs that nothing can be done with",
			env: []string{
				"PIP_INDEX_URL=https://u:secret@h.test/%zz", "PIP_EXTRA_INDEX_URL=https://*.test/ https://h.test:0/ https://h.test:99999/ https:// https:opaque https://h.test/?token=secret https://h.test/#secret https://-h.test ftp://u:secret@h.test/ https://h_1.test",
				"UV_DEFAULT_INDEX=/local", "GOPROXY=file:///mod",
			},
			want: plain{
				Env:   map[string]string{"PIP_EXTRA_INDEX_URL": "https://h_1.test"},
				Hosts: []string{"https://h_1.test:443"},
				Skipped: []string{
					"PIP_INDEX_URL: it is no URL", "PIP_EXTRA_INDEX_URL: its host or port is none that can be named to a sandbox",
					"PIP_EXTRA_INDEX_URL: its part behind the path may be a credential", "PIP_EXTRA_INDEX_URL: sandboxes reach only http and https",
					"UV_DEFAULT_INDEX: sandboxes reach only http and https", "GOPROXY: sandboxes reach only http and https",
				},
			},
		},
		{
			name: "uv",
			env:  []string{"UV_INDEX=https://plain.test/simple corp=https://corp.test/simple/", "UV_INDEX_CORP_USERNAME=me", "UV_INDEX_CORP_PASSWORD=pw", "PIP_INDEX_URL=https://pip.test"},
			files: map[string]string{
				"~/.config/uv/uv.toml": "extra-index-url = [\"https://u:p@extra.test/simple\"]\n[[index]]\nname = \"main\"\nurl = \"https://main.test/simple\"\ndefault = true\n[[index]]\nname=\"ex\"\nurl=\"https://explicit.test\"\nexplicit=true\n",
				"/etc/uv/uv.toml":      "index-url = \"https://system.test\"",
			},
			want: plain{
				Env: map[string]string{
					"PIP_INDEX_URL": "https://pip.test", "UV_DEFAULT_INDEX": "main=https://main.test/simple",
					"UV_INDEX": "https://plain.test/simple corp=https://corp.test/simple/ https://extra.test/simple",
				},
				Hosts:       []string{"https://corp.test:443", "https://extra.test:443", "https://main.test:443", "https://pip.test:443", "https://plain.test:443"},
				Credentials: []string{"https://corp.test:443/ basic me:pw", "https://extra.test:443/ basic u:p"},
				Skipped:     []string{home + "/.config/uv/uv.toml: index: there is no variable for an index that is explicit"},
			},
		},
		{
			name: "npm, with every way to say a credential",
			env:  []string{"TOK=t0k", "npm_config_//env.test/:_authToken=fromenv", "NPM_CONFIG_@env:registry=https://env.test/"},
			files: map[string]string{
				"/usr/etc/npmrc": "registry=https://old:secret@global.test/\n",
				"~/.npmrc": "; a comment\nregistry = \"https://npm.corp.test/api/npm/all/\"\n@corp:registry=https://npm.corp.test/api/npm/corp ; behind\n@b:registry=http://b.test:4873/\n@c:registry=https://c.test/npm/\n" +
					"@../evil:registry=https://evil.test/\n@d:registry=https://d.test/\n//d.test/:_auth=%%%\n" +
					"//npm.corp.test/api/npm/:_authToken=${TOK}\n//npm.corp.test/api/npm/corp/:_authToken='quoted'\n//b.test:4873/:username=bob\n//b.test:4873/:_password=cHc=\n//c.test/npm/:_auth=dTpw\n//registry.npmjs.org/:_authToken=publishes\nfund=false\n",
			},
			want: plain{
				Env: map[string]string{"NPM_CONFIG_REGISTRY": "https://npm.corp.test/api/npm/all/", "NPM_CONFIG_GLOBALCONFIG": "/etc/npmrc"},
				Files: map[string]string{"/etc/npmrc": "@b:registry=http://b.test:4873/\n@c:registry=https://c.test/npm/\n@corp:registry=https://npm.corp.test/api/npm/corp\n" +
					"@d:registry=https://d.test/\n@env:registry=https://env.test/\n"},
				Hosts: []string{"http://b.test:4873", "https://c.test:443", "https://d.test:443", "https://env.test:443", "https://npm.corp.test:443"},
				Credentials: []string{
					"http://b.test:4873/ basic bob:pw", "https://c.test:443/npm/ basic u:p", "https://env.test:443/ bearer fromenv",
					"https://npm.corp.test:443/api/npm/ bearer t0k", "https://npm.corp.test:443/api/npm/corp/ bearer quoted",
				},
				Skipped: []string{"npm's _auth for https://d.test:443: it is not in base64"},
			},
		},
		{
			name:  "npm, a credential without a registry's name",
			env:   []string{"NPM_CONFIG_USERCONFIG=/cfg/npmrc", "npm_config_registry=https://r.test/npm"},
			files: map[string]string{"/cfg/npmrc": "_auth=dTpw\n_authToken=\n", "~/.npmrc": "registry=https://unread.test"},
			want: plain{
				Env: map[string]string{"NPM_CONFIG_REGISTRY": "https://r.test/npm"}, Hosts: []string{"https://r.test:443"},
				Credentials: []string{"https://r.test:443/npm/ basic u:p"},
			},
		},
		{
			name: "Go",
			env:  []string{"GOPROXY=https://u:p@goproxy.test/mod,file:///local|https://second.test,direct", "GOFLAGS=-mod=mod -modfile=/x -buildvcs=false"},
			files: map[string]string{
				"~/.config/go/env": "GOPROXY=https://file.test\nGOPRIVATE=*.corp.test,git.test/team\nGONOSUMDB=u:p@x\nGOSUMDB=sum.test+0123abcd+AbC= https://u2:p2@sumdb.test/db\nGOTOOLCHAIN=local\n",
			},
			want: plain{
				Env: map[string]string{
					"GOPROXY": "https://goproxy.test/mod,https://second.test,direct", "GOFLAGS": "-mod=mod -buildvcs=false", "GOPRIVATE": "*.corp.test,git.test/team",
					"GOSUMDB": "sum.test+0123abcd+AbC= https://sumdb.test/db",
				},
				Hosts:       []string{"https://goproxy.test:443", "https://second.test:443", "https://sumdb.test:443"},
				Credentials: []string{"https://goproxy.test:443/mod/ basic u:p", "https://sumdb.test:443/db/ basic u2:p2"},
				Skipped: []string{
					"GOPROXY: sandboxes reach only http and https", home + "/.config/go/env: GONOSUMDB: it is no list of patterns", "GOFLAGS: a flag may name what sandboxes do not have",
				},
			},
		},
		{name: "Go without checksums", env: []string{"GOSUMDB=off", "GOENV=off", "GOPROXY=off"}, files: map[string]string{"~/.config/go/env": "GOPRIVATE=x"}, want: plain{Env: map[string]string{"GOSUMDB": "off", "GOPROXY": "off"}}},
		{name: "Go, a database by its name", env: []string{"GOSUMDB=sum.test"}, want: plain{Env: map[string]string{"GOSUMDB": "sum.test"}, Hosts: []string{"https://sum.test:443"}}},
		{name: "Go, a credential in the wrong place", env: []string{"GOSUMDB=u:secret@sum.test"}, want: plain{Skipped: []string{"GOSUMDB: it is no database of checksums"}}},
		{
			name: "cargo",
			env:  []string{"CARGO_REGISTRIES_OWN_TEAM_TOKEN=fromenv", "CARGO_REGISTRIES_EXTRA_INDEX=sparse+https://extra.test/index/"},
			files: map[string]string{
				"~/.cargo/config.toml": "[source.crates-io]\nreplace-with = 'first'\n[source.first]\nreplace-with = 'mirror'\n[source.mirror]\nregistry = 'sparse+https://u:p@crates.test/api/index/'\n" +
					"[source.vendored]\ndirectory = '/vendor'\n[registries.own-team]\nindex = 'https://git.test/team/index'\n[registries.\"a b\"]\nindex = 'https://no.test'\n[registries.local]\nindex='file:///x'\n[registry]\ndefault = 'own-team'\n[build]\njobs = 3\n",
				"~/.cargo/credentials.toml": "[registry]\ntoken = 'publishes'\n[registries.own-team]\ntoken = 'infile'\n[registries.extra]\ntoken = 'Bearer x'\n",
			},
			want: plain{
				Files: map[string]string{"/.cargo/config.toml": "[registries.extra]\nindex = \"sparse+https://extra.test/index/\"\n[registries.own-team]\nindex = \"https://git.test/team/index\"\n" +
					"[registry]\ndefault = \"own-team\"\n[source.crates-io]\nreplace-with = \"mirror\"\n[source.mirror]\nregistry = \"sparse+https://crates.test/api/index/\"\n"},
				Hosts:       []string{"https://crates.test:443", "https://extra.test:443", "https://git.test:443"},
				Credentials: []string{"https://crates.test:443/api/ basic u:p", "https://extra.test:443/ raw Bearer x", "https://git.test:443/team/ raw fromenv"},
				Skipped:     []string{home + "/.cargo/config.toml: registries: sandboxes reach only http and https"},
			},
		},
		{
			name:  "cargo, a source that is a registry, and one that is a directory",
			files: map[string]string{"~/.cargo/config": "[source.crates-io]\nreplace-with = 'own'\n[registries.own]\nindex = 'sparse+https://own.test/'\n"},
			want: plain{
				Files: map[string]string{"/.cargo/config.toml": "[registries.own]\nindex = \"sparse+https://own.test/\"\n[source.crates-io]\nreplace-with = \"own\"\n"},
				Hosts: []string{"https://own.test:443"},
			},
		},
		{
			name:  "cargo, sources in a circle, and a directory",
			files: map[string]string{"~/.cargo/config.toml": "[source.crates-io]\nreplace-with = 'a'\n[source.a]\nreplace-with = 'b'\n[source.b]\nreplace-with = 'a'\n"},
			want:  plain{Skipped: []string{home + "/.cargo/config.toml: source: sandboxes reach only http and https"}},
		},
		{
			name: "apt",
			files: map[string]string{
				"/etc/apt/sources.list":                "# deb http://no.test/ x main\ndeb [arch=amd64 signed-by=/k] http://one.test/debian bookworm main\ndeb-src\thttps://u:p@two.test:8443/deb/ x main # y\ndeb cdrom:[x]/ y main\ndeb mirror+http://m.test/ x\nrpm http://no.test\ndeb [broken http://no.test\n",
				"/etc/apt/sources.list.d/a.list":       "deb https://three.test/ ./\n",
				"/etc/apt/sources.list.d/b.sources":    "# c\nTypes: deb\nURIs: https://four.test/debian\n  http://five.test/\nSuites: x\nSigned-By:\n -----BEGIN PGP-----\n URIs: https://no.test\n\nTypes: deb\nURIs: https://off.test/\nEnabled: no\n\nEnabled: no\nURIs: https://off2.test/\n",
				"/etc/apt/sources.list.d/c.list.save":  "deb https://no.test/ ./\n",
				"/etc/apt/auth.conf":                   "machine four.test/debian login l password pw\nmachine http://five.test login f password fp\nmachine three.test/else login no password no\n",
				"/etc/apt/auth.conf.d/x.conf":          "machine three.test\nlogin l3\npassword p3\n",
				"/etc/apt/auth.conf.d/ignored.disable": "machine one.test login no password no\n",
			},
			want: plain{
				Hosts:       []string{"http://five.test:80", "https://four.test:443", "http://one.test:80", "https://three.test:443", "https://two.test:8443"},
				Credentials: []string{"http://five.test:80/ basic f:fp", "https://four.test:443/debian/ basic l:pw", "https://three.test:443/ basic l3:p3", "https://two.test:8443/deb/ basic u:p"},
				Skipped:     []string{"/etc/apt/sources.list: sandboxes reach only http and https"},
				Files: map[string]string{
					"/etc/apt/sources.list":             "deb [arch=amd64 signed-by=/k] http://one.test/debian bookworm main\ndeb-src https://two.test:8443/deb/ x main\n",
					"/etc/apt/sources.list.d/a.list":    "deb https://three.test/ ./\n",
					"/etc/apt/sources.list.d/b.sources": "URIs: https://four.test/debian http://five.test/\nTypes: deb\nSuites: x\nSigned-By:\n -----BEGIN PGP-----\n URIs: https://no.test\n",
				},
			},
		},
		{
			name: "netrc, for what is used only",
			env:  []string{"PIP_INDEX_URL=https://in:url@pip.test/simple", "GOPROXY=https://go.test/mod", "NPM_CONFIG_REGISTRY=http://npm.test/"},
			files: map[string]string{"~/.netrc": "# c\nmachine go.test login me password s3cret # x\nmachine pip.test login no password no\nmachine github.com login me password mine\nmacdef init\nmachine go.test login macro password no\n\n" +
				"machine npm.test login never password overhttp\ndefault login any password no"},
			want: plain{
				Env:         map[string]string{"PIP_INDEX_URL": "https://pip.test/simple", "UV_DEFAULT_INDEX": "https://pip.test/simple", "GOPROXY": "https://go.test/mod", "NPM_CONFIG_REGISTRY": "http://npm.test/"},
				Hosts:       []string{"https://go.test:443", "http://npm.test:80", "https://pip.test:443"},
				Credentials: []string{"https://go.test:443/mod/ basic me:s3cret", "https://pip.test:443/ basic in:url"},
			},
		},
		{
			name:  "files that are damaged or too large",
			env:   []string{"PIP_EXTRA_INDEX_URL=https://a.test/\x01"},
			files: map[string]string{"~/.config/uv/uv.toml": "index-url = https://u:secret@x.test", "~/.cargo/config.toml": "token = 'secret", "~/.npmrc": strings.Repeat("x", maxFile+1), "/etc/pip.conf": "\x00[[[=\n=\n:"},
			want: plain{Skipped: []string{
				"PIP_EXTRA_INDEX_URL: it is no URL", home + "/.config/uv/uv.toml: it is no TOML, or not in uv's form", home + "/.npmrc: it cannot be read, or is larger than 1 MiB",
				home + "/.cargo/config.toml: it is no TOML, or not in cargo's form",
			}},
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := find(t, tt.env, tt.files)
			want := tt.want
			if want.Env == nil {
				want.Env = map[string]string{}
			}
			if want.Files == nil {
				want.Files = map[string]string{}
			}
			if diff := cmp.Diff(want, reveal(s)); diff != "" {
				t.Error(diff)
			}
			silent(t, s)
		})
	}
}

// silent looks for secrets in all that is not to have them, however printed.
func silent(t *testing.T, s Settings) {
	t.Helper()
	text, err := json.Marshal(s)
	if err != nil {
		t.Fatal(err)
	}
	var log strings.Builder
	slog.New(slog.NewTextHandler(&log, nil)).Info("x", "settings", s, "credentials", s.Credentials)
	all := string(text) + fmt.Sprintf("%v %+v %#v %s %q %x", s, s, s, s, s, s) + log.String()
	for _, c := range s.Credentials {
		_, password, _ := strings.Cut(c.Value.Reveal(), ":")
		if len(password) > 2 && strings.Contains(all, password) || len(c.Value.Reveal()) > 3 && strings.Contains(all, c.Value.Reveal()) || strings.Contains(all, fmt.Sprintf("%x", c.Value.Reveal())) {
			t.Errorf("a credential of %v is in what is printed", c.Host)
		}
	}
	if strings.Contains(all, "secret@") || strings.Contains(all, "=secret") || strings.Contains(all, ":secret") {
		t.Errorf("a credential is in what is printed: %s", all)
	}
}

func TestAuthorization(t *testing.T) {
	for kind, want := range map[Kind]string{Basic: "Basic dTpw", Bearer: "Bearer u:p", Raw: "u:p"} {
		if got := (Credential{Kind: kind, Value: NewSecret("u:p")}).Authorization(); got != want {
			t.Errorf("%s: %q, want %q", kind, got, want)
		}
	}
}

func TestFindEndsWithItsContext(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := Find(ctx, nil, home, os.DirFS(t.TempDir())); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

func TestParseLines(t *testing.T) {
	for _, tt := range []struct {
		syntax syntax
		text   string
		want   []entry
	}{
		{pipSyntax, "a=1\n[ s ]\n b : 2 \n   3\n\n   4\n b2=5\n[t\nc\n", []entry{{key: "a", value: "1"}, {section: "s", stanza: 0, key: "b", value: "2\n3\n4"}, {section: "s", stanza: 1, key: "b2", value: "5"}}},
		{aptSyntax, "A:\n x\n y\n# c\nB: 1:2\n\nA: 3\n z\n\n w: 4", []entry{{key: "A", value: "x\ny"}, {key: "B", value: "1:2"}, {stanza: 1, key: "A", value: "3\nz"}, {stanza: 2, key: "w", value: "4"}}},
		{npmSyntax, "a = b = c\n  d=e\n;f=g\r\nh=i\r\n", []entry{{key: "a", value: "b = c"}, {key: "d", value: "e"}, {key: "h", value: "i"}}},
		{goSyntax, "\xff=\x00", []entry{{key: "\xff", value: "\x00"}}},
	} {
		if diff := cmp.Diff(tt.want, tt.syntax.parse(tt.text), cmp.AllowUnexported(entry{})); diff != "" {
			t.Errorf("%q: %s", tt.text, diff)
		}
	}
}

func FuzzParseLines(f *testing.F) {
	f.Add("[a]\nb = c\n  d\n\n#e\nF: g")
	f.Add("=\n:\n[]\n \n\t=")
	f.Fuzz(func(t *testing.T, text string) {
		for _, s := range []syntax{pipSyntax, npmSyntax, goSyntax, aptSyntax} {
			for _, e := range s.parse(text) {
				if e.key == "" || strings.Contains(e.key, "\n") || strings.TrimSpace(e.value) != e.value || !s.continued && strings.Contains(e.value, "\n") {
					t.Fatalf("%+v", e)
				}
			}
		}
	})
}

func FuzzParseNetrc(f *testing.F) {
	f.Add("machine a login b password c\ndefault login d\nmacdef x\n\nmachine e # f")
	f.Add("machine machine login login password")
	f.Fuzz(func(t *testing.T, text string) {
		for _, m := range parseNetrc(text) {
			if m.name == "" || strings.ContainsFunc(m.name+m.login+m.password, unicode.IsSpace) {
				t.Fatalf("%+v", m)
			}
		}
	})
}

// FuzzURL checks what must hold for every setting: no credential in what a
// sandbox gets, hosts that are names, and the same again when it is read again.
func FuzzURL(f *testing.F) {
	for _, seed := range []string{"https://u:p@h.test:1/a/simple/", "http://[::1]:80/", "https://h/@x:y", "sparse+https://u@h", "a=https://u:p@h", "https://u:p@h,direct", "//h/:_authToken=x", "deb [a] https://u:p@h/ x"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, raw string) {
		x := &finder{out: Settings{Env: map[string]string{}}}
		clean, ok := x.url("x", raw)
		s := x.finish()
		if !ok {
			if len(s.Hosts)+len(s.Credentials) != 0 {
				t.Fatalf("%q is refused and used: %+v", raw, s)
			}
			return
		}
		again := &finder{out: Settings{Env: map[string]string{}}}
		twice, ok := again.url("x", clean)
		if s2 := again.finish(); !ok || twice != clean || len(s2.Credentials) != 0 || !slices.Equal(s2.Hosts, s.Hosts) {
			t.Fatalf("%q is %q, and that is %q: %+v", raw, clean, twice, s2)
		}
		if len(s.Hosts) != 1 || strings.ContainsAny(s.Hosts[0].Name, "*@/?# %") || s.Hosts[0].Port == 0 || s.Hosts[0].Name == "" {
			t.Fatalf("%q leads to %+v", raw, s.Hosts)
		}
		for _, c := range s.Credentials {
			if c.Host != s.Hosts[0] || !strings.HasPrefix(c.Path, "/") || !strings.HasSuffix(c.Path, "/") {
				t.Fatalf("%q: a credential for %v%s", raw, c.Host, c.Path)
			}
		}
	})
}

func FuzzOneLine(f *testing.F) {
	f.Add("deb [arch=amd64] https://h.test/ x main # c")
	f.Add("deb-src\t[ ] x")
	f.Fuzz(func(t *testing.T, line string) {
		head, uri, tail := oneLine(line)
		if whole := strings.Join(append([]string{head, uri}, tail...), " "); strings.ContainsAny(whole, "\n\r") || uri != "" && !strings.HasPrefix(whole, "deb") {
			t.Fatalf("%q", whole)
		}
		if strings.ContainsFunc(uri, unicode.IsSpace) || strings.HasPrefix(uri, "[") && !strings.Contains(line, "]") {
			t.Fatalf("%q", uri)
		}
	})
}
