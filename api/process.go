package api

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"
	"syscall"
	"time"

	"airlock.dev/airlock"
	"airlock.dev/airlock/api/envd"
	"airlock.dev/airlock/channel"
	"airlock.dev/airlock/control"
	"connectrpc.com/connect"
	"golang.org/x/sys/unix"
)

// processService is process.Process on the guest of the context.
type processService struct{}

func (processService) Start(ctx context.Context, req *connect.Request[envd.StartRequest], stream *connect.ServerStream[envd.StartResponse]) error {
	m := req.Msg
	p := m.GetProcess()
	if p.GetCmd() == "" {
		return airlock.Invalidf("process.cmd", "name a program", "process.cmd is missing")
	}
	start := channel.StartRequest{
		Cmd: p.GetCmd(), Args: p.GetArgs(), Env: p.GetEnvs(), Cwd: p.GetCwd(), User: rpcUser(req.Header()), Tag: m.GetTag(),
		Stdin: m.Stdin == nil || m.GetStdin(),
	}
	if m.GetPty() != nil {
		size, err := sizeOf(m.GetPty())
		if err != nil {
			return err
		}
		start.PTY = &size
	}
	exec, err := guestOf(ctx).Start(ctx, start, execTimeout(ctx))
	if err != nil {
		return err
	}
	return follow(ctx, exec, pingInterval(req.Header()), func(e *envd.ProcessEvent) error {
		return stream.Send(&envd.StartResponse{Event: e})
	})
}

func (processService) Connect(ctx context.Context, req *connect.Request[envd.ConnectRequest], stream *connect.ServerStream[envd.ConnectResponse]) error {
	ref, err := refOf(req.Msg.GetProcess())
	if err != nil {
		return err
	}
	exec, err := guestOf(ctx).Attach(ctx, ref, execTimeout(ctx))
	if err != nil {
		return err
	}
	return follow(ctx, exec, pingInterval(req.Header()), func(e *envd.ProcessEvent) error {
		return stream.Send(&envd.ConnectResponse{Event: e})
	})
}

// follow sends what happens to a process until it ends or the client leaves;
// in the latter case it runs on. A send waits for the client, and with it the
// process does: nothing is buffered here.
func follow(ctx context.Context, exec *control.Exec, ping time.Duration, send func(*envd.ProcessEvent) error) error {
	defer exec.Close()
	err := send(&envd.ProcessEvent{Event: &envd.ProcessEvent_Start{Start: &envd.ProcessEvent_StartEvent{Pid: exec.PID()}}})
	for err == nil {
		silence, cancel := context.WithTimeout(ctx, ping)
		var event control.ExecEvent
		event, err = exec.Recv(silence)
		cancel()
		switch {
		case errors.Is(err, context.DeadlineExceeded) && ctx.Err() == nil:
			err = send(&envd.ProcessEvent{Event: &envd.ProcessEvent_Keepalive{Keepalive: &envd.ProcessEvent_KeepAlive{}}})
		case err != nil:
		case event.End != nil:
			return finish(event.End, send)
		default:
			err = send(dataEvent(event))
		}
	}
	return err
}

func dataEvent(e control.ExecEvent) *envd.ProcessEvent {
	var d envd.ProcessEvent_DataEvent
	switch e.Stream {
	case channel.TagStdout:
		d.Output = &envd.ProcessEvent_DataEvent_Stdout{Stdout: e.Data}
	case channel.TagStderr:
		d.Output = &envd.ProcessEvent_DataEvent_Stderr{Stderr: e.Data}
	case channel.TagPTY:
		d.Output = &envd.ProcessEvent_DataEvent_Pty{Pty: e.Data}
	}
	return &envd.ProcessEvent{Event: &envd.ProcessEvent_Data{Data: &d}}
}

func finish(end *control.ExecEnd, send func(*envd.ProcessEvent) error) error {
	switch end.Outcome {
	case airlock.Timeout:
		return airlock.Errorf(airlock.Deadline, "%s", end.Message)
	case airlock.SandboxKilled, airlock.SandboxFailed:
		// The SDKs take a broken connection, and a health of 502 after it,
		// for the end of the sandbox; a clean end would read as a bug.
		panic(http.ErrAbortHandler)
	}
	e := &envd.ProcessEvent_EndEvent{ExitCode: int32(end.ExitCode), Exited: end.Outcome == airlock.Exited, Status: statusOf(end)}
	if end.Message != "" {
		e.Error = &end.Message
	}
	return send(&envd.ProcessEvent{Event: &envd.ProcessEvent_End{End: e}})
}

// statusOf is the first thing to read of an end: as Go prints it where E2B
// has a word, else the outcome.
func statusOf(end *control.ExecEnd) string {
	switch end.Outcome {
	case airlock.Exited:
		return fmt.Sprintf("exit status %d", end.ExitCode)
	case airlock.Signaled:
		if n := unix.SignalNum(end.Signal); n != 0 {
			return "signal: " + syscall.Signal(n).String()
		}
		return "signal: " + end.Signal
	}
	return string(end.Outcome)
}

