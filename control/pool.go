package control

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"airlock.dev/airlock"
	"airlock.dev/airlock/channel"
	"airlock.dev/airlock/image"
	"airlock.dev/airlock/isolation"
)

// PoolSize bounds the sandboxes that are started before somebody asks for them.
type PoolSize struct {
	Least int // always kept ready, with the default limits
	Most  int // of all kinds together; 0 is no pool
}

// In the pool only our own guest has run, and nothing of anyone is in a sandbox: no
// owner, no variables, and a door at which nobody listens. Who claims one gets it
// for good. What is kept ready follows what was asked for.
const (
	// poolWindow is how long what was asked for at one time is kept ready for the
	// next time, in poolSlots parts.
	poolWindow = 10 * time.Minute
	poolSlots  = 10
	// fillers start sandboxes at one time: more would slow those that are asked for.
	fillers = 2
	// quiet is how long nobody has asked when what was taken is replaced, as long as
	// some are left: who is served comes first.
	quiet = 100 * time.Millisecond
	// stocksMost bounds the kinds that are counted.
	stocksMost = 32
	// fillPause follows a start that failed, and drainPause a lack of room.
	fillPause  = time.Second
	drainPause = 10 * time.Second
)

// kind is what a sandbox cannot change any more when it has been started.
type kind struct {
	rootFS, guest, trust string
	limits               airlock.Limits // those that a driver sees
}

func kindOf(img image.Image, l airlock.Limits) kind {
	l.OutputBytes = 0
	return kind{img.RootFS, img.Guest, img.TrustID, l}
}

// warm is a sandbox that nobody owns.
type warm struct {
	id  string
	box isolation.Sandbox
	mux *channel.Mux
}

func (w *warm) dead() bool {
	select {
	case <-w.mux.Done():
		return true
	default:
		return false
	}
}

// demand is how many were asked for within a second, at most, in each part of the
// window; and how many in all.
type demand struct {
	second int64 // since the epoch
	count  int   // in it
	slots  [poolSlots]struct {
		at        int64
		peak, sum int
	}
}

const slotSeconds = int64(poolWindow/time.Second) / poolSlots

func (d *demand) add(now time.Time) {
	if second := now.Unix(); second != d.second {
		d.second, d.count = second, 0
	}
	d.count++
	at := d.second / slotSeconds
	s := &d.slots[at%poolSlots]
	if s.at != at {
		*s = struct {
			at        int64
			peak, sum int
		}{at: at}
	}
	s.sum++
	s.peak = max(s.peak, d.count)
}

// wants is how many to have ready. Who came once may not come again.
func (d *demand) wants(now time.Time) (peak int) {
	sum := 0
	for _, s := range d.slots {
		if now.Unix()/slotSeconds-s.at < poolSlots {
			peak, sum = max(peak, s.peak), sum+s.sum
		}
	}
	if sum < 2 {
		return 0
	}
	return peak
}

// stock is what is ready of a kind.
type stock struct {
	img     image.Image
	limits  airlock.Limits
	ready   []*warm // the oldest first
	filling int
	demand  demand
	pause   time.Time // until then none is started
	taken   time.Time // the last one
}

// pool keeps the stocks filled. Its goroutines end with run's context.
type pool struct {
	size      PoolSize
	admission *admission
	boot      func(ctx context.Context, id string, img image.Image, l airlock.Limits, timing *Timing) (isolation.Sandbox, *channel.Mux, error)
	failed    func(err error)
	now       func() time.Time

	wake chan struct{} // something was taken
	work sync.WaitGroup

	mu     sync.Mutex
	stocks map[kind]*stock
	first  kind // whose least is kept
	closed bool
}

func newPool(size PoolSize, a *admission) *pool {
	return &pool{size: size, admission: a, now: time.Now, wake: make(chan struct{}, 1), stocks: map[kind]*stock{}}
}

// stockOf returns the stock of a kind, with mu held. Of the kinds that are
// counted, the one that is asked for least makes room for a new one.
func (p *pool) stockOf(img image.Image, l airlock.Limits) *stock {
	k := kindOf(img, l)
	if s := p.stocks[k]; s != nil {
		return s
	}
	if len(p.stocks) >= stocksMost {
		var least kind
		var wants int
		for other, s := range p.stocks {
			if n := s.demand.wants(p.now()); other != p.first && s.filling == 0 && len(s.ready) == 0 && (least == kind{} || n < wants) {
				least, wants = other, n
			}
		}
		delete(p.stocks, least)
	}
	s := &stock{img: img, limits: l}
	p.stocks[k] = s
	return s
}

// keep has at least size.Least ready of a kind.
func (p *pool) keep(img image.Image, l airlock.Limits) {
	if p.size.Most == 0 {
		return
	}
	p.mu.Lock()
	p.first = kindOf(img, l)
	p.stockOf(img, l)
	p.mu.Unlock()
	p.poke()
}

