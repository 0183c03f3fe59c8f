package control

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"
	"time"

	"airlock.dev/airlock"
	"airlock.dev/airlock/channel"
)

const (
	// watchesMost bounds the watches of one sandbox, and watchUsersMost the
	// streams that carry them: one for each user.
	watchesMost    = 2048
	watchUsersMost = 4
	// watchQueue is how many bytes of events wait for the reader of a watch,
	// watchQueues for those of a sandbox together.
	watchQueue  = 1 << 20
	watchQueues = 8 << 20
	// watchAbandoned is when a polled watch that nobody asks may make room
	// for a new one.
	watchAbandoned = time.Hour
	watchNameMost  = 4096
	// watchAnswer is how long a guest may take to take a command.
	watchAnswer = 30 * time.Second
)

// watches are those of one sandbox. Whoever reads a watch slowly, or not at
// all, loses that watch and holds nobody up.
type watches struct {
	mux *channel.Mux

	mu     sync.Mutex
	users  map[string]*watchStream
	polled map[string]*Watch
	all    map[*Watch]bool // that are not closed, of streams that ended too
	queued int             // bytes, of all of them

	closed  bool
	readers sync.WaitGroup // they end with mux
}

// wait returns when nothing of the watches is left. The session is over.
func (ws *watches) wait() {
	ws.mu.Lock()
	ws.closed = true
	ws.mu.Unlock()
	ws.readers.Wait()
}

func newWatches(mux *channel.Mux) *watches {
	return &watches{mux: mux, users: map[string]*watchStream{}, polled: map[string]*Watch{}, all: map[*Watch]bool{}}
}

// watchStream carries the watches of one user.
type watchStream struct {
	user    string
	s       *channel.Stream
	sending chan struct{} // holds a token while a command is sent

	// Guarded by watches.mu.
	refs int // watches, and who is adding one; without any it is closed
	last uint32
	byID map[uint32]*Watch
	err  error // why it is over
}

// Watch tells what changes in a directory.
type Watch struct {
	of     *watches
	stream *watchStream
	id     uint32
	path   string
	ready  chan struct{} // closed when the guest has answered
	news   chan struct{} // holds a token when there is something to read

	// Guarded by watches.mu.
	queue    []queuedEvent
	queued   int // bytes
	answered bool
	told     bool  // the guest itself says that it is over
	err      error // why it is over; io.EOF when the directory is gone
	asked    time.Time
}

type queuedEvent struct {
	channel.WatchEvent
	cost int
}

// Watch begins to watch a directory. The caller closes it.
func (g *Guest) Watch(ctx context.Context, user string, c channel.WatchCommand) (w *Watch, err error) {
	req := channel.PathRequest{User: user, Path: c.Path}
	err = g.file(ctx, "file:watch", &req, func() error {
		c.Path = req.Path
		if w, err = g.watches.add(ctx, user, c); err == nil {
			w.path = c.Path
		}
		return err
	})
	return w, err
}

// WatchPolled begins a watch that is asked for its events by a name.
func (g *Guest) WatchPolled(ctx context.Context, user string, c channel.WatchCommand) (id string, err error) {
	w, err := g.Watch(ctx, user, c)
	if err != nil {
		return "", err
	}
	id = rand.Text()
	g.watches.mu.Lock()
	g.watches.polled[id] = w
	g.watches.mu.Unlock()
	return id, nil
}

// Polled returns the events since the last call. A watch that is over answers
// what it had left, and then with why it is over.
func (g *Guest) Polled(ctx context.Context, id string) ([]channel.WatchEvent, error) {
	w := g.watches.find(id)
	if w == nil {
		return nil, noWatch(id)
	}
	if err := g.boundary.ask(ctx, g.act("file:watch").path("", w.path)); err != nil {
		return nil, err
	}
	events, err := w.drain()
	if len(events) > 0 || err == nil {
		return events, nil
	}
	g.watches.forget(id)
	if err == io.EOF {
		return nil, airlock.Errorf(airlock.NotFound, "the directory of watcher '%s' was removed or moved away", id)
	}
	return nil, err
}

// Unwatch ends a polled watch.
func (g *Guest) Unwatch(id string) error {
	if !g.watches.forget(id) {
		return noWatch(id)
	}
	return nil
}

func noWatch(id string) error {
	return airlock.Errorf(airlock.NotFound, "watcher '%.40s' was not found: watchers end with the server, make a new one", strings.ToValidUTF8(id, "\uFFFD"))
}

func (ws *watches) find(id string) *Watch {
	ws.mu.Lock()
	defer ws.mu.Unlock()
	return ws.polled[id]
}

