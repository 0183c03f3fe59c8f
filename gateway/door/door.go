// Package door ends the network of one sandbox: userspace TCP/IP on the host's
// end of a socketpair of raw Ethernet frames. Whatever address a sandbox goes
// to, its flow arrives here and is given to a Handler, which accepts or refuses
// it. Who owns the sandbox, what is permitted and what is behind an address
// the package must not know; which door a flow came through is all the identity
// there is, and nothing that a frame says changes it.
//
// The guest is hostile. A frame that is not of the few plain forms that
// frameRules knows is dropped before the TCP/IP stack sees it. What is left is
// bounded: flows by Config.MaxFlows, the bytes of each by its buffers, its time
// by the time-outs. Each flow has one goroutine, from the first packet until
// nothing is left of it, and Close waits for all. Start reading at Open.
package door

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv4"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv6"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
	"gvisor.dev/gvisor/pkg/tcpip/transport/udp"

	"airlock.dev/airlock"
)

const (
	nic = 1

	// The buffers of one flow, each way. They begin at bufferFirst and grow with
	// the speed of the flow; those of flows beyond the first roomyFlows never
	// get larger than bufferTight. With 256 flows a guest can make a door keep
	// about 120 MB.
	bufferLeast = 4 << 10
	bufferFirst = 256 << 10
	bufferMost  = 1 << 20
	bufferTight = 128 << 10
	roomyFlows  = 32
	// bufferUDP is for the datagrams of one flow that wait, each way.
	bufferUDP = 256 << 10

	// mtuMost leaves room for a frame's header in 64 KiB.
	mtuLeast = 1280
	mtuMost  = 65520
	flowsMax = 1 << 16
)

// Handler serves the flows of one door. A flow is over when its method returns,
// and must return soon after ctx, which ends when the door closes.
type Handler interface {
	// TCP decides one connection, and serves it if it accepts it. It has a
	// goroutine of its own; the guest waits meanwhile.
	TCP(ctx context.Context, f *Flow)
	// UDP decides the datagrams from one address and port of the guest to one
	// destination, which Config.UDP did not rule out, and serves them if it
	// accepts them. It has a goroutine of its own; what the guest says meanwhile
	// is kept, a little of it.
	UDP(ctx context.Context, f *Datagrams)
}

// Config says what a door is like. Zero values have the defaults named; fields
// that both ends must know are those that the driver gave the sandbox.
type Config struct {
	Gateway4, Guest4 netip.Addr // 10.0.0.1, 10.0.0.2
	Gateway6, Guest6 netip.Addr // fd61:6972::1, fd61:6972::2
	GatewayMAC       [6]byte    // 02:00:00:00:00:01
	GuestMAC         [6]byte    // 02:00:00:00:00:02
	// MTU is the most bytes of a packet, 65000; at least 1280, at most 65520.
	MTU int
	// MaxFlows bounds the flows, TCP and UDP together, that exist at one time:
	// 256, at most 65536. The next one is refused at once.
	MaxFlows int
	// UDP says whether the Handler is asked about datagrams to an address, or
	// they are never permitted. It holds up the door, and must answer at once.
	// What it rules out, and all if it is nil, is answered with ICMP port
	// unreachable, so that who tries QUIC falls back without waiting.
	UDP func(to netip.AddrPort) bool
	// Refused, if it is given, is told of each flow that is over MaxFlows. It
	// holds up the door, and must return at once.
	Refused func()

	// Flows, if it is given, lists the TCP flows, and had those of the door before,
	// whose guest is told that they are over. It is the door's from now on.
	Flows *Table

	TCPIdle   time.Duration // when a TCP flow without any traffic is reset: 1 h
	UDPIdle   time.Duration // when a UDP flow without any is over: 60 s
	Handshake time.Duration // how long the guest may take to answer Accept: 10 s
	Linger    time.Duration // how long a flow may take to end after its handler: 10 s
	Probe     time.Duration // how often it is tried whether the guest's end still exists: 5 s
}

