"""Vega-Lite, by the package vl-convert-python: its scripts for a page without network, and charts as SVG and PNG."""

from __future__ import annotations

import contextlib
import copy
import importlib.metadata
import importlib.util
import re
from typing import Any

from agscl.data.cache import cache_folder
from agscl.system.files import write_atomically

Spec = dict[str, Any]

PACKAGE = "vl-convert-python"
VL_VERSION = "6.4"
INK = "#1f2328"
"""The colour of text and lines; on a page it is replaced by that of the theme."""
DESCRIPTIONS = re.compile(r' (?:aria-[a-z]+|role|class|pointer-events)="[^"]*"')
"""What Vega writes for each mark of a picture."""
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
ADVICE = "the report needs vl-convert-python: pip install 'agscl[report]'"


def is_available() -> bool:
    return importlib.util.find_spec("vl_convert") is not None


def load_scripts() -> str:
    """Vega, Vega-Lite and Vega-Embed as one script without network; cached, as making it takes seconds."""
    import vl_convert

    path = cache_folder() / "report" / f"vega-{VL_VERSION}-{importlib.metadata.version(PACKAGE)}.js"
    with contextlib.suppress(OSError, UnicodeDecodeError):
        if (text := path.read_text()).rstrip().endswith(END):
            return text
    text = f"{vl_convert.javascript_bundle(SNIPPET, vl_version=VL_VERSION).rstrip()}\n{END}\n"
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text.encode())
    return text


SNIPPET = "window.vegaEmbed = vegaEmbed;"
END = "// end of vega"
"""The last line of the cached script: one that was cut short lacks it."""


def make_config(ink: str = INK) -> Spec:
    """How Vega draws all charts: colours, fonts, axes."""
    return {
        "background": None,
        "font": FONT,
        "view": {"stroke": None},
        "axis": {
            "labelColor": ink,
            "titleColor": ink,
            "labelFontSize": 12,
            "titleFontSize": 12,
            "titleFontWeight": "normal",
            "titlePadding": 8,
            "domainColor": ink,
            "domainOpacity": 0.35,
            "tickColor": ink,
            "tickOpacity": 0.35,
            "gridColor": ink,
            "gridOpacity": 0.1,
            "labelLimit": 150,
            "labelSeparation": 6,
        },
        "legend": {
            "labelColor": ink,
            "titleColor": ink,
            "labelFontSize": 12,
            "titleFontWeight": "normal",
            "labelLimit": 240,
            "symbolStrokeWidth": 2.5,
        },
        "text": {"color": ink, "fontSize": 12},
        "header": {"labelColor": ink, "titleColor": ink},
        "title": {"color": ink, "fontSize": 13, "fontWeight": 600, "anchor": "start"},
    }


def make_svg(spec: Spec, width: int, *, for_page: bool = False) -> str:
    """The chart as SVG. On a page its text has the colour of the text around it."""
    import vl_convert

    fixed = _fix_width(spec, width) | {"config": make_config()}
    if for_page:  # the browser's font may be wider than the one that is measured here
        fixed["padding"] = {"left": 20, "right": 5, "top": 5, "bottom": 5}
        fixed["config"]["axis"]["titlePadding"] = 20
    else:
        fixed["background"] = "#ffffff"
    svg: str = vl_convert.vegalite_to_svg(fixed, vl_version=VL_VERSION)
    if for_page:
        svg = svg.replace(INK, "currentColor")
        svg = DESCRIPTIONS.sub("", svg)  # the numbers stand in a table beside it
    return svg


def make_png(spec: Spec, width: int, scale: float = 2.0) -> bytes:
    import vl_convert

    fixed = _fix_width(spec, width) | {"config": make_config(), "background": "#ffffff"}
    png: bytes = vl_convert.vegalite_to_png(fixed, vl_version=VL_VERSION, scale=scale)
    return png


def convert_svg_to_png(svg: str, scale: float = 2.0) -> bytes:
    import vl_convert

    png: bytes = vl_convert.svg_to_png(svg, scale=scale)
    return png


def _fix_width(spec: Spec, width: int) -> Spec:
    """The spec with a width in pixels where it takes that of its container."""
    fixed = copy.deepcopy(spec)
    if fixed.get("width") == "container":
        fixed["width"] = width
    fixed.pop("autosize", None)
    return fixed
