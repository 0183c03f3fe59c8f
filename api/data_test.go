package api_test

import (
	"bytes"
	"compress/gzip"
	"context"
	"encoding/base64"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"runtime"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	"airlock.dev/airlock"
	"airlock.dev/airlock/channel"
	"github.com/google/go-cmp/cmp"
)

func TestDataPlaneGates(t *testing.T) {
	w := newWorld(t)
	id, token := w.create(`{"templateID":"base","envVars":{"K":"V"}}`)
	id2, token2 := w.create(`{"templateID":"base"}`)
	gone := func(id string) string {
		return fmt.Sprintf(`{"code":502,"message":"The sandbox was not found","sandboxId":"%s"}`, id)
	}
	denied := `{"code":401,"message":"the access token is missing or wrong"}`
	for _, c := range []struct {
		what, method, path string
		header             []string
		status             int
		body               string
	}{
		{"health", "GET", "/health", address(id, ""), 204, ""},
		{"legacy id", "GET", "/health", address(id+"-abc", ""), 204, ""},
		{"envs", "GET", "/envs", address(id, token), 200, `{"K":"V"}`},
		{"no envs", "GET", "/envs", address(id2, token2), 200, `{}`},
		{"no token", "GET", "/envs", address(id, ""), 401, denied},
		{"another sandbox's token", "GET", "/envs", address(id, token2), 401, denied},
		{"API key as token", "GET", "/envs", address(id, w.client), 401, denied},
		{"token for RPC", "POST", "/process.Process/List", address(id, token2), 401, denied},
		{"token for files", "GET", "/files?path=x", address(id, token2), 401, denied},
		{"no sandbox", "GET", "/health", address("i00000000000000000000", token), 502, gone("i00000000000000000000")},
		{"bad id", "GET", "/health", address("../x", token), 502, gone("../x")},
		{"no port", "GET", "/health", []string{"E2b-Sandbox-Id", id}, 400, `{"code":400,"message":"the sandbox's port is missing or not a number: send the header E2b-Sandbox-Port with a port's number"}`},
		{"port 0", "GET", "/health", []string{"E2b-Sandbox-Id", id, "E2b-Sandbox-Port", "0"}, 400, `{"code":400,"message":"the sandbox's port is missing or not a number: send the header E2b-Sandbox-Port with a port's number"}`},
		{"closed port", "GET", "/", []string{"E2b-Sandbox-Id", id, "E2b-Sandbox-Port", "8000"}, 502,
			fmt.Sprintf(`{"code":502,"message":"The sandbox is running but port is not open","port":8000,"sandboxId":"%s"}`, id)},
		{"orchestrator's route", "POST", "/init", address(id, token), 404, `{"code":404,"message":"there is no POST /init"}`},
		{"control plane by data plane", "GET", "/sandboxes", address(id, token, "X-API-KEY", w.client), 404, `{"code":404,"message":"there is no GET /sandboxes"}`},
		{"data plane without the header", "GET", "/envs", []string{"X-Access-Token", token}, 404, `{"code":404,"message":"there is no GET /envs","error_code":"not_found"}`},
	} {
		r := w.do(c.method, c.path, "", c.header...)
		r.want(t, c.what, c.status, c.body)
		if got := r.header.Get("Access-Control-Allow-Origin"); (got == "*") != (len(c.header) > 2 || c.header[0] == "E2b-Sandbox-Id") {
			t.Errorf("%s: Access-Control-Allow-Origin is %q", c.what, got)
		}
	}
	r := w.do("OPTIONS", "/files", "", "Access-Control-Request-Method", "POST", "Access-Control-Request-Headers", "e2b-sandbox-id,x-access-token", "Origin", "https://a.example")
	if r.status != 204 || r.header.Get("Access-Control-Allow-Headers") != "e2b-sandbox-id,x-access-token" || r.header.Get("Access-Control-Allow-Origin") != "*" {
		t.Errorf("preflight: %d %v", r.status, r.header)
	}
	r = w.do("GET", "/metrics", "", address(id, token)...)
	if r.status != 200 || !strings.Contains(r.body, `"mem_used":3145728,"mem_used_mib":3`) || !strings.Contains(r.body, `"disk_total":6,"disk_used":5`) {
		t.Errorf("metrics: %d %s", r.status, r.body)
	}
}

