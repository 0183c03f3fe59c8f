// Package localca is a certificate authority for one domain on one machine:
// with it `airlock serve --domain` speaks TLS without anyone's help, to
// clients that were told to trust its certificate.
//
// Its certificate says itself that it is good for that domain and loopback
// only, so that trusting it risks no other site. The authority's key stays in
// the data directory; the server's own key is made anew at each start and is
// never written. Start reading at Open.
package localca

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"airlock.dev/airlock"
)

const (
	caLife   = 10 * 365 * 24 * time.Hour
	leafLife = 90 * 24 * time.Hour
	renewAt  = 30 * 24 * time.Hour // what a leaf has left when it is replaced
	backdate = time.Hour           // for clients whose clock is behind
)

// CA signs the server's certificates for one domain.
type CA struct {
	CertFile string // to be trusted by clients, PEM

	domain string
	cert   *x509.Certificate
	key    *ecdsa.PrivateKey
	now    func() time.Time

	mu   sync.Mutex
	leaf *tls.Certificate
}

// Open returns the authority for domain that dir has, or makes it there. One
// for another domain, or one that is near its end, is replaced: then clients
// have to be told again.
func Open(dir, domain string) (*CA, error) { return open(dir, domain, time.Now) }

func open(dir, domain string, now func() time.Time) (*CA, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("make the directory of certificates: %w", err)
	}
	c := &CA{CertFile: filepath.Join(dir, "ca.pem"), domain: domain, now: now}
	keyFile := filepath.Join(dir, "ca-key.pem")
	err := c.load(keyFile)
	if err == nil && slices.Contains(c.cert.PermittedDNSDomains, domain) && c.cert.NotAfter.Sub(now()) > leafLife {
		return c, nil
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, &airlock.Error{Code: airlock.Invalid, Field: "data-dir", Message: fmt.Sprintf("the certificate authority in %s cannot be read", dir), Hint: "remove the directory to make a new one; clients have to be told again", Err: err}
	}
	if err := c.make(keyFile); err != nil {
		return nil, fmt.Errorf("make a certificate authority: %w", err)
	}
	return c, nil
}

func (c *CA) load(keyFile string) error {
	certPEM, err := os.ReadFile(c.CertFile)
	if err != nil {
		return err
	}
	keyPEM, err := os.ReadFile(keyFile)
	if err != nil {
		return err
	}
	cert, key := block(certPEM, "CERTIFICATE"), block(keyPEM, "EC PRIVATE KEY")
	if c.cert, err = x509.ParseCertificate(cert); err != nil {
		return err
	}
	if c.key, err = x509.ParseECPrivateKey(key); err != nil {
		return err
	}
	if !c.key.PublicKey.Equal(c.cert.PublicKey) {
		return errors.New("its key is another one's")
	}
	return nil
}

func block(text []byte, kind string) []byte {
	b, _ := pem.Decode(text)
	if b == nil || b.Type != kind {
		return nil // fails where it is parsed
	}
	return b.Bytes
}

func serial() *big.Int {
	var b [16]byte
	rand.Read(b[:]) // never fails
	return new(big.Int).SetBytes(b[:])
}

func (c *CA) make(keyFile string) (err error) {
	if c.key, err = ecdsa.GenerateKey(elliptic.P256(), rand.Reader); err != nil {
		return err
	}
	begin := c.now()
	template := &x509.Certificate{
		SerialNumber: serial(),
		// The time tells several of them apart in a client's list.
		Subject:   pkix.Name{CommonName: fmt.Sprintf("Airlock local CA for %s, %s", c.domain, begin.UTC().Format(time.DateTime))},
		NotBefore: begin.Add(-backdate), NotAfter: begin.Add(caLife),
		IsCA: true, BasicConstraintsValid: true, MaxPathLenZero: true,
		KeyUsage:                    x509.KeyUsageCertSign,
		PermittedDNSDomainsCritical: true,
		PermittedDNSDomains:         []string{c.domain, "localhost"},
		PermittedIPRanges: []*net.IPNet{
			{IP: net.IPv4(127, 0, 0, 0).To4(), Mask: net.CIDRMask(8, 32)},
			{IP: net.IPv6loopback, Mask: net.CIDRMask(128, 128)},
		},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, c.key.Public(), c.key)
	if err != nil {
		return err
	}
	if c.cert, err = x509.ParseCertificate(der); err != nil {
		return err
	}
	key, err := x509.MarshalECPrivateKey(c.key)
	if err != nil {
		return err
	}
	// The certificate comes last: a key alone counts as nothing.
	if err := os.Remove(c.CertFile); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := write(keyFile, "EC PRIVATE KEY", key, 0o600); err != nil {
		return err
	}
	return write(c.CertFile, "CERTIFICATE", der, 0o644)
}

// write replaces a file whole.
func write(path, kind string, der []byte, mode fs.FileMode) error {
	var text bytes.Buffer
	if err := pem.Encode(&text, &pem.Block{Type: kind, Bytes: der}); err != nil {
		return err
	}
	f, err := os.CreateTemp(filepath.Dir(path), ".new-") // with mode 0600
	if err != nil {
		return err
	}
	defer os.Remove(f.Name())
	_, err = f.Write(text.Bytes())
	if err = errors.Join(err, f.Chmod(mode), f.Sync(), f.Close()); err != nil {
		return err
	}
	return os.Rename(f.Name(), path)
}

// GetCertificate returns the server's certificate, for tls.Config. It is good
// for the domain and all hosts directly below it, localhost and the loopback
// addresses, and is renewed in time while the server runs.
func (c *CA) GetCertificate(*tls.ClientHelloInfo) (*tls.Certificate, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	now := c.now()
	if c.leaf != nil && c.leaf.Leaf.NotAfter.Sub(now) > renewAt {
		return c.leaf, nil
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	template := &x509.Certificate{
		SerialNumber: serial(),
		Subject:      pkix.Name{CommonName: c.domain},
		NotBefore:    now.Add(-backdate), NotAfter: now.Add(leafLife),
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
		BasicConstraintsValid: true,
		DNSNames:              []string{c.domain, "*." + c.domain, "localhost"},
		IPAddresses:           []net.IP{net.IPv4(127, 0, 0, 1), net.IPv6loopback},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, c.cert, key.Public(), c.key)
	if err != nil {
		return nil, err
	}
	parsed, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, err
	}
	c.leaf = &tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key, Leaf: parsed}
	return c.leaf, nil
}
