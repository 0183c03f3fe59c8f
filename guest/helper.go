package guest

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"io"
	"os"
	"strings"
	"sync"
	"time"

	"airlock.dev/airlock"
	"airlock.dev/airlock/channel"
	"golang.org/x/sys/unix"
)

// helper is a process that makes file calls with a user's rights. It speaks
// the channel's protocol with PID 1, which is its host: so it is trusted no
// more than the sandbox is by the real host. The user it runs as can kill or
// stop it; then it is replaced.
type helper struct {
	key    string
	mux    *channel.Mux
	passed *passed

	// Guarded by guest.mu.
	pid    int
	reaped bool
	calls  int
}

const (
	helperMost    = 8
	helperStart   = 10 * time.Second
	helperPing    = 2 * time.Second // how often a helper that has calls is asked
	helperTimeout = 5 * time.Second // how long it may take to answer
	methodPing    = "ping"
)

// helperStarts lets one helper start at a time.
var helperStarts sync.Mutex

var errHelper = &airlock.Error{Code: airlock.Unavailable, Message: "the process that makes file calls for this user has ended", Hint: "try again"}

// file hands a file call to the user's helper.
func (g *guest) file(ctx context.Context, s *channel.Stream, method string, body []byte) error {
	var who channel.PathRequest
	if err := decode(body, &who); err != nil {
		return err
	}
	u, err := g.accounts.lookup(who.User)
	if err != nil {
		return err
	}
	h, err := g.helper(ctx, u)
	if err != nil {
		return err
	}
	defer g.release(h)
	hs, err := h.mux.Open(ctx, method, json.RawMessage(body))
	if err != nil {
		return helperError(err)
	}
	defer hs.Close()
	h.passed.begin(hs.ID())
	defer h.passed.end(hs.ID())
	in := &feed{upload: method == channel.MethodWrite, file: -1, passed: make(chan int), done: make(chan struct{})}
	go in.run(ctx, s, hs) // ends with the stream, at the latest when file has returned
	for {
		tag, body, err := hs.Recv(ctx)
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return helperError(err)
		}
		switch {
		case tag == tagPassed && method == channel.MethodRead:
			return h.sendRest(ctx, s, hs.ID(), who.Path, body)
		case tag == tagPassed && in.upload:
			fd := -1
			if len(body) > 0 {
				if fd, err = h.passed.take(hs.ID()); err != nil {
					return err
				}
			}
			if !in.take(ctx, fd) && fd >= 0 {
				closeWritten(fd)
			}
		default:
			if err := s.Send(ctx, tag, body); err != nil {
				return err
			}
		}
	}
}

// sendRest sends what is left of a file that a helper passed.
func (h *helper) sendRest(ctx context.Context, s *channel.Stream, call uint32, path string, left []byte) error {
	fd, err := h.passed.take(call)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if len(left) != 8 || left[0] > 127 {
		return errHelper
	}
	n := int64(binary.BigEndian.Uint64(left))
	return (&contents{fd: fd, path: path, limited: n > 0, left: n}).sendAll(ctx, s)
}

// feed hands on what the host sends in a call: to the helper, and of a large
// upload to the file itself.
type feed struct {
	upload bool
	size   int // of what the helper was sent
	asked  bool
	file   int           // -1 while there is none
	passed chan int      // the helper's answer; -1 is no
	done   chan struct{} // closed when run has returned
}

// take gives run the file, if it waits for one.
func (f *feed) take(ctx context.Context, fd int) bool {
	select {
	case f.passed <- fd:
		return true
	case <-f.done:
	case <-ctx.Done():
	}
	return false
}

func (f *feed) run(ctx context.Context, s, hs *channel.Stream) {
	defer close(f.done)
	defer f.close()
	for {
		err := s.RecvInto(ctx, func(tag byte, body []byte) error { return f.hand(ctx, hs, tag, body) })
		switch {
		case err == nil:
		case err == io.EOF:
			f.close() // before the helper puts the file in its place
			hs.CloseSend()
			return
		default:
			hs.Reset(err) // an upload that is broken off leaves the old file
			return
		}
	}
}

