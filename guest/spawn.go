package guest

import (
	"runtime"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Processes are started by a fork of our own because package syscall cannot
// set resource limits in the child. Setting them from outside would be a race
// with the child's first fork, and a trampoline would cost the start of a
// second Go program. The fork is the one of syscall.forkAndExecInChild:
// CLONE_VM|CLONE_VFORK, with the parent asleep until the child runs its program.
// The kernel gives the child no signal handlers: Go's own way to take them
// away is sixty system calls, which is what most programs make in their life.

// spawnArgs is all that the child needs, made ready before the fork: the
// child must not allocate.
type spawnArgs struct {
	paths  []*byte // tried in this order, as execvp does
	argv   []*byte // ends with nil
	envv   []*byte // ends with nil
	dir    *byte
	uid    uintptr
	gid    uintptr
	groups []uint32
	fds    []uintptr // become 0, 1, 2, …; each is above len(fds)
	tty    bool      // fds[0] becomes the controlling terminal
	nofile uint64    // 0 leaves the limit
	nproc  uint64    // 0 leaves the limit
	mark   uint64    // RLIMIT_RSS, which no kernel enforces; 0 leaves it

	step  spawnStep // out: what failed
	errno syscall.Errno
}

type spawnStep int

const (
	stepFork spawnStep = iota
	stepSetup
	stepCwd
	stepExec
)

//go:noescape
func rawVfork(args *cloneArgs) (pid, err uintptr)

//go:linkname beforeFork syscall.runtime_BeforeFork
func beforeFork()

//go:linkname afterFork syscall.runtime_AfterFork
func afterFork()

// cloneArgs is the kernel's struct clone_args, of which we set two fields.
type cloneArgs [11]uint64

const (
	cloneFlags      = 0
	cloneExitSignal = 4
)

// spawn starts a process. On failure a.step and the errno say why.
func spawn(a *spawnArgs) (int, syscall.Errno) {
	var none uint32
	groups := &none
	if len(a.groups) > 0 {
		groups = &a.groups[0]
	}
	lim := [3]unix.Rlimit{{Cur: a.nofile, Max: a.nofile}, {Cur: a.nproc, Max: a.nproc}, {Cur: a.mark, Max: a.mark}}
	syscall.ForkLock.Lock()
	a.step = stepFork
	clone := cloneArgs{cloneFlags: unix.CLONE_VFORK | unix.CLONE_VM | unix.CLONE_CLEAR_SIGHAND, cloneExitSignal: uint64(unix.SIGCHLD)}
	pid, errno := spawnChild(a, &clone, groups, &lim)
	afterFork()
	syscall.ForkLock.Unlock()
	runtime.KeepAlive(a)
	if errno != 0 {
		return 0, syscall.Errno(errno)
	}
	if a.errno != 0 { // the child shared our memory and has exited
		for {
			_, err := syscall.Wait4(int(pid), nil, 0, nil)
			if err != syscall.EINTR {
				break
			}
		}
		return 0, a.errno
	}
	return int(pid), 0
}

// spawnChild forks; the child never returns from it.
//
//go:noinline
//go:norace
//go:nocheckptr
func spawnChild(a *spawnArgs, clone *cloneArgs, groups *uint32, lim *[3]unix.Rlimit) (pid, errno uintptr) {
	var (
		i  int
		e  syscall.Errno
		e2 syscall.Errno

		noSignals uint64
	)
	beforeFork() // blocks all signals, so that none meets Go's handlers in the child
	pid, errno = rawVfork(clone)
	if errno != 0 || pid != 0 {
		return pid, errno
	}
	a.step = stepSetup
	if _, _, e = syscall.RawSyscall6(syscall.SYS_RT_SIGPROCMASK, unix.SIG_SETMASK, uintptr(unsafe.Pointer(&noSignals)), 0, unsafe.Sizeof(noSignals), 0, 0); e != 0 {
		goto fail
	}
	if _, _, e = syscall.RawSyscall(syscall.SYS_SETSID, 0, 0, 0); e != 0 {
		goto fail
	}
	for i = 0; i < len(a.fds); i++ {
		if _, _, e = syscall.RawSyscall(syscall.SYS_DUP3, a.fds[i], uintptr(i), 0); e != 0 {
			goto fail
		}
	}
	if a.tty {
		if _, _, e = syscall.RawSyscall(syscall.SYS_IOCTL, 0, unix.TIOCSCTTY, 0); e != 0 {
			goto fail
		}
	}
	if a.nofile != 0 {
		if _, _, e = syscall.RawSyscall6(syscall.SYS_PRLIMIT64, 0, unix.RLIMIT_NOFILE, uintptr(unsafe.Pointer(&lim[0])), 0, 0, 0); e != 0 {
			goto fail
		}
	}
	if a.nproc != 0 {
		if _, _, e = syscall.RawSyscall6(syscall.SYS_PRLIMIT64, 0, unix.RLIMIT_NPROC, uintptr(unsafe.Pointer(&lim[1])), 0, 0, 0); e != 0 {
			goto fail
		}
	}
	if a.mark != 0 {
		if _, _, e = syscall.RawSyscall6(syscall.SYS_PRLIMIT64, 0, unix.RLIMIT_RSS, uintptr(unsafe.Pointer(&lim[2])), 0, 0, 0); e != 0 {
			goto fail
		}
	}
	if _, _, e = syscall.RawSyscall(syscall.SYS_SETGROUPS, uintptr(len(a.groups)), uintptr(unsafe.Pointer(groups)), 0); e != 0 {
		goto fail
	}
	if _, _, e = syscall.RawSyscall(syscall.SYS_SETRESGID, a.gid, a.gid, a.gid); e != 0 {
		goto fail
	}
	if _, _, e = syscall.RawSyscall(syscall.SYS_SETRESUID, a.uid, a.uid, a.uid); e != 0 {
		goto fail
	}
	a.step = stepCwd
	if _, _, e = syscall.RawSyscall(syscall.SYS_CHDIR, uintptr(unsafe.Pointer(a.dir)), 0, 0); e != 0 {
		goto fail
	}
	a.step = stepExec
	e = syscall.ENOENT
	for i = 0; i < len(a.paths); i++ {
		_, _, e2 = syscall.RawSyscall(syscall.SYS_EXECVE, uintptr(unsafe.Pointer(a.paths[i])), uintptr(unsafe.Pointer(&a.argv[0])), uintptr(unsafe.Pointer(&a.envv[0])))
		if e2 == syscall.ENOENT || e2 == syscall.ENOTDIR {
			continue // EACCES of an earlier one, if any, is the better reason
		}
		e = e2
		if e2 != syscall.EACCES {
			break
		}
	}
fail:
	a.errno = e
	for {
		syscall.RawSyscall(syscall.SYS_EXIT_GROUP, 253, 0, 0)
	}
}

// cstrings returns a nil-terminated vector. No string may hold a NUL.
func cstrings(ss []string) ([]*byte, error) {
	out := make([]*byte, 0, len(ss)+1)
	for _, s := range ss {
		p, err := unix.BytePtrFromString(s)
		if err != nil {
			return nil, err
		}
		out = append(out, p)
	}
	return append(out, nil), nil
}
