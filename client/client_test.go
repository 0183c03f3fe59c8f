package client

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"

	"airlock.dev/airlock"
	"airlock.dev/airlock/api/envd"
)

// fake is a server with one sandbox, "i1", that runs a few commands of its own.
type fake struct {
	envd.UnimplementedProcessHandler
	t *testing.T

	mu       sync.Mutex
	stdin    *io.PipeWriter
	killed   chan struct{}
	gone     bool
	files    map[string][]byte
	requests []*http.Request
	bodies   []string
}

func newFake(t *testing.T) (*fake, *Client) {
	f := &fake{t: t, killed: make(chan struct{}), files: map[string][]byte{}}
	mux := http.NewServeMux()
	mux.HandleFunc("/", f.control)
	mux.HandleFunc("/files", f.file)
	mux.HandleFunc("/health", func(w http.ResponseWriter, _ *http.Request) {
		f.mu.Lock()
		defer f.mu.Unlock()
		if f.gone {
			w.WriteHeader(http.StatusBadGateway)
		}
	})
	mux.Handle(envd.NewProcessHandler(f))
	s := httptest.NewServer(mux)
	t.Cleanup(s.Close)
	c, err := New(Options{URL: s.URL + "/", APIKey: "secret"})
	if err != nil {
		t.Fatal(err)
	}
	return f, c
}

func (f *fake) addressed(h http.Header) error {
	if h.Get("E2b-Sandbox-Id") != "i1" || h.Get("E2b-Sandbox-Port") != "49983" || h.Get("X-Access-Token") != "token" || h.Get("X-API-KEY") != "" {
		return connect.NewError(connect.CodeUnauthenticated, fmt.Errorf("headers are %v", h))
	}
	return nil
}

func (f *fake) control(w http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body)
	f.mu.Lock()
	f.requests = append(f.requests, r)
	f.bodies = append(f.bodies, string(body))
	f.mu.Unlock()
	if r.Header.Get("X-API-KEY") != "secret" {
		w.WriteHeader(http.StatusUnauthorized)
		io.WriteString(w, `{"code":401,"message":"no key"}`)
		return
	}
	info := `{"sandboxID":"i1","templateID":"base","envdAccessToken":"token"}`
	switch r.Method + " " + r.URL.Path {
	case "POST /v2/sandboxes":
		w.WriteHeader(http.StatusCreated)
		io.WriteString(w, info)
	case "GET /sandboxes/i1":
		io.WriteString(w, info)
	case "GET /v2/sandboxes":
		page, _ := strconv.Atoi(r.URL.Query().Get("nextToken"))
		if page < 2 {
			w.Header().Set("X-Next-Token", strconv.Itoa(page+1))
		}
		fmt.Fprintf(w, `[{"sandboxID":"i%d","limits":{"cpus":2,"memoryMB":512},"startedAt":"2026-01-02T03:04:05Z"}]`, page)
	case "DELETE /sandboxes/i1":
		w.WriteHeader(http.StatusNoContent)
	case "DELETE /sandboxes/busy":
		w.Header().Set("Retry-After", "7")
		w.WriteHeader(http.StatusTooManyRequests)
		io.WriteString(w, `{"code":429,"message":"no memory left","error_code":"resource_exhausted","hint":"wait","field":"limits.memoryMB"}`)
	default:
		w.WriteHeader(http.StatusNotFound)
		io.WriteString(w, `not json`)
	}
}

func (f *fake) file(w http.ResponseWriter, r *http.Request) {
	if err := f.addressed(r.Header); err != nil {
		http.Error(w, err.Error(), http.StatusUnauthorized)
		return
	}
	name := r.URL.Query().Get("username") + ":" + r.URL.Query().Get("path")
	f.mu.Lock()
	defer f.mu.Unlock()
	if r.Method == http.MethodPost {
		b, err := io.ReadAll(r.Body)
		if err != nil {
			return
		}
		f.files[name] = b
		return
	}
	b, found := f.files[name]
	if !found {
		w.WriteHeader(http.StatusNotFound)
		io.WriteString(w, `{"code":404,"message":"path does not exist"}`)
		return
	}
	w.Write(b)
}

