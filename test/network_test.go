package test

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha1"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"log"
	"math/big"
	"net"
	"net/http"
	"net/http/cgi"
	"net/http/httptest"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"airlock.dev/airlock"
	"airlock.dev/airlock/client"
	"airlock.dev/airlock/gateway/address"
	"airlock.dev/airlock/policy"
)

// inside is a name that leads to this machine's loopback for the server of a
// test, and for nobody else.
const inside = "service.airlock.test"

// networked starts a server whose sandboxes reach the registries that this
// machine is configured for, and servers of the test at the name inside.
func networked(t *testing.T, flags ...string) *network {
	t.Helper()
	needRoot(t)
	s := &network{}
	ca := s.authority(t)
	dir := t.TempDir()
	for d := dir; d != os.TempDir() && d != "/"; d = filepath.Dir(d) {
		if err := os.Chmod(d, 0o755); err != nil { // the gateway's user reads there
			t.Fatal(err)
		}
	}
	hosts, err := os.ReadFile("/etc/hosts")
	if err != nil {
		t.Fatal(err)
	}
	write := func(name, text string) string {
		p := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(p, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		return p
	}
	hostsFile := write("hosts", string(hosts)+"\n127.0.0.1 "+inside+"\n")
	internet, err := policy.ProfileText("internet")
	if err != nil {
		t.Fatal(err)
	}
	s.policies = write("policies/default.cedar", internet+`
@id("servers-of-the-test")
permit (principal, action in [Action::"net:connect", Action::"http:request"], resource)
when { resource.name == "`+inside+`" && context.ip == ip("127.0.0.1") };
`)
	flags = append(flags, "--policies", filepath.Join(dir, "policies"), "--public-range", "127.0.0.1/32")
	for _, p := range registryRanges(t) {
		flags = append(flags, "--public-range", p.String())
	}
	in := []string{"unshare", "--mount", "--propagation", "private", "sh", "-c", `mount --bind "$0" /etc/hosts && exec "$@"`, hostsFile}
	// The gateway trusts what its machine does, and here the test's own authority too.
	bundle, err := os.ReadFile("/etc/ssl/certs/ca-certificates.crt")
	if err != nil {
		t.Fatal(err)
	}
	t.Setenv("SSL_CERT_FILE", write("roots.pem", string(bundle)+"\n"+string(ca)))
	s.running = startServerIn(t, in, t.TempDir(), flags...)
	return s
}

// network is a server whose sandboxes have one.
type network struct {
	*running
	policies string            // file of what every team may
	caCert   *x509.Certificate // an authority that its gateway trusts
	caKey    *ecdsa.PrivateKey
}

// authority makes one, and returns its certificate in PEM.
func (s *network) authority(t *testing.T) []byte {
	t.Helper()
	var err error
	if s.caKey, err = ecdsa.GenerateKey(elliptic.P256(), rand.Reader); err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "authority of a test"}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, s.caKey.Public(), s.caKey)
	if err == nil {
		s.caCert, err = x509.ParseCertificate(der)
	}
	if err != nil {
		t.Fatal(err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
}

// certificate is of names, and by the authority.
func (s *network) certificate(t *testing.T, names ...string) tls.Certificate {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	der, err := x509.CreateCertificate(rand.Reader, &x509.Certificate{
		SerialNumber: big.NewInt(2), DNSNames: names, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), KeyUsage: x509.KeyUsageDigitalSignature,
	}, s.caCert, key.Public(), s.caKey)
	if err != nil {
		t.Fatal(err)
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
}

// secure serves HTTPS at the name inside, and returns its URL.
func (s *network) secure(t *testing.T, h http.Handler) string {
	t.Helper()
	server := httptest.NewUnstartedServer(h)
	server.Config.ErrorLog = log.New(io.Discard, "", 0)
	server.TLS = &tls.Config{Certificates: []tls.Certificate{s.certificate(t, inside)}}
	server.EnableHTTP2 = true
	server.StartTLS()
	t.Cleanup(server.Close)
	return "https://" + inside + ":" + portOf(server) + "/"
}

// registryRanges are the addresses of the registries in the profile packages
// that this machine reaches by addresses that are not public.
func registryRanges(t *testing.T) (all []netip.Prefix) {
	t.Helper()
	text, err := policy.ProfileText("packages")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	seen := map[string]bool{}
	for _, m := range regexp.MustCompile(`"([a-z0-9-]+(\.[a-z0-9-]+)+)"`).FindAllStringSubmatch(text, -1) {
		if seen[m[1]] {
			continue
		}
		seen[m[1]] = true
		found, _ := net.DefaultResolver.LookupNetIP(ctx, "ip", m[1]+".")
		for _, ip := range found {
			p := netip.PrefixFrom(ip.Unmap(), ip.Unmap().BitLen())
			if address.Classify(ip) == address.Documentation && !slices.Contains(all, p) {
				all = append(all, p)
			}
		}
	}
	return all
}

// ownPolicy is what a client asks for who wants packages and the test's servers.
const ownPolicy = `
@id("servers") permit (principal, action in [Action::"net:connect", Action::"http:request"], resource)
when { resource.name == "` + inside + `" && context.ip == ip("127.0.0.1") };
@id("names") permit (principal, action == Action::"dns:resolve", resource) when { resource.name == "` + inside + `" };
`

// gitServer serves a repository with one file over smart HTTP.
func gitServer(t *testing.T) (url string) {
	t.Helper()
	git, err := exec.LookPath("git")
	if err != nil {
		t.Skip("git is not installed")
	}
	dir := t.TempDir()
	for _, args := range [][]string{
		{"init", "-q", "-b", "main", "work"},
		{"-C", "work", "-c", "user.name=t", "-c", "user.email=t@example.com", "commit", "-q", "--allow-empty", "-m", "first light"},
		{"clone", "-q", "--bare", "work", "repo.git"},
	} {
		cmd := exec.Command(git, args...)
		cmd.Dir = dir
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("git %s: %v\n%s", args, err, out)
		}
	}
	backend := &cgi.Handler{Path: git, Args: []string{"http-backend"}, Env: []string{"GIT_PROJECT_ROOT=" + dir, "GIT_HTTP_EXPORT_ALL=1", "HOME=" + dir, "GIT_CONFIG_COUNT=1", "GIT_CONFIG_KEY_0=safe.directory", "GIT_CONFIG_VALUE_0=*"}}
	s := httptest.NewServer(backend)
	t.Cleanup(s.Close)
	return "http://" + inside + ":" + portOf(s) + "/repo.git"
}

