package doctor

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"airlock.dev/airlock"
)

// probeArg makes a program that calls Main a probe.
const probeArg = "doctor-probe"

// Main runs a probe and exits, if this process was started as one; otherwise
// it returns at once. A program that uses this package calls it first.
func Main() {
	if len(os.Args) != 3 || os.Args[1] != probeArg {
		return
	}
	var err error
	switch os.Args[2] {
	case "none":
	case "userns":
		err = probeUser()
	case "proc":
		err = unix.Mount("proc", "/proc", "proc", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "")
	case "kvm":
		err = probeKVM()
	default:
		err = errors.New("unknown probe")
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		syscall.Exit(1) // not os.Exit, which waits a second in a race-built program
	}
	syscall.Exit(0)
}

// A probe that hangs is ended. The guest either answers within milliseconds
// or hangs; the others may have to wait for a busy machine.
const (
	probeTimeout = 10 * time.Second
	kvmTimeout   = 2 * time.Second
)

// probe runs this program again as a probe and returns its error.
func probe(ctx context.Context, name string, timeout time.Duration, attr *syscall.SysProcAttr) error {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, "/proc/self/exe", probeArg, name)
	cmd.SysProcAttr = attr
	cmd.WaitDelay = time.Second
	var out strings.Builder
	cmd.Stderr = &out
	err := cmd.Run()
	switch {
	case err == nil:
		return nil
	case ctx.Err() != nil:
		return fmt.Errorf("no answer within %v", timeout)
	case out.Len() > 0:
		return errors.New(strings.TrimSpace(out.String()))
	}
	return err
}

func namespaces() *syscall.SysProcAttr {
	ids := []syscall.SysProcIDMap{{ContainerID: 0, HostID: airlock.HostUserBase, Size: airlock.HostUsers}}
	return &syscall.SysProcAttr{
		Cloneflags:                 unix.CLONE_NEWUSER | unix.CLONE_NEWNS | unix.CLONE_NEWPID | unix.CLONE_NEWNET | unix.CLONE_NEWIPC | unix.CLONE_NEWUTS,
		UidMappings:                ids,
		GidMappings:                ids,
		GidMappingsEnableSetgroups: true,
		Credential:                 &syscall.Credential{Uid: 0, Gid: 0},
		Pdeathsig:                  unix.SIGKILL,
	}
}

func userNamespace(ctx context.Context) Finding {
	const name = "user namespaces"
	if err := probe(ctx, "userns", probeTimeout, namespaces()); err != nil {
		return fail(name, "cannot make one: "+err.Error(),
			"allow them: `sysctl user.max_user_namespaces=15000` (and kernel.unprivileged_userns_clone=1 and kernel.apparmor_restrict_unprivileged_userns=0 where they exist); inside a container, run it privileged")
	}
	return ok(name, fmt.Sprintf("made one with user, mount, pid and network of its own, root in it is host user %d", airlock.HostUserBase))
}

// probeUser checks from inside that root is mapped and alone.
func probeUser() error {
	if os.Getuid() != 0 || os.Getgid() != 0 || os.Getpid() != 1 {
		return fmt.Errorf("uid %d, gid %d, pid %d inside instead of 0, 0, 1", os.Getuid(), os.Getgid(), os.Getpid())
	}
	return nil
}

func procMount(ctx context.Context) Finding {
	const name = "mount proc"
	attr := namespaces()
	attr.Cloneflags &^= unix.CLONE_NEWUSER // as the keeper does it: its sandboxes get theirs from it
	attr.UidMappings, attr.GidMappings, attr.Credential = nil, nil, nil
	attr.Unshareflags = unix.CLONE_NEWNS // makes every mount private, so that ours stays inside
	if err := probe(ctx, "proc", probeTimeout, attr); err != nil {
		return fail(name, "cannot mount in namespaces of one's own: "+err.Error(), "run airlock as root with CAP_SYS_ADMIN, outside of a container or in a privileged one")
	}
	return ok(name, "in mount and pid namespaces of its own")
}

func seccompFilters() Finding {
	const name = "seccomp"
	for _, action := range []uint32{unix.SECCOMP_RET_TRAP, unix.SECCOMP_RET_TRACE, unix.SECCOMP_RET_KILL_PROCESS} {
		_, _, errno := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_GET_ACTION_AVAIL, 0, uintptr(unsafe.Pointer(&action)))
		if errno != 0 {
			return fail(name, "filters are not available: "+errno.Error(), "use a kernel with CONFIG_SECCOMP_FILTER: gVisor's systrap platform stands on it")
		}
	}
	return ok(name, "filters with trap, trace and kill")
}

// tracing starts a traced child, as gVisor does once for each address space.
func tracing() Finding {
	const name = "ptrace"
	if err := tryTrace(); err != nil {
		return fail(name, "cannot trace a child: "+err.Error(), "set kernel.yama.ptrace_scope to 2 or less, and allow ptrace in the container's seccomp profile")
	}
	return ok(name, "children can be traced; gVisor's systrap platform works")
}

func tryTrace() error {
	runtime.LockOSThread() // the tracer is a thread
	defer runtime.UnlockOSThread()
	cmd := exec.Command("/proc/self/exe", probeArg, "none")
	cmd.SysProcAttr = &syscall.SysProcAttr{Ptrace: true, Pdeathsig: unix.SIGKILL}
	if err := cmd.Start(); err != nil {
		return err
	}
	var status unix.WaitStatus
	if _, err := unix.Wait4(cmd.Process.Pid, &status, 0, nil); err != nil {
		cmd.Process.Kill()
		return err
	}
	if !status.Stopped() {
		return fmt.Errorf("the child did not stop (status %#x)", uint32(status))
	}
	if err := unix.PtraceDetach(cmd.Process.Pid); err != nil {
		cmd.Process.Kill()
		cmd.Wait()
		return err
	}
	return cmd.Wait()
}

func kvm(ctx context.Context) Finding {
	const name = "kvm"
	const later = "optional: gVisor's systrap is used and needs none; microVMs will"
	if _, err := os.Stat("/dev/kvm"); err != nil {
		return warn(name, "not usable: no /dev/kvm", later+": load the kvm_intel or kvm_amd module, or allow nested virtualisation for this machine")
	}
	if err := probe(ctx, "kvm", kvmTimeout, &syscall.SysProcAttr{Pdeathsig: unix.SIGKILL}); err != nil {
		why := err.Error()
		if _, err := os.Stat("/sys/module/kvm_pvm"); err == nil {
			why += " (kvm_pvm interprets a guest's kernel instead of running it)"
		}
		return warn(name, "not usable: "+why, later+": use a machine whose processor's virtualisation is passed on")
	}
	return ok(name, "a guest ran in 64-bit mode")
}
