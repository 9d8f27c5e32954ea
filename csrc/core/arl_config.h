/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARL_CORE_CONFIG_H
#define ARL_CORE_CONFIG_H

#include "core/arl_tree.h"

/*
 * What the Arctic block and the verl keys beside it may hold, and the one form that everything
 * else works on: `remote_backend` nested, every default filled in, and
 * `remote_backend.generation` saying which form it came in.
 */

typedef enum arl_field_kind {
    ARL_FIELD_BOOL,
    ARL_FIELD_INT,
    ARL_FIELD_NUMBER, /* int or float */
    ARL_FIELD_TEXT,
    ARL_FIELD_CHOICE, /* text, one of `choices` */
    ARL_FIELD_PAIR,   /* a list of two numbers */
} arl_field_kind_t;

enum {
    ARL_FIELD_NULLABLE = 1,  /* null is a value of its own */
    ARL_FIELD_ABSENT = 2,    /* no default: stays away when it is not given */
    ARL_FIELD_SEED_ONLY = 4, /* exists in the first generation alone */
    ARL_FIELD_FINAL_ONLY =
        8, /* the first generation has no such switch: `seed_value` holds there */
};

/* One key. Paths of the Arctic block are relative to remote_backend, the others full. */
typedef struct arl_field {
    const char *path; /* nested form */
    const char *flat; /* flat form; NULL: it has no such key */
    arl_field_kind_t kind;
    unsigned flags;
    const char *fallback; /* the default as a plain YAML scalar or a "[a, b]" pair; NULL: see doc */
    const char *seed_value; /* default in the first generation where it differs */
    const char *choices;    /* "a|b|c" */
    double min, max;
    const char *doc;
} arl_field_t;

extern const arl_field_t arl_config_arctic_fields[];
extern const size_t arl_config_arctic_count;
extern const arl_field_t arl_config_verl_fields[];
extern const size_t arl_config_verl_count;

enum { ARL_CONFIG_SEED = 1, ARL_CONFIG_FINAL = 2 };

/* An option that is warned about when it is given and is none of `harmless`, values as
 * arl_node_show writes them with spaces between. */
typedef struct arl_config_ignored {
    const char *path;
    int generations; /* ARL_CONFIG_SEED | ARL_CONFIG_FINAL */
    const char *harmless;
    const char *why;
} arl_config_ignored_t;

extern const arl_config_ignored_t arl_config_ignored[];
extern const size_t arl_config_ignored_count;

/* Turns the root (a map) into the normalised form, in place; what it was made of stays in the
 * tree. Interpolations must have been resolved. Running it on its own result changes nothing. */
arl_status_t arl_config_tree_normalize(arl_tree_t *tree, arl_error_t *err);

/* Values that contradict each other, or that the server is known to fail on. For a normalised
 * tree; called by arl_config_tree_normalize. */
arl_status_t arl_config_tree_check(const arl_tree_t *tree, arl_error_t *err);

/* Appends to `list` one text for every value that will have no effect, or another than its name
 * says. For a normalised tree. */
arl_status_t arl_config_tree_warnings(arl_tree_t *tree, arl_node_t *list, arl_error_t *err);

/* Fills in verl's defaults, so that ${actor_rollout_ref.rollout.n} resolves in a file that leaves
 * them to verl. For a tree that is not resolved yet: skips what an interpolation stands before. */
arl_status_t arl_config_tree_defaults(arl_tree_t *tree, arl_error_t *err);

/* True when the dotted path is a key of either form (or a part of one): an override may set it
 * without "+". */
bool arl_config_path_known(const char *path);

typedef enum arl_config_form {
    ARL_FORM_OPEN, /* nothing yet tells flat from nested */
    ARL_FORM_NESTED,
    ARL_FORM_FLAT,
} arl_config_form_t;

/* Writes what may have been meant by an unknown key below remote_backend, as the end of a
 * sentence; `path` is relative to it. */
void arl_config_suggest(const char *path, arl_config_form_t form, char *out, size_t size);

/* The field with that path in that form, or NULL. */
const arl_field_t *arl_config_field(const char *path, arl_config_form_t form);

/* True when some field's path in that form begins with `path` and a dot. */
bool arl_config_is_group(const char *path, arl_config_form_t form);

/* The path of a field in a form; NULL where it does not exist there. */
const char *arl_config_field_path(const arl_field_t *field, arl_config_form_t form);

#endif
