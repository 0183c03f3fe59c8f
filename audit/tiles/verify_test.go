package tiles

import (
	"bytes"
	"encoding/base64"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/transparency-dev/merkle/rfc6962"
	"github.com/transparency-dev/tessera/api"
	"github.com/transparency-dev/tessera/client"
	"github.com/transparency-dev/tessera/fsck"
	"golang.org/x/mod/sumdb/note"
	"golang.org/x/sys/unix"
)

// twoShards writes a log of two shards: 602 events in the first (two bundles
// and 90 entries), 300 in the second (a bundle and 44).
func twoShards(t testing.TB) (dir string, opts VerifyOptions) {
	t.Helper()
	dir = t.TempDir()
	w := openWriter(t, dir, 1, nil)
	w.start("2026-Q3")
	w.fill(601)
	w.rotate("2026-Q4", 2)
	w.fill(902)
	w.finish()
	return dir, VerifyOptions{VKeys: []string{testVKey(t, "2026-Q3", 1)}, FollowKeys: true}
}

func TestVerifyGood(t *testing.T) {
	dir, opts := twoShards(t)
	r := mustVerify(t, dir, opts)
	if r.Events != 902 || len(r.Notes) != 0 || len(r.Shards) != 2 {
		t.Errorf("%+v", r)
	}
	want := Verified{ID: "2026-Q4", Origin: "airlock/abcdefghijklmnopqrst/2026-Q4", VKey: testVKey(t, "2026-Q4", 2), First: 602, Size: 300}
	got := r.Shards[1]
	got.Root, got.Checkpoint = "", ""
	if got != want {
		t.Errorf("second shard %+v", got)
	}

	// The same with Tessera's own verifier.
	for _, s := range r.Shards {
		v, err := note.NewVerifier(s.VKey)
		if err != nil {
			t.Fatal(err)
		}
		hash := func(raw []byte) (hashes [][]byte, err error) {
			var b api.EntryBundle
			if err := b.UnmarshalText(raw); err != nil {
				return nil, err
			}
			for _, e := range b.Entries {
				hashes = append(hashes, rfc6962.DefaultHasher.HashLeaf(e))
			}
			return hashes, nil
		}
		check := fsck.New(s.Origin, v, client.FileFetcher{Root: filepath.Join(dir, s.ID)}, hash, fsck.Opts{N: 2})
		done := make(chan error, 1)
		go func() { done <- check.Check(t.Context()) }()
		select {
		case err := <-done:
			if err != nil {
				t.Errorf("fsck of %s: %v", s.ID, err)
			}
		case <-time.After(20 * time.Second):
			t.Fatalf("fsck of %s does not end", s.ID)
		}
	}
}

func (p Problem) short() string {
	return fmt.Sprintf("%s %s %d+%d", p.Kind, p.File, p.Seq, p.Events)
}

func shorts(problems []Problem) (all []string) {
	for _, p := range problems {
		all = append(all, p.short())
	}
	return all
}

