/* Folds and copies, cut into blocks that stay in the first-level cache.
 *
 * A source is prepared where needed (widened, then scaled) into a block of scratch; up to four
 * are folded at once; the sum is divided, and rounded where the result is half precision. A plain
 * fold of few sources needs none of this and is one loop over the whole length. */

#include "path.h"

#ifdef P2PDPT_HAS_AVX2
#include <cpuid.h>
#include <immintrin.h>
#endif

enum { BLOCK_BYTES = 4096 };

/* From here on, results written past the caches pay; they then go through a block. */
static const size_t STREAM_BYTES = (size_t)8 << 20;

struct fold {
    const struct path *path;
    const struct arithmetic *arithmetic;
    /* NULL unless the type is half precision. */
    const struct half *half;
    int dtype, combine, out_wide, divide, stream;
    char *out;
    const void *const *sources;
    const char *wide;
    const double *scales;
    /* Of the sources, those that are not skipped. */
    size_t count, active;
    /* Bytes of an element of `out`, and of the wide type. */
    size_t out_size, size;
    double divisor;
};

int p2pdpt_best_path(void) {
#ifdef P2PDPT_HAS_AVX2
    unsigned a, b, c = 0, d;
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C))
        return P2PDPT_AVX2;
#endif
    return P2PDPT_PLAIN;
}

static const struct path *path_of(int path) {
#ifdef P2PDPT_HAS_AVX2
    if (path == P2PDPT_AVX2) return &p2pdpt_avx2;
#endif
    (void)path;
    return &p2pdpt_plain;
}

static size_t wide_size(int dtype) {
    switch (dtype) {
        case P2PDPT_INT8:
        case P2PDPT_UINT8: return 1;
        case P2PDPT_INT16: return 2;
        case P2PDPT_FLOAT64:
        case P2PDPT_INT64: return 8;
        default: return 4;
    }
}

static int is_skipped(double scale, int dtype) {
    switch (dtype) {
        case P2PDPT_FLOAT64: return scale == 0;
        case P2PDPT_FLOAT32:
        case P2PDPT_BFLOAT16:
        case P2PDPT_FLOAT16: return (float)scale == 0;
        default: return (int64_t)scale == 0;
    }
}

static void copy_bytes(const struct path *path, void *out, const void *in, size_t bytes) {
    if (out == in) return;
    if (path->stream && bytes >= STREAM_BYTES) {
        path->stream(out, in, bytes);
#ifdef P2PDPT_HAS_AVX2
        _mm_sfence();
#endif
    } else {
        path->copy(out, in, bytes);
    }
}

/* Return the elements of source `index` in the wide type, scaled; `scratch` where that takes
 * memory. */
static const void *prepare(const struct fold *f, size_t index, size_t start, size_t length,
                           void *scratch) {
    int widen = f->half && !(f->wide && f->wide[index]);
    const void *in = (const char *)f->sources[index] + start * (widen ? 2 : f->size);
    if (widen) {
        f->half->widen(scratch, in, length);
        in = scratch;
    }
    if (f->scales && f->scales[index] != 1) {
        f->arithmetic->scale(scratch, in, f->scales[index], length);
        in = scratch;
    }
    return in;
}

static void fold_block(const struct fold *f, size_t start, size_t length) {
    _Alignas(64) char scratch[MOST_INPUTS][BLOCK_BYTES];
    _Alignas(64) char partial[BLOCK_BYTES];
    int narrow = f->half && !f->out_wide;
    void *out = f->out + start * f->out_size;
    void *sum = narrow || f->stream ? partial : out;
    const void *in[MOST_INPUTS];
    size_t inputs = 0, left = f->active;
    for (size_t k = 0; left; k++) {
        if (f->scales && is_skipped(f->scales[k], f->dtype)) continue;
        in[inputs] = prepare(f, k, start, length, scratch[inputs]);
        inputs++;
        left--;
        if (inputs < MOST_INPUTS && left) continue;
        /* `out` may be a source that is still to be read: only the last store goes there. */
        void *to = left ? partial : sum;
        if (inputs > 1)
            f->arithmetic->fold[f->combine][inputs](to, in, length);
        else if (to != in[0])
            memcpy(to, in[0], length * f->size);
        in[0] = to;
        inputs = 1;
    }
    if (f->divide) f->arithmetic->divide(sum, f->divisor, length);
    if (narrow)
        f->half->round(out, sum, length);
    else if (f->stream)
        f->path->stream(out, sum, length * f->size);
}

void p2pdpt_fold(int path, int dtype, int combine, void *out, int out_wide,
                 const void *const *sources, const char *wide, const double *scales, size_t count,
                 size_t length, int divide, double divisor) {
    struct fold f = {
        .path = path_of(path),
        .dtype = dtype,
        .combine = combine,
        .out_wide = out_wide,
        .out = out,
        .sources = sources,
        .wide = wide,
        .scales = scales,
        .count = count,
        .size = wide_size(dtype),
        .divisor = divisor,
    };
    f.arithmetic = &f.path->arithmetic[dtype];
    f.divide = divide && f.arithmetic->divide;
    f.half = dtype == P2PDPT_BFLOAT16  ? &f.path->bfloat16
             : dtype == P2PDPT_FLOAT16 ? &f.path->float16
                                       : NULL;
    f.out_size = f.half && !out_wide ? 2 : f.size;
    int apart = 1, scaled = 0, widened = f.half && !out_wide;
    for (size_t k = 0; k < count; k++) {
        if (scales && is_skipped(scales[k], dtype)) continue;
        f.active++;
        apart &= sources[k] != out;
        scaled |= scales && scales[k] != 1;
        widened |= f.half && !(wide && wide[k]);
    }
    size_t bytes = length * f.out_size;
    if (!f.active) {
        memset(out, 0, bytes);
        return;
    }
    int from_half = f.half && !(wide && wide[0]);
    if (count == 1 && !scaled && !f.divide && from_half == (f.half && !out_wide)) {
        copy_bytes(f.path, out, sources[0], bytes);
        return;
    }
    f.stream = f.path->stream && apart && f.out_size == f.size && bytes >= STREAM_BYTES;
    size_t block = BLOCK_BYTES / f.size;
    if (!scaled && !widened && !f.divide && !f.stream && f.active <= MOST_INPUTS && f.active > 1)
        block = length;
    /* A short first block, so that all others store to whole cache lines. */
    size_t start = 0, first = (-(uintptr_t)out & 63) / f.out_size;
    if (first && first < length / 16) {
        fold_block(&f, 0, first);
        start = first;
    }
    for (; start < length; start += block)
        fold_block(&f, start, length - start < block ? length - start : block);
#ifdef P2PDPT_HAS_AVX2
    if (f.stream) _mm_sfence();
#endif
}

void p2pdpt_copy(int path, void *out, const void *source, size_t bytes) {
    copy_bytes(path_of(path), out, source, bytes);
}
