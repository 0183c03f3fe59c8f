// Package client talks to an Airlock server over its wire API, which is E2B's:
// JSON over HTTP for sandboxes and files, Connect for processes. It is what
// the airlock command uses, and small enough to be read before it is used
// elsewhere.
//
// A Client is for many goroutines. Errors of the server are of type *Error and
// carry an *airlock.Error. Start reading at New.
package client

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"connectrpc.com/connect"

	"airlock.dev/airlock"
	"airlock.dev/airlock/api/envd"
)

// Options say where the server is and who asks.
type Options struct {
	URL    string // such as https://airlock.example.org:8443
	APIKey string // sent with every request of the control plane
	Socket string // path of a unix socket; instead of URL
}

// Client is a connection to a server.
type Client struct {
	base string
	key  string
	http *http.Client
	// http1 is for connections that are upgraded, which HTTP/2 has not.
	http1 *http.Client
}

// New returns a client. It does not connect yet.
func New(o Options) (*Client, error) {
	t := &http.Transport{
		DisableCompression:  true, // files are passed on as they are
		MaxIdleConnsPerHost: 16,
		IdleConnTimeout:     30 * time.Second,
		TLSHandshakeTimeout: 10 * time.Second,
		ForceAttemptHTTP2:   true,
		Proxy:               http.ProxyFromEnvironment,
	}
	c := &Client{base: strings.TrimRight(o.URL, "/"), key: o.APIKey, http: &http.Client{Transport: t, CheckRedirect: noRedirect}}
	if o.Socket != "" {
		c.base = "http://airlock.localhost"
		t.Proxy = nil
		t.DialContext = func(ctx context.Context, _, _ string) (net.Conn, error) {
			var d net.Dialer
			return d.DialContext(ctx, "unix", o.Socket)
		}
		c.http1 = c.http // no TLS, so HTTP/1.1 already
		return c, nil
	}
	u, err := url.Parse(c.base)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" || u.RawQuery != "" {
		return nil, airlock.Invalidf("url", "give a URL such as http://127.0.0.1:3000", "%q is no server's URL", o.URL)
	}
	// Not a clone of t, which has HTTP/2 set up by then.
	one := &http.Transport{TLSHandshakeTimeout: t.TLSHandshakeTimeout, IdleConnTimeout: t.IdleConnTimeout, Proxy: t.Proxy, Protocols: new(http.Protocols)}
	one.Protocols.SetHTTP1(true)
	c.http1 = &http.Client{Transport: one, CheckRedirect: noRedirect}
	return c, nil
}

// noRedirect keeps keys from being sent to wherever a server points.
func noRedirect(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }

// Error is what a server answered instead of doing as asked.
type Error struct {
	Status int            // of HTTP
	Coded  *airlock.Error // code, message, hint
}

// Error returns message and hint.
func (e *Error) Error() string { return e.Coded.Error() }

// Unwrap returns the coded error.
func (e *Error) Unwrap() error { return e.Coded }

// wireError is the body of an error.
type wireError struct {
	Code      any    `json:"code"` // a number, or a string of Connect's
	Message   string `json:"message"`
	ErrorCode string `json:"error_code"`
	Field     string `json:"field"`
	Hint      string `json:"hint"`
}

// codeOf is used where a server gives no error_code of its own.
func codeOf(status int) airlock.Code {
	switch status {
	case http.StatusBadRequest, http.StatusUnprocessableEntity, http.StatusMethodNotAllowed:
		return airlock.Invalid
	case http.StatusUnauthorized:
		return airlock.Unauthenticated
	case http.StatusForbidden:
		return airlock.Denied
	case http.StatusNotFound:
		return airlock.NotFound
	case http.StatusConflict:
		return airlock.Conflict
	case http.StatusRequestEntityTooLarge:
		return airlock.TooLarge
	case http.StatusTooManyRequests:
		return airlock.Exhausted
	case http.StatusInsufficientStorage:
		return airlock.NoSpace
	case http.StatusBadGateway:
		return airlock.Gone
	case http.StatusServiceUnavailable:
		return airlock.Unavailable
	case http.StatusNotImplemented:
		return airlock.Unimplemented
	case http.StatusGatewayTimeout, http.StatusRequestTimeout:
		return airlock.Deadline
	}
	return airlock.Internal
}

// maxReply bounds what is read of a JSON answer.
const maxReply = 64 << 20

