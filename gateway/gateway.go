// Package gateway is the one way out of sandboxes: a process of its own, with
// a user of its own, that holds the host's ends of their links, speaks IP, DNS,
// HTTP and TLS with what is behind them, and lets nothing pass that the server
// has not decided and recorded.
//
// It holds doors, the certificate authority's key and the secrets of requests
// that are under way; it has no data directory, and it believes nothing that a
// sandbox or the world sends. Who a sandbox is, its door alone says. It does
// not know policies or the audit log: it asks the server for each crossing
// (package wire). Start reading at Main.
package gateway

import (
	"context"
	"crypto"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	stdlog "log"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"runtime/debug"
	"slices"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	"airlock.dev/airlock"
	"airlock.dev/airlock/gateway/address"
	links "airlock.dev/airlock/gateway/door"
	"airlock.dev/airlock/gateway/upstream"
	"airlock.dev/airlock/gateway/web"
	"airlock.dev/airlock/gateway/wire"
)

// SocketFD is the descriptor on which the process meets its server.
const SocketFD = 3

// memorySoft is how many bytes of memory the process takes before garbage is
// looked for more often than else, which costs time. What is in use is bounded by
// the flows of each door, not here.
const memorySoft = 2560 << 20

// Main is the gateway's process. It returns its exit code when the server ends
// or hangs up.
func Main(log *slog.Logger) int {
	// What net/http says by itself has bytes that upstream chose, of which there
	// may be any number, and a secret among them.
	stdlog.SetOutput(io.Discard)
	// Keys are in this memory: no core files, and nobody of the same user looks.
	unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0)
	// It is each thread's own.
	if _, _, errno := syscall.AllThreadsSyscall6(unix.SYS_PRCTL, unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0, 0); errno != 0 {
		log.Error("give up new privileges", "err", errno)
		return 1
	}
	if os.Getuid() == 0 {
		log.Error("the gateway does not run as root")
		return 1
	}
	return Serve(log, web.Limits{})
}

// Serve is Main in a process that keeps what it may do, as those of tests, and
// with limits of doors that are not the usual ones. Budgets are for the server to say.
func Serve(log *slog.Logger, limits web.Limits) int {
	debug.SetMemoryLimit(memorySoft)
	unix.CloseOnExec(SocketFD)
	conn, err := socket(os.NewFile(SocketFD, "server"))
	if err != nil {
		log.Error("meet the server", "err", err)
		return 1
	}
	g := &gateway{log: log, doors: map[string]*door{}, flows: map[string]*links.Table{}, turns: web.NewTurns(), limits: limits}
	g.ctx, g.cancel = context.WithCancel(context.Background())
	ready := make(chan *wire.Peer, 1)
	peer := wire.New(conn, func(ctx context.Context, method string, body []byte, f *os.File) (any, error) {
		g.once.Do(func() { g.server = <-ready })
		return g.handle(method, body, f)
	})
	ready <- peer
	<-peer.Done()
	g.close()
	peer.Close()
	return 0
}

func socket(f *os.File) (*net.UnixConn, error) {
	defer f.Close()
	c, err := net.FileConn(f)
	if err != nil {
		return nil, err
	}
	u, ok := c.(*net.UnixConn)
	if !ok {
		c.Close()
		return nil, errors.New("it is no unix socket")
	}
	return u, nil
}

// gateway holds all doors.
type gateway struct {
	log    *slog.Logger
	once   sync.Once
	server *wire.Peer
	ctx    context.Context
	cancel context.CancelFunc
	turns  *web.Turns
	limits web.Limits

	mu        sync.Mutex
	start     *wire.Start
	authority *web.Authority
	roots     *x509.CertPool // of the world
	upstream  *upstream.Upstream
	doors     map[string]*door
	flows     map[string]*links.Table // of doors that are about to be opened
	closed    bool
}

