// Package inject puts secrets into the requests of a sandbox that has only
// placeholders for them. It wraps the transport of a door's web, behind the
// decision on the request itself.
//
// A value goes to one place: a host, a port, methods, a path and a location in
// the request, over https. A placeholder anywhere else refuses the request, in
// whatever encoding it is found. Answers to requests with a value are scrubbed:
// an upstream that echoes what it got tells the sandbox nothing.
//
// The package keeps values in memory and writes them nowhere. It knows no
// policies, no audit log and no key store: Config.Use decides and records, and
// who opens the door brings the values. What scrubbing cannot do is in
// docs/SECRETS.md. Start reading at transport.RoundTrip.
package inject

import (
	"context"
	"crypto/tls"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/textproto"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"

	"airlock.dev/airlock"
	"airlock.dev/airlock/gateway/address"
	"airlock.dev/airlock/gateway/web"
)

// Use is one use of a secret, or where its placeholder was found.
type Use struct {
	Secret   string // its name
	Host     string
	Port     uint16
	Method   string
	Path     string // decoded
	Location string // as Place.String says it, or "path", "query", "body", …
}

// Config says what a door injects. Use and Refused are needed, and are called
// from many goroutines.
type Config struct {
	Secrets []Secret
	// Use decides and records the use of a secret before its value is put in.
	// It may wait until ctx ends. Any error refuses the request; a *web.Denied
	// is told to the sandbox, of others their public text.
	Use func(ctx context.Context, u Use) error
	// Wanted says whether a secret is to be put into the request of ctx, of
	// those that are put in on demand. It may be nil if there are none.
	Wanted func(ctx context.Context, secret string) bool
	// Refused records a request that this package denied.
	Refused func(ctx context.Context, u Use, d *web.Denied)
}

// Door injects the secrets of one sandbox.
type Door struct {
	cfg   Config
	set   atomic.Pointer[set]
	reads sync.WaitGroup // of requests' bodies
}

// set is what secrets there are at a time.
type set struct {
	secrets []*Secret
	finder  *finder
	needles map[*Secret]func() []*needle // of its value
}

// New returns a door's injection. An error is airlock.Invalid and names the
// field at fault.
func New(cfg Config) (*Door, error) {
	if cfg.Use == nil || cfg.Refused == nil {
		return nil, airlock.Errorf(airlock.Internal, "a door's secrets need someone who decides and records")
	}
	d := &Door{cfg: cfg}
	if err := d.Set(cfg.Secrets); err != nil {
		return nil, err
	}
	d.cfg.Secrets = nil // Set has copies, which it forgets
	return d, nil
}

// Set replaces the secrets. Requests under way keep those they began with.
func (d *Door) Set(secrets []Secret) error {
	next := &set{needles: map[*Secret]func() []*needle{}}
	names, placeholders := map[string]bool{}, map[string]bool{}
	for _, s := range secrets {
		if err := s.Validate(); err != nil {
			return err
		}
		if names[s.Name] {
			return airlock.Invalidf("name", "give each secret once", "there are two secrets %q", s.Name)
		}
		if placeholders[s.Placeholder] {
			return airlock.Invalidf("placeholder", "make one for each secret", "secret %q has the placeholder of another", s.Name)
		}
		names[s.Name], placeholders[s.Placeholder] = true, s.Placeholder != ""
		next.secrets = append(next.secrets, &s)
		next.needles[&s] = sync.OnceValue(func() []*needle { return needles(s.Value) })
	}
	next.finder = newFinder(next.secrets)
	d.set.Store(next)
	return nil
}

// Close waits until no body is read any more. It is for after the door's web
// was closed, which ends them.
func (d *Door) Close() { d.reads.Wait() }

// Wrap returns the RoundTripper for web.Config.Wrap. Without secrets requests
// pass through it as they are.
func (d *Door) Wrap(next http.RoundTripper) http.RoundTripper { return &transport{d, next} }

type transport struct {
	door *Door
	next http.RoundTripper
}

