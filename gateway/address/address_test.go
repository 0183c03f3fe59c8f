package address

import (
	"net/netip"
	"testing"

	"airlock.dev/airlock"
)

func TestClassify(t *testing.T) {
	for _, c := range []struct {
		addr string
		want Class
	}{
		{"1.1.1.1", Public}, {"93.184.216.34", Public}, {"9.255.255.255", Public}, {"11.0.0.0", Public},
		{"172.15.255.255", Public}, {"172.32.0.0", Public}, {"100.63.255.255", Public}, {"100.128.0.0", Public},
		{"223.255.255.255", Public}, {"128.0.0.0", Public}, {"198.17.255.255", Public}, {"198.20.0.0", Public},
		{"10.0.0.1", Private}, {"10.255.255.255", Private}, {"172.16.0.0", Private}, {"172.31.255.255", Private}, {"192.168.0.1", Private},
		{"127.0.0.1", Loopback}, {"127.255.255.254", Loopback}, {"0.0.0.0", Loopback}, {"0.0.0.1", Reserved}, {"0.255.255.255", Reserved},
		{"169.254.0.1", LinkLocal}, {"169.254.255.255", LinkLocal}, {"169.254.168.255", LinkLocal},
		{"169.254.169.254", Metadata}, {"169.254.169.253", Metadata}, {"169.254.170.2", Metadata}, {"169.254.170.23", Metadata},
		{"168.63.129.16", Metadata}, {"168.63.129.17", Public}, {"100.100.100.200", Metadata}, {"192.0.0.192", Metadata}, {"169.254.42.42", Metadata},
		{"100.64.0.0", Shared}, {"100.127.255.255", Shared},
		{"192.0.2.1", Documentation}, {"198.51.100.7", Documentation}, {"203.0.113.255", Documentation},
		{"198.18.0.1", Benchmark}, {"198.19.255.255", Benchmark},
		{"224.0.0.1", Multicast}, {"239.255.255.255", Multicast}, {"255.255.255.255", Multicast},
		{"240.0.0.1", Reserved}, {"255.255.255.254", Reserved}, {"192.0.0.8", Reserved}, {"192.88.99.1", Transition},

		{"2606:4700::1111", Public}, {"2000::", Public}, {"2001:200::1", Public}, {"3fff:1000::", Public},
		{"::", Loopback}, {"::1", Loopback}, {"::2", Transition},
		{"fc00::1", Private}, {"fdff::1", Private}, {"fd61:6972::1", Private}, {"fec0::1", Private},
		{"fe80::1", LinkLocal}, {"febf::1", LinkLocal}, {"fe80::a9fe:a9fe", Metadata},
		{"fd00:ec2::254", Metadata}, {"fd00:ec2::23", Metadata}, {"fd20:ce::254", Metadata}, {"fd00:42::42", Metadata},
		{"ff02::1", Multicast}, {"ff0e::1", Multicast},
		{"2001:db8::1", Documentation}, {"3fff::1", Documentation}, {"2001:2::1", Benchmark},
		{"100::1", Reserved}, {"4000::1", Reserved}, {"5f00::1", Reserved}, {"3ffe::1", Reserved}, {"2001:10::1", Reserved}, {"2001:20::1", Reserved},

		// What carries an IPv4 address.
		{"::ffff:169.254.169.254", Metadata}, {"::ffff:127.0.0.1", Loopback}, {"::ffff:10.0.0.1", Private}, {"::ffff:1.1.1.1", Public}, {"::ffff:0.0.0.0", Loopback},
		{"::169.254.169.254", Metadata}, {"::127.0.0.1", Loopback}, {"::10.0.0.1", Private}, {"::1.1.1.1", Transition},
		{"::ffff:0:169.254.169.254", Metadata}, {"::ffff:0:1.1.1.1", Transition}, {"::ffff:0:127.0.0.1", Loopback},
		{"64:ff9b::169.254.169.254", Metadata}, {"64:ff9b::a9fe:a9fe", Metadata}, {"64:ff9b::7f00:1", Loopback}, {"64:ff9b::a00:1", Private}, {"64:ff9b::1.1.1.1", Public}, {"64:ff9b::0.0.0.0", Loopback},
		{"64:ff9b::1:0:0", Reserved}, // beside the prefix
		{"64:ff9b:1::169.254.169.254", Metadata}, {"64:ff9b:1::1.1.1.1", Transition},
		{"64:ff9b:1:a9fe:a9:fe00::", Metadata}, {"64:ff9b:1:a9:fe:a9fe::", Metadata}, {"64:ff9b:1:0:a9:fea9:fe00::", Metadata}, {"64:ff9b:1:7f00:0:100::", Loopback},
		{"2002:a9fe:a9fe::", Metadata}, {"2002:7f00:1::1", Loopback}, {"2002:a00:1::1", Private}, {"2002:101:101::1", Transition},
		{"2001::1", Loopback},                        // Teredo with the server 0.0.0.0
		{"2001:0:101:101:0:0:fefe:fefe", Transition}, // client 1.1.1.1
		{"2001:0:101:101:0:0:5601:5601", Metadata},   // client 169.254.169.254
		{"2001:0:a9fe:a9fe:0:0:fefe:fefe", Metadata}, // server 169.254.169.254
		{"2001:0:101:101:0:0:80ff:fffe", Loopback},   // client 127.0.0.1
		{"2606:4700::5efe:169.254.169.254", Metadata}, {"2606:4700::200:5efe:10.0.0.1", Private}, {"2606:4700::5efe:1.1.1.1", Public}, {"fe80::5efe:127.0.0.1", Loopback},
		{"2002:101:101:0:0:5efe:7f00:1", Loopback}, // two at a time

		// A zone is of one machine.
		{"fe80::1%eth0", Refused}, {"2606:4700::1111%1", Refused}, {"::ffff:1.1.1.1%1", Refused},
	} {
		if got := Classify(netip.MustParseAddr(c.addr)); got != c.want {
			t.Errorf("%s is %v, want %v", c.addr, got, c.want)
		}
	}
	if got := Classify(netip.Addr{}); got != Refused {
		t.Errorf("no address is %v", got)
	}
}

