#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# The run of run_gsm8k_grpo_arl_zorro_yes.sh without prompt sharing; see there.

ZORRO=False exec "$(dirname "${BASH_SOURCE[0]}")/run_gsm8k_grpo_arl_zorro_yes.sh" "$@"