func event(e any) *envd.StartResponse {
	switch e := e.(type) {
	case *envd.ProcessEvent_Start:
		return &envd.StartResponse{Event: &envd.ProcessEvent{Event: e}}
	case *envd.ProcessEvent_Data:
		return &envd.StartResponse{Event: &envd.ProcessEvent{Event: e}}
	case *envd.ProcessEvent_End:
		return &envd.StartResponse{Event: &envd.ProcessEvent{Event: e}}
	}
	panic("unknown event")
}

func output(b []byte, stderr bool) *envd.StartResponse {
	d := &envd.ProcessEvent_DataEvent{Output: &envd.ProcessEvent_DataEvent_Stdout{Stdout: b}}
	if stderr {
		d.Output = &envd.ProcessEvent_DataEvent_Stderr{Stderr: b}
	}
	return event(&envd.ProcessEvent_Data{Data: d})
}

func end(code int32, status, text string) *envd.StartResponse {
	return event(&envd.ProcessEvent_End{End: &envd.ProcessEvent_EndEvent{ExitCode: code, Exited: code >= 0, Status: status, Error: &text}})
}

func (f *fake) Start(ctx context.Context, req *connect.Request[envd.StartRequest], s *connect.ServerStream[envd.StartResponse]) error {
	if err := f.addressed(req.Header()); err != nil {
		return err
	}
	p := req.Msg.GetProcess()
	if p.GetCmd() == "missing" {
		return connect.NewError(connect.CodeInvalidArgument, errors.New("no such program"))
	}
	r, w := io.Pipe()
	f.mu.Lock()
	f.stdin = w
	f.mu.Unlock()
	if !req.Msg.GetStdin() {
		w.Close()
	}
	s.Send(event(&envd.ProcessEvent_Start{Start: &envd.ProcessEvent_StartEvent{Pid: 7}}))
	switch p.GetCmd() {
	case "cat":
		buf := make([]byte, 1<<15)
		for {
			n, err := r.Read(buf)
			if n > 0 {
				s.Send(output(buf[:n], false))
			}
			if err != nil {
				return s.Send(end(0, "exit status 0", ""))
			}
		}
	case "both":
		s.Send(output([]byte("out\xff\x00"), false))
		s.Send(output([]byte("err"), true))
		return s.Send(end(3, "exit status 3", "exit status 3"))
	case "who":
		s.Send(output([]byte(req.Header().Get("Authorization")+" "+p.GetCwd()+" "+p.GetEnvs()["A"]+" "+strings.Join(p.GetArgs(), ",")), false))
		return s.Send(end(0, "exit status 0", ""))
	case "end":
		return s.Send(end(-1, p.GetArgs()[0], "reason"))
	case "hang":
		select {
		case <-f.killed:
		case <-ctx.Done(): // the deadline that was sent, or the client left
			return connect.NewError(connect.CodeDeadlineExceeded, errors.New("too long"))
		}
		return nil
	case "die":
		f.mu.Lock()
		f.gone = true
		f.mu.Unlock()
		panic(http.ErrAbortHandler)
	}
	return nil
}

func (f *fake) SendInput(_ context.Context, req *connect.Request[envd.SendInputRequest]) (*connect.Response[envd.SendInputResponse], error) {
	f.mu.Lock()
	w := f.stdin
	f.mu.Unlock()
	if _, err := w.Write(req.Msg.GetInput().GetStdin()); err != nil {
		return nil, connect.NewError(connect.CodeNotFound, err)
	}
	return connect.NewResponse(&envd.SendInputResponse{}), nil
}

func (f *fake) CloseStdin(context.Context, *connect.Request[envd.CloseStdinRequest]) (*connect.Response[envd.CloseStdinResponse], error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.stdin.Close()
	return connect.NewResponse(&envd.CloseStdinResponse{}), nil
}

func (f *fake) SendSignal(_ context.Context, req *connect.Request[envd.SendSignalRequest]) (*connect.Response[envd.SendSignalResponse], error) {
	if req.Msg.GetProcess().GetPid() == 7 && req.Msg.GetSignal() == envd.Signal_SIGNAL_SIGKILL {
		close(f.killed)
	}
	return connect.NewResponse(&envd.SendSignalResponse{}), nil
}

