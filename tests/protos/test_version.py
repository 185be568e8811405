"""Builds one minor version apart run together; the wire of an earlier protocol is never broken."""

from pathlib import Path

import msgspec
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from baton.protos import nouns, version
from baton.protos.v1 import common_pb2, inference_pb2, worker_pb2
from tests.e2e.other_build import without

RELEASED = Path(__file__).with_name("protocol-1.0.txt")


@pytest.mark.parametrize(
    ("ours", "theirs", "together"),
    [
        ("1.1", "1.1", True),
        ("1.1", "1.0", True),
        ("1.1", "1.2", True),
        ("1.1", "1.3", False),
        ("1.1", "2.1", False),
        ("1.10", "1.9", True),
        ("1.1", "", False),
        ("1.1", "1", False),
        ("1.1", "1.-1", False),
        ("1.1", "one.two", False),
    ],
)
def test_one_minor_version_apart_runs_together(ours: str, theirs: str, together: bool) -> None:
    assert version.runs_with(theirs, ours) is together
    assert together is (version.runs_with(ours, theirs) if theirs else False)


def test_a_refusal_names_both_sides_and_what_to_do() -> None:
    said = version.refusal("decode-0", "1.9", "4.0.0")
    assert "decode-0 (baton 4.0.0) speaks protocol 1.9" in said
    assert version.PROTOCOL in said
    assert "one version at a time" in said


def test_a_worker_says_which_build_it_is_and_an_entry_of_an_older_one_is_read() -> None:
    layout = nouns.KvLayout("float32", (), 256, "float32")
    now = nouns.of_this_build(nouns.WorkerInfo("w", "i", "decode", "a:1", "m", "f", layout, 16, 16, (), 1))
    assert now.version == version.product_version()
    older = without(nouns.WorkerInfo, ("version",))
    kept = {name: getattr(now, name) for name in older.__struct_fields__}
    entry = msgspec.msgpack.encode(older(**kept))
    assert msgspec.msgpack.decode(entry, type=nouns.WorkerInfo).version == "", "and not taken for ours"
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(now), type=older).worker_id == "w", "and it reads ours"


def test_messages_only_gain_fields() -> None:
    released = set(RELEASED.read_text().splitlines())
    gone = released - set(fields())
    assert not gone, f"fields of protocol 1.0 that changed or went: {sorted(gone)}"


def fields() -> list[str]:
    """Every field on the wire between our own processes: where it is, its number, its type, whether repeated."""
    return [line for pb in (common_pb2, inference_pb2, worker_pb2) for m in _messages(pb) for line in _lines(m)]


def _messages(pb: object) -> list[Descriptor]:
    return list(pb.DESCRIPTOR.message_types_by_name.values())  # type: ignore[attr-defined]


def _lines(message: Descriptor) -> list[str]:
    own = [f"{message.full_name}.{f.name} = {f.number} {_kind(f)}" for f in message.fields]
    return own + [line for nested in message.nested_types for line in _lines(nested)]


def _kind(field: FieldDescriptor) -> str:
    named = field.message_type.full_name if field.message_type else str(field.type)
    return f"repeated {named}" if field.is_repeated else named
