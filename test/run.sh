#!/usr/bin/env bash
# All tests. `make test` builds bin/airlock before.
set -euo pipefail
cd "$(dirname "$0")/.."
(cd test/e2b && npm ci --no-audit --no-fund --loglevel=error)
test/e2b/venv.sh
# A token in software, for the tests of root keys in tokens; they skip without.
ls /usr/lib/softhsm/libsofthsm2.so /usr/lib/*/softhsm/libsofthsm2.so >/dev/null 2>&1 ||
  { command -v apt-get >/dev/null && apt-get install -y -qq softhsm2 >/dev/null; } ||
  echo 'SoftHSM cannot be installed: root keys in tokens are not tested' >&2
# -race needs cgo; the binaries under test stay static. The packages that make
# sandboxes share this machine's limits and run one after the other.
exec env CGO_ENABLED=1 go test -race -timeout 35m -p 2 ./...