// RoundTrip sends a request that was permitted: it puts values in, refuses
// what has a placeholder elsewhere, and scrubs the answer.
func (t *transport) RoundTrip(r *http.Request) (*http.Response, error) {
	set := t.door.set.Load()
	if len(set.secrets) == 0 {
		return t.next.RoundTrip(r)
	}
	x := &exchange{door: t.door, set: set, ctx: r.Context(), at: siteOf(r)}
	out := *r
	out.GetBody = nil // it would not be looked at
	if denied := x.prepare(r, &out); denied != nil {
		if r.Body != nil {
			r.Body.Close()
		}
		return nil, denied
	}
	res, err := t.next.RoundTrip(&out)
	if err != nil {
		if x.body != nil {
			if denied := x.body.denied(); denied != nil {
				return nil, denied
			}
		}
		if x.sending.Load() {
			err = silence(err)
		}
		return nil, err
	}
	if x.scrub != nil {
		if denied := x.answer(res); denied != nil {
			res.Body.Close()
			return nil, denied
		}
	}
	return res, nil
}

// silent is an error that tells nothing that upstream could have chosen.
type silent struct {
	text string
	err  error
}

func (s *silent) Error() string { return s.text }
func (s *silent) Unwrap() error { return s.err }

// harmless are errors whose text is not upstream's.
var harmless = []error{
	io.ErrUnexpectedEOF, io.EOF, syscall.ECONNRESET, syscall.EPIPE, net.ErrClosed, context.Canceled, context.DeadlineExceeded, errBomb,
}

// silence keeps what upstream said out of an error: it could be a value, or a
// part of one that cannot be scrubbed.
func silence(err error) error {
	for _, known := range harmless {
		if errors.Is(err, known) {
			return &silent{known.Error(), err}
		}
	}
	return &silent{"upstream's answer is broken; as the request had a secret, what it was is not shown", err}
}

// exchange is one request and its answer.
type exchange struct {
	door  *Door
	set   *set
	ctx   context.Context
	at    *site
	body  *watched // nil if there is none
	sent  []*Secret
	scrub *scrubber // nil where no secret is sent

	sending atomic.Bool // upstream may know a value

	mu      sync.Mutex
	refusal *web.Denied
}

// site is what a request is for.
type site struct {
	scheme, host string
	port         uint16
	method, path string
}

// siteOf returns a site without a host if that cannot be read: nothing is for it.
func siteOf(r *http.Request) *site {
	at := &site{scheme: r.URL.Scheme, method: r.Method, path: sitePath(r.URL), port: 80}
	if at.scheme == "https" {
		at.port = 443
	}
	if at.path == "" {
		at.path = "/"
	}
	host := r.Host // of web's requests the URL has a name of its own
	if host == "" {
		host = r.URL.Host
	}
	if i := strings.LastIndexByte(host, ':'); i > strings.LastIndexByte(host, ']') {
		n, err := strconv.ParseUint(host[i+1:], 10, 16)
		if err != nil {
			return at
		}
		host, at.port = host[:i], uint16(n)
	}
	if h, err := address.Parse(host); err == nil {
		at.host = h.String()
	}
	return at
}

// sitePath is the decoded path, in which an encoded slash stays one (%2F): it is
// not between segments to all who read it.
func sitePath(u *url.URL) string {
	escaped := u.EscapedPath()
	if !strings.Contains(strings.ToUpper(escaped), "%2F") {
		return u.Path
	}
	segments := strings.Split(escaped, "/")
	for i, s := range segments {
		decoded, err := url.PathUnescape(s)
		if err != nil {
			return "/%" // nothing is for it
		}
		segments[i] = strings.ReplaceAll(decoded, "/", "%2F")
	}
	return strings.Join(segments, "/")
}

func (x *exchange) use(secret, location string) Use {
	return Use{Secret: secret, Host: x.at.host, Port: x.at.port, Method: x.at.method, Path: x.at.path, Location: location}
}

// refuse records the first reason that is found.
func (x *exchange) refuse(secret *Secret, location string, d *web.Denied) *web.Denied {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.refusal == nil {
		x.refusal = d
		x.door.cfg.Refused(x.ctx, x.use(secret.Name, location), d)
	}
	return x.refusal
}

// misplaced refuses a request for a placeholder in it.
func (x *exchange) misplaced(s *Secret, location string) *web.Denied {
	why := s.misses(x.at)
	if why == "" {
		why = "that is not where it belongs, or not how it is written there"
	}
	return x.refuse(s, location, &web.Denied{
		Reason: fmt.Sprintf("the placeholder of secret %q is in the request's %s, and %s", s.Name, location, why),
		Ask:    "send it as it is, and only with " + s.Scope.String(),
	})
}

