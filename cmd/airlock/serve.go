package main

import (
	"context"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"airlock.dev/airlock"
	"airlock.dev/airlock/api"
	"airlock.dev/airlock/audit"
	"airlock.dev/airlock/cli"
	"airlock.dev/airlock/cluster"
	"airlock.dev/airlock/control"
	"airlock.dev/airlock/gateway/inject"
	"airlock.dev/airlock/gateway/process"
	"airlock.dev/airlock/gateway/root"
	"airlock.dev/airlock/gateway/wire"
	"airlock.dev/airlock/image"
	"airlock.dev/airlock/isolation/gvisor"
	"airlock.dev/airlock/keeper"
	"airlock.dev/airlock/keys"
	"airlock.dev/airlock/keystore"
	"airlock.dev/airlock/localca"
	"airlock.dev/airlock/mirror"
	"airlock.dev/airlock/policy"
	"airlock.dev/airlock/secrets"
)

// serve is `airlock serve` as its user starts it: it takes the data
// directory and hands over to a keeper in namespaces of its own.
func serve(ctx context.Context, o cli.ServeOptions) error {
	lock, err := lockDataDir(o.DataDir)
	if err != nil {
		return err
	}
	defer lock.Close()
	sweepRuns(o.DataDir)
	code, err := keeper.Enter(keeperName, lock)
	if err != nil {
		return err
	}
	if code != 0 {
		os.Exit(code) // the server has said why
	}
	return nil
}

func lockDataDir(dir string) (*os.File, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("make the data directory: %w", err)
	}
	if longest := len(unix.RawSockaddrUnix{}.Path) - 1 - len("/airlock.sock"); len(dir) > longest {
		return nil, airlock.Invalidf("data-dir", fmt.Sprintf("choose one of at most %d bytes", longest), "the path of the data directory has %d bytes, too many for the socket in it", len(dir))
	}
	lock, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open the data directory's lock: %w", err)
	}
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		lock.Close()
		return nil, &airlock.Error{Code: airlock.Conflict, Field: "data-dir", Message: fmt.Sprintf("another airlock serve uses %s", dir), Hint: "stop it or choose another --data-dir"}
	}
	return lock, nil
}

// cgroupBase names the control groups of one data directory.
func cgroupBase(dataDir, suffix string) string {
	abs, err := filepath.Abs(dataDir)
	if err != nil {
		abs = dataDir
	}
	sum := sha256.Sum256([]byte(abs))
	return "airlock-" + hex.EncodeToString(sum[:4]) + suffix
}

// guestBinary is beside this one, unless the environment says otherwise.
func guestBinary() (string, error) {
	if p := os.Getenv("AIRLOCK_GUEST"); p != "" {
		return p, nil
	}
	exe, err := os.Executable()
	if err != nil {
		return "", fmt.Errorf("find this binary: %w", err)
	}
	p := filepath.Join(filepath.Dir(exe), "airlock-guest")
	if _, err := os.Stat(p); err != nil {
		return "", &airlock.Error{Code: airlock.NotFound, Message: "airlock-guest is not beside airlock", Hint: "build both with make build, or set AIRLOCK_GUEST", Err: err}
	}
	return p, nil
}

// tokenHelper is the program for root keys in PKCS#11 tokens, beside this one;
// not every build has it, and whoever needs it is told.
func tokenHelper() string {
	exe, err := os.Executable()
	if err != nil {
		return ""
	}
	return filepath.Join(filepath.Dir(exe), "airlock-pkcs11")
}

// runscExe is the static binary for gVisor's re-executions when this one is
// not: a race-built server is linked dynamically, which gVisor cannot use.
func runscExe() string { return os.Getenv("AIRLOCK_RUNSC") }

