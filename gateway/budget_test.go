package gateway

import (
	"bufio"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	"airlock.dev/airlock"
	"airlock.dev/airlock/gateway/inject"
	"airlock.dev/airlock/gateway/wire"
)

// server permits everything, and remembers what it is told.
type server struct {
	t    *testing.T
	g    *gateway
	peer *wire.Peer

	mu       sync.Mutex
	next     uint64
	refused  []wire.Attempt // recorded, of what the gateway denied
	permits  map[uint64]wire.Attempt
	used     map[string][]int64
	counted  map[wire.Budget]int64
	notes    int // of counted
	ends     chan wire.End
	mode     wire.Mode
	open     []net.Conn
	sessions sync.WaitGroup
}

// start is a gateway in this process, joined to a server by a real socket.
func start(t *testing.T, b wire.Budgets) *server {
	t.Helper()
	s := &server{t: t, permits: map[uint64]wire.Attempt{}, used: map[string][]int64{}, counted: map[wire.Budget]int64{}, ends: make(chan wire.End, 100), mode: wire.Any}
	ours, theirs := pair(t, unix.SOCK_SEQPACKET)
	a, err := socket(ours)
	must(t, err)
	z, err := socket(theirs)
	must(t, err)
	s.peer = wire.New(a, s.handle)
	s.g = &gateway{log: slog.New(slog.DiscardHandler), doors: map[string]*door{}}
	s.g.ctx, s.g.cancel = context.WithCancel(t.Context())
	ready := make(chan *wire.Peer, 1)
	peer := wire.New(z, func(_ context.Context, method string, body []byte, f *os.File) (any, error) {
		s.g.once.Do(func() { s.g.server = <-ready })
		return s.g.handle(method, body, f)
	})
	ready <- peer
	t.Cleanup(func() {
		for _, c := range s.open {
			c.Close()
		}
		s.g.close()
		s.sessions.Wait()
		peer.Close()
		s.peer.Close()
	})
	root, key := root(t)
	must(t, s.peer.Call(t.Context(), wire.MethodStart, wire.Start{Root: root, Key: key, Reachable: []netip.Prefix{netip.MustParsePrefix("127.0.0.1/32")}, Budgets: b}, nil, nil))
	return s
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func pair(t *testing.T, kind int) (a, z *os.File) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, kind|unix.SOCK_CLOEXEC, 0)
	must(t, err)
	return os.NewFile(uintptr(fds[0]), "a"), os.NewFile(uintptr(fds[1]), "z")
}

func root(t *testing.T) (cert, key []byte) {
	t.Helper()
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	must(t, err)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "test root"}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(240 * time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	cert, err = x509.CreateCertificate(rand.Reader, template, template, private.Public(), private)
	must(t, err)
	key, err = x509.MarshalPKCS8PrivateKey(private)
	must(t, err)
	return cert, key
}

func (s *server) handle(_ context.Context, method string, body []byte, _ *os.File) (any, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch method {
	case wire.MethodAdmit:
		return wire.Verdict{Permit: true, Mode: s.mode}, nil
	case wire.MethodCross:
		var a wire.Attempt
		if err := json.Unmarshal(body, &a); err != nil {
			return nil, err
		}
		if a.Refused != "" {
			s.refused = append(s.refused, a)
			return wire.Verdict{Reason: a.Refused}, nil
		}
		s.next++
		s.permits[s.next] = a
		return wire.Verdict{Permit: true, Event: s.next}, nil
	case wire.MethodEnd:
		var e wire.End
		if err := json.Unmarshal(body, &e); err != nil {
			return nil, err
		}
		s.ends <- e
	case wire.MethodUsed:
		var u wire.Used
		if err := json.Unmarshal(body, &u); err != nil {
			return nil, err
		}
		s.used[u.Sandbox] = append(s.used[u.Sandbox], u.Bytes)
	case wire.MethodRefused:
		var r wire.Refused
		if err := json.Unmarshal(body, &r); err != nil {
			return nil, err
		}
		s.counted[r.Budget] += r.Count
		s.notes++
	}
	return nil, nil
}

