/* What Python may call: read by cffi as declarations, and by the C files as their header.
 * No preprocessor here but constants. The numbers equal those of p2pdpt/dtypes.py and
 * p2pdpt/topology.py; tests/test_kernels.py compares them. */

/* Raised with every change of the declarations, so that a stale module is recognised. */
#define P2PDPT_KERNELS_ABI 1

#define P2PDPT_FLOAT32 0
#define P2PDPT_FLOAT64 1
#define P2PDPT_BFLOAT16 2
#define P2PDPT_FLOAT16 3
#define P2PDPT_INT8 4
#define P2PDPT_UINT8 5
#define P2PDPT_INT16 6
#define P2PDPT_INT32 7
#define P2PDPT_INT64 8

#define P2PDPT_COPY 0
#define P2PDPT_ADD 1
#define P2PDPT_MIN 2
#define P2PDPT_MAX 3
#define P2PDPT_PROD 4

/* Which compiled version of the loops to run. */
#define P2PDPT_PLAIN 0
#define P2PDPT_AVX2 1

/* The fastest version that this processor runs. */
int p2pdpt_best_path(void);

/* Fold `count` (at least 1) sources of `length` elements into `out`, in order.
 *
 * Per element, in the wide type and rounded after every operation: the sum (or minimum, ...) of
 * scale times source, divided by `divisor`, rounded once to nearest even where `out` is half.
 * A source whose scale is zero in the wide type is not read; without any other, `out` is zero.
 *
 * out_wide, wide: half precision only: whether `out`, and each source, holds float32.
 * wide, scales: one per source, or NULL for all zero and all one.
 * divide: whether to divide, which integers ignore.
 * `out` may be one of the sources, but must not overlap one in part. */
void p2pdpt_fold(int path, int dtype, int combine, void *out, int out_wide,
                 const void *const *sources, const char *wide, const double *scales, size_t count,
                 size_t length, int divide, double divisor);

/* Copy bytes between buffers that do not overlap (or are the same). */
void p2pdpt_copy(int path, void *out, const void *source, size_t bytes);