// serveInside is the server, started by the keeper.
func serveInside(ctx context.Context, o cli.ServeOptions) (err error) {
	stderr := os.NewFile(keeper.StderrFD, "stderr")
	var handler slog.Handler = slog.NewTextHandler(stderr, nil)
	if o.JSON {
		handler = slog.NewJSONHandler(stderr, nil)
	}
	log := slog.New(handler)
	held := keeper.Connect()

	if err := raiseDescriptorLimit(); err != nil {
		return err
	}
	keep, err := keystore.Open(ctx, keystore.Config{Root: o.RootKey, DataDir: o.DataDir, KeysDir: o.KeysDir, TokenHelper: tokenHelper()})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, keep.Close()) }()
	for _, problem := range keep.Problems() {
		log.Warn("keys", "problem", problem)
	}
	store, err := cluster.OpenBolt(filepath.Join(o.DataDir, "state.db"))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, store.Close()) }()
	guest, err := guestBinary()
	if err != nil {
		return err
	}
	authority, err := root.Open(ctx, filepath.Join(o.DataDir, "gateway"), keep)
	if err != nil {
		return err
	}
	home, _ := os.UserHomeDir() // without one, nothing is found there
	registries, err := mirror.Find(ctx, os.Environ(), home, os.DirFS("/"))
	if err != nil {
		return err
	}
	for _, why := range registries.Skipped {
		log.Info("a setting of this machine's registries is not for sandboxes", "why", why)
	}
	makeImage := func(t image.Trust) (image.Image, error) {
		return image.Host(filepath.Join(runtimeDir, "images"), guest, airlock.HostUserBase, image.Options{Trust: t, Env: registries.Env, Files: registries.Files})
	}
	img, err := makeImage(image.Trust{PEM: authority.PEM(), ID: authority.ID()})
	if err != nil {
		return err
	}
	disk, err := diskDir(o.DataDir)
	if err != nil {
		return err
	}
	driver, err := gvisor.New(gvisor.Config{
		RuntimeDir: runtimeDir, DiskDir: disk, CgroupBase: cgroupBase(o.DataDir, ""),
		Keeper: held, OwnNamespace: true, DebugDir: os.Getenv("AIRLOCK_GVISOR_DEBUG"), Exe: runscExe(), Log: log,
	})
	if err != nil {
		return err
	}
	host, err := hostCapacity(o.DataDir, o.MaxMemoryMB)
	if err != nil {
		return err
	}
	trail, err := openTrail(ctx, o, keep, log)
	if err != nil {
		return err
	}
	defer func() {
		closing, cancel := context.WithTimeout(context.WithoutCancel(ctx), trailClose)
		defer cancel()
		err = errors.Join(err, trail.Close(closing))
	}()
	policies, err := control.OpenPolicies(ctx, o.Policies, filepath.Join(o.DataDir, "policies.last"), trail, log)
	if err != nil {
		return err
	}
	kept := secrets.New(store, keep)
	sandboxes, err := control.New(ctx, control.Config{
		Store: store, Driver: driver, Image: img, OpenImage: sync.OnceValues(func() (image.Image, error) {
			world, err := worldRoots()
			if err != nil {
				return image.Image{}, err
			}
			return makeImage(image.Trust{PEM: append(append(authority.PEM(), '\n'), world...), ID: authority.ID() + "+world"})
		}), Host: host, Team: host, Log: log, Hold: o.Hold, Registries: registryHosts(registries, log), Secrets: kept,
		Pool:     control.PoolSize{Least: o.PoolLeast, Most: o.PoolMost},
		Boundary: control.Boundary{Policies: policies.Current, Trail: trail}, Sealer: keep,
	})
	if err != nil {
		return err
	}
	defer sandboxes.Close(false)
	if err := sandboxes.Recover(ctx); err != nil {
		return err
	}
	// The new root of a rotation signs as soon as all that runs trusts it.
	if sandboxes.Trust(authority.ID()) {
		if err := authority.Promote(); err != nil {
			return err
		}
	}
	way, err := startGateway(ctx, o, authority, credentials(registries, log), sandboxes, held, stderr, log)
	if err != nil {
		return err
	}
	defer way.Close()
	sandboxes.Through(ctx, way)
	policies.OnChange(sandboxes.Reconsider)
	socket := filepath.Join(o.DataDir, "airlock.sock")
	tcp, err := listener(held, "listen/tcp", "tcp", o.Listen)
	if err != nil {
		return err
	}
	domain := publicDomain(o.Domain, tcp.Addr())
	handle := api.New(api.Config{Sandboxes: sandboxes, Keys: keys.New(store), Secrets: kept, Root: authority, Trail: trail, Policies: policies, Domain: domain, Log: log, Version: version})
	local, err := listener(held, "listen/unix", "unix", socket)
	if err != nil {
		return err
	}
	remote, operator := api.Server(handle), api.Server(handle)
	// The socket's file mode is its authentication: root of this machine.
	operator.ConnContext = func(ctx context.Context, _ net.Conn) context.Context {
		return api.WithPrincipal(ctx, airlock.Principal{Team: localTeam, Role: airlock.Operator, KeyID: "local"})
	}
	scheme := "http"
	if o.TLSCert != "" || o.Domain != "" {
		scheme = "https"
	}
	var ca *localca.CA
	if scheme == "https" && o.TLSCert == "" {
		if ca, err = localca.Open(ctx, filepath.Join(o.DataDir, "tls"), hostOf(o.Domain), keep); err != nil {
			return err
		}
		remote.TLSConfig = &tls.Config{GetCertificate: ca.GetCertificate}
	}
	var group errgroup.Group
	group.Go(func() error {
		if scheme == "https" {
			return served(remote.ServeTLS(tcp, o.TLSCert, o.TLSKey))
		}
		return served(remote.Serve(tcp))
	})
	group.Go(func() error { return served(operator.Serve(local)) })
	if err := held.Ready(); err != nil {
		return fmt.Errorf("tell the keeper that the server is ready: %w", err)
	}
	stdout := os.NewFile(keeper.StdoutFD, "stdout")
	ready := listening{URL: fmt.Sprintf("%s://%s", scheme, tcp.Addr()), Socket: socket, Domain: domain}
	if ca != nil {
		ready.Authority = ca.CertFile
	}
	if err := ready.write(stdout, o.JSON); err != nil {
		log.Warn("standard output is gone; the server runs", "err", err)
	}
	log.Info("ready", "listen", tcp.Addr().String(), "memoryMB", host.MemoryMB, "diskMB", host.DiskMB)

	<-ctx.Done()
	reload := errors.Is(context.Cause(ctx), keeper.ErrReload)
	stop, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	if !reload {
		log.Info("stopping; all sandboxes end") // SIGHUP replaces the server and keeps them
		sandboxes.Close(true)                   // ends the streams too, so that the servers below have little to wait for
		driver.Close()
		os.Remove(socket)
	} else {
		stop, cancel = context.WithTimeout(stop, time.Second)
		defer cancel()
	}
	for _, s := range []*http.Server{remote, operator} {
		if s.Shutdown(stop) != nil {
			s.Close()
		}
	}
	return group.Wait()
}

