"""``python -m pycomm``."""

import sys

from pycomm.cli import main

sys.exit(main())
