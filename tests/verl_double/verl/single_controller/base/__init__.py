# SPDX-License-Identifier: Apache-2.0


class Worker:
    rank = 0

    def __init__(self):
        self.meshes = {}

    def _register_dispatch_collect_info(self, mesh, dp_rank, is_collect):
        self.meshes[mesh] = (dp_rank, is_collect)
