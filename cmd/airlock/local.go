package main

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"runtime/debug"
	"strings"
	"time"

	"crypto/rand"

	"golang.org/x/sys/unix"

	"airlock.dev/airlock"
	"airlock.dev/airlock/channel"
	"airlock.dev/airlock/cli"
	"airlock.dev/airlock/cluster"
	"airlock.dev/airlock/control"
	"airlock.dev/airlock/image"
	"airlock.dev/airlock/isolation/gvisor"
	"airlock.dev/airlock/keeper"
	"airlock.dev/airlock/policy"
)

// A run without a server has a control group and a lock file of its own:
//
//	<data dir>/runs/<name>.lock   held while the run lives
//
// so that any later start can tell which runs were killed and remove what the
// host's kernel did not: the control groups.
func runsDir(dataDir string) string { return filepath.Join(dataDir, "runs") }

// enterLocal continues this very command line in namespaces of its own.
func enterLocal(ctx context.Context) (int, error) { return keeper.Enter(localName) }

func runLocal() int {
	// Sandboxes inherit descriptors 0 to 2, so those become the null device.
	var files [3]*os.File
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		return 125
	}
	for i, f := range []*os.File{os.Stdin, os.Stdout, os.Stderr} {
		fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 10)
		if err == nil {
			err = unix.Dup2(int(null.Fd()), i)
		}
		if err != nil {
			return 125
		}
		files[i] = os.NewFile(uintptr(fd), f.Name())
	}
	debug.SetCrashOutput(files[2], debug.CrashOptions{})
	ctx, cancel := signal.NotifyContext(context.Background(), os.Interrupt, unix.SIGTERM)
	defer cancel()
	if err := settle(); err != nil {
		fmt.Fprintln(files[2], "airlock: settle in the namespaces:", err)
		return 125
	}
	return cli.Main(ctx, os.Args[1:], cli.Deps{Version: version, RunLocal: local, Stdin: files[0], Stdout: files[1], Stderr: files[2]})
}

// localRunner is one sandbox in this process.
type localRunner struct {
	*control.Guest
	close []func() error
}

func local(ctx context.Context, o cli.RunOptions) (_ cli.Runner, err error) {
	r := &localRunner{}
	defer func() {
		if err != nil {
			err = errors.Join(err, r.Close())
		}
	}()
	if err := os.MkdirAll(runsDir(o.DataDir), 0o700); err != nil {
		return nil, fmt.Errorf("make the data directory: %w", err)
	}
	sweepRuns(o.DataDir)
	name := hex.EncodeToString([]byte(rand.Text()[:6]))
	lock, err := lockRun(o.DataDir, name, true)
	if err != nil {
		return nil, err
	}
	r.onClose(func() error { return errors.Join(os.Remove(lock.Name()), lock.Close()) })
	guest, err := guestBinary()
	if err != nil {
		return nil, err
	}
	img, err := image.Host(filepath.Join(runtimeDir, "images"), guest, airlock.HostUserBase, image.Options{})
	if err != nil {
		return nil, err
	}
	disk, err := diskDir(o.DataDir)
	if err != nil {
		return nil, err
	}
	driver, err := gvisor.New(gvisor.Config{
		RuntimeDir: runtimeDir, DiskDir: disk, CgroupBase: cgroupBase(o.DataDir, "-run-"+name), DebugDir: os.Getenv("AIRLOCK_GVISOR_DEBUG"), Exe: runscExe(),
	})
	if err != nil {
		return nil, err
	}
	r.onClose(func() error { driver.Close(); return nil })
	host, err := hostCapacity(o.DataDir, 0)
	if err != nil {
		return nil, err
	}
	log := slog.New(slog.DiscardHandler)
	sandboxes, err := control.New(ctx, control.Config{
		Store: cluster.NewMemory(), Driver: driver, Image: img, Host: host, Team: host, Log: log,
		Boundary: control.Boundary{Policies: policy.Builtin, Trail: control.Unrecorded{}},
	})
	if err != nil {
		return nil, err
	}
	r.onClose(func() error { sandboxes.Close(true); return nil })
	sb, err := sandboxes.Create(ctx, airlock.Principal{Team: localTeam, Role: airlock.Client, KeyID: "local"}, control.CreateRequest{Timeout: o.Life, Limits: o.Limits})
	if err != nil {
		return nil, err
	}
	if r.Guest, err = sandboxes.Open(ctx, sb.ID); err != nil {
		return nil, err
	}
	return r, nil
}

