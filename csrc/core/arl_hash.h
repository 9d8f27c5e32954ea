/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARL_CORE_HASH_H
#define ARL_CORE_HASH_H

#include "core/arl_view.h"

/*
 * Three hashes, one for each purpose. None of them resists an attacker: offers come from the
 * same user over the user's own RPC, and the hashes are there for accidents.
 */

/* CRC-32C (Castagnoli), continued from `crc`; 0 to begin. Guards the bytes of an offer. */
uint32_t arl_crc32c(uint32_t crc, const void *bytes, size_t size);

/* A well-mixed 64-bit value of 64 bits (a bijection). */
static inline uint64_t
arl_hash_mix(uint64_t x)
{
    x ^= x >> 30;
    x *= UINT64_C(0xbf58476d1ce4e5b9);
    x ^= x >> 27;
    x *= UINT64_C(0x94d049bb133111eb);
    return x ^ (x >> 31);
}

/* Continues `seed` with some bytes. For names and layouts. */
uint64_t arl_hash_bytes(uint64_t seed, const void *bytes, size_t size);

/*
 * The checksum of a tensor's elements, laid out densely in row-major order and cut into
 * little-endian 64-bit words w[0], w[1], … (the last one filled up with zero bytes):
 *
 *     mix(nbytes + sum over i of mix(w[i] ^ (i + 1) * 0x9e3779b97f4a7c15))      modulo 2^64
 *
 * The terms are added up, so they can be computed in any order, by any number of threads or
 * thread blocks; each knows its place, so exchanged words change the sum. A CUDA kernel needs
 * three multiplications and one atomic add a block.
 */
static inline uint64_t
arl_checksum_term(uint64_t word, uint64_t index)
{
    return arl_hash_mix(word ^ (index + 1) * UINT64_C(0x9e3779b97f4a7c15));
}

static inline uint64_t
arl_checksum_finish(uint64_t sum, uint64_t nbytes)
{
    return arl_hash_mix(nbytes + sum);
}

/* The checksum of a tensor in host memory, of any strides. Splits over threads when large. */
uint64_t arl_checksum_view(const arl_view_t *view);

#endif
