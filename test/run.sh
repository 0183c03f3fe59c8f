#!/usr/bin/env bash
# All tests. `make test` builds bin/airlock before.
set -euo pipefail
cd "$(dirname "$0")/.."
(cd test/e2b && npm ci --no-audit --no-fund --loglevel=error)
test/e2b/venv.sh
# -race needs cgo; the binaries under test stay static. The packages that make
# sandboxes share this machine's limits and run one after the other.
exec env CGO_ENABLED=1 go test -race -timeout 35m -p 2 ./...
