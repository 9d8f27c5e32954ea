# SPDX-License-Identifier: Apache-2.0
"""Backend, worker and rollout server of the verl plug-in, over the embedded server."""

from __future__ import annotations

import asyncio
import importlib
import pickle
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import NonTensorData, TensorDict

import clients
from arctic_rl_c import ConfigError, PeerLostError
from arctic_rl_c.local.options import LocalOptions
from arctic_rl_c.transports.local import LocalTransport
from verl_doubles import PLUGIN, verl

PROMPTS = [[4, 13, 5, 16], [4, 13, 5, 16], [3, 16], [3, 16]]
P, R = 6, 5


class Config(dict[str, Any]):
    """A mapping with attributes, as OmegaConf's are."""

    __getattr__ = dict.__getitem__


def main_config(**block: Any) -> Config:
    model = Config(path="random:micro", enable_gradient_checkpointing=False, hf_config=None)
    actor = SimpleNamespace(model_config=None, **vars(actor_settings()))
    role = {
        "model": model,
        "actor": {"ppo_mini_batch_size": 1, "optim": {"lr": 1e-2}},
        "rollout": {"n": 2},
    }
    config = Config(
        trainer={"remote_backend": "arctic"},
        remote_backend={"train": {}, "log_prob_gpus": 1, **block},
        actor_rollout_ref=role,
        data={"train_batch_size": 2, "max_prompt_length": P, "max_response_length": R},
    )
    config["of_worker"] = Config(model=model, actor=actor)
    return config


def actor_settings() -> SimpleNamespace:
    return SimpleNamespace(
        entropy_coeff=0.0, rollout_n=2, calculate_entropy=False, use_kl_loss=False, policy_loss={}
    )


class Plugin:
    """The plug-in's modules over one embedded server."""

    def __init__(self, transport: LocalTransport) -> None:
        self.transport = transport
        self.package = importlib.import_module(PLUGIN)
        self.backend = importlib.import_module(f"{PLUGIN}.backend")
        self.worker = importlib.import_module(f"{PLUGIN}.worker")
        self.rollout = importlib.import_module(f"{PLUGIN}.rollout")
        self.compat = importlib.import_module(f"{PLUGIN}.compat")
        self.modes = importlib.import_module("verl.workers.rollout.replica").RolloutMode
        self.attach: Any = None
        self.handle = {"backend": "arctic_rl_c", "transport": {"transport": "test"}}

    def make_worker(self, config: Config | None = None, role: str = "actor_rollout_ref") -> Any:
        config = config or main_config()
        return self.worker.ArcticWorker(
            config["of_worker"], role, main_config=config, backend_handle=self.handle
        )

    def make_server(self, **settings: Any) -> Any:
        values = {
            "max_model_len": None,
            "response_length": R,
            "prompt_length": P,
            "free_cache_engine": True,
            **settings,
        }
        return self.rollout.ArcticServer(
            Config(values), self.modes.HYBRID, main_config(), self.handle, 64
        )


@pytest.fixture(scope="module", params=["plugin", "v1"])
def plugin(request: pytest.FixtureRequest) -> Iterator[Plugin]:
    with verl(request.param), pytest.MonkeyPatch.context() as patch:
        options = LocalOptions.from_config(main_config())
        transport = LocalTransport(options)
        try:
            asyncio.run(transport.start())
            made = Plugin(transport)
            made.compat.LoopThread.get()
            # The embedded server in two child processes stands for any that can be attached to.
            made.attach = made.backend.attach
            patch.setattr(made.backend, "attach", lambda handle, reach: transport)
            yield made
        finally:
            transport.close()


