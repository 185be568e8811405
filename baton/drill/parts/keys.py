"""The file of API keys of a simulated cluster: written before routers start, and again as operators revoke keys.

Knows nothing of who had to be let in.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from baton.drill.checks.keys import KeyWitness
from baton.drill.loop import seeded_loop
from baton.drill.parts.http import ADMIN, key_text
from baton.drill.scenario import ClientKey
from baton.router.access.keys import ApiKey, hash_of, revoke_key, write_keys

ELSEWHERE = "another-model"


class SimulatedKeys:
    """Keeps ``keys`` in a real file at ``path``, which is None where a scenario has none; ``per_min`` is the rate
    of each.
    """

    def __init__(
        self, keys: Sequence[ClientKey], per_min: int, witness: KeyWitness, tell: Callable[[str, str], None]
    ) -> None:
        self._keys, self._witness, self._tell = keys, witness, tell
        self._folder = Path(tempfile.mkdtemp(prefix="baton-drill-")) if keys else None
        self.path = None if self._folder is None else self._folder / "keys.json"
        if self.path is not None:
            admin = _entry(ADMIN, "operator", admin=True)
            bound = {True: (ELSEWHERE,), False: ()}
            write_keys(
                self.path,
                [admin]
                + [
                    _entry(
                        i,
                        key.tenant,
                        requests_per_min=per_min,
                        models=bound[key.bound_elsewhere],
                        weight=key.weight,
                    )
                    for i, key in enumerate(keys)
                ],
            )

    async def play(self, began: float) -> None:
        """Revokes the keys as their time comes, in seconds after ``began`` (loop time)."""
        revoked = [(key.revoked_at, index) for index, key in enumerate(self._keys) if key.revoked_at is not None]
        for at, index in sorted(revoked):
            await asyncio.sleep(max(0.0, began + at - seeded_loop().true_time()))
            assert self.path is not None
            revoke_key(self.path, _id(index))
            self._witness.revoked(index, seeded_loop().true_time())
            self._tell("operator", f"revokes key {index} of {self._keys[index].tenant}")

    def close(self) -> None:
        """Removes the file of keys and its folder."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def _entry(index: int, tenant: str, **fields: object) -> ApiKey:
    return ApiKey(_id(index), tenant, hash_of(key_text(index)), **fields)  # type: ignore[arg-type]


def _id(index: int) -> str:
    return key_text(index).split("-")[1]
