package client

import (
	"context"
	"net/http"
	"time"
)

// GatewayRoot is the authority that signs what sandboxes see of other hosts.
type GatewayRoot struct {
	ID    string `json:"id"`
	Roots []struct {
		Subject string    `json:"subject"`
		Until   time.Time `json:"until"`
		PEM     string    `json:"pem"`
	} `json:"roots"` // two while it is replaced
}

// GatewayRoot returns the authority.
func (c *Client) GatewayRoot(ctx context.Context) (GatewayRoot, error) {
	var root GatewayRoot
	_, err := c.call(ctx, http.MethodGet, "/v1/gateway/root", nil, nil, &root)
	return root, err
}

// RotateGatewayRoot begins to replace it.
func (c *Client) RotateGatewayRoot(ctx context.Context) (GatewayRoot, error) {
	var root GatewayRoot
	_, err := c.call(ctx, http.MethodPost, "/v1/gateway/root", nil, nil, &root)
	return root, err
}
