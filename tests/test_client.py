# SPDX-License-Identifier: Apache-2.0
"""The client: what it sends for what it is asked, what it refuses, how it begins and ends."""

from __future__ import annotations

import asyncio
import copy
import gc
import math
import pickle
import subprocess
import sys
import warnings
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import arctic_rl_c
import clients
from arctic_rl_c import ArcticRLClient, ClosedError, ConfigError, PayloadError
from clients import Transport

BOTH = pytest.mark.parametrize("version", ["seed", "final"])
OPTIONS: dict[str, Any] = {"pad_token_id": clients.PAD}


def client_of(
    transport: Any = None, version: str = "final", *, options: Any = None, **paths: Any
) -> ArcticRLClient:
    transport = Transport() if transport is None else transport
    return ArcticRLClient(transport, clients.config(version, **paths), **(options or {}))


def ids_transport(**flags: Any) -> Transport:
    transport = Transport()
    transport.accepts_token_ids = True
    for name, value in flags.items():
        setattr(transport, name, value)
    return transport


def sent(client: ArcticRLClient, operation: Any) -> dict[str, Any]:
    """The keywords of the one call that `operation` makes."""
    client.transport.calls.clear()
    clients.drive(operation)
    ((_, _, keywords),) = client.transport.calls
    return keywords


# ---- construction -------------------------------------------------------------------------------


def test_it_holds_transport_config_and_tokenizer() -> None:
    transport, tokenizer = Transport(), clients.Tokenizer()
    config = clients.config()
    client = ArcticRLClient(transport, config, tokenizer=tokenizer)
    assert client.transport is transport
    assert client.tokenizer is tokenizer
    assert client.config == arctic_rl_c.normalize_config(config)
    assert (client.closed, client.owner) == (False, True)
    assert repr(client) == f"<arctic_rl_c.ArcticRLClient of {transport!r}, nested generation, open>"
    assert "flat generation" in repr(client_of(version="seed"))
    for name in ("transport", "config", "closed"):
        with pytest.raises(AttributeError):
            setattr(client, name, None)


def test_it_takes_omegaconf_containers() -> None:
    from omegaconf import OmegaConf

    config = clients.config()
    client = ArcticRLClient(Transport(), OmegaConf.create(config))
    assert client.config == arctic_rl_c.normalize_config(config)


def test_the_config_is_read_once() -> None:
    config = clients.config()
    client = ArcticRLClient(Transport(), config)
    config["remote_backend"]["weight_sync"]["cuda_ipc"] = "nonsense"
    del config["data"]
    clients.drive(client.update_actor(clients.batch(), actor_config={}, **OPTIONS))


@pytest.mark.parametrize("missing", ["accepts_token_ids", "accepts_routing_key", "accepts_strict"])
def test_a_transport_says_what_it_accepts(missing: str) -> None:
    flags = {"accepts_token_ids": True, "accepts_routing_key": True, "accepts_strict": True}
    del flags[missing]
    with pytest.raises(TypeError, match=f"is no transport, it has no attribute '{missing}'"):
        client_of(SimpleNamespace(**flags))


