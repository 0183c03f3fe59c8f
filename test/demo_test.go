package test

import (
	"context"
	"os/exec"
	"strings"
	"testing"
	"time"
)

// What `make demo` shows is so: it ends with its last step done.
func TestDemo(t *testing.T) {
	needRoot(t)
	needBinaries(t)
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	out, err := exec.CommandContext(ctx, "../examples/demo.sh").CombinedOutput()
	if err != nil || !strings.Contains(string(out), "→ found, and its place named") {
		t.Errorf("%v\n%s", err, out)
	}
}
