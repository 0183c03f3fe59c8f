package test

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"airlock.dev/airlock"
	"airlock.dev/airlock/client"
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
	t.Run("headers", func(t *testing.T) {
		s := startServer(t)
		for _, suite := range []string{"first-light.test.mjs", "files.test.mjs"} {
			s.node(t, ctx, suite, "E2B_API_URL="+s.url, "E2B_SANDBOX_URL="+s.url)
		}
	})
	t.Run("domain", func(t *testing.T) {
		s := startServer(t, "--domain", "airlock.localhost")
		domain := strings.Replace(s.url, "https://127.0.0.1", "airlock.localhost", 1)
		s.node(t, ctx, "ports.test.mjs", "E2B_DOMAIN="+domain, "NODE_EXTRA_CA_CERTS="+filepath.Join(s.dataDir, "tls", "ca.pem"))
	})
}

// node runs one suite, which kills what it makes.
func (s *running) node(t *testing.T, ctx context.Context, suite string, env ...string) {
	t.Helper()
	key := s.key("default", airlock.Client)
	cmd := exec.CommandContext(ctx, "node", "--test", suite)
	cmd.Dir = filepath.Join(root, "test", "e2b")
	cmd.Env = append(append(os.Environ(), "E2B_API_KEY="+key), env...)
	cmd.WaitDelay = 5 * time.Second
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("node --test: %v\n%s", err, out)
	}
	c, err := client.New(client.Options{Socket: filepath.Join(s.dataDir, "airlock.sock")})
	if err != nil {
		t.Fatal(err)
	}
	list, err := c.List(t.Context(), nil)
	if err != nil || len(list) != 0 {
		t.Errorf("after the suite: %+v, %v", list, err)
	}
}