func (c Config) filled() Config {
	addr := func(a *netip.Addr, s string) {
		if !a.IsValid() {
			*a = netip.MustParseAddr(s)
		}
	}
	addr(&c.Gateway4, "10.0.0.1")
	addr(&c.Guest4, "10.0.0.2")
	addr(&c.Gateway6, "fd61:6972::1")
	addr(&c.Guest6, "fd61:6972::2")
	mac := func(m *[6]byte, last byte) {
		if *m == [6]byte{} {
			*m = [6]byte{2, 0, 0, 0, 0, last}
		}
	}
	mac(&c.GatewayMAC, 1)
	mac(&c.GuestMAC, 2)
	if c.MTU == 0 {
		c.MTU = 65000
	}
	if c.MaxFlows == 0 {
		c.MaxFlows = 256
	}
	limit := func(d *time.Duration, is time.Duration) {
		if *d == 0 {
			*d = is
		}
	}
	limit(&c.TCPIdle, time.Hour)
	limit(&c.UDPIdle, time.Minute)
	limit(&c.Handshake, 10*time.Second)
	limit(&c.Linger, 10*time.Second)
	limit(&c.Probe, 5*time.Second)
	return c
}

func (c Config) check() error {
	switch {
	case !c.Gateway4.Is4() || !c.Guest4.Is4() || c.Gateway4 == c.Guest4:
		return airlock.Invalidf("Gateway4, Guest4", "give two different IPv4 addresses", "the door cannot be between %s and %s", c.Gateway4, c.Guest4)
	case !c.Gateway6.Is6() || !c.Guest6.Is6() || c.Gateway6.Is4In6() || c.Guest6.Is4In6() || c.Gateway6.Zone()+c.Guest6.Zone() != "" || c.Gateway6 == c.Guest6:
		return airlock.Invalidf("Gateway6, Guest6", "give two different IPv6 addresses without zone", "the door cannot be between %s and %s", c.Gateway6, c.Guest6)
	case (c.GatewayMAC[0]|c.GuestMAC[0])&1 != 0 || c.GatewayMAC == c.GuestMAC:
		return airlock.Invalidf("GatewayMAC, GuestMAC", "give two different unicast addresses", "the door cannot be between %x and %x", c.GatewayMAC, c.GuestMAC)
	case c.MTU < mtuLeast || c.MTU > mtuMost:
		return airlock.Invalidf("MTU", fmt.Sprintf("give %d to %d", mtuLeast, mtuMost), "the door's packets cannot have %d bytes", c.MTU)
	case c.MaxFlows < 1 || c.MaxFlows > flowsMax:
		return airlock.Invalidf("MaxFlows", fmt.Sprintf("give 1 to %d", flowsMax), "the door cannot have %d flows", c.MaxFlows)
	case min(c.TCPIdle, c.UDPIdle, c.Handshake, c.Linger, c.Probe) < 0:
		return airlock.Invalidf("TCPIdle, UDPIdle, Handshake, Linger, Probe", "give positive durations", "the door has a negative time-out")
	}
	return nil
}

// Stats counts what a door did since it was opened.
type Stats struct {
	Flows   int    // that exist now
	Refused uint64 // flows that were over the budget
	Barred  uint64 // datagrams that Config.UDP ruled out
	Dropped uint64 // frames of the guest that are of no form that is let in
	Lost    uint64 // frames that the guest did not take
}

// Door is the end of one sandbox's network. Its methods may be called
// concurrently.
type Door struct {
	cfg     Config
	handler Handler
	stack   *stack.Stack
	link    *link
	syns    *tcp.Forwarder
	opened  time.Time

	ctx     context.Context // of the handlers
	cancel  context.CancelFunc
	refused atomic.Uint64
	barred  atomic.Uint64

	mu        sync.Mutex
	flows     map[killable]bool
	undecided map[stack.TransportEndpointID]*Flow // of TCP, whose guest waits for Accept or Refuse
	datagrams map[stack.TransportEndpointID]*Datagrams
	closed    bool

	running sync.WaitGroup // one for each flow
	swept   chan struct{}  // closed when the sweeper is done
	end     sync.Once
	ended   chan struct{} // closed when nothing of the door is left
}

