package api

import (
	"context"
	"net/http"
	"strconv"
	"time"

	"airlock.dev/airlock"
	"airlock.dev/airlock/api/envd"
	"airlock.dev/airlock/channel"
	"connectrpc.com/connect"
)

const (
	maxRPC          = 8 << 20 // bytes of one message of a client
	compressFrom    = 8 << 10 // bytes of one message of ours
	defaultPing     = 90 * time.Second
	maxPing         = time.Hour
	defaultDirDepth = 1
	maxDirDepth     = 1 << 16
)

func (s *server) rpcOptions() []connect.HandlerOption {
	return []connect.HandlerOption{
		connect.WithInterceptors(rpcErrors{s}),
		connect.WithReadMaxBytes(maxRPC),
		connect.WithCompressMinBytes(compressFrom),
	}
}

type execTimeoutKey struct{}

// rpc serves a Connect service. The deadline of Start and Connect is that of
// the process, which control keeps even when the client leaves: Connect's own
// would tear the stream before the process's end is told.
func (s *server) rpc(_ string, h http.Handler) func(http.ResponseWriter, *request) error {
	return func(w http.ResponseWriter, r *request) error {
		hr := r.Request
		if hr.URL.Path == envd.ProcessStartProcedure || hr.URL.Path == envd.ProcessConnectProcedure {
			const name = "Connect-Timeout-Ms"
			if text := hr.Header.Get(name); text != "" {
				ms, err := strconv.ParseInt(text, 10, 64)
				if err != nil || ms < 0 || len(text) > 10 {
					return airlock.Invalidf(name, "give milliseconds, up to ten digits", "%s is %.20q", name, text)
				}
				hr = hr.WithContext(context.WithValue(hr.Context(), execTimeoutKey{}, time.Duration(ms)*time.Millisecond))
				hr.Header.Del(name)
			}
		}
		h.ServeHTTP(w, hr)
		return nil
	}
}

// execTimeout is 0 for none.
func execTimeout(ctx context.Context) time.Duration {
	d, _ := ctx.Value(execTimeoutKey{}).(time.Duration)
	return d
}

// pingInterval is how much silence a client bears.
func pingInterval(h http.Header) time.Duration {
	n, err := strconv.Atoi(h.Get("Keepalive-Ping-Interval"))
	if err != nil || n < 1 {
		return defaultPing
	}
	return min(time.Duration(n)*time.Second, maxPing)
}

// rpcUser is the user in whose name a call acts; "" is the sandbox's default.
func rpcUser(h http.Header) string {
	user, _, _ := (&http.Request{Header: h}).BasicAuth()
	return user
}

func refOf(sel *envd.ProcessSelector) (channel.ProcessRef, error) {
	switch v := sel.GetSelector().(type) {
	case *envd.ProcessSelector_Pid:
		if v.Pid != 0 {
			return channel.ProcessRef{PID: v.Pid}, nil
		}
	case *envd.ProcessSelector_Tag:
		if v.Tag != "" {
			return channel.ProcessRef{Tag: v.Tag}, nil
		}
	}
	return channel.ProcessRef{}, airlock.Invalidf("process", "give its pid or its tag", "no process is named")
}
