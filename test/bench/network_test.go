package bench

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"log"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/link/fdbased"
	"gvisor.dev/gvisor/pkg/tcpip/network/arp"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv4"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
	"gvisor.dev/gvisor/pkg/waiter"

	"airlock.dev/airlock"
	"airlock.dev/airlock/client"
	"airlock.dev/airlock/policy"
)

// upstreamName leads to this machine's loopback, for the server of a benchmark.
const upstreamName = "upstream.airlock.test"

// network is a sandbox with a client in it, a server out here, and the two ways
// between them: the gateway, and a bare forwarder on the same link.
type network struct {
	b       *testing.B
	sandbox *client.Sandbox
	gateway int    // the process
	secure  string // the upstream's URL
	plain   string // the address where it speaks in clear
	proxy   string // where a bare proxy ends TLS
}

// connected starts all of it. Everything is recorded: the budgets are the only
// settings that are not the usual ones, apart from where the upstream is.
func connected(b *testing.B) *network {
	b.Helper()
	binary(b)
	dir := b.TempDir()
	for d := dir; d != os.TempDir() && d != "/"; d = filepath.Dir(d) {
		check(b, os.Chmod(d, 0o755)) // the gateway's user reads there
	}
	write := func(name string, text []byte) string {
		p := filepath.Join(dir, name)
		check(b, os.MkdirAll(filepath.Dir(p), 0o755))
		check(b, os.WriteFile(p, text, 0o644))
		return p
	}
	n := &network{b: b}
	cert, root := certificate(b)
	n.upstream(cert, root)

	internet, err := policy.ProfileText("internet")
	check(b, err)
	permit := `
@id("upstream") permit (principal, action == Action::"http:request", resource)
when { resource.name == "` + upstreamName + `" && context.ip == ip("127.0.0.1") };
@id("names") permit (principal, action == Action::"dns:resolve", resource) when { resource.name == "` + upstreamName + `" };
`
	policies := filepath.Dir(write("policies/default.cedar", []byte(internet+permit)))
	hosts, err := os.ReadFile("/etc/hosts")
	check(b, err)
	b.Setenv("SSL_CERT_FILE", write("roots.pem", root)) // all that the gateway trusts
	with := []string{"unshare", "--mount", "--propagation", "private", "sh", "-c", `mount --bind "$0" /etc/hosts && exec "$@"`, write("hosts", append(hosts, "\n127.0.0.1 "+upstreamName+"\n"...))}
	s := serveIn(b, with, "--policies", policies, "--public-range", "127.0.0.1/32", "--net-requests", "1000000", "--net-bytes", "1000GiB", "--audit-budget", "1000000000")

	load := filepath.Join(dir, "load")
	build := exec.Command("go", "build", "-trimpath", "-ldflags=-s -w", "-o", load, "./load")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		b.Fatalf("build the client: %v\n%s", err, out)
	}
	create := small
	create.Limits.MemoryMB, create.Policy = 512, permit
	n.sandbox, err = s.Create(b.Context(), create)
	check(b, err)
	b.Cleanup(func() { n.sandbox.Close() })
	f, err := os.Open(load)
	check(b, err)
	defer f.Close()
	check(b, n.sandbox.Upload(b.Context(), "load", f, 0o755))
	check(b, n.sandbox.Upload(b.Context(), "roots.pem", bytes.NewReader(root), 0o644))
	for _, p := range below(s.pid) {
		if name, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", p)); bytes.HasPrefix(name, []byte("airlock-gateway")) {
			n.gateway = p
		}
	}
	return n
}

func check(b *testing.B, err error) {
	b.Helper()
	if err != nil {
		b.Fatal(err)
	}
}

// certificate returns one of upstreamName, and its root in PEM.
func certificate(b *testing.B) (tls.Certificate, []byte) {
	b.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	check(b, err)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: upstreamName}, DNSNames: []string{upstreamName}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	check(b, err)
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
}

