/* SPDX-License-Identifier: Apache-2.0 */
#include "core/arl_interp.h"

#include "core/arl_expr.h"
#include "core/arl_json.h"
#include "core/arl_literal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct interp {
    arl_tree_t *tree;
    const arl_node_t *chain[ARL_INTERP_CHAIN_MAX]; /* being resolved, outermost first */
    int chain_size;
    arl_error_t *err;
} interp_t;

static arl_status_t materialize(interp_t *interp, arl_node_t *node, int depth);

/* The node that messages are about: the value being resolved. */
static const arl_node_t *
site_of(const interp_t *interp)
{
    return interp->chain_size == 0 ? NULL : interp->chain[interp->chain_size - 1];
}

/* a.b -> c.d -> a.b */
static arl_status_t
cycle_found(const interp_t *interp, const arl_node_t *again)
{
    char chain[640] = "", path[128];
    size_t used = 0;

    for (int i = 0; i <= interp->chain_size; i++) {
        arl_node_path(i < interp->chain_size ? interp->chain[i] : again, path, sizeof(path));
        if (used + strlen(path) + 8 < sizeof(chain)) {
            used += (size_t)snprintf(chain + used, sizeof(chain) - used, "%s%s",
                                     i == 0 ? "" : " -> ", path);
        }
    }
    return arl_tree_fail_at(interp->tree, again, interp->err,
                            "interpolations lead back to themselves: %s", chain);
}

static bool
is_missing(const arl_node_t *node)
{
    return node->kind == ARL_NODE_TEXT && node->as.text.size == 3 &&
           memcmp(node->as.text.data, "\?\?\?", 3) == 0;
}

static bool
is_open(const arl_node_t *node)
{
    return node->kind == ARL_NODE_TEXT && node->resolving != ARL_RESOLVE_DONE &&
           arl_expr_is_interpolated(&node->as.text);
}

/* ---- names --------------------------------------------------------------------------------- */

static const arl_expr_host_t host_callbacks;

/* What a value is once its own interpolation is followed. The node belongs to the tree; what is
 * below it may still hold interpolations. */
static arl_status_t
dereference(interp_t *interp, arl_node_t *node, arl_node_t **value_p)
{
    arl_expr_host_t host = host_callbacks;
    arl_status_t status;

    if (node->kind == ARL_NODE_TEXT && node->resolved != NULL) {
        *value_p = node->resolved;
        return ARL_OK;
    }
    if (!is_open(node)) {
        *value_p = node;
        return ARL_OK;
    }
    if (node->resolving == ARL_RESOLVE_BUSY) {
        return cycle_found(interp, node);
    }
    if (interp->chain_size == ARL_INTERP_CHAIN_MAX) {
        return arl_tree_fail_at(interp->tree, node, interp->err,
                                "interpolations lead through more than %d values",
                                ARL_INTERP_CHAIN_MAX);
    }
    interp->chain[interp->chain_size++] = node;
    node->resolving = ARL_RESOLVE_BUSY;
    host.context = interp;
    status = arl_expr_text(interp->tree, node, &node->as.text, &host, value_p, interp->err);
    if (status == ARL_OK) {
        node->resolved = *value_p;
        node->resolving = ARL_RESOLVE_DONE;
    }
    interp->chain_size--;
    return status;
}

/* The next step of a.b[c].d after the leading dots. False at the end. */
static bool
next_step(const char **p, const char *end, arl_string_t *step_p)
{
    const char *start = *p, *stop;

    if (start == end) {
        return false;
    }
    if (*start == '[') {
        stop = memchr(start, ']', (size_t)(end - start));
        *step_p = (arl_string_t){start + 1, (size_t)((stop == NULL ? end : stop) - start - 1)};
        *p = stop == NULL ? end : stop + 1;
    }
    else {
        for (stop = start; stop < end && *stop != '.' && *stop != '['; stop++) {
        }
        *step_p = (arl_string_t){start, (size_t)(stop - start)};
        *p = stop;
    }
    if (*p < end && **p == '.') {
        ++*p;
    }
    return true;
}

static arl_node_t *
list_item(const arl_node_t *list, const arl_string_t *step)
{
    size_t index = 0;

    if (step->size == 0 || step->size > 9) {
        return NULL;
    }
    for (size_t i = 0; i < step->size; i++) {
        if (step->data[i] < '0' || step->data[i] > '9') {
            return NULL;
        }
        index = index * 10 + (size_t)(step->data[i] - '0');
    }
    return index < list->as.list.count ? list->as.list.items[index] : NULL;
}

/* Finds a.b[0] from the root, or .b and ..b from what `site` is in. `*value_p` is NULL when there
 * is no such value. */
