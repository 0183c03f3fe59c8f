#!/usr/bin/env bash
# All measurements. `make bench` builds bin/airlock before.
set -euo pipefail
cd "$(dirname "$0")/.."
(cd test/e2b && npm ci --no-audit --no-fund --loglevel=error)
go test -run '^$' -bench . ./test/bench
go test -run '^$' -bench Decide -benchtime 50000x ./policy
exec go test -run '^$' -bench 'Open|ManyFlows' ./gateway/door
