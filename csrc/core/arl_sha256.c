/* SPDX-License-Identifier: Apache-2.0 */
#include "core/arl_sha256.h"

#include <stdbool.h>
#include <string.h>

#if defined(__x86_64__)
#    define ARL_SHA256_X86 1
#    include <cpuid.h>
#    include <immintrin.h>
#else
#    define ARL_SHA256_X86 0
#endif

typedef void (*blocks_fn)(uint32_t state[8], const unsigned char *data, size_t blocks);

static const uint32_t round_constants[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
};

/* ---- portable ------------------------------------------------------------------------------ */

static uint32_t
rotate_right(uint32_t value, int bits)
{
    return value >> bits | value << (32 - bits);
}

static uint32_t
read_big_endian(const unsigned char *data)
{
    return (uint32_t)data[0] << 24 | (uint32_t)data[1] << 16 | (uint32_t)data[2] << 8 | data[3];
}

static void
expand_message(uint32_t words[64], const unsigned char *data)
{
    for (int i = 0; i < 16; i++) {
        words[i] = read_big_endian(data + 4 * i);
    }
    for (int i = 16; i < 64; i++) {
        uint32_t early = words[i - 15], late = words[i - 2];

        words[i] = words[i - 16] + words[i - 7] +
                   (rotate_right(early, 7) ^ rotate_right(early, 18) ^ early >> 3) +
                   (rotate_right(late, 17) ^ rotate_right(late, 19) ^ late >> 10);
    }
}

/* One round. The eight values keep their places; it is their names that move on. */
static void
round_portable(uint32_t v[8], int shift, uint32_t word)
{
    const uint32_t a = v[(0 - shift) & 7], b = v[(1 - shift) & 7], c = v[(2 - shift) & 7];
    const uint32_t e = v[(4 - shift) & 7], f = v[(5 - shift) & 7], g = v[(6 - shift) & 7];
    uint32_t *d = &v[(3 - shift) & 7], *h = &v[(7 - shift) & 7];
    const uint32_t first = *h + word + ((e & f) ^ (~e & g)) +
                           (rotate_right(e, 6) ^ rotate_right(e, 11) ^ rotate_right(e, 25));

    *d += first;
    *h = first + ((a & b) ^ (a & c) ^ (b & c)) +
         (rotate_right(a, 2) ^ rotate_right(a, 13) ^ rotate_right(a, 22));
}

static void
blocks_portable(uint32_t state[8], const unsigned char *data, size_t blocks)
{
    uint32_t words[64];

    for (; blocks > 0; blocks--, data += ARL_SHA256_BLOCK) {
        uint32_t v[8];

        expand_message(words, data);
        memcpy(v, state, sizeof(v));
        for (int i = 0; i < 64; i += 8) {
            for (int shift = 0; shift < 8; shift++) { /* unrolled: the indices are constants */
                round_portable(v, shift, round_constants[i + shift] + words[i + shift]);
            }
        }
        for (int i = 0; i < 8; i++) {
            state[i] += v[i];
        }
    }
}

/* ---- x86 SHA instructions ------------------------------------------------------------------ */

#if ARL_SHA256_X86

/* Four rounds: `words` are w[4 * group] and the next three. */
#    define ARL_SHA256_ROUNDS(group, words)                                                        \
        do {                                                                                       \
            __m128i sum = _mm_add_epi32(                                                           \
                words, _mm_loadu_si128((const __m128i *)(round_constants + 4 * (group))));         \
            cdgh = _mm_sha256rnds2_epu32(cdgh, abef, sum);                                         \
            abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(sum, 0x0e));                \
        } while (0)

/* The state as the instructions want it: {a, b, e, f} and {c, d, g, h}, high word first. */
__attribute__((target("sha,sse4.1,ssse3"))) static void
blocks_x86(uint32_t state[8], const unsigned char *data, size_t blocks)
{
    const __m128i swap = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
    __m128i dcba = _mm_loadu_si128((const __m128i *)state);
    __m128i hgfe = _mm_loadu_si128((const __m128i *)(state + 4));
    __m128i cdab = _mm_shuffle_epi32(dcba, 0xb1), efgh = _mm_shuffle_epi32(hgfe, 0x1b);
    __m128i abef = _mm_alignr_epi8(cdab, efgh, 8), cdgh = _mm_blend_epi16(efgh, cdab, 0xf0);

    for (; blocks > 0; blocks--, data += ARL_SHA256_BLOCK) {
        const __m128i abef_before = abef, cdgh_before = cdgh;
        __m128i w[4];

        for (int i = 0; i < 4; i++) {
            w[i] = _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)(data + 16 * i)), swap);
            ARL_SHA256_ROUNDS(i, w[i]);
        }
        for (int i = 4; i < 16; i++) {
            const __m128i last = w[(i + 3) & 3], before = w[(i + 2) & 3];
            __m128i next = _mm_sha256msg1_epu32(w[i & 3], w[(i + 1) & 3]);

            next = _mm_add_epi32(next, _mm_alignr_epi8(last, before, 4));
            w[i & 3] = _mm_sha256msg2_epu32(next, last);
            ARL_SHA256_ROUNDS(i, w[i & 3]);
        }
        abef = _mm_add_epi32(abef, abef_before);
        cdgh = _mm_add_epi32(cdgh, cdgh_before);
    }
    efgh = _mm_shuffle_epi32(abef, 0x1b); /* {f, e, b, a} backwards: the low half is a, b's */
    cdab = _mm_shuffle_epi32(cdgh, 0xb1);
    _mm_storeu_si128((__m128i *)state, _mm_blend_epi16(efgh, cdab, 0xf0));
    _mm_storeu_si128((__m128i *)(state + 4), _mm_alignr_epi8(cdab, efgh, 8));
}

