package address

import (
	"math/big"
	"net"
	"net/netip"
	"net/url"
	"strings"
	"testing"

	"airlock.dev/airlock"
)

func TestParse(t *testing.T) {
	long := strings.Repeat("a", 63)
	name253 := strings.Join([]string{long, long, long, long[:61]}, ".")
	for _, c := range []struct{ in, name, addr string }{
		{"example.com", "example.com", ""},
		{"EXAMPLE.Com.", "example.com", ""},
		{"localhost", "localhost", ""},
		{"xn--bcher-kva.example", "xn--bcher-kva.example", ""},
		{"_dmarc.example.com", "_dmarc.example.com", ""},
		{"a_b.example", "a_b.example", ""},
		{"3com.example", "3com.example", ""},
		{"1.2.3.4.example", "1.2.3.4.example", ""},
		{"4.3.2.1.in-addr.arpa", "4.3.2.1.in-addr.arpa", ""},
		{"169.254.169.254.nip.io", "169.254.169.254.nip.io", ""},
		{"0x7f.example", "0x7f.example", ""},
		{"1.2.3.4x", "1.2.3.4x", ""}, {"1.2.3.0xg", "1.2.3.0xg", ""}, {"1e3", "1e3", ""}, {"0b1", "0b1", ""},
		{long + ".x", long + ".x", ""},
		{name253, name253, ""}, {name253 + ".", name253, ""},

		{"169.254.169.254", "", "169.254.169.254"}, {"127.0.0.1", "", "127.0.0.1"}, {"10.0.0.1", "", "10.0.0.1"},
		{"0.0.0.0", "", "0.0.0.0"}, {"255.255.255.255", "", "255.255.255.255"},
		{"::1", "", "::1"}, {"[::1]", "", "::1"}, {"0:0:0:0:0:0:0:1", "", "::1"}, {"[0000:0::0001]", "", "::1"}, {"::0.0.0.1", "", "::1"},
		{"::", "", "::"}, {"[::]", "", "::"},
		{"::ffff:169.254.169.254", "", "169.254.169.254"}, {"[::FFFF:A9FE:A9FE]", "", "169.254.169.254"}, {"0:0:0:0:0:ffff:a9fe:a9fe", "", "169.254.169.254"},
		{"::ffff:7f00:1", "", "127.0.0.1"}, {"::ffff:10.0.0.1", "", "10.0.0.1"},
		{"::169.254.169.254", "", "::a9fe:a9fe"}, {"64:ff9b::169.254.169.254", "", "64:ff9b::a9fe:a9fe"}, {"2002:A9FE:A9FE::", "", "2002:a9fe:a9fe::"},
		{"2606:4700:0:0:0:0:0:1111", "", "2606:4700::1111"}, {"1:2:3:4:5:6:7::", "", "1:2:3:4:5:6:7:0"},
	} {
		h, err := Parse(c.in)
		if err != nil {
			t.Errorf("%q: %v", c.in, err)
			continue
		}
		addr, is := h.Addr()
		if h.Name() != c.name || is != (c.addr != "") || is && addr != netip.MustParseAddr(c.addr) || h.String() != c.name+c.addr {
			t.Errorf("%q: name %q, address %v, want %q and %q", c.in, h.Name(), addr, c.name, c.addr)
		}
	}
}

