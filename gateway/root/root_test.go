package root

import (
	"bytes"
	"context"
	"crypto/aes"
	"crypto/cipher"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"math/big"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"airlock.dev/airlock"
	"airlock.dev/airlock/sealed"
)

// safe seals as the keystore does, with one key.
type safe struct {
	aead cipher.AEAD
	fail error
}

func newSafe(t testing.TB) *safe {
	t.Helper()
	key := make([]byte, 32)
	rand.Read(key)
	block, err := aes.NewCipher(key)
	if err != nil {
		t.Fatal(err)
	}
	aead, err := cipher.NewGCMWithRandomNonce(block)
	if err != nil {
		t.Fatal(err)
	}
	return &safe{aead: aead}
}

func (s *safe) Installation() string { return "abcdefghij2345671234" }

func (s *safe) Seal(_ context.Context, name string, plaintext, ad []byte) ([]byte, error) {
	return s.aead.Seal(nil, nil, plaintext, append([]byte(name), ad...)), s.fail
}

func (s *safe) Unseal(ctx context.Context, name string, text, ad []byte) ([]byte, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	return s.aead.Open(nil, nil, text, append([]byte(name), ad...))
}

// clock is the time of a test.
type clock struct{ now time.Time }

func (c *clock) read() time.Time { return c.now }

func newClock() *clock { return &clock{time.Date(2026, 12, 3, 10, 0, 0, 0, time.UTC)} }

func mustOpen(t *testing.T, dir string, keep Keeper, c *clock) *Root {
	t.Helper()
	r, err := open(t.Context(), dir, keep, c.read)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// signs says whether a leaf of the root that signs is good for what trusts these.
func signs(t *testing.T, r *Root, trusted []*x509.Certificate, now time.Time) bool {
	t.Helper()
	cert, signer := r.Current()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	der, err := x509.CreateCertificate(rand.Reader, &x509.Certificate{
		SerialNumber: big.NewInt(1), NotBefore: now.Add(-time.Hour), NotAfter: now.Add(time.Hour), DNSNames: []string{"pypi.org"},
	}, cert, key.Public(), signer)
	if err != nil {
		t.Fatal(err)
	}
	leaf, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	pool := x509.NewCertPool()
	for _, c := range trusted {
		pool.AddCert(c)
	}
	_, err = leaf.Verify(x509.VerifyOptions{DNSName: "pypi.org", Roots: pool, CurrentTime: now, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageAny}})
	return err == nil
}

func TestRootIsMadeOnce(t *testing.T) {
	dir, keep, c := filepath.Join(t.TempDir(), "gateway"), newSafe(t), newClock()
	r := mustOpen(t, dir, keep, c)
	cert, key := r.Current()
	if got, want := cert.Subject.String(), "CN=Airlock gateway of abcdefghij2345671234,OU=2026-12-03 10:00:00"; got != want {
		t.Errorf("subject %s, want %s", got, want)
	}
	if !cert.IsCA || !cert.MaxPathLenZero || cert.KeyUsage != x509.KeyUsageCertSign || len(cert.PermittedDNSDomains) != 0 ||
		!cert.NotBefore.Equal(c.now.Add(-time.Hour)) || !cert.NotAfter.Equal(c.now.Add(10*365*24*time.Hour)) {
		t.Errorf("the certificate is %+v", cert)
	}
	if len(r.Trusted()) != 1 || !signs(t, r, r.Trusted(), c.now) || len(r.ID()) != 16 {
		t.Errorf("trusted: %d, id %q", len(r.Trusted()), r.ID())
	}
	again := mustOpen(t, dir, keep, c)
	if got, gotKey := again.Current(); !got.Equal(cert) || !gotKey.(*ecdsa.PrivateKey).Equal(key) || again.ID() != r.ID() {
		t.Error("the second start has another root")
	}
	files, err := os.ReadDir(dir)
	if err != nil || len(files) != 1 {
		t.Fatalf("files: %v, %v", files, err)
	}
	info, err := files[0].Info()
	if err != nil || info.Name() != "roots.pem" || info.Mode() != 0o600 {
		t.Errorf("the file: %v, %v", info, err)
	}
	der, err := x509.MarshalECPrivateKey(key.(*ecdsa.PrivateKey))
	if err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(filepath.Join(dir, fileName))
	if err != nil {
		t.Fatal(err)
	}
	for b, rest := pem.Decode(text); b != nil; b, rest = pem.Decode(rest) {
		if bytes.Contains(b.Bytes, der[7:39]) { // the private scalar
			t.Errorf("the block %s holds the key in clear", b.Type)
		}
	}
}

