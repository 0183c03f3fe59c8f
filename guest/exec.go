package guest

import (
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"airlock.dev/airlock"
	"airlock.dev/airlock/channel"
	"golang.org/x/sys/unix"
)

const (
	defaultPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/.airlock/bin"
	// drainPause is how long output may pause, after the process itself has
	// ended, before the exec counts as over: a background process may hold
	// the pipe for ever. What it writes later is read and dropped.
	drainPause = 500 * time.Millisecond
	// outputChunk is the most that is read of a pipe at once; each pipe of a
	// running process has a buffer of that size.
	outputChunk = 32 << 10
	// rememberFor and rememberMost bound the ended execs kept for attach.
	rememberFor  = 30 * time.Second
	rememberMost = 1024
	// lingerMost bounds the pipes that are drained after their exec's end.
	lingerMost = 256
)

// exec is one process started through the channel, and what it started.
type exec struct {
	info channel.ProcessInfo
	pid  int
	mark uint64 // see tree
	pty  bool

	outputs []output
	stdin   *os.File      // nil: /dev/null
	writing chan struct{} // holds a token while stdin is written

	// Guarded by guest.mu.
	exited  bool
	status  syscall.WaitStatus
	oom     bool // the memory watch killed a process of this tree
	endedAt time.Time

	exit   chan struct{} // closed when the process itself ended
	done   chan struct{} // closed when all output is sent, too
	result channel.Ended // valid once done is closed

	mu   sync.Mutex
	subs []*subscriber
}

type output struct {
	tag  byte
	file *os.File
}

type subscriber struct {
	ctx context.Context
	s   *channel.Stream
}

func (g *guest) start(ctx context.Context, s *channel.Stream, body []byte) error {
	var req channel.StartRequest
	if err := decode(body, &req); err != nil {
		return err
	}
	e, err := g.launch(req)
	if err != nil {
		return err
	}
	return g.follow(ctx, s, e, func() { g.begin(e) })
}

func (g *guest) attach(ctx context.Context, s *channel.Stream, body []byte) error {
	var ref channel.ProcessRef
	if err := decode(body, &ref); err != nil {
		return err
	}
	e := g.find(ref)
	if e == nil {
		e = g.findEnded(ref)
	}
	if e == nil {
		return noProcess(ref)
	}
	return g.follow(ctx, s, e, func() {})
}

