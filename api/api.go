// Package api is the wire surface of Airlock: E2B's control plane and data
// plane, and /v1 for the operator. It authenticates and translates; what may
// exist, and for how long, is decided in control.
//
// One listener serves both planes: a request to the host PORT-ID.DOMAIN, or
// with the headers E2b-Sandbox-Id and -Port, goes to the data plane of that
// sandbox, as does a signed URL of a file; any other goes to the control plane.
// On the data plane, port 49983 is E2B's API of processes and files; other
// ports are those of programs inside.
// Start reading at routes, the table of everything that can be called.
package api

import (
	"context"
	"log/slog"
	"net/http"
	"strconv"
	"strings"
	"time"

	"airlock.dev/airlock"
	"airlock.dev/airlock/api/envd"
	"airlock.dev/airlock/control"
	"airlock.dev/airlock/keys"
)

// Sandboxes is what the api asks of control.
type Sandboxes interface {
	Create(ctx context.Context, p airlock.Principal, req control.CreateRequest) (airlock.Sandbox, error)
	Get(ctx context.Context, p airlock.Principal, id string) (airlock.Sandbox, error)
	List(ctx context.Context, p airlock.Principal) ([]airlock.Sandbox, error)
	Kill(ctx context.Context, p airlock.Principal, id string) error
	SetTimeout(ctx context.Context, p airlock.Principal, id string, d time.Duration) (airlock.Sandbox, error)
	Extend(ctx context.Context, p airlock.Principal, id string, d time.Duration) (airlock.Sandbox, error)
	Connect(ctx context.Context, p airlock.Principal, id string, d time.Duration) (airlock.Sandbox, error)
	SetNetwork(ctx context.Context, p airlock.Principal, id string, n airlock.Network) error
	Metrics(ctx context.Context, p airlock.Principal, id string, from, to time.Time) ([]control.Metric, error)
	LastMetric(ctx context.Context, p airlock.Principal, id string) (control.Metric, bool)
	Logs(ctx context.Context, p airlock.Principal, id string) ([]control.Event, error)
	Open(ctx context.Context, id string) (*control.Guest, error)
	SecretChanged(ctx context.Context, team, name string) error
	Approvals(p airlock.Principal) []control.Approval
	Decide(ctx context.Context, p airlock.Principal, id string, permit bool, reason string) error
	// FindToken returns the running sandbox whose access token matches.
	FindToken(match func(token string) bool) (id string, found bool)
}

// Keys is what the api asks of the API keys.
type Keys interface {
	Authenticate(ctx context.Context, secret string) (airlock.Principal, error)
	Create(ctx context.Context, team string, role airlock.Role, name, owner string) (string, keys.Key, error)
	List(ctx context.Context, after string, limit int) ([]keys.Key, error)
	Revoke(ctx context.Context, id string) error
}

// Config is what the handler works with.
type Config struct {
	Sandboxes Sandboxes
	Keys      Keys
	Secrets   Secrets
	Trail     Trail
	Policies  Policies
	Root      Root
	Domain    string // what sandboxes' host names end in, with a port if it is not TLS's own; "" leaves it to the SDK
	Log       *slog.Logger
	Version   string
}

type server struct {
	Config
	control, data *http.ServeMux
	ports         transports
}

// request is a request that passed its gate.
type request struct {
	*http.Request
	caller airlock.Principal // control plane
	guest  *control.Guest    // data plane
}

type plane bool

const (
	controlPlane plane = false
	dataPlane    plane = true
)

// route is one thing that can be called. The gate decides who may.
type route struct {
	plane  plane
	method string // "" is any
	path   string // as http.ServeMux has it
	gate   func(*server, *request) error
	handle func(http.ResponseWriter, *request) error
}

