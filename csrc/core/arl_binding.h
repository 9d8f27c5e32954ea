/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARL_CORE_BINDING_H
#define ARL_CORE_BINDING_H

#include "core/arl_names.h"
#include "core/arl_offer.h"
#include "core/arl_plan.h"

/*
 * What a receiver wants, and the check of an offer against it.
 *
 * A binding says where one tensor of the sender goes: `dst` receives the box of the source that
 * begins at `start` of dimension `dim`, has dst's own size there and is whole in the other
 * dimensions. With `dim` < 0 the box is the whole source. That covers all that engines do:
 *     fused projections      dst is a slice of the fused parameter, the source is whole
 *     tensor parallel shard  dst is the shard, the box is its part of the full tensor
 *     padded vocabulary      dst is the slice of real rows, or the box leaves padding out
 * Several bindings may take from the same source.
 */
typedef struct arl_binding {
    const char *name; /* of the source; UTF-8, borrowed */
    uint32_t name_length;
    bool expected; /* only expected: nothing is copied, dst is not looked at */
    arl_view_t dst;
    int dim;
    int64_t start;
    int64_t full; /* size of the source in `dim` */
} arl_binding_t;

/* `name` is another name of `target`'s tensor: not an alarm when only one of them is sent. */
typedef struct arl_alias {
    const char *name;
    uint32_t name_length;
    const char *target;
    uint32_t target_length;
} arl_alias_t;

typedef struct arl_text {
    const char *text;
    size_t length;
} arl_text_t;

typedef struct arl_binding_set {
    const arl_binding_t *bindings; /* borrowed, all of it */
    uint32_t count;
    const arl_alias_t *aliases;
    uint32_t alias_count;
    const arl_text_t *excluded; /* parts of names that are never synced */
    uint32_t excluded_count;
    bool partial; /* an offer may leave names out */
    /* below: made by init */
    arl_names_t index; /* name to first binding */
    uint32_t *next;    /* next binding of the same name, or UINT32_MAX */
    uint32_t *twin;    /* first binding with the same destination; often itself */
    uint32_t names;    /* different names; of those with one destination one is enough */
} arl_binding_set_t;

/*
 * Fills what is below the line, from what is above. ARL_ERR_VALUE names the two destinations
 * that overlap (the very same memory under two names is no overlap: tied weights) or the one
 * that overlaps itself, and any other binding that cannot be right for any offer.
 */
arl_status_t arl_binding_set_init(arl_binding_set_t *set, arl_error_t *err);
void arl_binding_set_free(arl_binding_set_t *set);

/* Whether a name is among those that are never synced. */
bool arl_binding_set_excludes(const arl_binding_set_t *set, const char *name, uint32_t length);

typedef struct arl_plan_report {
    uint32_t sender_names;   /* that count, contract 6.4 */
    uint32_t expected_names; /* without those that arrive under another one's name */
    uint32_t untouched;      /* expected names that the offer leaves out; > 0 only if partial */
    uint32_t tensors;        /* bindings that get written */
} arl_plan_report_t;

/*
 * Checks all of an offer against all of a set, and turns it into a plan with its copies in the
 * order of the offer's tensors. Nothing is written anywhere but to the outputs. ARL_ERR_MISMATCH
 * says what differs; `context` is the transport's name, for the message.
 */
arl_status_t arl_plan_build(const arl_offer_t *offer, const arl_binding_set_t *set,
                            const char *context, arl_plan_t *plan_p, arl_plan_report_t *report_p,
                            arl_error_t *err);

/* The part of a source that a binding takes. `source` must be the tensor the plan accepted. */
arl_view_t arl_binding_box(const arl_binding_t *binding, const arl_view_t *source);

#endif