func sizeOf(pty *envd.PTY) (channel.Size, error) {
	cols, rows := pty.GetSize().GetCols(), pty.GetSize().GetRows()
	if cols < 1 || rows < 1 || cols > math.MaxUint16 || rows > math.MaxUint16 {
		return channel.Size{}, airlock.Invalidf("pty.size", "give cols and rows from 1 to 65535", "the terminal's size is %d by %d", cols, rows)
	}
	return channel.Size{Cols: uint16(cols), Rows: uint16(rows)}, nil
}

func (processService) List(ctx context.Context, _ *connect.Request[envd.ListRequest]) (*connect.Response[envd.ListResponse], error) {
	all, err := guestOf(ctx).Processes(ctx)
	if err != nil {
		return nil, err
	}
	reply := &envd.ListResponse{}
	for _, p := range all {
		info := &envd.ProcessInfo{Pid: p.PID, Config: &envd.ProcessConfig{Cmd: p.Cmd, Args: p.Args, Envs: p.Env}}
		if p.Cwd != "" {
			info.Config.Cwd = &p.Cwd
		}
		if p.Tag != "" {
			info.Tag = &p.Tag
		}
		reply.Processes = append(reply.Processes, info)
	}
	return connect.NewResponse(reply), nil
}

func (processService) Update(ctx context.Context, req *connect.Request[envd.UpdateRequest]) (*connect.Response[envd.UpdateResponse], error) {
	ref, err := refOf(req.Msg.GetProcess())
	if err != nil {
		return nil, err
	}
	if req.Msg.GetPty() != nil {
		size, err := sizeOf(req.Msg.GetPty())
		if err != nil {
			return nil, err
		}
		if err := guestOf(ctx).Resize(ctx, ref, size); err != nil {
			return nil, err
		}
	}
	return connect.NewResponse(&envd.UpdateResponse{}), nil
}

func inputOf(in *envd.ProcessInput) []byte {
	if pty, ok := in.GetInput().(*envd.ProcessInput_Pty); ok {
		return pty.Pty
	}
	return in.GetStdin()
}

func (processService) SendInput(ctx context.Context, req *connect.Request[envd.SendInputRequest]) (*connect.Response[envd.SendInputResponse], error) {
	ref, err := refOf(req.Msg.GetProcess())
	if err != nil {
		return nil, err
	}
	if err := guestOf(ctx).Input(ctx, ref, bytes.NewReader(inputOf(req.Msg.GetInput()))); err != nil {
		return nil, err
	}
	return connect.NewResponse(&envd.SendInputResponse{}), nil
}

func (processService) StreamInput(ctx context.Context, stream *connect.ClientStream[envd.StreamInputRequest]) (*connect.Response[envd.StreamInputResponse], error) {
	if !stream.Receive() {
		if err := stream.Err(); err != nil {
			return nil, err
		}
		return nil, airlock.Invalidf("start", "send start first", "the stream is empty")
	}
	ref, err := refOf(stream.Msg().GetStart().GetProcess())
	if err != nil {
		return nil, err
	}
	if err := guestOf(ctx).Input(ctx, ref, &inputReader{stream: stream}); err != nil {
		return nil, err
	}
	return connect.NewResponse(&envd.StreamInputResponse{}), nil
}

// inputReader reads the data of a client's stream.
type inputReader struct {
	stream *connect.ClientStream[envd.StreamInputRequest]
	rest   []byte
}

func (r *inputReader) Read(p []byte) (int, error) {
	for len(r.rest) == 0 {
		if !r.stream.Receive() {
			if err := r.stream.Err(); err != nil {
				return 0, err
			}
			return 0, io.EOF
		}
		r.rest = inputOf(r.stream.Msg().GetData().GetInput())
	}
	n := copy(p, r.rest)
	r.rest = r.rest[n:]
	return n, nil
}

func (processService) SendSignal(ctx context.Context, req *connect.Request[envd.SendSignalRequest]) (*connect.Response[envd.SendSignalResponse], error) {
	ref, err := refOf(req.Msg.GetProcess())
	if err != nil {
		return nil, err
	}
	signal := req.Msg.GetSignal()
	if signal != envd.Signal_SIGNAL_SIGKILL && signal != envd.Signal_SIGNAL_SIGTERM {
		return nil, airlock.Invalidf("signal", "use SIGNAL_SIGKILL or SIGNAL_SIGTERM", "signal is %s", signal)
	}
	if err := guestOf(ctx).Signal(ctx, ref, int(signal)); err != nil {
		return nil, err
	}
	return connect.NewResponse(&envd.SendSignalResponse{}), nil
}

func (processService) CloseStdin(ctx context.Context, req *connect.Request[envd.CloseStdinRequest]) (*connect.Response[envd.CloseStdinResponse], error) {
	ref, err := refOf(req.Msg.GetProcess())
	if err != nil {
		return nil, err
	}
	if err := guestOf(ctx).CloseStdin(ctx, ref); err != nil {
		return nil, err
	}
	return connect.NewResponse(&envd.CloseStdinResponse{}), nil
}
