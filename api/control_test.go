package api_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"regexp"
	"strings"
	"testing"
	"time"

	"airlock.dev/airlock"
	"airlock.dev/airlock/api"
	"github.com/google/go-cmp/cmp"
)

func TestCreateAndInfo(t *testing.T) {
	w := newWorld(t)
	r := w.as(w.client, "POST", "/v2/sandboxes", `{
		"templateID": "base", "timeout": 60, "metadata": {"a b": "c&d"}, "envVars": {"K": "V"}, "unknown": [1],
		"allow_internet_access": false, "network": {"allowOut": ["example.com", "1.1.1.1"], "denyOut": ["10.0.0.0/8"], "httpsPorts": [8443]},
		"autoPause": false, "autoResume": {"enabled": false}, "mcp": null, "volumeMounts": [], "iam": {"tokens": {}},
		"limits": {"cpus": 0.5, "memoryMB": 128}}`)
	var sb map[string]any
	if err := json.Unmarshal([]byte(r.body), &sb); err != nil || r.status != 201 {
		t.Fatalf("create: %d %s", r.status, r.body)
	}
	id, _ := sb["sandboxID"].(string)
	token, _ := sb["envdAccessToken"].(string)
	if !regexp.MustCompile(`^i[a-z0-9]{20}$`).MatchString(id) || len(token) < 26 {
		t.Errorf("id %q, token %q", id, token)
	}
	want := map[string]any{"sandboxID": id, "templateID": "base", "clientID": "airlock", "domain": "box.test:8443", "envdVersion": "0.6.13", "envdAccessToken": token}
	if diff := cmp.Diff(want, sb); diff != "" {
		t.Errorf("create (-want +got):\n%s", diff)
	}

	r = w.as(w.client, "GET", "/sandboxes/"+id, "")
	var info map[string]any
	if err := json.Unmarshal([]byte(r.body), &info); err != nil || r.status != 200 {
		t.Fatalf("info: %d %s", r.status, r.body)
	}
	for name, life := range map[string]time.Duration{"startedAt": 0, "endAt": time.Minute} {
		at, err := time.Parse(time.RFC3339, info[name].(string))
		if err != nil || time.Until(at)-life > time.Second || time.Until(at)-life < -20*time.Second {
			t.Errorf("%s = %v", name, info[name])
		}
		delete(info, name)
	}
	want = map[string]any{
		"sandboxID": id, "templateID": "base", "clientID": "airlock", "domain": "box.test:8443", "envdVersion": "0.6.13", "envdAccessToken": token, "state": "running",
		"cpuCount": 1.0, "memoryMB": 128.0, "diskSizeMB": 1024.0, "networkBytes": 0.0, "metadata": map[string]any{"a b": "c&d"}, "allowInternetAccess": false,
		"network":   map[string]any{"allowOut": []any{"example.com", "1.1.1.1"}, "denyOut": []any{"10.0.0.0/8"}, "httpsPorts": []any{8443.0}},
		"lifecycle": map[string]any{"onTimeout": "kill", "autoResume": false},
		"limits":    map[string]any{"cpus": 0.5, "memoryMB": 128.0, "diskMB": 1024.0, "processes": 256.0, "openFiles": 1024.0, "outputBytes": float64(1 << 30)},
	}
	if diff := cmp.Diff(want, info); diff != "" {
		t.Errorf("info (-want +got):\n%s", diff)
	}
	if r := w.as(w.client, "GET", "/sandboxes/"+id+"-client", ""); r.status != 200 {
		t.Errorf("info by the legacy id: %d %s", r.status, r.body)
	}
	missing := fmt.Sprintf(`{"code":404,"message":"Sandbox \"%s\" doesn't exist or you don't have access to it","error_code":"not_found"}`, id)
	for _, call := range [][3]string{
		{"GET", "/sandboxes/" + id, ""}, {"DELETE", "/sandboxes/" + id, ""}, {"GET", "/v2/sandboxes/" + id + "/logs", ""},
		{"POST", "/sandboxes/" + id + "/timeout", `{"timeout":1}`}, {"POST", "/sandboxes/" + id + "/refreshes", `{}`},
		{"POST", "/sandboxes/" + id + "/connect", `{"timeout":1}`}, {"POST", "/v2/sandboxes/" + id + "/connect", ``},
	} {
		w.as(w.other, call[0], call[1], call[2]).want(t, "another team's "+call[0]+" "+call[1], 404, missing)
	}
}