// take returns a sandbox that is ready, or nil. It is the caller's: it is claimed,
// or put back as it is.
func (p *pool) take(img image.Image, l airlock.Limits) *warm {
	if p.size.Most == 0 {
		return nil
	}
	defer p.poke()
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return nil
	}
	s := p.stockOf(img, l)
	s.taken = p.now()
	s.demand.add(s.taken)
	for len(s.ready) > 0 {
		w := s.ready[0]
		s.ready = s.ready[1:]
		if !w.dead() {
			return w
		}
		p.discard(w)
	}
	return nil
}

// put returns one that was taken and not claimed.
func (p *pool) put(w *warm, img image.Image, l airlock.Limits) {
	p.mu.Lock()
	closed := p.closed
	if !closed {
		s := p.stockOf(img, l)
		s.ready = append(s.ready, w)
	}
	p.mu.Unlock()
	if closed {
		p.end(w)
	}
}

// claimed tells that one that was taken has an owner, whose reservation it has.
func (p *pool) claimed() { p.admission.unhold() }

// end ends a sandbox that nobody owns.
func (p *pool) end(w *warm) {
	w.mux.Close()
	ctx, cancel := context.WithTimeout(context.Background(), greetTimeout)
	defer cancel()
	if err := w.box.Destroy(ctx); err != nil {
		p.failed(err) // what is left of it is swept at the next start
	}
	p.admission.unhold()
}

// discard is end in the background, before run has returned.
func (p *pool) discard(w *warm) { p.work.Go(func() { p.end(w) }) }

// drain ends all that are ready, for somebody who needs what they hold, and
// returns how many there were when they are gone.
func (p *pool) drain() int {
	p.mu.Lock()
	var all []*warm
	for _, s := range p.stocks {
		all = append(all, s.ready...)
		s.ready, s.pause = nil, p.now().Add(drainPause)
	}
	p.mu.Unlock()
	var gone sync.WaitGroup
	for _, w := range all {
		gone.Go(func() { p.end(w) })
	}
	gone.Wait()
	return len(all)
}

func (p *pool) poke() {
	select {
	case p.wake <- struct{}{}:
	default:
	}
}

// run keeps the stocks filled until ctx ends; then it ends what is ready.
func (p *pool) run(ctx context.Context) {
	defer p.work.Wait()
	again := time.NewTimer(0)
	defer again.Stop()
	for {
		select {
		case <-ctx.Done():
			p.mu.Lock()
			defer p.mu.Unlock()
			p.closed = true
			for _, s := range p.stocks {
				for _, w := range s.ready {
					p.discard(w)
				}
				s.ready = nil
			}
			return
		case <-p.wake:
		case <-again.C:
		}
		if later := p.fill(ctx); later > 0 {
			again.Reset(later)
		} else {
			again.Reset(fillPause)
		}
	}
}

// fill starts what is missing, as far as there is room, and ends what nobody asks
// for any more. If it has left something for later, it says when that is.
func (p *pool) fill(ctx context.Context) (later time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	now := p.now()
	total, filling := 0, 0
	for _, s := range p.stocks {
		total, filling = total+len(s.ready)+s.filling, filling+s.filling
	}
	// What is asked for most is filled first.
	kinds := make([]kind, 0, len(p.stocks))
	wants := map[kind]int{}
	for k, s := range p.stocks {
		kinds = append(kinds, k)
		if wants[k] = s.demand.wants(now); k == p.first {
			wants[k] = max(wants[k], p.size.Least)
		}
	}
	slices.SortFunc(kinds, func(a, b kind) int { return wants[b] - wants[a] })
	for _, k := range kinds {
		s := p.stocks[k]
		for _, w := range slices.Clone(s.ready) {
			if extra := len(s.ready)+s.filling > wants[k]; w.dead() || extra {
				s.ready = slices.DeleteFunc(s.ready, func(r *warm) bool { return r == w })
				p.discard(w)
				total--
			}
		}
		if wait := s.taken.Add(quiet).Sub(now); wait > 0 && len(s.ready) > 0 {
			if later == 0 || wait < later {
				later = wait
			}
			continue
		}
		for len(s.ready)+s.filling < wants[k] && total < p.size.Most && filling < fillers && !now.Before(s.pause) && p.admission.hold() {
			s.filling, total, filling = s.filling+1, total+1, filling+1
			p.work.Go(func() { p.start(ctx, s) })
		}
	}
	return later
}

// start makes one sandbox ready.
func (p *pool) start(ctx context.Context, s *stock) {
	w := &warm{id: newID()}
	var err error
	if w.box, w.mux, err = p.boot(ctx, w.id, s.img, s.limits, nil); err != nil {
		p.admission.unhold()
		if !errors.Is(err, context.Canceled) {
			p.failed(err)
		}
	}
	p.mu.Lock()
	s.filling--
	switch {
	case err != nil:
		s.pause = p.now().Add(fillPause)
	case p.closed:
		p.discard(w)
	default:
		s.ready = append(s.ready, w)
	}
	p.mu.Unlock()
	p.poke()
}