def jagged(rows: list[list[float]], dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.nested.as_nested_tensor(
        [torch.tensor(row, dtype=dtype) for row in rows], layout=torch.jagged
    )


def batch(responses: list[list[int]], form: str) -> TensorDict:
    """What each trainer sends: dense and padded, or all jagged."""
    rows = [p + r for p, r in zip(PROMPTS, responses, strict=True)]
    tensors: dict[str, Any] = {
        "input_ids": jagged(rows),
        "position_ids": jagged([list(range(len(row))) for row in rows]),
    }
    ones = [[1] * len(response) for response in responses]
    if form == "v1":
        tensors |= {
            "prompts": jagged(PROMPTS),
            "responses": jagged(responses),
            "response_mask": jagged(ones),
        }
    else:
        prompts = [[0] * (P - len(p)) + p for p in PROMPTS]
        tails = [r + [0] * (R - len(r)) for r in responses]
        mask = [o + [0] * (R - len(o)) for o in ones]
        heads = [[0] * (P - len(p)) + [1] * len(p) for p in PROMPTS]
        tensors |= {
            "prompts": torch.tensor(prompts),
            "responses": torch.tensor(tails),
            "attention_mask": torch.tensor([h + m for h, m in zip(heads, mask, strict=True)]),
            "response_mask": torch.tensor(mask),
            "loss_mask": torch.tensor(mask),
        }
    data = TensorDict(tensors, batch_size=[len(rows)])
    data["temperature"] = NonTensorData(1.0, batch_size=[len(rows)])
    return data


def response_values(nested: torch.Tensor, responses: list[list[int]], form: str) -> Any:
    """As verl reads them: the slots before each response token."""
    offsets = nested.offsets().tolist()
    values = nested.values()
    rows = []
    for end, response in zip(offsets[1:], responses, strict=True):
        rows.append(values[end - len(response) - 1 : end - 1].tolist())
    if form == "v1":
        return jagged(rows, torch.float32)
    return torch.tensor([row + [0.0] * (R - len(row)) for row in rows])


def test_how_verl_dispatches(plugin: Plugin) -> None:
    """Every method of the worker's contract, and whether verl waits for it."""
    all_ = importlib.import_module("verl.single_controller.base.decorator").Dispatch.ONE_TO_ALL
    found = {
        name: method.dispatch
        for name, method in vars(plugin.worker.ArcticWorker).items()
        if hasattr(method, "dispatch")
    }
    of_all = ("init_model", "to", "set_loss_fn", "reset", "destroy", "sleep_replicas")
    assert found == {
        **dict.fromkeys(of_all, (all_, True)),
        # Awaited, unlike the existing client's, so that no failed save goes unseen.
        "save_checkpoint": (all_, True),
        "load_checkpoint": (all_, True),
        "update_weights": (all_, False),
        "compute_log_prob": ({"mesh": "actor"}, True),
        "compute_ref_log_prob": ({"mesh": "ref"}, True),
        "update_actor": ({"mesh": "actor"}, True),
    }
    worker = plugin.make_worker()
    assert worker.to("cuda", model=False) is None and worker.set_loss_fn(len) is None
    assert worker.reset() is None and worker.sleep_replicas() is None


def test_a_step_of_verl(plugin: Plugin) -> None:
    form = plugin.package.registration.form
    worker, server = plugin.make_worker(), plugin.make_server()
    worker.init_model()
    assert set(worker.meshes) == {"actor", "ref", "rollout"}
    worker.update_weights(global_steps=0, mode="remote_backend")
    params = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "logprobs": True}

    async def roll_out() -> list[Any]:
        requests = (server.generate(p, params, f"r{i}") for i, p in enumerate(PROMPTS))
        return list(await asyncio.gather(*requests))

    outputs = asyncio.run(roll_out())
    assert params == {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "logprobs": True}
    # The budget leaves to a response what its prompt did not use; agent loops cut it to length.
    responses = [output.token_ids[:R] for output in outputs]
    for output in outputs:
        assert len(output.log_probs) == len(output.token_ids) > 0
        assert output.stop_reason == "completed"
        assert output.extra_fields["weight_version"] >= 1
    asyncio.run(server.sleep())

    data = batch(responses, form)
    old = worker.compute_log_prob(data)
    assert old["metrics"]["mfu"] == 0.0
    assert old["entropy"].offsets().tolist() == data["input_ids"].offsets().tolist()
    ref = worker.compute_ref_log_prob(data)
    assert "entropy" not in ref
    # The sampler's own log-probs are the trainer's, slot for slot: nothing is shifted.
    old_rows = response_values(old["log_probs"], responses, form)
    flat = old_rows.values().tolist() if form == "v1" else None
    if flat is None:
        flat = [
            v for row, r in zip(old_rows.tolist(), responses, strict=True) for v in row[: len(r)]
        ]
    wanted = [value for output in outputs for value in output.log_probs[:R]]
    assert flat == pytest.approx(wanted, abs=1e-4)

    data["old_log_probs"] = old_rows
    scale = [1.0, -1.0, 0.5, -0.5]
    if form == "v1":
        data["advantages"] = jagged(
            [[s] * len(r) for s, r in zip(scale, responses, strict=True)], torch.float32
        )
    else:
        data["advantages"] = torch.tensor(scale)[:, None] * data["response_mask"]
    data["global_batch_size"] = NonTensorData(4, batch_size=[4])
    updated = worker.update_actor(data)["metrics"]
    assert updated["mfu"] == [0.5] and updated["grad_norm"][0] > 0
    assert updated["lr"] == [1e-2] and "last_lr" not in updated and "loss" in updated
    assert data["global_token_num"] == data["input_ids"].offsets().diff().tolist()
    worker.update_weights(global_steps=1)  # wakes the sampler
    digests = asyncio.run(plugin.transport.weights_digests())
    assert digests["trainer"] == digests["sampler"]


