// Command load is the client of the benchmarks of the network: it runs in a
// sandbox, does one thing over HTTP/1.1 again and again, and prints what it
// measured as JSON. It knows nothing of what is between it and the server.
package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"slices"
	"sync"
	"time"
)

// measured is what it prints. Times are in milliseconds.
type measured struct {
	PerSecond float64 // requests, or bytes
	P50, P99  float64 // of requests
}

var (
	to    = flag.String("to", "", "`ADDRESS` to connect to, whatever the URL says")
	roots = flag.String("roots", "", "file with the authorities to trust instead of the system's")
	conns = flag.Int("conns", 32, "connections")
	last  = flag.Duration("for", 2*time.Second, "how long to make requests")
	down  = flag.Int64("down", 0, "download so many bytes in one request instead")
	up    = flag.Int64("up", 0, "upload so many")
)

func main() {
	flag.Parse()
	m, err := measure(flag.Arg(0))
	if err == nil {
		err = json.NewEncoder(os.Stdout).Encode(m)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func measure(url string) (measured, error) {
	// With a transport that speaks HTTP/1.1 only, each worker has a connection.
	tr := &http.Transport{MaxConnsPerHost: *conns, MaxIdleConnsPerHost: *conns, TLSClientConfig: &tls.Config{}}
	defer tr.CloseIdleConnections()
	if *to != "" {
		tr.DialContext = func(ctx context.Context, network, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, network, *to)
		}
	}
	if *roots != "" {
		pem, err := os.ReadFile(*roots)
		if err != nil {
			return measured{}, err
		}
		tr.TLSClientConfig.RootCAs = x509.NewCertPool()
		tr.TLSClientConfig.RootCAs.AppendCertsFromPEM(pem)
	}
	c := &http.Client{Transport: tr}
	if bytes := *down + *up; bytes > 0 {
		if _, err := fetch(c, url, 0, 0); err != nil { // the connection is there
			return measured{}, err
		}
		began := time.Now()
		n, err := fetch(c, url, *down, *up)
		if err == nil && n != *down {
			err = fmt.Errorf("%d bytes came of %d", n, *down)
		}
		return measured{PerSecond: float64(bytes) / time.Since(began).Seconds()}, err
	}
	return requests(c, url)
}

// fetch makes one request, which asks for so many bytes and sends so many.
func fetch(c *http.Client, url string, down, up int64) (int64, error) {
	r, err := http.NewRequest("GET", fmt.Sprintf("%s%d", url, down), nil)
	if err == nil && up > 0 {
		r, err = http.NewRequest("PUT", url+"0", io.LimitReader(zeros{}, up))
		if err == nil {
			r.ContentLength = up
		}
	}
	if err != nil {
		return 0, err
	}
	res, err := c.Do(r)
	if err != nil {
		return 0, err
	}
	defer res.Body.Close()
	n, err := io.CopyBuffer(struct{ io.Writer }{io.Discard}, res.Body, make([]byte, 256<<10))
	if err == nil && res.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s", url, res.Status)
	}
	return n, err
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { clear(p); return len(p), nil }

func requests(c *http.Client, url string) (measured, error) {
	const first = 200 * time.Millisecond // connections are made, and it is not counted
	begin := time.Now().Add(first)
	end := begin.Add(*last)
	var mu sync.Mutex
	var all []time.Duration
	var failed error
	var workers sync.WaitGroup
	for range *conns {
		workers.Go(func() {
			var mine []time.Duration
			var err error
			for err == nil && time.Now().Before(end) {
				at := time.Now()
				_, err = fetch(c, url, 100, 0)
				if at.After(begin) {
					mine = append(mine, time.Since(at))
				}
			}
			mu.Lock()
			defer mu.Unlock()
			all = append(all, mine...)
			if err != nil {
				failed = err
			}
		})
	}
	workers.Wait()
	if failed != nil || len(all) == 0 {
		return measured{}, fmt.Errorf("%d requests were made: %w", len(all), failed)
	}
	took := time.Since(begin)
	slices.Sort(all)
	ms := func(i int) float64 { return float64(all[i].Microseconds()) / 1000 }
	return measured{PerSecond: float64(len(all)) / took.Seconds(), P50: ms(len(all) / 2), P99: ms(len(all) * 99 / 100)}, nil
}