func TestCreateRefusals(t *testing.T) {
	w := newWorld(t)
	for _, c := range []struct{ body, want string }{
		{``, `{"code":400,"message":"templateID is missing: name a template such as base","error_code":"invalid_argument","field":"templateID"}`},
		{`null`, `{"code":400,"message":"templateID is missing: name a template such as base","error_code":"invalid_argument","field":"templateID"}`},
		{`[]`, `{"code":400,"message":"the body is an array where an object is expected","error_code":"invalid_argument"}`},
		{"{\"templateID\": \"base\",\n  \"timeout\": }", `{"code":400,"message":"the body is not valid JSON at line 2, column 14: invalid character '}' looking for beginning of value","error_code":"invalid_argument"}`},
		{`{"templateID":"base"`, `{"code":400,"message":"the body is not valid JSON at line 1, column 20: unexpected end of JSON input","error_code":"invalid_argument"}`},
		{`{"templateID":"base"} x`, `{"code":400,"message":"the body is not valid JSON at line 1, column 23: invalid character 'x' after top-level value","error_code":"invalid_argument"}`},
		{"{\"templateID\":\"\xff\"}", `{"code":400,"message":"the body is not valid UTF-8","error_code":"invalid_argument"}`},
		{`{"templateID":7}`, `{"code":400,"message":"templateID is a number where a string is expected, at line 1, column 15","error_code":"invalid_argument","field":"templateID"}`},
		{`{"templateID":"base","timeout":1.5}`, `{"code":400,"message":"timeout is number 1.5 where a whole number is expected, at line 1, column 34","error_code":"invalid_argument","field":"timeout"}`},
		{`{"templateID":"base","timeout":0}`, `{"code":400,"message":"Timeout must be greater than 0","error_code":"invalid_argument","field":"timeout"}`},
		{`{"templateID":"base","timeout":-9223372036854775808}`, `{"code":400,"message":"Timeout must be greater than 0","error_code":"invalid_argument","field":"timeout"}`},
		{`{"templateID":"base","timeout":9223372036854775807}`, `{"code":400,"message":"Timeout cannot be greater than 24 hours","error_code":"invalid_argument","field":"timeout"}`},
		{`{"templateID":"base","timeout":86401}`, `{"code":400,"message":"Timeout cannot be greater than 24 hours","error_code":"invalid_argument","field":"timeout"}`},
		{`{"templateID":"base","metadata":{"a":1}}`, `{"code":400,"message":"metadata is a number where a string is expected, at line 1, column 38","error_code":"invalid_argument","field":"metadata"}`},
		{`{"templateID":"base","metadata":{"":"1"}}`, `{"code":400,"message":"metadata has the name \"\": use names of 1 to 256 bytes","error_code":"invalid_argument","field":"metadata"}`},
		{`{"templateID":"base","envVars":{"A=B":"1"}}`, `{"code":400,"message":"envVars has \"A=B\", which is no variable: use names without = and values without NUL","error_code":"invalid_argument","field":"envVars"}`},
		{`{"templateID":"base","metadata":{"a":"` + strings.Repeat("x", 65536) + `"}}`, `{"code":400,"message":"metadata has 65537 bytes: use at most 65536","error_code":"invalid_argument","field":"metadata"}`},
		{`{"templateID":"` + strings.Repeat("x", 1<<20) + `"}`, `{"code":413,"message":"the body is larger than 1048576 bytes","error_code":"too_large"}`},
		{`{"templateID":"base","limits":{"memoryMB":1}}`, `{"code":400,"message":"limits.memoryMB is 1: give a whole number from 64 to 262144","error_code":"invalid_argument","field":"limits.memoryMB"}`},
		{`{"templateID":"base","limits":{"cpus":"2"}}`, `{"code":400,"message":"limits.cpus is a string where a number is expected, at line 1, column 41","error_code":"invalid_argument","field":"limits.cpus"}`},
		{`{"templateID":"nope"}`, `{"code":404,"message":"template 'nope' not found: use base","error_code":"not_found","field":"templateID"}`},
		{`{"templateID":"base","autoPause":true}`, `{"code":501,"message":"autoPause is not supported by this Airlock yet: leave it out","error_code":"unimplemented","field":"autoPause"}`},
		{`{"templateID":"base","mcp":{"x":{}}}`, `{"code":501,"message":"mcp is not supported by this Airlock yet: leave it out","error_code":"unimplemented","field":"mcp"}`},
		{`{"templateID":"base","volumeMounts":[{"name":"v","path":"/v"}]}`, `{"code":501,"message":"volumeMounts is not supported by this Airlock yet: leave it out","error_code":"unimplemented","field":"volumeMounts"}`},
		{`{"templateID":"base","autoPauseMemory":true,"autoResume":{"enabled":true}}`, `{"code":501,"message":"autoResume is not supported by this Airlock yet: leave it out","error_code":"unimplemented","field":"autoResume"}`},
		{`{"templateID":"base","network":{"dnsServers":["1.1.1.1"]}}`, `{"code":400,"message":"network.dnsServers cannot be chosen, since where names lead is the operator's to say: leave it out, the gateway answers whichever server is asked; for other traffic to a server put its address into network.allowOut","error_code":"invalid_argument","field":"network.dnsServers"}`},
		{`{"templateID":"base","network":{"egressProxy":{"address":"a"}}}`, `{"code":400,"message":"network.egressProxy.address is not the address of a SOCKS5 proxy: give a host and a port such as proxy.example.com:1080","error_code":"invalid_argument","field":"network.egressProxy.address"}`},
		{`{"templateID":"base","network":{"denyOut":["example.com"]}}`, `{"code":400,"message":"network.denyOut has \"example.com\": give IP addresses and CIDR networks; domains can only be allowed","error_code":"invalid_argument","field":"network.denyOut"}`},
		{`{"templateID":"base","network":{"allowOut":["example.com"]}}`, `{"code":400,"message":"network.allowOut has the domain \"example.com\", which means nothing unless all other traffic is denied: add \"0.0.0.0/0\" to network.denyOut","error_code":"invalid_argument","field":"network.allowOut"}`},
		{`{"templateID":"base","network":{"allowOut":["a b"]}}`, `{"code":400,"message":"network.allowOut has \"a b\": give IP addresses, CIDR networks and domains such as *.example.com","error_code":"invalid_argument","field":"network.allowOut"}`},
		{`{"templateID":"base","limits":{"memoryMB":20000}}`, ``},
	} {
		r := w.as(w.client, "POST", "/v2/sandboxes", c.body)
		if c.want == "" { // control's words
			if r.status != 429 || !strings.Contains(r.body, "memory") {
				t.Errorf("create %.60s: %d %s", c.body, r.status, r.body)
			}
			continue
		}
		var status int
		fmt.Sscanf(c.want, `{"code":%d`, &status)
		r.want(t, fmt.Sprintf("create %.60s", c.body), status, c.want)
	}
	w.as(w.client, "GET", "/sandboxes", "").want(t, "list after refusals", 200, `[]`)
}

