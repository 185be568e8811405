"""Tests calibration text: what is read of it, and the line by which it is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.protos.errors import ConfigError
from baton.quantize.calibration import documents, own_text, read_samples


def test_lines_of_text_and_of_messages_are_read(tmp_path: Path) -> None:
    path = tmp_path / "text.jsonl"
    path.write_text('{"text": "a river"}\n\n{"messages": [{"role": "user", "content": "hi"}, {"content": "ho"}]}\n')
    assert list(documents(path)) == ["a river", "hi\nho"]
    plain = tmp_path / "text.txt"
    plain.write_text("one\ntwo\n\f\nthree")
    assert list(documents(plain)) == ["one\ntwo", "three"]


@pytest.mark.parametrize("line", ["{", '"text"', '{"text": 3}', '{"txt": "a"}', '{"text": " "}', "\\xff"])
def test_a_bad_line_is_refused_by_its_number(tmp_path: Path, line: str) -> None:
    path = tmp_path / "text.jsonl"
    path.write_bytes(b'{"text": "a river"}\n\n' + line.encode("latin-1").replace(b"\\xff", b"\xff") + b"\n")
    with pytest.raises(ConfigError, match=r"text.jsonl, line 3"):
        documents(path)


def test_bytes_that_are_no_text_are_refused_by_their_line(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(b"fine\n\xff\xfe\n")
    with pytest.raises(ConfigError, match=r"text.txt, line 2: isn't UTF-8"):
        documents(path)


def test_samples_are_spread_over_the_text_and_all_of_one_length(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("\f".join(f"river number {i} runs to the sea" for i in range(60)))
    found = read_samples(model, str(path), 4, 32)
    assert [len(sample) for sample in found] == [32] * 4
    with pytest.raises(ConfigError, match="give more text or a smaller --tokens"):
        read_samples(model, str(path), 4, 1 << 14)
    with pytest.raises(ConfigError, match="multiple of 16"):
        read_samples(model, str(path), 4, 40)
    with pytest.raises(ConfigError, match="No such file"):
        read_samples(model, str(tmp_path / "none.txt"), 4, 32)


def test_a_model_writes_its_own_text_the_same_each_time(model: Path) -> None:
    found = own_text(model, 3, 32)
    assert [len(sample) for sample in found] == [32] * 3
    assert found == own_text(model, 3, 32)
    assert len({tuple(sample) for sample in found}) == 3
