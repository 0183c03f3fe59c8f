// Package dns answers the DNS queries of one sandbox.
//
// Names are a way out: who may look up any name can send any data to whoever
// runs the servers of a domain. So each query is decided and recorded (Judge)
// before the host's resolver hears of it, and what comes from the sandbox is
// never passed on: the host is asked for a name, by its own means, and only
// whether it has addresses comes back. The answers are synthetic addresses
// (Names), which mean a name at this door and nothing anywhere else.
//
// All that is read comes from code that nobody trusts: sizes, rates, times
// and goroutines are bounded, and nothing is answered that was not
// understood. The package does not know policies, what addresses are private,
// or how connections are made. Start reading at Server.
package dns

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"sync"
	"time"

	"golang.org/x/net/dns/dnsmessage"

	"airlock.dev/airlock"
	"airlock.dev/airlock/gateway/address"
)

// A Judge decides whether a name may be looked up, and returns only when the
// decision is on record. No error permits it. An error with the code
// airlock.Denied or airlock.Exhausted is a denial, whose public text the
// sandbox gets; any other one means that nothing could be decided, and
// nothing is looked up either.
//
// name is in lower case, has a dot in it and none at its end, and kind is the
// type of the query as DNS writes it, like A, HTTPS or TYPE4711. A name that
// is no host's has other characters as \DDD, or labels that address.Parse
// does not take: it is there to be recorded, and is not looked up whatever is
// decided. Only A and AAAA are ever looked up; other permitted queries get an
// empty answer.
type Judge interface {
	Judge(ctx context.Context, name, kind string) error
}

// Config is what a Server needs. Zero numbers and times stand for the
// values in parentheses.
type Config struct {
	Judge    Judge
	Resolver Resolver
	Names    *Names

	TTL time.Duration // of answers, in whole seconds (30 s)
	// Local are names that do not exist, nor what is below them: they are
	// neither decided nor looked up. They have no dot in front. nil stands
	// for those that no public name ends with: local, internal, localhost,
	// ... Reverse names (arpa) never exist.
	Local []string

	Rate    int           // decisions per second (100); twice as many at once
	Pending int           // queries that are being decided or looked up (128)
	Streams int           // TCP connections (16)
	Known   int           // names whose lookups are kept for some seconds (1024)
	Wait    time.Duration // for a decision and a lookup together (4 s)
	Idle    time.Duration // until a connection without a query is closed (10 s)
	Slow    time.Duration // for a message to go, and for one over TCP to come (5 s)
}

// flowMost is how many queries of one connection are answered at a time.
const flowMost = 32

// notPublic are the last labels that no public name has: IANA's special-use
// names, what ICANN keeps for private use, and what routers at home answer to.
var notPublic = []string{
	"alt", "corp", "home", "internal", "invalid", "lan", "local", "localdomain", "localhost", "mail", "onion",
}

// Server answers the queries of one door. All methods may be called at the
// same time.
type Server struct {
	c     Config
	local map[string]bool
	cache *cache
	rate  bucket

	ctx     context.Context // ends with Close
	cancel  context.CancelFunc
	pending chan struct{} // holds a token for each query that is being decided

	mu      sync.Mutex
	closed  bool
	streams int
	serving sync.WaitGroup
}

// New returns a server, which the caller closes.
func New(c Config) *Server {
	orDefault(&c.TTL, 30*time.Second)
	orDefault(&c.Rate, 100)
	orDefault(&c.Pending, 128)
	orDefault(&c.Streams, 16)
	orDefault(&c.Known, 1024)
	orDefault(&c.Wait, 4*time.Second)
	orDefault(&c.Idle, 10*time.Second)
	orDefault(&c.Slow, 5*time.Second)
	if c.Local == nil {
		c.Local = notPublic
	}
	s := &Server{c: c, local: map[string]bool{"arpa": true}, pending: make(chan struct{}, c.Pending)}
	for _, suffix := range c.Local {
		s.local[strings.ToLower(suffix)] = true
	}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	s.rate = bucket{perSecond: float64(c.Rate), most: 2 * float64(c.Rate), tokens: 2 * float64(c.Rate), at: time.Now()}
	s.cache = &cache{resolver: c.Resolver, most: c.Known, wait: c.Wait, now: time.Now, ctx: s.ctx, entries: map[string]*outcome{}}
	return s
}

func orDefault[T comparable](v *T, d T) {
	var zero T
	if *v == zero {
		*v = d
	}
}

// Close ends all that is being answered, and returns when nothing of it is left.
func (s *Server) Close() {
	s.mu.Lock()
	s.closed = true
	s.mu.Unlock()
	s.cancel()
	s.serving.Wait()
	s.cache.close()
}

// Lookup returns the addresses of a name, in the form that address.Parse
// gives, from the host's resolver or from what it said some seconds ago. It
// decides nothing: it is for who dials a name that was decided about.
func (s *Server) Lookup(ctx context.Context, name string) ([]netip.Addr, error) {
	return s.cache.lookup(ctx, name)
}

