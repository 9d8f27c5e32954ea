/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARL_CORE_TREE_H
#define ARL_CORE_TREE_H

#include "core/arl_status.h"

#include <stdbool.h>

/*
 * A configuration in memory: null, bool, int, float, text, list and map nodes, each with the
 * place that it came from. One tree owns all its nodes and text in an arena and frees them
 * together, so no function below has anything to clean up.
 *
 * Whatever is read, a tree stays within these limits; passing one is ARL_ERR_CONFIG.
 */
enum {
    ARL_TREE_DEPTH_MAX = 64,     /* levels of nesting, the root included */
    ARL_TREE_NODES_MAX = 200000, /* nodes ever made, copies of aliases included */
    ARL_TREE_KEYS_MAX = 4096,    /* keys of one map */
};
#define ARL_TREE_BYTES_MAX ((size_t)64 << 20)

typedef enum arl_node_kind {
    ARL_NODE_NULL,
    ARL_NODE_BOOL,
    ARL_NODE_INT,
    ARL_NODE_BIGINT, /* an int outside int64: sign and digits in `text`, radix in `base` */
    ARL_NODE_FLOAT,
    ARL_NODE_TEXT,
    ARL_NODE_LIST,
    ARL_NODE_MAP,
    ARL_NODE_FOREIGN, /* an object of the embedding language; `integer` is its number there */
} arl_node_kind_t;

/* data[size] is '\0', and there may be others before it: a quoted scalar can hold one. */
typedef struct arl_string {
    const char *data;
    size_t size;
} arl_string_t;

typedef struct arl_node arl_node_t;

typedef struct arl_pair {
    arl_node_t *key; /* a scalar */
    arl_node_t *value;
} arl_pair_t;

typedef enum arl_resolve_state {
    ARL_RESOLVE_NEW,
    ARL_RESOLVE_BUSY, /* being resolved: meeting it again is a cycle */
    ARL_RESOLVE_DONE,
} arl_resolve_state_t;

struct arl_node {
    arl_node_kind_t kind;
    bool quoted; /* TEXT written in quotes or as a block, so never taken for another type */
    uint8_t base;
    uint8_t resolving; /* arl_resolve_state_t, of arl_interp.c */
    int32_t source;    /* index into the tree's sources; 0: made in memory */
    int32_t line;      /* from 1; 0: unknown */
    int32_t column;    /* from 1 */
    arl_node_t *parent;
    arl_node_t *resolved; /* what an interpolation led to */
    union {
        bool boolean;
        int64_t integer;
        double real;
        arl_string_t text;
        struct {
            arl_node_t **items;
            size_t count;
            size_t capacity;
        } list;
        struct {
            arl_pair_t *pairs;
            size_t count;
            size_t capacity;
        } map;
    } as;
};

typedef struct arl_tree {
    arl_node_t *root;
    const char *operation; /* the call that errors are reported under; static text */
    struct arl_tree_block *blocks;
    size_t bytes;
    size_t nodes;
    const char **sources; /* names for messages; [0] is "config" */
    int32_t source_count;
    int32_t source_capacity;
} arl_tree_t;

/* Fails only for want of memory. free is safe on a zeroed tree, and twice. */
arl_status_t arl_tree_init(arl_tree_t *tree, const char *operation, arl_error_t *err);
void arl_tree_free(arl_tree_t *tree);

/* Bytes that live as long as the tree, aligned for any type; not zeroed. */
arl_status_t arl_tree_alloc(arl_tree_t *tree, size_t size, void **memory_p, arl_error_t *err);
arl_status_t arl_tree_text(arl_tree_t *tree, const char *data, size_t size, arl_string_t *text_p,
                           arl_error_t *err);

/* Registers a name such as a path; `*source_p` goes into arl_node_t.source. */
arl_status_t arl_tree_source(arl_tree_t *tree, const char *name, int32_t *source_p,
                             arl_error_t *err);

/* A node of that kind, empty, with the place of `like` (may be NULL). */
arl_status_t arl_node_new(arl_tree_t *tree, arl_node_kind_t kind, const arl_node_t *like,
                          arl_node_t **node_p, arl_error_t *err);
arl_status_t arl_node_new_text(arl_tree_t *tree, const char *data, size_t size,
                               const arl_node_t *like, arl_node_t **node_p, arl_error_t *err);

/* Copies a node and all below it, places included. The copy has no parent; `depth` is the number
 * of levels that it will have above it. */
arl_status_t arl_node_copy(arl_tree_t *tree, const arl_node_t *node, int depth, arl_node_t **copy_p,
                           arl_error_t *err);

/* Adds at the end; the item's parent becomes the list. */
arl_status_t arl_list_append(arl_tree_t *tree, arl_node_t *list, arl_node_t *item,
                             arl_error_t *err);

/* Finds the pair with an equal key (numbers and bools compare by value, as in Python); NULL when
 * there is none. */
arl_pair_t *arl_map_find_node(const arl_node_t *map, const arl_node_t *key);
arl_pair_t *arl_map_find(const arl_node_t *map, const char *key, size_t size);

/* The value at a text key, NULL when missing or when `map` is NULL or not a map. */
arl_node_t *arl_map_get(const arl_node_t *map, const char *key);

/* Replaces the value of an equal key in place, or adds the pair at the end. */
arl_status_t arl_map_set_node(arl_tree_t *tree, arl_node_t *map, arl_node_t *key, arl_node_t *value,
                              arl_error_t *err);
arl_status_t arl_map_set(arl_tree_t *tree, arl_node_t *map, const char *key, arl_node_t *value,
                         arl_error_t *err);
void arl_map_remove(arl_node_t *map, const arl_pair_t *pair);

/* The node at a dotted path of text keys below `node`, or NULL. */
arl_node_t *arl_node_at(const arl_node_t *node, const char *path);

/* Sets it, making maps on the way (also in place of null). A scalar or list in the way is
 * ARL_ERR_CONFIG. */
arl_status_t arl_node_put(arl_tree_t *tree, arl_node_t *root, const char *path, arl_node_t *value,
                          arl_error_t *err);

/* "an integer", "text", …, for messages. */
const char *arl_node_kind_name(const arl_node_t *node);

/* "a.b[2].c", cut with "..." when it does not fit. Writes "" for the root. */
void arl_node_path(const arl_node_t *node, char *out, size_t size);

/* The value as one short word for messages: 1e-06, 'text', a list of 3. */
void arl_node_show(const arl_node_t *node, char *out, size_t size);

/* Text for a message: what would end it or garble it (NUL, line breaks, escapes) is written as
 * \xNN. False when it was cut. */
bool arl_text_show(const char *data, size_t length, char *out, size_t size);

/* "file.yaml:3:7", "override 'a.b=1'", "config". */
void arl_node_where(const arl_tree_t *tree, const arl_node_t *node, char *out, size_t size);

/* Sets ARL_ERR_CONFIG with the node's place before the text, and returns it. */
arl_status_t arl_tree_fail(const arl_tree_t *tree, const arl_node_t *node, arl_error_t *err,
                           const char *format, ...) __attribute__((format(printf, 4, 5)));

/* The same with the node's path after the place: "file.yaml:3:7: a.b.c: text". */
arl_status_t arl_tree_fail_at(const arl_tree_t *tree, const arl_node_t *node, arl_error_t *err,
                              const char *format, ...) __attribute__((format(printf, 4, 5)));

#endif
