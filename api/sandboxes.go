package api

import (
	"encoding/json"
	"fmt"
	"math"
	"net/http"
	"net/netip"
	"regexp"
	"slices"
	"strings"
	"time"

	"airlock.dev/airlock"
	"airlock.dev/airlock/control"
)

const (
	envdVersion = "0.6.13" // unlocks everything the SDKs know
	clientID    = "airlock"

	// What a create that names no timeout gets; they are E2B's.
	defaultTimeoutV1 = 15
	defaultTimeoutV2 = 300
	maxRefresh       = 3600

	maxPairs      = 64 << 10 // bytes of metadata, and of variables
	maxKey        = 256      // bytes of one name
	maxNetRules   = 1000     // entries of one list
	maxHTTPSPorts = 100
)

// createBody is E2B's create request and our limits.
type createBody struct {
	TemplateID    string            `json:"templateID"`
	Timeout       *int64            `json:"timeout"`
	Metadata      map[string]string `json:"metadata"`
	EnvVars       map[string]string `json:"envVars"`
	AllowInternet *bool             `json:"allow_internet_access"`
	Network       *networkBody      `json:"network"`
	Limits        airlock.Limits    `json:"limits"`
	Profile       string            `json:"profile"` // policies asked for: offline, packages or internet
	Secrets       map[string]string `json:"secrets"` // by the variables that get placeholders: names of the team's secrets
	Policy        string            `json:"policy"`  // in Cedar's language, beside the profile (then offline unless it is given)

	// Understood and not supported: refused unless they ask for nothing.
	AutoPause  bool `json:"autoPause"`
	AutoResume *struct {
		Enabled bool `json:"enabled"`
	} `json:"autoResume"`
	MCP          map[string]json.RawMessage `json:"mcp"`
	VolumeMounts []json.RawMessage          `json:"volumeMounts"`
	IAM          *struct {
		Tokens map[string]json.RawMessage `json:"tokens"`
	} `json:"iam"`
}

// networkBody is the network block, in requests and in replies.
type networkBody struct {
	AllowOut           []string              `json:"allowOut,omitempty"`
	DenyOut            []string              `json:"denyOut,omitempty"`
	AllowPublicTraffic *bool                 `json:"allowPublicTraffic,omitempty"`
	MaskRequestHost    string                `json:"maskRequestHost,omitempty"`
	HTTPSPorts         []int                 `json:"httpsPorts,omitempty"`
	EgressProxy        *proxyBody            `json:"egressProxy,omitempty"`
	Rules              map[string][]ruleBody `json:"rules,omitempty"`
	DNSServers         []string              `json:"dnsServers,omitempty"` // refused
}

// ruleBody is what is done with requests to one host.
type ruleBody struct {
	Transform *transformBody `json:"transform,omitempty"`
}

type transformBody struct {
	Headers map[string]string `json:"headers,omitempty"`
}

func unsupported(field string) error {
	e := airlock.Errorf(airlock.Unimplemented, "%s is not supported by this Airlock yet: leave it out", field)
	e.Field = field
	return e
}

// request checks the body and returns it in control's words.
func (b *createBody) request(defaultTimeout int64) (control.CreateRequest, error) {
	req := control.CreateRequest{Template: b.TemplateID, Metadata: b.Metadata, Env: b.EnvVars, Limits: b.Limits, Profile: b.Profile, Policy: b.Policy, Secrets: b.Secrets}
	if b.TemplateID == "" {
		return req, airlock.Invalidf("templateID", "name a template such as base", "templateID is missing")
	}
	for _, u := range []struct {
		field string
		asked bool
	}{
		{"autoPause", b.AutoPause},
		{"autoResume", b.AutoResume != nil && b.AutoResume.Enabled},
		{"mcp", len(b.MCP) > 0},
		{"volumeMounts", len(b.VolumeMounts) > 0},
		{"iam", b.IAM != nil && len(b.IAM.Tokens) > 0},
	} {
		if u.asked {
			return req, unsupported(u.field)
		}
	}
	timeout := defaultTimeout
	if b.Timeout != nil {
		timeout = *b.Timeout
	}
	var err error
	if req.Timeout, err = lifetime(timeout); err != nil {
		return req, err
	}
	if err := checkPairs("metadata", b.Metadata); err != nil {
		return req, err
	}
	if err := checkPairs("envVars", b.EnvVars); err != nil {
		return req, err
	}
	for k, v := range b.EnvVars {
		if strings.ContainsAny(k, "=\x00") || strings.Contains(v, "\x00") {
			return req, airlock.Invalidf("envVars", "use names without = and values without NUL", "envVars has %.40q, which is no variable", k)
		}
	}
	if err := b.Limits.WithDefaults(airlock.DefaultLimits).Validate(); err != nil {
		return req, err
	}
	if b.Network == nil {
		req.Network.AllowInternet = b.AllowInternet
		return req, nil
	}
	req.Network, err = b.Network.network(b.AllowInternet)
	return req, err
}

