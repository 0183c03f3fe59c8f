package web

import (
	"bytes"
	"crypto/ecdh"
	"crypto/rand"
	"crypto/tls"
	"io"
	"testing"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
)

// streams is an HTTP/2 client that says what others cannot.
type streams struct {
	t    testing.TB
	c    *tls.Conn
	f    *http2.Framer
	buf  bytes.Buffer
	enc  *hpack.Encoder
	next uint32
}

func newStreams(t testing.TB, c *tls.Conn) *streams {
	t.Helper()
	must(t, c.Handshake())
	want(t, "ALPN", c.ConnectionState().NegotiatedProtocol, "h2")
	_, err := io.WriteString(c, http2.ClientPreface)
	must(t, err)
	s := &streams{t: t, c: c, f: http2.NewFramer(c, c), next: 1}
	s.f.ReadMetaHeaders = hpack.NewDecoder(4096, nil)
	s.enc = hpack.NewEncoder(&s.buf)
	must(t, s.f.WriteSettings())
	return s
}

func (s *streams) headers(end bool, fields ...string) uint32 {
	s.t.Helper()
	s.buf.Reset()
	for i := 0; i < len(fields); i += 2 {
		if fields[i] != "" {
			must(s.t, s.enc.WriteField(hpack.HeaderField{Name: fields[i], Value: fields[i+1]}))
		}
	}
	id := s.next
	s.next += 2
	must(s.t, s.f.WriteHeaders(http2.HeadersFrameParam{StreamID: id, BlockFragment: s.buf.Bytes(), EndHeaders: true, EndStream: end}))
	return id
}

// get returns the status of a GET, or what ended its stream.
func (s *streams) get(authority, path string, extra [2]string) string {
	s.t.Helper()
	fields := []string{":method", "GET", ":scheme", "https", ":path", path}
	if authority != "" {
		fields = append(fields, ":authority", authority)
	}
	id := s.headers(true, append(fields, extra[0], extra[1])...)
	status, _, _ := s.answer(id)
	return status
}

// answer returns what came on a stream until its end.
func (s *streams) answer(id uint32) (status, body string, trailers map[string]string) {
	s.t.Helper()
	for {
		f, err := s.f.ReadFrame()
		must(s.t, err)
		if f.Header().StreamID != id {
			continue
		}
		switch f := f.(type) {
		case *http2.MetaHeadersFrame:
			if status == "" {
				status = f.PseudoValue("status")
			} else {
				trailers = map[string]string{}
				for _, h := range f.RegularFields() {
					trailers[h.Name] = h.Value
				}
			}
			if f.StreamEnded() {
				return status, body, trailers
			}
		case *http2.DataFrame:
			body += string(f.Data())
			if f.StreamEnded() {
				return status, body, trailers
			}
		case *http2.RSTStreamFrame:
			return "reset " + f.ErrCode.String(), body, trailers
		}
	}
}

// echConfig has the outer name one.test and another one inside.
func echConfig(t testing.TB, w *world) *tls.Config {
	t.Helper()
	key, err := ecdh.X25519().GenerateKey(rand.Reader)
	must(t, err)
	// ECHConfigList of RFC 9849 with one X25519, HKDF-SHA256, AES-128-GCM key.
	config := []byte{1, 0, 0x20, 0, 32}
	config = append(config, key.PublicKey().Bytes()...)
	config = append(config, 0, 4, 0, 1, 0, 1, 32, 8)
	config = append(config, "one.test\x00\x00"...)
	n := byte(len(config))
	list := append([]byte{0, n + 4, extensionECH >> 8, extensionECH & 0xff, 0, n}, config...)
	return &tls.Config{RootCAs: w.cfg.Roots, ServerName: "hidden.test", EncryptedClientHelloConfigList: list}
}
