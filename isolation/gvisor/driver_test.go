package gvisor_test

import (
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"airlock.dev/airlock"
	"airlock.dev/airlock/image"
	"airlock.dev/airlock/isolation"
	"airlock.dev/airlock/isolation/gvisor"
	"airlock.dev/airlock/isolation/isolationtest"
	"airlock.dev/airlock/keeper"
)

const (
	inside     = "gvisor-test" // this test's name in namespaces of its own
	runtimeDir = "/run/airlock"
)

// TestMain builds the static binaries, since a race-built test cannot be
// re-executed by gVisor, and goes on in namespaces as the server's.
func TestMain(m *testing.M) {
	if os.Args[0] == inside {
		if err := settle(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(m.Run())
	}
	if os.Geteuid() != 0 {
		if os.Getenv("CI") != "" {
			fmt.Fprintln(os.Stderr, "FAIL: the gVisor driver needs root, and in CI nothing may skip")
			os.Exit(1)
		}
		fmt.Println("skipped: the gVisor driver needs root")
		os.Exit(0)
	}
	os.Exit(enter())
}

func enter() int {
	bin, err := os.MkdirTemp("", "airlock-bin-")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(bin)
	if err := os.Chmod(bin, 0o755); err != nil { // root inside is nobody outside
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	build := exec.Command("go", "build", "-trimpath", "-ldflags=-s -w", "-o", bin+"/", "airlock.dev/airlock/cmd/airlock", "airlock.dev/airlock/cmd/airlock-guest")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		fmt.Fprintf(os.Stderr, "build the static binaries: %v\n%s", err, out)
		return 1
	}
	os.Setenv("AIRLOCK_TEST_BIN", bin)
	code, err := keeper.Enter(inside)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return code
}

func settle() error {
	if err := os.MkdirAll(runtimeDir, 0o711); err != nil {
		return err
	}
	if err := keeper.Settle(); err != nil {
		return err
	}
	return unix.Mount("tmpfs", runtimeDir, "tmpfs", unix.MS_NODEV, "mode=0711")
}

// holder is a keeper in this process.
type holder struct {
	mu  sync.Mutex
	all map[string]*os.File
}

func (h *holder) Hold(id string, f *os.File) error {
	fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.all[id] = os.NewFile(uintptr(fd), id)
	return nil
}

func (h *holder) Take(id string) *os.File {
	h.mu.Lock()
	defer h.mu.Unlock()
	f := h.all[id]
	if f == nil {
		return nil
	}
	fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil
	}
	return os.NewFile(uintptr(fd), id)
}

func (h *holder) Drop(id string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if f := h.all[id]; f != nil {
		f.Close()
		delete(h.all, id)
	}
}

func (h *holder) ids() []string {
	h.mu.Lock()
	defer h.mu.Unlock()
	var ids []string
	for id := range h.all {
		ids = append(ids, "channel "+id)
	}
	return ids
}

func TestConformance(t *testing.T) {
	bin := os.Getenv("AIRLOCK_TEST_BIN")
	img, err := image.Host(filepath.Join(runtimeDir, "images"), bin+"/airlock-guest", airlock.HostUserBase, image.Options{})
	if err != nil {
		t.Fatal(err)
	}
	base := fmt.Sprintf("airlock-test-%d", os.Getppid())
	hold := &holder{all: map[string]*os.File{}}
	disk := t.TempDir()
	open := func(t *testing.T) *gvisor.Driver {
		d, err := gvisor.New(gvisor.Config{RuntimeDir: runtimeDir, DiskDir: disk, CgroupBase: base, Keeper: hold, Exe: bin + "/airlock"})
		if err != nil {
			t.Fatal(err)
		}
		return d
	}
	d := open(t)
	t.Cleanup(d.Close)
	var n atomic.Int64
	isolationtest.Run(t, isolationtest.Harness{
		Driver:  d,
		Restart: func(t *testing.T) isolation.Driver { return open(t) },
		Spec: func() isolation.Spec {
			return isolation.Spec{
				ID: fmt.Sprint("t", n.Add(1)), RootFS: img.RootFS, Guest: img.Guest, Hostname: "sandbox",
				Limits: airlock.Limits{CPUs: 2, MemoryMB: 256, DiskMB: 128, Processes: 64, OpenFiles: 64, OutputBytes: 1 << 20},
			}
		},
		Left:     func() []string { return left(base, disk, hold) },
		Echo:     "/bin/echo",
		Exit:     func(code int) (string, []string) { return "/bin/sh", []string{"-c", fmt.Sprint("exit ", code)} },
		Isolates: true,
		Host:     plant(t),
	})
}

