package guest

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	osexec "os/exec"
	"path/filepath"
	"reflect"
	"strings"
	"syscall"
	"testing"
	"time"

	"airlock.dev/airlock"
	"airlock.dev/airlock/channel"
	"golang.org/x/sys/unix"
)

// TestMain makes the test binary a guest, or a guest's file helper, so that
// the guest owns its children and reaps orphans as PID 1 does.
func TestMain(m *testing.M) {
	switch {
	case os.Getenv("GUEST_TEST_ETC") != "":
		unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
		Run(Packets(3), Options{Etc: os.Getenv("GUEST_TEST_ETC"), Helper: []string{"guest-test-helper"}})
		os.Exit(0)
	case os.Args[0] == "guest-test-helper":
		ServeFiles(Packets(3), 4, os.Args[1], os.Args[2])
		os.Exit(0)
	}
	os.Exit(m.Run())
}

type host struct {
	*channel.Mux
	t    *testing.T
	fd   int
	pid  int // of the guest
	home string
}

func start(t *testing.T) *host {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("needs root: the guest changes users")
	}
	dir, err := os.MkdirTemp("", "guest-test-")
	if err != nil {
		t.Fatal(err)
	}
	os.Chmod(dir, 0o755)
	home := dir + "/home"
	os.Mkdir(home, 0o755)
	os.Chown(home, 1000, 1000)
	os.WriteFile(dir+"/passwd", []byte("root:x:0:0::/root:/bin/sh\nuser:x:1000:1000::"+home+":/bin/sh\n"), 0o644)
	os.WriteFile(dir+"/group", []byte("root:x:0:\nuser:x:1000:\nextra:x:2000:other,user\n"), 0o644)
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	cmd := osexec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), "GUEST_TEST_ETC="+dir)
	theirs := os.NewFile(uintptr(pair[1]), "guest")
	cmd.ExtraFiles = []*os.File{theirs}
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	theirs.Close()
	unix.SetNonblock(pair[0], true)
	h := &host{t: t, fd: pair[0], pid: cmd.Process.Pid, home: home}
	h.dial(1)
	t.Cleanup(func() {
		h.Close()
		unix.Close(h.fd)
		ended := make(chan error, 1)
		go func() { ended <- cmd.Wait() }()
		select {
		case err := <-ended:
			if err != nil {
				t.Errorf("the guest ended with %v", err)
			}
		case <-time.After(10 * time.Second):
			cmd.Process.Kill()
			t.Error("the guest outlived its channel")
		}
		os.RemoveAll(dir)
	})
	return h
}

func (h *host) dial(epoch uint64) {
	h.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	if h.Mux != nil {
		h.Close() // the host before is dead; the socket is not
	}
	fd, err := unix.FcntlInt(uintptr(h.fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		h.t.Fatal(err)
	}
	mux, err := channel.Dial(ctx, os.NewFile(uintptr(fd), "host"), epoch)
	if err != nil {
		h.t.Fatal(err)
	}
	h.Mux = mux
}

func (h *host) open(method string, req any) *channel.Stream {
	h.t.Helper()
	s, err := h.Open(h.ctx(), method, req)
	if err != nil {
		h.t.Fatal(err)
	}
	return s
}

func (h *host) ctx() context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	h.t.Cleanup(cancel)
	return ctx
}

type result struct {
	pid      uint32
	out, err string
	end      channel.Ended
}

func (h *host) collect(s *channel.Stream) (r result, err error) {
	defer s.Close()
	ctx := h.ctx()
	var out, errs bytes.Buffer
	for {
		tag, body, err := s.Recv(ctx)
		if err != nil {
			return r, err
		}
		switch tag {
		case channel.TagStarted:
			var st channel.Started
			json.Unmarshal(body, &st)
			r.pid = st.PID
		case channel.TagStdout, channel.TagPTY:
			out.Write(body)
		case channel.TagStderr:
			errs.Write(body)
		case channel.TagEnded:
			r.out, r.err = out.String(), errs.String()
			return r, json.Unmarshal(body, &r.end)
		}
	}
}

