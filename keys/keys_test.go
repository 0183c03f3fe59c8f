package keys_test

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"airlock.dev/airlock"
	"airlock.dev/airlock/cluster"
	"airlock.dev/airlock/keys"
	"github.com/google/go-cmp/cmp"
)

func open(t *testing.T) (*cluster.Bolt, *keys.Keys) {
	t.Helper()
	store, err := cluster.OpenBolt(filepath.Join(t.TempDir(), "state.db"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { store.Close() })
	return store, keys.New(store)
}

func TestLifeOfAKey(t *testing.T) {
	store, k := open(t)
	secret, key, err := keys.Create(t.Context(), store, "red", airlock.Client, "laptop", "carol")
	if err != nil {
		t.Fatal(err)
	}
	if !regexp.MustCompile(`^e2b_[0-9a-f]{40}$`).MatchString(secret) || !keys.Looks(secret) || keys.Looks(secret[1:]) || keys.Looks(secret+"0") {
		t.Errorf("secret = %q", secret)
	}
	p, err := k.Authenticate(t.Context(), secret)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(airlock.Principal{Team: "red", Role: airlock.Client, KeyID: key.ID, Name: "laptop", Owner: "carol"}, p); diff != "" {
		t.Errorf("principal (-want +got):\n%s", diff)
	}
	list, err := k.List(t.Context(), "", 10)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]keys.Key{key}, list); diff != "" {
		t.Errorf("list (-want +got):\n%s", diff)
	}
	if err := k.Revoke(t.Context(), key.ID); err != nil {
		t.Fatal(err)
	}
	if _, err := k.Authenticate(t.Context(), secret); airlock.CodeOf(err) != airlock.Unauthenticated {
		t.Errorf("after revoke: %v", err)
	}
	if err := k.Revoke(t.Context(), key.ID); airlock.CodeOf(err) != airlock.NotFound {
		t.Errorf("second revoke: %v", err)
	}
}

func TestTheStoreHoldsNoSecret(t *testing.T) {
	store, k := open(t)
	secret, _, err := k.Create(t.Context(), "red", airlock.Auditor, "", "")
	if err != nil {
		t.Fatal(err)
	}
	pairs, err := store.Range(t.Context(), "", "", 10)
	if err != nil || len(pairs) != 1 {
		t.Fatalf("pairs = %q, %v", pairs, err)
	}
	sum := sha256.Sum256([]byte(secret))
	if want := "key/" + hex.EncodeToString(sum[:]); pairs[0].Key != want {
		t.Errorf("key = %s, want %s", pairs[0].Key, want)
	}
	if strings.Contains(string(pairs[0].Value), secret[4:]) {
		t.Errorf("the value holds the secret: %s", pairs[0].Value)
	}
}

func TestWrongSecrets(t *testing.T) {
	_, k := open(t)
	secret, key, err := k.Create(t.Context(), "red", airlock.Client, "", "")
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range []string{"", "e2b_", secret[:len(secret)-1], secret + "0", strings.ToUpper(secret), " " + secret, key.ID, strings.Repeat("x", 1<<16)} {
		p, err := k.Authenticate(t.Context(), s)
		if airlock.CodeOf(err) != airlock.Unauthenticated || p != (airlock.Principal{}) {
			t.Errorf("authenticate %.50q = %v, %v", s, p, err)
		}
	}
}

func TestRefusals(t *testing.T) {
	_, k := open(t)
	for _, c := range []struct {
		team, role, name, field string
	}{
		{"", "client", "", "team"},
		{"-a", "client", "", "team"},
		{"Red", "client", "", "team"},
		{"a/b", "client", "", "team"},
		{"a\n", "client", "", "team"},
		{strings.Repeat("a", 40), "client", "", "team"},
		{"red", "root", "", "role"},
		{"red", "", "", "role"},
		{"red", "client", "a\nb", "name"},
		{"red", "client", "\xff", "name"},
		{"red", "client", strings.Repeat("é", 101), "name"},
	} {
		_, _, err := k.Create(t.Context(), c.team, airlock.Role(c.role), c.name, "")
		if e, ok := err.(*airlock.Error); !ok || e.Code != airlock.Invalid || e.Field != c.field {
			t.Errorf("create %q %q %q: %v, want an error of %s", c.team, c.role, c.name, err, c.field)
		}
	}
	for _, team := range []string{"a", "0", "a-", strings.Repeat("a", 39)} {
		if _, _, err := k.Create(t.Context(), team, airlock.Client, strings.Repeat("é", 100), ""); err != nil {
			t.Errorf("create for team %q: %v", team, err)
		}
	}
	for _, id := range []string{"", "key/", "0", strings.Repeat("0", 16), strings.Repeat("0", 64)} {
		if err := k.Revoke(t.Context(), id); airlock.CodeOf(err) != airlock.NotFound {
			t.Errorf("revoke %q: %v", id, err)
		}
	}
	for _, limit := range []int{0, -1, 1001} {
		if _, err := k.List(t.Context(), "", limit); airlock.CodeOf(err) != airlock.Invalid {
			t.Errorf("list with limit %d: %v", limit, err)
		}
	}
	if _, err := k.List(t.Context(), "zz", 1); airlock.CodeOf(err) != airlock.Invalid {
		t.Errorf("list after zz: %v", err)
	}
}

func TestListPages(t *testing.T) {
	_, k := open(t)
	want := map[string]bool{}
	for i := range 25 {
		_, key, err := k.Create(t.Context(), "red", airlock.Client, fmt.Sprint(i), "")
		if err != nil {
			t.Fatal(err)
		}
		want[key.ID] = true
	}
	got := map[string]bool{}
	pages := 0
	for after := ""; ; pages++ {
		page, err := k.List(t.Context(), after, 10)
		if err != nil {
			t.Fatal(err)
		}
		if len(page) == 0 {
			break
		}
		for _, key := range page {
			if got[key.ID] || key.ID <= after {
				t.Errorf("key %s is out of order", key.ID)
			}
			got[key.ID] = true
		}
		after = page[len(page)-1].ID
	}
	if diff := cmp.Diff(want, got); diff != "" || pages != 3 {
		t.Errorf("%d pages, keys (-want +got):\n%s", pages, diff)
	}
}
