package web

import (
	"net/url"
	"strings"
	"testing"
	"unicode/utf8"
)

func TestCleanPath(t *testing.T) {
	for _, tt := range []struct{ in, path, raw string }{
		{"", "/", "/"}, {"/", "/", "/"}, {"/a", "/a", "/a"}, {"/a/", "/a/", "/a/"},
		{"//a///b//", "/a/b/", "/a/b/"}, {"/a/./b/.", "/a/b/", "/a/b/"}, {"/a/../b", "/b", "/b"},
		{"/a/b/..", "/a/", "/a/"}, {"/../../a", "/a", "/a"}, {"/..", "/", "/"}, {"/...", "/...", "/..."}, {"/.git", "/.git", "/.git"},
		{"/a%20b%7E", "/a b~", "/a%20b%7E"}, {"/%E2%82%AC", "/€", "/%E2%82%AC"}, {"/100%25", "/100%", "/100%25"}, {"/a%2Bb+c", "/a+b+c", "/a%2Bb+c"},
		{"/%3A%40", "/:@", "/%3A%40"}, {"/a%3Fb%23c", "/a?b#c", "/a%3Fb%23c"},
		{"/@types%2fnode", "/@types/node", "/@types/node"}, {"/npm/@a.b%2Fc-d/-/x.tgz", "/npm/@a.b/c-d/-/x.tgz", "/npm/@a.b/c-d/-/x.tgz"},
		{"/projects/group%2fproject/x", "/projects/group%2Fproject/x", "/projects/group%2fproject/x"}, {"/a%2Fb%2fc", "/a%2Fb%2Fc", "/a%2Fb%2fc"},
		{"/a%2fb/../c%2Fd%20e", "/c%2Fd e", "/c%2Fd%20e"}, {"/@a%2fb%2fc", "/@a%2Fb%2Fc", "/@a%2fb%2fc"}, {"/@a%2f.b", "/@a%2F.b", "/@a%2f.b"},
	} {
		path, raw, err := cleanPath(tt.in)
		if err != nil {
			t.Errorf("%s: %v", tt.in, err)
		}
		want(t, tt.in, path, tt.path)
		want(t, tt.in, raw, tt.raw)
	}
	for in, reason := range map[string]string{
		"*": "begin", "a": "begin",
		"/%2f": "slash", "/a%2f%2fb": "slash", "/%2Fa": "slash", "/a%2f": "slash", "/@a%2f": "slash", "/@a%2f..": "dot", "/a%2f../b": "dot", "/a%2f.": "dot", "/..%2fa": "dot",
		"/a%2f%2e%2e": "dot", "/a%2fb;c": "semicolon", "/a%2fb%5cc": "backslash", "/a%2fb%00": "control", "/a%252fb": "twice", "/a%2fb%252f": "twice", "/a%%32fb": "no encoding", "/a%2%66b": "no encoding", "/a%25%32fb": "twice",
		"/%2e": "dot", "/%2e%2E": "dot", "/.%2e/a": "dot", "/a%2eb": "dot",
		"/a;b": "semicolon", "/a%3bb": "semicolon", "/..;/a": "semicolon",
		`/a\b`: "backslash", "/a%5cb": "backslash", "/%00": "control", "/a%0d%0ab": "control", "/%7f": "control",
		"/%ff": "UTF-8", "/%c0%af": "UTF-8", "/%ed%a0%80": "UTF-8",
		"/%252e": "twice", "/%25%32%66": "twice", "/%25u002f": "twice", "/%": "no encoding", "/%zz": "no encoding", "/a%2": "no encoding",
	} {
		_, _, err := cleanPath(in)
		if err == nil || !strings.Contains(err.Error(), reason) {
			t.Errorf("%s: %v, want %s", in, err, reason)
		}
	}
}

