package test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/url"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"airlock.dev/airlock"
	"airlock.dev/airlock/api/envd"
	"airlock.dev/airlock/client"
)

// memory reads a line such as VmRSS of the server's status, in bytes.
func (s *running) memory(line string) int64 {
	s.t.Helper()
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", s.server()))
	if err != nil {
		s.t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(status), line+":")
	var kb int64
	if _, err := fmt.Sscanf(rest, "%d kB", &kb); err != nil {
		s.t.Fatalf("%s: %v", line, err)
	}
	return kb << 10
}

// written is how much the server has written to whatever, in bytes.
func (s *running) written() int64 {
	s.t.Helper()
	counts, err := os.ReadFile(fmt.Sprintf("/proc/%d/io", s.server()))
	if err != nil {
		s.t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(counts), "wchar:")
	var n int64
	if _, err := fmt.Sscan(rest, &n); err != nil {
		s.t.Fatal(err)
	}
	return n
}

// TestMuchOutput has 100 MB written by a program that a client reads slowly,
// with a pause: nothing is lost, and the server does not hold it either.
func TestMuchOutput(t *testing.T) {
	s := startServer(t)
	sb := create(t, s.as(s.key("default", airlock.Client)), client.CreateRequest{Timeout: 5 * time.Minute})
	must(t, sb, "true") // what every command costs is there before
	const size = 100_000_000
	before := s.memory("VmRSS")
	if err := os.WriteFile(fmt.Sprintf("/proc/%d/clear_refs", s.server()), []byte("5"), 0); err != nil {
		t.Fatalf("reset the peak: %v", err)
	}
	data := func() io.Reader { return io.LimitReader(rand.NewChaCha8([32]byte{1}), size) }
	sum := sha256.New()
	io.Copy(sum, data())
	if err := sb.Upload(t.Context(), "big", data(), 0); err != nil {
		t.Fatal(err)
	}
	uploaded, written := s.memory("VmHWM"), s.written()

	msg, err := proto.Marshal(&envd.StartRequest{Process: &envd.ProcessConfig{Cmd: "/bin/cat", Args: []string{"big"}}})
	if err != nil {
		t.Fatal(err)
	}
	body := append(binary.BigEndian.AppendUint32([]byte{0}, uint32(len(msg))), msg...)
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, s.url+"/process.Process/Start", bytes.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	for k, v := range dataHeader(sb) {
		req.Header.Set(k, v)
	}
	req.Header.Set("Content-Type", "application/connect+proto")
	req.Header.Set("Connect-Protocol-Version", "1")
	transport := &http.Transport{DisableCompression: true}
	defer transport.CloseIdleConnections()
	resp, err := transport.RoundTrip(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		t.Fatal(resp.Status)
	}
	var (
		got    = sha256.New()
		n      int64
		paused bool
		start  = time.Now()
		end    *envd.ProcessEvent_EndEvent
		head   [5]byte
	)
	for end == nil {
		if _, err := io.ReadFull(resp.Body, head[:]); err != nil {
			t.Fatalf("after %d bytes: %v", n, err)
		}
		frame := make([]byte, binary.BigEndian.Uint32(head[1:]))
		if _, err := io.ReadFull(resp.Body, frame); err != nil {
			t.Fatalf("after %d bytes: %v", n, err)
		}
		if head[0] != 0 {
			t.Fatalf("after %d bytes, a frame with flags %d: %.200s", n, head[0], frame)
		}
		var m envd.StartResponse
		if err := proto.Unmarshal(frame, &m); err != nil {
			t.Fatal(err)
		}
		out := m.GetEvent().GetData().GetStdout()
		got.Write(out)
		n += int64(len(out))
		end = m.GetEvent().GetEnd()
		if !paused && n > size/3 {
			paused = true
			time.Sleep(3 * time.Second)
			must(t, sb, "pgrep -x cat") // it waits for us
		}
		// 16 MB a second: what the reader has not asked for yet stays in the program.
		if due := start.Add(time.Duration(n) * time.Second / 16_000_000); time.Until(due) > 5*time.Millisecond {
			time.Sleep(time.Until(due))
		}
	}
	peak := s.memory("VmHWM")
	t.Logf("%d bytes in %.1f s; the server's RSS was %.1f MB before, %.1f MB at its peak (%.1f MB after the upload)", n, time.Since(start).Seconds(), mb(before), mb(peak), mb(uploaded))
	if n != size || !bytes.Equal(got.Sum(nil), sum.Sum(nil)) || end.GetExitCode() != 0 || !end.GetExited() {
		t.Errorf("%d bytes, SHA-256 %x, want %x; end %v", n, got.Sum(nil), sum.Sum(nil), end)
	}
	if through := s.written() - written; through < size {
		t.Errorf("the process whose memory was read wrote %d bytes: it is not the one that serves", through)
	}
	if grown := peak - before; grown >= 64<<20 {
		t.Errorf("the server's RSS grew by %.1f MB", mb(grown))
	}
}

