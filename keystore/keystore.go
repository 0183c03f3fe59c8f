// Package keystore keeps keys: a root key, outside the data directory, wraps
// all others. Named keys (for signing, for sealing files) are in the keyring,
// a file in the data directory. The keys of subjects, one for each, by which
// what is recorded of them is encrypted, are in a file of fixed slots beside
// the root key: there one can be erased, and what it sealed is gone wherever
// it was copied to. docs/KEYS.md says what each is for and how it is kept.
//
// It knows nothing of what it encrypts, of audit events, of policies or of
// HTTP; whether a subject may be erased is its caller's to know. Start reading
// at Open, then slots.go.
package keystore

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync"

	"golang.org/x/sys/unix"

	"airlock.dev/airlock"
)

// Config says where keys are.
type Config struct {
	// Root is the reference of the root key: file:/PATH or a path,
	// systemd:NAME, or a pkcs11: URI. "" is the file root.key in KeysDir,
	// which is made at the first start; any other must exist.
	Root    string
	DataDir string // has the keyring; made if it is not there
	KeysDir string // has the subject keys, outside DataDir; "" is DataDir with .keys behind its name
	// TokenHelper is the airlock-pkcs11 program, for roots of that kind.
	TokenHelper string

	step func(string) // told of each step of a change, in tests
}

// DefaultKeysDir is beside the data directory, so that a backup of the one
// does not have the other.
func DefaultKeysDir(dataDir string) string { return filepath.Clean(dataDir) + ".keys" }

// The purposes of the keystore's own keys.
const (
	purposeSigning  = "signing"
	purposeSealing  = "sealing"
	purposeSubjects = "subjects"
)

// Keystore is the open keys of one installation. Its methods may be called
// concurrently. What they return is the caller's own copy.
type Keystore struct {
	cfg   Config
	lock  *os.File
	slots *slots

	// mu is held for reading while keys are used, and for writing while they
	// are changed.
	mu      sync.RWMutex
	root    root
	c       *contents
	closed  bool
	slotKey []byte // of c.kek, wraps subject keys
	tagKey  []byte // makes tags of subjects

	problems []string
	damages  []Damage
	damaged  int
}

// Open opens the keys, or makes them at the first start. One process can have
// them open at a time; Open waits some seconds for another one to end.
// It refuses with a coded error, and changes nothing, where a key is missing,
// is another one, or can be read by others.
func Open(ctx context.Context, cfg Config) (_ *Keystore, err error) {
	if cfg.step == nil {
		cfg.step = func(string) {}
	}
	if cfg.DataDir, err = filepath.Abs(cfg.DataDir); err != nil {
		return nil, fmt.Errorf("find the data directory: %w", err)
	}
	if cfg.KeysDir == "" {
		cfg.KeysDir = DefaultKeysDir(cfg.DataDir)
	}
	if cfg.KeysDir, err = filepath.Abs(cfg.KeysDir); err != nil {
		return nil, fmt.Errorf("find the directory of keys: %w", err)
	}
	ref := reference{"file", filepath.Join(cfg.KeysDir, "root.key")}
	byDefault := cfg.Root == ""
	if !byDefault {
		if ref, err = parseReference(cfg.Root); err != nil {
			return nil, err
		}
	}
	if err := os.MkdirAll(cfg.DataDir, 0o700); err != nil {
		return nil, fmt.Errorf("make the data directory: %w", err)
	}
	if err := prepareKeysDir(cfg); err != nil {
		return nil, err
	}
	k := &Keystore{cfg: cfg}
	if k.lock, err = lock(ctx, filepath.Join(cfg.KeysDir, "lock")); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			k.release()
		}
	}()
	text, err := readKeyring(KeyringPath(cfg.DataDir))
	if err != nil {
		return nil, err
	}
	if text == nil {
		err = k.begin(ctx, ref, byDefault)
	} else {
		err = k.resume(ctx, ref, text)
	}
	if err != nil {
		return nil, err
	}
	// Halves that a crash left; the keyring's may be the one before this.
	for _, half := range []string{KeyringPath(cfg.DataDir), filepath.Join(cfg.KeysDir, "root.key"), k.slotsPath()} {
		if err := shred(half + ".new"); err != nil {
			return nil, err
		}
	}
	if err := k.prepare(ctx); err != nil {
		return nil, err
	}
	k.lookAtStorage()
	return k, nil
}

