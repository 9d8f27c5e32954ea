# SPDX-License-Identifier: Apache-2.0
"""A double of the first generation's client, written from its interface. Not its code."""
