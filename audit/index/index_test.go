package index_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"sort"
	"strings"
	"testing"
	"time"

	"airlock.dev/airlock"
	"airlock.dev/airlock/audit/index"
	"github.com/google/go-cmp/cmp"
)

// events are a small history: two executions of two teams, and what is around.
var events = []index.Row{
	{Seq: 0, Time: noon, Type: "log.open", Source: "host"},
	{Seq: 1, Time: noon.Add(1 * time.Second), Type: "sandbox.create", Source: "host", Team: "red", Sandbox: "i1", Actor: "key1", Action: "sandbox:create", Effect: "permit"},
	{Seq: 2, Time: noon.Add(2 * time.Second), Type: "sandbox.create", Source: "host", Team: "red", Sandbox: "i1", Status: "ok", Of: 1},
	{Seq: 3, Time: noon.Add(3 * time.Second), Type: "exec.start", Source: "host", Team: "red", Sandbox: "i1", Execution: "x1", App: "billing", Actor: "key1", Action: "exec:start", Effect: "permit"},
	{Seq: 4, Time: noon.Add(4 * time.Second), Type: "exec.output", Source: "guest", Team: "red", Sandbox: "i1", Execution: "x1", App: "billing"},
	{Seq: 5, Time: noon.Add(9 * time.Second), Type: "http.request", Source: "host", Team: "red", Sandbox: "i1", Execution: "x1", App: "billing", Action: "http:request", Resource: "Host:pypi.org", Effect: "deny", Status: "denied"},
	{Seq: 6, Time: noon.Add(5 * time.Second), Type: "exec.start", Source: "host", Team: "blue", Sandbox: "i2", Execution: "x2", Actor: "key2", Action: "exec:start", Effect: "hold", Subjects: []string{"p2", "p1", "p2"}},
	{Seq: 7, Time: noon.Add(6 * time.Second), Type: "exec.start", Source: "host", Team: "blue", Sandbox: "i2", Execution: "x2", Status: "error", Of: 6, Subjects: []string{"p1"}},
}

func open(t testing.TB, path string) *index.Index {
	t.Helper()
	x, err := index.Open(context.Background(), path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { x.Close() })
	return x
}

func add(t testing.TB, x *index.Index, rows []index.Row) {
	t.Helper()
	if err := x.Add(context.Background(), rows); err != nil {
		t.Fatal(err)
	}
}

// small returns an index of events, and where it is.
func small(t testing.TB) (x *index.Index, path string) {
	t.Helper()
	path = filepath.Join(t.TempDir(), "index.db")
	x = open(t, path)
	add(t, x, events)
	return x, path
}

// log is what Check asks for rows.
func log(rows []index.Row) func(context.Context, uint64, int) ([]index.Row, error) {
	return func(_ context.Context, from uint64, most int) ([]index.Row, error) {
		i := sort.Search(len(rows), func(i int) bool { return rows[i].Seq >= from })
		return rows[i:min(i+most, len(rows))], nil
	}
}

func check(t testing.TB, x *index.Index, rows []index.Row) index.Report {
	t.Helper()
	report, err := x.Check(context.Background(), math.MaxUint64, log(rows))
	if err != nil {
		t.Fatal(err)
	}
	return report
}

