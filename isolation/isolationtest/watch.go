package isolationtest

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"

	"airlock.dev/airlock"
	"airlock.dev/airlock/channel"
)

// watching makes trees on each kind of file system inside while they are
// watched: every path is told once.
func watching(t *testing.T, b *box) {
	for _, dir := range []string{"/home/user", "/tmp", "/dev/shm", "/var/tmp"} {
		t.Run("a watch of "+dir+" has no gap", func(t *testing.T) {
			at := dir + "/watched"
			exec(t, b.mux, channel.StartRequest{Cmd: "/bin/mkdir", Args: []string{"-m", "777", at}})
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			s, next := watch(t, ctx, b, channel.WatchCommand{ID: 1, Path: at, Recursive: true})
			defer s.Close()
			if n := next(); !n.Ready {
				t.Fatalf("%+v %+v", n, n.Error)
			}
			made := make(chan result, 1)
			go func() {
				r, err := tryExec(ctx, b.mux, channel.StartRequest{Cmd: "/bin/bash", Args: []string{"-ec", `
cd ` + at + `
for i in {1..40}; do mkdir -p r$i/a/b; echo > r$i/f; echo > r$i/a/f; echo > r$i/a/b/f; done
mv r1 ../moved; mv ../moved back; mkdir stop`}}, "")
				if err != nil {
					r.err = err.Error()
				}
				made <- r
			}()
			var want, got []string
			for _, r := range append([]string{"back"}, rounds(40)...) {
				want = append(want, r, r+"/a", r+"/a/b", r+"/a/b/f", r+"/a/f", r+"/f")
			}
			for {
				n := next()
				if n.Event == nil {
					t.Fatalf("%+v %+v", n, n.Error)
				}
				if n.Event.Name == "stop" {
					break
				}
				if n.Event.Type == channel.Created {
					got = append(got, n.Event.Name)
				}
			}
			slices.Sort(got)
			slices.Sort(want)
			if !slices.Equal(got, want) {
				t.Errorf("%d were told and %d made:\n%q\n%q", len(got), len(want), got, want)
			}
			if r := <-made; r.end.ExitCode != 0 || r.err != "" {
				t.Errorf("%+v", r)
			}
		})
	}
	t.Run("a watch needs the right to read", func(t *testing.T) {
		exec(t, b.mux, channel.StartRequest{User: "root", Cmd: "/bin/bash", Args: []string{"-ec", "mkdir -m 711 /tmp/shut; ln -s / /tmp/shut/link"}})
		for path, code := range map[string]airlock.Code{"/tmp/shut": airlock.Denied, "/tmp/shut/none": airlock.NotFound, "/etc/passwd": airlock.Invalid} {
			s, next := watch(t, t.Context(), b, channel.WatchCommand{ID: 1, Path: path})
			if n := next(); n.Error == nil || n.Error.Code != code {
				t.Errorf("%s: %+v %+v", path, n, n.Error)
			}
			s.Close()
		}
	})
}

func rounds(n int) []string {
	all := make([]string, n)
	for i := range all {
		all[i] = fmt.Sprint("r", i+1)
	}
	return all
}

// watch opens the watches of the default user and adds one.
func watch(t *testing.T, ctx context.Context, b *box, c channel.WatchCommand) (*channel.Stream, func() channel.WatchNote) {
	t.Helper()
	s, err := b.mux.Open(ctx, channel.MethodWatch, channel.WatchRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if err := channel.SendJSON(ctx, s, channel.TagInput, c); err != nil {
		t.Fatal(err)
	}
	return s, func() channel.WatchNote {
		t.Helper()
		_, body, err := s.Recv(ctx)
		var n channel.WatchNote
		if err == nil {
			err = json.Unmarshal(body, &n)
		}
		if err != nil {
			t.Fatalf("%v", strings.TrimSpace(err.Error()))
		}
		return n
	}
}