func multipartBody(parts ...string) string { // disposition, contents …
	var b strings.Builder
	for i := 0; i < len(parts); i += 2 {
		fmt.Fprintf(&b, "--XX\r\nContent-Disposition: %s\r\nContent-Type: application/octet-stream\r\n\r\n%s\r\n", parts[i], parts[i+1])
	}
	return b.String() + "--XX--\r\n"
}

func gzipped(s string) string {
	var b bytes.Buffer
	z := gzip.NewWriter(&b)
	z.Write([]byte(s))
	z.Close()
	return b.String()
}

func TestUpload(t *testing.T) {
	w := newWorld(t)
	id, token := w.create(`{"templateID":"base"}`)
	box := w.driver.box(id)
	const raw, form = "application/octet-stream", "multipart/form-data; boundary=XX"
	for _, c := range []struct {
		what, query, media, body string
		status                   int
		reply                    string
		file, contents           string
		header                   []string
	}{
		{"raw", "?path=a/b.txt", raw, "one", 200, `[{"name":"b.txt","path":"/home/user/a/b.txt","type":"file"}]`, "/home/user/a/b.txt", "one", nil},
		{"raw empty", "?path=/empty", raw, "", 200, `[{"name":"empty","path":"/empty","type":"file"}]`, "/empty", "", nil},
		{"raw gzip", "?path=/z", raw, gzipped("zipped"), 200, `[{"name":"z","path":"/z","type":"file"}]`, "/z", "zipped", []string{"Content-Encoding", "gzip"}},
		{"raw without path", "", raw, "x", 400, `{"code":400,"message":"the query parameter path is missing"}`, "", "", nil},
		{"form", "", form, multipartBody(`form-data; name="file"; filename="/deep/er/é.txt"`, "two"), 200, `[{"name":"é.txt","path":"/deep/er/é.txt","type":"file"}]`, "/deep/er/é.txt", "two", nil},
		{"form with path", "?path=/p&username=root", form, multipartBody(`form-data; name="file"; filename="other"`, "three"), 200, `[{"name":"p","path":"/p","type":"file"}]`, "/p", "three", nil},
		{"form with path, no filename", "?path=/q", form, multipartBody(`form-data; name="file"`, "4"), 200, `[{"name":"q","path":"/q","type":"file"}]`, "/q", "4", nil},
		{"form of two", "", form, multipartBody(`form-data; name="x"`, "ignored", `form-data; name="file"; filename="1"`, "i", `form-data; name="file"; filename="2"`, "ii"), 200,
			`[{"name":"1","path":"/home/user/1","type":"file"},{"name":"2","path":"/home/user/2","type":"file"}]`, "/home/user/2", "ii", nil},
		{"twice", "", form, multipartBody(`form-data; name="file"; filename="/t"`, "", `form-data; name="file"; filename="/x/../t"`, ""), 400, `{"code":400,"message":"path '/x/../t' is in the request twice"}`, "", "", nil},
		{"twice by another name", "", form, multipartBody(`form-data; name="file"; filename="/home/user/t"`, "", `form-data; name="file"; filename="t"`, ""), 400, `{"code":400,"message":"path 't' is in the request twice"}`, "", "", nil},
		{"no filename", "", form, multipartBody(`form-data; name="file"`, "x"), 400, `{"code":400,"message":"a file has no path: give it as its filename or as the query parameter path"}`, "", "", nil},
		{"bad disposition", "", form, multipartBody(`;;`, "x"), 400, `{"code":400,"message":"a part's Content-Disposition is not readable"}`, "", "", nil},
		{"cut form", "", form, multipartBody(`form-data; name="file"; filename="/cut"`, "whole")[:112], 400, `{"code":400,"message":"the upload broke off or is damaged: send it again"}`, "", "", nil},
		{"bad gzip", "?path=/z2", raw, "not gzip at all", 400, `{"code":400,"message":"the upload broke off or is damaged: send it again"}`, "", "", []string{"Content-Encoding", "gzip"}},
		{"cut gzip", "?path=/z3", raw, gzipped(strings.Repeat("abc", 1000))[:20], 400, `{"code":400,"message":"the upload broke off or is damaged: send it again"}`, "", "", []string{"Content-Encoding", "gzip"}},
		{"br", "?path=/z2", raw, "x", 400, `{"code":400,"message":"the body's encoding \"br\" is not supported: use gzip or none"}`, "", "", []string{"Content-Encoding", "br"}},
		{"json", "?path=/z2", "application/json", "{}", 400, `{"code":400,"message":"the body's type must be multipart/form-data or application/octet-stream"}`, "", "", nil},
		{"unknown user", "?path=/u&username=eve", raw, "x", 401, `{"code":401,"message":"invalid username: 'eve'"}`, "", "", nil},
		{"full disk", "?path=/full", raw, strings.Repeat("x", 3<<20), 507, `{"code":507,"message":"no space left for '/full'"}`, "", "", nil},
	} {
		r := w.do("POST", "/files"+c.query, c.body, address(id, token, append([]string{"Content-Type", c.media}, c.header...)...)...)
		r.want(t, c.what, c.status, c.reply)
		box.mu.Lock()
		data, found := box.files[c.file]
		if c.status == 200 && (!found || string(data) != c.contents) {
			t.Errorf("%s: file %s = %q", c.what, c.file, data)
		}
		for _, never := range []string{"/cut", "/z2", "/z3", "/u", "/full"} {
			if _, found := box.files[never]; found {
				t.Errorf("%s: %s was written", c.what, never)
			}
		}
		box.mu.Unlock()
	}
}

