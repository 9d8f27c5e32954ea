# SPDX-License-Identifier: Apache-2.0
"""Replicas, their modes and their registry, by the contract."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar


@dataclass
class TokenOutput:
    token_ids: list
    log_probs: Any = None
    routed_experts: Any = None
    stop_reason: Any = None
    num_preempted: Any = None
    extra_fields: dict = field(default_factory=dict)


class RolloutMode(Enum):
    HYBRID = "hybrid"
    COLOCATED = "colocated"
    STANDALONE = "standalone"


class RolloutReplica:
    def __init__(self, replica_rank, config, model_config, gpus_per_node=8, is_reward_model=False):
        self.replica_rank, self.config, self.model_config = replica_rank, config, model_config
        self.gpus_per_node, self.is_reward_model = gpus_per_node, is_reward_model
        self.rollout_mode = RolloutMode.HYBRID
        self.servers = []
        self._server_handle = None
        self._server_address = None


class RolloutReplicaRegistry:
    loaders: ClassVar[dict] = {}

    @classmethod
    def register(cls, name, loader):
        cls.loaders[name] = loader

    @classmethod
    def get(cls, name):
        if name not in cls.loaders:
            raise ValueError(f"Unknown rollout mode: {name}")
        return cls.loaders[name]()
