package keystore

import (
	"bytes"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base32"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"airlock.dev/airlock"
)

// keyring is the file of named keys, JSON. Its root key wraps one key, the
// keyring's (kek), which is another one after each change of the root key.
// That wraps the named keys and, derived from it, the subject keys, and
// authenticates the whole file.
type keyring struct {
	Airlock  string     `json:"airlock"`  // "keyring"
	Format   int        `json:"format"`   // keyringFormat
	ID       string     `json:"id"`       // of the installation: 20 of [a-z2-7]
	Subjects string     `json:"subjects"` // the id of the file of subject keys, hex
	KEK      wrappedKEK `json:"kek"`
	Keys     []namedKey `json:"keys"`
	MAC      []byte     `json:"mac"` // HMAC-SHA256 of this without it, as Go encodes it
}

type wrappedKEK struct {
	ID      string    `json:"id"` // 8 random bytes, hex: slots say by which they are wrapped
	Created time.Time `json:"created"`
	Root    string    `json:"root"`            // the reference of the root key that wraps it
	Check   string    `json:"check,omitempty"` // tells a wrong root key from a damaged file
	Wrapped []byte    `json:"wrapped"`
}

type namedKey struct {
	Info
	Wrapped []byte `json:"wrapped"`
}

// Info is what is known of a named key without any other key.
type Info struct {
	Purpose string    `json:"purpose"`
	Name    string    `json:"name"`
	Version int       `json:"version"` // from 1
	Created time.Time `json:"created"`
	State   State     `json:"state"`
}

// State says what a version of a key is for.
type State string

// The states of a version: one is current, and those before it still open
// what they sealed.
const (
	Current State = "current"
	Old     State = "old"
)

const (
	keyringFormat = 1
	maxKeyring    = 16 << 20 // bytes
	maxNamedKeys  = 10_000
	wrappedLen    = nonceLen + keyLen + tagLen
)

