/* SPDX-License-Identifier: Apache-2.0 */
#include "core/arl_tree.h"

#include "core/arl_literal.h"

#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BLOCK_BYTES = 16 * 1024, FIRST_CAPACITY = 4, WHERE_MAX = 320, PATH_MAX_SHOWN = 320 };

struct arl_tree_block {
    struct arl_tree_block *next;
    size_t size;
    size_t used;
    _Alignas(max_align_t) char data[];
};

/* ---- memory ---------------------------------------------------------------------------- */

arl_status_t
arl_tree_alloc(arl_tree_t *tree, size_t size, void **memory_p, arl_error_t *err)
{
    const size_t align = _Alignof(max_align_t);
    struct arl_tree_block *block = tree->blocks;
    size_t want, room;

    if (size > ARL_TREE_BYTES_MAX - tree->bytes) {
        (void)arl_error_set(err, ARL_ERR_CONFIG, tree->operation,
                            "the configuration grows beyond %zu MiB: it is not one, or its "
                            "aliases and interpolations multiply",
                            ARL_TREE_BYTES_MAX >> 20);
        return ARL_ERR_CONFIG; /* a constant, so that compilers see it is no success */
    }
    want = (size + align - 1) / align * align;
    if (block == NULL || block->size - block->used < want) {
        room = want > BLOCK_BYTES ? want : BLOCK_BYTES;
        block = malloc(sizeof(*block) + room);
        if (block == NULL) {
            (void)arl_error_set(err, ARL_ERR_NOMEM, tree->operation, "out of memory");
            return ARL_ERR_NOMEM;
        }
        block->size = room;
        block->used = 0;
        block->next = tree->blocks;
        tree->blocks = block;
    }
    *memory_p = block->data + block->used;
    block->used += want;
    tree->bytes += size;
    return ARL_OK;
}

arl_status_t
arl_tree_init(arl_tree_t *tree, const char *operation, arl_error_t *err)
{
    int32_t source;

    memset(tree, 0, sizeof(*tree));
    tree->operation = operation;
    return arl_tree_source(tree, "config", &source, err);
}

void
arl_tree_free(arl_tree_t *tree)
{
    struct arl_tree_block *block = tree->blocks;

    while (block != NULL) {
        struct arl_tree_block *next = block->next;

        free(block);
        block = next;
    }
    memset(tree, 0, sizeof(*tree));
}

arl_status_t
arl_tree_text(arl_tree_t *tree, const char *data, size_t size, arl_string_t *text_p,
              arl_error_t *err)
{
    arl_status_t status;
    void *memory;
    char *copy;

    status = arl_tree_alloc(tree, size + 1, &memory, err);
    if (status != ARL_OK) {
        return status;
    }
    copy = memory;
    if (size > 0) {
        memcpy(copy, data, size);
    }
    copy[size] = '\0';
    text_p->data = copy;
    text_p->size = size;
    return ARL_OK;
}

/* Room for one more element in an arena array; the old array is left to the arena. */
static arl_status_t
array_grow(arl_tree_t *tree, void **array, size_t count, size_t *capacity, size_t itemsize,
           arl_error_t *err)
{
    size_t larger;
    arl_status_t status;
    void *memory;

    if (count < *capacity) {
        return ARL_OK;
    }
    larger = *capacity == 0 ? FIRST_CAPACITY : 2 * *capacity;
    status = arl_tree_alloc(tree, larger * itemsize, &memory, err);
    if (status != ARL_OK) {
        return status;
    }
    if (count > 0) {
        memcpy(memory, *array, count * itemsize);
    }
    *array = memory;
    *capacity = larger;
    return ARL_OK;
}

arl_status_t
arl_tree_source(arl_tree_t *tree, const char *name, int32_t *source_p, arl_error_t *err)
{
    size_t capacity = (size_t)tree->source_capacity;
    void *array = tree->sources;
    arl_string_t text;
    arl_status_t status;

    status = array_grow(tree, &array, (size_t)tree->source_count, &capacity, sizeof(char *), err);
    if (status != ARL_OK) {
        return status;
    }
    tree->sources = array;
    tree->source_capacity = (int32_t)capacity;
    status = arl_tree_text(tree, name, strlen(name), &text, err);
    if (status != ARL_OK) {
        return status;
    }
    tree->sources[tree->source_count] = text.data;
    *source_p = tree->source_count++;
    return ARL_OK;
}

