/* The kernel for arrays in host memory: every partial from one read of the elements (see monitor/stats/host/array_kernel.py).
 *
 * Sums are in double precision: squares of floats neither overflow nor vanish there, and no tensor has 2^53 elements. NaN fails
 * every comparison, so it does not change extremes and counts, and it shows in the sums. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "host_kernel.h"

#ifdef __FAST_MATH__
#error "This code needs NaN and Inf: compile it without -ffast-math. The package also works without this module."
#endif

#if defined(__GNUC__)
#define INLINE inline __attribute__((always_inline))
#define PREFETCH(address) __builtin_prefetch((const void *)(address))
#else
#define INLINE inline
#define PREFETCH(address) ((void)(address))
#endif

static const size_t BYTES[FORMATS] = {4, 8, 2, 2, 8};

#define LANES 16
#define LINE 64                   /* bytes of a line of the caches */
#define AHEAD 4096                /* bytes of a page of memory */
#define BLOCK ((size_t)1 << 20)   /* elements after which lanes are added up: no counter overflows, and sums stay short */
#define PIECE ((size_t)1024)      /* elements that are converted at a time: a loop of its own, which has vectors */
#define CHECKED ((size_t)16384)   /* bytes whose words are summed at a time, in a loop of its own: half a first-level cache */
#define LEAST_SQUARE 1e-200       /* least mean of squares at which even the squares of a tiny spread are not lost */
#define LEAST_SPREAD 1e-4         /* least ratio of spread to squares at which their difference has eleven digits */
#define LEAST_VARIANCE 1e-140     /* least mean square at which sums of fourth powers have all digits */
#define RELEASED ((size_t)1 << 20) /* least number of elements for which Python's lock is released */

/* Asks the caches for what lies a page behind these bytes, in the array or not. A processor by itself reads ahead no further than
 * the end of a page, and an array that the caches do not hold would be read at two thirds of the speed. */
static INLINE void fetch_ahead_of(const unsigned char *x, size_t bytes) {
    for (size_t i = 0; i < bytes; i += LINE) {
        PREFETCH((uintptr_t)x + i + AHEAD);
    }
}

static INLINE float float_of(uint32_t bits) {
    float v;
    memcpy(&v, &bits, sizeof v);
    return v;
}

static INLINE float load_float(const unsigned char *x, size_t i) {
    float v;
    memcpy(&v, x + 4 * i, sizeof v);
    return v;
}

/* The bits of a float32 without its sign: of two numbers the greater has the greater bits. */
static INLINE uint32_t magnitude_bits(const unsigned char *x, size_t i) {
    uint32_t bits;
    memcpy(&bits, x + 4 * i, sizeof bits);
    return bits & 0x7fffffffu;
}

static INLINE double load_double(const unsigned char *x, size_t i) {
    double v;
    memcpy(&v, x + 8 * i, sizeof v);
    return v;
}

static INLINE size_t piece_length(enum format format, int checking) {
    return format == BFLOAT16 || format == FLOAT16 || format == INT64 ? PIECE : checking ? CHECKED / BYTES[format] : BLOCK;
}

static INLINE float float_of_half(uint16_t half, enum format format) {
    uint32_t bits;
    if (format == BFLOAT16) {
        return float_of((uint32_t)half << 16);
    }
    uint32_t magnitude = half & 0x7fff, sign = (uint32_t)(half & 0x8000) << 16;
    uint32_t tiny = 0u - (magnitude < 0x0400), infinite = 0u - (magnitude >= 0x7c00); /* masks: no branch stops vectors */
    float subnormal = (float)(int32_t)magnitude * 0x1p-24f;
    memcpy(&bits, &subnormal, sizeof bits);
    uint32_t normal = (magnitude << 13) + (112u << 23) + (infinite & 112u << 23);
    bits = (tiny & bits) | (~tiny & normal);
    return float_of(bits | sign);
}

