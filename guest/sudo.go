package guest

import (
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// A sandbox has no passwords and its user may become root: root there is
// nobody outside. This is the little of sudo that scripts use.

type sudoArgs struct {
	user, group string
	preserve    bool     // -E
	keep        []string // --preserve-env=…
	setHome     bool     // -H
	login       bool     // -i
	shell       bool     // -s
	nothing     bool     // -v, -k, -K without a command
	list        bool     // -l
	dir         string   // -D
	env         []string // VAR=value before the command
	command     []string
}

const sudoUsage = "usage: sudo [-EHinSs] [-u user] [-g group] [-D directory] [VAR=value] [--] [command [argument ...]]\n"

// parseSudo reads the arguments after the program's name. ok is false for
// wrong usage.
func parseSudo(args []string) (s sudoArgs, ok bool) {
	s.user = "root"
	long := map[string]byte{
		"user": 'u', "group": 'g', "preserve-env": 'E', "set-home": 'H', "non-interactive": 'n', "stdin": 'S',
		"login": 'i', "shell": 's', "validate": 'v', "reset-timestamp": 'k', "remove-timestamp": 'K', "list": 'l',
		"prompt": 'p', "chdir": 'D', "background": 'b', "askpass": 'A',
	}
	// apply returns whether flag is known; value is used by those that take one.
	apply := func(flag byte, value string) bool {
		switch flag {
		case 'u':
			s.user = strings.TrimPrefix(value, "#")
		case 'g':
			s.group = strings.TrimPrefix(value, "#")
		case 'D':
			s.dir = value
		case 'E':
			s.preserve = true
		case 'H':
			s.setHome = true
		case 'i':
			s.login = true
		case 's':
			s.shell = true
		case 'v', 'k', 'K':
			s.nothing = true
		case 'l':
			s.list = true
		case 'n', 'S', 'A', 'p', 'C', 'T', 'h', 'r', 't':
		default:
			return false
		}
		return true
	}
	takesValue := func(flag byte) bool { return strings.IndexByte("ugDpCThrt", flag) >= 0 }
	i := 0
loop:
	for ; i < len(args); i++ {
		arg := args[i]
		switch {
		case arg == "--":
			i++
			break loop
		case strings.HasPrefix(arg, "--"):
			name, value, inline := strings.Cut(arg[2:], "=")
			flag, known := long[name]
			switch {
			case !known:
				return s, false
			case flag == 'E' && inline:
				s.keep = append(s.keep, strings.Split(value, ",")...)
				continue
			case takesValue(flag) && !inline:
				if i++; i == len(args) {
					return s, false
				}
				value = args[i]
			case !takesValue(flag) && inline:
				return s, false
			}
			if !apply(flag, value) {
				return s, false
			}
		case len(arg) > 1 && arg[0] == '-':
			for j := 1; j < len(arg); j++ {
				value := ""
				if takesValue(arg[j]) {
					if value = arg[j+1:]; value == "" {
						if i++; i == len(args) {
							return s, false
						}
						value = args[i]
					}
				}
				if !apply(arg[j], value) {
					return s, false
				}
				if takesValue(arg[j]) {
					break
				}
			}
		default:
			break loop
		}
	}
	for ; i < len(args); i++ {
		name, _, assigned := strings.Cut(args[i], "=")
		if !assigned || name == "" || strings.Contains(name, "/") {
			break
		}
		s.env = append(s.env, args[i])
	}
	s.command = append([]string{}, args[i:]...)
	if s.login && s.shell || s.user == "" {
		return s, false
	}
	return s, len(s.command) > 0 || s.login || s.shell || s.nothing || s.list
}

// maxEnvironment bounds /etc/environment.
const maxEnvironment = 64 << 10

// etcEnvironment reads the lines NAME=value of /etc/environment.
func etcEnvironment(path string) []string {
	f, err := os.OpenFile(path, os.O_RDONLY|nonblock, 0)
	if err != nil {
		return nil
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, maxEnvironment))
	if err != nil {
		return nil
	}
	var env []string
	for line := range strings.Lines(string(text)) {
		line = strings.TrimSuffix(line, "\n")
		if name, value, ok := strings.Cut(line, "="); ok && checkEnv(name, value) == nil && !strings.HasPrefix(name, "#") {
			env = append(env, line)
		}
	}
	return env
}

