"""Every field of OpenAI's, vLLM's, SGLang's and Dynamo's requests, sent: obeyed, refused by name or harmless."""

from __future__ import annotations

import json
import shutil
import typing
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest

from baton.cluster.config import RouterConfig
from baton.protos.errors import InvalidRequest
from baton.router.answer.service import GenerationService
from baton.router.api.batch.lines import BatchLine, answer_line
from baton.router.api.body import read_body_of
from baton.router.api.foreign_fields import refusal
from baton.router.api.openai.schemas import CompletionBody
from baton.router.api.request_body import IGNORED_HEADER
from baton.router.text.catalog import ModelCatalog
from tests.router.api.field_examples import (
    BASE,
    GENERATING,
    HELD,
    INSIDE,
    LISTED,
    NEEDS,
    OPENAI,
    OTHERWISE,
    PATHS,
    ROOT,
    SENT,
    SURFACES,
    TURN,
    WITH,
    fields,
)
from tests.router.conftest import EOS, TEMPLATE
from tests.router.parts import generation_of


@pytest.fixture(scope="module")
def rich_dir(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a template that reads all that a template may."""
    directory = tmp_path_factory.mktemp("rich")
    shutil.copy(model_dir / "tokenizer.json", directory)
    config = json.loads((model_dir / "tokenizer_config.json").read_text())
    config["chat_template"] = "{{ tools }}{{ documents }}{{ reasoning_effort }}{{ enable_thinking }}" + TEMPLATE
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    prompts = {"prompts": {"query": "Find: "}}
    (directory / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    return directory


@pytest.fixture
async def rich(start_router, fake, rich_dir, tokenizer):
    ids = [*tokenizer.encode("<think>h</think>The<|user|> quick brown fox", False), EOS]
    fake.say = lambda request, choice: ids
    async with start_router(fake, {"tiny": rich_dir}, reasoning_parser="think") as clients:
        yield Seeing(clients, fake)


async def test_documents_count_towards_what_one_call_tokenizes(rich) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "documents": [{"text": "d" * 1_100_000}]}
    answer = await rich.clients.http.post("/tokenize", json=body, timeout=60)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "documents")


ASKED = ("sampling", "model_id", "token_ids", "n", "prediction")
OF_CONTEXT = ("adapter_id", "tenant_salt", "priority", "session", "retained")


class Seeing:
    """Sends a request, and tells all that can be seen of it: what was asked of workers, what was answered."""

    def __init__(self, clients: Any, fake: Any) -> None:
        self.clients, self.fake = clients, fake
        self._known: dict[str, Any] = {}

    async def send(self, surface: str, said: dict[str, Any]) -> Any:
        body = {name: value for name, value in (BASE[surface] | said).items() if value is not None}
        return await self.clients.http.post(PATHS.get(surface, f"/v1/{surface}"), json=body)

    async def seen(self, surface: str, said: dict[str, Any]) -> Any:
        key = json.dumps([surface, said], sort_keys=True)
        if key not in self._known:
            self.fake.requests.clear()
            answer = await self.send(surface, said)
            requests = [
                [msgspec.to_builtins(getattr(r, part)) for part in ASKED]
                + [getattr(r.context, p) for p in OF_CONTEXT]
                for r in self.fake.requests
            ]
            for sampling, *_ in requests if surface == "embeddings" else ():
                del sampling["seed"]  # drawn for each, and of no use to them
            self._known[key] = (
                requests,
                answer.status_code,
                _lasting(answer.text),
                answer.headers.get(IGNORED_HEADER),
            )
        return self._known[key]


def _lasting(text: str) -> str:
    """An answer without what is new in each."""
    told = [
        json.loads(line.removeprefix("data: ")) if line.startswith("data: {") else line for line in text.split("\n")
    ]
    if len(told) == 1 and text.startswith("{"):
        told = [json.loads(text)]
    return json.dumps(_without_ids(told))


def _without_ids(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_ids(part) for part in value]
    if isinstance(value, dict):
        new = {"id", "created", "created_at", "item_id", "call_id"}
        return {key: _without_ids(part) for key, part in value.items() if key not in new}
    return value


def placed(surface: str, said: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Returns the surface to which fields are sent and the body, for fields inside another one too."""
    if surface not in INSIDE:
        return surface, said
    outer, beside = INSIDE[surface]
    return outer, {surface: said, **beside}


def of(surface: str, kind: str) -> list[str]:
    return [field for field in LISTED[surface] if fields.verdict(surface, field) == kind]


def test_somebody_thought_of_every_field_on_every_surface() -> None:
    found = {s: [f for f in LISTED[s] if fields.verdict(s, f) == "unknown"] for s in LISTED}
    assert {surface: names for surface, names in found.items() if names} == {}
    assert sum(map(len, LISTED.values())) > 350


def test_the_copied_names_are_those_of_openais_client_as_it_says() -> None:
    from openai.types.beta import response_create_params

    copied = json.loads(fields.DATA.read_text())["openai"]
    if openai.__version__ != copied["version"]:
        pytest.skip(
            f"names are of openai {copied['version']}; its newer fields are ignored and named, as any other"
        )
    for surface, kind in OPENAI.items():
        streams = {"stream"} if surface in GENERATING else set()
        beta = response_create_params.ResponseCreateParamsBase if surface == "responses" else kind
        assert names_of(kind, beta) | streams == {*copied["fields"][surface].split()}, surface


def names_of(*kinds: type) -> set[str]:
    """Returns the names of a body's fields in clients; ``betas`` are a header."""
    return {name for kind in kinds for name in typing.get_type_hints(kind)} - {"betas"}


def test_the_copied_names_are_those_of_anthropics_client_as_it_says() -> None:
    import anthropic  # thousands of classes, for the processes of tests that look at them
    from anthropic.types import beta, message_count_tokens_params, message_create_params
    from anthropic.types.output_config_param import OutputConfigParam

    created, counted = message_create_params, message_count_tokens_params
    kinds = {
        "messages": (created.MessageCreateParamsBase, beta.message_create_params.MessageCreateParamsBase),
        "count_tokens": (
            counted.MessageCountTokensParams,
            beta.message_count_tokens_params.MessageCountTokensParams,
        ),
        "output_config": (OutputConfigParam, beta.BetaOutputConfigParam),
    }
    copied = json.loads(fields.DATA.read_text())["anthropic"]
    if anthropic.__version__ != copied["version"]:
        pytest.skip(f"names are of anthropic {copied['version']}; its newer fields are ignored and named")
    for surface, both in kinds.items():
        streams = {"stream"} if surface in GENERATING else set()
        assert names_of(*both) | streams == {*copied["fields"][surface].split()}, surface


def test_what_one_generating_endpoint_obeys_no_other_drops() -> None:
    surfaces = GENERATING
    obeyed = {field for surface in surfaces for field in fields.declared(surface)}
    dropped = {s: [f for f in sorted(obeyed) if fields.verdict(s, f) == "unknown"] for s in surfaces}
    assert dropped == {surface: [] for surface in surfaces}


@pytest.mark.parametrize("surface", [*SURFACES, *INSIDE])
async def test_a_field_that_is_obeyed_changes_what_is_asked_or_answered(rich, surface: str) -> None:
    unseen = []
    for field in of(surface, "done"):
        usual = WITH.get(field) or (SENT.get(field), {})
        value, beside = OTHERWISE.get((surface, field), usual)
        assert value is not None, f"{surface}.{field}: say in SENT what shows it"
        without = await rich.seen(*placed(surface, beside))
        sent = await rich.seen(*placed(surface, beside | {field: value}))
        allowed = (200, 404) if field == "model" else (200,)
        if sent[:3] == without[:3] or sent[1] not in allowed:
            unseen.append((field, sent[1:3]))
    assert unseen == []


@pytest.mark.parametrize("surface", [*SURFACES, *INSIDE, "batches"])
async def test_a_field_that_is_refused_is_named_with_what_to_do_instead(rich, surface: str) -> None:
    inside = f"{surface}." if surface in INSIDE else ""
    for field in of(surface, "refused"):
        answer = await rich.send(*placed(surface, {field: "x"}))
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, inside + field), (surface, field)
        assert error["message"].endswith(refusal(surface, field).remedy)


