/* SPDX-License-Identifier: Apache-2.0 */
#include "core/arl_expr.h"

#include "core/arl_literal.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

typedef struct arl_expr {
    arl_tree_t *tree;
    const arl_node_t *site;
    const char *text;
    const char *p; /* the next character; the text is terminated, so p[1] can be looked at */
    const char *end;
    const arl_expr_host_t *host; /* NULL: an override, whose interpolations stay text */
    int depth;
    arl_error_t *err;
} arl_expr_t;

static arl_status_t expr_fail(const arl_expr_t *expr, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

static arl_status_t
expr_fail(const arl_expr_t *expr, const char *format, ...)
{
    char problem[512];
    va_list args;

    va_start(args, format);
    (void)vsnprintf(problem, sizeof(problem), format, args);
    va_end(args);
    return arl_tree_fail_at(expr->tree, expr->site, expr->err, "in '%.160s' at character %zu: %s",
                            expr->text, (size_t)(expr->p - expr->text) + 1, problem);
}

/* ---- text that grows ------------------------------------------------------------------------- */

typedef struct sink {
    char *data;
    size_t size;
    size_t capacity;
    arl_node_t *only; /* all that was added so far, when that is one looked-up value */
    bool used;
} sink_t;

static arl_status_t
sink_bytes(const arl_expr_t *expr, sink_t *sink, const char *data, size_t size)
{
    arl_status_t status;
    size_t wanted;
    void *memory;

    sink->used = true;
    if (__builtin_add_overflow(sink->size, size, &wanted)) {
        return arl_error_set(expr->err, ARL_ERR_NOMEM, expr->tree->operation, "out of memory");
    }
    if (wanted >= sink->capacity) {
        size_t larger = wanted < 32 ? 64 : 2 * wanted;

        status = arl_tree_alloc(expr->tree, larger, &memory, expr->err);
        if (status != ARL_OK) {
            return status;
        }
        if (sink->size > 0) {
            memcpy(memory, sink->data, sink->size);
        }
        sink->data = memory;
        sink->capacity = larger;
    }
    memcpy(sink->data + sink->size, data, size);
    sink->size = wanted;
    sink->data[wanted] = '\0';
    return ARL_OK;
}

static arl_status_t
sink_repeat(const arl_expr_t *expr, sink_t *sink, char c, size_t count)
{
    arl_status_t status = ARL_OK;

    while (count-- > 0 && status == ARL_OK) {
        status = sink_bytes(expr, sink, &c, 1);
    }
    return status;
}

/* A value as Python's str() would print it. */
static arl_status_t
sink_value(const arl_expr_t *expr, sink_t *sink, const arl_node_t *value)
{
    char number[64];

    switch (value->kind) {
    case ARL_NODE_TEXT:
        return sink_bytes(expr, sink, value->as.text.data, value->as.text.size);
    case ARL_NODE_BIGINT:
        if (value->base != 10) {
            break;
        }
        return sink_bytes(expr, sink, value->as.text.data, value->as.text.size);
    case ARL_NODE_NULL:
    case ARL_NODE_BOOL:
    case ARL_NODE_INT:
    case ARL_NODE_FLOAT:
        (void)arl_literal_format(value, number, sizeof(number));
        return sink_bytes(expr, sink, number, strlen(number));
    case ARL_NODE_LIST:
    case ARL_NODE_MAP:
    case ARL_NODE_FOREIGN:
        break;
    }
    return expr_fail(expr, "%s cannot become part of a text", arl_node_kind_name(value));
}

/* Adds a looked-up value; kept as it is while nothing else comes. */
static arl_status_t
sink_interpolation(const arl_expr_t *expr, sink_t *sink, arl_node_t *value)
{
    if (!sink->used) {
        sink->used = true;
        sink->only = value;
        return ARL_OK;
    }
    return sink_value(expr, sink, value);
}

/* Call before adding anything to what may be a lone value. */
static arl_status_t
sink_open(const arl_expr_t *expr, sink_t *sink)
{
    const arl_node_t *only = sink->only;

    sink->only = NULL;
    return only == NULL ? ARL_OK : sink_value(expr, sink, only);
}

static arl_status_t
sink_node(const arl_expr_t *expr, const sink_t *sink, arl_node_t **value_p)
{
    arl_status_t status;

    if (sink->only != NULL) {
        *value_p = sink->only;
        return ARL_OK;
    }
    status = arl_node_new_text(expr->tree, sink->size > 0 ? sink->data : "", sink->size, expr->site,
                               value_p, expr->err);
    if (status == ARL_OK && expr->host != NULL) {
        (*value_p)->resolving = ARL_RESOLVE_DONE; /* a `${` in it was escaped: it is text now */
    }
    return status;
}

/* ---- characters ------------------------------------------------------------------------------ */

static bool
at_interpolation(const arl_expr_t *expr)
{
    return expr->p[0] == '$' && expr->p[1] == '{';
}

static bool
is_space(char c)
{
    return c == ' ' || c == '\t';
}

static void
skip_spaces(arl_expr_t *expr)
{
    while (is_space(*expr->p)) {
        expr->p++;
    }
}

static bool
is_letter(char c)
{
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_';
}

static bool
is_digit(char c)
{
    return c >= '0' && c <= '9';
}

/* May stand in a key of an interpolation. */
static bool
is_key_char(char c)
{
    return c != '\0' && strchr("\\{}()[]:. \t'\"", c) == NULL;
}

/* May stand in a bare word. */
static bool
is_bare_char(char c)
{
    return is_letter(c) || is_digit(c) || (c != '\0' && strchr("/-+.$%*@?|", c) != NULL);
}

/* May follow a backslash that is not to be kept. */
static bool
is_escapable(char c)
{
    return c != '\0' && strchr("\\()[]{}:=, \t", c) != NULL;
}

/* ---- interpolations ----------------------------------------------------------------------------
 */

static arl_status_t interpolation(arl_expr_t *expr, arl_node_t **value_p);
static arl_status_t element(arl_expr_t *expr, arl_node_t **value_p);

/* One key of a path, which may itself be an interpolation. */
static arl_status_t
path_key(arl_expr_t *expr, sink_t *path, bool *name_p)
{
    const char *start = expr->p;
    arl_status_t status;
    arl_node_t *value;

    if (at_interpolation(expr)) {
        status = interpolation(expr, &value);
        if (status == ARL_OK && value->kind != ARL_NODE_TEXT) {
            return expr_fail(expr, "a key must be text, and this interpolation gives %s",
                             arl_node_kind_name(value));
        }
        return status == ARL_OK ? sink_value(expr, path, value) : status;
    }
    while (is_key_char(*expr->p)) {
        *name_p = *name_p && (is_letter(*expr->p) ||
                              (expr->p > start && (is_digit(*expr->p) || *expr->p == '-')));
        expr->p++;
    }
    if (expr->p == start) {
        return expr_fail(expr, "a key is missing");
    }
    return sink_bytes(expr, path, start, (size_t)(expr->p - start));
}

/* [key] */
static arl_status_t
bracket_key(arl_expr_t *expr, sink_t *path, bool *name_p)
{
    arl_status_t status;

    *name_p = false;
    expr->p++;
    ARL_CHECK_GOTO(status, sink_bytes(expr, path, "[", 1), out);
    ARL_CHECK_GOTO(status, path_key(expr, path, name_p), out);
    if (*expr->p != ']') {
        return expr_fail(expr, "']' is missing");
    }
    expr->p++;
    status = sink_bytes(expr, path, "]", 1);
out:
    return status;
}

/* Everything up to the closing brace or the colon. `name_p`: it could name a resolver. */
static arl_status_t
path_text(arl_expr_t *expr, sink_t *path, bool *name_p)
{
    arl_status_t status;

    *name_p = *expr->p != '.';
    while (*expr->p == '.') {
        ARL_CHECK_GOTO(status, sink_bytes(expr, path, expr->p++, 1), out);
    }
    if (*expr->p == '[') {
        ARL_CHECK_GOTO(status, bracket_key(expr, path, name_p), out);
    }
    else {
        ARL_CHECK_GOTO(status, path_key(expr, path, name_p), out);
    }
    for (;;) {
        if (*expr->p == '[') {
            ARL_CHECK_GOTO(status, bracket_key(expr, path, name_p), out);
        }
        else if (*expr->p == '.') {
            ARL_CHECK_GOTO(status, sink_bytes(expr, path, expr->p++, 1), out);
            ARL_CHECK_GOTO(status, path_key(expr, path, name_p), out);
        }
        else {
            break;
        }
    }
out:
    return status;
}

/* After a part of a list: either the end or a comma, and what comes next. */
static arl_status_t
next_part(arl_expr_t *expr, char close, bool *done_p)
{
    skip_spaces(expr);
    *done_p = *expr->p == close;
    if (!*done_p && *expr->p != ',') {
        return expr_fail(expr, "',' or '%c' is missing", close);
    }
    expr->p++;
    if (!*done_p) {
        skip_spaces(expr);
    }
    return ARL_OK;
}

/* What opens a list is read; true when nothing is in it, and then its end is read too. */
static bool
is_empty_list(arl_expr_t *expr, char close)
{
    skip_spaces(expr);
    if (*expr->p != close) {
        return false;
    }
    expr->p++;
    return true;
}

/* The arguments up to `}`; a place left empty is empty text. */
static arl_status_t
resolver_args(arl_expr_t *expr, arl_node_t **args, size_t *count_p)
{
    bool done = is_empty_list(expr, '}');
    arl_status_t status = ARL_OK;
    size_t count = 0;

    while (!done) {
        if (count == ARL_EXPR_ARGS_MAX) {
            return expr_fail(expr, "more than %d arguments", ARL_EXPR_ARGS_MAX);
        }
        if (*expr->p == ',' || *expr->p == '}') {
            ARL_CHECK_GOTO(
                status, arl_node_new_text(expr->tree, "", 0, expr->site, &args[count], expr->err),
                out);
        }
        else {
            ARL_CHECK_GOTO(status, element(expr, &args[count]), out);
        }
        count++;
        ARL_CHECK_GOTO(status, next_part(expr, '}', &done), out);
    }
    *count_p = count;
out:
    return status;
}

static arl_status_t
interpolation_inner(arl_expr_t *expr, arl_node_t **value_p)
{
    arl_node_t *args[ARL_EXPR_ARGS_MAX];
    sink_t path = {0};
    arl_status_t status;
    size_t count = 0;
    bool name;

    expr->p += 2;
    skip_spaces(expr);
    status = path_text(expr, &path, &name);
    if (status != ARL_OK) {
        return status;
    }
    skip_spaces(expr);
    if (*expr->p == '}') {
        expr->p++;
        return expr->host->lookup(expr->host->context, path.data, path.size, value_p);
    }
    if (*expr->p != ':' || !name) {
        return expr_fail(expr, "'}' is missing");
    }
    expr->p++;
    status = resolver_args(expr, args, &count);
    if (status != ARL_OK) {
        return status;
    }
    return expr->host->resolver(expr->host->context, path.data, path.size, args, count, value_p);
}

static arl_status_t
interpolation(arl_expr_t *expr, arl_node_t **value_p)
{
    arl_status_t status;

    if (++expr->depth > ARL_EXPR_DEPTH_MAX) {
        return expr_fail(expr, "nested more than %d levels deep", ARL_EXPR_DEPTH_MAX);
    }
    status = interpolation_inner(expr, value_p);
    expr->depth--;
    return status;
}

/* ---- text with interpolations
 * -------------------------------------------------------------------- */

/* A run of backslashes: halved before `${` and before the quote, an odd one escaping what comes;
 * kept as it is before anything else. */
static arl_status_t
backslashes(arl_expr_t *expr, sink_t *sink, char quote)
{
    size_t count = strspn(expr->p, "\\");
    const char *after = expr->p + count;
    bool opens = after[0] == '$' && after[1] == '{' && expr->host != NULL;
    arl_status_t status;

    expr->p = after;
    if (!opens && (quote == '\0' || *after != quote)) {
        return sink_repeat(expr, sink, '\\', count);
    }
    status = sink_repeat(expr, sink, '\\', count / 2);
    if (status == ARL_OK && count % 2 == 1) {
        status = sink_bytes(expr, sink, after, opens ? 2 : 1);
        expr->p += opens ? 2 : 1;
    }
    return status;
}

/* Up to the closing quote, or to the end when `quote` is '\0'. */
static arl_status_t
text_until(arl_expr_t *expr, char quote, arl_node_t **value_p)
{
    sink_t sink = {0};
    arl_status_t status;
    arl_node_t *value;

    while (expr->p < expr->end && (quote == '\0' || *expr->p != quote)) {
        if (at_interpolation(expr) && expr->host != NULL) {
            ARL_CHECK_GOTO(status, interpolation(expr, &value), out);
            ARL_CHECK_GOTO(status, sink_open(expr, &sink), out);
            ARL_CHECK_GOTO(status, sink_interpolation(expr, &sink, value), out);
            continue;
        }
        ARL_CHECK_GOTO(status, sink_open(expr, &sink), out);
        if (*expr->p == '\\') {
            ARL_CHECK_GOTO(status, backslashes(expr, &sink, quote), out);
        }
        else {
            ARL_CHECK_GOTO(status, sink_bytes(expr, &sink, expr->p, 1), out);
            expr->p++;
        }
    }
    if (quote != '\0') {
        if (expr->p == expr->end) {
            return expr_fail(expr, "the closing %c is missing", quote);
        }
        expr->p++;
        ARL_CHECK_GOTO(status, sink_open(expr, &sink), out); /* in quotes, always text */
    }
    ARL_CHECK_GOTO(status, sink_node(expr, &sink, value_p), out);
    if (quote != '\0') {
        (*value_p)->quoted = true;
    }
out:
    return status;
}

/* ---- values
 * -------------------------------------------------------------------------------------- */

/* ${...} of an override, taken over as it stands. */
static arl_status_t
raw_interpolation(arl_expr_t *expr, sink_t *sink)
{
    const char *close = strchr(expr->p, '}');
    const char *start = expr->p;

    if (close == NULL || close == start + 2) {
        return expr_fail(expr, "not an interpolation");
    }
    expr->p = close + 1;
    return sink_bytes(expr, sink, start, (size_t)(expr->p - start));
}

static arl_status_t
unexpected(const arl_expr_t *expr, const sink_t *sink)
{
    char c = *expr->p;

    if (expr->host == NULL && c == '(' && sink->used) {
        return expr_fail(expr, "functions are Hydra's business and are not evaluated here; quote "
                               "the value if it is meant as text");
    }
    if (c == '\0') {
        return expr_fail(expr, "a value is missing");
    }
    return expr_fail(expr, "the character '%c' cannot stand in a bare word; quote the value%s",
                     (unsigned char)c < 0x80 ? c : '?',
                     is_escapable(c) ? " or write \\ before it" : "");
}

/* White space inside a word belongs to it, before the end of the value it does not. */
static bool
spaces_end_word(const arl_expr_t *expr, bool key)
{
    const char *after = expr->p + strspn(expr->p, " \t");

    if (after == expr->end) {
        return expr->host == NULL;
    }
    return *after == ',' || *after == ']' || *after == '}' || (key && *after == ':');
}

/* A bare word: typed when it is nothing but one number, boolean or null. */
static arl_status_t
bare_word(arl_expr_t *expr, bool key, arl_node_t **value_p)
{
    sink_t sink = {0};
    bool plain = true, colon, escaped;
    arl_status_t status;
    arl_node_t *value;

    while (expr->p < expr->end && strchr(key ? ",]}:" : ",]}", *expr->p) == NULL) {
        if (is_space(*expr->p) && spaces_end_word(expr, key)) {
            break;
        }
        if (at_interpolation(expr) && !key) {
            plain = false;
            if (expr->host == NULL) {
                ARL_CHECK_GOTO(status, raw_interpolation(expr, &sink), out);
                continue;
            }
            ARL_CHECK_GOTO(status, interpolation(expr, &value), out);
            ARL_CHECK_GOTO(status, sink_open(expr, &sink), out);
            ARL_CHECK_GOTO(status, sink_interpolation(expr, &sink, value), out);
            continue;
        }
        ARL_CHECK_GOTO(status, sink_open(expr, &sink), out);
        escaped = *expr->p == '\\' && is_escapable(expr->p[1]);
        if (escaped) {
            plain = false;
            expr->p++;
        }
        else if (!is_bare_char(*expr->p) && !is_space(*expr->p) && *expr->p != ':' &&
                 *expr->p != '\\') {
            return unexpected(expr, &sink);
        }
        ARL_CHECK_GOTO(status, sink_bytes(expr, &sink, expr->p, 1), out);
        colon = *expr->p++ == ':' && !escaped;
        while (colon && is_space(*expr->p)) { /* a colon keeps what follows it */
            plain = false;
            ARL_CHECK_GOTO(status, sink_bytes(expr, &sink, expr->p++, 1), out);
        }
    }
    if (!sink.used) {
        return expr_fail(expr, "a value is missing");
    }
    status = sink_node(expr, &sink, value_p);
    if (status == ARL_OK && plain) {
        status = arl_literal_read_word(expr->tree, sink.data, sink.size, *value_p, expr->err);
    }
out:
    return status;
}

/* Part of a list or map: what belongs to the tree elsewhere is copied. */
static arl_status_t
owned_element(arl_expr_t *expr, arl_node_t **value_p)
{
    arl_node_t *value;
    arl_status_t status = element(expr, &value);

    if (status == ARL_OK && value->parent != NULL) {
        return expr->host->own(expr->host->context, value, value_p);
    }
    if (status == ARL_OK) {
        *value_p = value;
    }
    return status;
}

/* [a, b] */
static arl_status_t
list_value(arl_expr_t *expr, arl_node_t **value_p)
{
    arl_node_t *list, *item;
    arl_status_t status;
    bool done;

    expr->p++;
    done = is_empty_list(expr, ']');
    ARL_CHECK_GOTO(status, arl_node_new(expr->tree, ARL_NODE_LIST, expr->site, &list, expr->err),
                   out);
    while (!done) {
        if (expr->host != NULL && (*expr->p == ',' || *expr->p == ']')) { /* a place left empty */
            ARL_CHECK_GOTO(status,
                           arl_node_new_text(expr->tree, "", 0, expr->site, &item, expr->err), out);
        }
        else {
            ARL_CHECK_GOTO(status, owned_element(expr, &item), out);
        }
        ARL_CHECK_GOTO(status, arl_list_append(expr->tree, list, item, expr->err), out);
        ARL_CHECK_GOTO(status, next_part(expr, ']', &done), out);
    }
    *value_p = list;
out:
    return status;
}

/* key: value */
static arl_status_t
map_pair(arl_expr_t *expr, arl_node_t *map)
{
    arl_node_t *key, *value;
    arl_status_t status;

    ARL_CHECK_GOTO(status, bare_word(expr, true, &key), out);
    skip_spaces(expr);
    if (*expr->p != ':') {
        return expr_fail(expr, "':' is missing");
    }
    if (key->kind == ARL_NODE_NULL) {
        return expr_fail(expr, "null cannot be a key");
    }
    if (arl_map_find_node(map, key) != NULL) {
        return expr_fail(expr, "a key is given twice");
    }
    expr->p++;
    skip_spaces(expr);
    ARL_CHECK_GOTO(status, owned_element(expr, &value), out);
    status = arl_map_set_node(expr->tree, map, key, value, expr->err);
out:
    return status;
}

/* {a: 1, b: 2} */
static arl_status_t
map_value(arl_expr_t *expr, arl_node_t **value_p)
{
    arl_node_t *map;
    arl_status_t status;
    bool done;

    expr->p++;
    done = is_empty_list(expr, '}');
    ARL_CHECK_GOTO(status, arl_node_new(expr->tree, ARL_NODE_MAP, expr->site, &map, expr->err),
                   out);
    while (!done) {
        ARL_CHECK_GOTO(status, map_pair(expr, map), out);
        ARL_CHECK_GOTO(status, next_part(expr, '}', &done), out);
    }
    *value_p = map;
out:
    return status;
}

static arl_status_t
element(arl_expr_t *expr, arl_node_t **value_p)
{
    arl_status_t status;
    char quote = *expr->p;

    if (++expr->depth > ARL_EXPR_DEPTH_MAX) {
        return expr_fail(expr, "nested more than %d levels deep", ARL_EXPR_DEPTH_MAX);
    }
    switch (quote) {
    case '\'':
    case '"':
        expr->p++;
        status = text_until(expr, quote, value_p);
        break;
    case '[':
        status = list_value(expr, value_p);
        break;
    case '{':
        status = map_value(expr, value_p);
        break;
    default:
        status = bare_word(expr, false, value_p);
    }
    expr->depth--;
    return status;
}

/* ---- entry points
 * -------------------------------------------------------------------------------- */

static arl_expr_t
expr_start(arl_tree_t *tree, const arl_node_t *site, const arl_string_t *text,
           const arl_expr_host_t *host, arl_error_t *err)
{
    return (arl_expr_t){.tree = tree,
                        .site = site,
                        .text = text->data,
                        .p = text->data,
                        .end = text->data + text->size,
                        .host = host,
                        .err = err};
}

bool
arl_expr_is_interpolated(const arl_string_t *text)
{
    return memmem(text->data, text->size, "${", 2) != NULL;
}

arl_status_t
arl_expr_text(arl_tree_t *tree, const arl_node_t *site, const arl_string_t *text,
              const arl_expr_host_t *host, arl_node_t **value_p, arl_error_t *err)
{
    arl_expr_t expr = expr_start(tree, site, text, host, err);

    return text_until(&expr, '\0', value_p);
}

arl_status_t
arl_expr_element(arl_tree_t *tree, const arl_node_t *site, const arl_string_t *text,
                 const arl_expr_host_t *host, arl_node_t **value_p, arl_error_t *err)
{
    arl_expr_t expr = expr_start(tree, site, text, host, err);
    arl_status_t status = element(&expr, value_p);

    if (status == ARL_OK && expr.p != expr.end) {
        return expr_fail(&expr, "one value was wanted, and this comes after it");
    }
    return status;
}

arl_status_t
arl_expr_override(arl_tree_t *tree, const arl_node_t *site, const arl_string_t *text,
                  arl_node_t **value_p, arl_error_t *err)
{
    arl_expr_t expr = expr_start(tree, site, text, NULL, err);
    arl_status_t status;
    bool bare;

    skip_spaces(&expr);
    if (expr.p == expr.end) {
        return arl_node_new_text(tree, "", 0, site, value_p, err);
    }
    bare = strchr("'\"[{", *expr.p) == NULL;
    status = element(&expr, value_p);
    if (status != ARL_OK) {
        return status;
    }
    if (bare) { /* spaces belong to a bare word, though not to its value */
        skip_spaces(&expr);
    }
    if (*expr.p == ',') {
        return expr_fail(&expr, "several values are a sweep, which is Hydra's business; write "
                                "[a, b] for a list");
    }
    if (expr.p != expr.end) {
        return expr_fail(&expr, "one value was wanted, and this comes after it");
    }
    return ARL_OK;
}