func mb(bytes int64) float64 { return float64(bytes) / 1e6 }

// TestOutcomes tells apart how commands end, one after the other in a sandbox
// that none of them harms.
func TestOutcomes(t *testing.T) {
	s := startServer(t)
	sb := create(t, s.as(s.key("default", airlock.Client)), client.CreateRequest{Timeout: 5 * time.Minute, Limits: airlock.Limits{MemoryMB: 128, OutputBytes: 10_000}})
	for _, c := range []struct {
		line    string
		timeout time.Duration
		want    client.ExecResult
		message string // of those that Airlock gives
		output  int
	}{
		{"exit 7", time.Minute, client.ExecResult{ExitCode: 7, Outcome: airlock.Exited}, "", 0},
		{"exit 137", time.Minute, client.ExecResult{ExitCode: 137, Outcome: airlock.Exited}, "", 0},
		{"kill -TERM $$", time.Minute, client.ExecResult{ExitCode: -1, Outcome: airlock.Signaled, Signal: "SIGTERM"}, "", 0},
		{"kill -KILL $$", time.Minute, client.ExecResult{ExitCode: -1, Outcome: airlock.Signaled, Signal: "SIGKILL"}, "", 0},
		{"sleep 60", time.Second, client.ExecResult{ExitCode: -1, Outcome: airlock.Timeout, Signal: "SIGKILL"}, "timeout", 0},
		{"trap '' TERM; setsid sleep 61 & sleep 61", time.Second, client.ExecResult{ExitCode: -1, Outcome: airlock.Timeout, Signal: "SIGKILL"}, "timeout", 0},
		{`exec python3 -c 'b = []
while True: b.append(bytearray(b"x") * (1 << 20))'`, time.Minute, client.ExecResult{ExitCode: -1, Outcome: airlock.OOM, Signal: "SIGKILL"}, "memory", 0},
		{"exec yes", time.Minute, client.ExecResult{ExitCode: -1, Outcome: airlock.OutputLimit, Signal: "SIGKILL"}, "limits.outputBytes", 10_000},
		{"head -c 10000 /dev/zero; exit 3", time.Minute, client.ExecResult{ExitCode: 3, Outcome: airlock.Exited}, "", 10_000},
	} {
		name, _, _ := strings.Cut(c.line, "\n")
		t.Run(name, func(t *testing.T) {
			var out bytes.Buffer
			r, err := sb.Exec(t.Context(), client.ExecRequest{Cmd: "/bin/bash", Args: []string{"-c", c.line}, Stdout: &out, Stderr: io.Discard, Timeout: c.timeout})
			if err != nil {
				t.Fatal(err)
			}
			if r.ExitCode != c.want.ExitCode || r.Outcome != c.want.Outcome || c.want.Outcome == airlock.Signaled && r.Signal != c.want.Signal || !strings.Contains(r.Message, c.message) {
				t.Errorf("%+v, want %+v with the message %q", r, c.want, c.message)
			}
			if out.Len() != c.output {
				t.Errorf("%d bytes of output, want %d", out.Len(), c.output)
			}
			if out := must(t, sb, "echo lives; ! pgrep -lx 'sleep|yes' && ! pgrep -l python"); out != "lives\n" {
				t.Errorf("afterwards: %q", out)
			}
		})
	}
}

