package test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

	"airlock.dev/airlock"
	"airlock.dev/airlock/api/envd"
	"airlock.dev/airlock/client"
	"connectrpc.com/connect"
)

// processes is process.Process of a sandbox, without the client in between.
type processes struct {
	*testing.T
	rpc    envd.ProcessClient
	header map[string]string
}

func processesOf(t *testing.T, s *running, sb *client.Sandbox) processes {
	transport := &http.Transport{}
	t.Cleanup(transport.CloseIdleConnections)
	return processes{t, envd.NewProcessClient(&http.Client{Transport: transport}, s.url), dataHeader(sb)}
}

// ask makes a request with what opens the sandbox, and more.
func ask[T any](p processes, msg *T, more ...string) *connect.Request[T] {
	req := connect.NewRequest(msg)
	for k, v := range p.header {
		req.Header().Set(k, v)
	}
	for i := 0; i < len(more); i += 2 {
		req.Header().Set(more[i], more[i+1])
	}
	return req
}

// events are those of Start and of Connect.
type events interface {
	next() *envd.ProcessEvent // nil at the end
	fail() error
	Close() error
}

type started struct {
	*connect.ServerStreamForClient[envd.StartResponse]
}

func (s started) next() *envd.ProcessEvent {
	if !s.Receive() {
		return nil
	}
	return s.Msg().GetEvent()
}
func (s started) fail() error { return s.Err() }

type connected struct {
	*connect.ServerStreamForClient[envd.ConnectResponse]
}

func (s connected) next() *envd.ProcessEvent {
	if !s.Receive() {
		return nil
	}
	return s.Msg().GetEvent()
}
func (s connected) fail() error { return s.Err() }

// start starts a process and returns its pid with the events after that.
func (p processes) start(req *envd.StartRequest, header ...string) (events, *envd.ProcessSelector) {
	p.Helper()
	stream, err := p.rpc.Start(p.Context(), ask(p, req, header...))
	if err != nil {
		p.Fatal(err)
	}
	return p.begun(started{stream})
}

func (p processes) connect(ref *envd.ProcessSelector, header ...string) events {
	p.Helper()
	stream, err := p.rpc.Connect(p.Context(), ask(p, &envd.ConnectRequest{Process: ref}, header...))
	if err != nil {
		p.Fatal(err)
	}
	e, _ := p.begun(connected{stream})
	return e
}

func (p processes) begun(e events) (events, *envd.ProcessSelector) {
	p.Helper()
	p.Cleanup(func() { e.Close() })
	first := e.next()
	if first.GetStart().GetPid() == 0 {
		p.Fatalf("the first event is %v, %v", first, e.fail())
	}
	return e, &envd.ProcessSelector{Selector: &envd.ProcessSelector_Pid{Pid: first.GetStart().GetPid()}}
}

func tagged(tag string) *envd.ProcessSelector {
	return &envd.ProcessSelector{Selector: &envd.ProcessSelector_Tag{Tag: tag}}
}

// rest reads the output and the end; end is nil if the stream failed.
func rest(e events) (out string, keepalives int, end *envd.ProcessEvent_EndEvent) {
	var b strings.Builder
	for ev := e.next(); ev != nil; ev = e.next() {
		d := ev.GetData()
		b.Write(d.GetStdout())
		b.Write(d.GetStderr())
		b.Write(d.GetPty())
		if ev.GetKeepalive() != nil {
			keepalives++
		}
		if ev.GetEnd() != nil {
			end = ev.GetEnd()
		}
	}
	return b.String(), keepalives, end
}

func sh(line string) *envd.StartRequest {
	no := false
	return &envd.StartRequest{Process: &envd.ProcessConfig{Cmd: "/bin/bash", Args: []string{"-c", line}}, Stdin: &no}
}

func withStdin(line string) *envd.StartRequest {
	r := sh(line)
	r.Stdin = nil // absent is true
	return r
}

func withPTY(line string) *envd.StartRequest {
	r := sh(line)
	r.Pty = &envd.PTY{Size: &envd.PTY_Size{Cols: 80, Rows: 24}}
	return r
}

func input(data string) *envd.ProcessInput {
	return &envd.ProcessInput{Input: &envd.ProcessInput_Stdin{Stdin: []byte(data)}}
}

