# SPDX-License-Identifier: Apache-2.0
"""Calls that must leave nothing behind, at least one for every public name of the module.

A case is a function that prepares and returns a Case; `covers` are the names it is about, and
test_leaks.py fails when a public name has none. Error paths count: each case makes the call that
works and the ones that are refused.
"""

from __future__ import annotations

import functools
import json
import math
import pickle
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

import arctic_rl_c
import arctic_rl_c._core as core


@dataclass
class Case:
    """`call` is what is repeated; `arguments` are objects whose reference counts are watched."""

    call: Callable[[], object]
    arguments: tuple[object, ...] = ()
    close: Callable[[], object] = field(default=lambda: None)


Refusal = type[BaseException] | tuple[type[BaseException], ...]
CASES: dict[str, Callable[[], Case]] = {}
COVERED: dict[str, list[str]] = {}


NO_FAULTS: set[str] = set()


def case(*covers: str, faults: bool = True) -> Callable[[Callable[[], Case]], Callable[[], Case]]:
    """Register a case. `faults=False` keeps it out of tests/faults; say why beside it."""

    def register(make: Callable[[], Case]) -> Callable[[], Case]:
        CASES[make.__name__] = make
        if not faults:
            NO_FAULTS.add(make.__name__)
        for name in covers:
            COVERED.setdefault(name, []).append(make.__name__)
        return make

    return register


def refused(error: Refusal, call: Callable[..., object], *args: object, **kw: object):
    """Make a call that must raise `error`; anything else is a broken case, not a leak."""
    try:
        call(*args, **kw)
    except error:
        return
    raise AssertionError(f"{call} was not refused")


# ---- exceptions ----------------------------------------------------------------------------------

ERRORS = [
    value
    for value in vars(core).values()
    if isinstance(value, type) and issubclass(value, BaseException)
]


# All of it runs in the interpreter, whose pickle leaks when its own allocations fail.
@case(*(cls.__name__ for cls in ERRORS), faults=False)
def exceptions() -> Case:
    def call() -> None:
        for cls in ERRORS:
            try:
                raise cls("text")
            except arctic_rl_c.ArcticError as error:
                assert type(pickle.loads(pickle.dumps(error))) is cls

    return Case(call)


# ---- batch ---------------------------------------------------------------------------------------


def ragged(rows: int = 4) -> tuple[np.ndarray, np.ndarray]:
    """(values, offsets) of rows with 3, 4, 5, … ids."""
    lengths = np.arange(3, 3 + rows)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return np.arange(offsets[-1]), offsets


@case("pad_prompt_response")
def pad_prompt_response_numpy() -> Case:
    values, offsets = ragged()
    prompts = [1, 2, 1, 2]
    responses = [2, 2, 4, 4]

    def call() -> None:
        core.pad_prompt_response((values, offsets), prompts, responses)
        core.pad_prompt_response((values, offsets), prompts, responses, pad_value=7)
        refused(core.PayloadError, core.pad_prompt_response, (values, offsets), prompts, [9] * 4)
        refused(core.PayloadError, core.pad_prompt_response, (values, offsets), [1], responses)
        refused(TypeError, core.pad_prompt_response, (values, offsets))
        refused(TypeError, core.pad_prompt_response, nonsense=1)

    return Case(call, (values, offsets, prompts, responses))


