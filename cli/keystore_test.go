package cli

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"airlock.dev/airlock/keystore"
)

func TestKeystore(t *testing.T) {
	dir := t.TempDir()
	data, next := filepath.Join(dir, "data"), "file:"+filepath.Join(dir, "next.key")
	k, err := keystore.Open(t.Context(), keystore.Config{DataDir: data})
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := k.SigningKey(t.Context()); err != nil {
		t.Fatal(err)
	}
	// What needs no key is answered while a server has them.
	for _, c := range []struct {
		args string
		code int
		says []string
	}{
		{"list", 0, []string{"root key      file:" + data + ".keys/root.key", "signing   log   1        20", "current"}},
		{"list --json", 0, []string{`"installation":"`, `{"purpose":"signing","name":"log","version":1,`}},
		{"rotate signing log", 1, []string{"another process uses the keys", "stop the server first"}},
		{"stop", 0, nil},
		{"rotate signing log", 0, []string{"signing log is at version 2\n"}},
		{"rotate signing log --json", 0, []string{`"version":3`, `"state":"current"`}},
		{"rotate signing other", 1, []string{"there is no key signing other"}},
		{"rotate subjects tags", 1, []string{"cannot be rotated"}},
		{"rotate-root", 1, []string{"--to is missing"}},
		{"rotate-root --to " + data + "/k", 1, []string{"inside the data directory"}},
		{"rotate-root --to vault:x", 1, []string{"no kind of root key"}},
		{"rotate-root --to " + next, 0, []string{"start the server with --root-key " + next}},
		{"rotate signing log", 1, []string{"it was wrapped with " + next + ": give that with --root-key"}},
		{"rotate signing log --root-key " + next, 0, []string{"version 4"}},
		{"list", 0, []string{"root key      " + next}},
		{"rotate-root --to " + data + ".keys/root.key --json --root-key " + next, 0, []string{`{"root":"file:` + data + `.keys/root.key"}`}},
		{"rotate signing log --keys-dir " + dir + "/elsewhere", 1, []string{"root.key is missing"}},
	} {
		if c.args == "stop" {
			if err := k.Close(); err != nil {
				t.Fatal(err)
			}
			continue
		}
		cmd := newCommand()
		code := cmd.run(t, t.Context(), append([]string{"keystore", "--data-dir", data}, strings.Fields(c.args)...)...)
		said := cmd.out + cmd.errOut
		for _, s := range c.says {
			if !strings.Contains(said, s) {
				t.Errorf("%s says %q, want %q", c.args, said, s)
			}
		}
		if code != c.code {
			t.Errorf("%s: code %d, %q", c.args, code, said)
		}
		if strings.Contains(c.args, "--json") && !json.Valid([]byte(cmd.out)) {
			t.Errorf("%s: no JSON: %q", c.args, cmd.out)
		}
	}
}

func TestServeKeyFlags(t *testing.T) {
	t.Setenv("AIRLOCK_ROOT_KEY", "systemd:airlock-root")
	var got ServeOptions
	c := newCommand()
	c.serve = func(o ServeOptions) error { got = o; return nil }
	if code := c.run(t, t.Context(), "serve", "--keys-dir", "/srv/keys"); code != 0 || got.RootKey != "systemd:airlock-root" || got.KeysDir != "/srv/keys" {
		t.Errorf("code %d, %+v", code, got)
	}
	if code := c.run(t, t.Context(), "serve", "--root-key", "/etc/root.key"); code != 0 || got.RootKey != "/etc/root.key" {
		t.Errorf("code %d, %+v", code, got)
	}
	os.Unsetenv("AIRLOCK_ROOT_KEY")
}