func TestDownload(t *testing.T) {
	w := newWorld(t)
	id, token := w.create(`{"templateID":"base"}`)
	box := w.driver.box(id)
	text := strings.Repeat("a line of text\n", 20_000)
	noise := make([]byte, 300_000)
	for i := range noise {
		noise[i] = byte(rand.Uint32())
	}
	box.mu.Lock()
	box.files = map[string][]byte{"/text": []byte(text), "/noise": noise, "/small": []byte("0123456789"), "/empty": {}, "/proc/long": []byte(text), "/proc/short": []byte("made up\n"), "/breaks": noise}
	box.mu.Unlock()
	get := func(path string, header ...string) reply {
		t.Helper()
		return w.do("GET", "/files?path="+path, "", address(id, token, header...)...)
	}
	for _, c := range []struct {
		path     string
		header   []string
		status   int
		want     string
		length   string // Content-Length
		encoding string
		ranged   string // Content-Range
	}{
		{"/small", nil, 200, "0123456789", "10", "", ""},
		{"/empty", []string{"Accept-Encoding", "gzip, deflate"}, 200, "", "0", "", ""},
		{"/text", []string{"Accept-Encoding", "identity"}, 200, text, "300000", "", ""},
		{"/text", []string{"Accept-Encoding", "gzip, deflate"}, 200, text, "", "gzip", ""},
		{"/text", []string{"Accept-Encoding", "gzip;q=0"}, 200, text, "300000", "", ""},
		{"/text", []string{"Accept-Encoding", "identity;q=0, *"}, 200, text, "", "gzip", ""},
		{"/noise", []string{"Accept-Encoding", "gzip"}, 200, string(noise), "300000", "", ""},
		{"/proc/short", []string{"Accept-Encoding", "identity"}, 200, "made up\n", "8", "", ""},
		{"/proc/long", []string{"Accept-Encoding", "identity"}, 200, text, "", "", ""},
		{"/small", []string{"Range", "bytes=2-4", "Accept-Encoding", "gzip"}, 206, "234", "3", "", "bytes 2-4/10"},
		{"/small", []string{"Range", "bytes=8-"}, 206, "89", "2", "", "bytes 8-9/10"},
		{"/small", []string{"Range", "bytes=8-99"}, 206, "89", "2", "", "bytes 8-9/10"},
		{"/small", []string{"Range", "bytes=-3"}, 206, "789", "3", "", "bytes 7-9/10"},
		{"/small", []string{"Range", "bytes=-30"}, 206, "0123456789", "10", "", "bytes 0-9/10"},
		{"/small", []string{"Range", "bytes=4-2"}, 416, "invalid range\n", "14", "", ""},
		{"/small", []string{"Range", "bytes=0-1,4-5"}, 200, "0123456789", "10", "", ""},
		{"/small", []string{"Range", "bytes=10-"}, 416, "invalid range: failed to overlap\n", "33", "", "bytes */10"},
		{"/noise", []string{"Range", "bytes=100-250000"}, 206, string(noise[100:250001]), "249901", "", "bytes 100-250000/300000"},
		{"/small", []string{"Accept-Encoding", "identity;q=0"}, 406, `{"code":406,"message":"files are sent as identity or gzip"}`, "59", "", ""},
		{"/missing", nil, 404, `{"code":404,"message":"path '/missing' does not exist"}`, "55", "", ""},
		{"/small&username=eve", nil, 401, `{"code":401,"message":"invalid username: 'eve'"}`, "48", "", ""},
	} {
		header := c.header
		if header == nil {
			header = []string{"Accept-Encoding", "identity"}
		}
		r := get(c.path, header...)
		body := r.body
		if r.header.Get("Content-Encoding") == "gzip" {
			z, err := gzip.NewReader(strings.NewReader(body))
			if err != nil {
				t.Fatal(err)
			}
			plain, err := io.ReadAll(z)
			if err != nil {
				t.Fatal(err)
			}
			body = string(plain)
		}
		if r.status != c.status || body != c.want {
			t.Errorf("%s %q: %d %.100q, want %d %.100q", c.path, header, r.status, body, c.status, c.want)
		}
		if got := r.header.Get("Content-Length"); got != c.length && c.encoding == "" {
			t.Errorf("%s %q: Content-Length is %q, want %q", c.path, header, got, c.length)
		}
		if got := r.header.Get("Content-Encoding"); got != c.encoding {
			t.Errorf("%s %q: Content-Encoding is %q, want %q", c.path, header, got, c.encoding)
		}
		if got := r.header.Get("Content-Range"); got != c.ranged {
			t.Errorf("%s %q: Content-Range is %q, want %q", c.path, header, got, c.ranged)
		}
	}
	if r := get("/small"); r.header.Get("Content-Disposition") != "inline; filename=small" || r.header.Get("Last-Modified") != "Fri, 02 Jan 2026 03:04:05 GMT" {
		t.Errorf("headers: %v", r.header)
	}
	// A read that fails after it began must not look complete.
	for _, encoding := range []string{"identity", "gzip"} {
		req, _ := http.NewRequest("GET", w.url+"/files?path=/breaks", nil)
		for i, h := 0, address(id, token, "Accept-Encoding", encoding); i < len(h); i += 2 {
			req.Header.Set(h[i], h[i+1])
		}
		resp, err := http.DefaultTransport.RoundTrip(req)
		if err != nil {
			t.Fatal(err)
		}
		if n, err := io.Copy(io.Discard, resp.Body); err == nil {
			t.Errorf("a broken read of %d bytes ended cleanly", n)
		}
		resp.Body.Close()
	}
}

