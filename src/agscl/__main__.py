"""`python -m agscl`, the same as the command `agscl`."""

import sys

from agscl.cli.main import start

sys.exit(start())
