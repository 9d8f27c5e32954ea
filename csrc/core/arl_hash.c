/* SPDX-License-Identifier: Apache-2.0 */
#include "core/arl_hash.h"

#include "core/arl_threads.h"

#include <string.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#    error "the words of a checksum are little-endian; this host is not"
#endif

/* ---- CRC-32C -------------------------------------------------------------------------------- */

static uint32_t
crc32c_portable(uint32_t crc, const unsigned char *bytes, size_t size)
{
    /* The nibble table of the reflected polynomial 0x82f63b78: small, and an offer is too. */
    static const uint32_t table[16] = {
        0x00000000, 0x105ec76f, 0x20bd8ede, 0x30e349b1, 0x417b1dbc, 0x5125dad3,
        0x61c69362, 0x7198540d, 0x82f63b78, 0x92a8fc17, 0xa24bb5a6, 0xb21572c9,
        0xc38d26c4, 0xd3d3e1ab, 0xe330a81a, 0xf36e6f75,
    };

    for (size_t i = 0; i < size; i++) {
        crc = table[(crc ^ bytes[i]) & 15] ^ (crc >> 4);
        crc = table[(crc ^ (bytes[i] >> 4)) & 15] ^ (crc >> 4);
    }
    return crc;
}

#if defined(__x86_64__)
__attribute__((target("sse4.2"))) static uint32_t
crc32c_sse42(uint32_t crc, const unsigned char *bytes, size_t size)
{
    uint64_t wide = crc;

    for (; size >= 8; bytes += 8, size -= 8) {
        uint64_t word;

        memcpy(&word, bytes, sizeof(word));
        wide = __builtin_ia32_crc32di(wide, word);
    }
    crc = (uint32_t)wide;
    for (; size > 0; bytes++, size--) {
        crc = __builtin_ia32_crc32qi(crc, *bytes);
    }
    return crc;
}
#endif

uint32_t
arl_crc32c(uint32_t crc, const void *bytes, size_t size)
{
#if defined(__x86_64__)
    if (__builtin_cpu_supports("sse4.2")) {
        return ~crc32c_sse42(~crc, bytes, size);
    }
#endif
    return ~crc32c_portable(~crc, bytes, size);
}

/* ---- names and layouts ---------------------------------------------------------------------- */

/*
 * A round is a bijection of the hash for a given word, so nothing that went in is lost; turning by
 * half brings what the product has in its upper bits, the mixed ones, down to where the next one
 * spreads it. One multiplication a word: offers of a few hundred names are made and read in every
 * sync, with the GPU idle.
 */
static inline uint64_t
hash_round(uint64_t hash, uint64_t word)
{
    hash ^= word;
    return (hash << 32 | hash >> 32) * UINT64_C(0x9e3779b97f4a7c15);
}

uint64_t
arl_hash_bytes(uint64_t seed, const void *bytes, size_t size)
{
    const unsigned char *at = bytes;
    uint64_t hash = seed ^ (uint64_t)size * UINT64_C(0x9e3779b97f4a7c15);
    uint64_t word;

    for (; size >= 8; at += 8, size -= 8) {
        memcpy(&word, at, sizeof(word));
        hash = hash_round(hash, word);
    }
    word = 0;
    if (size > 0) {
        memcpy(&word, at, size);
    }
    return arl_hash_mix(hash_round(hash, word));
}

/* ---- checksums ------------------------------------------------------------------------------ */

/* Dense bytes that begin at word `index`. */
static uint64_t
sum_dense(const char *bytes, size_t size, uint64_t index)
{
    uint64_t sum = 0, word;

    for (; size >= sizeof(word); bytes += sizeof(word), size -= sizeof(word)) {
        memcpy(&word, bytes, sizeof(word));
        sum += arl_checksum_term(word, index++);
    }
    if (size > 0) {
        word = 0;
        memcpy(&word, bytes, size);
        sum += arl_checksum_term(word, index);
    }
    return sum;
}

typedef struct sum_job {
    const arl_view_t *view;
    int64_t nbytes;
    bool dense;
    uint64_t sum; /* added to atomically */
} sum_job_t;

enum { BLOCK_BYTES = 4096 }; /* a multiple of the word and of every item size */

/* Gathers elements [first, first + count) of a strided view, in row-major order. */
static void
gather(const arl_view_t *view, int64_t first, int64_t count, char *out)
{
    int64_t index[ARL_VIEW_DIMS_MAX] = {0};
    const char *at = view->data;
    const int last = view->ndim - 1; /* a view with strides that matter has dimensions */

    for (int i = last; i >= 0; i--) {
        index[i] = first % view->shape[i];
        first /= view->shape[i];
        at += index[i] * view->strides[i];
    }
    while (count-- > 0) {
        int i = last;

        memcpy(out, at, view->itemsize);
        out += view->itemsize;
        at += view->strides[i];
        while (++index[i] == view->shape[i] && i > 0) {
            at -= view->shape[i] * view->strides[i];
            index[i] = 0;
            i--;
            at += view->strides[i];
        }
    }
}

static void
sum_blocks(void *context, int64_t begin, int64_t end)
{
    sum_job_t *job = context;
    const int64_t item = (int64_t)job->view->itemsize;
    const int64_t low = begin * BLOCK_BYTES;
    const int64_t high = end > job->nbytes / BLOCK_BYTES ? job->nbytes : end * BLOCK_BYTES;
    uint64_t sum = 0;

    if (job->dense) {
        sum = sum_dense((const char *)job->view->data + low, (size_t)(high - low),
                        (uint64_t)low / sizeof(uint64_t));
    }
    else {
        char block[BLOCK_BYTES];

        for (int64_t at = low; at < high; at += BLOCK_BYTES) {
            const int64_t size = high - at < BLOCK_BYTES ? high - at : BLOCK_BYTES;

            gather(job->view, at / item, size / item, block);
            sum += sum_dense(block, (size_t)size, (uint64_t)at / sizeof(uint64_t));
        }
    }
    (void)__atomic_fetch_add(&job->sum, sum, __ATOMIC_RELAXED);
}

uint64_t
arl_checksum_view(const arl_view_t *view)
{
    sum_job_t job = {.view = view, .nbytes = arl_view_nbytes(view)};
    const int64_t blocks = job.nbytes / BLOCK_BYTES + (job.nbytes % BLOCK_BYTES != 0);

    job.dense = arl_view_contiguous(view);
    if (blocks > 0) {
        arl_parallel_for(blocks, job.nbytes, sum_blocks, &job);
    }
    return arl_checksum_finish(job.sum, (uint64_t)job.nbytes);
}
