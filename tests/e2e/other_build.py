"""A process of another build: ``python -m tests.e2e.other_build PROTOCOL BUILD MODULE …`` runs MODULE's ``main``.

It says that it is BUILD and speaks PROTOCOL, and doesn't have the fields that came after it: its WorkerInfo lacks
them, so that neither gRPC nor Redis ever carries them, and what others send of them is unknown to it.
"""

from __future__ import annotations

import importlib
import sys

import msgspec

from baton.protos import version

NEW_IN = {"1.1": ("version",)}  # protocol -> what WorkerInfo gained


def without(noun: type[msgspec.Struct], names: tuple[str, ...]) -> type[msgspec.Struct]:
    """The noun as a build knew it that had no ``names`` yet."""
    kept = []
    for field in msgspec.structs.fields(noun):
        default = msgspec.field(default=field.default, default_factory=field.default_factory)
        if field.name not in names:
            kept.append((field.name, field.type) if field.required else (field.name, field.type, default))
    return msgspec.defstruct(noun.__name__, kept, frozen=True)


def become(protocol: str, build: str) -> None:
    """Before anything else of ours is imported."""
    version.PROTOCOL = protocol
    version.product_version = lambda: build
    from baton.kv.wire import frames
    from baton.protos import nouns

    frames.NEWEST = 1 if _minor(protocol) < 1 else frames.NEWEST

    later = [names for since, names in NEW_IN.items() if _minor(since) > _minor(protocol)]
    if later:
        nouns.of_this_build = lambda info: info
    nouns.WorkerInfo = without(nouns.WorkerInfo, tuple(name for names in later for name in names))  # type: ignore[misc]


def command(protocol: str, build: str, module: str) -> tuple[str, ...]:
    """Returns the command that starts ``module`` of another build."""
    return (sys.executable, "-m", "tests.e2e.other_build", protocol, build, module)


def _minor(protocol: str) -> int:
    return int(protocol.partition(".")[2])


if __name__ == "__main__":
    said, called, module = sys.argv[1:4]
    sys.argv = [module, *sys.argv[4:]]
    become(said, called)
    sys.exit(importlib.import_module(module).main())