func TestSignedFiles(t *testing.T) {
	w := newWorld(t)
	id, _ := w.create(`{"templateID":"base"}`)
	h := []string{"E2b-Sandbox-Id", id, "E2b-Sandbox-Port", "49983"}
	w.do("GET", "/files?path=x", "", h...).want(t, "no signature", 401, `{"code":401,"message":"missing signature query parameter"}`)
	w.do("GET", "/files?path=x&signature=v1_x", "", h...).want(t, "wrong signature", 401, `{"code":401,"message":"invalid signature"}`)
}

// rpc makes a Connect call with the JSON codec, as the SDKs do, byte for byte.
func (w *world) rpc(id, token, procedure, body string, header ...string) reply {
	w.t.Helper()
	return w.do("POST", procedure, body, address(id, token, append([]string{"Content-Type", "application/json", "Connect-Protocol-Version", "1"}, header...)...)...)
}

type stream struct {
	resp   *http.Response
	cancel func()
}

func (w *world) stream(id, token, procedure, body string, header ...string) *stream {
	w.t.Helper()
	framed := append(binary.BigEndian.AppendUint32([]byte{0}, uint32(len(body))), body...)
	ctx, cancel := context.WithCancel(w.t.Context())
	req, err := http.NewRequestWithContext(ctx, "POST", w.url+procedure, bytes.NewReader(framed))
	if err != nil {
		w.t.Fatal(err)
	}
	h := address(id, token, append([]string{"Content-Type", "application/connect+json", "Connect-Protocol-Version", "1"}, header...)...)
	for i := 0; i < len(h); i += 2 {
		req.Header.Set(h[i], h[i+1])
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { cancel(); resp.Body.Close() })
	return &stream{resp, cancel}
}

// next returns a frame as flags and text; the flag 2 is the end of the stream.
func (s *stream) next() (string, error) {
	var head [5]byte
	if _, err := io.ReadFull(s.resp.Body, head[:]); err != nil {
		return "", err
	}
	body := make([]byte, binary.BigEndian.Uint32(head[1:]))
	if _, err := io.ReadFull(s.resp.Body, body); err != nil {
		return "", err
	}
	return fmt.Sprintf("%d %s", head[0], body), nil
}

