package dns

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"airlock.dev/airlock"
)

// world is who judges, and the host's resolver. Names mean what happens.
type world struct {
	mu     sync.Mutex
	judged []string
	looked []string
	free   chan struct{} // closed, or a token for each lookup of a name that begins with "slow"
}

func (w *world) Judge(ctx context.Context, name, kind string) error {
	w.mu.Lock()
	w.judged = append(w.judged, name+" "+kind)
	w.mu.Unlock()
	switch {
	case strings.HasSuffix(name, "attacker.test"):
		return &airlock.Error{Code: airlock.Denied, Message: "no policy permits it", Hint: "ask ops", Err: errors.New("hidden")}
	case strings.HasSuffix(name, "long.test"):
		return fmt.Errorf("judge: %w", airlock.Errorf(airlock.Denied, "%s", strings.Repeat("é", 400)))
	case strings.HasSuffix(name, "budget.test"):
		return airlock.Errorf(airlock.Exhausted, "enough")
	case strings.HasSuffix(name, "unsure.test"):
		return errors.New("the disk is full: /secret/path")
	case strings.HasSuffix(name, "undecided.test"):
		<-ctx.Done()
		return ctx.Err()
	}
	return nil
}

func (w *world) Lookup(ctx context.Context, name string) ([]netip.Addr, error) {
	w.mu.Lock()
	w.looked = append(w.looked, name)
	w.mu.Unlock()
	first, _, _ := strings.Cut(name, ".")
	switch {
	case strings.HasPrefix(first, "slow"):
		select {
		case <-w.free:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	case first == "never":
		<-ctx.Done()
		return nil, ctx.Err()
	case first == "nx":
		return nil, &net.DNSError{Err: "no such host", Name: name, IsNotFound: true}
	case first == "gone":
		return nil, airlock.Errorf(airlock.NotFound, "no such name")
	case first == "empty":
		return nil, nil
	case first == "broken":
		return nil, &net.DNSError{Err: "server misbehaving", Name: name, IsTemporary: true}
	}
	return []netip.Addr{netip.MustParseAddr("192.0.2.1")}, nil
}

func (w *world) saw() (judged, looked []string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	judged, looked = w.judged, w.looked
	w.judged, w.looked = nil, nil
	return judged, looked
}

func newServer(t testing.TB, w *world, change func(*Config)) *Server {
	t.Helper()
	names, err := NewNames(netip.MustParsePrefix("198.18.0.0/15"), netip.MustParsePrefix("fd61:6972:0:53::/64"), 1000)
	if err != nil {
		t.Fatal(err)
	}
	names.next = 0
	c := Config{Judge: w, Resolver: w, Names: names}
	if change != nil {
		change(&c)
	}
	s := New(c)
	t.Cleanup(s.Close)
	return s
}

// datagrams returns the two ends of a connection that keeps messages apart.
func datagrams(t testing.TB) (ours, theirs net.Conn) {
	t.Helper()
	fds, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_DGRAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	var ends [2]net.Conn
	for i, fd := range fds {
		f := os.NewFile(uintptr(fd), "datagrams")
		ends[i], err = net.FileConn(f)
		f.Close()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { ends[i].Close() })
	}
	return ends[0], ends[1]
}

func tcp(t testing.TB) (ours, theirs net.Conn) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	theirs, err = net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	ours, err = l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ours.Close(); theirs.Close() })
	return ours, theirs
}

// client is a sandbox with one connection.
type client struct {
	t      testing.TB
	c      net.Conn
	stream bool
	over   chan struct{} // closed when the server has left the connection
}

func dial(t testing.TB, s *Server, stream bool) *client {
	pair, serve := datagrams, s.ServeUDP
	if stream {
		pair, serve = tcp, s.ServeTCP
	}
	ours, theirs := pair(t)
	theirs.SetDeadline(time.Now().Add(20 * time.Second))
	return serveOn(t, ours, theirs, stream, serve)
}

// dialPipe is for the time of synctest. A pipe keeps messages apart, too.
func dialPipe(t testing.TB, s *Server, stream bool) *client {
	serve := s.ServeUDP
	if stream {
		serve = s.ServeTCP
	}
	ours, theirs := net.Pipe()
	return serveOn(t, ours, theirs, stream, serve)
}

func serveOn(t testing.TB, ours, theirs net.Conn, stream bool, serve func(context.Context, net.Conn)) *client {
	c := &client{t: t, c: theirs, stream: stream, over: make(chan struct{})}
	go func() {
		defer close(c.over)
		serve(t.Context(), ours)
	}()
	return c
}

