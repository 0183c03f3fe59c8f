// Airlock-guest is the program inside every sandbox: PID 1, the file helper
// that PID 1 starts, and sudo, told apart by how it is called.
package main

import (
	"os"
	"path/filepath"

	"airlock.dev/airlock/guest"
)

// channelFD is where the channel is inherited.
const channelFD = 3

// passFD is where a helper inherits the socket for the files that it passes.
const passFD = 4

func main() {
	switch {
	case filepath.Base(os.Args[0]) == "sudo":
		os.Exit(guest.Sudo())
	case len(os.Args) == 4 && os.Args[1] == "files":
		guest.ServeFiles(guest.Packets(channelFD), passFD, os.Args[2], os.Args[3])
	case len(os.Args) == 2 && os.Args[1] == "version":
		os.Stdout.WriteString("airlock-guest " + guest.Version + "\n")
	default:
		// The end of the channel is the end of the sandbox.
		if err := guest.Run(guest.Packets(channelFD), guest.Options{}); err != nil {
			os.Stderr.WriteString("airlock-guest: " + err.Error() + "\n")
		}
	}
}
