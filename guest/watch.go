package guest

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"airlock.dev/airlock"
	"airlock.dev/airlock/channel"
	"golang.org/x/sys/unix"
)

const (
	// watchDirsMost bounds the directories of all watches of one user; one
	// counts for each watch that it belongs to.
	watchDirsMost = 65_536
	// watchPathMost is the longest path that the kernel takes.
	watchPathMost = 4095
)

const (
	watchMask = unix.IN_CREATE | unix.IN_MODIFY | unix.IN_ATTRIB | unix.IN_DELETE | unix.IN_DELETE_SELF |
		unix.IN_MOVED_FROM | unix.IN_MOVED_TO | unix.IN_MOVE_SELF | unix.IN_ONLYDIR | unix.IN_EXCL_UNLINK
	watchBuffer = 64 << 10
)

var errWatchDeep = channel.WatchLost("a path in the directory is longer than the kernel takes")

var errWatchLost = channel.WatchLost("more happened than the kernel could queue")

// watches are all watches of one stream, on one inotify instance (inotify(7)).
// fsnotify would serve one directory each; what it hides is what a recursive
// watch without gaps needs: the cookies of renames, and how far the kernel's
// queue has been read.
//
// A new directory is watched first and read then. What is found by reading is
// reported, and what the queue says of the same names up to that moment is
// not reported again.
type watches struct {
	ctx  context.Context
	s    *channel.Stream
	user account
	desc func() describer

	fd   int   // the inotify instance
	read int64 // bytes taken from the queue
	done int64 // bytes of them that are dealt with

	byID  map[uint32]*watch
	last  uint32
	dirs  map[int32][]place // by watch descriptor
	held  int               // places in dirs
	found map[view]*scan
	moved uint32 // cookie of the last upload that left its temporary name
	over  bool   // that upload replaces a file
}

type watch struct {
	channel.WatchCommand
	root string
	wds  map[string]int32 // by path below root; "" is root itself
}

// place is a directory as one watch sees it.
type place struct {
	w   *watch
	rel string
}

// view is a watch descriptor as one watch knows it.
type view struct {
	wd int32
	id uint32
}

// scan is what reading a directory found that the queue may tell once more.
type scan struct {
	names map[string]bool
	until int64 // what is queued from here on is news
}

// watch serves one stream of watches.
func (f *files) watch(ctx context.Context, s *channel.Stream) error {
	fd, err := unix.InotifyInit1(unix.IN_NONBLOCK | unix.IN_CLOEXEC)
	if err != nil {
		return fileError("", err)
	}
	w := &watches{
		ctx: ctx, s: s, user: f.user, desc: f.describer, fd: fd,
		byID: map[uint32]*watch{}, dirs: map[int32][]place{}, found: map[view]*scan{},
	}
	// The goroutines below end with the stream, which ends with this call, and
	// with the descriptor.
	inotify := os.NewFile(uintptr(fd), "inotify") // its Fd method would make it block
	defer inotify.Close()
	commands := make(chan channel.WatchCommand)
	ended := make(chan error, 1)
	go func() { ended <- receiveCommands(ctx, s, commands) }()
	readable := make(chan struct{})
	go waitReadable(ctx, inotify, readable)
	buf := make([]byte, watchBuffer)
	for {
		select {
		case err := <-ended:
			if err == io.EOF {
				return nil
			}
			return err
		case c := <-commands:
			err = w.command(c)
		case <-readable:
			err = w.take(buf)
		}
		if err != nil {
			return err
		}
	}
}

