/* The passes over the elements of one array. Included once per working precision, with these macros defined:
 *
 *   REAL          float, or double
 *   COUNTER       a signed integer of the same width
 *   NAMED(x)      the name x has here
 *   LOAD          element i of REALs
 *   PIECE_AT      where some elements of an array lie as REALs, widened if they have 16 bits
 *   MAGNITUDE(v)  of a REAL
 *   EXACT         whether the square of a REAL is exact in double precision
 *
 * Each statistic has LANES accumulators, which compilers turn into vectors, so no element waits for the sum before it. Lanes are
 * always added up in one order, and a product is fused into a sum only where it is exact, so every processor computes the same
 * bits. With `fused`, processors can do that. */

/* Results for the elements read. If a sum is not finite, they include NaN or Inf, unless those were counted and left out. */
typedef struct {
    REAL lo, hi;
    double sum, sumsq, smalls, nans, posinfs, neginfs;
    uint64_t words, places;
} NAMED(read);

typedef struct {
    REAL lo[LANES], hi[LANES];
    double sum[LANES], sumsq[LANES];
    COUNTER smalls[LANES], nans[LANES], posinfs[LANES], neginfs[LANES];
} NAMED(lanes);

static INLINE void NAMED(add)(NAMED(lanes) *to, int k, REAL v, REAL bound, int counting, int fused) {
    int finite = !counting || MAGNITUDE(v) < INFINITY;
    REAL low = finite ? v : INFINITY, high = finite ? v : -INFINITY;
    double wide = finite ? v : 0.0;
    to->lo[k] = low < to->lo[k] ? low : to->lo[k];
    to->hi[k] = high > to->hi[k] ? high : to->hi[k];
    to->smalls[k] += MAGNITUDE(v) < bound;
    to->sum[k] += wide;
    to->sumsq[k] = fused && EXACT ? fma(wide, wide, to->sumsq[k]) : to->sumsq[k] + wide * wide;
    if (counting) {
        to->nans[k] += v != v;
        to->posinfs[k] += v == INFINITY;
        to->neginfs[k] += v == -INFINITY;
    }
}

/* Chooses the distances of higher moments by the elements read so far. */
static void NAMED(begin)(short_sums *powers, const NAMED(lanes) *of, size_t count) {
    double sum = 0.0;
    REAL lo = INFINITY, hi = -INFINITY;
    for (int k = 0; k < LANES; k++) {
        sum += of->sum[k];
        lo = of->lo[k] < lo ? of->lo[k] : lo;
        hi = of->hi[k] > hi ? of->hi[k] : hi;
    }
    begin_powers(powers, sum / (double)count, lo, hi);
}

/* Reads all elements once. With `counting`, elements that are not finite are counted and left out. What else is wanted is
 * measured a piece after its numbers: it is in the first-level cache then, and the other sums take all registers. That is the sums
 * of words, with `checking`, and what `also` names, which may be NULL. */
static INLINE NAMED(read) NAMED(read_all)(
    const unsigned char *x, size_t n, enum format format, REAL bound, int counting, int checking, int fused,
    const beside *also) {
    NAMED(read) all = {INFINITY, -INFINITY, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0, 0};
    for (size_t i = 0; i < n;) {
        size_t end = n - i > BLOCK ? i + BLOCK : n;
        NAMED(lanes) to;
        memset(&to, 0, sizeof to);
        for (int k = 0; k < LANES; k++) {
            to.lo[k] = INFINITY;
            to.hi[k] = -INFINITY;
        }
        while (i < end) {
            REAL widened[PIECE];
            size_t most = piece_length(format, checking || also != NULL), count = end - i > most ? most : end - i, j = 0;
            const unsigned char *piece = PIECE_AT(x, i, count, format, widened);
            for (; j + LANES <= count; j += LANES) {
                fetch_ahead_of(piece + sizeof(REAL) * j, sizeof(REAL) * LANES);
                for (int k = 0; k < LANES; k++) {
                    NAMED(add)(&to, k, LOAD(piece, j + k), bound, counting, fused);
                }
            }
            for (int k = 0; j < count; j++, k++) {
                NAMED(add)(&to, k, LOAD(piece, j), bound, counting, fused);
            }
            if (checking) {
                add_words(&all.words, &all.places, x, i, count, format);
            }
            if (also != NULL && also->counts != NULL) {
                also->count(also->counts, piece, count);
            }
            if (also != NULL && also->powers != NULL) {
                if (i == 0) {
                    NAMED(begin)(also->powers, &to, count);
                }
                also->add(also->powers, piece, count);
            }
            i += count;
        }
        double sum = 0.0, sumsq = 0.0;
        for (int k = 0; k < LANES; k++) {
            sum += to.sum[k];
            sumsq += to.sumsq[k];
            all.lo = to.lo[k] < all.lo ? to.lo[k] : all.lo;
            all.hi = to.hi[k] > all.hi ? to.hi[k] : all.hi;
            all.smalls += (double)to.smalls[k];
            all.nans += (double)to.nans[k];
            all.posinfs += (double)to.posinfs[k];
            all.neginfs += (double)to.neginfs[k];
        }
        all.sum += sum;
        all.sumsq += sumsq;
    }
    return all;
}

