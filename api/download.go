package api

import (
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"mime"
	"net/http"
	"strconv"
	"strings"
	"time"

	"airlock.dev/airlock"
	"airlock.dev/airlock/channel"
)

const gzipFrom = 1 << 10 // bytes; smaller files go as they are

// encodings says which encodings of a reply a client takes.
func encodings(header []string) (identity, gz bool) {
	identity, other := true, false
	seenGzip := false
	for item := range strings.SplitSeq(strings.Join(header, ","), ",") {
		name, params, _ := strings.Cut(strings.ToLower(strings.TrimSpace(item)), ";")
		zero := false
		if q, ok := strings.CutPrefix(strings.TrimSpace(params), "q="); ok {
			v, err := strconv.ParseFloat(q, 64)
			zero = err == nil && v == 0
		}
		switch strings.TrimSpace(name) {
		case "gzip":
			gz, seenGzip = !zero, true
		case "identity":
			identity = !zero
		case "*":
			other = !zero
			if zero {
				identity = false
			}
		}
	}
	return identity, gz || other && !seenGzip
}

// readFile answers a file. Ranges and conditions are of the file as it is, so
// that who asks for them gets no gzip, as long as he takes anything else.
func (s *server) readFile(w http.ResponseWriter, r *request) error {
	name, err := fileQuery(r)
	if err != nil {
		return err
	}
	h := w.Header()
	h.Set("Vary", "Accept-Encoding")
	identity, gz := encodings(r.Header["Accept-Encoding"])
	if !identity && !gz {
		writeJSON(w, http.StatusNotAcceptable, errorBody{Code: http.StatusNotAcceptable, Message: "files are sent as identity or gzip"})
		return nil
	}
	d, err := openDownload(r, name)
	if err != nil {
		return err
	}
	defer d.close()

	h.Set("Content-Type", "application/octet-stream")
	h.Set("Cache-Control", "no-store")
	if disposition := mime.FormatMediaType("inline", map[string]string{"filename": d.entry.Name}); disposition != "" {
		h.Set("Content-Disposition", disposition)
	}
	tag := fmt.Sprintf(`"%x-%x-%x"`, d.entry.ModifiedTime.UnixNano(), d.entry.Size, d.entry.Inode)
	if gz && (!identity || !conditional(r.Header) && worthwhile(d.first)) {
		h.Set("Content-Encoding", "gzip")
		if d.sized {
			h.Set("ETag", "W/"+tag) // the same file, but not its bytes
			h.Set("Last-Modified", d.entry.ModifiedTime.UTC().Format(http.TimeFormat))
		}
		if r.Method == http.MethodHead {
			return nil
		}
		z, _ := gzip.NewWriterLevel(w, gzip.BestSpeed) // the level is valid
		if err := d.copy(z); err != nil || z.Close() != nil {
			panic(http.ErrAbortHandler)
		}
		return nil
	}
	if !d.sized && !d.whole {
		if r.Method == http.MethodHead {
			return nil
		}
		if d.copy(w) != nil {
			panic(http.ErrAbortHandler)
		}
		return nil
	}
	var modified time.Time
	if d.sized { // else it is as made up as the size was
		h.Set("ETag", tag)
		modified = d.entry.ModifiedTime
	}
	if strings.Contains(r.Header.Get("Range"), ",") {
		r.Header.Del("Range") // several ranges are answered with the whole, which HTTP allows
	}
	http.ServeContent(w, r.Request, "", modified, d)
	if d.err != nil {
		panic(http.ErrAbortHandler) // the client must not take it for complete
	}
	return nil
}

func conditional(h http.Header) bool {
	for _, name := range []string{"Range", "If-Match", "If-None-Match", "If-Modified-Since", "If-Unmodified-Since", "If-Range"} {
		if h.Get(name) != "" {
			return true
		}
	}
	return false
}

// download is a file being read. Its beginning is kept, so that a small file
// is read once; the rest is read from where Seek said.
type download struct {
	r     *request
	name  channel.PathRequest
	entry channel.Entry
	first []byte
	whole bool // first is all of it
	sized bool // the size that stat told is true; those of /proc and /sys are made up
	size  int64

	at   int64 // of the next Read
	body io.ReadCloser
	from int64 // of the next byte of body
	err  error // of the guest, not of the client
}

func openDownload(r *request, name channel.PathRequest) (*download, error) {
	entry, body, err := r.guest.ReadFile(r.Context(), channel.ReadRequest{PathRequest: name})
	if err != nil {
		return nil, err
	}
	d := &download{r: r, name: name, entry: entry, body: body, first: make([]byte, fileBuffer)}
	n, err := io.ReadFull(body, d.first)
	d.first, d.from, d.size = d.first[:n], int64(n), entry.Size
	d.whole = errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF)
	if err != nil && !d.whole {
		d.close()
		return nil, err
	}
	d.sized = entry.Size == int64(n) || !d.whole && entry.Size > int64(n)
	if d.whole {
		d.size = int64(n)
	}
	return d, nil
}

func (d *download) close() { d.body.Close() }

// copy sends all that there is, whatever its size was said to be.
func (d *download) copy(w io.Writer) error {
	if _, err := w.Write(d.first); err != nil || d.whole {
		return err
	}
	_, err := io.CopyBuffer(struct{ io.Writer }{w}, d.body, make([]byte, fileBuffer))
	return err
}

// Seek implements io.Seeker for http.ServeContent.
func (d *download) Seek(offset int64, whence int) (int64, error) {
	switch whence {
	case io.SeekCurrent:
		offset += d.at
	case io.SeekEnd:
		offset += d.size
	}
	if offset < 0 {
		return 0, errors.New("seek before the beginning")
	}
	d.at = offset
	return offset, nil
}

// Read implements io.Reader for http.ServeContent, which asks for no more
// than size.
func (d *download) Read(p []byte) (int, error) {
	if d.at < int64(len(d.first)) {
		n := copy(p, d.first[d.at:])
		d.at += int64(n)
		return n, nil
	}
	if d.whole {
		return 0, io.EOF
	}
	if d.from != d.at {
		if d.err = d.reopen(); d.err != nil {
			return 0, d.err
		}
	}
	n, err := d.body.Read(p)
	d.at += int64(n)
	d.from = d.at
	if err == io.EOF && d.at < d.size {
		err = io.ErrUnexpectedEOF
	}
	if err != io.EOF {
		d.err = err
	}
	return n, err
}

// reopen goes on reading elsewhere, if the file is still the same.
func (d *download) reopen() error {
	entry, body, err := d.r.guest.ReadFile(d.r.Context(), channel.ReadRequest{PathRequest: d.name, Offset: d.at})
	if err != nil {
		return err
	}
	d.close()
	d.body, d.from = body, d.at
	if entry.Inode != d.entry.Inode || entry.Size != d.entry.Size || !entry.ModifiedTime.Equal(d.entry.ModifiedTime) {
		return airlock.Errorf(airlock.Conflict, "the file changed while it was read")
	}
	return nil
}

// worthwhile says whether a file that begins like this becomes smaller.
func worthwhile(first []byte) bool {
	if len(first) < gzipFrom {
		return false
	}
	var count countWriter
	z, _ := gzip.NewWriterLevel(&count, gzip.BestSpeed) // the level is valid
	z.Write(first[:min(len(first), 8<<10)])             // a countWriter takes all
	z.Close()
	return int(count) < min(len(first), 8<<10)*9/10
}

type countWriter int

func (c *countWriter) Write(p []byte) (int, error) { *c += countWriter(len(p)); return len(p), nil }