// Each of these is one of 169.254.169.254, 127.0.0.1, 10.0.0.1, 0.0.0.0 and ::1 to
// inet_aton, a browser, a resolver, Go, or some library, or a name to others.
func TestParseRefuses(t *testing.T) {
	long := strings.Repeat("a", 64)
	for _, s := range []string{
		// decimal, hexadecimal, octal, and mixed
		"2852039166", "0xa9fea9fe", "0XA9FEA9FE", "025177524776", "0xA9.0xFE.0xA9.0xFE", "0251.0376.0251.0376", "169.0xfe.0251.254",
		"169.254.43518", "169.16689662", "169.254.0xa9fe", "00169.00254.169.254", "0000169.254.169.254", "169.254.169.0254",
		"2130706433", "0x7f000001", "0x7f.1", "017700000001", "0177.0.0.1", "0177.1", "127.1", "127.0.1", "127.0.0.01", "127.000.000.001", "0x7f.0.0.0x1", "0x7F.0x0",
		"167772161", "0xa000001", "0xa.1", "10.1", "10.0.1", "012.1", "012.0.0.1", "10.0.0.0x1", "0", "0x", "0x0", "00", "0.0", "0x.0x.0x.0x", "1.2.3.0x",
		"4294967296", "256.256.256.256", "1.2.3.4.5", "1.2.3", "999", "18446744073709551617", "1.2.3.256", "example.1", "example.0x1f", "a.b.c.4",
		// dots
		"127.0.0.1.", "169.254.169.254.", "2130706433.", "0x7f000001.", "127.1.", "127.0.0.1..", "127..1", ".127.0.0.1", "127.0.0.", "1.",
		"::1.", "[::1].", "example..com", ".example.com", "example.com..", ".", "..", "",
		// zones, percents
		"fe80::1%eth0", "[fe80::1%25eth0]", "::1%lo", "[::1%1]", "::ffff:127.0.0.1%1", "127.0.0.1%lo", "fe80::1%", "%31%32%37.0.0.1", "127%2e0.0.1", "127.0.0.1%00", "example%2ecom", "%65xample.com", "localhost%00.example.com",
		// brackets, ports, URLs
		"[127.0.0.1]", "[example.com]", "[::1", "::1]", "[[::1]]", "[]", "[", "]", "[::1]:80", "[::1]x", "127.0.0.1:80", "example.com:443", ":80", "[v1.fe80::1]", "http://example.com", "//127.0.0.1", "user@127.0.0.1", "127.0.0.1/8", "127.0.0.1#", "127.0.0.1?", "example.com\\@127.0.0.1", "::1/128",
		// IPv6 that is none
		":", ":::", "1::2::3", "1:2:3:4:5:6:7", "1:2:3:4:5:6:7:8:9", "::00001", "::g", "::ffff:127.1", "::ffff:0x7f.0.0.1", "::ffff:127.0.0.01", "::ffff:2130706433", "::127.0.0.1.", "::1.2.3.4.5", "1:2:3:4:5:6:7:1.2.3.4", ":1", "1:", "::-1",
		// other digits, dots and letters
		"①②⑦.⓪.⓪.①", "１２７.０.０.１", "127。0。0。1", "127．0．0．1", "127｡0｡0｡1", "١٢٧.٠.٠.١", "𝟏𝟐𝟕.𝟎.𝟎.𝟏", "ⓔxample.com", "bücher.example", "exam\u00adple.com", "example\u200b.com", "\u202eexample.com", "ſ.example", "\u212a.example", "loc\u2113alhost", "::１", "fe80：：1",
		// white space, controls, signs, separators
		" 127.0.0.1", "127.0.0.1 ", "127.0.0.1\n", "127.0.0.1\t", "127.0.0.1 x", "127.0.0.1\x00", "\x00127.0.0.1", "127.0.0.1\r\nHost: x", "+127.0.0.1", "-1", "127.0.0.-1", "127.+0.0.1", "127,0,0,1", "127.0.0.1;x", "1.2.3.4,5.6.7.8", "*.example.com", "a b.example", "a\\.b.example", "a\\046b", "\"example.com\"", "example.com\x7f", "ex!ample.com", "\xff.example",
		// labels and lengths
		"-a.example", "a-.example", "a.-b", "a.b-", "a.b-.", "-", long, long + ".example", "a." + long, strings.Repeat("a.", 126) + "aa", strings.Repeat("a.", 5000) + "a",
	} {
		if h, err := Parse(s); airlock.CodeOf(err) != airlock.Invalid {
			t.Errorf("%q is %v: %v", s, h, err)
		} else if len(err.Error()) > 800 {
			t.Errorf("%q: an error of %d bytes", s, len(err.Error()))
		}
	}
}

