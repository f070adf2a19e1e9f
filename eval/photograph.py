"""Photographs a page in headless Chromium: `python -m eval.photograph --url URL --output FILE`."""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hlem_env.command_line import run_command
from hlem_env.errors import BackendError, require


@dataclass
class Args:
    """A picture of a page."""

    url: str = "http://127.0.0.1:8080/"
    """of the page"""
    output: Path = Path("page.png")
    """PNG file"""
    width: int = 1280
    """in CSS pixels; the height is the page's"""
    wait_s: float = 3.0
    """before the picture is taken"""


def photograph(args: Args) -> None:
    """Write the picture.

    Raises:
        BackendError: there is no selenium, no chromium or no chromedriver, or the page does not open.
    """
    try:
        from selenium import webdriver
        from selenium.common.exceptions import WebDriverException
    except ImportError as error:
        raise BackendError("a photograph needs selenium: pip install 'hlem[dev]'") from error
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    driver = shutil.which("chromedriver")
    if browser is None or driver is None:
        raise BackendError("a photograph needs chromium and chromedriver on the path")
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    for argument in ("--headless=new", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(argument)
    if os.geteuid() == 0:
        options.add_argument("--no-sandbox")  # Chromium refuses to run as root with it
    chromium = webdriver.Chrome(options, webdriver.ChromeService(driver))
    try:
        _take(chromium, args)
    except WebDriverException as error:
        raise BackendError(f"{args.url} could not be photographed: {error.msg}") from error
    finally:
        chromium.quit()


def _take(chromium: Any, args: Args) -> None:
    def size(height: int) -> None:
        metrics = {"width": args.width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        chromium.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    size(900)
    chromium.get(args.url)
    time.sleep(args.wait_s)
    size(int(chromium.execute_script("return document.documentElement.scrollHeight")))
    time.sleep(0.5)  # it is laid out anew
    args.output.parent.mkdir(parents=True, exist_ok=True)
    require(
        chromium.save_screenshot(str(args.output)), "output", str(args.output), "a file to write"
    )


def main(args: Args) -> int:
    """Take it."""
    require(200 <= args.width <= 5000, "width", args.width, "200 to 5000")
    photograph(args)
    print(args.output)
    return 0


if __name__ == "__main__":
    run_command("eval.photograph", main, Args)
