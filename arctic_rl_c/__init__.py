# SPDX-License-Identifier: Apache-2.0
"""The fast, dependable client side of Arctic RL for verl: batches, payloads, weight sync in C."""

from arctic_rl_c._core import (
    ArcticError,
    ClosedError,
    ConfigError,
    PayloadError,
    PeerLostError,
    PeerTimeoutError,
    SyncStats,
    TornWeightsError,
    TransportUnavailableError,
    WeightMismatchError,
    WeightReceiver,
    WeightSender,
    WeightSyncError,
    WireError,
    WrongProcessError,
    left_pad,
    make_jagged,
    normalize_config,
    pad_prompt_response,
    shift_predict_next,
    thread_count,
)
from arctic_rl_c.weights import Binding, weight_norm

__version__ = "0.1.0"

__all__ = [
    "ArcticError",
    "Binding",
    "ClosedError",
    "ConfigError",
    "PayloadError",
    "PeerLostError",
    "PeerTimeoutError",
    "SyncStats",
    "TornWeightsError",
    "TransportUnavailableError",
    "WeightMismatchError",
    "WeightReceiver",
    "WeightSender",
    "WeightSyncError",
    "WireError",
    "WrongProcessError",
    "left_pad",
    "make_jagged",
    "normalize_config",
    "pad_prompt_response",
    "shift_predict_next",
    "thread_count",
    "weight_norm",
]