def test_errors_of_the_transports_flags_pass_through() -> None:
    class Broken(Transport):
        @property
        def serves_reference(self) -> bool:  # type: ignore[override]
            raise OSError("cannot tell")

    with pytest.raises(OSError, match="cannot tell"):
        client_of(Broken())


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"prompts_as": "words"}, ValueError, "must be 'auto', 'ids' or 'text', not 'words'"),
        ({"prompts_as": None}, TypeError, "must be str"),
        ({"unknown": 1}, TypeError, "unknown"),
    ],
)
def test_bad_options(options: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        client_of(options=options)


def test_bad_configs() -> None:
    with pytest.raises(ConfigError, match="use_zorro"):
        client_of(remote_backend__use_zorro=True)
    with pytest.raises((ConfigError, TypeError)):
        ArcticRLClient(Transport(), 7)  # type: ignore[arg-type]
    broken = arctic_rl_c.normalize_config(clients.config())
    del broken["remote_backend"]["train"]["zorro_train"]["max_rollouts"]
    broken["remote_backend"]["train"]["load_balancer"] = 7
    with pytest.raises(ConfigError):
        ArcticRLClient(Transport(), broken)


def test_init_runs_once() -> None:
    client = client_of()
    with pytest.raises(RuntimeError, match="was called before"):
        client.__init__(Transport(), clients.config())  # type: ignore[misc]
    clients.drive(client.sync_weights())


def test_it_can_be_subclassed() -> None:
    class Backend(ArcticRLClient):
        """As the verl backend is: its own arguments, its own attributes, its own methods."""

        def __init__(self, main_config: dict[str, Any]) -> None:
            super().__init__(Transport(), main_config)
            self.seen = 0

        async def update_weights(self) -> Any:
            self.seen += 1
            return await self.sync_weights()

    backend = Backend(clients.config())
    assert asyncio.run(backend.update_weights()) == {"status": "ok"}
    assert backend.seen == 1
    assert "Backend of" in repr(backend)
    gone = weakref.ref(backend)
    backend.itself = backend  # type: ignore[attr-defined]
    backend.op = backend.sync_weights()  # type: ignore[attr-defined]
    del backend
    gc.collect()
    assert gone() is None


def test_a_subclass_that_forgets_to_initialise() -> None:
    class Forgets(ArcticRLClient):
        def __init__(self) -> None:
            pass

    client = Forgets()
    assert (client.transport, client.config) == (None, None)
    assert repr(client).endswith("Forgets, not initialised>")
    for call in (
        lambda: client.compute_log_prob({}, pad_token_id=0),
        lambda: client.update_actor({}, actor_config={}, pad_token_id=0),
        lambda: client.generate([1]),
        client.sync_weights,
        client.save_checkpoint,
        client.sleep_inference,
        client.reset_prefix_cache,
        client.reconnect_handle,
        lambda: client.log_probs_to_nested({}, None),
    ):
        with pytest.raises(RuntimeError, match="__init__ has not been called"):
            call()
    assert clients.drive(client.destroy()) is None


def test_a_failed_init_leaves_nothing() -> None:
    client = ArcticRLClient.__new__(ArcticRLClient)
    with pytest.raises(TypeError):
        client.__init__(object(), clients.config())  # type: ignore[misc]
    assert client.config is None
    client.__init__(Transport(), clients.config())  # type: ignore[misc]
    clients.drive(client.sync_weights())


# ---- log-probs and updates ----------------------------------------------------------------------


def test_defaults_come_from_the_config() -> None:
    client = client_of()
    clients.drive(client.compute_log_prob(clients.batch(), **OPTIONS))
    (_, payload, keywords), *_ = client.transport.calls
    assert keywords == {"reference_model": False}
    assert payload["meta"]["rollout_n"] == 2
    assert payload["meta"]["calculate_entropy"] is False


def test_entropy_only_when_asked_for_and_answered() -> None:
    class NoEntropy(Transport):
        async def fwd_no_grad(self, payload: Any, reference_model: bool = False) -> Any:
            answer = await super().fwd_no_grad(payload, reference_model)
            del answer["batch"]["entropy"]
            return answer

    for transport, asked, there in (
        (Transport(), True, True),
        (Transport(), False, False),
        (NoEntropy(), True, False),
    ):
        client = client_of(transport)
        op = client.compute_log_prob(clients.batch(), calculate_entropy=asked, **OPTIONS)
        output = clients.drive(op)["model_output"]
        assert list(output) == (["log_probs", "entropy"] if there else ["log_probs"])


@BOTH
def test_temperature_in_log_prob(version: str) -> None:
    data = clients.batch()
    for asked, post in (
        (False, ["compute_entropy_and_logprobs"]),
        (True, ["apply_temperature", "compute_entropy_and_logprobs"]),
    ):
        client = client_of(version=version, options={"temperature_in_log_prob": asked})
        clients.drive(client.compute_log_prob(data, **OPTIONS))
        processing = client.transport.calls[0][1]["processing"]
        assert processing == {"post": post, "loss_fn": None}
        built = clients.log_prob_payload(data, client.config, temperature_in_log_prob=asked)
        assert built["processing"] == processing


@BOTH
@pytest.mark.parametrize("method", ["compute_log_prob", "update_actor"])
def test_the_temperature_argument(version: str, method: str) -> None:
    """The batch's own entry counts; the argument fills in, and must not contradict."""
    client = client_of(version=version)
    options = {**OPTIONS, **({"actor_config": {}} if method == "update_actor" else {})}
    call = getattr(client, method)

    def meta(operation: Any) -> Any:
        client.transport.calls.clear()
        clients.drive(operation)
        return client.transport.calls[0][1]["meta"]["temperature"]

    for given in (None, 0.7, np.float64(0.7), torch.tensor(0.7, dtype=torch.float64)):
        clients.same(meta(call(clients.batch(), temperature=given, **options)), 0.7)
    without = clients.batch(temperature=...)
    clients.same(meta(call(without, temperature=1, **options)), 1)
    clients.same(meta(call(without, temperature=np.float32(0.5), **options)), 0.5)
    with pytest.raises(PayloadError, match=r"argument is 1, the batch was sampled with 0\.7"):
        call(clients.batch(), temperature=1.0, **options)
    with pytest.raises(PayloadError, match="data has no 'temperature'"):
        call(without, **options)
    with pytest.raises(PayloadError, match="temperature: is 0"):
        call(without, temperature=0, **options)


@BOTH
def test_reference_calls_need_a_reference_engine(version: str) -> None:
    transport = Transport()
    del Transport.serves_reference
    try:
        without = client_of(transport, version, remote_backend__log_prob_gpus=0)
        with_one = client_of(Transport(), version)
    finally:
        Transport.serves_reference = True
    with pytest.raises(ConfigError, match=r"remote_backend\.log_prob_gpus to 1 or more"):
        without.compute_log_prob(clients.batch(), ref=True, **OPTIONS)
    clients.drive(without.compute_log_prob(clients.batch(), **OPTIONS))
    clients.drive(with_one.compute_log_prob(clients.batch(), ref=True, **OPTIONS))
    kept = Transport()  # says that it serves the reference by itself
    client = client_of(kept, version, remote_backend__log_prob_gpus=0)
    clients.drive(client.compute_log_prob(clients.batch(), ref=True, **OPTIONS))
    assert kept.calls[0][2] == {"reference_model": True}


def test_errors_come_from_the_call_not_from_the_await() -> None:
    transport = Transport()
    client = client_of(transport)
    with pytest.raises(PayloadError, match=r"^compute_log_prob: data has no 'input_ids'"):
        client.compute_log_prob({}, **OPTIONS)
    with pytest.raises(PayloadError, match=r"^update_actor: data has no 'input_ids'"):
        client.update_actor({}, actor_config={}, **OPTIONS)
    assert transport.calls == []


def test_limits_are_the_transports_or_the_callers() -> None:
    """6 rows cannot be shared by 4 ranks, which the settings themselves could."""
    data = clients.batch([(2, 2)] * 6)
    honest = Transport()
    honest.server_limits = False  # type: ignore[attr-defined]
    for transport, given, refuses in (
        (Transport(), None, True),
        (honest, None, False),
        (Transport(), False, False),
        (honest, True, True),
    ):
        client = client_of(
            transport,
            options={"server_limits": given},
            remote_backend__training_gpus=4,
            remote_backend__train__load_balancer=False,
        )
        if refuses:
            with pytest.raises(PayloadError, match="6 rows cannot be shared evenly by the 4 ranks"):
                client.compute_log_prob(data, **OPTIONS)
        else:
            clients.drive(client.compute_log_prob(data, **OPTIONS))


def test_each_warning_once_a_client() -> None:
    data = clients.batch(rollout_is_weights=torch.ones(8, 3))
    for _ in range(2):
        client = client_of()
        with pytest.warns(UserWarning, match="rollout_is_weights") as seen:
            for _ in range(3):
                client.update_actor(data, actor_config={}, **OPTIONS)
        assert len(seen) == 1
        with pytest.warns(UserWarning, match="clip_ratio has no effect"):
            client.update_actor(data, actor_config={"clip_ratio": 0.1}, **OPTIONS)


def test_a_warning_that_is_an_error_is_said_again() -> None:
    client = client_of()
    data = clients.batch(rollout_is_weights=torch.ones(8, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            with pytest.raises(UserWarning):
                client.update_actor(data, actor_config={}, **OPTIONS)


def test_warnings_point_at_the_caller() -> None:
    data = clients.batch(rollout_is_weights=torch.ones(8, 3))
    with pytest.warns(UserWarning) as seen:
        client_of().update_actor(data, actor_config={}, **OPTIONS)
    assert seen[0].filename == __file__


class Metrics(Transport):
    """Answers with given metrics, one (fwd_bwd, step) pair a step."""

    def __init__(self, *pairs: tuple[dict[str, Any], dict[str, Any]]) -> None:
        super().__init__()
        self.pairs = pairs

    async def fwd_bwd(self, payload: Any) -> dict[str, Any]:
        i = await self.called("fwd_bwd", payload)
        return {"metrics": self.pairs[i - 1][0], "avg_loss": 9.0}

    async def step(self) -> dict[str, Any]:
        i = await self.called("step")
        return {"metrics": self.pairs[i - 1][1], "batch": {}}


def reduced(version: str, *pairs: tuple[dict[str, Any], dict[str, Any]]) -> Any:
    client = client_of(Metrics(*pairs), version)
    return clients.drive(client.update_actor(clients.batch(), actor_config={}, **OPTIONS))


def test_flat_metrics_stay_as_they_are() -> None:
    result = reduced(
        "seed",
        ({"loss": [0.5, 1.5], "kl": [1, 2], "note": "x"}, {"last_lr": [1e-6] * 2, "kl": 9}),
    )
    assert result["loss"] == [0.5, 1.5]
    assert result["metrics"] == {"kl": [1, 2], "note": "x", "lr": [1e-6, 1e-6]}
    assert result["global_token_num"] == [5, 3, 6, 4, 2, 3, 6, 5]


def test_nested_metrics_are_means_over_the_steps() -> None:
    result = reduced(
        "final",
        (
            {"loss": 1.0, "kl": torch.tensor(0.5), "mtp_losses_0": [[3.0], 99.0], "only": 2},
            {"last_lr": [1e-6, 2e-6], "grad_norm": [1.0, 3.0], "kl": 7.0, "flag": True},
        ),
        (
            {"loss": 2.0, "kl": np.float32(1.5), "mtp_losses_0": [5.0, 98.0], "text": "first"},
            {"last_lr": 3e-6, "grad_norm": [[5.0], (7.0,)], "flag": False, "none": None},
        ),
    )
    assert result["loss"] == 1.5
    wanted = {
        "kl": 1.0,
        "mtp_losses_0": 4.0,
        "only": 2.0,
        "grad_norm": 4.0,
        "flag": 0.5,
        "text": "first",
        "none": None,
        "lr": 3e-6,
    }
    assert result["metrics"] == wanted
    assert all(type(result["metrics"][key]) is type(value) for key, value in wanted.items()), (
        result["metrics"]
    )


def test_nested_metrics_that_are_no_numbers_are_the_last() -> None:
    result = reduced(
        "final",
        ({"loss": 1.0, "who": "a", "mixed": 1.0}, {}),
        ({"loss": float("nan"), "who": "b", "mixed": ["x"]}, {}),
    )
    assert result["loss"] != result["loss"], "NaN is passed on"
    assert result["metrics"] == {"who": "b", "mixed": ["x"]}
    result = reduced("final", ({"loss": 1.0, "tokens": 10**400}, {}), ({"loss": 10**400}, {}))
    assert result["loss"] == result["metrics"]["tokens"] == 10**400, "no float can hold it"


def test_a_failure_after_the_last_step_says_so() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(RecursionError) as caught:
        reduced("final", ({"loss": endless}, {}), ({"loss": 1.0}, {}))
    [note] = caught.value.__notes__
    assert note.endswith("failed in making one of the metrics, after all 2 optimizer steps")


def test_metrics_of_arrays_are_means_of_all_elements() -> None:
    pairs = [({"loss": torch.tensor([i, i + 1.0])}, {"a": np.arange(4) + i}) for i in (0, 1)]
    result = reduced("final", *pairs)
    assert result["loss"] == 1.0
    assert result["metrics"] == {"a": 2.0}


def test_empty_lists_of_metrics() -> None:
    pairs = [({"loss": 1.0, "empty": []}, {})] * 2
    assert reduced("final", *pairs)["metrics"] == {"empty": []}


def test_the_transports_metrics_are_not_written_to() -> None:
    forward, step = {"loss": 1.0}, {"last_lr": 1e-6}
    kept = copy.deepcopy((forward, step))
    for version in ("seed", "final"):
        reduced(version, (forward, step), (forward, step))
    assert (forward, step) == kept


def test_a_server_may_write_into_what_it_gets() -> None:
    """Whatever it does to one payload, the next epoch's is what it was."""

    class Scribbles(Transport):
        async def fwd_bwd(self, payload: Any) -> dict[str, Any]:
            self.seen.append(
                copy.deepcopy({"meta": payload["meta"], "keys": list(payload["batch"])})
            )
            self.seen[-1]["processing"] = copy.deepcopy(payload["processing"])
            answer = await super().fwd_bwd(payload)
            payload["meta"]["dp_size"] = 8
            payload["meta"]["actor_config"]["nested"]["scribble"] = 1
            payload["meta"]["policy_loss_config"].clear()
            payload["batch"]["position_ids"] = None
            payload["processing"]["post"].append("more")
            payload.clear()
            return answer

        seen: list[Any]

    transport = Scribbles()
    transport.seen = []
    client = client_of(transport, actor_rollout_ref__actor__ppo_epochs=3)
    actor = {"nested": {"x": 1}, "policy_loss": {"loss_mode": "vanilla"}}
    clients.drive(client.update_actor(clients.batch(), actor_config=actor, **OPTIONS))
    assert len(transport.seen) == 6
    for index, seen in enumerate(transport.seen):
        assert seen == transport.seen[index % 2]
    assert actor == {"nested": {"x": 1}, "policy_loss": {"loss_mode": "vanilla"}}


def test_progress_counts_steps() -> None:
    seen = []

    async def before(method: str, count: int) -> None:
        seen.append((method, op.progress))

    client = client_of(Transport(before), actor_rollout_ref__actor__ppo_epochs=2)
    op = client.update_actor(clients.batch(), actor_config={}, **OPTIONS)
    clients.drive(op)
    assert seen == [(m, (i, 4)) for i in range(4) for m in ("fwd_bwd", "step")]
    assert op.progress == (4, 4)
    assert client.sync_weights().progress == (0, 0)


# ---- generate -----------------------------------------------------------------------------------

DEFAULTS = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "max_tokens": 1024}


@pytest.mark.parametrize(
    ("prompts", "wanted"),
    [
        ([5, 6, 7], [[5, 6, 7]]),
        ((5, 6, 7), [[5, 6, 7]]),
        ([[5, 6], [7]], [[5, 6], [7]]),
        (([5, 6], (7,)), [[5, 6], [7]]),
        ("a b", ["a b"]),
        (["a b", "c"], ["a b", "c"]),
        (["a b", [5]], ["a b", [5]]),
        (np.array([5, 6]), [[5, 6]]),
        (np.array([5, 6], np.int32), [[5, 6]]),
        (torch.tensor([5, 6]), [[5, 6]]),
        ([torch.tensor([5, 6]), [7]], [[5, 6], [7]]),
        ([np.array([5, 6]), np.array([7])], [[5, 6], [7]]),
        ([np.int64(5), np.int32(6)], [[5, 6]]),
    ],
    ids=repr,
)
def test_forms_of_prompts(prompts: Any, wanted: list[Any]) -> None:
    client = client_of(ids_transport())
    keywords = sent(client, client.generate(prompts))
    assert keywords == {"prompts": wanted, "sampling_params": DEFAULTS}
    clients.same(keywords["prompts"], wanted)


def test_ids_are_untouched() -> None:
    """Special ids, pads, repeats, the largest: what comes in goes out, in a list of its own."""
    ids = [0, 1, clients.PAD, clients.PAD, 2, 2**40, 0]
    client = client_of(ids_transport())
    op = client.generate(ids)
    ids[0] = 99
    prompts = sent(client, op)["prompts"]
    assert prompts == [[0, 1, clients.PAD, clients.PAD, 2, 2**40, 0]]


@pytest.mark.parametrize(
    ("prompts", "says"),
    [
        ([], "there is no prompt: prompt_ids is an empty list"),
        ((), "there is no prompt: prompt_ids is an empty tuple"),
        ([[5], []], "prompt 1 is empty"),
        (np.zeros(0, np.int64), "prompt 0 is empty"),
        ([5, -1], r"prompt 0 holds, at place 1, what is no token id \(a int\)"),
        ([5, 2**64], "at place 1"),
        ([[5], [6, 1.5]], r"prompt 1 holds, at place 1, what is no token id \(a float\)"),
        ([5, True], r"\(a bool\)"),
        ([5, None], r"\(a NoneType\)"),
        ([5, "x"], r"\(a str\)"),
        ([[[5]]], r"prompt 0 holds, at place 0, .*\(a list\)"),
        (7, "prompt_ids: expected a torch tensor"),
        (None, "prompt_ids: expected a torch tensor"),
        (np.zeros((2, 2), np.int64), r"prompt_ids: is int64\[2, 2\]"),
        (np.zeros(2), r"prompt_ids: is float64\[2\]"),
        (list(range(11)), "prompt 0 has 11 tokens, which leaves no room .* 11"),
        ([[1], list(range(12))], "prompt 1 has 12 tokens"),
    ],
    ids=repr,
)
def test_bad_prompts(prompts: Any, says: str) -> None:
    with pytest.raises(PayloadError, match=says):
        client_of(ids_transport()).generate(prompts)


def test_the_context_is_the_samplers() -> None:
    client = client_of(ids_transport(), actor_rollout_ref__rollout__max_model_len=5)
    client.generate([1, 2, 3, 4])
    with pytest.raises(PayloadError, match=r"prompt 0 has 5 tokens, .* 5 "):
        client.generate([1, 2, 3, 4, 5])


def test_text_only_servers() -> None:
    tokenizer = clients.Tokenizer()
    client = client_of(options={"tokenizer": tokenizer})
    with pytest.warns(UserWarning, match="takes text only, so that token ids are decoded") as seen:
        keywords = sent(client, client.generate([[5, 6], "a", [7]]))
        client.generate([8])
    assert len(seen) == 1
    assert keywords["prompts"] == ["5 6", "a", "7"]
    with pytest.raises(ConfigError, match="needs a tokenizer"):
        client_of().generate([5])
    assert sent(client, client.generate("as it is"))["prompts"] == ["as it is"]


def test_prompts_as() -> None:
    tokenizer = clients.Tokenizer()
    client = client_of(ids_transport(), options={"prompts_as": "text", "tokenizer": tokenizer})
    assert sent(client, client.generate([5, 6]))["prompts"] == ["5 6"]
    client = client_of(ids_transport(), options={"prompts_as": "ids"})
    assert sent(client, client.generate([5, 6]))["prompts"] == [[5, 6]]
    with pytest.raises(PayloadError, match="prompt 1 is text, but prompts_as is 'ids'"):
        client.generate([[5], "a"])
    client = client_of(options={"prompts_as": "ids", "tokenizer": tokenizer})
    with pytest.raises(ConfigError, match="prompts_as is 'ids', but the server takes text only"):
        client.generate([5, 6])


def test_a_tokenizer_that_fails() -> None:
    class Fails:
        def decode(self, ids: list[int]) -> Any:
            if ids == [5]:
                raise OverflowError("no such token")
            return b"bytes"

    client = client_of(options={"prompts_as": "text", "tokenizer": Fails()})
    with pytest.raises(OverflowError, match="no such token"):
        client.generate([5])
    with pytest.raises(TypeError, match=r"decode\(\) returned a bytes, not text"):
        client.generate([6])


def test_sampling_parameters() -> None:
    client = client_of(ids_transport())
    given = {"temperature": 1.0, "max_tokens": 8, "stop": ["x"]}
    kept = copy.deepcopy(given)
    found = sent(client, client.generate([5], given))["sampling_params"]
    assert list(found) == ["temperature", "top_p", "top_k", "max_tokens", "stop"]
    assert found == DEFAULTS | given
    assert given == kept
    assert sent(client, client.generate([5], None))["sampling_params"] == DEFAULTS
    first = sent(client, client.generate([5]))["sampling_params"]
    first["temperature"] = 99
    assert sent(client, client.generate([5]))["sampling_params"] == DEFAULTS


def test_sampling_parameters_of_omegaconf() -> None:
    from omegaconf import OmegaConf

    client = client_of(ids_transport())
    given = OmegaConf.create({"top_p": 0.5})
    assert sent(client, client.generate([5], given))["sampling_params"]["top_p"] == 0.5


@pytest.mark.parametrize("bad", [7, "text", ["a"], [("a", 1)]])
def test_bad_sampling_parameters(bad: Any) -> None:
    with pytest.raises(TypeError, match="'sampling_params' must be a mapping"):
        client_of(ids_transport()).generate([5], bad)


@pytest.mark.parametrize("budget", [0, -3])
def test_a_budget_below_one_never_reaches_the_server(budget: int) -> None:
    with pytest.raises(PayloadError, match="max_tokens leaves no room for an answer"):
        client_of(ids_transport()).generate([5], {"max_tokens": budget})


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({"n": 0}, r"\['n'\] is 0 \(a int\); a whole number from 1 on is needed"),
        ({"n": 1.5}, r"\['n'\] is 1.5 "),
        ({"n": -(10**400)}, r"\['n'\] is -1000"),
        ({"temperature": math.nan}, r"\['temperature'\] is nan .* a number from 0 on"),
        ({"temperature": np.float32("nan")}, r"\['temperature'\] is "),
        ({"temperature": -0.1}, r"\['temperature'\] is -0.1 "),
        ({"temperature": "1"}, r"\['temperature'\] is '1' \(a str\)"),
        ({"temperature": [1]}, r"\['temperature'\] is \[1\] \(a list\)"),
        ({"top_p": 0}, r"\['top_p'\] is 0 .* above 0 and at most 1"),
        ({"top_p": 1.01}, r"\['top_p'\]"),
        ({"top_k": -2}, r"\['top_k'\] is -2 .* -1 or 0 for none"),
        ({"top_k": 2.5}, r"\['top_k'\]"),
        ({"min_p": 2}, r"\['min_p'\]"),
        ({"repetition_penalty": 0.0}, r"\['repetition_penalty'\] is 0.0 .* above 0"),
        ({"presence_penalty": 3}, r"\['presence_penalty'\]"),
        ({"max_tokens": "8"}, r"\['max_tokens'\] is '8'"),
        ({"max_tokens": 0.5}, r"\['max_tokens'\] is 0.5"),
        ({"min_tokens": -1}, r"\['min_tokens'\]"),
        ({"logprobs": -2}, r"\['logprobs'\]"),
        ({"seed": "x"}, r"\['seed'\] is 'x'"),
        ({3: 1}, r"a key of sampling_params is 3 \(a int\); text is needed"),
        ({None: 1}, r"a key of sampling_params is None"),
    ],
)
def test_sampling_parameters_that_no_server_takes(params: Any, text: str) -> None:
    client = client_of(ids_transport())
    with pytest.raises(PayloadError, match=f"^generate: .*{text}") as caught:
        client.generate([5], params)
    assert caught.value.operation == "generate" and client.transport.calls == []


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0, "top_p": 1, "top_k": -1, "n": 1, "logprobs": 0},
        {"temperature": math.inf, "top_p": 1e-3, "top_k": 0, "max_tokens": 4.0},
        {"temperature": None, "max_tokens": None, "seed": None, "logprobs": None},
        {"logprobs": True, "prompt_logprobs": -1, "seed": -1, "repetition_penalty": 2.5},
        {"temperature": np.float32(0.5), "n": np.int64(2), "max_tokens": 10**30},
        {"of_another_engine": object(), "stop": ["x"], "ignore_eos": True, "best_of": 0},
    ],
)
def test_sampling_parameters_that_some_server_takes(params: dict[str, Any]) -> None:
    client = client_of(ids_transport())
    assert sent(client, client.generate([5], params))["sampling_params"] == DEFAULTS | params


