"""Matches an adapter's tensors with the layers of a model, by names and shapes alone, without reading them.

Knows nothing of files' bytes. Names are PEFT's: ``base_model.model.<module>.lora_A.weight`` and ``lora_B``; of
an embedding ``lora_embedding_A`` and ``lora_embedding_B``. One pair may hold the matrices of all experts
(``stacks.py``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from baton.engine.adapters.base import AdapterBase
from baton.engine.adapters.pace import Pacing, no_pace
from baton.engine.adapters.peft_config import LoraSettings
from baton.engine.adapters.stacks import Stack, TensorPair, parameters, resolved
from baton.engine.adapters.tensors import TensorEntry, TensorFile
from baton.engine.program.sites import HEAD_MODULE, Site
from baton.engine.program.spellings import causal_names
from baton.kernels.lora.structs import panelled
from baton.protos.errors import AdapterRefused

_NAME = re.compile(r"^(?:base_model\.model\.)?(.+)\.(?:lora_([AB])\.weight|lora_embedding_([AB]))")
_COPY = re.compile(r"^(?:base_model\.model\.)?(.+?)(?:\.base_layer)?\.weight")


class MatrixPair(msgspec.Struct, frozen=True):
    """The two LoRA matrices of one module: ``b`` times ``a``, scaled, is added to its weight.

    Of a parameter of all experts they are those of every expert, and ``site`` is the first expert's.
    """

    module: str
    site: Site
    a: TensorEntry
    b: TensorEntry
    rank: int
    scale: float  # factor of b times a
    narrow: bool  # stored as bf16, else as float32
    stack: Stack | None = None

    @property
    def sites(self) -> tuple[Site, ...]:
        """Returns the sites of the pair's matrices: one, or that of each expert."""
        if self.stack is None:
            return (self.site,)
        return tuple(self.stack.site.site_of(expert) for expert in range(self.stack.site.experts))

    @property
    def bytes(self) -> int:
        """Returns the bytes of the packed matrices, each rounded up to a multiple of 64."""
        each, count = 2 if self.narrow else 4, 1 if self.stack is None else self.stack.site.experts
        return count * sum(-(-elements * each // 64) * 64 for elements in self.elements)

    @property
    def elements(self) -> tuple[int, int]:
        """Returns the numbers of elements of the packed ``a`` and ``b`` at one site."""
        return self.rank * self.site.inputs, self.rank * panelled(self.site.outputs)


def matched(
    file: TensorFile, settings: LoraSettings, base: AdapterBase, max_rank: int, pace: Pacing = no_pace
) -> tuple[MatrixPair, ...]:
    """Returns the adapter's matrix pairs, sorted by module. Raises AdapterRefused naming the tensor.

    Refused are tensors of a module that ``base`` lacks, of a wrong shape or rank, or without their partner. If the
    base is narrow all pairs become bf16, else those that are bf16 in the file. ``pace`` is called between short
    parts of the work.
    """
    halves: dict[str, dict[str, TensorEntry]] = {}
    copies = copied(file, base.sites)
    for entry in file.entries.values():
        pace()
        if entry.name in copies:
            continue
        module, half = _half(file, entry, base)
        if module in base.idle:
            continue
        if (other := halves.setdefault(module, {}).setdefault(half, entry)) is not entry:
            raise file.error(entry.name, f"is {module}'s lora_{half}, as {other.name} is; one of them is meant")
    if not halves:
        text = "holds copies of the base's tables alone, and no adapter"
        if len(copies) < len(file.entries):
            text = "holds matrices beside layers alone that have no effect in this model; target others"
        raise AdapterRefused(f"{file.where}: {text}", "lora_path")
    pairs = {module: _whole(file, found) for module, found in sorted(halves.items())}
    stacks = resolved(file, settings, {name: pair for name, pair in pairs.items() if parameters(name, base)}, base)
    bound = msgspec.structs.replace(base, max_rank=max_rank)
    found = []
    for module, pair in pairs.items():
        found.append(_pair(file, settings, module, pair, stacks.get(module), bound))
        pace()
    return tuple(found)


def copied(file: TensorFile, sites: Mapping[str, Site]) -> dict[str, str]:
    """Returns the names of tensors that PEFT saves as copies of the base's embedding or head, each with its
    module.
    """
    found = ((name, _COPY.fullmatch(name)) for name in file.entries if ".lora_" not in name)
    tables = {HEAD_MODULE, *(module for module, site in sites.items() if site.looked_up)}
    names = {name: (match[1], causal_names(match[1])) for name, match in found if match is not None}
    modules = {name: next((one for one in every if one in tables), own) for name, (own, every) in names.items()}
    return {name: module for name, module in modules.items() if not sites or module in tables}


def _half(file: TensorFile, entry: TensorEntry, base: AdapterBase) -> tuple[str, str]:
    found = _NAME.fullmatch(entry.name)
    if found is None:
        raise file.error(entry.name, "is none of LoRA's; lora_A, lora_B and lora_embedding_A, _B are served")
    module, looked_up = found[1], found[3] is not None
    sites = base.sites
    if not sites:
        return module, found[2] or found[3]
    module = _known(module, base)
    if module in base.idle or (parameters(module, base) and not looked_up):
        return module, found[2] or found[3]
    if module not in sites:
        raise file.error(entry.name, _absent(module, base))
    if looked_up is not sites[module].looked_up:
        raise file.error(entry.name, f"is {'' if looked_up else 'not '}an embedding's, unlike the model's {module}")
    return module, found[2] or found[3]


def _known(module: str, base: AdapterBase) -> str:
    """Returns the base's name of a module of an adapter; ``module`` itself if the base has none."""
    if module in base.sites:
        return module
    known = base.sites, base.idle, base.others
    names = causal_names(module)
    return next((name for name in names if any(name in each for each in known) or parameters(name, base)), module)


def _absent(module: str, base: AdapterBase) -> str:
    if module == HEAD_MODULE:
        return "stands beside the head, where adapters aren't applied in this model; target other layers"
    if module in base.others:
        return f"stands beside {module}, where adapters aren't applied; leave it out of target_modules"
    if module.removesuffix(".base_layer").endswith(".experts"):
        return f"stands beside parameters of {module}, where adapters aren't applied; leave out target_parameters"
    return f"stands beside {module}, which isn't a layer of this model that adapters go to: another base?"


def _whole(file: TensorFile, halves: dict[str, TensorEntry]) -> TensorPair:
    if len(halves) < 2:
        (half, entry), other = next(iter(halves.items())), "B" if "A" in halves else "A"
        raise file.error(entry.name, f"is lora_{half} without a lora_{other} beside it")
    return TensorPair(halves["A"], halves["B"])


def _pair(
    file: TensorFile, settings: LoraSettings, module: str, pair: TensorPair, stack: Stack | None, base: AdapterBase
) -> MatrixPair:
    (a, b), name = pair, module if stack is None else stack.parameter
    rank, scale = settings.rank_of(name), settings.scale_of(name)
    if rank > base.max_rank:
        text = f"{name} has rank {rank}; {base.max_rank} at most (adapters.max_rank)"
        raise AdapterRefused(f"{settings.file}: {text}", "r")
    bf16 = base.narrow or (a.dtype == b.dtype == "BF16")
    if stack is not None:
        return MatrixPair(name, stack.site.site_of(0), a, b, rank, scale, bf16, stack)
    site = base.sites.get(module) or Site(0, 0, b.shape[0], a.shape[1])
    if not base.sites and settings.stacked and a.shape[0] % rank == 0:
        rank = a.shape[0]  # perhaps of all experts: nothing is known of the model
    _require_shape(file, a, (rank, site.inputs), site)
    _require_shape(file, b, (site.outputs, rank), site)
    return MatrixPair(name, site, a, b, rank, scale, bf16)


def _require_shape(file: TensorFile, entry: TensorEntry, wanted: tuple[int, int], site: Site) -> None:
    if entry.shape == wanted:
        return
    if site.looked_up and entry.shape[0] == wanted[0]:
        text = f"has {entry.shape[1]} tokens; the model's vocabulary has {site.inputs}"
        raise file.error(entry.name, text)
    raise file.error(entry.name, f"has shape {entry.shape}; this model and its rank ask for {wanted}")