// lifetime turns seconds over 0 into a duration.
func lifetime(seconds int64) (time.Duration, error) {
	switch {
	case seconds <= 0:
		return 0, airlock.Invalidf("timeout", "", "Timeout must be greater than 0")
	case seconds > int64(control.MaxTimeout/time.Second):
		return 0, airlock.Invalidf("timeout", "", "Timeout cannot be greater than %d hours", control.MaxTimeout/time.Hour)
	}
	return time.Duration(seconds) * time.Second, nil
}

func checkPairs(field string, pairs map[string]string) error {
	total := 0
	for k, v := range pairs {
		if k == "" || len(k) > maxKey {
			return airlock.Invalidf(field, fmt.Sprintf("use names of 1 to %d bytes", maxKey), "%s has the name %.40q", field, k)
		}
		total += len(k) + len(v)
	}
	if total > maxPairs {
		return airlock.Invalidf(field, fmt.Sprintf("use at most %d", maxPairs), "%s has %d bytes", field, total)
	}
	return nil
}

var domainName = regexp.MustCompile(`^(\*\.)?([a-zA-Z0-9_]([a-zA-Z0-9_-]{0,61}[a-zA-Z0-9_])?\.)*[a-zA-Z0-9_]([a-zA-Z0-9_-]{0,61}[a-zA-Z0-9_])?\.?$`)

func isAddress(s string) bool {
	if _, err := netip.ParseAddr(s); err == nil {
		return true
	}
	_, err := netip.ParsePrefix(s)
	return err == nil
}

const allTraffic = "0.0.0.0/0"

// network checks the block and returns it in control's words.
func (b *networkBody) network(allowInternet *bool) (n airlock.Network, err error) {
	n = airlock.Network{
		AllowInternet: allowInternet, AllowOut: b.AllowOut, DenyOut: b.DenyOut,
		AllowPublicTraffic: b.AllowPublicTraffic, MaskRequestHost: b.MaskRequestHost, HTTPSPorts: b.HTTPSPorts,
	}
	if b.DNSServers != nil {
		// Names are what policies permit. Who says where they lead could have
		// them lead to where the operator permits nothing.
		return n, airlock.Invalidf("network.dnsServers", "leave it out, the gateway answers whichever server is asked; for other traffic to a server put its address into network.allowOut", "network.dnsServers cannot be chosen, since where names lead is the operator's to say")
	}
	if n.EgressProxy, err = b.EgressProxy.proxy(); err != nil {
		return n, err
	}
	for _, list := range []struct {
		field   string
		entries int
		most    int
	}{
		{"network.allowOut", len(n.AllowOut), maxNetRules},
		{"network.denyOut", len(n.DenyOut), maxNetRules},
		{"network.httpsPorts", len(n.HTTPSPorts), maxHTTPSPorts},
	} {
		if list.entries > list.most {
			return n, airlock.Invalidf(list.field, fmt.Sprintf("use at most %d", list.most), "%s has %d entries", list.field, list.entries)
		}
	}
	for _, d := range n.DenyOut {
		if !isAddress(d) {
			return n, airlock.Invalidf("network.denyOut", "give IP addresses and CIDR networks; domains can only be allowed", "network.denyOut has %.60q", d)
		}
	}
	allDenied := slices.Contains(n.DenyOut, allTraffic) || (n.AllowInternet != nil && !*n.AllowInternet)
	for _, a := range n.AllowOut {
		switch {
		case isAddress(a):
		case len(a) > 253 || !domainName.MatchString(a):
			return n, airlock.Invalidf("network.allowOut", "give IP addresses, CIDR networks and domains such as *.example.com", "network.allowOut has %.60q", a)
		case !allDenied:
			return n, airlock.Invalidf("network.allowOut", `add "0.0.0.0/0" to network.denyOut`, "network.allowOut has the domain %q, which means nothing unless all other traffic is denied", a)
		}
	}
	for _, p := range n.HTTPSPorts {
		if p < 1 || p > 65535 {
			return n, airlock.Invalidf("network.httpsPorts", "give ports from 1 to 65535", "network.httpsPorts has %d", p)
		}
	}
	if len(n.MaskRequestHost) > 255 || strings.ContainsFunc(n.MaskRequestHost, func(r rune) bool { return r <= ' ' || r > '~' }) {
		return n, airlock.Invalidf("network.maskRequestHost", "give a host name", "network.maskRequestHost is %.60q", n.MaskRequestHost)
	}
	n.Rules, err = rules(b.Rules)
	return n, err
}

func (s *server) createV1(w http.ResponseWriter, r *request) error {
	return s.create(w, r, defaultTimeoutV1)
}

