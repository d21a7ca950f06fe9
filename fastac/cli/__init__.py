"""fastac backends | plan | bench: savable backends, planned bytes and FLOPs of policies, and measured ones.

Neither torch nor diffusers is imported here: the module of a command is imported when that command runs.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import os
import sys
from collections.abc import Sequence

from fastac.errors import FastacError

COMMANDS = {
    "backends": "every attention library and backend, and how its outputs are saved here",
    "plan": "bytes and FLOPs of every policy on a video, without weights or GPU",
    "bench": "time and bytes of every policy, measured on this machine",
}
"""Command -> its purpose. Its module, of the same name, has add_arguments(parser) and run(options)."""


def version(distribution: str) -> str | None:
    """The installed version of a distribution; None if it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Returns 0, 1 after an error, or 2 for a wrong call."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(prog="fastac", description="Selective activation checkpointing for attention.")
    parser.add_argument("--version", action="version", version=f"fastac {version('fastac')}")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, purpose in COMMANDS.items():
        command = commands.add_parser(name, help=purpose, description=purpose)
        # Only the module of the called command is imported: `fastac --help` needs neither torch nor diffusers.
        if name in arguments[:1]:
            module = importlib.import_module(f"fastac.cli.{name}")
            module.add_arguments(command)
            command.set_defaults(run=module.run, arguments=arguments)
    options = parser.parse_args(arguments)
    try:
        code = int(options.run(options))
        # Without this flush, a closed pipe would raise when Python ends, outside of this `try`.
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader has closed the pipe, as in `fastac plan ... | head`. What is still buffered goes to the null device
        # when Python ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except FastacError as error:
        print(f"fastac: {error}", file=sys.stderr)
        return 1