// ends fails unless the process of e said out and exited with code.
func (p processes) ends(what string, e events, out string, code int32) {
	p.Helper()
	got, _, end := rest(e)
	if got != out || end == nil || end.GetExitCode() != code || !end.GetExited() || e.fail() != nil {
		p.Errorf("%s: %q, end %v, %v; want %q and %d", what, got, end, e.fail(), out, code)
	}
}

// refused fails unless err has the code and the words.
func (p processes) refused(what string, err error, code connect.Code, words string) {
	p.Helper()
	if connect.CodeOf(err) != code || err == nil || !strings.Contains(err.Error(), words) {
		p.Errorf("%s: %v, want %v with %q", what, err, code, words)
	}
}

// TestProcess calls everything of process.Process.
func TestProcess(t *testing.T) {
	s := startServer(t)
	sb := create(t, s.as(s.key("default", airlock.Client)), client.CreateRequest{Timeout: 5 * time.Minute})
	nobody := tagged("nobody")
	sub := func(name string, f func(p processes)) {
		t.Run(name, func(t *testing.T) { f(processesOf(t, s, sb)) })
	}

	sub("attach", func(p processes) {
		req := withStdin("echo early; read x; echo $x; exit 7")
		req.Tag = new(string)
		*req.Tag = "job"
		first, pid := p.start(req)
		for ev := first.next(); ; ev = first.next() { // what is said before the attach is over
			if string(ev.GetData().GetStdout()) == "early\n" {
				break
			}
		}
		second, third := p.connect(pid), p.connect(tagged("job"))
		list, err := p.rpc.List(p.Context(), ask(p, &envd.ListRequest{}))
		if err != nil || len(list.Msg.GetProcesses()) != 1 || list.Msg.GetProcesses()[0].GetTag() != "job" || list.Msg.GetProcesses()[0].GetPid() != pid.GetPid() {
			p.Errorf("list: %v, %v", list, err)
		}
		if _, err := p.rpc.SendInput(p.Context(), ask(p, &envd.SendInputRequest{Process: tagged("job"), Input: input("late\n")})); err != nil {
			p.Error(err)
		}
		for what, e := range map[string]events{"first": first, "by pid": second, "by tag": third} {
			p.ends(what, e, "late\n", 7)
		}
		p.ends("late, by pid", p.connect(pid), "", 7)
		p.ends("late, by tag", p.connect(tagged("job")), "", 7)
		e, err := p.rpc.Connect(p.Context(), ask(p, &envd.ConnectRequest{Process: nobody}))
		if err == nil {
			e.Receive()
			err = e.Err()
		}
		p.refused("attach to nobody", err, connect.CodeNotFound, "not found")
	})

	sub("terminal", func(p processes) {
		e, pid := p.start(withPTY("stty -echo; echo ready; read x; stty size; echo [$x]"))
		for seen := ""; !strings.Contains(seen, "ready"); {
			ev := e.next()
			if ev == nil {
				p.Fatal(e.fail())
			}
			seen += string(ev.GetData().GetPty())
		}
		size := func(cols, rows uint32) *envd.UpdateRequest {
			return &envd.UpdateRequest{Process: pid, Pty: &envd.PTY{Size: &envd.PTY_Size{Cols: cols, Rows: rows}}}
		}
		if _, err := p.rpc.Update(p.Context(), ask(p, size(132, 50))); err != nil {
			p.Error(err)
		}
		for _, bad := range [][2]uint32{{0, 1}, {1, 0}, {1 << 16, 1}} {
			_, err := p.rpc.Update(p.Context(), ask(p, size(bad[0], bad[1])))
			p.refused("a size", err, connect.CodeInvalidArgument, "65535")
		}
		_, err := p.rpc.CloseStdin(p.Context(), ask(p, &envd.CloseStdinRequest{Process: pid}))
		p.refused("close a terminal", err, connect.CodeInvalidArgument, "Ctrl+D")
		in := &envd.ProcessInput{Input: &envd.ProcessInput_Pty{Pty: []byte("in\n")}}
		if _, err := p.rpc.SendInput(p.Context(), ask(p, &envd.SendInputRequest{Process: pid, Input: in})); err != nil {
			p.Error(err)
		}
		p.ends("terminal", e, "50 132\r\n[in]\r\n", 0)
	})

	sub("input", func(p processes) {
		e, pid := p.start(withStdin("cat; echo over"))
		stream := p.rpc.StreamInput(p.Context())
		for k, v := range p.header {
			stream.RequestHeader().Set(k, v)
		}
		for _, m := range []*envd.StreamInputRequest{
			{Event: &envd.StreamInputRequest_Start{Start: &envd.StreamInputRequest_StartEvent{Process: pid}}},
			{Event: &envd.StreamInputRequest_Data{Data: &envd.StreamInputRequest_DataEvent{Input: input("one ")}}},
			{Event: &envd.StreamInputRequest_Keepalive{Keepalive: &envd.StreamInputRequest_KeepAlive{}}},
			{Event: &envd.StreamInputRequest_Data{Data: &envd.StreamInputRequest_DataEvent{Input: input("two ")}}},
		} {
			if err := stream.Send(m); err != nil {
				p.Fatal(err)
			}
		}
		if _, err := stream.CloseAndReceive(); err != nil {
			p.Error(err)
		}
		for _, text := range []string{"", "three\n"} {
			if _, err := p.rpc.SendInput(p.Context(), ask(p, &envd.SendInputRequest{Process: pid, Input: input(text)})); err != nil {
				p.Error(err)
			}
		}
		for range 2 { // closed already is fine
			if _, err := p.rpc.CloseStdin(p.Context(), ask(p, &envd.CloseStdinRequest{Process: pid})); err != nil && connect.CodeOf(err) != connect.CodeNotFound {
				p.Error(err)
			}
		}
		p.ends("cat", e, "one two three\nover\n", 0)

		e, pid = p.start(sh("readlink /proc/self/fd/0; sleep 5"))
		if ev := e.next(); string(ev.GetData().GetStdout()) != "/dev/null\n" {
			p.Errorf("stdin: %v, %v", ev, e.fail())
		}
		_, err := p.rpc.SendInput(p.Context(), ask(p, &envd.SendInputRequest{Process: pid, Input: input("x")}))
		p.refused("input without stdin", err, connect.CodeFailedPrecondition, "stdin is not enabled")
		_, err = p.rpc.CloseStdin(p.Context(), ask(p, &envd.CloseStdinRequest{Process: pid}))
		p.refused("close without stdin", err, connect.CodeFailedPrecondition, "stdin is not enabled")
		_, err = p.rpc.Update(p.Context(), ask(p, &envd.UpdateRequest{Process: pid, Pty: &envd.PTY{Size: &envd.PTY_Size{Cols: 1, Rows: 1}}}))
		p.refused("resize without a terminal", err, connect.CodeFailedPrecondition, "no terminal")
		if _, err := p.rpc.SendSignal(p.Context(), ask(p, &envd.SendSignalRequest{Process: pid, Signal: envd.Signal_SIGNAL_SIGTERM})); err != nil {
			p.Error(err)
		}
		if out, _, end := rest(e); out != "" || end.GetExited() || end.GetExitCode() != -1 || end.GetStatus() != "signal: terminated" {
			p.Errorf("SIGTERM: %q, %v, %v", out, end, e.fail())
		}

		for what, call := range map[string]func() error{
			"input": func() error {
				_, err := p.rpc.SendInput(p.Context(), ask(p, &envd.SendInputRequest{Process: nobody}))
				return err
			},
			"close": func() error {
				_, err := p.rpc.CloseStdin(p.Context(), ask(p, &envd.CloseStdinRequest{Process: nobody}))
				return err
			},
			"signal": func() error {
				_, err := p.rpc.SendSignal(p.Context(), ask(p, &envd.SendSignalRequest{Process: nobody, Signal: 9}))
				return err
			},
		} {
			p.refused(what+" to nobody", call(), connect.CodeNotFound, "not found")
		}
	})

	sub("keepalive", func(p processes) {
		e, pid := p.start(sh("sleep 2.5; echo x"), "Keepalive-Ping-Interval", "1")
		attached := p.connect(pid, "Keepalive-Ping-Interval", "1")
		for what, e := range map[string]events{"start": e, "connect": attached} {
			if out, n, end := rest(e); out != "x\n" || n < 1 || n > 3 || end == nil {
				p.Errorf("%s: %q, %d keepalives, %v", what, out, n, e.fail())
			}
		}
	})

	sub("deadline", func(p processes) {
		gone := func(what, mark string) {
			eventually(p.T, what+" ends", func() bool {
				_, out := run(p.T, sb, "cat /proc/[0-9]*/cmdline | tr '\\0' ' '")
				return !strings.Contains(out, "sleep "+mark)
			})
		}
		begun := time.Now()
		e, _ := p.start(sh("echo before; exec sleep 9871"), "Connect-Timeout-Ms", "700")
		out, _, end := rest(e)
		p.refused("the deadline", e.fail(), connect.CodeDeadlineExceeded, "deadline")
		if took := time.Since(begun); out != "before\n" || end != nil || took < 700*time.Millisecond || took > 10*time.Second {
			p.Errorf("%q, %v after %v", out, end, took)
		}
		gone("a process at its deadline", "9871")

		ctx, cancel := context.WithCancel(p.Context())
		stream, err := p.rpc.Start(ctx, ask(p, sh("exec sleep 9872"), "Connect-Timeout-Ms", "1500"))
		if err != nil || !stream.Receive() {
			p.Fatal(err)
		}
		cancel() // the client leaves; the process runs on, to its deadline
		time.Sleep(300 * time.Millisecond)
		if _, out := run(p.T, sb, "cat /proc/[0-9]*/cmdline | tr '\\0' ' '"); !strings.Contains(out, "sleep 9872") {
			p.Error("the process ended when its client left")
		}
		gone("a process without its client", "9872")
	})

	sub("multibyte", func(p processes) {
		e, _ := p.start(sh(`printf '\xf0\x9f'; sleep 0.3; printf '\x9c\x81'`))
		p.ends("a character in two halves", e, "🜁", 0) // as bytes; the SDKs' own tests see to their callbacks
	})
}