func (c *client) send(msg []byte) {
	c.t.Helper()
	if c.stream {
		msg = framed(msg)
	}
	if _, err := c.c.Write(msg); err != nil {
		c.t.Fatal(err)
	}
}

func framed(msg []byte) []byte {
	return append(binary.BigEndian.AppendUint16(nil, uint16(len(msg))), msg...)
}

func (c *client) receive() []byte {
	c.t.Helper()
	msg, err := c.read()
	if err != nil {
		c.t.Fatal(err)
	}
	return msg
}

func (c *client) read() ([]byte, error) {
	buf := make([]byte, streamSize)
	if !c.stream {
		n, err := c.c.Read(buf)
		return buf[:n], err
	}
	if _, err := io.ReadFull(c.c, buf[:2]); err != nil {
		return nil, err
	}
	n := binary.BigEndian.Uint16(buf)
	_, err := io.ReadFull(c.c, buf[:n])
	return buf[:n], err
}

// bytesOf reads hexadecimal digits, with names and texts in quotes: 'a.test.'
// is the wire form of a name, "text" stands for its bytes.
func bytesOf(t testing.TB, s string) []byte {
	t.Helper()
	var all []byte
	for s != "" {
		switch s[0] {
		case ' ', '\n', '\t':
			s = s[1:]
		case '\'':
			var name string
			name, s, _ = strings.Cut(s[1:], "'")
			for label := range strings.SplitSeq(strings.TrimSuffix(name, "."), ".") {
				all = append(append(all, byte(len(label))), label...)
			}
			all = append(all, 0)
		case '"':
			var text string
			text, s, _ = strings.Cut(s[1:], "\"")
			all = append(all, text...)
		default:
			b, err := hex.DecodeString(s[:2])
			if err != nil {
				t.Fatal(err)
			}
			all, s = append(all, b...), s[2:]
		}
	}
	return all
}

// ask is a query for a name with the id 1234.
func ask(t testing.TB, name string, kind string) []byte {
	return bytesOf(t, "1234 0100 0001 0000 0000 0000 '"+name+"' "+kind+" 0001")
}

