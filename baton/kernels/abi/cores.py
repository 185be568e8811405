"""Shares CPU cores among the engines of a machine: an engine's ops use cores that others leave idle. Torch-free.

Knows nothing of steps or of who starts engines. The engines share a page of memory, made once by ``new_page``;
``threads.cpp`` describes its content and how cores are divided.
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
MOST_US = 2**31 - 1  # of a time in the page, which is an int32


def new_page() -> int:
    """Returns the file descriptor of a new shared page (a sealed memfd) that no engine has joined yet."""
    fd = os.memfd_create("baton-cores", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, PAGE_BYTES)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return fd


class LentCores(NamedTuple):
    """Functions by which an engine tells the other engines of the machine what it needs.

    ``begin_role(role)`` sets its role; a decode engine gets the cores that can't be divided evenly. ``rest()`` says
    that it has nothing to compute, so that others may use its cores until its next op. ``tell_chunk(seconds)`` says
    how long it takes to read a chunk of prompts. ``prompts_beside()`` returns that time, in seconds, of the slowest
    prefill engine that computes now on the same cores; 0 if none does, many seconds if it isn't known.
    """

    begin_role: Callable[[str], object] = lambda role: None
    rest: Callable[[], object] = lambda: None
    tell_chunk: Callable[[float], object] = lambda seconds: None
    prompts_beside: Callable[[], float] = lambda: 0.0


def lend(page: str, share: int, all_cores: int) -> LentCores:
    """Shares ``all_cores`` cores with the engines that open the same ``page`` (a path); ``share`` of them are its
    own.

    If the page can't be opened or is full, a warning is logged, and this engine keeps to its own cores.
    """
    if native.library() is None:
        return LentCores()
    if failed := _join(page, share, all_cores):
        log.warning("cores are neither lent nor borrowed: %s: %s", page, failed)
        return LentCores()
    writes, rest = native.function("write_answers", native.I32), native.function("rest")
    tell, beside = native.function("tell_chunk", native.I32), native.function("prompts_beside", result=native.I32)
    return LentCores(
        lambda role: writes(int(role == "decode")),
        rest,
        lambda seconds: tell(max(1, min(MOST_US, round(1e6 * seconds)))),
        lambda: (beside() or 0) / 1e6,
    )


def usable() -> int:
    """Returns the number of threads that an op may use now; calling it counts as computing."""
    found = native.function("cores", result=native.I32)()
    assert found is not None
    return found


def _join(page: str, share: int, all_cores: int) -> str:
    """Joins the engines of the page; returns the reason if that fails, else ""."""
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
