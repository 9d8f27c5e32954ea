/* SPDX-License-Identifier: Apache-2.0 */
#include "python/config.h"

#include "python/config_tree.h"
#include "python/errors.h"

#include "core/arl_config.h"
#include "core/arl_interp.h"
#include "core/arl_override.h"
#include "core/arl_yaml.h"

#include <errno.h>
#include <string.h>

/* ---- in memory --------------------------------------------------------------------------------
 */

/* A mapping as a plain dict; a new reference, or NULL with an exception set. */
static PyObject *
config_dict(arl_state_t *state, PyObject *mapping, const char *operation)
{
    PyObject *plain;

    if (PyDict_Check(mapping)) {
        return Py_NewRef(mapping);
    }
    plain = arl_config_omegaconf_to_plain(mapping);
    if (plain == NULL && !PyErr_Occurred() && PyMapping_Check(mapping)) {
        PyObject *keys = PyObject_GetAttrString(mapping, "keys"); /* what makes dict() take it */

        if (keys != NULL) {
            plain = PyObject_CallOneArg((PyObject *)&PyDict_Type, mapping);
            Py_DECREF(keys);
        }
        else if (PyErr_ExceptionMatches(PyExc_AttributeError)) {
            PyErr_Clear();
        }
    }
    if (plain != NULL && !PyDict_Check(plain)) {
        Py_CLEAR(plain);
    }
    if (plain == NULL && !PyErr_Occurred()) {
        return arl_raise_format(state, ARL_ERR_TYPE, operation, "config must be a mapping, not %s",
                                Py_TYPE(mapping)->tp_name);
    }
    return plain;
}

/* Makes something of a normalised tree. */
typedef PyObject *(*config_use_fn)(arl_state_t *state, arl_tree_t *tree, PyObject *foreign);

static PyObject *
use_as_dict(arl_state_t *state, arl_tree_t *tree, PyObject *foreign)
{
    (void)state;
    return arl_config_tree_write(tree->root, foreign);
}

static PyObject *
use_for_warnings(arl_state_t *state, arl_tree_t *tree, PyObject *foreign)
{
    arl_error_t err = ARL_ERROR_INIT;
    arl_node_t *list;

    if (arl_node_new(tree, ARL_NODE_LIST, NULL, &list, &err) != ARL_OK ||
        arl_config_tree_warnings(tree, list, &err) != ARL_OK) {
        return arl_raise(state, &err);
    }
    return arl_config_tree_write(list, foreign);
}

static PyObject *
with_normalized(arl_state_t *state, PyObject *mapping, const char *operation, config_use_fn use)
{
    arl_error_t err = ARL_ERROR_INIT;
    PyObject *plain, *foreign = NULL, *result = NULL;
    arl_tree_t tree;

    plain = config_dict(state, mapping, operation);
    if (plain == NULL) {
        return NULL;
    }
    if (arl_tree_init(&tree, operation, &err) != ARL_OK) {
        (void)arl_raise(state, &err);
        goto free_tree;
    }
    foreign = PyList_New(0);
    if (foreign == NULL) {
        goto free_tree;
    }
    tree.root = arl_config_tree_read(state, &tree, foreign, plain);
    if (tree.root == NULL) {
        goto free_tree;
    }
    if (arl_config_tree_normalize(&tree, &err) != ARL_OK) {
        (void)arl_raise(state, &err);
        goto free_tree;
    }
    result = use(state, &tree, foreign);
free_tree:
    arl_tree_free(&tree);
    Py_XDECREF(foreign);
    Py_DECREF(plain);
    return result;
}

PyObject *
arl_config_normalize(arl_state_t *state, PyObject *mapping)
{
    return with_normalized(state, mapping, "normalize_config", use_as_dict);
}

PyDoc_STRVAR(normalize_config_doc,
             "normalize_config(config, /)\n--\n\n"
             "Return a main configuration in its one normalised form.\n"
             "\n"
             "`config` is a dict, another mapping or an OmegaConf container (which is resolved),\n"
             "with `remote_backend` in the nested or in the flat form. The result is a new plain\n"
             "dict: `remote_backend` nested, every default filled in, also those of the verl keys\n"
             "that are read, and `remote_backend['generation']` `'seed'` (it was flat) or\n"
             "`'final'`. It can be normalised again, and then stays as it is.\n"
             "\n"
             "Raises ConfigError for an unknown, renamed, contradictory or mistyped key.");

