// Package cli is the airlock command: it reads flags, calls the server through
// package client or the functions that main gives it, and turns what comes
// back into output and an exit code. It knows nothing of how sandboxes are
// isolated.
//
// Its laws: a program's output goes to standard output and standard error
// unchanged; whatever Airlock itself has to say goes to standard error and
// begins with "airlock:"; with --json everything is one JSON object a line;
// the exit code is the program's own, or one of those in ExitCodes. Start
// reading at Main.
package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"airlock.dev/airlock"
	"airlock.dev/airlock/audit"
	"airlock.dev/airlock/client"
	"airlock.dev/airlock/doctor"
)

// DefaultDataDir is where a server keeps its state.
const DefaultDataDir = "/var/lib/airlock"

// ExitCodes is part of the help.
const ExitCodes = `Exit codes of run and sandbox exec:
  0–123  the program's own
  124    it ran longer than --timeout and was killed
  125    Airlock could not run it; the reason is on standard error
  128+n  signal n ended it
  137    it ran out of memory, wrote too much output or was killed; the reason is on standard error
Other commands end with 0, or with 1 and the reason on standard error.`

// Deps is what main gives to the command line.
type Deps struct {
	Version string
	// Serve runs a server until ctx ends.
	Serve func(ctx context.Context, o ServeOptions) error
	// RunLocal starts one sandbox in this process, without a server. Closing
	// the Runner ends it and leaves nothing behind.
	RunLocal func(ctx context.Context, o RunOptions) (Runner, error)
	// EnterLocal, if set, comes in place of RunLocal: it runs this command
	// line again where RunLocal can be called, and returns its exit code.
	EnterLocal func(ctx context.Context) (int, error)
	// TokenHelper is the program for root keys in PKCS#11 tokens.
	TokenHelper string

	// Check and Required look at the machine; nil means package doctor's.
	Check, Required func(ctx context.Context, dataDir string) []doctor.Finding

	// The streams; nil means the process's own.
	Stdin          io.Reader
	Stdout, Stderr io.Writer
}

// ServeOptions are those of `airlock serve`, checked.
type ServeOptions struct {
	DataDir             string
	RootKey             string // a reference, see keystore.Config; "" is the default
	KeysDir             string // "" is the default
	Listen              string // host:port; loopback unless TLSCert and TLSKey are set
	TLSCert, TLSKey     string // files, both or neither
	Domain              string // what sandboxes' host names end in; may be empty
	Policies            string // directory; "" is the built-in ones
	Witnesses           string // file with a witness policy; "" is none
	AuditPeriod         audit.Period
	AuditBudget         uint64        // events of one sandbox; 0 is the default
	AuditRetention      time.Duration // 0 keeps all
	AuditRepair         bool          // go on after damage of the audit log
	Hold                time.Duration // how long a crossing waits for approval
	Network             NetworkBudgets
	PublicRanges        []netip.Prefix // that count as public
	ProxyResolves       bool           // names are the proxy\'s to resolve
	MaxMemoryMB         int            // MiB that all sandboxes together may use; 0 is what the host can spare
	JSON                bool           // log as JSON lines
	PoolLeast, PoolMost int            // sandboxes that are started ahead
}

// NetworkBudgets are what each sandbox may use of the network.
type NetworkBudgets struct {
	Bytes    int64 // out and in, together
	Flows    int   // at one time
	Requests int   // in a minute
	Answer   int64 // bytes of one
}

// RunOptions are those of a sandbox without a server, checked.
type RunOptions struct {
	DataDir string
	Limits  airlock.Limits // complete
	Life    time.Duration  // after which the sandbox is killed
}

// Runner is one sandbox to run things in. Its server may be elsewhere or this
// very process.
type Runner interface {
	// Exec runs a program until it ends. Its error is Airlock's failure; how
	// the program ended is in the result. When ctx ends, the program is killed.
	Exec(ctx context.Context, req ExecRequest) (ExecResult, error)
	// Upload writes a file; a mode of 0 means 0644.
	Upload(ctx context.Context, path string, r io.Reader, mode os.FileMode) error
	Download(ctx context.Context, path string, w io.Writer) error
	// Close ends the sandbox.
	Close() error
}

