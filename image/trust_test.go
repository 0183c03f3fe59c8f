package image

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/pem"
	"fmt"
	"io"
	"io/fs"
	"log"
	"maps"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"airlock.dev/airlock"
)

// authority is a root as the gateway's.
type authority struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

func newAuthority(t *testing.T, name string) authority {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: pkix.Name{CommonName: name, OrganizationalUnit: []string{time.Now().UTC().Format(time.DateTime)}},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, MaxPathLenZero: true, KeyUsage: x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	return authority{cert, key}
}

func (a authority) pem() []byte {
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: a.cert.Raw})
}

// site is a server for localhost with a leaf of an authority. It remembers
// the paths that were asked for: a client that does not trust it asks for none.
type site struct {
	url string

	mu    sync.Mutex
	asked []string
}

func (s *site) saw(path string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.ContainsFunc(s.asked, func(p string) bool { return strings.HasPrefix(p, path) })
}

func newSite(t *testing.T, a authority) *site {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	der, err := x509.CreateCertificate(rand.Reader, &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: pkix.Name{CommonName: "localhost"}, DNSNames: []string{"localhost"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), BasicConstraintsValid: true,
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}, a.cert, key.Public(), a.key)
	if err != nil {
		t.Fatal(err)
	}
	s := &site{}
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		s.mu.Lock()
		s.asked = append(s.asked, r.URL.Path)
		s.mu.Unlock()
		io.WriteString(w, "hello\n")
	}))
	server.EnableHTTP2 = true
	server.Config.ErrorLog = log.New(io.Discard, "", 0) // of handshakes that are to fail
	server.TLS = &tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}}}
	server.StartTLS()
	t.Cleanup(server.Close)
	_, port, err := net.SplitHostPort(server.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	s.url = "https://localhost:" + port
	return s
}

// clients are programs that ask for a URL, the last of their arguments, which
// "URL" stands for. stores says that the stores of the image are enough for it,
// without any variable.
type client struct {
	name   string
	stores bool
	needs  string // is in the image, or the client is skipped
	args   []string
	env    []string
}

var clients = []client{
	{name: "curl", stores: true, needs: "/usr/bin/curl", args: []string{"curl", "-s", "URL"}},
	{name: "wget", stores: true, needs: "/usr/bin/wget", args: []string{"wget", "-qO-", "--tries=1", "URL"}},
	{name: "openssl", stores: true, needs: "/usr/bin/openssl", args: []string{"sh", "-c", getOpenSSL, "sh", "URL", "-no-CApath"}},
	{name: "openssl-directory", stores: true, needs: "/usr/bin/openssl", args: []string{"sh", "-c", getOpenSSL, "sh", "URL", "-no-CAfile"}},
	{name: "git", stores: true, needs: "/usr/bin/git", args: []string{"git", "ls-remote", "URL"}},
	{name: "python", stores: true, needs: "/usr/bin/python3", args: []string{"python3", "-c", "import sys, urllib.request as r; r.urlopen(sys.argv[1])", "URL"}},
	{name: "requests", stores: true, needs: "/usr/lib/python3/dist-packages/requests", args: []string{"python3", "-c", "import sys, requests; requests.get(sys.argv[1])", "URL"}},
	{name: "certifi-of-pip", stores: true, needs: "/usr/lib/python3/dist-packages/pip/_vendor/certifi", args: []string{"python3", "-c",
		"import sys, pip._vendor.certifi as c, pip._vendor.requests as r; r.get(sys.argv[1], verify=c.where())", "URL"}},
	{name: "pip", stores: true, needs: "/usr/lib/python3/dist-packages/pip", args: []string{"python3", "-m", "pip", "download", "-q", "--retries=0", "--no-deps", "--disable-pip-version-check", "thing", "--index-url", "URL"}},
	{name: "uv", needs: "/usr/local/bin/uv", args: []string{"uv", "pip", "install", "--target=/tmp/uv", "--no-cache", "thing", "--index-url", "URL"}, env: []string{"UV_HTTP_RETRIES=0"}},
	{name: "node-https", needs: "/usr/bin/node", args: []string{"node", "-e", "require('https').get(process.argv[1], r => r.resume()).on('error', () => {})", "URL"}},
	{name: "node-fetch", needs: "/usr/bin/node", args: []string{"node", "-e", "fetch(process.argv[1]).then(r => r.text()).catch(() => {})", "URL"}},
	{name: "npm", needs: "/usr/bin/npm", args: []string{"npm", "view", "thing", "--fetch-retries=0", "--no-update-notifier", "--registry", "URL"}},
	{name: "go", stores: true, needs: "/usr/local/go/bin/go", args: []string{"sh", "-c", `cd /tmp && GOPROXY="$1" GONOSUMDB='*' GOFLAGS=-mod=mod exec /usr/local/go/bin/go list -m -versions example.test/thing`, "sh", "URL"},
		env: []string{"GOTOOLCHAIN=local", "GOPATH=/tmp/go", "GOCACHE=/tmp/go-cache", "GOTELEMETRY=off"}},
	{name: "perl", stores: true, needs: "/usr/share/perl5/IO/Socket/SSL.pm", args: []string{"perl", "-MHTTP::Tiny", "-e", "HTTP::Tiny->new(verify_SSL => 1)->get($ARGV[0])", "URL"}},
	{name: "ruby", stores: true, needs: "/usr/bin/ruby", args: []string{"ruby", "-ropen-uri", "-e", "URI.open(ARGV[0])", "URL"}},
	{name: "php", stores: true, needs: "/usr/bin/php", args: []string{"php", "-r", "file_get_contents($argv[1]);", "URL"}},
	{name: "cargo", needs: "/usr/bin/cargo", args: []string{"cargo", "search", "thing", "--index", "sparse+URL/"}},
}

