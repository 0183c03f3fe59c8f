package test

import (
	"bytes"
	"context"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"airlock.dev/airlock"
	"airlock.dev/airlock/audit"
	"airlock.dev/airlock/client"
)

// signed waits until a checkpoint covers all events, and returns the heads.
func signed(t *testing.T, c *client.Client) []client.AuditShard {
	t.Helper()
	for {
		s, err := c.AuditStatus(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if s.Problem != "" {
			t.Fatal(s.Problem)
		}
		if s.Published == s.Durable && s.Indexed == s.Durable && s.Pending == 0 {
			break
		}
		time.Sleep(50 * time.Millisecond)
	}
	shards, err := c.AuditShards(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return shards
}

// TestVerifiers: what a real server wrote is good for our verifier and for the
// one in Python that knows only docs/AUDIT.md, and each finds every damage.
func TestVerifiers(t *testing.T) {
	python := filepath.Join("e2b", ".venv", "bin", "python")
	if _, err := os.Stat(python); err != nil {
		t.Skipf("needs the virtual environment that test/e2b/venv.sh makes: %v", err)
	}
	s := startServer(t)
	c := s.operator()
	sb := create(t, c, client.CreateRequest{Timeout: 10 * time.Minute, Limits: small.Limits})
	for i := range 140 { // over 256 events, so that a tile is full
		if err := sb.Upload(t.Context(), "file"+strconv.Itoa(i), strings.NewReader("x"), 0); err != nil {
			t.Fatal(err)
		}
	}
	before := signed(t, c)
	older := filepath.Join(t.TempDir(), "older")
	copyDir(t, filepath.Join(s.dataDir, "audit", "log"), filepath.Join(older, "log"))
	if err := sb.Upload(t.Context(), "more", strings.NewReader("x"), 0); err != nil {
		t.Fatal(err)
	}
	if _, err := c.AuditRotate(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := sb.Upload(t.Context(), "another", strings.NewReader("x"), 0); err != nil {
		t.Fatal(err)
	}
	shards := signed(t, c)
	if len(before) != 1 || len(shards) != 2 || shards[0].Size < 256 {
		t.Fatalf("%+v", shards)
	}
	first, second := shards[0].ID, shards[1].ID
	good := filepath.Join(t.TempDir(), "good")
	copyDir(t, filepath.Join(s.dataDir, "audit", "log"), filepath.Join(good, "log"))
	head := filepath.Join(t.TempDir(), "head")
	write(t, head, []byte(shards[1].Checkpoint))

	// What each says: "" is that all is well.
	both := func(t *testing.T, dir string, heads ...string) (ours, theirs string) {
		t.Helper()
		args := []string{"../examples/verify/verify.py"}
		var kept []string
		for _, h := range heads {
			args = append(args, "--head", h)
			text, err := os.ReadFile(h)
			if err != nil {
				t.Fatal(err)
			}
			kept = append(kept, string(text))
		}
		out, err := exec.CommandContext(t.Context(), python, append(args, filepath.Join(dir, "log"), shards[0].VKey)...).CombinedOutput()
		if theirs = string(out); err == nil {
			theirs = ""
			if !strings.HasPrefix(string(out), "OK: ") {
				t.Errorf("it says %s", out)
			}
		} else if strings.Contains(theirs, "Traceback") {
			t.Errorf("the verifier failed itself: %s", theirs)
		}
		report, err := audit.Verify(t.Context(), dir, audit.VerifyOptions{VKeys: []string{shards[0].VKey}, Heads: kept})
		if err != nil {
			t.Fatal(err)
		}
		if !report.OK {
			text, err := json.Marshal(report.Problems)
			if err != nil {
				t.Fatal(err)
			}
			ours = string(text)
		}
		return ours, theirs
	}
	if ours, theirs := both(t, good, head); ours != "" || theirs != "" {
		t.Fatalf("a good log:\n%s\n%s", ours, theirs)
	}
	edit := func(file string, at int, with string) func(*testing.T, string) {
		return func(t *testing.T, dir string) {
			t.Helper()
			path := filepath.Join(dir, "log", filepath.FromSlash(file))
			b, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			if at < 0 {
				b = b[:len(b)+at]
			} else {
				copy(b[at:], with)
			}
			write(t, path, b)
		}
	}
	for _, d := range []struct {
		name         string
		damage       func(t *testing.T, dir string)
		head         bool // it takes a head to see it
		ours, theirs string
	}{
		{"an entry", func(t *testing.T, dir string) {
			path := filepath.Join(dir, "log", first, "tile", "entries", "000")
			b, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			i := bytes.Index(b, []byte(`"seq":77,`))
			i += bytes.Index(b[i:], []byte(`"type":"file`))
			copy(b[i:], `"type":"exec`)
			write(t, path, b)
		}, false, `"seq":77,`, first + "/tile/entries/000 event 77: "},
		{"a tile", edit(first+"/tile/0/000", 32*5, "\x00\x01\x02"), false, "tile/0/000", "tile/0/000: hash 5 "},
		{"a tile above", func(t *testing.T, dir string) {
			edit(first+"/tile/1/000.p/1", 0, "\x00\x01")(t, dir)
		}, false, "tile/1/000.p/1", first + "/tile/1/000.p/1"},
		{"a checkpoint", edit(second+"/checkpoint", len("airlock/01234567890123456789/"+second+"\n"), "9"), false, second + "/checkpoint", second + "/checkpoint: it is not signed by "},
		{"a bundle cut short", edit(first+"/tile/entries/000", -10, ""), false, "tile/entries/000", first + "/tile/entries/000: it breaks off"},
		{"a missing bundle", func(t *testing.T, dir string) {
			remove(t, filepath.Join(dir, "log", first, "tile", "entries", "000"))
		}, false, "absent", "absent: "},
		{"a missing part", func(t *testing.T, dir string) { remove(t, filepath.Join(dir, "log", first)) }, false, "", second},
		{"an older copy of a part", func(t *testing.T, dir string) {
			remove(t, filepath.Join(dir, "log", first))
			copyDir(t, filepath.Join(older, "log", first), filepath.Join(dir, "log", first))
		}, false, second, second},
		{"an older copy of all", func(t *testing.T, dir string) {
			remove(t, filepath.Join(dir, "log"))
			copyDir(t, filepath.Join(older, "log"), filepath.Join(dir, "log"))
		}, true, second, second},
	} {
		t.Run(d.name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "audit")
			copyDir(t, good, dir)
			d.damage(t, dir)
			if d.head {
				if ours, theirs := both(t, dir); ours != "" || theirs != "" {
					t.Errorf("without a head nobody can tell: %s %s", ours, theirs)
				}
			}
			var heads []string
			if d.head {
				heads = append(heads, head)
			}
			ours, theirs := both(t, dir, heads...)
			if ours == "" || !strings.Contains(ours, d.ours) {
				t.Errorf("ours does not say %q: %s", d.ours, ours)
			}
			if theirs == "" || !strings.Contains(theirs, d.theirs) {
				t.Errorf("the other does not say %q: %s", d.theirs, theirs)
			}
		})
	}
}

func copyDir(t *testing.T, from, to string) {
	t.Helper()
	for range 5 { // files of a log in use may go while they are copied
		if os.CopyFS(to, os.DirFS(from)) == nil {
			return
		}
		os.RemoveAll(to)
	}
	t.Fatalf("%s cannot be copied", from)
}

func write(t *testing.T, path string, b []byte) {
	t.Helper()
	if err := os.WriteFile(path, b, 0o600); err != nil {
		t.Fatal(err)
	}
}

func remove(t *testing.T, path string) {
	t.Helper()
	if err := os.RemoveAll(path); err != nil {
		t.Fatal(err)
	}
}

// TestWhoReadsTheTrail: auditors see their team's events, clients none.
func TestWhoReadsTheTrail(t *testing.T) {
	s := startServer(t)
	ours := create(t, s.as(s.key("ours", airlock.Client)), client.CreateRequest{Timeout: time.Minute, Limits: small.Limits})
	theirs := create(t, s.as(s.key("theirs", airlock.Client)), client.CreateRequest{Timeout: time.Minute, Limits: small.Limits})
	all := client.AuditQuery{Query: "type=sandbox.create", Limit: 100}
	page, err := s.operator().AuditEvents(t.Context(), all)
	if err != nil || len(page.Events) != 2 {
		t.Fatalf("the operator: %d events, %v", len(page.Events), err)
	}
	var e struct{ Seq uint64 }
	if err := json.Unmarshal(page.Events[1], &e); err != nil {
		t.Fatal(err)
	}
	auditor := s.as(s.key("ours", airlock.Auditor))
	page, err = auditor.AuditEvents(t.Context(), all)
	if err != nil || len(page.Events) != 1 || !strings.Contains(string(page.Events[0]), ours.ID) || strings.Contains(string(page.Events[0]), theirs.ID) {
		t.Errorf("an auditor of one team: %s, %v", page.Events, err)
	}
	for _, query := range []string{"team=theirs", "team!=ours", `sandbox=` + theirs.ID} {
		if page, err := auditor.AuditEvents(t.Context(), client.AuditQuery{Query: query, Limit: 100}); err == nil && len(page.Events) > 0 {
			t.Errorf("%s: an auditor sees another team's events", query)
		}
	}
	if _, err := auditor.AuditEvent(t.Context(), e.Seq, false); airlock.CodeOf(err) != airlock.NotFound {
		t.Errorf("another team's event: %v", err)
	}
	if _, err := auditor.AuditProof(t.Context(), e.Seq); airlock.CodeOf(err) != airlock.NotFound {
		t.Errorf("another team's proof: %v", err)
	}
	for name, refused := range map[string]func(context.Context, *client.Client) error{
		"erase": func(ctx context.Context, c *client.Client) error {
			_, err := c.AuditErase(ctx, "team:ours")
			return err
		},
		"rotate": func(ctx context.Context, c *client.Client) error { _, err := c.AuditRotate(ctx); return err },
		"hold": func(ctx context.Context, c *client.Client) error {
			_, err := c.AuditHold(ctx, audit.Hold{Name: "x", Reason: "y", Until: time.Now().Add(time.Hour)})
			return err
		},
		"reload": func(ctx context.Context, c *client.Client) error { _, err := c.ReloadPolicies(ctx); return err },
		"bulk details": func(ctx context.Context, c *client.Client) error {
			_, err := c.AuditEvents(ctx, client.AuditQuery{Limit: 10, Details: true})
			return err
		},
	} {
		for _, role := range []airlock.Role{airlock.Auditor, airlock.Client, airlock.Approver} {
			if err := refused(t.Context(), s.as(s.key("ours", role))); airlock.CodeOf(err) != airlock.Denied {
				t.Errorf("%s as %s: %v", name, role, err)
			}
		}
	}
	for _, role := range []airlock.Role{airlock.Client, airlock.Approver} {
		if _, err := s.as(s.key("ours", role)).AuditEvents(t.Context(), all); airlock.CodeOf(err) != airlock.Denied {
			t.Errorf("as %s: %v", role, err)
		}
	}

	// A key that is revoked follows no longer.
	key, err := s.operator().CreateKey(t.Context(), client.KeyRequest{Team: "ours", Role: airlock.Auditor, Name: "leaves"})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	var zero uint64
	followed, ended := make(chan json.RawMessage, 1000), make(chan error, 1)
	go func() {
		ended <- s.as(key.Secret).AuditFollow(ctx, "", &zero, func(e json.RawMessage) error { followed <- e; return nil })
	}()
	<-followed
	if err := s.operator().RevokeKey(ctx, key.ID); err != nil {
		t.Fatal(err)
	}
	for tick := time.NewTicker(500 * time.Millisecond); ; {
		select {
		case <-ended:
			if ctx.Err() != nil {
				t.Error("a revoked key follows the trail")
			}
			tick.Stop()
			return
		case <-tick.C:
			if _, err := s.operator().CreateKey(t.Context(), client.KeyRequest{Team: "ours", Role: airlock.Client, Name: "news"}); err != nil {
				t.Fatal(err)
			}
		}
	}
}
