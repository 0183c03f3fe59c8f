// Package airlock holds the nouns of the system: sandbox, limits, outcome,
// principal, and the one coded error type that crosses package borders.
//
// It imports only the standard library and knows nothing of HTTP, of any
// isolation technology or of any store. Start reading here, then control.
package airlock

import (
	"fmt"
	"regexp"
	"time"
)

// Sandbox is one isolated, ephemeral environment as its owner sees it.
type Sandbox struct {
	ID         string            // "i" and 20 characters of [a-z0-9]
	Team       string            // the tenant that owns it
	TemplateID string            // what it was started from
	State      SandboxState      // running until it ends
	Metadata   map[string]string // the client's own labels
	Env        map[string]string // variables of every process started in it
	Limits     Limits            // what it may use
	StartedAt  time.Time         // when the create was accepted
	EndAt      time.Time         // when it is killed unless its timeout is changed
	Network    Network           // what the client asked for; stored before it is enforced
	Profile    string            // the policies it asked for beside; "" is the default
	Policy     string            // and its own, in Cedar\'s language

	// NetworkBytes is how many bytes it has sent and received, and the server
	// was told of: at most a hundredth of the budget less than there were.
	NetworkBytes int64 `json:",omitempty"`

	Creator Creator // whose create it was
	// TrustID names the roots that its image trusts; "" is the machine's own.
	TrustID string
	// Placeholders are those that it got.
	Placeholders []Placeholder

	// AccessToken opens the data plane of this sandbox only. It is shown to
	// its owner and never to the sandbox.
	AccessToken string

	// TrafficToken opens its ports where the client asked that they be not
	// open to all (Network.AllowPublicTraffic); empty where they are.
	TrafficToken string

	// CreateKey is the client's own key of the create that made it, and
	// CreateDigest what that asked for: a retry gets this sandbox again.
	CreateKey    string
	CreateDigest string

	// CreateRules is a digest of the rules and the proxy that the create asked for,
	// which somebody could guess them by; like those it is in Secrets, sealed.
	CreateRules string `json:"-"`
	Secrets     []byte `json:",omitempty"`
}

// PublicTraffic says whether requests to the sandbox's ports need no token.
func (s Sandbox) PublicTraffic() bool {
	return s.Network.AllowPublicTraffic == nil || *s.Network.AllowPublicTraffic
}

// Root inside every sandbox is the host's user HostUserBase, and the users
// after it follow, HostUsers of them: no real users of any host, so that the
// host's own kernel denies them every file that is not open to all.
const (
	// GatewayUser is whom the gateway's process runs as, and its group.
	GatewayUser  = HostUserBase - 1
	HostUserBase = 0x70000000
	HostUsers    = 65536
)

// SandboxState is where a sandbox is in its life.
type SandboxState string

// The states of a sandbox. A sandbox that ended is not kept.
const (
	Creating SandboxState = "creating"
	Running  SandboxState = "running"
	Killing  SandboxState = "killing"
)

var sandboxID = regexp.MustCompile(`^[a-z0-9]{1,32}$`)

// ValidSandboxID says whether id may name a sandbox: 1 to 32 characters of
// [a-z0-9], so that it is safe as a file name, a cgroup and a host label.
func ValidSandboxID(id string) bool { return sandboxID.MatchString(id) }

// Network is a client's wish about egress. It can only narrow what the
// operator allows.
type Network struct {
	AllowInternet      *bool    `json:"allowInternet,omitempty"`
	AllowOut           []string `json:"allowOut,omitempty"`           // addresses, networks, domains; they win over DenyOut
	DenyOut            []string `json:"denyOut,omitempty"`            // addresses and networks
	AllowPublicTraffic *bool    `json:"allowPublicTraffic,omitempty"` // to its ports; nil is yes
	MaskRequestHost    string   `json:"maskRequestHost,omitempty"`    // Host of requests to its ports
	HTTPSPorts         []int    `json:"httpsPorts,omitempty"`         // ports that speak TLS themselves

	// Rules are never written anywhere in the clear: their values are secrets.
	Rules []HeaderRule `json:"-"`
	// EgressProxy, if there is one, is what TCP connections go by; like Rules it
	// is never written in the clear.
	EgressProxy *EgressProxy `json:"-"`
}

// EgressProxy is a SOCKS5 proxy that a client has its sandbox's connections go
// by. It permits nothing: what is denied never gets to it, and the operator's
// policies must permit the connection to it.
type EgressProxy struct {
	Host string `json:"host"` // a name or an address in canonical form
	Port uint16 `json:"port"`
	// Username and Password are of RFC 1929, 1 to 255 bytes and up to 255; without
	// a Username the proxy is told neither.
	Username string `json:"username,omitempty"`
	Password string `json:"password,omitempty"`
	// TLS has the proxy spoken to over TLS, with a certificate for ServerName (or
	// Host) by one of the authorities in CACert, in PEM (or those of the machine).
	TLS        bool   `json:"tls,omitempty"`
	ServerName string `json:"serverName,omitempty"`
	CACert     string `json:"caCert,omitempty"`
}

// HeaderRule has headers set in requests that leave a sandbox over TLS. It
// permits no request.
type HeaderRule struct {
	Host    string            // a name in canonical form, or "*." and one: all names below it
	Headers map[string]string // by canonical name
}

