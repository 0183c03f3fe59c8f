package test

import (
	"bufio"
	"bytes"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"
)

// serveOnce starts `airlock serve FLAG...` on a data directory, waits until it
// serves or ends, and stops it. It returns what it said.
func serveOnce(t *testing.T, dataDir string, flags ...string) (serves bool, says string) {
	t.Helper()
	cmd := exec.Command(filepath.Join(binDir, "airlock"), append([]string{"serve", "--listen", "127.0.0.1:0", "--domain", "airlock.localhost", "--data-dir", dataDir}, flags...)...)
	var log bytes.Buffer
	cmd.Stderr = &log
	cmd.WaitDelay = 5 * time.Second
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	late := time.AfterFunc(60*time.Second, func() { cmd.Process.Kill() })
	defer late.Stop()
	line, _ := bufio.NewReader(out).ReadString('\n')
	if serves = strings.HasPrefix(line, "airlock listens"); serves {
		cmd.Process.Signal(syscall.SIGTERM)
	}
	io.Copy(io.Discard, out)
	if err := cmd.Wait(); serves && err != nil {
		t.Errorf("the server's end: %v\n%s", err, &log)
	}
	return serves, log.String()
}

// A server's keys outlive it and change their root while it is stopped. No
// key is in clear in its data directory.
func TestKeysOfAServer(t *testing.T) {
	needRoot(t)
	needBinaries(t)
	dir := t.TempDir()
	data, next := filepath.Join(dir, "data"), "file:"+filepath.Join(dir, "next.key")
	if serves, says := serveOnce(t, data); !serves {
		t.Fatal(says)
	}
	authority, err := os.ReadFile(filepath.Join(data, "tls", "ca.pem"))
	if err != nil {
		t.Fatal(err)
	}
	same := func() {
		t.Helper()
		if now, err := os.ReadFile(filepath.Join(data, "tls", "ca.pem")); err != nil || !bytes.Equal(now, authority) {
			t.Errorf("the certificate authority is another one: %v", err)
		}
	}
	if serves, says := serveOnce(t, data); !serves {
		t.Error(says)
	}
	same()
	cmd := exec.Command(filepath.Join(binDir, "airlock"), "keystore", "rotate-root", "--data-dir", data, "--to", next)
	cmd.Env = []string{}
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	if serves, says := serveOnce(t, data); serves || !strings.Contains(says, "give that with --root-key") {
		t.Errorf("with the old root key: %v, %q", serves, says)
	}
	if serves, says := serveOnce(t, data, "--root-key", next); !serves {
		t.Error(says)
	}
	same()
	if serves, says := serveOnce(t, data, "--root-key", filepath.Join(data, "root.key")); serves {
		t.Errorf("with a root key that is not there: %q", says)
	}
	private := regexp.MustCompile(`BEGIN [A-Z ]*PRIVATE KEY`)
	err = filepath.WalkDir(data, func(path string, d os.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		text, err := os.ReadFile(path)
		if private.Match(text) {
			t.Errorf("%s has a private key in clear", path)
		}
		return err
	})
	if err != nil {
		t.Error(err)
	}
}
