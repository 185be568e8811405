"""Tries this machine's card for ``baton doctor --gpu``: the kernels' results and times, op by op, beside torch's.

Knows nothing of the configuration. What was measured is kept for the card, the driver and the kernels at hand, and
``baton doctor`` says so afterwards.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from baton.console.setup.findings import Finding, State
from baton.engine.backends.cuda.gpu import Gpu, Probe, probe, require, without_kernels
from baton.kernels.abi.build import CACHE_ENV, BuildError
from baton.kernels.cuda.library import DeviceError, device, on_shim
from baton.protos.errors import ConfigError

if TYPE_CHECKING:
    from baton.engine.backends.cuda.card_trials import CardTrials, Tell
    from baton.engine.backends.cuda.op_trials import OpTrial

SHIM = Gpu("the SIMT shim", (9, 0), (13, 0), 0)
INSTALL = "install the extra [gpu] and what it compiles with (nvcc); until then torch computes it"
FREE = "try again while nothing else is on the card; a worker's start tries it, too"
NO_LIBRARY = "torch's CUDA wheels bring it; BATON_CUBLASLT names another one"
LAUNCHED = "decodes are launched op by op where a worker's start finds the same"
PLAIN_OPS = "norms, products of bf16 weights, attention of prompts, everything not named here: torch"
WIDE = "a worker dequantizes such weights on this card: they take 2 bytes a number"
SLOWER = "slower than torch's: the step uses ours all the same"


def try_card(ask: Probe = probe, tell: Tell = lambda _: None) -> list[Finding]:
    """Returns a finding of the card, of each kind of step and of each op, and keeps the figures. ``tell`` is called
    with what runs next.
    """
    try:
        gpu = SHIM if on_shim() else require(ask=ask)
    except ConfigError as error:
        return [_refused(error)]
    if said := without_kernels(gpu):
        return [Finding("card", "warn", f"{gpu.name}: torch's ops serve", said), *_choices(gpu, tell)]
    try:
        return _trial(gpu, tell)
    except (BuildError, DeviceError) as error:
        remedy = "torch's ops serve instead; `python -m baton.kernels.cuda.build` says more"
        failed = Finding("card", "fail", f"{gpu.name}: {str(error).splitlines()[0]}", remedy)
        return [failed, *(_choices(gpu, tell) if isinstance(error, BuildError) and not on_shim() else ())]


def findings_of(found: CardTrials) -> list[Finding]:
    """Returns the findings of a record."""
    steps = [
        Finding("gpu step", "fail" if said else "ok", f"{kind} weights: {said or 'the answers of the CPU'}",
                "the start's trial refuses it likewise, and torch's ops serve" if said else "")
        for kind, said in found.steps.items()
    ]  # fmt: skip
    at_once = [
        Finding("gpu step", "warn" if said else "ok", f"{kind} weights, megakernel: {said or 'the same'}",
                "workers take the graph; don't set worker.cuda_step to mega" if said else "")
        for kind, said in found.at_once.items()
    ]  # fmt: skip
    ahead = [
        Finding("gpu step", "warn" if said else "ok", f"{kind} weights, planned ahead: {said or 'the same'}",
                "the start's trial says so, too, and steps are planned one after another" if said else "")
        for kind, said in found.ahead.items()
    ]  # fmt: skip
    return [*steps, *ahead, *at_once, *map(_of_op, found.ops)]


def earlier_trial(gpu: Gpu) -> str:
    """Returns what an earlier trial of ``gpu`` found, in words; empty if there was none."""
    from baton.engine.backends.cuda.card_trials import load_record

    if (found := load_record(gpu)) is None:
        return ""
    wrong = [op.op for op in found.ops if not op.right] + [kind for kind, said in found.steps.items() if said]
    when = datetime.fromtimestamp(found.at, UTC).strftime("%Y-%m-%d %H:%M UTC")
    faster = sum(op.own_us <= op.torch_us for op in found.ops)
    said = f"wrong: {', '.join(wrong)}" if wrong else "all right"
    return f"tried on {when}: {said}, {faster} of {len(found.ops)} ops as fast as torch's or faster"


def told_products(gpu: Gpu) -> str:
    """Returns what multiplies which bf16 matrix on ``gpu``, in words; empty if none was tried."""
    from baton.engine.backends.cuda.products import load_choices

    return "; ".join(choice.told for choice in load_choices(gpu))


def told_choices(gpu: Gpu) -> str:
    """Returns what computes which op where torch's ops serve ``gpu``, in words; empty if it was never tried."""
    from baton.engine.backends.torch.card_ops import earlier_choices
    from baton.engine.backends.torch.decode_graphs import KIND
    from baton.engine.backends.torch.kept_choices import newest
    from baton.engine.backends.torch.product_trials import KIND as PRODUCTS

    found = earlier_choices(gpu)
    told = [choice.told for choice in found.choices] if found is not None else []
    return "; ".join([*told, *(way.told for kind in (KIND, PRODUCTS) for way in newest(gpu, kind))])


