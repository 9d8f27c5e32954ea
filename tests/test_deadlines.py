# SPDX-License-Identifier: Apache-2.0
"""Ops of the embedded server that take too long, over child processes and over Ray's double."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
import pickle
import re
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import hanging_role
import recording_role
from arctic_rl_c import ConfigError, PeerLostError, PeerTimeoutError
from arctic_rl_c.local.options import LocalOptions
from arctic_rl_c.local.server import EmbeddedServer, within
from arctic_rl_c.transports import ray as ray_transport
from arctic_rl_c.transports.arctic import ArcticTransport
from arctic_rl_c.transports.deadline import TIMEOUT
from arctic_rl_c.transports.http import HttpTransport
from arctic_rl_c.transports.local import LocalTransport
from arctic_rl_c.transports.ray import RayTransport
from arctic_rl_c.transports.ray_actors import RayRole
from arctic_rl_c.transports.ray_turn import TrainingTurn
from ray_doubles import ray
from test_golden_transports import through_one
from test_http import PAYLOAD

__all__ = ["ray"]

#: Long enough to begin an op on a busy machine.
SECONDS = 0.4


class HangingLocal(LocalTransport):
    _factory = "hanging_role:build"


class HangingRay(RayTransport):
    _factory = "hanging_role:build"


class Held:
    """Which ops of the roles hang."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @contextlib.contextmanager
    def __call__(self, *ops: str) -> Iterator[None]:
        for op in ops:
            (self._folder / op).touch()
        try:
            yield
        finally:
            for op in ops:
                (self._folder / op).unlink()


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Held]:
    folder = tmp_path_factory.mktemp("hanging")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(hanging_role.FOLDER, str(folder))
        yield Held(folder)


@pytest.fixture(scope="module", params=[HangingLocal, HangingRay], ids=["local", "ray"])
def transport(request: pytest.FixtureRequest, held: Held) -> Iterator[Any]:
    if request.param is HangingRay:
        request.getfixturevalue("ray")
    found = request.param(LocalOptions())
    asyncio.run(found.describe())
    yield found
    asyncio.run(found.shutdown())


