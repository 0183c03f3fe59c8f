package doctor

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"airlock.dev/airlock"
)

func TestMain(m *testing.M) {
	Main()
	os.Exit(m.Run())
}

func byName(t *testing.T, findings []Finding, name string) Finding {
	t.Helper()
	for _, f := range findings {
		if f.Name == name {
			return f
		}
	}
	t.Fatalf("no finding %q", name)
	return Finding{}
}

func TestCheckHere(t *testing.T) {
	findings := Check(context.Background(), filepath.Join(t.TempDir(), "data"))
	names := map[string]bool{}
	for _, f := range findings {
		t.Logf("%-16s %-5s %s", f.Name, f.State, f.Detail)
		if names[f.Name] {
			t.Errorf("%s: twice", f.Name)
		}
		names[f.Name] = true
		if f.Detail == "" {
			t.Errorf("%s: no detail", f.Name)
		}
		if (f.State == OK) != (f.Remedy == "") {
			t.Errorf("%s is %s with remedy %q", f.Name, f.State, f.Remedy)
		}
	}
	if os.Geteuid() == 0 {
		for _, name := range []string{"user", "kernel", "seccomp", "ptrace"} {
			if f := byName(t, findings, name); f.State == Fail {
				t.Errorf("%s: %s", name, f.Detail)
			}
		}
	} else if Fatal(findings) == nil {
		t.Error("not root and not fatal")
	}
}

func TestProbesLeaveNothing(t *testing.T) {
	dir := t.TempDir()
	before, _ := os.ReadFile("/proc/self/mountinfo")
	Required(context.Background(), filepath.Join(dir, "a", "b"))
	after, _ := os.ReadFile("/proc/self/mountinfo")
	if string(before) != string(after) {
		t.Error("a mount was left behind")
	}
	if left, _ := os.ReadDir(dir); len(left) != 0 {
		t.Errorf("left in the data directory: %v", left)
	}
}

func TestFatal(t *testing.T) {
	if err := Fatal([]Finding{ok("a", "fine"), warn("b", "slow", "faster")}); err != nil {
		t.Errorf("warnings are fatal: %v", err)
	}
	err := Fatal([]Finding{ok("a", "fine"), fail("b", "broken", "mend it"), fail("c", "lost", "find it")})
	var e *airlock.Error
	if !errors.As(err, &e) || e.Code != airlock.Unavailable {
		t.Fatalf("err = %v", err)
	}
	for _, want := range []string{"b: broken", "c: lost", "mend it; find it"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%q lacks %q", err, want)
		}
	}
}

func TestKernelRelease(t *testing.T) {
	for release, want := range map[string]bool{
		"6.1.0-18-amd64": true, "5.10.0": true, "5.9.99": false, "4.19.0": false, "10.0": true, "": false, "x": false,
	} {
		if got := atLeast(release, leastKernel); got != want {
			t.Errorf("%q: %v", release, got)
		}
	}
}

const (
	mountsV1 = `25 20 0:22 / /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:9 - cgroup cgroup rw,cpu,cpuacct
26 20 0:23 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory
27 20 0:24 / /sys/fs/cgroup/pids rw - cgroup cgroup rw,pids
28 20 0:25 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw`
	mountsV2 = `25 20 0:22 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw`
)

func TestCgroups(t *testing.T) {
	works := func(string) error { return nil }
	for _, c := range []struct {
		name, mounts string
		unified      []string
		try          func(string) error
		state        State
		want         string
	}{
		{"v1", mountsV1, nil, works, OK, "v1: cpu at /sys/fs/cgroup/cpu,cpuacct, memory at"},
		{"v2", mountsV2, []string{"cpu", "io", "memory", "pids"}, works, OK, "v2: cpu at /sys/fs/cgroup,"},
		{"hybrid", strings.Replace(mountsV1, "rw,pids", "rw,net_cls", 1), []string{"pids"}, works, OK, "hybrid: "},
		{"v2 without pids", mountsV2, []string{"cpu", "memory"}, works, Fail, "missing: pids"},
		{"none", "", nil, works, Fail, "no cgroup is mounted; missing: cpu, memory, pids"},
		{"read-only", mountsV2, controllers, func(string) error { return os.ErrPermission }, Fail, "cannot make a cgroup"},
	} {
		f := cgroupFinding(parseCgroupMounts(c.mounts), c.unified, c.try)
		if f.State != c.state || !strings.Contains(f.Detail, c.want) {
			t.Errorf("%s: %+v", c.name, f)
		}
	}
}

func TestProgram(t *testing.T) {
	file := filepath.Join(t.TempDir(), "airlock")
	for _, c := range []struct {
		mode  os.FileMode
		state State
	}{{0o755, OK}, {0o555, OK}, {0o700, Fail}, {0o750, Fail}, {0o754, Fail}, {0o751, Fail}} {
		if err := os.WriteFile(file, nil, 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(file, c.mode); err != nil {
			t.Fatal(err)
		}
		if f := program(file); f.State != c.state || (c.state == Fail) != (f.Remedy == "chmod o+rx "+file) {
			t.Errorf("%#o: %+v", c.mode, f)
		}
		os.Remove(file)
	}
}

func TestDataDirectory(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{file, filepath.Join(file, "below")} {
		if f := dataDirectory(path); f.State != Fail || f.Remedy == "" {
			t.Errorf("%s: %+v", path, f)
		}
	}
	if f := dataDirectory(filepath.Join(dir, "not", "yet")); f.State == Fail {
		t.Errorf("a directory that can be made: %+v", f)
	}
	if f := dataDirectory("/dev/shm"); f.State == OK {
		t.Errorf("memory filesystem: %+v", f)
	}
}
