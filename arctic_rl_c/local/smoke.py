# SPDX-License-Identifier: Apache-2.0
"""The main job: GRPO steps end to end on one machine, with proof that the weights arrived."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import math
import platform
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import arctic_rl_c
from arctic_rl_c import ArcticError, ArcticRLClient, normalize_config
from arctic_rl_c.local.grpo import Grpo, GrpoOptions, StepReport
from arctic_rl_c.local.model import VOCABULARY, load_tokenizer
from arctic_rl_c.local.options import SMALL_SHAPES, LocalOptions
from arctic_rl_c.local.tasks import Arithmetic
from arctic_rl_c.transports.local import LocalTransport

#: Weight transports by the flags of the contract: (cuda_ipc, low_memory).
_FLAGS = {
    "host_shm": (False, False),
    "cuda_ipc": (True, False),
    "ring": (True, True),
    "nccl": (False, False),
}


class SmokeError(ArcticError):
    """The run is not what it should be; says in which step and why."""


@dataclass(frozen=True)
class SmokeOptions:
    """What the command line asked for; see `python -m arctic_rl_c smoke --help`."""

    steps: int = 4
    model: str | None = None
    shape: str = "tiny"
    generation: str = "nested"
    device: str = "cpu"
    transport: str = "auto"
    seed: int = 0
    prompts: int = 128
    samples: int = 16
    lr: float | None = None
    largest: int = 4
    response_length: int = 4
    json: str | None = None
    plot: str | None = None


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    step: int
    loss: float
    grad_norm: float
    mfu_percent: float
    score: float
    solved: float
    update_weights: float
    update_actor: float
    generate: float
    log_prob: float
    seconds: float
    trainer_sha256: str
    sampler_sha256: str


_COLUMNS: tuple[tuple[str, int, Callable[[Row], str]], ...] = (
    ("step", 4, lambda r: f"{r.step}"),
    ("actor/loss", 10, lambda r: f"{r.loss:.4f}"),
    ("grad_norm", 9, lambda r: f"{r.grad_norm:.4f}"),
    ("MFU (%)", 7, lambda r: f"{r.mfu_percent:.2f}"),
    ("score", 6, lambda r: f"{r.score:.3f}"),
    ("update_weights (s)", 18, lambda r: f"{r.update_weights:.4f}"),
    ("update_actor (s)", 16, lambda r: f"{r.update_actor:.3f}"),
    (
        "weights: trainer = sampler",
        27,
        lambda r: f"{r.trainer_sha256[:12]} = {r.sampler_sha256[:12]}",
    ),
)


def main_config(options: SmokeOptions) -> dict[str, Any]:
    """The run as a main config, in the generation asked for."""
    ipc, low = _flags(options)
    small = options.model is None and options.shape in SMALL_SHAPES
    lr = options.lr if options.lr is not None else (4e-3 if small else 1e-5)
    prompt = 8 if small else 32
    return {
        "remote_backend": _backend(options, ipc, low),
        "actor_rollout_ref": {
            "model": {
                "path": options.model or f"random:{options.shape}",
                "enable_gradient_checkpointing": False,
                "override_config": {"attn_implementation": "sdpa"},
            },
            "actor": {
                "ppo_mini_batch_size": max(1, options.prompts // 16),
                "ppo_max_token_len_per_gpu": 16384,
                "optim": {
                    "lr": lr,
                    "betas": [0.9, 0.99],
                    "weight_decay": 0.0,
                    "lr_scheduler_type": "cosine",
                    "min_lr_ratio": 0.05,
                    # A short run is the beginning of a long one, not a long one in haste.
                    "total_training_steps": max(40, options.steps),
                },
            },
            "rollout": {"n": options.samples, "temperature": 1.0, "max_num_seqs": 4096},
        },
        "data": {
            "train_batch_size": options.prompts,
            "max_prompt_length": prompt,
            "max_response_length": options.response_length,
        },
    }


def _backend(options: SmokeOptions, ipc: bool, low: bool) -> dict[str, Any]:
    gpus = {"training_gpus": 1, "sampling_gpus": 1, "log_prob_gpus": 0}
    shared = {"colocate": options.transport != "nccl", **gpus}
    if options.generation == "flat":
        return {
            **shared,
            "cuda_ipc_weight_sync": ipc,
            "low_memory_weight_sync": low,
            "zorro_train": {"enable": False},
            "zero_optimization": {"stage": 0},
            "comm_protocol": "ray",
        }
    return {
        **shared,
        "weight_sync": {"cuda_ipc": ipc, "low_memory": low},
        "train": {
            "zorro_train": {"enable": False},
            "determinism": {"seed": options.seed},
        },
    }


def _flags(options: SmokeOptions) -> tuple[bool, bool]:
    if options.transport != "auto":
        return _FLAGS[options.transport]
    return (options.device != "cpu", False)


def local_options(options: SmokeOptions, config: dict[str, Any]) -> LocalOptions:
    """The server's options for a run."""
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        raise SmokeError(f"--device {options.device}: torch sees no CUDA device here")
    local = LocalOptions.from_config(config, device=options.device)
    if options.transport == "nccl":
        local.trainer_model.device, local.sampler_model.device = "cuda:0", "cuda:1"
    if options.transport != "auto":
        local.weight_transport = options.transport
    for model in (local.trainer_model, local.sampler_model):
        model.seed = options.seed
    local.sampler.seed = options.seed
    # Other weights than the trainer's, so that equality afterwards proves the transfer.
    local.sampler.load_format = "dummy"
    local.verify_weights = False  # done here, outside what is timed
    return local


