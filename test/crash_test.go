package test

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"airlock.dev/airlock"
	"airlock.dev/airlock/client"
)

// crashing is a server that is killed again and again.
type crashing struct {
	t       *testing.T
	cmd     *exec.Cmd
	dataDir string
	log     *bytes.Buffer
	client  *client.Client
}

// noPool is for tests that count all that runs.
const noPool = "--pool-most=0"

func startCrashing(t *testing.T, flags ...string) *crashing {
	needRoot(t)
	needBinaries(t)
	c := &crashing{t: t, dataDir: t.TempDir(), log: &bytes.Buffer{}}
	c.cmd = exec.Command(filepath.Join(binDir, "airlock"), append([]string{"serve", "--listen", "127.0.0.1:0", "--data-dir", c.dataDir}, flags...)...)
	c.cmd.Stderr = c.log
	out, err := c.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := c.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		c.cmd.Process.Signal(syscall.SIGTERM)
		c.cmd.Wait()
		if left := c.groups(); len(left) > 0 {
			t.Errorf("control groups after the stop: %q", left)
		}
		if t.Failed() {
			t.Logf("the server's log:\n%s", c.log)
		}
	})
	if _, err := bufio.NewReader(out).ReadString('\n'); err != nil {
		t.Fatalf("the server does not start: %v\n%s", err, c.log)
	}
	go io.Copy(io.Discard, out)
	c.client, err = client.New(client.Options{Socket: filepath.Join(c.dataDir, "airlock.sock")})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// processes returns the pids below the command by the name they run under.
func (c *crashing) processes() map[string][]int {
	all := map[string][]int{}
	queue := []int{c.cmd.Process.Pid}
	for len(queue) > 0 {
		pid := queue[0]
		queue = queue[1:]
		if cmdline, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid)); err == nil {
			name, _, _ := strings.Cut(string(cmdline), "\x00")
			all[name] = append(all[name], pid)
		}
		tasks, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid))
		for _, task := range tasks {
			data, _ := os.ReadFile(task)
			for _, f := range strings.Fields(string(data)) {
				if child, err := strconv.Atoi(f); err == nil {
					queue = append(queue, child)
				}
			}
		}
	}
	return all
}

// groups returns the names of the control groups of sandboxes, sorted.
func (c *crashing) groups() []string {
	sum := sha256.Sum256([]byte(c.dataDir))
	var names []string
	for _, root := range []string{"/sys/fs/cgroup", "/sys/fs/cgroup/memory"} {
		dirs, _ := filepath.Glob(filepath.Join(root, "airlock-"+hex.EncodeToString(sum[:4]), "*"))
		for _, d := range dirs {
			if info, err := os.Stat(d); err == nil && info.IsDir() {
				names = append(names, filepath.Base(d))
			}
		}
	}
	slices.Sort(names)
	return names
}

// runtime returns the entries of the runtime tree and the mounts below it, as
// the keeper's mount namespace shows them.
func (c *crashing) runtime() (dirs, mounts []string) {
	keeper := c.processes()["airlock-keeper"]
	if len(keeper) != 1 {
		c.t.Fatalf("keepers: %v", keeper)
	}
	entries, err := os.ReadDir(fmt.Sprintf("/proc/%d/root/run/airlock/s", keeper[0]))
	if err != nil {
		c.t.Fatal(err)
	}
	for _, e := range entries {
		dirs = append(dirs, e.Name())
	}
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/mountinfo", keeper[0]))
	if err != nil {
		c.t.Fatal(err)
	}
	for line := range strings.Lines(string(data)) {
		if f := strings.Fields(line); strings.HasPrefix(f[4], "/run/airlock/s/") {
			mounts = append(mounts, f[4])
		}
	}
	return dirs, mounts
}

// server returns the server's pid, or 0 in the moment when there is none. A
// child that the server has forked and that has not yet executed another
// program looks like it; the server is the keeper's child.
func (c *crashing) server() int {
	keeper := fmt.Sprint(c.processes()["airlock-keeper"][0])
	for _, pid := range c.processes()["airlock-server"] {
		status, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
		if strings.Contains(string(status), "PPid:\t"+keeper+"\n") {
			return pid
		}
	}
	return 0
}

// replaced waits for another server than old.
func (c *crashing) replaced(old int) {
	c.t.Helper()
	for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		if now := c.server(); now != 0 && now != old {
			return
		}
		if time.Now().After(deadline) {
			c.t.Fatal("the keeper does not start the server again")
		}
	}
}

