"""Worker that trains nothing: a `TRAIN_FILE` for tests of run_train.sh.

It leaves its process id in `$IDLE_FOLDER/<rank>.pid` and sleeps `$IDLE_SECONDS` (60),
or fails on the rank and in the way of `$IDLE_FAILS`: "1:raise", "1:exit", "0:kill".
"""

import os
import signal
import sys
import time
from pathlib import Path

from recipes.launch import die_with_agent


def main() -> None:
    rank = os.environ["RANK"]
    file = Path(os.environ["IDLE_FOLDER"]) / f"{rank}.pid"
    file.write_text(str(os.getpid()))
    who, _, how = os.environ.get("IDLE_FAILS", "").partition(":")
    if who != rank:
        time.sleep(float(os.environ.get("IDLE_SECONDS", "60")))
    elif how == "raise":
        raise ValueError("planted")
    elif how == "exit":
        sys.exit(3)
    else:
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    die_with_agent()
    # Not above: a rank that need not wait for torch is there at once.
    if os.environ.get("IDLE_FAILS", "").endswith("raise"):
        from torch.distributed.elastic.multiprocessing.errors import record

        main = record(main)
    main()
