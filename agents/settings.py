"""Tuned settings of the baselines, from `settings.json`, which `train.tune` writes."""

from __future__ import annotations

import json
from functools import lru_cache
from importlib import resources
from typing import Any, TypeVar

from hlem_env.errors import ArtefactError

Settings = TypeVar("Settings")
SETTINGS_FILE = "settings.json"


def tuned(name: str, kind: type[Settings]) -> Settings:
    """The tuned settings of baseline `name`; where nothing is tuned, the defaults of `kind`.

    Raises:
        ArtefactError: settings.json has an entry that `kind` does not know.
    """
    values = _all().get(name, {})
    try:
        return kind(**values)
    except TypeError as error:
        raise ArtefactError(f"{SETTINGS_FILE}, entry {name}: {error}") from error


@lru_cache(maxsize=1)
def _all() -> dict[str, dict[str, Any]]:
    file = resources.files("agents") / SETTINGS_FILE
    settings: dict[str, dict[str, Any]] = json.loads(file.read_text())
    return settings
