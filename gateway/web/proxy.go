package web

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/http/httputil"
	"net/netip"
	"net/textproto"
	"net/url"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"airlock.dev/airlock"
)

// routeLife is how long a connection keeps to the address that was picked for
// it. Then it is resolved and classified again.
const routeLife = time.Minute

// headerLine is what a header counts for besides its text, as in RFC 9113.
const headerLine = 32

// routesMost is how many ways to a host are tried.
const routesMost = 3

var (
	errBodyTooLarge   = airlock.Errorf(airlock.TooLarge, "the request's body is larger than this sandbox may send")
	errAnswerTooLarge = airlock.Errorf(airlock.TooLarge, "the answer is larger than this sandbox may receive")
	errEarlyTooLarge  = airlock.Errorf(airlock.TooLarge, "the headers before the answer are larger than this sandbox may receive")
)

// target is what a permitted request goes to.
type target struct {
	*crossing
	req   Request
	route Route
	out   http.Header // of the answer to the sandbox
	body  *meter      // of the request; nil if there is none
	last  bool        // there is no other way to go
	h2    bool        // upstream may speak HTTP/2, as the client does

	turn     *turn
	answered *atomic.Bool // upstream began to answer
	again    bool         // it was not connected to, and the next route is to be tried
}

type targetKey struct{}

// PermitOf returns the permit of a request that Config.Wrap's RoundTripper got.
func PermitOf(ctx context.Context) Permit {
	return ctx.Value(targetKey{}).(*target).permit
}

// ServeHTTP decides a request and passes it on. It is for the door's own server.
func (d *Door) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if !d.begin() {
		panic(http.ErrAbortHandler)
	}
	defer d.work.Done()
	c := r.Context().Value(connKey{}).(*conn)
	rc := http.NewResponseController(w)
	if r.ProtoMajor != 1 {
		d.serve(w, r, c, rc)
		return
	}
	// Answers do not wait for the request's body.
	if err := rc.EnableFullDuplex(); err != nil {
		panic(err) // not with net/http's server
	}
	c.drained.Store(false)
	b := &body{ReadCloser: r.Body}
	if r.Body != http.NoBody {
		r.Body = b
	}
	expected := len(r.Header["Expect"]) > 0
	d.serve(w, r, c, rc)
	if r.Body == http.NoBody || b.over.Load() {
		return
	}
	// The rest of the body is in the way of the next request. The server would
	// read it too, but with full duplex it takes its end for that of all reading,
	// and the connection ends with a panic.
	rc.Flush()
	c.drain()
	if !expected || b.begun.Load() {
		io.CopyN(io.Discard, b, drainMost)
	}
	if b.over.Load() {
		c.drained.Store(false)
	}
}

