package guest

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	osexec "os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"airlock.dev/airlock"
	"airlock.dev/airlock/channel"
	"golang.org/x/sys/unix"
)

// looks are the watches of one stream.
type looks struct {
	*host
	s    *channel.Stream
	last uint32
}

func (h *host) looks() *looks {
	l := &looks{host: h, s: h.open(channel.MethodWatch, channel.WatchRequest{})}
	h.t.Cleanup(l.s.Close)
	return l
}

func (l *looks) command(c channel.WatchCommand) {
	l.t.Helper()
	if err := channel.SendJSON(l.ctx(), l.s, channel.TagInput, c); err != nil {
		l.t.Fatal(err)
	}
}

func (l *looks) note() channel.WatchNote {
	l.t.Helper()
	tag, body, err := l.s.Recv(l.ctx())
	if err != nil {
		l.t.Fatal(err)
	}
	var n channel.WatchNote
	if err := json.Unmarshal(body, &n); tag != channel.TagReply || err != nil {
		l.t.Fatalf("%d, %q, %v", tag, body, err)
	}
	return n
}

func (l *looks) add(c channel.WatchCommand) uint32 {
	l.t.Helper()
	l.last++
	c.ID = l.last
	l.command(c)
	if n := l.note(); n.ID != c.ID || !n.Ready {
		l.t.Fatalf("%+v: %+v %+v", c, n, n.Error)
	}
	return c.ID
}

// until returns what happens up to the event or end that stop names.
func (l *looks) until(stop string) []string {
	l.t.Helper()
	var all []string
	for {
		n := l.note()
		said := "end"
		switch {
		case n.Event != nil:
			said = string(n.Event.Type) + " " + n.Event.Name
		case n.Error != nil:
			said = "error " + string(n.Error.Code)
		}
		all = append(all, said)
		if said == stop {
			return all
		}
	}
}

func (l *looks) sh(script string) {
	l.t.Helper()
	cmd := osexec.Command("/bin/bash", "-ec", script)
	cmd.Dir = l.home
	if out, err := cmd.CombinedOutput(); err != nil {
		l.t.Fatalf("%s: %v\n%s", script, err, out)
	}
}

func TestWatch(t *testing.T) {
	h := start(t)
	long := strings.Repeat("n", 255)
	for _, c := range []struct {
		name      string
		before    string
		recursive bool
		script    string // "touch w/stop" comes after it
		want      string
	}{
		{"create, write, mode, remove", "mkdir w", false, "echo x > w/a; chmod 600 w/a; rm w/a", "create a, write a, chmod a, remove a"},
		{"rename", "mkdir w; touch w/a", false, "mv w/a w/b", "rename a, create b"},
		{"in and out", "mkdir w o; touch o/a", false, "mv o/a w/a; mv w/a o/a", "create a, rename a"},
		{"not below", "mkdir -p w/s", false, "touch w/s/a; mkdir w/s/d; rmdir w/s/d", ""},
		{"below", "mkdir -p w/s", true, "touch w/s/a; rm w/s/a", "create s/a, chmod s/a, remove s/a"},
		{"its own mode", "mkdir w", false, "chmod 700 w", "chmod ."},
		{"a tree moved in, and within", "mkdir -p w o/t/u; touch o/t/u/f", true, "mv o/t w/t; sleep .2; mv w/t w/v; sleep .2; echo x > w/v/u/f",
			"create t, create t/u, create t/u/f, rename t, create v, create v/u, create v/u/f, write v/u/f"},
		{"a tree moved out", "mkdir -p w/t/u o", true, "mv w/t o/t; sleep .2; touch o/t/u/f", "rename t"},
		{"a tree removed and made anew", "mkdir -p w/t/u", true, "rm -r w/t; mkdir -p w/t; sleep .2; mkdir w/t/x", "remove t/u, remove t, create t, create t/x"},
		{"links are not followed", "mkdir -p w o", true, "ln -s ../o w/l; sleep .2; touch o/f", "create l"},
		{"odd names", "mkdir w", false, `mkdir w/$'a\nb' 'w/-rf' 'w/"%41' w/🜁 w/` + long + ` w/$'\xff'`,
			"create a\nb, create -rf, create \"%41, create 🜁, create " + long + ", create \uFFFD"},
	} {
		t.Run(c.name, func(t *testing.T) {
			l := &looks{host: h}
			l.sh("rm -rf w o; " + c.before)
			l = h.looks()
			l.add(channel.WatchCommand{Path: "w", Recursive: c.recursive})
			l.sh(c.script)
			l.sh("mkdir w/stop")
			// What is written at once may be told in one piece or in two.
			got := strings.Join(slices.Compact(l.until("create stop")), ", ")
			want := strings.TrimPrefix(c.want+", create stop", ", ")
			if got != want {
				t.Errorf("%q\nwant %q", got, want)
			}
		})
	}
}

