/* SPDX-License-Identifier: Apache-2.0 */
#include "python/config_tree.h"

#include "python/errors.h"

/* ---- Python objects to a tree -------------------------------------------------------------
 * Objects that are not plain data are kept in a list and travel as ARL_NODE_FOREIGN: outside the
 * keys that we read, a configuration may hold anything.
 */

typedef struct arl_config_reader {
    arl_state_t *state;
    arl_tree_t *tree;
    PyObject *foreign; /* list */
} arl_config_reader_t;

static arl_node_t *
read_node(arl_config_reader_t *reader, arl_node_kind_t kind)
{
    arl_error_t err = ARL_ERROR_INIT;
    arl_node_t *node;

    if (arl_node_new(reader->tree, kind, NULL, &node, &err) != ARL_OK) {
        (void)arl_raise(reader->state, &err);
        return NULL;
    }
    return node;
}

static arl_node_t *
read_foreign(arl_config_reader_t *reader, PyObject *object)
{
    arl_node_t *node = read_node(reader, ARL_NODE_FOREIGN);

    if (node == NULL || PyList_Append(reader->foreign, object) < 0) {
        return NULL;
    }
    node->as.integer = PyList_GET_SIZE(reader->foreign) - 1;
    return node;
}

static arl_node_t *
read_text(arl_config_reader_t *reader, PyObject *object)
{
    arl_error_t err = ARL_ERROR_INIT;
    arl_node_t *node;
    Py_ssize_t size;
    const char *data = PyUnicode_AsUTF8AndSize(object, &size);

    if (data == NULL) { /* lone surrogates: text that no YAML could hold */
        if (!PyErr_ExceptionMatches(PyExc_UnicodeEncodeError)) {
            return NULL;
        }
        PyErr_Clear();
        return read_foreign(reader, object);
    }
    if (arl_node_new_text(reader->tree, data, (size_t)size, NULL, &node, &err) != ARL_OK) {
        (void)arl_raise(reader->state, &err);
        return NULL;
    }
    return node;
}

/* An int outside int64, in hexadecimal: that takes no time that grows faster than the number. */
static arl_node_t *
read_bigint(arl_config_reader_t *reader, PyObject *object)
{
    arl_node_t *node = read_node(reader, ARL_NODE_BIGINT);
    PyObject *text = node == NULL ? NULL : PyNumber_ToBase(object, 16);
    arl_error_t err = ARL_ERROR_INIT;
    const char *data;
    Py_ssize_t size;

    if (text == NULL) {
        return NULL;
    }
    data = PyUnicode_AsUTF8AndSize(text, &size);
    if (data == NULL) {
        node = NULL;
    }
    else if (arl_tree_text(reader->tree, data, (size_t)size, &node->as.text, &err) != ARL_OK) {
        (void)arl_raise(reader->state, &err);
        node = NULL;
    }
    else {
        node->base = 16;
    }
    Py_DECREF(text);
    return node;
}

static arl_node_t *read_object(arl_config_reader_t *reader, PyObject *object, int depth);

static arl_node_t *
read_dict(arl_config_reader_t *reader, PyObject *object, int depth)
{
    arl_node_t *map = read_node(reader, ARL_NODE_MAP);
    PyObject *items = PyDict_Items(object); /* a copy: reading may run code of foreign types */
    arl_error_t err = ARL_ERROR_INIT;

    for (Py_ssize_t i = 0; map != NULL && items != NULL && i < PyList_GET_SIZE(items); i++) {
        PyObject *pair = PyList_GET_ITEM(items, i); /* borrowed from items */
        arl_node_t *key = read_object(reader, PyTuple_GET_ITEM(pair, 0), depth); /* borrowed */
        arl_node_t *value;

        /* borrowed from the pair */
        value = key == NULL ? NULL : read_object(reader, PyTuple_GET_ITEM(pair, 1), depth);
        if (value == NULL) {
            map = NULL;
        }
        else if (arl_map_set_node(reader->tree, map, key, value, &err) != ARL_OK) {
            (void)arl_raise(reader->state, &err);
            map = NULL;
        }
    }
    if (items == NULL) {
        map = NULL;
    }
    Py_XDECREF(items);
    return map;
}

static arl_node_t *
read_sequence(arl_config_reader_t *reader, PyObject *object, int depth)
{
    arl_node_t *list = read_node(reader, ARL_NODE_LIST);
    PyObject *items = PySequence_Tuple(object);
    arl_error_t err = ARL_ERROR_INIT;

    for (Py_ssize_t i = 0; list != NULL && items != NULL && i < PyTuple_GET_SIZE(items); i++) {
        /* borrowed from items, which is ours */
        arl_node_t *item = read_object(reader, PyTuple_GET_ITEM(items, i), depth);

        if (item == NULL) {
            list = NULL;
        }
        else if (arl_list_append(reader->tree, list, item, &err) != ARL_OK) {
            (void)arl_raise(reader->state, &err);
            list = NULL;
        }
    }
    if (items == NULL) {
        list = NULL;
    }
    Py_XDECREF(items);
    return list;
}

/* An OmegaConf container as plain data, or NULL without an exception when it is not one.
 * OmegaConf is never imported: where it is not, no object can be of it. */
