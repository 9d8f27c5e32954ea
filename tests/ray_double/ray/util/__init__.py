# SPDX-License-Identifier: Apache-2.0
from types import SimpleNamespace

groups = []


def placement_group(bundles, strategy):
    groups.append(SimpleNamespace(bundles=bundles, strategy=strategy, removed=False))
    return groups[-1]


def remove_placement_group(group):
    group.removed = True
