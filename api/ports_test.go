package api_test

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"airlock.dev/airlock"
)

// at sends a request to a host of the server.
func (w *world) at(method, host, path string, header ...string) reply {
	w.t.Helper()
	req, err := http.NewRequest(method, w.url+path, nil)
	if err != nil {
		w.t.Fatal(err)
	}
	req.Host = host
	for i := 0; i < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	resp, err := http.DefaultTransport.RoundTrip(req)
	if err != nil {
		w.t.Fatalf("%s %s%s: %v", method, host, path, err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		w.t.Fatalf("%s %s%s: %v", method, host, path, err)
	}
	return reply{resp.StatusCode, resp.Header, string(text)}
}

// program listens in a sandbox.
func (w *world) program(id string, port uint16, h http.HandlerFunc) {
	w.t.Helper()
	srv := httptest.NewServer(h)
	w.t.Cleanup(func() { srv.CloseClientConnections(); srv.Close() })
	w.driver.box(id).listen(port, srv.Listener.Addr().String())
}

func TestRouting(t *testing.T) {
	w := newWorld(t)
	id, token := w.create(`{"templateID":"base"}`)
	other, _ := w.create(`{"templateID":"base"}`)
	w.program(id, 8000, func(rw http.ResponseWriter, r *http.Request) { fmt.Fprint(rw, "one ", r.Host, r.URL) })
	w.program(other, 8000, func(rw http.ResponseWriter, r *http.Request) { fmt.Fprint(rw, "other") })
	const hint = ": use PORT-ID.box.test:8443 for a sandbox's port and api.box.test:8443 for the API"
	to := func(id, port string) []string { return []string{"E2b-Sandbox-Id", id, "E2b-Sandbox-Port", port} }
	notFound := func(id string) string {
		return fmt.Sprintf(`{"code":502,"message":"The sandbox was not found","sandboxId":"%s"}`, id)
	}
	closed := func(port int) string {
		return fmt.Sprintf(`{"code":502,"message":"The sandbox is running but port is not open","port":%d,"sandboxId":"%s"}`, port, id)
	}
	for _, c := range []struct {
		what, host, path string
		header           []string
		status           int
		body             string
	}{
		{"headers on an address", "127.0.0.1:3000", "/a?b=c;d", to(id, "8000"), 200, "one 127.0.0.1:3000/a?b=c;d"},
		{"headers on localhost", "localhost", "/", to(id, "8000"), 200, "one localhost/"},
		{"headers on sandbox.", "sandbox.box.test:8443", "/", to(id, "8000"), 200, "one sandbox.box.test:8443/"},
		{"legacy id", "localhost", "/", to(id+"-x", "8000"), 200, "one localhost/"},
		{"host", "8000-" + id + ".box.test:8443", "/x%2Fy", nil, 200, "one 8000-" + id + ".box.test:8443/x%2Fy"},
		{"host in capitals, without a port", "8000-" + strings.ToUpper(id) + ".Box.Test.", "/", nil, 200, "one 8000-" + strings.ToUpper(id) + ".Box.Test./"},
		{"host with a client's id", "8000-" + id + "-abc.box.test", "/", nil, 200, "one 8000-" + id + "-abc.box.test/"},
		{"host over headers", "8000-" + id + ".box.test", "/", to(other, "1"), 200, "one 8000-" + id + ".box.test/"},
		{"host has no control plane", "8000-" + id + ".box.test", "/health", nil, 200, "one 8000-" + id + ".box.test/health"},
		{"closed port by host", "81-" + id + ".box.test", "/", nil, 502, closed(81)},
		{"closed port by headers", "localhost", "/", to(id, "81"), 502, closed(81)},
		{"code interpreter's port", "49999-" + id + ".box.test", "/", nil, 502, closed(49999)},
		{"no sandbox by host", "8000-i00000000000000000000.box.test", "/", nil, 502, notFound("i00000000000000000000")},
		{"no sandbox by headers", "localhost", "/", to("i00000000000000000000", "8000"), 502, notFound("i00000000000000000000")},
		{"envd by host", "49983-" + id + ".box.test", "/envs", []string{"X-Access-Token", token}, 200, "{}"},
		{"envd by host, without token", "49983-" + id + ".box.test", "/envs", nil, 401, `{"code":401,"message":"the access token is missing or wrong"}`},
		{"control plane", "api.box.test:8443", "/health", nil, 204, ""},
		{"control plane on the domain", "box.test", "/health", nil, 204, ""},
		{"another label", "www.box.test", "/health", nil, 400, `{"code":400,"message":"the host \"www.box.test\" is none of this server's` + hint + `","error_code":"invalid_argument","field":"Host"}`},
		{"a label too deep", "8000-" + id + ".x.box.test", "/", nil, 400, `{"code":400,"message":"the host \"8000-` + id + `.x.box.test\" is none of this server's` + hint + `","error_code":"invalid_argument","field":"Host"}`},
		{"port 0", "0-" + id + ".box.test", "/", nil, 400, `{"code":400,"message":"the sandbox's port is missing or not a number: send the header E2b-Sandbox-Port with a port's number"}`},
		{"port too large", "65536-" + id + ".box.test", "/", nil, 400, `{"code":400,"message":"the sandbox's port is missing or not a number: send the header E2b-Sandbox-Port with a port's number"}`},
		{"id alone", "localhost", "/", to(id, "")[:2], 400, `{"code":400,"message":"the sandbox's port is missing or not a number: send the header E2b-Sandbox-Port with a port's number"}`},
		{"port alone", "localhost", "/", to("", "8000")[2:], 400, `{"code":400,"message":"the sandbox's id is missing: send the header E2b-Sandbox-Id","error_code":"invalid_argument","field":"E2b-Sandbox-Id"}`},
	} {
		w.at("GET", c.host, c.path, c.header...).want(t, c.what, c.status, c.body)
	}
}

// What opens our doors does not reach the sandbox; all else does.
func TestProxyHeaders(t *testing.T) {
	w := newWorld(t)
	id, _ := w.create(`{"templateID":"base"}`)
	masked, _ := w.create(`{"templateID":"base","network":{"maskRequestHost":"dev.local:${PORT}"}}`)
	seen := func(rw http.ResponseWriter, r *http.Request) {
		var lines []string
		for name, values := range r.Header {
			lines = append(lines, name+"="+strings.Join(values, ","))
		}
		slices.Sort(lines)
		rw.Header().Set("Set-Cookie", "a=b; Domain=box.test; Path=/; domain = .box.test")
		rw.Header().Set("Access-Control-Allow-Origin", "https://its.own")
		rw.Header().Set("Server", "its own")
		fmt.Fprint(rw, r.Method, " ", r.Host, " ", strings.Join(lines, " "))
	}
	w.program(id, 3000, seen)
	w.program(masked, 3000, seen)
	r := w.at("GET", "3000-"+id+".box.test:8443", "/", "X-API-KEY", "k", "X-Access-Token", "t", "E2B-Traffic-Access-Token", "tt", "E2b-Sandbox-Id", "x", "E2b-Sandbox-Other", "y",
		"Authorization", "Bearer its-own", "Accept-Encoding", "identity", "User-Agent", "")
	r.want(t, "headers", 200, "GET 3000-"+id+".box.test:8443 Accept-Encoding=identity Authorization=Bearer its-own X-Forwarded-For=127.0.0.1 X-Forwarded-Host=3000-"+id+".box.test:8443 X-Forwarded-Proto=http")
	for name, want := range map[string]string{"Set-Cookie": "a=b; Path=/", "Access-Control-Allow-Origin": "https://its.own", "Server": "its own", "X-Content-Type-Options": ""} {
		if got := strings.Join(r.header[name], "|"); got != want {
			t.Errorf("%s of the reply is %q, want %q", name, got, want)
		}
	}
	r = w.at("GET", "3000-"+masked+".box.test", "/", "Accept-Encoding", "identity", "User-Agent", "u", "Authorization", "Bearer e2b_"+strings.Repeat("0a", 20))
	r.want(t, "mask, and an API key as a bearer's", 200, "GET dev.local:3000 Accept-Encoding=identity User-Agent=u X-Forwarded-For=127.0.0.1 X-Forwarded-Host=3000-"+masked+".box.test X-Forwarded-Proto=http")
	// A program answers for itself whether pages may call it.
	r = w.at("OPTIONS", "3000-"+id+".box.test", "/", "Access-Control-Request-Method", "POST")
	if r.status != 200 || !strings.HasPrefix(r.body, "OPTIONS ") {
		t.Errorf("preflight: %d %s", r.status, r.body)
	}
}

func TestTrafficToken(t *testing.T) {
	w := newWorld(t)
	r := w.as(w.client, "POST", "/v2/sandboxes", `{"templateID":"base","network":{"allowPublicTraffic":false}}`)
	var sb struct{ SandboxID, TrafficAccessToken, EnvdAccessToken, Domain string }
	if err := json.Unmarshal([]byte(r.body), &sb); err != nil || len(sb.TrafficAccessToken) < 40 || sb.Domain != "box.test:8443" {
		t.Fatalf("create: %d %s", r.status, r.body)
	}
	if r := w.as(w.client, "POST", "/v2/sandboxes/"+sb.SandboxID+"/connect", `{}`); !strings.Contains(r.body, sb.TrafficAccessToken) {
		t.Errorf("connect: %s", r.body)
	}
	public, _ := w.create(`{"templateID":"base","network":{"allowPublicTraffic":true}}`)
	for _, id := range []string{sb.SandboxID, public} {
		w.program(id, 80, func(rw http.ResponseWriter, r *http.Request) { fmt.Fprint(rw, "in") })
	}
	denied := func(what string) string {
		return `{"code":403,"message":"Sandbox is secured with traffic access token. ` + what + `","sandboxId":"` + sb.SandboxID + `"}`
	}
	wrong, missing := denied("The token in header 'E2B-Traffic-Access-Token' is wrong"), denied("Header 'E2B-Traffic-Access-Token' is missing")
	for _, c := range []struct {
		what, host string
		header     []string
		status     int
		body       string
	}{
		{"right", "80-" + sb.SandboxID, []string{"E2B-Traffic-Access-Token", sb.TrafficAccessToken}, 200, "in"},
		{"missing", "80-" + sb.SandboxID, nil, 403, missing},
		{"wrong", "80-" + sb.SandboxID, []string{"E2B-Traffic-Access-Token", "x"}, 403, wrong},
		{"that of processes and files", "80-" + sb.SandboxID, []string{"E2B-Traffic-Access-Token", sb.EnvdAccessToken}, 403, wrong},
		{"closed port", "81-" + sb.SandboxID, nil, 403, missing},
		{"public", "80-" + public, nil, 200, "in"},
	} {
		w.at("GET", c.host+".box.test", "/", c.header...).want(t, c.what, c.status, c.body)
	}
}

// dial opens a connection to the server and begins a request on it.
func (w *world) dial(host, head string) (net.Conn, *bufio.Reader) {
	w.t.Helper()
	c, err := net.Dial("tcp", strings.TrimPrefix(w.url, "http://"))
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { c.Close() })
	c.SetDeadline(time.Now().Add(20 * time.Second))
	fmt.Fprintf(c, "%s HTTP/1.1\r\nHost: %s\r\n", head, host)
	return c, bufio.NewReader(c)
}