static PyObject *
normalize_config(PyObject *module, PyObject *config)
{
    return arl_config_normalize(arl_state_from_module(module), config);
}

PyDoc_STRVAR(config_warnings_doc,
             "config_warnings(config, /)\n--\n\n"
             "Return what a configuration says in vain, as a list of texts `path=value: why`.\n"
             "\n"
             "Each option that the client or the server ignores, or that acts in another way than\n"
             "its name says, is named once. `config` is anything that `normalize_config` takes;\n"
             "ConfigError is raised for what that refuses.");

static PyObject *
config_warnings(PyObject *module, PyObject *config)
{
    return with_normalized(arl_state_from_module(module), config, "config_warnings",
                           use_for_warnings);
}

/* ---- from text --------------------------------------------------------------------------------
 */

/* A path that cannot be opened may have been meant as text. */
static void
explain_path(PyObject *source, arl_error_t *err)
{
    const size_t used = strlen(err->text);

    if (err->domain == ARL_DOMAIN_ERRNO && (PyUnicode_Check(source) || PyBytes_Check(source)) &&
        (err->foreign == ENOENT || err->foreign == ENOTDIR || err->foreign == ENAMETOOLONG)) {
        (void)snprintf(err->text + used, sizeof(err->text) - used,
                       "; it was taken for a path: YAML text%s is passed as text=",
                       PyBytes_Check(source) ? ", decoded to str," : " of one line");
    }
}

/* Reads `source` (a path, or text with a line break) or `text` into the tree. */
static int
read_source(arl_state_t *state, PyObject *source, PyObject *text, arl_tree_t *tree)
{
    arl_error_t err = ARL_ERROR_INIT;
    arl_status_t status;
    const char *data;
    Py_ssize_t size;

    if ((source == Py_None) == (text == Py_None)) {
        (void)arl_raise_format(state, ARL_ERR_TYPE, tree->operation,
                               "give either a path (or text of several lines) or text=");
        return -1;
    }
    if (source != Py_None && PyUnicode_Check(source) &&
        PyUnicode_FindChar(source, '\n', 0, PyUnicode_GET_LENGTH(source), 1) >= 0) {
        text = source;
    }
    if (text == Py_None) {
        PyObject *path;

        if (!PyUnicode_FSConverter(source, &path)) {
            return -1;
        }
        data = PyBytes_AS_STRING(path);
        Py_BEGIN_ALLOW_THREADS
        status = arl_yaml_read_file(tree, data, &err);
        Py_END_ALLOW_THREADS
        Py_DECREF(path);
        explain_path(source, &err);
    }
    else {
        if (!PyUnicode_Check(text)) {
            (void)arl_raise_format(state, ARL_ERR_TYPE, tree->operation, "text must be str, not %s",
                                   Py_TYPE(text)->tp_name);
            return -1;
        }
        data = PyUnicode_AsUTF8AndSize(text, &size);
        if (data == NULL) {
            return -1;
        }
        status = arl_yaml_read(tree, data, (size_t)size, "<text>", &err);
    }
    if (status != ARL_OK) {
        (void)arl_raise(state, &err);
        return -1;
    }
    return 0;
}

static int
apply_overrides(arl_state_t *state, PyObject *overrides, arl_tree_t *tree)
{
    arl_error_t err = ARL_ERROR_INIT;
    PyObject *items;
    int result = 0;

    if (PyUnicode_Check(overrides)) {
        (void)arl_raise_format(state, ARL_ERR_TYPE, tree->operation,
                               "overrides is a list of str, not one str");
        return -1;
    }
    items = PySequence_Tuple(overrides);
    if (items == NULL) {
        return -1;
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(items) && result == 0; i++) {
        PyObject *item = PyTuple_GET_ITEM(items, i); /* borrowed from items, which is ours */
        const char *text;
        Py_ssize_t size;

        if (!PyUnicode_Check(item)) {
            (void)arl_raise_format(state, ARL_ERR_TYPE, tree->operation,
                                   "override %zd must be str, not %s", i, Py_TYPE(item)->tp_name);
            result = -1;
            break;
        }
        text = PyUnicode_AsUTF8AndSize(item, &size);
        if (text == NULL) {
            result = -1;
        }
        else if (arl_override_apply(tree, text, (size_t)size, &err) != ARL_OK) {
            (void)arl_raise(state, &err);
            result = -1;
        }
    }
    Py_DECREF(items);
    return result;
}