func FuzzCleanPath(f *testing.F) {
	for _, s := range []string{"/", "/a/../b//c/.", "/@types%2fnode", "/%2e%2e/a", "/a;b", "/%25252e", "/projects/a%2fb", "/a%2f..", "/a%252fb", "/é", "/a%20b?c#d", "//x/y", "/..;/"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, target string) {
		u, err := url.ParseRequestURI(target)
		if err != nil || u.Scheme != "" || u.Opaque != "" {
			return
		}
		path, raw, err := cleanPath(u.EscapedPath())
		if err != nil {
			return
		}
		// What is sent is what was decided, whoever decodes it, once or twice.
		sent := &url.URL{Path: slashed(path), RawPath: raw}
		if sent.EscapedPath() != raw {
			t.Errorf("%q: %q is sent as %q", target, raw, sent.EscapedPath())
		}
		once, err := url.PathUnescape(raw)
		if err != nil || once != slashed(path) {
			t.Errorf("%q: %q means %q, not %q", target, raw, once, path)
		}
		// Only a slash in a segment is shown as one.
		if n := strings.Count(strings.ToLower(raw), "%2f"); n != strings.Count(path, "%2F") || n != strings.Count(strings.ToLower(path), "%2f") {
			t.Errorf("%q: %q is shown as %q", target, raw, path)
		}
		if twice, err := url.PathUnescape(once); err == nil && twice != once {
			t.Errorf("%q: %q means %q when it is decoded again", target, once, twice)
		}
		if !utf8.ValidString(path) || path[0] != '/' || strings.ContainsAny(path, "\\;\x00\r\n") || strings.Contains(path, "//") {
			t.Errorf("%q: %q is not clean", target, path)
		}
		if strings.Contains(slashed(path), "//") {
			t.Errorf("%q: %q has empty segments for some", target, path)
		}
		for s := range strings.SplitSeq(slashed(path), "/") {
			if s == "." || s == ".." {
				t.Errorf("%q: %q has dots", target, path)
			}
		}
		if p, r, err := cleanPath(raw); err != nil || p != path || r != raw {
			t.Errorf("%q: %q is clean, but becomes %q, %q, %v", target, raw, p, r, err)
		}
	})
}

func TestParseAuthority(t *testing.T) {
	for _, tt := range []struct {
		in, host string
		port     uint16
	}{
		{"one.test", "one.test", 0}, {"One.TEST.", "one.test", 0}, {"one.test:443", "one.test", 443}, {"a_b.test", "a_b.test", 0},
		{"xn--bcher-kva.example", "xn--bcher-kva.example", 0}, {"localhost", "localhost", 0}, {"1.test", "1.test", 0}, {"1e100.net", "1e100.net", 0},
		{"192.0.2.1", "192.0.2.1", 0}, {"192.0.2.1:80", "192.0.2.1", 80}, {"[2001:DB8::1]:80", "2001:db8::1", 80},
		{"[::ffff:192.0.2.1]", "192.0.2.1", 0}, {"0x7f.test", "0x7f.test", 0}, {"x.0x7g", "x.0x7g", 0},
	} {
		host, port, err := parseAuthority(tt.in)
		if err != nil {
			t.Errorf("%s: %v", tt.in, err)
		}
		want(t, tt.in, host, tt.host)
		want(t, tt.in, port, tt.port)
	}
	for _, in := range []string{
		"", ".", "..", "a..b", ".a", "a..", "-a.test", "a-.test", "a b", "a/b", "a@b", "a%41", "bücher.example", "a:b:c", "a:", "a:0", "a:+1", "a:01", "a:65536", "a:-1",
		"127.1", "0x7f.0.0.1", "0x7f000001", "0177.0.0.1", "2130706433", "192.0.2.1.", "192.0.2.01", "192.0.2.256", "1.2.3.4.5", "0x", "a.0x1f",
		"::1", "[::1", "::1]", "[192.0.2.1]", "[fe80::1%eth0]", "[::1]x", "[]", "fe80::1%eth0",
		strings.Repeat("a", 64) + ".test", strings.Repeat("abcdefg.", 32) + "test", "１.1.1.1", "one.test\x00",
	} {
		if host, port, err := parseAuthority(in); err == nil {
			t.Errorf("%q is %q, %d; want an error", in, host, port)
		}
	}
}

func FuzzParseAuthority(f *testing.F) {
	for _, s := range []string{"one.test:443", "[::1]:80", "127.1", "0x7f.1", "a.b.", "[fe80::1%25eth0]"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		host, port, err := parseAuthority(s)
		if err != nil {
			return
		}
		// The canonical form is one, and means itself.
		again, p, err := parseAuthority(authority("", host, max(port, 1)))
		if err != nil || again != host || p != max(port, 1) && max(port, 1) != 80 {
			t.Errorf("%q is %q, which is %q, %d, %v", s, host, again, p, err)
		}
	})
}
