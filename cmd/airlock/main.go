// Command airlock is the whole of Airlock in one binary: the command line,
// the keeper, the server, and gVisor's runsc when it re-executes itself. This
// file chooses which, by the name it was started under; the others wire.
package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"runtime/debug"

	"golang.org/x/sys/unix"

	"airlock.dev/airlock/cli"
	"airlock.dev/airlock/doctor"
	"airlock.dev/airlock/gateway"
	"airlock.dev/airlock/isolation/gvisor"
	"airlock.dev/airlock/keeper"
)

// The names under which this binary runs itself again.
const (
	keeperName  = "airlock-keeper"  // the first process of the server's namespaces
	serverName  = "airlock-server"  // its child
	gatewayName = "airlock-gateway" // the server's child, of a user of its own
	localName   = "airlock-local"   // `airlock run` without a server, in namespaces of its own
)

func main() {
	if gvisor.ReExecuted(os.Args) {
		gvisor.Main()
	}
	doctor.Main() // returns unless this process is one of its probes
	switch os.Args[0] {
	case keeperName:
		os.Exit(runKeeper())
	case serverName:
		ctx, cancel := keeper.Context()
		defer cancel()
		stdout, stderr := os.NewFile(keeper.StdoutFD, "stdout"), os.NewFile(keeper.StderrFD, "stderr")
		unix.CloseOnExec(keeper.StdoutFD)
		unix.CloseOnExec(keeper.StderrFD)
		debug.SetCrashOutput(stderr, debug.CrashOptions{})
		os.Exit(cli.Main(ctx, os.Args[1:], cli.Deps{
			Version: version, Serve: serveInside, Stdout: stdout, Stderr: stderr,
			Required: func(context.Context, string) []doctor.Finding { return nil }, // looked at before the keeper was started
		}))
	case gatewayName:
		os.Exit(gateway.Main(slog.New(slog.NewTextHandler(os.Stderr, nil))))
	case localName:
		os.Exit(runLocal())
	}
	if len(os.Args) > 1 && os.Args[1] == "runsc" {
		gvisor.CLI(os.Args[2:])
	}
	ctx, cancel := signal.NotifyContext(context.Background(), os.Interrupt, unix.SIGTERM)
	defer cancel()
	os.Exit(cli.Main(ctx, os.Args[1:], cli.Deps{Version: version, Serve: serve, EnterLocal: enterLocal, TokenHelper: tokenHelper()}))
}

// version is set by the linker for releases.
var version = "0.1.0-dev"

func runKeeper() int {
	log := slog.New(slog.NewTextHandler(os.Stderr, nil))
	unix.CloseOnExec(3) // the data directory's lock: held by being open here
	if err := settle(); err != nil {
		log.Error("settle in the namespaces", "err", err)
		return 1
	}
	return keeper.Run(log, serverName)
}

// runtimeDir is where what ends with the namespaces is kept: images and
// sandboxes' state. It is the same for all since each has a tmpfs of its own there.
const runtimeDir = "/run/airlock"

func settle() error {
	if err := os.MkdirAll(runtimeDir, 0o711); err != nil { // on the host: an empty mount point
		return err
	}
	if err := keeper.Settle(); err != nil {
		return err
	}
	return unix.Mount("tmpfs", runtimeDir, "tmpfs", unix.MS_NODEV, "mode=0711")
}

// diskDir shows the data directory's place for overlays under a plain path,
// since gVisor takes it in a list that commas separate. It outlives servers.
func diskDir(dataDir string) (string, error) {
	real, shown := filepath.Join(dataDir, "disk"), filepath.Join(runtimeDir, "disk")
	for _, dir := range []string{real, shown} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return "", fmt.Errorf("make the directory for overlays: %w", err)
		}
	}
	a, errA := os.Stat(real)
	b, errB := os.Stat(shown)
	if err := errors.Join(errA, errB); err != nil {
		return "", fmt.Errorf("look at the directory for overlays: %w", err)
	}
	if os.SameFile(a, b) {
		return shown, nil
	}
	if err := unix.Mount(real, shown, "", unix.MS_BIND, ""); err != nil {
		return "", fmt.Errorf("show the directory for overlays: %w", err)
	}
	return shown, nil
}
