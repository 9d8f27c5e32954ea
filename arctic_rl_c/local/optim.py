# SPDX-License-Identifier: Apache-2.0
"""AdamW with fp32 master weights, gradient clipping and the two DeepSpeed schedules."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from arctic_rl_c.local.options import TrainerOptions


class Schedule:
    """The learning rate as a function of the optimizer steps already done.

    `WarmupLR` rises from `warmup_min_lr` to `warmup_max_lr`, then stays. `WarmupCosineLR`
    rises from `warmup_min_ratio` of the base rate to all of it, then falls along a cosine to
    `cos_min_ratio` at `total_num_steps`. `warmup_type` is `linear` (or, for `WarmupLR`, `log`).
    Without a scheduler the rate is constant.
    """

    def __init__(self, base_lr: float, config: Mapping[str, Any] | None) -> None:
        self._base = base_lr
        self._type = None if config is None else config.get("type")
        params = dict((config or {}).get("params") or {})
        if self._type not in (None, "WarmupLR", "WarmupCosineLR"):
            raise ValueError(
                f"scheduler type {self._type!r} is not one of WarmupLR, WarmupCosineLR"
            )
        self._warmup = int(params.pop("warmup_num_steps", 0))
        self._kind = params.pop("warmup_type", "linear")
        self._total = int(params.pop("total_num_steps", 0))
        self._min_lr = float(params.pop("warmup_min_lr", 0.0))
        self._max_lr = float(params.pop("warmup_max_lr", base_lr))
        self._min_ratio = float(params.pop("warmup_min_ratio", 0.0))
        self._floor = float(params.pop("cos_min_ratio", 0.0))
        if params:
            raise ValueError(f"scheduler parameter {sorted(params)[0]!r} is not known")
        if self._kind not in ("linear", "log"):
            raise ValueError(f"warmup_type {self._kind!r} is not one of linear, log")
        if self._type == "WarmupCosineLR" and self._total <= self._warmup:
            raise ValueError(
                f"total_num_steps {self._total} must exceed warmup_num_steps {self._warmup}"
            )

    def lr(self, steps_done: int) -> float:
        """The rate of the next optimizer step after `steps_done` of them."""
        if self._type is None:
            return self._base
        if self._type == "WarmupLR":
            return self._min_lr + (self._max_lr - self._min_lr) * self._rise(steps_done)
        if steps_done < self._warmup:
            ratio = self._min_ratio + (1.0 - self._min_ratio) * self._rise(steps_done)
        else:
            part = min(1.0, (steps_done - self._warmup) / (self._total - self._warmup))
            ratio = self._floor + (1.0 - self._floor) * 0.5 * (1.0 + math.cos(math.pi * part))
        return self._base * ratio

    def _rise(self, steps_done: int) -> float:
        if steps_done >= self._warmup:
            return 1.0
        if self._kind == "log":
            return math.log(steps_done + 1) / math.log(max(2, self._warmup))
        return steps_done / self._warmup


class MasterAdamW:
    """AdamW over fp32 weights, also when the model's own are in half precision.

    A bf16 weight loses every update below 1/256 of itself, which at the rates of RL is nearly
    all of them; so halves get an fp32 master copy that the optimizer works on.
    """

    def __init__(self, model: Any, options: TrainerOptions) -> None:
        self._params = dict(model.named_parameters())
        self._masters = {
            name: p if p.dtype == torch.float32 else p.detach().float().clone()
            for name, p in self._params.items()
        }
        self._clip = options.gradient_clipping
        self.schedule = Schedule(options.lr, options.scheduler)
        self.steps_done = 0
        self._adamw = torch.optim.AdamW(
            list(self._masters.values()),
            lr=self.schedule.lr(0),
            betas=options.betas,
            eps=options.eps,
            weight_decay=options.weight_decay,
        )

    @property
    def last_lr(self) -> float:
        """The rate that the next step will use, as torch's `get_last_lr` after a step."""
        return self.schedule.lr(self.steps_done)

    def step(self) -> tuple[float, bool]:
        """Clip, update and clear the gradients.

        Returns:
            `(grad_norm, applied)`: the global norm before clipping; whether the update was
            made. A norm that is not finite leaves weights and optimizer state as they were.
        """
        grads = []
        for name, param in self._params.items():
            master = self._masters[name]
            if master is not param and param.grad is not None:
                master.grad = param.grad.float()
            if master.grad is not None:
                grads.append(master)
        if self._clip:
            norm = float(torch.nn.utils.clip_grad_norm_(grads, self._clip))
        else:
            norm = float(torch.nn.utils.get_total_norm([g.grad for g in grads]))
        applied = math.isfinite(norm)
        if applied:
            for group in self._adamw.param_groups:
                group["lr"] = self.last_lr
            self._adamw.step()
            self.steps_done += 1
            self._publish()
        self.zero_grad()
        return norm, applied

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for name, param in self._params.items():
            param.grad = None
            self._masters[name].grad = None

    @torch.no_grad()
    def _publish(self) -> None:
        for name, param in self._params.items():
            if self._masters[name] is not param:
                param.copy_(self._masters[name])

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """Master copies and moments, by `<kind>.<parameter>`."""
        tensors: dict[str, torch.Tensor] = {}
        for name, master in self._masters.items():
            if master is not self._params[name]:
                tensors[f"master.{name}"] = master
            for kind, value in self._adamw.state.get(master, {}).items():
                if isinstance(value, torch.Tensor):
                    tensors[f"{kind}.{name}"] = value
        return tensors

    @torch.no_grad()
    def load_state_tensors(self, tensors: Mapping[str, torch.Tensor], steps_done: int) -> None:
        """Put back what `state_tensors` gave, for the same model.

        Raises:
            ValueError: A tensor is missing or has another shape; nothing was changed then.
        """
        states: dict[str, dict[str, torch.Tensor]] = {}
        for name, master in self._masters.items():
            kinds = ("exp_avg", "exp_avg_sq", "step") if steps_done else ()
            states[name] = {kind: _take(tensors, f"{kind}.{name}") for kind in kinds}
            if master is not self._params[name]:
                states[name]["master"] = _take(tensors, f"master.{name}")
            for kind, value in states[name].items():
                if kind != "step" and value.shape != master.shape:
                    raise ValueError(
                        f"checkpoint tensor {kind}.{name} has shape {tuple(value.shape)}, "
                        f"the model wants {tuple(master.shape)}"
                    )
        self._adamw.state.clear()
        for name, master in self._masters.items():
            state = states[name]
            if "master" in state:
                master.copy_(state.pop("master"))
            if state:
                self._adamw.state[master] = {
                    kind: value.clone() if kind == "step" else value.to(master.device, copy=True)
                    for kind, value in state.items()
                }
        self.steps_done = steps_done
        self.zero_grad()


def _take(tensors: Mapping[str, torch.Tensor], key: str) -> torch.Tensor:
    if key not in tensors:
        raise ValueError(f"checkpoint has no tensor {key}")
    return tensors[key]
