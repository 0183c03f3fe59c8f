// Package guest is what runs inside a sandbox on behalf of its owner: PID 1,
// which starts processes, streams what they write, moves files, keeps the
// memory limit and reaps orphans, all on request of the host over one channel.
//
// It runs next to untrusted code, some of it as root, in the same kernel.
// So it holds no secret, must not know who owns the sandbox or what the host
// is, and promises the host nothing: every limit it keeps is kept again, less
// gently, outside. It must survive whatever the code around it does, because
// its end is the end of the sandbox; all that code can make grow is bounded.
//
// File calls are not made by PID 1 but by one helper process for each user
// (files.go), so that the kernel checks permissions and no race of paths can
// reach more than the user could. Of a large file PID 1 moves the bytes, after
// the helper has opened it (pass.go). Start reading at Run.
package guest

import (
	"context"
	"encoding/json"
	"io"
	"os"
	"os/signal"
	"runtime/debug"
	"sync"
	"syscall"

	"airlock.dev/airlock"
	"airlock.dev/airlock/channel"
	"golang.org/x/sys/unix"
)

// Version is what the guest answers to hello.
const Version = "1"

// Options are the guest's surroundings; the zero value is right inside a sandbox.
type Options struct {
	Etc string // where passwd and group are; "" is /etc
	// Helper is the argv that makes the running program a file helper:
	// home, Etc are appended. nil is {"airlock-guest", "files"}.
	Helper []string
}

const nonblock = unix.O_NONBLOCK | unix.O_NOCTTY | unix.O_CLOEXEC

type guest struct {
	opts     Options
	accounts accounts
	self     int

	// mu guards what follows. It is also held around every fork, wait and
	// signal, so that a pid that is looked up cannot be reaped meanwhile.
	mu       sync.Mutex
	hello    channel.Hello
	execs    map[int]*exec // by pid, until all output is read
	ended    []*exec       // oldest first
	lastMark uint64
	linger   int // pipes that are drained after their exec ended
	helpers  map[string]*helper

	tree tree
	wake chan struct{} // something was started: the watches look again
}

// Run serves the channel until it ends, and returns why. The process must be
// PID 1 or a child subreaper, and own all its children: Run waits for any.
func Run(conn io.ReadWriteCloser, opts Options) error {
	if opts.Etc == "" {
		opts.Etc = "/etc"
	}
	if opts.Helper == nil {
		opts.Helper = []string{"airlock-guest", "files"}
	}
	g := &guest{
		opts: opts, accounts: accounts(opts.Etc), self: os.Getpid(),
		execs: map[int]*exec{}, helpers: map[string]*helper{},
		wake: make(chan struct{}, 1), lastMark: firstMark,
	}
	g.tree.init()
	unix.Umask(0o022)
	// Root inside the sandbox is untrusted too: it may not trace this process.
	unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0)
	if err := reserve(4); err != nil {
		return err
	}
	// The guest shares the sandbox's memory limit: it stays small.
	debug.SetGCPercent(50)

	// Every signal is taken and dropped: to ignore them would be inherited
	// by the programs, and Go's own answer to most is to end the process.
	signals := make(chan os.Signal, 16)
	signal.Notify(signals)
	stop := make(chan struct{})
	defer close(stop)
	defer signal.Stop(signals)
	go func() {
		for {
			g.reap() // signals are merged: each may stand for several children
			select {
			case <-signals:
			case <-stop:
				return
			}
		}
	}()
	go g.watchMemory(stop)
	go g.watchTree(stop)
	return channel.Serve(conn, g.handle)
}

// reserve makes sure that the descriptors below n are taken, so that none of
// ours is among those that a child's are copied over.
func reserve(n int) error {
	for {
		fd, err := unix.Open("/dev/null", unix.O_RDWR|unix.O_CLOEXEC, 0)
		if err != nil {
			return err
		}
		if fd > n {
			return unix.Close(fd)
		}
	}
}

// poke wakes the watches that sleep while nothing runs.
func (g *guest) poke() {
	select {
	case g.wake <- struct{}{}:
	default:
	}
	select {
	case g.tree.wake <- struct{}{}:
	default:
	}
}

// reap collects every child that has ended.
func (g *guest) reap() {
	for {
		var ws syscall.WaitStatus
		g.mu.Lock()
		pid, err := syscall.Wait4(-1, &ws, syscall.WNOHANG, nil)
		if err == syscall.EINTR {
			g.mu.Unlock()
			continue
		}
		if err != nil || pid <= 0 {
			g.mu.Unlock()
			return
		}
		if e := g.execs[pid]; e != nil && !e.exited {
			e.exited = true
			e.status = ws
			close(e.exit)
		} else {
			for _, h := range g.helpers {
				if h.pid == pid {
					h.reaped = true
				}
			}
		}
		g.mu.Unlock()
	}
}

func (g *guest) handle(ctx context.Context, s *channel.Stream, method string, req []byte) error {
	switch method {
	case channel.MethodHello:
		return call(ctx, s, req, g.configure)
	case channel.MethodStart:
		return g.start(ctx, s, req)
	case channel.MethodAttach:
		return g.attach(ctx, s, req)
	case channel.MethodInput:
		return g.input(ctx, s, req)
	case channel.MethodCloseStdin:
		return call(ctx, s, req, g.closeStdin)
	case channel.MethodSignal:
		return call(ctx, s, req, g.signal)
	case channel.MethodResize:
		return call(ctx, s, req, g.resize)
	case channel.MethodProcesses:
		for _, info := range g.processes() {
			if err := channel.SendReply(ctx, s, info); err != nil {
				return err
			}
		}
		return nil
	case channel.MethodDial:
		return dialPort(ctx, s, req)
	case channel.MethodUsage:
		return call(ctx, s, req, g.usage)
	case channel.MethodRead, channel.MethodWrite, channel.MethodStat, channel.MethodMkdir,
		channel.MethodRemove, channel.MethodMove, channel.MethodListDir, channel.MethodCompose, channel.MethodWatch:
		return g.file(ctx, s, method, req)
	}
	return airlock.Errorf(airlock.Unimplemented, "the guest does not know the method %q", method)
}

// call serves a method with one request and one reply.
func call[Req, Reply any](ctx context.Context, s *channel.Stream, body []byte, f func(Req) (Reply, error)) error {
	var req Req
	if err := decode(body, &req); err != nil {
		return err
	}
	reply, err := f(req)
	if err != nil {
		return err
	}
	return channel.SendReply(ctx, s, reply)
}

func decode(body []byte, v any) error {
	if err := json.Unmarshal(body, v); err != nil {
		return airlock.Errorf(airlock.Invalid, "the request is not in the form of its method").Because(err)
	}
	return nil
}

func (g *guest) configure(h channel.Hello) (channel.HelloReply, error) {
	for name, value := range h.Env {
		if err := checkEnv(name, value); err != nil {
			return channel.HelloReply{}, err
		}
	}
	g.mu.Lock()
	g.hello = h
	g.mu.Unlock()
	g.poke()
	return channel.HelloReply{Version: Version}, nil
}
