package index_test

import (
	"strings"
	"testing"
	"time"

	"airlock.dev/airlock"
	"airlock.dev/airlock/audit/index"
	"github.com/google/go-cmp/cmp"
)

func is(field string, any ...string) index.Match { return index.Match{Field: field, Any: any} }

func isNot(field string, any ...string) index.Match {
	return index.Match{Field: field, Any: any, Not: true}
}

func TestParseQuery(t *testing.T) {
	day := time.Date(2026, 12, 1, 0, 0, 0, 0, time.UTC)
	for _, test := range []struct {
		text string
		want index.Query
		say  string // if it is not text
	}{
		{"", index.Query{}, ""},
		{"   ", index.Query{}, "-"},
		{
			"sandbox=i123 type=exec.* effect=deny since=2026-12-01 until=2026-12-02T10:00:00Z",
			index.Query{Match: []index.Match{is("sandbox", "i123"), is("type", "exec.*"), is("effect", "deny")}, Since: day, Until: noon.Add(-2 * time.Hour)},
			"sandbox=i123 type=exec.* effect=deny since=2026-12-01T00:00:00Z until=2026-12-02T10:00:00Z",
		},
		{
			" team=acme  execution=x app=b actor=0123 action=port:serve resource=Host:pypi.org status=ok source=host subject=p1 of=12 ",
			index.Query{Match: []index.Match{is("team", "acme"), is("execution", "x"), is("app", "b"), is("actor", "0123"), is("action", "port:serve"), is("resource", "Host:pypi.org"), is("status", "ok"), is("source", "host"), is("subject", "p1"), is("of", "12")}},
			"team=acme execution=x app=b actor=0123 action=port:serve resource=Host:pypi.org status=ok source=host subject=p1 of=12",
		},
		{"seq>=100 seq<200", index.Query{From: 100, Before: 200}, ""},
		{"seq>100 seq<=200", index.Query{From: 101, Before: 201}, "seq>=101 seq<201"},
		{"seq<200", index.Query{Before: 200}, ""},
		{"seq=7", index.Query{From: 7, Before: 8}, "seq>=7 seq<8"},
		{"seq=0", index.Query{Before: 1}, "seq<1"},
		{"seq<9223372036854775807", index.Query{Before: 1<<63 - 1}, ""},
		{"type=sandbox.create,sandbox.kill team!=red", index.Query{Match: []index.Match{is("type", "sandbox.create", "sandbox.kill"), isNot("team", "red")}}, ""},
		{`resource="Path:/a b,\"c\"\n\u200b\x00","Path:/d=e!*"`, index.Query{Match: []index.Match{is("resource", "Path:/a b,\"c\"\n\u200b\x00", "Path:/d=e!*")}}, ""},
		{`app="plain" team="" of!=""`, index.Query{Match: []index.Match{is("app", "plain"), is("team", ""), isNot("of", "")}}, `app=plain team="" of!=""`},
		{`app="\ud83d\ude00\/" team=grün\`, index.Query{Match: []index.Match{is("app", "😀/"), is("team", `grün\`)}}, `app=😀/ team=grün\`},
		{`app="\xff"`, index.Query{Match: []index.Match{is("app", "\xff")}}, ""},
		{"since=2h", index.Query{Since: noon.Add(-2 * time.Hour)}, "since=2026-12-02T10:00:00Z"},
		{"since=7d until=30m", index.Query{Since: noon.AddDate(0, 0, -7), Until: noon.Add(-30 * time.Minute)}, "since=2026-11-25T12:00:00Z until=2026-12-02T11:30:00Z"},
		{"until=0s", index.Query{Until: noon}, "until=2026-12-02T12:00:00Z"},
		{"since=2026-12-02T12:00:00.000000001+01:00", index.Query{Since: noon.Add(1 - time.Hour)}, "since=2026-12-02T11:00:00.000000001Z"},
		{"since=1970-01-01", index.Query{Since: time.Unix(0, 0)}, "since=1970-01-01T00:00:00Z"},
		{"type=* action!=db:*", index.Query{Match: []index.Match{is("type", "*"), isNot("action", "db:*")}}, ""},
	} {
		got, err := index.ParseQuery(test.text, noon.In(time.FixedZone("", 3600)))
		if err != nil {
			t.Errorf("%s: %v", test.text, err)
			continue
		}
		if diff := cmp.Diff(test.want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", test.text, diff)
		}
		if test.say == "" {
			test.say = test.text
		}
		if say := got.String(); say != strings.TrimPrefix(test.say, "-") {
			t.Errorf("%s: String is %s", test.text, say)
		}
	}
}

func TestParseQueryRefuses(t *testing.T) {
	for _, test := range []struct{ text, want string }{
		{"colour=red", `term 1 of the query, at position 1, "colour=red": the key "colour" is not known: use type, source, team, sandbox, execution, app, actor, action, resource, effect, status, subject, of, since, until or seq`},
		{"team=a  sandbox", `term 2 of the query, at position 9, "sandbox": it has no key and operator: write KEY=VALUE, as in sandbox=i123 effect=deny`},
		{"Team=a", "has no key and operator"},
		{"=a", "has no key and operator"},
		{"team:a", "has no key and operator"},
		{"team=", `"team=": a value is missing: give one, or "" for the events that do not have the field`},
		{"team= a", "a value is missing"},
		{"team=a,,b", "a value is missing"},
		{"team=a,", "a value is missing"},
		{`team="a`, `a quote is not closed: end it with "`},
		{`team="a\`, "a quote is not closed"},
		{`team="a"b`, "put a comma between values"},
		{`team=a"b"`, "a character that needs quotes"},
		{"team=a\tb", "a character that needs quotes"},
		{"team=a\nsandbox=b", "a character that needs quotes"},
		{"team=a\u202e", "a character that needs quotes"},
		{"team=\"a\u202e\"", "a character that cannot be seen"},
		{"team=\"a\n\"", "a character that cannot be seen"},
		{`team="\q"`, "an escape that is not known"},
		{"team=\xff", `it is not UTF-8: write other bytes in double quotes, as \xff`},
		{"team=a team=b", `term 2 of the query, at position 8, "team=b": team is there twice: put values together with commas`},
		{"team=a team!=b", "team is there twice"},
		{"since=1h since=2h", "since is there twice"},
		{"seq>1 seq>=2", "a lower bound of seq is there twice"},
		{"seq=1 seq<2", "an upper bound of seq is there twice"},
		{"team>a", "team has no >: use ="},
		{"since!=2h", "since has no !=: use ="},
		{"seq!=2", "seq has no !="},
		{"since=2h,3h", "since has 2 values: give one value"},
		{"seq=1,2", "seq has 2 values"},
		{"since=yesterday", `"yesterday" is not a usable time: give one from 1970 to 2261, as 2026-12-02T10:00:00Z, 2026-12-02, or 30m, 2h or 7d for that long ago`},
		{`since=""`, "is not a usable time"},
		{"since=2hh", "is not a usable time"},
		{"since=-2h", "is not a usable time"},
		{"since=h", "is not a usable time"},
		{"since=99999999999d", "is not a usable time"},
		{"since=36500d", "is not a usable time"},
		{"since=1969-12-31", "is not a usable time"},
		{"since=2026-13-01", "is not a usable time"},
		{"since=2026-12-02 until=2026-12-02", "let since be before until"},
		{"seq>=5 seq<5", "let the lower bound be below the upper one"},
		{"seq<0", "no seq is below 0: use seq=0"},
		{"seq=x", `"x" is not usable: give a whole number below 9223372036854775807`},
		{"seq=-1", "is not usable"},
		{"seq=9223372036854775807", "is not usable"},
		{"of=x", `of is never "x": give the number of an event`},
		{"of=01", "of is never"},
		{"effect=denied", `effect is never "denied": use permit, deny or hold`},
		{"source=host,moon", "use host or guest"},
		{"status=fail*", "use ok, error or denied"},
		{"type=*.create", "a * that is not at its end: leave out what is behind it"},
		{"type=" + strings.Repeat("a", 225) + "*", "use at most 224"},
		{"type=exec.strat", `no event has the type "exec.strat": use exec.start`},
		{"type=log.open,file.make", `no event has the type "file.make": use file.move`},
		{"type=file.unknown", `use file.download, file.end,`},
		{"type!=exce.*", `no event has the type "exce.*": use app.*, approval.*, audit.*,`},
		{"type=x", "use app.*, approval.*, audit.*,"},
		{"sandbox=i*", "sandbox takes no pattern: only a type or an action may end in *"},
		{`resource="Host:a",Host:*`, "resource takes no pattern"},
		{"team=" + strings.Repeat("a", 4092), "it has 4097 bytes: use at most 4096"},
		{"since=1h team=" + strings.Repeat("a", 4080), "written in full it has"},
	} {
		_, err := index.ParseQuery(test.text, noon)
		var coded *airlock.Error
		if airlock.CodeOf(err) != airlock.Invalid || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%.60q: %v, want %q", test.text, err, test.want)
		} else if coded = err.(*airlock.Error); coded.Field != "query" || coded.Hint == "" {
			t.Errorf("%.60q: field %q, hint %q", test.text, coded.Field, coded.Hint)
		}
	}
}

func FuzzParseQuery(f *testing.F) {
	for _, seed := range []string{
		"", "sandbox=i123 type=exec.* effect=deny since=2026-12-01 until=2026-12-02T10:00:00Z",
		`team!=a,b app="x \" \u00e9 \ud83d\ude00 \xff \/" seq>=100 seq<200 of=12`, `since=7d until=30m resource=""`, `subject="\ud800" actor=*`, "seq=9223372036854775806",
	} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		q, err := index.ParseQuery(text, noon)
		if err != nil {
			if airlock.CodeOf(err) != airlock.Invalid || len(err.Error()) > 2000 {
				t.Errorf("%q: %v", text, err)
			}
			return
		}
		say := q.String()
		again, err := index.ParseQuery(say, noon.AddDate(1, 0, 0))
		if err != nil {
			t.Fatalf("%q says %q: %v", text, say, err)
		}
		if diff := cmp.Diff(q, again); diff != "" || again.String() != say {
			t.Errorf("%q says %q, which is something else:\n%s", text, say, diff)
		}
	})
}
