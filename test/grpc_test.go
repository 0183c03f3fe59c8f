package test

import (
	"encoding/binary"
	"fmt"
	"io"
	"net/http"
	"os/exec"
	"strings"
	"testing"
	"time"

	"airlock.dev/airlock"
	"airlock.dev/airlock/client"
)

// grpcMost bounds a message of the test's service.
const grpcMost = 4 << 20

// grpcMessage reads one: a byte that says that it is not compressed, its length,
// and itself.
func grpcMessage(r io.Reader) ([]byte, error) {
	var head [5]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return nil, err
	}
	n := binary.BigEndian.Uint32(head[1:])
	if head[0] != 0 || n > grpcMost {
		return nil, fmt.Errorf("a message of %d bytes, compressed %d", n, head[0])
	}
	m := make([]byte, n)
	_, err := io.ReadFull(r, m)
	return m, err
}

// grpcService is gRPC as a server has to speak it, without a library.
func grpcService(w http.ResponseWriter, r *http.Request) {
	if r.ProtoMajor != 2 || r.Header.Get("Content-Type") != "application/grpc" || r.Header.Get("Te") != "trailers" {
		http.Error(w, "this is not gRPC", http.StatusUnsupportedMediaType)
		return
	}
	w.Header().Set("Content-Type", "application/grpc")
	w.Header().Set("Grpc-Accept-Encoding", "identity")
	end := func(status int, message string) {
		w.Header().Set(http.TrailerPrefix+"Grpc-Status", fmt.Sprint(status))
		w.Header().Set(http.TrailerPrefix+"Grpc-Message", message)
		w.Header().Set(http.TrailerPrefix+"X-Told-At-The-End", "of "+r.URL.Path)
	}
	say := func(m []byte) {
		w.Write(binary.BigEndian.AppendUint32([]byte{0}, uint32(len(m))))
		w.Write(m)
		w.(http.Flusher).Flush()
	}
	switch r.URL.Path {
	case "/test.Service/Unary":
		m, err := grpcMessage(r.Body)
		if err != nil {
			end(13, "cannot read")
			return
		}
		w.Header().Set("X-Told-First", r.Header.Get("X-Asked"))
		say(m)
		end(0, "")
	case "/test.Service/ServerStream":
		m, _ := grpcMessage(r.Body)
		for i := range 5 {
			say(fmt.Appendf(nil, "%s %d", m, i))
		}
		end(0, "")
	case "/test.Service/ClientStream":
		n, bytes := 0, 0
		for {
			m, err := grpcMessage(r.Body)
			if err != nil {
				break
			}
			n, bytes = n+1, bytes+len(m)
		}
		say(fmt.Appendf(nil, "%d messages of %d bytes", n, bytes))
		end(0, "")
	case "/test.Service/Both":
		w.WriteHeader(http.StatusOK)
		w.(http.Flusher).Flush() // the client waits for that before it says anything
		for {
			m, err := grpcMessage(r.Body)
			if err != nil {
				break
			}
			say(append([]byte("again "), m...))
		}
		end(0, "")
	case "/test.Service/Fails": // after one message
		say([]byte("one"))
		end(9, "not %25 now")
	case "/test.Service/Refuses": // without any: its status is in the headers
		w.Header().Set("Grpc-Status", "7")
		w.Header().Set("Grpc-Message", "not you")
	case "/test.Service/Hangs":
		w.WriteHeader(http.StatusOK)
		w.(http.Flusher).Flush()
		<-r.Context().Done()
	default:
		end(12, "unknown")
	}
}

