package index_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"airlock.dev/airlock/audit/index"
	"github.com/google/go-cmp/cmp"
)

var noon = time.Date(2026, 12, 2, 12, 0, 0, 0, time.UTC)

const at = `"time":"2026-12-02T12:00:00.000000000Z"`

func TestRowOf(t *testing.T) {
	for _, test := range []struct {
		name, event string
		want        index.Row
	}{
		{"the least", `{"v":1,"seq":0,` + at + `,"type":"log.open"}`, index.Row{Time: noon, Type: "log.open"}},
		{
			"everything",
			`{"v":1,"seq":41,"id":"e1","time":"2026-12-02T12:00:00.000000007Z","epoch":3,"type":"port.serve","source":"host","team":"acme","sandbox":"i123",` +
				`"execution":"x9","app":"billing","actor":{"kind":"user","id":"0123456789abcdef","role":"client"},` +
				`"call":{"principal":{"type":"Sandbox","id":"i123"},"action":"port:serve","resource":{"type":"Port","id":"8080"},"context":{"caller":"public"}},` +
				`"facts":{"type":"no","time":3},"decision":{"effect":"deny","policies":["ceiling/a"],"reason":"no","set":"d"},` +
				`"outcome":{"status":"denied","code":"permission_denied"},"of":40,` +
				`"sealed":[{"subject":"p2","slot":"path","nonce":"AA==","data":"AA=="},{"subject":"p1"},{"subject":"p2","slot":"x"},{"slot":"none"}]}`,
			index.Row{
				Seq: 41, Time: noon.Add(7), Type: "port.serve", Source: "host", Team: "acme", Sandbox: "i123", Execution: "x9", App: "billing",
				Actor: "0123456789abcdef", Action: "port:serve", Resource: "Port:8080", Effect: "deny", Status: "denied", Of: 40, Subjects: []string{"p1", "p2"},
			},
		},
		{
			"spaces, escapes and null",
			`{"v":1,"seq":9223372036854775807,"team": null , ` + at + ` ,"t\u0079pe" : "a\u0000\"b\\" , "sealed": [ ] , "call" : { } , "x":[1,[2,{"a":"]}"}],-0.5e3,true,false,null] , "decision":null }`,
			index.Row{Seq: 9223372036854775807, Time: noon, Type: "a\x00\"b\\"},
		},
		{"other spellings are other fields", `{"v":1,"seq":7,` + at + `,"type":"a","TYPE":"b","Team":3,"actor":{"ID":1}}`, index.Row{Seq: 7, Time: noon, Type: "a"}},
		{"a resource in part", `{"v":1,"seq":7,` + at + `,"type":"a","call":{"resource":{"id":"/etc"}}}`, index.Row{Seq: 7, Time: noon, Type: "a", Resource: ":/etc"}},
		{"half a pair", `{"v":1,"seq":7,` + at + `,"type":"a","app":"\ud800"}`, index.Row{Seq: 7, Time: noon, Type: "a", App: "\uFFFD"}},
	} {
		got, err := index.RowOf([]byte(test.event))
		if err != nil {
			t.Errorf("%s: %v", test.name, err)
		} else if diff := cmp.Diff(test.want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", test.name, diff)
		}
	}
}

