// Package control is the life of sandboxes: it creates, remembers, finds
// again, bounds and ends them, and gives callers the way into each.
//
// It decides what exists and for how long. It knows nothing of HTTP, of how
// sandboxes are isolated or of how state is stored: drivers come through
// isolation, state through cluster. Start reading at Sandboxes.
package control

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"airlock.dev/airlock"
	"airlock.dev/airlock/audit"
	"airlock.dev/airlock/channel"
	"airlock.dev/airlock/cluster"
	"airlock.dev/airlock/image"
	"airlock.dev/airlock/isolation"
	"airlock.dev/airlock/policy"
)

// CreateRequest is what a client asks for.
type CreateRequest struct {
	Template string            // id or alias; "" is "base"
	Timeout  time.Duration     // until the sandbox is killed; over 0 and at most MaxTimeout
	Metadata map[string]string // labels for List
	Env      map[string]string // variables of every process
	Limits   airlock.Limits    // zero fields get the defaults
	Network  airlock.Network
	Profile  string // policies that the client asks for beside Network; "" is the default
	Policy   string // of its own, in Cedar's language; "" is none
	// Secrets are the team's that it may use, by the variables that its
	// processes get placeholders in.
	Secrets map[string]string
	Key     string  // a create with the key of a sandbox that runs returns that one; "" is none
	Timing  *Timing // of the create; may be nil
}

// MaxTimeout is the longest life that can be asked for at one time.
const MaxTimeout = 24 * time.Hour

// baseTemplates are the names of the one template there is: the host image.
// The code interpreter's name is among them so that its SDK starts; its
// kernels come with their own image.
var baseTemplates = []string{"base", "host", "code-interpreter-v1"}

// HasTemplate says whether sandboxes can be created from a template of that name.
func HasTemplate(name string) bool { return slices.Contains(baseTemplates, name) }

// Config is what Sandboxes works with.
type Config struct {
	Store  cluster.Store
	Driver isolation.Driver
	Image  image.Image
	// OpenImage is the image for teams whose policies leave some TLS undecrypted:
	// it trusts the world's roots besides the gateway's. It may be nil.
	OpenImage func() (image.Image, error)
	Host      Capacity // of all sandboxes together
	Team      Capacity // of one team's
	Log       *slog.Logger

	Pool     PoolSize      // sandboxes that are started ahead
	Boundary Boundary      // what every act passes
	Hold     time.Duration // how long a crossing waits for approval; 0 is DefaultHold
	Secrets  Secrets       // of teams; nil: there are none
	// Registries are where the profile packages leads besides the public ones.
	Registries []policy.Registry
	// Sealer encrypts what the store must not have in the clear. Without one
	// there can be no secrets in a sandbox's network.
	Sealer Sealer
}

// Sandboxes holds all sandboxes of this host. Open it with New, then Recover,
// then call anything; Close at the end.
type Sandboxes struct {
	cfg       Config
	admission *admission
	epoch     uint64
	once      once

	pool      *pool
	approvals approvals
	gateway   Gateway // nil: no sandbox has a network
	// secretChanges counts the changes of secrets: a sandbox that is being made
	// may have got them before.
	secretChanges atomic.Uint64

	mu     sync.Mutex
	live   map[string]*live
	closed bool
	wg     sync.WaitGroup // one for each live sandbox's watcher

	stop       func()         // ends what background has
	background sync.WaitGroup // samples, and the pool
}

// live is a sandbox that runs.
type live struct {
	box isolation.Sandbox
	mux *channel.Mux
	log *events

	request atomic.Pointer[policy.Set] // what its client asked for
	network sync.Mutex                 // one change of it, or of its secrets, at a time

	conns     atomic.Int32 // to its ports
	crossings crossings
	refusals  refusals
	metrics   history
	watches   *watches

	mu      sync.Mutex
	sandbox airlock.Sandbox
	stored  int64         // of sandbox.NetworkBytes
	changed chan struct{} // a new EndAt; capacity 1
	kill    chan struct{} // closed to end it
	killed  bool
	gone    chan struct{} // closed when nothing of it is left
	outcome airlock.Outcome
}

