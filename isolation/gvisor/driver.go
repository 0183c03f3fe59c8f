// Package gvisor is the driver that isolates with an application kernel:
// gVisor's runsc as a library, which re-executes this very binary for the
// kernel and its file server.
//
// What a sandbox is on the host: two processes in a user namespace in which
// no host user is mapped, so that the host's own kernel denies them every
// file that is not readable by all; a control group; one end of the guest
// channel, also held by the keeper; a directory in the runtime tree; an
// unlinked file for its overlay. The runtime tree is a tmpfs in the mount
// namespace of the server, so what is in it ends with the namespace.
//
// The package must not know who owns a sandbox or what it is for. Start
// reading at Driver.Create.
package gvisor

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
	gvlog "gvisor.dev/gvisor/pkg/log"
	"gvisor.dev/gvisor/runsc/config"
	"gvisor.dev/gvisor/runsc/container"
	"gvisor.dev/gvisor/runsc/flag"
	"gvisor.dev/gvisor/runsc/specutils"

	"airlock.dev/airlock"
	"airlock.dev/airlock/isolation"
)

// Keeper keeps the host end of guest channels while servers come and go.
type Keeper interface {
	// Hold keeps a duplicate of f under id, in place of one before.
	Hold(id string, f *os.File) error
	// Take returns a duplicate of what is held under id, or nil.
	Take(id string) *os.File
	// Drop closes what is held under id.
	Drop(id string)
}

// Config says where the driver works.
type Config struct {
	RuntimeDir string // on a tmpfs of this mount namespace; reachable for all users (o+x)
	DiskDir    string // overlays' files: on a disk, not charged as memory
	CgroupBase string // name of the subtree of control groups that is this driver's alone
	Keeper     Keeper // nil: channels end with this process
	// OwnNamespace says that this process namespace holds only the keeper,
	// this server and its sandboxes, so that Sweep may end all others.
	OwnNamespace bool
	DebugDir     string // gVisor's debug logs go there, the sandbox's system calls among them; "" writes none
	Exe          string // the static binary that gVisor re-executes; "" is this process's own
	Log          *slog.Logger
}

// Driver implements isolation.Driver.
type Driver struct {
	cfg Config
	cg  *cgroups

	mu  sync.Mutex
	all map[string]*sandbox
}

// New prepares the directories and finds the control groups.
func New(cfg Config) (*Driver, error) {
	if cfg.Exe != "" {
		specutils.ExePath = cfg.Exe
	}
	gvlog.SetTarget(gvlog.GoogleEmitter{Writer: &gvlog.Writer{Next: io.Discard}})
	for _, dir := range []string{cfg.RuntimeDir, filepath.Join(cfg.RuntimeDir, "s"), cfg.DiskDir} {
		if err := os.MkdirAll(dir, 0o711); err != nil {
			return nil, fmt.Errorf("make the driver's directories: %w", err)
		}
	}
	cg, err := findCgroups(cfg.CgroupBase)
	if err != nil {
		return nil, err
	}
	return &Driver{cfg: cfg, cg: cg, all: map[string]*sandbox{}}, nil
}

// Discard ends and removes everything in a subtree of control groups whose
// owner is dead.
func Discard(cgroupBase string) error {
	cg, err := findCgroups(cgroupBase)
	if err != nil {
		return err
	}
	for _, id := range cg.ids() {
		cg.kill(id)
		if err := cg.remove(id, removeWait); err != nil {
			return err
		}
	}
	cg.removeBase()
	return nil
}

// Name implements isolation.Driver.
func (d *Driver) Name() string { return "gvisor" }

// Close removes the driver's own control group if no sandbox is left.
func (d *Driver) Close() { d.cg.removeBase() }

func (d *Driver) dir(id string) string { return filepath.Join(d.cfg.RuntimeDir, "s", id) }

// meta is what Recover needs to know of a sandbox.
type meta struct {
	PID, Gofer           int
	PIDStart, GoferStart uint64
	Disk                 int64
	Door                 bool
}

