# SPDX-License-Identifier: Apache-2.0
def omega_conf_to_dataclass(config):
    return config
