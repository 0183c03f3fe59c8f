package control_test

import (
	"slices"
	"testing"

	"airlock.dev/airlock"
	"airlock.dev/airlock/gateway/wire"
)

// What a sandbox has used of its bytes outlives gateways and servers.
func TestBytesUsed(t *testing.T) {
	h, w := newWay(t)
	sb, other := h.create(alice), h.create(bob)
	used := func(p airlock.Principal, id string, want int64) {
		t.Helper()
		got, err := h.Get(t.Context(), p, id)
		if err != nil || got.NetworkBytes != want {
			t.Errorf("%s has used %d, want %d, %v", id, got.NetworkBytes, want, err)
		}
	}
	h.Used(wire.Used{Sandbox: sb.ID, Bytes: 5000})
	h.Used(wire.Used{Sandbox: sb.ID, Bytes: 4000}) // notes overtake each other
	h.Used(wire.Used{Sandbox: sb.ID, Bytes: -1})
	h.Used(wire.Used{Sandbox: "inone", Bytes: 7})
	used(alice, sb.ID, 5000)
	used(bob, other.ID, 0)

	// Ends tell of it too, and are remembered with what comes next.
	h.End(wire.End{Sandbox: sb.ID, Event: 1 << 40, Used: 6000})
	h.Used(wire.Used{Sandbox: sb.ID, Bytes: 6000})
	used(alice, sb.ID, 6000)

	clear(w.doors)
	h.restart()
	h.Through(t.Context(), w)
	used(alice, sb.ID, 6000)
	w.mu.Lock()
	defer w.mu.Unlock()
	if got := w.doors[sb.ID].Used; got != 6000 {
		t.Errorf("the next gateway is told of %d", got)
	}
}

func TestEndsForBudgets(t *testing.T) {
	h, _ := newWay(t)
	sb := h.create(alice)
	var got []string
	for _, code := range []airlock.Code{airlock.Exhausted, airlock.TooLarge, airlock.Denied, airlock.Internal, ""} {
		v := h.Cross(t.Context(), request(sb.ID, "a.example", public, "public", "GET"))
		if !v.Permit {
			t.Fatal(v.Reason)
		}
		h.End(wire.End{Sandbox: sb.ID, Event: v.Event, Status: 200, BytesIn: 7, Error: "it was broken off", Code: code})
	}
	got = h.recorded("type=http.end")
	if want := []string{
		"http.end sandbox error resource_exhausted bytesIn:7 bytesOut:0 status:200", "http.end sandbox error too_large bytesIn:7 bytesOut:0 status:200",
		"http.end sandbox denied permission_denied bytesIn:7 bytesOut:0 status:200",
		"http.end sandbox error broken bytesIn:7 bytesOut:0 status:200", "http.end sandbox error broken bytesIn:7 bytesOut:0 status:200",
	}; !slices.Equal(got, want) {
		t.Errorf("recorded %q, want %q", got, want)
	}
}

// However many are told of, the trail has few events of them.
func TestRefused(t *testing.T) {
	h, _ := newWay(t)
	sb := h.create(alice)
	for range 1000 {
		h.Refused(wire.Refused{Sandbox: sb.ID, Budget: wire.BudgetFlows, Count: 3})
		h.Refused(wire.Refused{Sandbox: sb.ID, Budget: "made up", Count: 3})
		h.Refused(wire.Refused{Sandbox: "inone", Budget: wire.BudgetBytes, Count: 3})
	}
	h.Refused(wire.Refused{Sandbox: sb.ID, Budget: wire.BudgetBytes, Count: 42})
	h.Refused(wire.Refused{Sandbox: sb.ID, Budget: wire.BudgetRequests, Count: -5})
	got := h.recorded("type=sandbox.budget sandbox=" + sb.ID + " status=denied")
	if want := []string{"sandbox.budget system denied flows refused:3", "sandbox.budget system denied bytes refused:42"}; !slices.Equal(got, want) {
		t.Errorf("recorded %q, want %q", got, want)
	}
	// The rest is told when the sandbox ends, at the latest.
	var said []string
	logs, err := h.Logs(t.Context(), alice, sb.ID)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range logs {
		if e.Level == "warn" {
			said = append(said, e.Message)
		}
	}
	if len(said) != 2 {
		t.Errorf("the sandbox's own log says %q", said)
	}
	if err := h.Kill(t.Context(), alice, sb.ID); err != nil {
		t.Fatal(err)
	}
	if got := h.recorded("type=sandbox.budget sandbox=" + sb.ID); len(got) != 3 || got[2] != "sandbox.budget system denied flows refused:2997" {
		t.Errorf("recorded at the end %q", got)
	}
}
