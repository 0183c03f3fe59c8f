package sealed

import (
	"encoding/pem"
	"os"
	"path/filepath"
	"testing"
)

func TestReplace(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "file")
	const text = "-----BEGIN A-----\nYQ==\n-----END A-----\n-----BEGIN B-----\nYg==\n-----END B-----\n"
	for _, blocks := range [][]*pem.Block{{{Type: "C"}}, {{Type: "A", Bytes: []byte("a")}, {Type: "B", Bytes: []byte("b")}}} {
		if err := Replace(path, 0o640, blocks...); err != nil {
			t.Fatal(err)
		}
	}
	if got, err := os.ReadFile(path); err != nil || string(got) != text {
		t.Errorf("%q, %v", got, err)
	}
	if info, err := os.Stat(path); err != nil || info.Mode() != 0o640 {
		t.Errorf("mode: %v, %v", info, err)
	}
	// What fails leaves what was there, and no half.
	if err := Replace(path, 0o600, &pem.Block{Type: "A", Headers: map[string]string{"a:b": ""}}); err == nil {
		t.Error("a block that cannot be written was")
	}
	if err := os.Mkdir(filepath.Join(dir, "taken"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := Replace(filepath.Join(dir, "taken"), 0o600, &pem.Block{Type: "A"}); err == nil {
		t.Error("a directory was replaced")
	}
	if got, err := os.ReadFile(path); err != nil || string(got) != text {
		t.Errorf("after a failure: %q, %v", got, err)
	}
	if halves, err := filepath.Glob(filepath.Join(dir, Halves+"*")); err != nil || len(halves) != 0 {
		t.Errorf("left: %v, %v", halves, err)
	}
}

func TestSerial(t *testing.T) {
	seen := map[string]bool{}
	for range 1000 {
		n := Serial()
		if n.Sign() != 1 || n.BitLen() > 127 || seen[n.String()] {
			t.Fatalf("serial number %v", n)
		}
		seen[n.String()] = true
	}
}