def test_a_tag_that_leaves_its_list_while_it_is_shown() -> None:
    class Tag:
        def __repr__(self) -> str:
            tags.clear()
            return "the tag"

    tags: list[Any] = [Tag()]
    with pytest.raises(PayloadError, match=r"tags\[0\] is the tag \(a .*Tag\)"):
        client_of(ids_transport()).wake_up_inference(tags)


@BOTH
@pytest.mark.parametrize("accepts", [False, True])
def test_routing_keys(version: str, accepts: bool) -> None:
    client = client_of(ids_transport(accepts_routing_key=accepts), version)
    absent = {"routing_key": None} if version == "seed" and accepts else {}
    base = {"prompts": [[5]], "sampling_params": DEFAULTS}
    assert sent(client, client.generate([5])) == base | absent
    assert sent(client, client.generate([5], None, None)) == base | absent
    for key in ("group", ["group"], 7, b"key"):
        if accepts:
            assert sent(client, client.generate([5], routing_key=key))["routing_key"] is key  # type: ignore[arg-type]
    if not accepts:
        with pytest.warns(UserWarning, match="takes no routing_key; it is left out") as seen:
            assert sent(client, client.generate([5], None, "group")) == base
            client.generate([5], None, "group")
        assert len(seen) == 1


def test_a_key_for_each_prompt() -> None:
    client = client_of(ids_transport())
    keys = ["a", None]
    assert sent(client, client.generate([[5], [6]], routing_key=keys))["routing_key"] is keys
    with pytest.raises(PayloadError, match="2 routing keys for 1 prompts"):
        client.generate([5], routing_key=keys)


