# SPDX-License-Identifier: Apache-2.0
class DistProfiler:
    def __init__(self, rank, config, tool_config):
        pass

    @staticmethod
    def annotate(**_):
        return lambda function: function


class DistProfilerExtension:
    def __init__(self, profiler):
        self.profiler = profiler
