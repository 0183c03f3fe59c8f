package client

import (
	"context"
	"net/http"
	"net/url"
	"time"
)

// Approval is something that a sandbox tries and that waits for a person.
type Approval struct {
	ID        string         `json:"id"`
	Event     uint64         `json:"event"` // of the audit log
	Team      string         `json:"team"`
	Sandbox   string         `json:"sandbox"`
	Action    string         `json:"action"`   // "http:request"
	Resource  string         `json:"resource"` // the host
	Context   map[string]any `json:"context"`  // method, path, port, ...
	Policies  []string       `json:"policies"` // that want it held
	Approvers []string       `json:"approvers"`
	Asked     time.Time      `json:"asked"`
	Until     time.Time      `json:"until"` // then it is denied
}

// Approvals returns what waits for the holder of the key, the oldest first; an
// operator sees all. There are at most 512.
func (c *Client) Approvals(ctx context.Context) ([]Approval, error) {
	var all []Approval
	_, err := c.call(ctx, http.MethodGet, "/v1/approvals", nil, nil, &all)
	return all, err
}

// Decide approves or denies what waits. Only keys with the role approver can.
func (c *Client) Decide(ctx context.Context, id string, approve bool, reason string) error {
	body := map[string]any{"approve": approve, "reason": reason}
	_, err := c.call(ctx, http.MethodPost, "/v1/approvals/"+url.PathEscape(id), nil, body, nil)
	return err
}