func errorOf(resp *http.Response) error {
	body, _ := io.ReadAll(io.LimitReader(resp.Body, 1<<20)) // what can be read says enough
	var w wireError
	if json.Unmarshal(body, &w) != nil || w.Message == "" {
		w.Message = fmt.Sprintf("the server answered %s", resp.Status)
	}
	e := &airlock.Error{Code: codeOf(resp.StatusCode), Field: w.Field, Message: w.Message, Hint: w.Hint}
	if w.ErrorCode != "" {
		e.Code = airlock.Code(w.ErrorCode)
	}
	if n, err := strconv.Atoi(resp.Header.Get("Retry-After")); err == nil {
		e.RetryAfter = n
	}
	return &Error{resp.StatusCode, e}
}

// unreachable is an error of the way to the server.
func (c *Client) unreachable(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return ctx.Err()
	}
	var u *url.Error
	if errors.As(err, &u) {
		err = u.Err
	}
	return (&airlock.Error{Code: airlock.Unavailable, Message: "cannot reach the server at " + c.base, Hint: "check that it runs and that its address is right"}).Because(err)
}

// call sends body, if not nil, as JSON and decodes the answer into out, if not nil.
func (c *Client) call(ctx context.Context, method, path string, query url.Values, body, out any) (http.Header, error) {
	var r io.Reader
	if body != nil {
		b, err := json.Marshal(body)
		if err != nil {
			return nil, fmt.Errorf("encode request: %w", err)
		}
		r = bytes.NewReader(b)
	}
	u := c.base + path
	if len(query) > 0 {
		u += "?" + query.Encode()
	}
	req, err := http.NewRequestWithContext(ctx, method, u, r)
	if err != nil {
		return nil, err
	}
	if body != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	if c.key != "" {
		req.Header.Set("X-API-KEY", c.key)
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return nil, c.unreachable(ctx, err)
	}
	defer resp.Body.Close()
	if resp.StatusCode/100 != 2 {
		return nil, errorOf(resp)
	}
	if out == nil {
		return resp.Header, nil
	}
	if err := json.NewDecoder(io.LimitReader(resp.Body, maxReply)).Decode(out); err != nil {
		return nil, airlock.Errorf(airlock.Internal, "the server's answer to %s %s is not as expected", method, path).Because(err)
	}
	return resp.Header, nil
}

// Info is what the server says of a sandbox.
type Info struct {
	ID          string            `json:"sandboxID"`
	TemplateID  string            `json:"templateID,omitempty"`
	Alias       string            `json:"alias,omitempty"`
	State       string            `json:"state,omitempty"`
	StartedAt   time.Time         `json:"startedAt,omitzero"`
	EndAt       time.Time         `json:"endAt,omitzero"`
	Limits      airlock.Limits    `json:"limits,omitzero"`
	Metadata    map[string]string `json:"metadata,omitempty"`
	AccessToken string            `json:"envdAccessToken,omitempty"` // opens its data plane; absent in lists
	// NetworkBytes is how many bytes it has sent and received.
	NetworkBytes int64 `json:"networkBytes,omitempty"`
}

// Template is the name of what it was started from.
func (i Info) Template() string {
	if i.Alias != "" {
		return i.Alias
	}
	return i.TemplateID
}

// CreateRequest asks for a sandbox. Zero values mean the server's defaults.
type CreateRequest struct {
	Template string
	Timeout  time.Duration // rounded up to whole seconds
	Metadata map[string]string
	Env      map[string]string
	Limits   airlock.Limits
	Profile  string // policies that it asks for beside its team's: offline, packages or internet; "" is internet
	Policy   string // of its own, in Cedar's language; then Profile "" is offline
	Network  *Network
	Secrets  map[string]string // by the variables that its processes get placeholders in: names of the team's secrets
}

// Network is what a sandbox asks for of the network, in E2B's words.
type Network struct {
	AllowOut []string `json:"allowOut,omitempty"` // addresses, networks, names, *.names
	DenyOut  []string `json:"denyOut,omitempty"`  // addresses and networks
}

// createBody is CreateRequest on the wire: E2B's fields and our limits.
type createBody struct {
	TemplateID string            `json:"templateID"`
	Timeout    int64             `json:"timeout,omitempty"`
	Metadata   map[string]string `json:"metadata,omitempty"`
	Env        map[string]string `json:"envVars,omitempty"`
	Limits     *wireLimits       `json:"limits,omitempty"`
	Profile    string            `json:"profile,omitempty"`
	Policy     string            `json:"policy,omitempty"`
	Secrets    map[string]string `json:"secrets,omitempty"`
	Network    *Network          `json:"network,omitempty"`
}

