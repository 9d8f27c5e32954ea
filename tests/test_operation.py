# SPDX-License-Identifier: Apache-2.0
"""The awaitable: the coroutine protocol, what passes through it, how it ends."""

from __future__ import annotations

import asyncio
import collections.abc
import gc
import inspect
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import arctic_rl_c
import clients
from clients import Pause, Transport

OPTIONS: dict[str, Any] = {"pad_token_id": clients.PAD}


def client_of(transport: Any, version: str = "final", **paths: Any) -> arctic_rl_c.ArcticRLClient:
    return arctic_rl_c.ArcticRLClient(
        transport,
        clients.config(version, **paths),
        tokenizer=clients.Tokenizer(),
        prompts_as="text",
    )


def update_of(client: arctic_rl_c.ArcticRLClient) -> arctic_rl_c.Operation[Any]:
    return client.update_actor(clients.batch(), actor_config={}, **OPTIONS)


MAKERS: dict[str, Callable[[arctic_rl_c.ArcticRLClient], arctic_rl_c.Operation[Any]]] = {
    "compute_log_prob": lambda client: client.compute_log_prob(clients.batch(), **OPTIONS),
    "update_actor": update_of,
    "generate": lambda client: client.generate([1, 2]),
    "sync_weights": lambda client: client.sync_weights(),
    "save_checkpoint": lambda client: client.save_checkpoint(),
    "load_checkpoint": lambda client: client.load_checkpoint(),
    "sleep_inference": lambda client: client.sleep_inference(),
    "wake_up_inference": lambda client: client.wake_up_inference(),
    "reset_prefix_cache": lambda client: client.reset_prefix_cache(),
    "destroy": lambda client: client.destroy(),
}


EACH = pytest.mark.parametrize("name", MAKERS)


def pausing(name: str = "token") -> Transport:
    """A transport that yields once before each answer."""

    async def before(method: str, count: int) -> None:
        await Pause((name, method, count))

    return Transport(before)


def raising(error: BaseException, at: tuple[str, int]) -> Transport:
    async def before(method: str, count: int) -> None:
        if (method, count) == at:
            raise error

    return Transport(before)


# ---- protocol -----------------------------------------------------------------------------------


@EACH
def test_it_is_an_awaitable_coroutine(name: str) -> None:
    op = MAKERS[name](client_of(Transport()))
    assert isinstance(op, collections.abc.Coroutine)
    assert isinstance(op, collections.abc.Awaitable)
    assert isinstance(op, collections.abc.Iterator)
    assert inspect.isawaitable(op)
    assert asyncio.iscoroutine(op)
    assert (op.name, op.__name__, op.__qualname__) == (name, name, name)
    assert repr(op) == f"<Operation {name}, not begun>"
    clients.drive(op)
    assert op.done
    assert repr(op) == f"<Operation {name}, done>"


def test_it_cannot_be_made_by_hand() -> None:
    with pytest.raises(TypeError, match="cannot create"):
        arctic_rl_c.Operation()  # type: ignore[abstract]
    assert arctic_rl_c.Operation[dict].__origin__ is arctic_rl_c.Operation


def test_nothing_is_sent_before_it_is_awaited() -> None:
    transport = Transport()
    client = client_of(transport)
    operations = [make(client) for make in MAKERS.values()]
    assert transport.calls == []
    for op in operations:
        op.close()
        assert op.done
    del operations
    assert transport.calls == []


@EACH
def test_awaiting_twice_is_an_error(name: str) -> None:
    async def main() -> None:
        op = MAKERS[name](client_of(Transport()))
        await op
        with pytest.raises(RuntimeError, match=f"cannot reuse an already awaited {name}"):
            await op
        with pytest.raises(RuntimeError, match="cannot reuse"):
            op.send(None)
        with pytest.raises(RuntimeError, match="cannot reuse"):
            next(op)
        with pytest.raises(RuntimeError, match="cannot reuse"):
            op.throw(KeyError)
        assert op.close() is None

    asyncio.run(main())


