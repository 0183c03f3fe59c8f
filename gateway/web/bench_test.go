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
	"runtime"
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
	s.Config.ErrorLog = quietLog
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

// BenchmarkMemory tells what each connection keeps that waits: before it says
// anything, and after one request in clear.
func BenchmarkMemory(b *testing.B) {
	for _, what := range []string{"silent", "kept alive", "under way"} {
		b.Run(what, func(b *testing.B) {
			const flows = 500
			var before, after runtime.MemStats
			for b.Loop() {
				w := newWorld(b)
				a := w.name("one.test", map[uint16]string{80: w.upstream(func(rw http.ResponseWriter, r *http.Request) {
					http.NewResponseController(rw).Flush()
					if what == "under way" {
						<-r.Context().Done()
					}
				}, false, "")})
				w.cfg.Judge = permitAll{}
				w.cfg.Limits.RequestsPerMinute = 1 << 30
				w.open()
				runtime.GC()
				runtime.ReadMemStats(&before)
				for range flows {
					c := w.at(a, 80)
					if what == "silent" {
						continue
					}
					_, err := io.WriteString(c, "GET / HTTP/1.1\r\nHost: one.test\r\n\r\n")
					must(b, err)
					status := make([]byte, len("HTTP/1.1 200"))
					_, err = io.ReadFull(c, status)
					must(b, err)
					want(b, "answer", string(status), "HTTP/1.1 200")
				}
				runtime.GC()
				runtime.ReadMemStats(&after)
				// Upstream, its server and the client are in it.
				b.ReportMetric((float64(after.HeapAlloc+after.StackInuse)-float64(before.HeapAlloc+before.StackInuse))/flows/1024, "KiB/flow")
				w.close()
			}
		})
	}
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

// BenchmarkRaw is bulk through a connection that is passed on.
func BenchmarkRaw(b *testing.B) {
	block := make([]byte, 1<<20)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	must(b, err)
	defer l.Close()
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				for range 256 {
					c.Write(block)
				}
			}()
		}
	}()
	w := newWorld(b)
	a := w.name("one.test", map[uint16]string{22: l.Addr().String()})
	w.modes["one.test:22"] = TCP
	w.ended = make(chan string, 1<<20)
	w.open()
	b.SetBytes(256 << 20)
	for b.Loop() {
		c := w.at(a, 22)
		if n, err := io.Copy(io.Discard, c); err != nil || n != 256<<20 {
			b.Fatal(n, err)
		}
	}
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
