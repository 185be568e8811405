"""The page in a real headless browser, before a real cluster: what it shows, what its buttons do, where it fits."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator

import msgspec
import pytest
import redis as blocking

from baton.cluster.adapters import AdapterEntry
from tests.router.dashboard.watched import Watched, until

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no chromium on the PATH")
TROUBLE = ("error", "warning")


@pytest.fixture(scope="module")
def browser() -> Iterator[object]:
    with sync_api.sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield running
        running.close()


@pytest.fixture
def opened(browser, watched):
    """Opens the page, with the admin's key unless told otherwise; in the end nothing was complained about."""
    contexts, complaints = [], []

    def open_page(key: str | None = watched.admin, **settings):
        context = browser.new_context(**settings)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda m: complaints.append(m.text) if m.type in TROUBLE else None)
        page.on("pageerror", lambda e: complaints.append(str(e)))
        if key is not None:
            page.add_init_script(f"sessionStorage.setItem('baton-key', {json.dumps(key)})")
        page.goto(watched.url + "/dashboard/")
        if key is not None:
            page.wait_for_selector('#status[data-state="live"]')
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert [c for c in complaints if "401" not in c and "net::ERR_FAILED" not in c] == []


def some_requests(watched: Watched, count: int = 4) -> None:
    for _ in range(count):
        assert watched.ask(tokens=100, output=5).status_code == 200


def handoffs_failed(watched: Watched) -> int:
    return sum(flow["failures"] for flow in watched.snapshot()["flows"])


def test_the_picture_shows_every_worker_and_the_kv_between_them(watched, opened):
    failed = handoffs_failed(watched)  # by the tests before this one, which took workers away
    some_requests(watched)
    assert handoffs_failed(watched) == failed
    page = opened(viewport={"width": 1300, "height": 900})
    assert page.locator("#prefill .node .id").all_text_contents() == ["prefill-0"]
    assert page.locator("#decode .node .id").all_text_contents() == ["decode-0", "decode-1"]
    assert page.locator("#router .queue").count() == 2
    until(lambda: page.evaluate("document.querySelectorAll('.flows path.kv').length >= 1"))
    assert f"handoffs, {failed or 'none'} failed" in page.locator("#flow-note").text_content()
    assert page.locator("#dial .ratio").text_content() == "1 : 2"
    assert page.locator("#class-rows tr").count() == 2


def _serve_adapter(watched: Watched) -> None:
    config, entry = (
        watched.cluster.config,
        AdapterEntry("sql", watched.cluster.model, "team/sql", "1" * 16, pinned=True),
    )
    with blocking.Redis.from_url(config.redis.url) as redis:
        redis.hset(f"{{{config.cluster.namespace}}}:adapters", "sql", msgspec.json.encode(entry))


def test_adapters_have_a_table_where_there_are_any(watched, opened):
    page = opened(viewport={"width": 1300, "height": 900})
    assert not page.locator("#adapters").is_visible()
    _serve_adapter(watched)
    page.wait_for_selector("#adapter-rows td")
    cells = page.locator("#adapter-rows td").all_text_contents()
    assert cells == ["sql", "1" * 16, "all", "yes", "no worker"]


def test_figures_move_while_requests_run(watched, opened):
    page = opened(viewport={"width": 1300, "height": 900})
    with watched.load(per_second=12):
        until(
            lambda: page.evaluate(
                "[...document.querySelectorAll('.figure')].some(f => f.textContent.startsWith('Tokens out') "
                "&& parseFloat(f.querySelector('.value span').textContent) > 1)"
            )
        )
    assert page.locator("#figures .figure").count() >= 6


def test_a_click_on_a_request_explains_it(watched, opened):
    some_requests(watched, 2)
    page = opened(viewport={"width": 1300, "height": 900})
    page.locator("#waterfall .request").first.click()
    page.wait_for_selector("#details h3")
    said = page.locator("#details").text_content()
    assert "Predicted against seen" in said
    assert "taken" in said
    assert "prefill-0" in said
    page.keyboard.press("Escape")
    assert not page.locator("#details").is_visible()


def test_drain_asks_once_more_and_put_back_undoes_it(watched, opened):
    page = opened(viewport={"width": 1300, "height": 900})
    page.locator("#decode .node", has_text="decode-1").click()
    drain = page.locator("#details .actions button", has_text="Drain")
    drain.click()
    assert watched.worker("decode-1")["hold"] is None
    drain.click()
    until(lambda: watched.worker("decode-1")["hold"])
    until(lambda: page.evaluate("document.querySelector('#details .outcome').textContent.startsWith('Drained')"))
    page.keyboard.press("Escape")
    page.wait_for_selector("#decode .node.away")
    page.locator("#decode .node", has_text="decode-1").click()
    page.locator("#details .actions button", has_text="Put back").click()
    until(lambda: watched.worker("decode-1")["hold"] is None)


