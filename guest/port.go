package guest

import (
	"context"
	"errors"
	"io"
	"os"
	"time"

	"airlock.dev/airlock"
	"airlock.dev/airlock/channel"
	"golang.org/x/sys/unix"
)

// dialTimeout is how long a server with a full queue may take to accept.
const dialTimeout = 10 * time.Second

// dialPort carries one connection to a port of the sandbox's loopback. Each
// direction waits for its reader, and ends by itself.
func dialPort(ctx context.Context, s *channel.Stream, body []byte) error {
	var req channel.DialRequest
	if err := decode(body, &req); err != nil {
		return err
	}
	conn, err := connectLoopback(req.Port)
	if err != nil {
		return airlock.Errorf(airlock.PortClosed, "port %d is not open", req.Port).Because(err)
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	whole := false // both sides have said all; anything else is a reset
	closed := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		reset(conn)
		close(closed)
	})
	defer func() {
		switch {
		case !stop():
			<-closed
		case whole:
			conn.Close()
		default:
			reset(conn)
		}
	}()
	if err := channel.SendReply(ctx, s, channel.Empty{}); err != nil {
		return err
	}

	// A server that takes no more may still have something to say, so an
	// error of this direction ends only itself.
	sent := make(chan error, 1)
	go func() {
		_, err := io.Copy(struct{ io.Writer }{conn}, s.Reader(ctx, channel.TagData))
		if err == nil {
			err = control(conn, func(fd int) error { return unix.Shutdown(fd, unix.SHUT_WR) })
		}
		sent <- err
	}()
	_, err = io.Copy(s.Writer(ctx, channel.TagData), struct{ io.Reader }{conn})
	if err == nil {
		err = s.CloseSend()
	}
	if err != nil {
		cancel()
		<-sent
		return broken(err)
	}
	if err := <-sent; err != nil && !errors.Is(err, unix.ENOTCONN) {
		return broken(err)
	}
	whole = true
	return nil
}

func broken(err error) error {
	return airlock.Errorf(airlock.Canceled, "the connection was broken off").Because(err)
}

// connectLoopback is net.Dial without package net, which would make the guest
// larger by a third.
func connectLoopback(port uint16) (*os.File, error) {
	four := unix.SockaddrInet4{Port: int(port), Addr: [4]byte{127, 0, 0, 1}}
	conn, err := connect(unix.AF_INET, &four)
	if err == nil {
		return conn, nil
	}
	six := unix.SockaddrInet6{Port: int(port), Addr: [16]byte{15: 1}}
	if conn, err6 := connect(unix.AF_INET6, &six); err6 == nil {
		return conn, nil
	}
	return nil, err
}

func connect(family int, to unix.Sockaddr) (*os.File, error) {
	fd, err := unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1) // only slower without
	err = unix.Connect(fd, to)
	conn := os.NewFile(uintptr(fd), "port")
	if err == unix.EINPROGRESS || err == unix.EINTR {
		err = finishConnect(conn)
	}
	if err != nil {
		conn.Close()
		return nil, err
	}
	return conn, nil
}

func finishConnect(conn *os.File) error {
	if err := conn.SetWriteDeadline(time.Now().Add(dialTimeout)); err != nil {
		return err
	}
	raw, err := conn.SyscallConn()
	if err != nil {
		return err
	}
	var result error
	err = raw.Write(func(fd uintptr) bool {
		p := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLOUT}}
		if n, _ := unix.Poll(p, 0); n == 0 {
			return false // called again when it is writable
		}
		code, err := unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_ERROR)
		if result = err; err == nil && code != 0 {
			result = unix.Errno(code)
		}
		return true
	})
	return errors.Join(err, result, conn.SetWriteDeadline(time.Time{}))
}

func control(conn *os.File, f func(fd int) error) error {
	raw, err := conn.SyscallConn()
	if err != nil {
		return err
	}
	var result error
	err = raw.Control(func(fd uintptr) { result = f(int(fd)) })
	return errors.Join(err, result)
}

// reset closes a connection so that its peer does not take it for an end.
func reset(conn *os.File) {
	control(conn, func(fd int) error {
		return unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1})
	})
	conn.Close()
}
