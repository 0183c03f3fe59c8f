package guest

import (
	"io"

	"golang.org/x/sys/unix"
)

// packets is the channel's socket. Reads and writes block in the kernel and
// not in the runtime's poller: the descriptor is inherited and may be shared
// with whoever made it, so its flags are left alone.
type packets int

// Packets makes a packet connection of a SOCK_SEQPACKET descriptor.
func Packets(fd int) io.ReadWriteCloser {
	unix.CloseOnExec(fd)
	return packets(fd)
}

func (p packets) Read(b []byte) (int, error) {
	for {
		n, err := unix.Read(int(p), b)
		switch {
		case err == unix.EINTR:
		case err != nil:
			return 0, err
		case n == 0:
			return 0, io.EOF
		default:
			return n, nil
		}
	}
}

func (p packets) Write(b []byte) (int, error) {
	for {
		n, err := unix.SendmsgN(int(p), b, nil, nil, unix.MSG_NOSIGNAL)
		if err != unix.EINTR {
			return n, err
		}
	}
}

// Close ends both directions, so that a blocked Read returns. The number
// stays taken: another thread may be about to use it.
func (p packets) Close() error { return unix.Shutdown(int(p), unix.SHUT_RDWR) }
