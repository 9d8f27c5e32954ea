/* SPDX-License-Identifier: Apache-2.0 */
#include "core/arl_binding.h"

#include "core/arl_overlap.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { NONE = -1, LISTED_MAX = 10, SHOWN_MAX = 80 };

static const char BIND[] = "bind parameters";
static const char CHECK[] = "check offer";

/* ---- the set --------------------------------------------------------------------------------- */

static arl_status_t
check_binding(const arl_binding_t *binding, arl_error_t *err)
{
    const arl_view_t *dst = &binding->dst;
    const int length = (int)binding->name_length;
    char text[96];

    if (binding->name_length == 0 || binding->name_length > ARL_OFFER_NAME_MAX) {
        return arl_error_set(err, ARL_ERR_VALUE, BIND,
                             "a parameter's name has %u bytes, 1 to %d are supported",
                             binding->name_length, (int)ARL_OFFER_NAME_MAX);
    }
    if (binding->expected) {
        return ARL_OK;
    }
    arl_view_describe(dst, text, sizeof(text));
    if (binding->dim >= 0) {
        if (binding->dim >= dst->ndim) {
            return arl_error_set(err, ARL_ERR_VALUE, BIND,
                                 "%.*s: is bound along dimension %d, but the destination is %s",
                                 length, binding->name, binding->dim, text);
        }
        if (binding->start < 0 || binding->full < 0 || binding->start > binding->full ||
            dst->shape[binding->dim] > binding->full - binding->start) {
            return arl_error_set(err, ARL_ERR_VALUE, BIND,
                                 "%.*s: destination %s takes [%lld, +%lld) of dimension %d, which "
                                 "has %lld in the source",
                                 length, binding->name, text, (long long)binding->start,
                                 (long long)dst->shape[binding->dim], binding->dim,
                                 (long long)binding->full);
        }
    }
    if (arl_overlap_self(dst)) {
        return arl_error_set(err, ARL_ERR_VALUE, BIND,
                             "%.*s: elements of the destination %s share memory (an expanded "
                             "view?); it cannot be written to",
                             length, binding->name, text);
    }
    return ARL_OK;
}

typedef struct span {
    uintptr_t low;
    uintptr_t high;
    uint32_t binding;
} span_t;

static int
span_compare(const void *a, const void *b)
{
    const span_t *x = a, *y = b;

    if (x->low != y->low) {
        return x->low < y->low ? -1 : 1;
    }
    return x->binding < y->binding ? -1 : 1;
}

static bool
bindings_same(const arl_binding_t *a, const arl_binding_t *b)
{
    return arl_overlap_same(&a->dst, &b->dst) && a->dim == b->dim &&
           (a->dim < 0 || (a->start == b->start && a->full == b->full));
}

static arl_status_t
check_pair(arl_binding_set_t *set, uint32_t i, uint32_t j, arl_error_t *err)
{
    const arl_binding_t *a = &set->bindings[i], *b = &set->bindings[j];

    if (bindings_same(a, b)) {
        const uint32_t first = set->twin[i] < set->twin[j] ? set->twin[i] : set->twin[j];

        set->twin[i] = first;
        set->twin[j] = first;
        return ARL_OK;
    }
    if (arl_overlap_views(&a->dst, &b->dst)) {
        char text_a[96], text_b[96];

        arl_view_describe(&a->dst, text_a, sizeof(text_a));
        arl_view_describe(&b->dst, text_b, sizeof(text_b));
        return arl_error_set(
            err, ARL_ERR_VALUE, BIND, "the destinations of %.*s (%s) and %.*s (%s) overlap",
            (int)a->name_length, a->name, text_a, (int)b->name_length, b->name, text_b);
    }
    return ARL_OK;
}