func TestWire(t *testing.T) {
	const (
		one     = "1234 0100 0001 0000 0000 0000" // a header with one question
		edns    = "1234 0100 0001 0000 0000 0001"
		opt     = "00 0029 04d0 00 00 0000 0000"
		refused = "1234 8185 0001 0000 0000 0000"
		nx      = "1234 8183 0001 0000 0000 0000"
		empty   = "1234 8180 0001 0000 0000 0000"
		failed  = "1234 8182 0001 0000 0000 0000"
		formErr = "1234 8181 0000 0000 0000 0000"
		a       = " 0001 0001"
		aaaa    = " 001c 0001"
		answerA = " c00c 0001 0001 0000001e 0004 c6120001"
	)
	label63 := strings.Repeat("a", 63)
	longest := label63 + "." + label63 + "." + label63 + "." + strings.Repeat("a", 59) + ".b" // 253
	for _, c := range []struct{ name, query, reply, judged, looked string }{
		{"A", one + "'example.com'" + a, "1234 8180 0001 0001 0000 0000 'example.com'" + a + answerA, "example.com A", "example.com"},
		{"AAAA", one + "'example.com'" + aaaa, "1234 8180 0001 0001 0000 0000 'example.com'" + aaaa + " c00c 001c 0001 0000001e 0010 fd616972000000530000000000000001", "example.com AAAA", "example.com"},
		{"capitals are kept", one + "'ExAmPlE.cOM'" + a, "1234 8180 0001 0001 0000 0000 'ExAmPlE.cOM'" + a + answerA, "example.com A", "example.com"},
		{"not recursive, checking disabled", "abcd 0010 0001 0000 0000 0000 'example.com'" + a, "abcd 8090 0001 0001 0000 0000 'example.com'" + a + answerA, "example.com A", "example.com"},
		{"EDNS", edns + "'example.com'" + a + "00 0029 1000 00 00 0000 0000", "1234 8180 0001 0001 0000 0001 'example.com'" + a + answerA + opt, "example.com A", "example.com"},
		{"EDNS with DO, a cookie and padding", edns + "'example.com'" + a + "00 0029 04d0 00 00 8000 0012 000a 0008 0011223344556677 000c 0002 0000", "1234 8180 0001 0001 0000 0001 'example.com'" + a + answerA + "00 0029 04d0 00 00 8000 0000", "example.com A", "example.com"},
		{"the longest name", one + "'" + longest + "'" + a, "1234 8180 0001 0001 0000 0000 '" + longest + "'" + a + answerA, longest + " A", longest},

		{"HTTPS", one + "'example.com' 0041 0001", empty + "'example.com' 0041 0001", "example.com HTTPS", ""},
		{"SVCB", one + "'example.com' 0040 0001", empty + "'example.com' 0040 0001", "example.com SVCB", ""},
		{"TXT", one + "'_dmarc.example.com' 0010 0001", empty + "'_dmarc.example.com' 0010 0001", "_dmarc.example.com TXT", ""},
		{"CAA", one + "'example.com' 0101 0001", empty + "'example.com' 0101 0001", "example.com TYPE257", ""},
		{"CNAME", one + "'example.com' 0005 0001", empty + "'example.com' 0005 0001", "example.com CNAME", ""},
		{"NULL of a tunnel", one + "'aGVsbG8.attacker.test' 000a 0001", refused + "'aGVsbG8.attacker.test' 000a 0001", "agvsbg8.attacker.test TYPE10", ""},
		{"root", one + "00 0002 0001", empty + "00 0002 0001", "", ""},
		{"ANY", one + "'example.com' 00ff 0001", refused + "'example.com' 00ff 0001", "", ""},
		{"AXFR", one + "'example.com' 00fc 0001", refused + "'example.com' 00fc 0001", "", ""},
		{"TKEY", one + "'example.com' 00f9 0001", refused + "'example.com' 00f9 0001", "", ""},
		{"OPT is asked for", one + "'example.com' 0029 0001", refused + "'example.com' 0029 0001", "", ""},
		{"CHAOS", one + "'version.bind' 0010 0003", refused + "'version.bind' 0010 0003", "", ""},
		{"any class", one + "'example.com' 0001 00ff", refused + "'example.com' 0001 00ff", "", ""},
		{"ANY with EDNS", edns + "'example.com' 00ff 0001" + opt, "1234 8185 0001 0000 0000 0001 'example.com' 00ff 0001 00 0029 04d0 00 00 0000 003e 000f 003a 0000 \"queries of this type are not answered: ask for A or AAAA\"", "", ""},

		{"reverse", one + "'1.0.18.198.in-addr.arpa' 000c 0001", nx + "'1.0.18.198.in-addr.arpa' 000c 0001", "", ""},
		{"reverse of IPv6", one + "'1.0.0.0.ip6.arpa' 000c 0001", nx + "'1.0.0.0.ip6.arpa' 000c 0001", "", ""},
		{"one label", one + "'example' 0001 0001", nx + "'example' 0001 0001", "", ""},
		{"LOCALHOST", one + "'LOCALHOST' 0001 0001", nx + "'LOCALHOST' 0001 0001", "", ""},
		{"local", one + "'printer.Local'" + a, nx + "'printer.Local'" + a, "", ""},
		{"internal", one + "'metadata.google.internal'" + a, nx + "'metadata.google.internal'" + a, "", ""},
		{"noise of a search list", one + "'pypi.org.lan' 001c 0001", nx + "'pypi.org.lan' 001c 0001", "", ""},
		{"like local", one + "'example.notlocal'" + a, "1234 8180 0001 0001 0000 0000 'example.notlocal'" + a + answerA, "example.notlocal A", "example.notlocal"},
		{"an address", one + "'169.254.169.254'" + a, nx + "'169.254.169.254'" + a, "", ""},

		{"denied", one + "'secret.attacker.test'" + a, refused + "'secret.attacker.test'" + a, "secret.attacker.test A", ""},
		{"denied with EDNS", edns + "'secret.Attacker.test'" + a + opt, "1234 8185 0001 0000 0000 0001 'secret.Attacker.test'" + a + "00 0029 04d0 00 00 0000 0023 000f 001f 000f \"no policy permits it: ask ops\"", "secret.attacker.test A", ""},
		{"over budget", edns + "'budget.test.budget.test'" + a + opt, "1234 8185 0001 0000 0000 0001 'budget.test.budget.test'" + a + "00 0029 04d0 00 00 0000 000c 000f 0008 000f \"enough\"", "budget.test.budget.test A", ""},
		{"cannot be decided", edns + "'unsure.test'" + a + opt, "1234 8182 0001 0000 0000 0001 'unsure.test'" + a + "00 0029 04d0 00 00 0000 002e 000f 002a 0000 \"nothing could be decided about this name\"", "unsure.test A", ""},
		{"no host's name", edns + "'a b\xff.example.com'" + a + opt, "1234 8185 0001 0000 0000 0001 'a b\xff.example.com'" + a + "00 0029 04d0 00 00 0000 001f 000f 001b 000f \"this is no name of a host\"", `a\032b\255.example.com A`, ""},
		{"a label with a hyphen at its end", one + "'a-.example.com' 0010 0001", refused + "'a-.example.com' 0010 0001", "a-.example.com TXT", ""},
		{"half an address", one + "'127.1'" + a, refused + "'127.1'" + a, "127.1 A", ""},

		{"no such name", one + "'nx.example.com'" + a, nx + "'nx.example.com'" + a, "nx.example.com A", "nx.example.com"},
		{"no such name, by code", one + "'gone.example.com'" + aaaa, nx + "'gone.example.com'" + aaaa, "gone.example.com AAAA", "gone.example.com"},
		{"no addresses", one + "'empty.example.com'" + a, empty + "'empty.example.com'" + a, "empty.example.com A", "empty.example.com"},
		{"the resolver fails", one + "'broken.example.com'" + a, failed + "'broken.example.com'" + a, "broken.example.com A", "broken.example.com"},
		{"the resolver fails, with EDNS", edns + "'broken.example.com'" + a + opt, "1234 8182 0001 0000 0000 0001 'broken.example.com'" + a + "00 0029 04d0 00 00 0000 0037 000f 0033 0016 \"the host's resolver does not answer for this name\"", "broken.example.com A", "broken.example.com"},

		{"a response", "1234 8180 0001 0000 0000 0000 'example.com'" + a, formErr, "", ""},
		{"inverse query", "1234 0900 0001 0000 0000 0000 'example.com'" + a, "1234 8984 0000 0000 0000 0000", "", ""},
		{"status", "1234 1000 0000 0000 0000 0000", "1234 9084 0000 0000 0000 0000", "", ""},
		{"notify", "1234 2100 0001 0000 0000 0000 'example.com' 0006 0001", "1234 a184 0000 0000 0000 0000", "", ""},
		{"update", "1234 2900 0001 0000 0000 0000 'example.com' 0006 0001", "1234 a984 0000 0000 0000 0000", "", ""},
		{"opcode 15", "1234 7900 0001 0000 0000 0000 'example.com'" + a, "1234 f984 0000 0000 0000 0000", "", ""},
		{"no question", "1234 0100 0000 0000 0000 0000", formErr, "", ""},
		{"two questions", "1234 0100 0002 0000 0000 0000 'example.com'" + a + "'attacker.test'" + a, formErr, "", ""},
		{"a second one that is missing", "1234 0100 0002 0000 0000 0000 'example.com'" + a, formErr, "", ""},
		{"65535 questions", "1234 0100 ffff 0000 0000 0000 'example.com'" + a, formErr, "", ""},
		{"with an answer", "1234 0100 0001 0001 0000 0000 'example.com'" + a + answerA, "1234 8181 0001 0000 0000 0000 'example.com'" + a, "", ""},
		{"with an authority", "1234 0100 0001 0000 0001 0000 'example.com'" + a + answerA, "1234 8181 0001 0000 0000 0000 'example.com'" + a, "", ""},
		{"more additions than come", edns + "'example.com'" + a, "1234 8181 0001 0000 0000 0000 'example.com'" + a, "", ""},
		{"five additions", "1234 0100 0001 0000 0000 0005 'example.com'" + a + strings.Repeat(answerA, 5), "1234 8181 0001 0000 0000 0000 'example.com'" + a, "", ""},
		{"an addition that loops", edns + "'example.com'" + a + "c01d 0029 04d0 0000 0000 0000", "1234 8181 0001 0000 0000 0000 'example.com'" + a, "", ""},
		{"two OPT", "1234 0100 0001 0000 0000 0002 'example.com'" + a + opt + opt, "1234 8181 0001 0000 0000 0001 'example.com'" + a + opt, "", ""},
		{"OPT with a name", edns + "'example.com'" + a + "'x' 0029 04d0 00 00 0000 0000", "1234 8181 0001 0000 0000 0000 'example.com'" + a, "", ""},
		{"OPT that is cut", edns + "'example.com'" + a + "00 0029 04d0 00 00 0000 00ff 000a", "1234 8181 0001 0000 0000 0000 'example.com'" + a, "", ""},
		{"EDNS version 1", edns + "'example.com'" + a + "00 0029 04d0 00 01 0000 0000", "1234 8180 0001 0000 0000 0001 'example.com'" + a + "00 0029 04d0 01 00 0000 0000", "", ""},

		{"a pointer to itself", one + "c00c" + a, formErr, "", ""},
		{"pointers in a circle", one + "c00e c00c" + a, formErr, "", ""},
		{"a pointer behind a label", one + "07 \"example\" c00c" + a, formErr, "", ""},
		{"a pointer into the header", one + "07 \"example\" c00a" + a, formErr, "", ""},
		{"a pointer forward, to a name", one + "c012" + a + "'example.com'", formErr, "", ""},
		{"a pointer past the end", one + "ffff" + a, formErr, "", ""},
		{"half a pointer", one + "c0", formErr, "", ""},
		{"label type 01", one + "41 \"a\" 00" + a, formErr, "", ""},
		{"label type 10", one + "81 \"a\" 00" + a, formErr, "", ""},
		{"a name without an end", one + "07 \"example\"", formErr, "", ""},
		{"a label without an end", one + "3f \"exa\"", formErr, "", ""},
		{"no type", one + "'example.com'", formErr, "", ""},
		{"no class", one + "'example.com' 0001", formErr, "", ""},
		{"a name of 256 bytes", one + "'" + longest + "bb.c'" + a, formErr, "", ""},
		{"a dot in a label", one + "0b \"example.com\" 00" + a, formErr, "", ""},
		{"far too long", one + "'example.com'" + a + strings.Repeat("00", 4068), formErr, "", ""},
	} {
		for _, stream := range []bool{false, true} {
			name := c.name + " over UDP"
			if stream {
				name = c.name + " over TCP"
			}
			t.Run(name, func(t *testing.T) {
				var w world
				msg := bytesOf(t, c.query)
				if stream && len(msg) > queryMost {
					t.Skip("such a connection is closed")
				}
				cl := dial(t, newServer(t, &w, nil), stream)
				cl.send(msg)
				if got, want := cl.receive(), bytesOf(t, c.reply); !bytes.Equal(got, want) {
					t.Errorf("reply\n% x, want\n% x", got, want)
				}
				judged, looked := w.saw()
				if strings.Join(judged, ",") != c.judged || strings.Join(looked, ",") != c.looked {
					t.Errorf("judged %q and looked up %q, want %q and %q", judged, looked, c.judged, c.looked)
				}
			})
		}
	}
}

