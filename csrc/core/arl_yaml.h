/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARL_CORE_YAML_H
#define ARL_CORE_YAML_H

#include "core/arl_tree.h"

/*
 * One YAML document to a tree, through libyaml's events. Plain scalars mean what they mean to
 * OmegaConf (arl_literal.h); quoted and block scalars are text.
 *
 * Refused, with the line: keys given twice (both lines), null or nested keys, tags of any kind,
 * several documents, anchors that are defined twice or contain themselves, input that is not
 * UTF-8, and whatever passes the limits of arl_tree.h. Aliases become independent copies. `<<`
 * merges a map or a list of maps: own keys win over merged ones, earlier maps over later ones.
 */
enum { ARL_YAML_INPUT_MAX = 8 << 20 };

/* Sets tree->root; an empty document is a null node. `name` stands for the input in messages. */
arl_status_t arl_yaml_read(arl_tree_t *tree, const char *data, size_t size, const char *name,
                           arl_error_t *err);

/* The same from a file. ARL_ERR_SYSTEM when it cannot be read. */
arl_status_t arl_yaml_read_file(arl_tree_t *tree, const char *path, arl_error_t *err);

#endif
