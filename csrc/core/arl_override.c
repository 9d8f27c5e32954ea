/* SPDX-License-Identifier: Apache-2.0 */
#include "core/arl_override.h"

#include "core/arl_config.h"
#include "core/arl_expr.h"
#include "core/arl_literal.h"

#include <stdio.h>
#include <string.h>

typedef enum override_kind {
    OVERRIDE_CHANGE,
    OVERRIDE_ADD,
    OVERRIDE_FORCE,
    OVERRIDE_REMOVE,
} override_kind_t;

typedef struct override {
    arl_tree_t *tree;
    override_kind_t kind;
    arl_string_t path; /* a.b.c, terminated */
    arl_node_t *value; /* NULL: ~key without a value */
    arl_node_t place;  /* "override '...'" */
    arl_error_t *err;
} override_t;

/* ---- reading ----------------------------------------------------------------------------------
 */

static bool
is_path_char(char c)
{
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
           (c != '\0' && strchr("_-$.", c) != NULL);
}

static arl_status_t
check_path(const override_t *override)
{
    const char *path = override->path.data;

    if (override->path.size == 0) {
        return arl_tree_fail(override->tree, &override->place, override->err,
                             "no key; an override is key=value, +key=value, ++key=value or ~key");
    }
    if (strpbrk(path, "@/:") != NULL) {
        return arl_tree_fail(override->tree, &override->place, override->err,
                             "choosing config groups is Hydra's business and is not done here");
    }
    for (size_t i = 0; i < override->path.size; i++) {
        if (!is_path_char(path[i])) {
            return arl_tree_fail(override->tree, &override->place, override->err,
                                 "'%.100s' is not a key", path);
        }
    }
    if (path[0] == '.' || path[override->path.size - 1] == '.' || strstr(path, "..") != NULL) {
        return arl_tree_fail(override->tree, &override->place, override->err,
                             "'%.100s' has an empty part", path);
    }
    return ARL_OK;
}

/* Splits [+|++|~]key[=value]. */
static arl_status_t
parse(override_t *override, const char *text, size_t size)
{
    const char *end = text + size, *equals;
    arl_status_t status;
    arl_string_t value;

    override->kind = OVERRIDE_CHANGE;
    if (*text == '~') {
        override->kind = OVERRIDE_REMOVE;
        text++;
    }
    else if (*text == '+') {
        override->kind = text[1] == '+' ? OVERRIDE_FORCE : OVERRIDE_ADD;
        text += text[1] == '+' ? 2 : 1;
    }
    equals = memchr(text, '=', (size_t)(end - text));
    if (equals == NULL && override->kind != OVERRIDE_REMOVE) {
        return arl_tree_fail(override->tree, &override->place, override->err,
                             "no '='; an override is key=value, +key=value, ++key=value or ~key");
    }
    ARL_CHECK_GOTO(status,
                   arl_tree_text(override->tree, text,
                                 (size_t)((equals == NULL ? end : equals) - text), &override->path,
                                 override->err),
                   out);
    ARL_CHECK_GOTO(status, check_path(override), out);
    if (equals != NULL) {
        ARL_CHECK_GOTO(status,
                       arl_tree_text(override->tree, equals + 1, (size_t)(end - equals - 1), &value,
                                     override->err),
                       out);
        status = arl_expr_override(override->tree, &override->place, &value, &override->value,
                                   override->err);
    }
out:
    return status;
}

/* ---- applying ---------------------------------------------------------------------------------
 */

/* One step down: the pair of a map, or the slot of a list. */
static arl_node_t **
child_slot(arl_node_t *node, const char *step, size_t size)
{
    if (node->kind == ARL_NODE_MAP) {
        arl_pair_t *pair = arl_map_find(node, step, size);

        return pair == NULL ? NULL : &pair->value;
    }
    if (node->kind == ARL_NODE_LIST && size > 0 && size < 6) {
        size_t index = 0;

        for (size_t i = 0; i < size; i++) {
            if (step[i] < '0' || step[i] > '9') {
                return NULL;
            }
            index = index * 10 + (size_t)(step[i] - '0');
        }
        return index < node->as.list.count ? &node->as.list.items[index] : NULL;
    }
    return NULL;
}

static arl_node_t **
slot_at(arl_node_t *node, const char *path)
{
    arl_node_t **slot = NULL;

    for (;;) {
        size_t size = strcspn(path, ".");

        slot = child_slot(node, path, size);
        if (slot == NULL || path[size] == '\0') {
            return slot;
        }
        node = *slot;
        path += size + 1;
    }
}

/* Later maps win key by key; everything else is replaced. */
static arl_status_t
merge_map(const override_t *override, arl_node_t *to, const arl_node_t *from)
{
    for (size_t i = 0; i < from->as.map.count; i++) {
        const arl_pair_t *pair = &from->as.map.pairs[i];
        const arl_pair_t *own = arl_map_find_node(to, pair->key);
        arl_status_t status;

        if (own != NULL && own->value->kind == ARL_NODE_MAP && pair->value->kind == ARL_NODE_MAP) {
            status = merge_map(override, own->value, pair->value);
        }
        else {
            status = arl_map_set_node(override->tree, to, pair->key, pair->value, override->err);
        }
        if (status != ARL_OK) {
            return status;
        }
    }
    return ARL_OK;
}

