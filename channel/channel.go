// Package channel is the one connection between the host and the guest of a
// sandbox: frames, streams with credit, and the messages both sides speak.
//
// A connection carries packets (one Read is one packet), so that a host that
// dies in the middle of anything leaves no half-read frame behind. Each new
// host opens it with an epoch: the guest drops every stream of the epoch
// before, answers, and only then are frames read again.
//
// The host treats the guest as hostile: streams are opened by the host only,
// a peer that sends beyond its credit, a frame out of form or a message over
// MaxMessage ends the session. The package knows nothing of sandboxes'
// owners, of HTTP or of how the packets travel. Start reading at Mux; the
// calls themselves are in wire.go (messages) and client.go (the host's side).
package channel

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"
	"time"

	"airlock.dev/airlock"
)

// Format of a packet: kind u8, flags u8, tag u8, zero u8, stream u32 (big
// endian), payload. All sizes in bytes.
const (
	headerSize = 8
	// MaxPayload is the largest payload of one packet. Under gVisor a packet
	// costs much more than its bytes.
	MaxPayload = 128 << 10
	// MaxPacket is the largest packet.
	MaxPacket = headerSize + MaxPayload
	// MaxMessage is the largest message, made of several packets.
	MaxMessage = 192 << 10
	// window is what one side may send on one stream before the other has
	// read it. Every packet costs its payload and frameCost. Half of it, as
	// credit is given back in halves, is larger than a whole message, so that
	// a message can always be completed.
	window    = 512 << 10
	frameCost = 64
	// maxStreams bounds the streams open at one time, and with window what
	// a hostile guest can make the host keep: 128 MiB.
	maxStreams = 256
	// writeTimeout is how long a peer may refuse to take one packet before
	// the session counts as dead.
	writeTimeout = 60 * time.Second
)

type kind uint8

const (
	kindEpoch    kind = 1 // host → guest: payload is the epoch, u64
	kindEpochAck kind = 2 // guest → host: the same epoch
	kindOpen     kind = 3 // host → guest: payload is the method's name
	kindData     kind = 4
	kindCredit   kind = 5 // payload is u32: how much more may be sent
	kindEnd      kind = 6 // the sender sends no more on this stream
	kindReset    kind = 7 // payload is a wireError: the stream is over for both
)

const flagMore = 1 // the message goes on in the next packet of the stream

// ErrClosed is returned by calls on a session whose peer is gone.
var ErrClosed = &airlock.Error{Code: airlock.Gone, Message: "the sandbox is gone"}

type wireError struct {
	Code    airlock.Code `json:"code"`
	Message string       `json:"message"`
}

// Handler serves one stream on the guest's side. req is the request. A nil
// return ends the stream, an error resets it with the error's code and public text.
type Handler func(ctx context.Context, s *Stream, method string, req []byte) error

// Mux is one session over a packet connection: the host opens streams, the
// guest serves them. Its methods may be called concurrently.
type Mux struct {
	conn  io.ReadWriteCloser
	serve Handler // nil on the host's side

	writeMu sync.Mutex // the order of packets

	mu      sync.Mutex
	streams map[uint32]*Stream
	last    uint32
	err     error // set once the session is over

	in *buffer // what is read into, by the one goroutine that reads

	done     chan struct{} // closed when the session is over
	handlers sync.WaitGroup
}

type deadliner interface{ SetWriteDeadline(time.Time) error }
type readDeadliner interface{ SetReadDeadline(time.Time) error }

// Dial starts a session as the host. It sends epoch, discards whatever the
// guest still had to say to the host before, and returns when the guest has
// answered or ctx ends. The caller owns conn until Dial returns without error.
func Dial(ctx context.Context, conn io.ReadWriteCloser, epoch uint64) (*Mux, error) {
	m := &Mux{conn: conn, streams: map[uint32]*Stream{}, done: make(chan struct{}), in: buffers.Get().(*buffer)}
	var payload [8]byte
	binary.BigEndian.PutUint64(payload[:], epoch)
	stop := func() bool { return true }
	if d, ok := conn.(readDeadliner); ok {
		d.SetReadDeadline(time.Time{})
		stop = context.AfterFunc(ctx, func() { d.SetReadDeadline(time.Unix(1, 0)) })
	}
	if err := m.write(nil, kindEpoch, 0, 0, 0, payload[:]); err != nil {
		stop()
		return nil, fmt.Errorf("send epoch: %w", err)
	}
	for {
		f, err := readFrame(conn, m.in[:])
		if err != nil {
			stop()
			if ctx.Err() != nil {
				return nil, fmt.Errorf("wait for the guest's answer: %w", ctx.Err())
			}
			return nil, fmt.Errorf("wait for the guest's answer: %w", err)
		}
		if f.kind == kindEpochAck && len(f.payload) == 8 && binary.BigEndian.Uint64(f.payload) == epoch {
			break
		}
	}
	if !stop() { // ctx ended in the very moment of the answer
		return nil, ctx.Err()
	}
	go m.read()
	return m, nil
}

