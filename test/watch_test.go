package test

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"airlock.dev/airlock"
	"airlock.dev/airlock/api/envd"
	"airlock.dev/airlock/client"
	"connectrpc.com/connect"
)

// filesystem is filesystem.Filesystem of a sandbox, without the client in
// between.
type filesystem struct {
	processes
	rpc envd.FilesystemClient
}

func filesystemOf(t *testing.T, s *running, sb *client.Sandbox) filesystem {
	transport := &http.Transport{}
	t.Cleanup(transport.CloseIdleConnections)
	return filesystem{processes{T: t, header: dataHeader(sb)}, envd.NewFilesystemClient(&http.Client{Transport: transport}, s.url)}
}

type watching struct {
	*connect.ServerStreamForClient[envd.WatchDirResponse]
}

// next returns the next event but keepalives, as text; "" is the end.
func (w watching) next() string {
	for w.Receive() {
		switch m := w.Msg().GetEvent().(type) {
		case *envd.WatchDirResponse_Start:
			return "start"
		case *envd.WatchDirResponse_Filesystem:
			return strings.ToLower(strings.TrimPrefix(m.Filesystem.GetType().String(), "EVENT_TYPE_")) + " " + m.Filesystem.GetName()
		}
	}
	return ""
}

func (f filesystem) watch(ctx context.Context, req *envd.WatchDirRequest, header ...string) (watching, error) {
	stream, err := f.rpc.WatchDir(ctx, ask(f.processes, req, header...))
	if err != nil {
		return watching{}, err
	}
	w := watching{stream}
	if first := w.next(); first != "start" {
		err := w.Err()
		w.Close()
		return watching{}, fmt.Errorf("%q before the start: %w", first, err)
	}
	return w, nil
}

// TestThousandWatchers opens a thousand streams to one sandbox at once.
func TestThousandWatchers(t *testing.T) {
	s := startServer(t)
	sb := create(t, s.as(s.key("default", airlock.Client)), client.CreateRequest{Timeout: 10 * time.Minute})
	must(t, sb, "mkdir w; for i in $(seq 0 99); do mkdir w/$i; done")
	f := filesystemOf(t, s, sb)
	round := func() {
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
		defer cancel()
		const many = 1000
		begun, told := make(chan error, many), make(chan error, many)
		var all sync.WaitGroup
		for i := range many {
			all.Go(func() {
				w, err := f.watch(ctx, &envd.WatchDirRequest{Path: fmt.Sprint("w/", i%100), Recursive: i%2 == 0})
				begun <- err
				if err != nil {
					return
				}
				defer w.Close()
				if got := w.next(); got != "create x" {
					err = fmt.Errorf("watcher %d: %q, %v", i, got, w.Err())
				}
				told <- err
			})
		}
		for range many {
			if err := <-begun; err != nil {
				t.Fatal(err)
			}
		}
		must(t, sb, "for i in $(seq 0 99); do mkdir w/$i/x; done")
		for range many {
			if err := <-told; err != nil {
				t.Fatal(err)
			}
		}
		cancel()
		all.Wait()
		must(t, sb, "rmdir w/*/x")
	}
	round()
	eventually(t, "the streams of the first round close", func() bool { return s.descriptors() < 100 })
	fds, rss := s.descriptors(), s.memory("VmRSS")
	for range 2 {
		round()
	}
	eventually(t, "the server closes its descriptors", func() bool { return s.descriptors() <= fds+100 })
	if grown := s.memory("VmRSS") - rss; grown > 32<<20 {
		t.Errorf("the server's RSS grew by %.1f MB", mb(grown))
	} else {
		t.Logf("descriptors: %d, then %d; RSS %+.1f MB", fds, s.descriptors(), mb(grown))
	}
}

