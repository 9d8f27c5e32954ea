# SPDX-License-Identifier: Apache-2.0
"""The forwarder: verl's worker for a model that lives elsewhere.

Its methods are synchronous in all forms of verl. Ray then runs them one after another in the
order in which the trainer asked, and no decorator can lose a coroutine on the way.
"""

from __future__ import annotations

import logging
import re
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import (
    Dispatch,
    make_nd_compute_dataproto_dispatch_fn,
    register,
)
from verl.utils import hf_tokenizer
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.flops_counter import FlopsCounter
from verl.utils.profiler import DistProfiler, DistProfilerExtension

# Registers in this process, which may not have inherited the variable that tells verl to.
import arctic_rl_c.integrations.verl  # noqa: F401
from arctic_rl_c.integrations.verl.backend import ArcticBackend
from arctic_rl_c.integrations.verl.compat import LoopThread, as_padded, widths

_log = logging.getLogger("arctic_rl_c.integrations.verl")

_ACTOR = ("actor", "actor_rollout", "actor_rollout_ref")
_ROLLOUT = ("rollout", "actor_rollout", "actor_rollout_ref")
_REF = ("ref", "actor_rollout_ref")
_STEP_FOLDER = re.compile(r"global_step_(\d+)")


class ArcticWorker(Worker, DistProfilerExtension):  # type: ignore[misc]  # verl has no types
    """CPU-only forwarder of one verl worker group's calls.

    Args:
        config: `main_config.actor_rollout_ref`.
        role: One of verl's role names.
        main_config: verl's whole configuration.
        backend_handle: `reconnect_handle()` of the driver's backend.

    Raises:
        KeyError: `main_config` or `backend_handle` is missing.
        ValueError: No remote backend is chosen, or an unknown role.
    """

    def __init__(self, config: Any, role: str, **kwargs: Any) -> None:
        Worker.__init__(self)
        main_config, handle = kwargs["main_config"], kwargs["backend_handle"]
        if not main_config["trainer"].get("remote_backend"):
            raise ValueError("ArcticWorker needs trainer.remote_backend, which is not set")
        if role not in {*_ACTOR, *_ROLLOUT, *_REF}:
            raise ValueError(f"role {role!r} is none of {', '.join(sorted({*_ROLLOUT, *_REF}))}")
        self.config, self.role, self.main_config = config, role, main_config
        self._is_actor, self._is_rollout = role in _ACTOR, role in _ROLLOUT
        self._is_ref = role in _REF
        self.backend: ArcticBackend | None = ArcticBackend.from_config(main_config, handle=handle)
        self._told_of_flops = False
        self._training_gpus = max(1, int(self.backend.config["remote_backend"]["training_gpus"]))
        DistProfilerExtension.__init__(
            self, DistProfiler(rank=self.rank, config=None, tool_config=None)
        )
        # Of the agent loops too: what pads a batch here is what they padded it with.
        tokenizer = hf_tokenizer(
            config.model.get("tokenizer_path") or config.model.path,
            trust_remote_code=config.model.get("trust_remote_code", False),
        )
        pad = tokenizer.pad_token_id
        self.pad_token_id = int(tokenizer.eos_token_id if pad is None else pad)
        if self._is_actor:
            self.model_config = omega_conf_to_dataclass(config.model)
            self.actor_config = omega_conf_to_dataclass(config.actor)
            self.actor_config.model_config = self.model_config
            self.flops_counter = FlopsCounter(self.model_config.hf_config)

    # -- life ----------------------------------------------------------------------------------

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Tell verl how to dispatch; the model is the server's."""
        for mesh in ("actor", "ref", "rollout"):
            self._register_dispatch_collect_info(mesh, dp_rank=self.rank, is_collect=True)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def to(
        self, device: Any, model: bool = True, optimizer: bool = True, grad: bool = True
    ) -> None:
        """Do nothing: where tensors are is the server's business."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def set_loss_fn(self, loss_fn: Any) -> None:
        """Do nothing: the loss is named in each update."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def reset(self) -> None:
        """Do nothing: the engine's state is the server's."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def destroy(self) -> None:
        """Let go of the server, which goes on for its owner. Idempotent."""
        backend, self.backend = self.backend, None
        if backend is not None:
            _run(backend.destroy())

    # -- training ------------------------------------------------------------------------------

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="ref"))
    @DistProfiler.annotate(color="olive", role="ref_compute_log_prob")
    def compute_ref_log_prob(self, data: Any) -> Any:
        """`log_probs` under the reference model."""
        return self._log_probs(data, ref=True, entropy=False)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"))
    @DistProfiler.annotate(color="blue", role="actor_compute_log_prob")
    def compute_log_prob(self, data: Any) -> Any:
        """`log_probs` and `entropy` under the model."""
        return self._log_probs(data, ref=False, entropy=True)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"))
    @DistProfiler.annotate(color="red", role="actor_update")
    def update_actor(self, data: Any) -> Any:
        """One update; the answer holds `metrics` alone."""
        backend = self._require_backend()
        lengths = data["input_ids"].offsets().diff().tolist()
        if "global_token_num" not in data.keys():  # noqa: SIM118 - a TensorDict iterates rows
            tu.assign_non_tensor(
                data,
                global_token_num=lengths,
                update_lr_scheduler=True,
                disable_auto_offload=tu.get(data, key="disable_auto_offload", default=False),
            )
        batch = self._padded(data)
        begin = time.perf_counter()
        result = _run(
            backend.update_actor(
                batch, actor_config=self.actor_config, pad_token_id=self.pad_token_id
            )
        )
        seconds = time.perf_counter() - begin
        metrics = merge_metrics(result)
        # verl takes this entry out of the answer, so it has to be there.
        metrics["mfu"] = self._mfu(result.get("global_token_num") or lengths, seconds)
        listed = {
            key: value if isinstance(value, list) else [value] for key, value in metrics.items()
        }
        return tu.get_tensordict(tensor_dict={}, non_tensor_dict={"metrics": listed}).cpu()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def update_weights(self, global_steps: int | None = None, mode: str = "auto") -> None:
        """Bring the trainer's weights to the sampler.

        Args:
            global_steps: verl's step; results carry the server's own weight version.
            mode: The name of verl's checkpoint engine; the server moves the weights itself.
        """
        _run(self._require_backend().update_weights())

    # -- checkpoints ---------------------------------------------------------------------------

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
    ) -> None:
        """Write a checkpoint into verl's folder of this step, and remove the oldest beyond a count.

        Args:
            local_path: `.../global_step_N/actor`, as the server sees it.
            hdfs_path: Not supported: an error.
            global_step: N.
            max_ckpt_to_keep: How many steps keep their model; None keeps all.
        """
        if not self._is_actor:
            raise AssertionError("save_checkpoint is for the actor role")
        if hdfs_path is not None:
            raise ValueError("trainer.default_hdfs_dir is not supported: checkpoints are local")
        path = str(Path(local_path).absolute())
        backend = self._require_backend()
        contents = backend.config["actor_rollout_ref"]["actor"].get("checkpoint") or {}
        # Named where it is asked for alone: not every server knows it.
        wanted = {"export_hf": True} if "hf_model" in (contents.get("save_contents") or ()) else {}
        _run(backend.save_checkpoint(path, step=int(global_step), **wanted))
        if max_ckpt_to_keep is not None:
            remove_oldest(Path(path), int(max_ckpt_to_keep))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, del_local_after_load: bool = False
    ) -> None:
        """Resume from verl's folder of a step: weights, optimizer and schedule.

        Raises:
            FileNotFoundError: There is no checkpoint.
        """
        path = str(Path(local_path).absolute())
        found = _run(self._require_backend().load_checkpoint(path))
        if not found.get("path"):
            raise FileNotFoundError(f"no checkpoint of the Arctic server in {path}")
        if del_local_after_load:
            shutil.rmtree(path, ignore_errors=True)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def sleep_replicas(self) -> None:
        """Do nothing: the replicas do it."""

    # -- inside --------------------------------------------------------------------------------

    def _require_backend(self) -> ArcticBackend:
        if self.backend is None:
            raise RuntimeError("this worker was destroyed")
        return self.backend

    def _padded(self, data: Any) -> Any:
        prompt, response = widths(self._require_backend().config)
        return as_padded(
            data, prompt_width=prompt, response_width=response, pad_token_id=self.pad_token_id
        )

    def _log_probs(self, data: Any, *, ref: bool, entropy: bool) -> Any:
        backend, batch = self._require_backend(), self._padded(data)
        result = _run(
            backend.compute_log_prob(
                batch, ref=ref, calculate_entropy=entropy, pad_token_id=self.pad_token_id
            )
        )
        output = {
            key: backend.log_probs_to_nested(batch, value)
            for key, value in result["model_output"].items()
        }
        metrics = {"mfu": 0.0, **result.get("metrics", {})}
        return tu.get_tensordict(tensor_dict=output, non_tensor_dict={"metrics": metrics})

    def _mfu(self, tokens: list[int], seconds: float) -> float:
        """Share of the training GPUs' promised speed, the way to the server included.

        verl takes the promise from the device of this process. Newer verls fail where it has
        none, older ones call it infinite: 0 both times.
        """
        try:
            estimated, promised = self.flops_counter.estimate_flops(tokens, seconds)
        except (AssertionError, RuntimeError) as error:
            if not self._told_of_flops:
                _log.warning("mfu is reported as 0, the forwarder sees no GPU: %s", error)
                self._told_of_flops = True
            return 0.0
        return float(estimated / promised / self._training_gpus)


def merge_metrics(result: Mapping[str, Any]) -> dict[str, Any]:
    """The answer of an update as verl's metrics: numbers, or lists of them."""
    metrics = dict(result.get("metrics", {}))
    last_lr = metrics.pop("last_lr", None)
    if last_lr is not None:
        metrics.setdefault("lr", last_lr)
    loss = result["loss"]
    metrics["loss"] = sum(loss) / len(loss) if isinstance(loss, list) else loss
    return {key: _plain(value) for key, value in metrics.items() if _is_number(value)}


def remove_oldest(path: Path, keep: int) -> list[Path]:
    """Remove `global_step_*/<name>` beyond the newest `keep`, and say which.

    Args:
        path: The one that was just written; it always stays.
        keep: How many to keep, that one included.
    """
    if keep < 1 or not _STEP_FOLDER.fullmatch(path.parent.name):
        return []
    siblings = []
    for folder in path.parent.parent.iterdir():
        match = _STEP_FOLDER.fullmatch(folder.name)
        if match and folder != path.parent and (folder / path.name).is_dir():
            siblings.append((int(match[1]), folder / path.name))
    siblings.sort()
    removed = [folder for _, folder in siblings[: max(0, len(siblings) - (keep - 1))]]
    for folder in removed:
        shutil.rmtree(folder, ignore_errors=True)
    return removed


def _run(coroutine: Any) -> Any:
    return LoopThread.get().run(coroutine)


def _is_number(value: Any) -> bool:
    if isinstance(value, list):
        return bool(value) and all(_is_number(item) for item in value)
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    return isinstance(value, (bool, int, float))


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return float(value)
