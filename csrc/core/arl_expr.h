/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARL_CORE_EXPR_H
#define ARL_CORE_EXPR_H

#include "core/arl_tree.h"

/*
 * The small language inside configuration text: OmegaConf's interpolations, ${a.b[0]},
 * ${..sibling}, ${resolver:arg,...}, and the values of resolver arguments and of Hydra's
 * command-line overrides, which look alike: numbers, true, null, bare and quoted words, [lists],
 * {maps: of them}. Values are computed while reading; what names and resolvers mean is the host's
 * business.
 */
typedef struct arl_expr_host {
    void *context;
    /* The value at a path, as written between ${ and }. The node may belong to the tree. */
    arl_status_t (*lookup)(void *context, const char *path, size_t size, arl_node_t **value_p);
    arl_status_t (*resolver)(void *context, const char *name, size_t size, arl_node_t *const *args,
                             size_t count, arl_node_t **value_p);
    /* A copy of a looked-up value that can become part of another. */
    arl_status_t (*own)(void *context, arl_node_t *value, arl_node_t **copy_p);
} arl_expr_host_t;

enum { ARL_EXPR_ARGS_MAX = 8, ARL_EXPR_DEPTH_MAX = 16 };

/* True when there is something to evaluate in the text. */
bool arl_expr_is_interpolated(const arl_string_t *text);

/*
 * Evaluates text: a lone interpolation gives its value, anything else gives text with the values
 * in it as Python prints them. `\${` stands for `${`. `site` is the node that messages are about.
 */
arl_status_t arl_expr_text(arl_tree_t *tree, const arl_node_t *site, const arl_string_t *text,
                           const arl_expr_host_t *host, arl_node_t **value_p, arl_error_t *err);

/* Evaluates one value, as in a resolver argument. */
arl_status_t arl_expr_element(arl_tree_t *tree, const arl_node_t *site, const arl_string_t *text,
                              const arl_expr_host_t *host, arl_node_t **value_p, arl_error_t *err);

/* Reads one value by Hydra's rules for overrides: interpolations stay text, white space around a
 * value is dropped, sweeps and functions are refused. Empty text is an empty text. */
arl_status_t arl_expr_override(arl_tree_t *tree, const arl_node_t *site, const arl_string_t *text,
                               arl_node_t **value_p, arl_error_t *err);

#endif
