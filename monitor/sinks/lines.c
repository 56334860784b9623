/* Formats columns as lines of CSV text (see monitor/sinks/csv.py) without Python's lock.
 *
 * A double is m * 2^e with integers m and e. So its decimals are computed with integers and rounded to nearest, ties to even, as
 * in Python. For scientific form it is multiplied by a power of ten that is cut off after 128 bits. If the cut-off bits could
 * change the result, Python formats the number. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#ifdef __FAST_MATH__
#error "This code needs NaN and Inf: compile it without -ffast-math. The package also works without this module."
#endif
#ifndef __SIZEOF_INT128__
#error "This code needs 128-bit integers. The package also works without this module."
#endif

typedef unsigned __int128 wide;

enum { TEXT, NUMBER, COUNT };

enum { MOST_DIGITS = 16, MOST_COLUMNS = 64, MOST_CHARACTERS = 40 /* of a number */ };

#define FIXED_BELOW 1e15 /* larger numbers are scientific; below, the fraction is less than 2^62 and its unit at least 2^-62 */

static const uint64_t TENS[] = {
    1ull, 10ull, 100ull, 1000ull, 10000ull, 100000ull, 1000000ull, 10000000ull, 100000000ull, 1000000000ull, 10000000000ull,
    100000000000ull, 1000000000000ull, 10000000000000ull, 100000000000000ull, 1000000000000000ull, 10000000000000000ull,
    100000000000000000ull, 1000000000000000000ull,
};

/* 10^k is high:low * 2^exponent, cut off after these 128 bits; the highest bit is set. */
typedef struct {
    uint64_t high, low;
    int64_t exponent;
} power;

/* How numbers are formatted. */
typedef struct {
    const power *powers; /* of 10^first, and so on */
    int64_t first, count;
    int ndigits;
    double fixed_from;
    PyThreadState *state; /* of the caller, which has released Python's lock */
    int failed;           /* memory for a number could not be allocated */
} form;

/* One column. Texts are stored end to end, and each row has the index of its text. */
typedef struct {
    int is;
    Py_buffer buffers[3];
    const char *characters;
    const int64_t *offsets, *index;
    Py_ssize_t texts;
    const double *values;
    const char *valid;
} column;

static char *write_digits(char *to, uint64_t number, int width) {
    for (char *at = to + width; at > to; number /= 10) {
        *--at = (char)('0' + number % 10);
    }
    return to + width;
}

static char *write_integer(char *to, uint64_t number) {
    int width = 1;
    while (width < 19 && number >= TENS[width - 1] * 10) {
        width++;
    }
    return write_digits(to, number, number >= 10000000000000000000ull ? 20 : width);
}

static char *write_fraction(char *to, uint64_t fraction, int width) {
    if (width) {
        *to++ = '.';
        to = write_digits(to, fraction, width);
    }
    return to;
}

/* A positive double as m * 2^e. */
static uint64_t split(double x, int *e) {
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    int biased = (int)(bits >> 52);
    uint64_t m = bits & ((1ull << 52) - 1);
    *e = (biased ? biased : 1) - 1075;
    return biased ? m | 1ull << 52 : m;
}

static char *write_fixed(char *to, double x, int ndigits) {
    int e;
    uint64_t m = split(x, &e), one = TENS[ndigits];
    int shift = -e; /* 3 to 62 */
    uint64_t unit = 1ull << shift, whole = m >> shift;
    wide product = (wide)(m & (unit - 1)) * one;
    uint64_t fraction = (uint64_t)(product >> shift), rest = (uint64_t)product & (unit - 1), half = unit >> 1;
    int odd = (int)((ndigits ? fraction : whole) & 1);
    fraction += rest > half || (rest == half && odd);
    if (fraction == one) {
        whole++;
        fraction = 0;
    }
    return write_fraction(write_integer(to, whole), fraction, ndigits);
}

