"""Makes the checkpoints in ``own`` by ``baton quantize``, then records what transformers makes of them.

python make_own.py write            in this project's environment
python make_own.py record           where transformers, compressed-tensors and bitsandbytes are
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

HERE = Path(__file__).parent / "own"
PLAIN = HERE / "plain"
RECIPES = {
    "rtn": {"method": "rtn", "group": 32},
    "gptq": {"method": "gptq", "group": 32, "format": "compressed-tensors"},
    "smoothquant": {"method": "smoothquant"},
    "fp8": {"method": "fp8"},
    "mxfp4": {"method": "mxfp4"},
    "nf4": {"method": "nf4"},
}


def write() -> None:
    """Writes every checkpoint of the plain model, which is made where it isn't there."""
    import torch

    from baton.quantize.run import quantize
    from baton.quantize.schemes import Recipe
    from baton.quantize.source import Source

    if not PLAIN.exists():
        sys.path.insert(0, str(HERE.parent))
        from common import base

        base(PLAIN)
    samples = torch.randint(0, 128, (16, 32), generator=torch.Generator().manual_seed(1)).tolist()
    for name, fields in RECIPES.items():
        recipe = Recipe(**fields).checked()  # type: ignore[arg-type]
        shutil.rmtree(HERE / name, ignore_errors=True)
        quantize(Source(str(PLAIN)), recipe, samples if name in ("gptq", "smoothquant") else (), HERE / name)


def recorded() -> None:
    """Records transformers' logits and values of each, in float32 but for MXFP4."""
    import torch
    from common import record, reloaded
    from transformers.utils.quantization_config import CompressedTensorsConfig

    for name in RECIPES:
        if name == "nf4":
            import bitsandbytes as bnb

            model = reloaded(HERE / name, dtype=torch.float32)
            libraries = ("bitsandbytes",)

            def dense(layer: torch.nn.Module) -> torch.Tensor:
                return bnb.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)

        else:
            settings = CompressedTensorsConfig(dequantize=True)
            dtype = torch.bfloat16 if name == "mxfp4" else torch.float32  # transformers keeps its values so
            model = reloaded(HERE / name, dtype=dtype, quantization_config=settings)
            libraries = ("compressed-tensors",)

            def dense(layer: torch.nn.Module) -> torch.Tensor:
                return layer.weight

        record(HERE / name, model, dense, (*libraries, "safetensors"))


if __name__ == "__main__":
    {"write": write, "record": recorded}[sys.argv[1]]()
