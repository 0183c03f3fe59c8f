package test

import (
	"bytes"
	"encoding/json"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

const module = "airlock.dev/airlock"

type pkg struct {
	ImportPath string
	Dir        string
	GoFiles    []string
	Imports    []string
}

// name is the path below the module, "" for the root.
func (p pkg) name() string {
	return strings.TrimPrefix(strings.TrimPrefix(p.ImportPath, module), "/")
}

func packages(t *testing.T) []pkg {
	t.Helper()
	cmd := exec.Command("go", "list", "-json=ImportPath,Dir,GoFiles,Imports", "./...")
	cmd.Dir = root
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	var all []pkg
	for d := json.NewDecoder(strings.NewReader(string(out))); d.More(); {
		var p pkg
		if err := d.Decode(&p); err != nil {
			t.Fatal(err)
		}
		all = append(all, p)
	}
	return all
}

// edges is the table at the end of docs/ARCHITECTURE.md: what each package may
// import of ours besides the root. cmd/airlock may import everything.
var edges = map[string][]string{
	"":                        nil,
	"channel":                 nil,
	"cluster":                 nil,
	"image":                   nil,
	"keeper":                  nil,
	"keystore":                nil,
	"sealed":                  nil,
	"mirror":                  nil,
	"gateway/root":            {"sealed"},
	"localca":                 {"sealed"},
	"doctor":                  nil,
	"policy":                  nil,
	"gateway/door":            nil,
	"api/envd":                nil,
	"audit/wal":               nil,
	"audit/tiles":             nil,
	"audit/index":             nil,
	"audit":                   {"audit/wal", "audit/tiles", "audit/index"},
	"audit/audittest":         {"audit", "keystore"},
	"audit/witnesstest":       nil,
	"isolation":               {"channel"},
	"guest":                   {"channel"},
	"isolation/gvisor":        {"isolation", "channel", "image"},
	"isolation/fake":          {"isolation", "channel", "image"},
	"isolation/isolationtest": {"isolation", "channel", "image"},
	"keys":                    {"cluster"},
	"secrets":                 {"cluster", "gateway/inject"},
	"cluster/clustertest":     {"cluster"},
	"control":                 {"cluster", "isolation", "image", "channel", "audit", "policy", "gateway/wire", "gateway/inject", "secrets"},
	"api":                     {"control", "keys", "secrets", "gateway/inject", "channel", "api/envd", "audit", "audit/index", "audit/tiles", "policy"},
	"client":                  {"api/envd", "audit", "audit/tiles"},
	"cli":                     {"client", "doctor", "keystore", "policy", "audit", "audit/tiles"},
	"gateway/address":         nil,
	"gateway/dns":             {"gateway/address"},
	"gateway/web":             {"gateway/address"},
	"gateway/wire":            {"gateway/inject"},
	"gateway/process":         {"gateway/door", "gateway/wire"},
	"gateway":                 {"gateway/address", "gateway/dns", "gateway/door", "gateway/inject", "gateway/upstream", "gateway/web", "gateway/wire"},
	"gateway/upstream":        {"gateway/address", "gateway/web"},
	"gateway/gatewaytest":     {"gateway", "gateway/address", "gateway/dns", "gateway/door", "gateway/process", "gateway/upstream", "gateway/web", "gateway/wire"},
	"gateway/inject":          {"gateway/address", "gateway/web"},
	"cmd/airlock-guest":       {"guest"},
	"cmd/airlock-pkcs11":      {"keystore"},
	"test":                    nil,
	"test/bench":              nil,
	"test/bench/load":         nil,
}

// owners are the only packages that may import a library.
var owners = map[string][]string{
	"go.etcd.io/bbolt":                    {"cluster"},
	"gvisor.dev/gvisor":                   {"isolation/gvisor", "gateway/door", "cmd/airlock"},
	"github.com/spf13/cobra":              {"cli"},
	"github.com/cedar-policy/cedar-go":    {"policy"},
	"github.com/miekg/pkcs11":             {"cmd/airlock-pkcs11"},
	"modernc.org/sqlite":                  {"audit/index"},
	"github.com/transparency-dev/tessera": {"audit/tiles"},
}

func TestImports(t *testing.T) {
	for _, p := range packages(t) {
		allowed, known := edges[p.name()]
		if !known && p.name() != "cmd/airlock" {
			t.Errorf("package %s has no row in the table of imports: add it here and in docs/ARCHITECTURE.md", p.name())
			continue
		}
		for _, path := range p.Imports {
			if path == module || strings.HasPrefix(path, module+"/") {
				to := strings.TrimPrefix(strings.TrimPrefix(path, module), "/")
				if to != "" && p.name() != "cmd/airlock" && !slices.Contains(allowed, to) {
					t.Errorf("%s imports %s: not in the table of imports", p.name(), to)
				}
				continue
			}
			if p.name() == "" && strings.Contains(strings.Split(path, "/")[0], ".") {
				t.Errorf("the root package imports %s: it stands on the standard library only", path)
			}
			for library, may := range owners {
				if (path == library || strings.HasPrefix(path, library+"/")) && !slices.Contains(may, p.name()) {
					t.Errorf("%s imports %s: only %v may", p.name(), path, may)
				}
			}
		}
	}
}

func TestPackageComments(t *testing.T) {
	for _, p := range packages(t) {
		var with []string
		for _, name := range p.GoFiles {
			f, err := parser.ParseFile(token.NewFileSet(), filepath.Join(p.Dir, name), nil, parser.PackageClauseOnly|parser.ParseComments)
			if err != nil {
				t.Fatal(err)
			}
			if f.Doc != nil {
				with = append(with, name)
			}
		}
		if len(with) != 1 {
			t.Errorf("package %s must have one package comment; files with one: %v", p.ImportPath, with)
		}
	}
}

var quoted = regexp.MustCompile("`([^`\n]+)`")

// fileLike is what a quoted word looks like that names a file or directory of ours.
var fileLike = regexp.MustCompile(`^[\w.-]+(/[\w.-]+)+$|^[\w.-]+\.(go|md|mod|sh|proto)$`)

func TestDocsNameFilesThatExist(t *testing.T) {
	for _, doc := range []string{"docs/ARCHITECTURE.md", "docs/dependencies.md", "docs/e2b.md", "docs/KEYS.md", "docs/AUDIT.md", "docs/SECRETS.md", "README.md"} {
		text, err := os.ReadFile(filepath.Join(root, doc))
		if err != nil {
			t.Fatal(err)
		}
		named := 0
		for _, m := range quoted.FindAllStringSubmatch(string(text), -1) {
			word := m[1]
			top, _, _ := strings.Cut(word, "/")
			if !fileLike.MatchString(word) || strings.Contains(top, ".") && strings.Contains(word, "/") || top == "process.Process" || top == "bin" {
				continue // prose, a module, a route, what make makes
			}
			named++
			if _, err := os.Stat(filepath.Join(root, word)); err != nil {
				t.Errorf("%s names %s, which does not exist", doc, word)
			}
		}
		if named == 0 {
			t.Errorf("%s names no file", doc)
		}
	}
}

// Every package of ours is named in the document that is the way in.
func TestArchitectureNamesEveryPackage(t *testing.T) {
	text, err := os.ReadFile(filepath.Join(root, "docs/ARCHITECTURE.md"))
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range packages(t) {
		if name := p.name(); name != "" && !strings.HasPrefix(name, "test") && !strings.Contains(string(text), name) {
			t.Errorf("docs/ARCHITECTURE.md does not mention package %s", name)
		}
	}
}

func TestDependenciesAreExplained(t *testing.T) {
	cmd := exec.Command("go", "mod", "edit", "-json")
	cmd.Dir = root
	out, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	var mod struct {
		Require []struct {
			Path     string
			Indirect bool
		}
	}
	if err := json.Unmarshal(out, &mod); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(filepath.Join(root, "docs/dependencies.md"))
	if err != nil {
		t.Fatal(err)
	}
	listed := map[string]bool{}
	for _, m := range regexp.MustCompile("(?m)^\\| `([^`]+)` \\|").FindAllStringSubmatch(string(text), -1) {
		listed[m[1]] = true
	}
	for _, r := range mod.Require {
		if r.Indirect {
			continue
		}
		if !listed[r.Path] {
			t.Errorf("docs/dependencies.md gives no reason for %s", r.Path)
		}
		delete(listed, r.Path)
	}
	for path := range listed {
		t.Errorf("docs/dependencies.md lists %s, which is no direct dependency", path)
	}
}

// The Makefile stays a list of names: at most ten targets with one line each.
func TestMakefileIsShort(t *testing.T) {
	text, err := os.ReadFile(filepath.Join(root, "Makefile"))
	if err != nil {
		t.Fatal(err)
	}
	targets, body := 0, 0
	for line := range strings.Lines(string(text)) {
		switch {
		case strings.HasPrefix(line, "\t"):
			if body++; body > 1 {
				t.Errorf("more than one line in a target: %s", line)
			}
		case regexp.MustCompile(`^[a-z0-9]+:`).MatchString(line):
			targets++
			body = 0
		}
	}
	if targets == 0 || targets > 10 {
		t.Errorf("%d targets", targets)
	}
}

// Nothing in the tree runs without being executable.
func TestScriptsAreExecutable(t *testing.T) {
	for _, name := range []string{".ci/run", "examples/demo.sh", "test/run.sh", "test/lint.sh", "test/e2b/venv.sh"} {
		info, err := os.Stat(filepath.Join(root, name))
		if err != nil || info.Mode()&fs.FileMode(0o111) != 0o111 {
			t.Errorf("%s: %v, or not executable", name, err)
		}
	}
}

// unused are the actions of policies that nothing performs yet: those of the
// network, of databases, of apps, and of the states of sandboxes.
var unused = []string{
	"app:approve", "app:propose", "app:revoke", "app:run", "db:call", "db:connect", "db:define", "db:delete", "db:insert", "db:select", "db:update",
	"sandbox:fork", "sandbox:pause", "sandbox:resume", "sandbox:snapshot",
}

// A policy on an action that nobody asks about would be without effect: each is
// decided in control, or is one of those that nothing performs.
func TestEveryActionIsAsked(t *testing.T) {
	schema, err := os.ReadFile(filepath.Join(root, "policy", "schema.cedarschema"))
	if err != nil {
		t.Fatal(err)
	}
	files, err := filepath.Glob(filepath.Join(root, "control", "*.go"))
	if err != nil || len(files) == 0 {
		t.Fatalf("%d files, %v", len(files), err)
	}
	var code []byte
	for _, f := range files {
		if strings.HasSuffix(f, "_test.go") {
			continue
		}
		text, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		code = append(code, text...)
	}
	var silent []string
	for _, action := range regexp.MustCompile(`"[a-z]+:[a-z]+"`).FindAllString(string(schema), -1) {
		name := strings.Trim(action, `"`)
		if !bytes.Contains(code, []byte(action)) && !slices.Contains(silent, name) {
			silent = append(silent, name)
		}
	}
	slices.Sort(silent)
	if !slices.Equal(silent, unused) {
		t.Errorf("actions that nothing asks about:\n  %s\nwant\n  %s", strings.Join(silent, "\n  "), strings.Join(unused, "\n  "))
	}
}