func TestVerifyNamesTheDamage(t *testing.T) {
	base, opts := twoShards(t)
	const q3, q4 = "2026-Q3/", "2026-Q4/"
	swap := func(a, b string) func(*testing.T, string) {
		return func(t *testing.T, dir string) {
			x, y := readFile(t, filepath.Join(dir, a)), readFile(t, filepath.Join(dir, b))
			write(t, dir, a, y)
			write(t, dir, b, x)
		}
	}
	entry := func(seq int) string { return fmt.Sprintf(`"seq":%d,"type":"test"`, seq) }
	for _, c := range []struct {
		name   string
		damage func(t *testing.T, dir string)
		want   []string
		notes  []string
	}{
		{"an event edited", func(t *testing.T, dir string) {
			edit(t, dir, q3+"tile/entries/001", entry(300), `"seq":300,"type":"tesT"`)
		}, []string{"altered 2026-Q3/tile/entries/001 300+1"}, nil},
		{"an event of the last bundle edited", func(t *testing.T, dir string) {
			edit(t, dir, q4+"tile/entries/001.p/44", entry(900), `"seq":900,"type":"tesT"`)
		}, []string{"altered 2026-Q4/tile/entries/001.p/44 900+1"}, nil},
		{"two events edited", func(t *testing.T, dir string) {
			edit(t, dir, q3+"tile/entries/001", entry(300), `"seq":300,"type":"tesT"`)
			edit(t, dir, q3+"tile/entries/001", entry(310), `"seq":310,"type":"tesT"`)
		}, []string{"altered 2026-Q3/tile/entries/001 300+1", "altered 2026-Q3/tile/entries/001 310+1"}, nil},
		{"an event renumbered", func(t *testing.T, dir string) {
			edit(t, dir, q3+"tile/entries/001", entry(300), `"seq":301,"type":"test"`)
		}, []string{"altered 2026-Q3/tile/entries/001 300+1"}, nil},
		{"the length of an event", func(t *testing.T, dir string) {
			flip(t, dir, q3+"tile/entries/000", 1)
		}, []string{"altered 2026-Q3/tile/entries/000 0+256"}, nil},
		{"the file cut", func(t *testing.T, dir string) {
			b := readFile(t, filepath.Join(dir, q3+"tile/entries/002.p/90"))
			at := bytes.Index(b, []byte(entry(520))) - len(`{"v":1,`) - 2
			write(t, dir, q3+"tile/entries/002.p/90", b[:at])
		}, []string{"altered 2026-Q3/tile/entries/002.p/90 520+82", "unsigned 2026-Q4/checkpoint 602+0"}, nil},
		{"the file cut in an event", func(t *testing.T, dir string) {
			b := readFile(t, filepath.Join(dir, q3+"tile/entries/001"))
			write(t, dir, q3+"tile/entries/001", b[:bytes.Index(b, []byte(entry(300)))])
		}, []string{"altered 2026-Q3/tile/entries/001 300+212"}, nil},
		{"the file emptied", func(t *testing.T, dir string) {
			write(t, dir, q3+"tile/entries/000", nil)
		}, []string{"altered 2026-Q3/tile/entries/000 0+256"}, nil},
		{"an event added to the file", func(t *testing.T, dir string) {
			b := readFile(t, filepath.Join(dir, q3+"tile/entries/001"))
			b = binary.BigEndian.AppendUint16(b, 2)
			write(t, dir, q3+"tile/entries/001", append(b, "{}"...))
		}, []string{"altered 2026-Q3/tile/entries/001 512+0"}, nil},
		{"a bundle removed", func(t *testing.T, dir string) {
			remove(t, dir, q3+"tile/entries/001")
		}, []string{"absent 2026-Q3/tile/entries/001 256+256"}, nil},
		{"the last bundle removed", func(t *testing.T, dir string) {
			remove(t, dir, q3+"tile/entries/002.p")
		}, []string{"absent 2026-Q3/tile/entries/002.p/90 512+90", "unsigned 2026-Q4/checkpoint 602+0"}, nil},
		{"all bundles removed", func(t *testing.T, dir string) {
			remove(t, dir, q3+"tile/entries")
		}, []string{"absent 2026-Q3/tile/entries/000 0+602", "unsigned 2026-Q4/checkpoint 602+0"}, nil},
		{"bundles swapped", swap(q3+"tile/entries/000", q3+"tile/entries/001"),
			[]string{"altered 2026-Q3/tile/entries/000 0+256", "altered 2026-Q3/tile/entries/001 256+256"}, nil},
		{"a tile edited", func(t *testing.T, dir string) { flip(t, dir, q3+"tile/0/001", 32*7) },
			[]string{"altered 2026-Q3/tile/0/001 256+0"}, nil},
		{"a tile at the edge edited", func(t *testing.T, dir string) { flip(t, dir, q3+"tile/0/002.p/90", 32*7) },
			[]string{"altered 2026-Q3/tile/0/002.p/90 512+0"}, nil},
		{"a tile above edited", func(t *testing.T, dir string) { flip(t, dir, q3+"tile/1/000.p/2", 32) },
			[]string{"altered 2026-Q3/tile/1/000.p/2 0+0"}, nil},
		{"a tile cut", func(t *testing.T, dir string) { write(t, dir, q3+"tile/0/001", make([]byte, 100)) },
			[]string{"altered 2026-Q3/tile/0/001 256+0"}, nil},
		{"a tile removed", func(t *testing.T, dir string) { remove(t, dir, q3+"tile/0/001") },
			[]string{"absent 2026-Q3/tile/0/001 256+0"}, nil},
		{"a tile above removed", func(t *testing.T, dir string) { remove(t, dir, q3+"tile/1/000.p") },
			[]string{"absent 2026-Q3/tile/1/000.p/2 0+0"}, nil},
		{"tiles swapped", swap(q3+"tile/0/000", q3+"tile/0/001"),
			[]string{"altered 2026-Q3/tile/0/000 0+0", "altered 2026-Q3/tile/0/001 256+0"}, nil},
		{"event and tile edited alike", func(t *testing.T, dir string) {
			rewrite(t, dir, q3+"tile/entries/001", q3+"tile/0/001", 44)
		}, []string{"altered 2026-Q3/tile/0/001 256+0", "altered 2026-Q3/tile/entries/001 256+256"}, nil},
		{"event and tiles edited alike up to the root", func(t *testing.T, dir string) {
			root := rewrite(t, dir, q3+"tile/entries/001", q3+"tile/0/001", 44)
			b := readFile(t, filepath.Join(dir, q3+"tile/1/000.p/2"))
			copy(b[32:], root)
			write(t, dir, q3+"tile/1/000.p/2", b)
		}, []string{"altered 2026-Q3/checkpoint 0+602", "unsigned 2026-Q4/checkpoint 602+0"}, nil},
		{"event and tile of the last bundle edited alike", func(t *testing.T, dir string) {
			rewrite(t, dir, q4+"tile/entries/001.p/44", q4+"tile/0/001.p/44", 3)
		}, []string{"altered 2026-Q4/checkpoint 602+300"}, nil},
		{"the size in the checkpoint", func(t *testing.T, dir string) { edit(t, dir, q4+"checkpoint", "\n300\n", "\n301\n") },
			[]string{"altered 2026-Q4/checkpoint 602+0"}, nil},
		{"no checkpoint", func(t *testing.T, dir string) { remove(t, dir, q4+"checkpoint") },
			[]string{"absent 2026-Q4/checkpoint 602+0"}, nil},
		{"the checkpoint of the other shard", func(t *testing.T, dir string) {
			write(t, dir, q4+"checkpoint", readFile(t, filepath.Join(dir, q3+"checkpoint")))
		}, []string{"altered 2026-Q4/checkpoint 602+0"}, nil},
		{"a checkpoint that is none", func(t *testing.T, dir string) { write(t, dir, q4+"checkpoint", []byte("\x1b[2Jhello")) },
			[]string{"altered 2026-Q4/checkpoint 602+0"}, nil},
		{"the newest shard removed", func(t *testing.T, dir string) { remove(t, dir, q4) },
			[]string{`absent "2026-Q4" 602+0`}, nil},
		{"the oldest shard removed", func(t *testing.T, dir string) { remove(t, dir, q3) },
			[]string{`absent "2026-Q3" 0+602`, "unsigned 2026-Q4/checkpoint 0+0"}, nil},
		{"the checkpoint of the shard before", func(t *testing.T, dir string) { edit(t, dir, q3+"checkpoint", "\n602\n", "\n601\n") },
			[]string{"altered 2026-Q3/checkpoint 0+0", "unsigned 2026-Q4/checkpoint 0+0"}, nil},
		{"a pipe in place of a tile", func(t *testing.T, dir string) {
			remove(t, dir, q3+"tile/0/001")
			if err := unix.Mkfifo(filepath.Join(dir, q3+"tile/0/001"), 0o600); err != nil {
				t.Fatal(err)
			}
		}, []string{"altered 2026-Q3/tile/0/001 256+0"}, []string{"stray 2026-Q3/tile/0/001 0+0"}},
		{"a directory in place of a bundle", func(t *testing.T, dir string) {
			remove(t, dir, q3+"tile/entries/001")
			if err := os.Mkdir(filepath.Join(dir, q3+"tile/entries/001"), 0o700); err != nil {
				t.Fatal(err)
			}
		}, []string{"altered 2026-Q3/tile/entries/001 256+256"}, []string{"stray 2026-Q3/tile/entries/001 0+0"}},
		{"a link out of the log", func(t *testing.T, dir string) {
			remove(t, dir, q3+"tile/0/001")
			if err := os.Symlink(filepath.Join(base, q3+"tile/0/001"), filepath.Join(dir, q3+"tile/0/001")); err != nil {
				t.Fatal(err)
			}
		}, []string{"altered 2026-Q3/tile/0/001 256+0"}, []string{"stray 2026-Q3/tile/0/001 0+0"}},
		{"a file in place of a directory", func(t *testing.T, dir string) {
			remove(t, dir, q4+"tile/0")
			write(t, dir, q4+"tile/0", nil)
		}, []string{"absent 2026-Q4/tile/0/000 602+0", "absent 2026-Q4/tile/0/001.p/44 858+0"}, []string{"stray 2026-Q4/tile/0 0+0"}},
		{"a giant file", func(t *testing.T, dir string) {
			if err := os.Truncate(filepath.Join(dir, q3+"tile/entries/001"), 1<<40); err != nil {
				t.Fatal(err)
			}
		}, []string{"altered 2026-Q3/tile/entries/001 256+256"}, nil},
		{"files that do not belong", func(t *testing.T, dir string) {
			write(t, dir, "x\xff", nil)
			write(t, dir, q3+"x", nil)
			write(t, dir, q3+"tile/entries/x", nil)
			write(t, dir, q3+"tile/entries/.p", nil)
			write(t, dir, q3+"checkpoint123", nil)
			write(t, dir, q3+"tile/0/0019876", nil)
			if err := os.Mkdir(filepath.Join(dir, q3+"tile/64"), 0o700); err != nil {
				t.Fatal(err)
			}
		}, nil, []string{"stray x\uFFFD 0+0", "stray 2026-Q3/checkpoint123 0+0", "stray 2026-Q3/tile/0/0019876 0+0", "stray 2026-Q3/tile/64 0+0", "stray 2026-Q3/tile/entries/.p 0+0", "stray 2026-Q3/tile/entries/x 0+0", "stray 2026-Q3/x 0+0"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := copyOf(t, base)
			c.damage(t, dir)
			r, err := Verify(t.Context(), dir, opts)
			if err != nil {
				t.Fatal(err)
			}
			if got := shorts(r.Problems); !slices.Equal(got, c.want) {
				t.Errorf("problems:\n%q\nwant\n%q\n%+v", got, c.want, r.Problems)
			}
			if got := shorts(r.Notes); !slices.Equal(got, c.notes) {
				t.Errorf("notes:\n%q\nwant\n%q", got, c.notes)
			}
			if r.OK() != (len(c.want) == 0) || r.Count != len(c.want) {
				t.Errorf("OK %v with %d problems", r.OK(), r.Count)
			}
		})
	}
}