// New opens the sandboxes of a host and begins a new epoch: what an earlier
// server said to a guest is over.
func New(ctx context.Context, cfg Config) (*Sandboxes, error) {
	c := &Sandboxes{cfg: cfg, admission: newAdmission(cfg.Host, cfg.Team), once: once{running: map[[2]string]chan struct{}{}}, live: map[string]*live{}, stop: func() {}}
	c.pool = newPool(cfg.Pool, c.admission)
	c.pool.boot = c.boot
	c.pool.failed = func(err error) { cfg.Log.Error("keep sandboxes ready", "err", err) }
	c.approvals = approvals{hold: cfg.Hold, all: map[string]*held{}}
	if cfg.Hold == 0 {
		c.approvals.hold = DefaultHold
	}
	err := cfg.Store.Update(ctx, func(tx cluster.Tx) error {
		value, err := tx.Get("epoch")
		if err != nil {
			return err
		}
		c.epoch = 0
		if value != nil {
			if err := json.Unmarshal(value, &c.epoch); err != nil {
				return fmt.Errorf("read epoch: %w", err)
			}
		}
		c.epoch++
		value, err = json.Marshal(c.epoch)
		if err != nil {
			return err
		}
		return tx.Put("epoch", value)
	})
	if err != nil {
		return nil, fmt.Errorf("begin an epoch: %w", err)
	}
	return c, nil
}

const prefix = "sandbox/"

// greetTimeout is how long a guest may take to answer, on a busy host too.
const greetTimeout = 30 * time.Second

// Recover finds the sandboxes of the server before: those that run keep their
// lease, all others are removed. It must have returned before anything is served.
func (c *Sandboxes) Recover(ctx context.Context) error {
	var records []airlock.Sandbox
	for after := ""; ; {
		page, err := c.cfg.Store.Range(ctx, prefix, after, 500)
		if err != nil {
			return fmt.Errorf("read sandboxes: %w", err)
		}
		for _, p := range page {
			var sb airlock.Sandbox
			if err := json.Unmarshal(p.Value, &sb); err != nil {
				return fmt.Errorf("read %s: %w", p.Key, err)
			}
			after = p.Key
			if err := c.unseal(ctx, &sb); err != nil {
				c.cfg.Log.Error("a sandbox's secrets cannot be read; it ends", "sandbox", sb.ID, "err", err)
				sb.State = airlock.Killing
			}
			records = append(records, sb)
		}
		if len(page) == 0 {
			break
		}
	}
	var wg sync.WaitGroup
	for _, sb := range records {
		wg.Go(func() {
			if err := c.adopt(ctx, sb); err != nil {
				c.cfg.Log.Warn("a sandbox did not survive the restart", "sandbox", sb.ID, "state", sb.State, "err", err)
			}
		})
	}
	wg.Wait()
	swept, err := c.cfg.Driver.Sweep(ctx, func(id string) bool { return c.find(id) != nil })
	if err != nil {
		return fmt.Errorf("sweep: %w", err)
	}
	for _, sb := range records {
		if c.find(sb.ID) == nil {
			if err := c.forget(ctx, sb.ID); err != nil {
				return err
			}
		}
	}
	if len(records)+len(swept) > 0 {
		c.cfg.Log.Info("recovered", "sandboxes", len(c.live), "remembered", len(records), "swept", len(swept))
	}
	background, stop := context.WithCancel(context.WithoutCancel(ctx)) // ends with Close
	c.stop = stop
	c.background.Go(func() { c.sample(background, sampleEvery) })
	c.background.Go(func() { c.pool.run(background) })
	return nil
}

func (c *Sandboxes) adopt(ctx context.Context, sb airlock.Sandbox) error {
	if sb.State != airlock.Running {
		return errors.New("it was not running")
	}
	if !time.Now().Before(sb.EndAt) {
		return errors.New("its time is over")
	}
	box, err := c.cfg.Driver.Recover(ctx, sb.ID)
	if err != nil {
		return err
	}
	mux, err := c.dial(ctx, box)
	if err != nil {
		return err
	}
	if err := c.greet(ctx, mux, sb); err != nil {
		mux.Close()
		return err
	}
	request, err := policy.FromRequest(sb.Profile, sb.Policy, sb.Network, c.cfg.Registries)
	if err != nil {
		mux.Close()
		return err
	}
	c.admission.adopt(sb.Team, sb.Limits)
	c.watch(newLive(sb, request, box, mux))
	return nil
}

