package door

import (
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/buffer"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/stack"

	"airlock.dev/airlock"
)

// patience is how long a frame waits for room.
const patience = 50 * time.Millisecond

// link is the wire of a door for its stack: a stack.LinkEndpoint over one end
// of a socketpair. It lets through what its rules permit, and answers by itself
// who has an address, so that the stack needs no table of neighbours.
type link struct {
	rules frameRules
	conn  *net.UnixConn
	raw   interface {
		Write(func(uintptr) bool) error
	}
	head4, head6 []byte
	in           []byte // one frame, and a byte more so that one that is too long shows
	to           atomic.Pointer[stack.NetworkDispatcher]
	done         chan struct{} // closed when nothing is read any more
	gone         chan struct{} // closed when there is nobody on the other end
	leave        sync.Once     // closes gone

	writing sync.Mutex  // one frame at a time
	stuck   bool        // under writing: the last frame was lost
	hurry   atomic.Bool // nothing waits for the guest any more

	dropped, lost atomic.Uint64
}

// newLink returns a link on a duplicate of fd.
func newLink(fd *os.File, rules frameRules) (*link, error) {
	c, err := net.FileConn(fd)
	if err != nil {
		return nil, fmt.Errorf("open the door's socket: %w", err)
	}
	l, err := newLinkOn(c, rules)
	if err != nil {
		c.Close()
		return nil, err
	}
	return l, nil
}

func newLinkOn(c net.Conn, rules frameRules) (*link, error) {
	conn, ok := c.(*net.UnixConn)
	if !ok {
		return nil, airlock.Invalidf("fd", "give one end of a socketpair of the kind SOCK_DGRAM", "the door's descriptor is no unix socket")
	}
	raw, err := conn.SyscallConn()
	if err != nil {
		return nil, fmt.Errorf("reach the door's socket: %w", err)
	}
	var kind, room int
	var kindErr, roomErr error
	err = raw.Control(func(fd uintptr) {
		kind, kindErr = unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_TYPE)
		room, roomErr = unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_SNDBUF)
	})
	if err := errors.Join(err, kindErr, roomErr); err != nil {
		return nil, fmt.Errorf("set up the door's socket: %w", err)
	}
	if kind != unix.SOCK_DGRAM {
		return nil, airlock.Invalidf("fd", "give one end of a socketpair of the kind SOCK_DGRAM", "the door's socket is of another kind")
	}
	if frame := ethernetSize + rules.mtu; room < 2*frame {
		return nil, airlock.Errorf(airlock.Unavailable, "the door's socket can hold %d bytes, less than two frames of %d: whoever makes it must set SO_SNDBUF", room, frame)
	}
	return &link{
		rules: rules,
		conn:  conn,
		raw:   raw,
		head4: rules.ethernet(header.IPv4ProtocolNumber),
		head6: rules.ethernet(header.IPv6ProtocolNumber),
		in:    make([]byte, ethernetSize+rules.mtu+1),
		done:  make(chan struct{}),
		gone:  make(chan struct{}),
	}, nil
}

// read takes frames until the link is shut.
func (l *link) read() {
	defer close(l.done)
	defer l.lose()
	for {
		n, err := l.conn.Read(l.in)
		if err != nil {
			return
		}
		what, packet := l.rules.judge(l.in[:n])
		switch what {
		case deliver4:
			l.deliver(header.IPv4ProtocolNumber, packet)
		case deliver6:
			l.deliver(header.IPv6ProtocolNumber, packet)
		case whoHas4:
			l.write([][]byte{l.rules.answerARP(packet)})
		case whoHas6:
			l.write([][]byte{l.rules.answerSolicit(packet)})
		default:
			l.dropped.Add(1)
		}
	}
}

// headersMost is more than the headers of a packet can be together.
const headersMost = 128

// deliver gives the stack a copy of its own, of the packet's size: whatever
// keeps a small packet keeps no large buffer with it. The headers have a buffer
// of theirs, because the stack copies the one that they are in once more.
func (l *link) deliver(proto tcpip.NetworkProtocolNumber, packet []byte) {
	to := l.to.Load()
	if to == nil {
		return
	}
	head := packet[:min(len(packet), headersMost)]
	payload := buffer.MakeWithData(head)
	payload.Append(buffer.NewViewWithData(packet[len(head):]))
	p := stack.NewPacketBuffer(stack.PacketBufferOptions{Payload: payload})
	p.RXChecksumValidated = true // nothing is damaged within a machine
	(*to).DeliverNetworkPacket(proto, p)
	p.DecRef()
}