// Limits bound one sandbox. The zero value of a field means the default.
type Limits struct {
	CPUs        float64 `json:"cpus"`        // virtual processors, 0.1 to 64
	MemoryMB    int     `json:"memoryMB"`    // MiB for user processes, 64 to 262144
	DiskMB      int     `json:"diskMB"`      // MiB that may be written, 16 to 1048576
	Processes   int     `json:"processes"`   // processes and threads of one user, 8 to 32768
	OpenFiles   int     `json:"openFiles"`   // descriptors of one process, 16 to 1048576
	OutputBytes int64   `json:"outputBytes"` // stdout and stderr of one exec, 1 to 1 TiB
}

// DefaultLimits are what a create that names none gets.
var DefaultLimits = Limits{CPUs: 2, MemoryMB: 512, DiskMB: 1024, Processes: 256, OpenFiles: 1024, OutputBytes: 1 << 30}

// WithDefaults fills the fields left zero from def.
func (l Limits) WithDefaults(def Limits) Limits {
	if l.CPUs == 0 {
		l.CPUs = def.CPUs
	}
	if l.MemoryMB == 0 {
		l.MemoryMB = def.MemoryMB
	}
	if l.DiskMB == 0 {
		l.DiskMB = def.DiskMB
	}
	if l.Processes == 0 {
		l.Processes = def.Processes
	}
	if l.OpenFiles == 0 {
		l.OpenFiles = def.OpenFiles
	}
	if l.OutputBytes == 0 {
		l.OutputBytes = def.OutputBytes
	}
	return l
}

// Validate reports the first field out of its range as an Invalid error.
func (l Limits) Validate() error {
	if !(l.CPUs >= 0.1 && l.CPUs <= 64) { // written so that NaN fails too
		return Invalidf("limits.cpus", "give a number from 0.1 to 64", "limits.cpus is %g", l.CPUs)
	}
	for _, f := range []struct {
		name       string
		value      int64
		least, top int64
	}{
		{"limits.memoryMB", int64(l.MemoryMB), 64, 262144},
		{"limits.diskMB", int64(l.DiskMB), 16, 1048576},
		{"limits.processes", int64(l.Processes), 8, 32768},
		{"limits.openFiles", int64(l.OpenFiles), 16, 1048576},
		{"limits.outputBytes", l.OutputBytes, 1, 1 << 40},
	} {
		if f.value < f.least || f.value > f.top {
			return Invalidf(f.name, fmt.Sprintf("give a whole number from %d to %d", f.least, f.top), "%s is %d", f.name, f.value)
		}
	}
	return nil
}

// Outcome says how one exec ended. Each is told apart from the others.
type Outcome string

// The outcomes of an exec.
const (
	Exited        Outcome = "exited"         // by itself, with an exit code
	Signaled      Outcome = "signaled"       // by a signal that someone sent
	OOM           Outcome = "oom"            // memory soft limit: the largest process was ended, the sandbox lives
	Timeout       Outcome = "timeout"        // the exec's own deadline
	OutputLimit   Outcome = "output_limit"   // it wrote more than Limits.OutputBytes
	SandboxOOM    Outcome = "sandbox_oom"    // the kernel's memory wall ended the whole sandbox
	SandboxKilled Outcome = "sandbox_killed" // the sandbox was killed or reached its end of life
	SandboxFailed Outcome = "sandbox_failed" // the sandbox ended by itself, unasked
)

// Role is what an API key may do. Roles do not include each other.
type Role string

// The roles of keys.
const (
	Client   Role = "client"   // runs sandboxes of its team
	Operator Role = "operator" // administers the installation
	Approver Role = "approver" // approves; runs nothing
	Auditor  Role = "auditor"  // reads the trail; runs nothing
)

// ParseRole returns the role that s names.
func ParseRole(s string) (Role, error) {
	switch r := Role(s); r {
	case Client, Operator, Approver, Auditor:
		return r, nil
	}
	return "", Invalidf("role", "use client, operator, approver or auditor", "unknown role %q", s)
}

// Principal is who asks: the result of authentication.
type Principal struct {
	Team  string // the tenant whose resources are visible
	Role  Role
	KeyID string // public id of the key, or "local" for the operator's own socket
	Name  string // the key's label; may be empty
	Owner string // the person whose it is; may be empty
}

// Placeholder is what a sandbox has instead of a secret's value. It is of no use
// but at the secret's own place, where the gateway takes it out.
type Placeholder struct {
	Variable string `json:"variable"` // of the environment
	Secret   string `json:"secret"`
	Text     string `json:"text"`
}

// Creator is who made a sandbox: they do not approve what it does.
type Creator struct {
	KeyID string `json:"keyID"`
	Owner string `json:"owner,omitempty"`
}

// Subject is somebody whose personal details are sealed with a key of their own.
type Subject struct {
	Slot string `json:"slot"` // NUMBER.GENERATION of the key's place, unique for ever
	// Pseudonym stands for the subject in records: 32 hex digits that nobody
	// can compute without the salt that is erased with the key.
	Pseudonym string `json:"pseudonym"`
}

// Sealed is a part of a record that only its subject's key opens.
type Sealed struct {
	Subject string `json:"subject"` // the pseudonym
	Slot    string `json:"slot"`
	Nonce   []byte `json:"nonce"` // 24 bytes
	Data    []byte `json:"data"`  // 16 bytes longer than what was sealed
}