func TestRotation(t *testing.T) {
	dir, keep, c := t.TempDir(), newSafe(t), newClock()
	r := mustOpen(t, dir, keep, c)
	before, id := r.Trusted(), r.ID()
	old, _ := r.Current()
	if err := r.Promote(); err != nil || r.ID() != id {
		t.Errorf("promote without a rotation: %v", err)
	}
	c.now = c.now.Add(time.Hour)
	if err := r.Rotate(t.Context()); err != nil {
		t.Fatal(err)
	}
	check := func(step string, trusted int, current *x509.Certificate, goodBefore bool) {
		t.Helper()
		for name, r := range map[string]*Root{"now": r, "after a restart": mustOpen(t, dir, keep, c)} {
			got, _ := r.Current()
			if len(r.Trusted()) != trusted || got.Equal(old) != (current == old) || !signs(t, r, r.Trusted(), c.now) {
				t.Errorf("%s, %s: %d are trusted, the old one signs: %v", step, name, len(r.Trusted()), got.Equal(old))
			}
			if signs(t, r, before, c.now) != goodBefore {
				t.Errorf("%s, %s: images from before trust it: %v", step, name, !goodBefore)
			}
		}
	}
	check("rotated", 2, old, true)
	during := r.ID()
	if during == id {
		t.Error("images with the new root have the id of those without")
	}
	if err := r.Rotate(t.Context()); airlock.CodeOf(err) != airlock.Conflict {
		t.Errorf("a second rotation: %v", err)
	}
	c.now = c.now.Add(100 * 24 * time.Hour) // no time that passes changes it
	check("later", 2, old, true)
	if err := r.Promote(); err != nil {
		t.Fatal(err)
	}
	check("promoted", 2, nil, false)
	if r.ID() != during {
		t.Error("promotion asks for new images")
	}
	text, err := os.ReadFile(filepath.Join(dir, fileName))
	if err != nil || strings.Count(string(text), "BEGIN "+sealed.KeyBlock) != 1 {
		t.Errorf("the old key is kept: %s, %v", text, err)
	}
	if err := r.Rotate(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, cert := range r.Trusted() {
		if cert.Equal(old) {
			t.Error("the oldest root is trusted after the next rotation")
		}
	}
	check("rotated again", 2, nil, false)
}

// The years pass, and nobody thinks of it.
func TestRotationByItself(t *testing.T) {
	dir, keep, c := t.TempDir(), newSafe(t), newClock()
	first, _ := mustOpen(t, dir, keep, c).Current()
	for _, step := range []struct {
		years   float64
		trusted int
		old     bool // the first one signs
	}{
		{8.9, 1, true},
		{9.1, 2, true},
		{9.9, 2, true},
		{10.1, 1, false}, // nobody promoted
		{18.0, 1, false},
		{18.5, 2, false},
		{50, 1, false}, // all have ended
	} {
		c.now = newClock().now.Add(time.Duration(step.years * 365 * 24 * float64(time.Hour)))
		r := mustOpen(t, dir, keep, c)
		cert, _ := r.Current()
		if len(r.Trusted()) != step.trusted || cert.Equal(first) != step.old || !signs(t, r, r.Trusted(), c.now) {
			t.Errorf("after %v years: %d are trusted, the first one signs: %v", step.years, len(r.Trusted()), cert.Equal(first))
		}
	}
	// A process that runs that long.
	r := mustOpen(t, dir, keep, c)
	if err := r.Rotate(t.Context()); err != nil {
		t.Fatal(err)
	}
	c.now = c.now.Add(11 * 365 * 24 * time.Hour)
	if cert, key := r.Current(); key == nil || len(r.Trusted()) != 1 || !r.Trusted()[0].Equal(cert) {
		t.Error("after all have ended there is none")
	}
}

func TestDamagedFilesAreRefused(t *testing.T) {
	dir, keep, c := t.TempDir(), newSafe(t), newClock()
	r := mustOpen(t, dir, keep, c)
	if err := r.Rotate(t.Context()); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, fileName)
	good, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var blocks []string
	for b, rest := pem.Decode(good); b != nil; b, rest = pem.Decode(rest) {
		blocks = append(blocks, string(pem.EncodeToMemory(b)))
	}
	if len(blocks) != 4 {
		t.Fatalf("%d blocks", len(blocks))
	}
	flipped := func(i int) string {
		b, _ := pem.Decode([]byte(blocks[i]))
		b.Bytes[len(b.Bytes)/2] ^= 1
		return string(pem.EncodeToMemory(b))
	}
	b := blocks
	for name, text := range map[string]string{
		"empty": "", "cut": string(good[:len(good)-10]), "half": b[0] + b[1] + b[2], "no key": b[0], "key first": b[1] + b[0],
		"two keys": b[0] + b[1] + b[1], "keys exchanged": b[0] + b[3] + b[2] + b[1], "three": b[0] + b[1] + b[2] + b[3] + b[0],
		"text before": "x\n" + string(good), "text between": b[0] + "x\n" + b[1], "text behind": string(good) + "x\n",
		"flipped certificate": flipped(0) + b[1], "flipped key": b[0] + flipped(1), "another kind": strings.ReplaceAll(b[0], "CERTIFICATE", "X509 CRL") + b[1],
		"large": string(good) + strings.Repeat("\n", maxFile), "binary": "\x00\xff",
	} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		r, err := open(t.Context(), dir, keep, c.read)
		var coded *airlock.Error
		if r != nil || !errors.As(err, &coded) || coded.Code != airlock.Invalid || coded.Field != "data-dir" || !strings.Contains(coded.Hint, "restore it") {
			t.Errorf("%s: %v", name, err)
		}
		if left, err := os.ReadFile(path); err != nil || string(left) != text {
			t.Errorf("%s: the file was changed: %v", name, err)
		}
	}
	if err := os.WriteFile(path, good, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := open(t.Context(), dir, newSafe(t), c.read); airlock.CodeOf(err) != airlock.Invalid {
		t.Errorf("another keystore: %v", err)
	}
	canceled, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := open(canceled, dir, keep, c.read); airlock.CodeOf(err) != airlock.Canceled {
		t.Errorf("a canceled open says that the file is damaged: %v", err)
	}
	if got := mustOpen(t, dir, keep, c); got.ID() != r.ID() {
		t.Error("the good file is another authority")
	}
}

