package gatewaytest

import (
	"bufio"
	"context"
	"fmt"
	"io"
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
// take little, and one more flow than the budget is refused. The guests are in
// a process of their own, as they are in life. AIRLOCK_TEST_DOORS=500 is the
// size that a host is made for.
func TestManyDoors(t *testing.T) {
	doors, flows := number(t, "AIRLOCK_TEST_DOORS", 20, 5), 200
	w := newWorld(t)
	port := w.server(func(rw http.ResponseWriter, r *http.Request) { io.WriteString(rw, "fine") }, "")
	w.name("one.test", "127.0.0.1")
	w.config.MaxFlows = flows
	guests := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestGuests$", "-test.timeout=2m")
	guests.Env = append(os.Environ(), fmt.Sprintf("AIRLOCK_TEST_GUESTS=%d", doors), fmt.Sprintf("AIRLOCK_TEST_FLOWS=%d", flows), fmt.Sprintf("AIRLOCK_TEST_PORT=%d", port))
	guests.Stderr = os.Stderr
	guests.WaitDelay = 10 * time.Second
	before, _ := memory(t)
	var sandboxes []*sandbox
	for range doors {
		b, end := w.wire()
		sandboxes = append(sandboxes, b)
		guests.ExtraFiles = append(guests.ExtraFiles, end)
	}
	opened, _ := memory(t)
	stdin, err := guests.StdinPipe()
	must(t, err)
	stdout, err := guests.StdoutPipe()
	must(t, err)
	must(t, guests.Start())
	defer guests.Wait()
	defer stdin.Close() // ends them
	said, err := bufio.NewReader(stdout).ReadString('\n')
	want(t, "the guests", fmt.Sprint(said, err), "ready\n<nil>")
	for _, b := range sandboxes {
		if s := b.door.Stats(); s.Flows < flows-1 || s.Refused != 1 { // DNS may be over
			t.Errorf("a door has %+v, want %d flows and one refused", s, flows)
		}
	}
	held, rss := memory(t)
	held -= before
	t.Logf("%d doors: %d MB; with %d flows each: %d MB, %d KB a flow; resident %d MB", doors, (opened-before)>>20, flows, held>>20, held>>10/(doors*flows), rss>>20)
	// It is 35 KB, and more with the race detector: 8 of them are net/http's buffers
	// and 14 are stacks.
	if most := doors * (flows*48<<10 + 1<<20); held > most {
		t.Errorf("%d MB, and at most %d are for as many", held>>20, most>>20)
	}
}

// TestGuests is the process of the guests of TestManyDoors.
func TestGuests(t *testing.T) {
	n := number(t, "AIRLOCK_TEST_GUESTS", 0, 0)
	if n == 0 {
		t.Skip("for TestManyDoors")
	}
	flows, port := number(t, "AIRLOCK_TEST_FLOWS", 0, 0), number(t, "AIRLOCK_TEST_PORT", 0, 0)
	var all sync.WaitGroup
	turn := make(chan bool, 2*runtime.NumCPU())
	for i := range n {
		end := os.NewFile(uintptr(3+i), "guest")
		t.Cleanup(func() { end.Close() }) // and not earlier, by the garbage collector
		b := &sandbox{world: &world{t: t}, s: newStack(t, end)}
		all.Go(func() {
			turn <- true
			defer func() { <-turn }()
			at := netip.AddrPortFrom(b.address("one.test"), uint16(port))
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			for range flows - 1 { // the question for the name is one, too
				c, err := b.connect(ctx, at)
				if err != nil {
					t.Error(err)
					return
				}
				fmt.Fprintf(c, "GET / HTTP/1.1\r\nHost: one.test:%d\r\n\r\n", port)
				res, err := http.ReadResponse(bufio.NewReaderSize(c, 512), nil)
				if err != nil || res.StatusCode != 200 {
					t.Errorf("%v, %v", res, err)
					return
				}
				io.Copy(io.Discard, res.Body)
			}
			if _, err := b.connect(ctx, at); err == nil || !strings.Contains(err.Error(), "refused") {
				t.Errorf("one flow more: %v", err)
			}
		})
	}
	all.Wait()
	if t.Failed() {
		return
	}
	fmt.Println("ready")
	io.Copy(io.Discard, os.Stdin)
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
