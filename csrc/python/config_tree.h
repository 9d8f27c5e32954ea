/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARL_PYTHON_CONFIG_TREE_H
#define ARL_PYTHON_CONFIG_TREE_H

#include "python/state.h"

#include "core/arl_tree.h"

/*
 * Configurations between Python objects and trees. None, bool, int, float, str, dict, list and
 * tuple become nodes, OmegaConf containers are resolved into those; any other object is put into
 * the list `foreign` and comes back as it went in.
 */

/* A node for the object; NULL with an exception set. */
arl_node_t *arl_config_tree_read(arl_state_t *state, arl_tree_t *tree, PyObject *foreign,
                                 PyObject *object);

/* A new object for the node. `foreign` may be NULL when the tree was read from text. */
PyObject *arl_config_tree_write(const arl_node_t *node, PyObject *foreign);

/* An OmegaConf container as plain data; NULL without an exception when it is not one. */
PyObject *arl_config_omegaconf_to_plain(PyObject *object);

#endif