// Serve runs a session as the guest until the connection ends, and returns
// why. Every stream is served by handle in a goroutine of its own; a new
// epoch cancels them all.
func Serve(conn io.ReadWriteCloser, handle Handler) error {
	m := &Mux{conn: conn, serve: handle, streams: map[uint32]*Stream{}, done: make(chan struct{}), in: buffers.Get().(*buffer)}
	m.read()
	m.handlers.Wait()
	return m.err
}

// Close ends the session and the connection.
func (m *Mux) Close() error {
	m.fail(ErrClosed)
	return m.conn.Close()
}

// Done is closed when the session is over; the guest is gone or hung.
func (m *Mux) Done() <-chan struct{} { return m.done }

type frame struct {
	kind    kind
	flags   uint8
	tag     byte
	stream  uint32
	payload []byte
}

var errFrame = errors.New("frame out of form")

func readFrame(conn io.Reader, buf []byte) (frame, error) {
	n, err := conn.Read(buf)
	if err != nil {
		return frame{}, err
	}
	return parseFrame(buf[:n])
}

func parseFrame(b []byte) (frame, error) {
	if len(b) < headerSize || len(b) > MaxPacket || b[3] != 0 || b[1]&^flagMore != 0 {
		return frame{}, errFrame
	}
	f := frame{kind: kind(b[0]), flags: b[1], tag: b[2], stream: binary.BigEndian.Uint32(b[4:]), payload: b[headerSize:]}
	if f.kind < kindEpoch || f.kind > kindReset || (f.kind != kindData && f.flags != 0) {
		return frame{}, errFrame
	}
	return f, nil
}

// buffer has room for a whole packet, and a byte more so that one that is too
// long shows.
type buffer [MaxPacket + 1]byte

// buffers are used again: to allocate one for each would keep the garbage
// collector busier than all else while files are transferred.
var buffers = sync.Pool{New: func() any { return new(buffer) }}

// write sends one packet. s, if given, must still be live: after a reset or a
// newer epoch nothing of an old stream is written.
func (m *Mux) write(s *Stream, k kind, flags uint8, tag byte, stream uint32, payload []byte) error {
	p := buffers.Get().(*buffer)
	defer buffers.Put(p)
	copy(p[headerSize:], payload)
	return m.send(s, p, k, flags, tag, stream, len(payload))
}

// send is write with n bytes of payload that are in p already.
func (m *Mux) send(s *Stream, buf *buffer, k kind, flags uint8, tag byte, stream uint32, n int) error {
	p := buf[:headerSize+n]
	p[0], p[1], p[2], p[3] = byte(k), flags, tag, 0
	binary.BigEndian.PutUint32(p[4:], stream)
	m.writeMu.Lock()
	defer m.writeMu.Unlock()
	if s != nil {
		if err := s.dead(); err != nil {
			return err
		}
	}
	if d, ok := m.conn.(deadliner); ok {
		d.SetWriteDeadline(time.Now().Add(writeTimeout))
	}
	if _, err := m.conn.Write(p); err != nil {
		m.fail(fmt.Errorf("write to peer: %w", err))
		return ErrClosed
	}
	return nil
}

func (m *Mux) fail(err error) {
	m.mu.Lock()
	if m.err != nil {
		m.mu.Unlock()
		return
	}
	m.err = err
	streams := m.streams
	m.streams = map[uint32]*Stream{}
	m.mu.Unlock()
	close(m.done) // before the streams end: who sees one end can tell that all did
	for _, s := range streams {
		s.finish(ErrClosed)
	}
}

func (m *Mux) read() {
	for {
		f, err := readFrame(m.conn, m.in[:])
		if err == nil {
			err = m.take(f)
		}
		if err != nil {
			m.fail(fmt.Errorf("read from peer: %w", err))
			if errors.Is(err, errFrame) {
				m.conn.Close() // a peer that breaks the protocol gets no second chance
			}
			return
		}
	}
}

