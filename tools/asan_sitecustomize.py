# SPDX-License-Identifier: Apache-2.0
"""Copied to .cache/asan/sitecustomize.py, so that every Python of `make asan` imports it.

Beside AddressSanitizer, gcc's UBSan runtime ignores log_path and reports to stderr, where the
report of a child process is lost. This points it to the file where the others go.
"""

import ctypes
import os

if "ARL_SANITIZER_REPORT" in os.environ:
    _ubsan = ctypes.CDLL("libubsan.so.1")
    _ubsan.__sanitizer_set_report_path(os.environ["ARL_SANITIZER_REPORT"].encode())