func TestRoles(t *testing.T) {
	w := newWorld(t)
	missing := `{"code":401,"message":"the API key is missing: send it in the header X-API-KEY","error_code":"unauthenticated"}`
	unknown := `{"code":401,"message":"the API key is not known","error_code":"unauthenticated"}`
	w.do("GET", "/health", "").want(t, "health", 204, "")
	w.do("POST", "/v2/sandboxes", `{"templateID":"base"}`).want(t, "no key", 401, missing)
	w.as("e2b_0000", "POST", "/v2/sandboxes", `{"templateID":"base"}`).want(t, "wrong key", 401, unknown)
	w.as(w.operator, "POST", "/v2/sandboxes", `{"templateID":"base"}`).want(t, "operator creates", 403,
		`{"code":403,"message":"this API key has the role operator and the call needs client","error_code":"permission_denied"}`)
	w.as(w.client, "GET", "/v1/keys", "").want(t, "client lists keys", 403,
		`{"code":403,"message":"this API key has the role client and the call needs operator","error_code":"permission_denied"}`)
	w.as(w.client, "GET", "/nowhere", "").want(t, "no route", 404, `{"code":404,"message":"there is no GET /nowhere","error_code":"not_found"}`)
	w.as(w.client, "PATCH", "/sandboxes", "").want(t, "no method", 404, `{"code":404,"message":"there is no PATCH /sandboxes","error_code":"not_found"}`)
	for _, id := range []string{"..%2f..", "A", "%00", strings.Repeat("a", 33), "a%2Fb"} {
		if r := w.as(w.client, "GET", "/sandboxes/"+id, ""); r.status != 404 || !strings.Contains(r.body, "doesn't exist or you don't have access to it") {
			t.Errorf("id %q: %d %s", id, r.status, r.body)
		}
	}
}

