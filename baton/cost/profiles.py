"""Profiles of the paced engine: how fast a model is on a machine, as TOML files in profiles/.

Knows nothing of the engine. A profile is one file; ``--device paced:NAME`` names it, or the path of another file.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Literal

import msgspec

from baton.protos.errors import ConfigError
from baton.protos.json import Json
from baton.protos.measurements import AdapterCurve, EngineWork, StepCurve, TransferCurve

FOLDER = Path(__file__).parent / "profiles"
ROW_BYTES_MULTIPLE = 16  # a paced profile's bytes of KV per token are a multiple of this
PROMPTS, ANSWERS = ("prefill_token", "prefill_pair"), ("decode_sequence", "decode_context_token")
# Terms of a step that ranks divide. By rows each reads all weights, by experts all others; by layers the parts of a
# prompt alone overlap.
SHARED = {
    "tp": ("fixed", *PROMPTS, *ANSWERS),
    "cp": (*PROMPTS, *ANSWERS),
    "pp": PROMPTS,
    "ep": (*PROMPTS, *ANSWERS),
}


class Overhead(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Holds the seconds that processes and messages add outside engine steps and transfers, without queueing."""

    request: float = 0.0  # from the client to the decode engine, and of the first token back
    handoff: float = 0.0  # from decode to prefill engine, and of the KV back
    step: float = 0.0  # between two steps of a decode engine


class RankCosts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Describes on how many ranks a profile was measured, and what other numbers of ranks cost."""

    shared: Literal["tp", "cp", "pp", "ep"] = "tp"  # the setting of [worker] that makes ranks
    count: int = 1  # ranks that were measured
    widths: tuple[int, ...] = (1,)  # numbers of ranks that the model runs on
    meetings: int = 0  # exchanges among ranks per step
    meeting_s: float = 0.0  # seconds of one exchange between two ranks

    def waits(self, count: int) -> float:
        """Returns the seconds per step that ``count`` ranks spend on exchanges, each with every other."""
        return self.meetings * self.meeting_s * (count - 1)


class PacedProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Describes one model on one machine, by which the paced engine and the simulator take their time.

    ``transfer`` is per byte that a paced worker really ships, scaled so that a token takes as long as the modelled
    one's.
    """

    about: str
    step: StepCurve
    transfer: TransferCurve
    kv_bytes_per_token: int  # that a paced worker keeps and ships
    model_kv_bytes_per_token: int  # of the modelled worker
    pages: int  # of the modelled worker's KV pool
    vocab_size: int
    max_model_len: int
    prefill_chunk: int = 512
    overhead: Overhead = Overhead()  # for the simulator; paced workers are processes with overhead of their own
    ranks: RankCosts | None = None
    adapters: AdapterCurve | None = None  # what LoRA adapters add to a step; None if it wasn't measured

    @property
    def work(self) -> EngineWork:
        """Returns the curve as engine work with peak rates of 1: terms per computed token are compute, the others
        memory.
        """
        s = self.step
        return EngineWork(
            s.prefill_token, s.decode_sequence, s.prefill_pair, s.fixed, s.decode_context_token, 1.0, 1.0
        )


