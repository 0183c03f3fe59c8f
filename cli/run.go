package cli

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"
	"unicode/utf8"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"airlock.dev/airlock"
	"airlock.dev/airlock/client"
	"airlock.dev/airlock/doctor"
)

const (
	home    = "/home/user" // of the user "user" in every sandbox
	maxCode = 64 << 20     // bytes of code that is run
)

// runFlags are the flags of `airlock run`.
type runFlags struct {
	limitFlags
	netFlags
	code     string
	language string
	timeout  time.Duration
	env      []string
	files    []string
}

func (a *app) run() *cobra.Command {
	var f runFlags
	cmd := &cobra.Command{
		Use:   "run FILE | -c CODE | -  [flags] [-- ARGUMENT...]",
		Short: "Run a program in a fresh sandbox",
		Long: `Run copies a program into a fresh sandbox as ` + home + `/NAME, runs it there as
the user "user", and throws the sandbox away. Its output and exit code are the
command's own, and it reads the command's standard input ("-" reads the code
itself from there instead).

The language is that of --language, else of the #! line, else of the file's
extension: ` + languageNames() + `.

Where a server runs (airlock serve, or --url), the sandbox is one of its, and
reaches what --net asks for and the operator's policies allow; each attempt is
recorded (airlock audit crossings --last). A program that fails and was denied
something is followed by what and why, on standard error. Without a server this
process makes the sandbox, needs to be root, and gives it no network.

With --json the output comes as lines {"type":"stdout","text":…} (or "base64",
where it is no text) and ends with {"type":"end","exitCode":…,"outcome":…} and
the "sandboxID" on the server.

` + ExitCodes,
		Example: `  airlock run hello.py
  airlock run -c 'console.log(process.argv[2])' --language node -- hello
  airlock run --net packages -c 'pip install -q six && python3 -c "import six"' --language bash
  airlock run analysis.py --file sales.csv --file conf.json:etc/conf.json --memory 2GiB
  echo 'print(1)' | airlock run - --language python --timeout 10s`,
		Annotations: map[string]string{runsPrograms: "yes"},
		Args: func(cmd *cobra.Command, args []string) error {
			named := args
			if dash := cmd.ArgsLenAtDash(); dash >= 0 {
				named = args[:dash]
			}
			switch hasCode := cmd.Flags().Changed("code"); {
			case hasCode && len(named) > 0:
				return usage(cmd, "give either a file or -c, not both; arguments of the program go after --")
			case !hasCode && len(named) == 0:
				return usage(cmd, "nothing to run: name a file, - for standard input, or give code with -c")
			case len(named) > 1:
				return usage(cmd, "one file at a time; arguments of the program go after --")
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			if cmd.Flags().Changed("code") {
				return a.runCode(cmd.Context(), f, nil, args)
			}
			return a.runCode(cmd.Context(), f, &args[0], args[1:])
		},
	}
	flags := cmd.Flags()
	flags.StringVarP(&f.code, "code", "c", "", "the program itself")
	flags.StringVarP(&f.language, "language", "l", "", "its language")
	flags.DurationVar(&f.timeout, "timeout", 5*time.Minute, "kill the program after this time")
	flags.StringArrayVarP(&f.env, "env", "e", nil, "NAME=VALUE of a variable; may be repeated")
	flags.StringArrayVar(&f.files, "file", nil, "LOCAL[:REMOTE] to copy into the sandbox; REMOTE is relative to "+home+"; may be repeated")
	f.limitFlags.add(cmd)
	f.netFlags.add(cmd)
	return cmd
}

// upload is a local file and where it goes.
type upload struct{ local, remote string }

// parseUpload reads LOCAL[:REMOTE]. A colon may be part of an existing name.
func parseUpload(flag, s string) (upload, error) {
	u := upload{local: s}
	if _, err := os.Stat(s); err != nil {
		if i := strings.LastIndexByte(s, ':'); i > 0 {
			u = upload{s[:i], s[i+1:]}
		}
	}
	info, err := os.Stat(u.local)
	switch {
	case err != nil:
		return u, notReadable(flag, u.local, err)
	case info.IsDir():
		return u, airlock.Invalidf(flag, "pack it with tar and unpack it in the program", "%s: %s is a directory", flag, u.local)
	}
	if u.remote == "" || strings.HasSuffix(u.remote, "/") {
		u.remote += filepath.Base(u.local)
	}
	if !path.IsAbs(u.remote) {
		u.remote = path.Join(home, u.remote)
	}
	return u, nil
}

func notReadable(field, name string, err error) error {
	what := "cannot read " + name
	switch {
	case errors.Is(err, os.ErrNotExist):
		what = name + " does not exist"
	case errors.Is(err, os.ErrPermission):
		what = name + " may not be read"
	case errors.Is(err, syscall.EISDIR):
		what = name + " is a directory"
	default:
		var p *os.PathError
		if errors.As(err, &p) {
			err = p.Err
		}
		what += ": " + err.Error()
	}
	if strings.HasPrefix(field, "--") {
		what = field + ": " + what
	}
	code := airlock.Invalid
	if errors.Is(err, os.ErrNotExist) {
		code = airlock.NotFound
	}
	return &airlock.Error{Code: code, Field: field, Message: what, Hint: "check the path"}
}

// program is what is to be run, complete and checked.
type program struct {
	code   []byte
	remote string
	lang   language
	args   []string
	stdin  io.Reader
	files  []upload
}

func (a *app) readProgram(f runFlags, file *string, args []string) (program, error) {
	p := program{args: args, stdin: a.Stdin}
	name := ""
	switch {
	case file == nil:
		p.code = []byte(f.code)
	case *file == "-":
		code, err := io.ReadAll(io.LimitReader(a.Stdin, maxCode+1))
		if err != nil {
			return p, notReadable("code", "standard input", err)
		}
		p.code, p.stdin = code, nil
	default:
		name = *file
		r, err := os.Open(name)
		if err != nil {
			return p, notReadable("file", name, err)
		}
		defer r.Close()
		if p.code, err = io.ReadAll(io.LimitReader(r, maxCode+1)); err != nil {
			return p, notReadable("file", name, err)
		}
	}
	if len(p.code) > maxCode {
		return p, &airlock.Error{Code: airlock.TooLarge, Field: "file", Message: fmt.Sprintf("the program is larger than %d MiB", maxCode>>20), Hint: "copy data with --file"}
	}
	var err error
	if p.lang, err = languageOf(f.language, name, p.code); err != nil {
		return p, err
	}
	p.remote = path.Join(home, "main"+p.lang.extensions[0])
	if name != "" {
		p.remote = path.Join(home, filepath.Base(name))
	}
	for _, s := range f.files {
		u, err := parseUpload("--file", s)
		if err != nil {
			return p, err
		}
		if u.remote == p.remote {
			return p, airlock.Invalidf("--file", "give it another name: LOCAL:REMOTE", "--file: %s would replace the program", s)
		}
		p.files = append(p.files, u)
	}
	return p, nil
}

// Life of a sandbox beyond that of its program.
const lifeAfter = time.Minute

func (a *app) runCode(ctx context.Context, f runFlags, file *string, args []string) error {
	if err := life("--timeout", f.timeout); err != nil {
		return err
	}
	limits, err := f.limits()
	if err != nil {
		return err
	}
	vars, err := pairs("--env", f.env)
	if err != nil {
		return err
	}
	create := client.CreateRequest{Limits: limits, Timeout: min(f.timeout+lifeAfter, maxLife), Metadata: map[string]string{"airlock.run": "true"}}
	if create.Profile, create.Policy, err = f.asks(); err != nil {
		return err
	}
	if create.Secrets, err = f.wanted(); err != nil {
		return err
	}
	c, err := a.connect()
	if err != nil {
		return err
	}
	if c == nil && len(create.Secrets) > 0 {
		return airlock.Invalidf("--secret", "start one with `airlock serve`", "--secret needs a server, which keeps secrets and puts them into requests")
	}
	if c == nil && f.net != "" && f.net != "offline" {
		return airlock.Invalidf("--net", "start one with `airlock serve`, or leave --net out: without a server a program has no network", "--net %s needs a server, which decides and records what leaves", f.net)
	}
	enter := c == nil && a.EnterLocal != nil
	var p program
	if fromStdin := file != nil && *file == "-"; !enter || !fromStdin { // else it is there to read for who is entered
		if p, err = a.readProgram(f, file, args); err != nil {
			return err
		}
	}
	if enter {
		code, err := a.EnterLocal(ctx)
		if err != nil {
			return a.diagnose(ctx, err)
		}
		if code != 0 {
			return &exit{code: code}
		}
		return nil
	}
	runner, err := a.newRunner(ctx, c, create)
	if err != nil {
		return f.named(err)
	}
	result, err := a.runProgram(ctx, runner, p, vars, f.timeout)
	id := ""
	if sandbox, ok := runner.(*client.Sandbox); ok {
		id = sandbox.ID
		if err == nil && exitCode(result) != 0 && !a.json {
			defer a.tellDenied(ctx, c, id)()
		}
	}
	// A sandbox that does not end is told even when the program did well.
	if closeErr := runner.Close(); err == nil && closeErr != nil && airlock.CodeOf(closeErr) != airlock.NotFound {
		a.note("the sandbox did not end cleanly: %v", closeErr)
	}
	if err != nil {
		if ctx.Err() != nil {
			return &exit{128 + int(syscall.SIGINT), ctx.Err()}
		}
		return err
	}
	return a.end(result, id)
}

// deniedShown is how many denials are told of a program that failed.
const deniedShown = 3

// tellDenied reads what a sandbox was denied, while it is there, and returns
// what tells it: a program that failed may have failed for that, and its own
// words, such as curl's "Could not resolve host", do not say so.
func (a *app) tellDenied(ctx context.Context, c *client.Client, id string) func() {
	var denied []string
	// Without its log there is nothing to tell; the program's end is told anyway.
	c.Logs(ctx, id, false, func(e client.LogEntry) error {
		if what, ok := strings.CutSuffix(e.Message, ": denied"); ok {
			text := printable(what + ": " + e.Fields["reason"])
			if !slices.Contains(denied, text) {
				denied = append(denied, text)
			}
		}
		return nil
	})
	return func() {
		if len(denied) == 0 {
			return
		}
		for _, text := range denied[:min(deniedShown, len(denied))] {
			a.note("denied: %s", text)
		}
		fmt.Fprintf(a.Stderr, "  hint: `airlock audit crossings %s` lists all that it tried\n", id)
	}
}

// newRunner makes the sandbox: on the server c, or in this process if c is nil.
func (a *app) newRunner(ctx context.Context, c *client.Client, req client.CreateRequest) (Runner, error) {
	if c != nil {
		s, err := c.Create(ctx, req)
		if err != nil {
			return nil, err // not s: a nil of its type is no nil Runner
		}
		return s, nil
	}
	runner, err := a.RunLocal(ctx, RunOptions{DataDir: a.dataDir, Limits: req.Limits, Life: req.Timeout})
	if err != nil {
		return nil, a.diagnose(ctx, err)
	}
	return runner, nil
}

// diagnose prefers what is wrong with this machine to the error that followed
// from it. Looking takes time, so that runs which work do not.
func (a *app) diagnose(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return err
	}
	if why := doctor.Fatal(a.Required(ctx, a.dataDir)); why != nil {
		return why
	}
	return err
}