@pytest.fixture
def limited(transport: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Set the deadlines of single ops."""
    return lambda **seconds: monkeypatch.setattr(transport, "_timeouts", seconds)


#: op: (role, op of the role, call, what is said of the state that is left)
OPS: dict[str, tuple[str, str, Callable[[Any], Awaitable[Any]], str]] = {
    "fwd_no_grad": (
        "trainer",
        "forward",
        lambda t: t.fwd_no_grad(PAYLOAD),
        "its answer is dropped, and nothing was changed by it",
    ),
    "fwd_bwd": (
        "trainer",
        "forward_backward",
        lambda t: t.fwd_bwd(PAYLOAD),
        "may or may not have been applied, and doing it again could apply it twice: resume from",
    ),
    "step": (
        "trainer",
        "step",
        lambda t: t.step(),
        "may or may not have been applied, and doing it again could apply it twice: resume from",
    ),
    "save_checkpoint": (
        "trainer",
        "save_checkpoint",
        lambda t: t.save_checkpoint(path="/x"),
        "goes on there and may yet have its effect; repeating it is harmless",
    ),
    "generate": (
        "sampler",
        "generate",
        lambda t: t.generate([[1]]),
        "its answer is dropped, and nothing was changed by it",
    ),
}


@pytest.mark.parametrize("op", OPS)
def test_a_role_that_hangs(transport: Any, held: Held, limited: Any, op: str) -> None:
    role, of_role, call, state = OPS[op]
    limited(**{op: SECONDS})

    async def work() -> None:
        with held(of_role), pytest.raises(PeerTimeoutError) as caught:
            await call(transport)
        text = str(caught.value)
        assert text.startswith(f"{op}: the {role} (pid ")
        assert f"gave no answer within {SECONDS:g} s; " in text and state in text
        assert f"Raise timeout= or timeouts={{{op!r}: …}}" in text
        assert caught.value.maybe_applied is (op in ("fwd_bwd", "step"))
        assert (caught.value.role, caught.value.operation) == (role, op)
        assert caught.value.code == "ARL_ERR_TIMEOUT"
        limited()
        await call(transport)  # after the first, which ran to its end

    calls, _ = through_one(transport)(lambda _: work())
    assert len(calls) == (2 if role == "trainer" else 0)


def test_what_had_not_begun_never_runs(transport: Any, held: Held, limited: Any) -> None:
    limited(step=SECONDS)

    async def work() -> None:
        with held("forward_backward"):
            running = asyncio.ensure_future(transport.fwd_bwd(PAYLOAD))
            await asyncio.sleep(0)
            with pytest.raises(PeerTimeoutError) as caught:
                await transport.step()
        text = str(caught.value)
        assert ", still in 'forward_backward', gave no answer" in text
        assert "the step had not begun and never will: nothing was changed by it" in text
        assert caught.value.maybe_applied is False
        await running
        limited()
        if isinstance(transport, RayTransport):  # nor have its gradients gone
            other = RayTransport.from_handle(transport.reconnect_handle())
            with pytest.raises(Exception, match="holds gradients of process"):
                await other.step()

    calls, _ = through_one(transport)(lambda _: work())
    assert [name for name, *_ in calls] == ["fwd_bwd"]
    asyncio.run(transport.step())


def test_a_sync_that_hangs(transport: Any, held: Held, limited: Any) -> None:
    limited(sync_weights=SECONDS, generate=SECONDS)

    async def work() -> None:
        with held("wake"):
            with pytest.raises(PeerTimeoutError, match=r"^sync_weights: the sampler \(") as caught:
                await transport.sync_weights()
            assert caught.value.maybe_applied is True
            assert "call sync_weights() again before anything is generated" in str(caught.value)
            with pytest.raises(PeerTimeoutError, match="still in 'wake'") as caught:
                await transport.generate([[1]])
            assert caught.value.maybe_applied is False
            with pytest.raises(PeerTimeoutError, match="still in 'wake'") as caught:
                await transport.sync_weights()
            assert caught.value.maybe_applied is False
        limited()
        await transport.generate([[1]])  # when the first sync has ended
        calls = (await recording_role.calls_of(transport))["sampler"]
        assert [name for name, *_ in calls].count("pull_weights") == 1

    asyncio.run(recording_role.calls_of(transport))
    asyncio.run(work())


def test_all_transports_have_the_same_deadlines() -> None:
    for cls in (LocalTransport, RayTransport, HttpTransport, ArcticTransport):
        given = inspect.signature(cls).parameters
        assert given["timeout"].default == TIMEOUT == 1800.0, cls
        assert given["timeouts"].default is None, cls
    for cls in (RayTransport, ArcticTransport):
        given = inspect.signature(cls.from_handle).parameters
        assert given["timeout"].default == TIMEOUT and given["timeouts"].default is None, cls


NOT_LIMITS = [
    ({"timeout": "1800"}, "timeout is '1800': it is a number of seconds, 0 or more; infinity"),
    ({"timeout": math.nan}, "timeout is nan: it is a number"),
    ({"timeout": True}, "timeout is True: it is a number"),
    ({"timeout": None}, "timeout is None: it is a number"),
    ({"timeouts": {"step": -1}}, "timeouts['step'] is -1: it is a number of seconds"),
    ({"timeouts": {"train": 1.0}}, "timeouts names 'train': it is one of fwd_no_grad, fwd_bwd, "),
    ({"timeouts": 60}, "timeouts is 60: it is a mapping of ops to seconds"),
]


@pytest.mark.parametrize(("options", "said"), NOT_LIMITS)
def test_what_is_no_limit_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], said: str
) -> None:
    def begun(*_: Any, **__: Any) -> None:
        raise AssertionError("something was begun")

    monkeypatch.setattr("arctic_rl_c.transports.local.RoleProcess", begun)
    monkeypatch.setattr("arctic_rl_c.transports.ray._connected_ray", begun)
    monkeypatch.setattr("arctic_rl_c.transports.http.Connection", begun)
    for make in (
        lambda: LocalTransport(LocalOptions(), **options),
        lambda: RayTransport(LocalOptions(), **options),
        lambda: HttpTransport("http://localhost:1", **options),
        lambda: EmbeddedServer(SilentRole("trainer"), SilentRole("sampler"), **options),
    ):
        with pytest.raises(ConfigError, match=re.escape(said)):
            make()


# ---- the server, over roles that never answer ----------------------------------------------------


class SilentRole:
    def __init__(self, role: str) -> None:
        self.role, self.pid, self.current = role, None, None
        self.asked: list[Future[Any]] = []

    def submit(self, op: str, **_: Any) -> Future[Any]:
        self.asked.append(Future())
        return self.asked[-1]

    def interrupt(self, op: str) -> None:
        """There is nothing to break off."""


def test_the_samplers_that_hang_are_named() -> None:
    trainer, *samplers = (SilentRole(n) for n in ("trainer", "sampler-0", "sampler-1", "sampler-2"))
    server = EmbeddedServer(trainer, samplers, timeout=math.inf, timeouts={"sleep_inference": 0.0})

    async def work() -> None:
        generating = asyncio.ensure_future(server.generate([[1], [2], [3]]))
        await asyncio.sleep(0)
        samplers[1].asked[0].set_running_or_notify_cancel()
        for sampler in samplers:
            if sampler is not samplers[1]:
                sampler.asked[0].set_result({"results": [{}]})
        with pytest.raises(PeerTimeoutError, match="sampler-0 and the sampler-1 and") as caught:
            await server.sleep_inference()
        assert caught.value.role == "sampler-0" and caught.value.maybe_applied is False
        assert all(sampler.asked[1].cancelled() for sampler in samplers)
        assert not generating.done()
        with (
            within(0.0),
            pytest.raises(PeerTimeoutError, match=r"^generate: the sampler-0") as late,
        ):
            await server.generate([[1]])
        assert late.value.role == "sampler-0"
        generating.cancel()

    asyncio.run(work())
    server.close()


# ---- Ray -----------------------------------------------------------------------------------------


def test_a_server_that_hangs(ray: Any, held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then it cannot say who is late, and whoever asked says it."""

    class Silent:
        def __getattr__(self, name: str) -> Any:
            return SimpleNamespace(remote=lambda *_: ray.ObjectRef(Future()))

    monkeypatch.setattr(ray_transport, "_GRACE_SECONDS", 0.0)
    handle = {"transport": "ray", "serves_reference": True, "cluster": "session-0"}
    transport = RayTransport.from_handle({**handle, "server": Silent()}, timeout=0.0)
    for call in (transport.step, transport.pids):
        with pytest.raises(PeerTimeoutError, match=r"the server gave no answer within 0 s") as late:
            asyncio.run(call())
        assert late.value.role == "server"
        assert late.value.maybe_applied is (call == transport.step)


def test_a_role_that_never_gets_ready(ray: Any, held: Held) -> None:
    go_on = threading.Event()
    transport = HangingRay(LocalOptions(), timeouts={"pids": SECONDS})

    async def work() -> None:
        await transport.pids()
        role = ray.state.actors[-1].instance  # the sampler
        role.identity = lambda: go_on.wait(60)
        with pytest.raises(PeerTimeoutError, match=r"^pids: the sampler"):
            await transport.pids()
        go_on.set()
        await transport.shutdown()

    asyncio.run(work())


def test_deadlines_travel_with_a_pickled_transport(ray: Any) -> None:
    handle = {"transport": "ray", "serves_reference": True, "cluster": "session-0"}
    given = RayTransport.from_handle(
        {**handle, "server": None}, timeout=math.inf, timeouts={"step": 3.0}
    )
    found = pickle.loads(pickle.dumps(given))
    assert (found._seconds("step"), found._seconds("fwd_bwd")) == (3.0, math.inf)


class StalledActor:
    """Its calls are answered by hand."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Future[Any]]] = []
        self.identity = SimpleNamespace(remote=lambda: SimpleNamespace(future=Future))
        self.call = SimpleNamespace(remote=self._called)

    def _called(self, op: str, *_: Any) -> Any:
        self.calls.append((op, Future()))
        return SimpleNamespace(future=lambda: self.calls[-1][1])


def test_an_actor_gets_one_op_at_a_time() -> None:
    actor = StalledActor()
    role = RayRole("trainer", actor)
    first, second, third = (role.submit(op) for op in ("forward", "step", "describe"))
    assert role.current == "forward" and not first.cancel() and second.cancel()
    assert [op for op, _ in actor.calls] == ["forward"]
    actor.calls[0][1].set_result({"result": 1})
    assert first.result(0) == 1 and role.current == "describe"
    actor.calls[1][1].set_exception(ValueError("as it is"))
    with pytest.raises(ValueError, match="as it is"):
        third.result(0)
    assert role.current is None and len(actor.calls) == 2


def test_many_ops_that_wait_for_an_actor_that_dies(ray: Any) -> None:
    """Each is answered at once then, inside the answer of the one before."""
    actor = StalledActor()
    role = RayRole("sampler", actor)
    waiting = [role.submit("generate") for _ in range(500)]
    dead: Future[Any] = Future()
    dead.set_exception(ray.exceptions.RayActorError("gone"))
    actor.call.remote = lambda *_: SimpleNamespace(future=lambda: dead)
    actor.calls[0][1].set_exception(ray.exceptions.RayActorError("gone"))
    for future in waiting:
        assert isinstance(future.exception(0), PeerLostError)


def timed_out(maybe_applied: bool) -> PeerTimeoutError:
    error = PeerTimeoutError("late")
    error.maybe_applied = maybe_applied  # type: ignore[attr-defined]
    return error


@pytest.mark.parametrize(
    ("op", "maybe_applied", "free"),
    [("fwd_bwd", True, False), ("fwd_bwd", False, True), ("step", True, True)],
)
def test_who_holds_the_trainer_after_a_deadline(op: str, maybe_applied: bool, free: bool) -> None:
    turn, first, second = TrainingTurn(), {"id": "1"}, {"id": "2"}
    with pytest.raises(PeerTimeoutError), turn.taken(op, first):
        raise timed_out(maybe_applied)
    assert (turn._holder is None) is free
    if free:
        with turn.taken("fwd_bwd", second):
            pass


def test_a_step_that_never_began_leaves_its_gradients() -> None:
    turn, client = TrainingTurn(), {"id": "1"}
    with turn.taken("fwd_bwd", client):
        pass
    with pytest.raises(PeerTimeoutError), turn.taken("step", client):
        raise timed_out(False)
    assert turn._holder is client