func TestFind(t *testing.T) {
	x, path := small(t)
	for _, test := range []struct {
		query string
		want  []uint64
	}{
		{"", []uint64{0, 1, 2, 3, 4, 5, 6, 7}},
		{"team=red", []uint64{1, 2, 3, 4, 5}},
		{"team!=red", []uint64{0, 6, 7}},
		{`team=""`, []uint64{0}},
		{`team!=""`, []uint64{1, 2, 3, 4, 5, 6, 7}},
		{`team="",blue`, []uint64{0, 6, 7}},
		{`team!="",blue`, []uint64{1, 2, 3, 4, 5}},
		{"team=green", []uint64{}},
		{"team!=green", []uint64{0, 1, 2, 3, 4, 5, 6, 7}},
		{"team=i1", []uint64{}}, // a sandbox has that name
		{"sandbox=i2", []uint64{6, 7}},
		{"sandbox=i2,i1", []uint64{1, 2, 3, 4, 5, 6, 7}},
		{"execution=x1", []uint64{3, 4, 5}},
		{"execution=x1 type=exec.start", []uint64{3}},
		{"execution!=x1 type=exec.start", []uint64{6, 7}},
		{"app=billing source=guest", []uint64{4}},
		{"actor=key1", []uint64{1, 3}},
		{"type=exec.start", []uint64{3, 6, 7}},
		{"type=exec.*", []uint64{3, 4, 6, 7}},
		{"type!=exec.*", []uint64{0, 1, 2, 5}},
		{"type=exec.*,log.open", []uint64{0, 3, 4, 6, 7}},
		{"type=*", []uint64{0, 1, 2, 3, 4, 5, 6, 7}},
		{"action=*", []uint64{1, 3, 5, 6}},
		{"action!=*", []uint64{0, 2, 4, 7}},
		{"action=sandbox:create,http:*", []uint64{1, 5}},
		{"resource=Host:pypi.org", []uint64{5}},
		{`resource="Host:*"`, []uint64{}}, // a * is only special in type and action
		{"effect=deny", []uint64{5}},
		{"effect=deny,hold", []uint64{5, 6}},
		{"effect=permit", []uint64{1, 3}},
		{"effect=permit,deny", []uint64{1, 3, 5}},
		{"effect!=permit", []uint64{0, 2, 4, 5, 6, 7}},
		{`effect=deny,""`, []uint64{0, 2, 4, 5, 7}},
		{"status=ok", []uint64{2}},
		{"status=error,denied", []uint64{5, 7}},
		{"source=guest", []uint64{4}},
		{"of=1", []uint64{2}},
		{"of=1,6", []uint64{2, 7}},
		{`of=""`, []uint64{0, 1, 3, 4, 5, 6}},
		{"subject=p1", []uint64{6, 7}},
		{"subject=p2", []uint64{6}},
		{"subject=p1,p2", []uint64{6, 7}},
		{"subject!=p2", []uint64{0, 1, 2, 3, 4, 5, 7}},
		{"subject=p1 execution=x2 status=error", []uint64{7}},
		{`subject=""`, []uint64{0, 1, 2, 3, 4, 5}},
		{`subject!=""`, []uint64{6, 7}},
		{`subject="",p2`, []uint64{0, 1, 2, 3, 4, 5, 6}},
		{"subject=red", []uint64{}},
		{"seq>=6", []uint64{6, 7}},
		{"seq>=2 seq<4 team=red", []uint64{2, 3}},
		{"seq=5", []uint64{5}},
		{"since=2026-12-02T12:00:05Z", []uint64{5, 6, 7}},
		{"until=2026-12-02T12:00:05Z", []uint64{0, 1, 2, 3, 4}},
		{"since=2026-12-02T12:00:05Z until=2026-12-02T12:00:06Z", []uint64{6}},
		{"since=2026-12-03", []uint64{}},
		{"until=2026-12-02", []uint64{}},
		{"type=exec.start since=2026-12-02T12:00:04Z", []uint64{6, 7}},
		{"team=red sandbox=i1 execution=x1 app=billing type=http.* action=http:request resource=Host:pypi.org effect=deny status=denied source=host subject!=p1 of!=1 since=2026-12-02 until=2026-12-03 seq>0 seq<100", []uint64{5}},
	} {
		q, err := index.ParseQuery(test.query, noon)
		if err != nil {
			t.Fatal(err)
		}
		got, err := x.Find(t.Context(), q, index.Page{Limit: 100})
		if err != nil {
			t.Fatalf("%s: %v", test.query, err)
		}
		if diff := cmp.Diff(test.want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", test.query, diff)
		}
		back, err := x.Find(t.Context(), q, index.Page{Newest: true, Limit: 100})
		if slices.Reverse(back); err != nil || !slices.Equal(back, test.want) {
			t.Errorf("%s, newest first: %v, %v", test.query, back, err)
		}
		n, err := x.Count(t.Context(), q)
		if err != nil || n != uint64(len(test.want)) {
			t.Errorf("%s: count %d, %v", test.query, n, err)
		}
	}
	info, err := os.Stat(path)
	if err != nil || info.Mode() != 0o600 {
		t.Errorf("mode: %v, %v", info.Mode(), err)
	}
	for _, suffix := range []string{"-wal", "-shm", ".lock"} {
		info, err := os.Stat(path + suffix)
		if err != nil || info.Mode() != 0o600 {
			t.Errorf("mode of %s: %v, %v", suffix, info.Mode(), err)
		}
	}
}

