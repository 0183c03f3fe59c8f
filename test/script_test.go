package test

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"
)

// root is the top of the source tree.
var root = func() string {
	dir, err := filepath.Abs("..")
	if err != nil {
		panic(err)
	}
	return dir
}()

// binDir has the binaries under test, which buildOnce makes. They are static,
// as those that are shipped, also when the tests are built with -race.
var binDir = filepath.Join(root, "bin")

var buildOnce = sync.OnceValue(func() error {
	cmd := exec.Command("go", "build", "-trimpath", "-ldflags", "-s -w", "-o", binDir+"/", "./cmd/airlock", "./cmd/airlock-guest")
	cmd.Dir = root
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("build the binaries: %w\n%s", err, out)
	}
	return nil
})

// needBinaries builds bin/airlock and bin/airlock-guest.
func needBinaries(t testing.TB) {
	t.Helper()
	if err := buildOnce(); err != nil {
		t.Fatal(err)
	}
}

// needRoot skips tests that make sandboxes where nobody can; never in CI.
func needRoot(t testing.TB) {
	t.Helper()
	if os.Geteuid() == 0 {
		return
	}
	if os.Getenv("CI") == "true" {
		t.Fatal("CI must run as root: it makes sandboxes")
	}
	t.Skip("makes sandboxes, and needs root")
}

// TestScript runs script/*.txtar. Those in script/server make sandboxes.
func TestScript(t *testing.T) {
	needBinaries(t)
	testscript.Run(t, params("script"))
}

// TestServerScript runs script/server/*.txtar, each with a data directory of its own.
func TestServerScript(t *testing.T) {
	needRoot(t)
	needBinaries(t)
	testscript.Run(t, params(filepath.Join("script", "server")))
}

func params(dir string) testscript.Params {
	return testscript.Params{
		Dir:                 dir,
		RequireExplicitExec: true,
		RequireUniqueNames:  true,
		Setup: func(env *testscript.Env) error {
			env.Setenv("PATH", binDir+string(os.PathListSeparator)+env.Getenv("PATH"))
			env.Setenv("AIRLOCK_DATA_DIR", filepath.Join(env.WorkDir, "state"))
			env.Setenv("AIRLOCK_API_URL", "")
			env.Setenv("AIRLOCK_API_KEY", "")
			env.Setenv("ROOT", root)
			return nil
		},
		Cmds: map[string]func(ts *testscript.TestScript, neg bool, args []string){
			"code":  code,
			"serve": serve,
			"setid": setID,
		},
	}
}

// code N COMMAND... runs a command that must end with the exit code N.
func code(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) < 2 {
		ts.Fatalf("usage: code N COMMAND...")
	}
	err := ts.Exec(args[1], args[2:]...)
	got := "0"
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		got = fmt.Sprint(exit.ExitCode())
	} else if err != nil {
		ts.Fatalf("%v", err)
	}
	if got != args[0] {
		ts.Fatalf("exit code %s, want %s", got, args[0])
	}
}

// serve FLAG... starts a server on a free port, which ends with the script,
// and sets URL to its address. The line that says it is in serve.out.
func serve(ts *testscript.TestScript, neg bool, args []string) {
	if neg {
		ts.Fatalf("usage: serve FLAG...")
	}
	log, err := os.Create(ts.MkAbs("serve.log"))
	ts.Check(err)
	cmd := exec.Command(filepath.Join(binDir, "airlock"), append([]string{"serve", "--listen", "127.0.0.1:0"}, args...)...)
	cmd.Dir = ts.MkAbs(".")
	cmd.Env = append(os.Environ(), "AIRLOCK_DATA_DIR="+ts.Getenv("AIRLOCK_DATA_DIR"))
	cmd.Stderr = log
	out, err := cmd.StdoutPipe()
	ts.Check(err)
	ts.Check(cmd.Start())
	ts.Defer(func() {
		cmd.Process.Signal(syscall.SIGTERM)
		stuck := time.AfterFunc(20*time.Second, func() { cmd.Process.Kill() })
		cmd.Wait()
		if !stuck.Stop() {
			ts.Fatalf("the server did not end within 20 s; its log: %s", ts.ReadFile("serve.log"))
		}
		log.Close()
	})
	late := time.AfterFunc(60*time.Second, func() { cmd.Process.Kill() })
	defer late.Stop()
	line, err := bufio.NewReader(out).ReadString('\n')
	ts.Check(os.WriteFile(ts.MkAbs("serve.out"), []byte(line), 0o600))
	var ready struct{ Listening string }
	if words := strings.Fields(line); len(words) > 3 && words[1] == "listens" { // "airlock listens on URL and PATH"
		ready.Listening = words[3]
	} else if err == nil {
		err = json.Unmarshal([]byte(line), &ready)
	}
	if ready.Listening != "" {
		ts.Setenv("URL", ready.Listening)
		go io.Copy(io.Discard, out)
		return
	}
	ts.Fatalf("the server did not start: %q, %v; its log: %s", line, err, ts.ReadFile("serve.log"))
}

// setid NAME sets NAME to the last output, a single word.
func setID(ts *testscript.TestScript, neg bool, args []string) {
	words := strings.Fields(ts.ReadFile("stdout"))
	if neg || len(args) != 1 || len(words) != 1 {
		ts.Fatalf("usage: setid NAME, after a command that printed one word; it printed %q", words)
	}
	ts.Setenv(args[0], words[0])
}
