package control

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"airlock.dev/airlock"
	"airlock.dev/airlock/audit"
	"airlock.dev/airlock/channel"
	"airlock.dev/airlock/policy"
)

// Guest is the way into one running sandbox: processes and files. What comes
// through it was said by the guest and is information, never evidence.
type Guest struct {
	Sandbox airlock.Sandbox

	boundary *Boundary
	request  func() *policy.Set // what its client asks for at this moment

	mux     *channel.Mux
	log     *events
	conns   *atomic.Int32 // to its ports, of all Guests of the sandbox
	watches *watches
	ended   func() airlock.Outcome // why the sandbox ended; called once mux is done
	measure func(context.Context) (Metric, error)
}

// Gone is closed when the sandbox ended: streams of its data plane are to be
// aborted then.
func (g *Guest) Gone() <-chan struct{} { return g.mux.Done() }

// maxEntries bounds a directory listing.
const maxEntries = 20_000

// ExecEvent is one thing that happened to an exec. Exactly one of the fields
// is set, Data with its stream.
type ExecEvent struct {
	PID    uint32   // it started
	Stream byte     // channel.TagStdout, TagStderr or TagPTY
	Data   []byte   // what it wrote there
	End    *ExecEnd // it ended; the last event
}

// ExecEnd is how an exec ended.
type ExecEnd struct {
	ExitCode int    // -1 unless Outcome is Exited
	Signal   string // "SIGKILL", when a signal ended it
	Outcome  airlock.Outcome
	Message  string // for a person; empty for exit code 0
}

// Exec is a process whose events are read. Closing it leaves the process running.
type Exec struct {
	g      *Guest
	s      *channel.Stream
	ref    channel.ProcessRef
	budget int64
	why    airlock.Outcome // set when we end it: Timeout or OutputLimit
	mu     sync.Mutex      // guards ref and why
	timer  *time.Timer
	done   bool
	cut    bool // output was dropped: whatever ended it, the result is not whole

	ended ended
	out   int64 // bytes of output
}

// Start starts a process. After timeout, if it is not 0, its whole tree is
// killed and it ends with the outcome Timeout.
func (g *Guest) Start(ctx context.Context, req channel.StartRequest, timeout time.Duration) (*Exec, error) {
	a := g.act("exec:start")
	a.context = policy.Context{"program": req.Cmd}
	if req.User != "" {
		a.context["user"] = req.User
	}
	a.private = map[string]any{"context": policy.Context{"program": req.Cmd}, "args": req.Args, "cwd": req.Cwd}
	if err := g.boundary.ask(ctx, g.act("exec:output")); err != nil {
		return nil, err
	}
	done, err := g.boundary.inside(ctx, a)
	if err != nil {
		return nil, err
	}
	e, err := g.exec(ctx, channel.MethodStart, req, timeout, done)
	command := strings.Join(append([]string{req.Cmd}, req.Args...), " ")
	fields := map[string]string{"command": command[:min(len(command), maxLogged)]}
	if req.User != "" { // else the image's own
		fields["user"] = req.User
	}
	if err != nil {
		fields["error"] = err.Error()
		g.log.add("error", "exec refused", fields)
		return nil, err
	}
	fields["pid"] = strconv.Itoa(int(e.PID()))
	g.log.add("info", "exec started", fields)
	return e, nil
}

// maxLogged bounds a command in the sandbox's log.
const maxLogged = 256

// Attach follows a process that runs already, from now on. The timeout ends
// the following, as E2B has it, by killing the process too.
func (g *Guest) Attach(ctx context.Context, ref channel.ProcessRef, timeout time.Duration) (*Exec, error) {
	if err := g.boundary.ask(ctx, g.act("exec:output")); err != nil {
		return nil, err
	}
	done, err := g.boundary.inside(ctx, g.act("exec:attach"))
	if err != nil {
		return nil, err
	}
	return g.exec(ctx, channel.MethodAttach, ref, timeout, done)
}

