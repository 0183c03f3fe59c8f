package inject

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httptrace"
	"net/textproto"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"airlock.dev/airlock/gateway/web"
)

// TestMain fails if a test leaves goroutines behind.
func TestMain(m *testing.M) {
	before := runtime.NumGoroutine()
	code := m.Run()
	fuzzing := flag.Lookup("test.fuzz").Value.String() != "" // it has goroutines of its own
	for wait := time.Now().Add(5 * time.Second); code == 0 && !fuzzing && runtime.NumGoroutine() > before; {
		if time.Now().After(wait) {
			buf := make([]byte, 1<<20)
			fmt.Fprintf(os.Stderr, "goroutines were left behind:\n%s\n", buf[:runtime.Stack(buf, true)])
			code = 1
			break
		}
		time.Sleep(10 * time.Millisecond)
	}
	os.Exit(code)
}

const (
	value       = `v4lu3+/"&<é>=~%41 tok'en\x`
	placeholder = Prefix + "test_abcdefghijklmnopqrstuvwxyz234567"
)

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func want[T comparable](t testing.TB, what string, got, wanted T) {
	t.Helper()
	if got != wanted {
		t.Errorf("%s:\n got %v\nwant %v", what, got, wanted)
	}
}

// bearer is a secret for GET and POST https://example.com/api/….
func bearer() Secret {
	return Secret{Name: "token", Placeholder: placeholder, Value: value, Scope: Scope{
		Host: "example.com", Methods: []string{"GET", "POST", "HEAD"}, Path: "/api/{rest...}",
		Place: Place{Header: "Authorization", Prefix: "Bearer "},
	}}
}

// world is a door before a real server, which answers for every host.
type world struct {
	t      testing.TB
	door   *Door
	round  http.RoundTripper
	client *http.Client
	served atomic.Int64
	use    error // what Use answers

	mu  sync.Mutex
	log []string
}

// open starts a server, over TLS unless it is plain.
func open(t testing.TB, h2 bool, handler http.HandlerFunc, secrets ...Secret) *world {
	t.Helper()
	w := &world{t: t}
	h := http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		w.served.Add(1)
		handler(rw, r)
	})
	quiet := log.New(io.Discard, "", 0)
	secure, plain := httptest.NewUnstartedServer(h), httptest.NewUnstartedServer(h)
	secure.EnableHTTP2, secure.Config.ErrorLog, plain.Config.ErrorLog = h2, quiet, quiet
	secure.StartTLS()
	plain.Start()
	var err error
	w.door, err = New(Config{Secrets: secrets, Use: w.used, Refused: w.refused})
	must(t, err)
	tr := secure.Client().Transport.(*http.Transport).Clone()
	tr.DisableCompression = true
	tr.DialContext = func(ctx context.Context, network, addr string) (net.Conn, error) {
		to := secure.Listener.Addr()
		if strings.HasSuffix(addr, ":80") {
			to = plain.Listener.Addr()
		}
		return new(net.Dialer).DialContext(ctx, network, to.String())
	}
	w.round = w.door.Wrap(tr)
	w.client = &http.Client{Transport: w.round, Timeout: 20 * time.Second, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	t.Cleanup(func() {
		tr.CloseIdleConnections()
		secure.CloseClientConnections()
		secure.Close()
		plain.Close()
		w.door.Close()
	})
	return w
}

func (w *world) used(_ context.Context, u Use) error {
	w.note("use %s %s %s:%d%s %s", u.Secret, u.Method, u.Host, u.Port, u.Path, u.Location)
	return w.use
}

func (w *world) refused(_ context.Context, u Use, d *web.Denied) {
	w.note("refused %s %s %s:%d%s %s", u.Secret, u.Method, u.Host, u.Port, u.Path, u.Location)
	if strings.Contains(d.Error(), value) {
		w.t.Errorf("a denial tells the value: %v", d)
	}
}

func (w *world) note(format string, args ...any) {
	w.mu.Lock()
	w.log = append(w.log, fmt.Sprintf(format, args...))
	w.mu.Unlock()
}

// took returns and forgets what was noted.
func (w *world) took() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	log := strings.Join(w.log, "\n")
	w.log = nil
	return log
}

func request(t testing.TB, method, url string, body io.Reader, header ...string) *http.Request {
	t.Helper()
	r, err := http.NewRequest(method, url, body)
	must(t, err)
	for i := 0; i < len(header); i += 2 {
		r.Header.Add(header[i], header[i+1])
	}
	return r
}

// all is everything that an answer tells.
func all(t testing.TB, res *http.Response) string {
	t.Helper()
	defer res.Body.Close()
	body, err := io.ReadAll(res.Body)
	must(t, err)
	var b bytes.Buffer
	fmt.Fprintln(&b, res.Status)
	for _, h := range []http.Header{res.Header, res.Trailer} {
		for name, values := range h {
			fmt.Fprintln(&b, name, values)
		}
	}
	b.Write(body)
	return b.String()
}

func (w *world) do(r *http.Request) *http.Response {
	w.t.Helper()
	res, err := w.client.Do(r)
	must(w.t, err)
	return res
}

// denied is a request that has to be.
func (w *world) denied(r *http.Request) *web.Denied {
	w.t.Helper()
	res, err := w.client.Do(r)
	if err == nil {
		w.t.Errorf("%s %s is answered %s", r.Method, r.URL, res.Status)
		res.Body.Close()
		return &web.Denied{}
	}
	d, ok := errors.AsType[*web.Denied](err)
	if !ok {
		w.t.Fatalf("%s %s: %v", r.Method, r.URL, err)
	}
	return d
}

// hidden fails if any form of the value is in what the sandbox got.
func hidden(t testing.TB, got string) {
	t.Helper()
	for _, form := range forms(value) {
		if strings.Contains(got, form) {
			t.Errorf("the sandbox got the value as %q", form)
		}
	}
}

func protocols(t *testing.T, f func(t *testing.T, h2 bool)) {
	for _, h2 := range []bool{false, true} {
		t.Run(map[bool]string{false: "http/1.1", true: "h2"}[h2], func(t *testing.T) { f(t, h2) })
	}
}

func sorted[T any](m map[string]T) []string {
	var names []string
	for name := range m {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}

func traced(ctx context.Context, got func(int, textproto.MIMEHeader)) context.Context {
	return httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{Got1xxResponse: func(code int, h textproto.MIMEHeader) error {
		got(code, h)
		return nil
	}})
}