func sh(script string) channel.StartRequest {
	return channel.StartRequest{Cmd: "/bin/sh", Args: []string{"-c", script}}
}

func (h *host) run(req channel.StartRequest) result {
	h.t.Helper()
	r, err := h.collect(h.open(channel.MethodStart, req))
	if err != nil {
		h.t.Fatalf("%v: %v", req, err)
	}
	return r
}

func do[Reply any](h *host, method string, req any) (Reply, error) {
	return channel.Call[Reply](h.ctx(), h.Mux, method, req)
}

func TestExecOutcomes(t *testing.T) {
	h := start(t)
	exited := func(code int) channel.Ended {
		return channel.Ended{ExitCode: code, Outcome: airlock.Exited}
	}
	for _, tt := range []struct {
		req channel.StartRequest
		out string
		err string
		end channel.Ended
	}{
		{req: sh("echo out; echo err >&2"), out: "out\n", err: "err\n", end: exited(0)},
		{req: sh("exit 7"), end: exited(7)},
		{req: sh("kill -KILL $$"), end: channel.Ended{ExitCode: -1, Signal: "SIGKILL", Outcome: airlock.Signaled}},
		{req: sh("kill -TERM $$"), end: channel.Ended{ExitCode: -1, Signal: "SIGTERM", Outcome: airlock.Signaled}},
		{req: sh(`printf '\377\000\376'`), out: "\xff\x00\xfe", end: exited(0)},
		{req: sh("id -u; id -g; id -G; pwd; echo $HOME"), out: "1000\n1000\n1000 2000\n" + h.home + "\n" + h.home + "\n", end: exited(0)},
		{req: channel.StartRequest{Cmd: "id", Args: []string{"-u"}, User: "root"}, out: "0\n", end: exited(0)},
		{req: sh("cat; echo end"), out: "end\n", end: exited(0)}, // stdin is /dev/null
		{req: channel.StartRequest{Cmd: "pwd", Cwd: "/usr"}, out: "/usr\n", end: exited(0)},
		{req: channel.StartRequest{Cmd: "pwd", Cwd: "~"}, out: h.home + "\n", end: exited(0)},
		{req: channel.StartRequest{Cmd: "sh", Args: []string{"-c", "echo $A $USER"}, Env: map[string]string{"A": "b c", "USER": "x"}}, out: "b c x\n", end: exited(0)},
		{req: sh("(sleep 0.1; echo late) & echo now"), out: "now\nlate\n", end: exited(0)},
		{req: sh("(sleep 0.2; echo $PPID) & exit 3"), out: "", end: exited(3)},
	} {
		r := h.run(tt.req)
		if tt.end.ExitCode == 3 {
			r.out = "" // the number of the guest
		}
		if r.out != tt.out || r.err != tt.err || r.end != tt.end {
			t.Errorf("%v gave %q %q %+v, want %q %q %+v", tt.req.Args, r.out, r.err, r.end, tt.out, tt.err, tt.end)
		}
	}
}

func TestExecErrors(t *testing.T) {
	h := start(t)
	os.WriteFile(h.home+"/noexec", []byte("x"), 0o644)
	for _, tt := range []struct {
		req  channel.StartRequest
		code airlock.Code
		text string
	}{
		{channel.StartRequest{Cmd: "true", User: "x"}, airlock.Unauthenticated, "invalid username: 'x'"},
		{channel.StartRequest{Cmd: "true", Cwd: "/no/such"}, airlock.Invalid, "cwd '/no/such' does not exist"},
		{channel.StartRequest{Cmd: "true", Cwd: "/etc/passwd"}, airlock.Invalid, "cwd '/etc/passwd' is not a directory"},
		{channel.StartRequest{Cmd: "nonesuch"}, airlock.NotFound, "command 'nonesuch' was not found"},
		{channel.StartRequest{Cmd: "./noexec"}, airlock.Invalid, "command './noexec' is not executable by user 'user': check its mode bits"},
		{channel.StartRequest{Cmd: ""}, airlock.Invalid, "the command is empty: name a program"},
		{channel.StartRequest{Cmd: "a\x00b"}, airlock.Invalid, "the command, an argument or a variable has a NUL byte: remove it"},
		{channel.StartRequest{Cmd: "true", Env: map[string]string{"a=b": ""}}, airlock.Invalid, "the variable 'a=b' is not possible: names hold no '=', and neither names nor values a NUL byte"},
	} {
		_, err := h.collect(h.open(channel.MethodStart, tt.req))
		if airlock.CodeOf(err) != tt.code || err.Error() != tt.text {
			t.Errorf("%+v gave %v %q, want %v %q", tt.req, airlock.CodeOf(err), err, tt.code, tt.text)
		}
	}
	if _, err := do[channel.Empty](h, "no.such", channel.Empty{}); airlock.CodeOf(err) != airlock.Unimplemented {
		t.Errorf("an unknown method gave %v", err)
	}
	for _, ref := range []channel.ProcessRef{{PID: 99999999}, {Tag: "none"}, {}} {
		if _, err := do[channel.Empty](h, channel.MethodSignal, channel.SignalRequest{ProcessRef: ref, Signal: 9}); airlock.CodeOf(err) != airlock.NotFound {
			t.Errorf("signal to %v gave %v", ref, err)
		}
	}
}

