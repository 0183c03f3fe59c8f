// Package isolation is the seam between what Airlock promises of a sandbox
// and the technology that keeps the promise: a Driver starts sandboxes,
// finds them again after a restart of the server, and removes what is left.
//
// A life cycle, as control runs it:
//
//	sb, err := driver.Create(ctx, spec) // started; the guest is PID 1
//	conn, err := sb.Dial(ctx)           // the guest channel, one at a time
//	…
//	exit, err := sb.Wait(ctx)           // it ended by itself, or
//	err = sb.Destroy(ctx)               // it is ended; nothing of it remains
//
// and after the server was killed and started again:
//
//	sb, err := driver.Recover(ctx, id)  // each sandbox that is remembered
//	gone, err := driver.Sweep(ctx, keep) // all others, and what is left of the dead
//
// The package knows nothing of owners, deadlines or what runs inside. Every
// driver passes isolationtest.
package isolation

import (
	"context"
	"io"
	"net"
	"net/netip"
	"os"

	"airlock.dev/airlock"
)

// Spec is what a driver needs to start a sandbox.
type Spec struct {
	ID       string // unique on this host; airlock.ValidSandboxID
	RootFS   string // directory: an image, mounted read-only under the sandbox's own overlay
	Guest    string // path of the guest inside RootFS
	Hostname string
	Limits   airlock.Limits // all set and valid
	Link     *Link          // nil: no network but the sandbox's own loopback
	// Step, if it is not nil, is called when a part of Create is done, for who
	// measures: groups, kernel, guest.
	Step func(done string)
}

// Link is a sandbox's network device. What it sends arrives at its door as raw
// Ethernet frames, and nowhere else.
type Link struct {
	MTU       int // bytes, without the Ethernet header
	MAC       net.HardwareAddr
	Addresses []netip.Prefix // its own, at most one for each version of IP
	Gateways  []netip.Addr   // where all else is reached: one for each version
}

// Driver starts sandboxes. Its methods may be called concurrently.
type Driver interface {
	// Name is that of the technology: "gvisor".
	Name() string
	// Create starts a sandbox and returns when the guest has been started;
	// on an error nothing of it remains. An id in use is an Exists error.
	Create(ctx context.Context, spec Spec) (Sandbox, error)
	// Recover finds a running sandbox that another process created. A
	// sandbox that does not run any more is a NotFound error; the remains
	// are removed by Sweep.
	Recover(ctx context.Context, id string) (Sandbox, error)
	// Sweep ends and removes every sandbox of this driver for which keep
	// returns false, and returns their ids.
	Sweep(ctx context.Context, keep func(id string) bool) ([]string, error)
}

// Sandbox is a running sandbox. Its methods may be called concurrently.
type Sandbox interface {
	ID() string
	// Dial returns the guest channel as a packet connection: one Read
	// returns one packet. A new Dial takes the place of the one before.
	Dial(ctx context.Context) (io.ReadWriteCloser, error)
	// Door returns the host's end of the sandbox's link, a datagram socket: one
	// Read returns one frame. It is the caller's to close; all that were returned
	// share one queue. A sandbox without a link is a NotFound error.
	Door(ctx context.Context) (*os.File, error)
	// Stats returns what the host measures.
	Stats(ctx context.Context) (Stats, error)
	// Wait returns when the sandbox has ended, with the reason.
	Wait(ctx context.Context) (Exit, error)
	// Destroy ends the sandbox and removes all it had on the host. It may be
	// called again, also after an error.
	Destroy(ctx context.Context) error
}

// Stats are measured on the host.
type Stats struct {
	CPUSeconds  float64 // used since the start
	MemoryBytes int64   // resident on the host, the application kernel included
	DiskBytes   int64   // written and held
}

// Exit is why a sandbox ended.
type Exit struct {
	// Outcome is SandboxKilled after Destroy, SandboxOOM when the memory
	// wall ended it, SandboxFailed when it ended unasked.
	Outcome airlock.Outcome
	Detail  string // for the operator's log
}
