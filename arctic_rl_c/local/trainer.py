# SPDX-License-Identifier: Apache-2.0
"""The trainer role: log-probs, the GRPO update, checkpoints, and the sending side of a sync.

Plain synchronous Python, without knowledge of how its ops reach it: a child process, an actor
and a test call the same methods.
"""

from __future__ import annotations

import logging
import operator
import time
from collections.abc import Callable, Mapping
from typing import Any, SupportsIndex

import torch
from torch.utils.checkpoint import checkpoint as recompute

from arctic_rl_c import PayloadError
from arctic_rl_c.local import checkpoint as store
from arctic_rl_c.local.loss import (
    LossOptions,
    Normalizer,
    grpo_loss,
    merge_micro_batches,
    merge_ranks,
)
from arctic_rl_c.local.model import (
    build_model,
    describe_model,
    forward_flops,
    load_tokenizer,
    weights_digest,
)
from arctic_rl_c.local.optim import MasterAdamW
from arctic_rl_c.local.options import ModelOptions, TrainerOptions
from arctic_rl_c.local.rows import (
    MicroBatch,
    Rows,
    left_align,
    read_rows,
    response_window,
    split_micro_batches,
)
from arctic_rl_c.local.weights import WeightSource

_log = logging.getLogger(__name__)

_POST = ("identity", "apply_temperature", "compute_entropy", "compute_entropy_and_logprobs")
_LOGITS_BYTES = 1 << 28  # largest piece of fp32 logits at a time


