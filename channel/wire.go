package channel

import (
	"time"

	"airlock.dev/airlock"
)

// The methods of the guest. Requests and replies are JSON; a reply is one
// message with tag TagReply unless the method says otherwise.
const (
	// MethodHello takes Hello and answers HelloReply: it configures the
	// sandbox for its owner. It may be called again after a host restart.
	MethodHello = "hello"
	// MethodStart takes StartRequest. The guest answers Started (TagStarted),
	// then output (TagStdout, TagStderr, TagPTY: raw bytes) and at the end
	// one Ended (TagEnded), after all output. When the host closes the
	// stream the process goes on and its output is dropped.
	MethodStart = "exec.start"
	// MethodAttach takes ProcessRef and answers as MethodStart does, from
	// now on; a process that ended within the last 30 s answers Started and
	// Ended.
	MethodAttach = "exec.attach"
	// MethodInput takes ProcessRef; the host then sends input (TagInput: raw
	// bytes) and ends its side; the guest replies Empty once the process has
	// taken everything.
	MethodInput = "exec.input"
	// MethodCloseStdin, MethodSignal, MethodResize act on one process.
	MethodCloseStdin = "exec.close_stdin" // ProcessRef → Empty
	MethodSignal     = "exec.signal"      // SignalRequest → Empty; the whole tree, setsid and double forks included
	MethodResize     = "exec.resize"      // ResizeRequest → Empty
	// MethodProcesses takes Empty and answers ProcessInfo messages, one each, then the end.
	MethodProcesses = "exec.list"
	// MethodRead takes ReadRequest; the guest answers Entry (TagReply) and
	// then the contents (TagData).
	MethodRead = "file.read"
	// MethodWrite takes WriteRequest; the host sends contents (TagData) and
	// its end; the guest answers Entry. An aborted upload leaves the old file.
	MethodWrite  = "file.write"
	MethodStat   = "file.stat"   // PathRequest → Entry
	MethodMkdir  = "file.mkdir"  // PathRequest → Entry; Exists if it is a directory already
	MethodRemove = "file.remove" // PathRequest → Empty; recursive; a missing path is fine
	MethodMove   = "file.move"   // MoveRequest → Entry
	// MethodCompose takes ComposeRequest, puts the contents of its sources in
	// their order in the place of the destination's, removes the sources and
	// answers Entry. A source that may be read but not removed stays.
	MethodCompose = "file.compose"
	// MethodListDir takes ListDirRequest and answers Entry messages, one each, then the end.
	MethodListDir = "file.list"
	// MethodWatch takes WatchRequest and carries all watches of one user until
	// the host ends the stream. The host sends WatchCommand (TagInput); the
	// guest sends WatchNote (TagReply): one that is Ready or an Error for each
	// watch that is added, then its events.
	MethodWatch = "file.watch"
	// MethodDial takes DialRequest, connects to that port on the sandbox's own
	// loopback and answers Empty, or fails with PortClosed. Then both sides
	// send raw bytes (TagData), each with its own end; a reset is the
	// connection's reset.
	MethodDial = "port.dial"
	// MethodUsage takes Empty and answers Usage, as the guest sees it.
	MethodUsage = "usage"
)

// Tags of messages.
const (
	TagReply   byte = 0
	TagStarted byte = 'S'
	TagStdout  byte = 'o'
	TagStderr  byte = 'e'
	TagPTY     byte = 'p'
	TagEnded   byte = 'X'
	TagInput   byte = 'i'
	TagData    byte = 'd'
)

// Empty is a request or reply without content.
type Empty struct{}

// Hello configures the guest.
type Hello struct {
	SandboxID   string            `json:"sandboxID"`
	Env         map[string]string `json:"env,omitempty"` // variables of every later process
	MemoryBytes int64             `json:"memoryBytes"`   // soft limit of all user processes together; 0 is none
	Processes   int               `json:"processes"`     // RLIMIT_NPROC of started processes; 0 leaves it
	OpenFiles   int               `json:"openFiles"`     // RLIMIT_NOFILE of started processes; 0 leaves it
}

