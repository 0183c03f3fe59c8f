package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"airlock.dev/airlock"
	"airlock.dev/airlock/audit"
	"airlock.dev/airlock/audit/tiles"
	"airlock.dev/airlock/doctor"
)

// room is a Runner that does as it is told.
type room struct {
	opened  RunOptions
	files   map[string]string
	modes   map[string]os.FileMode
	execs   []ExecRequest
	stdin   string
	out     []string // written to standard output, each by itself
	result  ExecResult
	execErr error
	hang    bool
	closed  int
}

func (r *room) Exec(ctx context.Context, req ExecRequest) (ExecResult, error) {
	r.execs = append(r.execs, req)
	if r.hang {
		<-ctx.Done()
		return ExecResult{}, ctx.Err()
	}
	if req.Stdin != nil {
		b, _ := io.ReadAll(req.Stdin)
		r.stdin = string(b)
	}
	for _, s := range r.out {
		io.WriteString(req.Stdout, s)
	}
	io.WriteString(req.Stderr, "err\n")
	return r.result, r.execErr
}

func (r *room) Upload(_ context.Context, path string, src io.Reader, mode os.FileMode) error {
	b, err := io.ReadAll(src)
	r.files[path], r.modes[path] = string(b), mode
	return err
}

func (r *room) Download(context.Context, string, io.Writer) error { return errors.New("not used") }
func (r *room) Close() error                                      { r.closed++; return nil }

// command is one call of the command.
type command struct {
	room        *room
	stdin       string
	required    []doctor.Finding
	serve       func(ServeOptions) error
	enter       func() (int, error)
	openErr     error
	out, errOut string
}

func newCommand() *command {
	return &command{room: &room{files: map[string]string{}, modes: map[string]os.FileMode{}, result: ExecResult{Outcome: airlock.Exited}}}
}

func (c *command) run(t *testing.T, ctx context.Context, args ...string) int {
	t.Helper()
	for _, name := range []string{"AIRLOCK_API_URL", "AIRLOCK_API_KEY"} {
		t.Setenv(name, "")
	}
	t.Setenv("AIRLOCK_DATA_DIR", t.TempDir())
	var out, errOut bytes.Buffer
	var enter func(context.Context) (int, error)
	if c.enter != nil {
		enter = func(context.Context) (int, error) { return c.enter() }
	}
	code := Main(ctx, args, Deps{
		Version: "v1.2.3",
		Serve:   func(_ context.Context, o ServeOptions) error { return c.serve(o) },
		RunLocal: func(_ context.Context, o RunOptions) (Runner, error) {
			c.room.opened = o
			return c.room, c.openErr
		},
		EnterLocal: enter,
		Check:      func(context.Context, string) []doctor.Finding { return c.required },
		Required:   func(context.Context, string) []doctor.Finding { return c.required },
		Stdin:      strings.NewReader(c.stdin), Stdout: &out, Stderr: &errOut,
	})
	c.out, c.errOut = out.String(), errOut.String()
	return code
}