// rewrite changes an entry of a bundle and the tile above to fit. It returns
// the tile's hash.
func rewrite(t *testing.T, dir, entries, tile string, at int) []byte {
	t.Helper()
	b := readFile(t, filepath.Join(dir, entries))
	r := hashing.NewEmptyRange(0)
	hashes := readFile(t, filepath.Join(dir, tile))
	splitBundle(b, func(i int, entry []byte) bool {
		if i == at {
			copy(entry[len(entry)-5:], "tesT")
			copy(hashes[i*32:], rfc6962.DefaultHasher.HashLeaf(entry))
		}
		if err := r.Append(rfc6962.DefaultHasher.HashLeaf(entry), nil); err != nil {
			t.Fatal(err)
		}
		return true
	})
	write(t, dir, entries, b)
	write(t, dir, tile, hashes)
	root, err := r.GetRootHash(nil)
	if err != nil {
		t.Fatal(err)
	}
	return root
}

// With more than one level of whole tiles, a good tile tells which of those
// below is not.
func TestVerifyDeep(t *testing.T) {
	base := t.TempDir()
	w := openWriter(t, base, 1, nil)
	w.start("2026-Q4")
	w.fill(66_000)
	w.finish()
	opts := VerifyOptions{VKeys: []string{testVKey(t, "2026-Q4", 1)}}
	const q4 = "2026-Q4/"
	type change struct {
		file string
		at   int // byte to flip, or -1 to remove the file
	}
	event := change{q4 + "tile/entries/010", bytes.Index(readFile(t, filepath.Join(base, q4+"tile/entries/010")), []byte(`2600,"type":"te`)) + 13}
	for _, c := range []struct {
		name    string
		changes []change
		want    []string
	}{
		{"nothing", nil, nil},
		{"event", []change{event}, []string{"altered 2026-Q4/tile/entries/010 2600+1"}},
		{"event and another tile", []change{event, {q4 + "tile/0/011", 0}},
			[]string{"altered 2026-Q4/tile/entries/010 2600+1", "altered 2026-Q4/tile/0/011 2816+0"}},
		{"event and its tile", []change{event, {q4 + "tile/0/010", 0}},
			[]string{"altered 2026-Q4/tile/0/010 2560+0", "altered 2026-Q4/tile/entries/010 2560+256"}},
		{"event and the tile above its tile", []change{event, {q4 + "tile/1/000", 32 * 20}},
			[]string{"altered 2026-Q4/tile/1/000 0+0", "altered 2026-Q4/tile/entries/010 2600+1"}},
		{"tile of level 1", []change{{q4 + "tile/1/000", 32 * 20}}, []string{"altered 2026-Q4/tile/1/000 0+0"}},
		{"tile of level 2", []change{{q4 + "tile/2/000.p/1", 0}}, []string{"altered 2026-Q4/tile/2/000.p/1 0+0"}},
		{"a bundle and its tile removed", []change{{q4 + "tile/0/010", -1}, {q4 + "tile/entries/010", -1}},
			[]string{"absent 2026-Q4/tile/0/010 2560+0", "absent 2026-Q4/tile/entries/010 2560+256"}},
	} {
		saved := map[string][]byte{}
		for _, d := range c.changes {
			saved[d.file] = readFile(t, filepath.Join(base, d.file))
			if d.at < 0 {
				remove(t, base, d.file)
			} else {
				flip(t, base, d.file, d.at)
			}
		}
		r, err := Verify(t.Context(), base, opts)
		if err != nil {
			t.Fatal(err)
		}
		if got := shorts(r.Problems); !slices.Equal(got, c.want) {
			t.Errorf("%s: problems:\n%q\nwant\n%q\n%+v", c.name, got, c.want, r.Problems)
		}
		for file, data := range saved {
			write(t, base, file, data)
		}
	}
}