func (g *gateway) handle(method string, body []byte, f *os.File) (any, error) {
	defer func() {
		if f != nil {
			f.Close()
		}
	}()
	switch method {
	case wire.MethodStart:
		var s wire.Start
		if err := json.Unmarshal(body, &s); err != nil {
			return nil, fmt.Errorf("read how to start: %w", err)
		}
		return nil, g.begin(s)
	case wire.MethodFlows:
		var n wire.Name
		if err := json.Unmarshal(body, &n); err != nil {
			return nil, fmt.Errorf("read whose flows these are: %w", err)
		}
		if f == nil {
			return nil, airlock.Errorf(airlock.Invalid, "a list of flows came without its descriptor")
		}
		t, err := links.OpenTable(f)
		if err != nil {
			return nil, err
		}
		g.mu.Lock()
		defer g.mu.Unlock()
		g.flows[n.Sandbox] = t
		return nil, nil
	case wire.MethodOpen, wire.MethodSet:
		var d wire.Door
		if err := json.Unmarshal(body, &d); err != nil {
			return nil, fmt.Errorf("read what a door is: %w", err)
		}
		if method == wire.MethodSet {
			return nil, g.set(d)
		}
		return nil, g.open(d, f)
	case wire.MethodBreak:
		var b wire.Break
		if err := json.Unmarshal(body, &b); err != nil {
			return nil, fmt.Errorf("read what to break: %w", err)
		}
		g.mu.Lock()
		d := g.doors[b.Sandbox]
		g.mu.Unlock()
		if d != nil {
			d.crossings.revoke(b.Events)
		}
		return nil, nil
	case wire.MethodClose:
		var n wire.Name
		if err := json.Unmarshal(body, &n); err != nil {
			return nil, fmt.Errorf("read which door to close: %w", err)
		}
		g.mu.Lock()
		d := g.doors[n.Sandbox]
		delete(g.doors, n.Sandbox)
		g.mu.Unlock()
		if d != nil {
			d.close()
		}
		return nil, nil
	}
	return nil, airlock.Errorf(airlock.Unimplemented, "the gateway does not know %.40q", method)
}

func (g *gateway) begin(s wire.Start) error {
	cert, err := x509.ParseCertificate(s.Root)
	if err != nil {
		return fmt.Errorf("read the authority's certificate: %w", err)
	}
	key, err := x509.ParsePKCS8PrivateKey(s.Key)
	clear(s.Key)
	if err != nil {
		return fmt.Errorf("read the authority's key: %w", err)
	}
	signer, ok := key.(crypto.Signer)
	if !ok {
		return airlock.Errorf(airlock.Invalid, "the authority's key is a %T, which signs nothing", key)
	}
	authority, err := web.NewAuthority(cert, signer)
	if err != nil {
		return err
	}
	roots, err := x509.SystemCertPool()
	if err != nil {
		return fmt.Errorf("read the certificates that this machine trusts: %w", err)
	}
	var own []address.Range
	for _, p := range s.Reachable {
		own = append(own, address.Range{Prefix: p, Class: address.Public})
	}
	ranges, err := address.New(own, nil)
	if err != nil {
		return err
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.start != nil {
		return airlock.Errorf(airlock.Conflict, "the gateway was started before")
	}
	g.start, g.authority, g.roots = &s, authority, roots
	g.upstream = upstream.New(upstream.Config{
		Ranges: ranges, Proxy: upstream.FromEnvironment(), ProxyResolves: s.ProxyResolves,
		Named: func(a netip.Addr) bool {
			return slices.ContainsFunc(s.Reachable, func(p netip.Prefix) bool { return p.Contains(a) })
		},
		Synthetic: func(a netip.Addr) bool { return names4.Contains(a) || names6.Contains(a) },
	})
	return nil
}

// open serves a sandbox's door, in place of what served it before.
func (g *gateway) open(w wire.Door, f *os.File) error {
	if f == nil {
		return airlock.Errorf(airlock.Invalid, "a door came without its descriptor")
	}
	g.mu.Lock()
	started, old, flows := g.start != nil && !g.closed, g.doors[w.Sandbox], g.flows[w.Sandbox]
	delete(g.doors, w.Sandbox)
	delete(g.flows, w.Sandbox)
	g.mu.Unlock()
	if !started {
		return airlock.Errorf(airlock.Unavailable, "the gateway was not started yet, or is about to end")
	}
	if old != nil {
		old.close()
	}
	d, err := g.newDoor(w, f, flows)
	if err != nil {
		return fmt.Errorf("open the door of %s: %w", w.Sandbox, err)
	}
	g.mu.Lock()
	closed := g.closed
	if !closed {
		g.doors[w.Sandbox] = d
	}
	g.mu.Unlock()
	if closed {
		d.close()
		return airlock.Errorf(airlock.Unavailable, "the gateway is about to end")
	}
	return nil
}

// set changes what a door may do.
func (g *gateway) set(w wire.Door) error {
	g.mu.Lock()
	d := g.doors[w.Sandbox]
	g.mu.Unlock()
	if d == nil {
		return airlock.Errorf(airlock.NotFound, "the gateway has no door of %s", w.Sandbox)
	}
	return d.set(w)
}

func (g *gateway) close() {
	g.mu.Lock()
	g.closed = true
	doors := g.doors
	g.doors = map[string]*door{}
	g.mu.Unlock()
	g.cancel()
	var all sync.WaitGroup
	for _, d := range doors {
		all.Go(d.close)
	}
	all.Wait()
}

// own are the gateway's addresses in every sandbox.
var own = []netip.Addr{netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("fd61:6972::1")}
