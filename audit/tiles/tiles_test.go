package tiles

import (
	"bytes"
	"context"
	"crypto"
	"crypto/ed25519"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"airlock.dev/airlock"
	"github.com/transparency-dev/merkle/proof"
	"github.com/transparency-dev/merkle/rfc6962"
	"github.com/transparency-dev/tessera"
	"github.com/transparency-dev/tessera/storage/posix"
)

const testInstallation = "abcdefghijklmnopqrst"

func testKey(seed byte) ed25519.PrivateKey {
	return ed25519.NewKeyFromSeed(bytes.Repeat([]byte{seed}, ed25519.SeedSize))
}

func testVKey(t testing.TB, shard string, seed byte) string {
	t.Helper()
	vkey, err := VKey(testInstallation, shard, testKey(seed).Public().(ed25519.PublicKey))
	if err != nil {
		t.Fatal(err)
	}
	return vkey
}

func testEvent(seq uint64, rest string) []byte {
	return fmt.Appendf(nil, `{"v":1,"seq":%d,%s}`, seq, rest)
}

func logAbout(t testing.TB, seq uint64, typ string, log map[string]any) []byte {
	t.Helper()
	raw, err := json.Marshal(log)
	if err != nil {
		t.Fatal(err)
	}
	return testEvent(seq, fmt.Sprintf(`"type":%q,"log":%s`, typ, raw))
}

// writer writes a log as its owner would.
type writer struct {
	testing.TB
	*Trees
	key byte
}

