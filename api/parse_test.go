package api

import (
	"encoding/json"
	"math"
	"net/url"
	"strconv"
	"strings"
	"testing"
	"time"

	"airlock.dev/airlock"
	"github.com/google/go-cmp/cmp"
)

func TestSignatureVector(t *testing.T) {
	const token, want = "0tQG31xiMp0IOQfaz9dcwi72L1CPo8e0", "v1_gUtH/s9YCJWgCizjfUxuWfhFE4QSydOWEIIvfLwDr6E"
	if got := signature("hello.txt", "read", "user", token, ""); got != want {
		t.Errorf("signature = %s, want %s", got, want)
	}
	now := time.Unix(1000, 0)
	at := func(seconds, op string) string { return signature("p", op, "", token, seconds) }
	for _, c := range []struct{ what, query, op, want string }{
		{"the vector", "path=hello.txt&username=user&signature=" + url.QueryEscape(want), "read", ""},
		{"another operation", "path=hello.txt&username=user&signature=" + url.QueryEscape(want), "write", "invalid signature"},
		{"another path", "path=hello&username=user&signature=" + url.QueryEscape(want), "read", "invalid signature"},
		{"another user", "path=hello.txt&username=root&signature=" + url.QueryEscape(want), "read", "invalid signature"},
		{"an expiration added", "path=hello.txt&username=user&signature_expiration=9999&signature=" + url.QueryEscape(want), "read", "invalid signature"},
		{"none", "path=hello.txt", "read", "missing signature query parameter"},
		{"in time", "path=p&signature_expiration=1000&signature=" + url.QueryEscape(at("1000", "read")), "read", ""},
		{"late", "path=p&signature_expiration=999&signature=" + url.QueryEscape(at("999", "read")), "read", "signature is already expired"},
		{"an expiration removed", "path=p&signature=" + url.QueryEscape(at("1000", "read")), "read", "invalid signature"},
		{"no number", "path=p&signature_expiration=x&signature=" + url.QueryEscape(at("x", "read")), "read", "invalid signature expiration"},
	} {
		query, err := url.ParseQuery(c.query)
		if err != nil {
			t.Fatal(err)
		}
		got := ""
		if err := checkSignature(query, c.op, token, now); err != nil {
			got = err.Error()
			if airlock.CodeOf(err) != airlock.Unauthenticated {
				t.Errorf("%s: code %s", c.what, airlock.CodeOf(err))
			}
		}
		if got != c.want {
			t.Errorf("%s: %q, want %q", c.what, got, c.want)
		}
	}
	if err := checkSignature(url.Values{"signature": {signature("", "read", "", "", "")}}, "read", "", now); err == nil {
		t.Error("a sandbox without a token was opened")
	}
}

func TestEveryCodeIsMapped(t *testing.T) {
	for _, c := range []airlock.Code{
		airlock.Invalid, airlock.Unauthenticated, airlock.Denied, airlock.NotFound, airlock.Exists, airlock.Conflict, airlock.Exhausted,
		airlock.TooLarge, airlock.NoSpace, airlock.Gone, airlock.Canceled, airlock.Deadline, airlock.Unavailable, airlock.Unimplemented, airlock.Internal,
	} {
		if codes[c].http == 0 || codes[c].rpc == 0 {
			t.Errorf("code %s is not mapped", c)
		}
	}
}

func FuzzMetadata(f *testing.F) {
	for _, s := range []string{"", "a=b", "a%2520b=c%2526d", "a=b&c=d", "=", "&", "%", "a=%zz", "a%3Db=c"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, filter string) {
		pairs, err := parseMetadata(filter)
		if err != nil {
			if airlock.CodeOf(err) != airlock.Invalid {
				t.Fatal(err)
			}
			return
		}
		// What the SDK makes of the pairs is read as the same pairs.
		inner := url.Values{}
		for k, v := range pairs {
			inner.Set(url.PathEscape(k), url.PathEscape(v))
		}
		if strings.ContainsAny(inner.Encode(), " ") {
			t.Fatal("not encoded")
		}
		encodeURIComponent := func(s string) string { return strings.ReplaceAll(url.QueryEscape(s), "+", "%20") }
		inner = url.Values{}
		for k, v := range pairs {
			inner.Set(encodeURIComponent(k), encodeURIComponent(v))
		}
		again, err := parseMetadata(inner.Encode())
		if diff := cmp.Diff(pairs, again); err != nil || diff != "" {
			t.Fatalf("%v (-first +second):\n%s", err, diff)
		}
	})
}