// descriptors counts what the server has open.
func (s *running) descriptors() int {
	s.t.Helper()
	all, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", s.server()))
	if err != nil {
		s.t.Fatal(err)
	}
	return len(all)
}

// TestManyProcesses runs many short processes in one sandbox: neither the
// server nor the guest keeps anything of them.
func TestManyProcesses(t *testing.T) {
	s := startServer(t)
	sb := create(t, s.as(s.key("default", airlock.Client)), client.CreateRequest{Timeout: 10 * time.Minute})
	const workers = 4
	many := func(n int) {
		failed := make(chan error, workers)
		for range workers {
			go func() {
				for range n / workers {
					r, err := sb.Exec(t.Context(), client.ExecRequest{Cmd: "/bin/true", Timeout: time.Minute})
					if err == nil && (r.Outcome != airlock.Exited || r.ExitCode != 0) {
						err = fmt.Errorf("%+v", r)
					}
					if err != nil {
						failed <- err
						return
					}
				}
				failed <- nil
			}()
		}
		for range workers {
			if err := <-failed; err != nil {
				t.Fatal(err)
			}
		}
	}
	// inside returns the descriptors and the memory of the guest, in kB.
	inside := func() (fds, kb int) {
		var out bytes.Buffer
		_, err := sb.Exec(t.Context(), client.ExecRequest{
			Cmd: "/bin/bash", Args: []string{"-c", "ls /proc/1/fd | wc -l; grep VmRSS /proc/1/status | tr -dc 0-9"}, User: "root", Stdout: &out, Timeout: time.Minute,
		})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := fmt.Sscan(out.String(), &fds, &kb); err != nil {
			t.Fatalf("%v in %q", err, &out)
		}
		return fds, kb
	}
	many(200) // what pools and caches grow to
	fds, rss := s.descriptors(), s.memory("VmRSS")
	guestFDs, guestKB := inside()
	start := time.Now()
	many(10_000)
	took := time.Since(start)
	eventually(t, "the server closes its descriptors", func() bool { return s.descriptors() <= fds+5 })
	nowFDs, nowKB := inside()
	grown := s.memory("VmRSS") - rss
	t.Logf("10,000 processes in %v; server: %d → %d descriptors, RSS %+.1f MB; guest: %d → %d descriptors, %d → %d kB", took.Round(time.Millisecond), fds, s.descriptors(), mb(grown), guestFDs, nowFDs, guestKB, nowKB)
	if nowFDs > guestFDs+2 {
		t.Errorf("the guest had %d descriptors and has %d", guestFDs, nowFDs)
	}
	if nowKB > guestKB+8<<10 {
		t.Errorf("the guest had %d kB and has %d", guestKB, nowKB)
	}
	if grown > 16<<20 {
		t.Errorf("the server's RSS grew by %.1f MB", mb(grown))
	}
}

