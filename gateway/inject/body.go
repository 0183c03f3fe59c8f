package inject

import (
	"context"
	"io"
	"maps"
	"net/http"
	"sync"
	"time"

	"airlock.dev/airlock/gateway/web"
)

const (
	// lookBytes is how much of a body is looked at. Placeholders are where
	// credentials are, and whole files pass behind it at full speed.
	lookBytes = 64 << 10
	// A body of known length is on its way: nothing goes upstream before it was
	// looked at. Of another one the sender may wait for the answer first.
	waitKnown   = 10 * time.Second
	waitUnknown = 50 * time.Millisecond
)

// watched is a request's body, of which only what was looked at can be read.
// A goroutine reads its first lookBytes, so that they can be waited for and
// no longer than it makes sense.
type watched struct {
	x    *exchange
	r    *http.Request
	src  io.ReadCloser
	wait time.Duration
	// trailer is what the transport sends. The server fills the request's own
	// in when the source ends, which may be while the transport reads them.
	trailer http.Header

	start  sync.Once
	looked chan struct{} // the goroutine is done
	more   chan struct{} // there may be something to read
	closed chan struct{}
	close  sync.Once

	mu   sync.Mutex
	buf  []byte // was looked at and not read
	done bool   // what follows is not in buf
	err  error  // that the source ended with, or a denial
}

func (x *exchange) watch(r *http.Request) *watched {
	b := &watched{
		x: x, r: r, src: r.Body, wait: waitKnown,
		looked: make(chan struct{}), more: make(chan struct{}, 1), closed: make(chan struct{}),
	}
	if r.ContentLength <= 0 {
		b.wait = waitUnknown
	}
	if r.Trailer != nil {
		b.trailer = http.Header{}
		for name := range r.Trailer {
			b.trailer[name] = nil
		}
	}
	return b
}

// begin starts the goroutine.
func (b *watched) begin() { b.start.Do(func() { b.x.door.reads.Go(b.look) }) }

// first waits for the part that is looked at.
func (b *watched) first() *web.Denied {
	b.begin()
	ctx, cancel := context.WithTimeout(b.x.ctx, b.wait)
	defer cancel()
	select {
	case <-b.looked:
	case <-ctx.Done():
	}
	return b.denied()
}

// denied is why the body may not be sent, as far as is known.
func (b *watched) denied() *web.Denied {
	b.mu.Lock()
	defer b.mu.Unlock()
	d, _ := b.err.(*web.Denied)
	return d
}

func (b *watched) look() {
	defer close(b.looked)
	chunk := make([]byte, 16<<10)
	var window []byte
	for seen, done := 0, false; !done; {
		n, err := b.src.Read(chunk[:min(len(chunk), lookBytes-seen)])
		seen += n
		window = append(window, chunk[:n]...)
		if s := b.x.set.finder.find(string(window)); s != nil {
			n, err = 0, b.x.misplaced(s, "body")
		}
		window = append(window[:0], window[max(0, len(window)-overlap):]...)
		err = b.ended(err)
		done = err != nil || seen == lookBytes
		b.mu.Lock()
		b.buf, b.err, b.done = append(b.buf, chunk[:n]...), err, done
		b.mu.Unlock()
		select {
		case b.more <- struct{}{}:
		default:
		}
	}
}

// ended looks at the trailers where a body ends: they are there now.
func (b *watched) ended(err error) error {
	if err == io.EOF {
		if s, location := b.x.inTrailer(b.r.Trailer); s != nil {
			return b.x.misplaced(s, location)
		}
	}
	return err
}

func (b *watched) Read(p []byte) (int, error) {
	b.begin()
	for {
		b.mu.Lock()
		if denied, ok := b.err.(*web.Denied); ok {
			b.mu.Unlock()
			return 0, denied
		}
		n := copy(p, b.buf)
		b.buf = b.buf[n:]
		done, err := b.done, b.err
		b.mu.Unlock()
		switch {
		case n > 0 || len(p) == 0:
			return n, nil
		case done:
			if err == nil { // what is behind the part that is looked at
				if n, err = b.src.Read(p); err != nil {
					err = b.ended(err)
					b.mu.Lock()
					b.err = err
					b.mu.Unlock()
				}
			}
			if err == io.EOF && b.trailer != nil {
				maps.Copy(b.trailer, b.r.Trailer)
			}
			return n, err
		}
		select {
		case <-b.more:
		case <-b.closed:
			return 0, http.ErrBodyReadAfterClose
		}
	}
}

func (b *watched) Close() error {
	b.close.Do(func() { close(b.closed) })
	return b.src.Close()
}
