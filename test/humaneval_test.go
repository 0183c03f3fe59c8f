package test

import (
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"airlock.dev/airlock"
	"airlock.dev/airlock/client"
)

// task is one of HumanEval: data/README.md says from where.
type task struct {
	ID       string `json:"task_id"`
	Prompt   string `json:"prompt"`
	Entry    string `json:"entry_point"`
	Solution string `json:"canonical_solution"`
	Test     string `json:"test"`
}

// program is a solution, and its test.
func (k task) program(body string) string {
	return k.Prompt + body + "\n" + k.Test + "\ncheck(" + k.Entry + ")\n"
}

func humanEval(t *testing.T) []task {
	t.Helper()
	f, err := os.Open(filepath.Join("data", "HumanEval.jsonl.gz"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	var all []task
	for d := json.NewDecoder(z); ; {
		var k task
		if err := d.Decode(&k); errors.Is(err, io.EOF) {
			return all
		} else if err != nil {
			t.Fatal(err)
		}
		all = append(all, k)
	}
}

// broken is a body that fails the tests of every task: none of them accepts
// None throughout, as a run of all 164 on the host's own python3 showed.
const broken = "    return None\n"

// TestHumanEval has programs as agents write them: every canonical solution
// passes its test and every broken one fails, each in a sandbox of its own.
func TestHumanEval(t *testing.T) {
	s := startServer(t)
	c := s.as(s.key("default", airlock.Client))
	tasks := humanEval(t)
	if len(tasks) != 164 {
		t.Fatalf("%d tasks", len(tasks))
	}
	type job struct {
		name, program string
		check         func(r client.ExecResult, output string) bool
	}
	passed := func(r client.ExecResult, _ string) bool { return r.Outcome == airlock.Exited && r.ExitCode == 0 }
	// It fails in its test, not because it could not be run.
	failed := func(r client.ExecResult, output string) bool {
		return r.Outcome == airlock.Exited && r.ExitCode == 1 && strings.Contains(output, ", in check\n")
	}
	jobs := make(chan job)
	go func() {
		defer close(jobs)
		for _, k := range tasks {
			jobs <- job{k.ID, k.program(k.Solution), passed}
			jobs <- job{k.ID + ", broken", k.program(broken), failed}
		}
	}()
	start := time.Now()
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for j := range jobs {
				if r, output, err := once(t.Context(), c, j.program); err != nil {
					t.Errorf("%s: %v", j.name, err)
				} else if !j.check(r, output) {
					t.Errorf("%s: %+v\n%s", j.name, r, output)
				}
			}
		})
	}
	wg.Wait()
	t.Logf("%d sandboxes in %.1f s", 2*len(tasks), time.Since(start).Seconds())
	if list, err := c.List(t.Context(), nil); err != nil || len(list) != 0 {
		t.Errorf("sandboxes are left: %+v, %v", list, err)
	}
}

// once runs a program in a fresh sandbox.
func once(ctx context.Context, c *client.Client, program string) (_ client.ExecResult, output string, err error) {
	var none client.ExecResult
	sb, err := c.Create(ctx, client.CreateRequest{Timeout: 5 * time.Minute, Limits: airlock.Limits{MemoryMB: 256}})
	if err != nil {
		return none, "", fmt.Errorf("create: %w", err)
	}
	defer func() {
		if e := sb.Close(); e != nil {
			err = errors.Join(err, fmt.Errorf("kill: %w", e))
		}
	}()
	if err := sb.Upload(ctx, "task.py", strings.NewReader(program), 0); err != nil {
		return none, "", fmt.Errorf("upload: %w", err)
	}
	var out bytes.Buffer
	r, err := sb.Exec(ctx, client.ExecRequest{Cmd: "python3", Args: []string{"task.py"}, Stdout: &out, Stderr: &out, Timeout: 2 * time.Minute})
	if err != nil {
		return none, out.String(), fmt.Errorf("exec: %w", err)
	}
	return r, out.String(), nil
}
