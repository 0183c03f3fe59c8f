// Package web carries the connections of a sandbox that speak HTTP or TLS: it
// finds out where each one goes, asks for a decision on each request, and
// passes on what was permitted.
//
// One connection has one destination, a name or an address with a port. What
// the connection was opened to, CONNECT, SNI and each request's Host have to
// agree on it; what disagrees is answered 421. TLS is ended here with a
// certificate that the sandbox trusts, unless the destination's Mode says
// otherwise. What goes upstream is exactly what was decided on: the path that
// the Judge saw, to the address that it saw.
//
// Nothing that a sandbox sends is believed, and nothing of it is unbounded. The
// package does not know policies, the audit log, DNS or how addresses are
// classified: Judge and Router do. Secrets are not its business either: who
// puts them in wraps the RoundTripper. Start reading at Door.Serve.
package web

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httputil"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"

	"airlock.dev/airlock"
)

// Mode is how the connections to a destination are treated.
type Mode int

const (
	// Terminate ends TLS here and decides each request. It is for plain HTTP too.
	Terminate Mode = iota
	// Passthrough decides a TLS connection by its SNI and passes its bytes on.
	Passthrough
	// TCP decides a connection by its destination and passes its bytes on.
	TCP
	// Any is for destinations to which raw bytes are permitted besides requests.
	// Ports 80 and 443, and what begins like HTTP or TLS, are treated as with
	// Terminate; everything else is as with TCP, also a client that says nothing
	// for Limits.Guess, as is usual where servers speak first (SSH, SMTP, MySQL).
	// What is said in TLS and is not HTTP goes on in TLS of our own, decided as
	// a whole with the scheme "tls"; upstream sees no certificate of the client.
	// Whoever wants to can have requests taken for raw bytes: a Judge that
	// answers Any has to permit both.
	Any
)

// Judge decides what may cross and records it. Its methods are called from
// many goroutines.
type Judge interface {
	// Admit says how to treat connections to a host, a name or an address in
	// canonical form. An error refuses the connection with a reset before it is
	// accepted, and has been recorded. Where clients speak HTTP, Terminate is
	// better: then Cross denies with a reason that can be read.
	Admit(ctx context.Context, host string, port uint16) (Mode, error)
	// Cross decides and records one crossing before a byte of it goes upstream.
	// It may wait, for a person to approve, until ctx ends. A *Denied is told to
	// the client; any other error denies, too, and only its public text is told.
	Cross(ctx context.Context, r Request) (Permit, error)
	// Refused records what this package itself denied. Host may be what the
	// client claimed, and Path empty.
	Refused(ctx context.Context, r Request, d *Denied)
}

// Request is what a decision is about.
type Request struct {
	Scheme string // "http", "https"; "tls" for other bytes in TLS, "tcp" for raw ones
	Method string // upper case; "CONNECT" for tls and tcp
	Host   string // name or address in canonical form
	Port   uint16
	IP     netip.Addr // that will be dialled; not valid in Refused, nor where others resolve
	Class  string     // of IP, as package address names it
	// Path is decoded and has no empty, "." or ".." segments; it is empty for
	// tls and tcp. A slash within a segment is shown as "%2F", as nothing else is.
	Path    string
	RawPath string // Path as it goes upstream, encoded
	// Slashed is Path with slashes for "%2F", and empty where there is none: how
	// servers read it that decode first. Path chooses among what is permitted;
	// what is forbidden must be so for either reading, or /admin%2Fusers is a way
	// around a rule for /admin/*.
	Slashed string
	// RawQuery is as the client wrote it.
	RawQuery string
	// Upgrade is the protocol that the connection is to change to, in lower
	// case, as "websocket". What is said in it is not looked at.
	Upgrade string
	// BodyBytes is the length of the body, -1 if it is not known.
	BodyBytes int64
}

// Permit is a crossing that was decided and recorded.
type Permit interface {
	// End records how it went; it is called once. Status is 0 where there was
	// no answer; the bytes are those of bodies, or all of raw connections: out
	// of the sandbox, and into it. The error says what broke it off.
	End(status int, bytesOut, bytesIn int64, err error)
}

// Revocable is a Permit that can be withdrawn: what goes on by it is broken off.
type Revocable interface {
	Permit
	// OnRevoke has f called, at most once and in a goroutine of its own, when
	// the permit is withdrawn, or at once if it was. The reason is told to the
	// client if nothing else was told yet, and to End.
	OnRevoke(f func(why *Denied))
}

// Metered is a Permit that also says how much may pass.
type Metered interface {
	Permit
	// Passed takes n bytes that are about to pass, either way, from what is
	// left; more than fits do not pass, and the crossing ends with the reason.
	// Besides the bytes that End tells of, these are those of headers.
	Passed(n int) (fits int, why *Denied)
}

