// Package isolationtest is the contract of isolation.Driver as tests: one
// suite that every driver passes, the misbehaving fake included. What needs a
// driver that isolates (limits, hostile code) is in hostile.go.
//
// It drives sandboxes through the guest channel only and knows no driver.
package isolationtest

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"airlock.dev/airlock"
	"airlock.dev/airlock/channel"
	"airlock.dev/airlock/isolation"
)

// Harness is how the suite gets at a driver.
type Harness struct {
	Driver isolation.Driver
	// Restart returns a driver as a new server would make it, which knows
	// nothing but what the one before left on the host.
	Restart func(t *testing.T) isolation.Driver
	// Spec returns a valid spec with an id of its own and small limits.
	Spec func() isolation.Spec
	// Left lists what exists on the host for sandboxes of this driver:
	// directories, control groups, processes.
	Left func() []string
	Echo string                            // a command that prints its arguments
	Exit func(code int) (string, []string) // a command that ends with a code
	// Isolates says that the guest is a real one behind a real wall.
	Isolates bool
	// Host gives the hostile cases something to look for on this machine.
	Host Host
}

// epochs are never used twice, as in a real installation.
var epochs = struct {
	sync.Mutex
	last uint64
}{}

func nextEpoch() uint64 {
	epochs.Lock()
	defer epochs.Unlock()
	epochs.last++
	return epochs.last
}

const patience = 60 * time.Second

// box is a sandbox with an open session.
type box struct {
	isolation.Sandbox
	mux  *channel.Mux
	spec isolation.Spec
}

func command(cmd string, args []string) channel.StartRequest {
	return channel.StartRequest{Cmd: cmd, Args: args}
}

func (h Harness) create(t *testing.T, change func(*isolation.Spec), hello func(*channel.Hello)) *box {
	t.Helper()
	spec := h.Spec()
	if change != nil {
		change(&spec)
	}
	sb, err := h.Driver.Create(t.Context(), spec)
	if err != nil {
		t.Fatalf("create: %v", err)
	}
	t.Cleanup(func() {
		if err := sb.Destroy(context.Background()); err != nil {
			t.Errorf("destroy: %v", err)
		}
	})
	return &box{sb, greet(t, sb, spec, hello), spec}
}

func greet(t *testing.T, sb isolation.Sandbox, spec isolation.Spec, change func(*channel.Hello)) *channel.Mux {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	conn, err := sb.Dial(ctx)
	if err != nil {
		t.Fatalf("dial: %v", err)
	}
	mux, err := channel.Dial(ctx, conn, nextEpoch())
	if err != nil {
		t.Fatalf("open a session: %v", err)
	}
	t.Cleanup(func() { mux.Close() })
	hello := channel.Hello{SandboxID: spec.ID, MemoryBytes: int64(spec.Limits.MemoryMB) << 20, Processes: spec.Limits.Processes, OpenFiles: spec.Limits.OpenFiles}
	if change != nil {
		change(&hello)
	}
	if _, err := channel.Call[channel.HelloReply](ctx, mux, channel.MethodHello, hello); err != nil {
		t.Fatalf("hello: %v", err)
	}
	return mux
}

type result struct {
	out, err string
	pid      uint32
	end      channel.Ended
}

// exec runs a command to its end.
func exec(t *testing.T, mux *channel.Mux, req channel.StartRequest) result {
	t.Helper()
	r, err := tryExec(t.Context(), mux, req, "")
	if err != nil {
		t.Fatalf("%s %.80q: %v", req.Cmd, req.Args, err)
	}
	return r
}

