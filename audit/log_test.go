package audit_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"golang.org/x/mod/sumdb/note"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"airlock.dev/airlock"
	"airlock.dev/airlock/audit"
	"airlock.dev/airlock/audit/index"
	"airlock.dev/airlock/audit/witnesstest"
	"airlock.dev/airlock/keystore"
)

// trail is a log in a directory that can be opened again.
type trail struct {
	t    *testing.T
	dir  string
	keys *keystore.Keystore
	cfg  audit.Config
	*audit.Log
}

func newTrail(t *testing.T) *trail {
	t.Helper()
	tr := &trail{t: t, dir: t.TempDir()}
	keys, err := keystore.Open(t.Context(), keystore.Config{DataDir: filepath.Join(tr.dir, "data"), KeysDir: filepath.Join(tr.dir, "keys")})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { keys.Close() })
	tr.keys = keys
	tr.cfg = audit.Config{
		Dir: filepath.Join(tr.dir, "data", "audit"), Installation: keys.Installation(), Version: "test", Sealer: keys,
		Checkpoint: 100 * time.Millisecond, Log: slog.New(slog.DiscardHandler),
	}
	if tr.cfg.Keys, err = keys.SigningKeys(t.Context()); err != nil {
		t.Fatal(err)
	}
	tr.open()
	t.Cleanup(tr.close)
	return tr
}

func (tr *trail) open() {
	tr.t.Helper()
	log, err := audit.Open(tr.t.Context(), tr.cfg)
	if err != nil {
		tr.t.Fatal(err)
	}
	tr.Log = log
}

func (tr *trail) close() {
	tr.t.Helper()
	if tr.Log == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(tr.t.Context()), 10*time.Second)
	defer cancel()
	if err := tr.Log.Close(ctx); err != nil {
		tr.t.Error(err)
	}
	tr.Log = nil
}

// all returns the events that match a query, oldest first.
func (tr *trail) all(query string) []map[string]any {
	tr.t.Helper()
	q, err := index.ParseQuery(query, time.Now())
	if err != nil {
		tr.t.Fatal(err)
	}
	for s := tr.Status(); s.Pending > 0 || s.Indexed < s.Durable; s = tr.Status() { // the index follows
		if tr.t.Context().Err() != nil {
			tr.t.Fatalf("%+v", s)
		}
		time.Sleep(time.Millisecond)
	}
	page, err := tr.Find(tr.t.Context(), q, index.Page{Limit: audit.MaxPage})
	if err != nil {
		tr.t.Fatal(err)
	}
	var all []map[string]any
	for _, raw := range page.Events {
		var e map[string]any
		if err := json.Unmarshal(raw, &e); err != nil {
			tr.t.Fatalf("%v: %s", err, raw)
		}
		all = append(all, e)
	}
	return all
}

func types(events []map[string]any) string {
	var all []string
	for _, e := range events {
		all = append(all, fmt.Sprint(e["seq"], " ", e["type"]))
	}
	return strings.Join(all, ", ")
}

var (
	port  = audit.Entity{Type: "Port", ID: "8080"}
	serve = audit.Event{
		Type: "port.serve", Team: "acme", Sandbox: "i1", Actor: audit.Actor{Kind: "user", ID: "public"},
		Call:     audit.Call{Principal: audit.Entity{Type: "Sandbox", ID: "i1"}, Action: "port:serve", Resource: port, Context: map[string]any{"caller": "public"}},
		Decision: audit.Decision{Effect: "permit", Policies: []string{"ceiling/ports-answer"}, Set: "abc"},
	}
)

