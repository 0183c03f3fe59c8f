package guest

import (
	"encoding/binary"
	"sync"
	"syscall"

	"airlock.dev/airlock"
	"airlock.dev/airlock/channel"
	"golang.org/x/sys/unix"
)

// The bulk of a large file does not go through the helper, where each packet
// would cost two more system calls on either side. The helper opens the file,
// which is the decision, and passes the descriptor: PID 1 goes on from where
// the helper is, for both share the position. What there is to decide or to
// clean up remains the helper's.

// passFrom is how much of a file goes through the helper before it passes the
// descriptor, in bytes. It makes small files no slower.
const passFrom = 2 * channel.MaxPayload

// Tags between PID 1 and a helper, beside the channel's own.
const (
	// tagPass comes from PID 1 in an upload: it would like to write itself.
	tagPass byte = 'P'
	// tagPassed comes from the helper. In a download the body is u64, how much
	// is left to be sent, and 0 for all. In an upload it answers tagPass, with
	// a body of one byte if there is a descriptor and of none if there is not.
	tagPassed byte = 'F'
	// tagFailed comes from PID 1 in an upload: its write failed; the body is
	// the errno, u32.
	tagFailed byte = 'E'
)

// passable says whether PID 1 can read or write a file instead of who opened
// it, without waiting for anyone and without lending its own rights: a regular
// file of a file system that looks at rights when a file is opened only, which
// /proc does not. A write of root's would also leave the set-user-ID bit.
func passable(fd int) bool {
	var st unix.Stat_t
	var fs unix.Statfs_t
	if unix.Fstat(fd, &st) != nil || unix.Fstatfs(fd, &fs) != nil {
		return false
	}
	return st.Mode&unix.S_IFMT == unix.S_IFREG && st.Mode&(unix.S_ISUID|unix.S_ISGID) == 0 && st.Size >= passFrom &&
		(fs.Type == unix.OVERLAYFS_SUPER_MAGIC || fs.Type == unix.TMPFS_MAGIC)
}

// pass is the helper's end: it sends a descriptor for the call on a stream.
// The descriptor stays open here, too.
func pass(socket, fd int, stream uint32) bool {
	var id [4]byte
	binary.BigEndian.PutUint32(id[:], stream)
	return passable(fd) && unix.Sendmsg(socket, id[:], unix.UnixRights(fd), nil, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL) == nil
}

// passed is PID 1's end: it receives the descriptors of a helper, which may be
// hostile. There is at most one for each call.
type passed struct {
	mu     sync.Mutex
	socket int            // -1 when closed
	calls  map[uint32]int // by the call's stream; -1 when nothing came
}

func newPassed(socket int) *passed { return &passed{socket: socket, calls: map[uint32]int{}} }

// begin lets a call have a descriptor.
func (p *passed) begin(stream uint32) {
	p.mu.Lock()
	p.calls[stream] = -1
	p.mu.Unlock()
}

// end closes what came for a call and was not taken.
func (p *passed) end(stream uint32) {
	p.mu.Lock()
	if fd := p.calls[stream]; fd >= 0 {
		unix.Close(fd)
	}
	delete(p.calls, stream)
	p.mu.Unlock()
}

// take returns the descriptor that was passed for a call. The caller closes it.
func (p *passed) take(stream uint32) (int, error) {
	p.receive()
	p.mu.Lock()
	fd, ok := p.calls[stream]
	if ok {
		p.calls[stream] = -1
	}
	p.mu.Unlock()
	if !ok || fd < 0 {
		return -1, errHelper
	}
	if !passable(fd) {
		unix.Close(fd)
		return -1, errHelper
	}
	return fd, nil
}

// receiveMost bounds the descriptors that are read at once: a hostile helper
// could send on for ever.
const receiveMost = 1024

// receive reads what was sent so far, and closes what is for no call: what
// came too late, or never should have come.
func (p *passed) receive() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for range receiveMost {
		if p.socket < 0 {
			return
		}
		var id [4]byte
		var rights [64]byte // with room for more than the one, which is none the better
		n, size, _, _, err := unix.Recvmsg(p.socket, id[:], rights[:], unix.MSG_DONTWAIT|unix.MSG_CMSG_CLOEXEC)
		if err == unix.EINTR {
			continue
		}
		if err != nil || n == 0 && size == 0 {
			return
		}
		stream := binary.BigEndian.Uint32(id[:])
		messages, _ := unix.ParseSocketControlMessage(rights[:size])
		for i := range messages {
			fds, _ := unix.ParseUnixRights(&messages[i])
			for _, fd := range fds {
				if held, ok := p.calls[stream]; ok && held < 0 {
					p.calls[stream] = fd
				} else {
					unix.Close(fd)
				}
			}
		}
	}
}

// close closes all that is not taken.
func (p *passed) close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.socket >= 0 {
		unix.Close(p.socket) // and with it what waits there
	}
	p.socket = -1
	for stream, fd := range p.calls {
		if fd >= 0 {
			unix.Close(fd)
			p.calls[stream] = -1
		}
	}
}

// closeWritten closes a file that was written. While a program is being
// started it has all our descriptors, and a file that someone writes cannot be
// executed: so there must be no start in progress.
func closeWritten(fd int) {
	syscall.ForkLock.RLock()
	unix.Close(fd)
	syscall.ForkLock.RUnlock()
}

// writeFull writes all of buf.
func writeFull(fd int, buf []byte) error {
	for len(buf) > 0 {
		n, err := unix.Write(fd, buf)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return err
		}
		buf = buf[n:]
	}
	return nil
}

func packErrno(err error) []byte {
	code, _ := err.(syscall.Errno)
	return binary.BigEndian.AppendUint32(nil, uint32(code))
}

func parseErrno(body []byte) error {
	if len(body) != 4 {
		return airlock.Errorf(airlock.Invalid, "the upload has a message out of form")
	}
	return syscall.Errno(binary.BigEndian.Uint32(body))
}
