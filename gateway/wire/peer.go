package wire

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"airlock.dev/airlock"
)

// Format of a packet: kind u8, id u64 (big endian), then for calls and notes
// the length of the method's name u8 and the name, then JSON. The results and
// the cancellation of a call have its id.
const (
	kindCall   = 'C'
	kindNote   = 'N' // is not answered
	kindResult = 'R'
	kindError  = 'E'
	kindCancel = 'X'

	headerBytes = 9
	// MaxMessage is how many bytes of JSON a message has at most. Both ends of
	// the socket need a buffer for it.
	MaxMessage = 256 << 10
	// cancelGrace is how long a call that was given up may take to be answered.
	cancelGrace = 2 * time.Second
	// callsMost is how many calls of the other side are served at a time. More
	// wait in the socket.
	callsMost = 4096
	// idleMost is how long a goroutine waits for another call to serve. Its stack
	// has grown to what a call takes by then, which a new one would have to do.
	idleMost = 5 * time.Second
)

// Handler serves a call or a note of the other side, in a goroutine of its
// own. f is the descriptor that came with it, or nil; it is the handler's. The
// context ends when the caller gives up or the connection ends.
type Handler func(ctx context.Context, method string, body []byte, f *os.File) (any, error)

// Peer is one side of a connection. Its methods may be called concurrently.
type Peer struct {
	conn   *net.UnixConn
	handle Handler
	serves chan struct{}
	jobs   chan func() // to goroutines that are idle

	ctx    context.Context
	cancel context.CancelFunc
	work   sync.WaitGroup

	mu      sync.Mutex
	next    uint64
	waiting map[uint64]chan answer
	serving map[uint64]context.CancelFunc
}

type answer struct {
	body []byte
	err  error
}

// New serves a socket, which the Peer then owns. A nil handle refuses all calls.
func New(conn *net.UnixConn, handle Handler) *Peer {
	p := &Peer{
		conn: conn, handle: handle, serves: make(chan struct{}, callsMost), jobs: make(chan func()),
		waiting: map[uint64]chan answer{}, serving: map[uint64]context.CancelFunc{},
	}
	p.ctx, p.cancel = context.WithCancel(context.Background())
	p.work.Go(p.read)
	return p
}

// Done is closed when the connection has ended.
func (p *Peer) Done() <-chan struct{} { return p.ctx.Done() }

// Close ends the connection and waits for the handlers.
func (p *Peer) Close() {
	p.cancel()
	p.conn.Close()
	p.work.Wait()
}

// Call asks the other side, with a descriptor if f is not nil, and reads its
// answer into out. An error of the other side is an *airlock.Error; if the
// connection ends it is one with the code Unavailable. When ctx ends the other
// side is told, and its answer is still waited for, a moment: what it did
// meanwhile the caller has to know.
func (p *Peer) Call(ctx context.Context, method string, in any, f *os.File, out any) error {
	reply := make(chan answer, 1)
	p.mu.Lock()
	p.next++
	id := p.next
	p.waiting[id] = reply
	p.mu.Unlock()
	defer func() {
		p.mu.Lock()
		delete(p.waiting, id)
		p.mu.Unlock()
	}()
	if err := p.send(kindCall, id, method, in, f); err != nil {
		return err
	}
	given := ctx.Done()
	var late <-chan time.Time
	for {
		select {
		case a := <-reply:
			if a.err != nil && ctx.Err() != nil {
				return ctx.Err()
			}
			if a.err != nil || out == nil {
				return a.err
			}
			if err := json.Unmarshal(a.body, out); err != nil {
				return fmt.Errorf("read the answer to %s: %w", method, err)
			}
			return nil
		case <-given:
			p.send(kindCancel, id, "", nil, nil)
			given, late = nil, time.After(cancelGrace)
		case <-late:
			return ctx.Err()
		case <-p.ctx.Done():
			return gone(method)
		}
	}
}

// Note tells the other side and waits for nothing.
func (p *Peer) Note(method string, in any) error { return p.send(kindNote, 0, method, in, nil) }

func gone(method string) error {
	return airlock.Errorf(airlock.Unavailable, "the other process ended before it answered %s: try again", method)
}

func (p *Peer) send(kind byte, id uint64, method string, in any, f *os.File) error {
	var body []byte
	if in != nil {
		// Without escapes for HTML, which make six bytes of one: whatever a sandbox
		// asks for has to fit, or it would be denied and not recorded.
		var text bytes.Buffer
		e := json.NewEncoder(&text)
		e.SetEscapeHTML(false)
		if err := e.Encode(in); err != nil {
			return fmt.Errorf("encode %s: %w", method, err)
		}
		body = bytes.TrimSuffix(text.Bytes(), []byte("\n"))
	}
	if len(body) > MaxMessage {
		return airlock.Errorf(airlock.TooLarge, "%s has %d bytes and may have %d", method, len(body), MaxMessage)
	}
	packet := make([]byte, headerBytes, headerBytes+1+len(method)+len(body))
	packet[0] = kind
	binary.BigEndian.PutUint64(packet[1:], id)
	if kind == kindCall || kind == kindNote {
		packet = append(append(packet, byte(len(method))), method...)
	}
	packet = append(packet, body...)
	var rights []byte
	if f != nil {
		raw, err := f.SyscallConn()
		if err != nil {
			return fmt.Errorf("send a descriptor with %s: %w", method, err)
		}
		var sent error
		// The descriptor stays open while it is being sent.
		err = raw.Control(func(fd uintptr) {
			rights = unix.UnixRights(int(fd))
			_, _, sent = p.conn.WriteMsgUnix(packet, rights, nil)
		})
		if err = errors.Join(err, sent); err != nil {
			return fmt.Errorf("%w: %w", gone(method), err)
		}
		return nil
	}
	if _, err := p.conn.Write(packet); err != nil {
		return fmt.Errorf("%w: %w", gone(method), err)
	}
	return nil
}