def test_two_tasks_cannot_await_one() -> None:
    op = client_of(pausing()).sync_weights()
    first = op.__await__()
    assert first is op
    with pytest.raises(RuntimeError, match="sync_weights is being awaited already"):
        op.__await__()
    assert next(first) == ("token", "sync_weights", 1)
    with pytest.raises(RuntimeError, match="is being awaited already"):
        op.__await__()
    op.close()


def test_what_is_yielded_goes_up_and_what_is_sent_goes_down() -> None:
    received = []

    async def before(method: str, count: int) -> None:
        received.append(await Pause(f"{method} {count}"))

    op = update_of(client_of(Transport(before)))
    with pytest.raises(TypeError, match="can't send non-None value to a just-started"):
        op.send("early")
    yielded = [op.send(None)]
    with pytest.raises(StopIteration) as stop:
        while True:
            yielded.append(op.send(len(yielded)))
    assert yielded == ["fwd_bwd 1", "step 1", "fwd_bwd 2", "step 2"]
    assert received == [1, 2, 3, 4]
    assert stop.value.value["loss"] == 0.75


@pytest.mark.parametrize("answer", [(1, 2), None, StopIteration(3), ValueError("a value"), []])
def test_any_answer_is_a_result(answer: Any) -> None:
    """Tuples and exceptions as results must not be taken apart by StopIteration."""

    class Answers(Transport):
        async def sync_weights(self, **keywords: Any) -> Any:
            return answer

    client = client_of(Answers())
    assert clients.drive(client.sync_weights()) is answer

    async def main() -> Any:
        return await client.sync_weights()

    assert asyncio.run(main()) is answer


def test_a_call_that_is_done_takes_no_turn_of_the_loop() -> None:
    order = []

    async def main() -> None:
        asyncio.get_running_loop().call_soon(order.append, "turn")
        await update_of(client_of(Transport()))
        order.append("done")
        await asyncio.sleep(0)

    asyncio.run(main())
    assert order == ["done", "turn"]


class Iterates:
    """An awaitable whose iterator has __next__ alone."""

    def __init__(self, turns: int) -> None:
        self.turns = turns

    def __await__(self) -> Iterator[Any]:
        return Counts(self.turns)


class Counts:
    def __init__(self, turns: int) -> None:
        self.turns = turns

    def __iter__(self) -> Counts:
        return self

    def __next__(self) -> int:
        if self.turns == 0:
            raise StopIteration("counted")
        self.turns -= 1
        return self.turns


@types.coroutine
def generator_coroutine() -> Iterator[Any]:
    yield "from a generator"
    return "counted"


async def plain_coroutine() -> str:
    await Pause("from a coroutine")
    return "counted"


@pytest.mark.parametrize(
    "make", [lambda: Iterates(1), generator_coroutine, plain_coroutine], ids=["next", "gen", "coro"]
)
def test_any_awaitable_will_do(make: Any) -> None:
    transport = Transport()
    transport.sync_weights = lambda **keywords: make()  # type: ignore[method-assign, assignment]
    client = client_of(transport)
    op = client.sync_weights()
    op.send(None)
    with pytest.raises(StopIteration) as stop:
        op.send(None)
    assert stop.value.value == "counted"
    op = client.sync_weights()
    op.send(None)
    op.close()
    op = client.sync_weights()
    op.send(None)
    with pytest.raises(KeyError, match="thrown"):
        op.throw(KeyError("thrown"))


def test_futures_will_do() -> None:
    async def main() -> Any:
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        transport = Transport()
        transport.sync_weights = lambda **keywords: future  # type: ignore[method-assign, assignment]
        op = asyncio.ensure_future(client_of(transport).sync_weights())
        await asyncio.sleep(0)
        future.set_result("in time")
        return await op

    assert asyncio.run(main()) == "in time"


class BadIterator:
    def __await__(self) -> Any:
        return 7


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ({"status": "ok"}, "returned a dict, which cannot be awaited"),
        (None, "returned a NoneType, which cannot be awaited"),
        (BadIterator(), "BadIterator.__await__ returned a int, not an iterator"),
    ],
)
def test_methods_must_return_awaitables(answer: Any, says: str) -> None:
    transport = Transport()
    transport.sync_weights = lambda **keywords: answer  # type: ignore[method-assign]
    with pytest.raises(TypeError, match=says):
        clients.drive(client_of(transport).sync_weights())


