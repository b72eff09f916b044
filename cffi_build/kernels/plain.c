/* The loops in plain C, for any processor. */

#include "path.h"

#define TARGET
#define PATH plain
#include "loops.h"

static float as_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static uint32_t as_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static void widen_float16(float *to, const void *from, size_t length) {
    typedef uint16_t UNALIGNED half;
    const half *in = from;
    for (size_t i = 0; i < length; i++) {
        uint32_t sign = (uint32_t)(in[i] & 0x8000) << 16;
        uint32_t rest = (uint32_t)(in[i] & 0x7FFF) << 13;
        uint32_t exponent = rest & 0x0F800000;
        uint32_t normal = rest + ((127 - 15) << 23);
        /* Infinity and NaN go to the top exponent. */
        uint32_t special = rest + ((255 - 31) << 23);
        /* Subnormal: put the fraction under an exponent where one unit is 2^-24, take that off. */
        uint32_t tiny = as_bits(as_float(rest | (113 << 23)) - as_float(113 << 23));
        uint32_t wide = exponent == 0x0F800000 ? special : exponent == 0 ? tiny : normal;
        to[i] = as_float(sign | wide);
    }
}

static void round_float16(void *to, const float *from, size_t length) {
    typedef uint16_t UNALIGNED half;
    half *out = to;
    for (size_t i = 0; i < length; i++) {
        uint32_t x = as_bits(from[i]);
        uint32_t sign = (x >> 16) & 0x8000;
        x &= 0x7FFFFFFF;
        /* A carry out of the fraction raises the exponent, as it must, up to infinity. */
        uint32_t normal = (x - ((127 - 15) << 23) + 0xFFF + ((x >> 13) & 1)) >> 13;
        /* Subnormal: adding 0.5 leaves units of 2^-24, which the addition rounds to. */
        uint32_t tiny = as_bits(as_float(x) + 0.5f) - as_bits(0.5f);
        uint32_t result = x > 0x7F800000    ? 0x7E00
                          : x >= 0x47800000 ? 0x7C00
                          : x < 0x38800000  ? tiny
                                            : normal;
        out[i] = (uint16_t)(sign | result);
    }
}

static void copy(void *out, const void *in, size_t bytes) { memcpy(out, in, bytes); }

const struct path p2pdpt_plain = {
    .arithmetic = ARITHMETIC_TABLE,
    .bfloat16 = {plain_widen_bfloat16, plain_round_bfloat16},
    .float16 = {widen_float16, round_float16},
    .copy = copy,
    .stream = NULL,
};