func TestLimits(t *testing.T) {
	h := start(t)
	if _, err := do[channel.HelloReply](h, channel.MethodHello, channel.Hello{Processes: 4000, OpenFiles: 99, Env: map[string]string{"FOO": "bar"}}); err != nil {
		t.Fatal(err)
	}
	if r := h.run(channel.StartRequest{Cmd: "bash", Args: []string{"-c", "ulimit -Hn; ulimit -Su; ulimit -Hu; echo $FOO"}}); r.out != "99\n4000\n4000\nbar\n" {
		t.Errorf("limits: %q %q", r.out, r.err)
	}
}

func TestOutputWithSlowReader(t *testing.T) {
	h := start(t)
	const size = 10 << 20
	s := h.open(channel.MethodStart, channel.StartRequest{Cmd: "sh", Args: []string{"-c", "i=0; while [ $i -lt 10 ]; do head -c 1048576 /dev/zero | tr '\\0' $i; i=$((i+1)); done"}})
	defer s.Close()
	next, n := 0, 0
	for {
		tag, body, err := s.Recv(h.ctx())
		if err != nil {
			t.Fatal(err)
		}
		if tag == channel.TagEnded {
			break
		}
		if tag != channel.TagStdout {
			continue
		}
		for _, b := range body {
			if int(b-'0') != n>>20 {
				t.Fatalf("byte %d is %q", n, b)
			}
			n++
		}
		if next++; next%20 == 0 {
			time.Sleep(5 * time.Millisecond)
		}
	}
	if n != size {
		t.Errorf("%d bytes arrived, want %d", n, size)
	}
}

func TestInput(t *testing.T) {
	h := start(t)
	s := h.open(channel.MethodStart, channel.StartRequest{Cmd: "sh", Args: []string{"-c", "cat; echo done"}, Stdin: true, Tag: "cat"})
	ref := channel.ProcessRef{Tag: "cat"}
	data := strings.Repeat("0123456789abcdef", 1<<16)
	got := make(chan result, 1)
	go func() { r, _ := h.collect(s); got <- r }()
	in := func() error {
		st := h.open(channel.MethodInput, ref)
		defer st.Close()
		if _, err := io.WriteString(st.Writer(h.ctx(), channel.TagInput), data); err != nil {
			return err
		}
		st.CloseSend()
		_, err := channel.RecvReply[channel.Empty](h.ctx(), st, channel.MethodInput)
		return err
	}
	deadline := time.Now().Add(5 * time.Second)
	err := in()
	for airlock.CodeOf(err) == airlock.NotFound && time.Now().Before(deadline) {
		err = in()
	}
	if err != nil {
		t.Fatal(err)
	}
	if _, err := do[channel.Empty](h, channel.MethodCloseStdin, ref); err != nil {
		t.Fatal(err)
	}
	if r := <-got; r.out != data+"done\n" {
		t.Errorf("%d bytes came back, want %d", len(r.out), len(data)+5)
	}

	s = h.open(channel.MethodStart, channel.StartRequest{Cmd: "sleep", Args: []string{"100"}, Tag: "deaf"})
	s.Recv(h.ctx())
	ref.Tag = "deaf"
	if err := in(); airlock.CodeOf(err) != airlock.Conflict && airlock.CodeOf(err) != airlock.Canceled {
		t.Errorf("input without stdin gave %v", err)
	}
	if _, err := do[channel.Empty](h, channel.MethodCloseStdin, ref); airlock.CodeOf(err) != airlock.Conflict {
		t.Errorf("close without stdin gave %v", err)
	}
}

