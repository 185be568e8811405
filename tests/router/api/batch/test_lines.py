"""Odd lines of a batch's file are told by number; none stops the reading."""

from __future__ import annotations

import pytest

from baton.router.api.batch.lines import read_lines

GOOD = b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": %s}'


@pytest.mark.parametrize(
    "body",
    [
        b'{"x": "\xff\xfe"}',
        b'{"\xff": 1}',
        b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"x": 1%s}' % (b"0" * 30),
    ],
    ids=["no utf-8", "a name that is no utf-8", "endless nesting", "a number over 64 bits"],
)
def test_a_line_that_cannot_be_read_is_named_and_the_rest_is_read(body: bytes) -> None:
    lines, errors = read_lines(b"\n".join((GOOD % b"{}", GOOD.replace(b'"a"', b'"b"') % body)), "/v1/completions")
    assert [line.custom_id for line in lines] == ["a"]
    assert [(error["line"], error["param"]) for error in errors] == [(2, "line")]
