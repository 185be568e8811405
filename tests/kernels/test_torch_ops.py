"""Tests torch.ops.baton: torch's own checks of each op, native code beside the reference, and what is refused."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from baton.kernels.abi import native as abi
from baton.kernels.abi import torch_library
from baton.kernels.cascade_attention.native import groups_of
from baton.kernels.linear.integers import Integers, stack
from baton.kernels.linear.packed import PackedWeight, pack_bf16, quantize
from baton.kernels.linear.packed_floats import pack_f32
from baton.kernels.linear.torch_op import parts
from baton.kernels.paged_attention.native import page_bytes
from baton.kernels.paged_attention.stored import ELEMENTS
from baton.kernels.registry import ops, torch_ops
from tests.kernels.conftest import needs_native
from tests.thorough import first_now


def ordered(weight: Tensor, bits: int) -> PackedWeight:
    """Integers with minimums, whose inputs lie in an order of their own, as GPTQ's act-order leaves them."""
    n, k = weight.shape
    q, groups = torch.randint(-7, 8, (n, k), dtype=torch.int8), (n, -(-k // 32))
    scales, mins = torch.rand(groups) / 99, torch.rand(groups) / 9
    return stack([Integers(q, bits, 32, scales, mins, order=torch.randperm(k, dtype=torch.int32))])


FORMS: dict[str, Callable[[Tensor], Any]] = {
    "float32": pack_f32,
    "bf16": pack_bf16,
    "int8": lambda weight: quantize(weight, 8, 0),
    "int4": lambda weight: quantize(weight, 4, 32),
    "int8 ordered": lambda weight: ordered(weight, 8),
    "int4 ordered": lambda weight: ordered(weight, 4),
}
KV_HEADS, HEADS, DIM, LAYERS, LAYER = 2, 4, 16, 2, 1
TABLE = torch.tensor([3, 1, 4, 3, 1, 6], dtype=torch.int64)
ITEMS = torch.tensor([[0, 40, 1], [3, 36, 3]])  # two sequences that share their first 32 keys
# What torch checks in every suite: each op once; the other dtypes with ``make thorough``.
CASES = [
    "embedding",
    "rms_norm",
    "swiglu",
    "lora",
    "moe",
    "kv_pack",
    "kv_unpack",
    "accept",
    "reject",
    "linear int4",
]
CASES += ["lm_head int8", "append int8", "attention bfloat16", "cascade float32"]
Arguments = tuple[Any, ...]


@cache
def memory(dtype: str) -> Tensor:
    """Pages that hold plausible K and V."""
    torch.manual_seed(5)
    pages = torch.zeros(8, page_bytes(dtype, KV_HEADS, DIM, LAYERS), dtype=torch.uint8)
    rope_angles = torch.rand(64, DIM)
    for page in range(8):
        qkv = torch.randn(16, HEADS + 2 * KV_HEADS, DIM)
        for layer in range(LAYERS):
            torch_ops().rope_append(
                qkv, pages, torch.tensor([page]), torch.tensor([[0, 0, 16]]), rope_angles, None, None, 0.0,
                dtype, KV_HEADS, LAYERS, layer,
            )  # fmt: skip
    return pages


def paged(dtype: str) -> Arguments:
    return dtype, KV_HEADS, LAYERS, LAYER


def names() -> list[str]:
    """The names of ``cases``, which computes: nothing does while tests are collected."""
    plain = ["embedding", "rms_norm", "rms_norm bare", "swiglu", "lora", "moe", "kv_pack", "kv_unpack", "accept",
             "reject"]  # fmt: skip
    return [
        *plain,
        *(f"{op} {form}" for form in FORMS for op in ("linear", "lm_head")),
        *(f"{op} {dtype}" for dtype in ELEMENTS for op in ("append", "attention", "cascade")),
    ]


@cache
def cases() -> dict[str, tuple[str, Arguments]]:
    """Arguments of every op, by a name that begins with the op's; whoever calls an op with them copies them."""
    torch.manual_seed(0)
    x, draw = torch.randn(3, 40), torch.rand(3, dtype=torch.float64)
    found: dict[str, tuple[str, Arguments]] = {
        "embedding": ("embedding", (torch.tensor([4, 0, 4]), torch.randn(5, 24).bfloat16())),
        "rms_norm": ("rms_norm", (x.clone(), torch.randn(3, 40), torch.rand(40), 1e-5)),
        "rms_norm bare": ("rms_norm", (x.clone(), None, torch.rand(40), 1e-5)),
        "swiglu": ("swiglu", (torch.randn(3, 18),)),
        "lora": ("lora", (torch.randn(3, 90), x, torch.tensor([2, 0]), torch.randn(5, 40), torch.randn(70, 5), 1.5,
                          4)),
        "moe": ("moe", (x, torch.randn(3, 5), torch.randn(5, 48, 40).bfloat16(), torch.randn(5, 40, 24).bfloat16(),
                        2, True)),
        "kv_pack": ("kv_pack", (memory("int8"), torch.tensor([6, 1, 6]))),
        "kv_unpack": ("kv_unpack", (memory("int8"), torch.tensor([6, 1]), memory("int8")[2:4].clone())),
        "accept": ("speculative_accept", (torch.tensor([4, 7]), torch.tensor([4, 2, 9]), *(None,) * 4, 0.0)),
        "reject": ("speculative_accept", (torch.tensor([4, 7]), None, torch.randn(3, 11), None,
                                          draw[:2], draw, 0.7)),
    }  # fmt: skip
    for form, pack in FORMS.items():
        weight = parts(pack(torch.randn(70, 40)))
        found[f"linear {form}"] = "linear", (x, *weight, torch.randn(70))
        how = (torch.tensor([0.0, 1.0, 0.6]), torch.tensor([0, 9, 0]), torch.tensor([1.0, 1.0, 0.9]))
        found[f"lm_head {form}"] = "lm_head", (x, *weight, *how, torch.zeros(3), draw)
    q, norms = torch.randn(4, HEADS, DIM), (torch.rand(DIM), torch.rand(DIM))
    groups = torch.tensor(groups_of([([3, 1, 4], 40, 1), ([3, 1, 6], 36, 3)], 16))
    for dtype in ELEMENTS:
        qkv = torch.randn(4, HEADS + 2 * KV_HEADS, DIM)
        at = (memory(dtype), TABLE, ITEMS)
        found[f"append {dtype}"] = "rope_append", (qkv, *at, torch.rand(64, DIM), *norms, 1e-6, *paged(dtype))
        found[f"attention {dtype}"] = "paged_attention", (q, *at, *paged(dtype), 20, DIM**-0.5)
        found[f"cascade {dtype}"] = "cascade_attention", (q, *at, groups, *paged(dtype), DIM**-0.5)
    return found


def copied(arguments: Arguments) -> Arguments:
    return tuple(a.clone() if isinstance(a, Tensor) else a for a in arguments)


def called(op: str, arguments: Arguments) -> list[Tensor]:
    """Returns an op's results and what it left in its arguments, of which it gets copies."""
    mine = copied(arguments)
    found = getattr(torch_ops(), op)(*mine)
    returned = [] if found is None else list(found) if isinstance(found, tuple) else [found]
    return [*returned, *(a for a in mine if isinstance(a, Tensor))]


@pytest.mark.parametrize("case", first_now([*CASES, *sorted(set(names()) - set(CASES))], len(CASES)))
def test_an_op_is_what_its_schema_says_and_can_be_traced(case: str) -> None:
    op, arguments = cases()[case]
    torch.library.opcheck(getattr(torch_ops(), op).default, copied(arguments))


def test_every_case_is_asked_for() -> None:
    assert names() == list(cases())


@needs_native
@pytest.mark.parametrize("case", names())
def test_native_code_is_near_the_reference(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    op, arguments = cases()[case]
    native = called(op, arguments)
    for module in [
        m for name, m in sys.modules.items() if name.startswith("baton.kernels.") and hasattr(m, "symbol")
    ]:
        monkeypatch.setattr(module, "symbol", lambda *_: None)
    monkeypatch.setattr(abi, "library", lambda: None)  # of ops that are called by their cpu.py
    for mine, wanted in zip(native, called(op, arguments), strict=True):
        assert mine.dtype == wanted.dtype
        if mine.dtype == torch.uint8:  # pages: a tie may round either way, so do scales' last bits
            assert int((mine != wanted).sum()) <= 0.01 * mine.numel()
        elif mine.is_floating_point():
            assert float((mine - wanted).norm()) <= 3e-2 * float(wanted.norm())
        else:
            assert torch.equal(mine, wanted)


def test_every_op_of_a_step_is_there() -> None:
    # a part of lm_head, what reads pages between ops, and what the step alone runs
    lent = {"sample", "page_scores", "route", "route_two", "combine", "latent_attention", "gated_delta"}
    lent |= {
        "state_space",
        "selective_scan",
        "activate",
        "halve_heads",
        "layer_norm",
        "predict_streams",
        "layer_inputs",
    }
    names = {"kv_copy": "kv_pack"}
    assert not [op for op in set(ops()) - lent if not hasattr(torch_ops(), names.get(op, op))]


def test_what_was_packed_is_unpacked_with_the_same_sums() -> None:
    pages, room = memory("bfloat16"), torch.zeros_like(memory("bfloat16"))
    packed, sums = torch_ops().kv_pack(pages, torch.tensor([5, 0]))
    assert torch.equal(torch_ops().kv_unpack(room, torch.tensor([1, 7]), packed), sums)
    assert torch.equal(room[[1, 7]], pages[[5, 0]])
    assert not room[[0, 2, 3, 4, 5, 6]].any()


@pytest.mark.parametrize(
    ("op", "change", "text"),
    [
        ("attention int8", {2: torch.tensor([3, 1, 9, 3, 1, 6])}, "pages are 0 to 7"),
        ("attention int8", {3: torch.tensor([[0, 49, 1], [3, 36, 3]]), 2: TABLE[:4]}, "a page per 16 tokens"),
        ("attention int8", {3: ITEMS[:1]}, "are 4 rows"),
        ("attention int8", {4: "int3"}, "dtype is one of"),
        ("attention int8", {7: 2}, "layers 0 to 1"),
        ("attention int8", {5: 3}, "heads a multiple of kv_heads"),
        ("attention int8", {8: -1}, "window is 0 or more"),
        ("cascade int8", {4: torch.tensor([[0, 2, 48]])}, "begin with the same pages"),
        ("cascade int8", {4: torch.tensor([[0, 2, 16], [1, 1, 16]])}, "in one of them at most"),
        ("cascade int8", {4: torch.tensor([0, 2, 16])}, "are \\(n, 3\\)"),
        ("cascade int8", {6: 3}, "heads a multiple of kv_heads"),
        ("append int8", {4: torch.rand(9, DIM)}, "rope_angles is"),
        ("append int8", {5: None}, "both norms or none"),
        ("append int8", {6: torch.rand(DIM - 1)}, "a norm is"),
        ("linear int8", {0: torch.randn(3, 41)}, "x is"),
        ("linear int8", {1: torch.zeros(7, dtype=torch.uint8)}, "data is 5120 of torch.uint8"),
        ("linear int8", {4: torch.ones(70)}, "row_scale is 128"),
        ("linear int8", {4: None}, "needs its row_scale"),
        ("linear int4", {2: torch.ones(70, dtype=torch.float16)}, "scales is 256"),
        ("linear int4", {3: torch.ones(256)}, "mins is 256 of torch.float16"),
        ("linear int4", {6: 24}, "a multiple of 16"),
        ("linear bf16", {6: 32}, "a multiple of 16"),
        ("linear int4 ordered", {9: None}, "needs its order"),
        ("linear int4 ordered", {9: torch.full((40,), 40, dtype=torch.int32)}, "order has inputs from 0 to 39"),
        ("linear int4", {9: torch.arange(40, dtype=torch.int32)}, "has no order"),
        ("linear float32", {4: torch.ones(128)}, "has no row_scale"),
        ("lm_head int4", {2: None}, "needs its scales"),
        ("embedding", {0: torch.tensor([5])}, "tokens are 0 to 4"),
        ("kv_pack", {1: torch.tensor([8])}, "pages are 0 to 7"),
        ("moe", {4: 6}, "chosen is 1 to 5"),
        ("accept", {1: None}, "takes chosen, or target"),
        ("accept", {1: torch.tensor([4, 2])}, "chosen is"),
        ("reject", {2: torch.zeros(2, 11)}, "target is"),
        ("reject", {3: torch.zeros(2, 10)}, "proposed is"),
        ("reject", {4: torch.zeros(1)}, "accept is"),
        ("reject", {5: torch.zeros(2)}, "draw is"),
    ],
    ids=lambda value: value if isinstance(value, str) else "wrong",
)
def test_what_would_read_elsewhere_is_refused(op: str, change: dict[int, Any], text: str) -> None:
    name, arguments = cases()[op]
    with pytest.raises(ValueError, match=text):
        getattr(torch_ops(), name)(*(change.get(at, value) for at, value in enumerate(arguments)))


@pytest.mark.thorough
def test_nothing_is_defined_before_it_is_asked_for() -> None:
    code = "import torch, baton.kernels.registry as r; r.kernels(); assert not hasattr(torch.ops.baton, 'swiglu')"
    subprocess.run([sys.executable, "-c", code + "; r.torch_ops().swiglu"], check=True)


def test_a_traced_function_has_the_same_bits() -> None:
    own, weight = torch_ops(), parts(pack_bf16(torch.randn(70, 40)))

    def layer(x: Tensor) -> Tensor:
        found: Tensor = own.swiglu(own.linear(x, *weight, None)) * 2
        return found

    x = torch.randn(3, 40)
    assert torch.equal(torch.compile(layer, backend="aot_eager", fullgraph=True)(x), layer(x))


def test_native_code_takes_float32_alone() -> None:
    assert torch_library.runs_natively(torch.zeros(1), None)
    assert not torch_library.runs_natively(torch.zeros(1, dtype=torch.bfloat16))