// TestWatch looks for what E2B's own clients do not: bad input and faults.
func TestWatch(t *testing.T) {
	s := startServer(t)
	c := s.as(s.key("default", airlock.Client))
	sb := create(t, c, client.CreateRequest{Timeout: 10 * time.Minute})
	f := filesystemOf(t, s, sb)
	fresh := func(t *testing.T) string {
		t.Helper()
		return strings.TrimSpace(must(t, sb, "mktemp -d -p ."))
	}

	t.Run("refused", func(t *testing.T) {
		must(t, sb, "touch file")
		for path, code := range map[string]connect.Code{
			"missing": connect.CodeNotFound, "file": connect.CodeInvalidArgument, "": connect.CodeInvalidArgument, "a\x00b": connect.CodeInvalidArgument,
			strings.Repeat("x", 5000): connect.CodeInvalidArgument, "/root": connect.CodePermissionDenied,
		} {
			if w, err := f.watch(t.Context(), &envd.WatchDirRequest{Path: path}); connect.CodeOf(err) != code {
				t.Errorf("watch %.20q: %v, %v", path, w, err)
			}
			if r, err := f.rpc.CreateWatcher(t.Context(), ask(f.processes, &envd.CreateWatcherRequest{Path: path})); connect.CodeOf(err) != code {
				t.Errorf("create a watcher of %.20q: %v, %v", path, r, err)
			}
		}
		for _, id := range []string{"", "nobody", "\xff", strings.Repeat("x", 100_000)} {
			_, err := f.rpc.GetWatcherEvents(t.Context(), ask(f.processes, &envd.GetWatcherEventsRequest{WatcherId: id}))
			if code := connect.CodeOf(err); code != connect.CodeNotFound && !(id == "\xff" && err != nil) {
				t.Errorf("events of %.20q: %v", id, err)
			}
			_, err = f.rpc.RemoveWatcher(t.Context(), ask(f.processes, &envd.RemoveWatcherRequest{WatcherId: id}))
			if code := connect.CodeOf(err); code != connect.CodeNotFound && !(id == "\xff" && err != nil) {
				t.Errorf("remove %.20q: %v", id, err)
			}
		}
	})

	t.Run("keepalive and deadline", func(t *testing.T) {
		stream, err := f.rpc.WatchDir(t.Context(), ask(f.processes, &envd.WatchDirRequest{Path: fresh(t)}, "Keepalive-Ping-Interval", "1", "Connect-Timeout-Ms", "2500"))
		if err != nil {
			t.Fatal(err)
		}
		pings := 0
		for stream.Receive() {
			if stream.Msg().GetKeepalive() != nil {
				pings++
			}
		}
		if pings < 1 || pings > 3 || connect.CodeOf(stream.Err()) != connect.CodeDeadlineExceeded {
			t.Errorf("%d keepalives, %v", pings, stream.Err())
		}
	})

	t.Run("odd names", func(t *testing.T) {
		dir := fresh(t)
		w, err := f.watch(t.Context(), &envd.WatchDirRequest{Path: dir})
		if err != nil {
			t.Fatal(err)
		}
		defer w.Close()
		must(t, sb, `cd `+dir+`; mkdir $'a\nb' ./-rf '"%41' 🜁 `+strings.Repeat("n", 255)+` $'\xff'`)
		for _, want := range []string{"a\nb", "-rf", `"%41`, "🜁", strings.Repeat("n", 255), "\uFFFD"} {
			if got := w.next(); got != "create "+want {
				t.Errorf("%q, want %q, %v", got, want, w.Err())
			}
		}
	})

	t.Run("polled", func(t *testing.T) {
		dir := fresh(t)
		r, err := f.rpc.CreateWatcher(t.Context(), ask(f.processes, &envd.CreateWatcherRequest{Path: dir, Recursive: true, IncludeEntry: true}))
		if err != nil {
			t.Fatal(err)
		}
		id := r.Msg.GetWatcherId()
		must(t, sb, "mkdir -p "+dir+"/a/b/c")
		var names []string
		eventually(t, "all is told", func() bool {
			r, err := f.rpc.GetWatcherEvents(t.Context(), ask(f.processes, &envd.GetWatcherEventsRequest{WatcherId: id}))
			if err != nil {
				t.Fatal(err)
			}
			for _, e := range r.Msg.GetEvents() {
				if e.GetEntry().GetType() != envd.FileType_FILE_TYPE_DIRECTORY {
					t.Errorf("%v", e)
				}
				names = append(names, e.GetName())
			}
			return len(names) >= 3
		})
		if !slices.Equal(names, []string{"a", "a/b", "a/b/c"}) {
			t.Errorf("%q", names)
		}
		other := filesystemOf(t, s, create(t, c, client.CreateRequest{}))
		if _, err := other.rpc.GetWatcherEvents(t.Context(), ask(other.processes, &envd.GetWatcherEventsRequest{WatcherId: id})); connect.CodeOf(err) != connect.CodeNotFound {
			t.Errorf("by way of another sandbox: %v", err)
		}
		if _, err := f.rpc.RemoveWatcher(t.Context(), ask(f.processes, &envd.RemoveWatcherRequest{WatcherId: id})); err != nil {
			t.Error(err)
		}
		if _, err := f.rpc.GetWatcherEvents(t.Context(), ask(f.processes, &envd.GetWatcherEventsRequest{WatcherId: id})); connect.CodeOf(err) != connect.CodeNotFound {
			t.Errorf("after the removal: %v", err)
		}
	})

	t.Run("a client that does not read loses its watch only", func(t *testing.T) {
		dir := fresh(t)
		r, err := f.rpc.CreateWatcher(t.Context(), ask(f.processes, &envd.CreateWatcherRequest{Path: dir}))
		if err != nil {
			t.Fatal(err)
		}
		w, err := f.watch(t.Context(), &envd.WatchDirRequest{Path: dir})
		if err != nil {
			t.Fatal(err)
		}
		defer w.Close()
		before := s.memory("VmRSS")
		writing := make(chan string, 1)
		go func() {
			writing <- must(t, sb, "cd "+dir+"; for i in $(seq 4000); do : > "+strings.Repeat("n", 200)+"$i; done; mkdir stop; echo written")
		}()
		for got := ""; got != "create stop"; {
			if got = w.next(); got == "" {
				t.Fatal(w.Err())
			}
		}
		if out := <-writing; out != "written\n" {
			t.Error(out)
		}
		_, err = f.rpc.GetWatcherEvents(t.Context(), ask(f.processes, &envd.GetWatcherEventsRequest{WatcherId: r.Msg.GetWatcherId()}))
		f.refused("the one that was not read", err, connect.CodeResourceExhausted, "watch again")
		if grown := s.memory("VmRSS") - before; grown > 48<<20 {
			t.Errorf("the server's RSS grew by %.1f MB", mb(grown))
		}
	})

	t.Run("the user kills the helper", func(t *testing.T) {
		dir := fresh(t)
		w, err := f.watch(t.Context(), &envd.WatchDirRequest{Path: dir})
		if err != nil {
			t.Fatal(err)
		}
		defer w.Close()
		must(t, sb, "pkill -KILL -f 'airlock-guest [f]iles'")
		if got := w.next(); got != "" || connect.CodeOf(w.Err()) != connect.CodeUnavailable {
			t.Errorf("%q, %v", got, w.Err())
		}
		again, err := f.watch(t.Context(), &envd.WatchDirRequest{Path: dir})
		if err != nil {
			t.Fatal(err)
		}
		defer again.Close()
		must(t, sb, "mkdir "+dir+"/x")
		if got := again.next(); got != "create x" {
			t.Errorf("%q, %v", got, again.Err())
		}
	})

	t.Run("the directory goes", func(t *testing.T) {
		dir := fresh(t)
		w, err := f.watch(t.Context(), &envd.WatchDirRequest{Path: dir})
		if err != nil {
			t.Fatal(err)
		}
		defer w.Close()
		must(t, sb, "rmdir "+dir)
		if got, end := w.next(), w.next(); got != "remove ." || end != "" || w.Err() != nil {
			t.Errorf("%q, %q, %v", got, end, w.Err())
		}
	})

	t.Run("the sandbox goes", func(t *testing.T) {
		w, err := f.watch(t.Context(), &envd.WatchDirRequest{Path: "/tmp"})
		if err != nil {
			t.Fatal(err)
		}
		defer w.Close()
		if err := sb.Close(); err != nil {
			t.Fatal(err)
		}
		if got := w.next(); got != "" || w.Err() == nil {
			t.Errorf("%q, %v: a clean end", got, w.Err())
		}
	})
}
