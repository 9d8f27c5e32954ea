/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARL_PYTHON_WEIGHT_FEED_H
#define ARL_PYTHON_WEIGHT_FEED_H

#include "python/weights.h"

/*
 * The tensors of a streaming serve(), pulled from a Python iterable of (name, tensor) while the
 * GIL is released around it: each is held until the next one is asked for, and no longer.
 */
typedef struct arl_weight_feed {
    arl_feed_t feed; /* for arl_sender_serve */
    arl_state_t *state;
    const arl_params_t *params;
    PyObject *iterator;
    PyThreadState **thread; /* where the caller of serve() saved its thread */
    arl_tensor_t tensor;    /* the one that is being sent */
    int64_t count;          /* that came so far */
} arl_weight_feed_t;

/* `tensors`: an iterable of pairs, or a mapping. Returns 0, or -1 with an exception. */
int arl_weight_feed_open(arl_state_t *state, PyObject *tensors, const arl_params_t *params,
                         arl_weight_feed_t *feed_p);
void arl_weight_feed_close(arl_weight_feed_t *feed);

#endif
