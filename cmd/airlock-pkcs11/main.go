//go:build cgo

// Command airlock-pkcs11 asks a PKCS#11 token to wrap or unwrap one key, for
// airlock, which has no C in it: a token's module is a C library. It answers
// one request on its standard input, see keystore.TokenRequest, and ends.
// The token's own key never leaves it: one that could is refused.
package main

import (
	"bytes"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/miekg/pkcs11"

	"airlock.dev/airlock/keystore"
)

func main() {
	data, err := serve(os.Stdin)
	reply := keystore.TokenReply{Data: data}
	if err != nil {
		reply = keystore.TokenReply{Error: err.Error(), Broken: errors.Is(err, errBroken)}
	}
	if json.NewEncoder(os.Stdout).Encode(reply) != nil || err != nil {
		os.Exit(1)
	}
}

func serve(r io.Reader) ([]byte, error) {
	text, err := io.ReadAll(io.LimitReader(r, keystore.MaxTokenMessage+1))
	if err != nil {
		return nil, fmt.Errorf("read the request: %w", err)
	}
	if len(text) > keystore.MaxTokenMessage {
		return nil, fmt.Errorf("the request has more than %d bytes", keystore.MaxTokenMessage)
	}
	d := json.NewDecoder(bytes.NewReader(text))
	d.DisallowUnknownFields()
	var req keystore.TokenRequest
	if err := d.Decode(&req); err != nil {
		return nil, fmt.Errorf("decode the request: %w", err)
	}
	if req.Op != "wrap" && req.Op != "unwrap" {
		return nil, fmt.Errorf("%.20q is no operation", req.Op)
	}
	return inSession(req.Token, func(c *pkcs11.Ctx, s pkcs11.SessionHandle) ([]byte, error) {
		key, err := findKey(c, s, req.Token)
		if err != nil {
			return nil, err
		}
		if req.Op == "wrap" {
			return wrap(c, s, key, req.Data, req.AD)
		}
		return unwrap(c, s, key, req.Data, req.AD)
	})
}

// inSession calls fn in a session of the one token that t names.
func inSession(t keystore.Token, fn func(*pkcs11.Ctx, pkcs11.SessionHandle) ([]byte, error)) ([]byte, error) {
	c := pkcs11.New(t.Module)
	if c == nil {
		return nil, fmt.Errorf("the PKCS#11 module %s cannot be loaded", t.Module)
	}
	defer c.Destroy()
	if err := c.Initialize(); err != nil {
		return nil, fmt.Errorf("start the PKCS#11 module %s: %w", t.Module, err)
	}
	defer c.Finalize()
	slots, err := c.GetSlotList(true)
	if err != nil {
		return nil, fmt.Errorf("list the tokens of %s: %w", t.Module, err)
	}
	var found []uint
	for _, slot := range slots {
		info, err := c.GetTokenInfo(slot)
		if err != nil {
			continue // another one's trouble
		}
		if (t.Label == "" || t.Label == info.Label) && (t.Serial == "" || t.Serial == info.SerialNumber) {
			found = append(found, slot)
		}
	}
	if len(found) != 1 {
		return nil, fmt.Errorf("%d tokens of %s are named %q: exactly one must be", len(found), t.Module, t.Label+t.Serial)
	}
	session, err := c.OpenSession(found[0], pkcs11.CKF_SERIAL_SESSION)
	if err != nil {
		return nil, fmt.Errorf("open a session with token %q: %w", t.Label+t.Serial, err)
	}
	defer c.CloseSession(session)
	if t.PINFile != "" {
		pin, err := readPIN(t.PINFile)
		if err != nil {
			return nil, err
		}
		if err := c.Login(session, pkcs11.CKU_USER, pin); err != nil {
			return nil, fmt.Errorf("log in to token %q with the PIN in %s: %w", t.Label+t.Serial, t.PINFile, err)
		}
		defer c.Logout(session)
	}
	return fn(c, session)
}

func readPIN(path string) (string, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", fmt.Errorf("open the PIN: %w", err)
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return "", fmt.Errorf("look at the PIN: %w", err)
	}
	if !info.Mode().IsRegular() || info.Mode().Perm()&0o077 != 0 {
		return "", fmt.Errorf("others can read the PIN: %s has mode %v; chmod 0600 it", path, info.Mode())
	}
	text, err := io.ReadAll(io.LimitReader(f, 1024))
	if err != nil {
		return "", fmt.Errorf("read the PIN: %w", err)
	}
	return string(bytes.TrimRight(text, "\r\n")), nil
}

