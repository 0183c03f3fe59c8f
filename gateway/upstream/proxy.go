package upstream

import (
	"bufio"
	"context"
	"crypto/tls"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"golang.org/x/net/http/httpproxy"
	"golang.org/x/net/proxy"

	"airlock.dev/airlock"
	"airlock.dev/airlock/gateway/web"
)

// answerMost bounds what a proxy says before it is a connection.
const answerMost = 64 << 10

// FromEnvironment returns the function for Config.Proxy that follows HTTP_PROXY,
// HTTPS_PROXY and NO_PROXY, and their spellings in lower case, as they are now.
// HTTPS_PROXY is also for what is no HTTP.
func FromEnvironment() func(scheme, host string, port uint16) (*url.URL, error) {
	find := httpproxy.FromEnvironment().ProxyFunc()
	return func(scheme, host string, port uint16) (*url.URL, error) {
		if scheme != "http" {
			scheme = "https"
		}
		return find(&url.URL{Scheme: scheme, Host: join(host, port)})
	}
}

func join(host string, port uint16) string { return net.JoinHostPort(host, strconv.Itoa(int(port))) }

// through connects to a name or an address by a proxy. Its errors are told to
// sandboxes, and do not say which proxy that is.
func (u *Upstream) through(ctx context.Context, p *url.URL, host string, port uint16) (net.Conn, error) {
	var by func(context.Context, net.Conn, *url.URL, string) (net.Conn, error)
	var usual string
	switch p.Scheme {
	case "http":
		by, usual = u.connect, "80"
	case "https":
		by, usual = u.connect, "443"
	case "socks5", "socks5h":
		by, usual = socks, "1080"
	default:
		return nil, airlock.Errorf(airlock.Invalid, "the host's proxy has the scheme %.20q: use http, https or socks5", p.Scheme)
	}
	at := p.Host
	if p.Port() == "" {
		at = net.JoinHostPort(p.Hostname(), usual)
	}
	tcp, err := dial(ctx, at)
	if err != nil {
		return nil, fmt.Errorf("reach the host's proxy: %w", err)
	}
	c, err := inTime(ctx, tcp, func() (net.Conn, error) { return by(ctx, tcp, p, join(host, port)) })
	if err != nil {
		tcp.Close()
		return nil, fmt.Errorf("by the host's proxy: %w", err)
	}
	return c, nil
}

// inTime speaks with a proxy on c. Whatever waits for the proxy ends with ctx.
func inTime(ctx context.Context, c net.Conn, speak func() (net.Conn, error)) (net.Conn, error) {
	stop := context.AfterFunc(ctx, func() { c.SetDeadline(time.Unix(1, 0)) })
	out, err := speak()
	if !stop() && err == nil {
		err = ctx.Err()
	}
	if err != nil {
		return nil, plain(err)
	}
	return out, nil
}

// Proxy is a SOCKS5 proxy besides the host's own.
type Proxy struct {
	User *url.Userinfo // told to it, if there is one
	TLS  *tls.Config   // to speak to it with, if there is one
}

// By is Connect by one more proxy, which a connection c leads to. With an error c
// is the caller's to close, else what is returned closes it. The proxy is asked for the address that
// was decided on, and that is looked at again as in Connect. Its errors are told
// to sandboxes.
func (r *Router) By(ctx context.Context, c net.Conn, p Proxy, to web.Route) (net.Conn, error) {
	host := to.Host
	if to.IP.IsValid() {
		if _, err := r.u.classify(to.IP); err != nil {
			return nil, err
		}
		host = to.IP.String()
	} else if !r.u.cfg.ProxyResolves {
		return nil, airlock.Errorf(airlock.Internal, "a route to %s has no address", to.Host)
	}
	ctx, cancel := context.WithTimeout(ctx, r.u.cfg.Timeout)
	defer cancel()
	return inTime(ctx, c, func() (net.Conn, error) {
		way := c
		if p.TLS != nil {
			secure := tls.Client(c, p.TLS)
			if err := secure.HandshakeContext(ctx); err != nil {
				return nil, fmt.Errorf("TLS: %w", err)
			}
			way = &tunnel{Conn: secure, tcp: c}
		}
		return socks(ctx, way, &url.URL{User: p.User}, join(host, to.Port))
	})
}

// socks asks a SOCKS5 proxy.
func socks(ctx context.Context, c net.Conn, p *url.URL, to string) (net.Conn, error) {
	var auth *proxy.Auth
	if p.User != nil {
		password, _ := p.User.Password()
		auth = &proxy.Auth{User: p.User.Username(), Password: password}
	}
	d, err := proxy.SOCKS5("tcp", "", auth, nil)
	if err != nil {
		return nil, err
	}
	on, ok := d.(interface {
		DialWithConn(context.Context, net.Conn, string, string) (net.Addr, error)
	})
	if !ok {
		return nil, errors.ErrUnsupported // not with this library
	}
	if _, err := on.DialWithConn(ctx, c, "tcp", to); err != nil {
		return nil, err
	}
	return c, nil
}

// connect asks an HTTP proxy.
func (u *Upstream) connect(ctx context.Context, c net.Conn, p *url.URL, to string) (net.Conn, error) {
	t := &tunnel{Conn: c, tcp: c}
	if p.Scheme == "https" {
		secure := tls.Client(c, &tls.Config{MinVersion: tls.VersionTLS12, ServerName: p.Hostname(), RootCAs: u.cfg.ProxyRoots, NextProtos: []string{"http/1.1"}})
		if err := secure.HandshakeContext(ctx); err != nil {
			return nil, fmt.Errorf("TLS: %w", err)
		}
		t.Conn = secure
	}
	ask := "CONNECT " + to + " HTTP/1.1\r\nHost: " + to + "\r\n"
	if p.User != nil {
		password, _ := p.User.Password()
		ask += "Proxy-Authorization: Basic " + base64.StdEncoding.EncodeToString([]byte(p.User.Username()+":"+password)) + "\r\n"
	}
	if _, err := io.WriteString(t.Conn, ask+"\r\n"); err != nil {
		return nil, err
	}
	answer := bufio.NewReader(&io.LimitedReader{R: t.Conn, N: answerMost})
	res, err := http.ReadResponse(answer, &http.Request{Method: http.MethodConnect})
	if err != nil {
		return nil, err
	}
	if res.StatusCode/100 != 2 {
		return nil, airlock.Errorf(airlock.Unavailable, "it answered %d %s", res.StatusCode, http.StatusText(res.StatusCode))
	}
	// A server that speaks first may have been heard already.
	t.early, err = answer.Peek(answer.Buffered())
	return t, err
}

// tunnel is a connection through an HTTP proxy.
type tunnel struct {
	net.Conn
	tcp   net.Conn
	early []byte
}

func (t *tunnel) Read(p []byte) (int, error) {
	if len(t.early) > 0 {
		n := copy(p, t.early)
		t.early = t.early[n:]
		return n, nil
	}
	return t.Conn.Read(p)
}

// CloseWrite ends what is sent.
func (t *tunnel) CloseWrite() error {
	return t.Conn.(interface{ CloseWrite() error }).CloseWrite()
}

// Abort resets the connection.
func (t *tunnel) Abort() {
	switch c := t.tcp.(type) {
	case interface{ Abort() }:
		c.Abort()
	case *net.TCPConn:
		c.SetLinger(0)
	}
	t.tcp.Close()
}