func sandbox(t *testing.T) (*fake, *Sandbox) {
	t.Helper()
	f, c := newFake(t)
	s, err := c.Create(context.Background(), CreateRequest{})
	if err != nil {
		t.Fatal(err)
	}
	return f, s
}

func TestCreateOnTheWire(t *testing.T) {
	f, c := newFake(t)
	s, err := c.Create(context.Background(), CreateRequest{
		Timeout: 1500 * time.Millisecond, Env: map[string]string{"A": "b"}, Limits: airlock.Limits{CPUs: 0.5, MemoryMB: 64},
	})
	if err != nil || s.ID != "i1" {
		t.Fatal(s, err)
	}
	want := `{"templateID":"base","timeout":2,"envVars":{"A":"b"},"limits":{"cpus":0.5,"memoryMB":64}}`
	if f.bodies[0] != want {
		t.Errorf("body is %s\nwant    %s", f.bodies[0], want)
	}
}

func TestListAllPagesAndLabels(t *testing.T) {
	f, c := newFake(t)
	list, err := c.List(context.Background(), map[string]string{"a b": "c&d", "e": "=f"})
	if err != nil {
		t.Fatal(err)
	}
	if len(list) != 3 || list[2].ID != "i2" || list[0].Limits.MemoryMB != 512 || list[0].StartedAt.IsZero() {
		t.Errorf("list is %+v", list)
	}
	// As a server reads it: the query's decoding, one of the whole, one of each part.
	whole, err := url.QueryUnescape(f.requests[0].URL.Query().Get("metadata"))
	if err != nil {
		t.Fatal(err)
	}
	labels, err := url.ParseQuery(whole)
	if err != nil || labels.Get("a b") != "c&d" || labels.Get("e") != "=f" {
		t.Errorf("labels are %v, %v", labels, err)
	}
}

func TestErrors(t *testing.T) {
	_, c := newFake(t)
	ctx := context.Background()
	err := c.Kill(ctx, "busy")
	var e *Error
	if !errors.As(err, &e) || e.Status != 429 {
		t.Fatalf("err = %#v", err)
	}
	want := airlock.Error{Code: airlock.Exhausted, Field: "limits.memoryMB", Message: "no memory left", Hint: "wait", RetryAfter: 7}
	if *e.Coded != want {
		t.Errorf("got %+v", *e.Coded)
	}
	if _, err := c.Get(ctx, "other"); airlock.CodeOf(err) != airlock.NotFound || !strings.Contains(err.Error(), "404") {
		t.Errorf("a page that is not JSON: %v", err)
	}
	wrong, _ := New(Options{URL: c.base, APIKey: "wrong"})
	if _, err := wrong.List(ctx, nil); airlock.CodeOf(err) != airlock.Unauthenticated {
		t.Errorf("wrong key: %v", err)
	}
	nobody, _ := New(Options{Socket: filepath.Join(t.TempDir(), "none")})
	if _, err := nobody.List(ctx, nil); airlock.CodeOf(err) != airlock.Unavailable {
		t.Errorf("no server: %v", err)
	}
	for _, bad := range []string{"", "127.0.0.1:3000", "ftp://x", "http://", "://"} {
		if _, err := New(Options{URL: bad}); airlock.CodeOf(err) != airlock.Invalid {
			t.Errorf("URL %q: %v", bad, err)
		}
	}
}

func TestRedirectsAreNotFollowed(t *testing.T) {
	asked := false
	thief := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { asked = true }))
	defer thief.Close()
	s := httptest.NewServer(http.RedirectHandler(thief.URL, http.StatusTemporaryRedirect))
	defer s.Close()
	c, _ := New(Options{URL: s.URL, APIKey: "secret"})
	if _, err := c.Create(context.Background(), CreateRequest{}); err == nil || asked {
		t.Errorf("err = %v, asked = %v", err, asked)
	}
}

