"""Our OpenAPI document is true: schemathesis asks a whole cluster; all answers are as described.

``BATON_SCHEMATHESIS`` sets the soak's number of examples per operation: 2,000 unless told.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.fleet import Fleet
from tests.e2e.test_fuzz import ENDLESS, PROFILE

CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance,"
    "response_headers_conformance"
)
TOOL = Path(sys.executable).with_name("schemathesis")
EXAMPLES = os.environ.get("BATON_SCHEMATHESIS", "2000")

pytestmark = pytest.mark.skipif(not TOOL.exists(), reason="schemathesis is missing")


def run(folder: Path, *arguments: str) -> str:
    """Returns the tool's output; fails with it if a check failed."""
    profile = folder / "quick.toml"
    profile.write_text(PROFILE)
    with Fleet(prefill=1, decode=1, worker={"device": f"paced:{profile}"}) as fleet:
        command = [str(TOOL), "--no-color", "run", f"{fleet.url}/openapi.json", "--checks", CHECKS, "--no-shrink"]
        endless = [part for path in ENDLESS for part in ("--exclude-path", path)]
        done = subprocess.run(
            [*command, "--warnings", "off", "--suppress-health-check", "filter_too_much", *endless, *arguments],
            capture_output=True,
            text=True,
            cwd=folder,
        )
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-1000:]
        fleet.wait_for_baseline()
    return done.stdout


@pytest.mark.thorough  # of single operations: tests/router/api/test_openapi.py
def test_a_short_run_finds_no_server_error_and_nothing_undescribed(tmp_path: Path) -> None:
    assert "No issues found" in run(tmp_path, "-n", "2", "--phases", "examples,fuzzing", "--seed", "5")


@pytest.mark.soak
@pytest.mark.timeout(4 * 3600)
def test_a_long_run_finds_no_server_error_and_nothing_undescribed(tmp_path: Path) -> None:
    print(run(tmp_path, "-n", EXAMPLES, "--phases", "examples,coverage,fuzzing")[-1500:])
