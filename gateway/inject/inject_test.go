package inject

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"context"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"html"
	"io"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/textproto"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"airlock.dev/airlock"
	"airlock.dev/airlock/gateway/web"
)

// seen answers with what it got, in a header that no value is searched in.
func seen(w http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body)
	text, _ := json.Marshal([]string{r.Host, r.URL.RequestURI(), r.Header.Get("Authorization"), r.Header.Get("X-Api-Key"), r.Header.Get("Range") + r.Header.Get("If-Range") + r.Header.Get("Accept-Encoding"), string(body)})
	// Turned around, so that it is not scrubbed and can be compared.
	io.WriteString(w, reversed(string(text)))
}

func reversed(s string) string {
	r := []rune(s)
	for i, j := 0, len(r)-1; i < j; i, j = i+1, j-1 {
		r[i], r[j] = r[j], r[i]
	}
	return string(r)
}

// saw is what upstream saw of a request.
func (w *world) saw(r *http.Request) (host, uri, authorization, key, ranges, body string) {
	w.t.Helper()
	res := w.do(r)
	defer res.Body.Close()
	text, err := io.ReadAll(res.Body)
	must(w.t, err)
	var parts []string
	must(w.t, json.Unmarshal([]byte(reversed(string(text))), &parts))
	return parts[0], parts[1], parts[2], parts[3], parts[4], parts[5]
}

func TestSwap(t *testing.T) {
	key := Secret{Name: "key", Placeholder: NewPlaceholder("key"), Value: "k&=1", Scope: Scope{
		Host: "example.com", Methods: []string{"GET"}, Path: "/key", Place: Place{Query: "api key"}}}
	raw := Secret{Name: "raw", Placeholder: NewPlaceholder("raw"), Value: "r4w", Scope: Scope{
		Host: "example.com", Methods: []string{"GET"}, Path: "/key", Place: Place{Header: "x-api-key"}}}
	user := Secret{Name: "user", Placeholder: NewPlaceholder("user"), Value: "sk_live", Scope: Scope{
		Host: "example.com", Methods: []string{"GET"}, Path: "/user", Place: Place{Basic: "user"}}}
	password := Secret{Name: "password", Placeholder: NewPlaceholder("password"), Value: "p:w", Scope: Scope{
		Host: "example.com", Methods: []string{"GET"}, Path: "/o/{repo}/info/refs", Place: Place{Basic: "password", Other: "x-access-token"}}}
	basic := func(s string) string { return "basic " + base64.StdEncoding.EncodeToString([]byte(s)) }
	protocols(t, func(t *testing.T, h2 bool) {
		w := open(t, h2, seen, bearer(), key, raw, user, password)
		for _, c := range []struct {
			path, authorization, key string // of the request
			uri, sent, sentKey, log  string
		}{
			{"/api/v1/x?a=1&b", "bearer " + placeholder, "", "/api/v1/x?a=1&b", "Bearer " + value, "", "use token GET example.com:443/api/v1/x header Authorization"},
			{"/key?a=%41&api%20key=" + key.Placeholder + "&b=", "", "", "/key?a=%41&api%20key=k%26%3D1&b=", "", "", "use key GET example.com:443/key query api key"},
			{"/key?api+key=" + some(key.Placeholder, percent), "", raw.Placeholder, "/key?api+key=k%26%3D1", "", "r4w", "use key GET example.com:443/key query api key\nuse raw GET example.com:443/key header X-Api-Key"},
			{"/user", basic(user.Placeholder + ":"), "", "/user", "Basic " + basic("sk_live:")[6:], "", "use user GET example.com:443/user basic user"},
			{"/o/r/info/refs", basic("x-access-token:" + password.Placeholder), "", "/o/r/info/refs", "Basic " + basic("x-access-token:p:w")[6:], "", "use password GET example.com:443/o/r/info/refs basic password"},
			{"/elsewhere?q=" + NewPlaceholder("unknown"), "Bearer mine", "", "", "Bearer mine", "", ""},
		} {
			r := request(t, "GET", "https://example.com"+c.path, nil, "Range", "bytes=0-3", "If-Range", "x", "Accept-Encoding", "br")
			if c.authorization != "" {
				r.Header.Set("Authorization", c.authorization)
			}
			if c.key != "" {
				r.Header.Set("X-Api-Key", c.key)
			}
			before := fmt.Sprint(r.Header, r.URL)
			host, uri, authorization, sentKey, ranges, _ := w.saw(r)
			if c.uri == "" {
				c.uri = c.path
			}
			want(t, "host", host, "example.com")
			want(t, "URI", uri, c.uri)
			want(t, "Authorization of "+c.path, authorization, c.sent)
			want(t, "X-Api-Key", sentKey, c.sentKey)
			if c.log != "" {
				want(t, "ranges and encodings", ranges, "identity")
			} else {
				want(t, "ranges and encodings", ranges, "bytes=0-3xbr")
			}
			want(t, "what was recorded", w.took(), c.log)
			want(t, "the request is the caller's, and stays", fmt.Sprint(r.Header, r.URL), before)
		}
	})
}

