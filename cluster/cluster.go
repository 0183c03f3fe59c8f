// Package cluster is what is remembered and shared: one small interface over
// keys and values. On one machine it is a bbolt file; in a cluster it will be
// etcd, which has to pass the same contract test (clustertest).
//
// It knows nothing of what the values mean.
package cluster

import "context"

// Pair is a key and its value.
type Pair struct {
	Key   string
	Value []byte
}

// Tx reads and writes inside a transaction. Its values must not be used after
// the transaction.
type Tx interface {
	// Get returns the value of key, or nil if there is none.
	Get(key string) ([]byte, error)
	// Range returns up to limit pairs whose keys begin with prefix and are
	// greater than after, in the order of keys.
	Range(prefix, after string, limit int) ([]Pair, error)
	Put(key string, value []byte) error
	Delete(key string) error
}

// Store remembers. What a transaction wrote is durable when it has returned.
type Store interface {
	// Get and Range are as in Tx, outside of a transaction.
	Get(ctx context.Context, key string) ([]byte, error)
	Range(ctx context.Context, prefix, after string, limit int) ([]Pair, error)
	// Update runs fn in a serializable transaction: all its writes happen,
	// or, when fn or the store fails, none. fn may run more than once.
	Update(ctx context.Context, fn func(Tx) error) error
	Close() error
}