/* Where elements i to i + count lie in working precision, one after the other: in the array, or in `widened`. */
static INLINE const unsigned char *piece_float(const unsigned char *x, size_t i, size_t count, enum format format, float *widened) {
    if (format == FLOAT32) {
        return x + 4 * i;
    }
    fetch_ahead_of(x + 2 * i, 2 * count);
    for (size_t k = 0; k < count; k++) {
        uint16_t half;
        memcpy(&half, x + 2 * (i + k), sizeof half);
        widened[k] = float_of_half(half, format);
    }
    return (const unsigned char *)widened;
}

static INLINE const unsigned char *piece_double(const unsigned char *x, size_t i, size_t count, enum format format, double *widened) {
    if (format == FLOAT64) {
        return x + 8 * i;
    }
    fetch_ahead_of(x + 8 * i, 8 * count);
    for (size_t k = 0; k < count; k++) {
        int64_t whole;
        memcpy(&whole, x + 8 * (i + k), sizeof whole);
        widened[k] = (double)whole;
    }
    return (const unsigned char *)widened;
}

/* Of both halves of `count` numbers of 32 bits: their sum, and the sum of each times the index of its number. Sums of 16 bits fit
 * 32 for a piece. The sum of running sums counts each half as often as steps are left, without a multiplication. */
static INLINE void add_halves(uint64_t sum[2], uint64_t placed[2], const unsigned char *x, uint64_t count) {
    uint32_t sums[2][LANES] = {{0}}, running[2][LANES] = {{0}};
    uint64_t steps = count / LANES;
    for (uint64_t j = 0; j < steps; j++) {
        for (int k = 0; k < LANES; k++) {
            uint32_t number;
            memcpy(&number, x + (j * LANES + k) * sizeof number, sizeof number);
            sums[0][k] += number & 0xffff;
            sums[1][k] += number >> 16;
            running[0][k] += sums[0][k];
            running[1][k] += sums[1][k];
        }
    }
    for (int half = 0; half < 2; half++) {
        sum[half] = placed[half] = 0;
        for (uint64_t k = 0; k < LANES; k++) {
            sum[half] += sums[half][k];
            placed[half] += LANES * (steps * sums[half][k] - running[half][k]) + k * sums[half][k];
        }
        for (uint64_t j = steps * LANES; j < count; j++) {
            uint32_t number;
            memcpy(&number, x + j * sizeof number, sizeof number);
            sum[half] += number >> 16 * half & 0xffff;
            placed[half] += j * (number >> 16 * half & 0xffff);
        }
    }
}

/* Adds the words of elements i to i + count, at most a piece, and each times its number (see monitor/stats/partials.py). */
static INLINE void add_words(
    uint64_t *words, uint64_t *places, const unsigned char *x, size_t i, size_t count, enum format format) {
    const unsigned char *piece = x + i * BYTES[format];
    uint64_t sum[2], placed[2], first = BYTES[format] == 8 ? 2 * i : i, all, within;
    add_halves(sum, placed, piece, count * BYTES[format] / 4);
    if (BYTES[format] > 2) {
        all = sum[0] + (sum[1] << 16);
        within = placed[0] + (placed[1] << 16);
    } else { /* two words in each number */
        all = sum[0] + sum[1];
        within = 2 * (placed[0] + placed[1]) + sum[1];
        if (count % 2) {
            uint16_t last;
            memcpy(&last, piece + 2 * (count - 1), sizeof last);
            all += last;
            within += (count - 1) * last;
        }
    }
    *words += all;
    *places += first * all + within;
}

/* The columns of a row, in the order of monitor/stats/partials.py. */
enum {
    WRITES, COUNT, NANS, POSINFS, NEGINFS, SMALLS, MIN, MAX, SUM, SUMSQ, M2, M3, M4, ABSSUM, LEAST, EXPONENT,
    BITS_LOW, BITS_HIGH, PLACES_LOW, PLACES_HIGH, COLUMNS
};

#include "host_moments.h"
#include "host_magnitudes.h"

