package test

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"airlock.dev/airlock"
	"airlock.dev/airlock/client"
)

// operatorPassword is what the operator's own proxies want.
const operatorPassword = "b3BlcmF0b3JzLXBhc3N3b3Jk"

// A machine that reaches the world by a proxy only: what leaves a sandbox
// arrives by it, at the address that was decided on; what is denied never gets
// there; and a proxy that fails is told as what it is.
func TestOperatorsProxy(t *testing.T) {
	if _, err := exec.LookPath("curl"); err != nil {
		t.Skip("curl is not installed")
	}
	for _, kind := range []struct {
		scheme string
		serve  func(*testing.T, net.Listener, string, *asked) string
		wrong  string
	}{
		{"http", connectProxy, "by the host's proxy: it answered 407 Proxy Authentication Required"},
		{"socks5", socksProxy, "by the host's proxy: .*authentication failed"},
	} {
		t.Run(kind.scheme, func(t *testing.T) {
			var by asked
			l := listening(t, "127.0.0.1:0")
			at := kind.serve(t, l, operatorPassword, &by)
			proxy := kind.scheme + "://user:" + operatorPassword + "@" + at
			for _, name := range []string{"HTTP_PROXY", "HTTPS_PROXY"} {
				t.Setenv(name, proxy)
			}
			t.Setenv("NO_PROXY", "direct.airlock.test")
			s := networked(t)
			key := s.key("red", airlock.Client)
			c := s.as(key)
			hello := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { fmt.Fprint(w, "hello") })
			plain := httptest.NewServer(hello)
			t.Cleanup(plain.Close)
			secure := s.secure(t, hello)
			_, securePort, _ := net.SplitHostPort(strings.TrimSuffix(strings.TrimPrefix(secure, "https://"), "/"))
			raw := proxying(t, listening(t, "127.0.0.1:0"), func(c net.Conn) { io.WriteString(c, "hello") })
			_, rawPort, _ := net.SplitHostPort(raw)
			sb := create(t, c, client.CreateRequest{Timeout: 5 * time.Minute, Policy: ownPolicy})
			ask := func(what string) string {
				t.Helper()
				_, out := run(t, sb, "curl -sS -m 20 "+what+" 2>&1")
				return out
			}
			for what, address := range map[string]string{
				"http://" + inside + ":" + portOf(plain): "127.0.0.1:" + portOf(plain), secure: "127.0.0.1:" + securePort,
				"-N telnet://" + inside + ":" + rawPort: "127.0.0.1:" + rawPort,
			} {
				if out := ask(what); !strings.Contains(out, "hello") {
					t.Errorf("%s: %s", what, out)
				}
				if got := by.by("user"); !slices.Equal(got, []string{address}) {
					t.Errorf("%s: the proxy was asked for %q, want %s", what, got, address)
				}
			}
			for _, denied := range []string{"http://192.0.2.7/", "https://93.184.216.34/", "http://169.254.169.254/", "http://example.com/", "-x http://10.0.0.1:3128 https://example.com/"} {
				ask(denied)
			}
			if got := by.by("user"); got != nil {
				t.Errorf("denied, and the proxy was asked for %q", got)
			}

			// A client's own proxy is reached by it.
			var own asked
			theirs := socksProxy(t, listening(t, "127.0.0.1:0"), "theirs", &own)
			_, theirPort, _ := net.SplitHostPort(theirs)
			put := func(network string) {
				t.Helper()
				req, err := http.NewRequest("PUT", s.url+"/sandboxes/"+sb.ID+"/network", strings.NewReader(network))
				if err != nil {
					t.Fatal(err)
				}
				req.Header.Set("X-API-Key", key)
				res, err := (&http.Transport{}).RoundTrip(req)
				if err != nil {
					t.Fatal(err)
				}
				defer res.Body.Close()
				if body, _ := io.ReadAll(res.Body); res.StatusCode != http.StatusNoContent {
					t.Fatalf("%d %s", res.StatusCode, body)
				}
			}
			put(`{"egressProxy":{"address":"` + inside + `:` + theirPort + `","username":"client","password":"theirs"}}`)
			if out := ask(secure); !strings.Contains(out, "hello") {
				t.Errorf("by both proxies: %s", out)
			}
			if got := by.by("user"); !slices.Equal(got, []string{theirs}) {
				t.Errorf("by both, the operator's proxy was asked for %q, want %s", got, theirs)
			}
			if got := own.by("client"); !slices.Equal(got, []string{"127.0.0.1:" + securePort}) {
				t.Errorf("by both, the client's proxy was asked for %q", got)
			}
			put(`{}`)

			// One that fails, in every way.
			l.Close()
			fails := func(sb *client.Sandbox, want string) {
				t.Helper()
				for _, url := range []string{"http://" + inside + ":" + portOf(plain), secure} {
					_, out := run(t, sb, "curl -sS -i -m 20 "+url+" 2>&1")
					if !regexp.MustCompile(`HTTP/\S+ 502`).MatchString(out) || !strings.Contains(strings.ToLower(out), "x-airlock-error: upstream") || !regexp.MustCompile(want).MatchString(out) {
						t.Errorf("%s: %s", url, out)
					}
					if strings.Contains(out, operatorPassword) || strings.Contains(out, at) {
						t.Errorf("the sandbox is told the proxy: %s", out)
					}
				}
			}
			fails(sb, "reach the host's proxy: connect: connection refused")
			other := kind.serve(t, listening(t, "127.0.0.1:0"), "another", &by)
			for _, name := range []string{"HTTP_PROXY", "HTTPS_PROXY"} {
				t.Setenv(name, kind.scheme+"://user:"+operatorPassword+"@"+other)
			}
			second := networked(t)
			fails(create(t, second.as(second.key("red", airlock.Client)), client.CreateRequest{Timeout: 5 * time.Minute, Policy: ownPolicy}), kind.wrong)
			for _, s := range []*network{s, second} {
				s.holdsNot(t, operatorPassword)
			}
		})
	}
}