// findKey returns the one key that t names, if it is fit to be a root.
func findKey(c *pkcs11.Ctx, s pkcs11.SessionHandle, t keystore.Token) (pkcs11.ObjectHandle, error) {
	want := []*pkcs11.Attribute{
		pkcs11.NewAttribute(pkcs11.CKA_CLASS, pkcs11.CKO_SECRET_KEY),
		pkcs11.NewAttribute(pkcs11.CKA_KEY_TYPE, pkcs11.CKK_AES),
	}
	if t.Object != "" {
		want = append(want, pkcs11.NewAttribute(pkcs11.CKA_LABEL, t.Object))
	}
	if t.ID != nil {
		want = append(want, pkcs11.NewAttribute(pkcs11.CKA_ID, t.ID))
	}
	if err := c.FindObjectsInit(s, want); err != nil {
		return 0, fmt.Errorf("look for %v: %w", t, err)
	}
	found, _, err := c.FindObjects(s, 2)
	if err := errors.Join(err, c.FindObjectsFinal(s)); err != nil {
		return 0, fmt.Errorf("look for %v: %w", t, err)
	}
	if len(found) != 1 {
		return 0, fmt.Errorf("there must be exactly one AES %v, and there is none or more: is the PIN given with pin-source?", t)
	}
	is, err := c.GetAttributeValue(s, found[0], []*pkcs11.Attribute{
		pkcs11.NewAttribute(pkcs11.CKA_SENSITIVE, nil),
		pkcs11.NewAttribute(pkcs11.CKA_EXTRACTABLE, nil),
		pkcs11.NewAttribute(pkcs11.CKA_VALUE_LEN, nil),
	})
	if err != nil || len(is) != 3 {
		return 0, fmt.Errorf("look at %v: %w", t, err)
	}
	if !isTrue(is[0].Value) || isTrue(is[1].Value) {
		return 0, fmt.Errorf("%v can leave its token: make one with CKA_SENSITIVE true and CKA_EXTRACTABLE false", t)
	}
	if len(is[2].Value) == 0 || is[2].Value[0] != 32 { // little-endian or big, a length of 32 fits a byte
		if n := len(is[2].Value); n == 0 || is[2].Value[n-1] != 32 {
			return 0, fmt.Errorf("%v is no AES-256 key", t)
		}
	}
	return found[0], nil
}

func isTrue(b []byte) bool { return len(b) == 1 && b[0] != 0 }

// What is wrapped is a nonce of GCM and the key encrypted. Few keys are ever
// wrapped by one root: random nonces cannot repeat.
const (
	nonceLen = 12
	tagBits  = 128
)

var errBroken = errors.New("the token refuses the wrapped key: it was altered, or another key wrapped it")

func wrap(c *pkcs11.Ctx, s pkcs11.SessionHandle, key pkcs11.ObjectHandle, data, ad []byte) ([]byte, error) {
	nonce := make([]byte, nonceLen)
	rand.Read(nonce) // never fails
	params := pkcs11.NewGCMParams(nonce, ad, tagBits)
	defer params.Free()
	if err := c.EncryptInit(s, []*pkcs11.Mechanism{pkcs11.NewMechanism(pkcs11.CKM_AES_GCM, params)}, key); err != nil {
		return nil, fmt.Errorf("begin to wrap: %w", err)
	}
	wrapped, err := c.Encrypt(s, data)
	if err != nil {
		return nil, fmt.Errorf("wrap: %w", err)
	}
	if iv := params.IV(); !bytes.Equal(iv, nonce) { // some tokens choose their own
		if len(iv) != nonceLen {
			return nil, fmt.Errorf("the token made a nonce of %d bytes, not %d", len(iv), nonceLen)
		}
		nonce = iv
	}
	return append(nonce, wrapped...), nil
}

func unwrap(c *pkcs11.Ctx, s pkcs11.SessionHandle, key pkcs11.ObjectHandle, data, ad []byte) ([]byte, error) {
	if len(data) <= nonceLen {
		return nil, errBroken
	}
	params := pkcs11.NewGCMParams(data[:nonceLen], ad, tagBits)
	defer params.Free()
	if err := c.DecryptInit(s, []*pkcs11.Mechanism{pkcs11.NewMechanism(pkcs11.CKM_AES_GCM, params)}, key); err != nil {
		return nil, fmt.Errorf("begin to unwrap: %w", err)
	}
	plain, err := c.Decrypt(s, data[nonceLen:])
	var code pkcs11.Error
	if errors.As(err, &code) {
		switch code {
		case pkcs11.CKR_ENCRYPTED_DATA_INVALID, pkcs11.CKR_ENCRYPTED_DATA_LEN_RANGE, pkcs11.CKR_GENERAL_ERROR:
			return nil, fmt.Errorf("%w (%w)", errBroken, err) // SoftHSM says the last one
		}
	}
	if err != nil {
		return nil, fmt.Errorf("unwrap: %w", err)
	}
	return plain, nil
}
