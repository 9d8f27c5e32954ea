/* SPDX-License-Identifier: Apache-2.0 */
#include "core/arl_config.h"

#include "core/arl_literal.h"

#include <stdio.h>
#include <string.h>

#define ARCTIC "remote_backend"

enum { SUGGEST_MAX = 512, PATH_MAX_BYTES = 256 };

typedef struct arl_normalizer {
    arl_tree_t *tree;
    arl_node_t *remote; /* the block as it was given */
    arl_node_t *result; /* the block in its normalised form */
    arl_config_form_t form;
    bool seed;
    arl_error_t *err;
} arl_normalizer_t;

static bool
text_is(const arl_node_t *node, const char *text)
{
    return node != NULL && node->kind == ARL_NODE_TEXT && node->as.text.size == strlen(text) &&
           memcmp(node->as.text.data, text, node->as.text.size) == 0;
}

/* OmegaConf's mark for a value that has to come from elsewhere. */
static bool
is_missing(const arl_node_t *node)
{
    return text_is(node, "\?\?\?");
}

/* ---- one value -------------------------------------------------------------------------- */

static bool
in_choices(const arl_string_t *text, const char *choices)
{
    while (*choices != '\0') {
        size_t size = strcspn(choices, "|");

        if (size == text->size && memcmp(choices, text->data, size) == 0) {
            return true;
        }
        choices += size + (choices[size] == '|');
    }
    return false;
}

static const char *
field_wants(const arl_field_t *field)
{
    switch (field->kind) {
    case ARL_FIELD_BOOL:
        return "true or false";
    case ARL_FIELD_INT:
        return "an integer";
    case ARL_FIELD_NUMBER:
        return "a number";
    case ARL_FIELD_TEXT:
        return "text";
    case ARL_FIELD_CHOICE:
        return field->choices;
    case ARL_FIELD_PAIR:
        return "a list of two numbers";
    }
    return "?";
}

static arl_status_t
number_check(const arl_tree_t *tree, const arl_field_t *field, const arl_node_t *node,
             arl_error_t *err)
{
    double value = node->kind == ARL_NODE_INT ? (double)node->as.integer : node->as.real;
    char shown[64];

    if (node->kind == ARL_NODE_BIGINT) {
        return arl_tree_fail_at(tree, node, err, "an integer of more than 64 bits");
    }
    if (value >= field->min && value <= field->max) {
        return ARL_OK;
    }
    arl_node_show(node, shown, sizeof(shown));
    if (!(value >= field->min)) {
        return arl_tree_fail_at(tree, node, err, "must be at least %g, found %s", field->min,
                                shown);
    }
    return arl_tree_fail_at(tree, node, err, "must be at most %g, found %s", field->max, shown);
}

static bool
is_number(const arl_node_t *node)
{
    return node->kind == ARL_NODE_INT || node->kind == ARL_NODE_FLOAT ||
           node->kind == ARL_NODE_BIGINT;
}

/* Why this value is not one, with the remedy that its writer most likely needs. */
static arl_status_t
wrong_kind(const arl_tree_t *tree, const arl_field_t *field, const arl_node_t *node,
           arl_error_t *err)
{
    bool scalar = node->kind != ARL_NODE_NULL && node->kind != ARL_NODE_LIST &&
                  node->kind != ARL_NODE_MAP && node->kind != ARL_NODE_FOREIGN;
    const char *hint = "";
    char shown[128];

    arl_node_show(node, shown, sizeof(shown));
    if (is_missing(node)) {
        return arl_tree_fail_at(
            tree, node, err, "a value is mandatory here, and '\?\?\?' was never replaced by one");
    }
    if (node->kind == ARL_NODE_TEXT && strstr(node->as.text.data, "${") != NULL) {
        return arl_tree_fail_at(tree, node, err,
                                "wants %s, found the interpolation %s that nobody resolved "
                                "(load_config resolves it, and so does OmegaConf)",
                                field_wants(field), shown);
    }
    if (node->kind == ARL_NODE_TEXT && field->kind == ARL_FIELD_CHOICE) {
        return arl_tree_fail_at(tree, node, err, "wants one of %s, found %s", field->choices,
                                shown);
    }
    if (node->kind == ARL_NODE_TEXT && node->quoted && field->kind != ARL_FIELD_PAIR) {
        hint = " (leave the quotes away)";
    }
    else if (node->kind == ARL_NODE_BOOL &&
             (field->kind == ARL_FIELD_TEXT || field->kind == ARL_FIELD_CHOICE)) {
        hint = " (yes, no, on and off are booleans in YAML: quote the word)";
    }
    else if (field->kind == ARL_FIELD_TEXT && is_number(node)) {
        hint = " (quote it)";
    }
    return arl_tree_fail_at(tree, node, err, "wants %s, found %s%s%s%s", field_wants(field),
                            scalar ? arl_node_kind_name(node) : "", scalar ? " " : "", shown, hint);
}

