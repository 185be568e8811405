"""The number of files that a serving process may have open.

Knows nothing of what it opens.
"""

from __future__ import annotations

import resource

WANTED = 65_536  # files, enough for as many connections and no more than kernels give


def raise_file_limit() -> None:
    """Raises the soft limit of open files to the hard one, at most WANTED; each connection needs a file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = WANTED if hard == resource.RLIM_INFINITY else min(hard, WANTED)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