// follow sends Started, all output from then on, and Ended.
func (g *guest) follow(ctx context.Context, s *channel.Stream, e *exec, begin func()) error {
	err := channel.SendJSON(ctx, s, channel.TagStarted, channel.Started{PID: uint32(e.pid)})
	if err == nil {
		sub := &subscriber{ctx, s}
		e.mu.Lock()
		e.subs = append(e.subs, sub)
		e.mu.Unlock()
		defer e.unsubscribe(sub)
	}
	begin() // also when nobody listens any more: the process runs
	if err != nil {
		return err
	}
	select {
	case <-e.done:
		return channel.SendJSON(ctx, s, channel.TagEnded, e.result)
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (e *exec) unsubscribe(sub *subscriber) {
	e.mu.Lock()
	e.subs = slices.DeleteFunc(e.subs, func(x *subscriber) bool { return x == sub })
	e.mu.Unlock()
}

// launch starts the process; its output waits in the pipes until begin.
func (g *guest) launch(req channel.StartRequest) (*exec, error) {
	u, err := g.accounts.lookup(req.User)
	if err != nil {
		return nil, err
	}
	if req.Cmd == "" {
		return nil, airlock.Invalidf("cmd", "name a program", "the command is empty")
	}
	cwd := u.home
	if req.Cwd != "" {
		if cwd, err = u.absolute(req.Cwd); err != nil {
			return nil, err
		}
	}
	g.mu.Lock()
	hello := g.hello
	g.mu.Unlock()
	e := &exec{
		info:    channel.ProcessInfo{Tag: req.Tag, Cmd: req.Cmd, Args: req.Args, Env: req.Env, Cwd: req.Cwd, User: u.name},
		pty:     req.PTY != nil,
		writing: make(chan struct{}, 1), exit: make(chan struct{}), done: make(chan struct{}),
	}
	env, path, err := environment(u, hello.Env, req)
	if err != nil {
		return nil, err
	}
	a := &spawnArgs{
		uid: uintptr(u.uid), gid: uintptr(u.gid), groups: u.groups, tty: e.pty,
		nofile: uint64(max(hello.OpenFiles, 0)), nproc: uint64(max(hello.Processes, 0)),
	}
	candidates := []string{req.Cmd}
	if !strings.Contains(req.Cmd, "/") {
		candidates = nil
		for dir := range strings.SplitSeq(path, ":") {
			candidates = append(candidates, inDir(cwd, dir)+"/"+req.Cmd)
			if len(candidates) == 64 {
				break
			}
		}
	}
	var errs [4]error
	a.paths, errs[0] = cstrings(candidates)
	a.argv, errs[1] = cstrings(append([]string{req.Cmd}, req.Args...))
	a.envv, errs[2] = cstrings(env)
	a.dir, errs[3] = unix.BytePtrFromString(cwd)
	if errors.Join(errs[:]...) != nil {
		return nil, airlock.Invalidf("cmd", "remove it", "the command, an argument or a variable has a NUL byte")
	}
	a.paths = a.paths[:len(candidates)]

	child, err := e.open(req, u)
	defer func() {
		for _, fd := range child {
			unix.Close(int(fd))
		}
	}()
	if err != nil {
		e.closeFiles()
		return nil, airlock.Errorf(airlock.Unavailable, "the sandbox has no room for another process: end some first").Because(err)
	}
	a.fds = child

	g.mu.Lock()
	g.lastMark--
	e.mark, a.mark = g.lastMark, g.lastMark
	pid, errno := spawn(a)
	if errno == 0 {
		e.pid = pid
		e.info.PID = uint32(pid)
		g.execs[pid] = e
	}
	g.mu.Unlock()
	if errno != 0 {
		e.closeFiles()
		return nil, spawnError(a.step, errno, req.Cmd, cwd, u.name)
	}
	g.poke()
	return e, nil
}

// inDir resolves an element of PATH as the process itself would.
func inDir(cwd, dir string) string {
	if filepath.IsAbs(dir) {
		return dir
	}
	return filepath.Join(cwd, dir)
}

func spawnError(step spawnStep, errno syscall.Errno, cmd, cwd, user string) error {
	cmd, cwd = clip(cmd), clip(cwd)
	switch {
	case step == stepCwd && errno == syscall.ENOENT:
		return airlock.Invalidf("cwd", "", "cwd '%s' does not exist", cwd)
	case step == stepCwd && errno == syscall.ENOTDIR:
		return airlock.Invalidf("cwd", "", "cwd '%s' is not a directory", cwd)
	case step == stepCwd && errno == syscall.EACCES:
		return airlock.Errorf(airlock.Denied, "cwd '%s' may not be entered by user '%s'", cwd, user)
	case step == stepCwd:
		return airlock.Invalidf("cwd", "", "cwd '%s' is not usable: %s", cwd, errno)
	case errno == syscall.ENOENT || errno == syscall.ENOTDIR:
		return airlock.Errorf(airlock.NotFound, "command '%s' was not found", cmd)
	case errno == syscall.EACCES:
		return airlock.Invalidf("cmd", "check its mode bits", "command '%s' is not executable by user '%s'", cmd, user)
	case errno == syscall.ENOEXEC:
		return airlock.Invalidf("cmd", "a script needs a first line such as #!/bin/sh", "command '%s' is not a program of this system", cmd)
	case errno == syscall.E2BIG:
		return airlock.Errorf(airlock.TooLarge, "the arguments and variables of command '%s' are too long", cmd)
	case errno == syscall.EAGAIN || errno == syscall.ENOMEM:
		return &airlock.Error{Code: airlock.Exhausted, Message: "the sandbox can start no more processes", Hint: "end some first", Err: errno}
	}
	return airlock.Errorf(airlock.Invalid, "command '%s' could not be started: %s", cmd, errno)
}

func checkEnv(name, value string) error {
	if name == "" || strings.ContainsAny(name, "=\x00") || strings.IndexByte(value, 0) >= 0 {
		return airlock.Invalidf("env", "names hold no '=', and neither names nor values a NUL byte", "the variable '%s' is not possible", clip(name))
	}
	return nil
}

// environment returns the variables of a process, and its PATH.
func environment(u account, sandbox map[string]string, req channel.StartRequest) (env []string, path string, err error) {
	m := map[string]string{
		"PATH": defaultPath, "HOME": u.home, "USER": u.name, "LOGNAME": u.name, "SHELL": u.shell,
		"LC_CTYPE": "C.UTF-8", // each other category would be a file more that a shell opens at its start
	}
	if u.uid != 0 { // where pip and its like put programs of a user
		m["PATH"] = u.home + "/.local/bin:" + defaultPath
	}
	if req.PTY != nil {
		m["TERM"] = "xterm-256color"
	}
	for _, layer := range []map[string]string{sandbox, req.Env} {
		for name, value := range layer {
			if err := checkEnv(name, value); err != nil {
				return nil, "", err
			}
			m[name] = value
		}
	}
	for name, value := range m {
		env = append(env, name+"="+value)
	}
	slices.Sort(env)
	return env, m["PATH"], nil
}

// open makes the descriptors of a process: ours are kept in e, the child's
// are returned, also with an error.
func (e *exec) open(req channel.StartRequest, u account) (child []uintptr, err error) {
	if req.PTY != nil {
		master, slave, err := openPTY(*req.PTY)
		if err != nil {
			return nil, err
		}
		unix.Fchown(slave, u.uid, u.gid)
		child = []uintptr{uintptr(slave)}
		f := os.NewFile(uintptr(master), "pty")
		e.outputs = []output{{channel.TagPTY, f}}
		e.stdin = f
		for range 2 {
			fd, err := unix.FcntlInt(uintptr(slave), unix.F_DUPFD_CLOEXEC, 4)
			if err != nil {
				return child, err
			}
			child = append(child, uintptr(fd))
		}
		return child, nil
	}
	// A pipe belongs to the user, so that /dev/stdout can be opened by name.
	pipe := func(ours int) (*os.File, error) {
		var p [2]int
		if err := unix.Pipe2(p[:], unix.O_CLOEXEC); err != nil {
			return nil, err
		}
		unix.Fchown(p[1-ours], u.uid, u.gid)
		unix.SetNonblock(p[ours], true)
		child = append(child, uintptr(p[1-ours]))
		return os.NewFile(uintptr(p[ours]), "pipe"), nil
	}
	if req.Stdin {
		if e.stdin, err = pipe(1); err != nil {
			return child, err
		}
	} else {
		fd, err := unix.Open("/dev/null", unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			return child, err
		}
		child = append(child, uintptr(fd))
	}
	for _, tag := range []byte{channel.TagStdout, channel.TagStderr} {
		f, err := pipe(0)
		if err != nil {
			return child, err
		}
		e.outputs = append(e.outputs, output{tag, f})
	}
	return child, nil
}

func openPTY(size channel.Size) (master, slave int, err error) {
	master, err = unix.Open("/dev/ptmx", unix.O_RDWR|unix.O_CLOEXEC|unix.O_NOCTTY|unix.O_NONBLOCK, 0)
	if err != nil {
		return 0, 0, err
	}
	if err = unix.IoctlSetPointerInt(master, unix.TIOCSPTLCK, 0); err == nil {
		var n uint32
		if n, err = unix.IoctlGetUint32(master, unix.TIOCGPTN); err == nil {
			slave, err = unix.Open("/dev/pts/"+strconv.Itoa(int(n)), unix.O_RDWR|unix.O_CLOEXEC|unix.O_NOCTTY, 0)
		}
	}
	if err != nil {
		unix.Close(master)
		return 0, 0, err
	}
	setSize(master, size)
	return master, slave, nil
}

func setSize(fd int, size channel.Size) error {
	return unix.IoctlSetWinsize(fd, unix.TIOCSWINSZ, &unix.Winsize{Col: size.Cols, Row: size.Rows})
}

func (e *exec) closeFiles() {
	if e.stdin != nil {
		e.stdin.Close()
	}
	for _, o := range e.outputs {
		o.file.Close()
	}
}

// begin starts reading the output of a launched process and waits for its end.
func (g *guest) begin(e *exec) {
	var pumps sync.WaitGroup
	for _, o := range e.outputs {
		pumps.Go(func() { e.pump(o) })
	}
	go func() {
		<-e.exit
		for _, o := range e.outputs { // wake pumps that wait for output
			o.file.SetReadDeadline(time.Now().Add(drainPause))
		}
		pumps.Wait()
		g.finish(e)
	}()
}

// pump sends what one pipe brings until its end, or until drainPause after
// the process's. Sending waits for the slowest subscriber.
func (e *exec) pump(o output) {
	buf := make([]byte, outputChunk)
	for {
		select {
		case <-e.exit: // anew for each read: the time spent sending does not count
			o.file.SetReadDeadline(time.Now().Add(drainPause))
		default:
		}
		n, err := o.file.Read(buf)
		if n > 0 {
			e.emit(o.tag, buf[:n])
		}
		if err != nil { // EOF, EIO of a terminal that was hung up, or the deadline
			return
		}
	}
}

func (e *exec) emit(tag byte, data []byte) {
	e.mu.Lock()
	subs := slices.Clone(e.subs)
	e.mu.Unlock()
	for _, sub := range subs {
		if sub.s.Send(sub.ctx, tag, data) != nil {
			e.unsubscribe(sub) // it left; the process goes on
		}
	}
}

// finish closes an exec whose output is read.
func (g *guest) finish(e *exec) {
	g.mu.Lock()
	e.result = ended(e.status, e.oom)
	e.endedAt = time.Now()
	e.info.Cmd, e.info.Args, e.info.Env, e.info.Cwd = "", nil, nil, "" // many are remembered
	if g.execs[e.pid] == e {
		delete(g.execs, e.pid)
	}
	g.ended = append(g.ended, e)
	g.forgetEnded()
	for _, o := range e.outputs {
		if g.linger < lingerMost {
			g.linger++
			go g.drain(o.file)
		} else {
			o.file.Close()
		}
	}
	g.mu.Unlock()
	if e.stdin != nil && !e.pty {
		e.stdin.Close()
	}
	close(e.done)
}

// drain drops what processes that outlived their exec still write, so that
// they neither block nor die of it.
func (g *guest) drain(f *os.File) {
	f.SetReadDeadline(time.Time{})
	buf := make([]byte, 4096)
	for {
		if _, err := f.Read(buf); err != nil {
			break
		}
	}
	f.Close()
	g.mu.Lock()
	g.linger--
	g.mu.Unlock()
}

func (g *guest) forgetEnded() {
	old := 0
	for old < len(g.ended) && (len(g.ended)-old > rememberMost || time.Since(g.ended[old].endedAt) > rememberFor) {
		old++
	}
	g.ended = slices.Delete(g.ended, 0, old)
}

// ended makes the outcome of a wait status. The outcome is OOM if the memory
// watch killed a process of the exec and the exec's own process then died of
// a signal or exited 137, as a shell does whose command was killed. A program
// that handles the death of its child keeps its own exit code.
func ended(ws syscall.WaitStatus, oom bool) channel.Ended {
	if ws.Signaled() {
		end := channel.Ended{ExitCode: -1, Signal: unix.SignalName(ws.Signal()), Outcome: airlock.Signaled}
		if end.Signal == "" {
			end.Signal = "SIG" + strconv.Itoa(int(ws.Signal()))
		}
		if oom {
			end.Outcome = airlock.OOM
		}
		return end
	}
	end := channel.Ended{ExitCode: ws.ExitStatus(), Outcome: airlock.Exited}
	if oom && end.ExitCode == 128+int(unix.SIGKILL) {
		end.Outcome = airlock.OOM
	}
	return end
}

func (e *exec) named(ref channel.ProcessRef) bool {
	if ref.PID != 0 {
		return e.info.PID == ref.PID
	}
	return ref.Tag != "" && e.info.Tag == ref.Tag
}

// find returns the running exec that ref names; of several with a tag the
// newest is none the better, so any.
func (g *guest) find(ref channel.ProcessRef) *exec {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, e := range g.execs {
		if e.named(ref) {
			return e
		}
	}
	return nil
}

func (g *guest) findEnded(ref channel.ProcessRef) *exec {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.forgetEnded()
	for _, e := range slices.Backward(g.ended) {
		if e.named(ref) {
			return e
		}
	}
	return nil
}

func noProcess(ref channel.ProcessRef) error {
	if ref.PID != 0 {
		return airlock.Errorf(airlock.NotFound, "process with pid %d not found", ref.PID)
	}
	return airlock.Errorf(airlock.NotFound, "process with tag '%s' not found", clip(ref.Tag))
}

func (g *guest) processes() []channel.ProcessInfo {
	g.mu.Lock()
	defer g.mu.Unlock()
	var all []channel.ProcessInfo
	for _, e := range g.execs {
		if !e.exited {
			all = append(all, e.info)
		}
	}
	slices.SortFunc(all, func(a, b channel.ProcessInfo) int { return int(a.PID) - int(b.PID) })
	return all
}

// input writes to a process's stdin. One input at a time writes; the others
// wait for it.
func (g *guest) input(ctx context.Context, s *channel.Stream, body []byte) error {
	var ref channel.ProcessRef
	if err := decode(body, &ref); err != nil {
		return err
	}
	e := g.find(ref)
	if e == nil {
		return noProcess(ref)
	}
	if e.stdin == nil {
		return &airlock.Error{Code: airlock.Conflict, Message: "stdin is not enabled for this process", Hint: "start it with stdin"}
	}
	select {
	case e.writing <- struct{}{}:
	case <-ctx.Done():
		return ctx.Err()
	}
	defer func() { <-e.writing }()
	e.stdin.SetWriteDeadline(time.Time{})
	// A process that does not read may block the write for ever; the host's
	// leaving ends it.
	expired := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		e.stdin.SetWriteDeadline(time.Unix(1, 0))
		close(expired)
	})
	defer func() {
		if !stop() {
			<-expired // it must not hit the next input
		}
	}()
	r := s.Reader(ctx, channel.TagInput)
	buf := make([]byte, channel.MaxPayload)
	for {
		n, rerr := r.Read(buf)
		if n > 0 {
			if _, err := e.stdin.Write(buf[:n]); err != nil {
				if ctx.Err() != nil {
					return ctx.Err()
				}
				return airlock.Errorf(airlock.Conflict, "the process does not read its standard input any more").Because(err)
			}
		}
		if rerr == io.EOF {
			return channel.SendReply(ctx, s, channel.Empty{})
		}
		if rerr != nil {
			return rerr
		}
	}
}