func TestSwapOnlyWhereAllMatches(t *testing.T) {
	other := bearer()
	other.Name, other.Placeholder, other.Port, other.Methods = "other", NewPlaceholder("other"), 8443, []string{"GET"}
	key := Secret{Name: "key", Placeholder: NewPlaceholder("key"), Value: "k3y", Scope: Scope{
		Host: "example.com", Methods: []string{"GET"}, Path: "/key", Place: Place{Query: "k"}}}
	w := open(t, true, seen, bearer(), other, key)
	for name, c := range map[string]struct {
		method, url, header, value string
		reason                     string
	}{
		"plain http":       {"GET", "http://example.com/api/x", "Authorization", "Bearer " + placeholder, "not https"},
		"another port":     {"GET", "https://example.com:8443/api/x", "Authorization", "Bearer " + placeholder, "another port"},
		"the default port": {"GET", "https://example.com/api/x", "Authorization", "Bearer " + other.Placeholder, "another port"},
		"http at 443":      {"GET", "http://example.com:443/api/x", "Authorization", "Bearer " + placeholder, "not https"},
		"another host":     {"GET", "https://example.org/api/x", "Authorization", "Bearer " + placeholder, "another host"},
		"a host below":     {"GET", "https://a.example.com/api/x", "Authorization", "Bearer " + placeholder, "another host"},
		"another method":   {"DELETE", "https://example.com/api/x", "Authorization", "Bearer " + placeholder, "another method"},
		"another path":     {"GET", "https://example.com/apis/x", "Authorization", "Bearer " + placeholder, "another path"},
		"another prefix":   {"GET", "https://example.com/api/x", "Authorization", "Token " + placeholder, "not where"},
		"no prefix":        {"GET", "https://example.com/api/x", "Authorization", placeholder, "not where"},
		"more behind it":   {"GET", "https://example.com/api/x", "Authorization", "Bearer " + placeholder + ",", "not where"},
		"another header":   {"GET", "https://example.com/api/x", "X-Authorization", "Bearer " + placeholder, "not where"},
		"encoded there":    {"GET", "https://example.com/api/x", "Authorization", "Bearer " + percent(placeholder), "not where"},
		"a query":          {"GET", "https://example.com/api/x?Authorization=" + placeholder, "X", "x", "request's query"},
	} {
		d := w.denied(request(t, c.method, c.url, nil, c.header, c.value))
		if !strings.Contains(d.Reason, c.reason) || !strings.Contains(d.Ask, "https://example.com") {
			t.Errorf("%s: %v", name, d)
		}
		if log := w.took(); !strings.HasPrefix(log, "refused ") {
			t.Errorf("%s: recorded is %q", name, log)
		}
	}
	for _, r := range []*http.Request{
		request(t, "GET", "https://example.com/api/x", nil, "Authorization", "Bearer "+placeholder, "Authorization", "Bearer mine"),
		request(t, "GET", "https://example.com/api/x?q="+placeholder, nil, "Authorization", "Bearer "+placeholder),
		request(t, "GET", "https://example.com/api/"+placeholder, nil, "Authorization", "Bearer "+placeholder),
		request(t, "POST", "https://example.com/api/x", strings.NewReader(placeholder), "Authorization", "Bearer "+placeholder),
		request(t, "GET", "https://example.com/api/x", nil, "Authorization", "Bearer "+placeholder, "X-Again", "Bearer "+placeholder),
		request(t, "GET", "https://example.com/key?k="+key.Placeholder+"&k="+key.Placeholder, nil),
		request(t, "GET", "https://example.com/key?k="+key.Placeholder+"&"+key.Placeholder, nil),
	} {
		w.took()
		w.denied(r)
		log := w.took()
		if r.Body != nil { // which is looked at last
			log = strings.TrimPrefix(log, "use token POST example.com:443/api/x header Authorization\n")
		}
		if !strings.HasPrefix(log, "refused ") || strings.Contains(log, "\n") {
			t.Errorf("in two places: recorded is %q", log)
		}
	}
	want(t, "requests upstream", w.served.Load(), 0)
}

