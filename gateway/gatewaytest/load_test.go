package gatewaytest

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"os"
	"runtime"
	"runtime/pprof"
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
// take little, and one more flow than the budget is refused.
// AIRLOCK_TEST_DOORS=500 is the size that a host is made for.
func TestManyDoors(t *testing.T) {
	doors, flows := number(t, "AIRLOCK_TEST_DOORS", 50, 5), 200
	w := newWorld(t)
	port := w.server(func(rw http.ResponseWriter, r *http.Request) { io.WriteString(rw, "fine") }, "")
	w.name("one.test", "127.0.0.1")
	w.config.MaxFlows = flows
	before := memory(t)
	var sandboxes []*sandbox
	for range doors {
		sandboxes = append(sandboxes, w.open())
	}
	opened := memory(t)
	var all sync.WaitGroup
	turn := make(chan bool, 2*runtime.NumCPU())
	for _, b := range sandboxes {
		all.Go(func() {
			turn <- true
			defer func() { <-turn }()
			at := netip.AddrPortFrom(b.address("one.test"), port)
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
		})
	}
	all.Wait()
	for _, b := range sandboxes[:min(len(sandboxes), 10)] {
		if n := b.door.Stats().Flows; n != flows {
			t.Errorf("a door has %d flows, want %d", n, flows)
		}
		_, err := b.connect(t.Context(), netip.MustParseAddrPort("192.0.2.1:80"))
		if err == nil || !strings.Contains(err.Error(), "refused") || b.door.Stats().Refused != 1 {
			t.Errorf("one flow more: %v, %+v", err, b.door.Stats())
		}
	}
	held := memory(t) - before
	if p := os.Getenv("PROF"); p != "" {
		f, _ := os.Create(p)
		pprof.Lookup("heap").WriteTo(f, 0)
		f.Close()
	}
	t.Logf("%d doors: %d MB; with %d flows each: %d MB, %d KB a flow, both ends", doors, (opened-before)>>20, flows, held>>20, held>>10/(doors*flows))
	if most := 3 << 30 * doors / 500; held > most {
		t.Errorf("%d MB, and at most %d are for as many", held>>20, most>>20)
	}
}

// memory returns the bytes of heap and stacks that are in use.
func memory(t testing.TB) int {
	t.Helper()
	for range 8 {
		runtime.GC()
	}
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	t.Logf("alloc %d inuse %d stack %d sys %d", m.HeapAlloc>>20, m.HeapInuse>>20, m.StackInuse>>20, m.Sys>>20)
	return int(m.HeapInuse + m.StackInuse)
}
