package client

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"connectrpc.com/connect"

	"airlock.dev/airlock"
	"airlock.dev/airlock/api/envd"
)

// dataPort is where E2B's clients look for processes and files.
const dataPort = "49983"

// Sandbox is the way into one running sandbox.
type Sandbox struct {
	Info
	Timing  []Step // of its create; nil for one that existed
	c       *Client
	process envd.ProcessClient
}

// address names the sandbox to the server and opens its data plane.
func (s *Sandbox) address(h http.Header) {
	h.Set("E2b-Sandbox-Id", s.ID)
	h.Set("E2b-Sandbox-Port", dataPort)
	h.Set("X-Access-Token", s.AccessToken)
}

// The three Wrap methods make a Sandbox an interceptor that addresses calls.

// WrapUnary addresses a call.
func (s *Sandbox) WrapUnary(next connect.UnaryFunc) connect.UnaryFunc {
	return func(ctx context.Context, req connect.AnyRequest) (connect.AnyResponse, error) {
		s.address(req.Header())
		return next(ctx, req)
	}
}

// WrapStreamingClient addresses a stream.
func (s *Sandbox) WrapStreamingClient(next connect.StreamingClientFunc) connect.StreamingClientFunc {
	return func(ctx context.Context, spec connect.Spec) connect.StreamingClientConn {
		conn := next(ctx, spec)
		s.address(conn.RequestHeader())
		return conn
	}
}

// WrapStreamingHandler does nothing: this is a client.
func (s *Sandbox) WrapStreamingHandler(next connect.StreamingHandlerFunc) connect.StreamingHandlerFunc {
	return next
}

// ExecRequest is a program to run.
type ExecRequest struct {
	Cmd            string
	Args           []string
	Env            map[string]string
	Cwd            string        // "" is the user's home
	User           string        // "" is the sandbox's default, "user"
	Stdin          io.Reader     // nil is empty
	Stdout, Stderr io.Writer     // nil drops it
	Timeout        time.Duration // 0 is none of its own
}

// ExecResult is how a program ended.
type ExecResult struct {
	ExitCode int             // -1 unless Outcome is Exited
	Outcome  airlock.Outcome // why it ended
	Signal   string          // "SIGKILL", when Outcome is Signaled
	Message  string          // for a person
}

// overtime is how much longer than a program's timeout the server's own word
// is waited for.
const overtime = 15 * time.Second

// killGrace bounds the kill of a program whose caller has left.
const killGrace = 5 * time.Second

// Exec runs a program until it ends. When ctx ends before, it is killed and
// the error is that of ctx. An error of Stdout or Stderr kills it too.
func (s *Sandbox) Exec(ctx context.Context, req ExecRequest) (ExecResult, error) {
	// No deadline on ctx: Connect would send it in place of Timeout.
	running, cancel := context.WithCancelCause(withoutDeadline(ctx))
	defer cancel(nil)
	defer context.AfterFunc(ctx, func() { cancel(ctx.Err()) })()

	config := &envd.ProcessConfig{Cmd: req.Cmd, Args: req.Args, Envs: req.Env}
	if req.Cwd != "" {
		config.Cwd = &req.Cwd
	}
	input := req.Stdin != nil
	start := connect.NewRequest(&envd.StartRequest{Process: config, Stdin: &input})
	setUser(start.Header(), req.User)
	if req.Timeout > 0 {
		start.Header().Set("Connect-Timeout-Ms", strconv.FormatInt(max(req.Timeout.Milliseconds(), 1), 10))
		defer time.AfterFunc(req.Timeout+overtime, func() { cancel(context.DeadlineExceeded) }).Stop()
	}
	stream, err := s.process.Start(running, start)
	if err != nil {
		return s.broken(ctx, running, 0, err)
	}
	defer stream.Close()
	var pid uint32
	for stream.Receive() {
		switch event := stream.Msg().GetEvent().GetEvent().(type) {
		case *envd.ProcessEvent_Start:
			if pid = event.Start.GetPid(); input {
				input = false // once
				inputCtx, stop := context.WithCancel(running)
				defer stop()
				go s.send(inputCtx, pid, req.Stdin) // ends with the program, or when Stdin next returns
			}
		case *envd.ProcessEvent_Data:
			if err := writeOutput(event.Data, req.Stdout, req.Stderr); err != nil {
				s.kill(pid)
				return ExecResult{}, fmt.Errorf("write output: %w", err)
			}
		case *envd.ProcessEvent_End:
			return resultOf(event.End), nil
		}
	}
	err = stream.Err()
	if err == nil {
		err = airlock.Errorf(airlock.Internal, "the server ended the output without a result")
	}
	return s.broken(ctx, running, pid, err)
}

// withoutDeadline returns the values of ctx.
func withoutDeadline(ctx context.Context) context.Context { return context.WithoutCancel(ctx) }