// dial opens the channel for this server.
func (c *Sandboxes) dial(ctx context.Context, box isolation.Sandbox) (*channel.Mux, error) {
	ctx, cancel := context.WithTimeout(ctx, greetTimeout)
	defer cancel()
	conn, err := box.Dial(ctx)
	if err != nil {
		return nil, err
	}
	mux, err := channel.Dial(ctx, conn, c.epoch)
	if err != nil {
		conn.Close()
		return nil, err
	}
	return mux, nil
}

// greet tells the guest its settings.
func (c *Sandboxes) greet(ctx context.Context, mux *channel.Mux, sb airlock.Sandbox) error {
	ctx, cancel := context.WithTimeout(ctx, greetTimeout)
	defer cancel()
	env := map[string]string{"E2B_SANDBOX": "true", "E2B_SANDBOX_ID": sb.ID, "E2B_TEMPLATE_ID": sb.TemplateID}
	maps.Copy(env, c.cfg.Image.Env)
	maps.Copy(env, sb.Env)
	for _, p := range sb.Placeholders {
		env[p.Variable] = p.Text
	}
	_, err := channel.Call[channel.HelloReply](ctx, mux, channel.MethodHello, channel.Hello{
		SandboxID: sb.ID, Env: env, MemoryBytes: int64(sb.Limits.MemoryMB) << 20, Processes: sb.Limits.Processes, OpenFiles: sb.Limits.OpenFiles,
	})
	if err != nil {
		return fmt.Errorf("greet the guest: %w", err)
	}
	return nil
}

// boot starts a sandbox that nobody owns yet; on an error nothing of it remains.
func (c *Sandboxes) boot(ctx context.Context, id string, img image.Image, l airlock.Limits, timing *Timing) (isolation.Sandbox, *channel.Mux, error) {
	spec := isolation.Spec{ID: id, RootFS: img.RootFS, Guest: img.Guest, Hostname: "sandbox", Limits: l, Step: timing.step}
	if c.gateway != nil {
		spec.Link = &link
	}
	box, err := c.cfg.Driver.Create(ctx, spec)
	if err != nil {
		return nil, nil, err
	}
	mux, err := c.dial(ctx, box)
	timing.step("channel")
	if err != nil {
		undo, cancel := context.WithTimeout(context.WithoutCancel(ctx), greetTimeout)
		defer cancel()
		return nil, nil, errors.Join(err, box.Destroy(undo))
	}
	return box, mux, nil
}

func newLive(sb airlock.Sandbox, request *policy.Set, box isolation.Sandbox, mux *channel.Mux) *live {
	l := &live{box: box, mux: mux, sandbox: sb, log: &events{}, watches: newWatches(mux), changed: make(chan struct{}, 1), kill: make(chan struct{}), gone: make(chan struct{})}
	l.request.Store(request)
	return l
}

func newID() string {
	// 26 base32 characters carry 130 random bits; 20 of them are E2B's length.
	return "i" + strings.ToLower(rand.Text())[:20]
}

