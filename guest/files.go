package guest

import (
	"context"
	"encoding/binary"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"syscall"
	"time"

	"airlock.dev/airlock"
	"airlock.dev/airlock/channel"
	"golang.org/x/sys/unix"
)

// files makes the file calls of one user, in a process with that user's
// rights. It checks no permission itself: the kernel does.
type files struct {
	user     account // only home is used
	accounts accounts
	passing  int // the socket for descriptors, see pass.go
}

// ServeFiles is the main loop of a file helper: it serves file calls on conn
// with the rights of this process until conn ends, and passes the descriptors
// of large files on the socket passing. Relative paths begin at home; names of
// owners come from the files in etc.
func ServeFiles(conn io.ReadWriteCloser, passing int, home, etc string) error {
	// The user whose rights these are may not trace the process. It could
	// only gain what it has, but it need not see other callers' data.
	unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0)
	unix.Umask(0o022)
	unix.CloseOnExec(passing)
	f := &files{account{home: home}, accounts(etc), passing}
	return channel.Serve(conn, f.handle)
}

func (f *files) handle(ctx context.Context, s *channel.Stream, method string, req []byte) error {
	switch method {
	case methodPing:
		return channel.SendReply(ctx, s, channel.Empty{})
	case channel.MethodStat:
		return call(ctx, s, req, f.stat)
	case channel.MethodMkdir:
		return call(ctx, s, req, f.mkdir)
	case channel.MethodRemove:
		return call(ctx, s, req, f.remove)
	case channel.MethodMove:
		return call(ctx, s, req, f.move)
	case channel.MethodListDir:
		return f.list(ctx, s, req)
	case channel.MethodRead:
		return f.read(ctx, s, req)
	case channel.MethodWrite:
		return f.write(ctx, s, req)
	case channel.MethodCompose:
		return f.compose(ctx, s, req)
	case channel.MethodWatch:
		return f.watch(ctx, s)
	}
	return airlock.Errorf(airlock.Unimplemented, "the guest does not know the method %q", method)
}

// fileError makes a client's error of the kernel's.
func fileError(path string, err error) error {
	var coded *airlock.Error
	if err == nil || errors.As(err, &coded) {
		return err
	}
	path = clip(path)
	var errno syscall.Errno
	errors.As(err, &errno)
	switch errno {
	case unix.ENOENT:
		return airlock.Errorf(airlock.NotFound, "path '%s' does not exist", path).Because(err)
	case unix.EACCES, unix.EPERM:
		return airlock.Errorf(airlock.Denied, "permission denied for path '%s'", path).Because(err)
	case unix.ENOSPC, unix.EDQUOT:
		return &airlock.Error{Code: airlock.NoSpace, Message: "no space is left on the sandbox's disk", Hint: "remove files or ask for more with limits.diskMB", Err: err}
	case unix.EISDIR:
		return isDirectory(path)
	case unix.ENOTDIR:
		return airlock.Invalidf("path", "", "path '%s' leads through something that is not a directory", path)
	case unix.ENAMETOOLONG:
		return airlock.Invalidf("path", "names have at most 255 bytes and paths 4095", "path '%s' is too long", path)
	case unix.ELOOP:
		return airlock.Invalidf("path", "", "path '%s' has too many symbolic links", path)
	case unix.EROFS:
		return airlock.Errorf(airlock.Denied, "path '%s' is on a read-only file system", path).Because(err)
	case unix.EXDEV:
		return airlock.Invalidf("destination", "copy and remove instead", "path '%s' is on another file system", path)
	case unix.ENOTEMPTY, unix.EEXIST, unix.EBUSY, unix.ETXTBSY:
		return airlock.Errorf(airlock.Conflict, "path '%s' is in the way or in use: %s", path, errno.Error()).Because(err)
	case unix.EMFILE, unix.ENFILE, unix.ENOMEM:
		return &airlock.Error{Code: airlock.Exhausted, Message: "too many files are open in this sandbox", Hint: "wait for some calls to end", Err: err}
	case 0:
		return airlock.Errorf(airlock.Internal, "path '%s' could not be used", path).Because(err)
	}
	return airlock.Errorf(airlock.Invalid, "path '%s' could not be used: %s", path, errno.Error()).Because(err)
}

func isDirectory(path string) error {
	return airlock.Invalidf("path", "", "path '%s' is a directory", clip(path))
}

// describer makes entries; it reads the names of owners once.
type describer struct{ users, groups map[uint32]string }

func (f *files) describer() describer {
	return describer{f.accounts.names("passwd"), f.accounts.names("group")}
}