static arl_status_t
field_check(const arl_tree_t *tree, const arl_field_t *field, const arl_node_t *node,
            arl_error_t *err)
{
    bool plain_text = node->kind == ARL_NODE_TEXT && !is_missing(node) &&
                      strstr(node->as.text.data, "${") == NULL;

    if (node->kind == ARL_NODE_NULL && (field->flags & ARL_FIELD_NULLABLE) != 0) {
        return ARL_OK;
    }
    switch (field->kind) {
    case ARL_FIELD_BOOL:
        return node->kind == ARL_NODE_BOOL ? ARL_OK : wrong_kind(tree, field, node, err);
    case ARL_FIELD_INT:
        if (node->kind == ARL_NODE_INT || node->kind == ARL_NODE_BIGINT) {
            return number_check(tree, field, node, err);
        }
        return wrong_kind(tree, field, node, err);
    case ARL_FIELD_NUMBER:
        return is_number(node) ? number_check(tree, field, node, err)
                               : wrong_kind(tree, field, node, err);
    case ARL_FIELD_TEXT:
        return plain_text ? ARL_OK : wrong_kind(tree, field, node, err);
    case ARL_FIELD_CHOICE:
        return plain_text && in_choices(&node->as.text, field->choices)
                   ? ARL_OK
                   : wrong_kind(tree, field, node, err);
    case ARL_FIELD_PAIR:
        if (node->kind != ARL_NODE_LIST || node->as.list.count != 2 ||
            !is_number(node->as.list.items[0]) || !is_number(node->as.list.items[1])) {
            return wrong_kind(tree, field, node, err);
        }
        for (size_t i = 0; i < 2; i++) {
            arl_status_t status = number_check(tree, field, node->as.list.items[i], err);

            if (status != ARL_OK) {
                return status;
            }
        }
        return ARL_OK;
    }
    return ARL_OK;
}

/* ---- defaults --------------------------------------------------------------------------- */

/* A schema literal: a plain scalar, '' for empty text, or [a, b]. */
static arl_status_t
literal_node(arl_tree_t *tree, const char *literal, arl_node_t **node_p, arl_error_t *err)
{
    arl_status_t status;
    arl_node_t *node, *item;

    if (strcmp(literal, "''") == 0) {
        return arl_node_new_text(tree, "", 0, NULL, node_p, err);
    }
    status =
        arl_node_new(tree, literal[0] == '[' ? ARL_NODE_LIST : ARL_NODE_NULL, NULL, &node, err);
    if (status != ARL_OK) {
        return status;
    }
    if (literal[0] != '[') {
        status = arl_literal_read(tree, literal, strlen(literal), node, err);
    }
    else {
        for (const char *p = literal + 1; *p != '\0' && status == ARL_OK;) {
            size_t size = strcspn(p, ",]");

            status = literal_node(tree, "null", &item, err);
            if (status == ARL_OK) {
                status = arl_literal_read(tree, p, size, item, err);
            }
            if (status == ARL_OK) {
                status = arl_list_append(tree, node, item, err);
            }
            p += size + 1;
            p += strspn(p, " ");
        }
    }
    if (status == ARL_OK) {
        *node_p = node;
    }
    return status;
}

static arl_status_t
checkpoint_default(arl_tree_t *tree, arl_node_t **node_p, arl_error_t *err)
{
    const arl_node_t *project = arl_node_at(tree->root, "trainer.project_name");
    const arl_node_t *experiment = arl_node_at(tree->root, "trainer.experiment_name");
    char text[1024];

    (void)snprintf(
        text, sizeof(text), "checkpoints/%s/%s",
        project != NULL && project->kind == ARL_NODE_TEXT ? project->as.text.data : "verl_examples",
        experiment != NULL && experiment->kind == ARL_NODE_TEXT ? experiment->as.text.data
                                                                : "gsm8k");
    return arl_node_new_text(tree, text, strlen(text), NULL, node_p, err);
}

