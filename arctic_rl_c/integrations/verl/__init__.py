# SPDX-License-Identifier: Apache-2.0
"""The plug-in for verl: set `VERL_USE_EXTERNAL_MODULES=arctic_rl_c.integrations.verl`.

verl imports this module in each of its processes, from inside `import verl`. It registers the
backend class, the forwarder worker and the rollout replica; the latter two are loaded when verl
asks for them. See `docs/verl.md`.
"""

from __future__ import annotations

from arctic_rl_c.integrations.verl.register import Registration, register

#: What was registered, under which name, and with which form of verl.
registration: Registration = register()

__all__ = ["Registration", "registration"]