// A placeholder in no declared place goes nowhere, whatever it looks like.
func TestStray(t *testing.T) {
	places := map[string]func(string) *http.Request{
		"path": func(s string) *http.Request {
			return request(t, "GET", "https://other.example.com/"+strings.ReplaceAll(url.PathEscape(s), "%25", "%"), nil)
		},
		"query": func(s string) *http.Request {
			r := request(t, "GET", "http://other.example.com/", nil)
			r.URL.RawQuery = "q=" + s
			return r
		},
		"query, its name": func(s string) *http.Request {
			r := request(t, "GET", "https://other.example.com/", nil)
			r.URL.RawQuery = "x&" + s + "=1"
			return r
		},
		"header X-Data": func(s string) *http.Request {
			return request(t, "GET", "https://other.example.com/", nil, "X-Data", "some "+s)
		},
		"header Cookie": func(s string) *http.Request {
			return request(t, "GET", "https://other.example.com/", nil, "Cookie", "a=b; c="+s)
		},
		"header Authorization": func(s string) *http.Request {
			return request(t, "GET", "https://other.example.com/", nil, "Authorization", "Basic "+s)
		},
		"body, known": func(s string) *http.Request {
			return request(t, "POST", "https://other.example.com/", strings.NewReader(`{"token": "`+s+`"}`))
		},
		"body, chunked": func(s string) *http.Request {
			return request(t, "POST", "https://other.example.com/", io.MultiReader(strings.NewReader(s)))
		},
		"body, byte for byte": func(s string) *http.Request {
			return request(t, "POST", "https://other.example.com/", oneByOne{strings.NewReader("data: " + s + "\n")})
		},
		"body, across reads": func(s string) *http.Request {
			return request(t, "POST", "https://other.example.com/", io.MultiReader(strings.NewReader(strings.Repeat("x", 16<<10-20)+s[:10]), strings.NewReader(s[10:])))
		},
		"body, at its end": func(s string) *http.Request {
			return request(t, "POST", "https://other.example.com/", strings.NewReader(strings.Repeat("x", lookBytes-len(s))+s+strings.Repeat("y", lookBytes)))
		},
		"trailer": func(s string) *http.Request {
			r := request(t, "POST", "https://other.example.com/", io.MultiReader(strings.NewReader("x")))
			r.Trailer = http.Header{"X-Sum": {s}}
			return r
		},
	}
	protocols(t, func(t *testing.T, h2 bool) {
		w := open(t, h2, seen, bearer())
		for _, place := range sorted(places) {
			for _, form := range sorted(encodings) {
				text := encodings[form](placeholder)
				if strings.ContainsAny(text, "\r\n") && !strings.HasPrefix(place, "body") {
					continue // headers and URLs have no lines
				}
				d := w.denied(places[place](text))
				location, _, _ := strings.Cut(place, ",")
				want(t, "in "+place+" as "+form, w.took(), fmt.Sprintf("refused token %s %s %s", map[bool]string{true: "POST", false: "GET"}[strings.HasPrefix(place, "body") || place == "trailer"],
					map[bool]string{true: "other.example.com:80/", false: "other.example.com:443/"}[place == "query"]+pathOf(place, text), location))
				if !strings.Contains(d.Reason, `secret "token"`) || !strings.Contains(d.Ask, "Authorization: Bearer {}") {
					t.Errorf("the denial tells not what to do: %v", d)
				}
			}
		}
		w.denied(request(t, "GET", "https://other.example.com/", nil, placeholder, "x"))
		want(t, "in a header's name", w.took(), "refused token GET other.example.com:443/ header")
		want(t, "requests upstream", w.served.Load(), 0)
	})
}

// pathOf is the decoded path of a request for TestStray.
func pathOf(place, text string) string {
	if place != "path" {
		return ""
	}
	path, err := url.PathUnescape(strings.ReplaceAll(url.PathEscape(text), "%25", "%"))
	if err != nil {
		return err.Error()
	}
	return path
}

type oneByOne struct{ io.Reader }

func (o oneByOne) Read(p []byte) (int, error) { return o.Reader.Read(p[:min(len(p), 1)]) }

// What is behind the first 64 KiB is not looked at, and nothing of a body changes.
func TestBodiesPass(t *testing.T) {
	protocols(t, func(t *testing.T, h2 bool) {
		w := open(t, h2, seen, bearer())
		for _, size := range []int{0, 1, lookBytes - 1, lookBytes, lookBytes + 1, 1 << 20} {
			text := strings.Repeat("0123456789abcde\n", size/16+1)[:size] + placeholder[:20]
			for name, body := range map[string]io.Reader{"known": strings.NewReader(text), "chunked": io.MultiReader(strings.NewReader(text))} {
				_, _, authorization, _, _, got := w.saw(request(t, "POST", "https://example.com/api/x", body, "Authorization", "Bearer "+placeholder))
				want(t, "Authorization", authorization, "Bearer "+value)
				if got != text {
					t.Errorf("a body of %d bytes, %s, changed", len(text), name)
				}
			}
		}
		_, _, _, _, _, got := w.saw(request(t, "POST", "https://other.example.com/", strings.NewReader(strings.Repeat("x", lookBytes)+placeholder)))
		want(t, "the body's length", len(got), lookBytes+len(placeholder))
	})
}

// A sender may wait for the answer before it goes on, and what it says then is
// looked at together with what it said before.
func TestFullDuplex(t *testing.T) {
	var heard bytes.Buffer
	over := make(chan bool)
	w := open(t, true, func(w http.ResponseWriter, r *http.Request) {
		defer close(over)
		buf := make([]byte, 1000)
		for {
			n, err := r.Body.Read(buf)
			if heard.Write(buf[:n]); err != nil {
				return
			}
			w.Write([]byte("got " + string(buf[:n])))
			w.(http.Flusher).Flush()
		}
	}, bearer())
	inner, outer := io.Pipe()
	go outer.Write([]byte("first"))
	res := w.do(request(t, "POST", "https://other.example.com/", inner))
	defer res.Body.Close()
	buf := make([]byte, 9)
	_, err := io.ReadFull(res.Body, buf)
	must(t, err)
	want(t, "the first answer", string(buf), "got first")
	outer.Write([]byte(placeholder[:30]))
	buf = make([]byte, 34)
	_, err = io.ReadFull(res.Body, buf)
	must(t, err)
	go outer.Write([]byte(placeholder[30:]))
	if rest, err := io.ReadAll(res.Body); err == nil {
		t.Errorf("the exchange goes on: %q", rest)
	}
	outer.Close()
	<-over
	want(t, "what upstream heard", heard.String(), "first"+placeholder[:30])
	want(t, "recorded", w.took(), "refused token POST other.example.com:443/ body")
}

