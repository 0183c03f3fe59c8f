package secrets_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"

	"airlock.dev/airlock"
	"airlock.dev/airlock/cluster"
	"airlock.dev/airlock/gateway/inject"
	"airlock.dev/airlock/keystore"
	"airlock.dev/airlock/secrets"
)

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// open returns secrets in a real store, sealed by a real key store.
func open(t *testing.T) (*cluster.Bolt, *secrets.Secrets, string) {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "data")
	must(t, os.Mkdir(dir, 0o700))
	keep, err := keystore.Open(t.Context(), keystore.Config{DataDir: dir})
	must(t, err)
	file := filepath.Join(dir, "state.db")
	store, err := cluster.OpenBolt(file)
	must(t, err)
	t.Cleanup(func() { store.Close(); keep.Close() })
	return store, secrets.New(store, keep), file
}

func scope() inject.Scope {
	return inject.Scope{Host: "api.example", Methods: []string{"GET"}, Path: "/v1/{rest...}", Place: inject.Place{Header: "Authorization", Prefix: "<&>"}}
}

// value returns what the gateway would send.
func value(t *testing.T, s *secrets.Secrets, team, name string) string {
	t.Helper()
	got, err := s.Get(t.Context(), team, []string{name})
	must(t, err)
	return got[0].Injected(inject.NewPlaceholder(name)).Value
}

func TestLifeOfASecret(t *testing.T) {
	_, s, file := open(t)
	made, err := s.Set(t.Context(), "red", "CRM_KEY", scope(), "first-value", "k1")
	must(t, err)
	if made.Version != 1 || made.CreatedBy != "k1" || made.UpdatedBy != "k1" || made.CreatedAt.IsZero() {
		t.Errorf("made is %+v", made.Version)
	}
	rotated, err := s.Rotate(t.Context(), "red", "CRM_KEY", "second-value", "k2")
	must(t, err)
	want := made
	want.Version, want.UpdatedBy, want.UpdatedAt = 2, "k2", rotated.UpdatedAt
	if diff := cmp.Diff(want, rotated); diff != "" {
		t.Error(diff)
	}
	if got := value(t, s, "red", "CRM_KEY"); got != "second-value" {
		t.Errorf("the value is %q", got)
	}
	elsewhere := scope()
	elsewhere.Host, elsewhere.Port = "other.example", 443
	replaced, err := s.Set(t.Context(), "red", "CRM_KEY", elsewhere, "third-value", "k3")
	must(t, err)
	if replaced.Version != 3 || replaced.Host != "other.example" || replaced.Port != 0 || replaced.CreatedBy != "k1" {
		t.Errorf("replaced is %+v of %s", replaced.Scope, replaced.CreatedBy)
	}
	opened, err := s.Get(t.Context(), "red", []string{"CRM_KEY"})
	must(t, err)
	injected := opened[0].Injected(inject.NewPlaceholder("CRM_KEY"))
	must(t, injected.Validate())
	for _, shown := range []string{fmt.Sprint(opened), fmt.Sprintf("%+v", opened[0]), jsonOf(t, opened), jsonOf(t, replaced)} {
		if strings.Contains(shown, "third-value") {
			t.Errorf("the value is shown: %s", shown)
		}
	}
	must(t, s.Remove(t.Context(), "red", "CRM_KEY"))
	if _, err := s.Get(t.Context(), "red", []string{"CRM_KEY"}); airlock.CodeOf(err) != airlock.NotFound {
		t.Errorf("a removed secret: %v", err)
	}
	stored, err := os.ReadFile(file)
	must(t, err)
	for _, v := range []string{"first-value", "second-value", "third-value"} {
		if strings.Contains(string(stored), v) {
			t.Errorf("%s is in the store's file", v)
		}
	}
}

func jsonOf(t *testing.T, v any) string {
	t.Helper()
	text, err := json.Marshal(v)
	must(t, err)
	return string(text)
}