func TestExec(t *testing.T) {
	_, s := sandbox(t)
	var out, errs bytes.Buffer
	r, err := s.Exec(context.Background(), ExecRequest{Cmd: "both", Stdout: &out, Stderr: &errs})
	if err != nil || r.ExitCode != 3 || r.Outcome != airlock.Exited || out.String() != "out\xff\x00" || errs.String() != "err" {
		t.Errorf("%+v %v %q %q", r, err, out.String(), errs.String())
	}
	out.Reset()
	_, err = s.Exec(context.Background(), ExecRequest{Cmd: "who", Args: []string{"x", "y"}, User: "root", Cwd: "/tmp", Env: map[string]string{"A": "b"}, Stdout: &out})
	if want := "Basic " + base64.StdEncoding.EncodeToString([]byte("root:")) + " /tmp b x,y"; err != nil || out.String() != want {
		t.Errorf("%v %q", err, out.String())
	}
	if _, err := s.Exec(context.Background(), ExecRequest{Cmd: "missing"}); airlock.CodeOf(err) != airlock.Invalid {
		t.Errorf("missing program: %v", err)
	}
	if _, err := s.Exec(context.Background(), ExecRequest{Cmd: "no end event"}); airlock.CodeOf(err) != airlock.Internal {
		t.Errorf("no end: %v", err)
	}
}

func TestOutcomes(t *testing.T) {
	_, s := sandbox(t)
	for status, want := range map[string]ExecResult{
		"oom":                {ExitCode: -1, Outcome: airlock.OOM, Message: "reason"},
		"output_limit":       {ExitCode: -1, Outcome: airlock.OutputLimit, Message: "reason"},
		"sandbox_oom":        {ExitCode: -1, Outcome: airlock.SandboxOOM, Message: "reason"},
		"timeout":            {ExitCode: -1, Outcome: airlock.Timeout, Message: "reason"},
		"signal: killed":     {ExitCode: -1, Outcome: airlock.Signaled, Signal: "SIGKILL", Message: "reason"},
		"signal: SIGSEGV":    {ExitCode: -1, Outcome: airlock.Signaled, Signal: "SIGSEGV", Message: "reason"},
		"signal: terminated": {ExitCode: -1, Outcome: airlock.Signaled, Signal: "SIGTERM", Message: "reason"},
	} {
		got, err := s.Exec(context.Background(), ExecRequest{Cmd: "end", Args: []string{status}})
		if err != nil || got != want {
			t.Errorf("%s: %+v, %v", status, got, err)
		}
	}
}

func TestStdinIsPassedWhole(t *testing.T) {
	_, s := sandbox(t)
	data := make([]byte, 1<<20+17)
	rand.Read(data)
	var out bytes.Buffer
	r, err := s.Exec(context.Background(), ExecRequest{Cmd: "cat", Stdin: bytes.NewReader(data), Stdout: &out})
	if err != nil || r.ExitCode != 0 || !bytes.Equal(out.Bytes(), data) {
		t.Errorf("%+v %v, %d of %d bytes", r, err, out.Len(), len(data))
	}
}

// A program that ends does not wait for an input that never does.
func TestOpenStdinDoesNotHold(t *testing.T) {
	_, s := sandbox(t)
	never, _ := io.Pipe()
	r, err := s.Exec(context.Background(), ExecRequest{Cmd: "both", Stdin: never})
	if err != nil || r.ExitCode != 3 {
		t.Errorf("%+v %v", r, err)
	}
}

func TestExecTimeout(t *testing.T) {
	_, s := sandbox(t)
	start := time.Now()
	r, err := s.Exec(context.Background(), ExecRequest{Cmd: "hang", Timeout: 100 * time.Millisecond})
	if err != nil || r.Outcome != airlock.Timeout || time.Since(start) > 5*time.Second {
		t.Errorf("%+v %v after %v", r, err, time.Since(start))
	}
}

func TestExecCanceled(t *testing.T) {
	f, s := sandbox(t)
	ctx, cancel := context.WithTimeout(context.Background(), 100*time.Millisecond)
	defer cancel()
	if _, err := s.Exec(ctx, ExecRequest{Cmd: "hang"}); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("err = %v", err)
	}
	select {
	case <-f.killed:
	case <-time.After(5 * time.Second):
		t.Error("the program was not killed")
	}
}

func TestSandboxGone(t *testing.T) {
	_, s := sandbox(t)
	r, err := s.Exec(context.Background(), ExecRequest{Cmd: "die"})
	if err != nil || r.Outcome != airlock.SandboxKilled {
		t.Errorf("%+v %v", r, err)
	}
}

