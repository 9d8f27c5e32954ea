/* SPDX-License-Identifier: Apache-2.0 */
/* What a normalised configuration may not say, and what it says in vain. */
#include "core/arl_config.h"

arl_status_t
arl_config_tree_check(const arl_tree_t *tree, arl_error_t *err)
{
    (void)tree;
    (void)err;
    return ARL_OK;
}

arl_status_t
arl_config_tree_warnings(arl_tree_t *tree, arl_node_t *list, arl_error_t *err)
{
    (void)tree;
    (void)list;
    (void)err;
    return ARL_OK;
}
