package client

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strconv"

	"airlock.dev/airlock"
	"airlock.dev/airlock/audit"
	"airlock.dev/airlock/audit/tiles"
)

// AuditQuery says which events are meant, and in which order they come.
type AuditQuery struct {
	Query  string // in the language of `airlock audit query`; "" is all
	Newest bool   // the newest first
	After  string // AuditPage.Next of the page before
	Limit  int    // 1 to audit.MaxPage

	Details bool // open sealed parts, too: for operators, and recorded once a page
}

// AuditPage is a part of the events that match.
type AuditPage struct {
	Events []json.RawMessage `json:"events"`
	Behind uint64            `json:"behind"` // events that are not found yet

	Details [][]audit.Detail `json:"details"` // of each event, if they were asked for

	Next string `json:"-"` // "" on the last page
}

// AuditEvents returns a page of events.
func (c *Client) AuditEvents(ctx context.Context, q AuditQuery) (AuditPage, error) {
	query := url.Values{"query": {q.Query}, "limit": {strconv.Itoa(q.Limit)}}
	if q.Newest {
		query.Set("order", "newest")
	}
	if q.After != "" {
		query.Set("nextToken", q.After)
	}
	if q.Details {
		query.Set("details", "true")
	}
	var page AuditPage
	header, err := c.call(ctx, http.MethodGet, "/v1/audit/events", query, nil, &page)
	if err != nil {
		return AuditPage{}, err
	}
	page.Next = header.Get("X-Next-Token")
	return page, nil
}

// AuditEvent is one event and, if they were asked for, its details.
type AuditEvent struct {
	Event   json.RawMessage `json:"event"`
	Details []audit.Detail  `json:"details,omitempty"`
}

// AuditEvent returns one event. To ask for its sealed details is recorded.
func (c *Client) AuditEvent(ctx context.Context, seq uint64, details bool) (AuditEvent, error) {
	query := url.Values{}
	if details {
		query.Set("details", "true")
	}
	var e AuditEvent
	_, err := c.call(ctx, http.MethodGet, "/v1/audit/events/"+strconv.FormatUint(seq, 10), query, nil, &e)
	return e, err
}

// AuditProof returns the proof that an event is in the log.
func (c *Client) AuditProof(ctx context.Context, seq uint64) (tiles.Proof, error) {
	var p tiles.Proof
	_, err := c.call(ctx, http.MethodGet, "/v1/audit/events/"+strconv.FormatUint(seq, 10)+"/proof", nil, nil, &p)
	return p, err
}

// AuditConsistency returns the proof between two sizes of a shard.
func (c *Client) AuditConsistency(ctx context.Context, shard string, from, to uint64) (tiles.Consistency, error) {
	query := url.Values{"shard": {shard}, "from": {strconv.FormatUint(from, 10)}, "to": {strconv.FormatUint(to, 10)}}
	var p tiles.Consistency
	_, err := c.call(ctx, http.MethodGet, "/v1/audit/consistency", query, nil, &p)
	return p, err
}

// AuditShard is a part of the log with its head and key.
type AuditShard struct {
	ID         string `json:"id"`
	VKey       string `json:"vkey,omitempty"`
	First      uint64 `json:"first"`
	Size       uint64 `json:"size"`
	Checkpoint string `json:"checkpoint"`
	Closed     bool   `json:"closed"`
	Dropped    bool   `json:"dropped"`
}

// AuditShards returns the parts of the log.
func (c *Client) AuditShards(ctx context.Context) ([]AuditShard, error) {
	var all []AuditShard
	_, err := c.call(ctx, http.MethodGet, "/v1/audit/shards", nil, nil, &all)
	return all, err
}

// AuditStatus returns how the log does.
func (c *Client) AuditStatus(ctx context.Context) (audit.Status, error) {
	var s audit.Status
	_, err := c.call(ctx, http.MethodGet, "/v1/audit/status", nil, nil, &s)
	return s, err
}