type sandbox struct {
	id   string
	d    *Driver
	meta meta

	sandboxExit, goferExit *processExit

	ended     chan struct{} // closed when the kernel's process is gone
	exit      isolation.Exit
	reaped    sync.WaitGroup
	destroyMu sync.Mutex
	destroyed bool
	killing   bool // guarded by d.mu

	channelMu sync.Mutex
	channel   *os.File
	dialed    *os.File // what the last Dial returned
	door      *os.File // nil without a link
}

// Create implements isolation.Driver.
func (d *Driver) Create(ctx context.Context, spec isolation.Spec) (_ isolation.Sandbox, err error) {
	if !airlock.ValidSandboxID(spec.ID) {
		return nil, airlock.Invalidf("id", "use 1 to 32 characters of a-z and 0-9", "the sandbox id %q is not valid", spec.ID)
	}
	if err := spec.Limits.Validate(); err != nil {
		return nil, err
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	step := spec.Step
	if step == nil {
		step = func(string) {}
	}
	s := &sandbox{id: spec.ID, d: d, ended: make(chan struct{})}
	d.mu.Lock()
	if d.all[spec.ID] != nil {
		d.mu.Unlock()
		return nil, airlock.Errorf(airlock.Exists, "a sandbox %q exists", spec.ID)
	}
	d.all[spec.ID] = s
	d.mu.Unlock()
	defer func() {
		if err != nil {
			s.Destroy(context.WithoutCancel(ctx))
		}
	}()

	dir := d.dir(spec.ID)
	if err := os.Mkdir(dir, 0o711); err != nil {
		return nil, fmt.Errorf("make the sandbox's directory: %w", err)
	}
	if err := d.cg.create(spec.ID, spec.Limits); err != nil {
		return nil, err
	}
	step("groups")
	ours, theirs, err := channelPair()
	if err != nil {
		return nil, err
	}
	defer theirs.Close()
	s.channel = ours
	var theirDoor *os.File
	if spec.Link != nil {
		if s.door, theirDoor, err = doorPair(); err != nil {
			return nil, err
		}
		defer theirDoor.Close()
		s.meta.Door = true
	}
	if d.cfg.Keeper != nil {
		err := d.cfg.Keeper.Hold(spec.ID, ours)
		if err == nil && s.door != nil {
			err = d.cfg.Keeper.Hold(doorName(spec.ID), s.door)
		}
		if err != nil {
			return nil, fmt.Errorf("give the channel to the keeper: %w", err)
		}
	}
	conf, err := d.config(dir, spec)
	if err != nil {
		return nil, err
	}
	oci := ociSpec(spec)
	data, err := json.Marshal(oci)
	if err != nil {
		return nil, fmt.Errorf("encode the sandbox's spec: %w", err)
	}
	if err := os.WriteFile(filepath.Join(dir, "config.json"), data, 0o600); err != nil {
		return nil, fmt.Errorf("write the sandbox's spec: %w", err)
	}
	// Until the start below only gVisor's own code runs.
	c, err := container.New(conf, container.Args{ID: spec.ID, Spec: oci, BundleDir: dir, PassFiles: map[int]*os.File{3: theirs}})
	if err != nil {
		return nil, fmt.Errorf("boot the application kernel: %w", err)
	}
	step("kernel")
	s.meta.PID, s.meta.Gofer, s.meta.Disk = c.SandboxPid(), c.GoferPid.Load(), int64(spec.Limits.DiskMB)<<20
	s.meta.PIDStart, s.meta.GoferStart = startTime(s.meta.PID), startTime(s.meta.Gofer)
	if err := s.watch(); err != nil {
		return nil, err
	}
	if data, err = json.Marshal(s.meta); err != nil {
		return nil, err
	}
	if err := os.WriteFile(filepath.Join(dir, "meta.json"), data, 0o600); err != nil {
		return nil, fmt.Errorf("remember the sandbox: %w", err)
	}
	// Moving processes takes the host's kernel as long as the start takes
	// gVisor, so both happen at once. The start runs the guest, which is
	// ours; user code runs only after Create, in the groups.
	placed := make(map[int]bool)
	moved := make(chan error, 1)
	go func() { moved <- s.place(placed) }()
	err = start(c, conf, spec.Link, theirDoor)
	if moveErr := <-moved; err == nil {
		err = moveErr
	}
	if err != nil {
		return nil, fmt.Errorf("start the guest: %w", err)
	}
	if err := s.place(placed); err != nil { // what was forked meanwhile by one not yet moved
		return nil, err
	}
	if err := d.cg.limitCPU(spec.ID, spec.Limits.CPUs); err != nil {
		return nil, err
	}
	step("guest")
	return s, nil
}

// channelPair returns the two ends of a guest channel. Packets are whole or
// not there, whoever dies.
func channelPair() (ours, theirs *os.File, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("make the guest channel: %w", err)
	}
	if err := unix.SetNonblock(fds[1], false); err != nil { // the guest blocks in its kernel
		unix.Close(fds[0])
		unix.Close(fds[1])
		return nil, nil, fmt.Errorf("make the guest channel: %w", err)
	}
	for _, fd := range fds {
		// Forced sizes need privileges; the default is slower, not wrong.
		unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUFFORCE, 1<<20)
	}
	return os.NewFile(uintptr(fds[0]), "guest-channel"), os.NewFile(uintptr(fds[1]), "guest-end"), nil
}