// Only a long reason can make a reply too long: it is left out, and is there over TCP.
func TestTruncation(t *testing.T) {
	var w world
	s := newServer(t, &w, nil)
	query := func(size string) []byte {
		return bytesOf(t, "1234 0100 0001 0000 0000 0001 'x.long.test' 0001 0001 00 0029 "+size+" 00 00 0000 0000")
	}
	short := "1234 8385 0001 0000 0000 0001 'x.long.test' 0001 0001 00 0029 04d0 00 00 0000 0000"
	whole := "1234 8185 0001 0000 0000 0001 'x.long.test' 0001 0001 00 0029 04d0 00 00 0000 0206 000f 0202 000f \"" + strings.Repeat("é", 256) + "\""
	for _, c := range []struct {
		name   string
		stream bool
		size   string
		want   string
	}{
		{"512", false, "0200", short},
		{"less than one may say", false, "0000", short},
		{"557", false, "022d", short},
		{"558", false, "022e", whole},
		{"1232", false, "04d0", whole},
		{"more than we send", false, "ffff", whole},
		{"TCP", true, "0200", whole},
	} {
		cl := dial(t, s, c.stream)
		cl.send(query(c.size))
		if got, want := cl.receive(), bytesOf(t, c.want); !bytes.Equal(got, want) {
			t.Errorf("%s: %d bytes\n% x, want %d\n% x", c.name, len(got), got, len(want), want)
		}
	}
}

