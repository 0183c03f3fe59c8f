package cli

import (
	"math"
	"strconv"
	"strings"
	"time"

	"airlock.dev/airlock"
)

// parseMB reads a size such as 512MB, 1.5GiB or 2g into MiB, rounded up. K, M,
// G and T are powers of 1024 with or without B or iB; no unit means MiB.
func parseMB(flag, s string) (int, error) {
	text := strings.ToLower(strings.TrimSpace(s))
	number := strings.TrimRight(text, "bikmgt ")
	unit := strings.TrimSpace(text[len(number):])
	scale, known := map[string]float64{
		"": 1, "b": 1.0 / (1 << 20),
		"k": 1.0 / (1 << 10), "kb": 1.0 / (1 << 10), "kib": 1.0 / (1 << 10),
		"m": 1, "mb": 1, "mib": 1,
		"g": 1 << 10, "gb": 1 << 10, "gib": 1 << 10,
		"t": 1 << 20, "tb": 1 << 20, "tib": 1 << 20,
	}[unit]
	n, err := strconv.ParseFloat(number, 64)
	if err != nil || !known || !(n > 0) || strings.ContainsAny(number, "xpe_n") {
		return 0, airlock.Invalidf(flag, "give a size such as 512MB or 2GiB", "%s: %q is not a size", flag, s)
	}
	mb := math.Ceil(n * scale)
	if mb > math.MaxInt32 {
		return 0, airlock.Invalidf(flag, "give a size such as 512MB or 2GiB", "%s: %q is too large", flag, s)
	}
	return int(mb), nil
}

// parseDays reads a time such as 2200d or 36h; "" is 0.
func parseDays(flag, s string) (time.Duration, error) {
	if s == "" {
		return 0, nil
	}
	var d time.Duration
	var err error
	if days, found := strings.CutSuffix(s, "d"); found {
		var n int64
		n, err = strconv.ParseInt(days, 10, 32)
		d = time.Duration(n) * 24 * time.Hour
		if n > 36500 {
			d = 0
		}
	} else {
		d, err = time.ParseDuration(s)
	}
	if err != nil || d <= 0 || d%time.Hour != 0 { // minutes look like months
		return 0, airlock.Invalidf(flag, "give days or hours, such as 2200d or 36h", "%s: %q is no time to keep something", flag, s)
	}
	return d, nil
}
