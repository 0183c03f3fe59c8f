package guest

import (
	"errors"
	"io"
	"net"
	"strings"
	"syscall"
	"testing"
	"time"

	"airlock.dev/airlock"
	"airlock.dev/airlock/channel"
)

// listen serves one connection after the other and returns the port.
func listen(t *testing.T, address string, serve func(c *net.TCPConn)) uint16 {
	t.Helper()
	ln, err := net.Listen("tcp", address)
	if err != nil {
		t.Skip(err) // a machine without IPv6
	}
	t.Cleanup(func() { ln.Close() })
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			serve(c.(*net.TCPConn))
			c.Close()
		}
	}()
	return uint16(ln.Addr().(*net.TCPAddr).Port)
}

func (h *host) dialPort(port uint16) (*channel.Stream, error) {
	s := h.open(channel.MethodDial, channel.DialRequest{Port: port})
	_, err := channel.RecvReply[channel.Empty](h.ctx(), s, channel.MethodDial)
	return s, err
}

func TestPortHalfClose(t *testing.T) {
	for _, address := range []string{"127.0.0.1:0", "[::1]:0"} {
		t.Run(address, func(t *testing.T) {
			h := start(t)
			port := listen(t, address, func(c *net.TCPConn) {
				all, _ := io.ReadAll(c)
				c.Write([]byte("got " + string(all)))
			})
			s, err := h.dialPort(port)
			if err != nil {
				t.Fatal(err)
			}
			io.WriteString(s.Writer(h.ctx(), channel.TagData), "some words")
			s.CloseSend()
			got, err := io.ReadAll(s.Reader(h.ctx(), channel.TagData))
			if string(got) != "got some words" || err != nil {
				t.Errorf("%q, %v", got, err)
			}
		})
	}
}

func TestPortClosed(t *testing.T) {
	h := start(t)
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	port := uint16(ln.Addr().(*net.TCPAddr).Port)
	ln.Close()
	if _, err := h.dialPort(port); airlock.CodeOf(err) != airlock.PortClosed {
		t.Errorf("%v", err)
	}
	if _, err := h.dialPort(0); airlock.CodeOf(err) != airlock.PortClosed {
		t.Errorf("port 0: %v", err)
	}
}

// Nothing is lost, and a reader that waits makes the server wait.
func TestPortBackPressure(t *testing.T) {
	h := start(t)
	const size = 64 << 20
	wrote := make(chan int, 1)
	port := listen(t, "127.0.0.1:0", func(c *net.TCPConn) {
		c.SetWriteDeadline(time.Now().Add(time.Second))
		n, _ := c.Write(make([]byte, size))
		wrote <- n
		c.SetWriteDeadline(time.Time{})
		c.Write(make([]byte, size-n))
	})
	s, err := h.dialPort(port)
	if err != nil {
		t.Fatal(err)
	}
	if n := <-wrote; n > 16<<20 {
		t.Errorf("the server wrote %d bytes that nobody reads", n)
	}
	n, err := io.Copy(io.Discard, s.Reader(h.ctx(), channel.TagData))
	if n != size || err != nil {
		t.Errorf("%d bytes, %v", n, err)
	}
}

func TestPortResets(t *testing.T) {
	h := start(t)
	saw := make(chan error, 1)
	port := listen(t, "127.0.0.1:0", func(c *net.TCPConn) {
		_, err := c.Read(make([]byte, 1))
		saw <- err
	})
	s, err := h.dialPort(port)
	if err != nil {
		t.Fatal(err)
	}
	s.Close()
	if err := <-saw; !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("the server saw %v", err)
	}

	port = listen(t, "127.0.0.1:0", func(c *net.TCPConn) {
		c.Read(make([]byte, 1))
		c.SetLinger(0)
	})
	if s, err = h.dialPort(port); err != nil {
		t.Fatal(err)
	}
	io.WriteString(s.Writer(h.ctx(), channel.TagData), "x")
	if _, _, err := s.Recv(h.ctx()); airlock.CodeOf(err) != airlock.Canceled || !strings.Contains(err.Error(), "broken off") {
		t.Errorf("the host saw %v", err)
	}
}
