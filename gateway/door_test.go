package gateway

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"airlock.dev/airlock"
	"airlock.dev/airlock/gateway/inject"
	"airlock.dev/airlock/gateway/web"
	"airlock.dev/airlock/gateway/wire"
)

func TestRules(t *testing.T) {
	r := rules{
		{Host: "*.com", Headers: map[string]string{"A": "com"}},
		{Host: "*.example.com", Headers: map[string]string{"A": "below"}},
		{Host: "a.example.com", Headers: map[string]string{"A": "own"}},
		{Host: "none.example.com"},
	}
	for host, want := range map[string]string{
		"a.example.com": "own", "b.example.com": "below", "c.b.example.com": "below", "example.com": "com", "xexample.com": "com",
		"none.example.com": "", "com": "", "example.org": "", ".com": "", "": "", "b.a.example.com": "below",
	} {
		got := ""
		if rule := r.of(host); rule != nil {
			got = rule.Headers["A"]
		}
		if got != want {
			t.Errorf("%q has the rule %q, want %q", host, got, want)
		}
	}
}

// waits is a permit's stop that tells when it was called.
func waits(p *permit) chan struct{} {
	stopped := make(chan struct{}, 2)
	p.OnRevoke(func(*web.Denied) { stopped <- struct{}{} })
	return stopped
}

func within(t *testing.T, what string, c chan struct{}) {
	t.Helper()
	select {
	case <-c:
	case <-time.After(10 * time.Second):
		t.Fatalf("%s is not stopped", what)
	}
}

func TestRevoke(t *testing.T) {
	d := &door{}
	begin := func(event uint64) *permit {
		p := &permit{d: d, event: event}
		d.crossings.begin()
		d.crossings.began(p, true)
		return p
	}
	first, second := begin(1), begin(2)
	stopped, not := waits(first), waits(second)
	d.crossings.revoke([]uint64{1, 7})
	within(t, "the first", stopped)
	d.crossings.revoke([]uint64{1}) // once more changes nothing

	// What is revoked before it is known to have begun begins revoked.
	d.crossings.begin()
	d.crossings.begin()
	d.crossings.revoke([]uint64{3})
	d.crossings.began(&permit{d: d}, false)
	third := &permit{d: d, event: 3}
	d.crossings.began(third, true)
	within(t, "the third", waits(third))

	// Numbers of what is over are not kept.
	if d.crossings.revoke([]uint64{8, 9}); d.crossings.early != nil {
		t.Errorf("kept: %v", d.crossings.early)
	}
	// One that is revoked between its permit and its begin.
	fourth := begin(4)
	d.crossings.revoke([]uint64{4})
	within(t, "the fourth", waits(fourth))

	if len(not) != 0 || len(stopped) != 0 {
		t.Error("more is stopped than was revoked")
	}
	if open := slices.Sorted(maps.Keys(d.crossings.open)); !slices.Equal(open, []uint64{1, 2, 3, 4}) {
		t.Errorf("open: %v", open)
	}
}

func TestRevokeWhileMoreBegin(t *testing.T) {
	d := &door{}
	const many = 500
	var all sync.WaitGroup
	revoked := make(chan struct{}, many)
	for event := range uint64(many) {
		d.crossings.begin()
		all.Go(func() {
			p := &permit{d: d, event: event}
			d.crossings.began(p, true)
			p.OnRevoke(func(*web.Denied) { revoked <- struct{}{} })
		})
		all.Go(func() { d.crossings.revoke([]uint64{event}) })
	}
	all.Wait()
	for range many {
		within(t, "one of many", revoked)
	}
}

func TestSetHeaders(t *testing.T) {
	r := rules{{Host: "a.example", Headers: map[string]string{"Authorization": "ours", "X-New": "1", "Range": "bytes=0-3", "Accept-Encoding": "gzip"}}}
	for _, c := range []struct{ scheme, host, want string }{
		{"https", "a.example", "ours"}, {"http", "a.example", "mine"}, {"https", "b.example", "mine"},
	} {
		in, err := http.NewRequest("GET", c.scheme+"://x/", nil)
		if err != nil {
			t.Fatal(err)
		}
		in.Header.Set("Authorization", "mine")
		in.Trailer = http.Header{"Later": nil}
		out := r.set(in, web.Request{Scheme: c.scheme, Host: c.host})
		if got := out.Header.Get("Authorization"); got != c.want {
			t.Errorf("%s://%s gets %q, want %q", c.scheme, c.host, got, c.want)
		}
		if out.Header.Get("Range") != "" || out.Header.Get("Accept-Encoding") != "" {
			t.Errorf("a rule says how it is answered: %v", out.Header)
		}
		in.Trailer.Set("Later", "1")
		if out.Trailer.Get("Later") != "1" {
			t.Error("its trailer is another one")
		}
		if in.Header.Get("Authorization") != "mine" || in.Header.Get("X-New") != "" {
			t.Error("the sandbox's own request is changed")
		}
	}
}

// Whatever a sandbox asks for, the server can be asked about it: what is denied
// because it is too long to ask would not be recorded.
func TestLongAttempts(t *testing.T) {
	const most = 68 << 10 // of a request's head, with what net/http reads beyond its limit
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	var peers []*wire.Peer
	for _, fd := range fds {
		unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUFFORCE, 4*wire.MaxMessage)
		conn, err := socket(os.NewFile(uintptr(fd), "peer"))
		if err != nil {
			t.Fatal(err)
		}
		peer := wire.New(conn, func(_ context.Context, _ string, body []byte, _ *os.File) (any, error) {
			var a wire.Attempt
			if err := json.Unmarshal(body, &a); err != nil {
				return nil, err
			}
			return wire.Verdict{Permit: true, Reason: fmt.Sprint(len(a.Path), " ", len(a.Query))}, nil
		})
		defer peer.Close()
		peers = append(peers, peer)
	}
	d := &door{g: &gateway{server: peers[0]}}
	for _, c := range []struct {
		text      string
		path      bool
		wantAsked string
	}{
		{"&", true, "69632 0"}, {"<", true, "69632 0"}, {`"`, true, "69632 0"}, {"\u2028", true, "69630 0"},
		{"&", false, "0 69632"}, {"\xff", false, "0 208896"}, {"é", false, "0 208896"},
	} {
		r := web.Request{Scheme: "https", Host: strings.Repeat("a.", 126) + "a"}
		if long := strings.Repeat(c.text, most/len(c.text)); c.path {
			r.Path = long
		} else {
			r.RawQuery = long
		}
		v, err := d.ask(t.Context(), wire.MethodCross, d.attempt(r))
		if err != nil || v.Reason != c.wantAsked {
			t.Errorf("%q, path %v: %v, asked with %q, want %q", c.text, c.path, err, v.Reason, c.wantAsked)
		}
	}
}

// What a door could not be told is an error: else a secret that was taken away
// would go on to be put in.
func TestSetFails(t *testing.T) {
	secrets, err := inject.New(inject.Config{Use: func(context.Context, inject.Use) error { return nil }, Refused: func(context.Context, inject.Use, *web.Denied) {}})
	if err != nil {
		t.Fatal(err)
	}
	g := &gateway{start: &wire.Start{}}
	g.doors = map[string]*door{"i1": {g: g, secrets: secrets}}
	if err := g.set(wire.Door{Sandbox: "i1", Secrets: []inject.Secret{{Name: "token"}}}); airlock.CodeOf(err) != airlock.Invalid {
		t.Errorf("a secret that is none: %v", err)
	}
}
