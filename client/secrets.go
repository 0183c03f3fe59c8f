package client

import (
	"context"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"

	"airlock.dev/airlock"
)

// SecretScope is the one place that a secret may be sent to, over https.
type SecretScope struct {
	Host    string      `json:"host"`
	Port    uint16      `json:"port,omitempty"` // 443 if it is 0
	Methods []string    `json:"methods"`
	Path    string      `json:"path"` // {name} is one segment, {rest...} at the end all that follow
	Place   SecretPlace `json:"place"`
	Upgrade bool        `json:"upgrade,omitempty"` // WebSockets may be opened with it
}

// SecretPlace is the location in a request: a header, one half of Basic
// authentication ("user" or "password"), or a parameter of the query.
type SecretPlace struct {
	Header string `json:"header,omitempty"`
	Prefix string `json:"prefix,omitempty"` // before the value in Header
	Basic  string `json:"basic,omitempty"`
	Other  string `json:"other,omitempty"` // the other half of Basic
	Query  string `json:"query,omitempty"`
}

// String is the place as the command's flags say it, with {} for the value.
func (p SecretPlace) String() string {
	switch {
	case p.Basic == "user":
		return "basic {}:" + p.Other
	case p.Basic != "":
		return "basic " + p.Other + ":{}"
	case p.Query != "":
		return "query " + p.Query
	}
	return fmt.Sprintf("header %s: %s{}", p.Header, p.Prefix)
}

// Secret is what a server tells of a secret: all but the value.
type Secret struct {
	Team    string `json:"team"`
	Name    string `json:"name"`
	Version int    `json:"version"`
	SecretScope
	CreatedAt time.Time `json:"createdAt"`
	CreatedBy string    `json:"createdBy"` // id of an API key
	UpdatedAt time.Time `json:"updatedAt"`
	UpdatedBy string    `json:"updatedBy"`
}

// URL is where the secret may be sent to, with its path's template.
func (s SecretScope) URL() string {
	host := s.Host
	if strings.Contains(host, ":") {
		host = "[" + host + "]"
	}
	if s.Port != 0 {
		host = fmt.Sprintf("%s:%d", host, s.Port)
	}
	return "https://" + host + s.Path
}

// SetSecret makes a secret of a team or replaces it; an empty team is the
// caller's own.
func (c *Client) SetSecret(ctx context.Context, team, name string, scope SecretScope, value string) (Secret, error) {
	body := struct {
		Team string `json:"team,omitempty"`
		SecretScope
		Value string `json:"value"`
	}{team, scope, value}
	var secret Secret
	_, err := c.call(ctx, http.MethodPut, "/v1/secrets/"+url.PathEscape(name), nil, body, &secret)
	return secret, err
}

// RotateSecret gives a secret another value.
func (c *Client) RotateSecret(ctx context.Context, team, name, value string) (Secret, error) {
	body := map[string]string{"team": team, "value": value}
	var secret Secret
	_, err := c.call(ctx, http.MethodPost, "/v1/secrets/"+url.PathEscape(name)+"/rotate", nil, body, &secret)
	return secret, err
}

// RemoveSecret makes a server forget a secret.
func (c *Client) RemoveSecret(ctx context.Context, team, name string) error {
	_, err := c.call(ctx, http.MethodDelete, "/v1/secrets/"+url.PathEscape(name), teamQuery(team), nil, nil)
	return err
}

func teamQuery(team string) url.Values {
	query := url.Values{}
	if team != "" {
		query.Set("team", team)
	}
	return query
}

// ListSecrets returns the secrets of a team, or all that the caller may see.
func (c *Client) ListSecrets(ctx context.Context, team string) ([]Secret, error) {
	query := teamQuery(team)
	query.Set("limit", "100")
	var all []Secret
	for range maxPages {
		var page []Secret
		header, err := c.call(ctx, http.MethodGet, "/v1/secrets", query, nil, &page)
		if err != nil {
			return nil, err
		}
		all = slices.Concat(all, page)
		token := header.Get("X-Next-Token")
		if token == "" {
			return all, nil
		}
		query.Set("nextToken", token)
	}
	return nil, airlock.Errorf(airlock.Internal, "the server's list of secrets has no end")
}