func prepareKeysDir(cfg Config) error {
	if err := privateDir(cfg.KeysDir); err != nil {
		return err
	}
	dir, err := os.Open(cfg.KeysDir)
	if err != nil {
		return fmt.Errorf("open the directory of keys: %w", err)
	}
	defer dir.Close()
	in, err := inside(dir, cfg.DataDir)
	if err != nil {
		return fmt.Errorf("find out where %s is: %w", cfg.KeysDir, err)
	}
	if in {
		return airlock.Invalidf("--keys-dir", "choose one elsewhere: erased keys would live on in backups of the data directory", "the directory of keys %s is inside the data directory %s", cfg.KeysDir, cfg.DataDir)
	}
	return nil
}

func (k *Keystore) slotsPath() string { return filepath.Join(k.cfg.KeysDir, "subjects") }

// begin is the first start.
func (k *Keystore) begin(ctx context.Context, ref reference, byDefault bool) error {
	have, err := exists(k.slotsPath())
	if err != nil {
		return fmt.Errorf("look for the subject keys: %w", err)
	}
	if !have {
		if err := createSlots(k.slotsPath()); err != nil {
			return err
		}
	}
	k.c = &contents{id: newInstallation(), kek: random(keyLen), kekID: kekID(random(kekIDLen))}
	used, err := k.openSlots()
	if err != nil {
		if have && airlock.CodeOf(err) == airlock.Conflict {
			return k.orphans(err)
		}
		return err
	}
	if used > 0 {
		return k.orphans(nil)
	}
	k.c.subjects = idText(k.slots.id[:])
	if there, err := exists(ref.arg); byDefault && err == nil && !there {
		k.cfg.step("create root")
		if err := createRoot(ref.arg); err != nil {
			return err
		}
	}
	if k.root, err = openRoot(ref, k.cfg.DataDir, k.cfg.TokenHelper); err != nil {
		if errors.Is(err, fs.ErrNotExist) && ref.kind == "file" {
			return airlock.Invalidf("--root-key", fmt.Sprintf("make it once: (umask 077; head -c 32 /dev/urandom | base64 > %s)", ref.arg), "there is no root key %s", ref.arg)
		}
		return err
	}
	if err := k.c.wrapKEK(ctx, k.root); err != nil {
		return err
	}
	k.cfg.step("create keyring")
	return k.save(k.c)
}

func (k *Keystore) orphans(err error) error {
	return &airlock.Error{Code: airlock.Conflict, Message: fmt.Sprintf("%s has subject keys, but the keyring %s that opens them is missing", k.slotsPath(), KeyringPath(k.cfg.DataDir)),
		Hint: fmt.Sprintf("restore the keyring from a backup of the data directory, or move %s away to begin anew", k.cfg.KeysDir), Err: err}
}

// wrapKEK puts c under another root key.
func (c *contents) wrapKEK(ctx context.Context, r root) error {
	id := hex.EncodeToString(c.kekID[:])
	wrapped, err := r.wrap(ctx, c.kek, kekAD(c.id, id))
	if err != nil {
		return fmt.Errorf("wrap the keyring's key: %w", err)
	}
	c.wrapped = wrappedKEK{ID: id, Created: now(), Root: r.ref(), Check: r.check(), Wrapped: wrapped}
	return nil
}

