package control

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"airlock.dev/airlock/gateway/wire"
)

func TestRefusalsAreToldSometimes(t *testing.T) {
	var r refusals
	now := time.Unix(0, 0)
	var told []string
	for _, c := range []struct {
		after time.Duration
		n     int64
	}{{0, 1}, {time.Second, 5}, {28 * time.Second, 6}, {time.Second, 7}, {time.Second, 2}, {time.Hour, 4}} {
		now = now.Add(c.after)
		told = append(told, fmt.Sprint(r.add(wire.BudgetFlows, c.n, now)))
	}
	if want := []string{"1", "0", "0", "18", "0", "6"}; !slices.Equal(told, want) {
		t.Errorf("told %v, want %v", told, want)
	}
}