func TestPTY(t *testing.T) {
	h := start(t)
	r := h.run(channel.StartRequest{Cmd: "sh", Args: []string{"-c", "stty size; echo $TERM; echo tty > /dev/tty"}, PTY: &channel.Size{Cols: 101, Rows: 33}})
	if r.out != "33 101\r\nxterm-256color\r\ntty\r\n" || r.end.ExitCode != 0 {
		t.Errorf("terminal: %q %+v", r.out, r.end)
	}
	s := h.open(channel.MethodStart, channel.StartRequest{Cmd: "sh", Args: []string{"-c", "read x; stty size"}, Tag: "t", PTY: &channel.Size{Cols: 1, Rows: 1}})
	tag, _, err := s.Recv(h.ctx())
	if err != nil || tag != channel.TagStarted {
		t.Fatal(tag, err)
	}
	ref := channel.ProcessRef{Tag: "t"}
	if _, err := do[channel.Empty](h, channel.MethodResize, channel.ResizeRequest{ProcessRef: ref, Size: channel.Size{Cols: 77, Rows: 22}}); err != nil {
		t.Fatal(err)
	}
	if _, err := do[channel.Empty](h, channel.MethodCloseStdin, ref); airlock.CodeOf(err) != airlock.Invalid {
		t.Errorf("close of a terminal gave %v", err)
	}
	in := h.open(channel.MethodInput, ref)
	in.Send(h.ctx(), channel.TagInput, []byte("go\n"))
	in.CloseSend()
	if r, err := h.collect(s); err != nil || !strings.Contains(r.out, "22 77") {
		t.Errorf("after resize: %q %v", r.out, err)
	}
}

func gone(pid int) bool {
	for range 200 {
		if b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid)); err != nil || strings.Contains(string(b), ") Z ") {
			return true
		}
		time.Sleep(10 * time.Millisecond)
	}
	return false
}

func TestKillTree(t *testing.T) {
	h := start(t)
	// A double fork with setsid, with and without the environment.
	s := h.open(channel.MethodStart, sh(`(setsid sh -c 'echo $$; exec sleep 1000' &); (env -i setsid sh -c 'echo $$; exec sleep 1000' &); sleep 1000`))
	defer s.Close()
	var started channel.Started
	var out string
	for strings.Count(out, "\n") < 2 {
		tag, body, err := s.Recv(h.ctx())
		if err != nil {
			t.Fatal(err)
		}
		if tag == channel.TagStarted {
			json.Unmarshal(body, &started)
		} else {
			out += string(body)
		}
	}
	if _, err := do[channel.Empty](h, channel.MethodSignal, channel.SignalRequest{ProcessRef: channel.ProcessRef{PID: started.PID}, Signal: 9}); err != nil {
		t.Fatal(err)
	}
	r, err := h.collect(s)
	if want := (channel.Ended{ExitCode: -1, Signal: "SIGKILL", Outcome: airlock.Signaled}); err != nil || r.end != want {
		t.Errorf("ended %+v %v, want %+v", r.end, err, want)
	}
	for _, f := range strings.Fields(out) {
		var pid int
		fmt.Sscan(f, &pid)
		if !gone(pid) {
			t.Errorf("daemon %d lives", pid)
			syscall.Kill(pid, syscall.SIGKILL)
		}
	}
}

