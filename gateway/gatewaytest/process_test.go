package gatewaytest

import (
	"bufio"
	"context"
	"crypto/x509"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"airlock.dev/airlock/gateway"
	"airlock.dev/airlock/gateway/process"
	"airlock.dev/airlock/gateway/web"
	"airlock.dev/airlock/gateway/wire"
)

const (
	childName = "gateway-of-a-test"
	guestName = "guest-of-a-test"
)

// The test's own binary is the gateway's process, too.
func TestMain(m *testing.M) {
	if os.Args[0] == childName {
		// A busy machine takes its time to open the flows that are to be kept.
		limits := web.Limits{KeepAlive: time.Hour}
		os.Exit(gateway.Serve(slog.New(slog.NewTextHandler(os.Stderr, nil)), limits))
	}
	if os.Args[0] == guestName {
		if err := runGuest(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

// permits is a Decider that permits everything.
type permits struct{ events atomic.Uint64 }

func (p *permits) Admit(context.Context, wire.Attempt) wire.Verdict {
	return wire.Verdict{Permit: true, Mode: wire.Any}
}
func (p *permits) Cross(context.Context, wire.Attempt) wire.Verdict {
	return wire.Verdict{Permit: true, Event: p.events.Add(1)}
}
func (p *permits) End(wire.End)         {}
func (p *permits) Used(wire.Used)       {}
func (p *permits) Refused(wire.Refused) {}
func (p *permits) Broken()              {}

// host has the gateway as a process, as it is in life. The sandboxes are here,
// and so is what they reach by every name.
type host struct {
	*world
	gateway *process.Gateway
}

func newHost(t testing.TB, budgets wire.Budgets, answer http.HandlerFunc, env ...string) *host {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("only root runs a process as another user")
	}
	h := &host{world: newWorld(t)}
	key, err := x509.MarshalPKCS8PrivateKey(h.inner.key)
	must(t, err)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	server := http.Server{Handler: answer}
	var serving sync.WaitGroup
	serving.Go(func() { server.Serve(connected{l}) })
	t.Cleanup(func() { server.Close(); serving.Wait() })
	proxy := "http://" + l.Addr().String()
	h.gateway, err = process.Start(t.Context(), process.Config{
		Name: childName, UID: 0x6ffffffd, Stderr: os.Stderr, Env: append(env, "HTTP_PROXY="+proxy, "HTTPS_PROXY="+proxy), Decider: &permits{}, Log: slog.New(slog.DiscardHandler),
		Start: wire.Start{Root: h.inner.cert.Raw, Key: key, ProxyResolves: true, Budgets: budgets},
	})
	must(t, err)
	t.Cleanup(h.gateway.Close)
	return h
}

// connected accepts connections from those who take it for a proxy, and are
// connected to no other than this.
type connected struct{ net.Listener }

func (l connected) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	if _, err := http.ReadRequest(bufio.NewReader(c)); err == nil { // it waits for the answer
		io.WriteString(c, "HTTP/1.1 200 OK\r\n\r\n")
	}
	return c, nil
}

// example is the address that sandboxes remember of example.com.
var example = netip.MustParseAddr("198.18.0.1")

// open makes a sandbox whose door the process has.
func (h *host) open() *sandbox {
	h.t.Helper()
	return &sandbox{world: h.world, s: newStack(h.t, h.wire())}
}

// wire gives the process a door, and returns the guest's end.
func (h *host) wire() *os.File {
	h.t.Helper()
	door, end := pair(h.t)
	must(h.t, h.gateway.Open(h.t.Context(), wire.Door{
		Sandbox: fmt.Sprintf("sandbox %d", end.Fd()), Names: []wire.Binding{{Name: "example.com", Place: 0}},
	}, door))
	h.t.Cleanup(func() { end.Close() })
	return end
}

// memory is a line of the process's status, such as VmRSS, in bytes.
func (h *host) memory(line string) int {
	h.t.Helper()
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", h.gateway.PID()))
	must(h.t, err)
	_, rest, _ := strings.Cut(string(status), line+":")
	var kb int
	_, err = fmt.Sscanf(rest, "%d kB", &kb)
	must(h.t, err)
	return kb << 10
}

// pair is a sandbox's wire: the door's end of it, and the guest's.
func pair(t testing.TB) (door, guest *os.File) {
	t.Helper()
	ends, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	must(t, err)
	for _, fd := range ends { // more than the system's limit only as root
		if unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUFFORCE, 4<<20) != nil {
			_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUF, 4<<20)
		}
	}
	return os.NewFile(uintptr(ends[0]), "door"), os.NewFile(uintptr(ends[1]), "guest")
}
