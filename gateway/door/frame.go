package door

import (
	"encoding/binary"
	"net/netip"

	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/header"
)

// verdict is what is done with a frame of the guest.
type verdict uint8

const (
	drop     verdict = iota
	deliver4         // an IPv4 packet for the stack
	deliver6         // an IPv6 packet for the stack
	whoHas4          // a question for an IPv4 address, which frameRules.answerARP answers
	whoHas6          // a question for an IPv6 address, which frameRules.answerSolicit answers
)

const (
	ethernetSize = header.EthernetMinimumSize
	arpSize      = header.ARPSize
	solicitSize  = header.IPv6MinimumSize + header.ICMPv6NeighborSolicitMinimumSize
	// advertSize is an advertisement with the option that has our MAC.
	advertSize = header.IPv6MinimumSize + header.ICMPv6NeighborAdvertMinimumSize + 8
	ndpHops    = 255 // RFC 4861: what has crossed no router
	// etherTypeNothing is IEEE's first one for local experiments.
	etherTypeNothing = 0x88b5
)

// frameRules says which frames a guest may send: TCP and UDP from its own
// addresses in packets of the plainest form, an echo to the gateway, and the
// questions who has an address. Whatever else there is (fragments, IP options
// and extension headers, other protocols, multicast, every source that is not
// the guest) never reaches the stack, so that there is nothing in the stack
// that it could fill, confuse or reach.
type frameRules struct {
	gatewayMAC, guestMAC [6]byte
	gateway4, guest4     [4]byte
	gateway6, guest6     [16]byte
	mtu                  int // bytes of a packet, without the Ethernet header
}

// judge returns what is done with frame, and the packet in it for the stack.
func (r *frameRules) judge(frame []byte) (verdict, []byte) {
	if len(frame) < ethernetSize || len(frame) > ethernetSize+r.mtu || [6]byte(frame[6:12]) != r.guestMAC {
		return drop, nil
	}
	packet := frame[ethernetSize:]
	forUs := [6]byte(frame[:6]) == r.gatewayMAC
	toAll := frame[0]&1 != 0 // a group: broadcast, or the multicast of a neighbour solicitation
	switch tcpip.NetworkProtocolNumber(binary.BigEndian.Uint16(frame[12:])) {
	case header.IPv4ProtocolNumber:
		if forUs {
			return r.judge4(packet)
		}
	case header.IPv6ProtocolNumber:
		if (forUs || toAll) && r.isSolicit(packet) {
			return whoHas6, packet[:solicitSize]
		}
		if forUs {
			return r.judge6(packet)
		}
	case header.ARPProtocolNumber:
		if (forUs || toAll) && r.isARP(packet) {
			return whoHas4, packet[:arpSize]
		}
	}
	return drop, nil
}

func (r *frameRules) judge4(p []byte) (verdict, []byte) {
	if len(p) < header.IPv4MinimumSize || p[0] != 4<<4|header.IPv4MinimumSize/4 {
		return drop, nil // also what has options
	}
	h := header.IPv4(p)
	size := int(h.TotalLength())
	if size < header.IPv4MinimumSize || size > len(p) || h.More() || h.FragmentOffset() != 0 || h.TTL() == 0 {
		return drop, nil
	}
	src, dst := [4]byte(p[12:16]), [4]byte(p[16:20])
	if src != r.guest4 || dst == r.guest4 || !isHost(netip.AddrFrom4(dst)) {
		return drop, nil
	}
	p = p[:size] // what follows is padding
	if !r.judgeTransport(h.TransportProtocol(), p[header.IPv4MinimumSize:], header.ICMPv4ProtocolNumber, byte(header.ICMPv4Echo), dst == r.gateway4) {
		return drop, nil
	}
	return deliver4, p
}

func (r *frameRules) judge6(p []byte) (verdict, []byte) {
	if len(p) < header.IPv6MinimumSize || p[0]>>4 != 6 {
		return drop, nil
	}
	h := header.IPv6(p)
	size := header.IPv6MinimumSize + int(h.PayloadLength())
	if size > len(p) || h.HopLimit() == 0 {
		return drop, nil
	}
	src, dst := [16]byte(p[8:24]), [16]byte(p[24:40])
	if src != r.guest6 || dst == r.guest6 || !isHost(netip.AddrFrom16(dst)) {
		return drop, nil
	}
	p = p[:size]
	if !r.judgeTransport(tcpip.TransportProtocolNumber(h.NextHeader()), p[header.IPv6MinimumSize:], header.ICMPv6ProtocolNumber, byte(header.ICMPv6EchoRequest), dst == r.gateway6) {
		return drop, nil
	}
	return deliver6, p
}

// judgeTransport says whether what an IP packet carries is for the stack: TCP,
// UDP, or an echo request to the gateway itself.
func (r *frameRules) judgeTransport(proto tcpip.TransportProtocolNumber, body []byte, icmp tcpip.TransportProtocolNumber, echo byte, toGateway bool) bool {
	switch proto {
	case header.TCPProtocolNumber:
		if len(body) < header.TCPMinimumSize {
			return false
		}
		offset := int(header.TCP(body).DataOffset())
		return offset >= header.TCPMinimumSize && offset <= len(body)
	case header.UDPProtocolNumber:
		return len(body) >= header.UDPMinimumSize && int(header.UDP(body).Length()) == len(body)
	case icmp:
		return toGateway && len(body) >= 8 && body[0] == echo
	}
	return false
}