/* Compares the destinations that come near each other, in the order of their addresses. */
static arl_status_t
check_overlaps(arl_binding_set_t *set, arl_error_t *err)
{
    span_t *spans = malloc(((size_t)set->count + 1) * sizeof(*spans));
    uint32_t n = 0;
    arl_status_t status = ARL_OK;

    if (spans == NULL) {
        return arl_error_set(err, ARL_ERR_NOMEM, BIND, "out of memory for %u bindings", set->count);
    }
    for (uint32_t i = 0; i < set->count; i++) {
        const arl_view_t *dst = &set->bindings[i].dst;
        int64_t low, high;

        set->twin[i] = i;
        if (set->bindings[i].expected) {
            continue;
        }
        arl_view_extent(dst, &low, &high);
        if (low != high) {
            spans[n++] = (span_t){(uintptr_t)dst->data + (uintptr_t)low,
                                  (uintptr_t)dst->data + (uintptr_t)high, i};
        }
    }
    qsort(spans, n, sizeof(*spans), span_compare);
    for (uint32_t i = 0; i < n; i++) {
        for (uint32_t j = i + 1; j < n && spans[j].low < spans[i].high; j++) {
            ARL_CHECK_GOTO(status, check_pair(set, spans[i].binding, spans[j].binding, err),
                           free_spans);
        }
    }
free_spans:
    free(spans);
    return status;
}

static bool
text_contains(const char *name, uint32_t length, const arl_text_t *part)
{
    return part->length > 0 && memmem(name, length, part->text, part->length) != NULL;
}

bool
arl_binding_set_excludes(const arl_binding_set_t *set, const char *name, uint32_t length)
{
    for (uint32_t i = 0; i < set->excluded_count; i++) {
        if (text_contains(name, length, &set->excluded[i])) {
            return true;
        }
    }
    return false;
}

arl_status_t
arl_binding_set_init(arl_binding_set_t *set, arl_error_t *err)
{
    const size_t count = (size_t)set->count + 1; /* malloc(0) may be NULL */
    arl_status_t status;

    set->names = 0;
    set->next = malloc(count * sizeof(*set->next));
    set->twin = malloc(count * sizeof(*set->twin));
    if (set->next == NULL || set->twin == NULL) {
        status =
            arl_error_set(err, ARL_ERR_NOMEM, BIND, "out of memory for %u bindings", set->count);
        goto free_set;
    }
    ARL_CHECK_GOTO(status, arl_names_init(&set->index, set->count, err), free_set);
    for (uint32_t i = 0; i < set->count; i++) {
        const arl_binding_t *binding = &set->bindings[i];
        uint32_t first;

        ARL_CHECK_GOTO(status, check_binding(binding, err), free_set);
        set->next[i] = UINT32_MAX;
        first = arl_names_add(&set->index, binding->name, binding->name_length, i);
        if (first != i) {
            set->next[i] = set->next[first];
            set->next[first] = i;
        }
        else if (!arl_binding_set_excludes(set, binding->name, binding->name_length)) {
            set->names++;
        }
    }
    ARL_CHECK_GOTO(status, check_overlaps(set, err), free_set);
    return ARL_OK;
free_set:
    arl_binding_set_free(set);
    return status;
}

void
arl_binding_set_free(arl_binding_set_t *set)
{
    arl_names_free(&set->index);
    free(set->next);
    free(set->twin);
    set->next = NULL;
    set->twin = NULL;
    set->names = 0;
}

/* ---- checking names -------------------------------------------------------------------------- */

/* What is known while an offer is checked. */
typedef struct check {
    const arl_offer_t *offer;
    const arl_binding_set_t *set;
    const char *context;
    int64_t *source;  /* for each name (its first binding): tensor of the offer, or NONE */
    int64_t *bound;   /* for each tensor of the offer that is nobody's alias: tensor of its
                       * group that has a binding, or NONE */
    bool *alias_name; /* for each first binding: it is a declared alias of another */
    uint32_t sender_names;
    uint32_t expected_names; /* a tied tensor counts once, unless both names were sent */
} check_t;

static bool
check_excluded(const check_t *check, uint32_t tensor)
{
    const arl_offer_tensor_t *t = &check->offer->tensors[tensor];

    return arl_binding_set_excludes(check->set, t->name, t->name_length);
}

/* Gives each name that was sent its tensor. */
static void
match_names(check_t *check)
{
    const arl_offer_t *offer = check->offer;

    for (uint32_t i = 0; i < offer->tensor_count; i++) {
        const arl_offer_tensor_t *tensor = &offer->tensors[i];
        uint32_t binding;

        if (check_excluded(check, i)) {
            continue;
        }
        check->sender_names++;
        if (arl_names_find(&check->set->index, tensor->name, tensor->name_length, &binding)) {
            check->source[binding] = i;
            check->bound[tensor->alias_of] = i;
        }
    }
}

