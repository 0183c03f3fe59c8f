package door

import (
	"errors"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
	"gvisor.dev/gvisor/pkg/waiter"

	"airlock.dev/airlock"
)

// life is what a door knows of a flow of either protocol.
type life struct {
	d        *Door
	id       stack.TransportEndpointID
	from, to netip.AddrPort

	seen  atomic.Int64 // when something last happened, as time since the door was opened
	limit atomic.Int64 // nanoseconds after seen when the flow is ended; 0 for never
}

func (l *life) begin(d *Door, id stack.TransportEndpointID) {
	l.d, l.id = d, id
	l.from, l.to = addrPort(id.RemoteAddress, id.RemotePort), addrPort(id.LocalAddress, id.LocalPort)
}

// expect gives the flow a new limit, from now on.
func (l *life) expect(limit time.Duration) {
	l.touch()
	l.limit.Store(int64(limit))
}

func (l *life) touch() { l.seen.Store(int64(time.Since(l.d.opened))) }

func (l *life) expired() bool {
	limit := l.limit.Load()
	return limit != 0 && int64(time.Since(l.d.opened))-l.seen.Load() > limit
}

// From returns the guest's address and port.
func (l *life) From() netip.AddrPort { return l.from }

// To returns where the guest wants to go. It may be any address of one host,
// also an IPv6 one with an IPv4 one inside.
func (l *life) To() netip.AddrPort { return l.to }

func (l *life) gone() *airlock.Error {
	return airlock.Errorf(airlock.Gone, "the sandbox or its door gave up the flow to %s", l.to)
}

// Flow is one TCP connection that the guest wants to open. The guest waits for
// Accept or Refuse; when the handler returns without either, it is refused.
type Flow struct {
	life

	mu   sync.Mutex
	req  *tcp.ForwarderRequest // until it is decided
	ep   tcpip.Endpoint        // once it is open
	wq   *waiter.Queue         // of ep
	dead bool                  // it was ended by the door
}

// Accept completes the handshake with the guest. It fails with Gone when the
// guest gives up or does not answer within Config.Handshake, when the door
// closes, and when the flow was accepted or refused before.
func (f *Flow) Accept() (*Conn, error) {
	f.mu.Lock()
	req, dead := f.req, f.dead
	f.req = nil
	if req != nil {
		f.expect(f.d.cfg.Handshake)
	}
	f.mu.Unlock()
	if req == nil {
		return nil, airlock.Errorf(airlock.Gone, "the flow to %s was decided before", f.to)
	}
	if dead || f.d.over() {
		f.complete(req, true)
		return nil, f.gone()
	}
	wq := new(waiter.Queue)
	ep, terr := req.CreateEndpoint(wq)
	f.complete(req, false)
	if terr != nil {
		return nil, f.gone().Because(errors.New(terr.String()))
	}
	f.d.fit(ep)
	f.mu.Lock()
	f.ep, f.wq, dead = ep, wq, f.dead
	f.expect(f.d.cfg.TCPIdle)
	f.mu.Unlock()
	if dead || f.d.over() {
		ep.Abort()
		return nil, f.gone()
	}
	return &Conn{netstackConn: gonet.NewTCPConn(wq, ep), f: f, ep: ep}, nil
}

// Refuse answers the guest with a reset: it sees "connection refused" at once.
// After Accept or Refuse it does nothing.
func (f *Flow) Refuse() {
	f.mu.Lock()
	req := f.req
	f.req = nil
	f.mu.Unlock()
	if req != nil {
		f.complete(req, true)
	}
}

// complete ends the request. The stack's own note of it goes first: as long as
// the door's is there, the guest's repeated SYNs are passed over.
func (f *Flow) complete(req *tcp.ForwarderRequest, reset bool) {
	req.Complete(reset)
	f.d.decided(f.id)
}

// kill ends the flow with a reset, whatever state it is in. It may miss a
// handshake that begins in this moment: who kills looks again.
func (f *Flow) kill() {
	f.mu.Lock()
	f.dead = true
	ep, undecided := f.ep, f.req != nil
	f.mu.Unlock()
	switch {
	case undecided: // the handler learns it from its context, or from Accept
	case ep != nil:
		ep.Abort()
	default:
		proto := header.IPv4ProtocolNumber
		if f.id.LocalAddress.Len() == header.IPv6AddressSize {
			proto = header.IPv6ProtocolNumber
		}
		if half := f.d.stack.FindTransportEndpoint(proto, tcp.ProtocolNumber, f.id, nic); half != nil {
			half.Abort()
		}
	}
}

// finish leaves nothing of the flow behind: what the handler left open is
// closed, and what is on its way to the guest has Config.Linger to get there.
func (f *Flow) finish() {
	f.Refuse()
	f.mu.Lock()
	ep, wq := f.ep, f.wq
	f.dead = true // for an Accept that comes too late
	f.mu.Unlock()
	if ep == nil {
		return
	}
	entry, news := waiter.NewChannelEntry(waiter.EventHUp)
	wq.EventRegister(&entry)
	defer wq.EventUnregister(&entry)
	f.expect(f.d.cfg.Linger)
	ep.Close()
	for !ended(ep) {
		<-news // at the latest when the flow is killed
	}
}

// ended says whether nothing more can come of a TCP endpoint.
func ended(ep tcpip.Endpoint) bool {
	switch tcp.EndpointState(ep.State()) {
	case tcp.StateClose, tcp.StateError, tcp.StateTimeWait:
		return true
	}
	return false
}

type netstackConn = gonet.TCPConn

// Conn is an open TCP flow: a net.Conn that can also be half-closed (CloseWrite,
// CloseRead). Close is graceful. A flow that the guest reset fails with
// ECONNRESET, one that the door ended with net.ErrClosed.
type Conn struct {
	*netstackConn
	f  *Flow
	ep tcpip.Endpoint
}

// Read implements net.Conn.
func (c *Conn) Read(b []byte) (int, error) {
	n, err := c.netstackConn.Read(b)
	c.f.touch()
	return n, reason(err)
}

// Write implements net.Conn. It waits while the guest does not read.
func (c *Conn) Write(b []byte) (int, error) {
	n, err := c.netstackConn.Write(b)
	c.f.touch()
	return n, reason(err)
}

// Abort ends the flow with a reset: the guest knows that what it got is not
// the whole.
func (c *Conn) Abort() { c.ep.Abort() }

// Await returns true when a Read would not wait, also for an end or an error,
// and false when over is closed or the time has passed. It is for who keeps
// many: it needs no buffer, and a fourth of the stack of a Read.
func (c *Conn) Await(over <-chan struct{}, most time.Duration) bool {
	const news = waiter.ReadableEvents | waiter.EventHUp | waiter.EventErr
	entry, told := waiter.NewChannelEntry(news)
	c.f.wq.EventRegister(&entry)
	defer c.f.wq.EventUnregister(&entry)
	if c.ep.Readiness(news) != 0 {
		return true
	}
	timer := time.NewTimer(most)
	defer timer.Stop()
	select {
	case <-told:
		return true
	case <-over:
		return false
	case <-timer.C:
		return false
	}
}

// reason gives the stack's errors, which are only text, the values that callers
// compare with.
func reason(err error) error {
	var op *net.OpError
	if !errors.As(err, &op) {
		return err
	}
	switch op.Err.Error() {
	case (&tcpip.ErrConnectionReset{}).String():
		op.Err = syscall.ECONNRESET
	case (&tcpip.ErrAborted{}).String(), (&tcpip.ErrConnectionAborted{}).String():
		op.Err = net.ErrClosed
	}
	return err
}
