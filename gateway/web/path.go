package web

import (
	"errors"
	"net/netip"
	"net/url"
	"strconv"
	"strings"
	"unicode/utf8"

	"airlock.dev/airlock/gateway/address"
)

// cleanPath returns the one meaning of an encoded path: decoded, for decisions,
// and encoded, to be sent. Empty and dot segments are resolved in both. A path
// that a server could read in another way is an error, for example one that is
// still encoded when it is decoded.
//
// A slash within a segment (%2F, as in GitLab's "projects/group%2Fproject") is
// such a thing to servers that decode before they split. It is passed on as it
// is, and the decoded path shows it as "%2F": nothing else in a decoded path
// looks like that, for whatever is encoded twice is an error. Read the
// other way (slashed) the path must be as clean.
//
// One such path is in daily use: npm asks for "@scope%2fname". It is sent as
// "@scope/name", which registries take for the same and which has one meaning.
func cleanPath(encoded string) (path, raw string, err error) {
	if encoded == "" {
		return "/", "/", nil
	}
	if encoded[0] != '/' {
		return "", "", errors.New("it does not begin with /")
	}
	segments := strings.Split(encoded[1:], "/")
	var paths, raws []string
	for i, s := range segments {
		last := i == len(segments)-1
		if scope, name, ok := npmScoped(s); ok {
			paths, raws = append(paths, scope, name), append(raws, scope, name)
			continue
		}
		switch s {
		case ".", "..":
			if s == ".." && len(paths) > 0 {
				paths, raws = paths[:len(paths)-1], raws[:len(raws)-1]
			}
			s = ""
		}
		if s == "" {
			if last { // it names a directory, and still does
				paths, raws = append(paths, ""), append(raws, "")
			}
			continue
		}
		p, err := decodeSegment(s)
		if err != nil {
			return "", "", err
		}
		paths, raws = append(paths, p), append(raws, s)
	}
	return "/" + strings.Join(paths, "/"), "/" + strings.Join(raws, "/"), nil
}

func decodeSegment(s string) (string, error) {
	if whole := strings.NewReplacer("%2f", "/", "%2F", "/").Replace(s); whole != s {
		// Each part is a segment to a server that decodes first.
		parts := strings.Split(whole, "/")
		for i, part := range parts {
			p, err := decodeSegment(part)
			if err != nil {
				return "", err
			}
			if part == "" || part == "." || part == ".." {
				return "", errors.New("it has an encoded slash (%2f) beside nothing or a dot segment")
			}
			parts[i] = p
		}
		return strings.Join(parts, "%2F"), nil
	}
	p, err := url.PathUnescape(s)
	if err != nil {
		return "", errors.New("it has a % that is no encoding")
	}
	if !utf8.ValidString(p) {
		return "", errors.New("it is not UTF-8")
	}
	if p == "." || p == ".." {
		return "", errors.New("it has an encoded dot segment")
	}
	for i := 0; i < len(p); i++ {
		switch c := p[i]; {
		case c < 0x20 || c == 0x7f:
			return "", errors.New("it has a control character")
		case c == '\\':
			return "", errors.New(`it has a backslash`)
		case c == ';':
			return "", errors.New("it has a semicolon")
		case c == '%' && i+2 < len(p) && (p[i+1] == 'u' || isHex(p[i+1]) && isHex(p[i+2])):
			return "", errors.New("it is encoded twice")
		}
	}
	if strings.Contains(strings.ToLower(s), "%2e") {
		return "", errors.New("it has an encoded dot (%2e)")
	}
	return p, nil
}

// slashed is how a server that decodes before it splits reads a path.
func slashed(path string) string { return strings.ReplaceAll(path, "%2F", "/") }

func isHex(c byte) bool {
	return '0' <= c && c <= '9' || 'a' <= c && c <= 'f' || 'A' <= c && c <= 'F'
}

func npmScoped(s string) (scope, name string, ok bool) {
	if !strings.HasPrefix(s, "@") {
		return "", "", false
	}
	i := strings.Index(strings.ToLower(s), "%2f")
	if i < 0 {
		return "", "", false
	}
	scope, name = s[:i], s[i+len("%2f"):]
	return scope, name, npmName(scope[1:]) && npmName(name)
}

func npmName(s string) bool {
	for i := 0; i < len(s); i++ {
		switch c := s[i]; {
		case 'a' <= c && c <= 'z', 'A' <= c && c <= 'Z', '0' <= c && c <= '9', c == '-', c == '_', c == '~', c == '.' && i > 0:
		default:
			return false
		}
	}
	return s != ""
}

// parseHost returns the one spelling of a name or an address without port.
func parseHost(s string) (string, error) {
	h, err := address.Parse(s)
	return h.String(), err
}

func isAddress(host string) bool {
	_, err := netip.ParseAddr(host)
	return err == nil
}

// parseAuthority splits what Host, :authority and CONNECT say. The port is 0
// where there is none.
func parseAuthority(s string) (host string, port uint16, err error) {
	name := s
	if i := strings.LastIndexByte(s, ':'); i >= 0 && i > strings.LastIndexByte(s, ']') {
		name = s[:i]
		n, err := strconv.ParseUint(s[i+1:], 10, 16)
		if err != nil || n == 0 || s[i+1] == '+' || s[i+1] == '0' {
			return "", 0, errors.New("its port is not a number from 1 to 65535")
		}
		port = uint16(n)
	}
	if strings.Contains(name, ":") && !strings.HasPrefix(name, "[") {
		return "", 0, errors.New("an IPv6 address has brackets there")
	}
	host, err = parseHost(name)
	return host, port, err
}

// authority is the inverse of parseAuthority, less a port that is the scheme's own.
func authority(scheme, host string, port uint16) string {
	if strings.Contains(host, ":") {
		host = "[" + host + "]"
	}
	if port == defaultPort(scheme) {
		return host
	}
	return host + ":" + strconv.Itoa(int(port))
}

func defaultPort(scheme string) uint16 {
	if scheme == "https" {
		return 443
	}
	return 80
}