// wireLimits is airlock.Limits without the fields that are not asked for.
type wireLimits struct {
	CPUs        float64 `json:"cpus,omitempty"`
	MemoryMB    int     `json:"memoryMB,omitempty"`
	DiskMB      int     `json:"diskMB,omitempty"`
	Processes   int     `json:"processes,omitempty"`
	OpenFiles   int     `json:"openFiles,omitempty"`
	OutputBytes int64   `json:"outputBytes,omitempty"`
}

func seconds(d time.Duration) int64 { return int64((d + time.Second - 1) / time.Second) }

// Create starts a sandbox and returns when it takes commands.
func (c *Client) Create(ctx context.Context, req CreateRequest) (*Sandbox, error) {
	body := createBody{TemplateID: req.Template, Timeout: seconds(req.Timeout), Metadata: req.Metadata, Env: req.Env, Profile: req.Profile, Policy: req.Policy, Network: req.Network, Secrets: req.Secrets}
	if body.TemplateID == "" {
		body.TemplateID = "base"
	}
	if l := wireLimits(req.Limits); l != (wireLimits{}) {
		body.Limits = &l
	}
	var info Info
	header, err := c.call(ctx, http.MethodPost, "/v2/sandboxes", nil, body, &info)
	if err != nil {
		return nil, err
	}
	s, err := c.open(info)
	if err == nil {
		s.Timing = timing(header.Get("Server-Timing"))
	}
	return s, err
}

// Step is a part of what the server did for a create.
type Step struct {
	Name         string  `json:"step"`
	Milliseconds float64 `json:"milliseconds"`
}

// timing reads a header Server-Timing (W3C) as our servers write it, and passes
// over all else.
func timing(header string) (all []Step) {
	for part := range strings.SplitSeq(header, ", ") {
		name, dur, ok := strings.Cut(part, ";dur=")
		if ms, err := strconv.ParseFloat(dur, 64); ok && err == nil {
			all = append(all, Step{name, ms})
		}
	}
	return all
}

// Get returns a running sandbox.
func (c *Client) Get(ctx context.Context, id string) (*Sandbox, error) {
	var info Info
	if _, err := c.call(ctx, http.MethodGet, "/sandboxes/"+url.PathEscape(id), nil, nil, &info); err != nil {
		return nil, err
	}
	return c.open(info)
}

// maxPages ends a listing whose server never does.
const maxPages = 10_000

// List returns the sandboxes that have all the labels, newest first: every
// page of them.
func (c *Client) List(ctx context.Context, metadata map[string]string) ([]Info, error) {
	query := url.Values{"limit": {"100"}}
	if len(metadata) > 0 {
		var labels []string
		for _, k := range slices.Sorted(maps.Keys(metadata)) {
			labels = append(labels, url.QueryEscape(k)+"="+url.QueryEscape(metadata[k]))
		}
		query.Set("metadata", url.QueryEscape(strings.Join(labels, "&"))) // E2B has it escaped twice over
	}
	var all []Info
	for range maxPages {
		var page []Info
		header, err := c.call(ctx, http.MethodGet, "/v2/sandboxes", query, nil, &page)
		if err != nil {
			return nil, err
		}
		all = append(all, page...)
		token := header.Get("X-Next-Token")
		if token == "" {
			return all, nil
		}
		query.Set("nextToken", token)
	}
	return nil, airlock.Errorf(airlock.Internal, "the server's list of sandboxes has no end")
}

// Kill ends a sandbox.
func (c *Client) Kill(ctx context.Context, id string) error {
	_, err := c.call(ctx, http.MethodDelete, "/sandboxes/"+url.PathEscape(id), nil, nil, nil)
	return err
}

// SetTimeout sets a sandbox's end of life to d from now.
func (c *Client) SetTimeout(ctx context.Context, id string, d time.Duration) error {
	body := map[string]int64{"timeout": seconds(d)}
	_, err := c.call(ctx, http.MethodPost, "/sandboxes/"+url.PathEscape(id)+"/timeout", nil, body, nil)
	return err
}

