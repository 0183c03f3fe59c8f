package control

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"airlock.dev/airlock"
	"airlock.dev/airlock/audit"
	"airlock.dev/airlock/policy"
)

// Policies are the operator's, in force. A directory that does not load never
// replaces one that did, not even at a restart: a copy of the last good one is
// kept. What comes into force is in the trail before it counts.
type Policies struct {
	dir   string
	kept  keptCopy
	trail Trail
	log   *slog.Logger

	mu      sync.Mutex // one reload at a time
	changed func(context.Context)
	current atomic.Pointer[InForce]
}

// InForce is what holds, and where it is from.
type InForce struct {
	*policy.Policies
	Source string // FromDirectory, FromCopy or FromBuiltin
}

// Where policies are from.
const (
	FromDirectory = "directory"
	FromCopy      = "kept copy" // of the last directory that loaded
	FromBuiltin   = "built in"
)

// OpenPolicies loads dir; "" is policy.Builtin. kept is where the copy of the
// last good directory is; it takes dir's place if that does not load. Which it
// is, the trail has when OpenPolicies returns.
func OpenPolicies(ctx context.Context, dir, kept string, trail Trail, log *slog.Logger) (*Policies, error) {
	p := &Policies{dir: dir, kept: keptCopy{kept}, trail: trail, log: log}
	now, refused, err := p.first()
	if err != nil {
		return nil, err
	}
	e := loadEvent(now, dir, audit.Actor{Kind: "system"}, refused)
	switch {
	case refused != nil:
		log.Error("the directory of policies does not load; the last one that did stays in force", "err", refused)
	case dir == "" && p.kept.exists():
		e.Outcome.Message += "; a directory was in force before"
		log.Warn("the server starts without the policies that were in force before: what is built in holds for every team; start it with --policies to have them back", "profile", policy.DefaultProfile, "copy", kept)
	}
	if _, err := trail.Append(ctx, e); err != nil {
		return nil, fmt.Errorf("record which policies come into force: %w", err)
	}
	p.current.Store(&now)
	return p, nil
}

// first returns what a server begins with, and why it is not the directory
// that it was given.
func (p *Policies) first() (now InForce, refused, err error) {
	if p.dir == "" {
		return InForce{policy.Builtin(), FromBuiltin}, nil, nil
	}
	loaded, refused := policy.Load(policy.Dir(p.dir))
	if refused == nil {
		return InForce{loaded, FromDirectory}, nil, p.kept.write(loaded)
	}
	last, err := p.kept.load()
	if errors.Is(err, fs.ErrNotExist) {
		return now, nil, fmt.Errorf("load the policies in %s: %w", p.dir, refused)
	} else if err != nil {
		return now, nil, fmt.Errorf("load the policies in %s: %w; nor can those that did load before: %w", p.dir, refused, err)
	}
	return InForce{last, FromCopy}, refused, nil
}

// Current returns the policies in force.
func (p *Policies) Current() *policy.Policies { return p.current.Load().Policies }

// InForce returns the policies in force, and where they are from.
func (p *Policies) InForce() InForce { return *p.current.Load() }

// OnChange has f called whenever other policies have come into force, before
// Reload returns.
func (p *Policies) OnChange(f func(context.Context)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.changed = f
}

// Reload loads the directory again. With an error, what was in force stays.
func (p *Policies) Reload(ctx context.Context, by audit.Actor) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.dir == "" {
		return airlock.Errorf(airlock.Conflict, "the server has no directory of policies: start it with --policies")
	}
	now := p.InForce()
	loaded, err := policy.Load(policy.Dir(p.dir))
	if err == nil {
		now = InForce{loaded, FromDirectory}
	}
	if _, recorded := p.trail.Append(ctx, loadEvent(now, p.dir, by, err)); recorded != nil {
		return recorded // what is in force is always what the trail says
	}
	if err != nil {
		return err
	}
	p.current.Store(&now)
	if err := p.kept.write(loaded); err != nil {
		p.log.Error("the policies are in force, but no copy of them could be kept", "err", err)
	}
	if p.changed != nil {
		p.changed(context.WithoutCancel(ctx)) // whoever asked may go away
	}
	return nil
}

// Digest is a named SHA-256, in lower-case hexadecimal.
type Digest struct {
	Name   string `json:"name"`
	SHA256 string `json:"sha256"`
}

// PolicyFiles are the files of policies, without those of tests, by path:
// each as sha256sum has it.
func (f InForce) PolicyFiles() []Digest {
	all := []Digest{}
	for _, name := range slices.Sorted(maps.Keys(f.Files())) {
		if strings.HasSuffix(name, ".cedar") {
			sum := sha256.Sum256(f.Files()[name])
			all = append(all, Digest{name, hex.EncodeToString(sum[:])})
		}
	}
	return all
}

// Ceilings are the sets of policies in force, as decisions have them: what
// holds for teams without a file of their own, and then each team's.
func (f InForce) Ceilings() []Digest {
	all := []Digest{{f.For("").Name(), f.For("").Digest()}}
	for _, team := range f.Teams() {
		all = append(all, Digest{f.For(team).Name(), f.For(team).Digest()})
	}
	return all
}

// listMost is how many entries a list in an event has. The trail cuts longer
// ones.
const listMost = 32

// loadEvent says what is in force from here on, and why it is not what the
// directory has now.
func loadEvent(now InForce, dir string, by audit.Actor, refused error) audit.Event {
	has := map[string]any{"source": now.Source, "teams": int64(len(now.Teams()))}
	if dir != "" {
		has["directory"] = dir
	}
	for name, list := range map[string][]Digest{"files": now.PolicyFiles(), "ceilings": now.Ceilings()} {
		if len(list) > listMost {
			lines := sha256.New()
			for _, d := range list {
				fmt.Fprintf(lines, "%s  %s\n", d.SHA256, d.Name)
			}
			has[name+"Digest"] = hex.EncodeToString(lines.Sum(nil))
			list = slices.DeleteFunc(list, func(d Digest) bool { return strings.HasPrefix(d.Name, "teams/") })
		}
		var entries []string
		for _, d := range list {
			entries = append(entries, d.SHA256+"  "+d.Name)
		}
		if entries != nil {
			has[name] = entries
		}
	}
	e := audit.Event{
		Type: "policy.load", Actor: by,
		Call: audit.Call{
			Principal: audit.Entity{Type: "User", ID: by.ID}, Action: "policy:load",
			Resource: audit.Entity{Type: "Policies", ID: now.Digest()}, Context: has,
		},
		Outcome: audit.Outcome{Status: "ok", Message: "in force: " + now.Source},
	}
	if by.ID == "" {
		e.Call.Principal = audit.Entity{Type: "System"}
	}
	if now.Source == FromBuiltin {
		e.Outcome.Message = "built in: " + policy.DefaultProfile + " for every team"
	}
	if refused != nil {
		e.Outcome = audit.Outcome{Status: "error", Code: string(airlock.CodeOf(refused)), Message: refused.Error()}
	}
	return e
}