// serve is ServeHTTP for every version.
func (d *Door) serve(w http.ResponseWriter, r *http.Request, c *conn, rc *http.ResponseController) {
	if !d.rate.Allow() {
		d.limited()
		w.Header().Set("Retry-After", "1")
		deny(w, r, &Denied{Status: http.StatusTooManyRequests, Reason: fmt.Sprintf("the sandbox makes more than %d requests per minute", d.limits.RequestsPerMinute), Ask: "make them more slowly"})
		return
	}
	if r.Method == http.MethodConnect {
		d.connect(w, r, c)
		return
	}
	if !d.enter() {
		d.limited()
		w.Header().Set("Retry-After", "1")
		deny(w, r, &Denied{Status: http.StatusTooManyRequests, Reason: fmt.Sprintf("the sandbox has %d requests under way and that is the most", d.limits.Requests), Ask: "wait for some to end"})
		return
	}
	defer d.leave()
	turn := &turn{of: d.turns, ctx: r.Context()}
	turn.begin()
	defer turn.end()

	req, denied := d.read(c, r)
	if denied != nil {
		d.cfg.Judge.Refused(r.Context(), req, denied)
		if c.refused != nil {
			w.Header().Set("Connection", "close")
		}
		deny(w, r, denied)
		return
	}

	ctx := r.Context()
	half := r.ProtoMajor == 1 && !c.secure
	if half {
		ctx = context.WithoutCancel(ctx)
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer context.AfterFunc(c.ctx, func() { cancel(errGone) })()
	var answered atomic.Bool
	if half {
		// A client that has said all it has to say may still read. Whether it
		// does is known when it is written to, which must come soon.
		defer context.AfterFunc(r.Context(), func() {
			select {
			case <-ctx.Done():
			case <-time.After(d.limits.HalfClosed):
				if !answered.Load() {
					cancel(errGone)
				}
			}
		})()
	}
	r = r.WithContext(ctx)

	routes, err := d.routes(ctx, c, req.Scheme, place{host: req.Host, port: req.Port})
	if err != nil {
		if denied, ok := errors.AsType[*Denied](err); ok {
			d.cfg.Judge.Refused(ctx, req, denied)
			deny(w, r, denied)
			return
		}
		failed(w, r, err)
		return
	}
	for i, route := range routes {
		req.IP, req.Class = route.IP, route.Class
		permit, err := d.cfg.Judge.Cross(ctx, req)
		if err != nil {
			deny(w, r, undecided(err))
			return
		}
		t := &target{crossing: newCrossing(permit), req: req, route: route, out: w.Header(), answered: &answered, last: i == len(routes)-1, turn: turn, h2: r.ProtoMajor == 2}
		stop := func(why error) {
			cancel(why)
			rc.SetReadDeadline(time.Unix(1, 0))
		}
		if d.attempt(w, r, t, stop); !t.again {
			return
		}
		c.failed(route)
	}
}

// attempt passes a request on that was permitted. stop ends it.
func (d *Door) attempt(w http.ResponseWriter, r *http.Request, t *target, stop func(why error)) {
	defer func() {
		p := recover()
		if p != nil {
			t.fail(errGone) // unless it is known better
		}
		t.end(t.status, nil)
		if p != nil {
			panic(p) // it is http.ErrAbortHandler, for the server
		}
	}()
	t.watch(d.limits.Idle, func() { stop(errStalled) })
	c, rc, major := r.Context().Value(connKey{}).(*conn), http.NewResponseController(w), r.ProtoMajor
	t.revocable(func(why *Denied) { stop(why) }, func() {
		// The client does not read, or is not answered in HTTP any more.
		if major == 1 {
			c.abort()
			return
		}
		rc.SetWriteDeadline(time.Unix(1, 0))
	})
	ctx := context.WithValue(r.Context(), targetKey{}, t)
	// The client bounds early answers only if nobody looks at them, and the
	// ReverseProxy does.
	early := d.limits.AnswerHeaderBytes
	r = r.WithContext(httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{WroteRequest: func(httptrace.WroteRequestInfo) { t.turn.end() }, Got1xxResponse: func(_ int, h textproto.MIMEHeader) error {
		early -= headerLine
		for k, vs := range h {
			for _, v := range vs {
				early -= len(k) + len(v) + headerLine
			}
		}
		if early < 0 {
			return errEarlyTooLarge
		}
		return nil
	}}))
	if _, why := t.take(headerBytes(r.Header) + len(r.Method) + len(r.RequestURI)); why != nil {
		deny(w, r, why)
		t.status = why.status()
		return
	}
	if r.Body != http.NoBody {
		t.body = &meter{ReadCloser: r.Body, x: t.crossing, count: &t.crossing.out, left: d.limits.BodyBytes, over: errBodyTooLarge, trailer: r.Trailer}
		r.Body = t.body
	}
	d.proxy.ServeHTTP(w, r)
}

// headerBytes is about how long a header is.
func headerBytes(h http.Header) (n int) {
	for k, vs := range h {
		for _, v := range vs {
			n += len(k) + len(v) + len(": \r\n")
		}
	}
	return n
}

func (d *Door) enter() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.requests >= d.limits.Requests {
		return false
	}
	d.requests++
	return true
}

func (d *Door) leave() {
	d.mu.Lock()
	d.requests--
	d.mu.Unlock()
}

