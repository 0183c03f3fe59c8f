package api_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"airlock.dev/airlock"
	"airlock.dev/airlock/api"
	"airlock.dev/airlock/audit"
	"airlock.dev/airlock/audit/audittest"
	"airlock.dev/airlock/channel"
	"airlock.dev/airlock/cluster"
	"airlock.dev/airlock/control"
	"airlock.dev/airlock/image"
	"airlock.dev/airlock/isolation"
	"airlock.dev/airlock/keys"
	"airlock.dev/airlock/keystore"
	"airlock.dev/airlock/policy"
	"airlock.dev/airlock/secrets"
	"golang.org/x/sys/unix"
)

// world is a server whose sandboxes are fakes in this process: control and
// the channel are real, the guest is scripted.
type world struct {
	t         *testing.T
	url       string
	handler   http.Handler
	sandboxes *control.Sandboxes
	driver    *fakeDriver
	log       *bytes.Buffer
	trail     *audit.Log
	client    string // API keys, by role
	other     string // of another team
	operator  string
	auditor   string // of the client's team
}

func newWorld(t *testing.T) *world {
	t.Helper()
	w := &world{t: t, driver: &fakeDriver{boxes: map[string]*fakeBox{}}, log: &bytes.Buffer{}}
	w.trail, _ = audittest.Open(t)
	var mu sync.Mutex
	log := slog.New(slog.NewTextHandler(lockedWriter{&mu, w.log}, nil))
	store := cluster.NewMemory()
	const domain = "box.test:8443"
	room := control.Capacity{MemoryMB: 16 << 10, DiskMB: 64 << 10, Processes: 1 << 20, Descriptors: 1 << 20, Sandboxes: 8}
	var err error
	w.sandboxes, err = control.New(t.Context(), control.Config{Store: store, Driver: w.driver, Image: image.Image{}, Host: room, Team: room, Log: log, Sealer: audittest.Config(t).Sealer.(control.Sealer), Boundary: control.Boundary{Policies: policy.Builtin, Trail: w.trail}})
	if err != nil {
		t.Fatal(err)
	}
	if err := w.sandboxes.Recover(t.Context()); err != nil {
		t.Fatal(err)
	}
	k := keys.New(store)
	for _, c := range []struct {
		to   *string
		team string
		role airlock.Role
	}{{&w.client, "red", airlock.Client}, {&w.other, "blue", airlock.Client}, {&w.operator, "red", airlock.Operator}, {&w.auditor, "red", airlock.Auditor}} {
		if *c.to, _, err = k.Create(t.Context(), c.team, c.role, "", ""); err != nil {
			t.Fatal(err)
		}
	}
	policies, err := control.OpenPolicies(t.Context(), "", filepath.Join(t.TempDir(), "kept"), w.trail, log)
	if err != nil {
		t.Fatal(err)
	}
	keep, err := keystore.Open(t.Context(), keystore.Config{DataDir: filepath.Join(t.TempDir(), "data")})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { keep.Close() })
	handler := api.New(api.Config{Sandboxes: w.sandboxes, Keys: k, Secrets: secrets.New(store, keep), Trail: w.trail, Policies: policies, Domain: domain, Log: log, Version: "test"})
	srv := httptest.NewUnstartedServer(nil)
	srv.Config = api.Server(handler)
	srv.Config.ErrorLog = slog.NewLogLogger(log.Handler(), slog.LevelError)
	srv.Start()
	w.url, w.handler = srv.URL, handler
	t.Cleanup(func() {
		w.sandboxes.Close(true)
		srv.CloseClientConnections()
		srv.Close()
	})
	return w
}

type lockedWriter struct {
	mu *sync.Mutex
	w  io.Writer
}

func (l lockedWriter) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.w.Write(p)
}

// reply is an answer, read to its end.
type reply struct {
	status int
	header http.Header
	body   string
}