/* ---- nodes ----------------------------------------------------------------------------- */

arl_status_t
arl_node_new(arl_tree_t *tree, arl_node_kind_t kind, const arl_node_t *like, arl_node_t **node_p,
             arl_error_t *err)
{
    arl_status_t status;
    arl_node_t *node = NULL;
    void *memory;

    if (tree->nodes >= ARL_TREE_NODES_MAX) {
        return arl_error_set(err, ARL_ERR_CONFIG, tree->operation,
                             "the configuration holds more than %d values: it is not one, or its "
                             "aliases and interpolations multiply",
                             ARL_TREE_NODES_MAX);
    }
    status = arl_tree_alloc(tree, sizeof(*node), &memory, err);
    if (status != ARL_OK) {
        return status;
    }
    tree->nodes++;
    node = memory;
    memset(node, 0, sizeof(*node));
    node->kind = kind;
    if (like != NULL) {
        node->source = like->source;
        node->line = like->line;
        node->column = like->column;
    }
    *node_p = node;
    return ARL_OK;
}

arl_status_t
arl_node_new_text(arl_tree_t *tree, const char *data, size_t size, const arl_node_t *like,
                  arl_node_t **node_p, arl_error_t *err)
{
    arl_status_t status;
    arl_node_t *node = NULL;

    status = arl_node_new(tree, ARL_NODE_TEXT, like, &node, err);
    if (status == ARL_OK) {
        status = arl_tree_text(tree, data, size, &node->as.text, err);
    }
    if (status == ARL_OK) {
        *node_p = node;
    }
    return status;
}

/* ---- lists and maps -------------------------------------------------------------------- */

arl_status_t
arl_list_append(arl_tree_t *tree, arl_node_t *list, arl_node_t *item, arl_error_t *err)
{
    void *array = list->as.list.items;
    arl_status_t status;

    status = array_grow(tree, &array, list->as.list.count, &list->as.list.capacity,
                        sizeof(arl_node_t *), err);
    if (status != ARL_OK) {
        return status;
    }
    list->as.list.items = array;
    list->as.list.items[list->as.list.count++] = item;
    item->parent = list;
    return ARL_OK;
}

static bool
node_number(const arl_node_t *node, double *number_p)
{
    switch (node->kind) {
    case ARL_NODE_BOOL:
        *number_p = node->as.boolean ? 1.0 : 0.0;
        return true;
    case ARL_NODE_INT:
        *number_p = (double)node->as.integer;
        return true;
    case ARL_NODE_FLOAT:
        *number_p = node->as.real;
        return true;
    default:
        return false;
    }
}

static bool
key_equal(const arl_node_t *a, const arl_node_t *b)
{
    double x, y;

    if (a->kind == ARL_NODE_TEXT || a->kind == ARL_NODE_BIGINT) {
        return a->kind == b->kind && a->base == b->base && a->as.text.size == b->as.text.size &&
               memcmp(a->as.text.data, b->as.text.data, a->as.text.size) == 0;
    }
    if (a->kind == ARL_NODE_INT && b->kind == ARL_NODE_INT) {
        return a->as.integer == b->as.integer; /* exact where a double is not */
    }
    if (a->kind == ARL_NODE_FOREIGN || a->kind == ARL_NODE_NULL) {
        return a->kind == b->kind && a->as.integer == b->as.integer;
    }
    return node_number(a, &x) && node_number(b, &y) && x == y;
}

arl_pair_t *
arl_map_find_node(const arl_node_t *map, const arl_node_t *key)
{
    for (size_t i = 0; i < map->as.map.count; i++) {
        if (key_equal(map->as.map.pairs[i].key, key)) {
            return &map->as.map.pairs[i];
        }
    }
    return NULL;
}

arl_pair_t *
arl_map_find(const arl_node_t *map, const char *key, size_t size)
{
    arl_node_t wanted = {.kind = ARL_NODE_TEXT, .as.text = {key, size}};

    return arl_map_find_node(map, &wanted);
}