/* The sum of (x - mean)^2 over the finite elements, corrected for the rounding of the mean. */
static INLINE double NAMED(centred)(const unsigned char *x, size_t n, enum format format, double mean, double finite) {
    double sum[LANES] = {0}, sumsq[LANES] = {0}, s = 0.0, q = 0.0;
    for (size_t i = 0; i < n; i += piece_length(format, 0)) {
        REAL widened[PIECE];
        size_t most = piece_length(format, 0), count = n - i > most ? most : n - i;
        const unsigned char *piece = PIECE_AT(x, i, count, format, widened);
        for (size_t j = 0; j < count; j += LANES) {
            int here = count - j < LANES ? (int)(count - j) : LANES;
            fetch_ahead_of(piece + sizeof(REAL) * j, sizeof(REAL) * LANES);
            for (int k = 0; k < here; k++) {
                REAL v = LOAD(piece, j + k);
                double off = MAGNITUDE(v) < INFINITY ? v - mean : 0.0;
                sum[k] += off;
                sumsq[k] += off * off;
            }
        }
    }
    for (int k = 0; k < LANES; k++) {
        s += sum[k];
        q += sumsq[k];
    }
    double rest = q - s * s / finite;
    return rest > 0.0 ? rest : 0.0;
}

typedef struct {
    double sum[LANES], sumsq[LANES], cubes[LANES], fourths[LANES], abssum[LANES];
    REAL least[LANES];
} NAMED(powers);

static INLINE void NAMED(add_powers)(NAMED(powers) *to, int k, REAL v, double mean, int selecting) {
    REAL magnitude = MAGNITUDE(v), other = magnitude > 0 ? magnitude : INFINITY; /* NaN is not greater */
    int kept = !selecting || magnitude < INFINITY;
    double off = kept ? v - mean : 0.0, square = off * off;
    to->sum[k] += off;
    to->sumsq[k] += square;
    to->cubes[k] += square * off;
    to->fourths[k] += square * square;
    to->abssum[k] += kept ? magnitude : 0.0;
    to->least[k] = other < to->least[k] ? other : to->least[k];
}

/* Reads all elements once more. With `selecting`, elements that are not finite are left out. */
static INLINE void NAMED(read_powers)(
    const unsigned char *x, size_t n, enum format format, double mean, int selecting, NAMED(powers) *to) {
    memset(to, 0, sizeof *to);
    for (int k = 0; k < LANES; k++) {
        to->least[k] = INFINITY;
    }
    for (size_t i = 0; i < n; i += piece_length(format, 0)) {
        REAL widened[PIECE];
        size_t most = piece_length(format, 0), count = n - i > most ? most : n - i, j = 0;
        const unsigned char *piece = PIECE_AT(x, i, count, format, widened);
        for (; j + LANES <= count; j += LANES) {
            fetch_ahead_of(piece + sizeof(REAL) * j, sizeof(REAL) * LANES);
            for (int k = 0; k < LANES; k++) {
                NAMED(add_powers)(to, k, LOAD(piece, j + k), mean, selecting);
            }
        }
        for (int k = 0; j < count; j++, k++) {
            NAMED(add_powers)(to, k, LOAD(piece, j), mean, selecting);
        }
    }
}

