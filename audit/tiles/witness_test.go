package tiles

import (
	"strings"
	"testing"
	"time"

	"golang.org/x/mod/sumdb/note"

	"airlock.dev/airlock/audit/witnesstest"
)

// A real witness over loopback: it cosigns what grows, and refuses the copy
// that was put back and went on.
func TestWitness(t *testing.T) {
	logKey, _, err := verifierOf(testInstallation, "2026-Q4", testKey(1))
	if err != nil {
		t.Fatal(err)
	}
	one := witnesstest.Start(t, logKey)
	policy := func(c *Config) { c.Witnesses = one.Policy }

	dir := t.TempDir()
	w := openWriter(t, dir, 1, policy)
	w.start("2026-Q4")
	w.fill(100)
	w.await()
	cosigned := w.Shards()[0].Checkpoint
	n, err := note.Open([]byte(cosigned), note.VerifierList(logKey, one.Key))
	if err != nil || len(n.Sigs) != 2 {
		t.Errorf("checkpoint %q: %v", cosigned, err)
	}
	w.finish()
	older := copyOf(t, dir)

	w = openWriter(t, dir, 1, policy)
	w.fill(200)
	w.await()
	w.finish()
	opts := VerifyOptions{VKeys: []string{testVKey(t, "2026-Q4", 1)}, Heads: []string{string(one.Head(t))}}
	mustVerify(t, dir, opts)

	w = openWriter(t, older, 1, policy)
	w.add(testEvent(100, `"type":"another"`))
	expectErr(t, w.Trees, "has seen another state of this log")
	w.fill(250) // more entries than the witness has seen, and others
	expectErr(t, w.Trees, "422")
	if _, next := w.Published(); next != 100 {
		t.Errorf("published %d", next)
	}
	r, err := Verify(t.Context(), older, opts)
	if err != nil || len(r.Problems) != 1 || r.Problems[0].short() != "rolled_back 2026-Q4/checkpoint 100+100" {
		t.Errorf("the older copy: %+v, %v", r.Problems, err)
	}
	if _, err := w.Prove(t.Context(), 249); err == nil {
		t.Error("an event was proved that no published checkpoint covers")
	}
	one.Stop()
	w.fill(260) // goes on without a witness
	expectErr(t, w.Trees, "connection refused")
}

func expectErr(t *testing.T, trees *Trees, want string) {
	t.Helper()
	deadline := time.Now().Add(20 * time.Second)
	for {
		err := trees.Err()
		if err != nil && strings.Contains(err.Error(), want) {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("error %v, want %q", err, want)
		}
		time.Sleep(5 * time.Millisecond)
	}
}
