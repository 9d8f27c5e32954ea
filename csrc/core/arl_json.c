/* SPDX-License-Identifier: Apache-2.0 */
#include "core/arl_json.h"

#include <string.h>

static const char operation_name[] = "read JSON";

/* ---- errors ------------------------------------------------------------------------------- */

const char *
arl_json_kind_name(arl_json_kind_t kind)
{
    switch (kind) {
    case ARL_JSON_END:
        return "the end of the text";
    case ARL_JSON_NULL:
        return "null";
    case ARL_JSON_FALSE:
        return "false";
    case ARL_JSON_TRUE:
        return "true";
    case ARL_JSON_INTEGER:
        return "an integer";
    case ARL_JSON_REAL:
        return "a real number";
    case ARL_JSON_NAN:
        return "NaN";
    case ARL_JSON_INFINITY:
        return "Infinity";
    case ARL_JSON_MINUS_INFINITY:
        return "-Infinity";
    case ARL_JSON_STRING:
        return "a string";
    case ARL_JSON_KEY:
        return "a key";
    case ARL_JSON_ARRAY:
        return "an array";
    case ARL_JSON_ARRAY_END:
        return "the end of an array";
    case ARL_JSON_OBJECT:
        return "an object";
    case ARL_JSON_OBJECT_END:
        return "the end of an object";
    }
    return "?";
}

static const char *
expect_text(const arl_json_reader_t *reader)
{
    switch (reader->expect) {
    case ARL_JSON_EXPECT_VALUE:
        return "a value";
    case ARL_JSON_EXPECT_VALUE_OR_END:
        return "a value or ']'";
    case ARL_JSON_EXPECT_KEY:
        return "a key";
    case ARL_JSON_EXPECT_KEY_OR_END:
        return "a key or '}'";
    case ARL_JSON_EXPECT_COMMA_OR_END:
        return "',' or the closing bracket";
    case ARL_JSON_EXPECT_NOTHING:
        return "the end of the text";
    }
    return "?";
}

/* What is at `at`, against what the grammar allows there. */
static arl_status_t
fail_here(const arl_json_reader_t *reader, size_t at, const char *wanted, arl_error_t *err)
{
    unsigned char found;

    if (at >= reader->size) {
        return arl_error_set(err, ARL_ERR_WIRE, operation_name,
                             "%s: ends at byte %zu where %s was expected", reader->what, at,
                             wanted);
    }
    found = (unsigned char)reader->text[at];
    if (found > 0x20 && found < 0x7f) {
        return arl_error_set(err, ARL_ERR_WIRE, operation_name,
                             "%s: byte %zu: expected %s, found '%c'", reader->what, at, wanted,
                             found);
    }
    return arl_error_set(err, ARL_ERR_WIRE, operation_name,
                         "%s: byte %zu: expected %s, found 0x%02x", reader->what, at, wanted,
                         found);
}

/* ---- scanning ----------------------------------------------------------------------------- */

static bool
is_space(char c)
{
    return c == ' ' || c == '\n' || c == '\r' || c == '\t';
}

static void
skip_space(arl_json_reader_t *reader)
{
    while (reader->at < reader->size && is_space(reader->text[reader->at])) {
        reader->at++;
    }
}

static bool
is_digit(char c)
{
    return c >= '0' && c <= '9';
}

static int
hex_value(char c)
{
    if (is_digit(c)) {
        return c - '0';
    }
    if (c >= 'a' && c <= 'f') {
        return c - 'a' + 10;
    }
    if (c >= 'A' && c <= 'F') {
        return c - 'A' + 10;
    }
    return -1;
}

/* The four digits of \uXXXX at `digits`, or -1. */
static int
hex4(const char *digits)
{
    int value = 0;

    for (int i = 0; i < 4; i++) {
        int digit = hex_value(digits[i]);

        if (digit < 0) {
            return -1;
        }
        value = value * 16 + digit;
    }
    return value;
}

/* Length of the escape that starts with the backslash at `at`, or 0 when it is not one. */
static size_t
escape_length(const arl_json_reader_t *reader, size_t at)
{
    size_t left = reader->size - at;

    if (left < 2) {
        return 0;
    }
    switch (reader->text[at + 1]) {
    case '"':
    case '\\':
    case '/':
    case 'b':
    case 'f':
    case 'n':
    case 'r':
    case 't':
        return 2;
    case 'u':
        return left >= 6 && hex4(reader->text + at + 2) >= 0 ? 6 : 0;
    default:
        return 0;
    }
}

