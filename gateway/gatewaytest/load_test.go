package gatewaytest

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"runtime/debug"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"airlock.dev/airlock/gateway/wire"
)

// number is a size of a test: of a usual run, unless the environment says more.
func number(t testing.TB, env string, usual, short int) int {
	t.Helper()
	if s := os.Getenv(env); s != "" {
		n, err := strconv.Atoi(s)
		must(t, err)
		return n
	}
	if testing.Short() {
		return short
	}
	return usual
}

// Many doors with many flows each, which have all been used and are kept open,
// take little of the gateway's memory, and one more flow than the budget is
// refused. AIRLOCK_TEST_DOORS=500 is the size that a host is made for, which may
// take 3 GB.
func TestManyDoors(t *testing.T) {
	if race { // it takes ten times as much
		out, err := exec.CommandContext(t.Context(), "go", "test", "-count=1", "-v", "-run=^TestManyDoors$", ".").CombinedOutput()
		if t.Logf("%s", out); err != nil {
			t.Errorf("without the race detector: %v", err)
		}
		return
	}
	doors, flows := number(t, "AIRLOCK_TEST_DOORS", 20, 5), 200
	var env []string
	if doors < 500 {
		env = append(env, "GOGC=40") // as often as garbage is looked for near the limit
	}
	h := newHost(t, wire.Budgets{Flows: flows, Requests: 100_000}, fine, env...)
	begun := h.memory("VmRSS")
	defer debug.SetGCPercent(debug.SetGCPercent(400)) // the guests are what costs time
	ctx, cancel := context.WithTimeout(t.Context(), 15*time.Minute)
	defer cancel()
	var filling sync.WaitGroup
	turn := make(chan bool, 2*runtime.NumCPU())
	var sandboxes []*sandbox
	for range doors {
		b := h.open()
		sandboxes = append(sandboxes, b)
		filling.Go(func() {
			turn <- true
			defer func() { <-turn }()
			if err := b.fill(ctx, flows); err != nil {
				t.Error(err)
			}
		})
	}
	filling.Wait()
	for _, b := range sandboxes { // all are still there
		if err := b.refused(ctx); err != nil {
			t.Error(err)
		}
	}
	// It is the peak, garbage and all.
	peak := h.memory("VmHWM") - begun
	t.Logf("%d doors of %d flows: %d MB at most, %d KB a flow", doors, flows, peak>>20, peak>>10/(doors*flows))
	if most := doors * (3 << 30 / 500); peak > most {
		t.Errorf("%d MB, and at most %d are for as many", peak>>20, most>>20)
	}
}

func fine(rw http.ResponseWriter, r *http.Request) { io.WriteString(rw, "fine") }

// fill has a sandbox use as many flows as it may, keep them, and try one more.
func (b *sandbox) fill(ctx context.Context, flows int) error {
	for range flows {
		c, err := b.more(ctx)
		if err != nil {
			return err
		}
		if err := ask(c); err != nil {
			return err
		}
	}
	return b.refused(ctx)
}

// refused returns an error if one more flow is not refused.
func (b *sandbox) refused(ctx context.Context) error {
	if _, err := b.more(ctx); err == nil || !strings.Contains(err.Error(), "refused") {
		return fmt.Errorf("one flow more than the budget: %v", err)
	}
	return nil
}

// more opens one more flow.
func (b *sandbox) more(ctx context.Context) (net.Conn, error) {
	return b.connect(ctx, netip.AddrPortFrom(example, 80))
}

// ask makes a request and reads its answer.
func ask(c net.Conn) error {
	io.WriteString(c, "GET / HTTP/1.1\r\nHost: example.com\r\n\r\n")
	res, err := http.ReadResponse(bufio.NewReaderSize(c, 512), nil)
	if err != nil {
		return err
	}
	if body, err := io.ReadAll(res.Body); string(body) != "fine" {
		return fmt.Errorf("the answer is %q: %w", body, err)
	}
	return nil
}

// memory returns the bytes of heap and stacks that are in use, and what the
// process has of the machine's.
func memory(t testing.TB) (used, resident int) {
	t.Helper()
	for range 3 { // stacks shrink by halves
		runtime.GC()
	}
	debug.FreeOSMemory()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	text, err := os.ReadFile("/proc/self/statm")
	must(t, err)
	var size int
	_, err = fmt.Sscan(string(text), &size, &resident)
	must(t, err)
	return int(m.HeapInuse + m.StackInuse), resident * os.Getpagesize()
}
