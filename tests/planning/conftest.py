"""The command plans too."""

from tests.cli.conftest import command as command