func (a *app) runProgram(ctx context.Context, runner Runner, p program, vars map[string]string, timeout time.Duration) (ExecResult, error) {
	if err := runner.Upload(ctx, p.remote, strings.NewReader(string(p.code)), 0); err != nil {
		return ExecResult{}, fmt.Errorf("copy the program: %w", err)
	}
	for _, u := range p.files {
		if err := uploadFile(ctx, runner, u); err != nil {
			return ExecResult{}, err
		}
	}
	req := ExecRequest{
		Cmd:     p.lang.command[0],
		Args:    append(append(p.lang.command[1:len(p.lang.command):len(p.lang.command)], p.remote), p.args...),
		Env:     vars,
		Cwd:     home,
		User:    "user",
		Stdin:   p.stdin,
		Timeout: timeout,
	}
	result, err := a.exec(ctx, runner, req)
	if code := airlock.CodeOf(err); err != nil && (code == airlock.Invalid || code == airlock.NotFound) && p.lang.needs == p.lang.command[0] {
		var e *airlock.Error
		if errors.As(err, &e) && e.Hint == "" {
			e.Hint = "the sandbox's image may lack " + p.lang.needs
		}
	}
	return result, err
}

func uploadFile(ctx context.Context, runner interface {
	Upload(context.Context, string, io.Reader, os.FileMode) error
}, u upload) error {
	r, err := os.Open(u.local)
	if err != nil {
		return notReadable("--file", u.local, err)
	}
	defer r.Close()
	info, err := r.Stat()
	if err != nil {
		return notReadable("--file", u.local, err)
	}
	var mode os.FileMode
	if info.Mode().Perm()&0o111 != 0 {
		mode = 0o755
	}
	if err := runner.Upload(ctx, u.remote, r, mode); err != nil {
		return fmt.Errorf("copy %s: %w", u.local, err)
	}
	return nil
}