const getOpenSSL = `url=$1; host=${url#https://}; path=/${host#*/}
printf 'GET %s HTTP/1.0\r\n\r\n' "$path" | openssl s_client -verify_return_error -quiet -servername localhost "$2" -connect "${host%%/*}"`

// getJava is the client of each JVM.
const getJava = `public class Get {
	public static void main(String[] a) throws Exception {
		java.net.http.HttpClient.newHttpClient().send(java.net.http.HttpRequest.newBuilder(java.net.URI.create(a[0])).build(), java.net.http.HttpResponse.BodyHandlers.discarding());
	}
}
`

const insideNamespace = "AIRLOCK_TEST_IMAGE"

// inNamespace runs the calling test again in a mount namespace of its own and
// says whether it is in that one.
func inNamespace(t *testing.T) bool {
	t.Helper()
	needRoot(t)
	if os.Getenv(insideNamespace) != "" {
		return true
	}
	args := []string{"-test.run=^" + regexp.QuoteMeta(t.Name()) + "$", "-test.timeout=4m"}
	if testing.Verbose() {
		args = append(args, "-test.v")
	}
	cmd := exec.Command("/proc/self/exe", args...)
	cmd.Env = append(os.Environ(), insideNamespace+"=1")
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS, Pdeathsig: syscall.SIGKILL}
	out, err := cmd.CombinedOutput()
	if testing.Verbose() || err != nil {
		t.Logf("in its namespace:\n%s", out)
	}
	if err != nil {
		t.Errorf("in its namespace: %v", err)
	}
	return false
}

const (
	testUID = 7_000_000 // of root inside
	testEnv = "PATH=" + DefaultPath
)

// newImage makes a host image on a tmpfs, with /proc and /dev, so that
// programs of it run in it. An image of the same options is made once.
func newImage(t *testing.T, dir string, opts Options) Image {
	t.Helper()
	guest := filepath.Join(dir, "guest")
	if err := os.WriteFile(guest, []byte("guest"), 0o755); err != nil {
		t.Fatal(err)
	}
	start := time.Now()
	img, err := Host(dir, guest, testUID, opts)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%s in %v", img.ID, time.Since(start).Round(time.Millisecond))
	return img
}

