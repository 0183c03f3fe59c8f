package index_test

import (
	"math"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"airlock.dev/airlock/audit/index"
)

func BenchmarkRowOf(b *testing.B) {
	event := []byte(`{"v":1,"seq":41,"id":"e1","time":"2026-12-02T12:00:00.000000007Z","epoch":3,"type":"port.serve","source":"host","team":"acme","sandbox":"i123",` +
		`"execution":"x9","app":"billing","actor":{"kind":"user","id":"0123456789abcdef","role":"client"},` +
		`"call":{"principal":{"type":"Sandbox","id":"i123"},"action":"port:serve","resource":{"type":"Port","id":"8080"},"context":{"caller":"public"}},` +
		`"decision":{"effect":"deny","policies":["ceiling/a"],"reason":"no","set":"d"},"outcome":{"status":"denied","code":"permission_denied"},"of":40,` +
		`"sealed":[{"subject":"p2","slot":"path","nonce":"AA==","data":"AA=="}]}`)
	for b.Loop() {
		if _, err := index.RowOf(event); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkAdd adds 1,000 events at a time; -benchtime=1000x makes a million.
func BenchmarkAdd(b *testing.B) {
	x := open(b, filepath.Join(b.TempDir(), "index.db"))
	var took time.Duration
	for b.Loop() {
		rows := generate(x.Next(), 1000)
		begin := time.Now()
		add(b, x, rows)
		took += time.Since(begin)
	}
	b.ReportMetric(float64(x.Next())/took.Seconds(), "rows/s")
}

// BenchmarkMillion asks among a million events.
func BenchmarkMillion(b *testing.B) {
	const million = 1_000_000
	x := open(b, filepath.Join(b.TempDir(), "index.db"))
	for x.Next() < million {
		add(b, x, generate(x.Next(), 1000))
	}
	middle := generate(million/2, 100)
	subject := middle[slices.IndexFunc(middle, func(r index.Row) bool { return len(r.Subjects) > 0 })].Subjects[0]
	for _, test := range []struct {
		name  string
		query index.Query
		page  index.Page
	}{
		{"execution", index.Query{Match: []index.Match{is("execution", middle[0].Execution)}}, index.Page{Limit: 100}},
		{"sandbox", index.Query{Match: []index.Match{is("sandbox", middle[0].Sandbox)}}, index.Page{Limit: 100}},
		{"app", index.Query{Match: []index.Match{is("app", middle[0].App)}}, index.Page{Limit: 1000}},
		{"app-newest", index.Query{Match: []index.Match{is("app", middle[0].App)}}, index.Page{Limit: 1000, Newest: true}},
		{"actor", index.Query{Match: []index.Match{is("actor", middle[0].Actor)}}, index.Page{Limit: 1000}},
		{"subject", index.Query{Match: []index.Match{is("subject", subject)}}, index.Page{Limit: 100}},
		{"resource", index.Query{Match: []index.Match{is("resource", "Path:/data/file-99")}}, index.Page{Limit: 100}},
		{"of", index.Query{Match: []index.Match{is("of", "500001")}}, index.Page{Limit: 100}},
		{"type-newest", index.Query{Match: []index.Match{is("type", "exec.start")}}, index.Page{Limit: 100, Newest: true}},
		{"type-prefix", index.Query{Match: []index.Match{is("type", "exec.*")}}, index.Page{Limit: 100}},
		{"deny-of-team", index.Query{Match: []index.Match{is("effect", "deny"), is("team", "team3")}}, index.Page{Limit: 100}},
		{"execution-and-all", index.Query{Match: []index.Match{is("type", "exec.*"), is("execution", middle[0].Execution), is("source", "host"), is("app", middle[0].App)}}, index.Page{Limit: 100}},
		{"hour-of-type", index.Query{Match: []index.Match{is("type", "exec.start", "exec.end")}, Since: middle[0].Time, Until: middle[0].Time.Add(time.Minute)}, index.Page{Limit: 10000}},
		{"nothing-of-a-word", index.Query{Match: []index.Match{is("type", "no.such")}}, index.Page{Limit: 100}},
		{"scan-for-nothing", index.Query{Match: []index.Match{is("type", "no.*"), isNot("team", "team3")}}, index.Page{Limit: 100}},
	} {
		b.Run("Find/"+test.name, func(b *testing.B) {
			var took []time.Duration
			n := 0
			for b.Loop() {
				begin := time.Now()
				found, err := x.Find(b.Context(), test.query, test.page)
				if err != nil {
					b.Fatal(err)
				}
				n = len(found)
				took = append(took, time.Since(begin))
			}
			slices.Sort(took)
			b.ReportMetric(float64(n), "events")
			b.ReportMetric(took[len(took)*99/100].Seconds()*1000, "p99-ms")
		})
	}
	b.Run("Count/all", func(b *testing.B) {
		for b.Loop() {
			if n, err := x.Count(b.Context(), index.Query{}); err != nil || n != million {
				b.Fatal(n, err)
			}
		}
	})
	b.Run("Check", func(b *testing.B) {
		rows := log(generate(0, million))
		for b.Loop() {
			if report, err := x.Check(b.Context(), math.MaxUint64, rows); err != nil || !report.OK() {
				b.Fatal(report, err)
			}
		}
	})
}