func (s *stream) all() (frames []string, err error) {
	for {
		f, err := s.next()
		if errors.Is(err, io.EOF) {
			return frames, nil
		}
		if err != nil {
			return frames, err
		}
		frames = append(frames, f)
	}
}

func b64(s string) string { return base64.StdEncoding.EncodeToString([]byte(s)) }

const startProc, connectProc = "/process.Process/Start", "/process.Process/Connect"

func TestProcessStreams(t *testing.T) {
	w := newWorld(t)
	id, token := w.create(`{"templateID":"base","limits":{"outputBytes":100000}}`)
	for _, c := range []struct {
		what, body string
		header     []string
		want       []string
	}{
		{"output", `{"process":{"cmd":"echo","args":["a","b"],"envs":{"K":"V"},"cwd":"/tmp"},"stdin":false}`, nil, []string{
			`0 {"event":{"start":{"pid":1}}}`, `0 {"event":{"data":{"stdout":"` + b64("a b") + `"}}}`, `0 {"event":{"data":{"stderr":"` + b64("err") + `"}}}`,
			`0 {"event":{"end":{"exited":true,"status":"exit status 0"}}}`, `2 {}`}},
		{"exit code", `{"process":{"cmd":"exit","args":["3"]}}`, nil, []string{
			`0 {"event":{"start":{"pid":2}}}`, `0 {"event":{"end":{"exitCode":3,"exited":true,"status":"exit status 3","error":"exit status 3"}}}`, `2 {}`}},
		{"terminal", `{"process":{"cmd":"tty"},"pty":{"size":{"cols":80,"rows":24}}}`, nil, []string{
			`0 {"event":{"start":{"pid":3}}}`, `0 {"event":{"data":{"pty":"` + b64("80x24") + `"}}}`, `0 {"event":{"end":{"exited":true,"status":"exit status 0"}}}`, `2 {}`}},
		{"timeout", `{"process":{"cmd":"sleep"}}`, []string{"Connect-Timeout-Ms", "50"}, []string{
			`0 {"event":{"start":{"pid":4}}}`, `2 {"error":{"code":"deadline_exceeded","message":"timeout: the command ran longer than its deadline and was killed"}}`}},
		{"memory", `{"process":{"cmd":"oom"}}`, nil, []string{
			`0 {"event":{"start":{"pid":5}}}`,
			`0 {"event":{"end":{"exitCode":-1,"status":"oom","error":"out of memory: the sandbox's limit of 512 MiB was reached and its largest process ended; ask for more with limits.memoryMB (--memory)"}}}`, `2 {}`}},
		{"unknown user", `{"process":{"cmd":"echo"}}`, []string{"Authorization", "Basic " + b64("eve:")}, []string{
			`2 {"error":{"code":"unauthenticated","message":"invalid username: 'eve'"}}`}},
		{"no command", `{}`, nil, []string{`2 {"error":{"code":"invalid_argument","message":"process.cmd is missing: name a program"}}`}},
		{"no such size", `{"process":{"cmd":"tty"},"pty":{"size":{"cols":0,"rows":70000}}}`, nil, []string{
			`2 {"error":{"code":"invalid_argument","message":"the terminal's size is 0 by 70000: give cols and rows from 1 to 65535"}}`}},
	} {
		got, err := w.stream(id, token, startProc, c.body, c.header...).all()
		for i := range got { // protojson adds spaces at random
			got[i] = strings.NewReplacer(`": `, `":`, `, "`, `,"`).Replace(got[i])
		}
		if diff := cmp.Diff(c.want, got); err != nil || diff != "" {
			t.Errorf("%s: %v (-want +got):\n%s", c.what, err, diff)
		}
	}
	box := w.driver.box(id)
	if got, err := w.stream(id, token, startProc, `{"process":{"cmd":"echo","args":["x"],"envs":{"K":"V"},"cwd":"d"},"tag":"t"}`, "Authorization", "Basic "+b64("root:")).all(); err != nil || len(got) != 5 {
		t.Fatalf("%q, %v", got, err)
	}
	want := channel.StartRequest{Cmd: "echo", Args: []string{"x"}, Env: map[string]string{"K": "V"}, Cwd: "d", User: "root", Tag: "t", Stdin: true}
	if diff := cmp.Diff(want, box.lastReq); diff != "" {
		t.Errorf("request (-want +got):\n%s", diff)
	}

	// output_limit: what is within it comes, then the end says so.
	got, err := w.stream(id, token, startProc, `{"process":{"cmd":"flood"}}`).all()
	if err != nil || len(got) < 3 || !strings.Contains(strings.ReplaceAll(got[len(got)-2], " ", ""), `"status":"output_limit","error":"outputlimit:morethan100000byteswerewritten`) {
		t.Errorf("flood: %v, %q", err, got[len(got)-2:])
	}

	got, err = w.stream(id, token, connectProc, `{"process":{"pid":99}}`).all()
	if err != nil || len(got) != 1 || !strings.Contains(got[0], `"not_found"`) {
		t.Errorf("connect: %q %v", got, err)
	}
}