func (w *world) do(method, path, body string, header ...string) reply {
	w.t.Helper()
	var in io.Reader
	if body != "" {
		in = struct{ io.Reader }{strings.NewReader(body)} // chunked, as the SDK sends it
	}
	req, err := http.NewRequest(method, w.url+path, in)
	if err != nil {
		w.t.Fatal(err)
	}
	for i := 0; i < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	resp, err := http.DefaultTransport.RoundTrip(req)
	if err != nil {
		w.t.Fatalf("%s %s: %v", method, path, err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		w.t.Fatalf("%s %s: %v", method, path, err)
	}
	return reply{resp.StatusCode, resp.Header, string(text)}
}

// as calls the control plane with a key.
func (w *world) as(key, method, path, body string) reply {
	w.t.Helper()
	return w.do(method, path, body, "X-API-KEY", key)
}

// create returns a sandbox's id and access token.
func (w *world) create(body string) (id, token string) {
	w.t.Helper()
	r := w.as(w.client, "POST", "/v2/sandboxes", body)
	var sb struct{ SandboxID, EnvdAccessToken string }
	if err := json.Unmarshal([]byte(r.body), &sb); err != nil || r.status != 201 {
		w.t.Fatalf("create: %d %s", r.status, r.body)
	}
	return sb.SandboxID, sb.EnvdAccessToken
}

func address(id, token string, more ...string) []string {
	return append([]string{"E2b-Sandbox-Id", id, "E2b-Sandbox-Port", "49983", "X-Access-Token", token}, more...)
}

func (r reply) want(t *testing.T, what string, status int, body string) {
	t.Helper()
	if r.status != status || r.body != body {
		t.Errorf("%s: %d %s\nwant %d %s", what, r.status, r.body, status, body)
	}
}

// fakeDriver starts fakeBoxes.
type fakeDriver struct {
	mu    sync.Mutex
	boxes map[string]*fakeBox
	fail  error
}

func (*fakeDriver) Name() string { return "fake" }

func (d *fakeDriver) Create(_ context.Context, spec isolation.Spec) (isolation.Sandbox, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.fail != nil {
		return nil, d.fail
	}
	b := &fakeBox{id: spec.ID, ended: make(chan struct{}), files: map[string][]byte{}, inputs: map[uint32]chan []byte{}, signals: map[uint32]chan int{}}
	d.boxes[spec.ID] = b
	return b, nil
}

func (d *fakeDriver) Recover(_ context.Context, id string) (isolation.Sandbox, error) {
	return nil, airlock.Errorf(airlock.NotFound, "no sandbox %s", id)
}

func (d *fakeDriver) Sweep(context.Context, func(string) bool) ([]string, error) { return nil, nil }

func (d *fakeDriver) box(id string) *fakeBox {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.boxes[id]
}

// fakeBox is a sandbox with a scripted guest.
type fakeBox struct {
	id    string
	ended chan struct{}
	once  sync.Once
	exit  isolation.Exit

	mu      sync.Mutex
	conn    io.Closer
	files   map[string][]byte
	lastUp  channel.WriteRequest
	changes bool // every read finds the files changed
	pid     uint32
	inputs  map[uint32]chan []byte
	signals map[uint32]chan int
	lastReq channel.StartRequest
	ports   map[uint16]string // of programs inside: where they listen in truth
}

func (b *fakeBox) Door(context.Context) (*os.File, error) {
	return nil, airlock.Errorf(airlock.NotFound, "the sandbox has no network")
}

// listen makes the port of the sandbox that of a server of the test.
func (b *fakeBox) listen(port uint16, address string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.ports == nil {
		b.ports = map[uint16]string{}
	}
	b.ports[port] = address
}

func (b *fakeBox) dial(ctx context.Context, s *channel.Stream, port uint16) error {
	b.mu.Lock()
	address := b.ports[port]
	b.mu.Unlock()
	if address == "" {
		return airlock.Errorf(airlock.PortClosed, "port %d is not open", port)
	}
	c, err := net.Dial("tcp", address)
	if err != nil {
		return err
	}
	defer c.Close()
	if err := channel.SendReply(ctx, s, channel.Empty{}); err != nil {
		return err
	}
	go func() {
		if _, err := io.Copy(c, s.Reader(ctx, channel.TagData)); err != nil {
			c.Close()
		}
		c.(*net.TCPConn).CloseWrite()
	}()
	if _, err := io.Copy(s.Writer(ctx, channel.TagData), c); err != nil {
		return err
	}
	s.CloseSend()
	<-ctx.Done() // the host ends it
	return nil
}

func (b *fakeBox) ID() string { return b.id }

func (b *fakeBox) Dial(context.Context) (io.ReadWriteCloser, error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	inside := os.NewFile(uintptr(fds[1]), "guest")
	b.mu.Lock()
	b.conn = inside
	b.mu.Unlock()
	go channel.Serve(inside, b.serve)
	return os.NewFile(uintptr(fds[0]), "host"), nil
}

func (b *fakeBox) Stats(context.Context) (isolation.Stats, error) { return isolation.Stats{}, nil }

func (b *fakeBox) Wait(ctx context.Context) (isolation.Exit, error) {
	select {
	case <-b.ended:
		return b.exit, nil
	case <-ctx.Done():
		return isolation.Exit{}, ctx.Err()
	}
}

// die ends the sandbox by itself.
func (b *fakeBox) die(why airlock.Outcome) {
	b.once.Do(func() {
		b.exit.Outcome = why
		close(b.ended)
		b.mu.Lock()
		b.conn.Close()
		b.mu.Unlock()
	})
}

func (b *fakeBox) Destroy(context.Context) error { b.die(airlock.SandboxKilled); return nil }

func decode[T any](req []byte) (v T) {
	if err := json.Unmarshal(req, &v); err != nil {
		panic(err)
	}
	return v
}

func (b *fakeBox) file(p channel.PathRequest) (string, error) {
	if p.User != "" && p.User != "user" && p.User != "root" {
		return "", airlock.Errorf(airlock.Unauthenticated, "invalid username: '%s'", p.User)
	}
	if !strings.HasPrefix(p.Path, "/") {
		return "/home/user/" + p.Path, nil
	}
	return p.Path, nil
}

func entry(path string, size int) channel.Entry {
	return channel.Entry{
		Name: path[strings.LastIndexByte(path, '/')+1:], Path: path, Type: channel.File, Size: int64(size), Mode: 0o644, Permissions: "-rw-r--r--",
		Owner: "user", Group: "user", ModifiedTime: time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC), Inode: 7,
	}
}