@case("pad_prompt_response", "make_jagged", "shift_predict_next", "left_pad")
def batch_numpy_forms() -> Case:
    """Every way in and every way to be refused, small and large enough to be split."""
    values, offsets = ragged()
    pair = (values, offsets)
    nested_prompts = (np.zeros(6), np.array([0, 1, 3, 4, 6]))
    nested_responses = (np.zeros(12), np.array([0, 2, 4, 8, 12]))
    prompts, responses = np.zeros((4, 2)), np.zeros((4, 4))
    mask = np.array(
        [[0, 1, 1, 1, 0, 0], [1, 1, 1, 1, 0, 0], [0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]]
    )
    gap = mask.copy()
    gap[3, 2] = 0
    wide = np.zeros((256, 2048))
    like = (np.zeros(256 * 2048), np.arange(257) * 2048)
    ones = np.ones(wide.shape, np.int64)

    def call() -> None:
        dense, _, _ = core.pad_prompt_response(pair, prompts, responses, mask)
        core.pad_prompt_response(pair, nested_prompts, nested_responses, mask, pad_value=3)
        core.pad_prompt_response(
            pair, [1, 2, 1, 2], [2, 2, 4, 4], prompt_width=1, response_width=3, truncate=True
        )
        core.make_jagged(dense, mask, pair)
        core.shift_predict_next(pair)
        core.left_pad(dense[:, 1:], 9)
        core.left_pad(dense, 6)
        core.left_pad(dense, 3, on_wide="keep")
        core.left_pad(wide, 2500)
        core.make_jagged(wide, ones, like)
        refused(core.PayloadError, core.left_pad, dense, 3)
        refused(core.PayloadError, core.left_pad, values, 30)
        refused(ValueError, core.left_pad, dense, 9, on_wide="crop")
        refused(core.PayloadError, core.pad_prompt_response, pair, prompts, responses)
        refused(core.PayloadError, core.pad_prompt_response, pair, prompts, responses, gap)
        refused(core.PayloadError, core.pad_prompt_response, pair, prompts, [2, 2, 4, 4], mask)
        refused(core.PayloadError, core.pad_prompt_response, pair, [1, "2"], [2, 2, 4, 4])
        refused(core.PayloadError, core.pad_prompt_response, pair, [1, 2, 1, 2], [2, 2, 4, 4], gap)
        refused(
            core.PayloadError,
            core.pad_prompt_response,
            pair,
            prompts,
            responses,
            mask,
            pad_value=None,
        )
        refused(core.PayloadError, core.make_jagged, dense, gap, pair)
        refused(core.PayloadError, core.make_jagged, dense, mask[:2], pair)
        refused(core.PayloadError, core.shift_predict_next, (values[1:], offsets))

    return Case(call, (values, offsets, pair, prompts, responses, mask, wide))


@case("pad_prompt_response", "make_jagged", "shift_predict_next", "left_pad")
def batch_torch() -> Case:
    import torch

    values, offsets = ragged()
    nested = torch.nested.nested_tensor_from_jagged(
        torch.from_numpy(values), torch.from_numpy(offsets)
    )
    prompts = torch.tensor([1, 2, 1, 2])
    responses = torch.tensor([2, 2, 4, 4])

    def call() -> None:
        dense, _, _ = core.pad_prompt_response(nested, prompts, responses)
        core.left_pad(dense, 9)
        mask = torch.ones(dense.shape, dtype=torch.int64)
        refused(core.PayloadError, core.make_jagged, dense, mask[:2], nested)
        core.shift_predict_next(nested)
        refused(core.PayloadError, core.pad_prompt_response, nested, prompts, prompts[:1])
        refused(core.PayloadError, core.left_pad, dense.to("meta"), 9)
        refused(core.PayloadError, core.left_pad, dense.to(torch.cfloat).conj(), 9)

    return Case(call, (nested, prompts, responses))


@case("thread_count")
def thread_count() -> Case:
    return Case(core.thread_count)


# ---- configuration -------------------------------------------------------------------------------


def recorded_config(version: str) -> dict[str, object]:
    """The plain configuration of the first recorded case of a generation."""
    path = Path(__file__).parent.parent / "golden" / "golden.json"
    return next(c["config"] for c in json.loads(path.read_text()) if c["version"] == version)


