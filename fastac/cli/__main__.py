"""python -m fastac.cli: the command `fastac`."""

import sys

from fastac.cli import main

sys.exit(main())
