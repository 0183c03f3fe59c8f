package web

import (
	"context"
	"crypto/tls"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"slices"
	"sync"
	"testing"
	"time"
)

// bare is a reverse proxy that ends TLS and decides nothing, for comparison.
func bare(w *world, to string) string {
	u, err := url.Parse("https://one.test")
	must(w.t, err)
	proxy := &httputil.ReverseProxy{
		Rewrite: func(r *httputil.ProxyRequest) { r.SetURL(u); r.Out.Host = r.In.Host },
		Transport: &http.Transport{
			TLSClientConfig: &tls.Config{RootCAs: w.cfg.Roots}, ForceAttemptHTTP2: true, DisableCompression: true, MaxIdleConnsPerHost: 64,
			DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
				return new(net.Dialer).DialContext(ctx, "tcp", to)
			},
		},
		ErrorLog: quietLog,
	}
	cert, err := w.cfg.Authority.mint("one.test")
	must(w.t, err)
	s := httptest.NewUnstartedServer(proxy)
	s.TLS = &tls.Config{Certificates: []tls.Certificate{*cert}}
	s.EnableHTTP2 = true
	s.StartTLS()
	w.t.Cleanup(func() { s.Close(); proxy.Transport.(*http.Transport).CloseIdleConnections() })
	return s.Listener.Addr().String()
}

// compare runs a benchmark through a bare reverse proxy and through a door.
func compare(b *testing.B, h http.HandlerFunc, run func(b *testing.B, c *http.Client)) {
	for _, through := range []string{"bare", "door"} {
		for _, version := range []string{"h1", "h2"} {
			b.Run(through+"/"+version, func(b *testing.B) {
				w := newWorld(b)
				w.ended = make(chan string, 1<<20)
				up := w.upstream(h, true, "one.test")
				w.name("one.test", map[uint16]string{443: up})
				w.cfg.Limits.RequestsPerMinute = 1 << 30
				w.cfg.Judge = permitAll{}
				w.open()
				c := w.client(version == "h2")
				tr := c.Transport.(*http.Transport)
				tr.MaxIdleConnsPerHost = 64
				if through == "bare" {
					to := bare(w, up)
					tr.DialContext = func(context.Context, string, string) (net.Conn, error) { return net.Dial("tcp", to) }
				}
				run(b, c)
			})
		}
	}
}

type permitAll struct{}

func (permitAll) Admit(context.Context, string, uint16) (Mode, error) { return Terminate, nil }
func (permitAll) Cross(context.Context, Request) (Permit, error)      { return permitAll{}, nil }
func (permitAll) Refused(context.Context, Request, *Denied)           {}
func (permitAll) End(int, int64, int64, error)                        {}

func fetch(b *testing.B, c *http.Client) int64 {
	res, err := c.Get("https://one.test/a/b")
	if err != nil {
		b.Error(err)
		return 0
	}
	defer res.Body.Close()
	n, err := io.Copy(io.Discard, res.Body)
	if err != nil {
		b.Error(err)
	}
	return n
}

func BenchmarkLatency(b *testing.B) {
	compare(b, echo, func(b *testing.B, c *http.Client) {
		fetch(b, c)
		var took []time.Duration
		for b.Loop() {
			begin := time.Now()
			fetch(b, c)
			took = append(took, time.Since(begin))
		}
		slices.Sort(took)
		b.ReportMetric(float64(took[len(took)/2].Microseconds()), "µs-p50")
	})
}

func BenchmarkRequests32(b *testing.B) {
	compare(b, echo, func(b *testing.B, c *http.Client) {
		fetch(b, c)
		b.ResetTimer()
		jobs := make(chan struct{})
		var all sync.WaitGroup
		for range 32 {
			all.Go(func() {
				for range jobs {
					fetch(b, c)
				}
			})
		}
		for range b.N {
			jobs <- struct{}{}
		}
		close(jobs)
		all.Wait()
		b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "requests/s")
	})
}

func BenchmarkBulk(b *testing.B) {
	block := make([]byte, 1<<20)
	compare(b, func(w http.ResponseWriter, r *http.Request) {
		for range 64 {
			w.Write(block)
		}
	}, func(b *testing.B, c *http.Client) {
		b.SetBytes(64 << 20)
		for b.Loop() {
			fetch(b, c)
		}
	})
}

// BenchmarkConnection is a new connection, its TLS and one request.
func BenchmarkConnection(b *testing.B) {
	compare(b, echo, func(b *testing.B, c *http.Client) {
		for b.Loop() {
			fetch(b, c)
			c.CloseIdleConnections()
		}
	})
}
