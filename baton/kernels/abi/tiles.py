"""Asks the kernel for AMX's tiles. Knows nothing of ops.

Linux gives a process their 8 KB of state only if it asks first; threads and forked children have the permission,
too (https://docs.kernel.org/arch/x86/xstate.html).
"""

from __future__ import annotations

import ctypes
import os

# x86-64's numbers of arch_prctl, ARCH_REQ_XCOMP_PERM and XFEATURE_XTILEDATA
_REQUEST = tuple(ctypes.c_long(number) for number in (158, 0x1023, 18))


def refusal() -> str | None:
    """Asks for this process's permission to use tiles; returns why the kernel refuses, or None."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not libc.syscall(*_REQUEST):
        return None
    return f"arch_prctl(ARCH_REQ_XCOMP_PERM): {os.strerror(ctypes.get_errno())}"