// TestBlindGuest takes the descriptors from PID 1, as root inside can: it sees
// no processes then and cannot kill them. The command ends at its limit all
// the same, and the sandbox with it.
func TestBlindGuest(t *testing.T) {
	s := startServer(t, noPool)
	c := s.as(s.key("default", airlock.Client))
	for _, limit := range []struct {
		line    string
		timeout time.Duration
		want    airlock.Outcome
	}{
		{"exec sleep 600", time.Second, airlock.Timeout},
		{"yes | head -c 20000; exec sleep 600", 0, airlock.OutputLimit},
	} {
		sb := create(t, c, client.CreateRequest{Timeout: 5 * time.Minute, Limits: airlock.Limits{OutputBytes: 10_000}})
		blind := "import os, resource; resource.prlimit(1, resource.RLIMIT_NOFILE, (3, 3)); os.execv('/bin/bash', ['bash', '-c', '" + limit.line + "'])"
		begun := time.Now()
		r, err := sb.Exec(t.Context(), client.ExecRequest{Cmd: "/usr/bin/python3", Args: []string{"-c", blind}, User: "root", Stdout: io.Discard, Timeout: limit.timeout})
		if took := time.Since(begun); err != nil || r.Outcome != limit.want || took > 20*time.Second {
			t.Errorf("%s: %+v, %v after %v", limit.line, r, err, took)
		}
		eventually(t, "the sandbox ends", s.empty)
	}

	// It ends also where nothing runs that has a limit.
	sb := create(t, c, client.CreateRequest{Timeout: 5 * time.Minute})
	r, err := sb.Exec(t.Context(), client.ExecRequest{Cmd: "/usr/bin/python3", Args: []string{"-c", "import resource; resource.prlimit(1, resource.RLIMIT_NOFILE, (3, 3))"}, User: "root"})
	if err != nil || r.ExitCode != 0 {
		t.Fatalf("%+v, %v", r, err)
	}
	for deadline := time.Now().Add(time.Minute); !s.empty(); time.Sleep(time.Second) {
		if time.Now().After(deadline) {
			t.Fatal("a blind sandbox lives on")
		}
	}
}

// TestDiskFull fills a sandbox's disk in both ways.
func TestDiskFull(t *testing.T) {
	s := startServer(t)
	sb := create(t, s.as(s.key("default", airlock.Client)), client.CreateRequest{Timeout: 5 * time.Minute, Limits: airlock.Limits{DiskMB: 32}})
	if err := sb.Upload(t.Context(), "kept", strings.NewReader("old"), 0); err != nil {
		t.Fatal(err)
	}
	err := sb.Upload(t.Context(), "kept", io.LimitReader(rand.NewChaCha8([32]byte{2}), 64<<20), 0)
	var answer *client.Error
	if !errors.As(err, &answer) || answer.Status != http.StatusInsufficientStorage || airlock.CodeOf(err) != airlock.NoSpace || !strings.Contains(err.Error(), "limits.diskMB") {
		t.Errorf("an upload of more than the disk: %v", err)
	}
	if out := must(t, sb, "cat kept; ls -A"); out != "oldkept\n" {
		t.Errorf("afterwards: %q", out)
	}
	if r, out := run(t, sb, "head -c 64M /dev/urandom > filler"); r.Outcome != airlock.Exited || r.ExitCode != 1 || !strings.Contains(out, "No space left on device") {
		t.Errorf("a command that fills the disk: %+v, %q", r, out)
	}
	if out := must(t, sb, "echo works; rm filler"); out != "works\n" {
		t.Errorf("on a full disk: %q", out)
	}
	if err := sb.Upload(t.Context(), "new", io.LimitReader(rand.NewChaCha8([32]byte{3}), 8<<20), 0); err != nil {
		t.Errorf("an upload after files were removed: %v", err)
	}
	if out := must(t, sb, "stat -c %s new"); out != "8388608\n" {
		t.Errorf("its size: %q", out)
	}
}

