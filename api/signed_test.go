package api_test

import (
	"crypto/sha256"
	"encoding/base64"
	"net/url"
	"strings"
	"testing"
)

// TestSignedURL is a fetch of what the SDK's uploadUrl and downloadUrl make
// with E2B_SANDBOX_URL: it names no sandbox.
func TestSignedURL(t *testing.T) {
	w := newWorld(t)
	_, _ = w.create(`{"templateID":"base"}`) // another sandbox, to be passed by
	id, token := w.create(`{"templateID":"base"}`)
	sign := func(path, op, token, expiration string) string {
		text := path + ":" + op + "::" + token
		if expiration != "" {
			text += ":" + expiration
		}
		sum := sha256.Sum256([]byte(text))
		q := url.Values{"path": {path}, "signature": {"v1_" + base64.RawStdEncoding.EncodeToString(sum[:])}}
		if expiration != "" {
			q.Set("signature_expiration", expiration)
		}
		return "/files?" + q.Encode()
	}
	const odd = "/d/a \"'%\n-é🜁"
	invalid := `{"code":401,"message":"invalid signature"}`
	missing := `{"code":404,"message":"there is no GET /files","error_code":"not_found"}`
	raw := []string{"Content-Type", "application/octet-stream"}
	for _, c := range []struct {
		what, method, path, send string
		header                   []string
		status                   int
		body                     string
	}{
		{"write", "POST", sign("/d/x", "write", token, ""), "hello", raw, 200, `[{"name":"x","path":"/d/x","type":"file"}]`},
		{"read", "GET", sign("/d/x", "read", token, ""), "", nil, 200, "hello"},
		{"read until", "GET", sign("/d/x", "read", token, "99999999999"), "", nil, 200, "hello"},
		{"expired", "GET", sign("/d/x", "read", token, "1"), "", nil, 401, `{"code":401,"message":"signature is already expired"}`},
		{"expiry changed", "GET", strings.Replace(sign("/d/x", "read", token, "1"), "expiration=1", "expiration=99999999999", 1), "", nil, 401, invalid},
		{"write's for read", "GET", sign("/d/x", "write", token, ""), "", nil, 401, invalid},
		{"another path", "GET", strings.Replace(sign("/d/x", "read", token, ""), "%2Fx", "%2Fy", 1), "", nil, 401, invalid},
		{"no token", "GET", sign("/d/x", "read", "", ""), "", nil, 401, invalid},
		{"API key as token", "GET", sign("/d/x", "read", w.client, ""), "", nil, 401, invalid},
		{"no signature", "GET", "/files?path=/d/x", "", nil, 404, missing},
		{"too long", "GET", sign("/"+strings.Repeat("x", 17000), "read", token, ""), "", nil, 404, missing},
		{"not files", "GET", strings.Replace(sign("/d/x", "read", token, ""), "/files", "/envs", 1), "", nil, 404, `{"code":404,"message":"there is no GET /envs","error_code":"not_found"}`},
		{"odd name", "POST", sign(odd, "write", token, ""), "odd", raw, 200, "[{\"name\":\"a \\\"'%\\n-é🜁\",\"path\":\"/d/a \\\"'%\\n-é🜁\",\"type\":\"file\"}]"},
		{"odd name back", "GET", sign(odd, "read", token, ""), "", nil, 200, "odd"},
	} {
		w.do(c.method, c.path, c.send, c.header...).want(t, c.what, c.status, c.body)
	}
	w.as(w.client, "DELETE", "/sandboxes/"+id, "")
	w.do("GET", sign("/d/x", "read", token, ""), "").want(t, "after the kill", 401, invalid)
}