/* x * 10^p, from 1 to 10^18, rounded. 0 if the bits cut off the power could change it. `cut` is the number before rounding. */
static int scale(double x, const form *with, int64_t p, uint64_t *rounded, uint64_t *cut) {
    int e;
    uint64_t m = split(x, &e);
    const power *ten = &with->powers[p - with->first];
    int zeros = __builtin_clzll(m);
    m <<= zeros;
    e -= zeros;
    /* The product in three words; the highest or second highest bit of the first is set. */
    wide low = (wide)m * ten->low, high = (wide)m * ten->high + (uint64_t)(low >> 64);
    uint64_t words[3] = {(uint64_t)(high >> 64), (uint64_t)high, (uint64_t)low};
    int64_t shift = -(e + ten->exponent) - 128; /* bits of the first word behind the binary point */
    if (shift < 1 || shift > 63) {
        return 0;
    }
    uint64_t whole = words[0] >> shift;
    uint64_t top = words[0] << (64 - shift) | words[1] >> shift; /* of the fraction */
    uint64_t below = words[1] << (64 - shift) | words[2] >> shift, last = words[2] << (64 - shift);
    const uint64_t half = 1ull << 63;
    int up = top >= half;
    if (p >= 0 && p <= 55) { /* nothing was cut off: 5^55 has 128 bits */
        up = top > half || (top == half && (below || last || (whole & 1)));
    } else if (top == half - 1 && below > UINT64_MAX - (1ull << (64 - shift))) {
        return 0; /* the cut-off part, less than m times the last bit of the power, may reach one half */
    }
    *cut = whole;
    *rounded = whole + (uint64_t)up;
    return 1;
}

static char *write_exponent(char *to, int64_t exponent) {
    *to++ = 'e';
    *to++ = exponent < 0 ? '-' : '+';
    uint64_t magnitude = (uint64_t)(exponent < 0 ? -exponent : exponent);
    return write_digits(to, magnitude, magnitude < 100 ? 2 : 3);
}

/* Formatted by Python, under its lock. */
static char *write_by_python(char *to, double x, form *with) {
    PyEval_RestoreThread(with->state);
    char *text = PyOS_double_to_string(x, 'e', with->ndigits, 0, NULL);
    size_t length = text == NULL ? 0 : strlen(text);
    if (text != NULL) {
        memcpy(to, text, length);
        PyMem_Free(text);
    } else {
        PyErr_Clear();
        with->failed = 1;
    }
    with->state = PyEval_SaveThread();
    return to + length;
}

static char *write_scientific(char *to, double x, form *with) {
    int e, ndigits = with->ndigits;
    uint64_t m = split(x, &e), one = TENS[ndigits], digits, cut;
    int bits = e + 64 - __builtin_clzll(m); /* 2^(bits - 1) <= x < 2^bits */
    int64_t exponent = (int64_t)floor((bits - 1) * 0.30102999566398120); /* the exponent of x, or one less */
    for (int again = 0; again < 2; again++) {
        int64_t p = ndigits - exponent;
        if (p < with->first || p >= with->first + with->count || !scale(x, with, p, &digits, &cut)) {
            break;
        }
        if (cut >= 10 * one) {
            exponent++;
            continue;
        }
        if (cut < one && digits < one) {
            break;
        }
        if (digits == 10 * one) {
            digits = one;
            exponent++;
        }
        to = write_integer(to, digits / one);
        return write_exponent(write_fraction(to, digits % one, ndigits), exponent);
    }
    return write_by_python(to, x, with);
}

static char *write_text(char *to, const char *text) {
    size_t length = strlen(text);
    memcpy(to, text, length);
    return to + length;
}

static char *write_number(char *to, double x, form *with) {
    double magnitude = fabs(x);
    if (x != x) {
        return write_text(to, "nan");
    }
    if (x == 0) {
        *to++ = '0';
        return to;
    }
    if (x < 0) {
        *to++ = '-';
    }
    if (magnitude == INFINITY) {
        return write_text(to, "inf");
    }
    if (magnitude >= with->fixed_from && magnitude < FIXED_BELOW) {
        return write_fixed(to, magnitude, with->ndigits);
    }
    return write_scientific(to, magnitude, with);
}