// execer is the part of a Runner that a.exec uses.
type execer interface {
	Exec(ctx context.Context, req ExecRequest) (ExecResult, error)
}

// exec runs a program with the command's own streams.
func (a *app) exec(ctx context.Context, runner execer, req ExecRequest) (ExecResult, error) {
	if !a.json {
		req.Stdout, req.Stderr = a.Stdout, a.Stderr
		return runner.Exec(ctx, req)
	}
	var mu sync.Mutex
	enc := json.NewEncoder(a.Stdout)
	enc.SetEscapeHTML(false)
	stdout := &jsonStream{mu: &mu, enc: enc, name: "stdout"}
	stderr := &jsonStream{mu: &mu, enc: enc, name: "stderr"}
	req.Stdout, req.Stderr = stdout, stderr
	result, err := runner.Exec(ctx, req)
	return result, errors.Join(err, stdout.flush(), stderr.flush())
}

// jsonStream writes output as events. A character that was cut in two waits
// for its rest.
type jsonStream struct {
	mu   *sync.Mutex // guards enc, which both streams share
	enc  *json.Encoder
	name string
	rest []byte
}

type outputEvent struct {
	Type   string `json:"type"`
	Text   string `json:"text,omitempty"`
	Base64 string `json:"base64,omitempty"`
}

