package api

import (
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"mime"
	"mime/multipart"
	"net/http"
	"path"
	"strconv"
	"strings"
	"time"

	"airlock.dev/airlock"
	"airlock.dev/airlock/channel"
)

const (
	fileBuffer   = 64 << 10
	gzipFrom     = 1 << 10 // bytes; smaller files go as they are
	uploadIdle   = 2 * time.Minute
	drainTime    = 10 * time.Second
	maxFileParts = 10_000
)

func (s *server) envs(w http.ResponseWriter, r *request) error {
	env := r.guest.Sandbox.Env
	if env == nil {
		env = map[string]string{}
	}
	writeJSON(w, http.StatusOK, env)
	return nil
}

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

// byteRange reads a header with a single range, for a file of size bytes. Any
// other header is as none, which HTTP allows.
func byteRange(header string, size int64) (offset, length int64, partial bool, err error) {
	spec, ok := strings.CutPrefix(header, "bytes=")
	from, to, dash := strings.Cut(spec, "-")
	if !ok || !dash || size <= 0 {
		return 0, 0, false, nil
	}
	first, ferr := strconv.ParseUint(from, 10, 63)
	last, lerr := strconv.ParseUint(to, 10, 63)
	switch {
	case from == "" && lerr == nil: // the last bytes
		length = min(int64(last), size)
		offset = size - length
	case ferr == nil && to == "":
		offset, length = int64(first), size-int64(first)
	case ferr == nil && lerr == nil && first <= last:
		offset = int64(first)
		length = min(int64(last), size-1) - offset + 1
	default:
		return 0, 0, false, nil
	}
	if length <= 0 {
		return 0, 0, false, errRange
	}
	return offset, length, true, nil
}

var errRange = errors.New("the range lies outside of the file")

func (s *server) readFile(w http.ResponseWriter, r *request) error {
	query := r.URL.Query()
	name := channel.PathRequest{User: query.Get("username"), Path: query.Get("path")}
	identity, gz := encodings(r.Header["Accept-Encoding"])
	if !identity && !gz {
		writeJSON(w, http.StatusNotAcceptable, errorBody{Code: http.StatusNotAcceptable, Message: "files are sent as identity or gzip"})
		return nil
	}
	req := channel.ReadRequest{PathRequest: name}
	status, contentRange := http.StatusOK, ""
	if header := r.Header.Get("Range"); header != "" && r.Header.Get("If-Range") == "" {
		entry, err := r.guest.Stat(r.Context(), name)
		if err != nil {
			return err
		}
		if entry.Type == channel.File {
			offset, length, partial, err := byteRange(header, entry.Size)
			if err != nil {
				w.Header().Set("Content-Range", fmt.Sprintf("bytes */%d", entry.Size))
				writeJSON(w, http.StatusRequestedRangeNotSatisfiable, errorBody{Code: http.StatusRequestedRangeNotSatisfiable, Message: err.Error()})
				return nil
			}
			if partial {
				req.Offset, req.Length, status, gz = offset, length, http.StatusPartialContent, false
				contentRange = fmt.Sprintf("bytes %d-%d/%d", offset, offset+length-1, entry.Size)
			}
		}
	}
	entry, body, err := r.guest.ReadFile(r.Context(), req)
	if err != nil {
		return err
	}
	defer body.Close()
	first := make([]byte, fileBuffer)
	n, err := io.ReadFull(body, first)
	first = first[:n]
	whole := errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF)
	if err != nil && !whole {
		return err
	}

	h := w.Header()
	if contentRange != "" {
		h.Set("Content-Range", contentRange)
	}
	h.Set("Content-Type", "application/octet-stream")
	h.Set("Accept-Ranges", "bytes")
	h.Set("Cache-Control", "no-store")
	h.Set("Vary", "Accept-Encoding")
	h.Set("Last-Modified", entry.ModifiedTime.UTC().Format(http.TimeFormat))
	if d := mime.FormatMediaType("inline", map[string]string{"filename": entry.Name}); d != "" {
		h.Set("Content-Disposition", d)
	}
	// What a file's size is said to be is right for a file that is larger
	// than the buffer; those of /proc and /sys are made up.
	size := int64(n)
	if !whole {
		size = entry.Size
		if req.Length > 0 {
			size = req.Length
		}
	}
	if gz && (!identity || worthwhile(first)) {
		h.Set("Content-Encoding", "gzip")
		w.WriteHeader(status)
		if r.Method == http.MethodHead {
			return nil
		}
		z, _ := gzip.NewWriterLevel(w, gzip.BestSpeed) // the level is valid
		copyFile(z, first, body, whole)
		if err := z.Close(); err != nil {
			panic(http.ErrAbortHandler)
		}
		return nil
	}
	if whole || size > int64(n) {
		h.Set("Content-Length", strconv.FormatInt(size, 10))
		body = io.NopCloser(io.LimitReader(body, size-int64(n))) // it may have grown
	}
	w.WriteHeader(status)
	if r.Method == http.MethodHead {
		return nil
	}
	if sent := copyFile(w, first, body, whole); h.Get("Content-Length") != "" && sent != size {
		panic(http.ErrAbortHandler) // it shrank: the client must not take it for complete
	}
	return nil
}