// resume is every start but the first.
func (k *Keystore) resume(ctx context.Context, ref reference, text []byte) error {
	path := KeyringPath(k.cfg.DataDir)
	ring, err := parseKeyring(text)
	if err != nil {
		return damagedKeyring(path, err)
	}
	elsewhere := ""
	if ring.KEK.Root != ref.String() {
		elsewhere = fmt.Sprintf("; it was wrapped with %s: give that with --root-key", ring.KEK.Root)
	}
	if k.root, err = openRoot(ref, k.cfg.DataDir, k.cfg.TokenHelper); err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			return &airlock.Error{Code: airlock.Conflict, Field: "--root-key", Message: fmt.Sprintf("the root key %s is missing, and a new one cannot open the keyring %s%s", ref, path, elsewhere),
				Hint: fmt.Sprintf("restore %s from its backup", ring.KEK.Root), Err: err}
		}
		return err
	}
	wrong := &airlock.Error{Code: airlock.Conflict, Field: "--root-key", Message: fmt.Sprintf("the root key %s does not open the keyring %s%s", ref, path, elsewhere),
		Hint: "restore the root key and the keyring that belong together"}
	check := k.root.check()
	if check != ring.KEK.Check {
		return wrong
	}
	kek, err := k.root.unwrap(ctx, ring.KEK.Wrapped, kekAD(ring.ID, ring.KEK.ID))
	switch {
	case errors.Is(err, errSealBroken) && check != "":
		return damagedKeyring(path, fmt.Errorf("kek.wrapped: %w", err))
	case errors.Is(err, errSealBroken):
		return wrong.Because(err)
	case err != nil:
		return fmt.Errorf("unwrap the keyring's key: %w", err)
	case len(kek) != keyLen:
		return damagedKeyring(path, fmt.Errorf("the keyring's key has %d bytes", len(kek)))
	}
	if k.c, err = ring.open(kek); err != nil {
		return damagedKeyring(path, err)
	}
	have, err := exists(k.slotsPath())
	if err != nil {
		return fmt.Errorf("look for the subject keys: %w", err)
	}
	if !have {
		return &airlock.Error{Code: airlock.Conflict, Field: "--keys-dir", Message: fmt.Sprintf("the file of subject keys %s is missing", k.slotsPath()),
			Hint: "name its directory with --keys-dir, or restore it from the backup of the keys directory"}
	}
	_, err = k.openSlots()
	return err
}

// openSlots opens the subject keys for the keyring k.c.
func (k *Keystore) openSlots() (used int, err error) {
	f, id, size, err := openSlotFile(k.slotsPath())
	if err != nil {
		return 0, err
	}
	if k.c.subjects != "" && idText(id[:]) != k.c.subjects {
		f.Close()
		return 0, &airlock.Error{Code: airlock.Conflict, Field: "--keys-dir", Message: fmt.Sprintf("%s belongs to another keyring than %s", k.slotsPath(), KeyringPath(k.cfg.DataDir)),
			Hint: "name the right directory with --keys-dir, or restore both from backups of one installation"}
	}
	k.slots = &slots{file: syncedFile{f}, id: id, kek: k.c.kekID, step: k.cfg.step}
	used, k.damages, k.damaged, err = k.slots.scan(size)
	return used, err
}

// prepare derives what the use of keys needs.
func (k *Keystore) prepare(ctx context.Context) (err error) {
	if k.slotKey, err = derive(k.c.kek, "subject-keys"); err != nil {
		return fmt.Errorf("derive the key of subject keys: %w", err)
	}
	tags, err := k.Key(ctx, purposeSubjects, "tags")
	k.tagKey = tags.Secret
	return err
}

