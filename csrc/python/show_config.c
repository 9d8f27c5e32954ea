/* SPDX-License-Identifier: Apache-2.0 */
#include "python/errors.h"

#include "core/arl_threads.h"
#include "transport/cuda_survey.h"
#include "transport/nccl_api.h"

#include <string.h>

/* Steals `value`, also NULL. Returns 0, or -1 with an exception. */
static int
set_item(PyObject *dict, const char *key, PyObject *value)
{
    int status = value == NULL ? -1 : PyDict_SetItemString(dict, key, value);

    Py_XDECREF(value);
    return status;
}

static PyObject *
text_or_replace(const char *text)
{
    return PyUnicode_DecodeUTF8(text, (Py_ssize_t)strlen(text), "replace");
}

/* A library that was found, or the reason why not. */
static PyObject *
describe_library(arl_status_t status, const arl_library_found_t *found, const arl_error_t *err)
{
    PyObject *dict = PyDict_New();

    if (dict == NULL) {
        return NULL;
    }
    if (status == ARL_OK) {
        if (set_item(dict, "available", Py_NewRef(Py_True)) < 0 ||
            set_item(dict, "version", PyUnicode_FromString(found->version_text)) < 0 ||
            set_item(dict, "path", text_or_replace(found->path)) < 0 ||
            set_item(dict, "found", PyUnicode_FromString(found->how)) < 0) {
            Py_CLEAR(dict);
        }
    }
    else if (set_item(dict, "available", Py_NewRef(Py_False)) < 0 ||
             set_item(dict, "reason", text_or_replace(err->text)) < 0) {
        Py_CLEAR(dict);
    }
    return dict;
}

static PyObject *
describe_cuda(void)
{
    arl_error_t err = ARL_ERROR_INIT;
    const arl_cuda_api_t *api;
    arl_status_t status;

    Py_BEGIN_ALLOW_THREADS
    status = arl_cuda_load(&api, &err);
    Py_END_ALLOW_THREADS
    return describe_library(status, arl_cuda_found(), &err);
}

static PyObject *
describe_nccl(void)
{
    arl_error_t err = ARL_ERROR_INIT;
    const arl_nccl_api_t *api;
    arl_status_t status;

    Py_BEGIN_ALLOW_THREADS
    status = arl_nccl_load(&api, &err);
    Py_END_ALLOW_THREADS
    return describe_library(status, arl_nccl_found(), &err);
}

static PyObject *
describe_peers(const arl_cuda_survey_t *device)
{
    PyObject *list = PyList_New(0);

    for (int i = 0; list != NULL && i < ARL_CUDA_DEVICES_MAX; i++) {
        if ((device->peers >> i & 1) != 0) {
            PyObject *number = PyLong_FromLong(i);

            if (number == NULL || PyList_Append(list, number) < 0) {
                Py_CLEAR(list);
            }
            Py_XDECREF(number);
        }
    }
    return list;
}

static PyObject *
describe_device(const arl_cuda_survey_t *device)
{
    char uuid[ARL_CUDA_UUID_TEXT];
    PyObject *dict = PyDict_New();

    arl_cuda_uuid_text(device->uuid, uuid);
    if (dict == NULL || set_item(dict, "index", PyLong_FromLong(device->ordinal)) < 0 ||
        set_item(dict, "name", text_or_replace(device->name)) < 0 ||
        set_item(dict, "uuid", PyUnicode_FromString(uuid)) < 0 ||
        set_item(dict, "compute_capability",
                 PyUnicode_FromFormat("%d.%d", device->cc_major, device->cc_minor)) < 0 ||
        set_item(dict, "multiprocessors", PyLong_FromLong(device->sm_count)) < 0 ||
        set_item(dict, "memory", PyLong_FromUnsignedLongLong(device->memory)) < 0 ||
        set_item(dict, "peers", describe_peers(device)) < 0 ||
        set_item(dict, "cuda_ipc", PyBool_FromLong(device->ipc)) < 0 ||
        (!device->ipc &&
         set_item(dict, "cuda_ipc_reason", text_or_replace(device->ipc_reason)) < 0)) {
        Py_CLEAR(dict);
    }
    return dict;
}

