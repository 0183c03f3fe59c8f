package web

import (
	"context"
	"strings"
	"testing"
	"testing/synctest"
)

// Doors take turns whatever the number of their requests, one that is alone
// does not wait, and who gives up leaves no place behind.
func TestTurns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		all := &Turns{slots: 1}
		a, b := &turns{all: all}, &turns{all: all}
		for range 2 {
			if a.take(t.Context()) {
				t.Error("a door that is alone was given a turn")
			}
		}
		if !b.take(t.Context()) {
			t.Fatal("the first turn was not given")
		}
		var order []string
		gone, cancel := context.WithCancel(t.Context())
		wait := func(ctx context.Context, of *turns, name string) {
			go func() {
				if of.take(ctx) {
					order = append(order, name)
					all.give()
				}
			}()
			synctest.Wait()
		}
		wait(gone, b, "b0")
		for _, name := range []string{"a1", "a2", "a3"} {
			wait(t.Context(), a, name)
		}
		cancel()
		synctest.Wait()
		wait(t.Context(), b, "b1")
		all.give()
		synctest.Wait()
		if got, want := strings.Join(order, " "), "a1 b1 a2 a3"; got != want {
			t.Errorf("turns: %s, want %s", got, want)
		}
		if all.used != 0 || all.queue.Len() != 0 {
			t.Errorf("%d turns are left, %d doors wait", all.used, all.queue.Len())
		}
		// One that is held for longer than it may be is taken back.
		long, next := &turn{of: a, ctx: t.Context()}, &turn{of: b, ctx: t.Context()}
		long.begin()
		next.begin()
		next.end()
		long.end()
		if all.used != 0 {
			t.Errorf("%d turns are left", all.used)
		}
	})
}
