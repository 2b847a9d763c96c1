"""`python -m evoattn` is the command `evoattn`."""

import sys

from evoattn.cli import main

sys.exit(main())