func TestOwnLocalNames(t *testing.T) {
	var w world
	s := newServer(t, &w, func(c *Config) { c.Local = []string{"Corp.example"}; c.TTL = time.Minute })
	cl := dial(t, s, false)
	for name, want := range map[string]string{
		"git.internal":            "8180",
		"a.corp.example":          "8183",
		"corp.example":            "8183",
		"acorp.example":           "8180",
		"1.0.0.127.in-addr.arpa.": "8183",
	} {
		cl.send(ask(t, name, "0001"))
		if got := hex.EncodeToString(cl.receive()[2:4]); got != want {
			t.Errorf("%s: %s, want %s", name, got, want)
		}
	}
}

// What is too short has no reply, and the connection goes on over UDP only.
func TestTooShort(t *testing.T) {
	var w world
	s := newServer(t, &w, nil)
	cl := dial(t, s, false)
	for n := range headerSize {
		cl.send(make([]byte, n))
	}
	cl.send(ask(t, "example.com", "0001"))
	if got := cl.receive(); !bytes.HasPrefix(got, []byte{0x12, 0x34, 0x81, 0x80}) {
		t.Errorf("% x", got)
	}
	for _, frame := range []string{"0000", "000b 1234 0100 0001 0000 0000 00", "1001", "ffff"} {
		cl := dial(t, s, true)
		if _, err := cl.c.Write(bytesOf(t, frame)); err != nil {
			t.Fatal(err)
		}
		<-cl.over
		if msg, err := cl.read(); err == nil {
			t.Errorf("%s: % x", frame, msg)
		}
	}
}