func TestKeysRoutes(t *testing.T) {
	w := newWorld(t)
	r := w.as(w.operator, "POST", "/v1/keys", `{"team":"green","role":"client","name":"ci"}`)
	var made struct{ ID, Key, Team, Role, Name string }
	if err := json.Unmarshal([]byte(r.body), &made); err != nil || r.status != 201 || made.Team != "green" || made.Role != "client" || made.Name != "ci" {
		t.Fatalf("create: %d %s", r.status, r.body)
	}
	w.as(made.Key, "GET", "/sandboxes", "").want(t, "the new key", 200, `[]`)
	var ids []string
	for token := ""; ; {
		r := w.as(w.operator, "GET", "/v1/keys?limit=3&nextToken="+token, "")
		var page []struct{ ID string }
		if err := json.Unmarshal([]byte(r.body), &page); err != nil || r.status != 200 || strings.Contains(r.body, "e2b_") {
			t.Fatalf("list: %d %s", r.status, r.body)
		}
		for _, k := range page {
			ids = append(ids, k.ID)
		}
		if token = r.header.Get("X-Next-Token"); token == "" {
			break
		}
	}
	if len(ids) != 5 {
		t.Errorf("ids = %v", ids)
	}
	w.as(w.operator, "DELETE", "/v1/keys/"+made.ID, "").want(t, "revoke", 204, "")
	w.as(made.Key, "GET", "/sandboxes", "").want(t, "the revoked key", 401, `{"code":401,"message":"the API key is not known","error_code":"unauthenticated"}`)
	w.as(w.operator, "POST", "/v1/keys", `{"team":"Green","role":"client"}`).want(t, "bad team", 400,
		`{"code":400,"message":"\"Green\" is not a team name: use 1 to 39 of a-z, 0-9 and -, not beginning with -","error_code":"invalid_argument","field":"team"}`)
}

// Who may open the operator's socket is the operator, unless they come with a
// key: then they are who it belongs to, and no more.
func TestKeyOnTheSocketCounts(t *testing.T) {
	w := newWorld(t)
	for _, c := range []struct {
		name, key string
		path      string
		want      int
	}{
		{"the operator's own", "", "/v1/keys", 200},
		{"the operator's own, as a client", "", "/sandboxes", 200},
		{"an operator's key", w.operator, "/v1/keys", 200},
		{"a client's key", w.client, "/sandboxes", 200},
		{"a client's key, as an operator", w.client, "/v1/keys", 403},
		{"an auditor's key, as a client", w.auditor, "/sandboxes", 403},
		{"a wrong key", "e2b_0000", "/v1/keys", 401},
	} {
		ctx := api.WithPrincipal(t.Context(), airlock.Principal{Team: "red", Role: airlock.Operator, KeyID: "local"})
		req := httptest.NewRequestWithContext(ctx, "GET", c.path, nil)
		if c.key != "" {
			req.Header.Set("X-API-KEY", c.key)
		}
		got := httptest.NewRecorder()
		w.handler.ServeHTTP(got, req)
		if got.Code != c.want {
			t.Errorf("%s: GET %s = %d %s, want %d", c.name, c.path, got.Code, got.Body, c.want)
		}
	}
}

