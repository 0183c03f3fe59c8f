package test

import (
	"crypto/sha256"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"airlock.dev/airlock"
	"airlock.dev/airlock/client"
)

// TestBigFile moves 256 MB in and out: whole, and through a server and a guest
// that stay small.
func TestBigFile(t *testing.T) {
	const size = 256 << 20
	s := startServer(t)
	sb := create(t, s.as(s.key("default", airlock.Client)), client.CreateRequest{Timeout: 10 * time.Minute, Limits: airlock.Limits{DiskMB: 1024}})
	// The guest and its helper, in kB.
	inside := func() int {
		out := must(t, sb, `for p in 1 $(pgrep -f 'airlock-guest [f]iles'); do grep VmRSS /proc/$p/status; done | tr -dc '0-9\n'`)
		sum := 0
		if n := len(strings.Fields(out)); n != 2 {
			t.Fatalf("%d processes are the guest's: %q", n, out)
		}
		for _, line := range strings.Fields(out) {
			n, err := strconv.Atoi(line)
			if err != nil {
				t.Fatal(err)
			}
			sum += n
		}
		return sum
	}
	if err := sb.Upload(t.Context(), "small", strings.NewReader("x"), 0); err != nil { // the helper runs
		t.Fatal(err)
	}
	before, guest := s.memory("VmRSS"), inside()
	if err := os.WriteFile(fmt.Sprintf("/proc/%d/clear_refs", s.server()), []byte("5"), 0); err != nil {
		t.Fatalf("reset the peak: %v", err)
	}
	sent, got := sha256.New(), sha256.New()
	var seed [32]byte
	if err := sb.Upload(t.Context(), "big", io.TeeReader(io.LimitReader(rand.NewChaCha8(seed), size), sent), 0); err != nil {
		t.Fatal(err)
	}
	if err := sb.Download(t.Context(), "big", got); err != nil {
		t.Fatal(err)
	}
	if string(sent.Sum(nil)) != string(got.Sum(nil)) {
		t.Error("the file that came back is another")
	}
	peak, after := s.memory("VmHWM"), inside()
	t.Logf("server: %.1f MB, at its peak %.1f MB; guest and helper: %d kB, then %d kB", mb(before), mb(peak), guest, after)
	if peak-before > 32<<20 {
		t.Errorf("the server's RSS grew by %.1f MB", mb(peak-before))
	}
	if after-guest > 16<<10 {
		t.Errorf("the guest's RSS grew from %d kB to %d kB", guest, after)
	}
}
