package tiles

import (
	"bufio"
	"context"
	"crypto"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/transparency-dev/tessera"
	"golang.org/x/sys/unix"
)

// What the test binary is told to be when a test runs it again.
const (
	writerVar    = "TILES_TEST_WRITER"    // a directory to write to until it is killed
	namespaceVar = "TILES_TEST_NAMESPACE" // that it has mounts of its own
)

func TestMain(m *testing.M) {
	if dir := os.Getenv(writerVar); dir != "" {
		fmt.Fprintln(os.Stderr, writeUntilKilled(dir))
		os.Exit(1)
	}
	os.Exit(m.Run())
}

// writeUntilKilled adds events and says which are in.
func writeUntilKilled(dir string) error {
	ctx := context.Background()
	trees, err := Open(ctx, Config{Dir: dir, Installation: testInstallation, Keys: []crypto.Signer{testKey(1)}, Checkpoint: checkpointLeast})
	for err == nil {
		next := trees.Next()
		n := 1 + next%300
		if err = trees.Integrate(ctx, next, plain(next, n)); err == nil {
			fmt.Println(next + n)
		}
	}
	return err
}

func TestKilled(t *testing.T) {
	dir := t.TempDir()
	w := openWriter(t, dir, 1, nil)
	w.start("2026-Q4")
	w.finish()
	for round := range 4 {
		cmd := exec.Command(os.Args[0])
		cmd.Env = append(os.Environ(), writerVar+"="+dir)
		cmd.Stderr = os.Stderr
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		var said uint64
		lines := bufio.NewScanner(out)
		for range 5 + 3*round {
			if !lines.Scan() {
				break
			}
			if said, err = strconv.ParseUint(lines.Text(), 10, 64); err != nil {
				t.Fatal(err)
			}
		}
		cmd.Process.Kill()
		for lines.Scan() { // what it still said before it died
			if n, err := strconv.ParseUint(lines.Text(), 10, 64); err == nil {
				said = n
			}
		}
		cmd.Wait()
		if said == 0 {
			t.Fatal("the writer wrote nothing")
		}

		w := openWriter(t, dir, 1, nil)
		if next := w.Next(); next < said || next > said+300 {
			t.Errorf("killed after event %d was in, next is %d", said-1, next)
		}
		w.fill(w.Next() + 10)
		w.finish()
		r := mustVerify(t, dir, VerifyOptions{VKeys: []string{testVKey(t, "2026-Q4", 1)}})
		if r.Events != w.Next() {
			t.Errorf("%d events of %d verified", r.Events, w.Next())
		}
	}
}

func TestFullDisk(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("only root can mount a small file system")
	}
	if os.Getenv(namespaceVar) == "" {
		cmd := exec.Command(os.Args[0], "-test.run=^TestFullDisk$", "-test.v")
		cmd.Env = append(os.Environ(), namespaceVar+"=1")
		cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: unix.CLONE_NEWNS}
		out, err := cmd.CombinedOutput()
		if errors.Is(err, unix.EPERM) {
			t.Skip("a mount namespace is not permitted here")
		}
		if err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		if strings.Contains(string(out), "--- SKIP") {
			t.Skipf("%s", out)
		}
		return
	}
	dir := t.TempDir()
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		t.Skipf("mounts can't be made private here: %v", err)
	}
	if err := unix.Mount("tmpfs", dir, "tmpfs", unix.MS_NODEV, "size=2m"); err != nil {
		t.Skipf("a tmpfs can't be mounted here: %v", err)
	}
	t.Cleanup(func() { unix.Unmount(dir, unix.MNT_DETACH) })
	log := filepath.Join(dir, "log")
	w := openWriter(t, log, 1, nil)
	w.start("2026-Q4")
	for round := range uint64(3) {
		w.fill(300 * (round + 1))
		w.await()
		fillDisk(t, dir, 0)
		if err := w.Start(t.Context(), "2027-Q1", w.Next(), testKey(1)); err == nil {
			t.Fatal("a full disk took another shard")
		}
		remove(t, dir, "ballast")
		fillDisk(t, dir, int(round)*3) // leave a little, so that it fails later
		refused := uint64(0)
		for range 10 {
			next := w.Next()
			entries := plain(next, 600)
			for i := range entries {
				entries[i] = testEvent(next+uint64(i), `"type":"test","pad":"`+strings.Repeat("x", 300)+`"`)
			}
			if err := w.Integrate(t.Context(), next, entries); err != nil {
				refused++
				if w.Next() != next {
					t.Logf("a part was in: %d of 600", w.Next()-next)
				}
			}
		}
		if refused == 0 {
			t.Error("a full disk took 10 groups")
		}
		remove(t, dir, "ballast")
		w.fill(w.Next() + 10)
		w.await()
		if w.Next() > 300*(round+2) {
			break // so much was in before it was full
		}
	}
	w.rotate("2027-Q1", 1)
	w.finish()
	r := mustVerify(t, log, VerifyOptions{VKeys: []string{testVKey(t, "2026-Q4", 1)}, FollowKeys: true})
	if r.Events != w.Next() {
		t.Errorf("%d events of %d verified", r.Events, w.Next())
	}
}

