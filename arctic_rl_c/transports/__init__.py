# SPDX-License-Identifier: Apache-2.0
"""How ops reach a server. See `docs/transports.md`."""

from arctic_rl_c.transports.base import Transport

__all__ = ["Transport"]
