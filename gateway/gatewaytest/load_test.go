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
// refused. AIRLOCK_TEST_DOORS=500 is the size that a host is made for.
func TestManyDoors(t *testing.T) {
	doors, flows := number(t, "AIRLOCK_TEST_DOORS", 20, 5), 200
	h := newHost(t, wire.Budgets{Flows: flows, Requests: 100_000}, func(rw http.ResponseWriter, r *http.Request) { io.WriteString(rw, "fine") })
	begun := h.memory("VmRSS")
	var all sync.WaitGroup
	turn := make(chan bool, 2*runtime.NumCPU())
	for range doors {
		b := h.open()
		all.Go(func() {
			turn <- true
			defer func() { <-turn }()
			if err := b.fill(t.Context(), flows); err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
	if t.Failed() {
		return
	}
	most := h.memory("VmHWM")
	t.Logf("%d MB; with %d doors of %d flows: %d MB at most, %d now, %d KB a flow", begun>>20, doors, flows, most>>20, h.memory("VmRSS")>>20, (most-begun)>>10/(doors*flows))
}

// fill has a sandbox use as many flows as it may, keep them, and try one more.
func (b *sandbox) fill(ctx context.Context, flows int) error {
	at := netip.AddrPortFrom(b.address("example.com"), 80)
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	for n := range flows + 1 {
		c, err := b.connect(ctx, at)
		if n >= flows-1 && err != nil { // the question for the name is one, too, for a second
			if !strings.Contains(err.Error(), "refused") {
				return fmt.Errorf("one flow more: %w", err)
			}
			return nil
		}
		if err != nil {
			return err
		}
		if err := ask(c); err != nil {
			return err
		}
	}
	return fmt.Errorf("more than %d flows are let in", flows)
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
