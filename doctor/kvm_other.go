//go:build !amd64

package doctor

import "errors"

func probeKVM() error { return errors.New("the probe knows x86_64 only") }
