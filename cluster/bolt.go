package cluster

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"time"

	"airlock.dev/airlock"
	"go.etcd.io/bbolt"
	berrors "go.etcd.io/bbolt/errors"
)

// formatVersion is that of the file's layout. A file of a newer one is not opened.
const formatVersion = 1

// lockTimeout is how long OpenBolt waits for another process to let go.
const lockTimeout = time.Second

// The file has two buckets: the store's pairs, and what describes the file.
var (
	dataBucket = []byte("data")
	metaBucket = []byte("meta")
	versionKey = []byte("version")
)

// Bolt is a Store in one file, for one process at a time.
type Bolt struct {
	db *bbolt.DB

	turn sync.Mutex // held by who runs a transaction of the file for all that wait

	mu      sync.Mutex
	waiting []*update
}

// update is one Update that waits. Its fields are set under turn.
type update struct {
	ctx   context.Context
	fn    func(Tx) error
	done  bool
	alone bool // it failed with others, and has to run by itself
	err   error
}

// OpenBolt opens the file at path and makes it, readable by its owner only,
// if there is none. Every Update is synced to the disk before it returns.
func OpenBolt(path string) (*Bolt, error) {
	_, err := os.Stat(path)
	fresh := errors.Is(err, os.ErrNotExist)
	db, err := bbolt.Open(path, 0o600, &bbolt.Options{Timeout: lockTimeout, FreelistType: bbolt.FreelistMapType})
	switch {
	case errors.Is(err, berrors.ErrTimeout):
		return nil, &airlock.Error{
			Code:    airlock.Conflict,
			Message: fmt.Sprintf("the state file %s is in use by another process", path),
			Hint:    "stop the other airlock server, or use another data directory",
		}
	case errors.Is(err, berrors.ErrInvalid), errors.Is(err, berrors.ErrChecksum), errors.Is(err, berrors.ErrVersionMismatch):
		return nil, airlock.Errorf(airlock.Conflict, "%s is not an airlock state file, or it is damaged", path).Because(err)
	case err != nil:
		return nil, fmt.Errorf("open state file %s: %w", path, err)
	}
	if err := prepare(db, path, fresh); err != nil {
		db.Close()
		return nil, err
	}
	return &Bolt{db: db}, nil
}

func prepare(db *bbolt.DB, path string, fresh bool) error {
	err := db.Update(func(tx *bbolt.Tx) error {
		meta, err := tx.CreateBucketIfNotExists(metaBucket)
		if err != nil {
			return err
		}
		if v := meta.Get(versionKey); v == nil {
			if err := meta.Put(versionKey, strconv.AppendInt(nil, formatVersion, 10)); err != nil {
				return err
			}
		} else if n, err := strconv.Atoi(string(v)); err != nil || n > formatVersion {
			return &airlock.Error{
				Code:    airlock.Conflict,
				Message: fmt.Sprintf("the state file %s has format version %.20q and this airlock knows up to %d", path, v, formatVersion),
				Hint:    "run the airlock version that wrote it, or a newer one",
			}
		}
		_, err = tx.CreateBucketIfNotExists(dataBucket)
		return err
	})
	if err != nil || !fresh {
		return err
	}
	// The file is on the disk; its name is so once its directory is.
	dir, err := os.Open(filepath.Dir(path))
	if err != nil {
		return fmt.Errorf("sync directory of state file: %w", err)
	}
	defer dir.Close()
	if err := dir.Sync(); err != nil {
		return fmt.Errorf("sync directory of state file: %w", err)
	}
	return nil
}

// Get returns the value of key, or nil if there is none.
func (b *Bolt) Get(ctx context.Context, key string) (value []byte, err error) {
	err = b.view(ctx, func(tx boltTx) error {
		value, err = tx.Get(key)
		return err
	})
	return value, err
}

// Range returns up to limit pairs; see Tx. They are of one moment.
func (b *Bolt) Range(ctx context.Context, prefix, after string, limit int) (pairs []Pair, err error) {
	err = b.view(ctx, func(tx boltTx) error {
		pairs, err = tx.Range(prefix, after, limit)
		return err
	})
	return pairs, err
}

