"""The process that holds our end of Ray: ``python -m baton.deploy.ray_host --spec FILE``.

A process of its own because Ray ends the process of a driver whose raylet dies; serving must not end with it.
Reports are JSON lines on stdout; it stops when stdin ends or on SIGTERM. Knows nothing of the router.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from pathlib import Path

import msgspec

from baton.deploy.processes import named_in_session, wait_exit
from baton.deploy.ray_app import Placement, PlacementSpec
from baton.deploy.supervise import SlotStatus
from baton.protos.errors import BatonError, ErrorInfo, StartupError, to_info

POLL_S = 0.2
GRACE_S = 1.5


class Report(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line: Ray came up (``address``), a slot changed (``slot``), or nothing can go on (``error``)."""

    address: str = ""
    slot: SlotStatus | None = None
    error: ErrorInfo | None = None


def main() -> None:
    """Place the workers and report on them until told to stop."""
    parser = argparse.ArgumentParser(prog="baton.deploy.ray_host")
    parser.add_argument("--spec", required=True, help="file with a PlacementSpec as JSON")
    spec = msgspec.json.decode(Path(parser.parse_args().spec).read_bytes(), type=PlacementSpec)
    reports = _take_stdout()
    stop = threading.Event()
    threading.Thread(target=_await_end_of_stdin, args=(stop,), daemon=True).start()
    try:
        _serve(spec, reports, stop)
    except BatonError as error:
        _say(reports, Report(error=to_info(error)))
        sys.exit(1)


def _serve(spec: PlacementSpec, reports: int, stop: threading.Event) -> None:
    placement = Placement(spec)
    try:
        address = placement.connect()
        signal.signal(signal.SIGTERM, lambda *_: stop.set())  # after Ray, which installs its own
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        _say(reports, Report(address=address))
        placement.place()
        _watch(placement, reports, stop)
        placement.stop_hosts(GRACE_S)
    finally:
        placement.close()


def _watch(placement: Placement, reports: int, stop: threading.Event) -> None:
    known: dict[str, SlotStatus] = {}
    raylet = named_in_session("raylet")  # None in a joined cluster
    while not stop.wait(POLL_S):
        if raylet is not None and wait_exit(raylet, 0):
            raise StartupError("Ray's raylet ended; serving goes on")
        for slot, status in placement.statuses().items():
            if known.get(slot) != status:
                known[slot] = status
                _say(reports, Report(slot=status))


def _take_stdout() -> int:
    """Keep stdout for reports alone: whatever a library prints goes to stderr, the log."""
    kept = os.dup(1)
    os.dup2(2, 1)
    return kept


def _say(reports: int, report: Report) -> None:
    os.write(reports, msgspec.json.encode(report) + b"\n")


def _await_end_of_stdin(stop: threading.Event) -> None:
    while os.read(0, 4096):
        pass
    stop.set()


if __name__ == "__main__":
    main()
