/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARL_CORE_SHA256_H
#define ARL_CORE_SHA256_H

#include <stddef.h>
#include <stdint.h>

/* SHA-256 (FIPS 180-4). Uses the processor's SHA instructions where it has them. */

enum { ARL_SHA256_SIZE = 32, ARL_SHA256_BLOCK = 64, ARL_SHA256_HEX = 64 };

typedef struct arl_sha256 {
    uint32_t state[8];
    uint64_t total; /* bytes taken so far */
    unsigned char block[ARL_SHA256_BLOCK];
} arl_sha256_t;

void arl_sha256_start(arl_sha256_t *sha);
void arl_sha256_update(arl_sha256_t *sha, const void *data, size_t size);
void arl_sha256_finish(arl_sha256_t *sha, unsigned char digest[ARL_SHA256_SIZE]);

/* Lower-case hex of the digest of `size` bytes, not terminated. */
void arl_sha256_hex(const void *data, size_t size, char hex[ARL_SHA256_HEX]);

/* The same without the processor's instructions, for tests that compare the two. */
void arl_sha256_hex_portable(const void *data, size_t size, char hex[ARL_SHA256_HEX]);

#endif
