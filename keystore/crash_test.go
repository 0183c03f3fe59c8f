package keystore

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"airlock.dev/airlock"
)

// TestMain is the process that is killed, when it is started as such: it does
// what CRASH says and kills itself at a step.
func TestMain(m *testing.M) {
	if what := os.Getenv("KEYSTORE_CRASH"); what != "" {
		crash(what)
		os.Exit(0) // it had fewer steps
	}
	os.Exit(m.Run())
}

func crash(what string) {
	op, at, _ := strings.Cut(what, " ")
	left, err := strconv.Atoi(at)
	if err != nil {
		panic(err)
	}
	cfg := Config{DataDir: os.Getenv("KEYSTORE_DATA"), Root: os.Getenv("KEYSTORE_ROOT")}
	armed := op == "start"
	cfg.step = func(name string) {
		if !armed {
			return
		}
		if left == 0 {
			fmt.Print(name)
			syscall.Kill(os.Getpid(), syscall.SIGKILL)
			select {}
		}
		left--
	}
	ctx := context.Background()
	k, err := Open(ctx, cfg)
	if err != nil {
		panic(err)
	}
	armed = true
	switch op {
	case "erase":
		_, err = k.Erase(ctx, "customer:1")
	case "create":
		_, err = k.Subject(ctx, "customer:new")
	case "key":
		_, err = k.Rotate(ctx, "signing", "log")
	case "root":
		err = k.RotateRoot(ctx, os.Getenv("KEYSTORE_NEXT"))
	}
	if err != nil {
		panic(err)
	}
}

// killed runs op in another process until its step n, and says at which it
// was killed; "" is none, it ended.
func killed(t *testing.T, cfg Config, next, op string, n int) string {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(exe, "-test.run=^$")
	cmd.Env = append(os.Environ(), fmt.Sprintf("KEYSTORE_CRASH=%s %d", op, n), "KEYSTORE_DATA="+cfg.DataDir, "KEYSTORE_ROOT="+cfg.Root, "KEYSTORE_NEXT="+next)
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	var exit *exec.ExitError
	if err == nil {
		return ""
	}
	if !errors.As(err, &exit) || exit.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
		t.Fatalf("%s %d: %v", op, n, err)
	}
	return string(out)
}

// records are what was sealed before the crash.
func records(t *testing.T, cfg Config) []Sealed {
	t.Helper()
	k := mustOpen(t, cfg)
	if _, _, err := k.SigningKey(t.Context()); err != nil {
		t.Fatal(err)
	}
	var all []Sealed
	for i := range 3 {
		all = append(all, mustSeal(t, k, fmt.Sprint("customer:", i), "x"))
	}
	mustClose(t, k)
	return all
}

func TestKilled(t *testing.T) {
	for op, c := range map[string]struct {
		steps []string // at which it must have been killed
		after func(t *testing.T, k *Keystore, step string)
	}{
		"create": {[]string{"create begin", "create written", "create synced"}, func(t *testing.T, k *Keystore, step string) {
			_, err := k.FindSubject(t.Context(), "customer:new")
			if want := step == "create synced"; want && err != nil {
				t.Errorf("%s: a durable key is gone: %v", step, err)
			}
			s := mustSeal(t, k, "customer:new", "y")
			mustOpenSealed(t, k, s, "y")
		}},
		"key": {[]string{"replace written", "replace exchanged", "replace synced"}, func(t *testing.T, k *Keystore, step string) {
			_, version, err := k.SigningKey(t.Context())
			if err != nil || step == "replace written" && version != 1 || step != "replace written" && version != 2 {
				t.Errorf("%s: version %d, %v", step, version, err)
			}
			if _, err := os.Stat(KeyringPath(k.cfg.DataDir) + ".new"); !os.IsNotExist(err) {
				t.Errorf("%s: half of a keyring is left: %v", step, err)
			}
		}},
		"start": {[]string{"create root", "create keyring", "replace written", "replace exchanged", "replace synced"}, nil},
	} {
		met := map[string]bool{}
		for n := 0; ; n++ {
			cfg := config(t)
			var before []Sealed
			if op != "start" {
				before = records(t, cfg)
			}
			step := killed(t, cfg, "", op, n)
			if step == "" {
				break
			}
			met[step] = true
			k, err := Open(t.Context(), cfg)
			if err != nil {
				t.Fatalf("%s killed at %s: %v", op, step, err)
			}
			for _, s := range before {
				mustOpenSealed(t, k, s, "x")
			}
			if c.after != nil {
				c.after(t, k, step)
			}
			mustOpenSealed(t, k, mustSeal(t, k, "later", "z"), "z")
			mustClose(t, k)
		}
		for _, step := range c.steps {
			if !met[step] {
				t.Errorf("%s was never killed at %q: %v", op, step, met)
			}
		}
	}
}

