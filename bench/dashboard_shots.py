"""Pictures of the dashboard for the docs: a real cluster under real load, seen by a real headless browser.

    .venv/bin/python bench/dashboard_shots.py [--out docs/figures] [--seconds 40]

Needs chromium on the PATH, playwright and a quiet machine. 3P4D of paced workers serve a mix of chats (shared
prefixes) and documents; nothing on the pictures is made up: advice and changes are the controller's own. Taken are:
normal load, light, dark and on a phone; why one request went where it went; a worker that became another while
requests run; and overload.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from baton.bench.router.cluster import PROFILE
from baton.launch.fleet import Fleet

CLASSES = (
    {"name": "short", "max_tokens": 1024, "slo_ttft_s": 1.0, "slo_tpot_s": 0.08},
    {"name": "medium", "max_tokens": 4096, "slo_ttft_s": 2.0, "slo_tpot_s": 0.08},
    {"name": "long", "max_tokens": 0, "slo_ttft_s": 4.0, "slo_tpot_s": 0.08},
)
NORMAL, OVERLOAD = 6.0, 60.0  # requests per second
WIDE: dict[str, Any] = {"viewport": {"width": 1280, "height": 900}}
PHONE: dict[str, Any] = {"viewport": {"width": 360, "height": 760}, "device_scale_factor": 2, "has_touch": True}


def cluster(folder: Path) -> Fleet:
    """Workers about as fast as a small accelerator; the controller advises and touches nothing."""
    profile = folder / "paced-8b.toml"
    profile.write_text(PROFILE.format(about="for pictures", pages=2000, fixed=0.012, prefill=9e-5, chunk=1024))
    return Fleet(
        cluster={"prefill": 3, "decode": 4},
        router={"context_classes": CLASSES, "max_queue": 96},
        worker={"device": f"paced:{profile}", "max_batch": 24, "model_name": "paced-8b"},
        telemetry={"prefill_dollars_per_hour": 2.0, "decode_dollars_per_hour": 2.0},
        controller={"mode": "advise", "interval_s": 5.0, "dial_s": 15.0, "window_s": 30.0},
    )


class Load:
    """Poisson arrivals at ``rate`` from a thread of its own, until ``stop``."""

    def __init__(self, url: str, model: str) -> None:
        self.rate = NORMAL
        self._url, self._model, self._over = url, model, threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        self._thread.join()

    async def _run(self) -> None:
        rng = random.Random(5)
        chats = [[rng.randrange(10, 30_000) for _ in range(1400)] for _ in range(6)]
        limits = httpx.Limits(max_connections=2000)
        async with httpx.AsyncClient(base_url=self._url, timeout=60, limits=limits) as client:
            asked: set[asyncio.Task[None]] = set()
            while not self._over.is_set():
                task = asyncio.create_task(self._ask(client, self._body(rng, chats)))
                asked.add(task)
                task.add_done_callback(asked.discard)
                await asyncio.sleep(rng.expovariate(self.rate))
            await asyncio.gather(*asked, return_exceptions=True)

    def _body(self, rng: random.Random, chats: list[list[int]]) -> dict[str, Any]:
        known = rng.choice(chats)[: rng.choice((0, 320, 800, 1400))]
        fresh = [rng.randrange(10, 30_000) for _ in range(min(9000, 24 + int(rng.lognormvariate(5.6, 1.1))))]
        return {"model": self._model, "prompt": known + fresh, "max_tokens": rng.choice((24, 64, 128)),
                "ignore_eos": True, "stream": True}  # fmt: skip

    @staticmethod
    async def _ask(client: httpx.AsyncClient, body: dict[str, Any]) -> None:
        with contextlib.suppress(httpx.HTTPError):
            async with client.stream("POST", "/v1/completions", json=body) as answer:
                async for _ in answer.aiter_bytes():
                    pass


@contextmanager
def opened(browser: Any, url: str, scheme: str = "light", **settings: Any) -> Iterator[Any]:
    """Opens the dashboard in ``browser`` and yields the page once it shows live data."""
    context = browser.new_context(color_scheme=scheme, **settings)
    page = context.new_page()
    page.goto(url + "/dashboard/")
    page.wait_for_selector('#status[data-state="live"]')
    yield page
    context.close()


def take(fleet: Fleet, load: Load, browser: Any, out: Path, seconds: float) -> None:
    """Every picture, in the order in which things happen."""
    with opened(browser, fleet.url, **WIDE) as light, opened(browser, fleet.url, "dark", **WIDE) as dark:
        time.sleep(seconds)
        light.screenshot(path=out / "dashboard.png", full_page=True)
        dark.screenshot(path=out / "dashboard_dark.png", full_page=True)
        light.locator("#waterfall .request").nth(2).click()
        light.wait_for_selector("#details h3")
        light.screenshot(path=out / "dashboard_explain.png")
        light.keyboard.press("Escape")
        with opened(browser, fleet.url, **PHONE) as phone:
            time.sleep(3)
            phone.screenshot(path=out / "dashboard_phone.png", full_page=True)
        changing = threading.Thread(target=change, args=(fleet.url, "decode-3", "prefill"))
        changing.start()
        light.mouse.move(5, 5)
        light.wait_for_selector("#changes li.rerole")
        light.screenshot(path=out / "dashboard_rerole.png", full_page=True)
        changing.join()
        change(fleet.url, "decode-3", "decode")
        load.rate = OVERLOAD
        time.sleep(max(12.0, seconds / 2))
        light.screenshot(path=out / "dashboard_overload.png", full_page=True)


def change(url: str, worker: str, role: str) -> None:
    """Changes a worker's role by the request that the dashboard's button sends."""
    httpx.post(
        f"{url}/v1/workers/{worker}/role", json={"role": role, "grace_s": 5.0}, timeout=60
    ).raise_for_status()


def main() -> int:
    """Exit status 1 where there is no browser."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent.parent / "docs/figures")
    parser.add_argument("--seconds", type=float, default=40.0, help="of normal load before the first picture")
    arguments = parser.parse_args()
    found = shutil.which("chromium") or shutil.which("google-chrome")
    if found is None:
        print("no chromium on the PATH (Debian: apt-get install chromium)", file=sys.stderr)
        return 1
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory(prefix="bd-") as folder, cluster(Path(folder)) as fleet:
        with sync_playwright() as playwright, Load(fleet.url, fleet.name) as load:
            browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
            take(fleet, load, browser, arguments.out, arguments.seconds)
            browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