func (d describer) entry(path string) (channel.Entry, error) {
	info, err := os.Lstat(path)
	if err != nil {
		return channel.Entry{}, fileError(path, err)
	}
	e := channel.Entry{
		Name: info.Name(), Path: path, Type: typeOf(info.Mode()), Size: info.Size(),
		Mode: uint32(info.Mode().Perm()), Permissions: info.Mode().String(), ModifiedTime: info.ModTime().UTC(),
	}
	if st, ok := info.Sys().(*syscall.Stat_t); ok {
		e.Owner, e.Group, e.Inode = named(d.users, st.Uid), named(d.groups, st.Gid), st.Ino
	}
	if info.Mode()&fs.ModeSymlink == 0 {
		e.Metadata = metadata(path)
	} else {
		e.Type, e.Mode = channel.Unknown, 0
		if target, err := filepath.EvalSymlinks(path); err == nil {
			e.SymlinkTarget, e.Metadata = target, metadata(target)
			if info, err := os.Stat(target); err == nil {
				e.Type, e.Mode = typeOf(info.Mode()), uint32(info.Mode().Perm())
			}
		} else if target, err := os.Readlink(path); err == nil {
			if !filepath.IsAbs(target) {
				target = filepath.Join(filepath.Dir(path), target)
			}
			e.SymlinkTarget = filepath.Clean(target)
		}
	}
	return e, nil
}

// typeOf calls everything that is no directory and no symlink a file:
// devices, pipes and sockets have no type of their own in Entry.
func typeOf(m fs.FileMode) channel.EntryType {
	switch {
	case m.IsDir():
		return channel.Directory
	case m&fs.ModeSymlink != 0:
		return channel.Unknown
	}
	return channel.File
}

func named(names map[uint32]string, id uint32) string {
	if name, ok := names[id]; ok {
		return name
	}
	return strconv.FormatUint(uint64(id), 10)
}

func itoa(n int) string { return strconv.Itoa(n) }

func (f *files) stat(req channel.PathRequest) (channel.Entry, error) {
	path, err := f.user.absolute(req.Path)
	if err != nil {
		return channel.Entry{}, err
	}
	return f.describer().entry(path)
}

func (f *files) mkdir(req channel.PathRequest) (channel.Entry, error) {
	path, err := f.user.absolute(req.Path)
	if err != nil {
		return channel.Entry{}, err
	}
	if info, err := os.Stat(path); err == nil {
		if info.IsDir() {
			return channel.Entry{}, airlock.Errorf(airlock.Exists, "directory '%s' already exists", clip(path))
		}
		return channel.Entry{}, airlock.Invalidf("path", "", "path '%s' already exists and is not a directory", clip(path))
	}
	if err := os.MkdirAll(path, 0o755); err != nil {
		return channel.Entry{}, fileError(path, err)
	}
	return f.describer().entry(path)
}

func (f *files) remove(req channel.PathRequest) (channel.Empty, error) {
	path, err := f.user.absolute(req.Path)
	if err != nil {
		return channel.Empty{}, err
	}
	if path == "/" {
		return channel.Empty{}, airlock.Invalidf("path", "name something below it", "path '/' cannot be removed")
	}
	err = os.RemoveAll(path)
	if errors.Is(err, unix.ENOTDIR) { // below a file: it is missing, and that is fine
		err = nil
	}
	return channel.Empty{}, fileError(path, err)
}

func (f *files) move(req channel.MoveRequest) (channel.Entry, error) {
	source, err := f.user.absolute(req.Source)
	if err != nil {
		return channel.Entry{}, err
	}
	destination, err := f.user.absolute(req.Destination)
	if err != nil {
		return channel.Entry{}, err
	}
	if _, err := os.Lstat(source); err != nil {
		return channel.Entry{}, fileError(source, err)
	}
	if err := makeParents(destination); err != nil {
		return channel.Entry{}, err
	}
	if err := unix.Rename(source, destination); err != nil {
		return channel.Entry{}, fileError(destination, err)
	}
	return f.describer().entry(destination)
}

// dirMost bounds the names of one directory that are held to be sorted.
const dirMost = 100_000

func (f *files) list(ctx context.Context, s *channel.Stream, body []byte) error {
	var req channel.ListDirRequest
	if err := decode(body, &req); err != nil {
		return err
	}
	path, err := f.user.absolute(req.Path)
	if err != nil {
		return err
	}
	info, err := os.Stat(path)
	if err != nil {
		return fileError(path, err)
	}
	if !info.IsDir() {
		return airlock.Invalidf("path", "", "path '%s' is not a directory", clip(path))
	}
	names, err := readNames(path, 0)
	if err != nil {
		return fileError(path, err)
	}
	return walk(ctx, s, f.describer(), path, names, max(req.Depth, 1))
}

