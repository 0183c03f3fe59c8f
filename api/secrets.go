package api

import (
	"context"
	"fmt"
	"net/http"

	"airlock.dev/airlock"
	"airlock.dev/airlock/audit"
	"airlock.dev/airlock/gateway/inject"
	"airlock.dev/airlock/secrets"
)

// Secrets is what the api asks of the teams' secrets. It opens none.
type Secrets interface {
	Set(ctx context.Context, team, name string, scope inject.Scope, value, by string) (secrets.Secret, error)
	Rotate(ctx context.Context, team, name, value, by string) (secrets.Secret, error)
	List(ctx context.Context, team, after string, limit int) ([]secrets.Secret, error)
	Remove(ctx context.Context, team, name string) error
}

// setSecret makes a secret or replaces one.
func (s *server) setSecret(w http.ResponseWriter, r *request) error {
	var body struct {
		Team string `json:"team"`
		inject.Scope
		Value string `json:"value"`
	}
	if err := readJSON(w, r, &body); err != nil {
		return err
	}
	if err := body.Scope.Validate(); err != nil { // it is recorded
		return err
	}
	call := asked(r, "secret:set", "Secret", r.PathValue("name"))
	call.Context = map[string]any{"scope": body.Scope.String(), "upgrade": body.Upgrade}
	secret, err := s.secretAct(r, audit.Event{Type: "secret.set", Team: body.Team, Call: call}, func(team, name string) (secrets.Secret, error) {
		return s.Secrets.Set(r.Context(), team, name, body.Scope, body.Value, r.caller.KeyID)
	})
	if err != nil {
		return err
	}
	status := http.StatusOK
	if secret.Version == 1 {
		status = http.StatusCreated
	}
	writeJSON(w, status, secret)
	return nil
}

func (s *server) rotateSecret(w http.ResponseWriter, r *request) error {
	var body struct {
		Team  string `json:"team"`
		Value string `json:"value"`
	}
	if err := readJSON(w, r, &body); err != nil {
		return err
	}
	call := asked(r, "secret:rotate", "Secret", r.PathValue("name"))
	secret, err := s.secretAct(r, audit.Event{Type: "secret.rotate", Team: body.Team, Call: call}, func(team, name string) (secrets.Secret, error) {
		return s.Secrets.Rotate(r.Context(), team, name, body.Value, r.caller.KeyID)
	})
	if err != nil {
		return err
	}
	writeJSON(w, http.StatusOK, secret)
	return nil
}

func (s *server) removeSecret(w http.ResponseWriter, r *request) error {
	query := r.URL.Query()
	if err := only(query, "team"); err != nil {
		return err
	}
	call := asked(r, "secret:remove", "Secret", r.PathValue("name"))
	_, err := s.secretAct(r, audit.Event{Type: "secret.remove", Team: query.Get("team"), Call: call}, func(team, name string) (secrets.Secret, error) {
		return secrets.Secret{}, s.Secrets.Remove(r.Context(), team, name)
	})
	if err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

// secretAct records an act on a secret, does it, and records what came of it.
// The team is the caller's own unless e has another one.
func (s *server) secretAct(r *request, e audit.Event, act func(team, name string) (secrets.Secret, error)) (secrets.Secret, error) {
	if e.Team == "" {
		e.Team = r.caller.Team
	}
	team, name := e.Team, r.PathValue("name")
	if err := secrets.Check(team, name); err != nil {
		return secrets.Secret{}, err
	}
	e.Actor = actorOf(r.caller)
	receipt, err := s.Trail.Append(r.Context(), e)
	if err != nil {
		return secrets.Secret{}, err
	}
	secret, err := act(team, name)
	if err == nil {
		// What was changed holds for sandboxes that run, too.
		err = s.Sandboxes.SecretChanged(r.Context(), team, name)
	}
	o := audit.Outcome{Status: "ok"}
	switch {
	case err != nil:
		o = audit.Outcome{Status: "error", Code: string(airlock.CodeOf(err))}
	case secret.Version > 0:
		o.Message = fmt.Sprintf("version %d", secret.Version)
	}
	seq := receipt.Seq()
	s.Trail.Owe(r.Context(), audit.Event{Type: "secret.end", Team: team, Actor: e.Actor, Of: &seq, Outcome: o})
	if err == nil {
		s.Log.InfoContext(r.Context(), "secret changed", "act", e.Type, "secret", name, "team", team, "by", r.caller.KeyID)
	}
	return secret, err
}

// listSecrets answers what is known of secrets; auditors see those of their team.
func (s *server) listSecrets(w http.ResponseWriter, r *request) error {
	query := r.URL.Query()
	if err := only(query, "team", "limit", "nextToken"); err != nil {
		return err
	}
	limit, err := limitOf(query, maxPage)
	if err != nil {
		return err
	}
	team := query.Get("team")
	if r.caller.Role != airlock.Operator {
		if team != "" && team != r.caller.Team {
			return airlock.Errorf(airlock.Denied, "this API key is of team %s, and sees its secrets only", r.caller.Team)
		}
		team = r.caller.Team
	}
	page, err := s.Secrets.List(r.Context(), team, query.Get("nextToken"), limit)
	if err != nil {
		return err
	}
	if len(page) == limit { // perhaps the last; then the next page is empty
		w.Header().Set("X-Next-Token", page[limit-1].Cursor())
	}
	writeJSON(w, http.StatusOK, page)
	return nil
}
