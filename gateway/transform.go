package gateway

import (
	"net/http"
	"slices"
	"strings"

	"airlock.dev/airlock/gateway/inject"
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
// What hides the values in answers is another RoundTripper, around this one.
type transform struct {
	d    *door
	next http.RoundTripper
}

// RoundTrip implements http.RoundTripper.
func (t transform) RoundTrip(r *http.Request) (*http.Response, error) {
	return t.next.RoundTrip(t.d.rules.Load().set(r, web.PermitOf(r.Context()).(*permit).request))
}

// set returns a request with what the rules say for where it was decided to go.
func (r rules) set(req *http.Request, to web.Request) *http.Request {
	rule := r.at(to)
	if rule == nil {
		return req
	}
	out := req.WithContext(req.Context()) // a copy, with the same trailer
	out.Header = req.Header.Clone()
	for name, value := range rule.Headers {
		if !slices.Contains(inject.OfTheAnswer, name) { // sandboxes of before may have such a rule
			out.Header.Set(name, value)
		}
	}
	return out
}

// at is the rule for a permitted request, or nil.
func (r rules) at(to web.Request) *wire.Rule {
	if to.Scheme != "https" {
		return nil
	}
	return r.of(to.Host)
}

// ruled are the values that are set in a request, to be hidden in its answer.
func (d *door) ruled(r *http.Request) (values []string) {
	if rule := d.rules.Load().at(web.PermitOf(r.Context()).(*permit).request); rule != nil {
		for _, v := range rule.Headers {
			values = append(values, v)
		}
	}
	return values
}
