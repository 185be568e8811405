"""A real worker host that kills -9 a process of our choice the moment a handoff reaches a step of our choice.

Only the I/O process's end of the local channel is watched (and the handoff's opening, which names the sender): the
messages there are the protocol's steps. ``arm`` puts a file in the slots' folder; the first decode worker that
reaches the step takes it away, notes the time and kills.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from baton.decode_worker.io import handoff_sink
from baton.worker import host as worker_host
from baton.worker.channel import IoChannel
from baton.worker.slots import WorkerSlot
from baton.worker.spec import load_spec

COMMAND = (sys.executable, "-m", "tests.e2e.watched_host")
STEPS = {
    "admit": "Admitted",  # the engine gave a lease
    "open": "ReceiveOpened",  # the handoff's first frame was accepted
    "blocks": "BlocksReceived",  # some blocks are in, others aren't
    "commit": "Commit",  # the last block is in
    "committed": "Committed",  # the engine has taken it over
    "tokens": "Tokens",  # the answer is being written
}
VICTIMS = ("decode-io", "decode-engine", "prefill-io", "prefill-engine")


def arm(folder: Path, step: str, victim: str, nth: int, after: bool, prefill: str, run: int) -> None:
    """The ``nth`` time of ``step``, before or after its message passes. ``prefill``: whom, if nobody sent."""
    (folder / "hit").unlink(missing_ok=True)
    order = {
        "message": STEPS[step],
        "victim": victim,
        "nth": nth,
        "after": after,
        "prefill": prefill,
        "run": run,
    }
    draft = folder / "arm.draft"
    draft.write_text(json.dumps(order))
    draft.rename(folder / "arm")


def hit(folder: Path) -> dict[str, Any] | None:
    """Returns who was killed and when (monotonic seconds); None before it happened."""
    try:
        return json.loads((folder / "hit").read_text())
    except (OSError, ValueError):
        return None


class Watch:
    """Counts steps for as long as one order stands."""

    def __init__(self, folder: Path, slot: str) -> None:
        self.sender = ""
        self._folder, self._slot = folder, slot
        self._run, self._seen = -1, 0

    def saw(self, message: Any, after: bool) -> None:
        """One message passes, or has passed."""
        name = type(message).__name__
        if name not in STEPS.values():
            return
        try:
            order = json.loads((self._folder / "arm").read_text())
        except OSError:
            return
        if (order["message"], order["after"]) != (name, after):
            return
        if order["run"] != self._run:
            self._run, self._seen = order["run"], 0
        self._seen += 1
        if self._seen >= order["nth"]:
            self._kill(order)

    def _kill(self, order: dict[str, Any]) -> None:
        try:
            (self._folder / "arm").rename(self._folder / "arm.taken")
        except FileNotFoundError:
            return  # another worker was first
        role, _, part = order["victim"].partition("-")
        slot = self._slot if role == "decode" else self.sender or order["prefill"]
        record = WorkerSlot(self._folder, slot).read()
        assert record is not None
        draft = self._folder / "hit.draft"
        draft.write_text(json.dumps({"slot": slot, "at": time.monotonic(), "incarnation": record.incarnation}))
        draft.rename(self._folder / "hit")
        os.kill(record.pid if part == "io" else record.engine_pid, signal.SIGKILL)


def watch(folder: Path, slot: str) -> None:
    """Put a Watch between the I/O process and its channel."""
    seen = Watch(folder, slot)
    send, receive, opening = IoChannel.send, IoChannel.receive, handoff_sink.control.decode_opening

    def watched_send(self: IoChannel, message: Any) -> None:
        seen.saw(message, after=False)
        send(self, message)
        seen.saw(message, after=True)

    async def watched_receive(self: IoChannel) -> Any:
        message = await receive(self)
        seen.saw(message, after=False)
        seen.saw(message, after=True)
        return message

    def watched_opening(body: Any) -> Any:
        found = opening(body)
        seen.sender = found.sender
        return found

    IoChannel.send, IoChannel.receive = watched_send, watched_receive  # type: ignore[method-assign]
    handoff_sink.control.decode_opening = watched_opening


if __name__ == "__main__":
    given = load_spec(sys.argv[-1])
    if given.role == "decode":
        watch(Path(given.slot_dir), given.slot)
    sys.exit(worker_host.main())
