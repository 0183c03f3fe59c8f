package api_test

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"airlock.dev/airlock"
	"airlock.dev/airlock/audit/index"
	"airlock.dev/airlock/client"
)

const crm = `{"host":"crm.example","methods":["GET"],"path":"/v1/{rest...}","place":{"header":"Authorization","prefix":"Bearer "},`

func TestSecrets(t *testing.T) {
	w := newWorld(t)
	c, err := client.New(client.Options{URL: w.url, APIKey: w.operator})
	if err != nil {
		t.Fatal(err)
	}
	scope := client.SecretScope{Host: "crm.example", Methods: []string{"GET"}, Path: "/v1/{rest...}", Place: client.SecretPlace{Header: "Authorization", Prefix: "Bearer "}}
	made, err := c.SetSecret(t.Context(), "", "crm", scope, "hush-one")
	if err != nil {
		t.Fatal(err)
	}
	rotated, err := c.RotateSecret(t.Context(), "red", "crm", "hush-two")
	if err != nil {
		t.Fatal(err)
	}
	want := client.Secret{
		Team: "red", Name: "crm", Version: 2, SecretScope: scope,
		CreatedAt: made.CreatedAt, CreatedBy: made.CreatedBy, UpdatedAt: rotated.UpdatedAt, UpdatedBy: made.CreatedBy,
	}
	if diff := cmp.Diff(want, rotated); diff != "" || made.Version != 1 || made.CreatedBy == "" {
		t.Errorf("made %+v, then %s", made, diff)
	}
	if _, err := c.SetSecret(t.Context(), "blue", "other", scope, "hush-three"); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		w.as(w.operator, "PUT", "/v1/secrets/crm", crm+`"value":"hush-four"}`)
	}
	all, err := c.ListSecrets(t.Context(), "")
	if err != nil || len(all) != 2 || all[0].Name != "other" || all[1].Version != 4 {
		t.Errorf("all are %+v, %v", all, err)
	}
	if first := w.as(w.operator, "GET", "/v1/secrets?limit=1", ""); first.header.Get("X-Next-Token") != "blue/other" {
		t.Errorf("the first page: %s %s", first.header, first.body)
	}
	r := w.as(w.auditor, "GET", "/v1/secrets", "")
	if r.status != 200 || !strings.Contains(r.body, `"crm"`) || strings.Contains(r.body, `"other"`) {
		t.Errorf("an auditor sees %d %s", r.status, r.body)
	}
	if err := c.RemoveSecret(t.Context(), "red", "crm"); err != nil {
		t.Fatal(err)
	}
	if err := c.RemoveSecret(t.Context(), "red", "crm"); airlock.CodeOf(err) != airlock.NotFound {
		t.Errorf("removed twice: %v", err)
	}
	if err := w.trail.CatchUp(t.Context()); err != nil {
		t.Fatal(err)
	}
	found, err := w.trail.Find(t.Context(), index.Query{Match: []index.Match{{Field: "type", Any: []string{"secret.*"}}}}, index.Page{Limit: 100})
	if err != nil {
		t.Fatal(err)
	}
	var types []string
	for _, raw := range found.Events {
		var e struct {
			Type, Team string
			Outcome    struct{ Status, Code, Message string }
		}
		if err := json.Unmarshal(raw, &e); err != nil {
			t.Fatal(err)
		}
		types = append(types, strings.Join(strings.Fields(fmt.Sprint(e.Type, " ", e.Team, " ", e.Outcome.Status, " ", e.Outcome.Code, " ", e.Outcome.Message)), " "))
		if strings.Contains(string(raw), "hush") {
			t.Errorf("the trail has a value: %s", raw)
		}
	}
	wanted := []string{
		"secret.set red", "secret.end red ok version 1", "secret.rotate red", "secret.end red ok version 2",
		"secret.set blue", "secret.end blue ok version 1", "secret.set red", "secret.end red ok version 3", "secret.set red", "secret.end red ok version 4",
		"secret.remove red", "secret.end red ok", "secret.remove red", "secret.end red error not_found",
	}
	if diff := cmp.Diff(wanted, types); diff != "" {
		t.Error(diff)
	}
	if strings.Contains(w.log.String(), "hush") {
		t.Errorf("the server's log has a value: %s", w.log)
	}
}

func TestSecretsRefused(t *testing.T) {
	w := newWorld(t)
	for _, c := range []struct {
		key, method, path, body string
		status                  int
		says                    string
	}{
		{w.client, "GET", "/v1/secrets", "", 403, "permission_denied"},
		{w.client, "PUT", "/v1/secrets/x", crm + `"value":"hush"}`, 403, "permission_denied"},
		{w.auditor, "PUT", "/v1/secrets/x", crm + `"value":"hush"}`, 403, "permission_denied"},
		{w.auditor, "POST", "/v1/secrets/x/rotate", `{"value":"hush"}`, 403, "permission_denied"},
		{w.auditor, "DELETE", "/v1/secrets/x", "", 403, "permission_denied"},
		{w.auditor, "GET", "/v1/secrets?team=blue", "", 403, "of team red"},
		{w.operator, "GET", "/v1/secrets?tema=blue", "", 400, "tema"},
		{w.operator, "GET", "/v1/secrets?nextToken=x", "", 400, "nextToken"},
		{w.operator, "PUT", "/v1/secrets/x%2Fy", crm + `"value":"hush"}`, 400, `"field":"name"`},
		{w.operator, "PUT", "/v1/secrets/x", crm + `"team":"Red","value":"hush"}`, 400, `"field":"team"`},
		{w.operator, "PUT", "/v1/secrets/x", `{"value":"hush"}`, 400, `"field":"host"`},
		{w.operator, "PUT", "/v1/secrets/x", crm + `"value":""}`, 400, `"field":"value"`},
		{w.operator, "PUT", "/v1/secrets/x", crm + `"value":"hush\r\nX: y"}`, 400, `"field":"value"`},
		{w.operator, "PUT", "/v1/secrets/x", crm + `"value":["hush"]}`, 400, "a string is expected"},
		{w.operator, "POST", "/v1/secrets/x/rotate", `{"value":"hush"}`, 404, "airlock secret list"},
		{w.operator, "GET", "/v1/secrets/x", "", 404, ""},
	} {
		r := w.as(c.key, c.method, c.path, c.body)
		if r.status != c.status || !strings.Contains(r.body, c.says) {
			t.Errorf("%s %s %s: %d %s", c.method, c.path, c.body, r.status, r.body)
		}
		if strings.Contains(r.body, "hush") {
			t.Errorf("the value comes back: %s", r.body)
		}
	}
	if strings.Contains(w.log.String(), "hush") {
		t.Errorf("the server's log has a value: %s", w.log)
	}
}
