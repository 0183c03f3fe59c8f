package control

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/fstest"

	"airlock.dev/airlock/policy"
)

const keptForbid = `@id("no-mail") forbid (principal, action == Action::"net:connect", resource) when { context.port == 25 };`

func loaded(t *testing.T, files map[string]string) *policy.Policies {
	t.Helper()
	dir := fstest.MapFS{}
	for name, text := range files {
		dir[name] = &fstest.MapFile{Data: []byte(text)}
	}
	p, err := policy.Load(dir)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func TestKeptCopyIsExactlyWhatWasRead(t *testing.T) {
	k := keptCopy{filepath.Join(t.TempDir(), "last")}
	if _, err := k.load(); !errors.Is(err, fs.ErrNotExist) {
		t.Fatal(err)
	}
	p := loaded(t, map[string]string{"all.cedar": keptForbid, "teams/a.cedar": `@id("a") permit (principal, action, resource);`, "README.md": "x"})
	for range 2 {
		if err := k.write(p); err != nil {
			t.Fatal(err)
		}
	}
	got, err := k.load()
	if err != nil {
		t.Fatal(err)
	}
	if got.Digest() != p.Digest() || got.For("a").Digest() != p.For("a").Digest() {
		t.Error("the copy is another")
	}
	var names []string
	filepath.WalkDir(filepath.Dir(k.at), func(path string, d fs.DirEntry, err error) error {
		if !d.IsDir() {
			name, _ := filepath.Rel(filepath.Dir(k.at), path)
			names = append(names, name)
		}
		return err
	})
	if got := strings.Join(names, " "); got != "last/.digest last/all.cedar last/teams/a.cedar" {
		t.Errorf("files: %s", got)
	}
}

func TestKeptCopyThatDoesNotFit(t *testing.T) {
	for name, c := range map[string]struct {
		damage func(dir string) error
		want   string
	}{
		"lost its forbids": {func(dir string) error { return os.Remove(filepath.Join(dir, "all.cedar")) }, "is not what was kept"},
		"a changed file": {func(dir string) error {
			return os.WriteFile(filepath.Join(dir, "all.cedar"), []byte(keptForbid+" "), 0o600)
		}, "is not what was kept"},
		"a file more": {func(dir string) error {
			return os.WriteFile(filepath.Join(dir, "default.cedar"), []byte(keptForbid), 0o600)
		}, "the copy of the policies"},
		"lost its digest":   {func(dir string) error { return os.Remove(filepath.Join(dir, digestFile)) }, "has no digest"},
		"cut in the middle": {func(dir string) error { return os.Truncate(filepath.Join(dir, "all.cedar"), 20) }, "does not load"},
	} {
		dir := t.TempDir()
		k := keptCopy{filepath.Join(dir, "last")}
		if err := k.write(loaded(t, map[string]string{"all.cedar": keptForbid})); err != nil {
			t.Fatal(err)
		}
		if err := c.damage(k.at); err != nil {
			t.Fatal(err)
		}
		if _, err := k.load(); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v", name, err)
		}
		broken := t.TempDir()
		if err := os.WriteFile(filepath.Join(broken, "default.cedar"), []byte("permit"), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := OpenPolicies(t.Context(), broken, k.at, Unrecorded{}, slog.New(slog.DiscardHandler)); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: a server would start: %v", name, err)
		}
	}
}

// TestKeptCopySurvivesACrash: wherever write ends, the next server finds the
// old copy or the new one, and can write again.
func TestKeptCopySurvivesACrash(t *testing.T) {
	old := loaded(t, map[string]string{"all.cedar": keptForbid, "teams/a.cedar": keptForbid2})
	now := loaded(t, map[string]string{"default.cedar": keptForbid2})
	for _, before := range []*policy.Policies{nil, old} {
		for n := range len(keptCopy{}.steps(now)) + 1 {
			name := fmt.Sprintf("with a copy before: %t, after %d steps", before != nil, n)
			k := keptCopy{filepath.Join(t.TempDir(), "last")}
			if before != nil {
				if err := k.write(before); err != nil {
					t.Fatal(err)
				}
			}
			for _, step := range k.steps(now)[:n] {
				if err := step(); err != nil {
					t.Fatalf("%s: %v", name, err)
				}
			}
			if n == 3 { // the next step may have been cut in the middle
				if err := os.Mkdir(k.next(), 0o700); err != nil {
					t.Fatal(err)
				}
				if err := os.WriteFile(filepath.Join(k.next(), "default.cedar"), nil, 0o600); err != nil {
					t.Fatal(err)
				}
			}
			got, err := k.load()
			switch {
			case before == nil && n < 4 && errors.Is(err, fs.ErrNotExist):
			case err != nil:
				t.Errorf("%s: %v", name, err)
			case got.Digest() != now.Digest() && (n > 5 || before == nil || got.Digest() != before.Digest()):
				t.Errorf("%s: the copy is neither", name)
			}
			if err := k.write(now); err != nil {
				t.Errorf("%s: write again: %v", name, err)
			}
			if got, err := k.load(); err != nil || got.Digest() != now.Digest() {
				t.Errorf("%s: written again: %v", name, err)
			}
		}
	}
}

const keptForbid2 = `@id("nothing") forbid (principal, action, resource);`
