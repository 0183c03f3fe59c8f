#!/usr/bin/env bash
# Starts a server, analyses some data in a sandbox, and shows what three
# hostile programs can do: nothing. `make demo` runs it. It leaves nothing
# behind.
set -euo pipefail
cd "$(dirname "$0")/.."
airlock=bin/airlock
data=$(mktemp -d)
server=

cleanup() {
  if [ -n "$server" ]; then
    kill "$server" 2>/dev/null || true
    wait "$server" 2>/dev/null || true
  fi
  rm -rf "$data"
}
trap cleanup EXIT

say() { printf '\n\033[1m%s\033[0m\n' "$*"; }

export AIRLOCK_DATA_DIR=$data/state
unset AIRLOCK_API_URL AIRLOCK_API_KEY

say "1. A server, on a free port and with a state of its own"
"$airlock" serve --listen 127.0.0.1:0 >"$data/out" 2>"$data/log" &
server=$!
for _ in $(seq 300); do
  if grep -q listens "$data/out"; then break; fi
  if ! kill -0 "$server" 2>/dev/null; then
    cat "$data/log" >&2
    exit 1
  fi
  sleep 0.1
done
cat "$data/out"

say "2. A real program: a report from examples/sales.csv, in a fresh sandbox"
time "$airlock" run examples/sales.py --file examples/sales.csv

say "3. A program that looks for the host's files, sockets, processes and network"
if "$airlock" run examples/hostile/read_host.py; then
  echo "→ contained: nothing of the host is in its file system, no host user is mapped, and there is no network"
else
  echo "→ NOT CONTAINED" >&2
  exit 1
fi

# contained NAME WHAT-STOPPED-IT WANTED-CODES FLAGS...: runs a bomb and asks
# the server afterwards.
contained() {
  local program=$1 stopped=$2 codes=$3 code=0
  shift 3
  "$airlock" run "examples/hostile/$program" "$@" 2>"$data/err" | tail -n 2 || code=${PIPESTATUS[0]}
  cat "$data/err"
  if [[ " $codes " != *" $code "* ]]; then
    echo "→ NOT CONTAINED: exit code $code" >&2
    exit 1
  fi
  "$airlock" run -c 'print("→ the server runs a sandbox right after it")' --language python
  echo "→ contained: $stopped (exit code $code)"
}

say "4. A fork bomb"
contained fork_bomb.py "at its limit of 64 processes the sandbox's own kernel gave no more" "1 137" --processes 64 --timeout 30s

say "5. A memory bomb"
contained memory_bomb.py "at its limit of 256 MiB the largest process was ended, and the sandbox lived; a control group stands behind that" "137" --memory 256MiB --timeout 60s

say "6. The trail of all that: what was decided, recorded and done, in a log that cannot be changed unnoticed"
"$airlock" audit query 'type=sandbox.create,exec.start,exec.end,sandbox.end' --limit 12
"$airlock" audit prove 0 >"$data/proof" # waits for a signed head
"$airlock" audit keys >"$data/keys"
"$airlock" audit verify --keys "$data/keys" "$AIRLOCK_DATA_DIR/audit"

say "7. A copy of it in which one byte is changed"
cp -r "$AIRLOCK_DATA_DIR/audit" "$data/copy"
checkpoint=$(ls -d "$data"/copy/log/*/checkpoint)
entries=$(dirname "$checkpoint")/tile/entries/000.p/$(sed -n 2p "$checkpoint") # as many events as it signs
printf 'X' | dd of="$entries" bs=1 seek=200 conv=notrunc status=none
if "$airlock" audit verify --keys "$data/keys" "$data/copy"; then
  echo "→ NOT FOUND" >&2
  exit 1
fi
echo "→ found, and its place named"

say "Next"
cat <<'END'
  bin/airlock doctor                                   what this machine offers
  bin/airlock audit tail                               the trail as it grows
  bin/airlock policy init policies                     policies to begin with
  bin/airlock serve                                    a server on 127.0.0.1:3000
  export E2B_API_KEY=$(bin/airlock key create)         a key for it
  export E2B_API_URL=http://127.0.0.1:3000 E2B_SANDBOX_URL=http://127.0.0.1:3000
                                                       … and the E2B SDKs use it
  README.md                                            the rest
END