func portOf(s *httptest.Server) string {
	_, port, _ := net.SplitHostPort(s.Listener.Addr().String())
	return port
}

// reached are the crossings of a sandbox, as one command tells them.
type reached struct {
	Action, Effect, Resource, Method, Path, Outcome string
	Status, BytesOut, BytesIn                       int64
	Policies                                        []string
}

func (s *running) crossings(sandbox string) (all []reached) {
	s.t.Helper()
	for line := range strings.Lines(s.trail("crossings", sandbox, "--json")) {
		var r reached
		if err := json.Unmarshal([]byte(line), &r); err != nil {
			s.t.Fatalf("%s: %v", line, err)
		}
		all = append(all, r)
	}
	return all
}

// webSocket says hello by a WebSocket, or as it is asked.
func webSocket(w http.ResponseWriter, r *http.Request) {
	if r.Header.Get("Upgrade") != "websocket" {
		fmt.Fprint(w, "hello")
		return
	}
	sum := sha1.Sum([]byte(r.Header.Get("Sec-WebSocket-Key") + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"))
	c, _, err := http.NewResponseController(w).Hijack()
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	defer c.Close()
	fmt.Fprintf(c, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Accept: %s\r\n\r\n", base64.StdEncoding.EncodeToString(sum[:]))
	io.WriteString(c, "\x81\x05hello")
	io.Copy(io.Discard, c) // until the client goes
}

// uploadCargo puts this machine's cargo into sandboxes that do not have it: what
// rustup installs is nobody else's. It returns how cargo is called there.
func uploadCargo(t *testing.T, sandboxes ...*client.Sandbox) string {
	t.Helper()
	at, err := exec.LookPath("cargo")
	if err != nil || strings.HasPrefix(at, "/usr/") {
		return "cargo"
	}
	if out, err := exec.Command("rustup", "which", "cargo").Output(); err == nil {
		at = strings.TrimSpace(string(out))
	}
	for _, sb := range sandboxes {
		f, err := os.Open(at)
		if err != nil {
			t.Fatal(err)
		}
		err = sb.Upload(t.Context(), "cargo", f, 0o755)
		f.Close()
		if err != nil {
			t.Fatal(err)
		}
	}
	return "~/cargo"
}

// The promise of the profile packages: the package managers work with what the
// machine is configured for, and the trail has each request.
func TestPackages(t *testing.T) {
	s := networked(t)
	c := s.as(s.key("red", airlock.Client))
	repo := gitServer(t)
	secure := s.secure(t, http.HandlerFunc(webSocket))
	socket := strings.Replace(secure, "https://", "wss://", 1)
	sb := create(t, c, client.CreateRequest{Timeout: 10 * time.Minute, Profile: "packages", Policy: ownPolicy, Limits: airlock.Limits{MemoryMB: 2048, DiskMB: 4096, Processes: 1024}})
	off := create(t, c, client.CreateRequest{Timeout: 10 * time.Minute, Profile: "offline"})
	cargo := uploadCargo(t, sb, off)
	const venv = `cd $(mktemp -d) && python3 -m venv v && v/bin/pip install -q --no-cache-dir --retries 0 `
	const npm = `cd $(mktemp -d) && npm install --silent --no-audit --fetch-retries=0 `
	const pip = "403|resolve|No matching"
	for _, tool := range []struct {
		name, host, needs string // host is where one of its requests must go
		line              string
		fails             string // offline, in at most a few seconds
	}{
		{"pip", "", "python3", venv + `six && v/bin/python -c 'import six; print("works")'`, pip},
		{"pip of the system", "", "/usr/bin/pip", `cd $(mktemp -d) && pip install -q --no-cache-dir --retries 0 tabulate && echo works | tabulate`, pip},
		{"uv", inside, "python3", venv + `uv && v/bin/uv venv -q w && v/bin/uv pip install -q -p w requests 'httpx[http2]' && w/bin/python -c '
import requests, httpx, urllib.request
assert requests.get("` + secure + `").text == "hello"
assert httpx.get("` + secure + `").text == "hello"
with httpx.Client(http2=True) as c:
    r = c.get("` + secure + `")
    assert r.text == "hello" and r.http_version == "HTTP/2", r.http_version
assert urllib.request.urlopen("` + secure + `").read() == b"hello"
print("works")'`, pip},
		{"npm", "", "npm", npm + `left-pad && node -e 'require("left-pad"); console.log("works")'`, "403|ENOTFOUND|EAI_AGAIN|.*"},
		{"yarn and pnpm", "", "npm", npm + `yarn@1 pnpm@9 && B=$PWD/node_modules/.bin && mkdir y p && cd y && echo '{}' > package.json && $B/yarn add -s left-pad && node -e 'require("left-pad")' &&
cd ../p && echo '{}' > package.json && $B/pnpm add --silent left-pad && node -e 'require("left-pad"); console.log("works")'`, ".*"},
		{"fetch", inside, "node", `node -e 'fetch("` + secure + `").then(async (r) => console.log(await r.text() === "hello" ? "works" : "another answer"))'`, "ENOTFOUND|EAI_AGAIN|fetch failed"},
		{"ws", "", "npm", npm + `ws && node -e 'new (require("ws"))("` + socket + `").on("message", (m) => { console.log(String(m) === "hello" ? "works" : "another message"); process.exit() })'`, ".*"},
		{"cargo", "", cargo, `cd $(mktemp -d) && mkdir src && touch src/lib.rs && printf '[package]\nname = "t"\nversion = "0.1.0"\nedition = "2021"\n[dependencies]\nitoa = "1"\n' > Cargo.toml && export CARGO_HOME=$PWD/home CARGO_NET_RETRY=0 && ` + cargo + ` -q vendor >/dev/null && ls vendor/itoa/src/lib.rs && echo works`, "resolve|403"},
		{"maven", "", "mvn", `cd $(mktemp -d) && echo '<project><modelVersion>4.0.0</modelVersion><parent><groupId>org.apache</groupId><artifactId>apache</artifactId><version>23</version><relativePath/></parent><groupId>t</groupId><artifactId>t</artifactId><version>1</version><packaging>pom</packaging></project>' > pom.xml && MAVEN_OPTS=-XX:TieredStopAtLevel=1 mvn -q -B -Dmaven.repo.local=$PWD/r validate && ls r/org/apache/apache/23/apache-23.pom && echo works`, "Unknown host|resolution|403"},
		{"apt", "", "apt-get", `sudo apt-get -qq -o APT::Update::Error-Mode=any -o Acquire::Languages=none update && sudo DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends hello && /usr/bin/hello && echo works`, "Could not resolve|resolving|403"},
		{"go", "", "go", `cd $(mktemp -d) && export HOME=$PWD GOFLAGS=-modcacherw && go mod init x 2>/dev/null && go mod edit -require=golang.org/x/text@v0.3.0 && go mod download golang.org/x/text@v0.3.0 && echo works`, "lookup|403|dial|server misbehaving|no such host"},
		{"git", inside, "git", `cd $(mktemp -d) && git clone -q ` + repo + ` r && git -C r log --format=%s && echo works`, "resolve"},
	} {
		t.Run(tool.name, func(t *testing.T) {
			if _, err := exec.LookPath(tool.needs); err != nil && tool.needs != "~/cargo" {
				t.Skipf("%s is not installed", tool.needs)
			}
			before := len(s.crossings(sb.ID))
			if out := must(t, sb, tool.line); !strings.Contains(out, "works") {
				t.Errorf("it does not work:\n%s", out)
			}
			hosts := map[string]int{}
			for _, r := range s.crossings(sb.ID)[before:] {
				if r.Action == "http:request" && r.Effect == "permit" && r.Outcome == "ok" && (r.Status == 200 || r.Status == 101) && r.BytesIn > 0 && r.Path != "" && len(r.Policies) > 1 {
					hosts[r.Resource]++
				}
			}
			if len(hosts) == 0 || tool.host != "" && hosts[tool.host] == 0 {
				t.Errorf("requests in the trail: %v", hosts)
			}

			began := time.Now()
			r, out := run(t, off, tool.line)
			if took := time.Since(began); took > 20*time.Second {
				t.Errorf("offline it took %s to fail", took)
			}
			if r.ExitCode == 0 || !regexp.MustCompile(tool.fails).MatchString(out) {
				t.Errorf("offline: exit code %d\n%s", r.ExitCode, out)
			}
		})
	}
	denied := map[string]int{}
	for _, r := range s.crossings(off.ID) {
		denied[r.Effect]++
	}
	if denied["permit"] != 0 || denied["deny"] == 0 {
		t.Errorf("offline, the trail has %v", denied)
	}
}

// What is denied is denied at once, with the reason, and never hangs.
func TestDeniedAtOnce(t *testing.T) {
	s := networked(t)
	c := s.as(s.key("red", airlock.Client))
	off := create(t, c, client.CreateRequest{Timeout: 5 * time.Minute, Profile: "offline"})
	if _, err := exec.LookPath("curl"); err != nil {
		t.Skip("curl is not installed")
	}
	for _, c := range []struct{ name, line, want string }{
		{"a name", `curl -sS http://example.com/ 2>&1`, "Could not resolve host"},
		{"an address", `curl -sS http://192.0.2.7/a 2>&1`, "not reached from a sandbox|nothing in the|does not name it"},
		{"metadata", `curl -sS http://169.254.169.254/latest/meta-data 2>&1`, "the class metadata, which is not reached from a sandbox"},
		{"an address over TLS", `curl -sS https://93.184.216.34/ 2>&1`, `"code":403.*nothing in the`},
		{"another port", `curl -sS http://93.184.216.34:22/ 2>&1`, "refused|Connection reset|Couldn't connect|Could not connect"},
		{"QUIC", `python3 -c '
import socket
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.connect(("93.184.216.34", 443)); s.settimeout(2); s.send(b"x")
try: s.recv(1)
except ConnectionRefusedError: print("refused")'`, "refused"},
		{"the way of its own", `curl -sS --proxy http://10.0.0.1:3128 http://example.com/ 2>&1`, `"code":403.*dns:resolve`},
		{"the gateway", `curl -sS http://10.0.0.1/ 2>&1`, "refused|Connection reset|connect"},
		{"DNS of one's own", `python3 -c '
import socket
q = b"\x12\x34\x01\0\0\1\0\0\0\0\0\0\6secret\x08attacker\4test\0\0\1\0\1"
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.settimeout(2); s.sendto(q, ("93.184.216.34", 53)); print("rcode", s.recv(512)[3] & 15)'`, "rcode 5"},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, out := run(t, off, `start=$(date +%s%N); `+c.line+`; echo; echo took $(( ($(date +%s%N) - start) / 1000000 ))`)
			var millis int
			if i := strings.LastIndex(out, "took "); i >= 0 {
				fmt.Sscan(out[i+5:], &millis)
			}
			// The interpreter's own start is in it, on a busy machine.
			if !regexp.MustCompile(c.want).MatchString(out) || millis > 2000 {
				t.Errorf("after %d ms: %s", millis, out)
			}
		})
	}
	var got []string
	for _, r := range s.crossings(off.ID) {
		got = append(got, r.Effect+" "+r.Action+" "+r.Resource)
	}
	for _, want := range []string{"deny dns:resolve example.com", "deny http:request 169.254.169.254", "deny http:request 93.184.216.34", "deny net:connect 93.184.216.34", "deny dns:resolve secret.attacker.test"} {
		if !slices.Contains(got, want) {
			t.Errorf("the trail lacks %q:\n%s", want, strings.Join(got, "\n"))
		}
	}
	if i := slices.IndexFunc(got, func(s string) bool { return !strings.HasPrefix(s, "deny") }); i >= 0 {
		t.Errorf("the trail has %q", got[i])
	}
}

// warm are programs that resolve a name and trust the roots once, and then ask
// again and again; each prints "ok hello" for every answer.
var warm = []struct{ name, needs, file, code, run string }{
	{"python", "python3", "warm.py", `
import ssl, time, urllib.request
context = ssl.create_default_context()
while True:
    try:
        print("ok", urllib.request.urlopen("URL", timeout=5, context=context).read().decode(), flush=True)
    except Exception as e:
        print("failed", e, flush=True)
    time.sleep(0.1)
`, "python3 warm.py"},
	{"node", "node", "warm.mjs", `
for (;;) {
  try { console.log("ok", await (await fetch("URL")).text()) } catch (e) { console.log("failed", e.cause ?? e) }
  await new Promise(r => setTimeout(r, 100))
}
`, "node warm.mjs"},
	{"java", "java", "Warm.java", `
import java.net.URI;
import java.net.http.*;
public class Warm {
  public static void main(String[] a) throws Exception {
    var client = HttpClient.newHttpClient();
    for (;;) {
      try {
        System.out.println("ok " + client.send(HttpRequest.newBuilder(URI.create("URL")).build(), HttpResponse.BodyHandlers.ofString()).body());
      } catch (Exception e) { System.out.println("failed " + e); }
      Thread.sleep(100);
    }
  }
}
`, "java Warm.java"},
}

// What was started when a sandbox had no way out trusts the gateway when it gets
// one. A gateway that is killed takes connections with it, and nothing else: what
// runs in a sandbox finds the names that it knew, and trusts what it trusted.
func TestWarmPrograms(t *testing.T) {
	s := networked(t)
	key := s.key("red", airlock.Client)
	c := s.as(key)
	url := s.secure(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { fmt.Fprint(w, "hello") }))
	sb := create(t, c, client.CreateRequest{Timeout: 10 * time.Minute, Policy: ownPolicy, Limits: airlock.Limits{MemoryMB: 2048}, Network: &client.Network{DenyOut: []string{"0.0.0.0/0"}}})
	var started []string
	for _, w := range warm {
		if _, err := exec.LookPath(w.needs); err != nil {
			t.Logf("%s is not installed", w.needs)
			continue
		}
		if err := sb.Upload(t.Context(), w.file, strings.NewReader(strings.ReplaceAll(w.code, "URL", url)), 0); err != nil {
			t.Fatal(err)
		}
		must(t, sb, "nohup "+w.run+" >>/tmp/"+w.name+".log 2>&1 &")
		started = append(started, w.name)
	}
	if len(started) == 0 {
		t.Skip("none of python3, node and java is installed")
	}
	// said counts what a program did since the last mark.
	said := func(name string) int {
		n, err := strconv.Atoi(strings.TrimSpace(must(t, sb, `tac /tmp/`+name+`.log | sed '/^mark/,$d' | grep -c "^ok hello$" || true`)))
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	all := func() {
		t.Helper()
		for _, name := range started {
			defer func() {
				if t.Failed() {
					t.Logf("%s: %s", name, must(t, sb, "tail -n 5 /tmp/"+name+".log"))
				}
			}()
			until(t, func() bool { return said(name) > 3 })
		}
	}
	for _, name := range started {
		until(t, func() bool { return must(t, sb, "grep -c ^failed /tmp/"+name+".log || true") != "0\n" })
		if n := said(name); n != 0 {
			t.Errorf("%s was answered %d times without a way out", name, n)
		}
	}
	s.setNetwork(t, key, sb.ID, "{}")
	all()
	pid := gatewayOf(t, s)
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	until(t, func() bool { next := gatewayPID(s); return next != 0 && next != pid })
	for _, name := range started {
		must(t, sb, "echo mark >> /tmp/"+name+".log")
	}
	all()
}

// Who only waits for an answer learns that there will be none, from the next
// gateway: of the same server, and of the next one.
func TestWaitingConnections(t *testing.T) {
	s := networked(t)
	c := s.as(s.key("red", airlock.Client))
	asked := make(chan bool, 9)
	url := s.secure(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asked <- true
		<-r.Context().Done()
	}))
	sb := create(t, c, client.CreateRequest{Timeout: 10 * time.Minute, Policy: ownPolicy})
	for name, kill := range map[string]func() int{"gateway": func() int { return gatewayPID(s) }, "server": s.server} {
		must(t, sb, "nohup bash -c 'curl -sS "+url+"; echo over' >/tmp/"+name+" 2>&1 &")
		select {
		case <-asked:
		case <-time.After(30 * time.Second):
			t.Fatal("the request did not arrive")
		}
		pid := kill()
		if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		until(t, func() bool { next := kill(); return next != 0 && next != pid })
		until(t, func() bool {
			var out bytes.Buffer
			_, err := sb.Exec(t.Context(), client.ExecRequest{Cmd: "cat", Args: []string{"/tmp/" + name}, Stdout: &out})
			return err == nil && strings.Contains(out.String(), "over")
		})
	}
}

