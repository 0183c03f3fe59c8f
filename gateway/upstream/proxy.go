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
	// Whatever waits for the proxy ends with ctx.
	stop := context.AfterFunc(ctx, func() { tcp.SetDeadline(time.Unix(1, 0)) })
	c, err := by(ctx, tcp, p, join(host, port))
	if !stop() && err == nil {
		err = ctx.Err()
	}
	if err != nil {
		tcp.Close()
		return nil, fmt.Errorf("by the host's proxy: %w", plain(err))
	}
	return c, nil
}

// socks asks a SOCKS5 proxy.
func socks(ctx context.Context, c net.Conn, p *url.URL, to string) (net.Conn, error) {
	var auth *proxy.Auth
	if p.User != nil {
		password, _ := p.User.Password()
		auth = &proxy.Auth{User: p.User.Username(), Password: password}
	}
	d, err := proxy.SOCKS5("tcp", p.Host, auth, nil)
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
	if tcp, ok := t.tcp.(*net.TCPConn); ok {
		tcp.SetLinger(0)
	}
	t.tcp.Close()
}