func TestWatchEntry(t *testing.T) {
	h := start(t)
	l := h.looks()
	l.sh("mkdir w")
	l.add(channel.WatchCommand{Path: "~/w", Entry: true})
	l.sh("echo text > w/a; rm w/a")
	for {
		n := l.note()
		switch {
		case n.Event.Type == channel.Removed && n.Event.Entry == nil && n.Event.Name == "a":
			return
		case n.Event.Type == channel.Removed, n.Event.Entry != nil && (n.Event.Entry.Path != h.home+"/w/a" || n.Event.Entry.Size > 5):
			t.Fatalf("%+v %+v", n.Event, n.Event.Entry)
		}
	}
}

// TestWatchUpload tells of uploads by their own names only.
func TestWatchUpload(t *testing.T) {
	h := start(t)
	l := h.looks()
	l.sh("mkdir -m 777 w")
	l.add(channel.WatchCommand{Path: "w"})
	for _, data := range []string{"one", "two"} {
		if _, err := h.write("", "w/a", strings.NewReader(data)); err != nil {
			t.Fatal(err)
		}
	}
	l.sh("mkdir w/stop")
	if got := strings.Join(l.until("create stop"), ", "); got != "create a, write a, create stop" && got != "create a, write a, write a, create stop" {
		t.Errorf("%q", got)
	}
}

func TestWatchEnds(t *testing.T) {
	h := start(t)
	for script, want := range map[string]string{"rmdir w": "remove ., end", "mv w v": "rename ., end"} {
		l := h.looks()
		l.sh("mkdir w")
		l.add(channel.WatchCommand{Path: "w", Recursive: true})
		l.sh(script)
		if got := strings.Join(l.until("end"), ", "); got != want {
			t.Errorf("%s: %q, want %q", script, got, want)
		}
		l.sh("mkdir -p w")
		l.add(channel.WatchCommand{Path: "w"}) // the stream goes on
		l.sh("touch w/x; rm -r w")
		l.until("end")
	}
	l := h.looks()
	l.sh("touch file; ln -s loop loop")
	for path, want := range map[string]airlock.Code{"missing": airlock.NotFound, "file": airlock.Invalid, "file/x": airlock.Invalid, "loop": airlock.Invalid, "a\x00b": airlock.Invalid} {
		l.last++
		l.command(channel.WatchCommand{ID: l.last, Path: path})
		if n := l.note(); n.Error == nil || n.Error.Code != want || n.Error.Message == "" {
			t.Errorf("%s: %+v %+v", path, n, n.Error)
		}
	}
	for what, send := range map[string]func(l *looks) error{
		"an id twice": func(l *looks) error {
			return channel.SendJSON(l.ctx(), l.s, channel.TagInput, channel.WatchCommand{ID: 0, Path: "."})
		},
		"no command":      func(l *looks) error { return l.s.Send(l.ctx(), channel.TagInput, []byte("x")) },
		"another message": func(l *looks) error { return l.s.Send(l.ctx(), channel.TagData, []byte("{}")) },
	} {
		l := h.looks()
		if err := send(l); err != nil {
			t.Fatal(err)
		}
		if _, _, err := l.s.Recv(l.ctx()); code(err) != airlock.Invalid {
			t.Errorf("%s: %v", what, err)
		}
	}
}

// TestWatchDeep ends only the watch whose paths get too long.
func TestWatchDeep(t *testing.T) {
	h := start(t)
	l := h.looks()
	l.sh("mkdir w other")
	deep := l.add(channel.WatchCommand{Path: "w", Recursive: true})
	other := l.add(channel.WatchCommand{Path: "other"})
	l.sh("cd w; n=$(printf 'n%.0s' {1..200}); for i in {1..25}; do mkdir $n; cd $n; done; mkdir " + h.home + "/other/x")
	for {
		n := l.note()
		if n.Event != nil && len(n.Event.Name) > watchPathMost {
			t.Fatalf("a name of %d bytes", len(n.Event.Name))
		}
		if n.ID == deep && n.Error != nil {
			if n.Error.Code != airlock.Exhausted {
				t.Errorf("%+v", n.Error)
			}
			deep = 0
		}
		if n.ID == other {
			if n.Event == nil || n.Event.Name != "x" {
				t.Errorf("the other: %+v", n)
			}
			other = 0
		}
		if deep == 0 && other == 0 {
			return
		}
	}
}