// TestBrokenUpload breaks uploads off half-way, in both framings of a body.
func TestBrokenUpload(t *testing.T) {
	s := startServer(t)
	sb := create(t, s.as(s.key("default", airlock.Client)), client.CreateRequest{Timeout: 5 * time.Minute})
	old := strings.Repeat("old ", 100_000)
	if err := sb.Upload(t.Context(), "dir/file", strings.NewReader(old), 0); err != nil {
		t.Fatal(err)
	}
	u, err := url.Parse(s.url)
	if err != nil {
		t.Fatal(err)
	}
	half := strings.Repeat("new ", 100_000)
	for _, framing := range []string{
		fmt.Sprintf("Content-Length: %d\r\n\r\n%s", 2*len(half), half),
		fmt.Sprintf("Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n", len(half), half),
	} {
		conn, err := net.Dial("tcp", u.Host)
		if err != nil {
			t.Fatal(err)
		}
		head := "POST /files?path=dir/file HTTP/1.1\r\nHost: sandbox\r\nContent-Type: application/octet-stream\r\n"
		for k, v := range dataHeader(sb) {
			head += k + ": " + v + "\r\n"
		}
		if _, err := io.WriteString(conn, head+framing); err != nil {
			t.Fatal(err)
		}
		// The guest has taken part of it when it is broken off.
		eventually(t, "the upload has begun", func() bool {
			return must(t, sb, "ls -A dir") != "file\n" // what is renamed at the end
		})
		conn.Close()
		eventually(t, "nothing of the upload is left", func() bool {
			return must(t, sb, "ls -A dir") == "file\n"
		})
		var now bytes.Buffer
		if err := sb.Download(t.Context(), "dir/file", &now); err != nil || now.String() != old {
			t.Errorf("after the upload broke off: %d bytes, %.20q, %v", now.Len(), now.String(), err)
		}
	}
	if err := sb.Upload(t.Context(), "dir/file", strings.NewReader("whole"), 0); err != nil {
		t.Fatal(err)
	}
	if out := must(t, sb, "cat dir/file"); out != "whole" {
		t.Errorf("after a whole upload: %q", out)
	}
}

func eventually(t *testing.T, what string, holds func() bool) {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); !holds(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("after 20 s it is not so that %s", what)
		}
	}
}

// TestEndOfLife lets a sandbox reach its end while a command runs in it.
func TestEndOfLife(t *testing.T) {
	s := startServer(t, noPool)
	c := s.as(s.key("default", airlock.Client))
	sb := create(t, c, client.CreateRequest{Timeout: 2 * time.Second})
	start := time.Now()
	r, err := sb.Exec(t.Context(), client.ExecRequest{Cmd: "sleep", Args: []string{"60"}})
	if err != nil || r.Outcome != airlock.SandboxKilled {
		t.Errorf("the command in it: %+v, %v", r, err)
	}
	var answer *client.Error
	eventually(t, "the sandbox is gone", func() bool {
		_, err := c.Get(t.Context(), sb.ID)
		return errors.As(err, &answer)
	})
	took := time.Since(start)
	t.Logf("gone %.2f s after the create was answered", took.Seconds())
	if took < 1500*time.Millisecond || took > 10*time.Second { // late only as the machine is busy
		t.Errorf("gone after %v", took)
	}
	if answer.Status != http.StatusNotFound || airlock.CodeOf(answer) != airlock.NotFound {
		t.Errorf("info: %d, %v", answer.Status, answer)
	}
	for _, path := range []string{"/health", "/files?path=x"} {
		resp, body := s.ask(t, "GET", path, "", dataHeader(sb))
		if want := `{"code":502,"message":"The sandbox was not found","sandboxId":"` + sb.ID + `"}`; resp.StatusCode != http.StatusBadGateway || body != want {
			t.Errorf("data plane, %s: %s, %s", path, resp.Status, body)
		}
	}
	if list, err := c.List(t.Context(), nil); err != nil || len(list) != 0 {
		t.Errorf("list: %+v, %v", list, err)
	}
	eventually(t, "nothing of it is left", s.empty)
	if err := c.SetTimeout(t.Context(), sb.ID, time.Minute); airlock.CodeOf(err) != airlock.NotFound {
		t.Errorf("its timeout: %v", err)
	}
}

// empty says that no sandbox has a process, control group or directory.
func (s *running) empty() bool {
	dirs, mounts := s.runtime()
	return len(s.processes()["runsc-sandbox"])+len(s.processes()["runsc-gofer"])+len(s.groups())+len(dirs)+len(mounts) == 0
}

