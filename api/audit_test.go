package api_test

import (
	"encoding/json"
	"testing"
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
