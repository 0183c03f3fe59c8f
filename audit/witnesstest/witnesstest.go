// Package witnesstest runs a real witness for tests, on loopback. It knows
// nothing of the log that asks it, but the key.
package witnesstest

import (
	"context"
	"crypto/rand"
	"fmt"
	"net/http"
	"net/http/httptest"
	"testing"

	f_note "github.com/transparency-dev/formats/note"
	"github.com/transparency-dev/witness/persistence/inmemory"
	"github.com/transparency-dev/witness/witness"
	"golang.org/x/mod/sumdb/note"
)

// Witness cosigns what grows, and refuses another history.
type Witness struct {
	Policy []byte        // that asks it, for serve --witnesses
	Key    note.Verifier // of its cosignatures

	witness *witness.Witness
	origin  string
	server  *httptest.Server
}

// Start starts the witness of one log. It ends with the test.
func Start(t *testing.T, log note.Verifier) *Witness {
	t.Helper()
	skey, vkey, err := note.GenerateKey(rand.Reader, "witness.example/one")
	if err != nil {
		t.Fatal(err)
	}
	signer, err := f_note.NewSignerForCosignatureV1(skey)
	if err != nil {
		t.Fatal(err)
	}
	if vkey, err = f_note.VKeyToCosignatureV1(vkey); err != nil {
		t.Fatal(err)
	}
	w := &Witness{Key: signer.Verifier(), origin: log.Name()}
	w.witness, err = witness.New(t.Context(), witness.Opts{
		Persistence: inmemory.New(),
		Signers:     []note.Signer{signer},
		VerifierForLog: func(_ context.Context, origin string) (note.Verifier, bool, error) {
			return log, origin == log.Name(), nil
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	mux := http.NewServeMux()
	mux.HandleFunc("POST /add-checkpoint", witness.NewHTTPHandler(w.witness).AddCheckpoint)
	w.server = httptest.NewServer(mux)
	t.Cleanup(w.Stop)
	w.Policy = fmt.Appendf(nil, "witness one %s %s\nquorum one\n", vkey, w.server.URL)
	return w
}

// Stop lets it answer no more.
func (w *Witness) Stop() { w.server.Close() }

// Head is the newest checkpoint that it has seen.
func (w *Witness) Head(t *testing.T) []byte {
	t.Helper()
	head, err := w.witness.GetCheckpoint(t.Context(), w.origin)
	if err != nil {
		t.Fatal(err)
	}
	return head
}
