"""Quantizes a checkpoint by the original library: runs in that library's environment, which has no part of Baton.

    python quantizers_side.py MAKER MODEL SAMPLES.json OUT

MAKER is a key of ``MAKERS``. SAMPLES.json holds rows of token ids, all of one length. Prints the library's version.
"""

import json
import os
import sys
from importlib.metadata import version

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

LINEAR = {"targets": "Linear", "ignore": ["lm_head"]}
GROUP = 128
DAMP = 0.01  # of the mean diagonal, as both GPTQ libraries have it


def bitsandbytes_nf4(model, samples, out):
    """NF4 with double quantization."""
    from transformers import BitsAndBytesConfig

    settings = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    AutoModelForCausalLM.from_pretrained(model, quantization_config=settings, device_map="cpu").save_pretrained(out)
    return "bitsandbytes"


def _oneshot(model, samples, out, recipe):
    from llmcompressor import oneshot
    from torch.utils.data import DataLoader

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    rows = [torch.tensor([row]) for row in samples]
    given = [{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in rows]
    tokenizer = AutoTokenizer.from_pretrained(model)
    oneshot(
        model=loaded,
        dataset=DataLoader(given, batch_size=None),  # type: ignore[arg-type]
        recipe=recipe,
        processor=tokenizer,
        num_calibration_samples=len(rows),
    )
    loaded.bfloat16().save_pretrained(out, save_compressed=True)
    return "llmcompressor"


def compressor_rtn(model, samples, out):
    """Rounding to the nearest."""
    from llmcompressor.modifiers.quantization import QuantizationModifier

    return _oneshot(model, samples, out, QuantizationModifier(scheme="W4A16", **LINEAR))


def compressor_gptq(model, samples, out):
    """GPTQ as the library does it unless told."""
    from llmcompressor.modifiers.gptq import GPTQModifier

    return _oneshot(model, samples, out, GPTQModifier(scheme="W4A16", **LINEAR))


def compressor_awq(model, samples, out):
    """AWQ, as its successor of AutoAWQ does it."""
    from llmcompressor.modifiers.awq import AWQModifier

    # The library pins what it caches, as for a GPU, which torch refuses where there is none.
    setattr(torch.Tensor, "pin_memory", lambda self: self)  # noqa: B010
    return _oneshot(model, samples, out, [AWQModifier(scheme="W4A16_ASYM", **LINEAR)])


def compressor_smoothquant(model, samples, out):
    """SmoothQuant at strength 0.8, int8 by row, activations by token."""
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier

    smooth = SmoothQuantModifier(smoothing_strength=0.8)
    return _oneshot(model, samples, out, [smooth, QuantizationModifier(scheme="W8A8", **LINEAR)])


def compressor_fp8(model, samples, out):
    """E4M3 by row."""
    from llmcompressor.modifiers.quantization import QuantizationModifier

    return _oneshot(model, samples, out, QuantizationModifier(scheme="FP8_DYNAMIC", **LINEAR))


def compressor_mxfp4(model, samples, out):
    """E2M1 in blocks of 32."""
    from llmcompressor.modifiers.quantization import QuantizationModifier

    return _oneshot(model, samples, out, QuantizationModifier(scheme="MXFP4", **LINEAR))


def gptqmodel_gptq(model, samples, out):
    """GPTQ, symmetric; with fewer than eight cores the library's pools of threads can't be made."""
    os.cpu_count = lambda: 8
    from gptqmodel import GPTQModel, QuantizeConfig

    config = QuantizeConfig(bits=4, group_size=GROUP, sym=True, desc_act=False, damp_percent=DAMP)
    loaded = GPTQModel.load(model, config, device="cpu", dtype=torch.float32)
    rows = [torch.tensor([row]) for row in samples]
    loaded.quantize([{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in rows], batch_size=1)
    loaded.save(out)
    return "gptqmodel"


def autoawq_awq(model, samples, out):
    """AWQ with clipping, as AutoAWQ does it."""
    from awq import AutoAWQForCausalLM

    settings = {"zero_point": True, "q_group_size": GROUP, "w_bit": 4, "version": "GEMM"}
    loaded = AutoAWQForCausalLM.from_pretrained(model, device_map="cpu", torch_dtype=torch.float32)
    loaded.quantize(
        AutoTokenizer.from_pretrained(model),
        quant_config=settings,
        calib_data=samples,
        max_calib_samples=len(samples),
        max_calib_seq_len=len(samples[0]),
    )
    loaded.save_quantized(out, safetensors=True)
    return "autoawq"


MAKERS = {
    made.__name__: made
    for made in (
        bitsandbytes_nf4, compressor_rtn, compressor_gptq, compressor_awq, compressor_smoothquant, compressor_fp8,
        compressor_mxfp4, gptqmodel_gptq, autoawq_awq,
    )
}  # fmt: skip


def main():
    maker, model, samples, out = sys.argv[1:5]
    with open(samples, encoding="utf-8") as file:
        rows = json.load(file)
    library = MAKERS[maker](model, rows, out)
    print(f"{library} {version(library)}")


if __name__ == "__main__":
    main()
