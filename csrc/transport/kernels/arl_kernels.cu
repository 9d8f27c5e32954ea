/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The device code: copy segments, copy strided arrays, sum arrays. make_ptx.py turns it into
 * cuda_kernels_ptx.h, which is what ships; no build runs nvcc.
 *
 * It is written in the part of CUDA that is also C, and no thread waits for another, so that the
 * tests' fake driver can run this very text on the CPU, one thread of the grid after the other.
 * What differs between the two is in the macros that start with ARL_K_.
 */
#include "../cuda_kernels.h"

#ifdef __CUDACC__
#    define ARL_K_ENTRY extern "C" __global__ void
#    define ARL_K_INLINE static __device__ __forceinline__
#    define ARL_K_UNROLL _Pragma("unroll")
#    define ARL_K_ROLLED _Pragma("unroll 1")
typedef ulonglong2 arl_k_v16_t;
/* Read and written once: past the L1 cache, and first to leave the L2. */
#    define ARL_K_LOAD(pointer) __ldcs(pointer)
#    define ARL_K_STORE(pointer, value) __stcs(pointer, value)
#    define ARL_K_ADD(pointer, value) atomicAdd(pointer, value)

/* The sum over the threads of a warp, in its first lane. All 32 lanes must come here together. */
ARL_K_INLINE arl_k_u64
arl_k_warp_sum(arl_k_u64 value)
{
    for (int distance = 16; distance > 0; distance >>= 1) {
        value += __shfl_down_sync(0xffffffffU, value, distance);
    }
    return value;
}
#    define ARL_K_IS_FIRST_LANE ((threadIdx.x & 31) == 0)
#endif

enum { ARL_K_UNROLLED = 8 };

/* ---- segments ------------------------------------------------------------------------------- */

/* Items of a type that both addresses are aligned to. Several loads are under way before the
 * first store, which is what keeps the memory busy. */
#define ARL_K_COPY_ALIGNED(type)                                                                   \
    {                                                                                              \
        const arl_k_u32 count = nbytes / (arl_k_u32)sizeof(type);                                  \
        const arl_k_u32 step = blockDim.x;                                                         \
        const type *from = (const type *)src;                                                      \
        type *to = (type *)dst;                                                                    \
        arl_k_u32 i = threadIdx.x;                                                                 \
                                                                                                   \
        for (; i + (ARL_K_UNROLLED - 1) * step < count; i += ARL_K_UNROLLED * step) {              \
            type held[ARL_K_UNROLLED];                                                             \
                                                                                                   \
            ARL_K_UNROLL                                                                           \
            for (int u = 0; u < ARL_K_UNROLLED; u++) {                                             \
                held[u] = ARL_K_LOAD(from + i + u * step);                                         \
            }                                                                                      \
            ARL_K_UNROLL                                                                           \
            for (int u = 0; u < ARL_K_UNROLLED; u++) {                                             \
                ARL_K_STORE(to + i + u * step, held[u]);                                           \
            }                                                                                      \
        }                                                                                          \
        ARL_K_ROLLED                                                                               \
        for (; i < count; i += step) {                                                             \
            ARL_K_STORE(to + i, ARL_K_LOAD(from + i));                                             \
        }                                                                                          \
    }

ARL_K_INLINE void
arl_k_copy_bytes(arl_k_u64 dst, arl_k_u64 src, arl_k_u32 nbytes)
{
    ARL_K_ROLLED
    for (arl_k_u32 i = threadIdx.x; i < nbytes; i += blockDim.x) {
        ((unsigned char *)dst)[i] = ((const unsigned char *)src)[i];
    }
}

/* One run, by the whole block. The widest items that both addresses can be brought to by the
 * same step; what is left at the two ends goes byte by byte. */
ARL_K_INLINE void
arl_k_copy_run(arl_k_u64 dst, arl_k_u64 src, arl_k_u32 nbytes)
{
    const arl_k_u32 differ = (arl_k_u32)(dst ^ src) & 15;
    const arl_k_u32 width = differ == 0          ? 16
                            : (differ & 7) == 0  ? 8
                            : (differ & 3) == 0  ? 4
                            : (differ & 1) == 0  ? 2
                                                 : 1;
    arl_k_u32 head = (arl_k_u32)(0 - dst) & (width - 1);
    arl_k_u32 tail;

    if (head > nbytes) {
        head = nbytes;
    }
    arl_k_copy_bytes(dst, src, head);
    dst += head;
    src += head;
    nbytes -= head;
    tail = nbytes & (width - 1);
    nbytes -= tail;
    switch (width) {
    case 16:
        ARL_K_COPY_ALIGNED(arl_k_v16_t)
        break;
    case 8:
        ARL_K_COPY_ALIGNED(arl_k_u64)
        break;
    case 4:
        ARL_K_COPY_ALIGNED(arl_k_u32)
        break;
    case 2:
        ARL_K_COPY_ALIGNED(unsigned short)
        break;
    default:
        ARL_K_COPY_ALIGNED(unsigned char)
        break;
    }
    arl_k_copy_bytes(dst + nbytes, src + nbytes, tail);
}

