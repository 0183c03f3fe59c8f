// Package sealed puts the private keys of certificate authorities into files:
// encrypted by whoever keeps keys, and replaced whole or not at all.
//
// It knows nothing of what the authorities are for.
package sealed

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"math/big"
	"os"
	"path/filepath"
)

// Keeper encrypts a key with one that is kept elsewhere.
type Keeper interface {
	// Seal encrypts plaintext under a name; ad is bound to it.
	Seal(ctx context.Context, name string, plaintext, ad []byte) ([]byte, error)
	// Unseal is its inverse, and fails for anything that it did not seal.
	Unseal(ctx context.Context, name string, sealed, ad []byte) ([]byte, error)
}

// The kinds of PEM blocks that are in the files.
const (
	KeyBlock         = "AIRLOCK SEALED KEY"
	CertificateBlock = "CERTIFICATE"
)

// Halves is how the names of files begin that a crash left half written.
const Halves = ".new-"

// Key returns the block of a sealed private key.
func Key(ctx context.Context, keep Keeper, name string, key, ad []byte) (*pem.Block, error) {
	text, err := keep.Seal(ctx, name, key, ad)
	if err != nil {
		return nil, err
	}
	return &pem.Block{Type: KeyBlock, Bytes: text}, nil
}

// Replace writes blocks to path and returns when they are durable. A crash
// leaves what was there before.
func Replace(path string, mode fs.FileMode, blocks ...*pem.Block) error {
	var text bytes.Buffer
	for _, b := range blocks {
		if err := pem.Encode(&text, b); err != nil {
			return fmt.Errorf("encode %s: %w", path, err)
		}
	}
	f, err := os.CreateTemp(filepath.Dir(path), Halves) // with mode 0600
	if err != nil {
		return fmt.Errorf("replace %s: %w", path, err)
	}
	defer os.Remove(f.Name())
	_, err = f.Write(text.Bytes())
	if err = errors.Join(err, f.Chmod(mode), f.Sync(), f.Close()); err != nil {
		return fmt.Errorf("replace %s: %w", path, err)
	}
	if err := os.Rename(f.Name(), path); err != nil {
		return fmt.Errorf("replace %s: %w", path, err)
	}
	return SyncDir(filepath.Dir(path))
}

// SyncDir makes the names in a directory durable.
func SyncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return fmt.Errorf("sync directory: %w", err)
	}
	return errors.Join(d.Sync(), d.Close())
}

// Serial returns a random serial number of at most 16 octets, over zero.
func Serial() *big.Int {
	var b [16]byte
	rand.Read(b[:]) // never fails
	b[0] &= 0x7f
	b[15] |= 1
	return new(big.Int).SetBytes(b[:])
}
