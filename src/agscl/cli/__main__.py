"""`python -m agscl.cli`."""

import sys

from agscl.cli.main import main

sys.exit(main())
