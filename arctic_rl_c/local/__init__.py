# SPDX-License-Identifier: Apache-2.0
"""The embedded server: a trainer and a sampler process on one machine."""