// Open makes a door of fd, one end of a SOCK_DGRAM socketpair whose other end
// the sandbox has. It takes over fd, unless it fails. The buffers of the pair
// are for who makes it to set: SO_SNDBUF of fd bounds the frames that wait for
// a guest that does not read, and the kernel's default is enough.
func Open(fd *os.File, cfg Config, h Handler) (*Door, error) {
	cfg = cfg.filled()
	if err := cfg.check(); err != nil {
		return nil, err
	}
	l, err := newLink(fd, frameRules{
		gatewayMAC: cfg.GatewayMAC, guestMAC: cfg.GuestMAC,
		gateway4: cfg.Gateway4.As4(), guest4: cfg.Guest4.As4(),
		gateway6: cfg.Gateway6.As16(), guest6: cfg.Guest6.As16(),
		mtu: cfg.MTU,
	})
	if err != nil {
		return nil, err
	}
	d := &Door{
		cfg: cfg, handler: h, link: l, opened: time.Now(),
		flows: map[killable]bool{}, undecided: map[stack.TransportEndpointID]*Flow{},
		datagrams: map[stack.TransportEndpointID]*Datagrams{},
		swept:     make(chan struct{}), ended: make(chan struct{}),
	}
	d.ctx, d.cancel = context.WithCancel(context.Background())
	if d.stack, err = newStack(l, cfg); err != nil {
		d.cancel()
		l.conn.Close()
		return nil, fmt.Errorf("set up the door's network: %w", err)
	}
	// The door itself counts; the forwarder's own limit would pass SYNs over in
	// silence, and is never reached.
	d.syns = tcp.NewForwarder(d.stack, bufferFirst, cfg.MaxFlows+1, d.begin)
	d.stack.SetTransportProtocolHandler(tcp.ProtocolNumber, d.syn)
	d.stack.SetTransportProtocolHandler(udp.ProtocolNumber, d.datagram)
	fd.Close() // the link has a duplicate
	go l.read()
	go d.sweep()
	return d, nil
}

// newStack returns a stack that takes every address for its own, has no
// neighbours but the guest, and says nothing of its own accord.
func newStack(l *link, cfg Config) (*stack.Stack, error) {
	s := stack.New(stack.Options{
		NetworkProtocols:   []stack.NetworkProtocolFactory{ipv4.NewProtocol, ipv6.NewProtocolWithOptions(ipv6.Options{})},
		TransportProtocols: []stack.TransportProtocolFactory{tcp.NewProtocol, udp.NewProtocol},
	})
	if err := configure(s, l, cfg); err != nil {
		s.Destroy()
		return nil, err
	}
	return s, nil
}