// registryHosts are where the profile packages leads besides the public ones.
func registryHosts(s mirror.Settings, log *slog.Logger) (all []policy.Registry) {
	for _, h := range s.Hosts {
		if _, err := policy.HostName(h.Name); err != nil {
			log.Warn("a registry of this machine has a name that policies cannot have", "err", err)
			continue
		}
		all = append(all, policy.Registry{Host: h.Name, Port: h.Port})
	}
	return all
}

// worldFiles are where systems have the roots of the world in one file.
var worldFiles = []string{"/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt", "/etc/ssl/ca-bundle.pem", "/etc/ssl/cert.pem"}

// worldRoots are those that this machine trusts.
func worldRoots() ([]byte, error) {
	for _, name := range append([]string{os.Getenv("SSL_CERT_FILE")}, worldFiles...) {
		if name == "" {
			continue
		}
		text, err := os.ReadFile(name)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("read the roots that this machine trusts: %w", err)
		}
		var roots []byte // without what people write in between
		for block, rest := pem.Decode(text); block != nil; block, rest = pem.Decode(rest) {
			if block.Type == "CERTIFICATE" {
				roots = append(roots, pem.EncodeToMemory(&pem.Block{Type: block.Type, Bytes: block.Bytes})...)
			}
		}
		return roots, nil
	}
	return nil, airlock.Errorf(airlock.NotFound, "this machine has no file of the roots that it trusts, which policies with @passthrough need: install its package of CA certificates")
}

// credentials are those of this machine's registries, which sandboxes read by
// and never have.
func credentials(s mirror.Settings, log *slog.Logger) (all []inject.Secret) {
	for i, c := range s.Credentials {
		kind, value, _ := strings.Cut(c.Authorization(), " ")
		secret := inject.Secret{
			Name: fmt.Sprintf("registry-%d-%s", i+1, c.Host.Name), Value: value, Always: true,
			Scope: inject.Scope{Host: c.Host.Name, Port: c.Host.Port, Methods: []string{"GET", "HEAD"}, Path: strings.TrimSuffix(c.Path, "/") + "/{rest...}", Place: inject.Place{Header: "Authorization", Prefix: kind + " "}},
		}
		if value == "" {
			secret.Value, secret.Place.Prefix = kind, ""
		}
		err := secret.Validate()
		if c.Host.Scheme != "https" {
			err = errors.New("it would travel in the clear")
		}
		if err != nil {
			log.Warn("a credential of this machine's registries is not used for sandboxes", "host", c.Host.Name, "err", err)
			continue
		}
		all = append(all, secret)
	}
	return all
}

