# SPDX-License-Identifier: Apache-2.0
"""The embedded trainer against direct use of transformers and torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from arctic_rl_c import PayloadError
from arctic_rl_c.local import checkpoint
from arctic_rl_c.local.model import build_model, weights_digest
from arctic_rl_c.local.optim import Schedule
from arctic_rl_c.local.options import ModelOptions, TrainerOptions
from arctic_rl_c.local.trainer import Trainer
from local_reference import PAD, make_batch

MODEL = ModelOptions(shape="micro", seed=5)
P, R = 6, 5
PROMPTS = [[4, 5, 6], [7, 8, 9, 10, 11, 12], [3], [9, 9]]
RESPONSES = [[13, 14, 2], [15], [16, 17, 18, 19, 2], []]
LOG_PROBS = ["compute_entropy_and_logprobs"]
UPDATE = ["apply_temperature", "compute_entropy_and_logprobs"]


@pytest.fixture(scope="module")
def model() -> Any:
    return build_model(MODEL)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Matrices this small lose by being shared out."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def new_trainer(**options: Any) -> Trainer:
    return Trainer(MODEL, TrainerOptions(**{"lr": 1e-2, "reference": False, **options}))


def log_prob_payload(**meta: Any) -> dict[str, Any]:
    batch = make_batch(PROMPTS, RESPONSES, prompt_width=P, response_width=R)
    del batch["response_mask"]
    values = {
        "drop_position_ids": True,
        "max_prompt_len": P,
        "max_response_len": R,
        "temperature": 1.0,
        "pad_token_id": 7,
        "calculate_entropy": True,
        **meta,
    }
    return {"batch": batch, "meta": values, "processing": {"post": LOG_PROBS, "loss_fn": None}}


def update_payload(seed: int = 0, rows: slice = slice(None), **meta: Any) -> dict[str, Any]:
    batch = make_batch(PROMPTS, RESPONSES, prompt_width=P, response_width=R)
    generator = torch.Generator().manual_seed(seed)
    for name in ("old_log_probs", "advantages", "ref_log_prob"):
        values = torch.randn(batch["input_ids"].shape, generator=generator)
        batch[name] = values * batch["response_mask"]
    batch["old_log_probs"] = batch["old_log_probs"] - 2.0 * batch["response_mask"]
    batch = {k: v[rows] for k, v in batch.items()}
    batch["loss_mask"] = batch["response_mask"]
    values = {
        "drop_position_ids": True,
        "max_prompt_len": P,
        "max_response_len": R,
        "temperature": 1.0,
        "pad_token_id": 0,
        "calculate_entropy": False,
        "batch_num_tokens": batch["response_mask"].sum(),
        "global_batch_size": 4,
        "actor_config": {},
        "policy_loss_config": {},
        "rollout_is_weights": None,
        **meta,
    }
    return {"batch": batch, "meta": values, "processing": {"post": UPDATE, "loss_fn": "verl_grpo"}}


def direct(model: Any, temperature: float = 1.0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Per row: log P(token[i + 1]) and the entropy at i, from a plain forward of that row."""
    out = []
    for prompt, response in zip(PROMPTS, RESPONSES, strict=True):
        ids = torch.tensor([prompt + response])
        logits = model(ids).logits[0].float() / temperature
        log_probs = logits.log_softmax(-1)
        chosen = log_probs[:-1].gather(-1, ids[0, 1:, None])[:, 0]
        out.append((chosen, -(log_probs.exp() * log_probs).sum(-1)))
    return out


