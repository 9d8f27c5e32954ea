/* SPDX-License-Identifier: Apache-2.0 */
#include "python/json_value.h"

#include "python/errors.h"
#include "python/tensor.h"

/* ---- writing ------------------------------------------------------------------------------- */

/* json.dumps of anything. */
static int
write_by_module(arl_state_t *state, arl_text_t *out, PyObject *object)
{
    PyObject *text;
    const char *utf8;
    Py_ssize_t size;

    if (state->json_dumps == NULL) {
        PyObject *json = PyImport_ImportModule("json");

        if (json == NULL) {
            return -1;
        }
        Py_XSETREF(state->json_dumps, PyObject_GetAttrString(json, "dumps"));
        Py_DECREF(json);
        if (state->json_dumps == NULL) {
            return -1;
        }
    }
    text = PyObject_CallOneArg(state->json_dumps, object);
    if (text == NULL) {
        return -1;
    }
    utf8 = PyUnicode_AsUTF8AndSize(text, &size);
    if (utf8 != NULL) {
        arl_text_put(out, utf8, (size_t)size);
    }
    Py_DECREF(text);
    return utf8 == NULL ? -1 : 0;
}

static void
put_unicode_escape(arl_text_t *out, Py_UCS4 unit)
{
    static const char digits[] = "0123456789abcdef";
    const char escape[6] = {
        '\\',
        'u',
        digits[unit >> 12],
        digits[unit >> 8 & 15],
        digits[unit >> 4 & 15],
        digits[unit & 15],
    };

    arl_text_put(out, escape, sizeof(escape));
}

void
arl_json_write_string(arl_text_t *out, PyObject *string)
{
    const int kind = (int)PyUnicode_KIND(string);
    const void *data = PyUnicode_DATA(string);
    const Py_ssize_t length = PyUnicode_GET_LENGTH(string);

    /* For ASCII the core's writer gives the same, but leaves DEL as it is. */
    if (PyUnicode_IS_ASCII(string) && memchr(data, 0x7f, (size_t)length) == NULL) {
        arl_json_put_string(out, data, (size_t)length);
        return;
    }
    arl_text_put_char(out, '"');
    for (Py_ssize_t i = 0; i < length; i++) {
        const Py_UCS4 c = PyUnicode_READ(kind, data, i);

        if (c >= 0x10000) {
            put_unicode_escape(out, 0xd800 + ((c - 0x10000) >> 10));
            put_unicode_escape(out, 0xdc00 + ((c - 0x10000) & 0x3ff));
        }
        else if (c >= 0x7f) {
            put_unicode_escape(out, c);
        }
        else {
            arl_json_put_char(out, (char)c);
        }
    }
    arl_text_put_char(out, '"');
}

static int
write_int(arl_state_t *state, arl_text_t *out, PyObject *object)
{
    int overflow;
    const long long value = PyLong_AsLongLongAndOverflow(object, &overflow);

    if (overflow != 0) {
        return write_by_module(state, out, object);
    }
    if (value == -1 && PyErr_Occurred()) {
        return -1;
    }
    arl_text_put_int64(out, value);
    return 0;
}

static int
write_float(arl_text_t *out, PyObject *object)
{
    const double value = PyFloat_AS_DOUBLE(object);
    char *text;

    if (Py_IS_NAN(value)) {
        arl_text_put_string(out, "NaN");
        return 0;
    }
    if (Py_IS_INFINITY(value)) {
        arl_text_put_string(out, value > 0 ? "Infinity" : "-Infinity");
        return 0;
    }
    text = PyOS_double_to_string(value, 'r', 0, Py_DTSF_ADD_DOT_0, NULL);
    if (text == NULL) {
        return -1;
    }
    arl_text_put_string(out, text);
    PyMem_Free(text);
    return 0;
}

static int
write_list(arl_state_t *state, arl_text_t *out, PyObject *list, int depth)
{
    arl_text_put_char(out, '[');
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); i++) {
        PyObject *item = PyList_GetItemRef(list, i);
        int status;

        if (item == NULL) {
            return -1;
        }
        if (i > 0) {
            arl_text_put_string(out, ", ");
        }
        status = arl_json_write_value(state, out, item, depth + 1);
        Py_DECREF(item);
        if (status < 0) {
            return -1;
        }
    }
    arl_text_put_char(out, ']');
    return 0;
}

static int
write_tuple(arl_state_t *state, arl_text_t *out, PyObject *tuple, int depth)
{
    arl_text_put_char(out, '[');
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); i++) {
        if (i > 0) {
            arl_text_put_string(out, ", ");
        }
        /* borrowed from tuple, which cannot change */
        if (arl_json_write_value(state, out, PyTuple_GET_ITEM(tuple, i), depth + 1) < 0) {
            return -1;
        }
    }
    arl_text_put_char(out, ']');
    return 0;
}

static bool
has_string_keys(PyObject *dict)
{
    PyObject *key, *value;
    Py_ssize_t position = 0;

    while (PyDict_Next(dict, &position, &key, &value)) { /* borrowed from dict; runs no code */
        if (!PyUnicode_CheckExact(key)) {
            return false;
        }
    }
    return true;
}