def test_a_plain_generator_is_no_awaitable() -> None:
    transport = Transport()
    transport.sync_weights = lambda **keywords: (x for x in ())  # type: ignore[method-assign, assignment]
    with pytest.raises(TypeError, match="returned a generator, which cannot be awaited"):
        clients.drive(client_of(transport).sync_weights())


def test_a_method_that_is_missing() -> None:
    transport = Transport()
    client = client_of(transport)
    for name in ("fwd_no_grad", "fwd_bwd", "generate", "sync_weights"):
        setattr(transport, name, None)
    for name in ("compute_log_prob", "update_actor", "generate", "sync_weights"):
        with pytest.raises(TypeError):
            clients.drive(MAKERS[name](client))


def test_reentrance_is_refused() -> None:
    op: Any = None
    seen = []

    async def before(method: str, count: int) -> None:
        for call in (lambda: op.send(None), lambda: op.throw(KeyError), op.close, lambda: next(op)):
            with pytest.raises(ValueError, match="sync_weights is already executing"):
                call()
            seen.append(call)

    op = client_of(Transport(before)).sync_weights()
    assert clients.drive(op) == {"status": "ok"}
    assert len(seen) == 4


# ---- under asyncio ------------------------------------------------------------------------------


@EACH
def test_asyncio_takes_it_everywhere(name: str) -> None:
    async def before(method: str, count: int) -> None:
        await asyncio.sleep(0)

    def make() -> arctic_rl_c.Operation[Any]:
        return MAKERS[name](client_of(Transport(before)))

    async def main() -> None:
        task = asyncio.create_task(make())
        assert name in repr(task)
        results = [await task, await make(), *await asyncio.gather(make(), make())]
        results.append(await asyncio.wait_for(make(), 60))
        results.append(await asyncio.shield(make()))
        for result in results[1:]:
            clients.same(result, results[0])

    asyncio.run(main())
    assert asyncio.run(make()) is not NotImplemented


def test_operations_run_side_by_side() -> None:
    """One client, many operations: each keeps its own place."""
    gates: dict[tuple[str, int], asyncio.Event] = {}
    arrived: list[tuple[str, int]] = []

    async def before(method: str, count: int) -> None:
        arrived.append((method, count))
        gate = gates.setdefault((method, count), asyncio.Event())
        await gate.wait()

    async def main() -> None:
        client = client_of(Transport(before))
        tasks = [
            asyncio.create_task(update_of(client)),
            asyncio.create_task(client.generate([1])),
            asyncio.create_task(client.generate([2])),
            asyncio.create_task(client.compute_log_prob(clients.batch(), **OPTIONS)),
        ]
        released = 0
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0)
            if released < len(arrived):  # the latest first
                gates[arrived[-1]].set()
                released = len(arrived)
            for gate in gates.values():
                gate.set()
        update, one, other, log_prob = [task.result() for task in tasks]
        assert update["loss"] == 0.75
        assert len(one) == len(other) == 1
        assert set(log_prob) == {"model_output", "metrics"}
        methods = [method for method, _ in arrived]
        assert sorted(methods) == sorted(
            ["fwd_bwd", "step"] * 2 + ["generate"] * 2 + ["fwd_no_grad"]
        )

    asyncio.run(main())


@pytest.mark.parametrize("at", range(4))
def test_cancellation_reaches_the_transport(at: int) -> None:
    """The call that is cancelled hears of it; no further call is made; the place is noted."""
    steps = ["fwd_bwd 1", "step 1", "fwd_bwd 2", "step 2"]
    heard = []

    async def main() -> None:
        reached = asyncio.Event()

        async def before(method: str, count: int) -> None:
            if f"{method} {count}" != steps[at]:
                return
            reached.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                heard.append(f"{method} {count}")
                raise

        transport = Transport(before)
        task = asyncio.create_task(update_of(client_of(transport)))
        await reached.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert heard == [steps[at]]
        assert [f"{m} {transport.counts[m]}" for m, *_ in transport.calls][-1] == steps[at]
        assert len(transport.calls) == at + 1

    asyncio.run(main())


