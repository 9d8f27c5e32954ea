/* SPDX-License-Identifier: Apache-2.0 */
#include "core/arl_dtype.h"

#include <string.h>

static const struct dtype_info {
    size_t size;
    char kind;
    const char *name;
    const char *wire_name;
} dtype_table[ARL_DTYPE_COUNT] = {
#define ARL_DTYPE_ROW(constant, value, size, kind, name, wire) [value] = {size, kind, name, wire},
    ARL_DTYPE_TABLE(ARL_DTYPE_ROW)
#undef ARL_DTYPE_ROW
};

bool
arl_dtype_valid(int64_t number)
{
    return number > ARL_DTYPE_NONE && number < ARL_DTYPE_COUNT && dtype_table[number].size != 0;
}

size_t
arl_dtype_size(arl_dtype_t dtype)
{
    return arl_dtype_valid(dtype) ? dtype_table[dtype].size : 0;
}

char
arl_dtype_kind(arl_dtype_t dtype)
{
    return arl_dtype_valid(dtype) ? dtype_table[dtype].kind : '?';
}

const char *
arl_dtype_name(arl_dtype_t dtype)
{
    return arl_dtype_valid(dtype) ? dtype_table[dtype].name : "invalid";
}

const char *
arl_dtype_wire_name(arl_dtype_t dtype)
{
    return arl_dtype_valid(dtype) ? dtype_table[dtype].wire_name : NULL;
}

arl_dtype_t
arl_dtype_from_name(const char *name)
{
    for (int i = 1; i < ARL_DTYPE_COUNT; i++) {
        if (dtype_table[i].name != NULL && strcmp(dtype_table[i].name, name) == 0) {
            return (arl_dtype_t)i;
        }
    }
    return ARL_DTYPE_NONE;
}

arl_dtype_t
arl_dtype_from_wire_name(const char *name, size_t length)
{
    for (int i = 1; i < ARL_DTYPE_COUNT; i++) {
        const char *wire = dtype_table[i].wire_name;

        if (wire != NULL && strlen(wire) == length && memcmp(wire, name, length) == 0) {
            return (arl_dtype_t)i;
        }
    }
    return ARL_DTYPE_NONE;
}