// startGateway starts the process that is every sandbox's way out.
func startGateway(ctx context.Context, o cli.ServeOptions, authority *root.Root, all []inject.Secret, decider process.Decider, held process.Keeper, stderr *os.File, log *slog.Logger) (*process.Gateway, error) {
	cert, signer := authority.Current()
	key, err := x509.MarshalPKCS8PrivateKey(signer)
	if err != nil {
		return nil, fmt.Errorf("encode the gateway's key: %w", err)
	}
	return process.Start(ctx, process.Config{
		Name: gatewayName, UID: airlock.GatewayUser, Env: gatewayEnv(), Stderr: stderr, Decider: decider, Keeper: held, Log: log,
		Start: wire.Start{Root: cert.Raw, Key: key, Reachable: o.PublicRanges, ProxyResolves: o.ProxyResolves, Secrets: all, Budgets: wire.Budgets(o.Network)},
	})
}

// gatewayEnv is what of the environment the gateway gets: how this machine
// trusts and reaches the world, and no secret of somebody else.
func gatewayEnv() []string {
	var env []string
	for _, name := range []string{"SSL_CERT_FILE", "SSL_CERT_DIR", "HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy", "NO_PROXY", "no_proxy", "GODEBUG", "GOTRACEBACK", "TZ"} {
		if v, ok := os.LookupEnv(name); ok {
			env = append(env, name+"="+v)
		}
	}
	return env
}

// trailClose is how long the last checkpoint may take to be signed; without
// it the next server signs it.
const trailClose = 10 * time.Second

func openTrail(ctx context.Context, o cli.ServeOptions, keep *keystore.Keystore, log *slog.Logger) (*audit.Log, error) {
	keys, err := keep.SigningKeys(ctx)
	if err != nil {
		return nil, err
	}
	cfg := audit.Config{
		Dir: filepath.Join(o.DataDir, "audit"), Installation: keep.Installation(), Version: version, Sealer: keep, Keys: keys,
		Period: o.AuditPeriod, Budget: o.AuditBudget, Retention: o.AuditRetention, AcceptDamage: o.AuditRepair, Log: log,
	}
	if o.Witnesses != "" {
		if cfg.Witnesses, err = os.ReadFile(o.Witnesses); err != nil {
			return nil, airlock.Invalidf("witnesses", "name a file that can be read", "the witness policy cannot be read").Because(err)
		}
	}
	return audit.Open(ctx, cfg)
}

// publicDomain is what clients are told that hosts end in: with the port on
// which they are served, unless it is TLS's own or the operator says another.
func publicDomain(domain string, listen net.Addr) string {
	addr, ok := listen.(*net.TCPAddr)
	host, port, err := net.SplitHostPort(domain)
	switch {
	case domain == "":
		return ""
	case err != nil && ok:
		host, port = domain, strconv.Itoa(addr.Port)
	}
	if port == "443" {
		return host
	}
	return net.JoinHostPort(host, port)
}

// listening is what a server says when it is ready.
type listening struct {
	URL       string `json:"listening"`
	Socket    string `json:"socket"`              // for its operator
	Domain    string `json:"domain,omitempty"`    // with its port
	Authority string `json:"authority,omitempty"` // file with the certificate that clients have to trust
}

// write says it as one JSON line, or to a person.
func (l listening) write(w io.Writer, asJSON bool) error {
	if asJSON {
		return json.NewEncoder(w).Encode(l)
	}
	text := fmt.Sprintf("airlock listens on %s and %s\n", l.URL, l.Socket)
	if l.Domain != "" {
		text += fmt.Sprintf("the API is https://api.%[1]s and a sandbox's port https://PORT-ID.%[1]s; for the E2B SDKs:\n  export E2B_DOMAIN=%[1]s\n", l.Domain)
	}
	if l.Authority != "" {
		text += fmt.Sprintf("its certificate is from an authority of its own, for this domain only; clients trust it with one of:\n"+
			"  export NODE_EXTRA_CA_CERTS=%[1]s    # node: in addition to all others\n"+
			"  export SSL_CERT_FILE=%[1]s          # Python, Go, curl: in place of all others\n", l.Authority)
	}
	_, err := io.WriteString(w, text)
	return err
}