// sudoEnv makes the environment of the command. system is what every process
// has that nothing else is said for.
func sudoEnv(s sudoArgs, system, old []string, caller, target account) []string {
	m := map[string]string{}
	for _, v := range system {
		name, value, _ := strings.Cut(v, "=")
		m[name] = value
	}
	for _, v := range old {
		name, value, _ := strings.Cut(v, "=")
		if s.preserve || name == "TERM" || name == "LANG" || strings.HasPrefix(name, "LC_") || name == "TZ" ||
			name == "COLORTERM" || slices.Contains(s.keep, name) {
			m[name] = value
		}
	}
	if m["HOME"] == "" || s.setHome || s.login {
		m["HOME"] = target.home
	}
	if m["PATH"] == "" || !s.preserve {
		m["PATH"] = defaultPath
	}
	m["USER"], m["LOGNAME"], m["SHELL"] = target.name, target.name, target.shell
	m["SUDO_USER"], m["SUDO_UID"], m["SUDO_GID"] = caller.name, itoa(caller.uid), itoa(caller.gid)
	m["SUDO_COMMAND"] = strings.Join(s.command, " ")
	for _, v := range s.env {
		name, value, _ := strings.Cut(v, "=")
		m[name] = value
	}
	var env []string
	for name, value := range m {
		env = append(env, name+"="+value)
	}
	slices.Sort(env)
	return env
}

// sudoCommand is what is run: the command, or a shell.
func sudoCommand(s sudoArgs, callerShell, targetShell string) []string {
	switch {
	case s.login:
		if len(s.command) == 0 {
			return []string{targetShell, "-l"}
		}
		return []string{targetShell, "-l", "-c", quote(s.command)}
	case s.shell:
		if callerShell == "" {
			callerShell = targetShell
		}
		if len(s.command) == 0 {
			return []string{callerShell}
		}
		return []string{callerShell, "-c", quote(s.command)}
	}
	return s.command
}

func quote(words []string) string {
	quoted := make([]string, len(words))
	for i, w := range words {
		quoted[i] = "'" + strings.ReplaceAll(w, "'", `'\''`) + "'"
	}
	return strings.Join(quoted, " ")
}

// Sudo runs as the program sudo: os.Args are its arguments and the file is
// setuid root. It returns the exit code of a failure.
func Sudo() int {
	fail := func(text string) int {
		os.Stderr.WriteString("sudo: " + text + "\n")
		return 1
	}
	s, ok := parseSudo(os.Args[1:])
	if !ok {
		os.Stderr.WriteString(sudoUsage)
		return 1
	}
	etc := accounts("/etc")
	caller := account{name: "user", uid: os.Getuid(), gid: os.Getgid()}
	caller.name = named(etc.names("passwd"), uint32(caller.uid))
	if s.list {
		os.Stdout.WriteString("User " + caller.name + " may run the following commands:\n    (ALL : ALL) NOPASSWD: ALL\n")
		return 0
	}
	if s.nothing && len(s.command) == 0 && !s.login && !s.shell {
		return 0
	}
	if os.Geteuid() != 0 {
		return fail("this program is not setuid root here")
	}
	target, err := etc.lookup(s.user)
	if err != nil { // a number will do, too
		if target, err = etc.lookup(etc.names("passwd")[atou(s.user)]); err != nil || atou(s.user) == noID {
			return fail("unknown user " + clip(s.user))
		}
	}
	if s.group != "" {
		gid, ok := etc.groupID(s.group)
		if !ok {
			return fail("unknown group " + clip(s.group))
		}
		target.gid = gid
	}
	command := sudoCommand(s, os.Getenv("SHELL"), target.shell)
	env := sudoEnv(s, etcEnvironment("/etc/environment"), os.Environ(), caller, target)
	groups := []int{target.gid}
	for _, gid := range target.groups {
		groups = append(groups, int(gid))
	}
	if err := syscall.Setgroups(groups); err != nil {
		return fail("setgroups: " + err.Error())
	}
	if err := syscall.Setresgid(target.gid, target.gid, target.gid); err != nil {
		return fail("setgid: " + err.Error())
	}
	if err := syscall.Setresuid(target.uid, target.uid, target.uid); err != nil {
		return fail("setuid: " + err.Error())
	}
	if s.login {
		os.Chdir(target.home) // sudo goes on where it is, too
	}
	if s.dir != "" {
		if err := os.Chdir(s.dir); err != nil {
			return fail("unable to change directory to " + clip(s.dir))
		}
	}
	candidates := []string{command[0]}
	if !strings.Contains(command[0], "/") {
		candidates = nil
		for _, v := range env {
			if path, ok := strings.CutPrefix(v, "PATH="); ok {
				for dir := range strings.SplitSeq(path, ":") {
					candidates = append(candidates, filepath.Join(dir, command[0]))
				}
			}
		}
	}
	why := error(unix.ENOENT)
	for _, path := range candidates {
		err := syscall.Exec(path, command, env)
		if err != unix.ENOENT && err != unix.ENOTDIR {
			why = err
		}
	}
	if why == unix.ENOENT {
		return fail(clip(command[0]) + ": command not found")
	}
	return fail(clip(command[0]) + ": " + why.Error())
}

const noID = ^uint32(0)

func atou(s string) uint32 {
	n := uint32(0)
	for _, c := range s {
		if c < '0' || c > '9' || n > 1<<27 {
			return noID
		}
		n = n*10 + uint32(c-'0')
	}
	if s == "" {
		return noID
	}
	return n
}