/*
 * Declared aliases: whichever of the two names was sent serves the other. `sent` is an index of
 * the offer's names. Where both were sent, each goes to its own binding; where only the target
 * is bound here, the alias's own bytes are not needed.
 */
static void
match_aliases(check_t *check, const arl_names_t *sent)
{
    const arl_binding_set_t *set = check->set;

    for (uint32_t i = 0; i < set->alias_count; i++) {
        const arl_alias_t *alias = &set->aliases[i];
        uint32_t name_binding, target_binding, name_tensor, target_tensor;
        const bool has_name =
            arl_names_find(&set->index, alias->name, alias->name_length, &name_binding);
        const bool has_target =
            arl_names_find(&set->index, alias->target, alias->target_length, &target_binding);
        const bool sent_name = arl_names_find(sent, alias->name, alias->name_length, &name_tensor);
        const bool sent_target =
            arl_names_find(sent, alias->target, alias->target_length, &target_tensor);

        if (has_name) {
            check->alias_name[name_binding] = true;
        }
        if (has_name && !sent_name && sent_target) {
            check->source[name_binding] = target_tensor;
            check->bound[check->offer->tensors[target_tensor].alias_of] = target_tensor;
        }
        if (has_target && !sent_target && sent_name) {
            check->source[target_binding] = name_tensor;
            check->bound[check->offer->tensors[name_tensor].alias_of] = name_tensor;
        }
        if (!has_name && has_target && sent_name) {
            check->bound[check->offer->tensors[name_tensor].alias_of] = name_tensor;
        }
    }
}

/* The bytes of twins arrive through either name. */
static void
match_twins(check_t *check)
{
    const arl_binding_set_t *set = check->set;

    for (uint32_t i = 0; i < set->count; i++) {
        const uint32_t twin = set->twin[i];
        uint32_t a, b;

        if (twin == i ||
            !arl_names_find(&set->index, set->bindings[i].name, set->bindings[i].name_length, &a) ||
            !arl_names_find(&set->index, set->bindings[twin].name, set->bindings[twin].name_length,
                            &b)) {
            continue;
        }
        if (check->source[a] == NONE && set->next[a] == UINT32_MAX) {
            check->source[a] = check->source[b];
        }
        else if (check->source[b] == NONE && set->next[b] == UINT32_MAX) {
            check->source[b] = check->source[a];
        }
    }
}

typedef struct name_list {
    const arl_text_t *names;
    uint32_t count;
} name_list_t;

static int
text_compare(const void *a, const void *b)
{
    const arl_text_t *x = a, *y = b;
    const int order = memcmp(x->text, y->text, x->length < y->length ? x->length : y->length);

    return order != 0 ? order : (x->length > y->length) - (x->length < y->length);
}

static void
append_names(char *text, size_t size, const char *title, const name_list_t *list)
{
    size_t used = strlen(text);

    if (list->count == 0) {
        return;
    }
    (void)snprintf(text + used, size - used, " %u %s:", list->count, title);
    for (uint32_t i = 0; i < list->count && i < LISTED_MAX; i++) {
        const arl_text_t *name = &list->names[i];
        const bool cut = name->length > SHOWN_MAX;

        used = strlen(text);
        (void)snprintf(text + used, size - used, "%s %.*s%s", i == 0 ? "" : ",",
                       cut ? SHOWN_MAX : (int)name->length, name->text, cut ? "…" : "");
    }
    used = strlen(text);
    (void)snprintf(text + used, size - used, "%s;", list->count > LISTED_MAX ? ", …" : "");
}

static arl_status_t
names_error(const check_t *check, name_list_t *missing, name_list_t *unknown, arl_error_t *err)
{
    char text[ARL_ERROR_TEXT_MAX] = "";

    qsort((void *)missing->names, missing->count, sizeof(arl_text_t), text_compare);
    qsort((void *)unknown->names, unknown->count, sizeof(arl_text_t), text_compare);
    append_names(text, sizeof(text), "expected but not sent", missing);
    append_names(text, sizeof(text), "sent but not expected", unknown);
    return arl_error_set(err, ARL_ERR_MISMATCH, CHECK,
                         "Weight-sync param name mismatch [%s]:%s (sender_count=%u, "
                         "expected_count=%u)",
                         check->context, text, check->sender_names, check->expected_names);
}