func TestKeepalive(t *testing.T) {
	w := newWorld(t)
	id, token := w.create(`{"templateID":"base"}`)
	s := w.stream(id, token, startProc, `{"process":{"cmd":"sleep"}}`, "Keepalive-Ping-Interval", "1")
	s.next()
	if f, err := s.next(); err != nil || strings.ReplaceAll(f, " ", "") != `0{"event":{"keepalive":{}}}` {
		t.Errorf("%q, %v", f, err)
	}
}

func TestInputAndSignals(t *testing.T) {
	w := newWorld(t)
	id, token := w.create(`{"templateID":"base"}`)
	s := w.stream(id, token, startProc, `{"process":{"cmd":"cat"}}`)
	s.next()
	w.rpc(id, token, "/process.Process/SendInput", `{"process":{"pid":1},"input":{"stdin":"`+b64("hi")+`"}}`).want(t, "input", 200, `{}`)
	if f, err := s.next(); err != nil || !strings.Contains(f, b64("hi")) {
		t.Errorf("%q, %v", f, err)
	}
	in := w.stream(id, token, "/process.Process/StreamInput", `{"start":{"process":{"pid":1}}}`)
	if got, err := in.all(); err != nil || len(got) != 2 || got[0] != "0 {}" {
		t.Errorf("stream input: %q, %v", got, err)
	}
	w.rpc(id, token, "/process.Process/CloseStdin", `{"process":{"pid":1}}`).want(t, "close", 200, `{}`)
	if got, err := s.all(); err != nil || len(got) != 2 {
		t.Errorf("%q, %v", got, err)
	}
	s = w.stream(id, token, startProc, `{"process":{"cmd":"sleep"}}`)
	s.next()
	w.rpc(id, token, "/process.Process/SendSignal", `{"process":{"pid":2},"signal":"SIGNAL_SIGKILL"}`).want(t, "signal", 200, `{}`)
	if f, err := s.next(); err != nil || !strings.Contains(strings.ReplaceAll(f, " ", ""), `"end":{"exitCode":-1,"status":"signal:killed","error":"signal:`) {
		t.Errorf("%q, %v", f, err)
	}
	for _, c := range []struct{ procedure, body, want string }{
		{"SendSignal", `{"process":{"pid":77},"signal":"SIGNAL_SIGKILL"}`, `404 {"code":"not_found","message":"process with pid 77 not found"}`},
		{"SendSignal", `{"process":{"pid":2}}`, `400 {"code":"invalid_argument","message":"signal is SIGNAL_UNSPECIFIED: use SIGNAL_SIGKILL or SIGNAL_SIGTERM"}`},
		{"SendSignal", `{"signal":"SIGNAL_SIGKILL"}`, `400 {"code":"invalid_argument","message":"no process is named: give its pid or its tag"}`},
		{"SendInput", `{"process":{"pid":77}}`, `404 {"code":"not_found","message":"process with pid 77 not found"}`},
		{"Update", `{"process":{"pid":2}}`, `200 {}`},
	} {
		r := w.rpc(id, token, "/process.Process/"+c.procedure, c.body)
		if got := fmt.Sprintf("%d %s", r.status, r.body); got != c.want {
			t.Errorf("%s %s: %s, want %s", c.procedure, c.body, got, c.want)
		}
	}
	r := w.rpc(id, token, "/process.Process/List", `{}`)
	if got := strings.ReplaceAll(r.body, " ", ""); got != `{"processes":[{"config":{"cmd":"/bin/bash","args":["-l"],"envs":{"A":"1"},"cwd":"/tmp"},"pid":7,"tag":"t"}]}` {
		t.Errorf("list: %s", got)
	}
}

