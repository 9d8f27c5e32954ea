/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARL_CORE_LITERAL_H
#define ARL_CORE_LITERAL_H

#include "core/arl_tree.h"

/*
 * What a plain (unquoted) YAML scalar means, by the rules of the loader that OmegaConf and Hydra
 * use, and how Python would print it again.
 *
 *   null    ~ null Null NULL and nothing
 *   bool    yes no true false on off, in lower case, Capitalised or in UPPER CASE
 *   int     12, -1_000, 0b101, 017 (octal), 0x1F, 1:30 (base 60)
 *   float   1.5, .5, 1e-6, 1E6, 1_0.5, 1:30.5 (base 60), .inf, -.Inf, .NaN
 *   text    everything else, dates and 0o17 included
 *
 * Digits are read in the C locale whatever the process has set.
 */

/* Sets the kind and value of `node`, whose place is used in messages. */
arl_status_t arl_literal_read(arl_tree_t *tree, const char *data, size_t size, arl_node_t *node,
                              arl_error_t *err);

/*
 * The same for a bare word of an interpolation argument or an override, where fewer words are
 * special: null, true, false, inf and nan in any case, ints and floats in decimal (1_000, -2,
 * 1.5, 1e-6, 1.); 007, 0x1F, yes and on are text.
 */
arl_status_t arl_literal_read_word(arl_tree_t *tree, const char *data, size_t size,
                                   arl_node_t *node, arl_error_t *err);

/* str(value) of Python: True, None, 1e-06, text as it is. Always terminates `out`; false when it
 * was cut. */
bool arl_literal_format(const arl_node_t *node, char *out, size_t size);

#endif
