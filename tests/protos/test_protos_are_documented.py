"""The wire's source of truth: every message field carries its meaning."""

from importlib.resources import files

import pytest

PROTOS = sorted(p.name for p in files("baton.protos.v1").iterdir() if p.name.endswith(".proto"))


@pytest.mark.parametrize("name", PROTOS)
def test_every_field_has_a_comment(name):
    text = (files("baton.protos.v1") / name).read_text()
    bare = [line for line in text.splitlines() if _bare(line)]
    assert bare == []


def _bare(line: str) -> bool:
    line = line.strip()
    if line.startswith(("//", "syntax", "package", "import", "oneof", "rpc", "message", "service")):
        return False
    return "=" in line and line.endswith(";")
