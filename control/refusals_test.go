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
	}{{0, 1}, {time.Second, 5}, {58 * time.Second, 6}, {time.Second, 7}, {time.Second, 2}, {time.Hour, 4}, {time.Hour, 0}, {0, -5}, {0, 1}} {
		now = now.Add(c.after)
		r.add(wire.BudgetFlows, c.n)
		told = append(told, fmt.Sprint(r.due(now)[wire.BudgetFlows]))
	}
	if want := []string{"1", "0", "0", "18", "0", "6", "0", "0", "1"}; !slices.Equal(told, want) {
		t.Errorf("told %v, want %v", told, want)
	}
}
