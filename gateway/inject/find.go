package inject

import (
	"encoding/base64"
	"encoding/hex"
	"strings"
)

const (
	// rounds is how many encodings of characters, one in the other, are undone.
	rounds = 3
	// overlap is more than any form of a placeholder is long after that many.
	overlap = 4 << 10
)

// finder finds placeholders in text, in every form that findable names. All
// begin with Prefix, so that five searches for what Prefix becomes in each
// form are enough where there is none.
type finder struct {
	shortest int // characters of the shortest placeholder
	secrets  []*Secret
	base64   [][3]string // of the placeholders
}

var (
	prefixBase64 = base64Forms(base64.RawStdEncoding, Prefix)
	prefixHex    = hex.EncodeToString([]byte(Prefix))
	// prefixDigits is a part of prefixHex without letters, which can be of either case.
	prefixDigits   = "7365637265745" // secret_
	prefixDigitsAt = strings.Index(prefixHex, prefixDigits)
)

func newFinder(secrets []*Secret) *finder {
	f := &finder{shortest: placeholderMax}
	for _, s := range secrets {
		if s.Placeholder == "" {
			continue
		}
		f.secrets = append(f.secrets, s)
		f.base64 = append(f.base64, base64Forms(base64.RawStdEncoding, s.Placeholder))
		f.shortest = min(f.shortest, len(s.Placeholder))
	}
	return f
}

// base64Forms returns what all encodings of a text have in common that contain
// s behind a multiple of three bytes, behind one more, and behind two more.
func base64Forms(e *base64.Encoding, s string) (forms [3]string) {
	for i := range forms {
		whole := e.EncodeToString([]byte("\x00\x00"[:i] + s))
		from, to := (8*i+5)/6, (8*(i+len(s)))/6
		forms[i] = whole[min(from, to):to]
	}
	return forms
}

// find returns the secret whose placeholder is in s, as it is or encoded, or nil.
func (f *finder) find(s string) *Secret {
	for round := 0; len(s) >= f.shortest; round++ {
		if secret := f.in(s); secret != nil {
			return secret
		}
		if round == rounds || !escaped(s) {
			break
		}
		plain := unescape(s)
		if len(plain) == len(s) {
			break
		}
		s = plain
	}
	return nil
}

// name is find for names, which are of any case.
func (f *finder) name(s string) *Secret {
	if len(s) < f.shortest {
		return nil
	}
	return f.find(strings.ToLower(s))
}

// in looks for placeholders as they are, in base64 and in hex.
func (f *finder) in(s string) *Secret {
	for i := range indices(s, Prefix) {
		for _, secret := range f.secrets {
			if strings.HasPrefix(s[i:], secret.Placeholder) {
				return secret
			}
		}
	}
	for form, prefix := range prefixBase64 {
		for i := range indices(s, prefix) {
			for n, secret := range f.secrets {
				if strings.HasPrefix(s[i:], f.base64[n][form]) {
					return secret
				}
			}
		}
	}
	for i := range indices(s, prefixDigits) {
		i -= prefixDigitsAt
		for _, secret := range f.secrets {
			if end := i + 2*len(secret.Placeholder); i >= 0 && end <= len(s) && isHexOf(s[i:end], secret.Placeholder) {
				return secret
			}
		}
	}
	return nil
}

// indices yields where sub is in s.
func indices(s, sub string) func(yield func(int) bool) {
	return func(yield func(int) bool) {
		for at := 0; ; at++ {
			i := strings.Index(s[at:], sub)
			if i < 0 || !yield(at+i) {
				return
			}
			at += i
		}
	}
}

func isHexOf(s, plain string) bool {
	for i := range len(plain) {
		if hi, lo := unhex(s[2*i]), unhex(s[2*i+1]); hi < 0 || lo < 0 || byte(hi<<4|lo) != plain[i] {
			return false
		}
	}
	return true
}

func unhex(c byte) int {
	switch {
	case '0' <= c && c <= '9':
		return int(c - '0')
	case 'a' <= c && c <= 'f':
		return int(c-'a') + 10
	case 'A' <= c && c <= 'F':
		return int(c-'A') + 10
	}
	return -1
}

func escaped(s string) bool {
	return strings.IndexByte(s, '%') >= 0 || strings.IndexByte(s, '\\') >= 0 || strings.IndexByte(s, '\n') >= 0 || strings.IndexByte(s, '\r') >= 0
}

// introduces are the characters that unescape does not keep as they are.
var introduces = [256]bool{'%': true, '\\': true, '\r': true, '\n': true}

// unescape undoes %XX, \uXXXX, \xXX and \\, and joins lines. What is no such
// escape stays.
func unescape(s string) string {
	out := make([]byte, 0, len(s))
	for i := 0; i < len(s); {
		from := i
		for i < len(s) && !introduces[s[i]] {
			i++
		}
		if out = append(out, s[from:i]...); i == len(s) {
			break
		}
		c, size := s[i], 1
		switch c {
		case '\r', '\n':
			i++
			continue
		case '%':
			c, size = number(s[i:], 1, 2)
		case '\\':
			if i+1 == len(s) {
				break
			}
			switch s[i+1] {
			case 'u':
				c, size = number(s[i:], 2, 4)
			case 'x':
				c, size = number(s[i:], 2, 2)
			case '\\':
				size = 2
			case 'r', 'n':
				i += 2
				continue
			}
		}
		out = append(out, c)
		i += size
	}
	return string(out)
}

// number reads an escape: hex digits behind its introduction. What is none is
// its first character.
func number(s string, from, digits int) (c byte, size int) {
	if len(s) < from+digits {
		return s[0], 1
	}
	n := 0
	for _, d := range []byte(s[from : from+digits]) {
		v := unhex(d)
		if v < 0 {
			return s[0], 1
		}
		n = n<<4 | v
	}
	if n > 0xff { // of no placeholder
		return s[0], 1
	}
	return byte(n), from + digits
}
