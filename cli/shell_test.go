package cli

import (
	"errors"
	"strings"
	"testing"
	"testing/iotest"
)

func TestEscapes(t *testing.T) {
	for _, c := range []struct {
		typed []string // as it comes
		want  string
		leave bool
	}{
		{[]string{"ls\r"}, "ls\r", false},
		{[]string{"~.x"}, "", true},
		{[]string{"~", "."}, "", true},
		{[]string{"ls\r~."}, "ls\r", true},
		{[]string{"cd ~.\r"}, "cd ~.\r", false},
		{[]string{"cd ~/.x\r"}, "cd ~/.x\r", false},
		{[]string{"~/bin/x\r"}, "~/bin/x\r", false},
		{[]string{"~~."}, "~.", false},
		{[]string{"\x03~."}, "\x03", true},
		{[]string{"a~\r", "~", "\r~."}, "a~\r~\r", true},
	} {
		e := escapes{start: true}
		var got strings.Builder
		leave := false
		for _, part := range c.typed {
			var out []byte
			out, leave = e.filter([]byte(part))
			got.Write(out)
		}
		if got.String() != c.want || leave != c.leave {
			t.Errorf("%q: %q, %v; want %q, %v", c.typed, got.String(), leave, c.want, c.leave)
		}
	}
}

func TestTypeKeys(t *testing.T) {
	gone := errors.New("gone")
	for _, c := range []struct {
		what, typed string
		terminal    bool
		want        string
		leave       bool
	}{
		{"a pipe ends with Ctrl-D", "exit 3\n", false, "exit 3\n\x04", false},
		{"a pipe has no escape", "~.", false, "~.\x04", false},
		{"a terminal hangs up", "ls\r", true, "ls\r", true},
		{"a terminal is left", "~.ls", true, "", true},
	} {
		var got strings.Builder
		leave := typeKeys(iotest.OneByteReader(strings.NewReader(c.typed)), c.terminal, func(keys []byte) error {
			if strings.HasSuffix(got.String(), "\x04") {
				return gone // the program has ended
			}
			got.Write(keys)
			return nil
		})
		if got.String() != c.want || leave != c.leave {
			t.Errorf("%s: %q, %v", c.what, got.String(), leave)
		}
	}
}

func TestParseForward(t *testing.T) {
	for text, want := range map[string][2]uint16{"80": {80, 80}, "80:8080": {80, 8080}, "80:0": {80, 0}, "65535": {65535, 65535}} {
		if port, local, err := parseForward(text); port != want[0] || local != want[1] || err != nil {
			t.Errorf("%s: %d, %d, %v", text, port, local, err)
		}
	}
	for _, text := range []string{"", "0", "x", "80:", "80:x", "65536", "80:65536", "-1", "80:80:80", ":80"} {
		if _, _, err := parseForward(text); err == nil {
			t.Errorf("%q is taken", text)
		}
	}
}

func TestDomainNames(t *testing.T) {
	for name, good := range map[string]bool{
		"airlock.localhost": true, "sandbox.example.org": true, "a.b:8443": true, "A-1.example": true,
		"localhost": false, "127.0.0.1": false, "a..b": false, "-a.b": false, "a.b:": false, "a.b:0": false, "a.b/c": false, "*.a.b": false, "a b.c": false, "": false,
	} {
		if domainName.MatchString(name) != good {
			t.Errorf("%q: %v", name, !good)
		}
	}
}