def test_checkpoints_and_their_retention(plugin: Plugin, tmp_path: Path) -> None:
    worker = plugin.make_worker()
    before = asyncio.run(plugin.transport.weights_digests())["trainer"]
    for step in (2, 4, 10):
        worker.save_checkpoint(
            str(tmp_path / f"global_step_{step}" / "actor"), None, step, max_ckpt_to_keep=2
        )
    left = sorted(path.parent.name for path in tmp_path.glob("global_step_*/actor"))
    assert left == ["global_step_10", "global_step_4"]
    path = tmp_path / "global_step_10" / "actor"
    worker.load_checkpoint(str(path), del_local_after_load=True)
    assert not path.exists()
    assert asyncio.run(plugin.transport.weights_digests())["trainer"] == before
    with pytest.raises(FileNotFoundError, match="no checkpoint of the Arctic server in"):
        worker.load_checkpoint(str(tmp_path / "nothing"))
    with pytest.raises(ValueError, match="default_hdfs_dir is not supported"):
        worker.save_checkpoint(str(path), "hdfs://somewhere", 1)
    with pytest.raises(AssertionError, match="for the actor role"):
        plugin.make_worker(role="ref").save_checkpoint(str(path))


def test_a_model_for_others_beside_the_checkpoint(plugin: Plugin, tmp_path: Path) -> None:
    config = main_config()
    config["actor_rollout_ref"]["actor"]["checkpoint"] = {"save_contents": ["model", "hf_model"]}
    plugin.make_worker(config).save_checkpoint(str(tmp_path / "actor"), None, 2)
    assert (tmp_path / "actor" / "step_2" / "hf" / "config.json").is_file()


def test_a_worker_that_cannot_be(plugin: Plugin) -> None:
    config = main_config()
    with pytest.raises(KeyError, match="backend_handle"):
        plugin.worker.ArcticWorker(config["of_worker"], "actor", main_config=config)
    config["trainer"] = {"remote_backend": None}
    with pytest.raises(ValueError, match=r"trainer\.remote_backend, which is not set"):
        plugin.make_worker(config)
    with pytest.raises(ValueError, match="role 'critic' is none of"):
        plugin.make_worker(role="critic")
    worker = plugin.make_worker()
    worker.destroy()
    worker.destroy()
    with pytest.raises(RuntimeError, match="this worker was destroyed"):
        worker.update_weights()
    assert plugin.transport._roles[0].alive  # not the worker's to end


def test_the_replica(plugin: Plugin) -> None:
    given = {"main_config": main_config(), "backend_handle": plugin.handle}
    for name in given:
        with pytest.raises(KeyError, match=f"{name}: .* set trainer.remote_backend too"):
            others = {key: value for key, value in given.items() if key != name}
            plugin.rollout.ArcticReplica(0, {}, {}, **others)
    made = plugin.rollout.ArcticReplica(0, Config(), Config(), 1, unknown_to_verl=1, **given)
    assert made.rollout_worker_use_gpu() is False and made.gpus_per_node == 1
    limit = plugin.rollout.position_limit
    inner = SimpleNamespace(max_position_embeddings=7)
    assert limit(SimpleNamespace(hf_config=inner)) == 7
    outer = SimpleNamespace(text_config=inner, max_position_embeddings=9)
    assert limit(SimpleNamespace(hf_config=outer)) == 7