static int
write_dict(arl_state_t *state, arl_text_t *out, PyObject *dict, int depth)
{
    PyObject *key, *value;
    Py_ssize_t position = 0;
    bool first = true;

    if (!has_string_keys(dict)) {
        return write_by_module(state, out, dict);
    }
    arl_text_put_char(out, '{');
    /* borrowed from dict, held below: writing a value may run code that changes the dict */
    while (PyDict_Next(dict, &position, &key, &value)) {
        int status = 0;

        if (!PyUnicode_CheckExact(key)) {
            PyErr_SetString(PyExc_RuntimeError, "dictionary changed while it was written");
            return -1;
        }
        Py_INCREF(key);
        Py_INCREF(value);
        if (!first) {
            arl_text_put_string(out, ", ");
        }
        first = false;
        arl_json_write_string(out, key);
        arl_text_put_string(out, ": ");
        status = arl_json_write_value(state, out, value, depth + 1);
        Py_DECREF(key);
        Py_DECREF(value);
        if (status < 0) {
            return -1;
        }
    }
    arl_text_put_char(out, '}');
    return 0;
}

int
arl_json_write_value(arl_state_t *state, arl_text_t *out, PyObject *object, int depth)
{
    if (object == Py_None) {
        arl_text_put_string(out, "null");
    }
    else if (object == Py_True || object == Py_False) {
        arl_text_put_string(out, object == Py_True ? "true" : "false");
    }
    else if (PyUnicode_CheckExact(object)) {
        arl_json_write_string(out, object);
    }
    else if (PyLong_CheckExact(object)) {
        return write_int(state, out, object);
    }
    else if (PyFloat_CheckExact(object)) {
        return write_float(out, object);
    }
    else if (!PyList_CheckExact(object) && !PyTuple_CheckExact(object) &&
             !PyDict_CheckExact(object)) {
        return write_by_module(state, out, object);
    }
    else if (depth >= ARL_JSON_DEPTH_MAX) {
        (void)arl_raise_format(state, ARL_ERR_WIRE, "write JSON",
                               "the object is nested deeper than %d levels, or contains itself",
                               (int)ARL_JSON_DEPTH_MAX);
        return -1;
    }
    else if (PyList_CheckExact(object)) {
        return write_list(state, out, object, depth);
    }
    else if (PyTuple_CheckExact(object)) {
        return write_tuple(state, out, object, depth);
    }
    else {
        return write_dict(state, out, object, depth);
    }
    return 0;
}

/* ---- reading ------------------------------------------------------------------------------- */

void
arl_json_builder_release(arl_json_builder_t *builder)
{
    Py_CLEAR(builder->keys);
    arl_text_free(&builder->scratch);
}

int
arl_json_advance(arl_json_builder_t *builder, arl_json_token_t *token_p)
{
    if (arl_json_next(builder->json, token_p, &builder->err) != ARL_OK) {
        (void)arl_raise(builder->state, &builder->err);
        return -1;
    }
    return 0;
}

int
arl_json_expect(arl_json_builder_t *builder, arl_json_kind_t kind, const char *role,
                arl_json_token_t *token_p)
{
    if (arl_json_take(builder->json, kind, role, token_p, &builder->err) != ARL_OK) {
        (void)arl_raise(builder->state, &builder->err);
        return -1;
    }
    return 0;
}

/* Room for `size` bytes that are needed for a moment. */
static char *
scratch(arl_json_builder_t *builder, size_t size)
{
    builder->scratch.size = 0;
    if (!arl_text_reserve(&builder->scratch, size)) {
        (void)PyErr_NoMemory();
        return NULL;
    }
    return builder->scratch.data;
}

PyObject *
arl_json_read_string(arl_json_builder_t *builder, const arl_json_token_t *token)
{
    const size_t raw = token->end - token->begin;
    bool surrogates;
    char *plain;
    size_t size;

    if (!token->escaped) {
        return PyUnicode_DecodeUTF8(builder->json->text + token->begin, (Py_ssize_t)raw, "strict");
    }
    plain = scratch(builder, raw);
    if (plain == NULL) {
        return NULL;
    }
    size = arl_json_unescape(builder->json, token, plain, &surrogates);
    return PyUnicode_DecodeUTF8(plain, (Py_ssize_t)size, surrogates ? "surrogatepass" : "strict");
}

/* The literal of a number as a C string. */
static const char *
number_text(arl_json_builder_t *builder, const arl_json_token_t *token)
{
    const size_t size = token->end - token->begin;
    char *text = scratch(builder, size + 1);

    if (text != NULL) {
        memcpy(text, builder->json->text + token->begin, size);
        text[size] = '\0';
    }
    return text;
}