def test_an_open_worker_is_kept_up_to_date(watched, opened):
    page = opened(viewport={"width": 1300, "height": 900})
    page.locator("#decode .node", has_text="decode-1").click()
    heard = page.locator("#details .facts > div", has_text="last heard of").locator("dd")
    first = heard.text_content()
    until(lambda: heard.text_content() != first)
    assert page.locator("#details .actions button").all_text_contents()[0] == "Drain"
    try:
        assert watched.hold("decode-1", "drain").status_code == 200
        page.wait_for_selector("#details .actions button >> text=Put back")
        page.wait_for_selector("#details .facts >> text=drain by ops")
    finally:
        watched.hold("decode-1", "none")
    until(lambda: page.locator("#details .actions button").all_text_contents()[0] == "Drain")


def test_a_page_that_nobody_sees_gives_its_connection_back(watched, opened):
    page = opened(viewport={"width": 1300, "height": 900})
    assert page.title() == "bench.toml · Baton"
    given_up = []
    page.on("requestfailed", lambda request: given_up.append(request.url))
    page.evaluate("Object.defineProperty(document, 'hidden', {get: () => !window.isSeen, configurable: true})")
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
    page.wait_for_selector('#status[data-state="wait"]')
    assert [url.rpartition("/")[2] for url in given_up] == ["stream"]
    page.evaluate("window.isSeen = true; document.dispatchEvent(new Event('visibilitychange'))")
    page.wait_for_selector('#status[data-state="live"]')


def test_a_change_of_role_is_offered_and_done(watched, opened):
    page = opened(viewport={"width": 1300, "height": 900})
    page.locator("#decode .node", has_text="decode-1").click()
    become = page.locator("#details .actions button", has_text="prefill worker")
    become.click()
    become.click()
    try:
        until(lambda: page.evaluate("document.querySelectorAll('#prefill .node').length === 2"))
        until(lambda: watched.worker("decode-1")["role"] == "prefill")
        page.keyboard.press("Escape")
        page.wait_for_selector("#changes li.rerole")
    finally:
        body = {"role": "decode"}
        assert watched.http.post("/v1/workers/decode-1/role", json=body).status_code == 200
    until(lambda: watched.worker("decode-1")["state"] == "ready")


def test_a_key_is_asked_for_and_a_wrong_one_refused(watched, opened):
    page = opened(key=None, viewport={"width": 1300, "height": 900})
    page.wait_for_selector("#login[open]")
    for _ in range(3):
        page.keyboard.press("Escape")
    page.fill("#key", "bt-wrong")
    page.click("#login .primary")
    until(lambda: page.evaluate("document.querySelector('#login-error').textContent.includes('not valid')"))
    page.fill("#key", watched.admin)
    page.keyboard.press("Enter")
    page.wait_for_selector('#status[data-state="live"]')
    assert not page.locator("#login").is_visible()


def test_it_fits_a_phone(watched, opened):
    some_requests(watched, 1)
    page = opened(viewport={"width": 360, "height": 740}, device_scale_factor=2, has_touch=True)
    page.wait_for_selector("#waterfall .request")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    small = page.evaluate(
        "[...document.querySelectorAll('button')].filter(b => b.offsetHeight && b.offsetHeight < 28).length"
    )
    assert small == 0


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.thorough)])
def test_text_is_readable_in_both_schemes(opened, scheme):
    """WCAG AA asks for 4.5 to 1 between the inks of text and the card that they lie on."""
    page = opened(viewport={"width": 1300, "height": 900}, color_scheme=scheme)
    ratios = page.evaluate(
        """() => {
          const light = (c) => {
            const p = c.map((v) => v / 255).map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
            return 0.2126 * p[0] + 0.7152 * p[1] + 0.0722 * p[2];
          };
          const rgb = (name) => {
            const probe = document.createElement('i');
            probe.style.color = `var(--${name})`;
            document.body.append(probe);
            const found = getComputedStyle(probe).color.match(/[\\d.]+/g).slice(0, 3).map(Number);
            probe.remove();
            return found;
          };
          const card = light(rgb('card'));
          const against = (l) => (Math.max(l, card) + 0.05) / (Math.min(l, card) + 0.05);
          const names = ['ink', 'soft', 'bad', 'warn', 'good', 'accent', 'prefill', 'decode'];
          return Object.fromEntries(names.map((n) => [n, against(light(rgb(n)))]));
        }"""
    )
    assert {
        name: round(r, 2) for name, r in ratios.items() if r < (4.5 if name not in ("decode", "good") else 3.9)
    } == {}


def test_it_says_when_nothing_can_be_answered(watched, opened):
    page = opened(viewport={"width": 1300, "height": 900})

    def said(**changes: object) -> list[str]:
        snapshot = watched.snapshot() | changes
        return page.evaluate("(s) => import('/dashboard/standing.js').then((m) => m.standing(s))", snapshot)

    assert said()[0] == "live"
    pools = watched.snapshot()["pools"]
    none = pools | {"decode": pools["decode"] | {"ready": 0, "workers": 2}}
    assert said(pools=none) == ["lost", "no decode worker is ready (of 2): requests are refused"]
    assert said(redis={"away_s": 5}) == ["lost", "Redis is away for 5 s: workers are shown as last seen"]


def test_it_says_when_the_router_is_gone(watched, opened):
    page = opened(viewport={"width": 1300, "height": 900})
    page.route("**/v1/cluster/stream", lambda route: route.abort())
    page.reload()
    page.wait_for_selector('#status[data-state="lost"]')
    assert "trying again" in page.locator("#status").text_content()
