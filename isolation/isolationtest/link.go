package isolationtest

import (
	"bytes"
	"encoding/binary"
	"net"
	"net/netip"
	"os"
	"testing"
	"time"

	"airlock.dev/airlock"
	"airlock.dev/airlock/channel"
	"airlock.dev/airlock/isolation"
)

// link is that of every test here; frames below are written for it.
func link() *isolation.Link {
	return &isolation.Link{
		MTU: 65000, MAC: net.HardwareAddr{2, 0, 0, 0, 0, 2},
		Addresses: []netip.Prefix{netip.MustParsePrefix("10.0.0.2/24"), netip.MustParsePrefix("fd61:6972::2/64")},
		Gateways:  []netip.Addr{netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("fd61:6972::1")},
	}
}

// network holds that what a sandbox sends comes out of its door, and of
// nothing else, also after a restart of the server.
func network(t *testing.T, h Harness) {
	b := h.create(t, func(s *isolation.Spec) { s.Link = link() }, nil)
	door, err := b.Door(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer door.Close()
	send := func(what string) {
		t.Helper()
		program := `import socket, sys; socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(sys.argv[1].encode(), ("192.0.2.9", 53))`
		if r := exec(t, b.mux, channel.StartRequest{Cmd: "python3", Args: []string{"-c", program, what}}); r.end.ExitCode != 0 {
			t.Fatalf("send: %+v", r)
		}
	}
	send("first")
	// Whoever wants to reach the gateway asks who has its address.
	ask := frame(t, door, 0x0806)
	if want := []byte{0, 1, 8, 0, 6, 4, 0, 1, 2, 0, 0, 0, 0, 2, 10, 0, 0, 2, 0, 0, 0, 0, 0, 0, 10, 0, 0, 1}; !bytes.Equal(ask[14:42], want) {
		t.Fatalf("asked % x, want % x", ask[14:42], want)
	}
	answer := append(append(bytes.Clone(ask[6:12]), 2, 0, 0, 0, 0, 1, 8, 6, 0, 1, 8, 0, 6, 4, 0, 2, 2, 0, 0, 0, 0, 1, 10, 0, 0, 1), ask[22:32]...)
	if _, err := door.Write(answer); err != nil {
		t.Fatal(err)
	}
	received := func(door *os.File, want string) {
		t.Helper()
		packet := frame(t, door, 0x0800)
		if from, to := net.IP(packet[26:30]).String(), net.IP(packet[30:34]).String(); from != "10.0.0.2" || to != "192.0.2.9" || string(packet[42:]) != want {
			t.Errorf("from %s to %s: %q", from, to, packet[42:])
		}
	}
	received(door, "first")

	b.mux.Close() // as the end of its process does
	again, err := h.Restart(t).Recover(t.Context(), b.ID())
	if err != nil {
		t.Fatal(err)
	}
	door2, err := again.Door(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer door2.Close()
	b.mux = greet(t, again, b.spec, nil)
	send("second")
	received(door2, "second")
	if err := again.Destroy(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := again.Door(t.Context()); airlock.CodeOf(err) != airlock.Gone {
		t.Errorf("the door of a destroyed sandbox: %v", err)
	}
	if _, err := h.create(t, nil, nil).Door(t.Context()); airlock.CodeOf(err) != airlock.NotFound {
		t.Errorf("the door of a sandbox without a link: %v", err)
	}
}

// frame reads the next frame of a kind of protocol.
func frame(t *testing.T, door *os.File, kind uint16) []byte {
	t.Helper()
	door.SetReadDeadline(time.Now().Add(patience))
	buf := make([]byte, 1<<16)
	for {
		n, err := door.Read(buf)
		if err != nil {
			t.Fatalf("read the door: %v", err)
		}
		if n >= 42 && binary.BigEndian.Uint16(buf[12:]) == kind {
			return bytes.Clone(buf[:n])
		}
	}
}
