package gvisor

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/control/client"
	"gvisor.dev/gvisor/pkg/urpc"
	"gvisor.dev/gvisor/runsc/boot"
	"gvisor.dev/gvisor/runsc/config"
	"gvisor.dev/gvisor/runsc/container"

	"airlock.dev/airlock"
	"airlock.dev/airlock/isolation"
)

// doorName is the door's among what the keeper holds; no sandbox has it as id.
func doorName(id string) string { return id + ".door" }

// doorQueue is how many bytes of frames wait in each direction.
const doorQueue = 4 << 20

// doorPair returns the two ends of a link: no device of the host is behind it.
func doorPair() (ours, theirs *os.File, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("make the sandbox's door: %w", err)
	}
	for _, fd := range fds {
		// Forced sizes need privileges; the default is slower, not wrong.
		unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUFFORCE, doorQueue)
		unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, doorQueue)
	}
	return os.NewFile(uintptr(fds[0]), "door"), os.NewFile(uintptr(fds[1]), "link"), nil
}

// start starts the guest, with a link if there is one. runsc itself takes links
// from a namespace of the host; here there is none, so the kernel is told of the
// link directly, and runsc to leave the network as it is.
func start(c *container.Container, conf *config.Config, link *isolation.Link, end *os.File) error {
	if link == nil {
		return c.Start(conf)
	}
	conn, err := client.ConnectTo(c.Sandbox.GetControlSocketPath())
	if err != nil {
		return fmt.Errorf("connect to the application kernel: %w", err)
	}
	defer conn.Close()
	if err := conn.Call(boot.ContMgrSetNetworkArgs, linkArgs(link, end), nil); err != nil {
		return fmt.Errorf("give the sandbox its link: %w", err)
	}
	asIs := *conf
	asIs.Network = config.NetworkHost
	return c.Start(&asIs)
}

func linkArgs(link *isolation.Link, end *os.File) *boot.CreateLinksAndRoutesArgs {
	eth := boot.FDBasedLink{
		Name: "eth0", MTU: link.MTU, LinkAddress: link.MAC, NumChannels: 1,
		// The frames never leave this machine's memory.
		RXChecksumOffload: true, TXChecksumOffload: true,
	}
	for _, p := range link.Addresses {
		eth.Addresses = append(eth.Addresses, boot.IPWithPrefix{Address: p.Addr().AsSlice(), PrefixLen: p.Bits()})
		eth.Routes = append(eth.Routes, boot.Route{Destination: network(p)})
	}
	args := &boot.CreateLinksAndRoutesArgs{
		FilePayload:   urpc.FilePayload{Files: []*os.File{end}},
		LoopbackLinks: []boot.LoopbackLink{boot.DefaultLoopbackLink},
		FDBasedLinks:  []boot.FDBasedLink{eth},
	}
	for _, g := range link.Gateways {
		all := netip.PrefixFrom(netip.IPv4Unspecified(), 0)
		into := &args.Defaultv4Gateway
		if g.Is6() {
			all, into = netip.PrefixFrom(netip.IPv6Unspecified(), 0), &args.Defaultv6Gateway
		}
		*into = boot.DefaultRoute{Route: boot.Route{Destination: network(all), Gateway: g.AsSlice()}, Name: eth.Name}
	}
	return args
}

func network(p netip.Prefix) net.IPNet {
	return net.IPNet{IP: p.Masked().Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}

// Door implements isolation.Sandbox.
func (s *sandbox) Door(ctx context.Context) (*os.File, error) {
	s.channelMu.Lock()
	defer s.channelMu.Unlock()
	switch {
	case !s.meta.Door:
		return nil, airlock.Errorf(airlock.NotFound, "the sandbox has no network")
	case s.door == nil:
		return nil, airlock.Errorf(airlock.Gone, "the sandbox is gone")
	}
	fd, err := unix.FcntlInt(s.door.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open the sandbox's door: %w", err)
	}
	if err := unix.SetNonblock(fd, true); err != nil { // Fd() made the shared description blocking
		unix.Close(fd)
		return nil, fmt.Errorf("open the sandbox's door: %w", err)
	}
	return os.NewFile(uintptr(fd), "door"), nil
}
