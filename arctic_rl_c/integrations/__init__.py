# SPDX-License-Identifier: Apache-2.0
"""Adapters that plug this package into training frameworks; importing one is what enables it."""