func imagesDir(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	for _, parent := range []string{dir, filepath.Dir(dir)} {
		if err := os.Chmod(parent, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := unix.Mount("tmpfs", dir, "tmpfs", unix.MS_NODEV, "mode=0755"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Unmount(dir, unix.MNT_DETACH) })
	return dir
}

// command runs a program of an image as its user does.
func command(ctx context.Context, img Image, args, env []string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, "/usr/bin/env", args...)
	cmd.Env = env
	cmd.Dir = "/tmp"
	cmd.SysProcAttr = &syscall.SysProcAttr{Chroot: img.RootFS, Credential: &syscall.Credential{Uid: testUID + 1000, Gid: testUID + 1000}, Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	return cmd
}

// TestClientsTrustTheRootOnly lets the programs of this machine speak to
// servers of the image's root, of the root that is to come after it, and of
// one that nobody knows.
func TestClientsTrustTheRootOnly(t *testing.T) {
	if !inNamespace(t) {
		return
	}
	ours, next, other := newAuthority(t, "Airlock gateway of test"), newAuthority(t, "Airlock gateway of test"), newAuthority(t, "Another")
	img := newImage(t, imagesDir(t), Options{Trust: Trust{PEM: append(ours.pem(), next.pem()...), ID: "both"}})
	for _, m := range []string{"/proc", "/dev"} {
		if err := unix.Mount(m, img.RootFS+m, "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
			t.Fatal(err)
		}
	}
	all := slices.Concat(clients, jvms(t, img))
	good, coming, bad := newSite(t, ours), newSite(t, next), newSite(t, other)
	bare := []string{testEnv, "HOME=/tmp"}
	full := slices.Clone(bare)
	for name, value := range img.Env {
		full = append(full, name+"="+value)
	}
	for _, c := range all {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel() // a few at a time: most wait for themselves
			if _, err := os.Stat(img.RootFS + c.needs); err != nil {
				t.Skipf("%s is not on this machine", c.needs)
			}
			try := func(what string, s *site, env []string, want bool) {
				t.Helper()
				path := "/" + c.name + "/" + what
				var args []string
				for _, a := range c.args {
					args = append(args, strings.ReplaceAll(a, "URL", s.url+path))
				}
				ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
				defer cancel()
				out, err := command(ctx, img, args, append(slices.Clone(env), c.env...)).CombinedOutput()
				if ctx.Err() != nil {
					t.Errorf("%s: it hangs\n%s", what, out)
				} else if s.saw(path) != want {
					t.Errorf("%s: trusted: %v, want %v (%v)\n%s", what, !want, want, err, out)
				}
			}
			try("good", good, full, true)
			try("bad", bad, full, false)
			if c.stores {
				try("bare", coming, bare, true)
				try("bad-bare", bad, bare, false)
			} else {
				try("coming", coming, full, true)
			}
		})
	}
}

// jvms are clients in each Java of the machine, the oldest of which compiles.
func jvms(t *testing.T, img Image) []client {
	t.Helper()
	var all []client
	for _, p := range find(javaDirs, []string{"bin/javac"}) {
		end, err := filepath.EvalSymlinks(p)
		if err != nil || end != p {
			continue // another name of one
		}
		if len(all) == 0 {
			if err := os.WriteFile(filepath.Join(img.RootFS, "tmp/Get.java"), []byte(getJava), 0o644); err != nil {
				t.Fatal(err)
			}
			if out, err := command(t.Context(), img, []string{p, "--release", "11", "/tmp/Get.java"}, []string{testEnv}).CombinedOutput(); err != nil {
				t.Fatalf("%v\n%s", err, out)
			}
		}
		java := filepath.Join(filepath.Dir(p), "java")
		all = append(all, client{name: filepath.Base(filepath.Dir(filepath.Dir(p))), stores: true, needs: java, args: []string{java, "-XX:TieredStopAtLevel=1", "-cp", "/tmp", "Get", "URL"}})
	}
	return all
}