// Create starts a sandbox for p's team and returns when commands can be sent.
func (c *Sandboxes) Create(ctx context.Context, p airlock.Principal, req CreateRequest) (airlock.Sandbox, error) {
	if req.Template == "" {
		req.Template = baseTemplates[0]
	}
	if !HasTemplate(req.Template) {
		return airlock.Sandbox{}, &airlock.Error{Code: airlock.NotFound, Field: "templateID", Message: fmt.Sprintf("template '%s' not found", req.Template), Hint: "use base"}
	}
	if err := validTimeout(req.Timeout); err != nil {
		return airlock.Sandbox{}, err
	}
	limits := req.Limits.WithDefaults(airlock.DefaultLimits)
	if err := limits.Validate(); err != nil {
		return airlock.Sandbox{}, err
	}
	var digest, rules string
	if req.Key != "" {
		var err error
		if digest, rules, err = req.digest(); err != nil {
			return airlock.Sandbox{}, err
		}
		leave, err := c.once.enter(ctx, p.Team, req.Key)
		if err != nil {
			return airlock.Sandbox{}, err
		}
		defer leave()
		if sb, found, err := c.made(ctx, p, req.Key, digest, rules); found || err != nil {
			return sb, err
		}
	}
	request, err := policy.FromRequest(req.Profile, req.Policy, req.Network, c.cfg.Registries)
	if err != nil {
		return airlock.Sandbox{}, err
	}
	img, err := c.image(p.Team)
	if err != nil {
		return airlock.Sandbox{}, err
	}
	sb := airlock.Sandbox{
		ID: newID(), Team: p.Team, TrustID: img.TrustID, TemplateID: req.Template, State: airlock.Creating, Metadata: req.Metadata, Env: req.Env,
		Limits: limits, StartedAt: time.Now().UTC(), Network: req.Network, AccessToken: rand.Text() + rand.Text(),
		Profile: req.Profile, Policy: req.Policy, Creator: airlock.Creator{KeyID: p.KeyID, Owner: p.Owner}, CreateKey: req.Key, CreateDigest: digest, CreateRules: rules,
	}
	if !sb.PublicTraffic() {
		sb.TrafficToken = rand.Text() + rand.Text()
	}
	sb.EndAt = sb.StartedAt.Add(req.Timeout)
	if sb.Placeholders, err = c.placeholders(ctx, p.Team, req.Secrets); err != nil {
		return airlock.Sandbox{}, err
	}
	if err := c.mayProxy(ctx, sb, req.Network.EgressProxy); err != nil {
		return airlock.Sandbox{}, err
	}
	req.Timing.step("image")
	ready := c.pool.take(img, limits)
	req.Timing.step("take")
	if ready != nil {
		sb.ID = ready.id
		defer func() {
			if ready != nil {
				c.pool.put(ready, img, limits)
			}
		}()
	}
	done, err := c.cfg.Boundary.inside(ctx, creation(p, sb, request, req.Timeout))
	if err != nil {
		return airlock.Sandbox{}, err
	}
	req.Timing.step("decide")
	err = c.admission.reserve(p.Team, limits)
	if errors.Is(err, errHostFull) { // those that nobody asked for go first
		if ready != nil {
			c.pool.put(ready, img, limits)
			ready = nil
		}
		if c.pool.drain() > 0 {
			err = c.admission.reserve(p.Team, limits)
		}
	}
	if err != nil {
		done(outcomeOf(err))
		return airlock.Sandbox{}, err
	}
	req.Timing.step("reserve")
	claimed := ready
	ready = nil // whatever happens from here on, it is nobody else's
	l, err := c.start(ctx, sb, request, img, claimed, req.Timing)
	done(outcomeOf(err))
	if err != nil {
		c.admission.release(p.Team, limits)
		return airlock.Sandbox{}, err
	}
	return l.get(), nil
}

// image is what sandboxes of a team start from.
func (c *Sandboxes) image(team string) (image.Image, error) {
	if c.cfg.OpenImage == nil || !c.cfg.Boundary.Policies().For(team).Passes() {
		return c.cfg.Image, nil
	}
	img, err := c.cfg.OpenImage()
	if err != nil {
		return image.Image{}, fmt.Errorf("create sandbox: %w", err)
	}
	return img, nil
}

// creation is the act of making a sandbox, which is one on the team.
func creation(p airlock.Principal, sb airlock.Sandbox, request *policy.Set, timeout time.Duration) act {
	a := act{sandbox: sb, request: request, asks: request, action: "sandbox:create", on: policy.Entity{Type: "Team", ID: p.Team}}
	a.caller, a.by = by(p)
	profile := sb.Profile
	if sb.Policy != "" && profile == "" {
		profile = "offline"
	}
	if profile == "" {
		profile = policy.DefaultProfile
	}
	a.context = policy.Context{
		"template": sb.TemplateID, "profile": profile, "internet": sb.Network.AllowInternet == nil || *sb.Network.AllowInternet, "publicTraffic": sb.PublicTraffic(),
		"milliCPUs": int64(sb.Limits.CPUs * 1000), "memoryMB": int64(sb.Limits.MemoryMB), "diskMB": int64(sb.Limits.DiskMB), "timeoutSeconds": int64(timeout / time.Second),
	}
	return a
}