# -- log-probs -----------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [16384, 12, 11])
def test_standard_log_probs_predict_the_next_token(model: Any, limit: int) -> None:
    out = new_trainer().forward(log_prob_payload(max_token_len_per_gpu=limit))
    logprobs, entropy = out["batch"]["logprobs"], out["batch"]["entropy"]
    assert logprobs.shape == (4, P + R) and logprobs.dtype == torch.float32
    for i, (wanted, ent) in enumerate(direct(model)):
        begin, count = P - len(PROMPTS[i]), len(PROMPTS[i]) + len(RESPONSES[i])
        torch.testing.assert_close(logprobs[i, begin : begin + count - 1], wanted)
        torch.testing.assert_close(entropy[i, begin : begin + count], ent)
        padding = torch.ones(P + R, dtype=torch.bool)
        padding[begin : begin + count] = False
        assert (logprobs[i][padding] == 7.0).all() and (entropy[i][padding] == 7.0).all()
    assert out["metrics"] == {}


def test_zorro_log_probs_are_response_aligned(model: Any) -> None:
    out = new_trainer().forward(log_prob_payload(zorro_train_enable=True))["batch"]
    for i, (wanted, ent) in enumerate(direct(model)):
        p, r = len(PROMPTS[i]), len(RESPONSES[i])
        torch.testing.assert_close(out["logprobs"][i, P : P + r], wanted[p - 1 : p - 1 + r])
        torch.testing.assert_close(out["entropy"][i, P : P + r], ent[p - 1 : p - 1 + r])
        assert not out["logprobs"][i, :P].any() and not out["logprobs"][i, P + r :].any()


def test_prompt_sharing_that_arrives_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    trainer = new_trainer()
    trainer.forward(log_prob_payload())
    assert caplog.messages == []
    for _ in range(2):
        trainer.forward(log_prob_payload(zorro_train_enable=True))
    rows, prompts = len(PROMPTS), len({tuple(prompt) for prompt in PROMPTS})
    assert caplog.messages == [
        f"zorro_train_enable arrived: {rows} rows of {prompts} prompts, log-probs are "
        "response-aligned; each row is computed by itself"
    ]


def test_temperature_applies_where_the_payload_says(model: Any) -> None:
    payload = log_prob_payload(temperature=0.5)
    trainer = new_trainer()
    plain = trainer.forward(payload)["batch"]["logprobs"]
    payload["processing"]["post"] = UPDATE
    warm = trainer.forward(payload)["batch"]["logprobs"]
    for i, t in ((plain, 1.0), (warm, 0.5)):
        torch.testing.assert_close(i[1, :6], direct(model, t)[1][0])


def test_entropy_only_when_asked_for() -> None:
    assert (
        "entropy" not in new_trainer().forward(log_prob_payload(calculate_entropy=False))["batch"]
    )


