/* The loops of one compiled version. The includer defines TARGET (a function attribute) and PATH
 * (a prefix of names), and gets PATH's arithmetic for each type, and its bfloat16 conversions.
 * Written for the compiler's vectoriser: one simple loop each. */

#define GLUE_(a, b) a##_##b
#define GLUE(a, b) GLUE_(a, b)
#define NAMED(what) GLUE(PATH, what)

/* Integers wrap: computed in an unsigned type at least as wide as int, then cut. */
#define PLUS(U, a, b) ((U)(a) + (U)(b))
#define TIMES(U, a, b) ((U)(a) * (U)(b))
/* NaN wins; of equals (two zeros) the first stays. `|` keeps the loop free of branches. */
#define LESSER(U, a, b) ((((b) < (a)) | ((b) != (b))) ? (b) : (a))
#define GREATER(U, a, b) ((((b) > (a)) | ((b) != (b))) ? (b) : (a))

#define FOLDS(T, U, type, name, OP)                                                                \
    TARGET static void NAMED(name##2_##type)(void *to, const void *const *in, size_t length) {     \
        typedef T UNALIGNED element;                                                               \
        element *out = to;                                                                         \
        const element *a = in[0], *b = in[1];                                                      \
        INDEPENDENT                                                                                \
        for (size_t i = 0; i < length; i++) out[i] = (T)OP(U, a[i], b[i]);                         \
    }                                                                                              \
    TARGET static void NAMED(name##3_##type)(void *to, const void *const *in, size_t length) {     \
        typedef T UNALIGNED element;                                                               \
        element *out = to;                                                                         \
        const element *a = in[0], *b = in[1], *c = in[2];                                          \
        INDEPENDENT                                                                                \
        for (size_t i = 0; i < length; i++) {                                                      \
            T sum = (T)OP(U, a[i], b[i]);                                                          \
            out[i] = (T)OP(U, sum, c[i]);                                                          \
        }                                                                                          \
    }                                                                                              \
    TARGET static void NAMED(name##4_##type)(void *to, const void *const *in, size_t length) {     \
        typedef T UNALIGNED element;                                                               \
        element *out = to;                                                                         \
        const element *a = in[0], *b = in[1], *c = in[2], *d = in[3];                              \
        INDEPENDENT                                                                                \
        for (size_t i = 0; i < length; i++) {                                                      \
            T sum = (T)OP(U, a[i], b[i]);                                                          \
            sum = (T)OP(U, sum, c[i]);                                                             \
            out[i] = (T)OP(U, sum, d[i]);                                                          \
        }                                                                                          \
    }

/* V: what a double is first turned into. */
#define ARITHMETIC(T, U, V, type)                                                                  \
    FOLDS(T, U, type, add, PLUS)                                                                   \
    FOLDS(T, U, type, min, LESSER)                                                                 \
    FOLDS(T, U, type, max, GREATER)                                                                \
    FOLDS(T, U, type, prod, TIMES)                                                                 \
    TARGET static void NAMED(scale_##type)(void *to, const void *from, double by, size_t length) { \
        typedef T UNALIGNED element;                                                               \
        element *out = to;                                                                         \
        const element *in = from;                                                                  \
        const T factor = (T)(V)by;                                                                 \
        INDEPENDENT                                                                                \
        for (size_t i = 0; i < length; i++) out[i] = (T)TIMES(U, in[i], factor);                   \
    }

#define DIVISION(T, type)                                                                          \
    TARGET static void NAMED(divide_##type)(void *to, double by, size_t length) {                  \
        typedef T UNALIGNED element;                                                               \
        element *out = to;                                                                         \
        const T divisor = (T)by;                                                                   \
        for (size_t i = 0; i < length; i++) out[i] = out[i] / divisor;                             \
    }

ARITHMETIC(float, float, float, float32)
DIVISION(float, float32)
ARITHMETIC(double, double, double, float64)
DIVISION(double, float64)
ARITHMETIC(int8_t, uint32_t, int64_t, int8)
ARITHMETIC(uint8_t, uint32_t, int64_t, uint8)
ARITHMETIC(int16_t, uint32_t, int64_t, int16)
ARITHMETIC(int32_t, uint32_t, int64_t, int32)
ARITHMETIC(int64_t, uint64_t, int64_t, int64)

TARGET static void NAMED(widen_bfloat16)(float *to, const void *from, size_t length) {
    typedef uint16_t UNALIGNED half;
    typedef uint32_t UNALIGNED bits;
    const half *in = from;
    bits *out = (bits *)to;
    INDEPENDENT
    for (size_t i = 0; i < length; i++) out[i] = (uint32_t)in[i] << 16;
}

/* Round to nearest even; a NaN becomes quiet, lest it round to infinity. */
TARGET static void NAMED(round_bfloat16)(void *to, const float *from, size_t length) {
    typedef uint16_t UNALIGNED half;
    typedef uint32_t UNALIGNED bits;
    const bits *in = (const bits *)from;
    half *out = to;
    INDEPENDENT
    for (size_t i = 0; i < length; i++) {
        uint32_t x = in[i];
        uint32_t rounded = (x + 0x7FFF + ((x >> 16) & 1)) >> 16;
        uint32_t quiet = (x >> 16) | 0x40;
        out[i] = (uint16_t)((x & 0x7FFFFFFF) > 0x7F800000 ? quiet : rounded);
    }
}

#define FOLD_ROW(name, type) \
    { 0, 0, NAMED(name##2_##type), NAMED(name##3_##type), NAMED(name##4_##type) }
#define ARITHMETIC_OF(type, division)                                                              \
    {                                                                                              \
        .fold = {[P2PDPT_ADD] = FOLD_ROW(add, type),                                               \
                 [P2PDPT_MIN] = FOLD_ROW(min, type),                                               \
                 [P2PDPT_MAX] = FOLD_ROW(max, type),                                               \
                 [P2PDPT_PROD] = FOLD_ROW(prod, type)},                                            \
        .scale = NAMED(scale_##type), .divide = division                                           \
    }
#define ARITHMETIC_TABLE                                                                           \
    {                                                                                              \
        [P2PDPT_FLOAT32] = ARITHMETIC_OF(float32, NAMED(divide_float32)),                          \
        [P2PDPT_FLOAT64] = ARITHMETIC_OF(float64, NAMED(divide_float64)),                          \
        [P2PDPT_BFLOAT16] = ARITHMETIC_OF(float32, NAMED(divide_float32)),                         \
        [P2PDPT_FLOAT16] = ARITHMETIC_OF(float32, NAMED(divide_float32)),                          \
        [P2PDPT_INT8] = ARITHMETIC_OF(int8, NULL), [P2PDPT_UINT8] = ARITHMETIC_OF(uint8, NULL),    \
        [P2PDPT_INT16] = ARITHMETIC_OF(int16, NULL), [P2PDPT_INT32] = ARITHMETIC_OF(int32, NULL),  \
        [P2PDPT_INT64] = ARITHMETIC_OF(int64, NULL),                                               \
    }