func (s *server) routes() []route {
	process := s.rpc(envd.NewProcessHandler(processService{}, s.rpcOptions()...))
	files := s.rpc(envd.NewFilesystemHandler(filesystemService{}, s.rpcOptions()...))
	return []route{
		{controlPlane, "GET", "/health", anyone, s.health},
		{controlPlane, "POST", "/sandboxes", client, s.createV1},
		{controlPlane, "POST", "/v2/sandboxes", client, s.createV2},
		{controlPlane, "GET", "/sandboxes", client, s.listV1},
		{controlPlane, "GET", "/v2/sandboxes", client, s.listV2},
		{controlPlane, "GET", "/sandboxes/{id}", client, s.info},
		{controlPlane, "DELETE", "/sandboxes/{id}", client, s.kill},
		{controlPlane, "POST", "/sandboxes/{id}/timeout", client, s.setTimeout},
		{controlPlane, "POST", "/sandboxes/{id}/refreshes", client, s.refresh},
		{controlPlane, "POST", "/sandboxes/{id}/connect", client, s.connectV1},
		{controlPlane, "POST", "/v2/sandboxes/{id}/connect", client, s.connectV2},
		{controlPlane, "GET", "/sandboxes/{id}/logs", client, s.logsV1},
		{controlPlane, "GET", "/v2/sandboxes/{id}/logs", client, s.logsV2},
		{controlPlane, "GET", "/sandboxes/{id}/metrics", client, s.sandboxMetrics},
		{controlPlane, "GET", "/sandboxes/metrics", client, s.allMetrics},
		{controlPlane, "GET", "/teams", client, s.teams},
		{controlPlane, "GET", "/templates/aliases/{alias}", client, s.templateAlias},
		{controlPlane, "POST", "/sandboxes/{id}/pause", client, unimplemented("pausing sandboxes")},
		{controlPlane, "POST", "/sandboxes/{id}/resume", client, unimplemented("pausing sandboxes")},
		{controlPlane, "POST", "/sandboxes/{id}/fork", client, unimplemented("forking sandboxes")},
		{controlPlane, "POST", "/sandboxes/{id}/snapshots", client, unimplemented("snapshots")},
		{controlPlane, "PUT", "/sandboxes/{id}/network", client, s.setNetwork},
		{controlPlane, "", "/snapshots", client, unimplemented("snapshots")},
		{controlPlane, "", "/templates", client, unimplemented("templates of your own")},
		{controlPlane, "", "/templates/", client, unimplemented("templates of your own")}, // their tags, files and builds, and snapshots, which E2B deletes as templates
		{controlPlane, "", "/v2/templates", client, unimplemented("templates of your own")},
		{controlPlane, "", "/v2/templates/", client, unimplemented("templates of your own")},
		{controlPlane, "", "/v3/templates", client, unimplemented("templates of your own")},
		{controlPlane, "", "/volumes", client, unimplemented("volumes")},
		{controlPlane, "", "/volumes/", client, unimplemented("volumes")},
		{controlPlane, "", "/secrets", client, unimplemented("secrets")},
		{controlPlane, "", "/secrets/", client, unimplemented("secrets")},
		{controlPlane, "POST", "/v1/keys", operator, s.createKey},
		{controlPlane, "GET", "/v1/keys", operator, s.listKeys},
		{controlPlane, "DELETE", "/v1/keys/{id}", operator, s.revokeKey},
		{controlPlane, "GET", "/v1/secrets", auditor, s.listSecrets},
		{controlPlane, "PUT", "/v1/secrets/{name}", operator, s.setSecret},
		{controlPlane, "POST", "/v1/secrets/{name}/rotate", operator, s.rotateSecret},
		{controlPlane, "DELETE", "/v1/secrets/{name}", operator, s.removeSecret},
		{controlPlane, "GET", "/v1/audit/events", auditor, s.auditEvents},
		{controlPlane, "GET", "/v1/audit/events/{seq}", auditor, s.auditEvent},
		{controlPlane, "GET", "/v1/audit/events/{seq}/proof", auditor, s.auditProof},
		{controlPlane, "GET", "/v1/audit/follow", auditor, s.auditFollow},
		{controlPlane, "GET", "/v1/audit/status", auditor, s.auditStatus},
		{controlPlane, "GET", "/v1/audit/shards", auditor, s.auditShards},
		{controlPlane, "DELETE", "/v1/audit/shards/{shard}", operator, s.auditDrop},
		{controlPlane, "GET", "/v1/audit/consistency", auditor, s.auditConsistency},
		{controlPlane, "POST", "/v1/audit/rotate", operator, s.auditRotate},
		{controlPlane, "POST", "/v1/audit/erase", operator, s.auditErase},
		{controlPlane, "GET", "/v1/audit/holds", auditor, s.auditHolds},
		{controlPlane, "POST", "/v1/audit/holds", operator, s.auditHold},
		{controlPlane, "DELETE", "/v1/audit/holds/{name}", operator, s.auditRelease},
		{controlPlane, "GET", "/v1/approvals", approver, s.approvals},
		{controlPlane, "POST", "/v1/approvals/{id}", approver, s.decide},
		{controlPlane, "GET", "/v1/gateway/root", operator, s.gatewayRoot},
		{controlPlane, "POST", "/v1/gateway/root", operator, s.rotateRoot},
		{controlPlane, "GET", "/v1/policies", operator, s.policiesInForce},
		{controlPlane, "POST", "/v1/policies/reload", operator, s.reloadPolicies},

		{dataPlane, "GET", "/health", anyone, s.health},
		{dataPlane, "GET", "/metrics", accessToken, s.envdMetrics},
		{dataPlane, "GET", "/envs", accessToken, s.envs},
		{dataPlane, "GET", "/files", accessTokenOrSignature, s.readFile},
		{dataPlane, "POST", "/files", accessTokenOrSignature, s.writeFiles},
		{dataPlane, "POST", "/files/compose", accessToken, s.compose},
		{dataPlane, "GET", "/v1/ports/{port}", accessToken, s.forward},
		{dataPlane, "POST", "/process.Process/{method}", accessToken, process},
		{dataPlane, "POST", "/filesystem.Filesystem/{method}", accessToken, files},
	}
}