func validTimeout(d time.Duration) error {
	if d <= 0 {
		return airlock.Invalidf("timeout", "give whole seconds from 1 on", "Timeout must be greater than 0")
	}
	if d > MaxTimeout {
		return airlock.Invalidf("timeout", "ask for less and extend it while the sandbox runs", "Timeout cannot be greater than %d hours", MaxTimeout/time.Hour)
	}
	return nil
}

// start makes a sandbox of its owner's: one that is ready, or a new one. That a
// new one begins is written down before it does, so that a server that dies in
// between leaves nothing unknown; what is ready and nobody's is swept anyway.
func (c *Sandboxes) start(ctx context.Context, sb airlock.Sandbox, request *policy.Set, img image.Image, ready *warm, timing *Timing) (_ *live, err error) {
	var box isolation.Sandbox
	var mux *channel.Mux
	defer func() {
		if err == nil {
			return
		}
		undo, cancel := context.WithTimeout(context.WithoutCancel(ctx), greetTimeout)
		defer cancel()
		if box != nil {
			mux.Close()
			if c.gateway != nil {
				c.gateway.Drop(sb.ID)
			}
			err = errors.Join(err, box.Destroy(undo))
		}
		err = errors.Join(err, c.forget(undo, sb.ID))
	}()
	if ready != nil {
		if err := c.greet(ctx, ready.mux, sb); err == nil {
			box, mux = ready.box, ready.mux
			c.pool.claimed()
			timing.step("greet")
		} else {
			c.cfg.Log.Warn("a sandbox that was ready does not answer; another one is started", "sandbox", sb.ID, "err", err)
			c.pool.end(ready)
		}
	}
	if box == nil {
		if err := c.remember(ctx, sb); err != nil {
			return nil, err
		}
		timing.step("remember")
		if box, mux, err = c.boot(ctx, sb.ID, img, sb.Limits, timing); err != nil {
			return nil, fmt.Errorf("create sandbox: %w", err)
		}
		if err := c.greet(ctx, mux, sb); err != nil {
			return nil, fmt.Errorf("create sandbox: %w", err)
		}
		timing.step("greet")
	}
	sb.State = airlock.Running
	// The lease begins when the client can use it.
	lease := sb.EndAt.Sub(sb.StartedAt)
	sb.EndAt = time.Now().UTC().Add(lease)
	if err := c.remember(ctx, sb); err != nil {
		return nil, err
	}
	timing.step("remember")
	secrets := c.secretChanges.Load()
	if err := c.openDoor(ctx, box, sb); err != nil {
		return nil, fmt.Errorf("create sandbox: %w", err)
	}
	l := newLive(sb, request, box, mux)
	timing.step("door")
	start := "cold"
	if ready != nil && box == ready.box {
		start = "pool"
	}
	l.log.add("info", "sandbox created", map[string]string{"start": start})
	c.watch(l)
	if c.secretChanges.Load() != secrets { // from now on it is told of them
		if err := c.refresh(context.WithoutCancel(ctx), l); err != nil {
			c.cfg.Log.Error("tell the gateway of secrets that changed; the sandbox has no network", "sandbox", sb.ID, "err", err)
			c.gateway.Drop(sb.ID)
		}
	}
	return l, nil
}

func (c *Sandboxes) remember(ctx context.Context, sb airlock.Sandbox) error {
	if err := c.seal(ctx, &sb); err != nil {
		return err
	}
	value, err := json.Marshal(sb)
	if err != nil {
		return fmt.Errorf("encode sandbox: %w", err)
	}
	if err := c.cfg.Store.Update(ctx, func(tx cluster.Tx) error { return tx.Put(prefix+sb.ID, value) }); err != nil {
		return fmt.Errorf("remember sandbox: %w", err)
	}
	return nil
}

