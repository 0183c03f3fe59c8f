//go:build cgo

package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/miekg/pkcs11"

	"airlock.dev/airlock"
	"airlock.dev/airlock/keystore"
)

// modules are where distributions put SoftHSM.
var modules = []string{
	"/usr/lib/softhsm/libsofthsm2.so",
	"/usr/lib/x86_64-linux-gnu/softhsm/libsofthsm2.so",
	"/usr/lib/aarch64-linux-gnu/softhsm/libsofthsm2.so",
	"/usr/lib64/softhsm/libsofthsm.so",
	"/usr/lib64/pkcs11/libsofthsm2.so",
}

const pin = "98765432"

// softHSM makes a token with keys in it and returns its module.
func softHSM(t *testing.T) (module string) {
	t.Helper()
	for _, m := range modules {
		if _, err := os.Stat(m); err == nil {
			module = m
		}
	}
	if module == "" {
		t.Skip("SoftHSM is not installed: apt-get install softhsm2")
	}
	dir := t.TempDir()
	if err := errors.Join(os.Mkdir(dir+"/tokens", 0o700),
		os.WriteFile(dir+"/softhsm2.conf", []byte("directories.tokendir = "+dir+"/tokens\nobjectstore.backend = file\nlog.level = ERROR\n"), 0o600)); err != nil {
		t.Fatal(err)
	}
	t.Setenv("SOFTHSM2_CONF", dir+"/softhsm2.conf")
	c := pkcs11.New(module)
	if c == nil {
		t.Fatalf("%s cannot be loaded", module)
	}
	defer c.Destroy()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(c.Initialize())
	defer c.Finalize()
	slots, err := c.GetSlotList(false)
	must(err)
	must(c.InitToken(slots[0], "11111111", "airlock test"))
	slots, err = c.GetSlotList(true)
	must(err)
	for _, slot := range slots {
		info, err := c.GetTokenInfo(slot)
		must(err)
		if info.Label != "airlock test" {
			continue
		}
		s, err := c.OpenSession(slot, pkcs11.CKF_SERIAL_SESSION|pkcs11.CKF_RW_SESSION)
		must(err)
		must(c.Login(s, pkcs11.CKU_SO, "11111111"))
		must(c.InitPIN(s, pin))
		must(c.Logout(s))
		must(c.Login(s, pkcs11.CKU_USER, pin))
		for _, k := range []struct {
			label       string
			id          byte
			length      int
			extractable bool
		}{{"root", 1, 32, false}, {"next", 2, 32, false}, {"loose", 3, 32, true}, {"short", 4, 16, false}, {"twin", 5, 32, false}, {"twin", 6, 32, false}} {
			_, err := c.GenerateKey(s, []*pkcs11.Mechanism{pkcs11.NewMechanism(pkcs11.CKM_AES_KEY_GEN, nil)}, []*pkcs11.Attribute{
				pkcs11.NewAttribute(pkcs11.CKA_TOKEN, true), pkcs11.NewAttribute(pkcs11.CKA_LABEL, k.label), pkcs11.NewAttribute(pkcs11.CKA_ID, []byte{k.id}),
				pkcs11.NewAttribute(pkcs11.CKA_VALUE_LEN, k.length), pkcs11.NewAttribute(pkcs11.CKA_SENSITIVE, true), pkcs11.NewAttribute(pkcs11.CKA_EXTRACTABLE, k.extractable),
				pkcs11.NewAttribute(pkcs11.CKA_ENCRYPT, true), pkcs11.NewAttribute(pkcs11.CKA_DECRYPT, true), pkcs11.NewAttribute(pkcs11.CKA_PRIVATE, true),
			})
			must(err)
		}
		return module
	}
	t.Fatal("the token is not there")
	return ""
}