/* True when a value could be put there: nothing but maps and nulls on the way. */
static bool
way_is_open(const arl_node_t *node, const char *path)
{
    for (;;) {
        size_t size = strcspn(path, ".");
        arl_pair_t *pair;

        if (node->kind == ARL_NODE_NULL) {
            return true;
        }
        if (node->kind != ARL_NODE_MAP) {
            return false;
        }
        pair = arl_map_find(node, path, size);
        if (path[size] == '\0' || pair == NULL) {
            return true;
        }
        node = pair->value;
        path += size + 1;
    }
}

static arl_status_t
verl_default(arl_tree_t *tree, const arl_field_t *field, arl_error_t *err)
{
    arl_status_t status;
    arl_node_t *node;

    if (field->fallback != NULL) {
        status = literal_node(tree, field->fallback, &node, err);
    }
    else {
        status = checkpoint_default(tree, &node, err);
    }
    return status == ARL_OK ? arl_node_put(tree, tree->root, field->path, node, err) : status;
}

arl_status_t
arl_config_tree_defaults(arl_tree_t *tree, arl_error_t *err)
{
    for (size_t i = 0; i < arl_config_verl_count; i++) {
        const arl_field_t *field = &arl_config_verl_fields[i];
        arl_status_t status = ARL_OK;

        /* What is made of other keys has to wait until those are resolved. */
        if (field->fallback != NULL && arl_node_at(tree->root, field->path) == NULL &&
            way_is_open(tree->root, field->path)) {
            status = verl_default(tree, field, err);
        }
        if (status != ARL_OK) {
            return status;
        }
    }
    return ARL_OK;
}

static arl_status_t
verl_normalize(arl_tree_t *tree, arl_error_t *err)
{
    for (size_t i = 0; i < arl_config_verl_count; i++) {
        const arl_field_t *field = &arl_config_verl_fields[i];
        const arl_node_t *node = arl_node_at(tree->root, field->path);
        arl_status_t status = ARL_OK;

        if (node != NULL) {
            status = field_check(tree, field, node, err);
        }
        else if ((field->flags & ARL_FIELD_ABSENT) == 0) {
            status = verl_default(tree, field, err);
        }
        if (status != ARL_OK) {
            return status;
        }
    }
    return ARL_OK;
}

/* The default of an Arctic field. The verl keys are filled in already. */
static arl_status_t
arctic_default(const arl_normalizer_t *n, const arl_field_t *field, arl_node_t **node_p)
{
    const char *path = field->path, *from = NULL, *literal = field->fallback;
    const arl_node_t *other;

    if (n->seed && strcmp(path, "train.load_balancer") == 0) { /* on exactly when ZoRRO is */
        const arl_field_t *zorro = arl_config_field("train.zorro_train.enable", ARL_FORM_NESTED);

        other = arl_node_at(n->remote, arl_config_field_path(zorro, n->form));
        literal =
            other != NULL && other->kind == ARL_NODE_BOOL && other->as.boolean ? "true" : "false";
        return literal_node(n->tree, literal, node_p, n->err);
    }
    if (n->seed && field->seed_value != NULL) {
        literal = field->seed_value;
    }
    if (literal != NULL) {
        return literal_node(n->tree, literal, node_p, n->err);
    }
    if (strcmp(path, "train.zorro_train.max_rollouts") == 0) {
        from = "actor_rollout_ref.rollout.n";
    }
    else { /* the GPU counts */
        from = "trainer.n_gpus_per_node";
    }
    other = arl_node_at(n->tree->root, from);
    if (other != NULL) {
        return arl_node_copy(n->tree, other, 0, node_p, n->err);
    }
    return literal_node(n->tree, "1", node_p, n->err);
}

/* ---- shape: which form, and nothing unknown ------------------------------------------------ */

/* Text that C can compare: without '\0' inside. */
static bool
is_name(const arl_node_t *key)
{
    return key->kind == ARL_NODE_TEXT && strlen(key->as.text.data) == key->as.text.size;
}

