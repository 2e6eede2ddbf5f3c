"""Write one page of each kind to docs/pages/, and the picture of a page for the README, docs/report.png.

python docs/make_pages.py [--atari FOLDER]

The pages are made from a run of digits (seconds), a run of control with recorded play (minutes), and files in results/.
That of atari8-short takes a GPU: --atari FOLDER makes it of the comparison in FOLDER, once `agscl play` recorded it.
The picture needs Chromium; without it, the one that is there stays.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
import tempfile
from pathlib import Path

HOME = Path(__file__).resolve().parent.parent
PAGES = HOME / "docs" / "pages"
PICTURE = HOME / "docs" / "report.png"
RUNS = {"digits": ["digits"], "agents": ["control"]}
"""For each page made of a run, the run's preset and options."""
RESULTS = {"comparison": "tinyimagenet32", "study": "studies/digits-aopc"}
"""For each page made of a file in results/, its name."""

sys.path.insert(0, str(HOME / "tests"))


def main() -> None:
    from agscl.cli.main import main as run_command

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--atari", type=Path, help="a comparison of atari8-short; the other pages are left as they are")
    PAGES.mkdir(exist_ok=True)
    os.environ["AGSCL_REPORT"] = "0"
    if (atari := parser.parse_args().atari) is not None:
        folder = atari.resolve()
        with contextlib.chdir(folder.parent):  # pages name the folders of their runs
            sys.exit(run_command(["report", folder.name, "--runs", ".", "--out", str(PAGES / "atari8-short.html")]))
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):  # pages name the folders of their runs
        for kind, (preset, *options) in RUNS.items():
            run_command(["run", preset, *options, "--name", preset])
            if kind != "digits":
                run_command(["play", preset])
            run_command(["report", preset, "--out", str(PAGES / f"{kind}.html")])
        take_picture(PAGES / "digits.html", Path(folder))
    for kind, name in RESULTS.items():
        run_command(["report", str(HOME / "results" / f"{name}.json"), "--out", str(PAGES / f"{kind}.html")])


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
