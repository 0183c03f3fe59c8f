package api

import (
	"net/http"

	"airlock.dev/airlock"
	"airlock.dev/airlock/audit"
	"airlock.dev/airlock/keys"
)

func (s *server) createKey(w http.ResponseWriter, r *request) error {
	var body struct {
		Team  string       `json:"team"`
		Role  airlock.Role `json:"role"`
		Name  string       `json:"name"`
		Owner string       `json:"owner"`
	}
	if err := readJSON(w, r, &body); err != nil {
		return err
	}
	receipt, err := s.Trail.Append(r.Context(), audit.Event{Type: "key.create", Team: body.Team, Actor: actorOf(r.caller), Call: asked(r, "key:create", "Role", string(body.Role))})
	if err != nil {
		return err
	}
	secret, key, err := s.Keys.Create(r.Context(), body.Team, body.Role, body.Name, body.Owner)
	s.keyDone(r, receipt, body.Team, key.ID, err)
	if err != nil {
		return err
	}
	s.Log.InfoContext(r.Context(), "key created", "key", key.ID, "team", key.Team, "role", key.Role, "by", r.caller.KeyID)
	writeJSON(w, http.StatusCreated, struct {
		keys.Key
		Secret string `json:"key"` // this once
	}{key, secret})
	return nil
}

func (s *server) listKeys(w http.ResponseWriter, r *request) error {
	query := r.URL.Query()
	limit, err := limitOf(query, maxPage)
	if err != nil {
		return err
	}
	page, err := s.Keys.List(r.Context(), query.Get("nextToken"), limit)
	if err != nil {
		return err
	}
	if len(page) == limit { // perhaps the last; then the next page is empty
		w.Header().Set("X-Next-Token", page[limit-1].ID)
	}
	writeJSON(w, http.StatusOK, page)
	return nil
}

// keyDone tells the trail what came of an act on a key.
func (s *server) keyDone(r *request, of audit.Receipt, team, id string, err error) {
	o := audit.Outcome{Status: "ok", Message: id}
	if err != nil {
		o = audit.Outcome{Status: "error", Code: string(airlock.CodeOf(err)), Message: id}
	}
	seq := of.Seq()
	s.Trail.Owe(r.Context(), audit.Event{Type: "key.end", Team: team, Actor: actorOf(r.caller), Of: &seq, Outcome: o})
}

func (s *server) revokeKey(w http.ResponseWriter, r *request) error {
	id := r.PathValue("id")
	receipt, err := s.Trail.Append(r.Context(), audit.Event{Type: "key.revoke", Actor: actorOf(r.caller), Call: asked(r, "key:revoke", "Key", id)})
	if err != nil {
		return err
	}
	err = s.Keys.Revoke(r.Context(), id)
	s.keyDone(r, receipt, "", id, err)
	if err != nil {
		return err
	}
	s.Log.InfoContext(r.Context(), "key revoked", "key", r.PathValue("id"), "by", r.caller.KeyID)
	w.WriteHeader(http.StatusNoContent)
	return nil
}
