// Package control is the life of sandboxes: it creates, remembers, finds
// again, bounds and ends them, and gives callers the way into each.
//
// It decides what exists and for how long. It knows nothing of HTTP, of how
// sandboxes are isolated or of how state is stored: drivers come through
// isolation, state through cluster. Start reading at Sandboxes.
package control

import (
	"context"
	"time"

	"airlock.dev/airlock"
)

// CreateRequest is what a client asks for.
type CreateRequest struct {
	Template string            // id or alias; "" is "base"
	Timeout  time.Duration     // until the sandbox is killed; over 0 and at most MaxTimeout
	Metadata map[string]string // labels for List
	Env      map[string]string // variables of every process
	Limits   airlock.Limits    // zero fields get the defaults
	Network  airlock.Network
}

// MaxTimeout is the longest life that can be asked for at one time.
const MaxTimeout = 24 * time.Hour

// Sandboxes holds all sandboxes of this host.
type Sandboxes struct{}

// Create starts a sandbox for p's team and returns when commands can be sent.
func (c *Sandboxes) Create(ctx context.Context, p airlock.Principal, req CreateRequest) (airlock.Sandbox, error)

// Get returns a sandbox of p's team.
func (c *Sandboxes) Get(ctx context.Context, p airlock.Principal, id string) (airlock.Sandbox, error)

// List returns the running sandboxes of p's team, newest first.
func (c *Sandboxes) List(ctx context.Context, p airlock.Principal) ([]airlock.Sandbox, error)

// Kill ends a sandbox and returns when nothing of it is left.
func (c *Sandboxes) Kill(ctx context.Context, p airlock.Principal, id string) error

// SetTimeout sets the end of life to d from now; d of 0 or less is now.
func (c *Sandboxes) SetTimeout(ctx context.Context, p airlock.Principal, id string, d time.Duration) (airlock.Sandbox, error)

// Extend sets the end of life to d from now unless it is later already.
func (c *Sandboxes) Extend(ctx context.Context, p airlock.Principal, id string, d time.Duration) (airlock.Sandbox, error)

// Open returns the way into a running sandbox, of any team: the caller has
// checked its AccessToken or does so with what Open returns.
func (c *Sandboxes) Open(ctx context.Context, id string) (*Guest, error)
