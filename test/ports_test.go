package test

import (
	"bufio"
	"bytes"
	"crypto/rand"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"airlock.dev/airlock"
	"airlock.dev/airlock/client"
)

// background runs a line of shell in a sandbox until that ends.
func background(t *testing.T, sb *client.Sandbox, line string) {
	t.Helper()
	go sb.Exec(t.Context(), client.ExecRequest{Cmd: "/bin/bash", Args: []string{"-c", line}})
}

// airlockCommand is a command about a server, by its address and a key.
func (s *running) airlockCommand(key string, args ...string) *exec.Cmd {
	cmd := exec.Command(filepath.Join(binDir, "airlock"), args...)
	cmd.Env = append(os.Environ(), "AIRLOCK_API_URL="+s.url, "AIRLOCK_API_KEY="+key, "SSL_CERT_FILE="+filepath.Join(s.dataDir, "tls", "ca.pem"))
	return cmd
}

// What is not HTTP: all of it echoed after its end, by standard Python.
const echoServer = `python3 -c '
import socket
s = socket.create_server(("127.0.0.1", 7000))
while True:
    c, _ = s.accept()
    data = b""
    while part := c.recv(1 << 16): data += part
    c.sendall(data)
    c.close()
'`

// operator is a client at the server's own socket, which needs no key.
func (s *running) operator() *client.Client {
	s.t.Helper()
	c, err := client.New(client.Options{Socket: filepath.Join(s.dataDir, "airlock.sock")})
	if err != nil {
		s.t.Fatal(err)
	}
	return c
}

func TestForward(t *testing.T) {
	for _, c := range []struct {
		what  string
		flags []string
	}{
		{"in the clear", nil},
		{"TLS", []string{"--domain", "airlock.localhost"}},
	} {
		t.Run(c.what, func(t *testing.T) {
			s := startServer(t, c.flags...)
			sb := create(t, s.operator(), client.CreateRequest{})
			background(t, sb, echoServer)
			must(t, sb, "until (exec 3<>/dev/tcp/127.0.0.1/7000) 2>/dev/null; do sleep 0.1; done")
			cmd := s.airlockCommand(s.key("default", airlock.Client), "sandbox", "forward", sb.ID, "7000:0")
			out, err := cmd.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			var stderr bytes.Buffer
			cmd.Stderr = &stderr
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			defer cmd.Process.Kill()
			line, err := bufio.NewReader(out).ReadString('\n')
			if want := regexp.MustCompile(`^(127\.0\.0\.1:\d+) is port 7000 of ` + sb.ID + "\n$"); err != nil || !want.MatchString(line) {
				t.Fatalf("forward says %q, %v", line, err)
			}
			address := strings.Fields(line)[0]
			sent := make([]byte, 4<<20)
			rand.Read(sent)
			conn, err := net.Dial("tcp", address)
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			conn.SetDeadline(time.Now().Add(time.Minute))
			if _, err := conn.Write(sent); err != nil {
				t.Fatalf("%v\n%s", err, &stderr)
			}
			conn.(*net.TCPConn).CloseWrite()
			got, err := io.ReadAll(conn)
			if err != nil {
				t.Errorf("%v\n%s", err, &stderr)
			}
			if !bytes.Equal(got, sent) {
				t.Errorf("%d bytes came back of %d", len(got), len(sent))
			}
			if conn, err = net.Dial("tcp", address); err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			conn.Write([]byte("x"))
			time.Sleep(200 * time.Millisecond)
			if err := sb.Close(); err != nil {
				t.Fatal(err)
			}
			conn.SetReadDeadline(time.Now().Add(20 * time.Second))
			if n, err := conn.Read(make([]byte, 1)); n != 0 || err == nil || os.IsTimeout(err) {
				t.Errorf("after the sandbox's end: %d, %v", n, err)
			}
			cmd.Process.Signal(syscall.SIGINT)
			if err := cmd.Wait(); err != nil {
				t.Errorf("%v\n%s", err, &stderr)
			}
		})
	}
}

// openPTY returns the two ends of a new terminal.
func openPTY(t *testing.T) (ours, theirs *os.File) {
	t.Helper()
	ours, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	n, err := unix.IoctlGetInt(int(ours.Fd()), unix.TIOCGPTN)
	if err == nil {
		err = unix.IoctlSetPointerInt(int(ours.Fd()), unix.TIOCSPTLCK, 0)
	}
	if err == nil {
		theirs, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|unix.O_NOCTTY, 0)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { theirs.Close(); ours.Close() })
	return ours, theirs
}