func TestVerifyHeads(t *testing.T) {
	dir := t.TempDir()
	w := openWriter(t, dir, 1, nil)
	w.start("2026-Q4")
	w.fill(300)
	w.await()
	early := w.Shards()[0].Checkpoint
	w.finish()
	older := copyOf(t, dir)
	w = openWriter(t, dir, 1, nil)
	w.fill(700)
	w.await()
	late := w.Shards()[0].Checkpoint
	w.finish()
	forked := copyOf(t, older)
	w = openWriter(t, forked, 1, nil)
	w.add(testEvent(300, `"type":"another"`))
	w.fill(800)
	w.finish()

	rolled := copyOf(t, dir) // the checkpoint alone
	write(t, rolled, "2026-Q4/checkpoint", readFile(t, filepath.Join(older, "2026-Q4/checkpoint")))

	keys := []string{testVKey(t, "2026-Q4", 1)}
	for _, c := range []struct {
		name, dir string
		heads     []string
		want      []string
	}{
		{"the log itself", dir, []string{early, late}, nil},
		{"an older copy without heads", older, nil, nil},
		{"an older copy", older, []string{early, late}, []string{"rolled_back 2026-Q4/checkpoint 300+400"}},
		{"an older checkpoint", rolled, []string{late}, []string{"rolled_back 2026-Q4/checkpoint 300+400"}},
		{"an older copy that went on", forked, []string{early, late}, []string{"forked 2026-Q4/checkpoint 0+700"}},
		{"a head of another log", dir, []string{strings.Replace(early, "Q4\n", "Q3\n", 1)}, []string{"rolled_back  0+0"}},
		{"a head that was edited", dir, []string{strings.Replace(early, "\n300\n", "\n301\n", 1)}, []string{"unsigned 2026-Q4/checkpoint 0+301"}},
	} {
		r, err := Verify(t.Context(), c.dir, VerifyOptions{VKeys: keys, Heads: c.heads})
		if err != nil {
			t.Fatal(err)
		}
		if got := shorts(r.Problems); !slices.Equal(got, c.want) {
			t.Errorf("%s: %q, want %q", c.name, got, c.want)
		}
	}
	r, err := Verify(t.Context(), rolled, VerifyOptions{VKeys: keys})
	if err != nil || !r.OK() || !slices.Equal(shorts(r.Notes), []string{"unsigned 2026-Q4/checkpoint 300+400"}) {
		t.Errorf("an older checkpoint without heads: %+v, %v", r, err)
	}
}