func TestRunLocal(t *testing.T) {
	dir := t.TempDir()
	program := filepath.Join(dir, "job.py")
	data := filepath.Join(dir, "data:1.csv")
	tool := filepath.Join(dir, "tool")
	for name, mode := range map[string]os.FileMode{program: 0o644, data: 0o600, tool: 0o755} {
		if err := os.WriteFile(name, []byte(filepath.Base(name)), mode); err != nil {
			t.Fatal(err)
		}
	}
	c := newCommand()
	c.stdin = "input"
	c.room.out = []string{"a\xffb"}
	c.room.result.ExitCode = 7
	code := c.run(t, t.Context(), "run", program, "--file", data, "--file", tool+":bin/", "-e", "A=b=c", "--timeout", "30s",
		"--cpu", "0.5", "--memory", "1GiB", "--disk", "64MB", "--processes", "9", "--", "--json", "x")
	if code != 7 || c.out != "a\xffb" || c.errOut != "err\n" {
		t.Errorf("code %d, out %q, err %q", code, c.out, c.errOut)
	}
	r := c.room
	want := airlock.DefaultLimits
	want.CPUs, want.MemoryMB, want.DiskMB, want.Processes = 0.5, 1024, 64, 9
	if r.opened.Limits != want || r.opened.Life != 90*time.Second {
		t.Errorf("opened with %+v", r.opened)
	}
	if r.files["/home/user/job.py"] != "job.py" || r.files["/home/user/data:1.csv"] != "data:1.csv" || r.files["/home/user/bin/tool"] != "tool" {
		t.Errorf("files are %v", r.files)
	}
	if r.modes["/home/user/bin/tool"] != 0o755 || r.modes["/home/user/data:1.csv"] != 0 {
		t.Errorf("modes are %v", r.modes)
	}
	e := r.execs[0]
	if e.Cmd != "python3" || strings.Join(e.Args, " ") != "/home/user/job.py --json x" || e.User != "user" || e.Cwd != "/home/user" ||
		e.Env["A"] != "b=c" || e.Timeout != 30*time.Second || r.stdin != "input" {
		t.Errorf("exec is %+v, stdin %q", e, r.stdin)
	}
	if r.closed != 1 {
		t.Errorf("closed %d times", r.closed)
	}
}

func TestRunFromStdin(t *testing.T) {
	c := newCommand()
	c.stdin = "#!/usr/bin/env node\nconsole.log(1)"
	if code := c.run(t, t.Context(), "run", "-", "--", "arg"); code != 0 {
		t.Fatalf("code %d: %s", code, c.errOut)
	}
	e := c.room.execs[0]
	if e.Cmd != "node" || strings.Join(e.Args, " ") != "/home/user/main.js arg" || e.Stdin != nil {
		t.Errorf("exec is %+v", e)
	}
}

func TestExitCodes(t *testing.T) {
	for _, test := range []struct {
		result ExecResult
		code   int
		says   string
	}{
		{ExecResult{ExitCode: 0, Outcome: airlock.Exited}, 0, ""},
		{ExecResult{ExitCode: 255, Outcome: airlock.Exited, Message: "exit status 255"}, 255, ""},
		{ExecResult{ExitCode: -1, Outcome: airlock.Signaled, Signal: "SIGSEGV"}, 139, ""},
		{ExecResult{ExitCode: -1, Outcome: airlock.Signaled, Signal: "SIGTERM"}, 143, ""},
		{ExecResult{ExitCode: -1, Outcome: airlock.Signaled, Signal: "nonsense"}, 137, ""},
		{ExecResult{ExitCode: -1, Outcome: airlock.Timeout, Message: "too long"}, 124, "too long"},
		{ExecResult{ExitCode: -1, Outcome: airlock.OOM, Message: "no memory"}, 137, "no memory"},
		{ExecResult{ExitCode: -1, Outcome: airlock.SandboxOOM}, 137, "sandbox_oom"},
		{ExecResult{ExitCode: -1, Outcome: airlock.OutputLimit, Message: "too much"}, 137, "too much"},
		{ExecResult{ExitCode: -1, Outcome: airlock.SandboxKilled, Message: "killed"}, 137, "killed"},
		{ExecResult{ExitCode: -1, Outcome: airlock.SandboxFailed, Message: "failed"}, 125, "failed"},
	} {
		c := newCommand()
		c.room.result = test.result
		code := c.run(t, t.Context(), "run", "-c", "1", "-l", "python")
		want := "err\n"
		if test.says != "" {
			want += "airlock: " + test.says + "\n"
		}
		if code != test.code || c.errOut != want {
			t.Errorf("%+v: code %d, says %q", test.result, code, c.errOut)
		}
	}
}

