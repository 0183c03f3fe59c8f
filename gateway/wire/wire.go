// Package wire is what the server and its gateway say to each other: the
// server hands over doors, the gateway asks for a decision on each crossing
// and tells how it went.
//
// The two are processes of one installation, joined by a SEQPACKET socket. The
// gateway reads what the world and sandboxes send, so the server bounds what
// it takes from it. The package knows nothing of policies, of the audit log or
// of any protocol of the world. Start reading at Attempt, Verdict and Peer.
package wire

import (
	"net/netip"

	"airlock.dev/airlock"
	"airlock.dev/airlock/gateway/inject"
)

// Methods that the gateway serves.
const (
	MethodStart = "start" // Start, once and first
	MethodFlows = "flows" // Name, with the descriptor of the list of its flows; before MethodOpen
	MethodOpen  = "open"  // Door, with its descriptor; in place of one before
	MethodSet   = "set"   // Door, without: what it may do has changed
	MethodBreak = "break" // Break: what was permitted is not any more
	MethodClose = "close" // Name
)

// Methods that the server serves.
const (
	MethodAdmit = "admit" // Attempt → Verdict; records only what it denies
	MethodCross = "cross" // Attempt → Verdict; recorded when it returns
	MethodEnd   = "end"   // End, a note
	MethodBound = "bound" // Bound, a note

	MethodUsed    = "used"    // Used, a note
	MethodRefused = "refused" // Refused, a note
)

// Start is what a gateway must know before anything else.
type Start struct {
	Root      []byte         // certificate of the authority that sandboxes trust, DER
	Key       []byte         // its key, PKCS #8
	Reachable []netip.Prefix `json:",omitempty"` // ranges that count as public here
	// Secrets are in every door: the credentials of this machine's registries.
	Secrets []inject.Secret `json:",omitempty"`
	// ProxyResolves has the proxy of this machine resolve names; see package upstream.
	ProxyResolves bool `json:",omitempty"`
	Budgets
}

// Budgets are what each door may use, by itself. 0 is the default.
type Budgets struct {
	Bytes    int64 `json:",omitempty"` // out of the sandbox and into it, together; 100 GiB
	Flows    int   `json:",omitempty"` // at one time, TCP and UDP; 256
	Requests int   `json:",omitempty"` // a minute, and connections; 6000
	Answer   int64 `json:",omitempty"` // bytes of the body of one answer; 64 GiB
}

// Budget names one.
type Budget string

// The budgets that something is refused for and only counted.
const (
	BudgetBytes    Budget = "bytes"
	BudgetFlows    Budget = "flows"
	BudgetRequests Budget = "requests"
)

// Used tells how much of a sandbox's bytes is used up, each time when it is
// one part in a hundred more, and when it is all.
type Used struct {
	Sandbox string
	Bytes   int64
}

// Refused tells of what was refused for a budget without an attempt: once a
// second for each, while there is any.
type Refused struct {
	Sandbox string
	Budget  Budget
	Count   int64
}

// Door is a sandbox's, and what the gateway must know of it.
type Door struct {
	Sandbox string
	Secrets []inject.Secret `json:",omitempty"`
	Rules   []Rule          `json:",omitempty"`
	// EgressProxy is what its TCP connections go by, if there is one.
	EgressProxy *airlock.EgressProxy `json:",omitempty"`
	// Names are those that it was given addresses of, the oldest first.
	Names []Binding `json:",omitempty"`
	// Used is how many bytes it has sent and received before.
	Used int64 `json:",omitempty"`
}

// Binding is a name that a sandbox was given addresses of.
type Binding struct {
	Name  string
	Place uint32 // of the addresses, among all that there are
}

// Bound tells of one.
type Bound struct {
	Sandbox string
	Binding
}

// Rule is what requests to some hosts get before they go on.
type Rule struct {
	Host    string            // a name, or "*." and what names end with; lower case
	Headers map[string]string // with their values, which are secrets
}

// Break names crossings that were permitted and are to be broken off.
type Break struct {
	Sandbox string
	Events  []uint64 // at most BreakMost
}

// BreakMost is how many numbers of events fit a message.
const BreakMost = 4096

// Name names a door.
type Name struct{ Sandbox string }

// Attempt is one crossing that a sandbox tries: what the gateway knows of it.
type Attempt struct {
	Sandbox string
	Action  string // as in policies: dns:resolve, net:connect, http:request, secret:use
	Host    string // a name or an address, canonical
	Port    uint16 `json:",omitempty"`
	IP      string `json:",omitempty"` // that will be dialled
	// Class is what kind of address it is, in package address' words.
	Class    string `json:",omitempty"`
	Type     string `json:",omitempty"` // of a DNS query
	Protocol string `json:",omitempty"` // of net:connect: tcp, tls or udp
	Scheme   string `json:",omitempty"` // of http:request, and what follows
	Method   string `json:",omitempty"`
	Path     string `json:",omitempty"` // decoded
	Query    string `json:",omitempty"`
	Upgrade  string `json:",omitempty"`
	Body     *int64 `json:",omitempty"` // length, if it is known
	Secret   string `json:",omitempty"` // of secret:use: its name, and where it goes
	Location string `json:",omitempty"`
	// EgressProxy says that this is the way to the proxy that the sandbox's client
	// named (dns:resolve and net:connect), and not what the sandbox tried.
	EgressProxy bool `json:",omitempty"`
	// Refused is why the gateway itself denied it: it is recorded, not decided.
	Refused string `json:",omitempty"`
}

// Mode is how connections to a destination are to be treated.
type Mode string

// The modes.
const (
	Terminate   Mode = "terminate"   // HTTP and TLS only; each request is decided
	Passthrough Mode = "passthrough" // TLS by its name, undecrypted
	Any         Mode = "any"         // HTTP and TLS like Terminate, else bytes
)

// Verdict is the answer to an attempt. The zero Verdict denies.
type Verdict struct {
	Permit   bool
	Event    uint64   // its number in the log, to be named in End
	Mode     Mode     `json:",omitempty"` // of MethodAdmit
	Inject   []string `json:",omitempty"` // secrets that a policy wants put in
	Policies []string `json:",omitempty"` // that decided
	Reason   string   `json:",omitempty"` // of a denial
	Status   int      `json:",omitempty"` // of a denial, if it is not 403
}

// End is how a permitted crossing went.
type End struct {
	Sandbox  string
	Event    uint64
	Status   int    `json:",omitempty"` // of HTTP; 0 without an answer
	BytesOut int64  `json:",omitempty"` // out of the sandbox
	BytesIn  int64  `json:",omitempty"`
	Error    string `json:",omitempty"` // what broke it off
	// Code is that of the error, if it was for a budget: airlock.Exhausted for
	// all bytes, airlock.TooLarge for those of one request or answer. It is
	// airlock.Denied of what was refused after it had been permitted, such as
	// a request with a placeholder where none belongs.
	Code airlock.Code `json:",omitempty"`
	// Used is how many bytes the sandbox has used by now.
	Used int64 `json:",omitempty"`
}
