package index_test

import (
	"bufio"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"airlock.dev/airlock"
	"airlock.dev/airlock/audit/index"
	"golang.org/x/sys/unix"
)

// TestMain is also the processes that the tests kill, or give a full disk.
func TestMain(m *testing.M) {
	for name, run := range map[string]func(string) error{"AIRLOCK_TEST_ADD": addUntilKilled, "AIRLOCK_TEST_FULL": fillDisk} {
		if path := os.Getenv(name); path != "" {
			if err := run(path); err != nil {
				fmt.Fprintln(os.Stderr, err)
				os.Exit(1)
			}
			os.Exit(0)
		}
	}
	os.Exit(m.Run())
}

// change runs SQL on the file of a closed index.
func change(t testing.TB, path string, statements ...string) {
	t.Helper()
	db, err := sql.Open("sqlite", path)
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	for _, s := range statements {
		if _, err := db.Exec(s); err != nil {
			t.Fatalf("%s: %v", s, err)
		}
	}
}

// overwrite writes garbage over a part of a file.
func overwrite(t testing.TB, path string, offset int64, n int) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	garbage := make([]byte, n)
	for i := range garbage {
		garbage[i] = byte(rand.Uint32())
	}
	if _, err := f.WriteAt(garbage, offset); err != nil {
		t.Fatal(err)
	}
}

func TestUnusableFiles(t *testing.T) {
	for _, test := range []struct {
		name  string
		spoil func(t *testing.T, path string)
		want  string
	}{
		{"no database", func(t *testing.T, path string) { overwrite(t, path, 0, 100) }, "file is not a database"},
		{"text", func(t *testing.T, path string) {
			if err := os.WriteFile(path, []byte("hello"), 0o600); err != nil {
				t.Fatal(err)
			}
		}, "file is not a database"},
		{"cut off", func(t *testing.T, path string) {
			if err := os.Truncate(path, 8192); err != nil {
				t.Fatal(err)
			}
		}, "malformed"},
		{"tables overwritten", func(t *testing.T, path string) { overwrite(t, path, 100, 3900) }, ""},
		{"of an older format", func(t *testing.T, path string) { change(t, path, "PRAGMA user_version = 0") }, "its format is 0 and not 1"},
		{"of a newer format", func(t *testing.T, path string) { change(t, path, "PRAGMA user_version = 2") }, "its format is 2 and not 1"},
		{"of something else", func(t *testing.T, path string) {
			if err := os.Remove(path); err != nil {
				t.Fatal(err)
			}
			change(t, path, "CREATE TABLE notes (text TEXT)")
		}, "its format is 0 and not 1"},
		{"with a trigger", func(t *testing.T, path string) {
			change(t, path, "CREATE TRIGGER hide AFTER INSERT ON event BEGIN DELETE FROM event WHERE seq = new.seq; END")
		}, "its tables are not those"},
		{"without an index", func(t *testing.T, path string) { change(t, path, "DROP INDEX event_of") }, "its tables are not those"},
		{"without a state", func(t *testing.T, path string) { change(t, path, "DELETE FROM state") }, "does not say where it ends"},
		{"with the last events gone", func(t *testing.T, path string) { change(t, path, "DELETE FROM event WHERE seq > 5") }, "it has the events from 0 to 5 and says that it has those from 0 to 7"},
		{"with the first events gone", func(t *testing.T, path string) { change(t, path, "DELETE FROM event WHERE seq < 2") }, "it has the events from 2 to 7"},
		{"with an end that is too far", func(t *testing.T, path string) { change(t, path, "UPDATE state SET next = 9") }, "says that it has those from 0 to 8"},
		{"torn, with damage", func(t *testing.T, path string) {
			change(t, path, "UPDATE state SET opened = 'another start of the machine'", "PRAGMA wal_checkpoint(TRUNCATE)")
			overwrite(t, path, 4096*int64(rootPage(t, path, "event_app"))-4096, 64)
		}, "it was not closed in order and has damage"},
		{"torn, with an event lost", func(t *testing.T, path string) {
			change(t, path, "UPDATE state SET opened = 'another start of the machine'", "DELETE FROM event WHERE seq = 3")
		}, "it was not closed in order and has 7 events instead of 8"},
	} {
		t.Run(test.name, func(t *testing.T) {
			x, path := small(t)
			if err := x.Close(); err != nil {
				t.Fatal(err)
			}
			test.spoil(t, path)
			if _, err := index.OpenReader(t.Context(), path); !strings.HasPrefix(test.name, "torn") && airlock.CodeOf(err) != airlock.Unavailable {
				t.Errorf("reader: %v", err)
			}
			x = open(t, path)
			if x.Replaced() == "" || !strings.Contains(x.Replaced(), test.want) || x.Next() != 0 {
				t.Errorf("replaced %q, want %q, next %d", x.Replaced(), test.want, x.Next())
			}
			if _, err := os.Stat(path + ".damaged"); err != nil {
				t.Error(err)
			}
			add(t, x, events)
			if report := check(t, x, events); !report.OK() {
				t.Errorf("made again: %+v", report)
			}
			if err := x.Close(); err != nil {
				t.Fatal(err)
			}
			if x = open(t, path); x.Replaced() != "" || x.Next() != 8 {
				t.Errorf("opened again: replaced %q, next %d", x.Replaced(), x.Next())
			}
		})
	}
}