func TestRunFailures(t *testing.T) {
	c := newCommand()
	c.room.execErr = airlock.Errorf(airlock.NotFound, "ruby: not found")
	if code := c.run(t, t.Context(), "run", "-c", "1", "-l", "ruby"); code != 125 || !strings.Contains(c.errOut, "image may lack ruby") || c.room.closed != 1 {
		t.Errorf("code %d, %q, closed %d", code, c.errOut, c.room.closed)
	}
}

// The machine is looked at when something failed, not on the way of every run.
func TestUnfitMachine(t *testing.T) {
	c := newCommand()
	c.required = []doctor.Finding{{Name: "user", State: doctor.Fail, Detail: "runs as uid 5", Remedy: "be root"}}
	if code := c.run(t, t.Context(), "run", "-c", "1", "-l", "sh"); code != 0 {
		t.Errorf("a run that works: code %d, %q", code, c.errOut)
	}
	c.openErr = errors.New("operation not permitted")
	if code := c.run(t, t.Context(), "run", "-c", "1", "-l", "sh"); code != 125 || !strings.Contains(c.errOut, "runs as uid 5") || !strings.Contains(c.errOut, "hint: be root") {
		t.Errorf("code %d, %q", code, c.errOut)
	}
	c.required = nil
	if code := c.run(t, t.Context(), "run", "-c", "1", "-l", "sh"); code != 125 || !strings.Contains(c.errOut, "operation not permitted") {
		t.Errorf("code %d, %q", code, c.errOut)
	}
}

func TestEnterLocal(t *testing.T) {
	entered := 0
	c := newCommand()
	c.stdin = "print(1)"
	c.enter = func() (int, error) { entered++; return 9, nil }
	for _, args := range [][]string{{"run", "-c", "1", "-l", "sh"}, {"run", "-", "-l", "sh"}} {
		if code := c.run(t, t.Context(), args...); code != 9 || c.errOut != "" {
			t.Errorf("%v: code %d, %q", args, code, c.errOut)
		}
	}
	if entered != 2 || c.room.execs != nil {
		t.Errorf("entered %d times, ran %v", entered, c.room.execs)
	}
	c.run(t, t.Context(), "run", "/none.py")
	c.run(t, t.Context(), "run", "-c", "1", "--cpu", "-1", "-l", "sh")
	if entered != 2 {
		t.Error("entered with a bad command line")
	}
	c.enter = func() (int, error) { return 0, errors.New("no namespaces") }
	if code := c.run(t, t.Context(), "run", "-c", "1", "-l", "sh"); code != 125 || !strings.Contains(c.errOut, "no namespaces") {
		t.Errorf("code %d, %q", code, c.errOut)
	}
}

func TestInterruptEndsTheSandbox(t *testing.T) {
	c := newCommand()
	c.room.hang = true
	ctx, cancel := context.WithCancel(t.Context())
	time.AfterFunc(50*time.Millisecond, cancel)
	if code := c.run(t, ctx, "run", "-c", "1", "-l", "sh"); code != 130 || c.room.closed != 1 {
		t.Errorf("code %d, closed %d", code, c.room.closed)
	}
}

func TestRunJSON(t *testing.T) {
	c := newCommand()
	c.room.out = []string{"ä\xc3", "\xa4<", "\xff\xfe", "\xe2\x82"}
	c.room.result = ExecResult{ExitCode: -1, Outcome: airlock.Timeout, Message: "too long"}
	if code := c.run(t, t.Context(), "run", "--json", "-c", "1", "-l", "sh"); code != 124 || c.errOut != "" {
		t.Errorf("code %d, err %q", code, c.errOut)
	}
	want := `{"type":"stdout","text":"ä"}
{"type":"stdout","text":"ä<"}
{"type":"stdout","base64":"//4="}
{"type":"stderr","text":"err\n"}
{"type":"stdout","base64":"4oI="}
{"type":"end","exitCode":-1,"outcome":"timeout","message":"too long"}
`
	if c.out != want {
		t.Errorf("got\n%s", c.out)
	}
}

