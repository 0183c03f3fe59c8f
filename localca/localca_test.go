package localca

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
	"os"
	"path/filepath"
	"testing"
	"time"

	"airlock.dev/airlock"
	"airlock.dev/airlock/sealed"
)

const domain = "box.localhost"

// safe seals as the keystore does, with one key.
type safe struct{ aead cipher.AEAD }

func newSafe() safe {
	key := make([]byte, 32)
	rand.Read(key)
	block, err := aes.NewCipher(key)
	if err != nil {
		panic(err)
	}
	aead, err := cipher.NewGCMWithRandomNonce(block)
	if err != nil {
		panic(err)
	}
	return safe{aead}
}

func (s safe) Seal(_ context.Context, name string, plaintext, ad []byte) ([]byte, error) {
	return s.aead.Seal(nil, nil, plaintext, append([]byte(name), ad...)), nil
}

func (s safe) Unseal(_ context.Context, name string, sealed, ad []byte) ([]byte, error) {
	return s.aead.Open(nil, nil, sealed, append([]byte(name), ad...))
}

func verify(t *testing.T, c *CA, leaf *x509.Certificate, name string) error {
	t.Helper()
	pool := x509.NewCertPool()
	text, err := os.ReadFile(c.CertFile)
	if err != nil || !pool.AppendCertsFromPEM(text) {
		t.Fatalf("the file to trust: %v", err)
	}
	_, err = leaf.Verify(x509.VerifyOptions{DNSName: name, Roots: pool, CurrentTime: c.now()})
	return err
}

