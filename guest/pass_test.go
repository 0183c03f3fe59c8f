package guest

import (
	"encoding/binary"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"airlock.dev/airlock"
	"airlock.dev/airlock/channel"
	"golang.org/x/sys/unix"
)

// startPassing is start with a home on a file system whose files are passed.
func startPassing(t *testing.T) *host {
	t.Helper()
	t.Setenv("TMPDIR", "/dev/shm")
	return start(t)
}

// holds says how many descriptors PID 1 has of files whose path begins so.
func (h *host) holds(prefix string) (n int) {
	fds, _ := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", h.pid))
	for _, fd := range fds {
		if target, err := os.Readlink(fd); err == nil && strings.HasPrefix(target, prefix) {
			n++
		}
	}
	return n
}

func (h *host) wantHeld(what, prefix string, want int) {
	h.t.Helper()
	wantSoon(h.t, what, func() error {
		if n := h.holds(prefix); n != want {
			return fmt.Errorf("PID 1 has %d descriptors of %s, want %d", n, prefix, want)
		}
		return nil
	})
}

// large is more than passFrom and a window together, and no round number.
var large = strings.Repeat("0123456789abcdef", 100_000) + "end"

func TestPassedFile(t *testing.T) {
	h := startPassing(t)
	for _, size := range []int{passFrom - 1, passFrom, passFrom + 1, len(large)} {
		if e, err := h.write("", "d/f", strings.NewReader(large[:size])); err != nil || e.Size != int64(size) || e.Owner != "user" || e.Mode != 0o644 {
			t.Fatalf("write of %d bytes: %+v, %v", size, e, err)
		}
		if got := readAll(t, h.home+"/d/f"); got != large[:size] {
			t.Fatalf("of %d bytes came %d", size, len(got))
		}
		if got, err := h.read(channel.ReadRequest{PathRequest: at("d/f")}); err != nil || got != large[:size] {
			t.Errorf("read %d bytes of %d: %v", len(got), size, err)
		}
	}
	for _, part := range []struct{ offset, length int }{
		{3, passFrom}, {3, passFrom + 1}, {7, 1_000_000}, {passFrom + 5, 0}, {len(large) - 2, 0}, {5, len(large) + 9},
	} {
		want := large[part.offset:]
		if part.length > 0 {
			want = want[:min(part.length, len(want))]
		}
		if got, err := h.read(channel.ReadRequest{PathRequest: at("d/f"), Offset: int64(part.offset), Length: int64(part.length)}); err != nil || got != want {
			t.Errorf("read from %d, %d bytes: got %d of %d, %v", part.offset, part.length, len(got), len(want), err)
		}
	}
	// Root's writing for a user must not be more than the user's.
	os.Chmod(h.home+"/d/f", 0o4755)
	if got, err := h.read(channel.ReadRequest{PathRequest: at("d/f")}); err != nil || got != large {
		t.Errorf("read of a set-user-ID file: %d bytes, %v", len(got), err)
	}
	os.Link(h.home+"/d/f", h.home+"/d/g") // is overwritten in place, by the helper
	if e, err := h.write("", "d/f", strings.NewReader(large)); err != nil || e.Mode != 0o755 || readAll(t, h.home+"/d/g") != large {
		t.Errorf("write of a set-user-ID file with two names: %+v, %v", e, err)
	}
	h.wantHeld("all is over", h.home, 0)
}

// TestPassedDownload: PID 1 reads itself, whatever becomes of the helper, and
// keeps nothing when the host leaves.
func TestPassedDownload(t *testing.T) {
	h := startPassing(t)
	h.write("", "f", strings.NewReader(large))
	begin := func() *channel.Stream {
		s := h.open(channel.MethodRead, channel.ReadRequest{PathRequest: at("f")})
		if _, err := channel.RecvReply[channel.Entry](h.ctx(), s, channel.MethodRead); err != nil {
			t.Fatal(err)
		}
		h.wantHeld("the file is passed", h.home+"/f", 1)
		return s
	}
	s := begin()
	h.killHelper()
	if got, err := io.ReadAll(s.Reader(h.ctx(), channel.TagData)); err != nil || string(got) != large {
		t.Errorf("without the helper %d bytes came: %v", len(got), err)
	}
	s.Close()
	h.wantHeld("it was read", h.home+"/f", 0)
	begin().Close()
	h.wantHeld("the host left", h.home+"/f", 0)
}

// TestPassedUpload: PID 1 writes itself. An upload that breaks off, at either
// end, leaves the old file and no descriptor.
func TestPassedUpload(t *testing.T) {
	h := startPassing(t)
	h.write("", "d/f", strings.NewReader("old"))
	temp := h.home + "/d/" + tempPrefix
	begin := func() *channel.Stream {
		s := h.open(channel.MethodWrite, channel.WriteRequest{PathRequest: at("d/f")})
		if _, err := io.WriteString(s.Writer(h.ctx(), channel.TagData), large); err != nil {
			t.Fatal(err)
		}
		h.wantHeld("the file is passed", temp, 1)
		return s
	}
	begin().Close()
	h.wantHeld("the host left", temp, 0)
	wantSoon(t, "nothing is left", func() error {
		if left := below(t, h.home+"/d"); len(left) != 2 {
			return fmt.Errorf("%q", left)
		}
		return nil
	})
	s := begin()
	h.killHelper()
	if _, _, err := s.Recv(h.ctx()); airlock.CodeOf(err) != airlock.Unavailable {
		t.Errorf("the upload ended with %v", err)
	}
	s.Close()
	h.wantHeld("the helper is gone", temp, 0)
	if got := readAll(t, h.home+"/d/f"); got != "old" {
		t.Errorf("the file has %d bytes", len(got))
	}
}