@case("normalize_config")
def normalize_config() -> Case:
    flat, nested = recorded_config("seed"), recorded_config("final")
    unknown = {**nested, "remote_backend": {"colocated": True}}
    mistyped = {**nested, "remote_backend": {"training_gpus": "two"}}
    deep: dict[str, object] = {}
    for _ in range(1000):
        deep = {"a": deep}

    def call() -> None:
        once = core.normalize_config(flat)
        assert core.normalize_config(once) == once
        core.normalize_config(nested)
        refused(core.ConfigError, core.normalize_config, unknown)
        refused(core.ConfigError, core.normalize_config, mistyped)
        refused((core.ConfigError, RecursionError), core.normalize_config, {"x": deep})
        refused((TypeError, core.ConfigError), core.normalize_config, 7)
        refused(TypeError, core.normalize_config)

    return Case(call, (flat, nested, unknown))


@case("normalize_config")
def normalize_config_with_objects() -> Case:
    class Thing:
        pass

    class Mapping:
        def __init__(self, inner: dict[str, object]) -> None:
            self.inner = inner

        def keys(self) -> object:
            return self.inner.keys()

        def __getitem__(self, key: str) -> object:
            return self.inner[key]

    thing = Thing()
    tree = {"mine": [thing, (1, 2.5), {"big": 2**80, "text": "é", 3: None}], "remote_backend": {}}
    mapping, broken = Mapping(tree), Mapping({"remote_backend": {"nope": thing}})

    def call() -> None:
        assert core.normalize_config(mapping)["mine"][0] is thing
        refused(core.ConfigError, core.normalize_config, broken)

    return Case(call, (thing, tree, mapping, broken))


# A table made of 1,657 small objects: failing each of them takes longer than it teaches.
@case("config_schema", faults=False)
def config_schema() -> Case:
    def call() -> None:
        assert core.config_schema()["verl"]

    return Case(call)


@case("config_warnings")
def config_warnings() -> Case:
    nested = recorded_config("final")

    def call() -> None:
        assert core.config_warnings(nested)
        refused(core.ConfigError, core.config_warnings, {"remote_backend": {"nope": 1}})
        refused(TypeError, core.config_warnings, 7)

    return Case(call, (nested,))


YAML = "base: &b {lr: 1e-6, many: [1, 0x10, ~, true]}\ncopy: {<<: *b, own: 'text'}\n"
YAML += "ref: ${copy}\ntext: a ${base.lr}\nmade: '${oc.select:nope,[1, {a: b}]}'\n"
BAD_YAML = (
    "a: 1\na: 2\n",
    "a: ${b}\nb: ${a}\n",
    "a: [",
    "a: !x 1\n",
    "a: *x\n",
    "\x01",
    "a: ${f:1}",
)


@case("load_yaml")
def load_yaml() -> Case:
    def call() -> None:
        assert core.load_yaml(YAML)["made"] == [1, {"a": "b"}]
        core.load_yaml(text=YAML, resolve=False)
        for text in BAD_YAML:
            refused(core.ConfigError, core.load_yaml, text=text)
        refused(OSError, core.load_yaml, "/nonexistent")
        refused(TypeError, core.load_yaml)
        refused(TypeError, core.load_yaml, text=3)

    return Case(call)


@case("load_config")
def load_config() -> Case:
    text = (
        "remote_backend: {train: {zorro_train: {max_rollouts: '${actor_rollout_ref.rollout.n}'}}}\n"
    )
    overrides = ["actor_rollout_ref.rollout.n=4", "+mine={a:[1,'b c'],d:e}", "~mine.d", "++x=1"]
    folder = Path(tempfile.mkdtemp())
    path = str(folder / "run.yaml")  # a Path loses failed allocations in the interpreter
    Path(path).write_text(text)

    def call() -> None:
        assert core.load_config(path, overrides)["mine"] == {"a": [1, "b c"]}
        core.load_config(text)
        for bad in ("mine.a=1", "+a=f(1)", "+a=1,2", "remote_backend.colocate=no", "", "~nope"):
            refused(core.ConfigError, core.load_config, text, [bad])
        refused(core.ConfigError, core.load_config, text="[1]")
        refused(TypeError, core.load_config, text, "a=1")
        refused(TypeError, core.load_config, text, [1])

    return Case(call, (text, overrides), close=lambda: shutil.rmtree(folder))


