package door

import (
	"bytes"
	"context"
	"io"
	"net"
	"net/netip"
	"os"
	"testing"

	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/checksum"
	"gvisor.dev/gvisor/pkg/tcpip/header"
)

var testRules = frameRules{
	gatewayMAC: [6]byte{2, 0, 0, 0, 0, 1}, guestMAC: [6]byte{2, 0, 0, 0, 0, 2},
	gateway4: [4]byte{10, 0, 0, 1}, guest4: [4]byte{10, 0, 0, 2},
	gateway6: netip.MustParseAddr("fd61:6972::1").As16(), guest6: netip.MustParseAddr("fd61:6972::2").As16(),
	mtu: 65000,
}

// frame4 returns an Ethernet frame with an IPv4 packet of the guest.
func frame4(src, dst string, proto tcpip.TransportProtocolNumber, body []byte) []byte {
	f := make([]byte, ethernetSize+header.IPv4MinimumSize, ethernetSize+header.IPv4MinimumSize+len(body))
	header.Ethernet(f).Encode(&header.EthernetFields{SrcAddr: "\x02\x00\x00\x00\x00\x02", DstAddr: "\x02\x00\x00\x00\x00\x01", Type: header.IPv4ProtocolNumber})
	ip := header.IPv4(f[ethernetSize:])
	ip.Encode(&header.IPv4Fields{TotalLength: uint16(header.IPv4MinimumSize + len(body)), TTL: 64, Protocol: uint8(proto), SrcAddr: address(src), DstAddr: address(dst)})
	ip.SetChecksum(^ip.CalculateChecksum())
	return append(f, body...)
}

func frame6(src, dst string, proto tcpip.TransportProtocolNumber, hops uint8, body []byte) []byte {
	f := make([]byte, ethernetSize+header.IPv6MinimumSize, ethernetSize+header.IPv6MinimumSize+len(body))
	header.Ethernet(f).Encode(&header.EthernetFields{SrcAddr: "\x02\x00\x00\x00\x00\x02", DstAddr: "\x02\x00\x00\x00\x00\x01", Type: header.IPv6ProtocolNumber})
	header.IPv6(f[ethernetSize:]).Encode(&header.IPv6Fields{PayloadLength: uint16(len(body)), TransportProtocol: proto, HopLimit: hops, SrcAddr: address(src), DstAddr: address(dst)})
	return append(f, body...)
}

func tcpBody(flags header.TCPFlags, from, to uint16) []byte {
	b := header.TCP(make([]byte, header.TCPMinimumSize))
	b.Encode(&header.TCPFields{SrcPort: from, DstPort: to, SeqNum: 7, DataOffset: header.TCPMinimumSize, Flags: flags, WindowSize: 65535})
	return b
}

func udpBody(to uint16, payload string) []byte { return udpFrom(4000, to, payload) }

func udpFrom(from, to uint16, payload string) []byte {
	b := header.UDP(make([]byte, header.UDPMinimumSize))
	b.Encode(&header.UDPFields{SrcPort: from, DstPort: to, Length: uint16(header.UDPMinimumSize + len(payload))})
	return append(b, payload...)
}

// segment returns a frame with a TCP segment to 192.0.2.1.
func segment(flags header.TCPFlags, from, to uint16) []byte {
	return frame4("10.0.0.2", "192.0.2.1", header.TCPProtocolNumber, tcpBody(flags, from, to))
}

func arpFrame(op header.ARPOp, mac [6]byte, sender, target string) []byte {
	f := make([]byte, ethernetSize+arpSize)
	header.Ethernet(f).Encode(&header.EthernetFields{SrcAddr: "\x02\x00\x00\x00\x00\x02", DstAddr: header.EthernetBroadcastAddress, Type: header.ARPProtocolNumber})
	h := header.ARP(f[ethernetSize:])
	h.SetIPv4OverEthernet()
	h.SetOp(op)
	copy(h.HardwareAddressSender(), mac[:])
	copy(h.ProtocolAddressSender(), netip.MustParseAddr(sender).AsSlice())
	copy(h.ProtocolAddressTarget(), netip.MustParseAddr(target).AsSlice())
	return f
}

func solicitFrame(src, target string, hops uint8) []byte {
	body := make([]byte, header.ICMPv6NeighborSolicitMinimumSize)
	body[0] = byte(header.ICMPv6NeighborSolicit)
	copy(body[8:], netip.MustParseAddr(target).AsSlice())
	f := frame6(src, "ff02::1:ff00:1", header.ICMPv6ProtocolNumber, hops, body)
	copy(f, "\x33\x33\xff\x00\x00\x01")
	return f
}

