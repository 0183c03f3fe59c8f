package api

import (
	"compress/gzip"
	"fmt"
	"io"
	"maps"
	"mime"
	"mime/multipart"
	"net/http"
	"net/url"
	"path"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"airlock.dev/airlock"
	"airlock.dev/airlock/channel"
)

const (
	fileBuffer     = 64 << 10
	uploadIdle     = 2 * time.Minute
	drainTime      = 10 * time.Second
	maxFileParts   = 10_000
	maxUploadReply = 4 << 20  // bytes of names and metadata
	maxEpilogue    = 64 << 10 // bytes that may follow the last part of an upload
	maxSources     = 1000     // of one compose
)

func (s *server) envs(w http.ResponseWriter, r *request) error {
	env, err := r.guest.Env(r.Context())
	if err != nil {
		return err
	}
	if env == nil {
		env = map[string]string{}
	}
	writeJSON(w, http.StatusOK, env)
	return nil
}

// fileQuery reads whose file a request is for. What is no UTF-8 would become
// another name on its way inside.
func fileQuery(r *request) (channel.PathRequest, error) {
	query, err := url.ParseQuery(r.URL.RawQuery)
	if err != nil {
		return channel.PathRequest{}, airlock.Invalidf("path", "escape path and username as URLs have it", "the query is not readable")
	}
	name := channel.PathRequest{User: query.Get("username"), Path: query.Get("path")}
	if !utf8.ValidString(name.User) {
		return name, airlock.Invalidf("username", "name a user of the sandbox", "username is not valid UTF-8")
	}
	return name, checkPath(name.Path)
}

func checkPath(path string) error {
	if !utf8.ValidString(path) {
		return airlock.Invalidf("path", "rename the file by a command to reach it", "the path is not valid UTF-8")
	}
	return nil
}

// fileBody is what an upload answers for each file.
type fileBody struct {
	Name     string            `json:"name"`
	Path     string            `json:"path"`
	Type     string            `json:"type"`
	Metadata map[string]string `json:"metadata,omitempty"`
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

// upload is a POST of files in progress.
type upload struct {
	r        *request
	c        *http.ResponseController
	name     channel.PathRequest // the path is "" where each part of a form has its own
	metadata map[string]string   // of each file
	paths    map[string]bool
	written  []fileBody
	size     int // of the answer, about
}

const metadataHeader = "X-Metadata-"

// uploadMetadata reads the headers X-Metadata-KEY. As E2B does it takes the
// first of several, and keys in lower case.
func uploadMetadata(h http.Header) (map[string]string, error) {
	metadata, size := map[string]string{}, 0
	for _, header := range slices.Sorted(maps.Keys(h)) {
		key, ok := strings.CutPrefix(header, metadataHeader)
		if !ok {
			continue
		}
		key, value := strings.ToLower(key), h.Get(header)
		size += len(channel.MetadataPrefix) + len(key) + len(value)
		switch {
		case key == "" || len(key) > channel.MaxMetadataKey:
			return nil, airlock.Invalidf(header, fmt.Sprintf("use 1 to %d characters behind %s", channel.MaxMetadataKey, metadataHeader), "the name of the header %.100s is too short or too long", header)
		case !printable(key) || !printable(value):
			return nil, airlock.Invalidf(header, "use printable ASCII", "the header %.100s has characters that are not possible in metadata", header)
		case size > channel.MaxMetadata:
			return nil, airlock.Invalidf(header, fmt.Sprintf("keep keys, with %d bytes more for each, and values within %d bytes", len(channel.MetadataPrefix), channel.MaxMetadata), "with the header %.100s the metadata is too long", header)
		}
		metadata[key] = value
	}
	return metadata, nil
}

func printable(s string) bool {
	for i := range len(s) {
		if s[i] < ' ' || s[i] > '~' {
			return false
		}
	}
	return true
}

func (u *upload) run() error {
	var err error
	if u.name, err = fileQuery(u.r); err != nil {
		return err
	}
	if u.metadata, err = uploadMetadata(u.r.Header); err != nil {
		return err
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
	media, params, err := mime.ParseMediaType(u.r.Header.Get("Content-Type"))
	switch {
	case err == nil && media == "application/octet-stream":
		if u.name.Path == "" {
			return airlock.Errorf(airlock.Invalid, "the query parameter path is missing")
		}
		return u.write(u.name.Path, body)
	case err == nil && media == "multipart/form-data" && params["boundary"] != "":
		return u.parts(multipart.NewReader(body, params["boundary"]))
	}
	return airlock.Errorf(airlock.Invalid, "the body's type must be multipart/form-data or application/octet-stream")
}

func (u *upload) parts(parts *multipart.Reader) error {
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
		if u.name.Path != "" {
			file = u.name.Path
		}
		if file == "" {
			return airlock.Errorf(airlock.Invalid, "a file has no path: give it as its filename or as the query parameter path")
		}
		if err := checkPath(file); err != nil {
			return err
		}
		if err := u.write(file, part); err != nil {
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

func (u *upload) write(to string, body io.Reader) error {
	twice := airlock.Errorf(airlock.Invalid, "path '%.200s' is in the request twice", to)
	if u.paths[path.Clean(to)] {
		return twice
	}
	u.paths[path.Clean(to)] = true
	src := &sourceReader{r: body}
	req := channel.WriteRequest{PathRequest: channel.PathRequest{User: u.name.User, Path: to}, Metadata: u.metadata}
	entry, err := u.r.guest.WriteFile(u.r.Context(), req, src)
	switch {
	case err != nil && src.err != nil:
		return brokenUpload(src.err)
	case err != nil:
		return err
	case entry.Path != path.Clean(to) && u.paths[entry.Path]: // the same by another name
		return twice
	}
	u.paths[entry.Path] = true
	u.written = append(u.written, fileBody{entry.Name, entry.Path, "file", u.metadata})
	u.size += len(entry.Name) + len(entry.Path)
	for key, value := range u.metadata {
		u.size += len(key) + len(value)
	}
	if u.size > maxUploadReply {
		return airlock.Errorf(airlock.TooLarge, "the names and metadata of the files are longer than %d bytes together: send the rest in another request", maxUploadReply)
	}
	return nil
}

func brokenUpload(err error) error {
	return airlock.Errorf(airlock.Invalid, "the upload broke off or is damaged: send it again").Because(err)
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

// compose makes one file of several, which are removed.
func (s *server) compose(w http.ResponseWriter, r *request) error {
	var req struct {
		Sources     []string `json:"source_paths"`
		Destination string   `json:"destination"`
		User        string   `json:"username"`
	}
	if err := readJSON(w, r, &req); err != nil {
		return err
	}
	switch n := len(req.Sources); {
	case n == 0:
		return airlock.Invalidf("source_paths", "name the files in their order", "source_paths is missing or empty")
	case n > maxSources:
		return airlock.Invalidf("source_paths", "compose in several steps", "source_paths has %d paths and the most is %d", n, maxSources)
	case req.Destination == "":
		return airlock.Invalidf("destination", "give a path", "destination is missing")
	}
	entry, err := r.guest.Compose(r.Context(), channel.ComposeRequest{User: req.User, Sources: req.Sources, Destination: req.Destination})
	if err != nil {
		return err
	}
	writeJSON(w, http.StatusOK, fileBody{Name: entry.Name, Path: entry.Path, Type: "file"})
	return nil
}