@BOTH
def test_strict(version: str) -> None:
    client = client_of(ids_transport(), version)
    assert "strict" not in sent(client, client.generate([5]))
    assert "strict" not in sent(client, client.generate([5], strict=None))
    for value in (True, False):
        assert sent(client, client.generate([5], strict=value))["strict"] is value
    client = client_of(ids_transport(accepts_strict=False), version)
    assert "strict" not in sent(client, client.generate([5], strict=False))
    with pytest.warns(UserWarning, match="takes no strict"):
        assert "strict" not in sent(client, client.generate([5], strict=True))


def test_results_come_back_untouched() -> None:
    items = [{"token_ids": [1], "logprobs": [None, {1: {"logprob": -0.5}}], "weights": (3, 4)}]

    class Answers(Transport):
        accepts_token_ids = True

        async def generate(self, **keywords: Any) -> Any:
            return items

    assert clients.drive(client_of(Answers()).generate([5])) is items


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (None, "the transport's answer is a NoneType, a list with a dict for each prompt"),
        ({"results": []}, "the transport's answer is a dict, a list with a dict for each prompt"),
        ([{}], "the transport gave 1 answers to 2 prompts"),
        ([{}, {}, {}], "the transport gave 3 answers to 2 prompts"),
        ([{}, None], "the transport's answer to prompt 1 is a NoneType, a dict is needed"),
        (["text", {}], "the transport's answer to prompt 0 is a str, a dict is needed"),
    ],
)
def test_an_answer_is_one_dict_for_each_prompt(answer: Any, message: str) -> None:
    class Answers(Transport):
        accepts_token_ids = True

        async def generate(self, **keywords: Any) -> Any:
            return answer

    with pytest.raises(PayloadError, match=message):
        clients.drive(client_of(Answers()).generate([[5], [6]]))


