"""`python -m preftune.cli`: the same as the installed command `preftune`.

The launcher of several processes starts each of them this way.
"""

import sys

from preftune.cli.main import main

sys.exit(main())
