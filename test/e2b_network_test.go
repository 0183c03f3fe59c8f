package test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"crypto/tls"
	"encoding/hex"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"io/fs"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"airlock.dev/airlock"
	"airlock.dev/airlock/client"
	"airlock.dev/airlock/policy"
)

// apartEnv names the test that runs in namespaces of its own.
const apartEnv = "AIRLOCK_TEST_APART"

// The addresses of the test's servers: of a documentation range, so that no
// policy takes them for private ones. They exist in its namespace only.
const (
	apartNetwork = "192.0.2.0/24"
	apartOpen    = "192.0.2.10"
	apartClosed  = "192.0.2.20"
)

// apart runs the test that calls it once more, in a network of its own with
// nothing but these addresses and, in a mount namespace of its own, names for
// them. It says whether this is that run.
func apart(t *testing.T, hosts string) bool {
	t.Helper()
	if os.Getenv(apartEnv) == t.Name() {
		for name, err := range map[string]error{"mounts": private(t, hosts), "addresses": loopback()} {
			if err != nil {
				t.Fatalf("make %s of its own: %v", name, err)
			}
		}
		return true
	}
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, "/proc/self/exe", "-test.run=^"+t.Name()+"$", "-test.timeout=5m", "-test.v")
	cmd.Env = append(os.Environ(), apartEnv+"="+t.Name())
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNET | unix.CLONE_NEWNS}
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGQUIT) }
	cmd.WaitDelay = 10 * time.Second
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("in namespaces of its own: %v\n%s", err, out)
	}
	return false
}

func private(t *testing.T, hosts string) error {
	file := filepath.Join(t.TempDir(), "hosts")
	if err := os.WriteFile(file, []byte("127.0.0.1 localhost\n"+hosts), 0o644); err != nil {
		return err
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return err
	}
	return unix.Mount(file, "/etc/hosts", "", unix.MS_BIND, "")
}

// loopback switches the loopback device on and gives it the test's network.
func loopback() error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	device, err := unix.NewIfreq("lo")
	if err != nil {
		return err
	}
	device.SetUint16(unix.IFF_UP | unix.IFF_LOOPBACK | unix.IFF_RUNNING)
	if err := unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, device); err != nil {
		return err
	}
	second, err := unix.NewIfreq("lo:1")
	if err != nil {
		return err
	}
	if err := second.SetInet4Addr(net.ParseIP(apartOpen).To4()); err != nil {
		return err
	}
	return unix.IoctlIfreq(fd, unix.SIOCSIFADDR, second) // with the netmask of its class, 24 bits
}

// secretHeader is the value of a header that the SDKs' suites have set.
const secretHeader = "Bearer c2VjcmV0LW9mLXRoZS1zdWl0ZXM"

// proxyPassword is what the suites' own proxies want; their users there begin
// with user-of-the-proxy.
const proxyPassword = "cGFzc3dvcmQtb2YtdGhlLXByb3h5"

