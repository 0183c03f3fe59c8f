// Package clustertest is the contract of cluster.Store as a test: every
// implementation runs it.
package clustertest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"testing"

	"airlock.dev/airlock/cluster"
)

// Run tests the stores that open returns; each is empty and is closed by the
// cleanup of its own test.
func Run(t *testing.T, open func(t *testing.T) cluster.Store) {
	for _, c := range []struct {
		name string
		test func(*testing.T, cluster.Store)
	}{
		{"GetPutDelete", getPutDelete},
		{"EmptyValue", emptyValue},
		{"AnyBytes", anyBytes},
		{"Refusals", refusals},
		{"RangePages", rangePages},
		{"RangePrefixBounds", rangePrefixBounds},
		{"ReadOwnWrites", readOwnWrites},
		{"Rollback", rollback},
		{"RollbackOnPanic", rollbackOnPanic},
		{"NotAliased", notAliased},
		{"Canceled", canceled},
		{"Serializable", serializable},
		{"ConsistentRange", consistentRange},
	} {
		t.Run(c.name, func(t *testing.T) { c.test(t, open(t)) })
	}
}

func put(t *testing.T, s cluster.Store, kv ...string) {
	t.Helper()
	err := s.Update(t.Context(), func(tx cluster.Tx) error {
		for i := 0; i < len(kv); i += 2 {
			if err := tx.Put(kv[i], []byte(kv[i+1])); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		t.Fatalf("put %q: %v", kv, err)
	}
}

func want(t *testing.T, s cluster.Store, key string, value []byte) {
	t.Helper()
	got, err := s.Get(t.Context(), key)
	if err != nil {
		t.Fatalf("get %q: %v", key, err)
	}
	if (got == nil) != (value == nil) || !bytes.Equal(got, value) {
		t.Fatalf("get %q = %q (nil: %v), want %q (nil: %v)", key, got, got == nil, value, value == nil)
	}
}

// keys returns the keys of a range as one line.
func keys(t *testing.T, s cluster.Store, prefix, after string, limit int) string {
	t.Helper()
	pairs, err := s.Range(t.Context(), prefix, after, limit)
	if err != nil {
		t.Fatalf("range %q %q %d: %v", prefix, after, limit, err)
	}
	line := ""
	for i, p := range pairs {
		if i > 0 {
			line += " "
		}
		line += p.Key
	}
	return line
}

func getPutDelete(t *testing.T, s cluster.Store) {
	want(t, s, "a", nil)
	put(t, s, "a", "1")
	want(t, s, "a", []byte("1"))
	put(t, s, "a", "2")
	want(t, s, "a", []byte("2"))
	want(t, s, "aa", nil)
	for range 2 { // deleting what is not there is fine
		if err := s.Update(t.Context(), func(tx cluster.Tx) error { return tx.Delete("a") }); err != nil {
			t.Fatal(err)
		}
		want(t, s, "a", nil)
	}
}

func emptyValue(t *testing.T, s cluster.Store) {
	err := s.Update(t.Context(), func(tx cluster.Tx) error {
		return errors.Join(tx.Put("nil", nil), tx.Put("empty", []byte{}))
	})
	if err != nil {
		t.Fatal(err)
	}
	want(t, s, "nil", []byte{})
	want(t, s, "empty", []byte{})
}

func anyBytes(t *testing.T, s cluster.Store) {
	put(t, s, "k/\x00\xff\n", "\x00\xff", "k/é", "x")
	want(t, s, "k/\x00\xff\n", []byte("\x00\xff"))
	if got := keys(t, s, "k/", "", 9); got != "k/\x00\xff\n k/é" {
		t.Errorf("range = %q", got)
	}
	big := bytes.Repeat([]byte("0123456789"), 100_000)
	put(t, s, "big", string(big))
	want(t, s, "big", big)
}

func refusals(t *testing.T, s cluster.Store) {
	if _, err := s.Get(t.Context(), ""); err == nil {
		t.Error("get of an empty key succeeded")
	}
	for _, limit := range []int{0, -1} {
		if _, err := s.Range(t.Context(), "", "", limit); err == nil {
			t.Errorf("range with limit %d succeeded", limit)
		}
	}
	for name, fn := range map[string]func(tx cluster.Tx) error{
		"put":    func(tx cluster.Tx) error { return tx.Put("", []byte("x")) },
		"delete": func(tx cluster.Tx) error { return tx.Delete("") },
		"get":    func(tx cluster.Tx) error { _, err := tx.Get(""); return err },
		"range":  func(tx cluster.Tx) error { _, err := tx.Range("", "", 0); return err },
	} {
		if err := s.Update(t.Context(), fn); err == nil {
			t.Errorf("%s out of form succeeded", name)
		}
	}
}

func rangePages(t *testing.T, s cluster.Store) {
	for i := range 10 {
		put(t, s, fmt.Sprintf("p/%d", 9-i), strconv.Itoa(9-i))
	}
	pairs, err := s.Range(t.Context(), "p/", "p/3", 2)
	if err != nil || len(pairs) != 2 || pairs[0].Key != "p/4" || string(pairs[0].Value) != "4" || pairs[1].Key != "p/5" {
		t.Errorf("page = %q, %v", pairs, err)
	}
	var all []string
	for after := ""; ; {
		page, err := s.Range(t.Context(), "p/", after, 3)
		if err != nil {
			t.Fatal(err)
		}
		if len(page) == 0 {
			break
		}
		for _, p := range page {
			all = append(all, p.Key)
		}
		after = page[len(page)-1].Key
	}
	if got := fmt.Sprint(all); got != "[p/0 p/1 p/2 p/3 p/4 p/5 p/6 p/7 p/8 p/9]" {
		t.Errorf("all pages = %s", got)
	}
	// a page goes on after a key that was deleted in between
	if got := keys(t, s, "p/", "p/35", 1); got != "p/4" {
		t.Errorf("after a missing key = %q", got)
	}
}

func rangePrefixBounds(t *testing.T, s cluster.Store) {
	put(t, s, "a", "", "a/", "", "a/1", "", "a/2", "", "a0", "", "b/1", "", "a/\xff", "", "a/\xff\xff", "")
	for _, c := range []struct{ prefix, after, want string }{
		{"a/", "", "a/ a/1 a/2 a/\xff a/\xff\xff"},
		{"a/", "a/", "a/1 a/2 a/\xff a/\xff\xff"},
		{"a/", "a", "a/ a/1 a/2 a/\xff a/\xff\xff"}, // after lies before the prefix
		{"a/", "0", "a/ a/1 a/2 a/\xff a/\xff\xff"},
		{"a/", "a/2", "a/\xff a/\xff\xff"},
		{"a/", "b", ""}, // after lies behind the prefix
		{"a/\xff", "", "a/\xff a/\xff\xff"},
		{"b", "", "b/1"},
		{"c", "", ""},
		{"", "", "a a/ a/1 a/2 a/\xff a/\xff\xff a0 b/1"},
		{"", "a/\xff\xff", "a0 b/1"},
	} {
		if got := keys(t, s, c.prefix, c.after, 100); got != c.want {
			t.Errorf("range(%q, %q) = %q, want %q", c.prefix, c.after, got, c.want)
		}
	}
}

func readOwnWrites(t *testing.T, s cluster.Store) {
	put(t, s, "a", "old", "c", "old")
	err := s.Update(t.Context(), func(tx cluster.Tx) error {
		if err := errors.Join(tx.Put("a", []byte("new")), tx.Put("b", []byte("new")), tx.Delete("c")); err != nil {
			return err
		}
		a, err := tx.Get("a")
		if err != nil || string(a) != "new" {
			return fmt.Errorf("a = %q, %v", a, err)
		}
		c, err := tx.Get("c")
		if err != nil || c != nil {
			return fmt.Errorf("c = %q, %v", c, err)
		}
		pairs, err := tx.Range("", "", 10)
		if err != nil || len(pairs) != 2 || pairs[1].Key != "b" {
			return fmt.Errorf("range = %q, %v", pairs, err)
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
}

func rollback(t *testing.T, s cluster.Store) {
	put(t, s, "a", "1")
	boom := errors.New("boom")
	err := s.Update(t.Context(), func(tx cluster.Tx) error {
		return errors.Join(tx.Put("a", []byte("2")), tx.Put("b", []byte("2")), tx.Delete("a"), boom)
	})
	if !errors.Is(err, boom) {
		t.Errorf("error = %v, want boom", err)
	}
	want(t, s, "a", []byte("1"))
	want(t, s, "b", nil)
}

func rollbackOnPanic(t *testing.T, s cluster.Store) {
	func() {
		defer func() {
			if recover() == nil {
				t.Error("the panic was swallowed")
			}
		}()
		s.Update(t.Context(), func(tx cluster.Tx) error { tx.Put("a", []byte("2")); panic("boom") })
	}()
	want(t, s, "a", nil)
	put(t, s, "a", "1") // and the store goes on
	want(t, s, "a", []byte("1"))
}

func notAliased(t *testing.T, s cluster.Store) {
	in := []byte("value")
	err := s.Update(t.Context(), func(tx cluster.Tx) error {
		if err := tx.Put("a", in); err != nil {
			return err
		}
		copy(in, "XXXXX")
		v, err := tx.Get("a")
		if err != nil || string(v) != "value" {
			return fmt.Errorf("a = %q, %v", v, err)
		}
		copy(v, "YYYYY")
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	want(t, s, "a", []byte("value"))
	v, err := s.Get(t.Context(), "a")
	if err != nil {
		t.Fatal(err)
	}
	copy(v, "ZZZZZ")
	pairs, err := s.Range(t.Context(), "a", "", 1)
	if err != nil {
		t.Fatal(err)
	}
	copy(pairs[0].Value, "ZZZZZ")
	want(t, s, "a", []byte("value"))
}

func canceled(t *testing.T, s cluster.Store) {
	ctx, cancel := context.WithCancel(t.Context())
	err := s.Update(ctx, func(tx cluster.Tx) error {
		cancel()
		return tx.Put("a", []byte("1"))
	})
	if !errors.Is(err, context.Canceled) {
		t.Errorf("update = %v", err)
	}
	if _, err := s.Get(ctx, "a"); !errors.Is(err, context.Canceled) {
		t.Errorf("get = %v", err)
	}
	if _, err := s.Range(ctx, "a", "", 1); !errors.Is(err, context.Canceled) {
		t.Errorf("range = %v", err)
	}
	if err := s.Update(ctx, func(cluster.Tx) error { return nil }); !errors.Is(err, context.Canceled) {
		t.Errorf("update after = %v", err)
	}
	want(t, s, "a", nil)
}

// serializable lets writers claim numbers: each reads the last and writes the
// next. Lost updates or dirty reads would give one number twice.
func serializable(t *testing.T, s cluster.Store) {
	const writers, each = 8, 20
	var wg sync.WaitGroup
	var mu sync.Mutex
	claimed := map[int]int{}
	for range writers {
		wg.Go(func() {
			for range each {
				var mine int
				err := s.Update(t.Context(), func(tx cluster.Tx) error {
					v, err := tx.Get("last")
					if err != nil {
						return err
					}
					mine, _ = strconv.Atoi(string(v))
					mine++
					return errors.Join(tx.Put("last", []byte(strconv.Itoa(mine))), tx.Put(fmt.Sprintf("claim/%03d", mine), nil))
				})
				if err != nil {
					t.Error(err)
					return
				}
				mu.Lock()
				claimed[mine]++
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	want(t, s, "last", []byte(strconv.Itoa(writers*each)))
	if len(claimed) != writers*each {
		t.Errorf("%d different numbers were claimed, want %d", len(claimed), writers*each)
	}
	pairs, err := s.Range(t.Context(), "claim/", "", 1000)
	if err != nil || len(pairs) != writers*each {
		t.Errorf("%d claims, %v", len(pairs), err)
	}
}

// consistentRange moves one unit between two keys while it sums them.
func consistentRange(t *testing.T, s cluster.Store) {
	put(t, s, "sum/a", "50", "sum/b", "50")
	done := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		defer close(done)
		for range 50 {
			err := s.Update(t.Context(), func(tx cluster.Tx) error {
				for key, d := range map[string]int{"sum/a": -1, "sum/b": 1} {
					v, err := tx.Get(key)
					if err != nil {
						return err
					}
					n, _ := strconv.Atoi(string(v))
					if err := tx.Put(key, []byte(strconv.Itoa(n+d))); err != nil {
						return err
					}
				}
				return nil
			})
			if err != nil {
				t.Error(err)
				return
			}
		}
	})
	for running := true; running; {
		select {
		case <-done:
			running = false
		default:
		}
		pairs, err := s.Range(t.Context(), "sum/", "", 10)
		if err != nil || len(pairs) != 2 {
			t.Fatalf("range = %q, %v", pairs, err)
		}
		a, _ := strconv.Atoi(string(pairs[0].Value))
		b, _ := strconv.Atoi(string(pairs[1].Value))
		if a+b != 100 {
			t.Fatalf("a range saw %d + %d", a, b)
		}
	}
	wg.Wait()
}