static PyObject *
read_integer(arl_json_builder_t *builder, const arl_json_token_t *token)
{
    int64_t value;
    const char *text;
    PyObject *integer;

    if (arl_json_int64(builder->json, token, &value)) {
        return PyLong_FromLongLong(value);
    }
    text = number_text(builder, token);
    if (text == NULL) {
        return NULL;
    }
    integer = PyLong_FromString(text, NULL, 10);
    if (integer == NULL && PyErr_ExceptionMatches(PyExc_ValueError)) {
        PyErr_Clear(); /* past sys.get_int_max_str_digits() */
        return arl_raise_format(builder->state, ARL_ERR_WIRE, "read JSON",
                                "%s: byte %zu: an integer of %zu digits is more than this "
                                "interpreter converts",
                                builder->json->what, token->begin, token->end - token->begin);
    }
    return integer;
}

static PyObject *
read_real(arl_json_builder_t *builder, const arl_json_token_t *token)
{
    const char *text = number_text(builder, token);
    double value;

    if (text == NULL) {
        return NULL;
    }
    value = PyOS_string_to_double(text, NULL, NULL); /* too large becomes infinite */
    return value == -1.0 && PyErr_Occurred() ? NULL : PyFloat_FromDouble(value);
}

static PyObject *
read_list(arl_json_builder_t *builder)
{
    PyObject *list = PyList_New(0);
    arl_json_token_t token;

    while (list != NULL) {
        PyObject *item;
        int status;

        if (arl_json_advance(builder, &token) < 0) {
            break;
        }
        if (token.kind == ARL_JSON_ARRAY_END) {
            return list;
        }
        item = arl_json_read_value(builder, &token);
        if (item == NULL) {
            break;
        }
        status = PyList_Append(list, item);
        Py_DECREF(item);
        if (status < 0) {
            break;
        }
    }
    Py_XDECREF(list);
    return NULL;
}

/* Equal keys of many dicts share one object. */
static PyObject *
read_key(arl_json_builder_t *builder, const arl_json_token_t *token)
{
    PyObject *key, *shared;

    if (builder->keys == NULL) {
        builder->keys = PyDict_New();
        if (builder->keys == NULL) {
            return NULL;
        }
    }
    key = arl_json_read_string(builder, token);
    if (key == NULL) {
        return NULL;
    }
    shared = PyDict_SetDefault(builder->keys, key, key); /* borrowed from keys, held below */
    Py_XINCREF(shared);
    Py_DECREF(key);
    return shared;
}

static int
read_pair(arl_json_builder_t *builder, PyObject *dict, const arl_json_token_t *token)
{
    const Py_ssize_t size = PyDict_GET_SIZE(dict);
    arl_json_token_t first;
    PyObject *key = read_key(builder, token), *value;
    int status = -1;

    if (key == NULL) {
        return -1;
    }
    if (arl_json_advance(builder, &first) == 0) {
        value = arl_json_read_value(builder, &first);
        status = value == NULL ? -1 : PyDict_SetItem(dict, key, value);
        Py_XDECREF(value);
    }
    Py_DECREF(key);
    if (status == 0 && PyDict_GET_SIZE(dict) == size) {
        (void)arl_raise_format(builder->state, ARL_ERR_WIRE, "read JSON",
                               "%s: byte %zu: an object holds the key \"%.*s\" twice",
                               builder->json->what, token->begin,
                               arl_json_quoted(token->end - token->begin),
                               builder->json->text + token->begin);
        return -1;
    }
    return status;
}

static PyObject *
read_dict(arl_json_builder_t *builder)
{
    PyObject *dict = PyDict_New();
    arl_json_token_t token;

    while (dict != NULL && arl_json_advance(builder, &token) == 0) {
        if (token.kind == ARL_JSON_OBJECT_END) {
            return dict;
        }
        if (read_pair(builder, dict, &token) < 0) {
            break;
        }
    }
    Py_XDECREF(dict);
    return NULL;
}

PyObject *
arl_json_read_value(arl_json_builder_t *builder, const arl_json_token_t *token)
{
    switch (token->kind) {
    case ARL_JSON_NULL:
        return Py_NewRef(Py_None);
    case ARL_JSON_FALSE:
        return Py_NewRef(Py_False);
    case ARL_JSON_TRUE:
        return Py_NewRef(Py_True);
    case ARL_JSON_INTEGER:
        return read_integer(builder, token);
    case ARL_JSON_REAL:
        return read_real(builder, token);
    case ARL_JSON_NAN:
        return PyFloat_FromDouble(Py_NAN);
    case ARL_JSON_INFINITY:
        return PyFloat_FromDouble(Py_HUGE_VAL);
    case ARL_JSON_MINUS_INFINITY:
        return PyFloat_FromDouble(-Py_HUGE_VAL);
    case ARL_JSON_STRING:
    case ARL_JSON_KEY:
        return arl_json_read_string(builder, token);
    case ARL_JSON_ARRAY:
        return read_list(builder);
    case ARL_JSON_OBJECT:
        return read_dict(builder);
    case ARL_JSON_END:
    case ARL_JSON_ARRAY_END:
    case ARL_JSON_OBJECT_END:
        break;
    }
    return arl_raise_format(builder->state, ARL_ERR_WIRE, "read JSON",
                            "%s: byte %zu: expected a value, found %s", builder->json->what,
                            token->begin, arl_json_kind_name(token->kind));
}