func TestKilledWhileErasing(t *testing.T) {
	met := map[string]bool{}
	for n := 0; ; n++ {
		cfg := config(t)
		before := records(t, cfg)
		k := mustOpen(t, cfg)
		gone := subjectBytes(t, k, "customer:1")
		mustClose(t, k)
		step := killed(t, cfg, "", "erase", n)
		if step == "" {
			break
		}
		met[step] = true
		k = mustOpen(t, cfg)
		mustOpenSealed(t, k, before[0], "x")
		mustOpenSealed(t, k, before[2], "x")
		_, err := k.OpenSealed(t.Context(), before[1], []byte("ad"))
		switch {
		case step == "erase first side begin":
			if err != nil {
				t.Errorf("%s: %v", step, err)
			}
		case !errors.Is(err, ErrErased):
			t.Errorf("%s: %v", step, err)
		default:
			all := everywhere(t, cfg.DataDir, DefaultKeysDir(cfg.DataDir))
			for what, b := range gone {
				if contains(all, b) {
					t.Errorf("%s: the %s is still there", step, what)
				}
			}
		}
		mustClose(t, k)
	}
	for _, step := range []string{"first side begin", "first side written", "first side synced", "second side begin", "second side written", "second side synced"} {
		if !met["erase "+step] {
			t.Errorf("never killed at %q: %v", step, met)
		}
	}
}

func TestKilledWhileChangingTheRoot(t *testing.T) {
	met := map[string]bool{}
	for n := 0; ; n++ {
		cfg := config(t)
		cfg.Root = rootFile(t)
		before := records(t, cfg)
		old, err := readKeyring(KeyringPath(cfg.DataDir))
		if err != nil {
			t.Fatal(err)
		}
		ring, err := parseKeyring(old)
		if err != nil {
			t.Fatal(err)
		}
		k := mustOpen(t, cfg)
		wrapped := subjectBytes(t, k, "customer:1")["wrapped key"]
		mustClose(t, k)
		next := cfg
		next.Root = "file:" + filepath.Join(t.TempDir(), "next.key")
		step := killed(t, cfg, next.Root, "root", n)
		if step == "" {
			break
		}
		met[step] = true
		k, errOld := Open(t.Context(), cfg)
		if errOld == nil {
			mustClose(t, k)
		}
		_, errNew := os.Stat(strings.TrimPrefix(next.Root, "file:"))
		if errNew == nil {
			if k, errNew = Open(t.Context(), next); errNew == nil {
				mustClose(t, k)
			}
		}
		// Exactly one of them opens it, and opens all of it.
		works, fails := cfg, errNew
		if errOld != nil {
			works, fails = next, errOld
		}
		if (errOld == nil) == (errNew == nil) || airlock.CodeOf(fails) != airlock.Conflict {
			t.Fatalf("%s: old %v, new %v", step, errOld, errNew)
		}
		k = mustOpen(t, works)
		for _, s := range before {
			mustOpenSealed(t, k, s, "x")
		}
		if _, version, err := k.SigningKey(t.Context()); err != nil || version != 1 {
			t.Errorf("%s: %v", step, err)
		}
		if errOld != nil {
			all := everywhere(t, cfg.DataDir, DefaultKeysDir(cfg.DataDir))
			if contains(all, ring.KEK.Wrapped) || contains(all, wrapped) {
				t.Errorf("%s: something that the old root key opens is still there", step)
			}
		}
		mustClose(t, k)
		// It can be done again, or further.
		k = mustOpen(t, works)
		if err := k.RotateRoot(t.Context(), rootFile(t)); err != nil {
			t.Errorf("%s: another change: %v", step, err)
		}
		mustOpenSealed(t, k, before[2], "x")
		mustClose(t, k)
	}
	for _, step := range []string{"rewrap chunk", "rewrap written", "commit keyring", "replace written", "replace exchanged", "replace synced", "committed", "commit chunk", "commit written"} {
		if !met[step] {
			t.Errorf("never killed at %q: %v", step, met)
		}
	}
}