def _choices(gpu: Gpu, tell: Tell) -> list[Finding]:
    """Tries what computes which op where torch's ops serve, for an 8B; nothing if torch can't use the card. Workers
    try their own models' again at their next start.
    """
    import torch

    if not torch.cuda.is_available():
        return []
    found: list[Finding] = []
    try:
        for tried in (_libraries, _quantized, _graphs):
            found += tried(gpu, tell)
    except ConfigError as error:
        return [*found, _refused(error)]
    except OSError as error:
        return [
            *found,
            Finding("gpu op", "warn", f"not tried: {error}", f"set {CACHE_ENV} to a directory of yours"),
        ]
    return [*found, Finding("gpu op", "ok", PLAIN_OPS)]


def _libraries(gpu: Gpu, tell: Tell) -> list[Finding]:
    """Returns whether FlashInfer or torch computes what both can. Raises ConfigError."""
    from baton.engine.backends.torch.card_ops import FASTER, USUAL, choices_on, forget_choices

    tell("FlashInfer beside torch")
    forget_choices(gpu)
    return [
        Finding("gpu op", "warn", choice.told, INSTALL if choice.lasts else FREE)
        if choice.why not in ("", FASTER)
        else Finding("gpu op", "ok", choice.told)
        for choice in choices_on(gpu, USUAL, "cuda").choices
    ]


def _quantized(gpu: Gpu, tell: Tell) -> list[Finding]:
    """Returns what multiplies by an 8B's quantized matrices: torch's own products or dequantized ones. Raises
    ConfigError.
    """
    from baton.engine.backends.torch.product_trials import FASTER
    from baton.engine.backends.torch.usual_products import try_usual

    try:
        ways = try_usual(gpu, "cuda", tell)
    except RuntimeError as error:
        text = f"torch's own products left the card unusable for this process: {error}; start again"
        raise ConfigError(f"device cuda: {text}, a worker then dequantizes", "device") from error
    return [
        Finding("gpu op", "ok", way.told) if way.why in ("", FASTER) else Finding("gpu op", "warn", way.told, WIDE)
        for way in ways
    ]


def _graphs(gpu: Gpu, tell: Tell) -> list[Finding]:
    """Returns whether decodes run by captured graphs where torch's ops serve, which is kept. Raises ConfigError."""
    from baton.engine.backends.torch.capture import CudaCapture
    from baton.engine.backends.torch.decode_graphs import KIND
    from baton.engine.backends.torch.graph_trial import try_graphs
    from baton.engine.backends.torch.kept_choices import keep

    tell("decodes by graph")
    try:
        found = try_graphs("cuda", CudaCapture())
        keep(gpu, KIND, found.op, [found])
    except ConfigError:
        raise
    except Exception as error:  # whatever torch says on a card that we don't know
        return [Finding("gpu op", "warn", f"decodes by graph: not tried: {error}", LAUNCHED)]
    state: State = "ok" if found.way == found.tried else "warn"
    return [Finding("gpu op", state, found.told, "" if state == "ok" else LAUNCHED)]


def _refused(error: ConfigError) -> Finding:
    what, _, remedy = error.message.removeprefix("device cuda: ").rpartition("; ")
    return Finding("card", "fail", what, remedy)


def _trial(gpu: Gpu, tell: Tell) -> list[Finding]:
    from baton.engine.backends.cuda import card_trials

    found = card_trials.run_trials(gpu, device(), on_shim(), tell)
    products = [] if on_shim() else _products(gpu, tell)
    if (kept := _record(found, gpu)).state == "ok":
        found = card_trials.with_megakernel(found, device(), on_shim(), tell)
        kept = _record(found, gpu)
    others = _choices(gpu, tell) if any(found.steps.values()) and not on_shim() else []
    return [kept, *findings_of(found), *products, *others]


def _products(gpu: Gpu, tell: Tell) -> list[Finding]:
    """Returns what multiplies each matrix of an 8B in bf16, beside cuBLASLt."""
    from baton.engine.backends.cuda.products import USUAL, choices_on, forget_choices, library_path

    tell("products of bf16 matrices beside cuBLASLt")
    forget_choices(gpu)
    found = choices_on(gpu, device(), USUAL)
    if not found:
        said = f"products of many rows: ours, as there is no cuBLASLt ({library_path() or 'turned off'})"
        return [Finding("gpu op", "warn", said, NO_LIBRARY)]
    return [Finding("gpu op", "ok", choice.told) for choice in found]


def _record(found: CardTrials, gpu: Gpu) -> Finding:
    from baton.engine.backends.cuda import card_trials

    try:
        return Finding("card", "ok", f"{gpu.name}: tried, figures kept in {card_trials.save_record(found, gpu)}")
    except OSError as error:
        remedy = f"set {CACHE_ENV} to a directory that can be written"
        return Finding("card", "warn", f"{gpu.name}: tried, figures not kept: {error}", remedy)


def _of_op(op: OpTrial) -> Finding:
    error = "not finite" if op.error is None else f"{op.error:.1e} off float32"
    said = f"{op.op}: ours {op.own_us:.1f} us, torch {op.torch_us:.1f} us, {error}"
    if not op.right:
        return Finding("gpu op", "fail", said, "its result is wrong on this card: use --device cpu, and report it")
    faster = op.own_us <= op.torch_us
    return Finding("gpu op", "ok" if faster else "warn", said, "" if faster else SLOWER)
