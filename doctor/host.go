package doctor

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

func user() Finding {
	if uid := os.Geteuid(); uid != 0 {
		return fail("user", fmt.Sprintf("runs as uid %d", uid), "run airlock as root: it makes cgroups, mounts and user namespaces, and gives them up for each sandbox")
	}
	return ok("user", "root")
}

// program looks at the mode of the running program's file: the gateway and each
// sandbox's kernel are the same file, run by users who own nothing.
func program(path string) Finding {
	const name = "binary"
	info, err := os.Stat(path)
	if err != nil {
		return fail(name, err.Error(), "mount /proc")
	}
	if target, err := os.Readlink(path); err == nil {
		path = target
	}
	if mode := info.Mode().Perm(); mode&0o005 != 0o005 {
		return fail(name, fmt.Sprintf("%s has the mode %#o: users who own nothing cannot run it", path, mode), "chmod o+rx "+path)
	}
	return ok(name, path)
}

// leastKernel is the oldest release on which everything used is present
// (pidfds, close_range, time-bounded cgroup kills).
var leastKernel = [2]int{5, 10}

func kernel() Finding {
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return fail("kernel", err.Error(), "run on Linux")
	}
	release, machine := unix.ByteSliceToString(u.Release[:]), unix.ByteSliceToString(u.Machine[:])
	detail := "Linux " + release + " " + machine
	if machine != "x86_64" && machine != "aarch64" {
		return fail("kernel", detail, "run on x86_64 or aarch64: gVisor knows no other processor")
	}
	if !atLeast(release, leastKernel) {
		return fail("kernel", detail, fmt.Sprintf("use Linux %d.%d or newer", leastKernel[0], leastKernel[1]))
	}
	return ok("kernel", detail)
}

func atLeast(release string, least [2]int) bool {
	var major, minor int
	if _, err := fmt.Sscanf(release, "%d.%d", &major, &minor); err != nil {
		return false
	}
	return major > least[0] || major == least[0] && minor >= least[1]
}

// controllers are the cgroup controllers whose limits are a sandbox's last wall.
var controllers = []string{"cpu", "memory", "pids"}

// cgroupMounts maps each controller to the directory of its hierarchy and says
// which version each has.
type cgroupMounts struct {
	v1      map[string]string // controller → mount point
	unified string            // mount point of the v2 hierarchy
}

func parseCgroupMounts(mountinfo string) cgroupMounts {
	m := cgroupMounts{v1: map[string]string{}}
	s := bufio.NewScanner(strings.NewReader(mountinfo))
	for s.Scan() {
		before, after, found := strings.Cut(s.Text(), " - ")
		left, right := strings.Fields(before), strings.Fields(after)
		if !found || len(left) < 5 || len(right) < 3 {
			continue
		}
		switch right[0] {
		case "cgroup2":
			m.unified = left[4]
		case "cgroup":
			for _, option := range strings.Split(right[2], ",") {
				m.v1[option] = left[4]
			}
		}
	}
	return m
}

func cgroups() Finding {
	const name = "cgroups"
	info, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return fail(name, err.Error(), "mount proc on /proc")
	}
	m := parseCgroupMounts(string(info))
	var unified []string
	if m.unified != "" {
		b, _ := os.ReadFile(filepath.Join(m.unified, "cgroup.controllers")) // absent counts as none
		unified = strings.Fields(string(b))
	}
	return cgroupFinding(m, unified, tryCgroup)
}

func cgroupFinding(m cgroupMounts, unified []string, try func(dir string) error) Finding {
	const name = "cgroups"
	var parts, missing []string
	places := map[string]bool{}
	v1, v2 := 0, 0
	for _, c := range controllers {
		dir, isV1 := m.v1[c]
		switch {
		case isV1:
			v1++
			parts = append(parts, c+" at "+dir)
		case slices.Contains(unified, c):
			v2++
			dir = m.unified
			parts = append(parts, c+" at "+dir)
		default:
			missing = append(missing, c)
			continue
		}
		places[dir] = true
	}
	version := "v2"
	switch {
	case v1 > 0 && v2 > 0:
		version = "hybrid"
	case v1 > 0:
		version = "v1"
	}
	if len(missing) > 0 {
		where := "no cgroup is mounted"
		if len(parts) > 0 {
			where = version + ": " + strings.Join(parts, ", ")
		}
		return fail(name, where+"; missing: "+strings.Join(missing, ", "),
			"mount the cgroup controllers "+strings.Join(missing, ", ")+": `mount -t cgroup2 none /sys/fs/cgroup`, or boot without cgroup_disable")
	}
	detail := version + ": " + strings.Join(parts, ", ")
	for _, dir := range sortedKeys(places) {
		if err := try(dir); err != nil {
			return fail(name, detail+"; cannot make a cgroup: "+err.Error(),
				"run airlock as root outside of a container, or in one whose cgroups are delegated (writable "+dir+")")
		}
	}
	return ok(name, detail)
}

