package guest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"airlock.dev/airlock"
	"airlock.dev/airlock/channel"
	"golang.org/x/sys/unix"
)

func (h *host) writeWith(path string, metadata map[string]string, data string) (channel.Entry, error) {
	s := h.open(channel.MethodWrite, channel.WriteRequest{PathRequest: at(path), Metadata: metadata})
	defer s.Close()
	if _, err := io.WriteString(s.Writer(h.ctx(), channel.TagData), data); err != nil {
		return channel.Entry{}, err
	}
	s.CloseSend()
	return channel.RecvReply[channel.Entry](h.ctx(), s, channel.MethodWrite)
}

func (h *host) list(path string, depth int) ([]channel.Entry, error) {
	return channel.CallAll[channel.Entry](h.ctx(), h.Mux, channel.MethodListDir, channel.ListDirRequest{PathRequest: at(path), Depth: depth}, 10_000)
}

func (h *host) wantMetadata(what, path string, want map[string]string) {
	h.t.Helper()
	e, err := do[channel.Entry](h, channel.MethodStat, at(path))
	if err != nil || !maps.Equal(e.Metadata, want) {
		h.t.Errorf("%s: stat says %v, %v; want %v", what, e.Metadata, err, want)
	}
	all, err := h.list(filepath.Dir(path), 1)
	for _, e := range all {
		if e.Name == filepath.Base(path) && !maps.Equal(e.Metadata, want) {
			h.t.Errorf("%s: list says %v, %v; want %v", what, e.Metadata, err, want)
		}
	}
}

func TestFileMetadata(t *testing.T) {
	h := start(t)
	one, two := map[string]string{"a": "1", "b": ""}, map[string]string{"b": "2", "c": "é\n"}
	if e, err := h.writeWith("d/f", one, "x"); err != nil || !maps.Equal(e.Metadata, one) {
		t.Fatalf("write: %+v, %v", e, err)
	}
	h.wantMetadata("written", h.home+"/d/f", one)
	os.Symlink("d/f", h.home+"/link")
	h.wantMetadata("through a link", h.home+"/link", one)
	if e, err := do[channel.Entry](h, channel.MethodMove, channel.MoveRequest{Source: "d/f", Destination: "e"}); err != nil || !maps.Equal(e.Metadata, one) {
		t.Errorf("moved: %+v, %v", e, err)
	}
	unix.Setxattr(h.home+"/e", "user.other", []byte("x"), 0)
	h.wantMetadata("with an attribute of another kind", h.home+"/e", one)
	h.writeWith("e", two, "x")
	h.wantMetadata("replaced", h.home+"/e", two)
	os.Link(h.home+"/e", h.home+"/hard")
	h.writeWith("e", one, "x")
	h.wantMetadata("replaced in place", h.home+"/hard", one)
	h.writeWith("e", nil, "x")
	h.wantMetadata("removed in place", h.home+"/hard", nil)
	os.Remove(h.home + "/hard")
	h.writeWith("e", one, "x")
	h.writeWith("e", nil, "x")
	h.wantMetadata("removed", h.home+"/e", nil)
	os.Mkdir(h.home+"/dir", 0o755)
	unix.Setxattr(h.home+"/dir", "user.e2b.k", []byte("v"), 0)
	h.wantMetadata("of a directory", h.home+"/dir", map[string]string{"k": "v"})

	// Where there are none the old file stays.
	_, err := h.writeWith("/dev/null", one, "x")
	if want := "path '/dev/null' is where files keep no metadata: upload it without the headers X-Metadata"; airlock.CodeOf(err) != airlock.Invalid || err.Error() != want {
		t.Errorf("metadata of a device: %v, want %s", err, want)
	}
	if _, err := h.writeWith("/dev/null", nil, "x"); err != nil {
		t.Errorf("a device without: %v", err)
	}
}

