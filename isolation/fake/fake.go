// Package fake is a driver without isolation that misbehaves on order: it
// starts slowly, fails, hangs, dies or speaks nonsense when a test says so.
// It exists for the tests of what stands on a driver and passes the same
// conformance suite as the real ones, as far as that needs no isolation.
package fake

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"airlock.dev/airlock"
	"airlock.dev/airlock/channel"
	"airlock.dev/airlock/isolation"
)

// Faults say how the next sandboxes misbehave.
type Faults struct {
	CreateDelay  time.Duration // before Create answers
	CreateErr    error         // Create fails after its delay
	Mute         bool          // the guest never answers
	Garbage      bool          // the guest answers with packets out of form
	DestroyErrs  int           // Destroy fails this many times first
	DieAfter     time.Duration // the sandbox ends by itself
	DieOutcome   airlock.Outcome
	LoseOnRecall bool // Recover does not find it
}

// World is what survives a restart of the driver: the sandboxes themselves.
type World struct {
	mu  sync.Mutex
	all map[string]*sandbox
}

// NewWorld returns a world without sandboxes.
func NewWorld() *World { return &World{all: map[string]*sandbox{}} }

// Count returns how many sandboxes exist.
func (w *World) Count() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.all)
}

// Driver implements isolation.Driver. Several may share a World, one after
// the other, as servers do.
type Driver struct {
	world *World

	mu     sync.Mutex
	faults Faults
}

// New returns a driver that behaves.
func New(w *World) *Driver { return &Driver{world: w} }

// Misbehave sets the faults of the sandboxes created from now on.
func (d *Driver) Misbehave(f Faults) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.faults = f
}

// Name implements isolation.Driver.
func (d *Driver) Name() string { return "fake" }

type sandbox struct {
	id     string
	linked bool
	world  *World
	faults Faults
	ours   *os.File
	theirs *os.File

	once  sync.Once
	ended chan struct{}
	exit  isolation.Exit

	mu     sync.Mutex // guards what follows
	fails  int
	dialed *os.File
}

// Create implements isolation.Driver.
func (d *Driver) Create(ctx context.Context, spec isolation.Spec) (isolation.Sandbox, error) {
	if !airlock.ValidSandboxID(spec.ID) {
		return nil, airlock.Invalidf("id", "use 1 to 32 characters of a-z and 0-9", "the sandbox id %q is not valid", spec.ID)
	}
	if err := spec.Limits.Validate(); err != nil {
		return nil, err
	}
	if _, err := os.Stat(spec.RootFS); err != nil {
		return nil, err
	}
	d.mu.Lock()
	faults := d.faults
	d.mu.Unlock()
	select {
	case <-time.After(faults.CreateDelay):
	case <-ctx.Done():
	}
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	if faults.CreateErr != nil {
		return nil, faults.CreateErr
	}
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	s := &sandbox{id: spec.ID, linked: spec.Link != nil, world: d.world, faults: faults, ours: os.NewFile(uintptr(fds[0]), "host"), theirs: os.NewFile(uintptr(fds[1]), "guest"), ended: make(chan struct{}), fails: faults.DestroyErrs}
	d.world.mu.Lock()
	if d.world.all[spec.ID] != nil {
		d.world.mu.Unlock()
		s.ours.Close()
		s.theirs.Close()
		return nil, airlock.Errorf(airlock.Exists, "a sandbox %q exists", spec.ID)
	}
	d.world.all[spec.ID] = s
	d.world.mu.Unlock()
	go (&guest{s: s}).run()
	if faults.DieAfter > 0 {
		time.AfterFunc(faults.DieAfter, func() { s.end(faults.DieOutcome) })
	}
	return s, nil
}

// Recover implements isolation.Driver.
func (d *Driver) Recover(ctx context.Context, id string) (isolation.Sandbox, error) {
	d.world.mu.Lock()
	defer d.world.mu.Unlock()
	s := d.world.all[id]
	if s == nil || s.faults.LoseOnRecall || s.hasEnded() {
		return nil, airlock.Errorf(airlock.NotFound, "no sandbox %q runs", id)
	}
	return s, nil
}

// Sweep implements isolation.Driver.
func (d *Driver) Sweep(ctx context.Context, keep func(string) bool) ([]string, error) {
	d.world.mu.Lock()
	var swept []*sandbox
	for id, s := range d.world.all {
		if !keep(id) {
			swept = append(swept, s)
		}
	}
	d.world.mu.Unlock()
	var ids []string
	var errs []error
	for _, s := range swept {
		ids = append(ids, s.id)
		errs = append(errs, s.Destroy(ctx))
	}
	return ids, errors.Join(errs...)
}

func (s *sandbox) ID() string { return s.id }

