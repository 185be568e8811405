"""Makes the checkpoints in ``own`` by ``baton quantize``, then records what transformers makes of them.

python make_own.py write [NAME…]    in this project's environment
python make_own.py record [NAME…]   where transformers, compressed-tensors, bitsandbytes and GPTQModel are
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

HERE = Path(__file__).parent / "own"
PLAIN, EXPERTS_PLAIN = HERE / "plain", HERE / "experts_plain"
RECIPES = {
    "rtn": {"method": "rtn", "group": 32},
    "rtn_asymmetric": {"method": "rtn", "group": 32, "symmetric": False, "format": "compressed-tensors"},
    "gptq": {"method": "gptq", "group": 32, "format": "compressed-tensors"},
    "gptq_own_format": {"method": "gptq", "group": 32},
    "awq": {"method": "awq", "group": 32, "symmetric": False},
    "smoothquant": {"method": "smoothquant"},
    "fp8": {"method": "fp8"},
    "mxfp4": {"method": "mxfp4"},
    "nf4": {"method": "nf4"},
}
EXPERTS = {  # of a model with experts
    "experts_rtn": {"method": "rtn", "group": 32},
    "experts_gptq": {"method": "gptq", "group": 32},
    "experts_awq": {"method": "awq", "group": 32},
    "experts_fp8": {"method": "fp8"},
    "experts_mxfp4": {"method": "mxfp4"},
}
READ_TEXT = ("gptq", "gptq_own_format", "awq", "smoothquant", "experts_gptq", "experts_awq")
PACKED = ("gptq_own_format", "awq")  # which GPTQModel's layers hold, in transformers


def write() -> None:
    """Writes every checkpoint of the plain models, which are made where they aren't there."""
    import torch

    from baton.quantize.run import quantize
    from baton.quantize.schemes import Recipe
    from baton.quantize.source import Source

    sys.path.insert(0, str(HERE.parent))
    from common import base, mixtral

    for plain, make in ((PLAIN, base), (EXPERTS_PLAIN, mixtral)):
        if not plain.exists():
            make(plain)
    samples = torch.randint(0, 128, (16, 32), generator=torch.Generator().manual_seed(1)).tolist()
    for name in sys.argv[2:] or (*RECIPES, *EXPERTS):
        fields = (RECIPES | EXPERTS)[name]
        recipe = Recipe(**fields).checked(name in EXPERTS)  # type: ignore[arg-type]
        shutil.rmtree(HERE / name, ignore_errors=True)
        source = Source(str(EXPERTS_PLAIN if name in EXPERTS else PLAIN))
        quantize(source, recipe, samples if name in READ_TEXT else (), HERE / name)


def recorded() -> None:
    """Records transformers' logits and values of each, in float32 but for MXFP4 and what GPTQModel multiplies."""
    import torch
    from common import WATCHED, record, reloaded
    from transformers.utils.quantization_config import AwqConfig, CompressedTensorsConfig, GPTQConfig

    for name in sys.argv[2:] or (*RECIPES, *EXPERTS):
        if name in PACKED:
            plain = {"gptq_own_format": GPTQConfig(4, backend="torch"), "awq": AwqConfig(4, backend="torch_awq")}
            model = reloaded(HERE / name, dtype=torch.float32, quantization_config=plain[name])
            libraries = ("gptqmodel",)

            def dense(layer: torch.nn.Module) -> torch.Tensor:
                with torch.no_grad():
                    return layer(torch.eye(layer.in_features)).T

        elif name == "nf4":
            import bitsandbytes as bnb

            model = reloaded(HERE / name, dtype=torch.float32)
            libraries = ("bitsandbytes",)

            def dense(layer: torch.nn.Module) -> torch.Tensor:
                return bnb.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)

        else:
            settings = CompressedTensorsConfig(dequantize=True)
            dtype = torch.bfloat16 if name.endswith("mxfp4") else torch.float32  # transformers keeps its values so
            model = reloaded(HERE / name, dtype=dtype, quantization_config=settings)
            libraries = ("compressed-tensors",)

            def dense(layer: torch.nn.Module) -> torch.Tensor:
                return layer.weight

        record(HERE / name, model, dense, (*libraries, "safetensors"), WATCHED[: 1 if name in EXPERTS else None])


if __name__ == "__main__":
    {"write": write, "record": recorded}[sys.argv[1]]()
