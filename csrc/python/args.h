/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARL_PYTHON_ARGS_H
#define ARL_PYTHON_ARGS_H

#include "python/arl_python.h"

#include <stdbool.h>

/*
 * Arguments of METH_FASTCALL | METH_KEYWORDS functions: what argument clinic would generate, as
 * one small function and a table per signature.
 */
typedef struct arl_signature {
    const char *function;     /* for messages */
    int count;                /* parameters in all */
    int positional;           /* the first so many may be given by position */
    int required;             /* the first so many must be given */
    const char *const *names; /* in order */
} arl_signature_t;

/* Fills `bound` (count entries) with borrowed references, NULL where nothing was given. Returns
 * -1 with TypeError for too many, unknown, repeated or missing arguments. */
int arl_args_bind(const arl_signature_t *signature, PyObject *const *args, Py_ssize_t nargs,
                  PyObject *kwnames, PyObject **bound);

/* A size: NULL or None gives `fallback`. ValueError when negative, TypeError when no integer. */
int arl_args_size(const arl_signature_t *signature, int index, PyObject *value, int64_t fallback,
                  int64_t *size_p);

/* An integer from `low` to `high`; `function` and `name` are for the message. TypeError when it is
 * no integer, ValueError when it is not in the range, OverflowError when not even in 64 bits. */
int arl_args_integer(const char *function, const char *name, PyObject *value, int64_t low,
                     int64_t high, int64_t *number_p);

/* A flag by its truth: NULL gives `fallback`. */
int arl_args_flag(PyObject *value, bool fallback, bool *flag_p);

#endif