def test_a_timeout_is_a_timeout() -> None:
    async def main() -> None:
        async def before(method: str, count: int) -> None:
            await asyncio.Event().wait()

        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(client_of(Transport(before)).sync_weights(), 0.01)

    asyncio.run(main())


def test_a_transport_may_swallow_cancellation() -> None:
    """Then its answer counts, as with any coroutine."""

    async def before(method: str, count: int) -> None:
        try:
            await Pause()
        except KeyError:
            assert count == 1

    op = update_of(client_of(Transport(before)))
    op.send(None)
    assert op.throw(KeyError("swallowed")) is None  # waits in the step now
    op.send(None)
    assert op.progress == (1, 2)
    with pytest.raises(AssertionError):
        op.throw(KeyError)


# ---- failures -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("at", "where", "steps"),
    [
        (("fwd_bwd", 1), "fwd_bwd of mini-batch 1 of 2 (epoch 1 of 2)", 0),
        (("step", 1), "step of mini-batch 1 of 2 (epoch 1 of 2)", 0),
        (("fwd_bwd", 2), "fwd_bwd of mini-batch 2 of 2 (epoch 1 of 2)", 1),
        (("step", 2), "step of mini-batch 2 of 2 (epoch 1 of 2)", 1),
        (("fwd_bwd", 3), "fwd_bwd of mini-batch 1 of 2 (epoch 2 of 2)", 2),
        (("step", 4), "step of mini-batch 2 of 2 (epoch 2 of 2)", 3),
    ],
)
def test_a_failing_mini_batch_is_named(at: tuple[str, int], where: str, steps: int) -> None:
    error = ConnectionError("the server is gone")
    transport = raising(error, at)
    client = client_of(transport, actor_rollout_ref__actor__ppo_epochs=2)
    op = update_of(client)
    with pytest.raises(ConnectionError, match="the server is gone") as caught:
        clients.drive(op)
    assert caught.value is error
    assert error.__notes__ == [
        f"arctic_rl_c: update_actor failed in {where}, after {steps} of 4 optimizer steps"
    ]
    assert op.done
    assert op.progress == (steps, 4)
    assert transport.calls[-1][0] == at[0]
    assert transport.counts[at[0]] == at[1]


@EACH
def test_exceptions_keep_their_type_and_say_whose_they_are(name: str) -> None:
    class Odd(Exception):
        def __init__(self, one: int, two: int) -> None:
            super().__init__(f"{one} and {two}")

    error = Odd(1, 2)

    async def before(method: str, count: int) -> None:
        raise error

    with pytest.raises(Odd) as caught:
        clients.drive(MAKERS[name](client_of(Transport(before))))
    assert caught.value is error
    (note,) = error.__notes__
    assert note.startswith(f"arctic_rl_c: {name} failed")


def test_notes_do_not_replace_notes() -> None:
    error = OSError("first")
    for count in (1, 2):
        with pytest.raises(OSError):
            clients.drive(client_of(raising(error, ("sync_weights", 1))).sync_weights())
        assert len(error.__notes__) == count


def test_an_exception_without_notes_still_comes_through() -> None:
    class Closed(Exception):
        def __setattr__(self, name: str, value: Any) -> None:
            raise AttributeError(name)

        def add_note(self, note: str) -> None:
            raise OSError("no notes")

    with pytest.raises(Closed):
        clients.drive(client_of(raising(Closed(), ("sync_weights", 1))).sync_weights())


