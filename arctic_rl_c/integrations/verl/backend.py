# SPDX-License-Identifier: Apache-2.0
"""The backend that verl's trainer, forwarder and rollout server share."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from verl.remote_backend.base import RemoteBackend

from arctic_rl_c import ArcticRLClient, ConfigError, config_warnings
from arctic_rl_c.integrations.verl.compat import LoopThread, Reach, plain_config
from arctic_rl_c.local.ignored import embedded_warnings

_log = logging.getLogger("arctic_rl_c.integrations.verl")

#: Where a server is looked for when `comms.protocol` is http and no URL is given.
DEFAULT_URL = "http://localhost:7000"


class ArcticBackend(RemoteBackend):  # type: ignore[misc]  # verl has no types
    """verl's remote backend over an `ArcticRLClient`.

    `from_config` is how it is made: on the driver it starts the server and owns it; with a handle
    it attaches, from any other process, and ends nothing. Pickling gives the handle.

    Args:
        config: The main config in normalised form.
        transport: What the client talks through.
        owner: Whether `destroy` ends the server.
        reach: What of the configuration is the plug-in's own.
    """

    def __init__(
        self,
        config: dict[str, Any],
        transport: Any,
        *,
        owner: bool,
        reach: Reach | None = None,
    ) -> None:
        self.config = config
        self.transport = transport
        self._reach = reach or Reach()
        self._owner = owner
        self._destroyed = False
        tokenizer = None
        if not transport.accepts_token_ids:
            tokenizer = _load_tokenizer(config)
        self._client = ArcticRLClient(
            transport,
            config,
            owner=owner,
            tokenizer=tokenizer,
            temperature_in_log_prob=self._reach.temperature_in_log_prob,
        )

    # -- life ----------------------------------------------------------------------------------

    @classmethod
    def from_config(
        cls, main_config: Any, *, handle: Mapping[str, Any] | None = None
    ) -> ArcticBackend:
        """Start a server, or attach to one.

        Args:
            main_config: verl's whole configuration.
            handle: What `reconnect_handle` of another process's backend gave.

        Raises:
            ConfigError: The configuration is wrong, or asks for what is not there.
            PeerLostError: Nobody answers.
            TransportUnavailableError: A package that the transport needs is missing.
        """
        config, reach = plain_config(main_config)
        if handle is not None:
            return cls(config, attach(handle, reach), owner=False, reach=reach)
        from arctic_rl_c.integrations.verl import registration

        _check_trainer(config, registration.form)
        protocol = config["remote_backend"]["comms"]["protocol"]
        if reach.transport == "arctic":
            transport = _start_arctic(config, reach)
        elif protocol == "http":
            transport = _start_http(config, reach)
        else:
            transport = _start_ray(config, reach)
        warm = reach.temperature_in_log_prob
        for text in effective_warnings(config, transport):
            if not (warm and text.startswith("actor_rollout_ref.rollout.temperature=")):
                _log.warning("%s", text)
        # The one line that tells a user that his run goes through this library, and how.
        way = transport.name
        if reach.transport is not None:
            way += f", {transport.description}"
        if config["remote_backend"]["train"]["zorro_train"]["enable"]:
            way += "; ZoRRO on"
        print(f"arctic_rl_c: {registration}; transport {way}", flush=True)
        return cls(config, transport, owner=True, reach=reach)

    def reconnect_handle(self) -> dict[str, Any]:
        """What `from_config(handle=...)` takes. Ray pickles it."""
        return {"backend": "arctic_rl_c", "transport": self.transport.reconnect_handle()}

    def requires_single_forwarder(self) -> bool:
        """True: the server has its own parallelism, and an update must reach it once."""
        return True

    @property
    def owner(self) -> bool:
        """Whether `destroy` ends the server."""
        return self._owner

    async def destroy(self) -> None:
        """End the server; by a backend that is attached, let go of it. Idempotent.

        It runs while the error that ended a training is on its way to the user, so it logs what
        goes wrong here rather than raise it.
        """
        if self._destroyed:
            return
        self._destroyed = True
        try:
            await self._client.destroy()
        except Exception:
            _log.exception("ending the Arctic server failed; it may still be running")

    def __reduce__(self) -> Any:
        return _rebuild, (self.config, self.reconnect_handle(), self._reach)

    # -- training ------------------------------------------------------------------------------

    async def compute_log_prob(
        self,
        data: Any,
        *,
        ref: bool,
        calculate_entropy: bool,
        rollout_n: int | None = None,
        temperature: float | None = None,
        pad_token_id: int,
    ) -> dict[str, Any]:
        """See `ArcticRLClient.compute_log_prob`."""
        return await self._client.compute_log_prob(
            data,
            ref=ref,
            calculate_entropy=calculate_entropy,
            rollout_n=rollout_n,
            temperature=temperature,
            pad_token_id=pad_token_id,
        )

    async def update_actor(
        self,
        data: Any,
        *,
        actor_config: Any,
        pad_token_id: int,
        rollout_n: int | None = None,
        temperature: float | None = None,
    ) -> dict[str, Any]:
        """See `ArcticRLClient.update_actor`."""
        return await self._client.update_actor(
            data,
            actor_config=actor_config,
            pad_token_id=pad_token_id,
            rollout_n=rollout_n,
            temperature=temperature,
        )

    def log_probs_to_nested(self, data: Any, dense: Any) -> Any:
        """Dense log-probs or entropies as jagged ones, slot i speaking of token i + 1."""
        return self._client.log_probs_to_nested(data, dense)

    async def save_checkpoint(self, path: str | None = None, **options: Any) -> dict[str, Any]:
        """Write a checkpoint; see `Trainer.save_checkpoint` for the embedded server's options."""
        return await self._client.save_checkpoint(path, **options)

    async def load_checkpoint(self, path: str | None = None, **options: Any) -> dict[str, Any]:
        """Resume from a checkpoint; `global_step` is 0 when there is none."""
        return await self._client.load_checkpoint(path, **options)

    # -- rollout -------------------------------------------------------------------------------

    async def update_weights(self) -> dict[str, Any]:
        """Bring the trainer's weights to the sampler, and wake it."""
        return await self._client.sync_weights()

    async def generate(
        self,
        prompt_ids: Any,
        sampling_params: Mapping[str, Any] | None = None,
        routing_key: str | Sequence[str | None] | None = None,
    ) -> list[dict[str, Any]]:
        """One result a prompt; see `ArcticRLClient.generate`."""
        return await self._client.generate(prompt_ids, sampling_params, routing_key)

    async def wake_up_inference(self, tags: Sequence[str] | None = None) -> dict[str, Any]:
        """Take the sampler's memory again."""
        return await self._client.wake_up_inference(tags)

    async def sleep_inference(self, level: int = 1) -> dict[str, Any]:
        """Give the sampler's memory back."""
        return await self._client.sleep_inference(level)

    async def reset_prefix_cache(self) -> Any:
        """Forget the states of earlier prompts."""
        return await self._client.reset_prefix_cache()


