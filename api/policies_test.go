package api_test

import (
	"encoding/json"
	"testing"

	"github.com/google/go-cmp/cmp"

	"airlock.dev/airlock/client"
	"airlock.dev/airlock/policy"
)

func TestPoliciesInForce(t *testing.T) {
	w := newWorld(t)
	r := w.as(w.operator, "GET", "/v1/policies?team=red", "")
	var got client.PoliciesInForce
	if err := json.Unmarshal([]byte(r.body), &got); err != nil || r.status != 200 {
		t.Fatalf("%d %s", r.status, r.body)
	}
	standard := policy.Builtin().For("red")
	want := client.PoliciesInForce{
		Team: "red", Name: "profile internet", Digest: standard.Digest(), Text: standard.Text(), Source: "built in", Loaded: standard.Digest(),
		Files: []client.Digest{}, Ceilings: []client.Digest{{Name: "profile internet", SHA256: standard.Digest()}},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	if r := w.as(w.client, "GET", "/v1/policies", ""); r.status != 403 {
		t.Errorf("a client: %d", r.status)
	}
	if r := w.as(w.operator, "POST", "/v1/policies/reload", "{}"); r.status != 409 {
		t.Errorf("without a directory: %d %s", r.status, r.body)
	}
}