PyObject *
arl_config_omegaconf_to_plain(PyObject *object)
{
    PyObject *modules = PyImport_GetModuleDict(); /* borrowed: lives with the interpreter */
    PyObject *name = PyUnicode_FromString("omegaconf"), *module = NULL, *class = NULL;
    PyObject *is_config = NULL, *plain = NULL, *method = NULL, *args = NULL, *kwargs = NULL;

    if (name == NULL || PyDict_GetItemRef(modules, name, &module) <= 0 || module == Py_None) {
        goto out;
    }
    class = PyObject_GetAttrString(module, "OmegaConf");
    is_config = class == NULL ? NULL : PyObject_CallMethod(class, "is_config", "O", object);
    if (is_config == NULL || is_config != Py_True) {
        goto out;
    }
    method = PyObject_GetAttrString(class, "to_container");
    args = PyTuple_Pack(1, object);
    kwargs = Py_BuildValue("{s:O}", "resolve", Py_True);
    if (method != NULL && args != NULL && kwargs != NULL) {
        plain = PyObject_Call(method, args, kwargs);
    }
out:
    Py_XDECREF(kwargs);
    Py_XDECREF(args);
    Py_XDECREF(method);
    Py_XDECREF(is_config);
    Py_XDECREF(class);
    Py_XDECREF(module);
    Py_XDECREF(name);
    return plain;
}

static arl_node_t *
read_other(arl_config_reader_t *reader, PyObject *object, int depth)
{
    PyObject *plain = arl_config_omegaconf_to_plain(object);
    arl_node_t *node;

    if (plain == NULL) {
        return PyErr_Occurred() ? NULL : read_foreign(reader, object);
    }
    node = read_object(reader, plain, depth);
    Py_DECREF(plain);
    return node;
}

static arl_node_t *
read_object(arl_config_reader_t *reader, PyObject *object, int depth)
{
    arl_node_t *node;

    if (depth >= ARL_TREE_DEPTH_MAX &&
        (PyDict_Check(object) || PyList_Check(object) || PyTuple_Check(object))) {
        (void)arl_raise_format(reader->state, ARL_ERR_CONFIG, reader->tree->operation,
                               "config: nested more than %d levels deep, or within itself",
                               ARL_TREE_DEPTH_MAX);
        return NULL;
    }
    if (object == Py_None) {
        return read_node(reader, ARL_NODE_NULL);
    }
    if (PyBool_Check(object)) {
        node = read_node(reader, ARL_NODE_BOOL);
        if (node != NULL) {
            node->as.boolean = object == Py_True;
        }
        return node;
    }
    if (PyLong_Check(object)) {
        int overflow;
        long long value = PyLong_AsLongLongAndOverflow(object, &overflow);

        if (overflow != 0) {
            return read_bigint(reader, object);
        }
        node = read_node(reader, ARL_NODE_INT);
        if (node != NULL) {
            node->as.integer = value;
        }
        return node;
    }
    if (PyFloat_Check(object)) {
        node = read_node(reader, ARL_NODE_FLOAT);
        if (node != NULL) {
            node->as.real = PyFloat_AS_DOUBLE(object);
        }
        return node;
    }
    if (PyUnicode_Check(object)) {
        return read_text(reader, object);
    }
    if (PyDict_Check(object)) {
        return read_dict(reader, object, depth + 1);
    }
    if (PyList_Check(object) || PyTuple_Check(object)) {
        return read_sequence(reader, object, depth + 1);
    }
    return read_other(reader, object, depth);
}

/* ---- a tree to Python objects ------------------------------------------------------------- */

static PyObject *
write_list(const arl_node_t *node, PyObject *foreign)
{
    PyObject *list = PyList_New((Py_ssize_t)node->as.list.count);

    for (size_t i = 0; list != NULL && i < node->as.list.count; i++) {
        PyObject *item = arl_config_tree_write(node->as.list.items[i], foreign);

        if (item == NULL) {
            Py_CLEAR(list);
        }
        else {
            PyList_SET_ITEM(list, (Py_ssize_t)i, item);
        }
    }
    return list;
}

static PyObject *
write_map(const arl_node_t *node, PyObject *foreign)
{
    PyObject *dict = PyDict_New();

    for (size_t i = 0; dict != NULL && i < node->as.map.count; i++) {
        PyObject *key = arl_config_tree_write(node->as.map.pairs[i].key, foreign);
        PyObject *value =
            key == NULL ? NULL : arl_config_tree_write(node->as.map.pairs[i].value, foreign);

        if (value == NULL || PyDict_SetItem(dict, key, value) < 0) {
            Py_CLEAR(dict);
        }
        Py_XDECREF(value);
        Py_XDECREF(key);
    }
    return dict;
}

PyObject *
arl_config_tree_write(const arl_node_t *node, PyObject *foreign)
{
    switch (node->kind) {
    case ARL_NODE_NULL:
        return Py_NewRef(Py_None);
    case ARL_NODE_BOOL:
        return PyBool_FromLong(node->as.boolean);
    case ARL_NODE_INT:
        return PyLong_FromLongLong(node->as.integer);
    case ARL_NODE_BIGINT:
        return PyLong_FromString(node->as.text.data, NULL, node->base);
    case ARL_NODE_FLOAT:
        return PyFloat_FromDouble(node->as.real);
    case ARL_NODE_TEXT:
        return PyUnicode_DecodeUTF8(node->as.text.data, (Py_ssize_t)node->as.text.size, NULL);
    case ARL_NODE_LIST:
        return write_list(node, foreign);
    case ARL_NODE_MAP:
        return write_map(node, foreign);
    case ARL_NODE_FOREIGN:
        /* borrowed, made strong */
        return Py_NewRef(PyList_GET_ITEM(foreign, (Py_ssize_t)node->as.integer));
    }
    Py_UNREACHABLE();
}

arl_node_t *
arl_config_tree_read(arl_state_t *state, arl_tree_t *tree, PyObject *foreign, PyObject *object)
{
    arl_config_reader_t reader = {.state = state, .tree = tree, .foreign = foreign};

    return read_object(&reader, object, 0);
}