func (b *fakeBox) serve(ctx context.Context, s *channel.Stream, method string, req []byte) error {
	switch method {
	case channel.MethodHello:
		return channel.SendReply(ctx, s, channel.HelloReply{Version: "fake"})
	case channel.MethodStart:
		return b.start(ctx, s, decode[channel.StartRequest](req))
	case channel.MethodAttach:
		ref := decode[channel.ProcessRef](req)
		return airlock.Errorf(airlock.NotFound, "process with pid %d not found", ref.PID)
	case channel.MethodInput:
		in, err := b.input(decode[channel.ProcessRef](req))
		if err != nil {
			return err
		}
		for {
			_, body, err := s.Recv(ctx)
			if err == io.EOF {
				return channel.SendReply(ctx, s, channel.Empty{})
			}
			if err != nil {
				return err
			}
			in <- body
		}
	case channel.MethodCloseStdin:
		in, err := b.input(decode[channel.ProcessRef](req))
		if err != nil {
			return err
		}
		close(in)
		return channel.SendReply(ctx, s, channel.Empty{})
	case channel.MethodSignal:
		sig := decode[channel.SignalRequest](req)
		b.mu.Lock()
		c := b.signals[sig.PID]
		b.mu.Unlock()
		if c == nil {
			return airlock.Errorf(airlock.NotFound, "process with pid %d not found", sig.PID)
		}
		c <- sig.Signal
		return channel.SendReply(ctx, s, channel.Empty{})
	case channel.MethodProcesses:
		return channel.SendReply(ctx, s, channel.ProcessInfo{PID: 7, Tag: "t", Cmd: "/bin/bash", Args: []string{"-l"}, Env: map[string]string{"A": "1"}, Cwd: "/tmp", User: "user"})
	case channel.MethodRead:
		r := decode[channel.ReadRequest](req)
		path, err := b.file(r.PathRequest)
		if err != nil {
			return err
		}
		b.mu.Lock()
		data, found := b.files[path]
		b.mu.Unlock()
		if !found {
			return airlock.Errorf(airlock.NotFound, "path '%s' does not exist", path)
		}
		size := len(data)
		if strings.HasPrefix(path, "/proc/") {
			size = 0
		}
		if strings.HasSuffix(path, "/shrinks") {
			size++
		}
		e := entry(path, size)
		b.mu.Lock()
		if b.changes && r.Offset > 0 {
			e.Inode++
		}
		b.mu.Unlock()
		if err := channel.SendReply(ctx, s, e); err != nil {
			return err
		}
		data = data[min(r.Offset, int64(len(data))):]
		if r.Length > 0 {
			data = data[:min(r.Length, int64(len(data)))]
		}
		if strings.HasSuffix(path, "/breaks") {
			s.Writer(ctx, channel.TagData).Write(data[:len(data)/2])
			return airlock.Errorf(airlock.Invalid, "it broke")
		}
		_, err = s.Writer(ctx, channel.TagData).Write(data)
		return err
	case channel.MethodWrite:
		r := decode[channel.WriteRequest](req)
		path, err := b.file(r.PathRequest)
		if err != nil {
			return err
		}
		if strings.HasSuffix(path, "/full") {
			s.Recv(ctx)
			return airlock.Errorf(airlock.NoSpace, "no space left for '%s'", path)
		}
		data, err := io.ReadAll(s.Reader(ctx, channel.TagData))
		if err != nil {
			return err
		}
		b.mu.Lock()
		b.files[path], b.lastUp = data, r
		b.mu.Unlock()
		return channel.SendReply(ctx, s, entry(path, len(data)))
	case channel.MethodCompose:
		r := decode[channel.ComposeRequest](req)
		path, err := b.file(channel.PathRequest{User: r.User, Path: r.Destination})
		if err != nil {
			return err
		}
		b.mu.Lock()
		for _, source := range r.Sources {
			b.files[path] = append(b.files[path], b.files[source]...)
			delete(b.files, source)
		}
		size := len(b.files[path])
		b.mu.Unlock()
		return channel.SendReply(ctx, s, entry(path, size))
	case channel.MethodStat:
		path, err := b.file(decode[channel.PathRequest](req))
		if err != nil {
			return err
		}
		b.mu.Lock()
		data, found := b.files[path]
		b.mu.Unlock()
		if !found {
			return airlock.Errorf(airlock.NotFound, "path '%s' does not exist", path)
		}
		e := entry(path, len(data))
		if strings.HasSuffix(path, "/tagged") {
			e.Metadata = map[string]string{"a": "b"}
		}
		return channel.SendReply(ctx, s, e)
	case channel.MethodWatch: // of nothing
		for {
			_, body, err := s.Recv(ctx)
			if err != nil {
				return err
			}
			c := decode[channel.WatchCommand](body)
			missing := &channel.WatchError{Code: airlock.NotFound, Message: "path '" + c.Path + "' does not exist"}
			if err := channel.SendReply(ctx, s, channel.WatchNote{ID: c.ID, Error: missing}); err != nil {
				return err
			}
		}
	case channel.MethodMkdir:
		return airlock.Errorf(airlock.Exists, "directory '/d' already exists")
	case channel.MethodListDir:
		r := decode[channel.ListDirRequest](req)
		if err := channel.SendReply(ctx, s, entry(r.Path+"/a", r.Depth)); err != nil {
			return err
		}
		link := entry(r.Path+"/link", 0)
		link.Type, link.SymlinkTarget = channel.Unknown, "/nowhere"
		return channel.SendReply(ctx, s, link)
	case channel.MethodDial:
		return b.dial(ctx, s, decode[channel.DialRequest](req).Port)
	case channel.MethodUsage:
		return channel.SendReply(ctx, s, channel.Usage{MemoryUsed: 3 << 20, MemoryTotal: 512 << 20, DiskUsed: 5, DiskTotal: 6, Processes: 1})
	}
	return airlock.Errorf(airlock.Internal, "secret of the guest: %s", method)
}

