package control

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"

	"airlock.dev/airlock"
	"airlock.dev/airlock/audit"
	"airlock.dev/airlock/policy"
)

// Policies are the operator's, in force. A directory that does not load never
// replaces one that did, not even at a restart: a copy of the last good one is
// kept.
type Policies struct {
	dir, kept string
	log       *slog.Logger

	mu      sync.Mutex // one reload at a time
	current atomic.Pointer[policy.Policies]
}

// The bounds of a directory of policies.
const (
	policyFiles = 10_000
	policyBytes = 64 << 20
)

// OpenPolicies loads dir; "" is policy.Builtin. kept is where the copy of the
// last good directory is. The second result says why dir itself did not load,
// if the copy takes its place.
func OpenPolicies(dir, kept string, log *slog.Logger) (*Policies, error, error) {
	p := &Policies{dir: dir, kept: kept, log: log}
	if dir == "" {
		p.current.Store(policy.Builtin())
		return p, nil, nil
	}
	loaded, err := policy.Load(os.DirFS(dir))
	if err == nil {
		p.current.Store(loaded)
		return p, nil, p.keep()
	}
	last, lastErr := policy.Load(os.DirFS(kept))
	if lastErr != nil {
		return nil, nil, fmt.Errorf("load the policies in %s: %w", dir, err)
	}
	p.current.Store(last)
	return p, err, nil
}

// Current returns what is in force.
func (p *Policies) Current() *policy.Policies { return p.current.Load() }

// Reload loads the directory again. With an error, what was in force stays.
func (p *Policies) Reload(ctx context.Context, trail Trail, by audit.Actor) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.dir == "" {
		return airlock.Errorf(airlock.Conflict, "the server has no directory of policies: start it with --policies")
	}
	loaded, err := policy.Load(os.DirFS(p.dir))
	e := audit.Event{Type: "policy.load", Actor: by, Outcome: audit.Outcome{Status: "ok", Message: "default " + p.Current().For("").Digest()}}
	if err != nil {
		e.Outcome = audit.Outcome{Status: "error", Code: string(airlock.CodeOf(err)), Message: err.Error()}
	} else {
		e.Outcome.Message = "default " + loaded.For("").Digest()
	}
	if _, recorded := trail.Append(ctx, e); recorded != nil {
		return recorded // what is in force is always what the trail says
	}
	if err != nil {
		return err
	}
	p.current.Store(loaded)
	if err := p.keep(); err != nil {
		p.log.Error("the policies are in force, but no copy of them could be kept", "err", err)
	}
	return nil
}

// keep copies the directory to where the next server finds it.
func (p *Policies) keep() error {
	next := p.kept + ".next"
	if err := os.RemoveAll(next); err != nil {
		return fmt.Errorf("copy the policies: %w", err)
	}
	var files, size int64
	source := os.DirFS(p.dir)
	err := fs.WalkDir(source, ".", func(name string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		to := filepath.Join(next, filepath.FromSlash(name))
		if d.IsDir() {
			return os.MkdirAll(to, 0o700)
		}
		text, err := fs.ReadFile(source, name)
		if err != nil {
			return err
		}
		if files, size = files+1, size+int64(len(text)); files > policyFiles || size > policyBytes {
			return airlock.Errorf(airlock.TooLarge, "the directory of policies has more than %d files or %d bytes", policyFiles, policyBytes)
		}
		return os.WriteFile(to, text, 0o600)
	})
	if err == nil {
		_, err = policy.Load(os.DirFS(next)) // the files may have changed since they were loaded
	}
	if err == nil {
		err = os.RemoveAll(p.kept)
	}
	if err == nil {
		err = os.Rename(next, p.kept)
	}
	if err != nil {
		return errors.Join(fmt.Errorf("copy the policies: %w", err), os.RemoveAll(next))
	}
	return nil
}