func TestErrorsAreJSONToo(t *testing.T) {
	for _, args := range [][]string{
		{"run", "--json"},
		{"run", "--no-such-flag", "--json"},
		{"--json", "run", "-c", "1", "--cpu", "900", "-l", "sh"},
		{"sandbox", "kill", "../x", "--json"},
		{"nonsense", "--json"},
	} {
		c := newCommand()
		code := c.run(t, t.Context(), args...)
		var e struct{ Error problem }
		if err := json.Unmarshal([]byte(c.errOut), &e); err != nil || e.Error.Code != airlock.Invalid || e.Error.Message == "" || e.Error.Hint == "" || c.out != "" {
			t.Errorf("%v: %q", args, c.errOut)
		}
		if want := map[bool]int{true: 125, false: 1}[strings.Contains(strings.Join(args, " "), "run")]; code != want {
			t.Errorf("%v: code %d", args, code)
		}
	}
}

func TestServeOptions(t *testing.T) {
	dir := t.TempDir()
	cert, key := filepath.Join(dir, "cert"), filepath.Join(dir, "key")
	os.WriteFile(cert, nil, 0o600)
	os.WriteFile(key, nil, 0o600)
	for _, test := range []struct {
		args []string
		says string // "" is accepted
	}{
		{nil, ""},
		{[]string{"--listen", "127.0.0.1:0"}, ""},
		{[]string{"--listen", "[::1]:3000"}, ""},
		{[]string{"--listen", "localhost:3000"}, ""},
		{[]string{"--listen", "[::ffff:127.0.0.1]:3000"}, ""},
		{[]string{"--listen", ":8443", "--tls-cert", cert, "--tls-key", key}, ""},
		{[]string{"--listen", ":8443"}, "in the clear"},
		{[]string{"--listen", "0.0.0.0:3000"}, "in the clear"},
		{[]string{"--listen", "192.0.2.1:3000"}, "in the clear"},
		{[]string{"--listen", "localhost.example.org:3000"}, "in the clear"},
		{[]string{"--listen", "3000"}, "is no address"},
		{[]string{"--listen", "127.0.0.1:99999"}, "is no address"},
		{[]string{"--tls-cert", cert}, "belong together"},
		{[]string{"--tls-cert", cert, "--tls-key", key + "x"}, "does not exist"},
		{[]string{"--max-memory", "lots"}, "--max-memory"},
		{[]string{"--net-bytes", "1MB", "--net-answer", "2TiB", "--net-flows", "1", "--net-requests", "1000000"}, ""},
		{[]string{"--net-bytes", "0"}, "--net-bytes"},
		{[]string{"--net-bytes", "many"}, "--net-bytes"},
		{[]string{"--net-bytes", "1000000"}, "--net-bytes: \"1000000\" has no unit\n  hint: give a size"},
		{[]string{"--net-answer", "10"}, "--net-answer: \"10\" has no unit"},
		{[]string{"--public-range", "0.0.0.0/0"}, "0.0.0.0/0 is every address"},
		{[]string{"--public-range", "198.51.100.7/24"}, "is no network"},
		{[]string{"--net-answer", "-1GiB"}, "--net-answer"},
		{[]string{"--net-flows", "0"}, "--net-flows: 0 is no budget\n  hint: give 1 to 4096"},
		{[]string{"--net-flows", "4097"}, "give 1 to 4096"},
		{[]string{"--net-requests", "-5"}, "give 1 to 1000000"},
		{[]string{"--pool", "50", "--pool-most", "50"}, ""},
		{[]string{"--pool", "51", "--pool-most", "50"}, "--pool: 51 sandboxes cannot be kept"},
		{[]string{"--pool-most", "1001"}, "give 0 to 1000"},
	} {
		c := newCommand()
		served := false
		c.serve = func(o ServeOptions) error { served = true; return nil }
		code := c.run(t, t.Context(), append([]string{"serve"}, test.args...)...)
		if served != (test.says == "") || (code == 0) != served || !strings.Contains(c.errOut, test.says) {
			t.Errorf("%v: code %d, served %v, %q", test.args, code, served, c.errOut)
		}
	}
	c := newCommand()
	var got NetworkBudgets
	c.serve = func(o ServeOptions) error { got = o.Network; return nil }
	if c.run(t, t.Context(), "serve"); got != (NetworkBudgets{Bytes: 100 << 30, Flows: 256, Requests: 6000, Answer: 64 << 30}) {
		t.Errorf("budgets that nobody asked for: %+v", got)
	}
	c = newCommand()
	c.required = []doctor.Finding{{Name: "cgroups", State: doctor.Fail, Detail: "none", Remedy: "mount them"}}
	if code := c.run(t, t.Context(), "serve"); code != 1 || !strings.Contains(c.errOut, "cgroups: none") {
		t.Errorf("unfit machine: code %d, %q", code, c.errOut)
	}
}