// upstream serves as many bytes as the path says, in TLS and in clear, and a
// reverse proxy before it that does nothing but to end TLS.
func (n *network) upstream(cert tls.Certificate, root []byte) {
	b := n.b
	block := make([]byte, 256<<10)
	serve := func(h http.Handler, secure bool) string {
		s := httptest.NewUnstartedServer(h)
		s.Config.ErrorLog = log.New(io.Discard, "", 0)
		s.EnableHTTP2 = secure
		if s.TLS = (&tls.Config{Certificates: []tls.Certificate{cert}}); secure {
			s.StartTLS()
		} else {
			s.Start()
		}
		b.Cleanup(s.Close)
		return s.Listener.Addr().String()
	}
	h := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodPut {
			io.CopyBuffer(struct{ io.Writer }{io.Discard}, r.Body, make([]byte, 256<<10))
		}
		size, err := strconv.ParseInt(r.URL.Path[1:], 10, 64)
		if err != nil {
			w.WriteHeader(http.StatusBadRequest)
			return
		}
		w.Header().Set("Content-Length", strconv.FormatInt(size, 10))
		for ; size > 0; size -= int64(len(block)) {
			w.Write(block[:min(size, int64(len(block)))])
		}
	})
	secure := serve(h, true)
	_, port, err := net.SplitHostPort(secure)
	check(b, err)
	n.secure, n.plain = "https://"+upstreamName+":"+port+"/", serve(h, false)
	target, err := url.Parse(n.secure)
	check(b, err)
	trust := x509.NewCertPool()
	trust.AppendCertsFromPEM(root)
	tr := &http.Transport{
		TLSClientConfig: &tls.Config{RootCAs: trust}, ForceAttemptHTTP2: true, DisableCompression: true, MaxIdleConnsPerHost: 64,
		DialContext: func(ctx context.Context, network, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, network, secure)
		},
	}
	b.Cleanup(tr.CloseIdleConnections)
	n.proxy = serve(&httputil.ReverseProxy{Rewrite: func(r *httputil.ProxyRequest) { r.SetURL(target) }, Transport: tr}, true)
}

// measured is what the client prints.
type measured struct{ PerSecond, P50, P99 float64 }

func (n *network) load(args ...string) (m measured) {
	n.b.Helper()
	var out, log bytes.Buffer
	r, err := n.sandbox.Exec(n.b.Context(), client.ExecRequest{Cmd: "/home/user/load", Args: args, Stdout: &out, Stderr: &log})
	if err != nil || r.Outcome != airlock.Exited || r.ExitCode != 0 {
		n.b.Fatalf("the client: %+v, %v\n%s", r, err, &log)
	}
	check(n.b, json.Unmarshal(out.Bytes(), &m))
	return m
}

// bare serves the sandbox's link in place of the gateway, which stands still
// meanwhile: netstack, and every connection passed on to one address.
func (n *network) bare(to string, do func()) {
	b := n.b
	b.Helper()
	door := n.door()
	defer door.Close()
	check(b, unix.Kill(n.gateway, unix.SIGSTOP))
	defer unix.Kill(n.gateway, unix.SIGCONT)

	s := stack.New(stack.Options{
		NetworkProtocols:   []stack.NetworkProtocolFactory{ipv4.NewProtocol, arp.NewProtocol},
		TransportProtocols: []stack.TransportProtocolFactory{tcp.NewProtocol},
	})
	sack := tcpip.TCPSACKEnabled(true)
	s.SetTransportProtocolOption(tcp.ProtocolNumber, &sack)
	link, err := fdbased.New(&fdbased.Options{
		FDs: []int{int(door.Fd())}, MTU: 65000, EthernetHeader: true, Address: "\x02\x00\x00\x00\x00\x01",
		PacketDispatchMode: fdbased.RecvMMsg, RXChecksumOffload: true, TXChecksumOffload: true, ProcessorsPerChannel: 1,
	})
	check(b, err)
	check(b, unix.SetNonblock(int(door.Fd()), true)) // Fd() made it blocking, for the gateway, too
	if err := s.CreateNIC(1, link); err != nil {
		b.Fatal(err)
	}
	defer func() {
		link.Attach(nil)
		s.Destroy()
	}()
	addr := tcpip.AddrFrom4([4]byte{10, 0, 0, 1})
	if err := s.AddProtocolAddress(1, tcpip.ProtocolAddress{Protocol: ipv4.ProtocolNumber, AddressWithPrefix: tcpip.AddressWithPrefix{Address: addr, PrefixLen: 24}}, stack.AddressProperties{}); err != nil {
		b.Fatal(err)
	}
	s.SetPromiscuousMode(1, true)
	s.SetSpoofing(1, true)
	s.SetRouteTable([]tcpip.Route{{Destination: header.IPv4EmptySubnet, NIC: 1}})
	var flows sync.WaitGroup
	s.SetTransportProtocolHandler(tcp.ProtocolNumber, tcp.NewForwarder(s, 0, 256, func(r *tcp.ForwarderRequest) {
		var wq waiter.Queue
		ep, err := r.CreateEndpoint(&wq)
		r.Complete(err != nil)
		if err == nil {
			flows.Go(func() { forward(gonet.NewTCPConn(&wq, ep), to) })
		}
	}).HandlePacket)
	do()
	flows.Wait()
}

// forward passes a connection on.
func forward(in *gonet.TCPConn, to string) {
	defer in.Close()
	c, err := net.Dial("tcp", to)
	if err != nil {
		return
	}
	out := c.(*net.TCPConn)
	defer out.Close()
	var back sync.WaitGroup
	back.Go(func() {
		io.CopyBuffer(struct{ io.Writer }{in}, struct{ io.Reader }{out}, make([]byte, 256<<10))
		in.CloseWrite()
	})
	io.CopyBuffer(struct{ io.Writer }{out}, struct{ io.Reader }{in}, make([]byte, 256<<10))
	out.CloseWrite()
	back.Wait()
}

