"""The node's page in headless Chromium, on a node whose epochs a test makes up."""

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from serving_bridge.server.page import POLICY
from serving_bridge.status import EpochRecord
from tests.serving_bridge.server.fake_node import FakeNode, record, running
from tests.serving_bridge.server.wire import send

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
DRIVER = shutil.which("chromedriver")
in_browser = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (CHROMIUM and DRIVER), reason="no chromium and chromedriver on the path"
    ),
]
HOSTILE = (
    '</td><img src=x onerror="document.title=\'taken\'"><script>document.title="taken"</script>'
)

# Contrast as WCAG 2 has it, of every element with text of its own against what lies behind it.
POOR_CONTRAST = """
const channel = c => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
const rgba = text => text.match(/[0-9.]+/g).map(Number);
const light = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
const behind = element => {
  for (let e = element; e; e = e.parentElement) {
    const colour = rgba(getComputedStyle(e).backgroundColor);
    if (colour.length === 3 || colour[3] === 1) return colour;
  }
  return [255, 255, 255];
};
const poor = [];
for (const element of document.body.querySelectorAll("*")) {
  const own = [...element.childNodes].some(n => n.nodeType === 3 && n.data.trim());
  if (!own || !element.checkVisibility() || element.closest("noscript")) continue;
  const style = getComputedStyle(element), svg = element.namespaceURI.endsWith("svg");
  const text = light(rgba(svg ? style.fill : style.color)), ground = light(behind(element));
  const ratio = (Math.max(text, ground) + 0.05) / (Math.min(text, ground) + 0.05);
  if (ratio < 4.5) poor.push([element.tagName, element.textContent.slice(0, 30), ratio]);
}
return poor;
"""
NAMELESS = """
return [...document.querySelectorAll("input, select, button, svg[role=img], [role=region]")].filter(e =>
  !(e.labels?.length || e.ariaLabel || e.getAttribute("aria-labelledby") || e.textContent.trim())
).map(e => e.outerHTML);
"""


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in ("--headless=new", "--disable-dev-shm-usage", "--window-size=1280,900"):
        options.add_argument(argument)
    if os.geteuid() == 0:
        options.add_argument("--no-sandbox")  # Chromium refuses to run as root with it
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(DRIVER))
    try:
        yield driver
    finally:
        driver.quit()


@pytest.fixture
def browser(chromium: Any) -> Any:
    """The browser on a blank page, its console empty."""
    chromium.get("about:blank")
    chromium.get_log("browser")
    return chromium


def some_epochs(n: int = 40) -> list[EpochRecord]:
    """A burst in epochs 20 to 23, in which alpha falls and the latency rises."""
    made = []
    for epoch in range(n):
        burst = 20 <= epoch < 24
        alpha = 60 if epoch < 20 else 40
        made.append(
            record(
                epoch,
                alpha_centi=alpha,
                next_alpha_centi=alpha,
                wanted_alpha_centi=alpha,
                alpha_resident=alpha / 100,
                state="burst" if burst else "normal",
                held="",
                p99_ms=90.0 if burst else 20.0 + epoch % 3,
                reason="policy keeps alpha",
                parts={"policy": 2.0, "adapter": 0.0, "recovery": -20.0 if burst else 0.0},
            )
        )
    return made


def until(condition: Callable[[], Any]) -> Any:
    end = time.monotonic() + 15
    while not (found := condition()):
        assert time.monotonic() < end
        time.sleep(0.05)
    return found


def opened(browser: Any, node: FakeNode) -> None:
    browser.get(f"http://{node.url}/")
    if node.status.records:
        last = node.status.records[-1].epoch
        until(lambda: f"epoch {last}," in text(browser, "#moment"))


def text(browser: Any, selector: str) -> str:
    return str(browser.find_element("css selector", selector).get_property("textContent"))


def legend(browser: Any, figure: str) -> list[str]:
    """The figures under a chart, which are also what a screen reader is told of it."""
    found = browser.find_elements("css selector", "figure")
    named = next(one for one in found if one.find_element("tag name", "h3").text == figure)
    return [one.text for one in named.find_elements("css selector", ".legend b")]


