"""The command line: `python -m fusekit plan` for a terminal and for CI."""

import argparse
import os
import shlex
import sys
import traceback
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fusekit.errors import FusekitError

PROGRAM = "python -m fusekit"
ENDS = """\
exit status:
  0  the plan was made; with --expect, every site of the file is still there
  1  with --expect, a site of the file is gone
  2  an error, told on stderr
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # a terminal that lacks a sign still gets the rest
    options = _parser().parse_args(arguments)
    try:
        status: int = options.run(options)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # what reads the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 2
    except FusekitError as error:
        return _failed(str(error), options.debug)
    except Exception as error:
        said = f"{type(error).__name__}: {error} (this should not happen: --debug shows where)"
        return _failed(said, options.debug)


def _failed(said: str, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    sys.stdout.flush()
    print(f"fusekit: {said}", file=sys.stderr)
    return 2


def _parser() -> argparse.ArgumentParser:
    from fusekit import __version__

    parser = argparse.ArgumentParser(PROGRAM, description="What in a model can be fused, and why not.")
    parser.add_argument("--version", action="version", version=f"fusekit {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    plan = commands.add_parser(
        "plan",
        help="plan a model from its config",
        description="Builds the model of a Transformers config without weights, on the meta device and "
        "offline, and prints its sites and refusals.",
        epilog=ENDS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    plan.set_defaults(run=_plan)
    add = plan.add_argument
    add("config", metavar="CONFIG_OR_FOLDER", help="a config.json of Transformers, or a folder with one")
    add("--expect", metavar="FILE", help="compare with a saved plan; exit status 1 when a site of it is gone")
    add("--save", metavar="FILE", help="write the plan as JSON, for --expect")
    add("--html", metavar="FILE", help="write the plan as one html page")
    add(
        "--only",
        metavar="FUSION",
        action="append",
        help="look for this fusion only (as in qkv,glu)",
    )
    add("--exclude", metavar="FUSION", action="append", help="do not look for this fusion")
    add(
        "--layers",
        metavar="PATTERN",
        action="append",
        help="only modules like 'model.layers.0*'; again for more",
    )
    add("--trust-remote-code", action="store_true", help="run the code that comes with the config")
    add("--debug", action="store_true", help="show the traceback of an error")
    return parser


def _plan(options: argparse.Namespace) -> int:
    from fusekit import display
    from fusekit.model import plan
    from fusekit.model.build import from_config, quiet
    from fusekit.model.changes import compare
    from fusekit.model.saved import load_plan, saved

    only, exclude = _words(options.only), _words(options.exclude)
    expected = load_plan(options.expect) if options.expect else None
    built = from_config(options.config, trust_remote_code=options.trust_remote_code)
    with quiet():
        found = plan(built.model, only=only or None, exclude=exclude, layers=options.layers)
    print(display.text(found))
    for remark in built.remarks:
        print(f"  note: {remark}")
    if options.save:
        print(f"saved to {found.save(options.save)}")
    if options.html:
        try:
            print(f"written to {found.to_html(options.html)}")
        except OSError as error:
            raise FusekitError(f"the page cannot be written to {options.html}: {error.strerror}") from None
    if expected is None:
        return 0
    part = _part(expected, only, exclude, options.layers)
    changes = compare(part, saved(found))
    print(f"\ncompared with {options.expect}")
    print(display.text(changes))
    if changes:
        print(f"if this is as it should be: {_update(options, whole=part == expected)}")
    return 0 if changes.ok else 1


def _words(given: list[str] | None) -> list[str]:
    return [word for text in given or [] for word in text.split(",") if word]


def _part(expected: Any, only: list[str], exclude: list[str], layers: list[str] | None) -> Any:
    """What the options leave of a saved plan: a plan of some fusions or layers is compared with those."""
    from fusekit.model.selection import lies_under

    def chosen(one: Any) -> bool:
        if one.fusion in exclude or (only and one.fusion not in only):
            return False
        return layers is None or lies_under(one.name, layers)

    return replace(
        expected,
        sites=tuple(filter(chosen, expected.sites)),
        refusals=tuple(filter(chosen, expected.refusals)),
        applied=tuple(filter(chosen, expected.applied)),
    )


def _update(options: argparse.Namespace, whole: bool) -> str:
    """The command that writes the file anew; all of it where it was compared in part."""
    words = [options.config, "--save", options.expect]
    for name in ("only", "exclude", "layers") if whole else ():
        words += [word for given in getattr(options, name) or [] for word in (f"--{name}", given)]
    if options.trust_remote_code:
        words.append("--trust-remote-code")
    return f"{PROGRAM} plan {shlex.join(words)}"