func TestLanguages(t *testing.T) {
	for _, test := range []struct{ flag, file, code, want string }{
		{"", "a.py", "", "python"},
		{"", "a.PY", "", "python"},
		{"", "a.mjs", "", "node"},
		{"", "a.ts", "", "typescript"},
		{"", "a.go", "", "go"},
		{"js", "a.py", "", "node"},
		{"Python3", "", "", "python"},
		{"", "a.txt", "#!/usr/bin/python3.11 -u\n", "python"},
		{"", "a.py", "#!/bin/bash", "bash"},
		{"", "", "#!/usr/bin/env -S A=b perl -w\n", "perl"},
		{"", "a.sh", "#!/opt/odd\n", "sh"},
		{"sh", "", "#!/usr/bin/ruby\n", "sh"},
		{"", "a.txt", "print(1)", ""},
		{"", "", "print(1)", ""},
		{"", "", "#!", ""},
		{"", "", "#!/usr/bin/env", ""},
		{"cobol", "a.py", "", ""},
	} {
		l, err := languageOf(test.flag, test.file, []byte(test.code))
		if l.name != test.want || (err == nil) != (test.want != "") {
			t.Errorf("%+v: %q, %v", test, l.name, err)
		}
		if err != nil && !strings.Contains(err.Error(), "python, node, typescript, bash, sh, perl, ruby, go") {
			t.Errorf("%+v: %v does not list the languages", test, err)
		}
	}
}

func TestSizes(t *testing.T) {
	for s, want := range map[string]int{
		"512": 512, "512MB": 512, "512MiB": 512, "512m": 512, "1.5GiB": 1536, "2g": 2048, "1 GB": 1024, "1T": 1 << 20, "1": 1,
		"1048576B": 1, "1b": 1, "1025K": 2,
		"": 0, "MB": 0, "-1": 0, "0": 0, "NaN": 0, "inf": 0, "1e3": 0, "0x10": 0, "1XB": 0, "1MBM": 0, "1_0": 0, "99999999T": 0, "five": 0,
	} {
		got, err := parseMB("--memory", s)
		if got != want || (err == nil) != (want > 0) {
			t.Errorf("%q: %d, %v", s, got, err)
		}
		if err != nil && !strings.Contains(err.Error(), "--memory") {
			t.Errorf("%q: %v does not name the flag", s, err)
		}
	}
}

func TestDays(t *testing.T) {
	for s, want := range map[string]time.Duration{
		"": 0, "2200d": 2200 * 24 * time.Hour, "1d": 24 * time.Hour, "36h": 36 * time.Hour,
		"10m": -1, "1.5h": -1, "0d": -1, "-1d": -1, "36501d": -1, "soon": -1, "30": -1,
	} {
		got, err := parseDays("--for", s)
		if err != nil {
			got = -1
		}
		if got != want || err != nil && !strings.Contains(err.Error(), "--for") {
			t.Errorf("%q: %v, %v", s, got, err)
		}
	}
}