// late is a body as a server has it: its trailers are there when it ends.
type late struct {
	r    *http.Request
	said bool
	end  chan bool
}

func (l *late) Read(p []byte) (int, error) {
	if !l.said {
		l.said = true
		return copy(p, "x"), nil
	}
	<-l.end
	l.r.Trailer["X-Sum"] = []string{"sum"}
	return 0, io.EOF
}

func (*late) Close() error { return nil }

func TestTrailersPass(t *testing.T) {
	protocols(t, func(t *testing.T, h2 bool) {
		w := open(t, h2, func(w http.ResponseWriter, r *http.Request) {
			http.NewResponseController(w).EnableFullDuplex()
			r.Body.Read(make([]byte, 1))
			w.WriteHeader(200)
			w.(http.Flusher).Flush()
			io.Copy(io.Discard, r.Body)
			fmt.Fprint(w, r.Trailer)
		}, bearer())
		for _, waits := range []bool{false, true} {
			r := request(t, "POST", "https://other.example.com/", nil)
			r.Trailer = http.Header{"X-Sum": nil}
			body := &late{r: r, end: make(chan bool)}
			r.Body, r.ContentLength = body, -1
			if !waits {
				close(body.end)
			}
			res := w.do(r)
			if waits {
				close(body.end)
			}
			text, err := io.ReadAll(res.Body)
			must(t, err)
			res.Body.Close()
			want(t, "trailers", string(text), "map[X-Sum:[sum]]")
		}
	})
}

func TestUseDecides(t *testing.T) {
	w := open(t, true, seen, bearer())
	ask := func(body io.Reader) *web.Denied {
		return w.denied(request(t, "POST", "https://example.com/api/x", body, "Authorization", "Bearer "+placeholder))
	}
	w.use = &web.Denied{Status: 451, Policies: []string{"p"}, Reason: "not today"}
	want(t, "a denial", ask(nil).Error(), "denied: not today (p)")
	w.use = airlock.Errorf(airlock.Exhausted, "too much")
	want(t, "an error with a code", ask(nil).Error(), "denied: too much")
	w.use = errors.New("internal detail")
	want(t, "an error without", ask(nil).Error(), `denied: the use of secret "token" could not be decided`)
	inner, outer := io.Pipe() // of which nothing comes
	ask(inner)
	outer.Close()
	want(t, "requests upstream", w.served.Load(), 0)
}

func TestAlways(t *testing.T) {
	header := bearer()
	header.Always, header.Placeholder = true, ""
	query := Secret{Name: "query", Value: "q v", Always: true, Scope: Scope{Host: "example.com", Methods: []string{"GET"}, Path: "/query", Place: Place{Query: "key"}}}
	basic := Secret{Name: "basic", Placeholder: NewPlaceholder("basic"), Value: "b4s1c", Always: true, Scope: Scope{Host: "example.com", Methods: []string{"GET"}, Path: "/basic", Place: Place{Basic: "password", Other: "me"}}}
	twin := query
	twin.Name, twin.Value = "twin", "t"
	w := open(t, true, seen, header, query, basic)
	for _, c := range []struct{ url, authorization, uri, sent string }{
		{"https://example.com/api/x", "", "/api/x", "Bearer " + value},
		{"https://example.com/api/x", "Bearer mine", "/api/x", "Bearer " + value},
		{"http://example.com/api/x", "Bearer mine", "/api/x", "Bearer mine"},
		{"https://example.com/other", "", "/other", ""},
		{"https://example.com/query?a=1&key=mine&k%65y=2", "", "/query?a=1&key=q+v", ""},
		{"https://example.com/query", "", "/query?key=q+v", ""},
		{"https://example.com/basic", "Basic " + basic.Placeholder, "/basic", "Basic " + base64.StdEncoding.EncodeToString([]byte("me:b4s1c"))},
	} {
		r := request(t, "GET", c.url, nil)
		if c.authorization != "" {
			r.Header.Set("Authorization", c.authorization)
		}
		_, uri, authorization, _, _, _ := w.saw(r)
		want(t, "URI of "+c.url, uri, c.uri)
		want(t, "Authorization of "+c.url, authorization, c.sent)
	}
	w.denied(request(t, "GET", "https://example.com/other", nil, "Authorization", "Basic "+basic.Placeholder))
	must(t, w.door.Set([]Secret{query, twin}))
	w.denied(request(t, "GET", "https://example.com/query", nil))
}

// same is a transport that wants the very request.
type same struct{ r *http.Request }

func (s *same) RoundTrip(r *http.Request) (*http.Response, error) {
	s.r = r
	return nil, io.EOF
}

func TestWithoutSecretsNothingChanges(t *testing.T) {
	d, err := New(Config{Use: func(context.Context, Use) error { return nil }, Refused: func(context.Context, Use, *web.Denied) {}})
	must(t, err)
	next := new(same)
	r := request(t, "POST", "https://example.com/api/x", strings.NewReader(placeholder), "Authorization", "Bearer "+placeholder)
	d.Wrap(next).RoundTrip(r)
	want(t, "the request", next.r, r)
	d.Close()
}

