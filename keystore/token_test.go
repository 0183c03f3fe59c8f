package keystore

import (
	"context"
	"errors"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"airlock.dev/airlock"
)

func TestParseToken(t *testing.T) {
	for uri, want := range map[string]Token{
		"pkcs11:token=hsm;object=root?module-path=/lib/p.so":                               {Module: "/lib/p.so", Label: "hsm", Object: "root"},
		"pkcs11:object=root;token=hsm;type=secret-key?module-path=/lib/p.so":               {Module: "/lib/p.so", Label: "hsm", Object: "root"},
		"pkcs11:serial=12ab;id=%01%ff?pin-source=file:/run/pin&module-path=/lib/p.so":      {Module: "/lib/p.so", Serial: "12ab", ID: []byte{1, 0xff}, PINFile: "/run/pin"},
		"pkcs11:token=The%20token;object=a%3bb+c?module-path=/lib/p.so&pin-source=file:/p": {Module: "/lib/p.so", Label: "The token", Object: "a;b+c", PINFile: "/p"},
	} {
		got, err := parseToken(uri)
		if err != nil || cmp.Diff(want, got) != "" {
			t.Errorf("%s: %+v, %v", uri, got, err)
		}
	}
	const module = "?module-path=/lib/p.so"
	for uri, says := range map[string]string{
		"":                            "does not begin",
		"pkcs12:token=a;object=b":     "does not begin",
		"pkcs11:":                     "no module-path",
		"pkcs11:token=a;object=b":     "no module-path",
		"pkcs11:object=b" + module:    "names no token",
		"pkcs11:token=a" + module:     "names no key",
		"pkcs11:token=;object=b":      "no usable value",
		"pkcs11:token;object=b":       "no usable value",
		"pkcs11:token=%zz;object=b":   "no usable value",
		"pkcs11:token=%00;object=b":   "no usable value",
		"pkcs11:token=a;token=b":      "twice",
		"pkcs11:token=a;;object=b":    "no usable value",
		"pkcs11:token=a;x-vendor=b":   "only token, serial",
		"pkcs11:token=a;type=private": "not of a secret-key",
		"pkcs11:token=a;object=b?pin-value=1234&module-path=/p":             "has the PIN in it",
		"pkcs11:token=a;object=b?pin-source=|/bin/sh&module-path=/p":        "not file:/PATH",
		"pkcs11:token=a;object=b?pin-source=file:pin&module-path=/p":        "not file:/PATH",
		"pkcs11:token=a;object=b?module-path=p.so":                          "not absolute",
		"pkcs11:token=a;object=b?module-name=p":                             "only module-path",
		"pkcs11:token=a;object=b;id=" + strings.Repeat("%00", 700) + module: "more than",
	} {
		_, err := parseToken(uri)
		if airlock.CodeOf(err) != airlock.Invalid || !strings.Contains(err.Error(), says) || strings.Contains(err.Error(), "1234") {
			t.Errorf("%.60s: %v, want %q", uri, err, says)
		}
	}
}

func FuzzParseToken(f *testing.F) {
	f.Add("pkcs11:token=The%20token;object=a%3bb+c?module-path=/lib/p.so&pin-source=file:/p")
	f.Add("pkcs11:serial=12ab;id=%01%ff?pin-source=file:/run/pin&module-path=/lib/p.so")
	f.Add("pkcs11:?&;=")
	f.Fuzz(func(t *testing.T, uri string) {
		got, err := parseToken(uri)
		if err != nil {
			return
		}
		if !filepath.IsAbs(got.Module) || got.PINFile != "" && !filepath.IsAbs(got.PINFile) || got.Label+got.Serial == "" || got.Object == "" && len(got.ID) == 0 {
			t.Fatalf("%q is taken as %+v", uri, got)
		}
		// Written again, it means the same.
		again := "pkcs11:type=secret-key"
		for _, a := range [][2]string{{";token=", got.Label}, {";serial=", got.Serial}, {";object=", got.Object}, {";id=", string(got.ID)}, {"?module-path=", got.Module}} {
			if a[1] != "" {
				again += a[0] + strings.ReplaceAll(url.QueryEscape(a[1]), "+", "%20")
			}
		}
		if got.PINFile != "" {
			again += "&pin-source=file:" + url.PathEscape(got.PINFile)
		}
		if len(again) > maxTokenURI {
			return
		}
		if twin, err := parseToken(again); err != nil || cmp.Diff(got, twin) != "" {
			t.Fatalf("%q and %q: %v, %+v, %+v", uri, again, err, got, twin)
		}
	})
}

// Whatever a helper does, the server says why it cannot start.
func TestTokenHelper(t *testing.T) {
	dir := t.TempDir()
	for name, c := range map[string]struct {
		script string
		says   string
	}{
		"garbage": {"echo nonsense", "did not wrap"},
		"nothing": {"exit 3", "exit status 3"},
		"refusal": {`echo '{"error":"no such token"}'; exit 1`, "no such token"},
		"much":    {"head -c 200000 /dev/zero; cat >/dev/null", "did not wrap"},
		"empty":   {"echo '{}'", "answered 0 bytes"},
		"stderr":  {"echo library missing >&2; exit 127", "library missing"},
	} {
		helper := filepath.Join(dir, name)
		if err := os.WriteFile(helper, []byte("#!/bin/sh\n"+c.script+"\n"), 0o700); err != nil {
			t.Fatal(err)
		}
		r := &tokenRoot{uri: "pkcs11:", helper: helper}
		if got, err := r.wrap(t.Context(), make([]byte, 32), nil); airlock.CodeOf(err) != airlock.Unavailable || !strings.Contains(err.Error(), c.says) || got != nil {
			t.Errorf("%s: %q, %v", name, got, err)
		}
	}
	r := &tokenRoot{uri: "pkcs11:", helper: filepath.Join(dir, "none")}
	if _, err := r.wrap(t.Context(), make([]byte, 32), nil); airlock.CodeOf(err) != airlock.NotFound || !strings.Contains(err.Error(), "make pkcs11") {
		t.Errorf("no helper: %v", err)
	}
	hang := filepath.Join(dir, "hang")
	if err := os.WriteFile(hang, []byte("#!/bin/sh\nexec sleep 1000\n"), 0o700); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	r.helper = hang
	if _, err := r.wrap(ctx, make([]byte, 32), nil); !errors.Is(err, ctx.Err()) {
		t.Errorf("one that hangs: %v", err)
	}
}
