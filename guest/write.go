package guest

import (
	"context"
	"crypto/rand"
	"errors"
	"io"
	"os"
	"path/filepath"

	"airlock.dev/airlock"
	"airlock.dev/airlock/channel"
	"golang.org/x/sys/unix"
)

// write replaces a file's contents. A regular file is replaced by renaming,
// so that it is whole at any time and an upload that breaks off leaves the
// old one; it keeps its mode and its owner. Where renaming would change more
// than the contents (the file has other hard links, or an owner whom we may
// not give a file) or the directory takes no new file, it is overwritten in
// place, and a broken upload leaves a part.
func (f *files) write(ctx context.Context, s *channel.Stream, body []byte) error {
	var req channel.WriteRequest
	if err := decode(body, &req); err != nil {
		return err
	}
	path, err := f.user.absolute(req.Path)
	if err != nil {
		return err
	}
	w, err := newWriter(path, req.Mode, req.Metadata)
	if err != nil {
		return fileError(path, err)
	}
	for {
		err := s.RecvInto(ctx, func(tag byte, data []byte) error {
			switch tag {
			case channel.TagData:
				_, err := w.file.Write(data)
				return err
			case tagPass:
				var yes []byte
				if w.temp != "" && pass(f.passing, int(w.file.Fd()), s.ID()) {
					yes = []byte{1}
				}
				return s.Send(ctx, tagPassed, yes)
			case tagFailed:
				return parseErrno(data)
			}
			return airlock.Errorf(airlock.Invalid, "the upload has a message that is not data")
		})
		if err == io.EOF {
			break
		}
		if err != nil {
			w.abort()
			return fileError(path, err)
		}
	}
	if err := w.commit(); err != nil {
		return fileError(path, err)
	}
	entry, err := f.describer().entry(path)
	if err != nil {
		return err
	}
	return channel.SendReply(ctx, s, entry)
}

// compose makes one file of several. Each is checked before the first is
// copied, so that a mistake costs nothing.
func (f *files) compose(ctx context.Context, s *channel.Stream, body []byte) error {
	var req channel.ComposeRequest
	if err := decode(body, &req); err != nil {
		return err
	}
	to, err := f.user.absolute(req.Destination)
	if err != nil {
		return err
	}
	sources := make([]string, len(req.Sources))
	for i, source := range req.Sources {
		if sources[i], err = f.user.absolute(source); err != nil {
			return err
		}
		fd, err := openSource(sources[i], to)
		if err != nil {
			return fileError(sources[i], err)
		}
		unix.Close(fd)
	}
	var st unix.Stat_t
	if unix.Stat(to, &st) == nil && st.Mode&unix.S_IFMT == unix.S_IFCHR {
		return notRegular(to) // what a device takes is not kept, and the sources go
	}
	w, err := newWriter(to, 0, nil)
	if err != nil {
		return fileError(to, err)
	}
	buf := make([]byte, composeBuffer)
	for _, source := range sources {
		if err := w.add(ctx, source, to, buf); err != nil {
			w.abort()
			return err
		}
	}
	if err := w.commit(); err != nil {
		return fileError(to, err)
	}
	for _, source := range sources {
		unix.Unlink(source) // one that cannot be removed stays: the destination is whole
	}
	entry, err := f.describer().entry(to)
	if err != nil {
		return err
	}
	return channel.SendReply(ctx, s, entry)
}

// composeBuffer is large because system calls cost much under gVisor.
const composeBuffer = 256 << 10

// openSource opens a file that is to become a part of the file at to.
func openSource(path, to string) (int, error) {
	fd, err := unix.Open(path, unix.O_RDONLY|nonblock, 0)
	if err != nil {
		return 0, err
	}
	var source, destination unix.Stat_t
	err = unix.Fstat(fd, &source)
	switch {
	case err != nil:
	case source.Mode&unix.S_IFMT == unix.S_IFCHR:
		err = notRegular(path) // it may have no end
	default:
		err = readable(path, source.Mode)
	}
	if err == nil && unix.Stat(to, &destination) == nil && source.Dev == destination.Dev && source.Ino == destination.Ino {
		err = airlock.Invalidf("destination", "name another", "source '%s' and the destination are the same file", clip(path))
	}
	if err != nil {
		unix.Close(fd)
		return 0, err
	}
	return fd, nil
}

// add appends the contents of a source.
func (w *writer) add(ctx context.Context, source, to string, buf []byte) error {
	fd, err := openSource(source, to)
	if err != nil {
		return fileError(source, err)
	}
	defer unix.Close(fd)
	for ctx.Err() == nil {
		n, err := unix.Read(fd, buf)
		switch {
		case err == unix.EINTR:
			continue
		case err == unix.EAGAIN, err == nil && n == 0:
			return nil
		case err != nil:
			return fileError(source, err)
		}
		if _, err := w.file.Write(buf[:n]); err != nil {
			return fileError(to, err)
		}
	}
	return ctx.Err()
}

// makeParents makes the directory that path is in.
func makeParents(path string) error {
	err := os.MkdirAll(filepath.Dir(path), 0o755)
	if errors.Is(err, unix.EEXIST) { // a link that leads nowhere
		err = unix.ENOTDIR
	}
	return fileError(path, err)
}

