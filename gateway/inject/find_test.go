package inject

import (
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"math/rand/v2"
	"net/http"
	"strings"
	"testing"
)

func percent(s string) string {
	var b strings.Builder
	for _, c := range []byte(s) {
		fmt.Fprintf(&b, "%%%02x", c)
	}
	return b.String()
}

func unicodes(s string) string {
	var b strings.Builder
	for _, c := range []byte(s) {
		fmt.Fprintf(&b, `\u%04X`, c)
	}
	return b.String()
}

// some encodes every third character.
func some(s string, encode func(string) string) string {
	var b strings.Builder
	for i := range len(s) {
		if i%3 == 0 {
			b.WriteString(encode(s[i : i+1]))
		} else {
			b.WriteByte(s[i])
		}
	}
	return b.String()
}

func lined(s string, width int) string {
	var b strings.Builder
	for len(s) > width {
		b.WriteString(s[:width] + "\r\n")
		s = s[width:]
	}
	return b.String() + s
}

// encodings are the forms in which a placeholder has to be found. None but
// the first has it in it as it is.
var encodings = map[string]func(string) string{
	"raw":             func(s string) string { return s },
	"percent":         percent,
	"percent, upper":  func(s string) string { return strings.ToUpper(percent(s)) },
	"percent, some":   func(s string) string { return some(s, percent) },
	"percent, twice":  func(s string) string { return strings.ReplaceAll(percent(s), "%", "%25") },
	"json":            unicodes,
	"json, some":      func(s string) string { return some(s, unicodes) },
	"json in json":    func(s string) string { return strings.ReplaceAll(unicodes(s), `\`, `\\`) },
	"hex":             func(s string) string { return hex.EncodeToString([]byte(s)) },
	"hex, upper":      func(s string) string { return strings.ToUpper(hex.EncodeToString([]byte(s))) },
	"base64":          func(s string) string { return base64.StdEncoding.EncodeToString([]byte(s)) },
	"base64, one":     func(s string) string { return base64.StdEncoding.EncodeToString([]byte("u" + s + ":")) },
	"base64, two":     func(s string) string { return base64.StdEncoding.EncodeToString([]byte("u:" + s + "  ")) },
	"base64 of url":   func(s string) string { return base64.URLEncoding.EncodeToString([]byte("\xff\xfe\xfd:" + s + "\xff")) },
	"base64, percent": func(s string) string { return percent(base64.StdEncoding.EncodeToString([]byte("me:" + s))) },
	"base64, json":    func(s string) string { return unicodes(base64.StdEncoding.EncodeToString([]byte(s))) },
	"base64, lines":   func(s string) string { return lined(base64.StdEncoding.EncodeToString([]byte("user:"+s)), 30) },
	"hex, percent":    func(s string) string { return percent(hex.EncodeToString([]byte(s))) },
}

func finderOf(placeholders ...string) *finder {
	var secrets []*Secret
	for i, p := range placeholders {
		secrets = append(secrets, &Secret{Name: fmt.Sprint(i), Placeholder: p})
	}
	return newFinder(secrets)
}

func TestFind(t *testing.T) {
	other := NewPlaceholder("other")
	f := finderOf(other, placeholder)
	for name, encode := range encodings {
		text := encode(placeholder)
		if name != "raw" && strings.Contains(text, placeholder) {
			t.Errorf("%s does not encode", name)
		}
		for _, around := range [][2]string{{"", ""}, {"a", "b"}, {`{"key":"`, `"}`}, {Prefix, Prefix}, {"%", "%"}, {`\`, `\`}, {strings.Repeat("x", 5000), "z"}} {
			if s := f.find(around[0] + text + around[1]); s == nil || s.Name != "1" {
				t.Errorf("%s between %.20q is not found", name, around)
			}
		}
	}
	for _, text := range []string{
		"", Prefix, placeholder[:len(placeholder)-1], NewPlaceholder("test"), strings.ToUpper(placeholder[:20]) + placeholder[20:],
		base64.StdEncoding.EncodeToString([]byte(NewPlaceholder("x"))), hex.EncodeToString([]byte(Prefix + strings.Repeat("a", 60))),
		strings.Repeat("%", 300), strings.Repeat(`\u00`, 300), strings.Repeat(`\`, 301), strings.Repeat(prefixDigits, 30),
	} {
		if s := f.find(text); s != nil {
			t.Errorf("%q is taken for the placeholder of %s", text, s.Name)
		}
	}
}

func TestUnescape(t *testing.T) {
	for in, out := range map[string]string{
		"a%62c": "abc", "%6": "%6", "%": "%", "%zz": "%zz", "%%61": "%a", `\u0061\x62`: "ab", `\u00`: `\u00`, `\u0100`: `\u0100`,
		`\\u0061`: `\u0061`, `\n`: "", "a\r\nb": "ab", `\q`: `\q`, `\`: `\`, `\\`: `\`,
	} {
		want(t, fmt.Sprintf("unescape(%q)", in), unescape(in), out)
	}
}

// A form of a placeholder is found between any texts, and nothing else is.
func FuzzFind(f *testing.F) {
	for i := range encodings {
		f.Add("before", i, "behind")
	}
	find := finderOf(placeholder)
	f.Fuzz(func(t *testing.T, before, name, behind string) {
		encode := encodings[name]
		if encode == nil {
			encode = func(string) string { return name }
		} else if find.find(before+encode(placeholder)+behind) == nil {
			t.Errorf("%s is not found between %q and %q", name, before, behind)
		}
		text := before + encode(placeholder) + behind
		there := strings.Contains(text, placeholder) || strings.Contains(strings.ToLower(text), hex.EncodeToString([]byte(placeholder)))
		for _, form := range base64Forms(base64.RawStdEncoding, placeholder) {
			there = there || strings.Contains(text, form)
		}
		if got := find.in(text) != nil; got != there {
			t.Errorf("found in %q: %v", text, got)
		}
	})
}

// header is like what SDKs send.
func header() http.Header {
	h := http.Header{}
	for name, v := range map[string]string{
		"Accept": "application/json", "Accept-Language": "en-US,en;q=0.9", "Content-Type": "application/json",
		"User-Agent": "openai-python/1.54.0 (Linux; x86_64) CPython/3.12.3", "X-Stainless-Lang": "python",
		"X-Stainless-Package-Version": "1.54.0", "X-Stainless-Os": "Linux", "X-Stainless-Runtime": "CPython",
		"Traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", "Idempotency-Key": "stainless-python-retry-6f1b0c1e",
		"Cookie": "session=" + strings.Repeat("0123456789abcdef", 30) + "%3D%3D",
	} {
		h.Set(name, v)
	}
	return h
}

func BenchmarkHead(b *testing.B) {
	var secrets []Secret
	for i := range 5 {
		s := bearer()
		s.Name, s.Placeholder = fmt.Sprint(i), NewPlaceholder("b")
		secrets = append(secrets, s)
	}
	w := open(b, false, nil, secrets...)
	r := request(b, "GET", "https://example.com/api/v1/items?limit=100&cursor=eyJpZCI6MTIzNDU2Nzg5MH0%3D", nil)
	r.Header = header()
	x := &exchange{door: w.door, set: w.door.set.Load(), ctx: r.Context(), at: siteOf(r)}
	b.ReportAllocs()
	for b.Loop() {
		p := plan{parts: partsOf(r.URL.RawQuery)}
		x.plan(&p, r)
		if s, _ := x.stray(&p, r); s != nil {
			b.Fatal("found")
		}
	}
}

func BenchmarkBody(b *testing.B) {
	f := finderOf(NewPlaceholder("a"), NewPlaceholder("b"))
	noise := make([]byte, lookBytes)
	for i := range noise {
		noise[i] = " abcdefghijklmnopqrstuvwxyz0123456789_-{}:,\"\n"[rand.IntN(45)]
	}
	text := string(noise)
	b.SetBytes(lookBytes)
	for b.Loop() {
		if f.find(text) != nil {
			b.Fatal("found")
		}
	}
}
