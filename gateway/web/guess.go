package web

import (
	"crypto/tls"
	"errors"
	"io"
	"strings"
	"time"
)

// beginning is what the first bytes of a client are.
type beginning int

const (
	beginsUnknown beginning = iota // yet
	beginsHello                    // a ClientHello of TLS
	beginsRequest                  // a request of HTTP
	beginsOther
)

// guessMost is more than any beginning is long that is still unknown.
const guessMost = 64

// begins tells HTTP and TLS from other protocols. A method alone is not enough:
// there are others in which lines begin with a word in capitals.
func begins(b []byte) beginning {
	if len(b) == 0 {
		return beginsUnknown
	}
	if b[0] == recordHandshake {
		// A record of any version, and in it the message 1.
		for i, fits := range []func(byte) bool{
			1: func(c byte) bool { return c == 3 }, 2: func(c byte) bool { return c <= 4 }, 5: func(c byte) bool { return c == 1 },
		} {
			if i >= len(b) {
				return beginsUnknown
			}
			if fits != nil && !fits(b[i]) {
				return beginsOther
			}
		}
		return beginsHello
	}
	method, target, whole := strings.Cut(string(b), " ")
	const absolute = "http:"
	switch {
	case method != "" && !isMethod(method):
		return beginsOther
	case method == "" && whole:
		return beginsOther
	case !whole || target == "":
		return beginsUnknown
	case target[0] == '/' || target[0] == '*':
		return beginsRequest
	}
	target = strings.ToLower(target[:min(len(target), len(absolute))])
	switch {
	case target == absolute:
		return beginsRequest
	case strings.HasPrefix(absolute, target):
		return beginsUnknown
	}
	return beginsOther
}

// guess finds out what a client that need not speak HTTP or TLS begins with, and
// leaves it to be read. The error says that the client has gone.
func (d *Door) guess(c *conn) (beginning, error) {
	c.Conn.SetReadDeadline(time.Now().Add(d.limits.Guess))
	defer c.Conn.SetReadDeadline(time.Time{})
	buf := make([]byte, 0, guessMost)
	defer func() { c.unread(buf) }()
	for {
		if kind := begins(buf); kind != beginsUnknown {
			return kind, nil
		}
		n, err := c.Read(buf[len(buf):cap(buf)])
		buf = buf[:len(buf)+n]
		if isTimeout(err) || errors.Is(err, io.EOF) {
			return beginsOther, nil
		}
		if err != nil {
			return beginsOther, err
		}
	}
}

// raw carries a connection as bytes.
func (d *Door) raw(c *conn) {
	x, up, err := d.reach(c.ctx, "tcp", c.at)
	if err != nil {
		c.abort()
		return
	}
	d.relay(c, up, x)
}

// guessInside serves what is said in TLS by a client that did not tell its
// protocol.
func (d *Door) guessInside(c *conn, t *tls.Conn) *conn {
	in := d.inside(c, t)
	if in == nil {
		return nil
	}
	kind, err := d.guess(in)
	if err == nil && kind == beginsRequest {
		return d.http(in, in)
	}
	var x *crossing
	var up *conn
	if err == nil {
		x, up, err = d.reachInside(c, nil)
	}
	if err != nil {
		in.abort()
		return nil
	}
	d.relay(in, up, x)
	return nil
}

// rawInside carries what is said in TLS in another protocol than HTTP.
func (d *Door) rawInside(c *conn, protocols []string) {
	x, up, err := d.reachInside(c, protocols)
	if err != nil {
		c.alert(alertFor(err))
		return
	}
	config := d.tls.Clone()
	config.NextProtos = nil // both sides speak what upstream chose
	if p := up.Conn.(*tls.Conn).ConnectionState().NegotiatedProtocol; p != "" {
		config.NextProtos = []string{p}
	}
	t, err := d.finish(c, config)
	if err != nil {
		up.abort()
		x.end(0, err)
		return
	}
	if in := d.inside(c, t); in != nil {
		d.relay(in, up, x)
		return
	}
	up.abort()
	x.end(0, errGone)
}

// reachInside is reach, with TLS.
func (d *Door) reachInside(c *conn, protocols []string) (*crossing, *conn, error) {
	x, up, err := d.reach(c.ctx, "tls", c.at)
	if err != nil {
		return nil, nil, err
	}
	t, err := d.secured(c.ctx, up, protocols)
	if err != nil {
		x.end(0, err)
		return nil, nil, err
	}
	in := d.inside(up, t)
	if in == nil {
		x.end(0, errGone)
		return nil, nil, errGone
	}
	return x, in, nil
}

// inside is the connection in a TLS connection; it is nil if the door is closed.
func (d *Door) inside(c *conn, t *tls.Conn) *conn {
	in := d.newConn(c.ctx, t, c.at)
	if in != nil {
		in.secure = true
	}
	return in
}

func isHTTP(protocol string) bool {
	return protocol == "h2" || strings.HasPrefix(protocol, "http/")
}
