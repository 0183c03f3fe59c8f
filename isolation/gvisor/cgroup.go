package gvisor

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"airlock.dev/airlock"
	"golang.org/x/sys/unix"
)

// cgroups is a subtree of the host's control groups with one group for each
// sandbox, in version 2 or, where that has no controllers, in version 1.
type cgroups struct {
	base  string            // path below each hierarchy
	roots map[string]string // controller → mount point; for version 2 all are the same
	v2    bool
}

var controllers = []string{"cpu", "memory", "pids"}

func findCgroups(base string) (*cgroups, error) {
	data, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return nil, fmt.Errorf("find cgroups: %w", err)
	}
	c := &cgroups{base: base, roots: map[string]string{}}
	unified := ""
	for line := range strings.Lines(string(data)) {
		// 36 35 98:0 /root /mount/point rw,noatime - type source super,options
		left, right, ok := strings.Cut(strings.TrimSpace(line), " - ")
		l, r := strings.Fields(left), strings.Fields(right)
		if !ok || len(l) < 5 || len(r) < 3 {
			continue
		}
		switch r[0] {
		case "cgroup2":
			unified = l[4]
		case "cgroup":
			for _, name := range strings.Split(r[2], ",") {
				if slices.Contains(controllers, name) {
					c.roots[name] = l[4]
				}
			}
		}
	}
	if len(c.roots) == len(controllers) {
		return c, nil
	}
	have, _ := os.ReadFile(filepath.Join(unified, "cgroup.controllers"))
	for _, name := range controllers {
		if unified == "" || !slices.Contains(strings.Fields(string(have)), name) {
			return nil, fmt.Errorf("find cgroups: no controller %q in version 1 or 2", name)
		}
		c.roots[name] = unified
	}
	c.v2 = true
	for _, dir := range []string{unified, filepath.Join(unified, base)} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return nil, fmt.Errorf("make cgroup: %w", err)
		}
		if err := writeCgroup(dir, "cgroup.subtree_control", "+cpu +memory +pids"); err != nil {
			return nil, err
		}
	}
	return c, nil
}

func writeCgroup(dir, file, value string) error {
	f, err := os.OpenFile(filepath.Join(dir, file), os.O_WRONLY, 0)
	if err != nil {
		return fmt.Errorf("set cgroup: %w", err)
	}
	defer f.Close()
	if _, err := f.WriteString(value); err != nil {
		return fmt.Errorf("set cgroup %s to %q: %w", file, value, err)
	}
	return nil
}

// dirs are the directories of one sandbox's group, one for each hierarchy.
func (c *cgroups) dirs(id string) []string {
	var dirs []string
	for _, name := range controllers {
		if d := filepath.Join(c.roots[name], c.base, id); !slices.Contains(dirs, d) {
			dirs = append(dirs, d)
		}
	}
	return dirs
}

// kernelOverhead is what the application kernel may use beside the user's
// memory before the wall stands: a fixed part, and its page tables and
// caches, which grow with the user's memory.
func kernelOverhead(memory int64) int64 { return 96<<20 + memory/8 }

// create makes the group with the walls for memory and host threads.
func (c *cgroups) create(id string, l airlock.Limits) error {
	for _, dir := range c.dirs(id) {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return fmt.Errorf("make cgroup: %w", err)
		}
	}
	memory := int64(l.MemoryMB) << 20
	wall := strconv.FormatInt(memory+kernelOverhead(memory), 10)
	// Each user process costs host threads; so does the kernel itself.
	threads := strconv.Itoa(512 + 4*l.Processes)
	mem, pids := filepath.Join(c.roots["memory"], c.base, id), filepath.Join(c.roots["pids"], c.base, id)
	if c.v2 {
		return errors.Join(
			writeCgroup(mem, "memory.max", wall),
			ignoreMissing(writeCgroup(mem, "memory.swap.max", "0")),
			writeCgroup(mem, "memory.oom.group", "1"),
			writeCgroup(pids, "pids.max", threads))
	}
	return errors.Join(
		writeCgroup(mem, "memory.limit_in_bytes", wall),
		ignoreMissing(writeCgroup(mem, "memory.memsw.limit_in_bytes", wall)),
		writeCgroup(pids, "pids.max", threads))
}

func ignoreMissing(err error) error {
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	return err
}

// limitCPU sets the processor quota. It is a step of its own so that the
// start is not slowed by it: no user code runs before.
func (c *cgroups) limitCPU(id string, cpus float64) error {
	dir := filepath.Join(c.roots["cpu"], c.base, id)
	quota := int64(cpus * cpuPeriod)
	if c.v2 {
		return writeCgroup(dir, "cpu.max", fmt.Sprintf("%d %d", quota, cpuPeriod))
	}
	return errors.Join(
		writeCgroup(dir, "cpu.cfs_period_us", strconv.Itoa(cpuPeriod)),
		writeCgroup(dir, "cpu.cfs_quota_us", strconv.FormatInt(quota, 10)))
}

const cpuPeriod = 100_000 // microseconds