// screen is all that was written to a terminal.
type screen struct {
	mu  sync.Mutex
	all bytes.Buffer
}

func (s *screen) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.all.Write(p)
}

func (s *screen) text() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.all.String()
}

func TestShell(t *testing.T) {
	s := startServer(t)
	sb := create(t, s.operator(), client.CreateRequest{})
	key := s.key("default", airlock.Client)

	for _, c := range []struct {
		what, stdin string
		args        []string
		code        int
		out         string
	}{
		{"exit code", "echo $((6*7)); exit 3\n", nil, 3, "42\r\n"},
		{"the end of input", "echo $((6*7))\n", nil, 0, "42\r\n"},
		{"a command", "", []string{"--user", "root", "--cwd", "/tmp", "--", "sh", "-c", "id -un; pwd; tty; exit 4"}, 4, "root\r\n/tmp\r\n/dev/pts/"},
	} {
		cmd := s.airlockCommand(key, append([]string{"sandbox", "shell", sb.ID}, c.args...)...)
		cmd.Stdin = strings.NewReader(c.stdin)
		var out bytes.Buffer
		cmd.Stdout, cmd.Stderr = &out, &out
		stuck := time.AfterFunc(30*time.Second, func() { cmd.Process.Kill() })
		cmd.Run()
		stuck.Stop()
		if code := cmd.ProcessState.ExitCode(); code != c.code || !strings.Contains(out.String(), c.out) {
			t.Errorf("%s: exit code %d, %q", c.what, code, &out)
		}
	}

	ours, theirs := openPTY(t)
	size := func(cols, rows uint16) {
		if err := unix.IoctlSetWinsize(int(ours.Fd()), unix.TIOCSWINSZ, &unix.Winsize{Col: cols, Row: rows}); err != nil {
			t.Fatal(err)
		}
	}
	seen := &screen{}
	go io.Copy(seen, ours)
	shows := func(text string) {
		t.Helper()
		for range 200 {
			if strings.Contains(seen.text(), text) {
				return
			}
			time.Sleep(50 * time.Millisecond)
		}
		t.Fatalf("the screen does not show %q:\n%q", text, seen.text())
	}
	start := func(args ...string) *exec.Cmd {
		cmd := s.airlockCommand(key, append([]string{"sandbox", "shell", sb.ID}, args...)...)
		cmd.Stdin, cmd.Stdout, cmd.Stderr = theirs, theirs, theirs
		cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true} // so that changes of the size are signalled
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { cmd.Process.Kill() })
		return cmd
	}
	size(101, 31)
	cmd := start()
	shows("$ ")
	io.WriteString(ours, "stty size; kept=yes\r")
	shows("31 101\r\n")
	size(120, 40)
	for i := range 50 { // the signal takes its time
		io.WriteString(ours, "stty size\r")
		time.Sleep(100 * time.Millisecond)
		if strings.Contains(seen.text(), "40 120\r\n") {
			break
		} else if i == 49 {
			t.Fatalf("the new size does not arrive: %q", seen.text())
		}
	}
	io.WriteString(ours, "~.")
	if err := cmd.Wait(); err != nil {
		t.Errorf("leave: %v", err)
	}
	shows("left; it goes on")
	m := regexp.MustCompile(`--attach (\d+)`).FindStringSubmatch(seen.text())
	if m == nil {
		t.Fatalf("no pid: %q", seen.text())
	}
	state, err := unix.IoctlGetTermios(int(theirs.Fd()), unix.TCGETS)
	if err != nil || state.Lflag&unix.ECHO == 0 || state.Lflag&unix.ICANON == 0 {
		t.Errorf("the terminal is left raw: %+v, %v", state, err)
	}
	cmd = start("--attach", m[1])
	time.Sleep(time.Second) // nothing is shown until something is typed
	io.WriteString(ours, "echo it was $kept; exit 5\r")
	shows("it was yes\r\n")
	cmd.Wait()
	if code := cmd.ProcessState.ExitCode(); code != 5 {
		t.Errorf("exit code %d after coming back", code)
	}
}