static arl_status_t
not_a_key(const arl_tree_t *tree, const arl_node_t *key, arl_error_t *err)
{
    char shown[64];

    arl_node_show(key, shown, sizeof(shown));
    if (key->kind == ARL_NODE_TEXT) {
        return arl_tree_fail(
            tree, key, err, "keys of " ARCTIC " are text without a NUL character, found %s", shown);
    }
    if (key->kind == ARL_NODE_FOREIGN) { /* text with half of a surrogate pair, too */
        return arl_tree_fail(tree, key, err,
                             "keys of " ARCTIC " are text that UTF-8 can hold, found another "
                             "object");
    }
    return arl_tree_fail(tree, key, err, "keys of " ARCTIC " are text, found %s %s (quote it)",
                         arl_node_kind_name(key), shown);
}

/* The first key that only one form has decides; a key of the other form is then refused. */
static arl_status_t
find_form(arl_normalizer_t *n)
{
    const arl_node_t *decider = NULL;
    char place[PATH_MAX_BYTES], meant[SUGGEST_MAX];

    for (size_t i = 0; i < n->remote->as.map.count; i++) {
        const arl_node_t *key = n->remote->as.map.pairs[i].key;
        bool nested, flat;

        if (!is_name(key)) {
            return not_a_key(n->tree, key, n->err);
        }
        nested = arl_config_field(key->as.text.data, ARL_FORM_NESTED) != NULL ||
                 arl_config_is_group(key->as.text.data, ARL_FORM_NESTED);
        flat = arl_config_field(key->as.text.data, ARL_FORM_FLAT) != NULL ||
               arl_config_is_group(key->as.text.data, ARL_FORM_FLAT);
        if (nested == flat) {
            continue;
        }
        if (decider == NULL) {
            decider = key;
            n->form = nested ? ARL_FORM_NESTED : ARL_FORM_FLAT;
        }
        else if (nested != (n->form == ARL_FORM_NESTED)) {
            arl_node_where(n->tree, decider, place, sizeof(place));
            arl_config_suggest(key->as.text.data, n->form, meant, sizeof(meant));
            return arl_tree_fail_at(n->tree, key, n->err,
                                    "a key of the %s form, but '%s' (%s) is of the %s form, and "
                                    "the two do not mix; %s",
                                    nested ? "nested" : "flat", decider->as.text.data, place,
                                    nested ? "flat" : "nested", meant);
        }
    }
    return ARL_OK;
}

static arl_status_t
find_generation(arl_normalizer_t *n)
{
    const arl_node_t *given = arl_map_get(n->remote, "generation");

    n->seed = n->form == ARL_FORM_FLAT;
    if (given == NULL) {
        return ARL_OK;
    }
    if (!text_is(given, "seed") && !text_is(given, "final")) {
        char shown[64];

        arl_node_show(given, shown, sizeof(shown));
        return arl_tree_fail_at(n->tree, given, n->err, "wants seed or final, found %s", shown);
    }
    if (n->seed && text_is(given, "final")) {
        return arl_tree_fail_at(n->tree, given, n->err,
                                "the keys beside it are of the flat form, which is generation "
                                "'seed'");
    }
    n->seed = text_is(given, "seed");
    return ARL_OK;
}

static arl_status_t
unknown_key(const arl_normalizer_t *n, const arl_node_t *key, const char *path)
{
    char meant[SUGGEST_MAX];

    arl_config_suggest(path, n->form, meant, sizeof(meant));
    return arl_tree_fail_at(n->tree, key, n->err, "unknown key; %s", meant);
}

/* Every key below `map` must be one of the form's. `prefix` is its path with a dot, or "". */
static arl_status_t
check_known(const arl_normalizer_t *n, const arl_node_t *map, const char *prefix)
{
    arl_config_form_t form = n->form == ARL_FORM_FLAT ? ARL_FORM_FLAT : ARL_FORM_NESTED;

    for (size_t i = 0; i < map->as.map.count; i++) {
        const arl_pair_t *pair = &map->as.map.pairs[i];
        char path[PATH_MAX_BYTES], inner[PATH_MAX_BYTES + 1];
        arl_status_t status;

        if (!is_name(pair->key)) {
            return not_a_key(n->tree, pair->key, n->err);
        }
        (void)snprintf(path, sizeof(path), "%s%s", prefix, pair->key->as.text.data);
        if (arl_config_field(path, form) != NULL || strcmp(path, "generation") == 0) {
            continue;
        }
        if (!arl_config_is_group(path, form)) {
            if (form == ARL_FORM_NESTED && strncmp(path, "train.deepspeed.", 16) == 0) {
                continue; /* handed to DeepSpeed as it is */
            }
            return unknown_key(n, pair->key, path);
        }
        if (pair->value->kind == ARL_NODE_NULL) {
            continue; /* an empty block */
        }
        if (pair->value->kind != ARL_NODE_MAP) {
            char shown[64], meant[SUGGEST_MAX];

            arl_node_show(pair->value, shown, sizeof(shown));
            (void)snprintf(inner, sizeof(inner), "%s.", path);
            arl_config_suggest(inner, form, meant, sizeof(meant));
            return arl_tree_fail_at(n->tree, pair->value, n->err, "a block of keys, found %s; %s",
                                    shown, meant);
        }
        (void)snprintf(inner, sizeof(inner), "%s.", path);
        status = check_known(n, pair->value, inner);
        if (status != ARL_OK) {
            return status;
        }
    }
    return ARL_OK;
}

