package fake_test

import (
	"fmt"
	"sync/atomic"
	"testing"

	"airlock.dev/airlock"
	"airlock.dev/airlock/isolation"
	"airlock.dev/airlock/isolation/fake"
	"airlock.dev/airlock/isolation/isolationtest"
)

func TestConformance(t *testing.T) {
	world, root := fake.NewWorld(), t.TempDir()
	var n atomic.Int64
	isolationtest.Run(t, isolationtest.Harness{
		Driver:  fake.New(world),
		Restart: func(*testing.T) isolation.Driver { return fake.New(world) },
		Spec: func() isolation.Spec {
			return isolation.Spec{ID: fmt.Sprint("f", n.Add(1)), RootFS: root, Guest: "/guest", Limits: airlock.DefaultLimits}
		},
		Left: func() []string {
			if world.Count() == 0 {
				return nil
			}
			return []string{fmt.Sprint(world.Count(), " sandboxes")}
		},
		Echo: "echo",
		Exit: func(code int) (string, []string) { return "exit", []string{fmt.Sprint(code)} },
	})
}