func TestLifetime(t *testing.T) {
	w := newWorld(t)
	id, _ := w.create(`{"templateID":"base","timeout":100}`)
	left := func() time.Duration {
		t.Helper()
		var info struct{ EndAt time.Time }
		if r := w.as(w.client, "GET", "/sandboxes/"+id, ""); json.Unmarshal([]byte(r.body), &info) != nil {
			t.Fatalf("info: %s", r.body)
		}
		return time.Until(info.EndAt).Round(10 * time.Second)
	}
	for _, c := range []struct {
		path, body string
		status     int
		left       time.Duration
	}{
		{"/sandboxes/" + id + "/connect", `{"timeout":10}`, 200, 100 * time.Second},
		{"/sandboxes/" + id + "/connect", `{}`, 400, 100 * time.Second},
		{"/sandboxes/" + id + "/connect", `{"timeout":200}`, 200, 200 * time.Second},
		{"/v2/sandboxes/" + id + "/connect", ``, 200, 300 * time.Second},
		{"/sandboxes/" + id + "/timeout", `{"timeout":50}`, 204, 50 * time.Second},
		{"/sandboxes/" + id + "/timeout", `{}`, 400, 50 * time.Second},
		{"/sandboxes/" + id + "/timeout", `{"timeout":86401}`, 400, 50 * time.Second},
		{"/sandboxes/" + id + "/refreshes", `{"duration":400}`, 204, 400 * time.Second},
		{"/sandboxes/" + id + "/refreshes", ``, 204, 400 * time.Second},
		{"/sandboxes/" + id + "/refreshes", `{"duration":3601}`, 400, 400 * time.Second},
	} {
		if r := w.as(w.client, "POST", c.path, c.body); r.status != c.status || left() != c.left {
			t.Errorf("%s %s: %d %s, left %v, want %v", c.path, c.body, r.status, r.body, left(), c.left)
		}
	}
	w.as(w.client, "POST", "/sandboxes/"+id+"/timeout", `{"timeout":0}`).want(t, "timeout now", 204, "")
	for range 100 {
		if r := w.as(w.client, "GET", "/sandboxes/"+id, ""); r.status == 404 {
			return
		}
		time.Sleep(20 * time.Millisecond)
	}
	t.Error("the sandbox outlived a timeout of 0")
}

func TestKill(t *testing.T) {
	w := newWorld(t)
	id, token := w.create(`{"templateID":"base"}`)
	w.do("GET", "/health", "", address(id, "")...).want(t, "health", 204, "")
	w.as(w.client, "DELETE", "/sandboxes/"+id, "").want(t, "kill", 204, "")
	gone := fmt.Sprintf(`{"code":502,"message":"The sandbox was not found","sandboxId":"%s"}`, id)
	w.do("GET", "/health", "", address(id, "")...).want(t, "health after", 502, gone)
	w.do("GET", "/files?path=x", "", address(id, token)...).want(t, "files after", 502, gone)
	w.as(w.client, "DELETE", "/sandboxes/"+id, "").want(t, "kill again", 404,
		fmt.Sprintf(`{"code":404,"message":"Sandbox \"%s\" doesn't exist or you don't have access to it","error_code":"not_found"}`, id))
}

func TestInternalErrorsAreNotShown(t *testing.T) {
	w := newWorld(t)
	w.driver.fail = errors.New("secret path /var/lib")
	r := w.as(w.client, "POST", "/v2/sandboxes", `{"templateID":"base"}`)
	m := regexp.MustCompile(`^\{"code":500,"message":"internal error \(the server's log has it as ([A-Z2-7]{10})\)","error_code":"internal"\}$`).FindStringSubmatch(r.body)
	if r.status != 500 || m == nil {
		t.Fatalf("%d %s", r.status, r.body)
	}
	if log := w.log.String(); !strings.Contains(log, "id="+m[1]) || !strings.Contains(log, "secret path") {
		t.Errorf("log: %s", log)
	}
	w.driver.fail = &airlock.Error{Code: airlock.Exhausted, Message: "no memory left", Hint: "wait", RetryAfter: 7}
	r = w.as(w.client, "POST", "/v2/sandboxes", `{"templateID":"base"}`)
	r.want(t, "exhausted", 429, `{"code":429,"message":"no memory left: wait","error_code":"resource_exhausted"}`)
	if got := r.header.Get("Retry-After"); got != "7" {
		t.Errorf("Retry-After = %q", got)
	}
}

