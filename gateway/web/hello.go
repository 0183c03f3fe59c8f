package web

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"slices"
	"time"
)

const (
	recordHandshake = 22     // the first byte of TLS
	extensionECH    = 0xfe0d // encrypted ClientHello, real or made up
	// helloMost bounds what is read before it is known where to.
	helloMost = 64 << 10
)

// The alerts of RFC 8446 that say why a connection was not passed through.
const (
	alertHandshakeFailure = 40
	alertAccessDenied     = 49
	alertInternal         = 80
)

var errSeen = errors.New("the ClientHello was seen")

type hello struct {
	name      string // SNI; empty if there is none
	ech       bool
	protocols []string // that the client speaks, by ALPN
}

// readHello reads a ClientHello, as crypto/tls understands it, and answers
// nothing. It also returns all that it has read.
func readHello(c net.Conn) (h hello, raw []byte, err error) {
	rec := &recorder{Conn: c}
	err = tls.Server(rec, &tls.Config{
		GetConfigForClient: func(i *tls.ClientHelloInfo) (*tls.Config, error) {
			h = hello{name: i.ServerName, ech: slices.Contains(i.Extensions, extensionECH), protocols: i.SupportedProtos}
			return nil, errSeen
		},
	}).Handshake()
	if errors.Is(err, errSeen) {
		return h, rec.seen, nil
	}
	if err == nil {
		err = errors.New("no ClientHello")
	}
	return hello{}, rec.seen, fmt.Errorf("read the ClientHello: %w", err)
}

// recorder keeps what is read and drops what is written.
type recorder struct {
	net.Conn
	seen []byte
}

func (r *recorder) Read(p []byte) (int, error) {
	if len(r.seen) >= helloMost {
		return 0, errors.New("it is too long")
	}
	n, err := r.Conn.Read(p[:min(len(p), helloMost-len(r.seen))])
	r.seen = append(r.seen, p[:n]...)
	return n, err
}

func (r *recorder) Write(p []byte) (int, error) { return len(p), nil }

// secure serves a connection that speaks TLS, as begun.
func (d *Door) secure(c *conn, mode Mode) *conn {
	h, raw, err := readHello(c)
	if err != nil {
		c.alert(alertHandshakeFailure)
		return nil
	}
	c.unread(raw)
	at, denied := d.sni(c.at, h)
	if denied == nil && c.at.literal && !at.literal {
		// Only now it is known who is meant.
		if mode, err = d.admit(c.ctx, at); err != nil {
			c.alert(alertAccessDenied)
			return nil
		}
	}
	ends := mode == Terminate || mode == Any
	if denied == nil && !ends && h.ech {
		denied = &Denied{Reason: "the name is encrypted (ECH), and a connection is passed through by its name only", Ask: "switch ECH off in the client"}
	}
	if denied != nil {
		d.cfg.Judge.Refused(c.ctx, Request{Scheme: "tls", Method: http.MethodConnect, Host: at.host, Port: at.port, BodyBytes: -1}, denied)
		if !ends {
			c.alert(alertAccessDenied)
			return nil
		}
		c.refused = denied // told in answers, which people can read
	}
	c.at = at
	if ends {
		return d.terminate(c, h, mode)
	}
	// A name that SNI told and that is for raw bytes is passed on by it as well.
	x, up, err := d.reach(c.ctx, "tls", at)
	if err != nil {
		c.alert(alertFor(err))
		return nil
	}
	c.Conn.SetReadDeadline(time.Time{})
	d.relay(c, up, x)
	return nil
}

// sni returns where a connection goes that was opened to at, by what its
// ClientHello says. With a denial, it is where it claims to go.
func (d *Door) sni(at place, h hello) (place, *Denied) {
	if h.name == "" {
		return at, nil
	}
	host, err := parseHost(h.name)
	if err != nil {
		return at, &Denied{Status: http.StatusMisdirectedRequest, Reason: "the TLS server name is not a name: " + err.Error()}
	}
	named := d.named(place{host: host, port: at.port, literal: isAddress(host)})
	if named.host == at.host || at.literal && !named.literal {
		return named, nil
	}
	return named, disagrees("the TLS server name", named.host, at)
}

// terminate ends TLS and serves the requests in it, or what else there is.
func (d *Door) terminate(c *conn, h hello, mode Mode) *conn {
	raw := mode == Any && c.refused == nil
	if raw && len(h.protocols) > 0 && !slices.ContainsFunc(h.protocols, isHTTP) {
		d.rawInside(c, h.protocols)
		return nil
	}
	t, err := d.finish(c, d.tls)
	if err != nil {
		return nil
	}
	c.secure = true
	if !raw || t.ConnectionState().NegotiatedProtocol != "" {
		return d.http(c, t)
	}
	return d.guessInside(c, t)
}

// finish ends TLS with a client; c is closed with an error.
func (d *Door) finish(c *conn, config *tls.Config) (*tls.Conn, error) {
	t := tls.Server(c, config)
	ctx, cancel := context.WithTimeout(c.ctx, d.limits.Handshake)
	defer cancel()
	if err := t.HandshakeContext(ctx); err != nil {
		c.Close()
		return nil, fmt.Errorf("TLS with the sandbox: %w", err)
	}
	c.Conn.SetReadDeadline(time.Time{})
	return t, nil
}

func (d *Door) certificate(i *tls.ClientHelloInfo) (*tls.Certificate, error) {
	return d.leaves.get(connOf(i.Conn).at.host)
}

// alertFor is the alert that tells why a destination was not reached.
func alertFor(err error) byte {
	if _, ok := errors.AsType[*Denied](err); ok {
		return alertAccessDenied
	}
	return alertInternal
}

// alert ends a connection with a fatal alert, which clients can show.
func (c *conn) alert(code byte) {
	c.Write([]byte{21, 3, 3, 0, 2, 2, code})
	c.CloseWrite()
	c.Close()
}
