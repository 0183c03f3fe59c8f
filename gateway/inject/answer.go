package inject

import (
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"

	"airlock.dev/airlock/gateway/web"
)

const (
	// An answer that was compressed more than ratio times, beyond the first
	// ratioFree bytes, is broken off.
	ratio     = 200
	ratioFree = 16 << 20

	scrubBytes = 32 << 10 // are read of an answer at a time
)

var errBomb = errors.New("the answer is compressed more than any that means well")

// answer scrubs what came back for a request with values.
func (x *exchange) answer(res *http.Response) *web.Denied {
	x.scrub.header(res.Header)
	res.Status = fmt.Sprintf("%d %s", res.StatusCode, http.StatusText(res.StatusCode)) // its text is upstream's
	if res.StatusCode == http.StatusSwitchingProtocols {
		for _, s := range x.sent {
			if !s.Upgrade {
				return x.refuse(s, "answer", &web.Denied{Status: http.StatusBadGateway, Reason: "upstream changed the protocol, and was not asked to"})
			}
		}
		return nil
	}
	bare := res.Request.Method == http.MethodHead || res.StatusCode == http.StatusNoContent ||
		res.StatusCode == http.StatusNotModified || res.Body == http.NoBody
	body := &scrubbed{ReadCloser: res.Body, from: res.Body, x: x, res: res}
	switch encoding := strings.ToLower(strings.Join(res.Header["Content-Encoding"], ",")); {
	case encoding == "" || encoding == "identity":
	case encoding == "gzip" || encoding == "x-gzip":
		res.Header.Del("Content-Encoding")
		res.Header.Del("Content-Length")
		res.ContentLength = -1
		body.from = &gunzip{src: counted{Reader: res.Body}}
	case !bare:
		return x.refuse(x.sent[0], "answer", &web.Denied{
			Status: http.StatusBadGateway,
			Reason: fmt.Sprintf("upstream's answer to a request with secret %q is encoded as %.40q, which cannot be searched for its value", x.sent[0].Name, encoding),
			Ask:    "ask upstream for another encoding",
		})
	}
	x.scrub.header(res.Trailer)
	if bare { // as it is; trailers may follow
		body.from = res.Body
	}
	if res.Body != http.NoBody {
		res.Body = body
	}
	return nil
}

// scrubbed is an answer's body without values.
type scrubbed struct {
	io.ReadCloser // as upstream sent it
	from          io.Reader
	x             *exchange
	res           *http.Response

	// data[ready:done] can be read, and data[done:] is held back.
	data        []byte
	ready, done int
	err         error // that from ended with
}

func (b *scrubbed) Read(p []byte) (int, error) {
	for b.ready == b.done && b.err == nil && len(p) > 0 {
		b.fill()
	}
	n := copy(p, b.data[b.ready:b.done])
	b.ready += n
	if b.ready == b.done && n == 0 && len(p) > 0 {
		return 0, b.err
	}
	return n, nil
}

func (b *scrubbed) fill() {
	held := copy(b.data, b.data[b.done:])
	if cap(b.data) < held+scrubBytes/2 {
		b.data = append(make([]byte, 0, held+scrubBytes), b.data[:held]...)
	}
	n, err := b.from.Read(b.data[held:cap(b.data)])
	b.data = b.data[:held+n]
	b.ready, b.done = 0, b.x.scrub.feed(b.data, held)
	switch {
	case err == io.EOF:
		b.done = len(b.data) // the beginning of a value, and not more
		b.x.scrub.header(b.res.Trailer)
		b.err = err
	case err != nil:
		b.err = silence(err)
	}
}

// gunzip decodes as it is read, and no faster than is plausible.
type gunzip struct {
	src counted
	z   *gzip.Reader
	out int64
}

type counted struct {
	io.Reader
	n int64
}

func (c *counted) Read(p []byte) (int, error) {
	n, err := c.Reader.Read(p)
	c.n += int64(n)
	return n, err
}

func (g *gunzip) Read(p []byte) (int, error) {
	if g.z == nil {
		z, err := gzip.NewReader(&g.src)
		if err != nil {
			return 0, err // io.EOF if there is nothing
		}
		g.z = z
	}
	n, err := g.z.Read(p)
	if g.out += int64(n); g.out > ratioFree+ratio*g.src.n {
		return 0, errBomb
	}
	return n, err
}
