# SPDX-License-Identifier: Apache-2.0
"""As much of Ray's API as the transport uses, with actors as threads. Not Ray's code.

Arguments and answers are pickled on their way, so that what Ray could not carry fails here too.
An async actor gets a loop on its thread; any other runs one call after another.
"""

import asyncio
import inspect
import pickle
import queue
import threading
import time
from concurrent.futures import Future
from types import SimpleNamespace

from ray import exceptions, util

__all__ = ["exceptions", "util"]

state = SimpleNamespace(initialized=True, resources={"CPU": 2.0}, actors=[], objects={}, options=[])
state.session = "session-0"
state.reorders = False  # whether async actors start the last call first, as Ray may


def is_initialized():
    return state.initialized


def cluster_resources():
    return dict(state.resources)


def get_runtime_context():
    return SimpleNamespace(get_node_id=lambda: "node-0", get_session_name=lambda: state.session)


class ObjectRef:
    def __init__(self, future, key=None):
        self._future, self.key = future, key

    def future(self):
        return self._future

    def __await__(self):
        return asyncio.wrap_future(self._future).__await__()

    def __reduce__(self):
        return _find, (self.key,)


def put(value):
    future = Future()
    future.set_result(pickle.loads(pickle.dumps(value)))
    key = len(state.objects)
    state.objects[key] = ObjectRef(future, key)
    return state.objects[key]


def _find(key):
    return state.objects[key]


def get(reference, timeout=None):
    return reference.future().result(timeout)


class ActorHandle:
    def __init__(self, number):
        self.number = number

    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(name)
        return SimpleNamespace(remote=lambda *a, **k: state.actors[self.number].submit(name, a, k))


class Actor(threading.Thread):
    def __init__(self, cls, args, kwargs):
        super().__init__(daemon=True)
        self.requests, self.dead, self.open = queue.SimpleQueue(), None, []
        self.cls, self.args, self.kwargs = cls, *_travel(args, kwargs)
        self.is_async = any(inspect.iscoroutinefunction(f) for f in vars(cls).values())
        self.owned = []
        if isinstance(owner := threading.current_thread(), Actor):
            owner.owned.append(self)

    def submit(self, name, args, kwargs):
        future = Future()
        if self.dead is not None:
            future.set_exception(self.dead)
            return ObjectRef(future)
        self.open.append(future)
        self.requests.put((name, *_travel(args, kwargs), future))
        return ObjectRef(future)

    def run(self):
        self.instance = self.cls(*self.args, **self.kwargs)
        if self.is_async:
            asyncio.run(self.serve())
            return
        while (request := self.requests.get()) is not None:
            name, args, kwargs, future = request
            try:
                self.settle(future, getattr(self.instance, name)(*_resolve(args), **kwargs))
            except Exception as error:
                self.settle(future, error)

    async def serve(self):
        tasks = set()
        while (batch := await asyncio.to_thread(self.take))[-1] is not None:
            for request in batch:
                task = asyncio.create_task(self.answer(*request))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
        await asyncio.gather(*tasks)

    def take(self):
        batch = [self.requests.get()]
        if state.reorders:
            time.sleep(0.01)
            while batch[0] is not None and not self.requests.empty():
                batch.insert(0, self.requests.get())
        return [None] if batch[0] is None else batch

    async def answer(self, name, args, kwargs, future):
        try:
            self.settle(future, await getattr(self.instance, name)(*_resolve(args), **kwargs))
        except Exception as error:
            self.settle(future, error)

    def settle(self, future, outcome):
        if future.done():
            return
        self.open.remove(future)
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
        else:
            future.set_result(pickle.loads(pickle.dumps(outcome)))

    def die(self, text):
        if self.dead is not None:
            return
        self.dead = exceptions.RayActorError(text)
        for actor in self.owned:  # an actor ends with who created it
            actor.die("its owner died")
        for future in list(self.open):
            if not future.done():
                future.set_exception(self.dead)
        self.requests.put(None)


def _travel(args, kwargs):
    return pickle.loads(pickle.dumps((args, kwargs)))


def _resolve(args):
    """References that are arguments themselves; those inside lists stay."""
    return [get(arg) if isinstance(arg, ObjectRef) else arg for arg in args]


def remote(cls):
    def start(*args, **kwargs):
        actor = Actor(cls, args, kwargs)
        state.actors.append(actor)
        number = len(state.actors) - 1
        actor.start()
        return ActorHandle(number)

    def options(**given):
        state.options.append((cls.__name__, given))
        return SimpleNamespace(remote=start)

    return SimpleNamespace(remote=start, options=options)


def kill(handle):
    state.actors[handle.number].die("the actor was killed")