// ExecRequest and ExecResult are those of package client.
type (
	ExecRequest = client.ExecRequest
	ExecResult  = client.ExecResult
)

// The exit codes of Airlock's own.
const (
	exitFailure = 1
	exitTimeout = 124
	exitAirlock = 125
	exitKilled  = 137
)

// exit ends the command with a code. A nil err says nothing more.
type exit struct {
	code int
	err  error
}

func (e *exit) Error() string {
	if e.err == nil {
		return fmt.Sprintf("exit code %d", e.code)
	}
	return e.err.Error()
}

func (e *exit) Unwrap() error { return e.err }

// app is one run of the command.
type app struct {
	Deps
	json    bool
	dataDir string
	url     string
	key     string
}

// Main runs the command with the arguments after its name and returns its
// exit code. It is over soon after ctx ends.
func Main(ctx context.Context, args []string, d Deps) int {
	if d.Stdin == nil {
		d.Stdin = os.Stdin
	}
	if d.Stdout == nil {
		d.Stdout = os.Stdout
	}
	if d.Stderr == nil {
		d.Stderr = os.Stderr
	}
	if d.Check == nil {
		d.Check = doctor.Check
	}
	if d.Required == nil {
		d.Required = doctor.Required
	}
	// A reader that leaves must not end this process where it stands, with a
	// sandbox running: with a handler, writes fail instead.
	pipe := make(chan os.Signal, 1)
	signal.Notify(pipe, syscall.SIGPIPE)
	defer signal.Stop(pipe)
	a := &app{Deps: d}
	root := a.root()
	root.SetArgs(args)
	root.SetOut(d.Stdout)
	root.SetErr(d.Stderr)
	err := root.ExecuteContext(ctx)
	if err == nil {
		return 0
	}
	if errors.Is(err, syscall.EPIPE) {
		return 128 + int(syscall.SIGPIPE) // and nobody to tell
	}
	code := exitFailure
	if cmd, _, findErr := root.Find(args); findErr == nil && cmd.Annotations[runsPrograms] != "" {
		code = exitAirlock
	}
	var e *exit
	if errors.As(err, &e) {
		code = e.code
		if e.err == nil {
			return code
		}
	}
	if asksJSON(args) {
		a.json = true // the error may have come before the flag was read
	}
	a.report(err)
	return code
}

// runsPrograms marks the commands whose exit code is a program's.
const runsPrograms = "runs programs"

func asksJSON(args []string) bool {
	if i := slices.Index(args, "--"); i >= 0 {
		args = args[:i]
	}
	return slices.Contains(args, "--json") || slices.Contains(args, "--json=true")
}

// problem is how an error is shown.
type problem struct {
	Code    airlock.Code `json:"code"`
	Message string       `json:"message"`
	Field   string       `json:"field,omitempty"`
	Hint    string       `json:"hint,omitempty"`
}

func problemOf(err error) problem {
	p := problem{Code: airlock.CodeOf(err), Message: err.Error()}
	var coded *airlock.Error
	var cause error
	if errors.As(err, &coded) {
		p = problem{coded.Code, coded.Message, coded.Field, coded.Hint}
		cause = coded.Err
	}
	if cause != nil { // this is the operator's own terminal: the cause helps
		p.Message += ": " + cause.Error()
	}
	if errors.Is(err, context.Canceled) && coded == nil {
		p.Message = "interrupted"
	}
	return p
}

func (a *app) report(err error) {
	p := problemOf(err)
	if a.json {
		json.NewEncoder(a.Stderr).Encode(struct {
			Error problem `json:"error"`
		}{p})
		return
	}
	if strings.HasPrefix(p.Field, "--") && !strings.Contains(p.Message, p.Field) {
		p.Message = p.Field + ": " + p.Message
	}
	fmt.Fprintf(a.Stderr, "airlock: %s\n", p.Message)
	if p.Hint != "" {
		fmt.Fprintf(a.Stderr, "  hint: %s\n", p.Hint)
	}
}

// note tells something that is not the program's output.
func (a *app) note(format string, args ...any) {
	if !a.json {
		fmt.Fprintf(a.Stderr, "airlock: "+format+"\n", args...)
	}
}

