// Package keeper is the small process that outlives servers: the first one of
// a process and mount namespace of its own, parent or reaper of everything
// else in it. It starts the server and starts it again when it dies, and it
// holds descriptors under names (guest channels, listeners) for the next one.
//
// The host's kernel ends every process of the namespace when the keeper ends
// and drops every mount made in it, so a dead keeper leaves no sandbox behind.
//
// It knows nothing of sandboxes, of HTTP or of state: it must be simple enough
// never to need a restart. Start reading at Enter (outside), Run (the keeper)
// and Client (the server's side).
package keeper

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"strconv"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Enter runs this binary again as name, with the same arguments, as the first
// process of new process and mount namespaces, and returns its exit code.
// Signals that ask to stop or to reload are passed on. extra become the
// descriptors from 3 on. When the caller dies, so does the namespace.
func Enter(name string, extra ...*os.File) (int, error) {
	// The death signal is bound to the thread that starts the child.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	// What whoever started us left open is not for what we start: the gateway
	// and sandboxes are other users.
	if err := closeOnExec(); err != nil {
		return 0, err
	}
	cmd := exec.Command("/proc/self/exe")
	cmd.Args = append([]string{name}, os.Args[1:]...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.ExtraFiles = extra
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: syscall.CLONE_NEWPID | syscall.CLONE_NEWNS,
		Pdeathsig:  syscall.SIGKILL,
		// Ctrl-C is passed on below, once, instead of going to all.
		Setpgid: !isTerminal(os.Stdin),
	}
	signals := make(chan os.Signal, 8)
	signal.Notify(signals, unix.SIGTERM, unix.SIGINT, unix.SIGHUP)
	defer signal.Stop(signals)
	if err := cmd.Start(); err != nil {
		return 0, fmt.Errorf("enter namespaces of our own (needs root): %w", err)
	}
	done := make(chan error, 1)
	go func() { done <- cmd.Wait() }()
	for {
		select {
		case sig := <-signals:
			cmd.Process.Signal(sig)
		case <-done:
			ws := cmd.ProcessState.Sys().(syscall.WaitStatus)
			if ws.Signaled() {
				return 128 + int(ws.Signal()), nil
			}
			return ws.ExitStatus(), nil
		}
	}
}

// closeOnExec has all descriptors but the standard ones end with this program.
func closeOnExec() error {
	const dir = "/proc/self/fd"
	open, err := os.ReadDir(dir)
	if err != nil {
		return fmt.Errorf("list what is open: %w", err)
	}
	for _, entry := range open {
		fd, err := strconv.Atoi(entry.Name())
		if err != nil {
			return fmt.Errorf("list what is open: %w", err)
		}
		if fd > 2 {
			unix.CloseOnExec(fd)
		}
	}
	return nil
}

func isTerminal(f *os.File) bool {
	_, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	return err == nil
}

// Settle finishes the entry into the namespaces: mounts of ours do not leave,
// and /proc shows our processes.
func Settle() error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}
	if err := unix.Mount("proc", "/proc", "proc", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, ""); err != nil {
		return fmt.Errorf("mount /proc: %w", err)
	}
	return nil
}

// Descriptors of a server that the keeper started. 0 to 2 are the null
// device, since sandboxes inherit them.
const (
	controlFD = 3
	StdoutFD  = 4
	StderrFD  = 5
)

// maxName and maxHeld bound what a server may ask to hold.
const (
	maxName = 64
	maxHeld = 16384
)

const stopGrace = 60 * time.Second

// Run is the keeper: it runs name (this binary again, with the same
// arguments) until it is told to stop, and returns the exit code.
// SIGTERM and SIGINT are passed to the server, which ends everything; SIGHUP
// replaces the server. A server that ends before it was ever ready is not
// started again.
func Run(log *slog.Logger, name string) int {
	signals := make(chan os.Signal, 8)
	signal.Notify(signals, unix.SIGTERM, unix.SIGINT, unix.SIGHUP)
	children := make(chan os.Signal, 1)
	signal.Notify(children, unix.SIGCHLD)

	held := map[string]*os.File{}
	failures := -1 // starts in a row that did not get ready; -1 until the first is
	for {
		s, err := start(name, held)
		if err != nil {
			log.Error("start the server", "err", err)
			return 1
		}
		code, stop := supervise(s, signals, children)
		ready := <-s.ready
		switch {
		case stop:
			return code
		case ready:
			failures = 0
		case failures < 0:
			return max(code, 1) // it has said why
		default:
			failures++
		}
		if failures > maxFailures {
			// Nobody ends sandboxes when their time is over: end them all.
			log.Error("the server does not get ready any more; giving up, and all sandboxes end", "code", code)
			return 1
		}
		log.Warn("the server ended and is started again; sandboxes go on", "code", code, "held", len(held))
		time.Sleep(time.Duration(failures) * failureWait)
	}
}

// A server that cannot get ready is tried for about a minute.
const (
	maxFailures = 10
	failureWait = time.Second
)

type server struct {
	pid     int
	control *os.File
	ready   chan bool // one value when the server's socket is closed: was it ready
}

func start(name string, held map[string]*os.File) (*server, error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	ours, theirs := os.NewFile(uintptr(fds[0]), "server"), os.NewFile(uintptr(fds[1]), "keeper")
	defer theirs.Close()
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	defer null.Close()
	// Not os/exec: the reaper below waits for all children alike.
	p, err := os.StartProcess("/proc/self/exe", append([]string{name}, os.Args[1:]...), &os.ProcAttr{
		Files: []*os.File{null, null, null, theirs, os.Stdout, os.Stderr},
	})
	if err != nil {
		ours.Close()
		return nil, err
	}
	s := &server{pid: p.Pid, control: ours, ready: make(chan bool, 1)}
	p.Release()
	go s.answer(held)
	return s, nil
}