# ---- weights -------------------------------------------------------------------------------------


WEIGHT_TYPES = (
    core.SyncStats,
    core.WeightReceiver,
    core.WeightSender,
    core.WeightView,
    core.WeightViews,
)


@case(
    *(cls.__name__ for cls in WEIGHT_TYPES),
    *(f"{c.__name__}.{name}" for c in WEIGHT_TYPES for name in vars(c) if name[0] != "_"),
)
def weight_sync() -> Case:
    source = {"a": np.arange(6.0).reshape(2, 3), "b": np.arange(4)[::2]}
    target = {name: np.zeros_like(value) for name, value in source.items()}

    def call() -> None:
        with (
            core.WeightSender(source, verify="all") as sender,
            core.WeightReceiver(target, aliases={"c": "a"}, log=str) as receiver,
        ):
            stats = receiver.pull(sender.offer(), verify="all")
            assert core.SyncStats(**stats.as_dict()).as_dict() == stats.as_dict()
            assert "host_shm" in repr(sender.serve())
            offer = sender.offer()
            refused(core.WeightSyncError, receiver.pull, offer[:-1])
            refused(TypeError, receiver.pull, "text")
            refused(ValueError, sender.join, offer, 1)  # host_shm has one sender
            refused(ValueError, sender.join, offer, 0)
            refused(TypeError, sender.join, "text", 1)
            sender.release()
            refused(core.WeightSyncError, receiver.pull, offer)
            with receiver.views(sender.offer(), verify="sample") as tensors:
                views = dict(tensors)
                for name, view in views.items():
                    assert np.from_dlpack(view).tobytes() == source[name].tobytes()
                assert {view.name for view in views.values()} == set(source)
                assert all(view.nbytes and view.shape and view.dtype for view in views.values())
            assert tensors.stats.verified == 1
            refused(core.ClosedError, views["a"].__dlpack__)
            receiver.check()
            assert (receiver.version, receiver.torn, receiver.closed) == (3, False, False)
            assert (sender.version, sender.closed, sender.live_exports()) == (3, False, 1)
            assert receiver.live_mappings() == 0
            assert all(getattr(stats, name) == value for name, value in stats.as_dict().items())
        refused(core.ClosedError, sender.offer)
        refused(core.ClosedError, receiver.pull, offer)
        refused(TypeError, core.WeightSender, {"a": 1})
        refused(ValueError, core.WeightReceiver, {})

    return Case(call, tuple(source.values()))


# ---- wire ----------------------------------------------------------------------------------------

NESTED_VALUE = {"a": [1, 2.5, None, True, "é\n"], "b": {"c": (1, 10**30), "d": []}}


@case("wire_dumps", "wire_loads", "wire_read_metadata")
def wire_numpy() -> Case:
    array = np.arange(12, dtype=np.int16).reshape(3, 4)
    obj = {"batch": {"x": array, "y": array.T[::-1]}, "meta": NESTED_VALUE, "t": (array, 1)}
    frame = core.wire_dumps(obj, {"op": 1})
    writable = bytearray(frame)
    cut = frame[:-1]
    loop: list[object] = []
    loop.append(loop)

    def call() -> None:
        core.wire_dumps(obj, {"op": 1})
        core.wire_dumps(NESTED_VALUE)
        refused(core.WireError, core.wire_dumps, {"a.b": array, "a": {"b": array}})
        refused(core.WireError, core.wire_dumps, {"a": {1: array}})
        refused(core.WireError, core.wire_dumps, loop)
        refused(TypeError, core.wire_dumps, {"x": array, "y": object()})
        refused(TypeError, core.wire_dumps, obj, 1)
        core.wire_loads(frame, as_="numpy")
        core.wire_loads(writable, as_="numpy", copy=False)
        core.wire_read_metadata(frame)
        core.wire_read_metadata(cut)
        refused(core.WireError, core.wire_loads, cut, as_="numpy")
        refused(core.WireError, core.wire_loads, None)
        refused(ValueError, core.wire_loads, frame, as_="jax")

    # The loop is garbage that only a cycle collector finds.
    return Case(call, (array, obj, frame, writable), close=loop.clear)