// TestHostileMetadata: attributes as only code inside makes them.
func TestHostileMetadata(t *testing.T) {
	h := start(t)
	h.writeWith("f", nil, "x")
	path := h.home + "/f"
	many, some := map[string]string{}, map[string]string{}
	for i := range 100 {
		many[fmt.Sprintf("user.e2b.%04d", i)] = strings.Repeat("v", 30)
		if len(some) < channel.MaxMetadata/(13+30) {
			some[fmt.Sprintf("%04d", i)] = strings.Repeat("v", 30)
		}
	}
	for _, c := range []struct {
		what string
		set  map[string]string
		want map[string]string
	}{
		{"a key that is no UTF-8", map[string]string{"user.e2b.\xff": "v", "user.e2b.good": "g"}, map[string]string{"good": "g"}},
		{"a value that is no UTF-8", map[string]string{"user.e2b.bad": "\xc3(", "user.e2b.good": "g"}, map[string]string{"good": "g"}},
		{"a value with NUL", map[string]string{"user.e2b.nul": "a\x00b"}, map[string]string{"nul": "a\x00b"}},
		{"no key", map[string]string{"user.e2b.": "v", "user.e2b": "v", "user.e2b.good": "g"}, map[string]string{"good": "g"}},
		{"more than is shown", many, some},
	} {
		for name, value := range c.set {
			if err := unix.Setxattr(path, name, []byte(value), 0); err != nil {
				t.Logf("%s: this file system does not take it: %v", c.what, err)
			}
		}
		if n, _ := unix.Listxattr(path, nil); n > 0 {
			names := make([]byte, n)
			unix.Listxattr(path, names)
			if got := strings.Count(string(names), "\x00"); got == len(c.set) { // all were taken
				h.wantMetadata(c.what, path, c.want)
			}
		}
		h.writeWith("f", nil, "x")
		h.wantMetadata(c.what+", replaced", path, nil)
	}
}