// What cannot be written changes nothing, on the disk or in memory; what a
// crash left half written is removed.
func TestFailuresChangeNothing(t *testing.T) {
	dir, keep, c := t.TempDir(), newSafe(t), newClock()
	r := mustOpen(t, dir, keep, c)
	id := r.ID()
	same := func(when string) {
		t.Helper()
		if again := mustOpen(t, dir, keep, c); r.ID() != id || again.ID() != id {
			t.Errorf("%s: the authority is another one", when)
		}
	}
	keep.fail = errors.New("no keys")
	if err := r.Rotate(t.Context()); err == nil {
		t.Error("rotated without a sealed key")
	}
	keep.fail = nil
	same("nothing to seal with")
	r.path = filepath.Join(dir, "missing", fileName)
	if err := r.Rotate(t.Context()); err == nil {
		t.Error("rotated without a file")
	}
	same("nowhere to write")
	half := filepath.Join(dir, ".new-123")
	if err := os.WriteFile(half, []byte("-----BEGIN"), 0o600); err != nil {
		t.Fatal(err)
	}
	same("a crash")
	if _, err := os.Stat(half); !os.IsNotExist(err) {
		t.Errorf("the half is left: %v", err)
	}
}

func FuzzParse(f *testing.F) {
	r := &Root{keep: newSafe(f), now: time.Now, path: filepath.Join(f.TempDir(), fileName)}
	for range 2 {
		if err := r.add(f.Context()); err != nil {
			f.Fatal(err)
		}
		text, err := os.ReadFile(r.path)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(text)
	}
	f.Add([]byte("-----BEGIN CERTIFICATE-----\n-----END CERTIFICATE-----\n"))
	f.Fuzz(func(t *testing.T, text []byte) {
		roots, err := parse(text)
		if err != nil {
			return
		}
		if len(roots) < 1 || len(roots) > most || roots[len(roots)-1].sealed == nil {
			t.Fatalf("%d roots", len(roots))
		}
		var again []byte
		for _, p := range roots {
			again = append(again, pem.EncodeToMemory(&pem.Block{Type: sealed.CertificateBlock, Bytes: p.cert.Raw})...)
			if p.sealed != nil {
				again = append(again, pem.EncodeToMemory(p.sealed)...)
			}
		}
		if !bytes.Equal(again, text) {
			t.Error("it is not what is written")
		}
	})
}
