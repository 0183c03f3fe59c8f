package web

import (
	"bufio"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"syscall"
	"testing"
	"time"
)

func TestBegins(t *testing.T) {
	hello := string(clientHello(t, "one.test"))
	for _, tt := range []struct {
		in   string
		want beginning
	}{
		{"", beginsUnknown}, {"G", beginsUnknown}, {"GET", beginsUnknown}, {"GET ", beginsUnknown},
		{"GET /", beginsRequest}, {"OPTIONS *", beginsRequest}, {"VERSION-CONTROL /x", beginsRequest}, {"PRI * HTTP/2.0\r\n", beginsRequest},
		{"GET h", beginsUnknown}, {"GET HTTP", beginsUnknown}, {"GET http:", beginsRequest}, {"GET HttP://one.test/", beginsRequest}, {"GET https:", beginsOther},
		{"get /", beginsOther}, {" /", beginsOther}, {"\r\nGET /", beginsOther}, {strings.Repeat("A", 32), beginsUnknown}, {strings.Repeat("A", 33), beginsOther},
		{"NICK me\r\n", beginsOther}, {"CONNECT {\"verbose\":false}\r\n", beginsOther}, {"PING\r\n", beginsOther}, {"SET k v\r\n", beginsOther},
		{"SSH-2.0-x\r\n", beginsOther}, {"\x00\x00\x00\x08\x04\xd2\x16\x2f", beginsOther}, {"*1\r\n$4\r\nPING\r\n", beginsOther},
		{hello, beginsHello}, {hello[:6], beginsHello}, {hello[:5], beginsUnknown}, {hello[:1], beginsUnknown},
		{"\x16\x03\x01\x00\x05\x02", beginsOther}, {"\x16\x02", beginsOther}, {"\x16\x03\x05", beginsOther}, {"\x15\x03\x01\x00\x02\x01", beginsOther},
	} {
		want(t, fmt.Sprintf("%q", tt.in), begins([]byte(tt.in)), tt.want)
	}
}

// What was said stays so, and is said before there is much to keep.
func FuzzBegins(f *testing.F) {
	for _, s := range []string{"GET / HTTP/1.1\r\n", "CONNECT http://x", "\x16\x03\x01\x02\x00\x01", "NICK me\r\n", strings.Repeat("A-", 40)} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		said := beginsUnknown
		for i := range len(b) + 1 {
			now := begins(b[:i])
			if said != beginsUnknown && now != said || now == beginsUnknown && i >= guessMost {
				t.Fatalf("%q: %d, then %d", b[:i], said, now)
			}
			said = now
		}
	})
}

// lineServer says a greeting, if there is one, and then what it is told, until it
// is told no more, and then goodbye.
func lineServer(t testing.TB, config *tls.Config, greeting string) string {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	t.Cleanup(func() { l.Close() })
	if config != nil {
		l = tls.NewListener(l, config)
	}
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				greeting := greeting
				if t, ok := c.(*tls.Conn); ok {
					if t.Handshake() != nil {
						return
					}
					greeting += t.ConnectionState().NegotiatedProtocol
				}
				io.WriteString(c, greeting)
				if _, err := io.Copy(c, c); err == nil {
					io.WriteString(c, "goodbye")
				}
			}()
		}
	}()
	return l.Addr().String()
}