// TestWatchNoGap makes trees as fast as it can: each path is told once.
func TestWatchNoGap(t *testing.T) {
	h := start(t)
	l := h.looks()
	l.sh("mkdir w")
	l.add(channel.WatchCommand{Path: "w", Recursive: true})
	l.add(channel.WatchCommand{Path: "w", Recursive: true}) // shares all descriptors
	const rounds = 200
	var want []string
	for i := range rounds {
		at := fmt.Sprint("r", i)
		want = append(want, at)
		for _, name := range []string{"a", "b", "c", "d"} {
			want = append(want, filepath.Join(at, name+".txt"))
			at = filepath.Join(at, name)
			want = append(want, at)
		}
	}
	made := make(chan error, 1)
	go func() {
		for i := range rounds {
			at := filepath.Join(h.home, "w", fmt.Sprint("r", i))
			err := os.MkdirAll(at+"/a/b/c/d", 0o755)
			for _, name := range []string{"a", "b", "c", "d"} {
				if err == nil {
					err = os.WriteFile(filepath.Join(at, name+".txt"), []byte("x"), 0o644)
				}
				at = filepath.Join(at, name)
			}
			if err != nil {
				made <- err
				return
			}
		}
		made <- os.Mkdir(h.home+"/w/stop", 0o755)
	}()
	told := map[uint32][]string{}
	for stops := 0; stops < 2; {
		n := l.note()
		if n.Event == nil {
			t.Fatalf("%+v %+v", n, n.Error)
		}
		if n.Event.Type == channel.Created {
			if n.Event.Name == "stop" {
				stops++
				continue
			}
			told[n.ID] = append(told[n.ID], n.Event.Name)
		}
	}
	if err := <-made; err != nil {
		t.Fatal(err)
	}
	slices.Sort(want)
	for id, got := range told {
		slices.Sort(got)
		if !slices.Equal(got, want) {
			counts := map[string]int{}
			for _, name := range got {
				counts[name]++
			}
			for _, name := range want {
				if counts[name] != 1 {
					t.Errorf("watch %d: %s was told %d times", id, name, counts[name])
				}
			}
			t.Fatalf("watch %d: %d paths were told and %d made", id, len(got), len(want))
		}
	}
}

// TestWatchMany has a thousand watches of one stream, of the same directory
// and of their own.
func TestWatchMany(t *testing.T) {
	h := start(t)
	l := h.looks()
	l.sh("mkdir same; for i in {1..500}; do mkdir w$i; done")
	for i := 1; i <= 500; i++ {
		l.add(channel.WatchCommand{Path: "same"})
		l.add(channel.WatchCommand{Path: fmt.Sprint("w", i)})
	}
	l.sh("mkdir same/x; for i in {1..500}; do mkdir w$i/x; done")
	told := map[uint32]bool{}
	for len(told) < 1000 {
		n := l.note()
		if n.Event == nil || n.Event.Name != "x" || told[n.ID] {
			t.Fatalf("%+v %+v", n, n.Event)
		}
		told[n.ID] = true
	}
	for i := uint32(1); i < 1000; i++ {
		l.command(channel.WatchCommand{ID: i, Remove: true})
	}
	id := l.add(channel.WatchCommand{Path: "same"}) // those before are gone by now
	l.sh("mkdir same/y w500/y")
	got := map[uint32]bool{l.note().ID: true, l.note().ID: true}
	if !got[id] || !got[1000] {
		t.Errorf("after the removal: %v", got)
	}
}

// TestWatchOverflow loses nothing silently.
func TestWatchOverflow(t *testing.T) {
	h := start(t)
	l := h.looks()
	l.sh("mkdir w")
	l.add(channel.WatchCommand{Path: "w"})
	for i := 0; ; i++ { // nobody reads the stream meanwhile
		name := fmt.Sprintf("%s/w/%0200d", h.home, i)
		if err := os.WriteFile(name, nil, 0o644); err != nil {
			t.Fatal(err)
		}
		os.Remove(name)
		if i == 30_000 {
			break
		}
	}
	deadline := time.Now().Add(time.Minute)
	for time.Now().Before(deadline) {
		if _, _, err := l.s.Recv(l.ctx()); err != nil {
			if code(err) != airlock.Exhausted || !strings.Contains(err.Error(), "watch again") {
				t.Errorf("%v", err)
			}
			return
		}
	}
	t.Error("nothing says that events were lost")
}

func FuzzParseChange(f *testing.F) {
	record := func(length uint32, rest string) []byte {
		b := make([]byte, unix.SizeofInotifyEvent)
		b[0], b[12] = 1, byte(length)
		return append(b, rest...)
	}
	f.Add(record(0, ""))
	f.Add(record(8, "name\x00\x00\x00\x00"))
	f.Add(record(255, "short"))
	f.Fuzz(func(t *testing.T, b []byte) {
		c, size, ok := parseChange(b)
		if ok && (size < unix.SizeofInotifyEvent || size > len(b) || strings.Contains(c.name, "\x00")) {
			t.Errorf("%+v, %d of %d", c, size, len(b))
		}
		if ok && !bytes.Contains(b, []byte(c.name)) {
			t.Errorf("%q is not there", c.name)
		}
	})
}