arl_node_t *
arl_map_get(const arl_node_t *map, const char *key)
{
    arl_pair_t *pair;

    if (map == NULL || map->kind != ARL_NODE_MAP) {
        return NULL;
    }
    pair = arl_map_find(map, key, strlen(key));
    return pair == NULL ? NULL : pair->value;
}

/* Adds a pair whose key is not there yet. */
static arl_status_t
map_append(arl_tree_t *tree, arl_node_t *map, arl_node_t *key, arl_node_t *value, arl_error_t *err)
{
    void *array = map->as.map.pairs;
    arl_status_t status;

    if (map->as.map.count >= ARL_TREE_KEYS_MAX) {
        return arl_tree_fail_at(tree, map, err, "more than %d keys", ARL_TREE_KEYS_MAX);
    }
    status =
        array_grow(tree, &array, map->as.map.count, &map->as.map.capacity, sizeof(arl_pair_t), err);
    if (status != ARL_OK) {
        return status;
    }
    map->as.map.pairs = array;
    map->as.map.pairs[map->as.map.count++] = (arl_pair_t){key, value};
    key->parent = map;
    value->parent = map;
    return ARL_OK;
}

arl_status_t
arl_map_set_node(arl_tree_t *tree, arl_node_t *map, arl_node_t *key, arl_node_t *value,
                 arl_error_t *err)
{
    arl_pair_t *pair = arl_map_find_node(map, key);

    if (pair == NULL) {
        return map_append(tree, map, key, value, err);
    }
    pair->value = value;
    value->parent = map;
    return ARL_OK;
}

arl_status_t
arl_map_set(arl_tree_t *tree, arl_node_t *map, const char *key, arl_node_t *value, arl_error_t *err)
{
    arl_status_t status;
    arl_node_t *node = NULL;

    status = arl_node_new_text(tree, key, strlen(key), value, &node, err);
    return status == ARL_OK ? arl_map_set_node(tree, map, node, value, err) : status;
}

void
arl_map_remove(arl_node_t *map, const arl_pair_t *pair)
{
    size_t index = (size_t)(pair - map->as.map.pairs);

    memmove(&map->as.map.pairs[index], &map->as.map.pairs[index + 1],
            (map->as.map.count - index - 1) * sizeof(arl_pair_t));
    map->as.map.count--;
}

/* ---- copies ----------------------------------------------------------------------------- */

static arl_status_t
node_copy_children(arl_tree_t *tree, const arl_node_t *node, int depth, arl_node_t *copy,
                   arl_error_t *err)
{
    arl_status_t status = ARL_OK;
    arl_node_t *key = NULL, *value = NULL;

    for (size_t i = 0; node->kind == ARL_NODE_LIST && i < node->as.list.count; i++) {
        ARL_CHECK_GOTO(status, arl_node_copy(tree, node->as.list.items[i], depth, &value, err),
                       out);
        ARL_CHECK_GOTO(status, arl_list_append(tree, copy, value, err), out);
    }
    for (size_t i = 0; node->kind == ARL_NODE_MAP && i < node->as.map.count; i++) {
        const arl_pair_t *pair = &node->as.map.pairs[i];

        ARL_CHECK_GOTO(status, arl_node_copy(tree, pair->key, depth, &key, err), out);
        ARL_CHECK_GOTO(status, arl_node_copy(tree, pair->value, depth, &value, err), out);
        ARL_CHECK_GOTO(status, map_append(tree, copy, key, value, err), out);
    }
out:
    return status;
}

arl_status_t
arl_node_copy(arl_tree_t *tree, const arl_node_t *node, int depth, arl_node_t **copy_p,
              arl_error_t *err)
{
    arl_status_t status;
    arl_node_t *copy = NULL;

    if (depth >= ARL_TREE_DEPTH_MAX &&
        (node->kind == ARL_NODE_LIST || node->kind == ARL_NODE_MAP)) {
        return arl_tree_fail(tree, node, err, "nested more than %d levels deep",
                             ARL_TREE_DEPTH_MAX);
    }
    status = arl_node_new(tree, node->kind, node, &copy, err);
    if (status != ARL_OK) {
        return status;
    }
    copy->quoted = node->quoted;
    copy->base = node->base;
    copy->resolving = node->resolving;
    if (node->kind == ARL_NODE_LIST || node->kind == ARL_NODE_MAP) {
        status = node_copy_children(tree, node, depth + 1, copy, err);
    }
    else {
        copy->as = node->as; /* text is never changed in place, so it can be shared */
    }
    if (status == ARL_OK) {
        *copy_p = copy;
    }
    return status;
}

