package test

import (
	"bytes"
	"compress/gzip"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"airlock.dev/airlock"
	"airlock.dev/airlock/client"
)

// filesOf makes calls of files in one sandbox.
type filesOf struct {
	t  *testing.T
	s  *running
	sb *client.Sandbox
}

func (f filesOf) call(method, path, body string, header ...string) (*http.Response, string) {
	f.t.Helper()
	h := dataHeader(f.sb)
	h["Content-Type"] = "application/octet-stream"
	h["Accept-Encoding"] = "identity"
	for i := 0; i < len(header); i += 2 {
		h[header[i]] = header[i+1]
	}
	return f.s.ask(f.t, method, path, body, h)
}

// put uploads a file that must be taken.
func (f filesOf) put(path, body string, header ...string) string {
	f.t.Helper()
	resp, reply := f.call("POST", "/files?path="+url.QueryEscape(path), body, header...)
	if resp.StatusCode != http.StatusOK {
		f.t.Fatalf("upload of %s: %s %.300s", path, resp.Status, reply)
	}
	return reply
}

// metadata asks for that of a path.
func (f filesOf) metadata(path string) map[string]string {
	f.t.Helper()
	resp, reply := f.call("POST", "/filesystem.Filesystem/Stat", `{"path":"`+path+`"}`, "Content-Type", "application/json")
	var got struct {
		Entry struct{ Metadata map[string]string }
	}
	if err := json.Unmarshal([]byte(reply), &got); err != nil || resp.StatusCode != http.StatusOK {
		f.t.Fatalf("stat %s: %s, %v: %.300s", path, resp.Status, err, reply)
	}
	return got.Entry.Metadata
}

