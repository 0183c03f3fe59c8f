package inject

import (
	"encoding/base64"
	"net/http"
	"strings"
)

// hideLeast is how long a value is at least that is hidden in answers: shorter
// ones are no credentials, and would be found by chance.
const hideLeast = 12

// Hide wraps a RoundTripper that sets values which the sandbox is not to see:
// what comes back is scrubbed of those that values returns for a request, as it
// is of secrets. See credentials for what of a value that is.
func (d *Door) Hide(next http.RoundTripper, values func(*http.Request) []string) http.RoundTripper {
	return &hider{d, next, values}
}

type hider struct {
	door   *Door
	next   http.RoundTripper
	values func(*http.Request) []string
}

// RoundTrip implements http.RoundTripper.
func (h *hider) RoundTrip(r *http.Request) (*http.Response, error) {
	var scrub scrubber
	for _, v := range h.values(r) {
		for _, c := range credentials(v) {
			scrub.add(needles(c))
		}
	}
	if len(scrub.needles) == 0 {
		return h.next.RoundTrip(r)
	}
	x := &exchange{door: h.door, ctx: r.Context(), at: siteOf(r), sent: []*Secret{{Name: "network.rules", Scope: Scope{Upgrade: true}}}, scrub: &scrub}
	out := r.WithContext(x.traced(r.Context()))
	out.Header = r.Header.Clone()
	whole(out.Header)
	res, err := h.next.RoundTrip(out)
	if err != nil {
		if x.sending.Load() {
			err = silence(err)
		}
		return nil, err
	}
	if denied := x.answer(res); denied != nil {
		res.Body.Close()
		return nil, denied
	}
	return res, nil
}

// credentials are what of a header's value is hidden. A scheme such as Bearer is
// no part of it; the parts of a list, as of a Cookie, are hidden by themselves
// too, and so are a user and a password of Basic authentication.
func credentials(value string) (all []string) {
	add := func(s string) {
		if len(s) >= hideLeast {
			all = append(all, s)
		}
	}
	scheme, rest, ok := strings.Cut(value, " ")
	rest = strings.TrimSpace(rest)
	if scheme := len(scheme) < hideLeast && !strings.ContainsAny(scheme, "=:;,"); ok && scheme && len(rest) >= hideLeast {
		value = rest
	}
	add(value)
	for _, part := range strings.FieldsFunc(value, func(r rune) bool { return strings.ContainsRune(` ;,="`, r) }) {
		if part != value {
			add(part)
		}
	}
	if pair, err := base64.StdEncoding.DecodeString(rest); err == nil && strings.EqualFold(scheme, "Basic") {
		user, password, _ := strings.Cut(string(pair), ":")
		for _, part := range []string{string(pair), user, password} {
			add(part)
		}
	}
	return all
}