func configure(s *stack.Stack, l *link, cfg Config) error {
	sack := tcpip.TCPSACKEnabled(true)
	receive := tcpip.TCPReceiveBufferSizeRangeOption{Min: bufferLeast, Default: bufferFirst, Max: bufferMost}
	send := tcpip.TCPSendBufferSizeRangeOption{Min: bufferLeast, Default: bufferFirst, Max: bufferMost}
	// A wire without routers keeps no old packets: nothing to wait for.
	wait := tcpip.TCPTimeWaitTimeoutOption(0)
	// What is written while something is on its way leaves together (Nagle): each
	// segment costs both stacks as much as a large one, and the guest's
	// acknowledges at once. One that does not would let small answers wait.
	together := tcpip.TCPDelayEnabled(true)
	for _, option := range []tcpip.SettableTransportProtocolOption{&sack, &receive, &send, &wait, &together} {
		if err := s.SetTransportProtocolOption(tcp.ProtocolNumber, option); err != nil {
			return fmt.Errorf("set %T: %s", option, err)
		}
	}
	for _, option := range []any{ // of UDP
		tcpip.ReceiveBufferSizeOption{Min: bufferLeast, Default: bufferUDP, Max: bufferUDP},
		tcpip.SendBufferSizeOption{Min: bufferLeast, Default: bufferUDP, Max: bufferUDP},
	} {
		if err := s.SetOption(option); err != nil {
			return fmt.Errorf("set %T: %s", option, err)
		}
	}
	if err := s.CreateNIC(nic, l); err != nil {
		return fmt.Errorf("create the interface: %s", err)
	}
	for _, a := range []tcpip.ProtocolAddress{
		{Protocol: ipv4.ProtocolNumber, AddressWithPrefix: tcpip.AddrFrom4(cfg.Gateway4.As4()).WithPrefix()},
		{Protocol: ipv6.ProtocolNumber, AddressWithPrefix: tcpip.AddrFrom16(cfg.Gateway6.As16()).WithPrefix()},
	} {
		if err := s.AddProtocolAddress(nic, a, stack.AddressProperties{}); err != nil {
			return fmt.Errorf("add address %s: %s", a.AddressWithPrefix, err)
		}
	}
	if err := s.SetPromiscuousMode(nic, true); err != nil { // receive for every address
		return fmt.Errorf("receive for all: %s", err)
	}
	if err := s.SetSpoofing(nic, true); err != nil { // and answer from it
		return fmt.Errorf("answer for all: %s", err)
	}
	s.SetRouteTable([]tcpip.Route{{Destination: header.IPv4EmptySubnet, NIC: nic}, {Destination: header.IPv6EmptySubnet, NIC: nic}})
	return nil
}

// Close ends all flows with a reset, waits for their handlers, and then for
// everything else of the door.
func (d *Door) Close() {
	d.end.Do(func() {
		d.mu.Lock()
		d.closed = true
		d.mu.Unlock()
		d.link.hurry.Store(true)
		d.cancel()
		done := make(chan struct{})
		go func() {
			d.running.Wait()
			close(done)
		}()
		again := time.NewTicker(20 * time.Millisecond)
		defer again.Stop()
		for over := false; !over; {
			d.kill(func(killable) bool { return true })
			select {
			case <-done:
				over = true
			case <-again.C: // a handshake may have begun while it was looked for
			}
		}
		<-d.swept
		d.link.shut()
		d.stack.Destroy()
		d.cfg.Flows.close()
		close(d.ended)
	})
	<-d.ended
}

// Done returns a channel that is closed when the guest's end of the wire does
// not exist any more, a moment after that, or when the door is closed. A door
// whose guest has gone is still for its owner to close.
func (d *Door) Done() <-chan struct{} { return d.link.gone }

// over says that Close has begun: flows that it has not yet found end too.
func (d *Door) over() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.closed
}

// Stats returns what the door did until now.
func (d *Door) Stats() Stats {
	d.mu.Lock()
	defer d.mu.Unlock()
	return Stats{Flows: len(d.flows), Refused: d.refused.Load(), Barred: d.barred.Load(), Dropped: d.link.dropped.Load(), Lost: d.link.lost.Load()}
}

// sweep ends flows whose time is over, and finds out that the guest has gone.
func (d *Door) sweep() {
	defer close(d.swept)
	d.tellLeft()
	every := min(d.cfg.TCPIdle, d.cfg.UDPIdle, d.cfg.Handshake, d.cfg.Linger) / 4
	tick := time.NewTicker(max(every, time.Millisecond))
	defer tick.Stop()
	probe := time.NewTicker(max(d.cfg.Probe, time.Millisecond))
	defer probe.Stop()
	for {
		select {
		case <-tick.C:
			d.kill(killable.expired)
		case <-probe.C:
			d.link.probe()
		case <-d.ctx.Done():
			return
		}
	}
}

