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

func TestAddKeepsOurUsers(t *testing.T) {
	needRoot(t)
	root, theirs := t.TempDir(), filepath.Join(t.TempDir(), "passwd.master")
	const ours = "root:x:0:0:root:/root:/bin/bash\nuser:x:1000:1000:user:/home/user:/bin/bash\n"
	for name, text := range map[string]string{theirs: "root:*:7:7:no:/:/bin/no\nman:*:6:12:man:/var/cache/man:/usr/sbin/nologin\nnone\nuser:*:7:7::/:\n", filepath.Join(root, "passwd"): ours} {
		if err := os.WriteFile(name, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	b := builder{root: root, uid: 5000}
	b.add("/passwd", theirs)
	b.add("/passwd", theirs+".none")
	got, err := os.ReadFile(filepath.Join(root, "passwd"))
	if b.err != nil || err != nil {
		t.Fatal(b.err, err)
	}
	if diff := cmp.Diff(ours+"man:*:6:12:man:/var/cache/man:/usr/sbin/nologin\n", string(got)); diff != "" {
		t.Error(diff)
	}
}