func (c *crashing) killServer() {
	c.t.Helper()
	old := c.server()
	if old == 0 {
		c.t.Fatal("no server runs")
	}
	syscall.Kill(old, syscall.SIGKILL)
	c.replaced(old)
}

// settled returns the sandboxes that there are once the host holds exactly
// them. A create that the killed server had not yet accepted may still reach
// the next one and end there, since its client has left.
func (c *crashing) settled(round int) (ids []string) {
	c.t.Helper()
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(50 * time.Millisecond) {
		list, err := c.client.List(c.t.Context(), nil) // answered once the new server has recovered
		if err != nil {
			c.t.Fatalf("round %d: %v", round, err)
		}
		ids = nil
		for _, info := range list {
			ids = append(ids, info.ID)
		}
		slices.Sort(ids)
		kernels := len(c.processes()["runsc-sandbox"])
		dirs, mounts := c.runtime()
		groups := c.groups()
		if slices.Equal(groups, ids) && slices.Equal(dirs, ids) && kernels == len(ids) && len(mounts) == 0 {
			return ids
		}
		if time.Now().After(deadline) {
			c.t.Fatalf("round %d: sandboxes %q, groups %q, directories %q, kernels %d, mounts %q", round, ids, groups, dirs, kernels, mounts)
		}
	}
}