// lookAtStorage remembers what keeps an erased key where it was overwritten.
func (k *Keystore) lookAtStorage() {
	for _, d := range k.damages {
		k.problems = append(k.problems, d.String())
	}
	if more := k.damaged - len(k.damages); more > 0 {
		k.problems = append(k.problems, fmt.Sprintf("and %d more slots are damaged", more))
	}
	var st unix.Statfs_t
	if unix.Statfs(k.cfg.KeysDir, &st) != nil {
		return
	}
	switch uint32(st.Type) {
	case unix.BTRFS_SUPER_MAGIC, 0x2fc12fc1, 0xca451a4e: // btrfs, zfs, bcachefs
		k.problems = append(k.problems, k.cfg.KeysDir+" is on a copy-on-write file system, which keeps erased keys in old blocks and snapshots: put it on ext4 or xfs")
	case unix.TMPFS_MAGIC, unix.RAMFS_MAGIC:
		k.problems = append(k.problems, k.cfg.KeysDir+" is in memory: its keys are lost when the machine restarts")
	}
}

// Problems says what the operator should know of the keys: damaged slots, at
// most 100 of them, and storage that is not fit for them.
func (k *Keystore) Problems() []string { return k.problems }

// Installation is the id of this installation: 20 characters of [a-z2-7],
// random, made at its first start.
func (k *Keystore) Installation() string {
	k.mu.RLock()
	defer k.mu.RUnlock()
	return k.c.id
}

// Close forgets all keys and lets others open them.
func (k *Keystore) Close() error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.closed {
		return nil
	}
	k.closed = true
	return k.release()
}

func (k *Keystore) release() error {
	var err error
	if k.slots != nil {
		err = k.slots.file.Close()
	}
	if k.c != nil {
		k.c.forget()
	}
	forgetRoot(k.root)
	clear(k.slotKey)
	clear(k.tagKey)
	return errors.Join(err, k.lock.Close())
}

func forgetRoot(r root) {
	if r, ok := r.(*fileRoot); ok && r != nil {
		clear(r.key)
	}
}

func (c *contents) forget() {
	clear(c.kek)
	for _, key := range c.keys {
		clear(key.secret)
	}
}

var errClosed = airlock.Errorf(airlock.Unavailable, "the keys are closed")

// ready is the first thing that a method with a context does.
func (k *Keystore) ready(ctx context.Context) error {
	if k.closed {
		return errClosed
	}
	return ctx.Err()
}

// save makes c durable.
func (k *Keystore) save(c *contents) error {
	text, err := c.encode()
	if err != nil {
		return err
	}
	return replace(KeyringPath(k.cfg.DataDir), text, k.cfg.step)
}

// Key is a version of a named key with its 32 random bytes.
type Key struct {
	Info
	Secret []byte
}

func (h heldKey) copy() Key { return Key{h.Info, bytes.Clone(h.secret)} }

// Key returns the current version of a key and makes the first one if there
// is none; it is durable before it is returned. A purpose has 1 to 32 of
// [a-z0-9-], a name 1 to 100 of [A-Za-z0-9._/-].
func (k *Keystore) Key(ctx context.Context, purpose, name string) (Key, error) {
	if err := checkName(purpose, name); err != nil {
		return Key{}, err
	}
	if key, err := k.current(ctx, purpose, name); err != nil || key.Secret != nil {
		return key, err
	}
	return k.add(ctx, purpose, name, false)
}

// current returns a Key without a Secret if there is none.
func (k *Keystore) current(ctx context.Context, purpose, name string) (Key, error) {
	k.mu.RLock()
	defer k.mu.RUnlock()
	if err := k.ready(ctx); err != nil {
		return Key{}, err
	}
	if from, to := k.c.versions(purpose, name); to > from {
		return k.c.keys[to-1].copy(), nil
	}
	return Key{}, nil
}

// add makes the next version of a key, or the first one only.
func (k *Keystore) add(ctx context.Context, purpose, name string, another bool) (Key, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if err := k.ready(ctx); err != nil {
		return Key{}, err
	}
	from, to := k.c.versions(purpose, name)
	if to > from && !another { // someone was faster
		return k.c.keys[to-1].copy(), nil
	}
	next, err := k.c.with(purpose, name, random(keyLen))
	if err != nil {
		return Key{}, err
	}
	if err := k.save(next); err != nil {
		return Key{}, fmt.Errorf("add a version of the key %s %s: %w", purpose, name, err)
	}
	k.c = next
	_, to = k.c.versions(purpose, name)
	return k.c.keys[to-1].copy(), nil
}