def profile_names() -> list[str]:
    """Returns the sorted names of the built-in profiles."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def load_profile(name_or_path: str, others: str = "") -> PacedProfile:
    """Returns a built-in profile by name, or that of a .toml file; ``NAME@tp4`` is a worker of four tp ranks.
    ``others`` ends the error of an unknown one: what else the caller takes.

    Raises ConfigError that lists the choices or names the field.
    """
    base, _, asked = name_or_path.rpartition("@")
    if base and asked[:2] in SHARED and asked[2:].isdecimal():
        return on_ranks(load_profile(base, others), asked[:2], int(asked[2:]))
    own = name_or_path.endswith(".toml") or "/" in name_or_path
    path = Path(name_or_path) if own else FOLDER / f"{name_or_path}.toml"
    try:
        return _parse(path.read_text(encoding="utf-8"), name_or_path)
    except OSError as error:
        choices = ", ".join(profile_names())
        raise ConfigError(
            f"paced profile {name_or_path!r} is unknown; choose one of {choices}, or give a .toml file{others}",
            "device",
        ) from error


def on_ranks(profile: PacedProfile, shared: str, count: int) -> PacedProfile:
    """Returns the profile for a worker of ``count`` ranks, each with the cores and memory of a measured one.

    ``shared`` is tp, cp or pp; terms named in ``SHARED`` are divided among ranks. Raises ConfigError naming the
    widths that work.
    """
    ranks = profile.ranks
    if ranks is None:
        text = f"{profile.about}: it says nothing of ranks; measure it again with `baton profile measure`"
        raise ConfigError(text, "widths")
    if shared != ranks.shared or count not in ranks.widths:
        widths = ", ".join(map(str, ranks.widths))
        raise ConfigError(f"{profile.about}: {shared} can't be {count}; use {ranks.shared} {widths}", "widths")
    share = ranks.count / count
    step = msgspec.structs.asdict(profile.step)
    step["fixed"] = max(0.0, step["fixed"] - ranks.waits(ranks.count))
    step = {name: seconds * (share if name in SHARED[shared] else 1.0) for name, seconds in step.items()}
    step["fixed"] += ranks.waits(count)
    adapters = profile.adapters
    if adapters is not None:
        own = share if shared == "tp" else 1.0  # others read all of an adapter's matrices
        adapters = AdapterCurve(adapters.row * share, adapters.adapter * own, adapters.rank)
    return msgspec.structs.replace(
        profile,
        adapters=adapters,
        about=f"{profile.about}, {shared} {count}",
        step=StepCurve(**step),
        ranks=msgspec.structs.replace(ranks, count=count),
    )


def _parse(text: str, name: str) -> PacedProfile:
    try:
        fields: Json = tomllib.loads(text)
        fields["step"] = _in_order(fields.get("step"), StepCurve, "step")
        fields["transfer"] = _in_order(fields.get("transfer"), TransferCurve, "transfer")
        if "adapters" in fields:
            fields["adapters"] = _in_order(fields["adapters"], AdapterCurve, "adapters")
        profile = msgspec.convert(fields, PacedProfile)
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"paced profile {name!r}: {error}", "device") from error
    _require_sound(profile, name)
    return profile


def _in_order(table: object, curve: type[msgspec.Struct], name: str) -> list[object]:
    """The table's values as the curve's array form wants them."""
    wanted = curve.__struct_fields__
    if not isinstance(table, dict) or set(table) != set(wanted):
        raise msgspec.ValidationError(f"[{name}] needs exactly the fields {', '.join(wanted)}")
    return [table[field] for field in wanted]


def _require_sound(profile: PacedProfile, name: str) -> None:
    for curve in (profile.step, profile.transfer, profile.overhead):
        for field in curve.__struct_fields__:
            if not 0.0 <= getattr(curve, field) < float("inf"):
                raise ConfigError(f"paced profile {name!r}: {field} must be 0 or more seconds", "device")
    if profile.ranks is not None:
        _require_sound_ranks(profile.ranks, name)
    for field, value in msgspec.structs.asdict(profile.adapters).items() if profile.adapters else ():
        if not 0.0 <= value < float("inf"):
            raise ConfigError(f"paced profile {name!r}: adapters.{field} must be 0 or more", "device")
    for field in ("kv_bytes_per_token", "pages", "vocab_size", "max_model_len", "prefill_chunk"):
        if getattr(profile, field) < 1:
            raise ConfigError(f"paced profile {name!r}: {field} must be at least 1", "device")
    if profile.kv_bytes_per_token % ROW_BYTES_MULTIPLE:
        raise ConfigError(f"paced profile {name!r}: kv_bytes_per_token must be a multiple of 16", "device")


def _require_sound_ranks(ranks: RankCosts, name: str) -> None:
    if not 0.0 <= ranks.meeting_s < float("inf"):
        raise ConfigError(f"paced profile {name!r}: ranks.meeting_s must be 0 or more seconds", "device")
    if min(ranks.count, *ranks.widths, 1) < 1 or ranks.meetings < 0:
        text = "ranks.count and ranks.widths must be at least 1, ranks.meetings 0 or more"
        raise ConfigError(f"paced profile {name!r}: {text}", "device")