// setNetwork replaces what the client asks for of a sandbox's network.
func (s *network) setNetwork(t *testing.T, key, id, body string) {
	t.Helper()
	r, err := http.NewRequest("PUT", s.url+"/sandboxes/"+id+"/network", strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("X-API-KEY", key)
	res, err := http.DefaultClient.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	if res.StatusCode != http.StatusNoContent {
		text, _ := io.ReadAll(res.Body)
		t.Fatalf("change the network: %s: %s", res.Status, text)
	}
}

// until waits for something that takes a moment.
func until(t *testing.T, what func() bool) {
	t.Helper()
	for deadline := time.Now().Add(30 * time.Second); !what(); time.Sleep(50 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("it did not happen within 30 s")
		}
	}
}

func gatewayOf(t *testing.T, s *network) int {
	t.Helper()
	pid := gatewayPID(s)
	if pid == 0 {
		t.Fatal("there is no gateway")
	}
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{fmt.Sprintf("Uid:\t%d", airlock.GatewayUser), "CapEff:\t0000000000000000", "NoNewPrivs:\t1", "Groups:\t \n"} {
		if !strings.Contains(string(status), want) {
			t.Errorf("the gateway's status lacks %q", want)
		}
	}
	return pid
}

// gatewayPID is that of the server's gateway: the one below the test's own.
func gatewayPID(s *network) int {
	server := s.server()
	children, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", server))
	for _, file := range children {
		text, _ := os.ReadFile(file)
		for _, f := range strings.Fields(string(text)) {
			if name, _ := os.ReadFile("/proc/" + f + "/cmdline"); strings.HasPrefix(string(name), "airlock-gateway") {
				var pid int
				fmt.Sscan(f, &pid)
				return pid
			}
		}
	}
	return 0
}

