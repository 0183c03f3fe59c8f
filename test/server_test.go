package test

import (
	"bufio"
	"bytes"
	"io"
	"net/http"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"airlock.dev/airlock"
	"airlock.dev/airlock/client"
)

// running is a server that a test asks over TCP, with keys.
type running struct {
	*crashing
	url  string
	stop func() // ends it before the test does
	// fails says that it must end with an error.
	fails bool
}

// startServer starts `airlock serve FLAG...` with a data directory of its own
// on a free port. It ends with the test and must leave no control group.
func startServer(t *testing.T, flags ...string) *running {
	t.Helper()
	return startServerAt(t, t.TempDir(), flags...)
}

func startServerAt(t *testing.T, dataDir string, flags ...string) *running {
	t.Helper()
	return startServerIn(t, nil, dataDir, flags...)
}

// startServerIn starts it by a command in front, which changes what it sees and
// then becomes it.
func startServerIn(t *testing.T, in []string, dataDir string, flags ...string) *running {
	t.Helper()
	needRoot(t)
	needBinaries(t)
	s := &running{crashing: &crashing{t: t, dataDir: dataDir, log: &bytes.Buffer{}}}
	command := append(append(in[:len(in):len(in)], filepath.Join(binDir, "airlock"), "serve", "--listen", "127.0.0.1:0", "--data-dir", s.dataDir), flags...)
	s.cmd = exec.Command(command[0], command[1:]...)
	s.cmd.Stderr = s.log
	s.cmd.WaitDelay = 5 * time.Second
	out, err := s.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := s.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	s.stop = sync.OnceFunc(func() {
		s.cmd.Process.Signal(syscall.SIGTERM)
		stuck := time.AfterFunc(30*time.Second, func() { s.cmd.Process.Kill() })
		if err := s.cmd.Wait(); (err != nil) != s.fails {
			t.Errorf("the server's end: %v", err)
		}
		if !stuck.Stop() {
			t.Error("the server did not end within 30 s of SIGTERM")
		}
		if left := s.groups(); len(left) > 0 {
			t.Errorf("control groups after the stop: %q", left)
		}
		if t.Failed() {
			t.Logf("the server's log:\n%s", s.log)
		}
	})
	t.Cleanup(s.stop)
	late := time.AfterFunc(60*time.Second, func() { s.cmd.Process.Kill() })
	defer late.Stop()
	line, err := bufio.NewReader(out).ReadString('\n')
	words := strings.Fields(line) // airlock listens on URL and SOCKET
	if err != nil || len(words) < 4 || words[1] != "listens" {
		t.Fatalf("the server does not start: %q, %v", line, err)
	}
	s.url = words[3]
	go io.Copy(io.Discard, out)
	return s
}

// key makes an API key with the command.
func (s *running) key(team string, role airlock.Role) string {
	s.t.Helper()
	cmd := exec.Command(filepath.Join(binDir, "airlock"), "key", "create", "--data-dir", s.dataDir, "--team", team, "--role", string(role))
	cmd.Env = []string{} // no AIRLOCK_API_URL of the caller's
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		s.t.Fatalf("airlock key create: %v\n%s", err, &stderr)
	}
	return strings.TrimSpace(string(out))
}

// as returns a client with a key, as a program on another machine has it.
func (s *running) as(key string) *client.Client {
	s.t.Helper()
	c, err := client.New(client.Options{URL: s.url, APIKey: key})
	if err != nil {
		s.t.Fatal(err)
	}
	return c
}

// create makes a sandbox that ends with the test, if it has not before.
func create(t *testing.T, c *client.Client, req client.CreateRequest) *client.Sandbox {
	t.Helper()
	sb, err := c.Create(t.Context(), req)
	if err != nil {
		t.Fatalf("create: %v", err)
	}
	t.Cleanup(func() { sb.Close() }) // fails where it is gone
	return sb
}

// run runs a line of shell and returns how it ended and what it wrote.
func run(t *testing.T, sb *client.Sandbox, line string) (client.ExecResult, string) {
	t.Helper()
	var out bytes.Buffer
	r, err := sb.Exec(t.Context(), client.ExecRequest{Cmd: "/bin/bash", Args: []string{"-c", line}, Stdout: &out, Stderr: &out, Timeout: time.Minute})
	if err != nil {
		t.Fatalf("%s: %v", line, err)
	}
	return r, out.String()
}

// must runs a line of shell that succeeds and returns what it wrote.
func must(t *testing.T, sb *client.Sandbox, line string) string {
	t.Helper()
	r, out := run(t, sb, line)
	if r.Outcome != airlock.Exited || r.ExitCode != 0 {
		t.Fatalf("%s: %+v, %q", line, r, out)
	}
	return out
}

// ask sends one request without the client in between, and reads the answer.
func (s *running) ask(t *testing.T, method, path, body string, header map[string]string) (*http.Response, string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, s.url+path, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	for k, v := range header {
		req.Header.Set(k, v)
	}
	c := http.Client{Timeout: time.Minute, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	resp, err := c.Do(req)
	if err != nil {
		t.Fatalf("%s %.100s: %v", method, path, err)
	}
	defer resp.Body.Close()
	answer, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatalf("%s %.100s: %v", method, path, err)
	}
	return resp, string(answer)
}

// dataHeader opens the data plane of a sandbox.
func dataHeader(sb *client.Sandbox) map[string]string {
	return map[string]string{"E2b-Sandbox-Id": sb.ID, "E2b-Sandbox-Port": "49983", "X-Access-Token": sb.AccessToken}
}