func openWriter(t testing.TB, dir string, key byte, change func(*Config)) *writer {
	t.Helper()
	cfg := Config{Dir: dir, Installation: testInstallation, Keys: []crypto.Signer{testKey(key)}, Checkpoint: checkpointLeast}
	if change != nil {
		change(&cfg)
	}
	trees, err := Open(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	w := &writer{t, trees, key}
	t.Cleanup(func() {
		ctx, cancel := context.WithCancel(context.Background())
		cancel() // nobody waits for a checkpoint any more
		w.Close(ctx)
	})
	return w
}

func (w *writer) start(shard string) {
	w.Helper()
	open := map[string]any{"shard": shard, "first": w.Next(), "installation": testInstallation, "vkey": testVKey(w, shard, w.key)}
	if all := w.Shards(); len(all) > 0 {
		s := all[len(all)-1]
		open["previous"] = map[string]any{"shard": s.ID, "first": s.First, "size": s.Size, "root": base64.StdEncoding.EncodeToString(s.Root[:]), "checkpoint": s.Checkpoint}
	}
	if err := w.Start(w.Context(), shard, w.Next(), testKey(w.key)); err != nil {
		w.Fatal(err)
	}
	w.add(logAbout(w, w.Next(), "log.open", open))
}

// rotate closes the newest shard and begins another one, with another key.
func (w *writer) rotate(shard string, key byte) {
	w.Helper()
	w.add(logAbout(w, w.Next(), "log.close", map[string]any{"shard": w.newest(), "next": shard, "nextVkey": testVKey(w, shard, key)}))
	w.await()
	w.key = key
	w.start(shard)
}

func (w *writer) newest() string {
	all := w.Shards()
	return all[len(all)-1].ID
}

func (w *writer) add(entries ...[]byte) {
	w.Helper()
	if err := w.Integrate(w.Context(), w.Next(), entries); err != nil {
		w.Fatal(err)
	}
}

// fill adds plain events until there are n of all shards.
func (w *writer) fill(n uint64) {
	w.Helper()
	for next := w.Next(); next < n; next = w.Next() {
		w.add(plain(next, min(n-next, groupMost))...)
	}
}

func plain(first, n uint64) (entries [][]byte) {
	for seq := first; seq < first+n; seq++ {
		entries = append(entries, testEvent(seq, `"type":"test"`))
	}
	return entries
}

func (w *writer) await() {
	w.Helper()
	ctx, cancel := context.WithTimeout(w.Context(), 20*time.Second)
	defer cancel()
	if err := w.Await(ctx, w.Next()-1); err != nil {
		w.Fatal(err)
	}
}

func (w *writer) finish() {
	w.Helper()
	ctx, cancel := context.WithTimeout(w.Context(), 20*time.Second)
	defer cancel()
	if err := w.Close(ctx); err != nil {
		w.Fatal(err)
	}
}

func TestWriteReadProve(t *testing.T) {
	dir := t.TempDir()
	w := openWriter(t, dir, 1, nil)
	if shard, next := w.Published(); shard != "" || next != 0 {
		t.Fatalf("an empty log has published %q, %d", shard, next)
	}
	w.start("2026-Q3")
	w.fill(600)
	w.rotate("2026-Q4", 1)
	w.fill(700)
	w.await()
	if shard, next := w.Published(); shard != "2026-Q4" || next != 700 {
		t.Errorf("published %s, %d", shard, next)
	}
	if err := w.Err(); err != nil {
		t.Errorf("error of a good log: %v", err)
	}

	for _, seq := range []uint64{0, 1, 255, 256, 600, 601, 699} {
		p, err := w.Prove(t.Context(), seq)
		if err != nil {
			t.Fatal(err)
		}
		if err := VerifyProof(p, testVKey(t, p.Shard, 1)); err != nil {
			t.Error(err)
		}
		if want := fmt.Sprintf(`{"v":1,"seq":%d,`, seq); !strings.HasPrefix(p.Event, want) {
			t.Errorf("event %d is %.40s", seq, p.Event)
		}
	}
	if _, err := w.Prove(t.Context(), 700); airlock.CodeOf(err) != airlock.NotFound {
		t.Errorf("proof of an event that is not there: %v", err)
	}

	all, err := w.Entries(t.Context(), 598, 5)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, e := range all {
		got = append(got, fmt.Sprintf("%.40s", e))
	}
	want := []string{
		`{"v":1,"seq":598,"type":"test"}`, `{"v":1,"seq":599,"type":"test"}`,
		`{"v":1,"seq":600,"type":"log.close","log`, `{"v":1,"seq":601,"type":"log.open","log"`,
		`{"v":1,"seq":602,"type":"test"}`,
	}
	if !slices.Equal(got, want) {
		t.Errorf("entries from 598:\n%q", got)
	}
	if all, err := w.Entries(t.Context(), 700, 5); len(all) != 0 || err != nil {
		t.Errorf("entries behind the end: %d, %v", len(all), err)
	}

	shards := w.Shards()
	if len(shards) != 2 || shards[0].Size != 601 || !shards[0].Closed || shards[1].First != 601 || shards[1].Size != 99 || shards[1].Closed {
		t.Fatalf("shards %+v", shards)
	}
	grown, err := w.Consistency(t.Context(), "2026-Q3", 300, 601)
	if err != nil {
		t.Fatal(err)
	}
	firsts, err := w.Entries(t.Context(), 0, 300)
	if err != nil {
		t.Fatal(err)
	}
	r := hashing.NewEmptyRange(0)
	for _, e := range firsts {
		if err := r.Append(rfc6962.DefaultHasher.HashLeaf(e), nil); err != nil {
			t.Fatal(err)
		}
	}
	old, err := rootOf(r)
	if err != nil {
		t.Fatal(err)
	}
	if err := proof.VerifyConsistency(rfc6962.DefaultHasher, 300, 601, grown.Hashes, old[:], shards[0].Root[:]); err != nil {
		t.Error(err)
	}
	if !bytes.Equal(grown.FromRoot, old[:]) || !bytes.Equal(grown.ToRoot, shards[0].Root[:]) {
		t.Errorf("other roots: %+v", grown)
	}
	w.finish()

	w = openWriter(t, dir, 1, nil)
	if again := w.Shards(); len(again) != 2 || again[0] != shards[0] || again[1] != shards[1] || w.Next() != 700 {
		t.Errorf("after reopening: next %d, %+v", w.Next(), again)
	}
	w.fill(701)
	w.finish()
}

func TestIntegrateRefuses(t *testing.T) {
	w := openWriter(t, t.TempDir(), 1, nil)
	if err := w.Integrate(t.Context(), 0, plain(0, 1)); airlock.CodeOf(err) != airlock.Conflict {
		t.Errorf("without a shard: %v", err)
	}
	w.start("2026-Q4")
	w.fill(3)
	for _, c := range []struct {
		name    string
		first   uint64
		entries [][]byte
		want    airlock.Code
	}{
		{"again", 2, plain(2, 1), airlock.Conflict},
		{"with a gap", 4, plain(4, 1), airlock.Conflict},
		{"another number", 3, plain(4, 1), airlock.Invalid},
		{"a number that begins alike", 3, plain(33, 1), airlock.Invalid},
		{"twice the same", 3, append(plain(3, 1), plain(3, 1)...), airlock.Invalid},
		{"too large", 3, [][]byte{testEvent(3, `"pad":"`+strings.Repeat("x", entryMost)+`"`)}, airlock.TooLarge},
	} {
		if err := w.Integrate(t.Context(), c.first, c.entries); airlock.CodeOf(err) != c.want {
			t.Errorf("%s: %v", c.name, err)
		}
	}
	if w.Next() != 3 {
		t.Errorf("next is %d", w.Next())
	}
	w.fill(3000) // in groups
	w.finish()
	if err := w.Integrate(t.Context(), 3000, plain(3000, 1)); airlock.CodeOf(err) != airlock.Unavailable {
		t.Errorf("after Close: %v", err)
	}
}

func TestStartRefuses(t *testing.T) {
	w := openWriter(t, t.TempDir(), 1, nil)
	w.start("2026-Q4")
	w.fill(3)
	for _, c := range []struct {
		shard string
		first uint64
		want  airlock.Code
	}{
		{"../x", 3, airlock.Invalid},
		{"2026-Q5", 3, airlock.Invalid},
		{"2026-Q4", 3, airlock.Invalid},
		{"2026-Q3", 3, airlock.Invalid},
		{"2026-Q4.2", 4, airlock.Conflict},
	} {
		if err := w.Start(t.Context(), c.shard, c.first, testKey(1)); airlock.CodeOf(err) != c.want {
			t.Errorf("%s: %v", c.shard, err)
		}
	}
	w.fill(4) // the shard before goes on
	w.rotate("2026-Q4.2", 1)
	w.rotate("2026-Q4.10", 1)
	w.rotate("2026-12", 1)
	w.finish()
}

func TestShardNames(t *testing.T) {
	sorted := []string{"2025-Q4", "2026-Q1", "2026-Q4", "2026-Q4.2", "2026-Q4.10", "2026-10", "2026-10-01", "2026-10-02", "2026-10-02.2", "2026-11", "2026-12", "2026-12-02", "2027-Q1"}
	mixed := slices.Clone(sorted)
	slices.Reverse(mixed)
	slices.SortFunc(mixed, CompareShards)
	if !slices.Equal(sorted, mixed) {
		t.Errorf("sorted as %v", mixed)
	}
	for _, id := range sorted {
		if !ValidShard(id) {
			t.Errorf("%s is not valid", id)
		}
	}
	for _, id := range []string{"", ".", "..", "2026", "2026-Q0", "2026-Q4.1", "2026-Q4.02", "2026-13", "2026-12-32", "2026-Q4/", "a2026-Q4", "2026-Q4\n", "2026-Q4.1000000"} {
		if ValidShard(id) {
			t.Errorf("%q is valid", id)
		}
	}
}

func TestRotateKeysAndDrop(t *testing.T) {
	dir := t.TempDir()
	w := openWriter(t, dir, 1, nil)
	w.start("2026-Q2")
	w.fill(300)
	w.rotate("2026-Q3", 2)
	w.fill(600)
	w.rotate("2026-Q4", 3)
	w.fill(650)
	if err := w.Drop(t.Context(), "2026-Q4"); airlock.CodeOf(err) != airlock.Conflict {
		t.Errorf("drop the newest: %v", err)
	}
	if err := w.Drop(t.Context(), "2020-Q4"); airlock.CodeOf(err) != airlock.NotFound {
		t.Errorf("drop what is not there: %v", err)
	}
	s := w.Shards()[0]
	gone := map[string]any{"shard": s.ID, "first": s.First, "size": s.Size, "root": base64.StdEncoding.EncodeToString(s.Root[:])}
	w.add(logAbout(t, w.Next(), "retention.drop", gone))
	w.await()
	first := VerifyOptions{VKeys: []string{testVKey(t, "2026-Q2", 1)}, FollowKeys: true}
	mustVerify(t, dir, first)
	if r, err := Verify(t.Context(), dir, VerifyOptions{VKeys: first.VKeys}); err != nil || r.Count != 2 || r.Problems[0].Kind != Unsigned {
		t.Errorf("without following keys: %+v, %v", r.Problems, err)
	}

	if err := w.Drop(t.Context(), s.ID); err != nil {
		t.Fatal(err)
	}
	if err := w.Drop(t.Context(), s.ID); err != nil {
		t.Errorf("dropping again: %v", err)
	}
	if names := namesIn(t, filepath.Join(dir, s.ID)); !slices.Equal(names, []string{"checkpoint"}) {
		t.Errorf("left of the dropped shard: %v", names)
	}
	if _, err := w.Entries(t.Context(), 10, 1); airlock.CodeOf(err) != airlock.NotFound {
		t.Errorf("entries of a dropped shard: %v", err)
	}
	if _, err := w.Prove(t.Context(), 10); airlock.CodeOf(err) != airlock.NotFound {
		t.Errorf("proof from a dropped shard: %v", err)
	}
	second := VerifyOptions{VKeys: []string{testVKey(t, "2026-Q3", 2)}, FollowKeys: true}
	mustVerify(t, dir, second)
	w.finish()

	if _, err := Open(t.Context(), Config{Dir: dir, Installation: testInstallation, Keys: []crypto.Signer{testKey(2)}}); airlock.CodeOf(err) != airlock.Conflict {
		t.Errorf("opened with the key of another shard: %v", err)
	}
	w = openWriter(t, dir, 3, nil)
	if all := w.Shards(); len(all) != 3 || !all[0].Dropped || all[0].Size != 301 || all[1].VKey != testVKey(t, "2026-Q3", 2) || w.Next() != 651 {
		t.Errorf("after reopening: %+v", all)
	}
	w.finish()

	// Dropped by someone else: nothing says that retention did it.
	if err := os.RemoveAll(filepath.Join(dir, "2026-Q3", "tile")); err != nil {
		t.Fatal(err)
	}
	r, err := Verify(t.Context(), dir, VerifyOptions{VKeys: []string{testVKey(t, "2026-Q4", 3)}})
	if err != nil || r.Count != 1 || r.Problems[0].Kind != Absent || r.Problems[0].Seq != 301 || r.Problems[0].Events != 300 {
		t.Errorf("entries removed: %+v, %v", r.Problems, err)
	}
}

func namesIn(t *testing.T, dir string) (names []string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

func mustVerify(t testing.TB, dir string, opts VerifyOptions) Report {
	t.Helper()
	r, err := Verify(t.Context(), dir, opts)
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range r.Problems {
		t.Errorf("problem of a good log: %+v", p)
	}
	return r
}

func TestOneProcess(t *testing.T) {
	dir := t.TempDir()
	w := openWriter(t, dir, 1, nil)
	cfg := Config{Dir: dir, Installation: testInstallation}
	if _, err := Open(t.Context(), cfg); airlock.CodeOf(err) != airlock.Conflict {
		t.Errorf("opened twice: %v", err)
	}
	w.finish()
	w = openWriter(t, dir, 1, nil)
	w.finish()
}

func TestOpenRefuses(t *testing.T) {
	base := t.TempDir()
	w := openWriter(t, base, 1, nil)
	w.start("2026-Q4")
	w.fill(100)
	w.await()
	old := readFile(t, filepath.Join(base, "2026-Q4", treeStateName))
	w.fill(300)
	w.finish()
	state := "2026-Q4/" + treeStateName
	for _, c := range []struct {
		name   string
		damage func(dir string)
		change func(*Config)
		want   string
	}{
		{"another key", nil, func(c *Config) { c.Keys = []crypto.Signer{testKey(2)} }, "is not signed by any key"},
		{"another installation", nil, func(c *Config) { c.Installation = strings.Repeat("b", 20) }, "belongs to another installation"},
		{"older state", func(dir string) { write(t, dir, state, old) }, nil, "older than its checkpoint (100 entries, and 300 are signed)"},
		{"edited state", func(dir string) { edit(t, dir, state, `"size":300`, `"size":301`) }, nil, "no tree of 301 entries"},
		{"edited root", func(dir string) { edit(t, dir, state, `"root":"`, `"root":"AAAA`) }, nil, "can't be read"},
		{"no state", func(dir string) { remove(t, dir, state) }, nil, "state of its tree can't be read"},
		{"no checkpoint", func(dir string) { remove(t, dir, "2026-Q4/checkpoint") }, nil, "its checkpoint is missing"},
		{"another root", func(dir string) { edit(t, dir, "2026-Q4/checkpoint", "\n300\n", "\n301\n") }, nil, "is not signed by any key"},
		{"edited tile", func(dir string) { flip(t, dir, "2026-Q4/tile/0/000", 77) }, nil, ""},
		{"edited edge", func(dir string) { flip(t, dir, "2026-Q4/tile/0/001.p/44", 77) }, nil, "state of its tree does not agree with its tiles"},
		{"edited top", func(dir string) { flip(t, dir, "2026-Q4/tile/1/000.p/1", 7) }, nil, "state of its tree does not agree with its tiles"},
		{"tile removed", func(dir string) { remove(t, dir, "2026-Q4/tile/1/000.p/1") }, nil, "no tree of 300 entries"},
		{"last entries edited", func(dir string) { flip(t, dir, "2026-Q4/tile/entries/001.p/44", 20) }, nil, "its last signed entries are not what they were"},
		{"last entries removed", func(dir string) { remove(t, dir, "2026-Q4/tile/entries/001.p/44") }, nil, "its last signed entries are not what they were"},
		{"too frequent", nil, func(c *Config) { c.Checkpoint = time.Millisecond }, "use 100ms or more"},
		{"witness policy", nil, func(c *Config) { c.Witnesses = []byte("quorum nobody") }, "the witness policy can't be read"},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := copyOf(t, base)
			if c.damage != nil {
				c.damage(dir)
			}
			cfg := Config{Dir: dir, Installation: testInstallation, Keys: []crypto.Signer{testKey(1)}}
			if c.change != nil {
				c.change(&cfg)
			}
			trees, err := Open(t.Context(), cfg)
			if err == nil {
				trees.Close(t.Context())
			}
			switch {
			case c.want == "" && err != nil: // what it does not go on from is for Verify
				t.Error(err)
			case c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)):
				t.Errorf("opened with error %v", err)
			}
		})
	}
}