// TestPassedUploadTooLarge: what PID 1's write fails of is told as the
// helper's own would be.
func TestPassedUploadTooLarge(t *testing.T) {
	h := startPassing(t)
	dir := h.home + "/small"
	os.Mkdir(dir, 0o755)
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=1m,mode=777"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Unmount(dir, unix.MNT_DETACH) })
	h.write("", "small/f", strings.NewReader("old"))
	_, err := h.write("", "small/f", strings.NewReader(large))
	if airlock.CodeOf(err) != airlock.NoSpace {
		t.Errorf("the upload ended with %v", err)
	}
	if got := readAll(t, dir+"/f"); got != "old" || len(below(t, dir)) != 2 {
		t.Errorf("there is %q, the file has %d bytes", below(t, dir), len(got))
	}
	h.wantHeld("the upload failed", dir, 0)
}

// TestHostileHelper: of what a helper sends PID 1 keeps one descriptor for
// each call, and takes a large regular file only.
func TestHostileHelper(t *testing.T) {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	p, helper := newPassed(pair[0]), pair[1]
	defer unix.Close(helper)
	dir, err := os.MkdirTemp("/dev/shm", "guest-test-")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	open := func(name string, mode uint32, size int64) int {
		t.Helper()
		path := filepath.Join(dir, name)
		if mode == unix.S_IFIFO {
			if err := unix.Mkfifo(path, 0o600); err != nil {
				t.Fatal(err)
			}
		} else if err := os.WriteFile(path, nil, 0o600); err != nil {
			t.Fatal(err)
		} else if os.Truncate(path, size); mode != 0 {
			unix.Chmod(path, mode)
		}
		fd, err := unix.Open(path, unix.O_RDWR|nonblock, 0)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { unix.Close(fd) })
		return fd
	}
	named := func(path string) int {
		fd, err := unix.Open(path, unix.O_RDONLY|nonblock, 0)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { unix.Close(fd) })
		return fd
	}
	good := open("good", 0, passFrom)
	bad := map[string]int{
		"a small file":         open("small", 0, passFrom-1),
		"a set-user-ID file":   open("suid", 0o4700, passFrom),
		"a pipe":               open("fifo", unix.S_IFIFO, 0),
		"a directory":          named(dir),
		"a file of /proc":      named("/proc/self/environ"),
		"a device":             named("/dev/zero"),
		"the socket of theirs": helper,
	}
	send := func(stream uint32, fds ...int) {
		t.Helper()
		var rights []byte
		if len(fds) > 0 {
			rights = unix.UnixRights(fds...)
		}
		if err := unix.Sendmsg(helper, binary.BigEndian.AppendUint32(nil, stream), rights, nil, unix.MSG_DONTWAIT); err != nil {
			t.Fatal(err)
		}
	}
	count := func() int {
		fds, _ := filepath.Glob("/proc/self/fd/*")
		return len(fds)
	}
	before := count()
	refused := func(what string, stream uint32) {
		t.Helper()
		if fd, err := p.take(stream); err == nil {
			t.Errorf("%s: PID 1 takes %d", what, fd)
			unix.Close(fd)
		}
	}
	for what, fd := range bad {
		p.begin(1)
		send(1, fd)
		refused(what, 1)
		p.end(1)
	}
	p.begin(2)
	refused("nothing was sent", 2)
	send(2)
	refused("no descriptor", 2)
	send(3, good)
	refused("another call's", 2)
	refused("no call's", 3)
	if n := count(); n != before {
		t.Fatalf("%d descriptors more", n-before)
	}
	send(2, good, good, good)
	send(2, good)
	p.begin(4)
	send(4, good)
	p.receive()
	if n := count(); n != before+2 {
		t.Errorf("of five for two calls %d are kept", n-before)
	}
	fd, err := p.take(2)
	if err != nil {
		t.Fatal(err)
	}
	if flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0); err != nil || flags&unix.FD_CLOEXEC == 0 {
		t.Errorf("programs inherit the descriptor: %d, %v", flags, err)
	}
	unix.Close(fd)
	refused("it was taken", 2)
	p.end(2)
	p.begin(5)
	send(5, good)
	p.receive()
	p.end(5)
	if n := count(); n != before+1 {
		t.Errorf("after the end of a call there are %d, want that of the other", n-before)
	}
	send(4, good) // and is not received any more
	p.close()
	if n := count(); n != before-1 { // the socket is closed, too
		t.Errorf("after the end of the helper there are %d", n-before+1)
	}
	refused("the helper is gone", 4)
	p.end(4)
}