func TestComposeFiles(t *testing.T) {
	h := start(t)
	compose := func(to string, sources ...string) (channel.Entry, error) {
		return do[channel.Entry](h, channel.MethodCompose, channel.ComposeRequest{Sources: sources, Destination: to})
	}
	big := strings.Repeat("0123456789abcdef", 50_000)
	fill := func() {
		os.RemoveAll(h.home)
		os.Mkdir(h.home, 0o755)
		os.Chown(h.home, 1000, 1000)
		for name, data := range map[string]string{"a": "one ", "b": big, "empty": "", "old": "old"} {
			h.writeWith(name, map[string]string{"k": "v"}, data)
		}
		os.Chmod(h.home+"/old", 0o751)
		os.Symlink("a", h.home+"/link")
		os.Symlink("old", h.home+"/to-old")
		os.Lchown(h.home+"/to-old", 1000, 1000)
		os.Link(h.home+"/old", h.home+"/hard")
		os.Mkdir(h.home+"/dir", 0o755)
		unix.Mkfifo(h.home+"/fifo", 0o666)
		os.WriteFile(h.home+"/secret", []byte("root's"), 0o600)
	}
	fill()
	before := len(below(t, h.home))
	in := func(name string) string { return "path '" + h.home + "/" + name + "' " }
	for _, c := range []struct {
		what, to string
		sources  []string
		code     airlock.Code
		text     string
	}{
		{"a missing source", "new", []string{"a", "missing"}, airlock.NotFound, in("missing") + "does not exist"},
		{"a directory", "new", []string{"a", "dir"}, airlock.Invalid, in("dir") + "is a directory"},
		{"a pipe", "new", []string{"fifo"}, airlock.Invalid, in("fifo") + "is not a regular file"},
		{"a device without end", "new", []string{"/dev/zero"}, airlock.Invalid, "path '/dev/zero' is not a regular file"},
		{"a source that may not be read", "new", []string{"a", "secret"}, airlock.Denied, "permission denied for " + strings.TrimSpace(in("secret"))},
		{"the destination itself", "old", []string{"a", "old"}, airlock.Invalid, "source '" + h.home + "/old' and the destination are the same file: name another"},
		{"by another path", "old", []string{"dir/../old"}, airlock.Invalid, "source '" + h.home + "/old' and the destination are the same file: name another"},
		{"by a link", "to-old", []string{"old"}, airlock.Invalid, "source '" + h.home + "/old' and the destination are the same file: name another"},
		{"from a link", "old", []string{"to-old"}, airlock.Invalid, "source '" + h.home + "/to-old' and the destination are the same file: name another"},
		{"by a hard link", "old", []string{"hard"}, airlock.Invalid, "source '" + h.home + "/hard' and the destination are the same file: name another"},
		{"into a directory", "dir", []string{"a"}, airlock.Invalid, in("dir") + "is a directory"},
		{"into what may not be written", "/etc/nope", []string{"a"}, airlock.Denied, "permission denied for path '/etc/nope'"},
		{"below a file", "a/x", []string{"old"}, airlock.Invalid, in("a/x") + "leads through something that is not a directory"},
		{"an empty path", "new", []string{""}, airlock.Invalid, "the path is empty: give a path"},
		{"a NUL byte", "new", []string{"a\x00"}, airlock.Invalid, "the path has a NUL byte: remove it"},
	} {
		_, err := compose(c.to, c.sources...)
		if airlock.CodeOf(err) != c.code || err.Error() != c.text {
			t.Errorf("%s: %v %q, want %v %q", c.what, airlock.CodeOf(err), err, c.code, c.text)
		}
	}
	if after := below(t, h.home); len(after) != before {
		t.Errorf("failed composes left %q", after)
	}
	for _, c := range []struct {
		what, to string
		sources  []string
		want     string
		mode     uint32
		gone     []string
	}{
		{"several", "x/y", []string{"a", "b", "empty"}, "one " + big, 0o644, []string{"a", "b", "empty"}},
		{"into a file", "b", []string{"a"}, "one ", 0o644, []string{"a"}},
		{"in place, keeping its mode", "old", []string{"a"}, "one ", 0o751, []string{"a"}},
		{"through a link", "to-old", []string{"a"}, "one ", 0o751, []string{"a"}},
		{"of a link, which is removed", "new", []string{"link"}, "one ", 0o644, []string{"link"}},
		{"twice the same", "new", []string{"a", "a"}, "one one ", 0o644, []string{"a"}},
		{"what may not be removed", "new", []string{"/etc/hostname"}, readAll(t, "/etc/hostname"), 0o644, nil},
	} {
		fill()
		e, err := compose(c.to, c.sources...)
		if err != nil || e.Path != h.home+"/"+c.to || len(e.Metadata) != 0 || e.Owner != "user" {
			t.Errorf("%s: %+v, %v", c.what, e, err)
		}
		if data := readAll(t, h.home+"/"+c.to); data != c.want || e.Mode != c.mode {
			t.Errorf("%s: %d bytes of mode %o, want %d of %o", c.what, len(data), e.Mode, len(c.want), c.mode)
		}
		for _, name := range c.gone {
			if _, err := os.Lstat(h.home + "/" + name); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("%s: source %s is there: %v", c.what, name, err)
			}
		}
	}

	// Given up halfway it leaves everything as it was.
	fill()
	sparse, err := os.Create(h.home + "/sparse")
	if err != nil {
		t.Fatal(err)
	}
	sparse.Truncate(64 << 30)
	sparse.Close()
	unix.Unlink(h.home + "/hard")
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if _, err := channel.Call[channel.Entry](ctx, h.Mux, channel.MethodCompose, channel.ComposeRequest{Sources: []string{"a", "sparse"}, Destination: "old"}); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a canceled compose: %v", err)
	}
	wantSoon(t, "a canceled compose leaves nothing", func() error {
		if left, _ := filepath.Glob(h.home + "/" + tempPrefix + "*"); len(left) > 0 || readAll(t, h.home+"/old") != "old" || readAll(t, h.home+"/a") != "one " {
			return fmt.Errorf("left %q", left)
		}
		return nil
	})
}

func readAll(t *testing.T, path string) string {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Error(err)
	}
	return string(data)
}

// below lists all that is below a directory.
func below(t *testing.T, dir string) (paths []string) {
	t.Helper()
	filepath.WalkDir(dir, func(path string, _ os.DirEntry, err error) error {
		paths = append(paths, path)
		return nil
	})
	return paths
}

func wantSoon(t *testing.T, what string, check func() error) {
	t.Helper()
	var err error
	for deadline := time.Now().Add(10 * time.Second); time.Now().Before(deadline); time.Sleep(20 * time.Millisecond) {
		if err = check(); err == nil {
			return
		}
	}
	t.Errorf("%s: %v", what, err)
}

