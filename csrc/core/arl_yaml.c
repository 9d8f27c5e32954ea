/* SPDX-License-Identifier: Apache-2.0 */
#include "core/arl_yaml.h"

#include "core/arl_literal.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <yaml.h>

/* A list or map whose end has not come yet. */
typedef struct yaml_frame {
    arl_node_t *node;
    arl_node_t *key;   /* map: the key whose value comes next */
    arl_node_t *merge; /* map: the value of its `<<` */
    arl_node_t *merge_key;
    bool merging; /* the value that comes next belongs to `<<` */
} yaml_frame_t;

typedef struct yaml_anchor {
    const char *name;
    arl_node_t *node;
    bool open; /* its node has not ended: an alias to it would contain itself */
} yaml_anchor_t;

typedef struct yaml_reader {
    arl_tree_t *tree;
    yaml_parser_t parser;
    const char *data;
    size_t size;
    int32_t source;
    yaml_frame_t frames[ARL_TREE_DEPTH_MAX];
    int depth;
    yaml_anchor_t *anchors;
    size_t anchor_count;
    size_t anchor_capacity;
    int documents;
    arl_error_t *err;
} yaml_reader_t;

static arl_node_t
place_at(const yaml_reader_t *reader, yaml_mark_t mark)
{
    return (arl_node_t){.source = reader->source,
                        .line = (int32_t)mark.line + 1,
                        .column = (int32_t)mark.column + 1};
}

/* ---- what libyaml complains about ----------------------------------------------------------- */

static arl_status_t
reader_failed(const yaml_reader_t *reader, const char *problem, size_t offset)
{
    arl_node_t place = {.source = reader->source, .line = 1, .column = 1};

    for (size_t i = 0; i < offset && i < reader->size; i++) {
        if (reader->data[i] == '\n') {
            place.line++;
            place.column = 1;
        }
        else if (((unsigned char)reader->data[i] & 0xc0) != 0x80) { /* not in mid-character */
            place.column++;
        }
    }
    return arl_tree_fail(reader->tree, &place, reader->err, "unreadable: %s", problem);
}

static arl_status_t
parser_failed(const yaml_reader_t *reader)
{
    const yaml_parser_t *parser = &reader->parser;
    const char *problem = parser->problem == NULL ? "unreadable" : parser->problem;
    arl_node_t place = place_at(reader, parser->problem_mark);

    if (parser->error == YAML_MEMORY_ERROR) {
        return arl_error_set(reader->err, ARL_ERR_NOMEM, reader->tree->operation, "out of memory");
    }
    if (parser->error == YAML_READER_ERROR) {
        return reader_failed(reader, problem, parser->problem_offset);
    }
    if (parser->context != NULL) {
        return arl_tree_fail(reader->tree, &place, reader->err,
                             "not valid YAML: %s (%s that begins on line %zu)", problem,
                             parser->context, parser->context_mark.line + 1);
    }
    return arl_tree_fail(reader->tree, &place, reader->err, "not valid YAML: %s", problem);
}

/* ---- putting nodes in their place ------------------------------------------------------------ */

static bool
is_merge_key(const arl_node_t *key)
{
    return key->kind == ARL_NODE_TEXT && !key->quoted && key->as.text.size == 2 &&
           memcmp(key->as.text.data, "<<", 2) == 0;
}

static arl_status_t
duplicate_key(const yaml_reader_t *reader, const arl_node_t *key, const arl_node_t *first)
{
    char shown[96];

    arl_node_show(key, shown, sizeof(shown));
    return arl_tree_fail(reader->tree, key, reader->err,
                         "the key %s is given twice: here on line %d and before on line %d", shown,
                         (int)key->line, (int)first->line);
}

static arl_status_t
take_key(yaml_reader_t *reader, yaml_frame_t *frame, arl_node_t *key)
{
    const arl_pair_t *same;

    if (key->kind == ARL_NODE_NULL) {
        return arl_tree_fail(reader->tree, key, reader->err, "a key is missing or null");
    }
    if (key->kind == ARL_NODE_LIST || key->kind == ARL_NODE_MAP) {
        return arl_tree_fail(reader->tree, key, reader->err, "%s cannot be a key",
                             arl_node_kind_name(key));
    }
    if (is_merge_key(key)) {
        if (frame->merge_key != NULL) {
            return duplicate_key(reader, key, frame->merge_key);
        }
        frame->merge_key = key;
        frame->merging = true;
        return ARL_OK;
    }
    same = arl_map_find_node(frame->node, key);
    if (same != NULL) {
        return duplicate_key(reader, key, same->key);
    }
    frame->key = key;
    return ARL_OK;
}

