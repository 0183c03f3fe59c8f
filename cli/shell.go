package cli

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"os/signal"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"
	"golang.org/x/term"

	"airlock.dev/airlock/client"
)

func (a *app) sandboxShell() *cobra.Command {
	var req client.TerminalRequest
	cmd := &cobra.Command{
		Use:   "shell ID [-- COMMAND [ARGUMENT...]]",
		Short: "Work in a sandbox on a terminal",
		Long: `Shell opens a terminal in a running sandbox, with a login shell unless a command
is given. Its exit code is the command's own.

Type ~. at the beginning of a line to leave without ending it; it goes on, and
--attach comes back to it. Standard input may be a file or a pipe: it is typed,
and Ctrl-D at its end.

` + ExitCodes,
		Example: `  airlock sandbox shell $id
  airlock sandbox shell $id --user root -- top
  airlock sandbox shell $id --attach 17`,
		Annotations: map[string]string{runsPrograms: "yes"},
		Args: func(cmd *cobra.Command, args []string) error {
			dash := cmd.ArgsLenAtDash()
			switch {
			case len(args) == 0 || dash == 0:
				return usage(cmd, "name a sandbox")
			case dash > 1 || dash < 0 && len(args) > 1:
				return usage(cmd, "put the command after --")
			case req.PID != 0 && len(args) > 1:
				return usage(cmd, "give either a command or --attach")
			}
			return oneID(args)
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.server()
			if err != nil {
				return err
			}
			s, err := c.Get(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			if len(args) > 1 {
				req.Cmd, req.Args = args[1], args[2:]
			}
			return a.shell(cmd.Context(), s, req)
		},
	}
	flags := cmd.Flags()
	flags.StringVarP(&req.User, "user", "u", "", "run as this user (default \"user\")")
	flags.StringVarP(&req.Cwd, "cwd", "w", "", "in this directory (default: the user's home)")
	flags.Uint32Var(&req.PID, "attach", 0, "come back to what runs with this pid")
	return cmd
}

// The size of a terminal that is none.
const plainCols, plainRows = 80, 24

func (a *app) shell(ctx context.Context, s *client.Sandbox, req client.TerminalRequest) error {
	tty, isFile := a.Stdin.(*os.File)
	isTerminal := isFile && term.IsTerminal(int(tty.Fd()))
	size := func() (cols, rows uint16) {
		if isTerminal {
			if w, h, err := term.GetSize(int(tty.Fd())); err == nil && w > 0 && h > 0 && w < 1<<16 && h < 1<<16 {
				return uint16(w), uint16(h)
			}
		}
		return plainCols, plainRows
	}
	kind := os.Getenv("TERM")
	if kind == "" || !isTerminal {
		kind = "xterm-256color"
	}
	req.Env = map[string]string{"TERM": kind, "LANG": "C.UTF-8", "LC_ALL": "C.UTF-8"}
	req.Cols, req.Rows = size()
	t, err := s.Terminal(ctx, req)
	if err != nil {
		return err
	}
	defer t.Close()

	changes := make(chan os.Signal, 1)
	if isTerminal {
		old, err := term.MakeRaw(int(tty.Fd()))
		if err != nil {
			return err
		}
		restored := false
		restore := func() {
			if !restored {
				restored = true
				term.Restore(int(tty.Fd()), old)
			}
		}
		defer restore()
		signal.Notify(changes, unix.SIGWINCH)
		defer signal.Stop(changes)
		result, err := a.attended(ctx, t, changes, size, true)
		restore() // before anything is said
		return a.left(ctx, s, t, result, err)
	}
	result, err := a.attended(ctx, t, changes, size, false)
	return a.left(ctx, s, t, result, err)
}

// attended passes keys, sizes and output on until the program ends or is left.
func (a *app) attended(ctx context.Context, t *client.Terminal, changes <-chan os.Signal, size func() (uint16, uint16), isTerminal bool) (ExecResult, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() {
		for {
			select {
			case <-changes:
				cols, rows := size()
				t.Resize(ctx, cols, rows) // the next one tries again
			case <-ctx.Done():
				return
			}
		}
	}()
	go func() { // ends with the program, or when standard input next returns
		if typeKeys(a.Stdin, isTerminal, func(keys []byte) error { return t.Send(ctx, keys) }) {
			t.Close()
		}
	}()
	return t.Wait(a.Stdout)
}

// left says how a terminal was left.
func (a *app) left(ctx context.Context, s *client.Sandbox, t *client.Terminal, result ExecResult, err error) error {
	switch {
	case errors.Is(err, client.ErrDetached):
		a.note("left; it goes on: `airlock sandbox shell %s --attach %d`", s.ID, t.PID)
		if ctx.Err() != nil {
			return &exit{128 + int(unix.SIGTERM), nil}
		}
		return nil
	case err != nil:
		return err
	}
	return a.end(result, "")
}

const endOfInput = 4 // Ctrl-D

// typeKeys sends what is typed until the end, and says whether the terminal is
// to be left. On a terminal, ~. at the beginning of a line leaves it and so
// does its end, which is a hang-up; what is no terminal ends with Ctrl-D.
func typeKeys(r io.Reader, isTerminal bool, send func([]byte) error) (leave bool) {
	escape := escapes{start: true}
	buf := make([]byte, 32<<10)
	for {
		n, err := r.Read(buf)
		keys := buf[:n]
		if isTerminal {
			keys, leave = escape.filter(keys)
		}
		if len(keys) > 0 && send(keys) != nil {
			return false // the program or the server is gone, which Wait sees
		}
		switch {
		case leave:
			return true
		case err != nil && isTerminal:
			return true
		case err != nil:
			// A program that is just starting drops what was typed before.
			for send([]byte{endOfInput}) == nil {
				time.Sleep(time.Second)
			}
			return false
		}
	}
}

// escapes finds ~. at the beginning of a line; ~~ there is one ~.
type escapes struct {
	start bool // of a line
	tilde bool // one is held back
}

func (e *escapes) filter(keys []byte) (out []byte, leave bool) {
	for _, k := range keys {
		switch {
		case e.tilde && k == '.':
			return out, true
		case e.tilde:
			e.tilde = false
			if out = append(out, '~'); k == '~' {
				e.start = false
				continue
			}
		case e.start && k == '~':
			e.tilde, e.start = true, false
			continue
		}
		out = append(out, k)
		e.start = bytes.IndexByte([]byte{'\r', '\n', 3, endOfInput}, k) >= 0
	}
	return out, false
}