func TestRefusals(t *testing.T) {
	_, s, _ := open(t)
	_, err := s.Set(t.Context(), "red", "known", scope(), "value", "k")
	must(t, err)
	set := func(team, name, value string, change func(*inject.Scope)) func() error {
		return func() error {
			c := scope()
			if change != nil {
				change(&c)
			}
			_, err := s.Set(t.Context(), team, name, c, value, "k")
			return err
		}
	}
	rotate := func(team, name, value string) func() error {
		return func() error { _, err := s.Rotate(t.Context(), team, name, value, "k"); return err }
	}
	for what, c := range map[string]struct {
		do    func() error
		code  airlock.Code
		field string
	}{
		"a team that is none":       {set("Red Team", "x", "value", nil), airlock.Invalid, "team"},
		"a team with a slash":       {set("red/x", "x", "value", nil), airlock.Invalid, "team"},
		"a name with a slash":       {set("red", "x/y", "value", nil), airlock.Invalid, "name"},
		"no name":                   {set("red", "", "value", nil), airlock.Invalid, "name"},
		"a wildcard":                {set("red", "x", "value", func(c *inject.Scope) { c.Host = "*" }), airlock.Invalid, "host"},
		"no method":                 {set("red", "x", "value", func(c *inject.Scope) { c.Methods = nil }), airlock.Invalid, "methods"},
		"no value":                  {set("red", "x", "", nil), airlock.Invalid, "value"},
		"a value of two lines":      {set("red", "x", "hush\r\nX: y", nil), airlock.Invalid, "value"},
		"a value that is too long":  {set("red", "x", strings.Repeat("hush", 8193), nil), airlock.Invalid, "value"},
		"a rotation of none":        {rotate("red", "unknown", "value"), airlock.NotFound, "name"},
		"a rotation of another's":   {rotate("blue", "known", "value"), airlock.NotFound, "name"},
		"a rotation to a line":      {rotate("red", "known", "hush\n"), airlock.Invalid, "value"},
		"removing none":             {func() error { return s.Remove(t.Context(), "red", "unknown") }, airlock.NotFound, "name"},
		"opening none":              {func() error { _, err := s.Get(t.Context(), "red", []string{"known", "unknown"}); return err }, airlock.NotFound, "name"},
		"opening another's":         {func() error { _, err := s.Get(t.Context(), "blue", []string{"known"}); return err }, airlock.NotFound, "name"},
		"a page of none":            {func() error { _, err := s.List(t.Context(), "red", "", 0); return err }, airlock.Invalid, "limit"},
		"a page behind no secret":   {func() error { _, err := s.List(t.Context(), "red", "x", 1); return err }, airlock.Invalid, "nextToken"},
		"a page of a team's prefix": {func() error { _, err := s.List(t.Context(), "red/", "", 1); return err }, airlock.Invalid, "team"},
	} {
		err := c.do()
		e, ok := errors.AsType[*airlock.Error](err)
		if !ok || e.Code != c.code || e.Field != c.field || e.Hint == "" {
			t.Errorf("%s: %v", what, err)
		}
		if err != nil && strings.Contains(err.Error(), "hush") {
			t.Errorf("%s: the error has the value: %v", what, err)
		}
	}
	if got := value(t, s, "red", "known"); got != "value" {
		t.Errorf("what was refused changed the value to %q", got)
	}
}

func TestList(t *testing.T) {
	_, s, _ := open(t)
	for _, at := range []string{"red/b", "blue/z", "red/a", "red-2/a", "red/c"} {
		team, name, _ := strings.Cut(at, "/")
		_, err := s.Set(t.Context(), team, name, scope(), "v-"+name, "k")
		must(t, err)
	}
	for _, c := range []struct {
		team  string
		limit int
		want  string
	}{
		{"", 10, "blue/z red-2/a red/a red/b red/c"}, {"", 2, "blue/z red-2/a red/a red/b red/c"},
		{"red", 1, "red/a red/b red/c"}, {"blue", 10, "blue/z"}, {"none", 10, ""},
	} {
		var got []string
		for after := ""; ; {
			page, err := s.List(t.Context(), c.team, after, c.limit)
			must(t, err)
			for _, one := range page {
				got = append(got, one.Cursor())
				after = one.Cursor()
			}
			if len(page) < c.limit {
				break
			}
		}
		if strings.Join(got, " ") != c.want {
			t.Errorf("of %q by %d: %s, not %s", c.team, c.limit, got, c.want)
		}
	}
}