// glibc asks for A and AAAA from one port: the slow one holds nothing up.
func TestAnswersAsTheyAreReady(t *testing.T) {
	for _, stream := range []bool{false, true} {
		w := world{free: make(chan struct{})}
		cl := dial(t, newServer(t, &w, nil), stream)
		cl.send(ask(t, "slow.example.com", "0001"))
		cl.send(ask(t, "example.com", "0001"))
		if got := cl.receive(); !bytes.Contains(got, []byte("\x07example\x03com\x00")) || bytes.Contains(got, []byte("slow")) {
			t.Errorf("first % x", got)
		}
		close(w.free)
		if got := cl.receive(); !bytes.Contains(got, []byte("\x04slow\x07example\x03com\x00")) {
			t.Errorf("second % x", got)
		}
	}
}

func TestPipelining(t *testing.T) {
	var w world
	cl := dial(t, newServer(t, &w, nil), true)
	const n = 150
	var all []byte
	for i := range n {
		msg := ask(t, fmt.Sprintf("h%d.example.com", i%10), "0001")
		binary.BigEndian.PutUint16(msg, uint16(i))
		all = append(all, framed(msg)...)
	}
	// In pieces that are no messages, and then no more is asked.
	go func() {
		for part := range slices.Chunk(all, 7) {
			cl.c.Write(part)
		}
		cl.c.(*net.TCPConn).CloseWrite()
	}()
	ids := map[uint16]int{}
	for range n {
		msg := cl.receive()
		ids[binary.BigEndian.Uint16(msg)]++
		if len(msg) != 48 || msg[3] != 0x80 {
			t.Fatalf("% x", msg)
		}
	}
	if len(ids) != n {
		t.Errorf("%d of %d were answered", len(ids), n)
	}
	if _, err := cl.read(); err != io.EOF {
		t.Errorf("behind the last answer: %v", err)
	}
	<-cl.over
}

func TestSlowClients(t *testing.T) {
	for _, c := range []struct {
		name   string
		stream bool
		do     func(t *testing.T, cl *client)
		after  time.Duration
	}{
		{"silent over UDP", false, func(*testing.T, *client) {}, 10 * time.Second},
		{"silent over TCP", true, func(*testing.T, *client) {}, 10 * time.Second},
		{"half a length", true, func(t *testing.T, cl *client) { cl.c.Write([]byte{0}) }, 10 * time.Second},
		{"a byte a second", true, func(t *testing.T, cl *client) {
			for _, b := range framed(ask(t, "example.com", "0001")) {
				if _, err := cl.c.Write([]byte{b}); err != nil {
					break
				}
				time.Sleep(time.Second)
			}
		}, 6 * time.Second}, // one for the rest of the length, five for the message
		{"never reads", true, func(t *testing.T, cl *client) {
			for {
				if _, err := cl.c.Write(framed(ask(t, "example.com", "0001"))); err != nil {
					break
				}
			}
		}, 5 * time.Second},
		{"never reads over UDP", false, func(t *testing.T, cl *client) {
			for {
				if _, err := cl.c.Write(ask(t, "example.com", "0001")); err != nil {
					break
				}
			}
		}, 5 * time.Second},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var w world
				s := newServer(t, &w, nil)
				cl := dialPipe(t, s, c.stream)
				begin := time.Now()
				var doing sync.WaitGroup
				doing.Go(func() { c.do(t, cl) })
				<-cl.over
				if took := time.Since(begin); took > c.after+time.Second || took < c.after {
					t.Errorf("%v, want %v", took, c.after)
				}
				cl.c.Close()
				doing.Wait()
				s.Close()
			})
		})
	}
}

func TestStreamsAreBounded(t *testing.T) {
	var w world
	s := newServer(t, &w, func(c *Config) { c.Streams = 3 })
	var open []*client
	for range 3 {
		cl := dial(t, s, true)
		cl.send(ask(t, "example.com", "0001"))
		cl.receive() // it is being served
		open = append(open, cl)
	}
	over := dial(t, s, true)
	<-over.over
	if _, err := over.read(); err == nil {
		t.Error("a fourth stream is served")
	}
	udp := dial(t, s, false)
	udp.send(ask(t, "example.com", "0001"))
	udp.receive()
	open[0].c.Close()
	<-open[0].over
	again := dial(t, s, true)
	again.send(ask(t, "example.com", "0001"))
	again.receive()
}

