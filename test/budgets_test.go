package test

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"airlock.dev/airlock"
	"airlock.dev/airlock/client"
)

// A sandbox that has sent and received what it may gets nothing more: not after
// the gateway or the server was replaced, and not by another way. Others are
// not concerned, and the log says what happened without being filled.
func TestBudgets(t *testing.T) {
	const most = 2 << 20
	s := networked(t, "--net-bytes", "2MiB", "--net-flows", "64")
	c := s.as(s.key("red", airlock.Client))
	for _, tool := range []string{"curl", "python3"} {
		if _, err := exec.LookPath(tool); err != nil {
			t.Skipf("%s is not installed", tool)
		}
	}
	url := s.secure(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/endless" {
			for block := make([]byte, 16<<10); ; {
				if _, err := w.Write(block); err != nil {
					return
				}
			}
		}
		fmt.Fprint(w, "hello")
	}))
	port := strings.Trim(url[strings.LastIndexByte(url, ':'):], ":/")
	req := client.CreateRequest{Timeout: 10 * time.Minute, Policy: ownPolicy}
	sb, other := create(t, c, req), create(t, c, req)

	if out := must(t, sb, "curl -sS "+url); out != "hello" {
		t.Fatalf("before: %q", out)
	}
	out := must(t, sb, "curl -sS -o /tmp/got "+url+"endless 2>/dev/null; echo $? $(stat -c %s /tmp/got)")
	var exit, size int
	if n, _ := fmt.Sscan(out, &exit, &size); n != 2 || exit == 0 || size > most || size < most*3/4 {
		t.Errorf("a download: exit code and size are %s", out)
	}
	const why = "the sandbox has sent and received 2097152 bytes, which is all that one may"
	denied := func(when, flags string) {
		t.Helper()
		if out := must(t, sb, "curl -sS -i "+flags+url+" 2>&1 || true"); !strings.Contains(out, "429") || !strings.Contains(out, why) || !strings.Contains(out, "go on in a new sandbox") {
			t.Errorf("%s:\n%s", when, out)
		}
		if out := must(t, other, "curl -sS "+url+" 2>&1 || true"); out != "hello" {
			t.Errorf("%s, another sandbox: %q", when, out)
		}
	}
	denied("after it", "")
	if out := must(t, sb, `python3 -c '
import socket
try: print(socket.getaddrinfo("secret.example.com", 80))
except OSError as e: print("none")
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.connect(("`+inside+`", `+port+`)); s.settimeout(2); s.send(b"x")
try: s.recv(1)
except OSError as e: print(e)' 2>&1 || true`); !strings.Contains(out, "none") || strings.Contains(out, "timed out") {
		t.Errorf("by other ways: %s", out)
	}
	must(t, sb, "for i in $(seq 100); do curl -s "+url+" >/dev/null || true; done")

	pid := gatewayOf(t, s)
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	until(t, func() bool { next := gatewayPID(s); return next != 0 && next != pid })
	until(t, func() bool { return must(t, other, "curl -sS "+url+" 2>&1 || true") == "hello" })
	denied("with another gateway", "")
	old := s.server()
	s.cmd.Process.Signal(syscall.SIGHUP)
	s.replaced(old)
	until(t, func() bool { return must(t, other, "curl -sS "+url+" 2>&1 || true") == "hello" })
	denied("with another server", "--proxy http://10.0.0.1:3128 ") // which knows no names
	if got, err := c.Get(t.Context(), sb.ID); err != nil || got.NetworkBytes != most {
		t.Errorf("it has used %+v, %v", got, err)
	}

	ended, recorded := 0, 0
	for _, r := range s.crossings(sb.ID) {
		if r.Outcome == "error resource_exhausted" {
			ended++
		}
		if r.Effect == "deny" {
			recorded++
		}
	}
	if ended != 1 || recorded == 0 || recorded > 60 {
		t.Errorf("in the trail, %d ended for want of bytes and %d were denied", ended, recorded)
	}
	if n := s.refused(sb.ID)["bytes"]; n < 40 {
		t.Errorf("%d are counted", n)
	}

	// Connections at a time.
	got := must(t, other, `python3 -c '
import socket, time
to = socket.gethostbyname("`+inside+`")
time.sleep(2) # questions for names are flows, too
all, refused = [], 0
for i in range(100):
    try: all.append(socket.create_connection((to, `+port+`), timeout=5))
    except OSError: refused += 1
print(len(all), refused)'`)
	var open, refused int
	if fmt.Sscan(got, &open, &refused); open > 64 || open < 50 || refused < 36 {
		t.Errorf("of 100 connections, open and refused are %s", got)
	}
	until(t, func() bool { return s.refused(other.ID)["flows"] > 0 })
}

// refused is what the trail counts of a sandbox for each budget.
func (s *network) refused(sandbox string) map[string]int64 {
	s.t.Helper()
	all := map[string]int64{}
	for line := range strings.Lines(s.trail("query", "--json", "--all", "type=sandbox.budget sandbox="+sandbox)) {
		var e struct {
			Outcome struct {
				Code   string
				Counts map[string]int64
			}
		}
		if err := json.Unmarshal([]byte(line), &e); err != nil {
			s.t.Fatalf("%s: %v", line, err)
		}
		all[e.Outcome.Code] += e.Outcome.Counts["refused"]
	}
	return all
}