// fillDisk leaves a few pages.
func fillDisk(t *testing.T, dir string, pages int) {
	t.Helper()
	f, err := os.Create(filepath.Join(dir, "ballast"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	page := make([]byte, 4096)
	n := int64(0)
	for err == nil {
		_, err = f.Write(page)
		n++
	}
	if !errors.Is(err, unix.ENOSPC) {
		t.Fatal(err)
	}
	if err := f.Truncate(max(0, n-1-int64(pages)) * 4096); err != nil {
		t.Fatal(err)
	}
}

func BenchmarkIntegrate(b *testing.B) {
	pad := `"type":"test","pad":"` + strings.Repeat("x", 550) + `"`
	for _, group := range []uint64{256, 1024} {
		b.Run(strconv.FormatUint(group, 10), func(b *testing.B) {
			w := openWriter(b, b.TempDir(), 1, func(c *Config) { c.Checkpoint = time.Second })
			w.start("2026-Q4")
			b.ResetTimer()
			for range b.N {
				b.StopTimer()
				entries := make([][]byte, group)
				for i := range entries {
					entries[i] = testEvent(w.Next()+uint64(i), pad)
				}
				b.StartTimer()
				w.add(entries...)
			}
			b.ReportMetric(float64(uint64(b.N)*group)/b.Elapsed().Seconds(), "entries/s")
		})
	}
}

func BenchmarkVerify(b *testing.B) {
	dir := b.TempDir()
	w := openWriter(b, dir, 1, nil)
	w.start("2026-Q4")
	pad := `"type":"test","pad":"` + strings.Repeat("x", 550) + `"`
	const total = 200_000
	for w.Next() < total {
		entries := make([][]byte, 1024)
		for i := range entries {
			entries[i] = testEvent(w.Next()+uint64(i), pad)
		}
		w.add(entries...)
	}
	w.finish()
	opts := VerifyOptions{VKeys: []string{testVKey(b, "2026-Q4", 1)}}
	b.ResetTimer()
	events := uint64(0)
	for range b.N {
		events += mustVerify(b, dir, opts).Events
	}
	b.ReportMetric(float64(events)/b.Elapsed().Seconds(), "events/s")
}

func BenchmarkProve(b *testing.B) {
	w := openWriter(b, b.TempDir(), 1, nil)
	w.start("2026-Q4")
	w.fill(70_000)
	w.await()
	b.ResetTimer()
	for i := range b.N {
		if _, err := w.Prove(b.Context(), uint64(i)*7919%70_000); err != nil {
			b.Fatal(err)
		}
	}
}

// The loop that hands a group over must be shorter than batchAge.
func BenchmarkHandOver(b *testing.B) {
	w := openWriter(b, b.TempDir(), 1, nil)
	w.start("2026-Q4")
	took := make([]time.Duration, 0, b.N)
	for range b.N {
		prepared := make([]*tessera.Entry, groupMost)
		for i, e := range plain(0, groupMost) {
			prepared[i] = tessera.NewEntry(e)
		}
		futures := make([]tessera.IndexFuture, groupMost)
		begun := time.Now()
		for i, e := range prepared {
			futures[i] = w.current.add(b.Context(), e)
		}
		took = append(took, time.Since(begun))
		for _, f := range futures {
			if _, err := f(); err != nil {
				b.Fatal(err)
			}
		}
	}
	slices.Sort(took)
	b.ReportMetric(float64(took[len(took)/2].Microseconds()), "p50-µs")
	b.ReportMetric(float64(took[len(took)-1].Microseconds()), "max-µs")
}