// TestStores looks at what the image holds: no root that is not ours, wherever
// a client might look.
func TestStores(t *testing.T) {
	if !inNamespace(t) {
		return
	}
	ours, next := newAuthority(t, "Airlock gateway of test"), newAuthority(t, "Airlock gateway of test")
	dir := imagesDir(t)
	opts := Options{Trust: Trust{PEM: ours.pem(), ID: "one"}, Env: map[string]string{"PIP_INDEX_URL": "https://it's.test/$(id)`id`", "EMPTY": ""}, Files: map[string]string{"/etc/npmrc": "x", "/.cargo/config.toml": "y"}}
	img := newImage(t, dir, opts)
	if again := newImage(t, dir, opts); again.ID != img.ID {
		t.Error("the same options make another image")
	}
	plain := newImage(t, dir, Options{})
	both := newImage(t, dir, Options{Trust: Trust{PEM: append(ours.pem(), next.pem()...), ID: "both"}})
	other := newImage(t, dir, Options{Files: map[string]string{"/etc/npmrc": "y"}})
	if other.ID == plain.ID || img.ID == plain.ID || both.ID == img.ID || img.TrustID != "one" || both.TrustID != "both" || plain.TrustID != "" || !maps.Equal(plain.Env, toolEnv) {
		t.Errorf("images %+v, %+v and %+v", img, plain, both)
	}
	read := func(img Image, path string) string {
		t.Helper()
		text, err := os.ReadFile(filepath.Join(img.RootFS, path))
		if err != nil {
			t.Error(err)
		}
		return string(text)
	}
	for path, want := range map[string]string{
		"/etc/resolv.conf":                   "nameserver 10.0.0.1\noptions timeout:2 attempts:2\n",
		"/etc/ssl/certs/ca-certificates.crt": string(ours.pem()), "/etc/ssl/cert.pem": string(ours.pem()), "/etc/ssl/ca-bundle.pem": string(ours.pem()),
		"/etc/ssl/certs/airlock-gateway-1.pem": string(ours.pem()), "/etc/npmrc": "x", "/.cargo/config.toml": "y",
	} {
		if got := read(img, path); got != want {
			t.Errorf("%s: %q", path, got)
		}
	}
	if got := read(both, "/etc/ssl/certs/ca-certificates.crt"); got != string(ours.pem())+string(next.pem()) {
		t.Errorf("the bundle of two: %q", got)
	}
	// The machine's own bundle is in none of the image's files; a certificate's
	// bytes are looked for in both forms that stores have.
	foreign := foreignRoot(t)
	start := time.Now()
	python, java := find(pythonDirs, pythonStores), find(javaDirs, javaStores)
	if took := time.Since(start); took > 100*time.Millisecond {
		t.Errorf("the stores in /usr are found in %v", took)
	} else {
		t.Logf("%d stores of Python and %d of Java in %v", len(python), len(java), took)
	}
	for _, p := range slices.Concat([]string{javaStore}, bundles, python, java) {
		end, err := filepath.EvalSymlinks(p)
		if err != nil {
			end = p
		}
		text := read(img, end)
		if foreign != nil && (bytes.Contains([]byte(text), foreign) || strings.Contains(strings.ReplaceAll(text, "\n", ""), base64.StdEncoding.EncodeToString(foreign))) {
			t.Errorf("%s holds a root of the machine", p)
		}
		if !bytes.Contains([]byte(text), ours.cert.Raw) && !strings.Contains(text, string(ours.pem())) {
			t.Errorf("%s does not hold ours", p)
		}
	}
	names := map[string]bool{}
	entries, err := os.ReadDir(filepath.Join(img.RootFS, certsDir))
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		names[e.Name()] = true
	}
	hash, err := nameHash(ours.cert.RawSubject)
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]bool{"airlock-gateway-1.pem": true, "ca-certificates.crt": true, "java": true, fmt.Sprintf("%08x.0", hash): true}
	if !maps.Equal(names, want) {
		t.Errorf("%s: %v, want %v", certsDir, names, want)
	}
	// Everything is root's inside, and nothing can be written but by it.
	err = filepath.WalkDir(filepath.Join(img.RootFS, "etc/ssl"), func(path string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := e.Info()
		if err != nil {
			return err
		}
		if info.Sys().(*syscall.Stat_t).Uid != testUID || info.Mode()&fs.ModeSymlink == 0 && info.Mode().Perm()&0o022 != 0 {
			t.Errorf("%s: %v of %d", path, info.Mode(), info.Sys().(*syscall.Stat_t).Uid)
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
	// The machine's own files are untouched.
	if text, err := os.ReadFile(bundle); err == nil && bytes.Contains(text, ours.pem()) {
		t.Fatal("the machine's own bundle was written")
	}
	if got := read(img, "/etc/environment"); !strings.Contains(got, "\nPIP_INDEX_URL=https://it's.test/$(id)`id`\n") || !strings.Contains(got, "\nEMPTY=\n") || !strings.Contains(got, "\nSSL_CERT_FILE="+bundle+"\n") {
		t.Errorf("/etc/environment: %q", got)
	}
	// A login shell has the variables; those that are set, also to nothing, stay.
	const show = `echo "$PIP_INDEX_URL $SSL_CERT_FILE $NODE_EXTRA_CA_CERTS"`
	out, err := command(t.Context(), img, []string{"sh", "-l", "-c", show}, []string{testEnv, "SSL_CERT_FILE=/mine", "NODE_EXTRA_CA_CERTS="}).CombinedOutput()
	if err != nil || string(out) != "https://it's.test/$(id)`id` /mine \n" {
		t.Errorf("a login shell: %q, %v", out, err)
	}
}

// foreignRoot is the DER of the first root that this machine trusts, or nil.
func foreignRoot(t *testing.T) []byte {
	t.Helper()
	text, err := os.ReadFile(bundle)
	if err != nil {
		t.Logf("this machine has no bundle: %v", err)
		return nil
	}
	b, _ := pem.Decode(text)
	if b == nil {
		t.Fatal("the machine's bundle has no certificate")
	}
	return b.Bytes
}

func TestOptionsAreChecked(t *testing.T) {
	guest := filepath.Join(t.TempDir(), "guest")
	if err := os.WriteFile(guest, nil, 0o755); err != nil {
		t.Fatal(err)
	}
	root := newAuthority(t, "x").pem()
	for name, opts := range map[string]Options{
		"text": {Trust: Trust{PEM: []byte("roots")}}, "text behind": {Trust: Trust{PEM: append(slices.Clone(root), "x"...)}},
		"a key": {Trust: Trust{PEM: pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY"})}}, "no certificate": {Trust: Trust{PEM: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE"})}},
		"a name": {Env: map[string]string{"A-B": "x"}}, "no name": {Env: map[string]string{"": "x"}}, "a name with code": {Env: map[string]string{"A;id": "x"}},
		"a relative path": {Files: map[string]string{"etc/x": ""}}, "a path that leads up": {Files: map[string]string{"/etc/../../x": ""}}, "no path": {Files: map[string]string{"": ""}},
		"a line": {Env: map[string]string{"A": "x\nB=y"}}, "a NUL byte": {Env: map[string]string{"A": "\x00"}},
	} {
		dir := t.TempDir()
		if _, err := Host(dir, guest, testUID, opts); airlock.CodeOf(err) != airlock.Invalid {
			t.Errorf("%s: %v", name, err)
		}
		if left, err := os.ReadDir(dir); err != nil || len(left) != 0 {
			t.Errorf("%s: left %v, %v", name, left, err)
		}
	}
}