# ---- weight sync --------------------------------------------------------------------------------

T, F, N = True, False, None


@pytest.mark.parametrize(
    ("stored", "given", "seed", "final"),
    [
        ((F, F), (N, N), {"cuda_ipc": F, "low_memory": F}, {}),
        ((T, F), (N, N), {"cuda_ipc": T, "low_memory": F}, {}),
        ((T, T), (N, N), {"cuda_ipc": T, "low_memory": T}, {}),
        ((T, T), (F, N), {"cuda_ipc": F, "low_memory": F}, {"cuda_ipc": F}),
        ((T, T), (N, F), {"cuda_ipc": T, "low_memory": F}, {"low_memory": F}),
        ((T, F), (N, T), {"cuda_ipc": T, "low_memory": T}, {"low_memory": T}),
        ((F, F), (T, N), {"cuda_ipc": T, "low_memory": F}, {"cuda_ipc": T}),
        (
            (F, F),
            (T, T),
        )
        + ({"cuda_ipc": T, "low_memory": T},) * 2,
        (
            (T, T),
            (F, F),
        )
        + ({"cuda_ipc": F, "low_memory": F},) * 2,
    ],
)
def test_sync_flags_have_three_values(stored: Any, given: Any, seed: Any, final: Any) -> None:
    paths = ({"cuda_ipc_weight_sync": stored[0], "low_memory_weight_sync": stored[1]},)
    flat = clients.config("seed")
    flat["remote_backend"] |= paths[0]
    client = ArcticRLClient(Transport(), flat)
    assert sent(client, client.sync_weights(*given)) == seed
    client = client_of(remote_backend__weight_sync={"cuda_ipc": stored[0], "low_memory": stored[1]})
    assert sent(client, client.sync_weights(*given)) == final
    assert sent(client, client.sync_weights(cuda_ipc=given[0], low_memory=given[1])) == final


