package cluster

import (
	"errors"
	"fmt"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// Updates that wait for one another share a sync, and fail each by itself.
func TestUpdatesInGroups(t *testing.T) {
	b, err := OpenBolt(filepath.Join(t.TempDir(), "state"))
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	odd := errors.New("odd")
	const n = 40
	errs := make([]error, n)
	var panics atomic.Int32
	b.turn.Lock() // so that all wait
	before := b.db.Stats()
	var work sync.WaitGroup
	for i := range n {
		work.Go(func() {
			defer func() {
				if recover() != nil {
					panics.Add(1)
				}
			}()
			errs[i] = b.Update(t.Context(), func(tx Tx) error {
				if err := tx.Put(fmt.Sprint("key/", i), []byte{1}); err != nil {
					return err
				}
				switch {
				case i == 7:
					panic("seven")
				case i%10 == 1:
					return odd
				}
				return nil
			})
		})
	}
	for waiting := 0; waiting < n; {
		time.Sleep(time.Millisecond)
		b.mu.Lock()
		waiting = len(b.waiting)
		b.mu.Unlock()
	}
	b.turn.Unlock()
	work.Wait()
	after := b.db.Stats()
	if got := panics.Load(); got != 1 {
		t.Errorf("%d callers panicked", got)
	}
	for i, err := range errs {
		want := i != 7 && i%10 != 1
		if bad := i%10 == 1; errors.Is(err, odd) != bad {
			t.Errorf("%d: %v", i, err)
		}
		if v, _ := b.Get(t.Context(), fmt.Sprint("key/", i)); (v != nil) != want {
			t.Errorf("%d is there: %v", i, v != nil)
		}
	}
	if writes := after.TxStats.GetWrite() - before.TxStats.GetWrite(); writes > 15 {
		t.Errorf("%d pages were written for %d updates that waited together", writes, n)
	}
}
