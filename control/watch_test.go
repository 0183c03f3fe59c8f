package control

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"airlock.dev/airlock"
	"airlock.dev/airlock/channel"
	"airlock.dev/airlock/policy"
	"golang.org/x/sys/unix"
)

// watchGuest serves the watches of a guest of our own making: answer is
// called with each command.
func watchGuest(t *testing.T, answer func(ctx context.Context, s *channel.Stream, c channel.WatchCommand) error) *Guest {
	t.Helper()
	p, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	host, guest := os.NewFile(uintptr(p[0]), "host"), os.NewFile(uintptr(p[1]), "guest")
	served := make(chan struct{})
	go func() {
		defer close(served)
		channel.Serve(guest, func(ctx context.Context, s *channel.Stream, method string, _ []byte) error {
			for {
				_, body, err := s.Recv(ctx)
				if err != nil {
					return nil
				}
				var c channel.WatchCommand
				if err := json.Unmarshal(body, &c); err != nil {
					return err
				}
				c.Path = strings.TrimPrefix(c.Path, "/home/user/")
				if err := answer(ctx, s, c); err != nil {
					return err
				}
			}
		})
	}()
	mux, err := channel.Dial(t.Context(), host, 1)
	if err != nil {
		t.Fatal(err)
	}
	g := &Guest{Sandbox: airlock.Sandbox{ID: "i1", Team: "alice"}, request: func() *policy.Set { return nil }, boundary: &Boundary{Policies: policy.Builtin, Trail: Unrecorded{}}, mux: mux, watches: newWatches(mux)}
	t.Cleanup(func() {
		mux.Close()
		g.watches.wait() // nothing of it runs on
		guest.Close()
		<-served
	})
	return g
}

func notes(ctx context.Context, s *channel.Stream, all ...channel.WatchNote) error {
	for _, n := range all {
		if err := channel.SendReply(ctx, s, n); err != nil {
			return err
		}
	}
	return nil
}

func changed(id uint32, name string) channel.WatchNote {
	return channel.WatchNote{ID: id, Event: &channel.WatchEvent{Name: name, Type: channel.Created}}
}

func mustWatch(t *testing.T, g *Guest, path string) *Watch {
	t.Helper()
	w, err := g.Watch(t.Context(), "", channel.WatchCommand{Path: path})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(w.Close)
	return w
}

func next(t *testing.T, w *Watch) (channel.WatchEvent, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	return w.Next(ctx)
}

// watchUntilEnd returns why a watch ended, be it before its first event.
func watchUntilEnd(t *testing.T, g *Guest, path string) error {
	t.Helper()
	w, err := g.Watch(t.Context(), "", channel.WatchCommand{Path: path})
	if err != nil {
		return err
	}
	defer w.Close()
	_, err = next(t, w)
	return err
}

func TestSlowWatch(t *testing.T) {
	long := strings.Repeat("n", 4000)
	g := watchGuest(t, func(ctx context.Context, s *channel.Stream, c channel.WatchCommand) error {
		switch c.Path {
		case "quiet":
			return notes(ctx, s, channel.WatchNote{ID: c.ID, Ready: true})
		case "loud": // more than one watch may keep
			if err := notes(ctx, s, channel.WatchNote{ID: c.ID, Ready: true}); err != nil {
				return err
			}
			for range 400 {
				if err := notes(ctx, s, changed(c.ID, long)); err != nil {
					return err
				}
			}
			return notes(ctx, s, changed(1, "after"))
		}
		return nil
	})
	quiet, loud := mustWatch(t, g, "quiet"), mustWatch(t, g, "loud")
	if e, err := next(t, quiet); err != nil || e.Name != "after" {
		t.Errorf("the other watch: %+v, %v", e, err)
	}
	if e, err := next(t, loud); airlock.CodeOf(err) != airlock.Exhausted || !strings.Contains(err.Error(), "watch again") {
		t.Errorf("the slow watch: %+v, %v", e, err)
	}
	if g.watches.queued != 0 {
		t.Errorf("%d bytes are kept", g.watches.queued)
	}

	// One that had its end already says that events were lost, too.
	over := mustWatch(t, g, "quiet")
	g.watches.mu.Lock()
	over.put(queuedEvent{channel.WatchEvent{Name: long}, watchQueue})
	over.end(io.EOF)
	for len(over.queue) > 0 {
		quiet.put(queuedEvent{channel.WatchEvent{Name: long}, watchQueue / 2})
		quiet.queued = 0 // as if its share were others'
	}
	quiet.take(len(quiet.queue))
	g.watches.queued, quiet.queued = 0, 0
	g.watches.mu.Unlock()
	if e, err := next(t, over); airlock.CodeOf(err) != airlock.Exhausted {
		t.Errorf("lost after its end: %+v, %v", e, err)
	}

	// Many that each keep to their bound exceed that of the sandbox.
	id, err := g.WatchPolled(t.Context(), "", channel.WatchCommand{Path: "quiet"})
	if err != nil {
		t.Fatal(err)
	}
	var all []*Watch
	for range 12 {
		w := mustWatch(t, g, "quiet")
		all = append(all, w)
		g.watches.mu.Lock()
		for range 220 {
			w.put(queuedEvent{channel.WatchEvent{Name: long}, 4000})
		}
		queued := g.watches.queued
		g.watches.mu.Unlock()
		if queued > watchQueues {
			t.Fatalf("%d bytes are kept", queued)
		}
	}
	lost := 0
	for _, w := range all {
		if _, err := next(t, w); err != nil {
			lost++
		}
		w.Close()
	}
	if lost != 3 { // 12 times 880,000 are 10.56 million, and 8 MiB are 9 of them
		t.Errorf("%d watches were lost", lost)
	}
	if events, err := g.Polled(t.Context(), id); len(events) != 0 || err != nil {
		t.Errorf("an innocent one: %v, %v", events, err)
	}
	if g.watches.queued != 0 {
		t.Errorf("%d bytes are kept after all", g.watches.queued)
	}
}