// grpcClient asks it by the library that most of Python uses, which has an
// HTTP/2 and TLS of its own and its own idea of what to trust.
const grpcClient = `
import sys, time, queue, grpc
channel = grpc.secure_channel(sys.argv[1], grpc.ssl_channel_credentials())
def call(kind, name): return getattr(channel, kind)("/test.Service/" + name)

answer, seen = call("unary_unary", "Unary").with_call(b"hello", metadata=[("x-asked", "yes")], timeout=30)
assert answer == b"hello", answer
assert ("x-told-first", "yes") in [tuple(m) for m in seen.initial_metadata()], seen.initial_metadata()
assert ("x-told-at-the-end", "of /test.Service/Unary") in [tuple(m) for m in seen.trailing_metadata()], seen.trailing_metadata()
large = bytes(range(256)) * 8192
assert call("unary_unary", "Unary")(large, timeout=60) == large
print("unary")

assert list(call("unary_stream", "ServerStream")(b"n", timeout=30)) == [b"n %d" % i for i in range(5)]
print("server stream")

assert call("stream_unary", "ClientStream")(iter([b"a" * 100] * 50), timeout=30) == b"50 messages of 5000 bytes"
print("client stream")

said = queue.Queue()
both = call("stream_stream", "Both")(iter(said.get, None), timeout=30)
for word in [b"one", b"two", b"", b"x" * 100000]:
    said.put(word)
    assert next(both) == b"again " + word  # before anything else is said
said.put(None)
assert list(both) == [] and both.code() == grpc.StatusCode.OK
print("both ways")

def fails(code, details, f):
    try:
        f()
    except grpc.RpcError as e:
        assert e.code() == code and details in e.details(), (e.code(), e.details())
        return
    assert False, "it did not fail"

got = []
fails(grpc.StatusCode.FAILED_PRECONDITION, "not % now", lambda: got.extend(call("unary_stream", "Fails")(b"", timeout=30)))
fails(grpc.StatusCode.PERMISSION_DENIED, "not you", lambda: call("unary_unary", "Refuses")(b"", timeout=30))
fails(grpc.StatusCode.UNIMPLEMENTED, "unknown", lambda: call("unary_unary", "None")(b"", timeout=30))
begun = time.monotonic()
fails(grpc.StatusCode.DEADLINE_EXCEEDED, "", lambda: call("unary_unary", "Hangs")(b"", timeout=1))
assert time.monotonic() - begun < 10
hangs = call("unary_stream", "Hangs")(b"", timeout=60)
hangs.initial_metadata()
hangs.cancel()
fails(grpc.StatusCode.CANCELLED, "", lambda: list(hangs))
print("statuses")

# What the operator forbids is one call's, and says why.
fails(grpc.StatusCode.PERMISSION_DENIED, "", lambda: call("unary_unary", "Forbidden")(b"", timeout=30))
assert call("unary_unary", "Unary")(b"still", timeout=30) == b"still"
print("denied")
`

// A client of gRPC inside and a server outside understand each other in every
// way of calling, and each call is decided and in the trail.
func TestGRPC(t *testing.T) {
	if _, err := exec.LookPath("python3"); err != nil {
		t.Skip("python3 is not installed")
	}
	s := networked(t)
	url := s.secure(t, http.HandlerFunc(grpcService))
	c := s.as(s.key("red", airlock.Client))
	const forbids = `
@id("not-this") forbid (principal, action == Action::"http:request", resource) when { context.path == "/test.Service/Forbidden" };
`
	sb := create(t, c, client.CreateRequest{Timeout: 10 * time.Minute, Profile: "packages", Policy: ownPolicy + forbids, Limits: airlock.Limits{MemoryMB: 1024}})
	if r, out := run(t, sb, `python3 -m venv v && v/bin/pip install -q --no-cache-dir grpcio`); r.ExitCode != 0 {
		t.Skipf("grpcio cannot be installed from the registry of this machine:\n%s", out)
	}
	if err := sb.Upload(t.Context(), "ask.py", strings.NewReader(grpcClient), 0); err != nil {
		t.Fatal(err)
	}
	before := len(s.crossings(sb.ID))
	to := strings.TrimSuffix(strings.TrimPrefix(url, "https://"), "/")
	r, out := run(t, sb, "timeout 120 v/bin/python ask.py "+to)
	if want := "unary\nserver stream\nclient stream\nboth ways\nstatuses\ndenied\n"; r.ExitCode != 0 || !strings.HasSuffix(out, want) {
		t.Errorf("exit code %d: %s", r.ExitCode, out)
	}
	calls := map[string]string{}
	for _, x := range s.crossings(sb.ID)[before:] {
		if x.Action == "http:request" {
			calls[strings.TrimPrefix(x.Path, "/test.Service/")] = fmt.Sprint(x.Method, " ", x.Effect, " ", x.Status)
		}
	}
	for name, want := range map[string]string{
		"Unary": "POST permit 200", "ServerStream": "POST permit 200", "ClientStream": "POST permit 200", "Both": "POST permit 200",
		"Fails": "POST permit 200", "Refuses": "POST permit 200", "None": "POST permit 200", "Hangs": "POST permit 200", "Forbidden": "POST deny 0",
	} {
		if calls[name] != want {
			t.Errorf("the trail has %q of %s, want %q", calls[name], name, want)
		}
	}
}