func discard(_ context.Context, _, _ netip.AddrPort, c net.Conn) { io.Copy(io.Discard, c) }

func write(t testing.TB, end *os.File, frame []byte) {
	t.Helper()
	if _, err := end.Write(frame); err != nil {
		t.Fatal(err)
	}
}

// with returns a frame with one byte changed.
func with(frame []byte, at int, b byte) []byte {
	f := bytes.Clone(frame)
	f[at] = b
	return f
}

func TestJudge(t *testing.T) {
	syn := tcpBody(header.TCPFlagSyn, 1024, 80)
	echo4, echo6 := []byte{8, 0, 0, 0, 0, 0, 0, 0}, []byte{128, 0, 0, 0, 0, 0, 0, 0}
	good4 := frame4("10.0.0.2", "192.0.2.1", 6, syn)
	good6 := frame6("fd61:6972::2", "2001:db8::1", 6, 64, syn)
	const ip = ethernetSize
	options := frame4("10.0.0.2", "192.0.2.1", 6, append(make([]byte, 4), syn...))
	options[ip] = 0x46
	for name, c := range map[string]struct {
		frame []byte
		want  verdict
	}{
		"TCP":                       {good4, deliver4},
		"TCP6":                      {good6, deliver6},
		"UDP":                       {frame4("10.0.0.2", "192.0.2.1", 17, udpBody(53, "q")), deliver4},
		"UDP6":                      {frame6("fd61:6972::2", "2001:db8::1", 17, 64, udpBody(53, "q")), deliver6},
		"padded":                    {append(bytes.Clone(good4), make([]byte, 6)...), deliver4},
		"echo to us":                {frame4("10.0.0.2", "10.0.0.1", 1, echo4), deliver4},
		"echo6 to us":               {frame6("fd61:6972::2", "fd61:6972::1", 58, 64, echo6), deliver6},
		"ARP":                       {arpFrame(header.ARPRequest, testRules.guestMAC, "10.0.0.2", "10.0.0.1"), whoHas4},
		"ARP for a neighbour":       {arpFrame(header.ARPRequest, testRules.guestMAC, "10.0.0.2", "10.0.0.9"), whoHas4},
		"solicit":                   {solicitFrame("fd61:6972::2", "fd61:6972::1", 255), whoHas6},
		"echo to others":            {frame4("10.0.0.2", "8.8.8.8", 1, echo4), drop},
		"echo6 to others":           {frame6("fd61:6972::2", "2001:db8::1", 58, 64, echo6), drop},
		"ICMP redirect":             {frame4("10.0.0.2", "10.0.0.1", 1, with(echo4, 0, 5)), drop},
		"packet too big":            {frame6("fd61:6972::2", "fd61:6972::1", 58, 64, with(echo6, 0, 2)), drop},
		"router advertisement":      {frame6("fd61:6972::2", "fd61:6972::1", 58, 255, with(make([]byte, 16), 0, 134)), drop},
		"other guest's MAC":         {with(good4, 11, 3), drop},
		"our MAC":                   {with(good4, 11, 1), drop},
		"to another MAC":            {with(good4, 5, 9), drop},
		"IPv4 to all":               {append(bytes.Repeat([]byte{255}, 6), good4[6:]...), drop},
		"other guest":               {frame4("10.0.0.3", "192.0.2.1", 6, syn), drop},
		"as the gateway":            {frame4("10.0.0.1", "192.0.2.1", 6, syn), drop},
		"from nobody":               {frame4("0.0.0.0", "192.0.2.1", 6, syn), drop},
		"from loopback":             {frame4("127.0.0.1", "192.0.2.1", 6, syn), drop},
		"other guest6":              {frame6("fd61:6972::3", "2001:db8::1", 6, 64, syn), drop},
		"link-local source":         {frame6("fe80::2", "2001:db8::1", 6, 64, syn), drop},
		"mapped source":             {frame6("::ffff:10.0.0.2", "2001:db8::1", 6, 64, syn), drop},
		"to itself":                 {frame4("10.0.0.2", "10.0.0.2", 6, syn), drop},
		"to itself6":                {frame6("fd61:6972::2", "fd61:6972::2", 6, 64, syn), drop},
		"to loopback":               {frame4("10.0.0.2", "127.0.0.1", 6, syn), drop},
		"to loopback6":              {frame6("fd61:6972::2", "::1", 6, 64, syn), drop},
		"to nobody":                 {frame4("10.0.0.2", "0.0.0.0", 6, syn), drop},
		"broadcast":                 {frame4("10.0.0.2", "255.255.255.255", 17, udpBody(67, "")), drop},
		"multicast":                 {frame4("10.0.0.2", "224.0.0.251", 17, udpBody(5353, "")), drop},
		"multicast6":                {frame6("fd61:6972::2", "ff02::fb", 17, 64, udpBody(5353, "")), drop},
		"fragment, first":           {with(good4, ip+6, 0x20), drop},
		"fragment, later":           {with(good4, ip+7, 1), drop},
		"fragment6":                 {frame6("fd61:6972::2", "2001:db8::1", 44, 64, append(make([]byte, 8), syn...)), drop},
		"hop-by-hop":                {frame6("fd61:6972::2", "2001:db8::1", 0, 64, append([]byte{6, 0, 1, 4, 0, 0, 0, 0}, syn...)), drop},
		"routing header":            {frame6("fd61:6972::2", "2001:db8::1", 43, 64, append([]byte{6, 0, 0, 0, 0, 0, 0, 0}, syn...)), drop},
		"IPv4 options":              {options, drop},
		"GRE":                       {frame4("10.0.0.2", "192.0.2.1", 47, syn), drop},
		"SCTP":                      {frame4("10.0.0.2", "192.0.2.1", 132, syn), drop},
		"no hops":                   {with(good4, ip+8, 0), drop},
		"no hops6":                  {with(good6, ip+7, 0), drop},
		"longer than its frame":     {with(good4, ip+3, 41), drop},
		"longer6 than its frame":    {with(good6, ip+5, 21), drop},
		"shorter than its header":   {with(good4, ip+3, 19), drop},
		"short TCP":                 {frame4("10.0.0.2", "192.0.2.1", 6, syn[:19]), drop},
		"TCP offset beyond":         {frame4("10.0.0.2", "192.0.2.1", 6, with(syn, 12, 6<<4)), drop},
		"TCP offset too small":      {frame4("10.0.0.2", "192.0.2.1", 6, with(syn, 12, 4<<4)), drop},
		"UDP of another length":     {frame4("10.0.0.2", "192.0.2.1", 17, with(udpBody(53, "q"), 5, 10)), drop},
		"version 6 as IPv4":         {with(good4, ip, 0x65), drop},
		"version 4 as IPv6":         {with(good6, ip, 0x45), drop},
		"VLAN":                      {with(with(good4, 12, 0x81), 13, 0), drop},
		"empty":                     {nil, drop},
		"header only":               {good4[:ethernetSize], drop},
		"too long":                  {append(bytes.Clone(good4), make([]byte, 65000)...), drop},
		"ARP for itself":            {arpFrame(header.ARPRequest, testRules.guestMAC, "10.0.0.2", "10.0.0.2"), drop},
		"ARP as another":            {arpFrame(header.ARPRequest, testRules.guestMAC, "10.0.0.3", "10.0.0.1"), drop},
		"ARP of another MAC":        {arpFrame(header.ARPRequest, [6]byte{2, 0, 0, 0, 0, 3}, "10.0.0.2", "10.0.0.1"), drop},
		"ARP answer":                {arpFrame(header.ARPReply, testRules.guestMAC, "10.0.0.2", "10.0.0.1"), drop},
		"short ARP":                 {arpFrame(header.ARPRequest, testRules.guestMAC, "10.0.0.2", "10.0.0.1")[:40], drop},
		"solicit for itself":        {solicitFrame("fd61:6972::2", "fd61:6972::2", 255), drop},
		"solicit from afar":         {solicitFrame("fd61:6972::2", "fd61:6972::1", 64), drop},
		"solicit as another":        {solicitFrame("fd61:6972::3", "fd61:6972::1", 255), drop},
		"solicit of an address":     {solicitFrame("::", "fd61:6972::1", 255), drop}, // duplicate address detection
		"solicit for a group":       {solicitFrame("fd61:6972::2", "ff02::1", 255), drop},
		"solicit, short":            {solicitFrame("fd61:6972::2", "fd61:6972::1", 255)[:70], drop},
		"advertisement, as solicit": {with(solicitFrame("fd61:6972::2", "fd61:6972::1", 255), ip+40, 136), drop},
	} {
		if got, _ := testRules.judge(c.frame); got != c.want {
			t.Errorf("%s: %d, want %d", name, got, c.want)
		}
	}
}

