/* The loops for x86-64 processors with AVX2 and F16C. */

#include "path.h"

#ifdef P2PDPT_HAS_AVX2

#include <immintrin.h>

#define TARGET __attribute__((target("avx2,f16c")))
#define PATH avx2
#include "loops.h"

TARGET static void widen_float16(float *to, const void *from, size_t length) {
    typedef uint16_t UNALIGNED half;
    const half *in = from;
    size_t i = 0;
    for (; i + 8 <= length; i += 8)
        _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(in + i))));
    for (; i < length; i++) to[i] = _cvtsh_ss(in[i]);
}

TARGET static void round_float16(void *to, const float *from, size_t length) {
    typedef uint16_t UNALIGNED half;
    half *out = to;
    size_t i = 0;
    for (; i + 8 <= length; i += 8)
        _mm_storeu_si128((__m128i *)(out + i),
                         _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
    for (; i < length; i++) out[i] = _cvtss_sh(from[i], _MM_FROUND_TO_NEAREST_INT);
}

/* memcpy of glibc slows down to a tenth where the two addresses differ by little modulo 4096;
 * this loop does not. */
TARGET static void copy(void *to, const void *from, size_t bytes) {
    char *out = to;
    const char *in = from;
    for (; bytes >= 128; bytes -= 128, in += 128, out += 128) {
        __m256i a = _mm256_loadu_si256((const __m256i *)in);
        __m256i b = _mm256_loadu_si256((const __m256i *)(in + 32));
        __m256i c = _mm256_loadu_si256((const __m256i *)(in + 64));
        __m256i d = _mm256_loadu_si256((const __m256i *)(in + 96));
        _mm256_storeu_si256((__m256i *)out, a);
        _mm256_storeu_si256((__m256i *)(out + 32), b);
        _mm256_storeu_si256((__m256i *)(out + 64), c);
        _mm256_storeu_si256((__m256i *)(out + 96), d);
    }
    for (; bytes >= 32; bytes -= 32, in += 32, out += 32)
        _mm256_storeu_si256((__m256i *)out, _mm256_loadu_si256((const __m256i *)in));
    memcpy(out, in, bytes);
}

TARGET static void stream(void *to, const void *from, size_t bytes) {
    size_t head = -(uintptr_t)to & 63;
    if (head > bytes) head = bytes;
    copy(to, from, head);
    char *out = (char *)to + head;
    const char *in = (const char *)from + head;
    bytes -= head;
    for (; bytes >= 64; bytes -= 64, in += 64, out += 64) {
        __m256i a = _mm256_loadu_si256((const __m256i *)in);
        __m256i b = _mm256_loadu_si256((const __m256i *)(in + 32));
        _mm256_stream_si256((__m256i *)out, a);
        _mm256_stream_si256((__m256i *)(out + 32), b);
    }
    copy(out, in, bytes);
}

const struct path p2pdpt_avx2 = {
    .arithmetic = ARITHMETIC_TABLE,
    .bfloat16 = {avx2_widen_bfloat16, avx2_round_bfloat16},
    .float16 = {widen_float16, round_float16},
    .copy = copy,
    .stream = stream,
};

#endif
