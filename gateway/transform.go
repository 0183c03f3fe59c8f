package gateway

import (
	"net/http"
	"strings"

	"airlock.dev/airlock/gateway/web"
	"airlock.dev/airlock/gateway/wire"
)

// rules are the headers that a client of the sandbox wants requests to have.
// Their values are secrets that the sandbox does not know.
type rules []wire.Rule

// of returns the one rule for a host: its own, else that with the longest
// ending. Others are not looked at.
func (r rules) of(host string) *wire.Rule {
	var best *wire.Rule
	for i := range r {
		rule := &r[i]
		ending, wild := strings.CutPrefix(rule.Host, "*")
		switch {
		case !wild && rule.Host == host:
			return rule
		case !wild || len(host) <= len(ending) || !strings.HasSuffix(host, ending):
		case best == nil || len(rule.Host) > len(best.Host):
			best = rule
		}
	}
	return best
}

// transform sets the headers of permitted requests. They go out over TLS that
// was ended here and is begun anew with a host that proves its name: never in
// the clear, and never to an address without a name, for rules have none.
//
// What hides secrets in answers is another RoundTripper, around this one.
type transform struct {
	d    *door
	next http.RoundTripper
}

// RoundTrip implements http.RoundTripper.
func (t transform) RoundTrip(r *http.Request) (*http.Response, error) {
	to := web.PermitOf(r.Context()).(*permit).request
	if to.Scheme == "https" {
		if rule := t.d.rules.Load().of(to.Host); rule != nil {
			r = r.WithContext(r.Context()) // a copy, with the same trailer
			r.Header = r.Header.Clone()
			for name, value := range rule.Headers {
				r.Header.Set(name, value)
			}
		}
	}
	return t.next.RoundTrip(r)
}
