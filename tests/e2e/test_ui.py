"""The page at /ui, in a browser: with a real server, and with one that says whatever a test needs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from serving import Server, serving
from ui_server import Engine, UiServer

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright (pip install playwright)")
expect = playwright.expect

CHROMIUM = Path("/usr/bin/chromium")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
WAIT = 20_000  # ms that an expectation may take on a busy machine

pytestmark = [
    pytest.mark.skipif(not CHROMIUM.exists(), reason=f"needs {CHROMIUM} (apt-get install chromium)"),
    pytest.mark.xdist_group("ui"),
]

# What the browser itself writes of answers that are errors; a page cannot prevent it.
OF_THE_BROWSER = "Failed to load resource"

# Text whose contrast with what is behind it is too low, as "ratio text". Disabled controls may be pale.
LOW_CONTRAST = """() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgba = (color) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = color;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const light = (color) => {
    const linear = (v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    const [r, g, b] = rgba(color).map((v) => linear(v / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const color = getComputedStyle(at).backgroundColor;
      if (rgba(color)[3] === 255) return color;
    }
    return "white";
  };
  const low = [];
  for (const element of document.querySelectorAll("body *")) {
    const own = [...element.childNodes].some((node) => node.nodeType === Node.TEXT_NODE && node.data.trim());
    if (!own || element.disabled || !element.checkVisibility()) continue;
    const style = getComputedStyle(element);
    const color = element instanceof SVGElement ? style.fill : style.color;
    const [a, b] = [light(color), light(behind(element))].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < 4.5) low.push(`${ratio.toFixed(2)} ${element.textContent.trim()}`);
  }
  return low;
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=str(CHROMIUM), args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def stub() -> Iterator[UiServer]:
    """A server that the test sets up."""
    server = UiServer()
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A real one."""
    with serving("mock", "--option", "step_ms=5", "--option", "max_model_len=512") as server:
        yield server


@pytest.fixture
def base_url(request: pytest.FixtureRequest) -> str:
    """Of the server whose page is looked at."""
    url: str = request.getfixturevalue(getattr(request, "param", "stub")).url
    return url


BOTH = pytest.mark.parametrize("base_url", ["stub", "server"], indirect=True)


@pytest.fixture
def new_page(browser: Any, base_url: str) -> Iterator[Callable[..., Any]]:
    """Opens the page. Afterwards: no error of a script was seen, and no other origin was asked for anything."""
    contexts: list[Any] = []
    errors: list[str] = []
    asked: list[str] = []

    def open_page(**options: Any) -> Any:
        context = browser.new_context(**options)
        contexts.append(context)
        context.set_default_timeout(WAIT)
        page = context.new_page()
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on(
            "console", lambda message: errors.append(message.text) if message.type in ("error", "warning") else None
        )
        context.on("request", lambda request: asked.append(request.url))
        page.goto(f"{base_url}/ui/")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert [error for error in errors if not error.startswith(OF_THE_BROWSER)] == []
    assert asked
    assert [url for url in asked if not url.startswith((f"{base_url}/", "data:"))] == []


@pytest.fixture
def page(new_page: Callable[..., Any]) -> Any:
    return new_page()


def shows(page: Any, selector: str, text: str | re.Pattern[str]) -> None:
    expect(page.locator(selector)).to_have_text(text, timeout=WAIT)


def say(page: Any, text: str) -> None:
    """Type a message and press Enter, once there is a model."""
    expect(page.locator("#send")).to_be_enabled(timeout=WAIT)
    page.locator("#prompt").fill(text)
    page.locator("#prompt").press("Enter")


def last_answer(page: Any) -> Any:
    return page.locator(".message.assistant").last


# Against any server: the real one, too


@BOTH
def test_engines_and_models_are_shown(page: Any) -> None:
    shows(page, "#connection-text", "Live")
    expect(page.locator("#engine-rows tr").first.locator(".state-text")).to_have_text("READY", timeout=WAIT)
    assert page.locator("#engine-rows tr").first.locator("th").text_content() == "0"
    expect(page.locator("#model option")).not_to_have_count(0, timeout=WAIT)
    expect(page.locator("#no-engines")).to_be_hidden()


@BOTH
def test_an_answer_is_streamed_and_timed(page: Any) -> None:
    say(page, "Say hello.")
    answer = last_answer(page)
    expect(answer).to_have_attribute("aria-busy", "false", timeout=WAIT)
    expect(answer.locator(".said")).not_to_be_empty()
    expect(answer.locator(".facts")).to_contain_text(re.compile(r"^first token after [\d.]+ m?s .* tokens?"))
    expect(answer.locator(".error")).to_be_hidden()
    expect(page.locator(".message.user .said")).to_have_text("Say hello.")


@BOTH
def test_nothing_of_the_page_is_wider_than_a_phone(new_page: Callable[..., Any]) -> None:
    page = new_page(viewport={"width": 320, "height": 640})
    shows(page, "#connection-text", "Live")
    assert page.evaluate("document.documentElement.scrollWidth") <= 320


# What the page makes of the figures


def test_each_state_is_shown_with_its_facts(stub: UiServer, page: Any) -> None:
    states = ("READY", "STALLED", "RESTARTING", "DEAD", "STARTING", "STOPPED")
    stub.engines = {
        str(rank): Engine(state, pid=5000 + rank, incarnation=rank + 1, restarts=rank)
        for rank, state in enumerate(states)
    }
    expect(page.locator("#engine-rows .state-text")).to_have_text(list(states), timeout=WAIT)
    for rank in range(len(states)):
        cells = page.locator(f"tr[data-rank='{rank}'] td")
        expect(cells.nth(1)).to_have_text(str(5000 + rank))
        expect(cells.nth(2)).to_have_text(str(rank + 1))
        expect(cells.nth(8)).to_have_text(str(rank))
    marks = page.locator("#engine-rows .mark").evaluate_all(
        "marks => marks.map(({style}, i) => { const s = getComputedStyle(marks[i]);"
        " return [s.borderColor, s.backgroundColor, s.borderRadius].join() })"
    )
    assert len(set(marks)) == len(states)


def test_engines_that_come_change_and_go(stub: UiServer, page: Any) -> None:
    expect(page.locator("#engine-rows tr")).to_have_count(2, timeout=WAIT)
    stub.engines = {"0": Engine("STALLED", pid=4000), "1": Engine(), "2": Engine(), "10": Engine()}
    expect(page.locator("#engine-rows th")).to_have_text(["0", "1", "2", "10"], timeout=WAIT)
    shows(page, "#engine-news", "Engine 0 is STALLED.")
    stub.engines = {"10": Engine()}
    expect(page.locator("#engine-rows th")).to_have_text(["10"], timeout=WAIT)
    stub.engines = {}
    expect(page.locator("#no-engines")).to_be_visible(timeout=WAIT)


def test_figures_move(stub: UiServer, page: Any) -> None:
    shows(page, "tr[data-rank='0'] td:nth-of-type(7)", re.compile(r"^[1-9][\d.]*$"))  # steps/s
    shows(page, "tr[data-rank='0'] td:nth-of-type(6)", re.compile(r"^[1-9][\d.]*%$"))  # KV use
    shows(page, "tr[data-rank='0'] td:nth-of-type(8)", "12 ms")
    shows(page, "#tile-tokens", re.compile(r"^[1-9][\d,.]*$"))
    shows(page, "#tile-requests", re.compile(r"^[1-9][\d.]*$"))
    shows(page, "#tile-refused", "7")
    before = page.locator("#tile-requests-more").text_content()
    expect(page.locator("#tile-requests-more")).not_to_have_text(before, timeout=WAIT)
    for name in ("Tokens per second", "Requests", "Time to first token", "Time per output token"):
        plot = page.get_by_role("img", name=name)
        expect(plot).to_have_attribute("aria-label", re.compile("last .*, lowest .*, highest"), timeout=WAIT)
        expect(plot.locator("path.curve").first).to_have_attribute("d", re.compile("L"), timeout=WAIT)
    stub.busy = False
    shows(page, "#tile-tokens", "0")


def test_figures_are_those_of_the_interval(stub: UiServer, page: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts of long ago do not matter, and a counter that begins again at zero has not fallen."""
    shows(page, "#connection-text", "Live")
    looks = 0

    def metrics() -> str:
        nonlocal looks
        looks += 1
        # From the second look on, 100 more first tokens each time: 40 within 20 ms, 60 within 20 to 40 ms.
        more = looks - 1
        steps = 1_000_000 if looks == 1 else 40 * looks
        return f"""
outboard:time_to_first_token_seconds_bucket{{le="0.02"}} {50 + 40 * more}
outboard:time_to_first_token_seconds_bucket{{le="0.04"}} {50 + 100 * more}
outboard:time_to_first_token_seconds_bucket{{le="+Inf"}} {50 + 100 * more}
outboard:generation_tokens_total {steps}
outboard:engine_steps_total{{engine="0"}} {steps}
outboard:engine_pid{{engine="0"}} 7
"""

    monkeypatch.setattr(stub, "metrics", metrics)
    legend = page.locator(".plot", has_text="Time to first token").locator(".legend b")
    expect(legend).to_have_text(["23.3 ms", "38.3 ms"], timeout=WAIT)
    shows(page, "tr[data-rank='0'] td:nth-of-type(7)", re.compile(r"^[234]\d(\.\d)?$"))
    label = page.get_by_role("img", name="Tokens per second").get_attribute("aria-label")
    assert re.search(r"last [234]\d", label), label
    assert "-" not in label
    assert "000" not in label, label


def test_a_hidden_page_asks_for_nothing(stub: UiServer, page: Any) -> None:
    shows(page, "#connection-text", "Live")
    show = "(hidden) => { Object.defineProperty(document, 'hidden', { value: hidden, configurable: true });"
    show += " document.dispatchEvent(new Event('visibilitychange')) }"
    page.evaluate(show, True)
    page.wait_for_timeout(300)  # an answer may be under way
    asked = stub.requests["/metrics"]
    page.wait_for_timeout(2500)
    assert stub.requests["/metrics"] == asked
    with page.expect_response("**/metrics"):
        page.evaluate(show, False)


def test_the_pointer_reads_all_plots(stub: UiServer, page: Any) -> None:
    shows(page, "#tile-tokens", re.compile(r"^[1-9]"))
    page.locator(".plot > svg").first.hover()
    expect(page.locator(".ago")).to_have_text([re.compile(r"^\d+ s ago$")] * 4)
    expect(page.locator(".cursor")).to_have_count(4)
    page.locator("h1").hover()
    expect(page.locator(".cursor")).to_have_count(0)


# Chat


def test_an_answer_grows_while_it_is_streamed_and_is_told_once(stub: UiServer, page: Any) -> None:
    stub.hold.clear()
    say(page, "Hello?")
    answer = last_answer(page)
    expect(answer.locator(".said")).to_have_text("Hallö.", timeout=WAIT)
    expect(answer).to_have_attribute("aria-busy", "true")
    expect(page.locator("#stop")).to_be_visible()
    expect(page.locator("#send")).to_be_hidden()
    expect(page.locator("#chat-news")).to_be_empty()
    stub.hold.set()
    shows(page, "#chat-news", "Answer: Hallö.")
    expect(answer.locator(".facts")).to_contain_text("· 4 tokens")
    expect(page.locator("#stop")).to_be_hidden()


def test_the_model_is_told_what_was_said_before(stub: UiServer, page: Any) -> None:
    expect(page.locator("#model option")).to_have_text(["stub", "other"], timeout=WAIT)
    page.select_option("#model", "other")
    say(page, "One")
    shows(page, "#chat-news", "Answer: Hallö.")
    stub.pieces = ["Two."]
    say(page, "And?")
    shows(page, "#chat-news", "Answer: Two.")
    request = stub.chats[-1]
    assert request["model"] == "other"
    assert request["stream"] is True
    assert request["messages"] == [
        {"role": "user", "content": "One"},
        {"role": "assistant", "content": "Hallö."},
        {"role": "user", "content": "And?"},
    ]
    page.get_by_role("button", name="New chat").click()
    expect(page.locator(".message")).to_have_count(0)
    say(page, "Anew")
    shows(page, "#chat-news", "Answer: Two.")
    assert stub.chats[-1]["messages"] == [{"role": "user", "content": "Anew"}]


@pytest.mark.parametrize("how", ["button", "escape", "new chat"])
def test_stop_ends_the_request(stub: UiServer, page: Any, how: str) -> None:
    stub.hold.clear()
    say(page, "Go on for ever.")
    answer = last_answer(page)
    expect(answer.locator(".said")).to_have_text("Hallö.", timeout=WAIT)
    if how == "button":
        page.get_by_role("button", name="Stop").click()
    elif how == "escape":
        page.keyboard.press("Escape")
    else:
        page.get_by_role("button", name="New chat").click()
    assert stub.ended_by_client.wait(10)
    expect(page.locator("#send")).to_be_visible()
    expect(page.locator("#prompt")).to_be_focused()
    if how == "new chat":
        expect(page.locator(".message")).to_have_count(0)
    else:
        expect(answer.locator(".facts")).to_contain_text("stopped")
        expect(answer.locator(".said")).to_have_text("Hallö.")
    stub.hold.set()
    say(page, "Again")
    expect(last_answer(page).locator(".facts")).to_contain_text("· 4 tokens", timeout=WAIT)


def test_html_of_the_model_is_text(stub: UiServer, page: Any) -> None:
    evil = '<img src="x" onerror="document.title = \'owned\'"><b>bold</b>'
    stub.pieces = [evil[:20], evil[20:]]
    stub.models = [evil]
    stub.engines = {"<i>0</i>": Engine()}
    expect(page.locator("#engine-rows th")).to_have_text(["<i>0</i>"], timeout=WAIT)
    page.reload()
    say(page, evil)
    expect(last_answer(page).locator(".said")).to_have_text(evil, timeout=WAIT)
    expect(page.locator(".message.user .said")).to_have_text(evil)
    assert page.locator("main img, main i, .message b").count() == 0
    assert page.title() == "Outboard"


def test_a_refusal_is_shown_and_the_message_kept(stub: UiServer, page: Any) -> None:
    stub.refusal = (503, "The server is shutting down.")
    say(page, "Hello?")
    expect(last_answer(page).locator(".error")).to_have_text("The server is shutting down.", timeout=WAIT)
    expect(page.locator("#prompt")).to_have_value("Hello?")
    stub.refusal = None
    page.locator("#prompt").press("Enter")
    expect(last_answer(page).locator(".said")).to_have_text("Hallö.", timeout=WAIT)
    assert stub.chats[-1]["messages"] == [{"role": "user", "content": "Hello?"}]


def test_an_error_in_the_midst_is_shown_after_what_came(stub: UiServer, page: Any) -> None:
    stub.error = "Engine 0 died."
    say(page, "Hello?")
    expect(last_answer(page).locator(".error")).to_have_text("Engine 0 died.", timeout=WAIT)
    expect(last_answer(page).locator(".said")).to_have_text("Hallö.")
    shows(page, "#chat-news", "Answer: Hallö. Engine 0 died.")


def test_a_connection_that_breaks_is_shown(stub: UiServer, page: Any) -> None:
    stub.hold.clear()
    say(page, "Hello?")
    expect(last_answer(page).locator(".said")).to_have_text("Hallö.", timeout=WAIT)
    stub.stop()
    expect(last_answer(page).locator(".error")).to_have_text(
        re.compile(r"^(The connection to the server was lost|The answer broke off)\.$"), timeout=WAIT
    )


# Keys, and servers that are away


def test_a_key_is_asked_for_and_used(stub: UiServer, new_page: Callable[..., Any]) -> None:
    stub.key = "sesame"
    page = new_page()
    field = page.get_by_label("This server wants an API key")
    expect(field).to_be_focused(timeout=WAIT)
    assert field.get_attribute("type") == "password"
    page.keyboard.type("wrong")
    page.keyboard.press("Enter")
    shows(page, "#key-error", "The server did not accept this key.")
    field.fill("kein Schlüssel")
    field.press("Enter")
    shows(page, "#key-error", re.compile("^A key has no spaces"))
    field.fill("sesame")
    field.press("Enter")
    shows(page, "#connection-text", "Live")
    expect(field).to_be_hidden()
    assert page.evaluate("Object.values(sessionStorage)") == ["sesame"]
    say(page, "Hello?")
    expect(last_answer(page).locator(".said")).to_have_text("Hallö.", timeout=WAIT)
    page.reload()
    shows(page, "#connection-text", "Live")
    page.get_by_role("button", name="Forget key").click()
    expect(field).to_be_visible(timeout=WAIT)
    assert page.evaluate("sessionStorage.length + localStorage.length") == 0


def test_a_key_that_only_the_api_wants(stub: UiServer, page: Any) -> None:
    say(page, "Hello?")
    shows(page, "#chat-news", "Answer: Hallö.")
    stub.key = "sesame"
    stub.open_metrics = True
    say(page, "And now?")
    expect(page.locator("#key")).to_be_visible(timeout=WAIT)
    expect(last_answer(page).locator(".error")).to_have_text("The server wants an API key.")
    shows(page, "#connection-text", "Live")
    page.locator("#key").fill("sesame")
    page.get_by_role("button", name="Use key").click()
    expect(page.locator("#prompt")).to_have_value("And now?")
    page.keyboard.press("Enter")
    shows(page, "#chat-news", "Answer: Hallö.")
    assert len(stub.chats) == 2


def test_a_key_that_is_no_longer_wanted(stub: UiServer, new_page: Callable[..., Any]) -> None:
    stub.key = "sesame"
    page = new_page()
    expect(page.locator("#key-form")).to_be_visible(timeout=WAIT)
    stub.key = None
    expect(page.locator("#key-form")).to_be_hidden(timeout=WAIT)
    say(page, "Hello?")
    shows(page, "#chat-news", "Answer: Hallö.")


def test_a_server_that_goes_and_comes_back(stub: UiServer, page: Any) -> None:
    say(page, "Hello?")
    shows(page, "#connection-text", "Live")
    stub.stop()
    notice = page.locator("#lost")
    expect(notice).to_contain_text("The server cannot be reached. Trying again", timeout=WAIT)
    expect(notice).to_have_attribute("role", "alert")
    shows(page, "#connection-text", "Not reached")
    stub.models = ["another"]
    stub.start()
    expect(notice).to_be_hidden(timeout=WAIT)
    shows(page, "#connection-text", "Live")
    expect(page.locator("#model option")).to_have_text(["another"], timeout=WAIT)
    shows(page, "#tile-tokens", re.compile(r"^[1-9]"))


# For everyone


def test_the_keyboard_is_enough(stub: UiServer, page: Any) -> None:
    expect(page.locator("#send")).to_be_enabled(timeout=WAIT)
    page.keyboard.press("Tab")
    expect(page.locator(".skip")).to_be_focused()
    page.keyboard.press("Enter")
    reached = []
    for _ in range(5):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.id"))
        outline = page.evaluate("getComputedStyle(document.activeElement).outline")
        assert re.search(r"solid .*[1-9]px|[1-9]px solid|solid [1-9]px", outline), (reached, outline)
    assert reached == ["model", "new-chat", "log", "prompt", "send"]
    page.keyboard.press("Shift+Tab")
    page.keyboard.type("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    expect(page.locator(".message")).to_have_count(0)
    stub.hold.clear()
    page.keyboard.press("Enter")
    expect(last_answer(page).locator(".said")).to_have_text("Hallö.", timeout=WAIT)
    page.keyboard.press("Tab")
    expect(page.locator("#stop")).to_be_focused()
    page.keyboard.press("Enter")
    assert stub.ended_by_client.wait(10)
    expect(page.locator("#prompt")).to_be_focused()
    assert stub.chats[-1]["messages"] == [{"role": "user", "content": "one\ntwo"}]


def test_names_and_landmarks(stub: UiServer, page: Any) -> None:
    expect(page.get_by_role("banner")).to_have_count(1)
    expect(page.get_by_role("main")).to_have_count(1)
    expect(page.get_by_role("region", name="Chat")).to_have_count(1)
    expect(page.get_by_role("table", name="Engines")).to_have_count(1)
    expect(page.get_by_role("textbox", name="Message")).to_have_count(1)
    expect(page.get_by_role("combobox", name="Model")).to_have_count(1)
    expect(page.locator(".said[aria-live], #log[aria-live], #messages[aria-live]")).to_have_count(0)
    expect(page.locator("#chat-news")).to_have_attribute("role", "status")
    unnamed = page.locator("button, input, select, textarea").evaluate_all(
        "all => all.filter((e) => !e.labels?.length && !e.textContent.trim()).map((e) => e.id)"
    )
    assert unnamed == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read(stub: UiServer, new_page: Callable[..., Any], scheme: str) -> None:
    page = new_page(color_scheme=scheme)
    states = ("READY", "STALLED", "RESTARTING", "DEAD", "STARTING", "STOPPED")
    stub.engines = {str(rank): Engine(state) for rank, state in enumerate(states)}
    stub.error = "Engine 0 died."
    say(page, "Hello?")
    expect(last_answer(page).locator(".error")).to_be_visible(timeout=WAIT)
    shows(page, "tr[data-rank='5'] .state-text", "STOPPED")
    assert page.evaluate(LOW_CONTRAST) == []
    stub.key = "sesame"
    expect(page.locator("#key-form")).to_be_visible(timeout=WAIT)
    page.locator("#key").fill("wrong")
    page.locator("#key").press("Enter")
    shows(page, "#key-error", re.compile("not accept"))
    assert page.evaluate(LOW_CONTRAST) == []
    stub.stop()
    expect(page.locator("#lost")).to_be_visible(timeout=WAIT)
    assert page.evaluate(LOW_CONTRAST) == []
