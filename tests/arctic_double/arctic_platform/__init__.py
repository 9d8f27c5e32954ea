# SPDX-License-Identifier: Apache-2.0
"""A double of the final generation's client, written from its interface. Not its code."""

__version__ = "9.8"
