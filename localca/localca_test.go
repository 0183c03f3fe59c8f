package localca

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"os"
	"path/filepath"
	"testing"
	"time"

	"airlock.dev/airlock"
)

const domain = "box.localhost"

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
	c, err := Open(t.TempDir(), domain)
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
	c, err := Open(t.TempDir(), domain)
	if err != nil {
		t.Fatal(err)
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	der, err := x509.CreateCertificate(rand.Reader, &x509.Certificate{
		SerialNumber: serial(), NotAfter: time.Now().Add(time.Hour), DNSNames: []string{"example.com"},
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
	if _, err := Open(dir, domain); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]os.FileMode{"ca-key.pem": 0o600, "ca.pem": 0o644} {
		if info, err := os.Stat(filepath.Join(dir, name)); err != nil || info.Mode() != want {
			t.Errorf("%s: %v, %v", name, info.Mode(), err)
		}
	}
	first := read()
	c, err := Open(dir, domain)
	if err != nil || !bytes.Equal(read(), first) {
		t.Errorf("it is made once: %v", err)
	}
	cert, err := c.GetCertificate(nil)
	if err != nil || verify(t, c, cert.Leaf, domain) != nil {
		t.Errorf("after it was read: %v", err)
	}
	if _, err := Open(dir, "other.test"); err != nil || bytes.Equal(read(), first) {
		t.Errorf("another domain has another: %v", err)
	}
	if err := os.WriteFile(filepath.Join(dir, "ca-key.pem"), []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(dir, "other.test"); airlock.CodeOf(err) != airlock.Invalid {
		t.Errorf("a broken key: %v", err)
	}
}

func TestRenewal(t *testing.T) {
	now := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	c, err := open(t.TempDir(), domain, func() time.Time { return now })
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
