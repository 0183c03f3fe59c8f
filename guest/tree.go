package guest

import (
	"bytes"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// tree attributes processes to the exec that started them. Parents are not
// enough: a daemon's parent is PID 1. So what is known of a process is kept
// while it lives, looked at often, and told by, in this order: what was known
// before, its parent, the leader of its session, the mark it inherited.
//
// The mark is the limit RLIMIT_RSS: forks and programs inherit it, no kernel
// enforces it, PID 1 may read it without the right to trace (the environment
// it may not), and who is not privileged can only lower it. A process that
// escapes all four (double fork, setsid and a lowered limit, all between two
// looks) is nobody's; it ends with the sandbox.
type tree struct {
	wake chan struct{}

	mu       sync.Mutex
	owners   map[int]owned // every process seen in the last look
	sessions map[int]*exec // by session id, also of leaders that have ended
}

type owned struct {
	start uint64
	exec  *exec // nil: nobody's
}

type process struct {
	pid, parent, session int
	start                uint64 // tells two users of one pid apart
	state                byte
	exec                 *exec
}

const (
	lookEvery = 100 * time.Millisecond
	// lookShare bounds what looking costs: 1/lookShare of one processor.
	lookShare = 20
)

func (t *tree) init() {
	t.owners = map[int]owned{}
	t.sessions = map[int]*exec{}
	t.wake = make(chan struct{}, 1)
}

// readSmall reads the beginning of a file of /proc with few system calls. It
// is empty when the process is gone.
func readSmall(path string, buf []byte) ([]byte, error) {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err == nil {
		defer unix.Close(fd)
		var n int
		if n, err = unix.Read(fd, buf); err == nil {
			return buf[:n], nil
		}
	}
	if err == unix.ENOENT || err == unix.ESRCH {
		err = nil
	}
	return nil, err
}

func readProcess(pid int) (p process, found bool, err error) {
	var buf [1024]byte
	b, err := readSmall("/proc/"+strconv.Itoa(pid)+"/stat", buf[:])
	i := bytes.LastIndexByte(b, ')') // the name before it is the process's own choice
	if i < 0 {
		return process{}, false, err
	}
	f := strings.Fields(string(b[i+1:]))
	if len(f) < 20 {
		return process{}, false, nil
	}
	p = process{pid: pid, state: f[0][0]}
	p.parent, _ = strconv.Atoi(f[1])
	p.session, _ = strconv.Atoi(f[3])
	p.start, _ = strconv.ParseUint(f[19], 10, 64)
	return p, true, nil
}

// pids lists all processes but PID 1 (or whoever runs the guest).
func (g *guest) pids() (pids []int, err error) {
	fd, err := unix.Open("/proc", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	buf := make([]byte, 16<<10)
	for {
		n, err := unix.ReadDirent(fd, buf)
		if err != nil || n <= 0 {
			return pids, err
		}
		var names []string
		_, _, names = unix.ParseDirent(buf[:n], -1, names)
		for _, name := range names {
			if pid, err := strconv.Atoi(name); err == nil && pid != g.self {
				pids = append(pids, pid)
			}
		}
	}
}

// look reads the process table and attributes every process. With an error
// the table is not whole: root inside can take PID 1's descriptors from it.
func (g *guest) look() ([]process, error) {
	g.tree.mu.Lock()
	defer g.tree.mu.Unlock()
	t := &g.tree
	g.mu.Lock()
	mains := make(map[int]*exec, len(g.execs))
	marks := make(map[uint64]*exec, len(g.execs))
	for pid, e := range g.execs {
		if !e.exited {
			mains[pid] = e
		}
		marks[e.mark] = e
		t.sessions[pid] = e // it called setsid before it ran
	}
	g.mu.Unlock()

	table := map[int]*process{}
	pids, failed := g.pids()
	for _, pid := range pids {
		p, found, err := readProcess(pid)
		if found {
			table[pid] = &p
		}
		failed = errors.Join(failed, err)
	}
	done := make(map[int]bool, len(table))
	var resolve func(p *process) *exec
	resolve = func(p *process) *exec {
		if done[p.pid] {
			return p.exec
		}
		done[p.pid] = true // before the recursion: parents that changed meanwhile could form a ring
		known, seen := t.owners[p.pid]
		switch {
		case mains[p.pid] != nil:
			p.exec = mains[p.pid]
		case seen && known.start == p.start:
			p.exec = known.exec
		default:
			if parent := table[p.parent]; parent != nil {
				p.exec = resolve(parent)
			}
			if p.exec == nil {
				p.exec = t.sessions[p.session]
			}
			if p.exec == nil && p.parent == g.self {
				p.exec = marks[markOf(p.pid)]
			}
		}
		return p.exec
	}
	owners := make(map[int]owned, len(table))
	sessions := map[int]*exec{}
	all := make([]process, 0, len(table))
	for pid, p := range table {
		e := resolve(p)
		owners[pid] = owned{p.start, e}
		if e != nil {
			sessions[p.session] = e
		}
		all = append(all, *p)
	}
	t.owners, t.sessions = owners, sessions
	return all, failed
}

// firstMark is above all real limits; the marks go down from it.
const firstMark = 1 << 52

// markOf returns a process's mark, or 0.
func markOf(pid int) uint64 {
	var buf [4096]byte
	b, _ := readSmall("/proc/"+strconv.Itoa(pid)+"/limits", buf[:])
	_, b, _ = bytes.Cut(b, []byte("\nMax resident set"))
	f := strings.Fields(string(b[:min(len(b), 60)])) // soft, hard
	if len(f) < 2 {
		return 0
	}
	mark, _ := strconv.ParseUint(f[1], 10, 64)
	return mark
}

// members returns the live processes of e, as far as they can be seen.
func (g *guest) members(e *exec) ([]int, error) {
	all, err := g.look()
	var pids []int
	for _, p := range all {
		if p.exec == e && p.state != 'Z' && p.state != 'X' {
			pids = append(pids, p.pid)
		}
	}
	return pids, err
}

// send signals a process that look has just seen. PID 1's own children
// cannot be reaped meanwhile, others could in theory have left their pid to
// someone else inside the sandbox.
func (g *guest) send(pid int, sig syscall.Signal) {
	if pid <= 1 || pid == g.self {
		return
	}
	syscall.Kill(pid, sig)
}

const (
	stopRounds = 64
	killFor    = 3 * time.Second // the host waits a little longer
)

// kill signals all processes of e. SIGKILL first stops all it finds until it
// finds no new ones, so that a tree that forks faster than it is killed ends
// too. An error says that some may be left.
func (g *guest) kill(e *exec, sig syscall.Signal) error {
	if sig != unix.SIGKILL {
		pids, err := g.members(e)
		for _, pid := range pids {
			g.send(pid, sig)
		}
		return err
	}
	stopped := map[int]bool{}
	for range stopRounds {
		fresh := false
		pids, _ := g.members(e) // the error is met again below
		for _, pid := range pids {
			if !stopped[pid] {
				stopped[pid], fresh = true, true
				g.send(pid, unix.SIGSTOP)
			}
		}
		if !fresh {
			break
		}
	}
	for began := time.Now(); time.Since(began) < killFor; time.Sleep(time.Millisecond) {
		pids, err := g.members(e)
		for _, pid := range pids {
			g.send(pid, unix.SIGKILL)
		}
		if err != nil || len(pids) == 0 {
			return err
		}
	}
	return fmt.Errorf("processes are left after %v", killFor)
}

// watchTree looks at the processes while execs run.
func (g *guest) watchTree(stop <-chan struct{}) {
	for {
		g.mu.Lock()
		idle := len(g.execs) == 0
		g.mu.Unlock()
		pause := lookEvery
		if idle {
			select {
			case <-g.tree.wake:
				pause = lookEvery / 4 // those that daemonize do it first; most have ended by then
			case <-stop:
				return
			}
		} else {
			began := time.Now()
			g.look()
			pause = max(pause, lookShare*time.Since(began))
		}
		select {
		case <-time.After(pause):
		case <-stop:
			return
		}
	}
}