func TestEveryCommandHasHelp(t *testing.T) {
	a := &app{}
	for _, cmd := range allCommands(a.root()) {
		if cmd.Short == "" || cmd.RunE == nil || cmd.Args == nil {
			t.Errorf("%s: short %q, run %v, args %v", cmd.CommandPath(), cmd.Short, cmd.RunE != nil, cmd.Args != nil)
		}
	}
}

// TestDocumentsHaveEveryPolicyCommand: each is in the table of POLICY.md, and
// where a reader begins.
func TestDocumentsHaveEveryPolicyCommand(t *testing.T) {
	for _, doc := range []string{"../docs/POLICY.md", "../README.md", "../policy/starter/README.md"} {
		text, err := os.ReadFile(doc)
		if err != nil {
			t.Fatal(err)
		}
		for _, cmd := range (&app{}).policies().Commands() {
			starts := cmd.Name() == "init" || cmd.Name() == "explain" // needless for who has a directory already
			if !strings.Contains(string(text), "airlock policy "+cmd.Name()) && !(starts && strings.Contains(doc, "starter")) {
				t.Errorf("%s lacks airlock policy %s", doc, cmd.Name())
			}
		}
	}
}

// TestNamesOfValues: what is between backquotes in a flag's text is how the help
// calls its value.
func TestNamesOfValues(t *testing.T) {
	flags, form := 0, regexp.MustCompile(`(?m)^ +(?:-[a-z], | +)--([a-z-]+)(.*?)  `)
	for _, cmd := range allCommands((&app{}).root()) {
		for _, f := range form.FindAllStringSubmatch(cmd.Flags().FlagUsages(), -1) {
			flags++
			if name := strings.TrimSpace(f[2]); strings.ContainsAny(name, " .,") {
				t.Errorf("%s --%s: its value is called %q", cmd.CommandPath(), f[1], name)
			}
		}
	}
	if flags < 20 {
		t.Errorf("only %d flags", flags)
	}
}

// TestReport: each problem of a file says which events it is about.
func TestReport(t *testing.T) {
	altered := func(seq, events uint64) tiles.Problem {
		return tiles.Problem{Kind: tiles.Altered, Shard: "2026-Q4", File: "2026-Q4/tile/entries/000", Seq: seq, Events: events, Text: "altered"}
	}
	for _, c := range []struct {
		report audit.Report
		want   string
	}{
		{audit.Report{Report: tiles.Report{Count: 3, Problems: []tiles.Problem{altered(5, 1), altered(9, 3), altered(20, 0)}}},
			"altered: 2026-Q4 2026-Q4/tile/entries/000 event 5: altered\naltered: 2026-Q4 2026-Q4/tile/entries/000 events 9 to 11: altered\n" +
				"altered: 2026-Q4 2026-Q4/tile/entries/000: altered\nFAILED: 3 problems\n"},
		{audit.Report{Report: tiles.Report{Count: 1}}, "FAILED: 1 problem\n"},
		{audit.Report{OK: true, Report: tiles.Report{Events: 1, Shards: []tiles.Verified{{ID: "2026-Q4", Size: 1, Root: "x"}}}}, "OK: 1 event in 1 part\n  2026-Q4  1 event from 0 on, root x\n"},
		{audit.Report{OK: true, Report: tiles.Report{Shards: []tiles.Verified{}}}, "OK: 0 events in 0 parts\n"},
	} {
		var b strings.Builder
		if writeReport(&b, c.report); b.String() != c.want {
			t.Errorf("%q\n%q", b.String(), c.want)
		}
	}
}

