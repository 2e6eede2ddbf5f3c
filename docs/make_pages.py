"""Write one page of each kind to docs/pages/, and the picture of a page for the README, docs/report.png.

python docs/make_pages.py

The pages are made from a run of digits, which takes seconds, and from files in results/. They are not kept in the
repository: each holds Vega's scripts. The picture needs Chromium; without it, the one that is there stays.
"""

from __future__ import annotations

import io
import os
import sys
import tempfile
from pathlib import Path

HOME = Path(__file__).resolve().parent.parent
PAGES = HOME / "docs" / "pages"
PICTURE = HOME / "docs" / "report.png"
KINDS = {"comparison": "tinyimagenet32", "agents": "atari8-short", "control": "control", "study": "studies/digits-aopc"}
"""The pages made of results, where these are there."""

sys.path.insert(0, str(HOME / "tests"))


def main() -> None:
    from agscl.cli.main import main as run_command

    PAGES.mkdir(exist_ok=True)
    os.environ["AGSCL_REPORT"] = "0"
    with tempfile.TemporaryDirectory() as folder:
        run_command(["run", "digits", "--runs", folder, "--name", "digits"])
        run_command(["report", f"{folder}/digits", "--out", str(PAGES / "digits.html")])
        take_picture(PAGES / "digits.html", Path(folder))
    for kind, name in KINDS.items():
        result = HOME / "results" / f"{name}.json"
        if result.exists():
            run_command(["report", str(result), "--out", str(PAGES / f"{kind}.html")])


def take_picture(page: Path, folder: Path) -> None:
    """The upper part of the page beside its node map, in few colours."""
    from PIL import Image

    from report.browser import Browser, find_chromium

    if find_chromium() is None:
        print("there is no Chromium here, so docs/report.png stays as it is")
        return
    with Browser(folder / "profile") as browser:
        browser.set_size(1000)
        browser.open(page)
        browser.draw_all_charts()
        browser.run("document.getElementById('mode').value = 'task'")
        browser.run("(() => { const task = document.getElementById('task'); task.value = 3;"
                    " task.dispatchEvent(new Event('input')); })()")  # fmt: skip
        shot = Image.open(io.BytesIO(browser.take_screenshot(folder / "page.png").read_bytes())).convert("RGB")
        top, end = (
            int(browser.run(f"document.getElementById('{name}').offsetTop")) - 20 for name in ("nodes", "memory")
        )
    upper, lower = shot.crop((0, 0, 1000, top)), shot.crop((0, top, 1000, end))
    height = max(upper.height, lower.height)
    both = Image.new("RGB", (2000, height), "white")
    both.paste(upper, (0, 0))
    both.paste(lower, (1000, 0))
    small = both.resize((1400, height * 1400 // 2000), Image.Resampling.LANCZOS)
    small.quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(PICTURE, optimize=True)
    print(f"written: {PICTURE}")


if __name__ == "__main__":
    main()