// Keys returns all versions of a key, the current one last; none if it was
// never used.
func (k *Keystore) Keys(ctx context.Context, purpose, name string) ([]Key, error) {
	if err := checkName(purpose, name); err != nil {
		return nil, err
	}
	k.mu.RLock()
	defer k.mu.RUnlock()
	if err := k.ready(ctx); err != nil {
		return nil, err
	}
	var keys []Key
	from, to := k.c.versions(purpose, name)
	for _, key := range k.c.keys[from:to] {
		keys = append(keys, key.copy())
	}
	return keys, nil
}

// Rotate makes a new version of a key that has been used. The ones before it
// stay, to open what they sealed.
func (k *Keystore) Rotate(ctx context.Context, purpose, name string) (Info, error) {
	if err := checkName(purpose, name); err != nil {
		return Info{}, err
	}
	if purpose == purposeSubjects {
		return Info{}, airlock.Invalidf("purpose", "erase subjects one by one, or change the root key, which wraps their keys anew", "the key by which subjects are found cannot be rotated")
	}
	if key, err := k.current(ctx, purpose, name); err != nil {
		return Info{}, err
	} else if key.Secret == nil {
		return Info{}, &airlock.Error{Code: airlock.NotFound, Message: fmt.Sprintf("there is no key %s %s", purpose, name), Hint: "`airlock keystore list` shows them"}
	}
	key, err := k.add(ctx, purpose, name, true)
	clear(key.Secret)
	return key.Info, err
}

// SigningKey returns the current key that signs logs, and its version.
func (k *Keystore) SigningKey(ctx context.Context) (ed25519.PrivateKey, int, error) {
	key, err := k.Key(ctx, purposeSigning, "log")
	if err != nil {
		return nil, 0, err
	}
	defer clear(key.Secret)
	return ed25519.NewKeyFromSeed(key.Secret), key.Version, nil
}

// SigningKeys returns all versions of it, the current one last.
func (k *Keystore) SigningKeys(ctx context.Context) ([]ed25519.PrivateKey, error) {
	if _, _, err := k.SigningKey(ctx); err != nil { // there is one now
		return nil, err
	}
	keys, err := k.Keys(ctx, purposeSigning, "log")
	if err != nil {
		return nil, err
	}
	out := make([]ed25519.PrivateKey, len(keys))
	for i, key := range keys {
		out[i] = ed25519.NewKeyFromSeed(key.Secret)
		clear(key.Secret)
	}
	return out, nil
}

// maxSealed bounds what is sealed at one time.
const maxSealed = 1 << 20

// Sealed bytes begin with the form and the key's version.
const (
	sealedForm   = 1
	sealedHeader = 1 + 4
)

// Seal encrypts up to 1 MiB, such as another key in a file, with the current
// key that is called name. ad says what it is; Unseal must be told the same.
func (k *Keystore) Seal(ctx context.Context, name string, plaintext, ad []byte) ([]byte, error) {
	if len(plaintext) > maxSealed || len(ad) > maxSealed {
		return nil, airlock.Errorf(airlock.TooLarge, "%d bytes are too many to seal: at most %d", max(len(plaintext), len(ad)), maxSealed)
	}
	key, err := k.Key(ctx, purposeSealing, name)
	if err != nil {
		return nil, err
	}
	defer clear(key.Secret)
	sealed := binary.BigEndian.AppendUint32([]byte{sealedForm}, uint32(key.Version))
	data, err := wrap(key.Secret, plaintext, bind("sealed", name, string(sealed), string(ad)))
	if err != nil {
		return nil, fmt.Errorf("seal: %w", err)
	}
	return append(sealed, data...), nil
}