/* True when none of the eight bytes ends plain text: quote, backslash or control. */
static bool
plain8(const char *text)
{
    const uint64_t ones = 0x0101010101010101u, tops = 0x8080808080808080u;
    uint64_t word, quote, backslash;

    memcpy(&word, text, sizeof(word));
    quote = word ^ (ones * '"');
    backslash = word ^ (ones * '\\');
    return ((((quote - ones) & ~quote) | ((backslash - ones) & ~backslash) |
             ((word - ones * 0x20) & ~word)) &
            tops) == 0;
}

/* From the opening quote at `at` to past the closing one. */
static arl_status_t
scan_string(arl_json_reader_t *reader, arl_json_token_t *token, arl_error_t *err)
{
    size_t at = reader->at + 1;

    token->begin = at;
    token->escaped = false;
    for (;;) {
        unsigned char c;

        while (reader->size - at >= 8 && plain8(reader->text + at)) {
            at += 8;
        }
        if (at >= reader->size) {
            return fail_here(reader, at, "the closing quote of a string", err);
        }
        c = (unsigned char)reader->text[at];
        if (c == '"') {
            break;
        }
        if (c < 0x20) {
            return fail_here(reader, at, "an escape (a control character in a string)", err);
        }
        if (c == '\\') {
            size_t length = escape_length(reader, at);

            if (length == 0) {
                return fail_here(reader, at + 1, "a valid escape after the backslash", err);
            }
            token->escaped = true;
            at += length;
        }
        else {
            at++;
        }
    }
    token->end = at;
    reader->at = at + 1;
    return ARL_OK;
}

static bool
scan_word(arl_json_reader_t *reader, const char *word)
{
    size_t length = strlen(word);

    if (reader->size - reader->at < length ||
        memcmp(reader->text + reader->at, word, length) != 0) {
        return false;
    }
    reader->at += length;
    return true;
}

/* Digits from *at_p on; false when there is none. */
static bool
scan_digits(const arl_json_reader_t *reader, size_t *at_p)
{
    size_t at = *at_p;

    while (at < reader->size && is_digit(reader->text[at])) {
        at++;
    }
    if (at == *at_p) {
        return false;
    }
    *at_p = at;
    return true;
}

static arl_status_t
scan_number(arl_json_reader_t *reader, arl_json_token_t *token, arl_error_t *err)
{
    size_t at = reader->at, first;

    token->begin = at;
    token->kind = ARL_JSON_INTEGER;
    if (reader->text[at] == '-') {
        at++;
        if (reader->constants && reader->size - at >= 8 &&
            memcmp(reader->text + at, "Infinity", 8) == 0) {
            token->kind = ARL_JSON_MINUS_INFINITY;
            token->end = reader->at = at + 8;
            return ARL_OK;
        }
    }
    first = at;
    if (!scan_digits(reader, &at)) {
        return fail_here(reader, at, "a digit", err);
    }
    if (reader->text[first] == '0' && at - first > 1) {
        return fail_here(reader, first + 1, "no digit after a leading zero", err);
    }
    if (at < reader->size && reader->text[at] == '.') {
        at++;
        token->kind = ARL_JSON_REAL;
        if (!scan_digits(reader, &at)) {
            return fail_here(reader, at, "a digit after the decimal point", err);
        }
    }
    if (at < reader->size && (reader->text[at] == 'e' || reader->text[at] == 'E')) {
        at++;
        token->kind = ARL_JSON_REAL;
        if (at < reader->size && (reader->text[at] == '+' || reader->text[at] == '-')) {
            at++;
        }
        if (!scan_digits(reader, &at)) {
            return fail_here(reader, at, "a digit in the exponent", err);
        }
    }
    token->end = reader->at = at;
    return ARL_OK;
}

/* ---- structure ---------------------------------------------------------------------------- */

static bool
in_object(const arl_json_reader_t *reader)
{
    int level = reader->depth - 1;

    return (reader->in_object[level / 64] >> (level % 64) & 1) != 0;
}

static void
value_done(arl_json_reader_t *reader)
{
    reader->expect = reader->depth == 0 ? ARL_JSON_EXPECT_NOTHING : ARL_JSON_EXPECT_COMMA_OR_END;
}

static arl_status_t
open_container(arl_json_reader_t *reader, bool object, arl_error_t *err)
{
    int level = reader->depth;
    uint64_t bit = (uint64_t)1 << (level % 64);

    if (level >= ARL_JSON_DEPTH_MAX) {
        return arl_error_set(err, ARL_ERR_WIRE, operation_name,
                             "%s: byte %zu: nested deeper than %d levels", reader->what, reader->at,
                             (int)ARL_JSON_DEPTH_MAX);
    }
    if (object) {
        reader->in_object[level / 64] |= bit;
    }
    else {
        reader->in_object[level / 64] &= ~bit;
    }
    reader->depth++;
    reader->at++;
    reader->expect = object ? ARL_JSON_EXPECT_KEY_OR_END : ARL_JSON_EXPECT_VALUE_OR_END;
    return ARL_OK;
}

