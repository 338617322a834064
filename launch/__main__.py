"""`tp-runtime VERB ...`, or `python -m tp_runtime.launch VERB ...`, alone or under torchrun."""

from __future__ import annotations

import logging
import os
import sys
from typing import TYPE_CHECKING

from tp_runtime import logs
from tp_runtime.errors import ConfigError
from tp_runtime.launch import bench, decode, doctor, exits, plan, select
from tp_runtime.launch.interrupts import Interrupts
from tp_runtime.launch.options import Parser, log_level, parse

if TYPE_CHECKING:
    from collections.abc import Sequence

VERBS = {"decode": decode, "select": select, "doctor": doctor, "plan": plan, "bench": bench}

_EPILOG = """\
exit status: 0 done; 1 failed while running; 2 asked for something that cannot be (a wrong flag,
setting, model or prompt); 130 interrupted. torchrun itself ends with 1 if any rank ended otherwise
than with 0.
"""


def build_parser() -> Parser:
    """The whole command line."""
    parser = Parser(prog="tp-runtime", description=__doc__, epilog=_EPILOG)
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    commands = parser.add_subparsers(dest="verb", metavar="VERB", parser_class=Parser)
    for name, module in VERBS.items():
        verb = commands.add_parser(name, help=module.HELP, description=module.HELP, epilog=_EPILOG)
        module.add_arguments(verb)
        # a verb with actions has its flags at those: these are for the verb without any
        verb.set_defaults(debug=False, log_level=None)
    return parser


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("tp-runtime")
    except PackageNotFoundError:
        return "(a checkout that is not installed)"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns its exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in words
    try:
        with Interrupts() as interrupts:
            args = parse(build_parser(), words)
            if args.version:
                sys.stdout.write(f"tp-runtime {_version()}\n")
                return exits.OK
            if args.verb is None:
                raise exits.UsageError(f"expected a verb: {', '.join(VERBS)}; see 'tp-runtime -h'")
            level = log_level(args)
            debug = level <= logs.LEVELS["debug"]
            rank = _rank()
            if rank > 0 and not getattr(args, "verbose_ranks", False):
                level = max(level, logs.LEVELS["error"])
            logs.configure(level, rank=rank)
            # a failed channel is told once, by the error that ends the command
            quiet = logging.ERROR if level == logging.WARNING else logging.NOTSET
            logging.getLogger("tp_runtime.broadcast").setLevel(quiet)
            status: int = VERBS[args.verb].run(args, interrupts)
            return status
    except KeyboardInterrupt:
        if _rank() == 0:
            sys.stderr.write(f"{exits.prefix()}interrupted\n")
        return exits.INTERRUPTED
    except BrokenPipeError:
        # the reader of our output went away, as `| head` does; Python would complain at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return exits.FAILED
    except exits.REPORTED as error:
        return exits.report(error, debug=debug)


def _rank() -> int:
    text = os.environ.get("RANK", "0")
    try:
        return int(text)
    except ValueError as error:
        raise ConfigError(f"environment variable RANK={text!r}: expected a whole number") from error


if __name__ == "__main__":
    sys.exit(main())