func TestSetReplaces(t *testing.T) {
	w := open(t, true, seen)
	r := request(t, "GET", "https://example.com/api/x", nil, "Authorization", "Bearer "+placeholder)
	_, _, authorization, _, _, _ := w.saw(r)
	want(t, "without secrets", authorization, "Bearer "+placeholder)
	must(t, w.door.Set([]Secret{bearer()}))
	_, _, authorization, _, _, _ = w.saw(r)
	want(t, "with one", authorization, "Bearer "+value)
	next := bearer()
	next.Value = "rotated"
	must(t, w.door.Set([]Secret{next}))
	_, _, authorization, _, _, _ = w.saw(r)
	want(t, "with another", authorization, "Bearer rotated")
}

// echoed is the value in every form that an upstream may show it in.
func echoed(v string) string {
	j, _ := json.Marshal(map[string]string{"authorization": "Bearer " + v})
	var b strings.Builder
	for _, s := range []string{
		v, v + v, "Bearer " + v, string(j), `{"v":"` + strings.ReplaceAll(asciiText(jsonText(v, false)), "/", `\/`) + `"}`,
		url.QueryEscape(v), url.PathEscape(v), strings.ToLower(url.QueryEscape(v)), component(v), html.EscapeString(v), hex.EncodeToString([]byte(v)),
		base64.StdEncoding.EncodeToString([]byte(v)), base64.StdEncoding.EncodeToString([]byte("u" + v)), base64.URLEncoding.EncodeToString([]byte("me:" + v + "!")),
	} {
		b.WriteString(s + "\n")
	}
	return b.String()
}

func TestEcho(t *testing.T) {
	handlers := map[string]http.HandlerFunc{
		"plain": func(w http.ResponseWriter, r *http.Request) {
			text := echoed(r.Header.Get("Authorization")[7:])
			w.Header().Set("Content-Length", fmt.Sprint(len(text)))
			io.WriteString(w, text)
		},
		"headers": func(w http.ResponseWriter, r *http.Request) {
			v := r.Header.Get("Authorization")[7:]
			h := w.Header()
			h.Set("Location", "https://other.example.com/?t="+url.QueryEscape(v)+"#"+url.PathEscape(v))
			h.Set("Set-Cookie", "t="+base64.RawURLEncoding.EncodeToString([]byte("user:"+v)))
			h.Set("X-Echo", "Bearer "+v)
			h.Set("Link", "</a>; rel=preload; title="+jsonText(v, true))
			w.WriteHeader(302)
		},
		"chunked": func(w http.ResponseWriter, r *http.Request) {
			text := echoed(r.Header.Get("Authorization")[7:])
			for i := 0; i < len(text); i += 7 {
				io.WriteString(w, text[i:min(len(text), i+7)])
				w.(http.Flusher).Flush()
			}
		},
		"trailers": func(w http.ResponseWriter, r *http.Request) {
			v := r.Header.Get("Authorization")[7:]
			w.Header().Set("Trailer", "X-Sum")
			io.WriteString(w, "x")
			w.Header().Set("X-Sum", "Bearer "+v)
			w.Header().Set(http.TrailerPrefix+"X-Late", base64.StdEncoding.EncodeToString([]byte(v)))
		},
		"gzip": func(w http.ResponseWriter, r *http.Request) {
			var b bytes.Buffer
			z := gzip.NewWriter(&b)
			io.WriteString(z, echoed(r.Header.Get("Authorization")[7:]))
			z.Close()
			w.Header().Set("Content-Encoding", "gzip")
			w.Header().Set("Content-Length", fmt.Sprint(b.Len()))
			w.Write(b.Bytes())
		},
		"an error": func(w http.ResponseWriter, r *http.Request) {
			http.Error(w, "bad token "+r.Header.Get("Authorization"), http.StatusUnauthorized)
		},
		"large": func(w http.ResponseWriter, r *http.Request) {
			for i := range 200 {
				io.WriteString(w, strings.Repeat("x", 1000+i)+echoed(r.Header.Get("Authorization")[7:]))
			}
		},
	}
	protocols(t, func(t *testing.T, h2 bool) {
		w := open(t, h2, func(w http.ResponseWriter, r *http.Request) {
			handlers[strings.ReplaceAll(strings.TrimPrefix(r.URL.Path, "/api/"), "_", " ")](w, r)
		}, bearer())
		for _, name := range sorted(handlers) {
			r := request(t, "GET", "https://example.com/api/"+strings.ReplaceAll(name, " ", "_"), nil, "Authorization", "Bearer "+placeholder)
			res := w.do(r)
			want(t, name+": protocol", res.ProtoMajor == 2, h2)
			got := all(t, res)
			hidden(t, got)
			if !strings.Contains(got, "****") {
				t.Errorf("%s: there is nothing where the value was: %.300q", name, got)
			}
			body := got[max(0, strings.LastIndex(got, "]\n")+2):]
			switch name {
			case "plain":
				want(t, "length", int(res.ContentLength), len(body))
				want(t, "length of the answer", len(body), len(echoed(value)))
			case "gzip":
				want(t, "length of what is decoded", len(body), len(echoed(value)))
				want(t, "its encoding and length", res.Header.Get("Content-Encoding")+res.Header.Get("Content-Length"), "")
			}
		}
		// A request without a secret is answered as it is.
		res := w.do(request(t, "GET", "https://example.com/api/plain", nil, "Authorization", "Bearer "+value))
		if got := all(t, res); !strings.Contains(got, value) {
			t.Errorf("an answer was scrubbed without need: %q", got)
		}
	})
}