func TestPages(t *testing.T) {
	x, _ := small(t)
	for _, test := range []struct {
		newest bool
		want   [][]uint64
	}{
		{false, [][]uint64{{0, 1, 2}, {3, 4, 5}, {6, 7}, {}}},
		{true, [][]uint64{{7, 6, 5}, {4, 3, 2}, {1, 0}, {}}},
	} {
		var got [][]uint64
		page := index.Page{Newest: test.newest, Limit: 3}
		for {
			found, err := x.Find(t.Context(), index.Query{}, page)
			if err != nil {
				t.Fatal(err)
			}
			if got = append(got, found); len(found) == 0 {
				break
			}
			page.After = &found[len(found)-1]
		}
		if diff := cmp.Diff(test.want, got); diff != "" {
			t.Errorf("newest %v (-want +got):\n%s", test.newest, diff)
		}
	}
	most := uint64(math.MaxUint64)
	if found, err := x.Find(t.Context(), index.Query{From: most}, index.Page{After: &most, Limit: 1}); err != nil || len(found) > 0 {
		t.Errorf("behind all: %v, %v", found, err)
	}
	for _, limit := range []int{0, -1, index.MaxPage + 1} {
		if _, err := x.Find(t.Context(), index.Query{}, index.Page{Limit: limit}); airlock.CodeOf(err) != airlock.Invalid {
			t.Errorf("limit %d: %v", limit, err)
		}
	}
	for _, m := range []index.Match{
		is("seq FROM event; --", "1"), is("time", "1"), is("", "1"), is("team"), is("effect", "1"), is("of", "1 OR 1"),
	} {
		q := index.Query{Match: []index.Match{m}}
		if _, err := x.Find(t.Context(), q, index.Page{Limit: 1}); airlock.CodeOf(err) != airlock.Invalid {
			t.Errorf("find %v: %v", m, err)
		}
		if _, err := x.Count(t.Context(), q); airlock.CodeOf(err) != airlock.Invalid {
			t.Errorf("count %v: %v", m, err)
		}
	}
}

// A caller who may see one team only narrows whatever was asked for.
func TestNarrow(t *testing.T) {
	x, _ := small(t)
	for _, query := range []string{"", "team=blue", "team!=red", `team="",blue,red`, "subject=p1"} {
		q, err := index.ParseQuery(query, noon)
		if err != nil {
			t.Fatal(err)
		}
		q.Match = append(q.Match, is("team", "red"))
		found, err := x.Find(t.Context(), q, index.Page{Limit: 100})
		if err != nil {
			t.Fatal(err)
		}
		for _, seq := range found {
			if events[seq].Team != "red" {
				t.Errorf("%s: found %d of team %s", query, seq, events[seq].Team)
			}
		}
	}
}

func TestAddInOrder(t *testing.T) {
	x, path := small(t)
	if x.Next() != 8 || x.Replaced() != "" {
		t.Errorf("next %d, replaced %q", x.Next(), x.Replaced())
	}
	row := func(seq uint64) index.Row { return index.Row{Seq: seq, Time: noon, Type: "a"} }
	wrong := row(8)
	wrong.Effect = "perhaps"
	early := row(8)
	early.Time = time.Unix(-1, 0)
	for _, test := range []struct {
		rows []index.Row
		want airlock.Code
	}{
		{[]index.Row{row(9)}, airlock.Conflict},
		{[]index.Row{row(7)}, airlock.Conflict},
		{[]index.Row{row(8), row(10)}, airlock.Conflict},
		{[]index.Row{row(8), row(8)}, airlock.Conflict},
		{[]index.Row{wrong}, airlock.Invalid},
		{[]index.Row{early}, airlock.Invalid},
	} {
		if err := x.Add(t.Context(), test.rows); airlock.CodeOf(err) != test.want {
			t.Errorf("%v: %v", test.rows, err)
		}
	}
	canceled, cancel := context.WithCancel(t.Context())
	cancel()
	if err := x.Add(canceled, []index.Row{row(8)}); !errors.Is(err, context.Canceled) {
		t.Errorf("canceled: %v", err)
	}
	if err := x.Add(t.Context(), nil); err != nil || x.Next() != 8 {
		t.Errorf("nothing: %v, next %d", err, x.Next())
	}
	if report := check(t, x, events); !report.OK() || report.Compared != 8 || report.Next != 8 {
		t.Errorf("after refusals: %+v", report)
	}
	if _, err := index.Open(t.Context(), path); airlock.CodeOf(err) != airlock.Conflict {
		t.Errorf("second open: %v", err)
	}
	if err := x.Close(); err != nil {
		t.Fatal(err)
	}
	if err := x.Close(); err != nil {
		t.Errorf("second close: %v", err)
	}
	if err := x.Add(t.Context(), []index.Row{row(8)}); airlock.CodeOf(err) != airlock.Unavailable {
		t.Errorf("add when closed: %v", err)
	}
	if _, err := x.Find(t.Context(), index.Query{}, index.Page{Limit: 1}); airlock.CodeOf(err) != airlock.Unavailable {
		t.Errorf("find when closed: %v", err)
	}
	x = open(t, path)
	add(t, x, []index.Row{row(8)})
	if report := check(t, x, append(slices.Clone(events), row(8))); !report.OK() || report.Compared != 9 || x.Replaced() != "" {
		t.Errorf("after a new start: %+v, replaced %q", report, x.Replaced())
	}
}

