package web

import (
	"io"
	"net"
	"net/http"
	"sync/atomic"
	"time"
)

// restAfter is how long a connection waits for its next request with all that
// net/http keeps for one, a goroutine and its buffers. Then it rests.
const restAfter = time.Second

// waiter is a connection that can be waited for with next to nothing.
type waiter interface {
	// Await returns true when a Read would not wait, and false when over is
	// closed or the time has passed.
	Await(over <-chan struct{}, most time.Duration) bool
}

// lent is a connection in clear that the server has until it rests, which is
// the connection's end for the server. It gets it again with the next request.
type lent struct {
	*conn
	idle  bool // the server waits for another request; only who reads knows
	whole int  // the length of the server's buffer
	rests atomic.Bool
}

// lend is what the server gets for a connection.
func lend(c *conn, nc net.Conn) net.Conn {
	if _, ok := c.Conn.(waiter); !ok || nc != net.Conn(c) {
		return nc
	}
	if c.rests == nil {
		c.rests = make(chan struct{}, 1)
	}
	return &lent{conn: c}
}

// lentState is the server's ConnState.
func lentState(nc net.Conn, s http.ConnState) {
	if l, ok := nc.(*lent); ok && s == http.StateIdle {
		l.idle = true
	}
}

// Read implements net.Conn. A connection rests only if the server has read
// nothing of the next request, and its buffer is empty.
func (l *lent) Read(p []byte) (int, error) {
	l.whole = max(l.whole, len(p))
	if !l.idle || len(p) < l.whole || l.drained.Load() {
		return l.conn.Read(p)
	}
	l.idle = false
	l.Conn.SetReadDeadline(time.Now().Add(min(restAfter, l.door.limits.KeepAlive)))
	n, err := l.conn.Read(p)
	if n == 0 && isTimeout(err) {
		l.rests.Store(true)
		return 0, io.EOF
	}
	l.Conn.SetReadDeadline(time.Now().Add(l.door.limits.KeepAlive))
	return n, err
}

// Close implements net.Conn.
func (l *lent) Close() error {
	if !l.rests.CompareAndSwap(true, false) {
		return l.conn.Close()
	}
	l.conn.rests <- struct{}{}
	return nil
}

// await returns when a connection that the server got is over, and gives it to
// the server again when it has rested. Nearly all flows are here, with little
// on their stacks.
func (d *Door) await(c *conn) {
	for {
		select {
		case <-c.done:
			return
		case <-c.rests:
		}
		if !c.Conn.(waiter).Await(c.done, d.limits.KeepAlive) {
			c.Close()
			return
		}
		d.http(c, c)
	}
}
