/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARL_CORE_OVERRIDE_H
#define ARL_CORE_OVERRIDE_H

#include "core/arl_tree.h"

/*
 * Hydra's command-line overrides on a tree that is not resolved yet:
 *
 *   a.b=1      sets a key that is there, or that the schema knows
 *   +a.b=1     adds a key that is not there
 *   ++a.b=1    either
 *   ~a.b       removes a key; ~a.b=1 only if that is its value
 *
 * Values follow Hydra's rules, not YAML's: `yes` is text, {a:1} needs no space. A map given for a
 * map is merged into it, everything else replaces. Sweeps, functions and config groups are
 * refused.
 */
arl_status_t arl_override_apply(arl_tree_t *tree, const char *text, size_t size, arl_error_t *err);

#endif
