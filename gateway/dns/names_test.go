package dns

import (
	"fmt"
	"net/netip"
	"sync"
	"testing"

	"airlock.dev/airlock"
)

func newNames(t *testing.T, v4 string, most int) *Names {
	t.Helper()
	n, err := NewNames(netip.MustParsePrefix(v4), netip.MustParsePrefix("fd61:6972:0:53::/64"), most)
	if err != nil {
		t.Fatal(err)
	}
	n.next = 0
	return n
}

func bind(t *testing.T, n *Names, name, v4, v6 string) {
	t.Helper()
	got4, got6, err := n.Bind(name)
	if err != nil || got4 != netip.MustParseAddr(v4) || got6 != netip.MustParseAddr(v6) {
		t.Errorf("%s has %v and %v, want %s and %s: %v", name, got4, got6, v4, v6, err)
	}
}

// means checks what an address means; "" is nothing.
func means(t *testing.T, n *Names, addr, want string) {
	t.Helper()
	got, release, ok := n.Hold(netip.MustParseAddr(addr))
	if got != want || ok != (want != "") {
		t.Errorf("%s means %q, want %q", addr, got, want)
	}
	if ok {
		release()
		release() // does not count
	}
}

func TestNames(t *testing.T) {
	n := newNames(t, "198.18.0.0/15", 4)
	bind(t, n, "a.test", "198.18.0.1", "fd61:6972:0:53::1")
	bind(t, n, "b.test", "198.18.0.2", "fd61:6972:0:53::2")
	bind(t, n, "a.test", "198.18.0.1", "fd61:6972:0:53::1")
	for addr, want := range map[string]string{
		"198.18.0.1": "a.test", "fd61:6972:0:53::1": "a.test", "::ffff:198.18.0.2": "b.test", "fd61:6972:0:53::2": "b.test",
		"198.18.0.0": "", "198.18.0.3": "", "198.19.255.255": "", "198.20.0.1": "", "10.0.0.1": "",
		"fd61:6972:0:53::": "", "fd61:6972:0:53::3": "", "fd61:6972:0:53:0:1:0:1": "", "fd61:6972:0:53:8000::1": "", "fd61:6972:0:54::1": "", "::1": "", "fd61:6972:0:53::1%eth0": "",
	} {
		means(t, n, addr, want)
	}
	for addr, want := range map[string]bool{
		"198.18.0.0": true, "198.19.255.255": true, "::ffff:198.18.9.9": true, "fd61:6972:0:53:ffff::": true, "fd61:6972:0:53::1%eth0": true, "198.20.0.0": false, "fd61:6972:0:54::": false,
	} {
		if got := n.Synthetic(netip.MustParseAddr(addr)); got != want {
			t.Errorf("%s is synthetic: %v", addr, got)
		}
	}
	if _, _, ok := n.Hold(netip.Addr{}); ok || n.Synthetic(netip.Addr{}) {
		t.Error("no address means something")
	}
}

func TestNamesForgetTheOldest(t *testing.T) {
	n := newNames(t, "198.18.0.0/15", 3)
	bind(t, n, "a.test", "198.18.0.1", "fd61:6972:0:53::1")
	bind(t, n, "b.test", "198.18.0.2", "fd61:6972:0:53::2")
	bind(t, n, "c.test", "198.18.0.3", "fd61:6972:0:53::3")
	_, releaseA, _ := n.Hold(netip.MustParseAddr("198.18.0.1"))
	_, againA, _ := n.Hold(netip.MustParseAddr("fd61:6972:0:53::1"))
	bind(t, n, "b.test", "198.18.0.2", "fd61:6972:0:53::2")
	bind(t, n, "d.test", "198.18.0.4", "fd61:6972:0:53::4") // a has flows, b was asked for: c goes
	means(t, n, "198.18.0.3", "")
	means(t, n, "198.18.0.1", "a.test")
	releaseA()
	bind(t, n, "e.test", "198.18.0.5", "fd61:6972:0:53::5") // one flow is left to a: b goes
	means(t, n, "198.18.0.2", "")
	bind(t, n, "a.test", "198.18.0.1", "fd61:6972:0:53::1") // keeps its address
	bind(t, n, "b.test", "198.18.0.6", "fd61:6972:0:53::6") // gets a new one: d goes
	means(t, n, "198.18.0.4", "")

	_, releaseE, _ := n.Hold(netip.MustParseAddr("198.18.0.5"))
	_, releaseB, _ := n.Hold(netip.MustParseAddr("198.18.0.6"))
	if _, _, err := n.Bind("f.test"); airlock.CodeOf(err) != airlock.Exhausted {
		t.Errorf("all names have flows: %v", err)
	}
	bind(t, n, "b.test", "198.18.0.6", "fd61:6972:0:53::6") // known ones are found
	againA()
	releaseB()
	releaseE()
	bind(t, n, "f.test", "198.18.0.7", "fd61:6972:0:53::7") // a was released first
	means(t, n, "198.18.0.1", "")
	if len(n.byName) != 3 || len(n.byTurn) != 3 || n.idle.Len() != 3 {
		t.Errorf("%d names, %d places, %d idle", len(n.byName), len(n.byTurn), n.idle.Len())
	}
}