func sortedKeys(m map[string]bool) []string {
	var keys []string
	for k := range m {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}

// tryCgroup makes a cgroup below dir and removes it.
func tryCgroup(dir string) error {
	path := filepath.Join(dir, fmt.Sprintf("airlock-doctor-%d", os.Getpid()))
	if err := os.Mkdir(path, 0o755); err != nil {
		return err
	}
	return os.Remove(path)
}

// Space below which the data directory is too small to be of use or soon full.
const (
	leastDisk = 1 << 30
	goodDisk  = 10 << 30
)

func dataDirectory(dir string) Finding {
	const name = "data directory"
	dir, err := filepath.Abs(dir)
	if err != nil {
		return fail(name, err.Error(), "name another with --data-dir")
	}
	at := dir // the nearest that exists: what would be made needs no probing
	for {
		info, err := os.Stat(at)
		if err == nil && !info.IsDir() {
			return fail(name, at+" is not a directory", "name another with --data-dir")
		}
		if err == nil {
			break
		}
		if !errors.Is(err, os.ErrNotExist) {
			return fail(name, err.Error(), "name another with --data-dir")
		}
		at = filepath.Dir(at)
	}
	probe, err := os.CreateTemp(at, ".airlock-doctor-")
	if err != nil {
		return fail(name, "cannot write: "+err.Error(), "make "+at+" writable for root, or name another directory with --data-dir")
	}
	probe.Close()
	os.Remove(probe.Name())
	var fs unix.Statfs_t
	if err := unix.Statfs(at, &fs); err != nil {
		return fail(name, err.Error(), "name another with --data-dir")
	}
	free := fs.Bavail * uint64(fs.Bsize)
	detail := fmt.Sprintf("%s, %s free", dir, bytes(free))
	if free < leastDisk {
		return fail(name, detail, fmt.Sprintf("free at least %s, or name a directory on a larger disk with --data-dir", bytes(leastDisk)))
	}
	switch {
	case fs.Type == unix.TMPFS_MAGIC || fs.Type == unix.RAMFS_MAGIC:
		return warn(name, detail+", on a memory filesystem", "name a directory on a disk with --data-dir: what sandboxes write would take memory, and the state is lost at the next boot")
	case free < goodDisk:
		return warn(name, detail, fmt.Sprintf("free some space: each sandbox may write 1 GiB by default, and creates are refused when less than that is left; %s or more is comfortable", bytes(goodDisk)))
	}
	return ok(name, detail)
}

// What one idle sandbox costs the host, measured, with the guest and gVisor's
// own threads; from these the limits below follow.
const (
	sandboxMemory  = 24 << 20
	sandboxThreads = 40
	sandboxFiles   = 40
)

func memory() Finding {
	const name = "memory"
	b, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return fail(name, err.Error(), "mount proc on /proc")
	}
	total, available := meminfo(string(b), "MemTotal"), meminfo(string(b), "MemAvailable")
	detail := fmt.Sprintf("%s available of %s, about %d idle sandboxes", bytes(available), bytes(total), available/sandboxMemory)
	switch {
	case total < 512<<20:
		return fail(name, detail, "use a machine with at least 512 MiB")
	case available < 1<<30:
		return warn(name, detail, "stop other programs or add memory: a sandbox may use 512 MiB by default")
	}
	return ok(name, detail)
}

func meminfo(text, key string) uint64 {
	for line := range strings.Lines(text) {
		if f := strings.Fields(line); len(f) >= 2 && f[0] == key+":" {
			n, _ := strconv.ParseUint(f[1], 10, 64) // the kernel writes numbers
			return n << 10
		}
	}
	return 0
}