func TestEarlyHints(t *testing.T) {
	protocols(t, func(t *testing.T, h2 bool) {
		w := open(t, h2, func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Link", "<"+r.Header.Get("Authorization")+">")
			w.WriteHeader(103)
			w.Header().Del("Link")
		}, bearer())
		// As the web passes them on.
		proxy := httptest.NewServer(&httputil.ReverseProxy{
			Transport: w.round,
			Rewrite: func(p *httputil.ProxyRequest) {
				p.Out.URL.Scheme, p.Out.URL.Host, p.Out.Host = "https", "example.com", "example.com"
			},
		})
		defer proxy.Close()
		r := request(t, "GET", proxy.URL+"/api/x", nil, "Authorization", "Bearer "+placeholder)
		var hints []string
		r = r.WithContext(traced(r.Context(), func(code int, h textproto.MIMEHeader) { hints = append(hints, fmt.Sprint(code, h)) }))
		res, err := proxy.Client().Do(r)
		must(t, err)
		res.Body.Close()
		if len(hints) != 1 {
			t.Fatalf("%d early hints", len(hints))
		}
		hidden(t, hints[0])
		want(t, "the hint", hints[0], "103 map[Link:[<Bearer "+strings.Repeat("*", len(value))+">]]")
	})
}

// What could not begin a value goes on at once.
func TestEventsStream(t *testing.T) {
	for _, packed := range []bool{false, true} {
		next := make(chan bool)
		w := open(t, true, func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Type", "text/event-stream")
			var out io.Writer = w
			flush := w.(http.Flusher).Flush
			if packed {
				w.Header().Set("Content-Encoding", "gzip")
				z := gzip.NewWriter(w)
				out, flush = z, func() { z.Flush(); w.(http.Flusher).Flush() }
			}
			for _, event := range []string{"one", r.Header.Get("Authorization"), value[:9], "end"} {
				fmt.Fprintf(out, "data: %s\n\n", event)
				flush()
				<-next
			}
		}, bearer())
		res := w.do(request(t, "GET", "https://example.com/api/x", nil, "Authorization", "Bearer "+placeholder))
		lines := bufio.NewReader(res.Body)
		for _, event := range []string{"one", "Bearer " + strings.Repeat("*", len(value)), value[:9], "end"} {
			line, err := lines.ReadString('\n')
			must(t, err)
			_, err = lines.ReadString('\n')
			must(t, err)
			want(t, "an event", line, "data: "+event+"\n")
			next <- true // only now is there another one
		}
		res.Body.Close()
	}
}

func TestAnswersWithoutBody(t *testing.T) {
	protocols(t, func(t *testing.T, h2 bool) {
		w := open(t, h2, func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("X-Echo", r.Header.Get("Authorization"))
			switch {
			case r.Method == "HEAD":
				w.Header().Set("Content-Length", "1234")
			case r.URL.Path == "/api/304":
				w.Header().Set("Content-Encoding", "br")
				w.WriteHeader(304)
			default:
				w.WriteHeader(204)
			}
		}, bearer())
		for _, c := range []struct {
			method, path string
			status       int
			length       int64
		}{{"HEAD", "/api/x", 200, 1234}, {"GET", "/api/304", 304, 0}, {"GET", "/api/204", 204, 0}} {
			res := w.do(request(t, c.method, "https://example.com"+c.path, nil, "Authorization", "Bearer "+placeholder))
			hidden(t, all(t, res))
			want(t, c.path+": status", res.StatusCode, c.status)
			if c.method == "HEAD" {
				want(t, "length", res.ContentLength, c.length)
			}
		}
	})
}

func TestEncodingsThatCannotBeSearched(t *testing.T) {
	encoding := ""
	w := open(t, true, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Encoding", encoding)
		io.WriteString(w, "not what it says")
	}, bearer())
	r := request(t, "GET", "https://example.com/api/x", nil, "Authorization", "Bearer "+placeholder)
	for _, encoding = range []string{"br", "zstd", "deflate", "gzip, gzip", "identity, br"} {
		w.took()
		d := w.denied(r)
		want(t, encoding+": status", d.Status, 502)
		want(t, encoding+": recorded", w.took(), "use token GET example.com:443/api/x header Authorization\nrefused token GET example.com:443/api/x answer")
	}
	encoding = "gzip"
	res := w.do(r)
	if body, err := io.ReadAll(res.Body); err == nil || len(body) > 0 {
		t.Errorf("what is no gzip is passed on: %q", body)
	}
	res.Body.Close()
}

func TestBomb(t *testing.T) {
	w := open(t, true, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Encoding", "gzip")
		z := gzip.NewWriter(w)
		zeros := make([]byte, 1<<20)
		for range 64 {
			z.Write(zeros)
		}
		z.Close()
	}, bearer())
	res := w.do(request(t, "GET", "https://example.com/api/x", nil, "Authorization", "Bearer "+placeholder))
	defer res.Body.Close()
	n, err := io.Copy(io.Discard, res.Body)
	if !errors.Is(err, errBomb) || n > 20<<20 {
		t.Errorf("%d bytes, and %v", n, err)
	}
}

