package keystore

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/ed25519"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"airlock.dev/airlock"
)

func config(t *testing.T) Config {
	t.Helper()
	return Config{DataDir: filepath.Join(t.TempDir(), "data")}
}

func mustOpen(t *testing.T, cfg Config) *Keystore {
	t.Helper()
	k, err := Open(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { k.Close() })
	return k
}

func mustClose(t *testing.T, k *Keystore) {
	t.Helper()
	if err := k.Close(); err != nil {
		t.Fatal(err)
	}
}

func mustSeal(t *testing.T, k *Keystore, subject, text string) Sealed {
	t.Helper()
	s, err := k.SealFor(t.Context(), subject, []byte(text), []byte("ad"))
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func mustOpenSealed(t *testing.T, k *Keystore, s Sealed, want string) {
	t.Helper()
	text, err := k.OpenSealed(t.Context(), s, []byte("ad"))
	if err != nil || string(text) != want {
		t.Fatalf("open %s: %q, %v, want %q", s.Slot, text, err, want)
	}
}

// rootFile makes a root key elsewhere and returns its reference.
func rootFile(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "root.key")
	if err := os.WriteFile(path, []byte(hex.EncodeToString(random(keyLen))), 0o600); err != nil {
		t.Fatal(err)
	}
	return "file:" + path
}

func TestFirstStart(t *testing.T) {
	cfg := config(t)
	k := mustOpen(t, cfg)
	if len(k.Installation()) != 20 {
		t.Errorf("installation = %q", k.Installation())
	}
	key, err := k.Key(t.Context(), "secrets", "db/password")
	if err != nil || len(key.Secret) != 32 || key.Version != 1 || key.State != Current {
		t.Fatalf("key = %+v, %v", key, err)
	}
	for path, mode := range map[string]fs.FileMode{
		cfg.DataDir + "/keyring.json":  0o600,
		cfg.DataDir + ".keys":          0o700 | fs.ModeDir,
		cfg.DataDir + ".keys/root.key": 0o600,
		cfg.DataDir + ".keys/subjects": 0o600,
	} {
		if info, err := os.Stat(path); err != nil || info.Mode() != mode {
			t.Errorf("%s: %v, %v, want %v", path, info.Mode(), err, mode)
		}
	}
	installation := k.Installation()
	mustClose(t, k)
	if _, err := k.Key(t.Context(), "secrets", "db/password"); airlock.CodeOf(err) != airlock.Unavailable {
		t.Errorf("after Close: %v", err)
	}
	k = mustOpen(t, cfg)
	again, err := k.Key(t.Context(), "secrets", "db/password")
	if err != nil || !bytes.Equal(again.Secret, key.Secret) || k.Installation() != installation {
		t.Errorf("after a restart: %+v, %v", again, err)
	}
}

func TestVersions(t *testing.T) {
	cfg := config(t)
	k := mustOpen(t, cfg)
	if _, err := k.Rotate(t.Context(), "signing", "log"); airlock.CodeOf(err) != airlock.NotFound {
		t.Errorf("rotate of what is not there: %v", err)
	}
	first, version, err := k.SigningKey(t.Context())
	if err != nil || version != 1 || len(first) != ed25519.PrivateKeySize {
		t.Fatalf("version %d, %v", version, err)
	}
	info, err := k.Rotate(t.Context(), "signing", "log")
	if err != nil || info.Version != 2 || info.State != Current {
		t.Fatalf("%+v, %v", info, err)
	}
	mustClose(t, k)
	k = mustOpen(t, cfg)
	second, version, err := k.SigningKey(t.Context())
	if err != nil || version != 2 || second.Equal(first) {
		t.Errorf("version %d, %v", version, err)
	}
	keys, err := k.Keys(t.Context(), "signing", "log")
	if err != nil || len(keys) != 2 || !bytes.Equal(keys[0].Secret, first.Seed()) || keys[0].State != Old {
		t.Errorf("keys = %+v, %v", keys, err)
	}
	if _, err := k.Rotate(t.Context(), "subjects", "tags"); airlock.CodeOf(err) != airlock.Invalid {
		t.Errorf("rotate of the tags' key: %v", err)
	}
	l, err := List(cfg.DataDir)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, i := range l.Keys {
		got = append(got, fmt.Sprintf("%s %s %d %s", i.Purpose, i.Name, i.Version, i.State))
	}
	if diff := cmp.Diff([]string{"signing log 1 old", "signing log 2 current", "subjects tags 1 current"}, got); diff != "" {
		t.Errorf("list (-want +got):\n%s", diff)
	}
	if l.Root != "file:"+cfg.DataDir+".keys/root.key" || l.Installation != k.Installation() {
		t.Errorf("list = %+v", l)
	}
	for _, c := range [][2]string{{"", "a"}, {"A", "a"}, {"a", ""}, {"a", "../\n"}, {"a", "-"}, {strings.Repeat("a", 33), "a"}, {"a", strings.Repeat("a", 101)}} {
		if _, err := k.Key(t.Context(), c[0], c[1]); airlock.CodeOf(err) != airlock.Invalid {
			t.Errorf("key %q: %v", c, err)
		}
	}
}

