"""python -m fastac: the command `fastac`."""

import sys

from fastac.cli import main

sys.exit(main())
