"""A dispatcher that really streams, a tokenizer trained on the spot, and a router on real sockets before them."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import httpx
import openai
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from baton.cluster.config import RouterConfig
from baton.protos.errors import BatonError
from baton.protos.nouns import TokenLogprob, TokenLogprobs, TokenRun
from baton.router.request.request import ChoiceStream, ChoiceSummary, RouterRequest, ServedModel
from baton.router.server import RouterAddress, running_router
from baton.router.text.catalog import ModelCatalog
from baton.router.text.tokenizer import HfTokenizer
from tests.router.parts import generation_of, surfaces_of

if TYPE_CHECKING:
    import anthropic

SPECIAL = ["<|begin|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
EOS = 1
CONTEXT = 256
CORPUS = ["The quick brown fox jumps over the lazy dog. Zwölf Boxkämpfer jagen Viktor, 日本語 and 🦊 too!\n"] * 4
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] | trim }}"
    "{{ eos_token }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SAID = "The quick brown fox jumps over the lazy dog. 日本語 and 🦊 too!"


def train_tokenizer(directory: Path) -> None:
    """A byte-level BPE of about 400 ids, in the Hugging Face layout."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", pair=None, special_tokens=[("<|begin|>", 0)]
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    begin = {"__type": "AddedToken", "content": "<|begin|>", "special": True}
    config = {"bos_token": begin, "eos_token": "<|end|>", "chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    train_tokenizer(directory)
    return directory


@pytest.fixture(scope="session")
def tokenizer(model_dir: Path) -> HfTokenizer:
    return HfTokenizer(model_dir / "tokenizer.json")


@pytest.fixture(scope="session")
def vocab_size(model_dir: Path) -> int:
    return Tokenizer.from_file(str(model_dir / "tokenizer.json")).get_vocab_size()


@pytest.fixture(autouse=True)
def patient_links(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a worker on a busy machine take longer for its first answer than one that would be lost in earnest."""
    monkeypatch.setattr("baton.router.workers.link.HELLO_TIMEOUT_S", 60.0)


class FakeDispatcher:
    """Streams ``say(request, choice)`` one token per ``pace_s``, through the real ChoiceStream.

    Obeys max_tokens, end ids and cancellation as an engine does; keeps what it was asked and what was cancelled.
    """

    def __init__(self, served: tuple[ServedModel, ...], say: Callable[[RouterRequest, int], list[int]]) -> None:
        self.served = served
        self.say = say
        self.pace_s = 0.0
        self.requests: list[RouterRequest] = []
        self.cancelled: list[str] = []
        self.refuse: BatonError | None = None
        self.fail_after: tuple[int, BatonError] | None = None
        self.is_ready = True
        self.scores: tuple[TokenLogprobs, ...] = ()
        self.accepted_drafts = self.rejected_drafts = 0  # that the second token's step tells of
        self.running: set[asyncio.Task[None]] = set()
        self.opened = asyncio.Event()
        self.first_token = asyncio.Event()
        self.first_token.set()

    def models(self) -> tuple[ServedModel, ...]:
        return self.served

    def ready(self) -> bool:
        return self.is_ready

    async def idle(self) -> None:
        """Returns once nothing runs; a cancel takes milliseconds."""
        async with asyncio.timeout(20):
            await asyncio.gather(*self.running, return_exceptions=True)

    def open(self, request: RouterRequest) -> list[ChoiceStream]:
        if self.refuse is not None:
            raise self.refuse
        self.requests.append(request)
        return [self._open_one(request, choice) for choice in range(request.n)]

    def _open_one(self, request: RouterRequest, choice: int) -> ChoiceStream:
        summary = ChoiceSummary(
            prompt_tokens=len(request.token_ids), way="prefill", prefill_worker="p0", stations={}
        )
        summary.context_class = "short"
        stream = ChoiceStream(choice, summary)
        task = asyncio.create_task(self._run(request, stream))
        self.running.add(task)
        self.opened.set()
        task.add_done_callback(self.running.discard)

        def cancel() -> None:
            self.cancelled.append(stream.cancel_reason)
            task.cancel()

        stream.on_cancel(cancel)
        return stream

    async def _run(self, request: RouterRequest, stream: ChoiceStream) -> None:
        await self.first_token.wait()
        stream.summary.prompt_logprobs = self.scores
        if request.sampling.pooling:
            stream.summary.pooled = struct.pack("<4f", 3.0, 4.0, 0.0, float(len(request.token_ids)))
        stream.summary.cached_tokens = 16 if len(request.token_ids) > 16 else 0
        sampling, ids = request.sampling, self.say(request, stream.choice)
        ends = {*sampling.stop_token_ids} | (set() if sampling.ignore_eos else {EOS})
        for index in range(sampling.max_tokens):
            await asyncio.sleep(self.pace_s)
            if self.fail_after is not None and index >= self.fail_after[0]:
                return stream.fail(self.fail_after[1])
            token = ids[index % len(ids)]
            ended = token in ends and index >= sampling.min_tokens
            reason = "stop" if ended else "length" if index + 1 == sampling.max_tokens else ""
            logprobs = (entry(token, sampling.logprobs),) if sampling.logprobs is not None else ()
            if sampling.logprob_token_ids:  # the first named one is likelier, the longer the prompt
                named = zip(sampling.logprob_token_ids, (-10.0, -1.0 - len(request.token_ids) / 10), strict=False)
                logprobs = (TokenLogprobs(logprobs[0].chosen, tuple(TokenLogprob(i, p, 9) for i, p in named)),)
            drafts = (self.accepted_drafts, self.rejected_drafts) if index == 1 else (0, 0)
            stream.push(TokenRun(index, (token,), logprobs, reason, token if ended else None, *drafts))
            if reason:
                return None
        return None


def entry(token: int, count: int) -> TokenLogprobs:
    """The chosen token at rank 1, the next ids after it."""
    ranked = [TokenLogprob(token + i, -0.5 - i, i + 1) for i in range(max(1, count))]
    return TokenLogprobs(ranked[0], tuple(ranked[:count]))


@pytest.fixture
def fake(tokenizer: HfTokenizer, vocab_size: int) -> FakeDispatcher:
    """Greedy says SAID and ends; sampled says ids keyed by (seed, choice, position)."""
    said = [*tokenizer.encode(SAID, add_special_tokens=False), EOS]
    letters = tokenizer.encode("abcdefghijklmnopqrstuvwxyz", add_special_tokens=False)

    def say(request: RouterRequest, choice: int) -> list[int]:
        if request.sampling.temperature == 0:
            return said
        key = f"{request.sampling.seed} {choice}".encode()
        return [letters[byte % len(letters)] for byte in hashlib.sha256(key).digest()]

    return FakeDispatcher((ServedModel("tiny", CONTEXT, vocab_size, (EOS,)),), say)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of the texts that any tokenizer was given."""
    lengths: list[int] = []
    encode, encode_pair = HfTokenizer.encode, HfTokenizer.encode_pair

    def noted(self: HfTokenizer, text: str, add_special_tokens: bool) -> list[int]:
        lengths.append(len(text))
        return encode(self, text, add_special_tokens)

    def pair_noted(self: HfTokenizer, first: str, second: str, *most: int) -> object:
        lengths.append(len(first) + len(second))
        return encode_pair(self, first, second, *most)

    monkeypatch.setattr(HfTokenizer, "encode", noted)
    monkeypatch.setattr(HfTokenizer, "encode_pair", pair_noted)
    return lengths


class Clients:
    """The unmodified clients of one running router."""

    def __init__(self, address: RouterAddress) -> None:
        self.address = address
        self.http = httpx.AsyncClient(base_url=address.url, timeout=60, verify=False)  # reading CAs takes 25 ms
        self.grpc_address = f"{address.host}:{address.grpc_port}"
        self.channel = grpc.aio.insecure_channel(self.grpc_address)

    @functools.cached_property
    def openai(self) -> openai.AsyncOpenAI:
        http = openai.DefaultAsyncHttpxClient(verify=False)
        return openai.AsyncOpenAI(
            base_url=f"{self.address.url}/v1", api_key="none", max_retries=0, http_client=http
        )

    @functools.cached_property
    def anthropic(self) -> anthropic.AsyncAnthropic:
        import anthropic  # thousands of classes, for the processes of tests that call it

        http = anthropic.DefaultAsyncHttpxClient(verify=False)
        return anthropic.AsyncAnthropic(base_url=self.address.url, api_key="none", max_retries=0, http_client=http)

    async def close(self) -> None:
        if "anthropic" in self.__dict__:
            await self.anthropic.close()
        if "openai" in self.__dict__:
            await self.openai.close()
        await self.http.aclose()
        await self.channel.close()


@asynccontextmanager
async def router_before(
    fake: FakeDispatcher,
    sources: dict[str, Path | None],
    gate=None,
    decisions=None,
    batches=None,
    **settings: object,
) -> AsyncIterator[Clients]:
    config = RouterConfig(port=0, grpc_port=0, shutdown_grace_s=0.0, **settings)
    generation = generation_of(config, fake, ModelCatalog(fake.models, sources), gate, decisions)
    async with running_router(config, surfaces_of(config, generation, batches)) as address:
        clients = Clients(address)
        yield clients
        await clients.close()


@pytest.fixture
async def router(fake: FakeDispatcher, model_dir: Path) -> AsyncIterator[Clients]:
    async with router_before(fake, {"tiny": model_dir}, max_body_bytes=65536) as clients:
        yield clients


@pytest.fixture
def start_router() -> Callable[..., object]:
    """Starts routers with a test's own settings or models: ``async with start_router(fake, …) as clients``."""
    return router_before
