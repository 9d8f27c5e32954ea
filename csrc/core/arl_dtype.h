/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARL_CORE_DTYPE_H
#define ARL_CORE_DTYPE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/*
 * Every fixed-width element type that a tensor may have. Columns: constant, number on the
 * wire (offers; never reused), item size in bytes, kind, torch and NumPy name (without
 * "torch."), DSSST1/safetensors name or NULL.
 * Kinds: b bool, i signed, u unsigned, f IEEE float, x other float, c complex.
 */
#define ARL_DTYPE_TABLE(X)                                                                         \
    X(BOOL, 1, 1, 'b', "bool", "BOOL")                                                             \
    X(U8, 2, 1, 'u', "uint8", "U8")                                                                \
    X(I8, 3, 1, 'i', "int8", "I8")                                                                 \
    X(U16, 4, 2, 'u', "uint16", "U16")                                                             \
    X(I16, 5, 2, 'i', "int16", "I16")                                                              \
    X(U32, 6, 4, 'u', "uint32", "U32")                                                             \
    X(I32, 7, 4, 'i', "int32", "I32")                                                              \
    X(U64, 8, 8, 'u', "uint64", "U64")                                                             \
    X(I64, 9, 8, 'i', "int64", "I64")                                                              \
    X(F16, 10, 2, 'f', "float16", "F16")                                                           \
    X(BF16, 11, 2, 'x', "bfloat16", "BF16")                                                        \
    X(F32, 12, 4, 'f', "float32", "F32")                                                           \
    X(F64, 13, 8, 'f', "float64", "F64")                                                           \
    X(F8_E4M3, 14, 1, 'x', "float8_e4m3fn", "F8_E4M3")                                             \
    X(F8_E5M2, 15, 1, 'x', "float8_e5m2", "F8_E5M2")                                               \
    X(C64, 16, 8, 'c', "complex64", NULL)                                                          \
    X(C128, 17, 16, 'c', "complex128", NULL)                                                       \
    X(F8_E8M0, 18, 1, 'x', "float8_e8m0fnu", "F8_E8M0")

typedef enum arl_dtype {
    ARL_DTYPE_NONE = 0,
#define ARL_DTYPE_ENUM(name, value, size, kind, text, wire) ARL_DTYPE_##name = (value),
    ARL_DTYPE_TABLE(ARL_DTYPE_ENUM)
#undef ARL_DTYPE_ENUM
        ARL_DTYPE_COUNT /* one past the largest number */
} arl_dtype_t;

/* Each of these accepts any number, also one that came from outside. */
bool arl_dtype_valid(int64_t number);
size_t arl_dtype_size(arl_dtype_t dtype);      /* 0 when invalid */
char arl_dtype_kind(arl_dtype_t dtype);        /* '?' when invalid */
const char *arl_dtype_name(arl_dtype_t dtype); /* "invalid" when invalid */
const char *arl_dtype_wire_name(arl_dtype_t dtype);
arl_dtype_t arl_dtype_from_name(const char *name);
arl_dtype_t arl_dtype_from_wire_name(const char *name, size_t length);

#endif