@contextmanager
def media(browser: Any, width: int, height: int, scheme: str) -> Iterator[None]:
    command = browser.execute_cdp_cmd
    command(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600},
    )
    feature = {"name": "prefers-color-scheme", "value": scheme}
    command("Emulation.setEmulatedMedia", {"features": [feature]})
    try:
        yield
    finally:
        command("Emulation.clearDeviceMetricsOverride", {})
        command("Emulation.setEmulatedMedia", {"features": []})


def test_page_is_sent_with_a_policy_that_lets_nothing_else_in(node: FakeNode) -> None:
    for path, kind in (
        ("/", "text/html"),
        ("/page.js", "text/javascript"),
        ("/page.css", "text/css"),
    ):
        answer = send(node, path=path, method="GET")
        assert answer.status == 200 and answer.headers["content-type"].startswith(kind)
        assert answer.headers["content-security-policy"] == POLICY
        assert answer.headers["x-content-type-options"] == "nosniff"
        # Nothing is fetched from elsewhere.
        assert b"//" not in answer.body.replace(b"http://www.w3.org/2000/svg", b"").replace(
            b"// ", b""
        )
    assert "'unsafe" not in POLICY and "default-src 'none'" in POLICY


@pytest.mark.parametrize(("width", "height", "scheme"), [(1280, 900, "light"), (390, 844, "dark")])
class TestLooks:
    pytestmark = in_browser

    def test_fits_the_screen_and_can_be_read(
        self, browser: Any, node: FakeNode, width: int, height: int, scheme: str
    ) -> None:
        node.status.records += some_epochs()
        with media(browser, width, height, scheme):
            opened(browser, node)
            wide = browser.execute_script("return document.documentElement.scrollWidth")
            assert wide <= width
            assert browser.execute_script(POOR_CONTRAST) == []
            assert browser.execute_script(NAMELESS) == []
            assert browser.get_log("browser") == []