// read finds out what a request is for. With a denial the Request is what is
// known so far.
func (d *Door) read(c *conn, r *http.Request) (req Request, denied *Denied) {
	bad := func(format string, args ...any) (Request, *Denied) {
		return req, &Denied{Status: http.StatusBadRequest, Reason: fmt.Sprintf(format, args...)}
	}
	c.mu.Lock()
	at := c.at
	c.mu.Unlock()
	req = Request{Scheme: "http", Method: r.Method, Host: at.host, Port: at.port, RawQuery: r.URL.RawQuery, BodyBytes: r.ContentLength}
	if c.secure {
		req.Scheme = "https"
	}
	if c.refused != nil {
		return req, c.refused
	}
	if r.Method == "PRI" {
		return bad("this is HTTP/2 in clear, which is not carried: use HTTP/1.1, or HTTP/2 in TLS")
	}
	if !isMethod(r.Method) {
		return bad("the method %.40q is not one in upper case", r.Method)
	}
	if strings.Contains(r.URL.RawQuery, " ") {
		// Only HTTP/2 can say it. In a line of HTTP/1.1 it would end the target.
		return bad("the request's target has a space: write %%20")
	}
	if r.URL.Opaque != "" || r.URL.User != nil || strings.Contains(r.RequestURI, "#") {
		return bad("the request's target is not the path or the URL of an HTTP request")
	}
	if absolute := r.URL.Scheme != "" || r.URL.Host != ""; absolute {
		if r.URL.Scheme != req.Scheme || r.URL.Host != r.Host {
			return bad("the request's target is a URL that is for another connection: use CONNECT for https")
		}
	} else if c.proxy {
		return bad("this is the gateway's proxy: use it with CONNECT, or with whole URLs")
	}

	// HTTP/1.0 does without Host, and HTTP/2 may have both.
	said := r.Header["Host"]
	if r.Host != "" {
		said = append(said[:len(said):len(said)], r.Host)
	}
	for _, s := range said {
		host, port, err := parseAuthority(s)
		if err != nil {
			return bad("the host %.300q cannot be read: %v", s, err)
		}
		if port == 0 {
			if port = at.port; c.proxy {
				port = defaultPort(req.Scheme)
			}
		}
		p := d.named(place{host: host, port: port, literal: isAddress(host)})
		req.Host, req.Port = p.host, p.port
		if c.proxy {
			at = p
		} else if at, denied = c.agree(p); denied != nil {
			return req, denied
		}
	}
	var err error
	if req.Path, req.RawPath, err = cleanPath(r.URL.EscapedPath()); err != nil {
		return bad("the path can be read in more than one way: %v", err)
	}
	if s := slashed(req.Path); s != req.Path {
		if !d.cfg.EncodedSlashes {
			return bad("the path can be read in more than one way: it has an encoded slash (%%2f)")
		}
		req.Slashed = s
	}
	req.Upgrade = upgrade(r)
	if r.ContentLength > d.limits.BodyBytes {
		return req, &Denied{Status: http.StatusRequestEntityTooLarge, Reason: fmt.Sprintf("the request's body is larger than %d bytes", d.limits.BodyBytes)}
	}
	return req, nil
}

func isMethod(s string) bool {
	for i := 0; i < len(s); i++ {
		if (s[i] < 'A' || s[i] > 'Z') && s[i] != '-' {
			return false
		}
	}
	return s != "" && len(s) <= 32
}

// hold is p, by its name if it is the address of one, which it stays until
// release is called.
func (d *Door) hold(p place) (at place, release func()) {
	if p.literal {
		if a, err := netip.ParseAddr(p.host); err == nil {
			if name, release, ok := d.cfg.Hold(a); ok {
				return place{host: name, port: p.port}, release
			}
		}
	}
	return p, func() {}
}

// named is hold for one moment.
func (d *Door) named(p place) place {
	p, release := d.hold(p)
	release()
	return p
}

// agree says whether a request for p may be on this connection. The first
// request tells the name of one in clear to an address that has none.
func (c *conn) agree(p place) (place, *Denied) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case p.host == c.at.host && p.port == c.at.port:
	case c.at.literal && !p.literal && !c.secure && p.port == c.at.port:
		c.at = p
	default:
		return p, disagrees("the request's host", authority("", p.host, p.port), c.at)
	}
	return c.at, nil
}

// upgrade returns the protocol that a request asks for, and takes the question
// out of it where the answer could be HTTP or TLS again, which would be
// requests that nobody decides.
func upgrade(r *http.Request) string {
	asked := false
	for _, v := range r.Header["Connection"] {
		for token := range strings.SplitSeq(v, ",") {
			asked = asked || strings.EqualFold(strings.TrimSpace(token), "upgrade")
		}
	}
	protocol := strings.ToLower(strings.Join(r.Header["Upgrade"], ","))
	plain := r.ProtoMajor == 1 && !strings.ContainsAny(protocol, ", \t")
	for _, p := range []string{"h2", "h3", "http", "tls"} {
		plain = plain && !strings.HasPrefix(protocol, p)
	}
	if !asked || !plain {
		r.Header.Del("Upgrade")
		r.Header.Del("Http2-Settings")
		return ""
	}
	return protocol
}

