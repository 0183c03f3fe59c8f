package api

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httputil"
	"net/netip"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"time"

	"airlock.dev/airlock"
	"airlock.dev/airlock/control"
	"airlock.dev/airlock/keys"
)

// The ports that are not the sandbox's own: E2B's clients find the API of
// processes and files at one, that of the code interpreter at the other. What
// listens there inside is never reached, since it could pose as them.
const (
	envdPort = 49983
	codePort = 49999
)

const (
	idHeader   = "E2b-Sandbox-Id"
	portHeader = "E2b-Sandbox-Port"
)

var portLabel = regexp.MustCompile(`^([0-9]{1,5})-([a-z0-9]+)(-[a-z0-9]+)?$`)

// hostOf returns a host without its port, in lower case.
func hostOf(hostport string) string {
	host := hostport
	if h, _, err := net.SplitHostPort(hostport); err == nil {
		host = h
	}
	return strings.TrimSuffix(strings.ToLower(host), ".")
}

// address decides which plane a request is for, and of which sandbox. On a
// preview host, PORT-ID.DOMAIN, the host alone decides: pages of one sandbox
// must reach neither another one's nor the control plane by headers. Every
// other host goes by the headers. The result is in the headers.
func (s *server) address(r *http.Request) (plane, error) {
	domain, host := hostOf(s.Domain), hostOf(r.Host)
	if label, below := strings.CutSuffix(host, "."+domain); below && domain != "" && label != "api" && label != "sandbox" {
		m := portLabel.FindStringSubmatch(label)
		if m == nil {
			return dataPlane, airlock.Invalidf("Host", "use PORT-ID."+s.Domain+" for a sandbox's port and api."+s.Domain+" for the API", "the host %.80q is none of this server's", host)
		}
		r.Header.Set(portHeader, m[1])
		r.Header.Set(idHeader, m[2])
		return dataPlane, nil
	}
	id, port := r.Header.Get(idHeader), r.Header.Get(portHeader)
	switch {
	case len(r.Header[idHeader]) == 0 && len(r.Header[portHeader]) == 0:
		return controlPlane, nil
	case id == "":
		return dataPlane, airlock.Invalidf(idHeader, "send the header "+idHeader, "the sandbox's id is missing")
	case port == "":
		return dataPlane, badPort()
	}
	return dataPlane, nil
}

func badPort() error {
	return airlock.Invalidf(portHeader, "send the header E2b-Sandbox-Port with a port's number", "the sandbox's port is missing or not a number")
}

func parsePort(text string) (uint16, error) {
	port, err := strconv.ParseUint(text, 10, 16)
	if err != nil || port == 0 {
		return 0, badPort()
	}
	return uint16(port), nil
}

// portClosed is E2B's answer for a port where nothing listens.
func portClosed(w http.ResponseWriter, id string, port uint16, message string) {
	writeJSON(w, http.StatusBadGateway, map[string]any{"sandboxId": id, "message": message, "port": port, "code": http.StatusBadGateway})
}

// trafficToken is the gate of ports that are not open to all.
func (s *server) trafficToken(w http.ResponseWriter, r *http.Request, sb airlock.Sandbox) bool {
	token := r.Header.Get("E2B-Traffic-Access-Token")
	if sb.PublicTraffic() || sameToken(token, sb.TrafficToken) {
		return true
	}
	message := "Sandbox is secured with traffic access token. The token in header 'E2B-Traffic-Access-Token' is wrong"
	if token == "" {
		message = "Sandbox is secured with traffic access token. Header 'E2B-Traffic-Access-Token' is missing"
	}
	s.oursForAll(w)
	writeJSON(w, http.StatusForbidden, map[string]any{"sandboxId": sb.ID, "message": message, "code": http.StatusForbidden})
	return false
}

// proxy passes a request on to a port of the sandbox. What the sandbox
// answers is its own: none of our headers are among it.
func (s *server) proxy(w http.ResponseWriter, r *http.Request, guest *control.Guest, port uint16) {
	sb := guest.Sandbox
	if !s.trafficToken(w, r, sb) {
		return
	}
	if err := guest.MayServe(r.Context(), visitor(sb), port); err != nil {
		s.proxyFailed(w, r, guest, port, err)
		return
	}
	p := httputil.ReverseProxy{
		Transport:      s.ports.of(guest),
		FlushInterval:  -1, // each write at once: event streams, long answers
		ErrorLog:       slog.NewLogLogger(s.Log.Handler(), slog.LevelDebug),
		Rewrite:        func(pr *httputil.ProxyRequest) { rewrite(pr, sb, port) },
		ModifyResponse: hostCookies,
		ErrorHandler: func(w http.ResponseWriter, _ *http.Request, err error) {
			s.oursForAll(w)
			s.proxyFailed(w, r, guest, port, err)
		},
	}
	if r.ProtoMajor == 1 {
		http.NewResponseController(w).EnableFullDuplex() // a server may answer before it has read all
	}
	stop := abortWhenGone(w, guest)
	defer stop()
	p.ServeHTTP(w, r)
}

func rewrite(pr *httputil.ProxyRequest, sb airlock.Sandbox, port uint16) {
	number := strconv.Itoa(int(port))
	pr.Out.URL.Scheme, pr.Out.URL.Host = "http", net.JoinHostPort("127.0.0.1", number)
	pr.Out.URL.RawQuery = pr.In.URL.RawQuery // as it came, whatever Go thinks of it
	pr.SetXForwarded()
	if mask := sb.Network.MaskRequestHost; mask != "" {
		pr.Out.Host = strings.ReplaceAll(mask, "${PORT}", number)
	}
	// What opens doors of ours is nothing for the sandbox to see.
	for name := range pr.Out.Header {
		switch {
		case name == "X-Api-Key", name == "X-Access-Token", name == "E2b-Traffic-Access-Token", strings.HasPrefix(name, "E2b-Sandbox-"):
			delete(pr.Out.Header, name)
		}
	}
	if keys.Looks(bearer(pr.Out.Header)) { // another bearer's token is the program's own
		pr.Out.Header.Del("Authorization")
	}
	if _, found := pr.Out.Header["User-Agent"]; !found {
		pr.Out.Header["User-Agent"] = nil // else Go adds its own
	}
}

