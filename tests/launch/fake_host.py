"""A worker host that serves nothing but really holds its slot: what supervisors are tested with.

The spec file holds "FOLDER|SLOT|MODE": stay, refuse (a StartupError in the record), or crash (no record).
"""

import os
import subprocess
import sys
import time
from pathlib import Path

from baton.protos.errors import ErrorInfo
from baton.worker.slots import SlotRecord, WorkerSlot


def main() -> None:
    folder, name, mode = Path(sys.argv[-1]).read_text().split("|")
    slot = WorkerSlot(folder, name)
    if not slot.acquire():
        sys.exit("taken")
    if mode == "crash":
        sys.exit("boom, on purpose")
    if mode == "refuse":
        error = ErrorInfo("CheckpointError", "no such file: weights")
        slot.write(SlotRecord(name, os.getpid(), "failed", error=error))
        sys.exit(3)
    engine = subprocess.Popen(["sleep", "600"])
    slot.write(SlotRecord(name, os.getpid(), "ready", address="here:1", engine_pid=engine.pid))
    time.sleep(600)


if __name__ == "__main__":
    main()