func tryExec(ctx context.Context, mux *channel.Mux, req channel.StartRequest, stdin string) (result, error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	var r result
	s, err := mux.Open(ctx, channel.MethodStart, req)
	if err != nil {
		return r, err
	}
	defer s.Close()
	var out, errs bytes.Buffer
	for {
		tag, body, err := s.Recv(ctx)
		if err != nil {
			if errors.Is(err, io.EOF) {
				err = io.ErrUnexpectedEOF
			}
			return r, err
		}
		switch tag {
		case channel.TagStarted:
			var st channel.Started
			if err := json.Unmarshal(body, &st); err != nil {
				return r, err
			}
			r.pid = st.PID
			if req.Stdin {
				if err := input(ctx, mux, st.PID, stdin); err != nil {
					return r, err
				}
			}
		case channel.TagStdout, channel.TagPTY:
			out.Write(body)
		case channel.TagStderr:
			errs.Write(body)
		case channel.TagEnded:
			err := json.Unmarshal(body, &r.end)
			r.out, r.err = out.String(), errs.String()
			return r, err
		}
	}
}

func input(ctx context.Context, mux *channel.Mux, pid uint32, text string) error {
	s, err := mux.Open(ctx, channel.MethodInput, channel.ProcessRef{PID: pid})
	if err != nil {
		return err
	}
	defer s.Close()
	if _, err := io.WriteString(s.Writer(ctx, channel.TagInput), text); err != nil {
		return err
	}
	if err := s.CloseSend(); err != nil {
		return err
	}
	if _, err := channel.RecvReply[channel.Empty](ctx, s, channel.MethodInput); err != nil {
		return err
	}
	_, err = channel.Call[channel.Empty](ctx, mux, channel.MethodCloseStdin, channel.ProcessRef{PID: pid})
	return err
}

// Run runs the suite.
func Run(t *testing.T, h Harness) {
	before := h.Left()
	t.Run("life", func(t *testing.T) { life(t, h) })
	if h.Isolates {
		t.Run("inside", func(t *testing.T) { inside(t, h) })
		t.Run("limits", func(t *testing.T) { limits(t, h) })
		t.Run("network", func(t *testing.T) { network(t, h) })
		t.Run("hostile", func(t *testing.T) { hostile(t, h) })
	}
	if after := h.Left(); !slices.Equal(before, after) {
		t.Errorf("left on the host after the suite: %q, before it: %q", after, before)
	}
}

