/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARL_CORE_TEXT_H
#define ARL_CORE_TEXT_H

#include "core/arl_status.h"

#include <stdbool.h>

/*
 * A growing string of bytes. Running out of memory is remembered instead of returned: the
 * later puts do nothing, and arl_text_status tells once, at the end. So code that writes many
 * small pieces needs one check. Zero-initialise; free at any time, also twice.
 */
typedef struct arl_text {
    char *data;
    size_t size;
    size_t capacity;
    bool failed;
} arl_text_t;

/* Makes room for `extra` bytes; false when there is none. */
bool arl_text_reserve(arl_text_t *text, size_t extra);

void arl_text_put(arl_text_t *text, const void *bytes, size_t size);
void arl_text_put_char(arl_text_t *text, char c);
void arl_text_put_string(arl_text_t *text, const char *string); /* without its terminator */
void arl_text_put_int64(arl_text_t *text, int64_t value);

/* ARL_OK, or ARL_ERR_NOMEM when any put failed. */
arl_status_t arl_text_status(const arl_text_t *text, const char *operation, arl_error_t *err);

void arl_text_free(arl_text_t *text);

#endif
