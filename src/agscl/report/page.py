"""A report as one HTML file that needs no network, and its figures and numbers as files of their own."""

from __future__ import annotations

import base64
import functools
import json
import mimetypes
import re
import zlib
from importlib import resources
from pathlib import Path
from typing import Any

from agscl import __version__
from agscl.report import vega
from agscl.report.charts import FREE_COLOR, MOVED_COLOR, color_tasks
from agscl.report.headline import list_figures, make_verdict
from agscl.report.node_history import pack_nodes
from agscl.report.node_map import draw_node_map
from agscl.report.report_data import ReportData
from agscl.report.sections import Section, make_sections
from agscl.system.files import write_atomically

MAX_BYTES = 6_000_000
"""No page is larger."""
MEDIA_BYTES = 1_000_000
"""The most bytes of recorded play within a page, as many as `agscl play` writes; what is larger is named only."""
MAX_DRAWN_NODES = 50_000
"""Of more nodes there is no picture for readers without JavaScript."""
PAGE = "report.html"
"""The page's name in the folder of a run or a comparison."""


def write_page(report: ReportData, path: Path, *, version: str = "") -> Path:
    write_atomically(path, make_page(report, version=version).encode())
    return path


def make_page(report: ReportData, *, version: str = "") -> str:
    """The page as HTML, of at most `MAX_BYTES`; with a `version` it reloads when its server names another."""
    for with_importance, media in ((True, MEDIA_BYTES), (True, 0), (False, 0)):
        page = _fill_template(report, version, with_importance, media)
        if len(page.encode()) <= MAX_BYTES:
            return page
    report.problems.append("The full page would be larger than 6 MB: charts can only be seen as pictures.")
    return _fill_template(report, version, False, 0, interactive=False)


def _fill_template(
    report: ReportData, version: str, with_importance: bool, media_bytes: int, interactive: bool = True
) -> str:
    sections = make_sections(report)
    data: dict[str, Any] = {
        "charts": {chart.name: chart.spec for section in sections for chart in section.charts} if interactive else {},
        "config": vega.make_config("currentColor"),
        "nodes": None,
    }
    pictures = {
        chart.name: _make_picture(vega.make_svg(chart.spec, chart.width, for_page=True), chart.alt)
        for section in sections
        for chart in section.charts
    }
    history = report.detail.nodes if report.detail else None
    if history is not None:
        data["nodes"] = pack_nodes(history, with_importance=with_importance) | {
            "colors": color_tasks(len(history.tasks)),
            "freeColor": FREE_COLOR,
            "movedColor": MOVED_COLOR,
        }
    for section in sections:
        if section.name == "games":
            section.media = _embed_play(report, media_bytes)
    environment = _make_environment()
    page: str = environment.get_template("page.html").render(
        report=report,
        verdict=make_verdict(report),
        figures=list_figures(report),
        sections=sections,
        pictures=pictures,
        node_picture=_make_node_picture(report),
        style=_mark_safe(_read_template("page.css")),
        scripts=[_mark_safe(_read_template(name)) for name in ("nodes.js", "page.js")],
        data=pack_text(json.dumps(data, allow_nan=False, separators=(",", ":"))),
        vega=pack_text(vega.load_scripts()),
        refresh=version,
        version=__version__,
    )
    return page


def pack_text(text: str) -> str:
    """A text as page.js unpacks it: deflated, in base64. So it can stand within a script element, whatever is in it."""
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode()


@functools.cache
def _read_template(name: str) -> str:
    return (resources.files("agscl.report") / "templates" / name).read_text(encoding="utf-8")


def _make_environment() -> Any:
    import jinja2

    return jinja2.Environment(
        loader=jinja2.FunctionLoader(_read_template),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _mark_safe(text: str) -> Any:
    import markupsafe

    return markupsafe.Markup(text)


def _make_picture(svg: str, alt: str) -> Any:
    """An SVG for the page: as wide as its place, named for readers who do not see it."""
    import markupsafe

    width, height = re.findall(r'(?:width|height)="([\d.]+)"', svg)[:2]
    body = re.sub(r"<svg [^>]*>", "", svg, count=1).rpartition("</svg>")[0]
    return markupsafe.Markup(
        f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" aria-label="{{}}">'
    ).format(alt) + markupsafe.Markup(body + "</svg>")


def _make_node_picture(report: ReportData) -> Any:
    history = report.detail.nodes if report.detail else None
    if history is None or history.size > MAX_DRAWN_NODES:
        return ""
    return _mark_safe(draw_node_map(history).replace(f'fill="{vega.INK}"', 'fill="currentColor"'))


def _embed_play(report: ReportData, limit: int) -> list[dict[str, str]]:
    """Recorded play: within the page as far as it fits, the rest by name."""
    media: list[dict[str, str]] = []
    used, run = 0, report.detail
    if run is None:
        return media
    for path in run.play:
        kind, size = mimetypes.guess_type(path.name)[0] or "application/octet-stream", path.stat().st_size
        name = path.relative_to(run.path / "play").with_suffix("").as_posix()
        item = {"name": name, "kind": kind.partition("/")[0], "source": "", "path": str(path)}
        if used + size <= limit:
            item["source"] = f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"
            used += size
        media.append(item)
    return media


# Figures and numbers -------------------------------------------------------------------------------------------------


def write_figures(report: ReportData, folder: Path) -> list[Path]:
    """Write a page's charts, and its node map after the last task, as SVG and PNG files."""
    folder.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []

    def write(name: str, data: bytes) -> None:
        write_atomically(folder / name, data)
        written.append(folder / name)

    for section in make_sections(report):
        for chart in section.charts:
            write(f"{chart.name}.svg", vega.make_svg(chart.spec, chart.width).encode())
            write(f"{chart.name}.png", vega.make_png(chart.spec, chart.width))
    if report.detail and report.detail.nodes:
        svg = draw_node_map(report.detail.nodes)
        write("nodes.svg", svg.encode())
        write("nodes.png", vega.convert_svg_to_png(svg))
    return written


__all__ = ["MAX_BYTES", "PAGE", "Section", "make_page", "pack_text", "write_figures", "write_page"]
