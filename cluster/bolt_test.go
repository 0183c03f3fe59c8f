package cluster_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"airlock.dev/airlock"
	"airlock.dev/airlock/cluster"
	"airlock.dev/airlock/cluster/clustertest"
	"go.etcd.io/bbolt"
)

// TestMain is also the child of TestKill: a writer that reports each key once
// its Update has returned.
func TestMain(m *testing.M) {
	if path := os.Getenv("AIRLOCK_TEST_WRITER"); path != "" {
		if err := writeUntilKilled(path); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}
	os.Exit(m.Run())
}

func open(t *testing.T, path string) *cluster.Bolt {
	t.Helper()
	s, err := cluster.OpenBolt(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

func TestBolt(t *testing.T) {
	clustertest.Run(t, func(t *testing.T) cluster.Store { return open(t, filepath.Join(t.TempDir(), "state.db")) })
}

func TestMemory(t *testing.T) {
	clustertest.Run(t, func(*testing.T) cluster.Store { return cluster.NewMemory() })
}

func TestBoltReopen(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state.db")
	s := open(t, path)
	if err := s.Update(t.Context(), func(tx cluster.Tx) error { return tx.Put("a", []byte("1")) }); err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Get(t.Context(), "a"); airlock.CodeOf(err) != airlock.Unavailable {
		t.Errorf("get after close: %v", err)
	}
	info, err := os.Stat(path)
	if err != nil || info.Mode() != 0o600 {
		t.Errorf("mode = %v, %v", info.Mode(), err)
	}
	if v, err := open(t, path).Get(t.Context(), "a"); err != nil || string(v) != "1" {
		t.Errorf("a = %q, %v", v, err)
	}
}

func TestBoltInUse(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state.db")
	open(t, path)
	_, err := cluster.OpenBolt(path)
	want := "the state file " + path + " is in use by another process: stop the other airlock server, or use another data directory"
	if airlock.CodeOf(err) != airlock.Conflict || err.Error() != want {
		t.Errorf("second open: %v\nwant %s", err, want)
	}
}

func TestBoltNewerVersion(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state.db")
	open(t, path).Close()
	db, err := bbolt.Open(path, 0o600, nil)
	if err != nil {
		t.Fatal(err)
	}
	err = db.Update(func(tx *bbolt.Tx) error { return tx.Bucket([]byte("meta")).Put([]byte("version"), []byte("2")) })
	if err := errors.Join(err, db.Close()); err != nil {
		t.Fatal(err)
	}
	_, err = cluster.OpenBolt(path)
	want := "the state file " + path + ` has format version "2" and this airlock knows up to 1: run the airlock version that wrote it, or a newer one`
	if airlock.CodeOf(err) != airlock.Conflict || err.Error() != want {
		t.Errorf("open: %v\nwant %s", err, want)
	}
}

func TestBoltNotAStateFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state.db")
	if err := os.WriteFile(path, []byte(strings.Repeat("not a database\n", 2000)), 0o600); err != nil {
		t.Fatal(err)
	}
	_, err := cluster.OpenBolt(path)
	if airlock.CodeOf(err) != airlock.Conflict || !strings.Contains(err.Error(), path+" is not an airlock state file") {
		t.Errorf("open: %v", err)
	}
}

func writeUntilKilled(path string) error {
	s, err := cluster.OpenBolt(path)
	if err != nil {
		return err
	}
	var n int
	for {
		err := s.Update(context.Background(), func(tx cluster.Tx) error {
			v, err := tx.Get("last")
			if err != nil {
				return err
			}
			n, _ = strconv.Atoi(string(v))
			n++
			num := []byte(strconv.Itoa(n))
			return errors.Join(tx.Put("last", num), tx.Put(fmt.Sprintf("k/%08d", n), num))
		})
		if err != nil {
			return err
		}
		fmt.Println(n) // unbuffered: one write
	}
}

// TestKill kills a writer at random moments: every key whose Update returned
// is there afterwards, and nothing is half there.
func TestKill(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state.db")
	acked := 0
	for round := range 20 {
		child := exec.Command(os.Args[0])
		child.Env = append(os.Environ(), "AIRLOCK_TEST_WRITER="+path)
		child.Stderr = os.Stderr
		out, err := child.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := child.Start(); err != nil {
			t.Fatal(err)
		}
		lines := bufio.NewScanner(out)
		for lines.Scan() { // the first acknowledgement starts the clock
			acked, _ = strconv.Atoi(lines.Text())
			break
		}
		time.AfterFunc(time.Duration(rand.IntN(40_000))*time.Microsecond, func() { child.Process.Kill() })
		for lines.Scan() {
			acked, _ = strconv.Atoi(lines.Text())
		}
		child.Wait()

		s, err := cluster.OpenBolt(path)
		if err != nil {
			t.Fatalf("round %d: open after kill: %v", round, err)
		}
		pairs, err := s.Range(t.Context(), "k/", "", 1_000_000)
		if err != nil {
			t.Fatal(err)
		}
		last, err := s.Get(t.Context(), "last")
		if err != nil {
			t.Fatal(err)
		}
		for i, p := range pairs {
			if p.Key != fmt.Sprintf("k/%08d", i+1) || string(p.Value) != strconv.Itoa(i+1) {
				t.Fatalf("round %d: pair %d is %q", round, i, p)
			}
		}
		if len(pairs) < acked || string(last) != strconv.Itoa(len(pairs)) {
			t.Fatalf("round %d: %d keys, last %s, acknowledged %d", round, len(pairs), last, acked)
		}
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
	}
	t.Logf("%d keys were acknowledged over 20 kills and all are there", acked)
	if acked < 20 {
		t.Error("the writer hardly wrote")
	}
}

func BenchmarkUpdate(b *testing.B) {
	s, err := cluster.OpenBolt(filepath.Join(b.TempDir(), "state.db"))
	if err != nil {
		b.Fatal(err)
	}
	defer s.Close()
	value := make([]byte, 1000)
	for i := 0; b.Loop(); i++ {
		if err := s.Update(b.Context(), func(tx cluster.Tx) error { return tx.Put(fmt.Sprintf("k/%08d", i), value) }); err != nil {
			b.Fatal(err)
		}
	}
}