/* Whether the bytes of a name arrive under another one: it is tied, or has an alias. */
static bool
served_by_other(const check_t *check, uint32_t first)
{
    const arl_binding_t *binding = &check->set->bindings[first];
    const arl_offer_tensor_t *sent;

    if (check->source[first] == NONE) {
        return false;
    }
    sent = &check->offer->tensors[check->source[first]];
    return sent->name_length != binding->name_length ||
           memcmp(sent->name, binding->name, binding->name_length) != 0;
}

/* Both ways. `untouched_p` counts the names that a partial offer leaves out. */
static arl_status_t
check_names(check_t *check, uint32_t *untouched_p, arl_error_t *err)
{
    const arl_binding_set_t *set = check->set;
    const arl_offer_t *offer = check->offer;
    arl_text_t *names = malloc(((size_t)set->count + offer->tensor_count + 1) * sizeof(*names));
    name_list_t missing = {names, 0}, unknown;
    uint32_t n = 0, first;
    arl_status_t status = ARL_OK;

    if (names == NULL) {
        return arl_error_set(err, ARL_ERR_NOMEM, CHECK, "out of memory for %u names", set->count);
    }
    check->expected_names = set->names;
    for (uint32_t i = 0; i < set->count; i++) {
        const arl_binding_t *binding = &set->bindings[i];

        if (!arl_names_find(&set->index, binding->name, binding->name_length, &first) ||
            first != i || arl_binding_set_excludes(set, binding->name, binding->name_length)) {
            continue;
        }
        if (check->source[i] == NONE) {
            names[n++] = (arl_text_t){binding->name, binding->name_length};
        }
        else if (served_by_other(check, i)) {
            check->expected_names--;
        }
    }
    missing.count = n;
    unknown.names = names + n;
    for (uint32_t i = 0; i < offer->tensor_count; i++) {
        const arl_offer_tensor_t *tensor = &offer->tensors[i];

        if (check->bound[tensor->alias_of] == NONE && !check_excluded(check, i)) {
            names[n++] = (arl_text_t){tensor->name, tensor->name_length};
        }
    }
    unknown.count = n - missing.count;
    *untouched_p = missing.count;
    if (unknown.count > 0 || (missing.count > 0 && !set->partial)) {
        status = names_error(check, &missing, &unknown, err);
    }
    else if (missing.count == set->names) {
        status = arl_error_set(err, ARL_ERR_MISMATCH, CHECK,
                               "offer and receiver have no name in common that is to be synced "
                               "(sender_count=%u, expected_count=%u): nothing would be written",
                               check->sender_names, check->expected_names);
    }
    free(names);
    return status;
}

/* ---- checking tensors, making copies ------------------------------------------------------- */

arl_view_t
arl_binding_box(const arl_binding_t *binding, const arl_view_t *source)
{
    arl_view_t box = *source;

    if (binding->dim >= 0) {
        box.shape[binding->dim] = binding->dst.shape[binding->dim];
        box.data = (char *)source->data + binding->start * source->strides[binding->dim];
    }
    return box;
}

static arl_status_t
check_shape(const check_t *check, const arl_binding_t *binding, uint32_t tensor, arl_error_t *err)
{
    const arl_view_t source = arl_offer_tensor_view(check->offer, tensor, NULL);
    const arl_offer_tensor_t *sent = &check->offer->tensors[tensor];
    arl_view_t wanted = binding->dst;
    char found_text[96], wanted_text[96], box_text[96] = "";

    if (binding->dim >= 0) {
        wanted.shape[binding->dim] = binding->full;
    }
    if (source.dtype == wanted.dtype && source.ndim == wanted.ndim &&
        memcmp(source.shape, wanted.shape, (size_t)source.ndim * sizeof(source.shape[0])) == 0) {
        return ARL_OK;
    }
    arl_view_describe(&source, found_text, sizeof(found_text));
    arl_view_describe(&wanted, wanted_text, sizeof(wanted_text));
    if (binding->dim >= 0) {
        (void)snprintf(box_text, sizeof(box_text), " (of which [%lld, +%lld) of dimension %d)",
                       (long long)binding->start, (long long)binding->dst.shape[binding->dim],
                       binding->dim);
    }
    return arl_error_set(err, ARL_ERR_MISMATCH, CHECK,
                         "%.*s: the sender has %s, the receiver wants %s%s; nothing is cast, cut "
                         "or padded unless the binding says so",
                         (int)sent->name_length, sent->name, found_text, wanted_text, box_text);
}

