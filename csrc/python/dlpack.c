/* SPDX-License-Identifier: Apache-2.0 */
#include "python/dlpack.h"

/* Our dtype, DLPack type code (dmlc/dlpack, DLDataTypeCode), bits. */
static const struct {
    arl_dtype_t dtype;
    uint8_t code;
    uint8_t bits;
} dlpack_table[] = {
    {ARL_DTYPE_I8, 0, 8},       {ARL_DTYPE_I16, 0, 16},     {ARL_DTYPE_I32, 0, 32},
    {ARL_DTYPE_I64, 0, 64},     {ARL_DTYPE_U8, 1, 8},       {ARL_DTYPE_U16, 1, 16},
    {ARL_DTYPE_U32, 1, 32},     {ARL_DTYPE_U64, 1, 64},     {ARL_DTYPE_F16, 2, 16},
    {ARL_DTYPE_F32, 2, 32},     {ARL_DTYPE_F64, 2, 64},     {ARL_DTYPE_BF16, 4, 16},
    {ARL_DTYPE_C64, 5, 64},     {ARL_DTYPE_C128, 5, 128},   {ARL_DTYPE_BOOL, 6, 8},
    {ARL_DTYPE_F8_E4M3, 10, 8}, {ARL_DTYPE_F8_E5M2, 12, 8}, {ARL_DTYPE_F8_E8M0, 14, 8},
};

enum { DLPACK_ROWS = sizeof(dlpack_table) / sizeof(dlpack_table[0]) };

arl_dtype_t
arl_dlpack_dtype(arl_dl_dtype_t dtype)
{
    for (int i = 0; i < DLPACK_ROWS && dtype.lanes == 1; i++) {
        if (dlpack_table[i].code == dtype.code && dlpack_table[i].bits == dtype.bits) {
            return dlpack_table[i].dtype;
        }
    }
    return ARL_DTYPE_NONE;
}

arl_dl_dtype_t
arl_dlpack_from_dtype(arl_dtype_t dtype)
{
    for (int i = 0; i < DLPACK_ROWS; i++) {
        if (dlpack_table[i].dtype == dtype) {
            return (arl_dl_dtype_t){dlpack_table[i].code, dlpack_table[i].bits, 1};
        }
    }
    return (arl_dl_dtype_t){0, 0, 0};
}