func TestAttachAndEpoch(t *testing.T) {
	h := start(t)
	s := h.open(channel.MethodStart, channel.StartRequest{Cmd: "sh", Args: []string{"-c", "echo one; read x; echo two; exit 5"}, Stdin: true, Tag: "a"})
	for range 2 {
		if _, _, err := s.Recv(h.ctx()); err != nil {
			t.Fatal(err)
		}
	}
	h.dial(2) // a new host: streams of the old are dropped, the process lives
	infos, err := channel.CallAll[channel.ProcessInfo](h.ctx(), h.Mux, channel.MethodProcesses, channel.Empty{}, 10)
	if err != nil || len(infos) != 1 || infos[0].Tag != "a" || infos[0].Cmd != "sh" || infos[0].User != "user" {
		t.Fatalf("processes: %+v %v", infos, err)
	}
	ref := channel.ProcessRef{Tag: "a"}
	var attached [2]*channel.Stream
	for i := range attached {
		attached[i] = h.open(channel.MethodAttach, ref)
		if tag, _, err := attached[i].Recv(h.ctx()); tag != channel.TagStarted || err != nil {
			t.Fatal(tag, err)
		}
	}
	time.Sleep(50 * time.Millisecond)
	in := h.open(channel.MethodInput, ref)
	in.Send(h.ctx(), channel.TagInput, []byte("\n"))
	in.CloseSend()
	for _, s := range attached {
		if r, err := h.collect(s); err != nil || r.out != "two\n" || r.end.ExitCode != 5 {
			t.Errorf("attached: %+v %v", r, err)
		}
	}
	if r, err := h.collect(h.open(channel.MethodAttach, ref)); err != nil || r.pid != infos[0].PID || r.out != "" || r.end.ExitCode != 5 {
		t.Errorf("attached late: %+v %v", r, err)
	}
}

func TestOutcomeOfMemory(t *testing.T) {
	for _, tt := range []struct {
		ws   syscall.WaitStatus
		oom  bool
		want channel.Ended
	}{
		{9, true, channel.Ended{ExitCode: -1, Signal: "SIGKILL", Outcome: airlock.OOM}},
		{9, false, channel.Ended{ExitCode: -1, Signal: "SIGKILL", Outcome: airlock.Signaled}},
		{137 << 8, true, channel.Ended{ExitCode: 137, Outcome: airlock.OOM}},
		{137 << 8, false, channel.Ended{ExitCode: 137, Outcome: airlock.Exited}},
		{1 << 8, true, channel.Ended{ExitCode: 1, Outcome: airlock.Exited}},
	} {
		if got := ended(tt.ws, tt.oom); got != tt.want {
			t.Errorf("ended(%#x, %v) = %+v, want %+v", tt.ws, tt.oom, got, tt.want)
		}
	}
}

func (h *host) write(user, path string, r io.Reader) (channel.Entry, error) {
	s := h.open(channel.MethodWrite, channel.WriteRequest{PathRequest: channel.PathRequest{User: user, Path: path}})
	defer s.Close()
	if _, err := io.Copy(s.Writer(h.ctx(), channel.TagData), r); err != nil {
		if _, _, why := s.Recv(h.ctx()); why != nil {
			err = why
		}
		return channel.Entry{}, err
	}
	s.CloseSend()
	return channel.RecvReply[channel.Entry](h.ctx(), s, channel.MethodWrite)
}

func (h *host) read(req channel.ReadRequest) (string, error) {
	s := h.open(channel.MethodRead, req)
	defer s.Close()
	if _, err := channel.RecvReply[channel.Entry](h.ctx(), s, channel.MethodRead); err != nil {
		return "", err
	}
	b, err := io.ReadAll(s.Reader(h.ctx(), channel.TagData))
	return string(b), err
}

func at(path string) channel.PathRequest { return channel.PathRequest{Path: path} }