func TestRowOfRefuses(t *testing.T) {
	for _, test := range []struct{ event, want string }{
		{``, `does not begin with {"v":1,"seq":N,`},
		{`{"v":2,"seq":1,` + at + `,"type":"a"}`, "does not begin"},
		{`{"v":1, "seq":1,` + at + `,"type":"a"}`, "does not begin"},
		{`{"v":1,"seq":01,` + at + `,"type":"a"}`, `"01" is not a number`},
		{`{"v":1,"seq":-1,` + at + `,"type":"a"}`, `"-1" is not a number`},
		{`{"v":1,"seq":9223372036854775808,` + at + `,"type":"a"}`, "is not a number"},
		{`{"v":1,"seq":1,` + at + `,"type":"a"`, "read event 1: not JSON"},
		{`{"v":1,"seq":1,` + at + `,"type":"a"}{}`, "not JSON"},
		{`{"v":1,"seq":1,` + at + "\n" + `,"type":"a"}`, "not one line"},
		{`{"v":1,"seq":1,` + at + `,"type":"` + "\xff" + `"}`, "not one line of UTF-8"},
		{`{"v":1,"seq":1,` + at + `,"type":"a","seq":2}`, `"seq" is there twice`},
		{`{"v":1,"seq":1,` + at + `,"type":"a","\u0074ype":"b"}`, `"type" is there twice`},
		{`{"v":1,"seq":1,` + at + `,"type":"a","call":{"action":"a","action":"b"}}`, `"call": "action" is there twice`},
		{`{"v":1,"seq":1,` + at + `}`, "type is missing"},
		{`{"v":1,"seq":1,` + at + `,"type":""}`, "type is missing"},
		{`{"v":1,"seq":1,` + at + `,"type":7}`, `"type": "7" is not a string`},
		{`{"v":1,"seq":1,"type":"a"}`, `time "" has not the form`},
		{`{"v":1,"seq":1,"time":"2026-12-02T12:00:00Z","type":"a"}`, "has not the form"},
		{`{"v":1,"seq":1,"time":"2026-12-02T12:00:00,000000000Z","type":"a"}`, "has not the form"},
		{`{"v":1,"seq":1,"time":"2026-12-02T12:00:00.000000000+01:00","type":"a"}`, "has not the form"},
		{`{"v":1,"seq":1,"time":"1969-12-31T23:59:59.999999999Z","type":"a"}`, "give one from 1970 to 2261"},
		{`{"v":1,"seq":1,"time":"2262-01-01T00:00:00.000000000Z","type":"a"}`, "give one from 1970 to 2261"},
		{`{"v":1,"seq":1,` + at + `,"type":"a","source":"moon"}`, "use host or guest"},
		{`{"v":1,"seq":1,` + at + `,"type":"a","decision":{"effect":"Deny"}}`, "use permit, deny or hold"},
		{`{"v":1,"seq":1,` + at + `,"type":"a","decision":"deny"}`, "is not an object"},
		{`{"v":1,"seq":1,` + at + `,"type":"a","outcome":{"status":"fine"}}`, "use ok, error or denied"},
		{`{"v":1,"seq":1,` + at + `,"type":"a","sealed":{}}`, "is not an array"},
		{`{"v":1,"seq":1,` + at + `,"type":"a","sealed":["p1"]}`, "is not an object"},
		{`{"v":1,"seq":1,` + at + `,"type":"a","of":1}`, "does not come before"},
		{`{"v":1,"seq":1,` + at + `,"type":"a","of":0}`, "is the log's first"},
		{`{"v":1,"seq":1,` + at + `,"type":"a","of":"0"}`, "is not a number"},
		{`{"v":1,"seq":1,` + at + `,"type":"a","of":1e0}`, "is not a number"},
		{`{"v":1,"seq":1,` + at + `,"type":"a","x":"` + strings.Repeat("y", 32768) + `"}`, "32768 is the most"},
	} {
		row, err := index.RowOf([]byte(test.event))
		if err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%.200s: %v, want %q", test.event, err, test.want)
		}
		if diff := cmp.Diff(index.Row{}, row); err != nil && diff != "" {
			t.Errorf("%.200s: a row beside the error", test.event)
		}
	}
}

func FuzzRowOf(f *testing.F) {
	f.Add([]byte(`{"v":1,"seq":41,` + at + `,"type":"exec.start","source":"guest","actor":{"id":"a"},"call":{"action":"x","resource":{"type":"T","id":"i"}},"of":3,"sealed":[{"subject":"p"},null]}`))
	f.Add([]byte(`{"v":1,"seq":1,` + at + ` , "type" : "a\"\\\u0000" , "x":[[],{},"}",-1.5e-3,{"y":[null,true]}]}`))
	f.Add([]byte(`{"v":1,"seq":1,"`))
	f.Add([]byte(`{"v":1,"seq":1,"time":"` + strings.Repeat("[", 1000)))
	f.Fuzz(func(t *testing.T, event []byte) {
		row, err := index.RowOf(event)
		if err != nil {
			return
		}
		if want := fmt.Sprintf(`{"v":1,"seq":%d,`, row.Seq); !strings.HasPrefix(string(event), want) {
			t.Errorf("row of event %d", row.Seq)
		}
		if row.Type == "" || row.Time.Location() != time.UTC || row.Of != 0 && row.Of >= row.Seq || !slices.IsSorted(row.Subjects) || slices.Contains(row.Subjects, "") {
			t.Errorf("%+v", row)
		}
	})
}
