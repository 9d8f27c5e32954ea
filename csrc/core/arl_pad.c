/* SPDX-License-Identifier: Apache-2.0 */
#include "core/arl_pad.h"

#include "core/arl_threads.h"

#include <string.h>

/* ---- runs of elements ------------------------------------------------------------------------ */

/* An element repeated to a whole cache line; every item size divides it. */
typedef struct pattern {
    unsigned char bytes[64];
    bool uniform; /* all bytes equal: memset is the fastest fill there is */
} pattern_t;

static pattern_t
pattern_make(const unsigned char *element, size_t itemsize)
{
    pattern_t pattern = {.uniform = true};

    for (size_t i = 0; i < sizeof(pattern.bytes); i++) {
        pattern.bytes[i] = element[i % itemsize];
        pattern.uniform = pattern.uniform && pattern.bytes[i] == pattern.bytes[0];
    }
    return pattern;
}

static void
fill_run(char *out, size_t nbytes, const pattern_t *pattern)
{
    if (pattern->uniform) {
        memset(out, pattern->bytes[0], nbytes);
        return;
    }
    for (; nbytes >= sizeof(pattern->bytes); nbytes -= sizeof(pattern->bytes)) {
        memcpy(out, pattern->bytes, sizeof(pattern->bytes));
        out += sizeof(pattern->bytes);
    }
    memcpy(out, pattern->bytes, nbytes);
}

/* One loop per item size, so that the compiler sees a load and a store of known width. */
#define STRIDED_COPY(size)                                                                         \
    case (size):                                                                                   \
        for (int64_t i = 0; i < count; i++) {                                                      \
            memcpy(out + i * (size), in + i * stride, (size));                                     \
        }                                                                                          \
        break;

static void
copy_run(char *out, const char *in, int64_t stride, int64_t count, size_t itemsize)
{
    if (count <= 0) {
        return; /* `in` may be NULL then */
    }
    if (stride == (int64_t)itemsize) {
        memcpy(out, in, (size_t)count * itemsize);
        return;
    }
    switch (itemsize) {
        STRIDED_COPY(1)
        STRIDED_COPY(2)
        STRIDED_COPY(4)
        STRIDED_COPY(8)
        STRIDED_COPY(16)
    default:
        break; /* no dtype has another size */
    }
}

