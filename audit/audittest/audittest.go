// Package audittest opens audit logs for the tests of others: real ones, in
// the test's own directory.
package audittest

import (
	"context"
	"log/slog"
	"path/filepath"
	"testing"
	"time"

	"airlock.dev/airlock/audit"
	"airlock.dev/airlock/keystore"
)

// Config is of a log that is nowhere yet, with its own keys.
func Config(t testing.TB) audit.Config {
	t.Helper()
	parent := t.TempDir()
	dir := filepath.Join(parent, "data", "audit")
	keys, err := keystore.Open(t.Context(), keystore.Config{DataDir: filepath.Dir(dir), KeysDir: filepath.Join(parent, "keys")})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := keys.Close(); err != nil {
			t.Error(err)
		}
	})
	signing, err := keys.SigningKeys(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return audit.Config{
		Dir: dir, Installation: keys.Installation(), Version: "test", Sealer: keys, Keys: signing,
		Checkpoint: 100 * time.Millisecond, Log: slog.New(slog.DiscardHandler),
	}
}

// Open opens a log, which is closed when the test ends, and says where it is.
func Open(t testing.TB) (log *audit.Log, dir string) {
	t.Helper()
	cfg := Config(t)
	log, err := audit.Open(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		if err := log.Close(ctx); err != nil {
			t.Error(err)
		}
	})
	return log, cfg.Dir
}