// walk sends the entries of a directory. What vanishes or may not be read
// below the first level is left out. Its depth ends where paths get too long.
func walk(ctx context.Context, s *channel.Stream, d describer, dir string, names []string, depth int) error {
	for _, name := range names {
		path := filepath.Join(dir, name)
		entry, err := d.entry(path)
		if err != nil {
			continue
		}
		if err := channel.SendReply(ctx, s, entry); err != nil {
			return err
		}
		if depth > 1 && entry.Type == channel.Directory && entry.SymlinkTarget == "" {
			// Not followed, should it have become a link meanwhile.
			if below, err := readNames(path, unix.O_NOFOLLOW); err == nil {
				if err := walk(ctx, s, d, path, below, depth-1); err != nil {
					return err
				}
			} else if airlock.CodeOf(err) == airlock.TooLarge {
				return err
			}
		}
	}
	return nil
}

func readNames(dir string, flags int) ([]string, error) {
	f, err := os.OpenFile(dir, os.O_RDONLY|unix.O_DIRECTORY|unix.O_NONBLOCK|flags, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	names, err := f.Readdirnames(dirMost + 1)
	if err != nil && err != io.EOF {
		return nil, err
	}
	if len(names) > dirMost {
		return nil, airlock.Errorf(airlock.TooLarge, "directory '%s' has more than %d entries", clip(dir), dirMost)
	}
	slices.Sort(names)
	return names, nil
}

func (f *files) read(ctx context.Context, s *channel.Stream, body []byte) error {
	var req channel.ReadRequest
	if err := decode(body, &req); err != nil {
		return err
	}
	path, err := f.user.absolute(req.Path)
	if err != nil {
		return err
	}
	if req.Offset < 0 || req.Length < 0 {
		return airlock.Invalidf("offset", "use 0 or more", "offset or length is negative")
	}
	// Without blocking: a named pipe must not hold the call up.
	fd, err := unix.Open(path, unix.O_RDONLY|nonblock, 0)
	if err != nil {
		return fileError(path, err)
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return fileError(path, err)
	}
	if err := readable(path, st.Mode); err != nil {
		return err
	}
	entry, err := f.describer().entry(path)
	if err != nil {
		return err
	}
	// Of what was opened, not of a link to it or of what is there by now.
	entry.Size, entry.ModifiedTime, entry.Inode = st.Size, time.Unix(st.Mtim.Unix()).UTC(), st.Ino
	if req.Offset > 0 {
		if _, err := unix.Seek(fd, req.Offset, io.SeekStart); err != nil {
			return airlock.Invalidf("offset", "read from the beginning", "path '%s' cannot be read from an offset", clip(path))
		}
	}
	if err := channel.SendReply(ctx, s, entry); err != nil {
		return err
	}
	// To the end, whatever stat said: procfs says 0.
	more := &contents{fd: fd, path: path, limited: req.Length > 0, left: req.Length}
	for sent := 0; sent < passFrom; {
		n, err := more.send(ctx, s)
		if n == 0 || err != nil {
			return err
		}
		sent += n
	}
	if more.limited && more.left == 0 {
		return nil
	}
	if pass(f.passing, fd, s.ID()) {
		return s.Send(ctx, tagPassed, binary.BigEndian.AppendUint64(nil, uint64(more.left)))
	}
	return more.sendAll(ctx, s)
}

// contents is a file, from its position on, that is sent.
type contents struct {
	fd      int
	path    string
	limited bool
	left    int64 // if limited
}

func (c *contents) sendAll(ctx context.Context, s *channel.Stream) error {
	for {
		if n, err := c.send(ctx, s); n == 0 || err != nil {
			return err
		}
	}
}

// send sends a piece, and says how long it was: 0 at the end.
func (c *contents) send(ctx context.Context, s *channel.Stream) (int, error) {
	var failed error
	n, err := s.SendFrom(ctx, channel.TagData, func(buf []byte) (n int) {
		if c.limited {
			buf = buf[:min(int64(len(buf)), c.left)]
		}
		n, failed = readSome(c.fd, buf)
		return n
	})
	if c.limited {
		c.left -= int64(n)
	}
	if failed != nil {
		return n, fileError(c.path, failed)
	}
	return n, err
}

// readSome reads a piece of a file, without waiting for more than there is.
func readSome(fd int, buf []byte) (int, error) {
	for {
		n, err := unix.Read(fd, buf)
		switch err {
		case nil:
			return n, nil
		case unix.EINTR:
		case unix.EAGAIN:
			return 0, nil
		default:
			return 0, err
		}
	}
}

// readable refuses what has no contents to transfer.
func readable(path string, mode uint32) error {
	switch mode & unix.S_IFMT {
	case unix.S_IFREG, unix.S_IFCHR:
		return nil
	case unix.S_IFDIR:
		return isDirectory(path)
	}
	return notRegular(path)
}

func notRegular(path string) error {
	return airlock.Invalidf("path", "", "path '%s' is not a regular file", clip(path))
}
