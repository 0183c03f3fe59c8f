// Package test is the tests of Airlock as a whole: the real command in
// testscript files (script), the rules of the source tree (docs_test.go), the
// official E2B clients (e2b), abuse and speed. It has no code of its own.
package test
