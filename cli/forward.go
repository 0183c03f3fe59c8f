package cli

import (
	"context"
	"fmt"
	"io"
	"net"
	"strconv"
	"strings"
	"sync"

	"github.com/spf13/cobra"

	"airlock.dev/airlock"
	"airlock.dev/airlock/client"
)

func (a *app) sandboxForward() *cobra.Command {
	return &cobra.Command{
		Use:   "forward ID PORT[:LOCAL]",
		Short: "Reach a port of a sandbox at 127.0.0.1",
		Long: `Forward listens on 127.0.0.1 and passes each connection on to a port of a
running sandbox, whatever protocol it speaks, until it is interrupted. LOCAL is
the port here: the same number unless given, 0 for a free one.`,
		Example: `  airlock sandbox forward $id 5432
  airlock sandbox forward $id 80:8080`,
		Args: cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := oneID(args); err != nil {
				return err
			}
			port, local, err := parseForward(args[1])
			if err != nil {
				return err
			}
			c, err := a.server()
			if err != nil {
				return err
			}
			s, err := c.Get(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			return a.forward(cmd.Context(), s, port, local)
		},
	}
}

func parseForward(text string) (port, local uint16, err error) {
	first, second, given := strings.Cut(text, ":")
	p, err := strconv.ParseUint(first, 10, 16)
	l := p
	if given && err == nil {
		l, err = strconv.ParseUint(second, 10, 16)
	}
	if err != nil || p == 0 {
		return 0, 0, airlock.Invalidf("PORT", "write PORT or PORT:LOCAL with numbers up to 65535", "%q is no port", text)
	}
	return uint16(p), uint16(l), nil
}

type forwarding struct {
	Sandbox string `json:"sandboxID"`
	Port    uint16 `json:"port"`
	Listen  string `json:"listen"`
}

func (a *app) forward(ctx context.Context, s *client.Sandbox, port, local uint16) error {
	ln, err := net.Listen("tcp4", net.JoinHostPort("127.0.0.1", strconv.Itoa(int(local))))
	if err != nil {
		return (&airlock.Error{Code: airlock.Conflict, Field: "LOCAL", Message: fmt.Sprintf("cannot listen on port %d here", local),
			Hint: fmt.Sprintf("choose another: %d:LOCAL", port)}).Because(err)
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(ctx, func() { ln.Close() })()
	if err := a.print(forwarding{s.ID, port, ln.Addr().String()}, func(w io.Writer) {
		fmt.Fprintf(w, "%s is port %d of %s\n", ln.Addr(), port, s.ID)
	}); err != nil {
		return err
	}
	var conns sync.WaitGroup
	defer conns.Wait()
	defer cancel()
	var mu sync.Mutex // of what is reported
	for {
		here, err := ln.Accept()
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			return fmt.Errorf("accept a connection: %w", err)
		}
		conns.Go(func() {
			if err := carry(ctx, s, port, here.(*net.TCPConn)); err != nil && ctx.Err() == nil {
				mu.Lock()
				defer mu.Unlock()
				a.report(err)
			}
		})
	}
}

// carry passes one connection on. An error is one of the way to the port;
// what breaks later, both ends see.
func carry(ctx context.Context, s *client.Sandbox, port uint16, here *net.TCPConn) error {
	defer here.Close()
	there, err := s.DialPort(ctx, port)
	if err != nil {
		here.SetLinger(0)
		return err
	}
	defer there.Close()
	defer context.AfterFunc(ctx, func() { here.Close(); there.Close() })()
	done := make(chan error, 2)
	copyTo := func(to client.Conn, from io.Reader) {
		_, err := io.Copy(to, from)
		if err == nil {
			err = to.CloseWrite()
		}
		done <- err
	}
	go copyTo(there, here)
	go copyTo(here, there)
	for range 2 {
		if <-done != nil {
			here.SetLinger(0) // a break is not an end
			return nil
		}
	}
	return nil
}