func writeOutput(data *envd.ProcessEvent_DataEvent, stdout, stderr io.Writer) error {
	w, b := stdout, data.GetStdout()
	switch out := data.GetOutput().(type) {
	case *envd.ProcessEvent_DataEvent_Stderr:
		w, b = stderr, out.Stderr
	case *envd.ProcessEvent_DataEvent_Pty:
		b = out.Pty
	}
	if w == nil {
		return nil
	}
	_, err := w.Write(b)
	return err
}

func (s *Sandbox) kill(pid uint32) {
	if pid == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), killGrace)
	defer cancel()
	s.Signal(ctx, pid, envd.Signal_SIGNAL_SIGKILL) // whether it runs still is not known
}

// broken says why a stream ended before its program.
func (s *Sandbox) broken(ctx, running context.Context, pid uint32, err error) (ExecResult, error) {
	if ctx.Err() != nil {
		s.kill(pid)
		return ExecResult{}, ctx.Err()
	}
	late := errors.Is(context.Cause(running), context.DeadlineExceeded)
	if late {
		s.kill(pid)
	}
	if late || connect.CodeOf(err) == connect.CodeDeadlineExceeded {
		return ExecResult{ExitCode: -1, Outcome: airlock.Timeout, Signal: "SIGKILL", Message: "timeout: the command ran longer than its deadline and was killed"}, nil
	}
	if pid != 0 && !s.Healthy() {
		return ExecResult{ExitCode: -1, Outcome: airlock.SandboxKilled, Message: "the sandbox was killed or reached its end of life"}, nil
	}
	if pid != 0 && errors.Is(err, io.ErrUnexpectedEOF) {
		return ExecResult{}, airlock.Errorf(airlock.Unavailable, "the connection to the server was lost; the command may still run in sandbox %s with pid %d", s.ID, pid).Because(err)
	}
	return ExecResult{}, rpcError(err)
}

// Healthy says whether the server still has the sandbox.
func (s *Sandbox) Healthy() bool {
	ctx, cancel := context.WithTimeout(context.Background(), killGrace)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, s.c.base+"/health", nil)
	if err != nil {
		return false
	}
	s.address(req.Header)
	resp, err := s.c.http.Do(req)
	if err != nil {
		return true // the server's fault, not the sandbox's end
	}
	resp.Body.Close()
	return resp.StatusCode/100 == 2
}

// inputChunk is what is sent of standard input at one time.
const inputChunk = 64 << 10

// send passes r on to a program's standard input and closes it. A program that
// is gone or closed its input ends it without a word, as a pipe would.
func (s *Sandbox) send(ctx context.Context, pid uint32, r io.Reader) {
	buf := make([]byte, inputChunk)
	for {
		n, err := r.Read(buf)
		if n > 0 {
			req := &envd.SendInputRequest{Process: selector(pid), Input: &envd.ProcessInput{Input: &envd.ProcessInput_Stdin{Stdin: buf[:n]}}}
			if _, err := s.process.SendInput(ctx, connect.NewRequest(req)); err != nil {
				return
			}
		}
		if err != nil {
			s.process.CloseStdin(ctx, connect.NewRequest(&envd.CloseStdinRequest{Process: selector(pid)}))
			return
		}
	}
}

func selector(pid uint32) *envd.ProcessSelector {
	return &envd.ProcessSelector{Selector: &envd.ProcessSelector_Pid{Pid: pid}}
}

func setUser(h http.Header, user string) {
	if user != "" {
		r := http.Request{Header: h}
		r.SetBasicAuth(user, "")
	}
}

// Signal sends a signal to a program and all that it started.
func (s *Sandbox) Signal(ctx context.Context, pid uint32, signal envd.Signal) error {
	_, err := s.process.SendSignal(ctx, connect.NewRequest(&envd.SendSignalRequest{Process: selector(pid), Signal: signal}))
	return rpcError(err)
}

// resultOf reads an end event. Its status is the outcome, followed by a
// colon and more where there is more to say; E2B's own are "exit status N"
// and "signal: NAME".
func resultOf(end *envd.ProcessEvent_EndEvent) ExecResult {
	r := ExecResult{ExitCode: int(end.GetExitCode()), Outcome: airlock.Exited, Message: end.GetError()}
	word, rest, _ := strings.Cut(end.GetStatus(), ":")
	switch o := airlock.Outcome(word); {
	case o == airlock.OOM || o == airlock.Timeout || o == airlock.OutputLimit || o == airlock.SandboxOOM || o == airlock.SandboxKilled || o == airlock.SandboxFailed:
		r.Outcome = o
	case word == "signal" || o == airlock.Signaled || !end.GetExited():
		r.Outcome = airlock.Signaled
		r.Signal = signalName(strings.TrimSpace(rest))
	}
	return r
}

