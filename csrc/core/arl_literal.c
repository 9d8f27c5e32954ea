/* SPDX-License-Identifier: Apache-2.0 */
#include "core/arl_literal.h"

#include <ctype.h>
#include <locale.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { DIGITS_MAX = 4300 /* Python's own limit for turning text into an int */ };

/* ---- recognising ------------------------------------------------------------------------
 * Each matcher takes a position and returns the one after what it matched, or NULL. Text in the
 * tree is always terminated, and '\0' matches nothing, so none of them can run over the end.
 */

static const char *
skip_sign(const char *p)
{
    return *p == '+' || *p == '-' ? p + 1 : p;
}

static bool
is_digit(char c)
{
    return c >= '0' && c <= '9';
}

/* One or more of `set`. */
static const char *
some_of(const char *p, const char *set)
{
    size_t count = strspn(p, set);

    return count > 0 ? p + count : NULL;
}

/* digits(_digits)*: underscores only between digits. */
static const char *
strict_digits(const char *p)
{
    p = some_of(p, "0123456789");
    while (p != NULL && p[0] == '_' && is_digit(p[1])) {
        p = some_of(p + 1, "0123456789");
    }
    return p;
}

/* One or more of :[0-5]?[0-9]. */
static const char *
base_60_groups(const char *p)
{
    const char *end = NULL;

    while (*p == ':' && is_digit(p[1])) {
        p += p[1] <= '5' && is_digit(p[2]) ? 3 : 2;
        end = p;
    }
    return end;
}

/* [eE][+-]digits, or with the sign optional. Nothing at all matches too. */
static const char *
exponent(const char *p, bool sign_optional)
{
    const char *end;

    if (*p != 'e' && *p != 'E') {
        return p;
    }
    end = p + 1;
    if (*end == '+' || *end == '-') {
        end++;
    }
    else if (!sign_optional) {
        return p;
    }
    end = some_of(end, "0123456789");
    return end == NULL ? p : end;
}

typedef enum int_form {
    INT_NONE,
    INT_DECIMAL,
    INT_BINARY,
    INT_OCTAL,
    INT_HEX,
    INT_BASE_60,
} int_form_t;

static int_form_t
int_form(const char *text, const char *end)
{
    const char *p = skip_sign(text), *q;

    if (p[0] == '0' && p[1] == 'b' && some_of(p + 2, "01_") == end) {
        return INT_BINARY;
    }
    if (p[0] == '0' && p[1] == 'x' && some_of(p + 2, "0123456789abcdefABCDEF_") == end) {
        return INT_HEX;
    }
    if (p[0] == '0') {
        return p + 1 == end                         ? INT_DECIMAL
               : some_of(p + 1, "01234567_") == end ? INT_OCTAL
                                                    : INT_NONE;
    }
    if (!is_digit(p[0])) {
        return INT_NONE;
    }
    q = some_of(p, "0123456789_");
    if (q == end) {
        return INT_DECIMAL;
    }
    return base_60_groups(q) == end ? INT_BASE_60 : INT_NONE;
}

static bool
is_float(const char *text, const char *end)
{
    const char *p = skip_sign(text), *loose, *strict, *groups, *after;

    if (strcmp(p, ".inf") == 0 || strcmp(p, ".Inf") == 0 || strcmp(p, ".INF") == 0) {
        return true;
    }
    if (*text == '.') { /* a fraction alone takes no sign, and its exponent needs one */
        if (strcmp(text, ".nan") == 0 || strcmp(text, ".NaN") == 0 || strcmp(text, ".NAN") == 0) {
            return true;
        }
        return is_digit(text[1]) && exponent(some_of(text + 1, "0123456789_"), false) == end;
    }
    if (!is_digit(*p)) {
        return false;
    }
    strict = strict_digits(p);
    loose = some_of(p, "0123456789_");
    if (strict[0] != '.' && exponent(strict, true) == end && strict != end) {
        return true;
    }
    groups = base_60_groups(loose);
    after = groups != NULL ? groups : loose;
    if (*after != '.') {
        return false;
    }
    after += 1 + strspn(after + 1, "0123456789_");
    if (after == end) {
        return true;
    }
    return groups == NULL && exponent(after, loose == strict) == end;
}

