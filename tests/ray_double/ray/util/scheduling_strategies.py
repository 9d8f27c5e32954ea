# SPDX-License-Identifier: Apache-2.0
from dataclasses import dataclass
from typing import Any


@dataclass
class NodeAffinitySchedulingStrategy:
    node_id: str
    soft: bool


@dataclass
class PlacementGroupSchedulingStrategy:
    placement_group: Any
    placement_group_bundle_index: int
