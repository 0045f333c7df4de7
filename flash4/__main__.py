"""``python -m flash4``: see ``flash4.cli``."""

import sys

from flash4.cli import main

sys.exit(main())