static bool
is_one_of(const char *text, const char *const *words)
{
    for (; *words != NULL; words++) {
        if (strcmp(text, *words) == 0) {
            return true;
        }
    }
    return false;
}

/* ---- reading ---------------------------------------------------------------------------- */

static locale_t
c_locale(void)
{
    static locale_t locale; /* glibc and musl hand out one static object for "C" */

    if (locale == (locale_t)0) {
        locale = newlocale(LC_ALL_MASK, "C", (locale_t)0);
    }
    return locale;
}

static double
parse_double(const char *text)
{
    return strtod_l(text, NULL, c_locale());
}

/* Digits of radix `base` to int64, or to a BIGINT when they do not fit. */
static arl_status_t
read_digits(arl_tree_t *tree, arl_node_t *node, const char *digits, int base, bool negative,
            arl_error_t *err)
{
    int64_t value = 0;
    bool fits = true;
    arl_string_t text;
    arl_status_t status;
    char *sign;

    for (const char *p = digits; *p != '\0' && fits; p++) {
        int digit = is_digit(*p) ? *p - '0' : tolower((unsigned char)*p) - 'a' + 10;

        fits = !__builtin_mul_overflow(value, (int64_t)base, &value) &&
               !__builtin_sub_overflow(value, (int64_t)digit, &value); /* min has the larger half */
    }
    if (fits && (negative || value != INT64_MIN)) {
        node->kind = ARL_NODE_INT;
        node->as.integer = negative ? value : -value;
        return ARL_OK;
    }
    if (strlen(digits) > DIGITS_MAX) {
        return arl_tree_fail_at(tree, node, err, "an integer of %zu digits; at most %d are read",
                                strlen(digits), DIGITS_MAX);
    }
    status = arl_tree_text(tree, digits, strlen(digits) + (negative ? 1 : 0), &text, err);
    if (status != ARL_OK) {
        return status;
    }
    if (negative) {
        sign = (char *)text.data;
        memmove(sign + 1, digits, strlen(digits));
        sign[0] = '-';
    }
    node->kind = ARL_NODE_BIGINT;
    node->base = (uint8_t)base;
    node->as.text = text;
    return ARL_OK;
}

/* a:b:c, each part below 60 but the first. */
static arl_status_t
read_base_60(arl_tree_t *tree, arl_node_t *node, char *digits, bool negative, arl_error_t *err)
{
    int64_t value = 0, part;
    char *p = digits;

    for (;;) {
        for (part = 0; is_digit(*p); p++) {
            if (__builtin_mul_overflow(part, (int64_t)10, &part) ||
                __builtin_add_overflow(part, (int64_t)(*p - '0'), &part)) {
                goto too_large;
            }
        }
        if (__builtin_mul_overflow(value, (int64_t)60, &value) ||
            __builtin_add_overflow(value, part, &value)) {
            goto too_large;
        }
        if (*p == '\0') {
            node->kind = ARL_NODE_INT;
            node->as.integer = negative ? -value : value;
            return ARL_OK;
        }
        p++;
    }
too_large:
    return arl_tree_fail_at(tree, node, err, "the base-60 number %.40s is too large", digits);
}

static arl_status_t
read_int(arl_tree_t *tree, arl_node_t *node, int_form_t form, char *digits, bool negative,
         arl_error_t *err)
{
    int base = form == INT_BINARY ? 2 : form == INT_OCTAL ? 8 : form == INT_HEX ? 16 : 10;

    if (form == INT_BASE_60) {
        return read_base_60(tree, node, digits, negative, err);
    }
    if (form == INT_BINARY || form == INT_HEX) {
        digits += 2;
        if (*digits == '\0') {
            return arl_tree_fail_at(tree, node, err, "a number with a prefix but no digits");
        }
    }
    return read_digits(tree, node, digits, base, negative, err);
}

