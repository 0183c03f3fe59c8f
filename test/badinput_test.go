package test

import (
	"encoding/json"
	"net/http"
	"strings"
	"testing"
	"time"

	"airlock.dev/airlock"
	"airlock.dev/airlock/client"
)

// TestBadInput sends what no client should. Each answer has the right status,
// a code for programs and, where one field is at fault, its name.
func TestBadInput(t *testing.T) {
	s := startServer(t, noPool)
	key := s.key("default", airlock.Client)
	const v2 = "/v2/sandboxes"
	create400 := func(field string) answer { return answer{400, "invalid_argument", field} }
	limit := func(l string) string { return `{"templateID":"base","limits":{` + l + `}}` }
	missing := answer{404, "not_found", ""}
	some := "/sandboxes/i00000000000000000000"
	for _, c := range []struct {
		name, method, path, body string
		want                     answer
	}{
		{"unknown template", "POST", v2, `{"templateID":"no-such"}`, answer{404, "not_found", "templateID"}},
		{"no template", "POST", v2, `{}`, create400("templateID")},
		{"no body", "POST", v2, ``, create400("templateID")},
		{"template of a wrong type", "POST", v2, `{"templateID":7}`, create400("templateID")},

		{"negative cpus", "POST", v2, limit(`"cpus":-1`), create400("limits.cpus")},
		{"few cpus", "POST", v2, limit(`"cpus":0.01`), create400("limits.cpus")},
		{"huge cpus", "POST", v2, limit(`"cpus":1e300`), create400("limits.cpus")},
		{"text for cpus", "POST", v2, limit(`"cpus":"2"`), create400("limits.cpus")},
		{"negative memory", "POST", v2, limit(`"memoryMB":-512`), create400("limits.memoryMB")},
		{"little memory", "POST", v2, limit(`"memoryMB":1`), create400("limits.memoryMB")},
		{"huge memory", "POST", v2, limit(`"memoryMB":9223372036854775807`), create400("limits.memoryMB")},
		{"memory beyond a number", "POST", v2, limit(`"memoryMB":9223372036854775808`), create400("limits.memoryMB")},
		{"half a MiB", "POST", v2, limit(`"memoryMB":512.5`), create400("limits.memoryMB")},
		{"memory that this host has not", "POST", v2, limit(`"memoryMB":262144`), answer{429, "resource_exhausted", "memory"}},
		{"negative disk", "POST", v2, limit(`"diskMB":-1`), create400("limits.diskMB")},
		{"huge disk", "POST", v2, limit(`"diskMB":1048577`), create400("limits.diskMB")},
		{"negative processes", "POST", v2, limit(`"processes":-1`), create400("limits.processes")},
		{"few processes", "POST", v2, limit(`"processes":7`), create400("limits.processes")},
		{"huge processes", "POST", v2, limit(`"processes":32769`), create400("limits.processes")},
		{"negative open files", "POST", v2, limit(`"openFiles":-1`), create400("limits.openFiles")},
		{"huge open files", "POST", v2, limit(`"openFiles":1048577`), create400("limits.openFiles")},
		{"negative output", "POST", v2, limit(`"outputBytes":-1`), create400("limits.outputBytes")},
		{"huge output", "POST", v2, limit(`"outputBytes":1099511627777`), create400("limits.outputBytes")},
		{"limits of a wrong type", "POST", v2, `{"templateID":"base","limits":[]}`, create400("limits")},

		{"timeout 0", "POST", v2, `{"templateID":"base","timeout":0}`, create400("timeout")},
		{"negative timeout", "POST", v2, `{"templateID":"base","timeout":-1}`, create400("timeout")},
		{"huge timeout", "POST", v2, `{"templateID":"base","timeout":86401}`, create400("timeout")},
		{"timeout that overflows", "POST", v2, `{"templateID":"base","timeout":9223372036854775807}`, create400("timeout")},
		{"timeout beyond a number", "POST", v2, `{"templateID":"base","timeout":1e30}`, create400("timeout")},
		{"text for a timeout", "POST", v2, `{"templateID":"base","timeout":"60"}`, create400("timeout")},
		{"half a second", "POST", v2, `{"templateID":"base","timeout":1.5}`, create400("timeout")},
		{"true for a timeout", "POST", v2, `{"templateID":"base","timeout":true}`, create400("timeout")},
		{"the first version's timeout", "POST", "/sandboxes", `{"templateID":"base","timeout":{}}`, create400("timeout")},

		{"metadata of a wrong type", "POST", v2, `{"templateID":"base","metadata":{"a":1}}`, create400("metadata")},
		{"metadata without a name", "POST", v2, `{"templateID":"base","metadata":{"":"x"}}`, create400("metadata")},
		{"much metadata", "POST", v2, `{"templateID":"base","metadata":{"a":"` + strings.Repeat("x", 1<<16) + `"}}`, create400("metadata")},
		{"a variable with =", "POST", v2, `{"templateID":"base","envVars":{"a=b":"x"}}`, create400("envVars")},
		{"a variable with NUL", "POST", v2, `{"templateID":"base","envVars":{"a":"\u0000"}}`, create400("envVars")},
		{"no address", "POST", v2, `{"templateID":"base","network":{"denyOut":["example.com"]}}`, create400("network.denyOut")},
		{"what is not there yet", "POST", v2, `{"templateID":"base","autoPause":true}`, answer{501, "unimplemented", "autoPause"}},

		{"no JSON", "POST", v2, `{"templateID":`, create400("")},
		{"text behind the JSON", "POST", v2, `{"templateID":"base"} x`, create400("")},
		{"a list", "POST", v2, `["base"]`, create400("")},
		{"no UTF-8", "POST", v2, "{\"templateID\":\"\xff\"}", create400("")},
		{"deep JSON", "POST", v2, strings.Repeat(`{"a":`, 100_000), create400("")},
		{"a large body", "POST", v2, `{"templateID":"` + strings.Repeat("x", 1<<20) + `"}`, answer{413, "too_large", ""}},

		{"unknown sandbox", "GET", some, ``, missing},
		{"kill of an unknown sandbox", "DELETE", some, ``, missing},
		{"timeout of an unknown sandbox", "POST", some + "/timeout", `{"timeout":9}`, missing},
		{"no timeout", "POST", some + "/timeout", `{}`, create400("timeout")},
		{"timeout too long", "POST", some + "/timeout", `{"timeout":86401}`, create400("timeout")},
		{"text for the timeout", "POST", some + "/timeout", `{"timeout":"9"}`, create400("timeout")},
		{"refresh by 0", "POST", some + "/refreshes", `{"duration":0}`, create400("duration")},
		{"refresh too long", "POST", some + "/refreshes", `{"duration":3601}`, create400("duration")},
		{"connect without a timeout", "POST", some + "/connect", `{}`, create400("timeout")},
		{"connect with a negative one", "POST", "/v2" + some + "/connect", `{"timeout":-5}`, create400("timeout")},
		{"pause", "POST", some + "/pause", ``, answer{501, "unimplemented", ""}},
		{"id with a path", "GET", "/sandboxes/..%2f..%2fetc%2fpasswd", ``, missing},
		{"id with NUL", "GET", "/sandboxes/i%00", ``, missing},
		{"id in capitals", "DELETE", "/sandboxes/IABC", ``, missing},
		{"long id", "GET", "/sandboxes/" + strings.Repeat("i", 5000), ``, missing},

		{"filter that is no pair", "GET", v2 + "?metadata=abc", ``, create400("metadata")},
		{"filter without a name", "GET", v2 + "?metadata=%3Dx", ``, create400("metadata")},
		{"filter that is not escaped", "GET", v2 + "?metadata=a%3D%25zz", ``, create400("metadata")},
		{"limit 0", "GET", v2 + "?limit=0", ``, create400("limit")},
		{"negative limit", "GET", v2 + "?limit=-1", ``, create400("limit")},
		{"huge limit", "GET", v2 + "?limit=101", ``, create400("limit")},
		{"text for a limit", "GET", v2 + "?limit=ten", ``, create400("limit")},
		{"token of nobody", "GET", v2 + "?nextToken=abc", ``, create400("nextToken")},
		{"unknown state", "GET", v2 + "?state=dead", ``, create400("state")},
		{"unknown order", "GET", v2 + "?order=up", ``, create400("order")},
		{"limit of logs", "GET", "/v2" + some + "/logs?limit=1001", ``, create400("limit")},
		{"cursor of logs", "GET", "/v2" + some + "/logs?cursor=x", ``, create400("cursor")},
		{"direction of logs", "GET", "/v2" + some + "/logs?direction=up", ``, create400("direction")},

		{"unknown route", "GET", "/v3/sandboxes", ``, missing},
		{"the root", "GET", "/", ``, missing},
		{"wrong method", "PUT", v2, `{}`, missing},
		{"wrong method of one", "PATCH", some, `{}`, missing},
		{"data plane without a sandbox", "GET", "/files?path=x", ``, missing},
		{"keys with a client's key", "POST", "/v1/keys", `{}`, answer{403, "permission_denied", ""}},
	} {
		t.Run(c.name, func(t *testing.T) {
			resp, body := s.ask(t, c.method, c.path, c.body, map[string]string{"X-API-KEY": key, "Content-Type": "application/json"})
			c.want.check(t, resp, body)
		})
	}

	for name, header := range map[string]map[string]string{
		"no key":                    {},
		"empty key":                 {"X-API-KEY": ""},
		"wrong key":                 {"X-API-KEY": "e2b_" + strings.Repeat("0", 40)},
		"half a key":                {"X-API-KEY": key[:len(key)-1]},
		"more than a key":           {"X-API-KEY": key + "0"},
		"long key":                  {"X-API-KEY": strings.Repeat("k", 30_000)},
		"half a key as a bearer":    {"Authorization": "Bearer " + key[:len(key)-1]},
		"access token in its place": {"X-Access-Token": key},
	} {
		t.Run(name, func(t *testing.T) {
			for _, c := range [][3]string{{"POST", v2, `{"templateID":"base"}`}, {"GET", v2, ""}, {"DELETE", some, ""}, {"GET", "/v1/keys", ""}} {
				resp, body := s.ask(t, c[0], c[1], c[2], header)
				answer{401, "unauthenticated", ""}.check(t, resp, body)
			}
		})
	}

	t.Run("keys", func(t *testing.T) {
		operator := s.key("default", airlock.Operator)
		for _, c := range []struct {
			method, path, body string
			want               answer
		}{
			{"POST", "/v1/keys", `{"team":"default","role":"king"}`, create400("role")},
			{"POST", "/v1/keys", `{"team":"../x","role":"client"}`, create400("team")},
			{"POST", "/v1/keys", `{"team":"","role":"client"}`, create400("team")},
			{"GET", "/v1/keys?limit=0", ``, create400("limit")},
			{"DELETE", "/v1/keys/no-such", ``, missing},
		} {
			resp, body := s.ask(t, c.method, c.path, c.body, map[string]string{"X-API-KEY": operator})
			c.want.check(t, resp, body)
		}
	})

	t.Run("data plane", func(t *testing.T) { badData(t, s, s.as(key)) })

	// 0 is no bad limit: it asks for the default, as leaving it out does.
	t.Run("limits of 0", func(t *testing.T) {
		resp, body := s.ask(t, "POST", v2, limit(`"cpus":0,"memoryMB":0,"diskMB":0,"processes":0,"openFiles":0,"outputBytes":0`), map[string]string{"X-API-KEY": key})
		var made client.Info
		if err := json.Unmarshal([]byte(body), &made); err != nil || resp.StatusCode != http.StatusCreated {
			t.Fatalf("%s, %v: %s", resp.Status, err, body)
		}
		sb, err := s.as(key).Get(t.Context(), made.ID)
		if err != nil || sb.Limits != airlock.DefaultLimits {
			t.Errorf("%+v, %v", sb, err)
		}
		if err := s.as(key).Kill(t.Context(), made.ID); err != nil {
			t.Error(err)
		}
	})

	// Nothing was half-created on the way.
	if list, err := s.as(key).List(t.Context(), nil); err != nil || len(list) != 0 {
		t.Errorf("sandboxes are left: %+v, %v", list, err)
	}
	eventually(t, "nothing is left", s.empty)
}