// An address is another name's only after all others had their turn, and
// never while a flow is open to it.
func TestNamesComeRound(t *testing.T) {
	n := newNames(t, "198.18.7.0/24", 2)
	bind(t, n, "held.test", "198.18.7.1", "fd61:6972:0:53::1")
	_, release, _ := n.Hold(netip.MustParseAddr("198.18.7.1"))
	for i := 2; i <= 254; i++ {
		bind(t, n, fmt.Sprintf("n%d.test", i), fmt.Sprintf("198.18.7.%d", i), fmt.Sprintf("fd61:6972:0:53::%x", i))
	}
	bind(t, n, "round.test", "198.18.7.2", "fd61:6972:0:53::2")
	means(t, n, "198.18.7.1", "held.test")
	release()
}

func TestNamesBeginAnywhere(t *testing.T) {
	begins := map[netip.Addr]bool{}
	for range 8 {
		n, err := NewNames(netip.MustParsePrefix("198.18.0.0/15"), netip.Prefix{}, 1)
		if err != nil {
			t.Fatal(err)
		}
		v4, v6, err := n.Bind("a.test")
		if err != nil || v6.IsValid() || !n.Synthetic(v4) {
			t.Fatal(v4, v6, err)
		}
		begins[v4] = true
	}
	if len(begins) == 1 {
		t.Errorf("all doors begin with %v", begins)
	}
}

func TestNewNamesRefuses(t *testing.T) {
	for _, c := range []struct {
		v4, v6 string
		most   int
	}{
		{"fd00::/64", "fd61:6972::/64", 1}, {"198.0.0.0/7", "fd61:6972::/64", 1}, {"198.18.0.0/25", "fd61:6972::/64", 1},
		{"198.18.0.0/15", "fd61:6972::/48", 1}, {"198.18.0.0/15", "10.0.0.0/8", 1}, {"198.18.0.0/15", "::ffff:0.0.0.0/96", 1},
		{"198.18.0.0/15", "fd61:6972::/64", 0}, {"198.18.0.0/15", "fd61:6972::/64", 16384}, {"198.18.0.0/24", "fd61:6972::/64", 32},
	} {
		if _, err := NewNames(netip.MustParsePrefix(c.v4), netip.MustParsePrefix(c.v6), c.most); airlock.CodeOf(err) != airlock.Invalid {
			t.Errorf("%+v: %v", c, err)
		}
	}
	if _, err := NewNames(netip.Prefix{}, netip.Prefix{}, 1); airlock.CodeOf(err) != airlock.Invalid {
		t.Error(err)
	}
}

// Flows come and go while names do: a held address never changes its meaning.
func TestNamesAtTheSameTime(t *testing.T) {
	n := newNames(t, "198.18.0.0/16", 4) // more places than binds: none has a second turn
	var all sync.WaitGroup
	for i := range 3 {
		all.Go(func() {
			for j := range 2000 {
				name := fmt.Sprintf("n%d.test", (i*7+j)%11)
				v4, _, err := n.Bind(name)
				if err != nil {
					t.Error(err)
					return
				}
				got, release, ok := n.Hold(v4)
				if !ok {
					continue // another one took its place
				}
				if again, release, ok := n.Hold(v4); !ok || again != got || got != name {
					t.Errorf("%v means %s, then %s, and was given to %s", v4, got, again, name)
				} else {
					release()
				}
				release()
			}
		})
	}
	all.Wait()
	if len(n.byName) > 4 || n.idle.Len() != len(n.byName) || len(n.byTurn) != len(n.byName) {
		t.Errorf("%d names, %d idle, %d places", len(n.byName), n.idle.Len(), len(n.byTurn))
	}
}

// A door that takes the place of another one keeps what its sandbox remembers.
func TestRestore(t *testing.T) {
	v4, v6 := netip.MustParsePrefix("198.18.0.0/15"), netip.MustParsePrefix("fd00::/64")
	before, err := NewNames(v4, v6, 4)
	if err != nil {
		t.Fatal(err)
	}
	type bound struct {
		name  string
		place uint32
	}
	var told []bound
	before.Bound = func(name string, place uint32) { told = append(told, bound{name, place}) }
	addresses := map[string]netip.Addr{}
	for _, name := range []string{"a.example", "b.example", "a.example", "c.example"} {
		a, _, err := before.Bind(name)
		if err != nil {
			t.Fatal(err)
		}
		addresses[name] = a
	}
	if len(told) != 3 {
		t.Fatalf("told of %v", told)
	}
	after, err := NewNames(v4, v6, 4)
	if err != nil {
		t.Fatal(err)
	}
	for _, b := range told {
		after.Restore(b.name, b.place)
	}
	after.Restore("late.example", told[0].place) // taken
	after.Restore("far.example", 1<<31)          // there is no such place
	for name, a := range addresses {
		got, release, ok := after.Hold(a)
		if !ok || got != name {
			t.Errorf("%s is of %q, %v, want %s", a, got, ok, name)
			continue
		}
		release()
		if again, _, err := after.Bind(name); err != nil || again != a {
			t.Errorf("%s has %s now, %v", name, again, err)
		}
	}
	if a, _, err := after.Bind("new.example"); err != nil || a == addresses["a.example"] || a == addresses["b.example"] || a == addresses["c.example"] {
		t.Errorf("a new name has %s, %v", a, err)
	}
}
