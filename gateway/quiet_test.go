package gateway

import (
	"bufio"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"
)

// What upstream says out of turn is nowhere in the process's log: it may be a
// secret that it was sent. Main ends at once here, as it meets no server.
func TestSaysNothingOfUpstream(t *testing.T) {
	const child, value = "AIRLOCK_TEST_QUIET", "ghp_said-out-of-turn"
	if os.Getenv(child) == "" {
		cmd := exec.Command("/proc/self/exe", "-test.run=^TestSaysNothingOfUpstream$")
		cmd.Env = append(os.Environ(), child+"=1")
		out, err := cmd.CombinedOutput()
		if err != nil || strings.Contains(string(out), value) || !strings.Contains(string(out), "PASS") {
			t.Errorf("%v:\n%s", err, out)
		}
		return
	}
	if Main(slog.New(slog.DiscardHandler)) == 0 {
		t.Fatal("it met a server")
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	answered, heard := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(heard)
		c, err := l.Accept()
		if err != nil {
			return
		}
		defer c.Close()
		if _, err := http.ReadRequest(bufio.NewReader(c)); err != nil {
			return
		}
		io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
		<-answered
		io.WriteString(c, value)
		c.SetDeadline(time.Now().Add(10 * time.Second))
		io.Copy(io.Discard, c) // until the client has seen it, and hung up
	}()
	res, err := http.Get("http://" + l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	res.Body.Close()
	close(answered)
	<-heard
}