// ServeUDP answers the queries that come from one address over UDP, each read
// from c being one. It returns when none came for a while, when the client
// takes no replies, when ctx ends or the server is closed, and closes c.
func (s *Server) ServeUDP(ctx context.Context, c net.Conn) {
	ctx, end, ok := s.begin(ctx, c, false)
	if !ok {
		return
	}
	defer end()
	f := newFlow(ctx, s, c, false)
	defer f.answering.Wait()
	buf := make([]byte, queryMost+1) // one more, to see what is too long
	for {
		if c.SetReadDeadline(time.Now().Add(s.c.Idle)) != nil {
			return
		}
		n, err := c.Read(buf)
		if err != nil {
			return
		}
		if f.message(buf[:n]) != nil {
			return
		}
	}
}

// ServeTCP answers the queries that come over one TCP connection, as they are
// ready and not in their order. It returns when none came for a while, when
// the client is too slow or done, when ctx ends or the server is closed, and
// closes c.
func (s *Server) ServeTCP(ctx context.Context, c net.Conn) {
	ctx, end, ok := s.begin(ctx, c, true)
	if !ok {
		return
	}
	defer end()
	f := newFlow(ctx, s, c, true)
	defer f.answering.Wait() // a client may be done with asking and wait for answers
	buf := make([]byte, queryMost)
	for {
		if c.SetReadDeadline(time.Now().Add(s.c.Idle)) != nil {
			return
		}
		if _, err := io.ReadFull(c, buf[:2]); err != nil {
			return
		}
		n := int(binary.BigEndian.Uint16(buf))
		if n < headerSize || n > queryMost || c.SetReadDeadline(time.Now().Add(s.c.Slow)) != nil {
			return
		}
		if _, err := io.ReadFull(c, buf[:n]); err != nil {
			return
		}
		if f.message(buf[:n]) != nil {
			return
		}
	}
}

// begin takes a connection over, which is closed when ctx or the server ends.
func (s *Server) begin(ctx context.Context, c net.Conn, stream bool) (_ context.Context, end func(), ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed || stream && s.streams >= s.c.Streams {
		c.Close()
		return nil, nil, false
	}
	if stream {
		s.streams++
	}
	s.serving.Add(1)
	ctx, cancel := context.WithCancel(ctx)
	withServer := context.AfterFunc(s.ctx, cancel)
	withCtx := context.AfterFunc(ctx, func() { c.Close() })
	return ctx, func() {
		withServer()
		withCtx()
		cancel()
		c.Close()
		s.mu.Lock()
		if stream {
			s.streams--
		}
		s.mu.Unlock()
		s.serving.Done()
	}, true
}

// flow is one connection.
type flow struct {
	s         *Server
	ctx       context.Context
	c         net.Conn
	stream    bool
	slots     chan struct{} // holds a token for each query that is being answered
	writing   chan struct{} // holds a token while a message is written
	answering sync.WaitGroup
}

func newFlow(ctx context.Context, s *Server, c net.Conn, stream bool) *flow {
	return &flow{s: s, ctx: ctx, c: c, stream: stream, slots: make(chan struct{}, flowMost), writing: make(chan struct{}, 1)}
}

// message answers one message, at once or by a goroutine of its own. It does
// not keep msg. The error is that of a reply that had to be sent at once.
func (f *flow) message(msg []byte) error {
	q, rcode, ok := read(msg, f.stream)
	if !ok {
		return nil
	}
	a, done := f.s.atOnce(q, rcode)
	if !done && !f.s.rate.take(time.Now()) {
		done, a = true, answer{rcode: dnsmessage.RCodeRefused, error: extendedError{otherError, fmt.Sprintf("more than %d queries a second: wait a little", f.s.c.Rate)}}
	}
	if !done && !f.acquire() {
		done, a = true, answer{rcode: dnsmessage.RCodeServerFailure, error: extendedError{otherError, "too many queries at a time: wait for answers"}}
	}
	if done {
		return f.send(q, a)
	}
	f.answering.Go(func() {
		defer func() { <-f.slots }()
		a := f.s.resolve(f.ctx, q)
		<-f.s.pending
		f.send(q, a) // who cannot be told has gone, or will ask again
	})
	return nil
}

// acquire takes a slot and one of the server's. Who asks over TCP waits for
// it, and is not read from meanwhile.
func (f *flow) acquire() bool {
	if f.stream {
		select {
		case f.slots <- struct{}{}:
		case <-f.ctx.Done():
			return false
		}
		select {
		case f.s.pending <- struct{}{}:
			return true
		case <-f.ctx.Done():
		}
		<-f.slots
		return false
	}
	select {
	case f.slots <- struct{}{}:
	default:
		return false
	}
	select {
	case f.s.pending <- struct{}{}:
		return true
	default:
	}
	<-f.slots
	return false
}

