package airlock

import (
	"context"
	"errors"
	"fmt"
	"strings"
)

// Code is the stable, machine-readable kind of an Error. Codes are mapped to
// HTTP statuses and Connect codes in one place, package api.
type Code string

// The codes. An error without a code counts as Internal and its text is
// logged, never shown to a client.
const (
	Invalid         Code = "invalid_argument"
	Unauthenticated Code = "unauthenticated"
	Denied          Code = "permission_denied"
	NotFound        Code = "not_found"
	Exists          Code = "already_exists"
	Conflict        Code = "conflict"
	Exhausted       Code = "resource_exhausted"
	TooLarge        Code = "too_large"
	NoSpace         Code = "no_space"
	Gone            Code = "sandbox_gone"
	PortClosed      Code = "port_closed" // nothing in the sandbox listens there
	Canceled        Code = "canceled"
	Deadline        Code = "deadline_exceeded"
	Unavailable     Code = "unavailable"
	Unimplemented   Code = "unimplemented"
	Internal        Code = "internal"
)

// Error is the one error type that crosses package borders.
type Error struct {
	Code       Code
	Field      string // the input at fault, in the client's own spelling
	Message    string // what is wrong, for a person
	Hint       string // what to do next
	RetryAfter int    // seconds, with Exhausted; 0 means do not retry by itself
	Err        error  // the cause; logged, not shown
}

// Error returns the message, the remedy and the cause.
func (e *Error) Error() string {
	var b strings.Builder
	b.WriteString(e.Public())
	if e.Err != nil {
		b.WriteString(": ")
		b.WriteString(e.Err.Error())
	}
	return b.String()
}

// Public returns the text that a client may see: message and remedy, no cause.
func (e *Error) Public() string {
	if e.Hint == "" {
		return e.Message
	}
	return e.Message + ": " + e.Hint
}

// Unwrap returns the cause.
func (e *Error) Unwrap() error { return e.Err }

// Errorf returns an Error with a code and a public message. The cause, if
// there is one, is added with Because.
func Errorf(code Code, format string, args ...any) *Error {
	return &Error{Code: code, Message: fmt.Sprintf(format, args...)}
}

// Because adds the hidden cause and returns e.
func (e *Error) Because(err error) *Error {
	e.Err = err
	return e
}

// Invalidf returns an Invalid error that names the field and the remedy.
func Invalidf(field, hint, format string, args ...any) *Error {
	return &Error{Code: Invalid, Field: field, Hint: hint, Message: fmt.Sprintf(format, args...)}
}

// CodeOf returns the code of the first Error in err's chain. Context errors
// have the codes Canceled and Deadline; anything else is Internal.
func CodeOf(err error) Code {
	var e *Error
	switch {
	case errors.As(err, &e):
		return e.Code
	case errors.Is(err, context.Canceled):
		return Canceled
	case errors.Is(err, context.DeadlineExceeded):
		return Deadline
	}
	return Internal
}
