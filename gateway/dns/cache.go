package dns

import (
	"container/list"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"

	"airlock.dev/airlock"
)

// A Resolver is the host's. Lookup returns the addresses of a name, of both
// families. That there is no such name is an error with the code
// airlock.NotFound or a net.DNSError that says so, as net.Resolver's does; a
// name without addresses may be no error and no addresses.
type Resolver interface {
	Lookup(ctx context.Context, name string) ([]netip.Addr, error)
}

const (
	addressesMost = 64 // of one name; more are not kept
	// How long an outcome is kept. A failure is kept too, so that the host's
	// resolver is not asked harder the less it answers (RFC 9520).
	keepFound   = 30 * time.Second
	keepNothing = 10 * time.Second
	keepFailure = time.Second
)

// cache asks the resolver for a name once, whoever waits for it, and keeps
// what it said for some seconds.
type cache struct {
	resolver Resolver
	most     int           // names
	wait     time.Duration // for the resolver
	now      func() time.Time

	ctx     context.Context // of the asking; it outlives who asked first
	asking  sync.WaitGroup
	mu      sync.Mutex
	closed  bool
	entries map[string]*outcome
	known   list.List // of *outcome that are done; used last in front
}

// outcome is of one lookup. addrs and err do not change once done is closed.
type outcome struct {
	name  string
	done  chan struct{}
	addrs []netip.Addr
	err   error

	// Guarded by cache.mu.
	until time.Time     // it is kept; zero while the resolver is asked
	elem  *list.Element // nil while the resolver is asked
}

var errClosed = airlock.Errorf(airlock.Unavailable, "the network of the sandbox is closed")

func (c *cache) lookup(ctx context.Context, name string) ([]netip.Addr, error) {
	o, err := c.entry(name)
	if err != nil {
		return nil, err
	}
	select {
	case <-o.done:
		return slices.Clone(o.addrs), o.err
	case <-ctx.Done():
		return nil, fmt.Errorf("look up %s: %w", name, ctx.Err())
	}
}

// entry returns the outcome for name, and asks for it if need be.
func (c *cache) entry(name string) (*outcome, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return nil, errClosed
	}
	if o := c.entries[name]; o != nil {
		if o.elem == nil {
			return o, nil
		}
		if c.now().Before(o.until) {
			c.known.MoveToFront(o.elem)
			return o, nil
		}
		c.forget(o)
	}
	if len(c.entries) >= c.most {
		oldest := c.known.Back()
		if oldest == nil {
			return nil, airlock.Errorf(airlock.Exhausted, "%d names are being looked up and that is the most", c.most)
		}
		c.forget(oldest.Value.(*outcome))
	}
	o := &outcome{name: name, done: make(chan struct{})}
	c.entries[name] = o
	c.asking.Go(func() { c.ask(o) })
	return o, nil
}

func (c *cache) forget(o *outcome) {
	c.known.Remove(o.elem)
	delete(c.entries, o.name)
}

func (c *cache) ask(o *outcome) {
	ctx, cancel := context.WithTimeout(c.ctx, c.wait)
	defer cancel()
	addrs, err := c.resolver.Lookup(ctx, o.name)
	keep := keepFound
	switch {
	case notFound(err):
		keep = keepNothing
	case err != nil:
		keep = keepFailure
	case len(addrs) == 0:
		keep = keepNothing
	}
	if err == nil {
		o.addrs = slices.Clone(addrs[:min(len(addrs), addressesMost)])
	} else {
		o.err = fmt.Errorf("look up %s: %w", o.name, err)
	}
	c.mu.Lock()
	o.until = c.now().Add(keep)
	o.elem = c.known.PushFront(o)
	c.mu.Unlock()
	close(o.done)
}

// close returns when no resolver is asked any more; the caller has ended ctx.
func (c *cache) close() {
	c.mu.Lock()
	c.closed = true
	c.mu.Unlock()
	c.asking.Wait()
}

// notFound says whether err says that there is no such name.
func notFound(err error) bool {
	var d *net.DNSError
	if errors.As(err, &d) {
		return d.IsNotFound
	}
	return airlock.CodeOf(err) == airlock.NotFound
}