// What a program's own settings of proxies lead to is decided like all else.
func TestProxySettingsInside(t *testing.T) {
	if _, err := exec.LookPath("curl"); err != nil {
		t.Skip("curl is not installed")
	}
	s := networked(t)
	hello := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { fmt.Fprintf(w, "hello from %s by %s", r.Host, r.Method) })
	plain := httptest.NewServer(hello)
	t.Cleanup(plain.Close)
	secure, clear := s.secure(t, hello), "http://"+inside+":"+portOf(plain)+"/"
	var by asked
	tunnel := connectProxy(t, listening(t, "127.0.0.1:0"), "", &by)
	_, tunnelPort, _ := net.SplitHostPort(tunnel)
	c := s.as(s.key("red", airlock.Client))
	// Where raw bytes are permitted, a program may speak with any proxy there.
	const requests = `
@id("requests") permit (principal, action == Action::"http:request", resource)
when { resource.name == "` + inside + `" && context.ip == ip("127.0.0.1") };
@id("names") permit (principal, action == Action::"dns:resolve", resource) when { resource.name == "` + inside + `" };
`
	sb := create(t, c, client.CreateRequest{Timeout: 10 * time.Minute, Policy: requests, Limits: airlock.Limits{MemoryMB: 1024}})
	const gateway = "export http_proxy=http://10.0.0.1:3128 https_proxy=http://10.0.0.1:3128 HTTP_PROXY=http://10.0.0.1:3128 HTTPS_PROXY=http://10.0.0.1:3128; "
	for _, tt := range []struct{ name, needs, line, want, trail string }{
		{"curl, in the clear", "curl", gateway + "curl -sS " + clear, "hello from " + inside, "http:request permit " + inside + " GET 200"},
		{"curl, over TLS", "curl", gateway + "curl -sS " + secure, "hello from " + inside, "http:request permit " + inside + " GET 200"},
		{"curl, a tunnel in the clear", "curl", gateway + "curl -sS -p " + clear, "hello from " + inside, "http:request permit " + inside + " GET 200"},
		{"wget", "wget", gateway + "wget -qO- " + secure, "hello from " + inside, "http:request permit " + inside + " GET 200"},
		{"python", "python3", gateway + `python3 -c 'import urllib.request; print(urllib.request.urlopen("` + secure + `").read())'`, "hello from " + inside, "http:request permit " + inside + " GET 200"},
		{"git", "git", gateway + "git ls-remote " + gitServer(t), "HEAD", "http:request permit " + inside + " GET 200"},
		{"IPv6", "curl", "curl -sS -x 'http://[fd61:6972::1]:3128' " + secure, "hello from " + inside, "http:request permit " + inside + " GET 200"},
		{"a name that is denied", "curl", gateway + "curl -sS http://example.com/", `"code":403.*example\.com`, "dns:resolve deny example.com  0"},
		{"a name that is denied, over TLS", "curl", gateway + "curl -sS https://example.com/", `"code":403.*example\.com`, "dns:resolve deny example.com  0"},
		{"an address that is denied", "curl", gateway + "curl -sS http://192.0.2.7/", `"code":403`, "http:request deny 192.0.2.7 GET 0"},
		// Another host as the proxy is a connection to that host.
		{"another proxy", "curl", "curl -sS -x http://192.0.2.7:80 http://example.com/", `"code":403.*example\.com`, "http:request deny example.com GET 0"},
		{"another proxy, for TLS", "curl", "curl -sS -x http://192.0.2.7:80 https://example.com/", "response 4", "net:connect deny 192.0.2.7  0"},
		{"another proxy at another port", "curl", "curl -sS -x http://192.0.2.7:8080 http://example.com/", "reset|refused|Could not connect|Couldn't connect", "net:connect deny 192.0.2.7  0"},
		{"a permitted host as a proxy", "curl", "curl -sS -x " + clear + " http://other.example/", `"code":421`, "http:request deny other.example GET 0"},
		{"a permitted host as a proxy, for TLS", "curl", "curl -sS -x http://" + inside + ":" + tunnelPort + " https://other.example/", "response 400", "net:connect deny " + inside + "  0"},
		{"SOCKS", "curl", "curl -sS -m 5 -x socks5h://10.0.0.1:1080 " + secure, "refused|reset|Could not connect|Couldn't connect|Failed to connect", ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if _, err := exec.LookPath(tt.needs); err != nil {
				t.Skipf("%s is not installed", tt.needs)
			}
			before := len(s.crossings(sb.ID))
			_, out := run(t, sb, tt.line+" 2>&1")
			if !regexp.MustCompile(tt.want).MatchString(out) {
				t.Errorf("%s, want %s", out, tt.want)
			}
			var trail bytes.Buffer
			for _, x := range s.crossings(sb.ID)[before:] {
				fmt.Fprintf(&trail, "%s %s %s %s %d\n", x.Action, x.Effect, x.Resource, x.Method, x.Status)
			}
			if !strings.Contains(trail.String(), tt.trail) {
				t.Errorf("the trail lacks %q:\n%s", tt.trail, &trail)
			}
		})
	}
	if got := by.by(""); got != nil {
		t.Errorf("a proxy that a program chose was asked for %q", got)
	}
}