/* ---- paths ----------------------------------------------------------------------------- */

arl_node_t *
arl_node_at(const arl_node_t *node, const char *path)
{
    while (node != NULL) {
        size_t size = strcspn(path, ".");
        arl_pair_t *pair;

        if (node->kind != ARL_NODE_MAP) {
            return NULL;
        }
        pair = arl_map_find(node, path, size);
        if (pair == NULL) {
            return NULL;
        }
        if (path[size] == '\0') {
            return pair->value;
        }
        node = pair->value;
        path += size + 1;
    }
    return NULL;
}

arl_status_t
arl_node_put(arl_tree_t *tree, arl_node_t *root, const char *path, arl_node_t *value,
             arl_error_t *err)
{
    arl_node_t *node = root, *key = NULL, *inner = NULL;
    arl_status_t status;

    for (;;) {
        size_t size = strcspn(path, ".");
        arl_pair_t *pair;

        if (node->kind != ARL_NODE_MAP) {
            return arl_tree_fail_at(tree, node, err, "wants a mapping here, found %s",
                                    arl_node_kind_name(node));
        }
        pair = arl_map_find(node, path, size);
        if (path[size] != '\0' && pair != NULL && pair->value->kind != ARL_NODE_NULL) {
            node = pair->value;
            path += size + 1;
            continue;
        }
        status = arl_node_new_text(tree, path, size, value, &key, err);
        if (status != ARL_OK || path[size] == '\0') {
            return status != ARL_OK ? status : arl_map_set_node(tree, node, key, value, err);
        }
        status = arl_node_new(tree, ARL_NODE_MAP, value, &inner, err);
        if (status == ARL_OK) {
            status = arl_map_set_node(tree, node, key, inner, err);
        }
        if (status != ARL_OK) {
            return status;
        }
        node = inner;
        path += size + 1;
    }
}

/* ---- words for messages ---------------------------------------------------------------- */

const char *
arl_node_kind_name(const arl_node_t *node)
{
    switch (node->kind) {
    case ARL_NODE_NULL:
        return "null";
    case ARL_NODE_BOOL:
        return "a boolean";
    case ARL_NODE_INT:
    case ARL_NODE_BIGINT:
        return "an integer";
    case ARL_NODE_FLOAT:
        return "a float";
    case ARL_NODE_TEXT:
        return "text";
    case ARL_NODE_LIST:
        return "a list";
    case ARL_NODE_MAP:
        return "a mapping";
    case ARL_NODE_FOREIGN:
        return "an object";
    }
    return "?";
}

bool
arl_text_show(const char *data, size_t length, char *out, size_t size)
{
    size_t used = 0;

    for (size_t i = 0; i < length; i++) {
        const unsigned char c = (unsigned char)data[i];
        const bool plain = c >= 0x20 && c != 0x7f;

        if (used + (plain ? 1 : 4) >= size) {
            out[used] = '\0';
            return false;
        }
        if (plain) {
            out[used++] = (char)c;
        }
        else {
            used += (size_t)snprintf(out + used, size - used, "\\x%02x", c);
        }
    }
    out[used] = '\0';
    return true;
}

/* A scalar for a message. False when it was cut. */
static bool
show_scalar(const arl_node_t *node, char *out, size_t size)
{
    return node->kind == ARL_NODE_TEXT
               ? arl_text_show(node->as.text.data, node->as.text.size, out, size)
               : arl_literal_format(node, out, size);
}