// LogEntry is one event of a sandbox.
type LogEntry struct {
	Timestamp time.Time         `json:"timestamp"`
	Level     string            `json:"level"`
	Message   string            `json:"message"`
	Fields    map[string]string `json:"fields,omitempty"`
}

const logPage = 1000

// followEvery is how often a log that is followed is asked for news.
const followEvery = 300 * time.Millisecond

// Logs calls each with the events of a sandbox, oldest first. With follow it
// goes on with those that come, until ctx or the sandbox ends.
func (c *Client) Logs(ctx context.Context, id string, follow bool, each func(LogEntry) error) error {
	// The cursor is a time in milliseconds, and events may share one: those
	// of the last millisecond are asked for again and skipped.
	var cursor int64
	seen := 0
	for n := 0; follow || n < maxPages; n++ {
		query := url.Values{"limit": {strconv.Itoa(logPage)}, "direction": {"forward"}}
		if cursor > 0 {
			query.Set("cursor", strconv.FormatInt(cursor, 10))
		}
		var page struct {
			Logs []LogEntry `json:"logs"`
		}
		if _, err := c.call(ctx, http.MethodGet, "/v2/sandboxes/"+url.PathEscape(id)+"/logs", query, nil, &page); err != nil {
			if follow && n > 0 && (ctx.Err() != nil || airlock.CodeOf(err) == airlock.NotFound) {
				return nil
			}
			return err
		}
		fresh := page.Logs[min(seen, len(page.Logs)):]
		for _, e := range fresh {
			if err := each(e); err != nil {
				return err
			}
		}
		if len(page.Logs) < logPage || len(fresh) == 0 {
			if !follow {
				return nil
			}
			select {
			case <-ctx.Done():
				return nil
			case <-time.After(followEvery):
			}
		}
		if len(page.Logs) == 0 {
			continue
		}
		cursor = page.Logs[len(page.Logs)-1].Timestamp.UnixMilli()
		seen = 0
		for i := len(page.Logs) - 1; i >= 0 && page.Logs[i].Timestamp.UnixMilli() == cursor; i-- {
			seen++
		}
	}
	return nil
}

// Key is an API key, without its secret.
type Key struct {
	ID        string       `json:"id"`
	Team      string       `json:"team"`
	Role      airlock.Role `json:"role"`
	Name      string       `json:"name,omitempty"`
	Owner     string       `json:"owner,omitempty"`
	CreatedAt time.Time    `json:"createdAt"`
	Secret    string       `json:"key,omitempty"` // only in the answer to its creation
}

// KeyRequest is what a new key is for.
type KeyRequest struct {
	Team  string       `json:"team"`
	Role  airlock.Role `json:"role"`
	Name  string       `json:"name,omitempty"`
	Owner string       `json:"owner,omitempty"` // the person whose it is
}

// CreateKey makes a key; its Secret is not shown again.
func (c *Client) CreateKey(ctx context.Context, body KeyRequest) (Key, error) {
	var key Key
	_, err := c.call(ctx, http.MethodPost, "/v1/keys", nil, body, &key)
	return key, err
}

// ListKeys returns all keys.
func (c *Client) ListKeys(ctx context.Context) ([]Key, error) {
	query := url.Values{"limit": {"100"}}
	var all []Key
	for range maxPages {
		var page []Key
		header, err := c.call(ctx, http.MethodGet, "/v1/keys", query, nil, &page)
		if err != nil {
			return nil, err
		}
		all = append(all, page...)
		token := header.Get("X-Next-Token")
		if token == "" {
			return all, nil
		}
		query.Set("nextToken", token)
	}
	return nil, airlock.Errorf(airlock.Internal, "the server's list of keys has no end")
}

// RevokeKey makes a key worthless at once.
func (c *Client) RevokeKey(ctx context.Context, id string) error {
	_, err := c.call(ctx, http.MethodDelete, "/v1/keys/"+url.PathEscape(id), nil, nil, nil)
	return err
}

// open returns the way into the sandbox that info describes.
func (c *Client) open(info Info) (*Sandbox, error) {
	if !airlock.ValidSandboxID(info.ID) {
		return nil, airlock.Errorf(airlock.Internal, "the server named a sandbox %.40q", info.ID)
	}
	s := &Sandbox{Info: info, c: c}
	s.process = envd.NewProcessClient(c.http, c.base, connect.WithInterceptors(s))
	return s, nil
}
