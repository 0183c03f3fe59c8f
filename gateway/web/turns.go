package web

import (
	"container/list"
	"context"
	"runtime"
	"sync"
	"time"
)

const (
	turnsEach = 4                     // requests that are worked on at a time, for each processor
	turnMost  = 20 * time.Millisecond // how long one may be that in fact waits, for a person or a client
	turnAlone = time.Minute           // after which a door is alone, if no other has made a request
)

// Turns divide a machine's work among doors. While more than one makes requests,
// few are worked on at a time, and doors take turns: one that has thousands under
// way is not in the way of one that has one. A door that is alone never waits, and
// no turn is spent on waiting for upstream.
type Turns struct {
	slots int

	mu    sync.Mutex
	used  int
	last  *turns    // who asked last
	mixed time.Time // when that changed
	queue list.List // of *turns where some wait, the next in front
}

// NewTurns returns those of a machine, for Config.Turns of all its doors.
func NewTurns() *Turns { return &Turns{slots: turnsEach * runtime.GOMAXPROCS(0)} }

// turns are a door's.
type turns struct {
	all     *Turns
	waiting list.List // of chan struct{}, closed when it is their turn; all.mu is for it
}

// take waits for a turn, and is false if there is none to be given back: for the
// door is alone, or ctx is over.
func (t *turns) take(ctx context.Context) bool {
	all := t.all
	all.mu.Lock()
	now := time.Now()
	if all.last != t && all.last != nil {
		all.mixed = now
	}
	all.last = t
	if now.Sub(all.mixed) > turnAlone {
		all.mu.Unlock()
		return false
	}
	if all.used < all.slots {
		all.used++
		all.mu.Unlock()
		return true
	}
	given := make(chan struct{})
	place := t.waiting.PushBack(given)
	if t.waiting.Len() == 1 {
		all.queue.PushBack(t)
	}
	all.mu.Unlock()
	select {
	case <-given:
		return true
	case <-ctx.Done():
	}
	all.mu.Lock()
	defer all.mu.Unlock()
	select {
	case <-given:
		return true
	default:
	}
	if t.waiting.Remove(place); t.waiting.Len() == 0 {
		all.queue.Remove(all.find(t))
	}
	return false
}

func (all *Turns) find(t *turns) *list.Element {
	e := all.queue.Front()
	for e.Value != t {
		e = e.Next()
	}
	return e
}

// give ends a turn, and gives it to the next door.
func (all *Turns) give() {
	all.mu.Lock()
	defer all.mu.Unlock()
	all.used--
	for all.used < all.slots && all.queue.Len() > 0 {
		t := all.queue.Remove(all.queue.Front()).(*turns)
		close(t.waiting.Remove(t.waiting.Front()).(chan struct{}))
		all.used++
		if t.waiting.Len() > 0 {
			all.queue.PushBack(t)
		}
	}
}

// turn is what a request has now and then: one at a time.
type turn struct {
	of  *turns // nil where there are none
	ctx context.Context

	mu    sync.Mutex
	timer *time.Timer // nil without a turn
}

// begin waits for a turn.
func (t *turn) begin() {
	t.end()
	if t.of == nil || !t.of.take(t.ctx) {
		return
	}
	t.mu.Lock()
	t.timer = time.AfterFunc(turnMost, t.end)
	t.mu.Unlock()
}

// end gives the turn back, if there is one.
func (t *turn) end() {
	t.mu.Lock()
	had := t.timer != nil
	if had {
		t.timer.Stop()
		t.timer = nil
	}
	t.mu.Unlock()
	if had {
		t.of.all.give()
	}
}
