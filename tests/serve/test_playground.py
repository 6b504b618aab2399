"""The playground in a real browser, with real and with misbehaving servers."""

import json
import math
import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
import requests
from playwright.sync_api import Browser, Locator, Page, expect, sync_playwright
from tokenizers import Tokenizer

from lathe_serving.client.playground import playground, serve_exports
from lathe_serving.runtime.kv_cache import BLOCK
from lathe_serving.server import TritonServer
from tests.support.fake_openai import STREAM, answering, chunked, error, piece, stream
from tests.support.gateways import opened, with_chat_template
from tests.support.small_export import make_model, write_unproven
from tests.support.small_models import SERVED

pytestmark = pytest.mark.slow  # a browser

LONG: dict[str, Any] = {"prompt": "hello", "max_tokens": 900, "temperature": 1, "top_p": 0.75}
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
WHEN = """
window.when = [[], []];
document.addEventListener("DOMContentLoaded", () => {
  for (const [side, answer] of document.querySelectorAll(".answer").entries()) {
    new MutationObserver((changes) => {
      for (const change of changes) {
        for (const node of change.addedNodes) {
          if (node.classList?.contains("token")) window.when[side].push(performance.now());
        }
      }
    }).observe(answer, { childList: true });
  }
});
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip(f"no browser: none of {', '.join(BROWSERS)} is installed")
    with sync_playwright() as tools:
        browser = tools.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    page = browser.new_page()
    page.set_default_timeout(30_000)
    page.add_init_script(WHEN)
    failures: list[str] = []
    page.on("pageerror", lambda failure: failures.append(str(failure)))
    yield page
    page.close()
    assert failures == []


@pytest.fixture(scope="module")
def compared(
    triton: None,
    tmp_path_factory: pytest.TempPathFactory,
    exported: Path,
    byte_tokenizer: Tokenizer,
) -> Iterator[TritonServer]:
    """A server with two models."""
    other = tmp_path_factory.mktemp("int8")
    write_unproven(make_model(SERVED, int8=True), byte_tokenizer, other)
    with serve_exports({"dense": exported, "int8": other}) as server:
        yield server


@contextmanager
def opening(page: Page, *urls: str, **fields: str | float) -> Iterator[None]:
    with playground(urls) as address:
        page.goto(f"{address}/?{urlencode(fields)}" if fields else address)
        yield


def side(page: Page, index: int = 0) -> Locator:
    return page.locator(".pane").nth(index)


def finish(page: Page) -> None:
    expect(page.get_by_role("button", name="Stop")).to_be_disabled(timeout=60_000)


def answer_text(page: Page, index: int = 0) -> str:
    tokens = side(page, index).locator(".token").all_text_contents()
    return "".join(tokens)


def find_long_answer_seed(url: str, *models: str) -> int:
    """Find a seed with long completions: for most seeds, random models stop early."""
    for seed in range(200):
        answers = [completion(url, model=m, seed=seed, logprobs=0, **LONG) for m in models]
        if all(len(answer["logprobs"]["tokens"]) > 200 for answer in answers):
            return seed
    pytest.fail("no seed gives a long completion")


def completion(url: str, **body: Any) -> dict[str, Any]:
    reply = requests.post(f"{url}/completions", json=body, timeout=60)
    assert reply.ok, reply.text
    choice: dict[str, Any] = reply.json()["choices"][0]
    return choice


def test_tokens_appear_one_after_another(page: Page, base_url: str) -> None:
    with opening(page, base_url, seed=find_long_answer_seed(base_url, "gpt"), **LONG):
        finish(page)
        moments = page.evaluate("window.when[0]")
        assert len(moments) > 40 and len(set(moments)) > 15
        assert re.fullmatch(
            r"first token after \d+ ms · \d+ tokens · [\d.]+ tokens/s",
            side(page).locator(".figures").inner_text(),
        )
        expect(side(page).locator(".end")).to_have_text(re.compile("^ended "))
        expect(side(page, 1)).to_be_hidden()


def test_text_and_probabilities_are_those_of_the_api(page: Page, base_url: str) -> None:
    prompt = "All that <b>glitters</b> \u2028 \U0001f642"
    told = completion(
        base_url, model="gpt", prompt=prompt, temperature=0, top_p=0.75, max_tokens=40, logprobs=5
    )
    scored = told["logprobs"]
    with opening(page, base_url, prompt=prompt, temperature=0, max_tokens=40):
        finish(page)
        assert answer_text(page) == told["text"]
        expect(side(page).locator(".prompt")).to_have_text(prompt)
        parts = page.evaluate("[...document.querySelectorAll('.token')].flatMap((e) => e.parts)")
        assert [part["name"] for part in parts] == scored["tokens"][: len(parts)] and parts
        for part, logprob, top in zip(
            parts, scored["token_logprobs"], scored["top_logprobs"], strict=False
        ):
            assert part["logprob"] == pytest.approx(logprob, rel=1e-3)
            assert part["top"].keys() == top.keys()
        alone = page.evaluate(
            "[...document.querySelectorAll('.token')].findIndex((e) => e.parts.length === 1 "
            "&& e.textContent === e.parts[0].name)"
        )
        token = side(page).locator(".token").nth(alone)
        token.hover()
        at = scored["tokens"].index(token.inner_text())
        detail = side(page).locator(".detail")
        shown = [
            float(cell.split()[0]) for cell in detail.locator("td:nth-child(2)").all_inner_texts()
        ]
        values = sorted(scored["top_logprobs"][at].values(), reverse=True)
        assert shown == pytest.approx([100 * math.exp(v) for v in values], rel=0.06)
        chance = 100 * math.exp(scored["token_logprobs"][at])
        label = token.get_attribute("aria-label") or ""
        assert float(label.split(", ")[1].split()[0]) == pytest.approx(chance, rel=0.06)
        unlikely = token.evaluate("e => Number(e.style.getPropertyValue('--unlikely'))")
        assert unlikely == pytest.approx(min(1, -math.log10(chance / 100) / 4), abs=0.001)


def test_the_page_begins_with_the_recommended_parameters(page: Page, server: TritonServer) -> None:
    recommended = {"temperature": 0.6, "top_p": 0.95, "top_k": 20}
    with (
        opened(server, recommended=recommended) as address,
        opening(page, f"{address}/v1", temperature=0.1),
    ):
        expect(page.get_by_label("Top p")).to_have_value("0.95")
        expect(page.get_by_label("Temperature")).to_have_value("0.1")


def test_a_chat_sends_a_message_and_shows_what_else_was_likely(page: Page) -> None:
    top = [{"token": name, "logprob": math.log(p)} for name, p in (("Paris", 0.9), ("Rome", 0.1))]
    pieces = [
        {"delta": {"role": "assistant", "content": "Paris"}, "finish_reason": None}
        | {"logprobs": {"content": [{**top[0], "top_logprobs": top}]}},
        {"delta": {}, "finish_reason": "stop", "logprobs": None},
    ]
    events = [f"data: {json.dumps({'choices': [one]})}\n\n".encode() for one in pieces]
    with (
        answering(stream(*events)) as url,
        page.expect_request("**/0/chat/completions") as asked,
        opening(page, url, prompt="Where?", mode="chat", max_tokens=9),
    ):
        finish(page)
        assert answer_text(page) == "Paris"
        expect(side(page).locator(".end")).to_have_text("ended by itself")
        side(page).locator(".token").hover()
        expect(side(page).locator(".detail")).to_contain_text("Rome")
        body = asked.value.post_data_json
        assert body["messages"] == [{"role": "user", "content": "Where?"}]
        assert body["max_tokens"] == 9 and not {"prompt", "mode", "system"} & body.keys()


def send(page: Page, message: str) -> None:
    page.get_by_label("Message", exact=True).fill(message)
    page.get_by_role("button", name="Send").click()
    finish(page)


def test_a_chat_of_several_turns_remembers_them_and_reads_only_what_is_new(
    page: Page, server: TritonServer, tmp_path: Path
) -> None:
    bodies: list[Any] = []
    page.on("request", lambda request: bodies.append(request.post_data_json))
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
    with (
        opened(server, **with_chat_template(server, template, tmp_path)) as address,
        opening(page, f"{address}/v1", temperature=0, max_tokens=20),
    ):
        expect(page.locator("#mode")).to_have_value("chat")  # because the model has a template
        page.get_by_label("System prompt").fill("You are a captain of few words.")
        send(page, "Where does the ship go?")
        first = answer_text(page)
        expect(side(page).locator(".figures")).not_to_contain_text("cached")
        expect(page.get_by_label("Message", exact=True)).to_be_empty()
        send(page, "And then?")
        assert bodies[-1]["messages"] == [
            {"role": "system", "content": "You are a captain of few words."},
            {"role": "user", "content": "Where does the ship go?"},
            {"role": "assistant", "content": first},
            {"role": "user", "content": "And then?"},
        ]
        told = requests.post(
            f"{address}/v1/chat/completions", json=bodies[-1] | {"stream": False}, timeout=60
        ).json()
        assert answer_text(page) == first + told["choices"][0]["message"]["content"]
        expect(side(page).locator(".turn .prompt")).to_have_text(
            ["Where does the ship go?", "And then?"]
        )
        told_cached = r"· (\d+) of (\d+) prompt tokens cached"
        figures = re.search(told_cached, side(page).locator(".figures").inner_text())
        assert figures is not None and int(figures[1]) >= BLOCK
        assert int(figures[2]) == told["usage"]["prompt_tokens"]
        side(page).locator(".token").first.hover()  # a token of the first turn
        expect(side(page).locator(".detail")).to_contain_text("probability of")
        page.get_by_role("button", name="New chat").click()
        expect(side(page).locator(".turn")).to_have_count(0)
        send(page, "Hello")
        assert [m["role"] for m in bodies[-1]["messages"]] == ["system", "user"]


def test_a_stopped_answer_stays_in_the_chat_and_a_missing_one_does_not(page: Page) -> None:
    delta = {"delta": {"content": "Par"}, "finish_reason": None, "logprobs": None}
    begun = STREAM + chunked(f"data: {json.dumps({'choices': [delta]})}\n\n".encode())
    for reply, roles in ((begun, ["user", "assistant", "user"]), (b"", ["user"])):
        closed = threading.Event()
        with answering(reply, closed=closed) as url, opening(page, url, mode="chat"):
            page.get_by_label("Message", exact=True).fill("Where?")
            page.get_by_role("button", name="Send").click()
            expect(side(page).locator(".token" if reply else ".turn")).to_have_count(1)
            page.keyboard.press("Escape")
            expect(side(page).locator(".end")).to_have_text("stopped")
            kept = "" if reply else "Where?"
            expect(page.get_by_label("Message", exact=True)).to_have_value(kept)
            with page.expect_request("**/0/chat/completions") as asked:
                page.get_by_label("Message", exact=True).fill("Well?")
                page.get_by_role("button", name="Send").click()
            messages = asked.value.post_data_json["messages"]
            assert [message["role"] for message in messages] == roles
            assert messages[-1]["content"] == "Well?" and closed.wait(10)
            page.keyboard.press("Escape")  # cancels the second request too


def test_two_models_answer_side_by_side(page: Page, compared: TritonServer) -> None:
    url = str(compared.state.openai)
    fields = {**LONG, "seed": find_long_answer_seed(url, "dense", "int8")}
    with opening(page, url, **fields):
        finish(page)
        for index, model in enumerate(("dense", "int8")):
            expect(side(page, index).get_by_label("Model")).to_have_value(re.compile(model))
            told = completion(url, model=model, **fields)
            assert answer_text(page, index) == told["text"]
        expect(page.locator("#verdict")).to_have_text(re.compile(r"part at token \d+\."))
        side(page, 1).get_by_label("Model").select_option(label="dense")
        page.get_by_role("button", name="Generate").click()
        finish(page)
        expect(page.locator("#verdict")).to_have_text(re.compile(r"are the same, all \d+ tokens"))


def test_another_name_of_a_model_is_not_a_second_model(page: Page, server: TritonServer) -> None:
    with opened(server, aliases=("latest",)) as address:
        listed = requests.get(f"{address}/v1/models", timeout=30).json()["data"]
        assert [model["id"] for model in listed] == ["gpt", "latest"]
        with opening(page, f"{address}/v1", **LONG):
            finish(page)
            expect(side(page, 0).get_by_label("Model")).to_have_text("gpt")
            expect(side(page, 1)).to_be_hidden()


def test_two_servers_are_compared_as_well(page: Page) -> None:
    events = [stream(piece(text, "stop", {text: 0.5})) for text in ("one", "two")]
    with (
        answering(events[0]) as first,
        answering(events[1]) as second,
        opening(page, first, second, prompt="x"),
    ):
        finish(page)
        assert [answer_text(page, i) for i in (0, 1)] == ["one", "two"]
        expect(side(page, 1).get_by_label("Model")).to_contain_text(f"gpt on {second}")


def test_both_models_answer_concurrently_and_stop_together(page: Page) -> None:
    closed = [threading.Event(), threading.Event()]
    with (
        answering(b"", closed=closed[0]) as first,
        answering(b"", closed=closed[1]) as second,
        opening(page, first, second, prompt="x"),
    ):
        for index in (0, 1):
            expect(side(page, index).locator(".figures")).to_have_text("waiting")
        page.get_by_role("button", name="Stop").click()
        assert all(event.wait(10) for event in closed)


BEGUN = STREAM + chunked(piece("a", None, {"a": 0.5}))


@pytest.mark.parametrize("begun", [b"", BEGUN])
def test_stop_cancels_even_before_the_first_token(page: Page, begun: bytes) -> None:
    closed = threading.Event()
    with answering(begun, closed=closed) as url, opening(page, url, prompt="x"):
        if begun:
            expect(side(page).locator(".token")).to_have_text(["a"])
        else:
            expect(side(page).locator(".figures")).to_have_text("waiting")
        assert not closed.is_set()
        page.get_by_role("button", name="Stop").click()
        expect(side(page).locator(".end")).to_have_text("stopped")
        assert closed.wait(10)


def test_closing_the_page_cancels(browser: Browser) -> None:
    closed = threading.Event()
    with answering(b"", closed=closed) as url, playground([url]) as address:
        page = browser.new_page()
        page.goto(f"{address}/?prompt=x")
        expect(side(page).locator(".figures")).to_have_text("waiting")
        page.close()
        assert closed.wait(10)


def test_another_question_replaces_the_one_that_is_being_answered(
    page: Page, base_url: str
) -> None:
    with opening(page, base_url, seed=find_long_answer_seed(base_url, "gpt"), **LONG):
        expect(side(page).locator(".token").nth(5)).to_be_attached()
        page.get_by_label("New tokens").fill("5")
        page.get_by_label("Seed").fill("1")
        page.get_by_role("button", name="Generate").click()
        finish(page)
        told = completion(base_url, model="gpt", prompt="hello", max_tokens=5, top_p=0.75, seed=1)
        assert answer_text(page) == told["text"]
        expect(side(page).locator(".end")).to_have_text(re.compile("^ended"))


EVENT = b'data: {"error": {"message": "the model server failed", "type": "server_error"}}\n\n'


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (error("400 No", "top_p: too high"), "top_p: too high"),
        (error("503 No", "full", "Retry-After: 3"), "The server is busy: full. Ask again in 3 s."),
        (error("429 No", "full"), "The server is busy: full. Ask again later."),
        (b"HTTP/1.1 500 Oops\r\n\r\n", "The server answers with status 500."),
        (STREAM + chunked(piece("a"), EVENT), "the model server failed"),
        (STREAM + chunked(piece("a")), "The connection was lost before the answer was whole."),
        (stream(piece("a"))[:-30], "The connection was lost before the answer was whole."),
    ],
)
def test_an_error_is_shown_in_words(page: Page, reply: bytes, message: str) -> None:
    with answering(reply) as url, opening(page, url, prompt="x"):
        expect(side(page).get_by_role("alert")).to_have_text(message)
        finish(page)


def test_a_missing_server_is_reported(page: Page, base_url: str) -> None:
    with opening(page, "http://127.0.0.1:1/v1"):
        told = page.locator("#notice")
        expect(told).to_contain_text("no server answers on http://127.0.0.1:1/v1")
    page.get_by_role("button", name="Generate").click()
    expect(told).to_contain_text("Is lathe playground still running?")
    with opening(page, base_url, prompt="x", top_p=1.5):
        expect(side(page).get_by_role("alert")).to_contain_text("top_p: Input should be less")


def test_the_page_prompts_for_a_required_key(
    page: Page, server: TritonServer, tmp_path: Path
) -> None:
    (tmp_path / "keys").write_text("the-key\n")
    with opened(server, keys=tmp_path / "keys") as address, opening(page, f"{address}/v1"):
        expect(page.locator("#notice")).to_contain_text("The server wants an API key")
        expect(page.get_by_label("API key")).to_be_focused()
        page.keyboard.type("another")
        page.keyboard.press("Enter")
        expect(page.locator("#notice")).to_contain_text("invalid API key")
        page.get_by_label("API key").fill("the-key")
        page.get_by_label("New tokens").fill("7")
        page.keyboard.press("Enter")
        finish(page)
        expect(page.locator("#notice")).to_be_hidden()
        expect(side(page).locator(".figures")).to_contain_text(re.compile(r"\d+ tokens?"))
        assert "the-key" not in page.url


def test_everything_can_be_done_with_the_keyboard(page: Page, base_url: str) -> None:
    with opening(page, base_url):
        expect(side(page).get_by_label("Model")).to_contain_text("gpt")
        page.keyboard.press("Tab")
        expect(page.get_by_label("Prompt", exact=True)).to_be_focused()
        page.keyboard.press("Control+A")
        page.keyboard.type("hello")
        for label in ("New tokens", "Temperature"):
            page.keyboard.press("Tab")
            expect(page.get_by_label(label)).to_be_focused()
            page.keyboard.type("9" if label == "New tokens" else "0")
        page.keyboard.press("Enter")
        finish(page)
        told = completion(base_url, model="gpt", prompt="hello", max_tokens=9, temperature=0)
        assert answer_text(page) == told["text"]
        tokens = side(page).locator(".token")
        for _ in range(9):
            page.keyboard.press("Tab")
            if tokens.first.evaluate("e => e === document.activeElement"):
                break
        page.keyboard.press("ArrowRight")
        expect(tokens.nth(1)).to_be_focused()
        expect(tokens.nth(1)).to_have_attribute("aria-pressed", "true")
        expect(side(page).locator(".detail")).to_contain_text("probability of")
        page.keyboard.press("End")
        expect(tokens.last).to_be_focused()


def test_keys_begin_and_stop_an_answer(page: Page) -> None:
    closed = threading.Event()
    with answering(BEGUN, closed=closed) as url, opening(page, url):
        page.get_by_label("Prompt", exact=True).focus()
        page.keyboard.press("Control+Enter")
        expect(side(page).locator(".token")).to_have_text(["a"])
        page.keyboard.press("Escape")
        expect(side(page).locator(".end")).to_have_text("stopped")
        assert closed.wait(10)


HOSTILE = (
    "<img src=x onerror=\"document.title='taken'\">",
    "</script><script>document.title='taken'</script>",
    "\u202eevil",
    "javascript:alert(1)",
)


def test_a_hostile_model_shows_text_and_nothing_else(page: Page) -> None:
    events = [piece(text, None, {text: 0.1, HOSTILE[0]: 0.2}) for text in HOSTILE]
    title = "Lathe playground"
    hostile = answering(stream(*events), models=(HOSTILE[0], "</option><script>"))
    with hostile as url, opening(page, url, prompt=HOSTILE[0], stop=HOSTILE[1]):
        finish(page)
        assert answer_text(page) == "".join(HOSTILE)
        for index in range(len(HOSTILE)):
            side(page).locator(".token").nth(index).hover()
            expect(side(page).locator(".detail td").first).to_contain_text("<img src=x")
        assert page.title() == title
        assert page.locator("img, .pane script").count() == 0
    with answering(error("400 No", HOSTILE[0])) as url, opening(page, url, prompt="x"):
        expect(side(page).get_by_role("alert")).to_have_text(HOSTILE[0])
        assert page.title() == title and page.locator("img").count() == 0


def test_the_policy_lets_no_other_script_run(page: Page, base_url: str) -> None:
    with opening(page, base_url):
        added = "document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"taken = 1\">')"
        page.evaluate(added)
        page.evaluate(
            "document.body.append(Object.assign(document.createElement('script'), "
            "{ textContent: 'taken = 1' }))"
        )
        page.wait_for_timeout(200)
        assert page.evaluate("typeof taken") == "undefined"


@pytest.mark.parametrize(("width", "scheme"), [(320, "dark"), (390, "light"), (1280, "dark")])
def test_nothing_is_wider_than_the_screen(browser: Browser, width: int, scheme: Any) -> None:
    long = [piece(text, None, {text: 0.01}) for text in ("x" * 500, " and", "\n\n", "W" * 80)]
    names = ("a-model-with-a-name-that-goes-on-and-on-" * 4, "b")
    page = browser.new_page(viewport={"width": width, "height": 700}, color_scheme=scheme)
    with answering(stream(*long), names) as url, opening(page, url, prompt="y" * 300):
        finish(page)
        side(page).locator(".token").first.click()
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        for name in ("Generate", "Stop"):
            box = page.get_by_role("button", name=name).bounding_box()
            assert box is not None and box["height"] >= 40 and box["x"] + box["width"] <= width
    page.close()