static arl_status_t
find(interp_t *interp, const arl_node_t *site, const char *path, size_t size, arl_node_t **value_p)
{
    arl_node_t *node = interp->tree->root;
    const char *p = path, *end = path + size;
    arl_status_t status;
    arl_string_t step;

    *value_p = NULL;
    if (p < end && *p == '.') {
        node = site->parent;
        for (p++; node != NULL && p < end && *p == '.'; p++) {
            node = node->parent;
        }
        if (node == NULL) {
            return arl_tree_fail_at(interp->tree, site, interp->err,
                                    "'%.160s' leads above the root", path);
        }
    }
    while (next_step(&p, end, &step)) {
        arl_pair_t *pair;

        status = dereference(interp, node, &node);
        if (status != ARL_OK) {
            return status;
        }
        if (node->kind == ARL_NODE_LIST) {
            node = list_item(node, &step);
        }
        else {
            pair = node->kind == ARL_NODE_MAP ? arl_map_find(node, step.data, step.size) : NULL;
            node = pair == NULL ? NULL : pair->value;
        }
        if (node == NULL) {
            return ARL_OK;
        }
    }
    return dereference(interp, node, value_p);
}

static arl_status_t
host_lookup(void *context, const char *path, size_t size, arl_node_t **value_p)
{
    interp_t *interp = context;
    const arl_node_t *site = site_of(interp);
    arl_status_t status;

    status = find(interp, site, path, size, value_p);
    if (status != ARL_OK) {
        return status;
    }
    if (*value_p == NULL) {
        return arl_tree_fail_at(interp->tree, site, interp->err, "${%.160s}: there is no such key",
                                path);
    }
    if (is_missing(*value_p)) {
        return arl_tree_fail_at(interp->tree, site, interp->err,
                                "${%.160s}: that value is mandatory and still '\?\?\?'", path);
    }
    return ARL_OK;
}

static arl_status_t
host_own(void *context, arl_node_t *value, arl_node_t **copy_p)
{
    interp_t *interp = context;
    arl_status_t status = materialize(interp, value, 0);

    return status == ARL_OK ? arl_node_copy(interp->tree, value, 0, copy_p, interp->err) : status;
}

/* ---- resolvers ------------------------------------------------------------------------------- */

static arl_status_t
want_text(const interp_t *interp, const char *resolver, const arl_node_t *arg)
{
    if (arg->kind == ARL_NODE_TEXT) {
        return ARL_OK;
    }
    return arl_tree_fail_at(interp->tree, site_of(interp), interp->err, "%s wants text, found %s",
                            resolver, arl_node_kind_name(arg));
}

/* oc.env:NAME[,default] */
static arl_status_t
resolve_env(interp_t *interp, arl_node_t *const *args, size_t count, arl_node_t **value_p)
{
    const arl_node_t *site = site_of(interp);
    arl_status_t status = want_text(interp, "oc.env", args[0]);
    const char *value;
    char number[64];

    if (status != ARL_OK) {
        return status;
    }
    value = getenv(args[0]->as.text.data);
    if (value == NULL && count == 1) {
        return arl_tree_fail_at(interp->tree, site, interp->err,
                                "the environment variable %.160s is not set and has no default",
                                args[0]->as.text.data);
    }
    if (value == NULL && (args[1]->kind == ARL_NODE_NULL || args[1]->kind == ARL_NODE_TEXT)) {
        *value_p = args[1];
        return ARL_OK;
    }
    if (value == NULL) { /* str(default) */
        if (args[1]->kind == ARL_NODE_LIST || args[1]->kind == ARL_NODE_MAP ||
            !arl_literal_format(args[1], number, sizeof(number))) {
            return arl_tree_fail_at(interp->tree, site, interp->err,
                                    "oc.env wants text as its default, found %s",
                                    arl_node_kind_name(args[1]));
        }
        value = number;
    }
    if (!arl_utf8_valid(value, strlen(value))) {
        return arl_tree_fail_at(interp->tree, site, interp->err,
                                "the environment variable %.160s is not UTF-8",
                                args[0]->as.text.data);
    }
    status = arl_node_new_text(interp->tree, value, strlen(value), site, value_p, interp->err);
    if (status == ARL_OK) {
        (*value_p)->resolving = ARL_RESOLVE_DONE;
    }
    return status;
}

/* oc.select:path[,default] */
static arl_status_t
resolve_select(interp_t *interp, arl_node_t *const *args, size_t count, arl_node_t **value_p)
{
    arl_status_t status = want_text(interp, "oc.select", args[0]);

    if (status == ARL_OK) {
        status =
            find(interp, site_of(interp), args[0]->as.text.data, args[0]->as.text.size, value_p);
    }
    if (status != ARL_OK || (*value_p != NULL && !is_missing(*value_p))) {
        return status;
    }
    if (count == 2) {
        *value_p = args[1];
        return ARL_OK;
    }
    return arl_node_new(interp->tree, ARL_NODE_NULL, site_of(interp), value_p, interp->err);
}

/* oc.decode:text */
static arl_status_t
resolve_decode(interp_t *interp, arl_node_t *const *args, size_t count, arl_node_t **value_p)
{
    arl_expr_host_t host = host_callbacks;
    arl_status_t status;

    (void)count;
    if (args[0]->kind == ARL_NODE_NULL) {
        *value_p = args[0];
        return ARL_OK;
    }
    status = want_text(interp, "oc.decode", args[0]);
    if (status != ARL_OK) {
        return status;
    }
    host.context = interp;
    return arl_expr_element(interp->tree, site_of(interp), &args[0]->as.text, &host, value_p,
                            interp->err);
}