func TestWatchNonsense(t *testing.T) {
	ready := channel.WatchNote{ID: 1, Ready: true}
	for what, say := range map[string]func(ctx context.Context, s *channel.Stream) error{
		"no id":         func(ctx context.Context, s *channel.Stream) error { return notes(ctx, s, ready, changed(0, "x")) },
		"an id to come": func(ctx context.Context, s *channel.Stream) error { return notes(ctx, s, ready, changed(2, "x")) },
		"no name":       func(ctx context.Context, s *channel.Stream) error { return notes(ctx, s, ready, changed(1, "")) },
		"a long name": func(ctx context.Context, s *channel.Stream) error {
			return notes(ctx, s, ready, changed(1, strings.Repeat("x", 4097)))
		},
		"nothing": func(ctx context.Context, s *channel.Stream) error {
			return notes(ctx, s, ready, channel.WatchNote{ID: 1})
		},
		"a type of its own": func(ctx context.Context, s *channel.Stream) error {
			return notes(ctx, s, ready, channel.WatchNote{ID: 1, Event: &channel.WatchEvent{Name: "x", Type: "explode"}})
		},
		"no JSON": func(ctx context.Context, s *channel.Stream) error {
			return errors.Join(notes(ctx, s, ready), s.Send(ctx, channel.TagReply, []byte("{")))
		},
		"a tag of its own": func(ctx context.Context, s *channel.Stream) error {
			return errors.Join(notes(ctx, s, ready), s.Send(ctx, channel.TagData, []byte("{}")))
		},
	} {
		t.Run(what, func(t *testing.T) {
			var sane atomic.Bool
			g := watchGuest(t, func(ctx context.Context, s *channel.Stream, c channel.WatchCommand) error {
				if sane.Load() {
					return notes(ctx, s, channel.WatchNote{ID: c.ID, Ready: true}, changed(c.ID, "fine"))
				}
				return say(ctx, s)
			})
			if err := watchUntilEnd(t, g, "x"); airlock.CodeOf(err) != airlock.Internal {
				t.Error(err)
			}
			sane.Store(true)
			if e, err := next(t, mustWatch(t, g, "x")); err != nil || e.Name != "fine" {
				t.Errorf("afterwards: %+v, %v", e, err)
			}
		})
	}
}