/* The last step to `node`: ".key" or "[3]". */
static void
node_step(const arl_node_t *node, char *out, size_t size)
{
    const arl_node_t *parent = node->parent;

    out[0] = '\0';
    for (size_t i = 0; parent->kind == ARL_NODE_LIST && i < parent->as.list.count; i++) {
        if (parent->as.list.items[i] == node) {
            (void)snprintf(out, size, "[%zu]", i);
            return;
        }
    }
    for (size_t i = 0; parent->kind == ARL_NODE_MAP && i < parent->as.map.count; i++) {
        const arl_pair_t *pair = &parent->as.map.pairs[i];

        if (pair->value == node || pair->key == node) {
            char key[64];

            (void)show_scalar(pair->key, key, sizeof(key));
            (void)snprintf(out, size, ".%s", key);
            return;
        }
    }
}

void
arl_node_path(const arl_node_t *node, char *out, size_t size)
{
    const arl_node_t *up[ARL_TREE_DEPTH_MAX + 1];
    size_t depth = 0, used = 0;

    out[0] = '\0';
    for (; node->parent != NULL && depth < sizeof(up) / sizeof(up[0]); node = node->parent) {
        up[depth++] = node;
    }
    while (depth > 0 && used + 8 < size) {
        char step[72];
        const char *text = step;

        node_step(up[--depth], step, sizeof(step));
        if (used == 0 && step[0] == '.') {
            text++;
        }
        if (used + strlen(text) + 4 >= size) {
            (void)snprintf(out + used, size - used, "...");
            return;
        }
        used += (size_t)snprintf(out + used, size - used, "%s", text);
    }
}

void
arl_node_show(const arl_node_t *node, char *out, size_t size)
{
    char text[96];

    switch (node->kind) {
    case ARL_NODE_LIST:
        (void)snprintf(out, size, "a list of %zu", node->as.list.count);
        return;
    case ARL_NODE_MAP:
        (void)snprintf(out, size, "a mapping of %zu", node->as.map.count);
        return;
    case ARL_NODE_NULL:
        (void)snprintf(out, size, "null");
        return;
    case ARL_NODE_BOOL: /* as YAML writes it */
        (void)snprintf(out, size, "%s", node->as.boolean ? "true" : "false");
        return;
    case ARL_NODE_FOREIGN:
        (void)snprintf(out, size, "an object");
        return;
    default:
        if (!show_scalar(node, text, sizeof(text) - 4)) {
            strcpy(text + strlen(text), "...");
        }
        (void)snprintf(out, size, node->kind == ARL_NODE_TEXT ? "'%s'" : "%s", text);
    }
}

void
arl_node_where(const arl_tree_t *tree, const arl_node_t *node, char *out, size_t size)
{
    const char *name = tree->sources[node == NULL ? 0 : node->source];

    if (node != NULL && node->line > 0) {
        (void)snprintf(out, size, "%.256s:%d:%d", name, (int)node->line, (int)node->column);
    }
    else {
        (void)snprintf(out, size, "%.256s", name);
    }
}

static arl_status_t tree_vfail(const arl_tree_t *tree, const arl_node_t *node, const char *path,
                               arl_error_t *err, const char *format, va_list args)
    __attribute__((format(printf, 5, 0)));

static arl_status_t
tree_vfail(const arl_tree_t *tree, const arl_node_t *node, const char *path, arl_error_t *err,
           const char *format, va_list args)
{
    char where[WHERE_MAX], text[1280];

    arl_node_where(tree, node, where, sizeof(where));
    (void)vsnprintf(text, sizeof(text), format, args);
    return arl_error_set(err, ARL_ERR_CONFIG, tree->operation, "%s: %s%s%s", where, path,
                         path[0] != '\0' ? ": " : "", text);
}

arl_status_t
arl_tree_fail(const arl_tree_t *tree, const arl_node_t *node, arl_error_t *err, const char *format,
              ...)
{
    arl_status_t status;
    va_list args;

    va_start(args, format);
    status = tree_vfail(tree, node, "", err, format, args);
    va_end(args);
    return status;
}

arl_status_t
arl_tree_fail_at(const arl_tree_t *tree, const arl_node_t *node, arl_error_t *err,
                 const char *format, ...)
{
    char path[PATH_MAX_SHOWN];
    arl_status_t status;
    va_list args;

    arl_node_path(node, path, sizeof(path));
    va_start(args, format);
    status = tree_vfail(tree, node, path, err, format, args);
    va_end(args);
    return status;
}