BAD_ANSWERS = [
    ("fwd_no_grad", 7, "answer to fwd_no_grad \\(a int\\) has no 'batch'"),
    ("fwd_no_grad", [1], "answer to fwd_no_grad \\(a list\\) has no 'batch'"),
    ("fwd_no_grad", "text", "answer to fwd_no_grad \\(a str\\) has no 'batch'"),
    ("fwd_no_grad", {"batch": [1], "metrics": {}}, "has no 'logprobs'"),
    ("fwd_bwd", (), "answer to fwd_bwd \\(a tuple\\) has no 'metrics'"),
    ("fwd_bwd", b"x", "answer to fwd_bwd \\(a bytes\\) has no 'metrics'"),
    ("fwd_bwd", {"metrics": [("loss", 1)]}, "metrics in the server's answer to fwd_bwd are a list"),
    ("fwd_no_grad", {"metrics": {}}, "has no 'batch'"),
    ("fwd_no_grad", {"batch": {}, "metrics": {}}, "has no 'logprobs'"),
    ("fwd_no_grad", {"batch": {"logprobs": [1.0]}, "metrics": {}}, "logprobs: expected a torch"),
    ("fwd_bwd", {}, "answer to fwd_bwd \\(a dict\\) has no 'metrics'"),
    ("fwd_bwd", {"metrics": 7}, "metrics in the server's answer to fwd_bwd are a int"),
    ("fwd_bwd", {"metrics": {"kl": 1.0}}, "answer to fwd_bwd have no 'loss'"),
    ("step", None, "answer to step \\(a NoneType\\) has no 'metrics'"),
    ("step", {"job_id": 1}, "answer to step \\(a dict\\) has no 'metrics'"),
]


@pytest.mark.parametrize(("method", "answer", "says"), BAD_ANSWERS)
@pytest.mark.parametrize("version", ["seed", "final"])
def test_answers_that_cannot_be_read(version: str, method: str, answer: Any, says: str) -> None:
    transport = Transport()

    async def bad(*args: Any, **keywords: Any) -> Any:
        return answer

    setattr(transport, method, bad)
    name = "compute_log_prob" if method == "fwd_no_grad" else "update_actor"
    op = MAKERS[name](client_of(transport, version))
    with pytest.raises(arctic_rl_c.PayloadError, match=says) as caught:
        clients.drive(op)
    assert f"arctic_rl_c: {name} failed" in caught.value.__notes__[0]
    if method == "step":  # it was taken, however it was answered
        assert op.progress[0] == 1
        assert "step of mini-batch 1 of" in caught.value.__notes__[0]


@pytest.mark.parametrize("key", ["logprobs", "entropy"])
def test_answers_for_another_batch(key: str) -> None:
    class Cuts(Transport):
        async def fwd_no_grad(self, payload: Any, reference_model: bool = False) -> dict[str, Any]:
            answer = await super().fwd_no_grad(payload, reference_model)
            answer["batch"][key] = answer["batch"][key][:, :-1]
            return answer

    client = client_of(Cuts())
    says = rf"the server's {key} are float32\[8, 6\], \[8, 7\] is needed"
    with pytest.raises(arctic_rl_c.PayloadError, match=says):
        clients.drive(client.compute_log_prob(clients.batch(), calculate_entropy=True, **OPTIONS))


# ---- throw, close, drop -------------------------------------------------------------------------


def test_throwing_before_the_start() -> None:
    transport = Transport()
    op = client_of(transport).sync_weights()
    with pytest.raises(KeyError, match="early"):
        op.throw(KeyError("early"))
    assert op.done
    assert transport.calls == []


def test_all_forms_of_throw() -> None:
    client = client_of(pausing())

    def begun() -> arctic_rl_c.Operation[Any]:
        op = client.sync_weights()
        op.send(None)
        return op

    error = KeyError("v")
    for arguments in ((KeyError,), (KeyError, "v"), (error,), (KeyError, error, None)):
        with pytest.raises(KeyError):
            begun().throw(*arguments)
    try:
        raise OSError("with a traceback")
    except OSError as error:
        traceback = error.__traceback__
    with pytest.raises(OSError) as caught:
        begun().throw(OSError, OSError("with a traceback"), traceback)
    assert caught.value.__traceback__ is not None
    op = begun()
    for arguments in ((7,), (KeyError("v"), "w"), (KeyError, None, 7), (), (1, 2, 3, 4)):
        with pytest.raises(TypeError):
            op.throw(*arguments)
        assert not op.done
    op.close()


