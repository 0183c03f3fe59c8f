package control

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"airlock.dev/airlock"
	"airlock.dev/airlock/policy"
)

// keptCopy is a copy of the last directory of policies that loaded. Beside it
// are, while it is replaced, the copy that follows (.next) and the one before
// (.old): at every moment one of the three is whole, and the next server finds
// the newest that is.
type keptCopy struct{ at string }

// digestFile has the digest of the files in a copy. Load passes over what
// begins with a dot.
const digestFile = ".digest"

func (k keptCopy) next() string { return k.at + ".next" }
func (k keptCopy) old() string  { return k.at + ".old" }

// exists says whether there is a copy, whole or not.
func (k keptCopy) exists() bool {
	for _, at := range []string{k.at, k.next(), k.old()} {
		if _, err := os.Lstat(at); err == nil {
			return true
		}
	}
	return false
}

// load reads the copy. A file that was lost or changed refuses all of it. The
// error is fs.ErrNotExist if there is no copy.
func (k keptCopy) load() (*policy.Policies, error) {
	if err := k.settle(); err != nil {
		return nil, err
	}
	return loadCopy(k.at)
}

func loadCopy(dir string) (*policy.Policies, error) {
	if _, err := os.Lstat(dir); err != nil {
		return nil, fmt.Errorf("load the copy of the policies: %w", err)
	}
	want, err := os.ReadFile(filepath.Join(dir, digestFile))
	if err != nil {
		return nil, unfit(dir, "has no digest: "+err.Error())
	}
	p, err := policy.Load(policy.Dir(dir))
	if err != nil {
		return nil, unfit(dir, "does not load").Because(err)
	}
	if got := p.Digest(); got != strings.TrimSuffix(string(want), "\n") {
		return nil, unfit(dir, "is not what was kept: its digest is "+got)
	}
	return p, nil
}

func unfit(dir, what string) *airlock.Error {
	return &airlock.Error{Code: airlock.Invalid, Field: "policies", Message: fmt.Sprintf("the copy of the policies in %s %s", dir, what), Hint: "correct the directory given with --policies, from which the copy is made anew"}
}

// settle ends a replacement that was cut short.
func (k keptCopy) settle() error {
	if _, err := os.Lstat(k.at); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	from := k.next()
	if _, err := loadCopy(from); err != nil {
		from = k.old()
	}
	if err := os.Rename(from, k.at); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("restore the copy of the policies: %w", err)
	}
	return syncDir(filepath.Dir(k.at))
}

// write replaces the copy by exactly the files that p was loaded from.
func (k keptCopy) write(p *policy.Policies) error {
	for _, step := range k.steps(p) {
		if err := step(); err != nil {
			return fmt.Errorf("copy the policies: %w", err)
		}
	}
	return nil
}

// steps are those of write. After each of them, and within each, the power may
// fail.
func (k keptCopy) steps(p *policy.Policies) []func() error {
	parent := func() error { return syncDir(filepath.Dir(k.at)) }
	return []func() error{
		k.settle,
		func() error { return os.RemoveAll(k.next()) },
		func() error { return os.RemoveAll(k.old()) },
		func() error { return writeCopy(k.next(), p) },
		parent,
		func() error {
			if err := os.Rename(k.at, k.old()); !errors.Is(err, fs.ErrNotExist) {
				return err
			}
			return nil
		},
		parent,
		func() error { return os.Rename(k.next(), k.at) },
		parent,
		func() error { return os.RemoveAll(k.old()) },
	}
}

// writeCopy makes a directory, durably.
func writeCopy(dir string, p *policy.Policies) error {
	dirs := []string{dir}
	if err := os.Mkdir(dir, 0o700); err != nil {
		return err
	}
	for name, text := range p.Files() {
		path := filepath.Join(dir, filepath.FromSlash(name))
		if parent := filepath.Dir(path); !slices.Contains(dirs, parent) {
			if err := os.Mkdir(parent, 0o700); err != nil {
				return err
			}
			dirs = append(dirs, parent)
		}
		if err := writeSynced(path, text); err != nil {
			return err
		}
	}
	if err := writeSynced(filepath.Join(dir, digestFile), []byte(p.Digest()+"\n")); err != nil {
		return err
	}
	for _, d := range slices.Backward(dirs) {
		if err := syncDir(d); err != nil {
			return err
		}
	}
	return nil
}

func writeSynced(path string, text []byte) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(text)
	if err == nil {
		err = f.Sync()
	}
	return errors.Join(err, f.Close())
}

// syncDir makes the names in a directory durable.
func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}