def test_sync_flags_that_contradict() -> None:
    client = client_of(remote_backend__weight_sync={"cuda_ipc": False, "low_memory": False})
    with pytest.raises(ConfigError, match=r"low_memory=True .* False in remote_backend"):
        client.sync_weights(low_memory=True)
    client = client_of(remote_backend__weight_sync={"cuda_ipc": True, "low_memory": True})
    with pytest.raises(ConfigError, match="False in this call"):
        client.sync_weights(cuda_ipc=False, low_memory=True)
    for bad in ({"cuda_ipc": 1}, {"low_memory": "yes"}):
        with pytest.raises(TypeError, match="must be True, False or None"):
            client.sync_weights(**bad)  # type: ignore[arg-type]


# ---- the other calls ----------------------------------------------------------------------------


def test_checkpoints_pass_on_what_is_given() -> None:
    client = client_of()
    assert sent(client, client.save_checkpoint()) == {}
    assert sent(client, client.save_checkpoint("p", step=3)) == {"path": "p", "step": 3}
    assert sent(client, client.save_checkpoint(path=None, save_total_limit=2)) == {
        "path": None,
        "save_total_limit": 2,
    }
    assert sent(client, client.load_checkpoint("p", step=None)) == {"path": "p", "step": None}
    assert clients.drive(client.load_checkpoint()) == {"global_step": 3}
    for call in (client.save_checkpoint, client.load_checkpoint):
        with pytest.raises(TypeError, match="at most 1 positional"):
            call("p", 1)  # type: ignore[call-arg]
        with pytest.raises(TypeError, match="multiple values for argument 'path'"):
            call("p", path="q")  # type: ignore[misc]


@pytest.mark.parametrize("name", ["save_checkpoint", "load_checkpoint"])
def test_checkpoint_arguments_of_the_wrong_kind(name: str, tmp_path: Path) -> None:
    client = client_of()
    call = getattr(client, name)
    assert sent(client, call(tmp_path)) == {"path": str(tmp_path)}
    assert sent(client, call(step=np.int64(2), other=object()))["step"] == 2
    for path in (3, b"here", ["here"]):
        wanted = rf"^{name}\(\) argument 'path' must be text, a path object or None, not a"
        with pytest.raises(TypeError, match=wanted):
            call(path)
        with pytest.raises(TypeError, match=wanted):
            call(path=path)
    for options, text in (
        ({"step": -1}, "step is -1 "),
        ({"step": "3"}, r"step is '3' \(a str\); a whole number from 0 on, or None is needed"),
        ({"step": math.nan}, "step is nan"),
        ({"save_total_limit": 1.5}, "save_total_limit is 1.5"),
    ):
        with pytest.raises(PayloadError, match=f"^{name}: {text}") as caught:
            call("p", **options)
        assert caught.value.operation == name