func TestLog(t *testing.T) {
	tr := newTrail(t)
	ctx := t.Context()
	r, err := tr.Append(ctx, serve)
	if err != nil {
		t.Fatal(err)
	}
	if r.Seq() != 2 {
		t.Errorf("the third event has the number %d", r.Seq())
	}
	if _, err := tr.Queue(ctx, serve); airlock.CodeOf(err) != airlock.Internal {
		t.Errorf("a crossing was queued: %v", err)
	}
	if seq, err := tr.Queue(ctx, audit.Event{Type: "exec.start", Sandbox: "i1", Private: []audit.Private{{Subject: "team:acme", Detail: map[string]any{"args": []string{"cat", "/home/erin"}}}}}); err != nil || seq != 3 {
		t.Errorf("%d %v", seq, err)
	}
	if got, want := types(tr.all("")), "0 log.open, 1 log.boot, 2 port.serve, 3 exec.start"; got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
	event, err := tr.Event(ctx, 3)
	if err != nil {
		t.Fatal(err)
	}
	if bytes.Contains(event, []byte("erin")) || !bytes.HasPrefix(event, []byte(`{"v":1,"seq":3,"id":"`)) {
		t.Errorf("%s", event)
	}
	details, err := tr.Details(ctx, event)
	if err != nil || len(details) != 1 || string(details[0].Detail) != `{"args":["cat","/home/erin"]}` {
		t.Errorf("%v %v", details, err)
	}
	proof, err := tr.Prove(ctx, 2)
	if err != nil || !strings.Contains(proof.Event, `"action":"port:serve"`) {
		t.Errorf("%v %v", proof, err)
	}

	// A clean stop, and one that is not.
	tr.close()
	tr.open()
	boots := tr.all("type=log.boot")
	if got := boots[1]["log"].(map[string]any); got["clean"] != true || got["missing"] != nil || boots[1]["epoch"] != 2.0 {
		t.Errorf("%v", boots[1])
	}
}

func TestReceipt(t *testing.T) {
	tr := newTrail(t)
	ctx := t.Context()
	denied := serve
	denied.Decision.Effect = "deny"
	d, err := tr.Append(ctx, denied)
	if err != nil {
		t.Fatal(err)
	}
	r, err := tr.Append(ctx, serve)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name     string
		receipt  audit.Receipt
		action   string
		resource audit.Entity
		want     airlock.Code
	}{
		{"none", audit.Receipt{}, "port:serve", port, airlock.Internal},
		{"denied", d, "port:serve", port, airlock.Denied},
		{"another act", r, "net:connect", port, airlock.Internal},
		{"another port", r, "port:serve", audit.Entity{Type: "Port", ID: "22"}, airlock.Internal},
		{"this", r, "port:serve", port, ""},
		{"twice", r, "port:serve", port, airlock.Internal},
	} {
		if err := c.receipt.Spend(c.action, c.resource); err != nil && airlock.CodeOf(err) != c.want || err == nil && c.want != "" {
			t.Errorf("%s: %v, want %q", c.name, err, c.want)
		}
	}
}

// TestUncleanStop: a process that is killed leaves its files as they are.
func TestUncleanStop(t *testing.T) {
	tr := newTrail(t)
	if _, err := tr.Append(t.Context(), serve); err != nil {
		t.Fatal(err)
	}
	tr.all("")
	killed := tr.dir + "/killed"
	for err := os.ErrNotExist; err != nil; { // a file may go while it is copied
		os.RemoveAll(killed)
		if err = os.CopyFS(killed, os.DirFS(tr.cfg.Dir)); err != nil && !errors.Is(err, os.ErrNotExist) {
			t.Fatal(err)
		}
	}
	tr.close()
	tr.cfg.Dir = killed
	tr.open()
	boot := tr.all("type=log.boot")[1]
	missing := boot["log"].(map[string]any)["missing"].(map[string]any)
	if fmt.Sprint(missing["most"], missing["types"]) != "8192 [sandbox.* exec.* file.* port.end key.end secret.end subject.erased log.gap]" {
		t.Errorf("%v", boot)
	}
	if got, want := types(tr.all("")), "0 log.open, 1 log.boot, 2 port.serve, 3 log.boot"; got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
}