func FuzzPartFile(f *testing.F) {
	for _, s := range []string{`form-data; name="file"; filename="/a/b.txt"`, `form-data; name=file; filename*=UTF-8''%2Fa`, `form-data; name="file"; filename="a\"b"`, `attachment`, `;`, ``} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, disposition string) {
		name, file, err := partFile(disposition)
		if err != nil && (name != "" || file != "" || airlock.CodeOf(err) != airlock.Invalid) {
			t.Fatalf("%q %q %v", name, file, err)
		}
	})
}

func TestPartFile(t *testing.T) {
	for _, c := range []struct{ in, name, file string }{
		{`form-data; name="file"; filename="/home/user/dir/a b.txt"`, "file", "/home/user/dir/a b.txt"},
		{`form-data; name="file"; filename="é/日本"`, "file", "é/日本"},
		{`form-data; name="file"; filename="../../etc/passwd"`, "file", "../../etc/passwd"}, // the guest resolves it, as the user
		{`form-data; name="file"; filename*=UTF-8''%2Fa%20b`, "file", "/a b"},
		{`form-data; name="file"`, "file", ""},
	} {
		if name, file, err := partFile(c.in); err != nil || name != c.name || file != c.file {
			t.Errorf("%s: %q %q %v", c.in, name, file, err)
		}
	}
}

func FuzzSignature(f *testing.F) {
	f.Add("hello.txt", "user", "", "v1_x")
	f.Add("p", "", "1000", "")
	f.Fuzz(func(t *testing.T, path, user, expiration, given string) {
		const token = "0tQG31xiMp0IOQfaz9dcwi72L1CPo8e0"
		query := url.Values{"path": {path}, "username": {user}, "signature_expiration": {expiration}, "signature": {given}}
		if checkSignature(query, "read", token, time.Unix(1000, 0)) == nil && given != signature(path, "read", user, token, expiration) {
			t.Fatal("a signature was accepted that is not ours")
		}
		query.Set("signature", signature(path, "read", user, token, expiration))
		until, perr := strconv.ParseInt(expiration, 10, 64)
		good := expiration == "" || perr == nil && until >= 1000
		if err := checkSignature(query, "read", token, time.Unix(1000, 0)); (err == nil) != good {
			t.Fatalf("our own signature: %v", err)
		}
	})
}

func FuzzCreateBody(f *testing.F) {
	for _, s := range []string{
		`{"templateID":"base","timeout":60,"metadata":{"a":"b"},"envVars":{"K":"V"}}`,
		`{"templateID":"base","network":{"allowOut":["*.example.com"],"denyOut":["0.0.0.0/0"],"rules":{}}}`,
		`{"templateID":"base","network":{"rules":{"*.example.com":[{"transform":{"headers":{"Authorization":"x"}}}],"EXAMPLE.com":[{}]}}}`,
		`{"templateID":"base","limits":{"cpus":0.5}}`, `[]`, `{`, `null`, `{"templateID":1}`,
	} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, text string) {
		var body createBody
		if err := decodeJSON([]byte(text), &body); err != nil {
			if airlock.CodeOf(err) != airlock.Invalid {
				t.Fatal(err)
			}
			return
		}
		req, err := body.request(defaultTimeoutV2)
		if err != nil {
			if code := airlock.CodeOf(err); code != airlock.Invalid && code != airlock.Unimplemented {
				t.Fatal(err)
			}
			return
		}
		l := req.Limits.WithDefaults(airlock.DefaultLimits)
		if req.Template == "" || req.Timeout <= 0 || req.Timeout > 24*time.Hour || l.Validate() != nil || math.IsNaN(l.CPUs) {
			t.Fatalf("accepted %+v", req)
		}
		if _, err := json.Marshal(req); err != nil {
			t.Fatal(err)
		}
	})
}
