package keystore

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"airlock.dev/airlock"
)

// shred overwrites a file, if there is one, and removes it. What the storage
// keeps of overwritten blocks is beyond it.
func shred(path string) error {
	f, err := os.OpenFile(path, os.O_WRONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("overwrite %s: %w", path, err)
	}
	defer f.Close()
	if err := overwrite(f); err != nil {
		return fmt.Errorf("overwrite %s: %w", path, err)
	}
	if err := os.Remove(path); err != nil {
		return fmt.Errorf("remove %s: %w", path, err)
	}
	return syncDir(filepath.Dir(path))
}

func overwrite(f *os.File) error {
	info, err := f.Stat()
	if err != nil {
		return err
	}
	if !info.Mode().IsRegular() {
		return errors.New("it is no regular file")
	}
	zeros := make([]byte, 64<<10)
	for at := int64(0); at < info.Size(); at += int64(len(zeros)) {
		if _, err := f.WriteAt(zeros[:min(int64(len(zeros)), info.Size()-at)], at); err != nil {
			return err
		}
	}
	return f.Sync()
}

// replace puts text at path, whole or not at all, and overwrites what was
// there before. It returns when that is durable.
func replace(path string, text []byte, step func(string)) error {
	half := path + ".new"
	if err := shred(half); err != nil {
		return err
	}
	f, err := os.OpenFile(half, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return fmt.Errorf("replace %s: %w", path, err)
	}
	_, err = f.Write(text)
	if err := errors.Join(err, f.Sync(), f.Close()); err != nil {
		return errors.Join(fmt.Errorf("write %s: %w", half, err), shred(half))
	}
	step("replace written")
	// The two names are exchanged, so that the old text stays reachable to be
	// overwritten even after a crash at any point.
	err = unix.Renameat2(unix.AT_FDCWD, half, unix.AT_FDCWD, path, unix.RENAME_EXCHANGE)
	switch {
	case errors.Is(err, fs.ErrNotExist): // the first one
		err = os.Rename(half, path)
	case errors.Is(err, unix.EINVAL), errors.Is(err, unix.ENOSYS), errors.Is(err, unix.EOPNOTSUPP):
		return replaceUnexchanged(half, path)
	}
	if err != nil {
		return errors.Join(fmt.Errorf("replace %s: %w", path, err), shred(half))
	}
	step("replace exchanged")
	if err := syncDir(filepath.Dir(path)); err != nil {
		return err
	}
	step("replace synced")
	return shred(half)
}

// replaceUnexchanged is for file systems that cannot exchange names: a crash
// at the wrong moment leaves the old text in free blocks.
func replaceUnexchanged(half, path string) error {
	old, err := os.OpenFile(path, os.O_WRONLY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return fmt.Errorf("replace %s: %w", path, err)
	}
	defer old.Close()
	if err := os.Rename(half, path); err != nil {
		return errors.Join(fmt.Errorf("replace %s: %w", path, err), shred(half))
	}
	if err := syncDir(filepath.Dir(path)); err != nil {
		return err
	}
	if err := overwrite(old); err != nil {
		return fmt.Errorf("overwrite the %s before: %w", path, err)
	}
	return nil
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return fmt.Errorf("sync directory: %w", err)
	}
	defer d.Close()
	if err := d.Sync(); err != nil {
		return fmt.Errorf("sync directory %s: %w", dir, err)
	}
	return nil
}

// privateDir makes a directory for its owner only, or checks that it is so.
func privateDir(dir string) error {
	err := os.Mkdir(dir, 0o700)
	switch {
	case err == nil:
		return syncDir(filepath.Dir(dir))
	case !errors.Is(err, fs.ErrExist):
		return fmt.Errorf("make the directory of keys: %w", err)
	}
	info, err := os.Stat(dir)
	if err != nil {
		return fmt.Errorf("look at the directory of keys: %w", err)
	}
	if !info.IsDir() {
		return airlock.Invalidf("--keys-dir", "give a directory", "%s is not a directory", dir)
	}
	if info.Mode().Perm()&0o077 != 0 {
		return airlock.Invalidf("--keys-dir", fmt.Sprintf("chmod 0700 %s", dir), "others can enter the directory of keys: %s has mode %04o", dir, info.Mode().Perm())
	}
	return nil
}

// lockWait is how long a process that ends may keep the next one waiting.
const lockWait = 2 * time.Second

// lock makes this the one process that uses the keys of a directory.
func lock(ctx context.Context, path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open the lock of the keys: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, lockWait)
	defer cancel()
	for {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			return f, nil
		}
		if !errors.Is(err, unix.EWOULDBLOCK) && !errors.Is(err, unix.EINTR) {
			f.Close()
			return nil, fmt.Errorf("lock the keys: %w", err)
		}
		select {
		case <-time.After(20 * time.Millisecond):
		case <-ctx.Done():
			f.Close()
			return nil, &airlock.Error{Code: airlock.Conflict, Message: fmt.Sprintf("another process uses the keys in %s", filepath.Dir(path)), Hint: "stop the server first", Err: err}
		}
	}
}
