"""Asks the operating system's kernel for permission to use AMX tiles.

Knows nothing of ops. Linux gives a process their 8 KB of state only on request; threads and forked children inherit
the permission (https://docs.kernel.org/arch/x86/xstate.html).
"""

from __future__ import annotations

import ctypes
import os

# x86-64's numbers of arch_prctl, ARCH_REQ_XCOMP_PERM and XFEATURE_XTILEDATA
_REQUEST = tuple(ctypes.c_long(number) for number in (158, 0x1023, 18))


def refusal() -> str | None:
    """Requests permission for this process to use AMX tiles; returns the reason if the kernel refuses, else
    None.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if not libc.syscall(*_REQUEST):
        return None
    return f"arch_prctl(ARCH_REQ_XCOMP_PERM): {os.strerror(ctypes.get_errno())}"