/* Gives a node that begins (or a whole scalar) to what it is in. */
static arl_status_t
take_node(yaml_reader_t *reader, arl_node_t *node)
{
    yaml_frame_t *frame;
    arl_node_t *key;

    if (reader->depth == 0) {
        reader->tree->root = node;
        return ARL_OK;
    }
    frame = &reader->frames[reader->depth - 1];
    if (frame->node->kind == ARL_NODE_LIST) {
        return arl_list_append(reader->tree, frame->node, node, reader->err);
    }
    if (frame->merging) {
        frame->merging = false;
        frame->merge = node;
        return ARL_OK;
    }
    if (frame->key == NULL) {
        return take_key(reader, frame, node);
    }
    key = frame->key;
    frame->key = NULL;
    return arl_map_set_node(reader->tree, frame->node, key, node, reader->err);
}

/* ---- merge keys ------------------------------------------------------------------------------ */

/* Adds the pairs of `from`; a key that is there already keeps its value unless `override`. */
static arl_status_t
merge_into(yaml_reader_t *reader, arl_node_t *result, const arl_node_t *from, bool override)
{
    if (from->kind != ARL_NODE_MAP) {
        return arl_tree_fail(reader->tree, from, reader->err,
                             "'<<' merges a mapping or a list of mappings, found %s",
                             arl_node_kind_name(from));
    }
    for (size_t i = 0; i < from->as.map.count; i++) {
        const arl_pair_t *pair = &from->as.map.pairs[i];
        arl_status_t status = ARL_OK;

        if (override || arl_map_find_node(result, pair->key) == NULL) {
            status = arl_map_set_node(reader->tree, result, pair->key, pair->value, reader->err);
        }
        if (status != ARL_OK) {
            return status;
        }
    }
    return ARL_OK;
}

/* Merged keys come first, in the order in which they were merged, then the map's own. */
static arl_status_t
finish_map(yaml_reader_t *reader, const yaml_frame_t *frame)
{
    arl_node_t *map = frame->node, *result;
    const arl_node_t *merge = frame->merge;
    arl_status_t status;

    if (merge == NULL) {
        return ARL_OK;
    }
    ARL_CHECK_GOTO(status, arl_node_new(reader->tree, ARL_NODE_MAP, map, &result, reader->err),
                   out);
    if (merge->kind != ARL_NODE_LIST) {
        ARL_CHECK_GOTO(status, merge_into(reader, result, merge, false), out);
    }
    for (size_t i = 0; merge->kind == ARL_NODE_LIST && i < merge->as.list.count; i++) {
        ARL_CHECK_GOTO(status, merge_into(reader, result, merge->as.list.items[i], false), out);
    }
    ARL_CHECK_GOTO(status, merge_into(reader, result, map, true), out);
    map->as = result->as;
    for (size_t i = 0; i < map->as.map.count; i++) {
        map->as.map.pairs[i].key->parent = map;
        map->as.map.pairs[i].value->parent = map;
    }
out:
    return status;
}

/* ---- anchors --------------------------------------------------------------------------------- */

static yaml_anchor_t *
find_anchor(const yaml_reader_t *reader, const char *name)
{
    for (size_t i = 0; i < reader->anchor_count; i++) {
        if (strcmp(reader->anchors[i].name, name) == 0) {
            return &reader->anchors[i];
        }
    }
    return NULL;
}

static arl_status_t
add_anchor(yaml_reader_t *reader, const yaml_char_t *name, arl_node_t *node, bool open)
{
    const yaml_anchor_t *first;
    arl_status_t status;
    arl_string_t text;
    void *memory;

    if (name == NULL) {
        return ARL_OK;
    }
    first = find_anchor(reader, (const char *)name);
    if (first != NULL) {
        return arl_tree_fail(reader->tree, node, reader->err,
                             "the anchor '&%s' is defined twice, before on line %d",
                             (const char *)name, (int)first->node->line);
    }
    if (reader->anchor_count >= ARL_TREE_KEYS_MAX) {
        return arl_tree_fail(reader->tree, node, reader->err, "more than %d anchors",
                             ARL_TREE_KEYS_MAX);
    }
    if (reader->anchor_count == reader->anchor_capacity) {
        size_t larger = reader->anchor_capacity == 0 ? 8 : 2 * reader->anchor_capacity;

        status = arl_tree_alloc(reader->tree, larger * sizeof(yaml_anchor_t), &memory, reader->err);
        if (status != ARL_OK) {
            return status;
        }
        if (reader->anchor_count > 0) {
            memcpy(memory, reader->anchors, reader->anchor_count * sizeof(yaml_anchor_t));
        }
        reader->anchors = memory;
        reader->anchor_capacity = larger;
    }
    status = arl_tree_text(reader->tree, (const char *)name, strlen((const char *)name), &text,
                           reader->err);
    if (status == ARL_OK) {
        reader->anchors[reader->anchor_count++] = (yaml_anchor_t){text.data, node, open};
    }
    return status;
}