static arl_status_t
read_key(arl_json_reader_t *reader, arl_json_token_t *token, arl_error_t *err)
{
    arl_status_t status;

    token->kind = ARL_JSON_KEY;
    status = scan_string(reader, token, err);
    if (status != ARL_OK) {
        return status;
    }
    skip_space(reader);
    if (reader->at >= reader->size || reader->text[reader->at] != ':') {
        return fail_here(reader, reader->at, "':' after a key", err);
    }
    reader->at++;
    reader->expect = ARL_JSON_EXPECT_VALUE;
    return ARL_OK;
}

static arl_status_t
read_word(arl_json_reader_t *reader, arl_json_token_t *token, arl_error_t *err)
{
    if (scan_word(reader, "null")) {
        token->kind = ARL_JSON_NULL;
    }
    else if (scan_word(reader, "true")) {
        token->kind = ARL_JSON_TRUE;
    }
    else if (scan_word(reader, "false")) {
        token->kind = ARL_JSON_FALSE;
    }
    else if (reader->constants && scan_word(reader, "NaN")) {
        token->kind = ARL_JSON_NAN;
    }
    else if (reader->constants && scan_word(reader, "Infinity")) {
        token->kind = ARL_JSON_INFINITY;
    }
    else {
        return fail_here(reader, reader->at, expect_text(reader), err);
    }
    token->end = reader->at;
    return ARL_OK;
}

static arl_status_t
read_value(arl_json_reader_t *reader, arl_json_token_t *token, arl_error_t *err)
{
    char c = reader->text[reader->at];
    arl_status_t status;

    if (c == '[' || c == '{') {
        token->kind = c == '[' ? ARL_JSON_ARRAY : ARL_JSON_OBJECT;
        return open_container(reader, c == '{', err);
    }
    if (c == '"') {
        token->kind = ARL_JSON_STRING;
        status = scan_string(reader, token, err);
    }
    else if (c == '-' || is_digit(c)) {
        status = scan_number(reader, token, err);
    }
    else {
        status = read_word(reader, token, err);
    }
    value_done(reader);
    return status;
}

static arl_status_t
read_close(arl_json_reader_t *reader, arl_json_token_t *token)
{
    token->kind = in_object(reader) ? ARL_JSON_OBJECT_END : ARL_JSON_ARRAY_END;
    reader->at++;
    token->end = reader->at;
    reader->depth--;
    value_done(reader);
    return ARL_OK;
}

void
arl_json_start(arl_json_reader_t *reader, const char *text, size_t size, const char *what,
               bool constants)
{
    *reader = (arl_json_reader_t){
        .text = text,
        .size = size,
        .what = what,
        .constants = constants,
        .expect = ARL_JSON_EXPECT_VALUE,
    };
}

arl_status_t
arl_json_next(arl_json_reader_t *reader, arl_json_token_t *token_p, arl_error_t *err)
{
    skip_space(reader);
    if (reader->at < reader->size && reader->expect == ARL_JSON_EXPECT_COMMA_OR_END &&
        reader->text[reader->at] == ',') {
        reader->at++;
        reader->expect = in_object(reader) ? ARL_JSON_EXPECT_KEY : ARL_JSON_EXPECT_VALUE;
        skip_space(reader);
    }
    *token_p = (arl_json_token_t){.kind = ARL_JSON_END, .begin = reader->at, .end = reader->at};
    if (reader->at >= reader->size) {
        return reader->expect == ARL_JSON_EXPECT_NOTHING
                   ? ARL_OK
                   : fail_here(reader, reader->at, expect_text(reader), err);
    }
    switch (reader->expect) {
    case ARL_JSON_EXPECT_VALUE_OR_END:
        if (reader->text[reader->at] == ']') {
            return read_close(reader, token_p);
        }
        return read_value(reader, token_p, err);
    case ARL_JSON_EXPECT_VALUE:
        return read_value(reader, token_p, err);
    case ARL_JSON_EXPECT_KEY_OR_END:
        if (reader->text[reader->at] == '}') {
            return read_close(reader, token_p);
        }
        break;
    case ARL_JSON_EXPECT_KEY:
        break;
    case ARL_JSON_EXPECT_COMMA_OR_END:
        if (reader->text[reader->at] == (in_object(reader) ? '}' : ']')) {
            return read_close(reader, token_p);
        }
        return fail_here(reader, reader->at, expect_text(reader), err);
    case ARL_JSON_EXPECT_NOTHING:
        return fail_here(reader, reader->at, expect_text(reader), err);
    }
    if (reader->text[reader->at] != '"') {
        return fail_here(reader, reader->at, expect_text(reader), err);
    }
    return read_key(reader, token_p, err);
}