func copyOf(t testing.TB, dir string) string {
	t.Helper()
	to := filepath.Join(t.TempDir(), "log")
	if err := os.CopyFS(to, os.DirFS(dir)); err != nil {
		t.Fatal(err)
	}
	return to
}

func readFile(t testing.TB, name string) []byte {
	t.Helper()
	b, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func write(t testing.TB, dir, name string, data []byte) {
	t.Helper()
	if err := os.WriteFile(filepath.Join(dir, name), data, 0o600); err != nil {
		t.Fatal(err)
	}
}

func remove(t testing.TB, dir, name string) {
	t.Helper()
	if err := os.RemoveAll(filepath.Join(dir, name)); err != nil {
		t.Fatal(err)
	}
}

func edit(t testing.TB, dir, name, from, to string) {
	t.Helper()
	b := readFile(t, filepath.Join(dir, name))
	if !bytes.Contains(b, []byte(from)) {
		t.Fatalf("%s has no %q", name, from)
	}
	write(t, dir, name, bytes.Replace(b, []byte(from), []byte(to), 1))
}

func flip(t testing.TB, dir, name string, at int) {
	t.Helper()
	b := readFile(t, filepath.Join(dir, name))
	b[at] ^= 1
	write(t, dir, name, b)
}

// What Tessera would sign after its files were changed while it ran, it gets
// no signature for.
func TestChangedWhileRunning(t *testing.T) {
	dir := t.TempDir()
	w := openWriter(t, dir, 1, nil)
	w.start("2026-Q4")
	w.fill(100)
	w.await()
	flip(t, dir, "2026-Q4/tile/0/000.p/100", 40)
	w.fill(101)
	for w.Err() == nil {
		time.Sleep(time.Millisecond) // until Tessera has asked for a signature
	}
	if err := w.Err(); !strings.Contains(err.Error(), "files of the log were changed while it ran") {
		t.Errorf("error %v", err)
	}
	if _, next := w.Published(); next != 100 {
		t.Errorf("published %d", next)
	}
}

// A group that was half written leaves entries at wrong places, which no
// checkpoint covers. They are taken back.
func TestMisplacedEntriesAreTakenBack(t *testing.T) {
	dir := t.TempDir()
	w := openWriter(t, dir, 1, nil)
	w.start("2026-Q4")
	w.fill(300)
	w.finish()

	v, _, err := verifierOf(testInstallation, "2026-Q4", testKey(1))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	driver, err := posix.New(ctx, posix.Config{Path: filepath.Join(dir, "2026-Q4")})
	if err != nil {
		t.Fatal(err)
	}
	nobody := newGuard(v, testKey(1), 0, [32]byte{})
	nobody.stop()
	appender, _, _, err := tessera.NewAppender(ctx, driver, tessera.NewAppendOptions().WithCheckpointSigner(nobody).WithBatching(1, time.Millisecond))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := appender.Add(ctx, tessera.NewEntry(testEvent(340, `"type":"test"`)))(); err != nil {
		t.Fatal(err)
	}
	cancel()

	w = openWriter(t, dir, 1, nil)
	if w.Next() != 300 {
		t.Fatalf("next is %d", w.Next())
	}
	w.fill(301)
	w.finish()
	r := mustVerify(t, dir, VerifyOptions{VKeys: []string{testVKey(t, "2026-Q4", 1)}})
	if r.Events != 301 {
		t.Errorf("%d events", r.Events)
	}
}

// settle finds the truth after Tessera said that a group failed.
func TestSettle(t *testing.T) {
	dir := t.TempDir()
	w := openWriter(t, dir, 1, nil)
	w.start("2026-Q4")
	w.fill(300)
	w.await()
	tr := w.current
	leaves := func(entries [][]byte) (hashes [][]byte) {
		for _, e := range entries {
			hashes = append(hashes, rfc6962.DefaultHasher.HashLeaf(e))
		}
		return hashes
	}
	other := leaves(plain(303, 2))
	group := leaves(plain(300, 5))
	for _, c := range []struct {
		name    string
		written [][]byte
		next    uint64
	}{
		{"none is in", nil, 300},
		{"some are in", group[:3], 303},
		{"all are in", group, 305},
		{"the second half is in", other, 300},
		{"too many are in", append(slices.Clone(group), other...), 300},
	} {
		saved := tr.entries
		tr.doubt = group
		_, head, err := tr.after(c.written)
		if err != nil {
			t.Fatal(err)
		}
		if err := w.writeState("2026-Q4", treeState{head.size, head.root[:]}); err != nil {
			t.Fatal(err)
		}
		if err := w.settle(tr); err != nil {
			t.Errorf("%s: %v", c.name, err)
		}
		_, want, err := tr.after(nil)
		if err != nil {
			t.Fatal(err)
		}
		s, err := w.readState("2026-Q4")
		if err != nil || s.Size != want.size || !bytes.Equal(s.Root, want.root[:]) || w.Next() != c.next || tr.doubt != nil {
			t.Errorf("%s: next %d, state of %d, %v", c.name, w.Next(), s.Size, err)
		}
		w.mu.Lock()
		tr.entries, w.next = saved, 300
		w.mu.Unlock()
	}
	// It goes on, and what was at wrong places is nowhere.
	if err := w.writeState("2026-Q4", treeState{300, rootBytes(t, tr)}); err != nil {
		t.Fatal(err)
	}
	w.fill(600)
	w.finish()
	mustVerify(t, dir, VerifyOptions{VKeys: []string{testVKey(t, "2026-Q4", 1)}})
}

func rootBytes(t *testing.T, tr *tree) []byte {
	t.Helper()
	root, err := rootOf(tr.entries)
	if err != nil {
		t.Fatal(err)
	}
	return root[:]
}

func TestProofsThatDoNotHold(t *testing.T) {
	w := openWriter(t, t.TempDir(), 1, nil)
	w.start("2026-Q4")
	w.fill(300)
	w.await()
	good, err := w.Prove(t.Context(), 257)
	if err != nil {
		t.Fatal(err)
	}
	other, err := w.Prove(t.Context(), 258)
	if err != nil {
		t.Fatal(err)
	}
	vkey := testVKey(t, "2026-Q4", 1)
	for _, c := range []struct {
		name   string
		change func(p *Proof)
		vkey   string
	}{
		{"event", func(p *Proof) { p.Event = strings.Replace(p.Event, "test", "tesT", 1) }, vkey},
		{"another event", func(p *Proof) { p.Event = other.Event }, vkey},
		{"number", func(p *Proof) { p.Seq++ }, vkey},
		{"index", func(p *Proof) { p.Index-- }, vkey},
		{"index out of range", func(p *Proof) { p.Index = 1 << 60 }, vkey},
		{"path", func(p *Proof) { p.Path = other.Path }, vkey},
		{"short path", func(p *Proof) { p.Path = p.Path[1:] }, vkey},
		{"long path", func(p *Proof) { p.Path = append(slices.Clone(p.Path), p.Path[0]) }, vkey},
		{"hash of a path", func(p *Proof) { p.Path = append([][]byte{p.Path[0][:31]}, p.Path[1:]...) }, vkey},
		{"size", func(p *Proof) { p.Checkpoint = strings.Replace(p.Checkpoint, "\n300\n", "\n301\n", 1) }, vkey},
		{"no signature", func(p *Proof) { p.Checkpoint = p.Checkpoint[:strings.Index(p.Checkpoint, "\n\n")+2] }, vkey},
		{"no checkpoint", func(p *Proof) { p.Checkpoint = "" }, vkey},
		{"shard", func(p *Proof) { p.Shard = "2026-Q3" }, vkey},
		{"another key", func(p *Proof) {}, testVKey(t, "2026-Q4", 2)},
		{"key of another shard", func(p *Proof) {}, testVKey(t, "2026-Q3", 1)},
		{"no key", func(p *Proof) {}, ""},
	} {
		p := good
		c.change(&p)
		if err := VerifyProof(p, c.vkey); airlock.CodeOf(err) != airlock.Invalid {
			t.Errorf("%s: %v", c.name, err)
		}
	}
	var again Proof
	raw, err := json.Marshal(good)
	if err == nil {
		err = json.Unmarshal(raw, &again)
	}
	if err != nil {
		t.Fatal(err)
	}
	if err := VerifyProof(again, vkey); err != nil {
		t.Errorf("after JSON: %v", err)
	}
}

func TestConsistencyProofs(t *testing.T) {
	w := openWriter(t, t.TempDir(), 1, nil)
	w.start("2026-Q4")
	w.fill(300)
	w.await()
	vkey := testVKey(t, "2026-Q4", 1)
	for _, sizes := range [][2]uint64{{0, 0}, {0, 7}, {5, 5}, {5, 20}, {255, 256}, {256, 300}, {5, 300}, {300, 300}} {
		p, err := w.Consistency(t.Context(), "2026-Q4", sizes[0], sizes[1])
		if err != nil {
			t.Fatal(err)
		}
		if err := VerifyConsistency(p, vkey); err != nil {
			t.Errorf("%v: %v", sizes, err)
		}
	}
	good, err := w.Consistency(t.Context(), "2026-Q4", 5, 20)
	if err != nil {
		t.Fatal(err)
	}
	empty, err := w.Consistency(t.Context(), "2026-Q4", 0, 20)
	if err != nil {
		t.Fatal(err)
	}
	flip := func(b []byte) []byte { return append([]byte{b[0] ^ 1}, b[1:]...) }
	for _, c := range []struct {
		from   Consistency
		change func(p *Consistency)
		vkey   string
		want   string
	}{
		{good, func(p *Consistency) { p.FromRoot = flip(p.FromRoot) }, vkey, "fromRoot"},
		{good, func(p *Consistency) { p.ToRoot = flip(p.ToRoot) }, vkey, "toRoot"},
		{good, func(p *Consistency) { p.From++ }, vkey, "a tree of 6 entries"},
		{good, func(p *Consistency) { p.To++ }, vkey, "toRoot"},
		{good, func(p *Consistency) { p.From, p.To = p.To, p.From }, vkey, "toRoot"},
		{good, func(p *Consistency) { p.Hashes = p.Hashes[1:] }, vkey, "fromRoot"},
		{good, func(p *Consistency) { p.Signed = nil }, vkey, "toRoot"},
		{good, func(p *Consistency) { p.FromRoot = p.FromRoot[:31] }, vkey, "fromRoot"},
		{good, func(p *Consistency) { p.From = 0 }, vkey, "fromRoot"},
		{empty, func(p *Consistency) { p.FromRoot = flip(p.FromRoot) }, vkey, "fromRoot"},
		{good, func(p *Consistency) { p.Checkpoint = strings.Replace(p.Checkpoint, "\n300\n", "\n301\n", 1) }, vkey, "its checkpoint is not signed"},
		{good, func(p *Consistency) { p.Shard = "2026-Q3" }, vkey, "of another log than shard 2026-Q3"},
		{good, func(p *Consistency) {}, testVKey(t, "2026-Q4", 2), "its checkpoint is not signed"},
		{good, func(p *Consistency) {}, "", "is not a key"},
	} {
		p := c.from
		c.change(&p)
		if err := VerifyConsistency(p, c.vkey); airlock.CodeOf(err) != airlock.Invalid || !strings.Contains(err.Error(), c.want) {
			t.Errorf("want %q: %v", c.want, err)
		}
	}
	for _, c := range []struct {
		vkeys []string
		want  string
	}{
		{[]string{testVKey(t, "2026-Q3", 1), vkey}, ""},
		{[]string{testVKey(t, "2026-Q3", 1)}, "no key of the part 'airlock/"},
		{[]string{"x"}, "'x' is not a key"},
		{nil, "no key of the part 'airlock/"},
	} {
		got, err := KeyOf(c.vkeys, good.Checkpoint)
		if c.want == "" && (err != nil || got != vkey) || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("%q: %q, %v", c.vkeys, got, err)
		}
	}
}