// write sends one frame. It waits a moment for a guest that is behind, which
// is much cheaper for both than to lose what comes in a burst. Whoever waits
// holds locks of the stack: a guest that let one wait in vain is not waited for
// again before it has read something.
func (l *link) write(parts [][]byte) {
	l.writing.Lock()
	defer l.writing.Unlock()
	err := l.try(parts, false)
	if err == unix.EAGAIN && !l.stuck && !l.hurry.Load() {
		l.conn.SetWriteDeadline(time.Now().Add(patience))
		err = l.try(parts, true)
		l.conn.SetWriteDeadline(time.Time{})
	}
	l.stuck = err != nil
	if err != nil {
		l.lost.Add(1)
		l.failed(err)
	}
}

// probe sends a frame that means nothing to anyone. The end of a peer is no
// event on a pair of SOCK_DGRAM: only who sends something is told.
func (l *link) probe() {
	l.writing.Lock()
	defer l.writing.Unlock()
	if err := l.try([][]byte{l.rules.ethernet(etherTypeNothing)}, false); err != nil {
		l.failed(err)
	}
}

// failed looks at why a frame was not sent.
func (l *link) failed(err error) {
	switch err {
	case unix.ECONNREFUSED, unix.ECONNRESET, unix.ENOTCONN, unix.EPIPE:
		l.lose()
	}
}

func (l *link) lose() { l.leave.Do(func() { close(l.gone) }) }

// try sends one frame; with wait, not before there is room or the deadline.
func (l *link) try(parts [][]byte, wait bool) error {
	var err error
	shut := l.raw.Write(func(fd uintptr) bool {
		for {
			if _, err = unix.Writev(int(fd), parts); err != unix.EINTR {
				return err != unix.EAGAIN || !wait
			}
		}
	})
	if shut != nil {
		return shut
	}
	return err
}

// shut ends the reading, and waits for it. Nothing can be written any more.
func (l *link) shut() {
	l.conn.Close()
	<-l.done
}

// WritePackets implements stack.LinkWriter.
func (l *link) WritePackets(list stack.PacketBufferList) (int, tcpip.Error) {
	packets := list.AsSlice()
	for _, p := range packets {
		head := l.head4
		if p.NetworkProtocolNumber == header.IPv6ProtocolNumber {
			head = l.head6
		}
		parts := append(make([][]byte, 0, 8), head)
		l.write(append(parts, p.AsSlices()...))
	}
	return len(packets), nil // what is lost is lost on the wire
}

// Attach implements stack.LinkEndpoint.
func (l *link) Attach(d stack.NetworkDispatcher) {
	if d == nil {
		l.to.Store(nil)
		return
	}
	l.to.Store(&d)
}

// IsAttached implements stack.LinkEndpoint.
func (l *link) IsAttached() bool { return l.to.Load() != nil }

// MTU implements stack.LinkEndpoint.
func (l *link) MTU() uint32 { return uint32(l.rules.mtu) }

// SetMTU implements stack.LinkEndpoint; the size of a door's frames is fixed.
func (l *link) SetMTU(uint32) {}

// MaxHeaderLength implements stack.LinkEndpoint; write adds the header.
func (l *link) MaxHeaderLength() uint16 { return 0 }

// LinkAddress implements stack.LinkEndpoint.
func (l *link) LinkAddress() tcpip.LinkAddress { return tcpip.LinkAddress(l.rules.gatewayMAC[:]) }

// SetLinkAddress implements stack.LinkEndpoint; a door's address is fixed.
func (l *link) SetLinkAddress(tcpip.LinkAddress) {}

// Capabilities implements stack.LinkEndpoint.
func (l *link) Capabilities() stack.LinkEndpointCapabilities {
	return stack.CapabilityRXChecksumOffload
}

// ARPHardwareType implements stack.LinkEndpoint.
func (l *link) ARPHardwareType() header.ARPHardwareType { return header.ARPHardwareNone }

// AddHeader implements stack.LinkEndpoint.
func (l *link) AddHeader(*stack.PacketBuffer) {}

// ParseHeader implements stack.LinkEndpoint.
func (l *link) ParseHeader(*stack.PacketBuffer) bool { return true }

// Wait implements stack.LinkEndpoint; shut has waited.
func (l *link) Wait() {}

// Close implements stack.LinkEndpoint.
func (l *link) Close() {}

// SetOnCloseAction implements stack.LinkEndpoint.
func (l *link) SetOnCloseAction(func()) {}