@pytest.mark.parametrize("surface", [*SURFACES, *INSIDE])
async def test_a_refused_field_that_asks_for_nothing_passes_and_changes_nothing(rich, surface: str) -> None:
    needs = NEEDS.get(surface, {})
    without = await rich.seen(*placed(surface, needs))
    assert without[1] == 200
    for field in of(surface, "refused"):
        for value in refusal(surface, field).neutral:
            assert await rich.seen(*placed(surface, needs | {field: value})) == without, (surface, field, value)


@pytest.mark.parametrize("surface", [*SURFACES, *INSIDE])
async def test_a_harmless_field_changes_nothing_and_is_not_called_unknown(rich, surface: str) -> None:
    for field in of(surface, "harmless"):
        value, beside = OTHERWISE.get((surface, field), ("x", {}))
        without = await rich.seen(*placed(surface, beside))
        assert await rich.seen(*placed(surface, beside | {field: value})) == without, (surface, field)
        assert without[3] is None


@pytest.mark.parametrize("surface", SURFACES)
async def test_a_field_that_nobody_knows_is_ignored_and_named(rich, surface: str) -> None:
    for more in ({}, {"stream": True}) if surface in GENERATING else ({},):
        answer = await rich.send(surface, {"frobnicate": {"a": 1}, "line\nbreak": 1, "naïve": 1, **more})
        assert (answer.status_code, answer.headers[IGNORED_HEADER]) == (200, "frobnicate")
    many = await rich.send(surface, {f"odd_{i}": 0 for i in range(99)})
    assert len(many.headers[IGNORED_HEADER].split(", ")) == 16