/* What is measured of each piece of float32s after its numbers, and the functions that do it. */
typedef struct {
    histogram *counts; /* NULL if no histogram is wanted */
    void (*count)(histogram *to, const unsigned char *piece, size_t count);
    short_sums *powers; /* NULL if no higher moments are wanted */
    void (*add)(short_sums *to, const unsigned char *piece, size_t count);
} beside;

#define REAL float
#define COUNTER int32_t
#define NAMED(x) x##_float
#define LOAD load_float
#define PIECE_AT piece_float
#define MAGNITUDE fabsf
#define EXACT 1
#include "host_pass.h"
#undef REAL
#undef COUNTER
#undef NAMED
#undef LOAD
#undef PIECE_AT
#undef MAGNITUDE
#undef EXACT

#define REAL double
#define COUNTER int64_t
#define NAMED(x) x##_double
#define LOAD load_double
#define PIECE_AT piece_double
#define MAGNITUDE fabs
#define EXACT 0
#include "host_pass.h"

static INLINE int reduce_format(
    const void *x, size_t n, enum format format, double bound, int wanted, int fused, const beside *also, double *row) {
    switch (format) { /* a separate loop per format, in which the format is a constant */
    case FLOAT32: return reduce_float(x, n, FLOAT32, bound, wanted, fused, also, row);
    case BFLOAT16: return reduce_float(x, n, BFLOAT16, bound, wanted, fused, also, row);
    case FLOAT16: return reduce_float(x, n, FLOAT16, bound, wanted, fused, also, row);
    case INT64: return reduce_double(x, n, INT64, bound, wanted, fused, NULL, row);
    default: return reduce_double(x, n, FLOAT64, bound, wanted, fused, NULL, row);
    }
}

typedef struct {
    const char *name;
    int (*reduce)(const void *x, size_t n, enum format format, double bound, int wanted, const beside *also, double *row);
    void (*moments)(const void *x, size_t n, enum format format, double *row);
    void (*add)(short_sums *to, const unsigned char *piece, size_t count);
    void (*count)(histogram *to, const unsigned char *piece, size_t count);
    void (*bins)(const histogram *from, const void *x, size_t n, enum format format, double *bins);
    void (*magnitudes)(const void *x, size_t n, enum format format, double *bins);
} kernel;

/* Functions of a kernel, compiled for some processors. `able`: whether their vectors multiply and add in one operation (`fused`),
 * and shift each element by a number of its own (`grouping`, see `count_piece`). */
#define KERNEL(processors, target, able)                                                                                         \
    target static int reduce_##processors(                                                                                       \
        const void *x, size_t n, enum format format, double bound, int wanted, const beside *also, double *row) {                \
        return reduce_format(x, n, format, bound, wanted, able, also, row);                                                      \
    }                                                                                                                            \
    target static void moments_##processors(const void *x, size_t n, enum format format, double *row) {                          \
        add_higher_moments(x, n, format, able, row);                                                                             \
    }                                                                                                                            \
    target static void add_##processors(short_sums *to, const unsigned char *piece, size_t count) {                              \
        add_piece(to, piece, count, 0, able);                                                                                    \
    }                                                                                                                            \
    target static void count_##processors(histogram *to, const unsigned char *piece, size_t count) {                             \
        count_piece(to, piece, count, able);                                                                                     \
    }                                                                                                                            \
    target static void bins_##processors(                                                                                        \
        const histogram *from, const void *x, size_t n, enum format format, double *bins) {                                      \
        write_bins(from, x, n, format, bins);                                                                                    \
    }                                                                                                                            \
    target static void magnitudes_##processors(const void *x, size_t n, enum format format, double *bins) {                      \
        count_magnitudes(x, n, format, able, bins);                                                                              \
    }
