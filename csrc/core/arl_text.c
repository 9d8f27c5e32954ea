/* SPDX-License-Identifier: Apache-2.0 */
#include "core/arl_text.h"

#include <stdlib.h>
#include <string.h>

bool
arl_text_reserve(arl_text_t *text, size_t extra)
{
    size_t wanted, capacity;
    char *data;

    if (text->failed) {
        return false;
    }
    if (extra <= text->capacity - text->size) {
        return true;
    }
    if (__builtin_add_overflow(text->size, extra, &wanted)) {
        text->failed = true;
        return false;
    }
    capacity = text->capacity < 256 ? 256 : text->capacity + text->capacity / 2;
    if (capacity < wanted) {
        capacity = wanted;
    }
    data = realloc(text->data, capacity);
    if (data == NULL) {
        text->failed = true;
        return false;
    }
    text->data = data;
    text->capacity = capacity;
    return true;
}

void
arl_text_put(arl_text_t *text, const void *bytes, size_t size)
{
    if (size > 0 && arl_text_reserve(text, size)) {
        memcpy(text->data + text->size, bytes, size);
        text->size += size;
    }
}

void
arl_text_put_char(arl_text_t *text, char c)
{
    if (arl_text_reserve(text, 1)) {
        text->data[text->size++] = c;
    }
}

void
arl_text_put_string(arl_text_t *text, const char *string)
{
    arl_text_put(text, string, strlen(string));
}

void
arl_text_put_int64(arl_text_t *text, int64_t value)
{
    char digits[20]; /* INT64_MIN has 19 digits and a sign */
    size_t at = sizeof(digits);
    uint64_t rest = value < 0 ? 0 - (uint64_t)value : (uint64_t)value;

    do {
        digits[--at] = (char)('0' + rest % 10);
        rest /= 10;
    } while (rest > 0);
    if (value < 0) {
        digits[--at] = '-';
    }
    arl_text_put(text, digits + at, sizeof(digits) - at);
}

arl_status_t
arl_text_status(const arl_text_t *text, const char *operation, arl_error_t *err)
{
    if (text->failed) {
        return arl_error_set(err, ARL_ERR_NOMEM, operation, "out of memory after %zu bytes of text",
                             text->size);
    }
    return ARL_OK;
}

void
arl_text_free(arl_text_t *text)
{
    free(text->data);
    *text = (arl_text_t){0};
}
