# SPDX-License-Identifier: Apache-2.0
"""How operations reach a server; one module each, imported only when asked for."""
