package wal

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"airlock.dev/airlock"
	"golang.org/x/sys/unix"
)

// TestMain is also the children of TestKill and TestDiskFull.
func TestMain(m *testing.M) {
	var child func(dir string) error
	dir := os.Getenv("AIRLOCK_TEST_WAL_DIR")
	switch os.Getenv("AIRLOCK_TEST_WAL") {
	case "kill":
		child = appendUntilKilled
	case "full":
		child = fillDisk
	default:
		os.Exit(m.Run())
	}
	if err := child(dir); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func childConfig(dir string) Config {
	return Config{Dir: filepath.Join(dir, "wal"), SegmentBytes: 4 << 10, MaxBytes: 64 << 10, MaxRecord: 1200}
}

// appendUntilKilled says of each record that it is acknowledged, and of each
// Trim that it begins.
func appendUntilKilled(dir string) error {
	l, rec, err := Open(childConfig(dir))
	if err != nil {
		return err
	}
	if !rec.Clean {
		return errors.New("a new log was not clean")
	}
	var wg sync.WaitGroup
	errs := make(chan error, 2)
	for range 2 {
		wg.Go(func() {
			for range 5 {
				t, err := appendRecord(l)
				if err == nil {
					err = t.Wait(context.Background())
				}
				if err != nil {
					errs <- err
					return
				}
				fmt.Printf("acked %d\n", t.Seq())
			}
		})
	}
	wg.Wait()
	select {
	case err := <-errs:
		return err
	default:
	}
	fmt.Printf("trim 6\n")
	if err := l.Trim(6); err != nil {
		return err
	}
	if _, err := appendRecord(l); err != nil {
		return err
	}
	if err := l.Close(); err != nil {
		return err
	}
	fmt.Printf("acked 10\nclosed\n")
	return nil
}

// TestKill kills a process that writes at each of its system calls that change
// something, and looks whether all that it had acknowledged is there.
func TestKill(t *testing.T) {
	strace, err := exec.LookPath("strace")
	if err != nil {
		t.Skip("strace is not installed")
	}
	if out, err := exec.Command(strace, "-f", "-o", os.DevNull, "true").CombinedOutput(); err != nil {
		t.Skipf("strace may not trace here: %v: %s", err, out)
	}
	for _, call := range []string{"pwrite64", "fdatasync", "fsync", "fallocate", "renameat", "unlinkat", "openat", "mkdirat", "flock"} {
		t.Run(call, func(t *testing.T) {
			t.Parallel()
			for n := 1; ; n++ {
				if !killAt(t, strace, call, n) {
					// Calls are counted for each thread, so this is the first
					// number that no thread has come to.
					if n == 1 {
						t.Fatalf("the writer never calls %s", call)
					}
					return
				}
			}
		})
	}
}

func killAt(t *testing.T, strace, call string, n int) (killed bool) {
	t.Helper()
	dir := t.TempDir()
	cmd := exec.Command(strace, "-f", "-qq", "-o", os.DevNull, "-e", "trace="+call,
		"-e", fmt.Sprintf("inject=%s:signal=KILL:when=%d", call, n), os.Args[0])
	cmd.Env = append(os.Environ(), "AIRLOCK_TEST_WAL=kill", "AIRLOCK_TEST_WAL_DIR="+dir)
	var out, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &stderr
	err := cmd.Run()
	var exit *exec.ExitError
	if err != nil && (!errors.As(err, &exit) || exit.ExitCode() == 1) {
		t.Fatalf("%s %d: %v: %s", call, n, err, &stderr)
	}
	var acked, kept uint64
	closed := false
	for lines := bufio.NewScanner(&out); lines.Scan(); {
		what, number, _ := strings.Cut(lines.Text(), " ")
		k, _ := strconv.ParseUint(number, 10, 64)
		switch what {
		case "acked":
			acked = max(acked, k+1)
		case "trim":
			kept = k
		case "closed":
			closed = true
		}
	}
	l, rec, err := Open(childConfig(dir))
	if err != nil {
		t.Fatalf("killed at %s %d: %v", call, n, err)
	}
	defer l.Close()
	if rec.Next < acked || rec.First > kept || closed && !rec.Clean {
		t.Fatalf("killed at %s %d: %d records were acknowledged, trimmed before %d, closed %v; found %+v", call, n, acked, kept, closed, rec)
	}
	readAll(t, l, rec.First, rec.Next)
	ticket, err := appendRecord(l)
	if err == nil {
		err = ticket.Wait(t.Context())
	}
	if err != nil {
		t.Fatalf("killed at %s %d: append after that: %v", call, n, err)
	}
	if err := l.Close(); err != nil {
		t.Fatalf("killed at %s %d: close after that: %v", call, n, err)
	}
	return err == nil && !closed
}

// TestDiskFull is a log on a file system with room for three segments.
func TestDiskFull(t *testing.T) {
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), "AIRLOCK_TEST_WAL=full", "AIRLOCK_TEST_WAL_DIR="+t.TempDir())
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNS}
	out, err := cmd.CombinedOutput()
	switch {
	case errors.Is(err, syscall.EPERM), strings.Contains(string(out), "mount: operation not permitted"):
		t.Skip("making a file system needs root")
	case err != nil:
		t.Fatalf("%v: %s", err, out)
	}
}

func fillDisk(dir string) error {
	if err := unix.Mount("none", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("mount: %w", err)
	}
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=384k"); err != nil {
		return fmt.Errorf("mount: %w", err)
	}
	other := filepath.Join(dir, "other")
	if err := os.WriteFile(other, make([]byte, 160<<10), 0o600); err != nil {
		return err
	}
	cfg := Config{Dir: filepath.Join(dir, "wal"), SegmentBytes: 64 << 10, MaxBytes: 1 << 20}
	l, _, err := Open(cfg)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	var next uint64
	for {
		t, err := appendRecord(l)
		if airlock.CodeOf(err) == airlock.NoSpace {
			var e *airlock.Error
			errors.As(err, &e)
			if !strings.Contains(e.Message, cfg.Dir) || e.Hint == "" {
				return fmt.Errorf("the error does not say where and what to do: %w", err)
			}
			break
		}
		if err != nil {
			return err
		}
		next = t.Seq() + 1
		if err := t.Wait(ctx); err != nil && airlock.CodeOf(err) != airlock.NoSpace {
			return err
		}
	}
	if next < 100 {
		return fmt.Errorf("only %d records had room", next)
	}
	if err := os.Remove(other); err != nil {
		return err
	}
	for range 60 {
		t, err := appendRecord(l)
		for ; airlock.CodeOf(err) == airlock.NoSpace && ctx.Err() == nil; t, err = appendRecord(l) {
			time.Sleep(time.Millisecond) // that it goes on by itself is the point
		}
		if err != nil {
			return err
		}
		if err := t.Wait(ctx); err != nil {
			return err
		}
		if t.Seq() != next {
			return fmt.Errorf("after space came back a record has number %d, not %d", t.Seq(), next)
		}
		next++
	}
	if err := l.Close(); err != nil {
		return err
	}
	l, rec, err := Open(cfg)
	if err != nil {
		return err
	}
	defer l.Close()
	if want := (Recovery{Next: next, Clean: true}); rec != want {
		return fmt.Errorf("found %+v, not %+v", rec, want)
	}
	for n := range next {
		records, err := l.Read(n, 1)
		if err != nil || len(records) != 1 || !bytes.Equal(records[0], record(n)) {
			return fmt.Errorf("record %d is not as it was written: %w", n, err)
		}
	}
	return nil
}
