package keystore

import (
	"bytes"
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"airlock.dev/airlock"
)

// Token is where an AES-256 key is that never leaves its PKCS#11 token. It is
// what a pkcs11: URI (RFC 7512) says; zero fields match anything.
type Token struct {
	Module  string `json:"module"` // absolute path of the PKCS#11 library
	Label   string `json:"label,omitempty"`
	Serial  string `json:"serial,omitempty"`
	Object  string `json:"object,omitempty"`  // the key's label
	ID      []byte `json:"id,omitempty"`      // the key's id
	PINFile string `json:"pinFile,omitempty"` // absolute path of the file with the PIN
}

// TokenRequest is what the airlock-pkcs11 program reads from its standard
// input, as one JSON object of at most MaxTokenMessage bytes.
type TokenRequest struct {
	Op    string `json:"op"` // "wrap" or "unwrap"
	Token Token  `json:"token"`
	Data  []byte `json:"data"` // to wrap: 32 bytes; to unwrap: what wrap returned
	AD    []byte `json:"ad"`
}

// TokenReply is what it answers on its standard output.
type TokenReply struct {
	Data  []byte `json:"data,omitempty"`
	Error string `json:"error,omitempty"`
	// Broken says that the token refused the wrapped bytes themselves.
	Broken bool `json:"broken,omitempty"`
}

// MaxTokenMessage bounds requests and replies.
const MaxTokenMessage = 64 << 10

const (
	maxTokenURI  = 2048
	tokenURIHint = "write pkcs11:token=NAME;object=KEY?module-path=/PATH/OF/MODULE.so&pin-source=file:/PATH/OF/PIN"
)

// parseToken reads the part of RFC 7512 that names one key. What it does not
// know it refuses: an attribute that is passed over could mean another key.
func parseToken(uri string) (Token, error) {
	var t Token
	refuse := func(format string, args ...any) (Token, error) {
		return Token{}, airlock.Invalidf("--root-key", tokenURIHint, "--root-key: the pkcs11: URI "+format, args...)
	}
	rest, ok := strings.CutPrefix(uri, "pkcs11:")
	if !ok || len(uri) > maxTokenURI {
		return refuse("does not begin with pkcs11: or has more than %d bytes", maxTokenURI)
	}
	path, query, _ := strings.Cut(rest, "?")
	seen := map[string]bool{}
	each := func(list, separator string, set func(name, value string) error) error {
		if list == "" {
			return nil
		}
		for _, attribute := range strings.Split(list, separator) {
			name, raw, _ := strings.Cut(attribute, "=")
			value, err := url.PathUnescape(raw)
			switch {
			case err != nil, value == "", strings.ContainsRune(value, 0):
				return fmt.Errorf("has no usable value of %.40q", name)
			case seen[name]:
				return fmt.Errorf("has %.40q twice", name)
			}
			seen[name] = true
			if err := set(name, value); err != nil {
				return err
			}
		}
		return nil
	}
	err := each(path, ";", func(name, value string) error {
		switch name {
		case "token":
			t.Label = value
		case "serial":
			t.Serial = value
		case "object":
			t.Object = value
		case "id":
			t.ID = []byte(value)
		case "type":
			if value != "secret-key" {
				return fmt.Errorf("is of a %.40q, not of a secret-key", value)
			}
		default:
			return fmt.Errorf("has %.40q: only token, serial, object, id and type are known", name)
		}
		return nil
	})
	if err != nil {
		return refuse("%v", err)
	}
	err = each(query, "&", func(name, value string) error {
		switch name {
		case "module-path":
			t.Module = value
		case "pin-source":
			t.PINFile, ok = strings.CutPrefix(value, "file:")
			if !ok || !filepath.IsAbs(t.PINFile) {
				return errors.New("has a pin-source that is not file:/PATH")
			}
			t.PINFile = filepath.Clean(t.PINFile)
		case "pin-value":
			return errors.New("has the PIN in it, where others see it: change the PIN, put it into a file and name that with pin-source")
		default:
			return fmt.Errorf("has %.40q: only module-path and pin-source are known", name)
		}
		return nil
	})
	switch {
	case err != nil:
		return refuse("%v", err)
	case !filepath.IsAbs(t.Module):
		return refuse("has no module-path, or one that is not absolute")
	case t.Label == "" && t.Serial == "":
		return refuse("names no token")
	case t.Object == "" && t.ID == nil:
		return refuse("names no key: give object or id")
	}
	return t, nil
}

