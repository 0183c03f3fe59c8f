#!/usr/bin/env bash
# All measurements. `make bench` builds bin/airlock before.
set -euo pipefail
cd "$(dirname "$0")/.."
(cd test/e2b && npm ci --no-audit --no-fund --loglevel=error)
exec go test -run '^$' -bench . ./test/bench