func receiveCommands(ctx context.Context, s *channel.Stream, commands chan<- channel.WatchCommand) error {
	for {
		tag, body, err := s.Recv(ctx)
		if err != nil {
			return err
		}
		var c channel.WatchCommand
		if tag != channel.TagInput || json.Unmarshal(body, &c) != nil {
			return airlock.Errorf(airlock.Invalid, "a command for watches is out of form")
		}
		select {
		case commands <- c:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// waitReadable sends each time there is something to read, until file is closed.
func waitReadable(ctx context.Context, file *os.File, readable chan<- struct{}) {
	raw, err := file.SyscallConn()
	if err != nil {
		return
	}
	for {
		err := raw.Read(func(fd uintptr) bool {
			p := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
			n, _ := unix.Poll(p, 0)
			return n > 0
		})
		if err != nil {
			return
		}
		select {
		case readable <- struct{}{}:
		case <-ctx.Done():
			return
		}
	}
}

func (ws *watches) send(n channel.WatchNote) error { return channel.SendReply(ws.ctx, ws.s, n) }

func (ws *watches) command(c channel.WatchCommand) error {
	if c.Remove {
		if w := ws.byID[c.ID]; w != nil {
			ws.remove(w)
		}
		return nil
	}
	if c.ID <= ws.last {
		return airlock.Errorf(airlock.Invalid, "a command for watches is out of order")
	}
	ws.last = c.ID
	path, err := ws.user.absolute(c.Path)
	if err == nil {
		w := &watch{WatchCommand: c, root: path, wds: map[string]int32{}}
		w.Path = ""
		ws.byID[c.ID] = w
		if err = ws.add(w, "", nil); err == nil {
			return ws.send(channel.WatchNote{ID: c.ID, Ready: true})
		}
		ws.remove(w)
	}
	return ws.send(channel.WatchNote{ID: c.ID, Error: watchError(err)})
}

func watchError(err error) *channel.WatchError {
	var coded *airlock.Error
	if !errors.As(err, &coded) {
		coded = airlock.Errorf(airlock.Internal, "the directory could not be watched")
	}
	return &channel.WatchError{Code: coded.Code, Message: coded.Public()}
}

// fail ends one watch.
func (ws *watches) fail(w *watch, err error) error {
	ws.remove(w)
	return ws.send(channel.WatchNote{ID: w.ID, Error: watchError(err)})
}

func (ws *watches) remove(w *watch) {
	delete(ws.byID, w.ID)
	for rel := range w.wds {
		ws.drop(w, rel)
	}
}

// drop ends the watch of one directory.
func (ws *watches) drop(w *watch, rel string) {
	wd, ok := w.wds[rel]
	if !ok {
		return
	}
	delete(w.wds, rel)
	ws.held--
	var rest []place
	for _, p := range ws.dirs[wd] {
		if p.w != w || p.rel != rel {
			rest = append(rest, p)
		}
	}
	delete(ws.found, view{wd, w.ID})
	if len(rest) > 0 {
		ws.dirs[wd] = rest
		return
	}
	delete(ws.dirs, wd)
	unix.InotifyRmWatch(ws.fd, uint32(wd)) // fails if the directory is gone
}

// prune drops a directory and all below it.
func (ws *watches) prune(w *watch, rel string) {
	if len(w.wds) <= 1 {
		return
	}
	for have := range w.wds {
		if have == rel || strings.HasPrefix(have, rel+"/") {
			ws.drop(w, have)
		}
	}
}

// add watches a directory and, in a recursive watch, those below it. report,
// if given, is called for all that is found in it.
func (ws *watches) add(w *watch, rel string, report func(rel string, e os.DirEntry) error) error {
	path := filepath.Join(w.root, rel)
	if len(path) > watchPathMost && rel != "" {
		return errWatchDeep
	}
	// Whoever may not read a directory may not watch it, and what is opened
	// here stays what it is.
	flags := unix.O_RDONLY | unix.O_DIRECTORY | nonblock
	if rel != "" {
		flags |= unix.O_NOFOLLOW
	}
	fd, err := unix.Open(path, flags, 0)
	if err == unix.ENOTDIR && rel == "" {
		return airlock.Invalidf("path", "name a directory", "path '%s' is not a directory", clip(path))
	}
	if err != nil {
		return fileError(path, err)
	}
	dir := os.NewFile(uintptr(fd), path)
	below, err := ws.open(w, rel, dir, report != nil)
	dir.Close() // before those below are opened: it may be deep
	if err != nil || !w.Recursive {
		return fileError(path, err)
	}
	for _, e := range below {
		if report == nil {
			continue
		}
		name := filepath.Join(rel, e.Name())
		if len(w.root)+1+len(name) > watchPathMost {
			return errWatchDeep
		}
		if err := report(name, e); err != nil {
			return err
		}
	}
	for _, e := range below {
		if e.IsDir() {
			if err := ws.below(w, filepath.Join(rel, e.Name()), report); err != nil {
				return err
			}
		}
	}
	return nil
}

// open watches an open directory and, in a recursive watch, reads it. told
// says that what it returns will be reported.
func (ws *watches) open(w *watch, rel string, dir *os.File, told bool) ([]os.DirEntry, error) {
	if ws.held >= watchDirsMost {
		return nil, channel.WatchLost(fmt.Sprintf("more than %d directories are watched", watchDirsMost))
	}
	n, err := unix.InotifyAddWatch(ws.fd, "/proc/self/fd/"+strconv.Itoa(int(dir.Fd())), watchMask)
	switch err {
	case unix.ENOSPC, unix.EMFILE, unix.ENFILE, unix.ENOMEM:
		return nil, channel.WatchLost("the kernel watches no more directories")
	}
	if err != nil {
		return nil, err
	}
	wd := int32(n)
	if old, ok := w.wds[rel]; !ok || old != wd {
		ws.drop(w, rel)
		w.wds[rel] = wd
		ws.dirs[wd] = append(ws.dirs[wd], place{w, rel})
		ws.held++
	}
	if !w.Recursive {
		return nil, nil
	}
	all, err := dir.ReadDir(dirMost + 1)
	if len(all) > dirMost {
		return nil, channel.WatchLost(fmt.Sprintf("a directory has more than %d entries", dirMost))
	}
	if err != nil && err != io.EOF && err != unix.ENOENT && len(all) == 0 {
		return nil, err
	}
	all = slices.DeleteFunc(all, func(e os.DirEntry) bool { return strings.HasPrefix(e.Name(), tempPrefix) })
	queued, err := unix.IoctlGetInt(ws.fd, unix.TIOCINQ)
	if err != nil {
		return nil, err
	}
	if until := ws.read + int64(queued); told && until > ws.done {
		seen := &scan{map[string]bool{}, until}
		for _, e := range all {
			seen.names[e.Name()] = true
		}
		ws.found[view{wd, w.ID}] = seen
	}
	return all, nil
}

// below adds a directory that may be gone, or closed to us: then it is not watched.
func (ws *watches) below(w *watch, rel string, report func(rel string, e os.DirEntry) error) error {
	err := ws.add(w, rel, report)
	switch airlock.CodeOf(err) {
	case airlock.NotFound, airlock.Denied, airlock.Invalid:
		return nil
	}
	return err
}

// change is one record of the kernel's queue.
type change struct {
	wd     int32
	mask   uint32
	cookie uint32
	name   string
}

// parseChange takes the first record of b (struct inotify_event).
func parseChange(b []byte) (c change, size int, ok bool) {
	if len(b) < unix.SizeofInotifyEvent {
		return change{}, 0, false
	}
	length := uint64(binary.NativeEndian.Uint32(b[12:]))
	if length > uint64(len(b)-unix.SizeofInotifyEvent) {
		return change{}, 0, false
	}
	size = unix.SizeofInotifyEvent + int(length)
	name, _, _ := bytes.Cut(b[unix.SizeofInotifyEvent:size], []byte{0})
	return change{
		wd: int32(binary.NativeEndian.Uint32(b)), mask: binary.NativeEndian.Uint32(b[4:]),
		cookie: binary.NativeEndian.Uint32(b[8:]), name: string(name),
	}, size, true
}

// take deals with what one read of the queue brings.
func (ws *watches) take(buf []byte) error {
	n, err := unix.Read(ws.fd, buf)
	if err == unix.EAGAIN || err == unix.EINTR {
		return nil
	}
	if err != nil {
		return fileError("", err)
	}
	ws.read += int64(n)
	b := batch{ws: ws}
	for rest := buf[:n]; len(rest) > 0; {
		c, size, ok := parseChange(rest)
		if !ok {
			return airlock.Errorf(airlock.Internal, "the kernel told a change out of form")
		}
		rest = rest[size:]
		if err := b.change(c); err != nil {
			return err
		}
		ws.done += int64(size)
	}
	for v, seen := range ws.found {
		if seen.until <= ws.done {
			delete(ws.found, v)
		}
	}
	return nil
}

// batch deals with the changes of one read.
type batch struct {
	ws   *watches
	desc *describer
	last struct { // what was sent last: a program that writes in small pieces is told once
		id uint32
		channel.WatchEvent
	}
}

func (b *batch) change(c change) error {
	ws := b.ws
	if c.mask&unix.IN_Q_OVERFLOW != 0 {
		return errWatchLost // of any of them
	}
	if c.mask&unix.IN_IGNORED != 0 { // the kernel has dropped it
		for _, p := range ws.dirs[c.wd] {
			delete(p.w.wds, p.rel)
			ws.held--
			delete(ws.found, view{c.wd, p.w.ID})
		}
		delete(ws.dirs, c.wd)
		return nil
	}
	if strings.HasPrefix(c.name, tempPrefix) { // an upload in the making
		if c.mask&unix.IN_MOVED_FROM != 0 {
			ws.moved, ws.over = c.cookie, strings.HasPrefix(c.name, tempPrefix+"over-")
		}
		return nil
	}
	for _, p := range slices.Clone(ws.dirs[c.wd]) {
		if ws.byID[p.w.ID] != p.w {
			continue // it ended meanwhile
		}
		if err := b.at(p, c, b.told(p.w, c)); err != nil {
			return err
		}
	}
	return nil
}

// told says whether a scan has reported already that a name is there. A name
// that goes can come back as news.
func (b *batch) told(w *watch, c change) bool {
	seen := b.ws.found[view{c.wd, w.ID}]
	if seen == nil || !seen.names[c.name] || c.mask&(unix.IN_CREATE|unix.IN_MOVED_TO|unix.IN_DELETE|unix.IN_MOVED_FROM) == 0 {
		return false
	}
	delete(seen.names, c.name)
	return b.ws.done < seen.until && c.mask&(unix.IN_CREATE|unix.IN_MOVED_TO) != 0
}

// at reports a change to one watch.
func (b *batch) at(p place, c change, told bool) error {
	w, ws := p.w, b.ws
	if c.name == "" { // the directory itself: others hear of it from its parent
		if p.rel != "" {
			return nil
		}
		switch {
		case c.mask&(unix.IN_DELETE_SELF|unix.IN_UNMOUNT) != 0:
			return b.end(w, channel.Removed)
		case c.mask&unix.IN_MOVE_SELF != 0:
			return b.end(w, channel.Renamed)
		case c.mask&unix.IN_ATTRIB != 0:
			return b.report(w, ".", channel.ModeChanged)
		}
		return nil
	}
	rel := filepath.Join(p.rel, c.name)
	if len(w.root)+1+len(rel) > watchPathMost {
		return ws.fail(w, errWatchDeep)
	}
	var err error
	switch {
	case c.mask&(unix.IN_CREATE|unix.IN_MOVED_TO) != 0:
		upload := c.mask&unix.IN_MOVED_TO != 0 && c.cookie == ws.moved && c.cookie != 0
		if !told && !(upload && ws.over) {
			err = b.report(w, rel, channel.Created)
		}
		if err == nil && upload {
			err = b.report(w, rel, channel.Written)
		}
		if err == nil && w.Recursive && c.mask&unix.IN_ISDIR != 0 {
			err = b.enter(w, rel, told)
		}
	case c.mask&unix.IN_MODIFY != 0:
		err = b.report(w, rel, channel.Written)
	case c.mask&unix.IN_DELETE != 0:
		if c.mask&unix.IN_ISDIR != 0 {
			ws.prune(w, rel)
		}
		err = b.report(w, rel, channel.Removed)
	case c.mask&unix.IN_MOVED_FROM != 0:
		if c.mask&unix.IN_ISDIR != 0 {
			ws.prune(w, rel)
		}
		err = b.report(w, rel, channel.Renamed)
	case c.mask&unix.IN_ATTRIB != 0:
		err = b.report(w, rel, channel.ModeChanged)
	}
	return err
}

// enter adds a directory that has just come. One that a scan has reported was
// added by it, unless it came anew since.
func (b *batch) enter(w *watch, rel string, told bool) error {
	if _, watched := w.wds[rel]; watched && told {
		return nil
	}
	b.ws.prune(w, rel)
	err := b.ws.below(w, rel, func(below string, e os.DirEntry) error {
		if err := b.report(w, below, channel.Created); err != nil || !e.Type().IsRegular() {
			return err
		}
		if info, err := e.Info(); err != nil || info.Size() == 0 {
			return nil
		}
		return b.report(w, below, channel.Written) // before the watch was there
	})
	if airlock.CodeOf(err) == airlock.Exhausted { // of directories, or descriptors
		return b.ws.fail(w, err)
	}
	return err
}

func (b *batch) end(w *watch, why channel.ChangeType) error {
	if err := b.report(w, ".", why); err != nil {
		return err
	}
	b.ws.remove(w)
	return b.ws.send(channel.WatchNote{ID: w.ID, End: true})
}

func (b *batch) report(w *watch, name string, what channel.ChangeType) error {
	event := channel.WatchEvent{Name: name, Type: what}
	same := b.last.id == w.ID && b.last.Name == name && b.last.Type == what
	if same && (what == channel.Written || what == channel.ModeChanged) {
		return nil
	}
	b.last.id, b.last.WatchEvent = w.ID, event
	if w.Entry && what != channel.Removed && what != channel.Renamed {
		if b.desc == nil {
			desc := b.ws.desc()
			b.desc = &desc
		}
		if entry, err := b.desc.entry(filepath.Join(w.root, name)); err == nil {
			event.Entry = &entry
		}
	}
	return b.ws.send(channel.WatchNote{ID: w.ID, Event: &event})
}