func (m *Mux) take(f frame) error {
	guest := m.serve != nil
	switch f.kind {
	case kindEpoch:
		if !guest || len(f.payload) != 8 {
			return errFrame
		}
		m.mu.Lock()
		old := m.streams
		m.streams = map[uint32]*Stream{}
		m.last = 0
		m.mu.Unlock()
		m.writeMu.Lock() // whoever is writing finishes its packet; then the old streams are dead
		for _, s := range old {
			s.finish(airlock.Errorf(airlock.Canceled, "the host was restarted"))
		}
		m.writeMu.Unlock()
		return m.write(nil, kindEpochAck, 0, 0, 0, f.payload)
	case kindEpochAck:
		return errFrame
	case kindOpen:
		if !guest || len(f.payload) == 0 || len(f.payload) > 64 {
			return errFrame
		}
		m.mu.Lock()
		if f.stream <= m.last || len(m.streams) >= maxStreams {
			m.mu.Unlock()
			return errFrame
		}
		m.last = f.stream
		s := newStream(m, f.stream)
		m.streams[f.stream] = s
		m.mu.Unlock()
		method := string(f.payload)
		m.handlers.Go(func() { s.handle(method) })
		return nil
	}
	m.mu.Lock()
	s := m.streams[f.stream]
	known := f.stream <= m.last
	m.mu.Unlock()
	if s == nil {
		if known {
			return nil // the stream ended here while the packet was under way
		}
		return errFrame
	}
	switch f.kind {
	case kindData:
		return s.received(f)
	case kindCredit:
		if len(f.payload) != 4 {
			return errFrame
		}
		return s.credited(int(binary.BigEndian.Uint32(f.payload)))
	case kindEnd:
		s.mu.Lock()
		s.peerEnded = true
		s.wake()
		s.mu.Unlock()
	case kindReset:
		m.forget(s)
		s.finish(parseError(f.payload))
	}
	return nil
}

func parseError(payload []byte) error {
	var e wireError
	if json.Unmarshal(payload, &e) != nil || e.Code == "" || len(e.Code) > 40 {
		return airlock.Errorf(airlock.Internal, "the guest failed without a reason")
	}
	if len(e.Message) > 4096 {
		e.Message = e.Message[:4096]
	}
	return &airlock.Error{Code: e.Code, Message: strings.ToValidUTF8(e.Message, "\uFFFD")}
}

func (m *Mux) forget(s *Stream) {
	m.mu.Lock()
	if m.streams[s.id] == s {
		delete(m.streams, s.id)
	}
	m.mu.Unlock()
}

// Open starts a stream for one call; req is encoded as JSON. The caller must
// Close it.
func (m *Mux) Open(ctx context.Context, method string, req any) (*Stream, error) {
	body, err := json.Marshal(req)
	if err != nil {
		return nil, fmt.Errorf("encode %s: %w", method, err)
	}
	// The order of opens on the wire is the order of ids, so both happen
	// under the write lock.
	m.writeMu.Lock()
	m.mu.Lock()
	if m.err != nil {
		m.mu.Unlock()
		m.writeMu.Unlock()
		return nil, ErrClosed
	}
	if len(m.streams) >= maxStreams {
		m.mu.Unlock()
		m.writeMu.Unlock()
		return nil, &airlock.Error{Code: airlock.Exhausted, Message: "too many calls are open in this sandbox", Hint: "wait for some to end", RetryAfter: 1}
	}
	m.last++
	s := newStream(m, m.last)
	m.streams[s.id] = s
	m.mu.Unlock()
	p := append([]byte{byte(kindOpen), 0, 0, 0}, 0, 0, 0, 0)
	binary.BigEndian.PutUint32(p[4:], s.id)
	p = append(p, method...)
	if d, ok := m.conn.(deadliner); ok {
		d.SetWriteDeadline(time.Now().Add(writeTimeout))
	}
	_, err = m.conn.Write(p)
	m.writeMu.Unlock()
	if err != nil {
		m.fail(fmt.Errorf("write to peer: %w", err))
		return nil, ErrClosed
	}
	if err := s.Send(ctx, 0, body); err != nil {
		s.Close()
		return nil, err
	}
	return s, nil
}

type message struct {
	tag  byte
	body []byte
	cost int
	in   *buffer // what body is a part of; nil if its memory is its own
}