// supervise reaps children until the server ends.
func supervise(s *server, signals, children <-chan os.Signal) (code int, stop bool) {
	defer s.control.Close()
	var late <-chan time.Time
	for {
		for {
			var ws unix.WaitStatus
			pid, err := unix.Wait4(-1, &ws, unix.WNOHANG, nil)
			if err == unix.EINTR {
				continue
			}
			if err != nil || pid <= 0 {
				break
			}
			if pid == s.pid {
				if ws.Signaled() {
					return 128 + int(ws.Signal()), stop
				}
				return ws.ExitStatus(), stop
			}
		}
		select {
		case <-children:
		case sig := <-signals:
			if sig != unix.SIGHUP {
				stop = true
				late = time.After(stopGrace)
			}
			unix.Kill(s.pid, sig.(unix.Signal))
		case <-late:
			unix.Kill(s.pid, unix.SIGKILL)
		}
	}
}

// Operations of a server: the first byte of a packet, then a name.
const (
	opHold  = 'H' // with a descriptor
	opDrop  = 'D'
	opTake  = 'T' // answered by opGive with a descriptor or opNone
	opReady = 'R'
	opGive  = 'F'
	opNone  = 'N'
)

// answer serves one server until its end of the socket is closed, so that
// everything it said is heard before the next one starts.
func (s *server) answer(held map[string]*os.File) {
	ready := false
	defer func() { s.ready <- ready }()
	for {
		op, name, f, err := receive(s.control)
		if err != nil {
			return
		}
		switch op {
		case opHold:
			if f == nil || len(held) >= maxHeld {
				continue
			}
			if old := held[name]; old != nil {
				old.Close()
			}
			held[name], f = f, nil
		case opDrop:
			if old := held[name]; old != nil {
				old.Close()
				delete(held, name)
			}
		case opTake:
			if old := held[name]; old != nil {
				send(s.control, opGive, name, old)
			} else {
				send(s.control, opNone, name, nil)
			}
		case opReady:
			ready = true
		}
		if f != nil {
			f.Close()
		}
	}
}

func send(conn *os.File, op byte, name string, f *os.File) error {
	if len(name) > maxName {
		return fmt.Errorf("the name %q is longer than %d bytes", name, maxName)
	}
	var rights []byte
	if f != nil {
		raw, err := f.SyscallConn()
		if err != nil {
			return err
		}
		var sent error
		err = raw.Control(func(fd uintptr) {
			sent = unix.Sendmsg(int(conn.Fd()), append([]byte{op}, name...), unix.UnixRights(int(fd)), nil, 0)
		})
		return errors.Join(err, sent)
	}
	return unix.Sendmsg(int(conn.Fd()), append([]byte{op}, name...), rights, nil, 0)
}

func receive(conn *os.File) (op byte, name string, f *os.File, err error) {
	buf := make([]byte, 1+maxName)
	oob := make([]byte, unix.CmsgSpace(4))
	for {
		n, oobn, _, _, err := unix.Recvmsg(int(conn.Fd()), buf, oob, unix.MSG_CMSG_CLOEXEC)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return 0, "", nil, err
		}
		if n == 0 {
			return 0, "", nil, os.ErrClosed
		}
		if oobn > 0 {
			msgs, err := unix.ParseSocketControlMessage(oob[:oobn])
			if err == nil && len(msgs) == 1 {
				if fds, err := unix.ParseUnixRights(&msgs[0]); err == nil && len(fds) == 1 {
					f = os.NewFile(uintptr(fds[0]), string(buf[1:n]))
				}
			}
		}
		return buf[0], string(buf[1:n]), f, nil
	}
}

// Client is the server's side. Its methods may be called concurrently.
type Client struct {
	mu   sync.Mutex
	conn *os.File
}

// Connect returns the client of a server that a keeper started.
func Connect() *Client {
	unix.CloseOnExec(controlFD)
	return &Client{conn: os.NewFile(controlFD, "keeper")}
}

// Hold keeps a duplicate of f under name, in place of one before.
func (c *Client) Hold(name string, f *os.File) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return send(c.conn, opHold, name, f)
}

// Drop closes what is held under name.
func (c *Client) Drop(name string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	send(c.conn, opDrop, name, nil) // a keeper that is gone holds nothing
}

// Take returns a duplicate of what is held under name, or nil.
func (c *Client) Take(name string) *os.File {
	c.mu.Lock()
	defer c.mu.Unlock()
	if send(c.conn, opTake, name, nil) != nil {
		return nil
	}
	_, _, f, err := receive(c.conn)
	if err != nil {
		return nil
	}
	return f
}

// Ready says that the server serves: from now on it is worth starting again.
func (c *Client) Ready() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return send(c.conn, opReady, "", nil)
}

// Context ends when the process is asked to stop; its cause is ErrReload when
// only the server is to be replaced and sandboxes go on.
func Context() (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(context.Background())
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, unix.SIGTERM, unix.SIGINT, unix.SIGHUP)
	go func() {
		select {
		case sig := <-signals:
			if sig == unix.SIGHUP {
				cancel(ErrReload)
			} else {
				cancel(context.Canceled)
			}
		case <-ctx.Done():
		}
	}()
	return ctx, func() { cancel(nil) }
}

// ErrReload is the cause of a context that ends for the sake of a new server.
var ErrReload = errors.New("the server is replaced")