/* An empty file is an empty configuration. */
static arl_status_t
want_map(arl_tree_t *tree, arl_error_t *err)
{
    if (tree->root->kind == ARL_NODE_NULL) {
        tree->root->kind = ARL_NODE_MAP;
        tree->root->as.map.count = 0;
        tree->root->as.map.capacity = 0;
    }
    if (tree->root->kind == ARL_NODE_MAP) {
        return ARL_OK;
    }
    return arl_tree_fail(tree, tree->root, err, "a configuration is a mapping, found %s",
                         arl_node_kind_name(tree->root));
}

/* Resolving reads the environment, which other threads change under the GIL alone: it is kept. */
static arl_status_t
finish_config(arl_tree_t *tree, arl_error_t *err)
{
    arl_status_t status;

    ARL_CHECK_GOTO(status, arl_config_tree_defaults(tree, err), out);
    ARL_CHECK_GOTO(status, arl_tree_resolve(tree, err), out);
    status = arl_config_tree_normalize(tree, err);
out:
    return status;
}

PyDoc_STRVAR(load_config_doc,
             "load_config(path_or_text=None, overrides=(), *, text=None)\n--\n\n"
             "Read a main configuration from YAML and return it as normalize_config would.\n"
             "\n"
             "`path_or_text` is a path (str or os.PathLike), or YAML text if it is a str with a\n"
             "line break in it; `text` is always YAML text. Scalars mean what they mean to\n"
             "OmegaConf, and interpolations are resolved. `overrides` are applied first, in\n"
             "Hydra's form: 'a.b=1', '+a.b=1', '++a.b=1', '~a.b'.\n"
             "\n"
             "Raises ConfigError with file, line and column for text that is not valid YAML, keys\n"
             "given twice, interpolations that lead nowhere, and everything that normalize_config\n"
             "refuses; OSError when the file cannot be read.");

static PyObject *
load_config(PyObject *module, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"path_or_text", "overrides", "text", NULL};
    arl_state_t *state = arl_state_from_module(module);
    PyObject *source = Py_None, *overrides = NULL, *text = Py_None, *result = NULL;
    arl_error_t err = ARL_ERROR_INIT;
    arl_tree_t tree;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|OO$O:load_config", names, &source, &overrides,
                                     &text)) {
        return NULL;
    }
    if (arl_tree_init(&tree, "load_config", &err) != ARL_OK) {
        (void)arl_raise(state, &err);
    }
    else if (read_source(state, source, text, &tree) == 0) {
        if (want_map(&tree, &err) != ARL_OK) {
            (void)arl_raise(state, &err);
        }
        else if (overrides == NULL || apply_overrides(state, overrides, &tree) == 0) {
            result = finish_config(&tree, &err) == ARL_OK ? arl_config_tree_write(tree.root, NULL)
                                                          : arl_raise(state, &err);
        }
    }
    arl_tree_free(&tree);
    return result;
}

PyDoc_STRVAR(load_yaml_doc,
             "load_yaml(path_or_text=None, *, text=None, resolve=True)\n--\n\n"
             "Read any YAML document into plain Python data, without a schema.\n"
             "\n"
             "The reader of load_config alone: the same input, the same meaning of scalars, the\n"
             "same errors. With resolve=False interpolations stay text.");

static PyObject *
load_yaml(PyObject *module, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"path_or_text", "text", "resolve", NULL};
    arl_state_t *state = arl_state_from_module(module);
    PyObject *source = Py_None, *text = Py_None, *result = NULL;
    arl_error_t err = ARL_ERROR_INIT;
    arl_tree_t tree;
    int resolve = 1;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|O$Op:load_yaml", names, &source, &text,
                                     &resolve)) {
        return NULL;
    }
    if (arl_tree_init(&tree, "load_yaml", &err) != ARL_OK) {
        (void)arl_raise(state, &err);
    }
    else if (read_source(state, source, text, &tree) == 0) {
        if (resolve && arl_tree_resolve(&tree, &err) != ARL_OK) {
            (void)arl_raise(state, &err);
        }
        else {
            result = arl_config_tree_write(tree.root, NULL);
        }
    }
    arl_tree_free(&tree);
    return result;
}

/* ---- the schema, for documentation and tools ---------------------------------------------------
 */

