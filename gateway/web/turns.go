package web

import (
	"container/list"
	"context"
	"runtime"
	"sync"
	"time"
)

// Turns divides a machine's work among doors: while more than one makes
// requests, only few requests are worked on at a time, and the doors take
// turns. One that makes thousands is then not in the way of one that makes one.
// A door that is alone never waits. One Turns is for all doors.
type Turns struct {
	slots int

	mu    sync.Mutex
	used  int
	last  *turns    // that asked
	mixed time.Time // when another one asked than before
	queue list.List // of *turns that wait
}

// The requests that are worked on at a time for each processor, how long one
// that waits for upstream or a person is among them, and how long after the last
// request of another door one counts as alone.
const (
	turnsEach = 4
	turnMost  = 20 * time.Millisecond
	turnAlone = time.Second
)

// NewTurns returns the Turns of this machine.
func NewTurns() *Turns { return &Turns{slots: turnsEach * runtime.GOMAXPROCS(0)} }

// turns are a door's.
type turns struct {
	all     *Turns
	waiting list.List // of chan struct{}
}

// take waits for the door's turn, or until ctx ends, and returns what ends it.
func (t *turns) take(ctx context.Context) (done func()) {
	if t == nil {
		return func() {}
	}
	all := t.all
	all.mu.Lock()
	now := time.Now()
	if all.last != t {
		if all.last != nil {
			all.mixed = now
		}
		all.last = t
	}
	switch {
	case now.Sub(all.mixed) > turnAlone:
		all.mu.Unlock()
		return func() {}
	case all.used < all.slots:
		all.used++
		all.mu.Unlock()
	default:
		mine := make(chan struct{})
		place := t.waiting.PushBack(mine)
		if t.waiting.Len() == 1 {
			all.queue.PushBack(t)
		}
		all.mu.Unlock()
		select {
		case <-mine:
		case <-ctx.Done():
			all.mu.Lock()
			t.waiting.Remove(place)
			all.mu.Unlock()
			select {
			case <-mine: // all the same
			default:
				return func() {}
			}
		}
	}
	once := sync.OnceFunc(all.next)
	timer := time.AfterFunc(turnMost, once)
	return func() { timer.Stop(); once() }
}

// next ends one turn and gives it to others.
func (all *Turns) next() {
	all.mu.Lock()
	defer all.mu.Unlock()
	all.used--
	for all.used < all.slots && all.queue.Len() > 0 {
		t := all.queue.Remove(all.queue.Front()).(*turns)
		if t.waiting.Len() == 0 {
			continue // they gave up
		}
		close(t.waiting.Remove(t.waiting.Front()).(chan struct{}))
		all.used++
		if t.waiting.Len() > 0 {
			all.queue.PushBack(t)
		}
	}
}

// turn is one at a time of a request's.
type turn struct {
	of   *turns
	ctx  context.Context
	mu   sync.Mutex
	done func()
}

func (t *turn) begin() {
	t.end()
	done := t.of.take(t.ctx)
	t.mu.Lock()
	t.done = done
	t.mu.Unlock()
}

func (t *turn) end() {
	t.mu.Lock()
	if t.done != nil {
		t.done()
		t.done = nil
	}
	t.mu.Unlock()
}