func TestHostileEvent(t *testing.T) {
	tr := newTrail(t)
	big := strings.Repeat("x", 10<<20)
	for name, e := range map[string]audit.Event{
		"newline and escapes": {Type: "exec.start", Sandbox: "i\n\x1b[31m\x00\u202e\u009b", Source: audit.Guest},
		"invalid UTF-8":       {Type: "exec.start", Sandbox: "i\xff\xfe", Outcome: audit.Outcome{Status: "ok", Message: "\xc3\x28"}},
		"long":                {Type: "exec.start", Sandbox: big, Team: big, Outcome: audit.Outcome{Status: "error", Message: big}, Call: audit.Call{Action: big, Context: map[string]any{big: big, "args": []string{big, big}}}},
		"many": {Type: "exec.start", Call: audit.Call{Action: "exec:start", Context: func() map[string]any {
			m := map[string]any{}
			for i := range 10_000 {
				m[fmt.Sprint(i, strings.Repeat("\x01", 300))] = strings.Repeat("\x02", 2000)
			}
			return m
		}()}},
		"long detail": {Type: "exec.start", Private: []audit.Private{{Subject: "team:a", Detail: big}}},
		"conditions": {Type: "exec.start", Decision: audit.Decision{Effect: "permit", Obligations: func() (all []audit.Obligation) {
			for range 100 {
				all = append(all, audit.Obligation{Kind: "mask", Value: strings.Repeat("\x03", 40_000)})
			}
			return all
		}()}},
		"odd words": {Type: "exec.start", Source: "nobody", Outcome: audit.Outcome{Status: "strange"}, Decision: audit.Decision{Effect: "perhaps"}},
		"it lies":   {Type: "exec.start", Sandbox: `","type":"log.open","x":"`, Call: audit.Call{Action: "x", Context: map[string]any{"a": 1, "type": "log.open", "z": 2}}},
	} {
		seq, err := tr.Queue(t.Context(), e)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		tr.all("")
		event, err := tr.Event(t.Context(), seq)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if len(event) > audit.MaxEvent || !json.Valid(event) {
			t.Errorf("%s: %d bytes: %.200s", name, len(event), event)
		}
		for _, r := range string(event) {
			if r < ' ' || r >= 0x7f && r < 0xa0 || r == 0x202e || r == 0xfffd && name == "long" {
				t.Errorf("%s: it has the character %U", name, r)
				break
			}
		}
	}
	if len(tr.Shards()) != 1 {
		t.Error("an event began a shard")
	}
}

func TestBudget(t *testing.T) {
	tr := newTrail(t)
	tr.close()
	tr.cfg.Budget = 5
	tr.open()
	act := audit.Event{Type: "exec.start", Sandbox: "i1"}
	for range 3 {
		if _, err := tr.Queue(t.Context(), act); err != nil {
			t.Fatal(err)
		}
	}
	tr.close() // what was spent is known to the next server
	tr.open()
	for range 2 {
		if _, err := tr.Append(t.Context(), act); err != nil {
			t.Fatal(err)
		}
	}
	seq := uint64(2)
	visit := serve
	visit.Sandbox = "i1"
	for range 5 { // visitors spend nothing of their host's
		if _, err := tr.Append(t.Context(), visit); err != nil {
			t.Fatal(err)
		}
	}
	for i, e := range []audit.Event{act, visit, act, visit, {Type: "sandbox.kill", Decision: audit.Decision{Effect: "deny"}}} { // what is refused is told once
		e.Sandbox = "i1"
		if _, err := tr.Append(t.Context(), e); airlock.CodeOf(err) != airlock.Exhausted || !strings.Contains(err.Error(), "5 audit events") {
			t.Errorf("%d: %v", i, err)
		}
	}
	for _, e := range []audit.Event{{Type: "exec.end", Sandbox: "i1", Of: &seq}, {Type: "sandbox.kill", Sandbox: "i1", Decision: audit.Decision{Effect: audit.Permit}}, {Type: "exec.start", Sandbox: "i2"}, {Type: "sandbox.end", Sandbox: "i1"}} {
		if _, err := tr.Queue(t.Context(), e); err != nil {
			t.Errorf("%s: %v", e.Type, err)
		}
	}
	tr.close()
	tr.open()
	if got := tr.all("type=sandbox.budget status=denied"); len(got) != 2 {
		t.Errorf("%v", got)
	}
}