arl_status_t
arl_json_take(arl_json_reader_t *reader, arl_json_kind_t kind, const char *role,
              arl_json_token_t *token_p, arl_error_t *err)
{
    arl_status_t status = arl_json_next(reader, token_p, err);

    if (status == ARL_OK && token_p->kind != kind) {
        return arl_error_set(err, ARL_ERR_WIRE, operation_name,
                             "%s: byte %zu: %s must be %s, found %s", reader->what, token_p->begin,
                             role, arl_json_kind_name(kind), arl_json_kind_name(token_p->kind));
    }
    return status;
}

arl_status_t
arl_json_skip(arl_json_reader_t *reader, const arl_json_token_t *token, arl_error_t *err)
{
    arl_json_token_t next;
    int outside = reader->depth - 1; /* the depth that an open container returns to */

    if (token->kind != ARL_JSON_ARRAY && token->kind != ARL_JSON_OBJECT) {
        return ARL_OK;
    }
    while (reader->depth > outside) {
        arl_status_t status = arl_json_next(reader, &next, err);

        if (status != ARL_OK) {
            return status;
        }
    }
    return ARL_OK;
}

/* ---- values ------------------------------------------------------------------------------- */

bool
arl_json_int64(const arl_json_reader_t *reader, const arl_json_token_t *token, int64_t *value_p)
{
    const bool negative = reader->text[token->begin] == '-';
    const size_t first = token->begin + (negative ? 1 : 0);
    const uint64_t limit = (uint64_t)INT64_MAX + (negative ? 1 : 0);
    uint64_t value = 0;

    if (token->end - first > 19) { /* INT64_MAX has 19 digits, and any 19 fit in 64 bits */
        return false;
    }
    for (size_t at = first; at < token->end; at++) {
        value = value * 10 + (uint64_t)(reader->text[at] - '0');
    }
    if (value > limit) {
        return false;
    }
    *value_p = (int64_t)(negative ? 0 - value : value);
    return true;
}

static size_t
put_utf8(char *out, uint32_t code)
{
    if (code < 0x80) {
        out[0] = (char)code;
        return 1;
    }
    if (code < 0x800) {
        out[0] = (char)(0xc0 | code >> 6);
        out[1] = (char)(0x80 | (code & 0x3f));
        return 2;
    }
    if (code < 0x10000) {
        out[0] = (char)(0xe0 | code >> 12);
        out[1] = (char)(0x80 | (code >> 6 & 0x3f));
        out[2] = (char)(0x80 | (code & 0x3f));
        return 3;
    }
    out[0] = (char)(0xf0 | code >> 18);
    out[1] = (char)(0x80 | (code >> 12 & 0x3f));
    out[2] = (char)(0x80 | (code >> 6 & 0x3f));
    out[3] = (char)(0x80 | (code & 0x3f));
    return 4;
}

static char
simple_escape(char c)
{
    switch (c) {
    case 'b':
        return '\b';
    case 'f':
        return '\f';
    case 'n':
        return '\n';
    case 'r':
        return '\r';
    case 't':
        return '\t';
    default:
        return c; /* quote, backslash, slash */
    }
}

/* Code point of the \u escape at `at`; moves past it, and past the second half of a pair. */
static uint32_t
read_unicode_escape(const char *text, size_t *at_p, size_t end)
{
    size_t at = *at_p;
    uint32_t code = (uint32_t)hex4(text + at + 2);

    at += 6;
    if (code >= 0xd800 && code < 0xdc00 && end - at >= 6 && text[at] == '\\' &&
        text[at + 1] == 'u') {
        uint32_t low = (uint32_t)hex4(text + at + 2);

        if (low >= 0xdc00 && low < 0xe000) {
            code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
            at += 6;
        }
    }
    *at_p = at;
    return code;
}