/* The switch of old recipes, which nobody reads any more, wherever it stands. */
static arl_status_t
check_old_names(const arl_tree_t *tree, const arl_node_t *node, arl_error_t *err)
{
    arl_status_t status = ARL_OK;

    for (size_t i = 0; node->kind == ARL_NODE_LIST && i < node->as.list.count; i++) {
        ARL_CHECK_GOTO(status, check_old_names(tree, node->as.list.items[i], err), out);
    }
    for (size_t i = 0; node->kind == ARL_NODE_MAP && i < node->as.map.count; i++) {
        const arl_pair_t *pair = &node->as.map.pairs[i];

        if (text_is(pair->key, "use_zorro")) {
            char meant[SUGGEST_MAX];

            arl_config_suggest("use_zorro", ARL_FORM_OPEN, meant, sizeof(meant));
            return arl_tree_fail_at(tree, pair->key, err, "nobody reads this key; %s", meant);
        }
        ARL_CHECK_GOTO(status, check_old_names(tree, pair->value, err), out);
    }
out:
    return status;
}

/* Keys beside remote_backend that can only have been meant for something else. */
static arl_status_t
check_root(const arl_tree_t *tree, arl_error_t *err)
{
    const arl_node_t *root = tree->root;
    arl_status_t status;

    for (size_t i = 0; i < root->as.map.count; i++) {
        const arl_pair_t *pair = &root->as.map.pairs[i];
        const char *name = pair->key->as.text.data;

        if (!is_name(pair->key)) {
            continue;
        }
        if (strcmp(name, "defaults") == 0 && pair->value->kind == ARL_NODE_LIST) {
            return arl_tree_fail_at(tree, pair->key, err,
                                    "this file is to be composed by Hydra, which has not been "
                                    "done; compose it and give the result to normalize_config");
        }
        if (strcmp(name, "train") == 0 || strcmp(name, "rollout") == 0 ||
            strcmp(name, ARCTIC) == 0) {
            continue; /* the first two: too common to be sure */
        }
        for (int form = ARL_FORM_NESTED; form <= ARL_FORM_FLAT; form++) {
            if (arl_config_field(name, (arl_config_form_t)form) != NULL ||
                arl_config_is_group(name, (arl_config_form_t)form)) {
                return arl_tree_fail_at(tree, pair->key, err,
                                        "nobody reads this key here; it belongs below " ARCTIC);
            }
        }
        status = check_old_names(tree, pair->value, err);
        if (status != ARL_OK) {
            return status;
        }
    }
    return ARL_OK;
}

/* ---- building --------------------------------------------------------------------------- */

/* In the first generation these switches do not exist: only their fixed value may be named. */
static arl_status_t
check_seed_value(const arl_normalizer_t *n, const arl_field_t *field, const arl_node_t *given)
{
    arl_status_t status;
    arl_node_t *fixed;
    char has[64], wants[64];

    status = arctic_default(n, field, &fixed);
    if (status != ARL_OK) {
        return status;
    }
    arl_node_show(given, has, sizeof(has));
    arl_node_show(fixed, wants, sizeof(wants));
    if (strcmp(has, wants) != 0) {
        return arl_tree_fail_at(n->tree, given, n->err,
                                "is %s, but generation 'seed' has no such switch: it is always %s",
                                has, wants);
    }
    return ARL_OK;
}