// TestOddPaths makes every call on paths that are not plain.
func TestOddPaths(t *testing.T) {
	h := start(t)
	os.Symlink("loop2", h.home+"/loop1")
	os.Symlink("loop1", h.home+"/loop2")
	os.Symlink("nowhere", h.home+"/dangling")
	os.Symlink("/etc/passwd", h.home+"/passwd")
	os.Symlink("real", h.home+"/parent")
	os.Symlink("..", h.home+"/up")
	os.Symlink("real/", h.home+"/slash")
	os.MkdirAll(h.home+"/real", 0o755)
	os.WriteFile(h.home+"/real/f", []byte("real"), 0o666)
	os.WriteFile(h.home+"/file", []byte("file"), 0o666)
	for i := range 45 {
		os.Symlink(fmt.Sprintf("chain%d", i), fmt.Sprintf("%s/chain%d", h.home, i+1))
	}
	os.WriteFile(h.home+"/chain0", []byte("end"), 0o666)
	unix.Mkfifo(h.home+"/fifo", 0o666)
	l, err := net.Listen("unix", h.home+"/socket")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	os.Chmod(h.home+"/socket", 0o777)
	for _, p := range []string{"real", "real/f", "file", "chain0"} {
		os.Chown(h.home+"/"+p, 1000, 1000)
	}
	name := strings.Repeat("n", 255)
	deep := strings.Repeat("d/", 1800) // with the home below 4096
	const ok = airlock.Code("")
	for _, c := range []struct {
		path              string
		stat, read, write airlock.Code
	}{
		{"loop1", ok, airlock.Invalid, airlock.Invalid},
		{"loop1/x", airlock.Invalid, airlock.Invalid, airlock.Invalid},
		{"dangling/x", airlock.NotFound, airlock.NotFound, airlock.Invalid},
		{"dangling", ok, airlock.NotFound, ok},
		{"passwd", ok, ok, airlock.Denied},
		{"parent/f", ok, ok, ok},
		{"parent", ok, airlock.Invalid, airlock.Invalid},
		{"up", ok, airlock.Invalid, airlock.Invalid},
		{"slash", ok, airlock.Invalid, airlock.Invalid},
		{"slash/f", ok, ok, ok},
		{"file/", ok, ok, ok}, // as if without the slash
		{"file/x", airlock.Invalid, airlock.Invalid, airlock.Invalid},
		{"chain40", ok, ok, ok},
		{"chain41", ok, airlock.Invalid, airlock.Invalid},
		{"fifo", ok, airlock.Invalid, airlock.Invalid},
		{"socket", ok, airlock.Invalid, airlock.Invalid},
		{"/dev/null", ok, ok, ok},
		{"/proc/self/mem", ok, airlock.Denied, airlock.Denied},
		{"/proc/1/mem", ok, airlock.Denied, airlock.Denied},
		{"/proc/self/status", ok, ok, airlock.Denied},
		{"./x/../file", ok, ok, ok},
		{"../../../../../../etc/passwd", ok, ok, airlock.Denied},
		{name + "n", airlock.Invalid, airlock.Invalid, airlock.Invalid},
		{deep + strings.Repeat("d/", 500), airlock.Invalid, airlock.Invalid, airlock.Invalid},
	} {
		if _, err := do[channel.Entry](h, channel.MethodStat, at(c.path)); code(err) != c.stat {
			t.Errorf("stat %.60s: %v, want %s", c.path, err, c.stat)
		}
		if _, err := h.read(channel.ReadRequest{PathRequest: at(c.path), Length: 10}); code(err) != c.read {
			t.Errorf("read %.60s: %v, want %s", c.path, err, c.read)
		}
		if _, err := h.write("", c.path, strings.NewReader("x")); code(err) != c.write {
			t.Errorf("write %.60s: %v, want %s", c.path, err, c.write)
		}
	}
	// Links stay, what they lead to was written.
	for link, want := range map[string]string{"dangling": "nowhere", "chain40": "chain39", "slash": "real/"} {
		if target, err := os.Readlink(h.home + "/" + link); err != nil || target != want {
			t.Errorf("link %s leads to %q, %v", link, target, err)
		}
	}
	if got := readAll(t, h.home+"/nowhere") + readAll(t, h.home+"/chain0") + readAll(t, h.home+"/real/f"); got != "xxx" {
		t.Errorf("behind links: %q", got)
	}

	for _, p := range []string{"odd/a\nb", "odd/a\"b'c", "odd/100% %41", "odd/🜁 é", "odd/-rf", "odd/--", "odd/a\\b", "odd/ ", "odd/\x01\x7f", "odd/" + name, deep + "end"} {
		if _, err := h.write("", p, strings.NewReader(p)); err != nil {
			t.Errorf("write %.60q: %v", p, err)
		}
		if got, err := h.read(channel.ReadRequest{PathRequest: at(p)}); got != p || err != nil {
			t.Errorf("read %.60q: %.60q, %v", p, got, err)
		}
		e, err := do[channel.Entry](h, channel.MethodStat, at(p))
		if err != nil || e.Name != filepath.Base(p) || e.Path != h.home+"/"+p {
			t.Errorf("stat %.60q: %+v, %v", p, e, err)
		}
	}
	if all, err := h.list("~", 10_000); err != nil || len(all) < 1800 {
		t.Errorf("a deep list: %d, %v", len(all), err)
	}
	// To the last byte that the kernel takes.
	longest := deep
	left := 4095 - len(h.home) - 1 - len(longest)
	for ; left > 255; left -= 101 {
		longest += strings.Repeat("e", 100) + "/"
	}
	longest += strings.Repeat("f", left)
	if _, err := h.write("", longest, strings.NewReader("x")); err != nil {
		t.Errorf("the longest path, %d bytes: %v", len(h.home)+1+len(longest), err)
	}
	if _, err := h.write("", longest+"f", strings.NewReader("x")); code(err) != airlock.Invalid {
		t.Errorf("a byte more: %v", err)
	}

	// Names that are no UTF-8 are listed, and do no harm to the others.
	os.Mkdir(h.home+"/bytes", 0o755)
	for _, name := range []string{"a\xffb", "\xc3(", "z"} {
		os.WriteFile(h.home+"/bytes/"+name, nil, 0o644)
	}
	all, err := h.list("bytes", 1)
	if err != nil || len(all) != 3 || all[0].Name != "a\uFFFDb" || all[1].Name != "z" || all[2].Path != h.home+"/bytes/\uFFFD(" {
		t.Errorf("names of bytes: %+v, %v", all, err)
	}
	if _, err := do[channel.Empty](h, channel.MethodRemove, at("d")); err != nil {
		t.Errorf("remove a deep tree: %v", err)
	}
}