#define NAMES(processors)                                                                                                        \
    {#processors,         reduce_##processors, moments_##processors, add_##processors,                                           \
     count_##processors, bins_##processors,   magnitudes_##processors}

#if defined(__x86_64__) /* before AVX2 it has neither */
KERNEL(any, , 0)
#else
KERNEL(any, , 1)
#endif
#if defined(__GNUC__) && defined(__x86_64__)
KERNEL(avx2, __attribute__((target("avx2,fma"))), 1)
KERNEL(avx512, __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma"))), 1)
#endif

static const kernel KERNELS[] = {
#if defined(__GNUC__) && defined(__x86_64__)
    NAMES(avx512),
    NAMES(avx2),
#endif
    NAMES(any),
};
enum { KERNEL_COUNT = sizeof KERNELS / sizeof *KERNELS };

static int runs(const char *name) {
#if defined(__GNUC__) && defined(__x86_64__)
    if (!strcmp(name, "avx512")) {
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
               __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("fma");
    }
    if (!strcmp(name, "avx2")) {
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    }
#endif
    return !strcmp(name, "any");
}

static const kernel *chosen = &KERNELS[KERNEL_COUNT - 1];

static PyObject *kernels(PyObject *module, PyObject *unused) {
    (void)module;
    (void)unused;
    PyObject *names = PyList_New(0);
    for (int i = 0; names != NULL && i < KERNEL_COUNT; i++) {
        PyObject *name = runs(KERNELS[i].name) ? PyUnicode_FromString(KERNELS[i].name) : NULL;
        if (name != NULL && PyList_Append(names, name) < 0) {
            Py_CLEAR(names);
        }
        Py_XDECREF(name);
    }
    return names;
}

static PyObject *choose(PyObject *module, PyObject *name) {
    (void)module;
    const char *wanted = PyUnicode_AsUTF8AndSize(name, NULL);
    if (wanted == NULL) {
        return NULL;
    }
    for (int i = 0; i < KERNEL_COUNT; i++) {
        if (!strcmp(KERNELS[i].name, wanted) && runs(wanted)) {
            chosen = &KERNELS[i];
            Py_RETURN_NONE;
        }
    }
    return PyErr_Format(PyExc_ValueError, "no kernel %R runs on this processor", name);
}

/* Row `number` of a page: float64, COLUMNS wide, writable. NULL, with an error set, if there is no such row. */
static double *row_of(Py_buffer *page, Py_ssize_t number) {
    Py_ssize_t rows = page->len / (Py_ssize_t)(COLUMNS * sizeof(double));
    if (page->format == NULL || strcmp(page->format, "d") || page->ndim != 2 || page->shape[1] != COLUMNS) {
        PyErr_SetString(PyExc_ValueError, "a page is of float64 and has a column for each partial");
        return NULL;
    }
    if (number < 0 || number >= rows) {
        PyErr_Format(PyExc_IndexError, "row %zd of a page with %zd", number, rows);
        return NULL;
    }
    return (double *)page->buf + number * COLUMNS;
}

static int reduce_unlocked(
    const void *x, size_t n, enum format format, double bound, int wanted, double *row, double *bins) {
    double numbers[COLUMNS];
    histogram counts;
    short_sums powers;
    int apart = wanted & HIGHER && !is_wide(format);
    beside also = {bins == NULL ? NULL : &counts, chosen->count, apart ? &powers : NULL, chosen->add};
    if (bins != NULL) {
        begin_counts(&counts, n);
    }
    int first = apart ? wanted & ~HIGHER : wanted;
    int done = chosen->reduce(x, n, format, bound, first, bins != NULL || apart ? &also : NULL, numbers);
    if (done && apart && numbers[MIN] == numbers[MAX]) {
        add_of_constant(numbers);
    } else if (done && apart && are_narrow(numbers)) {
        if (fit_all(&powers, numbers)) {
            write_moments(&powers, numbers);
        } else {
            chosen->moments(x, n, format, numbers);
        }
    } else if (done && apart && numbers[MIN] < numbers[MAX]) {
        done = chosen->reduce(x, n, format, bound, wanted, NULL, numbers);
    }
    if (done) {
        memcpy(row, numbers, sizeof numbers);
    }
    if (done && bins != NULL) {
        settle_counts(&counts);
        chosen->bins(&counts, x, n, format, bins);
    }
    return done;
}

static int reduce_into_row(
    const void *x, size_t n, enum format format, double bound, int wanted, double *row, double *bins) {
    int done;
    if (n < RELEASED) {
        return reduce_unlocked(x, n, format, bound, wanted, row, bins);
    }
    Py_BEGIN_ALLOW_THREADS
    done = reduce_unlocked(x, n, format, bound, wanted, row, bins);
    Py_END_ALLOW_THREADS
    return done;
}

/* The `n` elements at an address, or in a buffer, which the caller releases. NULL, with an error set, if they are not there. */
static const void *elements_of(PyObject *given, size_t n, enum format format, Py_buffer *source) {
    const void *x = NULL;
    if (PyLong_Check(given)) {
        x = PyLong_AsVoidPtr(given);
        if (x == NULL && !PyErr_Occurred()) {
            PyErr_SetString(PyExc_ValueError, "nothing is at address 0");
        }
    } else if (PyObject_GetBuffer(given, source, PyBUF_C_CONTIGUOUS) == 0) {
        x = n <= (size_t)source->len / BYTES[format] ? source->buf : NULL;
        if (x == NULL) {
            PyErr_Format(PyExc_ValueError, "%zu elements are more than the array has", n);
        }
    }
    return PyErr_Occurred() ? NULL : x;
}

/* Whether an array has room for the histogram of elements of a format; if not, an error is set. */
static int bins_of(PyObject *given, long format, Py_buffer *bins) {
    if (format != FLOAT32 && format != BFLOAT16 && format != FLOAT16) {
        PyErr_Format(PyExc_ValueError, "no histogram of such a format: %ld", format);
    } else if (PyObject_GetBuffer(given, bins, PyBUF_WRITABLE | PyBUF_C_CONTIGUOUS | PyBUF_FORMAT) == 0 &&
               (bins->format == NULL || strcmp(bins->format, "d") || bins->len != (Py_ssize_t)(BINS * sizeof(double)))) {
        PyErr_SetString(PyExc_ValueError, "a histogram is of float64, one for each bin");
    }
    return !PyErr_Occurred();
}

static PyObject *magnitudes(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    (void)module;
    if (count != 4) {
        return PyErr_Format(PyExc_TypeError, "magnitudes takes 4 arguments, not %zd", count);
    }
    Py_buffer source = {0}, bins = {0};
    long format = PyLong_AsLong(args[0]);
    size_t n = PyLong_AsSize_t(args[2]);
    const void *x = NULL;
    if (PyErr_Occurred()) {
        return NULL;
    }
    if (bins_of(args[3], format, &bins) && (x = elements_of(args[1], n, (enum format)format, &source)) != NULL) {
        if (n < RELEASED) {
            chosen->magnitudes(x, n, (enum format)format, bins.buf);
        } else {
            Py_BEGIN_ALLOW_THREADS
            chosen->magnitudes(x, n, (enum format)format, bins.buf);
            Py_END_ALLOW_THREADS
        }
    }
    PyBuffer_Release(&source);
    PyBuffer_Release(&bins);
    return x == NULL ? NULL : Py_NewRef(Py_None);
}

static PyObject *divide(PyObject *module, PyObject *given) {
    (void)module;
    Py_buffer ends;
    if (PyObject_GetBuffer(given, &ends, PyBUF_C_CONTIGUOUS) < 0) {
        return NULL;
    }
    int fits = ends.len == (Py_ssize_t)sizeof ENDS;
    if (fits) {
        memcpy(ENDS, ends.buf, sizeof ENDS);
    } else {
        PyErr_Format(PyExc_ValueError, "the ends of %d bins are needed, as uint32", BINS);
    }
    PyBuffer_Release(&ends);
    return fits ? Py_NewRef(Py_None) : NULL;
}

static PyObject *reduce(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    (void)module;
    if (count != 7 && count != 8) {
        return PyErr_Format(PyExc_TypeError, "reduce takes 7 or 8 arguments, not %zd", count);
    }
    Py_buffer source = {0}, page = {0}, histogram = {0};
    long format = PyLong_AsLong(args[0]);
    double bound = PyFloat_AsDouble(args[1]);
    long wanted = PyLong_AsLong(args[2]);
    size_t n = PyLong_AsSize_t(args[4]);
    Py_ssize_t number = PyLong_AsSsize_t(args[6]);
    PyObject *done = NULL;
    const void *x = NULL;
    if (PyErr_Occurred()) {
        return NULL;
    }
    if (n == 0 || format < 0 || format >= FORMATS) {
        return PyErr_Format(PyExc_ValueError, "no elements, or no such format: %zu of %ld", n, format);
    }
    if (PyObject_GetBuffer(args[5], &page, PyBUF_WRITABLE | PyBUF_C_CONTIGUOUS | PyBUF_FORMAT) < 0) {
        return NULL;
    }
    double *row = row_of(&page, number);
    if (row != NULL && (count == 7 || args[7] == Py_None || bins_of(args[7], format, &histogram))) {
        x = elements_of(args[3], n, (enum format)format, &source);
    }
    if (x != NULL) {
        done = PyBool_FromLong(reduce_into_row(x, n, (enum format)format, bound, (int)wanted, row, histogram.buf));
    }
    PyBuffer_Release(&source);
    PyBuffer_Release(&histogram);
    PyBuffer_Release(&page);
    return done;
}

static PyMethodDef METHODS[] = {
    {"reduce", (PyCFunction)(void (*)(void))reduce, METH_FASTCALL,
     "reduce(format, bound, wanted, source, count, page, row, bins=None) -> whether the row, and the histogram, could be written"},
    {"magnitudes", (PyCFunction)(void (*)(void))magnitudes, METH_FASTCALL,
     "magnitudes(format, source, count, bins): writes the number of elements in each bin, as float64"},
    {"divide", divide, METH_O, "divide(ends): the bits of the greatest float32 of each bin, before the first histogram"},
    {"kernels", kernels, METH_NOARGS, "The kernels that run on this processor, the fastest first."},
    {"choose", choose, METH_O, "Have all reductions done by one of them."},
    {NULL, NULL, 0, NULL},
};

static const struct host_kernel SHARED = {COLUMNS, BINS, reduce_into_row, reduce_unlocked};

static int prepare(PyObject *module) {
    PyObject *shared = PyCapsule_New((void *)&SHARED, KERNEL_CAPSULE, NULL);
    int added = shared == NULL ? -1 : PyModule_AddObjectRef(module, KERNEL_NAME, shared);
    Py_XDECREF(shared);
    if (added < 0) {
        return -1;
    }
#if defined(__GNUC__) && defined(__x86_64__)
    __builtin_cpu_init();
#endif
    for (int i = 0; i < KERNEL_COUNT; i++) {
        if (runs(KERNELS[i].name)) {
            chosen = &KERNELS[i];
            break;
        }
    }
    return PyModule_AddIntConstant(module, "FLOAT32", FLOAT32) || PyModule_AddIntConstant(module, "FLOAT64", FLOAT64) ||
           PyModule_AddIntConstant(module, "BFLOAT16", BFLOAT16) || PyModule_AddIntConstant(module, "FLOAT16", FLOAT16) ||
           PyModule_AddIntConstant(module, "INT64", INT64) ||
           PyModule_AddIntConstant(module, "HIGHER", HIGHER) || PyModule_AddIntConstant(module, "CHECK_SUMS", CHECK_SUMS);
}

static PyModuleDef_Slot SLOTS[] = {
    {Py_mod_exec, prepare},
#ifdef Py_mod_gil
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0, NULL},
};

static struct PyModuleDef MODULE = {
    PyModuleDef_HEAD_INIT, "_host_kernel", "One read of an array in host memory.", 0, METHODS, SLOTS, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__host_kernel(void) {
    return PyModuleDef_Init(&MODULE);
}