// TestTeams has one team try everything on the sandbox of another.
func TestTeams(t *testing.T) {
	s := startServer(t)
	a, keyB := s.as(s.key("a", airlock.Client)), s.key("b", airlock.Client)
	b := s.as(keyB)
	theirs := create(t, a, client.CreateRequest{Timeout: 5 * time.Minute, Metadata: map[string]string{"who": "a"}})
	mine := create(t, b, client.CreateRequest{Timeout: 5 * time.Minute, Metadata: map[string]string{"who": "a"}})
	before, err := a.Get(t.Context(), theirs.ID)
	if err != nil {
		t.Fatal(err)
	}
	for _, filter := range []map[string]string{nil, {"who": "a"}} {
		if list, err := b.List(t.Context(), filter); err != nil || len(list) != 1 || list[0].ID != mine.ID {
			t.Errorf("b's list with %v: %+v, %v", filter, list, err)
		}
	}
	missing, _ := s.ask(t, "GET", "/sandboxes/i00000000000000000000", "", map[string]string{"X-API-KEY": keyB})
	for _, c := range []struct{ method, path, body string }{
		{"GET", "/sandboxes/" + theirs.ID, ""},
		{"DELETE", "/sandboxes/" + theirs.ID, ""},
		{"POST", "/sandboxes/" + theirs.ID + "/timeout", `{"timeout":0}`},
		{"POST", "/sandboxes/" + theirs.ID + "/timeout", `{"timeout":3600}`},
		{"POST", "/sandboxes/" + theirs.ID + "/refreshes", `{"duration":3600}`},
		{"POST", "/sandboxes/" + theirs.ID + "/connect", `{"timeout":3600}`},
		{"POST", "/v2/sandboxes/" + theirs.ID + "/connect", `{"timeout":3600}`},
		{"GET", "/sandboxes/" + theirs.ID + "/logs", ""},
		{"GET", "/v2/sandboxes/" + theirs.ID + "/logs", ""},
	} {
		resp, body := s.ask(t, c.method, c.path, c.body, map[string]string{"X-API-KEY": keyB})
		// As for one that does not exist: not even that is told.
		if resp.StatusCode != http.StatusNotFound || resp.StatusCode != missing.StatusCode || strings.Contains(body, theirs.AccessToken) {
			t.Errorf("b: %s %s %s: %s %s", c.method, c.path, c.body, resp.Status, body)
		}
	}
	// Neither b's key nor the token of b's own sandbox opens the data plane.
	for _, header := range []map[string]string{{"X-API-KEY": keyB}, {"X-Access-Token": mine.AccessToken}, {}} {
		header["E2b-Sandbox-Id"], header["E2b-Sandbox-Port"] = theirs.ID, "49983"
		for _, path := range []string{"/files?path=/etc/passwd", "/envs", "/metrics"} {
			if resp, body := s.ask(t, "GET", path, "", header); resp.StatusCode != http.StatusUnauthorized {
				t.Errorf("b: %s: %s %s", path, resp.Status, body)
			}
		}
		header["Content-Type"] = "application/json"
		if resp, body := s.ask(t, "POST", "/process.Process/List", "{}", header); resp.StatusCode != http.StatusUnauthorized {
			t.Errorf("b: the processes: %s %s", resp.Status, body)
		}
	}
	after, err := a.Get(t.Context(), theirs.ID)
	if err != nil || !after.EndAt.Equal(before.EndAt) {
		t.Errorf("a's sandbox ended at %v and now at %v, %v", before.EndAt, after.EndAt, err)
	}
	must(t, theirs, "true")
}

// TestRoles has keys that run nothing, and the client's, which administers nothing.
func TestRoles(t *testing.T) {
	s := startServer(t, noPool)
	own := create(t, s.as(s.key("default", airlock.Client)), client.CreateRequest{Timeout: 5 * time.Minute})
	type call struct{ method, path, body string }
	runs := []call{
		{"POST", "/v2/sandboxes", `{"templateID":"base"}`},
		{"POST", "/sandboxes", `{"templateID":"base"}`},
		{"GET", "/v2/sandboxes", ""},
		{"GET", "/sandboxes/" + own.ID, ""},
		{"POST", "/sandboxes/" + own.ID + "/timeout", `{"timeout":0}`},
		{"DELETE", "/sandboxes/" + own.ID, ""},
	}
	administers := []call{
		{"POST", "/v1/keys", `{"team":"default","role":"operator"}`},
		{"GET", "/v1/keys", ""},
		{"DELETE", "/v1/keys/whatever", ""},
		{"PUT", "/v1/secrets/x", `{"host":"a.example","methods":["GET"],"path":"/","place":{"query":"k"},"value":"v"}`},
		{"POST", "/v1/secrets/x/rotate", `{"value":"v"}`},
		{"DELETE", "/v1/secrets/x", ""},
	}
	for role, calls := range map[airlock.Role][]call{
		airlock.Client:   administers,
		airlock.Operator: runs,
		airlock.Approver: append(runs[:len(runs):len(runs)], administers...),
		airlock.Auditor:  append(runs[:len(runs):len(runs)], administers...),
	} {
		key := s.key("default", role)
		for _, c := range calls {
			resp, body := s.ask(t, c.method, c.path, c.body, map[string]string{"X-API-KEY": key})
			if resp.StatusCode != http.StatusForbidden || !strings.Contains(body, `"error_code":"permission_denied"`) {
				t.Errorf("%s: %s %s: %s %s", role, c.method, c.path, resp.Status, body)
			}
		}
	}
	must(t, own, "true")
	if n := len(s.processes()["runsc-sandbox"]); n != 1 {
		t.Errorf("%d sandboxes run", n)
	}
}