def test_given_positions_are_used(model: Any) -> None:
    payload = log_prob_payload(drop_position_ids=False)
    mask = payload["batch"]["attention_mask"]
    payload["batch"]["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0) * mask
    rebuilt = new_trainer().forward(log_prob_payload())["batch"]["logprobs"]
    assert torch.equal(new_trainer().forward(payload)["batch"]["logprobs"], rebuilt)
    payload["batch"]["position_ids"] = payload["batch"]["position_ids"] * 3
    assert not torch.equal(new_trainer().forward(payload)["batch"]["logprobs"], rebuilt)


def test_int32_ids_and_an_empty_batch() -> None:
    payload = log_prob_payload()
    wanted = new_trainer().forward(payload)["batch"]["logprobs"]
    payload["batch"]["input_ids"] = payload["batch"]["input_ids"].int()
    assert torch.equal(new_trainer().forward(payload)["batch"]["logprobs"], wanted)
    payload["batch"] = {k: v[:0] for k, v in payload["batch"].items()}
    assert new_trainer().forward(payload)["batch"]["logprobs"].shape == (0, P + R)


def test_large_vocabularies_go_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = new_trainer()
    expected = whole.forward(log_prob_payload())["batch"]
    loss = whole.forward_backward(update_payload())["avg_loss"]
    norm = whole.step()["metrics"]["grad_norm"]
    monkeypatch.setattr("arctic_rl_c.local.trainer._LOGITS_BYTES", 4 * 20 * 3)
    pieces = new_trainer()
    for name, value in pieces.forward(log_prob_payload())["batch"].items():
        torch.testing.assert_close(value, expected[name])
    assert pieces.forward_backward(update_payload())["avg_loss"] == pytest.approx(loss)
    assert pieces.step()["metrics"]["grad_norm"] == pytest.approx(norm, rel=1e-5)


def test_reference_model_stays_as_it_was(model: Any) -> None:
    trainer = new_trainer(reference=True)
    before = trainer.forward(log_prob_payload())["batch"]["logprobs"]
    trainer.forward_backward(update_payload())
    trainer.step()
    assert not torch.equal(trainer.forward(log_prob_payload())["batch"]["logprobs"], before)
    again = trainer.forward(log_prob_payload(), reference_model=True)["batch"]["logprobs"]
    assert torch.equal(again, before)
    with pytest.raises(ValueError, match=r"No log_prob job initialized.*log_prob_gpus"):
        new_trainer().forward(log_prob_payload(), reference_model=True)


# -- the update ----------------------------------------------------------------------------------


def reference_update(model: Any, payload: dict[str, Any], temperature: float = 1.0) -> torch.Tensor:
    """Token-mean clipped loss of a payload, row by row with autograd."""
    batch, total = payload["batch"], torch.zeros(())
    for i, response in enumerate(RESPONSES):
        if not response:
            continue
        ids = torch.tensor([PROMPTS[i] + response])
        logits = model(ids).logits[0].float() / temperature
        chosen = logits[:-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
        new = chosen[len(PROMPTS[i]) - 1 :]
        window = slice(P, P + len(response))
        old, advantages = batch["old_log_probs"][i, window], batch["advantages"][i, window]
        ratio = (new - old).exp()
        loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2))
        bounded = torch.minimum(loss, -advantages * 3.0)
        total = total + torch.where(advantages < 0, bounded, loss).sum()
    return total / batch["response_mask"].sum()


@pytest.mark.parametrize("limit", [16384, 11])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_step_equals_torch_adamw(limit: int, temperature: float) -> None:
    trainer = new_trainer(gradient_clipping=0.05, weight_decay=0.1, betas=(0.8, 0.95))
    twin = build_model(MODEL).requires_grad_(True)
    adamw = torch.optim.AdamW(twin.parameters(), lr=1e-2, betas=(0.8, 0.95), weight_decay=0.1)
    for seed in range(3):
        payload = update_payload(seed, max_token_len_per_gpu=limit, temperature=temperature)
        wanted = reference_update(twin, payload, temperature)
        wanted.backward()
        norm = torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.05)
        adamw.step()
        adamw.zero_grad()
        out = trainer.forward_backward(payload)
        assert out["metrics"]["loss"] == pytest.approx(wanted.item(), rel=1e-4, abs=1e-6)
        metrics = trainer.step()["metrics"]
        assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
        assert metrics["last_lr"] == 1e-2
    for (name, ours), theirs in zip(
        trainer._model.named_parameters(), twin.parameters(), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=2e-3, atol=2e-5, msg=name)


def test_mini_batches_add_up_to_the_whole() -> None:
    whole, parts = new_trainer(), new_trainer()
    whole.forward_backward(update_payload())
    tokens = update_payload()["meta"]["batch_num_tokens"]
    for rows in (slice(0, 1), slice(1, 4)):
        parts.forward_backward(update_payload(rows=rows, batch_num_tokens=tokens))
    assert parts.step()["metrics"]["grad_norm"] == pytest.approx(
        whole.step()["metrics"]["grad_norm"], rel=1e-5
    )


