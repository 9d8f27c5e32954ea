/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARL_CORE_JSON_H
#define ARL_CORE_JSON_H

#include "core/arl_status.h"
#include "core/arl_text.h"

#include <stdbool.h>

/*
 * A pull reader for JSON that came from outside: strict grammar (RFC 8259), no recursion, no
 * allocation, a fixed limit on nesting. It hands out one token at a time as offsets into the
 * text, so the caller decides what to build, and how much of it.
 *
 * Both parsers of the wire format stand on it: the frame's header, and the object tree inside.
 */

enum { ARL_JSON_DEPTH_MAX = 512 };

typedef enum arl_json_kind {
    ARL_JSON_END = 0, /* after the one value, and every time after that */
    ARL_JSON_NULL,
    ARL_JSON_FALSE,
    ARL_JSON_TRUE,
    ARL_JSON_INTEGER, /* digits with an optional sign */
    ARL_JSON_REAL,    /* a number with a fraction or an exponent */
    ARL_JSON_NAN,     /* this and the next two: only with `constants` */
    ARL_JSON_INFINITY,
    ARL_JSON_MINUS_INFINITY,
    ARL_JSON_STRING,
    ARL_JSON_KEY, /* the colon is read with it */
    ARL_JSON_ARRAY,
    ARL_JSON_ARRAY_END,
    ARL_JSON_OBJECT,
    ARL_JSON_OBJECT_END,
} arl_json_kind_t;

/* [begin, end) of the text: the digits of a number, what is between the quotes of a string. */
typedef struct arl_json_token {
    arl_json_kind_t kind;
    bool escaped; /* a string that holds backslashes */
    size_t begin;
    size_t end;
} arl_json_token_t;

typedef enum arl_json_expect {
    ARL_JSON_EXPECT_VALUE,
    ARL_JSON_EXPECT_VALUE_OR_END,
    ARL_JSON_EXPECT_KEY,
    ARL_JSON_EXPECT_KEY_OR_END,
    ARL_JSON_EXPECT_COMMA_OR_END,
    ARL_JSON_EXPECT_NOTHING,
} arl_json_expect_t;

/* Plain data: a copy of a reader is a bookmark. */
typedef struct arl_json_reader {
    const char *text;
    size_t size;
    size_t at;
    const char *what; /* names the text in messages; must outlive the reader */
    bool constants;   /* accept NaN, Infinity and -Infinity, as Python's json does */
    arl_json_expect_t expect;
    int depth;
    uint64_t in_object[ARL_JSON_DEPTH_MAX / 64]; /* bit d: level d is an object, not an array */
} arl_json_reader_t;

/* The text must be valid UTF-8 (arl_utf8_valid); the reader does not look again. */
void arl_json_start(arl_json_reader_t *reader, const char *text, size_t size, const char *what,
                    bool constants);

/* The next token, or ARL_ERR_WIRE with the byte offset, what was wanted and what was found. */
arl_status_t arl_json_next(arl_json_reader_t *reader, arl_json_token_t *token_p, arl_error_t *err);

/* The next token, which must be of `kind`; `role` says in the message what it is for. */
arl_status_t arl_json_take(arl_json_reader_t *reader, arl_json_kind_t kind, const char *role,
                           arl_json_token_t *token_p, arl_error_t *err);

/* Reads on to the end of the value whose first token was `token`. */
arl_status_t arl_json_skip(arl_json_reader_t *reader, const arl_json_token_t *token,
                           arl_error_t *err);

/* "a string", "the end of an array", …: for messages. */
const char *arl_json_kind_name(arl_json_kind_t kind);

/* True when a string or key says exactly `literal` (at most 63 bytes). */
bool arl_json_equals(const arl_json_reader_t *reader, const arl_json_token_t *token,
                     const char *literal);

/* The value of an integer token; false when it does not fit. */
bool arl_json_int64(const arl_json_reader_t *reader, const arl_json_token_t *token,
                    int64_t *value_p);

/*
 * Writes a string or key without its escapes to `out`, which has room for token.end -
 * token.begin bytes, and returns the length. Surrogate pairs become one character. A lone
 * surrogate is written in three bytes as Python's "surrogatepass" does, and noted in
 * *surrogates_p: the result is then not valid UTF-8.
 */
size_t arl_json_unescape(const arl_json_reader_t *reader, const arl_json_token_t *token, char *out,
                         bool *surrogates_p);

/* Puts a JSON string with its quotes. Escapes quote, backslash and controls; leaves UTF-8. */
void arl_json_put_string(arl_text_t *text, const char *utf8, size_t size);

/* Puts one ASCII character of a string, escaped where it must be. */
void arl_json_put_char(arl_text_t *text, char c);

/* Bytes of a foreign name that a message repeats, as the precision of %.*s. */
static inline int
arl_json_quoted(size_t size)
{
    return size < 100 ? (int)size : 100;
}

bool arl_utf8_valid(const char *text, size_t size);

#endif
