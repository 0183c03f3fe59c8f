package keystore

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"testing"
)

// What is replaced or removed is overwritten first, which a descriptor from
// before sees.
func TestOverwritten(t *testing.T) {
	for name, end := range map[string]func(path string) error{
		"replaced": func(path string) error { return replace(path, []byte("new"), func(string) {}) },
		"replaced without an exchange": func(path string) error {
			return errors.Join(os.WriteFile(path+".new", []byte("new"), 0o600), replaceUnexchanged(path+".new", path))
		},
		"removed": shred,
	} {
		path := filepath.Join(t.TempDir(), "file")
		secret := bytes.Repeat([]byte("secret"), 20_000) // more than is written at one time
		if err := os.WriteFile(path, secret, 0o600); err != nil {
			t.Fatal(err)
		}
		before, err := os.Open(path)
		if err != nil {
			t.Fatal(err)
		}
		defer before.Close()
		if err := end(path); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		left := make([]byte, len(secret)+1)
		if n, _ := before.ReadAt(left, 0); n != len(secret) || !bytes.Equal(left[:n], make([]byte, n)) {
			t.Errorf("%s: %d bytes are left: %.20q", name, n, left)
		}
		now, err := os.ReadFile(path)
		if name == "removed" && !os.IsNotExist(err) || name != "removed" && string(now) != "new" {
			t.Errorf("%s: %q, %v", name, now, err)
		}
		if _, err := os.Stat(path + ".new"); !os.IsNotExist(err) {
			t.Errorf("%s: a half is left: %v", name, err)
		}
	}
	// A link leads to nothing of ours.
	dir := t.TempDir()
	if err := errors.Join(os.WriteFile(dir+"/mine", []byte("x"), 0o600), os.Symlink("mine", dir+"/link")); err != nil {
		t.Fatal(err)
	}
	if err := shred(dir + "/link"); err == nil {
		t.Error("a link was followed")
	}
}
