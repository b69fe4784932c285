"""The command `preftune report RUN... [-o report.html]`.

The page is written beside the user and can be sent to anybody: it needs no other file and no network.
"""

from __future__ import annotations

import argparse
import webbrowser
from pathlib import Path

from preftune.cli.report.page import html_of
from preftune.cli.report.runs import read_run
from preftune.errors import ConfigError


def main(words: list[str]) -> int:
    """Write the page and say where it is.

    Raises:
        ConfigError: a folder that is no run, or a file that cannot be written.
    """
    parser = argparse.ArgumentParser(
        prog="preftune report", description="One HTML page about runs: curves, findings, completions, config, data."
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="output_dir of a run; several are laid over each other")
    parser.add_argument("-o", "--output", default="report.html", help="the file to write (report.html)")
    parser.add_argument("--docs", default="docs", help="folder or address of the documentation, for links (docs)")
    parser.add_argument("--open", action="store_true", help="show it in the browser")
    options = parser.parse_args(words)
    runs = [read_run(path) for path in dict.fromkeys(options.runs)]
    path = Path(options.output)
    text = html_of(runs, options.docs)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error}). Give another file with -o.") from error
    for run in runs:
        for problem in run.problems:
            print(f"{run.path}: {problem}")
    print(f"{path} ({len(text.encode()) / 1e6:.1f} MB, {len(runs)} run{'s' if len(runs) > 1 else ''})")
    if options.open:
        webbrowser.open(path.resolve().as_uri())
    return 0
