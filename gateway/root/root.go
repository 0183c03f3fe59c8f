// Package root is the certificate authority of an installation: sandboxes
// trust it, from the making of their image, for every host there is, and the
// gateway signs with it what it shows them in place of those hosts.
//
// All of it is one file, whose private keys are sealed by whoever keeps keys.
// The package knows nothing of images, of sandboxes or of what is signed; when
// a new root may sign is its caller's to know. Start reading at Open.
package root

import (
	"bytes"
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/hex"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"time"

	"airlock.dev/airlock"
	"airlock.dev/airlock/sealed"
)

const (
	life     = 10 * 365 * 24 * time.Hour
	renewAt  = 365 * 24 * time.Hour // what the root that signs has left when the next one is made
	backdate = time.Hour            // for sandboxes whose clock is behind

	fileName = "roots.pem"
	sealName = "gateway"
	maxFile  = 64 << 10
	// most is the number of roots that are trusted at a time: the one that
	// signs, and the one before or after it.
	most = 2
)

// Keeper seals the keys of roots and says whose they are.
type Keeper interface {
	sealed.Keeper
	Installation() string // its id, at most 45 characters
}

// Root is the authority. Its methods may be called concurrently.
type Root struct {
	path string
	keep Keeper
	now  func() time.Time

	mu    sync.Mutex
	roots []pair // 1 or 2, the older one first; the first with a key signs
}

// pair is a root; one that signs no more has no key.
type pair struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	// sealed is the key as it is in the file.
	sealed *pem.Block
}

// Open returns the authority that dir has, or makes it there. Roots that have
// ended are forgotten; when the one that signs has less than a year left, Open
// does what Rotate does. A damaged file is an Invalid error, and is left as it is.
func Open(ctx context.Context, dir string, keep Keeper) (*Root, error) {
	return open(ctx, dir, keep, time.Now)
}

func open(ctx context.Context, dir string, keep Keeper, now func() time.Time) (*Root, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("make the directory of the gateway's certificates: %w", err)
	}
	halves, err := filepath.Glob(filepath.Join(dir, sealed.Halves+"*"))
	if err != nil {
		return nil, fmt.Errorf("look for what a crash left: %w", err)
	}
	for _, half := range halves {
		if err := os.Remove(half); err != nil {
			return nil, fmt.Errorf("remove what a crash left: %w", err)
		}
	}
	r := &Root{path: filepath.Join(dir, fileName), keep: keep, now: now}
	if err := r.load(ctx); err != nil {
		if ctx.Err() != nil {
			return nil, fmt.Errorf("open the gateway's certificate authority: %w", err)
		}
		return nil, &airlock.Error{Code: airlock.Invalid, Field: "data-dir", Message: fmt.Sprintf("the gateway's certificate authority %s cannot be read", r.path),
			Hint: "restore it and the keyring from one backup of the data directory, or remove it to make a new one, which sandboxes that run already do not trust", Err: err}
	}
	fresh, keys := 0, 0
	for _, p := range r.roots {
		if p.key != nil {
			keys++
			if p.cert.NotAfter.Sub(now()) >= renewAt {
				fresh++
			}
		}
	}
	if fresh == 0 && keys < most {
		if err := r.add(ctx); err != nil {
			return nil, fmt.Errorf("make the gateway's certificate authority: %w", err)
		}
	}
	return r, nil
}

// load reads the file and leaves out roots that have ended.
func (r *Root) load(ctx context.Context) error {
	text, err := os.ReadFile(r.path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if len(text) > maxFile {
		return fmt.Errorf("it has %d bytes, and no more than %d are possible", len(text), maxFile)
	}
	roots, err := parse(text)
	if err != nil {
		return err
	}
	for i, p := range roots {
		if !p.ends(r.now()) && p.sealed != nil {
			if p.key, err = r.unseal(ctx, p); err != nil {
				return fmt.Errorf("key %d: %w", i+1, err)
			}
		}
		if !p.ends(r.now()) {
			r.roots = append(r.roots, p)
		}
	}
	return nil
}

// parse reads roots without opening their keys. What is read was written by
// encode: nothing is between, before or behind the blocks.
func parse(text []byte) ([]pair, error) {
	var roots []pair
	keys := 0
	for len(text) > 0 {
		b, rest := pem.Decode(text)
		if b == nil || len(b.Headers) > 0 || !bytes.HasPrefix(text, pem.EncodeToMemory(b)) {
			return nil, errors.New("there is something else than certificates and sealed keys in it")
		}
		text = rest
		switch {
		case b.Type == sealed.CertificateBlock && len(roots) < most:
			cert, err := x509.ParseCertificate(b.Bytes)
			if err != nil {
				return nil, fmt.Errorf("certificate %d: %w", len(roots)+1, err)
			}
			if err := checkRoot(cert); err != nil {
				return nil, fmt.Errorf("certificate %d: %w", len(roots)+1, err)
			}
			roots = append(roots, pair{cert: cert})
		case b.Type == sealed.KeyBlock && len(roots) > 0 && roots[len(roots)-1].sealed == nil:
			roots[len(roots)-1].sealed = b
			keys++
		default:
			return nil, fmt.Errorf("a block %q is too many", b.Type)
		}
	}
	if keys == 0 || roots[len(roots)-1].sealed == nil {
		return nil, errors.New("the key of its newest certificate is missing")
	}
	return roots, nil
}

// checkRoot finds certificates that are not what create makes: others, and
// those in which a bit has changed.
func checkRoot(cert *x509.Certificate) error {
	if !cert.IsCA || !cert.BasicConstraintsValid || cert.KeyUsage&x509.KeyUsageCertSign == 0 {
		return errors.New("it is no authority's")
	}
	if err := cert.CheckSignatureFrom(cert); err != nil {
		return fmt.Errorf("it is not signed by itself: %w", err)
	}
	return nil
}

func (p pair) ends(now time.Time) bool { return !now.Before(p.cert.NotAfter) }

// bound is what the key of a certificate is bound to.
func bound(cert *x509.Certificate) []byte {
	sum := sha256.Sum256(cert.Raw)
	return append([]byte("gateway root "), sum[:]...)
}

func (r *Root) unseal(ctx context.Context, p pair) (*ecdsa.PrivateKey, error) {
	der, err := r.keep.Unseal(ctx, sealName, p.sealed.Bytes, bound(p.cert))
	if err != nil {
		return nil, err
	}
	defer clear(der)
	key, err := x509.ParseECPrivateKey(der)
	if err != nil {
		return nil, err
	}
	if !key.PublicKey.Equal(p.cert.PublicKey) {
		return nil, errors.New("it is another certificate's")
	}
	return key, nil
}

// create makes a root.
func (r *Root) create(ctx context.Context) (pair, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return pair{}, err
	}
	begin := r.now().UTC().Truncate(time.Second)
	template := &x509.Certificate{
		SerialNumber: sealed.Serial(),
		// The time tells roots apart for clients that go by names only.
		Subject:   pkix.Name{CommonName: "Airlock gateway of " + r.keep.Installation(), OrganizationalUnit: []string{begin.Format(time.DateTime)}},
		NotBefore: begin.Add(-backdate), NotAfter: begin.Add(life),
		IsCA: true, BasicConstraintsValid: true, MaxPathLenZero: true,
		KeyUsage: x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return pair{}, err
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		return pair{}, err
	}
	text, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		return pair{}, err
	}
	defer clear(text)
	block, err := sealed.Key(ctx, r.keep, sealName, text, bound(cert))
	if err != nil {
		return pair{}, err
	}
	return pair{cert, key, block}, nil
}

