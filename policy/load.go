package policy

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"syscall"
)

// The bounds of a directory of policies.
const (
	maxFiles = 5000
	maxTests = 1 << 20  // bytes of one file of tests
	maxBytes = 64 << 20 // of all files together
)

// Dir is a directory of the host, for Load. Nothing in it makes Load wait:
// what is no regular file is not opened, and if it becomes a FIFO or a device
// just then, opening it does not wait for its other end.
type Dir string

// Open opens a file or a directory for reading.
func (d Dir) Open(name string) (fs.File, error) {
	path, err := d.path("open", name)
	if err != nil {
		return nil, err
	}
	return os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
}

// Stat says what is there, behind links, and opens nothing.
func (d Dir) Stat(name string) (fs.FileInfo, error) {
	path, err := d.path("stat", name)
	if err != nil {
		return nil, err
	}
	return os.Stat(path)
}

func (d Dir) path(op, name string) (string, error) {
	if !fs.ValidPath(name) {
		return "", &fs.PathError{Op: op, Path: name, Err: fs.ErrInvalid}
	}
	return filepath.Join(string(d), filepath.FromSlash(name)), nil
}

// Policies is an operator's directory, loaded as a whole: what each team may
// do at most, and the tests that say so. It never changes; a reload makes a
// new one, and one that fails leaves the old one as it is.
type Policies struct {
	standard *Set // of default.cedar, else the profile; with all.cedar
	teams    map[string]*Set
	tests    []Test
	files    map[string][]byte
	digest   string
}

// Builtin is what holds without a directory: the profile DefaultProfile for
// every team.
func Builtin() *Policies {
	standard := profiles()[DefaultProfile]
	return &Policies{standard: standard, digest: standard.digest}
}

// Files are those that Load read, by their paths and byte for byte; none if
// there was no directory. They must not be changed.
func (p *Policies) Files() map[string][]byte { return p.files }

// Digest names all that Load read: it is the SHA-256, in lower-case
// hexadecimal, of a line for each file, sorted by path, as sha256sum writes
// it. Without a directory it is the digest of the set.
func (p *Policies) Digest() string { return p.digest }

func digestOf(files map[string][]byte) string {
	all := sha256.New()
	for _, name := range slices.Sorted(maps.Keys(files)) {
		fmt.Fprintf(all, "%x  %s\n", sha256.Sum256(files[name]), name)
	}
	return hex.EncodeToString(all.Sum(nil))
}

// For returns the ceiling of a team: all.cedar together with the team's own
// file, or with default.cedar if it has none.
func (p *Policies) For(team string) *Set {
	if s := p.teams[team]; s != nil {
		return s
	}
	return p.standard
}