func (g *Guest) exec(ctx context.Context, method string, req any, timeout time.Duration, done ended) (_ *Exec, err error) {
	defer func() {
		if err != nil {
			done(outcomeOf(err))
		}
	}()
	s, err := g.mux.Open(ctx, method, req)
	if err != nil {
		return nil, err
	}
	e := &Exec{g: g, s: s, budget: g.Sandbox.Limits.OutputBytes, ended: done}
	tag, body, err := s.Recv(ctx)
	var started channel.Started
	switch {
	case err != nil:
		s.Close()
		return nil, err
	case tag != channel.TagStarted || json.Unmarshal(body, &started) != nil || started.PID == 0:
		s.Close()
		return nil, airlock.Errorf(airlock.Internal, "the guest answered %s out of form", method)
	}
	e.ref.PID = started.PID
	if timeout > 0 {
		e.timer = time.AfterFunc(timeout, func() { e.stop(airlock.Timeout) })
	}
	return e, nil
}

// PID is that of the process inside the sandbox.
func (e *Exec) PID() uint32 { return e.ref.PID }

// stop ends the process's tree for a reason of ours. Neither a guest that
// does not kill nor a client that does not read can keep the exec from ending.
// It returns within the guest's time to answer; nobody waits for it.
func (e *Exec) stop(why airlock.Outcome) {
	e.mu.Lock()
	first := e.why == ""
	if first {
		e.why = why
	}
	e.mu.Unlock()
	if !first {
		return
	}
	time.AfterFunc(stopGrace, e.s.Close) // after the end it does nothing
	ctx, cancel := context.WithTimeout(context.Background(), probeAnswer)
	defer cancel()
	switch err := e.g.signal(ctx, e.ref, 9); {
	case err == nil:
	case airlock.CodeOf(err) == airlock.NotFound: // it ended by itself
	default:
		// Code that was told to stop may be running on: fail closed.
		e.g.log.add("error", "the sandbox is ended: a command could not be killed", map[string]string{"pid": strconv.Itoa(int(e.ref.PID)), "error": err.Error()})
		e.s.Close()
		e.g.mux.Close()
	}
}

// stopGrace is how long the end of a killed process may take to arrive.
const stopGrace = 5 * time.Second

// Recv returns the next event, and io.EOF after the end. It applies the
// output limit: what is over it is cut and the process is killed.
func (e *Exec) Recv(ctx context.Context) (ExecEvent, error) {
	for {
		if e.done {
			return ExecEvent{}, io.EOF
		}
		tag, body, err := e.s.Recv(ctx)
		if err != nil {
			if ctx.Err() != nil {
				return ExecEvent{}, ctx.Err()
			}
			return e.lost(err)
		}
		switch tag {
		case channel.TagStdout, channel.TagStderr, channel.TagPTY:
			if e.budget <= 0 {
				continue // cut: the process is being killed
			}
			if int64(len(body)) > e.budget {
				body = body[:e.budget]
				e.budget = 0
				e.cut = true
				go e.stop(airlock.OutputLimit) // bounded by stopGrace
			} else {
				e.budget -= int64(len(body))
			}
			if e.out += int64(len(body)); len(body) > 0 {
				return ExecEvent{Stream: tag, Data: body}, nil
			}
		case channel.TagEnded:
			var end channel.Ended
			if err := json.Unmarshal(body, &end); err != nil {
				return ExecEvent{}, airlock.Errorf(airlock.Internal, "the guest ended an exec out of form")
			}
			return e.finish(end), nil
		default:
			return ExecEvent{}, airlock.Errorf(airlock.Internal, "the guest sent an unknown message")
		}
	}
}

func (e *Exec) reason() airlock.Outcome {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.why
}

func (e *Exec) finish(end channel.Ended) ExecEvent {
	e.done = true
	out := &ExecEnd{ExitCode: end.ExitCode, Signal: end.Signal, Outcome: end.Outcome}
	switch end.Outcome {
	case airlock.Exited, airlock.Signaled, airlock.OOM:
	default:
		out.Outcome = airlock.Exited // a guest cannot claim the host's reasons
	}
	if out.Outcome == airlock.Signaled && out.Signal == "SIGKILL" && e.reason() == "" && e.g.hitWall() {
		out.Outcome = airlock.SandboxOOM
	}
	if e.cut {
		out.Outcome = airlock.OutputLimit
	} else if why := e.reason(); why != "" && (out.Signal != "" || out.Outcome != airlock.Exited) {
		out.Outcome = why
	}
	if out.Outcome != airlock.Exited {
		out.ExitCode = -1
	}
	e.g.log.add("info", "exec ended", map[string]string{"pid": strconv.Itoa(int(e.ref.PID)), "outcome": string(out.Outcome), "exitCode": strconv.Itoa(out.ExitCode)})
	switch out.Outcome {
	case airlock.Exited:
		if out.ExitCode != 0 {
			out.Message = fmt.Sprintf("exit status %d", out.ExitCode)
		}
	case airlock.Signaled:
		out.Message = "signal: " + signalWord(out.Signal)
	case airlock.SandboxOOM:
		out.Message = e.g.wallMessage()
	case airlock.OOM:
		out.Message = fmt.Sprintf("out of memory: the sandbox's limit of %d MiB was reached and its largest process ended; ask for more with limits.memoryMB (--memory)", e.g.Sandbox.Limits.MemoryMB)
	case airlock.Timeout:
		out.Message = "timeout: the command ran longer than its deadline and was killed"
	case airlock.OutputLimit:
		out.Message = fmt.Sprintf("output limit: more than %d bytes were written and the command was killed; ask for more with limits.outputBytes (--output-bytes)", e.g.Sandbox.Limits.OutputBytes)
	}
	e.tell(out)
	return ExecEvent{End: out}
}

