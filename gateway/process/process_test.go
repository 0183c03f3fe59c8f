package process

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"airlock.dev/airlock/gateway/wire"
)

const childName = "gateway-of-a-test"

// The test's own binary is the child, which tells what it was told.
func TestMain(m *testing.M) {
	if os.Args[0] == childName {
		runChild()
		return
	}
	os.Exit(m.Run())
}

func runChild() {
	conn, err := net.FileConn(os.NewFile(3, "server"))
	if err != nil {
		os.Exit(1)
	}
	var server *wire.Peer
	ready := make(chan struct{})
	server = wire.New(conn.(*net.UnixConn), func(ctx context.Context, method string, body []byte, f *os.File) (any, error) {
		<-ready
		text := method
		var d wire.Door
		if json.Unmarshal(body, &d) == nil && d.Sandbox != "" {
			text += " " + d.Sandbox
		}
		for _, b := range d.Names {
			text += " " + b.Name
		}
		if text == "close hang" {
			unix.Kill(os.Getpid(), unix.SIGSTOP)
		}
		if f != nil {
			said, _ := io.ReadAll(io.LimitReader(f, 5))
			text += " with " + string(said)
			f.Close()
		}
		text += fmt.Sprintf(" as %d", os.Getuid())
		return nil, server.Call(ctx, wire.MethodCross, wire.Attempt{Sandbox: text}, nil, nil)
	})
	close(ready)
	<-server.Done()
}

// told is a Decider that keeps what the child tells.
type told struct {
	mu     sync.Mutex
	all    []string
	broken int
}

func (d *told) Cross(_ context.Context, a wire.Attempt) wire.Verdict {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.all = append(d.all, a.Sandbox)
	return wire.Verdict{}
}
func (d *told) Admit(context.Context, wire.Attempt) wire.Verdict { return wire.Verdict{} }
func (d *told) End(wire.End)                                     {}
func (d *told) Used(wire.Used)                                   {}
func (d *told) Refused(wire.Refused)                             {}
func (d *told) Broken() {
	d.mu.Lock()
	d.broken++
	d.mu.Unlock()
}

func (d *told) has(want string) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.Contains(d.all, want)
}

func (d *told) wait(t *testing.T, want string) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); !d.has(want); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			d.mu.Lock()
			defer d.mu.Unlock()
			t.Fatalf("the child was not told %q:\n%s", want, strings.Join(d.all, "\n"))
		}
	}
}

// A process that is killed is started again and gets all its doors, with what
// was learned of them; one that was dropped it does not get.
func TestDoorsOutliveTheProcess(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("only root runs a process as another user")
	}
	const uid = 0x6ffffffe
	d := &told{}
	g, err := Start(t.Context(), Config{Name: childName, UID: uid, Decider: d, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	door := func(says string) *os.File {
		fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		for range 4 { // one for each process that reads it
			if err := unix.Send(fds[1], []byte(says), 0); err != nil {
				t.Fatal(err)
			}
		}
		unix.Shutdown(fds[1], unix.SHUT_WR)
		t.Cleanup(func() { unix.Close(fds[1]) })
		return os.NewFile(uintptr(fds[0]), "door")
	}
	as := fmt.Sprintf(" as %d", uid)
	d.wait(t, "start"+as)
	for _, id := range []string{"one", "two"} {
		if err := g.Open(t.Context(), wire.Door{Sandbox: id}, door("hello")); err != nil {
			t.Fatal(err)
		}
		d.wait(t, "open "+id+" with hello"+as)
	}
	if _, err := g.handle(t.Context(), wire.MethodBound, []byte(`{"Sandbox":"one","Name":"a.example","Place":7}`), nil); err != nil {
		t.Fatal(err)
	}
	g.Drop("two")
	d.wait(t, "close two"+as)
	before := g.PID()
	if err := unix.Kill(before, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	d.wait(t, "open one a.example with hello"+as)
	d.mu.Lock()
	if n := slices.Index(d.all, "open two with hello"+as); slices.Contains(d.all[n+1:], "open two with hello"+as) {
		t.Error("a door that was dropped was given again")
	}
	if d.broken != 1 {
		t.Errorf("Broken was called %d times", d.broken)
	}
	d.mu.Unlock()
	if g.PID() == before || g.PID() == 0 {
		t.Errorf("the process is %d, and was %d", g.PID(), before)
	}
	pid := g.PID()
	g.Close()
	if err := unix.Kill(pid, 0); err != unix.ESRCH {
		t.Errorf("the process after Close: %v", err)
	}
}

// A process that hangs is ended and started again, and who waits for it goes on.
func TestOneThatHangsIsStartedAgain(t *testing.T) {
	d := &told{}
	g, err := Start(t.Context(), Config{Name: childName, UID: os.Getuid(), Decider: d, Silent: 2 * time.Second, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	defer g.Close()
	open := func(id string) {
		t.Helper()
		null, err := os.Open(os.DevNull)
		if err != nil {
			t.Fatal(err)
		}
		if err := g.Open(t.Context(), wire.Door{Sandbox: id}, null); err != nil {
			t.Fatal(err)
		}
		d.wait(t, fmt.Sprintf("open %s with  as %d", id, os.Getuid()))
	}
	open("hang")
	before := g.PID()
	g.Drop("hang") // it says nothing from here on
	open("next")
	if g.PID() == before {
		t.Error("it is the same process")
	}
}
