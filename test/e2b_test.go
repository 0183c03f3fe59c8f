package test

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"airlock.dev/airlock"
)

// TestE2B runs the unmodified JavaScript SDKs of E2B against a server.
func TestE2B(t *testing.T) {
	needRoot(t)
	for _, tool := range []string{"node", "npm"} {
		if _, err := exec.LookPath(tool); err != nil {
			if os.Getenv("CI") == "true" {
				t.Fatalf("CI must have %s: %v", tool, err)
			}
			t.Skipf("needs %s: %v", tool, err)
		}
	}
	dir := filepath.Join(root, "test", "e2b")
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	// What npm writes last of all.
	if _, err := os.Stat(filepath.Join(dir, "node_modules", ".package-lock.json")); err != nil {
		install := exec.CommandContext(ctx, "npm", "ci", "--no-audit", "--no-fund", "--loglevel=error")
		install.Dir = dir
		if out, err := install.CombinedOutput(); err != nil {
			t.Fatalf("npm ci: %v\n%s", err, out)
		}
	}
	s := startServer(t)
	suites, err := filepath.Glob(filepath.Join(dir, "*.test.mjs"))
	if err != nil || len(suites) == 0 {
		t.Fatalf("no suites in %s: %v", dir, err)
	}
	cmd := exec.CommandContext(ctx, "node", append([]string{"--test"}, suites...)...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "E2B_API_URL="+s.url, "E2B_SANDBOX_URL="+s.url, "E2B_API_KEY="+s.key("default", airlock.Client))
	cmd.WaitDelay = 5 * time.Second
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("node --test: %v\n%s", err, out)
	}
	list, err := s.as(s.key("default", airlock.Client)).List(t.Context(), nil)
	if err != nil || len(list) != 0 {
		t.Errorf("after the suite, which kills what it makes: %+v, %v", list, err)
	}
}