def test_options_reach_the_gradient() -> None:
    norms = {}
    for name, actor in {
        "plain": {},
        "kl": {"use_kl_loss": True, "kl_loss_coef": 1.0},
        "entropy": {"entropy_coeff": 1.0},
        "rows": {"loss_agg_mode": "seq-mean-token-sum"},
        "clip": {"clip_ratio_high": 50.0, "clip_ratio_c": 60.0},
    }.items():
        trainer = new_trainer()
        out = trainer.forward_backward(update_payload(actor_config=actor))
        norms[name] = trainer.step()["metrics"]["grad_norm"]
        assert ("actor/entropy_loss" in out["metrics"]) == (name == "entropy")
        assert ("kl_loss" in out["metrics"]) == (name == "kl")
    assert len({round(v, 6) for v in norms.values()}) == len(norms), norms


def test_rollout_weights_from_meta_or_batch() -> None:
    weights = torch.rand(4, R) + 0.5
    norms = []
    for payload in (
        update_payload(),
        update_payload(rollout_is_weights=weights),
        update_payload(),
    ):
        if len(norms) == 2:
            payload["batch"]["rollout_is_weights"] = torch.nn.functional.pad(weights, (P, 0))
        trainer = new_trainer()
        trainer.forward_backward(payload)
        norms.append(trainer.step()["metrics"]["grad_norm"])
    assert norms[0] != norms[1] == norms[2]


def test_half_precision_keeps_small_updates() -> None:
    half = ModelOptions(shape="micro", seed=5, dtype="bfloat16")
    trainer = Trainer(half, TrainerOptions(lr=1e-6, reference=False, weight_decay=0.0))
    before = {n: p.detach().clone() for n, p in trainer._optimizer._masters.items()}
    for seed in range(3):
        trainer.forward_backward(update_payload(seed))
        trainer.step()
    moved = [float((p - before[n]).abs().max()) for n, p in trainer._optimizer._masters.items()]
    assert all(0 < m < 1e-5 for m in moved)
    for name, param in trainer._model.named_parameters():
        assert param.dtype == torch.bfloat16
        assert torch.equal(param, trainer._optimizer._masters[name].bfloat16())


def test_gradient_checkpointing_changes_nothing() -> None:
    norms = []
    for on in (False, True):
        trainer = new_trainer(gradient_checkpointing=on)
        trainer.forward_backward(update_payload())
        norms.append(trainer.step()["metrics"]["grad_norm"])
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)


def test_a_gradient_that_is_not_finite_is_not_applied() -> None:
    trainer = new_trainer()
    before = weights_digest(trainer._model)
    payload = update_payload()
    payload["batch"]["advantages"][0, P] = float("inf")
    trainer.forward_backward(payload)
    metrics = trainer.step()["metrics"]
    assert metrics["step_skipped"] is True and not math.isfinite(metrics["grad_norm"])
    assert weights_digest(trainer._model) == before
    trainer.forward_backward(update_payload())
    assert "step_skipped" not in trainer.step()["metrics"]


