package inject

import (
	"bufio"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"airlock.dev/airlock/gateway/web"
)

// outside is what a web needs of the world: all is permitted, and leads to
// one server.
type outside struct{ server net.Addr }

func (outside) Admit(context.Context, string, uint16) (web.Mode, error) { return web.Terminate, nil }
func (outside) Cross(context.Context, web.Request) (web.Permit, error)  { return outside{}, nil }
func (outside) Refused(context.Context, web.Request, *web.Denied)       {}
func (outside) End(int, int64, int64, error)                            {}
func (outside) Routes(context.Context, string, string, uint16) ([]web.Route, error) {
	return []web.Route{{IP: nowhere}, {IP: netip.MustParseAddr("203.0.113.7")}}, nil
}
func (o outside) Connect(ctx context.Context, r web.Route) (net.Conn, error) {
	if r.IP == nowhere {
		return nil, errors.New("nothing is there")
	}
	return new(net.Dialer).DialContext(ctx, "tcp", o.server.String())
}

// nowhere is a way that does not connect, so that each request has a second try.
var nowhere = netip.MustParseAddr("203.0.113.6")

type flow struct{ net.Conn }

func (f flow) To() netip.AddrPort        { return netip.MustParseAddrPort("198.18.0.1:443") }
func (f flow) Accept() (net.Conn, error) { return f.Conn, nil }
func (f flow) Refuse()                   { f.Close() }

// behind opens a real door's web with a secret, before a server, and returns
// how a sandbox dials example.com.
func behind(t *testing.T, handler http.HandlerFunc, w *world, secrets ...Secret) (dial func(alpn ...string) *tls.Conn) {
	t.Helper()
	server := httptest.NewUnstartedServer(handler)
	server.EnableHTTP2 = true
	server.StartTLS()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	must(t, err)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "test root"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(240 * time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	must(t, err)
	cert, err := x509.ParseCertificate(der)
	must(t, err)
	authority, err := web.NewAuthority(cert, key)
	must(t, err)
	trust := x509.NewCertPool()
	trust.AddCert(cert)

	w.door, err = New(Config{Secrets: secrets, Use: w.used, Refused: w.refused})
	must(t, err)
	o := outside{server.Listener.Addr()}
	door, err := web.Open(web.Config{
		Judge: o, Router: o, Authority: authority, Roots: server.Client().Transport.(*http.Transport).TLSClientConfig.RootCAs,
		Hold: func(netip.Addr) (string, func(), bool) { return "example.com", func() {}, true },
		Wrap: w.door.Wrap,
	})
	must(t, err)
	pairs, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	var serving sync.WaitGroup
	var open []net.Conn
	t.Cleanup(func() {
		for _, c := range open {
			c.Close()
		}
		pairs.Close()
		door.Close()
		w.door.Close()
		serving.Wait()
		server.Close()
	})
	return func(alpn ...string) *tls.Conn {
		inner, err := net.Dial("tcp", pairs.Addr().String())
		must(t, err)
		outer, err := pairs.Accept()
		must(t, err)
		open = append(open, inner)
		serving.Go(func() { door.Serve(context.Background(), flow{outer}) })
		inner.SetDeadline(time.Now().Add(10 * time.Second))
		return tls.Client(inner, &tls.Config{ServerName: "example.com", RootCAs: trust, NextProtos: alpn})
	}
}

// The wrapper works where it is for: in a door's web.
func TestBehindWeb(t *testing.T) {
	w := &world{t: t}
	dial := behind(t, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Trailer", "X-Sum")
		w.Header().Set("Link", r.Header.Get("Authorization"))
		w.WriteHeader(103)
		io.Copy(io.Discard, r.Body)
		fmt.Fprintf(w, "%s %s", r.Host, r.Header.Get("Authorization"))
		w.Header().Set("X-Sum", r.Header.Get("Authorization"))
	}, w, bearer())
	ask := func(text string) string {
		t.Helper()
		c := dial()
		_, err := io.WriteString(c, text)
		must(t, err)
		in := bufio.NewReader(c)
		var got strings.Builder
		for {
			res, err := http.ReadResponse(in, nil)
			must(t, err)
			got.WriteString(all(t, res))
			if res.StatusCode >= 200 {
				return got.String()
			}
		}
	}
	got := ask("POST /api/x HTTP/1.1\r\nHost: example.com\r\nTransfer-Encoding: chunked\r\nAuthorization: Bearer " + placeholder + "\r\n\r\n1\r\nx\r\n0\r\n\r\n")
	hidden(t, got)
	stars := "Bearer " + strings.Repeat("*", len(value))
	for _, part := range []string{"103 Early Hints\n", "Link [" + stars + "]\n", "200 OK\n", "X-Sum [" + stars + "]\n", "example.com " + stars} {
		if !strings.Contains(got, part) {
			t.Errorf("%q is not in the answer: %s", part, got)
		}
	}
	const use = "use token POST example.com:443/api/x header Authorization"
	want(t, "recorded, of both tries", w.took(), use+"\n"+use)

	got = ask("POST /other HTTP/1.1\r\nHost: example.com\r\nTransfer-Encoding: chunked\r\nX: y\r\nTrailer: X-Sum\r\n\r\n1\r\nx\r\n0\r\nX-Sum: " + placeholder + "\r\n\r\n")
	if !strings.HasPrefix(got, "403 ") || !strings.Contains(got, "request's trailer") || !strings.Contains(got, "X-Airlock-Denied") {
		t.Errorf("a placeholder in a trailer: %s", got)
	}
	want(t, "recorded", w.took(), "refused token POST example.com:443/other trailer")

	// The sender says no more until it is answered.
	for _, body := range []string{"", "1\r\nx\r\n"} {
		got = ask("POST /api/y HTTP/1.1\r\nHost: example.com\r\nTransfer-Encoding: chunked\r\nX-Auth: " + placeholder + "\r\n\r\n" + body)
		if !strings.HasPrefix(got, "403 ") {
			t.Errorf("a placeholder in another header: %s", got)
		}
		w.took()
		w.use = &web.Denied{Reason: "not today"}
		began := time.Now()
		got = ask("POST /api/y HTTP/1.1\r\nHost: example.com\r\nTransfer-Encoding: chunked\r\nAuthorization: Bearer " + placeholder + "\r\n\r\n" + body)
		if !strings.HasPrefix(got, "403 ") || !strings.Contains(got, "not today") {
			t.Errorf("a use that is refused: %s", got)
		}
		if waited := time.Since(began); waited > 5*time.Second {
			t.Errorf("the denial took %s", waited)
		}
	}
}
