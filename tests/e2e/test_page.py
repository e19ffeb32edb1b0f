"""The page in a browser, as its users see it. With PENSTOCK_SCREENSHOTS=FOLDER pictures of it are kept there."""

from __future__ import annotations

import importlib.util
import io
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.deployments import DEMO, PACED, colocated, deployed
from tests.helpers.servers import QUICK, serving

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        BROWSER is None or importlib.util.find_spec("playwright") is None,
        reason="there is no Chromium, or no Playwright: tools/browser_setup.sh",
    ),
]
PATIENCE = 120_000  # ms


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # no sandbox inside containers, whose root has no namespaces of its own
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A tab; what goes wrong in its scripts fails the test."""
    context = browser.new_context(viewport={"width": 1280, "height": 860})
    page, faults = context.new_page(), []
    page.set_default_timeout(PATIENCE)
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("console", lambda said: said.type == "error" and faults.append(said.text))
    page.on("request", lambda request: request.url.startswith("http") or faults.append(request.url))
    yield page
    context.close()
    assert [fault for fault in faults if not re.search(r"status of 4\d\d|ERR_CONNECTION", fault)] == []


def keep(page: Any, name: str) -> None:
    if folder := os.environ.get("PENSTOCK_SCREENSHOTS"):
        page.screenshot(path=str(Path(folder) / f"{name}.png"))


def say(page: Any, text: str, **settings: str) -> None:
    if settings:
        page.get_by_text("Settings", exact=True).click()
        for name, value in settings.items():
            page.locator(f"#ask [name={name}]").fill(value)
        page.get_by_text("Settings", exact=True).click()
    page.get_by_label("Message").fill(text)
    page.keyboard.press("Enter")


def last_answer(page: Any) -> Any:
    return page.locator(".turn.assistant").last


def test_chat(page: Any, alone: Any) -> None:
    page.goto(alone.url)
    assert page.locator("#attach").is_hidden(), "the model takes text alone"
    say(page, "What is a module?", max_tokens="40", seed="1", temperature="0.8")
    last_answer(page).get_by_text("first token after").wait_for()
    first = last_answer(page).locator(".body").inner_text()
    assert first
    assert re.search(r"40 tokens, [\d.,]+ a second", last_answer(page).locator(".foot").inner_text())
    keep(page, "chat")
    page.get_by_role("button", name="Regenerate").click()  # the seed is the same
    last_answer(page).get_by_text("first token after").wait_for()
    assert last_answer(page).locator(".body").inner_text() == first
    say(page, "And another one?")
    page.locator(".turn.assistant").nth(1).wait_for()
    last_answer(page).get_by_text("cached").wait_for()  # the first turn is
    page.get_by_role("button", name="Edit").last.click()
    assert page.get_by_label("Message").input_value() == "And another one?"
    assert page.locator(".turn").count() == 2
    # where it ran
    page.get_by_role("link", name="where it ran").click()
    page.get_by_text("To engine-0").wait_for()
    assert page.locator("svg.lanes rect").count() >= 2
    keep(page, "request")
    page.get_by_role("textbox", name="Request").fill("nobody")
    page.get_by_role("button", name="Explain").click()
    page.get_by_text("is not among the").wait_for()


def test_images_are_sent_and_shown(page: Any) -> None:
    """To models that take them alone."""
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (200, 200), "white")
    ImageDraw.Draw(image).ellipse((40, 40, 160, 160), fill="red")
    file = io.BytesIO()
    image.save(file, "PNG")
    with serving("demo-vl") as server:
        page.goto(server.url)
        page.locator("#attach").wait_for()
        picture = {"name": "circle.png", "mimeType": "image/png", "buffer": file.getvalue()}
        page.locator("#ask [name=files]").set_input_files([picture, picture])
        page.locator("#pictures img").nth(1).wait_for()  # files are read one after the other
        assert page.locator("#pictures img").count() == 2
        page.locator("#pictures button").first.click()
        say(page, "What is in the picture?")
        last_answer(page).get_by_text("first token after").wait_for()
        assert last_answer(page).locator(".body").inner_text() == "A red circle."
        assert page.locator(".turn.user img.seen").count() == 1
        assert page.locator("#pictures img").count() == 0
        say(page, "What shape is it?")  # the picture stays in the conversation
        page.locator(".turn.assistant").nth(1).get_by_text("first token after").wait_for()
        assert last_answer(page).locator(".body").inner_text() == "A circle."
        keep(page, "images")


def test_who_looks_at_images_is_seen(page: Any) -> None:
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (200, 200), "red").save(file, "PNG")
    instances = [{"role": "encode"}, {"role": "prefill"}, {"role": "decode"}]
    with deployed({"model": "demo-vl", "engine": DEMO, "instances": instances}) as server:
        page.goto(server.url)
        page.locator("#attach").wait_for()
        page.locator("#ask [name=files]").set_input_files(
            [{"name": "a.png", "mimeType": "image/png", "buffer": file.getvalue()}]
        )
        page.locator("#pictures img").first.wait_for()
        say(page, "What is in the picture?")
        last_answer(page).get_by_text("first token after").wait_for()
        page.get_by_role("link", name="where it ran").click()
        page.get_by_text("Images by E+P+D: encode-0 is to look at 1").wait_for()
        for _ in range(50):  # the master hears a moment later how it ended
            if page.get_by_text("1 brought; waited").count():
                break
            page.wait_for_timeout(200)
            page.get_by_role("button", name="Explain").click()
        page.get_by_text("1 brought; waited").wait_for()
        keep(page, "request_with_image")
        page.goto(f"{server.url}#cluster")
        card = page.locator(".card", has=page.get_by_role("heading", name="Encode: 1"))
        card.get_by_role("columnheader", name="tokens to look at").wait_for()
        assert card.get_by_role("columnheader", name="TPOT").count() == 0
        assert card.locator("tbody td").nth(3).inner_text() == "1"
        keep(page, "encode_pool")


def test_an_answer_is_stopped_by_a_key_and_a_fault_is_told(page: Any) -> None:
    with deployed(colocated(1, engine=PACED | {"slowdown": 20})) as server:  # minutes for what is asked
        page.goto(server.url)
        say(page, "Go on and on.", max_tokens="3000")
        last_answer(page).locator(".body p").first.wait_for()
        page.keyboard.press("Escape")
        last_answer(page).get_by_text("stopped").wait_for()
        say(page, "hello", top_p="5")
        last_answer(page).get_by_role("alert").wait_for()
        assert "top_p" in last_answer(page).get_by_role("alert").inner_text()


def test_what_a_model_writes_is_text(page: Any, alone: Any) -> None:
    """Markdown, whole and cut anywhere, without markup of its own."""
    page.goto(alone.url)
    text = (
        "# One\n\n**b** and *i* `c`, ~~d~~ snake_case_name\n\n- a\n  - b\n1. x\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n"
    )
    text += (
        "> q\n\n```python\nprint('<b>')\n```\n<script>alert(1)</script> [x](javascript:alert(1)) [y](https://e.org/)"
    )
    found = page.evaluate(
        """async (text) => {
            const { Markdown } = await import('/page/markdown.js');
            const whole = document.createElement('div'), grown = document.createElement('div');
            new Markdown(whole).show(text);
            const growing = new Markdown(grown);
            for (let i = 0; i <= text.length; i += 1) growing.show(text.slice(0, i));
            return [whole.innerHTML, grown.innerHTML, [...whole.querySelectorAll('a')].map((a) => a.href)];
        }""",
        text,
    )
    assert found[0] == found[1]
    assert found[2] == ["https://e.org/"]
    for part in (
        "<strong>b</strong>",
        "<em>i</em>",
        "<code>c</code>",
        "<del>d</del>",
        "<ol",
        "<td>2</td>",
        "blockquote",
    ):
        assert part in found[0]
    assert "snake_case_name" in found[0]
    assert "<script" not in found[0]
    assert "print('&lt;b&gt;')" in found[0]


def test_the_cluster_while_an_engine_dies(page: Any, pair: Any) -> None:
    page.goto(f"{pair.url}/#cluster")
    page.get_by_role("cell", name="engine-1", exact=True).first.wait_for()
    page.locator(".state.ready").nth(1).wait_for()
    pair.kill("engine-1")
    page.locator(".state.absent").wait_for()
    keep(page, "cluster-broken")
    page.locator(".state.absent").wait_for(state="detached")
    page.locator(".state.ready").nth(1).wait_for()
    page.get_by_text("absent → ready").wait_for()
    page.get_by_role("link", name="Chat").click()
    say(page, "Are you back?", max_tokens="8")
    last_answer(page).get_by_text("first token after").wait_for()
    page.get_by_role("link", name="Cluster").click()
    page.get_by_role("heading", name="Latest decisions").wait_for()
    keep(page, "cluster")


def test_of_several_models_one_is_chosen(page: Any) -> None:
    models = [{"name": name, "model": "demo", "engine": PACED, "instances": [{}]} for name in ("small", "large")]
    with deployed({"models": models}) as server:
        page.goto(f"{server.url}/#cluster")
        page.get_by_role("cell", name="small/engine-0", exact=True).first.wait_for()
        page.locator("#link").get_by_text("small, large, penstock").wait_for()
        page.locator("#cluster select").select_option("large")
        page.get_by_role("cell", name="large/engine-0", exact=True).first.wait_for()
        assert page.get_by_role("cell", name="small/engine-0", exact=True).count() == 0
        keep(page, "cluster-models")
        page.reload()
        page.get_by_role("cell", name="large/engine-0", exact=True).first.wait_for()
        page.get_by_role("link", name="Chat").click()
        page.get_by_text("Settings", exact=True).click()
        page.locator("#ask [name=model]").select_option("large")
        page.get_by_text("Settings", exact=True).click()
        say(page, "hello", max_tokens="5")
        last_answer(page).get_by_text("first token after").wait_for()
        page.get_by_role("link", name="where it ran").click()
        page.get_by_text("To large/engine-0").wait_for()


def test_a_key_is_asked_for_and_kept_in_the_tab(page: Any) -> None:
    with serving("demo", *QUICK, "--api-key", "sesame") as server:
        page.goto(server.url)
        field = page.get_by_label("API key", exact=True)
        field.fill("wrong")
        page.keyboard.press("Enter")
        page.locator("#link.bad").wait_for()
        page.get_by_role("button", name="API key").click()
        field.fill("sesame")
        page.keyboard.press("Enter")
        page.locator("#link:not(.bad)").get_by_text("demo").wait_for()
        say(page, "hello", max_tokens="5")
        last_answer(page).get_by_text("first token after").wait_for()
        page.reload()
        page.locator("#link:not(.bad)").get_by_text("demo").wait_for()
        assert page.evaluate("[localStorage.length, Object.keys(sessionStorage)]") == [0, ["penstock.key"]]
        other = page.context.new_page()
        other.goto(server.url)
        other.get_by_label("API key", exact=True).wait_for()  # it is this tab's alone


def test_several_people_watch(browser: Any, alone: Any) -> None:
    """Each with a browser: one of them has six connections to a server, and no more. Fifty are in tests/api."""
    contexts = [browser.new_context() for _ in range(5)]
    pages = [context.new_page() for context in contexts]
    for each in pages:
        each.goto(f"{alone.url}/#cluster", wait_until="commit")
    for each in pages:
        each.get_by_role("heading", name="Latest decisions").wait_for(timeout=PATIENCE)
    for context in contexts:
        context.close()


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_no_barriers(page: Any, alone: Any, theme: str, width: int) -> None:
    """By axe-core's rules; and nothing is wider than a phone."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    page.emulate_media(color_scheme=theme)
    page.set_viewport_size({"width": width, "height": 844})
    page.goto(alone.url)
    say(page, "Write `code` please.", max_tokens="8")
    last_answer(page).get_by_text("where it ran").wait_for()
    link = last_answer(page).get_by_text("where it ran").get_attribute("href")
    for view, there in (("#chat", ".turn.assistant .foot"), ("#cluster", "table.rows"), (link, "svg.lanes")):
        page.goto(f"{alone.url}/{view}")
        page.wait_for_timeout(0)
        if view == "#chat":
            page.get_by_text("Settings", exact=True).click()
        else:
            page.locator(there).first.wait_for()
        keep(page, f"{view[1:].partition('/')[0]}-{theme}-{width}")
        found = [each for each in axe.run(page).response["violations"] if each["impact"] in ("serious", "critical")]
        assert not found, [(each["id"], [node["html"] for node in each["nodes"]][:3]) for each in found]
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