// TestFiles: what only a real sandbox shows of the calls of files.
func TestFiles(t *testing.T) {
	s := startServer(t)
	sb := create(t, s.as(s.key("default", airlock.Client)), client.CreateRequest{Timeout: 10 * time.Minute, Limits: airlock.Limits{DiskMB: 64}})
	f := filesOf{t, s, sb}

	t.Run("metadata", func(t *testing.T) {
		want := map[string]string{"author": "Ann", "n": "1"}
		f.put("m/f", "x", "X-Metadata-Author", "Ann", "X-Metadata-N", "1")
		if out := must(t, sb, `python3 -c 'import os; print({a: os.getxattr("m/f", a) for a in sorted(os.listxattr("m/f"))})'`); out != "{'user.e2b.author': b'Ann', 'user.e2b.n': b'1'}\n" {
			t.Errorf("attributes: %s", out)
		}
		// It goes with the file: by name, to another directory, to another file system.
		for _, c := range []struct{ line, path string }{
			{"true", "/home/user/m/f"},
			{"mv m/f m/g", "/home/user/m/g"},
			{"mv m/g /tmp/g", "/tmp/g"},
			{"mv /tmp/g /dev/shm/g", "/dev/shm/g"},
			{"cp -a /dev/shm/g ~/h", "/home/user/h"},
		} {
			must(t, sb, c.line)
			if got := f.metadata(c.path); !maps.Equal(got, want) {
				t.Errorf("%s: %v", c.line, got)
			}
		}
		// A file of the image is copied up with what is set on it.
		must(t, sb, `sudo python3 -c 'import os; os.setxattr("/usr/bin/ls", "user.e2b.k", b"v")'; ls`)
		if got := f.metadata("/usr/bin/ls"); !maps.Equal(got, map[string]string{"k": "v"}) {
			t.Errorf("of the image's file: %v", got)
		}
		f.put("h", "x")
		if got := f.metadata("h"); len(got) > 0 {
			t.Errorf("after an upload without: %v", got)
		}
		if resp, reply := f.call("POST", "/files?path=/dev/null", "x", "X-Metadata-A", "b"); resp.StatusCode != 400 || !strings.Contains(reply, "keep no metadata") {
			t.Errorf("of a device: %s %s", resp.Status, reply)
		}
	})

	t.Run("hostile attributes", func(t *testing.T) {
		f.put("evil/f", "x")
		for _, c := range []struct {
			set  string
			want map[string]string
		}{
			{`s(b"user.e2b.good", b"g"); s(b"user.e2b.\xff", b"v"); s(b"user.e2b.bad", b"\xff"); s(b"user.e2b.", b"v")`, map[string]string{"good": "g"}},
			{`s(b"user.e2b.good", b"g"); s(b"user.e2b.huge", b"h" * 65000); s(b"user." + b"n" * 250, b"z" * 65000)`, map[string]string{"good": "g"}},
			{`s(b"user.e2b.z", b"late"); [s(b"user.e2b.h%04d" % i, b"h" * 65000) for i in range(400)]`, nil}, // the names alone are more than is shown
			{`[s(b"user.e2b.%04d" % i + b"n" * 200, b"") for i in range(1000)]`, nil},                        // more names than the kernel lists
		} {
			must(t, sb, `rm -f evil/f; touch evil/f; python3 -c 'import os
def s(name, value): os.setxattr(b"evil/f", name, value)
`+c.set+`'`)
			if got := f.metadata("/home/user/evil/f"); !maps.Equal(got, c.want) {
				t.Errorf("%s: %.200v", c.set, got)
			}
			resp, reply := f.call("POST", "/filesystem.Filesystem/ListDir", `{"path":"evil","depth":1}`, "Content-Type", "application/json")
			if resp.StatusCode != 200 || !strings.Contains(reply, `"/home/user/evil/f"`) || len(reply) > 20_000 {
				t.Errorf("%s: list: %s, %d bytes", c.set, resp.Status, len(reply))
			}
			f.put("evil/f", "x", "X-Metadata-A", "b")
			if got := f.metadata("/home/user/evil/f"); !maps.Equal(got, map[string]string{"a": "b"}) {
				t.Errorf("%s: after an upload: %.200v", c.set, got)
			}
		}
	})

	t.Run("compose", func(t *testing.T) {
		var whole strings.Builder
		sources := make([]string, 5)
		for i := range sources {
			part := strings.Repeat(fmt.Sprint(i), 1<<20)
			whole.WriteString(part)
			sources[i] = fmt.Sprintf("parts/%d", i)
			f.put(sources[i], part)
		}
		body, _ := json.Marshal(map[string]any{"source_paths": sources, "destination": "whole/file"})
		resp, reply := f.call("POST", "/files/compose", string(body), "Content-Type", "application/json")
		if resp.StatusCode != 200 || reply != `{"name":"file","path":"/home/user/whole/file","type":"file"}` {
			t.Fatalf("%s %s", resp.Status, reply)
		}
		if _, got := f.call("GET", "/files?path=whole/file", ""); got != whole.String() {
			t.Errorf("%d bytes, want %d", len(got), whole.Len())
		}
		if out := must(t, sb, "ls -A parts whole"); out != "parts:\n\nwhole:\nfile\n" {
			t.Errorf("left: %q", out)
		}
		// Without room for the whole, the parts stay.
		must(t, sb, "head -c 30M /dev/zero > parts/big; ln parts/big parts/again")
		resp, reply = f.call("POST", "/files/compose", `{"source_paths":["parts/big","parts/again"],"destination":"whole/file"}`, "Content-Type", "application/json")
		if out := must(t, sb, "ls -A parts whole; stat -c %s whole/file; rm -r parts whole"); resp.StatusCode != 507 || out != "parts:\nagain\nbig\n\nwhole:\nfile\n5242880\n" {
			t.Errorf("%s %s, left: %q", resp.Status, reply, out)
		}
	})

	t.Run("conditions and ranges", func(t *testing.T) {
		f.put("r", strings.Repeat("0123456789", 30_000))
		resp, _ := f.call("HEAD", "/files?path=r", "")
		tag := resp.Header.Get("ETag")
		if resp.ContentLength != 300_000 || tag == "" {
			t.Fatalf("head: %d bytes, %v", resp.ContentLength, resp.Header)
		}
		if resp, body := f.call("GET", "/files?path=r", "", "Range", "bytes=299995-", "If-Range", tag); resp.StatusCode != 206 || body != "56789" || resp.Header.Get("Content-Range") != "bytes 299995-299999/300000" {
			t.Errorf("range: %s %.100s", resp.Status, body)
		}
		must(t, sb, "ln -s r rlink")
		if resp, body := f.call("GET", "/files?path=rlink", "", "Range", "bytes=100000-100001", "If-Range", tag); resp.StatusCode != 206 || body != "01" {
			t.Errorf("range through a link: %s %.100s", resp.Status, body)
		}
		if resp, _ := f.call("GET", "/files?path=r", "", "If-None-Match", tag, "Accept-Encoding", "gzip"); resp.StatusCode != 304 {
			t.Errorf("not modified: %s", resp.Status)
		}
		f.put("r", strings.Repeat("1123456789", 30_000))
		if resp, body := f.call("GET", "/files?path=r", "", "Range", "bytes=0-4", "If-Range", tag); resp.StatusCode != 200 || len(body) != 300_000 {
			t.Errorf("the range of a file that changed: %s, %d bytes", resp.Status, len(body))
		}
		for _, path := range []string{"/proc/cpuinfo", "/proc/self/maps", "/sys/devices/system/cpu/possible"} {
			if resp, body := f.call("GET", "/files?path="+path, ""); resp.StatusCode != 200 || body == "" || resp.Header.Get("ETag") != "" {
				t.Errorf("%s: %s %q", path, resp.Status, body)
			}
		}
	})

	t.Run("uploads", func(t *testing.T) {
		var bomb bytes.Buffer
		z, _ := gzip.NewWriterLevel(&bomb, gzip.BestSpeed)
		io.CopyN(z, zeros{}, 256<<20)
		z.Close()
		f.put("u/old", "old")
		form := func(name, data string) string {
			return "--b\r\nContent-Disposition: form-data; name=\"file\"; filename=\"" + name + "\"\r\n\r\n" + data + "\r\n--b--\r\n"
		}
		const forms = "multipart/form-data; boundary=b"
		for _, c := range []struct {
			what, path, body string
			header           []string
			status           int
			reply            string
		}{
			{"a gzip bomb", "?path=u/old", bomb.String(), []string{"Content-Encoding", "gzip"}, 507, "no space is left"},
			{"half a gzip", "?path=u/old", bomb.String()[:bomb.Len()/200], []string{"Content-Encoding", "gzip"}, 400, "broke off or is damaged"},
			{"no gzip", "?path=u/old", "plain", []string{"Content-Encoding", "gzip"}, 400, "broke off or is damaged"},
			{"another encoding", "?path=u/old", "plain", []string{"Content-Encoding", "deflate"}, 400, "use gzip or none"},
			{"two encodings", "?path=u/old", "plain", []string{"Content-Encoding", "gzip, gzip"}, 400, "use gzip or none"},
			{"a bomb in a form", "", bomb.String(), []string{"Content-Encoding", "gzip", "Content-Type", forms}, 400, "broke off or is damaged"},
			{"a part that climbs to what may be written", "", form("../../tmp/../tmp/climbed", "x"), []string{"Content-Type", forms}, 200, `"path":"/tmp/climbed"`},
			{"a part that climbs to what may not", "", form("../../../../etc/climbed", "x"), []string{"Content-Type", forms}, 403, "permission denied for path '/etc/climbed'"},
			{"a part without a filename", "?path=u/old", "--b\r\nContent-Disposition: form-data; name=\"file\"\r\n\r\nold\r\n--b--\r\n", []string{"Content-Type", forms}, 200, `"path":"/home/user/u/old"`},
		} {
			if resp, reply := f.call("POST", "/files"+c.path, c.body, c.header...); resp.StatusCode != c.status || !strings.Contains(reply, c.reply) {
				t.Errorf("%s: %s %.300s, want %d with %q", c.what, resp.Status, reply, c.status, c.reply)
			}
			if out := must(t, sb, "ls -A u; cat u/old"); out != "old\nold" {
				t.Errorf("%s left: %q", c.what, out)
			}
		}
	})

	t.Run("nothing of the host", func(t *testing.T) {
		canary := filepath.Join(t.TempDir(), "canary")
		if err := os.WriteFile(canary, []byte("of the host"), 0o644); err != nil {
			t.Fatal(err)
		}
		must(t, sb, "ln -s / root; ln -s "+canary+" direct; ln -s /etc/hostname name")
		for _, user := range []string{"user", "root"} {
			for _, path := range []string{canary, "/proc/1/root" + canary, "/proc/self/root" + canary, "root" + canary, "direct", strings.Repeat("../", 40) + canary, "/proc/self/cwd/.." + canary} {
				if resp, body := f.call("GET", "/files?username="+user+"&path="+url.QueryEscape("/home/user/"+path), ""); resp.StatusCode < 400 || strings.Contains(body, "of the host") {
					t.Errorf("%s reads %s: %s %q", user, path, resp.Status, body)
				}
			}
			f.call("POST", "/files?username="+user+"&path=/home/user/direct", "overwritten")
		}
		if data, err := os.ReadFile(canary); err != nil || string(data) != "of the host" {
			t.Errorf("the host's file: %q, %v", data, err)
		}
		if _, body := f.call("GET", "/files?path=name", ""); body != must(t, sb, "cat /etc/hostname") {
			t.Errorf("its own, through a link: %q", body)
		}
	})

	t.Run("a file that changes while it is read", func(t *testing.T) {
		background(t, sb, `while [ ! -e stop ]; do head -c 3M /dev/zero > shifting; truncate -s 1000 shifting; done`)
		whole, broken := 0, 0
		for end := time.Now().Add(3 * time.Second); time.Now().Before(end); {
			req, err := http.NewRequestWithContext(t.Context(), "GET", s.url+"/files?path=shifting", nil)
			if err != nil {
				t.Fatal(err)
			}
			for k, v := range dataHeader(sb) {
				req.Header.Set(k, v)
			}
			req.Header.Set("Accept-Encoding", "identity")
			resp, err := http.DefaultClient.Do(req)
			if err != nil {
				broken++
				continue
			}
			n, err := io.Copy(io.Discard, resp.Body)
			resp.Body.Close()
			switch {
			case err != nil:
				broken++
			case resp.StatusCode == 200 && resp.ContentLength >= 0 && n != resp.ContentLength:
				t.Errorf("%d bytes came of %d, without an error", n, resp.ContentLength)
			default:
				whole++
			}
		}
		if whole == 0 {
			t.Error("none came whole")
		}
		t.Logf("%d whole, %d broken off", whole, broken)
		must(t, sb, "touch stop; sleep 0.5; rm shifting")
	})

	t.Run("paths that are swapped", func(t *testing.T) {
		must(t, sb, `sudo sh -c 'mkdir -p /vault/sub; echo secret > /vault/f; echo secret > /vault/sub/f; chmod -R go= /vault'; mkdir -p d/sub; echo mine > d/f; echo mine > d/sub/f; ln -s /vault l`)
		background(t, sb, `exec python3 -c 'import os
while True:
    for a, b in ("d", "x"), ("l", "d"), ("d", "l"), ("x", "d"):
        try: os.rename(a, b)
        except OSError: pass'`)
		var calls sync.WaitGroup
		end := time.Now().Add(3 * time.Second)
		for _, c := range []struct{ method, path, body string }{
			{"GET", "/files?path=d/f", ""},
			{"GET", "/files?path=d/sub/f&username=root", ""},
			{"POST", "/files?path=d/sub/f", "mine"},
			{"POST", "/filesystem.Filesystem/ListDir", `{"path":".","depth":9}`},
			{"POST", "/filesystem.Filesystem/Move", `{"source":"d/sub/f","destination":"d/g"}`},
			{"POST", "/filesystem.Filesystem/Remove", `{"path":"d/sub"}`},
			{"POST", "/files/compose", `{"source_paths":["d/f"],"destination":"d/sub/f"}`},
		} {
			media := "application/json"
			if strings.HasPrefix(c.path, "/files?") {
				media = "application/octet-stream"
			}
			calls.Go(func() {
				for time.Now().Before(end) {
					resp, body := f.call(c.method, c.path, c.body, "Content-Type", media)
					if resp.StatusCode >= 500 || strings.Contains(body, "secret") && !strings.Contains(c.path, "root") {
						t.Errorf("%s %s: %s %.300s", c.method, c.path, resp.Status, body)
						return
					}
				}
			})
		}
		calls.Wait()
		if out := must(t, sb, `pkill python3; sudo sh -c 'find /vault | sort; cat /vault/f /vault/sub/f'; find ~ -name '.airlock*'`); out != "/vault\n/vault/f\n/vault/sub\n/vault/sub/f\nsecret\nsecret\n" {
			t.Errorf("root's files, and what uploads left: %q", out)
		}
	})

	t.Run("the server is killed during an upload", func(t *testing.T) {
		f.put("k/f", "old")
		r, w := io.Pipe()
		ended := make(chan error, 1)
		go func() { ended <- sb.Upload(t.Context(), "k/f", r, 0) }()
		w.Write(make([]byte, 100_000))
		eventually(t, "the upload has begun", func() bool { return strings.Contains(must(t, sb, "ls -A k"), ".airlock-upload-") })
		s.killServer()
		w.CloseWithError(io.ErrUnexpectedEOF)
		if err := <-ended; err == nil {
			t.Error("the upload ended well")
		}
		eventually(t, "the old file is there and nothing else", func() bool {
			r, err := sb.Exec(t.Context(), client.ExecRequest{Cmd: "/bin/bash", Args: []string{"-c", `[ "$(ls -A k; cat k/f)" = "$(printf 'f\nold')" ]`}})
			return err == nil && r.ExitCode == 0
		})
	})
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { clear(p); return len(p), nil }