def effective_warnings(config: Mapping[str, Any], transport: Any) -> list[str]:
    """What of a configuration has no effect, once each, with the server at hand."""
    if getattr(transport, "server_limits", True):
        return config_warnings(config)
    return embedded_warnings(config)


def _check_trainer(config: Mapping[str, Any], form: str) -> None:
    """Refuse what verl's own trainer would take another way than through this backend."""
    role, trainer = config["actor_rollout_ref"], config["trainer"]
    actor, model, rollout = role["actor"], role["model"], role["rollout"]
    implementation = trainer.get("use_legacy_worker_impl", "disable")
    if form != "v1" and implementation != "disable":
        raise ConfigError(
            f"trainer.use_legacy_worker_impl is {implementation!r}: verl takes the workers of a "
            "remote backend with disable alone, and its own otherwise"
        )
    # The V1 trainer sets its own engine.
    engine = (rollout.get("checkpoint_engine") or {}).get("backend")
    if form != "v1" and engine not in (None, "naive"):
        raise ConfigError(
            f"actor_rollout_ref.rollout.checkpoint_engine.backend is {engine!r}: the Arctic server "
            "moves the weights itself, which verl asks for with naive alone; leave it away"
        )
    lora = model.get("lora_rank") or (model.get("lora") or {}).get("rank")
    if (lora or model.get("lora_adapter_path")) and (
        actor.get("use_kl_loss") or config["algorithm"].get("use_kl_in_reward")
    ):
        raise ConfigError(
            "actor_rollout_ref.model asks for LoRA, whose reference verl takes from the actor "
            "without its adapter; the Arctic server has no adapters, so that the KL terms would "
            "compare the actor with itself: leave lora_rank and lora_adapter_path away"
        )


def _rebuild(config: dict[str, Any], handle: Mapping[str, Any], reach: Reach) -> ArcticBackend:
    return ArcticBackend(config, attach(handle, reach), owner=False, reach=reach)


def attach(handle: Mapping[str, Any], reach: Reach) -> Any:
    """A transport to the server that a backend's handle describes.

    Raises:
        ConfigError: It is no handle of this backend, or of a transport that stays in its process.
    """
    if handle.get("backend") != "arctic_rl_c":
        raise ConfigError(
            f"this is the handle of another backend, with the keys {', '.join(sorted(handle))}"
        )
    inner = handle["transport"]
    if inner["transport"] == "ray":
        from arctic_rl_c.transports.ray import RayTransport

        return RayTransport.from_handle(inner, **reach.limits)
    if inner["transport"] == "http":
        from arctic_rl_c.transports.http import HttpTransport

        return HttpTransport.from_handle(inner, **reach.limits)
    if inner["transport"] == "arctic":
        from arctic_rl_c.transports.arctic import ArcticTransport

        return ArcticTransport.from_handle(inner, **reach.limits)
    raise ConfigError(f"the transport {inner['transport']!r} cannot be attached to")


def _start_ray(config: dict[str, Any], reach: Reach) -> Any:
    if reach.url is not None:
        raise ConfigError(
            f"remote_backend.comms.url is {reach.url!r} and comms.protocol is ray: set it to http"
        )
    for package in ("arctic_platform", "arctic_training"):
        if importlib.util.find_spec(package) is not None:
            _log.warning(
                "%s is installed, and not used: this run uses the embedded server. To use its "
                "client and its server, set remote_backend.comms.transport=arctic",
                package,
            )
            break
    from arctic_rl_c.transports.ray import RayTransport

    return RayTransport(config, **reach.limits)


def _start_arctic(config: dict[str, Any], reach: Reach) -> Any:
    from arctic_rl_c.transports.arctic import ArcticTransport

    return LoopThread.get().run(ArcticTransport.connect(config, url=reach.url, **reach.limits))


def _start_http(config: dict[str, Any], reach: Reach) -> Any:
    from arctic_rl_c.transports.http import HttpTransport

    # Jobs have to exist before the handle that names them is given away.
    url = reach.url or DEFAULT_URL
    return LoopThread.get().run(HttpTransport.connect(url, config=config, **reach.limits))


def _load_tokenizer(config: Mapping[str, Any]) -> Any:
    from transformers import AutoTokenizer

    model = config["actor_rollout_ref"]["model"]
    return AutoTokenizer.from_pretrained(model.get("tokenizer_path") or model["path"])