// TestNothingLeaks starts sandboxes while the numbers of free descriptors are
// high and others are being started: each gets its own control socket only.
// (gVisor moves stdio to 253 and on, and refuses to start where one is taken.)
func TestNothingLeaks(t *testing.T) {
	bin := os.Getenv("AIRLOCK_TEST_BIN")
	img, err := image.Host(filepath.Join(runtimeDir, "images"), bin+"/airlock-guest", airlock.HostUserBase, image.Options{})
	if err != nil {
		t.Fatal(err)
	}
	d, err := gvisor.New(gvisor.Config{RuntimeDir: runtimeDir, DiskDir: t.TempDir(), CgroupBase: fmt.Sprintf("airlock-leak-%d", os.Getppid()), Exe: bin + "/airlock"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(d.Close)
	for {
		f, err := os.Open(os.DevNull)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { f.Close() })
		if f.Fd() >= 235 {
			break
		}
	}
	var wg sync.WaitGroup
	for i := range 12 {
		wg.Go(func() {
			sb, err := d.Create(t.Context(), isolation.Spec{ID: fmt.Sprint("leak", i), RootFS: img.RootFS, Guest: img.Guest, Hostname: "sandbox", Limits: airlock.DefaultLimits})
			if err != nil {
				t.Errorf("create: %v", err)
				return
			}
			t.Cleanup(func() { sb.Destroy(context.Background()) })
		})
	}
	wg.Wait()
	// Creating sandboxes moves no thread of the server to another network.
	spaces := map[string]int{}
	tasks, _ := filepath.Glob("/proc/self/task/*/ns/net")
	for _, task := range tasks {
		if target, err := os.Readlink(task); err == nil {
			spaces[target]++
		}
	}
	if len(spaces) != 1 {
		t.Errorf("threads are in several network namespaces: %v", spaces)
	}
	// A read of the table misses sockets while others come and go.
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(100 * time.Millisecond) {
		own := controlSockets(t)
		if own >= 12 {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%d control sockets were found, want 12 or more", own)
		}
	}
}

// controlSockets counts the processes of sandboxes that hold their own control
// socket, and fails the test for one that holds another's.
func controlSockets(t *testing.T) (own int) {
	t.Helper()
	sockets := map[string]string{} // inode → path
	table, err := os.ReadFile("/proc/net/unix")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(table)) {
		if f := strings.Fields(line); len(f) == 8 {
			sockets["socket:["+f[6]+"]"] = f[7]
		}
	}
	fds, _ := filepath.Glob("/proc/[0-9]*/fd/*")
	for _, fd := range fds {
		target, err := os.Readlink(fd)
		path := sockets[target]
		cmdline, _ := os.ReadFile(filepath.Dir(filepath.Dir(fd)) + "/cmdline")
		if err != nil || !strings.Contains(path, "/runsc-") || !strings.HasPrefix(string(cmdline), "runsc-") {
			continue
		}
		if id := strings.TrimSuffix(strings.SplitAfter(path, "/runsc-")[1], ".sock"); strings.Contains(string(cmdline), "\x00"+id+"\x00") {
			own++
		} else {
			t.Errorf("%s is the control socket of %s, in %.40q", fd, id, cmdline)
		}
	}
	return own
}

// left lists what exists on the host for sandboxes.
func left(base, disk string, hold *holder) []string {
	all := hold.ids()
	for _, dir := range []string{runtimeDir + "/s", disk} {
		entries, _ := os.ReadDir(dir)
		for _, e := range entries {
			all = append(all, dir+"/"+e.Name())
		}
	}
	for _, root := range []string{"/sys/fs/cgroup", "/sys/fs/cgroup/cpu", "/sys/fs/cgroup/memory", "/sys/fs/cgroup/pids"} {
		groups, _ := filepath.Glob(filepath.Join(root, base, "*"))
		for _, g := range groups {
			if info, err := os.Stat(g); err == nil && info.IsDir() {
				all = append(all, g)
			}
		}
	}
	mounts, _ := os.ReadFile("/proc/self/mountinfo")
	for line := range strings.Lines(string(mounts)) {
		if f := strings.Fields(line); len(f) > 4 && strings.HasPrefix(f[4], runtimeDir+"/s/") {
			all = append(all, "mount "+f[4])
		}
	}
	entries, _ := os.ReadDir("/proc")
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil || pid == os.Getpid() {
			continue
		}
		if name, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid)); err == nil {
			all = append(all, fmt.Sprintf("process %.60q", name))
		}
	}
	slices.Sort(all)
	return all
}

// plant puts things on the host that hostile code must not reach.
func plant(t *testing.T) isolationtest.Host {
	t.Helper()
	canary := fmt.Sprintf("canary%dx%d", os.Getppid(), os.Getpid())
	var files []string
	for _, dir := range []string{"/usr/local", "/usr/local/etc", "/usr/share", "/root", "/home", "/var/lib", "/etc"} {
		dir, err := os.MkdirTemp(dir, "airlock-canary-")
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { os.RemoveAll(dir) })
		if err := os.Chmod(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		path := filepath.Join(dir, "secret")
		if err := os.WriteFile(path, []byte(canary+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		files = append(files, path)
	}
	// Readable by all, but not among what the image shows.
	for _, dir := range []string{"/etc", "/var", "/opt"} {
		path := fmt.Sprintf("%s/airlock-canary-open-%d", dir, os.Getpid()) // others may test on this machine
		if err := os.WriteFile(path, []byte(canary+"\n"), 0o644); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { os.Remove(path) })
		files = append(files, path)
	}
	tcp, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	abstract, err := net.Listen("unix", "@"+canary)
	if err != nil {
		t.Fatal(err)
	}
	socket := filepath.Join(filepath.Dir(files[0]), "socket")
	file, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(socket, 0o777); err != nil {
		t.Fatal(err)
	}
	for _, l := range []net.Listener{tcp, abstract, file} {
		t.Cleanup(func() { l.Close() })
		go func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				io.WriteString(c, canary)
				c.Close()
			}
		}()
	}
	return isolationtest.Host{
		Canary: canary, Files: files, Written: filepath.Join(filepath.Dir(files[0]), "written"),
		Exists: func(path string) bool { _, err := os.Lstat(path); return err == nil },
		TCP:    tcp.Addr().String(), Abstract: canary, SocketFile: socket,
	}
}