// prepare makes out of r what is to be sent, and has it decided.
func (x *exchange) prepare(r, out *http.Request) *web.Denied {
	p := plan{parts: partsOf(r.URL.RawQuery)}
	if denied := x.plan(&p, r); denied != nil {
		return denied
	}
	if secret, location := x.stray(&p, r); secret != nil {
		return x.misplaced(secret, location)
	}
	for _, s := range p.secrets {
		if len(r.Header["Upgrade"]) > 0 && !s.Upgrade {
			return x.refuse(s, "header Upgrade", &web.Denied{
				Reason: fmt.Sprintf("the request has secret %q and changes its protocol, and what is said then is not looked at", s.Name),
				Ask:    "have the operator allow upgrades for this secret",
			})
		}
	}
	for _, s := range p.secrets {
		if err := x.door.cfg.Use(x.ctx, x.use(s.Name, s.Place.String())); err != nil {
			return undecided(s, err)
		}
	}
	if r.Body != nil && r.Body != http.NoBody {
		x.body = x.watch(r)
		out.Body, out.Trailer = x.body, x.body.trailer
	}
	if len(p.secrets) > 0 {
		x.inject(&p, r, out)
	}
	if x.body != nil || x.scrub != nil {
		*out = *out.WithContext(x.traced(r.Context()))
	}
	return nil
}

// inject puts the values in.
func (x *exchange) inject(p *plan, r, out *http.Request) {
	x.sent = p.secrets
	x.scrub = new(scrubber)
	for _, s := range x.sent {
		x.scrub.add(x.set.needles[s]())
	}
	out.Header = r.Header.Clone()
	for name, value := range p.headers {
		out.Header[name] = []string{value}
	}
	u := *r.URL
	u.RawQuery = join(p.parts, true)
	out.URL = &u
	whole(out.Header)
}

// OfTheAnswer are headers of requests that say which part of an answer comes,
// and compressed how. Nobody may set them behind this package: a part of an answer
// could be a part of the value, and what is compressed cannot be looked at.
var OfTheAnswer = []string{"Accept-Encoding", "Grpc-Accept-Encoding", "If-Range", "Range"}

// whole asks for an answer that can be searched.
func whole(h http.Header) {
	for _, name := range OfTheAnswer {
		h.Del(name)
	}
	h.Set("Accept-Encoding", "identity")
}

// traced returns the context of what is sent. Its body is looked at when there
// is a connection and nothing was said on it: while there is none, the web may
// try another way with the same body.
func (x *exchange) traced(ctx context.Context) context.Context {
	ctx, cancel := context.WithCancelCause(ctx)
	trace := &httptrace.ClientTrace{GotConn: func(info httptrace.GotConnInfo) {
		x.sending.Store(true)
		if x.body == nil {
			return
		}
		if denied := x.body.first(); denied != nil {
			cancel(denied)
			if !shared(info.Conn) {
				info.Conn.Close() // HTTP/1.1 would write the head nevertheless
			}
		}
	}}
	if x.scrub != nil {
		trace.Got1xxResponse = func(_ int, h textproto.MIMEHeader) error { // before who passes it on
			x.scrub.header(http.Header(h))
			return nil
		}
	}
	return httptrace.WithClientTrace(ctx, trace)
}

// shared is whether other requests may be on a connection.
func shared(c net.Conn) bool {
	secure, ok := c.(interface{ ConnectionState() tls.ConnectionState })
	return ok && secure.ConnectionState().NegotiatedProtocol == "h2"
}

// undecided makes a denial of any error of a decision.
func undecided(s *Secret, err error) *web.Denied {
	if d, ok := errors.AsType[*web.Denied](err); ok {
		return d
	}
	d := &web.Denied{Status: http.StatusServiceUnavailable, Reason: fmt.Sprintf("the use of secret %q could not be decided", s.Name)}
	if e, ok := errors.AsType[*airlock.Error](err); ok && e.Code != airlock.Internal {
		d.Reason, d.Ask = e.Message, e.Hint
	}
	return d
}

// plan is what of a request changes.
type plan struct {
	secrets []*Secret
	headers map[string]string
	parts   []part // of the query
}

func (p *plan) has(place Place) bool {
	for _, s := range p.secrets {
		if s.Place.header() == place.header() && s.Place.Query == place.Query {
			return true
		}
	}
	return false
}

// always says whether a secret is put in where no placeholder is.
func (x *exchange) always(s *Secret) bool {
	return s.Always || s.Wanted && x.door.cfg.Wanted != nil && x.door.cfg.Wanted(x.ctx, s.Name)
}