// door opens one of a sandbox that has used so much before.
func (s *server) door(sandbox string, used int64) *door {
	s.t.Helper()
	outside, inside := pair(s.t, unix.SOCK_DGRAM)
	s.t.Cleanup(func() { inside.Close() })
	must(s.t, s.peer.Call(s.t.Context(), wire.MethodOpen, wire.Door{Sandbox: sandbox, Used: used}, outside, nil))
	outside.Close()
	s.g.mu.Lock()
	defer s.g.mu.Unlock()
	return s.g.doors[sandbox]
}

// tcp is a connection of a sandbox, over the loopback.
type tcp struct {
	net.Conn
	to netip.AddrPort
}

func (f tcp) To() netip.AddrPort        { return f.to }
func (f tcp) Accept() (net.Conn, error) { return f.Conn, nil }
func (f tcp) Refuse() {
	f.Conn.(*net.TCPConn).SetLinger(0)
	f.Close()
}

func (s *server) dial(d *door, to string) net.Conn {
	s.t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	must(s.t, err)
	defer ln.Close()
	inner, err := net.Dial("tcp", ln.Addr().String())
	must(s.t, err)
	outer, err := ln.Accept()
	must(s.t, err)
	s.open = append(s.open, inner)
	s.sessions.Go(func() { d.web.Serve(context.Background(), tcp{outer, netip.MustParseAddrPort(to)}) })
	inner.SetDeadline(time.Now().Add(20 * time.Second))
	return inner
}

// get asks for a path on a connection of its own.
func (s *server) get(d *door, to, path string) (status int, body string, err error) {
	s.t.Helper()
	c := s.dial(d, to)
	fmt.Fprintf(c, "GET %s HTTP/1.1\r\nHost: %s\r\n\r\n", path, to)
	res, err := http.ReadResponse(bufio.NewReader(c), nil)
	if err != nil {
		return 0, "", err
	}
	text, err := io.ReadAll(res.Body)
	return res.StatusCode, string(text), err
}

func (s *server) end() wire.End {
	s.t.Helper()
	select {
	case e := <-s.ends:
		return e
	case <-time.After(10 * time.Second):
		s.t.Fatal("a crossing does not end")
		return wire.End{}
	}
}

func world(t *testing.T) (web, echo string) {
	t.Helper()
	ws := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/endless" {
			for block := make([]byte, 16<<10); ; {
				if _, err := w.Write(block); err != nil {
					return
				}
			}
		}
		fmt.Fprint(w, "hello")
	}))
	t.Cleanup(ws.Close)
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	t.Cleanup(func() { ln.Close() })
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			go func() { io.Copy(c, c); c.Close() }()
		}
	}()
	return ws.Listener.Addr().String(), ln.Addr().String()
}

// What the gateway refuses after a policy permitted it ends as denied.
func TestRefusedAfterPermit(t *testing.T) {
	s := start(t, wire.Budgets{})
	site, _ := world(t)
	d := s.door("one", 0)
	token := inject.Secret{Name: "token", Placeholder: inject.NewPlaceholder("token"), Value: "the-value-of-it",
		Scope: inject.Scope{Host: "api.example", Methods: []string{"GET"}, Path: "/", Place: inject.Place{Header: "Authorization", Prefix: "Bearer "}}}
	must(t, s.g.set(wire.Door{Sandbox: "one", Secrets: []inject.Secret{token}}))
	status, body, err := s.get(d, site, "/?q="+token.Placeholder)
	if status != 403 || err != nil {
		t.Errorf("a placeholder where none belongs: %d %s %v", status, body, err)
	}
	if e := s.end(); e.Code != airlock.Denied || e.Status != 403 {
		t.Errorf("its end: %+v", e)
	}
}

