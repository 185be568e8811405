"""Our OpenAPI document is complete and true: schemathesis asks what it describes and finds no server error."""

from __future__ import annotations

import asyncio
import shutil
import sys
from pathlib import Path

import pytest

from baton.cluster.batch_store import BatchStore

QUIETLY = ("--no-shrink", "--warnings", "off")
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
TOOL = Path(sys.executable).with_name("schemathesis")


@pytest.fixture
async def whole_router(start_router, fake, model_dir, redis):
    async with start_router(fake, {"tiny": model_dir}, batches=BatchStore(redis, "t")) as clients:
        yield clients


async def run(router, *arguments: str) -> str:
    """The tool's output; fails with it when a check failed."""
    command = [str(TOOL), "--no-color", "run", f"{router.address.url}/openapi.json", "--checks", CHECKS]
    process = await asyncio.create_subprocess_exec(
        *command, *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()[-6000:]
    return output.decode()


@pytest.mark.skipif(not TOOL.exists() and shutil.which("schemathesis") is None, reason="schemathesis is missing")
async def test_a_short_run_finds_no_server_error_and_nothing_undocumented(whole_router) -> None:
    output = await run(
        whole_router, "-n", "3", "--phases", "examples,fuzzing", "--seed", "5", "--no-shrink", "--warnings", "off"
    )
    assert "No issues found" in output


@pytest.mark.soak
@pytest.mark.timeout(3600)
async def test_a_long_run_finds_no_server_error_and_nothing_undocumented(whole_router) -> None:
    await run(
        whole_router, "-n", "2000", "--phases", "examples,coverage,fuzzing", "--no-shrink", "--warnings", "off"
    )


async def test_every_route_is_described_with_its_body_its_errors_and_one_name(router) -> None:
    document = (await router.http.get("/openapi.json")).json()
    names = [op["operationId"] for path in document["paths"].values() for op in path.values()]
    assert len(names) == len(set(names))
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            assert "default" in operation["responses"], (method, path)
            assert "422" not in operation["responses"]
            if method == "post" and path not in ("/v2/repository/index", "/v1/batches/{job_id}/cancel"):
                assert operation["requestBody"]["required"], path
    prompt = document["components"]["schemas"]["CompletionBody"]["properties"]["prompt"]
    assert {"type": "string"} in prompt["anyOf"]
