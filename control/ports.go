package control

import (
	"context"
	"errors"
	"net"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"airlock.dev/airlock"
	"airlock.dev/airlock/audit"
	"airlock.dev/airlock/channel"
	"airlock.dev/airlock/policy"
)

// maxConns bounds the connections to the ports of one sandbox, so that some
// of the channel's streams are always left for commands and files.
const maxConns = 128

// MayServe decides whether a caller may use a connection that another request
// of theirs opened: policies may have changed since.
func (g *Guest) MayServe(ctx context.Context, caller string, port uint16) error {
	e, denied := g.boundary.event(g.serve(caller, port))
	if denied != nil {
		g.boundary.Trail.Append(ctx, e) // it is denied, whether that can be recorded or not
	}
	return denied
}

func (g *Guest) serve(caller string, port uint16) act {
	a := g.act("port:serve")
	a.by, a.on, a.context = policy.Entity{Type: "Sandbox", ID: g.Sandbox.ID}, portEntity(port), policy.Context{"caller": caller}
	return a
}

// DialPort connects to a port on which a program in the sandbox listens, for
// a caller: "public", "token", or who it is. It is the only way in. The
// connection is reset by Close, unless both sides have ended before, and by
// the end of the sandbox.
func (g *Guest) DialPort(ctx context.Context, caller string, port uint16) (net.Conn, error) {
	a := g.serve(caller, port)
	fields := map[string]string{"port": strconv.Itoa(int(port))}
	receipt, done, err := g.boundary.cross(ctx, a)
	var conn *portConn
	if err == nil {
		if conn, err = g.dialPort(ctx, receipt, port); err != nil {
			done(outcomeOf(err))
		}
	}
	if err != nil {
		fields["error"] = err.Error()
		g.log.add("error", "connection refused", fields)
		return nil, err
	}
	conn.ended = sync.OnceFunc(func() {
		done(audit.Outcome{Status: "ok", Counts: map[string]int64{"bytesIn": conn.in.Load(), "bytesOut": conn.out.Load()}})
	})
	g.log.add("info", "connection opened", fields)
	return conn, nil
}

func (g *Guest) dialPort(ctx context.Context, receipt audit.Receipt, port uint16) (*portConn, error) {
	if err := receipt.Spend("port:serve", audit.Entity(portEntity(port))); err != nil {
		return nil, err
	}
	if g.conns.Add(1) > maxConns {
		g.conns.Add(-1)
		return nil, &airlock.Error{Code: airlock.Exhausted, Message: "too many connections are open to this sandbox's ports", Hint: "close some", RetryAfter: 1}
	}
	s, err := g.mux.Open(ctx, channel.MethodDial, channel.DialRequest{Port: port})
	if err == nil {
		if _, err = channel.RecvReply[channel.Empty](ctx, s, channel.MethodDial); err != nil {
			s.Close()
		}
	}
	if err != nil {
		g.conns.Add(-1)
		return nil, err
	}
	c := &portConn{s: s, port: port, done: sync.OnceFunc(func() { g.conns.Add(-1) })}
	c.read.init()
	c.write.init()
	return c, nil
}

// portConn is a net.Conn on a stream of the channel.
type portConn struct {
	s           *channel.Stream
	port        uint16
	read, write deadline
	done        func()
	ended       func() // tells the trail
	in, out     atomic.Int64

	mu   sync.Mutex // one reader at a time; guards rest
	rest []byte
}

func (c *portConn) Read(p []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for len(c.rest) == 0 {
		tag, body, err := c.s.Recv(c.read.context())
		switch {
		case err != nil:
			return 0, timedOut(err)
		case tag != channel.TagData:
			c.Close()
			return 0, airlock.Errorf(airlock.Internal, "the guest sent an unknown message")
		}
		c.rest = body
		if len(p) == 0 {
			return 0, nil
		}
	}
	n := copy(p, c.rest)
	c.rest = c.rest[n:]
	c.out.Add(int64(n))
	return n, nil
}

func (c *portConn) Write(p []byte) (int, error) {
	n, err := c.s.Writer(c.write.context(), channel.TagData).Write(p)
	c.in.Add(int64(n))
	return n, timedOut(err)
}

// timedOut has a deadline's error as package net has it; what else ended a
// stream before its end stays what it is.
func timedOut(err error) error {
	if errors.Is(err, context.Canceled) {
		return os.ErrDeadlineExceeded
	}
	return err
}

// CloseWrite says that no more is written; reading goes on.
func (c *portConn) CloseWrite() error { return c.s.CloseSend() }

func (c *portConn) Close() error {
	c.s.Close()
	c.done()
	if c.ended != nil {
		c.ended()
	}
	return nil
}

func (c *portConn) LocalAddr() net.Addr { return &net.TCPAddr{} }
func (c *portConn) RemoteAddr() net.Addr {
	return &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: int(c.port)}
}

func (c *portConn) SetDeadline(t time.Time) error {
	c.read.set(t)
	c.write.set(t)
	return nil
}
func (c *portConn) SetReadDeadline(t time.Time) error  { c.read.set(t); return nil }
func (c *portConn) SetWriteDeadline(t time.Time) error { c.write.set(t); return nil }

// deadline is a context that ends at a time that may be changed. Its users
// take the context anew for each operation.
type deadline struct {
	mu     sync.Mutex
	ctx    context.Context
	cancel context.CancelFunc
	timer  *time.Timer
}

func (d *deadline) init() { d.ctx, d.cancel = context.WithCancel(context.Background()) }

func (d *deadline) context() context.Context {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.ctx
}

func (d *deadline) set(t time.Time) {
	d.mu.Lock()
	defer d.mu.Unlock()
	fired := d.timer != nil && !d.timer.Stop()
	d.timer = nil
	if fired || d.ctx.Err() != nil {
		d.cancel()
		d.init()
	}
	if t.IsZero() {
		return
	}
	if left := time.Until(t); left > 0 {
		d.timer = time.AfterFunc(left, d.cancel)
	} else {
		d.cancel()
	}
}
