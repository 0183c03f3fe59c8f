package index

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"airlock.dev/airlock"
	"golang.org/x/sys/unix"
	"modernc.org/sqlite"
)

// formatVersion is that of what is in the file. A file of another one is made again.
const formatVersion = 1

// schema is all that is in a file; one with anything else is not ours. Indices
// are on what few events share, and the events without the field are not in
// them: each index costs every event that is added.
var schema = []string{
	// One row. opened is empty when the file was closed in order.
	`CREATE TABLE state (id INTEGER PRIMARY KEY CHECK (id = 1), first INTEGER NOT NULL, next INTEGER NOT NULL, opened TEXT NOT NULL) STRICT`,
	`CREATE TABLE word (id INTEGER PRIMARY KEY, kind INTEGER NOT NULL, text BLOB NOT NULL) STRICT`,
	`CREATE UNIQUE INDEX word_text ON word (kind, text)`,
	`CREATE TABLE event (seq INTEGER PRIMARY KEY, time INTEGER NOT NULL, type INTEGER, source INTEGER, team INTEGER, sandbox INTEGER, execution INTEGER, app INTEGER, actor INTEGER, action INTEGER, resource INTEGER, effect INTEGER, status INTEGER, of INTEGER) STRICT`,
	`CREATE INDEX event_type ON event (type)`,
	`CREATE INDEX event_sandbox ON event (sandbox) WHERE sandbox IS NOT NULL`,
	`CREATE INDEX event_execution ON event (execution) WHERE execution IS NOT NULL`,
	`CREATE INDEX event_app ON event (app) WHERE app IS NOT NULL`,
	`CREATE INDEX event_actor ON event (actor) WHERE actor IS NOT NULL`,
	`CREATE INDEX event_resource ON event (resource) WHERE resource IS NOT NULL`,
	`CREATE INDEX event_refused ON event (effect) WHERE effect > 1`,
	`CREATE INDEX event_of ON event (of) WHERE of IS NOT NULL`,
	`CREATE TABLE subject (seq INTEGER NOT NULL, word INTEGER NOT NULL, PRIMARY KEY (seq, word)) STRICT, WITHOUT ROWID`,
	`CREATE INDEX subject_word ON subject (word)`,
	`CREATE TABLE span (span INTEGER PRIMARY KEY, earliest INTEGER NOT NULL, latest INTEGER NOT NULL) STRICT`,
}

// errUnusable is why a file cannot be used and has to be made again.
type errUnusable string

func (e errUnusable) Error() string { return string(e) }

// Open opens the index at path, for one process at a time, and makes it,
// readable by its owner only, if there is none. A file that is damaged, has
// another format or is no index is moved to path + ".damaged", in the place
// of one that may be there, and a new one is made: Replaced says so. A second
// Open fails with Conflict. Beside the file there is path + ".lock".
//
// The file is written so that a process that dies, or power that fails, costs
// the last transactions at most. That stands on a disk that does as it says,
// so Open reads the whole file for damage after a stop that was not in order,
// if the machine was started anew since, and after a call that met damage. A
// killed process alone does none.
func Open(ctx context.Context, path string) (*Index, error) {
	held, err := acquire(path + ".lock")
	if err != nil {
		return nil, err
	}
	x := &Index{path: path, lock: held, words: map[wordKey]int64{}}
	err = x.load(ctx)
	if why := errUnusable(""); errors.As(err, &why) {
		x.replaced = string(why)
		if err = moveAside(path); err == nil {
			err = x.load(ctx)
		}
	}
	if err != nil {
		x.shut()
		return nil, x.explain("open the audit index", err)
	}
	return x, nil
}

// OpenReader opens the index at path for Find, Count and Check while another
// process may write it. Next stays what it was at this moment. It changes
// nothing: a file that Open would make again is an error with the code Unavailable.
func OpenReader(ctx context.Context, path string) (*Index, error) {
	x := &Index{path: path}
	err := x.loadReader(ctx)
	if err == nil {
		return x, nil
	}
	x.shut()
	if why := errUnusable(""); errors.As(err, &why) {
		return nil, &airlock.Error{
			Code:    airlock.Unavailable,
			Message: fmt.Sprintf("the audit index %s is not usable: %s", path, why),
			Hint:    "start the server, which makes a new one from the log",
		}
	}
	return nil, x.explain("open the audit index", err)
}

// Close lets go of the file. It waits for calls that are under way.
func (x *Index) Close() error {
	x.open.Lock()
	defer x.open.Unlock()
	if x.closed {
		return nil
	}
	x.closed = true
	var err error
	switch {
	case x.lock == nil:
	case x.damaged.Load():
		x.mark(context.Background(), unknownBoot) // so that the next Open looks; if it fails, the file is worse than that
	default:
		err = x.mark(context.Background(), "")
	}
	return x.explain("close the audit index", errors.Join(err, x.shut()))
}

