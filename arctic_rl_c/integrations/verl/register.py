# SPDX-License-Identifier: Apache-2.0
"""Entering the backend, the worker and the replica into verl's registries.

Three forms of verl have a remote backend:

- `seed`: one registry, of backend classes. The entry script knows one name, `arctic`, and imports
  the worker and the backend for it from modules inside verl.
- `plugin`: the registry has workers too; the entry script takes what is registered.
- `v1`: the same registries, and another trainer (`trainer.v1`), with batches in TransferQueue.
"""

from __future__ import annotations

import importlib
import logging
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_log = logging.getLogger("arctic_rl_c.integrations.verl")

NAME, OTHER_NAME = "arctic", "arctic_c"

_NEEDED = (
    "arctic_rl_c.integrations.verl needs a verl that has verl.remote_backend, and {found}: install "
    "verl from its pull request 6422 (plug-in form) or 7102 (V1 trainer), see docs/verl.md"
)

_FORMS = {
    "seed": "first form, without a worker registry",
    "plugin": "plug-in form",
    "v1": "plug-in form with the V1 trainer",
}

#: Where the entry script of the first form imports the worker and the backend from.
_SEED_WORKER = "verl.remote_backend.workers.arctic_rl"
_SEED_BACKEND = "verl.workers.remote_client.arctic_rl"


@dataclass(frozen=True)
class Registration:
    """What was registered.

    Attributes:
        name: For `trainer.remote_backend` and `actor_rollout_ref.rollout.name`.
        form: `seed`, `plugin` or `v1`.
        verl: verl's version.
    """

    name: str
    form: str
    verl: str

    def __str__(self) -> str:
        return f"registered as {self.name!r} with verl {self.verl} ({_FORMS[self.form]})"


def register() -> Registration:
    """Register with the verl that is installed. Doing so again changes nothing.

    Raises:
        ImportError: There is no verl, or one without a remote backend.
    """
    try:
        base: Any = importlib.import_module("verl.remote_backend.base")
    except ModuleNotFoundError as error:
        missing = str(error.name)
        if not "verl.remote_backend.base".startswith(missing):
            raise  # something that verl itself needs
        found = "no verl is installed" if missing == "verl" else "the one installed has none"
        raise ImportError(_NEEDED.format(found=found)) from None
    replicas: Any = importlib.import_module("verl.workers.rollout.replica")
    backend: Any = importlib.import_module("arctic_rl_c.integrations.verl.backend")

    form = find_form(base)
    name = _free_name(base.RemoteBackendRegistry, backend.ArcticBackend)
    base.RemoteBackendRegistry.register(name)(backend.ArcticBackend)
    if form == "seed":
        _stand_in_for_seed_modules(name, backend.ArcticBackend)
    else:
        base.RemoteBackendRegistry.register_worker(name, load_worker)
    replicas.RolloutReplicaRegistry.register(name, load_replica)
    result = Registration(name, form, _verl_version())
    _log.info("%s", result)
    return result


def find_form(base: Any) -> str:
    """Which of the three forms the installed verl has."""
    if not hasattr(base.RemoteBackendRegistry, "register_worker"):
        return "seed"
    # By its file: importing the trainer would load all of them, in every process.
    roots = getattr(sys.modules["verl"], "__path__", [])
    trainer = Path("trainer", "ppo", "v1", "trainer_remote_backend.py")
    return "v1" if any((Path(root) / trainer).is_file() for root in roots) else "plugin"


def load_worker() -> type:
    """The forwarder worker's class."""
    from arctic_rl_c.integrations.verl.worker import ArcticWorker

    return ArcticWorker


def load_replica() -> type:
    """The rollout replica's class."""
    from arctic_rl_c.integrations.verl.rollout import ArcticReplica

    return ArcticReplica


def _free_name(registry: Any, backend: type) -> str:
    for name in (NAME, OTHER_NAME):
        if name not in registry.list() or registry.get(name) is backend:
            return name
    taken = ", ".join(repr(registry.get(name)) for name in (NAME, OTHER_NAME))
    raise ImportError(f"both names of the Arctic backend are taken in verl's registry: {taken}")


def _stand_in_for_seed_modules(name: str, backend: type) -> None:
    """Let the first form's entry script find this worker where it looks for its own.

    Its own modules need another client library. Where they were imported already, they stay.
    """
    if name != NAME or _SEED_BACKEND in sys.modules:
        _log.warning(
            "verl's own Arctic adapter is in use already: import this plug-in before it, by "
            "VERL_USE_EXTERNAL_MODULES, to use arctic_rl_c in its place"
        )
        return
    client = types.ModuleType(_SEED_BACKEND, "Stands in for verl's own adapter.")
    vars(client).update(ArcticRLClientWrapper=backend)
    worker = _LazyModule(_SEED_WORKER, "Stands in for verl's own forwarder.")
    sys.modules.update({_SEED_BACKEND: client, _SEED_WORKER: worker})


class _LazyModule(types.ModuleType):
    """A module that loads the worker when its name is looked up."""

    def __getattr__(self, name: str) -> Any:
        if name == "ArcticRLActorRolloutRefWorker":
            return load_worker()
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")


def _verl_version() -> str:
    return str(getattr(sys.modules["verl"], "__version__", "of unknown version"))