// tell records how it ended, as far as the host can know.
func (e *Exec) tell(end *ExecEnd) {
	o := audit.Outcome{Status: "ok", Code: string(end.Outcome), Counts: map[string]int64{"bytesOut": e.out}}
	if end.Outcome == airlock.Exited {
		o.ExitCode = &end.ExitCode
	}
	e.ended(o)
}

// wallDelay is how long after one of its processes a sandbox may end that ran
// into its memory wall.
const wallDelay = 50 * time.Millisecond

// hitWall says whether a killed process was the first to go of a sandbox that
// is being ended for want of memory.
func (g *Guest) hitWall() bool {
	select {
	case <-g.Gone():
		return g.ended() == airlock.SandboxOOM
	case <-time.After(wallDelay):
		return false
	}
}

func (g *Guest) wallMessage() string {
	return fmt.Sprintf("the sandbox ran out of memory (limit %d MiB) and was ended; ask for more with limits.memoryMB (--memory)", g.Sandbox.Limits.MemoryMB)
}

// signalWord is how E2B and shells call the two common ones.
func signalWord(name string) string {
	switch name {
	case "SIGKILL":
		return "killed"
	case "SIGTERM":
		return "terminated"
	}
	return name
}

// lost makes an end of a stream that broke off.
func (e *Exec) lost(err error) (ExecEvent, error) {
	if why := e.reason(); why != "" {
		return e.finish(channel.Ended{ExitCode: -1, Signal: "SIGKILL", Outcome: airlock.Signaled}), nil
	}
	select {
	case <-e.g.Gone():
		e.done = true
		why := e.g.ended()
		msg := "the sandbox was killed or reached its end of life"
		switch why {
		case airlock.SandboxOOM:
			msg = e.g.wallMessage()
		case airlock.SandboxFailed:
			msg = "the sandbox ended unexpectedly"
		}
		end := &ExecEnd{ExitCode: -1, Outcome: why, Message: msg}
		e.tell(end)
		return ExecEvent{End: end}, nil
	default:
		return ExecEvent{}, err
	}
}

// Close stops following; the process goes on and its output is dropped.
func (e *Exec) Close() {
	if e.timer != nil && e.done {
		e.timer.Stop()
	}
	if !e.done {
		e.ended(audit.Outcome{Status: "ok", Code: "left", Counts: map[string]int64{"bytesOut": e.out}})
	}
	e.s.Close()
}

// Input writes all of r to a process's standard input or terminal, and
// returns when the process's pipe has taken it.
func (g *Guest) Input(ctx context.Context, ref channel.ProcessRef, r io.Reader) error {
	if err := g.boundary.ask(ctx, g.act("exec:input")); err != nil {
		return err
	}
	s, err := g.mux.Open(ctx, channel.MethodInput, ref)
	if err != nil {
		return err
	}
	defer s.Close()
	if _, err := io.Copy(s.Writer(ctx, channel.TagInput), r); err != nil {
		return guestError(ctx, s, err)
	}
	if err := s.CloseSend(); err != nil {
		return err
	}
	_, err = channel.RecvReply[channel.Empty](ctx, s, channel.MethodInput)
	return err
}

// guestError prefers the guest's own reason for a broken stream.
func guestError(ctx context.Context, s *channel.Stream, err error) error {
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if _, _, why := s.Recv(ctx); why != nil && !errors.Is(why, io.EOF) && airlock.CodeOf(why) != airlock.Internal {
		return why
	}
	return err
}