func TestSeal(t *testing.T) {
	cfg := config(t)
	k := mustOpen(t, cfg)
	sealed, err := k.Seal(t.Context(), "tls", []byte("a private key"), []byte("ca"))
	if err != nil || bytes.Contains(sealed, []byte("private")) {
		t.Fatalf("%q, %v", sealed, err)
	}
	if _, err := k.Rotate(t.Context(), "sealing", "tls"); err != nil {
		t.Fatal(err)
	}
	if text, err := k.Unseal(t.Context(), "tls", sealed, []byte("ca")); err != nil || string(text) != "a private key" {
		t.Errorf("after a rotation: %q, %v", text, err)
	}
	another, err := k.Seal(t.Context(), "tls", nil, []byte("ca"))
	if err != nil || another[4] != 2 {
		t.Errorf("sealed with version %d, %v", another[4], err)
	}
	for i := range sealed {
		altered := bytes.Clone(sealed)
		altered[i] ^= 1
		if text, err := k.Unseal(t.Context(), "tls", altered, []byte("ca")); !errors.Is(err, ErrDamaged) || text != nil {
			t.Errorf("byte %d altered: %q, %v", i, text, err)
		}
	}
	for name, c := range map[string]struct {
		name   string
		sealed []byte
		ad     string
	}{
		"another ad": {"tls", sealed, "cb"}, "another name": {"smtp", sealed, "ca"}, "empty": {"tls", nil, "ca"}, "cut": {"tls", sealed[:len(sealed)-1], "ca"},
	} {
		if _, err := k.Unseal(t.Context(), c.name, c.sealed, []byte(c.ad)); !errors.Is(err, ErrDamaged) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := k.Seal(t.Context(), "tls", make([]byte, maxSealed+1), nil); airlock.CodeOf(err) != airlock.TooLarge {
		t.Errorf("too much: %v", err)
	}
	other := mustOpen(t, config(t))
	if _, err := other.Unseal(t.Context(), "tls", sealed, []byte("ca")); !errors.Is(err, ErrDamaged) {
		t.Errorf("in another installation: %v", err)
	}
}

func TestSubjects(t *testing.T) {
	cfg := config(t)
	k := mustOpen(t, cfg)
	ctx := t.Context()
	if _, err := k.FindSubject(ctx, "customer:42"); airlock.CodeOf(err) != airlock.NotFound {
		t.Errorf("before the first use: %v", err)
	}
	if _, err := k.Erase(ctx, "customer:42"); airlock.CodeOf(err) != airlock.NotFound {
		t.Errorf("erase before the first use: %v", err)
	}
	sealed := mustSeal(t, k, "customer:42", "the address")
	place, err := k.Subject(ctx, "customer:42")
	if err != nil || place != (Subject{Slot: sealed.Slot, Pseudonym: sealed.Subject}) || place.Slot != "0.1" || len(place.Pseudonym) != 32 {
		t.Errorf("place = %+v, %v; sealed %+v", place, err, sealed)
	}
	other := mustSeal(t, k, "customer:43", "the address")
	if other.Subject == sealed.Subject || other.Slot == sealed.Slot {
		t.Errorf("two subjects share %+v", other)
	}
	mustOpenSealed(t, k, sealed, "the address")
	altered := sealed
	for name, change := range map[string]func(*Sealed){
		"pseudonym": func(s *Sealed) { s.Subject = other.Subject },
		"slot":      func(s *Sealed) { s.Slot = other.Slot },
		"nonce":     func(s *Sealed) { s.Nonce = other.Nonce },
		"no nonce":  func(s *Sealed) { s.Nonce = nil },
		"data":      func(s *Sealed) { s.Data = other.Data },
		"no data":   func(s *Sealed) { s.Data = nil },
		"no slot":   func(s *Sealed) { s.Slot = "" },
		"far slot":  func(s *Sealed) { s.Slot = "9000000.1" },
		"new slot":  func(s *Sealed) { s.Slot = "0.2" },
		"free slot": func(s *Sealed) { s.Slot = "7.1" },
		"odd slot":  func(s *Sealed) { s.Slot = "00.1" },
	} {
		altered = sealed
		change(&altered)
		if text, err := k.OpenSealed(ctx, altered, []byte("ad")); !errors.Is(err, ErrDamaged) || errors.Is(err, ErrErased) || text != nil {
			t.Errorf("another %s: %q, %v", name, text, err)
		}
	}
	if _, err := k.OpenSealed(ctx, sealed, []byte("another")); !errors.Is(err, ErrDamaged) {
		t.Errorf("another ad: %v", err)
	}
	mustClose(t, k)
	k = mustOpen(t, cfg)
	mustOpenSealed(t, k, sealed, "the address")

	erased, err := k.Erase(ctx, "customer:42")
	if err != nil || erased != place {
		t.Errorf("erased %+v, %v, want %+v", erased, err, place)
	}
	isErased := func() {
		t.Helper()
		if text, err := k.OpenSealed(ctx, sealed, []byte("ad")); !errors.Is(err, ErrErased) || errors.Is(err, ErrDamaged) || text != nil {
			t.Errorf("after the erasure: %q, %v", text, err)
		}
	}
	isErased()
	if _, err := k.FindSubject(ctx, "customer:42"); airlock.CodeOf(err) != airlock.NotFound {
		t.Errorf("after the erasure: %v", err)
	}
	again := mustSeal(t, k, "customer:42", "moved")
	if again.Subject == sealed.Subject || again.Slot != "0.2" {
		t.Errorf("after the erasure: %+v", again)
	}
	isErased()
	mustOpenSealed(t, k, again, "moved")
	mustOpenSealed(t, k, other, "the address")
	mustClose(t, k)
	k = mustOpen(t, cfg)
	isErased()
	mustOpenSealed(t, k, again, "moved")
	mustOpenSealed(t, k, other, "the address")
	for _, subject := range []string{"", strings.Repeat("x", 257)} {
		if _, err := k.Subject(ctx, subject); airlock.CodeOf(err) != airlock.Invalid {
			t.Errorf("a subject of %d bytes: %v", len(subject), err)
		}
	}
	if _, err := k.Subject(ctx, strings.Repeat("\xff", 256)); err != nil {
		t.Error(err)
	}
	canceled, cancel := context.WithCancel(ctx)
	cancel()
	if _, err := k.Subject(canceled, "customer:44"); !errors.Is(err, context.Canceled) {
		t.Errorf("canceled: %v", err)
	}
	text, err := json.Marshal(Sealed{Subject: "s", Slot: "0.1", Nonce: []byte{1}, Data: []byte{2}})
	if want := `{"subject":"s","slot":"0.1","nonce":"AQ==","data":"Ag=="}`; err != nil || string(text) != want {
		t.Errorf("as JSON: %s, %v", text, err)
	}
}

// everywhere returns the bytes of all files below the directories, and of a
// tar of each.
func everywhere(t *testing.T, dirs ...string) []byte {
	t.Helper()
	var all bytes.Buffer
	for _, dir := range dirs {
		err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
			if err != nil || !d.Type().IsRegular() {
				return err
			}
			text, err := os.ReadFile(path)
			all.Write(text)
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		backup := tar.NewWriter(&all)
		if err := errors.Join(backup.AddFS(os.DirFS(dir)), backup.Close()); err != nil {
			t.Fatal(err)
		}
	}
	return all.Bytes()
}

// contains looks for bytes as they are and in the forms that text has.
func contains(all, secret []byte) bool {
	for _, form := range [][]byte{
		secret, []byte(hex.EncodeToString(secret)), []byte(base64.StdEncoding.EncodeToString(secret)), []byte(base64.RawURLEncoding.EncodeToString(secret)),
	} {
		if bytes.Contains(all, form[:len(form)-len(form)%4]) {
			return true
		}
	}
	return false
}

// subjectBytes returns what is known of a subject: key, salt, and the bytes of its slot.
func subjectBytes(t *testing.T, k *Keystore, subject string) map[string][]byte {
	t.Helper()
	number, v, found, err := k.slots.find(k.tag(subject))
	if err != nil || !found {
		t.Fatalf("%s: %v, %v", subject, found, err)
	}
	secret, err := k.openSlot(k.slotKey, number, v.side)
	if err != nil {
		t.Fatal(err)
	}
	return map[string][]byte{"key": secret[:keyLen], "salt": secret[keyLen:], "wrapped key": v.secret[:], "part of the wrapped key": v.secret[8:24],
		"tag": v.tag[:], "nonce": v.nonce[:], "subject": []byte(subject)}
}

func TestNothingIsReadable(t *testing.T) {
	cfg := config(t)
	cfg.Root = rootFile(t)
	k := mustOpen(t, cfg)
	ctx := t.Context()
	if _, err := k.Seal(ctx, "tls", []byte("x"), nil); err != nil {
		t.Fatal(err)
	}
	if _, _, err := k.SigningKey(ctx); err != nil {
		t.Fatal(err)
	}
	mustSeal(t, k, "customer:41", "x")
	mustSeal(t, k, "customer:42", "x")
	dirs := []string{cfg.DataDir, DefaultKeysDir(cfg.DataDir)}
	secret := map[string][]byte{"root": k.root.(*fileRoot).key, "keyring's key": k.c.kek, "key of slots": k.slotKey}
	for _, key := range k.c.keys {
		secret[key.Purpose+" "+key.Name] = key.secret
	}
	kept, gone := subjectBytes(t, k, "customer:41"), subjectBytes(t, k, "customer:42")
	for _, what := range []string{"key", "salt", "subject"} {
		secret["kept "+what], secret["gone "+what] = kept[what], gone[what]
	}
	all := everywhere(t, dirs...)
	for what, b := range secret {
		if contains(all, b) {
			t.Errorf("the %s is in clear", what)
		}
	}
	if !contains(all, gone["wrapped key"]) || !contains(all, gone["tag"]) {
		t.Fatal("the search finds nothing")
	}
	if _, err := k.Erase(ctx, "customer:42"); err != nil {
		t.Fatal(err)
	}
	for _, when := range []string{"at once", "after a restart"} {
		all := everywhere(t, dirs...)
		for what, b := range gone {
			if contains(all, b) {
				t.Errorf("%s the %s is there", when, what)
			}
		}
		if !contains(all, kept["wrapped key"]) {
			t.Errorf("%s the other is not there", when)
		}
		mustClose(t, k)
		k = mustOpen(t, cfg)
	}
}

func TestRootForms(t *testing.T) {
	key := random(keyLen)
	for name, c := range map[string]struct {
		text string
		good bool
	}{
		"base64":         {base64.StdEncoding.EncodeToString(key), true},
		"base64 line":    {base64.StdEncoding.EncodeToString(key) + "\n", true},
		"hex":            {hex.EncodeToString(key) + "\r\n", true},
		"upper hex":      {strings.ToUpper(hex.EncodeToString(key)), true},
		"raw":            {string(key), false},
		"empty":          {"", false},
		"two lines":      {hex.EncodeToString(key)[:32] + "\n" + hex.EncodeToString(key)[32:], false},
		"base64 lines":   {base64.StdEncoding.EncodeToString(key)[:20] + "\n" + base64.StdEncoding.EncodeToString(key)[20:], false},
		"16 bytes":       {hex.EncodeToString(key[:16]), false},
		"33 bytes":       {base64.StdEncoding.EncodeToString(append(key, 1)), false},
		"zeros":          {strings.Repeat("0", 64), false},
		"a phrase":       {"correct horse battery staple", false},
		"much":           {strings.Repeat("a", 5000), false},
		"unused bits":    {base64.StdEncoding.EncodeToString(key)[:42] + "B=", false},
		"no padding":     {base64.RawStdEncoding.EncodeToString(key), false},
		"trailing words": {hex.EncodeToString(key) + " root", false},
	} {
		got, err := decodeRootKey([]byte(c.text))
		if c.good != (err == nil) || c.good && !bytes.Equal(got, key) {
			t.Errorf("%s: %x, %v", name, got, err)
		}
	}
}

func TestReferences(t *testing.T) {
	wd, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	uri := "pkcs11:token=hsm;object=root?module-path=/lib/p.so"
	for ref, want := range map[string]string{
		"file:/etc/airlock/root.key": "file:/etc/airlock/root.key", "/etc/../root.key": "file:/root.key", "root.key": "file:" + wd + "/root.key",
		"file:root.key": "file:" + wd + "/root.key", "./a:b": "file:" + wd + "/a:b", "file:///etc/root.key": "file:/etc/root.key",
		"systemd:airlock-root": "systemd:airlock-root", uri: uri,
		"": "", "file:": "", "systemd:": "", "systemd:../x": "", "systemd:a/b": "", "systemd:.x": "", "vault:secret": "", "env:KEY": "", "a\nb": "", "a\x00": "", "pkcs11:": "",
		strings.Repeat("a", 5000): "",
	} {
		r, err := parseReference(ref)
		if want == "" && airlock.CodeOf(err) != airlock.Invalid || want != "" && (err != nil || r.String() != want) {
			t.Errorf("%.60q: %v, %v", ref, r, err)
		}
	}
	key := base64.StdEncoding.EncodeToString(random(keyLen))
	if _, err := parseReference(key); airlock.CodeOf(err) != airlock.Invalid || strings.Contains(err.Error(), key[:8]) {
		t.Errorf("a key in place of a reference: %v", err)
	}
}

func TestRefusedRoots(t *testing.T) {
	write := func(t *testing.T, path string) string {
		t.Helper()
		if err := os.WriteFile(path, []byte(hex.EncodeToString(random(keyLen))), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	do := func(t *testing.T, err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	for name, c := range map[string]struct {
		prepare func(t *testing.T, data, away string) (ref string)
		says    string
	}{
		"missing": {func(t *testing.T, data, away string) string { return away + "/none" }, "there is no root key"},
		"open to a group": {func(t *testing.T, data, away string) string {
			p := write(t, away+"/k")
			do(t, os.Chmod(p, 0o640))
			return p
		}, "others can read"},
		"open to all": {func(t *testing.T, data, away string) string {
			p := write(t, away+"/k")
			do(t, os.Chmod(p, 0o604))
			return p
		}, "others can read"},
		"a directory": {func(t *testing.T, data, away string) string { return away }, "not a regular file"},
		"a fifo":      {func(t *testing.T, data, away string) string { do(t, unix.Mkfifo(away+"/k", 0o600)); return away + "/k" }, "not a regular file"},
		"a device":    {func(t *testing.T, data, away string) string { return "/dev/zero" }, "not a regular file"},
		"no key in it": {func(t *testing.T, data, away string) string {
			do(t, os.WriteFile(away+"/k", []byte("secret"), 0o600))
			return away + "/k"
		}, "holds no root key"},
		"inside": {func(t *testing.T, data, away string) string { return write(t, data+"/k") }, "inside the data directory"},
		"deep inside": {func(t *testing.T, data, away string) string {
			do(t, os.Mkdir(data+"/d", 0o700))
			return write(t, data+"/d/k")
		}, "inside the data directory"},
		"inside by dots": {func(t *testing.T, data, away string) string { write(t, data+"/k"); return away + "/../data/k" }, "inside the data directory"},
		"inside by a link": {func(t *testing.T, data, away string) string {
			write(t, data+"/k")
			do(t, os.Symlink(data+"/k", away+"/l"))
			return away + "/l"
		}, "inside the data directory"},
		"inside by a linked directory": {func(t *testing.T, data, away string) string {
			write(t, data+"/k")
			do(t, os.Symlink(data, away+"/l"))
			return away + "/l/k"
		}, "inside the data directory"},
		"inside a data directory that is a link": {func(t *testing.T, data, away string) string {
			do(t, os.Remove(data))
			do(t, os.Mkdir(away+"/real", 0o700))
			do(t, os.Symlink(away+"/real", data))
			return write(t, away+"/real/k")
		}, "inside the data directory"},
		"relative": {func(t *testing.T, data, away string) string { write(t, data+"/k"); t.Chdir(data); return "file:k" }, "inside the data directory"},
		"another name inside": {func(t *testing.T, data, away string) string {
			write(t, away+"/k")
			do(t, os.Link(away+"/k", data+"/k"))
			return away + "/k"
		}, "has 2 names"},
		"inside by a bind mount": {func(t *testing.T, data, away string) string {
			write(t, data+"/k")
			bindMount(t, data, away)
			return away + "/k"
		}, "inside the data directory"},
		"inside by a bind mount of a part": {func(t *testing.T, data, away string) string {
			do(t, os.MkdirAll(data+"/a/b", 0o700))
			write(t, data+"/a/b/k")
			bindMount(t, data+"/a/b", away)
			return away + "/k"
		}, "inside the data directory"},
		"inside by a bind mount of the file": {func(t *testing.T, data, away string) string {
			write(t, data+"/k")
			write(t, away+"/other")
			bindMount(t, data+"/k", away+"/other")
			return away + "/other"
		}, "inside the data directory"},
		"another file system mounted inside": {func(t *testing.T, data, away string) string {
			do(t, os.Mkdir(data+"/d", 0o700))
			bindMount(t, away, data+"/d")
			write(t, away+"/k")
			return data + "/d/k"
		}, "inside the data directory"},
		"no credentials": {func(t *testing.T, data, away string) string {
			t.Setenv("CREDENTIALS_DIRECTORY", "")
			return "systemd:root"
		}, "passed no credentials"},
		"credentials inside": {func(t *testing.T, data, away string) string {
			write(t, data+"/root")
			t.Setenv("CREDENTIALS_DIRECTORY", data)
			return "systemd:root"
		}, "inside the data directory"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			data, away := filepath.Join(dir, "data"), filepath.Join(dir, "away")
			do(t, os.Mkdir(data, 0o700))
			do(t, os.Mkdir(away, 0o700))
			cfg := Config{DataDir: data, KeysDir: filepath.Join(dir, "keys"), Root: c.prepare(t, data, away)}
			k, err := Open(t.Context(), cfg)
			if err == nil {
				k.Close()
			}
			if airlock.CodeOf(err) != airlock.Invalid || !strings.Contains(err.Error(), c.says) {
				t.Errorf("%v, want %q", err, c.says)
			}
			if _, err := os.Stat(KeyringPath(data)); !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("a keyring was made: %v", err)
			}
		})
	}
}

// bindMount mounts from at to, in this process's own view if it may.
func bindMount(t *testing.T, from, to string) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("mounts, and needs root")
	}
	if err := unix.Mount(from, to, "", unix.MS_BIND, ""); err != nil {
		t.Skipf("this machine lets nobody mount: %v", err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(to, unix.MNT_DETACH); err != nil {
			t.Errorf("unmount: %v", err)
		}
	})
}

