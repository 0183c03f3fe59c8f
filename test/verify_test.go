package test

import (
	"bytes"
	"context"
	"crypto"
	"crypto/ed25519"
	"encoding/base64"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/transparency-dev/merkle/rfc6962"
	"github.com/transparency-dev/tessera/api"
	tessera "github.com/transparency-dev/tessera/client"
	"github.com/transparency-dev/tessera/fsck"
	"golang.org/x/mod/sumdb/note"

	"airlock.dev/airlock/audit"
	"airlock.dev/airlock/audit/tiles"
	"airlock.dev/airlock/keystore"
)

// trails are directories as audit.Log left them at several times. The log has
// four parts, the first two of them with more than 256 events; the last two are
// signed with another key.
type trails struct {
	early   string // while the second part was written
	late    string // with more of the second part, and nothing else
	whole   string // with all four
	dropped string // the same, after retention dropped the first and a few more events
	keys    []string
	heads   map[string][]string // of early, late and whole, for each part
	parts   []tiles.Shard       // of whole
	install string
	signer  audit.Config
}

const firstMost, secondEarly, secondMost = 300, 200, 700

func newTrails(t *testing.T) trails {
	t.Helper()
	dir, ctx := t.TempDir(), t.Context()
	keys, err := keystore.Open(ctx, keystore.Config{DataDir: filepath.Join(dir, "data"), KeysDir: filepath.Join(dir, "keys")})
	if err != nil {
		t.Fatal(err)
	}
	defer keys.Close()
	cfg := audit.Config{
		Dir: filepath.Join(dir, "data", "audit"), Installation: keys.Installation(), Version: "test", Sealer: keys,
		Checkpoint: 100 * time.Millisecond, Log: slog.New(slog.DiscardHandler),
	}
	var log *audit.Log
	open := func() {
		t.Helper()
		if cfg.Keys, err = keys.SigningKeys(ctx); err == nil {
			log, err = audit.Open(ctx, cfg)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	tr := trails{heads: map[string][]string{}, install: cfg.Installation}
	// keep closes the log, so that all is signed, copies it and goes on.
	keep := func(name string) string {
		t.Helper()
		if err := log.Close(ctx); err != nil {
			t.Fatal(err)
		}
		to := filepath.Join(dir, name)
		copyDir(t, filepath.Join(cfg.Dir, "log"), filepath.Join(to, "log"))
		open()
		for _, s := range log.Shards() {
			file := filepath.Join(dir, name+"-"+s.ID)
			write(t, file, readFile(t, filepath.Join(to, "log", s.ID, "checkpoint")))
			tr.heads[s.ID] = append(tr.heads[s.ID], file)
		}
		return to
	}
	add := func(n int) {
		t.Helper()
		for i := range n {
			e := audit.Event{Type: "exec.start", Team: "acme", Sandbox: "i1", Actor: audit.Actor{Kind: "token", ID: "i1"}}
			if i == 0 {
				e.Private = []audit.Private{{Subject: "team:acme", Detail: map[string]any{"args": []string{"ls"}}}}
			}
			if _, err := log.Queue(ctx, e); err != nil {
				t.Fatal(err)
			}
		}
	}
	by := audit.Actor{Kind: "operator", ID: "local"}
	rotate := func() {
		t.Helper()
		if err := log.Rotate(ctx, by); err != nil {
			t.Fatal(err)
		}
	}
	open()
	add(firstMost)
	rotate()
	add(secondEarly)
	tr.early = keep("early")
	add(secondMost - secondEarly)
	tr.late = keep("late")
	if _, err := keys.Rotate(ctx, "signing", "log"); err != nil {
		t.Fatal(err)
	}
	if err := log.Close(ctx); err != nil {
		t.Fatal(err)
	}
	open()
	rotate()
	add(10)
	rotate()
	add(20)
	tr.whole = keep("whole")
	tr.parts = log.Shards()
	for _, s := range tr.parts {
		tr.keys = append(tr.keys, s.VKey)
	}
	if err := log.Drop(ctx, by, tr.parts[0].ID); err != nil {
		t.Fatal(err)
	}
	add(3)
	tr.dropped = keep("dropped")
	if err := log.Close(ctx); err != nil {
		t.Fatal(err)
	}
	tr.signer = cfg
	if k := tr.keys; len(k) != 4 || strings.Split(k[1], "+")[2] == strings.Split(k[2], "+")[2] {
		t.Fatalf("not four parts with two keys: %v", k)
	}
	return tr
}

func readFile(t *testing.T, path string) []byte {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// say runs both verifiers: "" is that all is well.
func say(t *testing.T, dir string, keys []string, heads ...string) (ours, theirs string) {
	t.Helper()
	var args, kept []string
	for _, h := range heads {
		args, kept = append(args, "--head", h), append(kept, string(readFile(t, h)))
	}
	report, err := audit.Verify(t.Context(), dir, audit.VerifyOptions{VKeys: keys, Heads: kept})
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range report.Problems {
		ours += fmt.Sprintf("%s: %s %s event %d: %s\n", p.Kind, p.Shard, p.File, p.Seq, p.Text)
	}
	for _, p := range report.Index {
		ours += p + "\n"
	}
	if report.OK != (ours == "") {
		t.Errorf("ok is %v and the problems are %q", report.OK, ours)
	}
	return ours, script(t, dir, append(append(args, filepath.Join(dir, "log")), keys...)...)
}

// script runs the verifier in Python, which always ends with a verdict.
func script(t *testing.T, dir string, args ...string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	out, err := exec.CommandContext(ctx, python, append([]string{"../examples/verify/verify.py"}, args...)...).CombinedOutput()
	lines := strings.Split(strings.TrimSpace(string(out)), "\n")
	last := lines[len(lines)-1]
	switch {
	case err == nil && strings.HasPrefix(last, "OK: "):
		return ""
	case err != nil && strings.HasPrefix(last, "FAILED: ") && !strings.Contains(string(out), "itself"):
		return string(out)
	}
	t.Errorf("the verifier in Python has no verdict: %v\n%s", err, out)
	return string(out)
}

// fsckOf is what Tessera's own checker says of one part.
func fsckOf(t *testing.T, dir, vkey string) {
	t.Helper()
	v, err := note.NewVerifier(vkey)
	if err != nil {
		t.Fatal(err)
	}
	part := v.Name()[strings.LastIndexByte(v.Name(), '/')+1:]
	leaves := func(bundle []byte) ([][]byte, error) {
		var b api.EntryBundle
		if err := b.UnmarshalText(bundle); err != nil {
			return nil, err
		}
		hashes := make([][]byte, len(b.Entries))
		for i, e := range b.Entries {
			hashes[i] = rfc6962.DefaultHasher.HashLeaf(e)
		}
		return hashes, nil
	}
	check := fsck.New(v.Name(), v, &tessera.FileFetcher{Root: filepath.Join(dir, "log", part)}, leaves, fsck.Opts{N: 2})
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	done := make(chan error, 1) // where its workers fail it may wait for ever
	go func() { done <- check.Check(ctx) }()
	select {
	case err = <-done:
	case <-ctx.Done():
		err = ctx.Err()
	}
	if err != nil {
		t.Fatalf("Tessera of %s: %v", part, err)
	}
	s := check.Status()
	for _, r := range append(s.TileRanges, s.EntryRanges) {
		for _, one := range r {
			if one.State != fsck.OK {
				t.Errorf("Tessera of %s: %s", part, one.String())
			}
		}
	}
	if s.ErrorsEncountered > 0 || s.ResourcesFetched < 3 {
		t.Errorf("Tessera of %s: %d files, %d errors", part, s.ResourcesFetched, s.ErrorsEncountered)
	}
}

// edit changes a file of a log.
func edit(t *testing.T, dir, file string, change func(b []byte) []byte) {
	t.Helper()
	path := filepath.Join(dir, "log", filepath.FromSlash(file))
	write(t, path, change(readFile(t, path)))
}

// shorter writes the first bundle and tile of a part as they were when it had n
// entries, changed where a change is given.
func shorter(t *testing.T, dir, part string, n int, bundle, tile func([]byte) []byte) {
	t.Helper()
	tiles := filepath.Join(dir, "log", part, "tile")
	entries, hashes := readFile(t, filepath.Join(tiles, "entries/000")), readFile(t, filepath.Join(tiles, "0/000"))
	end := 0
	for range n {
		end += 2 + int(entries[end])<<8 + int(entries[end+1])
	}
	for _, f := range []struct {
		row    string
		data   []byte
		change func([]byte) []byte
	}{{"entries", entries[:end], bundle}, {"0", hashes[:n*32], tile}} {
		if f.change != nil {
			f.data = f.change(f.data)
		}
		if err := os.MkdirAll(filepath.Join(tiles, f.row, "000.p"), 0o755); err != nil {
			t.Fatal(err)
		}
		write(t, filepath.Join(tiles, f.row, "000.p", fmt.Sprint(n)), f.data)
	}
}

func flip(at int) func([]byte) []byte {
	return func(b []byte) []byte { b[at] ^= 1; return b }
}

// replace replaces a text that is there once.
func replace(t *testing.T, old, with string) func([]byte) []byte {
	return func(b []byte) []byte {
		t.Helper()
		if bytes.Count(b, []byte(old)) != 1 || len(old) != len(with) {
			t.Fatalf("%q can't be replaced", old)
		}
		return bytes.Replace(b, []byte(old), []byte(with), 1)
	}
}

// TestVerifiersAgree: a log with parts, a change of key and a dropped part is
// good for our verifier, Tessera's and the one in Python that knows only
// docs/AUDIT.md; of damage the two that know the format name the place.
func TestVerifiersAgree(t *testing.T) {
	if _, err := os.Stat(python); err != nil {
		t.Skipf("needs the virtual environment that test/e2b/venv.sh makes: %v", err)
	}
	tr := newTrails(t)
	id := make([]string, len(tr.parts))
	for i, s := range tr.parts {
		id[i] = s.ID
	}
	first := tr.keys[:1]
	newestHeads := func(id string) []string { return tr.heads[id][len(tr.heads[id])-2:] } // of whole and dropped

	t.Run("good", func(t *testing.T) {
		for _, dir := range []string{tr.early, tr.late, tr.whole, tr.dropped} {
			for i, k := range tr.keys {
				if _, err := os.Stat(filepath.Join(dir, "log", id[i], "tile")); err == nil {
					fsckOf(t, dir, k)
				}
			}
		}
		for _, c := range []struct {
			name, dir string
			keys      []string
			heads     []string
		}{
			{"early", tr.early, first, tr.heads[id[1]][:1]},
			{"late", tr.late, first, tr.heads[id[1]][:2]},
			{"whole", tr.whole, first, append(tr.heads[id[1]], tr.heads[id[3]][0])},
			{"whole, all keys", tr.whole, tr.keys, nil},
			{"dropped", tr.dropped, tr.keys[1:2], tr.heads[id[3]]},
			{"dropped, with its key", tr.dropped, tr.keys, tr.heads[id[0]][1:]},
		} {
			if ours, theirs := say(t, c.dir, c.keys, c.heads...); ours != "" || theirs != "" {
				t.Errorf("%s:\n%s\n%s", c.name, ours, theirs)
			}
		}
	})

	// What looks odd and is good.
	for _, c := range []struct {
		name  string
		from  string
		alter func(t *testing.T, dir string)
		note  string
	}{
		{"events behind the checkpoint", tr.late, func(t *testing.T, dir string) {
			write(t, filepath.Join(dir, "log", id[1], "checkpoint"), readFile(t, tr.heads[id[1]][0]))
		}, "events are behind it and not signed yet"},
		{"the same, with the parts gone that became whole", tr.late, func(t *testing.T, dir string) {
			write(t, filepath.Join(dir, "log", id[1], "checkpoint"), readFile(t, tr.heads[id[1]][0]))
			for _, gone := range []string{"tile/entries/000.p", "tile/0/000.p"} {
				remove(t, filepath.Join(dir, "log", id[1], gone))
			}
		}, "events are behind it and not signed yet"},
		{"what is left of a shorter tile and bundle", tr.late, func(t *testing.T, dir string) { shorter(t, dir, id[0], 64, nil, nil) }, ""},
		{"a file of somebody else", tr.late, func(t *testing.T, dir string) {
			write(t, filepath.Join(dir, "log", "read\x1bme"), nil)
		}, `read\x1bme`},
		{"a part that was begun", tr.late, func(t *testing.T, dir string) {
			if err := os.Mkdir(filepath.Join(dir, "log", id[1]+"9"), 0o700); err != nil {
				t.Fatal(err)
			}
		}, "it was begun and has nothing in it"},
		{"a part without events", tr.late, func(t *testing.T, dir string) { closeAndStart(t, tr, dir, id[1], id[2]) }, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "audit")
			copyDir(t, c.from, dir)
			c.alter(t, dir)
			if ours, theirs := say(t, dir, first); ours != "" || theirs != "" {
				t.Errorf("%s\n%s", ours, theirs)
			}
			out, _ := exec.Command(python, "../examples/verify/verify.py", filepath.Join(dir, "log"), first[0]).CombinedOutput()
			if !strings.Contains(string(out), c.note) {
				t.Errorf("it does not note %q: %s", c.note, out)
			}
		})
	}

	newest := tr.parts[3]
	for _, c := range []struct {
		name         string
		from         string // whole if ""
		damage       func(t *testing.T, dir string)
		keys         []string
		head         bool // nobody can tell without one
		ours, theirs string
	}{
		{name: "a flipped bit in an entry", damage: func(t *testing.T, dir string) {
			edit(t, dir, id[0]+"/tile/entries/000", func(b []byte) []byte { return flip(bytes.Index(b, []byte(`"seq":77,`)) + 60)(b) })
		}, ours: "altered: " + id[0] + " " + id[0] + "/tile/entries/000 event 77:", theirs: "altered: " + id[0] + "/tile/entries/000 event 77:"},
		{name: "a flipped bit in the last, partial bundle", damage: func(t *testing.T, dir string) {
			edit(t, dir, fmt.Sprintf("%s/tile/entries/000.p/%d", id[3], newest.Size), flip(100))
		}, ours: fmt.Sprintf("event %d: the hash of the event", newest.First), theirs: fmt.Sprintf("event %d: its hash", newest.First)},
		{name: "a number", damage: func(t *testing.T, dir string) {
			edit(t, dir, id[0]+"/tile/entries/000", replace(t, `"seq":77,`, `"seq":78,`))
		}, ours: "event 77:", theirs: "event 77:"},
		{name: "a flipped bit in a tile", damage: func(t *testing.T, dir string) { edit(t, dir, id[0]+"/tile/0/000", flip(32*5)) },
			ours: "altered: " + id[0] + " " + id[0] + "/tile/0/000 event", theirs: "altered: " + id[0] + "/tile/0/000: hash 5 "},
		{name: "a flipped bit in a tile above", damage: func(t *testing.T, dir string) { edit(t, dir, id[0]+"/tile/1/000.p/1", flip(0)) },
			ours: id[0] + "/tile/1/000.p/1", theirs: "altered: " + id[0] + "/tile/1/000.p/1: hash 0 "},
		{name: "an entry and its tile together", damage: func(t *testing.T, dir string) {
			var entry []byte
			edit(t, dir, id[0]+"/tile/entries/000", func(b []byte) []byte {
				b = replace(t, `"seq":77,`, `"seq":78,`)(b)
				var bundle api.EntryBundle
				if err := bundle.UnmarshalText(b); err != nil {
					t.Fatal(err)
				}
				entry = bundle.Entries[77]
				return b
			})
			edit(t, dir, id[0]+"/tile/0/000", func(b []byte) []byte {
				copy(b[77*32:], rfc6962.DefaultHasher.HashLeaf(entry))
				return b
			})
		}, ours: id[0] + "/tile/entries/000", theirs: "altered: " + id[0] + "/tile/entries/000: of the events from 0 on"},
		{name: "a flipped bit in a root", damage: func(t *testing.T, dir string) {
			edit(t, dir, id[1]+"/checkpoint", func(b []byte) []byte {
				at := bytes.Index(b, []byte("\n\n")) - 10
				b[at] = map[bool]byte{false: 'A', true: 'B'}[b[at] == 'A'] // base64 still
				return b
			})
		}, ours: id[1] + "/checkpoint", theirs: "altered: " + id[1] + "/checkpoint: it is not signed by " + tr.keys[1]},
		{name: "a flipped bit in a signature", damage: func(t *testing.T, dir string) {
			edit(t, dir, id[1]+"/checkpoint", func(b []byte) []byte { return flip(len(b) - 20)(b) })
		}, ours: id[1] + "/checkpoint", theirs: "altered: " + id[1] + "/checkpoint: it is not signed by "},
		{name: "bytes behind the signatures", damage: func(t *testing.T, dir string) {
			edit(t, dir, id[1]+"/checkpoint", func(b []byte) []byte { return append(b, "x\n"...) })
		}, ours: id[1] + "/checkpoint", theirs: "altered: " + id[1] + "/checkpoint: it is not a checkpoint"},
		{name: "a bundle cut short", damage: func(t *testing.T, dir string) {
			edit(t, dir, id[0]+"/tile/entries/000", func(b []byte) []byte { return b[:len(b)-10] })
		}, ours: id[0] + "/tile/entries/000 event 255:", theirs: "altered: " + id[0] + "/tile/entries/000: it breaks off behind 255 whole entries"},
		{name: "a bundle with one more", damage: func(t *testing.T, dir string) {
			edit(t, dir, id[0]+"/tile/entries/000", func(b []byte) []byte { return append(b, 0, 1, 'x') })
		}, ours: id[0] + "/tile/entries/000", theirs: "altered: " + id[0] + "/tile/entries/000: it has 257 entries"},
		{name: "an entry in what is left of a shorter bundle", damage: func(t *testing.T, dir string) {
			shorter(t, dir, id[0], 64, replace(t, `"seq":33,`, `"seq":34,`), nil)
		}, ours: "altered: " + id[0] + " " + id[0] + "/tile/entries/000.p/64 event 0:", theirs: "altered: " + id[0] + "/tile/entries/000.p/64: "},
		{name: "a hash in what is left of a shorter tile", damage: func(t *testing.T, dir string) {
			shorter(t, dir, id[0], 64, nil, flip(32*7))
		}, ours: "altered: " + id[0] + " " + id[0] + "/tile/0/000.p/64 event 0:", theirs: "altered: " + id[0] + "/tile/0/000.p/64: "},
		{name: "a shorter bundle with too few", damage: func(t *testing.T, dir string) {
			shorter(t, dir, id[0], 64, func(b []byte) []byte { return b[:len(b)-10] }, nil)
		}, ours: id[0] + "/tile/entries/000.p/64 event 0:", theirs: "altered: " + id[0] + "/tile/entries/000.p/64: it breaks off behind 63"},
		{name: "a tile cut short", damage: func(t *testing.T, dir string) {
			edit(t, dir, id[0]+"/tile/0/000", func(b []byte) []byte { return b[:len(b)-32] })
		}, ours: id[0] + "/tile/0/000", theirs: "altered: " + id[0] + "/tile/0/000: it has 255 entries"},
		{name: "a missing bundle", damage: func(t *testing.T, dir string) { remove(t, filepath.Join(dir, "log", id[1], "tile/entries/001")) },
			ours: "absent: " + id[1] + " " + id[1] + "/tile/entries/001", theirs: "absent: " + id[1] + "/tile/entries/001: "},
		{name: "a missing tile", damage: func(t *testing.T, dir string) { remove(t, filepath.Join(dir, "log", id[1], "tile/0/001")) },
			ours: "absent: " + id[1] + " " + id[1] + "/tile/0/001", theirs: "absent: " + id[1] + "/tile/0/001: "},
		{name: "a missing checkpoint", damage: func(t *testing.T, dir string) { remove(t, filepath.Join(dir, "log", id[1], "checkpoint")) },
			ours: "absent: " + id[1] + " " + id[1] + "/checkpoint", theirs: "absent: " + id[1] + "/checkpoint: "},
		{name: "the first part is missing", damage: func(t *testing.T, dir string) { remove(t, filepath.Join(dir, "log", id[0])) }, keys: tr.keys,
			ours: "absent: " + id[1] + ` "` + id[0] + `"`, theirs: "absent: " + id[0] + ": "},
		{name: "a part in the middle is missing", damage: func(t *testing.T, dir string) { remove(t, filepath.Join(dir, "log", id[2])) }, keys: tr.keys,
			ours: id[2], theirs: "absent: " + id[2] + ": "},
		{name: "the newest part is missing", damage: func(t *testing.T, dir string) { remove(t, filepath.Join(dir, "log", id[3])) },
			ours: `"` + id[3] + `"`, theirs: "absent: " + id[3] + ": "},
		{name: "all parts are missing", damage: func(t *testing.T, dir string) {
			for _, part := range id {
				remove(t, filepath.Join(dir, "log", part))
			}
		}, ours: "absent", theirs: "there is no log"},
		{name: "events removed without a word", damage: func(t *testing.T, dir string) { remove(t, filepath.Join(dir, "log", id[0], "tile")) }, keys: tr.keys,
			ours: "absent: " + id[0] + " " + id[0] + "/tile", theirs: "absent: " + id[0] + "/tile: "},
		{name: "a dropped part with another checkpoint of its own", from: tr.dropped, damage: func(t *testing.T, dir string) {
			write(t, filepath.Join(dir, "log", id[0], "checkpoint"), signedBy(t, tr, id[0], 7))
		}, keys: tr.keys, ours: id[0] + "/checkpoint", theirs: id[0]},
		{name: "the newest events of a closed part removed, with an older genuine checkpoint", damage: func(t *testing.T, dir string) {
			remove(t, filepath.Join(dir, "log", id[1]))
			copyDir(t, filepath.Join(tr.late, "log", id[1]), filepath.Join(dir, "log", id[1]))
		}, ours: "rolled_back: " + id[1] + " " + id[1] + "/checkpoint", theirs: "rolled_back: " + id[1] + "/checkpoint: "},
		{name: "the newest events of the newest part removed, with an older genuine checkpoint", from: tr.late, damage: func(t *testing.T, dir string) {
			remove(t, filepath.Join(dir, "log", id[1]))
			copyDir(t, filepath.Join(tr.early, "log", id[1]), filepath.Join(dir, "log", id[1]))
		}, head: true, ours: "rolled_back: " + id[1] + " " + id[1] + "/checkpoint", theirs: "rolled_back: " + id[1] + "/checkpoint: "},
		{name: "an older copy of all", damage: func(t *testing.T, dir string) {
			remove(t, filepath.Join(dir, "log"))
			copyDir(t, filepath.Join(tr.late, "log"), filepath.Join(dir, "log"))
		}, head: true, ours: "rolled_back", theirs: "rolled_back: airlock/" + tr.install + "/" + id[3]},
		{name: "swapped parts", damage: func(t *testing.T, dir string) {
			at := filepath.Join(dir, "log")
			for _, r := range [][2]string{{id[1], "x"}, {id[2], id[1]}, {"x", id[2]}} {
				if err := os.Rename(filepath.Join(at, r[0]), filepath.Join(at, r[1])); err != nil {
					t.Fatal(err)
				}
			}
		}, ours: id[1] + "/checkpoint", theirs: "altered: " + id[1] + "/checkpoint: it is the checkpoint of airlock/" + tr.install + "/" + id[2]},
		{name: "another key in log.close", damage: func(t *testing.T, dir string) {
			edit(t, dir, fmt.Sprintf("%s/tile/entries/001.p/%d", id[0], tr.parts[0].Size-256), func(b []byte) []byte {
				at := bytes.Index(b, []byte(tr.keys[1]))
				return flip(at + len(tr.keys[1]) - 10)(b)
			})
		}, ours: fmt.Sprintf("event %d:", tr.parts[0].Size-1), theirs: fmt.Sprintf("event %d: its hash", tr.parts[0].Size-1)},
		{name: "the key of another log", damage: func(*testing.T, string) {}, keys: []string{otherKey(t, tr, id[0])},
			ours: id[0] + "/checkpoint", theirs: "altered: " + id[0] + "/checkpoint: it is not signed by "},
		{name: "a key that does not vouch for the part behind the dropped one", from: tr.dropped, damage: func(*testing.T, string) {}, keys: first,
			ours: "unsigned: " + id[1], theirs: "unsigned: " + id[1] + "/checkpoint: "},
	} {
		t.Run(c.name, func(t *testing.T) {
			from, keys, heads := c.from, c.keys, []string(nil)
			if from == "" {
				from = tr.whole
			}
			if keys == nil {
				keys = first
			}
			dir := filepath.Join(t.TempDir(), "audit")
			copyDir(t, from, dir)
			c.damage(t, dir)
			if c.head {
				if ours, theirs := say(t, dir, keys); ours != "" || theirs != "" {
					t.Errorf("found without a head:\n%s\n%s", ours, theirs)
				}
				heads = tr.heads[id[1]][1:2]
				if from == tr.whole {
					heads = newestHeads(id[3])[:1]
				}
			}
			ours, theirs := say(t, dir, keys, heads...)
			if ours == "" || !strings.Contains(ours, c.ours) {
				t.Errorf("ours does not say %q:\n%s", c.ours, ours)
			}
			if theirs == "" || !strings.Contains(theirs, c.theirs) {
				t.Errorf("the one in Python does not say %q:\n%s", c.theirs, theirs)
			}
		})
	}

	t.Run("a flipped bit in each file", func(t *testing.T) {
		root := filepath.Join(tr.early, "log")
		err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
			file, _ := filepath.Rel(root, path)
			if err != nil || d.IsDir() || strings.Contains(file, ".state") || filepath.Base(file) == "lock" {
				return err
			}
			dir := filepath.Join(t.TempDir(), "audit")
			copyDir(t, tr.early, dir)
			edit(t, dir, file, func(b []byte) []byte { return flip(len(b) / 2)(b) })
			ours, theirs := say(t, dir, first)
			if ours == "" || theirs == "" {
				t.Errorf("%s: %q %q", file, ours, theirs)
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	})

	t.Run("hostile", func(t *testing.T) {
		for name, spoil := range map[string]func(t *testing.T, part string) error{
			"a symbolic link to a checkpoint": func(t *testing.T, part string) error {
				remove(t, filepath.Join(part, "checkpoint"))
				return os.Symlink(filepath.Join(tr.early, "log", id[0], "checkpoint"), filepath.Join(part, "checkpoint"))
			},
			"a symbolic link for a directory": func(t *testing.T, part string) error {
				remove(t, filepath.Join(part, "tile"))
				return os.Symlink(filepath.Join(tr.early, "log", id[0], "tile"), filepath.Join(part, "tile"))
			},
			"a symbolic link to itself": func(t *testing.T, part string) error {
				remove(t, filepath.Join(part, "tile"))
				return os.Symlink("tile", filepath.Join(part, "tile"))
			},
			"a symbolic link for a part": func(t *testing.T, part string) error {
				remove(t, part)
				return os.Symlink(filepath.Join(tr.early, "log", id[0]), part)
			},
			"a pipe": func(t *testing.T, part string) error {
				remove(t, filepath.Join(part, "tile/entries/000"))
				return syscall.Mkfifo(filepath.Join(part, "tile/entries/000"), 0o600)
			},
			"a directory": func(t *testing.T, part string) error {
				remove(t, filepath.Join(part, "checkpoint"))
				return os.Mkdir(filepath.Join(part, "checkpoint"), 0o700)
			},
			"a file for a directory": func(t *testing.T, part string) error {
				remove(t, filepath.Join(part, "tile"))
				return os.WriteFile(filepath.Join(part, "tile"), []byte("x"), 0o600)
			},
			"a terabyte": func(t *testing.T, part string) error {
				return os.Truncate(filepath.Join(part, "tile/0/000"), 1<<40)
			},
			"a long checkpoint": func(t *testing.T, part string) error {
				return os.Truncate(filepath.Join(part, "checkpoint"), 1<<30)
			},
			"bytes": func(t *testing.T, part string) error {
				return os.WriteFile(filepath.Join(part, "checkpoint"), []byte("\xff\x00\x1b"), 0o600)
			},
			"nothing": func(t *testing.T, part string) error {
				return os.WriteFile(filepath.Join(part, "checkpoint"), nil, 0o600)
			},
			"an empty bundle": func(t *testing.T, part string) error {
				return os.WriteFile(filepath.Join(part, "tile/entries/000"), nil, 0o600)
			},
			"empty entries": func(t *testing.T, part string) error {
				return os.WriteFile(filepath.Join(part, "tile/entries/000"), make([]byte, 512), 0o600)
			},
			"deep JSON": func(t *testing.T, part string) error { return deepen(filepath.Join(part, "tile/entries/000")) },
			"no tiles, no text": func(t *testing.T, part string) error {
				remove(t, filepath.Join(part, "tile"))
				return os.WriteFile(filepath.Join(part, "checkpoint"), nil, 0o600)
			},
		} {
			dir := filepath.Join(t.TempDir(), "audit")
			copyDir(t, tr.late, dir)
			if err := spoil(t, filepath.Join(dir, "log", id[0])); err != nil {
				t.Fatal(err)
			}
			ours, theirs := say(t, dir, first)
			if ours == "" || theirs == "" {
				t.Errorf("%s: %q %q", name, ours, theirs)
			}
		}
	})

	t.Run("called wrongly", func(t *testing.T) {
		for _, args := range [][]string{
			{}, {tr.whole + "/log"}, {tr.whole + "/log", "x"}, {tr.whole + "/log", "a+b+c"}, {tr.whole + "/log", tr.keys[0] + "x"},
			{tr.whole + "/none", tr.keys[0]}, {"--head", "/dev/null", tr.whole + "/log", tr.keys[0]}, {"--head", tr.whole, tr.whole + "/log", tr.keys[0]},
		} {
			out, err := exec.Command(python, append([]string{"../examples/verify/verify.py"}, args...)...).CombinedOutput()
			if exit, ok := err.(*exec.ExitError); !ok || exit.ExitCode() != 2 || strings.Contains(string(out), "Traceback") {
				t.Errorf("%q: %v %s", args, err, out)
			}
		}
	})
}

// otherKey is a key with the name of a part's and other bytes.
func otherKey(t *testing.T, tr trails, id string) string {
	t.Helper()
	keys := tr.signer.Keys
	vkey, err := tiles.VKey(tr.install, id, keys[len(keys)-1].Public().(ed25519.PublicKey))
	if err != nil {
		t.Fatal(err)
	}
	return vkey
}

// signedBy is a checkpoint that the key of the first parts signs, of a tree
// that never was.
func signedBy(t *testing.T, tr trails, id string, size int) []byte {
	t.Helper()
	name := strings.SplitN(tr.keys[0], "+", 2)[0]
	hash := strings.Split(tr.keys[0], "+")[1]
	signer, err := note.NewSigner("PRIVATE+KEY+" + name + "+" + hash + "+" + base64.StdEncoding.EncodeToString(append([]byte{1}, tr.signer.Keys[0].Seed()...)))
	if err != nil {
		t.Fatal(err)
	}
	root := base64.StdEncoding.EncodeToString(rfc6962.DefaultHasher.HashLeaf([]byte(id)))
	text, err := note.Sign(&note.Note{Text: fmt.Sprintf("%s\n%d\n%s\n", name, size, root)}, signer)
	if err != nil {
		t.Fatal(err)
	}
	return text
}

// closeAndStart ends the newest part of a copy and begins the next one, which
// gets no event: a server may be stopped just there.
func closeAndStart(t *testing.T, tr trails, dir, last, next string) {
	t.Helper()
	var signers []crypto.Signer
	for _, k := range tr.signer.Keys {
		signers = append(signers, k)
	}
	ctx := t.Context()
	trees, err := tiles.Open(ctx, tiles.Config{Dir: filepath.Join(dir, "log"), Installation: tr.install, Keys: signers, Checkpoint: 100 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	seq := trees.Next()
	event := fmt.Sprintf(`{"v":1,"seq":%d,"type":"log.close","log":{"shard":"%s","next":"%s","nextVkey":"%s"}}`, seq, last, next, tr.keys[2])
	if err := trees.Integrate(ctx, seq, [][]byte{[]byte(event)}); err != nil {
		t.Fatal(err)
	}
	if err := trees.Start(ctx, next, seq+1, signers[len(signers)-1]); err != nil {
		t.Fatal(err)
	}
	if err := trees.Close(ctx); err != nil {
		t.Fatal(err)
	}
}

// deepen puts an entry into a bundle that no reader of JSON likes.
func deepen(path string) error {
	b, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	var bundle api.EntryBundle
	if err := bundle.UnmarshalText(b); err != nil {
		return err
	}
	bundle.Entries[0] = []byte(`{"v":1,"seq":0,"type":"retention.drop","log":` + strings.Repeat("[", 30_000))
	var out []byte
	for _, e := range bundle.Entries {
		out = append(append(out, byte(len(e)>>8), byte(len(e))), e...)
	}
	return os.WriteFile(path, out, 0o600)
}