// TestServerKilled kills the server at 20 random moments while sandboxes are
// made and ended. A sandbox whose create was answered and whose kill was not
// asked for must live; whatever else runs or is left must have an owner.
func TestServerKilled(t *testing.T) {
	c := startCrashing(t, noPool)
	ctx := t.Context()
	alive := map[string]*client.Sandbox{}
	long, err := c.client.Create(ctx, small)
	if err != nil {
		t.Fatal(err)
	}
	if r, err := long.Exec(ctx, client.ExecRequest{Cmd: "/bin/sh", Args: []string{"-c", `(while :; do date +%s.%N > /tmp/beat; sleep 0.05; done) >/dev/null 2>&1 & echo $! > /tmp/pid`}}); err != nil || r.ExitCode != 0 {
		t.Fatalf("%+v, %v", r, err)
	}
	alive[long.ID] = long
	for round := range 20 {
		var (
			mu       sync.Mutex
			wg       sync.WaitGroup
			busy, ok = context.WithCancel(ctx)
		)
		for range 3 {
			wg.Go(func() {
				for busy.Err() == nil {
					sb, err := c.client.Create(busy, small)
					if err != nil {
						return
					}
					mu.Lock()
					alive[sb.ID] = sb
					var victim *client.Sandbox
					if len(alive) > 6 {
						for id, v := range alive {
							if id != long.ID {
								victim = v
								delete(alive, id)
								break
							}
						}
					}
					mu.Unlock()
					if victim != nil {
						c.client.Kill(busy, victim.ID) // it may be cut off: then it is either
					}
				}
			})
		}
		time.Sleep(time.Duration(rand.IntN(600)) * time.Millisecond)
		c.killServer()
		ok()
		wg.Wait()
		ids := c.settled(round)
		for id, sb := range alive {
			if !slices.Contains(ids, id) {
				t.Fatalf("round %d: the sandbox %s is lost", round, id)
			}
			var out bytes.Buffer
			if r, err := sb.Exec(ctx, client.ExecRequest{Cmd: "/bin/echo", Args: []string{"here"}, Stdout: &out, Stderr: io.Discard}); err != nil || out.String() != "here\n" {
				t.Fatalf("round %d: %s does not answer: %+v, %v", round, id, r, err)
			}
		}
	}
	// The process that was started before the first kill has never stopped.
	var out bytes.Buffer
	if r, err := long.Exec(ctx, client.ExecRequest{Cmd: "/bin/sh", Args: []string{"-c", `kill -0 $(cat /tmp/pid) || { echo gone; exit; }; a=$(cat /tmp/beat); for i in $(seq 100); do [ "$a" != "$(cat /tmp/beat)" ] && echo beats && exit; sleep 0.1; done; echo still`}, Stdout: &out, Stderr: io.Discard}); err != nil || out.String() != "beats\n" {
		t.Errorf("the first process: %q, %+v, %v", out.String(), r, err)
	}
	list, err := c.client.List(ctx, nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, info := range list {
		if err := c.client.Kill(ctx, info.ID); err != nil {
			t.Errorf("kill %s: %v", info.ID, err)
		}
	}
	if all := c.processes(); len(all["runsc-sandbox"])+len(all["runsc-gofer"]) != 0 || len(c.groups()) != 0 {
		t.Errorf("after the last kill: %v, groups %q", all, c.groups())
	}
}

// TestPoolKilled kills a server that keeps sandboxes ready: none of them is left
// over, and the next server has as many.
func TestPoolKilled(t *testing.T) {
	c := startCrashing(t, "--pool=3")
	sb, err := c.client.Create(t.Context(), client.CreateRequest{Timeout: 10 * time.Minute})
	if err != nil {
		t.Fatal(err)
	}
	for round := range 4 {
		if round > 0 { // else right after the take
			time.Sleep(time.Duration(rand.IntN(1000)) * time.Millisecond)
		}
		c.killServer()
		var kernels int
		var groups, dirs, mounts []string
		for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(50 * time.Millisecond) {
			if list, err := c.client.List(t.Context(), nil); err != nil || len(list) != 1 || list[0].ID != sb.ID {
				t.Fatalf("round %d: sandboxes %+v, %v", round, list, err)
			}
			kernels, groups = len(c.processes()["runsc-sandbox"]), c.groups()
			dirs, mounts = c.runtime()
			if len(groups) == 4 && slices.Equal(groups, dirs) && kernels == 4 && len(mounts) == 0 {
				break
			}
			if time.Now().After(deadline) {
				t.Fatalf("round %d: groups %q, directories %q, kernels %d, mounts %q", round, groups, dirs, kernels, mounts)
			}
		}
		var out bytes.Buffer
		if r, err := sb.Exec(t.Context(), client.ExecRequest{Cmd: "/bin/echo", Args: []string{"here"}, Stdout: &out, Stderr: io.Discard}); err != nil || out.String() != "here\n" {
			t.Fatalf("round %d: %+v, %v", round, r, err)
		}
	}
}

var small = client.CreateRequest{Timeout: 10 * time.Minute, Limits: airlock.Limits{MemoryMB: 128, DiskMB: 64, Processes: 32}}

// TestKeeperKilled kills the keeper: the host's kernel ends all of it.
func TestKeeperKilled(t *testing.T) {
	c := startCrashing(t, noPool)
	for range 3 {
		if _, err := c.client.Create(t.Context(), small); err != nil {
			t.Fatal(err)
		}
	}
	before := c.processes()
	var pids []int
	for name, p := range before {
		if name != c.cmd.Path {
			pids = append(pids, p...)
		}
	}
	if len(before["runsc-sandbox"]) != 3 {
		t.Fatalf("processes: %v", before)
	}
	syscall.Kill(before["airlock-keeper"][0], syscall.SIGKILL)
	c.cmd.Wait()
	for _, pid := range pids {
		for deadline := time.Now().Add(10 * time.Second); syscall.Kill(pid, 0) == nil; time.Sleep(10 * time.Millisecond) {
			if time.Now().After(deadline) {
				t.Errorf("process %d is left: %v", pid, before)
				break
			}
		}
	}
	// The groups are without processes; the next start removes them.
	next := exec.Command(filepath.Join(binDir, "airlock"), "serve", "--listen", "127.0.0.1:0", "--data-dir", c.dataDir)
	out, err := next.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := next.Start(); err != nil {
		t.Fatal(err)
	}
	bufio.NewReader(out).ReadString('\n')
	if left := c.groups(); len(left) != 0 {
		t.Errorf("groups after the next start: %q", left)
	}
	list, err := c.client.List(t.Context(), nil)
	if err != nil || len(list) != 0 {
		t.Errorf("sandboxes after the next start: %+v, %v", list, err)
	}
	next.Process.Signal(syscall.SIGTERM)
	if err := next.Wait(); err != nil {
		t.Errorf("stop: %v", err)
	}
}

// TestServerReplaced replaces the server by SIGHUP under a client that keeps
// asking: sandboxes stay and no connection is refused.
func TestServerReplaced(t *testing.T) {
	c := startCrashing(t)
	sb, err := c.client.Create(t.Context(), small)
	if err != nil {
		t.Fatal(err)
	}
	old := c.server()
	c.cmd.Process.Signal(syscall.SIGHUP)
	c.replaced(old)
	var out bytes.Buffer
	if _, err := sb.Exec(t.Context(), client.ExecRequest{Cmd: "/bin/echo", Args: []string{"same"}, Stdout: &out, Stderr: io.Discard}); err != nil || out.String() != "same\n" {
		t.Errorf("%q, %v", out.String(), err)
	}
}
