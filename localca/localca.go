// Package localca is a certificate authority for one domain on one machine:
// with it `airlock serve --domain` speaks TLS without anyone's help, to
// clients that were told to trust its certificate.
//
// Its certificate says itself that it is good for that domain and loopback
// only, so that trusting it risks no other site. The authority's key is in the
// data directory and only sealed, by whoever keeps keys; the server's own key
// is made anew at each start and is never written. Start reading at Open.
package localca

import (
	"context"
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
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"airlock.dev/airlock"
	"airlock.dev/airlock/sealed"
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
	keep   sealed.Keeper

	mu   sync.Mutex
	leaf *tls.Certificate
}

// The names of the files and of the key that seals one of them. Earlier
// versions had the key in clear.
const (
	certName  = "ca.pem"
	keyName   = "ca-key.sealed"
	clearName = "ca-key.pem"
	sealName  = "tls"
)

// Open returns the authority for domain that dir has, or makes it there. One
// for another domain, or one that is near its end, is replaced: then clients
// have to be told again. A key that an earlier version left in clear is sealed,
// and its file overwritten and removed.
func Open(ctx context.Context, dir, domain string, keep sealed.Keeper) (*CA, error) {
	return open(ctx, dir, domain, keep, time.Now)
}

func open(ctx context.Context, dir, domain string, keep sealed.Keeper, now func() time.Time) (*CA, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("make the directory of certificates: %w", err)
	}
	c := &CA{CertFile: filepath.Join(dir, certName), domain: domain, now: now, keep: keep}
	keyFile := filepath.Join(dir, keyName)
	err := c.sealClear(ctx, dir)
	if err != nil {
		return nil, fmt.Errorf("seal the certificate authority's key in %s: %w", dir, err)
	}
	err = c.load(ctx, keyFile)
	if err == nil && slices.Contains(c.cert.PermittedDNSDomains, domain) && c.cert.NotAfter.Sub(now()) > leafLife {
		return c, nil
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, &airlock.Error{Code: airlock.Invalid, Field: "data-dir", Message: fmt.Sprintf("the certificate authority in %s cannot be read", dir), Hint: "remove the directory to make a new one; clients have to be told again", Err: err}
	}
	if err := c.make(ctx, keyFile); err != nil {
		return nil, fmt.Errorf("make a certificate authority: %w", err)
	}
	return c, nil
}

// sealClear seals a key that is in clear and ends its file. A crash at any
// point leaves one of the two whole, and the next start goes on.
func (c *CA) sealClear(ctx context.Context, dir string) error {
	path := filepath.Join(dir, clearName)
	text, err := os.ReadFile(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err == nil {
		defer clear(text)
		if _, err := os.Stat(filepath.Join(dir, keyName)); errors.Is(err, fs.ErrNotExist) {
			key := block(text, "EC PRIVATE KEY")
			if key == nil {
				return errors.New("ca-key.pem is damaged: remove the directory to make a new authority; clients have to be told again")
			}
			defer clear(key)
			if err := c.writeKey(ctx, filepath.Join(dir, keyName), key); err != nil {
				return err
			}
		} else if err != nil {
			return err
		}
		if err := shred(path); err != nil {
			return err
		}
	}
	// Halves of files, as a crash of an earlier version may have left them.
	halves, err := filepath.Glob(filepath.Join(dir, sealed.Halves+"*"))
	if err != nil {
		return err
	}
	for _, half := range halves {
		if err := shred(half); err != nil {
			return err
		}
	}
	return nil
}

// shred overwrites a file and removes it.
func shred(path string) error {
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	info, err := f.Stat()
	if err == nil {
		_, err = f.WriteAt(make([]byte, info.Size()), 0)
	}
	if err := errors.Join(err, f.Sync(), f.Close()); err != nil {
		return err
	}
	if err := os.Remove(path); err != nil {
		return err
	}
	return sealed.SyncDir(filepath.Dir(path))
}

// writeKey seals a key's DER. It is bound to what it is.
func (c *CA) writeKey(ctx context.Context, path string, der []byte) error {
	key, err := sealed.Key(ctx, c.keep, sealName, der, []byte(keyName))
	if err != nil {
		return err
	}
	return sealed.Replace(path, 0o600, key)
}

func (c *CA) load(ctx context.Context, keyFile string) error {
	certPEM, err := os.ReadFile(c.CertFile)
	if err != nil {
		return err
	}
	keyPEM, err := os.ReadFile(keyFile)
	if err != nil {
		return err
	}
	key, err := c.keep.Unseal(ctx, sealName, block(keyPEM, sealed.KeyBlock), []byte(keyName))
	if err != nil {
		return err
	}
	defer clear(key)
	if c.cert, err = x509.ParseCertificate(block(certPEM, sealed.CertificateBlock)); err != nil {
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

func (c *CA) make(ctx context.Context, keyFile string) (err error) {
	if c.key, err = ecdsa.GenerateKey(elliptic.P256(), rand.Reader); err != nil {
		return err
	}
	begin := c.now()
	template := &x509.Certificate{
		SerialNumber: sealed.Serial(),
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
	defer clear(key)
	if err := c.writeKey(ctx, keyFile, key); err != nil {
		return err
	}
	return sealed.Replace(c.CertFile, 0o644, &pem.Block{Type: sealed.CertificateBlock, Bytes: der})
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
		SerialNumber: sealed.Serial(),
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
