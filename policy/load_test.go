package policy

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"testing/fstest"

	"github.com/google/go-cmp/cmp"
)

// dir is a directory of policies.
func dir(files map[string]string) fstest.MapFS {
	m := fstest.MapFS{}
	for name, text := range files {
		m[name] = &fstest.MapFile{Data: []byte(text)}
	}
	return m
}

const (
	permitAll = `@id("all") permit (principal, action, resource);`
	noMail    = `@id("no-mail") forbid (principal, action == Action::"net:connect", resource) when { context.port == 25 };`
)

func TestLoad(t *testing.T) {
	p, err := Load(dir(map[string]string{
		"all.cedar":            noMail,
		"teams/research.cedar": permitAll,
		"profiles/own.cedar":   "not read",
		"schema.cedarschema":   "not read",
		"README.md":            "not read",
		".git/config":          "not read",
		"teams/.swp":           "not read",
	}))
	if err != nil {
		t.Fatal(err)
	}
	research, other := p.For("research"), p.For("sales")
	if got := research.IDs(); !slices.Equal(got, []string{"all", "no-mail"}) {
		t.Errorf("research has %v", got)
	}
	if got := other.IDs(); !slices.Equal(got, []string{"no-mail", "ports-answer", "public-addresses", "resolve-names", "secrets-at-their-place", "team-creates", "team-uses-files", "team-uses-sandboxes"}) {
		t.Errorf("sales has %v", got)
	}
	if got := p.Teams(); !slices.Equal(got, []string{"research"}) {
		t.Errorf("teams %v", got)
	}
	for _, s := range []*Set{research, other} {
		if d := (Effective{Ceiling: s}).Decide(someFacts(), connect("a", "93.184.216.34", 25)); !slices.Equal(d.Policies, []string{"ceiling/no-mail"}) {
			t.Errorf("%s: %+v", s.Name(), d)
		}
	}
	p, err = Load(dir(map[string]string{"default.cedar": permitAll}))
	if err != nil {
		t.Fatal(err)
	}
	if got := p.For("sales").IDs(); !slices.Equal(got, []string{"all"}) {
		t.Errorf("with a default.cedar sales has %v", got)
	}
	if got := Builtin().For("sales").Name(); got != "profile internet" {
		t.Errorf("without a directory sales has %s", got)
	}
}