// A link in the image never leads a write out of it.
func TestStoresStayInside(t *testing.T) {
	needRoot(t)
	outside, root := t.TempDir(), t.TempDir()
	target := filepath.Join(outside, "bundle")
	if err := os.WriteFile(target, []byte("kept"), 0o644); err != nil {
		t.Fatal(err)
	}
	for link, to := range map[string]string{"file": target, "dir": outside, "up": "../../../../../.." + outside} {
		if err := os.Symlink(to, filepath.Join(root, link)); err != nil {
			t.Fatal(err)
		}
	}
	for _, tt := range []struct {
		path string
		ok   bool
	}{{"/file", true}, {"/dir/bundle", false}, {"/up/bundle", false}, {"/dir/new/file", false}, {"/a/b/c", true}} {
		b := builder{root: root, uid: testUID}
		b.store(tt.path, []byte("ours"))
		if (b.err == nil) != tt.ok {
			t.Errorf("%s: %v", tt.path, b.err)
		}
		if got, err := os.ReadFile(filepath.Join(root, tt.path)); tt.ok && (err != nil || string(got) != "ours") {
			t.Errorf("%s: %q, %v", tt.path, got, err)
		}
	}
	entries, err := os.ReadDir(outside)
	if got, _ := os.ReadFile(target); err != nil || len(entries) != 1 || string(got) != "kept" {
		t.Errorf("outside: %v %q, %v", entries, got, err)
	}
}

func TestNameHash(t *testing.T) {
	openssl, lookErr := exec.LookPath("openssl")
	for name, subject := range map[string]pkix.Name{
		"38e1483d": {CommonName: "Airlock gateway of abc", OrganizationalUnit: []string{"2026-12-03 10:00:00"}},
		"06ba51b4": {CommonName: " Größe  ÄÖ\tX ", Organization: []string{"A", "B"}, Country: []string{"DE"}},
	} {
		key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
		if err != nil {
			t.Fatal(err)
		}
		template := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: subject}
		der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
		if err != nil {
			t.Fatal(err)
		}
		cert, err := x509.ParseCertificate(der)
		if err != nil {
			t.Fatal(err)
		}
		hash, err := nameHash(cert.RawSubject)
		if got := fmt.Sprintf("%08x", hash); err != nil || got != name {
			t.Errorf("%v: %s, want %s, %v", subject, got, name, err)
		}
		if lookErr == nil {
			cmd := exec.Command(openssl, "x509", "-noout", "-subject_hash")
			cmd.Stdin = bytes.NewReader(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}))
			if out, err := cmd.Output(); err != nil || strings.TrimSpace(string(out)) != name {
				t.Errorf("OpenSSL says %s, %v, want %s", out, err, name)
			}
		}
	}
	if _, err := nameHash([]byte{0x30, 1}); err == nil {
		t.Error("half a name has a hash")
	}
}