// copyFile sends a file of which first was read. Once the reply has begun, an
// error can only be told by breaking it off.
func copyFile(w io.Writer, first []byte, rest io.Reader, whole bool) int64 {
	n, err := w.Write(first)
	sent := int64(n)
	if err == nil && !whole {
		var more int64
		more, err = io.CopyBuffer(struct{ io.Writer }{w}, rest, make([]byte, fileBuffer))
		sent += more
	}
	if err != nil {
		panic(http.ErrAbortHandler)
	}
	return sent
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

// fileBody is what an upload answers for each file.
type fileBody struct {
	Name string `json:"name"`
	Path string `json:"path"`
	Type string `json:"type"`
}

func (s *server) writeFiles(w http.ResponseWriter, r *request) error {
	up := &upload{r: r, c: http.NewResponseController(w), paths: map[string]bool{}, written: []fileBody{}}
	up.c.EnableFullDuplex() // fails where it is so already
	err := up.run()
	if err == nil {
		// What a form or an archive needs ends before the body does. A
		// client that is answered before it has sent all may break off.
		io.CopyN(io.Discard, clientReader{up}, maxEpilogue)
		writeJSON(w, http.StatusOK, up.written)
		return nil
	}
	// A client that still sends does not read yet: what it sends is thrown
	// away for a while, so that the answer is not lost in a reset.
	w.Header().Set("Connection", "close")
	s.fail(w, r, err)
	up.c.Flush()
	up.c.SetReadDeadline(time.Now().Add(drainTime))
	io.Copy(io.Discard, r.Body) // its end, or the deadline
	return nil
}

// maxEpilogue bounds what may follow the last part of an upload.
const maxEpilogue = 64 << 10

// upload is a POST of files in progress.
type upload struct {
	r       *request
	c       *http.ResponseController
	paths   map[string]bool
	written []fileBody
}

func (u *upload) run() error {
	for name := range u.r.Header {
		if strings.HasPrefix(name, "X-Metadata-") {
			return airlock.Errorf(airlock.Unimplemented, "file metadata (header %.100s) is not supported by this Airlock yet", name)
		}
	}
	var body io.Reader = clientReader{u}
	switch encoding := u.r.Header.Get("Content-Encoding"); encoding {
	case "", "identity":
	case "gzip":
		z, err := gzip.NewReader(body)
		if err != nil {
			return brokenUpload(err)
		}
		body = z
	default:
		return airlock.Errorf(airlock.Invalid, "the body's encoding %.40q is not supported: use gzip or none", encoding)
	}
	query := u.r.URL.Query()
	user, to := query.Get("username"), query.Get("path")
	media, params, err := mime.ParseMediaType(u.r.Header.Get("Content-Type"))
	switch {
	case err == nil && media == "application/octet-stream":
		if to == "" {
			return airlock.Errorf(airlock.Invalid, "the query parameter path is missing")
		}
		return u.write(user, to, body)
	case err == nil && media == "multipart/form-data" && params["boundary"] != "":
		return u.parts(user, to, multipart.NewReader(body, params["boundary"]))
	}
	return airlock.Errorf(airlock.Invalid, "the body's type must be multipart/form-data or application/octet-stream")
}

func (u *upload) parts(user, to string, parts *multipart.Reader) error {
	for n := 0; ; n++ {
		part, err := parts.NextRawPart()
		if err == io.EOF { // itself: a body that is cut off wraps it
			if len(u.written) == 0 {
				return airlock.Errorf(airlock.Invalid, "the form has no part with the name file")
			}
			return nil
		}
		if err != nil {
			return brokenUpload(err)
		}
		if n >= maxFileParts {
			return airlock.Errorf(airlock.TooLarge, "the body has more than %d parts", maxFileParts)
		}
		name, file, err := partFile(part.Header.Get("Content-Disposition"))
		if err != nil {
			return err
		}
		if name != "file" {
			continue // as E2B does
		}
		if to != "" {
			file = to
		}
		if file == "" {
			return airlock.Errorf(airlock.Invalid, "a file has no path: give it as its filename or as the query parameter path")
		}
		if err := u.write(user, file, part); err != nil {
			return err
		}
	}
}

// partFile reads a part's Content-Disposition. multipart.Part.FileName would
// cut the directories off.
func partFile(disposition string) (name, file string, err error) {
	kind, params, err := mime.ParseMediaType(disposition)
	if err != nil || kind != "form-data" {
		return "", "", airlock.Errorf(airlock.Invalid, "a part's Content-Disposition is not readable")
	}
	return params["name"], params["filename"], nil
}

func (u *upload) write(user, to string, body io.Reader) error {
	twice := airlock.Errorf(airlock.Invalid, "path '%.200s' is in the request twice", to)
	if u.paths[path.Clean(to)] {
		return twice
	}
	u.paths[path.Clean(to)] = true
	src := &sourceReader{r: body}
	entry, err := u.r.guest.WriteFile(u.r.Context(), channel.WriteRequest{PathRequest: channel.PathRequest{User: user, Path: to}}, src)
	switch {
	case err != nil && src.err != nil:
		return brokenUpload(src.err)
	case err != nil:
		return err
	case entry.Path != path.Clean(to) && u.paths[entry.Path]: // the same by another name
		return twice
	}
	u.paths[entry.Path] = true
	u.written = append(u.written, fileBody{entry.Name, entry.Path, "file"})
	return nil
}

func brokenUpload(err error) error {
	return airlock.Errorf(airlock.Invalid, "the upload broke off or is damaged; the file is as it was").Because(err)
}

// clientReader reads a body as long as something comes.
type clientReader struct{ u *upload }

func (c clientReader) Read(p []byte) (int, error) {
	c.u.c.SetReadDeadline(time.Now().Add(uploadIdle)) // not every writer has one; the server's does
	n, err := c.u.r.Body.Read(p)
	c.u.c.SetReadDeadline(time.Time{}) // else it would end the request after the body
	return n, err
}

// sourceReader remembers that it was the client's side that failed.
type sourceReader struct {
	r   io.Reader
	err error
}

func (s *sourceReader) Read(p []byte) (int, error) {
	n, err := s.r.Read(p)
	if err != nil && err != io.EOF { // itself, as above
		s.err = err
	}
	return n, err
}