def test_sleep_and_wake() -> None:
    client = client_of()
    assert sent(client, client.sleep_inference()) == {"level": 1}
    assert sent(client, client.sleep_inference(2)) == {"level": 2}
    assert sent(client, client.sleep_inference(level=np.int64(2))) == {"level": 2}
    assert sent(client, client.wake_up_inference()) == {"tags": None}
    assert sent(client, client.wake_up_inference(["weights"])) == {"tags": ["weights"]}
    for bad in ("deep", 1.5, None):
        with pytest.raises(TypeError):
            client.sleep_inference(bad)  # type: ignore[arg-type]
    for bad in ("weights", 7):
        with pytest.raises(TypeError, match="'tags' must be a list of text or None, not a"):
            client.wake_up_inference(bad)  # type: ignore[arg-type]
    assert sent(client, client.wake_up_inference(("kv_cache", "weights"))) == {
        "tags": ("kv_cache", "weights")
    }


def test_levels_and_tags_that_there_are_not() -> None:
    client = client_of()
    for level in (0, 3, 7, -1, 10**30):
        with pytest.raises(PayloadError, match=rf"^sleep_inference: level is {level} .* or 2"):
            client.sleep_inference(level)
    for kind in (True, 1.0, "1", None):
        with pytest.raises(TypeError, match=r"'level' must be 1 or 2, not a"):
            client.sleep_inference(kind)  # type: ignore[arg-type]
    for tags, text in (
        ([], r"tags is \[\] .* at least one of"),
        (["weights", "kv-cache"], r"tags\[1\] is 'kv-cache' .* 'weights' or 'kv_cache'"),
        ([None], r"tags\[0\] is None"),
        ((1,), r"tags\[0\] is 1 \(a int\)"),
    ):
        with pytest.raises(PayloadError, match=f"^wake_up_inference: {text}") as caught:
            client.wake_up_inference(tags)  # type: ignore[arg-type]
        assert caught.value.operation == "wake_up_inference"
    assert client.transport.calls == []


@pytest.mark.parametrize("answer", [False, {"success": False}])
def test_a_cache_that_was_not_reset(answer: Any) -> None:
    class Refuses(Transport):
        async def reset_prefix_cache(self) -> Any:
            return answer

    client = client_of(Refuses())
    with pytest.raises(arctic_rl_c.TransportUnavailableError, match="the server refused"):
        clients.drive(client.reset_prefix_cache())


@pytest.mark.parametrize("answer", [True, None, {}, {"success": True}, {"status": "ok"}])
def test_a_cache_that_was_reset(answer: Any) -> None:
    class Resets(Transport):
        async def reset_prefix_cache(self) -> Any:
            return answer

    assert clients.drive(client_of(Resets()).reset_prefix_cache()) is answer


SIGNATURES = [
    ("compute_log_prob", (), {}, "missing required argument 'data'"),
    ("compute_log_prob", ({},), {}, "missing required argument 'pad_token_id'"),
    ("compute_log_prob", ({}, 1), {}, "at most 1 positional argument"),
    ("compute_log_prob", ({},), {"nonsense": 1}, "unexpected keyword argument 'nonsense'"),
    ("update_actor", ({},), {"pad_token_id": 1}, "missing required argument 'actor_config'"),
    ("generate", (), {}, "missing required argument 'prompt_ids'"),
    ("generate", ([1], None, None, True), {}, "at most 3 positional"),
    ("sync_weights", (True, True, True), {}, "at most 2 positional"),
    ("sleep_inference", (1, 2), {}, "at most 1 positional"),
    ("wake_up_inference", (), {"tag": 1}, "unexpected keyword"),
    ("log_probs_to_nested", ({},), {}, "missing required argument 'dense'"),
]


@pytest.mark.parametrize(("method", "args", "keywords", "says"), SIGNATURES)
def test_arguments_are_checked(method: str, args: Any, keywords: Any, says: str) -> None:
    with pytest.raises(TypeError, match=says):
        getattr(client_of(), method)(*args, **keywords)


# ---- the way back -------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("zorro", [False, True])
def test_log_probs_to_nested(version: str, zorro: bool) -> None:
    path = (
        "remote_backend__zorro_train__enable"
        if version == "seed"
        else ("remote_backend__train__zorro_train__enable")
    )
    client = client_of(version=version, **{path: zorro})
    data = clients.batch()
    dense = torch.arange(56.0).reshape(8, 7)
    wanted = arctic_rl_c.make_jagged(dense, data["attention_mask"], data["input_ids"])
    if zorro:
        wanted = arctic_rl_c.shift_predict_next(wanted)
    found = client.log_probs_to_nested(data, dense)
    clients.same(found, wanted)
    assert found.offsets() is data["input_ids"].offsets()
    for key in ("input_ids", "attention_mask"):
        with pytest.raises(PayloadError, match=f"data has no '{key}'"):
            client.log_probs_to_nested(clients.batch(**{key: ...}), dense)
    with pytest.raises(PayloadError):
        client.log_probs_to_nested(data, dense[:, 1:])


# ---- reconnect and destroy ----------------------------------------------------------------------


def test_the_handle_is_plain_data() -> None:
    client = client_of()
    handle = client.reconnect_handle()
    assert handle == {"address": "here", "transport": "fake"}
    assert pickle.loads(pickle.dumps(handle)) == handle
    assert Transport().reconnect_handle() == {"address": "here"}, "the transport's is not changed"

    class Bad(Transport):
        def reconnect_handle(self) -> Any:
            return ["a list"]

    with pytest.raises(TypeError, match="gave a list, a dict is needed"):
        client_of(Bad()).reconnect_handle()


