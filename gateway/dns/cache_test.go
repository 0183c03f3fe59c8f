package dns

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"runtime"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"airlock.dev/airlock"
)

// How long the host's resolver is not asked again: each step is a query after
// so many seconds, and says whether it is asked.
func TestKept(t *testing.T) {
	type step struct {
		after time.Duration
		asked bool
	}
	for name, steps := range map[string][]step{
		"example.com":        {{0, true}, {0, false}, {29 * time.Second, false}, {time.Second, true}, {0, false}},
		"nx.example.com":     {{0, true}, {9 * time.Second, false}, {time.Second, true}},
		"gone.example.com":   {{0, true}, {9 * time.Second, false}, {time.Second, true}},
		"empty.example.com":  {{0, true}, {9 * time.Second, false}, {time.Second, true}},
		"broken.example.com": {{0, true}, {999 * time.Millisecond, false}, {time.Millisecond, true}},
		"never.example.com":  {{0, true}, {999 * time.Millisecond, false}, {time.Millisecond, true}},
	} {
		synctest.Test(t, func(t *testing.T) {
			var w world
			s := newServer(t, &w, func(c *Config) { c.Rate = 1000 })
			cl := dialPipe(t, s, false)
			for i, st := range steps {
				time.Sleep(st.after)
				for _, kind := range []string{"0001", "001c"} { // one lookup for both
					cl.c.Write(ask(t, name, kind))
					if _, err := cl.read(); err != nil { // it was idle
						cl = dialPipe(t, s, false)
						cl.send(ask(t, name, kind))
						cl.receive()
					}
				}
				judged, looked := w.saw()
				if len(judged) != 2 || (len(looked) == 1) != st.asked || len(looked) > 1 {
					t.Errorf("%s, query %d: judged %q, looked up %q", name, i, judged, looked)
				}
			}
			cl.c.Close()
			s.Close()
		})
	}
}

// Who waits for the same name waits for one lookup, which does not end with
// who asked first.
func TestOneLookupForAll(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := world{free: make(chan struct{})}
		s := newServer(t, &w, nil)
		first, cancel := context.WithCancel(t.Context())
		var waiting sync.WaitGroup
		waiting.Go(func() {
			if _, err := s.Lookup(first, "slow.example.com"); !errors.Is(err, context.Canceled) {
				t.Errorf("the first: %v", err)
			}
		})
		synctest.Wait()
		for range 10 {
			waiting.Go(func() {
				addrs, err := s.Lookup(t.Context(), "slow.example.com")
				if err != nil || !slices.Equal(addrs, []netip.Addr{netip.MustParseAddr("192.0.2.1")}) {
					t.Errorf("%v, %v", addrs, err)
				}
				clear(addrs) // is the caller's own
			})
		}
		synctest.Wait()
		cancel()
		synctest.Wait()
		close(w.free)
		waiting.Wait()
		addrs, err := s.Lookup(t.Context(), "slow.example.com")
		if _, looked := w.saw(); len(looked) != 1 || err != nil || !addrs[0].IsValid() {
			t.Errorf("looked up %q, and got %v, %v", looked, addrs, err)
		}
		s.Close()
	})
}

func TestKnownIsBounded(t *testing.T) {
	w := world{free: make(chan struct{})}
	s := newServer(t, &w, func(c *Config) { c.Known = 3 })
	look := func(names ...string) {
		for _, name := range names {
			if _, err := s.Lookup(t.Context(), name); err != nil {
				t.Fatal(err)
			}
		}
	}
	look("a.test", "b.test", "c.test", "a.test", "d.test") // d takes the place of b
	look("a.test", "c.test", "d.test")
	look("b.test")
	if _, looked := w.saw(); !slices.Equal(looked, []string{"a.test", "b.test", "c.test", "d.test", "b.test"}) {
		t.Errorf("looked up %q", looked)
	}
	if n := len(s.cache.entries); n != 3 || s.cache.known.Len() != 3 {
		t.Errorf("%d entries", n)
	}
	// Lookups that are under way are not forgotten, and not more than three.
	var waiting sync.WaitGroup
	ctx, cancel := context.WithCancel(t.Context())
	for i := range 3 {
		waiting.Go(func() { s.Lookup(ctx, fmt.Sprintf("slow%d.test", i)) })
	}
	for n := 0; n < 3; runtime.Gosched() {
		w.mu.Lock()
		n = len(w.looked)
		w.mu.Unlock()
	}
	if _, err := s.Lookup(t.Context(), "e.test"); airlock.CodeOf(err) != airlock.Exhausted {
		t.Errorf("a fourth lookup: %v", err)
	}
	cancel()
	waiting.Wait()
}