// Each byte of what is signed counts.
func TestVerifyNoticesEachFlip(t *testing.T) {
	dir, opts := twoShards(t)
	flips := 0
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		name, _ := filepath.Rel(dir, path)
		if err != nil || d.IsDir() || strings.Contains(name, ".state") || name == lockName {
			return err
		}
		good := readFile(t, path)
		step := max(1, len(good)/12)
		for at := 0; at < len(good); at += step {
			if strings.HasSuffix(name, "checkpoint") && at > len(good)-4 {
				break // the last letter of base64 has bits that mean nothing
			}
			bad := bytes.Clone(good)
			bad[at] ^= 4
			write(t, dir, name, bad)
			r, err := Verify(t.Context(), dir, opts)
			if err != nil {
				t.Fatal(err)
			}
			if r.OK() {
				t.Errorf("%s with another byte at %d is good", name, at)
			}
			flips++
		}
		write(t, dir, name, good)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if flips < 100 {
		t.Errorf("%d flips only", flips)
	}
	mustVerify(t, dir, opts)
}

// What can't be read is neither absent nor altered.
func TestVerifyUnreadable(t *testing.T) {
	dir, opts := twoShards(t)
	root, err := os.OpenRoot(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	for _, c := range []struct {
		file string
		err  error
		want []string
	}{
		{"2026-Q3/tile/entries/001", syscall.EIO, []string{"unreadable 2026-Q3/tile/entries/001 256+256"}},
		{"2026-Q3/tile/0/002.p/90", syscall.EACCES, []string{"unreadable 2026-Q3/tile/0/002.p/90 512+0"}},
		{"2026-Q3/tile/1/000.p/2", syscall.EMFILE, []string{"unreadable 2026-Q3/tile/1/000.p/2 0+0"}},
		{"2026-Q4/checkpoint", syscall.EIO, []string{"unreadable 2026-Q4/checkpoint 602+0"}},
		{"2026-Q4/tile/0/000", syscall.ENOENT, []string{"absent 2026-Q4/tile/0/000 602+0"}},
	} {
		good := newDisk(root)
		bad := disk{func(name string) (fs.File, error) {
			if name == c.file {
				return nil, &fs.PathError{Op: "openat", Path: name, Err: c.err}
			}
			return good.open(name)
		}}
		r, err := verify(t.Context(), bad, root.FS(), opts)
		if err != nil {
			t.Fatal(err)
		}
		if got := shorts(r.Problems); !slices.Equal(got, c.want) {
			t.Errorf("%s: %q, want %q", c.file, got, c.want)
		}
	}
}

// Parts of files that were left when these grew are compared too: a reader of
// an old checkpoint would be given them.
func TestVerifyParts(t *testing.T) {
	dir := t.TempDir()
	w := openWriter(t, dir, 1, nil)
	w.start("2026-Q4")
	w.fill(40)
	w.fill(60)
	w.finish()
	opts := VerifyOptions{VKeys: []string{testVKey(t, "2026-Q4", 1)}}
	mustVerify(t, dir, opts)
	flip(t, dir, "2026-Q4/tile/0/000.p/40", 3)
	flip(t, dir, "2026-Q4/tile/entries/000.p/40", 3)
	r, err := Verify(t.Context(), dir, opts)
	if err != nil {
		t.Fatal(err)
	}
	if got, want := shorts(r.Problems), []string{"altered 2026-Q4/tile/0/000.p/40 0+0", "altered 2026-Q4/tile/entries/000.p/40 0+40"}; !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
}

func TestVerifyBoundsTheReport(t *testing.T) {
	dir, opts := twoShards(t)
	for _, name := range []string{"000", "001", "002.p/90"} {
		path := filepath.Join(dir, "2026-Q3/tile/entries", name)
		b := readFile(t, path)
		i := 0
		splitBundle(b, func(_ int, entry []byte) bool {
			if i++; i%2 == 0 {
				entry[len(entry)-2] ^= 1
			}
			return true
		})
		write(t, dir, "2026-Q3/tile/entries/"+name, b)
	}
	opts.Most = 7
	r, err := Verify(t.Context(), dir, opts)
	if err != nil {
		t.Fatal(err)
	}
	// 301 events, and the key of the next shard that one of them named.
	if len(r.Problems) != 7 || r.Count != 302 || r.Problems[0].Seq != 1 || r.Problems[6].Seq != 13 {
		t.Errorf("%d of %d problems: %q", len(r.Problems), r.Count, shorts(r.Problems))
	}
}

// A checkpoint that says an immense size, and files with immense numbers, cost
// neither memory nor time.
func TestVerifyImmenseNumbers(t *testing.T) {
	dir, opts := twoShards(t)
	opts.FollowKeys = false // a wrong signature would end it at once
	edit(t, dir, "2026-Q4/checkpoint", "\n300\n", "\n281474976710656\n")
	if err := os.MkdirAll(filepath.Join(dir, "2026-Q4/tile/entries/x999/x999/x999"), 0o700); err != nil {
		t.Fatal(err)
	}
	write(t, dir, "2026-Q4/tile/entries/x999/x999/x999/999", nil)
	if err := os.MkdirAll(filepath.Join(dir, "2026-Q4/tile/entries/x999/x999/x999/x999/x999"), 0o700); err != nil {
		t.Fatal(err)
	}
	write(t, dir, "2026-Q4/tile/entries/x999/x999/x999/x999/x999/999", nil) // behind any shard's end
	r, err := Verify(t.Context(), dir, opts)
	if err != nil {
		t.Fatal(err)
	}
	if r.OK() || r.Shards[1].Unsigned > sizeMost {
		t.Errorf("OK %v, %d unsigned", r.OK(), r.Shards[1].Unsigned)
	}
	if !slices.Contains(shorts(r.Notes), "stray 2026-Q4/tile/entries/x999/x999/x999/x999/x999/999 0+0") {
		t.Errorf("notes %q", shorts(r.Notes))
	}
}

func TestVerifyEmpty(t *testing.T) {
	r, err := Verify(t.Context(), t.TempDir(), VerifyOptions{})
	if err != nil || !r.OK() || len(r.Shards) != 0 {
		t.Errorf("an empty directory: %+v, %v", r, err)
	}
	if _, err := Verify(t.Context(), filepath.Join(t.TempDir(), "x"), VerifyOptions{}); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("no directory: %v", err)
	}
	dir := t.TempDir()
	w := openWriter(t, dir, 1, nil)
	if err := w.Start(t.Context(), "2026-Q4", 0, testKey(1)); err != nil {
		t.Fatal(err)
	}
	mustVerify(t, dir, VerifyOptions{VKeys: []string{testVKey(t, "2026-Q4", 1)}})
	w.finish()
	w = openWriter(t, dir, 1, nil) // goes on with a shard that has nothing yet
	if all := w.Shards(); len(all) != 1 || all[0].Size != 0 {
		t.Errorf("shards %+v", all)
	}
}

