package guest

import (
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"airlock.dev/airlock"
)

// account is a line of passwd with the groups it is in.
type account struct {
	name   string
	uid    int
	gid    int
	home   string
	shell  string
	groups []uint32
}

// accounts reads users and groups from a directory that holds passwd and
// group: /etc, which belongs to the sandbox's root and is trusted for nothing
// but names.
type accounts string

const maxAccountsFile = 1 << 20

func (a accounts) lines(file string, least int, each func(f []string) bool) {
	f, err := os.OpenFile(filepath.Join(string(a), file), os.O_RDONLY|nonblock, 0)
	if err != nil {
		return
	}
	defer f.Close()
	text, _ := io.ReadAll(io.LimitReader(f, maxAccountsFile))
	for line := range strings.Lines(string(text)) {
		fields := strings.Split(strings.TrimSuffix(line, "\n"), ":")
		if len(fields) >= least && !each(fields) {
			return
		}
	}
}

// lookup finds a user by name; "" is "user".
func (a accounts) lookup(name string) (account, error) {
	if name == "" {
		name = "user"
	}
	var u account
	found := false
	a.lines("passwd", 6, func(f []string) bool {
		if f[0] != name {
			return true
		}
		uid, err1 := strconv.ParseUint(f[2], 10, 31)
		gid, err2 := strconv.ParseUint(f[3], 10, 31)
		if err1 != nil || err2 != nil {
			return true
		}
		u = account{name: name, uid: int(uid), gid: int(gid), home: f[5]}
		if len(f) > 6 {
			u.shell = f[6]
		}
		found = true
		return false
	})
	if !found {
		return account{}, airlock.Errorf(airlock.Unauthenticated, "invalid username: '%s'", clip(name))
	}
	if !filepath.IsAbs(u.home) {
		u.home = "/"
	}
	if u.shell == "" {
		u.shell = "/bin/sh"
	}
	u.groups = append(u.groups, uint32(u.gid))
	a.lines("group", 4, func(f []string) bool {
		gid, err := strconv.ParseUint(f[2], 10, 31)
		if err == nil && int(gid) != u.gid && contains(f[3], name) {
			u.groups = append(u.groups, uint32(gid))
		}
		return len(u.groups) < 64
	})
	return u, nil
}

func contains(list, name string) bool {
	for member := range strings.SplitSeq(list, ",") {
		if member == name {
			return true
		}
	}
	return false
}

// groupID finds a group by name or number.
func (a accounts) groupID(name string) (int, bool) {
	gid := -1
	a.lines("group", 3, func(f []string) bool {
		if n, err := strconv.ParseUint(f[2], 10, 31); err == nil && f[0] == name {
			gid = int(n)
			return false
		}
		return true
	})
	if gid < 0 {
		if n, err := strconv.ParseUint(name, 10, 31); err == nil {
			gid = int(n)
		}
	}
	return gid, gid >= 0
}

// names maps the ids in a file, passwd or group, to their names.
func (a accounts) names(file string) map[uint32]string {
	m := map[uint32]string{}
	a.lines(file, 3, func(f []string) bool {
		if id, err := strconv.ParseUint(f[2], 10, 32); err == nil {
			if _, taken := m[uint32(id)]; !taken {
				m[uint32(id)] = f[0]
			}
		}
		return true
	})
	return m
}

// absolute makes the path that a user means by p.
func (u account) absolute(p string) (string, error) {
	switch {
	case p == "":
		return "", airlock.Invalidf("path", "give a path", "the path is empty")
	case strings.IndexByte(p, 0) >= 0:
		return "", airlock.Invalidf("path", "remove it", "the path has a NUL byte")
	case p == "~":
		p = u.home
	case strings.HasPrefix(p, "~/"):
		p = filepath.Join(u.home, p[2:])
	case !filepath.IsAbs(p):
		p = filepath.Join(u.home, p)
	}
	return filepath.Clean(p), nil
}

// clip keeps what a caller said short enough to be said back.
func clip(s string) string {
	if len(s) > 1024 {
		return s[:1024] + "…"
	}
	return s
}