// Route is where a connection will go: to one address.
type Route struct {
	Scheme string // as in Request
	Host   string
	Port   uint16
	IP     netip.Addr // not valid if someone else resolves Host; see Router
	Class  string     // of IP
}

// Router resolves, classifies and dials.
type Router interface {
	// Routes returns the ways to a host, the best first and at least one. Each
	// is decided by itself before it is tried; the next one is tried if it does
	// not connect. A *Denied refuses the host by the class of its addresses; it
	// is recorded here.
	Routes(ctx context.Context, scheme, host string, port uint16) ([]Route, error)
	// Connect dials exactly r.IP and r.Port, and if IP is not valid it has the
	// host connected to by whoever resolves it.
	Connect(ctx context.Context, r Route) (net.Conn, error)
}

// Flow is a TCP connection of a sandbox that is not accepted yet.
type Flow interface {
	To() netip.AddrPort
	// Accept completes the connection. If it has methods CloseWrite and Abort
	// they end one direction, and reset it. If it has Await, as door.Conn has,
	// what it takes is next to nothing while it waits for a request.
	Accept() (net.Conn, error)
	// Refuse resets it.
	Refuse()
}

// Limits bound what a sandbox can take. Zero values have the defaults named.
type Limits struct {
	RequestsPerMinute int           // and flows; 6000, and as many tenths at once
	Requests          int           // under way at a time; 512
	HeaderBytes       int           // of a request; 64 KiB
	AnswerHeaderBytes int           // of an answer; 256 KiB
	BodyBytes         int64         // of a request; 8 GiB
	AnswerBytes       int64         // of an answer; 64 GiB
	Handshake         time.Duration // to the end of a request's header or of TLS, and to connect upstream; 10 s
	Answer            time.Duration // until upstream answers; 10 min
	HalfClosed        time.Duration // until upstream answers a client that may be gone; 1 min
	Idle              time.Duration // without a byte either way; 15 min
	KeepAlive         time.Duration // between requests; 2 min
	Guess             time.Duration // for a client to begin with HTTP or TLS, where it need not; 250 ms
}

func (l Limits) filled() Limits {
	fill(&l.RequestsPerMinute, 6000)
	fill(&l.Requests, 512)
	fill(&l.HeaderBytes, 64<<10)
	fill(&l.AnswerHeaderBytes, 256<<10)
	fill(&l.BodyBytes, 8<<30)
	fill(&l.AnswerBytes, 64<<30)
	fill(&l.Handshake, 10*time.Second)
	fill(&l.Answer, 10*time.Minute)
	fill(&l.HalfClosed, time.Minute)
	fill(&l.Idle, 15*time.Minute)
	fill(&l.KeepAlive, 2*time.Minute)
	fill(&l.Guess, 250*time.Millisecond)
	return l
}

func fill[T int | int64 | time.Duration](v *T, otherwise T) {
	if *v <= 0 {
		*v = otherwise
	}
}

// Config says what a door's web is made of. All but Limited, Wrap, Limits, Own
// and ProxyPort are needed.
type Config struct {
	Judge     Judge
	Router    Router
	Authority *Authority
	// Roots are the authorities that upstream certificates are checked with.
	Roots *x509.CertPool
	// Hold returns the name that an address stands for in this sandbox, and
	// keeps it so until release is called. ok is false for other addresses.
	Hold func(netip.Addr) (name string, release func(), ok bool)
	// Own are the gateway's addresses; a proxy answers there at ProxyPort, 3128
	// unless given, and nothing else does.
	Own       []netip.Addr
	ProxyPort uint16
	// EncodedSlashes says that the Judge looks at Request.Slashed. Otherwise
	// paths with a slash within a segment are refused.
	EncodedSlashes bool
	// Turns, if they are given, are those of all doors of the machine.
	Turns *Turns
	// Limited, if it is given, is told of each flow and request that was refused
	// and not recorded, because of Limits.RequestsPerMinute or Limits.Requests.
	Limited func()
	// Wrap returns the RoundTripper that requests go through after they were
	// permitted; PermitOf tells their permits. It must not keep a response's body.
	Wrap   func(http.RoundTripper) http.RoundTripper
	Limits Limits
}

