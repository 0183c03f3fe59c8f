package wal

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"airlock.dev/airlock"
	"golang.org/x/sys/unix"
)

// disk is the directory of one log. It is an interface so that tests can let
// every single call fail, or cut the power.
type disk interface {
	names() ([]string, error)
	open(name string) (file, error)
	create(name string) (file, error) // empties a file that there is
	rename(from, to string) error
	remove(name string) error
	sync() error // of the directory: names that were made, changed, removed
}

type file interface {
	io.ReaderAt
	io.WriterAt
	io.Closer
	size() (int64, error)
	allocate(size int64) error
	datasync() error
}

type osDisk string

func (d osDisk) names() ([]string, error) {
	entries, err := os.ReadDir(string(d))
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names, err
}

func (d osDisk) open(name string) (file, error) { return d.file(name, os.O_RDWR) }

func (d osDisk) create(name string) (file, error) {
	return d.file(name, os.O_RDWR|os.O_CREATE|os.O_TRUNC)
}

func (d osDisk) file(name string, flags int) (file, error) {
	f, err := os.OpenFile(filepath.Join(string(d), name), flags, 0o600)
	if err != nil {
		return nil, err
	}
	return osFile{f}, nil
}

func (d osDisk) rename(from, to string) error {
	return os.Rename(filepath.Join(string(d), from), filepath.Join(string(d), to))
}

func (d osDisk) remove(name string) error { return os.Remove(filepath.Join(string(d), name)) }

func (d osDisk) sync() error { return syncDir(string(d)) }

func syncDir(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	return f.Sync()
}

type osFile struct{ *os.File }

func (f osFile) size() (int64, error) {
	info, err := f.Stat()
	if err != nil {
		return 0, err
	}
	return info.Size(), nil
}

func (f osFile) allocate(size int64) error {
	err := retry(func() error { return unix.Fallocate(int(f.Fd()), 0, 0, size) })
	if errors.Is(err, unix.EOPNOTSUPP) {
		return nil // the zeros that are written next take the room
	}
	return os.NewSyscallError("fallocate", err)
}

func (f osFile) datasync() error {
	return os.NewSyscallError("fdatasync", retry(func() error { return unix.Fdatasync(int(f.Fd())) }))
}

func retry(call func() error) error {
	for {
		if err := call(); !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

// makeDir makes dir and what is missing above it. It syncs its name even if it
// was there: whoever made it may have died before doing so.
func makeDir(dir string) error {
	err := os.Mkdir(dir, 0o700)
	if errors.Is(err, os.ErrNotExist) {
		if err := makeDir(filepath.Dir(dir)); err != nil {
			return err
		}
		err = os.Mkdir(dir, 0o700)
	}
	if err != nil && !errors.Is(err, os.ErrExist) {
		return err
	}
	return syncDir(filepath.Dir(dir))
}

// lockDir makes dir if there is none and takes its lock, which ends with the
// process at the latest and is not inherited by children.
func lockDir(dir string) (io.Closer, error) {
	if err := makeDir(dir); err != nil {
		return nil, fmt.Errorf("make directory of write-ahead log: %w", err)
	}
	f, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open lock of write-ahead log: %w", err)
	}
	err = retry(func() error { return unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB) })
	if errors.Is(err, unix.EWOULDBLOCK) {
		f.Close()
		return nil, &airlock.Error{
			Code:    airlock.Conflict,
			Message: fmt.Sprintf("the write-ahead log in %s is in use by another process", dir),
			Hint:    "stop the other airlock server, or use another data directory",
		}
	}
	if err != nil {
		f.Close()
		return nil, fmt.Errorf("lock write-ahead log %s: %w", dir, os.NewSyscallError("flock", err))
	}
	return f, nil
}
