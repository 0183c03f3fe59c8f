package control_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"airlock.dev/airlock"
	"airlock.dev/airlock/audit"
	"airlock.dev/airlock/audit/audittest"
	"airlock.dev/airlock/audit/index"
	"airlock.dev/airlock/control"
	"airlock.dev/airlock/policy"
)

// operator is one with a directory of policies and a server's data.
type operator struct {
	t         *testing.T
	trail     *audit.Log
	dir, kept string
	log       bytes.Buffer
}

func newOperator(t *testing.T) *operator {
	o := &operator{t: t, dir: t.TempDir(), kept: filepath.Join(t.TempDir(), "policies.last")}
	o.trail, _ = audittest.Open(t)
	return o
}

func (o *operator) write(name, text string) {
	o.t.Helper()
	path := filepath.Join(o.dir, name)
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		o.t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		o.t.Fatal(err)
	}
}

func (o *operator) start(dir string) *control.Policies {
	o.t.Helper()
	o.log.Reset()
	p, err := control.OpenPolicies(o.t.Context(), dir, o.kept, o.trail, slog.New(slog.NewTextHandler(&o.log, nil)))
	if err != nil {
		o.t.Fatal(err)
	}
	return p
}

type loadEvent struct {
	Actor   audit.Actor
	Call    audit.Call
	Outcome audit.Outcome
	Clipped bool
}

// loads returns the events that say what came into force.
func (o *operator) loads() (all []loadEvent) {
	o.t.Helper()
	q, err := index.ParseQuery("type=policy.load", time.Now())
	if err != nil {
		o.t.Fatal(err)
	}
	for s := o.trail.Status(); s.Pending > 0 || s.Indexed < s.Durable; s = o.trail.Status() {
		time.Sleep(time.Millisecond)
	}
	page, err := o.trail.Find(o.t.Context(), q, index.Page{Limit: audit.MaxPage})
	if err != nil {
		o.t.Fatal(err)
	}
	for _, raw := range page.Events {
		var e loadEvent
		if err := json.Unmarshal(raw, &e); err != nil {
			o.t.Fatal(err)
		}
		all = append(all, e)
	}
	return all
}

func nothing(id string) string {
	return fmt.Sprintf("@id(%q) forbid (principal, action, resource);", id)
}

var admin = audit.Actor{Kind: "operator", ID: "k1", Role: airlock.Operator}

// TestTrailSaysWhatCameIntoForce: one event at each start and reload, with
// what sha256sum says of the files and what decisions say of the sets.
func TestTrailSaysWhatCameIntoForce(t *testing.T) {
	o := newOperator(t)
	o.write("all.cedar", nothing("none"))
	o.write("teams/a.cedar", nothing("a"))
	p := o.start(o.dir)
	first := p.InForce()
	changes := 0
	p.OnChange(func(context.Context) { changes++ })
	o.write("default.cedar", "permit")
	if err := p.Reload(t.Context(), admin); airlock.CodeOf(err) != airlock.Invalid || changes != 0 {
		t.Fatal(err, changes)
	}
	o.start(o.dir)
	if !strings.Contains(o.log.String(), "does not load") {
		t.Error(o.log.String())
	}
	o.write("default.cedar", nothing("b"))
	if err := p.Reload(t.Context(), admin); err != nil {
		t.Fatal(err)
	}
	second := p.InForce()
	if changes != 1 {
		t.Errorf("%d changes are told", changes)
	}
	o.start("")
	if !strings.Contains(o.log.String(), "level=WARN") || !strings.Contains(o.log.String(), "without the policies that were in force before") {
		t.Errorf("the log does not warn: %s", o.log.String())
	}

	const (
		allSum     = "1fd6c0b3b5ae693bfe5c2c9e52a95c0554fe718a3baabc6c8aa372801f6329f3  all.cedar"
		aSum       = "552a99255e642487ce72a396dcca406890f241b57021941200d83b6b91c1ea6a  teams/a.cedar"
		defaultSum = "453e18df47b6dafef1463f824d5105442f381a4af988a6090b9d329268e9d0e4  default.cedar"
	)
	ceiling := func(f control.InForce, team string) string {
		return f.For(team).Digest() + "  " + f.For(team).Name()
	}
	before := map[string]any{"source": "directory", "directory": o.dir, "teams": 1.0, "files": []any{allSum, aSum}, "ceilings": []any{ceiling(first, ""), ceiling(first, "a")}}
	kept := map[string]any{"source": "kept copy", "directory": o.dir, "teams": 1.0, "files": before["files"], "ceilings": before["ceilings"]}
	after := map[string]any{"source": "directory", "directory": o.dir, "teams": 1.0, "files": []any{allSum, defaultSum, aSum}, "ceilings": []any{ceiling(second, ""), ceiling(second, "a")}}
	call := func(principal audit.Entity, digest string, has map[string]any) audit.Call {
		return audit.Call{Principal: principal, Action: "policy:load", Resource: audit.Entity{Type: "Policies", ID: digest}, Context: has}
	}
	refused := audit.Outcome{Status: "error", Code: "invalid_argument", Message: "default.cedar:1:7: this is not Cedar's language: the text ends where `(` is expected: a policy is @id(\"…\") permit or forbid (principal, action, resource) when { … } unless { … };"}
	system, builtin := audit.Actor{Kind: "system"}, policy.Builtin().Digest()
	want := []loadEvent{
		{Actor: system, Call: call(audit.Entity{Type: "System"}, first.Digest(), before), Outcome: audit.Outcome{Status: "ok", Message: "in force: directory"}},
		{Actor: admin, Call: call(audit.Entity{Type: "User", ID: "k1"}, first.Digest(), before), Outcome: refused},
		{Actor: system, Call: call(audit.Entity{Type: "System"}, first.Digest(), kept), Outcome: refused},
		{Actor: admin, Call: call(audit.Entity{Type: "User", ID: "k1"}, second.Digest(), after), Outcome: audit.Outcome{Status: "ok", Message: "in force: directory"}},
		{Actor: system, Call: call(audit.Entity{Type: "System"}, builtin, map[string]any{"source": "built in", "teams": 0.0, "ceilings": []any{builtin + "  profile internet"}}),
			Outcome: audit.Outcome{Status: "ok", Message: "built in: internet for every team; a directory was in force before"}},
	}
	if diff := cmp.Diff(want, o.loads()); diff != "" {
		t.Error(diff)
	}
	if first.Digest() == second.Digest() {
		t.Error("other files have the same digest")
	}
}