func TestWatchEnds(t *testing.T) {
	g := watchGuest(t, func(ctx context.Context, s *channel.Stream, c channel.WatchCommand) error {
		ready := channel.WatchNote{ID: c.ID, Ready: true}
		switch c.Path {
		case "missing":
			return notes(ctx, s, channel.WatchNote{ID: c.ID, Error: &channel.WatchError{Code: airlock.NotFound, Message: "it is missing\xff"}})
		case "removed":
			return notes(ctx, s, ready, changed(c.ID, "x"), channel.WatchNote{ID: c.ID, End: true})
		case "helper":
			return errors.Join(notes(ctx, s, ready), airlock.Errorf(airlock.Unavailable, "the helper has ended"))
		case "silent":
			return nil
		}
		return notes(ctx, s, ready)
	})
	if _, err := g.Watch(t.Context(), "", channel.WatchCommand{Path: "missing"}); airlock.CodeOf(err) != airlock.NotFound || err.Error() != "it is missing\uFFFD" {
		t.Errorf("%v", err)
	}
	w := mustWatch(t, g, "removed")
	if e, err := next(t, w); e.Name != "x" || err != nil {
		t.Errorf("%+v, %v", e, err)
	}
	if e, err := next(t, w); err != io.EOF {
		t.Errorf("%+v, %v", e, err)
	}
	short, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := g.Watch(short, "", channel.WatchCommand{Path: "silent"}); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a guest that does not answer: %v", err)
	}

	id, err := g.WatchPolled(t.Context(), "", channel.WatchCommand{Path: "removed"})
	if err != nil {
		t.Fatal(err)
	}
	for events := []channel.WatchEvent(nil); len(events) == 0; {
		if events, err = g.Polled(t.Context(), id); err != nil {
			t.Fatal(err)
		}
	}
	for deadline := time.Now().Add(20 * time.Second); err == nil && time.Now().Before(deadline); {
		_, err = g.Polled(t.Context(), id)
	}
	if airlock.CodeOf(err) != airlock.NotFound || !strings.Contains(err.Error(), "removed or moved") {
		t.Errorf("polled, of a removed directory: %v", err)
	}
	if _, err := g.Polled(t.Context(), id); airlock.CodeOf(err) != airlock.NotFound {
		t.Errorf("once more: %v", err)
	}
	if err := g.Unwatch("nobody"); airlock.CodeOf(err) != airlock.NotFound {
		t.Errorf("unwatch: %v", err)
	}

	other, err := g.Watch(t.Context(), "root", channel.WatchCommand{Path: "quiet"})
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	first := mustWatch(t, g, "quiet")
	if err := watchUntilEnd(t, g, "helper"); airlock.CodeOf(err) != airlock.Unavailable {
		t.Error(err)
	}
	if e, err := next(t, first); airlock.CodeOf(err) != airlock.Unavailable {
		t.Errorf("another of the same stream: %+v, %v", e, err)
	}
	short, cancel = context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := other.Next(short); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("of another user: %v", err)
	}
	mustWatch(t, g, "quiet")
}

func TestWatchLimits(t *testing.T) {
	g := watchGuest(t, func(ctx context.Context, s *channel.Stream, c channel.WatchCommand) error {
		if c.Remove {
			return nil
		}
		return notes(ctx, s, channel.WatchNote{ID: c.ID, Ready: true})
	})
	for range watchesMost - 1 {
		mustWatch(t, g, "x")
	}
	id, err := g.WatchPolled(t.Context(), "", channel.WatchCommand{Path: "x"})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := g.Watch(t.Context(), "", channel.WatchCommand{Path: "x"}); airlock.CodeOf(err) != airlock.Exhausted {
		t.Errorf("one too many: %v", err)
	}
	g.watches.find(id).asked = time.Now().Add(-2 * watchAbandoned)
	mustWatch(t, g, "x") // in the place of the abandoned one
	if _, err := g.Polled(t.Context(), id); airlock.CodeOf(err) != airlock.NotFound {
		t.Errorf("the abandoned one: %v", err)
	}

	g = watchGuest(t, func(ctx context.Context, s *channel.Stream, c channel.WatchCommand) error {
		return notes(ctx, s, channel.WatchNote{ID: c.ID, Ready: true})
	})
	var first *Watch
	for _, user := range []string{"a", "b", "c", "d"} {
		w, err := g.Watch(t.Context(), user, channel.WatchCommand{Path: "x"})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(w.Close)
		if first == nil {
			first = w
		}
	}
	if _, err := g.Watch(t.Context(), "e", channel.WatchCommand{Path: "x"}); airlock.CodeOf(err) != airlock.Exhausted {
		t.Errorf("a user too many: %v", err)
	}
	first.Close()
	first.Close()
	if w, err := g.Watch(t.Context(), "e", channel.WatchCommand{Path: "x"}); err != nil {
		t.Errorf("in the place of another user: %v", err)
	} else {
		w.Close()
	}
	if len(g.watches.users) != 3 || len(g.watches.all) != 3 {
		t.Errorf("%d users, %d watches", len(g.watches.users), len(g.watches.all))
	}
}