func TestBytesSpent(t *testing.T) {
	const most = 1 << 20
	s := start(t, wire.Budgets{Bytes: most})
	site, echo := world(t)
	d, other := s.door("one", 0), s.door("other", 0)

	raw := s.dial(d, echo) // open, and quiet
	io.WriteString(raw, "\x00hello")
	_, err := io.ReadFull(raw, make([]byte, 6))
	must(t, err)
	status, body, err := s.get(d, site, "/endless")
	if status != 200 || err == nil || len(body) > most {
		t.Errorf("an endless answer: %d, %d bytes, %v", status, len(body), err)
	}
	if _, err := raw.Read(make([]byte, 1)); err == nil || err == io.EOF {
		t.Errorf("what was open goes on, or ended like a whole: %v", err)
	}
	var in, out int64
	for range 2 {
		e := s.end()
		if e.Code != airlock.Exhausted || e.Used != most {
			t.Errorf("it ended with %+v", e)
		}
		in, out = in+e.BytesIn, out+e.BytesOut
	}
	if all := in + out; all > most || all < most-4096 { // headers count, too
		t.Errorf("%d bytes are told of", all)
	}

	// Nothing more crosses, and whoever reads is told why.
	const why = "the sandbox has sent and received 1048576 bytes, which is all that one may"
	for range 50 {
		status, body, err = s.get(d, site, "/")
		if err != nil || status != 429 || !strings.Contains(body, why) || !strings.Contains(body, "--net-bytes") {
			t.Fatalf("%d %s %v", status, body, err)
		}
	}
	if _, _, err := d.names.Bind("known.example"); err != nil {
		t.Fatal(err)
	}
	if err := d.Judge(t.Context(), "known.example", "A"); err != nil {
		t.Errorf("a name that has addresses: %v", err)
	}
	if got, err := (resolver{d}).Lookup(t.Context(), "known.example"); err != nil || len(got) != 1 || !got[0].IsUnspecified() {
		t.Errorf("it is looked up: %v %v", got, err)
	}
	if err := d.Judge(t.Context(), "a.example", "A"); airlock.CodeOf(err) != airlock.Exhausted || !strings.Contains(err.Error(), why) {
		t.Errorf("a name: %v", err)
	}
	if _, err := s.dial(d, echo).Read(make([]byte, 1)); err == nil || err == io.EOF {
		t.Errorf("a raw connection: %v", err)
	}

	if status, body, err = s.get(other, site, "/"); status != 200 || body != "hello" || err != nil {
		t.Errorf("another sandbox: %d %s %v", status, body, err)
	}
	if e := s.end(); e.Error != "" || e.BytesIn != 5 || e.Used < 5+50 || e.Used > 5+1000 {
		t.Errorf("another sandbox's ended with %+v", e)
	}

	d.close() // what is counted is told at the latest then
	s.eventually("the refusals are told", func() bool { return len(s.refused)+int(s.counted[wire.BudgetBytes]) == 50+1+1 })
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.refused) == 0 || len(s.refused) > 5 || !strings.HasPrefix(s.refused[0].Refused, why) {
		t.Errorf("recorded: %d, %+v", len(s.refused), s.refused)
	}
	if s.notes > 20 {
		t.Errorf("told %d times", s.notes)
	}
	if told := s.used["one"]; len(told) > 101 || slices.Max(told) != most {
		t.Errorf("told of what is used: %v", told)
	}
}

func (s *server) eventually(what string, is func() bool) {
	s.t.Helper()
	for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		s.mu.Lock()
		ok := is()
		s.mu.Unlock()
		if ok {
			return
		}
		if time.Now().After(deadline) {
			s.t.Fatalf("%s: not within 10 s; %d recorded, %v", what, len(s.refused), s.counted)
		}
	}
}

// A gateway that comes after another one goes on where that one was.
func TestBytesUsedBefore(t *testing.T) {
	s := start(t, wire.Budgets{Bytes: 1 << 20})
	site, _ := world(t)
	if status, _, err := s.get(s.door("spent", 1<<20), site, "/"); status != 429 || err != nil {
		t.Errorf("spent before: %d %v", status, err)
	}
	if status, _, err := s.get(s.door("more", 1<<30), site, "/"); status != 429 || err != nil {
		t.Errorf("a budget that has become smaller: %d %v", status, err)
	}
	if status, _, err := s.get(s.door("some", 1<<20-1000), site, "/"); status != 200 || err != nil {
		t.Errorf("some is left: %d %v", status, err)
	}
	if e := s.end(); e.Used <= 1<<20-1000 || e.Used > 1<<20 {
		t.Errorf("%+v", e)
	}
}