func TestStreamsAndUpgrades(t *testing.T) {
	w := newWorld(t)
	id, token := w.create(`{"templateID":"base"}`)
	next := make(chan string)
	w.program(id, 80, func(rw http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/events":
			rw.Header().Set("Content-Type", "text/event-stream")
			for s := range next {
				fmt.Fprintf(rw, "data: %s\n\n", s)
				rw.(http.Flusher).Flush()
			}
		case "/both": // answers each line as it comes
			http.NewResponseController(rw).EnableFullDuplex()
			lines := bufio.NewScanner(r.Body)
			for lines.Scan() {
				fmt.Fprintf(rw, "<%s>\n", lines.Text())
				rw.(http.Flusher).Flush()
			}
		case "/up":
			c, buf, _ := rw.(http.Hijacker).Hijack()
			defer c.Close()
			io.WriteString(c, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
			io.Copy(c, buf)
		}
	})
	host := "80-" + id + ".box.test"
	get := func(path string) (*http.Response, *bufio.Reader) {
		c, _ := w.dial(host, "GET "+path)
		io.WriteString(c, "\r\n")
		r := bufio.NewReader(c)
		resp, err := http.ReadResponse(r, nil)
		if err != nil {
			t.Fatal(err)
		}
		return resp, bufio.NewReader(resp.Body)
	}

	go func() { next <- "one" }()
	_, events := get("/events")
	for _, want := range []string{"one", "two"} {
		if line, err := events.ReadString('\n'); line != "data: "+want+"\n" || err != nil {
			t.Fatalf("event: %q, %v", line, err)
		}
		events.ReadString('\n')
		if want == "one" {
			next <- "two"
		}
	}

	pr, pw := io.Pipe()
	req, _ := http.NewRequest("POST", w.url+"/both", pr)
	req.Host = host
	go io.WriteString(pw, "a\n")
	resp, err := http.DefaultTransport.RoundTrip(req)
	if err != nil {
		t.Fatal(err)
	}
	both := bufio.NewReader(resp.Body)
	for _, s := range []string{"a", "b"} {
		if line, err := both.ReadString('\n'); line != "<"+s+">\n" || err != nil {
			t.Errorf("both ways: %q, %v", line, err)
		}
		if s == "a" {
			go io.WriteString(pw, "b\n")
		}
	}
	pw.Close()
	resp.Body.Close()

	c, r := w.dial(host, "GET /up")
	io.WriteString(c, "Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
	up, err := http.ReadResponse(r, nil)
	if err != nil || up.StatusCode != 101 {
		t.Fatalf("upgrade: %+v, %v", up, err)
	}
	io.WriteString(c, "ping")
	buf := make([]byte, 4)
	if _, err := io.ReadFull(r, buf); string(buf) != "ping" || err != nil {
		t.Fatalf("upgraded: %q, %v", buf, err)
	}

	tcp, tr := w.dial("localhost", "GET /v1/ports/80")
	fmt.Fprintf(tcp, "E2b-Sandbox-Id: %s\r\nE2b-Sandbox-Port: 49983\r\nX-Access-Token: %s\r\nConnection: Upgrade\r\nUpgrade: airlock-tcp\r\n\r\n", id, token)
	if up, err := http.ReadResponse(tr, nil); err != nil || up.StatusCode != 101 {
		t.Fatalf("forward: %+v, %v", up, err)
	}
	io.WriteString(tcp, "GET /up HTTP/1.1\r\nHost: x\r\n\r\n")
	if up, err := http.ReadResponse(tr, nil); err != nil || up.StatusCode != 101 {
		t.Fatalf("forwarded: %+v, %v", up, err)
	}

	// The end of the sandbox is no clean end of what was open.
	killed := make(chan int)
	go func() {
		defer close(killed)
		killed <- w.as(w.client, "DELETE", "/sandboxes/"+id, "").status
	}()
	if rest, err := io.ReadAll(events); err == nil {
		t.Errorf("the event stream ended cleanly after %q", rest)
	}
	if _, err := r.ReadByte(); err == nil {
		t.Error("the upgraded connection goes on")
	}
	if _, err := tr.ReadByte(); err == nil {
		t.Error("the forwarded connection goes on")
	}
	close(next)
	if status := <-killed; status != 204 {
		t.Errorf("kill: %d", status)
	}
}

func TestForwardRefusals(t *testing.T) {
	w := newWorld(t)
	id, token := w.create(`{"templateID":"base"}`)
	up := []string{"Connection", "Upgrade", "Upgrade", "airlock-tcp"}
	for _, c := range []struct {
		what, path string
		header     []string
		status     int
		body       string
	}{
		{"token", "/v1/ports/80", address(id, "x", up...), 401, `{"code":401,"message":"the access token is missing or wrong"}`},
		{"closed", "/v1/ports/80", address(id, token, up...), 502, `{"code":502,"message":"port 80 is not open"}`},
		{"envd's port", "/v1/ports/49983", address(id, token, up...), 400, `{"code":400,"message":"\"49983\" is no port that can be forwarded: give one from 1 to 65535, but for 49983 and 49999"}`},
		{"no number", "/v1/ports/x", address(id, token, up...), 400, `{"code":400,"message":"\"x\" is no port that can be forwarded: give one from 1 to 65535, but for 49983 and 49999"}`},
		{"no upgrade", "/v1/ports/80", address(id, token), 400, `{"code":400,"message":"this is for connections that are upgraded: send Connection: Upgrade and Upgrade: airlock-tcp over HTTP/1.1"}`},
	} {
		w.do("GET", c.path, "", c.header...).want(t, c.what, c.status, c.body)
	}
}

// A server inside that speaks no HTTP, or dies, is told as such.
func TestProxyOfWhatIsNotHTTP(t *testing.T) {
	w := newWorld(t)
	id, _ := w.create(`{"templateID":"base"}`)
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			io.WriteString(c, "220 mail\r\n")
			c.Close()
		}
	}()
	w.driver.box(id).listen(25, ln.Addr().String())
	w.at("GET", "25-"+id+".box.test", "/").want(t, "mail", 502,
		`{"code":502,"message":"The server in the sandbox did not answer in HTTP or broke the connection off","port":25,"sandboxId":"`+id+`"}`)
	w.driver.box(id).die(airlock.SandboxFailed)
}