// add moves a process with all its threads into the group.
func (c *cgroups) add(id string, pid int) error {
	for _, dir := range c.dirs(id) {
		if err := writeCgroup(dir, "cgroup.procs", strconv.Itoa(pid)); err != nil && !errors.Is(err, unix.ESRCH) {
			return err
		}
	}
	return nil
}

func (c *cgroups) pids(id string) []int {
	var all []int
	for _, dir := range c.dirs(id) {
		data, _ := os.ReadFile(filepath.Join(dir, "cgroup.procs"))
		for _, f := range strings.Fields(string(data)) {
			if pid, err := strconv.Atoi(f); err == nil && pid > 0 && !slices.Contains(all, pid) {
				all = append(all, pid)
			}
		}
	}
	return all
}

// kill sends SIGKILL to all in the group until nothing new appears.
func (c *cgroups) kill(id string) {
	if c.v2 && writeCgroup(c.dirs(id)[0], "cgroup.kill", "1") == nil {
		return
	}
	seen := map[int]bool{}
	for fresh := true; fresh; {
		fresh = false
		for _, pid := range c.pids(id) {
			if !seen[pid] {
				seen[pid], fresh = true, true
				unix.Kill(pid, unix.SIGKILL)
			}
		}
	}
}

// remove deletes an empty group; the kernel may need moments to see that it is empty.
func (c *cgroups) remove(id string, wait time.Duration) error {
	deadline := time.Now().Add(wait)
	for {
		var left error
		for _, dir := range c.dirs(id) {
			if err := unix.Rmdir(dir); err != nil && !errors.Is(err, unix.ENOENT) {
				left = fmt.Errorf("remove cgroup %s: %w", dir, err)
			}
		}
		if left == nil || time.Now().After(deadline) {
			return left
		}
		c.kill(id)
		time.Sleep(2 * time.Millisecond)
	}
}

// ids lists the groups that exist.
func (c *cgroups) ids() []string {
	var ids []string
	for _, name := range controllers {
		entries, _ := os.ReadDir(filepath.Join(c.roots[name], c.base))
		for _, e := range entries {
			if e.IsDir() && !slices.Contains(ids, e.Name()) {
				ids = append(ids, e.Name())
			}
		}
	}
	return ids
}

// removeBase deletes the subtree's own directories when no group is left in it.
func (c *cgroups) removeBase() {
	for _, name := range controllers {
		unix.Rmdir(filepath.Join(c.roots[name], c.base))
	}
}

// watchOOM returns a file that becomes readable when the group runs out of
// memory. Version 1 needs it, since its kernel ends one process where the
// whole group has to go; version 2 has memory.oom.group and gets nil.
func (c *cgroups) watchOOM(id string) (*os.File, error) {
	if c.v2 {
		return nil, nil
	}
	dir := filepath.Join(c.roots["memory"], c.base, id)
	control, err := os.Open(filepath.Join(dir, "memory.oom_control"))
	if err != nil {
		return nil, fmt.Errorf("watch for want of memory: %w", err)
	}
	defer control.Close()
	fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		return nil, fmt.Errorf("watch for want of memory: %w", err)
	}
	event := os.NewFile(uintptr(fd), "oom")
	if err := writeCgroup(dir, "cgroup.event_control", fmt.Sprintf("%d %d", fd, control.Fd())); err != nil {
		event.Close()
		return nil, err
	}
	return event, nil
}

// oomKills counts the kernel's kills for want of memory in the group.
func (c *cgroups) oomKills(id string) int64 {
	file := "memory.oom_control"
	if c.v2 {
		file = "memory.events"
	}
	data, _ := os.ReadFile(filepath.Join(c.roots["memory"], c.base, id, file))
	for line := range bytes.Lines(data) {
		f := bytes.Fields(line)
		if len(f) == 2 && string(f[0]) == "oom_kill" {
			n, _ := strconv.ParseInt(string(f[1]), 10, 64)
			return n
		}
	}
	return 0
}

func (c *cgroups) usage(id string) (cpuSeconds float64, memory int64) {
	dir := filepath.Join(c.roots["memory"], c.base, id)
	if c.v2 {
		data, _ := os.ReadFile(filepath.Join(dir, "memory.current"))
		memory, _ = strconv.ParseInt(strings.TrimSpace(string(data)), 10, 64)
		data, _ = os.ReadFile(filepath.Join(dir, "cpu.stat"))
		for line := range strings.Lines(string(data)) {
			if v, ok := strings.CutPrefix(strings.TrimSpace(line), "usage_usec "); ok {
				us, _ := strconv.ParseInt(v, 10, 64)
				cpuSeconds = float64(us) / 1e6
			}
		}
		return cpuSeconds, memory
	}
	data, _ := os.ReadFile(filepath.Join(dir, "memory.usage_in_bytes"))
	memory, _ = strconv.ParseInt(strings.TrimSpace(string(data)), 10, 64)
	// Version 1 accounts processor time in a controller of its own, which may
	// be mounted with cpu or apart; the processes' own clocks are always there.
	for _, pid := range c.pids(id) {
		cpuSeconds += processSeconds(pid)
	}
	return cpuSeconds, memory
}
