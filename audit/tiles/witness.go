package tiles

import (
	"fmt"
	"io"
	"net/http"
	"sync"
	"time"
)

// witnessTimeout is how long a checkpoint waits for its witnesses. It is tried
// again with the next one.
const witnessTimeout = 5 * time.Second

// witnessAnswerMost bounds what is read of a witness's answer: a few lines.
const witnessAnswerMost = 64 << 10

// courier carries requests to witnesses. Tessera logs why one failed and says
// it nowhere else, so the courier remembers; and it bounds what a witness says.
type courier struct {
	base http.RoundTripper

	mu     sync.Mutex
	failed error
}

func newCourier() *courier { return &courier{base: http.DefaultTransport} }

func (c *courier) client() *http.Client {
	return &http.Client{
		Transport:     c,
		Timeout:       2 * witnessTimeout,
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
}

// RoundTrip makes it an http.RoundTripper.
func (c *courier) RoundTrip(req *http.Request) (*http.Response, error) {
	resp, err := c.base.RoundTrip(req)
	if err != nil {
		c.note(fmt.Errorf("witness %s: %w", req.URL.Host, err))
		return nil, err
	}
	switch {
	case resp.StatusCode == http.StatusOK:
	case resp.StatusCode == http.StatusConflict:
		// Either the witness knows another size, which Tessera then asks it to
		// go on from, or it refuses for good. In both cases it has seen more or
		// other entries than the published checkpoint has.
		c.note(fmt.Errorf("witness %s answered %s: it has seen another state of this log", req.URL.Host, resp.Status))
	default:
		c.note(fmt.Errorf("witness %s answered %s", req.URL.Host, resp.Status))
	}
	resp.Body = struct {
		io.Reader
		io.Closer
	}{io.LimitReader(resp.Body, witnessAnswerMost), resp.Body}
	return resp, nil
}

func (c *courier) note(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.failed = err
}

// failure is why the latest request failed, since the latest published
// checkpoint.
func (c *courier) failure() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.failed
}