@pytest.mark.parametrize("how", ["close", "throw", "drop"])
def test_an_operation_that_is_ended_closes_the_call(how: str) -> None:
    ended = []

    async def before(method: str, count: int) -> None:
        try:
            await Pause()
        except GeneratorExit:
            ended.append(method)
            raise

    op = client_of(Transport(before)).sync_weights()
    op.send(None)
    if how == "close":
        op.close()
        assert op.done
    elif how == "throw":
        with pytest.raises(GeneratorExit):
            op.throw(GeneratorExit)
        assert op.done
    del op
    assert ended == ["sync_weights"]


def test_close_passes_on_what_closing_raises() -> None:
    async def before(method: str, count: int) -> None:
        try:
            await Pause()
        except GeneratorExit:
            raise OSError("while closing") from None

    op = client_of(Transport(before)).sync_weights()
    op.send(None)
    with pytest.raises(OSError, match="while closing"):
        op.close()
    assert op.done
    assert op.close() is None

    async def stubborn(method: str, count: int) -> None:
        try:
            await Pause()
        except GeneratorExit:
            await Pause()

    op = client_of(Transport(stubborn)).sync_weights()
    op.send(None)
    with pytest.raises(RuntimeError, match="ignored GeneratorExit"):
        op.throw(GeneratorExit)
    assert op.done


@pytest.mark.parametrize("how", ["done", "failed", "closed", "thrown", "dropped"])
@pytest.mark.parametrize("name", ["compute_log_prob", "update_actor"])
def test_an_operation_that_has_ended_holds_nothing(name: str, how: str) -> None:
    held: list[weakref.ref[Any]] = []

    async def before(method: str, count: int) -> None:
        payload = transport.calls.pop()[1]
        if payload is not None:
            held.append(weakref.ref(payload["batch"]["input_ids"]))
        del payload
        if how == "failed":
            raise OSError
        await Pause()

    transport = Transport(before)
    client = client_of(transport)
    op = MAKERS[name](client)
    if how == "failed":
        with pytest.raises(OSError):
            op.send(None)
    else:
        op.send(None)
        if how == "done":
            with pytest.raises(StopIteration):
                while True:
                    op.send(None)
        elif how == "closed":
            op.close()
        elif how == "thrown":
            with pytest.raises(KeyError):
                op.throw(KeyError)
        else:
            del op
    gc.collect()
    assert held
    assert all(ref() is None for ref in held)
    assert sys.getrefcount(client) <= 2, "only this frame holds the client"


def test_cycles_through_operations_are_collected() -> None:
    class Holder:
        pass

    async def before(method: str, count: int) -> None:
        await Pause()

    for begun in (False, True):
        transport = Transport(before)
        holder = Holder()
        op = MAKERS["update_actor"](client_of(transport))
        holder.op, transport.holder = op, holder  # type: ignore[attr-defined]
        if begun:
            op.send(None)
        gone = weakref.ref(holder)
        del holder, op, transport
        gc.collect()
        assert gone() is None


@EACH
def test_reference_counts_stand_still(name: str) -> None:
    """Complete, fail, close and drop: none of them keeps or loses a reference."""
    config = arctic_rl_c.normalize_config(clients.config())
    data = clients.batch()

    async def fails(method: str, count: int) -> None:
        raise OSError("anew each time: one that is raised again collects tracebacks")

    transports = [Transport(), pausing(), Transport(fails)]

    def once() -> None:
        for transport in transports:
            transport.calls.clear()
            transport.counts.clear()
            client = arctic_rl_c.ArcticRLClient(
                transport, config, tokenizer=clients.Tokenizer(), prompts_as="text"
            )
            MAKERS[name](client).close()
            op = MAKERS[name](client)
            try:
                op.send(None)
                op.throw(KeyError("x"))
            except (StopIteration, OSError, KeyError):
                pass

    watched = [None, config, data, *transports, clients.PAD, *data.values(), arctic_rl_c.Operation]
    for _ in range(5):
        once()
    gc.collect()
    counts = [sys.getrefcount(item) for item in watched]
    for _ in range(30):
        once()
    gc.collect()
    after = [sys.getrefcount(item) for item in watched]
    for item, one, other in zip(watched, counts, after, strict=True):
        assert abs(one - other) < 30, f"{type(item)}: {one} then {other}"
