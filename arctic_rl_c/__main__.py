# SPDX-License-Identifier: Apache-2.0
"""Entry point of `python -m arctic_rl_c`."""

import sys

from arctic_rl_c.cli import main

if __name__ == "__main__":
    sys.exit(main())