// What the entries that open and close shards say must be so, even if it is
// signed.
func TestVerifyChain(t *testing.T) {
	key1 := testVKey(t, "2026-Q3", 1)
	root := base64.StdEncoding.EncodeToString(make([]byte, 32))
	open := func(change func(map[string]any)) func(w *writer) {
		return func(w *writer) {
			log := map[string]any{"shard": "2026-Q3", "first": 0, "installation": testInstallation, "vkey": key1}
			change(log)
			if err := w.Start(w.Context(), "2026-Q3", 0, testKey(1)); err != nil {
				w.Fatal(err)
			}
			w.add(logAbout(w, 0, "log.open", log))
		}
	}
	for _, c := range []struct {
		name  string
		write func(w *writer)
		want  []string
	}{
		{"no event that opens", func(w *writer) {
			if err := w.Start(w.Context(), "2026-Q3", 0, testKey(1)); err != nil {
				w.Fatal(err)
			}
			w.fill(2)
		}, []string{"altered 2026-Q3/tile/entries/000.p/2 0+1"}},
		{"another shard", open(func(log map[string]any) { log["shard"] = "2026-Q2" }), []string{"altered 2026-Q3/tile/entries/000.p/1 0+1"}},
		{"another first", open(func(log map[string]any) { log["first"] = 7 }), []string{"altered 2026-Q3/tile/entries/000.p/1 0+1"}},
		{"another key", open(func(log map[string]any) { log["vkey"] = testVKey(t, "2026-Q3", 2) }), []string{"altered 2026-Q3/tile/entries/000.p/1 0+1"}},
		{"a shard before", open(func(log map[string]any) {
			log["previous"] = map[string]any{"shard": "2026-Q2", "first": 0, "size": 9, "root": root}
		}), []string{`absent "2026-Q2" 0+9`}},
		{"no event that closes", func(w *writer) {
			w.start("2026-Q3")
			w.await()
			w.start("2026-Q4")
		}, []string{"altered 2026-Q3/tile/entries/000.p/1 0+1"}},
		{"another shard follows", func(w *writer) {
			w.start("2026-Q3")
			w.add(logAbout(w, 1, "log.close", map[string]any{"shard": "2026-Q3", "next": "2027-Q1", "nextVkey": testVKey(t, "2027-Q1", 1)}))
			w.await()
			w.start("2026-Q4")
		}, []string{"altered 2026-Q3/tile/entries/000.p/2 1+1"}},
		{"another key follows", func(w *writer) {
			w.start("2026-Q3")
			w.add(logAbout(w, 1, "log.close", map[string]any{"shard": "2026-Q3", "next": "2026-Q4", "nextVkey": testVKey(t, "2026-Q4", 2)}))
			w.await()
			w.start("2026-Q4")
		}, []string{"altered 2026-Q4/checkpoint 2+0"}},
		{"another shard was before", func(w *writer) {
			w.start("2026-Q3")
			w.add(logAbout(w, 1, "log.close", map[string]any{"shard": "2026-Q3", "next": "2026-Q4", "nextVkey": testVKey(t, "2026-Q4", 1)}))
			w.await()
			if err := w.Start(w.Context(), "2026-Q4", 2, testKey(1)); err != nil {
				w.Fatal(err)
			}
			w.add(logAbout(w, 2, "log.open", map[string]any{"shard": "2026-Q4", "first": 2, "vkey": testVKey(t, "2026-Q4", 1),
				"previous": map[string]any{"shard": "2026-Q3", "first": 0, "size": 2, "root": root}}))
		}, []string{"forked 2026-Q3/checkpoint 0+2"}},
	} {
		dir := t.TempDir()
		w := openWriter(t, dir, 1, nil)
		c.write(w)
		w.finish()
		r, err := Verify(t.Context(), dir, VerifyOptions{VKeys: []string{key1, testVKey(t, "2026-Q4", 1)}})
		if err != nil {
			t.Fatal(err)
		}
		if got := shorts(r.Problems); !slices.Equal(got, c.want) {
			t.Errorf("%s: %q, want %q\n%+v", c.name, got, c.want, r.Problems)
		}
	}
}

