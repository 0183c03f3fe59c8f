package test

import (
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// jsClasses is how docs/e2b.md calls the classes of the JavaScript SDK that
// have methods for its users.
var jsClasses = map[string]string{
	"Sandbox": "Sandbox", "SandboxApi": "Sandbox", "Commands": "commands", "CommandHandle": "CommandHandle", "Pty": "pty", "Filesystem": "files",
	"WatchHandle": "WatchHandle", "Git": "git", "TemplateBase": "Template", "Volume": "Volume", "Secret": "Secret",
	"Paginator": "Paginator", "SandboxPaginator": "Paginator", "SnapshotPaginator": "Paginator", "SecretPaginator": "Paginator",
}

var (
	jsClass  = regexp.MustCompile(`^declare (?:abstract )?class (\w+)`)
	jsMethod = regexp.MustCompile(`^  (?:static |abstract )*(\w+)(?:<.*?>)?\(`)
)

// jsMethods returns the public methods that the JavaScript SDK declares.
func jsMethods(t *testing.T) map[string]bool {
	text, err := os.ReadFile(filepath.Join(e2bDir, "node_modules", "e2b", "dist", "index.d.ts"))
	if err != nil {
		t.Fatal(err)
	}
	methods, class := map[string]bool{}, ""
	for line := range strings.Lines(string(text)) {
		if m := jsClass.FindStringSubmatch(line); m != nil {
			class = jsClasses[m[1]]
		} else if line == "}\n" {
			class = ""
		} else if m := jsMethod.FindStringSubmatch(line); m != nil && class != "" && m[1] != "constructor" {
			methods[class+"."+m[1]] = true
		}
	}
	return methods
}

// pythonMethods returns those of the Python SDK.
func pythonMethods(t *testing.T) map[string]bool {
	cmd := exec.Command(python, "methods.py")
	cmd.Dir, cmd.Stderr = e2bDir, os.Stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	methods := map[string]bool{}
	for _, name := range strings.Fields(string(out)) {
		methods[name] = true
	}
	return methods
}

// The table of docs/e2b.md has every method of both SDKs, and no other; what
// it says works is proved by tests that exist.
func TestE2BDocs(t *testing.T) {
	needSDKs(t)
	text, err := os.ReadFile(filepath.Join(root, "docs", "e2b.md"))
	if err != nil {
		t.Fatal(err)
	}
	sides := []struct {
		sdk    string
		have   map[string]bool
		listed map[string]bool
	}{
		{"JavaScript", jsMethods(t), map[string]bool{}},
		{"Python", pythonMethods(t), map[string]bool{}},
	}
	for line := range strings.Lines(string(text)) {
		cells := strings.Split(strings.TrimSpace(line), "|")
		if len(cells) != 6 || !strings.Contains(cells[1]+cells[2], "`") {
			continue // no row of the table
		}
		for i, side := range sides {
			for _, m := range quoted.FindAllStringSubmatch(cells[1+i], -1) {
				if !side.have[m[1]] {
					t.Errorf("docs/e2b.md: the %s SDK has no %s", side.sdk, m[1])
				}
				side.listed[m[1]] = true
			}
		}
		switch works, why := strings.TrimSpace(cells[3]), strings.TrimSpace(cells[4]); {
		case works == "yes":
			checkProofs(t, line, why)
		case works != "no" || why == "":
			t.Errorf("docs/e2b.md: neither yes with tests nor no with a reason: %s", line)
		}
	}
	for _, side := range sides {
		if len(side.have) < 100 {
			t.Errorf("only %d methods of the %s SDK are seen: has its form changed?", len(side.have), side.sdk)
		}
		for _, name := range slices.Sorted(maps.Keys(side.have)) {
			if !side.listed[name] {
				t.Errorf("docs/e2b.md lacks %s of the %s SDK", name, side.sdk)
			}
		}
	}
}

// checkProofs reads "`file` test; `file` test" and looks for each test.
func checkProofs(t *testing.T, line, proofs string) {
	for proof := range strings.SplitSeq(proofs, "; ") {
		file, name, _ := strings.Cut(strings.TrimPrefix(proof, "`"), "` ")
		text, err := os.ReadFile(filepath.Join(e2bDir, file))
		if err != nil {
			t.Errorf("docs/e2b.md: %v in %s", err, line)
			continue
		}
		found := strings.Contains(string(text), "('"+name+"', ")
		if strings.HasSuffix(file, ".py") {
			found = strings.Contains(string(text), "def "+name+"(self)")
		}
		if !found {
			t.Errorf("docs/e2b.md: %s has no test %q, named in %s", file, name, line)
		}
	}
}
