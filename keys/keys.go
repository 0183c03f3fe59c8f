// Package keys makes API keys and tells who holds one.
//
// A secret is shown once, when its key is made; the store keeps only its
// SHA-256. Secrets have 160 random bits, so one fast hash is enough: there is
// nothing to guess. A key has one role and belongs to one team. The package
// knows nothing of what a role may do. Start reading at Keys.
package keys

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"regexp"
	"time"
	"unicode"
	"unicode/utf8"

	"airlock.dev/airlock"
	"airlock.dev/airlock/cluster"
)

// Key is what is known of an API key.
type Key struct {
	ID        string       `json:"id"` // the first 16 hex digits of the secret's hash
	Team      string       `json:"team"`
	Role      airlock.Role `json:"role"`
	Name      string       `json:"name,omitempty"`  // the operator's own label
	Owner     string       `json:"owner,omitempty"` // the person whose it is, if it is one's
	CreatedAt time.Time    `json:"createdAt"`
}

const (
	prefix     = "key/" // + the whole hash in hex → Key as JSON
	idLen      = 16
	maxNameLen = 100
	// MaxPage is the most keys that List returns at one time.
	MaxPage = 1000
)

var (
	teamName = regexp.MustCompile(`^[a-z0-9][a-z0-9-]{0,38}$`)
	keyID    = regexp.MustCompile(`^[0-9a-f]{16}$`)
)

// Keys are the API keys in a store.
type Keys struct{ store cluster.Store }

// New returns the keys in store.
func New(store cluster.Store) *Keys { return &Keys{store} }

// Create makes a key in store; see Keys.Create.
func Create(ctx context.Context, store cluster.Store, team string, role airlock.Role, name, owner string) (secret string, key Key, err error) {
	return New(store).Create(ctx, team, role, name, owner)
}

var secretForm = regexp.MustCompile(`^e2b_[0-9a-f]{40}$`)

// Looks says whether s has the form of a key's secret; it need not be one.
func Looks(s string) bool { return secretForm.MatchString(s) }

// Create makes a key and returns its secret, which cannot be read again. The
// secret has the form that E2B's SDKs accept: e2b_ and 40 hex digits.
func (k *Keys) Create(ctx context.Context, team string, role airlock.Role, name, owner string) (secret string, key Key, err error) {
	if !teamName.MatchString(team) {
		return "", Key{}, airlock.Invalidf("team", "use 1 to 39 of a-z, 0-9 and -, not beginning with -", "%.60q is not a team name", team)
	}
	if _, err := airlock.ParseRole(string(role)); err != nil {
		return "", Key{}, err
	}
	if !validName(name) {
		return "", Key{}, airlock.Invalidf("name", fmt.Sprintf("use at most %d printable characters", maxNameLen), "the key's name is not usable")
	}
	if !validName(owner) {
		return "", Key{}, airlock.Invalidf("owner", fmt.Sprintf("use at most %d printable characters", maxNameLen), "the key's owner is not usable")
	}
	random := make([]byte, 20)
	rand.Read(random) // never fails
	secret = "e2b_" + hex.EncodeToString(random)
	hash := hashOf(secret)
	key = Key{ID: hash[:idLen], Team: team, Role: role, Name: name, Owner: owner, CreatedAt: time.Now().UTC().Truncate(time.Second)}
	value, err := json.Marshal(key)
	if err != nil {
		return "", Key{}, fmt.Errorf("encode key: %w", err)
	}
	err = k.store.Update(ctx, func(tx cluster.Tx) error {
		twin, err := tx.Range(prefix+key.ID, "", 1)
		if err != nil {
			return err
		}
		if len(twin) > 0 { // one in 2⁶⁴, and still: ids are unique
			return airlock.Errorf(airlock.Exists, "the key's id is taken; try again")
		}
		return tx.Put(prefix+hash, value)
	})
	if err != nil {
		return "", Key{}, fmt.Errorf("store key: %w", err)
	}
	return secret, key, nil
}

func validName(s string) bool {
	if !utf8.ValidString(s) || utf8.RuneCountInString(s) > maxNameLen {
		return false
	}
	for _, r := range s {
		if !unicode.IsPrint(r) {
			return false
		}
	}
	return true
}

func hashOf(secret string) string {
	sum := sha256.Sum256([]byte(secret))
	return hex.EncodeToString(sum[:])
}

// Authenticate returns who holds secret. The work is the same for every
// secret of a length, right or wrong: a hash, and a lookup by the hash, whose
// timing says nothing of the secret.
func (k *Keys) Authenticate(ctx context.Context, secret string) (airlock.Principal, error) {
	value, err := k.store.Get(ctx, prefix+hashOf(secret))
	if err != nil {
		return airlock.Principal{}, fmt.Errorf("look up key: %w", err)
	}
	if value == nil {
		return airlock.Principal{}, airlock.Errorf(airlock.Unauthenticated, "the API key is not known")
	}
	key, err := decode(value)
	if err != nil {
		return airlock.Principal{}, err
	}
	return airlock.Principal{Team: key.Team, Role: key.Role, KeyID: key.ID, Name: key.Name, Owner: key.Owner}, nil
}

func decode(value []byte) (key Key, err error) {
	if err := json.Unmarshal(value, &key); err != nil {
		return Key{}, fmt.Errorf("decode key: %w", err)
	}
	return key, nil
}

// List returns up to limit keys of all teams in the order of their ids,
// beginning behind the id after; "" is the beginning.
func (k *Keys) List(ctx context.Context, after string, limit int) ([]Key, error) {
	if limit < 1 || limit > MaxPage {
		return nil, airlock.Invalidf("limit", fmt.Sprintf("give a number from 1 to %d", MaxPage), "limit is %d", limit)
	}
	if after != "" {
		if !keyID.MatchString(after) {
			return nil, airlock.Invalidf("after", "give the id of the last key of the page before", "%.40q is not a key id", after)
		}
		after = prefix + after + "g" // behind every hash that begins with this id
	}
	pairs, err := k.store.Range(ctx, prefix, after, limit)
	if err != nil {
		return nil, fmt.Errorf("list keys: %w", err)
	}
	list := make([]Key, 0, len(pairs))
	for _, p := range pairs {
		key, err := decode(p.Value)
		if err != nil {
			return nil, err
		}
		list = append(list, key)
	}
	return list, nil
}

// Revoke removes a key: it is refused from the next request on.
func (k *Keys) Revoke(ctx context.Context, id string) error {
	missing := airlock.Errorf(airlock.NotFound, "there is no key %.40q", id)
	if !keyID.MatchString(id) {
		return missing
	}
	err := k.store.Update(ctx, func(tx cluster.Tx) error {
		found, err := tx.Range(prefix+id, "", 1)
		if err != nil {
			return err
		}
		if len(found) == 0 {
			return missing
		}
		return tx.Delete(found[0].Key)
	})
	if err != nil {
		return fmt.Errorf("revoke key: %w", err)
	}
	return nil
}