func TestOwnRanges(t *testing.T) {
	prefix := netip.MustParsePrefix
	r, err := New([]Range{
		{prefix("203.0.113.0/24"), Public},   // as long as a built-in one
		{prefix("10.20.0.0/16"), Public},     // longer
		{prefix("10.20.30.0/24"), Private},   // longer still
		{prefix("0.0.0.0/0"), Private},       // shorter than all
		{prefix("169.254.0.0/16"), Public},   // does not reach the metadata in it
		{prefix("fd00::/8"), Public},         // nor what addresses carry
		{prefix("100.100.0.0/16"), Metadata}, // stricter
	}, []netip.Prefix{prefix("2606:aa::/32"), prefix("2606:bb::/40"), prefix("2606:cc::/48"), prefix("2606:dd::/56"), prefix("fd00:ee::/64"), prefix("64:ff9b:1::/96")})
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		addr string
		want Class
	}{
		{"203.0.113.9", Public}, {"::ffff:203.0.113.9", Public}, {"192.0.2.1", Documentation},
		{"10.20.1.1", Public}, {"10.20.30.1", Private}, {"10.21.0.1", Private}, {"8.8.8.8", Private},
		{"169.254.1.1", Public}, {"169.254.169.254", Metadata}, {"100.100.1.1", Metadata}, {"100.101.1.1", Shared},
		{"fd00:1::1", Public}, {"fd00:ec2::254", Metadata}, {"fd00:1::5efe:127.0.0.1", Loopback},
		{"2606:aa:a9fe:a9fe::", Metadata}, {"2606:aa:cb00:7109::", Public}, {"2606:aa:cb00:7109::1", Public},
		{"2606:bb:a9:fea9:fe::", Metadata}, {"2606:cc:0:a9fe:a9:fe00::", Metadata}, {"2606:dd:0:a9:fe:a9fe::", Metadata},
		{"fd00:ee::a9:fea9:fe00:0", Metadata}, {"fd00:ee::cb:71:900:0", Public},
		{"64:ff9b:1::cb00:7109", Public}, {"64:ff9b:1::a9fe:a9fe", Metadata},
	} {
		if got := r.Classify(netip.MustParseAddr(c.addr)); got != c.want {
			t.Errorf("%s is %v, want %v", c.addr, got, c.want)
		}
	}
	for name, bad := range map[string]func() (*Ranges, error){
		"no prefix":        func() (*Ranges, error) { return New([]Range{{Class: Public}}, nil) },
		"host bits":        func() (*Ranges, error) { return New([]Range{{prefix("10.0.0.1/8"), Public}}, nil) },
		"mapped":           func() (*Ranges, error) { return New([]Range{{prefix("::ffff:10.0.0.0/104"), Public}}, nil) },
		"no class":         func() (*Ranges, error) { return New([]Range{{Prefix: prefix("10.0.0.0/8")}}, nil) },
		"class out of row": func() (*Ranges, error) { return New([]Range{{prefix("10.0.0.0/8"), 200}}, nil) },
		"NAT64 of IPv4":    func() (*Ranges, error) { return New(nil, []netip.Prefix{prefix("10.0.0.0/32")}) },
		"NAT64 length":     func() (*Ranges, error) { return New(nil, []netip.Prefix{prefix("2606::/72")}) },
	} {
		if _, err := bad(); airlock.CodeOf(err) != airlock.Invalid {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestClassNames(t *testing.T) {
	for c, name := range map[Class]string{Refused: "refused", Public: "public", LinkLocal: "link-local", Metadata: "metadata"} {
		got, err := ParseClass(name)
		if c.String() != name || got != c || err != nil {
			t.Errorf("%v is %q, %q is %v: %v", uint8(c), c, name, got, err)
		}
	}
	if _, err := ParseClass("Public"); airlock.CodeOf(err) != airlock.Invalid {
		t.Error(err)
	}
	if got := Class(99).String(); got != "class(99)" {
		t.Error(got)
	}
}

// What carries an address is never a better one than the address itself.
func FuzzClassify(f *testing.F) {
	for _, s := range []string{"1.1.1.1", "169.254.169.254", "127.0.0.1", "10.1.2.3", "0.0.0.0", "255.255.255.255"} {
		b := netip.MustParseAddr(s).As4()
		f.Add(b[:], []byte("0123456789abcdef"))
	}
	f.Fuzz(func(t *testing.T, four, sixteen []byte) {
		v4, ok4 := netip.AddrFromSlice(four)
		v6, ok6 := netip.AddrFromSlice(sixteen)
		if !ok4 || !ok6 || !v4.Is4() || !v6.Is6() {
			return
		}
		inner := Classify(v4)
		b := v4.As4()
		carry := func(form string, at ...int) {
			a := netip.MustParseAddr(form).As16()
			for i, at := range at {
				a[at] = b[i]
			}
			if got := Classify(netip.AddrFrom16(a)); got < inner || got == Refused {
				t.Errorf("%v is %v, %v in it is %v", netip.AddrFrom16(a), got, v4, inner)
			}
		}
		carry("::ffff:0:0", 12, 13, 14, 15)
		carry("64:ff9b::", 12, 13, 14, 15)
		carry("::ffff:0:0:0", 12, 13, 14, 15)
		carry("2002::", 2, 3, 4, 5)
		carry("2001::", 4, 5, 6, 7)
		carry("2606::5efe:0:0", 12, 13, 14, 15)
		if !v4.IsUnspecified() {
			carry("64:ff9b:1::", 12, 13, 14, 15)
			carry("64:ff9b:1::", 6, 7, 9, 10)
			carry("64:ff9b:1::", 7, 9, 10, 11)
			carry("64:ff9b:1::", 9, 10, 11, 12)
		}
		if b[0] != 0 {
			carry("::", 12, 13, 14, 15)
		}
		// The standard library's own view, of whatever address.
		got := Classify(v6)
		u := v6.Unmap()
		if special := u.IsPrivate() || u.IsLoopback() || u.IsLinkLocalUnicast() || u.IsMulticast() || u.IsUnspecified(); special && got == Public || got == Refused {
			t.Errorf("%v is %v", v6, got)
		}
	})
}

func BenchmarkClassify(b *testing.B) {
	a := netip.MustParseAddr("64:ff9b::5db8:d822")
	for b.Loop() {
		Classify(a)
	}
}
