"""``[router]`` and its context classes. Knows nothing of what a router does with them."""

from __future__ import annotations

import re

from pydantic import Field, field_validator, model_validator

from baton.cluster.sections.base import Section


class ContextClassSection(Section):
    """Describes requests whose prompt has at most ``max_tokens`` tokens, in the first class that fits; 0: any
    length.

    SLOs are in seconds, for requests that give none; 0: none. A request that would miss its SLO is refused early.
    """

    name: str = Field(
        pattern=r"^[a-z][a-z0-9_]{0,31}$",
        description="of metrics and rules; a lower-case letter, then up to 31 of them, digits or _",
    )
    max_tokens: int = Field(default=0, ge=0, description="of the prompt; 0: the rest")
    slo_ttft_s: float = Field(default=0.0, ge=0, description="wanted to the first token; 0: none")
    slo_tpot_s: float = Field(default=0.0, ge=0, description="wanted between tokens, in the mean; 0: none")
    adapters: tuple[str, ...] = Field(
        default=(), description="adapters whose requests are of this class, before classes that name none"
    )


DEFAULT_CLASSES = (
    ContextClassSection(name="short", max_tokens=1024),
    ContextClassSection(name="medium", max_tokens=8192),
    ContextClassSection(name="long", max_tokens=0),
)


class RouterConfig(Section):
    """Configures the router: listeners, limits and routing. Times in seconds, sizes in bytes."""

    host: str = Field(
        default="127.0.0.1",
        description="address that both ports listen on; a routable one needs keys_file, a client CA or insecure",
    )
    port: int = Field(default=8000, ge=0, le=65535, description="of REST; 0 takes a free one")
    grpc_port: int = Field(default=8001, ge=0, le=65535, description="of gRPC; 0 takes a free one")
    insecure: bool = Field(
        default=False, description="listen on a routable address without asking anybody for a key"
    )
    allowed_hosts: tuple[str, ...] = Field(
        default=(), description="Host names served beside loopback's own where nobody is asked for a key"
    )
    cors_origins: tuple[str, ...] = Field(
        default=(), description='origins (https://app.example) whose web pages may call REST, or "*"; empty: none'
    )
    keys_file: str = Field(default="", description="API keys (`baton keys add`); empty asks nobody for a key")
    processes: int = Field(default=1, ge=1, le=64, description="router processes that share the ports")
    policy: str = Field(default="cost", description="how a way is chosen: round_robin, least_loaded or cost")
    hedge_prefill: float = Field(
        default=0.0, ge=0, description="a prefill this many times overdue goes to another worker; 0: never"
    )
    stall_s: float = Field(
        default=5.0, gt=0, description="a worker whose engine is silent so long, and computes nothing, is left"
    )
    context_classes: tuple[ContextClassSection, ...] = Field(
        default=DEFAULT_CLASSES, description="requests by prompt length, each with a queue of its own"
    )
    max_queue: int = Field(default=1024, ge=1, description="requests that wait, per model and context class")
    max_inflight_bytes: int = Field(default=1 << 30, ge=1 << 20, description="prompts and answers held at once")
    request_timeout_s: float = Field(
        default=600.0,
        gt=0,
        description="a request that takes longer ends with an error; a batch's line counts from when it is placed",
    )
    shutdown_grace_s: float = Field(
        default=2.0, ge=0, description="what runs may finish in this time when the router is told to stop"
    )
    max_body_bytes: int = Field(default=8 << 20, ge=1024, description="of one request")
    max_header_bytes: int = Field(default=32 << 10, ge=1024, description="of a REST request's head, URL included")
    max_headers: int = Field(default=128, ge=8, description="in one REST request")
    max_url_bytes: int = Field(default=8 << 10, ge=256, description="of a REST request's URL")
    header_timeout_s: float = Field(
        default=10.0, gt=0, description="in which a REST request's head must come, and a TLS handshake end"
    )
    min_body_rate: float = Field(
        default=1024.0, ge=0, description="bytes a second below which a body is given up, after header_timeout_s"
    )
    keep_alive_s: float = Field(
        default=65.0, gt=0, description="a REST connection idle for so long is closed; more than a proxy's own time"
    )
    max_connections: int = Field(
        default=4096,
        ge=1,
        description="at once, of REST and of gRPC each, per process; beyond, only health and metrics are answered",
    )
    max_connections_per_address: int = Field(
        default=1024, ge=0, description="of REST, from one IPv4 address or IPv6 /64; 0: any, as behind a proxy"
    )
    max_stored_bytes: int = Field(
        default=256 << 20, ge=1024, description="of one tenant's files, with which no new one is taken; in Redis"
    )
    max_pinned_tokens: int = Field(
        default=262_144, ge=0, description="tokens that a tenant may have pinned, over prefixes and workers"
    )
    max_n: int = Field(default=16, ge=1, description="choices in one request")
    max_stop: int = Field(default=16, ge=1, description="stop strings in one request")
    max_prompts: int = Field(
        default=2048,
        ge=1,
        description="prompts, and choices of all of them, in one completions or embeddings call",
    )
    local_prefill_max_tokens: int = Field(
        default=64, ge=0, description="uncached prompt tokens up to which the decode worker runs a prompt itself"
    )
    trace_file: str = Field(default="", description="redacted trace of what was served (.jsonl); empty: none")
    trace_file_bytes: int = Field(default=64 << 20, ge=1024, description="a trace file that long is rotated")
    tool_parser: str = Field(
        default="auto",
        description="format of tool calls: auto, deepseek_v3, glm45, harmony, hermes, kimi_k2, llama3, minimax_m2, "
        "mistral, qwen3_coder, seed_oss",
    )
    reasoning_parser: str = Field(
        default="auto", description="format of the model's thinking: auto, none, harmony, think"
    )

    @field_validator("cors_origins")
    @classmethod
    def _are_origins(cls, origins: tuple[str, ...]) -> tuple[str, ...]:
        for origin in origins:
            if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/?#\s]+", origin):
                raise ValueError(f"{origin!r} is no origin: give a scheme and a host, https://app.example, or *")
        return origins

    @model_validator(mode="after")
    def _classes_in_order(self) -> RouterConfig:
        limits = [c.max_tokens or float("inf") for c in self.context_classes if not c.adapters]
        names = [c.name for c in self.context_classes]
        if not limits or limits != sorted(limits) or len(set(names)) != len(names):
            raise ValueError(
                "context_classes: give distinct names in rising order of max_tokens (0, the rest, last)"
            )
        return self