// Door serves the flows of one sandbox. It shares nothing with other doors but
// what Config holds.
type Door struct {
	cfg    Config
	limits Limits
	rate   *rate.Limiter
	own    map[netip.Addr]bool
	leaves leaves
	turns  *turns

	ctx       context.Context
	cancel    context.CancelFunc
	listener  *listener
	server    *http.Server
	proxy     *httputil.ReverseProxy
	transport *http.Transport
	tls       *tls.Config // to clients
	upstream  *tls.Config

	work sync.WaitGroup // flows, requests and the server

	way atomic.Uint64 // how often Reroute was called

	mu       sync.Mutex
	closed   bool
	requests int
	conns    map[*conn]bool // open, on both sides
}

// Open returns a door's web. The caller closes it.
func Open(cfg Config) (*Door, error) {
	if cfg.Judge == nil || cfg.Router == nil || cfg.Authority == nil || cfg.Roots == nil || cfg.Hold == nil {
		return nil, airlock.Errorf(airlock.Internal, "a door's web needs a judge, a router, an authority, roots and names")
	}
	if cfg.ProxyPort == 0 {
		cfg.ProxyPort = 3128
	}
	limits := cfg.Limits.filled()
	d := &Door{
		cfg: cfg, limits: limits, own: map[netip.Addr]bool{}, conns: map[*conn]bool{},
		rate:     rate.NewLimiter(rate.Limit(float64(limits.RequestsPerMinute)/60), max(1, limits.RequestsPerMinute/10)),
		leaves:   leaves{authority: cfg.Authority, byName: map[string]*leaf{}},
		listener: &listener{conns: make(chan net.Conn), done: make(chan struct{})},
	}
	if cfg.Turns != nil {
		d.turns = &turns{all: cfg.Turns}
	}
	for _, a := range cfg.Own {
		d.own[a.Unmap()] = true
	}
	d.ctx, d.cancel = context.WithCancel(context.Background())
	quiet := log.New(io.Discard, "", 0) // what they would say is chosen by sandboxes
	d.tls = &tls.Config{
		MinVersion: tls.VersionTLS12, NextProtos: []string{"h2", "http/1.1"},
		GetCertificate: d.certificate,
	}
	d.upstream = &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: cfg.Roots, ClientSessionCache: tls.NewLRUClientSessionCache(64)}
	d.transport = &http.Transport{
		DialContext: d.dial, DialTLSContext: d.dialTLS, ForceAttemptHTTP2: true,
		DisableCompression: true, // bodies pass as they are
		MaxIdleConns:       64, MaxIdleConnsPerHost: 32, IdleConnTimeout: time.Minute,
		ResponseHeaderTimeout: limits.Answer, ExpectContinueTimeout: time.Second,
		MaxResponseHeaderBytes: int64(limits.AnswerHeaderBytes),
		// What upstream sends faster than the sandbox reads waits there, not here.
		HTTP2: &http.HTTP2Config{MaxReceiveBufferPerConnection: 4<<20 - 1, MaxReceiveBufferPerStream: 1 << 20},
	}
	var round http.RoundTripper = d.transport
	if cfg.Wrap != nil {
		round = cfg.Wrap(round)
	}
	d.proxy = &httputil.ReverseProxy{
		Rewrite: d.rewrite, Transport: round, ModifyResponse: answered, ErrorHandler: d.failed,
		ErrorLog: quiet, BufferPool: new(buffers),
	}
	d.server = &http.Server{
		Handler: d, ErrorLog: quiet, DisableGeneralOptionsHandler: true,
		ReadHeaderTimeout: limits.Handshake, IdleTimeout: limits.KeepAlive, MaxHeaderBytes: limits.HeaderBytes,
		BaseContext: func(net.Listener) context.Context { return d.ctx },
		ConnContext: func(ctx context.Context, nc net.Conn) context.Context {
			return context.WithValue(ctx, connKey{}, connOf(nc))
		},
		ConnState: lentState,
		HTTP2:     &http.HTTP2Config{MaxConcurrentStreams: 100, MaxReceiveBufferPerConnection: 1 << 20, MaxReceiveBufferPerStream: 512 << 10},
	}
	d.work.Go(func() { d.server.Serve(d.listener) })
	return d, nil
}

// Close breaks off what is under way and returns when nothing of it is left.
func (d *Door) Close() {
	d.mu.Lock()
	d.closed = true
	var open []*conn
	for c := range d.conns {
		open = append(open, c)
	}
	d.mu.Unlock()
	d.cancel()
	d.server.Close()
	for _, c := range open {
		c.Close()
	}
	d.work.Wait()
	d.transport.CloseIdleConnections()
}

// Reroute has what begins from now on go by connections that are made from now
// on: what Config.Router does to connect has changed. Requests under way go on.
func (d *Door) Reroute() {
	d.way.Add(1)
	d.transport.CloseIdleConnections()
}

// begin counts a piece of work that Close waits for; end must follow if it is true.
func (d *Door) begin() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if !d.closed {
		d.work.Add(1)
	}
	return !d.closed
}