func (g *guest) closeStdin(ref channel.ProcessRef) (channel.Empty, error) {
	e := g.find(ref)
	switch {
	case e == nil:
		return channel.Empty{}, noProcess(ref)
	case e.pty:
		return channel.Empty{}, airlock.Invalidf("", "send Ctrl+D (0x04) as input instead", "a terminal's input cannot be closed")
	case e.stdin == nil:
		return channel.Empty{}, &airlock.Error{Code: airlock.Conflict, Message: "stdin is not enabled for this process", Hint: "start it with stdin"}
	}
	e.stdin.Close() // closed already is fine
	return channel.Empty{}, nil
}

func (g *guest) resize(req channel.ResizeRequest) (channel.Empty, error) {
	e := g.find(req.ProcessRef)
	if e == nil {
		return channel.Empty{}, noProcess(req.ProcessRef)
	}
	if !e.pty {
		return channel.Empty{}, &airlock.Error{Code: airlock.Conflict, Message: "the process has no terminal", Hint: "start it with pty"}
	}
	conn, err := e.stdin.SyscallConn()
	if err != nil {
		return channel.Empty{}, err
	}
	var ioctlErr error
	if err := conn.Control(func(fd uintptr) { ioctlErr = setSize(int(fd), req.Size) }); err != nil {
		return channel.Empty{}, noProcess(req.ProcessRef)
	}
	return channel.Empty{}, ioctlErr
}

func (g *guest) signal(req channel.SignalRequest) (channel.Empty, error) {
	if req.Signal < 1 || req.Signal > 64 {
		return channel.Empty{}, airlock.Invalidf("signal", "use 1 to 64", "there is no signal %d", req.Signal)
	}
	e := g.find(req.ProcessRef)
	if e == nil {
		return channel.Empty{}, noProcess(req.ProcessRef)
	}
	if err := g.kill(e, syscall.Signal(req.Signal)); err != nil {
		return channel.Empty{}, airlock.Errorf(airlock.Unavailable, "process %d, or one that it started, may be running still: end the sandbox to be sure", e.pid).Because(err)
	}
	return channel.Empty{}, nil
}