func TestClockGoesBack(t *testing.T) {
	tr := newTrail(t)
	tr.close()
	now := time.Now()
	tr.cfg.Now = func() time.Time { return now }
	tr.open()
	now = now.Add(-time.Hour)
	if _, err := tr.Append(t.Context(), serve); err != nil {
		t.Fatal(err)
	}
	clock := tr.all("type=log.clock")
	if len(clock) != 1 || !strings.Contains(fmt.Sprint(clock[0]["outcome"]), "the clock went back by 1h0m0s") {
		t.Errorf("%v", clock)
	}
	if got := len(tr.all("type=port.serve")); got != 1 {
		t.Errorf("%d events", got)
	}
}

// Who asks for a rotation and leaves does not leave the acts of all waiting.
func TestRotationOutlivesItsCaller(t *testing.T) {
	tr := newTrail(t)
	first := tr.Shard()
	gone, leave := context.WithCancel(t.Context())
	leave()
	if err := tr.Rotate(gone, audit.Actor{Kind: "operator", ID: "local"}); err != nil {
		t.Errorf("rotate: %v", err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	if _, err := tr.Append(ctx, serve); err != nil {
		t.Fatalf("append after that: %v", err)
	}
	if got, want := tr.Shard(), first+".2"; got != want {
		t.Errorf("the shard is %s, not %s", got, want)
	}
}

func TestRotation(t *testing.T) {
	tr := newTrail(t)
	ctx := t.Context()
	first := tr.Shard()
	// meanwhile does something while four writers append.
	meanwhile := func(do func()) {
		stop := make(chan struct{})
		var wg sync.WaitGroup
		for range 4 {
			wg.Go(func() {
				for {
					select {
					case <-stop:
						return
					default:
					}
					if _, err := tr.Append(ctx, serve); err != nil {
						t.Error(err)
						return
					}
				}
			})
		}
		do()
		close(stop)
		wg.Wait()
	}
	meanwhile(func() {
		for range 2 {
			if err := tr.Rotate(ctx, audit.Actor{Kind: "operator", ID: "local"}); err != nil {
				t.Error(err)
			}
		}
	})
	if got, want := tr.Shard(), first+".3"; got != want {
		t.Errorf("the shard is %s, not %s", got, want)
	}
	tr.all("")
	shards := tr.Shards()
	if len(shards) != 3 || !shards[0].Closed || shards[1].First != shards[0].First+shards[0].Size {
		t.Fatalf("%+v", shards)
	}
	opens := tr.all("type=log.open,log.close")
	if got, want := fmt.Sprint(opens[0]["type"], opens[1]["type"], opens[2]["type"], opens[3]["type"], opens[4]["type"]), "log.openlog.closelog.openlog.closelog.open"; got != want {
		t.Errorf("%s", got)
	}

	// What a hold forbids, and what retention does.
	by := audit.Actor{Kind: "operator", ID: "local"}
	if _, err := tr.SetHold(ctx, by, audit.Hold{Name: "case-7", Reason: "a claim", Until: time.Now().Add(time.Hour)}); err != nil {
		t.Fatal(err)
	}
	if err := tr.Drop(ctx, by, first); airlock.CodeOf(err) != airlock.Denied {
		t.Errorf("a held shard was dropped: %v", err)
	}
	if _, err := tr.SetHold(ctx, by, audit.Hold{Name: "case-7", Reason: "a claim", Until: time.Now().Add(time.Minute)}); airlock.CodeOf(err) != airlock.Conflict {
		t.Errorf("a hold was made shorter: %v", err)
	}
	if err := tr.ReleaseHold(ctx, by, "case-7"); err != nil {
		t.Fatal(err)
	}
	if err := tr.Drop(ctx, by, shards[1].ID); airlock.CodeOf(err) != airlock.Invalid {
		t.Errorf("a shard in the middle was dropped: %v", err)
	}
	if err := tr.Drop(ctx, by, first); err != nil {
		t.Fatal(err)
	}
	if _, err := tr.Event(ctx, 1); airlock.CodeOf(err) != airlock.NotFound {
		t.Errorf("event 1: %v", err)
	}
	if got := tr.all("type=retention.drop"); len(got) != 1 {
		t.Errorf("%v", got)
	}
	// The part that says so goes too; a later one says both.
	if err := tr.Rotate(ctx, by); err != nil {
		t.Fatal(err)
	}
	meanwhile(func() {
		for _, s := range shards[1:] {
			if err := tr.Drop(ctx, by, s.ID); err != nil {
				t.Error(err)
			}
		}
	})
	tr.close()
	tr.open() // and all of that is so for the next server
	got := tr.Shards()
	if len(got) != 4 || !got[0].Dropped || !got[2].Dropped || got[3].Dropped {
		t.Errorf("%+v", got)
	}
	if _, err := tr.Prove(ctx, got[3].First); err != nil {
		t.Error(err)
	}
	r, err := audit.Verify(ctx, tr.cfg.Dir, audit.VerifyOptions{VKeys: []string{tr.Shards()[3].VKey}})
	if err != nil || !r.OK {
		t.Errorf("%+v %v", r, err)
	}
}

func TestErase(t *testing.T) {
	tr := newTrail(t)
	ctx := t.Context()
	by := audit.Actor{Kind: "operator", ID: "local"}
	if _, err := tr.Erase(ctx, by, "customer:42"); airlock.CodeOf(err) != airlock.NotFound {
		t.Errorf("%v", err)
	}
	seq, err := tr.Queue(ctx, audit.Event{Type: "exec.start", Private: []audit.Private{{Subject: "customer:42", Detail: "Erin"}, {Subject: "customer:43", Detail: "Finn"}}})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := tr.Erase(ctx, by, "customer:42"); err != nil {
		t.Fatal(err)
	}
	tr.all("")
	event, err := tr.Event(ctx, seq)
	if err != nil {
		t.Fatal(err)
	}
	details, err := tr.Details(ctx, event)
	if err != nil || !details[0].Erased || string(details[1].Detail) != `"Finn"` {
		t.Errorf("%+v %v", details, err)
	}
	if got, want := types(tr.all("type=subject.*")), "3 subject.erase, 4 subject.erased"; got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
}

// TestDamageFound: parts that do not fit each other are found when the log is
// opened, and the trail tells of them if one goes on.
func TestDamageFound(t *testing.T) {
	older := func(t *testing.T, tr *trail, part string) {
		t.Helper()
		if err := os.RemoveAll(filepath.Join(tr.cfg.Dir, part)); err != nil {
			t.Fatal(err)
		}
		if err := os.CopyFS(filepath.Join(tr.cfg.Dir, part), os.DirFS(filepath.Join(tr.dir, "older", part))); err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range []struct {
		name   string
		damage func(*testing.T, *trail)
		want   string
	}{
		{"an older WAL", func(t *testing.T, tr *trail) { older(t, tr, "wal") }, "an older copy of it was put back"},
		{"no WAL", func(t *testing.T, tr *trail) { os.RemoveAll(filepath.Join(tr.cfg.Dir, "wal")) }, "the write-ahead log is absent"},
		{"a flipped bit in the WAL", func(t *testing.T, tr *trail) {
			files, _ := filepath.Glob(filepath.Join(tr.cfg.Dir, "wal", "*"))
			for _, f := range files {
				b, err := os.ReadFile(f)
				if err != nil {
					t.Fatal(err)
				}
				if i := bytes.Index(b, []byte(`"port:serve"`)); i > 0 {
					b[i+3] ^= 1
					if err := os.WriteFile(f, b, 0o600); err != nil {
						t.Fatal(err)
					}
					return
				}
			}
			t.Fatal("no event in the WAL")
		}, "altered"},
		{"other newest events", func(t *testing.T, tr *trail) {
			files, _ := filepath.Glob(filepath.Join(tr.cfg.Dir, "log", "*", "tile", "entries", "000.p", "*"))
			for _, f := range files {
				b, err := os.ReadFile(f)
				if err != nil {
					t.Fatal(err)
				}
				if err := os.WriteFile(f, bytes.ReplaceAll(b, []byte("public"), []byte("nobody")), 0o600); err != nil {
					t.Fatal(err)
				}
			}
		}, "is not the one that belongs there"},
	} {
		t.Run(c.name, func(t *testing.T) {
			tr := newTrail(t)
			for i := range 20 {
				if i == 10 {
					tr.close()
					if err := os.CopyFS(filepath.Join(tr.dir, "older"), os.DirFS(tr.cfg.Dir)); err != nil {
						t.Fatal(err)
					}
					tr.open()
				}
				if _, err := tr.Append(t.Context(), serve); err != nil {
					t.Fatal(err)
				}
			}
			tr.close()
			c.damage(t, tr)
			log, err := audit.Open(t.Context(), tr.cfg)
			if err == nil {
				log.Close(t.Context())
				t.Fatal("it was not found")
			}
			if airlock.CodeOf(err) != airlock.Conflict || !strings.Contains(err.Error(), c.want) {
				t.Fatalf("%v", err)
			}
			if tr.cfg.AcceptDamage = true; c.name == "other newest events" {
				return // no tree can go on behind others than were signed
			}
			tr.open()
			boots := tr.all("type=log.boot")
			if part := boots[len(boots)-1]["log"].(map[string]any); !strings.Contains(fmt.Sprint(part["damage"]), c.want) {
				t.Errorf("%v", part)
			}
		})
	}
}

func TestIndexRebuilt(t *testing.T) {
	tr := newTrail(t)
	for range 10 {
		if _, err := tr.Append(t.Context(), serve); err != nil {
			t.Fatal(err)
		}
	}
	tr.close()
	for _, f := range []string{"index.db", "index.db-wal", "index.db-shm"} {
		os.Remove(filepath.Join(tr.cfg.Dir, f))
	}
	tr.open()
	if got := len(tr.all("action=port:serve team=acme")); got != 10 {
		t.Errorf("%d events", got)
	}
}

func TestFollow(t *testing.T) {
	tr := newTrail(t)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	got := make(chan string, 10)
	q, err := index.ParseQuery("type=exec.*", time.Now())
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() {
		done <- tr.Follow(ctx, q, 0, func(e json.RawMessage) error {
			var x struct{ Sandbox string }
			err := json.Unmarshal(e, &x)
			got <- x.Sandbox
			return err
		})
	}()
	for i := range 5 {
		want := fmt.Sprint("i", i)
		if _, err := tr.Queue(ctx, audit.Event{Type: "exec.start", Sandbox: want}); err != nil {
			t.Fatal(err)
		}
		if s := <-got; s != want {
			t.Errorf("got %s, want %s", s, want)
		}
	}
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

func FuzzOCSF(f *testing.F) {
	f.Add([]byte(`{"v":1,"seq":2,"id":"x","time":"2026-12-02T10:00:00.000000000Z","epoch":1,"type":"port.serve","source":"host","actor":{"kind":"user"},"call":{"principal":{"type":"Sandbox","id":"i1"},"action":"port:serve","resource":{"type":"Port","id":"8080"}},"decision":{"effect":"permit"}}`))
	f.Fuzz(func(t *testing.T, event []byte) {
		line, err := audit.OCSF(event)
		if err == nil && (!json.Valid(line) || bytes.ContainsAny(line, "\n\x1b")) {
			t.Errorf("%q becomes %q", event, line)
		}
	})
}

// TestDropKeepsTheIndex: the index begins anew at a drop, also while the event
// that tells of it is being taken in.
func TestDropKeepsTheIndex(t *testing.T) {
	tr := newTrail(t)
	ctx := t.Context()
	by := audit.Actor{Kind: "operator", ID: "local"}
	for range 20 {
		dropped := tr.Shard()
		if err := tr.Rotate(ctx, by); err != nil {
			t.Fatal(err)
		}
		if err := tr.Drop(ctx, by, dropped); err != nil {
			t.Fatal(err)
		}
		if got := tr.all(""); got[0]["type"] != "log.open" || !strings.HasPrefix(types(got[len(got)-1:]), fmt.Sprint(got[len(got)-1]["seq"], " retention.drop")) {
			t.Fatalf("%s", types(got))
		}
		if first := tr.Shards(); tr.all("type=log.open")[0]["seq"] != float64(first[len(first)-1].First) {
			t.Fatal("the index does not know the first event")
		}
	}
	tr.close()
	tr.open()
	r, err := audit.Verify(ctx, tr.cfg.Dir, audit.VerifyOptions{VKeys: []string{tr.Shards()[len(tr.Shards())-1].VKey}})
	if err != nil || !r.OK {
		t.Errorf("%+v %v", r, err)
	}
}

// TestRotationNeedsItsWitness: while a witness does not answer, no part of the
// log is closed, since what comes next would have to wait for it.
func TestRotationNeedsItsWitness(t *testing.T) {
	tr := newTrail(t)
	ctx := t.Context()
	shard := tr.Shard()
	tr.all("")
	v, err := note.NewVerifier(tr.Shards()[0].VKey)
	if err != nil {
		t.Fatal(err)
	}
	tr.close()
	w := witnesstest.Start(t, v)
	tr.cfg.Witnesses = w.Policy
	tr.open()
	tr.all("")
	w.Stop()
	short, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	if err := tr.Rotate(short, audit.Actor{Kind: "operator", ID: "local"}); airlock.CodeOf(err) != airlock.Unavailable || !strings.Contains(err.Error(), "the shard cannot be closed now") {
		t.Errorf("%v", err)
	}
	if _, err := tr.Append(ctx, serve); err != nil {
		t.Errorf("an act: %v", err)
	}
	if got := tr.Shard(); got != shard {
		t.Errorf("the shard is %s", got)
	}
	closing, cancel := context.WithTimeout(ctx, time.Second) // its last checkpoint stays open
	defer cancel()
	tr.Log.Close(closing)
	tr.Log = nil
}

// TestVerifyReportsDamage: what the index cannot be compared with is a finding,
// and no reason to keep silent about the others.
func TestVerifyReportsDamage(t *testing.T) {
	tr := newTrail(t)
	for range 10 {
		if _, err := tr.Append(t.Context(), serve); err != nil {
			t.Fatal(err)
		}
	}
	tr.close()
	bundles, err := filepath.Glob(filepath.Join(tr.cfg.Dir, "log/*/tile/entries/000.p/*"))
	if err != nil || len(bundles) == 0 {
		t.Fatalf("%q %v", bundles, err)
	}
	for _, b := range bundles {
		if err := os.Truncate(b, 50); err != nil {
			t.Fatal(err)
		}
	}
	r, err := audit.Verify(t.Context(), tr.cfg.Dir, audit.VerifyOptions{})
	if err != nil || r.OK || len(r.Problems) == 0 || !slices.Contains(r.Index, "it was not compared with all of the log, which is damaged") {
		t.Errorf("%+v %v", r, err)
	}
}