// shut closes what is open.
func (x *Index) shut() error {
	var errs []error
	for _, db := range []*sql.DB{x.readers, x.writer} { // the last one tidies up
		if db != nil {
			errs = append(errs, db.Close())
		}
	}
	x.readers, x.writer = nil, nil
	if x.lock != nil {
		errs = append(errs, x.lock.release())
	}
	return errors.Join(errs...)
}

// load opens the files for writing. After an error the caller may call it again.
func (x *Index) load(ctx context.Context) error {
	if err := makeFile(x.path); err != nil {
		return err
	}
	writer, err := connect(x.path, url.Values{
		"mode":         {"rw"},
		"_txlock":      {"immediate"},
		"_journal":     {"WAL"},
		"_synchronous": {"NORMAL"},
		"_pragma":      {"cache_size(-32000)", "wal_autocheckpoint(4000)", "journal_size_limit(67108864)"},
	}, 1)
	if err != nil {
		return err
	}
	x.writer = writer
	if err := x.prepare(ctx); err != nil {
		x.writer = nil
		return errors.Join(asUnusable(err), writer.Close())
	}
	if x.readers, err = connectReaders(x.path); err != nil {
		return err
	}
	return nil
}

// prepare makes the tables in an empty file and looks at those of another.
func (x *Index) prepare(ctx context.Context) error {
	var tables int
	if err := x.writer.QueryRowContext(ctx, "SELECT count(*) FROM sqlite_schema").Scan(&tables); err != nil {
		return err
	}
	if tables == 0 {
		if err := x.create(ctx); err != nil {
			return fmt.Errorf("make its tables: %w", err)
		}
	}
	opened, err := x.inspect(ctx, x.writer)
	if err != nil {
		return err
	}
	boot := bootID()
	if opened != "" && (opened != boot || boot == unknownBoot) {
		if err := x.examine(ctx); err != nil {
			return err
		}
	}
	if err := x.writer.QueryRowContext(ctx, "SELECT coalesce(max(id), 0) FROM word").Scan(&x.lastWord); err != nil {
		return err
	}
	return x.mark(ctx, boot)
}

func (x *Index) create(ctx context.Context) error {
	tx, err := x.writer.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer tx.Rollback()
	for _, statement := range append(slices.Clone(schema),
		"INSERT INTO state (id, first, next, opened) VALUES (1, 0, 0, '')",
		fmt.Sprintf("PRAGMA user_version = %d", formatVersion)) {
		if _, err := tx.ExecContext(ctx, statement); err != nil {
			return err
		}
	}
	return tx.Commit()
}

// inspect looks whether the file is ours and reads its state.
func (x *Index) inspect(ctx context.Context, db *sql.DB) (opened string, err error) {
	var version int
	if err := db.QueryRowContext(ctx, "PRAGMA user_version").Scan(&version); err != nil {
		return "", fmt.Errorf("read its format: %w", err)
	}
	if version != formatVersion {
		return "", errUnusable(fmt.Sprintf("its format is %d and not %d", version, formatVersion))
	}
	rows, err := db.QueryContext(ctx, "SELECT coalesce(sql, '') FROM sqlite_schema WHERE name NOT LIKE 'sqlite!_%' ESCAPE '!'")
	if err != nil {
		return "", fmt.Errorf("read its tables: %w", err)
	}
	defer rows.Close()
	var have []string
	for rows.Next() {
		var text string
		if err := rows.Scan(&text); err != nil {
			return "", fmt.Errorf("read its tables: %w", err)
		}
		have = append(have, text)
	}
	if err := rows.Err(); err != nil {
		return "", fmt.Errorf("read its tables: %w", err)
	}
	want := slices.Sorted(slices.Values(schema))
	if slices.Sort(have); !slices.Equal(have, want) {
		return "", errUnusable("its tables are not those of an audit index")
	}
	var first, next, least, most, states int64
	err = db.QueryRowContext(ctx, "SELECT first, next, opened, (SELECT count(*) FROM state), coalesce((SELECT min(seq) FROM event), first), coalesce((SELECT max(seq) FROM event), next - 1) FROM state").
		Scan(&first, &next, &opened, &states, &least, &most)
	if errors.Is(err, sql.ErrNoRows) {
		return "", errUnusable("it does not say where it ends")
	}
	if err != nil {
		return "", fmt.Errorf("read its state: %w", err)
	}
	if states != 1 || first < 0 || next < first || least != first || most != next-1 {
		return "", errUnusable(fmt.Sprintf("it has the events from %d to %d and says that it has those from %d to %d", least, most, first, next-1))
	}
	x.next.Store(uint64(next))
	return opened, nil
}

