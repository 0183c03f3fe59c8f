package api

import (
	"fmt"
	"maps"
	"net/textproto"
	"slices"
	"strings"

	"golang.org/x/net/http/httpguts"

	"airlock.dev/airlock"
	"airlock.dev/airlock/gateway/inject"
	"airlock.dev/airlock/policy"
)

// Bounds of network.rules. All but the bytes are E2B's.
const (
	maxRuleHosts   = 10
	maxRules       = 1 // of one host
	maxRuleHeaders = 20
	maxRuleBytes   = 8 << 10 // of all names and values together
)

// hiddenValue stands for the value of a header in replies. It is no value.
const hiddenValue = "(hidden)"

// ofTheConnection are headers that say how a request is to be read, or where it
// goes, and those that say how it is answered: of a part of an answer, or one that
// is compressed, not all can be searched for secrets.
var ofTheConnection = append([]string{"Connection", "Content-Length", "Expect", "Host", "Keep-Alive", "Te", "Trailer", "Transfer-Encoding", "Upgrade"}, inject.OfTheAnswer...)

// rules reads network.rules. No error has a value in it.
func rules(body map[string][]ruleBody) ([]airlock.HeaderRule, error) {
	const field = "network.rules"
	if len(body) > maxRuleHosts {
		return nil, airlock.Invalidf(field, fmt.Sprintf("use at most %d", maxRuleHosts), "%s has %d domains", field, len(body))
	}
	var all []airlock.HeaderRule
	bytes := 0
	for _, host := range slices.Sorted(maps.Keys(body)) {
		bare, wild := strings.CutPrefix(host, "*.")
		name, err := policy.HostName(bare)
		if err != nil || isAddress(name) {
			return nil, airlock.Invalidf(field, "give domains such as api.example.com and *.example.com", "%s has the domain %.60q", field, host)
		}
		if wild {
			name = "*." + name
		}
		if slices.ContainsFunc(all, func(r airlock.HeaderRule) bool { return r.Host == name }) {
			return nil, airlock.Invalidf(field, "name each domain once", "%s has %.60q twice", field, name)
		}
		if len(body[host]) > maxRules {
			return nil, airlock.Invalidf(field, "put all headers into one", "%s has %d rules for %s", field, len(body[host]), name)
		}
		rule := airlock.HeaderRule{Host: name}
		for _, b := range body[host] {
			if b.Transform == nil || len(b.Transform.Headers) == 0 {
				continue
			}
			if len(b.Transform.Headers) > maxRuleHeaders {
				return nil, airlock.Invalidf(field, fmt.Sprintf("use at most %d", maxRuleHeaders), "%s has %d headers for %s", field, len(b.Transform.Headers), name)
			}
			rule.Headers = map[string]string{}
			for key, value := range b.Transform.Headers {
				canonical := textproto.CanonicalMIMEHeaderKey(key)
				switch _, twice := rule.Headers[canonical]; {
				case !httpguts.ValidHeaderFieldName(key) || len(key) > maxKey:
					return nil, airlock.Invalidf(field, "use names such as Authorization", "%s has the header %.60q", field, key)
				case twice:
					return nil, airlock.Invalidf(field, "name each header once", "%s has the header %s twice for %s", field, canonical, name)
				case slices.Contains(ofTheConnection, canonical) || strings.HasPrefix(canonical, "Proxy-"):
					return nil, airlock.Invalidf(field, "leave it to the connection", "%s has the header %s, which says how a request is read, where it goes or how it is answered", field, canonical)
				case !httpguts.ValidHeaderFieldValue(value):
					return nil, airlock.Invalidf(field, "use a value of one line without control characters", "%s has a value for the header %s that no header has", field, canonical)
				case value == hiddenValue:
					return nil, airlock.Invalidf(field, "give the value itself: replies do not have it", "%s has %q for the header %s", field, hiddenValue, canonical)
				case strings.Contains(value, "${e2b."):
					return nil, unsupported("network.rules with ${e2b.…} in a value")
				}
				rule.Headers[canonical] = value
				bytes += len(canonical) + len(value)
			}
		}
		all = append(all, rule)
	}
	if bytes > maxRuleBytes {
		return nil, airlock.Invalidf(field, fmt.Sprintf("use at most %d", maxRuleBytes), "%s has %d bytes of headers", field, bytes)
	}
	return all, nil
}

// hidden is what replies have of rules: all but the values.
func hidden(all []airlock.HeaderRule) map[string][]ruleBody {
	if all == nil {
		return nil
	}
	body := map[string][]ruleBody{}
	for _, r := range all {
		rule := ruleBody{}
		if r.Headers != nil {
			rule.Transform = &transformBody{Headers: map[string]string{}}
			for name := range r.Headers {
				rule.Transform.Headers[name] = hiddenValue
			}
		}
		body[r.Host] = []ruleBody{rule}
	}
	return body
}
