/* One compiled version of every loop, as tables; kernels.c cuts folds into blocks and calls them.
 * All loops take any alignment, any length, and `out` equal to one of the inputs. */

#ifndef P2PDPT_PATH_H
#define P2PDPT_PATH_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "kernels.h"

enum { TYPES = 9, COMBINES = 5, MOST_INPUTS = 4 };

typedef void fold_loop(void *out, const void *const *in, size_t length);

struct arithmetic {
    /* [combine][inputs], for 2 to MOST_INPUTS inputs. */
    fold_loop *fold[COMBINES][MOST_INPUTS + 1];
    /* out = in * (wide)scale */
    void (*scale)(void *out, const void *in, double scale, size_t length);
    /* out = out / (wide)divisor; NULL for integers */
    void (*divide)(void *out, double divisor, size_t length);
};

struct half {
    void (*widen)(float *out, const void *in, size_t length);
    void (*round)(void *out, const float *in, size_t length);
};

struct path {
    /* By P2PDPT_FLOAT32, ...; both half types have float32's. */
    struct arithmetic arithmetic[TYPES];
    struct half bfloat16, float16;
    void (*copy)(void *out, const void *in, size_t bytes);
    /* As copy, past the caches; NULL where there is no such instruction. */
    void (*stream)(void *out, const void *in, size_t bytes);
};

extern const struct path p2pdpt_plain;
#if defined(__x86_64__) && defined(__GNUC__)
#define P2PDPT_HAS_AVX2 1
extern const struct path p2pdpt_avx2;
#endif

#if defined(__clang__)
#define INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#elif defined(__GNUC__)
/* `out` may equal an input: without this the vectorised loop would be left for a scalar one. */
#define INDEPENDENT _Pragma("GCC ivdep")
#else
#define INDEPENDENT
#endif

#if defined(__GNUC__)
/* Slices of a bucket start anywhere, and all types share memory. */
#define UNALIGNED __attribute__((aligned(1), may_alias))
#else
#define UNALIGNED
#endif

#endif