func (a *app) root() *cobra.Command {
	root := &cobra.Command{
		Use:   "airlock",
		Short: "Run code you do not trust in sandboxes",
		Long: `Airlock runs code that you do not trust, such as what an agent wrote, in
sandboxes on your own machine. Each has its own kernel (gVisor) and its own
files, reaches what policies permit and nothing else, and is thrown away
afterwards.

` + ExitCodes,
		Example: `  airlock doctor                            # is this machine ready?
  airlock run -c 'print(6 * 7)' --language python
  airlock run analysis.py --file data.csv -- --top 10
  airlock serve                             # an API for many sandboxes`,
		SilenceErrors: true,
		SilenceUsage:  true,
		Args:          cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return cmd.Help()
		},
	}
	root.CompletionOptions.HiddenDefaultCmd = true
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		text := err.Error()
		switch {
		case strings.Contains(text, "missing unit in duration"), strings.Contains(text, "time: invalid duration"):
			return airlock.Invalidf("", "give a duration such as 30s or 10m", "%s", text)
		case cmd.Annotations[runsPrograms] != "" && strings.Contains(text, "unknown"):
			return airlock.Invalidf("", "put the program's own arguments after `--`; see `"+cmd.CommandPath()+" --help`", "%s", text)
		}
		return usage(cmd, "%s", text)
	})
	root.Version = a.Version
	root.SetVersionTemplate("airlock {{.Version}}\n")
	flags := root.PersistentFlags()
	flags.BoolVar(&a.json, "json", false, "print JSON, one object a line")
	flags.StringVar(&a.dataDir, "data-dir", env("AIRLOCK_DATA_DIR", DefaultDataDir), "state of the server on this machine (AIRLOCK_DATA_DIR)")
	flags.StringVar(&a.url, "url", os.Getenv("AIRLOCK_API_URL"), "server elsewhere (AIRLOCK_API_URL); default: the one of --data-dir, by its socket")
	flags.StringVar(&a.key, "key", "", "API key (AIRLOCK_API_KEY)")
	root.AddCommand(a.serve(), a.run(), a.sandbox(), a.keys(), a.secrets(), a.approvals(), a.gateway(), a.keystore(), a.policies(), a.audit(), a.doctor(), a.version())
	for _, cmd := range allCommands(root) {
		check := cmd.Args
		if check == nil {
			continue
		}
		cmd.Args = func(cmd *cobra.Command, args []string) error {
			if err := check(cmd, args); err != nil {
				var coded *airlock.Error
				if errors.As(err, &coded) {
					return err
				}
				if strings.Contains(err.Error(), "arg(s)") { // how many, and not which
					return usage(cmd, "wrong number of arguments (%d): write it as `%s %s`", len(args), cmd.Parent().CommandPath(), cmd.Use)
				}
				return usage(cmd, "%v", err)
			}
			return nil
		}
	}
	return root
}

func allCommands(cmd *cobra.Command) []*cobra.Command {
	all := []*cobra.Command{cmd}
	for _, sub := range cmd.Commands() {
		all = append(all, allCommands(sub)...)
	}
	return all
}

// usage is an error in how a command was called.
func usage(cmd *cobra.Command, format string, args ...any) error {
	return airlock.Invalidf("", "see `"+cmd.CommandPath()+" --help`", format, args...)
}

func env(name, otherwise string) string {
	if v := os.Getenv(name); v != "" {
		return v
	}
	return otherwise
}

// print writes v as a line of JSON, or calls text to write it for a person.
func (a *app) print(v any, text func(w io.Writer)) error {
	if a.json {
		return json.NewEncoder(a.Stdout).Encode(v)
	}
	text(a.Stdout)
	return nil
}

// socketPath is where the server of a data directory listens for its operator.
func socketPath(dataDir string) string { return filepath.Join(dataDir, "airlock.sock") }