func (r *localRunner) onClose(f func() error) { r.close = append(r.close, f) }

// Close ends the sandbox and undoes all of local, the last first.
func (r *localRunner) Close() error {
	var errs []error
	for i := len(r.close) - 1; i >= 0; i-- {
		errs = append(errs, r.close[i]())
	}
	r.close = nil
	return errors.Join(errs...)
}

// Exec implements cli.Runner.
func (r *localRunner) Exec(ctx context.Context, req cli.ExecRequest) (cli.ExecResult, error) {
	e, err := r.Start(ctx, channel.StartRequest{Cmd: req.Cmd, Args: req.Args, Env: req.Env, Cwd: req.Cwd, User: req.User, Stdin: req.Stdin != nil}, req.Timeout)
	if err != nil {
		return cli.ExecResult{}, err
	}
	defer e.Close()
	ref := channel.ProcessRef{PID: e.PID()}
	if req.Stdin != nil {
		// It ends with the process at the latest; a read of a terminal
		// cannot be taken back, so nothing waits for it.
		go func() {
			if r.Input(ctx, ref, req.Stdin) == nil {
				r.CloseStdin(ctx, ref)
			}
		}()
	}
	for {
		ev, err := e.Recv(ctx)
		if ctx.Err() != nil {
			stop, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
			defer cancel()
			r.Signal(stop, ref, int(unix.SIGKILL))
			return cli.ExecResult{}, ctx.Err()
		}
		if err != nil {
			return cli.ExecResult{}, err
		}
		switch {
		case ev.End != nil:
			return cli.ExecResult{ExitCode: ev.End.ExitCode, Outcome: ev.End.Outcome, Signal: ev.End.Signal, Message: ev.End.Message}, nil
		case ev.Stream == channel.TagStderr:
			_, err = req.Stderr.Write(ev.Data)
		default:
			_, err = req.Stdout.Write(ev.Data)
		}
		if err != nil {
			return cli.ExecResult{}, fmt.Errorf("write the program's output: %w", err)
		}
	}
}

// Upload implements cli.Runner.
func (r *localRunner) Upload(ctx context.Context, path string, src io.Reader, mode os.FileMode) error {
	_, err := r.WriteFile(ctx, channel.WriteRequest{PathRequest: channel.PathRequest{Path: path}, Mode: uint32(mode.Perm())}, src)
	return err
}

// Download implements cli.Runner.
func (r *localRunner) Download(ctx context.Context, path string, w io.Writer) error {
	_, src, err := r.ReadFile(ctx, channel.ReadRequest{PathRequest: channel.PathRequest{Path: path}})
	if err != nil {
		return err
	}
	defer src.Close()
	_, err = io.Copy(w, src)
	return err
}

// lockRun takes a run's lock. Without create it is an error if there is none.
func lockRun(dataDir, name string, create bool) (*os.File, error) {
	flags := os.O_RDWR
	if create {
		flags |= os.O_CREATE | os.O_EXCL
	}
	f, err := os.OpenFile(filepath.Join(runsDir(dataDir), name+".lock"), flags, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open the run's lock: %w", err)
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		f.Close()
		return nil, fmt.Errorf("lock the run: %w", err)
	}
	return f, nil
}

// sweepRuns removes what killed runs left. What it cannot remove now the next
// start removes: a run in the moment between making and locking its file is
// left alone by its age.
func sweepRuns(dataDir string) {
	entries, _ := os.ReadDir(runsDir(dataDir))
	for _, e := range entries {
		name, ok := strings.CutSuffix(e.Name(), ".lock")
		info, err := e.Info()
		if !ok || err != nil || time.Since(info.ModTime()) < time.Second {
			continue
		}
		lock, err := lockRun(dataDir, name, false)
		if err != nil {
			continue // it lives
		}
		if gvisor.Discard(cgroupBase(dataDir, "-run-"+name)) == nil {
			os.Remove(lock.Name())
		}
		lock.Close()
	}
}
