"""Lets this process's ops use cores that the machine's other engines leave idle, and lends its own. Torch-free.

Knows nothing of steps or of who starts engines. They share a page of memory, made once by ``new_page``;
``threads.cpp`` says what lies in it and how cores are divided.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
from collections.abc import Callable
from typing import NamedTuple

from baton.kernels.abi import native

log = logging.getLogger("baton.kernels")

PAGE_BYTES = 4096  # of the shared memory
SEATS = 64  # engines that may share it


def new_page() -> int:
    """Returns the descriptor of a new shared page, without any engine; those that open it can't change its size."""
    fd = os.memfd_create("baton-cores", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, PAGE_BYTES)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return fd


class LentCores(NamedTuple):
    """Tells the other engines of a machine what this one needs.

    ``begin_role(role)`` says which role it plays: of spare cores, what can't be divided goes to one that decodes.
    ``rest()`` says that it has nothing to compute, so that others may use its cores until its next op.
    ``prompts_beside()`` tells whether a prefill engine that shares the cores computes now.
    """

    begin_role: Callable[[str], object] = lambda role: None
    rest: Callable[[], object] = lambda: None
    prompts_beside: Callable[[], bool] = lambda: False


def lend(page: str, share: int, all_cores: int) -> LentCores:
    """Divides ``all_cores`` cores with the engines that open the same ``page``, ``share`` of them this one's own.

    Where the page can't be opened, or has no seat left, this engine keeps to its share, and the log says so.
    """
    if native.library() is None:
        return LentCores()
    if failed := _join(page, share, all_cores):
        log.warning("cores are neither lent nor borrowed: %s: %s", page, failed)
        return LentCores()
    writes, rest = native.function("write_answers", native.I32), native.function("rest")
    beside = native.function("prompts_beside", result=native.I32)
    return LentCores(lambda role: writes(int(role == "decode")), rest, lambda: bool(beside()))


def usable() -> int:
    """Returns how many threads an op that begins now may use; asking counts as computing."""
    found = native.function("cores", result=native.I32)()
    assert found is not None
    return found


def _join(page: str, share: int, all_cores: int) -> str:
    """Takes a seat; returns why it can't be had, or an empty string."""
    try:
        fd = os.open(page, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        return error.strerror or str(error)
    try:
        take = native.function("lend_cores", native.I32, native.I32, native.I32, result=native.I32)
        code = take(fd, share, all_cores) or 0
    finally:
        os.close(fd)
    if code == errno.EAGAIN:
        return f"{SEATS} engines share it already"
    return os.strerror(code) if code else ""