// A flood costs a bounded number of decisions, and is answered at once.
func TestFlood(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var w world
		s := newServer(t, &w, nil)
		cl := dialPipe(t, s, false)
		count := func(n int) map[string]int {
			codes := map[string]int{}
			for i := range n {
				cl.send(ask(t, fmt.Sprintf("d%d.attacker.test", i), "0001"))
				codes[hex.EncodeToString(cl.receive()[2:4])]++
			}
			return codes
		}
		if got := count(1000); got["8185"] != 1000 {
			t.Errorf("%v", got)
		}
		judged, looked := w.saw()
		if len(judged) != 200 || len(looked) != 0 {
			t.Errorf("%d decisions and %d lookups, want 200 and none", len(judged), len(looked))
		}
		time.Sleep(time.Second)
		count(1000)
		if judged, _ := w.saw(); len(judged) != 100 {
			t.Errorf("a second later %d decisions, want 100", len(judged))
		}
		time.Sleep(time.Hour)
		cl = dialPipe(t, s, true) // the same for TCP, and no more than at first
		count(1000)
		if judged, _ := w.saw(); len(judged) != 200 {
			t.Errorf("an hour later %d decisions, want 200", len(judged))
		}
		cl.c.Close()
		s.Close()
	})
}

// As many queries as may be pending are, whoever asks; others fail at once
// over UDP and wait over TCP. All end when the resolver never answers.
func TestPendingIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var w world
		s := newServer(t, &w, func(c *Config) { c.Rate = 10000; c.Pending = 50 })
		failed := make(chan time.Duration, 1000)
		begin := time.Now()
		for i := range 4 {
			cl := dialPipe(t, s, false)
			go func() {
				for {
					msg, err := cl.read()
					if err != nil {
						return
					}
					if msg[3] == 0x82 {
						failed <- time.Since(begin)
					}
				}
			}()
			for j := range 100 {
				cl.send(ask(t, fmt.Sprintf("never.x%d.y%d.example.com", i, j), "0001"))
			}
		}
		stream := dialPipe(t, s, true)
		stream.send(ask(t, "never.stream.example.com", "0001"))
		synctest.Wait()
		if judged, _ := w.saw(); len(judged) != 50 || len(failed) != 350 {
			t.Errorf("%d are pending, and %d failed at once", len(judged), len(failed))
		}
		if n := runtime.NumGoroutine(); n > 200 {
			t.Errorf("%d goroutines", n)
		}
		if msg := stream.receive(); msg[3] != 0x82 || time.Since(begin) != 8*time.Second {
			t.Errorf("over TCP % x after %v", msg, time.Since(begin))
		}
		var last time.Duration
		for len(failed) > 0 {
			last = <-failed
		}
		if last != 4*time.Second {
			t.Errorf("the last one of UDP failed after %v", last)
		}
		s.Close()
	})
}

func TestJudgeThatHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var w world
		s := newServer(t, &w, nil)
		cl := dialPipe(t, s, false)
		begin := time.Now()
		cl.send(ask(t, "undecided.test", "0001"))
		if msg := cl.receive(); msg[3] != 0x82 || time.Since(begin) != 4*time.Second {
			t.Errorf("% x after %v", msg, time.Since(begin))
		}
		if _, looked := w.saw(); len(looked) != 0 {
			t.Errorf("looked up %v", looked)
		}
		s.Close()
	})
}

// Each name of an exfiltration is on record, and none leaves.
func TestExfiltration(t *testing.T) {
	var w world
	s := newServer(t, &w, func(c *Config) { c.Rate = 1000 })
	var want []string
	for i, kind := range []string{"0001", "001c", "0010", "000f", "0005", "0041", "000a"} {
		for j, stream := range []bool{false, true} {
			cl := dial(t, s, stream)
			data := hex.EncodeToString(fmt.Appendf(nil, "key %d %d", i, j))
			cl.send(ask(t, data+".Attacker.test", kind))
			if msg := cl.receive(); msg[3] != 0x85 {
				t.Errorf("% x", msg)
			}
			want = append(want, data+".attacker.test "+[]string{"A", "AAAA", "TXT", "MX", "CNAME", "HTTPS", "TYPE10"}[i])
		}
	}
	if judged, looked := w.saw(); !slices.Equal(judged, want) || len(looked) != 0 {
		t.Errorf("judged %q, want %q; looked up %q", judged, want, looked)
	}
}

