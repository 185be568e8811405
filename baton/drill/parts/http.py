"""Calls of the router's own HTTP application, without sockets: it gets a request's body and is told when the client
leaves, and what it sends is kept.

Knows nothing of routes or of what an answer must be.
"""

from __future__ import annotations

import asyncio
import contextvars
from typing import NamedTuple

import orjson
from starlette.types import ASGIApp, Message, Scope

from baton.drill.language.grammar import JSON
from baton.drill.language.ranking import Ranking
from baton.drill.language.vocabulary import ROLES, TOOLS
from baton.drill.parts.engine import model_id_of
from baton.drill.parts.tensor_calls import HEADER_LENGTH, tensors_body, tensors_path
from baton.drill.scenario import FORCED, Request
from baton.router.request.environment import Environment

ADMIN = 1000  # the number of the operators' key
SLO_HEADER = "x-slo-ttft-ms"
WIRE_NUMBER = "x-drill-number"  # metadata of a gRPC call: the number of the client's request
NUMBER: contextvars.ContextVar[int | None] = contextvars.ContextVar("number", default=None)


BY_OTHER_NAMES = ("n", "max_tokens")  # fields that the Responses API names otherwise, or lacks


class NumberingEnvironment(Environment, frozen=True):
    """An environment that names a simulated client's request by its number, as the witnesses know it."""

    def new_id(self) -> str:
        """Returns the id of the client's request in whose call this is; a random one elsewhere."""
        number = NUMBER.get()
        return super().new_id() if number is None else f"r{number}"


class HttpAsk(NamedTuple):
    """Describes a call over HTTP, and how its client reads: ``pause_s`` is between two parts of the response."""

    path: str
    body: bytes = b""
    method: str = "POST"
    pause_s: float = 0.0
    timeout_s: float | None = None  # that its header asks for
    key: str = ""  # the client's API key, "" for none
    key_header: str = "authorization"
    json_bytes: int = 0  # of a body that has tensors in binary behind its JSON; 0: all of it is JSON
    slo_ttft_s: float = 0.0  # that its header asks for; 0: none
    session: str = ""  # that its header names, "" for none

    def scope(self) -> Scope:
        """Returns the ASGI scope of the call."""
        headers = [] if self.timeout_s is None else [(b"x-request-timeout", str(self.timeout_s).encode())]
        if self.slo_ttft_s:
            headers.append((SLO_HEADER.encode(), str(round(1000 * self.slo_ttft_s)).encode()))
        if self.session:
            headers.append((b"x-session-id", self.session.encode()))
        if self.json_bytes:
            headers.append((HEADER_LENGTH.encode(), str(self.json_bytes).encode()))
        if self.key:
            scheme = "Bearer " if self.key_header == "authorization" else ""
            headers.append((self.key_header.encode(), f"{scheme}{self.key}".encode()))
        return {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": self.method,
            "scheme": "http", "path": self.path, "raw_path": self.path.encode(), "query_string": b"",
            "root_path": "", "server": ("router", 80), "client": ("client", 1),
            "headers": [(b"content-type", b"application/json"), *headers],
        }  # fmt: skip


class HttpCall:
    """One call: ``status`` and ``body`` are what came of it, and ``over`` says whether that is all."""

    def __init__(self, asks: HttpAsk) -> None:
        self.status, self.body, self.over = 0, bytearray(), False
        self.advised = False  # whether an error came with the time after which to ask again
        self.left = asyncio.Event()
        self._asks, self._is_told = asks, False

    async def play(self, app: ASGIApp) -> None:
        """Calls ``app``; returns when it has answered or given up."""
        await app(self._asks.scope(), self.receive, self.send)

    async def receive(self) -> Message:
        """Returns the body, then waits until the client leaves."""
        if not self._is_told:
            self._is_told = True
            return {"type": "http.request", "body": self._asks.body, "more_body": False}
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """Keeps a part of the response, at the client's pace; drops it once the client has left."""
        if self.left.is_set():
            return
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.advised = int(dict(message["headers"]).get(b"retry-after", b"0")) > 0
            return
        self.body += message.get("body", b"")
        self.over = not message.get("more_body", False)
        if self._asks.pause_s and not self.over:
            await asyncio.sleep(self._asks.pause_s)


