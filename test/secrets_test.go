package test

import (
	"bytes"
	"encoding/base64"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"airlock.dev/airlock"
	"airlock.dev/airlock/client"
)

// airlock runs the command as the server's operator.
func (s *running) airlock(stdin string, args ...string) (string, error) {
	s.t.Helper()
	cmd := exec.Command(filepath.Join(binDir, "airlock"), append([]string{"--data-dir", s.dataDir}, args...)...)
	cmd.Env = []string{}
	cmd.Stdin = strings.NewReader(stdin)
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// trail is what `airlock audit ARG...` prints once the index has every event.
func (s *running) trail(args ...string) string {
	s.t.Helper()
	for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(50 * time.Millisecond) {
		cmd := exec.Command(filepath.Join(binDir, "airlock"), append([]string{"--data-dir", s.dataDir, "audit"}, args...)...)
		cmd.Env = []string{}
		var stderr bytes.Buffer
		cmd.Stderr = &stderr
		out, err := cmd.Output()
		if err != nil || time.Now().After(deadline) {
			s.t.Fatalf("airlock audit %s: %v\n%s", strings.Join(args, " "), err, &stderr)
		}
		if !strings.Contains(stderr.String(), "cannot be found yet") {
			return string(out)
		}
	}
}

// A secret's value goes to its place, and is nowhere else: not in the sandbox's
// environment, files or memory, not in what it gets back, in no log, and in
// nothing that the server keeps.
func TestSecrets(t *testing.T) {
	s := networked(t)
	c := s.as(s.key("red", airlock.Client))
	const value = "sk-9Qw7ErTyUiOpAsDfGhJkLzXcVbNm42"
	var mu sync.Mutex
	var got []string // what upstream was sent as the secret
	url := s.secure(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		mu.Lock()
		got = append(got, r.Method+" "+r.URL.Path+" "+r.Header.Get("Authorization"))
		mu.Unlock()
		// It echoes all it got, as hostile and debugging servers do.
		w.Header().Set("X-Echo", r.Header.Get("Authorization"))
		fmt.Fprintf(w, "auth=%s b64=%s body=%s\n", r.Header.Get("Authorization"), base64.StdEncoding.EncodeToString([]byte(r.Header.Get("Authorization"))), body)
	}))
	port := strings.TrimSuffix(url[strings.LastIndexByte(url, ':')+1:], "/")
	out, err := s.airlock(value, "secret", "set", "api-key", "--team", "red", "--host", inside, "--port", port, "--method", "GET", "--path", "/v1/{thing}", "--header", "Authorization: Bearer {}")
	if err != nil {
		t.Fatalf("airlock secret set: %v\n%s", err, out)
	}
	if _, err := c.Create(t.Context(), client.CreateRequest{Secrets: map[string]string{"X": "none"}}); err == nil || !strings.Contains(err.Error(), "airlock secret set") {
		t.Errorf("a secret that is not there: %v", err)
	}
	sb := create(t, c, client.CreateRequest{Timeout: 5 * time.Minute, Policy: ownPolicy, Secrets: map[string]string{"API_KEY": "api-key"}})
	placeholder := must(t, sb, `printf %s "$API_KEY"`)
	if len(placeholder) < 40 || strings.Contains(placeholder, value) {
		t.Fatalf("the variable has %q", placeholder)
	}

	curl := `curl -sS -i -H "Authorization: Bearer $API_KEY" ` + url
	for _, c := range []struct{ name, line, want string }{
		{"at its place", curl + "v1/people", "auth=Bearer *"},
		{"another path", curl + "v2/people", "HTTP/2 403"},
		{"another method", curl + "v1/people -X POST", "HTTP/2 403"},
		{"in the query", `curl -sS -i "` + url + `v1/people?key=$API_KEY"`, "HTTP/2 403"},
		{"in a body, in base64", `curl -sS -i ` + url + `v1/people -X POST -d "$(printf %s "x$API_KEY" | base64 -w0)"`, "HTTP/2 403"},
		{"in the clear", `curl -sS -i -H "Authorization: Bearer $API_KEY" http://` + inside + `:` + port + `/v1/people`, "HTTP/1.1 403"},
		{"another host", `curl -sS -i -H "Authorization: Bearer $API_KEY" https://example.com/v1/people`, "resolve"},
	} {
		out := must(t, sb, c.line+" 2>&1 || true")
		if !strings.Contains(out, c.want) {
			t.Errorf("%s:\n%s", c.name, out)
		}
		for _, form := range []string{value, base64.StdEncoding.EncodeToString([]byte(value)), base64.StdEncoding.EncodeToString([]byte("Bearer " + value))[12:36]} {
			if strings.Contains(out, form) {
				t.Errorf("%s: the answer has the value:\n%s", c.name, out)
			}
		}
	}
	mu.Lock()
	if want := []string{"GET /v1/people Bearer " + value}; !slices.Equal(got, want) {
		t.Errorf("upstream got %q, want %q", got, want)
	}
	mu.Unlock()

	// Another value is there at once, for those that run.
	const next = "sk-NextValueOfThisSecretIsAnother77"
	if out, err := s.airlock(next, "secret", "rotate", "api-key", "--team", "red"); err != nil {
		t.Fatalf("airlock secret rotate: %v\n%s", err, out)
	}
	must(t, sb, curl+"v1/people")
	mu.Lock()
	if last := got[len(got)-1]; last != "GET /v1/people Bearer "+next {
		t.Errorf("after the rotation upstream got %q", last)
	}
	mu.Unlock()

	// Nothing inside has it, as far as root there sees: no process' variables,
	// arguments or memory, no file that the sandbox does not share with the host.
	// The search itself has the value in two halves.
	search := func(user, needle string) string {
		var out bytes.Buffer
		half := len(needle) / 2
		script := fmt.Sprintf(`python3 - <<'X'
import os, re
needle = (%q, %q)
found = []
def look(name, data):
    at = data.find(needle[0].encode())
    while at >= 0:
        if data[at + len(needle[0]):].startswith(needle[1].encode()): found.append(name); return
        at = data.find(needle[0].encode(), at + 1)
for top in ("/etc", "/home", "/root", "/tmp", "/var", "/run", "/dev/shm", "/.airlock", "/opt", "/srv"):
    for where, _, names in os.walk(top):
        for name in names:
            path = os.path.join(where, name)
            if os.path.isfile(path) and not os.path.islink(path):
                try: look(path, open(path, "rb").read())
                except OSError: pass
for pid in filter(str.isdigit, os.listdir("/proc")):
    for name in ("environ", "cmdline"):
        try: look(f"/proc/{pid}/{name}", open(f"/proc/{pid}/{name}", "rb").read())
        except OSError: pass
    try: maps, mem = open(f"/proc/{pid}/maps"), open(f"/proc/{pid}/mem", "rb", 0)
    except OSError: continue
    for line in maps:
        m = re.match(r"([0-9a-f]+)-([0-9a-f]+) r", line)
        if not m: continue
        try: mem.seek(int(m[1], 16)); data = mem.read(min(int(m[2], 16) - int(m[1], 16), 64 << 20))
        except (OSError, OverflowError, ValueError): continue
        look(f"/proc/{pid}/mem", data)
print("found", found)
X`, needle[:half], needle[half:])
		if _, err := sb.Exec(t.Context(), client.ExecRequest{Cmd: "/bin/bash", Args: []string{"-c", script}, User: user, Stdout: &out, Stderr: &out, Timeout: time.Minute}); err != nil {
			t.Fatal(err)
		}
		return strings.TrimSpace(out.String())
	}
	for _, user := range []string{"user", "root"} {
		if out := search(user, value); out != "found []" {
			t.Errorf("what %s sees of the value: %s", user, out)
		}
		if out := search(user, placeholder); !strings.Contains(out, "/environ") || !strings.Contains(out, "/mem") {
			t.Errorf("the search finds of what is there: %s", out)
		}
	}

	// The trail has each use, and each misuse, by name and place.
	var uses []string
	for _, r := range s.crossings(sb.ID) {
		if r.Action == "secret:use" {
			uses = append(uses, r.Effect+" "+r.Resource+" "+r.Method+" "+r.Path)
		}
	}
	if n := len(uses); n < 6 || uses[0] != "permit api-key GET /v1/people" || uses[1] != "deny api-key GET /v2/people" {
		t.Errorf("the trail has %q", uses)
	}

	// Nor has anything that is kept.
	sb.Close()
	s.stop()
	for _, v := range []string{value, next} {
		if strings.Contains(s.log.String(), v) {
			t.Error("the server's log has the value")
		}
		err = filepath.WalkDir(filepath.Dir(s.dataDir), func(path string, d fs.DirEntry, err error) error {
			if err != nil || !d.Type().IsRegular() {
				return err
			}
			text, err := os.ReadFile(path)
			if err == nil && bytes.Contains(text, []byte(v)) {
				t.Errorf("%s has the value", path)
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
}