// While a log is written, every moment of it is good.
func TestVerifyWhileWriting(t *testing.T) {
	dir := t.TempDir()
	w := openWriter(t, dir, 1, nil)
	w.start("2026-Q4")
	opts := VerifyOptions{VKeys: []string{testVKey(t, "2026-Q4", 1)}}
	for range 20 {
		done := make(chan struct{})
		go func() {
			defer close(done)
			w.Integrate(t.Context(), w.Next(), plain(w.Next(), 100))
		}()
		mustVerify(t, dir, opts)
		<-done
	}
	w.finish()
	if r := mustVerify(t, dir, opts); r.Events != 2001 {
		t.Errorf("%d events", r.Events)
	}
}

// FuzzVerify puts arbitrary bytes in place of a file of a small log.
func FuzzVerify(f *testing.F) {
	base := f.TempDir()
	w := openWriter(f, base, 1, nil)
	w.start("2026-Q4")
	w.fill(3)
	w.finish()
	names := []string{"checkpoint", "tile/entries/000.p/3", "tile/0/000.p/3"}
	good := map[string][]byte{}
	for i, name := range names {
		good[name] = readFile(f, filepath.Join(base, "2026-Q4", name))
		f.Add(uint8(i), good[name])
		f.Add(uint8(i), []byte{})
		f.Add(uint8(i), append([]byte{0, 1, 'x'}, good[name]...))
	}
	opts := VerifyOptions{VKeys: []string{testVKey(f, "2026-Q4", 1)}, FollowKeys: true}
	f.Fuzz(func(t *testing.T, which uint8, data []byte) {
		name := names[int(which)%len(names)]
		write(t, base, "2026-Q4/"+name, data)
		defer write(t, base, "2026-Q4/"+name, good[name])
		r, err := Verify(t.Context(), base, opts)
		if err != nil {
			t.Fatal(err)
		}
		// Other signatures may stand in a checkpoint besides the log's own.
		if r.OK() && !bytes.Equal(data, good[name]) && name != "checkpoint" {
			t.Errorf("%s with %q is good", name, data)
		}
	})
}

// FuzzBundle compares what we take a bundle for with what Tessera does.
func FuzzBundle(f *testing.F) {
	f.Add([]byte{})
	f.Add([]byte{0, 0})
	f.Add([]byte{0, 1, 'a', 0, 2, 'b', 'c'})
	f.Add([]byte{0, 1, 'a', 0, 9, 'b'})
	f.Add(bytes.Repeat([]byte{0, 0}, 257))
	f.Fuzz(func(t *testing.T, raw []byte) {
		var got [][]byte
		n, err := splitBundle(raw, func(i int, entry []byte) bool {
			if i != len(got) {
				t.Errorf("entry %d comes as %d", len(got), i)
			}
			got = append(got, entry)
			return true
		})
		var want api.EntryBundle
		theirs := want.UnmarshalText(raw)
		if n != len(got) || (err == nil) != (theirs == nil && len(want.Entries) <= width) {
			t.Fatalf("%d entries, %v; Tessera: %d, %v", n, err, len(want.Entries), theirs)
		}
		if err == nil && !slices.EqualFunc(got, want.Entries, bytes.Equal) {
			t.Errorf("%q and %q", got, want.Entries)
		}
	})
}