func TestNames(t *testing.T) {
	c, err := Open(t.Context(), t.TempDir(), domain, newSafe())
	if err != nil {
		t.Fatal(err)
	}
	cert, err := c.GetCertificate(nil)
	if err != nil {
		t.Fatal(err)
	}
	for name, good := range map[string]bool{
		domain: true, "api." + domain: true, "8000-iabc." + domain: true, "localhost": true, "127.0.0.1": true, "::1": true,
		"a.b." + domain: false, "localhost.example": false, "example.com": false, "127.0.0.2": false, "10.0.0.1": false,
	} {
		if err := verify(t, c, cert.Leaf, name); (err == nil) != good {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// Whoever trusts the authority trusts it for nothing else.
func TestConstraints(t *testing.T) {
	c, err := Open(t.Context(), t.TempDir(), domain, newSafe())
	if err != nil {
		t.Fatal(err)
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	der, err := x509.CreateCertificate(rand.Reader, &x509.Certificate{
		SerialNumber: sealed.Serial(), NotAfter: time.Now().Add(time.Hour), DNSNames: []string{"example.com"},
	}, c.cert, key.Public(), c.key)
	if err != nil {
		t.Fatal(err)
	}
	leaf, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	if err := verify(t, c, leaf, "example.com"); err == nil {
		t.Error("it vouches for example.com")
	}
}

func TestFiles(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "tls")
	read := func() []byte {
		text, err := os.ReadFile(filepath.Join(dir, "ca.pem"))
		if err != nil {
			t.Fatal(err)
		}
		return text
	}
	keep := newSafe()
	if _, err := Open(t.Context(), dir, domain, keep); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]os.FileMode{"ca-key.sealed": 0o600, "ca.pem": 0o644} {
		if info, err := os.Stat(filepath.Join(dir, name)); err != nil || info.Mode() != want {
			t.Errorf("%s: %v, %v", name, info.Mode(), err)
		}
	}
	first := read()
	c, err := Open(t.Context(), dir, domain, keep)
	if err != nil || !bytes.Equal(read(), first) {
		t.Errorf("it is made once: %v", err)
	}
	cert, err := c.GetCertificate(nil)
	if err != nil || verify(t, c, cert.Leaf, domain) != nil {
		t.Errorf("after it was read: %v", err)
	}
	if _, err := Open(t.Context(), dir, "other.test", keep); err != nil || bytes.Equal(read(), first) {
		t.Errorf("another domain has another: %v", err)
	}
	if err := os.WriteFile(filepath.Join(dir, "ca-key.sealed"), []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(t.Context(), dir, "other.test", keep); airlock.CodeOf(err) != airlock.Invalid {
		t.Errorf("a broken key: %v", err)
	}
}

// clearDir is a directory as earlier versions left it, with the key in clear.
func clearDir(t *testing.T) (dir string, cert, key []byte) {
	t.Helper()
	dir = t.TempDir()
	c, err := Open(t.Context(), dir, domain, newSafe())
	if err != nil {
		t.Fatal(err)
	}
	if key, err = x509.MarshalECPrivateKey(c.key); err != nil {
		t.Fatal(err)
	}
	if err := sealed.Replace(filepath.Join(dir, "ca-key.pem"), 0o600, &pem.Block{Type: "EC PRIVATE KEY", Bytes: key}); err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(filepath.Join(dir, "ca-key.sealed")); err != nil {
		t.Fatal(err)
	}
	cert, err = os.ReadFile(filepath.Join(dir, "ca.pem"))
	if err != nil {
		t.Fatal(err)
	}
	return dir, cert, key
}

// A key that was in clear is sealed at the next start; the authority stays.
func TestClearKeyIsSealed(t *testing.T) {
	dir, cert, key := clearDir(t)
	clearFile := filepath.Join(dir, "ca-key.pem")
	half := filepath.Join(dir, ".new-123")
	text, err := os.ReadFile(clearFile)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(half, text, 0o600); err != nil {
		t.Fatal(err)
	}
	open := map[string]*os.File{clearFile: nil, half: nil}
	for name := range open {
		if open[name], err = os.Open(name); err != nil {
			t.Fatal(err)
		}
		defer open[name].Close()
	}
	keep := newSafe()
	c, err := Open(t.Context(), dir, domain, keep)
	if err != nil {
		t.Fatal(err)
	}
	if got, _ := os.ReadFile(c.CertFile); !bytes.Equal(got, cert) {
		t.Error("the authority is another one")
	}
	if got, _ := x509.MarshalECPrivateKey(c.key); !bytes.Equal(got, key) {
		t.Error("the key is another one")
	}
	// What the removed files hold is seen through descriptors from before.
	for name, f := range open {
		if _, err := os.Stat(name); !os.IsNotExist(err) {
			t.Errorf("%s is still there: %v", name, err)
		}
		left := make([]byte, len(text)+1)
		n, _ := f.ReadAt(left, 0)
		if n != len(text) || !bytes.Equal(left[:n], make([]byte, n)) {
			t.Errorf("%s was not overwritten: %q", name, left[:n])
		}
	}
	noKeyIn(t, dir, key)
	if again, err := Open(t.Context(), dir, domain, keep); err != nil || !again.key.Equal(c.key) {
		t.Errorf("the start after that: %v", err)
	}
	if _, err := Open(t.Context(), dir, domain, newSafe()); airlock.CodeOf(err) != airlock.Invalid {
		t.Errorf("with another key to unseal: %v", err)
	}
}

// A crash between sealing and overwriting leaves both files.
func TestClearKeyBesideSealedOne(t *testing.T) {
	dir, cert, key := clearDir(t)
	text, err := os.ReadFile(filepath.Join(dir, "ca-key.pem"))
	if err != nil {
		t.Fatal(err)
	}
	keep := newSafe()
	if _, err := Open(t.Context(), dir, domain, keep); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "ca-key.pem"), text, 0o600); err != nil {
		t.Fatal(err)
	}
	c, err := Open(t.Context(), dir, domain, keep)
	if err != nil {
		t.Fatal(err)
	}
	if got, _ := os.ReadFile(c.CertFile); !bytes.Equal(got, cert) {
		t.Error("the authority is another one")
	}
	noKeyIn(t, dir, key)
}

func noKeyIn(t *testing.T, dir string, key []byte) {
	t.Helper()
	files, err := os.ReadDir(dir)
	if err != nil || len(files) != 2 {
		t.Errorf("files: %v, %v", files, err)
	}
	for _, f := range files {
		text, err := os.ReadFile(filepath.Join(dir, f.Name()))
		if err != nil {
			t.Fatal(err)
		}
		der, _ := pem.Decode(text)
		if der == nil || bytes.Contains(der.Bytes, key[10:40]) {
			t.Errorf("%s holds the key in clear", f.Name())
		}
	}
}

func TestRenewal(t *testing.T) {
	now := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	c, err := open(t.Context(), t.TempDir(), domain, newSafe(), func() time.Time { return now })
	if err != nil {
		t.Fatal(err)
	}
	first, _ := c.GetCertificate(nil)
	now = now.Add(59 * 24 * time.Hour)
	if again, _ := c.GetCertificate(nil); again != first {
		t.Error("renewed with 31 days left")
	}
	now = now.Add(2 * 24 * time.Hour)
	second, err := c.GetCertificate(nil)
	if err != nil || second == first || verify(t, c, second.Leaf, domain) != nil {
		t.Errorf("with 29 days left: %v", err)
	}
}
