/* SPDX-License-Identifier: Apache-2.0 */
/* Finding keys by name, and guessing which one was meant when there is none. */
#include "core/arl_config.h"

#include <stdio.h>
#include <string.h>

#define ARCTIC "remote_backend."

enum { NAME_MAX_BYTES = 96, RANK_NONE = 1000 };

/* Names that have been used for these switches, and that no rule below would lead to them. */
static const struct {
    const char *old;
    const char *path;
} renamed[] = {
    {"use_zorro", "train.zorro_train.enable"},
    {"enable_zorro", "train.zorro_train.enable"},
    {"zorro", "train.zorro_train.enable"},
    {"use_arctic_inference", "rollout.zorro_inference.enable"},
    {"full_determinism", "train.determinism.full"},
    {"tensor_parallel_size", "sampling_tp_size"},
    {"tp_size", "sampling_tp_size"},
    {"reference_gpus", "log_prob_gpus"},
    {"ref_gpus", "log_prob_gpus"},
    {"zero_stage", "train.deepspeed.zero_optimization.stage"},
    {"ds_config", "train.deepspeed"},
    {"logits_compute", "train.logits.optimization"},
};

const char *
arl_config_field_path(const arl_field_t *field, arl_config_form_t form)
{
    if (form == ARL_FORM_FLAT) {
        return field->flat;
    }
    return field->path;
}

const arl_field_t *
arl_config_field(const char *path, arl_config_form_t form)
{
    for (size_t i = 0; i < arl_config_arctic_count; i++) {
        const char *own = arl_config_field_path(&arl_config_arctic_fields[i], form);

        if (own != NULL && strcmp(own, path) == 0) {
            return &arl_config_arctic_fields[i];
        }
    }
    return NULL;
}

static bool
is_below(const char *path, const char *group)
{
    size_t size = strlen(group);

    return strncmp(path, group, size) == 0 && path[size] == '.';
}

bool
arl_config_is_group(const char *path, arl_config_form_t form)
{
    for (size_t i = 0; i < arl_config_arctic_count; i++) {
        const char *own = arl_config_field_path(&arl_config_arctic_fields[i], form);

        if (own != NULL && is_below(own, path)) {
            return true;
        }
    }
    return false;
}

bool
arl_config_path_known(const char *path)
{
    if (strcmp(path, "remote_backend") == 0) {
        return true;
    }
    if (is_below(path, "remote_backend")) {
        const char *rest = path + strlen(ARCTIC);

        return strcmp(rest, "generation") == 0 || arl_config_field(rest, ARL_FORM_NESTED) != NULL ||
               arl_config_field(rest, ARL_FORM_FLAT) != NULL ||
               arl_config_is_group(rest, ARL_FORM_NESTED) ||
               arl_config_is_group(rest, ARL_FORM_FLAT);
    }
    for (size_t i = 0; i < arl_config_verl_count; i++) {
        const char *own = arl_config_verl_fields[i].path;

        if (strcmp(own, path) == 0 || is_below(own, path)) {
            return true;
        }
    }
    return false;
}

/* ---- guessing --------------------------------------------------------------------------- */

static size_t
smaller(size_t a, size_t b)
{
    return a < b ? a : b;
}

/* Edits between two names: insert, delete, replace, swap neighbours. */
static size_t
edit_distance(const char *a, const char *b)
{
    size_t rows[3][NAME_MAX_BYTES + 1];
    size_t *before = rows[0], *last = rows[1], *row = rows[2], *spare;
    size_t na = strlen(a), nb = strlen(b);

    if (na > NAME_MAX_BYTES || nb > NAME_MAX_BYTES) {
        return RANK_NONE;
    }
    for (size_t j = 0; j <= nb; j++) {
        last[j] = j;
        before[j] = 0;
    }
    for (size_t i = 1; i <= na; i++) {
        row[0] = i;
        for (size_t j = 1; j <= nb; j++) {
            row[j] =
                smaller(smaller(last[j], row[j - 1]) + 1, last[j - 1] + (a[i - 1] != b[j - 1]));
            if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) {
                row[j] = smaller(row[j], before[j - 2] + 1);
            }
        }
        spare = before;
        before = last;
        last = row;
        row = spare;
    }
    return last[nb];
}

static const char *
leaf_of(const char *path)
{
    const char *dot = strrchr(path, '.');

    return dot == NULL ? path : dot + 1;
}

/* True when the names are equal once dots and underscores count the same. */
static bool
same_words(const char *a, const char *b)
{
    for (; *a != '\0' || *b != '\0'; a++, b++) {
        if ((*a == '.' ? '_' : *a) != (*b == '.' ? '_' : *b)) {
            return false;
        }
    }
    return true;
}

/* True when some tail of `path`, from a dot on, reads like `name`. */
static bool
tail_matches(const char *path, const char *name)
{
    for (;;) {
        if (same_words(path, name)) {
            return true;
        }
        path = strchr(path, '.');
        if (path == NULL) {
            return false;
        }
        path++;
    }
}

/* How far `candidate` is from what was written; RANK_NONE: too far to name it. */
static size_t
candidate_rank(const char *written, const char *candidate)
{
    const char *written_leaf = leaf_of(written);
    size_t whole = edit_distance(written, candidate);
    size_t leaf = edit_distance(written_leaf, leaf_of(candidate));

    if (same_words(written, candidate)) {
        return 0;
    }
    if (tail_matches(candidate, written_leaf) || tail_matches(candidate, written)) {
        return 100 + whole;
    }
    if (whole <= 2 || whole * 4 <= strlen(written)) {
        return 200 + whole;
    }
    if (leaf <= 2 && leaf * 3 <= strlen(written_leaf)) {
        return 300 + 10 * leaf + whole;
    }
    return RANK_NONE;
}