size_t
arl_json_unescape(const arl_json_reader_t *reader, const arl_json_token_t *token, char *out,
                  bool *surrogates_p)
{
    const char *text = reader->text;
    size_t at = token->begin, size = 0;

    *surrogates_p = false;
    while (at < token->end) {
        const char *stop = token->escaped ? memchr(text + at, '\\', token->end - at) : NULL;
        size_t run = stop == NULL ? token->end - at : (size_t)(stop - (text + at));

        memcpy(out + size, text + at, run);
        size += run;
        at += run;
        if (at >= token->end) {
            break;
        }
        if (text[at + 1] == 'u') {
            uint32_t code = read_unicode_escape(text, &at, token->end);

            *surrogates_p = *surrogates_p || (code >= 0xd800 && code < 0xe000);
            size += put_utf8(out + size, code);
        }
        else {
            out[size++] = simple_escape(text[at + 1]);
            at += 2;
        }
    }
    return size;
}

bool
arl_json_equals(const arl_json_reader_t *reader, const arl_json_token_t *token, const char *literal)
{
    size_t raw = token->end - token->begin, length = strlen(literal);
    char plain[64 * 6]; /* every byte of a literal of 63 bytes written as \uXXXX */
    bool surrogates;

    if (!token->escaped) {
        return raw == length && memcmp(reader->text + token->begin, literal, length) == 0;
    }
    if (raw > sizeof(plain)) {
        return false;
    }
    return arl_json_unescape(reader, token, plain, &surrogates) == length &&
           memcmp(plain, literal, length) == 0;
}

/* ---- writing ------------------------------------------------------------------------------ */

static void
put_escape(arl_text_t *text, unsigned char c)
{
    static const char digits[] = "0123456789abcdef";
    static const char named[] = "btn?fr"; /* 8, 9, 10, (11), 12, 13 */
    char escape[6] = {'\\', 'u', '0', '0', digits[c >> 4], digits[c & 15]};

    if (c == '"' || c == '\\') {
        escape[1] = (char)c;
        arl_text_put(text, escape, 2);
    }
    else if (c >= 8 && c <= 13 && c != 11) {
        escape[1] = named[c - 8];
        arl_text_put(text, escape, 2);
    }
    else {
        arl_text_put(text, escape, sizeof(escape));
    }
}

void
arl_json_put_char(arl_text_t *text, char c)
{
    if ((unsigned char)c < 0x20 || c == '"' || c == '\\') {
        put_escape(text, (unsigned char)c);
    }
    else {
        arl_text_put_char(text, c);
    }
}

void
arl_json_put_string(arl_text_t *text, const char *utf8, size_t size)
{
    size_t at = 0;

    arl_text_put_char(text, '"');
    while (at < size) {
        size_t begin = at;

        while (size - at >= 8 && plain8(utf8 + at)) {
            at += 8;
        }
        while (at < size && (unsigned char)utf8[at] >= 0x20 && utf8[at] != '"' &&
               utf8[at] != '\\') {
            at++;
        }
        arl_text_put(text, utf8 + begin, at - begin);
        if (at < size) {
            put_escape(text, (unsigned char)utf8[at]);
            at++;
        }
    }
    arl_text_put_char(text, '"');
}

/* ---- UTF-8 -------------------------------------------------------------------------------- */

/* Length of the valid sequence at `text`, which is not ASCII; 0 when it is not valid. */
static size_t
utf8_sequence(const unsigned char *text, size_t left)
{
    unsigned char lead = text[0], low = 0x80, high = 0xbf;
    size_t length;

    if (lead < 0xc2 || lead > 0xf4) {
        return 0; /* a continuation, an overlong form, or past U+10FFFF */
    }
    length = lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : 4;
    if (left < length) {
        return 0;
    }
    /* The second byte's range shuts out overlong forms, surrogates and too large numbers. */
    if (lead == 0xe0) {
        low = 0xa0;
    }
    else if (lead == 0xed) {
        high = 0x9f;
    }
    else if (lead == 0xf0) {
        low = 0x90;
    }
    else if (lead == 0xf4) {
        high = 0x8f;
    }
    if (text[1] < low || text[1] > high) {
        return 0;
    }
    for (size_t i = 2; i < length; i++) {
        if (text[i] < 0x80 || text[i] > 0xbf) {
            return 0;
        }
    }
    return length;
}

bool
arl_utf8_valid(const char *text, size_t size)
{
    size_t at = 0;

    while (at < size) {
        uint64_t word;
        size_t length;

        if (size - at >= sizeof(word)) {
            memcpy(&word, text + at, sizeof(word));
            if ((word & 0x8080808080808080u) == 0) {
                at += sizeof(word);
                continue;
            }
        }
        if ((unsigned char)text[at] < 0x80) {
            at++;
            continue;
        }
        length = utf8_sequence((const unsigned char *)text + at, size - at);
        if (length == 0) {
            return false;
        }
        at += length;
    }
    return true;
}