typedef arl_status_t (*resolver_fn)(interp_t *interp, arl_node_t *const *args, size_t count,
                                    arl_node_t **value_p);

static const struct {
    const char *name;
    resolver_fn run;
    size_t min, max;
} resolvers[] = {
    {"oc.env", resolve_env, 1, 2},
    {"oc.select", resolve_select, 1, 2},
    {"oc.decode", resolve_decode, 1, 1},
};

static arl_status_t
host_resolver(void *context, const char *name, size_t size, arl_node_t *const *args, size_t count,
              arl_node_t **value_p)
{
    interp_t *interp = context;

    for (size_t i = 0; i < sizeof(resolvers) / sizeof(resolvers[0]); i++) {
        if (strlen(resolvers[i].name) != size || memcmp(resolvers[i].name, name, size) != 0) {
            continue;
        }
        if (count < resolvers[i].min || count > resolvers[i].max) {
            return arl_tree_fail_at(interp->tree, site_of(interp), interp->err,
                                    "%s takes %zu to %zu arguments, found %zu", resolvers[i].name,
                                    resolvers[i].min, resolvers[i].max, count);
        }
        return resolvers[i].run(interp, args, count, value_p);
    }
    return arl_tree_fail_at(interp->tree, site_of(interp), interp->err,
                            "the resolver '%.*s' is not known here, only oc.env, oc.select and "
                            "oc.decode; resolve with OmegaConf and give the result to "
                            "normalize_config",
                            (int)(size < 80 ? size : 80), name);
}

static const arl_expr_host_t host_callbacks = {NULL, host_lookup, host_resolver, host_own};

/* ---- whole values ------------------------------------------------------------------------------
 */

/* The value takes the node's place; what is below a container is copied. */
static arl_status_t
replace(interp_t *interp, arl_node_t *node, arl_node_t *value, int depth)
{
    arl_status_t status;
    arl_node_t *copy;

    status = materialize(interp, value, depth);
    if (status == ARL_OK) {
        status = arl_node_copy(interp->tree, value, depth, &copy, interp->err);
    }
    if (status != ARL_OK) {
        return status;
    }
    node->kind = copy->kind;
    node->base = copy->base;
    node->quoted = copy->quoted;
    node->as = copy->as;
    node->resolving = ARL_RESOLVE_DONE;
    node->resolved = NULL;
    for (size_t i = 0; node->kind == ARL_NODE_LIST && i < node->as.list.count; i++) {
        node->as.list.items[i]->parent = node;
    }
    for (size_t i = 0; node->kind == ARL_NODE_MAP && i < node->as.map.count; i++) {
        node->as.map.pairs[i].key->parent = node;
        node->as.map.pairs[i].value->parent = node;
    }
    return ARL_OK;
}

static arl_status_t
materialize_children(interp_t *interp, const arl_node_t *node, int depth)
{
    arl_status_t status = ARL_OK;

    for (size_t i = 0; node->kind == ARL_NODE_LIST && i < node->as.list.count; i++) {
        ARL_CHECK_GOTO(status, materialize(interp, node->as.list.items[i], depth), out);
    }
    for (size_t i = 0; node->kind == ARL_NODE_MAP && i < node->as.map.count; i++) {
        ARL_CHECK_GOTO(status, materialize(interp, node->as.map.pairs[i].value, depth), out);
    }
out:
    return status;
}

/* Resolves the node and all below it, in place. */
static arl_status_t
materialize(interp_t *interp, arl_node_t *node, int depth)
{
    arl_status_t status;
    arl_node_t *value;

    if (node->kind == ARL_NODE_TEXT) {
        if (!is_open(node) && node->resolved == NULL) {
            return ARL_OK;
        }
        status = dereference(interp, node, &value);
        return status == ARL_OK && value != node ? replace(interp, node, value, depth) : status;
    }
    if (node->kind != ARL_NODE_LIST && node->kind != ARL_NODE_MAP) {
        return ARL_OK;
    }
    if (node->resolving == ARL_RESOLVE_BUSY) {
        return cycle_found(interp, node);
    }
    if (depth >= ARL_TREE_DEPTH_MAX) {
        return arl_tree_fail_at(interp->tree, node, interp->err,
                                "nested more than %d levels deep once interpolations are "
                                "replaced",
                                ARL_TREE_DEPTH_MAX);
    }
    if (node->resolving == ARL_RESOLVE_NEW) {
        node->resolving = ARL_RESOLVE_BUSY;
        status = materialize_children(interp, node, depth + 1);
        if (status != ARL_OK) {
            return status;
        }
        node->resolving = ARL_RESOLVE_DONE;
    }
    return ARL_OK;
}

arl_status_t
arl_tree_resolve(arl_tree_t *tree, arl_error_t *err)
{
    interp_t interp = {.tree = tree, .err = err};

    return materialize(&interp, tree->root, 0);
}