func TestLoadTellsAllProblems(t *testing.T) {
	_, err := Load(dir(map[string]string{
		"all.cedar":         permitAll,
		"default.cedar":     "permit",
		"defaults.cedar":    permitAll,
		"teams/sales.ceder": permitAll,
		"teams/Sales.cedar": permitAll,
		"teams/a.cedar":     strings.ReplaceAll(noMail, "port", "prt"),
		"tests/a.yml":       "",
		"tests/b.yaml":      "- test: x\n  expect: maybe\n",
	}))
	var problems Problems
	if !errors.As(err, &problems) {
		t.Fatal(err)
	}
	want := []string{
		"all.cedar:1: policy all: all.cedar has a permit, which would widen every team: write forbids in it, and permits in default.cedar and teams/NAME.cedar",
		"default.cedar:1:7: this is not Cedar's language: the text ends where `(` is expected: a policy is @id(\"…\") permit or forbid (principal, action, resource) when { … } unless { … };",
		"defaults.cedar: nothing reads this file: a directory of policies has all.cedar, default.cedar, teams/NAME.cedar and tests/NAME.yaml",
		"teams/Sales.cedar: nothing reads this file: name it NAME.cedar after a team: 1 to 39 of a-z, 0-9 and -",
		"teams/a.cedar:1:93: policy no-mail: attribute `prt` in context for Action::\"net:connect\" not found: the context of net:connect has egressProxy, ip, port, protocol, time",
		"teams/sales.ceder: nothing reads this file: name it NAME.cedar after a team: 1 to 39 of a-z, 0-9 and -",
		"tests/a.yml: nothing reads this file: name it NAME.yaml",
		"tests/b.yaml:1: expect is \"maybe\": write permit, deny or hold",
	}
	var got []string
	for _, p := range problems {
		got = append(got, p.String())
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

func TestLoadNamesTheDirectory(t *testing.T) {
	gone := filepath.Join(t.TempDir(), "nosuch")
	_, err := Load(os.DirFS(gone))
	if want := gone + ": cannot be read: no such file or directory: make it a directory that Airlock may read"; err == nil || err.Error() != want {
		t.Errorf("%v", err)
	}
}

func TestLoadRefusesOneIDInTwoFiles(t *testing.T) {
	_, err := Load(dir(map[string]string{"all.cedar": noMail, "teams/a.cedar": permitAll + "\n" + noMail}))
	const want = "all.cedar:1: policy no-mail: teams/a.cedar:2 has a policy of the same id: give each its own @id"
	if err == nil || err.Error() != want {
		t.Errorf("%v", err)
	}
}

func TestStarter(t *testing.T) {
	p, err := Load(dir(Starter()))
	if err != nil {
		t.Fatal(err)
	}
	if len(p.Tests()) != 6 {
		t.Errorf("%d tests", len(p.Tests()))
	}
	for _, test := range p.Tests() {
		if r := test.Run(p); !r.Passed {
			t.Errorf("%s: %s", r.Name, r.Failure)
		}
	}
}

func TestTestsFail(t *testing.T) {
	p, err := Load(dir(map[string]string{"tests/a.yaml": `
- test: expects too much
  call: {principal: Sandbox::i1, action: net:connect, resource: Host::a, context: {ip: 10.0.0.1, port: 1, protocol: tcp}}
  expect: permit
- test: expects another reason
  call: {principal: Sandbox::i1, action: net:connect, resource: Host::a, context: {ip: 10.0.0.1, port: 1, protocol: tcp}}
  expect: deny
  policy: no-private
- test: the policy by its whole name, an id in quotes, a time without
  call: {principal: 'Sandbox::"i1"', action: dns:resolve, resource: Host::a, context: {time: 2026-12-02T10:00:00Z}}
  expect: permit
  policy: ceiling/resolve-names
`}))
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, test := range p.Tests() {
		got = append(got, test.Run(p).Failure)
	}
	want := []string{
		`expected permit, got deny: nothing in the operator's policy permits net:connect on Host::"a" by Sandbox::"i1" (ip 10.0.0.1, port 1): ask your operator for a policy of team "default" that permits it`,
		`deny as expected, but not by policy no-private: nothing in the operator's policy permits net:connect on Host::"a" by Sandbox::"i1" (ip 10.0.0.1, port 1): ask your operator for a policy of team "default" that permits it`,
		"",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

func TestParseTestsRefuses(t *testing.T) {
	const form = ": a test has test, call {principal, action, resource, context}, expect, and where it needs them policy, team, profile, network, facts"
	const call = "  call: {principal: Sandbox::i1, action: dns:resolve, resource: Host::a}\n"
	for _, tt := range []struct{ name, text, want string }{
		{"empty", "", "t.yaml: it is no list of tests: write `- test: what must hold`, then call and expect"},
		{"a map", "test: x", "t.yaml: it is no list of tests: write `- test: what must hold`, then call and expect"},
		{"no YAML", "- a: b\n  c: d: e", "t.yaml:2: this is not YAML: mapping values are not allowed in this context: check indentation and quotes"},
		{"two documents", "- a: b\n---\n- c: d\n", "t.yaml: there is more than one document in it: write one list of tests"},
		{"no name", "- expect: deny\n" + call, "t.yaml:1: a test has no name" + form},
		{"a misspelt field", "- test: x\n  expects: deny\n" + call, `t.yaml:1: json: unknown field "expects"` + form},
		{"a field twice", "- test: x\n  expect: deny\n  expect: permit\n" + call, `t.yaml:3: "expect" is there twice or is no name` + form},
		{"a principal without a type", "- test: x\n  expect: deny\n  call: {principal: i1, action: dns:resolve, resource: Host::a}\n", `t.yaml:1: principal "i1" is not written Type::id, such as Sandbox::i1` + form},
		{"an alias", "- &a\n  test: x\n  expect: deny\n" + call + "- *a\n", "t.yaml:5: anchors and aliases are not read here" + form},
		{"a call that is none", "- test: x\n  expect: deny\n  call: {principal: Sandbox::i1, action: dns:resolve, resource: Table::a}\n",
			`t.yaml:1: the call is not one that policies can judge: the resource of dns:resolve is one of Host, not a "Table": correct the test: Airlock never asks this, and would deny it`},
		{"a network that is none", "- test: x\n  expect: deny\n  network: {denyOut: [example.com]}\n" + call,
			`t.yaml:1: network.denyOut[0] is "example.com": give IP addresses and CIDR networks; domains can only be allowed`},
	} {
		_, err := ParseTests("t.yaml", []byte(tt.text))
		got := ""
		if err != nil {
			got, _, _ = strings.Cut(err.Error(), "\n")
		}
		if got != tt.want {
			t.Errorf("%s: %s\nwant %s", tt.name, got, tt.want)
		}
	}
}

func FuzzParseTests(f *testing.F) {
	f.Add(Starter()["tests/example.yaml"])
	f.Add("- test: x\n  expect: deny\n  call: {principal: 'Sandbox::\"i1\"', action: dns:resolve, resource: Host::a, context: {type: ~}}\n")
	f.Add("- &a [*a]\n- ? [a]\n  : b\n- !!binary aGk=\n")
	f.Fuzz(func(t *testing.T, text string) {
		tests, err := ParseTests("t.yaml", []byte(text))
		var problems Problems
		if err != nil && (!errors.As(err, &problems) || len(problems) == 0) {
			t.Fatalf("error %v", err)
		}
		for _, test := range tests {
			test.Run(Builtin())
		}
	})
}

func TestFilesAndDigest(t *testing.T) {
	files := map[string]string{"all.cedar": noMail, "teams/research.cedar": permitAll, "tests/a.yaml": "- test: x\n  expect: deny\n  call: {principal: Sandbox::i1, action: dns:resolve, resource: Host::a}\n"}
	p, err := Load(dir(files))
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]string{}
	for name, text := range p.Files() {
		got[name] = string(text)
	}
	if diff := cmp.Diff(files, got); diff != "" {
		t.Error(diff)
	}
	if p.Digest() != "874f2718c8f3ff89f8042aa5b7969d11cb73110d3b7d48abad3c15c726e0220d" { // of sha256sum all.cedar teams/research.cedar tests/a.yaml | sha256sum
		t.Errorf("digest %s", p.Digest())
	}
	if got := Builtin(); len(got.Files()) != 0 || got.Digest() != got.For("").Digest() {
		t.Errorf("without a directory: %d files, %s", len(got.Files()), got.Digest())
	}
}

// TestLoadOpensRegularFilesOnly: a FIFO would hold up the server, a device
// could do anything.
func TestLoadOpensRegularFilesOnly(t *testing.T) {
	for _, tt := range []struct {
		name string
		make func(dir string) error
		want string // the problem; "" is none
	}{
		{"a FIFO that nothing reads", func(dir string) error {
			return errors.Join(syscall.Mkfifo(filepath.Join(dir, "notes.txt"), 0o600), syscall.Mkfifo(filepath.Join(dir, ".git"), 0o600))
		}, ""},
		{"a FIFO in place of policies", func(dir string) error { return syscall.Mkfifo(filepath.Join(dir, "all.cedar"), 0o600) }, "all.cedar: cannot be read: it is no file: make it a file that Airlock may read"},
		{"a FIFO in place of a directory", func(dir string) error { return syscall.Mkfifo(filepath.Join(dir, "teams"), 0o600) }, "teams: cannot be read: it is no directory: make it a directory that Airlock may read"},
		{"a FIFO in place of tests", func(dir string) error {
			return errors.Join(os.Mkdir(filepath.Join(dir, "tests"), 0o700), syscall.Mkfifo(filepath.Join(dir, "tests", "a.yaml"), 0o600))
		}, "tests/a.yaml: cannot be read: it is no file: make it a file that Airlock may read"},
		{"a device", func(dir string) error { return os.Symlink("/dev/zero", filepath.Join(dir, "all.cedar")) }, "all.cedar: cannot be read: it is no file: make it a file that Airlock may read"},
		{"a socket", func(dir string) error {
			l, err := net.Listen("unix", filepath.Join(dir, "all.cedar"))
			if err == nil {
				t.Cleanup(func() { l.Close() })
			}
			return err
		}, "all.cedar: cannot be read: it is no file: make it a file that Airlock may read"},
		{"a directory in place of policies", func(dir string) error { return os.Mkdir(filepath.Join(dir, "default.cedar"), 0o700) }, "default.cedar: cannot be read: it is no file: make it a file that Airlock may read"},
		{"a file that does not end", func(dir string) error { return os.Truncate(touched(t, filepath.Join(dir, "all.cedar")), 1<<40) }, "all.cedar: more than 262144 bytes: use several files"},
		{"a volume of Kubernetes", func(dir string) error {
			return errors.Join(os.MkdirAll(filepath.Join(dir, "..2026_12_02", "teams"), 0o700), os.WriteFile(filepath.Join(dir, "..2026_12_02", "teams", "a.cedar"), []byte(permitAll), 0o600),
				os.WriteFile(filepath.Join(dir, "..2026_12_02", "all.cedar"), []byte(noMail), 0o600),
				os.Symlink("..2026_12_02", filepath.Join(dir, "..data")), os.Symlink("..data/all.cedar", filepath.Join(dir, "all.cedar")), os.Symlink("..data/teams", filepath.Join(dir, "teams")))
		}, ""},
	} {
		dir := t.TempDir()
		if err := tt.make(dir); err != nil {
			t.Fatal(err)
		}
		got := ""
		p, err := Load(Dir(dir))
		if err != nil {
			got = err.Error()
		}
		if got != tt.want {
			t.Errorf("%s: %q", tt.name, got)
		}
		if tt.name == "a volume of Kubernetes" && err == nil && !slices.Equal(p.For("a").IDs(), []string{"all", "no-mail"}) {
			t.Errorf("%s: %v", tt.name, p.For("a").IDs())
		}
	}
	// What was a file when it was looked at may be none when it is opened.
	fifo := t.TempDir()
	if err := syscall.Mkfifo(filepath.Join(fifo, "all.cedar"), 0o600); err != nil {
		t.Fatal(err)
	}
	f, err := Dir(fifo).Open("all.cedar")
	if err != nil {
		t.Fatal(err)
	}
	f.Close()
}

func touched(t *testing.T, path string) string {
	t.Helper()
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestLoadBoundsAllFilesTogether(t *testing.T) {
	files := map[string]string{}
	for i := range 257 {
		files[fmt.Sprintf("teams/t%03d.cedar", i)] = permitAll + strings.Repeat(" ", maxText-len(permitAll))
	}
	_, err := Load(dir(files))
	const want = "teams/t256.cedar: more than 67108864 bytes in all files together: use fewer or smaller ones"
	if err == nil || err.Error() != want {
		t.Errorf("%v", err)
	}
}