// inetAton is a model of what libc, and all that imitate it, take as IPv4: one
// to four numbers, each octal, decimal or hexadecimal, the last one filling
// what is left. What follows white space is ignored. WHATWG's parser of URLs
// takes the same, and one dot at the end, and 0x for 0.
func inetAton(s string) (netip.Addr, bool) {
	if i := strings.IndexAny(s, " \t\n\v\f\r"); i >= 0 {
		s = s[:i]
	}
	parts := strings.Split(strings.TrimSuffix(s, "."), ".")
	if len(parts) > 4 {
		return netip.Addr{}, false
	}
	var b [4]byte
	for i, part := range parts {
		base, digits := 10, strings.ToLower(part)
		if hex, ok := strings.CutPrefix(digits, "0x"); ok {
			base, digits = 16, "0"+hex
		} else if len(digits) > 1 && digits[0] == '0' {
			base = 8
		}
		n, ok := new(big.Int).SetString(digits, base)
		if !ok || strings.ContainsAny(digits, "+-_") {
			return netip.Addr{}, false
		}
		size := 1
		if i == len(parts)-1 {
			size = 4 - i
		}
		if n.BitLen() > 8*size {
			return netip.Addr{}, false
		}
		n.FillBytes(b[i : i+size])
	}
	return netip.AddrFrom4(b), true
}

func TestInetAton(t *testing.T) { // the model is one
	for in, want := range map[string]string{
		"127.1": "127.0.0.1", "0x7f.1": "127.0.0.1", "017700000001": "127.0.0.1", "2852039166": "169.254.169.254", "0xA9.0376.43518": "169.254.169.254",
		"1.2.3.4 x": "1.2.3.4", "1.2.3.4.": "1.2.3.4", "0x": "0.0.0.0", "1.2.3.256": "", "08": "", "1..2": "", "": "", "1.2.3.4.5": "", "4294967296": "", "-1": "", "a": "",
	} {
		got, ok := inetAton(in)
		if ok != (want != "") || ok && got != netip.MustParseAddr(want) {
			t.Errorf("%q: %v %v", in, got, ok)
		}
	}
}

// No program reads as another host what Parse takes.
func FuzzParse(f *testing.F) {
	for _, s := range []string{
		"example.com", "EXAMPLE.com.", "127.0.0.1", "0x7f.1", "2130706433", "0177.0.0.1", "127.0.0.1.", "::1", "[::1]", "::ffff:127.0.0.1", "fe80::1%eth0",
		"64:ff9b::a9fe:a9fe", "1.2.3.0x", "0x", "a.0x7f", "１２７.0.0.1", "127.0.0.1 ", "[127.0.0.1]", "xn--bcher-kva.example", "_a.b", "a-.b", "1:2:3:4:5:6:7::",
	} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		h, err := Parse(s)
		if err != nil {
			if h != (Host{}) || airlock.CodeOf(err) != airlock.Invalid {
				t.Fatalf("%q: %v and %v", s, h, err)
			}
			return
		}
		if again, err := Parse(h.String()); err != nil || again != h {
			t.Fatalf("%q is %v, which is %v: %v", s, h, again, err)
		}
		bare := strings.TrimSuffix(strings.TrimPrefix(s, "["), "]")
		addr, is := h.Addr()
		if is == (h.Name() != "") || is && (addr.Zone() != "" || addr.Is4In6()) {
			t.Fatalf("%q is %#v", s, h)
		}
		agree := func(who string, other netip.Addr, ok bool) {
			if ok && (!is || other.Unmap() != addr) {
				t.Fatalf("%q is %v, and %v to %s", s, h, other, who)
			}
		}
		other, ok := inetAton(s)
		agree("inet_aton", other, ok)
		other, err = netip.ParseAddr(bare)
		agree("netip", other, err == nil)
		ip := net.ParseIP(bare)
		other, ok = netip.AddrFromSlice(ip)
		agree("net", other, ok)
		if !is {
			if want := strings.ToLower(strings.TrimSuffix(s, ".")); h.Name() != want || len(want) > 253 || strings.Trim(want, "abcdefghijklmnopqrstuvwxyz0123456789-_.") != "" {
				t.Fatalf("%q is %q", s, h.Name())
			}
			if u, err := url.Parse("https://" + s + "/"); err != nil || u.Host != s || u.Hostname() != s || u.Port() != "" {
				t.Fatalf("%q in a URL is %+v: %v", s, u, err)
			}
		}
	})
}

func BenchmarkParse(b *testing.B) {
	for b.Loop() {
		if _, err := Parse("Registry.Example.com."); err != nil {
			b.Fatal(err)
		}
	}
}