/* Writes the sums of (x - mean)^3 and of (x - mean)^4 over the finite elements, corrected for the rounding of the mean (see
 * higher_moments in monitor/stats/partials.py), the sum of their magnitudes and the least one other than 0. Returns 0 if fourth
 * powers leave the range of their sum. */
static INLINE int NAMED(higher)(const unsigned char *x, size_t n, enum format format, double mean, double finite, double *row) {
    NAMED(powers) to;
    double s = 0.0, q = 0.0, c = 0.0, f = 0.0, least = INFINITY;
    if (finite == (double)n) {
        NAMED(read_powers)(x, n, format, mean, 0, &to);
    } else {
        NAMED(read_powers)(x, n, format, mean, 1, &to);
    }
    for (int k = 0; k < LANES; k++) {
        s += to.sum[k];
        q += to.sumsq[k];
        c += to.cubes[k];
        f += to.fourths[k];
        row[ABSSUM] += to.abssum[k];
        least = to.least[k] < least ? to.least[k] : least;
    }
    row[LEAST] = least;
    double off = s / finite, squared = finite * off * off;
    row[M3] = c - off * (3.0 * q - 2.0 * squared);
    row[M4] = f - off * (4.0 * c - off * (6.0 * q - 3.0 * squared));
    return isfinite(row[M3]) && isfinite(row[M4]) && q - squared >= finite * LEAST_VARIANCE;
}

/* Writes the whole row. Returns 0, with undefined contents of the row, if squares leave the range of their sum, or fourth powers
 * do and the higher moments are wanted. */
static INLINE int NAMED(reduce)(
    const unsigned char *x, size_t n, enum format format, double bound, int wanted, int fused, const beside *also, double *row) {
    NAMED(read) all;
    if (wanted & CHECK_SUMS) {
        all = NAMED(read_all)(x, n, format, (REAL)bound, 0, 1, fused, also);
    } else {
        all = NAMED(read_all)(x, n, format, (REAL)bound, 0, 0, fused, also);
    }
    uint64_t bits = wanted & CHECK_SUMS ? all.words + n : 0, places = all.places;
    if (!isfinite(all.sumsq)) {
        all = NAMED(read_all)(x, n, format, (REAL)bound, 1, 0, fused, NULL);
    }
    double finite = (double)n - all.nans - all.posinfs - all.neginfs;
    int in_range = isfinite(all.sumsq) && all.sumsq >= finite * LEAST_SQUARE;
    if (!in_range && !(all.lo == 0 && all.hi == 0) && finite > 0.0) {
        return 0;
    }
    double m2 = all.lo < all.hi ? all.sumsq - all.sum * all.sum / finite : 0.0;
    if (all.lo < all.hi && m2 < LEAST_SPREAD * all.sumsq) {
        m2 = NAMED(centred)(x, n, format, all.sum / finite, finite);
    }
    row[WRITES] = 1.0;
    row[COUNT] = (double)n;
    row[NANS] = all.nans;
    row[POSINFS] = all.posinfs;
    row[NEGINFS] = all.neginfs;
    row[SMALLS] = all.smalls;
    row[MIN] = all.lo == 0 ? 0.0 : all.lo; /* never minus zero */
    row[MAX] = all.hi == 0 ? 0.0 : all.hi;
    row[SUM] = all.sum;
    row[SUMSQ] = all.sumsq;
    row[M2] = m2;
    row[M3] = row[M4] = row[ABSSUM] = row[LEAST] = row[EXPONENT] = 0.0;
    row[BITS_LOW] = (double)(uint32_t)bits;
    row[BITS_HIGH] = (double)(bits >> 32);
    row[PLACES_LOW] = (double)(uint32_t)places;
    row[PLACES_HIGH] = (double)(places >> 32);
    if (!(wanted & HIGHER) || !(finite > 0.0)) {
        return 1;
    }
    if (all.lo < all.hi) {
        return NAMED(higher)(x, n, format, all.sum / finite, finite, row);
    }
    row[LEAST] = MAGNITUDE(all.lo);
    row[ABSSUM] = finite * row[LEAST];
    return 1;
}