static const char *
field_kind_name(arl_field_kind_t kind)
{
    switch (kind) {
    case ARL_FIELD_BOOL:
        return "bool";
    case ARL_FIELD_INT:
        return "int";
    case ARL_FIELD_NUMBER:
        return "number";
    case ARL_FIELD_TEXT:
        return "text";
    case ARL_FIELD_CHOICE:
        return "choice";
    case ARL_FIELD_PAIR:
        return "pair";
    }
    return "?";
}

static PyObject *
field_entry(const arl_field_t *field)
{
    return Py_BuildValue(
        "{s:s, s:z, s:s, s:O, s:O, s:O, s:O, s:z, s:z, s:z, s:d, s:d, s:s}", "path", field->path,
        "flat", field->flat, "kind", field_kind_name(field->kind), "nullable",
        (field->flags & ARL_FIELD_NULLABLE) != 0 ? Py_True : Py_False, "absent",
        (field->flags & ARL_FIELD_ABSENT) != 0 ? Py_True : Py_False, "seed_only",
        (field->flags & ARL_FIELD_SEED_ONLY) != 0 ? Py_True : Py_False, "final_only",
        (field->flags & ARL_FIELD_FINAL_ONLY) != 0 ? Py_True : Py_False, "default", field->fallback,
        "seed_default", field->seed_value, "choices", field->choices, "min", field->min, "max",
        field->max, "doc", field->doc);
}

static PyObject *
ignored_entry(const arl_config_ignored_t *option)
{
    return Py_BuildValue("{s:s, s:O, s:O, s:s, s:s}", "path", option->path, "seed",
                         (option->generations & ARL_CONFIG_SEED) != 0 ? Py_True : Py_False, "final",
                         (option->generations & ARL_CONFIG_FINAL) != 0 ? Py_True : Py_False,
                         "harmless", option->harmless, "why", option->why);
}

/* Appends a new reference, which may be NULL. */
static int
append_entry(PyObject *list, PyObject *entry)
{
    int result = entry == NULL ? -1 : PyList_Append(list, entry);

    Py_XDECREF(entry);
    return result;
}

PyDoc_STRVAR(config_schema_doc,
             "config_schema()\n--\n\n"
             "Return the tables of configuration keys, for documentation and tools.\n"
             "\n"
             "'remote_backend' and 'verl' list the keys that are read, a dict each: `path`\n"
             "(relative to remote_backend, or full), `flat` (its name in the flat form or None),\n"
             "`kind` (bool, int, number, text, choice, pair), `default` (a YAML scalar, or None\n"
             "where `doc` says what holds) and so on. 'ignored' lists the options that are warned\n"
             "about: `path`, the generations, the `harmless` values, and `why`.");

static PyObject *
config_schema(PyObject *module, PyObject *Py_UNUSED(ignored))
{
    PyObject *arctic = PyList_New(0), *verl = PyList_New(0), *options = PyList_New(0);
    PyObject *result = NULL;

    (void)module;
    if (arctic == NULL || verl == NULL || options == NULL) {
        goto out;
    }
    for (size_t i = 0; i < arl_config_arctic_count; i++) {
        if (append_entry(arctic, field_entry(&arl_config_arctic_fields[i])) < 0) {
            goto out;
        }
    }
    for (size_t i = 0; i < arl_config_verl_count; i++) {
        if (append_entry(verl, field_entry(&arl_config_verl_fields[i])) < 0) {
            goto out;
        }
    }
    for (size_t i = 0; i < arl_config_ignored_count; i++) {
        if (append_entry(options, ignored_entry(&arl_config_ignored[i])) < 0) {
            goto out;
        }
    }
    result = Py_BuildValue("{s:O, s:O, s:O}", "remote_backend", arctic, "verl", verl, "ignored",
                           options);
out:
    Py_XDECREF(options);
    Py_XDECREF(verl);
    Py_XDECREF(arctic);
    return result;
}

PyMethodDef arl_config_methods[] = {
    {"config_schema", config_schema, METH_NOARGS, config_schema_doc},
    {"config_warnings", config_warnings, METH_O, config_warnings_doc},
    {"load_config", (PyCFunction)(void (*)(void))load_config, METH_VARARGS | METH_KEYWORDS,
     load_config_doc},
    {"load_yaml", (PyCFunction)(void (*)(void))load_yaml, METH_VARARGS | METH_KEYWORDS,
     load_yaml_doc},
    {"normalize_config", normalize_config, METH_O, normalize_config_doc},
    {NULL, NULL, 0, NULL},
};

int
arl_config_exec(PyObject *module, arl_state_t *state)
{
    (void)module;
    (void)state;
    return 0;
}
