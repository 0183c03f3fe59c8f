package test

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"airlock.dev/airlock"
	"airlock.dev/airlock/client"
)

var e2bDir = filepath.Join(root, "test", "e2b")

// needTool skips where this machine lacks a tool, and fails where CI does.
func needTool(t *testing.T, tool string) {
	t.Helper()
	if _, err := exec.LookPath(tool); err != nil {
		if os.Getenv("CI") == "true" {
			t.Fatalf("CI must have %s: %v", tool, err)
		}
		t.Skipf("needs %s: %v", tool, err)
	}
}

// needSDKs installs the SDKs of E2B as they are pinned, if that was not done
// before: test/run.sh does it for all tests.
func needSDKs(t *testing.T) {
	t.Helper()
	for _, tool := range []string{"node", "npm", "python3"} {
		needTool(t, tool)
	}
	install := func(name string, arg ...string) {
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
		defer cancel()
		cmd := exec.CommandContext(ctx, name, arg...)
		cmd.Dir = e2bDir
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%s: %v\n%s", name, err, out)
		}
	}
	// What npm writes last of all.
	if _, err := os.Stat(filepath.Join(e2bDir, "node_modules", ".package-lock.json")); err != nil {
		install("npm", "ci", "--no-audit", "--no-fund", "--loglevel=error")
	}
	install("./venv.sh") // knows itself whether there is something to do
}

// python is the interpreter that has the Python SDK.
var python = filepath.Join(e2bDir, ".venv", "bin", "python")

// TestE2B runs the unmodified SDKs of E2B against servers: one whose sandboxes
// share its address, one that has a domain, and one with little room.
func TestE2B(t *testing.T) {
	needRoot(t)
	needSDKs(t)
	t.Run("headers", func(t *testing.T) {
		s := startServer(t)
		s.suites(t, []string{"E2B_API_URL=" + s.url, "E2B_SANDBOX_URL=" + s.url},
			"first-light.test.mjs", "files.test.mjs", "process.test.mjs", "sandbox.test.mjs", "git.test.mjs", "watch.test.mjs",
			"test_sync.py", "test_async.py", "test_git.py", "test_metadata.py", "test_watch.py")
	})
	t.Run("domain", func(t *testing.T) {
		s := startServer(t, "--domain", "airlock.localhost")
		_, port, _ := net.SplitHostPort(strings.TrimPrefix(s.url, "https://"))
		ca := filepath.Join(s.dataDir, "tls", "ca.pem")
		s.suites(t, []string{
			"E2B_DOMAIN=airlock.localhost:" + port, "NODE_EXTRA_CA_CERTS=" + ca, "SSL_CERT_FILE=" + ca,
			// Not every system resolves names below localhost. Node's suites
			// resolve them themselves; Python's SDK asks the system or a proxy.
			"HTTPS_PROXY=" + tunnels(t, "127.0.0.1:"+port), "NO_PROXY=",
		}, "ports.test.mjs", "examples.test.mjs", "test_domain.py", "test_async.py")
	})
	t.Run("full", func(t *testing.T) {
		s := startServer(t, "--max-memory", "700MiB")
		env := []string{"E2B_API_URL=" + s.url, "E2B_SANDBOX_URL=" + s.url}
		s.suites(t, env, "full.test.mjs")
		s.suites(t, env, "test_full.py")
	})
}

// suites runs files of test/e2b at one time, each as its language runs tests.
// They kill what they make.
func (s *running) suites(t *testing.T, env []string, files ...string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	env = append(append(os.Environ(), "E2B_API_KEY="+s.key("default", airlock.Client)), env...)
	t.Run("suites", func(t *testing.T) {
		for _, file := range files {
			t.Run(file, func(t *testing.T) {
				t.Parallel()
				if strings.Contains(file, "git") {
					needTool(t, "git") // the image's /usr is this machine's
				}
				cmd := exec.CommandContext(ctx, "node", "--test", file)
				if module, yes := strings.CutSuffix(file, ".py"); yes {
					cmd = exec.CommandContext(ctx, python, "suite.py", module)
				}
				cmd.Dir, cmd.Env, cmd.WaitDelay = e2bDir, env, 5*time.Second
				if out, err := cmd.CombinedOutput(); err != nil {
					t.Fatalf("%v: %v\n%s", cmd.Args, err, out)
				}
			})
		}
	})
	c, err := client.New(client.Options{Socket: filepath.Join(s.dataDir, "airlock.sock")})
	if err != nil {
		t.Fatal(err)
	}
	list, err := c.List(t.Context(), nil)
	if err != nil || len(list) != 0 {
		t.Errorf("after the suites: %+v, %v", list, err)
	}
}

// tunnels returns the URL of a proxy that connects every CONNECT to address.
func tunnels(t *testing.T, address string) string {
	proxy := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodConnect {
			http.Error(w, "only CONNECT", http.StatusMethodNotAllowed)
			return
		}
		out, err := net.Dial("tcp", address)
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadGateway)
			return
		}
		defer out.Close()
		in, _, err := http.NewResponseController(w).Hijack()
		if err != nil {
			return
		}
		defer in.Close()
		fmt.Fprint(in, "HTTP/1.1 200 OK\r\n\r\n")
		done := make(chan struct{}, 2)
		pump := func(to, from net.Conn) { io.Copy(to, from); done <- struct{}{} }
		go pump(out, in)
		go pump(in, out)
		<-done // TLS says for itself when it ends
	}))
	t.Cleanup(proxy.Close)
	return proxy.URL
}
