package keystore

import (
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"airlock.dev/airlock"
)

// How sealed bytes can be unreadable for good; errors.Is tells them apart. Any
// other error of OpenSealed is of the moment: storage that cannot be read.
var (
	// ErrErased says that the subject's key was erased: so it was meant.
	ErrErased error = airlock.Errorf(airlock.NotFound, "the subject's key was erased")
	// ErrDamaged says that the bytes, or the key, are not what they were.
	ErrDamaged = errors.New("damaged")
)

// MaxSubject is how many bytes a subject's name may have.
const MaxSubject = 256

// Subject is a subject's place in the file of keys.
type Subject = airlock.Subject

// Sealed is a part of a record that only the subject's key opens.
type Sealed = airlock.Sealed

func checkSubject(subject string) error {
	if subject == "" || len(subject) > MaxSubject {
		return airlock.Invalidf("subject", fmt.Sprintf("name it with 1 to %d bytes, such as customer:42", MaxSubject), "a subject of %d bytes has no key", len(subject))
	}
	return nil
}

// Subject returns a subject's place and makes its key if it has none; then it
// is durable before it is returned. A subject has 1 to 256 bytes of any kind.
func (k *Keystore) Subject(ctx context.Context, subject string) (Subject, error) {
	s, _, err := k.use(ctx, subject, true)
	return s, err
}

// FindSubject is Subject for those that have a key; others are NotFound.
func (k *Keystore) FindSubject(ctx context.Context, subject string) (Subject, error) {
	s, _, err := k.use(ctx, subject, false)
	return s, err
}

// SealFor encrypts up to 1 MiB for a subject, with a key that is made if it
// has none. ad is bound to it and must be told again to OpenSealed.
func (k *Keystore) SealFor(ctx context.Context, subject string, plaintext, ad []byte) (Sealed, error) {
	if len(plaintext) > maxSealed || len(ad) > maxSealed {
		return Sealed{}, airlock.Errorf(airlock.TooLarge, "%d bytes are too many to seal: at most %d", max(len(plaintext), len(ad)), maxSealed)
	}
	s, key, err := k.use(ctx, subject, true)
	if err != nil {
		return Sealed{}, err
	}
	defer clear(key)
	nonce, data, err := seal(key, plaintext, sealedAD(s, ad))
	if err != nil {
		return Sealed{}, fmt.Errorf("seal: %w", err)
	}
	return Sealed{Subject: s.Pseudonym, Slot: s.Slot, Nonce: nonce, Data: data}, nil
}

func sealedAD(s Subject, ad []byte) []byte {
	return bind("subject-sealed", s.Slot, s.Pseudonym, string(ad))
}

// OpenSealed returns what was sealed. errors.Is tells ErrErased, which is
// meant, from ErrDamaged, which is not, and both from storage that cannot be
// read at the moment.
func (k *Keystore) OpenSealed(ctx context.Context, s Sealed, ad []byte) ([]byte, error) {
	number, gen, err := parseSlot(s.Slot)
	if err != nil {
		return nil, airlock.Errorf(airlock.Invalid, "a sealed part names no slot: it was altered").Because(errors.Join(ErrDamaged, err))
	}
	k.mu.RLock()
	defer k.mu.RUnlock()
	if err := k.ready(ctx); err != nil {
		return nil, err
	}
	older := airlock.Errorf(airlock.Conflict, "slot %s was never used in this file of subject keys: it is older than the record, or another one's", s.Slot).Because(ErrDamaged)
	if !k.slots.has(number) {
		return nil, older
	}
	v, err := k.slots.read(number)
	switch {
	case err != nil:
		return nil, err
	case v.verdict == slotDamaged, v.verdict == slotForeign:
		return nil, damagedSlot(number, v)
	case v.gen > gen, v.gen == gen && v.verdict == slotErased:
		return nil, airlock.Errorf(airlock.NotFound, "the key of slot %s was erased", s.Slot).Because(ErrErased)
	case v.gen < gen:
		return nil, older
	}
	secret, err := k.openSlot(k.slotKey, number, v.side)
	if err != nil {
		return nil, err
	}
	defer clear(secret)
	plaintext, err := unseal(secret[:keyLen], s.Nonce, s.Data, sealedAD(Subject{Slot: s.Slot, Pseudonym: s.Subject}, ad))
	if errors.Is(err, errSealBroken) {
		return nil, airlock.Errorf(airlock.Conflict, "what was sealed for slot %s was altered, or belongs to another record", s.Slot).Because(ErrDamaged)
	}
	return plaintext, err
}

