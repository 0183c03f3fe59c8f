// Package process runs the gateway as the server sees it: a child process of
// another user, which is started again when it ends and is given its doors
// anew. What it asks is answered by a Decider.
//
// It knows nothing of what crosses. Start reading at Start.
package process

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"runtime"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"airlock.dev/airlock"
	"airlock.dev/airlock/gateway/door"
	"airlock.dev/airlock/gateway/wire"
)

// Decider decides and records what sandboxes try.
type Decider interface {
	Admit(ctx context.Context, a wire.Attempt) wire.Verdict
	Cross(ctx context.Context, a wire.Attempt) wire.Verdict
	End(e wire.End)
	// Used tells how much of its bytes a sandbox has used, and Refused how much
	// was refused for a budget and not asked about.
	Used(u wire.Used)
	Refused(r wire.Refused)
	// Broken says that the gateway ended: nothing that it was permitted goes on.
	Broken()
}

// Keeper keeps descriptors while servers come and go.
type Keeper interface {
	// Hold keeps a duplicate of f under a name, in place of one before.
	Hold(name string, f *os.File) error
	// Take returns a duplicate of what is held under a name, or nil.
	Take(name string) *os.File
	// Drop closes it.
	Drop(name string)
}

// flowsName is what a door's list of flows is held under.
func flowsName(sandbox string) string { return "flows/" + sandbox }

// Config says how the process is run.
type Config struct {
	Name    string // argv[0], by which this binary knows what it is
	UID     int    // of nobody else on this machine; the group is the same
	Env     []string
	Stderr  *os.File
	Start   wire.Start
	Decider Decider
	Keeper  Keeper // of the lists of flows; nil: they end with this server
	// Silent is how long it may give no sign of life before it is started again; 20 s.
	Silent time.Duration
	Log    *slog.Logger
}

// Gateway is the process. Its methods may be called concurrently.
type Gateway struct {
	cfg    Config
	cancel context.CancelFunc
	done   chan struct{}

	mu    sync.Mutex
	peer  *wire.Peer // nil while there is no process
	pid   int
	doors map[string]*held
}

// held is a door that the process has, or will have when it is there.
type held struct {
	mu    sync.Mutex // what is told of one door is told in order
	file  *os.File
	flows *os.File // the list of its flows, which each process goes on with
	door  wire.Door
	bytes int // of its names
	gone  bool
}

// namesMost and namesBytes bound what is remembered of a door's names, so that
// it fits in a message.
const (
	namesMost  = 1000
	namesBytes = wire.MaxMessage / 8
)

// bound remembers that a sandbox was given addresses of a name.
func (h *held) bound(b wire.Binding) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.door.Names = append(h.door.Names, b)
	h.bytes += len(b.Name) + 32
	for len(h.door.Names) > namesMost || h.bytes > namesBytes {
		h.bytes -= len(h.door.Names[0].Name) + 32
		h.door.Names = h.door.Names[1:]
	}
}

// used remembers how many bytes a sandbox has used; the next process goes on
// from there.
func (h *held) used(n int64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.door.Used = max(h.door.Used, n)
}

// callTimeout is for what the process does at once.
const callTimeout = 10 * time.Second

// silentMost is how long the process may give no sign of life, if Config does not
// say. Then it is ended and started again: while it hangs no sandbox can be made,
// and all are without a network.
const silentMost = 20 * time.Second

// restartWait grows to restartMost while the process does not stay.
const (
	restartWait = 50 * time.Millisecond
	restartMost = 5 * time.Second
)

// Start starts the process and returns when it can serve doors.
func Start(ctx context.Context, cfg Config) (*Gateway, error) {
	if cfg.Silent == 0 {
		cfg.Silent = silentMost
	}
	g := &Gateway{cfg: cfg, doors: map[string]*held{}, done: make(chan struct{})}
	running, err := g.spawn(ctx)
	if err != nil {
		return nil, fmt.Errorf("start the gateway: %w", err)
	}
	life, cancel := context.WithCancel(context.Background())
	g.cancel = cancel
	go g.supervise(life, running)
	return g, nil
}

// child is one life of the process.
type child struct {
	peer *wire.Peer
	end  chan error // one value, when the process has ended
	kill func()
}