/* The first value on the way that cannot hold the next key, or NULL. */
static const arl_node_t *
obstacle(const arl_node_t *node, const char *path)
{
    for (;;) {
        size_t size = strcspn(path, ".");
        const arl_pair_t *pair;

        if (node->kind == ARL_NODE_NULL) {
            return NULL;
        }
        if (node->kind != ARL_NODE_MAP) {
            return node;
        }
        pair = arl_map_find(node, path, size);
        if (pair == NULL || path[size] == '\0') {
            return NULL;
        }
        node = pair->value;
        path += size + 1;
    }
}

static arl_status_t
put(const override_t *override, arl_node_t **slot)
{
    const arl_node_t *blocked = obstacle(override->tree->root, override->path.data);
    arl_node_t *parent;
    char path[256];

    if (slot == NULL && blocked != NULL) {
        arl_node_path(blocked, path, sizeof(path));
        return arl_tree_fail(override->tree, &override->place, override->err,
                             "%s is %s and cannot hold keys", path, arl_node_kind_name(blocked));
    }
    if (slot == NULL) {
        return arl_node_put(override->tree, override->tree->root, override->path.data,
                            override->value, override->err);
    }
    if ((*slot)->kind == ARL_NODE_MAP && override->value->kind == ARL_NODE_MAP) {
        return merge_map(override, *slot, override->value);
    }
    parent = (*slot)->parent;
    *slot = override->value;
    override->value->parent = parent;
    return ARL_OK;
}

static arl_status_t
no_such_key(const override_t *override)
{
    const char *path = override->path.data;
    char meant[512];

    if (strncmp(path, "remote_backend.", 15) == 0) {
        arl_config_suggest(path + 15, ARL_FORM_OPEN, meant, sizeof(meant));
        return arl_tree_fail(override->tree, &override->place, override->err,
                             "there is no key %s; %s", path, meant);
    }
    return arl_tree_fail(override->tree, &override->place, override->err,
                         "there is no key %s; to add it, write +%s=...", path, path);
}

static bool
same_scalar(const arl_node_t *a, const arl_node_t *b)
{
    char x[256], y[256];

    return a->kind == b->kind && a->kind != ARL_NODE_LIST && a->kind != ARL_NODE_MAP &&
           arl_literal_format(a, x, sizeof(x)) && arl_literal_format(b, y, sizeof(y)) &&
           strcmp(x, y) == 0;
}

static arl_status_t
take_away(const override_t *override, arl_node_t **slot)
{
    arl_node_t *parent;
    char shown[128];

    if (slot == NULL) {
        return arl_tree_fail(override->tree, &override->place, override->err,
                             "there is no key %s to remove", override->path.data);
    }
    parent = (*slot)->parent;
    if (override->value != NULL && !same_scalar(*slot, override->value)) {
        arl_node_show(*slot, shown, sizeof(shown));
        return arl_tree_fail(override->tree, &override->place, override->err,
                             "not removed: its value is %s", shown);
    }
    if (parent->kind != ARL_NODE_MAP) {
        return arl_tree_fail(override->tree, &override->place, override->err,
                             "an item of a list cannot be removed; set the whole list");
    }
    /* The slot is the value of a pair of its parent. */
    for (size_t i = 0; i < parent->as.map.count; i++) {
        if (&parent->as.map.pairs[i].value == slot) {
            arl_map_remove(parent, &parent->as.map.pairs[i]);
            break;
        }
    }
    return ARL_OK;
}

arl_status_t
arl_override_apply(arl_tree_t *tree, const char *text, size_t size, arl_error_t *err)
{
    override_t override = {.tree = tree, .err = err};
    char shown[104], name[128];
    arl_node_t **slot;
    arl_status_t status;

    (void)arl_text_show(text, size, shown, sizeof(shown));
    (void)snprintf(name, sizeof(name), "override '%s'", shown);
    ARL_CHECK_GOTO(status, arl_tree_source(tree, name, &override.place.source, err), out);
    if (memchr(text, '\0', size) != NULL) {
        return arl_tree_fail(tree, &override.place, err,
                             "no key and no bare value has a NUL character");
    }
    ARL_CHECK_GOTO(status, parse(&override, text, size), out);
    slot = slot_at(tree->root, override.path.data);
    switch (override.kind) {
    case OVERRIDE_REMOVE:
        return take_away(&override, slot);
    case OVERRIDE_CHANGE:
        if (slot == NULL && !arl_config_path_known(override.path.data)) {
            return no_such_key(&override);
        }
        break;
    case OVERRIDE_ADD:
        if (slot != NULL && (*slot)->kind != ARL_NODE_NULL &&
            override.value->kind != ARL_NODE_MAP && override.value->kind != ARL_NODE_LIST) {
            return arl_tree_fail(tree, &override.place, err,
                                 "%s is there already; change it with %s=... or ++%s=...",
                                 override.path.data, override.path.data, override.path.data);
        }
        break;
    case OVERRIDE_FORCE:
        break;
    }
    status = put(&override, slot);
out:
    return status;
}