// save makes roots durable, then current.
func (r *Root) save(roots []pair) error {
	var blocks []*pem.Block
	for _, p := range roots {
		blocks = append(blocks, &pem.Block{Type: sealed.CertificateBlock, Bytes: p.cert.Raw})
		if p.sealed != nil {
			blocks = append(blocks, p.sealed)
		}
	}
	if err := sealed.Replace(r.path, 0o600, blocks...); err != nil {
		return err
	}
	r.roots = roots
	return nil
}

// add makes a root beside the one that signs, and forgets the one before that.
func (r *Root) add(ctx context.Context) error {
	next, err := r.create(ctx)
	if err != nil {
		return err
	}
	roots := []pair{}
	for _, p := range r.roots {
		if p.key != nil {
			roots = append(roots, p)
		}
	}
	return r.save(append(roots, next))
}

// signer is the index of the root that signs.
func (r *Root) signer() int {
	for i, p := range r.roots {
		if p.key != nil && !p.ends(r.now()) {
			return i
		}
	}
	return len(r.roots) - 1 // it has a key always
}

// Current returns the root that signs, with its key.
func (r *Root) Current() (*x509.Certificate, crypto.Signer) {
	r.mu.Lock()
	defer r.mu.Unlock()
	p := r.roots[r.signer()]
	return p.cert, p.key
}

// Trusted returns what new images have to trust, the older one first: the
// root that signs, the one that will, and the one before, until it has ended.
func (r *Root) Trusted() []*x509.Certificate {
	r.mu.Lock()
	defer r.mu.Unlock()
	var all []*x509.Certificate
	for i, p := range r.roots {
		if !p.ends(r.now()) || i == len(r.roots)-1 {
			all = append(all, p.cert)
		}
	}
	return all
}

// PEM returns Trusted as one text.
func (r *Root) PEM() []byte {
	var text []byte
	for _, cert := range r.Trusted() {
		text = append(text, pem.EncodeToMemory(&pem.Block{Type: sealed.CertificateBlock, Bytes: cert.Raw})...)
	}
	return text
}

// ID is a digest of Trusted, 16 characters of [0-9a-f]: an image that was made
// with it trusts exactly those. Rotate changes it, Promote does not.
func (r *Root) ID() string {
	sum := sha256.Sum256(r.PEM())
	return hex.EncodeToString(sum[:8])
}

// Rotate makes a new root. New images are to trust it at once, beside the one
// that signs on until Promote. With a rotation that is not finished it is a Conflict.
func (r *Root) Rotate(ctx context.Context) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.signer() < len(r.roots)-1 {
		return &airlock.Error{Code: airlock.Conflict, Message: "the gateway's certificate authority is being replaced already",
			Hint: "wait until no sandbox runs that was made before that"}
	}
	if err := r.add(ctx); err != nil {
		return fmt.Errorf("rotate the gateway's certificate authority: %w", err)
	}
	return nil
}

// Promote finishes a rotation: the new root signs, and the key of the old one
// is forgotten. Call it when no sandbox is left, running or stored, whose image
// was made with another ID: such a sandbox would trust nothing any more. A
// sandbox can be extended without end, so no time that passes says this.
// Without a rotation it does nothing.
func (r *Root) Promote() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	last := len(r.roots) - 1
	if r.signer() == last {
		return nil
	}
	roots := []pair{{cert: r.roots[0].cert}, r.roots[last]}
	if err := r.save(roots); err != nil {
		return fmt.Errorf("finish the rotation of the gateway's certificate authority: %w", err)
	}
	return nil
}