// spawn starts a process and tells it how to begin.
func (g *Gateway) spawn(ctx context.Context) (*child, error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("make its socket: %w", err)
	}
	for _, fd := range fds {
		// The default would do for one message; the privilege is at hand.
		unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUFFORCE, 16*wire.MaxMessage)
	}
	ours, theirs := os.NewFile(uintptr(fds[0]), "gateway"), os.NewFile(uintptr(fds[1]), "server")
	defer theirs.Close()
	conn, err := net.FileConn(ours)
	ours.Close()
	if err != nil {
		return nil, fmt.Errorf("make its socket: %w", err)
	}
	cmd := exec.Command("/proc/self/exe")
	cmd.Args = []string{g.cfg.Name}
	cmd.Dir, cmd.Env, cmd.Stderr = "/", g.cfg.Env, g.cfg.Stderr
	cmd.ExtraFiles = []*os.File{theirs}
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Credential: &syscall.Credential{Uid: uint32(g.cfg.UID), Gid: uint32(g.cfg.UID)},
		Pdeathsig:  unix.SIGKILL,
		Setsid:     true,
	}
	c := &child{end: make(chan error, 1)}
	started := make(chan error)
	go func() {
		// The death signal is bound to the thread that starts the child.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		started <- err
		if err == nil {
			c.end <- cmd.Wait()
		}
	}()
	if err := <-started; err != nil {
		conn.Close()
		return nil, fmt.Errorf("run it as user %d: %w", g.cfg.UID, err)
	}
	c.kill = func() { cmd.Process.Kill() }
	c.peer = wire.New(conn.(*net.UnixConn), g.handle)
	start, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	if err := c.peer.Call(start, wire.MethodStart, g.cfg.Start, nil, nil); err != nil {
		c.peer.Close()
		c.kill()
		return nil, errors.Join(fmt.Errorf("tell it how to begin: %w", err), <-c.end)
	}
	g.mu.Lock()
	g.peer, g.pid = c.peer, cmd.Process.Pid
	all := make([]*held, 0, len(g.doors))
	for _, h := range g.doors {
		all = append(all, h)
	}
	g.mu.Unlock()
	for _, h := range all {
		h.mu.Lock()
		if err := g.give(ctx, c.peer, h); err != nil {
			g.cfg.Log.Error("give the gateway a door", "sandbox", h.door.Sandbox, "err", err)
		}
		h.mu.Unlock()
	}
	return c, nil
}

// watch ends a process that gives no sign of life.
func (g *Gateway) watch(c *child) {
	tick := time.NewTicker(g.cfg.Silent / 4)
	defer tick.Stop()
	for {
		select {
		case <-c.peer.Done():
			return
		case <-tick.C:
		}
		// What it cannot be told, for its socket is full, holds Call up: the end of
		// the process ends that, too.
		silent := time.AfterFunc(g.cfg.Silent, func() {
			g.cfg.Log.Error("the gateway gives no sign of life and is ended", "for", g.cfg.Silent)
			c.kill()
		})
		err := c.peer.Call(context.Background(), wire.MethodBreak, wire.Break{}, nil, nil) // of no door
		silent.Stop()
		if err != nil {
			return // it ended
		}
	}
}

// supervise starts the process again whenever it ends.
func (g *Gateway) supervise(life context.Context, c *child) {
	defer close(g.done)
	wait := restartWait
	var watching sync.WaitGroup
	defer watching.Wait()
	for {
		began := time.Now()
		this := c
		watching.Go(func() { g.watch(this) })
		select {
		case <-life.Done():
			c.peer.Close() // it ends when it is hung up
			select {
			case <-c.end:
			case <-time.After(callTimeout):
				c.kill()
				<-c.end
			}
			return
		case <-c.peer.Done():
			c.kill()
		case err := <-c.end:
			c.end <- err
		}
		err := <-c.end
		g.mu.Lock()
		g.peer, g.pid = nil, 0
		g.mu.Unlock()
		c.peer.Close()
		g.cfg.Decider.Broken()
		if time.Since(began) > restartMost {
			wait = restartWait
		}
		for {
			g.cfg.Log.Warn("the gateway ended and is started again; sandboxes lose their connections", "err", err)
			select {
			case <-life.Done():
				return
			case <-time.After(wait):
			}
			wait = min(2*wait, restartMost)
			if c, err = g.spawn(life); err == nil {
				break
			}
		}
	}
}

// Close ends the process.
func (g *Gateway) Close() {
	g.cancel()
	<-g.done
	g.mu.Lock()
	defer g.mu.Unlock()
	for id, h := range g.doors {
		h.mu.Lock()
		h.close()
		h.mu.Unlock()
		delete(g.doors, id)
	}
}

// PID is that of the process that runs, or 0.
func (g *Gateway) PID() int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.pid
}

// Open has a sandbox's door served, and again whenever the process is started
// again. The file is the Gateway's from now on.
func (g *Gateway) Open(ctx context.Context, d wire.Door, file *os.File) error {
	flows, err := g.list(d.Sandbox)
	if err != nil {
		file.Close()
		return err
	}
	h := &held{file: file, flows: flows, door: d}
	h.mu.Lock()
	defer h.mu.Unlock()
	g.mu.Lock()
	old, peer := g.doors[d.Sandbox], g.peer
	g.doors[d.Sandbox] = h
	g.mu.Unlock()
	if old != nil {
		old.mu.Lock()
		old.close()
		old.mu.Unlock()
	}
	if peer == nil {
		return nil // the next process gets it
	}
	return g.give(ctx, peer, h)
}

// close lets go of a door, with h.mu held.
func (h *held) close() {
	h.gone = true
	h.file.Close()
	h.flows.Close()
}