def asked_over_http(request: Request) -> HttpAsk:
    """Returns the call by which the client of ``request`` asks over HTTP."""
    body, json_bytes = tensors_body(request, fields_of(request)) if request.tensors else (body_of(request), 0)
    return HttpAsk(
        path_of(request), body, json_bytes=json_bytes, pause_s=request.read_pause, timeout_s=request.deadline_after,
        key=key_of(request), key_header="x-api-key" if request.anthropic else "authorization",
        slo_ttft_s=request.slo_ttft_s, session="" if _session_field(request) else request.session,
    )  # fmt: skip


def key_text(index: int) -> str:
    """Returns the text of the scenario's API key number ``index``, or of ADMIN."""
    return f"bt-{index + 16:012x}-{index:_>43}"


def key_of(request: Request) -> str:
    """Returns the text of the API key that the client of ``request`` sends, "" for none."""
    if request.key is None:
        return ""
    return key_text(0)[:-1] + "x" if request.key < 0 else key_text(request.key)


def path_of(request: Request) -> str:
    """Returns the path of the endpoint that ``request`` asks."""
    if request.ranking is not None:
        return "/v1/score" if request.ranking.scores else "/v1/rerank"
    if request.sampling.pooling:
        return "/v1/embeddings"
    if request.tensors:
        return tensors_path(request)
    if request.anthropic:
        return "/v1/messages"
    if request.responses:
        return "/v1/responses"
    return "/v1/chat/completions" if request.messages else "/v1/completions"


def body_of(request: Request) -> bytes:
    """Returns the body of ``request`` as a client of OpenAI's endpoints sends it."""
    own, model = request.sampling, request.adapter or model_id_of(request.model)
    if request.ranking is not None:
        return orjson.dumps({"model": model, "cache_salt": _salt(request)} | _of_ranking(request.ranking))
    if own.pooling:
        asked = {"model": model, "input": list(request.prompt), "pooling": own.pooling}
        return orjson.dumps({**asked, "cache_salt": _salt(request), "priority": request.priority})
    fields = _common(request) | {"model": model, "stream": request.over_http == "stream"}
    if request.anthropic:
        return orjson.dumps({name: fields[name] for name in fields if name != "n"} | _of_messages(request))
    if request.responses:
        return orjson.dumps(
            {name: fields[name] for name in fields if name not in BY_OTHER_NAMES} | _of_response(request)
        )
    if request.over_http == "stream":
        fields["stream_options"] = {"include_usage": True}
    return orjson.dumps(fields | (_of_chat(request) if request.messages else _of_completion(request)))


def fields_of(request: Request) -> dict[str, object]:
    """Returns the fields of a completion that say how ``request`` is to be answered."""
    fields = _common(request) | _of_completion(request)
    del fields["prompt"]
    return fields


def _common(request: Request) -> dict[str, object]:
    own = request.sampling
    fields: dict[str, object] = {
        "n": request.n, "stop": request.stops, "temperature": own.temperature, "seed": own.seed,
        "max_tokens": own.max_tokens, "min_tokens": own.min_tokens, "ignore_eos": own.ignore_eos,
        "stop_token_ids": own.stop_token_ids, "cache_salt": _salt(request),
    }  # fmt: skip
    if own.max_drafts is not None:
        fields["speculative.n_max"] = own.max_drafts
    if request.priority:
        fields["priority"] = request.priority
    if name := _session_field(request):
        fields[name] = request.session
    return fields


def _session_field(request: Request) -> str:
    """Returns the field of the body that names the request's session; "" where a header does, or there is none."""
    return ("", "session_id", "prompt_cache_key")[request.number % 3] if request.session else ""


