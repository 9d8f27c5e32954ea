/* SPDX-License-Identifier: Apache-2.0 */
#include "core/arl_scalar.h"

#include <math.h>
#include <string.h>

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "elements are written low byte first");

/* A float format of at most 16 bits. */
typedef struct small_float {
    int exponent_bits;
    int mantissa_bits;
    bool has_infinity; /* else the largest exponent holds numbers too, and one NaN */
} small_float_t;

static const small_float_t format_f16 = {5, 10, true};
static const small_float_t format_bf16 = {8, 7, true};
static const small_float_t format_e5m2 = {5, 2, true};
static const small_float_t format_e4m3 = {4, 3, false};

static bool
encode_special(const small_float_t *format, double value, uint16_t sign, uint16_t *bits_p)
{
    const int all_ones = (1 << (format->exponent_bits + format->mantissa_bits)) - 1;
    const int infinity = all_ones & ~((1 << format->mantissa_bits) - 1);

    if (isnan(value)) {
        /* The quiet bit where there is an infinity to tell from, else the one NaN there is. */
        const int nan =
            format->has_infinity ? infinity | (1 << (format->mantissa_bits - 1)) : all_ones;

        *bits_p = (uint16_t)(sign | nan);
        return true;
    }
    *bits_p = (uint16_t)(sign | infinity);
    return format->has_infinity;
}

/* Scales so that the mantissa's last bit is 1, rounds there, and lets a carry run into the
 * exponent, where it belongs. */
static bool
encode_small(const small_float_t *format, double value, uint16_t *bits_p)
{
    const int bias = (1 << (format->exponent_bits - 1)) - 1;
    const int limit = (1 << (format->exponent_bits + format->mantissa_bits)) -
                      (format->has_infinity ? 1 << format->mantissa_bits : 1);
    const uint16_t sign =
        (uint16_t)((signbit(value) ? 1 : 0) << (format->exponent_bits + format->mantissa_bits));
    int exponent, bits;

    if (!isfinite(value)) {
        return encode_special(format, value, sign, bits_p);
    }
    value = fabs(value);
    (void)frexp(value, &exponent); /* value = m * 2^exponent, 0.5 <= m < 1 */
    exponent--;
    if (value == 0 || exponent < 1 - bias) {
        exponent = 1 - bias; /* zero and subnormals */
    }
    if (exponent > bias + 1) {
        return false;
    }
    bits = (int)nearbyint(ldexp(value, format->mantissa_bits - exponent));
    bits += (exponent + bias - 1) << format->mantissa_bits; /* the hidden bit adds the last 1 */
    if (bits >= limit) {
        return false;
    }
    *bits_p = (uint16_t)(sign | bits);
    return true;
}

/* E8M0: 2^(byte - 127), 255 for NaN; no sign, no zero, nothing between powers of two. */
static bool
encode_e8m0(double value, unsigned char *out)
{
    int exponent;

    if (isnan(value)) {
        *out = 255;
        return true;
    }
    if (!isfinite(value) || value <= 0 || frexp(value, &exponent) != 0.5 || exponent < -126 ||
        exponent > 128) {
        return false;
    }
    *out = (unsigned char)(exponent + 126);
    return true;
}

static bool
encode_f32(double value, unsigned char *out)
{
    const float narrow = (float)value;

    if (isfinite(value) && !isfinite(narrow)) {
        return false;
    }
    memcpy(out, &narrow, sizeof(narrow));
    return true;
}

bool
arl_scalar_from_double(arl_dtype_t dtype, double value, unsigned char *out)
{
    const small_float_t *format;
    uint16_t bits;

    switch (dtype) {
    case ARL_DTYPE_F64:
        memcpy(out, &value, sizeof(value));
        return true;
    case ARL_DTYPE_F32:
        return encode_f32(value, out);
    case ARL_DTYPE_C64:
    case ARL_DTYPE_C128:
        return arl_scalar_from_complex(dtype, value, 0.0, out);
    case ARL_DTYPE_F8_E8M0:
        return encode_e8m0(value, out);
    case ARL_DTYPE_F16:
        format = &format_f16;
        break;
    case ARL_DTYPE_BF16:
        format = &format_bf16;
        break;
    case ARL_DTYPE_F8_E5M2:
        format = &format_e5m2;
        break;
    case ARL_DTYPE_F8_E4M3:
        format = &format_e4m3;
        break;
    default:
        return false; /* an integer dtype: fractions have no place there */
    }
    if (!encode_small(format, value, &bits)) {
        return false;
    }
    memcpy(out, &bits, arl_dtype_size(dtype));
    return true;
}

bool
arl_scalar_from_complex(arl_dtype_t dtype, double real, double imaginary, unsigned char *out)
{
    unsigned char parts[16];

    if (dtype == ARL_DTYPE_C128) {
        memcpy(out, &real, sizeof(real));
        memcpy(out + sizeof(real), &imaginary, sizeof(imaginary));
        return true;
    }
    if (dtype != ARL_DTYPE_C64 || !encode_f32(real, parts) || !encode_f32(imaginary, parts + 4)) {
        return false;
    }
    memcpy(out, parts, 8);
    return true;
}

bool
arl_scalar_from_int64(arl_dtype_t dtype, int64_t value, unsigned char *out)
{
    const int bits = (int)arl_dtype_size(dtype) * 8;

    if (value >= 0) {
        return arl_scalar_from_uint64(dtype, (uint64_t)value, out);
    }
    if (arl_dtype_kind(dtype) != 'i' || value < INT64_MIN >> (64 - bits)) {
        return false;
    }
    memcpy(out, &value, arl_dtype_size(dtype));
    return true;
}

bool
arl_scalar_from_uint64(arl_dtype_t dtype, uint64_t value, unsigned char *out)
{
    const int bits = (int)arl_dtype_size(dtype) * 8;
    const char kind = arl_dtype_kind(dtype);
    const int room = kind == 'b' ? 1 : kind == 'i' ? bits - 1 : kind == 'u' ? bits : 0;

    if (room == 0 || value > UINT64_MAX >> (64 - room)) {
        return false;
    }
    memcpy(out, &value, arl_dtype_size(dtype));
    return true;
}