// config is runsc's own, as its flags.
func (d *Driver) config(dir string, spec isolation.Spec) (*config.Config, error) {
	flags := flag.NewFlagSet("runsc", flag.ContinueOnError)
	config.RegisterFlags(flags)
	args := []string{
		"--root=" + filepath.Join(dir, "state"),
		"--platform=systrap",
		"--network=none",
		// The default, one that all share, is joined by a thread of this
		// process, which gVisor then restores to the namespace of the
		// process's first thread, whichever that is in at the moment.
		"--gofer-network-namespace=new",
		"--ignore-cgroups", // see withLimits
		"--allow-suid",     // sudo inside
		"--host-settings=ignore",
		"--sidecar-usage-policy=LEGACY_DEPRECATED_SLOW_EMBEDDED_FALLBACK",
		fmt.Sprintf("--overlay2=root:dir=%s,size=%dm", d.cfg.DiskDir, spec.Limits.DiskMB),
	}
	if d.cfg.DebugDir != "" {
		args = append(args, "--debug", "--debug-log="+d.cfg.DebugDir+"/")
	}
	if err := flags.Parse(args); err != nil {
		return nil, fmt.Errorf("configure gVisor: %w", err)
	}
	conf, err := config.NewFromFlags(flags)
	if err != nil {
		return nil, fmt.Errorf("configure gVisor: %w", err)
	}
	return conf, nil
}

// guestCapabilities are the default ones of OCI runtimes: what root inside
// may do inside.
var guestCapabilities = []string{
	"CAP_AUDIT_WRITE", "CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_FSETID", "CAP_KILL", "CAP_MKNOD",
	"CAP_NET_BIND_SERVICE", "CAP_SETFCAP", "CAP_SETGID", "CAP_SETPCAP", "CAP_SETUID", "CAP_SYS_CHROOT",
}