func (b *Bolt) view(ctx context.Context, fn func(boltTx) error) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	return closed(b.db.View(func(tx *bbolt.Tx) error { return fn(boltTx{tx.Bucket(dataBucket)}) }))
}

// Update runs fn in a transaction. Transactions run one after the other; ctx
// is looked at before and after fn, not while waiting for the turn. Those that
// wait at one time are synced to the disk together; one that fails then runs by
// itself, and the others again without it.
func (b *Bolt) Update(ctx context.Context, fn func(Tx) error) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	u := &update{ctx: ctx, fn: fn}
	b.mu.Lock()
	b.waiting = append(b.waiting, u)
	b.mu.Unlock()
	b.turn.Lock()
	defer b.turn.Unlock()
	if !u.done {
		b.mu.Lock()
		group := b.waiting
		b.waiting = nil
		b.mu.Unlock()
		b.commit(group)
	}
	if u.alone {
		u.err = b.db.Update(u.run)
	}
	return closed(u.err)
}

func (u *update) run(tx *bbolt.Tx) error {
	if err := u.fn(boltTx{tx.Bucket(dataBucket)}); err != nil {
		return err
	}
	return u.ctx.Err()
}

// commit runs a group in one transaction, without those of it that fail. With
// turn held; each of the group then runs alone or is done.
func (b *Bolt) commit(group []*update) {
	for _, u := range group {
		u.done = true
	}
	if len(group) == 1 {
		group[0].alone = true
		return
	}
	for len(group) > 0 {
		failed := -1
		err := b.db.Update(func(tx *bbolt.Tx) error {
			for i, u := range group {
				if err := u.try(tx); err != nil {
					failed = i
					return err
				}
			}
			return nil
		})
		if failed < 0 {
			for _, u := range group {
				u.err = err
			}
			return
		}
		group[failed].alone = true
		group = slices.Delete(group, failed, failed+1)
	}
}

// try is run for a transaction that belongs to others too: a panic fails it, and
// comes again when it runs alone, where it belongs.
func (u *update) try(tx *bbolt.Tx) (err error) {
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("panic: %v", r)
		}
	}()
	return u.run(tx)
}

// Close waits for open transactions and lets go of the file.
func (b *Bolt) Close() error { return b.db.Close() }

func closed(err error) error {
	if errors.Is(err, berrors.ErrDatabaseNotOpen) {
		return airlock.Errorf(airlock.Unavailable, "the state store is closed")
	}
	return err
}

// boltTx copies what goes in and out: bbolt's own slices are parts of a
// read-only memory map, or are kept until the transaction ends.
type boltTx struct{ bucket *bbolt.Bucket }

var errEmptyKey = errors.New("cluster: empty key")

func (t boltTx) Get(key string) ([]byte, error) {
	if key == "" {
		return nil, errEmptyKey
	}
	v := t.bucket.Get([]byte(key))
	if v == nil {
		return nil, nil
	}
	return clone(v), nil
}

func (t boltTx) Range(prefix, after string, limit int) ([]Pair, error) {
	if limit <= 0 {
		return nil, fmt.Errorf("cluster: range with limit %d", limit)
	}
	var pairs []Pair
	c := t.bucket.Cursor()
	k, v := c.Seek([]byte(max(prefix, after)))
	for ; k != nil && bytes.HasPrefix(k, []byte(prefix)) && len(pairs) < limit; k, v = c.Next() {
		if string(k) > after {
			pairs = append(pairs, Pair{string(k), clone(v)})
		}
	}
	return pairs, nil
}

func (t boltTx) Put(key string, value []byte) error {
	if key == "" {
		return errEmptyKey
	}
	return t.bucket.Put([]byte(key), clone(value))
}

func (t boltTx) Delete(key string) error {
	if key == "" {
		return errEmptyKey
	}
	return t.bucket.Delete([]byte(key))
}

// clone never returns nil: an empty value is not a missing one.
func clone(b []byte) []byte { return append([]byte{}, b...) }
