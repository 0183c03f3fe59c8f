package api

import (
	"net/http"

	"airlock.dev/airlock"
	"airlock.dev/airlock/keys"
)

func (s *server) createKey(w http.ResponseWriter, r *request) error {
	var body struct {
		Team string       `json:"team"`
		Role airlock.Role `json:"role"`
		Name string       `json:"name"`
	}
	if err := readJSON(w, r, &body); err != nil {
		return err
	}
	secret, key, err := s.Keys.Create(r.Context(), body.Team, body.Role, body.Name)
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

func (s *server) revokeKey(w http.ResponseWriter, r *request) error {
	if err := s.Keys.Revoke(r.Context(), r.PathValue("id")); err != nil {
		return err
	}
	s.Log.InfoContext(r.Context(), "key revoked", "key", r.PathValue("id"), "by", r.caller.KeyID)
	w.WriteHeader(http.StatusNoContent)
	return nil
}