func TestFilesystemCalls(t *testing.T) {
	w := newWorld(t)
	id, token := w.create(`{"templateID":"base"}`)
	w.driver.box(id).files["/f"] = []byte("12345")
	const f = `{"name":"f","type":"FILE_TYPE_FILE","path":"/f","size":"5","mode":420,"permissions":"-rw-r--r--","owner":"user","group":"user","modifiedTime":"2026-01-02T03:04:05Z"}`
	for _, c := range []struct{ method, body, want string }{
		{"Stat", `{"path":"/f"}`, `200 {"entry":` + f + `}`},
		{"Stat", `{"path":"/g"}`, `404 {"code":"not_found","message":"path'/g'doesnotexist"}`},
		{"MakeDir", `{"path":"/d"}`, `409 {"code":"already_exists","message":"directory'/d'alreadyexists"}`},
		{"ListDir", `{"path":"/d","depth":0}`, `200 {"entries":[` + strings.NewReplacer(`"name":"f"`, `"name":"a"`, `"path":"/f"`, `"path":"/d/a"`, `"size":"5"`, `"size":"1"`).Replace(f) +
			`,` + strings.NewReplacer(`"name":"f","type":"FILE_TYPE_FILE","path":"/f","size":"5"`, `"name":"link","path":"/d/link"`, `Z"}`, `Z","symlinkTarget":"/nowhere"}`).Replace(f) + `]}`},
		{"CreateWatcher", `{"path":"/g"}`, `404 {"code":"not_found","message":"path'/g'doesnotexist"}`},
		{"GetWatcherEvents", `{"watcherId":"x"}`, `404 {"code":"not_found","message":"watcher'x'wasnotfound:watchersendwiththeserver,makeanewone"}`},
		{"RemoveWatcher", `{"watcherId":""}`, `404 {"code":"not_found","message":"watcher''wasnotfound:watchersendwiththeserver,makeanewone"}`},
		{"Stat", `{"path":7}`, `400`},
	} {
		r := w.rpc(id, token, "/filesystem.Filesystem/"+c.method, c.body)
		if got := fmt.Sprintf("%d %s", r.status, strings.ReplaceAll(r.body, " ", "")); got != c.want && !(len(c.want) == 3 && got[:3] == c.want) {
			t.Errorf("%s %s: %s\nwant %s", c.method, c.body, got, c.want)
		}
	}
	r := w.rpc(id, token, "/filesystem.Filesystem/Move", `{"source":"a","destination":"b"}`)
	if r.status != 500 || strings.Contains(r.body, "secret") || !strings.Contains(r.body, "internal error") {
		t.Errorf("move: %d %s", r.status, r.body)
	}
}

// TestEndOfSandbox: streams break off, except that running out of memory is said.
func TestEndOfSandbox(t *testing.T) {
	w := newWorld(t)
	for _, c := range []struct {
		what string
		end  func(id string)
		end0 string // the last event, "" is none
	}{
		{"killed", func(id string) { w.as(w.client, "DELETE", "/sandboxes/"+id, "") }, ""},
		{"failed", func(id string) { w.driver.box(id).die(airlock.SandboxFailed) }, ""},
		{"oom", func(id string) { w.driver.box(id).die(airlock.SandboxOOM) }, `"status":"sandbox_oom"`},
	} {
		id, token := w.create(`{"templateID":"base"}`)
		s := w.stream(id, token, startProc, `{"process":{"cmd":"sleep"}}`)
		if _, err := s.next(); err != nil {
			t.Fatal(err)
		}
		ended := make(chan struct{})
		go func() { defer close(ended); c.end(id) }()
		got, err := s.all()
		if c.end0 == "" {
			if err == nil || len(got) > 0 {
				t.Errorf("%s: the stream ended cleanly with %q", c.what, got)
			}
		} else if err != nil || len(got) != 2 || !strings.Contains(strings.ReplaceAll(got[0], " ", ""), c.end0) || got[1] != "2 {}" {
			t.Errorf("%s: %q, %v", c.what, got, err)
		}
		if r := w.do("GET", "/health", "", address(id, "")...); r.status != 502 {
			t.Errorf("%s: health is %d at the moment of the abort", c.what, r.status)
		}
		<-ended
	}
}