def _of_ranking(asked: Ranking) -> dict[str, object]:
    if asked.scores:
        return {"text_1": asked.query, "text_2": asked.documents}
    fields: dict[str, object] = {"query": asked.query, "documents": asked.documents}
    if asked.top:
        fields["top_n"] = asked.top
    return fields | ({"max_tokens_per_doc": asked.document_tokens} if asked.document_tokens else {})


def _salt(request: Request) -> str | None:
    """Returns the salt that the client gives: its tenant, if no key names that."""
    return request.tenant if request.tenant and request.key is None else None


def _of_completion(request: Request) -> dict[str, object]:
    own = request.sampling
    fields: dict[str, object] = {"prompt": list(request.prompt)}
    if own.logprobs is not None:
        fields["logprobs"] = own.logprobs
    if own.prompt_logprobs is not None:
        fields["prompt_logprobs"] = own.prompt_logprobs
    if own.grammar is not None:
        fields["structured_outputs"] = {own.grammar.kind: own.grammar.spec}
    return fields


def _of_chat(request: Request) -> dict[str, object]:
    own = request.sampling
    fields: dict[str, object] = {"messages": _messages(request)}
    if own.logprobs is not None:
        fields |= {"logprobs": True, "top_logprobs": own.logprobs}
    if request.thinks:
        fields["chat_template_kwargs"] = {"enable_thinking": True}
    if request.tools:
        fields |= {"tools": [_tool(name) for name in TOOLS], "tool_choice": _choice(request)}
    if own.grammar is None or request.tools in FORCED:
        return fields
    if own.grammar.kind == JSON:
        schema = {"name": "answer", "schema": orjson.loads(own.grammar.spec)}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    else:
        fields["structured_outputs"] = {own.grammar.kind: own.grammar.spec}
    return fields


def _of_response(request: Request) -> dict[str, object]:
    own = request.sampling
    fields: dict[str, object] = {"input": _messages(request), "max_output_tokens": own.max_tokens}
    if request.thinks:
        fields["chat_template_kwargs"] = {"enable_thinking": True}
    if request.tools:
        flat = [{"type": "function", "name": name, "parameters": {"type": "object"}} for name in TOOLS]
        named = {"type": "function", "name": TOOLS[0]}
        fields |= {"tools": flat, "tool_choice": named if request.tools == "named" else request.tools}
    if own.grammar is None or request.tools in FORCED:
        return fields
    if own.grammar.kind == JSON:
        form = {"type": "json_schema", "name": "answer", "schema": orjson.loads(own.grammar.spec)}
        return fields | {"text": {"format": form}}
    return fields | {"structured_outputs": {own.grammar.kind: own.grammar.spec}}


def _of_messages(request: Request) -> dict[str, object]:
    own = request.sampling
    fields: dict[str, object] = {"messages": _messages(request)}
    if request.thinks:
        fields["thinking"] = {"type": "enabled", "budget_tokens": 1024}
    if request.tools:
        kinds = {"auto": "auto", "named": "tool", "required": "any"}
        named = {"name": TOOLS[0]} if request.tools == "named" else {}
        fields["tools"] = [{"name": name, "input_schema": {"type": "object"}} for name in TOOLS]
        fields["tool_choice"] = {"type": kinds[request.tools], **named}
    if own.grammar is None or request.tools in FORCED:
        return fields
    if own.grammar.kind == JSON:
        form = {"type": "json_schema", "schema": orjson.loads(own.grammar.spec)}
        return fields | {"output_config": {"format": form}}
    return fields | {"structured_outputs": {own.grammar.kind: own.grammar.spec}}


def _messages(request: Request) -> list[dict[str, str]]:
    return [{"role": ROLES[at % 2], "content": message} for at, message in enumerate(request.messages)]


def _tool(name: str) -> dict[str, object]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}


def _choice(request: Request) -> object:
    """Returns the field by which the client says whether a tool must be called."""
    return {"type": "function", "function": {"name": TOOLS[0]}} if request.tools == "named" else request.tools
