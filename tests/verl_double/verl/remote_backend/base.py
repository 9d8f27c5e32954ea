# SPDX-License-Identifier: Apache-2.0
"""The backend's base and its registry, by the contract."""

import abc
from typing import ClassVar

from verl import FORM


class RemoteBackend(abc.ABC):
    @classmethod
    @abc.abstractmethod
    def from_config(cls, main_config, *, handle=None): ...

    @abc.abstractmethod
    def reconnect_handle(self): ...

    @abc.abstractmethod
    def destroy(self): ...

    @abc.abstractmethod
    async def update_weights(self): ...

    @abc.abstractmethod
    async def save_checkpoint(self): ...

    @abc.abstractmethod
    def requires_single_forwarder(self): ...


class RemoteBackendRegistry:
    backends: ClassVar[dict] = {}
    loaders: ClassVar[dict] = {}

    @classmethod
    def register(cls, name):
        def enter(backend):
            if cls.backends.setdefault(name, backend) is not backend:
                raise ValueError(f"{name!r} is registered already")
            return backend

        return enter

    @classmethod
    def get(cls, name):
        if name not in cls.backends:
            raise KeyError(f"{name!r} is none of {cls.list()}")
        return cls.backends[name]

    @classmethod
    def create(cls, name, main_config):
        return cls.get(name).from_config(main_config)

    @classmethod
    def list(cls):
        return sorted(cls.backends)


if FORM != "seed":

    def _register_worker(cls, name, loader):
        if cls.loaders.setdefault(name, loader) is not loader:
            raise ValueError(f"worker {name!r} is registered already")

    def _get_worker(cls, name):
        loader = cls.loaders.get(name)
        return None if loader is None else loader()

    RemoteBackendRegistry.register_worker = classmethod(_register_worker)
    RemoteBackendRegistry.get_worker = classmethod(_get_worker)