func openFiles() Finding {
	const name = "open files"
	var l unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &l); err != nil {
		return warn(name, err.Error(), "allow more with `ulimit -n`")
	}
	detail := fmt.Sprintf("limit %d, about %d sandboxes", l.Max, l.Max/sandboxFiles)
	switch {
	case l.Max < 1024:
		return fail(name, detail, "raise the hard limit: `ulimit -Hn 65536`, or LimitNOFILE=65536 in the service")
	case l.Max < 8192:
		return warn(name, detail, "raise the hard limit for more: `ulimit -Hn 65536`, or LimitNOFILE=65536 in the service")
	}
	return ok(name, detail)
}

func processIDs() Finding {
	const name = "process ids"
	limit, source := uint64(1<<22), "the kernel's"
	least := func(n uint64, err error, from string) {
		if err == nil && n < limit {
			limit, source = n, from
		}
	}
	n, err := readNumber("/proc/sys/kernel/pid_max")
	least(n, err, "kernel.pid_max")
	n, err = readNumber("/proc/sys/kernel/threads-max")
	least(n, err, "kernel.threads-max")
	n, err = ownPidsMax()
	least(n, err, "pids cgroup")
	detail := fmt.Sprintf("%d (%s), about %d sandboxes", limit, source, limit/sandboxThreads)
	switch {
	case limit < 512:
		return fail(name, detail, "raise "+source+": gVisor alone takes about "+strconv.Itoa(sandboxThreads)+" threads for each sandbox")
	case limit < 8192:
		return warn(name, detail, "raise "+source+" for more sandboxes: `sysctl kernel.pid_max=4194304`, or TasksMax=infinity in the service")
	}
	return ok(name, detail)
}

func readNumber(path string) (uint64, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return 0, err
	}
	return strconv.ParseUint(strings.TrimSpace(string(b)), 10, 64)
}

// ownPidsMax is the limit of the pids cgroup this process is in; an error if
// there is none.
func ownPidsMax() (uint64, error) {
	own, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return 0, err
	}
	info, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return 0, err
	}
	m := parseCgroupMounts(string(info))
	for line := range strings.Lines(string(own)) {
		f := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(f) != 3 {
			continue
		}
		dir := m.unified
		if f[1] == "pids" {
			dir = m.v1["pids"]
		} else if f[1] != "" {
			continue
		}
		if n, err := readNumber(filepath.Join(dir, f[2], "pids.max")); err == nil {
			return n, nil
		}
	}
	return 0, os.ErrNotExist
}

// imagePath is where the host image finds programs: it shows /usr and nothing
// of anyone's home.
var imagePath = []string{"/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin"}

func tools() []Finding {
	var findings []Finding
	for _, t := range []struct{ program, use, pkg string }{
		{"bash", "commands of the E2B SDKs run in it", "bash"},
		{"python3", "`airlock run` of Python needs it", "python3"},
		{"node", "`airlock run` of JavaScript needs it", "nodejs"},
		{"git", "agents expect it", "git"},
	} {
		name := "tool " + t.program
		if path := find(t.program); path != "" {
			findings = append(findings, ok(name, path))
			continue
		}
		findings = append(findings, warn(name, "not in "+strings.Join(imagePath, ", "),
			"install it below /usr (on Debian: `apt-get install "+t.pkg+"`): the host image shows this machine's /usr and "+t.use))
	}
	return findings
}

func find(program string) string {
	for _, dir := range imagePath {
		path := filepath.Join(dir, program)
		if info, err := os.Stat(path); err == nil && info.Mode().IsRegular() && info.Mode().Perm()&0o111 != 0 {
			return path
		}
	}
	return ""
}

// bytes writes a size as a person would.
func bytes(n uint64) string {
	for _, u := range []struct {
		size uint64
		name string
	}{{1 << 40, "TiB"}, {1 << 30, "GiB"}, {1 << 20, "MiB"}} {
		if n >= u.size {
			return fmt.Sprintf("%.3g %s", float64(n)/float64(u.size), u.name)
		}
	}
	return fmt.Sprintf("%d B", n)
}
