package control

import (
	"context"
	"slices"
	"sync"
	"time"

	"airlock.dev/airlock"
)

// Sandboxes are measured by one clock for all, and an hour is remembered of each.
const (
	sampleEvery = 5 * time.Second
	samplesMost = int(time.Hour / sampleEvery)
)

// Metric is what a sandbox used at one time, as the host measures it. Memory
// is that of its application kernel too, which the limit does not count.
type Metric struct {
	Time                   time.Time
	CPUPercent             float64 // of all its processors, since the one before
	MemoryUsed, MemoryMost int64   // bytes
	DiskUsed, DiskMost     int64   // bytes
}

// history is a ring of the newest samplesMost metrics.
type history struct {
	mu    sync.Mutex
	ring  []Metric
	next  int       // where the oldest is, once the ring is full
	at    time.Time // of the last one
	spent float64   // processor seconds at that time
}

func (h *history) add(m Metric, spent float64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.at, h.spent = m.Time, spent
	if len(h.ring) < samplesMost {
		h.ring = append(h.ring, m)
		return
	}
	h.ring[h.next] = m
	h.next = (h.next + 1) % samplesMost
}

// between returns those from one time to another, oldest first.
func (h *history) between(from, to time.Time) []Metric {
	h.mu.Lock()
	defer h.mu.Unlock()
	all := slices.Concat(h.ring[h.next:], h.ring[:h.next])
	return slices.DeleteFunc(all, func(m Metric) bool { return m.Time.Before(from) || m.Time.After(to) })
}

func (h *history) last() (Metric, bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.ring) == 0 {
		return Metric{}, false
	}
	return h.ring[(h.next+len(h.ring)-1)%len(h.ring)], true
}

// measure asks the driver. The first percentage is that of the life so far.
func (l *live) measure(ctx context.Context) (m Metric, spent float64, err error) {
	stats, err := l.box.Stats(ctx)
	if err != nil {
		return m, 0, err
	}
	sb := l.get()
	l.metrics.mu.Lock()
	at, before := l.metrics.at, l.metrics.spent
	l.metrics.mu.Unlock()
	if at.IsZero() {
		at = sb.StartedAt
	}
	m = Metric{
		Time: time.Now().UTC(), MemoryUsed: stats.MemoryBytes, MemoryMost: int64(sb.Limits.MemoryMB) << 20,
		DiskUsed: stats.DiskBytes, DiskMost: int64(sb.Limits.DiskMB) << 20,
	}
	if passed := m.Time.Sub(at).Seconds(); passed > 0 && sb.Limits.CPUs > 0 {
		// What has ended is not always counted any more, and clocks tick coarsely.
		m.CPUPercent = min(max((stats.CPUSeconds-before)/passed/sb.Limits.CPUs*100, 0), 100)
	}
	return m, stats.CPUSeconds, nil
}

// freshFor is how long a metric stands for the present.
const freshFor = time.Second

// now returns the last metric if it is fresh, else a new one that is not kept.
func (l *live) now(ctx context.Context) (Metric, error) {
	if m, found := l.metrics.last(); found && time.Since(m.Time) < freshFor {
		return m, nil
	}
	m, _, err := l.measure(ctx)
	return m, err
}

// sample measures all sandboxes until ctx ends.
func (c *Sandboxes) sample(ctx context.Context, every time.Duration) {
	ticker := time.NewTicker(every)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		c.mu.Lock()
		all := make([]*live, 0, len(c.live))
		for _, l := range c.live {
			all = append(all, l)
		}
		c.mu.Unlock()
		for _, l := range all {
			if m, spent, err := l.measure(ctx); err == nil { // else it is ending
				l.metrics.add(m, spent)
			}
			c.tellRefused(l, time.Now())
		}
	}
}

// Metrics returns what a sandbox of p's team used between two times, oldest first.
func (c *Sandboxes) Metrics(ctx context.Context, p airlock.Principal, id string, from, to time.Time) ([]Metric, error) {
	l, err := c.lookup(p, id)
	if err != nil {
		return nil, err
	}
	if err := c.cfg.Boundary.ask(ctx, on(p, l, "sandbox:metrics")); err != nil {
		return nil, err
	}
	return l.metrics.between(from, to), nil
}

// LastMetric returns the newest metric of a sandbox of p's team, if there is one
// yet and p may see it.
func (c *Sandboxes) LastMetric(ctx context.Context, p airlock.Principal, id string) (Metric, bool) {
	l, err := c.lookup(p, id)
	if err != nil {
		return Metric{}, false
	}
	if err := c.cfg.Boundary.ask(ctx, on(p, l, "sandbox:metrics")); err != nil {
		return Metric{}, false
	}
	return l.metrics.last()
}

// Metric returns what the sandbox uses now, as the host measures it.
func (g *Guest) Metric(ctx context.Context) (Metric, error) {
	if err := g.boundary.ask(ctx, g.act("sandbox:metrics")); err != nil {
		return Metric{}, err
	}
	return g.measure(ctx)
}
