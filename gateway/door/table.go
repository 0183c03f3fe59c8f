package door

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"sync"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/checksum"
	"gvisor.dev/gvisor/pkg/tcpip/header"

	"airlock.dev/airlock"
)

// A Table lists the TCP flows of a door in memory that may outlast the process:
// when the door is opened again by another one, it can tell the guest that they are
// over. Who only waits for an answer would wait for ever otherwise.
type Table struct {
	mem  []byte
	left []ends // of the door before

	mu   sync.Mutex
	free []int32 // slots; the lowest last, so that few pages are touched
}

// ends are the guest's address, and where it went.
type ends struct{ from, to netip.AddrPort }

// A slot is: in use (1 byte), nothing (1), the two ports (2 each, big endian), and
// the two addresses (16 each, IPv4 as IPv4-mapped).
const (
	slotBytes  = 40
	slotsMost  = 4096
	TableBytes = slotBytes * slotsMost // of the file of a Table
)

// NewTableFile returns memory for one that nobody can make smaller.
func NewTableFile() (*os.File, error) {
	fd, err := unix.MemfdCreate("flows", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return nil, fmt.Errorf("make memory for flows: %w", err)
	}
	f := os.NewFile(uintptr(fd), "flows")
	err = f.Truncate(TableBytes)
	if err == nil {
		_, err = unix.FcntlInt(f.Fd(), unix.F_ADD_SEALS, unix.F_SEAL_SHRINK|unix.F_SEAL_GROW|unix.F_SEAL_SEAL)
	}
	if err != nil {
		f.Close()
		return nil, fmt.Errorf("make memory for flows: %w", err)
	}
	return f, nil
}

// OpenTable takes over the table in a file, which is the caller's to close.
func OpenTable(f *os.File) (*Table, error) {
	info, err := f.Stat()
	if err != nil {
		return nil, fmt.Errorf("open the list of flows: %w", err)
	}
	if info.Size() != TableBytes {
		return nil, airlock.Errorf(airlock.Invalid, "the list of flows has %d bytes, not %d", info.Size(), TableBytes)
	}
	mem, err := unix.Mmap(int(f.Fd()), 0, TableBytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("map the list of flows: %w", err)
	}
	t := &Table{mem: mem}
	for i := int32(slotsMost - 1); i >= 0; i-- {
		t.free = append(t.free, i)
		slot := t.slot(i)
		if slot[0] == 0 {
			continue
		}
		address := func(port, from int) netip.AddrPort {
			return netip.AddrPortFrom(netip.AddrFrom16([16]byte(slot[from:from+16])).Unmap(), binary.BigEndian.Uint16(slot[port:]))
		}
		slot[0] = 0
		if e := (ends{address(2, 6), address(4, 22)}); e.from.Addr().Is4() == e.to.Addr().Is4() {
			t.left = append(t.left, e)
		}
	}
	return t, nil
}

func (t *Table) slot(i int32) []byte { return t.mem[i*slotBytes:][:slotBytes-1] }

// add lists a flow, and returns its slot, or -1 if there is no room: then nobody
// is told.
func (t *Table) add(from, to netip.AddrPort) int32 {
	if t == nil {
		return -1
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.free) == 0 || t.mem == nil {
		return -1
	}
	i := t.free[len(t.free)-1]
	t.free = t.free[:len(t.free)-1]
	slot := t.slot(i)
	binary.BigEndian.PutUint16(slot[2:], from.Port())
	binary.BigEndian.PutUint16(slot[4:], to.Port())
	a, b := from.Addr().As16(), to.Addr().As16()
	copy(slot[6:], a[:])
	copy(slot[22:], b[:])
	slot[0] = 1
	return i
}

func (t *Table) remove(i int32) {
	if t == nil || i < 0 {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.mem != nil {
		t.slot(i)[0] = 0
		t.free = append(t.free, i)
	}
}

// close lets go of the memory. What is listed stays there.
func (t *Table) close() {
	if t == nil {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	unix.Munmap(t.mem)
	t.mem = nil
}

// tellLeft tells the guest that the flows of the door before are over.
func (d *Door) tellLeft() {
	if d.cfg.Flows == nil {
		return
	}
	for _, p := range d.cfg.Flows.left {
		// Of two numbers half of all apart, one at least is outside of any window.
		n := rand.Uint32()
		for _, seq := range []uint32{n, n + 1<<31} {
			if d.ctx.Err() != nil {
				return
			}
			d.link.write([][]byte{d.link.rules.stray(p, seq)})
		}
	}
}

// stray returns a frame with a segment to a guest that no connection expects. The
// guest answers with where its connection is (RFC 9293, 3.10.7.4), and the stack to
// that, which it knows nothing of, with a reset that is right (3.10.7.1).
func (r *frameRules) stray(p ends, seq uint32) []byte {
	segment := make(header.TCP, header.TCPMinimumSize)
	segment.Encode(&header.TCPFields{
		SrcPort: p.to.Port(), DstPort: p.from.Port(), SeqNum: seq, AckNum: seq,
		DataOffset: header.TCPMinimumSize, Flags: header.TCPFlagAck,
	})
	proto, size := header.IPv4ProtocolNumber, header.IPv4MinimumSize
	src, dst := tcpip.AddrFromSlice(p.to.Addr().AsSlice()), tcpip.AddrFromSlice(p.from.Addr().AsSlice())
	if p.from.Addr().Is6() {
		proto, size = header.IPv6ProtocolNumber, header.IPv6MinimumSize
	}
	sum := header.PseudoHeaderChecksum(header.TCPProtocolNumber, src, dst, header.TCPMinimumSize)
	segment.SetChecksum(^checksum.Checksum(segment, sum))
	frame := append(r.ethernet(proto), make([]byte, size)...)
	packet := frame[ethernetSize:]
	if proto == header.IPv6ProtocolNumber {
		header.IPv6(packet).Encode(&header.IPv6Fields{PayloadLength: header.TCPMinimumSize, TransportProtocol: header.TCPProtocolNumber, HopLimit: 64, SrcAddr: src, DstAddr: dst})
	} else {
		h := header.IPv4(packet)
		h.Encode(&header.IPv4Fields{TotalLength: header.IPv4MinimumSize + header.TCPMinimumSize, TTL: 64, Protocol: uint8(header.TCPProtocolNumber), SrcAddr: src, DstAddr: dst})
		h.SetChecksum(^h.CalculateChecksum())
	}
	return append(frame, segment...)
}
