// Package secrets keeps the values that sandboxes may use and never see: each
// belongs to a team, has a name, and says the one place that it may be sent to.
//
// A value is sealed by the key store, together with all that is said of it: a
// record that was changed in the store, such as its host, opens no more. Only
// Get returns values, for the gateway; no list, error or log has one. The
// package does not know who may do what, and does not put values anywhere.
// Start reading at Secrets.
package secrets

import (
	"context"
	"encoding/json"
	"fmt"
	"regexp"
	"strings"
	"time"

	"airlock.dev/airlock"
	"airlock.dev/airlock/cluster"
	"airlock.dev/airlock/gateway/inject"
)

// Sealer is what the key store does.
type Sealer interface {
	// Seal encrypts plaintext; Unseal must be told the same name and ad.
	Seal(ctx context.Context, name string, plaintext, ad []byte) ([]byte, error)
	Unseal(ctx context.Context, name string, sealed, ad []byte) ([]byte, error)
}

// Secret is what is known of a secret, less its value.
type Secret struct {
	Team    string `json:"team"`
	Name    string `json:"name"`
	Version int    `json:"version"` // 1, and one more with each change
	inject.Scope
	CreatedAt time.Time `json:"createdAt"`
	CreatedBy string    `json:"createdBy"` // id of a key
	UpdatedAt time.Time `json:"updatedAt"`
	UpdatedBy string    `json:"updatedBy"`
}

// Opened is a secret with its value.
type Opened struct {
	Secret
	value string
}

// Injected is the secret as a door takes it, with the sandbox's placeholder.
func (o Opened) Injected(placeholder string) inject.Secret {
	return inject.Secret{Name: o.Name, Placeholder: placeholder, Value: o.value, Scope: o.Scope}
}

const (
	prefix = "secret/" // + team + "/" + name → record as JSON
	// sealing is the name of the key that seals values.
	sealing = "secrets"
	// MaxPage is the most secrets that List returns at one time.
	MaxPage = 1000
)

