package api

import (
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/base64"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"airlock.dev/airlock"
)

type principalKey struct{}

// WithPrincipal returns a context whose requests were authenticated by other
// means, such as the mode of the operator's own socket. They need no API key
// and pass the gates of clients and of operators: who may open that socket
// may do everything on this machine. A request with a key is that key's
// nevertheless, so that an approver can be one there, too.
func WithPrincipal(ctx context.Context, p airlock.Principal) context.Context {
	return context.WithValue(ctx, principalKey{}, p)
}

// The gates of the control plane. Roles do not include each other.

func anyone(*server, *request) error { return nil }

func client(s *server, r *request) error { return s.authenticate(r, airlock.Client) }

func operator(s *server, r *request) error { return s.authenticate(r, airlock.Operator) }

// local is who a request without a key was authenticated as by other means.
func local(r *request) (airlock.Principal, bool) {
	p, ok := r.Context().Value(principalKey{}).(airlock.Principal)
	return p, ok && apiKey(r.Header) == ""
}

func (s *server) authenticate(r *request, role airlock.Role) error {
	if p, ok := local(r); ok {
		r.caller = p
		return nil
	}
	// A missing key is looked up like a wrong one.
	secret := apiKey(r.Header)
	p, err := s.Keys.Authenticate(r.Context(), secret)
	switch {
	case airlock.CodeOf(err) == airlock.Unauthenticated && err != nil && secret == "":
		return airlock.Errorf(airlock.Unauthenticated, "the API key is missing: send it in the header X-API-KEY")
	case err != nil:
		return err
	case p.Role != role:
		return airlock.Errorf(airlock.Denied, "this API key has the role %s and the call needs %s", p.Role, role)
	}
	r.caller = p
	return nil
}

// again says whether the caller of a long request is still who it was.
func (s *server) again(r *request) error {
	if _, ok := local(r); ok {
		return nil
	}
	p, err := s.Keys.Authenticate(r.Context(), apiKey(r.Header))
	if err == nil && p != r.caller {
		err = airlock.Errorf(airlock.Denied, "this API key is another one now")
	}
	return err
}

// apiKey is the key of a request. E2B's command line sends some as a bearer's.
func apiKey(h http.Header) string {
	if key := h.Get("X-API-KEY"); key != "" {
		return key
	}
	return bearer(h)
}

func bearer(h http.Header) string {
	token, found := strings.CutPrefix(h.Get("Authorization"), "Bearer ")
	if !found {
		return ""
	}
	return token
}

// The gates of the data plane.

func accessToken(_ *server, r *request) error {
	if !sameToken(r.Header.Get("X-Access-Token"), r.guest.Sandbox.AccessToken) {
		return airlock.Errorf(airlock.Unauthenticated, "the access token is missing or wrong")
	}
	return nil
}

// sameToken takes the same time for every token; an empty one opens nothing.
func sameToken(got, want string) bool {
	g, w := sha256.Sum256([]byte(got)), sha256.Sum256([]byte(want))
	return subtle.ConstantTimeCompare(g[:], w[:]) == 1 && want != ""
}

func accessTokenOrSignature(s *server, r *request) error {
	if r.Header.Get("X-Access-Token") != "" {
		return accessToken(s, r)
	}
	return checkSignature(r.URL.Query(), operation(r.Method), r.guest.Sandbox.AccessToken, time.Now())
}

// operation is what a signature of a request with this method is for.
func operation(method string) string {
	if method == http.MethodPost {
		return "write"
	}
	return "read"
}

// signature is E2B's: who knows the token may let others read or write one
// path as one user, for a time.
func signature(path, op, user, token, expiration string) string {
	text := path + ":" + op + ":" + user + ":" + token
	if expiration != "" {
		text += ":" + expiration
	}
	sum := sha256.Sum256([]byte(text))
	return "v1_" + base64.RawStdEncoding.EncodeToString(sum[:])
}

// signatureMatches takes the same time for every signature; no token, no match.
func signatureMatches(query url.Values, op, token string) bool {
	want := signature(query.Get("path"), op, query.Get("username"), token, query.Get("signature_expiration"))
	return subtle.ConstantTimeCompare([]byte(query.Get("signature")), []byte(want)) == 1 && token != ""
}

func checkSignature(query url.Values, op, token string, now time.Time) error {
	given, expiration := query.Get("signature"), query.Get("signature_expiration")
	if given == "" {
		return airlock.Errorf(airlock.Unauthenticated, "missing signature query parameter")
	}
	if !signatureMatches(query, op, token) {
		return airlock.Errorf(airlock.Unauthenticated, "invalid signature")
	}
	if expiration == "" {
		return nil
	}
	until, err := strconv.ParseInt(expiration, 10, 64)
	if err != nil {
		return airlock.Errorf(airlock.Unauthenticated, "invalid signature expiration")
	}
	if until < now.Unix() {
		return airlock.Errorf(airlock.Unauthenticated, "signature is already expired")
	}
	return nil
}