// What the operator passes through keeps the certificate of its own server, and
// is recorded as a connection. Only then sandboxes trust the world's roots.
func TestPassthrough(t *testing.T) {
	s := networked(t)
	c := s.as(s.key("red", airlock.Client))
	url := s.secure(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { fmt.Fprint(w, "hello") }))
	issuer := `curl -sSv ` + url + ` 2>&1 | grep -E "issuer:|^hello"`
	before := create(t, c, client.CreateRequest{Timeout: 5 * time.Minute, Policy: ownPolicy})
	if out := must(t, before, issuer); !strings.Contains(out, "hello") || !strings.Contains(out, "Airlock") {
		t.Errorf("terminated: %s", out)
	}
	text, err := os.ReadFile(s.policies)
	if err != nil {
		t.Fatal(err)
	}
	text = append(text, `
@id("pinned") @passthrough("") permit (principal, action == Action::"net:connect", resource)
when { resource.name == "`+inside+`" && context.ip == ip("127.0.0.1") };
`...)
	if err := os.WriteFile(s.policies, text, 0o644); err != nil {
		t.Fatal(err)
	}
	if out, err := s.airlock("", "policy", "reload"); err != nil {
		t.Fatalf("airlock policy reload: %v\n%s", err, out)
	}
	sb := create(t, c, client.CreateRequest{Timeout: 5 * time.Minute, Policy: ownPolicy})
	if out := must(t, sb, issuer); !strings.Contains(out, "hello") || !strings.Contains(out, "authority of a test") {
		t.Errorf("passed through: %s", out)
	}
	var got []string
	for _, r := range s.crossings(sb.ID) {
		if r.Action != "dns:resolve" {
			got = append(got, r.Action+" "+r.Effect+" "+r.Outcome)
		}
	}
	if !slices.Equal(got, []string{"net:connect permit ok"}) {
		t.Errorf("the trail has %q", got)
	}
	if out := must(t, before, issuer+" || echo refused"); !strings.Contains(out, "refused") {
		t.Errorf("a sandbox from before trusts the world: %s", out)
	}
}

