package bench

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"airlock.dev/airlock"
	"airlock.dev/airlock/client"
)

// binary is the one under test; `make bench` builds it before.
func binary(b *testing.B) string {
	b.Helper()
	path, err := filepath.Abs("../../bin/airlock")
	if err != nil {
		b.Fatal(err)
	}
	if _, err := os.Stat(path); err != nil {
		b.Fatalf("%v: run make build first", err)
	}
	if os.Geteuid() != 0 {
		b.Skip("makes sandboxes, and needs root")
	}
	return path
}

// serve starts a server and returns its client and its command's pid.
func serve(b *testing.B) (*client.Client, int) {
	b.Helper()
	dir := b.TempDir()
	cmd := exec.Command(binary(b), "serve", "--listen", "127.0.0.1:0", "--data-dir", dir)
	var log bytes.Buffer
	cmd.Stderr = &log
	out, err := cmd.StdoutPipe()
	if err != nil {
		b.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() {
		cmd.Process.Signal(syscall.SIGTERM)
		cmd.Wait()
		if b.Failed() {
			b.Logf("the server's log:\n%s", &log)
		}
	})
	if _, err := bufio.NewReader(out).ReadString('\n'); err != nil {
		b.Fatal(err)
	}
	c, err := client.New(client.Options{Socket: filepath.Join(dir, "airlock.sock")})
	if err != nil {
		b.Fatal(err)
	}
	return c, cmd.Process.Pid
}

var small = client.CreateRequest{Timeout: 10 * time.Minute, Limits: airlock.Limits{MemoryMB: 128, DiskMB: 64, Processes: 32}}

var runscFlags = []string{"runsc", "--network=none", "--overlay2=root:memory"}

func took(b *testing.B, f func() error) float64 {
	b.Helper()
	start := time.Now()
	if err := f(); err != nil {
		b.Fatal(err)
	}
	return float64(time.Since(start).Microseconds()) / 1000
}

func median(v []float64) float64 {
	slices.Sort(v)
	return v[len(v)/2]
}

// report prints medians in milliseconds and their ratio.
func report(b *testing.B, ours, baseline []float64) {
	o, base := median(ours), median(baseline)
	b.ReportMetric(o, "ms")
	b.ReportMetric(base, "baseline-ms")
	b.ReportMetric(o/base, "ratio")
	b.ReportMetric(0, "ns/op")
}

// BenchmarkColdTrue is from a create to the end of /bin/true in it, as a
// client of the API sees it, to `runsc do /bin/true`.
func BenchmarkColdTrue(b *testing.B) {
	bin := binary(b)
	c, _ := serve(b)
	var ours, baseline []float64
	for i := range 24 {
		ours = append(ours, took(b, func() error {
			sb, err := c.Create(b.Context(), small)
			if err != nil {
				return err
			}
			b.Cleanup(func() { sb.Close() })
			return run(b, sb, "/bin/true")
		}))
		baseline = append(baseline, took(b, exec.Command(bin, append(runscFlags, "do", "/bin/true")...).Run))
		if i == 3 { // caches are warm for both
			ours, baseline = nil, nil
		}
	}
	report(b, ours, baseline)
}

func run(b *testing.B, sb *client.Sandbox, cmd string) error {
	r, err := sb.Exec(b.Context(), client.ExecRequest{Cmd: cmd, Stdout: io.Discard, Stderr: io.Discard})
	if err == nil && r.ExitCode != 0 {
		err = fmt.Errorf("%s: %+v", cmd, r)
	}
	return err
}

// BenchmarkExecTrue is /bin/true in a running sandbox, to `runsc exec`.
func BenchmarkExecTrue(b *testing.B) {
	bin := binary(b)
	c, _ := serve(b)
	sb, err := c.Create(b.Context(), small)
	if err != nil {
		b.Fatal(err)
	}
	defer sb.Close()
	state, bundle := b.TempDir(), b.TempDir()
	spec, err := json.Marshal(map[string]any{
		"ociVersion": "1.0.2",
		"root":       map[string]any{"path": "/", "readonly": true},
		"process":    map[string]any{"args": []string{"/bin/sleep", "600"}, "cwd": "/", "env": []string{"PATH=/usr/bin:/bin"}},
		"linux":      map[string]any{"namespaces": []map[string]string{{"type": "pid"}, {"type": "mount"}}},
	})
	if err != nil {
		b.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(bundle, "config.json"), spec, 0o600); err != nil {
		b.Fatal(err)
	}
	runsc := func(args ...string) *exec.Cmd {
		return exec.Command(bin, append(append(slices.Clone(runscFlags), "--root="+state, "--ignore-cgroups"), args...)...)
	}
	if err := runsc("run", "-detach", "-bundle", bundle, "baseline").Run(); err != nil { // no pipes: the container would keep them open
		b.Fatal(err)
	}
	defer func() {
		runsc("delete", "-force", "baseline").Run()
		syscall.Unmount(filepath.Join(state, "null-netns"), syscall.MNT_DETACH) // runsc leaves it mounted
	}()
	var ours, baseline []float64
	for i := range 200 {
		ours = append(ours, took(b, func() error { return run(b, sb, "/bin/true") }))
		if i%4 == 0 {
			baseline = append(baseline, took(b, runsc("exec", "baseline", "/bin/true").Run))
		}
	}
	report(b, ours, baseline)
}

// BenchmarkIdleServer is the memory of the server with 50 idle sandboxes, to
// that of the sandboxes themselves.
func BenchmarkIdleServer(b *testing.B) {
	c, pid := serve(b)
	for range 50 {
		sb, err := c.Create(b.Context(), small)
		if err != nil {
			b.Fatal(err)
		}
		defer sb.Close()
	}
	time.Sleep(2 * time.Second)
	var server, sandboxes float64
	for _, p := range below(pid) {
		cmdline, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", p))
		rss := proportional(p)
		if bytes.HasPrefix(cmdline, []byte("runsc-")) || len(cmdline) == 0 {
			sandboxes += rss
		} else {
			server += resident(p)
		}
	}
	b.ReportMetric(server, "server-MB")
	b.ReportMetric(sandboxes/50, "sandbox-MB")
	b.ReportMetric(server/sandboxes, "ratio")
	b.ReportMetric(0, "ns/op")
}

func below(pid int) []int {
	all := []int{pid}
	for i := 0; i < len(all); i++ {
		tasks, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", all[i]))
		for _, t := range tasks {
			data, _ := os.ReadFile(t)
			for _, f := range strings.Fields(string(data)) {
				if child, err := strconv.Atoi(f); err == nil {
					all = append(all, child)
				}
			}
		}
	}
	return all
}

func resident(pid int) float64     { return field(pid, "status", "VmRSS:") }
func proportional(pid int) float64 { return field(pid, "smaps_rollup", "Pss:") }

func field(pid int, file, name string) float64 {
	data, _ := os.ReadFile(fmt.Sprintf("/proc/%d/%s", pid, file))
	for line := range strings.Lines(string(data)) {
		if f := strings.Fields(line); len(f) >= 2 && f[0] == name {
			kb, _ := strconv.ParseFloat(f[1], 64)
			return kb / 1024
		}
	}
	return 0
}