func TestRootInAToken(t *testing.T) {
	module := softHSM(t)
	dir := t.TempDir()
	helper := filepath.Join(dir, "airlock-pkcs11")
	if out, err := exec.Command("go", "build", "-o", helper, ".").CombinedOutput(); err != nil {
		t.Fatalf("build: %v\n%s", err, out)
	}
	pinFile := filepath.Join(dir, "pin")
	if err := os.WriteFile(pinFile, []byte(pin+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	uri := func(key string) string {
		return fmt.Sprintf("pkcs11:token=airlock%%20test;%s;type=secret-key?module-path=%s&pin-source=file:%s", key, module, pinFile)
	}
	cfg := keystore.Config{DataDir: filepath.Join(dir, "data"), Root: uri("object=root"), TokenHelper: helper}
	open := func(root string) (*keystore.Keystore, error) {
		cfg := cfg
		cfg.Root = root
		return keystore.Open(t.Context(), cfg)
	}
	for key, says := range map[string]string{
		"object=none": "exactly one", "object=twin": "exactly one", "object=loose": "can leave its token", "object=short": "no AES-256 key",
	} {
		if _, err := open(uri(key)); airlock.CodeOf(err) != airlock.Unavailable || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %v, want %q", key, err, says)
		}
	}
	if _, err := open(strings.ReplaceAll(cfg.Root, "airlock%20test", "other")); airlock.CodeOf(err) != airlock.Unavailable || !strings.Contains(err.Error(), "0 tokens") {
		t.Errorf("another token: %v", err)
	}
	k, err := open(cfg.Root)
	if err != nil {
		t.Fatal(err)
	}
	sealed, err := k.SealFor(t.Context(), "customer:42", []byte("text"), nil)
	if err != nil {
		t.Fatal(err)
	}
	reads := func() {
		t.Helper()
		if text, err := k.OpenSealed(t.Context(), sealed, nil); err != nil || string(text) != "text" {
			t.Errorf("open: %q, %v", text, err)
		}
		if err := k.Close(); err != nil {
			t.Fatal(err)
		}
	}
	reads()
	// The same key by its id; and one of two twins, which is another key.
	if k, err = open(uri("id=%01")); err != nil {
		t.Fatal(err)
	}
	reads()
	if _, err := open(uri("object=next")); airlock.CodeOf(err) != airlock.Conflict || !strings.Contains(err.Error(), "does not open the keyring") {
		t.Errorf("another key of the token: %v", err)
	}
	if err := os.Chmod(pinFile, 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := open(cfg.Root); airlock.CodeOf(err) != airlock.Unavailable || !strings.Contains(err.Error(), "others can read the PIN") {
		t.Errorf("an open PIN: %v", err)
	}
	if err := errors.Join(os.Chmod(pinFile, 0o600), os.WriteFile(pinFile, []byte("wrong"), 0o600)); err != nil {
		t.Fatal(err)
	}
	if _, err := open(cfg.Root); airlock.CodeOf(err) != airlock.Unavailable || strings.Contains(err.Error(), "wrong") {
		t.Errorf("a wrong PIN: %v", err)
	}
	if err := os.WriteFile(pinFile, []byte(pin), 0o600); err != nil {
		t.Fatal(err)
	}
	// From one key of the token to another, and out to a file.
	for _, to := range []string{uri("object=next"), "file:" + filepath.Join(dir, "root.key")} {
		if k, err = open(cfg.Root); err != nil {
			t.Fatal(err)
		}
		if err := k.RotateRoot(t.Context(), to); err != nil {
			t.Fatal(err)
		}
		reads()
		if _, err := open(cfg.Root); airlock.CodeOf(err) != airlock.Conflict {
			t.Errorf("with the old root key: %v", err)
		}
		cfg.Root = to
		if k, err = open(to); err != nil {
			t.Fatal(err)
		}
		reads()
	}
}

func TestRequests(t *testing.T) {
	for text, says := range map[string]string{
		"":                                "decode",
		"{":                               "decode",
		`{"op":"export"}`:                 "no operation",
		`{"op":"wrap","shell":"x"}`:       "unknown field",
		`{"op":"wrap"}`:                   "cannot be loaded",
		strings.Repeat(" ", 70000) + "{}": "more than",
	} {
		if _, err := serve(strings.NewReader(text)); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%.40q: %v, want %q", text, err, says)
		}
	}
}
