package inject

import (
	"bytes"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"html"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"unicode/utf16"
)

// encodedLeast is how many characters an encoded form of a value has at
// least: a shorter one would be found everywhere by chance.
const encodedLeast = 6

// forms returns the texts that a value is known by in answers.
func forms(value string) []string {
	all := []string{value}
	add := func(s string) {
		if len(s) >= encodedLeast && !slices.Contains(all, s) {
			all = append(all, s)
		}
	}
	for _, e := range []*base64.Encoding{base64.RawStdEncoding, base64.RawURLEncoding} {
		for _, s := range base64Forms(e, value) {
			add(s)
		}
	}
	add(hex.EncodeToString([]byte(value)))
	add(strings.ToUpper(hex.EncodeToString([]byte(value))))

	query := url.QueryEscape(value)
	spaced := strings.ReplaceAll(query, "+", "%20")
	inPath := strings.TrimPrefix((&url.URL{Path: "/" + value}).EscapedPath(), "/")
	for _, s := range []string{query, spaced, component(value), url.PathEscape(value), inPath} {
		for _, s := range []string{s, strings.ReplaceAll(s, "%2F", "/")} {
			add(s)
			add(lowerPercent(s))
		}
	}
	for _, s := range []string{jsonText(value, false), jsonText(value, true)} {
		add(s)
		slashed := strings.ReplaceAll(s, "/", `\/`)
		add(slashed)
		add(asciiText(s))
		add(asciiText(slashed))
	}
	if len(value) >= encodedLeast { // each of its characters or bytes
		var escaped [4]strings.Builder
		for _, c := range utf16.Encode([]rune(value)) {
			fmt.Fprintf(&escaped[0], `\u%04x`, c)
			fmt.Fprintf(&escaped[1], `\u%04X`, c)
		}
		for _, c := range []byte(value) {
			fmt.Fprintf(&escaped[2], "%%%02x", c)
			fmt.Fprintf(&escaped[3], "%%%02X", c)
		}
		for i := range escaped {
			add(escaped[i].String())
		}
	}
	add(html.EscapeString(value))
	add(strings.NewReplacer("&#39;", "&#x27;", "&#34;", "&quot;").Replace(html.EscapeString(value)))
	return all
}

// component encodes as JavaScript's encodeURIComponent does.
func component(s string) string {
	return strings.NewReplacer("+", "%20", "%21", "!", "%27", "'", "%28", "(", "%29", ")", "%2A", "*").Replace(url.QueryEscape(s))
}

func lowerPercent(s string) string {
	out := []byte(s)
	for i := 0; i+2 < len(out); i++ {
		if out[i] == '%' {
			copy(out[i:], bytes.ToLower(out[i:i+3]))
			i += 2
		}
	}
	return string(out)
}

// jsonText is s within a JSON string.
func jsonText(s string, escapeHTML bool) string {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(escapeHTML)
	if err := e.Encode(s); err != nil {
		panic(err) // a string is encoded
	}
	return strings.TrimSuffix(strings.TrimPrefix(b.String(), `"`), "\"\n")
}

// asciiText is a JSON text with escapes in place of what is not ASCII.
func asciiText(s string) string {
	var b strings.Builder
	for _, r := range s {
		switch {
		case r < 0x80:
			b.WriteRune(r)
		case r < 0x10000:
			fmt.Fprintf(&b, `\u%04x`, r)
		default:
			r -= 0x10000
			fmt.Fprintf(&b, `\u%04x\u%04x`, 0xd800+r>>10, 0xdc00+r&0x3ff)
		}
	}
	return b.String()
}

// needle is one form, with what a search needs that goes on in the next piece.
type needle struct {
	form string
	text []byte // the same
	// border[n] is the length of the longest text that text[:n] both begins
	// and ends with and that is shorter.
	border []int32
}

func newNeedle(s string) *needle {
	n := &needle{form: s, text: []byte(s), border: make([]int32, len(s)+1)}
	for i, k := 1, int32(0); i < len(s); i++ {
		for k > 0 && s[k] != s[i] {
			k = n.border[k]
		}
		if s[k] == s[i] {
			k++
		}
		n.border[i+1] = k
	}
	return n
}

// scan goes on in data at from, where the last state characters may begin the
// needle. It reports the ends of all its occurrences and returns the state at
// the end of data.
func (n *needle) scan(data []byte, from, state int, found func(end int)) int {
	size := len(n.text)
	for i := from; i < len(data); {
		if state == 0 {
			// A fast search for what is whole, and the rest for what is not.
			if at := bytes.Index(data[i:], n.text); at >= 0 {
				i += at + size
				found(i)
				state = int(n.border[size])
				continue
			}
			i = max(i, len(data)-size+1)
		}
		for ; i < len(data); i++ {
			for state > 0 && n.text[state] != data[i] {
				state = int(n.border[state])
			}
			if n.text[state] == data[i] {
				state++
			}
			if state == size {
				found(i + 1)
				state = int(n.border[size])
			} else if state == 0 && len(data)-i > size {
				i++
				break // to the fast search
			}
		}
	}
	return state
}

type span struct{ from, to int }

// scrubber replaces each character of each occurrence of its needles by an
// asterisk, so that lengths stay. It is for one request.
type scrubber struct {
	needles []*needle
	states  []int
	spans   []span
}

// needles are those of a value.
func needles(value string) (all []*needle) {
	for _, form := range forms(value) {
		all = append(all, newNeedle(form))
	}
	return all
}

func (s *scrubber) add(needles []*needle) {
	s.needles = append(s.needles, needles...)
	s.states = make([]int, len(s.needles))
}

// feed scrubs data, which was seen before up to from. It returns how much of
// it is done: what follows could be the beginning of an occurrence.
func (s *scrubber) feed(data []byte, from int) (done int) {
	s.spans = s.spans[:0]
	held := 0
	for i, n := range s.needles {
		s.states[i] = n.scan(data, from, s.states[i], func(end int) {
			s.spans = append(s.spans, span{end - len(n.text), end})
		})
		held = max(held, s.states[i])
	}
	for _, span := range s.spans { // after all have looked
		for i := span.from; i < span.to; i++ {
			data[i] = '*'
		}
	}
	return len(data) - held
}

// text returns s without values, for texts that are whole.
func (s *scrubber) text(text string) string {
	hit := false
	for _, n := range s.needles {
		hit = hit || strings.Contains(text, n.form)
	}
	if !hit {
		return text
	}
	data := []byte(text)
	var whole scrubber
	whole.add(s.needles)
	whole.feed(data, 0)
	return string(data)
}

// header scrubs a header or trailers in place.
func (s *scrubber) header(h http.Header) {
	for name, values := range h {
		if name == "Content-Length" { // a number, which a short value could be in
			continue
		}
		lower := strings.ToLower(name)
		if slices.ContainsFunc(s.needles, func(n *needle) bool {
			return len(n.form) >= encodedLeast && len(n.form) <= len(lower) && strings.Contains(lower, strings.ToLower(n.form))
		}) {
			delete(h, name)
			continue
		}
		for i, v := range values {
			values[i] = s.text(v)
		}
	}
}