// CloseStdin closes a process's standard input.
func (g *Guest) CloseStdin(ctx context.Context, ref channel.ProcessRef) error {
	if err := g.boundary.ask(ctx, g.act("exec:input")); err != nil {
		return err
	}
	_, err := channel.Call[channel.Empty](ctx, g.mux, channel.MethodCloseStdin, ref)
	return err
}

// Signal sends a signal to a process and everything it started.
func (g *Guest) Signal(ctx context.Context, ref channel.ProcessRef, signal int) error {
	done, err := g.boundary.inside(ctx, g.act("exec:signal"))
	if err != nil {
		return err
	}
	if err := g.signal(ctx, ref, signal); err != nil {
		done(outcomeOf(err))
		return err
	}
	return nil
}

func (g *Guest) signal(ctx context.Context, ref channel.ProcessRef, signal int) error {
	_, err := channel.Call[channel.Empty](ctx, g.mux, channel.MethodSignal, channel.SignalRequest{ProcessRef: ref, Signal: signal})
	return err
}

// Resize sets the size of a process's terminal.
func (g *Guest) Resize(ctx context.Context, ref channel.ProcessRef, size channel.Size) error {
	if err := g.boundary.ask(ctx, g.act("exec:resize")); err != nil {
		return err
	}
	_, err := channel.Call[channel.Empty](ctx, g.mux, channel.MethodResize, channel.ResizeRequest{ProcessRef: ref, Size: size})
	return err
}

// Processes lists the processes that were started through the API and run.
func (g *Guest) Processes(ctx context.Context) ([]channel.ProcessInfo, error) {
	if err := g.boundary.ask(ctx, g.act("exec:list")); err != nil {
		return nil, err
	}
	return channel.CallAll[channel.ProcessInfo](ctx, g.mux, channel.MethodProcesses, channel.Empty{}, maxEntries)
}

// ReadFile opens a file; the caller reads and closes it. The entry's size is
// what stat said and may differ from what is read (procfs says 0).
func (g *Guest) ReadFile(ctx context.Context, req channel.ReadRequest) (_ channel.Entry, _ io.ReadCloser, err error) {
	a := g.act("file:download").path(req.User, req.Path)
	done, err := g.boundary.inside(ctx, a)
	if err != nil {
		return channel.Entry{}, nil, err
	}
	req.Path = a.on.ID
	defer func() {
		if err != nil {
			done(outcomeOf(err))
		}
	}()
	s, err := g.mux.Open(ctx, channel.MethodRead, req)
	if err != nil {
		return channel.Entry{}, nil, err
	}
	entry, err := channel.RecvReply[channel.Entry](ctx, s, channel.MethodRead)
	if err != nil {
		s.Close()
		return channel.Entry{}, nil, err
	}
	return entry, &fileReader{r: s.Reader(ctx, channel.TagData), s: s, done: done}, nil
}

type fileReader struct {
	r    io.Reader
	s    *channel.Stream
	done ended
	out  int64
}

func (f *fileReader) Read(p []byte) (int, error) {
	n, err := f.r.Read(p)
	f.out += int64(n)
	return n, err
}

func (f *fileReader) Close() error {
	f.s.Close()
	f.done(audit.Outcome{Status: "ok", Counts: map[string]int64{"bytesOut": f.out}})
	return nil
}

// WriteFile replaces a file's contents with all of r. When r or the guest
// fails, the file is as it was.
func (g *Guest) WriteFile(ctx context.Context, req channel.WriteRequest, r io.Reader) (_ channel.Entry, err error) {
	a := g.act("file:write").path(req.User, req.Path)
	done, err := g.boundary.inside(ctx, a)
	if err != nil {
		return channel.Entry{}, err
	}
	req.Path = a.on.ID
	var in int64
	defer func() {
		o := outcomeOf(err)
		o.Counts = map[string]int64{"bytesIn": in}
		done(o)
	}()
	s, err := g.mux.Open(ctx, channel.MethodWrite, req)
	if err != nil {
		return channel.Entry{}, err
	}
	defer s.Close()
	for {
		var rerr error
		n, err := s.SendFrom(ctx, channel.TagData, func(buf []byte) (n int) {
			n, rerr = fill(buf, r) // a body comes in small pieces, and a packet costs much
			return n
		})
		in += int64(n)
		if err != nil {
			return channel.Entry{}, guestError(ctx, s, err)
		}
		if rerr == io.EOF {
			break
		}
		if rerr != nil {
			return channel.Entry{}, rerr // Close resets the stream: the guest drops the upload
		}
	}
	if err := s.CloseSend(); err != nil {
		return channel.Entry{}, err
	}
	return channel.RecvReply[channel.Entry](ctx, s, channel.MethodWrite)
}

