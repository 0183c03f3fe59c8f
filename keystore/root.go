package keystore

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"airlock.dev/airlock"
)

// root wraps the key of the keyring and nothing else.
type root interface {
	ref() string   // how the operator names it
	check() string // tells it from others without saying what it is; "" if it has no such
	wrap(ctx context.Context, key, ad []byte) ([]byte, error)
	unwrap(ctx context.Context, wrapped, ad []byte) ([]byte, error)
}

// reference is a parsed name of a root key.
type reference struct {
	kind string // "file", "systemd" or "pkcs11"
	arg  string // an absolute path, a credential's name, or the whole URI
}

func (r reference) String() string {
	if r.kind == "pkcs11" {
		return r.arg
	}
	return r.kind + ":" + r.arg
}

var (
	credentialName = regexp.MustCompile(`^[A-Za-z0-9_-][A-Za-z0-9._-]{0,254}$`)
	scheme         = regexp.MustCompile(`^[A-Za-z][A-Za-z0-9+-]*:`)
)

const rootKeyHint = "give file:/PATH, systemd:NAME or a pkcs11: URI"

// parseReference reads what --root-key says. It names no key in its errors.
func parseReference(s string) (reference, error) {
	if _, err := decodeRootKey([]byte(s)); err == nil {
		return reference{}, airlock.Invalidf("--root-key", "put the key into a file that only its owner can read and give file:/PATH; this key has been seen, make another one",
			"--root-key: that is a key, not the place of one")
	}
	if len(s) > 4096 || strings.ContainsAny(s, "\x00\n\r") {
		return reference{}, airlock.Invalidf("--root-key", rootKeyHint, "--root-key: that is no reference to a root key")
	}
	kind, arg, found := strings.Cut(s, ":")
	switch {
	case strings.HasPrefix(s, "pkcs11:"):
		if _, err := parseToken(s); err != nil {
			return reference{}, err
		}
		return reference{"pkcs11", s}, nil
	case found && kind == "systemd":
		if !credentialName.MatchString(arg) {
			return reference{}, airlock.Invalidf("--root-key", "give the name in LoadCredential= or LoadCredentialEncrypted=", "--root-key: %.60q is no name of a systemd credential", arg)
		}
		return reference{"systemd", arg}, nil
	case found && kind == "file":
		s = arg
	case scheme.MatchString(s):
		return reference{}, airlock.Invalidf("--root-key", rootKeyHint, "--root-key: %.30q is no kind of root key", kind)
	}
	if s == "" {
		return reference{}, airlock.Invalidf("--root-key", rootKeyHint, "--root-key: the path is empty")
	}
	path, err := filepath.Abs(s)
	if err != nil {
		return reference{}, fmt.Errorf("find the root key's directory: %w", err)
	}
	return reference{"file", path}, nil
}

// openRoot returns the root key that ref names. It is refused inside dataDir.
func openRoot(ref reference, dataDir, helper string) (root, error) {
	path := ref.arg
	switch ref.kind {
	case "systemd":
		dir := os.Getenv("CREDENTIALS_DIRECTORY")
		if !filepath.IsAbs(dir) {
			return nil, airlock.Invalidf("--root-key", "start it from a unit with LoadCredential="+ref.arg+":… or LoadCredentialEncrypted=", "systemd passed no credentials to this process")
		}
		path = filepath.Join(dir, ref.arg)
	case "pkcs11":
		t, err := parseToken(ref.arg)
		if err != nil {
			return nil, err
		}
		return &tokenRoot{uri: ref.arg, token: t, helper: helper}, nil
	}
	key, err := readRoot(ref.kind, path, dataDir)
	if err != nil {
		return nil, err
	}
	return &fileRoot{ref.String(), key}, nil
}

// fileRoot is a key in this process's memory.
type fileRoot struct {
	name string
	key  []byte
}

func (r *fileRoot) ref() string { return r.name }

func (r *fileRoot) check() string {
	sum, err := derive(r.key, "root-check")
	if err != nil {
		return ""
	}
	return hex.EncodeToString(sum[:8])
}

func (r *fileRoot) wrap(_ context.Context, key, ad []byte) ([]byte, error) {
	return wrap(r.key, key, ad)
}

func (r *fileRoot) unwrap(_ context.Context, wrapped, ad []byte) ([]byte, error) {
	return unwrap(r.key, wrapped, ad)
}

// maxRootFile is larger than any form of a key.
const maxRootFile = 1024

func readRoot(kind, path, dataDir string) ([]byte, error) {
	// Not blocked by a FIFO that waits there.
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("open the root key: %w", err)
	}
	defer f.Close()
	if err := checkRootFile(f, path, kind, dataDir); err != nil {
		return nil, err
	}
	text, err := io.ReadAll(io.LimitReader(f, maxRootFile+1))
	if err != nil {
		return nil, fmt.Errorf("read the root key: %w", err)
	}
	defer clear(text)
	key, err := decodeRootKey(text)
	if err != nil {
		return nil, airlock.Invalidf("--root-key", "it must hold 32 random bytes as one line of base64 or hex, as `head -c 32 /dev/urandom | base64` writes them", "%s holds no root key: %v", path, err)
	}
	return key, nil
}

