"""Takes cards for a worker's ranks, so that no other worker of this user uses them meanwhile. Torch-free.

Knows nothing of CUDA: a card is named by its UUID. Each has a file in one folder, which is locked by flock while
the card is taken. Ranks hold theirs alone (``take``); workers of one card may share it (``share``). A lock lasts
until each process that has its descriptor has closed it or ended, however it ended, so that a card is free only
when no rank of its former worker is left.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from baton.protos.errors import ConfigError

ENDING_S = 10.0  # seconds that the ranks of a worker which was killed may still hold their cards
AGAIN_S = 0.1  # seconds between two looks
PID_BYTES = 32  # of a card's file: the holder's process id, padded


class TakenCard:
    """A card that this process has taken: its ``index`` among those it sees, and its lock's descriptor ``fd``."""

    def __init__(self, index: int, fd: int) -> None:
        self.index, self.fd = index, fd

    def release(self) -> None:
        """Gives the card back, unless another process has the lock's descriptor; a second call does nothing."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def take(
    cards: Sequence[str], count: int, patience_s: float = ENDING_S, folder: Path | None = None
) -> list[TakenCard]:
    """Returns ``count`` of ``cards``, the first ones that nobody holds, which are this process's alone now.

    Looks again for ``patience_s`` seconds while too few are free. Raises ConfigError, which names the holders.
    """
    where, deadline = _made(folder), time.monotonic() + patience_s
    while True:
        taken = _free(where, cards, count)
        if len(taken) == count:
            return taken
        holders = _holders(where, cards, taken)
        for card in taken:
            card.release()
        if time.monotonic() >= deadline:
            text = f"tp is {count}: that is {count} cards, and of the {len(cards)} that this process sees other"
            text = f"{text} workers have {len(cards) - len(taken)} ({holders})"
            raise ConfigError(
                f"{text}; end one, use fewer ranks, or name other cards by CUDA_VISIBLE_DEVICES", "tp"
            )
        time.sleep(AGAIN_S)


def share(cards: Sequence[str], patience_s: float = ENDING_S, folder: Path | None = None) -> TakenCard:
    """Returns the first of ``cards``, which other workers of one card may share, but no ranks take.

    Looks again for ``patience_s`` seconds while ranks hold it. Raises ConfigError, which names the holder.
    """
    where, deadline = _made(folder), time.monotonic() + patience_s
    while (fd := _locked(where / cards[0], fcntl.LOCK_SH)) is None:
        if time.monotonic() >= deadline:
            text = f"device cuda: card 0 is one of another worker's ranks ({_holder(where / cards[0])})"
            raise ConfigError(f"{text}; name another by CUDA_VISIBLE_DEVICES, or use device cpu", "device")
        time.sleep(AGAIN_S)
    return TakenCard(0, fd)


def _free(folder: Path, cards: Sequence[str], count: int) -> list[TakenCard]:
    """Takes up to ``count`` free cards. One process looks at a time, so that two don't hold a half each."""
    found: list[TakenCard] = []
    looking = _open(folder / "looking")
    try:
        fcntl.flock(looking, fcntl.LOCK_EX)
        for index, card in enumerate(cards):
            if len(found) < count and (fd := _locked(folder / card, fcntl.LOCK_EX)) is not None:
                found.append(TakenCard(index, fd))
    finally:
        os.close(looking)
    return found


def _locked(path: Path, how: int) -> int | None:
    """Returns the descriptor of a card's file, locked and with this process's id; None if others hold it."""
    fd = _open(path)
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    os.pwrite(fd, f"{os.getpid():<{PID_BYTES}}".encode(), 0)
    return fd


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def _made(folder: Path | None) -> Path:
    """Returns the folder of locks, this user's on this machine, which is made if it is missing. Raises ConfigError
    if it can't be, or if others may write to it.
    """
    try:
        where = folder or Path(tempfile.gettempdir(), f"baton-cards-{os.getuid()}")
        where.mkdir(mode=0o700, exist_ok=True)
        found = where.lstat()
    except OSError as error:
        text = f"the folder where cards are taken can't be made: {error}; name another temporary folder by TMPDIR"
        raise ConfigError(text, "device") from error
    if where.is_symlink() or found.st_uid != os.getuid() or found.st_mode & 0o022:
        text = f"{where}, where cards are taken, isn't this user's alone; remove it, or name another by TMPDIR"
        raise ConfigError(text, "device")
    return where


def _holders(folder: Path, cards: Sequence[str], taken: Sequence[TakenCard]) -> str:
    free = {card.index for card in taken}
    held = (index for index in range(len(cards)) if index not in free)
    return ", ".join(f"card {index}: {_holder(folder / cards[index])}" for index in held)


def _holder(path: Path) -> str:
    return f"process {path.read_bytes()[:PID_BYTES].decode(errors='replace').strip()}"
