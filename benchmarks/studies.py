"""The paper's analyses of AGS-CL, as `agscl study` makes them, with what anyone needs to repeat them.

AGSCL_DATA=FOLDER python benchmarks/studies.py tinyimagenet32 --device cuda --fast     # results/studies/…
python benchmarks/studies.py digits --seeds 3

Goes on where it stopped: finished runs in --runs are not repeated.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from measured import commit, record, short
from supervised import commits_of, parsed, run

from agscl.experiments import aopc, studies
from agscl.runs.errors import Interrupted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("preset")
    parser.add_argument("--studies", nargs="+", choices=list(studies.STUDIES), default=list(studies.STUDIES))
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("results/studies"))
    arguments, changes = parsed(parser)
    folder = arguments.runs / f"study-{arguments.preset}"
    planned = {
        study: studies.plan_study(arguments.preset, study, arguments.seeds, folder, device=arguments.device, **changes)
        for study in arguments.studies
    }
    jobs = {job.folder: job for lines in planned.values() for line in lines for job in line.jobs}
    try:
        run(arguments, list(jobs.values()), arguments.jobs)
    except Interrupted:
        print("stopped at the deadline; the same command continues", flush=True)
    for study, lines in planned.items():
        mine = [job for line in lines for job in line.jobs]
        finished = [job for job in mine if job.is_finished]
        commits = commits_of([job.folder for job in finished])
        if study == "aopc":
            found = {"seeds": aopc.measure_perturbations(folder, arguments.preset, finished, print)}
            commits = list(dict.fromkeys([*commits, short(commit())]))  # runs may be older than what looks at them
        else:
            found = {"lines": studies.collect_study(lines)}
        record(
            arguments.out / f"{arguments.preset}-{study}.json",
            {
                "preset": arguments.preset,
                "study": study,
                "changes": changes,
                "commits": commits,
                **found,
                "complete": len(finished) == len(mine),
            },
        )


if __name__ == "__main__":
    main()
