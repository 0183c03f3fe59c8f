package cli

import (
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"regexp"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"airlock.dev/airlock"
	"airlock.dev/airlock/audit"
	"airlock.dev/airlock/doctor"
)

func (a *app) serve() *cobra.Command {
	var o ServeOptions
	var maxMemory, period, retention, netBytes, netAnswer string
	cmd := &cobra.Command{
		Use:   "serve",
		Short: "Run the server: an API for sandboxes on this machine",
		Long: `Serve runs the API, which the official E2B SDKs speak, and keeps its state in
--data-dir. It listens on the loopback address only, unless it speaks TLS. On
this machine its operator needs no key: the commands use the socket in the data
directory. Everyone else needs one from ` + "`airlock key create`" + `.

With --domain it speaks TLS, and every port of every sandbox has a host:
https://PORT-ID.DOMAIN; the API is https://api.DOMAIN. Without a certificate of
yours it makes a certificate authority for that domain only, keeps it in
DATA-DIR/tls and says how clients trust it. All hosts below the domain must
resolve to this machine; many systems do that by themselves for names that end
in .localhost.

A root key outside the data directory wraps every key that it stores. At the
first start it makes one, DATA-DIR.keys/root.key; --root-key names another: a
file, systemd:NAME for a credential of its unit, or a pkcs11: URI for a key in
a token. Back it up apart from the data directory: without it, what it wraps is
lost. ` + "`airlock keystore`" + ` lists and rotates keys.

When it is ready it says where it listens; with --json that is one line such as
{"listening":"http://127.0.0.1:3000","socket":"/var/lib/airlock/airlock.sock"}.

It refuses to start on a machine that cannot run sandboxes and says what to do;
` + "`airlock doctor`" + ` says it at any time.`,
		Example: `  airlock serve
  airlock serve --listen 127.0.0.1:0 --data-dir /srv/airlock
  airlock serve --listen 127.0.0.1:8443 --domain airlock.localhost
  airlock serve --listen :8443 --tls-cert cert.pem --tls-key key.pem --domain sandbox.example.org`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			o.DataDir, o.JSON = a.dataDir, a.json
			if err := checkListen(o); err != nil {
				return err
			}
			if maxMemory != "" {
				var err error
				if o.MaxMemoryMB, err = parseMB("--max-memory", maxMemory); err != nil {
					return err
				}
			}
			var err error
			if o.AuditPeriod, err = audit.ParsePeriod(period); err != nil {
				return err
			}
			if o.AuditRetention, err = parseDays("--audit-retention", retention); err != nil {
				return err
			}
			if o.Hold < time.Second || o.Hold > time.Hour {
				return airlock.Invalidf("--approval-timeout", "give 1s to 1h", "--approval-timeout: %s is no time that a request can wait", o.Hold)
			}
			if err := o.Network.set(netBytes, netAnswer); err != nil {
				return err
			}
			if o.PoolMost < 0 || o.PoolMost > poolMost {
				return airlock.Invalidf("--pool-most", fmt.Sprintf("give 0 to %d", poolMost), "--pool-most: %d is no number of sandboxes", o.PoolMost)
			}
			if o.PoolLeast < 0 || o.PoolLeast > o.PoolMost {
				return airlock.Invalidf("--pool", "give 0 to as many as --pool-most", "--pool: %d sandboxes cannot be kept with --pool-most %d", o.PoolLeast, o.PoolMost)
			}
			if o.Domain != "" && !domainName.MatchString(o.Domain) {
				return airlock.Invalidf("--domain", "give a host name of two parts or more, such as airlock.localhost or sandbox.example.org; a port may follow", "--domain: %q is no host name for sandboxes", o.Domain)
			}
			if err := doctor.Fatal(a.Required(cmd.Context(), a.dataDir)); err != nil {
				return err
			}
			return a.Serve(cmd.Context(), o)
		},
	}
	flags := cmd.Flags()
	flags.StringVar(&o.Listen, "listen", "127.0.0.1:3000", "address; any but a loopback one needs TLS; port 0 takes a free one")
	flags.StringVar(&o.TLSCert, "tls-cert", "", "file with the certificate chain, PEM")
	flags.StringVar(&o.TLSKey, "tls-key", "", "file with its key, PEM")
	flags.StringVar(&o.Domain, "domain", "", "what sandboxes' host names end in; TLS, with a certificate of our own if none is given; a port may follow if clients use another")
	keyFlags(flags, &o.RootKey, &o.KeysDir)
	flags.StringVar(&o.Policies, "policies", "", "`DIR` of policies, see \"airlock policy\" (default: the profile internet for every team)")
	flags.StringVar(&o.Witnesses, "witnesses", "", "file that says who cosigns the audit log's checkpoints (a C2SP witness policy)")
	flags.StringVar(&period, "audit-period", "quarter", "how long one part of the audit log is: quarter, month or day")
	flags.StringVar(&retention, "audit-retention", "", "drop parts of the audit log that ended so long ago, such as 2200d (default: keep all)")
	flags.Uint64Var(&o.AuditBudget, "audit-budget", audit.DefaultBudget, "events that one sandbox may cause; acts beyond are refused")
	flags.BoolVar(&o.AuditRepair, "audit-repair", false, "go on although the audit log was found damaged; the trail tells of it")
	flags.Var((*prefixes)(&o.PublicRanges), "public-range", "treat a `NETWORK` such as 203.0.113.0/24 as public although it is not; for machines that reach registries there; repeatable")
	flags.BoolVar(&o.ProxyResolves, "proxy-resolves", false, "let the proxy of HTTPS_PROXY resolve names, on machines that cannot; no address is known to policies then")
	flags.StringVar(&netBytes, "net-bytes", "100GiB", "bytes that one sandbox may send and receive in its life, together; then nothing crosses any more")
	flags.IntVar(&o.Network.Flows, "net-flows", 256, "connections that one sandbox may have at a time, TCP and UDP")
	flags.IntVar(&o.Network.Requests, "net-requests", 6000, "requests and new connections of one sandbox in a minute")
	flags.StringVar(&netAnswer, "net-answer", "64GiB", "the largest answer that one sandbox may get to one request")
	flags.DurationVar(&o.Hold, "approval-timeout", 2*time.Minute, "how long what a policy holds waits for an approver; then it is denied")
	flags.IntVar(&o.PoolLeast, "pool", 0, "sandboxes with the default limits to keep started before somebody asks for them; beyond, what was asked for within ten minutes is kept")
	flags.IntVar(&o.PoolMost, "pool-most", 64, "sandboxes to keep started at most, of all kinds; 0 for none")
	flags.StringVar(&maxMemory, "max-memory", "", "memory that all sandboxes together may use (default: what the machine can spare)")
	return cmd
}