// hostOf is a domain without the port.
func hostOf(domain string) string {
	host, _, _ := strings.Cut(domain, ":")
	return strings.ToLower(host)
}

// localTeam is whose sandboxes the operator's socket sees.
const localTeam = "default"

func served(err error) error {
	if errors.Is(err, http.ErrServerClosed) {
		return nil
	}
	return fmt.Errorf("serve: %w", err)
}

// listener returns the one that the keeper holds from the server before, so
// that clients meet no closed port while servers change, or a new one.
func listener(held *keeper.Client, name, network, address string) (net.Listener, error) {
	if f := held.Take(name); f != nil {
		defer f.Close()
		ln, err := net.FileListener(f)
		if err != nil {
			return nil, fmt.Errorf("take over the listener %s: %w", address, err)
		}
		return keepFile(ln), nil
	}
	if network == "unix" {
		os.Remove(address) // left by a killed server: the lock says that it is not in use
	}
	ln, err := net.Listen(network, address)
	if err != nil {
		return nil, &airlock.Error{Code: airlock.Conflict, Field: "listen", Message: fmt.Sprintf("cannot listen on %s", address), Hint: "is the port in use? choose another with --listen", Err: err}
	}
	if network == "unix" {
		if err := os.Chmod(address, 0o600); err != nil {
			return nil, fmt.Errorf("protect the operator's socket: %w", err)
		}
	}
	f, err := ln.(interface{ File() (*os.File, error) }).File()
	if err != nil {
		return nil, fmt.Errorf("share the listener %s: %w", address, err)
	}
	defer f.Close()
	if err := held.Hold(name, f); err != nil {
		return nil, fmt.Errorf("give the listener %s to the keeper: %w", address, err)
	}
	return keepFile(ln), nil
}

// keepFile leaves a socket's file in place when one server of several closes it.
func keepFile(ln net.Listener) net.Listener {
	if u, ok := ln.(*net.UnixListener); ok {
		u.SetUnlinkOnClose(false)
	}
	return ln
}

func raiseDescriptorLimit() error {
	var l unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &l); err != nil {
		return fmt.Errorf("read the limit of open files: %w", err)
	}
	l.Cur = l.Max
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &l); err != nil {
		return fmt.Errorf("raise the limit of open files: %w", err)
	}
	return nil
}

// hostCapacity is what sandboxes may reserve: the machine less the reserve
// that the host keeps for itself.
func hostCapacity(dataDir string, maxMemoryMB int) (control.Capacity, error) {
	var c control.Capacity
	var info unix.Sysinfo_t
	if err := unix.Sysinfo(&info); err != nil {
		return c, fmt.Errorf("read the host's memory: %w", err)
	}
	total := int(uint64(info.Totalram) * uint64(info.Unit) >> 20)
	c.MemoryMB = max(0, total-max(1024, total/10))
	if maxMemoryMB > 0 {
		c.MemoryMB = min(c.MemoryMB, maxMemoryMB)
	}
	var fs unix.Statfs_t
	if err := unix.Statfs(dataDir, &fs); err != nil {
		return c, fmt.Errorf("read the free space of the data directory: %w", err)
	}
	free := int(fs.Bavail * uint64(fs.Bsize) >> 20)
	c.DiskMB = max(0, free-max(1024, free/10))
	threads := min(readInt("/proc/sys/kernel/pid_max", 32768), readInt("/proc/sys/kernel/threads-max", 32768))
	c.Processes = threads - max(2048, threads/10)
	var files unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &files); err != nil {
		return c, fmt.Errorf("read the limit of open files: %w", err)
	}
	c.Descriptors = int(min(files.Cur, 1<<20)) - 1024
	c.Sandboxes = 10_000
	return c, nil
}

func readInt(path string, fallback int) int {
	data, err := os.ReadFile(path)
	if err != nil {
		return fallback
	}
	n := fallback
	fmt.Sscan(strings.TrimSpace(string(data)), &n)
	return n
}