func (s *server) createV2(w http.ResponseWriter, r *request) error {
	return s.create(w, r, defaultTimeoutV2)
}

func (s *server) create(w http.ResponseWriter, r *request, defaultTimeout int64) error {
	var body createBody
	if err := readJSON(w, r, &body); err != nil {
		return err
	}
	req, err := body.request(defaultTimeout)
	if err != nil {
		return err
	}
	if req.Key, err = idempotencyKey(r.Header); err != nil {
		return err
	}
	req.Timing = control.NewTiming()
	sb, err := s.Sandboxes.Create(r.Context(), r.caller, req)
	if err != nil {
		return err
	}
	var timing []string
	for _, step := range req.Timing.Steps {
		timing = append(timing, fmt.Sprintf("%s;dur=%.3f", step.Name, float64(step.Took)/float64(time.Millisecond)))
	}
	w.Header().Set("Server-Timing", strings.Join(timing, ", ")) // W3C Server Timing, in milliseconds
	writeJSON(w, http.StatusCreated, s.opened(sb))
	return nil
}

// templateAlias says whether there is a template of that name.
func (s *server) templateAlias(w http.ResponseWriter, r *request) error {
	name := r.PathValue("alias")
	if !control.HasTemplate(name) {
		return airlock.Errorf(airlock.NotFound, "template '%.100s' not found", name)
	}
	writeJSON(w, http.StatusOK, map[string]any{"templateID": name, "public": true})
	return nil
}

var validKey = regexp.MustCompile(`^[a-z0-9-]{1,255}$`)

// idempotencyKey is what makes a repeated create the same one.
func idempotencyKey(h http.Header) (string, error) {
	key := h.Get("Idempotency-Key")
	if key != "" && !validKey.MatchString(key) {
		return "", airlock.Invalidf("Idempotency-Key", "use 1 to 255 small letters, digits and hyphens", "Idempotency-Key is %.40q", key)
	}
	return key, nil
}

// openedBody is what a client needs to use a sandbox.
type openedBody struct {
	SandboxID   string `json:"sandboxID"`
	TemplateID  string `json:"templateID"`
	ClientID    string `json:"clientID"`
	EnvdVersion string `json:"envdVersion"`
	AccessToken string `json:"envdAccessToken"`
	Domain      string `json:"domain,omitempty"`

	TrafficToken string `json:"trafficAccessToken,omitempty"` // opens its ports if they are not open to all
}

func (s *server) opened(sb airlock.Sandbox) openedBody {
	return openedBody{sb.ID, sb.TemplateID, clientID, envdVersion, sb.AccessToken, s.Domain, sb.TrafficToken}
}

// listedBody is a sandbox in a list.
type listedBody struct {
	SandboxID   string            `json:"sandboxID"`
	TemplateID  string            `json:"templateID"`
	ClientID    string            `json:"clientID"`
	StartedAt   time.Time         `json:"startedAt"`
	EndAt       time.Time         `json:"endAt"`
	State       string            `json:"state"`
	CPUCount    int               `json:"cpuCount"` // whole, as E2B has it; limits.cpus is exact
	MemoryMB    int               `json:"memoryMB"`
	DiskSizeMB  int               `json:"diskSizeMB"`
	EnvdVersion string            `json:"envdVersion"`
	Metadata    map[string]string `json:"metadata"`
	Limits      airlock.Limits    `json:"limits"`
	// NetworkBytes is how many bytes it has sent and received.
	NetworkBytes int64 `json:"networkBytes"`
}

func listed(sb airlock.Sandbox) listedBody {
	if sb.Metadata == nil {
		sb.Metadata = map[string]string{}
	}
	return listedBody{
		SandboxID: sb.ID, TemplateID: sb.TemplateID, ClientID: clientID, StartedAt: sb.StartedAt, EndAt: sb.EndAt, State: "running",
		CPUCount: int(math.Ceil(sb.Limits.CPUs)), MemoryMB: sb.Limits.MemoryMB, DiskSizeMB: sb.Limits.DiskMB, EnvdVersion: envdVersion,
		Metadata: sb.Metadata, Limits: sb.Limits, NetworkBytes: sb.NetworkBytes,
	}
}

// detailBody is a sandbox by itself.
type detailBody struct {
	listedBody
	AccessToken   string      `json:"envdAccessToken"`
	Domain        string      `json:"domain,omitempty"`
	AllowInternet *bool       `json:"allowInternetAccess"`
	Network       networkBody `json:"network"`
	Lifecycle     struct {
		OnTimeout  string `json:"onTimeout"`
		AutoResume bool   `json:"autoResume"`
	} `json:"lifecycle"`
}

