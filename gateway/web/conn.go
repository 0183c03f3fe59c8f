package web

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"time"
)

const (
	bufferBytes = 16 << 10 // of each body under way; a record of TLS fits
	relayLeast  = 4 << 10  // of each direction of a raw connection
	relayMost   = 64 << 10
	drainTime   = time.Second
	drainMost   = 256 << 10
)

var (
	errGone    = errors.New("the sandbox broke the connection off")
	errStalled = errors.New("nothing was sent either way for too long")
)

// revokeGrace is how long what is revoked may take to end by itself.
const revokeGrace = 300 * time.Millisecond

// place is where a connection goes.
type place struct {
	host    string // canonical
	port    uint16
	literal bool // host is an address that no name is known for
}

// conn is a connection of either side. Its writes have a time limit, and its
// end ends its context, so that nothing waits for a peer that does not read.
type conn struct {
	net.Conn
	door   *Door
	ctx    context.Context
	cancel context.CancelFunc
	once   sync.Once
	done   chan struct{}
	prefix []byte // was read before

	// Of connections from the sandbox only.
	proxy   bool        // a client speaks to us as a proxy
	secure  bool        // TLS is ended here
	refused *Denied     // all requests are, for what the connection said itself
	drained atomic.Bool // what is left of a body must come soon, or nothing more is read
	spoiled atomic.Bool
	rests   chan struct{} // the server has given it back, see lent

	mu     sync.Mutex
	at     place
	routes []Route
	routed time.Time // when, which is not for ever
}

// newConn returns nil if the door is closed.
func (d *Door) newConn(ctx context.Context, nc net.Conn, at place) *conn {
	c := &conn{Conn: nc, door: d, at: at, done: make(chan struct{})}
	d.mu.Lock()
	if d.closed {
		d.mu.Unlock()
		nc.Close()
		return nil
	}
	d.conns[c] = true
	d.mu.Unlock()
	c.ctx, c.cancel = context.WithCancel(ctx)
	return c
}

type connKey struct{}

func connOf(nc net.Conn) *conn {
	if t, ok := nc.(*tls.Conn); ok {
		nc = t.NetConn()
	}
	if l, ok := nc.(*lent); ok {
		return l.conn
	}
	return nc.(*conn)
}

// unread has the next Read return b first.
func (c *conn) unread(b []byte) { c.prefix = append(b[:len(b):len(b)], c.prefix...) }

func (c *conn) Read(p []byte) (int, error) {
	if len(c.prefix) > 0 {
		n := copy(p, c.prefix)
		if c.prefix = c.prefix[n:]; len(c.prefix) == 0 {
			c.prefix = nil
		}
		return n, nil
	}
	if c.spoiled.Load() {
		return 0, io.EOF
	}
	n, err := c.Conn.Read(p)
	switch {
	case err == nil, errors.Is(err, io.EOF): // the end of what the peer sends is no reason to stop
	case isTimeout(err):
		if c.drained.Load() {
			c.spoiled.Store(true)
		}
	default: // a reset
		c.cancel()
	}
	return n, err
}

// drain bounds how long what is left of a request's body is read after its
// answer. If that does not come, the connection ends: what comes later must
// not be taken for a request.
func (c *conn) drain() {
	c.drained.Store(true)
	c.Conn.SetReadDeadline(time.Now().Add(drainTime))
}

func (c *conn) Write(p []byte) (int, error) {
	c.Conn.SetWriteDeadline(time.Now().Add(c.door.limits.Idle))
	return c.Conn.Write(p)
}

func (c *conn) Close() error {
	err := net.ErrClosed
	c.once.Do(func() {
		err = c.Conn.Close()
		c.cancel()
		c.door.mu.Lock()
		delete(c.door.conns, c)
		c.door.mu.Unlock()
		close(c.done)
	})
	return err
}

// CloseWrite says that no more will be written.
func (c *conn) CloseWrite() error {
	if w, ok := c.Conn.(interface{ CloseWrite() error }); ok {
		return w.CloseWrite()
	}
	return c.Close()
}

// abort resets the connection.
func (c *conn) abort() {
	nc := c.Conn
	if t, ok := nc.(*tls.Conn); ok {
		nc = t.NetConn()
	}
	switch nc := nc.(type) {
	case interface{ Abort() }:
		nc.Abort()
	case *net.TCPConn:
		nc.SetLinger(0)
	case *conn:
		nc.abort()
	}
	c.Close()
}

func isTimeout(err error) bool {
	var t net.Error
	return errors.As(err, &t) && t.Timeout()
}

