package keystore

import (
	"crypto/aes"
	"crypto/cipher"
	"crypto/hkdf"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
)

// Everything here is encrypted in one way: AES-256-GCM under a key for this
// message alone, HKDF-SHA256 of the long-lived key. Of the 24 random bytes of
// a nonce the first 12 choose the message's key and the last 12 are GCM's own
// nonce, so that there is no number of messages at which one might repeat.
const (
	keyLen   = 32
	saltLen  = 12
	nonceLen = saltLen + 12
	tagLen   = 16
)

// errSealBroken says that sealed bytes are not what was sealed: other bytes,
// another key, or another place than the one they were sealed for.
var errSealBroken = errors.New("the seal is broken: altered, or sealed with another key or for another place")

// derive returns a key of its own for one use of a key.
func derive(key []byte, use string) ([]byte, error) {
	return hkdf.Key(sha256.New, key, nil, "airlock/"+use+"/v1", keyLen)
}

func messageCipher(key, nonce []byte) (cipher.AEAD, error) {
	message, err := hkdf.Key(sha256.New, key, nonce[:saltLen], "airlock/message/v1", keyLen)
	if err != nil {
		return nil, fmt.Errorf("derive the key of a message: %w", err)
	}
	defer clear(message)
	block, err := aes.NewCipher(message)
	if err != nil {
		return nil, fmt.Errorf("use the key of a message: %w", err)
	}
	return cipher.NewGCM(block)
}

// seal returns a nonce and plaintext encrypted, tagLen bytes longer. ad is
// bound to it and not part of it.
func seal(key, plaintext, ad []byte) (nonce, data []byte, err error) {
	nonce = make([]byte, nonceLen)
	rand.Read(nonce) // never fails
	aead, err := messageCipher(key, nonce)
	if err != nil {
		return nil, nil, err
	}
	return nonce, aead.Seal(nil, nonce[saltLen:], plaintext, ad), nil
}

// unseal is seal's inverse, or errSealBroken.
func unseal(key, nonce, data, ad []byte) ([]byte, error) {
	if len(nonce) != nonceLen || len(data) < tagLen {
		return nil, errSealBroken
	}
	aead, err := messageCipher(key, nonce)
	if err != nil {
		return nil, err
	}
	plaintext, err := aead.Open(nil, nonce[saltLen:], data, ad)
	if err != nil {
		return nil, errSealBroken
	}
	return plaintext, nil
}

// wrap is seal with the nonce in front of the data.
func wrap(key, plaintext, ad []byte) ([]byte, error) {
	nonce, data, err := seal(key, plaintext, ad)
	return append(nonce, data...), err
}

func unwrap(key, wrapped, ad []byte) ([]byte, error) {
	if len(wrapped) < nonceLen {
		return nil, errSealBroken
	}
	return unseal(key, wrapped[:nonceLen], wrapped[nonceLen:], ad)
}

// bind encodes what sealed bytes belong to, without ambiguity.
func bind(use string, parts ...string) []byte {
	var ad []byte
	for _, p := range append([]string{"airlock/" + use + "/v1"}, parts...) {
		ad = binary.AppendUvarint(ad, uint64(len(p)))
		ad = append(ad, p...)
	}
	return ad
}

func random(n int) []byte {
	b := make([]byte, n)
	rand.Read(b) // never fails
	return b
}