type brokenWriter struct{}

func (brokenWriter) Write([]byte) (int, error) { return 0, io.ErrClosedPipe }

func TestBrokenOutputKills(t *testing.T) {
	f, s := sandbox(t)
	if _, err := s.Exec(context.Background(), ExecRequest{Cmd: "both", Stdout: brokenWriter{}}); !errors.Is(err, io.ErrClosedPipe) {
		t.Errorf("err = %v", err)
	}
	select {
	case <-f.killed:
	default:
		t.Error("the program was not killed")
	}
}

func TestFiles(t *testing.T) {
	f, s := sandbox(t)
	ctx := context.Background()
	data := make([]byte, 3<<20)
	rand.Read(data)
	if err := s.UploadAs(ctx, "root", "a b/ü&c", bytes.NewReader(data), 0); err != nil {
		t.Fatal(err)
	}
	var got bytes.Buffer
	if err := s.DownloadAs(ctx, "root", "a b/ü&c", &got); err != nil || !bytes.Equal(got.Bytes(), data) {
		t.Errorf("%v, %d bytes", err, got.Len())
	}
	if err := s.Download(ctx, "none", &got); airlock.CodeOf(err) != airlock.NotFound {
		t.Errorf("missing file: %v", err)
	}
	failing := io.MultiReader(strings.NewReader("half"), iotestErr{})
	if err := s.Upload(ctx, "half", failing, 0); !errors.Is(err, io.ErrNoProgress) {
		t.Errorf("failing source: %v", err)
	}
	if _, found := f.files[":half"]; found {
		t.Error("half a file was taken for a whole one")
	}
}

type iotestErr struct{}

func (iotestErr) Read([]byte) (int, error) { return 0, io.ErrNoProgress }

func TestSocket(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	s := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if _, found := r.Header["X-Api-Key"]; found {
			t.Error("a key was sent")
		}
		json.NewEncoder(w).Encode([]Info{{ID: "i1"}})
	})}
	go s.Serve(l)
	defer s.Close()
	c, err := New(Options{Socket: path})
	if err != nil {
		t.Fatal(err)
	}
	if list, err := c.List(context.Background(), nil); err != nil || len(list) != 1 {
		t.Errorf("%v %v", list, err)
	}
}

func TestLogsPageByTime(t *testing.T) {
	// 2500 events, three a millisecond, so that pages end inside of one.
	at := func(i int) time.Time { return time.UnixMilli(1_000_000 + int64(i/3)).UTC() }
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		cursor, _ := strconv.ParseInt(r.URL.Query().Get("cursor"), 10, 64)
		limit, _ := strconv.Atoi(r.URL.Query().Get("limit"))
		var page struct {
			Logs []LogEntry `json:"logs"`
		}
		for i := 0; i < 2500 && len(page.Logs) < limit; i++ {
			if at(i).UnixMilli() >= cursor {
				page.Logs = append(page.Logs, LogEntry{Timestamp: at(i), Message: strconv.Itoa(i)})
			}
		}
		json.NewEncoder(w).Encode(page)
	}))
	defer s.Close()
	c, _ := New(Options{URL: s.URL})
	next := 0
	err := c.Logs(context.Background(), "i1", false, func(e LogEntry) error {
		if e.Message != strconv.Itoa(next) {
			return fmt.Errorf("event %s instead of %d", e.Message, next)
		}
		next++
		return nil
	})
	if err != nil || next != 2500 {
		t.Errorf("%v after %d events", err, next)
	}
}

func TestTiming(t *testing.T) {
	for header, want := range map[string][]Step{
		"":                              nil,
		"take;dur=0.010, door;dur=1.5":  {{"take", 0.01}, {"door", 1.5}},
		"cache;desc=\"x\", door;dur=2":  {{"door", 2}},
		"door;dur=many, ;dur=, dur=1":   nil,
		"proxy;dur=3, take;dur=0.1;x=y": {{"proxy", 3}},
	} {
		if got := timing(header); !slices.Equal(got, want) {
			t.Errorf("%q: %v, want %v", header, got, want)
		}
	}
}