// routes are where requests of a connection go, for a while.
func (d *Door) routes(ctx context.Context, c *conn, scheme string, to place) ([]Route, error) {
	c.mu.Lock()
	routes, routed := c.routes, c.routed
	c.mu.Unlock()
	if len(routes) > 0 && routes[0].Host == to.host && routes[0].Port == to.port && time.Since(routed) < routeLife {
		return routes, nil
	}
	routes, err := d.pick(ctx, scheme, to)
	if err == nil {
		c.mu.Lock()
		c.routes, c.routed = routes, time.Now()
		c.mu.Unlock()
	}
	return routes, err
}

// failed has the requests that follow try other routes first.
func (c *conn) failed(r Route) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if i := slices.Index(c.routes, r); i >= 0 {
		c.routes = append(slices.Concat(c.routes[:i], c.routes[i+1:]), r)
	}
}

func (d *Door) pick(ctx context.Context, scheme string, to place) ([]Route, error) {
	ctx, cancel := context.WithTimeout(ctx, d.limits.Handshake)
	defer cancel()
	routes, err := d.cfg.Router.Routes(ctx, scheme, to.host, to.port)
	if err == nil && len(routes) == 0 {
		err = errors.New("it has none")
	}
	if err != nil {
		return nil, fmt.Errorf("find the address of %s: %w", to.host, err)
	}
	routes = slices.Clone(routes[:min(len(routes), routesMost)])
	for i := range routes {
		// What is decided on and what is dialled is what was asked for.
		routes[i].Scheme, routes[i].Host, routes[i].Port = scheme, to.host, to.port
	}
	return routes, nil
}

// reach decides a connection as a whole, and makes it.
func (d *Door) reach(ctx context.Context, scheme string, to place) (*crossing, *conn, error) {
	req := Request{Scheme: scheme, Method: http.MethodConnect, Host: to.host, Port: to.port, BodyBytes: -1}
	routes, err := d.pick(ctx, scheme, to)
	if err != nil {
		if denied, ok := errors.AsType[*Denied](err); ok {
			d.cfg.Judge.Refused(ctx, req, denied)
		}
		return nil, nil, err
	}
	var failed error
	for _, route := range routes {
		req.IP, req.Class = route.IP, route.Class
		permit, err := d.cfg.Judge.Cross(ctx, req)
		if err != nil {
			return nil, nil, undecided(err)
		}
		x := newCrossing(permit)
		up, err := d.connectTo(ctx, route)
		if err == nil {
			return x, up, nil
		}
		x.end(0, err)
		if failed = err; ctx.Err() != nil {
			break
		}
	}
	return nil, nil, failed
}

func (d *Door) connectTo(ctx context.Context, route Route) (*conn, error) {
	ctx, cancel := context.WithTimeout(ctx, d.limits.Handshake)
	defer cancel()
	nc, err := d.cfg.Router.Connect(ctx, route)
	if err != nil {
		return nil, &unconnected{authority("", route.Host, route.Port), err}
	}
	c := d.newConn(d.ctx, nc, place{host: route.Host, port: route.Port})
	if c == nil {
		return nil, net.ErrClosed
	}
	return c, nil
}

// unconnected is why there is no connection to upstream, of which nothing was
// said yet.
type unconnected struct {
	to  string
	err error
}

func (u *unconnected) Error() string { return "connect to " + u.to + ": " + u.err.Error() }
func (u *unconnected) Unwrap() error { return u.err }

// key is a URL's host that stands for a route, so that requests share an
// upstream connection only if they were decided for the same name and address,
// and no Reroute came between.
func (t *target) key(way uint64) string {
	kind, host := "name", t.route.Host
	if isAddress(host) {
		kind, host = "address", strings.ReplaceAll(host, ":", "-")
	}
	if !t.h2 {
		kind += "-1"
	}
	ip := t.route.IP.As16()
	return fmt.Sprintf("%d.%s.%x.%s:%d", way, kind, ip, host, t.route.Port)
}

func (d *Door) dial(ctx context.Context, _, _ string) (net.Conn, error) {
	c, err := d.connectTo(ctx, ctx.Value(targetKey{}).(*target).route)
	if err != nil {
		return nil, err
	}
	return c, nil
}

func (d *Door) dialTLS(ctx context.Context, _, _ string) (net.Conn, error) {
	t := ctx.Value(targetKey{}).(*target)
	c, err := d.connectTo(ctx, t.route)
	if err != nil {
		return nil, err
	}
	// HTTP/1.1 has upgrades, and costs less than what multiplexes one request.
	protocols := []string{"http/1.1"}
	if t.h2 {
		protocols = []string{"h2", "http/1.1"}
	}
	secure, err := d.secured(ctx, c, protocols)
	if err != nil {
		return nil, err
	}
	return secure, nil
}

