/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARL_PYTHON_WEIGHTS_H
#define ARL_PYTHON_WEIGHTS_H

#include "python/state.h"
#include "python/tensor.h"

#include "core/arl_deadline.h"
#include "core/arl_status.h"

#include "transport/arl_transport.h"

#include <stdbool.h>
#include <sys/types.h>

/* What WeightSender and WeightReceiver share. */

/* ---- named tensors --------------------------------------------------------------------------- */

typedef struct arl_param {
    PyObject *name;   /* str */
    const char *text; /* its UTF-8, which it owns */
    uint32_t length;
    PyObject *object; /* the tensor as it was given; None for a name alone */
    arl_tensor_t tensor;
    PyObject *storage; /* torch: keeps the memory alive even when `object` is given another one */
    int dim;           /* receiver: the box of the binding; -1 for the whole source */
    int64_t start;
    int64_t full;
} arl_param_t;

typedef struct arl_params {
    arl_param_t *items;
    Py_ssize_t count;
    Py_ssize_t capacity;
} arl_params_t;

typedef enum arl_role {
    ARL_ROLE_SENDER,   /* a value is a tensor, or (dtype, shape) of one that comes later */
    ARL_ROLE_RECEIVER, /* a writable tensor, a Binding, a list of these, or None */
} arl_role_t;

/* Reads a mapping, or an iterable of (name, value). Returns 0, or -1 with an exception and
 * nothing held. */
int arl_params_read(arl_state_t *state, PyObject *object, arl_role_t role, arl_params_t *params_p);

/*
 * Sees to it that the views are those of the tensors as they are now: a torch parameter may have
 * been given other memory (`p.data = …`) or another shape. `*changed_p` tells whether any was.
 */
int arl_params_refresh(arl_state_t *state, arl_params_t *params, arl_role_t role, bool *changed_p);

int arl_params_traverse(arl_params_t *params, visitproc visit, void *arg);
void arl_params_clear(arl_params_t *params);

/* ---- calls ----------------------------------------------------------------------------------- */

/* Who may call now: not after close(), not in a child after fork, one thread at a time. */
typedef struct arl_guard {
    const char *type; /* "WeightSender" */
    pid_t owner;
    bool closed;
    const char *busy;     /* the method that is running without the GIL, or NULL */
    unsigned long thread; /* which runs it */
} arl_guard_t;

/* How a guarded object begins, so that these three serve all of them. */
typedef struct arl_guarded {
    PyObject_HEAD
    arl_guard_t guard;
} arl_guarded_t;

PyObject *arl_guarded_enter(PyObject *self, PyObject *unused); /* __enter__ */
PyObject *arl_guarded_get_closed(PyObject *self, void *closure);

void arl_guard_init(arl_guard_t *guard, const char *type);
/* 0, or -1 with ClosedError, WrongProcessError or RuntimeError. */
int arl_guard_enter(arl_state_t *state, arl_guard_t *guard, const char *method);
void arl_guard_leave(arl_guard_t *guard);
bool arl_guard_forked(const arl_guard_t *guard);

/* A call that runs without the GIL under a deadline: begin, the work, end. Ctrl-C is looked for
 * whenever the work waits. */
typedef struct arl_call {
    arl_deadline_t deadline;
    arl_error_t err;
    PyThreadState *thread;
} arl_call_t;

void arl_call_begin(arl_call_t *call, double seconds); /* with the GIL, which is then released */
void arl_call_resume(arl_call_t *call); /* the same, under the deadline that was begun */
void arl_call_end(arl_call_t *call);    /* takes it again */

/* Seconds from a number; NULL or None gives `fallback`. Negative and not finite are refused: no
 * wait is without an end. */
int arl_seconds(PyObject *value, double fallback, double *seconds_p);

/*
 * The CUstream that a call is ordered after: `value` as an integer or an object with cuda_stream
 * (torch.cuda.Stream), and for None torch's current stream on the device of the first torch
 * parameter on a GPU, or the legacy default stream (NULL). Returns 0, or -1 with an exception.
 */
int arl_stream_from(arl_state_t *state, PyObject *value, const arl_params_t *params,
                    void **stream_p);

/* None, "sample" or "all". */
int arl_verify_from(PyObject *value, arl_verify_t *verify_p);

/* logging.getLogger("arctic_rl_c").<method>(text). An Exception there is shown and forgotten, as
 * what is reported has happened already; -1 for KeyboardInterrupt and its like. */
int arl_log(arl_state_t *state, const char *method, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* What becomes of the live exception of a log: as above. */
int arl_log_failed(PyObject *logger);

/* ---- results --------------------------------------------------------------------------------- */

PyObject *arl_sync_stats_new(arl_state_t *state, const arl_sync_stats_t *stats);

#endif