func TestFiles(t *testing.T) {
	h := start(t)
	big := strings.Repeat("0123456789abcdef", 4<<20)
	for _, data := range []string{"", "a\xff\x00b", big} {
		e, err := h.write("", "d/e/f", strings.NewReader(data))
		if err != nil || e.Size != int64(len(data)) || e.Path != h.home+"/d/e/f" || e.Name != "f" || e.Type != channel.File ||
			e.Mode != 0o644 || e.Permissions != "-rw-r--r--" || e.Owner != "user" || e.Group != "user" {
			t.Fatalf("write of %d bytes: %+v %v", len(data), e, err)
		}
		if got, err := h.read(channel.ReadRequest{PathRequest: at("~/d/e/f")}); err != nil || got != data {
			t.Errorf("read %d bytes of %d: %v", len(got), len(data), err)
		}
	}
	if got, err := h.read(channel.ReadRequest{PathRequest: at("d/e/f"), Offset: 3, Length: 5}); err != nil || got != "34567" {
		t.Errorf("a part is %q %v", got, err)
	}
	if got, err := h.read(channel.ReadRequest{PathRequest: at("/proc/self/status")}); err != nil || !strings.Contains(got, "Uid:\t1000") {
		t.Errorf("procfs is %q %v", got, err)
	}
	// An upload that breaks off leaves the old file and nothing else.
	h.write("", "d/e/f", strings.NewReader("old"))
	s := h.open(channel.MethodWrite, channel.WriteRequest{PathRequest: at("d/e/f")})
	s.Send(h.ctx(), channel.TagData, []byte("new"))
	time.Sleep(100 * time.Millisecond)
	s.Close()
	time.Sleep(200 * time.Millisecond)
	if got, _ := h.read(channel.ReadRequest{PathRequest: at("d/e/f")}); got != "old" {
		t.Errorf("after an aborted upload the file is %q", got)
	}
	if names, _ := os.ReadDir(h.home + "/d/e"); len(names) != 1 {
		t.Errorf("an aborted upload left %v", names)
	}
	// Written through a link; mode and owner stay.
	os.Symlink("d/e/f", h.home+"/link")
	os.Chmod(h.home+"/d/e/f", 0o751)
	if _, err := h.write("root", h.home+"/link", strings.NewReader("root's")); err != nil {
		t.Error(err)
	}
	e, err := do[channel.Entry](h, channel.MethodStat, at("d/e/f"))
	if err != nil || e.Owner != "user" || e.Mode != 0o751 || e.Size != 6 {
		t.Errorf("overwritten by root: %+v %v", e, err)
	}
	e, err = do[channel.Entry](h, channel.MethodStat, at("link"))
	if err != nil || e.Type != channel.File || e.SymlinkTarget != h.home+"/d/e/f" {
		t.Errorf("link: %+v %v", e, err)
	}
	os.Symlink("nowhere", h.home+"/dangling")
	if e, err = do[channel.Entry](h, channel.MethodStat, at("dangling")); err != nil || e.Type != channel.Unknown || e.SymlinkTarget != h.home+"/nowhere" {
		t.Errorf("dangling link: %+v %v", e, err)
	}

	list := func(path string, depth int) (paths []string, err error) {
		es, err := channel.CallAll[channel.Entry](h.ctx(), h.Mux, channel.MethodListDir, channel.ListDirRequest{PathRequest: at(path), Depth: depth}, 100)
		for _, e := range es {
			rel, _ := filepath.Rel(h.home, e.Path)
			paths = append(paths, rel+" "+string(e.Type))
		}
		return paths, err
	}
	for depth, want := range map[int][]string{
		0: {"d directory", "dangling unknown", "link file"},
		1: {"d directory", "dangling unknown", "link file"},
		2: {"d directory", "d/e directory", "dangling unknown", "link file"},
		9: {"d directory", "d/e directory", "d/e/f file", "dangling unknown", "link file"},
	} {
		if got, err := list("~", depth); err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("list depth %d: %v %v, want %v", depth, got, err, want)
		}
	}

	if e, err := do[channel.Entry](h, channel.MethodMkdir, at("m/n")); err != nil || e.Type != channel.Directory || e.Mode != 0o755 {
		t.Errorf("mkdir: %+v %v", e, err)
	}
	if _, err := do[channel.Entry](h, channel.MethodMkdir, at("m/n")); airlock.CodeOf(err) != airlock.Exists {
		t.Errorf("mkdir again: %v", err)
	}
	if e, err := do[channel.Entry](h, channel.MethodMove, channel.MoveRequest{Source: "d", Destination: "x/y/z"}); err != nil || e.Path != h.home+"/x/y/z" {
		t.Errorf("move: %+v %v", e, err)
	}
	for range 2 {
		if _, err := do[channel.Empty](h, channel.MethodRemove, at("x")); err != nil {
			t.Errorf("remove: %v", err)
		}
	}
	if _, err := os.Lstat(h.home + "/x"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("x is still there: %v", err)
	}
}

