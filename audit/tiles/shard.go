package tiles

import (
	"bytes"
	"cmp"
	"crypto/ed25519"
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"strconv"
	"strings"

	"airlock.dev/airlock"
	"github.com/transparency-dev/formats/log"
	"github.com/transparency-dev/merkle/rfc6962"
	"golang.org/x/mod/sumdb/note"
	"golang.org/x/mod/sumdb/tlog"
)

var (
	shardForm        = regexp.MustCompile(`^[0-9]{4}-(?:Q[1-4]|(?:0[1-9]|1[0-2])(?:-(?:0[1-9]|[12][0-9]|3[01]))?)(?:\.([2-9]|[1-9][0-9]{1,5}))?$`)
	installationForm = regexp.MustCompile(`^[a-z2-7]{20}$`)
	originForm       = regexp.MustCompile(`^airlock/([a-z2-7]{20})/([^/]+)$`)
)

// ValidShard tells whether id can name a shard: a quarter "2026-Q4", a month
// "2026-12" or a day "2026-12-02", with ".2", ".3" and so on for a second and
// third one that began in the same period.
func ValidShard(id string) bool { return shardForm.MatchString(id) }

// CompareShards orders valid names of shards by when their period begins, the
// longer period first, and then by their number.
func CompareShards(a, b string) int {
	aBegin, aLength, aNumber := shardKey(a)
	bBegin, bLength, bNumber := shardKey(b)
	return cmp.Or(cmp.Compare(aBegin, bBegin), cmp.Compare(aLength, bLength), cmp.Compare(aNumber, bNumber))
}

// shardKey takes a valid name apart: the first day of the period, a number
// that grows as the period is shorter, and the number in the period.
func shardKey(id string) (begin string, length, number int) {
	period, suffix, _ := strings.Cut(id, ".")
	number, _ = strconv.Atoi(suffix)
	year, rest, _ := strings.Cut(period, "-")
	switch {
	case strings.HasPrefix(rest, "Q"):
		return fmt.Sprintf("%s-%02d-01", year, 3*int(rest[1]-'1')+1), 0, number
	case len(rest) == 2:
		return period + "-01", 1, number
	}
	return period, 2, number
}

// Origin is the name of the log that a shard is: the first line of its
// checkpoints and the name of its key.
func Origin(installation, shard string) string { return "airlock/" + installation + "/" + shard }

// VKey is the verifier key of a shard that key signs, as C2SP's signed-note
// writes it.
func VKey(installation, shard string, key ed25519.PublicKey) (string, error) {
	vkey, err := note.NewEd25519VerifierKey(Origin(installation, shard), key)
	if err != nil {
		return "", fmt.Errorf("name the key of shard %s: %w", shard, err)
	}
	return vkey, nil
}

// checkpoint is what a signed note of a log says.
type checkpoint struct {
	origin string
	size   uint64
	root   tlog.Hash
	text   []byte // the note, with all signatures
}

// checkpointMost bounds the bytes of a checkpoint, with what witnesses added.
const checkpointMost = 64 << 10

var errCheckpointForm = errors.New("not a checkpoint of this kind of log")

// parseCheckpoint reads a checkpoint of the log that v is the key of, and
// checks the signature.
func parseCheckpoint(text []byte, v note.Verifier) (checkpoint, error) {
	if len(text) > checkpointMost {
		return checkpoint{}, errCheckpointForm
	}
	cp, rest, _, err := log.ParseCheckpoint(text, v.Name(), v)
	if err != nil {
		return checkpoint{}, err
	}
	return strictCheckpoint(*cp, rest, text)
}

// peekCheckpoint reads a checkpoint and checks no signature.
func peekCheckpoint(text []byte) (checkpoint, error) {
	body, _, found := bytes.Cut(text, []byte("\n\n"))
	if !found || len(text) > checkpointMost {
		return checkpoint{}, errCheckpointForm
	}
	var cp log.Checkpoint
	rest, err := cp.Unmarshal(append(bytes.Clone(body), '\n'))
	if err != nil {
		return checkpoint{}, err
	}
	return strictCheckpoint(cp, rest, text)
}

// strictCheckpoint refuses what the library lets pass and no log of ours says.
func strictCheckpoint(cp log.Checkpoint, rest, text []byte) (checkpoint, error) {
	if len(rest) > 0 || len(cp.Hash) != tlog.HashSize || !bytes.HasPrefix(text, cp.Marshal()) || cp.Size > sizeMost {
		return checkpoint{}, errCheckpointForm
	}
	if cp.Size == 0 && !bytes.Equal(cp.Hash, rfc6962.DefaultHasher.EmptyRoot()) {
		return checkpoint{}, errCheckpointForm
	}
	return checkpoint{cp.Origin, cp.Size, tlog.Hash(cp.Hash), bytes.Clone(text)}, nil
}

// sizeMost bounds the entries of a shard, so that no sum of sizes overflows.
const sizeMost = 1 << 48

// An event begins with its number.
const seqPrefix = `{"v":1,"seq":`

// appendPrefix appends how the event with a number begins.
func appendPrefix(b []byte, seq uint64) []byte {
	b = append(b, seqPrefix...)
	b = strconv.AppendUint(b, seq, 10)
	return append(b, ',')
}

// seqOf reads the number that an event says it has.
func seqOf(event []byte) (seq uint64, ok bool) {
	rest, ok := bytes.CutPrefix(event, []byte(seqPrefix))
	if !ok {
		return 0, false
	}
	end := bytes.IndexByte(rest[:min(len(rest), 21)], ',')
	if end < 1 || rest[0] == '0' && end > 1 {
		return 0, false
	}
	seq, err := strconv.ParseUint(string(rest[:end]), 10, 64)
	return seq, err == nil && seq < 1<<62
}

// logField is what entries that are about the log itself say in their field
// "log".
type logField struct {
	Shard        string `json:"shard"`
	First        uint64 `json:"first"`
	Size         uint64 `json:"size"`
	Root         string `json:"root"` // base64
	Installation string `json:"installation"`
	VKey         string `json:"vkey"`
	Next         string `json:"next"`
	NextVKey     string `json:"nextVkey"`
	Previous     *struct {
		Shard      string `json:"shard"`
		First      uint64 `json:"first"`
		Size       uint64 `json:"size"`
		Root       string `json:"root"`
		Checkpoint string `json:"checkpoint"`
	} `json:"previous"`
}

// logEvent is what this package reads of an event about the log.
type logEvent struct {
	Type string   `json:"type"`
	Log  logField `json:"log"`
}

func parseLogEvent(event []byte) (e logEvent, ok bool) {
	err := json.Unmarshal(event, &e)
	return e, err == nil
}

func checkShard(id string) error {
	if !ValidShard(id) {
		return airlock.Invalidf("shard", `name it like "2026-Q4", "2026-12" or "2026-12-02", with ".2" behind for a second one`, "'%.40s' is not the name of a shard", id)
	}
	return nil
}