func life(t *testing.T, h Harness) {
	t.Run("the guest answers and runs a command", func(t *testing.T) {
		b := h.create(t, nil, nil)
		if r := exec(t, b.mux, channel.StartRequest{Cmd: h.Echo, Args: []string{"hello"}}); r.out != "hello\n" || r.end.ExitCode != 0 || r.end.Outcome != airlock.Exited {
			t.Errorf("got %+v", r)
		}
	})
	t.Run("exit codes pass through", func(t *testing.T) {
		b := h.create(t, nil, nil)
		for _, code := range []int{0, 1, 7, 255} {
			if r := exec(t, b.mux, command(h.Exit(code))); r.end.ExitCode != code {
				t.Errorf("exit %d: got %+v", code, r.end)
			}
		}
	})
	for _, id := range []string{"", "A", "a-b", "../x", "a/b", "a b", "ä", strings.Repeat("a", 33)} {
		t.Run(fmt.Sprintf("the id %q is refused", id), func(t *testing.T) {
			spec := h.Spec()
			spec.ID = id
			refused(t, h, spec, airlock.Invalid)
		})
	}
	for name, change := range map[string]func(*airlock.Limits){
		"no memory":        func(l *airlock.Limits) { l.MemoryMB = 0 },
		"negative memory":  func(l *airlock.Limits) { l.MemoryMB = -1 },
		"huge disk":        func(l *airlock.Limits) { l.DiskMB = 1 << 40 },
		"no processor":     func(l *airlock.Limits) { l.CPUs = 0 },
		"one process":      func(l *airlock.Limits) { l.Processes = 1 },
		"too many files":   func(l *airlock.Limits) { l.OpenFiles = 1 << 30 },
		"negative outputs": func(l *airlock.Limits) { l.OutputBytes = -5 },
	} {
		t.Run("limits are refused: "+name, func(t *testing.T) {
			spec := h.Spec()
			change(&spec.Limits)
			refused(t, h, spec, airlock.Invalid)
		})
	}
	t.Run("an image that is not there leaves nothing", func(t *testing.T) {
		spec := h.Spec()
		spec.RootFS = "/nonexistent/rootfs"
		refused(t, h, spec, airlock.Internal)
	})
	t.Run("an id in use is refused and the first lives", func(t *testing.T) {
		b := h.create(t, nil, nil)
		if _, err := h.Driver.Create(t.Context(), b.spec); airlock.CodeOf(err) != airlock.Exists {
			t.Fatalf("got %v", err)
		}
		if r := exec(t, b.mux, channel.StartRequest{Cmd: h.Echo, Args: []string{"still"}}); r.out != "still\n" {
			t.Errorf("got %+v", r)
		}
	})
	t.Run("an id can be used again after the end", func(t *testing.T) {
		b := h.create(t, nil, nil)
		if err := b.Destroy(t.Context()); err != nil {
			t.Fatal(err)
		}
		h.create(t, func(s *isolation.Spec) { s.ID = b.spec.ID }, nil)
	})
	t.Run("a canceled create leaves nothing", func(t *testing.T) {
		before := h.Left()
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if _, err := h.Driver.Create(ctx, h.Spec()); !errors.Is(err, context.Canceled) {
			t.Errorf("got %v", err)
		}
		same(t, h, before)
	})
	t.Run("destroy can be called again and at once", func(t *testing.T) {
		before := h.Left()
		b := h.create(t, nil, nil)
		var wg sync.WaitGroup
		for range 4 {
			wg.Go(func() {
				if err := b.Destroy(context.Background()); err != nil {
					t.Errorf("destroy: %v", err)
				}
			})
		}
		wg.Wait()
		same(t, h, before)
	})
	t.Run("the end closes the session and says why", func(t *testing.T) {
		b := h.create(t, nil, nil)
		if err := b.Destroy(t.Context()); err != nil {
			t.Fatal(err)
		}
		ended(t, b.mux)
		exit, err := b.Wait(t.Context())
		if err != nil || exit.Outcome != airlock.SandboxKilled {
			t.Errorf("wait: %+v, %v", exit, err)
		}
		if _, err := b.Stats(t.Context()); airlock.CodeOf(err) != airlock.Gone {
			t.Errorf("stats after the end: %v", err)
		}
		if _, err := b.Dial(t.Context()); airlock.CodeOf(err) != airlock.Gone {
			t.Errorf("dial after the end: %v", err)
		}
	})
	t.Run("wait obeys its context", func(t *testing.T) {
		b := h.create(t, nil, nil)
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
		defer cancel()
		if _, err := b.Wait(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("got %v", err)
		}
	})
	t.Run("a new session takes the place of the old", func(t *testing.T) {
		b := h.create(t, nil, nil)
		mux := greet(t, b.Sandbox, b.spec, nil)
		if r := exec(t, mux, channel.StartRequest{Cmd: h.Echo, Args: []string{"again"}}); r.out != "again\n" {
			t.Errorf("got %+v", r)
		}
	})
	t.Run("hello may be said again", func(t *testing.T) {
		b := h.create(t, nil, nil)
		for range 3 {
			if _, err := channel.Call[channel.HelloReply](t.Context(), b.mux, channel.MethodHello, channel.Hello{SandboxID: b.spec.ID}); err != nil {
				t.Fatal(err)
			}
		}
	})
	t.Run("an unknown method is refused and the session lives", func(t *testing.T) {
		b := h.create(t, nil, nil)
		if _, err := channel.Call[channel.Empty](t.Context(), b.mux, "no.such", channel.Empty{}); airlock.CodeOf(err) != airlock.Unimplemented {
			t.Errorf("got %v", err)
		}
		exec(t, b.mux, channel.StartRequest{Cmd: h.Echo})
	})
	t.Run("a restarted server finds it", func(t *testing.T) {
		b := h.create(t, nil, nil)
		b.mux.Close() // as the end of its process does
		d := h.Restart(t)
		sb, err := d.Recover(t.Context(), b.spec.ID)
		if err != nil {
			t.Fatal(err)
		}
		if sb.ID() != b.spec.ID {
			t.Errorf("id %q", sb.ID())
		}
		mux := greet(t, sb, b.spec, nil)
		if r := exec(t, mux, channel.StartRequest{Cmd: h.Echo, Args: []string{"found"}}); r.out != "found\n" {
			t.Errorf("got %+v", r)
		}
		if err := sb.Destroy(t.Context()); err != nil {
			t.Fatal(err)
		}
		if exit, err := sb.Wait(t.Context()); err != nil || exit.Outcome != airlock.SandboxKilled {
			t.Errorf("wait: %+v, %v", exit, err)
		}
	})
	t.Run("what ended is not found again", func(t *testing.T) {
		b := h.create(t, nil, nil)
		if err := b.Destroy(t.Context()); err != nil {
			t.Fatal(err)
		}
		for _, id := range []string{b.spec.ID, "neverwas"} {
			if _, err := h.Restart(t).Recover(t.Context(), id); airlock.CodeOf(err) != airlock.NotFound {
				t.Errorf("recover %s: %v", id, err)
			}
		}
	})
	t.Run("a sweep removes all but the kept", func(t *testing.T) {
		before := h.Left()
		kept, lost := h.create(t, nil, nil), h.create(t, nil, nil)
		kept.mux.Close()
		d := h.Restart(t)
		if _, err := d.Recover(t.Context(), kept.spec.ID); err != nil {
			t.Fatal(err)
		}
		keep := func(id string) bool { return id == kept.spec.ID }
		swept, err := d.Sweep(t.Context(), keep)
		if err != nil || !slices.Equal(swept, []string{lost.spec.ID}) {
			t.Fatalf("swept %q, %v", swept, err)
		}
		ended(t, lost.mux)
		found, err := d.Recover(t.Context(), kept.spec.ID)
		if err != nil {
			t.Fatal(err)
		}
		mux := greet(t, found, kept.spec, nil)
		exec(t, mux, channel.StartRequest{Cmd: h.Echo})
		if swept, err = d.Sweep(t.Context(), keep); err != nil || len(swept) != 0 {
			t.Errorf("the second sweep: %q, %v", swept, err)
		}
		if _, err = d.Sweep(t.Context(), func(string) bool { return false }); err != nil {
			t.Error(err)
		}
		same(t, h, before)
	})
	t.Run("stats are measured", func(t *testing.T) {
		b := h.create(t, nil, nil)
		exec(t, b.mux, channel.StartRequest{Cmd: h.Echo})
		st, err := b.Stats(t.Context())
		if err != nil || st.MemoryBytes <= 0 || st.CPUSeconds <= 0 {
			t.Errorf("got %+v, %v", st, err)
		}
	})
	t.Run("many at once", func(t *testing.T) {
		before := h.Left()
		var wg sync.WaitGroup
		for i := range 8 {
			wg.Go(func() {
				spec := h.Spec()
				sb, err := h.Driver.Create(t.Context(), spec)
				if err != nil {
					t.Errorf("create: %v", err)
					return
				}
				mux := greet(t, sb, spec, nil)
				word := fmt.Sprint("word", i)
				if r, err := tryExec(t.Context(), mux, channel.StartRequest{Cmd: h.Echo, Args: []string{word}}, ""); err != nil || r.out != word+"\n" {
					t.Errorf("got %+v, %v", r, err)
				}
				if err := sb.Destroy(t.Context()); err != nil {
					t.Errorf("destroy: %v", err)
				}
			})
		}
		wg.Wait()
		same(t, h, before)
	})
}

func refused(t *testing.T, h Harness, spec isolation.Spec, code airlock.Code) {
	t.Helper()
	before := h.Left()
	if _, err := h.Driver.Create(t.Context(), spec); airlock.CodeOf(err) != code {
		t.Errorf("got %v, want code %s", err, code)
	}
	same(t, h, before)
}

func same(t *testing.T, h Harness, before []string) {
	t.Helper()
	if after := h.Left(); !slices.Equal(before, after) {
		t.Errorf("on the host: %q, before: %q", after, before)
	}
}

func ended(t *testing.T, mux *channel.Mux) {
	t.Helper()
	select {
	case <-mux.Done():
	case <-time.After(patience):
		t.Fatal("the session goes on")
	}
}