// signalName takes "SIGKILL" and Go's "killed" alike.
func signalName(s string) string {
	if strings.HasPrefix(s, "SIG") {
		return s
	}
	for name, text := range map[string]string{
		"SIGKILL": "killed", "SIGTERM": "terminated", "SIGINT": "interrupt", "SIGSEGV": "segmentation fault",
		"SIGABRT": "aborted", "SIGHUP": "hangup", "SIGPIPE": "broken pipe", "SIGBUS": "bus error",
		"SIGFPE": "floating point exception", "SIGILL": "illegal instruction", "SIGQUIT": "quit",
		"SIGTRAP": "trace/breakpoint trap", "SIGALRM": "alarm clock", "SIGUSR1": "user defined signal 1",
		"SIGUSR2": "user defined signal 2", "SIGXCPU": "CPU time limit exceeded", "SIGXFSZ": "file size limit exceeded",
	} {
		if s == text {
			return name
		}
	}
	return s
}

// rpcError makes an error of the data plane a coded one.
func rpcError(err error) error {
	var c *connect.Error
	if err == nil || !errors.As(err, &c) {
		return err
	}
	code := map[connect.Code]airlock.Code{
		connect.CodeInvalidArgument:    airlock.Invalid,
		connect.CodeFailedPrecondition: airlock.Conflict,
		connect.CodeUnauthenticated:    airlock.Unauthenticated,
		connect.CodePermissionDenied:   airlock.Denied,
		connect.CodeNotFound:           airlock.NotFound,
		connect.CodeAlreadyExists:      airlock.Exists,
		connect.CodeResourceExhausted:  airlock.Exhausted,
		connect.CodeOutOfRange:         airlock.TooLarge,
		connect.CodeCanceled:           airlock.Canceled,
		connect.CodeDeadlineExceeded:   airlock.Deadline,
		connect.CodeUnavailable:        airlock.Unavailable,
		connect.CodeUnimplemented:      airlock.Unimplemented,
	}[c.Code()]
	if code == "" {
		code = airlock.Internal
	}
	return airlock.Errorf(code, "%s", c.Message())
}

func (s *Sandbox) files(ctx context.Context, method, user, path string, body io.Reader) (*http.Response, error) {
	query := url.Values{"path": {path}}
	if user != "" {
		query.Set("username", user)
	}
	req, err := http.NewRequestWithContext(ctx, method, s.c.base+"/files?"+query.Encode(), body)
	if err != nil {
		return nil, err
	}
	s.address(req.Header)
	if body != nil {
		req.Header.Set("Content-Type", "application/octet-stream")
	}
	resp, err := s.c.http.Do(req)
	if err != nil {
		return nil, s.c.unreachable(ctx, err)
	}
	if resp.StatusCode/100 != 2 {
		defer resp.Body.Close()
		return nil, errorOf(resp)
	}
	return resp, nil
}

// Upload writes a file from r, its parents too. A mode of 0 means 0644.
func (s *Sandbox) Upload(ctx context.Context, path string, r io.Reader, mode fs.FileMode) error {
	return s.UploadAs(ctx, "", path, r, mode)
}

// UploadAs is Upload as a user.
func (s *Sandbox) UploadAs(ctx context.Context, user, path string, r io.Reader, mode fs.FileMode) error {
	body := &sourceReader{r: r}
	resp, err := s.files(ctx, http.MethodPost, user, path, body)
	if body.err != nil {
		return body.err
	}
	if err != nil {
		return err
	}
	resp.Body.Close()
	if mode == 0 || mode.Perm() == 0o644 {
		return nil
	}
	// The wire has no mode.
	result, err := s.Exec(ctx, ExecRequest{Cmd: "chmod", Args: []string{"--", fmt.Sprintf("%o", mode.Perm()), path}, User: user})
	if err == nil && result.ExitCode != 0 {
		err = airlock.Errorf(airlock.Internal, "the file %s was written but its mode not set", path)
	}
	return err
}

// sourceReader keeps the source's own error, which net/http would wrap in
// words about the server.
type sourceReader struct {
	r   io.Reader
	err error
}

func (s *sourceReader) Read(p []byte) (int, error) {
	n, err := s.r.Read(p)
	if err != nil && err != io.EOF {
		s.err = err
	}
	return n, err
}

// Download writes a file's contents to w.
func (s *Sandbox) Download(ctx context.Context, path string, w io.Writer) error {
	return s.DownloadAs(ctx, "", path, w)
}

// DownloadAs is Download as a user.
func (s *Sandbox) DownloadAs(ctx context.Context, user, path string, w io.Writer) error {
	resp, err := s.files(ctx, http.MethodGet, user, path, nil)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if _, err := io.Copy(w, resp.Body); err != nil {
		return fmt.Errorf("read %s: %w", path, err)
	}
	return nil
}

// Close ends the sandbox.
func (s *Sandbox) Close() error {
	ctx, cancel := context.WithTimeout(context.Background(), overtime)
	defer cancel()
	return s.c.Kill(ctx, s.ID)
}
