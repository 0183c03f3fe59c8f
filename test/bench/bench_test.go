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

// server is one under measurement.
type server struct {
	*client.Client
	pid     int
	url     string
	dataDir string
}

// serve starts a server that starts no sandboxes ahead.
func serve(b *testing.B) server {
	b.Helper()
	return serveIn(b, nil, "--pool-most", "0")
}

// serveIn starts one with flags, by a command in front that becomes it.
func serveIn(b *testing.B, in []string, flags ...string) server {
	b.Helper()
	dir := b.TempDir()
	command := append(append(in[:len(in):len(in)], binary(b), "serve", "--listen", "127.0.0.1:0", "--data-dir", dir), flags...)
	cmd := exec.Command(command[0], command[1:]...)
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
	line, err := bufio.NewReader(out).ReadString('\n')
	words := strings.Fields(line) // airlock listens on URL and SOCKET
	if err != nil || len(words) < 4 {
		b.Fatalf("%q, %v", line, err)
	}
	c, err := client.New(client.Options{Socket: filepath.Join(dir, "airlock.sock")})
	if err != nil {
		b.Fatal(err)
	}
	return server{c, cmd.Process.Pid, words[3], dir}
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
	c := serve(b)
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
	c := serve(b)
	sb, err := c.Create(b.Context(), small)
	if err != nil {
		b.Fatal(err)
	}
	defer sb.Close()
	runsc := bare(b)
	var ours, baseline []float64
	for i := range 200 {
		ours = append(ours, took(b, func() error { return run(b, sb, "/bin/true") }))
		if i%4 == 0 {
			baseline = append(baseline, took(b, runsc("/bin/true").Run))
		}
	}
	report(b, ours, baseline)
}

