/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARL_CORE_INTERP_H
#define ARL_CORE_INTERP_H

#include "core/arl_tree.h"

/*
 * Replaces every ${...} of the tree by its value, as OmegaConf.to_container(resolve=True) does:
 * absolute (${a.b[0]}) and relative (${.x}, ${..x}) names, alone or inside text, nested, with
 * `\${` for a literal one, and the resolvers oc.env, oc.select and oc.decode. Referring to a map
 * or list gives an independent copy.
 *
 * ARL_ERR_CONFIG names the place and the expression: an unknown key, a value that is still `???`,
 * a cycle (with the chain), a resolver that is not known here.
 */
enum { ARL_INTERP_CHAIN_MAX = 50 }; /* values that may lead to each other */

arl_status_t arl_tree_resolve(arl_tree_t *tree, arl_error_t *err);

#endif