func TestReset(t *testing.T) {
	x, path := small(t)
	if err := x.Reset(t.Context(), 6); err != nil {
		t.Fatal(err)
	}
	if n, err := x.Count(t.Context(), index.Query{}); err != nil || n != 0 || x.Next() != 6 {
		t.Errorf("emptied: %d events, next %d, %v", n, x.Next(), err)
	}
	if err := x.Add(t.Context(), events[:1]); airlock.CodeOf(err) != airlock.Conflict {
		t.Errorf("add what was dropped: %v", err)
	}
	add(t, x, events[6:7])
	if err := x.Close(); err != nil {
		t.Fatal(err)
	}
	x = open(t, path)
	add(t, x, events[7:])
	if report := check(t, x, events[6:]); !report.OK() || report.Compared != 2 || x.Replaced() != "" {
		t.Errorf("%+v, replaced %q", report, x.Replaced())
	}
	if err := x.Reset(t.Context(), 1<<63); airlock.CodeOf(err) != airlock.Invalid {
		t.Errorf("reset too far: %v", err)
	}
}

// hostile are values as an event of a sandbox may have them.
var hostile = []string{
	"\x00", "a\x00b", "a", "'", `"`, "'; DROP TABLE event; --", "\xff\xfe", "\u202e", "%", "_", "*", "?1", "日本", "\n",
	strings.Repeat("x", 256), strings.Repeat("x", 257), strings.Repeat("x", 257) + "y", strings.Repeat("é", 16000), strings.Repeat("\x00", 32768),
}

func TestHostileStrings(t *testing.T) {
	x := open(t, filepath.Join(t.TempDir(), "a %41?mode=memory#.db"))
	var rows []index.Row
	for i, s := range hostile {
		rows = append(rows, index.Row{Seq: uint64(i), Time: noon, Type: s, Team: s, Sandbox: s, Execution: s, App: s, Actor: s, Action: s, Resource: s, Subjects: []string{s}})
	}
	add(t, x, rows)
	for i, s := range hostile {
		for _, field := range []string{"type", "team", "sandbox", "execution", "app", "actor", "action", "resource", "subject"} {
			want := []uint64{uint64(i)}
			if s == "*" && (field == "type" || field == "action") {
				continue // stands for all of them
			}
			q := index.Query{Match: []index.Match{is(field, s)}}
			if got, err := x.Find(t.Context(), q, index.Page{Limit: 100}); err != nil || !slices.Equal(got, want) {
				t.Errorf("%s=%.20q: %v, %v", field, s, got, err)
			}
			if len(q.String()) > 4096 || field == "type" && s != "" { // who asks must name a type that there is
				continue
			}
			again, err := index.ParseQuery(q.String(), noon)
			if diff := cmp.Diff(q, again); err != nil || diff != "" {
				t.Errorf("%s: %v\n%s", q, err, diff)
			}
		}
	}
	if got, err := x.Find(t.Context(), index.Query{Match: []index.Match{is("type", "x*")}}, index.Page{Limit: 100}); err != nil || !slices.Equal(got, []uint64{14, 15, 16}) {
		t.Errorf("type=x*: %v, %v", got, err)
	}
	if report := check(t, x, rows); !report.OK() || report.Compared != uint64(len(rows)) {
		t.Errorf("%+v", report)
	}
}

