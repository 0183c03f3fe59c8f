package control

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"airlock.dev/airlock"
)

// However many sandboxes of a team wait, there is room for those of others.
func TestApprovalsAreShared(t *testing.T) {
	s := approvals{hold: time.Hour, all: map[string]*held{}}
	ctx, cancel := context.WithCancel(t.Context())
	var waiting sync.WaitGroup
	defer waiting.Wait()
	defer cancel()
	// ask has sandboxes of a team make n attempts, and returns how many wait.
	ask := func(team string, n int) int {
		full := make(chan bool, n)
		s.mu.Lock()
		before := len(s.all)
		s.mu.Unlock()
		for i := range n {
			waiting.Go(func() {
				_, err := s.wait(ctx, Approval{Team: team, Sandbox: fmt.Sprint(team, i/heldPerSandbox)}, airlock.Creator{})
				full <- airlock.CodeOf(err) == airlock.Exhausted
			})
		}
		for refused := 0; ; {
			select {
			case is := <-full:
				if !is {
					t.Fatal("one does not wait")
				}
				refused++
			case <-time.After(time.Millisecond):
			}
			s.mu.Lock()
			got := len(s.all) - before
			s.mu.Unlock()
			if got+refused == n {
				return got
			}
		}
	}
	for _, c := range []struct {
		team    string
		n, want int
	}{{"greedy", 600, 256}, {"greedy", 16, 0}, {"other", 16, 16}, {"busy", 600, 120}, {"third", 16, 16}} {
		if got := ask(c.team, c.n); got != c.want {
			t.Errorf("of %d attempts of %s %d wait, want %d", c.n, c.team, got, c.want)
		}
	}
}