func ociSpec(spec isolation.Spec) *specs.Spec {
	ids := []specs.LinuxIDMapping{{ContainerID: 0, HostID: airlock.HostUserBase, Size: airlock.HostUsers}}
	memory := int64(spec.Limits.MemoryMB) << 20
	quota, period := int64(spec.Limits.CPUs*cpuPeriod), uint64(cpuPeriod)
	return &specs.Spec{
		Version:  specs.Version,
		Root:     &specs.Root{Path: spec.RootFS},
		Hostname: spec.Hostname,
		Process: &specs.Process{
			Args: []string{spec.Guest},
			Cwd:  "/",
			// The guest's threads wake each other at the price of system calls here:
			// one that runs at a time costs all sandboxes together a fifth less.
			Env:          []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "GOMAXPROCS=1", "GODEBUG=asyncpreemptoff=1"},
			Capabilities: &specs.LinuxCapabilities{Bounding: guestCapabilities, Effective: guestCapabilities, Permitted: guestCapabilities},
			Rlimits: []specs.POSIXRlimit{
				{Type: "RLIMIT_NOFILE", Soft: uint64(max(spec.Limits.OpenFiles, 4096)), Hard: uint64(max(spec.Limits.OpenFiles, 4096))},
			},
		},
		Mounts: []specs.Mount{
			{Destination: "/proc", Type: "proc", Source: "proc"},
			{Destination: "/dev", Type: "tmpfs", Source: "tmpfs", Options: []string{"nosuid", "mode=755", "size=1m"}},
			{Destination: "/dev/pts", Type: "devpts", Source: "devpts"},
			{Destination: "/dev/shm", Type: "tmpfs", Source: "tmpfs", Options: []string{"nosuid", "nodev", "mode=1777", fmt.Sprintf("size=%dm", max(1, spec.Limits.MemoryMB/2))}},
			{Destination: "/sys", Type: "sysfs", Source: "sysfs", Options: []string{"ro", "nosuid", "nodev", "noexec"}},
		},
		Linux: &specs.Linux{
			Namespaces: []specs.LinuxNamespace{
				{Type: specs.PIDNamespace}, {Type: specs.MountNamespace}, {Type: specs.IPCNamespace},
				{Type: specs.UTSNamespace}, {Type: specs.NetworkNamespace}, {Type: specs.UserNamespace},
			},
			UIDMappings: ids,
			GIDMappings: ids,
			// Not applied by runsc here, which is told to leave control
			// groups alone; withLimits reads them.
			Resources: &specs.LinuxResources{
				Memory: &specs.LinuxMemory{Limit: &memory},
				CPU:    &specs.LinuxCPU{Quota: &quota, Period: &period},
			},
		},
	}
}

// place moves the sandbox's host processes that are not in done into its
// control group; what they fork from then on is born there.
func (s *sandbox) place(done map[int]bool) error {
	for fresh := true; fresh; {
		fresh = false
		for _, pid := range append(descendants(s.meta.PID), descendants(s.meta.Gofer)...) {
			if done[pid] {
				continue
			}
			done[pid], fresh = true, true
			if err := s.d.cg.add(s.id, pid); err != nil {
				return err
			}
		}
	}
	return nil
}

// watch begins to wait for the sandbox's processes; one goroutine for each
// lives until they are gone.
func (s *sandbox) watch() (err error) {
	if s.sandboxExit, err = watchProcess(s.meta.PID); err != nil {
		return err
	}
	if s.meta.Gofer != 0 {
		if s.goferExit, err = watchProcess(s.meta.Gofer); err == nil {
			s.reaped.Go(func() { s.goferExit.wait() })
		}
	}
	oom, err := s.d.cg.watchOOM(s.id)
	if err != nil {
		return err
	}
	if oom != nil {
		s.reaped.Go(func() { s.endAtWall(oom) })
	}
	s.reaped.Go(func() {
		if oom != nil {
			defer oom.Close() // ends endAtWall
		}
		status, known := s.sandboxExit.wait()
		s.exit = s.why(status, known)
		close(s.ended)
	})
	return nil
}

// endAtWall ends the whole sandbox when the kernel begins to end parts of it
// for want of memory: half a sandbox is no sandbox.
func (s *sandbox) endAtWall(oom *os.File) {
	buf := make([]byte, 8)
	for {
		if _, err := oom.Read(buf); err != nil {
			return
		}
		for range 100 { // the event comes before the kill
			if s.d.cg.oomKills(s.id) > 0 {
				s.sandboxExit.kill()
				return
			}
			time.Sleep(2 * time.Millisecond)
		}
	}
}