// door returns the gateway's end of the sandbox's link, which is the only
// datagram socket that it has.
func (n *network) door() *os.File {
	b := n.b
	b.Helper()
	pidfd, err := unix.PidfdOpen(n.gateway, 0)
	check(b, err)
	defer unix.Close(pidfd)
	all, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", n.gateway))
	check(b, err)
	for _, e := range all {
		theirs, _ := strconv.Atoi(e.Name())
		fd, err := unix.PidfdGetfd(pidfd, theirs, 0)
		if err != nil {
			continue // it was closed
		}
		domain, _ := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_DOMAIN)
		kind, _ := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_TYPE)
		if domain == unix.AF_UNIX && kind == unix.SOCK_DGRAM {
			return os.NewFile(uintptr(fd), "door")
		}
		unix.Close(fd)
	}
	b.Fatal("the gateway has no door")
	return nil
}

// anywhere is where the client connects to behind the bare forwarder.
const anywhere = "192.0.2.1:443"

// BenchmarkGatewayRequests is the rate of requests over 32 connections, each
// decided, recorded and in TLS that is ended, to that through a bare forwarder to
// a reverse proxy that ends TLS.
func BenchmarkGatewayRequests(b *testing.B) {
	n := connected(b)
	var ours, base, p50, baseP50, p99, baseP99 []float64
	for range 5 {
		m := n.load(n.secure)
		ours, p50, p99 = append(ours, m.PerSecond), append(p50, m.P50), append(p99, m.P99)
		n.bare(n.proxy, func() { m = n.load("-to", anywhere, "-roots", "roots.pem", n.secure) })
		base, baseP50, baseP99 = append(base, m.PerSecond), append(baseP50, m.P50), append(baseP99, m.P99)
	}
	b.ReportMetric(median(ours), "requests/s")
	b.ReportMetric(median(base), "baseline-requests/s")
	b.ReportMetric(median(ours)/median(base), "ratio")
	b.ReportMetric(median(p99), "p99-ms")
	b.ReportMetric(median(baseP99), "baseline-p99-ms")
	b.ReportMetric(median(p50)-median(baseP50), "added-p50-ms")
	b.ReportMetric(0, "ns/op")
}

// BenchmarkGatewayLatency is one request after the other, as above.
func BenchmarkGatewayLatency(b *testing.B) {
	n := connected(b)
	var ours, base []float64
	for range 5 {
		ours = append(ours, n.load("-conns", "1", n.secure).P50)
		n.bare(n.proxy, func() {
			base = append(base, n.load("-conns", "1", "-to", anywhere, "-roots", "roots.pem", n.secure).P50)
		})
	}
	b.ReportMetric(median(ours)-median(base), "added-p50-ms")
	report(b, ours, base)
}

// BenchmarkGatewayDownload and BenchmarkGatewayUpload are the rate of 1 GB in one
// request, to that of the same client through a bare forwarder: in TLS, which ends
// at the gateway and there at the server, and in clear.
func BenchmarkGatewayDownload(b *testing.B) { bulk(b, "-down") }
func BenchmarkGatewayUpload(b *testing.B)   { bulk(b, "-up") }

func bulk(b *testing.B, way string) {
	n := connected(b)
	rate := func(args ...string) float64 {
		return n.load(append([]string{way, "1000000000"}, args...)...).PerSecond / 1e6
	}
	u, err := url.Parse(n.secure)
	check(b, err)
	_, port, err := net.SplitHostPort(n.plain)
	check(b, err)
	clear := "http://" + upstreamName + ":" + port + "/"
	var secure, bareSecure, plain, barePlain []float64
	for range 3 {
		secure = append(secure, rate(n.secure))
		n.bare("127.0.0.1:"+u.Port(), func() {
			bareSecure = append(bareSecure, rate("-to", anywhere, "-roots", "roots.pem", n.secure))
		})
		plain = append(plain, rate(clear))
		n.bare(n.plain, func() { barePlain = append(barePlain, rate("-to", anywhere, clear)) })
	}
	b.ReportMetric(median(secure), "MB/s")
	b.ReportMetric(median(bareSecure), "baseline-MB/s")
	b.ReportMetric(median(secure)/median(bareSecure), "ratio")
	b.ReportMetric(median(plain), "clear-MB/s")
	b.ReportMetric(median(barePlain), "clear-baseline-MB/s")
	b.ReportMetric(median(plain)/median(barePlain), "clear-ratio")
	b.ReportMetric(0, "ns/op")
}