// secured begins TLS with upstream; c is closed with an error.
func (d *Door) secured(ctx context.Context, c *conn, protocols []string) (*tls.Conn, error) {
	config := d.upstream.Clone()
	config.ServerName, config.NextProtos = c.at.host, protocols
	t := tls.Client(c, config)
	ctx, cancel := context.WithTimeout(ctx, d.limits.Handshake)
	defer cancel()
	if err := t.HandshakeContext(ctx); err != nil {
		c.Close()
		return nil, fmt.Errorf("TLS with %s: %w", authority("https", c.at.host, c.at.port), err)
	}
	return t, nil
}

// rewrite makes the request that goes upstream of what was decided.
func (d *Door) rewrite(p *httputil.ProxyRequest) {
	t := p.In.Context().Value(targetKey{}).(*target)
	p.Out.URL = &url.URL{
		Scheme: t.req.Scheme, Host: t.key(d.way.Load()), Path: slashed(t.req.Path), RawPath: t.req.RawPath,
		RawQuery: t.req.RawQuery, ForceQuery: p.In.URL.ForceQuery,
	}
	p.Out.Host = authority(t.req.Scheme, t.req.Host, t.req.Port)
	p.Out.Trailer = p.In.Trailer // the server fills it in at the body's end
	for _, k := range []string{"Forwarded", "X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Proto"} {
		if v := p.In.Header[k]; v != nil {
			p.Out.Header[k] = v // what the sandbox says of itself
		}
	}
}

// answered looks at what came back.
func answered(res *http.Response) error {
	t := res.Request.Context().Value(targetKey{}).(*target)
	d := res.Request.Context().Value(connKey{}).(*conn).door
	if res.StatusCode < 100 { // no answer can have it, of ours neither
		return errors.New("its status is none of HTTP")
	}
	t.status = res.StatusCode
	t.answered.Store(true)
	t.turn.begin()
	res.Header.Del(headerDenied)
	res.Header.Del(headerError)
	res.Header.Del("Alt-Svc") // it would lead to places that nobody asked about
	if _, why := t.take(headerBytes(res.Header)); why != nil {
		return why
	}
	if res.ContentLength > d.limits.AnswerBytes && res.Request.Method != http.MethodHead {
		return errAnswerTooLarge
	}
	if _, ok := res.Header["Content-Type"]; !ok {
		t.out["Content-Type"] = nil // or the server would guess one
	}
	if len(res.Trailer) > 0 {
		res.Header.Del("Content-Length") // HTTP/2 has both, HTTP/1.1 either
	}
	m := &meter{ReadCloser: res.Body, x: t.crossing, count: &t.crossing.in, left: d.limits.AnswerBytes, over: errAnswerTooLarge}
	res.Body = m
	if w, ok := m.ReadCloser.(io.Writer); ok && res.StatusCode == http.StatusSwitchingProtocols {
		res.Body = &upgraded{meter: m, w: w}
	}
	return nil
}

// failed answers a request that could not be passed on.
func (d *Door) failed(w http.ResponseWriter, r *http.Request, err error) {
	t := r.Context().Value(targetKey{}).(*target)
	if cause := context.Cause(r.Context()); cause != nil {
		err = cause
	}
	t.fail(err)
	if _, ok := errors.AsType[*unconnected](err); ok && !t.last && (t.body == nil || !t.body.begun.Load()) {
		t.again = true
		return
	}
	if err := t.failure(); errors.Is(err, errGone) || errors.Is(err, context.Canceled) {
		panic(http.ErrAbortHandler) // nobody is there
	}
	if t.withdrawn.Load() && r.ProtoMajor == 1 {
		w.Header().Set("Connection", "close") // nothing more is read from it
	}
	t.status = failed(w, r, t.failure())
}