// hostCookies keeps a sandbox from setting cookies for the hosts of others:
// its own stay, for its own host.
func hostCookies(resp *http.Response) error {
	for i, cookie := range resp.Header["Set-Cookie"] {
		parts := strings.Split(cookie, ";")
		kept := parts[:1]
		for _, p := range parts[1:] {
			name, _, _ := strings.Cut(p, "=")
			if !strings.EqualFold(strings.TrimSpace(name), "Domain") {
				kept = append(kept, p)
			}
		}
		resp.Header["Set-Cookie"][i] = strings.Join(kept, ";")
	}
	return nil
}

func (s *server) proxyFailed(w http.ResponseWriter, r *http.Request, guest *control.Guest, port uint16, err error) {
	req := &request{Request: r, guest: guest}
	select {
	case <-guest.Gone():
		err = airlock.Errorf(airlock.Gone, "The sandbox was not found")
	default:
	}
	var coded *airlock.Error
	switch {
	case r.Context().Err() != nil:
		panic(http.ErrAbortHandler) // nobody is left to read it
	case airlock.CodeOf(err) == airlock.PortClosed:
		portClosed(w, guest.Sandbox.ID, port, "The sandbox is running but port is not open")
	case errors.As(err, &coded) && coded.Code != airlock.Canceled: // that one is a reset by the server inside
		s.fail(w, req, err)
	default:
		portClosed(w, guest.Sandbox.ID, port, "The server in the sandbox did not answer in HTTP or broke the connection off")
	}
}

// transports has one http.Transport for each sandbox whose ports were asked
// for, so that a connection is never used for another one. It ends with it.
type transports struct {
	mu  sync.Mutex
	all map[string]*http.Transport // by sandbox
}

func (t *transports) of(g *control.Guest) *http.Transport {
	t.mu.Lock()
	defer t.mu.Unlock()
	id := g.Sandbox.ID
	if tr := t.all[id]; tr != nil {
		return tr
	}
	tr := &http.Transport{
		// No proxy: the address is only a name for the port.
		DialContext: func(ctx context.Context, _, address string) (net.Conn, error) {
			to, err := netip.ParseAddrPort(address)
			if err != nil {
				return nil, err
			}
			return g.DialPort(ctx, visitor(g.Sandbox), to.Port())
		},
		DisableCompression:     true,
		MaxIdleConns:           16, // of the connections that control allows
		MaxIdleConnsPerHost:    8,
		IdleConnTimeout:        15 * time.Second,
		MaxResponseHeaderBytes: 256 << 10,
		ReadBufferSize:         32 << 10,
	}
	t.all[id] = tr
	go func() {
		<-g.Gone()
		t.mu.Lock()
		delete(t.all, id)
		t.mu.Unlock()
		tr.CloseIdleConnections()
	}()
	return tr
}

// visitor is who a connection is from, as policy and trail have it.
func visitor(sb airlock.Sandbox) string {
	if sb.PublicTraffic() {
		return "public"
	}
	return "token"
}

// tcpProtocol is the protocol to which a connection to a port is upgraded:
// bytes as they are, each direction with its own end.
const tcpProtocol = "airlock-tcp"

// forward makes of the request's own connection one to a port, for what is
// not HTTP. It is on the data plane: the sandbox's token opens it.
func (s *server) forward(w http.ResponseWriter, r *request) error {
	port, err := strconv.ParseUint(r.PathValue("port"), 10, 16)
	if err != nil || port == 0 || port == envdPort || port == codePort {
		return airlock.Invalidf("port", fmt.Sprintf("give one from 1 to 65535, but for %d and %d", envdPort, codePort), "%.20q is no port that can be forwarded", r.PathValue("port"))
	}
	if r.ProtoMajor != 1 || !strings.EqualFold(r.Header.Get("Upgrade"), tcpProtocol) {
		w.Header().Set("Upgrade", tcpProtocol)
		return airlock.Invalidf("Upgrade", "send Connection: Upgrade and Upgrade: "+tcpProtocol+" over HTTP/1.1", "this is for connections that are upgraded")
	}
	inside, err := r.guest.DialPort(r.Context(), "token", uint16(port))
	if err != nil {
		return err
	}
	defer inside.Close()
	outside, buffered, err := http.NewResponseController(w).Hijack()
	if err != nil {
		return fmt.Errorf("take over the connection: %w", err)
	}
	defer outside.Close()
	io.WriteString(outside, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: "+tcpProtocol+"\r\n\r\n") // an error shows below
	splice(inside, outside, buffered.Reader)
	return nil
}

// splice copies both ways until both directions have ended or one broke.
// early is what was read of outside already, and reads on.
func splice(inside, outside net.Conn, early *bufio.Reader) {
	done := make(chan error, 2)
	go func() { done <- oneWay(inside, early) }()
	go func() { done <- oneWay(outside, inside) }()
	for range 2 {
		if <-done != nil {
			return // the caller closes both, which ends the other direction
		}
	}
}

// oneWay copies, and passes the end on.
func oneWay(to net.Conn, from io.Reader) error {
	if _, err := io.Copy(to, from); err != nil {
		return err
	}
	if c, ok := to.(interface{ CloseWrite() error }); ok {
		return c.CloseWrite()
	}
	return io.EOF
}
