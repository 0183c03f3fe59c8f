"""Starts processes until nothing more is given, then says how many there were."""

import os
import signal
import time

children = []
try:
    while True:
        pid = os.fork()
        if pid == 0:
            os.closerange(0, 3)
            try:
                while True:  # each child is a bomb of its own
                    os.fork()
            except OSError:
                time.sleep(60)
            os._exit(0)
        children.append(pid)
except OSError as error:
    print(f"stopped: {error.strerror} after {len(children)} processes of mine, and those of my children", flush=True)
for pid in children:
    try:
        os.kill(pid, signal.SIGKILL)
    except OSError:
        pass
raise SystemExit(1)
