"""The process that holds our end of Ray: ``python -m baton.launch.ray.host --spec FILE``.

A separate process because Ray ends a driver whose raylet dies, and serving must not end with it. Reports are JSON
lines on stdout; a line on stdin says which slots are wanted from now on (a JSON list of HostPlans). It stops when
stdin ends or on SIGTERM. Knows nothing of the router.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
from pathlib import Path

import msgspec

from baton.launch.ray.app import PlacementSpec, RayPlacement
from baton.launch.supervise import HostPlan, SlotStatus
from baton.process.processes import named_in_session, wait_exit
from baton.protos.errors import BatonError, ErrorInfo, StartupError, to_info

POLL_S = 0.2  # seconds between two looks at Ray and at what is asked for
GRACE_S = 1.5  # seconds that workers have to end by themselves
STUCK_S = 10.0  # seconds after the raylet's end in which a call of Ray should have noticed


class PlacementReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """Holds one line of stdout: Ray is up (``address``), a slot changed (``slot``), or placement failed
    (``error``).
    """

    address: str = ""
    slot: SlotStatus | None = None
    error: ErrorInfo | None = None


def main() -> None:
    """Places the workers and reports on them until SIGTERM or the end of stdin; exits with 1 on a BatonError."""
    parser = argparse.ArgumentParser(prog="baton.launch.ray.host")
    parser.add_argument("--spec", required=True, help="file with a PlacementSpec as JSON")
    spec = msgspec.json.decode(Path(parser.parse_args().spec).read_bytes(), type=PlacementSpec)
    reports = _take_stdout()
    stop, asked = threading.Event(), RequestedPlans()
    threading.Thread(target=_read_stdin, args=(stop, asked), daemon=True).start()
    try:
        _serve(spec, reports, stop, asked)
    except BatonError as error:
        _say(reports, PlacementReport(error=to_info(error)))
        sys.exit(1)


def _serve(spec: PlacementSpec, reports: int, stop: threading.Event, asked: RequestedPlans) -> None:
    placement = RayPlacement(spec)
    try:
        address, raylet = placement.connect(), named_in_session("raylet")  # None in a joined cluster
        if raylet is not None:
            threading.Thread(target=end_with, args=(raylet,), daemon=True).start()
        signal.signal(signal.SIGTERM, lambda *_: stop.set())  # after Ray, which installs its own
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        _say(reports, PlacementReport(address=address))
        placement.place()
        _watch(placement, raylet, reports, stop, asked)
        placement.stop_hosts(GRACE_S)
    finally:
        placement.close()


def _watch(
    placement: RayPlacement, raylet: int | None, reports: int, stop: threading.Event, asked: RequestedPlans
) -> None:
    while not stop.wait(POLL_S):
        if raylet is not None and wait_exit(raylet, 0):
            raise StartupError("Ray's raylet ended; serving goes on")
        if (plans := asked.take()) is not None:
            placement.scale(plans)
        placement.tend()
        for status in placement.changes():
            _say(reports, PlacementReport(slot=status))


def end_with(raylet: int, stuck_s: float = STUCK_S) -> None:
    """Ends this process with status 1 once process ``raylet`` has been gone for ``stuck_s`` seconds.

    A call of Ray that was under way when its raylet died may never return. Whoever started this process starts it
    again, and the next one adopts the workers.
    """
    while not wait_exit(raylet, 60.0):
        pass
    time.sleep(stuck_s)
    os._exit(1)


def _take_stdout() -> int:
    """Keep stdout for reports alone: whatever a library prints goes to stderr, the log."""
    kept = os.dup(1)
    os.dup2(2, 1)
    return kept


def _say(reports: int, report: PlacementReport) -> None:
    os.write(reports, msgspec.json.encode(report) + b"\n")


class RequestedPlans:
    """Holds the plans that stdin last asked for, until they are taken. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._plans: list[HostPlan] | None = None

    def put(self, line: bytes) -> None:
        """Decodes a line of stdin and keeps its plans until they are taken. Raises MsgspecError."""
        plans = msgspec.json.decode(line, type=list[HostPlan])
        with self._lock:
            self._plans = plans

    def take(self) -> list[HostPlan] | None:
        """Returns the plans asked for last, once; None if there are no new ones."""
        with self._lock:
            plans, self._plans = self._plans, None
        return plans


def _read_stdin(stop: threading.Event, asked: RequestedPlans) -> None:
    with os.fdopen(os.dup(0), "rb") as lines:
        for line in lines:
            try:
                asked.put(line)
            except msgspec.MsgspecError as error:
                print(f"a line on stdin is not a list of plans: {error}", file=sys.stderr)
    stop.set()


if __name__ == "__main__":
    main()