// plan finds the secrets that are to be sent.
func (x *exchange) plan(p *plan, r *http.Request) *web.Denied {
	for _, always := range []bool{true, false} {
		for _, s := range x.set.secrets {
			if x.always(s) != always || s.misses(x.at) != "" {
				continue
			}
			if p.has(s.Place) {
				if always {
					return x.refuse(s, s.Place.String(), &web.Denied{
						Reason: fmt.Sprintf("secret %q and another one are both for this request's %s", s.Name, s.Place),
						Ask:    "have the operator keep one",
					})
				}
				continue
			}
			if name := s.Place.header(); name != "" {
				sent := r.Header[name]
				if always || len(sent) == 1 && s.Place.holds(sent[0], s.Placeholder) {
					if p.headers == nil {
						p.headers = map[string]string{}
					}
					p.headers[name] = s.Place.credential(s.Value)
					p.secrets = append(p.secrets, s)
				}
			} else if p.parameter(s, always) {
				p.secrets = append(p.secrets, s)
			}
		}
	}
	return nil
}

// credential is a header's value with a secret's.
func (p Place) credential(value string) string {
	if p.Basic == "" {
		return p.Prefix + value
	}
	return "Basic " + base64.StdEncoding.EncodeToString([]byte(p.pair(value)))
}

// pair is the user and the password of Basic authentication.
func (p Place) pair(value string) string {
	if p.Basic == "user" {
		return value + ":" + p.Other
	}
	return p.Other + ":" + value
}

// holds is whether a header's value is what the place says, with placeholder.
func (p Place) holds(value, placeholder string) bool {
	prefix := p.Prefix
	if p.Basic != "" {
		prefix = "Basic "
	}
	if len(value) < len(prefix) || !strings.EqualFold(value[:len(prefix)], prefix) {
		return false
	}
	value = value[len(prefix):]
	if p.Basic == "" {
		return value == placeholder
	}
	pair, err := base64.StdEncoding.DecodeString(value)
	return err == nil && string(pair) == p.pair(placeholder)
}

// parameter puts a secret into the query: in place of its placeholder, which
// is there once, or of all parameters of its name.
func (p *plan) parameter(s *Secret, always bool) bool {
	var kept []part
	found := 0
	for _, q := range p.parts {
		if !q.placed && q.name == s.Place.Query {
			if always {
				continue
			}
			if q.value == s.Placeholder {
				found++
				q.text, _, _ = strings.Cut(q.text, "=")
				q.text += "=" + url.QueryEscape(s.Value)
				q.placed = true
			}
		}
		kept = append(kept, q)
	}
	if always {
		kept = append(kept, part{text: url.QueryEscape(s.Place.Query) + "=" + url.QueryEscape(s.Value), placed: true})
	} else if found != 1 {
		return false
	}
	p.parts = kept
	return true
}

// part is one parameter of a query.
type part struct {
	text        string // as it is sent
	name, value string // decoded; empty if that fails
	placed      bool   // it has a secret's value
}

func partsOf(query string) (parts []part) {
	if query == "" {
		return nil
	}
	for text := range strings.SplitSeq(query, "&") {
		q := part{text: text}
		name, value, _ := strings.Cut(text, "=")
		q.name, _ = url.QueryUnescape(name)
		q.value, _ = url.QueryUnescape(value)
		parts = append(parts, q)
	}
	return parts
}

// join is the query of parts; those with values are left out if they are to be.
func join(parts []part, values bool) string {
	var texts []string
	for _, q := range parts {
		if values || !q.placed {
			texts = append(texts, q.text)
		}
	}
	return strings.Join(texts, "&")
}

// stray finds a placeholder in a request's head that is not to be replaced.
func (x *exchange) stray(p *plan, r *http.Request) (*Secret, string) {
	f := x.set.finder
	if s := f.find(r.URL.EscapedPath()); s != nil {
		return s, "path"
	}
	if s := f.find(join(p.parts, false)); s != nil {
		return s, "query"
	}
	if s := f.name(r.Host); s != nil {
		return s, "host"
	}
	for name, values := range r.Header {
		if s := f.name(name); s != nil {
			return s, "header"
		}
		if _, placed := p.headers[name]; placed {
			continue
		}
		for _, v := range values {
			if s := f.find(v); s != nil {
				return s, "header " + name
			}
		}
	}
	return x.inTrailer(r.Trailer)
}

func (x *exchange) inTrailer(h http.Header) (*Secret, string) {
	for name, values := range h {
		if s := x.set.finder.name(name); s != nil {
			return s, "trailer"
		}
		for _, v := range values {
			if s := x.set.finder.find(v); s != nil {
				return s, "trailer"
			}
		}
	}
	return nil, ""
}