func (s *sandbox) why(status unix.WaitStatus, known bool) isolation.Exit {
	detail := "ended"
	if known && status.Signaled() {
		detail = "ended by " + unix.SignalName(status.Signal())
	} else if known {
		detail = "exited with " + strconv.Itoa(status.ExitStatus())
	}
	s.d.mu.Lock()
	killing := s.killing
	s.d.mu.Unlock()
	switch {
	case killing:
		return isolation.Exit{Outcome: airlock.SandboxKilled, Detail: detail}
	case s.d.cg.oomKills(s.id) > 0:
		return isolation.Exit{Outcome: airlock.SandboxOOM, Detail: detail}
	}
	return isolation.Exit{Outcome: airlock.SandboxFailed, Detail: detail}
}

// Recover implements isolation.Driver.
func (d *Driver) Recover(ctx context.Context, id string) (isolation.Sandbox, error) {
	if !airlock.ValidSandboxID(id) {
		return nil, airlock.Invalidf("id", "use 1 to 32 characters of a-z and 0-9", "the sandbox id %q is not valid", id)
	}
	d.mu.Lock()
	if s := d.all[id]; s != nil {
		d.mu.Unlock()
		return s, nil
	}
	d.mu.Unlock()
	gone := func(why string) *airlock.Error {
		return airlock.Errorf(airlock.NotFound, "no sandbox %q runs: %s", id, why)
	}
	data, err := os.ReadFile(filepath.Join(d.dir(id), "meta.json"))
	if err != nil {
		return nil, gone("it was not started").Because(err)
	}
	s := &sandbox{id: id, d: d, ended: make(chan struct{})}
	if err := json.Unmarshal(data, &s.meta); err != nil {
		return nil, gone("what is remembered of it is broken").Because(err)
	}
	if err := s.watch(); err != nil {
		return nil, gone("its process ended").Because(err)
	}
	// The pidfd is open: from here on the pid cannot be used again unseen.
	if startTime(s.meta.PID) != s.meta.PIDStart {
		return nil, gone("its process ended")
	}
	if d.cfg.Keeper != nil {
		s.channel = d.cfg.Keeper.Take(id)
		if s.meta.Door {
			s.door = d.cfg.Keeper.Take(doorName(id))
		}
	}
	if s.channel == nil {
		return nil, gone("its channel is lost")
	}
	if s.meta.Door && s.door == nil {
		return nil, gone("its door is lost")
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.all[id] = s
	return s, nil
}

// Sweep implements isolation.Driver. In a process namespace of our own it is
// exact: whatever runs there and belongs to no kept sandbox is ended.
func (d *Driver) Sweep(ctx context.Context, keep func(id string) bool) ([]string, error) {
	var swept []string
	ids := d.cg.ids()
	entries, err := os.ReadDir(filepath.Join(d.cfg.RuntimeDir, "s"))
	if err != nil {
		return nil, fmt.Errorf("list sandboxes: %w", err)
	}
	for _, e := range entries {
		if !slices.Contains(ids, e.Name()) {
			ids = append(ids, e.Name())
		}
	}
	var errs []error
	for _, id := range ids {
		if !airlock.ValidSandboxID(id) || keep(id) {
			continue
		}
		d.mu.Lock()
		s := d.all[id]
		if s == nil {
			s = &sandbox{id: id, d: d}
			d.all[id] = s
		}
		d.mu.Unlock()
		if err := s.Destroy(ctx); err != nil {
			errs = append(errs, err)
		}
		swept = append(swept, id)
	}
	if d.cfg.OwnNamespace {
		d.killStrays()
	}
	return swept, errors.Join(errs...)
}

// killStrays ends processes of creates that were cut off before the
// processes were placed in their group.
func (d *Driver) killStrays() {
	ours := map[int]bool{1: true, os.Getpid(): true}
	for _, id := range d.cg.ids() {
		for _, pid := range d.cg.pids(id) {
			ours[pid] = true
		}
	}
	entries, _ := os.ReadDir("/proc")
	for _, e := range entries {
		if pid, err := strconv.Atoi(e.Name()); err == nil && !ours[pid] {
			unix.Kill(pid, unix.SIGKILL)
		}
	}
}

// ID implements isolation.Sandbox.
func (s *sandbox) ID() string { return s.id }

// Dial implements isolation.Sandbox. The descriptor is shared by all dials:
// a new session's epoch takes the place of the one before.
func (s *sandbox) Dial(ctx context.Context) (io.ReadWriteCloser, error) {
	s.channelMu.Lock()
	defer s.channelMu.Unlock()
	if s.channel == nil {
		return nil, airlock.Errorf(airlock.Gone, "the sandbox is gone")
	}
	fd, err := unix.FcntlInt(s.channel.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open the guest channel: %w", err)
	}
	if err := unix.SetNonblock(fd, true); err != nil { // Fd() made the shared description blocking
		unix.Close(fd)
		return nil, fmt.Errorf("open the guest channel: %w", err)
	}
	if s.dialed != nil {
		s.dialed.Close() // two readers would take each other's packets
	}
	s.dialed = os.NewFile(uintptr(fd), "guest-channel")
	return s.dialed, nil
}

// Stats implements isolation.Sandbox.
func (s *sandbox) Stats(ctx context.Context) (isolation.Stats, error) {
	select {
	case <-s.ended:
		return isolation.Stats{}, airlock.Errorf(airlock.Gone, "the sandbox is gone")
	default:
	}
	cpu, memory := s.d.cg.usage(s.id)
	return isolation.Stats{CPUSeconds: cpu, MemoryBytes: memory, DiskBytes: s.overlayBytes()}, nil
}

// overlayBytes finds the unlinked file of the overlay among the kernel's descriptors.
func (s *sandbox) overlayBytes() int64 {
	dir := fmt.Sprintf("/proc/%d/fd", s.meta.PID)
	entries, _ := os.ReadDir(dir)
	for _, e := range entries {
		path := filepath.Join(dir, e.Name())
		if target, err := os.Readlink(path); err == nil && strings.Contains(target, "/runsc-filestore-") {
			var st unix.Stat_t
			if unix.Stat(path, &st) == nil {
				return st.Blocks * 512
			}
		}
	}
	return 0
}

// Wait implements isolation.Sandbox.
func (s *sandbox) Wait(ctx context.Context) (isolation.Exit, error) {
	select {
	case <-s.ended:
		return s.exit, nil
	case <-ctx.Done():
		return isolation.Exit{}, ctx.Err()
	}
}

// removeWait is how long the host's kernel may take to let go of killed processes.
const removeWait = 10 * time.Second

// Destroy implements isolation.Sandbox.
func (s *sandbox) Destroy(ctx context.Context) error {
	s.destroyMu.Lock()
	defer s.destroyMu.Unlock()
	if s.destroyed {
		return nil
	}
	d := s.d
	d.mu.Lock()
	if s.ended != nil && !s.hasEnded() {
		s.killing = true
	}
	d.mu.Unlock()
	if s.sandboxExit != nil {
		s.sandboxExit.kill()
	}
	if s.goferExit != nil {
		s.goferExit.kill()
	}
	d.cg.kill(s.id)
	s.reaped.Wait()
	if err := d.cg.remove(s.id, removeWait); err != nil {
		return err
	}
	if err := os.RemoveAll(d.dir(s.id)); err != nil {
		return fmt.Errorf("remove the sandbox's directory: %w", err)
	}
	s.channelMu.Lock()
	if s.channel != nil {
		s.channel.Close()
		s.channel = nil
	}
	if s.door != nil {
		s.door.Close()
		s.door = nil
	}
	s.channelMu.Unlock()
	if d.cfg.Keeper != nil {
		d.cfg.Keeper.Drop(s.id)
		d.cfg.Keeper.Drop(doorName(s.id))
	}
	d.mu.Lock()
	if d.all[s.id] == s {
		delete(d.all, s.id)
	}
	d.mu.Unlock()
	s.destroyed = true
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
