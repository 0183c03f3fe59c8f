package wire

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"airlock.dev/airlock"
)

// sockets returns the two ends of a connection.
func sockets(t testing.TB) (a, b *net.UnixConn) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	var all []*net.UnixConn
	for _, fd := range fds {
		unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUFFORCE, 16*MaxMessage)
		f := os.NewFile(uintptr(fd), "peer")
		c, err := net.FileConn(f)
		f.Close()
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, c.(*net.UnixConn))
	}
	return all[0], all[1]
}

func pair(t testing.TB, handle Handler) *Peer {
	a, b := sockets(t)
	client, server := New(a, nil), New(b, handle)
	t.Cleanup(func() { client.Close(); server.Close() })
	return client
}

func TestCalls(t *testing.T) {
	noted := make(chan string, 1)
	p := pair(t, func(ctx context.Context, method string, body []byte, f *os.File) (any, error) {
		switch method {
		case "echo":
			return map[string]string{"got": string(body)}, nil
		case "coded":
			return nil, &airlock.Error{Code: airlock.Exhausted, Field: "x", Message: "too many", Hint: "fewer", Err: errors.New("hidden")}
		case "plain":
			return nil, errors.New("it broke")
		case "file":
			defer f.Close()
			text, err := io.ReadAll(f)
			return string(text), err
		case "wait":
			<-ctx.Done()
			noted <- "canceled"
			return nil, ctx.Err()
		case "note":
			noted <- string(body)
		}
		return nil, nil
	})
	var out map[string]string
	if err := p.Call(t.Context(), "echo", 7, nil, &out); err != nil || out["got"] != "7" {
		t.Errorf("echo: %v, %v", out, err)
	}
	err := p.Call(t.Context(), "coded", nil, nil, nil)
	if e, ok := errors.AsType[*airlock.Error](err); !ok || e.Code != airlock.Exhausted || e.Field != "x" || e.Public() != "too many: fewer" || strings.Contains(err.Error(), "hidden") {
		t.Errorf("a coded error: %v", err)
	}
	if err := p.Call(t.Context(), "plain", nil, nil, nil); airlock.CodeOf(err) != airlock.Internal {
		t.Errorf("a plain error: %v", err)
	}
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	fmt.Fprint(w, "through")
	w.Close()
	var text string
	if err := p.Call(t.Context(), "file", nil, r, &text); err != nil || text != "through" {
		t.Errorf("a descriptor: %q, %v", text, err)
	}
	r.Close()
	if err := p.Note("note", "told"); err != nil || <-noted != `"told"` {
		t.Errorf("a note: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	go func() { time.Sleep(10 * time.Millisecond); cancel() }()
	if err := p.Call(ctx, "wait", nil, nil, nil); !errors.Is(err, context.Canceled) || <-noted != "canceled" {
		t.Errorf("a call that is given up: %v", err)
	}
	if err := p.Call(t.Context(), "echo", strings.Repeat("x", MaxMessage), nil, nil); airlock.CodeOf(err) != airlock.TooLarge {
		t.Errorf("too much: %v", err)
	}
	if err := p.Call(t.Context(), "echo", strings.Repeat("x", MaxMessage-64), nil, nil); airlock.CodeOf(err) == airlock.Unavailable {
		t.Errorf("nearly too much: %v", err)
	}
}

// Many calls at a time are each answered, and a connection that ends ends them.
func TestManyCallsAndTheEnd(t *testing.T) {
	var served atomic.Int64
	a, b := sockets(t)
	hang := make(chan struct{})
	client := New(a, nil)
	server := New(b, func(ctx context.Context, method string, body []byte, _ *os.File) (any, error) {
		if method == "hang" {
			close(hang)
			<-ctx.Done()
			return nil, ctx.Err()
		}
		served.Add(1)
		return bytes.TrimSpace(body), nil
	})
	defer client.Close()
	var all sync.WaitGroup
	for range 500 {
		all.Go(func() {
			if err := client.Call(t.Context(), "one", 1, nil, nil); err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
	if served.Load() != 500 {
		t.Errorf("%d were served", served.Load())
	}
	failed := make(chan error, 1)
	go func() { failed <- client.Call(t.Context(), "hang", nil, nil, nil) }()
	<-hang
	server.Close()
	if err := <-failed; airlock.CodeOf(err) != airlock.Unavailable {
		t.Errorf("a call when the other side ends: %v", err)
	}
	<-client.Done()
	if err := client.Call(t.Context(), "one", 1, nil, nil); airlock.CodeOf(err) != airlock.Unavailable {
		t.Errorf("a call after the end: %v", err)
	}
	if n := len(client.waiting); n != 0 {
		t.Errorf("%d calls are waited for", n)
	}
}

// Whatever the other side sends, nothing panics, and what is out of form ends
// the connection.
func FuzzPackets(f *testing.F) {
	f.Add([]byte{'C', 0, 0, 0, 0, 0, 0, 0, 1, 3, 'o', 'n', 'e', '1'})
	f.Add([]byte{'N', 0, 0, 0, 0, 0, 0, 0, 1, 200})
	f.Add([]byte{'R', 0, 0, 0, 0, 0, 0, 0, 1, '{'})
	f.Add([]byte{'E', 0, 0, 0, 0, 0, 0, 0, 1, '{', '}'})
	f.Add([]byte{'X', 0, 0, 0, 0, 0, 0, 0, 9})
	f.Add([]byte{'?'})
	f.Fuzz(func(t *testing.T, packet []byte) {
		if len(packet) == 0 || len(packet) > MaxMessage {
			return
		}
		a, b := sockets(t)
		defer a.Close()
		p := New(b, func(context.Context, string, []byte, *os.File) (any, error) { return 1, nil })
		defer p.Close()
		if _, err := a.Write(packet); err != nil {
			t.Fatal(err)
		}
		call := []byte{'C', 0, 0, 0, 0, 0, 0, 0, 77, 1, 'x'}
		a.Write(call) // the connection may have ended
		a.SetReadDeadline(time.Now().Add(5 * time.Second))
		buf := make([]byte, 1<<16)
		for {
			n, err := a.Read(buf)
			if errors.Is(err, os.ErrDeadlineExceeded) {
				t.Fatalf("%q: neither an answer nor the end", packet)
			}
			if err != nil || n == 0 || buf[8] == 77 {
				return
			}
		}
	})
}

// A second descriptor, and one where none belongs, end the connection, and
// leave none open.
func TestDescriptorsThatDoNotBelong(t *testing.T) {
	null, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	for _, packet := range [][]byte{{'X', 0, 0, 0, 0, 0, 0, 0, 1}, {'R', 0, 0, 0, 0, 0, 0, 0, 1}} {
		a, b := sockets(t)
		p := New(b, nil)
		if _, _, err := a.WriteMsgUnix(packet, unix.UnixRights(int(null.Fd())), nil); err != nil {
			t.Fatal(err)
		}
		<-p.Done()
		p.Close()
		a.Close()
	}
	a, b := sockets(t)
	p := New(b, func(context.Context, string, []byte, *os.File) (any, error) { return nil, nil })
	call := []byte{'C', 0, 0, 0, 0, 0, 0, 0, 1, 1, 'x'}
	if _, _, err := a.WriteMsgUnix(call, unix.UnixRights(int(null.Fd()), int(null.Fd())), nil); err != nil {
		t.Fatal(err)
	}
	<-p.Done()
	p.Close()
	a.Close()
}

// What the other side did before it heard that the call is given up, its caller
// is told.
func TestAnswerAfterGivingUp(t *testing.T) {
	p := pair(t, func(ctx context.Context, _ string, _ []byte, _ *os.File) (any, error) {
		<-ctx.Done()
		return "done all the same", nil
	})
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	var got string
	if err := p.Call(ctx, "act", nil, nil, &got); err != nil || got != "done all the same" {
		t.Errorf("%q, %v", got, err)
	}
}