static char *write_count(char *to, double x) {
    if (!(fabs(x) < 9e18)) {
        return to;
    }
    if (x <= -1) {
        *to++ = '-';
    }
    return write_integer(to, (uint64_t)fabs(x));
}

static char *write_cell(char *to, const column *of, Py_ssize_t row, form *with) {
    if (of->is == TEXT) {
        int64_t start = of->offsets[of->index[row]], length = of->offsets[of->index[row] + 1] - start;
        memcpy(to, of->characters + start, (size_t)length);
        return to + length;
    }
    if (!of->valid[row]) {
        return to;
    }
    return of->is == COUNT ? write_count(to, of->values[row]) : write_number(to, of->values[row], with);
}

/* An upper bound of the characters in a column, or -1 if a cell's index is beyond the texts. */
static int64_t most_characters(const column *of, Py_ssize_t rows) {
    if (of->is != TEXT) {
        return (int64_t)rows * MOST_CHARACTERS;
    }
    int64_t all = 0;
    for (Py_ssize_t row = 0; row < rows; row++) {
        int64_t text = of->index[row];
        if (text < 0 || text >= of->texts) {
            return -1;
        }
        int64_t start = of->offsets[text], end = of->offsets[text + 1];
        if (start < 0 || end < start || end > of->buffers[0].len) {
            return -1;
        }
        all += end - start;
    }
    return all;
}

/* The elements of an array with one of `formats` and `size` bytes each; NULL, with an error set, if it has others. */
static void *buffer_of(PyObject *object, Py_buffer *buffer, const char *formats, size_t size, Py_ssize_t *count) {
    if (PyObject_GetBuffer(object, buffer, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT) < 0) {
        return NULL;
    }
    const char *format = buffer->format ? buffer->format : "B";
    if (strlen(format) != 1 || !strchr(formats, format[0]) || buffer->itemsize != (Py_ssize_t)size) {
        PyErr_Format(PyExc_ValueError, "an array of %zu bytes of %s is needed, not of %s", size, formats, format);
        return NULL;
    }
    *count = buffer->len / buffer->itemsize;
    return buffer->buf;
}

static int take_column(PyObject *given, column *into, Py_ssize_t rows) {
    PyObject *first, *second, *third = NULL;
    if (!PyTuple_Check(given)) {
        PyErr_SetString(PyExc_TypeError, "a column must be a tuple");
        return 0;
    }
    if (!PyArg_ParseTuple(given, "iOO|O", &into->is, &first, &second, &third)) {
        return 0;
    }
    Py_ssize_t counts[3] = {0, 0, 0};
    if (into->is == TEXT && third != NULL) {
        into->characters = buffer_of(first, &into->buffers[0], "B", 1, &counts[0]);
        into->offsets = into->characters ? buffer_of(second, &into->buffers[1], "lq", 8, &counts[1]) : NULL;
        into->index = into->offsets ? buffer_of(third, &into->buffers[2], "lq", 8, &counts[2]) : NULL;
        into->texts = counts[1] - 1;
        counts[1] = counts[2];
    } else if (into->is == NUMBER || into->is == COUNT) {
        into->values = buffer_of(first, &into->buffers[0], "d", 8, &counts[0]);
        into->valid = into->values ? buffer_of(second, &into->buffers[1], "?", 1, &counts[1]) : NULL;
        counts[1] = counts[0] < counts[1] ? counts[0] : counts[1];
    } else {
        PyErr_Format(PyExc_ValueError, "unknown type of column: %d", into->is);
    }
    if (!PyErr_Occurred() && counts[1] < rows) {
        PyErr_Format(PyExc_ValueError, "a column has %zd of %zd rows", counts[1], rows);
    }
    return !PyErr_Occurred();
}