func TestAwaitEndsWithContext(t *testing.T) {
	w := openWriter(t, t.TempDir(), 1, nil)
	w.start("2026-Q4")
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := w.Await(ctx, 1000); !errors.Is(err, context.Canceled) {
		t.Errorf("Await: %v", err)
	}
}

func FuzzCheckpoint(f *testing.F) {
	w := openWriter(f, f.TempDir(), 1, nil)
	w.start("2026-Q4")
	w.await()
	text := w.Shards()[0].Checkpoint
	v := w.current.guard.verifier
	f.Add([]byte(text))
	f.Add([]byte(strings.Replace(text, "\n1\n", "\n18446744073709551615\n", 1)))
	f.Add([]byte("a\n1\n\n\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		peek, peekErr := peekCheckpoint(b)
		cp, err := parseCheckpoint(b, v)
		if err != nil {
			return
		}
		if peekErr != nil || peek.size != cp.size || peek.root != cp.root || cp.size != 1 {
			t.Errorf("%q: signed %+v, seen %+v, %v", b, cp, peek, peekErr)
		}
	})
}

func FuzzProof(f *testing.F) {
	w := openWriter(f, f.TempDir(), 1, nil)
	w.start("2026-Q4")
	w.fill(5)
	w.await()
	vkey := testVKey(f, "2026-Q4", 1)
	for _, seq := range []uint64{0, 4} {
		p, err := w.Prove(f.Context(), seq)
		if err != nil {
			f.Fatal(err)
		}
		raw, err := json.Marshal(p)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(raw)
	}
	signed := map[string]bool{}
	all, err := w.Entries(f.Context(), 0, 10)
	if err != nil {
		f.Fatal(err)
	}
	for _, e := range all {
		signed[string(e)] = true
	}
	f.Fuzz(func(t *testing.T, raw []byte) {
		var p Proof
		if json.Unmarshal(raw, &p) != nil {
			return
		}
		if VerifyProof(p, vkey) == nil && !signed[p.Event] {
			t.Errorf("a proof of %q holds", p.Event)
		}
	})
}
