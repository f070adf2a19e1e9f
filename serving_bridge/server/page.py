"""The node's page: three files of the package, sent as they are."""

from __future__ import annotations

from importlib import resources
from typing import Final, NamedTuple

POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        # Nothing on the page may become markup or a script, whatever its script does.
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
"""Content-Security-Policy: files of this node and no others, no inline script or style."""
HEADERS: Final = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    # A page of the version before must not meet a node of this one.
    "Cache-Control": "no-cache",
}
_FILES: Final = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}


class PageFile(NamedTuple):
    """One file of the page."""

    content: bytes
    media_type: str


def page_files() -> dict[str, PageFile]:
    """The page's files by the path that they are sent at."""
    folder = resources.files("serving_bridge") / "page"
    return {
        path: PageFile((folder / name).read_bytes(), media_type)
        for path, (name, media_type) in _FILES.items()
    }