var (
	teamName   = regexp.MustCompile(`^[a-z0-9][a-z0-9-]{0,38}$`) // as package keys has it
	secretName = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$`)
)

// record is what the store has. About is a Secret; its bytes are bound to the
// sealed value.
type record struct {
	About  json.RawMessage `json:"about"`
	Sealed []byte          `json:"sealed"`
}

// Secrets are those in a store.
type Secrets struct {
	store  cluster.Store
	sealer Sealer
}

// New returns the secrets in store, whose values sealer opens.
func New(store cluster.Store, sealer Sealer) *Secrets { return &Secrets{store, sealer} }

// Check says whether a team and a name can be those of a secret. The error is
// airlock.Invalid.
func Check(team, name string) error {
	_, err := key(team, name)
	return err
}

func key(team, name string) (string, error) {
	if !teamName.MatchString(team) {
		return "", airlock.Invalidf("team", "use 1 to 39 of a-z, 0-9 and -, not beginning with -", "%.60q is not a team name", team)
	}
	if !secretName.MatchString(name) {
		return "", airlock.Invalidf("name", "use 1 to 64 letters, digits, dots, - and _, beginning with a letter or digit", "%.80q is not a name of a secret", name)
	}
	return prefix + team + "/" + name, nil
}

// Set makes a secret, or replaces it with all that was said of it. by is the
// id of the key that asks.
func (s *Secrets) Set(ctx context.Context, team, name string, scope inject.Scope, value, by string) (Secret, error) {
	if scope.Port == 443 {
		scope.Port = 0 // one spelling
	}
	if err := scope.Validate(); err != nil {
		return Secret{}, err
	}
	return s.change(ctx, team, name, value, by, func(before *Secret) (Secret, error) {
		next := Secret{CreatedBy: by}
		if before != nil {
			next = *before
		}
		next.Scope = scope
		return next, nil
	})
}

// Rotate gives a secret another value. The one before cannot be opened any
// more when it returns; requests under way may still have it.
func (s *Secrets) Rotate(ctx context.Context, team, name, value, by string) (Secret, error) {
	return s.change(ctx, team, name, value, by, func(before *Secret) (Secret, error) {
		if before == nil {
			return Secret{}, missing(team, name)
		}
		return *before, nil
	})
}

func missing(team, name string) error {
	return &airlock.Error{Code: airlock.NotFound, Field: "name", Message: fmt.Sprintf("team %s has no secret %s", team, name), Hint: "`airlock secret list` shows those there are"}
}

// change stores what next makes of the secret that there is, if there is one.
func (s *Secrets) change(ctx context.Context, team, name, value, by string, next func(before *Secret) (Secret, error)) (Secret, error) {
	key, err := key(team, name)
	if err != nil {
		return Secret{}, err
	}
	stored, err := s.store.Get(ctx, key)
	if err != nil {
		return Secret{}, fmt.Errorf("read secret: %w", err)
	}
	var before *Secret
	if stored != nil {
		r, err := decode(key, stored)
		if err != nil {
			return Secret{}, err
		}
		before = &r.Secret
	}
	after, err := next(before)
	if err != nil {
		return Secret{}, err
	}
	if err := after.ValidateValue(value); err != nil {
		return Secret{}, err
	}
	now := time.Now().UTC().Truncate(time.Second)
	after.Team, after.Name, after.UpdatedAt, after.UpdatedBy = team, name, now, by
	if after.Version++; before == nil {
		after.CreatedAt = now
	}
	about, err := json.Marshal(after)
	if err != nil {
		return Secret{}, fmt.Errorf("encode secret: %w", err)
	}
	// Outside of the transaction, which may run more than once.
	sealed, err := s.sealer.Seal(ctx, sealing, []byte(value), about)
	if err != nil {
		return Secret{}, fmt.Errorf("seal secret: %w", err)
	}
	text, err := json.Marshal(record{about, sealed})
	if err != nil {
		return Secret{}, fmt.Errorf("encode secret: %w", err)
	}
	err = s.store.Update(ctx, func(tx cluster.Tx) error {
		now, err := tx.Get(key)
		if err != nil {
			return err
		}
		if (now == nil) != (stored == nil) || string(now) != string(stored) {
			return &airlock.Error{Code: airlock.Conflict, Message: fmt.Sprintf("secret %s was changed by somebody else at the same time", name), Hint: "look at it and try again"}
		}
		return tx.Put(key, text)
	})
	if err != nil {
		return Secret{}, fmt.Errorf("store secret: %w", err)
	}
	return after, nil
}

// found is a record, read.
type found struct {
	Secret
	about, sealed []byte
}

func decode(key string, text []byte) (f found, err error) {
	var r record
	if err := json.Unmarshal(text, &r); err != nil {
		return f, fmt.Errorf("decode secret: %w", err)
	}
	if err := json.Unmarshal(r.About, &f.Secret); err != nil {
		return f, fmt.Errorf("decode secret: %w", err)
	}
	if prefix+f.Team+"/"+f.Name != key {
		return f, fmt.Errorf("the record of %s is that of another secret", key)
	}
	f.about, f.sealed = r.About, r.Sealed
	return f, nil
}

// List returns up to limit secrets of a team, or of all if team is "", in the
// order of teams and names, beginning behind after, the Cursor of the last one
// of the page before; "" is the beginning.
func (s *Secrets) List(ctx context.Context, team, after string, limit int) ([]Secret, error) {
	if limit < 1 || limit > MaxPage {
		return nil, airlock.Invalidf("limit", fmt.Sprintf("give a number from 1 to %d", MaxPage), "limit is %d", limit)
	}
	within := prefix
	if team != "" {
		if !teamName.MatchString(team) {
			return nil, airlock.Invalidf("team", "use 1 to 39 of a-z, 0-9 and -, not beginning with -", "%.60q is not a team name", team)
		}
		within += team + "/"
	}
	if after != "" {
		t, n, _ := strings.Cut(after, "/")
		if _, err := key(t, n); err != nil {
			return nil, airlock.Invalidf("nextToken", "give what the page before ended with", "%.120q is no place in the list of secrets", after)
		}
		after = prefix + after
	}
	pairs, err := s.store.Range(ctx, within, after, limit)
	if err != nil {
		return nil, fmt.Errorf("list secrets: %w", err)
	}
	list := make([]Secret, 0, len(pairs))
	for _, p := range pairs {
		f, err := decode(p.Key, p.Value)
		if err != nil {
			return nil, err
		}
		list = append(list, f.Secret)
	}
	return list, nil
}

// Cursor is the secret's place in lists.
func (s Secret) Cursor() string { return s.Team + "/" + s.Name }

// Remove forgets a secret.
func (s *Secrets) Remove(ctx context.Context, team, name string) error {
	key, err := key(team, name)
	if err != nil {
		return err
	}
	err = s.store.Update(ctx, func(tx cluster.Tx) error {
		there, err := tx.Get(key)
		if err != nil {
			return err
		}
		if there == nil {
			return missing(team, name)
		}
		return tx.Delete(key)
	})
	if err != nil {
		return fmt.Errorf("remove secret: %w", err)
	}
	return nil
}

// Get opens secrets of a team, in the order of names. It fails if one of them
// is not there, or was altered.
func (s *Secrets) Get(ctx context.Context, team string, names []string) ([]Opened, error) {
	opened := make([]Opened, 0, len(names))
	for _, name := range names {
		key, err := key(team, name)
		if err != nil {
			return nil, err
		}
		text, err := s.store.Get(ctx, key)
		if err != nil {
			return nil, fmt.Errorf("read secret: %w", err)
		}
		if text == nil {
			return nil, missing(team, name)
		}
		f, err := decode(key, text)
		if err != nil {
			return nil, err
		}
		value, err := s.sealer.Unseal(ctx, sealing, f.sealed, f.about)
		if err != nil {
			return nil, fmt.Errorf("open secret %s of team %s: %w", name, team, err)
		}
		opened = append(opened, Opened{f.Secret, string(value)})
		clear(value)
	}
	return opened, nil
}