func TestAny(t *testing.T) {
	w := newWorld(t)
	cert, err := w.outer.mint("one.test")
	must(t, err)
	config := func(protocols ...string) *tls.Config {
		return &tls.Config{Certificates: []tls.Certificate{*cert}, NextProtos: protocols}
	}
	a := w.name("one.test", map[uint16]string{
		22: banner(t), 25: banner(t), 80: banner(t), 7: lineServer(t, nil, ""),
		993: lineServer(t, config(), "* OK "), 5671: lineServer(t, config("amqp", "other"), ""), 5672: lineServer(t, config("other"), ""),
		3000: w.upstream(echo, false, ""), 8443: w.upstream(echo, true, "one.test"), 8444: w.upstream(echo, true, "two.test"), 9: "127.0.0.1:1",
	})
	for at := range w.places {
		w.modes[at] = Any
	}
	w.deny = func(r Request) error {
		if r.Port == 25 || r.Path == "/no" {
			return &Denied{Reason: "no"}
		}
		return nil
	}
	w.cfg.Limits = Limits{Guess: 50 * time.Millisecond, Handshake: time.Second}
	w.open()
	line := func(c io.Reader) string {
		t.Helper()
		s, err := bufio.NewReader(c).ReadString('\n')
		must(t, err)
		return s
	}
	log := func(what, wanted string) {
		t.Helper()
		want(t, what, lines(w.took()...), wanted)
	}

	t.Run("the server speaks first", func(t *testing.T) {
		c := w.at(a, 22).(*net.TCPConn)
		want(t, "banner", line(c), "SSH-2.0-test\r\n")
		log("log", "CONNECT tcp://one.test:22 203.0.113.7")
		must(t, c.CloseWrite())
		_, err := io.Copy(io.Discard, c)
		must(t, err)
		want(t, "end", w.end(), "0 out 0 in 14")
	})
	t.Run("the client speaks late", func(t *testing.T) {
		c := w.at(a, 7).(*net.TCPConn)
		for { // until it is taken for raw bytes
			if log := w.took(); len(log) > 0 {
				want(t, "log", lines(log...), "CONNECT tcp://one.test:7 203.0.113.7")
				break
			}
			time.Sleep(time.Millisecond)
		}
		_, err := io.WriteString(c, "GET / HTTP/1.1\r\n\r\n")
		must(t, err)
		must(t, c.CloseWrite())
		got, err := io.ReadAll(c)
		must(t, err)
		want(t, "echo", string(got), "GET / HTTP/1.1\r\n\r\ngoodbye")
		want(t, "end", w.end(), "0 out 18 in 25")
	})
	t.Run("another protocol", func(t *testing.T) {
		for _, text := range []string{"NICK me\r\n", "\x16\x03\x01\x00\n", "GET", "PING\r\n", ""} {
			c := w.at(a, 7).(*net.TCPConn)
			_, err := io.WriteString(c, text)
			must(t, err)
			must(t, c.CloseWrite())
			got, err := io.ReadAll(c)
			must(t, err)
			want(t, "echo", string(got), text+"goodbye")
			log(text, "CONNECT tcp://one.test:7 203.0.113.7")
			w.end()
		}
	})
	t.Run("denied or not there", func(t *testing.T) {
		for port, wanted := range map[uint16]string{25: "deny CONNECT tcp://one.test:25", 9: "CONNECT tcp://one.test:9 203.0.113.7"} {
			if _, err := w.at(a, port).Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
				t.Errorf("%d: got %v, want a reset", port, err)
			}
			log("log", wanted)
		}
		w.end()
	})
	t.Run("HTTP", func(t *testing.T) {
		c := w.at(a, 3000)
		r := bufio.NewReader(c)
		for _, tt := range []struct {
			path, host string
			status     int
		}{{"/x", "one.test:3000", 200}, {"/no", "one.test", 403}, {"/", "two.test", 421}, {"/x", "one.test", 200}} {
			fmt.Fprintf(c, "GET %s HTTP/1.1\r\nHost: %s\r\n\r\n", tt.path, tt.host)
			res, _ := answer(t, r)
			want(t, tt.path, res.StatusCode, tt.status)
		}
		log("log", lines("GET http://one.test:3000/x 203.0.113.7", "deny GET http://one.test:3000/no", "refused 421 GET http://two.test:3000", "GET http://one.test:3000/x 203.0.113.7"))
		res, body := raw(t, w.at(a, 3000), "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
		want(t, "HTTP/2 in clear", res.StatusCode, 400)
		if !strings.Contains(body, "HTTP/2 in clear") {
			t.Error(body)
		}
		log("log", "refused 400 PRI http://one.test:3000")
		w.end()
		w.end()
	})
	t.Run("ports that are HTTP's", func(t *testing.T) {
		io.Copy(io.Discard, w.at(a, 80)) // a silent client is no crossing
		log("log", "")
		proxied := w.at(gatewayAddr, 3128)
		tunnel(t, proxied, "one.test:22")
		want(t, "banner", line(proxied), "SSH-2.0-test\r\n")
		log("log", "CONNECT tcp://one.test:22 203.0.113.7")
		proxied.Close()
		w.end()
	})
	t.Run("HTTPS", func(t *testing.T) {
		for _, alpn := range [][]string{nil, {"http/1.1"}, {"other", "http/1.1"}} {
			res, body := raw(t, w.tlsTo(a, 8443, "one.test", alpn...), "GET /x HTTP/1.1\r\nHost: one.test:8443\r\n\r\n")
			want(t, fmt.Sprint(alpn), fmt.Sprint(res.StatusCode, " ", body), "200 HTTP/1.1 GET one.test:8443 /x")
			log("log", "GET https://one.test:8443/x 203.0.113.7")
			w.end()
		}
		s := newStreams(t, w.tlsTo(a, 8443, "one.test", "h2"))
		want(t, "h2", s.get("one.test:8443", "/", [2]string{}), "200")
		want(t, "h2", s.get("two.test:8443", "/", [2]string{}), "421")
		w.end()
		w.took()
		c := w.at(a, 8443)
		res, _ := raw(t, tls.Client(c, &tls.Config{ServerName: "two.test", InsecureSkipVerify: true}), "GET / HTTP/1.1\r\nHost: two.test\r\n\r\n")
		want(t, "SNI disagrees", res.StatusCode, 421)
		w.took()
	})
	t.Run("lines in TLS", func(t *testing.T) {
		for _, tt := range []struct {
			port uint16
			alpn []string
			say  string
			want string
		}{
			{993, nil, "", "* OK goodbye"},
			{993, nil, "a LOGOUT\r\n", "* OK a LOGOUT\r\ngoodbye"},
			{993, []string{"imap"}, "x", "* OK xgoodbye"}, // a server that chooses none
			{5671, []string{"amqp"}, "AMQP\x00", "amqpAMQP\x00goodbye"},
			{5671, nil, "AMQP\x00", "AMQP\x00goodbye"},
		} {
			c := w.tlsTo(a, tt.port, "one.test", tt.alpn...)
			_, err := io.WriteString(c, tt.say)
			must(t, err)
			must(t, c.Handshake())
			must(t, c.CloseWrite())
			got, err := io.ReadAll(c)
			must(t, err)
			what := fmt.Sprint(tt.port, tt.alpn, tt.say)
			want(t, what, string(got), tt.want)
			log(what, fmt.Sprintf("CONNECT tls://one.test:%d 203.0.113.7", tt.port))
			want(t, what, w.end(), fmt.Sprintf("0 out %d in %d", len(tt.say), len(tt.want)))
		}
	})
	t.Run("no lines in TLS", func(t *testing.T) {
		for _, tt := range []struct {
			what string
			port uint16
			alpn []string
			err  string
			log  string
		}{
			{"denied, by what it asks for", 25, []string{"smtp"}, "access denied", "deny CONNECT tls://one.test:25"},
			{"denied, silent", 25, nil, "reset by peer", "deny CONNECT tls://one.test:25"},
			{"no protocol in common", 5672, []string{"amqp"}, "internal error", "CONNECT tls://one.test:5672 203.0.113.7"},
			{"another one's certificate", 8444, []string{"amqp"}, "internal error", "CONNECT tls://one.test:8444 203.0.113.7"},
			{"another one's certificate, silent", 8444, nil, "reset by peer", "CONNECT tls://one.test:8444 203.0.113.7"},
			{"no TLS there", 22, nil, "reset by peer", "CONNECT tls://one.test:22 203.0.113.7"},
		} {
			_, err := io.ReadAll(w.tlsTo(a, tt.port, "one.test", tt.alpn...))
			if err == nil || !strings.Contains(err.Error(), tt.err) {
				t.Errorf("%s: %v, want %s", tt.what, err, tt.err)
			}
			log(tt.what, tt.log)
			if tt.port != 25 {
				want(t, tt.what, w.end(), "0 out 0 in 0 failed")
			}
		}
	})
}