// TestOutputOfOneGigabyte streams 1 GB through a flat server, while
// another client reads one byte a second and harms nobody.
func TestOutputOfOneGigabyte(t *testing.T) {
	s := startServer(t)
	sb := create(t, s.as(s.key("default", airlock.Client)), client.CreateRequest{Timeout: 5 * time.Minute})
	must(t, sb, "true")
	p := processesOf(t, s, sb)

	slow, pid := p.start(sh("exec cat /dev/urandom")) // nothing to compress
	before := s.memory("VmRSS")
	if err := os.WriteFile(fmt.Sprintf("/proc/%d/clear_refs", s.server()), []byte("5"), 0); err != nil {
		t.Fatalf("reset the peak: %v", err)
	}
	written := func() string { return must(t, sb, fmt.Sprintf("grep wchar /proc/%d/io || true", pid.GetPid())) }
	byteBySecond := make(chan error, 1)
	go func() { // the frames are large: what is read of each event is one byte a second
		for range 3 {
			if ev := slow.next(); ev == nil {
				byteBySecond <- slow.fail()
				return
			}
			time.Sleep(time.Second)
		}
		byteBySecond <- nil
	}()

	const size = 1_000_000_000
	var n countingWriter
	r, err := sb.Exec(t.Context(), client.ExecRequest{Cmd: "/usr/bin/head", Args: []string{"-c", fmt.Sprint(size), "/dev/zero"}, Stdout: &n, Timeout: 4 * time.Minute})
	if err != nil || r.Outcome != airlock.Exited || r.ExitCode != 0 || n != size {
		t.Errorf("%+v, %v, %d bytes", r, err, n)
	}
	peak := s.memory("VmHWM")
	t.Logf("the server's RSS was %.1f MB before and %.1f MB at its peak", mb(before), mb(peak))
	if peak-before > 64<<20 {
		t.Errorf("the server's RSS grew by %.1f MB", mb(peak-before))
	}
	if err := <-byteBySecond; err != nil {
		t.Errorf("the slow reader: %v", err)
	}
	first := written()
	time.Sleep(time.Second)
	if second := written(); first != second {
		t.Errorf("a process that nobody reads goes on: %s, then %s", first, second)
	}
	if _, err := p.rpc.SendSignal(t.Context(), ask(p, &envd.SendSignalRequest{Process: pid, Signal: envd.Signal_SIGNAL_SIGKILL})); err != nil {
		t.Error(err)
	}
	if _, _, end := rest(slow); end.GetStatus() != "signal: killed" {
		t.Errorf("the slow reader's end: %v, %v", end, slow.fail())
	}
}