// connect returns a client of the server that the flags name, or of the one
// that runs on this machine, or nil if there is none.
func (a *app) connect() (*client.Client, error) {
	key := a.key
	if key == "" {
		key = os.Getenv("AIRLOCK_API_KEY")
	}
	if a.url != "" {
		if key == "" {
			return nil, &airlock.Error{Code: airlock.Unauthenticated, Field: "--key", Message: "no API key for " + a.url,
				Hint: "give one with --key or AIRLOCK_API_KEY; `airlock key create` on the server makes one"}
		}
		return client.New(client.Options{URL: a.url, APIKey: key})
	}
	socket := socketPath(a.dataDir)
	conn, err := net.DialTimeout("unix", socket, 2*time.Second)
	if err != nil {
		if errors.Is(err, os.ErrPermission) {
			return nil, airlock.Errorf(airlock.Denied, "the server's socket is for its operator: %v", err)
		}
		return nil, nil // no socket, or one that a dead server left
	}
	conn.Close()
	return client.New(client.Options{Socket: socket, APIKey: key})
}

// server is connect for commands that need one.
func (a *app) server() (*client.Client, error) {
	c, err := a.connect()
	if err == nil && c == nil {
		return nil, &airlock.Error{Code: airlock.Unavailable, Message: "no server runs on " + a.dataDir,
			Hint: "start one with `airlock serve`, or name one with --url and --key"}
	}
	return c, err
}

// pairs reads K=V flags.
func pairs(flag string, values []string) (map[string]string, error) {
	m := map[string]string{}
	for _, v := range values {
		key, value, found := strings.Cut(v, "=")
		if !found || key == "" || strings.ContainsRune(v, 0) {
			return nil, airlock.Invalidf(flag, "write NAME=VALUE", "%s: %q has no name and value", flag, v)
		}
		m[key] = value
	}
	return m, nil
}

// limitFlags are the flags of what a sandbox may use.
type limitFlags struct {
	cpu          float64
	memory, disk string
	processes    int
	openFiles    int
	output       int64
}

func (l *limitFlags) add(cmd *cobra.Command) {
	def := airlock.DefaultLimits
	f := cmd.Flags()
	f.Float64Var(&l.cpu, "cpu", def.CPUs, "processors, from 0.1")
	f.StringVar(&l.memory, "memory", fmt.Sprintf("%dMiB", def.MemoryMB), "memory; MB and MiB are both 2^20 bytes")
	f.StringVar(&l.disk, "disk", fmt.Sprintf("%dMiB", def.DiskMB), "what may be written to files")
	f.IntVar(&l.processes, "processes", def.Processes, "processes and threads")
	f.IntVar(&l.openFiles, "open-files", def.OpenFiles, "files that one process may have open")
	f.Int64Var(&l.output, "output-bytes", def.OutputBytes, "bytes that one command may print")
}

// flagOf says which flag sets which field of the limits.
var flagOf = map[string]string{
	"limits.cpus": "--cpu", "limits.memoryMB": "--memory", "limits.diskMB": "--disk", "limits.processes": "--processes",
	"limits.openFiles": "--open-files", "limits.outputBytes": "--output-bytes",
}

func (l *limitFlags) limits() (airlock.Limits, error) {
	limits := airlock.DefaultLimits
	limits.CPUs, limits.Processes, limits.OpenFiles, limits.OutputBytes = l.cpu, l.processes, l.openFiles, l.output
	var err error
	if limits.MemoryMB, err = parseMB("--memory", l.memory); err != nil {
		return limits, err
	}
	if limits.DiskMB, err = parseMB("--disk", l.disk); err != nil {
		return limits, err
	}
	err = limits.Validate()
	var e *airlock.Error
	if errors.As(err, &e) {
		flag := flagOf[e.Field]
		unit := ""
		if strings.HasSuffix(e.Field, "MB") {
			unit = " MiB"
		}
		named := airlock.Invalidf(flag, e.Hint+unit, "%s%s", strings.ReplaceAll(e.Message, e.Field, flag), unit)
		return limits, named
	}
	return limits, err
}

// life checks a flag that says how long a sandbox or a program may live.
func life(flag string, d time.Duration) error {
	if d <= 0 || d > maxLife {
		return airlock.Invalidf(flag, "give a duration such as 30s or 10m, at most 24h", "%s is %v", flag, d)
	}
	return nil
}

const maxLife = 24 * time.Hour
