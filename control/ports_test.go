package control_test

import (
	"errors"
	"io"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"airlock.dev/airlock"
	"airlock.dev/airlock/control"
)

// echo dials the port of the fake guest that echoes.
func (h *host) echo(id string) (*control.Guest, net.Conn) {
	h.t.Helper()
	g, err := h.Open(h.t.Context(), id)
	if err != nil {
		h.t.Fatal(err)
	}
	c, err := g.DialPort(h.t.Context(), "public", 7)
	if err != nil {
		h.t.Fatal(err)
	}
	return g, c
}

func TestDialPort(t *testing.T) {
	h := newHost(t)
	sb := h.create(alice)
	g, c := h.echo(sb.ID)
	text := strings.Repeat("words ", 100_000)
	go func() {
		io.WriteString(c, text)
		c.(interface{ CloseWrite() error }).CloseWrite()
	}()
	got, err := io.ReadAll(c)
	if string(got) != text || err != nil {
		t.Errorf("%d bytes of %d, %v", len(got), len(text), err)
	}
	c.Close()
	if _, err := g.DialPort(t.Context(), "public", 8); code(err) != airlock.PortClosed {
		t.Errorf("a closed port: %v", err)
	}
	logs, err := h.Logs(t.Context(), alice, sb.ID)
	if err != nil {
		t.Fatal(err)
	}
	var lines []string
	for _, e := range logs[1:] {
		lines = append(lines, e.Level+" "+e.Message+" "+e.Fields["port"]+" "+e.Fields["error"])
	}
	if got := strings.Join(lines, "; "); got != "info connection opened 7 ; error connection refused 8 port 8 is not open" {
		t.Errorf("log: %s", got)
	}
}

func TestPortDeadlines(t *testing.T) {
	h := newHost(t)
	_, c := h.echo(h.create(alice).ID)
	defer c.Close()
	buf := make([]byte, 5)
	c.SetReadDeadline(time.Now().Add(20 * time.Millisecond))
	if _, err := c.Read(buf); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("late: %v", err)
	}
	c.SetReadDeadline(time.Now().Add(-time.Second))
	if _, err := c.Read(buf); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("past: %v", err)
	}
	c.SetDeadline(time.Time{})
	io.WriteString(c, "hello")
	if _, err := io.ReadFull(c, buf); string(buf) != "hello" || err != nil {
		t.Errorf("after: %q, %v", buf, err)
	}
	// A reader that waits is woken.
	time.AfterFunc(20*time.Millisecond, func() { c.SetReadDeadline(time.Unix(1, 0)) })
	if _, err := c.Read(buf); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("woken: %v", err)
	}
}

func TestPortsAreBounded(t *testing.T) {
	h := newHost(t)
	g, c := h.echo(h.create(alice).ID)
	conns := []net.Conn{c}
	for len(conns) < 128 {
		c, err := g.DialPort(t.Context(), "public", 7)
		if err != nil {
			t.Fatal(len(conns), err)
		}
		conns = append(conns, c)
	}
	if _, err := g.DialPort(t.Context(), "public", 7); code(err) != airlock.Exhausted {
		t.Errorf("one more: %v", err)
	}
	conns[0].Close()
	conns[0].Close() // counts once
	c, err := g.DialPort(t.Context(), "public", 7)
	if err != nil {
		t.Errorf("after a close: %v", err)
	} else {
		conns[0] = c
	}
	if _, err := g.DialPort(t.Context(), "public", 7); code(err) != airlock.Exhausted {
		t.Errorf("and one more: %v", err)
	}
	for _, c := range conns {
		c.Close()
	}
}

func TestPortOfADeadSandbox(t *testing.T) {
	h := newHost(t)
	sb := h.create(alice)
	_, c := h.echo(sb.ID)
	if err := h.Kill(t.Context(), alice, sb.ID); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Read(make([]byte, 1)); code(err) != airlock.Gone {
		t.Errorf("read: %v", err)
	}
	if _, err := c.Write([]byte("x")); code(err) != airlock.Gone {
		t.Errorf("write: %v", err)
	}
	c.Close()
}
