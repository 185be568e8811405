"""What `baton workers` says of each worker's version."""

from io import StringIO

import msgspec
import pytest
from rich.console import Console

from baton.cluster.membership import Entry
from baton.console.workers import table, version_of
from baton.protos.nouns import KvLayout, WorkerInfo, WorkerLoad
from baton.protos.version import PROTOCOL

INFO = WorkerInfo(
    "decode-0", "i", "decode", "10.0.0.3:8100", "m", "f", KvLayout("float32", (), 256, "float32"), 16, 16, (), 1
)


@pytest.mark.parametrize(
    ("build", "protocol", "shown"),
    [
        ("1.2.3", PROTOCOL, "1.2.3"),
        ("1.2.2", "1.0", "1.2.2, protocol 1.0"),
        ("", "1.0", "?, protocol 1.0"),
        ("9.0.0", "1.9", "[red]9.0.0, protocol 1.9: refused[/]"),
    ],
)
def test_a_workers_version_is_shown_and_whether_we_run_together(build: str, protocol: str, shown: str) -> None:
    assert version_of(msgspec.structs.replace(INFO, version=build, protocol=protocol)) == shown


def test_every_worker_has_a_row_with_its_version() -> None:
    text = StringIO()
    entry = Entry(msgspec.structs.replace(INFO, version="1.2.3"), WorkerLoad(), 0.2)
    Console(file=text, width=160).print(table({"decode-0": entry}))
    header, row = text.getvalue().splitlines()[:2]
    assert "version" in header
    assert {"decode-0", "1.2.3", "10.0.0.3:8100"} <= set(row.split())