// bare starts a container with plain runsc and returns commands that run in it.
func bare(b *testing.B) func(args ...string) *exec.Cmd {
	b.Helper()
	bin := binary(b)
	state, bundle := b.TempDir(), b.TempDir()
	spec, err := json.Marshal(map[string]any{
		"ociVersion": "1.0.2",
		"root":       map[string]any{"path": "/", "readonly": true},
		"process":    map[string]any{"args": []string{"/bin/sleep", "600"}, "cwd": "/", "env": []string{"PATH=/usr/bin:/bin"}},
		// Neither this machine's login scripts nor its disk are measured.
		"mounts": []map[string]string{{"destination": "/etc", "type": "tmpfs"}, {"destination": "/root", "type": "tmpfs"}, {"destination": "/tmp", "type": "tmpfs"}},
		"linux":  map[string]any{"namespaces": []map[string]string{{"type": "pid"}, {"type": "mount"}}},
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
	b.Cleanup(func() {
		runsc("delete", "-force", "baseline").Run()
		syscall.Unmount(filepath.Join(state, "null-netns"), syscall.MNT_DETACH) // runsc leaves it mounted
	})
	return func(args ...string) *exec.Cmd { return runsc(append([]string{"exec", "baseline"}, args...)...) }
}

// sdk is the unmodified JavaScript SDK of E2B, with sandboxes of its own.
type sdk struct {
	b   *testing.B
	in  io.Writer
	out *bufio.Scanner
}

func startSDK(b *testing.B, c server, sandboxes int) sdk {
	b.Helper()
	key := exec.Command(binary(b), "key", "create", "--data-dir", c.dataDir)
	key.Env = []string{}
	secret, err := key.Output()
	if err != nil {
		b.Fatal(err)
	}
	cmd := exec.Command("node", "bench.mjs", strconv.Itoa(sandboxes))
	cmd.Dir = "../e2b"
	cmd.Env = append(os.Environ(), "E2B_API_URL="+c.url, "E2B_SANDBOX_URL="+c.url, "E2B_API_KEY="+strings.TrimSpace(string(secret)))
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		b.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		b.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		b.Skipf("needs node: %v", err)
	}
	s := sdk{b, in, bufio.NewScanner(out)}
	b.Cleanup(func() {
		in.Close()
		if err := cmd.Wait(); err != nil {
			b.Errorf("the SDK: %v", err)
		}
	})
	s.line() // it is ready
	return s
}

func (s sdk) line() string {
	s.b.Helper()
	if !s.out.Scan() {
		s.b.Fatalf("the SDK ended: %v", s.out.Err())
	}
	return s.out.Text()
}

// run returns how long n clients at once took for commands.run('true') in a
// sandbox of their own, each so many times, in milliseconds.
func (s sdk) run(n, times int) float64 {
	s.b.Helper()
	fmt.Fprintln(s.in, "run", n, times)
	ms, err := strconv.ParseFloat(s.line(), 64)
	if err != nil {
		s.b.Fatal(err)
	}
	return ms
}

// BenchmarkSDKRun is commands.run('true') of the E2B SDK, which runs it with
// bash -l, to the same with `runsc exec`.
func BenchmarkSDKRun(b *testing.B) {
	s := startSDK(b, serve(b), 1)
	runsc := bare(b)
	var ours, baseline []float64
	for i := range 100 {
		ours = append(ours, s.run(1, 1))
		if i%4 == 0 {
			baseline = append(baseline, took(b, runsc("/bin/bash", "-l", "-c", "true").Run))
		}
		if i == 11 { // caches are warm for both
			ours, baseline = nil, nil
		}
	}
	report(b, ours, baseline)
}

// BenchmarkSDKClients is the rate of 20 clients in 20 sandboxes, to that of
// one after the other.
func BenchmarkSDKClients(b *testing.B) {
	const clients, times = 20, 5
	s := startSDK(b, serve(b), clients)
	var together, alone []float64
	for range 8 {
		together = append(together, s.run(clients, times))
		alone = append(alone, s.run(1, clients*times))
	}
	t, a := median(together), median(alone)
	b.ReportMetric(clients*times/t*1000, "runs/s")
	b.ReportMetric(clients*times/a*1000, "baseline-runs/s")
	b.ReportMetric(a/t, "ratio")
	b.ReportMetric(0, "ns/op")
}

// BenchmarkUpload and BenchmarkDownload are the rate of 256 MB through the
// API, to that of cat through `runsc exec`.
func BenchmarkUpload(b *testing.B)   { transfer(b, true) }
func BenchmarkDownload(b *testing.B) { transfer(b, false) }

func transfer(b *testing.B, up bool) {
	const size = 256 << 20
	c := serve(b)
	limits := small
	limits.Limits.DiskMB, limits.Limits.MemoryMB = 1024, 512
	sb, err := c.Create(b.Context(), limits)
	if err != nil {
		b.Fatal(err)
	}
	defer sb.Close()
	runsc := bare(b)
	ours := func() error {
		if up {
			return sb.Upload(b.Context(), "big", io.LimitReader(zeros{}, size), 0)
		}
		var n counter
		err := sb.Download(b.Context(), "big", &n)
		return n.whole(size, err)
	}
	baseline := func() error {
		if up {
			cmd := runsc("/bin/sh", "-c", "cat > /tmp/big")
			cmd.Stdin = io.LimitReader(zeros{}, size)
			return cmd.Run()
		}
		var n counter
		cmd := runsc("/bin/cat", "/tmp/big")
		cmd.Stdout = &n
		return n.whole(size, cmd.Run())
	}
	if !up {
		if err := sb.Upload(b.Context(), "big", io.LimitReader(zeros{}, size), 0); err != nil {
			b.Fatal(err)
		}
		fill := runsc("/bin/sh", "-c", "cat > /tmp/big")
		fill.Stdin = io.LimitReader(zeros{}, size)
		if err := fill.Run(); err != nil {
			b.Fatal(err)
		}
	}
	var o, base []float64
	for range 5 {
		o = append(o, took(b, ours))
		base = append(base, took(b, baseline))
	}
	mbs := func(ms float64) float64 { return size / 1e6 / (ms / 1000) }
	b.ReportMetric(mbs(median(o)), "MB/s")
	b.ReportMetric(mbs(median(base)), "baseline-MB/s")
	b.ReportMetric(median(base)/median(o), "ratio")
	b.ReportMetric(0, "ns/op")
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { clear(p); return len(p), nil }

// counter counts what is written to it.
type counter int

func (c *counter) Write(p []byte) (int, error) { *c += counter(len(p)); return len(p), nil }

func (c *counter) whole(size int, err error) error {
	if err == nil && int(*c) != size {
		err = fmt.Errorf("%d bytes came of %d", *c, size)
	}
	return err
}

// BenchmarkIdleServer is the memory of the server with 50 idle sandboxes, to
// that of the sandboxes themselves.
func BenchmarkIdleServer(b *testing.B) {
	c := serve(b)
	for range 50 {
		sb, err := c.Create(b.Context(), small)
		if err != nil {
			b.Fatal(err)
		}
		defer sb.Close()
	}
	time.Sleep(2 * time.Second)
	var server, sandboxes float64
	for _, p := range below(c.pid) {
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
