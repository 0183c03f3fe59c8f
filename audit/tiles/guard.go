package tiles

import (
	"crypto"
	"crypto/rand"
	"fmt"
	"sync"

	"golang.org/x/mod/sumdb/note"
	"golang.org/x/mod/sumdb/tlog"
)

// guard holds the signing key of a shard and signs a checkpoint only if its
// root is one that this process computed itself: from the tree that it checked
// when it opened it, and the entries that it was given since. Tessera computes
// from the tiles on disk and does not ask whether they changed. So whatever
// happens to the files of a running log, nothing is signed that contradicts
// what was signed before.
type guard struct {
	verifier note.Verifier // knows the name and the number of the key
	key      crypto.Signer

	mu      sync.Mutex
	changed sync.Cond    // on mu
	known   [32]treeHead // the latest trees, a ring: Tessera may come late
	next    int
	flying  bool // a group is with Tessera, and its outcome not yet known
	stopped bool
	refused error // why the latest checkpoint was not signed
}

type treeHead struct {
	size uint64
	root tlog.Hash
	set  bool
}

func newGuard(v note.Verifier, key crypto.Signer, size uint64, root tlog.Hash) *guard {
	g := &guard{verifier: v, key: key}
	g.changed.L = &g.mu
	g.add(size, root)
	return g
}

// Name and KeyHash make it a note.Signer.
func (g *guard) Name() string    { return g.verifier.Name() }
func (g *guard) KeyHash() uint32 { return g.verifier.KeyHash() }

// Sign signs the text of a checkpoint. While a group is with Tessera, whose
// checkpoint may be faster than its answer, Sign waits for that answer.
func (g *guard) Sign(text []byte) ([]byte, error) {
	cp, err := peekCheckpoint(append(text[:len(text):len(text)], '\n'))
	if err != nil {
		return nil, fmt.Errorf("sign checkpoint: %w", err)
	}
	if err := g.allow(cp); err != nil {
		return nil, err
	}
	return g.key.Sign(rand.Reader, text, crypto.Hash(0))
}

func (g *guard) allow(cp checkpoint) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	for {
		if g.stopped {
			return errClosed
		}
		for _, k := range g.known {
			if k.set && k.size == cp.size {
				if k.root != cp.root {
					g.refused = fmt.Errorf("the root of %d entries on disk is not that of what was added: files of the log were changed while it ran", cp.size)
					return g.refused
				}
				g.refused = nil
				return nil
			}
		}
		if !g.flying {
			g.refused = fmt.Errorf("the tree on disk has %d entries and this process did not add them", cp.size)
			return g.refused
		}
		g.changed.Wait()
	}
}

func (g *guard) fly() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.flying = true
}

// land ends fly; heads are the trees that came of it.
func (g *guard) land(heads ...treeHead) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, h := range heads {
		g.add(h.size, h.root)
	}
	g.flying = false
	g.changed.Broadcast()
}

func (g *guard) add(size uint64, root tlog.Hash) {
	g.known[g.next%len(g.known)] = treeHead{size, root, true}
	g.next++
}

// stop lets nothing be signed any more.
func (g *guard) stop() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.stopped = true
	g.changed.Broadcast()
}

func (g *guard) refusal() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.refused
}