// list returns the list of a sandbox's flows: that which the server before left,
// or a new one.
func (g *Gateway) list(sandbox string) (*os.File, error) {
	if g.cfg.Keeper != nil {
		if f := g.cfg.Keeper.Take(flowsName(sandbox)); f != nil {
			return f, nil
		}
	}
	f, err := door.NewTableFile()
	if err == nil && g.cfg.Keeper != nil {
		if err = g.cfg.Keeper.Hold(flowsName(sandbox), f); err != nil {
			f.Close()
		}
	}
	return f, err
}

// give hands a door to a process. A process that ends meanwhile is not an
// error: the next one gets it.
func (g *Gateway) give(ctx context.Context, peer *wire.Peer, h *held) error {
	if h.gone {
		return nil
	}
	limited, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	err := peer.Call(limited, wire.MethodFlows, wire.Name{Sandbox: h.door.Sandbox}, h.flows, nil)
	if err == nil {
		err = peer.Call(limited, wire.MethodOpen, h.door, h.file, nil)
	}
	switch {
	case airlock.CodeOf(err) == airlock.Unavailable:
		return nil
	case err != nil && limited.Err() != nil && ctx.Err() == nil:
		return airlock.Errorf(airlock.Unavailable, "the gateway does not answer, and is started again if it goes on: try again")
	}
	return err
}

// Set changes what a door may do.
func (g *Gateway) Set(ctx context.Context, d wire.Door) error {
	g.mu.Lock()
	h, peer := g.doors[d.Sandbox], g.peer
	g.mu.Unlock()
	if h == nil {
		return airlock.Errorf(airlock.NotFound, "the gateway has no door of %s", d.Sandbox)
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	d.Names = nil // of the process, which tells of them
	names, used := h.door.Names, h.door.Used
	h.door = d
	h.door.Names, h.door.Used = names, used
	if peer == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	if err := peer.Call(ctx, wire.MethodSet, d, nil, nil); airlock.CodeOf(err) != airlock.Unavailable {
		return err
	}
	return nil
}

// Break breaks off crossings of a sandbox, at most wire.BreakMost. Those that
// are over, or that ended with the process, are passed over.
func (g *Gateway) Break(ctx context.Context, sandbox string, events []uint64) error {
	g.mu.Lock()
	peer := g.peer
	g.mu.Unlock()
	if peer == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	err := peer.Call(ctx, wire.MethodBreak, wire.Break{Sandbox: sandbox, Events: events}, nil, nil)
	if code := airlock.CodeOf(err); code == airlock.Unavailable || code == airlock.NotFound {
		return nil
	}
	return err
}

// Drop ends the service of a door.
func (g *Gateway) Drop(sandbox string) {
	g.mu.Lock()
	h, peer := g.doors[sandbox], g.peer
	delete(g.doors, sandbox)
	g.mu.Unlock()
	if h == nil {
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.close()
	if g.cfg.Keeper != nil {
		g.cfg.Keeper.Drop(flowsName(sandbox))
	}
	if peer != nil {
		ctx, cancel := context.WithTimeout(context.Background(), callTimeout)
		defer cancel()
		peer.Call(ctx, wire.MethodClose, wire.Name{Sandbox: sandbox}, nil, nil)
	}
}

// held is a door, or nil.
func (g *Gateway) held(sandbox string) *held {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.doors[sandbox]
}

// handle answers the process.
func (g *Gateway) handle(ctx context.Context, method string, body []byte, f *os.File) (any, error) {
	if f != nil {
		f.Close()
		return nil, airlock.Errorf(airlock.Invalid, "the gateway sends no descriptors")
	}
	switch method {
	case wire.MethodAdmit, wire.MethodCross:
		var a wire.Attempt
		if err := json.Unmarshal(body, &a); err != nil {
			return nil, fmt.Errorf("read an attempt: %w", err)
		}
		if method == wire.MethodAdmit {
			return g.cfg.Decider.Admit(ctx, a), nil
		}
		return g.cfg.Decider.Cross(ctx, a), nil
	case wire.MethodBound:
		var b wire.Bound
		if err := json.Unmarshal(body, &b); err != nil {
			return nil, fmt.Errorf("read a binding: %w", err)
		}
		if h := g.held(b.Sandbox); h != nil {
			h.bound(b.Binding)
		}
		return nil, nil
	case wire.MethodUsed:
		var u wire.Used
		if err := json.Unmarshal(body, &u); err != nil {
			return nil, fmt.Errorf("read what is used: %w", err)
		}
		g.cfg.Decider.Used(u)
		if h := g.held(u.Sandbox); h != nil {
			h.used(u.Bytes)
		}
		return nil, nil
	case wire.MethodRefused:
		var r wire.Refused
		if err := json.Unmarshal(body, &r); err != nil {
			return nil, fmt.Errorf("read what was refused: %w", err)
		}
		g.cfg.Decider.Refused(r)
		return nil, nil
	case wire.MethodEnd:
		var e wire.End
		if err := json.Unmarshal(body, &e); err != nil {
			return nil, fmt.Errorf("read an end: %w", err)
		}
		g.cfg.Decider.End(e)
		if h := g.held(e.Sandbox); h != nil {
			h.used(e.Used)
		}
		return nil, nil
	}
	return nil, airlock.Errorf(airlock.Unimplemented, "the server does not know %.40q", method)
}