// TestSlowReader: a client that does not read stops the process, not the
// server's memory; when the sandbox is killed its connection is broken off.
func TestSlowReader(t *testing.T) {
	w := newWorld(t)
	id, token := w.create(`{"templateID":"base"}`)
	s := w.stream(id, token, startProc, `{"process":{"cmd":"flood"}}`)
	if _, err := s.next(); err != nil {
		t.Fatal(err)
	}
	// What fits in buffers on the way is taken; then nothing moves.
	for deadline := time.Now().Add(20 * time.Second); ; {
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		time.Sleep(500 * time.Millisecond)
		runtime.ReadMemStats(&after)
		grown := after.TotalAlloc - before.TotalAlloc
		if grown <= 4<<20 {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("%d bytes were allocated in half a second while nobody reads", grown)
		}
	}
	w.as(w.client, "DELETE", "/sandboxes/"+id, "")
	time.Sleep(100 * time.Millisecond)
	done := make(chan error, 1)
	go func() { _, err := io.Copy(io.Discard, s.resp.Body); done <- err }()
	select {
	case err := <-done:
		if err == nil {
			t.Error("the stream of a killed sandbox ended cleanly")
		}
	case <-time.After(10 * time.Second):
		t.Error("the stream of a killed sandbox goes on")
	}
}

// TestDisconnect: the process outlives its reader and can still be killed.
func TestDisconnect(t *testing.T) {
	w := newWorld(t)
	id, token := w.create(`{"templateID":"base"}`)
	s := w.stream(id, token, startProc, `{"process":{"cmd":"sleep"}}`)
	if _, err := s.next(); err != nil {
		t.Fatal(err)
	}
	s.cancel()
	time.Sleep(100 * time.Millisecond)
	w.rpc(id, token, "/process.Process/SendSignal", `{"process":{"pid":1},"signal":"SIGNAL_SIGTERM"}`).want(t, "signal", 200, `{}`)
}

// TestFullDisk: a client that still sends gets the answer, not a reset.
func TestFullDisk(t *testing.T) {
	w := newWorld(t)
	id, token := w.create(`{"templateID":"base"}`)
	for range 5 {
		req, err := http.NewRequest("POST", w.url+"/files?path=/full", io.LimitReader(zeros{}, 256<<20))
		if err != nil {
			t.Fatal(err)
		}
		for i, h := 0, address(id, token, "Content-Type", "application/octet-stream"); i < len(h); i += 2 {
			req.Header.Set(h[i], h[i+1])
		}
		resp, err := http.DefaultTransport.RoundTrip(req)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		if resp.StatusCode != http.StatusInsufficientStorage {
			t.Errorf("status = %d", resp.StatusCode)
		}
	}
}

// TestBrokenUpload: wherever an upload breaks off, the file stays as it was.
func TestBrokenUpload(t *testing.T) {
	w := newWorld(t)
	id, token := w.create(`{"templateID":"base"}`)
	box := w.driver.box(id)
	whole := multipartBody(`form-data; name="file"; filename="/f"`, strings.Repeat("new", 100))
	for cut := range len(whole) - len("\r\n--XX--\r\n") {
		if cut > 150 { // all in the same contents
			break
		}
		r := w.do("POST", "/files", whole[:cut+1], address(id, token, "Content-Type", "multipart/form-data; boundary=XX")...)
		if r.status != 400 {
			t.Fatalf("cut at %d: %d %s", cut+1, r.status, r.body)
		}
	}
	for _, size := range []int{0, 1, 40_000, 3 << 20} { // the connection breaks
		req, err := http.NewRequest("POST", w.url+"/files?path=/f", io.MultiReader(io.LimitReader(zeros{}, int64(size)), iotest.ErrReader(errors.New("cable cut"))))
		if err != nil {
			t.Fatal(err)
		}
		for i, h := 0, address(id, token, "Content-Type", "application/octet-stream"); i < len(h); i += 2 {
			req.Header.Set(h[i], h[i+1])
		}
		if _, err := http.DefaultTransport.RoundTrip(req); err == nil {
			t.Fatal("the cable was not cut")
		}
	}
	time.Sleep(100 * time.Millisecond)
	box.mu.Lock()
	defer box.mu.Unlock()
	if data, found := box.files["/f"]; found {
		t.Errorf("a broken upload left %d bytes", len(data))
	}
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { clear(p); return len(p), nil }