func failed(w http.ResponseWriter, r *http.Request, err error) (status int) {
	status = http.StatusBadGateway
	switch denied, ok := errors.AsType[*Denied](err); {
	case ok:
		deny(w, r, denied)
		return denied.status()
	case errors.Is(err, errBodyTooLarge):
		deny(w, r, &Denied{Status: http.StatusRequestEntityTooLarge, Reason: err.Error()})
		return http.StatusRequestEntityTooLarge
	case errors.Is(err, errStalled), errors.Is(err, context.DeadlineExceeded), isTimeout(err):
		status = http.StatusGatewayTimeout
	}
	reason := strings.ToValidUTF8(err.Error(), "\uFFFD")
	if strings.Contains(reason, "readLoopPeekFailLocked") { // how Go's client calls it, without a cause
		reason = "it spoke before it was asked, or ended: that is not HTTP"
	}
	reason = "upstream failed: " + strings.ToValidUTF8(reason[:min(len(reason), 500)], "")
	w.Header().Set(headerError, "upstream")
	tell(w, r, status, reason, nil, "", reason)
	return status
}

// body knows whether it was read, and to its end.
type body struct {
	io.ReadCloser
	begun, over atomic.Bool
}

func (b *body) Read(p []byte) (int, error) {
	b.begun.Store(true)
	n, err := b.ReadCloser.Read(p)
	if err == io.EOF {
		b.over.Store(true)
	}
	return n, err
}

// meter counts a body, and ends one that is too long.
type meter struct {
	io.ReadCloser
	x     *crossing
	count *atomic.Int64
	left  int64
	over  error
	begun atomic.Bool // what was read can be sent once only
	// trailer of a request is there when its body is over.
	trailer http.Header
}

func (m *meter) Read(p []byte) (int, error) {
	m.begun.Store(true)
	if m.left < 0 {
		return 0, m.over
	}
	n, err := m.ReadCloser.Read(p)
	if n > 0 {
		fits, why := m.x.passed(m.count, n)
		if m.left -= int64(n); m.left < 0 {
			n, err = 0, m.over
		} else if why != nil {
			n, err = fits, why
		}
	}
	if err == io.EOF {
		if _, why := m.x.take(headerBytes(m.trailer)); why != nil {
			err = why
		}
	}
	if err != nil && err != io.EOF {
		m.x.fail(err)
	}
	return n, err
}

// upgraded is a connection that changed its protocol.
type upgraded struct {
	*meter
	w io.Writer
}

func (u *upgraded) Write(p []byte) (int, error) {
	fits, why := u.x.passed(&u.x.out, len(p))
	n, err := u.w.Write(p[:fits])
	if err == nil && why != nil {
		err = why
	}
	return n, err
}

// CloseWrite passes on the end of what one side says.
func (u *upgraded) CloseWrite() error {
	if w, ok := u.w.(interface{ CloseWrite() error }); ok {
		return w.CloseWrite()
	}
	return errors.ErrUnsupported
}

// connect opens a tunnel for a client that uses us as its proxy. What goes
// through it is looked at like any other connection.
func (d *Door) connect(w http.ResponseWriter, r *http.Request, c *conn) {
	req := Request{Scheme: "tcp", Method: http.MethodConnect, BodyBytes: -1}
	refuse := func(status int, format string, args ...any) {
		denied := &Denied{Status: status, Reason: fmt.Sprintf(format, args...)}
		d.cfg.Judge.Refused(r.Context(), req, denied)
		deny(w, r, denied)
	}
	if !c.proxy || r.ProtoMajor != 1 {
		req.Host, req.Port = c.at.host, c.at.port
		refuse(http.StatusBadRequest, "CONNECT is for the gateway's proxy, and this connection goes elsewhere")
		return
	}
	host, port, err := parseAuthority(r.RequestURI)
	if err != nil || port == 0 {
		refuse(http.StatusBadRequest, "CONNECT names a host and a port, not %.300q", r.RequestURI)
		return
	}
	at, release := d.hold(place{host: host, port: port, literal: isAddress(host)})
	defer release()
	mode, err := d.admit(c.ctx, at)
	if err != nil {
		deny(w, r, undecided(err))
		return
	}
	var x *crossing
	var up *conn
	if mode == TCP {
		if x, up, err = d.reach(c.ctx, "tcp", at); err != nil {
			failed(w, r, err)
			return
		}
	}
	_, buffered, err := http.NewResponseController(w).Hijack()
	if err == nil {
		early, _ := buffered.Reader.Peek(buffered.Reader.Buffered())
		c.unread(append([]byte(nil), early...))
		_, err = io.WriteString(c, "HTTP/1.1 200 Connection established\r\n\r\n")
	}
	if err != nil {
		if up != nil {
			up.abort()
			x.end(0, err)
		}
		c.Close()
		return
	}
	c.at, c.proxy = at, false
	if up != nil {
		d.relay(c, up, x)
		return
	}
	if c := d.sniff(c, mode); c != nil {
		<-c.done
	}
}