// Whoever can write to the store, but has no root key, cannot send a value
// somewhere else: what is said of it is sealed with it.
func TestAlteredRecords(t *testing.T) {
	store, s, _ := open(t)
	_, err := s.Set(t.Context(), "red", "a", scope(), "value-a", "k")
	must(t, err)
	_, err = s.Set(t.Context(), "red", "b", scope(), "value-b", "k")
	must(t, err)
	a, err := store.Get(t.Context(), "secret/red/a")
	must(t, err)
	b, err := store.Get(t.Context(), "secret/red/b")
	must(t, err)
	var ra, rb struct {
		About  json.RawMessage `json:"about"`
		Sealed []byte          `json:"sealed"`
	}
	must(t, json.Unmarshal(a, &ra))
	must(t, json.Unmarshal(b, &rb))
	mixed := ra
	mixed.Sealed = rb.Sealed
	for what, text := range map[string]string{
		"another host":     strings.Replace(string(a), "api.example", "bad.example", 1),
		"another version":  strings.Replace(string(a), `"version":1`, `"version":2`, 1),
		"another's value":  jsonOf(t, mixed),
		"another's record": string(b),
		"nothing sealed":   `{"about":` + string(ra.About) + `}`,
		"no JSON":          "x",
	} {
		if text == string(a) {
			t.Fatalf("%s: nothing was altered", what)
		}
		must(t, store.Update(t.Context(), func(tx cluster.Tx) error { return tx.Put("secret/red/a", []byte(text)) }))
		if got, err := s.Get(t.Context(), "red", []string{"a"}); err == nil {
			t.Errorf("%s: opened %v", what, got)
		}
	}
	must(t, store.Update(t.Context(), func(tx cluster.Tx) error { return tx.Put("secret/red/a", a) }))
	if got := value(t, s, "red", "a"); got != "value-a" {
		t.Errorf("the record as it was opens %q", got)
	}
}

// failing fails as a disk or a key store may.
type failing struct {
	cluster.Store
	err error
}

func (f failing) Update(context.Context, func(cluster.Tx) error) error { return f.err }

func TestFailures(t *testing.T) {
	store, good, _ := open(t)
	_, err := good.Set(t.Context(), "red", "a", scope(), "before", "k")
	must(t, err)
	broken := errors.New("no space")
	bad := secrets.New(failing{store, broken}, noSealer{})
	if _, err := bad.Rotate(t.Context(), "red", "a", "hush", "k"); !errors.Is(err, errSealer) || strings.Contains(err.Error(), "hush") {
		t.Errorf("without a key store: %v", err)
	}
	if got := value(t, good, "red", "a"); got != "before" {
		t.Errorf("a failed rotation left %q", got)
	}
	if err := bad.Remove(t.Context(), "red", "a"); !errors.Is(err, broken) {
		t.Errorf("without a store: %v", err)
	}
}

var errSealer = errors.New("no keys")

type noSealer struct{}

func (noSealer) Seal(context.Context, string, []byte, []byte) ([]byte, error) { return nil, errSealer }
func (noSealer) Unseal(context.Context, string, []byte, []byte) ([]byte, error) {
	return nil, errSealer
}

// Of changes at the same time each counts or is refused.
func TestConcurrentRotations(t *testing.T) {
	_, s, _ := open(t)
	_, err := s.Set(t.Context(), "red", "a", scope(), "v", "k")
	must(t, err)
	var all sync.WaitGroup
	var mu sync.Mutex
	done := map[int]bool{}
	for i := range 8 {
		all.Go(func() {
			got, err := s.Rotate(t.Context(), "red", "a", fmt.Sprintf("v%d", i), "k")
			mu.Lock()
			defer mu.Unlock()
			switch {
			case err == nil && done[got.Version]:
				t.Errorf("version %d was given twice", got.Version)
			case err == nil:
				done[got.Version] = true
			case airlock.CodeOf(err) != airlock.Conflict:
				t.Error(err)
			}
		})
	}
	all.Wait()
	list, err := s.List(t.Context(), "red", "", 1)
	must(t, err)
	if list[0].Version != 1+len(done) {
		t.Errorf("version %d after %d rotations", list[0].Version, len(done))
	}
}