// free lets the memory of the message be used again.
func (msg *message) free() {
	if msg.in != nil {
		buffers.Put(msg.in)
	}
	*msg = message{}
}

// Stream is one call in progress: messages both ways, each with a tag, each
// way with its own end. One goroutine may send while another receives.
type Stream struct {
	m   *Mux
	id  uint32
	ctx context.Context
	end context.CancelCauseFunc

	mu          sync.Mutex
	changed     chan struct{} // closed and renewed at every change below
	queue       []message
	partial     []byte
	partialCost int
	owed        int // credit to give back
	inflight    int // received and not yet read
	credit      int // what may be sent
	peerEnded   bool
	sentEnd     bool
	err         error
}

// ID tells the stream from all others of the session; it is the same on both sides.
func (s *Stream) ID() uint32 { return s.id }

func newStream(m *Mux, id uint32) *Stream {
	ctx, end := context.WithCancelCause(context.Background())
	return &Stream{m: m, id: id, ctx: ctx, end: end, changed: make(chan struct{}), credit: window}
}

// wake is called with mu held.
func (s *Stream) wake() {
	close(s.changed)
	s.changed = make(chan struct{})
}

func (s *Stream) dead() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.err
}

// finish ends the stream on this side; queued messages stay readable on a
// clean end only.
func (s *Stream) finish(err error) {
	s.mu.Lock()
	if s.err == nil {
		s.err = err
		s.wake()
	}
	s.mu.Unlock()
	s.end(err)
}

func (s *Stream) handle(method string) {
	_, req, err := s.Recv(s.ctx)
	if err == nil {
		err = s.m.serve(s.ctx, s, method, req)
	}
	if err != nil {
		s.Reset(err)
	} else {
		s.CloseSend()
	}
	s.m.forget(s)
	s.finish(airlock.Errorf(airlock.Canceled, "the call has ended"))
}

func (s *Stream) received(f frame) error {
	cost := len(f.payload) + frameCost
	s.mu.Lock()
	if s.peerEnded {
		s.mu.Unlock()
		return errFrame
	}
	s.inflight += cost
	if s.inflight > window {
		s.mu.Unlock()
		return fmt.Errorf("%w: more than the stream's credit", errFrame)
	}
	if f.flags&flagMore != 0 || s.partial != nil {
		if len(s.partial)+len(f.payload) > MaxMessage {
			s.mu.Unlock()
			return fmt.Errorf("%w: message too long", errFrame)
		}
		s.partial = append(s.partial, f.payload...)
		s.partialCost += cost
		if f.flags&flagMore == 0 {
			s.queue = append(s.queue, message{tag: f.tag, body: s.partial, cost: s.partialCost})
			s.partial, s.partialCost = nil, 0
			s.wake()
		}
		s.mu.Unlock()
		return nil
	}
	msg := message{tag: f.tag, cost: cost}
	if len(f.payload) == MaxPayload { // a smaller one would hold memory that its cost does not cover
		msg.body, msg.in = f.payload, s.m.in
		s.m.in = buffers.Get().(*buffer)
	} else {
		msg.body = append([]byte(nil), f.payload...)
	}
	s.queue = append(s.queue, msg)
	s.wake()
	s.mu.Unlock()
	return nil
}

// giveBack returns credit to the peer, in portions. Only readers of messages
// call it, never the goroutine that reads packets: that one must not wait for
// the peer.
func (s *Stream) giveBack(cost int) {
	s.mu.Lock()
	s.inflight -= cost
	s.owed += cost
	give := 0
	if s.owed >= window/2 {
		give, s.owed = s.owed, 0
	}
	s.mu.Unlock()
	if give == 0 {
		return
	}
	var p [4]byte
	binary.BigEndian.PutUint32(p[:], uint32(give))
	s.m.write(s, kindCredit, 0, 0, s.id, p[:]) // a dead session shows at the next Recv
}

func (s *Stream) credited(n int) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if n <= 0 || s.credit+n > window {
		return fmt.Errorf("%w: credit beyond the window", errFrame)
	}
	s.credit += n
	s.wake()
	return nil
}

