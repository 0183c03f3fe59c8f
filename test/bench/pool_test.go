package bench

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"sync"
	"testing"
	"time"

	"airlock.dev/airlock/client"
)

// pooled starts a server and asks for so many sandboxes at one time that it keeps
// that many ready.
func pooled(b *testing.B, size int) server {
	b.Helper()
	binary(b)
	s := serveIn(b, nil, "--pool-most", fmt.Sprint(size))
	for range 2 { // who came once may not come again
		closeAll(b, createAll(b, s, max(size, 2)))
	}
	s.filled(b, size)
	return s
}

func createAll(b *testing.B, s server, n int) []*client.Sandbox {
	b.Helper()
	all := make([]*client.Sandbox, n)
	var work sync.WaitGroup
	for i := range all {
		work.Go(func() {
			sb, err := s.Create(b.Context(), small)
			if err != nil {
				b.Error(err)
				return
			}
			all[i] = sb
		})
	}
	work.Wait()
	if b.Failed() {
		b.FailNow()
	}
	return all
}

func closeAll(b *testing.B, all []*client.Sandbox) {
	b.Helper()
	var work sync.WaitGroup
	for _, sb := range all {
		work.Go(func() { check(b, sb.Close()) })
	}
	work.Wait()
}

// filled waits until exactly so many sandboxes exist.
func (s server) filled(b *testing.B, n int) {
	b.Helper()
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(20 * time.Millisecond) {
		have := 0
		for _, p := range below(s.pid) {
			if name, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", p)); bytes.HasPrefix(name, []byte("runsc-sandbox")) {
				have++
			}
		}
		if have == n {
			time.Sleep(100 * time.Millisecond) // the last one answers
			return
		}
		if time.Now().After(deadline) {
			b.Fatalf("%d sandboxes exist, want %d", have, n)
		}
	}
}

// BenchmarkPoolTrue is from a create to the end of /bin/true in a sandbox of the
// pool, to `runsc do /bin/true`.
func BenchmarkPoolTrue(b *testing.B) { fromPool(b, "/bin/true") }

// BenchmarkPoolPython is the same for a program in Python.
func BenchmarkPoolPython(b *testing.B) { fromPool(b, "python3", "-c", "print(1)") }

func fromPool(b *testing.B, cmd string, args ...string) {
	s := pooled(b, 4)
	var ours, baseline []float64
	for range 20 {
		s.filled(b, 4)
		var sb *client.Sandbox
		ours = append(ours, took(b, func() (err error) {
			if sb, err = s.Create(b.Context(), small); err != nil {
				return err
			}
			return output(b, sb, cmd, args...)
		}))
		check(b, sb.Close())
		baseline = append(baseline, took(b, exec.Command(binary(b), append(append(runscFlags[:len(runscFlags):len(runscFlags)], "do", cmd), args...)...).Run))
	}
	report(b, ours, baseline)
}

func output(b *testing.B, sb *client.Sandbox, cmd string, args ...string) error {
	var out bytes.Buffer
	r, err := sb.Exec(b.Context(), client.ExecRequest{Cmd: cmd, Args: args, Stdout: &out, Stderr: &out})
	if err == nil && r.ExitCode != 0 {
		err = fmt.Errorf("%s: %+v\n%s", cmd, r, &out)
	}
	return err
}

// BenchmarkPoolBurst is the 95th percentile of 50 creates at one time, each to the
// end of /bin/true, with 50 that are ready, to one `runsc do /bin/true`.
func BenchmarkPoolBurst(b *testing.B) {
	const size = 50
	s := pooled(b, size)
	var baseline []float64
	for range 7 {
		baseline = append(baseline, took(b, exec.Command(binary(b), append(runscFlags[:len(runscFlags):len(runscFlags)], "do", "/bin/true")...).Run))
	}
	ours := make([]float64, size)
	all := make([]*client.Sandbox, size)
	var work sync.WaitGroup
	began := time.Now()
	for i := range ours {
		work.Go(func() {
			sb, err := s.Create(b.Context(), small)
			if err == nil {
				all[i] = sb
				err = output(b, sb, "/bin/true")
			}
			if err != nil {
				b.Error(err)
			}
			ours[i] = float64(time.Since(began).Microseconds()) / 1000
		})
	}
	work.Wait()
	if b.Failed() {
		return
	}
	slices.Sort(ours)
	b.ReportMetric(ours[size/2], "p50-ms")
	report(b, []float64{ours[size*95/100]}, baseline)
	closeAll(b, all)
}

// BenchmarkSustained is how many sandboxes are created, used once and destroyed in
// a second, four at a time, to how many times `runsc do` does it, also four at a time.
func BenchmarkSustained(b *testing.B) {
	const workers, each = 4, 12
	s := pooled(b, 8)
	rate := func(one func() error) float64 {
		began := time.Now()
		var work sync.WaitGroup
		for range workers {
			work.Go(func() {
				for range each {
					if err := one(); err != nil {
						b.Error(err)
					}
				}
			})
		}
		work.Wait()
		return workers * each / time.Since(began).Seconds()
	}
	var ours, baseline []float64
	for range 3 {
		ours = append(ours, rate(func() error {
			sb, err := s.Create(b.Context(), small)
			if err != nil {
				return err
			}
			if err := output(b, sb, "/bin/true"); err != nil {
				return err
			}
			return sb.Close()
		}))
		baseline = append(baseline, rate(func() error {
			return exec.Command(binary(b), append(runscFlags[:len(runscFlags):len(runscFlags)], "do", "/bin/true")...).Run()
		}))
	}
	o, base := median(ours), median(baseline)
	b.ReportMetric(o, "sandboxes/s")
	b.ReportMetric(base, "baseline-sandboxes/s")
	b.ReportMetric(o/base, "ratio")
	b.ReportMetric(0, "ns/op")
}
