# SPDX-License-Identifier: Apache-2.0
"""What the plug-in needs to know of verl's configuration and batches."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from arctic_rl_c import ConfigError, normalize_config, pad_prompt_response
from arctic_rl_c.transports.deadline import TIMEOUT, limits

_T = TypeVar("_T")

#: Keys that newer verls read in the block themselves; they are not the server's.
_VERL_KEYS = ("name", "custom_backend_module")

#: Keys of `comms`, or beside it, that are the plug-in's own.
_OWN_KEYS = ("url", "transport", "timeout", "timeouts", "temperature_in_log_prob")

#: Batch entries that belong to responses, and are padded as they are.
_OF_RESPONSES = (
    "responses",
    "response_mask",
    "loss_mask",
    "old_log_probs",
    "advantages",
    "ref_log_prob",
    "rollout_is_weights",
)


class LoopThread:
    """An event loop on a thread of its own, for callers that have none.

    verl drops the coroutine nature of some worker methods, and gives a plain thread to others.
    One loop that stays serves all of them; what was opened on it stays usable.
    """

    _instance: LoopThread | None = None
    _lock = threading.Lock()

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        threading.Thread(
            target=self._loop.run_forever, name="arctic_rl_c verl", daemon=True
        ).start()

    @classmethod
    def get(cls) -> LoopThread:
        """The one of this process."""
        with cls._lock:
            if cls._instance is None or cls._instance._pid != os.getpid():
                cls._instance = cls()
            return cls._instance

    def run(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """Wait for a coroutine, from any thread but the loop's own."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()


@dataclass(frozen=True)
class Reach:
    """What of `remote_backend` is the plug-in's own: by which way which server is reached.

    Attributes:
        url: A server that runs already, with `comms.protocol=http`.
        transport: `arctic` for an installed Arctic client; None for what `comms.protocol` says.
        temperature_in_log_prob: As of `ArcticRLClient`.
        timeout: Seconds that an op may take.
        timeouts: The same for single ops.
    """

    url: str | None = None
    transport: str | None = None
    temperature_in_log_prob: bool = False
    timeout: float = TIMEOUT
    timeouts: Mapping[str, float] = field(default_factory=dict)

    @property
    def limits(self) -> dict[str, Any]:
        """What every transport takes of it."""
        return {"timeout": self.timeout, "timeouts": self.timeouts}


def plain_config(main_config: Any) -> tuple[dict[str, Any], Reach]:
    """The configuration in normalised form, and the plug-in's own keys in it.

    Those are in `comms`, or, in a flat block, beside the others.

    Args:
        main_config: A DictConfig, or a mapping.

    Raises:
        ConfigError: The block `remote_backend` is wrong.
    """
    if not isinstance(main_config, dict):
        from omegaconf import OmegaConf

        main_config = OmegaConf.to_container(main_config, resolve=True)
    config = dict(main_config)
    block = dict(config.get("remote_backend") or {})
    for key in _VERL_KEYS:
        block.pop(key, None)
    own = {}
    if isinstance(block.get("comms"), Mapping):
        comms = dict(block["comms"])
        own = {key: comms.pop(key) for key in _OWN_KEYS if key in comms}
        block["comms"] = comms
        if own and not comms:
            del block["comms"]  # a flat block has no other
    own |= {key: block.pop(key) for key in _OWN_KEYS if key in block}
    config["remote_backend"] = block
    transport = own.get("transport")
    if transport not in (None, "arctic"):
        raise ConfigError(
            f"remote_backend.comms.transport is {transport!r}: it is arctic, for an installed "
            "Arctic client, or null, for what comms.protocol says"
        )
    warm = own.get("temperature_in_log_prob", False)
    if not isinstance(warm, bool):
        raise ConfigError(
            f"remote_backend.temperature_in_log_prob is {warm!r}: it is true, for log-probs that "
            "are divided by rollout.temperature as the update's are, or false"
        )
    timeout, timeouts = limits(
        own.get("timeout", TIMEOUT), own.get("timeouts"), "remote_backend.comms."
    )
    reach = Reach(own.get("url"), transport, warm, timeout, timeouts)
    return normalize_config(config), reach


def as_padded(data: Any, *, prompt_width: int, response_width: int, pad_token_id: int) -> Any:
    """A batch of the V1 trainer with its prompts and responses padded.

    That trainer gives every tensor jagged. `input_ids` and `position_ids` stay so; the rest gets
    the widths of the configuration, not of the batch: servers derive one width from the other.

    Args:
        data: A TensorDict. One with dense prompts is returned as it is.
        prompt_width: Columns of prompts.
        response_width: Columns of responses.
        pad_token_id: What prompts and responses are filled with; everything else with 0.
    """
    prompts = data["prompts"]
    if not getattr(prompts, "is_nested", False):
        return data
    batch = {key: data[key] for key in data.keys()}  # noqa: SIM118 - a TensorDict iterates rows
    prompt_lengths = prompts.offsets().diff()
    response_lengths = data["responses"].offsets().diff()
    nothing = [0] * len(prompt_lengths)
    left, right = prompt_lengths.tolist(), response_lengths.tolist()
    batch["prompts"], _, _ = pad_prompt_response(
        prompts, left, nothing, pad_value=pad_token_id, prompt_width=prompt_width, response_width=0
    )
    for key in _OF_RESPONSES:
        if getattr(batch.get(key), "is_nested", False):
            batch[key], _, _ = pad_prompt_response(
                batch[key],
                nothing,
                right,
                pad_value=pad_token_id if key == "responses" else 0,
                prompt_width=0,
                response_width=response_width,
            )
    column = prompt_lengths.new_tensor(range(prompt_width + response_width))
    begin = (prompt_width - prompt_lengths)[:, None]
    end = (prompt_width + response_lengths)[:, None]
    batch["attention_mask"] = ((column >= begin) & (column < end)).long()
    batch.setdefault("loss_mask", batch.get("response_mask"))
    return {key: value for key, value in batch.items() if value is not None}


def widths(config: Mapping[str, Any]) -> tuple[int, int]:
    """Largest prompt and response, by the configuration."""
    data = config["data"]
    return int(data["max_prompt_length"]), int(data["max_response_length"])
