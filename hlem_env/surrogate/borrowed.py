"""See `hlem_env.borrowed`."""

from hlem_env.borrowed import borrowed

__all__ = ["borrowed"]