func (c *Sandboxes) forget(ctx context.Context, id string) error {
	if err := c.cfg.Store.Update(ctx, func(tx cluster.Tx) error { return tx.Delete(prefix + id) }); err != nil {
		return fmt.Errorf("forget sandbox: %w", err)
	}
	return nil
}

// FindToken returns the running sandbox whose access token matches. It asks
// for every sandbox, so that the time it takes tells nothing.
func (c *Sandboxes) FindToken(match func(token string) bool) (id string, found bool) {
	c.mu.Lock()
	all := slices.Collect(maps.Values(c.live))
	c.mu.Unlock()
	for _, l := range all {
		if sb := l.get(); match(sb.AccessToken) {
			id, found = sb.ID, true
		}
	}
	return id, found
}

// watch makes a sandbox visible and ends it when its time is over, when it is
// killed, or when it ended by itself.
func (c *Sandboxes) watch(l *live) {
	c.mu.Lock()
	c.live[l.get().ID] = l
	c.wg.Add(1)
	c.mu.Unlock()
	go func() {
		defer c.wg.Done()
		c.follow(l)
	}()
}

func (c *Sandboxes) follow(l *live) {
	ended := make(chan isolation.Exit, 1)
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	var waiter sync.WaitGroup
	defer waiter.Wait()
	waiter.Go(func() {
		if exit, err := l.box.Wait(ctx); err == nil {
			ended <- exit
		}
	})
	outcome := airlock.SandboxKilled
	waiter.Go(func() { l.probe(ctx) })
	channelGone := l.mux.Done()
	timer := time.NewTimer(time.Until(l.get().EndAt))
	defer timer.Stop()
wait:
	for {
		select {
		case exit := <-ended:
			outcome = exit.Outcome
			c.cfg.Log.Info("a sandbox ended by itself", "sandbox", l.get().ID, "outcome", exit.Outcome, "detail", exit.Detail)
			break wait
		case <-channelGone:
			// The guest is gone or broke the protocol; give its kernel a
			// moment to end by itself, for the right reason.
			outcome = airlock.SandboxFailed
			channelGone = nil
			timer.Reset(time.Second)
			continue
		case <-l.kill:
			break wait
		case <-l.changed:
		case <-timer.C:
		}
		if left := time.Until(l.get().EndAt); left > 0 && channelGone != nil {
			timer.Reset(left)
		} else {
			break wait
		}
	}
	l.mu.Lock()
	l.sandbox.State = airlock.Killing
	l.outcome = outcome
	l.mu.Unlock()
	c.end(l, outcome)
}

// A guest can be stopped or blinded by root inside; then it answers nothing, or
// that it sees nothing, and its sandbox is ended. Many probes are left out on a busy host before that.
const (
	probeEvery  = 15 * time.Second
	probeAnswer = 60 * time.Second
)

// probe asks the guest for a sign of life until ctx ends or it gives none.
func (l *live) probe(ctx context.Context) {
	ticker := time.NewTicker(probeEvery)
	defer ticker.Stop()
	blind := 0 // once may be a moment without descriptors
	for {
		select {
		case <-ctx.Done():
			return
		case <-l.mux.Done():
			return
		case <-ticker.C:
		}
		ask, cancel := context.WithTimeout(ctx, probeAnswer)
		_, err := channel.Call[channel.Usage](ask, l.mux, channel.MethodUsage, channel.Empty{})
		cancel()
		if airlock.CodeOf(err) != airlock.Unavailable {
			blind = 0
		} else {
			blind++
		}
		if errors.Is(err, context.DeadlineExceeded) || blind == 2 {
			l.mux.Close() // follow takes it from here
			return
		}
	}
}