@case("wire_dumps", "wire_loads")
def wire_torch() -> Case:
    import torch

    tensor = torch.arange(6, dtype=torch.bfloat16)
    obj = {"x": tensor, "s": torch.tensor(1.5), "e": torch.empty(0, 3)}
    frame = core.wire_dumps(obj)
    writable = bytearray(frame)

    def call() -> None:
        core.wire_loads(core.wire_dumps(obj))
        core.wire_loads(writable, as_="torch", copy=False)
        refused(core.WireError, core.wire_loads, frame, as_="numpy")
        refused(ValueError, core.wire_loads, frame, as_="torch", copy=False)
        refused(core.WireError, core.wire_dumps, {"x": torch.zeros(1, dtype=torch.complex64)})

    return Case(call, (tensor, obj, frame, writable))


@case("wire_encode_byte_chunks", "wire_decode_byte_chunks")
def wire_chunks() -> Case:
    frame = core.wire_dumps({"x": np.arange(2000)})
    chunks = core.wire_encode_byte_chunks(frame, 12_000, "request", operation="fwd")

    def call() -> None:
        core.wire_encode_byte_chunks(frame, 12_000, "request", operation="fwd")
        core.wire_encode_byte_chunks(frame, 12_000, "result")
        core.wire_encode_byte_chunks(frame, 0, "result")
        refused(core.WireError, core.wire_encode_byte_chunks, frame, 10, "result")
        refused(core.WireError, core.wire_encode_byte_chunks, frame, 10, "other")
        core.wire_decode_byte_chunks(chunks[::-1])
        core.wire_decode_byte_chunks([frame])
        refused(core.WireError, core.wire_decode_byte_chunks, chunks[1:])
        refused(core.WireError, core.wire_decode_byte_chunks, [*chunks[1:], chunks[1]])
        refused(core.WireError, core.wire_decode_byte_chunks, [chunks[0], None])

    return Case(call, (frame, chunks))


# ---- payloads and the client ---------------------------------------------------------------------


def array_batch() -> dict[str, object]:
    """Four rows, two prompts of two rollouts, without torch."""
    lengths = np.array([[2, 3], [2, 1], [4, 2], [4, 3]])
    offsets = np.concatenate([[0], np.cumsum(lengths.sum(axis=1))])
    prompts = np.zeros((4, 4), np.int64)
    mask = np.zeros((4, 7), np.int64)
    ids = np.arange(offsets[-1])
    for row, (p, r) in enumerate(lengths):
        ids[offsets[row] : offsets[row] + p] = 100 + row // 2
        prompts[row, 4 - p :] = 100 + row // 2
        mask[row, 4 - p : 4 + r] = 1
    positions = np.concatenate([np.arange(p + r) for p, r in lengths])
    floats = np.ones((4, 3), np.float32)
    return {
        "input_ids": (ids, offsets),
        "position_ids": (positions, offsets),
        "attention_mask": mask,
        "prompts": prompts,
        "responses": np.zeros((4, 3), np.int64),
        "response_mask": mask[:, 4:],
        "loss_mask": mask[:, 4:],
        "old_log_probs": floats,
        "advantages": floats,
        "temperature": 0.7,
        "global_batch_size": 4,
    }


def batch_config(version: str) -> dict[str, object]:
    config = json.loads(json.dumps(recorded_config(version)))
    config["data"]["train_batch_size"] = 2
    config["actor_rollout_ref"]["actor"]["ppo_mini_batch_size"] = 1
    config["actor_rollout_ref"]["actor"]["ppo_epochs"] = 2
    return config