def test_a_call_that_fails_half_way_leaves_no_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = new_trainer()
    payload = update_payload(max_token_len_per_gpu=11)
    compute, calls = trainer._micro_loss, []

    def fail_later(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 2:
            raise MemoryError("no room")
        return compute(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(trainer, "_micro_loss", fail_later)
        with pytest.raises(MemoryError):
            trainer.forward_backward(payload)
    with pytest.raises(RuntimeError, match="without a forward_backward"):
        trainer.step()
    trainer.forward_backward(payload)
    clean = new_trainer()
    clean.forward_backward(payload)
    assert trainer.step() == clean.step()


def test_a_batch_without_a_supervised_token_teaches_nothing() -> None:
    trainer = new_trainer(weight_decay=0.0)
    before = weights_digest(trainer._model)
    payload = update_payload(batch_num_tokens=torch.tensor(0))
    payload["batch"]["response_mask"] = torch.zeros_like(payload["batch"]["response_mask"])
    out = trainer.forward_backward(payload)
    assert out["metrics"]["loss"] == 0.0 and out["avg_loss"] == 0.0
    assert trainer.step()["metrics"]["grad_norm"] == 0.0
    assert weights_digest(trainer._model) == before


def test_step_needs_gradients() -> None:
    trainer = new_trainer()
    with pytest.raises(RuntimeError, match="without a forward_backward"):
        trainer.step()
    trainer.forward_backward(update_payload())
    with pytest.raises(ValueError, match="learning_rate is set by the schedule"):
        trainer.step(learning_rate=1.0)
    trainer.step()
    with pytest.raises(RuntimeError, match="without a forward_backward"):
        trainer.step()


# -- what is refused -----------------------------------------------------------------------------


def break_batch(key: str, value: Any) -> Any:
    def change(payload: dict[str, Any]) -> None:
        if value is None:
            del payload["batch"][key]
        else:
            payload["batch"][key] = value(payload["batch"][key]) if callable(value) else value

    return change


def hole(mask: torch.Tensor) -> torch.Tensor:
    mask[1, 2] = 0
    return mask


def foreign(ids: torch.Tensor) -> torch.Tensor:
    ids[2, P] = 20
    return ids


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (break_batch("input_ids", None), PayloadError, "the batch has no input_ids"),
        (break_batch("input_ids", lambda x: x.float()), PayloadError, "must be int64 or int32"),
        (break_batch("input_ids", lambda x: x[0]), PayloadError, r"must be a matrix .* \(11,\)"),
        (break_batch("input_ids", foreign), PayloadError, "holds 20, the model's vocabulary"),
        (break_batch("attention_mask", hole), PayloadError, "row 1 is not one run of ones"),
        (break_batch("attention_mask", lambda x: x[:, 1:]), PayloadError, r"\(4, 10\)"),
        (break_batch("advantages", lambda x: x[:, P:]), PayloadError, r"advantages .*\(4, 5\)"),
        (break_batch("old_log_probs", None), PayloadError, "the batch has no old_log_probs"),
        (lambda p: p["meta"].pop("drop_position_ids"), PayloadError, "has no position_ids"),
        (lambda p: p["meta"].pop("batch_num_tokens"), KeyError, "batch_num_tokens"),
        (lambda p: p["meta"].update(max_prompt_len=12), PayloadError, "max_prompt_len 12"),
        (lambda p: p["meta"].update(max_prompt_len=11), PayloadError, "window of 0 slots"),
        (lambda p: p["meta"].pop("max_prompt_len"), PayloadError, "meta has no max_prompt_len"),
        (
            lambda p: p.update(batch={k: v[:0] for k, v in p["batch"].items()}),
            PayloadError,
            "nothing to learn from: 0 rows",
        ),
        (lambda p: p["meta"].update(max_token_len_per_gpu=6), PayloadError, "row 1 has 7 tokens"),
        (lambda p: p["meta"].update(temperature=0), ValueError, "must be above 0"),
        (lambda p: p["meta"].update(logits_optimization="fast"), ValueError, "'fast' is not one"),
        (lambda p: p["meta"].update(logits_optimization="memory"), ValueError, "zorro_train"),
        (lambda p: p["processing"].update(loss_fn="grpo"), ValueError, "loss_fn 'grpo'"),
        (lambda p: p["processing"].update(loss_fn=None), ValueError, "loss_fn None"),
        (lambda p: p["processing"].update(post=["os.system"]), ValueError, "step 'os.system'"),
        (lambda p: p["processing"].update(post=[]), ValueError, "needs the step"),
        (lambda p: p.pop("meta"), PayloadError, "no mapping 'meta'"),
    ],
)
def test_bad_payloads(change: Any, error: type[Exception], message: str) -> None:
    payload = update_payload()
    change(payload)
    with pytest.raises(error, match=message):
        new_trainer().forward_backward(payload)