func TestBrokenAnswerKeepsWhatItHeld(t *testing.T) {
	w := open(t, false, func(w http.ResponseWriter, r *http.Request) {
		v := r.Header.Get("Authorization")[7:]
		w.Header().Set("Content-Length", "1000")
		io.WriteString(w, "before "+v[:len(v)-1])
		w.(http.Flusher).Flush()
		panic(http.ErrAbortHandler)
	}, bearer())
	res := w.do(request(t, "GET", "https://example.com/api/x", nil, "Authorization", "Bearer "+placeholder))
	defer res.Body.Close()
	body, err := io.ReadAll(res.Body)
	if err == nil {
		t.Error("the answer ends as if it were whole")
	}
	want(t, "what came", string(body), "before ")
}

// What is no HTTP is told in the transport's errors, which sandboxes see.
func TestErrorsTellNothing(t *testing.T) {
	for _, first := range []string{"%s\r\n", "HTTP/1.1 200 OK\r\nBearer %s\r\n", "HTTP/1.1 %s OK\r\n", ""} {
		w := open(t, false, func(w http.ResponseWriter, r *http.Request) {
			c, _, err := w.(http.Hijacker).Hijack()
			if err != nil {
				return
			}
			defer c.Close()
			if first != "" {
				fmt.Fprintf(c, first+"\r\n", r.Header.Get("Authorization")[7:])
			}
		}, bearer())
		_, err := w.client.Do(request(t, "GET", "https://example.com/api/x", nil, "Authorization", "Bearer "+placeholder))
		what := "upstream's answer is broken"
		if first == "" {
			what = "EOF"
		}
		if err == nil || !strings.Contains(err.Error(), what) || strings.Contains(err.Error(), "v4lu3") || strings.Contains(err.Error(), "en\\") {
			t.Errorf("the error of %q is %v", first, err)
		}
	}
	w := open(t, false, seen, bearer())
	r := request(t, "GET", "https://example.com/api/x", nil, "Authorization", "Bearer "+placeholder)
	r.URL.Scheme, r.Host = "https", "example.com"
	r.URL.Host = "untrusted.test" // as in the web, the connection has another name
	if _, err := w.client.Do(r); err == nil || !strings.Contains(err.Error(), "certificate") {
		t.Errorf("an error before anything was sent is %v", err)
	}
}

func TestUpgrades(t *testing.T) {
	allowed := bearer()
	allowed.Upgrade = true
	for _, s := range []Secret{bearer(), allowed} {
		w := open(t, false, func(w http.ResponseWriter, r *http.Request) {
			c, _, err := w.(http.Hijacker).Hijack()
			if err != nil {
				return
			}
			defer c.Close()
			fmt.Fprintf(c, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nX-Echo: %s\r\n\r\n", r.Header.Get("Authorization"))
			c.SetDeadline(time.Now().Add(10 * time.Second))
			io.CopyN(c, c, 4)
		}, s)
		ask := func(header ...string) *http.Request {
			return request(t, "GET", "https://example.com/api/x", nil, append(header, "Authorization", "Bearer "+placeholder)...)
		}
		if !s.Upgrade {
			w.denied(ask("Connection", "Upgrade", "Upgrade", "websocket"))
			want(t, "recorded", w.took(), "refused token GET example.com:443/api/x header Upgrade")
			want(t, "requests upstream", w.served.Load(), 0)
			w.denied(ask()) // upstream changes the protocol nevertheless
			continue
		}
		res, err := w.round.RoundTrip(ask("Connection", "Upgrade", "Upgrade", "websocket"))
		must(t, err)
		want(t, "status", res.StatusCode, 101)
		hidden(t, fmt.Sprint(res.Header))
		both := res.Body.(io.ReadWriter)
		io.WriteString(both, "ping")
		got, err := io.ReadAll(both)
		must(t, err)
		want(t, "what came back", string(got), "ping")
		res.Body.Close()
		w.denied(request(t, "GET", "https://example.com/ws?t="+placeholder, nil, "Connection", "Upgrade", "Upgrade", "websocket"))
	}
}

// A secret that a policy puts in goes into the requests that it was permitted
// for, and into no others.
func TestWanted(t *testing.T) {
	var got []string
	server := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { got = append(got, r.Header.Get("Authorization")) }))
	defer server.Close()
	type wantedKey struct{}
	d, err := New(Config{
		Secrets: []Secret{{Name: "key", Value: "valueofthekey", Wanted: true, Scope: Scope{Host: "127.0.0.1", Port: portOfURL(t, server.URL), Methods: []string{"GET"}, Path: "/", Place: Place{Header: "Authorization", Prefix: "Bearer "}}}},
		Use:     func(context.Context, Use) error { return nil },
		Wanted:  func(ctx context.Context, name string) bool { return ctx.Value(wantedKey{}) == name },
		Refused: func(context.Context, Use, *web.Denied) {},
	})
	if err != nil {
		t.Fatal(err)
	}
	rt := d.Wrap(server.Client().Transport)
	for _, ctx := range []context.Context{t.Context(), context.WithValue(t.Context(), wantedKey{}, "key"), context.WithValue(t.Context(), wantedKey{}, "other")} {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, server.URL+"/", nil)
		if err != nil {
			t.Fatal(err)
		}
		res, err := rt.RoundTrip(req)
		if err != nil {
			t.Fatal(err)
		}
		res.Body.Close()
	}
	if want := []string{"", "Bearer valueofthekey", ""}; !slices.Equal(got, want) {
		t.Errorf("upstream got %q, want %q", got, want)
	}
}