// AuditRotate begins a new shard.
func (c *Client) AuditRotate(ctx context.Context) (shard string, err error) {
	var reply struct{ Shard string }
	_, err = c.call(ctx, http.MethodPost, "/v1/audit/rotate", nil, struct{}{}, &reply)
	return reply.Shard, err
}

// AuditDrop removes a closed shard's events.
func (c *Client) AuditDrop(ctx context.Context, shard string) error {
	_, err := c.call(ctx, http.MethodDelete, "/v1/audit/shards/"+url.PathEscape(shard), nil, nil, nil)
	return err
}

// AuditErase destroys a subject's key and returns its pseudonym.
func (c *Client) AuditErase(ctx context.Context, subject string) (pseudonym string, err error) {
	var reply struct{ Erased string }
	_, err = c.call(ctx, http.MethodPost, "/v1/audit/erase", nil, map[string]string{"subject": subject}, &reply)
	return reply.Erased, err
}

// AuditHolds returns the legal holds in force.
func (c *Client) AuditHolds(ctx context.Context) ([]audit.Hold, error) {
	var all []audit.Hold
	_, err := c.call(ctx, http.MethodGet, "/v1/audit/holds", nil, nil, &all)
	return all, err
}

// AuditHold sets a legal hold.
func (c *Client) AuditHold(ctx context.Context, h audit.Hold) (audit.Hold, error) {
	_, err := c.call(ctx, http.MethodPost, "/v1/audit/holds", nil, h, &h)
	return h, err
}

// AuditRelease ends a legal hold.
func (c *Client) AuditRelease(ctx context.Context, name string) error {
	_, err := c.call(ctx, http.MethodDelete, "/v1/audit/holds/"+url.PathEscape(name), nil, nil, nil)
	return err
}

// PoliciesInForce are a team's, and where they and those of the others are
// from. Digests are SHA-256 in hexadecimal.
type PoliciesInForce struct {
	Team     string   `json:"team"`
	Name     string   `json:"name"`
	Digest   string   `json:"digest"`
	Text     string   `json:"text"`
	Teams    []string `json:"teams"`  // with a file of their own
	Source   string   `json:"source"` // "directory", "kept copy" or "built in"
	Loaded   string   `json:"loaded"` // digest of all files together
	Files    []Digest `json:"files"`
	Ceilings []Digest `json:"ceilings"` // as decisions have them
}

// Digest is a file's or a set's SHA-256, in hexadecimal.
type Digest struct {
	Name   string `json:"name"`
	SHA256 string `json:"sha256"`
}

// ReloadPolicies makes the server read its directory of policies again.
func (c *Client) ReloadPolicies(ctx context.Context) (PoliciesInForce, error) {
	var p PoliciesInForce
	_, err := c.call(ctx, http.MethodPost, "/v1/policies/reload", nil, struct{}{}, &p)
	return p, err
}

// AuditFollow calls fn with each event from a number on; nil is from now on.
// It ends with fn's error, or when ctx or the server ends it.
func (c *Client) AuditFollow(ctx context.Context, query string, from *uint64, fn func(json.RawMessage) error) error {
	values := url.Values{"query": {query}}
	if from != nil {
		values.Set("from", strconv.FormatUint(*from, 10))
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, c.base+"/v1/audit/follow?"+values.Encode(), nil)
	if err != nil {
		return err
	}
	if c.key != "" {
		req.Header.Set("X-API-KEY", c.key)
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return c.unreachable(ctx, err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return errorOf(resp)
	}
	lines := bufio.NewScanner(resp.Body)
	lines.Buffer(nil, 2*audit.MaxEvent)
	for lines.Scan() {
		if err := fn(lines.Bytes()); err != nil {
			return err
		}
	}
	switch err := lines.Err(); {
	case ctx.Err() != nil:
		return ctx.Err()
	case errors.Is(err, bufio.ErrTooLong):
		return airlock.Errorf(airlock.Internal, "the server sent an event of more than %d bytes", audit.MaxEvent)
	case err != nil:
		return fmt.Errorf("follow the audit log: %w", err)
	}
	return airlock.Errorf(airlock.Unavailable, "the server ended the stream of events")
}