static double
read_double(const char *digits, bool negative)
{
    const char *colon = strchr(digits, ':');
    double value = 0.0, scale = 1.0;

    if (strcasecmp(digits, ".nan") == 0) {
        return (double)NAN;
    }
    if (strcasecmp(digits, ".inf") == 0) {
        return negative ? -HUGE_VAL : HUGE_VAL;
    }
    if (colon == NULL) {
        value = parse_double(digits);
    }
    else { /* from the right, as the sum is not associative */
        for (const char *p = digits + strlen(digits);; p--) {
            if (p == digits || p[-1] == ':') {
                value += parse_double(p) * scale;
                scale *= 60.0;
            }
            if (p == digits) {
                break;
            }
        }
    }
    return negative ? -value : value;
}

/* A number whose form is known. Its text is ours alone, and is used up. */
static arl_status_t
read_number(arl_tree_t *tree, arl_node_t *node, const arl_string_t *text, bool floating,
            int_form_t form, arl_error_t *err)
{
    bool negative = text->data[0] == '-';
    char *digits = (char *)text->data;
    size_t used = 0;

    for (const char *p = skip_sign(text->data); *p != '\0'; p++) {
        if (*p != '_') {
            digits[used++] = *p;
        }
    }
    digits[used] = '\0';
    if (floating) {
        node->kind = ARL_NODE_FLOAT;
        node->as.real = read_double(digits, negative);
        return ARL_OK;
    }
    return read_int(tree, node, form, digits, negative, err);
}

arl_status_t
arl_literal_read(arl_tree_t *tree, const char *data, size_t size, arl_node_t *node,
                 arl_error_t *err)
{
    static const char *const nulls[] = {"", "~", "null", "Null", "NULL", NULL};
    static const char *const trues[] = {"yes",  "Yes", "YES", "true", "True",
                                        "TRUE", "on",  "On",  "ON",   NULL};
    static const char *const falses[] = {"no",    "No",  "NO",  "false", "False",
                                         "FALSE", "off", "Off", "OFF",   NULL};
    arl_status_t status;
    arl_string_t text;
    int_form_t form;
    bool floating;

    status = arl_tree_text(tree, data, size, &text, err);
    if (status != ARL_OK) {
        return status;
    }
    node->kind = ARL_NODE_TEXT;
    node->as.text = text;
    if (strlen(text.data) != size) { /* holds '\0' */
        return ARL_OK;
    }
    if (is_one_of(text.data, nulls)) {
        node->kind = ARL_NODE_NULL;
        node->as.integer = 0;
        return ARL_OK;
    }
    if (is_one_of(text.data, trues) || is_one_of(text.data, falses)) {
        node->kind = ARL_NODE_BOOL;
        node->as.boolean = is_one_of(text.data, trues);
        return ARL_OK;
    }
    floating = is_float(text.data, text.data + size);
    form = floating ? INT_NONE : int_form(text.data, text.data + size);
    if (!floating && form == INT_NONE) {
        return ARL_OK;
    }
    return read_number(tree, node, &text, floating, form, err);
}

/* ---- words of expressions -------------------------------------------------------------- */

/* 0, or digits that do not begin with 0. */
static const char *
unsigned_int(const char *p)
{
    return *p == '0' ? p + 1 : strict_digits(p);
}

static bool
is_float_word(const char *p, const char *end)
{
    const char *whole = unsigned_int(p), *after = whole == NULL ? p : whole;

    if (strcasecmp(p, "inf") == 0 || strcasecmp(p, "nan") == 0) {
        return true;
    }
    if (*after == '.') {
        const char *fraction = strict_digits(after + 1);

        if (fraction == NULL && whole == NULL) {
            return false;
        }
        after = fraction == NULL ? after + 1 : fraction;
        if (after == end) {
            return true;
        }
    }
    if (after == p || (*after != 'e' && *after != 'E')) {
        return false;
    }
    return strict_digits(skip_sign(after + 1)) == end;
}