func (s *server) detail(sb airlock.Sandbox) detailBody {
	d := detailBody{listedBody: listed(sb), AccessToken: sb.AccessToken, Domain: s.Domain, AllowInternet: sb.Network.AllowInternet}
	d.Network = networkBody{
		AllowOut: sb.Network.AllowOut, DenyOut: sb.Network.DenyOut, AllowPublicTraffic: sb.Network.AllowPublicTraffic,
		MaskRequestHost: sb.Network.MaskRequestHost, HTTPSPorts: sb.Network.HTTPSPorts, Rules: hidden(sb.Network.Rules), EgressProxy: hiddenProxy(sb.Network.EgressProxy),
	}
	d.Lifecycle.OnTimeout = "kill"
	return d
}

func (r *request) sandboxID() (string, error) {
	id := baseID(r.PathValue("id"))
	if !airlock.ValidSandboxID(id) {
		return "", airlock.Errorf(airlock.NotFound, "Sandbox %.60q doesn't exist or you don't have access to it", r.PathValue("id"))
	}
	return id, nil
}

func (s *server) info(w http.ResponseWriter, r *request) error {
	id, err := r.sandboxID()
	if err != nil {
		return err
	}
	sb, err := s.Sandboxes.Get(r.Context(), r.caller, id)
	if err != nil {
		return err
	}
	writeJSON(w, http.StatusOK, s.detail(sb))
	return nil
}

func (s *server) kill(w http.ResponseWriter, r *request) error {
	id, err := r.sandboxID()
	if err != nil {
		return err
	}
	if err := s.Sandboxes.Kill(r.Context(), r.caller, id); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func (s *server) setTimeout(w http.ResponseWriter, r *request) error {
	id, err := r.sandboxID()
	if err != nil {
		return err
	}
	var body struct {
		Timeout *int64 `json:"timeout"`
	}
	if err := readJSON(w, r, &body); err != nil {
		return err
	}
	if body.Timeout == nil {
		return airlock.Invalidf("timeout", "give seconds from now", "timeout is missing")
	}
	var d time.Duration // 0 or less is now
	if *body.Timeout > 0 {
		if d, err = lifetime(*body.Timeout); err != nil {
			return err
		}
	}
	if _, err := s.Sandboxes.SetTimeout(r.Context(), r.caller, id, d); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

// setNetwork replaces all that a sandbox asks for of its way out: what is not
// given is cleared.
func (s *server) setNetwork(w http.ResponseWriter, r *request) error {
	id, err := r.sandboxID()
	if err != nil {
		return err
	}
	var body struct {
		networkBody
		AllowInternet *bool `json:"allow_internet_access"`
	}
	if err := readJSON(w, r, &body); err != nil {
		return err
	}
	for field, given := range map[string]bool{
		"allowPublicTraffic": body.AllowPublicTraffic != nil, "maskRequestHost": body.MaskRequestHost != "", "httpsPorts": body.HTTPSPorts != nil,
	} {
		if given {
			return airlock.Invalidf(field, "give it when you make the sandbox", "%s is not of the way out, and cannot be changed", field)
		}
	}
	n, err := body.network(body.AllowInternet)
	if err != nil {
		return err
	}
	if err := s.Sandboxes.SetNetwork(r.Context(), r.caller, id, n); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func (s *server) refresh(w http.ResponseWriter, r *request) error {
	id, err := r.sandboxID()
	if err != nil {
		return err
	}
	body := struct {
		Duration int64 `json:"duration"`
	}{defaultTimeoutV1}
	if err := readJSON(w, r, &body); err != nil {
		return err
	}
	if body.Duration < 1 || body.Duration > maxRefresh {
		return airlock.Invalidf("duration", fmt.Sprintf("give seconds from 1 to %d", maxRefresh), "duration is %d", body.Duration)
	}
	if _, err := s.Sandboxes.Extend(r.Context(), r.caller, id, time.Duration(body.Duration)*time.Second); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func (s *server) connectV1(w http.ResponseWriter, r *request) error { return s.connect(w, r, 0) }

func (s *server) connectV2(w http.ResponseWriter, r *request) error {
	return s.connect(w, r, defaultTimeoutV2)
}

// connect finds a running sandbox again. Its life is only ever made longer.
func (s *server) connect(w http.ResponseWriter, r *request, defaultTimeout int64) error {
	id, err := r.sandboxID()
	if err != nil {
		return err
	}
	body := struct {
		Timeout int64 `json:"timeout"`
	}{defaultTimeout}
	if err := readJSON(w, r, &body); err != nil {
		return err
	}
	d, err := lifetime(body.Timeout)
	if err != nil {
		return err
	}
	sb, err := s.Sandboxes.Connect(r.Context(), r.caller, id, d)
	if err != nil {
		return err
	}
	writeJSON(w, http.StatusOK, s.opened(sb))
	return nil
}
