package api_test

import (
	"fmt"
	"strings"
	"testing"
	"time"
)

func TestMetrics(t *testing.T) {
	w := newWorld(t)
	id, _ := w.create(`{"templateID":"base"}`)
	now := time.Now().Unix()
	w.as(w.client, "GET", fmt.Sprintf("/sandboxes/%s/metrics?start=%d&end=%d", id, now-60, now), "").want(t, "before the first sample", 200, `[]`)
	for _, query := range []string{"start=x", "end=-1", "start=99999999999999", fmt.Sprintf("start=%d&end=%d", now, now-9)} {
		if r := w.as(w.client, "GET", "/sandboxes/"+id+"/metrics?"+query, ""); r.status != 400 || !strings.Contains(r.body, `"code":400`) {
			t.Errorf("%s: %d %s", query, r.status, r.body)
		}
	}
	for _, key := range []string{w.other, w.client} {
		path := "/sandboxes/" + id + "/metrics"
		if key == w.client {
			path = "/sandboxes/i00000000000000000000/metrics"
		}
		if r := w.as(key, "GET", path, ""); r.status != 404 || !strings.Contains(r.body, `"code":404`) {
			t.Errorf("%s: %d %s", path, r.status, r.body)
		}
	}
	w.as(w.client, "GET", "/sandboxes/metrics?sandbox_ids="+id+",i00000000000000000000", "").want(t, "all", 200, `{"sandboxes":{}}`)
	for _, ids := range []string{"", strings.Repeat("a,", 101)} {
		if r := w.as(w.client, "GET", "/sandboxes/metrics?sandbox_ids="+ids, ""); r.status != 400 {
			t.Errorf("%.10s: %d %s", ids, r.status, r.body)
		}
	}
	time.Sleep(5500 * time.Millisecond) // the clock of all sandboxes
	if r := w.as(w.client, "GET", "/sandboxes/metrics?sandbox_ids="+id, ""); r.status != 200 || !strings.Contains(r.body, `"cpuCount":2,"cpuUsedPct":0,"memUsed":0,"memTotal":536870912`) {
		t.Errorf("all: %d %s", r.status, r.body)
	}
	w.as(w.other, "GET", "/sandboxes/metrics?sandbox_ids="+id, "").want(t, "of another team", 200, `{"sandboxes":{}}`)
	if r := w.as(w.client, "GET", "/sandboxes/"+id+"/metrics", ""); r.status != 200 || strings.Count(r.body, `"timestampUnix":`) != 1 {
		t.Errorf("after a sample: %d %s", r.status, r.body)
	}
	w.as(w.client, "GET", fmt.Sprintf("/sandboxes/%s/metrics?end=%d", id, now-9), "").want(t, "an earlier range", 200, `[]`)
}

func TestTeams(t *testing.T) {
	w := newWorld(t)
	want := func(key string) string {
		return fmt.Sprintf(`[{"apiKey":%q,"isDefault":true,"name":"red","teamID":"red"}]`, key)
	}
	w.as(w.client, "GET", "/teams", "").want(t, "by API key", 200, want(w.client))
	w.do("GET", "/teams", "", "Authorization", "Bearer "+w.client).want(t, "as a bearer", 200, want(w.client))
	for _, header := range [][]string{{}, {"Authorization", "Bearer x"}, {"Authorization", w.client[:9]}} {
		if r := w.do("GET", "/teams", "", header...); r.status != 401 {
			t.Errorf("%v: %d %s", header, r.status, r.body)
		}
	}
}

// TestConnectNeverShortens: connect and refresh extend a life, timeout sets it.
func TestConnectNeverShortens(t *testing.T) {
	w := newWorld(t)
	id, token := w.create(`{"templateID":"base","timeout":600}`)
	left := func() time.Duration {
		r := w.as(w.client, "GET", "/sandboxes/"+id, "")
		_, rest, _ := strings.Cut(r.body, `"endAt":"`)
		text, _, _ := strings.Cut(rest, `"`)
		end, err := time.Parse(time.RFC3339, text)
		if err != nil {
			t.Fatalf("%v in %s", err, r.body)
		}
		return time.Until(end).Round(10 * time.Second)
	}
	for _, c := range []struct {
		path, body string
		status     int
		left       time.Duration
	}{
		{"/v2/sandboxes/%s/connect", `{"timeout":30}`, 200, 600 * time.Second},
		{"/v2/sandboxes/%s/connect", `{}`, 200, 600 * time.Second}, // 300 s
		{"/v2/sandboxes/%s/connect", ``, 200, 600 * time.Second},
		{"/sandboxes/%s/connect", `{"timeout":900}`, 200, 900 * time.Second},
		{"/sandboxes/%s/connect", `{}`, 400, 900 * time.Second},
		{"/v2/sandboxes/%s/connect", `{"timeout":0}`, 400, 900 * time.Second},
		{"/v2/sandboxes/%s/connect", `{"timeout":86401}`, 400, 900 * time.Second},
		{"/sandboxes/%s/refreshes", `{"duration":60}`, 204, 900 * time.Second},
		{"/sandboxes/%s/refreshes", `{"duration":3601}`, 400, 900 * time.Second},
		{"/sandboxes/%s/refreshes", `{"duration":3600}`, 204, 3600 * time.Second},
		{"/sandboxes/%s/timeout", `{"timeout":100}`, 204, 100 * time.Second},
	} {
		r := w.as(w.client, "POST", fmt.Sprintf(c.path, id), c.body)
		if r.status != c.status || left() != c.left {
			t.Errorf("%s %s: %d %s; %v are left, want %v", c.path, c.body, r.status, r.body, left(), c.left)
		}
		if r.status == 200 && (!strings.Contains(r.body, token) || !strings.Contains(r.body, id)) {
			t.Errorf("%s %s: %s", c.path, c.body, r.body)
		}
	}
}