def test_of_very_many_unknown_fields_only_some_are_looked_at_and_the_refused_one_is_still_found() -> None:
    many = {"prompt": "x", **{f"odd_{i}": 0 for i in range(2000)}}
    body = read_body_of(CompletionBody, many)
    assert len(list(body.ignored())) == 256
    with pytest.raises(InvalidRequest, match="use_beam_search is not supported"):
        read_body_of(CompletionBody, many | {"use_beam_search": True})


async def test_unknown_keys_inside_a_field_are_named_and_no_constraint_is_guessed(rich) -> None:
    named = await rich.send("chat", {"nvext": {"odd": 1}, "stream": True, "stream_options": {"odder": 1}})
    assert sorted(named.headers[IGNORED_HEADER].split(", ")) == ["nvext.odd", "stream_options.odder"]
    refused = await rich.send("chat", {"structured_outputs": {"jsn": {}}})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "structured_outputs.jsn")


async def test_numbers_are_no_booleans_where_a_field_asks_for_nothing(rich) -> None:
    answer = await rich.send("chat", {"thinking_token_budget": 0})
    assert answer.json()["error"]["param"] == "thinking_token_budget"
    assert (await rich.send("chat", {"thinking_token_budget": -1})).status_code == 200


@pytest.mark.parametrize("name", ["messages", "add_generation_prompt", "continue_final_message", "documents"])
async def test_a_templates_switch_that_the_request_would_overrule_is_refused(rich, name: str) -> None:
    answer = await rich.send("chat", {"chat_template_kwargs": {name: True}})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, f"chat_template_kwargs.{name}")


@pytest.mark.parametrize(
    ("template", "effort", "status"),
    [
        ("{{ messages }}", "low", 400),
        ("{{ messages }}", "none", 400),
        ("{{ messages }}", "medium", 200),
        ("{{ messages }}{{ enable_thinking }}", "none", 200),
        ("{{ messages }}{{ enable_thinking }}", "low", 400),
        ("{{ messages }}{{ reasoning_effort }}", "low", 200),
    ],
)
async def test_an_effort_is_what_the_template_can_say_or_refused(
    start_router, fake, rich_dir, tmp_path, template, effort, status
) -> None:
    shutil.copytree(rich_dir, tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text(template)
    async with start_router(fake, {"tiny": tmp_path / "model"}) as clients:
        chat = await clients.http.post("/v1/chat/completions", json={"messages": TURN, "reasoning_effort": effort})
        ask = {"input": "Hello", "reasoning": {"effort": effort}}
        response = await clients.http.post("/v1/responses", json=ask)
        documents = await clients.http.post(
            "/v1/chat/completions", json={"messages": TURN, "documents": [{"a": "b"}]}
        )
    assert (chat.status_code, response.status_code, documents.status_code) == (status, status, 400)
    if status == 400:
        assert chat.json()["error"]["param"] == "reasoning_effort"
        assert response.json()["error"]["param"] == "reasoning.effort"


async def test_the_open_inference_protocol_refuses_them_too(rich) -> None:
    for parameters in ({"use_beam_search": True}, {"regex": "a", "guided_json": {}}):
        body = {"text_input": "x", "parameters": parameters}
        answer = await rich.clients.http.post("/v2/models/tiny/generate", json=body)
        assert answer.status_code == 400
        assert next(iter(parameters)) in answer.json()["error"]
    sent = {"name": "sampling_parameters", "datatype": "BYTES", "shape": [1], "data": ['{"use_beam_search": true}']}
    text = {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["x"]}
    answer = await rich.clients.http.post("/v2/models/tiny/infer", json={"inputs": [text, sent]})
    assert (answer.status_code, "use_beam_search" in answer.text) == (400, True)


@pytest.fixture
def service(fake, rich_dir) -> GenerationService:
    return generation_of(RouterConfig(), fake, ModelCatalog(fake.models, {"tiny": rich_dir}))


@pytest.mark.parametrize("surface", ["completions", "chat", "responses"])
async def test_a_line_of_a_batch_refuses_and_obeys_the_same(service, fake, surface: str) -> None:
    def line(**more: Any) -> BatchLine:
        return BatchLine("1", "POST", PATHS.get(surface, f"/v1/{surface}"), BASE[surface] | more)

    refused, good = await answer_line(service, line(use_beam_search=True), "r")
    assert not good
    assert refused["response"]["body"]["error"]["param"] == "use_beam_search"
    _, good = await answer_line(service, line(regex="a+"), "r")
    assert good
    assert fake.requests[-1].sampling.grammar.spec == "a+"


async def test_an_upload_refuses_a_field_of_its_form(rich) -> None:
    form = {"purpose": "batch", "expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}
    answer = await rich.clients.http.post("/v1/files", data=form, files={"file": ("a.jsonl", b"{}")})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "expires_after")


def test_the_tests_that_hold_the_rest_are_there() -> None:
    for name in HELD.values():
        path, _, test = name.partition("::")
        assert f"def {test}(" in (ROOT / path).read_text(), name
    assert of("batches", "done")
    assert of("files", "done")