class TestPage:
    pytestmark = in_browser

    def test_alpha_moves_as_epochs_end(self, browser: Any, node: FakeNode) -> None:
        node.status.records += some_epochs(19)
        opened(browser, node)
        assert legend(browser, "alpha") == ["0.60", "0.60", "–"]
        line = browser.find_element("css selector", "path.line.s0").get_attribute("d")
        node.status.records += some_epochs()[19:]
        until(lambda: legend(browser, "alpha")[0] == "0.40")
        assert browser.find_element("css selector", "path.line.s0").get_attribute("d") != line
        assert browser.get_log("browser") == []

    def test_a_burst_is_marked_where_it_was(self, browser: Any, node: FakeNode) -> None:
        node.status.records += some_epochs()
        opened(browser, node)
        marks = browser.find_elements("css selector", "figure rect.burst")
        assert len(marks) == len(browser.find_elements("css selector", "figure")) == 6
        # Four of 39 steps of the axis, from the 20th on.
        plot = browser.find_element("css selector", "figure path.axis").rect
        first = marks[0].rect
        assert first["width"] / plot["width"] == pytest.approx(4 / 39, abs=0.01)
        assert (first["x"] - plot["x"]) / plot["width"] == pytest.approx(19.5 / 39, abs=0.01)
        bursts = browser.find_elements("css selector", "#decisions tr.burst")
        assert len(bursts) == 4

    def test_what_was_wanted_and_what_held_it(self, browser: Any, node: FakeNode) -> None:
        held = record(0, wanted_alpha_centi=58, next_alpha_centi=52, held="dwell: 0.5 epochs")
        shadow = record(1, mode="shadow", held="shadow", wanted_alpha_centi=60)
        node.status.records += [held, shadow]
        opened(browser, node)
        assert len(browser.find_elements("css selector", "figure > svg circle.dots.s1")) == 2
        newest, older = browser.find_elements("css selector", "#decisions tbody tr")
        cells = [cell.text for cell in older.find_elements("css selector", "td")]
        assert cells[:4] == ["0.50 → 0.52", "0.58", "dwell: 0.5 epochs", "policy +4"]
        assert "policy +0.04" in cells[4] and cells[6:] == ["25.0", "32"]
        assert "shadow" in newest.text and text(browser, "#badge-mode") == "mode shadow"

    def test_hostile_words_stay_words(self, browser: Any, node: FakeNode) -> None:
        node.status.records.append(
            record(0, reason=HOSTILE, held=HOSTILE, state=HOSTILE, mode=HOSTILE, parts={HOSTILE: 1.0})
        )  # fmt: skip
        opened(browser, node)
        row = browser.find_element("css selector", "#decisions tbody tr")
        assert row.text.count(HOSTILE) == 5 and HOSTILE in text(browser, "#badge-mode")
        assert browser.find_elements("css selector", "img, body script") == []
        assert browser.title == "HLEM node"
        assert browser.get_log("browser") == []

    def test_epochs_without_sound_telemetry_are_gaps(self, browser: Any, node: FakeNode) -> None:
        blind = record(
            20, duration_s=0.0, requests=0, p99_ms=0.0, p50_ms=0.0, alpha_resident=0.0, kv_hit=0.0,
            held="telemetry is missing",
        )  # fmt: skip
        node.status.records += [*some_epochs(20), blind]
        opened(browser, node)
        assert legend(browser, "Hit rates") == ["–", "–"]
        assert legend(browser, "alpha")[1] == "–"
        assert len(browser.find_elements("css selector", "figure rect.untold")) == 6
        assert text(browser, "#badge-slo") == "no sound telemetry"
        assert "1,234, 3.0 MiB, 7 removed" in text(
            browser, "#tiles"
        )  # of the disk, not of requests

    def test_an_earlier_epoch_can_be_read_by_keyboard(self, browser: Any, node: FakeNode) -> None:
        node.status.records += some_epochs()
        opened(browser, node)
        slider = browser.find_element("css selector", "#cursor")
        slider.send_keys("\ue012" * 18)  # left
        assert text(browser, "#moment").startswith("epoch 21,")
        assert legend(browser, "Latency, ms (log scale)")[0] == "90.0 ms"

    def test_paused_it_stands_still(self, browser: Any, node: FakeNode) -> None:
        node.status.records += some_epochs(10)
        opened(browser, node)
        button = browser.find_element("css selector", "#pause")
        button.click()
        node.status.records += some_epochs()[10:]
        until(lambda: browser.execute_script("return state.records.length") == 40)
        assert text(browser, "#moment").startswith("epoch 9,")
        button.click()
        assert text(browser, "#moment").startswith("epoch 39,")

    def test_it_says_that_the_node_drains(self, browser: Any, node: FakeNode) -> None:
        node.status.records += some_epochs(5)
        opened(browser, node)
        banner = browser.find_element("css selector", "#banner")
        assert not banner.is_displayed() and text(browser, "#badge-node") == "serving"
        node.server.dispatch.draining = True
        try:
            until(banner.is_displayed)
            assert "draining" in banner.text and text(browser, "#badge-node") == "draining"
        finally:
            node.server.dispatch.draining = False
        node.scorer.ready = False
        until(lambda: text(browser, "#badge-node") == "not ready")

    def test_it_says_that_no_epoch_ends(self, browser: Any, node: FakeNode) -> None:
        node.status.records += [record(0)]
        opened(browser, node)
        # Four epochs of 5 s and 5 s more: a little less, and then the rest.
        browser.execute_script("state.newAt -= 20000")
        time.sleep(1.2)
        assert text(browser, "#badge-node") == "serving"
        browser.execute_script("state.newAt -= 5000")
        until(lambda: text(browser, "#badge-node") == "standing still")
        assert "No epoch has ended for" in text(browser, "#banner")

    def test_a_node_that_is_gone_and_one_that_comes_back(self, browser: Any) -> None:
        first = FakeNode()
        first.status.records += some_epochs()
        with running(first):
            opened(browser, first)
        until(lambda: text(browser, "#badge-node") == "no answer")
        assert "has not answered since" in text(browser, "#banner")
        assert browser.title.startswith("no answer")
        second = FakeNode(port=first.server.port)
        second.status.records += some_epochs(3)
        with running(second):
            # Its epochs count from 0: they are shown, not waited for until there are 40.
            until(lambda: text(browser, "#moment").startswith("epoch 2,"))
            assert text(browser, "#badge-node") == "serving"