/* Two tensors of the sender for one destination must be one tensor there too. */
static arl_status_t
check_twin(const check_t *check, uint32_t i, int64_t source, int64_t twin_source, arl_error_t *err)
{
    const arl_offer_tensor_t *a = &check->offer->tensors[source];
    const arl_offer_tensor_t *b = &check->offer->tensors[twin_source];
    uint32_t first = 0, first_twin = 0;

    (void)arl_names_find(&check->set->index, check->set->bindings[i].name,
                         check->set->bindings[i].name_length, &first);
    (void)arl_names_find(&check->set->index, check->set->bindings[check->set->twin[i]].name,
                         check->set->bindings[check->set->twin[i]].name_length, &first_twin);
    if (a->alias_of == b->alias_of || check->alias_name[first] || check->alias_name[first_twin]) {
        return ARL_OK;
    }
    return arl_error_set(err, ARL_ERR_MISMATCH, CHECK,
                         "%.*s and %.*s share memory here (tied weights), but are two tensors at "
                         "the sender; untie them here, tie them there, or declare the one as an "
                         "alias",
                         (int)a->name_length, a->name, (int)b->name_length, b->name);
}

/* A quantised weight without its scale would be read with the old one. */
static arl_status_t
check_quantised(const check_t *check, const arl_binding_t *binding, arl_error_t *err)
{
    static const char *const scales[] = {"_scale", "_scale_inv"};
    char name[ARL_OFFER_NAME_MAX + 16];

    if (arl_dtype_size(binding->dst.dtype) != 1 || arl_dtype_kind(binding->dst.dtype) != 'x') {
        return ARL_OK;
    }
    for (size_t i = 0; i < sizeof(scales) / sizeof(scales[0]); i++) {
        const uint32_t length = (uint32_t)snprintf(
            name, sizeof(name), "%.*s%s", (int)binding->name_length, binding->name, scales[i]);
        uint32_t found;

        if (arl_names_find(&check->set->index, name, length, &found) &&
            arl_binding_set_excludes(check->set, name, length)) {
            return arl_error_set(err, ARL_ERR_MISMATCH, CHECK,
                                 "%.*s is quantised (%s) and its scale %s is not synced, so its "
                                 "new values would be read with the old scale; sync both "
                                 "(non_synced=()), or let the engine load and quantise (views())",
                                 (int)binding->name_length, binding->name,
                                 arl_dtype_name(binding->dst.dtype), name);
        }
    }
    return ARL_OK;
}

/* Which tensor binding `i` takes, or NONE. */
static int64_t
binding_source(const check_t *check, uint32_t i)
{
    const arl_binding_t *binding = &check->set->bindings[i];
    uint32_t first;

    if (arl_binding_set_excludes(check->set, binding->name, binding->name_length) ||
        !arl_names_find(&check->set->index, binding->name, binding->name_length, &first)) {
        return NONE;
    }
    return check->source[first];
}

static bool
add_copy(const check_t *check, uint32_t index, uint32_t tensor, arl_copy_t *copy_p)
{
    const arl_binding_t *binding = &check->set->bindings[index];
    const arl_offer_tensor_t *sent = &check->offer->tensors[tensor];
    const arl_view_t source = arl_offer_tensor_view(check->offer, tensor, NULL);
    const arl_view_t *dst = &binding->dst;

    copy_p->alloc = sent->alloc;
    copy_p->tensor = tensor;
    copy_p->binding = index;
    copy_p->src_offset = (int64_t)sent->offset;
    if (binding->dim >= 0) {
        copy_p->src_offset += binding->start * source.strides[binding->dim];
    }
    copy_p->dst = dst->data;
    return arl_copy_shape(copy_p, dst->itemsize, dst->ndim, dst->shape, source.strides,
                          dst->strides);
}

