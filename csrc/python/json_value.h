/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARL_PYTHON_JSON_VALUE_H
#define ARL_PYTHON_JSON_VALUE_H

#include "python/state.h"

#include "core/arl_json.h"

/* Python values as JSON and back, equal to the json module's dumps and loads. */

/*
 * Puts what json.dumps(object) gives, byte for byte. Exact built-in types are written here;
 * whatever else there is (subclasses, keys that are not strings) is left to the module itself, so
 * its rules and its errors hold: TypeError for a value without a JSON form. `depth` counts the
 * containers around `object`; nesting past ARL_JSON_DEPTH_MAX, which a cycle ends in too, is a
 * WireError. Running out of memory shows in arl_text_status. Returns 0, or -1 with an exception.
 */
int arl_json_write_value(arl_state_t *state, arl_text_t *out, PyObject *object, int depth);

/* A str in quotes and ASCII: the rest goes as \uXXXX, two of them past U+FFFF. */
void arl_json_write_string(arl_text_t *out, PyObject *string);

/* What reading needs beside the reader. Zero-initialise all but state, json and err. The
 * error record is here, since making one for every token costs more than most tokens do. */
typedef struct arl_json_builder {
    arl_state_t *state;
    arl_json_reader_t *json;
    PyObject *keys;     /* one object for each key that occurs, as in the json module */
    arl_text_t scratch; /* strings without their escapes, terminated numbers */
    arl_error_t err;
} arl_json_builder_t;

void arl_json_builder_release(arl_json_builder_t *builder);

/*
 * The value whose first token was `token`, read to its end. A key that occurs twice in one
 * object is a WireError: one of the values would be lost.
 */
PyObject *arl_json_read_value(arl_json_builder_t *builder, const arl_json_token_t *token);

/* A string or key. */
PyObject *arl_json_read_string(arl_json_builder_t *builder, const arl_json_token_t *token);

/* arl_json_next and arl_json_take that raise. */
int arl_json_advance(arl_json_builder_t *builder, arl_json_token_t *token_p);
int arl_json_expect(arl_json_builder_t *builder, arl_json_kind_t kind, const char *role,
                    arl_json_token_t *token_p);

#endif
