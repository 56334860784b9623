/* The second read of an array whose elements are float32 or narrower. Included by host_kernel.c.
 *
 * The first read has found the mean and the greatest distance from it. So distances can be scaled to at most 1, and their powers
 * summed in float32: eight at a time, which then are added in float64. A distance is rounded once, relative to itself, however
 * large the mean is; powers and short sums add at most a dozen roundings: each sum is right to 1e-6 of that of magnitudes. */

#define TERMS 8
#define WIDEST 0x1p100 /* greatest magnitude for which no short sum of magnitudes leaves the range */
#define TIGHTEST 0x1p-100 /* least distance that can be scaled to 1 */

typedef struct {
    double cubes[LANES], fourths[LANES], abssum[LANES];
    uint32_t least[LANES]; /* one less than the bits of a magnitude: that of 0 is the greatest then */
} short_sums;

/* With `selecting`, elements that are not finite are left out. */
static INLINE void add_terms(short_sums *to, const unsigned char *group, float pivot, float scale, int selecting) {
    float cubes[LANES], fourths[LANES], abssum[LANES];
#pragma GCC unroll 1 /* else gcc keeps lanes in 16 registers, not in vectors */
    for (int k = 0; k < LANES; k++) {
        float c = 0, f = 0, a = 0;
        uint32_t least = to->least[k];
        for (int i = 0; i < TERMS; i++) {
            float v = load_float(group, i * LANES + k), off = (v - pivot) * scale;
            uint32_t bits = magnitude_bits(group, i * LANES + k), kept = bits;
            if (selecting) {
                kept = bits < 0x7f800000u ? bits : 0;
                off = bits < 0x7f800000u ? off : 0;
            }
            float square = off * off;
            c += square * off;
            f += square * square;
            a += float_of(kept);
            least = kept - 1 < least ? kept - 1 : least;
        }
        cubes[k] = c;
        fourths[k] = f;
        abssum[k] = a;
        to->least[k] = least;
    }
#pragma GCC unroll 1
    for (int k = 0; k < LANES; k++) {
        to->cubes[k] += cubes[k];
        to->fourths[k] += fourths[k];
        to->abssum[k] += abssum[k];
    }
}

static INLINE void read_terms(
    const unsigned char *x, size_t n, enum format format, float pivot, float scale, int selecting, short_sums *to) {
    const size_t terms = (size_t)TERMS * LANES;
    memset(to, 0, sizeof *to);
    memset(to->least, 0xff, sizeof to->least);
    for (size_t i = 0; i < n; i += PIECE) {
        float widened[PIECE], last[TERMS * LANES];
        size_t count = n - i > PIECE ? PIECE : n - i, j = 0;
        const unsigned char *piece = piece_float(x, i, count, format, widened);
        for (; j + terms <= count; j += terms) {
            fetch_ahead_of(piece + 4 * j, 4 * terms);
            add_terms(to, piece + 4 * j, pivot, scale, selecting);
        }
        if (j < count) { /* filled up with NaN, which are left out */
            memset(last, 0xff, sizeof last);
            memcpy(last, piece + 4 * j, 4 * (count - j));
            add_terms(to, (const unsigned char *)last, pivot, scale, 1);
        }
    }
}

static INLINE double finite_elements(const double *row) {
    return row[COUNT] - row[NANS] - row[POSINFS] - row[NEGINFS];
}

static INLINE void add_of_constant(double *row) {
    row[LEAST] = fabs(row[MIN]);
    row[ABSSUM] = finite_elements(row) * row[LEAST];
}

/* Whether the first read has found elements of which all sums fit. */
static INLINE int are_narrow(const double *row) {
    double mean = row[SUM] / finite_elements(row); /* NaN, if there are none */
    return -WIDEST < row[MIN] && row[MAX] < WIDEST && (row[MAX] - mean > TIGHTEST || mean - row[MIN] > TIGHTEST);
}

static INLINE void add_of_format(const unsigned char *x, size_t n, enum format format, double *row) {
    double finite = finite_elements(row), mean = row[SUM] / finite, c = 0.0, f = 0.0;
    short_sums to;
    uint32_t least = UINT32_MAX;
    int power;
    frexp(row[MAX] - mean > mean - row[MIN] ? row[MAX] - mean : mean - row[MIN], &power);
    float pivot = (float)mean, scale = (float)ldexp(1.0, -power);
    if (finite == (double)n) {
        read_terms(x, n, format, pivot, scale, 0, &to);
    } else {
        read_terms(x, n, format, pivot, scale, 1, &to);
    }
    for (int k = 0; k < LANES; k++) {
        c += to.cubes[k];
        f += to.fourths[k];
        row[ABSSUM] += to.abssum[k];
        least = to.least[k] < least ? to.least[k] : least;
    }
    double off = ldexp(mean - pivot, -power), m2 = ldexp(row[M2], -2 * power), squared = finite * off * off;
    row[LEAST] = float_of(least + 1);
    row[M3] = ldexp(c - off * (3.0 * m2 + squared), 3 * power);
    row[M4] = ldexp(f - off * (4.0 * c - off * (6.0 * m2 + 3.0 * squared)), 4 * power);
}

/* Adds third and fourth moments, the sum of magnitudes and the least one to the row of elements that are narrow. The pivot is the
 * mean, rounded; powers of their difference correct for that (see higher_moments in monitor/stats/partials.py). */
static INLINE void add_higher_moments(const void *x, size_t n, enum format format, double *row) {
    switch (format) { /* a separate loop per format, in which the format is a constant */
    case FLOAT32: add_of_format(x, n, FLOAT32, row); break;
    case BFLOAT16: add_of_format(x, n, BFLOAT16, row); break;
    default: add_of_format(x, n, FLOAT16, row);
    }
}
