/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARL_CORE_SCALAR_H
#define ARL_CORE_SCALAR_H

#include "core/arl_dtype.h"

/*
 * One number written as one element, in the machine's byte order; what a pad value becomes. Each
 * returns false, writing nothing, when the dtype cannot hold the value: an integer out of range, a
 * float that would overflow to infinity, infinity or NaN where there is none, a number of another
 * kind. Floats round to nearest even. `out` has room for 16 bytes.
 */

/* bool and the integers; the second for values above INT64_MAX. */
bool arl_scalar_from_int64(arl_dtype_t dtype, int64_t value, unsigned char *out);
bool arl_scalar_from_uint64(arl_dtype_t dtype, uint64_t value, unsigned char *out);

/* Floats and complex numbers. */
bool arl_scalar_from_double(arl_dtype_t dtype, double value, unsigned char *out);
bool arl_scalar_from_complex(arl_dtype_t dtype, double real, double imaginary, unsigned char *out);

#endif