func TestSystemdCredential(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(dir+"/airlock-root", []byte(hex.EncodeToString(random(keyLen))), 0o440); err != nil {
		t.Fatal(err)
	}
	t.Setenv("CREDENTIALS_DIRECTORY", dir)
	cfg := config(t)
	cfg.Root = "systemd:airlock-root"
	k := mustOpen(t, cfg)
	sealed := mustSeal(t, k, "a", "text")
	mustClose(t, k)
	k = mustOpen(t, cfg)
	mustOpenSealed(t, k, sealed, "text")
	if _, err := os.Stat(DefaultKeysDir(cfg.DataDir) + "/root.key"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a root key was made that nothing needs: %v", err)
	}
}

func TestKeysDirRefused(t *testing.T) {
	dir := t.TempDir()
	data := filepath.Join(dir, "data")
	if err := os.MkdirAll(filepath.Join(data, "keys"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(filepath.Join(data, "keys"), filepath.Join(dir, "link")); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(filepath.Join(dir, "open"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "file"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for keys, says := range map[string]string{data: "inside", filepath.Join(data, "keys"): "inside", filepath.Join(dir, "link"): "inside", filepath.Join(dir, "open"): "others can enter", filepath.Join(dir, "file"): "not a directory"} {
		if _, err := Open(t.Context(), Config{DataDir: data, KeysDir: keys}); airlock.CodeOf(err) != airlock.Invalid || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %v, want %q", keys, err, says)
		}
	}
}

// What belongs together and is not there, or is another's, is told by name,
// and nothing is made in its place.
func TestMissingParts(t *testing.T) {
	for name, c := range map[string]struct {
		harm func(t *testing.T, cfg *Config, other Config) error
		says []string
	}{
		"root key removed": {func(_ *testing.T, cfg *Config, _ Config) error {
			return os.Remove(DefaultKeysDir(cfg.DataDir) + "/root.key")
		}, []string{"root.key is missing", "restore file:"}},
		"root key of another": {func(t *testing.T, cfg *Config, other Config) error {
			text, err := os.ReadFile(DefaultKeysDir(other.DataDir) + "/root.key")
			return errors.Join(err, os.WriteFile(DefaultKeysDir(cfg.DataDir)+"/root.key", text, 0o600))
		}, []string{"does not open the keyring"}},
		"root key elsewhere": {func(t *testing.T, cfg *Config, _ Config) error {
			cfg.Root = rootFile(t)
			return nil
		}, []string{"does not open the keyring", "it was wrapped with file:", "data.keys/root.key"}},
		"keyring removed": {func(_ *testing.T, cfg *Config, _ Config) error {
			return os.Remove(KeyringPath(cfg.DataDir))
		}, []string{"the keyring", "is missing", "restore"}},
		"keyring of another": {func(_ *testing.T, cfg *Config, other Config) error {
			text, err := os.ReadFile(KeyringPath(other.DataDir))
			return errors.Join(err, os.WriteFile(KeyringPath(cfg.DataDir), text, 0o600))
		}, []string{"does not open the keyring"}},
		"subjects removed": {func(_ *testing.T, cfg *Config, _ Config) error {
			return os.Remove(DefaultKeysDir(cfg.DataDir) + "/subjects")
		}, []string{"subjects is missing", "--keys-dir"}},
		"subjects of another": {func(_ *testing.T, cfg *Config, other Config) error {
			text, err := os.ReadFile(DefaultKeysDir(other.DataDir) + "/subjects")
			return errors.Join(err, os.WriteFile(DefaultKeysDir(cfg.DataDir)+"/subjects", text, 0o600))
		}, []string{"belongs to another keyring"}},
		"subjects empty": {func(_ *testing.T, cfg *Config, _ Config) error {
			return os.Truncate(DefaultKeysDir(cfg.DataDir)+"/subjects", 0)
		}, []string{"subjects cannot be used", "restore"}},
		"keyring empty": {func(_ *testing.T, cfg *Config, _ Config) error {
			return os.Truncate(KeyringPath(cfg.DataDir), 0)
		}, []string{"keyring.json cannot be used", "restore"}},
		"subjects open to all": {func(_ *testing.T, cfg *Config, _ Config) error {
			return os.Chmod(DefaultKeysDir(cfg.DataDir)+"/subjects", 0o644)
		}, []string{"subjects has mode"}},
	} {
		t.Run(name, func(t *testing.T) {
			cfg, other := config(t), config(t)
			for _, c := range []Config{cfg, other} {
				k := mustOpen(t, c)
				mustSeal(t, k, "a", "text")
				mustClose(t, k)
			}
			changed := cfg
			if err := c.harm(t, &changed, other); err != nil {
				t.Fatal(err)
			}
			before := everywhere(t, cfg.DataDir, DefaultKeysDir(cfg.DataDir))
			_, err := Open(t.Context(), changed)
			if code := airlock.CodeOf(err); code != airlock.Conflict && code != airlock.Invalid {
				t.Fatalf("%v", err)
			}
			for _, say := range c.says {
				if !strings.Contains(err.Error(), say) {
					t.Errorf("%v does not say %q", err, say)
				}
			}
			if !bytes.Equal(before, everywhere(t, cfg.DataDir, DefaultKeysDir(cfg.DataDir))) {
				t.Error("the refusal changed something")
			}
		})
	}
}

func TestOneProcess(t *testing.T) {
	cfg := config(t)
	k := mustOpen(t, cfg)
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Millisecond)
	defer cancel()
	if _, err := Open(ctx, cfg); airlock.CodeOf(err) != airlock.Conflict || !strings.Contains(err.Error(), "stop the server") {
		t.Errorf("a second one: %v", err)
	}
	done := make(chan error, 1)
	go func() {
		second, err := Open(t.Context(), cfg)
		if err == nil {
			err = second.Close()
		}
		done <- err
	}()
	mustClose(t, k)
	if err := <-done; err != nil {
		t.Errorf("after the first one ended: %v", err)
	}
}

// Whatever bit of a keyring flips, it is not taken for another keyring.
func TestKeyringFlips(t *testing.T) {
	cfg := config(t)
	k := mustOpen(t, cfg)
	if _, _, err := k.SigningKey(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := k.Rotate(t.Context(), "signing", "log"); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(KeyringPath(cfg.DataDir))
	if err != nil {
		t.Fatal(err)
	}
	kek := bytes.Clone(k.c.kek)
	open := func(text []byte) (*contents, error) {
		r, err := parseKeyring(text)
		if err != nil {
			return nil, err
		}
		return r.open(kek)
	}
	whole, err := open(text)
	if err != nil || len(whole.keys) != 3 {
		t.Fatal(err)
	}
	for i := range text {
		altered := bytes.Clone(text)
		altered[i] ^= 1 << (i % 8)
		c, err := open(altered)
		if err != nil {
			continue
		}
		again, err := c.encode()
		if err != nil || cmp.Diff(whole.wrapped, c.wrapped) != "" || len(again) != len(text) {
			t.Errorf("flip at %d of %q is taken: %v", i, text[max(0, i-10):min(len(text), i+10)], err)
		}
	}
	r, err := parseKeyring(text)
	if err != nil {
		t.Fatal(err)
	}
	r.Keys[0].Wrapped, r.Keys[1].Wrapped = r.Keys[1].Wrapped, r.Keys[0].Wrapped
	if r.MAC, err = r.mac(kek); err != nil {
		t.Fatal(err)
	}
	if _, err := r.open(kek); !errors.Is(err, errSealBroken) || !strings.Contains(err.Error(), "version 1 of signing log") {
		t.Errorf("swapped versions: %v", err)
	}
}

func FuzzKeyring(f *testing.F) {
	c := &contents{id: newInstallation(), subjects: idText(random(fileIDLen)), kek: make([]byte, keyLen), kekID: kekID{1}}
	if err := c.wrapKEK(f.Context(), &fileRoot{"file:/k", random(keyLen)}); err != nil {
		f.Fatal(err)
	}
	for range 2 {
		next, err := c.with("signing", "log", random(keyLen))
		if err != nil {
			f.Fatal(err)
		}
		c = next
	}
	text, err := c.encode()
	if err != nil {
		f.Fatal(err)
	}
	f.Add(text)
	f.Add([]byte(`{"airlock":"keyring","format":2}`))
	f.Add([]byte(`{}`))
	f.Add(text[:len(text)/2])
	f.Add(append(bytes.Clone(text), "{}"...))
	f.Add(bytes.Replace(text, []byte(`"version": 2`), []byte(`"version": 3`), 1))
	f.Fuzz(func(t *testing.T, text []byte) {
		r, err := parseKeyring(text)
		if err != nil {
			return
		}
		if err := r.validate(); err != nil {
			t.Fatalf("taken, and yet %v", err)
		}
		again, err := json.Marshal(r)
		if err != nil {
			t.Fatal(err)
		}
		r2, err := parseKeyring(again)
		if err != nil || cmp.Diff(r, r2) != "" {
			t.Fatalf("what it writes reads otherwise: %v", err)
		}
		if c, err := r.open(make([]byte, keyLen)); err == nil {
			if _, err := c.encode(); err != nil {
				t.Fatalf("opened, and cannot be written: %v", err)
			}
		}
	})
}

func TestRotateRoot(t *testing.T) {
	cfg := config(t)
	cfg.Root = rootFile(t)
	k := mustOpen(t, cfg)
	ctx := t.Context()
	signing, _, err := k.SigningKey(ctx)
	if err != nil {
		t.Fatal(err)
	}
	file, err := k.Seal(ctx, "tls", []byte("a private key"), nil)
	if err != nil {
		t.Fatal(err)
	}
	var sealed []Sealed
	for i := range 20 {
		sealed = append(sealed, mustSeal(t, k, fmt.Sprint("customer:", i), "x"))
	}
	gone := mustSeal(t, k, "gone", "x")
	if _, err := k.Erase(ctx, "gone"); err != nil {
		t.Fatal(err)
	}
	before, err := os.ReadFile(KeyringPath(cfg.DataDir))
	if err != nil {
		t.Fatal(err)
	}
	wrapped := subjectBytes(t, k, "customer:7")["wrapped key"]
	if err := k.RotateRoot(ctx, cfg.Root); airlock.CodeOf(err) != airlock.Invalid || !strings.Contains(err.Error(), "already") {
		t.Errorf("to itself: %v", err)
	}
	if err := k.RotateRoot(ctx, "file:"+cfg.DataDir+"/inside.key"); airlock.CodeOf(err) != airlock.Invalid {
		t.Errorf("into the data directory: %v", err)
	}
	next := cfg
	next.Root = "file:" + filepath.Join(t.TempDir(), "made", "root.key")
	if err := k.RotateRoot(ctx, next.Root); err == nil {
		t.Error("into a directory that is not there")
	}
	next.Root = "file:" + filepath.Join(t.TempDir(), "made.key")
	if err := k.RotateRoot(ctx, next.Root); err != nil {
		t.Fatal(err)
	}
	works := func() {
		t.Helper()
		if got, _, err := k.SigningKey(ctx); err != nil || !got.Equal(signing) {
			t.Errorf("signing key: %v", err)
		}
		if got, err := k.Unseal(ctx, "tls", file, nil); err != nil || string(got) != "a private key" {
			t.Errorf("unseal: %q, %v", got, err)
		}
		for i, s := range sealed {
			mustOpenSealed(t, k, s, "x")
			if place, err := k.FindSubject(ctx, fmt.Sprint("customer:", i)); err != nil || place.Pseudonym != s.Subject {
				t.Errorf("subject %d: %+v, %v", i, place, err)
			}
		}
		if _, err := k.OpenSealed(ctx, gone, []byte("ad")); !errors.Is(err, ErrErased) {
			t.Errorf("erased before: %v", err)
		}
	}
	works()
	sealed = append(sealed, mustSeal(t, k, "customer:20", "x"))
	mustClose(t, k)
	if _, err := Open(ctx, cfg); airlock.CodeOf(err) != airlock.Conflict || !strings.Contains(err.Error(), "it was wrapped with "+next.Root) {
		t.Errorf("with the old root key: %v", err)
	}
	k = mustOpen(t, next)
	works()
	if len(k.Problems()) > 0 && !strings.Contains(k.Problems()[0], "is in memory") {
		t.Errorf("problems: %q", k.Problems())
	}
	all := everywhere(t, cfg.DataDir, DefaultKeysDir(cfg.DataDir))
	old, err := parseKeyring(before)
	if err != nil {
		t.Fatal(err)
	}
	if contains(all, old.KEK.Wrapped) || contains(all, old.Keys[0].Wrapped) || contains(all, wrapped) {
		t.Error("something that the old root key opens is still there")
	}
	mustClose(t, k)
	// The old keyring from a backup opens nothing of the subjects that are there now.
	if err := os.WriteFile(KeyringPath(cfg.DataDir), before, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(ctx, cfg); airlock.CodeOf(err) != airlock.Conflict || !strings.Contains(err.Error(), "21 subject keys, the first in slot 0, are wrapped by another keyring") {
		t.Errorf("with the old keyring: %v", err)
	}
}

// fading ends after it was asked some times.
type fading struct {
	context.Context
	left int
}

func (f *fading) Err() error {
	if f.left--; f.left < 0 {
		return context.Canceled
	}
	return nil
}

// A change of the root key that fails leaves the old one.
func TestRotateRootFails(t *testing.T) {
	cfg := config(t)
	k := mustOpen(t, cfg)
	sealed := mustSeal(t, k, "a", "x")
	mustSeal(t, k, "b", "x")
	before := mustRead(t, k.slotsPath())
	ctx := &fading{t.Context(), 2} // ends when some are wrapped
	if err := k.RotateRoot(ctx, rootFile(t)); !errors.Is(err, context.Canceled) {
		t.Errorf("canceled: %v", err)
	}
	// The keyring cannot be written: a directory is in the way.
	if err := os.MkdirAll(KeyringPath(cfg.DataDir)+".new/x", 0o700); err != nil {
		t.Fatal(err)
	}
	if err := k.RotateRoot(t.Context(), rootFile(t)); err == nil {
		t.Error("no error where the keyring cannot be written")
	}
	if err := os.RemoveAll(KeyringPath(cfg.DataDir) + ".new"); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(before, mustRead(t, k.slotsPath())) {
		t.Error("subject keys were changed")
	}
	mustOpenSealed(t, k, sealed, "x")
	mustClose(t, k)
	k = mustOpen(t, cfg)
	mustOpenSealed(t, k, sealed, "x")
	if err := k.RotateRoot(t.Context(), rootFile(t)); err != nil {
		t.Errorf("and then it goes: %v", err)
	}
}

// Seals, erasures and openings of few subjects by many at once: what was
// sealed opens with its own text or was erased, never with another's.
func TestConcurrency(t *testing.T) {
	cfg := config(t)
	k := mustOpen(t, cfg)
	ctx := t.Context()
	const workers, rounds, subjects = 8, 60, 5
	var wg sync.WaitGroup
	var mu sync.Mutex
	all := map[string]Sealed{} // by text
	for w := range workers {
		wg.Go(func() {
			for r := range rounds {
				subject := fmt.Sprint("customer:", (w+r)%subjects)
				text := fmt.Sprint(subject, " ", w, " ", r)
				switch {
				case w == 0 && r%3 == 0:
					if _, err := k.Erase(ctx, subject); err != nil && airlock.CodeOf(err) != airlock.NotFound {
						t.Errorf("erase: %v", err)
					}
				case w == 1 && r == rounds/2:
					if err := k.RotateRoot(ctx, rootFile(t)); err != nil {
						t.Errorf("change of root: %v", err)
					}
				default:
					s, err := k.SealFor(ctx, subject, []byte(text), []byte("ad"))
					if err != nil {
						t.Errorf("seal: %v", err)
						return
					}
					if got, err := k.OpenSealed(ctx, s, []byte("ad")); err == nil && string(got) != text || err != nil && !errors.Is(err, ErrErased) {
						t.Errorf("open: %q, %v", got, err)
					}
					if _, err := k.Key(ctx, "secrets", fmt.Sprint("k", r%3)); err != nil {
						t.Errorf("key: %v", err)
					}
					mu.Lock()
					all[text] = s
					mu.Unlock()
				}
			}
		})
	}
	wg.Wait()
	open := 0
	for text, s := range all {
		got, err := k.OpenSealed(ctx, s, []byte("ad"))
		if err == nil {
			open++
		}
		if err == nil && string(got) != text || err != nil && !errors.Is(err, ErrErased) {
			t.Errorf("open %q: %q, %v", text, got, err)
		}
	}
	if open == 0 || open == len(all) {
		t.Errorf("%d of %d can be read", open, len(all))
	}
	if keys, _ := k.slots.numbers(); keys > subjects {
		t.Errorf("%d keys of %d subjects", keys, subjects)
	}
}

func mustRead(t *testing.T, path string) []byte {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return text
}