// kill ends the flows that which says.
func (d *Door) kill(which func(killable) bool) {
	var these []killable
	d.mu.Lock()
	for f := range d.flows {
		if which(f) {
			these = append(these, f)
		}
	}
	d.mu.Unlock()
	for _, f := range these {
		f.kill()
	}
}

// killable is a Flow or Datagrams.
type killable interface {
	expired() bool
	kill()
}

// reserve counts a flow if there is room for one; d.mu is held. It is released once.
func (d *Door) reserve(f killable) bool {
	if d.closed {
		return false
	}
	if len(d.flows) >= d.cfg.MaxFlows {
		d.refused.Add(1)
		if d.cfg.Refused != nil {
			d.cfg.Refused()
		}
		return false
	}
	d.flows[f] = true
	d.running.Add(1)
	return true
}

func (d *Door) release(f killable) {
	d.mu.Lock()
	delete(d.flows, f)
	d.mu.Unlock()
	d.running.Done()
}

// syn takes the TCP segments that belong to no open flow. What it does not
// handle, the stack answers with a reset.
func (d *Door) syn(id stack.TransportEndpointID, p *stack.PacketBuffer) bool {
	if flags := header.TCP(p.TransportHeader().Slice()).Flags(); flags&(header.TCPFlagSyn|header.TCPFlagAck|header.TCPFlagRst|header.TCPFlagFin) != header.TCPFlagSyn {
		return false
	}
	f := &Flow{}
	f.life.begin(d, id)
	d.mu.Lock()
	again := d.undecided[id] != nil
	room := !again && d.reserve(f)
	if room {
		d.undecided[id] = f
	}
	d.mu.Unlock()
	if !room {
		return again
	}
	if !d.syns.HandlePacket(id, p) {
		d.decided(id)
		d.release(f)
		return false
	}
	return true
}

// decided forgets the SYN of a flow that was accepted or refused.
func (d *Door) decided(id stack.TransportEndpointID) {
	d.mu.Lock()
	delete(d.undecided, id)
	d.mu.Unlock()
}

// begin is the goroutine of a TCP flow.
func (d *Door) begin(r *tcp.ForwarderRequest) {
	d.mu.Lock()
	f := d.undecided[r.ID()]
	d.mu.Unlock()
	defer d.release(f)
	f.mu.Lock()
	f.req = r
	f.mu.Unlock()
	slot := d.cfg.Flows.add(f.From(), f.To())
	defer d.cfg.Flows.remove(slot)
	d.handler.TCP(d.ctx, f)
	f.finish()
}

// datagram takes the UDP packets that belong to no open endpoint. What it does
// not handle, the stack answers with ICMP port unreachable.
func (d *Door) datagram(id stack.TransportEndpointID, p *stack.PacketBuffer) bool {
	if d.cfg.UDP == nil || !d.cfg.UDP(addrPort(id.LocalAddress, id.LocalPort)) {
		d.barred.Add(1)
		return false
	}
	d.mu.Lock()
	f := d.datagrams[id]
	begins := f == nil
	if begins {
		f = &Datagrams{}
		f.life.begin(d, id)
		if !d.reserve(f) {
			d.mu.Unlock()
			return false
		}
		d.datagrams[id] = f
	}
	d.mu.Unlock()
	handled := f.take(p)
	if begins {
		go f.serve()
	}
	return handled
}

// fit gives an endpoint small buffers when there are many flows.
func (d *Door) fit(ep tcpip.Endpoint) {
	d.mu.Lock()
	many := len(d.flows) > roomyFlows
	d.mu.Unlock()
	if many {
		ep.SocketOptions().SetReceiveBufferSize(bufferTight, true)
		ep.SocketOptions().SetSendBufferSize(bufferTight, true)
	}
}

func addrPort(a tcpip.Address, port uint16) netip.AddrPort {
	ip, _ := netip.AddrFromSlice(a.AsSlice())
	return netip.AddrPortFrom(ip, port)
}
