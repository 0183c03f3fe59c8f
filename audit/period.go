package audit

import (
	"fmt"
	"strings"
	"time"

	"airlock.dev/airlock"
	"airlock.dev/airlock/audit/tiles"
)

// Period is how long one shard of the log goes on. Retention drops whole
// shards, so it is also the grain of what is kept.
type Period string

// The periods.
const (
	Quarter Period = "quarter"
	Month   Period = "month"
	Day     Period = "day"
)

// ParsePeriod returns the period that s names; "" is Quarter.
func ParsePeriod(s string) (Period, error) {
	switch p := Period(s); p {
	case "":
		return Quarter, nil
	case Quarter, Month, Day:
		return p, nil
	}
	return "", airlock.Invalidf("audit-period", "use quarter, month or day", "unknown period %.40q", s)
}

func (p Period) name(t time.Time) string {
	t = t.UTC()
	switch p {
	case Day:
		return t.Format("2006-01-02")
	case Month:
		return t.Format("2006-01")
	default:
		return fmt.Sprintf("%d-Q%d", t.Year(), (int(t.Month())+2)/3)
	}
}

// shardAfter names the shard that follows current: that of the time, or
// another of the same name if the clock has not come further.
func (p Period) shardAfter(current string, now time.Time) string {
	name := p.name(now)
	if current == "" || tiles.CompareShards(name, current) > 0 {
		return name
	}
	base, number, _ := strings.Cut(current, ".")
	n := 1
	fmt.Sscan(number, &n)
	return fmt.Sprintf("%s.%d", base, n+1)
}

// over says whether the current shard's period has ended.
func (p Period) over(current string, now time.Time) bool {
	base, _, _ := strings.Cut(current, ".")
	return tiles.CompareShards(p.name(now), base) > 0
}
