# SPDX-License-Identifier: Apache-2.0
class RayActorError(Exception):
    pass
