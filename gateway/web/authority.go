package web

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"fmt"
	"math/big"
	"net"
	"net/netip"
	"sync"
	"time"

	"airlock.dev/airlock"
)

const (
	leafLife  = 24 * time.Hour
	leafRenew = leafLife / 2 // what a leaf has left when it is replaced
	backdate  = time.Hour    // for sandboxes whose clock is behind
	// leavesMost bounds the certificates that a door keeps.
	leavesMost = 256
)

// Authority signs the certificates that sandboxes see. It is made elsewhere.
type Authority struct {
	cert *x509.Certificate
	key  crypto.Signer
	now  func() time.Time
}

// NewAuthority returns the authority of a root certificate and its key.
func NewAuthority(cert *x509.Certificate, key crypto.Signer) (*Authority, error) {
	pub, ok := key.Public().(interface{ Equal(crypto.PublicKey) bool })
	if !ok || !pub.Equal(cert.PublicKey) {
		return nil, airlock.Errorf(airlock.Invalid, "the gateway's certificate authority has another one's key: give the key of its certificate")
	}
	if !cert.IsCA || cert.KeyUsage&x509.KeyUsageCertSign == 0 {
		return nil, airlock.Errorf(airlock.Invalid, "the gateway's certificate is not an authority's: make one that may sign certificates")
	}
	return &Authority{cert: cert, key: key, now: time.Now}, nil
}

// mint makes a certificate for a host, with a key and a serial number of its own.
func (a *Authority) mint(host string) (*tls.Certificate, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("make a key for %s: %w", host, err)
	}
	var serial [16]byte
	rand.Read(serial[:]) // never fails
	serial[0] &= 0x7f    // at most 20 octets and positive, as RFC 5280 wants
	serial[15] |= 1      // and not zero
	now := a.now()
	end := now.Add(leafLife)
	if a.cert.NotAfter.Before(end) {
		end = a.cert.NotAfter
	}
	template := &x509.Certificate{
		SerialNumber: new(big.Int).SetBytes(serial[:]),
		Subject:      pkix.Name{CommonName: "Airlock"},
		NotBefore:    now.Add(-backdate), NotAfter: end,
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
		BasicConstraintsValid: true,
	}
	if len(host) <= 64 { // the most that a common name can have
		template.Subject.CommonName = host
	}
	if ip, err := netip.ParseAddr(host); err == nil {
		template.IPAddresses = []net.IP{ip.AsSlice()}
	} else {
		template.DNSNames = []string{host}
	}
	der, err := x509.CreateCertificate(rand.Reader, template, a.cert, key.Public(), a.key)
	if err != nil {
		return nil, fmt.Errorf("sign a certificate for %s: %w", host, err)
	}
	parsed, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, fmt.Errorf("read back the certificate for %s: %w", host, err)
	}
	return &tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key, Leaf: parsed}, nil
}

// leaves are the certificates of one door.
type leaves struct {
	authority *Authority

	mu     sync.Mutex
	byName map[string]*leaf
	order  []string // the oldest first; it makes room
}

type leaf struct {
	mu   sync.Mutex // held while it is made
	cert *tls.Certificate
}

func (ls *leaves) get(host string) (*tls.Certificate, error) {
	ls.mu.Lock()
	l := ls.byName[host]
	if l == nil {
		if len(ls.order) >= leavesMost {
			delete(ls.byName, ls.order[0])
			ls.order = ls.order[1:]
		}
		l = &leaf{}
		ls.byName[host] = l
		ls.order = append(ls.order, host)
	}
	ls.mu.Unlock()

	l.mu.Lock()
	defer l.mu.Unlock()
	if l.cert == nil || l.cert.Leaf.NotAfter.Sub(ls.authority.now()) < leafRenew {
		cert, err := ls.authority.mint(host)
		if err != nil {
			return nil, err
		}
		l.cert = cert
	}
	return l.cert, nil
}
