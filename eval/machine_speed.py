"""How fast the machine of a folder of records is: all pieces, on whichever device, get the same requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from eval.pieces import Slice
from hlem_env.errors import require

MOST_LOAD = 100.0
"""Times the preset's rates, and as fast a machine."""


def machine_speed(
    part: Slice, name: str, given: float | None, preset_ms: float, probe_ms: Callable[[], float]
) -> float:
    """Of the machine over the preset's, by which the preset's rates are scaled.

    Args:
        part: where it is kept, once for a folder.
        name: of its record.
        given: instead of a probe, which hangs on how fast the host happens to be.
        preset_ms: the probe's time on the preset's machine.
        probe_ms: runs the probe.

    Raises:
        ArgumentError: the folder has another one than what is given.
    """

    def measure() -> Mapping[str, Any]:
        if given is not None:
            return {"speed": given}
        ms = probe_ms()
        return {"probe_ms": ms, "speed": preset_ms / ms}

    speed = float(part.once(name, measure)["speed"])
    require(given in (None, speed), "--speed", given, f"{speed}, as in --records")
    return speed
