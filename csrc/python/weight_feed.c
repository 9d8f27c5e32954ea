/* SPDX-License-Identifier: Apache-2.0 */
#include "python/weight_feed.h"

#include "python/errors.h"

#include <string.h>

static const char SERVE[] = "serve";

/* A Python exception is on its way: the record is for the receivers, who cannot see it. */
static arl_status_t
feed_raised(const arl_weight_feed_t *feed, const arl_param_t *wanted, arl_error_t *err)
{
    PyObject *type = PyErr_Occurred(); /* borrowed from the thread's state */

    return arl_error_set(err, ARL_ERR_INTERRUPTED, SERVE,
                         "the iterable that serve() was given raised %s after %lld tensors, when "
                         "%s was to come",
                         type == NULL ? "?" : ((PyTypeObject *)type)->tp_name,
                         (long long)feed->count, wanted->text);
}

/* The next pair, as new references. 1, 0 at the end, -1 with an exception. */
static int
feed_take(arl_weight_feed_t *feed, PyObject **name_p, PyObject **tensor_p)
{
    PyObject *pair = PyIter_Next(feed->iterator), *sequence;

    if (pair == NULL) {
        return PyErr_Occurred() ? -1 : 0;
    }
    sequence = PySequence_Tuple(pair);
    Py_DECREF(pair);
    if (sequence == NULL) {
        return -1;
    }
    if (PyTuple_GET_SIZE(sequence) != 2 ||
        !PyUnicode_Check(PyTuple_GET_ITEM(sequence, 0))) { /* borrowed from sequence */
        PyErr_SetString(PyExc_TypeError, "serve: the iterable must give pairs (name, tensor)");
        Py_DECREF(sequence);
        return -1;
    }
    *name_p = Py_NewRef(PyTuple_GET_ITEM(sequence, 0));   /* borrowed from sequence */
    *tensor_p = Py_NewRef(PyTuple_GET_ITEM(sequence, 1)); /* borrowed from sequence */
    Py_DECREF(sequence);
    return 1;
}

static arl_status_t
feed_next_locked(arl_weight_feed_t *feed, uint32_t index, arl_error_t *err)
{
    const arl_param_t *wanted = &feed->params->items[index];
    PyObject *name = NULL, *tensor = NULL;
    arl_status_t status = ARL_OK;
    int found;

    arl_tensor_release(&feed->tensor); /* its copy has ended: it may be freed now */
    found = feed_take(feed, &name, &tensor);
    if (found < 0) {
        return feed_raised(feed, wanted, err);
    }
    if (found == 0) {
        return arl_error_set(err, ARL_ERR_MISMATCH, SERVE,
                             "the iterable ended after %lld tensors; the offer has %zd, and %s was "
                             "to come",
                             (long long)feed->count, feed->params->count, wanted->text);
    }
    found = PyUnicode_Compare(name, wanted->name);
    if (found != 0) {
        const char *text = PyUnicode_AsUTF8(name);

        status = arl_error_set(err, ARL_ERR_MISMATCH, SERVE,
                               "tensor %lld came as %.200s; the offer has %s there: serve() takes "
                               "the tensors in the order of the parameters",
                               (long long)feed->count, text == NULL ? "?" : text, wanted->text);
        PyErr_Clear();
    }
    else if (arl_tensor_import(feed->state, tensor, wanted->text, 0, ARL_ERR_TYPE, &feed->tensor) <
             0) {
        status = feed_raised(feed, wanted, err);
    }
    else {
        feed->count++;
    }
    Py_DECREF(tensor);
    Py_DECREF(name);
    return status;
}

static arl_status_t
feed_next(void *context, uint32_t index, arl_view_t *view_p, arl_error_t *err)
{
    arl_weight_feed_t *feed = context;
    arl_status_t status;

    PyEval_RestoreThread(*feed->thread);
    status = feed_next_locked(feed, index, err);
    *feed->thread = PyEval_SaveThread();
    if (status == ARL_OK) {
        *view_p = feed->tensor.view;
    }
    return status;
}

int
arl_weight_feed_open(arl_state_t *state, PyObject *tensors, const arl_params_t *params,
                     arl_weight_feed_t *feed_p)
{
    PyObject *items = PyMapping_Check(tensors) && !PySequence_Check(tensors)
                          ? PyMapping_Items(tensors)
                          : Py_NewRef(tensors);

    memset(feed_p, 0, sizeof(*feed_p));
    if (items == NULL) {
        return -1;
    }
    feed_p->iterator = PyObject_GetIter(items);
    Py_DECREF(items);
    if (feed_p->iterator == NULL) {
        return -1;
    }
    feed_p->feed.next = feed_next;
    feed_p->feed.context = feed_p;
    feed_p->state = state;
    feed_p->params = params;
    return 0;
}

void
arl_weight_feed_close(arl_weight_feed_t *feed)
{
    arl_tensor_release(&feed->tensor);
    Py_CLEAR(feed->iterator);
}
