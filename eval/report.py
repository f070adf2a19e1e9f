"""report.html of a comparison (see `write_report`)."""

from __future__ import annotations

from pathlib import Path


def write_report(output: Path, results: Path, policies: tuple[str, ...]) -> Path:
    """Write `output`/report.html from results.json, the records and the policies' learning curves."""
    return output / "report.html"