// end removes a sandbox. What fails is tried again until it works: a sandbox
// that is not gone still holds its reservation.
func (c *Sandboxes) end(l *live, outcome airlock.Outcome) {
	id := l.get().ID
	l.mux.Close()
	l.watches.wait()
	if c.gateway != nil {
		c.gateway.Drop(id)
	}
	l.crossings.breakAll(airlock.Gone, true)
	c.tellRefused(l, time.Now().Add(refusedEvery))
	for wait := 100 * time.Millisecond; ; wait = min(2*wait, 10*time.Second) {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		err := l.box.Destroy(ctx)
		if err == nil {
			err = c.forget(ctx, id)
		}
		cancel()
		if err == nil {
			break
		}
		c.cfg.Log.Error("end a sandbox; trying again", "sandbox", id, "err", err)
		c.mu.Lock()
		closed := c.closed
		c.mu.Unlock()
		if closed {
			break // the next start sweeps
		}
		time.Sleep(wait)
	}
	c.mu.Lock()
	delete(c.live, id)
	c.mu.Unlock()
	c.admission.release(l.get().Team, l.get().Limits)
	close(l.gone)
	c.cfg.Boundary.Trail.Owe(context.Background(), audit.Event{
		Type: "sandbox.end", Team: l.get().Team, Sandbox: id, Actor: audit.Actor{Kind: "system"}, Outcome: audit.Outcome{Status: "ok", Code: string(outcome)},
	})
	c.cfg.Log.Debug("sandbox ended", "sandbox", id, "outcome", outcome)
}

func (l *live) get() airlock.Sandbox {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.sandbox
}

func (l *live) end() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.killed {
		l.killed = true
		close(l.kill)
	}
}

func (c *Sandboxes) find(id string) *live {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.live[id]
}

// lookup returns a running sandbox that p may see. One of another team is as
// absent as one that never was.
func (c *Sandboxes) lookup(p airlock.Principal, id string) (*live, error) {
	l := c.find(id)
	if l == nil || l.get().Team != p.Team || l.get().State != airlock.Running {
		return nil, airlock.Errorf(airlock.NotFound, "Sandbox %q doesn't exist or you don't have access to it", id)
	}
	return l, nil
}

// Get returns a sandbox of p's team.
func (c *Sandboxes) Get(ctx context.Context, p airlock.Principal, id string) (airlock.Sandbox, error) {
	l, err := c.lookup(p, id)
	if err != nil {
		return airlock.Sandbox{}, err
	}
	if err := c.cfg.Boundary.ask(ctx, on(p, l, "sandbox:get")); err != nil {
		return airlock.Sandbox{}, err
	}
	return l.get(), nil
}

// List returns the running sandboxes of p's team, newest first.
func (c *Sandboxes) List(ctx context.Context, p airlock.Principal) ([]airlock.Sandbox, error) {
	list := act{sandbox: airlock.Sandbox{Team: p.Team}, action: "sandbox:list", on: policy.Entity{Type: "Team", ID: p.Team}}
	list.caller, list.by = by(p)
	if err := c.cfg.Boundary.ask(ctx, list); err != nil {
		return nil, err
	}
	c.mu.Lock()
	var all []airlock.Sandbox
	for _, l := range c.live {
		if sb := l.get(); sb.Team == p.Team && sb.State == airlock.Running {
			all = append(all, sb)
		}
	}
	c.mu.Unlock()
	slices.SortFunc(all, func(a, b airlock.Sandbox) int {
		if n := b.StartedAt.Compare(a.StartedAt); n != 0 {
			return n
		}
		return strings.Compare(a.ID, b.ID)
	})
	return all, nil
}