func code(err error) airlock.Code {
	if err == nil {
		return ""
	}
	return airlock.CodeOf(err)
}

// TestSwappedPaths: while a directory is swapped with a link to root's, over
// and over, the user's calls reach nothing of root's, and all calls end.
func TestSwappedPaths(t *testing.T) {
	h := start(t)
	// What root has: to be neither read, nor changed, nor listed.
	vault := filepath.Dir(h.home) + "/vault"
	os.MkdirAll(vault+"/sub", 0o700)
	os.WriteFile(vault+"/f", []byte("secret"), 0o600)
	os.WriteFile(vault+"/sub/f", []byte("secret"), 0o600)
	h.write("", "d/f", strings.NewReader("mine"))
	h.write("", "d/sub/f", strings.NewReader("mine"))
	os.Symlink(vault, h.home+"/l")
	stop := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
				unix.Renameat2(unix.AT_FDCWD, h.home+"/d", unix.AT_FDCWD, h.home+"/l", unix.RENAME_EXCHANGE)
			}
		}
	})
	end := time.Now().Add(2 * time.Second)
	var calls sync.WaitGroup
	for _, user := range []string{"", "root"} {
		for _, call := range []func(i int) error{
			func(i int) error {
				got, err := h.read(channel.ReadRequest{PathRequest: channel.PathRequest{User: user, Path: h.home + "/d/f"}})
				if user == "" && strings.Contains(got, "secret") {
					t.Error("the user read root's file")
				}
				return err
			},
			func(i int) error {
				es, err := channel.CallAll[channel.Entry](h.ctx(), h.Mux, channel.MethodListDir, channel.ListDirRequest{PathRequest: channel.PathRequest{User: user, Path: h.home}, Depth: 9}, 1000)
				for _, e := range es {
					if user == "" && e.Owner == "root" && e.Type == channel.File {
						t.Errorf("the user was shown root's %s", e.Path)
					}
				}
				return err
			},
			func(i int) error {
				if user == "root" { // who may
					return nil
				}
				_, err := h.write(user, h.home+"/d/sub/f", strings.NewReader("mine"))
				return err
			},
			func(i int) error {
				if user == "root" {
					return nil
				}
				_, err := do[channel.Entry](h, channel.MethodMove, channel.MoveRequest{Source: h.home + "/d/sub/f", Destination: h.home + "/l/sub/g"})
				do[channel.Empty](h, channel.MethodRemove, at(h.home+"/d/sub/g"))
				return err
			},
			func(i int) error {
				_, err := do[channel.Entry](h, channel.MethodStat, channel.PathRequest{User: user, Path: h.home + "/d/sub"})
				return err
			},
		} {
			calls.Go(func() {
				for i := 0; time.Now().Before(end); i++ {
					switch err := call(i); code(err) {
					case "", airlock.NotFound, airlock.Denied, airlock.Invalid, airlock.Conflict, airlock.Exists:
					default:
						t.Errorf("%q: %v", user, err)
						return
					}
				}
			})
		}
	}
	calls.Wait()
	close(stop)
	wg.Wait()
	if got := readAll(t, vault+"/f") + readAll(t, vault+"/sub/f"); got != "secretsecret" || len(below(t, vault)) != 4 {
		t.Errorf("root's files: %q, %q", got, below(t, vault))
	}
	// Nothing of the uploads is left, wherever their directory was.
	if left, _ := filepath.Glob(filepath.Dir(h.home) + "/*/*/*/" + tempPrefix + "*"); len(left) > 0 {
		t.Errorf("uploads left %q", left)
	}
}