func TestRequestsAndAnswers(t *testing.T) {
	s := start(t, wire.Budgets{Requests: 60, Answer: 100_000})
	site, _ := world(t)
	d := s.door("one", 0)
	if status, body, err := s.get(d, site, "/endless"); status != 200 || err == nil || len(body) > 100_000 {
		t.Errorf("a large answer: %d, %d bytes, %v", status, len(body), err)
	}
	if e := s.end(); e.Code != airlock.TooLarge {
		t.Errorf("it ended with %+v", e)
	}
	codes := map[int]int{}
	for range 20 {
		status, _, _ := s.get(d, site, "/")
		codes[status]++
	}
	if codes[200] < 1 || codes[200] > 4 {
		t.Errorf("of a minute's 60 requests and connections: %v", codes)
	}
	s.eventually("the first one is told of at once", func() bool { return s.counted[wire.BudgetRequests] > 0 })
	d.close()
	s.eventually("all are told of", func() bool { return s.counted[wire.BudgetRequests] == int64(20-codes[200]) })
}

func TestBytes(t *testing.T) {
	var told []int64
	b := newBytes(1000, 0, func(used int64) { told = append(told, used) })
	for _, c := range []struct{ take, fits int }{{5, 5}, {4, 4}, {0, 0}, {1, 1}, {980, 980}, {11, 10}, {1, 0}, {0, 0}} {
		if got := b.take(c.take); got != c.fits {
			t.Errorf("of %d fit %d, want %d", c.take, got, c.fits)
		}
	}
	if want := []int64{10, 990, 1000}; !slices.Equal(told, want) {
		t.Errorf("told %v, want %v", told, want)
	}
	if b.spent() != b.over || newBytes(1000, 999, nil).spent() != nil || newBytes(0, 0, nil).most != 100<<30 {
		t.Error("what is spent is not, or what is not is")
	}

	b = newBytes(1_000_000, 0, func(int64) {})
	var all sync.WaitGroup
	var mu sync.Mutex
	sum := 0
	for range 8 {
		all.Go(func() {
			n := 0
			for range 100_000 {
				n += b.take(3)
			}
			mu.Lock()
			sum += n
			mu.Unlock()
		})
	}
	all.Wait()
	if sum != 1_000_000 {
		t.Errorf("%d bytes of a million fit", sum)
	}
}

func TestRefusals(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var told []string
		began := time.Now()
		r := refusals{tell: func(r wire.Refused) {
			told = append(told, fmt.Sprint(r.Budget, r.Count, " at ", time.Since(began)))
		}}
		flood := func(b wire.Budget, n int) {
			for range n {
				r.add(b)
			}
			synctest.Wait()
		}
		flood(wire.BudgetFlows, 1)
		flood(wire.BudgetFlows, 100)
		flood(wire.BudgetRequests, 7)
		time.Sleep(tellEvery + time.Millisecond)
		flood(wire.BudgetFlows, 3)
		time.Sleep(3 * tellEvery)
		flood(wire.BudgetFlows, 1)
		time.Sleep(time.Millisecond)
		flood(wire.BudgetFlows, 2)
		r.close()
		flood(wire.BudgetFlows, 5)
		want := []string{"flows1 at 0s", "requests7 at 0s", "flows100 at 1s", "flows3 at 2s", "flows1 at 4.001s", "flows2 at 4.002s"}
		if !slices.Equal(told, want) {
			t.Errorf("told\n%s\nwant\n%s", strings.Join(told, "\n"), strings.Join(want, "\n"))
		}
	})
}

func TestDatagramsSpent(t *testing.T) {
	s := start(t, wire.Budgets{Bytes: 100})
	d := s.door("one", 0)
	p, err := d.cross(t.Context(), wire.Attempt{Action: "net:connect", Host: "192.0.2.1", Port: 9, Protocol: "udp"})
	must(t, err)
	way := datagrams{p: p}
	in, from := net.Pipe()
	to, out := net.Pipe()
	var got []byte
	var reading sync.WaitGroup
	reading.Go(func() { got, _ = io.ReadAll(out) })
	go func() {
		for range 3 {
			in.Write(make([]byte, 40))
		}
		in.Close()
	}()
	way.copy(to, from, &way.out)
	to.Close()
	reading.Wait()
	if len(got) != 80 || way.out.Load() != 80 {
		t.Errorf("%d bytes passed, %d are counted; half of a datagram is none", len(got), way.out.Load())
	}
	if why := p.ended(); why != d.bytes.over {
		t.Errorf("the flow goes on: %v", why)
	}
	p.End(0, way.out.Load(), 0, p.ended())
	if e := s.end(); e.Code != airlock.Exhausted || e.BytesOut != 80 {
		t.Errorf("%+v", e)
	}
}
