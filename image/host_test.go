package image

import (
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// The image as a whole is tested where it runs: isolation/gvisor.

func needRoot(t *testing.T) {
	t.Helper()
	if os.Geteuid() == 0 {
		return
	}
	if os.Getenv("CI") == "true" {
		t.Fatal("CI must run as root: images have owners")
	}
	t.Skip("gives files to other users, and needs root")
}

func TestCopyTakesWhatAllMayRead(t *testing.T) {
	needRoot(t)
	src, dst := t.TempDir(), t.TempDir()
	for name, mode := range map[string]fs.FileMode{
		"open": 0o644, "program": 0o755, "secret": 0o600, "group": 0o640, "dir/open": 0o444, "private/open": 0o644, "listed/open": 0o644,
	} {
		path := filepath.Join(src, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(name), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(path, mode); err != nil {
			t.Fatal(err)
		}
	}
	for name, mode := range map[string]fs.FileMode{"": 0o755, "private": 0o700, "listed": 0o744} {
		if err := os.Chmod(filepath.Join(src, name), mode); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink("/etc/shadow", filepath.Join(src, "link")); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(filepath.Join(src, "open"), maxEtcFile+1); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Mkfifo(filepath.Join(src, "fifo"), 0o666); err != nil {
		t.Fatal(err)
	}
	b := builder{root: dst, uid: 5000}
	b.copy(src)
	if b.err != nil {
		t.Fatal(b.err)
	}
	got := map[string]string{}
	err := filepath.WalkDir(filepath.Join(dst, src), func(path string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := e.Info()
		if err != nil {
			return err
		}
		if uid := info.Sys().(*syscall.Stat_t).Uid; uid != 5000 {
			t.Errorf("%s belongs to %d", path, uid)
		}
		got[strings.TrimPrefix(strings.TrimPrefix(path, filepath.Join(dst, src)), "/")] = info.Mode().String()
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]string{"": "drwxr-xr-x", "program": "-rwxr-xr-x", "dir": "drwxr-xr-x", "dir/open": "-rw-r--r--", "link": "Lrwxrwxrwx"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

// A half-made image is removed without what is mounted in it: this is how a
// host's /usr would be lost.
func TestDiscardKeepsWhatIsMounted(t *testing.T) {
	needRoot(t)
	kept, root := t.TempDir(), filepath.Join(t.TempDir(), "image")
	if err := os.WriteFile(filepath.Join(kept, "file"), []byte("kept"), 0o644); err != nil {
		t.Fatal(err)
	}
	for range 2 { // twice in one place, as after two crashes
		if err := os.MkdirAll(filepath.Join(root, "usr"), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := syscall.Mount(kept, filepath.Join(root, "usr"), "", syscall.MS_BIND, ""); err != nil {
			t.Fatal(err)
		}
	}
	if err := discard(root); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Lstat(root); !os.IsNotExist(err) {
		t.Errorf("the image is left: %v", err)
	}
	if data, err := os.ReadFile(filepath.Join(kept, "file")); err != nil || string(data) != "kept" {
		t.Errorf("what was mounted: %q, %v", data, err)
	}
}