// Erase destroys a subject's key, its pseudonym's salt and the tag by which
// it was found, and returns what its place was. When it returns without an
// error that is durable, and what was sealed for the subject can be read by
// nobody. A subject that is sealed for afterwards has another key and another
// pseudonym. A subject without a key is NotFound. Whether something holds the
// erasure up is the caller's to know.
func (k *Keystore) Erase(ctx context.Context, subject string) (Subject, error) {
	if err := checkSubject(subject); err != nil {
		return Subject{}, err
	}
	k.mu.RLock()
	defer k.mu.RUnlock()
	if err := k.ready(ctx); err != nil {
		return Subject{}, err
	}
	number, v, found, err := k.slots.erase(k.tag(subject))
	if err != nil {
		return Subject{}, err
	}
	if !found {
		return Subject{}, noSubject()
	}
	place := Subject{Slot: slotText(number, v.gen)}
	// The key is gone; its copy in memory still says which pseudonym it had.
	if secret, err := k.openSlot(k.slotKey, number, v.side); err == nil {
		place.Pseudonym = pseudonym(secret, subject)
		clear(secret)
	}
	return place, nil
}

func noSubject() error {
	return airlock.Errorf(airlock.NotFound, "the subject has no key: nothing was ever sealed for it, or it was erased")
}

// use returns a subject's place and key.
func (k *Keystore) use(ctx context.Context, subject string, create bool) (Subject, []byte, error) {
	if err := checkSubject(subject); err != nil {
		return Subject{}, nil, err
	}
	k.mu.RLock()
	defer k.mu.RUnlock()
	if err := k.ready(ctx); err != nil {
		return Subject{}, nil, err
	}
	tag := k.tag(subject)
	number, v, found, err := k.slots.find(tag)
	switch {
	case err != nil:
		return Subject{}, nil, err
	case !found && !create:
		return Subject{}, nil, noSubject()
	case !found:
		number, v, err = k.slots.create(tag, func(number, gen uint32, v *side) error {
			secret := random(secretLen)
			defer clear(secret)
			return k.sealSlot(k.slotKey, number, v, secret)
		})
		if err != nil {
			return Subject{}, nil, err
		}
	}
	secret, err := k.openSlot(k.slotKey, number, v.side)
	if err != nil {
		return Subject{}, nil, err
	}
	defer clear(secret[keyLen:])
	return Subject{Slot: slotText(number, v.gen), Pseudonym: pseudonym(secret, subject)}, secret[:keyLen], nil
}

// tag is how a subject's slot is found without its name.
func (k *Keystore) tag(subject string) (t tagID) {
	h := hmac.New(sha256.New, k.tagKey)
	h.Write([]byte(subject))
	copy(t[:], h.Sum(nil))
	return t
}

// pseudonym is of a secret's salt and the subject.
func pseudonym(secret []byte, subject string) string {
	h := hmac.New(sha256.New, secret[keyLen:])
	h.Write([]byte(subject))
	return hex.EncodeToString(h.Sum(nil)[:16])
}

func (k *Keystore) slotAD(number uint32, v side) []byte {
	return bind("subject-key", string(k.slots.id[:]), slotText(number, v.gen), string(v.kek[:]), string(v.tag[:]))
}

// sealSlot puts a key and its salt into v, which says everything else.
func (k *Keystore) sealSlot(slotKey []byte, number uint32, v *side, secret []byte) error {
	nonce, data, err := seal(slotKey, secret, k.slotAD(number, *v))
	if err != nil {
		return fmt.Errorf("wrap a subject key: %w", err)
	}
	copy(v.nonce[:], nonce)
	copy(v.secret[:], data)
	return nil
}

func (k *Keystore) openSlot(slotKey []byte, number uint32, v side) ([]byte, error) {
	secret, err := unseal(slotKey, v.nonce[:], v.secret[:], k.slotAD(number, v))
	if errors.Is(err, errSealBroken) {
		return nil, damagedSlot(number, slot{side: v, lost: 0})
	}
	return secret, err
}

func slotText(number, gen uint32) string { return fmt.Sprintf("%d.%d", number, gen) }

// parseSlot takes only what slotText writes.
func parseSlot(s string) (number, gen uint32, err error) {
	a, b, _ := strings.Cut(s, ".")
	n, err1 := strconv.ParseUint(a, 10, 32)
	g, err2 := strconv.ParseUint(b, 10, 32)
	if err1 != nil || err2 != nil || n >= maxSlots || g == 0 || slotText(uint32(n), uint32(g)) != s {
		return 0, 0, fmt.Errorf("%.40q is no slot", s)
	}
	return uint32(n), uint32(g), nil
}
