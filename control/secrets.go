package control

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"

	"airlock.dev/airlock"
	"airlock.dev/airlock/gateway/inject"
	"airlock.dev/airlock/gateway/wire"
	"airlock.dev/airlock/secrets"
)

// Secrets is what control asks of the teams' secrets; secrets.Secrets is the one.
type Secrets interface {
	// Get opens secrets by name. One that is not there is NotFound.
	Get(ctx context.Context, team string, names []string) ([]secrets.Opened, error)
}

// Bounds of the secrets of one sandbox: all are in one message to the gateway.
const (
	secretsMost  = 32
	secretsBytes = 64 << 10
)

var variableName = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]{0,127}$`)

// placeholders makes what a sandbox gets instead of the secrets that it was
// asked for, by the names of variables.
func (c *Sandboxes) placeholders(ctx context.Context, team string, wanted map[string]string) ([]airlock.Placeholder, error) {
	if len(wanted) == 0 {
		return nil, nil
	}
	if c.cfg.Secrets == nil || c.gateway == nil {
		return nil, airlock.Invalidf("secrets", "use a server (airlock serve)", "secrets need a gateway, which puts them into requests")
	}
	if len(wanted) > secretsMost {
		return nil, airlock.Invalidf("secrets", fmt.Sprintf("use at most %d", secretsMost), "there are %d secrets", len(wanted))
	}
	var all []airlock.Placeholder
	for variable, name := range wanted {
		if !variableName.MatchString(variable) {
			return nil, airlock.Invalidf("secrets", "use letters, digits and _", "secrets: %.60q is no name of a variable", variable)
		}
		all = append(all, airlock.Placeholder{Variable: variable, Secret: name, Text: inject.NewPlaceholder(name)})
	}
	slices.SortFunc(all, func(a, b airlock.Placeholder) int { return strings.Compare(a.Variable, b.Variable) })
	for i, p := range all {
		if slices.ContainsFunc(all[:i], func(before airlock.Placeholder) bool { return before.Secret == p.Secret }) {
			return nil, airlock.Invalidf("secrets", "give each secret one variable", "secrets: %.60q is in two variables", p.Secret)
		}
	}
	_, err := c.opened(ctx, airlock.Sandbox{Team: team, Placeholders: all}, true)
	return all, err
}

// opened are the secrets of a sandbox with their values: those that it has
// placeholders for, and those that the operator's policies put in. Only a new
// sandbox must have all: one that runs goes on without what was removed, and
// its placeholder stands for nothing then.
func (c *Sandboxes) opened(ctx context.Context, sb airlock.Sandbox, isNew bool) (all []inject.Secret, err error) {
	if c.cfg.Secrets == nil {
		return nil, nil
	}
	bytes := 0
	get := func(name, placeholder string) (bool, error) {
		found, err := c.cfg.Secrets.Get(ctx, sb.Team, []string{name})
		if airlock.CodeOf(err) == airlock.NotFound {
			return false, nil
		}
		if err == nil {
			all = append(all, found[0].Injected(placeholder))
			bytes += len(all[len(all)-1].Value)
		}
		return err == nil, err
	}
	for _, p := range sb.Placeholders {
		found, err := get(p.Secret, p.Text)
		if err != nil {
			return nil, err
		}
		if !found && isNew {
			return nil, airlock.Invalidf("secrets", "make it with `airlock secret set`", "team %s has no secret %.64q", sb.Team, p.Secret)
		}
	}
	// What policies put in must not keep a sandbox from being made: without
	// the secret, such a request is refused.
	for _, name := range c.cfg.Boundary.Policies().For(sb.Team).Injected() {
		i := slices.IndexFunc(all, func(s inject.Secret) bool { return s.Name == name })
		if i < 0 {
			found, err := get(name, "")
			if err != nil {
				return nil, err
			}
			if !found {
				continue
			}
			i = len(all) - 1
		}
		all[i].Wanted = true
	}
	if bytes > secretsBytes {
		return nil, airlock.Invalidf("secrets", "use fewer or shorter ones", "the secrets have %d bytes together, and may have %d", bytes, secretsBytes)
	}
	return all, nil
}

// door is what the gateway must know of a sandbox.
func (c *Sandboxes) door(ctx context.Context, sb airlock.Sandbox) (wire.Door, error) {
	all, err := c.opened(ctx, sb, false)
	d := wire.Door{Sandbox: sb.ID, Secrets: all, Used: sb.NetworkBytes, EgressProxy: sb.Network.EgressProxy}
	for _, r := range sb.Network.Rules {
		d.Rules = append(d.Rules, wire.Rule(r))
	}
	return d, err
}

// SecretChanged tells that a secret of a team has another value, scope, or none.
// Sandboxes that have it go on with what it is now; requests under way end with
// what it was. One that cannot be told keeps no other from being told.
func (c *Sandboxes) SecretChanged(ctx context.Context, team, name string) error {
	c.secretChanges.Add(1)
	var failed []error
	for _, l := range c.all() {
		sb := l.get()
		has := slices.ContainsFunc(sb.Placeholders, func(p airlock.Placeholder) bool { return p.Secret == name })
		if sb.Team != team || !has && !slices.Contains(c.cfg.Boundary.Policies().For(team).Injected(), name) {
			continue
		}
		if err := c.refresh(ctx, l); err != nil {
			failed = append(failed, fmt.Errorf("tell the gateway of the secret %s: %w", name, err))
		}
	}
	return errors.Join(failed...)
}

// refresh tells the gateway what a sandbox has now: of two that do so at a time,
// the later one reads later.
func (c *Sandboxes) refresh(ctx context.Context, l *live) error {
	l.network.Lock()
	defer l.network.Unlock()
	return c.setDoor(ctx, l.get())
}

// setDoor tells the gateway what a sandbox has now.
func (c *Sandboxes) setDoor(ctx context.Context, sb airlock.Sandbox) error {
	if c.gateway == nil {
		return nil
	}
	d, err := c.door(ctx, sb)
	if err != nil {
		return err
	}
	if err := c.gateway.Set(ctx, d); err != nil && airlock.CodeOf(err) != airlock.NotFound {
		return err
	}
	return nil
}