static PyObject *text_of(column *columns, int width, Py_ssize_t rows, form *with, const int64_t *ends, Py_ssize_t pieces,
                         int64_t *positions) {
    int64_t room = rows * (width > 0 ? width : 1);
    for (int i = 0; i < width; i++) {
        int64_t most = most_characters(&columns[i], rows);
        if (most < 0) {
            PyErr_SetString(PyExc_IndexError, "a text index is out of range");
            return NULL;
        }
        room += most;
    }
    PyObject *text = PyByteArray_FromStringAndSize(NULL, room);
    if (text == NULL) {
        return NULL;
    }
    char *begin = PyByteArray_AsString(text), *to = begin;
    with->state = PyEval_SaveThread();
    Py_ssize_t row = 0;
    for (Py_ssize_t piece = 0; piece < pieces; piece++) {
        for (; row < ends[piece]; row++) {
            for (int i = 0; i < width; i++) {
                to = write_cell(to, &columns[i], row, with);
                *to++ = i + 1 < width ? ',' : '\n';
            }
        }
        positions[piece] = to - begin;
    }
    PyEval_RestoreThread(with->state);
    if (with->failed) {
        Py_DECREF(text);
        return PyErr_NoMemory();
    }
    if (PyByteArray_Resize(text, to - begin) < 0) {
        Py_CLEAR(text);
    }
    return text;
}

static PyObject *lines(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *given, *ends_of, *powers_of, *positions_of;
    form with;
    int first;
    if (!PyArg_ParseTuple(args, "O!OOiidO", &PyTuple_Type, &given, &ends_of, &powers_of, &first, &with.ndigits, &with.fixed_from,
                          &positions_of)) {
        return NULL;
    }
    with.state = NULL;
    with.failed = 0;
    Py_ssize_t width = PyTuple_Size(given), pieces = 0, words = 0, room = 0;
    if (width < 1 || width > MOST_COLUMNS || with.ndigits < 0 || with.ndigits > MOST_DIGITS || !(with.fixed_from >= 1e-3)) {
        return PyErr_Format(PyExc_ValueError, "%zd columns with %d decimals", width, with.ndigits);
    }
    Py_buffer ends_buffer = {0}, powers_buffer = {0}, positions_buffer = {0};
    column columns[MOST_COLUMNS];
    memset(columns, 0, sizeof columns);
    PyObject *text = NULL;
    const int64_t *ends = buffer_of(ends_of, &ends_buffer, "lq", 8, &pieces);
    with.powers = ends ? buffer_of(powers_of, &powers_buffer, "LQ", 8, &words) : NULL;
    with.first = first;
    with.count = words / 3;
    int64_t *positions = with.powers ? buffer_of(positions_of, &positions_buffer, "lq", 8, &room) : NULL;
    int sound = positions != NULL;
    if (sound && (room < pieces || positions_buffer.readonly)) {
        PyErr_SetString(PyExc_ValueError, "positions must be writable and at least as long as ends");
        sound = 0;
    }
    Py_ssize_t rows = sound && pieces ? (Py_ssize_t)ends[pieces - 1] : 0;
    for (Py_ssize_t i = 0; sound && i < pieces; i++) {
        if (ends[i] < (i ? ends[i - 1] : 0)) {
            PyErr_SetString(PyExc_ValueError, "pieces end before they begin");
            sound = 0;
        }
    }
    for (Py_ssize_t i = 0; sound && i < width; i++) {
        sound = take_column(PyTuple_GetItem(given, i), &columns[i], rows);
    }
    if (sound) {
        text = text_of(columns, (int)width, rows, &with, ends, pieces, positions);
    }
    for (Py_ssize_t i = 0; i < width; i++) {
        for (int k = 0; k < 3; k++) {
            PyBuffer_Release(&columns[i].buffers[k]);
        }
    }
    PyBuffer_Release(&ends_buffer);
    PyBuffer_Release(&powers_buffer);
    PyBuffer_Release(&positions_buffer);
    return text;
}

static PyMethodDef METHODS[] = {
    {"lines", lines, METH_VARARGS,
     "lines(columns, ends, powers, first, ndigits, fixed_from, positions) -> the text of the rows up to the last of ends"},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot SLOTS[] = {
#ifdef Py_mod_gil
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0, NULL},
};

static struct PyModuleDef MODULE = {
    PyModuleDef_HEAD_INIT, "_lines", "Lines of CSV text from columns.", 0, METHODS, SLOTS, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__lines(void) {
    return PyModuleDef_Init(&MODULE);
}