func TestList(t *testing.T) {
	w := newWorld(t)
	var ids []string
	for i := range 5 {
		id, _ := w.create(fmt.Sprintf(`{"templateID":"base","metadata":{"n":"%d","odd":"%v","a b":"c&d=é+"}}`, i, i%2 == 1))
		ids = append([]string{id}, ids...)
		time.Sleep(2 * time.Millisecond)
	}
	list := func(query string) (got []string, header http.Header) {
		t.Helper()
		r := w.as(w.client, "GET", "/v2/sandboxes"+query, "")
		var page []struct{ SandboxID string }
		if err := json.Unmarshal([]byte(r.body), &page); err != nil || r.status != 200 {
			t.Fatalf("list %s: %d %s", query, r.status, r.body)
		}
		for _, sb := range page {
			got = append(got, sb.SandboxID)
		}
		return got, r.header
	}
	for _, c := range []struct {
		query string
		want  []string
	}{
		{"", ids},
		{"?metadata=odd%3Dtrue", []string{ids[1], ids[3]}},
		{"?metadata=odd%3Dtrue%26n%3D3", []string{ids[1]}},
		{"?metadata=a%252520b%3Dc%252526d%25253D%2525C3%2525A9%25252B", ids}, // as the SDK sends it
		{"?metadata=none%3D", nil},
		{"?state=running,paused", ids},
		{"?state=paused&state=running", ids},
		{"?state=paused", nil},
		{"?template=base", ids},
		{"?template=other", nil},
		{"?order=asc", []string{ids[4], ids[3], ids[2], ids[1], ids[0]}},
		{"?startedAfter=2020-01-01T00:00:00.000Z", ids},
		{"?startedAfter=2120-01-01T00:00:00.000Z", nil},
	} {
		if got, header := list(c.query); !cmp.Equal(got, c.want) || header.Get("X-Next-Token") != "" {
			t.Errorf("list %s: %v, want %v", c.query, got, c.want)
		}
	}
	for _, order := range []string{"desc", "asc"} {
		var all []string
		var sizes []int
		for token := ""; ; {
			page, header := list("?limit=2&order=" + order + "&nextToken=" + token)
			all, sizes = append(all, page...), append(sizes, len(page))
			if got := header.Get("X-Total-Running"); got != "5" {
				t.Errorf("X-Total-Running = %q", got)
			}
			if token = header.Get("X-Next-Token"); token == "" {
				break
			}
		}
		if !cmp.Equal(sizes, []int{2, 2, 1}) || len(all) != 5 || (all[0] == ids[0]) != (order == "desc") {
			t.Errorf("pages %s: %v %v", order, sizes, all)
		}
	}
	// a page goes on where it was although its last sandbox is gone
	page, header := list("?limit=2")
	w.as(w.client, "DELETE", "/sandboxes/"+page[1], "")
	if next, _ := list("?limit=2&nextToken=" + header.Get("X-Next-Token")); !cmp.Equal(next, ids[2:4]) {
		t.Errorf("page after a kill = %v", next)
	}
	for query, field := range map[string]string{
		"?limit=0": "limit", "?limit=101": "limit", "?limit=x": "limit", "?state=dead": "state", "?order=up": "order", "?nextToken=!": "nextToken",
		"?nextToken=MSBBLw": "nextToken", "?template=a:b": "template", "?startedAfter=yesterday": "startedAfter", "?metadata=novalue": "metadata", "?metadata=%2525zz%3D1": "metadata",
	} {
		if r := w.as(w.client, "GET", "/v2/sandboxes"+query, ""); r.status != 400 || !strings.Contains(r.body, `"field":"`+field+`"`) {
			t.Errorf("list %s: %d %s", query, r.status, r.body)
		}
	}
	if r := w.as(w.other, "GET", "/v2/sandboxes", ""); r.body != "[]" || r.header.Get("X-Total-Running") != "0" {
		t.Errorf("another team's list: %s", r.body)
	}
}