class Smoke:
    """One run.

    Args:
        options: What was asked for.
    """

    def __init__(self, options: SmokeOptions) -> None:
        self._options = options
        self._config = normalize_config(main_config(options))
        self._local = local_options(options, self._config)
        self._rows: list[Row] = []
        self._last_sync: dict[str, Any] = {}
        self._names_line: str | None = None
        self._peak = 0.0
        self._facts: dict[str, Any] = {}

    async def run(self) -> None:
        """All of it.

        Raises:
            SmokeError: A number is not finite, or weights differ after a sync.
            ArcticError: What the client or the server raised.
        """
        begin = time.perf_counter()
        transport = LocalTransport(self._local)
        try:
            # The tokenizer loads here while both processes load their models.
            tokenizer = load_tokenizer(self._local.trainer_model)
            await transport.start()
            self._facts = await transport.describe()
            self._peak = await transport.measure_peak_flops()
            self._print_head(time.perf_counter() - begin)
            client = ArcticRLClient(transport, self._config, temperature_in_log_prob=True)
            before = await transport.weights_digests()
            if before["trainer"] == before["sampler"]:
                raise SmokeError("the sampler began with the trainer's weights: nothing to prove")
            print(
                f"before the first sync: trainer {before['trainer'][:12]}, "
                f"sampler {before['sampler'][:12]} (dummy weights)"
            )
            await self._sync(client, transport, 0)
            await self._steps(
                Grpo(client, tokenizer, self._task(), self._grpo()), client, transport
            )
            await client.destroy()
        finally:
            await asyncio.shield(transport.shutdown())
        self._print_foot(time.perf_counter() - begin)

    def _task(self) -> Arithmetic:
        return Arithmetic(self._options.largest, self._options.seed)

    def _grpo(self) -> GrpoOptions:
        data = self._config["data"]
        sampling: dict[str, Any] = {}
        if self._options.model is None and self._facts["trainer"]["vocab_size"] > len(VOCABULARY):
            # A preset with a real model's vocabulary, of which its tokenizer knows the start.
            sampling["allowed_token_ids"] = list(range(len(VOCABULARY)))
        return GrpoOptions(
            prompts=self._options.prompts,
            samples=self._options.samples,
            prompt_width=data["max_prompt_length"],
            response_width=data["max_response_length"],
            temperature=1.0,
            actor_config={
                "loss_agg_mode": "token-mean",
                "clip_ratio": 0.2,
                "clip_ratio_low": 0.2,
                "clip_ratio_high": 0.2,
                "clip_ratio_c": 3.0,
                "entropy_coeff": 0.02,
                "use_kl_loss": False,
                "calculate_entropy": True,
                "rollout_n": self._options.samples,
                "policy_loss": {"loss_mode": "vanilla"},
            },
            sampling_params=sampling,
        )

    async def _steps(self, grpo: Grpo, client: ArcticRLClient, transport: LocalTransport) -> None:
        print("  ".join(f"{name:>{width}}" for name, width, _ in _COLUMNS), flush=True)
        with _progress(self._options.steps) as advance:
            for step in range(1, self._options.steps + 1):
                begin = time.perf_counter()
                report = await grpo.step()
                seconds, digests = await self._sync(client, transport, step)
                row = self._row(step, report, seconds, digests, time.perf_counter() - begin)
                self._rows.append(row)
                advance("  ".join(f"{cell(row):>{width}}" for _, width, cell in _COLUMNS))

    async def _sync(
        self, client: ArcticRLClient, transport: LocalTransport, step: int
    ) -> tuple[float, dict[str, str]]:
        """One weight sync: its time, and the digests of both sides, which must be equal."""
        begin = time.perf_counter()
        self._last_sync = await client.sync_weights()
        seconds = time.perf_counter() - begin
        self._names_line = self._last_sync["receiver"].get("names_line") or self._names_line
        digests = await transport.weights_digests()
        if digests["trainer"] != digests["sampler"]:
            raise SmokeError(
                f"step {step}: after the sync the sampler's weights have the digest "
                f"{digests['sampler']}, the trainer's {digests['trainer']}"
            )
        return seconds, digests

    def _row(
        self,
        step: int,
        report: StepReport,
        update_weights: float,
        digests: dict[str, str],
        seconds: float,
    ) -> Row:
        row = Row(
            step=step,
            loss=report.metrics["loss"],
            grad_norm=float(report.metrics["grad_norm"]),
            mfu_percent=100.0 * self._flops(report) / report.update_actor / self._peak,
            score=report.score,
            solved=report.solved,
            update_weights=update_weights,
            update_actor=report.update_actor,
            generate=report.generate,
            log_prob=report.log_prob,
            seconds=seconds,
            trainer_sha256=digests["trainer"],
            sampler_sha256=digests["sampler"],
        )
        numbers = {**asdict(row), **report.metrics}
        for name, value in numbers.items():
            if isinstance(value, int | float) and not math.isfinite(value):
                raise SmokeError(f"step {step}: {name} is {value}")
        if "step_skipped" in report.metrics:
            raise SmokeError(f"step {step}: the optimizer skipped an update")
        return row

    def _flops(self, report: StepReport) -> float:
        """Operations that the update needs: forward once, backward twice that."""
        cost = self._facts["trainer"]["forward_flops"]
        body = sum(n * cost["body"] + cost["attention"] * n * (n + 1) / 2 for n in report.rows)
        return float(3.0 * (body + cost["head"] * report.response_tokens * len(report.rows)))

    def _print_head(self, seconds: float) -> None:
        trainer, sampler = self._facts["trainer"], self._facts["sampler"]
        print(
            f"{trainer['architecture']}: {trainer['parameters']:,} parameters in "
            f"{trainer['tensors']} tensors, {trainer['dtype']}; trainer on {trainer['device']}, "
            f"sampler on {sampler['device']}; both ready after {seconds:.1f} s"
        )
        print(
            f"GRPO on sums up to {self._options.largest}+{self._options.largest}: "
            f"{self._options.prompts} problems x {self._options.samples} samples a step, "
            f"{self._options.generation} config, seed {self._options.seed}"
        )

    def _print_foot(self, seconds: float) -> None:
        receiver = self._last_sync["receiver"]
        reason = receiver.get("fallback_reason")
        print(
            f"weights went over {receiver['transport']}"
            + (f" ({reason})" if reason else "")
            + f": {receiver['tensors']} tensors, {receiver['bytes']:,} bytes a sync"
        )
        print(self._names_line or "the receiver has not reported the comparison of names")
        print(
            "MFU: operations of update_actor (forward, and twice that backward) over its wall "
            f"time,\nagainst the {self._peak / 1e9:,.0f} GFLOP/s that a large "
            f"{self._facts['trainer']['dtype']} product reached in the trainer with "
            f"{self._facts['trainer']['threads']} thread(s)"
        )
        print(
            f"{len(self._rows)} steps, {len(self._rows) + 1} syncs, weights equal after each; "
            f"score {self._rows[0].score:.3f} -> {self._rows[-1].score:.3f}; {seconds:.1f} s"
        )

    def report(self) -> dict[str, Any]:
        """The run as JSON-safe data."""
        return {
            "options": asdict(self._options),
            "machine": {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "arctic_rl_c": arctic_rl_c.__version__,
                "processor": platform.machine(),
            },
            "model": self._facts,
            "peak_flops": self._peak,
            "last_sync": self._last_sync,
            "names_line": self._names_line,
            "steps": [asdict(row) for row in self._rows],
        }

    def plot(self, path: str) -> None:
        """Draw the score over the steps."""
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        steps = [row.step for row in self._rows]
        figure, axes = pyplot.subplots(figsize=(7, 3.6), layout="constrained")
        axes.plot(steps, [r.score for r in self._rows], label="score (mean reward)")
        axes.plot(
            steps,
            [r.solved for r in self._rows],
            linestyle="--",
            label="solved (right number, then the end)",
        )
        axes.set_xlabel("GRPO step")
        axes.set_ylim(0, 1)
        axes.set_xlim(1, max(2, len(steps)))
        axes.grid(alpha=0.3)
        axes.legend(loc="upper left", frameon=False)
        what = self._options.model or f"a random {self._options.shape} Qwen3"
        axes.set_title(
            f"{what} learns sums up to {self._options.largest}+{self._options.largest}, "
            f"seed {self._options.seed}",
            fontsize=10,
        )
        figure.savefig(path, dpi=130)
        pyplot.close(figure)


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Any]:
    """A bar on stderr, when that is a terminal; its `advance` prints a row above it."""
    terminal = sys.stderr.isatty()
    try:
        from tqdm import tqdm
    except ImportError:
        done = 0

        def advance(line: str) -> None:
            nonlocal done
            done += 1
            if terminal:
                sys.stderr.write("\r\033[K")
                sys.stderr.flush()
            print(line, flush=True)
            if terminal and done < total:
                sys.stderr.write(f"step {done}/{total} [{'#' * (20 * done // total):<20}]")
                sys.stderr.flush()

        yield advance
        return
    with tqdm(total=total, unit="step", disable=not terminal, leave=False) as bar:

        def advance_bar(line: str) -> None:
            bar.update()
            tqdm.write(line, file=sys.stdout)
            sys.stdout.flush()

        yield advance_bar


def _check_outputs(options: SmokeOptions) -> None:
    """What cannot be written is said before the run, not after it."""
    for name in ("json", "plot"):
        path = getattr(options, name)
        if path is not None and not Path(path).resolve().parent.is_dir():
            raise SmokeError(f"--{name} {path}: there is no such directory")
    if options.plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise SmokeError("--plot needs matplotlib: pip install matplotlib")


def run_smoke(options: SmokeOptions) -> None:
    """Run, print, and write what was asked for.

    Raises:
        SmokeError: The run failed; see `Smoke.run`.
    """
    _check_outputs(options)
    smoke = Smoke(options)
    asyncio.run(smoke.run())
    if options.json is not None:
        text = json.dumps(smoke.report(), indent=1, allow_nan=False)
        Path(options.json).write_text(text + "\n")
    if options.plot is not None:
        smoke.plot(options.plot)
