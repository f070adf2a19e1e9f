"""The report of a small comparison in headless Chromium, on a desk and on a phone."""

import io
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest

from eval.cells import collect
from eval.compare import Args, plan_units
from eval.lineup import shipped_policies
from eval.report import write_report
from eval.unit import run_unit
from hlem_env.machine import write_result

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
DRIVER = shutil.which("chromedriver")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (CHROMIUM and DRIVER), reason="no chromium and chromedriver on the path"
    ),
]

SIZES = {"desk": (1280, 900), "phone": (390, 844)}
"""Width and height in CSS pixels."""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("comparison")
    args = Args(
        controllers=("static", "design-point", "working-set", "ppo", "oracles"),
        workloads=("default/trend",), kv_policies=("scan_resistant",), seeds=2, epochs=12,
        alpha_step=0.2, repeats=1, output=folder,
    )  # fmt: skip
    policies = shipped_policies()
    units = list(plan_units(args, policies))
    cells = collect(units, [run_unit(unit) for unit in units])
    write_result(folder / "results.json", "a test", {"slo_ms": 30.0, "cells": cells})
    write_report(folder / "results.json", folder / "report.html", policies)
    return folder / "report.html"


@pytest.fixture(scope="module", params=SIZES)
def chromium(request: pytest.FixtureRequest) -> Iterator[Any]:
    """As wide as the parameter says."""
    width, height = SIZES[request.param]
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    options.add_argument("--headless=new")
    options.add_argument("--disable-dev-shm-usage")
    if os.geteuid() == 0:
        options.add_argument("--no-sandbox")  # Chromium refuses to run as root with it
    options.add_experimental_option(
        "mobileEmulation",
        {"deviceMetrics": {"width": width, "height": height, "mobile": request.param == "phone"}},
    )
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(DRIVER))
    try:
        yield driver
    finally:
        driver.quit()


@pytest.fixture
def browser(chromium: Any) -> Any:
    """The browser on a blank page, its console empty, with scripts."""
    chromium.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})
    chromium.get("about:blank")
    chromium.get_log("browser")
    return chromium


def ranking(driver: Any) -> Any:
    """The cell's table of controllers."""
    return driver.find_element("css selector", "table.sortable")


def column(table: Any, heading: str) -> list[float]:
    """The figures of a column from the top to the bottom row, without their intervals."""
    headings = [head.text for head in table.find_elements("css selector", "thead th")]
    place = headings.index(next(h for h in headings if h.split("\n")[0].startswith(heading)))
    cells = table.find_elements("css selector", f"tbody tr > :nth-child({place + 1})")
    return [float(cell.text.split("\n")[0].replace("−", "-")) for cell in cells]


def names(table: Any) -> list[str]:
    return [head.text for head in table.find_elements("css selector", "tbody th")]


def click(driver: Any, element: Any) -> None:
    driver.execute_script(
        "arguments[0].scrollIntoView({block: 'center', inline: 'center'})", element
    )
    element.click()


def test_opens_without_a_word_on_the_console_and_fits_the_screen(
    browser: Any, page: Path, tmp_path: Path
) -> None:
    browser.get(page.as_uri())
    assert browser.get_log("browser") == []
    wide, body, seen = browser.execute_script(
        "return [document.documentElement.scrollWidth, document.body.scrollWidth, innerWidth]"
    )
    assert max(wide, body) <= seen
    assert seen in [width for width, _ in SIZES.values()]
    picture = tmp_path / "report.png"
    assert browser.save_screenshot(str(picture))
    pixels = matplotlib.image.imread(io.BytesIO(picture.read_bytes()), format="png")
    assert pixels.shape[1] >= seen and np.unique(pixels[..., :3]).size > 50


def test_a_table_that_is_too_wide_scrolls_in_its_own_box(browser: Any, page: Path) -> None:
    browser.get(page.as_uri())
    box = ranking(browser).find_element("xpath", "..")
    inner, outer = browser.execute_script(
        "return [arguments[0].scrollWidth, arguments[0].clientWidth]", box
    )
    if browser.execute_script("return innerWidth") == SIZES["phone"][0]:
        assert inner > outer
    browser.execute_script("arguments[0].scrollLeft = 100", box)
    scrolled = browser.execute_script("return arguments[0].scrollLeft", box)
    assert scrolled == min(100, inner - outer)
    # The controllers' names stay where they are.
    first = ranking(browser).find_element("css selector", "tbody th")
    assert first.rect["x"] == pytest.approx(box.rect["x"], abs=2)


def test_a_click_on_a_heading_sorts_and_another_one_turns_it_round(
    browser: Any, page: Path
) -> None:
    browser.get(page.as_uri())
    table = ranking(browser)
    ranked = names(table)
    before = column(table, "QoS")
    button = table.find_element("xpath", ".//button[starts-with(., 'QoS')]")
    for sign in (1, -1):
        click(browser, button)
        figures = column(table, "QoS")
        assert figures == sorted(before, reverse=sign < 0)
        assert names(table) != ranked and sorted(names(table)) == sorted(ranked)
    heading = button.find_element("xpath", "..")
    assert heading.get_attribute("aria-sort") == "descending"
    click(browser, table.find_element("tag name", "button"))
    assert names(table) == ranked
    assert browser.get_log("browser") == []


def test_without_script_the_ranking_stands_in_order(browser: Any, page: Path) -> None:
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    browser.get(page.as_uri())
    table = ranking(browser)
    ranks = [head.text.split()[0] for head in table.find_elements("css selector", "tbody th")]
    numbers = [int(rank) for rank in ranks if rank.isdigit()]
    assert numbers == list(range(1, len(numbers) + 1)) and len(numbers) > 5