func TestAnswers(t *testing.T) {
	got := testRules.answerARP(arpFrame(header.ARPRequest, testRules.guestMAC, "10.0.0.2", "10.0.0.9")[ethernetSize:])
	want := []byte{
		2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1, 8, 6,
		0, 1, 8, 0, 6, 4, 0, 2,
		2, 0, 0, 0, 0, 1, 10, 0, 0, 9,
		2, 0, 0, 0, 0, 2, 10, 0, 0, 2,
	}
	if !bytes.Equal(got, want) {
		t.Errorf("ARP:\n%x, want\n%x", got, want)
	}
	got = testRules.answerSolicit(solicitFrame("fd61:6972::2", "fd61:6972::9", 255)[ethernetSize:])
	target, guest := address("fd61:6972::9"), address("fd61:6972::2")
	want = append([]byte{2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1, 0x86, 0xdd, 0x60, 0, 0, 0, 0, 32, 58, 255}, target.AsSlice()...)
	want = append(append(want, guest.AsSlice()...), 136, 0, got[56], got[57], 0xe0, 0, 0, 0)
	want = append(append(want, target.AsSlice()...), 2, 1, 2, 0, 0, 0, 0, 1)
	if !bytes.Equal(got, want) {
		t.Errorf("solicitation:\n%x, want\n%x", got, want)
	}
	icmp := got[ethernetSize+header.IPv6MinimumSize:]
	if sum := checksum.Checksum(icmp, header.PseudoHeaderChecksum(header.ICMPv6ProtocolNumber, target, guest, uint16(len(icmp)))); sum != 0xffff {
		t.Errorf("checksum %x", sum)
	}
}