def test_a_supervised_token_needs_a_predecessor() -> None:
    batch = make_batch([[]], [[5, 6]], prompt_width=2, response_width=2)
    batch.update(old_log_probs=torch.zeros(1, 4), advantages=torch.ones(1, 4))
    payload = update_payload(max_prompt_len=2)
    payload["batch"] = batch
    with pytest.raises(PayloadError, match="row 0 supervises a slot that no token"):
        new_trainer().forward_backward(payload)


# -- schedule ------------------------------------------------------------------------------------


def test_schedules() -> None:
    assert Schedule(0.1, None).lr(7) == 0.1
    warm = Schedule(
        0.1,
        {
            "type": "WarmupLR",
            "params": {
                "warmup_min_lr": 0.0,
                "warmup_max_lr": 0.1,
                "warmup_num_steps": 4,
                "warmup_type": "linear",
            },
        },
    )
    assert [warm.lr(i) for i in range(6)] == pytest.approx([0, 0.025, 0.05, 0.075, 0.1, 0.1])
    cosine = Schedule(
        0.1,
        {
            "type": "WarmupCosineLR",
            "params": {
                "total_num_steps": 6,
                "warmup_num_steps": 2,
                "warmup_min_ratio": 0.0,
                "cos_min_ratio": 0.1,
                "warmup_type": "linear",
            },
        },
    )
    fall = [0.1 * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * k / 4))) for k in range(5)]
    assert [cosine.lr(i) for i in range(8)] == pytest.approx([0, 0.05, *fall, 0.01])


def test_the_schedule_drives_the_steps() -> None:
    trainer = new_trainer(
        scheduler={"type": "WarmupLR", "params": {"warmup_max_lr": 0.1, "warmup_num_steps": 2}}
    )
    before, rates = weights_digest(trainer._model), []
    for _ in range(3):
        trainer.forward_backward(update_payload())
        rates.append(trainer.step()["metrics"]["last_lr"])
        if len(rates) == 1:  # the first rate is 0
            assert weights_digest(trainer._model) == before
    assert rates == pytest.approx([0.05, 0.1, 0.1])
    assert weights_digest(trainer._model) != before


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"type": "Step"}, "scheduler type 'Step'"),
        ({"type": "WarmupLR", "params": {"warm": 1}}, "parameter 'warm'"),
        ({"type": "WarmupLR", "params": {"warmup_type": "cubic"}}, "warmup_type 'cubic'"),
        ({"type": "WarmupCosineLR", "params": {"warmup_num_steps": 3}}, "must exceed"),
    ],
)
def test_bad_schedules(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Schedule(0.1, config)


# -- checkpoints ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_resuming_equals_going_on(tmp_path: Path, dtype: str) -> None:
    def start() -> Trainer:
        options = TrainerOptions(
            lr=1e-2,
            reference=False,
            checkpoint_path=str(tmp_path),
            scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 5}},
        )
        return Trainer(ModelOptions(shape="micro", seed=5, dtype=dtype), options)

    def run(trainer: Trainer, seeds: range) -> list[float]:
        rates = []
        for seed in seeds:
            trainer.forward_backward(update_payload(seed))
            rates.append(trainer.step()["metrics"]["last_lr"])
        return rates

    first = start()
    run(first, range(3))
    saved = first.save_checkpoint(step=30, stage_info={"epoch": 1})
    assert saved == {"path": str(tmp_path / "step_30"), "hf_path": None, "global_step": 30}
    rates = run(first, range(3, 6))
    second = start()
    loaded = second.load_checkpoint()
    assert loaded == {"path": saved["path"], "global_step": 30, "stage_info": {"epoch": 1}}
    assert run(second, range(3, 6)) == rates
    assert weights_digest(second._model) == weights_digest(first._model)