typedef struct guess {
    const arl_field_t *field;
    size_t length; /* of the prefix of the field's path that was meant */
    arl_config_form_t form;
    size_t rank;
} guess_t;

/* Tries a field's path in one form, and every group that it is in. */
static void
guess_field(guess_t *best, const char *written, const arl_field_t *field, arl_config_form_t form)
{
    const char *path = arl_config_field_path(field, form);
    char prefix[NAME_MAX_BYTES];

    if (path == NULL) {
        return;
    }
    for (size_t size = strlen(path); size > 0 && size < sizeof(prefix);) {
        size_t rank;

        memcpy(prefix, path, size);
        prefix[size] = '\0';
        rank = candidate_rank(written, prefix);
        if (rank < best->rank) {
            *best = (guess_t){field, size, form, rank};
        }
        while (size > 0 && path[size - 1] != '.') {
            size--;
        }
        size -= size > 0;
    }
}

static guess_t
guess_name(const char *written, arl_config_form_t form)
{
    guess_t best = {.rank = RANK_NONE};

    for (size_t i = 0; i < sizeof(renamed) / sizeof(renamed[0]); i++) {
        const arl_field_t *field = arl_config_field(renamed[i].path, ARL_FORM_NESTED);

        if (field != NULL && strcmp(leaf_of(written), renamed[i].old) == 0) {
            return (guess_t){field, strlen(field->path), ARL_FORM_NESTED, 0};
        }
    }
    for (size_t i = 0; i < arl_config_arctic_count; i++) {
        /* The own form first: at an equal rank it wins. */
        guess_field(&best, written, &arl_config_arctic_fields[i],
                    form == ARL_FORM_FLAT ? ARL_FORM_FLAT : ARL_FORM_NESTED);
    }
    for (size_t i = 0; i < arl_config_arctic_count; i++) {
        guess_field(&best, written, &arl_config_arctic_fields[i],
                    form == ARL_FORM_FLAT ? ARL_FORM_NESTED : ARL_FORM_FLAT);
    }
    return best;
}

/* The keys right below a group ("" for the block itself). */
static void
list_keys(const char *group, arl_config_form_t form, char *out, size_t size)
{
    size_t used = (size_t)snprintf(out, size, "known here: ");
    const char *previous = "";
    size_t previous_size = 0, skip = strlen(group);
    bool first = true;

    for (size_t i = 0; i < arl_config_arctic_count; i++) {
        const char *path = arl_config_field_path(&arl_config_arctic_fields[i], form);
        size_t length;

        if (path == NULL || strncmp(path, group, skip) != 0) {
            continue;
        }
        length = strcspn(path + skip, ".");
        if (length == previous_size && strncmp(path + skip, previous, length) == 0) {
            continue;
        }
        previous = path + skip;
        previous_size = length;
        if (used + length + 3 >= size) {
            return;
        }
        used += (size_t)snprintf(out + used, size - used, "%s%.*s", first ? "" : ", ", (int)length,
                                 previous);
        first = false;
    }
}

/* The guess in a form: its path there and how much of it to show. NULL: it does not exist. */
static const char *
guess_in(const guess_t *guess, arl_config_form_t form, int *length_p)
{
    const char *own = arl_config_field_path(guess->field, guess->form);
    const char *path = arl_config_field_path(guess->field, form);
    const char *rest = own + guess->length;
    size_t size = path == NULL ? 0 : strlen(path);

    /* A group is shown as a group where the other form has it too. */
    if (size > strlen(rest) && strcmp(path + size - strlen(rest), rest) == 0) {
        size -= strlen(rest);
    }
    *length_p = (int)size;
    return path;
}

void
arl_config_suggest(const char *path, arl_config_form_t form, char *out, size_t size)
{
    size_t length = strlen(path);
    char group[NAME_MAX_BYTES] = "";
    const char *nested, *flat;
    int nested_size, flat_size;
    guess_t guess;

    if (length > 0 && path[length - 1] == '.') { /* a group that was given a value of its own */
        list_keys(path, form == ARL_FORM_FLAT ? ARL_FORM_FLAT : ARL_FORM_NESTED, out, size);
        return;
    }
    guess = guess_name(path, form);
    if (guess.rank == RANK_NONE) {
        (void)snprintf(group, sizeof(group), "%.*s", (int)(leaf_of(path) - path), path);
        list_keys(group, form == ARL_FORM_FLAT ? ARL_FORM_FLAT : ARL_FORM_NESTED, out, size);
        return;
    }
    nested = guess_in(&guess, ARL_FORM_NESTED, &nested_size);
    flat = guess_in(&guess, ARL_FORM_FLAT, &flat_size);
    if (form == ARL_FORM_FLAT && flat == NULL) {
        (void)snprintf(out, size, "only the nested form has it, as " ARCTIC "%.*s", nested_size,
                       nested);
    }
    else if (form == ARL_FORM_FLAT) {
        (void)snprintf(out, size, "did you mean " ARCTIC "%.*s?", flat_size, flat);
    }
    else if (form == ARL_FORM_NESTED || flat == NULL ||
             (nested_size == flat_size && strncmp(nested, flat, (size_t)flat_size) == 0)) {
        (void)snprintf(out, size, "did you mean " ARCTIC "%.*s?", nested_size, nested);
    }
    else {
        (void)snprintf(out, size,
                       "did you mean " ARCTIC "%.*s (or " ARCTIC "%.*s in the flat form)?",
                       nested_size, nested, flat_size, flat);
    }
}