func TestClose(t *testing.T) {
	w := world{free: make(chan struct{})}
	s := newServer(t, &w, nil)
	udp, stream := dial(t, s, false), dial(t, s, true)
	for _, cl := range []*client{udp, stream} {
		cl.send(ask(t, "example.com", "0001"))
		cl.receive()
		cl.send(ask(t, "slow.example.com", "0001")) // is never released
	}
	s.Close()
	<-udp.over
	<-stream.over
	late := dial(t, s, false)
	<-late.over
	if _, err := s.Lookup(t.Context(), "example.com"); airlock.CodeOf(err) != airlock.Unavailable {
		t.Errorf("lookup after Close: %v", err)
	}
}

func TestContextEndsConnection(t *testing.T) {
	var w world
	s := newServer(t, &w, nil)
	ctx, cancel := context.WithCancel(t.Context())
	ours, theirs := tcp(t)
	cl := serveOn(t, ours, theirs, true, func(_ context.Context, c net.Conn) { s.ServeTCP(ctx, c) })
	cl.send(ask(t, "example.com", "0001"))
	cl.receive()
	cancel()
	<-cl.over
}

// No address is left: the sandbox is told.
func TestNoAddressLeft(t *testing.T) {
	var w world
	names, err := NewNames(netip.MustParsePrefix("198.18.0.0/24"), netip.Prefix{}, 1)
	if err != nil {
		t.Fatal(err)
	}
	s := newServer(t, &w, func(c *Config) { c.Names = names })
	cl := dial(t, s, false)
	cl.send(ask(t, "a.example.com", "001c"))
	if msg := cl.receive(); msg[3] != 0x80 || msg[7] != 0 {
		t.Errorf("without a network of IPv6: % x", msg)
	}
	v4, _, err := names.Bind("a.example.com")
	if err != nil {
		t.Fatal(err)
	}
	_, release, _ := names.Hold(v4)
	defer release()
	cl.send(bytesOf(t, "1234 0100 0001 0000 0000 0001 'b.example.com' 0001 0001 00 0029 04d0 00 00 0000 0000"))
	if msg := cl.receive(); msg[3] != 0x82 || !bytes.HasSuffix(msg, []byte("connections are open to 1 names and that is the most: close some")) {
		t.Errorf("% x", msg)
	}
}

// The resolver of Go's library, over UDP and TCP.
func TestRealClient(t *testing.T) {
	var w world
	s := newServer(t, &w, nil)
	for _, stream := range []bool{false, true} {
		r := net.Resolver{PreferGo: true, StrictErrors: true, Dial: func(context.Context, string, string) (net.Conn, error) {
			return dial(t, s, stream).c, nil
		}}
		addrs, err := r.LookupNetIP(t.Context(), "ip", "example.com.")
		slices.SortFunc(addrs, netip.Addr.Compare)
		if want := []netip.Addr{netip.MustParseAddr("198.18.0.1"), netip.MustParseAddr("fd61:6972:0:53::1")}; err != nil || !slices.Equal(addrs, want) {
			t.Errorf("%v, %v, want %v", addrs, err, want)
		}
		var d *net.DNSError
		if _, err := r.LookupNetIP(t.Context(), "ip4", "nx.example.com."); !errors.As(err, &d) || !d.IsNotFound {
			t.Errorf("no such name: %v", err)
		}
		if _, err := r.LookupAddr(t.Context(), "198.18.0.1"); !errors.As(err, &d) || !d.IsNotFound {
			t.Errorf("reverse: %v", err)
		}
		if _, err := r.LookupNetIP(t.Context(), "ip4", "x.attacker.test."); !errors.As(err, &d) || d.IsNotFound || d.IsTimeout {
			t.Errorf("denied: %v", err)
		}
		if _, err := r.LookupTXT(t.Context(), "example.com."); !errors.As(err, &d) || !d.IsNotFound {
			t.Errorf("TXT: %v", err)
		}
	}
}

// A denial is answered in far less than the 100 ms that it may take.
func BenchmarkDenied(b *testing.B) {
	benchmark(b, ask(b, "secret.attacker.test", "0001"))
}

func BenchmarkAnswered(b *testing.B) {
	benchmark(b, ask(b, "example.com", "0001"))
}

func benchmark(b *testing.B, msg []byte) {
	var w world
	cl := dial(b, newServer(b, &w, func(c *Config) { c.Rate = 1 << 40 }), false)
	cl.c.SetDeadline(time.Time{})
	buf := make([]byte, plainSize)
	b.ReportAllocs()
	for b.Loop() {
		cl.send(msg)
		if _, err := cl.c.Read(buf); err != nil {
			b.Fatal(err)
		}
	}
}