func TestFileErrors(t *testing.T) {
	h := start(t)
	os.WriteFile(h.home+"/secret", []byte("root's"), 0o600)
	os.Symlink("secret", h.home+"/link")
	unix.Mkfifo(h.home+"/fifo", 0o666)
	for _, tt := range []struct {
		path        string
		read, write airlock.Code
		text        string // of read
	}{
		{"secret", airlock.Denied, airlock.Denied, "permission denied for path '" + h.home + "/secret'"},
		{"link", airlock.Denied, airlock.Denied, "permission denied for path '" + h.home + "/link'"},
		{"/etc", airlock.Invalid, airlock.Invalid, "path '/etc' is a directory"},
		{"/", airlock.Invalid, airlock.Invalid, "path '/' is a directory"},
		{"/no/such", airlock.NotFound, airlock.Denied, "path '/no/such' does not exist"},
		{"fifo", airlock.Invalid, airlock.Invalid, "path '" + h.home + "/fifo' is not a regular file"},
		{"", airlock.Invalid, airlock.Invalid, "the path is empty: give a path"},
		{"a\x00b", airlock.Invalid, airlock.Invalid, "the path has a NUL byte: remove it"},
		{"/etc/passwd/x", airlock.Invalid, airlock.Invalid, "path '/etc/passwd/x' leads through something that is not a directory"},
		{strings.Repeat("x", 300), airlock.Invalid, airlock.Invalid, "path '" + h.home + "/" + strings.Repeat("x", 300) + "' is too long: names have at most 255 bytes and paths 4095"},
	} {
		_, err := h.read(channel.ReadRequest{PathRequest: at(tt.path)})
		if airlock.CodeOf(err) != tt.read || err.Error() != tt.text {
			t.Errorf("read %q: %v %q, want %v %q", tt.path, airlock.CodeOf(err), err, tt.read, tt.text)
		}
		if _, err := h.write("", tt.path, strings.NewReader("x")); airlock.CodeOf(err) != tt.write {
			t.Errorf("write %q: %v %v, want %v", tt.path, airlock.CodeOf(err), err, tt.write)
		}
	}
	if _, err := do[channel.Empty](h, channel.MethodRemove, at("/")); airlock.CodeOf(err) != airlock.Invalid {
		t.Errorf("remove /: %v", err)
	}
	if _, err := do[channel.Entry](h, channel.MethodStat, channel.PathRequest{User: "x", Path: "/"}); airlock.CodeOf(err) != airlock.Unauthenticated {
		t.Errorf("unknown user: %v", err)
	}
	if got, err := h.read(channel.ReadRequest{PathRequest: channel.PathRequest{User: "root", Path: h.home + "/secret"}}); got != "root's" || err != nil {
		t.Errorf("root reads %q %v", got, err)
	}
	// The user's own helper is killed, as that user can: the next calls have another.
	h.killHelper()
	var err error
	for range 20 {
		if _, err = do[channel.Entry](h, channel.MethodStat, at("fifo")); err == nil {
			break
		}
		time.Sleep(50 * time.Millisecond)
	}
	if err != nil {
		t.Errorf("after the helper was killed: %v", err)
	}
}

