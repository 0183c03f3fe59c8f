package address

import (
	"net/netip"
	"strings"

	"airlock.dev/airlock"
)

const (
	nameMost  = 253 // characters of a name, without a dot at the end
	labelMost = 63
)

// Host is the name or the address of a host in its one spelling. Two hosts are
// the same if and only if they are ==. The zero Host is none.
type Host struct {
	name string
	addr netip.Addr
}

// Addr returns the address, if h is one: it has no zone, and an IPv4 address
// that is mapped into IPv6 is an IPv4 one.
func (h Host) Addr() (netip.Addr, bool) { return h.addr, h.addr.IsValid() }

// Name returns the name: at most 253 of a-z, 0-9, -, _ and dots, none at the
// end. It is empty for an address.
func (h Host) Name() string { return h.name }

// String returns the name or the address, an IPv6 one without brackets.
func (h Host) String() string {
	if h.addr.IsValid() {
		return h.addr.String()
	}
	return h.name
}

// Parse reads a host as URLs, TLS and DNS name it: a name, an IPv4 address as
// four decimal numbers, or an IPv6 address, in brackets or not. Letters
// become lower case, a name loses the dot at its end, addresses get the
// spelling of RFC 5952. International names come in their ASCII form (xn--).
//
// What some program would read as another host is refused, as is a port. The
// error is airlock.Invalid.
func Parse(s string) (Host, error) {
	inside, bracket := strings.CutPrefix(s, "[")
	if bracket {
		var closed bool
		inside, closed = strings.CutSuffix(inside, "]")
		if !closed || !strings.Contains(inside, ":") {
			return Host{}, invalid(s, "only an IPv6 address is in brackets, and wholly")
		}
	}
	if strings.Contains(inside, ":") {
		addr, err := netip.ParseAddr(inside)
		if err != nil || addr.Zone() != "" {
			return Host{}, invalid(s, "write an IPv6 address without a zone, and the port elsewhere")
		}
		return Host{addr: addr.Unmap()}, nil
	}
	if addr, err := netip.ParseAddr(s); err == nil {
		return Host{addr: addr}, nil
	}
	name := strings.TrimSuffix(s, ".")
	if len(name) == 0 || len(name) > nameMost {
		return Host{}, invalid(s, "a name has 1 to 253 characters")
	}
	lower := []byte(name)
	begin := 0 // of the last label
	for i, c := range lower {
		switch {
		case c >= 'A' && c <= 'Z':
			lower[i] = c + 'a' - 'A'
		case c >= 'a' && c <= 'z' || c >= '0' && c <= '9' || c == '_':
		case c == '-' && i > begin:
		case c == '.' && validLabel(name[begin:i]):
			begin = i + 1
		default:
			return Host{}, invalid(s, "parts of a name are 1 to 63 of a-z, 0-9, _ and -, with no - at either end")
		}
	}
	last := string(lower[begin:])
	if !validLabel(last) {
		return Host{}, invalid(s, "parts of a name are 1 to 63 of a-z, 0-9, _ and -, with no - at either end")
	}
	// 0x7f.1, 2130706433 and 0177.0.0.1 are 127.0.0.1 to inet_aton and to
	// browsers, which look at the last part to see that it is a number.
	if number(last) {
		return Host{}, invalid(s, "write an IPv4 address as four decimal numbers, without zeros in front and a dot at the end")
	}
	return Host{name: string(lower)}, nil
}

func validLabel(s string) bool {
	return len(s) > 0 && len(s) <= labelMost && s[len(s)-1] != '-'
}

// number says whether a label, in lower case, is a number: decimal, octal or hexadecimal.
func number(s string) bool {
	if hex, ok := strings.CutPrefix(s, "0x"); ok {
		return strings.Trim(hex, "0123456789abcdef") == ""
	}
	return strings.Trim(s, "0123456789") == ""
}

func invalid(s, hint string) error {
	return airlock.Invalidf("host", hint, "%.80q is no name or address of a host", s)
}