func (b *fakeBox) input(ref channel.ProcessRef) (chan []byte, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if in := b.inputs[ref.PID]; in != nil {
		return in, nil
	}
	return nil, airlock.Errorf(airlock.NotFound, "process with pid %d not found", ref.PID)
}

// start runs one of a few programs.
func (b *fakeBox) start(ctx context.Context, s *channel.Stream, req channel.StartRequest) error {
	if _, err := b.file(channel.PathRequest{User: req.User}); err != nil {
		return err
	}
	b.mu.Lock()
	b.lastReq = req
	b.pid++
	pid := b.pid
	in, sig := make(chan []byte), make(chan int, 10)
	b.inputs[pid], b.signals[pid] = in, sig
	b.mu.Unlock()
	if err := channel.SendJSON(ctx, s, channel.TagStarted, channel.Started{PID: pid}); err != nil {
		return err
	}
	end := channel.Ended{Outcome: airlock.Exited}
	say := func(tag byte, text string) error { return s.Send(ctx, tag, []byte(text)) }
	switch req.Cmd {
	case "echo":
		say(channel.TagStdout, strings.Join(req.Args, " "))
		say(channel.TagStderr, "err")
	case "exit":
		end.ExitCode, _ = strconv.Atoi(req.Args[0])
	case "cat":
		for text := range in {
			say(channel.TagStdout, string(text))
		}
	case "tty":
		say(channel.TagPTY, fmt.Sprintf("%dx%d", req.PTY.Cols, req.PTY.Rows))
	case "flood": // for ever
		for say(channel.TagStdout, strings.Repeat("x", 32<<10)) == nil {
			select {
			case <-sig:
				end = channel.Ended{ExitCode: -1, Signal: "SIGKILL", Outcome: airlock.Signaled}
				return channel.SendJSON(ctx, s, channel.TagEnded, end)
			default:
			}
		}
		return nil
	case "sleep":
		<-sig
		end = channel.Ended{ExitCode: -1, Signal: "SIGKILL", Outcome: airlock.Signaled}
	case "oom":
		end = channel.Ended{ExitCode: -1, Signal: "SIGKILL", Outcome: airlock.OOM}
	}
	return channel.SendJSON(ctx, s, channel.TagEnded, end)
}