arl_status_t
arl_literal_read_word(arl_tree_t *tree, const char *data, size_t size, arl_node_t *node,
                      arl_error_t *err)
{
    const char *unsign;
    arl_status_t status;
    arl_string_t text;
    bool floating;

    status = arl_tree_text(tree, data, size, &text, err);
    if (status != ARL_OK) {
        return status;
    }
    node->kind = ARL_NODE_TEXT;
    node->as.text = text;
    if (strlen(text.data) != size) {
        return ARL_OK;
    }
    if (strcasecmp(text.data, "null") == 0) {
        node->kind = ARL_NODE_NULL;
        node->as.integer = 0;
        return ARL_OK;
    }
    if (strcasecmp(text.data, "true") == 0 || strcasecmp(text.data, "false") == 0) {
        node->kind = ARL_NODE_BOOL;
        node->as.boolean = strcasecmp(text.data, "true") == 0;
        return ARL_OK;
    }
    unsign = skip_sign(text.data);
    floating = is_float_word(unsign, text.data + size);
    if (!floating && unsigned_int(unsign) != text.data + size) {
        return ARL_OK;
    }
    return read_number(tree, node, &text, floating, INT_DECIMAL, err);
}

/* ---- writing ---------------------------------------------------------------------------- */

/* repr(float): the fewest digits that read back the same, 1e16 and up and below 1e-4 with an
 * exponent. `out` holds 32 bytes. */
static void
format_double(double value, char *out)
{
    char digits[40], *e;
    int exponent10, count;
    locale_t previous;

    if (isnan(value) || isinf(value)) {
        strcpy(out, isnan(value) ? "nan" : value < 0 ? "-inf" : "inf");
        return;
    }
    previous = uselocale(c_locale());
    for (int precision = 0; precision < 17; precision++) {
        (void)snprintf(digits, sizeof(digits), "%.*e", precision, value);
        if (strtod(digits, NULL) == value) {
            break;
        }
        /* Just below a power of two doubles lie closer, so its nearest decimal of this length may
         * belong to the neighbour there while the next one up is still its own. */
        e = strchr(digits, 'e');
        if (e[-1] < '9' && precision > 0) {
            e[-1]++;
            if (strtod(digits, NULL) == value) {
                break;
            }
        }
    }
    e = strchr(digits, 'e');
    exponent10 = atoi(e + 1);
    count = (int)(e - digits) - (digits[0] == '-') - (strchr(digits, '.') != NULL);
    if (exponent10 < -4 || exponent10 >= 16) {
        (void)snprintf(out, 32, "%.24s", digits); /* 1e-06: the exponent as Python has it */
    }
    else {
        int decimals = count - 1 - exponent10;

        (void)snprintf(out, 32, "%.*f", decimals > 1 ? decimals : 1, strtod(digits, NULL));
    }
    (void)uselocale(previous);
}

bool
arl_literal_format(const arl_node_t *node, char *out, size_t size)
{
    char number[32] = "";
    const char *text = number;
    size_t length;

    switch (node->kind) {
    case ARL_NODE_NULL:
        text = "None";
        break;
    case ARL_NODE_BOOL:
        text = node->as.boolean ? "True" : "False";
        break;
    case ARL_NODE_INT:
        (void)snprintf(number, sizeof(number), "%lld", (long long)node->as.integer);
        break;
    case ARL_NODE_FLOAT:
        format_double(node->as.real, number);
        break;
    case ARL_NODE_TEXT:
    case ARL_NODE_BIGINT:
        text = node->as.text.data;
        break;
    case ARL_NODE_LIST:
    case ARL_NODE_MAP:
    case ARL_NODE_FOREIGN:
        text = arl_node_kind_name(node);
        break;
    }
    length = strlen(text);
    if (length < size) {
        memcpy(out, text, length + 1);
        return true;
    }
    if (size > 0) {
        memcpy(out, text, size - 1);
        out[size - 1] = '\0';
    }
    return false;
}