func (ws *watches) forget(id string) bool {
	ws.mu.Lock()
	w := ws.polled[id]
	delete(ws.polled, id)
	ws.mu.Unlock()
	if w != nil {
		w.Close()
	}
	return w != nil
}

func (ws *watches) add(ctx context.Context, user string, c channel.WatchCommand) (*Watch, error) {
	w, err := ws.begin(ctx, user)
	if err != nil {
		return nil, err
	}
	stream := w.stream
	err = stream.send(ctx, func() channel.WatchCommand {
		ws.mu.Lock()
		defer ws.mu.Unlock()
		stream.last++
		w.id, c.ID = stream.last, stream.last
		stream.byID[w.id] = w
		if stream.err != nil { // nobody reads it any more
			w.end(stream.err)
		}
		return c
	})
	if err == nil {
		select {
		case <-w.ready:
		case <-ctx.Done():
			err = ctx.Err()
		}
	}
	ws.mu.Lock()
	if w.err != nil && w.err != io.EOF {
		err = w.err
	}
	ws.mu.Unlock()
	if err != nil {
		w.Close()
		return nil, err
	}
	return w, nil
}

// begin returns a watch that the guest does not know yet.
func (ws *watches) begin(ctx context.Context, user string) (*Watch, error) {
	ws.makeRoom()
	ws.mu.Lock()
	defer ws.mu.Unlock()
	if len(ws.all) >= watchesMost {
		return nil, &airlock.Error{Code: airlock.Exhausted, Message: fmt.Sprintf("the sandbox has %d watches of directories and that is the most", watchesMost), Hint: "stop some"}
	}
	stream := ws.users[user]
	if stream == nil {
		if len(ws.users) >= watchUsersMost {
			return nil, &airlock.Error{Code: airlock.Exhausted, Message: fmt.Sprintf("directories are watched for %d users and that is the most", watchUsersMost), Hint: "stop the watches of one"}
		}
		ws.mu.Unlock()
		s, err := ws.mux.Open(ctx, channel.MethodWatch, channel.WatchRequest{User: user})
		ws.mu.Lock()
		if err != nil {
			return nil, err
		}
		if ws.closed {
			return nil, channel.ErrClosed
		}
		if stream = ws.users[user]; stream != nil { // someone was faster
			s.Close()
		} else {
			stream = &watchStream{user: user, s: s, sending: make(chan struct{}, 1), byID: map[uint32]*Watch{}}
			ws.users[user] = stream
			ws.readers.Go(func() { ws.read(stream) })
		}
	}
	stream.refs++
	w := &Watch{of: ws, stream: stream, ready: make(chan struct{}), news: make(chan struct{}, 1), asked: time.Now()}
	ws.all[w] = true
	return w, nil
}

// makeRoom ends polled watches that nobody asks, when there are too many.
func (ws *watches) makeRoom() {
	ws.mu.Lock()
	var abandoned []string
	if len(ws.all) >= watchesMost {
		for id, w := range ws.polled {
			if time.Since(w.asked) > watchAbandoned {
				abandoned = append(abandoned, id)
			}
		}
	}
	ws.mu.Unlock()
	for _, id := range abandoned {
		ws.forget(id)
	}
}

// send sends the command that make returns; one at a time, so that ids are
// sent in their order.
func (st *watchStream) send(ctx context.Context, make func() channel.WatchCommand) error {
	ctx, cancel := context.WithTimeout(ctx, watchAnswer)
	defer cancel()
	select {
	case st.sending <- struct{}{}:
		defer func() { <-st.sending }()
	case <-ctx.Done():
		return ctx.Err()
	}
	return channel.SendJSON(ctx, st.s, channel.TagInput, make())
}

// read takes what the guest says of the watches of a user, until the stream ends.
func (ws *watches) read(st *watchStream) {
	err := ws.readNotes(st)
	ws.mu.Lock()
	defer ws.mu.Unlock()
	if ws.users[st.user] == st {
		delete(ws.users, st.user)
	}
	st.err = err
	for _, w := range st.byID {
		w.told = true
		w.end(err)
	}
	st.s.Close()
}

var errWatchForm = airlock.Errorf(airlock.Internal, "the guest told of a watch out of form")

func (ws *watches) readNotes(st *watchStream) error {
	for {
		tag, body, err := st.s.Recv(context.Background()) // ends with the session
		if errors.Is(err, io.EOF) {
			return airlock.Errorf(airlock.Unavailable, "the watches of directories have ended: watch again")
		}
		if err != nil {
			return err
		}
		var note channel.WatchNote
		if tag != channel.TagReply || json.Unmarshal(body, &note) != nil {
			return errWatchForm
		}
		if err := ws.note(st, note, len(body)); err != nil {
			return err
		}
	}
}

