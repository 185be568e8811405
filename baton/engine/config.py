"""The settings of an engine. Torch-free.

Knows nothing of workers, roles or how a model is loaded.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from baton.engine.program.shares import Widths
from baton.protos.errors import ConfigError
from baton.protos.nouns import AdapterLimits
from baton.tls.identity import TlsFiles

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Device = Literal["cpu", "cuda"]
KvCacheDtype = Literal["auto", "float32", "bf16", "fp16", "int8", "fp8"]
Quantization = Literal["none", "int8", "int4"]
Activations = Literal["auto", "bf16", "fp8"]
WindowPages = Literal["auto", "shared", "own"]
CudaStep = Literal["auto", "graph", "mega"]

# Names of K's and V's dtype in a page's layout, by the setting's name.
KV_NAMES = {"float32": "float32", "bf16": "bfloat16", "fp16": "float16", "int8": "int8", "fp8": "fp8_e4m3"}


class EngineConfig(msgspec.Struct, frozen=True):
    """Holds the settings of an engine: which model it runs, in what precision, and on which device.

    ``dtype`` "auto" is float32 on a CPU and bfloat16 on a GPU; float16 runs on a CPU only, and its sums are
    float32. ``kv_cache_dtype`` is the dtype of stored K and V, "auto" for ``dtype``; int8 and fp8 have a scale per
    (token, head). ``kv_selection`` says which part of a long context attention reads: "all", "sinks:N,window:N",
    "snapkv:N,window:N" or "h2o:N,window:N" in tokens (but for "all" on a CPU only). With ``window_pages`` "own"
    layers that see a window have pages of their own, which are given back (on a CPU only); "auto" is "own" where
    that is possible, else "shared". ``quantization`` rounds the weights on load, "none" takes them as stored;
    packed weights are cached under ``cache_dir``.
    ``quantization_overrides`` maps patterns of layer names to other schemes (``checkpoints/layer_schemes.py``),
    "none" to leave a layer as stored.

    ``is_draft`` marks a draft model, whose ``quantization`` and overrides are its target's: patterns may match no
    layer, and weights that are quantized already stay as they are. ``activations`` is the precision that rows are
    rounded to before they are multiplied by quantized weights (CPU only): "auto" is int8 for integer and code-book
    weights and bf16 for fp8 ones; "bf16" is for all (weight-only quantization); "fp8" is for fp8 weights, as their
    checkpoint specifies.

    ``card_share`` is the part of a card's memory that the engine may take, its KV included, and ``card_kv_bytes``
    what of that KV takes (0: not known): quantized weights that torch's ops multiply by are dequantized ahead as
    far as the rest allows.

    ``cuda_step`` is how the GPU kernels run a step of up to 8 rows: "graph", one by one in a captured CUDA graph;
    "mega", a Llama's layers as one launch; "auto" is the faster one, where `baton doctor --gpu` found "mega" right
    on this card, else "graph". ``tp`` ranks share the model's columns, ``cp`` the rows of a step, ``ep`` its
    experts, ``pp`` its layers (``shares.Widths``); each rank is a process with its part of ``threads``.
    """

    model: str  # a directory in Hugging Face layout, or a hub id
    dtype: Dtype = "auto"
    device: Device = "cpu"
    max_model_len: int | None = None  # tokens; lowers the model's own context length
    threads: int | None = None  # torch's threads; None for its default
    kv_cache_dtype: KvCacheDtype = "auto"
    kv_selection: str = "all"
    window_pages: WindowPages = "shared"
    quantization: Quantization = "none"
    cache_dir: str = ""  # empty: $BATON_CACHE_DIR, or the user's cache directory
    cuda_step: CudaStep = "auto"
    adapters: AdapterLimits | None = None  # limits of LoRA adapters that may be loaded; None: none may
    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1
    expert_replicas: int = 0  # places per rank and layer for copies of other ranks' busy experts
    rank_hosts: tuple[str, ...] = ()  # host:port of `baton ranks` on other hosts, among which ranks are dealt too
    rank_key_file: str = ""  # with the key that all hosts have; empty: loopback or TLS only
    rank_wait_s: float = 0.0  # seconds to wait at start for rank_hosts that don't answer yet
    rank_bound_s: float = 10.0  # seconds others wait for a rank before it counts as stuck; 0: for ever
    tls: TlsFiles | None = None  # this host's, for connections between hosts of ranks; None: plaintext
    quantization_overrides: dict[str, str] = {}
    is_draft: bool = False
    activations: Activations = "auto"
    card_share: float = 1.0
    card_kv_bytes: int = 0

    @property
    def widths(self) -> Widths:
        """Returns how many ranks share the model's columns, rows, layers and experts."""
        return Widths(self.tp, self.cp, self.pp, self.ep)

    @property
    def computed_dtype(self) -> str:
        """Returns ``dtype``, with "auto" replaced by the device's own."""
        if self.dtype != "auto":
            return self.dtype
        return "float32" if self.device == "cpu" else "bfloat16"

    @property
    def stored_kv_dtype(self) -> str:
        """Returns the dtype in which K and V are stored."""
        return KV_NAMES.get(self.kv_cache_dtype, self.computed_dtype)

    @property
    def hosts(self) -> int:
        """Returns how many hosts have ranks, the lead's included."""
        return 1 + len(self.rank_hosts)

    def context(self, usual: int, most: int) -> int:
        """Returns the tokens of context: ``max_model_len``, or ``usual`` if that isn't set. Raises ConfigError for
        more than ``most``, which the model was made for; a draft model may have less than its target.
        """
        asked = self.max_model_len
        if asked is not None and self.is_draft:
            return min(asked, most)
        require_context(asked or 0, most)
        return asked or usual


def require_context(asked: int, most: int) -> None:
    """Raises ConfigError if ``asked`` tokens of context are more than ``most``, which the model was made for."""
    if asked > most:
        text = f"max_model_len is {asked}, and the model was made for contexts of {most} tokens: lower it, or"
        raise ConfigError(f"{text} give its config.json a rope_scaling that lengthens them", "max_model_len")
