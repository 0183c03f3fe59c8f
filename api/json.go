package api

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"reflect"
	"strconv"
	"time"
	"unicode/utf8"

	"airlock.dev/airlock"
)

const (
	maxBody     = 1 << 20          // of JSON
	bodyTimeout = 30 * time.Second // for a body of at most maxBody
)

// writeJSON answers v.
func writeJSON(w http.ResponseWriter, status int, v any) {
	body, err := json.Marshal(v)
	if err != nil {
		panic(fmt.Sprintf("api: encode reply: %v", err)) // our own types do encode
	}
	h := w.Header()
	h.Set("Content-Type", "application/json")
	h.Set("Cache-Control", "no-store") // replies hold tokens
	h.Set("Content-Length", strconv.Itoa(len(body)))
	w.WriteHeader(status)
	w.Write(body) // an error is the client's: it left
}

// readJSON decodes the body into v. An empty body counts as {}.
func readJSON(w http.ResponseWriter, r *request, v any) error {
	c := http.NewResponseController(w)
	c.SetReadDeadline(time.Now().Add(bodyTimeout)) // not every writer has one; the server's does
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxBody))
	c.SetReadDeadline(time.Time{})
	var over *http.MaxBytesError
	switch {
	case errors.As(err, &over):
		return airlock.Errorf(airlock.TooLarge, "the body is larger than %d bytes", maxBody)
	case err != nil:
		return airlock.Errorf(airlock.Invalid, "the body broke off").Because(err)
	}
	return decodeJSON(body, v)
}

func decodeJSON(body []byte, v any) error {
	if len(body) == 0 {
		return nil
	}
	if !utf8.Valid(body) {
		return airlock.Errorf(airlock.Invalid, "the body is not valid UTF-8")
	}
	err := json.Unmarshal(body, v)
	var syntax *json.SyntaxError
	var typ *json.UnmarshalTypeError
	switch {
	case errors.As(err, &syntax):
		return airlock.Errorf(airlock.Invalid, "the body is not valid JSON at %s: %s", position(body, syntax.Offset), syntax.Error())
	case errors.As(err, &typ) && typ.Field == "":
		return airlock.Errorf(airlock.Invalid, "the body is %s where an object is expected", article(typ.Value))
	case errors.As(err, &typ):
		e := airlock.Errorf(airlock.Invalid, "%s is %s where %s is expected, at %s", typ.Field, article(typ.Value), kindName(typ.Type), position(body, typ.Offset))
		e.Field = typ.Field
		return e
	case err != nil:
		return airlock.Errorf(airlock.Invalid, "the body is not as expected").Because(err)
	}
	return nil
}

// position says where the byte before offset is, as an editor would.
func position(body []byte, offset int64) string {
	before := body[:min(max(offset-1, 0), int64(len(body)))]
	line := bytes.Count(before, []byte{'\n'}) + 1
	column := utf8.RuneCount(before[bytes.LastIndexByte(before, '\n')+1:]) + 1
	return fmt.Sprintf("line %d, column %d", line, column)
}

func article(value string) string {
	switch value {
	case "array", "object":
		return "an " + value
	case "string", "number":
		return "a " + value
	case "bool":
		return "true or false"
	}
	return value // "number 1.5"
}

func kindName(t reflect.Type) string {
	switch t.Kind() {
	case reflect.Bool:
		return "true or false"
	case reflect.String:
		return "a string"
	case reflect.Int, reflect.Int64:
		return "a whole number"
	case reflect.Float64:
		return "a number"
	case reflect.Slice:
		return "a list"
	}
	return "an object"
}