// New returns the handler of both planes.
func New(cfg Config) http.Handler {
	s := &server{Config: cfg, control: http.NewServeMux(), data: http.NewServeMux(), ports: transports{all: map[string]*http.Transport{}}}
	for _, rt := range s.routes() {
		mux := s.control
		if rt.plane == dataPlane {
			mux = s.data
		}
		mux.HandleFunc(strings.TrimSpace(rt.method+" "+rt.path), func(w http.ResponseWriter, hr *http.Request) {
			r := &request{Request: hr, guest: guestOf(hr.Context())}
			err := rt.gate(s, r)
			if err == nil {
				err = rt.handle(w, r)
			}
			if err != nil {
				s.fail(w, r, err)
			}
		})
	}
	missing := func(w http.ResponseWriter, hr *http.Request) {
		r := &request{Request: hr, guest: guestOf(hr.Context())}
		s.fail(w, r, airlock.Errorf(airlock.NotFound, "there is no %s %.200s", hr.Method, hr.URL.Path))
	}
	s.control.HandleFunc("/", missing)
	s.data.HandleFunc("/", missing)
	return s
}

// Server returns an HTTP server for handler with the limits that both planes
// need. Bodies and replies have no deadline here: files and output may take
// as long as they take; who may send them is known by then.
func Server(handler http.Handler) *http.Server {
	return &http.Server{
		Handler:           handler,
		ReadHeaderTimeout: 10 * time.Second,
		IdleTimeout:       2 * time.Minute,
		MaxHeaderBytes:    64 << 10,
	}
}

// ServeHTTP chooses the plane.
func (s *server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	to, err := s.address(r)
	switch {
	case err != nil:
		s.oursForAll(w)
		s.fail(w, &request{Request: r}, err)
	case to == dataPlane:
		s.serveData(w, r)
	case asksLeave(r):
		s.ours(w)
		preflight(w, r)
	case signedFile(r):
		s.serveSigned(w, r)
	default:
		s.ours(w)
		s.control.ServeHTTP(w, r)
	}
}

// ours marks a reply that is not a sandbox's.
func (s *server) ours(w http.ResponseWriter) {
	h := w.Header()
	h.Set("Server", "airlock/"+s.Version)
	h.Set("X-Content-Type-Options", "nosniff")
}

// oursForAll is ours on the data plane, where pages of any origin may read it.
func (s *server) oursForAll(w http.ResponseWriter) {
	s.ours(w)
	w.Header().Set("Access-Control-Allow-Origin", "*")
	w.Header().Set("Access-Control-Expose-Headers", "*")
}

func asksLeave(r *http.Request) bool {
	return r.Method == http.MethodOptions && r.Header.Get("Access-Control-Request-Method") != ""
}

// preflight lets a browser call the data plane: the token is a header, so
// that nothing rides on the browser's own cookies. The control plane's
// replies carry no such leave: API keys do not belong in browsers.
func preflight(w http.ResponseWriter, r *http.Request) {
	h := w.Header()
	h.Set("Access-Control-Allow-Origin", "*")
	h.Set("Access-Control-Allow-Methods", "GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS")
	h.Set("Access-Control-Allow-Headers", r.Header.Get("Access-Control-Request-Headers"))
	h.Set("Access-Control-Max-Age", "7200")
	w.WriteHeader(http.StatusNoContent)
}

