package inject

import (
	"net/http"
	"strings"
)

// hideLeast is how long a value is at least that is hidden in answers: shorter
// ones are no credentials, and would be found by chance.
const hideLeast = 12

// Hide wraps a RoundTripper that sets values which the sandbox is not to see:
// what comes back is scrubbed of those that values returns for a request, as it
// is of secrets. A scheme such as Bearer before a value is not a part of it.
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
		if scheme, rest, ok := strings.Cut(v, " "); ok && !strings.ContainsAny(scheme, "=:;,") {
			v = strings.TrimSpace(rest)
		}
		if len(v) >= hideLeast {
			scrub.add(needles(v))
		}
	}
	if len(scrub.needles) == 0 {
		return h.next.RoundTrip(r)
	}
	x := &exchange{door: h.door, ctx: r.Context(), at: siteOf(r), sent: []*Secret{{Name: "network.rules", Scope: Scope{Upgrade: true}}}, scrub: &scrub}
	out := *r
	out.Header = r.Header.Clone()
	whole(out.Header)
	res, err := h.next.RoundTrip(&out)
	if err != nil {
		return nil, silence(err)
	}
	if denied := x.answer(res); denied != nil {
		res.Body.Close()
		return nil, denied
	}
	return res, nil
}
