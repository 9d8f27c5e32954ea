# SPDX-License-Identifier: Apache-2.0
import functools
import inspect
from enum import Enum


class Dispatch(Enum):
    ONE_TO_ALL = "one_to_all"


def make_nd_compute_dataproto_dispatch_fn(mesh_name):
    return {"mesh": mesh_name}


def register(dispatch_mode, blocking=True):
    def decorate(function):
        assert not inspect.iscoroutinefunction(function)

        @functools.wraps(function)
        def inner(*args, **kwargs):
            return function(*args, **kwargs)

        inner.dispatch = (dispatch_mode, blocking)
        return inner

    return decorate
