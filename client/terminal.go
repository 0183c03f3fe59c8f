package client

import (
	"context"
	"errors"
	"io"

	"connectrpc.com/connect"

	"airlock.dev/airlock"
	"airlock.dev/airlock/api/envd"
)

// TerminalRequest is a program to run on a terminal of the sandbox.
type TerminalRequest struct {
	Cmd        string // "" is a login shell
	Args       []string
	Env        map[string]string
	Cwd        string // "" is the user's home
	User       string // "" is the sandbox's default, "user"
	Cols, Rows uint16
	PID        uint32 // of a program on a terminal, to be joined; instead of a new one
}

// Terminal is a program on a terminal. It goes on when nobody is there.
type Terminal struct {
	PID uint32

	s      *Sandbox
	ctx    context.Context // that of the output
	cancel context.CancelFunc
	recv   func() (*envd.ProcessEvent, error)
}

// Terminal starts a program on a terminal, or joins one. Its output waits for
// Wait; Close leaves it running.
func (s *Sandbox) Terminal(ctx context.Context, req TerminalRequest) (*Terminal, error) {
	t := &Terminal{s: s}
	// No deadline on ctx: Connect would make it the program's.
	t.ctx, t.cancel = context.WithCancel(withoutDeadline(ctx))
	context.AfterFunc(ctx, t.cancel)
	var err error
	if req.PID != 0 {
		var stream *connect.ServerStreamForClient[envd.ConnectResponse]
		if stream, err = s.process.Connect(t.ctx, connect.NewRequest(&envd.ConnectRequest{Process: selector(req.PID)})); err == nil {
			t.recv = events(stream)
		}
	} else {
		if req.Cmd == "" {
			req.Cmd, req.Args = "/bin/bash", []string{"-i", "-l"}
		}
		config := &envd.ProcessConfig{Cmd: req.Cmd, Args: req.Args, Envs: req.Env}
		if req.Cwd != "" {
			config.Cwd = &req.Cwd
		}
		start := connect.NewRequest(&envd.StartRequest{Process: config, Pty: pty(req.Cols, req.Rows)})
		setUser(start.Header(), req.User)
		var stream *connect.ServerStreamForClient[envd.StartResponse]
		if stream, err = s.process.Start(t.ctx, start); err == nil {
			t.recv = events(stream)
		}
	}
	var first *envd.ProcessEvent
	if err == nil {
		first, err = t.recv()
	}
	if t.PID = first.GetStart().GetPid(); err == nil && t.PID == 0 {
		err = airlock.Errorf(airlock.Internal, "the server did not say what it started")
	}
	if err == nil && req.PID != 0 && req.Cols != 0 {
		err = t.Resize(ctx, req.Cols, req.Rows)
	}
	if err != nil {
		t.cancel()
		return nil, rpcError(err)
	}
	return t, nil
}

// events reads a stream of either kind.
func events[T any, P interface {
	*T
	GetEvent() *envd.ProcessEvent
}](stream *connect.ServerStreamForClient[T]) func() (*envd.ProcessEvent, error) {
	return func() (*envd.ProcessEvent, error) {
		if stream.Receive() {
			return P(stream.Msg()).GetEvent(), nil
		}
		if err := stream.Err(); err != nil {
			return nil, err
		}
		return nil, io.ErrUnexpectedEOF
	}
}

func pty(cols, rows uint16) *envd.PTY {
	return &envd.PTY{Size: &envd.PTY_Size{Cols: uint32(cols), Rows: uint32(rows)}}
}

// ErrDetached is returned by Wait after Close.
var ErrDetached = errors.New("left the terminal")

// Wait passes the output on until the program ends.
func (t *Terminal) Wait(out io.Writer) (ExecResult, error) {
	defer t.cancel()
	for {
		event, err := t.recv()
		switch {
		case t.ctx.Err() != nil:
			return ExecResult{}, ErrDetached
		case err != nil && !t.s.Healthy():
			return ExecResult{ExitCode: -1, Outcome: airlock.SandboxKilled, Message: "the sandbox was killed or reached its end of life"}, nil
		case err != nil:
			return ExecResult{}, rpcError(err)
		case event.GetEnd() != nil:
			return resultOf(event.GetEnd()), nil
		case event.GetData() != nil:
			if err := writeOutput(event.GetData(), out, out); err != nil {
				return ExecResult{}, err
			}
		}
	}
}

// Send types on the terminal.
func (t *Terminal) Send(ctx context.Context, keys []byte) error {
	req := &envd.SendInputRequest{Process: selector(t.PID), Input: &envd.ProcessInput{Input: &envd.ProcessInput_Pty{Pty: keys}}}
	_, err := t.s.process.SendInput(ctx, connect.NewRequest(req))
	return rpcError(err)
}

// Resize tells the program of the terminal's new size.
func (t *Terminal) Resize(ctx context.Context, cols, rows uint16) error {
	_, err := t.s.process.Update(ctx, connect.NewRequest(&envd.UpdateRequest{Process: selector(t.PID), Pty: pty(cols, rows)}))
	return rpcError(err)
}

// Close leaves the terminal; the program goes on.
func (t *Terminal) Close() { t.cancel() }
