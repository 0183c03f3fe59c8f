package client

import (
	"context"
	"io"
	"net/http"
	"strconv"

	"airlock.dev/airlock"
)

// tcpProtocol is what a connection to a port is upgraded to.
const tcpProtocol = "airlock-tcp"

// Conn is a connection to a port of a sandbox: bytes as they are. CloseWrite
// says that no more comes; Close ends both directions.
type Conn interface {
	io.ReadWriteCloser
	CloseWrite() error
}

// DialPort connects to a port on which a program in the sandbox listens. The
// context is that of the attempt only.
func (s *Sandbox) DialPort(ctx context.Context, port uint16) (Conn, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, s.c.base+"/v1/ports/"+strconv.Itoa(int(port)), nil)
	if err != nil {
		return nil, err
	}
	s.address(req.Header)
	req.Header.Set("Connection", "Upgrade")
	req.Header.Set("Upgrade", tcpProtocol)
	resp, err := s.c.http1.Do(req)
	if err != nil {
		return nil, s.c.unreachable(ctx, err)
	}
	if resp.StatusCode != http.StatusSwitchingProtocols {
		defer resp.Body.Close()
		return nil, errorOf(resp)
	}
	conn, ok := resp.Body.(Conn)
	if !ok {
		resp.Body.Close()
		return nil, airlock.Errorf(airlock.Internal, "the server's answer to GET /v1/ports is not as expected")
	}
	return conn, nil
}