// Teams are the teams with a file of their own, sorted.
func (p *Policies) Teams() []string {
	var names []string
	for name := range p.teams {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}

// Tests are those of the directory, in the order of the files.
func (p *Policies) Tests() []Test { return p.tests }

var teamFile = regexp.MustCompile(`^([a-z0-9][a-z0-9-]{0,38})\.cedar$`)

// Load reads a directory: all.cedar, default.cedar, teams/NAME.cedar and
// tests/*.yaml. The error is Problems, all that is wrong in all files: a file
// that would be overlooked is one of them. What begins with a dot, the
// directory profiles/, the schema and texts (.md, .txt) are for readers and
// are not looked at. Links are followed; what is no regular file in the end is
// refused and not opened.
func Load(dir fs.FS) (*Policies, error) {
	l := loader{dir: dir, read: map[string][]byte{}}
	entries := l.list(".")
	var all, standard []*policy
	hasDefault := false
	teams := map[string][]*policy{}
	for _, e := range entries {
		switch name := e.Name(); {
		case name == "all.cedar":
			all = l.policies(name)
			for _, p := range all {
				if p.permits {
					l.problems = append(l.problems, Problem{File: name, Line: p.line, Policy: p.id, Message: "all.cedar has a permit, which would widen every team",
						Hint: "write forbids in it, and permits in default.cedar and teams/NAME.cedar"})
				}
			}
		case name == "default.cedar":
			hasDefault, standard = true, l.policies(name)
		case name == "teams":
			for _, f := range l.list(name) {
				file := path.Join(name, f.Name())
				m := teamFile.FindStringSubmatch(f.Name())
				if m == nil {
					l.unread(file, "name it NAME.cedar after a team: 1 to 39 of a-z, 0-9 and -")
					continue
				}
				teams[m[1]] = l.policies(file)
			}
		case name == "tests":
			for _, f := range l.list(name) {
				file := path.Join(name, f.Name())
				if !strings.HasSuffix(file, ".yaml") {
					l.unread(file, "name it NAME.yaml")
					continue
				}
				l.readTests(file)
			}
		case name == "profiles", strings.HasSuffix(name, ".md"), strings.HasSuffix(name, ".txt"), strings.HasSuffix(name, ".cedarschema"):
		default:
			l.unread(name, "a directory of policies has all.cedar, default.cedar, teams/NAME.cedar and tests/NAME.yaml")
		}
	}
	p := &Policies{teams: map[string]*Set{}, tests: l.tests, files: l.read, digest: digestOf(l.read)}
	if len(l.problems) == 0 {
		if hasDefault {
			p.standard = l.set("default.cedar", standard, all)
		} else {
			p.standard = l.set("profile "+DefaultProfile, profiles()[DefaultProfile].policies, all)
		}
		for name, own := range teams {
			p.teams[name] = l.set("teams/"+name+".cedar", own, all)
		}
	}
	if len(l.problems) > 0 {
		slices.SortStableFunc(l.problems, func(a, b Problem) int {
			return cmp.Or(strings.Compare(a.File, b.File), cmp.Compare(a.Line, b.Line), cmp.Compare(a.Column, b.Column))
		})
		if len(l.problems) > maxProblems {
			l.problems = l.problems[:maxProblems]
		}
		return nil, l.problems
	}
	return p, nil
}

// loader collects what is wrong.
type loader struct {
	dir      fs.FS
	files    int // that were asked for
	bytes    int
	read     map[string][]byte
	tests    []Test
	problems Problems
}

func (l *loader) problem(file, message, hint string) {
	l.problems = append(l.problems, Problem{File: file, Message: message, Hint: hint})
}

func (l *loader) unread(file, hint string) {
	l.problem(file, "nothing reads this file", hint)
}

// place names what is meant by a path: the directory itself by its own, if it
// says it. An os.DirFS is that path, and leaves it out of its errors.
func (l *loader) place(name string) string {
	if dir := reflect.ValueOf(l.dir); name == "." && dir.Kind() == reflect.String {
		return dir.String()
	}
	return name
}

// cause is an error without the path, which is said already.
func cause(err error) string {
	var path *fs.PathError
	if errors.As(err, &path) {
		err = path.Err
	}
	return err.Error()
}

// list returns the entries of a directory without hidden ones.
func (l *loader) list(name string) []fs.DirEntry {
	info, err := fs.Stat(l.dir, name)
	if err == nil && !info.IsDir() {
		err = errors.New("it is no directory")
	}
	var entries []fs.DirEntry
	if err == nil {
		entries, err = fs.ReadDir(l.dir, name)
	}
	if err != nil {
		l.problem(l.place(name), "cannot be read: "+cause(err), "make it a directory that Airlock may read")
		return nil
	}
	return slices.DeleteFunc(entries, func(e fs.DirEntry) bool { return strings.HasPrefix(e.Name(), ".") })
}

// content returns a file's bytes and whether it could be read.
func (l *loader) content(file string, most int) ([]byte, bool) {
	if l.files++; l.files > maxFiles {
		if l.files == maxFiles+1 {
			l.problem(file, fmt.Sprintf("more than %d files", maxFiles), "use fewer")
		}
		return nil, false
	}
	text, err := readRegular(l.dir, file, most)
	if err != nil {
		l.problem(file, "cannot be read: "+cause(err), "make it a file that Airlock may read")
		return nil, false
	}
	if len(text) > most {
		l.problem(file, fmt.Sprintf("more than %d bytes", most), "use several files")
		return nil, false
	}
	if l.bytes += len(text); l.bytes > maxBytes {
		if l.bytes-len(text) <= maxBytes {
			l.problem(file, fmt.Sprintf("more than %d bytes in all files together", maxBytes), "use fewer or smaller ones")
		}
		return nil, false
	}
	l.read[file] = text
	return text, true
}

// readRegular returns what a regular file has, one byte more than most at the
// most.
func readRegular(dir fs.FS, name string, most int) ([]byte, error) {
	regular := func(info fs.FileInfo, err error) error {
		if err == nil && !info.Mode().IsRegular() {
			err = errors.New("it is no file")
		}
		return err
	}
	if err := regular(fs.Stat(dir, name)); err != nil {
		return nil, err
	}
	f, err := dir.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if err := regular(f.Stat()); err != nil { // another may be there by now
		return nil, err
	}
	return io.ReadAll(io.LimitReader(f, int64(most)+1))
}

func (l *loader) policies(file string) []*policy {
	text, ok := l.content(file, maxText)
	if !ok {
		return nil
	}
	policies, problems := parse(file, text)
	l.problems = append(l.problems, problems...)
	return policies
}

func (l *loader) readTests(file string) {
	text, ok := l.content(file, maxTests)
	if !ok {
		return
	}
	tests, err := ParseTests(file, text)
	var problems Problems
	if errors.As(err, &problems) {
		l.problems = append(l.problems, problems...)
	}
	l.tests = append(l.tests, tests...)
}

// set joins files. A doubled id is the only thing that can still be wrong.
func (l *loader) set(name string, parts ...[]*policy) *Set {
	s, err := newSet(name, slices.Concat(parts...))
	var problems Problems
	if errors.As(err, &problems) {
		l.problems = append(l.problems, problems...)
	}
	return s
}