func TestLogs(t *testing.T) {
	w := newWorld(t)
	id, _ := w.create(`{"templateID":"base"}`)
	var page struct {
		Logs []struct{ Level, Message string }
	}
	for _, query := range []string{"", "?limit=1&direction=forward", "?direction=backward&cursor=99999999999999", "?search=created&level=info"} {
		r := w.as(w.client, "GET", "/v2/sandboxes/"+id+"/logs"+query, "")
		if json.Unmarshal([]byte(r.body), &page) != nil || r.status != 200 || len(page.Logs) == 0 || page.Logs[0].Message != "sandbox created" {
			t.Errorf("logs %s: %d %s", query, r.status, r.body)
		}
	}
	w.as(w.client, "GET", "/v2/sandboxes/"+id+"/logs?cursor=99999999999999", "").want(t, "logs after all", 200, `{"logs":[]}`)
}

// Every call of the SDKs that Airlock does not have yet says so, and none is
// mistaken for a name that does not exist.
func TestUnimplemented(t *testing.T) {
	w := newWorld(t)
	for _, c := range []struct{ what, calls string }{
		{"pausing sandboxes", "POST /sandboxes/i1/pause, POST /sandboxes/i1/resume"},
		{"forking sandboxes", "POST /sandboxes/i1/fork"},
		{"snapshots", "POST /sandboxes/i1/snapshots, GET /snapshots?sandboxID=i1&limit=10"},
		{"templates of your own", `GET /templates, GET /v2/templates, POST /v3/templates, GET /templates/t/files/hash, POST /v2/templates/t/builds/b,
			GET /templates/t/builds/b/status?logsOffset=0, GET /templates/t/builds/b/logs, POST /templates/tags, DELETE /templates/tags, GET /templates/t/tags,
			PATCH /templates/t, DELETE /templates/base%2Fsnap%3Adefault`},
		{"volumes", "POST /volumes, GET /volumes, GET /volumes/v, DELETE /volumes/v"},
		{"secrets", "POST /secrets, GET /secrets?limit=1, GET /secrets/s, POST /secrets/s, DELETE /secrets/s"},
	} {
		for call := range strings.SplitSeq(c.calls, ",") {
			method, path, _ := strings.Cut(strings.TrimSpace(call), " ")
			w.as(w.client, method, path, "{}").want(t, call, 501, fmt.Sprintf(`{"code":501,"message":"this Airlock does not support %s yet","error_code":"unimplemented"}`, c.what))
			if r := w.do(method, path, "{}"); r.status != 401 {
				t.Errorf("%s without a key: %d %s", call, r.status, r.body)
			}
		}
	}
}

func TestTemplateAlias(t *testing.T) {
	w := newWorld(t)
	w.as(w.client, "GET", "/templates/aliases/base", "").want(t, "base", 200, `{"public":true,"templateID":"base"}`)
	w.as(w.client, "GET", "/templates/aliases/a%2Fb", "").want(t, "unknown", 404, `{"code":404,"message":"template 'a/b' not found","error_code":"not_found"}`)
}

func TestIdempotencyKey(t *testing.T) {
	w := newWorld(t)
	create := func(key, body string) reply {
		return w.do("POST", "/v2/sandboxes", body, "X-API-KEY", w.client, "Idempotency-Key", key)
	}
	first := create("k-1", `{"templateID":"base","timeout":60}`)
	if again := create("k-1", `{"timeout":60, "templateID":"base"}`); first.status != 201 || again.status != 201 || again.body != first.body {
		t.Errorf("%d %s, then %d %s", first.status, first.body, again.status, again.body)
	}
	create("k-1", `{"templateID":"base","timeout":61}`).want(t, "another create", 409,
		`{"code":409,"message":"the Idempotency-Key \"k-1\" was used for a different create: use a new key for each create","error_code":"conflict"}`)
	create("K", `{"templateID":"base"}`).want(t, "no key", 400,
		`{"code":400,"message":"Idempotency-Key is \"K\": use 1 to 255 small letters, digits and hyphens","error_code":"invalid_argument","field":"Idempotency-Key"}`)
}