// Many words and several spans, with times that go back and forth, are found
// as by looking at each row.
func TestManyEvents(t *testing.T) {
	x := open(t, filepath.Join(t.TempDir(), "index.db"))
	rows := generate(0, 10_000)
	for i := range rows {
		if i%1000 < 3 { // the clock is set back for some moments
			rows[i].Time = rows[i].Time.Add(-time.Duration(i%7) * time.Hour)
		}
	}
	for batch := range slices.Chunk(rows, 777) {
		add(t, x, batch)
	}
	begin, end := rows[4500].Time, rows[4600].Time
	for _, test := range []struct {
		query index.Query
		match func(index.Row) bool
	}{
		{index.Query{Since: begin, Until: end}, func(r index.Row) bool { return !r.Time.Before(begin) && r.Time.Before(end) }},
		{index.Query{Until: begin}, func(r index.Row) bool { return r.Time.Before(begin) }},
		{index.Query{Match: []index.Match{is("type", "exec.start")}, Since: end}, func(r index.Row) bool { return r.Type == "exec.start" && !r.Time.Before(end) }},
		{index.Query{Match: []index.Match{is("sandbox", rows[5000].Sandbox)}}, func(r index.Row) bool { return r.Sandbox == rows[5000].Sandbox }},
	} {
		var want []uint64
		for _, r := range rows {
			if test.match(r) {
				want = append(want, r.Seq)
			}
		}
		got, err := x.Find(t.Context(), test.query, index.Page{Limit: index.MaxPage})
		if err != nil || len(want) == 0 || !slices.Equal(got, want) {
			t.Errorf("%s: %d events, want %d, %v", test.query, len(got), len(want), err)
		}
	}
	if report := check(t, x, rows); !report.OK() || report.Compared != 10_000 {
		t.Errorf("%+v", report)
	}
}

// Queries go on while events are added, and see whole additions only.
func TestFindWhileAdding(t *testing.T) {
	x := open(t, filepath.Join(t.TempDir(), "index.db"))
	done := make(chan error)
	go func() {
		for n := uint64(0); n < 10_000; n += 100 {
			if err := x.Add(context.Background(), generate(n, 100)); err != nil {
				done <- err
				return
			}
		}
		done <- nil
	}()
	for running := true; running; {
		select {
		case err := <-done:
			if err != nil {
				t.Fatal(err)
			}
			running = false
		default:
		}
		known := x.Next()
		n, err := x.Count(t.Context(), index.Query{})
		if err != nil || n%100 != 0 || n < known {
			t.Fatalf("%d events, next %d, %v", n, known, err)
		}
	}
}

// generate returns rows as a busy installation has them: of 10 events in an
// execution, a few executions in a sandbox.
func generate(first uint64, n int) []index.Row {
	rows := make([]index.Row, n)
	types := []string{"exec.start", "exec.end", "dns.resolve", "http.request", "http.response", "file.write", "file.read", "port.serve", "secret.use", "db.select"}
	for i := range rows {
		seq := first + uint64(i)
		r := index.Row{
			Seq: seq, Time: noon.Add(time.Duration(seq) * 3 * time.Millisecond), Type: types[seq%10], Source: "host",
			Team: fmt.Sprintf("team%d", seq/1000%7), Sandbox: fmt.Sprintf("i%019x", seq/50*0x9e3779b97f4a7c15), Execution: fmt.Sprintf("x%019x", seq/10*0x9e3779b97f4a7c15),
			App: fmt.Sprintf("app-%d", seq/100%1000), Actor: fmt.Sprintf("%016x", seq/100%1000*0x9e3779b97f4a7c15), Action: strings.Replace(types[seq%10], ".", ":", 1),
		}
		switch seq % 3 {
		case 0:
			r.Effect = "permit"
			r.Resource = fmt.Sprintf("Path:/data/file-%d", seq%100_003)
		case 1:
			r.Status, r.Of = "ok", seq-1
		}
		if seq%100 == 42 {
			r.Effect = "deny"
		}
		if seq%20 == 5 {
			r.Subjects = []string{fmt.Sprintf("p%015x", seq/20%10_000*0x9e3779b97f4a7c15)}
		}
		rows[i] = r
	}
	return rows
}