static bool
processor_has_sha(void)
{
    unsigned int eax, ebx, ecx, edx;

    if (!__get_cpuid_count(1, 0, &eax, &ebx, &ecx, &edx) || (ecx & bit_SSE4_1) == 0 ||
        (ecx & bit_SSSE3) == 0) {
        return false;
    }
    return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) && (ebx & bit_SHA) != 0;
}

#endif

static blocks_fn
choose_blocks(void)
{
#if ARL_SHA256_X86
    if (processor_has_sha()) {
        return blocks_x86;
    }
#endif
    return blocks_portable;
}

/* ---- streaming ----------------------------------------------------------------------------- */

void
arl_sha256_start(arl_sha256_t *sha)
{
    static const uint32_t initial[8] = {
        0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
        0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19,
    };

    memcpy(sha->state, initial, sizeof(sha->state));
    sha->total = 0;
}

static void
update_with(arl_sha256_t *sha, const unsigned char *data, size_t size, blocks_fn blocks)
{
    size_t held = (size_t)(sha->total % ARL_SHA256_BLOCK);

    sha->total += size;
    if (held > 0) {
        size_t room = ARL_SHA256_BLOCK - held, taken = size < room ? size : room;

        memcpy(sha->block + held, data, taken);
        data += taken;
        size -= taken;
        if (held + taken < ARL_SHA256_BLOCK) {
            return;
        }
        blocks(sha->state, sha->block, 1);
    }
    blocks(sha->state, data, size / ARL_SHA256_BLOCK);
    memcpy(sha->block, data + size / ARL_SHA256_BLOCK * ARL_SHA256_BLOCK, size % ARL_SHA256_BLOCK);
}

static void
finish_with(arl_sha256_t *sha, unsigned char digest[ARL_SHA256_SIZE], blocks_fn blocks)
{
    unsigned char tail[ARL_SHA256_BLOCK + 8] = {0x80};
    size_t held = (size_t)(sha->total % ARL_SHA256_BLOCK);
    size_t zeros = (held < 56 ? 56 : 120) - held; /* the bit count ends a block */
    uint64_t bits = sha->total * 8;

    for (size_t i = 0; i < 8; i++) {
        tail[zeros + i] = (unsigned char)(bits >> (56 - 8 * i));
    }
    update_with(sha, tail, zeros + 8, blocks);
    for (size_t i = 0; i < ARL_SHA256_SIZE; i++) {
        digest[i] = (unsigned char)(sha->state[i / 4] >> (24 - 8 * (i % 4)));
    }
}

void
arl_sha256_update(arl_sha256_t *sha, const void *data, size_t size)
{
    if (size > 0) { /* data may be NULL then */
        update_with(sha, data, size, choose_blocks());
    }
}

void
arl_sha256_finish(arl_sha256_t *sha, unsigned char digest[ARL_SHA256_SIZE])
{
    finish_with(sha, digest, choose_blocks());
}

static void
hex_with(const void *data, size_t size, char hex[ARL_SHA256_HEX], blocks_fn blocks)
{
    static const char digits[] = "0123456789abcdef";
    unsigned char digest[ARL_SHA256_SIZE];
    arl_sha256_t sha;

    arl_sha256_start(&sha);
    if (size > 0) {
        update_with(&sha, data, size, blocks);
    }
    finish_with(&sha, digest, blocks);
    for (size_t i = 0; i < ARL_SHA256_SIZE; i++) {
        hex[2 * i] = digits[digest[i] >> 4];
        hex[2 * i + 1] = digits[digest[i] & 15];
    }
}

void
arl_sha256_hex(const void *data, size_t size, char hex[ARL_SHA256_HEX])
{
    hex_with(data, size, hex, choose_blocks());
}

void
arl_sha256_hex_portable(const void *data, size_t size, char hex[ARL_SHA256_HEX])
{
    hex_with(data, size, hex, blocks_portable);
}
