package cluster

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"

	"airlock.dev/airlock"
)

// Memory is a Store that ends with the process: for a run without a server.
type Memory struct {
	mu     sync.Mutex
	values map[string][]byte // nil once closed
}

// NewMemory returns an empty store.
func NewMemory() *Memory { return &Memory{values: map[string][]byte{}} }

// Get returns the value of key, or nil if there is none.
func (m *Memory) Get(ctx context.Context, key string) (value []byte, err error) {
	err = m.Update(ctx, func(tx Tx) error {
		value, err = tx.Get(key)
		return err
	})
	return value, err
}

// Range returns up to limit pairs; see Tx. They are of one moment.
func (m *Memory) Range(ctx context.Context, prefix, after string, limit int) (pairs []Pair, err error) {
	err = m.Update(ctx, func(tx Tx) error {
		pairs, err = tx.Range(prefix, after, limit)
		return err
	})
	return pairs, err
}

// Update runs fn in a transaction. Transactions run one after the other.
func (m *Memory) Update(ctx context.Context, fn func(Tx) error) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.values == nil {
		return airlock.Errorf(airlock.Unavailable, "the state store is closed")
	}
	tx := memoryTx{m.values, map[string][]byte{}}
	if err := fn(tx); err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	for k, v := range tx.written {
		if v == nil {
			delete(m.values, k)
		} else {
			m.values[k] = v
		}
	}
	return nil
}

// Close empties the store.
func (m *Memory) Close() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.values = nil
	return nil
}

// memoryTx keeps what was written apart until the transaction is over; a
// deleted key has the value nil.
type memoryTx struct{ values, written map[string][]byte }

func (t memoryTx) lookup(key string) []byte {
	if v, ok := t.written[key]; ok {
		return v
	}
	return t.values[key]
}

func (t memoryTx) Get(key string) ([]byte, error) {
	if key == "" {
		return nil, errEmptyKey
	}
	return slices.Clone(t.lookup(key)), nil
}

func (t memoryTx) Range(prefix, after string, limit int) ([]Pair, error) {
	if limit <= 0 {
		return nil, fmt.Errorf("cluster: range with limit %d", limit)
	}
	var keys []string
	for _, from := range []map[string][]byte{t.values, t.written} {
		for k := range from {
			if strings.HasPrefix(k, prefix) && k > after && t.lookup(k) != nil {
				keys = append(keys, k)
			}
		}
	}
	slices.Sort(keys)
	keys = slices.Compact(keys)
	var pairs []Pair
	for _, k := range keys[:min(limit, len(keys))] {
		pairs = append(pairs, Pair{k, slices.Clone(t.lookup(k))})
	}
	return pairs, nil
}

func (t memoryTx) Put(key string, value []byte) error {
	if key == "" {
		return errEmptyKey
	}
	t.written[key] = append([]byte{}, value...) // never nil
	return nil
}

func (t memoryTx) Delete(key string) error {
	if key == "" {
		return errEmptyKey
	}
	t.written[key] = nil
	return nil
}