// isHost says whether a is an address that one host can have on a wire. What
// kind of host, others judge.
func isHost(a netip.Addr) bool {
	return !a.IsUnspecified() && !a.IsLoopback() && !a.IsMulticast() && a != netip.AddrFrom4([4]byte{255, 255, 255, 255})
}

// isARP says whether p asks, as the guest, for the MAC of an IPv4 address that
// is not its own. All others are behind the door, also those that a guest takes
// for neighbours: it gets an answer at once, and its flows a refusal.
func (r *frameRules) isARP(p []byte) bool {
	if len(p) < arpSize {
		return false
	}
	h := header.ARP(p[:arpSize])
	target := [4]byte(h.ProtocolAddressTarget())
	return h.IsValid() && h.Op() == header.ARPRequest &&
		[6]byte(h.HardwareAddressSender()) == r.guestMAC && [4]byte(h.ProtocolAddressSender()) == r.guest4 &&
		target != r.guest4 && isHost(netip.AddrFrom4(target))
}

// answerARP returns the frame that answers a packet that isARP.
func (r *frameRules) answerARP(p []byte) []byte {
	out := make([]byte, ethernetSize+arpSize)
	copy(out, r.ethernet(header.ARPProtocolNumber))
	q, a := header.ARP(p), header.ARP(out[ethernetSize:])
	a.SetIPv4OverEthernet()
	a.SetOp(header.ARPReply)
	copy(a.HardwareAddressSender(), r.gatewayMAC[:])
	copy(a.ProtocolAddressSender(), q.ProtocolAddressTarget())
	copy(a.HardwareAddressTarget(), r.guestMAC[:])
	copy(a.ProtocolAddressTarget(), r.guest4[:])
	return out
}

// isSolicit is isARP for IPv6: a neighbour solicitation from the guest's own
// address. Its options are not looked at: the guest's MAC is known.
func (r *frameRules) isSolicit(p []byte) bool {
	if len(p) < solicitSize || p[0]>>4 != 6 {
		return false
	}
	h := header.IPv6(p)
	if h.NextHeader() != uint8(header.ICMPv6ProtocolNumber) || h.HopLimit() != ndpHops || [16]byte(p[8:24]) != r.guest6 ||
		header.IPv6MinimumSize+int(h.PayloadLength()) > len(p) || int(h.PayloadLength()) < header.ICMPv6NeighborSolicitMinimumSize {
		return false
	}
	icmp := header.ICMPv6(p[header.IPv6MinimumSize:])
	target := [16]byte(solicited(p))
	return icmp.Type() == header.ICMPv6NeighborSolicit && icmp.Code() == 0 && target != r.guest6 && isHost(netip.AddrFrom16(target))
}

// solicited returns the address that a solicitation asks for.
func solicited(p []byte) []byte { return p[header.IPv6MinimumSize+8 : solicitSize] }

// answerSolicit returns the frame that answers a packet that isSolicit.
func (r *frameRules) answerSolicit(p []byte) []byte {
	out := make([]byte, ethernetSize+advertSize)
	copy(out, r.ethernet(header.IPv6ProtocolNumber))
	target, guest := tcpip.AddrFrom16Slice(solicited(p)), tcpip.AddrFrom16(r.guest6)
	header.IPv6(out[ethernetSize:]).Encode(&header.IPv6Fields{
		PayloadLength:     advertSize - header.IPv6MinimumSize,
		TransportProtocol: header.ICMPv6ProtocolNumber,
		HopLimit:          ndpHops,
		SrcAddr:           target,
		DstAddr:           guest,
	})
	icmp := header.ICMPv6(out[ethernetSize+header.IPv6MinimumSize:])
	icmp.SetType(header.ICMPv6NeighborAdvert)
	advert := header.NDPNeighborAdvert(icmp.MessageBody())
	advert.SetTargetAddress(target)
	advert.SetRouterFlag(true)
	advert.SetSolicitedFlag(true)
	advert.SetOverrideFlag(true)
	advert.Options().Serialize(header.NDPOptionsSerializer{header.NDPTargetLinkLayerAddressOption(r.gatewayMAC[:])})
	icmp.SetChecksum(header.ICMPv6Checksum(header.ICMPv6ChecksumParams{Header: icmp, Src: target, Dst: guest}))
	return out
}

// ethernet returns the header of every frame to the guest.
func (r *frameRules) ethernet(proto tcpip.NetworkProtocolNumber) []byte {
	h := make(header.Ethernet, ethernetSize)
	h.Encode(&header.EthernetFields{
		SrcAddr: tcpip.LinkAddress(r.gatewayMAC[:]),
		DstAddr: tcpip.LinkAddress(r.guestMAC[:]),
		Type:    proto,
	})
	return h
}