// TestE2BNetwork runs the SDKs' suites of the network against servers that
// sandboxes reach, and one that the operator forbids.
func TestE2BNetwork(t *testing.T) {
	needRoot(t)
	needTool(t, "curl")
	needSDKs(t)
	needBinaries(t)
	if !apart(t, apartOpen+" open.airlock.test below.open.airlock.test other.airlock.test proxy.airlock.test\n"+apartClosed+" closed.airlock.test\n") {
		return
	}
	s := &network{}
	dir := t.TempDir()
	for d := dir; d != os.TempDir() && d != "/"; d = filepath.Dir(d) {
		if err := os.Chmod(d, 0o755); err != nil { // the gateway's user reads there
			t.Fatal(err)
		}
	}
	policies := filepath.Join(dir, "policies")
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
	internet, err := policy.ProfileText("internet")
	if err != nil {
		t.Fatal(err)
	}
	const closed = `
@id("closed") forbid (principal, action in [Action::"net:connect", Action::"http:request"], resource)
when { context.ip == ip("` + apartClosed + `") };
`
	write("policies/default.cedar", internet+closed)
	t.Setenv("SSL_CERT_FILE", write("roots.pem", string(s.authority(t))))
	s.running = startServerAt(t, t.TempDir(), "--policies", policies, "--public-range", apartNetwork)

	handler := func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/events": // one, and then none for long
			w.Header().Set("Content-Type", "text/event-stream")
			io.WriteString(w, "data: begun\n\n")
			w.(http.Flusher).Flush()
			<-r.Context().Done()
		case "/authorization": // what upstream got, so that nobody learns it from the answer
			sum := sha256.Sum256([]byte(r.Header.Get("Authorization")))
			io.WriteString(w, hex.EncodeToString(sum[:]))
		default:
			fmt.Fprintf(w, "hello from %s", r.Host)
		}
	}
	for at, name := range map[string]string{apartOpen: "open.airlock.test", apartClosed: "closed.airlock.test"} {
		cert := s.certificate(t, name)
		listen(t, at+":80", nil, handler)
		listen(t, at+":443", &cert, handler)
	}
	// Proxies of the suites' own, one in TLS; and one where nobody may connect to.
	var by asked
	certificate := s.certificate(t, "proxy.airlock.test")
	secure := socksProxy(t, tls.NewListener(listening(t, apartOpen+":1443"), &tls.Config{Certificates: []tls.Certificate{certificate}}), proxyPassword, &by)
	plain := socksProxy(t, listening(t, apartOpen+":1080"), proxyPassword, &by)
	forbidden := socksProxy(t, listening(t, apartClosed+":1080"), proxyPassword, &by)
	at := func(name, address string) string {
		_, port, _ := net.SplitHostPort(address)
		return net.JoinHostPort(name, port)
	}
	listen(t, "127.0.0.1:8081", nil, by.ServeHTTP)
	env := []string{
		"NET_PROXY=" + at("proxy.airlock.test", plain), "NET_PROXY_TLS=" + at("proxy.airlock.test", secure), "NET_PROXY_ALIAS=" + at("other.airlock.test", secure),
		"NET_PROXY_CLOSED=" + at("closed.airlock.test", forbidden), "NET_PROXY_DEAD=" + at("proxy.airlock.test", deadEnd(t, apartOpen)),
		"NET_PROXY_PASSWORD=" + proxyPassword, "NET_PROXY_ASKED=http://127.0.0.1:8081/", "NET_PROXY_CA=" + string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: s.caCert.Raw})),
		"NET_PROXY_OTHER_CA=" + string((&network{}).authority(t)), "NET_OPEN_ADDRESS=" + apartOpen,
		"E2B_API_URL=" + s.url, "E2B_SANDBOX_URL=" + s.url,
		"NET_OPEN=http://open.airlock.test", "NET_BELOW=http://below.open.airlock.test", "NET_OTHER=http://other.airlock.test",
		"NET_ADDRESS=http://" + apartOpen, "NET_CLOSED=http://closed.airlock.test",
		"NET_SECURE=https://open.airlock.test", "NET_SECURE_CLOSED=https://closed.airlock.test",
		"NET_TCP_PORT=" + echoing(t), "NET_SECRET=" + secretHeader,
	}
	s.suites(t, env, "network.test.mjs", "test_network.py")
	t.Run("values of headers are nowhere in the clear", func(t *testing.T) {
		s.holdsNot(t, secretHeader)
		s.holdsNot(t, proxyPassword)
		s.holdsNot(t, "user-of-the-proxy")
	})
	t.Run("the way to proxies is in the trail", func(t *testing.T) {
		seen := map[string]int{}
		for line := range strings.Lines(s.trail("query", "type=net.connect", "--json", "--limit", "1000")) {
			var e struct {
				Call struct {
					Resource struct{ ID string }
					Context  map[string]any
				}
				Decision struct{ Effect string }
			}
			if err := json.Unmarshal([]byte(line), &e); err != nil {
				t.Fatalf("%s: %v", line, err)
			}
			if e.Call.Context["egressProxy"] == true {
				seen[e.Decision.Effect+" "+e.Call.Resource.ID]++
			}
		}
		if seen["permit proxy.airlock.test"] == 0 || seen["deny closed.airlock.test"] == 0 {
			t.Errorf("the trail has %v", seen)
		}
	})
	t.Run("a reload breaks off what is denied", func(t *testing.T) {
		sb := create(t, s.as(s.key("default", airlock.Client)), client.CreateRequest{})
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		began, wrote := io.Pipe()
		ended := make(chan error, 1)
		go func() {
			r, err := sb.Exec(ctx, client.ExecRequest{Cmd: "/usr/bin/curl", Args: []string{"-sN", "http://open.airlock.test/events"}, Stdout: wrote})
			if err == nil && r.ExitCode == 0 {
				err = fmt.Errorf("the stream ended as if it were whole")
			}
			ended <- err
		}()
		defer wrote.Close()
		if _, err := io.ReadFull(began, make([]byte, 5)); err != nil {
			t.Fatal(err)
		}
		go io.Copy(io.Discard, began)
		write("policies/default.cedar", internet+`@id("stop") forbid (principal, action == Action::"http:request", resource);`)
		at := time.Now()
		operator, err := client.New(client.Options{Socket: filepath.Join(s.dataDir, "airlock.sock")})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := operator.ReloadPolicies(ctx); err != nil {
			t.Fatal(err)
		}
		select {
		case err := <-ended:
			took := time.Since(at)
			if err != nil || took > 2*time.Second {
				t.Errorf("%v after %v", err, took)
			}
			t.Logf("it ended %v after the reload was asked for", took)
		case <-ctx.Done():
			t.Fatal("the stream goes on")
		}
	})
}

// listen serves HTTP at an address, with TLS if there is a certificate.
func listen(t *testing.T, at string, cert *tls.Certificate, h http.HandlerFunc) {
	t.Helper()
	ln, err := net.Listen("tcp", at)
	if err != nil {
		t.Fatal(err)
	}
	server := &httptest.Server{Listener: ln, Config: &http.Server{Handler: h, ErrorLog: log.New(io.Discard, "", 0)}}
	if cert == nil {
		server.Start()
	} else {
		server.TLS, server.EnableHTTP2 = &tls.Config{Certificates: []tls.Certificate{*cert}}, true
		server.StartTLS()
	}
	t.Cleanup(func() {
		server.CloseClientConnections()
		server.Close()
	})
}

// echoing is the port of a server that greets and then says again what it hears.
func echoing(t *testing.T) string {
	t.Helper()
	ln, err := net.Listen("tcp", apartOpen+":0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ln.Close() })
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				io.WriteString(c, "hello\n")
				io.Copy(c, c)
			}()
		}
	}()
	_, port, _ := net.SplitHostPort(ln.Addr().String())
	return port
}

// holdsNot fails if a file of the server has a text in it.
func (s *running) holdsNot(t *testing.T, text string) {
	t.Helper()
	files := 0
	err := filepath.WalkDir(s.dataDir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		files++
		content, err := os.ReadFile(path)
		if err == nil && bytes.Contains(content, []byte(text)) {
			t.Errorf("%s has it", path)
		}
		return err
	})
	if err != nil || files < 3 {
		t.Fatalf("%d files, %v", files, err)
	}
}
