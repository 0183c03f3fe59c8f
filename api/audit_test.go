package api_test

import (
	"encoding/json"
	"net/url"
	"strings"
	"testing"

	"airlock.dev/airlock/audit"
)

// TestDetailsAreRecorded: who opens an event's sealed parts is found by a
// query, whichever event it was.
func TestDetailsAreRecorded(t *testing.T) {
	w := newWorld(t)
	for _, seq := range []string{"0", "1"} {
		if r := w.as(w.operator, "GET", "/v1/audit/events/"+seq+"?details=true", ""); r.status != 200 {
			t.Fatalf("event %s: %d %s", seq, r.status, r.body)
		}
	}
	r := w.as(w.operator, "GET", "/v1/audit/events?query=type%3Daudit.details", "")
	var page struct {
		Events []struct {
			Of   *uint64
			Call struct{ Resource struct{ ID string } }
		}
	}
	if err := json.Unmarshal([]byte(r.body), &page); err != nil || len(page.Events) != 2 {
		t.Fatalf("%d %s", r.status, r.body)
	}
	first, second := page.Events[0], page.Events[1]
	if first.Of != nil || first.Call.Resource.ID != "0" || second.Of == nil || *second.Of != 1 {
		t.Errorf("%s", r.body)
	}
}

// TestSubjectsByName: who reads the log names a subject as they know it, and
// an auditor learns nothing of other teams' subjects.
func TestSubjectsByName(t *testing.T) {
	w := newWorld(t)
	for _, team := range []string{"red", "blue"} {
		e := audit.Event{Type: "exec.start", Team: team, Private: []audit.Private{{Subject: "team:" + team, Detail: map[string]any{"args": []string{"ls"}}}}}
		if _, err := w.trail.Append(t.Context(), e); err != nil {
			t.Fatal(err)
		}
	}
	pseudonym, err := w.trail.Subject(t.Context(), "team:red")
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		key, query, want string
	}{
		{w.operator, "subject=team:red", `"team":"red"`},
		{w.operator, "subject=team:blue", `"team":"blue"`},
		{w.operator, "type=exec.start subject!=team:blue", `"team":"red"`},
		{w.operator, "subject=" + pseudonym, `"team":"red"`},
		{w.operator, `type=log.open subject=""`, `"type":"log.open"`},
		{w.operator, "subject=team:none", "nothing is sealed for"},
		{w.operator, "subject=red", "is no subject"},
		{w.auditor, "subject=team:red", `"team":"red"`},
		{w.auditor, "subject=team:blue", "nothing is sealed for"},
	} {
		r := w.as(c.key, "GET", "/v1/audit/events?query="+url.QueryEscape(c.query), "")
		if found := strings.HasPrefix(c.want, `"`); found != (r.status == 200) || !found && r.status != 400 || !strings.Contains(r.body, c.want) || strings.Count(r.body, `"seq"`) > 1 {
			t.Errorf("%s: %d %s", c.query, r.status, r.body)
		}
	}
}

// TestAuditParameters: what nothing reads is refused, and the field is named.
func TestAuditParameters(t *testing.T) {
	w := newWorld(t)
	for _, c := range []struct{ path, field string }{
		{"/v1/audit/events?query=&order=newest&limit=1&details=false", ""},
		{"/v1/audit/events?order=oldest", ""},
		{"/v1/audit/events?order=up", "order"},
		{"/v1/audit/events?team=red", "team"},
		{"/v1/audit/events?limit=0", "limit"},
		{"/v1/audit/events?nextToken=x", "nextToken"},
		{"/v1/audit/events?details=yes", "details"},
		{"/v1/audit/events?query=type%3Dexec.strat", "query"},
		{"/v1/audit/events?query=sandbox%3Di*", "query"},
		{"/v1/audit/follow?until=1", "until"},
	} {
		r := w.as(w.operator, "GET", c.path, "")
		if c.field == "" && r.status != 200 || c.field != "" && (r.status != 400 || !strings.Contains(r.body, `"field":"`+c.field+`"`)) {
			t.Errorf("%s: %d %s", c.path, r.status, r.body)
		}
	}
}