// tokenWait bounds what a token may take; some ask a network.
const tokenWait = 30 * time.Second

// tokenRoot is a root key in a token. Only the airlock-pkcs11 program talks
// to tokens, since their modules are C libraries and this binary has none.
type tokenRoot struct {
	uri    string
	token  Token
	helper string
}

func (r *tokenRoot) ref() string   { return r.uri }
func (r *tokenRoot) check() string { return "" }

func (r *tokenRoot) wrap(ctx context.Context, key, ad []byte) ([]byte, error) {
	return r.ask(ctx, TokenRequest{Op: "wrap", Token: r.token, Data: key, AD: ad})
}

func (r *tokenRoot) unwrap(ctx context.Context, wrapped, ad []byte) ([]byte, error) {
	return r.ask(ctx, TokenRequest{Op: "unwrap", Token: r.token, Data: wrapped, AD: ad})
}

// bounded keeps the first bytes written to it and takes the rest for nothing.
type bounded struct {
	buf  bytes.Buffer
	most int
	over bool
}

func (b *bounded) Write(p []byte) (int, error) {
	room := b.most - b.buf.Len()
	b.over = b.over || len(p) > room
	b.buf.Write(p[:min(len(p), room)])
	return len(p), nil
}

func (r *tokenRoot) ask(ctx context.Context, req TokenRequest) ([]byte, error) {
	if _, err := os.Stat(r.helper); err != nil {
		return nil, &airlock.Error{Code: airlock.NotFound, Field: "--root-key", Message: "a root key in a PKCS#11 token needs the program airlock-pkcs11, which is not there", Hint: "build it with `make pkcs11` and put it beside airlock", Err: err}
	}
	text, err := json.Marshal(req)
	if err != nil {
		return nil, fmt.Errorf("encode the request to the token: %w", err)
	}
	defer clear(text)
	ctx, cancel := context.WithTimeout(ctx, tokenWait)
	defer cancel()
	cmd := exec.CommandContext(ctx, r.helper)
	cmd.Stdin = bytes.NewReader(text)
	out, diagnosis := &bounded{most: MaxTokenMessage}, &bounded{most: 4096}
	cmd.Stdout, cmd.Stderr = out, diagnosis
	cmd.WaitDelay = time.Second
	runErr := cmd.Run()
	defer func() { clear(out.buf.Bytes()) }()
	failed := airlock.Errorf(airlock.Unavailable, "the PKCS#11 token did not %s the keyring's key", req.Op)
	var reply TokenReply
	switch err := json.Unmarshal(out.buf.Bytes(), &reply); {
	case ctx.Err() != nil:
		return nil, failed.Because(ctx.Err())
	case out.over || err != nil:
		return nil, failed.Because(errors.Join(fmt.Errorf("%s: %.200q", filepath.Base(r.helper), diagnosis.buf.String()), runErr, err))
	case reply.Broken:
		return nil, errSealBroken
	case reply.Error != "" || runErr != nil:
		return nil, failed.Because(errors.Join(fmt.Errorf("%.500s", reply.Error), runErr))
	case len(reply.Data) == 0 || len(reply.Data) > 1024:
		return nil, failed.Because(fmt.Errorf("it answered %d bytes", len(reply.Data)))
	}
	return reply.Data, nil
}

// String is for errors: no part of it is secret.
func (t Token) String() string {
	name := t.Object
	if name == "" {
		name = "id " + hex.EncodeToString(t.ID)
	}
	return fmt.Sprintf("key %q of token %q", name, t.Label+t.Serial)
}
