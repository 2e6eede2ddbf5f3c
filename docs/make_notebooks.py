"""Run the notebooks in docs/notebooks/ and keep them with their outputs.

python docs/make_notebooks.py    # needs the extra `site`
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

NOTEBOOKS = Path(__file__).resolve().parent / "notebooks"


def run_notebook(path: Path) -> dict[str, Any]:
    """The notebook with the outputs of a fresh run, without what differs from run to run (times, versions)."""
    import nbformat
    from nbclient import NotebookClient
    from traitlets.config import Config

    notebook = nbformat.read(path, as_version=4)
    # over TCP, other users of the machine could listen
    settings = Config(KernelManager={"transport": "ipc"})
    NotebookClient(notebook, timeout=600, kernel_name="python3", config=settings).execute()
    for number, cell in enumerate(notebook.cells):
        cell.id, cell.metadata = f"cell-{number}", {}
        if printed := "".join(output.text for output in cell.get("outputs", []) if output.output_type == "stream"):
            others = [output for output in cell.outputs if output.output_type != "stream"]
            cell.outputs = [nbformat.v4.new_output("stream", name="stdout", text=printed), *others]
    notebook.metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    return notebook


def main() -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the same sums in the same order on every machine
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        notebook = run_notebook(path)
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")
        print(path.name)


if __name__ == "__main__":
    main()