// Unseal returns what was sealed. Bytes that were altered, or sealed by
// another installation, under another name or with another ad, are ErrDamaged.
func (k *Keystore) Unseal(ctx context.Context, name string, sealed, ad []byte) ([]byte, error) {
	broken := airlock.Errorf(airlock.Conflict, "what was sealed as %s was altered, or was sealed by another installation", name).Because(ErrDamaged)
	if len(sealed) < sealedHeader+nonceLen+tagLen || len(sealed) > 2*maxSealed || sealed[0] != sealedForm {
		return nil, broken
	}
	version := int64(binary.BigEndian.Uint32(sealed[1:]))
	keys, err := k.Keys(ctx, purposeSealing, name)
	if err != nil {
		return nil, err
	}
	for _, key := range keys {
		defer clear(key.Secret)
		if int64(key.Version) != version {
			continue
		}
		plaintext, err := unwrap(key.Secret, sealed[sealedHeader:], bind("sealed", name, string(sealed[:sealedHeader]), string(ad)))
		if errors.Is(err, errSealBroken) {
			break
		}
		return plaintext, err
	}
	return nil, broken
}

// RotateRoot puts everything under the root key that ref names; a file: that
// does not exist is made. All that is wrapped is wrapped anew, with a new key
// of the keyring, so that the old root key opens nothing that is on the disk.
// A process that is killed meanwhile leaves everything to the old root key, or
// everything to the new one. Other methods wait until it is done.
func (k *Keystore) RotateRoot(ctx context.Context, ref string) (err error) {
	parsed, err := parseReference(ref)
	if err != nil {
		return err
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if err := k.ready(ctx); err != nil {
		return err
	}
	if parsed.kind == "file" {
		if there, err := exists(parsed.arg); err != nil {
			return fmt.Errorf("look for the new root key: %w", err)
		} else if !there {
			if err := createRoot(parsed.arg); err != nil {
				return err
			}
		}
	}
	to, err := openRoot(parsed, k.cfg.DataDir, k.cfg.TokenHelper)
	if err != nil {
		return fmt.Errorf("open the new root key: %w", err)
	}
	old := k.c
	if _, err := to.unwrap(ctx, old.wrapped.Wrapped, kekAD(old.id, old.wrapped.ID)); err == nil {
		return airlock.Invalidf("--to", "name another root key", "%s is the root key already", parsed)
	}
	next := *old
	next.kek, next.kekID = random(keyLen), kekID(random(kekIDLen))
	if err := next.wrapKEK(ctx, to); err != nil {
		return err
	}
	slotKey, err := derive(next.kek, "subject-keys")
	if err != nil {
		return fmt.Errorf("derive the key of subject keys: %w", err)
	}
	err = k.slots.rewrap(next.kekID, func(number uint32, v side) (side, error) {
		if err := ctx.Err(); err != nil {
			return side{}, err
		}
		secret, err := k.openSlot(k.slotKey, number, v)
		if err != nil {
			return side{}, err
		}
		defer clear(secret)
		v.kek = next.kekID
		err = k.sealSlot(slotKey, number, &v, secret)
		return v, err
	})
	if err == nil {
		k.cfg.step("commit keyring")
		err = k.save(&next)
	}
	if err != nil {
		// Whether the keyring on the disk is the new one is read, not guessed.
		text, readErr := readKeyring(KeyringPath(k.cfg.DataDir))
		if readErr != nil {
			return errors.Join(err, k.slots.fail("learn which root key holds", readErr))
		}
		if !bytes.Contains(text, []byte(next.wrapped.ID)) {
			return errors.Join(err, k.slots.commit(old.kekID))
		}
	}
	k.cfg.step("committed")
	forgetRoot(k.root)
	clear(old.kek)
	clear(k.slotKey)
	k.root, k.c, k.slotKey = to, &next, slotKey
	return errors.Join(err, k.slots.commit(next.kekID))
}