func (s *jsonStream) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	b := append(s.rest, p...)
	cut := len(b)
	for i := 1; i <= min(utf8.UTFMax-1, len(b)); i++ {
		if utf8.RuneStart(b[len(b)-i]) {
			if !utf8.FullRune(b[len(b)-i:]) {
				cut = len(b) - i
			}
			break
		}
	}
	s.rest = append([]byte(nil), b[cut:]...)
	return len(p), s.write(b[:cut])
}

func (s *jsonStream) write(b []byte) error {
	if len(b) == 0 {
		return nil
	}
	e := outputEvent{Type: s.name}
	if utf8.Valid(b) {
		e.Text = string(b)
	} else {
		e.Base64 = base64.StdEncoding.EncodeToString(b)
	}
	return s.enc.Encode(e)
}

func (s *jsonStream) flush() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	b := s.rest
	s.rest = nil
	return s.write(b)
}

// endEvent is the last line of a program's run with --json.
type endEvent struct {
	Type     string          `json:"type"`
	ExitCode int             `json:"exitCode"`
	Outcome  airlock.Outcome `json:"outcome"`
	Signal   string          `json:"signal,omitempty"`
	Message  string          `json:"message,omitempty"`
	Sandbox  string          `json:"sandboxID,omitempty"` // of a run on a server: its trail stays
}

// end says how a program ended and makes it the command's exit code. The
// sandbox is that of a run; it may be empty.
func (a *app) end(r ExecResult, sandbox string) error {
	code := exitCode(r)
	if a.json {
		event := endEvent{"end", r.ExitCode, r.Outcome, r.Signal, r.Message, sandbox}
		if err := json.NewEncoder(a.Stdout).Encode(event); err != nil {
			return err
		}
	} else if r.Outcome != airlock.Exited && r.Outcome != airlock.Signaled {
		message := r.Message
		if message == "" {
			message = string(r.Outcome)
		}
		a.note("%s", message)
	}
	if code == 0 {
		return nil
	}
	return &exit{code: code}
}

func exitCode(r ExecResult) int {
	switch r.Outcome {
	case airlock.Exited:
		return r.ExitCode
	case airlock.Signaled:
		if n := unix.SignalNum(r.Signal); n != 0 {
			return 128 + int(n)
		}
		return exitKilled
	case airlock.Timeout:
		return exitTimeout
	case airlock.OOM, airlock.SandboxOOM, airlock.OutputLimit, airlock.SandboxKilled:
		return exitKilled
	}
	return exitAirlock
}
