package web

import (
	"bytes"
	"crypto/tls"
	"io"
	"net"
	"testing"
	"time"
)

// fixed is a connection that says b and then is at its end.
type fixed struct {
	net.Conn
	r     *bytes.Reader
	wrote int
}

func (f *fixed) Read(p []byte) (int, error)       { return f.r.Read(p) }
func (f *fixed) Write(p []byte) (int, error)      { f.wrote += len(p); return len(p), nil }
func (f *fixed) Close() error                     { return nil }
func (f *fixed) SetDeadline(time.Time) error      { return nil }
func (f *fixed) SetReadDeadline(time.Time) error  { return nil }
func (f *fixed) SetWriteDeadline(time.Time) error { return nil }

// clientHello returns what crypto/tls says first.
func clientHello(t testing.TB, name string) []byte {
	t.Helper()
	rec := &firstWrite{}
	tls.Client(rec, &tls.Config{ServerName: name, InsecureSkipVerify: true, NextProtos: []string{"h2"}}).Handshake()
	return rec.b
}

type firstWrite struct {
	fixed
	b []byte
}

func (f *firstWrite) Write(p []byte) (int, error) { f.b = append(f.b, p...); return len(p), nil }
func (f *firstWrite) Read([]byte) (int, error)    { return 0, io.EOF }

func TestReadHello(t *testing.T) {
	one := clientHello(t, "one.test")
	split := append([]byte{22, 3, 1, 0, 10}, one[5:15]...) // the same message in two records
	rest := one[15:]
	split = append(append(split, 22, 3, 1, byte(len(rest)>>8), byte(len(rest))), rest...)
	for _, tt := range []struct {
		what string
		b    []byte
		name string
		ok   bool
	}{
		{"plain", one, "one.test", true},
		{"split", split, "one.test", true},
		{"with early data", append(bytes.Clone(one), "more"...), "one.test", true},
		{"no name", clientHello(t, ""), "", true},
		{"an address", clientHello(t, "192.0.2.1"), "", true},
		{"short", one[:len(one)-1], "", false},
		{"empty", nil, "", false},
		{"alert", []byte{21, 3, 1, 0, 2, 2, 40}, "", false},
		{"HTTP", []byte("GET / HTTP/1.1\r\n\r\n"), "", false},
		{"endless", bytes.Repeat([]byte{22, 3, 1, 0, 0}, 100000), "", false},
	} {
		c := &fixed{r: bytes.NewReader(tt.b)}
		h, raw, err := readHello(c)
		want(t, tt.what, err == nil, tt.ok)
		want(t, tt.what, h.name, tt.name)
		want(t, tt.what, c.wrote, 0)
		if !bytes.HasPrefix(tt.b, raw) {
			t.Errorf("%s: what was read is not what was said", tt.what)
		}
	}
}

func FuzzReadHello(f *testing.F) {
	f.Add(clientHello(f, "one.test"))
	f.Add(clientHello(f, ""))
	f.Add([]byte{22, 3, 1, 0, 4, 1, 0, 0, 0})
	f.Add([]byte{21, 3, 1, 0, 2, 2, 40})
	f.Fuzz(func(t *testing.T, b []byte) {
		c := &fixed{r: bytes.NewReader(b)}
		_, raw, err := readHello(c)
		if c.wrote != 0 {
			t.Error("it answered")
		}
		if len(raw) > helloMost || !bytes.HasPrefix(b, raw) {
			t.Error("what was read is not what was said")
		}
		// Reading it again, as what passes it on does, says the same.
		if err == nil {
			if _, _, err := readHello(&fixed{r: bytes.NewReader(raw)}); err != nil {
				t.Error(err)
			}
		}
	})
}