func portOfURL(t *testing.T, raw string) uint16 {
	t.Helper()
	u, err := url.Parse(raw)
	if err != nil {
		t.Fatal(err)
	}
	n, err := strconv.ParseUint(u.Port(), 10, 16)
	if err != nil {
		t.Fatal(err)
	}
	return uint16(n)
}

// Values that somebody else sets are hidden in what comes back, too; short ones
// are left, which are found by chance.
func TestHide(t *testing.T) {
	const token = "abcdefghijkl0123"
	server := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("X-Echo", r.Header.Get("Authorization"))
		fmt.Fprintf(w, "%s %s %s %s", r.Header.Get("Authorization"), base64.StdEncoding.EncodeToString([]byte(token)), r.Header.Get("X-Env"), r.Header.Get("Range"))
	}))
	defer server.Close()
	d, err := New(Config{Use: func(context.Context, Use) error { return nil }, Refused: func(context.Context, Use, *web.Denied) {}})
	if err != nil {
		t.Fatal(err)
	}
	set := roundTripper(func(r *http.Request) (*http.Response, error) {
		r = r.Clone(r.Context())
		r.Header.Set("Authorization", "Bearer "+token)
		r.Header.Set("X-Env", "prod")
		return server.Client().Transport.RoundTrip(r)
	})
	rt := d.Hide(set, func(*http.Request) []string { return []string{"Bearer " + token, "prod"} })
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, server.URL+"/", nil)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Range", "bytes=0-3")
	res, err := rt.RoundTrip(req)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	body, err := io.ReadAll(res.Body)
	if err != nil {
		t.Fatal(err)
	}
	got := string(body) + " " + res.Header.Get("X-Echo")
	// The end of base64 has bits of what would follow the value.
	encoded := base64.StdEncoding.EncodeToString([]byte(token))
	if strings.Contains(got, token) || strings.Contains(got, encoded[:8]) || !strings.HasPrefix(got, "Bearer **************** ") || !strings.HasSuffix(got, " prod  Bearer ****************") {
		t.Errorf("got %q", got)
	}
}

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// An answer without a body can have trailers.
func TestTrailersWithoutBody(t *testing.T) {
	protocols(t, func(t *testing.T, h2 bool) {
		w := open(t, h2, func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Trailer", "X-Sum")
			status, _ := strconv.Atoi(r.URL.Query().Get("status"))
			w.WriteHeader(status)
			w.Header().Set("X-Sum", r.Header.Get("Authorization"))
			w.Header().Set(http.TrailerPrefix+"X-Late", r.Header.Get("Authorization"))
		}, bearer())
		for _, c := range []struct {
			method string
			status int
		}{{"GET", 200}, {"GET", 204}, {"GET", 304}, {"HEAD", 200}} {
			got := all(t, w.do(request(t, c.method, fmt.Sprintf("https://example.com/api/x?status=%d", c.status), nil, "Authorization", "Bearer "+placeholder)))
			hidden(t, got)
			if h2 && c.method != "HEAD" && strings.Count(got, "Bearer *") != 2 {
				t.Errorf("%s %d has no trailers: %s", c.method, c.status, got)
			}
		}
	})
}

// What comes before the answer is searched as the answer is, also for values
// that somebody else set, and what went wrong before anything was sent is told.
func TestHideEarly(t *testing.T) {
	const token = "abcdefghijkl0123"
	protocols(t, func(t *testing.T, h2 bool) {
		w := open(t, h2, func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Link", r.Header.Get("X-Api-Key"))
			w.WriteHeader(103)
		})
		set := roundTripper(func(r *http.Request) (*http.Response, error) {
			r = r.Clone(r.Context())
			r.Header.Set("X-Api-Key", token)
			return w.round.RoundTrip(r)
		})
		r := request(t, "GET", "https://example.com/", nil)
		var early []string
		r = r.WithContext(traced(t.Context(), func(_ int, h textproto.MIMEHeader) { early = append(early, h.Get("Link")) }))
		res, err := w.door.Hide(set, func(*http.Request) []string { return []string{token} }).RoundTrip(r)
		must(t, err)
		res.Body.Close()
		want(t, "early", fmt.Sprint(early), "[****************]")
	})
}

func TestCredentials(t *testing.T) {
	pair := base64.StdEncoding.EncodeToString([]byte("robot:correct horse battery"))
	for _, c := range []struct {
		value string
		want  []string
	}{
		{"prod", nil},
		{"abcdefghijkl0123", []string{"abcdefghijkl0123"}},
		{"Bearer abcdefghijkl0123", []string{"abcdefghijkl0123"}},
		{"Bearer abcdefgh", []string{"Bearer abcdefgh"}},
		{"abcdefghijkl0123 extra", []string{"abcdefghijkl0123 extra", "abcdefghijkl0123"}},
		{"session=abcdefghijkl0123; lang=en", []string{"session=abcdefghijkl0123; lang=en", "abcdefghijkl0123"}},
		{"basic " + pair, []string{pair, "robot:correct horse battery", "correct horse battery"}},
	} {
		if got := credentials(c.value); !slices.Equal(got, c.want) {
			t.Errorf("%q: got %q, want %q", c.value, got, c.want)
		}
	}
}