// examine reads the whole file for damage.
func (x *Index) examine(ctx context.Context) error {
	var verdict string
	if err := x.writer.QueryRowContext(ctx, "PRAGMA quick_check(1)").Scan(&verdict); err != nil {
		return fmt.Errorf("look for damage: %w", err)
	}
	if verdict != "ok" {
		return errUnusable("it was not closed in order and has damage: " + verdict)
	}
	var count, want int64
	if err := x.writer.QueryRowContext(ctx, "SELECT (SELECT count(*) FROM event NOT INDEXED), next - first FROM state").Scan(&count, &want); err != nil {
		return fmt.Errorf("count its events: %w", err)
	}
	if count != want {
		return errUnusable(fmt.Sprintf("it was not closed in order and has %d events instead of %d", count, want))
	}
	return nil
}

// mark writes down who has the file open, which is on the disk when it returns.
func (x *Index) mark(ctx context.Context, opened string) error {
	_, err := x.writer.ExecContext(ctx, "UPDATE state SET opened = ?", opened)
	if err == nil {
		_, err = x.writer.ExecContext(ctx, "PRAGMA wal_checkpoint(TRUNCATE)")
	}
	if err != nil {
		return fmt.Errorf("mark it as open or closed: %w", err)
	}
	return nil
}

func (x *Index) loadReader(ctx context.Context) (err error) {
	if info, err := os.Lstat(x.path); err != nil || !info.Mode().IsRegular() {
		return errUnusable("it is not there, or is not a file")
	}
	if x.readers, err = connectReaders(x.path); err != nil {
		return err
	}
	_, err = x.inspect(ctx, x.readers)
	return asUnusable(err)
}

// asUnusable turns an error that speaks of the file's bytes into an errUnusable.
func asUnusable(err error) error {
	if damaging(err) {
		return errUnusable(err.Error())
	}
	return err
}

func connectReaders(path string) (*sql.DB, error) {
	const most = 4 // queries at the same time; others wait
	return connect(path, url.Values{"mode": {"ro"}, "_query_only": {"1"}, "_pragma": {"cache_size(-8000)"}}, most)
}

// connect returns connections to the file at path. None is made yet.
func connect(path string, options url.Values, most int) (*sql.DB, error) {
	options.Set("_busy_timeout", "5000")
	options.Set("_defensive", "1")
	options.Set("_dqs", "0")
	options["_pragma"] = append(options["_pragma"], "trusted_schema(0)", "cell_size_check(1)")
	absolute, err := filepath.Abs(path)
	if err != nil {
		return nil, err
	}
	connector, err := sqlite.NewConnector((&url.URL{Scheme: "file", Path: absolute, RawQuery: options.Encode()}).String())
	if err != nil {
		return nil, err
	}
	db := sql.OpenDB(connector)
	db.SetMaxOpenConns(most)
	db.SetMaxIdleConns(most)
	return db, nil
}

// makeFile makes the file, empty, if there is none. Those that SQLite makes
// beside it have its mode.
func makeFile(path string) error {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err == nil {
		return f.Close()
	}
	if !errors.Is(err, os.ErrExist) {
		return fmt.Errorf("make it: %w", err)
	}
	info, err := os.Lstat(path)
	if err != nil {
		return err
	}
	if !info.Mode().IsRegular() {
		return &airlock.Error{Code: airlock.Conflict, Message: fmt.Sprintf("the audit index %s is not a file", path), Hint: "move it away"}
	}
	return os.Chmod(path, 0o600)
}

// moveAside keeps an unusable file for whoever wants to know what became of
// it, with the journal that belongs to it.
func moveAside(path string) error {
	aside := path + ".damaged"
	for _, suffix := range []string{"-wal", "-shm", ""} {
		err := os.Rename(path+suffix, aside+suffix)
		if errors.Is(err, os.ErrNotExist) {
			err = os.Remove(aside + suffix) // of an older one
		}
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("move the damaged one aside: %w", err)
		}
	}
	return nil
}

// lock is a file that is locked. It stays when it is let go of: removing it
// would let two processes lock two files of that name.
type lock struct{ file *os.File }

func acquire(path string) (*lock, error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, fmt.Errorf("lock the audit index: %w", err)
	}
	err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if errors.Is(err, unix.EWOULDBLOCK) {
		f.Close()
		return nil, &airlock.Error{
			Code:    airlock.Conflict,
			Message: fmt.Sprintf("the audit index is in use: another process has locked %s", path),
			Hint:    "stop the other airlock server, or use another data directory",
		}
	}
	if err != nil {
		f.Close()
		return nil, fmt.Errorf("lock the audit index: %w", err)
	}
	return &lock{f}, nil
}

func (l *lock) release() error { return l.file.Close() }

// unknownBoot stands for a machine that does not tell when it was started.
const unknownBoot = "unknown"

// bootID tells one start of the machine from another.
func bootID() string {
	id, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return unknownBoot
	}
	return strings.TrimSpace(string(id))
}