ARL_K_ENTRY
arl_copy_segments(const arl_k_segment_t *segments, const arl_k_u64 *bases, arl_k_u32 count)
{
    for (arl_k_u32 s = blockIdx.x; s < count; s += gridDim.x) {
        const arl_k_segment_t segment = segments[s];

        arl_k_copy_run(segment.dst, bases[segment.base] + segment.src_offset, segment.nbytes);
    }
}

/* ---- strided -------------------------------------------------------------------------------- */

#define ARL_K_COPY_UNITS(type)                                                                     \
    ARL_K_ROLLED                                                                                   \
    for (arl_k_u32 i = threadIdx.x; i < item.count; i += blockDim.x) {                             \
        arl_k_u32 rest = (arl_k_u32)item.first + i;                                                \
        const arl_k_u32 inner = rest % entry->row_units;                                           \
        arl_k_i64 from = (arl_k_i64)inner * (arl_k_i64)sizeof(type);                               \
        arl_k_i64 to = from;                                                                       \
                                                                                                   \
        rest /= entry->row_units;                                                                  \
        ARL_K_ROLLED                                                                               \
        for (int d = (int)entry->ndim - 1; d >= 0; d--) {                                          \
            const arl_k_u32 index = rest % entry->count[d];                                        \
                                                                                                   \
            rest /= entry->count[d];                                                               \
            from += (arl_k_i64)index * entry->src_stride[d];                                       \
            to += (arl_k_i64)index * entry->dst_stride[d];                                         \
        }                                                                                          \
        *(type *)(dst + (arl_k_u64)to) = *(const type *)(src + (arl_k_u64)from);                   \
    }

ARL_K_ENTRY
arl_copy_strided(const arl_k_strided_t *entries, const arl_k_item_t *items, const arl_k_u64 *bases,
                 arl_k_u32 count)
{
    for (arl_k_u32 n = blockIdx.x; n < count; n += gridDim.x) {
        const arl_k_item_t item = items[n];
        const arl_k_strided_t *entry = entries + item.entry;
        const arl_k_u64 src = bases[entry->base] + entry->src_offset;
        const arl_k_u64 dst = entry->dst;

        switch (entry->unit) {
        case 16:
            ARL_K_COPY_UNITS(arl_k_v16_t)
            break;
        case 8:
            ARL_K_COPY_UNITS(arl_k_u64)
            break;
        case 4:
            ARL_K_COPY_UNITS(arl_k_u32)
            break;
        case 2:
            ARL_K_COPY_UNITS(unsigned short)
            break;
        default:
            ARL_K_COPY_UNITS(unsigned char)
            break;
        }
    }
}

/* ---- checksum ------------------------------------------------------------------------------- */

/* arl_hash_mix and arl_checksum_term of core/arl_hash.h. */
ARL_K_INLINE arl_k_u64
arl_k_term(arl_k_u64 word, arl_k_u64 index)
{
    arl_k_u64 x = word ^ (index + 1) * 0x9e3779b97f4a7c15ULL;

    x ^= x >> 30;
    x *= 0xbf58476d1ce4e5b9ULL;
    x ^= x >> 27;
    x *= 0x94d049bb133111ebULL;
    return x ^ (x >> 31);
}

/* Byte number `at` of a strided array, in row-major order. */
ARL_K_INLINE arl_k_u64
arl_k_byte(const arl_k_array_t *array, arl_k_u64 at)
{
    arl_k_u64 rest = at / array->itemsize;
    arl_k_i64 offset = (arl_k_i64)(at % array->itemsize);

    ARL_K_ROLLED
    for (int d = (int)array->ndim - 1; d >= 0; d--) {
        offset += (arl_k_i64)(rest % array->count[d]) * array->stride[d];
        rest /= array->count[d];
    }
    return *(const unsigned char *)(array->data + (arl_k_u64)offset);
}

/* Word number `index`, filled up with zero bytes past the end. */
ARL_K_INLINE arl_k_u64
arl_k_word(const arl_k_array_t *array, arl_k_u64 index)
{
    const arl_k_u64 begin = index * 8;
    arl_k_u64 word = 0;

    if (array->dense && begin + 8 <= array->nbytes && (array->data & 7) == 0) {
        return ARL_K_LOAD((const arl_k_u64 *)array->data + index);
    }
    ARL_K_ROLLED
    for (arl_k_u32 i = 0; i < 8 && begin + i < array->nbytes; i++) {
        const arl_k_u64 byte = array->dense ? *(const unsigned char *)(array->data + begin + i)
                                            : arl_k_byte(array, begin + i);

        word |= byte << (8 * i);
    }
    return word;
}

/* Adds the terms of each item to sums[item.entry]. Launched with whole warps. */
ARL_K_ENTRY
arl_checksum(const arl_k_array_t *arrays, const arl_k_item_t *items, arl_k_u64 *sums,
             arl_k_u32 count)
{
    for (arl_k_u32 n = blockIdx.x; n < count; n += gridDim.x) {
        const arl_k_item_t item = items[n];
        const arl_k_array_t *array = arrays + item.entry;
        arl_k_u64 sum = 0;

        for (arl_k_u32 i = threadIdx.x; i < item.count; i += blockDim.x) {
            sum += arl_k_term(arl_k_word(array, item.first + i), item.first + i);
        }
        sum = arl_k_warp_sum(sum);
        if (ARL_K_IS_FIRST_LANE && sum != 0) {
            ARL_K_ADD(sums + item.entry, sum);
        }
    }
}