static void
close_anchor(yaml_reader_t *reader, const arl_node_t *node)
{
    for (size_t i = 0; i < reader->anchor_count; i++) {
        if (reader->anchors[i].node == node) {
            reader->anchors[i].open = false;
        }
    }
}

/* ---- events ---------------------------------------------------------------------------------- */

static arl_status_t
on_alias(yaml_reader_t *reader, const yaml_event_t *event)
{
    const char *name = (const char *)event->data.alias.anchor;
    const yaml_anchor_t *anchor = find_anchor(reader, name);
    arl_node_t place = place_at(reader, event->start_mark);
    arl_status_t status;
    arl_node_t *copy;

    if (anchor == NULL) {
        return arl_tree_fail(reader->tree, &place, reader->err, "no anchor '&%s' before '*%s'",
                             name, name);
    }
    if (anchor->open) {
        return arl_tree_fail(reader->tree, &place, reader->err,
                             "'*%s' stands inside what it names (line %d)", name,
                             (int)anchor->node->line);
    }
    status = arl_node_copy(reader->tree, anchor->node, reader->depth, &copy, reader->err);
    if (status != ARL_OK) {
        return status;
    }
    copy->line = place.line; /* what is written here; below it, the places of the anchor */
    copy->column = place.column;
    return take_node(reader, copy);
}

static arl_status_t
refuse_tag(const yaml_reader_t *reader, const arl_node_t *place, const yaml_char_t *tag)
{
    if (tag == NULL) {
        return ARL_OK;
    }
    return arl_tree_fail(reader->tree, place, reader->err,
                         "the tag '%.80s': tags are not read, so that a file can only hold data",
                         (const char *)tag);
}

static arl_status_t
on_scalar(yaml_reader_t *reader, const yaml_event_t *event)
{
    const char *value = (const char *)event->data.scalar.value;
    arl_node_t place = place_at(reader, event->start_mark), *node;
    arl_status_t status;

    ARL_CHECK_GOTO(status, refuse_tag(reader, &place, event->data.scalar.tag), out);
    ARL_CHECK_GOTO(status, arl_node_new(reader->tree, ARL_NODE_NULL, &place, &node, reader->err),
                   out);
    if (event->data.scalar.style == YAML_PLAIN_SCALAR_STYLE) {
        status =
            arl_literal_read(reader->tree, value, event->data.scalar.length, node, reader->err);
    }
    else {
        node->kind = ARL_NODE_TEXT;
        node->quoted = true;
        status = arl_tree_text(reader->tree, value, event->data.scalar.length, &node->as.text,
                               reader->err);
    }
    if (status != ARL_OK) {
        goto out;
    }
    ARL_CHECK_GOTO(status, add_anchor(reader, event->data.scalar.anchor, node, false), out);
    status = take_node(reader, node);
out:
    return status;
}

static arl_status_t
on_start(yaml_reader_t *reader, const yaml_event_t *event, arl_node_kind_t kind)
{
    bool list = kind == ARL_NODE_LIST;
    const yaml_char_t *anchor =
        list ? event->data.sequence_start.anchor : event->data.mapping_start.anchor;
    const yaml_char_t *tag = list ? event->data.sequence_start.tag : event->data.mapping_start.tag;
    arl_node_t place = place_at(reader, event->start_mark), *node;
    arl_status_t status;

    if (reader->depth >= ARL_TREE_DEPTH_MAX) {
        return arl_tree_fail(reader->tree, &place, reader->err, "nested more than %d levels deep",
                             ARL_TREE_DEPTH_MAX);
    }
    ARL_CHECK_GOTO(status, refuse_tag(reader, &place, tag), out);
    ARL_CHECK_GOTO(status, arl_node_new(reader->tree, kind, &place, &node, reader->err), out);
    ARL_CHECK_GOTO(status, add_anchor(reader, anchor, node, true), out);
    ARL_CHECK_GOTO(status, take_node(reader, node), out);
    reader->frames[reader->depth++] = (yaml_frame_t){.node = node};
out:
    return status;
}

static arl_status_t
on_end(yaml_reader_t *reader)
{
    yaml_frame_t *frame = &reader->frames[--reader->depth];

    close_anchor(reader, frame->node);
    return frame->node->kind == ARL_NODE_MAP ? finish_map(reader, frame) : ARL_OK;
}