// poolMost bounds what --pool-most may say.
const poolMost = 1000

// Bounds of budgets. Each flow costs the gateway up to 256 KiB of memory, and
// the first 32 of a sandbox 2 MiB.
const (
	netFlowsMost    = 4096
	netRequestsMost = 1_000_000
)

// set checks what was given.
func (n *NetworkBudgets) set(bytes, answer string) error {
	for _, f := range []struct {
		flag, text string
		to         *int64
	}{{"--net-bytes", bytes, &n.Bytes}, {"--net-answer", answer, &n.Answer}} {
		if _, err := strconv.ParseFloat(f.text, 64); err == nil { // elsewhere it is MiB, and these are named for bytes
			return airlock.Invalidf(f.flag, "give a size such as 512MB or 2GiB", "%s: %q has no unit", f.flag, f.text)
		}
		mb, err := parseMB(f.flag, f.text)
		if err != nil {
			return err
		}
		*f.to = int64(mb) << 20
	}
	for _, f := range []struct {
		flag        string
		given, most int
	}{{"--net-flows", n.Flows, netFlowsMost}, {"--net-requests", n.Requests, netRequestsMost}} {
		if f.given < 1 || f.given > f.most {
			return airlock.Invalidf(f.flag, fmt.Sprintf("give 1 to %d", f.most), "%s: %d is no budget", f.flag, f.given)
		}
	}
	return nil
}

