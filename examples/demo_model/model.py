"""A small Llama-architecture model in plain torch, and its import and export in the Hugging Face layout."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Shape:
    """The sizes of a model, named as in a Hugging Face ``config.json``."""

    vocab_size: int = 4096
    hidden_size: int = 256
    intermediate_size: int = 640
    num_hidden_layers: int = 8
    num_attention_heads: int = 8
    num_key_value_heads: int = 2
    head_dim: int = 32
    max_position_embeddings: int = 2048
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5


class RMSNorm(nn.Module):
    """Root-mean-square normalisation with a learned scale."""

    def __init__(self, size: int, eps: float) -> None:
        """Start with a scale of one."""
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        return (y * self.weight).to(x.dtype)


def rope_tables(shape: Shape, length: int) -> tuple[Tensor, Tensor]:
    """Return cosine and sine tables of size (length, head_dim) in the rotate-half convention."""
    exponent = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
    angles = torch.outer(torch.arange(length, dtype=torch.float32), shape.rope_theta**-exponent)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary position embedding to (batch, heads, length, head_dim)."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    """Causal grouped-query self-attention."""

    def __init__(self, shape: Shape) -> None:
        """Create the four projections."""
        super().__init__()
        self.shape = shape
        query, key_value = (
            shape.num_attention_heads * shape.head_dim,
            shape.num_key_value_heads * shape.head_dim,
        )
        self.q_proj = nn.Linear(shape.hidden_size, query, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, key_value, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, key_value, bias=False)
        self.o_proj = nn.Linear(query, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Attend within each row."""
        batch, length, _ = x.shape
        query, key, value = (
            proj(x).view(batch, length, -1, self.shape.head_dim).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        groups = self.shape.num_attention_heads // self.shape.num_key_value_heads
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))


class MLP(nn.Module):
    """The gated feed-forward block."""

    def __init__(self, shape: Shape) -> None:
        """Create the three projections."""
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Apply SwiGLU."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self, shape: Shape) -> None:
        """Create attention, feed-forward and their norms."""
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = MLP(shape)
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Add both blocks to the residual stream."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """The whole model with tied embeddings; parameter names follow Hugging Face below ``model.``."""

    def __init__(self, shape: Shape) -> None:
        """Create and initialise all parameters."""
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        cos, sin = rope_tables(shape, shape.max_position_embeddings)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.apply(self._initialise)
        for name, parameter in self.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.normal_(parameter, std=0.02 / (2 * shape.num_hidden_layers) ** 0.5)

    @staticmethod
    def _initialise(module: nn.Module) -> None:
        """Draw weights from a narrow normal distribution."""
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)

    def hidden(self, tokens: Tensor) -> Tensor:
        """Return the final hidden states of (batch, length) tokens."""
        x = self.embed_tokens(tokens)
        if torch.is_autocast_enabled("cpu"):
            x = x.to(torch.bfloat16)
        length = tokens.shape[1]
        cos, sin = self.get_buffer("cos")[:length].to(x.dtype), self.get_buffer("sin")[:length].to(x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.norm(x)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return next-token logits."""
        return F.linear(self.hidden(tokens), self.embed_tokens.weight)

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean next-token cross entropy in nats."""
        return F.cross_entropy(self(tokens).float().flatten(0, 1), targets.flatten())


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file beside its place and rename it over the old one."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_bytes(data)
    temporary.replace(path)


def hf_config(shape: Shape, bos: int, eos: int, pad: int) -> dict[str, Any]:
    """Return the contents of ``config.json``."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **asdict(shape),
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "initializer_range": 0.02,
        "rope_scaling": None,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "bos_token_id": bos,
        "eos_token_id": eos,
        "pad_token_id": pad,
        "pretraining_tp": 1,
    }


def export(model: Llama, directory: Path, tokenizer_files: dict[str, bytes], ids: tuple[int, int, int]) -> None:
    """Write the model in the Hugging Face layout, each file atomically, the weights last."""
    directory.mkdir(parents=True, exist_ok=True)
    bos, eos, pad = ids
    generation = {
        "bos_token_id": bos,
        "eos_token_id": eos,
        "pad_token_id": pad,
        "do_sample": True,
        "temperature": 0.7,
        "top_p": 0.9,
        "repetition_penalty": 1.1,
    }
    configuration = {
        "config.json": hf_config(model.shape, bos, eos, pad),
        "generation_config.json": generation,
    }
    for name, content in configuration.items():
        write_atomically(directory / name, (json.dumps(content, indent=2) + "\n").encode())
    for name, data in tokenizer_files.items():
        write_atomically(directory / name, data)
    weights = {f"model.{n}": p.detach().to(torch.bfloat16).contiguous() for n, p in model.named_parameters()}
    temporary = directory / ".model.safetensors.tmp"
    save_file(weights, temporary, metadata={"format": "pt"})
    temporary.chmod(0o644)
    temporary.replace(directory / "model.safetensors")


def load(directory: Path) -> Llama:
    """Load an exported model with float32 arithmetic on its bf16 weights."""
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    shape = Shape(**{name: config[name] for name in Shape.__dataclass_fields__})
    model = Llama(shape)
    weights = load_file(directory / "model.safetensors")
    model.load_state_dict({n.removeprefix("model."): w.float() for n, w in weights.items()})
    return model.eval()