static int
copy_compare(const void *a, const void *b)
{
    const arl_copy_t *x = a, *y = b;

    if (x->tensor != y->tensor) {
        return x->tensor < y->tensor ? -1 : 1;
    }
    return (x->src_offset > y->src_offset) - (x->src_offset < y->src_offset);
}

static arl_status_t
make_copies(const check_t *check, arl_plan_t *plan, arl_plan_report_t *report, arl_error_t *err)
{
    const arl_binding_set_t *set = check->set;
    arl_status_t status;

    for (uint32_t i = 0; i < set->count; i++) {
        const arl_binding_t *binding = &set->bindings[i];
        const int64_t source = binding_source(check, i);
        int64_t twin_source = NONE;

        if (source == NONE || binding->expected) {
            continue;
        }
        status = check_shape(check, binding, (uint32_t)source, err);
        if (status != ARL_OK || (status = check_quantised(check, binding, err)) != ARL_OK) {
            return status;
        }
        report->tensors++;
        if (set->twin[i] != i) {
            twin_source = binding_source(check, set->twin[i]);
        }
        if (twin_source != NONE) {
            status = check_twin(check, i, source, twin_source, err);
            if (status != ARL_OK) {
                return status;
            }
            continue; /* the twin's copy writes it */
        }
        if (add_copy(check, i, (uint32_t)source, &plan->copies[plan->count])) {
            plan->total_bytes += arl_copy_bytes(&plan->copies[plan->count]);
            plan->count++;
        }
    }
    qsort(plan->copies, (size_t)plan->count, sizeof(plan->copies[0]), copy_compare);
    return ARL_OK;
}

static arl_status_t
check_all(check_t *check, arl_plan_t *plan, arl_plan_report_t *report, arl_error_t *err)
{
    arl_names_t sent = {0};
    arl_status_t status;

    match_names(check);
    if (check->set->alias_count > 0) {
        ARL_CHECK_GOTO(status, arl_names_init(&sent, check->offer->tensor_count, err), free_sent);
        for (uint32_t i = 0; i < check->offer->tensor_count; i++) {
            (void)arl_names_add(&sent, check->offer->tensors[i].name,
                                check->offer->tensors[i].name_length, i);
        }
        match_aliases(check, &sent);
    }
    match_twins(check);
    ARL_CHECK_GOTO(status, check_names(check, &report->untouched, err), free_sent);
    report->sender_names = check->sender_names;
    report->expected_names = check->expected_names;
    ARL_CHECK_GOTO(status, make_copies(check, plan, report, err), free_sent);
free_sent:
    arl_names_free(&sent);
    return status;
}

static _Atomic uint64_t serials;

arl_status_t
arl_plan_build(const arl_offer_t *offer, const arl_binding_set_t *set, const char *context,
               arl_plan_t *plan_p, arl_plan_report_t *report_p, arl_error_t *err)
{
    const size_t bindings = (size_t)set->count + 1, tensors = (size_t)offer->tensor_count + 1;
    check_t check = {.offer = offer, .set = set, .context = context};
    arl_plan_t plan = {0};
    arl_plan_report_t report = {0};
    arl_status_t status;

    check.source = malloc(bindings * sizeof(*check.source));
    check.bound = malloc(tensors * sizeof(*check.bound));
    check.alias_name = calloc(bindings, sizeof(*check.alias_name));
    plan.copies = calloc(bindings, sizeof(*plan.copies));
    if (check.source == NULL || check.bound == NULL || check.alias_name == NULL ||
        plan.copies == NULL) {
        status = arl_error_set(err, ARL_ERR_NOMEM, CHECK, "out of memory for a plan of %u tensors",
                               offer->tensor_count);
        goto free_check;
    }
    for (size_t i = 0; i < bindings; i++) {
        check.source[i] = NONE;
    }
    for (size_t i = 0; i < tensors; i++) {
        check.bound[i] = NONE;
    }
    status = check_all(&check, &plan, &report, err);
    if (status == ARL_OK) {
        plan.serial = atomic_fetch_add(&serials, 1) + 1;
        *plan_p = plan;
        *report_p = report;
        plan.copies = NULL;
    }
free_check:
    arl_plan_free(&plan);
    free(check.alias_name);
    free(check.bound);
    free(check.source);
    return status;
}