// prefixes are a flag's networks.
type prefixes []netip.Prefix

func (p *prefixes) String() string { return "" }
func (p *prefixes) Type() string   { return "network" }

func (p *prefixes) Set(s string) error {
	n, err := netip.ParsePrefix(s)
	if err != nil || n != n.Masked() || n.Addr().Is4In6() {
		return fmt.Errorf("%q is no network: give one as 203.0.113.0/24 or 2001:db8::/32", s)
	}
	if n.Bits() == 0 {
		return fmt.Errorf("%s is every address, this machine's own too: name the networks where registries are", s)
	}
	*p = append(*p, n)
	return nil
}

// domainName has two labels at least: TLS clients take no *.localhost.
var domainName = regexp.MustCompile(`^([a-zA-Z0-9]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?\.)+[a-zA-Z]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?(:[1-9][0-9]{0,4})?$`)

// checkListen refuses to offer sandboxes to a network in the clear.
func checkListen(o ServeOptions) error {
	host, port, err := net.SplitHostPort(o.Listen)
	if err == nil {
		_, err = net.LookupPort("tcp", port)
	}
	if err != nil {
		return airlock.Invalidf("--listen", "give HOST:PORT, such as 127.0.0.1:3000", "--listen: %q is no address", o.Listen)
	}
	if (o.TLSCert == "") != (o.TLSKey == "") {
		return airlock.Invalidf("--tls-cert", "give both files", "--tls-cert and --tls-key belong together")
	}
	for _, f := range []struct{ flag, file string }{{"--tls-cert", o.TLSCert}, {"--tls-key", o.TLSKey}} {
		if f.file == "" {
			continue
		}
		r, err := os.Open(f.file)
		if err != nil {
			return notReadable(f.flag, f.file, err)
		}
		r.Close()
	}
	if o.TLSCert == "" && o.Domain == "" && !loopback(host) {
		return airlock.Invalidf("--listen", "give --tls-cert and --tls-key or --domain, or listen on 127.0.0.1 behind a proxy that speaks TLS",
			"--listen: %s is open to other machines, and keys and code would travel in the clear", o.Listen)
	}
	return nil
}

func loopback(host string) bool {
	if host == "localhost" {
		return true
	}
	addr, err := netip.ParseAddr(host)
	return err == nil && addr.Unmap().IsLoopback()
}

func (a *app) doctor() *cobra.Command {
	return &cobra.Command{
		Use:   "doctor",
		Short: "Say what this machine offers and what to do about each lack",
		Long: `Doctor looks at this machine by trying: it makes a user namespace, a cgroup and
a KVM guest, and undoes them. A server refuses to start where something fails
here; a warning costs something or stops a later part.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			findings := a.Check(cmd.Context(), a.dataDir)
			failed := false
			for _, f := range findings {
				failed = failed || f.State == doctor.Fail
				err := a.print(f, func(w io.Writer) {
					fmt.Fprintf(w, "%-5s %-16s %s\n", f.State, f.Name, f.Detail)
					if f.Remedy != "" {
						fmt.Fprintf(w, "      %-16s → %s\n", "", f.Remedy)
					}
				})
				if err != nil {
					return err
				}
			}
			if failed {
				a.note("this machine cannot run sandboxes yet")
				return &exit{code: exitFailure}
			}
			return nil
		},
	}
}

func (a *app) version() *cobra.Command {
	return &cobra.Command{
		Use:   "version",
		Short: "Print the version",
		Args:  cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			return a.print(map[string]string{"version": a.Version}, func(w io.Writer) { fmt.Fprintln(w, "airlock", a.Version) })
		},
	}
}