// Serve serves one flow, and returns when it is over: it decides before it
// accepts, and refuses what is denied. It ends soon after ctx, or Close.
func (d *Door) Serve(ctx context.Context, f Flow) {
	if !d.begin() {
		f.Refuse()
		return
	}
	defer d.work.Done()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(d.ctx, cancel)()
	c, release := d.begun(ctx, f)
	defer release()
	if c != nil {
		d.await(c)
	}
}

// begun decides how a flow is served and begins to. A connection that it returns
// is served until it is done; the name of its address is held until release.
func (d *Door) begun(ctx context.Context, f Flow) (_ *conn, release func()) {
	release = func() {}
	if !d.rate.Allow() {
		d.limited()
		f.Refuse()
		return nil, release
	}
	to := netip.AddrPortFrom(f.To().Addr().Unmap(), f.To().Port())
	if d.own[to.Addr()] {
		if to.Port() != d.cfg.ProxyPort {
			f.Refuse()
			return nil, release
		}
		c := d.accept(ctx, f, place{})
		if c != nil {
			c.proxy = true
			c = d.http(c, c)
		}
		return c, release
	}
	at, release := d.hold(place{host: to.Addr().String(), port: to.Port(), literal: true})
	mode, err := d.admit(ctx, at)
	if err != nil {
		f.Refuse()
		return nil, release
	}
	if mode == TCP {
		// Upstream comes first, so that what cannot be reached is not accepted.
		x, up, err := d.reach(ctx, "tcp", at)
		if err != nil {
			f.Refuse()
			return nil, release
		}
		if c := d.accept(ctx, f, at); c != nil {
			d.relay(c, up, x)
		} else {
			up.abort()
			x.end(0, errGone)
		}
		return nil, release
	}
	if c := d.accept(ctx, f, at); c != nil {
		return d.sniff(c, mode), release
	}
	return nil, release
}

func (d *Door) limited() {
	if d.cfg.Limited != nil {
		d.cfg.Limited()
	}
}

// admit asks the Judge how to treat connections to a place.
func (d *Door) admit(ctx context.Context, at place) (Mode, error) {
	mode, err := d.cfg.Judge.Admit(ctx, at.host, at.port)
	if mode == Any && (at.port == 80 || at.port == 443) {
		mode = Terminate
	}
	return mode, err
}

func (d *Door) accept(ctx context.Context, f Flow, at place) *conn {
	nc, err := f.Accept()
	if err != nil {
		return nil
	}
	return d.newConn(ctx, nc, at)
}

// sniff serves an accepted connection by what its first bytes are, as begun.
func (d *Door) sniff(c *conn, mode Mode) *conn {
	if mode == Any {
		switch kind, err := d.guess(c); {
		case err != nil:
			c.Close()
		case kind == beginsHello:
			c.Conn.SetReadDeadline(time.Now().Add(d.limits.Handshake))
			return d.secure(c, mode)
		case kind == beginsRequest:
			return d.http(c, c)
		default:
			d.raw(c)
		}
		return nil
	}
	c.Conn.SetReadDeadline(time.Now().Add(d.limits.Handshake))
	first := make([]byte, 1) // many wait here, with no more than that
	if n, _ := c.Read(first); n == 0 {
		c.Close()
		return nil
	}
	c.unread(first)
	switch {
	case first[0] == recordHandshake:
		return d.secure(c, mode)
	case mode == Passthrough:
		d.cfg.Judge.Refused(c.ctx, Request{Scheme: "tcp", Method: http.MethodConnect, Host: c.at.host, Port: c.at.port, BodyBytes: -1}, &Denied{Reason: "only TLS may go there, and this is not TLS"})
		c.abort()
		return nil
	default:
		c.Conn.SetReadDeadline(time.Time{})
		return d.http(c, c)
	}
}

// http hands a connection to the server, which closes it.
func (d *Door) http(c *conn, nc net.Conn) *conn {
	select {
	case d.listener.conns <- lend(c, nc):
	case <-d.listener.done:
		c.Close()
	case <-c.ctx.Done():
		c.Close()
	}
	return c
}

// listener is how the server gets its connections.
type listener struct {
	conns chan net.Conn
	once  sync.Once
	done  chan struct{}
}

func (l *listener) Accept() (net.Conn, error) {
	select {
	case c := <-l.conns:
		return c, nil
	case <-l.done:
		return nil, net.ErrClosed
	}
}

func (l *listener) Close() error {
	l.once.Do(func() { close(l.done) })
	return nil
}

func (l *listener) Addr() net.Addr { return &net.TCPAddr{} }