// read takes packets until the connection ends.
func (p *Peer) read() {
	defer p.conn.Close() // the other side is told at once
	defer p.cancel()
	buf := make([]byte, headerBytes+256+MaxMessage+1)
	oob := make([]byte, unix.CmsgSpace(4*4))
	for {
		n, oobn, flags, _, err := p.conn.ReadMsgUnix(buf, oob)
		f, rightsErr := descriptor(oob[:oobn])
		if err != nil || n == 0 || rightsErr != nil || flags&(unix.MSG_TRUNC|unix.MSG_CTRUNC) != 0 || !p.take(buf[:n], f) {
			if f != nil {
				f.Close()
			}
			return
		}
	}
}

// descriptor returns the one that came with a packet, if any did.
func descriptor(oob []byte) (*os.File, error) {
	if len(oob) == 0 {
		return nil, nil
	}
	msgs, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return nil, err
	}
	var all []int
	for i := range msgs {
		fds, err := unix.ParseUnixRights(&msgs[i])
		if err != nil {
			return nil, err
		}
		all = append(all, fds...)
	}
	for i, fd := range all {
		unix.CloseOnExec(fd)
		if i > 0 {
			unix.Close(fd)
		}
	}
	if len(all) != 1 {
		return nil, fmt.Errorf("a packet with %d descriptors", len(all))
	}
	return os.NewFile(uintptr(all[0]), "passed"), nil
}

// take handles one packet; false ends the connection, since the other side
// does not speak as it should.
func (p *Peer) take(b []byte, f *os.File) bool {
	if len(b) < headerBytes {
		return false
	}
	kind, id, rest := b[0], binary.BigEndian.Uint64(b[1:]), b[headerBytes:]
	switch kind {
	case kindCall, kindNote:
		if len(rest) < 1 || len(rest) < 1+int(rest[0]) || p.handle == nil {
			return false
		}
		method := string(rest[1 : 1+rest[0]])
		body := append([]byte(nil), rest[1+rest[0]:]...)
		select {
		case p.serves <- struct{}{}:
		case <-p.ctx.Done():
			return false
		}
		ctx, cancel := context.WithCancel(p.ctx)
		if kind == kindCall {
			p.mu.Lock()
			p.serving[id] = cancel
			p.mu.Unlock()
		}
		p.serve(func() {
			defer func() { cancel(); <-p.serves }()
			out, err := p.handle(ctx, method, body, f)
			if kind == kindNote {
				return
			}
			p.mu.Lock()
			delete(p.serving, id)
			p.mu.Unlock()
			if err == nil {
				err = p.send(kindResult, id, method, out, nil)
			}
			if err != nil {
				p.send(kindError, id, method, asError(err), nil)
			}
		})
		return true
	case kindCancel:
		p.mu.Lock()
		cancel := p.serving[id]
		p.mu.Unlock()
		if cancel != nil {
			cancel()
		}
	case kindResult, kindError:
		p.mu.Lock()
		reply := p.waiting[id]
		delete(p.waiting, id)
		p.mu.Unlock()
		if reply == nil {
			break // it gave up
		}
		a := answer{body: append([]byte(nil), rest...)}
		if kind == kindError {
			e := &failure{}
			if err := json.Unmarshal(rest, e); err != nil {
				return false
			}
			a.err = &airlock.Error{Code: e.Code, Field: e.Field, Message: e.Message, Hint: e.Hint}
		}
		reply <- a
	default:
		return false
	}
	return f == nil // only calls and notes bring one
}

// serve has a goroutine do a job: one that is idle, or a new one.
func (p *Peer) serve(job func()) {
	select {
	case p.jobs <- job:
		return
	default:
	}
	p.work.Go(func() {
		idle := time.NewTimer(idleMost)
		defer idle.Stop()
		for {
			job()
			idle.Reset(idleMost)
			select {
			case job = <-p.jobs:
			case <-idle.C:
				return
			case <-p.ctx.Done():
				return
			}
		}
	})
}

// failure is an error on its way.
type failure struct {
	Code    airlock.Code `json:"code"`
	Field   string       `json:"field,omitempty"`
	Message string       `json:"message"`
	Hint    string       `json:"hint,omitempty"`
}

func asError(err error) failure {
	var e *airlock.Error
	if errors.As(err, &e) {
		return failure{e.Code, e.Field, e.Message, e.Hint}
	}
	return failure{Code: airlock.CodeOf(err), Message: err.Error()}
}