// The gateway's authority is replaced while sandboxes run, and all of them
// trust what they see, the whole time.
func TestRotateRoot(t *testing.T) {
	s := networked(t)
	c := s.as(s.key("red", airlock.Client))
	url := s.secure(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { fmt.Fprint(w, "hello") }))
	issuer := func(sb *client.Sandbox) string {
		return must(t, sb, `curl -sSv `+url+` 2>&1 | grep -E "issuer:|^hello"`)
	}
	reload := func() {
		pid := s.server()
		if err := syscall.Kill(s.cmd.Process.Pid, syscall.SIGHUP); err != nil {
			t.Fatal(err)
		}
		until(t, func() bool {
			next := s.server()
			return next != 0 && next != pid && gatewayPID(s) != 0
		})
		until(t, func() bool { _, err := c.List(t.Context(), nil); return err == nil })
	}
	roots := func() int {
		r, err := s.operator().GatewayRoot(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		return len(r.Roots)
	}
	ask := client.CreateRequest{Timeout: 5 * time.Minute, Policy: ownPolicy}
	old := create(t, c, ask)
	first := issuer(old)
	if out, err := s.airlock("", "gateway", "rotate-root"); err != nil || strings.Count(out, "BEGIN CERTIFICATE") != 2 {
		t.Fatalf("airlock gateway rotate-root: %v\n%s", err, out)
	}
	reload()
	both := create(t, c, ask)
	if a, b := issuer(old), issuer(both); a != first || b != first || !strings.Contains(first, "hello") {
		t.Errorf("while both are trusted: %q, %q, want %q", a, b, first)
	}
	if err := old.Close(); err != nil {
		t.Fatal(err)
	}
	reload()
	if out := issuer(both); !strings.Contains(out, "hello") {
		t.Errorf("with the new root: %q", out)
	}
	if out := issuer(create(t, c, ask)); !strings.Contains(out, "hello") {
		t.Errorf("a new sandbox with the new root: %q", out)
	}
	if n := roots(); n > 2 {
		t.Errorf("%d roots are trusted", n)
	}
}

// What whoever starts the server has open is not open in what the server starts:
// the gateway is another user.
func TestNothingOpenIsInherited(t *testing.T) {
	private := filepath.Join(t.TempDir(), "private")
	if err := os.WriteFile(private, []byte("of root alone"), 0o600); err != nil {
		t.Fatal(err)
	}
	startServerIn(t, []string{"bash", "-c", `exec 200<"$0" && exec "$@"`, private}, t.TempDir())
	open, err := filepath.Glob("/proc/[0-9]*/fd/200")
	if err != nil {
		t.Fatal(err)
	}
	var have []string
	for _, link := range open {
		if to, err := os.Readlink(link); err == nil && to == private {
			name, _ := os.ReadFile(filepath.Join(filepath.Dir(filepath.Dir(link)), "cmdline"))
			program, _, _ := strings.Cut(string(name), "\x00")
			have = append(have, filepath.Base(program))
		}
	}
	if !slices.Equal(have, []string{"airlock"}) { // that was started with it
		t.Errorf("%q have it open", have)
	}
}