// HelloReply is what the guest says of itself; it is information, not evidence.
type HelloReply struct {
	Version string `json:"version"`
}

// StartRequest starts a process.
type StartRequest struct {
	Cmd   string            `json:"cmd"` // looked up in the process's PATH if it has no slash
	Args  []string          `json:"args,omitempty"`
	Env   map[string]string `json:"env,omitempty"` // over HOME, USER, LOGNAME, PATH and the sandbox's own
	Cwd   string            `json:"cwd,omitempty"` // "" is the user's home; relative to it; ~ is expanded
	User  string            `json:"user,omitempty"`
	Tag   string            `json:"tag,omitempty"`
	Stdin bool              `json:"stdin,omitempty"` // false gives /dev/null
	PTY   *Size             `json:"pty,omitempty"`
}

// Size is that of a terminal, in characters.
type Size struct {
	Cols uint16 `json:"cols"`
	Rows uint16 `json:"rows"`
}

// Started says that the process runs.
type Started struct {
	PID uint32 `json:"pid"` // as the process itself sees it
}

// Ended says how the process ended.
type Ended struct {
	ExitCode int             `json:"exitCode"`         // -1 when a signal ended it
	Signal   string          `json:"signal,omitempty"` // "SIGKILL"
	Outcome  airlock.Outcome `json:"outcome"`          // Exited, Signaled or OOM
}

// ProcessRef names a process that was started through the channel, by pid or,
// if PID is 0, by tag.
type ProcessRef struct {
	PID uint32 `json:"pid,omitempty"`
	Tag string `json:"tag,omitempty"`
}

// SignalRequest sends a signal, by number.
type SignalRequest struct {
	ProcessRef
	Signal int `json:"signal"`
}

// ResizeRequest sets the size of a terminal.
type ResizeRequest struct {
	ProcessRef
	Size Size `json:"size"`
}

// ProcessInfo describes a running process that was started through the channel.
type ProcessInfo struct {
	PID  uint32            `json:"pid"`
	Tag  string            `json:"tag,omitempty"`
	Cmd  string            `json:"cmd"`
	Args []string          `json:"args,omitempty"`
	Env  map[string]string `json:"env,omitempty"` // those of the request only
	Cwd  string            `json:"cwd,omitempty"`
	User string            `json:"user"`
}

// PathRequest names a path as a user: absolute, relative to the user's home,
// or beginning with ~.
type PathRequest struct {
	User string `json:"user,omitempty"` // "" is "user"
	Path string `json:"path"`
}

// ReadRequest reads a file.
type ReadRequest struct {
	PathRequest
	Offset int64 `json:"offset,omitempty"`
	Length int64 `json:"length,omitempty"` // 0 is to the end
}

// WriteRequest writes a file: parents are made (0755), contents and metadata
// replaced.
type WriteRequest struct {
	PathRequest
	Mode     uint32            `json:"mode,omitempty"` // permission bits; 0 is 0644
	Metadata map[string]string `json:"metadata,omitempty"`
}

// Metadata of a file is kept in its extended attributes.
const (
	MetadataPrefix = "user.e2b." // of each attribute's name; the key follows
	MaxMetadataKey = 246         // bytes; with the prefix it is the most of a name
	MaxMetadata    = 4096        // bytes of a file's prefixes, keys and values together
)

// ComposeRequest makes one file of several; parents are made.
type ComposeRequest struct {
	User        string   `json:"user,omitempty"`
	Sources     []string `json:"sources"` // regular files, none of them the destination
	Destination string   `json:"destination"`
}

// MoveRequest renames; parents of the destination are made.
type MoveRequest struct {
	User        string `json:"user,omitempty"`
	Source      string `json:"source"`
	Destination string `json:"destination"`
}