// crossing is a permit in use: it counts, and ends what stalls.
type crossing struct {
	permit  Permit
	out, in atomic.Int64
	last    atomic.Int64 // when a byte passed, in ns since began
	began   time.Time
	err     atomic.Pointer[error] // the first
	status  int
	// withdrawn says that the permit was, and nothing more is read from the client.
	withdrawn atomic.Bool

	mu    sync.Mutex
	timer *time.Timer // of watch
	cut   *time.Timer // of revocable
	over  bool
}

func newCrossing(p Permit) *crossing { return &crossing{permit: p, began: time.Now()} }

// passed counts n bytes that are about to pass, less what does not fit.
func (x *crossing) passed(count *atomic.Int64, n int) (fits int, why *Denied) {
	fits, why = x.take(n)
	count.Add(int64(fits))
	x.last.Store(int64(time.Since(x.began)))
	return fits, why
}

// take asks a Metered permit whether n bytes may pass.
func (x *crossing) take(n int) (fits int, why *Denied) {
	m, ok := x.permit.(Metered)
	if !ok {
		return n, nil
	}
	if fits, why = m.Passed(n); why != nil {
		x.fail(why)
	}
	return fits, why
}

// watch calls stalled once if no byte passes for idle. It is not called after end.
func (x *crossing) watch(idle time.Duration, stalled func()) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.timer = time.AfterFunc(idle, func() {
		x.mu.Lock()
		defer x.mu.Unlock()
		if x.over {
			return
		}
		if left := idle - (time.Since(x.began) - time.Duration(x.last.Load())); left > 0 {
			x.timer.Reset(left)
			return
		}
		x.fail(errStalled)
		stalled()
	})
}

// revocable calls stop once the permit is withdrawn, and cut if it has not
// ended soon after that. Neither is called after end.
func (x *crossing) revocable(stop func(why *Denied), cut func()) {
	p, ok := x.permit.(Revocable)
	if !ok {
		return
	}
	p.OnRevoke(func(why *Denied) {
		x.mu.Lock()
		defer x.mu.Unlock()
		if x.over {
			return
		}
		x.fail(why)
		x.withdrawn.Store(true)
		stop(why)
		x.cut = time.AfterFunc(revokeGrace, func() {
			x.mu.Lock()
			defer x.mu.Unlock()
			if !x.over {
				cut()
			}
		})
	})
}

// fail keeps the first error.
func (x *crossing) fail(err error) {
	if err != nil {
		x.err.CompareAndSwap(nil, &err)
	}
}

func (x *crossing) failure() error {
	if err := x.err.Load(); err != nil {
		return *err
	}
	return nil
}

// end is called once.
func (x *crossing) end(status int, err error) {
	x.mu.Lock()
	x.over = true
	if x.timer != nil {
		x.timer.Stop()
	}
	if x.cut != nil {
		x.cut.Stop()
	}
	x.mu.Unlock()
	x.fail(err)
	x.permit.End(status, x.out.Load(), x.in.Load(), x.failure())
}

// relay passes bytes both ways until both are at their end; an end is passed on
// as an end, and a reset as a reset.
func (d *Door) relay(c, up *conn, x *crossing) {
	abort := func() { c.abort(); up.abort() }
	broken := context.AfterFunc(c.ctx, abort)
	x.watch(d.limits.Idle, abort)
	x.revocable(func(*Denied) { abort() }, abort)
	var out sync.WaitGroup
	out.Go(func() { x.copy(up, c, &x.out) })
	x.copy(c, up, &x.in)
	out.Wait()
	if !broken() {
		x.fail(errGone)
	}
	c.Close()
	up.Close()
	x.end(0, nil)
}

func (x *crossing) copy(to, from *conn, count *atomic.Int64) {
	buf := make([]byte, relayLeast)
	for {
		n, err := from.Read(buf)
		full := n == len(buf) && n < relayMost
		if n > 0 {
			fits, why := x.passed(count, n)
			_, err := to.Write(buf[:fits])
			if err == nil && why != nil {
				err = why
			}
			if err != nil { // what did not fit is no end
				x.fail(err)
				from.abort()
				to.abort()
				return
			}
		}
		if full { // there is more than fits: quiet connections keep the small one
			buf = make([]byte, 4*len(buf))
		}
		if errors.Is(err, io.EOF) {
			to.CloseWrite()
			return
		}
		if err != nil {
			x.fail(err)
			to.abort()
			from.abort()
			return
		}
	}
}

// buffers keeps those that bodies are copied with.
type buffers struct{ pool sync.Pool }

func (b *buffers) Get() []byte {
	if p, ok := b.pool.Get().(*[bufferBytes]byte); ok {
		return p[:]
	}
	return make([]byte, bufferBytes)
}

func (b *buffers) Put(p []byte) { b.pool.Put((*[bufferBytes]byte)(p)) }
