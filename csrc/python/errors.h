/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARL_PYTHON_ERRORS_H
#define ARL_PYTHON_ERRORS_H

#include "python/state.h"

#include "core/arl_status.h"

#include <stdbool.h>

/*
 * The one translator. Raises the exception of err->code with its text and attributes, and
 * returns NULL. A live exception is never overwritten (ARL_ERR_INTERRUPTED has one already).
 * Needs the GIL.
 */
PyObject *arl_raise(arl_state_t *state, const arl_error_t *err);

/* Raise without a filled record, for checks made in the binding files themselves. */
PyObject *arl_raise_format(arl_state_t *state, arl_status_t code, const char *operation,
                           const char *format, ...) __attribute__((format(printf, 4, 5)));

/* arl_deadline_t.interrupted: takes the GIL, runs pending signal handlers. `context` is the
 * PyThreadState* * that Py_BEGIN_ALLOW_THREADS saved; true when a handler raised. */
bool arl_deadline_check_signals(void *context);

#endif
