// Package image makes the root filesystems that sandboxes start from. This
// version has one: host, a read-only view of this machine's toolchain.
//
// It knows nothing of sandboxes or of how they are isolated; it is told which
// host id root inside will have. Start reading at Host.
package image

import (
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"unicode"

	"golang.org/x/sys/unix"

	"airlock.dev/airlock"
)

// Image is a root filesystem that is ready to be used.
type Image struct {
	ID      string            // "host-" and a digest of what Airlock put into it
	RootFS  string            // directory
	Guest   string            // path of the guest inside
	TrustID string            // of the roots that its clients trust; "" is the machine's own
	Env     map[string]string // variables of every process, below those that clients give
}

// Options are what an image has beside the machine's toolchain.
type Options struct {
	Trust Trust             // without certificates the machine's own roots are trusted
	Env   map[string]string // variables of every process, in login shells and sudo too; printable values
	Files map[string]string // more files of root's that all may read, by absolute path
}

// guestDir is where the guest and its helpers are inside. The guest's path
// carries its digest: a new guest never takes the place of one that runs.
const guestDir = "/.airlock"

// DefaultPath is the PATH of processes in the host image.
const DefaultPath = guestDir + "/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// etcAllowed are the entries of the machine's /etc that the image shows, as
// far as all users may read them: what dynamic linking, TLS and language
// runtimes need. Everything else of /etc is Airlock's own or absent.
var etcAllowed = []string{
	"alternatives", "apt/keyrings", "apt/preferences", "apt/preferences.d", "apt/trusted.gpg", "apt/trusted.gpg.d", "ca-certificates", "debian_version", "fonts", "inputrc", "java*", "ld.so.cache", "ld.so.conf", "ld.so.conf.d",
	"localtime", "magic", "magic.mime", "maven/logging", "maven/m2.conf", "mime.types", "os-release", "perl", "php", "pki", "protocols", "python3*", "redhat-release",
	"rpc", "ruby", "services", "ssl", "terminfo", "timezone", "xml", "R",
}

// etcOwn is what Airlock writes into the image's /etc.
var etcOwn = map[string]string{
	"passwd": "root:x:0:0:root:/root:/bin/bash\n" +
		"daemon:x:1:1:daemon:/usr/sbin:/usr/sbin/nologin\n" +
		"user:x:1000:1000:user:/home/user:/bin/bash\n" +
		"nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
	"group":         "root:x:0:\ndaemon:x:1:\nstaff:x:50:\nuser:x:1000:\nsudo:x:27:user\nnogroup:x:65534:\n",
	"hosts":         "127.0.0.1 localhost sandbox\n::1 localhost\n",
	"hostname":      "sandbox\n",
	"nsswitch.conf": "passwd: files\ngroup: files\nshadow: files\nhosts: files dns\nservices: files\nprotocols: files\n",
	"host.conf":     "multi on\n",
	"shells":        "/bin/sh\n/bin/bash\n",
	// The gateway's address. Options are those that every resolver knows or skips.
	"resolv.conf": "nameserver 10.0.0.1\noptions timeout:2 attempts:2\n",
	"environment": "LC_CTYPE=C.UTF-8\n",
	"profile": "if [ -z \"$AIRLOCK_PROFILE\" ]; then\n" +
		"  export AIRLOCK_PROFILE=1 LC_CTYPE=\"${LC_CTYPE:-C.UTF-8}\"\n" +
		"  case \":$PATH:\" in *:" + guestDir + "/bin:*) ;; *) export PATH=\"" + guestDir + "/bin:${PATH:-/usr/local/bin:/usr/bin:/bin}\" ;; esac\n" +
		"fi\n" +
		"if [ -n \"$BASH_VERSION\" ] && [ -n \"$PS1\" ]; then PS1='\\u@\\h:\\w\\$ '; fi\n",
	"bash.bashrc": "",
}

// toolEnv lets installers do in an image what they would not do to a machine:
// distributions keep pip from their own packages, and nothing here outlives
// its sandbox.
var toolEnv = map[string]string{"PIP_BREAK_SYSTEM_PACKAGES": "1", "UV_BREAK_SYSTEM_PACKAGES": "1"}