// answer is what is checked of an error of the control plane.
type answer struct {
	status      int
	code, field string
}

func (a answer) check(t *testing.T, resp *http.Response, body string) {
	t.Helper()
	var got struct {
		Code      int    `json:"code"`
		Message   string `json:"message"`
		ErrorCode string `json:"error_code"`
		Field     string `json:"field"`
	}
	if err := json.Unmarshal([]byte(body), &got); err != nil {
		t.Fatalf("%s, %v: %.300s", resp.Status, err, body)
	}
	if resp.StatusCode != a.status || got.Code != a.status || got.ErrorCode != a.code || got.Field != a.field || got.Message == "" {
		t.Errorf("%d, want %+v: %.300s", resp.StatusCode, a, body)
	}
	if len(body) > 2000 {
		t.Errorf("an error of %d bytes", len(body))
	}
}

// badData is TestBadInput for the data plane of a sandbox. As E2B's its errors
// have a status and a message, and no code of our own.
func badData(t *testing.T, s *running, c *client.Client) {
	sb, err := c.Create(t.Context(), client.CreateRequest{Timeout: 5 * time.Minute})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := sb.Close(); err != nil {
			t.Error(err)
		}
	}()
	with := func(pairs ...string) map[string]string {
		h := dataHeader(sb)
		for i := 0; i < len(pairs); i += 2 {
			h[pairs[i]] = pairs[i+1]
		}
		return h
	}
	octets := with("Content-Type", "application/octet-stream")
	start := with("Content-Type", "application/json")
	for _, c := range []struct {
		name, method, path, body string
		header                   map[string]string
		status                   int
		message                  string
	}{
		{"missing file", "GET", "/files?path=no-such", "", with(), 404, "path '/home/user/no-such' does not exist"},
		{"path outside", "GET", "/files?path=../../../../etc/shadow", "", with(), 404, "path '/etc/shadow' does not exist"},
		{"path of the host", "GET", "/files?path=/root/.profile", "", with(), 403, "permission denied"},
		{"path with NUL", "GET", "/files?path=a%00b", "", with(), 400, "path"},
		{"path that is no UTF-8", "GET", "/files?path=a%FFb", "", with(), 400, "the path is not valid UTF-8"},
		{"path that is not escaped", "GET", "/files?path=%zz", "", with(), 400, "the query is not readable"},
		{"user that is no UTF-8", "GET", "/files?path=x&username=%FF", "", with(), 400, "username is not valid UTF-8"},
		{"range that is none", "GET", "/files?path=/etc/passwd", "", with("Range", "bytes=x-y"), 416, "invalid range"},
		{"range outside", "GET", "/files?path=/etc/passwd", "", with("Range", "bytes=99999-"), 416, "invalid range"},
		{"no encoding", "GET", "/files?path=/etc/passwd", "", with("Accept-Encoding", "identity;q=0"), 406, "identity or gzip"},
		{"long name", "GET", "/files?path=" + strings.Repeat("n", 256), "", with(), 400, "is too long"},
		{"long path", "GET", "/files?path=" + strings.Repeat("d/", 2500), "", with(), 400, "is too long"},
		{"directory", "GET", "/files?path=/tmp", "", with(), 400, "path '/tmp' is a directory"},
		{"below a file", "GET", "/files?path=/etc/passwd/x", "", with(), 400, "not a directory"},
		{"unknown user", "GET", "/files?path=x&username=nobody-here", "", with(), 401, "nobody-here"},
		{"metadata with no key", "POST", "/files?path=x", "x", with("Content-Type", "application/octet-stream", "X-Metadata-", "v"), 400, "X-Metadata-"},
		{"metadata of a long key", "POST", "/files?path=x", "x", with("Content-Type", "application/octet-stream", "X-Metadata-"+strings.Repeat("k", 247), "v"), 400, "too long"},
		{"metadata that is long", "POST", "/files?path=x", "x", with("Content-Type", "application/octet-stream", "X-Metadata-K", strings.Repeat("v", 4090)), 400, "X-Metadata-K"},
		{"metadata that is no ASCII", "POST", "/files?path=x", "x", with("Content-Type", "application/octet-stream", "X-Metadata-K", "é"), 400, "X-Metadata-K"},
		{"compose of nothing", "POST", "/files/compose", `{"destination":"x"}`, start, 400, "source_paths"},
		{"compose to nothing", "POST", "/files/compose", `{"source_paths":["x"]}`, start, 400, "destination"},
		{"compose of what is missing", "POST", "/files/compose", `{"source_paths":["no-such"],"destination":"x"}`, start, 404, "path '/home/user/no-such' does not exist"},
		{"compose of a directory", "POST", "/files/compose", `{"source_paths":["/tmp"],"destination":"x"}`, start, 400, "path '/tmp' is a directory"},
		{"compose into itself", "POST", "/files/compose", `{"source_paths":["/etc/passwd"],"destination":"/etc/../etc/passwd"}`, start, 400, "the same file"},
		{"compose with NUL", "POST", "/files/compose", `{"source_paths":["a\u0000"],"destination":"x"}`, start, 400, "NUL"},
		{"compose for nobody", "POST", "/files/compose", `{"source_paths":["/etc/passwd"],"destination":"x","username":"nobody-here"}`, start, 401, "nobody-here"},
		{"compose without a token", "POST", "/files/compose", `{"source_paths":["/etc/passwd"],"destination":"x"}`, with("X-Access-Token", ""), 401, "access token"},
		{"write with NUL", "POST", "/files?path=a%00b", "x", octets, 400, "path"},
		{"write to no path", "POST", "/files", "x", octets, 400, "path is missing"},
		{"write to a directory", "POST", "/files?path=/tmp", "x", octets, 400, "is a directory"},
		{"write without leave", "POST", "/files?path=/etc/nope", "x", octets, 403, "permission denied"},
		{"write of a long name", "POST", "/files?path=" + strings.Repeat("n", 256), "x", octets, 400, "is too long"},
		{"write of a wrong type", "POST", "/files?path=x", "x", with("Content-Type", "text/plain"), 400, "application/octet-stream"},
		{"form without a file", "POST", "/files?path=x", "--b--\r\n", with("Content-Type", "multipart/form-data; boundary=b"), 400, "no part with the name file"},
		{"form that is cut off", "POST", "/files?path=x", "--b\r\nContent-Disposition: form-data; name=\"file\"\r\n\r\nhalf", with("Content-Type", "multipart/form-data; boundary=b"), 400, "broke off"},
		{"no gzip", "POST", "/files?path=x", "plain", with("Content-Type", "application/octet-stream", "Content-Encoding", "gzip"), 400, "broke off or is damaged"},
		{"no program", "POST", "/process.Process/List", `{`, start, 400, "unmarshal"},
		{"unknown call", "POST", "/process.Process/Explode", `{}`, start, 404, ""},
		{"unknown route", "GET", "/no-such", "", with(), 404, "there is no GET /no-such"},
		{"wrong method", "DELETE", "/files?path=x", "", with(), 404, "there is no DELETE /files"},
		{"wrong token", "GET", "/files?path=x", "", with("X-Access-Token", "wrong"), 401, "access token"},
		{"no token", "GET", "/files?path=x", "", with("X-Access-Token", ""), 401, "missing signature"},
		{"wrong signature", "GET", "/files?path=x&signature=v1_x", "", with("X-Access-Token", ""), 401, "invalid signature"},
		{"no port", "GET", "/files?path=x", "", with("E2b-Sandbox-Port", ""), 400, "E2b-Sandbox-Port"},
		{"port that is none", "GET", "/files?path=x", "", with("E2b-Sandbox-Port", "65536"), 400, "E2b-Sandbox-Port"},
		{"closed port", "GET", "/", "", with("E2b-Sandbox-Port", "8080"), 502, "port is not open"},
		{"unknown sandbox", "GET", "/files?path=x", "", with("E2b-Sandbox-Id", "i00000000000000000000"), 502, "The sandbox was not found"},
		{"id that is none", "GET", "/files?path=x", "", with("E2b-Sandbox-Id", "../x"), 502, "The sandbox was not found"},
	} {
		t.Run(c.name, func(t *testing.T) {
			resp, body := s.ask(t, c.method, c.path, c.body, c.header)
			if resp.StatusCode != c.status || !strings.Contains(body, c.message) || len(body) > 2000 {
				t.Errorf("%d, want %d with %q: %.300s", resp.StatusCode, c.status, c.message, body)
			}
		})
	}
	// The errors of a stream come in it, with Connect's codes.
	for _, c := range []struct {
		name    string
		req     client.ExecRequest
		want    airlock.Code
		message string
	}{
		{"no program", client.ExecRequest{}, airlock.Invalid, "process.cmd"},
		{"unknown program", client.ExecRequest{Cmd: "no-such"}, airlock.NotFound, "no-such"},
		{"program that is none", client.ExecRequest{Cmd: "/etc/passwd"}, airlock.Invalid, "is not executable"},
		{"program with NUL", client.ExecRequest{Cmd: "a\x00b"}, airlock.Invalid, "NUL"},
		{"argument with NUL", client.ExecRequest{Cmd: "echo", Args: []string{"a\x00b"}}, airlock.Invalid, "NUL"},
		{"unknown directory", client.ExecRequest{Cmd: "true", Cwd: "/no/such"}, airlock.Invalid, "does not exist"},
		{"unknown user", client.ExecRequest{Cmd: "true", User: "nobody-here"}, airlock.Unauthenticated, "nobody-here"},
		{"many arguments", client.ExecRequest{Cmd: "true", Args: []string{strings.Repeat("x", 3<<20)}}, airlock.TooLarge, "bytes"},
	} {
		t.Run("start: "+c.name, func(t *testing.T) {
			r, err := sb.Exec(t.Context(), c.req)
			if airlock.CodeOf(err) != c.want || !strings.Contains(err.Error(), c.message) {
				t.Errorf("%+v, %.300v, want %s with %q", r, err, c.want, c.message)
			}
		})
	}
	if out := must(t, sb, "ls -A"); out != "" {
		t.Errorf("files are left: %q", out)
	}
}