// followLinks resolves symlinks of the last element only, so that a file is
// written through a link and the link stays; the kernel resolves the rest.
func followLinks(path string) (string, error) {
	for range 41 { // as many links as the kernel follows, and the file
		target, err := os.Readlink(path)
		if err != nil { // not a link, or nothing there
			return path, nil
		}
		if !filepath.IsAbs(target) {
			target = filepath.Dir(path) + "/" + target // not cleaned: ".." is relative to where dir leads
		}
		path = target
	}
	return "", unix.ELOOP
}

// writer is a file in the making. It holds the directory, so that whatever
// happens to the path meanwhile, the temporary file is found again there.
type writer struct {
	file   *os.File
	dir    int
	temp   string // its name in dir; "" when written in place
	target string // its name in dir
	mode   uint32 // set at the end; 0 leaves it
}

// tempPrefix begins the names of files in the making. One is left over when
// the helper is killed, as its own user can: it says what it was.
const tempPrefix = ".airlock-upload-"

// tempName says whether the file replaces another, for those who watch.
func tempName(replaces bool) string {
	if replaces {
		return tempPrefix + "over-" + rand.Text()
	}
	return tempPrefix + rand.Text()
}

// newWriter makes the parents of path and begins to replace the file there.
// Nothing of the old file has changed when it fails.
func newWriter(path string, mode uint32, metadata map[string]string) (*writer, error) {
	if err := makeParents(path); err != nil {
		return nil, err
	}
	target, err := followLinks(path)
	if err != nil {
		return nil, err
	}
	dir, name := filepath.Split(target)
	if name == "" {
		return nil, unix.EISDIR
	}
	fd, err := unix.Open(dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	w := &writer{dir: fd, target: name, mode: mode & 0o7777}
	if err := w.open(path, metadata); err != nil {
		w.abort()
		return nil, err
	}
	return w, nil
}

func (w *writer) open(path string, metadata map[string]string) error {
	var st unix.Stat_t
	err := unix.Fstatat(w.dir, w.target, &st, unix.AT_SYMLINK_NOFOLLOW)
	exists := err == nil
	if err != nil && err != unix.ENOENT {
		return err
	}
	if exists {
		if err := readable(path, st.Mode); err != nil {
			return err
		}
		// Whoever may not write the file may not replace it either.
		fd, err := unix.Openat(w.dir, w.target, unix.O_WRONLY|unix.O_NOFOLLOW|nonblock, 0)
		if err != nil && err != unix.ETXTBSY {
			return err
		}
		if err == nil {
			unix.Close(fd)
		}
		if st.Mode&unix.S_IFMT == unix.S_IFCHR {
			w.mode = 0
			return w.inPlace(path, metadata)
		}
		if st.Nlink > 1 {
			return w.inPlace(path, metadata)
		}
	}
	temp := tempName(exists)
	fd, err := unix.Openat(w.dir, temp, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_CLOEXEC, 0o600)
	if exists && (err == unix.EACCES || err == unix.EPERM) {
		return w.inPlace(path, metadata)
	}
	if err != nil {
		return err
	}
	w.file, w.temp = os.NewFile(uintptr(fd), path), temp
	var now unix.Stat_t
	if exists && (unix.Fstat(fd, &now) != nil || now.Uid != st.Uid || now.Gid != st.Gid) {
		if err := unix.Fchown(fd, int(st.Uid), int(st.Gid)); err != nil {
			w.discard()
			return w.inPlace(path, metadata)
		}
	}
	switch {
	case w.mode == 0 && exists:
		w.mode = st.Mode & 0o7777
	case w.mode == 0:
		w.mode = 0o644
	}
	return setMetadata(fd, path, metadata)
}

// inPlace opens the target itself. Its contents go last, when nothing that can
// be refused is left.
func (w *writer) inPlace(path string, metadata map[string]string) error {
	fd, err := unix.Openat(w.dir, w.target, unix.O_WRONLY|unix.O_NOFOLLOW|nonblock, 0)
	if err != nil {
		return err
	}
	w.file = os.NewFile(uintptr(fd), path)
	if err := setMetadata(fd, path, metadata); err != nil {
		return err
	}
	err = unix.Ftruncate(fd, 0)
	if err == unix.EINVAL { // a device has no length
		err = nil
	}
	return err
}

// discard removes the temporary file.
func (w *writer) discard() {
	if w.file != nil {
		w.file.Close()
	}
	if w.temp != "" {
		unix.Unlinkat(w.dir, w.temp, 0)
	}
	w.file, w.temp = nil, ""
}

func (w *writer) abort() {
	w.discard()
	unix.Close(w.dir)
}

func (w *writer) commit() error {
	defer w.abort() // without effect on what has its name by then
	if w.mode != 0 {
		if err := unix.Fchmod(int(w.file.Fd()), w.mode); err != nil && w.temp != "" {
			return err
		}
	}
	err := w.file.Close()
	w.file = nil
	if err != nil || w.temp == "" {
		return err
	}
	if err := unix.Renameat(w.dir, w.temp, w.dir, w.target); err != nil {
		return err
	}
	w.temp = ""
	return nil
}
