package gateway

import (
	"fmt"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"

	"airlock.dev/airlock/gateway/web"
	"airlock.dev/airlock/gateway/wire"
)

// A sandbox has budgets, and nothing that another one does counts for them.
// What is refused for a budget is not a crossing that somebody decides: it is
// counted, and the log has the counts, so that no flood fills it.

// bytesMost is a sandbox's budget of bytes unless another one is given.
const bytesMost = 100 << 30

// toldParts is how many times the server is told how much of a budget is used.
const toldParts = 100

// deniedRate is how many denials a second are recorded one by one, with what
// was tried, once the bytes are spent.
const deniedRate = 1

// bytes is a sandbox's budget of them. Those that went out of it and into it
// count together, and it is spent for good.
type bytes struct {
	most int64
	used atomic.Int64
	told atomic.Int64
	tell func(used int64)
	over *web.Denied // why nothing crosses any more

	record *rate.Limiter // of denials
}

func newBytes(most, used int64, tell func(used int64)) *bytes {
	if most <= 0 {
		most = bytesMost
	}
	b := &bytes{most: most, tell: tell, record: rate.NewLimiter(deniedRate, 1)}
	b.used.Store(min(max(used, 0), most))
	b.told.Store(b.used.Load())
	b.over = &web.Denied{
		Status: http.StatusTooManyRequests,
		Reason: fmt.Sprintf("the sandbox has sent and received %d bytes, which is all that one may", most),
		Ask:    "go on in a new sandbox, or ask the operator for more (airlock serve --net-bytes)",
	}
	return b
}

// spent is why nothing may cross any more, or nil.
func (b *bytes) spent() *web.Denied {
	if b.used.Load() >= b.most {
		return b.over
	}
	return nil
}

// take uses up n bytes, or as many as there are.
func (b *bytes) take(n int) (fits int) {
	for {
		used := b.used.Load()
		left := min(int64(n), b.most-used)
		if !b.used.CompareAndSwap(used, used+left) {
			continue
		}
		b.report(used + left)
		return int(left)
	}
}

// report tells the server of each part that is used up.
func (b *bytes) report(used int64) {
	for told := b.told.Load(); used > told && (used-told >= b.most/toldParts || used == b.most); told = b.told.Load() {
		if b.told.CompareAndSwap(told, used) {
			b.tell(used)
			return
		}
	}
}

// tellEvery is how often the server is told of refusals, while there are any.
// It tells the log less often.
const tellEvery = time.Second

// refusals are what was refused for the budgets of one door and is not
// recorded one by one. The first one is told at once.
type refusals struct {
	tell func(wire.Refused)

	mu      sync.Mutex
	budgets map[wire.Budget]*refused
	closed  bool
	telling sync.Mutex // held by who tells, so that close waits for it; before mu
}

type refused struct {
	count int64
	timer *time.Timer // while it runs, what comes is told when it fires
}

// add counts one; it waits for nothing.
func (r *refusals) add(b wire.Budget) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return
	}
	if r.budgets == nil {
		r.budgets = map[wire.Budget]*refused{}
	}
	of := r.budgets[b]
	if of == nil {
		of = &refused{}
		r.budgets[b] = of
	}
	if of.count++; of.timer == nil {
		of.timer = time.AfterFunc(0, func() { r.fired(b, of) })
	}
}

func (r *refusals) fired(b wire.Budget, of *refused) {
	r.telling.Lock()
	defer r.telling.Unlock()
	r.mu.Lock()
	count := of.count
	of.count = 0
	switch {
	case r.closed:
	case count > 0:
		of.timer.Reset(tellEvery)
	default:
		of.timer = nil
	}
	r.mu.Unlock()
	if count > 0 {
		r.tell(wire.Refused{Budget: b, Count: count})
	}
}

// close tells what was not told yet.
func (r *refusals) close() {
	r.mu.Lock()
	r.closed = true
	all := r.budgets
	for _, of := range all {
		if of.timer != nil {
			of.timer.Stop()
		}
	}
	r.mu.Unlock()
	for b, of := range all {
		r.fired(b, of)
	}
}
