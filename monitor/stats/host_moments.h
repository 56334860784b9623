/* Third and fourth moments of elements that are float32 or narrower, the sum of their magnitudes and the least one other than 0.
 * Included by host_kernel.c.
 *
 * Distances from a pivot near the mean are scaled to about 1, so their powers can be summed in float32: eight at a time, which then
 * are added in float64. A distance is rounded once, relative to itself, however large the mean is; powers and short sums add at
 * most a dozen roundings: each sum is right to 1e-6 of that of magnitudes.
 *
 * The first piece of the elements usually has a pivot and a scale that fit all of them. Then each piece is measured right after
 * it was read. Otherwise a second read takes those of the whole. */

#define TERMS 8
#define WIDEST 0x1p100 /* greatest magnitude for which no short sum of magnitudes leaves the range */
#define TIGHTEST 0x1p-100 /* least distance that can be scaled to 1 */
#define FARTHEST 0x1p28 /* greatest scaled distance: its fourth power is a float32 */
#define NEAREST 0.25 /* A pivot is near if it is not farther from the mean than so many standard deviations: else sums cancel. */

typedef struct {
    double cubes[LANES], fourths[LANES], abssum[LANES];
    uint32_t least[LANES]; /* one less than the bits of a magnitude: that of 0 is the greatest then */
    float pivot, scale;    /* scale: 2^-power; 0 if there is none */
    int power;
} short_sums;

/* With `selecting`, elements that are not finite are left out. With `fused`, a distance takes one operation: the scale is a power of
 * two, so it is rounded in the same place. */
static INLINE void add_terms(short_sums *to, const unsigned char *group, float pivot, float scale, int selecting, int fused) {
    float cubes[LANES], fourths[LANES], abssum[LANES];
#pragma GCC unroll 1 /* else gcc keeps lanes in 16 registers, not in vectors */
    for (int k = 0; k < LANES; k++) {
        float c = -0.0f, f = -0.0f, a = -0.0f; /* What is added to it stays as it is, so the first sums take no operation. */
        uint32_t least = to->least[k];
        for (int i = 0; i < TERMS; i++) {
            float v = load_float(group, i * LANES + k);
            float off = fused ? fmaf(v, scale, -pivot * scale) : (v - pivot) * scale;
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

static INLINE void begin_powers(short_sums *to, double mean, double lo, double hi) {
    double farthest = hi - mean > mean - lo ? hi - mean : mean - lo;
    memset(to, 0, sizeof *to);
    memset(to->least, 0xff, sizeof to->least);
    if (farthest > TIGHTEST && farthest < WIDEST) { /* not NaN */
        frexp(farthest, &to->power);
        to->pivot = (float)mean;
        to->scale = (float)ldexp(1.0, -to->power);
    }
}

static INLINE void add_piece(short_sums *to, const unsigned char *piece, size_t count, int selecting, int fused) {
    const size_t terms = (size_t)TERMS * LANES;
    float last[TERMS * LANES], pivot = to->pivot, scale = to->scale;
    size_t j = 0;
    for (; j + terms <= count; j += terms) {
        fetch_ahead_of(piece + 4 * j, 4 * terms);
        add_terms(to, piece + 4 * j, pivot, scale, selecting, fused);
    }
    if (j < count) { /* filled up with NaN, which are left out */
        memset(last, 0xff, sizeof last);
        memcpy(last, piece + 4 * j, 4 * (count - j));
        add_terms(to, (const unsigned char *)last, pivot, scale, 1, fused);
    }
}

static INLINE double finite_elements(const double *row) {
    return row[COUNT] - row[NANS] - row[POSINFS] - row[NEGINFS];
}

static INLINE void add_of_constant(double *row) {
    row[LEAST] = fabs(row[MIN]);
    row[ABSSUM] = finite_elements(row) * row[LEAST];
}

/* Whether elements were found of which all sums fit. */
static INLINE int are_narrow(const double *row) {
    double mean = row[SUM] / finite_elements(row); /* NaN, if there are none */
    return -WIDEST < row[MIN] && row[MAX] < WIDEST && (row[MAX] - mean > TIGHTEST || mean - row[MIN] > TIGHTEST);
}

/* Whether the pivot and the scale, which were chosen by some of the elements, fit all of them. */
static INLINE int fit_all(const short_sums *of, const double *row) {
    double n = row[COUNT], off = row[SUM] / n - of->pivot, above = row[MAX] - of->pivot, below = of->pivot - row[MIN];
    return of->scale > 0 && finite_elements(row) == n && off * off * n <= NEAREST * NEAREST * row[M2] &&
           ldexp(above > below ? above : below, -of->power) <= FARTHEST;
}

/* Writes the moments. The pivot is not quite the mean; powers of their difference correct for that (see higher_moments in
 * monitor/stats/partials.py). */
static INLINE void write_moments(const short_sums *of, double *row) {
    double finite = finite_elements(row), c = 0.0, f = 0.0;
    uint32_t least = UINT32_MAX;
    for (int k = 0; k < LANES; k++) {
        c += of->cubes[k];
        f += of->fourths[k];
        row[ABSSUM] += of->abssum[k];
        least = of->least[k] < least ? of->least[k] : least;
    }
    int power = of->power;
    double off = ldexp(row[SUM] / finite - of->pivot, -power), m2 = ldexp(row[M2], -2 * power), squared = finite * off * off;
    row[LEAST] = float_of(least + 1);
    row[M3] = ldexp(c - off * (3.0 * m2 + squared), 3 * power);
    row[M4] = ldexp(f - off * (4.0 * c - off * (6.0 * m2 + 3.0 * squared)), 4 * power);
}

static INLINE void add_of_format(const unsigned char *x, size_t n, enum format format, int fused, double *row) {
    short_sums to;
    begin_powers(&to, row[SUM] / finite_elements(row), row[MIN], row[MAX]);
    for (size_t i = 0; i < n; i += PIECE) {
        float widened[PIECE];
        size_t count = n - i > PIECE ? PIECE : n - i;
        const unsigned char *piece = piece_float(x, i, count, format, widened);
        if (finite_elements(row) == (double)n) { /* a separate loop */
            add_piece(&to, piece, count, 0, fused);
        } else {
            add_piece(&to, piece, count, 1, fused);
        }
    }
    write_moments(&to, row);
}

/* The second read, for the row of elements that are narrow. */
static INLINE void add_higher_moments(const void *x, size_t n, enum format format, int fused, double *row) {
    switch (format) { /* a separate loop per format, in which the format is a constant */
    case FLOAT32: add_of_format(x, n, FLOAT32, fused, row); break;
    case BFLOAT16: add_of_format(x, n, BFLOAT16, fused, row); break;
    default: add_of_format(x, n, FLOAT16, fused, row);
    }
}