// variable is what a name of Options.Env is like.
var variable = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]*$`)

// files checks the options and returns etcOwn with the variables of an image in it.
func (o Options) files() (map[string]string, error) {
	var plain, shell strings.Builder
	for _, name := range slices.Sorted(maps.Keys(o.Env)) {
		value := o.Env[name]
		if !variable.MatchString(name) || strings.ContainsFunc(value, func(c rune) bool { return !unicode.IsPrint(c) }) {
			return nil, airlock.Invalidf("env", "give names of letters, digits and _, and printable values", "the image cannot have the variable %q", name)
		}
		quoted := "'" + strings.ReplaceAll(value, "'", `'\''`) + "'"
		fmt.Fprintf(&plain, "%s=%s\n", name, value)
		fmt.Fprintf(&shell, "[ -n \"${%[1]s+x}\" ] || export %[1]s=%[2]s\n", name, quoted)
	}
	for p := range o.Files {
		if !path.IsAbs(p) || path.Clean(p) != p || p == "/" {
			return nil, airlock.Invalidf("files", "give absolute paths", "the image cannot have the file %q", p)
		}
	}
	files := maps.Clone(etcOwn)
	files["environment"] += plain.String()
	files["profile"] = shell.String() + files["profile"]
	return files, nil
}

// Host assembles the host image below dir, which must be on a filesystem
// whose mounts end with the caller's mount namespace, and which all users can
// reach. guest is the static guest binary; root inside is uidBase outside. An
// image that is there already is used as it is; other options make another.
func Host(dir, guest string, uidBase int, opts Options) (Image, error) {
	roots, err := opts.Trust.certificates()
	if err != nil {
		return Image{}, err
	}
	env := maps.Clone(toolEnv)
	maps.Copy(env, opts.Env)
	if len(roots) > 0 {
		maps.Copy(env, trustEnv)
	}
	opts.Env = env
	files, err := opts.files()
	if err != nil {
		return Image{}, err
	}
	binary, err := os.ReadFile(guest)
	if err != nil {
		return Image{}, fmt.Errorf("read the guest binary: %w", err)
	}
	id := "host-" + digest(binary, roots, files, opts.Files)
	img := Image{ID: id, RootFS: filepath.Join(dir, id), Guest: guestDir + "/guest", Env: opts.Env}
	if len(roots) > 0 {
		img.TrustID = opts.Trust.ID
	}
	if _, err := os.Stat(img.RootFS); err == nil {
		return img, nil
	}
	temp := filepath.Join(dir, "."+id)
	if err := discard(temp); err != nil {
		return Image{}, err
	}
	b := builder{root: temp, uid: uidBase}
	if len(roots) > 0 {
		b.skip = etcStores
	}
	b.host(binary, files)
	for p, text := range opts.Files {
		b.store(p, []byte(text))
	}
	b.trust(roots)
	if b.err != nil {
		discard(temp)
		return Image{}, fmt.Errorf("assemble the host image: %w", b.err)
	}
	if err := os.Rename(temp, img.RootFS); err != nil {
		return Image{}, fmt.Errorf("finish the host image: %w", err)
	}
	return img, nil
}

// digest names what Airlock puts into an image.
func digest(guest []byte, roots []*x509.Certificate, files ...map[string]string) string {
	h := sha256.New()
	part := func(data []byte) { // no two lists of parts are the same bytes
		sum := sha256.Sum256(data)
		h.Write(sum[:])
	}
	part(guest)
	for _, cert := range roots {
		part(cert.Raw)
	}
	for _, set := range files {
		part(nil)
		for _, name := range slices.Sorted(maps.Keys(set)) {
			part([]byte(name))
			part([]byte(set[name]))
		}
	}
	return hex.EncodeToString(h.Sum(nil)[:8])
}

// discard removes a half-made image without ever walking into a bind mount.
func discard(root string) error {
	if _, err := os.Lstat(root); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return fmt.Errorf("look for mounts: %w", err)
	}
	lines := strings.Split(string(mounts), "\n")
	slices.Reverse(lines) // the newest first
	for _, line := range lines {
		if f := strings.Fields(line); len(f) > 4 && strings.HasPrefix(f[4], root+"/") {
			if err := unix.Unmount(f[4], unix.MNT_DETACH); err != nil {
				return fmt.Errorf("unmount %s: %w", f[4], err)
			}
		}
	}
	if err := os.RemoveAll(root); err != nil {
		return fmt.Errorf("remove a half-made image: %w", err)
	}
	return nil
}

// builder makes a tree; after the first error it does nothing more.
type builder struct {
	root    string
	uid     int      // of root inside
	skip    []string // is not copied
	covered []string // files of /usr that others were laid over
	err     error
}

func (b *builder) do(err error) {
	if b.err == nil {
		b.err = err
	}
}

func (b *builder) path(p string) string { return filepath.Join(b.root, p) }

func (b *builder) mkdir(p string, mode os.FileMode, owner int) {
	if b.err != nil {
		return
	}
	b.do(os.MkdirAll(b.path(p), 0o755))
	b.do(os.Lchown(b.path(p), b.uid+owner, b.uid+owner))
	b.do(os.Chmod(b.path(p), mode))
}

func (b *builder) write(p string, data []byte, mode os.FileMode, owner int) {
	if b.err != nil {
		return
	}
	b.do(os.WriteFile(b.path(p), data, 0o600))
	b.do(os.Lchown(b.path(p), b.uid+owner, b.uid+owner))
	b.do(os.Chmod(b.path(p), mode)) // after chown, which clears setuid
}

func (b *builder) symlink(target, p string) {
	if b.err != nil {
		return
	}
	b.do(os.Symlink(target, b.path(p)))
	b.do(os.Lchown(b.path(p), b.uid, b.uid))
}

func (b *builder) host(guest []byte, files map[string]string) {
	b.mkdir("", 0o755, 0)
	for _, d := range []string{"/usr", "/etc", "/home", "/var", "/var/lib", "/var/log", "/var/cache", "/opt", "/srv", "/mnt", "/media", "/run", "/proc", "/sys", "/dev", guestDir, guestDir + "/bin"} {
		b.mkdir(d, 0o755, 0)
	}
	b.mkdir("/root", 0o700, 0)
	b.mkdir("/tmp", 0o777|os.ModeSticky, 0)
	b.mkdir("/var/tmp", 0o777|os.ModeSticky, 0)
	b.mkdir("/home/user", 0o755, 1000)
	// gVisor lays a tmpfs, which is charged as memory, over an empty /tmp.
	b.write("/tmp/.airlock", nil, 0o444, 0)
	b.write(guestDir+"/guest", guest, 0o755, 0)
	b.write(guestDir+"/bin/sudo", guest, 0o755|os.ModeSetuid, 0)
	if target := firstOf("/usr/bin/python3", "/usr/local/bin/python3"); target != "" {
		b.symlink(target, guestDir+"/bin/python")
	}
	for _, name := range []string{"go", "gofmt"} { // Go's own archive is unpacked beside every PATH
		if target := firstOf("/usr/local/go/bin/"+name, "/usr/lib/go/bin/"+name); target != "" && firstOf("/usr/local/bin/"+name, "/usr/bin/"+name) == "" {
			b.symlink(target, guestDir+"/bin/"+name)
		}
	}
	for name, text := range files {
		b.write("/etc/"+name, []byte(text), 0o644, 0)
	}
	b.symlink("/proc/self/mounts", "/etc/mtab")
	b.etc()
	b.packages()
	b.toolchain()
}

func firstOf(paths ...string) string {
	for _, p := range paths {
		if _, err := os.Stat(p); err == nil {
			return p
		}
	}
	return ""
}

// toolchain shows /usr, and /bin, /sbin, /lib* where they are not links into it.
func (b *builder) toolchain() {
	if b.err != nil {
		return
	}
	b.show("/usr")
	links, err := filepath.Glob("/lib*")
	b.do(err)
	for _, p := range append(links, "/bin", "/sbin") {
		info, err := os.Lstat(p)
		if err != nil || b.err != nil {
			continue
		}
		if info.Mode()&fs.ModeSymlink != 0 {
			target, err := os.Readlink(p)
			b.do(err)
			b.symlink(target, p)
		} else if info.IsDir() {
			b.mkdir(p, 0o755, 0)
			b.show(p)
		}
	}
	// A sudo of the machine is owned by a user that does not exist inside.
	for _, p := range []string{"/usr/bin/sudo", "/usr/local/bin/sudo"} {
		if info, err := os.Lstat(p); err == nil && info.Mode().IsRegular() && b.err == nil {
			b.do(unix.Mount(b.path(guestDir+"/bin/sudo"), b.path(p), "", unix.MS_BIND, ""))
		}
	}
}

// show shows a directory of the machine.
func (b *builder) show(p string) { b.mount(p, p) }

// bind shows a file or directory of the image in another place of it.
func (b *builder) bind(from, p string) { b.mount(b.path(from), p) }

func (b *builder) mount(from, p string) {
	if b.err != nil {
		return
	}
	if err := unix.Mount(from, b.path(p), "", unix.MS_BIND, ""); err != nil {
		b.do(fmt.Errorf("show %s: %w", p, err))
		return
	}
	// The sandbox's overlay takes all writes; this is the wall behind it.
	b.do(unix.Mount("", b.path(p), "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY, ""))
}

// etc copies what is allowed and readable by all.
func (b *builder) etc() {
	for _, pattern := range etcAllowed {
		matches, err := filepath.Glob("/etc/" + pattern)
		b.do(err)
		for _, p := range matches {
			if dir := filepath.Dir(p); dir != "/etc" {
				b.mkdir(dir, 0o755, 0)
			}
			b.copy(p)
		}
	}
}

// dpkgDir is where dpkg keeps what is installed.
const dpkgDir = "/var/lib/dpkg"

// Debian's users and groups that packages count on everywhere, as their own.
const (
	debianUsers  = "/usr/share/base-passwd/passwd.master"
	debianGroups = "/usr/share/base-passwd/group.master"
)

// packages shows apt and dpkg what is installed, so that they add to it and do
// not begin with the C library. What overrides owners of files names users that
// the image does not have, and stays away.
func (b *builder) packages() {
	if _, err := os.Stat(dpkgDir + "/status"); err != nil {
		return
	}
	b.add("/etc/passwd", debianUsers)
	b.add("/etc/group", debianGroups)
	for _, dir := range []string{dpkgDir, dpkgDir + "/info", dpkgDir + "/updates", "/etc/apt", "/etc/apt/apt.conf.d", "/etc/apt/preferences.d"} {
		b.mkdir(dir, 0o755, 0)
	}
	// What it fetches passes the gateway as whoever it is.
	b.write("/etc/apt/apt.conf.d/00airlock", []byte("APT::Sandbox::User \"root\";\n"), 0o644, 0)
	for _, name := range []string{"arch", "status", "diversions", "alternatives", "triggers"} {
		b.copy(dpkgDir + "/" + name)
	}
	if info, err := os.Stat(dpkgDir + "/info"); err == nil && info.IsDir() {
		b.show(dpkgDir + "/info")
	}
}

// add adds the users or groups of a file of the machine that ours does not have.
func (b *builder) add(ours, theirs string) {
	if b.err != nil {
		return
	}
	own, err := os.ReadFile(b.path(ours))
	b.do(err)
	more, err := os.ReadFile(theirs)
	if err != nil {
		return // it is another system
	}
	for line := range strings.Lines(string(more)) {
		name, _, ok := strings.Cut(line, ":")
		if ok && !strings.HasPrefix(string(own), name+":") && !strings.Contains(string(own), "\n"+name+":") {
			own = append(own, line...)
		}
	}
	b.write(ours, own, 0o644, 0)
}

// maxEtcFile bounds a file copied from /etc; certificates and caches are far below.
const maxEtcFile = 16 << 20

func (b *builder) copy(p string) {
	if b.err != nil || slices.Contains(b.skip, p) {
		return
	}
	info, err := os.Lstat(p)
	if err != nil {
		return
	}
	switch mode := info.Mode(); {
	case mode&fs.ModeSymlink != 0:
		target, err := os.Readlink(p)
		b.do(err)
		b.symlink(target, p)
	case mode.IsDir() && mode.Perm()&0o005 == 0o005:
		b.mkdir(p, 0o755, 0)
		entries, err := os.ReadDir(p)
		b.do(err)
		for _, e := range entries {
			b.copy(filepath.Join(p, e.Name()))
		}
	case mode.IsRegular() && mode.Perm()&0o004 != 0 && info.Size() <= maxEtcFile:
		f, err := os.Open(p)
		if err != nil {
			return
		}
		defer f.Close()
		data, err := io.ReadAll(io.LimitReader(f, maxEtcFile))
		b.do(err)
		b.write(p, data, 0o644|mode.Perm()&0o111, 0)
	}
}
