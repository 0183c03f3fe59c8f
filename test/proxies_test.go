package test

import (
	"bufio"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
)

// asked remembers what proxies of a test were asked for, by the user who asked.
type asked struct {
	mu  sync.Mutex
	log map[string][]string
}

func (a *asked) note(user, to string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.log == nil {
		a.log = map[string][]string{}
	}
	a.log[user] = append(a.log[user], to)
}

// by returns and forgets what a user asked for, each once and sorted.
func (a *asked) by(user string) []string {
	a.mu.Lock()
	defer a.mu.Unlock()
	all := a.log[user]
	delete(a.log, user)
	slices.Sort(all)
	return slices.Compact(all)
}

// ServeHTTP tells and forgets it, for suites in other languages.
func (a *asked) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	json.NewEncoder(w).Encode(append([]string{}, a.by(r.URL.Query().Get("user"))...))
}

// joined passes bytes on both ways until both are at their end. r is what is
// left to read of a.
func joined(a, b net.Conn, r io.Reader) {
	done := make(chan bool)
	half := func(to net.Conn, from io.Reader) {
		io.Copy(to, from)
		if c, ok := to.(interface{ CloseWrite() error }); ok {
			c.CloseWrite()
		}
	}
	go func() {
		half(b, r)
		close(done)
	}()
	half(a, b)
	<-done
	a.Close()
	b.Close()
}

// proxying serves each connection to l until the test ends.
func proxying(t *testing.T, l net.Listener, serve func(net.Conn)) string {
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				serve(c)
			}()
		}
	}()
	return l.Addr().String()
}

// socksProxy is a SOCKS5 proxy for who has the password.
func socksProxy(t *testing.T, l net.Listener, password string, a *asked) string {
	return proxying(t, l, func(c net.Conn) {
		r := bufio.NewReader(c)
		read := func(n int) []byte {
			b := make([]byte, n)
			io.ReadFull(r, b)
			return b
		}
		if head := read(2); head[0] != 5 || !slices.Contains(read(int(head[1])), 2) {
			c.Write([]byte{5, 0xff})
			return
		}
		c.Write([]byte{5, 2})
		read(1)
		user := string(read(int(read(1)[0])))
		if got := string(read(int(read(1)[0]))); got != password {
			a.note(user, "a wrong password")
			c.Write([]byte{1, 1})
			return
		}
		c.Write([]byte{1, 0})
		var host string
		switch read(4)[3] {
		case 1:
			host = netip.AddrFrom4([4]byte(read(4))).String()
		case 3:
			host = string(read(int(read(1)[0])))
		case 4:
			host = netip.AddrFrom16([16]byte(read(16))).String()
		}
		to := net.JoinHostPort(host, strconv.Itoa(int(binary.BigEndian.Uint16(read(2)))))
		a.note(user, to)
		up, err := net.Dial("tcp", to)
		if err != nil {
			c.Write([]byte{5, 5, 0, 1, 0, 0, 0, 0, 0, 0})
			return
		}
		c.Write([]byte{5, 0, 0, 1, 0, 0, 0, 0, 0, 0})
		joined(c, up, r)
	})
}

// connectProxy is an HTTP proxy that knows CONNECT, for who has the password.
func connectProxy(t *testing.T, l net.Listener, password string, a *asked) string {
	return proxying(t, l, func(c net.Conn) {
		r := bufio.NewReader(c)
		req, err := http.ReadRequest(r)
		if err != nil {
			return
		}
		answer := func(status int) {
			fmt.Fprintf(c, "HTTP/1.1 %d %s\r\nContent-Length: 0\r\n\r\n", status, http.StatusText(status))
		}
		user, got, _ := (&http.Request{Header: http.Header{"Authorization": req.Header["Proxy-Authorization"]}}).BasicAuth()
		switch {
		case got != password:
			a.note(user, "a wrong password")
			answer(http.StatusProxyAuthRequired)
			return
		case req.Method != http.MethodConnect:
			a.note(user, req.Method)
			answer(http.StatusMethodNotAllowed)
			return
		}
		a.note(user, req.RequestURI)
		up, err := net.Dial("tcp", req.RequestURI)
		if err != nil {
			answer(http.StatusBadGateway)
			return
		}
		io.WriteString(c, "HTTP/1.1 200 OK\r\n\r\n")
		joined(c, up, r)
	})
}

// listening is a listener at an address.
func listening(t *testing.T, at string) net.Listener {
	t.Helper()
	l, err := net.Listen("tcp", at)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// deadEnd is the address of a port at which nothing listens.
func deadEnd(t *testing.T, host string) string {
	l := listening(t, net.JoinHostPort(host, "0"))
	l.Close()
	return strings.Clone(l.Addr().String())
}