// TestBuiltInIsRecorded: so is a server that never had a directory, without a
// warning.
func TestBuiltInIsRecorded(t *testing.T) {
	o := newOperator(t)
	p := o.start("")
	if got := o.loads(); len(got) != 1 || got[0].Outcome.Message != "built in: internet for every team" {
		t.Errorf("%+v", got)
	}
	if o.log.Len() > 0 {
		t.Error(o.log.String())
	}
	if err := p.Reload(t.Context(), admin); airlock.CodeOf(err) != airlock.Conflict {
		t.Error(err)
	}
}

// TestManyTeamsFitIntoAnEvent: the teams are then a digest of their list.
func TestManyTeamsFitIntoAnEvent(t *testing.T) {
	o := newOperator(t)
	o.write("all.cedar", nothing("none"))
	for i := range 300 {
		o.write(fmt.Sprintf("teams/%s%03d.cedar", strings.Repeat("t", 36), i), nothing("a"))
	}
	p := o.start(o.dir)
	o.write("teams/one-more.cedar", nothing("a"))
	if err := p.Reload(t.Context(), admin); err != nil {
		t.Fatal(err)
	}
	got := o.loads()
	if len(got) != 2 || got[0].Clipped {
		t.Fatalf("%+v", got)
	}
	for i, teams := range []float64{300, 301} {
		c := got[i].Call.Context
		if c["teams"] != teams || len(c["files"].([]any)) != 1 || len(c["ceilings"].([]any)) != 1 {
			t.Errorf("%v", c)
		}
	}
	for _, list := range []string{"filesDigest", "ceilingsDigest"} {
		if a, b := got[0].Call.Context[list], got[1].Call.Context[list]; a == nil || a == b {
			t.Errorf("%s: %v, then %v", list, a, b)
		}
	}
}

// TestWhatCannotBeRecordedDoesNotCount: neither at a start nor at a reload.
func TestWhatCannotBeRecordedDoesNotCount(t *testing.T) {
	o := newOperator(t)
	o.write("default.cedar", nothing("a"))
	trail := &fillable{Trail: o.trail}
	p, err := control.OpenPolicies(t.Context(), o.dir, o.kept, trail, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	trail.full = true
	before := p.InForce().Digest()
	o.write("default.cedar", nothing("b"))
	if err := p.Reload(t.Context(), admin); airlock.CodeOf(err) != airlock.Unavailable || p.InForce().Digest() != before {
		t.Errorf("%v", err)
	}
	for _, dir := range []string{"", o.dir} {
		if _, err := control.OpenPolicies(t.Context(), dir, o.kept, trail, slog.New(slog.DiscardHandler)); airlock.CodeOf(err) != airlock.Unavailable {
			t.Errorf("%q: %v", dir, err)
		}
	}
}

// fillable is a trail whose disk can be full.
type fillable struct {
	control.Trail
	full bool
}

func (f *fillable) Append(ctx context.Context, e audit.Event) (audit.Receipt, error) {
	if f.full {
		return audit.Receipt{}, errFull
	}
	return f.Trail.Append(ctx, e)
}

// TestPoliciesOfAVolume: links that Kubernetes makes are followed, at a start
// and at a reload, and what Load does not read holds up neither.
func TestPoliciesOfAVolume(t *testing.T) {
	o := newOperator(t)
	for _, version := range []string{"1", "2"} {
		o.write("..v"+version+"/all.cedar", nothing("all-"+version))
		o.write("..v"+version+"/teams/a.cedar", nothing("a-"+version))
	}
	o.write(".git/config", "x")
	for _, name := range []string{".git/fifo", "notes.txt"} {
		if err := unix.Mkfifo(filepath.Join(o.dir, name), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	link := func(to, name string) {
		t.Helper()
		if err := os.Symlink(to, filepath.Join(o.dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	link("..v1", "..data")
	link("..data/all.cedar", "all.cedar")
	link("..data/teams", "teams")
	holds := func(p *control.Policies, source, want string) {
		t.Helper()
		if got := p.InForce().Source + ": " + strings.Join(p.Current().For("a").IDs(), " "); got != source+": "+want {
			t.Errorf("%s", got)
		}
	}
	p := o.start(o.dir)
	holds(p, "directory", "a-1 all-1")
	link("..v2", "..next")
	if err := os.Rename(filepath.Join(o.dir, "..next"), filepath.Join(o.dir, "..data")); err != nil {
		t.Fatal(err)
	}
	if err := p.Reload(t.Context(), admin); err != nil {
		t.Fatal(err)
	}
	holds(p, "directory", "a-2 all-2")
	if err := os.Remove(filepath.Join(o.dir, "..data")); err != nil {
		t.Fatal(err)
	}
	holds(o.start(o.dir), "kept copy", "a-2 all-2")
}