def test_loading_from_nothing(tmp_path: Path) -> None:
    trainer = new_trainer(checkpoint_path=str(tmp_path / "none"))
    assert trainer.load_checkpoint()["global_step"] == 0
    with pytest.raises(FileNotFoundError, match="step_3 holds no complete checkpoint"):
        trainer.load_checkpoint(step=3)
    with pytest.raises(ValueError, match="no checkpoint path"):
        new_trainer().save_checkpoint()
    with pytest.raises(ValueError, match="checkpoint_type 'light'"):
        trainer.save_checkpoint(checkpoint_type="light")
    for step in (math.inf, 1.5, "3"):
        with pytest.raises(TypeError, match=f"step is an integer, found {step!r}"):
            trainer.save_checkpoint(step=step)  # type: ignore[arg-type]
    assert not (tmp_path / "none").exists()


def test_retention_and_the_pointer(tmp_path: Path) -> None:
    trainer = new_trainer(checkpoint_path=str(tmp_path))
    for step in (10, 20, 30, 40):
        trainer.save_checkpoint(step=step, save_total_limit=2)
    assert checkpoint.steps(tmp_path) == [30, 40]
    assert (tmp_path / "latest").read_text() == "step_40\n"
    trainer.save_checkpoint(step=40, save_total_limit=1)  # replaces its own
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step_40"]
    with pytest.raises(ValueError, match="save_total_limit must be at least 1"):
        trainer.save_checkpoint(step=50, save_total_limit=0)
    with pytest.raises(ValueError, match="must not be negative"):
        trainer.save_checkpoint(step=-1)
    (tmp_path / "latest").write_text("step_7\n")
    with pytest.raises(FileNotFoundError, match="steps there: 40"):
        trainer.load_checkpoint()
    (tmp_path / "latest").write_text("../elsewhere\n")
    with pytest.raises(FileNotFoundError, match="which is no checkpoint"):
        trainer.load_checkpoint()


@pytest.mark.parametrize("victim", ["save_file", "_write_text"])
def test_a_failed_save_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, victim: str
) -> None:
    trainer = new_trainer(checkpoint_path=str(tmp_path))
    trainer.save_checkpoint(step=1)
    digest = weights_digest(trainer._model)
    trainer.forward_backward(update_payload())
    trainer.step()

    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, victim, fail)
        for step in (1, 2):
            with pytest.raises(OSError, match="No space left"):
                trainer.save_checkpoint(step=step)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step_1"]
    assert trainer.load_checkpoint()["global_step"] == 1
    assert weights_digest(trainer._model) == digest


def test_a_checkpoint_of_another_model_changes_nothing(tmp_path: Path) -> None:
    other = Trainer(ModelOptions(shape="tiny"), TrainerOptions(reference=False))
    other.save_checkpoint(path=str(tmp_path))
    trainer = new_trainer()
    before = weights_digest(trainer._model)
    with pytest.raises(ValueError, match=r"has shape \(20, 64\), the model wants \(20, 32\)"):
        trainer.load_checkpoint(path=str(tmp_path))
    assert weights_digest(trainer._model) == before


def test_export_for_transformers(tmp_path: Path) -> None:
    trainer = new_trainer()
    saved = trainer.save_checkpoint(path=str(tmp_path), export_hf=True)
    again = Trainer(ModelOptions(path=saved["hf_path"]), TrainerOptions(reference=False))
    assert weights_digest(again._model) == weights_digest(trainer._model)


def test_describe_counts_flops() -> None:
    facts = new_trainer().describe()
    # 2 layers: q 32x32, k and v 32x16, o 32x32, three 32x64 matrices; the tied head 20x32.
    body = 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64)
    assert facts["forward_flops"] == {
        "body": 2 * body,
        "head": 2 * 20 * 32,
        "attention": 4 * 2 * 32,
    }
    assert facts["tensors"] == 24 and facts["global_step"] == 0
    assert new_trainer().measure_peak_flops(0.0)["flops"] > 0


def test_pad_is_what_the_tokenizer_says() -> None:
    from arctic_rl_c.local.model import load_tokenizer

    assert load_tokenizer(MODEL).pad_token_id == PAD
