"""Runs a command several times. Prints the seconds and peak resident bytes of each run as JSON.

Usage: python measure.py RUNS COMMAND [ARGUMENT…]
"""

import json
import os
import sys
import time


def main(runs, command):
    null = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in (0, 1, 2)]
    measured = []
    for _ in range(runs):
        started = time.perf_counter()
        pid = os.posix_spawnp(command[0], command, os.environ, file_actions=null)
        _, status, usage = os.wait4(pid, 0)
        seconds = time.perf_counter() - started
        # Linux counts in KiB.
        measured.append({"seconds": seconds, "peak_bytes": usage.ru_maxrss * 1024, "status": status})
    print(json.dumps(measured))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