func (f *flow) send(q query, a answer) error {
	msg, err := q.reply(a)
	if err != nil {
		return err
	}
	if f.stream {
		msg = append(binary.BigEndian.AppendUint16(make([]byte, 0, 2+len(msg)), uint16(len(msg))), msg...)
	}
	f.writing <- struct{}{}
	defer func() { <-f.writing }()
	err = f.c.SetWriteDeadline(time.Now().Add(f.s.c.Slow))
	if err == nil {
		_, err = f.c.Write(msg)
	}
	if err != nil {
		f.c.Close() // part of it may be out: nothing can follow
		return fmt.Errorf("send reply: %w", err)
	}
	return nil
}

// atOnce returns the answer to what needs no decision, because nothing of it
// would ever leave the host.
func (s *Server) atOnce(q query, rcode dnsmessage.RCode) (a answer, done bool) {
	if rcode != dnsmessage.RCodeSuccess {
		return answer{rcode: rcode}, true
	}
	kind := q.question.Type
	switch {
	case q.question.Class != dnsmessage.ClassINET:
		return answer{rcode: dnsmessage.RCodeRefused, error: extendedError{otherError, "only the class IN is answered"}}, true
	case kind == dnsmessage.TypeOPT || kind >= 128 && kind <= 255: // no data: ANY, transfers, keys of messages
		return answer{rcode: dnsmessage.RCodeRefused, error: extendedError{otherError, "queries of this type are not answered: ask for A or AAAA"}}, true
	case q.name == "":
		return answer{}, true // the root exists, and has no addresses
	}
	// A denial of existence is without a SOA: it is not to be kept (RFC
	// 2308), so that nobody takes it for one of all names below it.
	if !strings.Contains(q.name, ".") || s.isLocal(q.name) {
		return answer{rcode: dnsmessage.RCodeNameError}, true
	}
	if h, err := address.Parse(q.name); err == nil && h.Name() == "" {
		return answer{rcode: dnsmessage.RCodeNameError}, true // an address is no name
	}
	return answer{}, false
}

// isLocal says whether name, or what it is below, is a local one.
func (s *Server) isLocal(name string) bool {
	for more := true; more; _, name, more = strings.Cut(name, ".") {
		if s.local[name] {
			return true
		}
	}
	return false
}

// resolve decides about a query and answers it.
func (s *Server) resolve(ctx context.Context, q query) answer {
	ctx, cancel := context.WithTimeout(ctx, s.c.Wait)
	defer cancel()
	if err := s.c.Judge.Judge(ctx, q.name, typeName(q.question.Type)); err != nil {
		return denial(err)
	}
	if h, err := address.Parse(q.name); err != nil || h.Name() != q.name {
		return answer{rcode: dnsmessage.RCodeRefused, error: extendedError{blocked, "this is no name of a host"}}
	}
	kind := q.question.Type
	if kind != dnsmessage.TypeA && kind != dnsmessage.TypeAAAA {
		return answer{}
	}
	addrs, err := s.cache.lookup(ctx, q.name)
	switch {
	case notFound(err):
		return answer{rcode: dnsmessage.RCodeNameError}
	case err != nil:
		return answer{rcode: dnsmessage.RCodeServerFailure, error: extendedError{notUp, "the host's resolver does not answer for this name"}}
	case len(addrs) == 0:
		return answer{}
	}
	v4, v6, err := s.c.Names.Bind(q.name)
	if err != nil {
		return answer{rcode: dnsmessage.RCodeServerFailure, error: extendedError{otherError, public(err, "there is no address left")}}
	}
	// Both, whatever addresses the name has: the gateway connects with what
	// there is.
	if kind == dnsmessage.TypeA {
		return answer{addr: v4, ttl: s.c.TTL}
	}
	return answer{addr: v6, ttl: s.c.TTL}
}

// denial is the answer to what was not permitted.
func denial(err error) answer {
	switch airlock.CodeOf(err) {
	case airlock.Denied, airlock.Exhausted:
		return answer{rcode: dnsmessage.RCodeRefused, error: extendedError{blocked, public(err, "denied")}}
	}
	return answer{rcode: dnsmessage.RCodeServerFailure, error: extendedError{otherError, "nothing could be decided about this name"}}
}

// public is the text of an error that a sandbox may see.
func public(err error, otherwise string) string {
	var e *airlock.Error
	if errors.As(err, &e) && e.Public() != "" {
		return e.Public()
	}
	return otherwise
}

// bucket lets so many through in a second, and as many as it holds at once.
type bucket struct {
	perSecond, most float64

	mu     sync.Mutex
	tokens float64
	at     time.Time
}

func (b *bucket) take(now time.Time) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.tokens = min(b.most, b.tokens+max(0, now.Sub(b.at).Seconds())*b.perSecond)
	b.at = now
	if b.tokens < 1 {
		return false
	}
	b.tokens--
	return true
}