func (f *feed) hand(ctx context.Context, hs *channel.Stream, tag byte, body []byte) error {
	if f.file >= 0 && tag == channel.TagData {
		err := writeFull(f.file, body)
		if err != nil { // the helper cleans up and says it
			f.close()
			return hs.Send(ctx, tagFailed, packErrno(err))
		}
		return nil
	}
	if err := hs.Send(ctx, tag, body); err != nil {
		return err
	}
	if f.size += len(body); !f.upload || f.asked || f.size < passFrom {
		return nil
	}
	f.asked = true
	if err := hs.Send(ctx, tagPass, nil); err != nil {
		return err
	}
	select {
	case f.file = <-f.passed:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (f *feed) close() {
	if f.file >= 0 {
		closeWritten(f.file)
	}
	f.file = -1
}

func helperError(err error) error {
	if airlock.CodeOf(err) == airlock.Gone { // it is not the sandbox that is gone
		return errHelper
	}
	return err
}

// helper returns the helper of a user, started if need be. The caller
// releases it.
func (g *guest) helper(ctx context.Context, u account) (*helper, error) {
	key := []string{u.name, itoa(u.uid), itoa(u.gid), u.home}
	for _, gid := range u.groups {
		key = append(key, itoa(int(gid)))
	}
	k := strings.Join(key, ":")
	if h := g.acquire(k); h != nil {
		return h, nil
	}
	helperStarts.Lock()
	defer helperStarts.Unlock()
	if h := g.acquire(k); h != nil { // started while we waited
		return h, nil
	}
	if !g.makeRoom() {
		return nil, &airlock.Error{Code: airlock.Exhausted, Message: "file calls of too many users are in progress", Hint: "wait for some to end", RetryAfter: 1}
	}
	h, err := g.startHelper(ctx, k, u)
	if err != nil {
		return nil, &airlock.Error{Code: airlock.Unavailable, Message: "file calls are not possible for user '" + clip(u.name) + "' now", Hint: "try again", Err: err}
	}
	go g.watchHelper(h)
	return h, nil
}

func (g *guest) acquire(key string) *helper {
	g.mu.Lock()
	defer g.mu.Unlock()
	h := g.helpers[key]
	if h == nil || h.mux == nil || h.reaped {
		return nil
	}
	select {
	case <-h.mux.Done():
		return nil
	default:
	}
	h.calls++
	return h
}

func (g *guest) release(h *helper) {
	g.mu.Lock()
	h.calls--
	g.mu.Unlock()
}

// makeRoom keeps the number of helpers bounded.
func (g *guest) makeRoom() bool {
	g.mu.Lock()
	var idle *helper
	full := len(g.helpers) >= helperMost
	for _, h := range g.helpers {
		if h.calls == 0 {
			idle = h
		}
	}
	g.mu.Unlock()
	if full && idle != nil {
		g.retire(idle)
	}
	return !full || idle != nil
}

func (g *guest) startHelper(ctx context.Context, key string, u account) (*helper, error) {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	unix.SetNonblock(pair[0], true)
	conn := os.NewFile(uintptr(pair[0]), "helper")
	child := []uintptr{0, 0, 0, uintptr(pair[1]), 0}
	defer func() {
		for _, fd := range child {
			if fd != 0 {
				unix.Close(int(fd))
			}
		}
	}()
	passing, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		conn.Close()
		return nil, err
	}
	child[4] = uintptr(passing[1])
	h := &helper{key: key, calls: 1, passed: newPassed(passing[0])}
	fail := func() {
		conn.Close()
		h.passed.close()
	}
	for i := range 3 {
		fd, err := unix.Open("/dev/null", unix.O_RDWR|unix.O_CLOEXEC, 0)
		if err != nil {
			fail()
			return nil, err
		}
		child[i] = uintptr(fd)
	}
	a := &spawnArgs{uid: uintptr(u.uid), gid: uintptr(u.gid), groups: u.groups, fds: child}
	args := append(append([]string{}, g.opts.Helper...), u.home, g.opts.Etc)
	var errs [4]error
	a.argv, errs[0] = cstrings(args)
	a.envv, errs[1] = cstrings([]string{"PATH=" + defaultPath, "GOGC=50"})
	a.paths, errs[2] = cstrings([]string{"/proc/self/exe"})
	a.dir, errs[3] = unix.BytePtrFromString("/")
	if err := errors.Join(errs[:]...); err != nil {
		fail()
		return nil, err
	}
	a.paths = a.paths[:1]

	g.mu.Lock()
	pid, errno := spawn(a)
	if errno == 0 {
		h.pid = pid
		g.helpers[key] = h
	}
	g.mu.Unlock()
	if errno != 0 {
		fail()
		return nil, errno
	}
	ctx, cancel := context.WithTimeout(ctx, helperStart)
	defer cancel()
	mux, err := channel.Dial(ctx, conn, 1)
	if err != nil {
		conn.Close()
		g.retire(h)
		return nil, err
	}
	g.mu.Lock()
	h.mux = mux
	g.mu.Unlock()
	return h, nil
}

// watchHelper asks a helper that has calls whether it still lives, and
// removes it when it does not.
func (g *guest) watchHelper(h *helper) {
	defer g.retire(h)
	tick := time.NewTicker(helperPing)
	defer tick.Stop()
	for {
		select {
		case <-h.mux.Done():
			return
		case <-tick.C:
		}
		h.passed.receive() // what came after its call had ended
		g.mu.Lock()
		busy := h.calls > 0
		g.mu.Unlock()
		if !busy {
			continue
		}
		if !alive(h) {
			return
		}
	}
}

// alive pings a helper. The ping itself is abandoned after the timeout: a
// helper that is stopped may block it in the socket.
func alive(h *helper) bool {
	ctx, cancel := context.WithTimeout(context.Background(), helperTimeout)
	defer cancel()
	answer := make(chan error, 1)
	go func() {
		_, err := channel.Call[channel.Empty](ctx, h.mux, methodPing, channel.Empty{})
		answer <- err
	}()
	select {
	case err := <-answer:
		return err == nil || airlock.CodeOf(err) == airlock.Exhausted
	case <-time.After(helperTimeout + time.Second):
		return false
	}
}

// retire kills a helper and forgets it; its calls end with errHelper.
func (g *guest) retire(h *helper) {
	g.mu.Lock()
	if g.helpers[h.key] == h {
		delete(g.helpers, h.key)
	}
	if !h.reaped && h.pid > 1 {
		unix.Kill(h.pid, unix.SIGKILL)
	}
	h.reaped = true // from here on its pid may be anyone's
	mux := h.mux
	g.mu.Unlock()
	h.passed.close()
	if mux != nil {
		mux.Close()
	}
}
