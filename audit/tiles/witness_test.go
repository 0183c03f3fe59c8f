package tiles

import (
	"context"
	"crypto/rand"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	f_note "github.com/transparency-dev/formats/note"
	"github.com/transparency-dev/witness/persistence/inmemory"
	"github.com/transparency-dev/witness/witness"
	"golang.org/x/mod/sumdb/note"
)

// A real witness over loopback: it cosigns what grows, and refuses the copy
// that was put back and went on.
func TestWitness(t *testing.T) {
	skey, vkey, err := note.GenerateKey(rand.Reader, "witness.example/one")
	if err != nil {
		t.Fatal(err)
	}
	signer, err := f_note.NewSignerForCosignatureV1(skey)
	if err != nil {
		t.Fatal(err)
	}
	vkey, err = f_note.VKeyToCosignatureV1(vkey)
	if err != nil {
		t.Fatal(err)
	}
	logKey, _, err := verifierOf(testInstallation, "2026-Q4", testKey(1))
	if err != nil {
		t.Fatal(err)
	}
	one, err := witness.New(t.Context(), witness.Opts{
		Persistence: inmemory.New(),
		Signers:     []note.Signer{signer},
		VerifierForLog: func(_ context.Context, origin string) (note.Verifier, bool, error) {
			return logKey, origin == logKey.Name(), nil
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	mux := http.NewServeMux()
	mux.HandleFunc("POST /add-checkpoint", witness.NewHTTPHandler(one).AddCheckpoint)
	server := httptest.NewServer(mux)
	defer server.Close()
	policy := func(c *Config) {
		c.Witnesses = fmt.Appendf(nil, "witness one %s %s\nquorum one\n", vkey, server.URL)
	}

	dir := t.TempDir()
	w := openWriter(t, dir, 1, policy)
	w.start("2026-Q4")
	w.fill(100)
	w.await()
	cosigned := w.Shards()[0].Checkpoint
	n, err := note.Open([]byte(cosigned), note.VerifierList(logKey, signer.Verifier()))
	if err != nil || len(n.Sigs) != 2 {
		t.Errorf("checkpoint %q: %v", cosigned, err)
	}
	w.finish()
	older := copyOf(t, dir)

	w = openWriter(t, dir, 1, policy)
	w.fill(200)
	w.await()
	w.finish()
	head, err := one.GetCheckpoint(t.Context(), logKey.Name())
	if err != nil {
		t.Fatal(err)
	}
	opts := VerifyOptions{VKeys: []string{testVKey(t, "2026-Q4", 1)}, Heads: []string{string(head)}}
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
	server.Close()
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
