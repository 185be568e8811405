"""The time and memory costs of a kind of worker: the simulator's only model of hardware.

Knows nothing of traces or schedulers. Three sources give one form: an analytic roofline, a paced profile, operator
timings. The roofline's shares of the data sheet's peaks are usual ones of tuned engines, the same everywhere.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np

from baton.cluster.config import ACCELERATORS_PER_ENGINE
from baton.cost.profiles import Overhead, RankCosts, load_profile
from baton.planner.costs.adapter_mix import AdapterMix
from baton.planner.costs.data_sheets import Accelerator, accelerators
from baton.planner.costs.model_shape import ModelShape, model_shape
from baton.planner.costs.operators import OperatorProfile, PrefillChunk, RankLink, load_operators
from baton.planner.costs.precision import as_set
from baton.planner.costs.roofline_name import is_roofline, parse
from baton.protos.errors import ConfigError
from baton.protos.measurements import AdapterCurve, StepCurve, TransferCurve
from baton.protos.nouns import BLOCK_TOKENS

# Shares of a data sheet's figures that kernels and links reach.
MATRIX_SHARE, ATTENTION_SHARE, MEMORY_SHARE, LINK_SHARE, NETWORK_SHARE = 0.55, 0.40, 0.70, 0.80, 0.80
STEP_S = 1.5e-3  # scheduling, sampling and bookkeeping of a step that no kernel hides
LAYER_S = 5e-5  # kernels of a layer start one after the other
REDUCE_S = 5e-6  # of a small all-reduce, per rank of the node that takes part
SEQUENCE_S = 1e-5  # seconds of a step per sequence, beside what the roofline counts
TRANSFER_S = 2e-3  # seconds that a transfer takes before its first byte
USABLE_MEMORY = 0.90  # share of an accelerator's memory that weights, activations and KV may have
LIVE_ACTIVATIONS = 12  # values per token and unit of hidden size that live at once in a step


class WorkerCosts(msgspec.Struct, frozen=True):
    """Holds the costs of one worker.

    A step takes body + pair x attention pairs + context x tokens of KV read + sequence x sequences, in seconds.
    ``body`` is max(weights, token x tokens) + fixed; a decoding sequence counts as ``written`` tokens there (1, or
    0 where ``sequence`` was measured with all that it costs). ``kv_tokens`` is how many tokens of KV it holds;
    ``transfer`` is over bytes of ``kv_bytes_per_token``. ``accelerators`` and ``watts`` are the whole worker's.
    ``acceptance`` are probabilities that drafts are accepted, by position; empty without speculation. ``overhead``
    of its processes is zero where it wasn't measured. ``unsupported`` says why Baton's engine can't run such
    workers, "" if it can. ``settings`` are the [worker] settings that it needs, ``device`` is where it computes, ""
    where the profile doesn't say. ``chunk`` is the prompt tokens of a step that it was measured with, 0 where any
    may be set. ``ranks`` says what other numbers of ranks cost, None if not measured. ``adapters`` is the measured
    cost of LoRA adapters, None if unknown;
    ``mix`` is what the simulated traffic's adapters add to steps.
    """

    about: str
    fixed: float
    weights: float
    token: float
    pair: float
    sequence: float
    context: float
    kv_tokens: int
    kv_bytes_per_token: int
    transfer: TransferCurve
    accelerators: int = 1
    watts: float = 0.0
    written: float = 1.0
    overhead: Overhead = Overhead()
    unsupported: str = ""
    settings: tuple[tuple[str, str | int], ...] = ()
    device: str = ""
    chunk: int = 0
    acceptance: tuple[float, ...] = ()
    ranks: RankCosts | None = None
    adapters: AdapterCurve | None = None
    mix: AdapterMix | None = None

    def step_seconds(self, prefill_tokens: int, pairs: float, sequences: int, context: float) -> float:
        """Returns the seconds of one step; ``pairs`` and ``context`` as in StepSample.

        With speculation, per token of each sequence.
        """
        if self.acceptance and sequences and not prefill_tokens:
            body, tokens = self._drafted(sequences)
            return (body + self.sequence * sequences + self.context * context) / tokens
        body = self._body(prefill_tokens + self.written * sequences)
        body += self._adapted(prefill_tokens + sequences, sequences + (prefill_tokens > 0))
        return body + self.pair * pairs + self.sequence * sequences + self.context * context

    def context_seconds(self, sequences: int) -> float:
        """Returns the seconds that one more token of KV adds to a decode step of ``sequences``."""
        return self.context / self._drafted(sequences)[1] if self.acceptance and sequences else self.context

    def _body(self, rows: float) -> float:
        return max(self.weights, self.token * rows) + self.fixed

    def _adapted(self, rows: float, sequences: int) -> float:
        """The seconds that adapters add to a step; the prompts of a chunk count as one sequence."""
        return 0.0 if self.mix is None else self.mix.seconds(rows, sequences)

    def _drafted(self, sequences: int) -> tuple[float, float]:
        """The body of the step of so many drafts as pay, and the tokens of a sequence that are expected of it.

        The number of drafts is chosen without the context's cost, so that a run of steps has one number.
        """
        alone = self._body(self.written * sequences) + self._adapted(sequences, sequences)
        tokens, stands, best = 1.0, 1.0, (alone, 1.0)
        rows = self.sequence * sequences
        for drafts, chance in enumerate(self.acceptance, 1):
            stands *= chance
            tokens += stands
            body = self._body((self.written + drafts) * sequences)
            body += self._adapted((1 + drafts) * sequences, sequences)
            if tokens / (body + rows) > best[1] / (best[0] + rows):
                best = body, tokens
        return best

    @property
    def curve(self) -> StepCurve:
        """Returns the step curve that such a worker would report to the router."""
        row = 0.0 if self.mix is None else self.mix.row
        fixed = self.fixed + self.weights
        return StepCurve(fixed, self.token + row, self.pair, self.sequence + row, self.context)


def worker_costs(name: str, max_chunk: int = 2048) -> WorkerCosts:
    """Returns the costs of profile ``name``: ``roofline:MODEL@GPUxN``, a folder of operator timings, or a paced
    profile.

    ``max_chunk`` tokens of prefill per step bound the roofline's activation memory. Raises ConfigError.
    """
    if is_roofline(name):
        asked = parse(name)
        shape = at_precision(model_shape(asked.model), asked.quantization, asked.kv_cache_dtype)
        return roofline(shape, asked.gpu, accelerators()[asked.gpu], asked.count, max_chunk)
    if Path(name).is_dir():
        return from_operators(load_operators(name))
    return from_paced(name)


def at_precision(shape: ModelShape, quantization: str, kv_cache_dtype: str) -> ModelShape:
    """Returns ``shape`` with the precision that [worker]'s quantization and kv_cache_dtype give.

    Raises ConfigError.
    """
    return msgspec.structs.replace(shape, precision=as_set(shape.precision, quantization, kv_cache_dtype))


def roofline(shape: ModelShape, name: str, sheet: Accelerator, tp: int, max_chunk: int = 2048) -> WorkerCosts:
    """Returns the costs of ``tp`` accelerators ``sheet`` by the roofline model: times from FLOPs and bytes, KV
    memory from what weights and activations leave.

    Raises ConfigError if the model doesn't fit.
    """
    flops, bandwidth = tp * sheet.flops, tp * sheet.memory_bytes_per_s * MEMORY_SHARE
    matrices = shape.num_hidden_layers * shape.layer_weights
    reduced = 2 * (tp - 1) / tp * shape.hidden_size * shape.bytes_per_value / (sheet.link_bytes_per_s * LINK_SHARE)
    reduces = 2 * shape.num_hidden_layers if tp > 1 else 0
    activations = activation_bytes(shape, max_chunk)
    room = tp * sheet.memory * USABLE_MEMORY - shape.weight_bytes - activations
    if room < shape.kv_bytes_per_token:
        need = (shape.weight_bytes + activations) / (sheet.memory * USABLE_MEMORY)
        raise ConfigError(
            f"{_as_it_comes(shape)} doesn't fit {tp} x {name}: it needs at least {int(need) + 1}", "profile"
        )
    kv_tokens = int(room / shape.kv_bytes_per_token)
    share_of_heads = shape.num_attention_heads * shape.head_dim * shape.num_hidden_layers
    return WorkerCosts(
        about=f"{_as_it_comes(shape)} on {tp} x {name}, roofline",
        fixed=STEP_S + shape.num_hidden_layers * LAYER_S + reduces * tp * REDUCE_S,
        weights=shape.weight_bytes / bandwidth,
        token=2 * matrices / (flops * MATRIX_SHARE) + reduces * reduced,
        pair=4 * share_of_heads / (flops * ATTENTION_SHARE),
        sequence=SEQUENCE_S,
        context=shape.kv_bytes_per_token / bandwidth,
        kv_tokens=kv_tokens,
        kv_bytes_per_token=shape.kv_bytes_per_token,
        transfer=TransferCurve(TRANSFER_S, 1 / (tp * sheet.network_bytes_per_s * NETWORK_SHARE)),
        accelerators=tp,
        watts=tp * sheet.power,
        unsupported=unsupported(shape, name, sheet, tp),
        settings=(("dtype", "bfloat16"), ("kv_memory_bytes", kv_tokens * shape.kv_bytes_per_token),
                  *shape.precision.settings),
        device="cuda" if sheet.cuda else "",
    )  # fmt: skip


def unsupported(shape: ModelShape, name: str, sheet: Accelerator, count: int) -> str:
    """Returns why Baton's engine can't run this model on ``count`` such accelerators; "" if it can."""
    if not sheet.cuda:
        return f"the engine runs on CUDA, and {name} has none"
    if not sheet.own_kernels and not shape.precision.plain:
        return f"rounded weights and KV need the engine's own kernels, and those are not for {name}"
    return too_wide(count)


def too_wide(count: int) -> str:
    """Returns why Baton's engine can't compute on ``count`` accelerators; "" if it can."""
    if count <= ACCELERATORS_PER_ENGINE:
        return ""
    return f"a worker of {count} accelerators can't run: the engine computes on {ACCELERATORS_PER_ENGINE}"


def _as_it_comes(shape: ModelShape) -> str:
    return shape.name if shape.precision.plain else f"{shape.name} ({shape.precision.name})"


def activation_bytes(shape: ModelShape, max_chunk: int) -> float:
    """Returns the bytes of activations in a step of ``max_chunk`` tokens, over all ranks."""
    return float(max_chunk * shape.hidden_size * LIVE_ACTIVATIONS * shape.bytes_per_value)


def from_curve(
    about: str,
    curve: StepCurve,
    kv_tokens: int,
    kv_bytes_per_token: int,
    transfer: TransferCurve,
    overhead: Overhead = Overhead(),
    adapters: AdapterCurve | None = None,
) -> WorkerCosts:
    """Returns the costs given by a measured step curve, whose terms include everything that a sequence costs;
    ``adapters`` is what LoRA adapters add.
    """
    return WorkerCosts(
        about, curve.fixed, 0.0, curve.prefill_token, curve.prefill_pair, curve.decode_sequence,
        curve.decode_context_token, kv_tokens, kv_bytes_per_token, transfer, written=0.0, overhead=overhead,
        adapters=adapters,
    )  # fmt: skip


def from_paced(name: str) -> WorkerCosts:
    """Returns the costs of a paced profile, built-in or a file: the numbers by which the paced engine sleeps."""
    profile = load_profile(name, ", a folder of operator timings, or roofline:MODEL@GPUxN")
    scale = profile.kv_bytes_per_token / profile.model_kv_bytes_per_token
    transfer = TransferCurve(profile.transfer.fixed, profile.transfer.per_byte * scale)
    costs = from_curve(
        profile.about, profile.step, profile.pages * BLOCK_TOKENS, profile.model_kv_bytes_per_token, transfer,
        profile.overhead, profile.adapters,
    )  # fmt: skip
    costs = msgspec.structs.replace(costs, chunk=profile.prefill_chunk)
    ranks = profile.ranks
    if ranks is None:
        return costs
    set_by = ((ranks.shared, ranks.count),)
    return msgspec.structs.replace(costs, accelerators=ranks.count, settings=set_by, ranks=ranks)


def from_operators(profile: OperatorProfile, memory_tokens: int = 65536) -> WorkerCosts:
    """Returns the costs fitted to operator timings, by relative least squares over steps in the measured range.

    ``memory_tokens`` is taken as the KV capacity.
    """
    rows, seconds = _samples(profile)
    target = np.asarray(seconds)
    features = np.asarray(rows) / target[:, None]
    found = np.clip(np.linalg.lstsq(features, np.ones(len(rows)), rcond=None)[0], 0.0, None)
    fixed, token, pair, sequence, context = (float(x) for x in found)
    return WorkerCosts(
        f"{profile.shape.name}, operator timings", fixed, 0.0, token, pair, sequence, context,
        memory_tokens, profile.shape.kv_bytes_per_token, TransferCurve(TRANSFER_S, 1 / 50e9), profile.tp,
        written=0.0, unsupported=too_wide(profile.tp),
    )  # fmt: skip


def _samples(profile: OperatorProfile) -> tuple[list[list[float]], list[float]]:
    rows, seconds = [], []
    for new in (0, 256, 1024, 2048):
        for n in (0, 8, 32, 64):
            for context in (512, 2048):
                chunks = [PrefillChunk(new, 0)] if new else []
                if new or n:
                    rows.append([1.0, new, new * new / 2, n, n * context])
                    seconds.append(profile.step_seconds(chunks, [context] * n))
    return rows, seconds


def link_of(accelerator: Accelerator) -> RankLink:
    """Returns the link between tensor-parallel ranks on a node of such accelerators."""
    return RankLink(accelerator.link_bytes_per_s * LINK_SHARE, REDUCE_S)