func seeds() [][]byte {
	return [][]byte{
		segment(header.TCPFlagSyn, 1024, 80),
		segment(header.TCPFlagAck, 1024, 80),
		segment(header.TCPFlagSyn|header.TCPFlagFin|header.TCPFlagRst, 0, 0),
		frame4("10.0.0.2", "10.0.0.1", 17, udpBody(53, "q")),
		frame4("10.0.0.2", "10.0.0.1", 1, []byte{8, 0, 0, 0, 0, 0, 0, 0}),
		frame6("fd61:6972::2", "2001:db8::1", 6, 64, tcpBody(header.TCPFlagSyn, 1, 2)),
		frame6("fd61:6972::2", "fd61:6972::1", 58, 64, []byte{128, 0, 0, 0, 0, 0, 0, 0}),
		arpFrame(header.ARPRequest, testRules.guestMAC, "10.0.0.2", "10.0.0.1"),
		solicitFrame("fd61:6972::2", "fd61:6972::1", 255),
		with(segment(header.TCPFlagSyn, 1024, 80), ethernetSize+6, 0x20),
		nil,
		make([]byte, 13),
		make([]byte, 65015),
	}
}

// What is let through has exactly the guest's addresses, and is no larger than
// its frame.
func FuzzJudge(f *testing.F) {
	for _, s := range seeds() {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, frame []byte) {
		what, p := testRules.judge(frame)
		switch what {
		case drop:
			return
		case deliver4:
			if h := header.IPv4(p); !h.IsValid(len(p)) || int(h.TotalLength()) != len(p) || h.SourceAddress() != address("10.0.0.2") {
				t.Errorf("let through: %x", p)
			}
		case deliver6:
			if h := header.IPv6(p); !h.IsValid(len(p)) || h.SourceAddress() != address("fd61:6972::2") {
				t.Errorf("let through: %x", p)
			}
		case whoHas4:
			if v, _ := testRules.judge(testRules.answerARP(p)); v != drop {
				t.Error("an answer is a question")
			}
		case whoHas6:
			if v, _ := testRules.judge(testRules.answerSolicit(p)); v != drop {
				t.Error("an answer is a question")
			}
		}
		if [6]byte(frame[6:12]) != testRules.guestMAC {
			t.Errorf("let through from %x", frame[6:12])
		}
	})
}

// A whole door takes any frames, of any order, without a panic and with no more
// flows than it may have. Each input is several frames of the guest, with a
// byte of length in units of eight before each.
func FuzzFrames(f *testing.F) {
	var all []byte
	for _, s := range seeds() {
		if len(s) < 255*8 {
			padded := append(bytes.Clone(s), make([]byte, -len(s)&7)...)
			all = append(append(all, byte(len(padded)/8)), padded...)
			f.Add(all)
		}
	}
	f.Fuzz(func(t *testing.T, input []byte) {
		d, end := open(t, Config{MaxFlows: 4, UDP: anyUDP}, handler{tcp: echo, udp: discard})
		go io.Copy(io.Discard, end)
		for len(input) > 0 {
			n := min(int(input[0])*8, len(input)-1)
			frame := input[1 : 1+n]
			input = input[1+n:]
			write(t, end, frame)
			if n >= ethernetSize { // again, as if the guest itself sent it
				own := append([]byte{2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2}, frame[12:]...)
				write(t, end, own)
			}
		}
		if n := d.Stats().Flows; n > 4 {
			t.Errorf("%d flows", n)
		}
		d.Close()
		if n := d.Stats().Flows; n != 0 {
			t.Errorf("%d flows after Close", n)
		}
	})
}
