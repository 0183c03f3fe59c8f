package test

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/mod/sumdb/note"

	"airlock.dev/airlock"
	"airlock.dev/airlock/audit"
	"airlock.dev/airlock/audit/witnesstest"
	"airlock.dev/airlock/client"
)

// mark has a server record something before it answers: that somebody looked
// at sealed parts, and for what. Nothing has that name.
func mark(ctx context.Context, c *client.Client, n int) error {
	_, err := c.AuditEvents(ctx, client.AuditQuery{Query: fmt.Sprintf("seq<1 sandbox=mark-%d", n), Limit: 1, Details: true})
	return err
}

// longMark is a mark of some 3 KB: that somebody wanted to revoke a key, which
// there is not.
func longMark(ctx context.Context, c *client.Client, n int) error {
	err := c.RevokeKey(ctx, fmt.Sprintf("sandbox=mark-%d %s", n, strings.Repeat("x", 3000)))
	if airlock.CodeOf(err) == airlock.NotFound {
		return nil
	}
	return err
}

// marks returns the number of each mark in the trail, and all types of events
// from a number on. Every number must be there.
func marks(t *testing.T, c *client.Client, from uint64) (numbers []int, types []string, next uint64) {
	t.Helper()
	for {
		s, err := c.AuditStatus(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if s.Indexed == s.Durable && s.Pending == 0 {
			break
		}
		time.Sleep(10 * time.Millisecond)
	}
	next = from
	q := client.AuditQuery{Query: fmt.Sprintf("seq>=%d", from), Limit: audit.MaxPage}
	for {
		page, err := c.AuditEvents(t.Context(), q)
		if err != nil {
			t.Fatal(err)
		}
		for _, raw := range page.Events {
			var e struct {
				Seq  uint64
				Type string
				Call audit.Call
			}
			if err := json.Unmarshal(raw, &e); err != nil {
				t.Fatal(err)
			}
			if e.Seq != next {
				t.Fatalf("event %d is in the place of %d", e.Seq, next)
			}
			next++
			types = append(types, e.Type)
			if _, name, ok := strings.Cut(e.Call.Resource.ID, "sandbox=mark-"); ok {
				name, _, _ = strings.Cut(name, " ")
				n, err := strconv.Atoi(name)
				if err != nil {
					t.Fatal(err)
				}
				numbers = append(numbers, n)
			}
		}
		if q.After = page.Next; q.After == "" {
			return numbers, types, next
		}
	}
}

// verified says that both verifiers find nothing wrong with a server's log.
func verified(t *testing.T, dataDir string, vkey string, heads ...string) {
	t.Helper()
	if ours, theirs := say(t, filepath.Join(dataDir, "audit"), []string{vkey}, heads...); ours != "" || theirs != "" {
		t.Errorf("the log is not good:\n%s\n%s", ours, theirs)
	}
}

// TestKilledInAnAppend kills the server at the system calls that change files,
// one after the other, while it records: what it answered for is there.
func TestKilledInAnAppend(t *testing.T) {
	strace, err := exec.LookPath("strace")
	if err != nil {
		t.Skip("strace is not installed")
	}
	if out, err := exec.Command(strace, "-f", "-o", os.DevNull, "true").CombinedOutput(); err != nil {
		t.Skipf("strace may not trace here: %v: %s", err, out)
	}
	c := startCrashing(t)
	sb, err := c.client.Create(t.Context(), small)
	if err != nil {
		t.Fatal(err)
	}
	shards, err := c.client.AuditShards(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	var from uint64
	number, kills := 0, 0
	for _, calls := range []string{"pwrite64", "fdatasync", "fsync", "fallocate", "openat", "write", "rename,renameat,renameat2,link,linkat", "unlink,unlinkat", "mkdir,mkdirat", "close"} {
		for n := 1; n <= 10; n++ {
			old := c.server()
			trace := exec.Command(strace, "-f", "-qq", "-o", os.DevNull, "-p", strconv.Itoa(old), "-e", "trace="+calls,
				"-e", fmt.Sprintf("inject=%s:signal=KILL:when=%d", calls, n))
			if err := trace.Start(); err != nil {
				t.Fatal(err)
			}
			ended := make(chan struct{})
			go func() { trace.Wait(); close(ended) }()
			traced(t, old, trace.Process.Pid)
			var answered []int
			ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
			killed := false
			for i := 0; i < 40 && !killed; i++ { // and things that change other files, too
				number++
				err := mark(ctx, c.client, number) // the client may ask the next server
				if err == nil {
					answered = append(answered, number)
				}
				switch i {
				case 10:
					_, err = c.client.AuditRotate(ctx)
				case 20:
					err = sb.Upload(ctx, "x", strings.NewReader("x"), 0)
				}
				patience := time.Millisecond
				if err != nil { // as it is being killed
					patience = 10 * time.Second
				}
				select {
				case <-ended:
					killed = true
				case <-time.After(patience):
					if err != nil {
						t.Fatalf("%s %d: %v", calls, n, err)
					}
				}
			}
			cancel()
			if killed {
				c.replaced(old)
				kills++
			} else { // no thread has come to this number
				trace.Process.Signal(syscall.SIGTERM)
				<-ended
				n = 10
			}
			found, types, next := marks(t, c.client, from)
			for _, a := range answered {
				if !slices.Contains(found, a) {
					t.Fatalf("killed at %s %d: mark %d was answered for and is not recorded", calls, n, a)
				}
			}
			if killed && !slices.Contains(types, "log.boot") {
				t.Errorf("killed at %s %d: no log.boot, but %q", calls, n, types)
			}
			from = next
		}
	}
	if kills < 40 {
		t.Errorf("only %d kills", kills)
	}
	t.Logf("%d kills, %d marks, %d events", kills, number, from)
	if r, out := run(t, sb, "cat x"); out != "x" {
		t.Errorf("the sandbox that was there all the time: %+v, %q", r, out)
	}
	signed(t, c.client)
	verified(t, c.dataDir, shards[0].VKey)
}

// traced waits until each thread of a process has a tracer.
func traced(t *testing.T, pid, tracer int) {
	t.Helper()
	want := fmt.Sprintf("TracerPid:\t%d\n", tracer)
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		threads, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/status", pid))
		if !slices.ContainsFunc(threads, func(status string) bool {
			text, err := os.ReadFile(status)
			return err == nil && !strings.Contains(string(text), want)
		}) {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("strace does not attach to %d", pid)
		}
	}
}

// TestDataDiskFull: with no room on the server's disk acts are refused with
// what to do, ends are not, and with room again all goes on by itself.
func TestDataDiskFull(t *testing.T) {
	needRoot(t)
	dataDir := t.TempDir()
	if err := syscall.Mount("tmpfs", dataDir, "tmpfs", 0, "size=1200m"); err != nil {
		t.Skipf("a file system of its own cannot be mounted: %v", err)
	}
	t.Cleanup(func() {
		if err := syscall.Unmount(dataDir, 0); err != nil {
			t.Errorf("unmount: %v", err)
		}
	})
	s := startServerAt(t, dataDir, "--keys-dir", filepath.Join(t.TempDir(), "keys"))
	c := s.operator()
	kept, killed := create(t, c, small), create(t, c, small)
	vkey := signed(t, c)[0].VKey
	filler, err := os.Create(filepath.Join(dataDir, "filler"))
	if err != nil {
		t.Fatal(err)
	}
	defer filler.Close()
	fill := func() {
		for block := make([]byte, 1<<20); ; {
			if _, err := filler.Write(block); err != nil {
				if len(block) == 1 {
					return
				}
				block = block[:len(block)/2]
			}
		}
	}
	var (
		mu       sync.Mutex
		wg       sync.WaitGroup
		answered []int
		refused  error
		next     atomic.Int64
	)
	for range 16 {
		wg.Go(func() {
			for {
				n := int(next.Add(1))
				err := longMark(t.Context(), c, n)
				mu.Lock()
				fill() // also what the server gave back
				if err == nil {
					answered = append(answered, n)
				} else if refused == nil {
					refused = err
				}
				end := refused != nil || n > 50_000
				mu.Unlock()
				if end {
					return
				}
			}
		})
	}
	wg.Wait()
	if refused == nil || airlock.CodeOf(refused) != airlock.Unavailable || strings.Contains(refused.Error(), dataDir) {
		t.Errorf("refused with %v", refused)
	}
	// A small event may have room where a large one has not.
	for n := 0; ; n++ {
		_, err := c.AuditHold(t.Context(), audit.Hold{Name: "x", Reason: "x", Until: time.Now().Add(time.Hour)})
		if err != nil {
			if airlock.CodeOf(err) != airlock.Unavailable {
				t.Errorf("a legal hold on a full disk: %v", err)
			}
			break
		}
		if n == 100 {
			t.Fatal("there is room for 100 legal holds")
		}
	}
	for what, err := range map[string]error{
		"an upload":         kept.Upload(t.Context(), "x", strings.NewReader("x"), 0),
		"another sandbox":   func() error { _, err := c.Create(t.Context(), small); return err }(),
		"a command":         func() error { _, err := kept.Exec(t.Context(), client.ExecRequest{Cmd: "/bin/true"}); return err }(),
		"a part of its own": func() error { _, err := c.AuditRotate(t.Context()); return err }(),
		"an erasure":        func() error { _, err := c.AuditErase(t.Context(), "team:acme"); return err }(),
		"holds":             func() error { _, err := c.AuditHolds(t.Context()); return err }(),
		"a released hold":   c.AuditRelease(t.Context(), "x"),
	} {
		if airlock.CodeOf(err) != airlock.Unavailable {
			t.Errorf("%s on a full disk: %v", what, err)
		}
	}
	if status, err := c.AuditStatus(t.Context()); err != nil || status.Problem == "" {
		t.Errorf("status: %+v, %v", status, err)
	}
	if err := c.Kill(t.Context(), killed.ID); err != nil {
		t.Errorf("a kill on a full disk: %v", err)
	}
	if err := os.Remove(filler.Name()); err != nil {
		t.Fatal(err)
	}
	filler.Close()
	for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(100 * time.Millisecond) {
		err := longMark(t.Context(), c, 0)
		if err == nil {
			break
		}
		if airlock.CodeOf(err) != airlock.Unavailable || time.Now().After(deadline) {
			t.Fatalf("with room again: %v", err)
		}
	}
	if err := kept.Upload(t.Context(), "x", strings.NewReader("x"), 0); err != nil {
		t.Errorf("an upload with room again: %v", err)
	}
	found, types, _ := marks(t, c, 0)
	for _, a := range answered {
		if !slices.Contains(found, a) {
			t.Errorf("mark %d was answered for and is not recorded", a)
		}
	}
	if !slices.Contains(types, "sandbox.end") {
		t.Error("the end of the killed sandbox is not recorded")
	}
	t.Logf("%d marks had room", len(answered))
	s.stop()
	verified(t, dataDir, vkey)
}

// TestWitnessOfAServer: what a witness has seen cannot be taken back. An older
// copy of the log that was put back is told from it by both verifiers, and
// grows no more heads.
func TestWitnessOfAServer(t *testing.T) {
	dataDir, keysDir := t.TempDir(), filepath.Join(t.TempDir(), "keys")
	// Its first start is without a witness: nobody knows the log's key before.
	s := startServerAt(t, dataDir, "--keys-dir", keysDir)
	part := signed(t, s.operator())[0]
	s.stop()
	logKey, err := note.NewVerifier(part.VKey)
	if err != nil {
		t.Fatal(err)
	}
	one := witnesstest.Start(t, logKey)
	policy := filepath.Join(t.TempDir(), "witnesses")
	write(t, policy, one.Policy)
	flags := []string{"--keys-dir", keysDir, "--witnesses", policy}

	s = startServerAt(t, dataDir, flags...)
	if err := mark(t.Context(), s.operator(), 1); err != nil {
		t.Fatal(err)
	}
	early := signed(t, s.operator())[0]
	if n, err := note.Open([]byte(early.Checkpoint), note.VerifierList(logKey, one.Key)); err != nil || len(n.Sigs) != 2 {
		t.Errorf("the head is not cosigned: %q, %v", early.Checkpoint, err)
	}
	s.stop()
	older := filepath.Join(t.TempDir(), "older")
	copyDir(t, filepath.Join(dataDir, "audit"), older)

	s = startServerAt(t, dataDir, flags...)
	for n := range 20 {
		if err := mark(t.Context(), s.operator(), n); err != nil {
			t.Fatal(err)
		}
	}
	signed(t, s.operator())
	s.stop()
	head := filepath.Join(t.TempDir(), "head")
	write(t, head, one.Head(t))
	verified(t, dataDir, part.VKey, head)

	remove(t, filepath.Join(dataDir, "audit"))
	copyDir(t, older, filepath.Join(dataDir, "audit"))
	verified(t, dataDir, part.VKey) // without the witness nobody can tell
	rolledBack := func() {
		t.Helper()
		ours, theirs := say(t, filepath.Join(dataDir, "audit"), []string{part.VKey}, head)
		if !strings.HasPrefix(ours, "rolled_back: ") || !strings.Contains("\n"+theirs, "\nrolled_back: ") {
			t.Errorf("rolled back:\n%s\n%s", ours, theirs)
		}
	}
	rolledBack()
	s = startServerAt(t, dataDir, flags...)
	for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(50 * time.Millisecond) {
		if err := mark(t.Context(), s.operator(), 1); err != nil {
			t.Fatal(err)
		}
		status, err := s.operator().AuditStatus(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if strings.Contains(status.Problem, "has seen another state of this log") {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("the witness's refusal is not told: %+v", status)
		}
	}
	s.fails = true // as it stops with events that no head covers
	s.stop()
	rolledBack()
	file := filepath.Join("log", part.ID, "checkpoint")
	if was, is := readFile(t, filepath.Join(older, file)), readFile(t, filepath.Join(dataDir, "audit", file)); string(is) != string(was) {
		t.Errorf("a head that the witness did not sign is there: %q, and was %q", is, was)
	}
}