// ListDirRequest lists a directory, depth levels deep (at least 1), pre-order,
// lexical, without following symlinks below it.
type ListDirRequest struct {
	PathRequest
	Depth int `json:"depth"`
}

// EntryType is what a path is.
type EntryType string

// The types of an entry. A symlink has the type of its target, or Unknown if
// it dangles.
const (
	File      EntryType = "file"
	Directory EntryType = "directory"
	Unknown   EntryType = "unknown"
)

// Entry describes a path (after lstat). What is not UTF-8 in its names has
// U+FFFD in the place of each wrong byte.
type Entry struct {
	Name          string            `json:"name"`
	Path          string            `json:"path"` // absolute
	Type          EntryType         `json:"type"`
	Size          int64             `json:"size"`
	Mode          uint32            `json:"mode"`        // permission bits; of a symlink those of its target, 0 if it dangles
	Permissions   string            `json:"permissions"` // as Go prints a mode, "-rw-r--r--"
	Owner         string            `json:"owner"`
	Group         string            `json:"group"`
	ModifiedTime  time.Time         `json:"modifiedTime"`
	SymlinkTarget string            `json:"symlinkTarget,omitempty"` // resolved, absolute
	Metadata      map[string]string `json:"metadata,omitempty"`      // at most MaxMetadata; of a symlink that of its target
	Inode         uint64            `json:"inode,omitempty"`
}

// WatchRequest opens the watches of a user.
type WatchRequest struct {
	User string `json:"user,omitempty"` // "" is "user"
}

// WatchCommand adds a watch of a directory, or removes one. The host chooses
// the id, which is larger than all before it on the stream.
type WatchCommand struct {
	ID        uint32 `json:"id"`
	Remove    bool   `json:"remove,omitempty"`
	Path      string `json:"path,omitempty"`
	Recursive bool   `json:"recursive,omitempty"` // directories made later, too; links are not followed
	Entry     bool   `json:"entry,omitempty"`     // events carry what they are about
}

// WatchNote is what there is to say of a watch. Exactly one of Ready, Event,
// Error and End is set; after the last two the watch is over.
type WatchNote struct {
	ID    uint32      `json:"id"`
	Ready bool        `json:"ready,omitempty"`
	Event *WatchEvent `json:"event,omitempty"`
	Error *WatchError `json:"error,omitempty"`
	End   bool        `json:"end,omitempty"` // the directory itself was removed or moved away
}

// WatchError is why a watch failed.
type WatchError struct {
	Code    airlock.Code `json:"code"`
	Message string       `json:"message"`
}

// WatchLost is the end of a watch that can no longer tell all that happens.
func WatchLost(why string) *airlock.Error {
	return &airlock.Error{Code: airlock.Exhausted, Message: "the watch has ended and events may be lost: " + why, Hint: "watch again and list the directory anew"}
}

// WatchEvent is one change in a watched directory. The directory's own end is
// Removed or Renamed with the name ".".
type WatchEvent struct {
	Name  string     `json:"name"` // relative to the watched directory
	Type  ChangeType `json:"type"`
	Entry *Entry     `json:"entry,omitempty"` // of Created, Written and ModeChanged, while it can be seen
}

// ChangeType is what happened to a path.
type ChangeType string

// The types of changes. A rename is Renamed for the old name and Created for
// the new one. A file that is replaced by an upload is Written.
const (
	Created     ChangeType = "create"
	Written     ChangeType = "write"
	Removed     ChangeType = "remove"
	Renamed     ChangeType = "rename"
	ModeChanged ChangeType = "chmod"
)

// DialRequest names a port on which a program in the sandbox listens.
type DialRequest struct {
	Port uint16 `json:"port"`
}

// Usage is the guest's view of what the sandbox uses.
type Usage struct {
	MemoryUsed  int64 `json:"memoryUsed"`
	MemoryTotal int64 `json:"memoryTotal"`
	DiskUsed    int64 `json:"diskUsed"`
	DiskTotal   int64 `json:"diskTotal"`
	Processes   int   `json:"processes"`
}