@case("build_log_prob_payload", "build_update_payloads")
def builders() -> Case:
    flat, nested = (core.normalize_config(batch_config(v)) for v in ("seed", "final"))
    data = array_batch()
    jagged = {**data, "prompts": (np.arange(6), np.array([0, 1, 3, 5, 6]))}
    actor = {"use_kl_loss": False, "policy_loss": {"loss_mode": "vanilla"}, "list": [1, (2,)]}
    options: dict[str, object] = {"pad_token_id": 0, "rollout_n": 2}

    def call() -> None:
        for config in (flat, nested):
            core.build_log_prob_payload(data, config, calculate_entropy=True, **options)
            core.build_update_payloads(data, config, actor_config=actor, **options)
            refused(
                core.PayloadError,
                core.build_log_prob_payload,
                jagged,
                config,
                calculate_entropy=True,
                **options,
            )
            for key in data:
                broken = {name: value for name, value in data.items() if name != key}
                try:
                    core.build_update_payloads(broken, config, actor_config=actor, **options)
                except core.PayloadError:
                    continue
        refused(TypeError, core.build_update_payloads, data, nested)
        options_of_update = {"actor_config": actor, **options}
        refused(
            core.ConfigError,
            core.build_update_payloads,
            data,
            {"remote_backend": 1},
            **options_of_update,
        )

    return Case(call, (flat, nested, data, actor))


class LoopTransport:
    """Answers at once, or after one turn of the loop; refuses when told to."""

    name = "loop"
    accepts_token_ids = True
    accepts_routing_key = True
    accepts_strict = False
    serves_reference = server_limits = owner = True

    def __init__(self) -> None:
        self.turns = 0
        self.fails = False
        self.values = np.zeros((4, 7), np.float32)

    async def answer(self, value: object) -> object:
        for _ in range(self.turns):
            await Turn()
        if self.fails:
            raise OSError("told to")
        return value

    def fwd_no_grad(self, payload: object, reference_model: bool) -> object:
        values = self.values  # made once: NumPy fails without an exception when memory does
        return self.answer({"batch": {"logprobs": values, "entropy": values}, "metrics": {}})

    def fwd_bwd(self, payload: object) -> object:
        return self.answer({"metrics": {"loss": 0.5, "kl": [0.25], "note": "text"}})

    def step(self) -> object:
        return self.answer({"metrics": {"grad_norm": 1.0, "last_lr": 1e-6}})

    def keywords(self, **keywords: object) -> object:
        return self.answer(keywords)

    def generate(self, prompts: list[object], **_: object) -> object:
        return self.answer([{"token_ids": [3]} for _ in prompts])

    sync_weights = save_checkpoint = load_checkpoint = keywords
    sleep_inference = wake_inference = reset_prefix_cache = shutdown = keywords

    def reconnect_handle(self) -> dict[str, object]:
        return {"address": "here"}


class Turn:
    def __await__(self):
        yield


def run(operation: object) -> object:
    try:
        while True:
            operation.send(None)  # type: ignore[attr-defined]
    except StopIteration as stop:
        return stop.value


CLIENT_MEMBERS = [
    f"{cls.__name__}.{name}"
    for cls in (core.ArcticRLClient, core.Operation)
    for name in vars(cls)
    if not name.startswith("_")
]


OPERATIONS: dict[str, Callable[[core.ArcticRLClient, dict[str, object]], object]] = {
    "compute_log_prob": lambda client, data: client.compute_log_prob(
        data, pad_token_id=0, rollout_n=2, calculate_entropy=True
    ),
    "update_actor": lambda client, data: client.update_actor(
        data, actor_config={}, pad_token_id=0, rollout_n=2
    ),
    "generate": lambda client, data: client.generate([1, 2]),
    "sync_weights": lambda client, data: client.sync_weights(),
    "save_checkpoint": lambda client, data: client.save_checkpoint("here", step=1),
    "load_checkpoint": lambda client, data: client.load_checkpoint(path="here"),
    "sleep_inference": lambda client, data: client.sleep_inference(),
    "wake_up_inference": lambda client, data: client.wake_up_inference(["weights"]),
    "reset_prefix_cache": lambda client, data: client.reset_prefix_cache(),
    "destroy": lambda client, data: client.destroy(),
}


