# SPDX-License-Identifier: Apache-2.0
"""Hydra's config group `remote_backend`: `hydra.searchpath=[pkg://arctic_rl_c.integrations.verl.config]`."""