func (ws *watches) note(st *watchStream, note channel.WatchNote, cost int) error {
	ws.mu.Lock()
	defer ws.mu.Unlock()
	if note.ID == 0 || note.ID > st.last {
		return errWatchForm
	}
	w := st.byID[note.ID]
	if w == nil || w.err != nil {
		return nil // it was closed, or was lost, while this was under way
	}
	switch {
	case note.Ready:
		w.answer()
	case note.Error != nil:
		w.told = true
		w.end(&airlock.Error{Code: note.Error.Code, Message: strings.ToValidUTF8(note.Error.Message[:min(len(note.Error.Message), 4096)], "\uFFFD")})
	case note.End:
		w.told = true
		w.end(io.EOF)
	case note.Event != nil && w.answered:
		e := *note.Event
		switch e.Type {
		case channel.Created, channel.Written, channel.Removed, channel.Renamed, channel.ModeChanged:
		default:
			return errWatchForm
		}
		if len(e.Name) == 0 || len(e.Name) > watchNameMost {
			return errWatchForm
		}
		w.put(queuedEvent{e, cost + eventCost})
	default:
		return errWatchForm
	}
	return nil
}

// eventCost is what an event takes beside its text.
const eventCost = 128

// The following are called with watches.mu held.

func (w *Watch) answer() {
	if !w.answered {
		w.answered = true
		close(w.ready)
	}
}

func (w *Watch) wake() {
	select {
	case w.news <- struct{}{}:
	default:
	}
}

// end keeps the first reason.
func (w *Watch) end(why error) {
	if w.err == nil {
		w.err = why
	}
	w.answer()
	w.wake()
}

func (w *Watch) put(e queuedEvent) {
	if w.queued+e.cost > watchQueue {
		w.lose()
		return
	}
	w.queue = append(w.queue, e)
	w.queued += e.cost
	if w.of.queued += e.cost; w.of.queued > watchQueues {
		w.of.largest().lose()
	}
	w.wake()
}

// lose drops what waits for a reader who is too slow, also of a watch that
// had another end: events are not lost silently.
func (w *Watch) lose() {
	w.take(len(w.queue))
	w.err = nil
	w.end(channel.WatchLost("its events were not read as fast as they came"))
}

func (w *Watch) take(n int) []queuedEvent {
	taken := w.queue[:n:n]
	if w.queue = w.queue[n:]; len(w.queue) == 0 {
		w.queue = nil
	}
	for _, e := range taken {
		w.queued -= e.cost
		w.of.queued -= e.cost
	}
	return taken
}

// largest returns the watch that keeps the most.
func (ws *watches) largest() *Watch {
	var most *Watch
	for w := range ws.all {
		if most == nil || w.queued > most.queued {
			most = w
		}
	}
	return most
}

// Next returns the next event. After the last one it returns io.EOF if the
// directory is gone, or why the watch is over.
func (w *Watch) Next(ctx context.Context) (channel.WatchEvent, error) {
	for {
		w.of.mu.Lock()
		if len(w.queue) > 0 {
			e := w.take(1)[0].WatchEvent
			w.of.mu.Unlock()
			return e, nil
		}
		err := w.err
		w.of.mu.Unlock()
		if err != nil {
			return channel.WatchEvent{}, err
		}
		select {
		case <-w.news:
		case <-ctx.Done():
			return channel.WatchEvent{}, ctx.Err()
		}
	}
}

// drain returns all events that wait, and why the watch is over, if it is.
func (w *Watch) drain() ([]channel.WatchEvent, error) {
	w.of.mu.Lock()
	defer w.of.mu.Unlock()
	w.asked = time.Now()
	taken := w.take(len(w.queue))
	events := make([]channel.WatchEvent, len(taken))
	for i, e := range taken {
		events[i] = e.WatchEvent
	}
	return events, w.err
}

// Close ends the watch.
func (w *Watch) Close() {
	ws, st := w.of, w.stream
	ws.mu.Lock()
	if !ws.all[w] {
		ws.mu.Unlock()
		return
	}
	delete(ws.all, w)
	w.take(len(w.queue))
	tell := w.id != 0 && !w.told
	w.end(airlock.Errorf(airlock.Canceled, "the watch was stopped"))
	delete(st.byID, w.id)
	st.refs--
	last := st.refs == 0
	if last && ws.users[st.user] == st {
		delete(ws.users, st.user)
	}
	ws.mu.Unlock()
	if last {
		st.s.Close()
		return
	}
	if !tell {
		return
	}
	remove := func() channel.WatchCommand { return channel.WatchCommand{ID: w.id, Remove: true} }
	if err := st.send(context.Background(), remove); err != nil {
		st.s.Close() // a guest that does not listen is not watched through any more
	}
}