static arl_status_t
build_field(const arl_normalizer_t *n, const arl_field_t *field)
{
    const char *path = arl_config_field_path(field, n->form);
    arl_node_t *node = path == NULL ? NULL : arl_node_at(n->remote, path);
    arl_status_t status = ARL_OK;
    bool given;

    if (!n->seed && (field->flags & ARL_FIELD_SEED_ONLY) != 0) {
        return node == NULL ? ARL_OK
                            : arl_tree_fail_at(n->tree, node, n->err,
                                               "only generation 'seed' has this key; %s",
                                               "use train.logits.optimization");
    }
    given = node != NULL;
    if (!given) { /* checked too: some are taken from other keys */
        ARL_CHECK_GOTO(status, arctic_default(n, field, &node), out);
    }
    ARL_CHECK_GOTO(status, field_check(n->tree, field, node, n->err), out);
    if (given && n->seed && (field->flags & ARL_FIELD_FINAL_ONLY) != 0) {
        ARL_CHECK_GOTO(status, check_seed_value(n, field, node), out);
    }
out:
    return status == ARL_OK ? arl_node_put(n->tree, n->result, field->path, node, n->err) : status;
}

/* Adds what `from` has and `to` has not, at every level. */
static arl_status_t
adopt_missing(arl_tree_t *tree, arl_node_t *to, const arl_node_t *from, arl_error_t *err)
{
    for (size_t i = 0; i < from->as.map.count; i++) {
        const arl_pair_t *pair = &from->as.map.pairs[i];
        arl_pair_t *own = arl_map_find_node(to, pair->key);
        arl_status_t status = ARL_OK;

        if (own == NULL) {
            status = arl_map_set_node(tree, to, pair->key, pair->value, err);
        }
        else if (own->value->kind == ARL_NODE_MAP && pair->value->kind == ARL_NODE_MAP) {
            status = adopt_missing(tree, own->value, pair->value, err);
        }
        if (status != ARL_OK) {
            return status;
        }
    }
    return ARL_OK;
}

static arl_status_t
build(arl_normalizer_t *n)
{
    const arl_node_t *deepspeed = arl_node_at(n->remote, "train.deepspeed");
    arl_node_t *generation;
    arl_status_t status;

    ARL_CHECK_GOTO(status, arl_node_new(n->tree, ARL_NODE_MAP, n->remote, &n->result, n->err), out);
    for (size_t i = 0; i < arl_config_arctic_count; i++) {
        ARL_CHECK_GOTO(status, build_field(n, &arl_config_arctic_fields[i]), out);
    }
    if (n->form != ARL_FORM_FLAT && deepspeed != NULL && deepspeed->kind == ARL_NODE_MAP) {
        ARL_CHECK_GOTO(
            status,
            adopt_missing(n->tree, arl_node_at(n->result, "train.deepspeed"), deepspeed, n->err),
            out);
    }
    ARL_CHECK_GOTO(status, literal_node(n->tree, n->seed ? "seed" : "final", &generation, n->err),
                   out);
    ARL_CHECK_GOTO(status, arl_map_set(n->tree, n->result, "generation", generation, n->err), out);
    status = arl_map_set(n->tree, n->tree->root, ARCTIC, n->result, n->err);
out:
    return status;
}

arl_status_t
arl_config_tree_normalize(arl_tree_t *tree, arl_error_t *err)
{
    arl_normalizer_t n = {.tree = tree, .form = ARL_FORM_OPEN, .err = err};
    arl_status_t status;

    if (tree->root->kind != ARL_NODE_MAP) {
        return arl_tree_fail(tree, tree->root, err, "a configuration is a mapping, found %s",
                             arl_node_kind_name(tree->root));
    }
    n.remote = arl_map_get(tree->root, ARCTIC);
    if (n.remote == NULL || n.remote->kind == ARL_NODE_NULL) {
        ARL_CHECK_GOTO(status, arl_node_new(tree, ARL_NODE_MAP, n.remote, &n.remote, err), out);
    }
    if (n.remote->kind != ARL_NODE_MAP) {
        return arl_tree_fail_at(tree, n.remote, err, "a block of keys, found %s",
                                arl_node_kind_name(n.remote));
    }
    ARL_CHECK_GOTO(status, check_root(tree, err), out);
    ARL_CHECK_GOTO(status, find_form(&n), out);
    ARL_CHECK_GOTO(status, find_generation(&n), out);
    ARL_CHECK_GOTO(status, check_known(&n, n.remote, ""), out);
    ARL_CHECK_GOTO(status, verl_normalize(tree, err), out);
    ARL_CHECK_GOTO(status, build(&n), out);
    status = arl_config_tree_check(tree, err);
out:
    return status;
}