def test_what_a_result_becomes(plugin: Plugin) -> None:
    reason = plugin.rollout.stop_reason
    reasons = ("abort", "stop", "length", "other", None)
    assert [reason(r) for r in reasons] == ["aborted", "completed", "completed", "other", None]
    chosen = plugin.rollout.chosen_log_probs
    listed = [{5: {"logprob": -0.5, "rank": 1}}, {"6": -1.5}]
    assert chosen({"logprobs": listed}, [5, 6]) == [-0.5, -1.5]
    for found in (None, listed[:1]):
        with pytest.raises(RuntimeError, match=r"calculate_log_probs\) and the server gave"):
            chosen({"logprobs": found}, [5, 6])


def test_a_standalone_server_is_left_awake(plugin: Plugin, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = clients.Transport()
    monkeypatch.setattr(plugin.backend, "attach", lambda handle, reach: recorder)
    monkeypatch.setattr(plugin.backend, "_load_tokenizer", lambda config: clients.Tokenizer())

    async def work() -> list[str]:
        server = plugin.make_server()
        server.rollout_mode = plugin.modes.STANDALONE
        await server.sleep()
        await server.wake_up()
        assert recorder.calls == []
        server.rollout_mode = plugin.modes.COLOCATED
        await server.wake_up()
        await server.sleep()
        return [call[0] for call in recorder.calls]

    assert asyncio.run(work()) == ["wake_inference", "reset_prefix_cache", "sleep_inference"]


def test_token_budgets(plugin: Plugin) -> None:
    request = plugin.rollout.sampling_request
    config = Config(response_length=5, prompt_length=6, repetition_penalty=1.5)
    given = {"logprobs": False, "temperature": 0.5}
    params, budget = request(config, 64, [1] * 4, given)
    assert budget == 5 + 6 - 4 == params["max_tokens"] and "logprobs" not in params
    assert params["repetition_penalty"] == 1.5 and given == {"logprobs": False, "temperature": 0.5}
    assert request(config, 64, [1], {"max_tokens": 3, "max_new_tokens": 9})[1] == 3
    params, budget = request(config, 8, [1] * 6, {"max_new_tokens": 9, "logprobs": True})
    assert (budget, params["logprobs"]) == (2, 0) and "max_new_tokens" not in params
    assert request(config, 8, [1] * 8, {})[1] == 0
    assert request(config, 64, [1] * 20, {})[1] == 0
    with pytest.raises(ValueError, match=r"Prompt length \(9\) exceeds"):
        request(config, 8, [1] * 9, {})


def test_the_rollout_server(plugin: Plugin) -> None:
    with pytest.raises(ValueError, match="max_model_len is 65 and the model's own limit 64"):
        plugin.make_server(max_model_len=65)
    plugin.make_worker().update_weights()

    async def work() -> None:
        server = plugin.make_server(max_model_len=6)
        await server.set_global_steps(7)
        full = await server.generate([4] * 6, {"logprobs": True}, "full")
        assert (full.token_ids, full.log_probs, full.stop_reason) == ([], [], "completed")
        assert full.extra_fields["global_steps"] == 7
        with pytest.raises(ValueError, match="image_data: the Arctic rollout takes token ids only"):
            await server.generate([4], {}, "picture", image_data=["x"])
        await server.sleep()
        with pytest.raises(RuntimeError, match="sleep"):
            await server.generate([4], {}, "asleep")
        await server.wake_up()
        await server.clear_kv_cache()
        await server.resume_kv_cache()
        plain = await server.generate([4], {"max_tokens": 2}, "plain")
        assert plain.log_probs is None and 1 <= len(plain.token_ids) <= 2
        counted = await server.abort_all_requests()
        assert counted == {"aborted_count": 0, "request_ids": []}
        assert (await server.generate([4], {}, "paused")).stop_reason == "aborted"
        await server.resume_generation()
        assert (await server.generate([4], {}, "on")).stop_reason == "completed"
        assert await server.abort_request("nobody") == {"aborted": False, "request_id": "nobody"}

    asyncio.run(work())


@pytest.mark.parametrize("free", [False, True])
def test_sleep_tells_of_requests_that_left_nothing(
    plugin: Plugin, monkeypatch: pytest.MonkeyPatch, free: bool
) -> None:
    """verl's V1 trainer logs what a request raises, and would train on no responses."""
    recorder = clients.Transport()
    recorder.accepts_token_ids, recorder.server_limits = True, False  # type: ignore[attr-defined]
    monkeypatch.setattr(plugin.backend, "attach", lambda handle, reach: recorder)
    raised: list[Exception] = []

    async def before(method: str, count: int) -> None:
        if method == "generate" and raised:
            raise raised[0]

    recorder.before = before

    async def work() -> None:
        server = plugin.make_server(free_cache_engine=free)

        async def serve(*prompts: int) -> None:
            for prompt in prompts:
                await server.generate([prompt], {}, f"r{prompt}")

        await serve(5, 6)
        raised.append(ValueError("odd"))
        with pytest.raises(ValueError, match="odd"):
            await serve(7)
        await server.sleep()  # there is something to train on
        with pytest.raises(ValueError, match="odd"):
            await serve(7)
        with pytest.raises(ValueError, match="odd"):
            await server.sleep()
        await server.sleep()
        raised.clear()
        await serve(5)
        raised.append(PeerLostError("the sampler died"))
        with pytest.raises(PeerLostError, match="the sampler died"):
            await serve(6)
        with pytest.raises(PeerLostError, match="the sampler died"):
            await server.sleep()
        await server.abort_request("r", reset_prefix_cache=True)

    asyncio.run(work())
    slept = [call for call in recorder.calls if call[0] == "sleep_inference"]
    assert len(slept) == (2 if free else 0)


def test_requests_that_wait_become_one_group(plugin: Plugin) -> None:
    batching = importlib.import_module(f"{PLUGIN}.batching")
    calls: list[list[Any]] = []

    async def work() -> None:
        gate = asyncio.Event()

        async def generate(prompts: Any, params: Any) -> list[dict[str, Any]]:
            calls.append(list(prompts))
            await gate.wait()
            if params.get("fail"):
                raise PeerLostError("gone")
            return [{"token_ids": prompt} for prompt in prompts]

        batcher = batching.Batcher(generate, together=True, largest=2)
        first = [asyncio.create_task(batcher.submit(f"a{i}", [i], {"t": 1})) for i in range(3)]
        other = asyncio.create_task(batcher.submit("b", [9], {"fail": True}))
        while not calls:
            await asyncio.sleep(0)
        with pytest.raises(ValueError, match="'b' is running already"):
            await batcher.submit("b", [1], {})
        assert batcher.abort("a1") and not batcher.abort("a1")
        assert await first[1] is None
        gate.set()
        assert await first[0] == {"token_ids": [0]} and await first[2] == {"token_ids": [2]}
        with pytest.raises(PeerLostError, match="gone"):
            await other
        assert calls == [[[0], [1]], [[2]], [[9]]]
        cancelled = asyncio.create_task(batcher.submit("c", [1], {"t": 2}))
        await asyncio.sleep(0)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        alone = batching.Batcher(generate, together=False)
        both = await asyncio.gather(alone.submit("x", [1], {}), alone.submit("y", [2], {}))
        assert both == [{"token_ids": [1]}, {"token_ids": [2]}]
        assert calls[-2:] == [[[1]], [[2]]]

    asyncio.run(work())


def test_the_backend_attaches_pickles_and_ends_once(plugin: Plugin) -> None:
    cls = plugin.backend.ArcticBackend
    attached = cls.from_config(main_config(), handle=plugin.handle)
    assert attached.requires_single_forwarder() and not attached.owner
    copy = pickle.loads(pickle.dumps(attached))
    assert not copy.owner and copy.config == attached.config
    asyncio.run(attached.destroy())
    asyncio.run(attached.destroy())
    assert plugin.transport._roles[0].alive
    with pytest.raises(ConfigError, match="the handle of another backend"):
        plugin.attach({"rl_client_reconnect_config": {}}, plugin.backend.Reach())
    with pytest.raises(ConfigError, match="'pigeon' cannot be attached to"):
        plugin.attach(
            {"backend": "arctic_rl_c", "transport": {"transport": "pigeon"}}, plugin.backend.Reach()
        )


class FailingTransport:
    """A server that cannot be ended."""

    name = "failing"
    accepts_token_ids = accepts_routing_key = accepts_strict = True
    server_limits = True

    async def shutdown(self) -> None:
        raise PeerLostError("nobody there")


def test_destroy_never_masks_the_error_that_ended_a_training(
    plugin: Plugin, caplog: pytest.LogCaptureFixture
) -> None:
    config, _ = plugin.compat.plain_config(main_config())
    backend = plugin.backend.ArcticBackend(config, FailingTransport(), owner=True)
    with pytest.raises(ZeroDivisionError):
        try:
            raise ZeroDivisionError
        finally:
            asyncio.run(backend.destroy())
    assert "ending the Arctic server failed" in caplog.text


def test_only_what_has_no_effect_is_warned_about(plugin: Plugin) -> None:
    user = main_config()
    user["actor_rollout_ref"]["actor"].update(clip_ratio=0.3, shuffle=True)
    config, _ = plugin.compat.plain_config(dict(user))
    warn = plugin.backend.effective_warnings
    embedded = warn(config, plugin.transport)
    public = warn(config, FailingTransport())
    assert any("actor.shuffle" in text for text in embedded)
    assert not any("clip_ratio" in text for text in embedded)
    assert any("clip_ratio" in text for text in public)


def test_a_start_says_what_it_does_and_what_it_does_not(
    plugin: Plugin,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(plugin.backend, "_start_ray", lambda config, reach: plugin.transport)
    user = main_config(train={"zorro_train": {"enable": True}})
    user["actor_rollout_ref"]["actor"].update(clip_ratio=0.3, shuffle=True)
    user["actor_rollout_ref"]["model"]["lora_rank"] = 8
    made = plugin.backend.ArcticBackend.from_config(user)
    assert made.owner
    assert capsys.readouterr().out.endswith("; transport local; ZoRRO on\n")
    assert [text.partition("=")[0].rpartition(".")[2] for text in caplog.messages] == [
        "shuffle",
        "lora_rank",
        "enable",
    ]
    assert "each row by itself" in caplog.messages[-1]
    plugin.backend.ArcticBackend.from_config(main_config())
    assert capsys.readouterr().out.endswith("; transport local\n")


def test_the_pad_id_is_that_of_the_agent_loops(
    plugin: Plugin, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[str] = []

    def load(path: str, **_: Any) -> SimpleNamespace:
        loaded.append(path)
        return SimpleNamespace(pad_token_id=0, eos_token_id=2)

    monkeypatch.setattr(plugin.worker, "hf_tokenizer", load)
    config = main_config()
    assert plugin.make_worker(config).pad_token_id == 0
    config["of_worker"]["model"]["tokenizer_path"] = "beside"
    plugin.make_worker(config)
    assert loaded == ["random:micro", "beside"]


def test_another_checkpoint_engine_is_refused_where_verl_would_use_it(
    plugin: Plugin, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(plugin.backend, "_start_ray", lambda config, reach: plugin.transport)
    user = main_config()
    user["actor_rollout_ref"]["rollout"]["checkpoint_engine"] = {"backend": "nccl"}
    if plugin.package.registration.form == "v1":
        plugin.backend.ArcticBackend.from_config(user)
        assert "checkpoint_engine.backend='nccl': no effect" in caplog.text
    else:
        with pytest.raises(ConfigError, match=r"checkpoint_engine.backend is 'nccl': .* naive"):
            plugin.backend.ArcticBackend.from_config(user)


def test_workers_that_verl_would_take_in_place_of_these_are_refused(
    plugin: Plugin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugin.backend, "_start_ray", lambda config, reach: plugin.transport)
    start = plugin.backend.ArcticBackend.from_config
    for value in ("auto", "enable"):
        user = main_config()
        user["trainer"]["use_legacy_worker_impl"] = value
        if plugin.package.registration.form == "v1":
            start(user)
        else:
            with pytest.raises(ConfigError, match=f"use_legacy_worker_impl is '{value}': .*disab"):
                start(user)
    user["trainer"]["use_legacy_worker_impl"] = "disable"
    start(user)


@pytest.mark.parametrize(
    "lora", [{"lora_rank": 8}, {"lora": {"rank": 8}}, {"lora_adapter_path": "there"}]
)
def test_lora_with_a_reference_is_refused(
    plugin: Plugin, monkeypatch: pytest.MonkeyPatch, lora: dict[str, Any]
) -> None:
    monkeypatch.setattr(plugin.backend, "_start_ray", lambda config, reach: plugin.transport)
    user = main_config()
    user["actor_rollout_ref"]["model"].update(lora)
    plugin.backend.ArcticBackend.from_config(user)  # a warning: all weights are trained
    user["actor_rollout_ref"]["actor"]["use_kl_loss"] = True
    with pytest.raises(ConfigError, match=r"asks for LoRA, .*compare the actor with itself"):
        plugin.backend.ArcticBackend.from_config(user)


@pytest.mark.parametrize("warm", [False, True])
def test_log_probs_at_the_temperature_of_the_update(
    plugin: Plugin,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    warm: bool,
) -> None:
    recorder = clients.Transport()
    recorder.accepts_token_ids, recorder.server_limits = True, False  # type: ignore[attr-defined]
    monkeypatch.setattr(plugin.backend, "_start_ray", lambda config, reach: recorder)
    monkeypatch.setattr(plugin.backend, "attach", lambda handle, reach: recorder)
    user = main_config(**({"temperature_in_log_prob": True} if warm else {}))
    user["actor_rollout_ref"]["rollout"]["temperature"] = 0.5
    made = plugin.backend.ArcticBackend.from_config(user)
    assert ("rollout.temperature=0.5" in caplog.text) is not warm
    attached = plugin.backend.ArcticBackend.from_config(user, handle=plugin.handle)
    data = batch([[5, 6], [7], [8], [9, 10]], "plugin")
    data["temperature"] = NonTensorData(0.5, batch_size=[4])
    for one in (made, attached, pickle.loads(pickle.dumps(made))):
        asyncio.run(one.compute_log_prob(data, ref=False, calculate_entropy=False, pad_token_id=0))
    posts = [call[1]["processing"]["post"] for call in recorder.calls]
    assert [("apply_temperature" in post) for post in posts] == [warm] * 3
    user["remote_backend"]["temperature_in_log_prob"] = "yes"
    with pytest.raises(ConfigError, match="temperature_in_log_prob is 'yes': it is true"):
        plugin.backend.ArcticBackend.from_config(user)


def test_how_long_an_op_may_take(plugin: Plugin, monkeypatch: pytest.MonkeyPatch) -> None:
    """The keys reach the transport of the owner, and of everybody that attaches."""
    given: list[dict[str, Any]] = []

    def transport(*_: Any, **options: Any) -> Any:
        given.append({key: options[key] for key in ("timeout", "timeouts")})
        made = clients.Transport()
        made.accepts_token_ids, made.server_limits = True, False  # type: ignore[attr-defined]
        return made

    monkeypatch.setattr("arctic_rl_c.transports.ray.RayTransport", transport)
    transport.from_handle = transport  # type: ignore[attr-defined]
    monkeypatch.setattr(plugin.backend, "attach", plugin.attach)
    comms = {"protocol": "ray", "timeout": 60, "timeouts": {"fwd_bwd": 7200}}
    made = plugin.backend.ArcticBackend.from_config(main_config(comms=comms))
    handle = {"backend": "arctic_rl_c", "transport": {"transport": "ray"}}
    monkeypatch.setattr(type(made), "reconnect_handle", lambda self: handle)
    plugin.backend.ArcticBackend.from_config(main_config(comms=comms), handle=handle)
    pickle.loads(pickle.dumps(made))
    assert given == [{"timeout": 60.0, "timeouts": {"fwd_bwd": 7200.0}}] * 3
    with pytest.raises(
        ConfigError, match=r"remote_backend\.comms\.timeout is '1h': it is a number"
    ):
        plugin.backend.ArcticBackend.from_config(main_config(comms={"timeout": "1h"}))
    with pytest.raises(ConfigError, match="timeouts names 'update_actor': it is one of fwd_no_"):
        flat = {"timeouts": {"update_actor": 1}}
        plugin.backend.ArcticBackend.from_config(main_config(**flat))


def test_a_url_belongs_to_http(plugin: Plugin) -> None:
    config = main_config(comms={"protocol": "ray", "url": "http://x:1"})
    with pytest.raises(ConfigError, match="set it to http"):
        plugin.backend.ArcticBackend.from_config(dict(config))