func (s *sandbox) Dial(ctx context.Context) (io.ReadWriteCloser, error) {
	if s.hasEnded() {
		return nil, airlock.Errorf(airlock.Gone, "the sandbox is gone")
	}
	fd, err := unix.FcntlInt(s.ours.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	if err := unix.SetNonblock(fd, true); err != nil {
		unix.Close(fd)
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.dialed != nil {
		s.dialed.Close()
	}
	s.dialed = os.NewFile(uintptr(fd), "host")
	return s.dialed, nil
}

// Door leads to a link on which nobody speaks.
func (s *sandbox) Door(ctx context.Context) (*os.File, error) {
	if !s.linked {
		return nil, airlock.Errorf(airlock.NotFound, "the sandbox has no network")
	}
	if s.hasEnded() {
		return nil, airlock.Errorf(airlock.Gone, "the sandbox is gone")
	}
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	unix.Close(fds[1])
	return os.NewFile(uintptr(fds[0]), "door"), nil
}

func (s *sandbox) Stats(ctx context.Context) (isolation.Stats, error) {
	if s.hasEnded() {
		return isolation.Stats{}, airlock.Errorf(airlock.Gone, "the sandbox is gone")
	}
	return isolation.Stats{CPUSeconds: 0.01, MemoryBytes: 1 << 20}, nil
}

func (s *sandbox) Wait(ctx context.Context) (isolation.Exit, error) {
	select {
	case <-s.ended:
		return s.exit, nil
	case <-ctx.Done():
		return isolation.Exit{}, ctx.Err()
	}
}

func (s *sandbox) Destroy(ctx context.Context) error {
	s.mu.Lock()
	if s.fails > 0 {
		s.fails--
		s.mu.Unlock()
		return errors.New("fake: destroy fails as ordered")
	}
	s.mu.Unlock()
	s.end(airlock.SandboxKilled)
	s.world.mu.Lock()
	if s.world.all[s.id] == s {
		delete(s.world.all, s.id)
	}
	s.world.mu.Unlock()
	return nil
}

func (s *sandbox) hasEnded() bool {
	select {
	case <-s.ended:
		return true
	default:
		return false
	}
}

func (s *sandbox) end(why airlock.Outcome) {
	s.once.Do(func() {
		s.exit = isolation.Exit{Outcome: why, Detail: "fake"}
		s.theirs.Close()
		// Both ends must be shut, whoever still has a descriptor.
		if raw, err := s.ours.SyscallConn(); err == nil {
			raw.Control(func(fd uintptr) { unix.Shutdown(int(fd), unix.SHUT_RDWR) })
		}
		s.ours.Close()
		close(s.ended)
	})
}

// guest speaks just enough of the protocol: hello, port.dial of port 7, which
// echoes, and exec.start of the commands echo, env NAME, exit, sleep and flood.
type guest struct {
	s *sandbox

	mu    sync.Mutex
	pids  uint32
	hello channel.Hello
}

func (g *guest) run() {
	conn := g.s.theirs
	switch {
	case g.s.faults.Mute:
		io.Copy(io.Discard, conn)
	case g.s.faults.Garbage:
		buf := make([]byte, channel.MaxPacket)
		for {
			if _, err := conn.Read(buf); err != nil {
				break
			}
			if _, err := conn.Write([]byte("garbage out of form")); err != nil {
				break
			}
		}
	default:
		channel.Serve(conn, g.handle)
	}
	g.s.end(airlock.SandboxFailed) // no effect if it was ended on purpose
}

func (g *guest) handle(ctx context.Context, s *channel.Stream, method string, req []byte) error {
	switch method {
	case channel.MethodHello:
		var hello channel.Hello
		if err := json.Unmarshal(req, &hello); err != nil {
			return err
		}
		g.mu.Lock()
		g.hello = hello
		g.mu.Unlock()
		return channel.SendReply(ctx, s, channel.HelloReply{Version: "fake"})
	case channel.MethodSignal:
		return channel.SendReply(ctx, s, channel.Empty{})
	case channel.MethodStart:
		return g.start(ctx, s, req)
	case channel.MethodDial:
		return g.dial(ctx, s, req)
	}
	return airlock.Errorf(airlock.Unimplemented, "the fake guest does not know %s", method)
}

func (g *guest) start(ctx context.Context, s *channel.Stream, req []byte) error {
	var r channel.StartRequest
	if err := json.Unmarshal(req, &r); err != nil {
		return err
	}
	g.mu.Lock()
	g.pids++
	pid := g.pids + 1
	env := g.hello.Env
	g.mu.Unlock()
	if err := channel.SendJSON(ctx, s, channel.TagStarted, channel.Started{PID: pid}); err != nil {
		return err
	}
	end := channel.Ended{Outcome: airlock.Exited}
	arg := strings.Join(r.Args, " ")
	switch r.Cmd {
	case "echo":
		if err := s.Send(ctx, channel.TagStdout, []byte(arg+"\n")); err != nil {
			return err
		}
	case "env":
		if err := s.Send(ctx, channel.TagStdout, []byte(env[arg]+"\n")); err != nil {
			return err
		}
	case "exit":
		end.ExitCode, _ = strconv.Atoi(arg)
	case "sleep":
		d, err := time.ParseDuration(arg)
		if err != nil {
			return airlock.Invalidf("args", "give a duration", "%v", err)
		}
		select {
		case <-time.After(d):
		case <-ctx.Done():
		}
	case "flood":
		n, _ := strconv.Atoi(arg)
		for chunk := make([]byte, channel.MaxPayload); n > 0; n -= len(chunk) {
			if err := s.Send(ctx, channel.TagStdout, chunk[:min(n, len(chunk))]); err != nil {
				return err
			}
		}
	case "die":
		g.s.end(airlock.SandboxFailed)
		return nil
	default:
		return airlock.Errorf(airlock.NotFound, "the fake guest has no command %q", r.Cmd)
	}
	return channel.SendJSON(ctx, s, channel.TagEnded, end)
}

func (g *guest) dial(ctx context.Context, s *channel.Stream, req []byte) error {
	var r channel.DialRequest
	if err := json.Unmarshal(req, &r); err != nil {
		return err
	}
	if r.Port != 7 {
		return airlock.Errorf(airlock.PortClosed, "port %d is not open", r.Port)
	}
	if err := channel.SendReply(ctx, s, channel.Empty{}); err != nil {
		return err
	}
	_, err := io.Copy(s.Writer(ctx, channel.TagData), s.Reader(ctx, channel.TagData))
	return err
}