static arl_status_t
on_event(yaml_reader_t *reader, const yaml_event_t *event)
{
    switch (event->type) {
    case YAML_DOCUMENT_START_EVENT:
        if (reader->documents++ > 0) {
            arl_node_t place = place_at(reader, event->start_mark);

            return arl_tree_fail(reader->tree, &place, reader->err,
                                 "a second document begins; a configuration is one document");
        }
        return ARL_OK;
    case YAML_ALIAS_EVENT:
        return on_alias(reader, event);
    case YAML_SCALAR_EVENT:
        return on_scalar(reader, event);
    case YAML_SEQUENCE_START_EVENT:
        return on_start(reader, event, ARL_NODE_LIST);
    case YAML_MAPPING_START_EVENT:
        return on_start(reader, event, ARL_NODE_MAP);
    case YAML_SEQUENCE_END_EVENT:
    case YAML_MAPPING_END_EVENT:
        return on_end(reader);
    case YAML_NO_EVENT:
    case YAML_STREAM_START_EVENT:
    case YAML_STREAM_END_EVENT:
    case YAML_DOCUMENT_END_EVENT:
        return ARL_OK;
    }
    return ARL_OK;
}

arl_status_t
arl_yaml_read(arl_tree_t *tree, const char *data, size_t size, const char *name, arl_error_t *err)
{
    yaml_reader_t reader = {.tree = tree, .data = data, .size = size, .err = err};
    yaml_event_t event;
    arl_status_t status;
    bool ended = false;

    ARL_CHECK_GOTO(status, arl_tree_source(tree, name, &reader.source, err), out);
    if (size > ARL_YAML_INPUT_MAX) {
        return arl_error_set(err, ARL_ERR_CONFIG, tree->operation,
                             "%.256s: more than %d MiB, which no configuration needs", name,
                             ARL_YAML_INPUT_MAX >> 20);
    }
    if (!yaml_parser_initialize(&reader.parser)) {
        return arl_error_set(err, ARL_ERR_NOMEM, tree->operation, "out of memory");
    }
    yaml_parser_set_input_string(&reader.parser, (const unsigned char *)data, size);
    yaml_parser_set_encoding(&reader.parser, YAML_UTF8_ENCODING);
    while (status == ARL_OK && !ended) {
        if (!yaml_parser_parse(&reader.parser, &event)) {
            status = parser_failed(&reader);
            break;
        }
        status = on_event(&reader, &event);
        ended = event.type == YAML_STREAM_END_EVENT;
        yaml_event_delete(&event);
    }
    yaml_parser_delete(&reader.parser);
    if (status == ARL_OK && tree->root == NULL) {
        arl_node_t start = {.source = reader.source, .line = 1, .column = 1};

        status = arl_node_new(tree, ARL_NODE_NULL, &start, &tree->root, err);
    }
out:
    return status;
}

/* ---- files ----------------------------------------------------------------------------------- */

/* Reads to the end, or one byte past the limit. */
static arl_status_t
read_all(int fd, char **data_p, size_t *size_p, const char *path, const char *operation,
         arl_error_t *err)
{
    size_t size = 0, capacity = 64 << 10;
    char *data = malloc(capacity), *larger;
    arl_status_t status;
    ssize_t got;

    if (data == NULL) {
        return arl_error_set(err, ARL_ERR_NOMEM, operation, "out of memory");
    }
    for (;;) {
        if (size == capacity) {
            capacity *= 2;
            larger = realloc(data, capacity);
            if (larger == NULL) {
                status = arl_error_set(err, ARL_ERR_NOMEM, operation, "out of memory");
                goto free_data;
            }
            data = larger;
        }
        got = read(fd, data + size, capacity - size);
        if (got < 0 && errno == EINTR) {
            continue;
        }
        if (got < 0) {
            status = arl_error_set_errno(err, operation, errno, "cannot read %.512s", path);
            goto free_data;
        }
        size += (size_t)got;
        if (got == 0 || size > ARL_YAML_INPUT_MAX) {
            *data_p = data;
            *size_p = size;
            return ARL_OK;
        }
    }
free_data:
    free(data);
    return status;
}

arl_status_t
arl_yaml_read_file(arl_tree_t *tree, const char *path, arl_error_t *err)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    arl_status_t status;
    char *data = NULL;
    size_t size = 0;

    if (fd < 0) {
        return arl_error_set_errno(err, tree->operation, errno, "cannot open %.512s", path);
    }
    status = read_all(fd, &data, &size, path, tree->operation, err);
    (void)close(fd);
    if (status == ARL_OK) {
        status = arl_yaml_read(tree, data, size, path, err);
        free(data);
    }
    return status;
}