// TestLine: an event's line has its team and its sandbox.
func TestLine(t *testing.T) {
	for event, want := range map[string]string{
		`{"v":1,"seq":4,"time":"2026-12-02T10:00:00.000000000Z","type":"exec.end","team":"acme","sandbox":"i1","actor":{"kind":"token","id":"i1"},"outcome":{"status":"ok","exitCode":3}}`: "     4  2026-12-02 10:00:00.000  exec.end         acme       i1                    token:i1  ok; exit code 3\n",
		`{"v":1,"seq":0,"time":"2026-12-02T10:00:00.000000000Z","type":"log.open","actor":{"kind":"system"},"log":{"shard":"2026-Q4"}}`:                                                    "     0  2026-12-02 10:00:00.000  log.open         -          -                     system:  2026-Q4\n",
	} {
		var b strings.Builder
		if (&app{}).line(&b, []byte(event)); b.String() != want {
			t.Errorf("%q\n%q", b.String(), want)
		}
	}
}

func TestPlaces(t *testing.T) {
	for s, want := range map[string]place{
		"i1:a": {"i1", "a"}, "i1:/a:b": {"i1", "/a:b"}, "i1:": {"i1", ""}, "./i1:a": {"", "./i1:a"}, "a": {"", "a"}, "-": {"", "-"}, "I1:a": {"", "I1:a"},
	} {
		if got := parsePlace(s); got != want {
			t.Errorf("%q: %+v", s, got)
		}
	}
}

func TestCrossingsSummedUp(t *testing.T) {
	const pub, sec = "ceiling/public", "ceiling/secrets"
	all := []*crossing{
		{Action: "dns:resolve", Effect: "permit", Host: "a.example", Policies: []string{"ceiling/names"}},
		{Action: "http:request", Effect: "permit", Host: "a.example", Method: "POST", Path: "/2", Policies: []string{pub}, BytesOut: 5, BytesIn: 7, Outcome: "ok"},
		{Action: "http:request", Effect: "permit", Host: "a.example", Method: "GET", Path: "/1", Policies: []string{pub}, BytesIn: 100, Outcome: "ok"},
		{Action: "http:request", Effect: "permit", Host: "a.example", Method: "GET", Path: "/1", Policies: []string{pub}, BytesIn: 100, Outcome: "ok"},
		{Action: "secret:use", Effect: "permit", Host: "a.example", Method: "GET", Path: "/1", Policies: []string{sec}, Outcome: "ok"},
		{Action: "dns:resolve", Effect: "deny", Host: "b.example"},
		{Action: "http:request", Effect: "hold", Host: "c.example", Method: "GET", Policies: []string{pub}},
		{Action: "http:request", Effect: "deny", Host: "c.example", Method: "GET", Policies: []string{"ceiling/no"}},
		{Action: "http:request", Effect: "permit", Host: "d.example", Method: "GET", Policies: []string{pub}, Outcome: "denied permission_denied"},
		{Action: "secret:use", Effect: "deny", Host: "d.example", Method: "GET"},
		{Action: "net:connect", Effect: "permit", Host: "10.0.0.9", Policies: []string{pub}, BytesOut: 3, BytesIn: 4, Outcome: "error broken"},
	}
	want := []*reached{
		{Host: "a.example", Crossings: 3, Methods: []string{"GET", "POST"}, Paths: []string{"/1", "/2"}, BytesOut: 5, BytesIn: 207, Policies: []string{pub}, Deniers: []string{}},
		{Host: "b.example", Denied: 1, Methods: []string{}, Paths: []string{}, Policies: []string{}, Deniers: []string{}},
		{Host: "c.example", Denied: 1, Methods: []string{}, Paths: []string{}, Policies: []string{}, Deniers: []string{"ceiling/no"}},
		{Host: "d.example", Denied: 1, Methods: []string{}, Paths: []string{}, Policies: []string{}, Deniers: []string{}},
		{Host: "10.0.0.9", Crossings: 1, Methods: []string{}, Paths: []string{}, BytesOut: 3, BytesIn: 4, Policies: []string{pub}, Deniers: []string{}},
	}
	if diff := cmp.Diff(want, reachedBy(all)); diff != "" {
		t.Error(diff)
	}
}
