# SPDX-License-Identifier: Apache-2.0
"""What users of the first generation's client see."""

from arctic_training.rl.client import ArcticRLClientConfig, create_arctic_rl_client

__all__ = ["ArcticRLClientConfig", "create_arctic_rl_client"]