// TestVanishingDirectories: what is removed while it is listed is left out.
func TestVanishingDirectories(t *testing.T) {
	h := start(t)
	end := time.Now().Add(time.Second)
	var wg sync.WaitGroup
	wg.Go(func() {
		for i := 0; time.Now().Before(end); i++ {
			dir := fmt.Sprintf("%s/v/%d/x/y", h.home, i%7)
			os.MkdirAll(dir, 0o755)
			os.WriteFile(dir+"/f", nil, 0o644)
			os.RemoveAll(h.home + "/v")
		}
	})
	for time.Now().Before(end) {
		if _, err := h.list("~", 9); err != nil {
			t.Fatalf("list: %v", err)
		}
	}
	wg.Wait()
}

// TestKilledHelper: an upload whose helper is killed leaves the old file, and
// beside it what says what it was.
func TestKilledHelper(t *testing.T) {
	h := start(t)
	h.write("", "d/f", strings.NewReader("old"))
	s := h.open(channel.MethodWrite, channel.WriteRequest{PathRequest: at("d/f")})
	defer s.Close()
	s.Send(h.ctx(), channel.TagData, []byte("new"))
	var left []string
	wantSoon(t, "the upload begins", func() error {
		if left, _ = filepath.Glob(h.home + "/d/" + tempPrefix + "*"); len(left) != 1 {
			return fmt.Errorf("%q", left)
		}
		return nil
	})
	h.killHelper()
	if _, _, err := s.Recv(h.ctx()); airlock.CodeOf(err) != airlock.Unavailable {
		t.Errorf("the upload ended with %v", err)
	}
	wantSoon(t, "another helper answers", func() error {
		got, err := h.read(channel.ReadRequest{PathRequest: at("d/f")})
		if err == nil && got != "old" {
			t.Errorf("the file is %q", got)
		}
		return err
	})
	if _, err := do[channel.Empty](h, channel.MethodRemove, at("d")); err != nil {
		t.Error(err)
	}
	if _, err := os.Lstat(left[0]); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("after the removal: %v", err)
	}
}

// killHelper kills the user's helper of this guest.
func (h *host) killHelper() {
	h.t.Helper()
	cmdlines, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, file := range cmdlines {
		cmdline, _ := os.ReadFile(file)
		if !strings.HasPrefix(string(cmdline), "guest-test-helper\x00"+h.home+"\x00") {
			continue
		}
		pid, err := strconv.Atoi(filepath.Base(filepath.Dir(file)))
		if err == nil {
			err = unix.Kill(pid, unix.SIGKILL)
		}
		if err != nil {
			h.t.Errorf("kill the helper: %v", err)
		}
		return
	}
	h.t.Error("there is no helper to kill")
}