// Kill ends a sandbox and returns when nothing of it is left.
func (c *Sandboxes) Kill(ctx context.Context, p airlock.Principal, id string) error {
	l, err := c.lookup(p, id)
	if err != nil {
		return err
	}
	e, denied := c.cfg.Boundary.event(on(p, l, "sandbox:kill"))
	if denied != nil {
		c.cfg.Boundary.Trail.Queue(ctx, e)
		return denied
	}
	c.cfg.Boundary.Trail.Owe(ctx, e) // what cannot be recorded now must not keep a sandbox alive
	l.end()
	select {
	case <-l.gone:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// SetTimeout sets the end of life to d from now; d of 0 or less is now.
func (c *Sandboxes) SetTimeout(ctx context.Context, p airlock.Principal, id string, d time.Duration) (airlock.Sandbox, error) {
	return c.lease(ctx, p, id, d, false)
}

// Extend sets the end of life to d from now unless it is later already.
func (c *Sandboxes) Extend(ctx context.Context, p airlock.Principal, id string, d time.Duration) (airlock.Sandbox, error) {
	return c.lease(ctx, p, id, d, true)
}

// Connect is Extend by somebody who is to use the sandbox, and gets its tokens.
func (c *Sandboxes) Connect(ctx context.Context, p airlock.Principal, id string, d time.Duration) (airlock.Sandbox, error) {
	l, err := c.lookup(p, id)
	if err != nil {
		return airlock.Sandbox{}, err
	}
	if err := c.cfg.Boundary.ask(ctx, on(p, l, "sandbox:connect")); err != nil {
		return airlock.Sandbox{}, err
	}
	return c.lease(ctx, p, id, d, true)
}

func (c *Sandboxes) lease(ctx context.Context, p airlock.Principal, id string, d time.Duration, onlyLonger bool) (airlock.Sandbox, error) {
	l, err := c.lookup(p, id)
	if err != nil {
		return airlock.Sandbox{}, err
	}
	if d > 0 || onlyLonger {
		if err := validTimeout(d); err != nil {
			return airlock.Sandbox{}, err
		}
	}
	a := on(p, l, "sandbox:timeout")
	a.context = policy.Context{"timeoutSeconds": int64(max(d, 0) / time.Second)}
	if _, err := c.cfg.Boundary.inside(ctx, a); err != nil {
		return airlock.Sandbox{}, err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	end := time.Now().UTC().Add(max(d, 0))
	if onlyLonger && end.Before(l.sandbox.EndAt) {
		return l.sandbox, nil
	}
	if l.sandbox.State != airlock.Running {
		return airlock.Sandbox{}, airlock.Errorf(airlock.NotFound, "Sandbox %q doesn't exist or you don't have access to it", id)
	}
	sb := l.sandbox
	sb.EndAt = end
	if err := c.remember(ctx, sb); err != nil {
		return airlock.Sandbox{}, err
	}
	l.sandbox = sb
	select {
	case l.changed <- struct{}{}:
	default:
	}
	return sb, nil
}

// Open returns the way into a running sandbox, of any team: the caller has
// checked its AccessToken or does so with what Open returns.
func (c *Sandboxes) Open(ctx context.Context, id string) (*Guest, error) {
	l := c.find(id)
	if l == nil || l.get().State != airlock.Running {
		return nil, airlock.Errorf(airlock.Gone, "The sandbox was not found")
	}
	return &Guest{Sandbox: l.get(), request: l.request.Load, boundary: &c.cfg.Boundary, mux: l.mux, log: l.log, conns: &l.conns, watches: l.watches, ended: l.why, measure: l.now}, nil
}

// why waits a moment for the reason of an end that has begun.
func (l *live) why() airlock.Outcome {
	select {
	case <-l.gone:
	case <-time.After(3 * time.Second):
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.outcome == "" {
		return airlock.SandboxFailed
	}
	return l.outcome
}

// Logs returns what happened to a sandbox of p's team, oldest first.
func (c *Sandboxes) Logs(ctx context.Context, p airlock.Principal, id string) ([]Event, error) {
	l, err := c.lookup(p, id)
	if err != nil {
		return nil, err
	}
	if err := c.cfg.Boundary.ask(ctx, on(p, l, "sandbox:logs")); err != nil {
		return nil, err
	}
	return l.log.list(), nil
}

// Close ends all sandboxes if end is set and returns when every watcher has
// returned. Without end the sandboxes go on for the next server.
func (c *Sandboxes) Close(end bool) {
	c.mu.Lock()
	c.closed = true
	all := make([]*live, 0, len(c.live))
	for _, l := range c.live {
		all = append(all, l)
	}
	c.mu.Unlock()
	c.stop()
	c.background.Wait()
	for _, l := range all {
		c.tellRefused(l, time.Now().Add(refusedEvery))
	}
	if !end {
		return
	}
	for _, l := range all {
		l.end()
	}
	c.wg.Wait()
}
