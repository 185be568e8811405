"""A clock that a test sets, and room for which requests wait in the router's queue."""

from __future__ import annotations

import asyncio


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Room:
    """Slots that count themselves."""

    def __init__(self, free: int) -> None:
        self.free = free

    def attempt(self) -> Slot | None:
        if self.free <= 0:
            return None
        self.free -= 1
        return Slot(self)


class Slot:
    def __init__(self, room: Room) -> None:
        self.room = room

    def close(self) -> None:
        self.room.free += 1


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)
