"""`python -m weightstream.startup`: shows, exports, merges and compares reports of starts."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import Optional

from ..errors import TimingError
from .reports import FORMATS, diff, load, merge, stats, write_text


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Does what the arguments say. 0: done; 1: it could not be done, or `diff --fail` found something slower."""
    options = _parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except TimingError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        return 0  # whoever reads has seen enough


def _print(text: str) -> None:
    """Writes to standard output, with question marks for what its encoding lacks."""
    out = sys.stdout
    if out is None:
        raise TimingError("standard output is closed")
    try:
        out.write(text.encode(out.encoding or "utf-8", "replace").decode(out.encoding or "utf-8"))
        out.flush()
    except OSError as error:
        # Python would complain once more at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())
        if isinstance(error, BrokenPipeError):
            raise
        raise TimingError(f"cannot write to standard output: {error.strerror or error}") from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m weightstream.startup", description="Reports of starts.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    show = commands.add_parser("show", help="a report as a tree with times")
    show.add_argument("file", help="a report, or the file of a recording that may not have ended")
    show.set_defaults(run=_show)

    export = commands.add_parser("export", help="a report for another program")
    export.add_argument("file")
    export.add_argument("--format", choices=FORMATS, default="chrome", help="chrome opens in ui.perfetto.dev")
    export.add_argument("--output", "-o", help="a file; else it is printed")
    export.set_defaults(run=_export)

    merged = commands.add_parser("merge", help="the files of several processes as one report")
    merged.add_argument("files", nargs="+")
    merged.add_argument("--output", "-o", required=True)
    merged.set_defaults(run=_merge)

    typical = commands.add_parser("stats", help="median, 90th percentile and interval of several runs")
    typical.add_argument("files", nargs="+", help="reports, or folders of them")
    typical.add_argument("--confidence", type=float, default=0.95)
    typical.add_argument("--json", action="store_true")
    typical.set_defaults(run=_stats)

    compared = commands.add_parser("diff", help="which phases of two sets of runs differ beyond noise")
    compared.add_argument("before", help="a report, or a folder of reports of several runs")
    compared.add_argument("after")
    compared.add_argument("--confidence", type=float, default=0.99, help="that nothing is marked falsely")
    compared.add_argument("--threshold", type=float, default=0.05, help="the smallest change that is marked")
    compared.add_argument("--json", action="store_true")
    compared.add_argument("--fail", action="store_true", help="exit status 1 if a phase is slower")
    compared.set_defaults(run=_diff)
    return parser


def _files(given: Sequence[str]) -> list[str]:
    """Files, and those in folders that could be reports."""
    found = []
    for path in given:
        if os.path.isdir(path):
            try:
                inside = sorted(name for name in os.listdir(path) if name.endswith((".json", ".jsonl")))
            except OSError as error:
                raise TimingError(f"cannot read {path}: {error.strerror or error}") from None
            if not inside:
                raise TimingError(f"{path} has no .json or .jsonl files")
            found += [os.path.join(path, name) for name in inside]
        else:
            found.append(path)
    return found


def _show(options: argparse.Namespace) -> int:
    _print(load(options.file).render("table"))
    return 0


def _export(options: argparse.Namespace) -> int:
    text = load(options.file).render(options.format)
    if options.output:
        write_text(options.output, text)
    else:
        _print(text)
    return 0


def _merge(options: argparse.Namespace) -> int:
    _print(merge(_files(options.files), options.output).render("table"))
    return 0


def _stats(options: argparse.Namespace) -> int:
    found = stats(_files(options.files), options.confidence)
    _print(json.dumps(found.to_dict()) + "\n" if options.json else str(found))
    return 0


def _diff(options: argparse.Namespace) -> int:
    found = diff(_files([options.before]), _files([options.after]), options.confidence, options.threshold)
    data = found.to_dict()
    _print(json.dumps(data) + "\n" if options.json else str(found))
    slower = any(one["flagged"] and (one["change"] or 0) >= 0 for one in data["differences"])
    return 1 if options.fail and slower else 0


if __name__ == "__main__":
    sys.exit(main())