// fill is io.ReadFull with r's own errors: where a body broke off must not
// look like its end, nor its end like a break.
func fill(buf []byte, r io.Reader) (n int, err error) {
	for n < len(buf) && err == nil {
		var m int
		m, err = r.Read(buf[n:])
		n += m
	}
	return n, err
}

// Stat describes a path.
func (g *Guest) Stat(ctx context.Context, req channel.PathRequest) (entry channel.Entry, err error) {
	err = g.file(ctx, "file:stat", &req, func() error {
		entry, err = channel.Call[channel.Entry](ctx, g.mux, channel.MethodStat, req)
		return err
	})
	return entry, err
}

// Mkdir makes a directory and its parents.
func (g *Guest) Mkdir(ctx context.Context, req channel.PathRequest) (entry channel.Entry, err error) {
	err = g.file(ctx, "file:mkdir", &req, func() error {
		entry, err = channel.Call[channel.Entry](ctx, g.mux, channel.MethodMkdir, req)
		return err
	})
	return entry, err
}

// Remove removes a path and all below it.
func (g *Guest) Remove(ctx context.Context, req channel.PathRequest) error {
	return g.file(ctx, "file:remove", &req, func() error {
		_, err := channel.Call[channel.Empty](ctx, g.mux, channel.MethodRemove, req)
		return err
	})
}

// Move renames a path.
func (g *Guest) Move(ctx context.Context, req channel.MoveRequest) (channel.Entry, error) {
	a := g.act("file:move").path(req.User, req.Source)
	to := g.act("file:move").path(req.User, req.Destination)
	if a.err == nil {
		a.err = to.err
	}
	a.context = policy.Context{"to": to.on.ID}
	a.private["context"] = a.context
	done, err := g.boundary.inside(ctx, a)
	if err != nil {
		return channel.Entry{}, err
	}
	req.Source, req.Destination = a.on.ID, to.on.ID
	entry, err := channel.Call[channel.Entry](ctx, g.mux, channel.MethodMove, req)
	if err != nil {
		done(outcomeOf(err))
	}
	return entry, err
}

// Compose makes one file of several, which go: all of it or nothing.
func (g *Guest) Compose(ctx context.Context, req channel.ComposeRequest) (entry channel.Entry, err error) {
	acts := make([]act, len(req.Sources)+1)
	sources := make([]string, len(req.Sources))
	for i, source := range req.Sources {
		acts[i] = g.act("file:remove").path(req.User, source)
		sources[i] = acts[i].on.ID
	}
	acts[len(sources)] = g.act("file:write").path(req.User, req.Destination)
	req.Sources, req.Destination = sources, acts[len(sources)].on.ID
	done, err := g.boundary.insideAll(ctx, acts)
	if err != nil {
		return channel.Entry{}, err
	}
	entry, err = channel.Call[channel.Entry](ctx, g.mux, channel.MethodCompose, req)
	if err != nil {
		done(outcomeOf(err))
	}
	return entry, err
}

// ListDir lists a directory.
func (g *Guest) ListDir(ctx context.Context, req channel.ListDirRequest) (entries []channel.Entry, err error) {
	err = g.file(ctx, "file:list", &req.PathRequest, func() error {
		entries, err = channel.CallAll[channel.Entry](ctx, g.mux, channel.MethodListDir, req, maxEntries)
		return err
	})
	return entries, err
}

// Env returns the environment that its client gave the sandbox.
func (g *Guest) Env(ctx context.Context) (map[string]string, error) {
	if err := g.boundary.ask(ctx, g.act("sandbox:get")); err != nil {
		return nil, err
	}
	return g.Sandbox.Env, nil
}

// Usage returns the guest's view of what the sandbox uses.
func (g *Guest) Usage(ctx context.Context) (channel.Usage, error) {
	if err := g.boundary.ask(ctx, g.act("sandbox:metrics")); err != nil {
		return channel.Usage{}, err
	}
	return channel.Call[channel.Usage](ctx, g.mux, channel.MethodUsage, channel.Empty{})
}