func checkRootFile(f *os.File, path, kind, dataDir string) error {
	info, err := f.Stat()
	if err != nil {
		return fmt.Errorf("look at the root key: %w", err)
	}
	if !info.Mode().IsRegular() {
		return airlock.Invalidf("--root-key", "give a regular file", "%s is not a regular file", path)
	}
	open := fs.FileMode(0o077)
	if kind == "systemd" {
		open = 0o007 // where the service is no root, an access list shows as bits of the group
	}
	if info.Mode().Perm()&open != 0 {
		return airlock.Invalidf("--root-key", fmt.Sprintf("chmod 0600 %s, and make another key if someone may have read it", path), "others can read the root key: %s has mode %04o", path, info.Mode().Perm())
	}
	stat := info.Sys().(*syscall.Stat_t)
	if stat.Uid != 0 && int(stat.Uid) != os.Geteuid() {
		return airlock.Invalidf("--root-key", fmt.Sprintf("chown it to the user of the server, %d", os.Geteuid()), "%s belongs to another user, %d", path, stat.Uid)
	}
	if stat.Nlink != 1 {
		return airlock.Invalidf("--root-key", "copy it to a new file and overwrite the old one", "%s has %d names: another one may be in a backup", path, stat.Nlink)
	}
	in, err := inside(f, dataDir)
	if err != nil {
		return fmt.Errorf("find out where %s is: %w", path, err)
	}
	if in {
		return airlock.Invalidf("--root-key", "move it elsewhere: whoever has a backup of the data directory would have the key to it", "the root key %s is inside the data directory %s", path, dataDir)
	}
	return nil
}

var errRootForm = errors.New("not 32 bytes in base64 or hex")

func decodeRootKey(text []byte) ([]byte, error) {
	if len(text) > maxRootFile {
		return nil, errRootForm
	}
	line := strings.TrimSpace(string(text))
	key, err := hex.DecodeString(line)
	if err != nil || len(key) != keyLen {
		key, err = base64.StdEncoding.Strict().DecodeString(line)
	}
	if err != nil || len(key) != keyLen || strings.ContainsAny(line, "\r\n") {
		return nil, errRootForm
	}
	if bytes.Count(key, key[:1]) == keyLen {
		return nil, errors.New("all its bytes are the same")
	}
	return key, nil
}

// createRoot makes a root key at path, where nothing may be.
func createRoot(path string) error {
	text := []byte(base64.StdEncoding.EncodeToString(random(keyLen)) + "\n")
	defer clear(text)
	half := path + ".new"
	if err := shred(half); err != nil {
		return err
	}
	f, err := os.OpenFile(half, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return fmt.Errorf("make the root key: %w", err)
	}
	_, err = f.Write(text)
	if err := errors.Join(err, f.Sync(), f.Close()); err != nil {
		return fmt.Errorf("write the root key: %w", err)
	}
	if err := unix.Renameat2(unix.AT_FDCWD, half, unix.AT_FDCWD, path, unix.RENAME_NOREPLACE); err != nil {
		return errors.Join(fmt.Errorf("put the root key at %s: %w", path, err), shred(half))
	}
	return syncDir(filepath.Dir(path))
}

// inside says whether an open file or directory is dir or lies in it, whatever
// links and mounts its name went through.
func inside(f *os.File, dir string) (bool, error) {
	d, err := os.Open(dir)
	if err != nil {
		return false, err
	}
	defer d.Close()
	want, err := d.Stat()
	if err != nil {
		return false, err
	}
	file, err := placeOf(f)
	if err != nil {
		return false, err
	}
	// Another file system may be mounted in dir, and dir somewhere else.
	for path := file.path; ; path = filepath.Dir(path) {
		if info, err := os.Stat(path); err == nil && os.SameFile(info, want) {
			return true, nil
		}
		if path == "/" {
			break
		}
	}
	// And so may a part of dir be.
	place, err := placeOf(d)
	if err != nil {
		return false, err
	}
	return file.device == place.device && (file.origin == place.origin || strings.HasPrefix(file.origin, strings.TrimSuffix(place.origin, "/")+"/")), nil
}

// place is where an open file is.
type place struct {
	path   string // in this process's view
	device string // major:minor of its file system
	origin string // the path in that file system
}

func placeOf(f *os.File) (p place, err error) {
	if p.path, err = os.Readlink(fmt.Sprintf("/proc/self/fd/%d", f.Fd())); err != nil {
		return place{}, err
	}
	about, err := os.ReadFile(fmt.Sprintf("/proc/self/fdinfo/%d", f.Fd()))
	if err != nil {
		return place{}, err
	}
	id := ""
	for line := range strings.Lines(string(about)) {
		if v, ok := strings.CutPrefix(line, "mnt_id:"); ok {
			id = strings.TrimSpace(v)
		}
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return place{}, err
	}
	for line := range strings.Lines(string(mounts)) {
		fields := strings.Fields(line)
		if len(fields) < 5 || fields[0] != id {
			continue
		}
		top, point := unescape.Replace(fields[3]), unescape.Replace(fields[4])
		rel, err := filepath.Rel(point, p.path)
		if err != nil || rel == ".." || strings.HasPrefix(rel, "../") {
			return place{}, fmt.Errorf("%s is not below its mount point %s", p.path, point)
		}
		p.device, p.origin = fields[2], filepath.Join(top, rel)
		return p, nil
	}
	return place{}, fmt.Errorf("the mount of %s is not listed in /proc/self/mountinfo", p.path)
}

// unescape undoes what the kernel does to names in mountinfo.
var unescape = strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`)
