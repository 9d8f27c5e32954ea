# SPDX-License-Identifier: Apache-2.0
"""The embedded server as Ray actors: one for each role, and one in front that orders their ops.

The actor in front is what other processes attach to. It creates the roles and so owns them: they
end with it, and it ends with whoever created it. It holds no model and does nothing slow.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from arctic_rl_c import PeerLostError
from arctic_rl_c.local.remote_errors import describe_error, rebuild_error
from arctic_rl_c.transports.http_errors import complete
from arctic_rl_c.transports.ray_data import pack, unpack

#: Ops of the server that others may call.
SERVER_OPS = frozenset(
    {
        "fwd_no_grad",
        "fwd_bwd",
        "step",
        "generate",
        "sync_weights",
        "save_checkpoint",
        "load_checkpoint",
        "sleep_inference",
        "wake_inference",
        "reset_prefix_cache",
        "weights_digests",
        "describe",
        "measure_peak_flops",
    }
)


class RoleActor:
    """A trainer or sampler in a Ray worker process; see `arctic_rl_c.local.worker`."""

    def __init__(self, role: str, options: Mapping[str, Any]) -> None:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # models come from disk
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        # Roles take turns on the same cores: threads that spin take the other's time.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        from arctic_rl_c.local.worker import build_role

        self._failed: dict[str, Any] | None = None
        try:
            self._role = build_role(role, options)
        except Exception as error:
            # An exception here would leave Ray's own text only: keep it for the first op.
            self._failed = describe_error(error)

    def call(self, op: str, arguments: Mapping[str, Any], payload: Any = None) -> dict[str, Any]:
        """Run one of the role's ops: `{"result"}` or `{"error"}`."""
        from arctic_rl_c.local.worker import run_op

        if self._failed is not None:
            return {"error": self._failed}
        try:
            given = (
                dict(arguments) if payload is None else {**arguments, "payload": unpack(payload)}
            )
            return {"result": pack(run_op(self._role, op, given))}
        except Exception as error:
            return {"error": describe_error(error)}

    def close(self) -> None:
        """Give back what the role holds outside its process."""
        if self._failed is None:
            self._role.close()

    def pid(self) -> int:
        """The process that this is."""
        return os.getpid()


class RayRole:
    """A `Role` (see `arctic_rl_c.local.server`) that is a Ray actor.

    Args:
        role: `trainer` or `sampler`.
        actor: Handle of a `RoleActor`.
    """

    def __init__(self, role: str, actor: Any) -> None:
        self.role, self.actor = role, actor

    def submit(self, op: str, **arguments: Any) -> Future[Any]:
        """Ask for an op. A `payload` is an object reference in a list, and goes on as it is."""
        payload = arguments.pop("payload", None)
        # In a list Ray leaves a reference alone; as an argument it is fetched by the role.
        reference = payload[0] if payload is not None else None
        outcome: Future[Any] = Future()
        outcome.set_running_or_notify_cancel()
        answered = self.actor.call.remote(op, arguments, reference).future()
        answered.add_done_callback(lambda done: self._finish(done, op, outcome))
        return outcome

    def interrupt(self, op: str) -> None:
        """Do nothing: an actor's op ends by its own deadline."""

    def _finish(self, done: Future[Any], op: str, outcome: Future[Any]) -> None:
        error = done.exception()
        if error is not None:
            outcome.set_exception(lost(self.role, op, error))
            return
        answer = done.result()
        if "error" in answer:
            outcome.set_exception(rebuild_error(answer["error"]))
        else:
            outcome.set_result(answer["result"])


class ServerActor:
    """The embedded server, in front of its two roles.

    Args:
        options: `LocalOptions` as a dict of dicts.
        resources: By role, what `ray.remote(...).options` is given.
        colocated: Whether both roles use one device.
    """

    def __init__(
        self,
        options: Mapping[str, Any],
        resources: Mapping[str, Mapping[str, Any]],
        colocated: bool,
    ) -> None:
        import ray

        from arctic_rl_c.local.server import EmbeddedServer

        remote = ray.remote(RoleActor)
        roles = []
        for role in ("trainer", "sampler"):
            actor = remote.options(**resources[role]).remote(
                role, {"model": options[f"{role}_model"], "options": options[role]}
            )
            roles.append(RayRole(role, actor))
        self._roles = roles
        self._server = EmbeddedServer(
            *roles,
            cuda_ipc=options["cuda_ipc"],
            low_memory=options["low_memory"],
            sync_timeout=options["sync_timeout"],
            verify_weights=options["verify_weights"],
            weight_transport=options["weight_transport"],
            colocated=colocated,
        )
        self._serves_reference = bool(options["trainer"]["reference"])

    async def call(self, op: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Run one of `SERVER_OPS`: `{"result"}` or `{"error"}`."""
        try:
            if op not in SERVER_OPS:
                raise ValueError(f"the embedded server has no op {op!r}")
            return {"result": await getattr(self._server, op)(**arguments)}
        except Exception as error:
            return {"error": describe_error(error)}

    async def facts(self) -> dict[str, Any]:
        """Process ids by role; gives an answer when both have loaded their models."""
        pids = await asyncio.gather(*(role.actor.pid.remote() for role in self._roles))
        named = {role.role: pid for role, pid in zip(self._roles, pids, strict=True)}
        return {"server": os.getpid(), **named}

    async def close(self) -> None:
        """Let both roles give back what they hold, and end them."""
        import ray

        await asyncio.to_thread(self._server.close)
        closing = (role.actor.close.remote() for role in self._roles)
        # A role that is dead or stuck does not keep the other from ending.
        await asyncio.wait([asyncio.ensure_future(_settled(ref)) for ref in closing], timeout=5.0)
        for role in self._roles:
            ray.kill(role.actor)


async def _settled(reference: Any) -> None:
    try:
        await reference
    except Exception:
        return


def lost(role: str, op: str, error: BaseException) -> Exception:
    """What a failed call of an actor means, as an exception of this package."""
    import ray

    if not isinstance(error, ray.exceptions.RayActorError):
        return error if isinstance(error, Exception) else RuntimeError(repr(error))
    found = PeerLostError(f"the {role} (a Ray actor) died during {op!r}: {str(error).strip()}")
    complete(found, "ARL_ERR_PEER_LOST", op)
    found.role = role  # type: ignore[attr-defined]
    found.__cause__ = error
    return found