var (
	purposeForm      = regexp.MustCompile(`^[a-z][a-z0-9-]{0,31}$`)
	nameForm         = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._/-]{0,99}$`)
	installationForm = regexp.MustCompile(`^[a-z2-7]{20}$`)
	checkForm        = regexp.MustCompile(`^([0-9a-f]{16})?$`)
)

func checkName(purpose, name string) error {
	if !purposeForm.MatchString(purpose) {
		return airlock.Invalidf("purpose", "use 1 to 32 of a-z, 0-9 and -, beginning with a letter", "%.60q is no purpose of a key", purpose)
	}
	if !nameForm.MatchString(name) {
		return airlock.Invalidf("name", "use 1 to 100 of letters, digits and . _ / -", "%.60q is no name of a key", name)
	}
	return nil
}

// parseKeyring checks everything that can be checked without a key.
func parseKeyring(text []byte) (*keyring, error) {
	if len(text) > maxKeyring {
		return nil, fmt.Errorf("it has %d bytes and may have %d", len(text), maxKeyring)
	}
	var form struct {
		Airlock string `json:"airlock"`
		Format  int    `json:"format"`
	}
	if err := json.Unmarshal(text, &form); err != nil {
		return nil, placed(err, text)
	}
	if form.Airlock != "keyring" {
		return nil, errors.New("it is no keyring")
	}
	if form.Format != keyringFormat {
		return nil, fmt.Errorf("it has format %d and this airlock knows %d: run the airlock version that wrote it", form.Format, keyringFormat)
	}
	r := &keyring{}
	d := json.NewDecoder(bytes.NewReader(text))
	d.DisallowUnknownFields()
	if err := d.Decode(r); err != nil {
		return nil, placed(err, text)
	}
	if _, err := d.Token(); err != io.EOF {
		return nil, fmt.Errorf("something follows the keyring at offset %d", d.InputOffset())
	}
	return r, r.validate()
}

// placed adds where in the file a syntax error is.
func placed(err error, text []byte) error {
	var syntax *json.SyntaxError
	if errors.As(err, &syntax) {
		return fmt.Errorf("line %d, offset %d: %w", 1+bytes.Count(text[:min(int(syntax.Offset), len(text))], []byte("\n")), syntax.Offset, err)
	}
	return err
}

func (r *keyring) validate() error {
	switch {
	case !installationForm.MatchString(r.ID):
		return fmt.Errorf("id: %.40q is not 20 of a-z and 2-7", r.ID)
	case !isHex(r.Subjects, fileIDLen):
		return fmt.Errorf("subjects: %.40q is not %d bytes in hex", r.Subjects, fileIDLen)
	case !isHex(r.KEK.ID, kekIDLen):
		return fmt.Errorf("kek.id: %.40q is not %d bytes in hex", r.KEK.ID, kekIDLen)
	case r.KEK.Root == "" || len(r.KEK.Root) > 4200 || !checkForm.MatchString(r.KEK.Check):
		return errors.New("kek: it names no root key")
	case len(r.KEK.Wrapped) == 0 || len(r.KEK.Wrapped) > 1024:
		return fmt.Errorf("kek.wrapped has %d bytes", len(r.KEK.Wrapped))
	case len(r.MAC) != sha256.Size:
		return fmt.Errorf("mac has %d bytes and must have %d", len(r.MAC), sha256.Size)
	case len(r.Keys) > maxNamedKeys:
		return fmt.Errorf("it has %d keys and may have %d", len(r.Keys), maxNamedKeys)
	}
	for i, k := range r.Keys {
		if err := checkName(k.Purpose, k.Name); err != nil {
			return fmt.Errorf("keys[%d]: %w", i, err)
		}
		first := i == 0 || r.Keys[i-1].Purpose != k.Purpose || r.Keys[i-1].Name != k.Name
		last := i == len(r.Keys)-1 || r.Keys[i+1].Purpose != k.Purpose || r.Keys[i+1].Name != k.Name
		switch {
		case first && i > 0 && compare(r.Keys[i-1].Info, k.Info) >= 0:
			return fmt.Errorf("keys[%d]: %s %s is out of order", i, k.Purpose, k.Name)
		case first && k.Version < 1, !first && k.Version != r.Keys[i-1].Version+1:
			return fmt.Errorf("keys[%d]: version %d of %s %s is out of order", i, k.Version, k.Purpose, k.Name)
		case last != (k.State == Current) || !last && k.State != Old:
			return fmt.Errorf("keys[%d]: version %d of %s %s is %.20q, but the last version is current and the ones before it are old", i, k.Version, k.Purpose, k.Name, k.State)
		case len(k.Wrapped) != wrappedLen:
			return fmt.Errorf("keys[%d]: version %d of %s %s has %d wrapped bytes and must have %d", i, k.Version, k.Purpose, k.Name, len(k.Wrapped), wrappedLen)
		}
	}
	return nil
}

func isHex(s string, bytes int) bool {
	b, err := hex.DecodeString(s)
	return err == nil && len(b) == bytes && strings.ToLower(s) == s
}

func compare(a, b Info) int {
	if c := strings.Compare(a.Purpose, b.Purpose); c != 0 {
		return c
	}
	if c := strings.Compare(a.Name, b.Name); c != 0 {
		return c
	}
	return a.Version - b.Version
}

// mac authenticates all of r but the MAC itself.
func (r *keyring) mac(kek []byte) ([]byte, error) {
	key, err := derive(kek, "keyring-mac")
	if err != nil {
		return nil, err
	}
	defer clear(key)
	bare := *r
	bare.MAC = nil
	text, err := json.Marshal(bare)
	if err != nil {
		return nil, fmt.Errorf("encode the keyring: %w", err)
	}
	h := hmac.New(sha256.New, key)
	h.Write(text)
	return h.Sum(nil), nil
}

// contents is a keyring that has been opened.
type contents struct {
	id       string
	subjects string
	kek      []byte
	kekID    kekID
	wrapped  wrappedKEK // of kek
	keys     []heldKey  // sorted by purpose, name, version
}

type heldKey struct {
	Info
	secret []byte
}

func kekAD(id, kekID string) []byte { return bind("keyring-key", id, kekID) }

func (c *contents) keyAD(k Info) []byte {
	return bind("named-key", c.id, c.wrapped.ID, k.Purpose, k.Name, strconv.Itoa(k.Version))
}

func newInstallation() string {
	return strings.ToLower(base32.StdEncoding.EncodeToString(random(15)))[:20]
}

// open checks and decrypts a keyring whose key is known.
func (r *keyring) open(kek []byte) (*contents, error) {
	want, err := r.mac(kek)
	if err != nil {
		return nil, err
	}
	if !hmac.Equal(want, r.MAC) {
		return nil, errors.New("it was altered: its MAC is another one's")
	}
	id, err := hex.DecodeString(r.KEK.ID)
	if err != nil {
		return nil, err
	}
	c := &contents{id: r.ID, subjects: r.Subjects, kek: kek, kekID: kekID(id), wrapped: r.KEK}
	for i, k := range r.Keys {
		secret, err := unwrap(kek, k.Wrapped, c.keyAD(k.Info))
		if err != nil {
			return nil, fmt.Errorf("keys[%d]: version %d of %s %s: %w", i, k.Version, k.Purpose, k.Name, err)
		}
		c.keys = append(c.keys, heldKey{k.Info, secret})
	}
	return c, nil
}

// encode is the inverse of parseKeyring and open.
func (c *contents) encode() ([]byte, error) {
	r := keyring{Airlock: "keyring", Format: keyringFormat, ID: c.id, Subjects: c.subjects, KEK: c.wrapped, Keys: []namedKey{}}
	for _, k := range c.keys {
		wrapped, err := wrap(c.kek, k.secret, c.keyAD(k.Info))
		if err != nil {
			return nil, fmt.Errorf("wrap version %d of %s %s: %w", k.Version, k.Purpose, k.Name, err)
		}
		r.Keys = append(r.Keys, namedKey{k.Info, wrapped})
	}
	mac, err := r.mac(c.kek)
	if err != nil {
		return nil, err
	}
	r.MAC = mac
	text, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return nil, fmt.Errorf("encode the keyring: %w", err)
	}
	if err := r.validate(); err != nil {
		return nil, fmt.Errorf("encode the keyring: %w", err)
	}
	return append(text, '\n'), nil
}

// versions returns the place of a key's versions in c.keys.
func (c *contents) versions(purpose, name string) (from, to int) {
	from, _ = slices.BinarySearchFunc(c.keys, Info{Purpose: purpose, Name: name}, func(k heldKey, i Info) int { return compare(k.Info, i) })
	for to = from; to < len(c.keys) && c.keys[to].Purpose == purpose && c.keys[to].Name == name; to++ {
	}
	return from, to
}

// with returns a copy of c that has one more version of a key, now the
// current one.
func (c *contents) with(purpose, name string, secret []byte) (*contents, error) {
	if len(c.keys) >= maxNamedKeys {
		return nil, airlock.Errorf(airlock.Exhausted, "the keyring has %d keys and that is the most", len(c.keys))
	}
	from, to := c.versions(purpose, name)
	k := heldKey{Info{purpose, name, 1, now(), Current}, secret}
	if to > from {
		k.Version = c.keys[to-1].Version + 1
	}
	next := *c
	next.keys = slices.Insert(slices.Clone(c.keys), to, k)
	for i := from; i < to; i++ {
		next.keys[i].State = Old
	}
	return &next, nil
}

func now() time.Time { return time.Now().UTC().Truncate(time.Second) }

// KeyringPath is the file of named keys in a data directory.
func KeyringPath(dataDir string) string { return filepath.Join(dataDir, "keyring.json") }

// Listing is what a keyring says to whoever has no key.
type Listing struct {
	Installation string    `json:"installation"`
	Root         string    `json:"root"`  // the reference of the root key when it last changed
	Since        time.Time `json:"since"` // when that was
	Keys         []Info    `json:"keys"`
}

// List reads the keyring of a data directory without any key, so that nothing
// says yet that it was not altered. A server may be running.
func List(dataDir string) (Listing, error) {
	text, err := readKeyring(KeyringPath(dataDir))
	if err != nil {
		return Listing{}, err
	}
	if text == nil {
		return Listing{}, &airlock.Error{Code: airlock.NotFound, Message: "there is no keyring in " + dataDir, Hint: "`airlock serve` makes one at its first start; name another directory with --data-dir"}
	}
	r, err := parseKeyring(text)
	if err != nil {
		return Listing{}, damagedKeyring(KeyringPath(dataDir), err)
	}
	l := Listing{Installation: r.ID, Root: r.KEK.Root, Since: r.KEK.Created, Keys: []Info{}}
	for _, k := range r.Keys {
		l.Keys = append(l.Keys, k.Info)
	}
	return l, nil
}

// readKeyring returns nil if there is none.
func readKeyring(path string) ([]byte, error) {
	f, err := os.Open(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("open the keyring: %w", err)
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, maxKeyring+1))
	if err != nil {
		return nil, fmt.Errorf("read the keyring: %w", err)
	}
	return text, nil
}

func damagedKeyring(path string, err error) error {
	return &airlock.Error{Code: airlock.Conflict, Message: fmt.Sprintf("the keyring %s cannot be used", path), Hint: "restore it from a backup of the data directory", Err: err}
}
