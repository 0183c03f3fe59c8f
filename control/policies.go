package control

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
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
	dir  string
	kept keptCopy
	log  *slog.Logger

	mu      sync.Mutex // one reload at a time
	current atomic.Pointer[policy.Policies]
}

// OpenPolicies loads dir; "" is policy.Builtin. kept is where the copy of the
// last good directory is. The second result says why dir itself did not load,
// if the copy takes its place.
func OpenPolicies(dir, kept string, log *slog.Logger) (*Policies, error, error) {
	p := &Policies{dir: dir, kept: keptCopy{kept}, log: log}
	if dir == "" {
		p.current.Store(policy.Builtin())
		return p, nil, nil
	}
	loaded, err := policy.Load(policy.Dir(dir))
	if err == nil {
		p.current.Store(loaded)
		return p, nil, p.kept.write(loaded)
	}
	last, lastErr := p.kept.load()
	if errors.Is(lastErr, fs.ErrNotExist) {
		return nil, nil, fmt.Errorf("load the policies in %s: %w", dir, err)
	} else if lastErr != nil {
		return nil, nil, fmt.Errorf("load the policies in %s: %w; nor can those that did load before: %w", dir, err, lastErr)
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
	loaded, err := policy.Load(policy.Dir(p.dir))
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
	if err := p.kept.write(loaded); err != nil {
		p.log.Error("the policies are in force, but no copy of them could be kept", "err", err)
	}
	return nil
}