def client_operation(name: str) -> Case:
    """One operation, in both generations, answered at once and after a turn of the loop."""
    data = array_batch()
    configs = [core.normalize_config(batch_config(v)) for v in ("seed", "final")]
    transport = LoopTransport()
    clients = [core.ArcticRLClient(transport, config) for config in configs]

    def call() -> None:
        for index, client in enumerate(clients):
            for transport.turns in (0, 1):
                if client.closed:
                    clients[index] = client = core.ArcticRLClient(transport, configs[index])
                run(OPERATIONS[name](client, data))

    return Case(call, (data, transport, *configs))


CASES |= {f"client_{name}": functools.partial(client_operation, name) for name in OPERATIONS}


# Too many calls to fail each of them here: the operations have cases of their own above.
@case("ArcticRLClient", "Operation", *CLIENT_MEMBERS, faults=False)
def client() -> Case:
    data = array_batch()
    configs = [core.normalize_config(batch_config(v)) for v in ("seed", "final")]
    transport = LoopTransport()

    def operations(client: core.ArcticRLClient) -> list[object]:
        return [make(client, data) for make in OPERATIONS.values()]

    def one(config: dict[str, object]) -> None:
        client = core.ArcticRLClient(transport, config)
        client.reconnect_handle()
        assert (client.transport, client.tokenizer) == (transport, None)
        assert client.config is not config and client.owner and not client.closed
        client.log_probs_to_nested(data, data["attention_mask"])
        for transport.turns in (0, 1):
            for operation in operations(client)[:-1]:
                assert operation.name and operation.progress  # type: ignore[attr-defined]
                run(operation)
                assert operation.done  # type: ignore[attr-defined]
        for operation in operations(client):
            operation.close()  # type: ignore[attr-defined]
        for operation in operations(client):
            operation.send(None)  # type: ignore[attr-defined]
            try:
                operation.throw(KeyError)  # type: ignore[attr-defined]
            except KeyError:
                continue
        client = core.ArcticRLClient(transport, config)
        transport.fails = True
        for operation in operations(client):
            try:
                run(operation)
            except OSError:
                continue
        transport.fails = False
        run(client.destroy())
        try:
            client.sync_weights()
        except core.ClosedError:
            return
        raise AssertionError("not closed")

    def call() -> None:
        transport.fails = False  # a call that was made to fail may have left it on
        for config in configs:
            one(config)
        checked = core.ArcticRLClient(transport, configs[0])
        for keys in ({"n": 0}, {"temperature": "x"}, {"top_p": math.nan}, {1: 2}):
            refused(core.PayloadError, checked.generate, [1, 2], keys)
        refused(core.PayloadError, checked.sleep_inference, 10**30)
        refused(TypeError, checked.sleep_inference, 1.5)
        refused(core.PayloadError, checked.wake_up_inference, ["weights", "x"])
        refused(TypeError, checked.save_checkpoint, b"path")
        refused(core.PayloadError, checked.save_checkpoint, Path("p"), step="1")
        run(checked.load_checkpoint(Path("here")))
        refused(TypeError, core.ArcticRLClient, object(), configs[0])
        refused(core.ConfigError, core.ArcticRLClient, transport, {"remote_backend": 1})

    return Case(call, (data, transport, *configs))


# As with the exceptions: the interpreter's pickle leaks when its own allocations fail.
@case("SyncStats", faults=False)
def sync_stats_pickled() -> Case:
    with core.WeightSender({"a": np.arange(3)}) as sender:
        with core.WeightReceiver({"a": np.arange(3)}) as receiver:
            stats = receiver.pull(sender.offer())
        sender.serve()
    return Case(lambda: pickle.loads(pickle.dumps(stats)), (stats,))
