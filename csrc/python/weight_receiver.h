/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARL_PYTHON_WEIGHT_RECEIVER_H
#define ARL_PYTHON_WEIGHT_RECEIVER_H

#include "python/weights.h"

#include "transport/arl_receiver.h"

#include <stdatomic.h>

/* The number of mappings behind views, which may outlive the receiver that made them. Counted by
 * hand and atomically: views are given back by threads that do not hold the GIL. */
typedef struct arl_mapped {
    _Atomic int64_t references;
    _Atomic int64_t live;
} arl_mapped_t;

arl_mapped_t *arl_mapped_new(void);
void arl_mapped_drop(arl_mapped_t *mapped);

typedef struct arl_weight_receiver {
    PyObject_HEAD
    arl_guard_t guard;
    arl_receiver_t receiver;
    arl_params_t params;
    arl_binding_t *bindings; /* one for each of params */
    arl_alias_t *aliases;
    arl_text_t *excluded;
    PyObject *texts; /* tuple of str: owns what aliases and excluded point at */
    PyObject *log;   /* callable or None */
    double timeout;
    arl_mapped_t *mapped;
} arl_weight_receiver_t;

/* Parameters that were given other memory are bound anew. */
int arl_weight_receiver_refresh(arl_state_t *state, arl_weight_receiver_t *self);

/* The contract's line about validated names, which tools look for. As arl_log. */
int arl_weight_receiver_log(arl_state_t *state, arl_weight_receiver_t *self, const char *context);

/* What receiver.views() returns. */
PyObject *arl_weight_views_new(arl_state_t *state, arl_weight_receiver_t *receiver, PyObject *offer,
                               arl_verify_t verify, void *stream, double seconds);

#endif
