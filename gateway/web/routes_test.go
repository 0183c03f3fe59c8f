package web

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
)

// several is a Router of hosts with several addresses, of which those that end
// with 0 do not connect.
type several struct {
	*world
	addrs atomic.Pointer[[]string]
}

func (s *several) set(addrs ...string) { s.addrs.Store(&addrs) }

func (s *several) Routes(_ context.Context, scheme, host string, port uint16) (all []Route, _ error) {
	for _, a := range *s.addrs.Load() {
		all = append(all, Route{Scheme: "forged", Host: "forged.test", Port: 1, IP: netip.MustParseAddr(a), Class: "public"})
	}
	return all, nil
}

func (s *several) Connect(ctx context.Context, r Route) (net.Conn, error) {
	if r.Class != "public" || strings.HasSuffix(r.IP.String(), "0") {
		return nil, syscall.ECONNREFUSED
	}
	return s.world.Connect(ctx, r)
}

// What does not connect is tried at the next address, which is decided by
// itself; nothing is sent twice.
func TestNextAddress(t *testing.T) {
	w := newWorld(t)
	a := w.name("one.test", map[uint16]string{80: w.upstream(echo, false, ""), 443: w.upstream(echo, true, "one.test"), 22: banner(t)})
	w.modes["one.test:22"] = TCP
	router := &several{world: w}
	w.cfg.Router = router
	w.deny = func(r Request) error {
		want(t, "class", r.Class, "public")
		if r.IP.String() == "203.0.113.66" {
			return &Denied{Reason: "no"}
		}
		return nil
	}
	w.open()
	const (
		dead1, dead2, dead3, live, denied = "203.0.113.10", "203.0.113.20", "203.0.113.30", "203.0.113.7", "203.0.113.66"
	)
	post := func(status int) {
		t.Helper()
		c := w.tlsTo(a, 443, "one.test")
		r := bufio.NewReader(c)
		for range 2 {
			fmt.Fprint(c, "POST /p HTTP/1.1\r\nHost: one.test\r\nContent-Length: 5\r\n\r\nhello")
			res, body := answer(t, r)
			want(t, "status", res.StatusCode, status)
			if status == 200 {
				want(t, "body", body, "HTTP/1.1 POST one.test /p hello")
			}
		}
		c.Close()
	}
	log := func(what string, wanted ...string) {
		t.Helper()
		want(t, what, lines(w.took()...), lines(wanted...))
	}
	const crossed = "POST https://one.test:443/p "

	router.set(dead1, dead2, live)
	post(200) // the second request knows which one connects
	log("two are dead", crossed+dead1, crossed+dead2, crossed+live, crossed+live)
	for _, end := range []string{"0 out 0 in 0 failed", "0 out 0 in 0 failed", "200 out 5 in 31", "200 out 5 in 31"} {
		want(t, "end", w.end(), end)
	}

	router.set(dead1, dead2, dead3, live)
	post(502)
	log("enough was tried", crossed+dead1, crossed+dead2, crossed+dead3, crossed+dead3, crossed+dead1, crossed+dead2)
	for _, end := range []string{"0", "0", "502", "0", "0", "502"} {
		want(t, "end", w.end(), end+" out 0 in 0 failed")
	}

	router.set(dead1, denied, live)
	post(403)
	log("the next one is denied", crossed+dead1, "deny POST https://one.test:443/p", "deny POST https://one.test:443/p")
	w.end()

	router.set()
	post(502)
	log("no address")

	const raw = "CONNECT tcp://one.test:22 "
	router.set(dead1, live)
	c := w.at(a, 22)
	line, err := bufio.NewReader(c).ReadString('\n')
	must(t, err)
	want(t, "banner", line, "SSH-2.0-test\r\n")
	log("raw", raw+dead1, raw+live)
	want(t, "end", w.end(), "0 out 0 in 0 failed")
	c.Close()
	w.end()
	for _, addrs := range [][]string{{dead1, dead2}, {dead1, denied, live}} {
		router.set(addrs...)
		if _, err := io.ReadAll(w.at(a, 22)); !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("%v: %v, want a reset", addrs, err)
		}
	}
	log("raw, dead or denied", raw+dead1, raw+dead2, raw+dead1, "deny CONNECT tcp://one.test:22")
}