static int64_t
smaller(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* ---- jagged to padded ------------------------------------------------------------------------ */

static arl_status_t
pad_check_row(const arl_pad_job_t *job, int64_t row, const char *key, arl_error_t *err)
{
    const long long prompt = job->prompt_lengths[row], response = job->response_lengths[row];
    const long long length = job->input.lengths[row];

    if (prompt < 0 || response < 0) {
        return arl_error_set(err, ARL_ERR_PAYLOAD, "pad_prompt_response",
                             "%s: row %lld has a negative length (prompt %lld, response %lld)", key,
                             (long long)row, prompt, response);
    }
    if (prompt > length || response != length - prompt) {
        return arl_error_set(err, ARL_ERR_PAYLOAD, "pad_prompt_response",
                             "%s: row %lld has %lld elements, but its prompt has %lld and its "
                             "response %lld; the two lengths must add up to the row",
                             key, (long long)row, length, prompt, response);
    }
    if (job->truncate) {
        return ARL_OK;
    }
    if (prompt > job->prompt_width || response > job->response_width) {
        bool is_prompt = prompt > job->prompt_width;

        return arl_error_set(
            err, ARL_ERR_PAYLOAD, "pad_prompt_response",
            "%s: row %lld has a %s of length %lld, longer than the %s width %lld; raise the "
            "width, shorten the row, or ask for truncation",
            key, (long long)row, is_prompt ? "prompt" : "response", is_prompt ? prompt : response,
            is_prompt ? "prompt" : "response",
            (long long)(is_prompt ? job->prompt_width : job->response_width));
    }
    return ARL_OK;
}

arl_status_t
arl_pad_check(const arl_pad_job_t *job, const char *key, arl_error_t *err)
{
    int64_t width, nbytes;

    if (job->prompt_width < 0 || job->response_width < 0 ||
        __builtin_add_overflow(job->prompt_width, job->response_width, &width) ||
        __builtin_mul_overflow(width, job->input.rows, &nbytes) ||
        __builtin_mul_overflow(nbytes, (int64_t)job->input.itemsize, &nbytes)) {
        return arl_error_set(err, ARL_ERR_PAYLOAD, "pad_prompt_response",
                             "%s: widths %lld + %lld for %lld rows are negative or overflow", key,
                             (long long)job->prompt_width, (long long)job->response_width,
                             (long long)job->input.rows);
    }
    for (int64_t row = 0; row < job->input.rows; row++) {
        arl_status_t status = pad_check_row(job, row, key, err);

        if (status != ARL_OK) {
            return status;
        }
    }
    return ARL_OK;
}

typedef struct pad_context {
    const arl_pad_job_t *job;
    pattern_t pattern;
} pad_context_t;

static void
pad_rows(void *opaque, int64_t begin, int64_t end)
{
    const pad_context_t *context = opaque;
    const arl_pad_job_t *job = context->job;
    const arl_jagged_t *input = &job->input;
    const size_t itemsize = input->itemsize;
    const size_t prompt_bytes = (size_t)job->prompt_width * itemsize;
    const size_t row_bytes = prompt_bytes + (size_t)job->response_width * itemsize;

    for (int64_t row = begin; row < end; row++) {
        const int64_t prompt_length = job->prompt_lengths[row];
        const int64_t prompt = smaller(prompt_length, job->prompt_width);
        const int64_t response = smaller(job->response_lengths[row], job->response_width);
        /* From the first element kept; a cut prompt loses its start, so one run remains. */
        const char *in =
            input->values + (input->offsets[row] + prompt_length - prompt) * input->stride;
        char *out = job->out + (size_t)row * row_bytes;
        const size_t left = prompt_bytes - (size_t)prompt * itemsize;
        const size_t run = (size_t)(prompt + response) * itemsize;

        fill_run(out, left, &context->pattern);
        copy_run(out + left, in, input->stride, prompt + response, itemsize);
        fill_run(out + left + run, row_bytes - left - run, &context->pattern);
    }
}

void
arl_pad_run(const arl_pad_job_t *job)
{
    pad_context_t context = {job, pattern_make(job->fill, job->input.itemsize)};
    const int64_t nbytes =
        (job->prompt_width + job->response_width) * job->input.rows * (int64_t)job->input.itemsize;

    arl_parallel_for(nbytes > 0 ? job->input.rows : 0, nbytes, pad_rows, &context);
}

/* ---- dense to left-padded -------------------------------------------------------------------- */

static void
left_pad_rows(void *opaque, int64_t begin, int64_t end)
{
    const arl_left_pad_job_t *job = opaque;
    const arl_matrix_t *in = &job->in;
    const size_t left = (size_t)(job->width - in->width) * in->itemsize;
    const size_t row_bytes = (size_t)job->width * in->itemsize;

    for (int64_t row = begin; row < end; row++) {
        char *out = job->out + (size_t)row * row_bytes;

        memset(out, 0, left);
        copy_run(out + left, in->data + row * in->row_stride, in->col_stride, in->width,
                 in->itemsize);
    }
}

void
arl_left_pad_run(const arl_left_pad_job_t *job)
{
    const int64_t nbytes = job->width * job->in.rows * (int64_t)job->in.itemsize;

    arl_parallel_for(nbytes > 0 ? job->in.rows : 0, nbytes, left_pad_rows, (void *)job);
}

/* ---- padded to jagged ------------------------------------------------------------------------ */

arl_status_t
arl_unpad_check(const arl_unpad_job_t *job, const char *key, arl_error_t *err)
{
    for (int64_t row = 0; row < job->in.rows; row++) {
        const int64_t start = job->starts[row], length = job->lengths[row];

        if (start < 0 || length < 0 || start > job->in.width || length > job->in.width - start) {
            return arl_error_set(err, ARL_ERR_PAYLOAD, "make_jagged",
                                 "%s: row %lld spans columns [%lld, +%lld) of %lld", key,
                                 (long long)row, (long long)start, (long long)length,
                                 (long long)job->in.width);
        }
    }
    return ARL_OK;
}

static void
unpad_rows(void *opaque, int64_t begin, int64_t end)
{
    const arl_unpad_job_t *job = opaque;
    const arl_matrix_t *in = &job->in;

    for (int64_t row = begin; row < end; row++) {
        copy_run(job->out + job->offsets[row] * (int64_t)in->itemsize,
                 in->data + row * in->row_stride + job->starts[row] * in->col_stride,
                 in->col_stride, job->lengths[row], in->itemsize);
    }
}

void
arl_unpad_run(const arl_unpad_job_t *job)
{
    int64_t total = 0;

    for (int64_t row = 0; row < job->in.rows; row++) {
        total += job->lengths[row];
    }
    arl_parallel_for(job->in.rows, total * (int64_t)job->in.itemsize, unpad_rows, (void *)job);
}

/* ---- predict-next shift ---------------------------------------------------------------------- */

typedef struct shift_context {
    const char *in;
    int64_t stride;
    char *out;
    size_t itemsize;
} shift_context_t;

static void
shift_slots(void *opaque, int64_t begin, int64_t end)
{
    const shift_context_t *context = opaque;

    copy_run(context->out + begin * (int64_t)context->itemsize,
             context->in + (begin + 1) * context->stride, context->stride, end - begin,
             context->itemsize);
}

void
arl_shift_predict_next_run(const char *in, int64_t stride, char *out, size_t itemsize,
                           int64_t count)
{
    shift_context_t context = {in, stride, out, itemsize};

    if (count <= 0) {
        return;
    }
    arl_parallel_for(count - 1, (count - 1) * (int64_t)itemsize, shift_slots, &context);
    memset(out + (count - 1) * (int64_t)itemsize, 0, itemsize);
}