// TestAdmission asks for more than the server may give: refused as a whole.
func TestAdmission(t *testing.T) {
	s := startServer(t, "--max-memory", "400MiB", noPool)
	key := s.key("default", airlock.Client)
	c := s.as(key)
	req := client.CreateRequest{Timeout: 5 * time.Minute, Limits: airlock.Limits{MemoryMB: 200}} // of which there is room for one
	// Many at one time get no more than one after the other do.
	var (
		mu   sync.Mutex
		wg   sync.WaitGroup
		made []*client.Sandbox
	)
	for range 6 {
		wg.Go(func() {
			sb, err := c.Create(t.Context(), req)
			mu.Lock()
			defer mu.Unlock()
			if err == nil {
				made = append(made, sb)
				return
			}
			var answer *client.Error
			if !errors.As(err, &answer) || answer.Status != http.StatusTooManyRequests {
				t.Errorf("a create beyond what there is: %v", err)
			}
		})
	}
	wg.Wait()
	if len(made) != 1 {
		t.Fatalf("%d sandboxes were made", len(made))
	}
	resp, body := s.ask(t, "POST", "/v2/sandboxes", `{"templateID":"base","limits":{"memoryMB":200}}`, map[string]string{"X-API-KEY": key})
	var answer struct {
		Code      int    `json:"code"`
		Message   string `json:"message"`
		ErrorCode string `json:"error_code"`
		Field     string `json:"field"`
	}
	if err := json.Unmarshal([]byte(body), &answer); err != nil {
		t.Fatalf("%v: %s", err, body)
	}
	if resp.StatusCode != 429 || resp.Header.Get("Retry-After") != "5" || answer.Code != 429 || answer.ErrorCode != "resource_exhausted" || answer.Field != "memory" || !strings.Contains(answer.Message, "not enough memory") {
		t.Errorf("%s, Retry-After %q, %s", resp.Status, resp.Header.Get("Retry-After"), body)
	}
	list, err := c.List(t.Context(), nil)
	dirs, _ := s.runtime()
	if err != nil || len(list) != 1 || len(dirs) != 1 || len(s.groups()) != 1 || len(s.processes()["runsc-sandbox"]) != 1 {
		t.Errorf("after the refusals: list %+v, %v, directories %q, groups %q, processes %v", list, err, dirs, s.groups(), s.processes())
	}
	must(t, made[0], "true")
	// What is larger than all there is will never fit.
	if _, err := c.Create(t.Context(), client.CreateRequest{Limits: airlock.Limits{MemoryMB: 4096}}); airlock.CodeOf(err) != airlock.Exhausted {
		t.Errorf("a create beyond the whole: %v", err)
	}
	if err := made[0].Close(); err != nil {
		t.Fatal(err)
	}
	next := create(t, c, req)
	must(t, next, "true")
	// A create whose client leaves gives back what it took.
	if err := next.Close(); err != nil {
		t.Fatal(err)
	}
	hurry, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if sb, err := c.Create(hurry, req); err == nil {
		sb.Close()
	}
	eventually(t, "the room of a create that was left is free or has an owner", func() bool {
		list, err := c.List(t.Context(), nil)
		if err != nil {
			t.Fatal(err)
		}
		for _, info := range list { // it was made before its client left
			c.Kill(t.Context(), info.ID)
		}
		sb, err := c.Create(t.Context(), req)
		if err != nil {
			return false
		}
		if err := sb.Close(); err != nil {
			t.Error(err)
		}
		return true
	})
	eventually(t, "nothing is left", s.empty)
}