type countingWriter int64

func (c *countingWriter) Write(p []byte) (int, error) {
	*c += countingWriter(len(p))
	return len(p), nil
}

// TestOneByteASecond reads a reply of files that slowly: it goes on, and the
// end of the sandbox breaks it off.
func TestOneByteASecond(t *testing.T) {
	s := startServer(t)
	c := s.as(s.key("default", airlock.Client))
	sb := create(t, c, client.CreateRequest{Timeout: 5 * time.Minute})
	must(t, sb, "head -c 50000000 /dev/zero > big")
	req, err := http.NewRequestWithContext(t.Context(), "GET", s.url+"/files?path=big", nil)
	if err != nil {
		t.Fatal(err)
	}
	for k, v := range dataHeader(sb) {
		req.Header.Set(k, v)
	}
	transport := &http.Transport{DisableCompression: true, ReadBufferSize: 1}
	defer transport.CloseIdleConnections()
	resp, err := transport.RoundTrip(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	one := make([]byte, 1)
	for range 4 {
		if _, err := io.ReadFull(resp.Body, one); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Second)
	}
	must(t, sb, "true") // nobody else waits for it
	if err := sb.Close(); err != nil {
		t.Fatal(err)
	}
	n, err := io.Copy(io.Discard, resp.Body)
	if err == nil || errors.Is(err, context.DeadlineExceeded) || n >= 50_000_000-4 {
		t.Errorf("the reply of a killed sandbox: %d bytes more, %v", n, err)
	}
}