func TestParseSudo(t *testing.T) {
	for _, tt := range []struct {
		args string
		want sudoArgs
		ok   bool
	}{
		{"id", sudoArgs{user: "root", command: []string{"id"}}, true},
		{"-u bob id -u", sudoArgs{user: "bob", command: []string{"id", "-u"}}, true},
		{"-nEubob -- -x", sudoArgs{user: "bob", preserve: true, command: []string{"-x"}}, true},
		{"--user=bob -H A=b C= cmd D=e", sudoArgs{user: "bob", setHome: true, env: []string{"A=b", "C="}, command: []string{"cmd", "D=e"}}, true},
		{"-g staff -S -p prompt cmd", sudoArgs{user: "root", group: "staff", command: []string{"cmd"}}, true},
		{"--preserve-env=A,B cmd", sudoArgs{user: "root", keep: []string{"A", "B"}, command: []string{"cmd"}}, true},
		{"-i", sudoArgs{user: "root", login: true, command: []string{}}, true},
		{"-s ls", sudoArgs{user: "root", shell: true, command: []string{"ls"}}, true},
		{"-v", sudoArgs{user: "root", nothing: true, command: []string{}}, true},
		{"-k id", sudoArgs{user: "root", nothing: true, command: []string{"id"}}, true},
		{"", sudoArgs{user: "root", command: []string{}}, false},
		{"-i -s", sudoArgs{user: "root", login: true, shell: true, command: []string{}}, false},
		{"-u", sudoArgs{user: "root"}, false},
		{"-Z id", sudoArgs{user: "root"}, false},
		{"--nonesuch id", sudoArgs{user: "root"}, false},
	} {
		got, ok := parseSudo(strings.Fields(tt.args))
		if ok != tt.ok || !reflect.DeepEqual(got, tt.want) {
			t.Errorf("sudo %s: %+v %v, want %+v %v", tt.args, got, ok, tt.want, tt.ok)
		}
	}
	root := account{name: "root", home: "/root", shell: "/bin/sh"}
	env := sudoEnv(sudoArgs{env: []string{"A=b"}, command: []string{"ls", "-l"}}, []string{"LC_CTYPE=C", "SSL_CERT_FILE=/roots", "PATH=/x"}, []string{"LC_CTYPE=C.UTF-8", "TERM=vt100", "X=secret", "HOME=/home/user", "PATH=/evil"}, account{name: "user", uid: 1000, gid: 1001}, root)
	want := []string{"A=b", "HOME=/root", "LC_CTYPE=C.UTF-8", "LOGNAME=root", "PATH=" + defaultPath, "SHELL=/bin/sh", "SSL_CERT_FILE=/roots", "SUDO_COMMAND=ls -l", "SUDO_GID=1001", "SUDO_UID=1000", "SUDO_USER=user", "TERM=vt100", "USER=root"}
	if !reflect.DeepEqual(env, want) {
		t.Errorf("environment %q, want %q", env, want)
	}
	file := filepath.Join(t.TempDir(), "environment")
	if err := os.WriteFile(file, []byte("A=b=c d\n\n# B=c\n=d\nE\nF=\nG=\x00\nH=last"), 0o600); err != nil {
		t.Fatal(err)
	}
	if got := etcEnvironment(file); !reflect.DeepEqual(got, []string{"A=b=c d", "F=", "H=last"}) {
		t.Errorf("/etc/environment: %q", got)
	}
	if got := etcEnvironment(file + ".missing"); got != nil {
		t.Errorf("no /etc/environment: %q", got)
	}
	if got := sudoCommand(sudoArgs{login: true, command: []string{"echo", "it's"}}, "", "/bin/sh"); !reflect.DeepEqual(got, []string{"/bin/sh", "-l", "-c", `'echo' 'it'\''s'`}) {
		t.Errorf("login shell: %q", got)
	}
}

// Programs that a user installs are found, and those of root are the system's.
func TestPathOfUsers(t *testing.T) {
	for _, c := range []struct {
		user     account
		req, set map[string]string
		want     string
	}{
		{account{name: "user", home: "/home/user", uid: 1000}, nil, nil, "/home/user/.local/bin:" + defaultPath},
		{account{name: "root", home: "/root"}, nil, nil, defaultPath},
		{account{name: "user", home: "/home/user", uid: 1000}, nil, map[string]string{"PATH": "/image"}, "/image"},
		{account{name: "user", home: "/home/user", uid: 1000}, map[string]string{"PATH": "/x"}, map[string]string{"PATH": "/image"}, "/x"},
	} {
		if _, got, err := environment(c.user, c.set, channel.StartRequest{Env: c.req}); got != c.want || err != nil {
			t.Errorf("PATH of %s, with %v and %v: %q, %v", c.user.name, c.set, c.req, got, err)
		}
	}
}