class Trainer:
    """A causal LM under training.

    Args:
        model: Which model, and where.
        options: Optimizer, schedule, checkpoints.
    """

    #: The ops that a server may call by name.
    OPS = frozenset(
        {
            "forward",
            "forward_backward",
            "step",
            "save_checkpoint",
            "load_checkpoint",
            "offer_weights",
            "serve_weights",
            "release_weights",
            "weights_digest",
            "describe",
            "measure_peak_flops",
        }
    )

    #: The ops among them that may be broken off while they wait.
    INTERRUPTIBLE = frozenset({"serve_weights"})

    def __init__(self, model: ModelOptions, options: TrainerOptions) -> None:
        if model.threads is not None:
            torch.set_num_threads(model.threads)
        self._model_options, self._options = model, options
        self._device = torch.device(model.device)
        self._model = build_model(model)
        for name in ("final_logit_softcapping", "logit_scale", "logits_scaling"):
            if getattr(self._model.config, name, None):
                raise ValueError(f"models with {name} are not supported by the embedded trainer")
        self._reference = build_model(model) if options.reference else None
        self._model.requires_grad_(True)
        if options.gradient_checkpointing:
            _enable_recomputing(self._model)
            self._model.train()  # transformers recomputes only in training mode
        self._optimizer = MasterAdamW(self._model, options)
        self._global_step = 0
        self._has_gradients = False
        self._told_of_sharing = False
        self._source = WeightSource(self._model)

    # -- batches -----------------------------------------------------------------------------

    def forward(self, payload: Mapping[str, Any], reference_model: bool = False) -> dict[str, Any]:
        """Log-probs, and entropy when asked for, of a payload's rows.

        Args:
            payload: `{"batch", "meta", "processing"}` as a client builds it.
            reference_model: Use the frozen copy of the initial weights.

        Returns:
            `{"batch": {"logprobs": [B, S] float32, "entropy"?: [B, S]}, "metrics": {}}` in the
            order of the rows. Slot i of a standard row holds log P(token[i + 1]), unused slots
            the pad id as a float; with ZoRRO slot i of the response window holds
            log P(token[i]), all others 0.

        Raises:
            PayloadError: The batch does not fit its description.
            ValueError: An unknown processing step, or no reference model is kept.
        """
        batch, meta, processing = _unpack(payload)
        model = self._model
        if reference_model:
            if self._reference is None:
                raise ValueError(
                    "No log_prob job initialized: set remote_backend.log_prob_gpus to at least "
                    "1 so that the trainer keeps the initial weights"
                )
            model = self._reference
        post = _post(processing)
        rows = read_rows(batch, meta, model.config.vocab_size)
        aligned = bool(meta.get("zorro_train_enable", False))
        if aligned:
            self._tell_of_sharing(rows)
        entropy = "compute_entropy" in post or bool(meta.get("calculate_entropy", False))
        filler = 0.0 if aligned else float(meta.get("pad_token_id", 0))
        out = {"logprobs": torch.full(rows.ids.shape, filler, dtype=torch.float32)}
        if entropy:
            out["entropy"] = out["logprobs"].clone()
        temperature = _temperature(meta, post)
        with torch.no_grad():
            for index in split_micro_batches(rows, self._token_limit(meta)):
                micro = left_align(rows, index)
                wanted, columns = micro.real, micro.columns
                if aligned:
                    wanted, columns = _predicting_response(micro, rows)
                values = self._token_values(model, micro, wanted, temperature, entropy)
                row = micro.index[:, None].expand_as(wanted)[wanted]
                for name, value in zip(out, values, strict=True):
                    out[name][row, columns[wanted]] = value.cpu()
                if not aligned:  # a row's last token predicts nothing that was sent
                    last = (rows.start + rows.length - 1)[index]
                    some = rows.length[index] > 0
                    out["logprobs"][index[some], last[some]] = 0.0
        return {"batch": out, "metrics": {}}

    def forward_backward(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        """Add the gradient of the `verl_grpo` loss of a payload.

        A call that fails half-way drops all gradients since the last step.

        Args:
            payload: `{"batch", "meta", "processing"}` with `loss_fn="verl_grpo"`.

        Returns:
            `{"metrics": {...}, "avg_loss": float}`; metrics hold `loss`, `actor/pg_loss`,
            `actor/pg_clipfrac`, `actor/pg_clipfrac_lower`, `actor/ppo_kl` and, when in use,
            `actor/entropy_loss`, `kl_loss`, `kl_coef`.

        Raises:
            PayloadError: The batch does not fit its description.
            ValueError: A loss option that is not implemented.
            KeyError: meta lacks `batch_num_tokens` or `global_batch_size`.
        """
        batch, meta, processing = _unpack(payload)
        post, loss_fn = _post(processing), processing.get("loss_fn", "grpo")
        if loss_fn != "verl_grpo":
            raise ValueError(f"loss_fn {loss_fn!r} is not implemented: use 'verl_grpo'")
        if "compute_entropy_and_logprobs" not in post:
            raise ValueError("the verl_grpo loss needs the step compute_entropy_and_logprobs")
        options = LossOptions.from_meta(meta.get("actor_config"), meta.get("policy_loss_config"))
        rows = read_rows(batch, meta, self._model.config.vocab_size)
        windows = _loss_windows(batch, meta, rows, options)
        normalizer = Normalizer(
            batch_num_tokens=float(meta["batch_num_tokens"]),
            global_batch_size=float(meta["global_batch_size"]),
            dp_size=int(meta.get("dp_size", 1)),
            response_len=rows.width - rows.prompt_width,
        )
        temperature = _temperature(meta, post)
        parts = []
        groups = split_micro_batches(rows, self._token_limit(meta))
        try:
            for index in groups:
                part = {name: value[index] for name, value in windows.items()}
                loss, metrics = self._micro_loss(
                    left_align(rows, index), rows, part, temperature, options, normalizer
                )
                loss.backward()  # type: ignore[no-untyped-call]
                parts.append(metrics)
        except BaseException:
            # A part of this call's gradients cannot be told from those before it.
            self._optimizer.zero_grad()
            self._has_gradients = False
            raise
        self._has_gradients = True
        metrics = merge_ranks([merge_micro_batches(parts)])
        return {"metrics": metrics, "avg_loss": metrics.get("loss", 0.0)}

    def _micro_loss(
        self,
        micro: MicroBatch,
        rows: Rows,
        windows: dict[str, torch.Tensor],
        temperature: float,
        options: LossOptions,
        normalizer: Normalizer,
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """Forward one group and reduce it."""
        wanted, columns = _predicting_response(micro, rows)
        response_columns = (columns - rows.prompt_width).clamp(min=0)
        supervised = (
            windows["response_mask"].gather(
                1, response_columns.clamp(max=normalizer.response_len - 1)
            )
            != 0
        )
        wanted = wanted & supervised
        need_entropy = options.entropy_coeff != 0.0
        values = self._token_values(self._model, micro, wanted, temperature, need_entropy)
        position = (
            torch.arange(len(micro.index))[:, None].expand_as(wanted)[wanted].to(self._device),
            response_columns[wanted].to(self._device),
        )
        shape = (len(micro.index), normalizer.response_len)
        dense = [
            torch.zeros(shape, device=self._device).index_put(position, value) for value in values
        ]
        return grpo_loss(
            dense[0],
            dense[1] if need_entropy else None,
            {name: value.to(self._device) for name, value in windows.items()},
            options,
            normalizer,
        )

    def _token_values(
        self,
        model: Any,
        micro: MicroBatch,
        wanted: torch.Tensor,
        temperature: float,
        entropy: bool,
    ) -> tuple[torch.Tensor, ...]:
        """Log-prob of each wanted slot's target, and the entropy there: flat float32."""
        # All-ones: behind a row's end nothing is read, so causality alone keeps rows apart.
        output = model.get_decoder()(
            input_ids=micro.ids.to(self._device),
            position_ids=micro.positions.to(self._device),
            attention_mask=torch.ones_like(micro.ids, device=self._device),
            use_cache=False,
        )
        mask = wanted.to(self._device)
        hidden = output.last_hidden_state[mask]
        targets = micro.targets.to(self._device)[mask]
        head = model.get_output_embeddings()
        size = max(1, _LOGITS_BYTES // (4 * head.weight.shape[0]))
        if hidden.shape[0] <= size:
            return _head_values(head, hidden, targets, temperature, entropy)
        pieces = []
        for begin in range(0, hidden.shape[0], size):
            arguments = (
                head,
                hidden[begin : begin + size],
                targets[begin : begin + size],
                temperature,
                entropy,
            )
            # Logits of a large vocabulary are made twice rather than kept for the backward.
            pieces.append(
                recompute(_head_values, *arguments, use_reentrant=False)
                if torch.is_grad_enabled()
                else _head_values(*arguments)
            )
        return tuple(torch.cat(column) for column in zip(*pieces, strict=True))

    def _tell_of_sharing(self, rows: Rows) -> None:
        """Log, once, that a client shares prompts, and what that comes to here."""
        if self._told_of_sharing:
            return
        self._told_of_sharing = True
        prompts = torch.unique(rows.ids[:, : rows.prompt_width], dim=0).shape[0]
        _log.warning(
            "zorro_train_enable arrived: %d rows of %d prompts, log-probs are response-aligned; "
            "each row is computed by itself",
            rows.ids.shape[0],
            prompts,
        )

    def _token_limit(self, meta: Mapping[str, Any]) -> int:
        limit = meta.get("max_token_len_per_gpu")
        return self._options.max_token_len if limit is None else int(limit)

    # -- optimizer ---------------------------------------------------------------------------

    def step(self, learning_rate: float | None = None) -> dict[str, Any]:
        """One optimizer step with the gradients gathered since the last.

        Args:
            learning_rate: Accepted for the wire's sake; must be None, the schedule decides.

        Returns:
            `{"metrics": {"last_lr", "grad_norm"}}`: the rate that the next step will use, and
            the norm before clipping. With a norm that is not finite the weights stay as they
            were and metrics hold `step_skipped: True`.

        Raises:
            RuntimeError: No gradients were gathered.
        """
        if learning_rate is not None:
            raise ValueError("learning_rate is set by the schedule and cannot be given to step")
        if not self._has_gradients:
            raise RuntimeError("step without a forward_backward before it: there are no gradients")
        norm, applied = self._optimizer.step()
        self._has_gradients = False
        metrics: dict[str, Any] = {"last_lr": self._optimizer.last_lr, "grad_norm": norm}
        if applied:
            self._global_step += 1
        else:
            _log.warning("grad_norm is %s: the step was skipped, weights are unchanged", norm)
            metrics["step_skipped"] = True
        return {"metrics": metrics}

    # -- checkpoints -------------------------------------------------------------------------

    def save_checkpoint(
        self,
        checkpoint_id: str | None = None,
        checkpoint_type: str = "resumable",
        path: str | None = None,
        *,
        step: int | None = None,
        export_hf: bool = False,
        save_total_limit: int | None = None,
        stage_info: Any = None,
    ) -> dict[str, Any]:
        """Write a resumable checkpoint.

        Args:
            checkpoint_id: A name to record; the directory is named after the step.
            checkpoint_type: Only `resumable` exists.
            path: Directory of all checkpoints; None takes the configured one.
            step: Number to save under; None takes the optimizer steps done.
            export_hf: Also write a Hugging Face directory.
            save_total_limit: How many to keep, this one included.
            stage_info: JSON-safe, stored and given back by `load_checkpoint`.

        Returns:
            `{"path", "hf_path", "global_step"}`.
        """
        if checkpoint_type != "resumable":
            raise ValueError(f"checkpoint_type {checkpoint_type!r} is not 'resumable'")
        if step is not None and not isinstance(step, SupportsIndex):
            raise TypeError(f"save_checkpoint: step is an integer, found {step!r}")
        number = self._global_step if step is None else operator.index(step)
        state = {
            "format": 1,
            "global_step": number,
            "optimizer_steps": self._optimizer.steps_done,
            "trainer_steps": self._global_step,
            "checkpoint_id": checkpoint_id,
            "stage_info": stage_info,
        }
        directory = store.save(
            self._checkpoint_root(path),
            number,
            dict(self._model.named_parameters()),
            self._optimizer.state_tensors(),
            state,
            export_hf=self._export_hf if export_hf else None,
            keep=save_total_limit,
        )
        hf_path = str(directory / "hf") if export_hf else None
        return {"path": str(directory), "hf_path": hf_path, "global_step": number}

    def load_checkpoint(
        self, path: str | None = None, *, step: int | None = None
    ) -> dict[str, Any]:
        """Resume from a checkpoint: model, optimizer, schedule and counters.

        Args:
            path: Directory of all checkpoints; None takes the configured one.
            step: Which; None takes the last.

        Returns:
            `{"path", "global_step", "stage_info"}`; `global_step` is 0 and `path` None when
            there is none.

        Raises:
            FileNotFoundError: The step asked for is not there.
            ValueError: It is of another model. Nothing was changed then.
        """
        directory = store.find(self._checkpoint_root(path), step)
        if directory is None:
            return {"path": None, "global_step": 0, "stage_info": None}
        weights, moments, state = store.load(directory)
        params = dict(self._model.named_parameters())
        if set(weights) != set(params):
            odd = sorted(set(weights) ^ set(params))
            raise ValueError(f"{directory} is of another model: {odd[0]} is on one side only")
        for name, param in params.items():
            if weights[name].shape != param.shape:
                raise ValueError(
                    f"{directory}: {name} has shape {tuple(weights[name].shape)}, the model "
                    f"wants {tuple(param.shape)}"
                )
        self._optimizer.load_state_tensors(moments, int(state["optimizer_steps"]))
        with torch.no_grad():
            for name, param in params.items():
                param.copy_(weights[name])
        self._global_step = int(state["trainer_steps"])
        self._has_gradients = False
        return {
            "path": str(directory),
            "global_step": int(state["global_step"]),
            "stage_info": state.get("stage_info"),
        }

    def _checkpoint_root(self, path: str | None) -> str:
        root = self._options.checkpoint_path if path is None else path
        if root is None:
            raise ValueError("no checkpoint path: give path= or set trainer.default_local_dir")
        return root

    def _export_hf(self, directory: Any) -> None:
        self._model.save_pretrained(directory)
        load_tokenizer(self._model_options).save_pretrained(directory)

    # -- weights -----------------------------------------------------------------------------

    def offer_weights(
        self,
        *,
        cuda_ipc: bool,
        low_memory: bool,
        transport: str | None = None,
        colocated: bool | None = None,
        timeout: float,
        receivers: int = 1,
    ) -> dict[str, Any]:
        """Offer all weights as they are now; see `WeightSender`.

        Returns:
            `{"offer": bytes, "version": int}`.
        """
        offer = self._source.offer(
            cuda_ipc=cuda_ipc,
            low_memory=low_memory,
            transport=transport,
            colocated=colocated,
            timeout=timeout,
            receivers=receivers,
        )
        return {"offer": offer, "version": self._source.version}

    def serve_weights(self, *, timeout: float) -> dict[str, Any]:
        """Serve the open offer until every receiver has finished; gives the sender's statistics."""
        return self._source.serve(timeout=timeout)

    def release_weights(self) -> dict[str, Any]:
        """End the open offer, if there is one."""
        self._source.release()
        return {"status": "ok"}

    def weights_digest(self) -> dict[str, Any]:
        """SHA-256 over all weights."""
        return {"digest": weights_digest(self._model), "version": self._source.version}

    # -- reports -----------------------------------------------------------------------------

    def describe(self) -> dict[str, Any]:
        """Facts about the model, with the cost of a forward pass in `forward_flops`."""
        return {
            **describe_model(self._model),
            "global_step": self._global_step,
            "forward_flops": forward_flops(self._model),
            "threads": torch.get_num_threads(),
        }

    def measure_peak_flops(self, seconds: float = 0.3) -> dict[str, float]:
        """`{"flops": operations a second}` of a large square product in the model's dtype."""
        weight = next(self._model.parameters())
        size = 1024 if self._device.type == "cpu" else 8192
        left = torch.randn(size, size, device=self._device).to(weight.dtype)
        wait: Callable[[], None] = (
            torch.cuda.synchronize if self._device.type == "cuda" else lambda: None
        )
        best, end = 0.0, time.perf_counter() + seconds
        while True:
            begin = time.perf_counter()
            left @ left
            wait()
            now = time.perf_counter()
            best = max(best, 2.0 * size**3 / (now - begin))
            if now >= end:
                return {"flops": best}

    def close(self) -> None:
        """End what is open. Idempotent."""
        self._source.close()


def _enable_recomputing(model: Any) -> None:
    # Renamed in transformers' fifth major version.
    enable = getattr(model, "activation_checkpointing_enable", None)
    if enable is None:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    else:
        enable()


def _unpack(
    payload: Mapping[str, Any],
) -> tuple[Mapping[str, Any], Mapping[str, Any], Mapping[str, Any]]:
    parts = []
    for key in ("batch", "meta", "processing"):
        value = payload.get(key)
        if not isinstance(value, Mapping):
            raise PayloadError(f"the payload has no mapping {key!r}")
        parts.append(value)
    mode = parts[1].get("logits_optimization", "none")
    if mode not in ("none", "memory", "compute"):
        raise ValueError(f"logits_optimization {mode!r} is not one of none, memory, compute")
    if mode == "memory" and not parts[1].get("zorro_train_enable", False):
        raise ValueError("logits_optimization 'memory' needs zorro_train.enable")
    return parts[0], parts[1], parts[2]


def _post(processing: Mapping[str, Any]) -> list[str]:
    post = list(processing.get("post") or ())
    for name in post:
        if name not in _POST:
            raise ValueError(f"processing step {name!r} is not one of {', '.join(_POST)}")
    return post


def _temperature(meta: Mapping[str, Any], post: list[str]) -> float:
    if "apply_temperature" not in post:
        return 1.0
    temperature = float(meta["temperature"])
    if not temperature > 0.0:
        raise ValueError(f"temperature must be above 0 for training, found {temperature}")
    return temperature


def _predicting_response(micro: MicroBatch, rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
    """Slots whose next token lies in the response window, and that token's wire column."""
    following = torch.zeros_like(micro.real)
    following[:, :-1] = micro.real[:, 1:]
    columns = (micro.columns + 1).clamp(max=rows.width - 1)
    return following & (columns >= rows.prompt_width), columns


def _loss_windows(
    batch: Mapping[str, Any], meta: Mapping[str, Any], rows: Rows, options: LossOptions
) -> dict[str, torch.Tensor]:
    """The response windows `[B, R]` that the loss reads."""
    if rows.ids.shape[0] == 0 or rows.prompt_width == rows.width:
        raise PayloadError(
            f"there is nothing to learn from: {rows.ids.shape[0]} rows with a response window "
            f"of {rows.width - rows.prompt_width} slots"
        )
    names = ["old_log_probs", "advantages", "response_mask"]
    if options.use_kl:
        names.append("ref_log_prob")
    windows = {name: response_window(batch, name, rows) for name in names}
    weights = batch.get("rollout_is_weights", meta.get("rollout_is_weights"))
    if weights is not None:
        width = rows.width - rows.prompt_width
        if (
            not isinstance(weights, torch.Tensor)
            or weights.shape[0] != rows.ids.shape[0]
            or (weights.shape[1] not in (width, rows.width))
        ):
            raise PayloadError(
                f"rollout_is_weights must be [{rows.ids.shape[0]}, {width}], found "
                f"{tuple(getattr(weights, 'shape', ()))}"
            )
        windows["rollout_is_weights"] = weights[:, weights.shape[1] - width :]
    # A response token is predicted by the one before it; the first of a row by nothing.
    columns = torch.arange(rows.prompt_width, rows.width)
    begin, end = rows.start[:, None], (rows.start + rows.length)[:, None]
    stray = (windows["response_mask"] != 0) & ((columns <= begin) | (columns >= end))
    if bool(stray.any()):
        raise PayloadError(
            f"response_mask row {int(stray.any(1).int().argmax())} supervises a slot that no "
            "token of the row predicts (an empty prompt, or a slot outside attention_mask)"
        )
    return windows


def _head_values(
    head: Any,
    hidden: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
    entropy: bool,
) -> tuple[torch.Tensor, ...]:
    logits = head(hidden).float()
    if temperature != 1.0:
        logits = logits / temperature
    log_probs = torch.log_softmax(logits, dim=-1)
    chosen = log_probs.gather(-1, targets[:, None])[:, 0]
    if not entropy:
        return (chosen,)
    return chosen, -(log_probs.exp() * log_probs).sum(-1)