// Send sends one message, in several packets if it is long, and waits for
// credit. It returns early when ctx or the stream ends.
func (s *Stream) Send(ctx context.Context, tag byte, body []byte) error {
	if len(body) > MaxMessage {
		return &airlock.Error{Code: airlock.TooLarge, Message: fmt.Sprintf("the arguments and environment, or the paths, have %d bytes together and the most is %d", len(body), MaxMessage), Hint: "pass large input in a file or on standard input"}
	}
	for {
		part := body[:min(len(body), MaxPayload)]
		body = body[len(part):]
		if err := s.spend(ctx, len(part)+frameCost); err != nil {
			return err
		}
		var flags uint8
		if len(body) > 0 {
			flags = flagMore
		}
		if err := s.m.write(s, kindData, flags, tag, s.id, part); err != nil {
			return err
		}
		if len(body) == 0 {
			return nil
		}
	}
}

// SendFrom sends one message of what read has put into its buffer, which has
// MaxPayload bytes: Send without a copy. n is what read returned; of 0 bytes no
// message is made.
func (s *Stream) SendFrom(ctx context.Context, tag byte, read func([]byte) int) (n int, err error) {
	p := buffers.Get().(*buffer)
	defer buffers.Put(p)
	n = read(p[headerSize:MaxPacket])
	if n == 0 {
		return 0, nil
	}
	if err := s.spend(ctx, n+frameCost); err != nil {
		return n, err
	}
	return n, s.m.send(s, p, kindData, 0, tag, s.id, n)
}

func (s *Stream) spend(ctx context.Context, cost int) error {
	for {
		s.mu.Lock()
		if s.err != nil {
			s.mu.Unlock()
			return s.err
		}
		if s.sentEnd {
			s.mu.Unlock()
			return airlock.Errorf(airlock.Internal, "send after the end")
		}
		if s.credit >= cost {
			s.credit -= cost
			s.mu.Unlock()
			return nil
		}
		changed := s.changed
		s.mu.Unlock()
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// Recv returns the next message. It returns io.EOF after the peer's end, and
// the peer's error after a reset. Messages that came before the end are
// returned first; so are those before a reset.
func (s *Stream) Recv(ctx context.Context) (tag byte, body []byte, err error) {
	msg, err := s.recv(ctx)
	return msg.tag, msg.body, err
}

// RecvInto is Recv that hands the message to use, for the time of the call
// only: its memory is used again. An error of use is returned.
func (s *Stream) RecvInto(ctx context.Context, use func(tag byte, body []byte) error) error {
	msg, err := s.recv(ctx)
	if err != nil {
		return err
	}
	defer msg.free()
	return use(msg.tag, msg.body)
}

func (s *Stream) recv(ctx context.Context) (message, error) {
	for {
		s.mu.Lock()
		if len(s.queue) > 0 {
			msg := s.queue[0]
			s.queue[0] = message{}
			s.queue = s.queue[1:]
			s.mu.Unlock()
			s.giveBack(msg.cost)
			return msg, nil
		}
		if s.peerEnded {
			s.mu.Unlock()
			return message{}, io.EOF
		}
		if s.err != nil {
			s.mu.Unlock()
			return message{}, s.err
		}
		changed := s.changed
		s.mu.Unlock()
		select {
		case <-changed:
		case <-ctx.Done():
			return message{}, ctx.Err()
		}
	}
}

// CloseSend tells the peer that no more messages come. Receiving goes on.
func (s *Stream) CloseSend() error {
	s.mu.Lock()
	if s.sentEnd || s.err != nil {
		s.mu.Unlock()
		return nil
	}
	s.sentEnd = true
	s.mu.Unlock()
	return s.m.write(s, kindEnd, 0, 0, s.id, nil)
}

// Reset ends the stream both ways; the peer sees err's code and public text.
func (s *Stream) Reset(err error) {
	we := wireError{Code: airlock.CodeOf(err), Message: err.Error()}
	var coded *airlock.Error
	if errors.As(err, &coded) {
		we.Message = coded.Public()
	}
	if len(we.Message) > 4096 {
		we.Message = we.Message[:4096]
	}
	payload, _ := json.Marshal(we) // two strings: cannot fail
	s.m.write(s, kindReset, 0, 0, s.id, payload)
	s.m.forget(s)
	s.finish(err)
}

// Close gives the stream up. It is a no-op after both sides ended.
func (s *Stream) Close() {
	s.mu.Lock()
	over := s.err != nil || (s.sentEnd && s.peerEnded)
	s.mu.Unlock()
	if !over {
		s.Reset(airlock.Errorf(airlock.Canceled, "the caller left"))
		return
	}
	s.m.forget(s)
	s.finish(airlock.Errorf(airlock.Canceled, "the call has ended"))
}
