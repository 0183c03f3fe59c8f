package inject

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"html"
	"math/rand/v2"
	"net/url"
	"slices"
	"strings"
	"testing"
)

func TestFormsAreWhatEncodersMake(t *testing.T) {
	all := forms(value)
	contained := func(what, encoded string) {
		if !slices.ContainsFunc(all, func(f string) bool { return strings.Contains(encoded, f) }) {
			t.Errorf("no form is in %s: %q", what, encoded)
		}
	}
	for _, before := range []string{"", "a", "ab", "abc", "user:"} {
		for name, e := range map[string]*base64.Encoding{"base64": base64.StdEncoding, "base64url": base64.URLEncoding} {
			contained(name, e.EncodeToString([]byte(before+value+"tail")))
		}
	}
	j, err := json.Marshal("x" + value)
	must(t, err)
	contained("JSON", string(j))
	contained("a query", url.Values{"k": {value}}.Encode())
	contained("a path", (&url.URL{Path: "/" + value}).EscapedPath())
	contained("HTML", html.EscapeString("<"+value))
	for _, literal := range []string{ // what Python's json, quote and JavaScript's encodeURIComponent make of it
		`"v4lu3+/\"&<\u00e9>=~%41 tok'en\\x"`,
		"v4lu3%2B/%22%26%3C%C3%A9%3E%3D~%2541%20tok%27en%5Cx",
		"v4lu3%2B%2F%22%26%3C%C3%A9%3E%3D~%2541%20tok'en%5Cx",
		"v4lu3%2b%2f%22%26%3c%c3%a9%3e%3d~%2541%20tok%27en%5cx",
		`v4lu3+/&quot;&amp;&lt;é&gt;=~%41 tok&#x27;en\x`,
		`\u0076\u0034\u006c\u0075\u0033\u002b\u002f\u0022\u0026\u003c\u00e9\u003e\u003d\u007e\u0025\u0034\u0031\u0020\u0074\u006f\u006b\u0027\u0065\u006e\u005c\u0078`, // what escapes all
		"%76%34%6C%75%33%2B%2F%22%26%3C%C3%A9%3E%3D%7E%25%34%31%20%74%6F%6B%27%65%6E%5C%78",
	} {
		contained("a literal", literal)
	}
	short := forms("ab")
	want(t, "forms of a short value", strings.Join(short, " "), "ab")
}

// mask is what a scrubber has to do, said simply.
func mask(needles [][]byte, data []byte) []byte {
	out := bytes.Clone(data)
	for _, n := range needles {
		for i := 0; i+len(n) <= len(data); i++ {
			if bytes.Equal(data[i:i+len(n)], n) {
				copy(out[i:], strings.Repeat("*", len(n)))
			}
		}
	}
	return out
}

// pieces scrubs data that comes in pieces, and returns what went out at which
// time, less what would be held back without need.
func pieces(t testing.TB, needles [][]byte, data []byte, size func() int) []byte {
	s := new(scrubber)
	for _, n := range needles {
		s.add([]*needle{newNeedle(string(n))})
	}
	var out, held []byte
	for at := 0; at < len(data); {
		n := min(max(size(), 1), len(data)-at)
		from := len(held)
		held = append(held, data[at:at+n]...)
		done := s.feed(held, from)
		out, held = append(out, held[:done]...), bytes.Clone(held[done:])
		at += n
		if len(held) > 0 && !slices.ContainsFunc(needles, func(n []byte) bool {
			return len(held) < len(n) && bytes.HasPrefix(n, data[at-len(held):at])
		}) {
			t.Fatalf("%q is held back, which begins nothing", held)
		}
	}
	return append(out, held...)
}

func TestScrubPieces(t *testing.T) {
	for _, c := range []struct{ needles, in, out string }{
		{"secret", "a secret is secret", "a ****** is ******"},
		{"secret", "secre", "secre"},
		{"secret", "sesecretsecret", "se************"},
		{"aab", "aaaab aab", "aa*** ***"},
		{"aa", "aaa a aa", "*** a **"},
		{"abab", "ababab", "******"},
		{"abcd bc", "xbcabcdy", "x**" + "****" + "y"},
		{"abcd bcde", "abcde", "*****"},
		{"a", "banana", "b*n*n*"},
	} {
		var needles [][]byte
		for n := range strings.FieldsSeq(c.needles) {
			needles = append(needles, []byte(n))
		}
		for size := 1; size <= len(c.in); size++ {
			want(t, c.in, string(pieces(t, needles, []byte(c.in), func() int { return size })), c.out)
		}
	}
}

// However an answer is cut, the sandbox gets what it would if it were whole.
func FuzzScrub(f *testing.F) {
	f.Add([]byte("secret"), []byte("cret"), []byte("a secret is secret"), uint64(1))
	f.Add([]byte("aab"), []byte("aa"), []byte("aaaaabaab"), uint64(2))
	f.Add([]byte("abab"), []byte("b"), bytes.Repeat([]byte("ab"), 40), uint64(3))
	f.Fuzz(func(t *testing.T, one, two, data []byte, seed uint64) {
		if len(one) == 0 || len(two) == 0 {
			return
		}
		needles := [][]byte{one, two}
		random := rand.New(rand.NewPCG(seed, 1))
		whole := mask(needles, data)
		for _, most := range []int{1, 3, 1 + len(one), 1 << 20} {
			if got := pieces(t, needles, data, func() int { return 1 + random.IntN(most) }); !bytes.Equal(got, whole) {
				t.Fatalf("%q of %q and %q in pieces of up to %d: %q, not %q", data, one, two, most, got, whole)
			}
		}
	})
}

func BenchmarkScrub(b *testing.B) {
	s := new(scrubber)
	s.add(needles("ghp_" + strings.Repeat("aB3dE6gH9", 4)))
	data := make([]byte, 32<<10)
	for i := range data {
		data[i] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"[rand.IntN(62)]
	}
	b.SetBytes(int64(len(data)))
	for b.Loop() {
		s.feed(data, 0)
	}
}