static PyObject *
describe_devices(arl_state_t *state)
{
    arl_cuda_survey_t *devices = PyMem_New(arl_cuda_survey_t, ARL_CUDA_DEVICES_MAX);
    arl_error_t err = ARL_ERROR_INIT;
    PyObject *list = NULL;
    arl_status_t status;
    int count = 0;

    if (devices == NULL) {
        return PyErr_NoMemory();
    }
    Py_BEGIN_ALLOW_THREADS
    status = arl_cuda_survey(devices, ARL_CUDA_DEVICES_MAX, &count, &err);
    Py_END_ALLOW_THREADS
    if (status != ARL_OK) {
        (void)arl_raise(state, &err);
        goto free_devices;
    }
    list = PyList_New(count);
    for (int i = 0; list != NULL && i < count; i++) {
        PyObject *device = describe_device(&devices[i]);

        if (device == NULL) {
            Py_CLEAR(list);
            break;
        }
        PyList_SET_ITEM(list, i, device);
    }
free_devices:
    PyMem_Free(devices);
    return list;
}

static PyObject *
describe_build(void)
{
#if defined(ARL_FAULTS)
    const bool faults = true;
#else
    const bool faults = false;
#endif
#if defined(ARL_DEBUG)
    const bool debug = true;
#else
    const bool debug = false;
#endif
#if defined(__SANITIZE_ADDRESS__)
    const bool sanitized = true;
#else
    const bool sanitized = false;
#endif

#if defined(__clang__)
    const char *compiler = __VERSION__; /* "Clang 14.0.6" */
#else
    const char *compiler = "gcc " __VERSION__;
#endif

    return Py_BuildValue("{s:s,s:s,s:s,s:O,s:O,s:O}", "compiler", compiler, "python", PY_VERSION,
                         "numpy_abi", Py_STRINGIFY(NPY_TARGET_VERSION), "debug",
                         debug ? Py_True : Py_False, "sanitized", sanitized ? Py_True : Py_False,
                         "faults", faults ? Py_True : Py_False);
}

static PyObject *
describe_roots(void)
{
    const size_t count = arl_library_root_count();
    PyObject *list = PyList_New((Py_ssize_t)count);

    for (size_t i = 0; list != NULL && i < count; i++) {
        PyObject *root = PyUnicode_DecodeFSDefault(arl_library_root(i));

        if (root == NULL) {
            Py_CLEAR(list);
            break;
        }
        PyList_SET_ITEM(list, (Py_ssize_t)i, root);
    }
    return list;
}

static PyObject *
native_config(PyObject *module, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"devices", NULL};
    arl_state_t *state = arl_state_from_module(module);
    PyObject *dict;
    int devices = 1;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|$p:_native_config", names, &devices)) {
        return NULL;
    }
    dict = PyDict_New();
    if (dict == NULL || set_item(dict, "build", describe_build()) < 0 ||
        set_item(dict, "threads", PyLong_FromLong(arl_threads_count())) < 0 ||
        set_item(dict, "wheel_roots", describe_roots()) < 0 ||
        set_item(dict, "cuda", describe_cuda()) < 0 ||
        set_item(dict, "nccl", describe_nccl()) < 0) {
        Py_XDECREF(dict);
        return NULL;
    }
    if (devices && arl_cuda_found() != NULL) {
        if (set_item(dict, "devices", describe_devices(state)) < 0) {
            Py_DECREF(dict);
            return NULL;
        }
    }
    return dict;
}

/* The folders in which `nvidia` wheels may lie. Paths that are no text are not looked at. */
static int
add_wheel_roots(void)
{
    PyObject *path = PySys_GetObject("path"); /* borrowed from sys, used at once */

    if (path == NULL || !PyList_Check(path)) {
        return 0;
    }
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(path); i++) {
        PyObject *entry = PyList_GetItemRef(path, i);
        PyObject *bytes =
            entry != NULL && PyUnicode_Check(entry) ? PyUnicode_EncodeFSDefault(entry) : NULL;

        Py_XDECREF(entry);
        if (bytes != NULL) {
            const char *text = PyBytes_AS_STRING(bytes);

            if (strstr(text, "site-packages") != NULL || strstr(text, "dist-packages") != NULL) {
                arl_library_add_root(text);
            }
            Py_DECREF(bytes);
        }
        PyErr_Clear();
    }
    return 0;
}

PyDoc_STRVAR(
    native_config_doc,
    "_native_config(*, devices=True)\n--\n\n"
    "Return what the C layer was built with and what it finds at run time, as a dict.\n\n"
    "devices: also look at each GPU, which makes a context on it for a moment. Either way\n"
    "the CUDA driver is loaded and started in this process: fork before it, or spawn.");

PyMethodDef arl_show_config_methods[] = {
    {"_native_config", (PyCFunction)(void (*)(void))native_config, METH_VARARGS | METH_KEYWORDS,
     native_config_doc},
    {NULL, NULL, 0, NULL},
};

int
arl_show_config_exec(PyObject *module, arl_state_t *state)
{
    (void)module;
    (void)state;
    return add_wheel_roots();
}