func rootPage(t testing.TB, path, table string) (page int) {
	t.Helper()
	db, err := sql.Open("sqlite", path)
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	if err := db.QueryRow("SELECT rootpage FROM sqlite_schema WHERE name = ?", table).Scan(&page); err != nil {
		t.Fatal(err)
	}
	return page
}

// An index that was not closed, by a process of this start of the machine, is
// used as it is; nothing of it can be torn.
func TestEmptyAndUnclosedFiles(t *testing.T) {
	path := filepath.Join(t.TempDir(), "index.db")
	if err := os.WriteFile(path, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	x := open(t, path)
	if x.Replaced() != "" {
		t.Errorf("an empty file was replaced: %s", x.Replaced())
	}
	if info, err := os.Stat(path); err != nil || info.Mode() != 0o600 {
		t.Errorf("mode: %v, %v", info.Mode(), err)
	}
	if err := x.Close(); err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(path, 0o700); err != nil {
		t.Fatal(err)
	}
	if _, err := index.Open(t.Context(), path); airlock.CodeOf(err) != airlock.Conflict {
		t.Errorf("a directory: %v", err)
	}
	if _, err := index.OpenReader(t.Context(), path); airlock.CodeOf(err) != airlock.Unavailable {
		t.Errorf("reading a directory: %v", err)
	}
}

// Damage that comes to light while the index is used is said, and the next
// start makes a new one.
func TestDamageInUse(t *testing.T) {
	path := filepath.Join(t.TempDir(), "index.db")
	x := open(t, path)
	for n := uint64(0); n < 20_000; n += 1000 {
		add(t, x, generate(n, 1000))
	}
	if err := x.Close(); err != nil {
		t.Fatal(err)
	}
	info, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	for page := info.Size() / 4096 / 4; page < info.Size()/4096/2; page++ { // Open reads the beginning and the end
		overwrite(t, path, page*4096, 64)
	}
	x = open(t, path)
	if x.Replaced() != "" {
		t.Fatalf("open looked at all of a file that was closed in order: %s", x.Replaced())
	}
	if _, err := x.Find(t.Context(), index.Query{Match: []index.Match{is("status", "error")}}, index.Page{Limit: 1}); airlock.CodeOf(err) != airlock.Unavailable || !strings.Contains(err.Error(), "is damaged: restart the server") {
		t.Errorf("find: %v", err)
	}
	if report := check(t, x, generate(0, 20_000)); len(report.Damage) == 0 {
		t.Errorf("check found no damage: %+v", report)
	}
	if err := x.Close(); err != nil {
		t.Fatal(err)
	}
	if x = open(t, path); !strings.Contains(x.Replaced(), "damage") || x.Next() != 0 {
		t.Errorf("replaced %q, next %d", x.Replaced(), x.Next())
	}
}

func TestReader(t *testing.T) {
	x, path := small(t)
	for _, state := range []string{"while it is written", "when it is closed"} {
		r, err := index.OpenReader(t.Context(), path)
		if err != nil {
			t.Fatalf("%s: %v", state, err)
		}
		found, err := r.Find(t.Context(), index.Query{Match: []index.Match{is("execution", "x2")}}, index.Page{Limit: 10})
		if err != nil || len(found) != 2 || r.Next() != 8 {
			t.Errorf("%s: %v, next %d, %v", state, found, r.Next(), err)
		}
		if report := check(t, r, events); !report.OK() || report.Compared != 8 {
			t.Errorf("%s: %+v", state, report)
		}
		if err := r.Add(t.Context(), generate(8, 1)); airlock.CodeOf(err) != airlock.Conflict {
			t.Errorf("%s: add: %v", state, err)
		}
		if err := r.Reset(t.Context(), 0); airlock.CodeOf(err) != airlock.Conflict {
			t.Errorf("%s: reset: %v", state, err)
		}
		if err := r.Close(); err != nil {
			t.Fatal(err)
		}
		if err := x.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if x = open(t, path); x.Replaced() != "" || x.Next() != 8 {
		t.Errorf("after readers: replaced %q, next %d", x.Replaced(), x.Next())
	}
	if _, err := index.OpenReader(t.Context(), path+".no"); airlock.CodeOf(err) != airlock.Unavailable {
		t.Errorf("nothing there: %v", err)
	}
	if _, err := os.Stat(path + ".no"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the reader made a file: %v", err)
	}
}

const batch = 50

func addUntilKilled(path string) error {
	x, err := index.Open(context.Background(), path)
	if err != nil {
		return err
	}
	if x.Replaced() != "" {
		return errors.New("replaced: " + x.Replaced())
	}
	for {
		if err := x.Add(context.Background(), generate(x.Next(), batch)); err != nil {
			return err
		}
		fmt.Println(x.Next()) // unbuffered: one write
	}
}

// TestKill kills a writer at random moments: all that it said it added is
// there, whole additions only, and the log agrees.
func TestKill(t *testing.T) {
	path := filepath.Join(t.TempDir(), "index.db")
	added := uint64(0)
	for round := range 8 {
		child := exec.Command("/proc/self/exe")
		child.Env = append(os.Environ(), "AIRLOCK_TEST_ADD="+path)
		child.Stderr = os.Stderr
		out, err := child.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := child.Start(); err != nil {
			t.Fatal(err)
		}
		before := added
		lines := bufio.NewScanner(out)
		for lines.Scan() {
			if before == added { // the first addition starts the clock
				time.AfterFunc(time.Duration(rand.IntN(60_000))*time.Microsecond, func() { child.Process.Kill() })
			}
			if added, err = strconv.ParseUint(lines.Text(), 10, 64); err != nil {
				t.Fatal(err)
			}
		}
		child.Wait()
		if added == before {
			t.Fatalf("round %d: the writer added nothing", round)
		}
		x := open(t, path)
		if x.Replaced() != "" || x.Next() < added || x.Next()%batch != 0 {
			t.Fatalf("round %d: replaced %q, next %d, said %d", round, x.Replaced(), x.Next(), added)
		}
		if report := check(t, x, generate(0, int(x.Next()))); !report.OK() || report.Compared != x.Next() {
			t.Fatalf("round %d: %+v", round, report)
		}
		if err := x.Close(); err != nil {
			t.Fatal(err)
		}
	}
	t.Logf("%d events were said to be added over 8 kills and all are there", added)
}

// fillDisk runs in a mount namespace of its own. It fills a small disk, looks
// that all that was added is there, makes room, and goes on.
func fillDisk(dir string) error {
	ctx := context.Background()
	if err := unix.Mount("tmpfs", dir, "tmpfs", unix.MS_NODEV, "size=4m"); err != nil {
		return fmt.Errorf("mount: %w", err)
	}
	spare := filepath.Join(dir, "spare")
	if err := os.WriteFile(spare, make([]byte, 2<<20), 0o600); err != nil {
		return err
	}
	path := filepath.Join(dir, "index.db")
	x, err := index.Open(ctx, path)
	if err != nil {
		return err
	}
	var full error
	for full == nil {
		full = x.Add(ctx, generate(x.Next(), 100))
	}
	if airlock.CodeOf(full) != airlock.NoSpace || !strings.Contains(full.Error(), "make room on its disk") {
		return fmt.Errorf("full: %w", full)
	}
	known := x.Next()
	for range 3 {
		if err := x.Add(ctx, generate(known, 100)); airlock.CodeOf(err) != airlock.NoSpace || x.Next() != known {
			return fmt.Errorf("still full: next %d instead of %d, %w", x.Next(), known, err)
		}
	}
	report, err := x.Check(ctx, math.MaxUint64, log(generate(0, int(known))))
	if err != nil || !report.OK() || report.Compared != known || known == 0 {
		return fmt.Errorf("check of %d events: %+v, %w", known, report, err)
	}
	if err := os.Remove(spare); err != nil {
		return err
	}
	if err := x.Add(ctx, generate(known, 100)); err != nil {
		return fmt.Errorf("with room again: %w", err)
	}
	if err := x.Close(); err != nil {
		return err
	}
	if x, err = index.Open(ctx, path); err != nil {
		return err
	}
	if x.Replaced() != "" || x.Next() != known+100 {
		return fmt.Errorf("opened again: replaced %q, next %d", x.Replaced(), x.Next())
	}
	if report, err = x.Check(ctx, math.MaxUint64, log(generate(0, int(known)+100))); err != nil || !report.OK() {
		return fmt.Errorf("check at the end: %+v, %w", report, err)
	}
	return x.Close()
}

func TestFullDisk(t *testing.T) {
	child := exec.Command("/proc/self/exe")
	child.Env = append(os.Environ(), "AIRLOCK_TEST_FULL="+t.TempDir())
	child.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  syscall.CLONE_NEWUSER | syscall.CLONE_NEWNS,
		UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getuid(), Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getgid(), Size: 1}},
	}
	out, err := child.CombinedOutput()
	var exited *exec.ExitError
	if err != nil && !errors.As(err, &exited) || strings.HasPrefix(string(out), "mount: ") {
		t.Skipf("a small disk needs a user and mount namespace: %v %s", err, out)
	}
	if err != nil {
		t.Errorf("%v: %s", err, out)
	}
}