func (s *server) serveData(w http.ResponseWriter, r *http.Request) {
	req := &request{Request: r}
	id := baseID(r.Header.Get(idHeader))
	port, err := parsePort(r.Header.Get(portHeader))
	var guest *control.Guest
	if err == nil {
		if port == envdPort && asksLeave(r) {
			s.ours(w)
			preflight(w, r)
			return
		}
		guest, err = s.open(r.Context(), id)
	}
	if err == nil && port != envdPort && port != codePort {
		s.proxy(w, r, guest, port)
		return
	}
	s.oursForAll(w)
	switch {
	case err != nil:
		s.fail(w, req, err)
	case port == codePort:
		portClosed(w, id, port, "The sandbox is running but port is not open") // its kernels come with their own image
	default:
		stop := abortWhenGone(w, guest)
		defer stop()
		s.data.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), guestKey{}, guest)))
	}
}

// maxSignedQuery holds the longest path there is, percent-encoded, and bounds
// what a stranger can make us hash for each sandbox.
const maxSignedQuery = 16 << 10

// signedFile says whether this is a URL as the SDK makes it where all
// sandboxes share an address: it names no sandbox.
func signedFile(r *http.Request) bool {
	return r.URL.Path == "/files" && (r.Method == http.MethodGet || r.Method == http.MethodPost) &&
		len(r.URL.RawQuery) <= maxSignedQuery && r.URL.Query().Get("signature") != ""
}

// serveSigned finds the sandbox whose token made the signature. The gate
// checks it again, and whether it has expired.
func (s *server) serveSigned(w http.ResponseWriter, r *http.Request) {
	query, op := r.URL.Query(), operation(r.Method)
	id, found := s.Sandboxes.FindToken(func(token string) bool { return signatureMatches(query, op, token) })
	if !found { // or it has ended: who holds the URL cannot know which
		s.oursForAll(w)
		writeJSON(w, http.StatusUnauthorized, errorBody{Code: http.StatusUnauthorized, Message: "invalid signature"})
		return
	}
	r = r.Clone(r.Context())
	r.Header.Set(idHeader, id)
	r.Header.Set(portHeader, strconv.Itoa(envdPort))
	s.serveData(w, r)
}

func (s *server) open(ctx context.Context, id string) (*control.Guest, error) {
	gone := airlock.Errorf(airlock.Gone, "The sandbox was not found")
	if !airlock.ValidSandboxID(id) {
		return nil, gone
	}
	guest, err := s.Sandboxes.Open(ctx, id)
	if code := airlock.CodeOf(err); err != nil && (code == airlock.NotFound || code == airlock.Gone) {
		return nil, gone
	} else if err != nil {
		return nil, err
	}
	select {
	case <-guest.Gone():
		return nil, gone
	default:
		return guest, nil
	}
}

// baseID cuts the legacy form "id-clientid".
func baseID(id string) string {
	id, _, _ = strings.Cut(id, "-")
	return id
}

type guestKey struct{}

func guestOf(ctx context.Context) *control.Guest {
	g, _ := ctx.Value(guestKey{}).(*control.Guest)
	return g
}

// goneGrace is how long the reply of a sandbox that ended may still take.
const goneGrace = 5 * time.Second

// abortWhenGone breaks reads and writes off that still wait for the client
// when the sandbox has ended. The returned function ends the watch.
func abortWhenGone(w http.ResponseWriter, g *control.Guest) (stop func()) {
	done, over := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(over)
		select {
		case <-done:
			return
		case <-g.Gone():
		}
		select {
		case <-done:
		case <-time.After(goneGrace):
			c := http.NewResponseController(w)
			c.SetReadDeadline(time.Unix(1, 0)) // fails where there is nothing to break off
			c.SetWriteDeadline(time.Unix(1, 0))
		}
	}()
	return func() { close(done); <-over }
}

func (s *server) health(w http.ResponseWriter, _ *request) error {
	w.WriteHeader(http.StatusNoContent)
	return nil
}

// unimplemented answers what E2B has and Airlock does not, as long as it does
// not: a 404 would read as "there is none of that name".
func unimplemented(what string) func(http.ResponseWriter, *request) error {
	return func(http.ResponseWriter, *request) error {
		return airlock.Errorf(airlock.Unimplemented, "this Airlock does not support %s yet", what)
	}
}
