/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The whole configuration reader against any bytes: YAML, interpolations, overrides, schema,
 * checks, warnings. An input is a document, then overrides, each after a 0x1e byte. With libFuzzer:
 *
 *   clang -g -O1 -fsanitize=fuzzer,address,undefined -std=c11 -D_GNU_SOURCE -Icsrc \
 *       tests/fuzz/fuzz_yaml.c csrc/core/arl_{tree,literal,yaml,expr,interp,override}.c \
 *       csrc/core/arl_config*.c csrc/core/arl_{json,text,status}.c -lyaml -o fuzz_yaml && \
 *       ./fuzz_yaml CORPUS
 *
 * With -DARL_FUZZ_STANDALONE and any compiler it mutates files by itself (mutate.h);
 * tests/test_yaml_fuzz.py runs that.
 */
#include "core/arl_config.h"
#include "core/arl_interp.h"
#include "core/arl_literal.h"
#include "core/arl_override.h"
#include "core/arl_yaml.h"

#include <stdbool.h>

#define FUZZ_NAME "fuzz_yaml"
#define FUZZ_WORDS                                                                                 \
    "${", "}", "a", ": ", "\n", "\n  ", "- ", "[", "]", "{", "&x ", "*x", "<<: *x", "'", "\"",     \
        "|\n", "? ", "\\", "\x1e", "+a=", "~", "=", "oc.env:A,",                                   \
        "oc.select:", "oc.decode:", "???", "1e-6", "0x", "null", "true", "remote_backend",         \
        "use_zorro", ".", "\xff", "\xc3\xa9", "1:30"
#include "mutate.h"

enum { SEPARATOR = 0x1e };

/* An error must be described as one of the configuration, and a success must not be. */
static bool
succeeded(arl_status_t status, const arl_error_t *err)
{
    require(status == err->code, "the status and the error record disagree");
    require(status == ARL_OK || status == ARL_ERR_CONFIG, "another error than ConfigError");
    require((status == ARL_OK) == (err->text[0] == '\0'), "an error without a text");
    return status == ARL_OK;
}

/* Every node knows its parent, nothing is deeper or larger than allowed, and all of it prints. */
static void
walk(const arl_node_t *node, int depth)
{
    char small[8], path[64];

    require(depth <= ARL_TREE_DEPTH_MAX, "a tree that is too deep");
    arl_node_show(node, small, sizeof(small));
    arl_node_path(node, path, sizeof(path));
    (void)arl_literal_format(node, path, sizeof(path));
    for (size_t i = 0; node->kind == ARL_NODE_LIST && i < node->as.list.count; i++) {
        require(node->as.list.items[i]->parent == node, "an item of another list");
        walk(node->as.list.items[i], depth + 1);
    }
    for (size_t i = 0; node->kind == ARL_NODE_MAP && i < node->as.map.count; i++) {
        const arl_pair_t *pair = &node->as.map.pairs[i];

        require(pair->key->parent == node && pair->value->parent == node, "a pair of another map");
        require(arl_map_find_node(node, pair->key) == pair || pair->key->kind == ARL_NODE_FLOAT,
                "a key that is there twice"); /* a NaN equals nothing, itself included */
        walk(pair->value, depth + 1);
    }
}

static void
try_schema(arl_tree_t *tree)
{
    arl_error_t err = ARL_ERROR_INIT;
    arl_node_t *list;

    if (!succeeded(arl_config_tree_normalize(tree, &err), &err)) {
        return;
    }
    walk(tree->root, 0);
    require(arl_node_new(tree, ARL_NODE_LIST, NULL, &list, &err) == ARL_OK, "no node");
    require(succeeded(arl_config_tree_warnings(tree, list, &err), &err), "no warnings");
    require(succeeded(arl_config_tree_normalize(tree, &err), &err), "it normalises only once");
}

int
LLVMFuzzerTestOneInput(const unsigned char *data, size_t size)
{
    const unsigned char *end = data + size, *part = memchr(data, SEPARATOR, size);
    arl_error_t err = ARL_ERROR_INIT;
    arl_tree_t tree;
    size_t document = size == 0 || part == NULL ? size : (size_t)(part - data);
    bool ok;

    require(arl_tree_init(&tree, "fuzz", &err) == ARL_OK, "no tree");
    ok = succeeded(arl_yaml_read(&tree, (const char *)data, document, "in", &err), &err);
    if (ok && tree.root->kind == ARL_NODE_NULL) {
        tree.root->kind = ARL_NODE_MAP;
        memset(&tree.root->as, 0, sizeof(tree.root->as));
    }
    if (ok) {
        walk(tree.root, 0);
    }
    ok = ok && tree.root->kind == ARL_NODE_MAP;
    while (ok && part != NULL && part < end) {
        const unsigned char *next = memchr(part + 1, SEPARATOR, (size_t)(end - part - 1));
        size_t length = (size_t)((next == NULL ? end : next) - part - 1);
        char text[512];

        length = length < sizeof(text) - 1 ? length : sizeof(text) - 1;
        memcpy(text, part + 1, length);
        text[length] = '\0';
        ok = succeeded(arl_override_apply(&tree, text, length, &err), &err);
        part = next;
    }
    ok = ok && succeeded(arl_config_tree_defaults(&tree, &err), &err);
    if (ok && succeeded(arl_tree_resolve(&tree, &err), &err)) {
        walk(tree.root, 0);
        try_schema(&tree);
    }
    arl_tree_free(&tree);
    return 0;
}