def calls_after_destroy(client: ArcticRLClient) -> dict[str, Any]:
    return {
        "compute_log_prob": lambda: client.compute_log_prob(clients.batch(), **OPTIONS),
        "update_actor": lambda: client.update_actor(clients.batch(), actor_config={}, **OPTIONS),
        "generate": lambda: client.generate("a"),
        "sync_weights": client.sync_weights,
        "save_checkpoint": client.save_checkpoint,
        "load_checkpoint": client.load_checkpoint,
        "sleep_inference": client.sleep_inference,
        "wake_up_inference": client.wake_up_inference,
        "reset_prefix_cache": client.reset_prefix_cache,
        "reconnect_handle": client.reconnect_handle,
    }


def test_after_destroy_every_operation_is_refused() -> None:
    client = client_of()
    calls = calls_after_destroy(client)
    made_before = [call() for name, call in calls.items() if name != "reconnect_handle"]
    assert clients.drive(client.destroy()) is None
    assert client.closed
    assert "closed" in repr(client)
    assert client.transport.calls == [["shutdown", None, {}]]
    for name, call in calls.items():
        with pytest.raises(ClosedError, match=f"{name}: the client was destroyed") as caught:
            call()
        assert isinstance(caught.value, ValueError)
    for op in made_before:  # and awaited after
        with pytest.raises(ClosedError, match="the client was destroyed"):
            clients.drive(op)
    assert client.transport.calls == [["shutdown", None, {}]]
    client.log_probs_to_nested(clients.batch(), torch.zeros(8, 7))  # asks nobody


def test_destroy_is_idempotent() -> None:
    client = client_of()
    for _ in range(3):
        assert clients.drive(client.destroy()) is None
    assert len(client.transport.calls) == 1
    assert asyncio.run(client.destroy()) is None  # type: ignore[func-returns-value]


def test_destroy_that_is_not_awaited_does_nothing() -> None:
    client = client_of()
    client.destroy().close()
    client.destroy()
    assert not client.closed
    clients.drive(client.sync_weights())


def test_two_destroys_at_once() -> None:
    async def before(method: str, count: int) -> None:
        await asyncio.sleep(0)

    async def main() -> None:
        client = client_of(Transport(before))
        assert await asyncio.gather(client.destroy(), client.destroy()) == [None, None]
        assert client.transport.counts == {"shutdown": 1}

    asyncio.run(main())


@pytest.mark.parametrize("how", ["fails", "closed", "cancelled", "dropped"])
def test_a_destroy_that_failed_may_be_tried_again(how: str) -> None:
    async def before(method: str, count: int) -> None:
        if count == 1 and how == "fails":
            raise ConnectionError("gone")
        if count == 1:
            await clients.Pause()

    client = client_of(Transport(before))
    op = client.destroy()
    if how == "fails":
        with pytest.raises(ConnectionError) as caught:
            clients.drive(op)
        assert caught.value.__notes__ == [
            "arctic_rl_c: destroy failed; the client stays closed, destroy() may be called again"
        ]
    else:
        op.send(None)
        if how == "closed":
            op.close()
        elif how == "cancelled":
            with pytest.raises(asyncio.CancelledError):
                op.throw(asyncio.CancelledError)
        del op
    assert client.closed
    assert "after a failed destroy" in repr(client)
    with pytest.raises(ClosedError):
        client.sync_weights()
    clients.drive(client.destroy())
    assert client.transport.counts == {"shutdown": 2}
    assert repr(client).endswith("closed>")


def test_only_the_owner_ends_the_servers_jobs() -> None:
    attached = Transport()
    attached.owner = False  # type: ignore[attr-defined]
    for transport, given, owns in (
        (Transport(), None, True),
        (Transport(), False, False),
        (attached, None, False),
        (attached, True, True),
    ):
        transport.calls.clear()
        client = client_of(transport, options={"owner": given})
        assert client.owner is owns
        clients.drive(client.destroy())
        assert client.closed
        assert transport.calls == ([["shutdown", None, {}]] if owns else [])
        with pytest.raises(ClosedError):
            client.sync_weights()


def test_others_let_go_of_their_own_connection() -> None:
    class Detaches(Transport):
        owner = False

        async def detach(self) -> None:
            await self.called("detach")

    client = client_of(Detaches())
    for _ in range(2):
        clients.drive(client.destroy())
    assert client.transport.calls == [["detach", None, {}]]


def test_destroy_with_operations_under_way() -> None:
    """The call that runs is the transport's to end; an update begins no further mini-batch."""

    async def main() -> None:
        gate = asyncio.Event()

        async def before(method: str, count: int) -> None:
            if method in ("step", "generate"):
                await gate.wait()

        transport = Transport(before)
        client = client_of(transport)
        update = asyncio.create_task(
            client.update_actor(clients.batch(), actor_config={}, **OPTIONS)
        )
        generate = asyncio.create_task(client.generate("a"))
        await asyncio.sleep(0)
        await client.destroy()
        gate.set()
        assert await generate == [{"token_ids": [1]}]
        with pytest.raises(ClosedError, match="destroyed after 1 of 2 optimizer steps"):
            await update
        assert transport.counts == {"fwd_bwd": 1, "step": 1, "generate": 1, "shutdown": 1}

    asyncio.run(main())


def test_a_client_works_from_several_loops() -> None:
    client = client_of()
    for _ in range(3):
        assert asyncio.run(client.sync_weights()) == {"status": "ok"}


def test_the_client_is_freed_with_its_transport() -> None:
    transport = Transport()
    client = client_of(transport)
    transport.client = client  # type: ignore[attr-defined]
    gone = weakref.ref(transport)
    del transport, client
    gc.collect()
    assert gone() is None


def test_the_client_works_without_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "sys.path[:0] = ['leaks', '.']\n"
        "import leak_cases\n"
        "leak_cases.client().call()\n"
        "leak_cases.builders().call()\n"
        "print('fine')\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=str(clients.HERE),
    )
    assert (run.returncode, run.stdout) == (0, "fine\n"), run.stderr
